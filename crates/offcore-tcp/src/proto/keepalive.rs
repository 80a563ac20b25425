//! Keep-alive (RFC 9293, 3.8.4), and paths that swallow long packets without a word (RFC 2923, 2.1).

use offcore_wire::TcpFlags;

use super::addr::ConnId;
use super::icmp::plateau;
use super::output::payload_of;
use super::packet::{Cause, Out};
use super::stack::Stack;
use super::tcb::Tcb;

/// Timeouts in a row after which long segments are suspected, not the peer (as Linux).
const SUSPICIOUS: u8 = 3;
/// What every link of IPv6 takes (RFC 8200, 5), and nearly every one of IPv4: no shorter packets are tried.
const LEAST: u16 = 1280;

/// When a peer that says nothing is asked whether it is still there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeepAlive {
    /// Microseconds of silence.
    pub idle: u64,
    /// Microseconds between two probes.
    pub interval: u64,
    /// Probes without an answer after which the connection is over.
    pub probes: u8,
}

impl Default for KeepAlive {
    /// Two hours, as RFC 9293 wants it by default; the rest as Linux.
    fn default() -> Self {
        Self { idle: 7_200_000_000, interval: 75_000_000, probes: 9 }
    }
}

/// A connection's keep-alive.
#[derive(Debug)]
pub(crate) struct Keeping {
    wanted: KeepAlive,
    pub(crate) due: u64,
    /// Probes since the peer has said anything, and when the last one went out.
    sent: u8,
    last: u64,
}

impl Keeping {
    pub(crate) fn new(now: u64, wanted: KeepAlive) -> Self {
        Self { wanted, due: now + wanted.idle, sent: 0, last: 0 }
    }
}

impl Stack {
    /// Asks a silent peer, or gives it up, when it is time.
    pub(super) fn keep_alive(&mut self, now: u64, id: ConnId, out: &mut Out) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        let tcb = &mut conn.tcb;
        // Data that is under way is its own probe.
        let asks = tcb.sender.is_idle() && tcb.is_synchronized();
        let Some(keeping) = tcb.keeping.as_mut().filter(|keeping| keeping.due <= now) else { return };
        let quiet_until = tcb.heard + keeping.wanted.idle;
        if tcb.heard > keeping.last {
            keeping.sent = 0;
        }
        if keeping.sent == 0 && quiet_until > now || !asks {
            keeping.due = quiet_until.max(now + keeping.wanted.interval.min(keeping.wanted.idle));
        } else if keeping.sent >= keeping.wanted.probes {
            self.net.abort(now, tcb, out);
            self.over(id, Cause::TimedOut, out);
        } else {
            keeping.sent += 1;
            (keeping.last, keeping.due) = (now, now + keeping.wanted.interval);
            let seq = tcb.sender.probe_seq();
            self.net.bare(now, tcb, seq, TcpFlags::ACK, out);
        }
    }
}

impl Tcb {
    /// Segments that are lost again and again may be too long for a path whose routers do not say so: shorter ones are
    /// tried.
    pub(super) fn avoid_black_hole(&mut self) {
        if self.sender.timeouts() < SUSPICIOUS {
            return;
        }
        let (remote, timestamps) = (self.key.remote().ip(), self.agreed.timestamps.is_some());
        let payload = |mtu| payload_of(mtu, remote, timestamps);
        let headers = LEAST - payload(LEAST);
        let shorter = payload(plateau(self.sender.mss() + headers).max(LEAST));
        if shorter < self.sender.mss() {
            self.sender.set_mss(shorter);
        }
    }
}

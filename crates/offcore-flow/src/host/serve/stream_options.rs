//! Conversion of the socket options in slots of streams to options of the stack.

use std::sync::atomic::Ordering;

use offcore_session::slot::{OPTIONS, Slot, number as option, wish};
use offcore_stats::time::Micros;
use offcore_tcp::proto::{Algorithm, Buffers, ConnId, ConnOptions, KeepAlive};

use crate::host::Calls;

/// The options of a session's connection that are in effect.
#[derive(Debug, Default)]
pub(super) struct AppliedOptions {
    /// Bits of [`wish`].
    bits: u32,
    /// Seconds and count of keep-alive probes.
    keep: [u32; 3],
    buffers: Buffers,
    kept: ConnOptions,
    /// `TCP_USER_TIMEOUT` and `TCP_SYNCNT`.
    timeouts: (u32, u8),
}

impl AppliedOptions {
    /// The connection was opened with these options.
    pub(super) fn set_initial_options(&mut self, kept: ConnOptions) {
        self.kept = kept;
    }

    /// Applies options of a stream that have changed. `wanted` are bits of [`wish`].
    pub(super) fn apply(&mut self, wanted: u32, slot: &Slot, conn: ConnId, calls: &mut Calls<'_>) {
        let wishes = &slot.wishes;
        let keep = [&wishes.keep_idle, &wishes.keep_interval, &wishes.keep_count]
            .map(|word| word.load(Ordering::Relaxed));
        let changed = wanted ^ self.bits;
        if changed & wish::NO_DELAY != 0 {
            let on = wanted & wish::NO_DELAY != 0;
            let _ = calls.stack.set_nodelay(calls.now, conn, on, calls.out);
        }
        let keeps = wanted & wish::KEEP_ALIVE != 0;
        if changed & wish::KEEP_ALIVE != 0 || keeps && keep != self.keep {
            let wanted = keeps.then(|| keep_alive(keep));
            let _ = calls.stack.set_keepalive(calls.now, conn, wanted, calls.out);
        }
        if changed & wish::QUICK_ACK != 0 {
            calls.stack.acknowledge_now(calls.now, conn, calls.out);
        }
        let kept = conn_options(&slot.kept.numbers(), is_v6(slot));
        if kept != self.kept && calls.stack.set_options(conn, kept).is_ok() {
            self.kept = kept;
        }
        let number = |at| option::decode(slot.kept.number(at)).unwrap_or(0);
        let syn_retries = u8::try_from(number(option::SYNCNT)).unwrap_or(u8::MAX);
        let user_timeout = number(option::USER_TIMEOUT);
        let timeouts = (user_timeout, syn_retries);
        if timeouts != self.timeouts {
            let _ = calls.stack.set_timeouts(calls.now, conn, user_timeout, syn_retries, calls.out);
        }
        (self.bits, self.keep, self.timeouts) = (wanted, keep, timeouts);
    }

    /// Applies buffer sizes that have changed.
    pub(super) fn apply_buffers(
        &mut self,
        slot: &Slot,
        is_stream: bool,
        conn: ConnId,
        calls: &mut Calls<'_>,
    ) {
        let buffers = buffers(slot, is_stream);
        if buffers != self.buffers {
            self.buffers = buffers;
            calls.stack.set_buffers(conn, buffers);
        }
    }
}

/// Returns the buffer sizes that the application has set. Datagram sockets store other options in these words.
pub(super) fn buffers(slot: &Slot, is_stream: bool) -> Buffers {
    let [send, receive] =
        [&slot.wishes.send_buffer, &slot.wishes.receive_buffer].map(|word| word.load(Ordering::Relaxed));
    let kept = |at| option::decode(slot.kept.number(at)).filter(|_| is_stream).unwrap_or(0);
    Buffers { send, receive, clamp: kept(option::WINDOW_CLAMP), unsent: kept(option::NOTSENT_LOWAT) }
}

/// Whether a session uses IPv6.
pub(super) fn is_v6(slot: &Slot) -> bool {
    slot.identity.family.load(Ordering::Relaxed) == 6
}

/// Converts the options in a slot to options of a connection.
pub(super) fn conn_options(kept: &[u32; OPTIONS], v6: bool) -> ConnOptions {
    let number = |at: usize| option::decode(kept[at]);
    let (class, hops) = if v6 { (option::TCLASS, option::HOPS) } else { (option::TOS, option::TTL) };
    let seconds = |seconds: u32| Micros::from_secs(u64::try_from(seconds.cast_signed()).unwrap_or(0));
    let defer = number(option::DEFER_ACCEPT).map_or(0, |seconds| {
        // Converts the time to a number of SYN-ACK transmissions.
        (1..=u8::MAX).find(|tries| u64::from(seconds) < 1 << tries).unwrap_or(u8::MAX)
    });
    let inverted_rate = u64::from(kept[option::PACING_RATE]) | u64::from(kept[option::PACING_RATE + 1]) << 32;
    ConnOptions {
        traffic_class: class.of(kept[class.at]).unwrap_or(0),
        hops: hops.of(kept[hops.at]).filter(|hops| *hops > 0),
        segment: number(option::MAXSEG)
            .and_then(|segment| u16::try_from(segment).ok())
            .filter(|mss| *mss > 0),
        algorithm: number(option::CONGESTION).and_then(|which| Algorithm::ALL.get(which as usize)).copied(),
        pacing_rate: (inverted_rate > 0).then_some(!inverted_rate),
        fin_timeout: number(option::LINGER2).map(seconds),
        defer: if number(option::DEFER_ACCEPT) == Some(0) { 0 } else { defer },
    }
}

/// Stores the stack's default congestion control in a slot that names none, so that `getsockopt` can read it.
pub(super) fn name_congestion(slot: &Slot, usual: Algorithm) {
    if usual != Algorithm::Cubic {
        let usual = option::encode(usual as u32);
        slot.kept.change(option::CONGESTION, |named| if named == 0 { usual } else { named });
    }
}

/// Returns keep-alive parameters. `idle` and `interval` are in seconds. A 0 selects the default.
fn keep_alive([idle, interval, count]: [u32; 3]) -> KeepAlive {
    let usual = KeepAlive::default();
    let span = |seconds: u32, usual| if seconds == 0 { usual } else { Micros::from_secs(seconds.into()) };
    KeepAlive {
        idle: span(idle, usual.idle),
        interval: span(interval, usual.interval),
        probes: if count == 0 { usual.probes } else { u8::try_from(count).unwrap_or(u8::MAX) },
    }
}

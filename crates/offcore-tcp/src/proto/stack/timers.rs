//! Timers of connections, and the time of the next one.

use offcore_stats::time::Time;
use offcore_wire::TcpFlags;

use super::Stack;
use crate::proto::addr::ConnId;
use crate::proto::flows::Entry;
use crate::proto::keepalive::KeepaliveAction;
use crate::proto::packet::{Cause, Out};
use crate::proto::receive::AckNeed;
use crate::proto::send::Due;
use crate::proto::tcb::State;

/// Maximum number of timers that expire in one call.
const EXPIRIES: usize = 64;
/// Consecutive timeouts after which a peer is given up: about 15 minutes, as on Linux.
const TIMEOUTS: u8 = 15;
/// Consecutive timeouts after which a smaller path MTU is tried (as on Linux).
const BLACK_HOLE_TIMEOUTS: u8 = 3;

impl Stack {
    /// Runs the timers that are due by `now`, and returns the next deadline.
    pub fn timers(&mut self, now: Time, out: &mut Out) {
        self.arenas.users.begin_turn(now);
        self.extend_windows();
        let mut due = arrayvec::ArrayVec::<u32, EXPIRIES>::new();
        self.conns.timers.expire(now, EXPIRIES, |index| due.push(index));
        // By reference: moving the list costs more than its entries, usually none.
        for &index in &due {
            self.conn_timer(now, index, out);
        }
        due.clear();
        self.halves.expire(now, EXPIRIES, |index| due.push(index));
        for &index in &due {
            self.half_timer(now, index, out);
        }
        self.look_after_memory(now, out);
        let flows = &mut self.flows;
        self.time_wait.expire(now, EXPIRIES, |index, key| flows.leave(key, Entry::TimeWait(index)));
        self.flows.round();
        self.net_timers(now, out);
        self.settle(now, out);
    }

    /// Returns the next deadline known now. Packets planned, sealed or written later may set an earlier one.
    pub fn deadline(&self, now: Time) -> Option<Time> {
        let deadlines = [
            self.conns.timers.next_deadline(),
            self.halves.deadline(),
            self.time_wait.next_deadline(now),
            self.net.deadline(),
            self.arenas.deadline(now),
            self.udp.deadline(),
            self.arenas.users.deadline(),
        ];
        deadlines.into_iter().flatten().min()
    }

    /// Returns a time before which no timer of a connection expires and no waiting connection extends its window. The
    /// time is not in the past after a call of [`timers`](Self::timers).
    pub fn next_conn_timer(&self) -> Option<Time> {
        let deadlines = [self.conns.timers.next_deadline(), self.arenas.users.deadline()];
        deadlines.into_iter().flatten().min()
    }

    fn conn_timer(&mut self, now: Time, index: u32, out: &mut Out) {
        let Some((id, conn)) = self.conns.at(index) else { return };
        let tcb = &mut conn.tcb;
        if tcb.asking.is_some_and(|asking| asking.due <= now) {
            return self.send_own_syn(now, id, out);
        }
        if tcb.close_timer.due().is_some_and(|due| due <= now) {
            let (may_send, is_blocked) = (tcb.sender.may_send(), tcb.sender.is_blocked_by_window());
            if tcb.close_timer.postpone(now, may_send, is_blocked) {
                return self.conns.touch(id);
            }
            let resets = tcb.close_timer.resets();
            let cause = if resets { Cause::Aborted } else { Cause::TimedOut };
            if resets || tcb.state != State::FinWait2 {
                self.net.abort(now, tcb, out);
            }
            return self.over(id, cause, out);
        }
        if tcb.trim.is_some_and(|due| due <= now) && tcb.deadline() == tcb.trim {
            tcb.trim = None;
            conn.trim(now, &mut self.arenas[conn.app], &self.config);
            if let Some(deadline) = conn.tcb.deadline() {
                self.conns.timers.set(index, deadline);
            }
            return;
        }
        if matches!(tcb.receiver.ack.need(), AckNeed::By(due) if due <= now) {
            tcb.receiver.ack.request();
        }
        if tcb.sender.user_timeout_deadline(tcb.liveness.user_timeout()) <= now {
            return self.over(id, Cause::TimedOut, out);
        }
        if tcb.sender.deadline().is_some_and(|due| due <= now) {
            match tcb.sender.timer(now) {
                Due::Nothing | Due::Plan => {}
                Due::Send(next) => conn.plan(id, next, out),
                Due::AskForWindow => {
                    let seq = tcb.sender.probe_seq();
                    self.net.bare(now, tcb, seq, TcpFlags::ACK, out);
                }
            }
            if conn.tcb.sender.timeouts() > TIMEOUTS {
                return self.over(id, Cause::TimedOut, out);
            }
            let timeouts = conn.tcb.sender.timeouts();
            if timeouts > 0 {
                self.apply_reported_mtu(now, id);
            }
            if timeouts >= BLACK_HOLE_TIMEOUTS {
                self.avoid_black_hole(now, id);
            }
        }
        self.keep_alive(now, id, out);
        self.conns.touch(id);
    }

    /// Sends a due keep-alive probe, or gives up a silent peer.
    fn keep_alive(&mut self, now: Time, id: ConnId, out: &mut Out) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        let tcb = &mut conn.tcb;
        let idle = tcb.sender.is_idle() && tcb.is_synchronized();
        match tcb.liveness.expire(now, idle) {
            KeepaliveAction::Wait => {}
            KeepaliveAction::Ask => {
                let seq = tcb.sender.probe_seq();
                self.net.bare(now, tcb, seq, TcpFlags::ACK, out);
            }
            KeepaliveAction::GiveUp => {
                self.net.abort(now, tcb, out);
                self.over(id, Cause::TimedOut, out);
            }
        }
    }
}

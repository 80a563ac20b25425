//! The end of connections, whose remaining state exists until their copies are complete.

use super::addr::ConnId;
use super::conns::Conn;
use super::flows::Entry;
use super::packet::{Cause, Event, Out};
use super::stack::Stack;
use super::tcb::State;

impl Stack {
    /// Ends a connection and notifies its application. Nothing more is sent or received.
    pub(super) fn over(&mut self, id: ConnId, cause: Cause, out: &mut Out) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        if conn.tcb.state == State::Closed {
            return;
        }
        conn.tcb.state = State::Closed;
        conn.tcb.asking = None;
        conn.tcb.close_timer.stop();
        conn.promise(0, &mut self.arenas[conn.app]);
        let key = conn.tcb.key;
        self.counts.ended(cause);
        if !conn.tcb.close_timer.is_orphan() && conn.listener.is_none() {
            conn.tcb.delivery.over(cause);
            conn.notify_closed(id, out);
        }
        // A connection that was not accepted will never be. The listener removes it when it reaches it.
        if conn.listener.is_some() {
            conn.tcb.close_timer.orphan();
        }
        self.flows.leave(&key, Entry::Conn(id.index));
        self.conns.timers.cancel(id.index);
        self.free_when_done(id);
    }

    /// Frees a connection without remaining references.
    pub(super) fn free_when_done(&mut self, id: ConnId) {
        if self.conns.get(id).is_some_and(Conn::is_free)
            && let Some(mut conn) = self.conns.remove(id)
        {
            self.counts.recovered(conn.tcb.sender.recovery.take_unreported());
            self.leave_conn(conn);
        }
    }

    /// Handles the completion of a copy of a connection that has ended.
    #[cold]
    pub(super) fn last_placed(&mut self, id: ConnId, out: &mut Out) {
        if let Some(conn) = self.conns.get_mut(id) {
            conn.notify_closed(id, out);
        }
        self.free_when_done(id);
    }
}

impl Conn {
    /// Notifies the application of the end, after all earlier notifications.
    fn notify_closed(&mut self, id: ConnId, out: &mut Out) {
        if let Some(cause) = self.tcb.delivery.take_cause()
            && !self.tcb.close_timer.is_orphan()
        {
            out.events.push(Event::Closed(id, cause));
        }
    }
}

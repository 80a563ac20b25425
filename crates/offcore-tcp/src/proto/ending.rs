//! How connections end, and what of them stays until their copies are over.

use super::addr::ConnId;
use super::conns::Conn;
use super::flows::Entry;
use super::packet::{Cause, Event, Out};
use super::stack::Stack;
use super::tcb::State;

impl Stack {
    /// The application's end of a connection learns that it is over; nothing more is sent or received.
    pub(super) fn over(&mut self, id: ConnId, cause: Cause, out: &mut Out) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        if conn.tcb.state == State::Closed {
            return;
        }
        conn.tcb.state = State::Closed;
        conn.tcb.asking = None;
        conn.tcb.give_up = None;
        conn.promise(0, &mut self.arenas[conn.app]);
        let key = conn.tcb.key;
        self.counts.ended(cause);
        if !conn.tcb.orphan && conn.listener.is_none() {
            conn.tcb.untold = Some(cause);
            conn.tell_over(id, out);
        }
        // Nobody is going to accept it; the listener forgets it when it comes to it.
        conn.tcb.orphan |= conn.listener.is_some();
        self.flows.leave(&key, Entry::Conn(id.index));
        self.wheel.cancel(id.index);
        self.free_when_done(id);
    }

    /// Frees a connection that nobody refers to.
    pub(super) fn free_when_done(&mut self, id: ConnId) {
        if self.conns.get(id).is_some_and(Conn::is_free)
            && let Some(mut conn) = self.conns.remove(id)
        {
            self.counts.recovered(conn.tcb.sender.recovery.take_untold());
            let app = conn.app;
            conn.dissolve(&mut self.arenas[app]);
            self.arenas.leave(app);
        }
    }

    /// A copy of a connection that is over is done.
    #[cold]
    pub(super) fn last_placed(&mut self, id: ConnId, out: &mut Out) {
        if let Some(conn) = self.conns.get_mut(id) {
            conn.tell_over(id, out);
        }
        self.free_when_done(id);
    }
}

impl Conn {
    /// The application learns that it is over when it has been told of everything that came before.
    fn tell_over(&mut self, id: ConnId, out: &mut Out) {
        if self.tcb.placing == 0
            && let Some(cause) = self.tcb.untold.take()
            && !self.tcb.orphan
        {
            out.events.push(Event::Closed(id, cause));
        }
    }
}

//! Applications that wait for memory get what there is.

use super::packet::{Event, Out};
use super::stack::Stack;

/// Connections that are looked after in one call, at most.
const AT_ONCE: usize = 8;

impl Stack {
    /// Gives memory to those who wait for it, as far as there is some.
    #[cold]
    pub(super) fn feed(&mut self, out: &mut Out) {
        for _ in 0..AT_ONCE.min(self.shortage.len()) {
            let Some(id) = self.shortage.next() else { return };
            let Some(conn) = self.conns.get_mut(id) else { continue };
            conn.waits = false;
            if !conn.wants_room || !conn.tcb.may_send() {
                continue;
            }
            if conn.grant_some(&mut self.arena, &self.config) {
                conn.wants_room = false;
                out.events.push(Event::Writable(id));
            } else {
                self.shortage.wait(id, conn);
            }
        }
    }
}

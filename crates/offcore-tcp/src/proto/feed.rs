//! Applications that wait for memory get what there is, and what others do not use.

use super::packet::{Event, Out};
use super::stack::Stack;

/// Connections that are looked after in one call, at most, and those that are asked for memory.
const AT_ONCE: usize = 8;
const LOOKED_AT: usize = 32;

impl Stack {
    /// Takes back what quiet connections may write ahead, from some of them in each call, while memory is short. Who wants
    /// to write asks for it again.
    #[cold]
    pub(super) fn reclaim(&mut self) {
        for _ in 0..LOOKED_AT.min(self.conns.len()) {
            self.reclaimed = (self.reclaimed + 1) % self.conns.slots() as u32;
            if let Some((_, conn)) = self.conns.at(self.reclaimed)
                && conn.tcb.trim.is_none()
            {
                conn.tx.shrink(&mut self.arena);
            }
        }
    }

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

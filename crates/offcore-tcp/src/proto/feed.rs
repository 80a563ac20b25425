//! Applications that wait for memory get what there is, and what others of their own connections do not use.

use super::arenas::App;
use super::config::Config;
use super::conns::Conns;
use super::memory;
use super::packet::{Event, Out};
use super::sockets::Sockets;
use super::stack::Stack;

/// Connections of one that are looked after in one call, at most, and those that are asked for memory.
const AT_ONCE: usize = 8;
const LOOKED_AT: usize = 32;

impl Stack {
    /// Looks after the memory of all applications.
    #[inline]
    pub(super) fn look_after_memory(&mut self, now: u64, out: &mut Out) {
        self.udp.trim(now, &mut self.arenas, &self.config);
        let (mut grown, mut short, mut waiting) = (false, false, false);
        self.arenas.look_after(|app| {
            // Who grows holds up all: one at a time.
            grown = grown || app.grow();
            let (is_short, waits) = (!memory::has_plenty(&app.arena), !app.shortage.is_empty());
            short |= is_short;
            waiting |= waits;
            is_short || waits
        });
        if short {
            self.reclaim();
        }
        if waiting {
            self.feed(out);
        }
    }

    /// Takes back what quiet connections may write ahead, from some of them in each call, while their application's memory
    /// is short. Who wants to write asks for it again.
    #[cold]
    fn reclaim(&mut self) {
        for _ in 0..LOOKED_AT.min(self.conns.len()) {
            self.reclaimed = (self.reclaimed + 1) % self.conns.slots() as u32;
            let Some((_, conn)) = self.conns.at(self.reclaimed) else { continue };
            let arena = &mut self.arenas[conn.app];
            if conn.tcb.trim.is_none() && !memory::has_plenty(arena) {
                conn.tx.shrink(arena);
            }
        }
    }

    /// Gives memory to connections that wait for it, as far as their applications have some.
    #[cold]
    fn feed(&mut self, out: &mut Out) {
        let Self { arenas, conns, udp, config, .. } = self;
        arenas.look_after(|app| {
            feed(app, conns, udp, config, out);
            true
        });
    }
}

/// The same for those of one application.
fn feed(app: &mut App, conns: &mut Conns, udp: &mut Sockets, config: &Config, out: &mut Out) {
    for _ in 0..AT_ONCE.min(app.shortage.len()) {
        let Some(id) = app.shortage.next() else { return };
        let (waits, wants_room, has_some) = if let Some(conn) = conns.get_mut(id) {
            let wanted = conn.wants_room && conn.tcb.may_send();
            let has_some = wanted && conn.grant_some(&mut app.arena, config);
            (&mut conn.waits, &mut conn.wants_room, wanted.then_some(has_some))
        } else if let Some(socket) = udp.get_mut(id) {
            let wanted = socket.wants_room && !socket.closed;
            let has_some = wanted && socket.release_asked(&mut app.arena, config);
            (&mut socket.waits, &mut socket.wants_room, wanted.then_some(has_some))
        } else {
            continue;
        };
        *waits = false;
        match has_some {
            Some(true) => {
                *wants_room = false;
                out.events.push(Event::Writable(id));
            }
            Some(false) => app.shortage.wait(id, waits),
            None => {}
        }
    }
}

//! Distributes free memory, and memory that other connections of the same application do not use, to waiting
//! connections.

use offcore_stats::time::Time;

use super::addr::ConnId;
use super::arenas::App;
use super::config::Config;
use super::conns::Conn;
use super::memory;
use super::packet::{Event, Out};
use super::receive::AckNeed;
use super::sockets::Socket;
use super::stack::Stack;
use super::windows;

/// Maximum number of connections of an application that get memory in one call: with and without spare memory.
const AT_ONCE: usize = 64;
const FEW: usize = 8;
/// Maximum number of connections that lose unused memory in one call.
const LOOKED_AT: usize = 32;

impl Stack {
    /// Manages the memory of all applications.
    #[inline]
    pub(super) fn look_after_memory(&mut self, now: Time, out: &mut Out) {
        self.udp.trim(now, &mut self.arenas, &self.config);
        let (mut grown, mut short, mut waiting) = (false, false, false);
        self.arenas.visit_changed_apps(|app| {
            // Growth blocks the worker, so only one application grows per call.
            grown = grown || app.grow();
            let (is_short, waits) = (!memory::allows_speculative_use(&app.arena), !app.shortage.is_empty());
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

    /// Reclaims unused send buffers of quiet connections while their application's memory is short. Each call handles
    /// some connections. An application that wants to write requests memory again.
    #[cold]
    fn reclaim(&mut self) {
        for _ in 0..LOOKED_AT.min(self.conns.len()) {
            let Some(conn) = self.conns.next_to_reclaim() else { continue };
            let arena = &mut self.arenas[conn.app];
            if conn.tcb.trim.is_none() && !memory::allows_speculative_use(arena) {
                conn.tx.shrink(arena);
            }
        }
    }

    /// Gives memory to connections that wait for it, if their applications have free blocks.
    #[cold]
    fn feed(&mut self, out: &mut Out) {
        let Self { arenas, conns, udp, config, .. } = self;
        arenas.visit_changed_apps(|app| {
            let most = if windows::has_spare(&app.arena) { AT_ONCE } else { FEW };
            for _ in 0..most.min(app.shortage.len()) {
                let Some(id) = app.shortage.next() else { break };
                if let Some(conn) = conns.get_mut(id) {
                    conn.waits = false;
                    // A window may promise the remaining blocks.
                    let waits = feed_writer(id, conn, app, config, out);
                    conn.fund(&mut app.arena, Some(app.shortage.len()));
                    conn.tcb.receiver.update_window();
                    let grown = conn.tcb.receiver.ack.need() == AckNeed::Now;
                    if waits || conn.lacks_window() {
                        app.shortage.wait(id, &mut conn.waits);
                    }
                    if grown {
                        conns.touch(id);
                    }
                } else if let Some(socket) = udp.get_mut(id) {
                    socket.outbox.waits = false;
                    if feed_socket(id, socket, app, config, out) {
                        app.shortage.wait(id, &mut socket.outbox.waits);
                    }
                }
            }
            true
        });
    }
}

/// Gives memory to a connection's application that waits to write. Returns whether it is still waiting.
fn feed_writer(id: ConnId, conn: &mut Conn, app: &mut App, config: &Config, out: &mut Out) -> bool {
    if !conn.wants_room || !conn.tcb.may_send() {
        return false;
    }
    if !conn.grant_some(&mut app.arena, config) {
        // A connection that has as much as its peer accepts gets room by an acknowledgement.
        return conn.is_short();
    }
    conn.wants_room = false;
    out.events.push(Event::Writable(id));
    false
}

/// Gives memory to a datagram socket's application that waits to write. Returns whether it is still waiting.
fn feed_socket(id: ConnId, socket: &mut Socket, app: &mut App, config: &Config, out: &mut Out) -> bool {
    let waits = socket.outbox.wants_room && !socket.closed;
    if !waits || !socket.release_asked(&mut app.arena, config) {
        return waits;
    }
    socket.outbox.wants_room = false;
    out.events.push(Event::Writable(id));
    false
}

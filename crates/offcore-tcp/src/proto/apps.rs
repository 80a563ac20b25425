//! Addition and removal of applications.

use std::sync::Arc;

use arrayvec::ArrayVec;
use offcore_session::{Memory, Segment, Wanted};
use offcore_stats::time::Time;

use super::addr::{AppId, ConnId};
use super::conns::Conn;
use super::memory::AppMemory;
use super::packet::Out;
use super::stack::Stack;

/// Maximum number of connections that one call resets.
const MAX_ABORTS_PER_CALL: usize = 256;

impl Stack {
    /// Adds an application of another process. Its memory grows only by [`add_memory`](Self::add_memory).
    pub fn add_app(&mut self, memory: AppMemory) -> AppId {
        self.arenas.add(memory)
    }

    /// Returns the applications of other processes that need more memory, and its kind.
    pub fn wanted_memory(&self) -> impl Iterator<Item = (AppId, Wanted)> {
        self.arenas.wanted()
    }

    /// Adds memory that was [wanted](Self::wanted_memory). `None` means that the system has none, and stops further
    /// requests. Memory that is not needed is returned, because unmapping it takes time.
    pub fn add_memory(&mut self, app: AppId, segment: Option<Segment>) -> Option<Segment> {
        self.arenas.feed(app, segment)
    }

    /// Limits the number of an application's connections, datagram sockets, listeners, and addresses without any of
    /// them. Connections that are not accepted yet, or are still ending, also count. All applications of a user
    /// together have a limit, too ([`Config::connections`](super::config::Config::connections)). Each connection,
    /// socket and listener takes 4 KiB of the user's budget.
    pub fn limit_app(&mut self, app: AppId, most: usize) {
        self.arenas.limit(app, most);
    }

    /// Sets the user of an application that has opened nothing yet. Applications of one user may share an address and
    /// port (`SO_REUSEPORT`).
    pub fn set_user(&mut self, app: AppId, user: u32) {
        self.arenas.set_user(app, user);
    }

    /// Marks an application as gone, so that it cannot open anything any more. Its open connections and sockets must be
    /// closed as usual. When the last of its connections, sockets, listeners and copies has ended, its memory is
    /// unmapped and its number may be reused. Has no effect on [`AppId::OWN`].
    pub fn remove_app(&mut self, app: AppId) {
        self.arenas.remove(app);
    }

    /// Resets up to 256 remaining connections of the [removed](Self::remove_app) application that owns this memory.
    /// They end within a second.
    pub fn abort_removed(&mut self, now: Time, memory: &Arc<Memory>, out: &mut Out) {
        let Some(app) = self.arenas.find_removed_app(memory) else { return };
        let Self { arenas, conns, .. } = self;
        let open = |index: &u32| {
            conns.at(*index).filter(|(_, conn)| !conn.tcb.close_timer.resets()).map(|(id, _)| id)
        };
        let listed = arenas.app(app).conns.iter();
        for conn in listed
            .filter_map(open)
            .take(MAX_ABORTS_PER_CALL)
            .collect::<ArrayVec<ConnId, MAX_ABORTS_PER_CALL>>()
        {
            self.abort(now, conn, out);
        }
    }

    /// Counts a new connection, and adds it to the list of its application.
    pub(super) fn enter_conn(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        self.arenas.enter(conn.app);
        let listed = &mut self.arenas.app(conn.app).conns;
        conn.listed = listed.len() as u32;
        listed.push(id.index);
    }

    /// Frees the memory of a connection that was [entered](Self::enter_conn) and has been removed.
    pub(super) fn leave_conn(&mut self, mut conn: Box<Conn>) {
        let (app, at) = (conn.app, conn.listed);
        let (bytes, packets) = (conn.tcb.receiver.next() - conn.funded, conn.tcb.receiver.ack.take_packets());
        self.arenas.users.charge_received(conn.user, bytes, packets);
        let this = self.arenas.app(app);
        conn.free_memory(&mut this.arena);
        this.conns.swap_remove(at as usize);
        // The last connection of the list has replaced it.
        let moved = this.conns.get(at as usize).and_then(|moved| self.conns.at(*moved));
        if let Some((_, moved)) = moved {
            moved.listed = at;
        }
        self.arenas.leave(app);
    }

    /// Returns the memory of an application's FIFOs, which it needs in addition to a [`slot`](Self::slot).
    ///
    /// # Panics
    /// Panics if the application is unknown.
    pub fn memory(&self, app: AppId) -> &Arc<Memory> {
        self.arenas[app].memory()
    }

    /// Returns the application that owns a connection or socket.
    pub fn app(&self, conn: ConnId) -> Option<AppId> {
        let connection = self.conns.get(conn).map(|conn| conn.app);
        connection.or_else(|| self.udp.get(conn).map(|socket| socket.app))
    }
}

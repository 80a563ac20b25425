//! Addition and removal of applications.

use std::sync::Arc;

use offcore_session::{Memory, Segment, Wanted};

use super::addr::{AppId, ConnId};
use super::conns::Conn;
use super::memory::AppMemory;
use super::packet::Out;
use super::stack::Stack;

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
    /// them. Connections that are not accepted or still ending count. The stack's own process has no limit.
    pub fn limit_app(&mut self, app: AppId, most: usize) {
        self.arenas.limit(app, most);
    }

    /// Sets the user of an application. Applications of one user may share an address and port (`SO_REUSEPORT`).
    pub fn set_user(&mut self, app: AppId, user: u32) {
        self.arenas.set_user(app, user);
    }

    /// Marks an application as gone, so that it cannot open anything any more. Its open connections and sockets must be
    /// closed as usual. When the last of its connections, sockets, listeners and copies has ended, its memory is
    /// unmapped and its number may be reused. Has no effect on [`AppId::OWN`].
    pub fn remove_app(&mut self, app: AppId) {
        self.arenas.remove(app);
    }

    /// Resets the remaining connections of an application of this memory that has [gone](Self::remove_app). Scans all
    /// connections.
    pub fn abort_gone(&mut self, now: u64, memory: &Arc<Memory>, out: &mut Out) {
        let Some(app) = self.arenas.find_removed_app(memory) else { return };
        let of = |(id, conn): (ConnId, &Conn)| (conn.app == app && !conn.tcb.resets).then_some(id);
        for conn in self.conns.iter().filter_map(of).collect::<Vec<_>>() {
            self.abort(now, conn, out);
        }
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

//! Applications come and go.

use std::sync::Arc;

use offcore_session::{Memory, Segment, Wanted};

use super::addr::{AppId, ConnId};
use super::conns::Conn;
use super::memory::AppMemory;
use super::packet::Out;
use super::stack::Stack;

impl Stack {
    /// Adds an application of another process. Its memory does not grow but by [`add_memory`](Self::add_memory).
    pub fn add_app(&mut self, memory: AppMemory) -> AppId {
        self.arenas.add(memory)
    }

    /// The applications of other processes whose memory needs more, and what.
    pub fn wanted_memory(&self) -> impl Iterator<Item = (AppId, Wanted)> {
        self.arenas.wanted()
    }

    /// Adds memory that was [wanted](Self::wanted_memory). `None`: the system has none, and is not asked again. What is not
    /// wanted comes back: to unmap it takes a while.
    pub fn add_memory(&mut self, app: AppId, segment: Option<Segment>) -> Option<Segment> {
        self.arenas.feed(app, segment)
    }

    /// How many connections, datagram sockets, listeners and addresses without any of them an application may have, those included
    /// that nobody has accepted, and that are still ending. The stack's own process has as many as there can be.
    pub fn limit_app(&mut self, app: AppId, most: usize) {
        self.arenas.limit(app, most);
    }

    /// Sets the user of an application. Applications of one user may share an address and port (`SO_REUSEPORT`).
    pub fn set_user(&mut self, app: AppId, user: u32) {
        self.arenas.set_user(app, user);
    }

    /// The application is gone: it opens nothing any more. What it has open is to be closed as ever. Its memory is unmapped,
    /// and its number may be another's, when its last connection, socket and listener, and the last copy to or from them,
    /// are over. Of [`AppId::OWN`] nothing changes.
    pub fn remove_app(&mut self, app: AppId) {
        self.arenas.remove(app);
    }

    /// Resets what an application of this memory has left that is [gone](Self::remove_app). Looks at all connections.
    pub fn abort_gone(&mut self, now: u64, memory: &Arc<Memory>, out: &mut Out) {
        let Some(app) = self.arenas.find_gone(memory) else { return };
        let of = |(id, conn): (ConnId, &Conn)| (conn.app == app && !conn.tcb.resets).then_some(id);
        for conn in self.conns.iter().filter_map(of).collect::<Vec<_>>() {
            self.abort(now, conn, out);
        }
    }

    /// The memory that an application's FIFOs are in: what it needs beside [`slot`](Self::slot).
    ///
    /// # Panics
    /// When there is no such application.
    pub fn memory(&self, app: AppId) -> &Arc<Memory> {
        self.arenas[app].memory()
    }

    /// Whose a connection or a socket is.
    pub fn app(&self, conn: ConnId) -> Option<AppId> {
        let connection = self.conns.get(conn).map(|conn| conn.app);
        connection.or_else(|| self.udp.get(conn).map(|socket| socket.app))
    }
}

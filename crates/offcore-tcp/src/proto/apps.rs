//! Applications come and go.

use std::sync::Arc;

use offcore_mem::mapping::MemoryError;
use offcore_session::Memory;

use super::addr::{AppId, ConnId};
use super::stack::Stack;

impl Stack {
    /// Adds an application, with at most `memory` bytes for its FIFOs. Maps and touches up to 64 MiB, so it is not for the
    /// data path.
    ///
    /// # Errors
    /// When there is not as much memory.
    pub fn add_app(&mut self, memory: usize) -> Result<AppId, MemoryError> {
        self.arenas.add(memory)
    }

    /// How many connections, datagram sockets, listeners and addresses without any of them an application may have, those included
    /// that nobody has accepted, and that are still ending. The stack's own process has as many as there can be.
    pub fn limit_app(&mut self, app: AppId, most: usize) {
        self.arenas.limit(app, most);
    }

    /// The application is gone: it opens nothing any more. What it has open is to be closed as ever. Its memory is unmapped,
    /// and its number may be another's, when its last connection, socket and listener, and the last copy to or from them,
    /// are over. Of [`AppId::OWN`] nothing changes.
    pub fn remove_app(&mut self, app: AppId) {
        self.arenas.remove(app);
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

//! Additional calls for a server of applications in other processes.

use std::net::IpAddr;

use offcore_session::{Fifo, Place, Tx};

use super::addr::{AppId, ConnId};
use super::config::{Buffers, Room};
use super::conns::Conn;
use super::handshake::{Half, LocalParameters};
use super::stack::Stack;

impl Stack {
    /// Sets the buffer sizes of a connection or datagram socket. Blocks and windows beyond them remain until they are
    /// used.
    pub fn set_buffers(&mut self, conn: ConnId, buffers: Buffers) {
        let Self { conns, arenas, config, .. } = self;
        if let Some(this) = conns.get_mut(conn) {
            this.set_buffers(buffers, &mut arenas[this.app], config);
        } else {
            self.set_datagram_buffers(conn, buffers);
        }
    }

    /// Sets the initial buffer sizes of a listener's future connections.
    pub fn set_listener_buffers(&mut self, listener: u32, buffers: Buffers) {
        if let Some(listener) = self.listeners.get_mut(listener) {
            listener.buffers = buffers;
        }
    }

    /// Returns this side's parameters for a connection to a listener.
    pub(super) fn local_parameters_of(&self, half: &Half) -> LocalParameters {
        let buffers = self.listeners.get(half.listener).map_or_else(Buffers::default, |this| this.buffers);
        LocalParameters::of(&self.config, buffers)
    }

    /// Returns the room of a connection or datagram socket.
    pub fn room(&self, conn: ConnId) -> Option<Room> {
        let datagrams =
            |(tx, _): (&Fifo<Tx>, _)| Room { free: tx.end() - tx.edge(), of: tx.end() - tx.released() };
        self.conns.get(conn).map(Conn::room).or_else(|| self.udp.tx(conn).map(datagrams))
    }

    /// Returns the number of bytes that the application can read, based on its last [`consumed`](Self::consumed) call.
    pub fn unread(&self, conn: ConnId) -> u64 {
        let rx = self.conns.get(conn).map(|conn| &conn.rx);
        rx.or_else(|| self.udp.rx(conn).map(|(rx, _)| rx)).map_or(0, |rx| rx.edge() - rx.released())
    }

    /// Returns whether the peer has ended its stream and all its data can be read.
    pub fn has_ended(&self, conn: ConnId) -> bool {
        self.conns.get(conn).is_some_and(|conn| conn.tcb.delivery.has_told_end())
    }

    /// Returns whether the stack has the address, even if it is tentative.
    pub fn has_address(&self, address: IpAddr) -> bool {
        self.net.has(address)
    }

    /// Returns the address and port of a datagram socket.
    pub fn datagram_address(&self, socket: ConnId) -> Option<(Option<IpAddr>, u16)> {
        self.udp.get(socket).map(|socket| (socket.address, socket.port))
    }

    /// Takes a slot without a connection, for a session that has only an address. It is returned by
    /// [`give_slot`](Self::give_slot). Until then the memory of `app` stays allocated.
    pub fn take_slot(&mut self, app: AppId) -> Option<Place> {
        if !self.arenas.is_open(app) || !self.arenas.may_enter(app) {
            return None;
        }
        let slot = self.arenas[app].take_slot()?;
        self.arenas.enter(app);
        Some(slot)
    }

    /// Returns a slot that has no connection.
    pub fn give_slot(&mut self, app: AppId, slot: Place) {
        self.arenas[app].give_slot(slot);
        self.arenas.leave(app);
    }

    /// Replaces the slot of a newly opened connection by `slot`, which was [taken](Self::take_slot) for the same
    /// application. Returns `false` if the connection has already been used, or no longer exists.
    pub fn set_slot(&mut self, conn: ConnId, slot: Place) -> bool {
        let Some(this) = self.conns.get_mut(conn) else { return false };
        if this.planned > 0 || this.tcb.delivery.is_placing() || this.tx.edge() > 0 || !this.rx.is_empty() {
            return false;
        }
        let app = this.app;
        let arena = &mut self.arenas[app];
        this.rx.discard(arena);
        this.tx.discard(arena);
        arena.give_slot(this.slot);
        (this.slot, this.rx, this.tx) = (slot, Fifo::new(slot), Fifo::new(slot));
        this.begin(arena, &self.config);
        // From now on, the slot is counted with the connection.
        self.arenas.leave(app);
        true
    }
}

//! Datagram sockets and their FIFOs.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use offcore_session::{Arena, Fifo, Memory, Place as Slot, Rx, Tx};

use super::addr::{AppId, ConnId, SOCKETS};
use super::iface::Way;

/// ICMP errors in a second, at most (RFC 1812, 4.3.2.8; as Linux).
const ERRORS: u32 = 1000;

/// A datagram whose copy to a packet is under way.
#[derive(Debug)]
pub(super) struct Outgoing {
    /// Where its header and its payload begin, and where the next datagram does.
    pub start: u64,
    pub payload: u64,
    pub peer: SocketAddr,
    pub way: Way,
}

/// A socket and its FIFOs.
#[derive(Debug)]
pub(super) struct Socket {
    /// Whose memory it uses.
    pub app: AppId,
    /// The same memory, found without a look at the application.
    pub memory: Arc<Memory>,
    pub address: Option<IpAddr>,
    pub port: u16,
    /// Whom it is connected to: nobody else is heard.
    pub peer: Option<SocketAddr>,
    pub slot: Slot,
    pub rx: Fifo<Rx>,
    pub tx: Fifo<Tx>,
    /// Where the next datagram that comes goes, and how far the application has read.
    pub next: u64,
    pub consumed: u64,
    /// Copies to the receive FIFO that have not been reported.
    pub placing: u32,
    /// How far the application has written, and how far that has been looked at.
    pub written: u64,
    pub planned: u64,
    pub in_flight: VecDeque<Outgoing>,
    pub wants_room: bool,
    /// It waits for memory, see [`Shortage`](super::shortage::Shortage).
    pub waits: bool,
    pub ready: bool,
    pub closed: bool,
}

impl Socket {
    /// Up to where everything has been sent.
    fn sent(&self) -> u64 {
        self.in_flight.front().map_or(self.planned, |oldest| oldest.start)
    }

    /// Whether it lacks memory for its buffer.
    pub(super) fn is_short(&self, buffer: u32) -> bool {
        self.tx.end() < self.sent() + u64::from(buffer)
    }

    /// Gives room for what has been sent back to the application; whether there is memory for all of its buffer.
    pub(super) fn release(&mut self, arena: &mut Arena, buffer: u32) -> bool {
        let upto = self.sent();
        if upto > self.tx.released() {
            self.tx.acked(arena, upto);
        }
        self.tx.grant(arena, upto + u64::from(buffer))
    }

    /// Whether nothing of it is left to be done.
    fn is_done(&self) -> bool {
        self.closed && self.placing == 0 && self.in_flight.is_empty() && self.planned == self.written
    }
}

/// A number, used again and again; its generation tells one socket from the next.
#[derive(Debug, Default)]
struct Numbered {
    generation: u32,
    socket: Option<Box<Socket>>,
}

/// All sockets.
#[derive(Debug, Default)]
pub(super) struct Sockets {
    slots: Vec<Numbered>,
    free: Vec<u32>,
    pub by_address: HashMap<(Option<IpAddr>, u16), u32>,
    /// Those that may have something to send.
    ready: VecDeque<u32>,
    /// The second that errors were last sent in, and how many more may be.
    errors: (u64, u32),
    /// Packets that were fragmented.
    fragmented: u64,
}

impl Sockets {
    pub(super) fn get(&self, id: ConnId) -> Option<&Socket> {
        let slot = self.slots.get(id.index.checked_sub(SOCKETS)? as usize)?;
        slot.socket.as_deref().filter(|_| slot.generation == id.generation)
    }

    pub(super) fn get_mut(&mut self, id: ConnId) -> Option<&mut Socket> {
        let slot = self.slots.get_mut(id.index.checked_sub(SOCKETS)? as usize)?;
        slot.socket.as_deref_mut().filter(|_| slot.generation == id.generation)
    }

    // What is done for a connection is not to be made longer by what is done for a socket.
    #[cold]
    pub(super) fn rx(&self, id: ConnId) -> Option<(&Fifo<Rx>, &Arc<Memory>)> {
        self.get(id).map(|socket| (&socket.rx, &socket.memory))
    }

    #[cold]
    pub(super) fn tx(&self, id: ConnId) -> Option<(&Fifo<Tx>, &Arc<Memory>)> {
        self.get(id).map(|socket| (&socket.tx, &socket.memory))
    }

    pub(super) fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    pub(super) fn id(&self, index: u32) -> ConnId {
        ConnId { index: index + SOCKETS, generation: self.slots[index as usize].generation }
    }

    /// The socket that takes datagrams of `peer`'s to an address and port: one at the address before one at all.
    pub(super) fn find(&self, to: IpAddr, port: u16, peer: SocketAddr) -> Option<ConnId> {
        let mut ids = [Some(to), None].into_iter().filter_map(|address| {
            let index = *self.by_address.get(&(address, port))?;
            Some(self.id(index))
        });
        ids.find(|id| self.get(*id).is_some_and(|socket| socket.peer.is_none_or(|only| only == peer)))
    }

    pub(super) fn insert(&mut self, socket: Box<Socket>) -> ConnId {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Numbered::default());
            self.slots.len() as u32 - 1
        });
        self.by_address.insert((socket.address, socket.port), index);
        let slot = &mut self.slots[index as usize];
        slot.generation = slot.generation.wrapping_add(1);
        slot.socket = Some(socket);
        self.id(index)
    }

    pub(super) fn make_ready(&mut self, id: ConnId) {
        if let Some(socket) = self.get_mut(id)
            && !std::mem::replace(&mut socket.ready, true)
        {
            self.ready.push_back(id.index - SOCKETS);
        }
    }

    /// How many sockets may have something to send, and the next of them.
    pub(super) fn ready(&self) -> usize {
        self.ready.len()
    }

    pub(super) fn next_ready(&mut self) -> Option<ConnId> {
        let id = self.ready.pop_front().map(|index| self.id(index))?;
        if let Some(socket) = self.get_mut(id) {
            socket.ready = false;
        }
        Some(id)
    }

    /// Takes a socket out when nothing of it is left to be done.
    pub(super) fn remove_done(&mut self, id: ConnId) -> Option<Box<Socket>> {
        self.get(id).filter(|socket| socket.is_done())?;
        let index = id.index - SOCKETS;
        self.free.push(index);
        self.slots[index as usize].socket.take()
    }

    /// Whether an ICMP error may be sent now. How many may be is by `chance`, other in each second: who asks in somebody
    /// else's name cannot count how many of the questions were answered (CVE-2020-25705).
    pub(super) fn may_complain(&mut self, now: u64, chance: impl FnOnce() -> u32) -> bool {
        let (second, left) = &mut self.errors;
        if *second != now / 1_000_000 {
            (*second, *left) = (now / 1_000_000, ERRORS / 2 + chance() % (ERRORS / 2));
        }
        *left = left.saturating_sub(1);
        *left > 0
    }

    /// The number of the next packet that is fragmented.
    pub(super) fn next_fragmented(&mut self) -> u64 {
        self.fragmented += 1;
        self.fragmented
    }
}

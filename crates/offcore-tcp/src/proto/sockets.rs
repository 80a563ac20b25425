//! Datagram sockets and their FIFOs.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use offcore_session::datagram::record_len;
use offcore_session::{Arena, Fifo, Memory, Place as Slot, Rx, Tx};

use super::addr::{AppId, ConnId, SOCKETS};
use super::ahead::Ahead;
use super::arenas::Arenas;
use super::config::{Buffers, Config};
use super::iface::Way;
use super::memory;

/// Microseconds from one sweep to the next, and sockets of a sweep in one call.
const QUIET: u64 = 1_000_000;
const TRIMMED: usize = 16;
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
    /// Sizes that the application has set.
    pub buffers: Buffers,
    pub ahead: Ahead,
    /// `touched`: used since the last sweep. `watched`: the next sweep looks at it.
    pub touched: bool,
    pub watched: bool,
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

    /// Whether it lacks memory that its application is to have.
    pub(super) fn is_short(&self) -> bool {
        self.ahead.is_short(&self.tx)
    }

    /// Frees datagrams that are sent, and grants blocks to write to. `false`: the arena lacks blocks.
    pub(super) fn release(&mut self, arena: &mut Arena, config: &Config) -> bool {
        self.free_sent(arena);
        let buffer = self.send_buffer(config);
        self.ahead.grant(&mut self.tx, arena, |_, _| buffer)
    }

    /// As [`release`](Self::release), with the blocks that the application asks for.
    pub(super) fn release_asked(&mut self, arena: &mut Arena, config: &Config) -> bool {
        self.free_sent(arena);
        let buffer = self.send_buffer(config);
        self.ahead.grant_asked(&mut self.tx, arena, |_, _| buffer)
    }

    fn free_sent(&mut self, arena: &mut Arena) {
        let upto = self.sent();
        if upto > self.tx.released() {
            self.tx.acked(arena, upto);
        }
    }

    /// The application has set the sizes of its buffers.
    pub(super) fn set_buffers(&mut self, buffers: Buffers, arena: &mut Arena, config: &Config) {
        self.buffers = buffers;
        self.ahead.resize(self.send_buffer(config), &self.tx, arena);
        self.release(arena, config);
    }

    /// The longest datagram fits, however small the application has set it: Linux takes any into an empty buffer.
    fn send_buffer(&self, config: &Config) -> u64 {
        let set = self.buffers.send(config).unwrap_or(config.send_buffer.into());
        set.max(record_len(u16::MAX) as u64)
    }

    /// Bytes that the application may leave unread.
    pub(super) fn receive_buffer(&self, config: &Config) -> u64 {
        self.buffers.receive(config).unwrap_or(config.receive_window).into()
    }

    /// Frees the blocks of a quiet socket, but for a small one to write to. `false`: some are still in use.
    fn trim(&mut self, arena: &mut Arena, config: &Config) -> bool {
        if let Ok(read) = self.rx.consumed(arena) {
            self.consumed = read;
        }
        let done = self.placing == 0 && self.next == self.consumed && self.rx.shrink(arena);
        let sent = self.planned == self.written && self.in_flight.is_empty() && self.tx.shrink(arena);
        if sent {
            self.ahead.shrink();
            if memory::has_plenty(arena) {
                self.release(arena, config);
            }
        }
        done && sent
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
    /// Sockets that may hold blocks without need; when the next sweep over them begins, and how many the present one has left.
    holders: VecDeque<u32>,
    sweep: (u64, usize),
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

    /// The socket is used: sweeps look at its memory from now on.
    pub(super) fn watch(&mut self, id: ConnId) {
        if let Some(socket) = self.get_mut(id) {
            socket.touched = true;
            if !std::mem::replace(&mut socket.watched, true) {
                self.holders.push_back(id.index - SOCKETS);
            }
        }
    }

    /// Frees blocks of sockets that were not used for a second. One call looks at a few sockets.
    pub(super) fn trim(&mut self, now: u64, arenas: &mut Arenas, config: &Config) {
        let Self { slots, holders, sweep: (due, left), .. } = self;
        if *left == 0 && (holders.is_empty() || now < *due) {
            return;
        }
        if *left == 0 {
            (*due, *left) = (now + QUIET, holders.len());
        }
        for _ in 0..TRIMMED.min(*left) {
            *left -= 1;
            let Some(index) = holders.pop_front() else { break };
            let Some(socket) = slots[index as usize].socket.as_deref_mut() else { continue };
            let used = std::mem::take(&mut socket.touched);
            socket.watched = used || !socket.trim(&mut arenas[socket.app], config);
            if socket.watched {
                holders.push_back(index);
            }
        }
    }

    /// When sockets are trimmed next.
    pub(super) fn deadline(&self) -> Option<u64> {
        let (due, left) = self.sweep;
        (!self.holders.is_empty()).then_some(if left > 0 { 0 } else { due })
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

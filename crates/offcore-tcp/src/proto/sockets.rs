//! Datagram sockets and their FIFOs.

mod inbox;
mod outbox;

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use offcore_session::datagram::record_len;
use offcore_session::undelivered::Undelivered;
use offcore_session::{Arena, Fifo, Memory, Place as Slot, Rx, Tx};
use offcore_stats::time::{Micros, Time};

use super::addr::{AppId, ConnId, SOCKETS, UserIndex, any_like, overlap};
use super::arenas::Arenas;
use super::config::{Buffers, Config};
use super::iface::ResolvedRoute;
use super::joined::{Joined, UserJoins};
use super::memory;
use super::ready::Ready;
pub(super) use inbox::Inbox;
pub(super) use outbox::{Outbox, Outgoing, Record};

/// Time between two sweeps, and the number of sockets in one call.
const QUIET: Micros = Micros::from_secs(1);
const TRIMMED: usize = 16;
/// Maximum number of ICMP errors per second (RFC 1812, 4.3.2.8; as Linux).
const ERRORS: u32 = 1000;

/// A datagram's route, with the path MTU.
#[derive(Debug, Clone, Copy)]
pub(super) struct Route {
    pub way: ResolvedRoute,
    pub mtu: u16,
}

/// `SO_REUSEADDR` and `SO_REUSEPORT` of Linux. Two sockets can have the same address and port if they belong to the
/// same user and both have the same option set.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Reuse {
    /// `SO_REUSEADDR`: the newest socket receives.
    pub address: bool,
    /// `SO_REUSEPORT`: a keyed hash of a datagram's addresses and ports selects the receiving socket.
    pub port: bool,
    /// User id of the application.
    pub user: u32,
}

impl Reuse {
    fn allows(&self, other: &Self) -> bool {
        self.user == other.user && (self.address && other.address || self.port && other.port)
    }
}

/// The peer of a connected socket, and the source address of datagrams to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Peer {
    pub address: SocketAddr,
    pub source: IpAddr,
}

/// The error queue of a socket.
#[derive(Debug, Default)]
pub(super) struct Errors {
    /// `IP_RECVERR` and `IPV6_RECVERR`.
    pub v4: bool,
    pub v6: bool,
    pub queue: VecDeque<Undelivered>,
}

/// Whether sweeps check the memory of a socket.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Activity {
    /// It holds no unneeded blocks.
    #[default]
    Quiet,
    /// It is checked in the next sweep.
    Watched,
    /// It was used since the last sweep.
    Used,
}

const _: () = assert!(size_of::<Socket>() <= memory::PRIVATE / 2);

/// A socket and its FIFOs.
#[derive(Debug)]
pub(super) struct Socket {
    /// The application whose memory it uses.
    pub app: AppId,
    pub user: UserIndex,
    /// The application's memory, without a lookup of the application.
    pub memory: Arc<Memory>,
    /// `None` is the wildcard of both families; 0.0.0.0 and `::` are the wildcards of one.
    pub address: Option<IpAddr>,
    pub port: u16,
    pub reuse: Reuse,
    /// A connected socket receives from its peer only.
    pub peer: Option<Peer>,
    pub slot: Slot,
    pub inbox: Inbox,
    pub outbox: Outbox,
    /// Buffer sizes set by the application.
    pub buffers: Buffers,
    pub activity: Activity,
    pub errors: Errors,
    pub joined: Joined,
    pub ready: bool,
    pub closed: bool,
}

impl Socket {
    /// Returns the source address of a connected socket, or the bound address. `None` is the wildcard.
    fn local(&self) -> Option<IpAddr> {
        self.peer.map_or(self.address, |peer| Some(peer.source))
    }

    /// Frees sent datagrams, and grants blocks to write to. Returns `false` if the arena lacks blocks.
    pub(super) fn release(&mut self, arena: &mut Arena, config: &Config) -> bool {
        self.outbox.release(arena, self.send_buffer(config))
    }

    /// As [`release`](Self::release), with the blocks that the application requests.
    pub(super) fn release_asked(&mut self, arena: &mut Arena, config: &Config) -> bool {
        self.outbox.release_asked(arena, self.send_buffer(config))
    }

    /// Sets the buffer sizes.
    pub(super) fn set_buffers(&mut self, buffers: Buffers, arena: &mut Arena, config: &Config) {
        self.buffers = buffers;
        self.outbox.resize(arena, self.send_buffer(config));
    }

    /// Returns the size of the send buffer. The longest datagram always fits, because Linux accepts any datagram into
    /// an empty buffer, even if the buffer is smaller.
    fn send_buffer(&self, config: &Config) -> u64 {
        let set = self.buffers.send(config).unwrap_or(config.send_buffer.into());
        set.max(record_len(u16::MAX) as u64)
    }

    /// Returns the limit of unread bytes.
    pub(super) fn receive_buffer(&self, config: &Config) -> u64 {
        self.buffers.window(config, || config.receive_window).into()
    }

    /// Frees the blocks of an idle socket, except a small one to write to. Returns `false` if some are still in use.
    fn trim(&mut self, arena: &mut Arena, config: &Config) -> bool {
        // A misuse is handled when the application calls.
        let _ = self.inbox.consumed(arena);
        let read = self.inbox.trim(arena);
        self.outbox.trim(arena, self.send_buffer(config)) && read
    }

    /// Returns whether the socket is closed and no work is left.
    fn is_done(&self) -> bool {
        self.closed && !self.inbox.is_placing() && self.outbox.is_done()
    }
}

/// A reusable slot. Its generation distinguishes successive sockets.
#[derive(Debug, Default)]
struct Numbered {
    generation: u32,
    socket: Option<Box<Socket>>,
}

/// All sockets of a stack.
#[derive(Debug, Default)]
pub(super) struct Sockets {
    slots: Vec<Numbered>,
    free: Vec<u32>,
    /// Unconnected sockets by address and port, and connected sockets by both endpoints. The newest is last.
    by_address: HashMap<(Option<IpAddr>, u16), Group>,
    by_peer: HashMap<(IpAddr, u16, SocketAddr), Vec<u32>>,
    by_port: HashMap<u16, Vec<u32>>,
    /// Sockets that may have something to send.
    pub ready: Ready,
    /// Sockets that may hold unneeded blocks, the time of the next sweep over them, and the rest of the current sweep.
    holders: VecDeque<u32>,
    sweep: (Time, usize),
    /// The second in which the last error was sent, and the remaining number of errors in that second.
    errors: (u64, u32),
    pub joins: UserJoins,
    /// The time in microseconds since 1970 when `now` was 0.
    pub unix_time: u64,
    /// Whether datagrams get the larger half of the budget.
    larger_half: bool,
    /// The number of fragmented packets.
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

    // Cold, to keep the path of connections short.
    #[cold]
    pub(super) fn rx(&self, id: ConnId) -> Option<(&Fifo<Rx>, &Arc<Memory>)> {
        self.get(id).map(|socket| (socket.inbox.fifo(), &socket.memory))
    }

    #[cold]
    pub(super) fn tx(&self, id: ConnId) -> Option<(&Fifo<Tx>, &Arc<Memory>)> {
        self.get(id).map(|socket| (socket.outbox.fifo(), &socket.memory))
    }

    pub(super) fn id(&self, index: u32) -> ConnId {
        ConnId { index: index + SOCKETS, generation: self.slots[index as usize].generation }
    }

    /// Returns the socket that receives a datagram, in Linux's order of preference: connected to `peer`, bound to the
    /// address `to`, bound to the wildcard of its family, bound to the wildcard of both. The newest of several receives
    /// it. If the newest has `SO_REUSEPORT`, `choose` selects a socket of the `SO_REUSEPORT` group: it returns an index
    /// below the given count.
    pub(super) fn find(
        &self,
        to: IpAddr,
        port: u16,
        peer: SocketAddr,
        choose: impl FnOnce(usize) -> usize,
    ) -> Option<ConnId> {
        if let Some(newest) = self.by_peer.get(&(to, port, peer)).and_then(|all| all.last()) {
            return Some(self.id(*newest));
        }
        let at = |address| self.by_address.get(&(address, port));
        let Group { all, sharing } = at(Some(to)).or_else(|| at(Some(any_like(to)))).or_else(|| at(None))?;
        let newest = all.last()?;
        let shares = sharing.len() > 1 && sharing.last() == Some(newest);
        let index = if shares { sharing.get(choose(sharing.len()))? } else { newest };
        Some(self.id(*index))
    }

    /// Returns the sockets that receive a datagram to a group or broadcast address, newest first: all sockets at the
    /// port whose address and peer match.
    pub(super) fn receivers(
        &self,
        iface: u8,
        to: IpAddr,
        port: u16,
        peer: SocketAddr,
    ) -> impl Iterator<Item = ConnId> {
        let takes = move |socket: &Socket| {
            let address = socket.local().is_none_or(|local| local == to || local == any_like(to));
            let from = socket.peer.is_none_or(|known| known.address == peer);
            address && from && socket.joined.takes(iface, to)
        };
        let all = self.by_port.get(&port).into_iter().flatten().rev();
        all.filter(move |index| self.at(**index).is_some_and(takes)).map(|index| self.id(*index))
    }

    /// Counts a datagram that was dropped for a socket.
    pub(super) fn count_lost(&mut self, id: ConnId) {
        if let Some(socket) = self.get_mut(id) {
            socket.inbox.count_lost();
        }
    }

    fn at(&self, index: u32) -> Option<&Socket> {
        self.slots.get(index as usize)?.socket.as_deref()
    }

    /// Returns whether another socket has a conflicting address and the same port. As on Linux, the wildcard conflicts
    /// with each single address. A connected socket uses its source address only, but this does not permit another
    /// user's bind: the socket may disconnect.
    pub(super) fn is_taken(&self, address: Option<IpAddr>, port: u16, reuse: &Reuse) -> bool {
        let mut others = self.by_port.get(&port).into_iter().flatten().filter_map(|index| self.at(*index));
        others.any(|other| {
            let theirs = if reuse.user == other.reuse.user { other.local() } else { other.address };
            overlap(address, theirs) && !reuse.allows(&other.reuse)
        })
    }

    /// Adds a socket to the lookup tables.
    fn enter(&mut self, index: u32) {
        let Some(socket) = self.at(index) else { return };
        let (address, port) = (socket.address, socket.port);
        match socket.peer {
            Some(peer) => self.by_peer.entry((peer.source, port, peer.address)).or_default().push(index),
            None => {
                let shares = socket.reuse.port;
                let Group { all, sharing } = self.by_address.entry((address, port)).or_default();
                all.push(index);
                sharing.extend(shares.then_some(index));
            }
        }
    }

    /// Removes a socket from the lookup tables.
    fn leave(&mut self, index: u32) {
        let Some(socket) = self.at(index) else { return };
        let (address, port) = (socket.address, socket.port);
        match socket.peer {
            Some(peer) => remove(&mut self.by_peer, &(peer.source, port, peer.address), index),
            None => {
                let Some(Group { all, sharing }) = self.by_address.get_mut(&(address, port)) else { return };
                all.retain(|other| *other != index);
                sharing.retain(|other| *other != index);
                if all.is_empty() {
                    self.by_address.remove(&(address, port));
                }
            }
        }
    }

    /// Sets or removes the peer of a socket.
    pub(super) fn set_peer(&mut self, id: ConnId, peer: Option<Peer>) {
        self.leave(id.index - SOCKETS);
        if let Some(socket) = self.get_mut(id) {
            socket.peer = peer;
        }
        self.enter(id.index - SOCKETS);
    }

    /// Frees the port of a socket.
    pub(super) fn give_port(&mut self, id: ConnId) {
        self.leave(id.index - SOCKETS);
        if let Some(port) = self.get(id).map(|socket| socket.port) {
            remove(&mut self.by_port, &port, id.index - SOCKETS);
        }
    }

    pub(super) fn insert(&mut self, socket: Box<Socket>) -> ConnId {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Numbered::default());
            self.slots.len() as u32 - 1
        });
        self.by_port.entry(socket.port).or_default().push(index);
        let slot = &mut self.slots[index as usize];
        slot.generation = slot.generation.wrapping_add(1);
        slot.socket = Some(socket);
        self.enter(index);
        self.id(index)
    }

    pub(super) fn make_ready(&mut self, id: ConnId) {
        if let Some(socket) = self.get_mut(id)
            && !std::mem::replace(&mut socket.ready, true)
        {
            let user = socket.user;
            self.ready.push(user, id.index - SOCKETS);
        }
    }

    /// Marks a socket as used, so that sweeps check its memory.
    pub(super) fn watch(&mut self, id: ConnId) {
        if let Some(socket) = self.get_mut(id)
            && std::mem::replace(&mut socket.activity, Activity::Used) == Activity::Quiet
        {
            self.holders.push_back(id.index - SOCKETS);
        }
    }

    /// Frees blocks of sockets that were idle for a second. One call checks a few sockets.
    pub(super) fn trim(&mut self, now: Time, arenas: &mut Arenas, config: &Config) {
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
            let is_used = socket.activity == Activity::Used;
            socket.activity = Activity::Quiet;
            if is_used || !socket.trim(&mut arenas[socket.app], config) {
                socket.activity = Activity::Watched;
                holders.push_back(index);
            }
        }
    }

    /// Returns the time of the next sweep.
    pub(super) fn deadline(&self) -> Option<Time> {
        let (due, left) = self.sweep;
        (!self.holders.is_empty()).then_some(if left > 0 { Time::ZERO } else { due })
    }

    /// Removes and returns the next socket of a user that may have something to send.
    pub(super) fn next_ready(&mut self, user: UserIndex) -> Option<ConnId> {
        while let Some(index) = self.ready.pop(user) {
            let id = self.id(index);
            // The number of an ended socket may belong to another user's socket now.
            if let Some(socket) = self.get_mut(id).filter(|socket| socket.user == user) {
                socket.ready = false;
                return Some(id);
            }
        }
        None
    }

    /// Removes a closed socket without remaining work.
    pub(super) fn remove_done(&mut self, id: ConnId) -> Option<Box<Socket>> {
        self.get(id).filter(|socket| socket.is_done())?;
        let index = id.index - SOCKETS;
        self.free.push(index);
        self.slots[index as usize].socket.take()
    }

    /// Returns the share of datagrams in a budget, because they have no congestion control. With an odd budget, each
    /// half gets the last packet in turn.
    pub(super) fn half(&mut self, budget: usize) -> usize {
        self.larger_half ^= true;
        (budget + usize::from(self.larger_half)) / 2
    }

    /// Returns whether an ICMP error may be sent now. The limit is random, with a new `chance` in each second, so that
    /// a sender with forged addresses cannot count the answers (CVE-2020-25705).
    pub(super) fn may_send_icmp_error(&mut self, now: Time, chance: impl FnOnce() -> u32) -> bool {
        let (second, left) = &mut self.errors;
        if *second != now.as_secs() {
            (*second, *left) = (now.as_secs(), ERRORS / 2 + chance() % (ERRORS / 2));
        }
        *left = left.saturating_sub(1);
        *left > 0
    }

    /// Returns the number of the next fragmented packet.
    pub(super) fn next_fragmented(&mut self) -> u64 {
        self.fragmented += 1;
        self.fragmented
    }
}

/// Unconnected sockets at one address and port: all of them, and the `SO_REUSEPORT` group. The newest is last.
#[derive(Debug, Default)]
struct Group {
    all: Vec<u32>,
    sharing: Vec<u32>,
}

fn remove<K: std::hash::Hash + Eq>(all: &mut HashMap<K, Vec<u32>>, key: &K, index: u32) {
    if let Some(here) = all.get_mut(key) {
        here.retain(|other| *other != index);
        if here.is_empty() {
            all.remove(key);
        }
    }
}

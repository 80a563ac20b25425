//! The connections of a stack.

use std::sync::Arc;

use offcore_session::{Arena, Fifo, Memory, Misuse, Place, Rx, Tx};
use offcore_stats::time::{Micros, Time};

use super::addr::{AppId, ConnId, SOCKETS, UserIndex};
use super::ahead::Ahead;
use super::arenas::Arenas;
use super::config::{Buffers, Config, ONE_WRITE, Room};
use super::memory;
use super::packet::{Event, Out};
use super::tcb::{State, Tcb};
use super::wheel::Wheel;

/// Time without a segment after which data behind holes is discarded.
const HOLE_TIMEOUT: Micros = Micros::from_secs(60);

const _: () = assert!(size_of::<Conn>() <= memory::PRIVATE / 2);

/// A connection and its FIFOs.
#[derive(Debug)]
pub(super) struct Conn {
    pub tcb: Tcb,
    /// The application whose memory it uses.
    pub app: AppId,
    pub user: UserIndex,
    /// Its index in the application's list of connections.
    pub listed: u32,
    /// The application's memory, without a lookup of the application.
    pub memory: Arc<Memory>,
    /// The slot that it shares with the application.
    pub slot: Place,
    /// From the peer to the application.
    pub rx: Fifo<Rx>,
    /// From the application to the peer.
    pub tx: Fifo<Tx>,
    ahead: Ahead,
    /// Small blocks that the receive window promises.
    pub promised: u32,
    /// The received position for which the promise was computed.
    pub funded: u64,
    /// Buffer sizes set by the application.
    pub buffers: Buffers,
    /// Planned packets that have not been sealed, and the application's copies to its FIFO.
    pub planned: u32,
    /// The application waits for room.
    pub wants_room: bool,
    /// It waits for memory, see [`MemoryWaiters`](super::shortage::MemoryWaiters).
    pub waits: bool,
    /// The listener that it belongs to until it is accepted.
    pub listener: Option<u32>,
}

impl Conn {
    /// Creates a connection with a slot in `arena`, the memory of `app`. Returns `None` if all slots are in use.
    pub(super) fn new(tcb: Tcb, app: AppId, user: UserIndex, arena: &mut Arena) -> Option<Box<Self>> {
        let slot = arena.take_slot()?;
        let (rx, tx) = (Fifo::new(slot), Fifo::new(slot));
        let ahead = Ahead::default();
        Some(Box::new(Self {
            tcb,
            app,
            user,
            listed: 0,
            memory: Arc::clone(arena.memory()),
            slot,
            rx,
            tx,
            ahead,
            promised: 0,
            funded: 0,
            buffers: Buffers::default(),
            planned: 0,
            wants_room: false,
            waits: false,
            listener: None,
        }))
    }

    /// Frees its memory.
    pub(super) fn free_memory(mut self: Box<Self>, arena: &mut Arena) {
        self.promise(0, arena);
        self.rx.discard(arena);
        self.tx.discard(arena);
        arena.give_slot(self.slot);
    }

    /// Grants blocks up to the application's largest need so far, limited by the send buffer: the size set by the
    /// application, or else the larger of the default and twice the congestion window.
    pub(super) fn grant(&mut self, arena: &mut Arena, config: &Config) {
        let Self { ahead, tx, tcb, buffers, .. } = self;
        ahead.limit = buffers.write_limit(tcb.sender.next());
        let buffer = |ahead: &Ahead, arena: &Arena| send_buffer(ahead, *buffers, tcb, arena, config);
        ahead.grant(tx, arena, buffer, || tcb.sender.bytes_in_two_rtts());
    }

    /// As [`grant`](Self::grant), with the blocks that the application requests.
    pub(super) fn grant_asked(&mut self, arena: &mut Arena, config: &Config) {
        let Self { ahead, tx, tcb, buffers, .. } = self;
        ahead.limit = buffers.write_limit(tcb.sender.next());
        let buffer = |ahead: &Ahead, arena: &Arena| send_buffer(ahead, *buffers, tcb, arena, config);
        ahead.grant_asked(tx, arena, buffer, || tcb.sender.bytes_in_two_rtts());
    }

    /// Prepares new FIFOs. The application can write a small amount immediately.
    pub(super) fn begin(&mut self, arena: &mut Arena, config: &Config) {
        self.ahead = Ahead::default();
        self.grant(arena, config);
    }

    /// Sets the buffer sizes.
    pub(super) fn set_buffers(&mut self, buffers: Buffers, arena: &mut Arena, config: &Config) {
        let before = std::mem::replace(&mut self.buffers, buffers);
        if buffers.send != before.send {
            let send = buffers.send(config).unwrap_or(config.send_buffer.into());
            self.ahead.resize(send, &self.tx, arena);
        }
        if (buffers.receive, buffers.clamp) != (before.receive, before.clamp) {
            self.tcb.receiver.set_promise(buffers.window(config, || config.receive_window));
        }
        self.grant(arena, config);
    }

    /// Returns whether it lacks memory that its application should have.
    pub(super) fn is_short(&self) -> bool {
        self.ahead.is_short(&self.tx)
    }

    /// Does the same as [`grant`](Self::grant), or grants a little if memory is short. Returns whether there is room
    /// now.
    pub(super) fn grant_some(&mut self, arena: &mut Arena, config: &Config) -> bool {
        self.grant_asked(arena, config);
        self.ahead.grant_some(&mut self.tx, arena)
    }

    /// Frees memory that a quiet connection does not need. If memory is short, its application has no room until it
    /// requests some.
    pub(super) fn trim(&mut self, now: Time, arena: &mut Arena, config: &Config) {
        self.tcb.sender.recovery.release();
        if self.tcb.receiver.has_holes() && !self.tcb.delivery.is_placing() {
            // After this time a peer that leaves a hole open will not fill it.
            let until = self.tcb.liveness.heard() + HOLE_TIMEOUT;
            if until > now {
                self.tcb.trim = Some(until);
            } else {
                self.tcb.receiver.renege();
                self.rx.forget(arena);
            }
        }
        if self.rx.shrink(arena) {
            // A server may have more idle connections than memory.
            self.promise(0, arena);
        }
        if self.tx.shrink(arena) {
            self.ahead.shrink();
            if memory::allows_speculative_use(arena) {
                self.grant(arena, config);
            }
        }
    }

    /// Reads how far the application has written.
    pub(super) fn written(&mut self, arena: &mut Arena, config: &Config) -> Result<(), Misuse> {
        let (written, held) = self.tx.written_and_held(arena)?;
        self.tcb.sender.written(written, &held);
        self.tcb.sender.urge(self.tx.urgent_end(arena));
        self.grant_asked(arena, config);
        Ok(())
    }

    /// Frees acknowledged data, and reports room to the application.
    #[inline]
    pub(super) fn acknowledged(&mut self, arena: &mut Arena, id: ConnId, config: &Config, out: &mut Out) {
        self.tx.acked(arena, self.tcb.sender.acknowledged());
        self.grant(arena, config);
        if std::mem::take(&mut self.wants_room) {
            out.events.push(Event::Writable(id));
        }
    }

    /// Reports room to an application that waits for data to be sent.
    #[inline]
    pub(super) fn sent(&mut self, arenas: &mut Arenas, id: ConnId, config: &Config, out: &mut Out) {
        if self.wants_room && self.buffers.unsent > 0 {
            self.wants_room = false;
            self.grant(&mut arenas[self.app], config);
            out.events.push(Event::Writable(id));
        }
    }

    /// Returns how much the application can write. With `TCP_NOTSENT_LOWAT` it has room if less than half of that limit
    /// is unsent.
    pub(super) fn room(&self) -> Room {
        let Self { tx, tcb, buffers, .. } = self;
        let (free, of) = (tx.end() - tx.edge(), tx.end() - tx.released());
        if buffers.unsent == 0 {
            // A write of up to 4096 bytes is never split. With less room the application would retry repeatedly.
            let is_enough = free >= of.min(ONE_WRITE);
            return Room { free: if is_enough { free } else { 0 }, of };
        }
        let unsent = tx.edge().saturating_sub(tcb.sender.next());
        let of = u64::from(buffers.unsent);
        Room { free: free.min(of.saturating_sub(2 * unsent)), of }
    }

    /// Notifies the application of the end of the stream, unless a copy is in flight.
    #[inline]
    pub(super) fn settle(&mut self, id: ConnId, out: &mut Out) {
        let tcb = &mut self.tcb;
        if tcb.delivery.tells_end(tcb.receiver.end()) {
            out.events.push(Event::EndOfStream(id));
        }
    }

    /// Returns whether nothing refers to it any more.
    pub(super) fn is_free(&self) -> bool {
        let Tcb { close_timer, state, delivery, .. } = &self.tcb;
        close_timer.is_orphan() && *state == State::Closed && !delivery.is_placing() && self.planned == 0
    }
}

/// Returns the size of a send buffer in bytes.
fn send_buffer(ahead: &Ahead, set: Buffers, tcb: &Tcb, arena: &Arena, config: &Config) -> u64 {
    let least = u64::from(config.send_buffer);
    set.send(config).unwrap_or_else(|| {
        if ahead.now < least {
            return least;
        }
        let window = 2 * tcb.sender.recovery.cwnd();
        ahead.most.max(window.min(config.buffer_limit(arena).into()))
    })
}

/// A reusable slot. Its generation distinguishes successive connections.
#[derive(Debug)]
struct Slot {
    generation: u32,
    conn: Option<Box<Conn>>,
}

/// Connections by number, their timers, and lists of connections to check.
#[derive(Debug)]
pub(super) struct Conns {
    slots: Vec<Slot>,
    free: Vec<u32>,
    pub timers: Wheel,
    /// Connections whose acknowledgements and timers are checked at the end of the call.
    touched: Vec<u32>,
    /// Connections that wait for address resolution, and the state of the neighbour cache at that time.
    asking_hop: (Vec<u32>, (u32, u32)),
    /// The connections that were last counted, and last checked for unused memory.
    counted: u32,
    reclaimed: u32,
}

impl Conns {
    pub(super) fn new() -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            timers: Wheel::new(Time::ZERO),
            touched: Vec::new(),
            asking_hop: Default::default(),
            counted: 0,
            reclaimed: 0,
        }
    }

    /// Returns the number of connections.
    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Returns the number of slots.
    pub(super) fn slots(&self) -> usize {
        self.slots.len()
    }

    /// Adds a connection, or returns it if all numbers are in use.
    pub(super) fn insert(&mut self, conn: Box<Conn>) -> Result<ConnId, Box<Conn>> {
        let index = match self.free.pop() {
            Some(index) => index,
            None if self.slots.len() < SOCKETS as usize - 1 => {
                self.slots.push(Slot { generation: 0, conn: None });
                self.timers.reserve(self.slots.len() as u32);
                self.slots.len() as u32 - 1
            }
            None => return Err(conn),
        };
        let slot = &mut self.slots[index as usize];
        slot.generation = slot.generation.wrapping_add(1);
        slot.conn = Some(conn);
        Ok(ConnId { index, generation: slot.generation })
    }

    pub(super) fn remove(&mut self, id: ConnId) -> Option<Box<Conn>> {
        let slot = self.slots.get_mut(id.index as usize).filter(|slot| slot.generation == id.generation)?;
        let conn = slot.conn.take()?;
        self.free.push(id.index);
        Some(conn)
    }

    /// Returns the connection with an ID, if it still exists.
    #[inline]
    pub(super) fn get_mut(&mut self, id: ConnId) -> Option<&mut Conn> {
        let slot = self.slots.get_mut(id.index as usize)?;
        slot.conn.as_deref_mut().filter(|_| slot.generation == id.generation)
    }

    pub(super) fn get(&self, id: ConnId) -> Option<&Conn> {
        let slot = self.slots.get(id.index as usize)?;
        slot.conn.as_deref().filter(|_| slot.generation == id.generation)
    }

    /// Returns the connection in a slot, and its ID.
    #[inline]
    pub(super) fn at(&mut self, index: u32) -> Option<(ConnId, &mut Conn)> {
        let slot = self.slots.get_mut(index as usize)?;
        let id = ConnId { index, generation: slot.generation };
        slot.conn.as_deref_mut().map(|conn| (id, conn))
    }

    /// As [`at`](Self::at), and marks the connection to be checked at the end of the call.
    #[inline]
    pub(super) fn at_touched(&mut self, index: u32) -> Option<(ConnId, &mut Conn)> {
        let slot = self.slots.get_mut(index as usize)?;
        let id = ConnId { index, generation: slot.generation };
        let conn = slot.conn.as_deref_mut()?;
        if !std::mem::replace(&mut conn.tcb.touched, true) {
            self.touched.push(index);
        }
        Some((id, conn))
    }

    /// Marks a connection that may have something to send. It is checked at the end of the call.
    pub(super) fn touch(&mut self, id: ConnId) {
        if let Some(conn) = self.get_mut(id)
            && !std::mem::replace(&mut conn.tcb.touched, true)
        {
            self.touched.push(id.index);
        }
    }

    /// Checks marked connections of a held interface again.
    pub(super) fn resume(&mut self, unacknowledged: &mut Vec<u32>) {
        self.touched.append(unacknowledged);
    }

    /// Returns the next marked connection, if it still exists. `None` ends the list.
    #[inline]
    pub(super) fn next_touched(&mut self) -> Option<Option<(ConnId, &mut Conn)>> {
        let index = self.touched.pop()?;
        let mut next = self.at(index);
        if let Some((_, conn)) = &mut next {
            conn.tcb.touched = false;
        }
        Some(next)
    }

    /// Notes that a connection waits for address resolution. `seen` is the state of the neighbour cache.
    pub(super) fn ask_hop(&mut self, index: u32, seen: (u32, u32)) {
        self.asking_hop.0.push(index);
        self.asking_hop.1 = seen;
    }

    /// Marks connections that wait for address resolution, after a change of the neighbour cache.
    #[inline]
    pub(super) fn on_neighbours(&mut self, seen: (u32, u32)) {
        if !self.asking_hop.0.is_empty() && self.asking_hop.1 != seen {
            self.resume_after_resolution();
        }
    }

    #[cold]
    fn resume_after_resolution(&mut self) {
        for index in std::mem::take(&mut self.asking_hop.0) {
            self.at_touched(index);
        }
    }

    /// Returns the connection at which counting continues, if its slot is in use.
    pub(super) fn next_to_count(&mut self) -> Option<&mut Conn> {
        self.counted = (self.counted + 1) % self.slots.len() as u32;
        self.at(self.counted).map(|(_, conn)| conn)
    }

    /// Returns the next connection to check for unused memory, if its slot is in use.
    pub(super) fn next_to_reclaim(&mut self) -> Option<&mut Conn> {
        self.reclaimed = (self.reclaimed + 1) % self.slots.len() as u32;
        self.at(self.reclaimed).map(|(_, conn)| conn)
    }

    #[inline]
    pub(super) fn peek(&self, index: u32) -> Option<&Conn> {
        self.slots.get(index as usize)?.conn.as_deref()
    }

    /// Returns all connections.
    pub(super) fn iter(&self) -> impl Iterator<Item = (ConnId, &Conn)> {
        self.slots.iter().enumerate().filter_map(|(index, slot)| {
            let id = ConnId { index: index as u32, generation: slot.generation };
            slot.conn.as_deref().map(|conn| (id, conn))
        })
    }
}

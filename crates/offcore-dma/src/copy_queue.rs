//! Copy queues: the interface for copies of packets.
//!
//! A packet consists of some copies and a value, the *holder*, which keeps their memory alive: for example packet
//! buffers, or descriptor chains of a guest whose memory is referenced. Packets are returned in the order in which they
//! were entered, regardless of the engine and of the order of completions.
//!
//! 1. [`CopyQueue::plan`] selects core or channel, and reports the room for packets and copies. Take no more packets
//!    from the source than that: packets cannot be returned.
//! 2. [`CopyQueue::begin`] opens a [`Batch`]. Call [`Batch::copy`] for each copy of a packet, then [`Batch::enter`]
//!    with its holder.
//! 3. [`Batch::submit`] submits the copies in one call.
//! 4. [`CopyQueue::ready`] returns the holders of complete packets. With [`CopyQueue::take_by_key`] instead, only
//!    packets with the same key, such as packets of a connection, wait for one another.
//!
//! If the core copies and no older packet is in flight, packets are complete when they are submitted. [`Begun`] tells
//! these batches apart; they need no holders.

mod keyed;

use std::marker::PhantomData;

use arrayvec::ArrayVec;
use offcore_stats::StageClock;

use crate::channel::{CopyOp, Token};
use crate::mover::{Binding, Channels, Mover, MoverError, MoverQueue, Plan, QueueId};
use crate::reorder::ReorderRing;
use keyed::Keys;

/// Maximum number of copies of a batch.
pub const LIST: usize = 256;

/// Copies collected for submission.
pub type List = ArrayVec<CopyOp, LIST>;

/// The packets of a queue with copies in flight, in order.
#[derive(Debug)]
pub struct CopyQueue<T> {
    id: QueueId,
    /// Holders by slot of the reorder ring.
    holders: Box<[T]>,
    list: Box<List>,
    /// Copies that the core makes while an engine makes the copies on the list.
    beside: Box<List>,
    keys: Keys,
}

impl<T: Default> CopyQueue<T> {
    /// Opens a queue with room for `packets` or more in flight, from 1 to 32768. The core copies until the queue is
    /// bound.
    ///
    /// # Panics
    /// If `packets` is out of range.
    pub fn open(mover: &mut Mover, packets: usize) -> Self {
        let id = mover.open_queue(packets);
        let (list, beside) = (Box::default(), Box::default());
        Self { id, holders: holders(mover, id), list, beside, keys: Keys::default() }
    }

    /// Changes the queue's room to `packets` or more in flight, from 1 to 32768.
    ///
    /// # Errors
    /// Packets are in flight.
    ///
    /// # Panics
    /// If `packets` is out of range.
    pub fn resize(&mut self, mover: &mut Mover, packets: usize) -> Result<(), MoverError> {
        mover.resize_queue(self.id, packets)?;
        self.holders = holders(mover, self.id);
        Ok(())
    }
}

/// Returns a holder for each entry of the queue's reorder ring.
fn holders<T: Default>(mover: &mut Mover, id: QueueId) -> Box<[T]> {
    let entries = mover.parts(id).0.ring.mask() + 1;
    (0..entries).map(|_| T::default()).collect()
}

impl<T> CopyQueue<T> {
    /// Returns the queue's id in the mover's reports.
    pub fn id(&self) -> QueueId {
        self.id
    }

    /// Sets the copy mode and the channels from now on. Copies in flight are not moved, and the order of packets is
    /// kept.
    ///
    /// # Errors
    /// Channels of another mover, or too many channels.
    pub fn bind(&mut self, mover: &mut Mover, binding: &Binding) -> Result<(), MoverError> {
        mover.bind_queue(self.id, binding)
    }

    /// Sets the time in TSC ticks after which an incomplete copy of this queue counts as lost. It overrides the mover's
    /// value.
    pub fn set_lost_after(&mut self, mover: &mut Mover, ticks: u64) {
        mover.parts(self.id).0.watch.lost_after = Some(ticks);
    }

    /// Returns the number of packets in flight.
    #[inline(always)]
    pub fn in_flight(&self, mover: &mut Mover) -> usize {
        mover.parts(self.id).0.ring.in_flight()
    }

    /// Returns the number of packets that the queue has room for.
    pub fn capacity(&self) -> usize {
        self.holders.len()
    }

    /// Returns the plan for the next copies. Call it once per batch.
    #[inline(always)]
    pub fn plan(&self, mover: &mut Mover) -> Plan {
        let (queue, channels) = mover.parts(self.id);
        channels.plan(queue)
    }

    /// Returns a plan in which the core makes the next copies, whatever the queue's binding is. It is for a packet with
    /// more copies than any channel has room for.
    #[cold]
    pub fn plan_by_core(&self, mover: &mut Mover) -> Plan {
        Plan::core_fallback(mover.parts(self.id).0)
    }

    /// Opens a batch, which updates the plan.
    // The plan is passed by reference: wide loads of fields that were just stored one by one would stall on every
    // burst.
    #[inline(always)]
    pub fn begin<'a>(&'a mut self, mover: &'a mut Mover, plan: &'a mut Plan) -> Begun<'a, T> {
        let Self { id, holders, list, beside, .. } = self;
        let (queue, channels) = mover.parts(*id);
        let own = Own { id: *id, holders, list, beside };
        if plan.by_core() && queue.ring.in_flight() == 0 {
            Begun::Immediate(Batch::new(own, queue, channels, plan))
        } else {
            Begun::Queued(Batch::new(own, queue, channels, plan))
        }
    }

    /// Returns the complete packets, from the oldest on.
    #[inline(always)]
    pub fn ready<'a>(&'a mut self, mover: &'a mut Mover) -> Ready<'a, T> {
        let (queue, channels) = mover.parts(self.id);
        let packets = queue.ring.ready();
        let (first, mask) = (queue.ring.oldest_slot(), queue.ring.mask());
        Ready { queue, holders: &mut self.holders, first, mask, packets, max_latency: channels.max_latency }
    }
}

/// A batch's borrowed parts of its queue.
struct Own<'a, T> {
    id: QueueId,
    holders: &'a mut [T],
    list: &'a mut List,
    beside: &'a mut List,
}

/// An opened batch.
#[derive(Debug)]
pub enum Begun<'a, T> {
    /// Its packets are complete after submission.
    Immediate(Batch<'a, T, true>),
    /// Its packets are complete when [`CopyQueue::ready`] returns them.
    Queued(Batch<'a, T, false>),
}

/// Packets whose copies are being collected. A batch with entered packets must be submitted: otherwise nothing copies
/// them, and the queue waits forever for the copies of an engine.
#[must_use = "packets that were entered are never copied without a submission"]
#[derive(Debug)]
pub struct Batch<'a, T, const IMMEDIATE: bool> {
    id: QueueId,
    queue: &'a mut MoverQueue,
    channels: &'a mut Channels,
    holders: &'a mut [T],
    list: &'a mut List,
    beside: &'a mut List,
    plan: &'a mut Plan,
    /// Slot of the first packet. The other slots follow it, modulo the ring size.
    first: usize,
    mask: usize,
    /// Number of copies on the list that belong to entered packets.
    entered: usize,
}

impl<'a, T, const IMMEDIATE: bool> Batch<'a, T, IMMEDIATE> {
    #[inline(always)]
    fn new(
        own: Own<'a, T>,
        queue: &'a mut MoverQueue,
        channels: &'a mut Channels,
        plan: &'a mut Plan,
    ) -> Self {
        let Own { id, holders, list, beside } = own;
        list.clear();
        if !IMMEDIATE {
            beside.clear();
        }
        let (first, mask) = (queue.ring.next_slot(), queue.ring.mask());
        // The plan may have been made earlier.
        plan.packets = plan.packets.min(queue.ring.room());
        Self { id, queue, channels, holders, list, beside, plan, first, mask, entered: 0 }
    }

    /// Returns the maximum number of packets of the batch.
    #[inline(always)]
    pub fn packets(&self) -> usize {
        if IMMEDIATE { usize::MAX } else { self.plan.packets }
    }

    /// Returns the room for copies.
    #[inline(always)]
    pub fn room(&self) -> usize {
        let list = self.plan.copies.min(LIST).saturating_sub(self.list.len());
        if IMMEDIATE {
            return list;
        }
        // The copies that the next packet already has may be moved to the core's list.
        let next = self.list.len() - self.entered;
        list.min(self.beside.remaining_capacity().saturating_sub(next))
    }

    /// Returns the number of packets of this queue in flight, including the batch's packets.
    #[inline(always)]
    pub fn in_flight(&self) -> usize {
        self.queue.ring.in_flight()
    }

    /// Whether the core makes any of the batch's copies. Then packets may be complete after submission.
    #[inline(always)]
    pub fn has_core_copies(&self) -> bool {
        self.plan.by_core() || !self.beside.is_empty()
    }

    /// Returns the list of copies, for adding many at a time. Copies of the next packet must have its [`Batch::token`].
    #[inline(always)]
    pub fn list(&mut self) -> &mut List {
        self.list
    }

    /// Returns the token for copies of the next packet.
    #[inline(always)]
    pub fn token(&self) -> Token {
        if IMMEDIATE { 0 } else { self.id.token(self.queue.ring.next_slot()) }
    }

    /// Adds a copy of `len` bytes to the next packet.
    ///
    /// # Panics
    /// If the batch has no [room](Batch::room).
    #[inline(always)]
    pub fn copy(&mut self, src: *const u8, dst: *mut u8, len: u32) {
        let token = self.token();
        self.list.push(CopyOp { src, dst, len, token });
    }

    /// Starts entering packets of one copy each in a row.
    #[inline(always)]
    pub fn singles(&mut self) -> Singles<'_, T, IMMEDIATE> {
        let Self { id, queue, holders, list, beside, plan, entered, .. } = self;
        let len = list.len();
        // From here on only this pointer accesses the list: another borrow of the list would invalidate `next`.
        let list = std::ptr::from_mut::<List>(list);
        // SAFETY: the list is valid, and `len` is not beyond the end of its array.
        let next = unsafe { (*list).as_mut_ptr().add(len) };
        let borrow = PhantomData;
        Singles { id: *id, ring: &mut queue.ring, holders, list, borrow, beside, plan, entered, next }
    }

    /// Removes the copies of the next packet.
    pub fn cancel(&mut self) {
        self.list.truncate(self.entered);
    }

    /// Returns the holder of packet `index` of the batch.
    #[inline(always)]
    pub fn holder(&mut self, index: usize) -> &mut T {
        &mut self.holders[(self.first + index) & self.mask]
    }

    /// Enters a packet with the copies added since the last one, or without copies. Returns the holder of a packet that
    /// is complete when the batch is submitted.
    #[inline(always)]
    pub fn enter(&mut self, holder: T) -> Option<T> {
        if IMMEDIATE {
            self.entered = self.list.len();
            return Some(holder);
        }
        let slot = self.queue.ring.next_slot();
        self.holders[slot] = holder;
        self.enter_filled();
        None
    }

    /// As [`Batch::enter`], for a packet whose [holder](Batch::holder) has been filled in.
    #[inline(always)]
    pub fn enter_filled(&mut self) {
        if IMMEDIATE {
            self.entered = self.list.len();
            return;
        }
        let copies = &self.list[self.entered..];
        let outstanding = if self.plan.is_mixed() {
            let outstanding = self.plan.outstanding(copies);
            if outstanding == 0 {
                self.move_to_core_list();
            }
            outstanding
        } else if self.plan.by_core() {
            0
        } else {
            copies.len() as u16
        };
        self.queue.ring.push(outstanding);
        self.entered = self.list.len();
    }

    /// As [`Batch::enter`], but the core makes the packet's copies, because an engine is not worthwhile.
    #[inline(always)]
    pub fn enter_by_core(&mut self, holder: T) -> Option<T> {
        if IMMEDIATE || self.plan.by_core() {
            return self.enter(holder);
        }
        let slot = self.queue.ring.push(0);
        self.holders[slot] = holder;
        self.move_to_core_list();
        None
    }

    /// Moves the copies of the last packet to the core's list.
    #[cold]
    fn move_to_core_list(&mut self) {
        self.beside.extend(self.list.drain(self.entered..));
    }

    /// Makes the copies, or submits them to the planned channel. Returns the copies on the list.
    ///
    /// # Safety
    /// The memory of every copy must stay valid and must not be used in a conflicting way: until this function returns
    /// if the batch is immediate, otherwise until [`CopyQueue::ready`] returns the packet's holder, or the mover is
    /// dropped. Therefore a holder must own the memory that its packet's copies read and write. Until then the holder
    /// must not be taken out of [`Batch::holder`], and the queue must not be dropped before the mover. No more packets
    /// than [`Batch::packets`] were entered. The queue and the batch belong to the same mover, and the queue is not
    /// used after it was closed. Copies added with [`Batch::list`] have the [token](Batch::token) that their packet had
    /// then.
    #[inline(always)]
    pub unsafe fn submit(self, clock: &mut StageClock) -> &'a [CopyOp] {
        let Self { queue, channels, list, beside, plan, .. } = self;
        // SAFETY: the holders keep source and destination of each copy valid until its packet is ready, as the caller
        // guarantees.
        unsafe { channels.submit(queue, plan, list, if IMMEDIATE { &[] } else { beside }, clock) };
        list
    }
}

/// Packets of one copy each that are being entered into a batch. They are part of the batch after [`Singles::finish`],
/// and never complete without it.
#[derive(Debug)]
pub struct Singles<'a, T, const IMMEDIATE: bool> {
    id: QueueId,
    ring: &'a mut ReorderRing,
    holders: &'a mut [T],
    list: *mut List,
    borrow: PhantomData<&'a mut List>,
    beside: &'a mut List,
    plan: &'a mut Plan,
    entered: &'a mut usize,
    next: *mut CopyOp,
}

impl<T, const IMMEDIATE: bool> Singles<'_, T, IMMEDIATE> {
    /// Enters a packet of one copy. Returns its holder to be filled in, unless the packet is complete when the batch is
    /// submitted.
    ///
    /// # Safety
    /// No more packets may be entered than there was [room](Batch::room) for copies.
    #[inline(always)]
    pub unsafe fn enter(&mut self, src: *const u8, dst: *mut u8, len: u32) -> Option<&mut T> {
        let mut copy = CopyOp { src, dst, len, token: 0 };
        let mut holder = None;
        let mut aside = false;
        if !IMMEDIATE {
            let outstanding = if self.plan.is_mixed() {
                let outstanding = self.plan.outstanding(std::slice::from_ref(&copy));
                aside = outstanding == 0;
                outstanding
            } else {
                u16::from(!self.plan.by_core())
            };
            let slot = self.ring.push(outstanding);
            copy.token = self.id.token(slot);
            holder = Some(&mut self.holders[slot]);
        }
        if aside {
            self.beside.push(copy);
        } else {
            // SAFETY: the list has room for all copies for which the batch had room.
            unsafe {
                self.next.write(copy);
                self.next = self.next.add(1);
            }
        }
        holder
    }

    /// Completes entering: the packets are in the batch.
    #[inline(always)]
    pub fn finish(self) {
        let Self { list, entered, next, .. } = self;
        // SAFETY: the list is borrowed for the lifetime of this value, and nothing else uses it.
        let list = unsafe { &mut *list };
        // SAFETY: all elements up to `next` have been written, contiguously from the start of the array.
        unsafe { list.set_len(next.offset_from_unsigned(list.as_ptr())) };
        *entered = list.len();
    }
}

/// The complete packets of a queue, from the oldest on.
#[derive(Debug)]
pub struct Ready<'a, T> {
    queue: &'a mut MoverQueue,
    holders: &'a mut [T],
    first: usize,
    mask: usize,
    packets: usize,
    max_latency: Option<u64>,
}

impl<T> Ready<'_, T> {
    /// Returns the number of complete packets.
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.packets
    }

    /// Whether no packet is complete.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.packets == 0
    }

    /// Returns the position of the oldest packet in flight. It changes whenever a packet is retired.
    #[inline(always)]
    pub fn oldest(&self) -> u32 {
        self.queue.ring.oldest()
    }

    /// Returns the holder of packet `index`.
    ///
    /// # Panics
    /// If `index` is not less than the number of complete packets: later packets are still in flight.
    #[inline(always)]
    pub fn holder(&mut self, index: usize) -> &mut T {
        assert!(index < self.packets, "the packet is in flight");
        &mut self.holders[(self.first + index) & self.mask]
    }

    /// Removes the oldest `packets` from the queue. Returns the number of packets left in flight.
    ///
    /// # Panics
    /// If fewer packets are complete.
    #[inline(always)]
    pub fn retire(self, packets: usize) -> usize {
        assert!(packets <= self.packets, "the packets are in flight");
        self.queue.ring.retire(packets);
        self.queue.reaped(self.max_latency);
        self.queue.ring.in_flight()
    }
}

#[cfg(test)]
mod tests;

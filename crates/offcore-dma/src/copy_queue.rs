//! Copy queues: what everything that copies packets uses.
//!
//! A packet is some copies and a value, the *holder*, that keeps their memory alive: packet buffers, chains of a guest
//! whose memory is referenced. Packets come out in the order in which they went in, whoever copies and whatever
//! completes first.
//!
//! 1. [`CopyQueue::plan`] says who will copy, and for how many packets and copies there is room. Take no more from the
//!    source: nothing is ever put back.
//! 2. [`CopyQueue::begin`] opens a [`Batch`]: [`Batch::copy`] for each copy of a packet, then [`Batch::enter`] with its
//!    holder.
//! 3. [`Batch::submit`] hands the copies over, in one call.
//! 4. [`CopyQueue::ready`] gives the holders of packets that are complete, or [`CopyQueue::take_by_key`] takes them: then
//!    only packets of the same key wait for one another, those of a connection, say.
//!
//! When the core copies and no older packet is in flight, packets are complete when they are submitted: [`Begun`] says
//! so, and such a batch needs no holders.

mod keyed;

use std::marker::PhantomData;

use arrayvec::ArrayVec;
use offcore_stats::StageClock;

use crate::channel::{CopyOp, Token};
use crate::mover::{Binding, Channels, Mover, MoverError, Plan, Queue, QueueId};
use crate::reorder::ReorderRing;
use keyed::Keys;

/// Copies of a batch, at most.
pub const LIST: usize = 256;

/// Copies, gathered to be submitted.
pub type List = ArrayVec<CopyOp, LIST>;

/// The packets of one queue whose copies are made elsewhere, in order.
#[derive(Debug)]
pub struct CopyQueue<T> {
    id: QueueId,
    /// By slot of the reorder ring.
    holders: Box<[T]>,
    list: Box<List>,
    /// Copies that the core makes while an engine makes those on the list.
    beside: Box<List>,
    keys: Keys,
}

impl<T: Default> CopyQueue<T> {
    /// A queue with room for at least `packets` in flight, 1 to 32768; the core copies until it is bound.
    ///
    /// # Panics
    /// When `packets` is out of range.
    pub fn open(mover: &mut Mover, packets: usize) -> Self {
        let id = mover.open_queue(packets);
        let (list, beside) = (Box::default(), Box::default());
        Self { id, holders: holders(mover, id), list, beside, keys: Keys::default() }
    }

    /// Gives the queue room for at least `packets` in flight, 1 to 32768.
    ///
    /// # Errors
    /// While packets are in flight.
    ///
    /// # Panics
    /// When `packets` is out of range.
    pub fn resize(&mut self, mover: &mut Mover, packets: usize) -> Result<(), MoverError> {
        mover.resize_queue(self.id, packets)?;
        self.holders = holders(mover, self.id);
        Ok(())
    }
}

/// One holder for each entry of the queue's reorder ring.
fn holders<T: Default>(mover: &mut Mover, id: QueueId) -> Box<[T]> {
    let entries = mover.parts(id).0.ring.mask() + 1;
    (0..entries).map(|_| T::default()).collect()
}

impl<T> CopyQueue<T> {
    /// The queue's name in the mover's reports.
    pub fn id(&self) -> QueueId {
        self.id
    }

    /// Says who copies from now on. Copies in flight stay where they are; the order is kept all the same.
    ///
    /// # Errors
    /// Channels that are not this mover's, or too many.
    pub fn bind(&mut self, mover: &mut Mover, binding: &Binding) -> Result<(), MoverError> {
        mover.bind_queue(self.id, binding)
    }

    /// A copy of this queue that has not completed after `ticks` (TSC) counts as lost, whatever the mover's other queues
    /// have.
    pub fn set_lost_after(&mut self, mover: &mut Mover, ticks: u64) {
        mover.parts(self.id).0.lost_after = Some(ticks);
    }

    /// Packets in flight.
    #[inline(always)]
    pub fn in_flight(&self, mover: &mut Mover) -> usize {
        mover.parts(self.id).0.ring.in_flight()
    }

    /// Packets that it has room for.
    pub fn capacity(&self) -> usize {
        self.holders.len()
    }

    /// Chooses who makes the next copies: once for every batch.
    #[inline(always)]
    pub fn plan(&self, mover: &mut Mover) -> Plan {
        let (queue, channels) = mover.parts(self.id);
        channels.plan(queue)
    }

    /// The core makes the next copies, whoever is bound to the queue: for a packet that has more copies than there is
    /// room for in any channel.
    #[cold]
    pub fn plan_by_core(&self, mover: &mut Mover) -> Plan {
        Plan::by_core_instead(mover.parts(self.id).0)
    }

    /// Opens a batch, which keeps the plan up to date.
    // By reference: wide loads of what has just been stored field by field would wait for those stores, every burst.
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

    /// What is complete, from the oldest packet on.
    #[inline(always)]
    pub fn ready<'a>(&'a mut self, mover: &'a mut Mover) -> Ready<'a, T> {
        let (queue, channels) = mover.parts(self.id);
        let packets = queue.ring.ready();
        let (first, mask) = (queue.ring.oldest_slot(), queue.ring.mask());
        Ready { queue, holders: &mut self.holders, first, mask, packets, max_latency: channels.max_latency }
    }
}

/// What a batch has of its queue.
struct Own<'a, T> {
    id: QueueId,
    holders: &'a mut [T],
    list: &'a mut List,
    beside: &'a mut List,
}

/// A batch that has been opened.
#[derive(Debug)]
pub enum Begun<'a, T> {
    /// Its packets are complete once it is submitted.
    Immediate(Batch<'a, T, true>),
    /// Its packets are complete when [`CopyQueue::ready`] gives them.
    Queued(Batch<'a, T, false>),
}

/// Packets whose copies are being gathered. One that packets were entered into must be submitted: nobody copies them
/// otherwise, and the queue waits for those that an engine was to copy.
#[must_use = "packets that were entered are never copied without a submission"]
#[derive(Debug)]
pub struct Batch<'a, T, const IMMEDIATE: bool> {
    id: QueueId,
    queue: &'a mut Queue,
    channels: &'a mut Channels,
    holders: &'a mut [T],
    list: &'a mut List,
    beside: &'a mut List,
    plan: &'a mut Plan,
    /// Slot of the first packet; slots follow it, modulo the mask.
    first: usize,
    mask: usize,
    /// Copies on the list of packets that have been entered.
    entered: usize,
}

impl<'a, T, const IMMEDIATE: bool> Batch<'a, T, IMMEDIATE> {
    #[inline(always)]
    fn new(own: Own<'a, T>, queue: &'a mut Queue, channels: &'a mut Channels, plan: &'a mut Plan) -> Self {
        let Own { id, holders, list, beside } = own;
        list.clear();
        if !IMMEDIATE {
            beside.clear();
        }
        let (first, mask) = (queue.ring.next_slot(), queue.ring.mask());
        // The plan may be an older one.
        plan.packets = plan.packets.min(queue.ring.room());
        Self { id, queue, channels, holders, list, beside, plan, first, mask, entered: 0 }
    }

    /// Packets that a batch may have.
    #[inline(always)]
    pub fn packets(&self) -> usize {
        if IMMEDIATE { usize::MAX } else { self.plan.packets }
    }

    /// Copies that there is room for still.
    #[inline(always)]
    pub fn room(&self) -> usize {
        let list = self.plan.copies.min(LIST).saturating_sub(self.list.len());
        if IMMEDIATE {
            return list;
        }
        // The core may come to make the copies that the next packet has already.
        let next = self.list.len() - self.entered;
        list.min(self.beside.remaining_capacity().saturating_sub(next))
    }

    /// Packets in flight with this queue, those of the batch included.
    #[inline(always)]
    pub fn in_flight(&self) -> usize {
        self.queue.ring.in_flight()
    }

    /// Whether the core makes copies of it: packets may be complete once the batch is submitted.
    #[inline(always)]
    pub fn has_copies_of_the_core(&self) -> bool {
        self.plan.by_core() || !self.beside.is_empty()
    }

    /// The copies so far, for who adds many at a time; those of the next packet have its [`Batch::token`].
    #[inline(always)]
    pub fn list(&mut self) -> &mut List {
        self.list
    }

    /// What the copies of the next packet are marked with.
    #[inline(always)]
    pub fn token(&self) -> Token {
        if IMMEDIATE { 0 } else { self.id.token(self.queue.ring.next_slot()) }
    }

    /// Adds a copy of `len` bytes to the next packet.
    ///
    /// # Panics
    /// When there is no [room](Batch::room).
    #[inline(always)]
    pub fn copy(&mut self, src: *const u8, dst: *mut u8, len: u32) {
        let token = self.token();
        self.list.push(CopyOp { src, dst, len, token });
    }

    /// For packets of one copy each, entered in a row.
    #[inline(always)]
    pub fn singles(&mut self) -> Singles<'_, T, IMMEDIATE> {
        let Self { id, queue, holders, list, beside, plan, entered, .. } = self;
        let len = list.len();
        // From here on the list is used by this pointer only: another borrow of it would end what `next` may do.
        let list = std::ptr::from_mut::<List>(list);
        // SAFETY: the list is there, and its end is inside its array, or where that ends.
        let next = unsafe { (*list).as_mut_ptr().add(len) };
        let borrow = PhantomData;
        Singles { id: *id, ring: &mut queue.ring, holders, list, borrow, beside, plan, entered, next }
    }

    /// Takes the copies of the next packet back.
    pub fn cancel(&mut self) {
        self.list.truncate(self.entered);
    }

    /// The holder of packet `index` of the batch.
    #[inline(always)]
    pub fn holder(&mut self, index: usize) -> &mut T {
        &mut self.holders[(self.first + index) & self.mask]
    }

    /// Ends a packet: what was added since the last one are its copies. They may be none. Returns the holder of one that
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

    /// The same, of a packet whose [holder](Batch::holder) has been filled in.
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
                self.set_aside();
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

    /// As [`Batch::enter`], but the core makes the packet's copies: it is not worth an engine's while.
    #[inline(always)]
    pub fn enter_by_core(&mut self, holder: T) -> Option<T> {
        if IMMEDIATE || self.plan.by_core() {
            return self.enter(holder);
        }
        let slot = self.queue.ring.push(0);
        self.holders[slot] = holder;
        self.set_aside();
        None
    }

    /// The core makes the copies of the packet that is entered last.
    #[cold]
    fn set_aside(&mut self) {
        self.beside.extend(self.list.drain(self.entered..));
    }

    /// Makes the copies, or hands them to the planned channel; returns those on the list.
    ///
    /// # Safety
    /// The memory of every copy must stay valid, and be used by nobody else in a way that conflicts: until this returns
    /// when the batch is immediate, otherwise until its packet's holder comes out of [`CopyQueue::ready`], or the mover
    /// is dropped. So a holder owns what its packet's copies read and write, and until then nobody takes it out of
    /// [`Batch::holder`] or drops the queue before the mover. No more packets were entered than [`Batch::packets`], the
    /// queue and the batch are of the same mover, and the queue is not used after it was closed. What was added by
    /// [`Batch::list`] has the [token](Batch::token) that its packet had then.
    #[inline(always)]
    pub unsafe fn submit(self, clock: &mut StageClock) -> &'a [CopyOp] {
        let Self { queue, channels, list, beside, plan, .. } = self;
        // SAFETY: the caller's promise.
        unsafe { channels.submit(queue, plan, list, if IMMEDIATE { &[] } else { beside }, clock) };
        list
    }
}

/// Packets of one copy each, on their way into a batch. They are in it when this is [finished](Singles::finish), and
/// never complete without that.
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
    /// Enters a packet of one copy; returns its holder, to be filled in, unless it is complete when the batch is submitted.
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
            // SAFETY: the list has at least as much room as the batch.
            unsafe {
                self.next.write(copy);
                self.next = self.next.add(1);
            }
        }
        holder
    }

    /// The packets are in the batch.
    #[inline(always)]
    pub fn finish(self) {
        let Self { list, entered, next, .. } = self;
        // SAFETY: the list is borrowed for as long as this lives, and nobody else uses it.
        let list = unsafe { &mut *list };
        // SAFETY: so many have been written, one after the other from the array's beginning on; `next` has come from there.
        unsafe { list.set_len(next.offset_from_unsigned(list.as_ptr())) };
        *entered = list.len();
    }
}

/// Packets of a queue that are complete, from the oldest on.
#[derive(Debug)]
pub struct Ready<'a, T> {
    queue: &'a mut Queue,
    holders: &'a mut [T],
    first: usize,
    mask: usize,
    packets: usize,
    max_latency: Option<u64>,
}

impl<T> Ready<'_, T> {
    /// How many there are.
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.packets
    }

    /// Whether there is none.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.packets == 0
    }

    /// Position of the oldest packet in flight: it changes whenever one is retired.
    #[inline(always)]
    pub fn oldest(&self) -> u32 {
        self.queue.ring.oldest()
    }

    /// The holder of packet `index`.
    ///
    /// # Panics
    /// When there are not so many: copies of later ones are still in flight.
    #[inline(always)]
    pub fn holder(&mut self, index: usize) -> &mut T {
        assert!(index < self.packets, "the packet is in flight");
        &mut self.holders[(self.first + index) & self.mask]
    }

    /// The oldest `packets` leave the queue; returns how many packets are left in flight.
    ///
    /// # Panics
    /// When there are not so many.
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

//! The mover: one worker's channels and reorder rings.
//!
//! A queue asks for a [`Plan`], which says who will copy and how much there is room for, before it consumes anything;
//! enters its packets in its reorder ring; and submits the gathered list. Completions come back through
//! [`Mover::poll`], which routes every token to its queue, whatever channel it went through, so that any queue can use
//! any channel. What an engine fails to do the core finishes from the first byte not copied.
//!
//! A copy that is not answered in time is *quarantined*: its packet is neither published nor freed while the channel is
//! reset; only when the reset has proved the copy dead does the core make it.

use arrayvec::ArrayVec;
use offcore_stats::{Stage, StageClock, tsc};

use crate::channel::{Channel, Completions, Copy, Failed, Operation, Reset, Token};
use crate::cpu::{self, Copier};
use crate::reorder::ReorderRing;

/// Channels that one queue can spread its load over, at most.
pub const MAX_CHANNELS_PER_QUEUE: usize = 8;
/// Polls between two looks for lost copies.
const LOST_CHECK: u32 = 256;

/// Names a queue of a mover.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QueueId(u16);

/// Names a channel of a mover.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ChannelId(u16);

impl ChannelId {
    /// The channel's position: the order in which channels were added.
    pub fn index(self) -> usize {
        self.0.into()
    }
}

impl QueueId {
    /// The token of a copy of the packet in reorder slot `slot`.
    #[inline(always)]
    pub fn token(self, slot: usize) -> Token {
        u32::from(self.0) << 16 | slot as u32
    }
}

/// Who copies for a queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// The core.
    #[default]
    Cpu,
    /// The queue's channels; the core only when all of them are full or out of service, or too small for a packet.
    Offload,
}

impl std::str::FromStr for Mode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "cpu" => Ok(Self::Cpu),
            "offload" => Ok(Self::Offload),
            _ => Err(format!("mode '{text}': expected cpu or offload")),
        }
    }
}

impl std::fmt::Display for Mode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Cpu => "cpu",
            Self::Offload => "offload",
        })
    }
}

/// Who makes the next copies of a queue, and how many there is room for.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    channel: Option<ChannelId>,
    /// Packets that fit the reorder ring.
    pub packets: usize,
    /// Copies that fit the channel.
    pub copies: usize,
}

impl Plan {
    /// Whether the core copies: then a packet has no outstanding copies once the list is submitted.
    #[inline(always)]
    pub fn by_core(&self) -> bool {
        self.channel.is_none()
    }

    /// How many outstanding copies a packet of `copies` is entered with.
    #[inline(always)]
    pub fn outstanding(&self, copies: usize) -> u16 {
        if self.by_core() { 0 } else { copies as u16 }
    }
}

/// What the mover itself counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MoverStats {
    /// Copies made by the core because that was the plan.
    pub core_copies: u64,
    /// Bytes of those.
    pub core_bytes: u64,
    /// Copies that the core made or finished because a channel failed them.
    pub fallbacks: u64,
    /// Copies that the core made because no channel of the queue had room for the packet's, or was in service.
    pub overflow: u64,
    /// Channel resets because of copies that were not answered in time.
    pub resets: u64,
    /// Copies held in quarantine until a reset proved them dead.
    pub quarantined: u64,
}

#[derive(Debug)]
struct Queue {
    ring: ReorderRing,
    mode: Mode,
    channels: ArrayVec<ChannelId, MAX_CHANNELS_PER_QUEUE>,
    turn: usize,
    copier: Copier,
    /// The packet that was outstanding and the oldest when the queue was last looked at, and since when.
    watched: Option<(u32, u64)>,
}

#[derive(Debug)]
struct Slot {
    channel: Box<dyn Channel>,
    resetting: bool,
}

/// Why a queue or channel cannot be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MoverError {
    /// Packets are in flight.
    #[error("{0} packets are in flight: poll until none is")]
    InFlight(usize),
    /// A queue still names the channel.
    #[error("a queue is bound to the channel: bind it to another one first")]
    Bound,
    /// More channels than a queue can use.
    #[error("{0} channels for one queue: at most {MAX_CHANNELS_PER_QUEUE}")]
    TooManyChannels(usize),
    /// A channel that this mover does not have.
    #[error("channel {0} is not this worker's")]
    NoChannel(usize),
}

/// One worker's channels and queues.
#[derive(Debug)]
pub struct Mover {
    queues: Vec<Option<Queue>>,
    channels: Vec<Option<Slot>>,
    completions: Box<Completions>,
    stats: MoverStats,
    lost_after: u64,
    until_lost_check: u32,
    quarantine: bool,
}

impl Default for Mover {
    fn default() -> Self {
        Self::new()
    }
}

impl Mover {
    /// A mover without channels: the core copies.
    pub fn new() -> Self {
        Self {
            queues: Vec::new(),
            channels: Vec::new(),
            completions: Box::default(),
            stats: MoverStats::default(),
            lost_after: tsc::hz(),
            until_lost_check: LOST_CHECK,
            quarantine: true,
        }
    }

    /// A copy that has not completed after `ticks` (TSC; one second by default) counts as lost.
    pub fn set_lost_after(&mut self, ticks: u64) {
        self.lost_after = ticks;
    }

    // ---- set-up ----

    /// Adds a channel.
    pub fn add_channel(&mut self, channel: Box<dyn Channel>) -> ChannelId {
        self.channels.push(Some(Slot { channel, resetting: false }));
        ChannelId(self.channels.len() as u16 - 1)
    }

    /// Takes a channel out.
    ///
    /// # Errors
    /// While operations are in flight in it, or a queue is bound to it.
    pub fn remove_channel(&mut self, id: ChannelId) -> Result<Box<dyn Channel>, MoverError> {
        if self.queues.iter().flatten().any(|q| q.channels.contains(&id)) {
            return Err(MoverError::Bound);
        }
        let slot = self.channels.get_mut(id.index()).ok_or(MoverError::NoChannel(id.index()))?;
        match slot.take() {
            None => Err(MoverError::NoChannel(id.index())),
            Some(busy) if busy.channel.in_flight() > 0 => {
                let in_flight = busy.channel.in_flight();
                *slot = Some(busy);
                Err(MoverError::InFlight(in_flight))
            }
            Some(idle) => Ok(idle.channel),
        }
    }

    /// The channels, with their ids.
    pub fn channels(&self) -> impl Iterator<Item = (ChannelId, &dyn Channel)> {
        let present = self.channels.iter().enumerate();
        present.filter_map(|(i, slot)| Some((ChannelId(i as u16), slot.as_ref()?.channel.as_ref())))
    }

    /// A new queue whose reorder ring has room for `packets` in flight; the core copies until it is bound.
    pub fn open_queue(&mut self, packets: usize) -> QueueId {
        let queue = Queue {
            ring: ReorderRing::new(packets),
            mode: Mode::Cpu,
            channels: ArrayVec::new(),
            turn: 0,
            copier: Copier::default(),
            watched: None,
        };
        if let Some(free) = self.queues.iter().position(Option::is_none) {
            self.queues[free] = Some(queue);
            return QueueId(free as u16);
        }
        self.queues.push(Some(queue));
        QueueId(self.queues.len() as u16 - 1)
    }

    /// Says who copies for a queue from now on. Copies in flight stay where they are; the order is kept all the same.
    ///
    /// # Errors
    /// Channels that are not this mover's, or too many.
    pub fn bind(&mut self, queue: QueueId, mode: Mode, channels: &[ChannelId]) -> Result<(), MoverError> {
        if let Some(missing) =
            channels.iter().find(|c| self.channels.get(c.index()).is_none_or(Option::is_none))
        {
            return Err(MoverError::NoChannel(missing.index()));
        }
        let list = ArrayVec::try_from(channels).map_err(|_| MoverError::TooManyChannels(channels.len()))?;
        let queue = self.queue(queue);
        (queue.mode, queue.channels) = (mode, list);
        Ok(())
    }

    /// Gives a queue a reorder ring of another size.
    ///
    /// # Errors
    /// While packets are in flight.
    pub fn resize_queue(&mut self, queue: QueueId, packets: usize) -> Result<(), MoverError> {
        let queue = self.queue(queue);
        match queue.ring.in_flight() {
            0 => {
                queue.ring.resize(packets);
                Ok(())
            }
            n => Err(MoverError::InFlight(n)),
        }
    }

    /// Closes a queue.
    ///
    /// # Errors
    /// While packets are in flight.
    pub fn close_queue(&mut self, queue: QueueId) -> Result<(), MoverError> {
        match self.queue(queue).ring.in_flight() {
            0 => {
                self.queues[usize::from(queue.0)] = None;
                Ok(())
            }
            n => Err(MoverError::InFlight(n)),
        }
    }

    /// The open queues.
    pub fn queues(&self) -> Vec<QueueId> {
        let open = self.queues.iter().enumerate().filter(|(_, queue)| queue.is_some());
        open.map(|(i, _)| QueueId(i as u16)).collect()
    }

    /// What the mover counted.
    pub fn stats(&self) -> MoverStats {
        self.stats
    }

    // ---- per burst ----

    #[inline(always)]
    fn queue(&mut self, id: QueueId) -> &mut Queue {
        self.queues[usize::from(id.0)].as_mut().expect("a QueueId is only given out for an open queue")
    }

    /// The queue's reorder ring.
    #[inline(always)]
    pub fn ring(&mut self, queue: QueueId) -> &mut ReorderRing {
        &mut self.queue(queue).ring
    }

    /// Chooses who makes the queue's next copies. Call it anew for every list that is submitted.
    #[inline(always)]
    pub fn plan(&mut self, id: QueueId) -> Plan {
        let queue = self.queue(id);
        let packets = queue.ring.room();
        if queue.mode == Mode::Cpu {
            return Plan { channel: None, packets, copies: usize::MAX };
        }
        self.plan_offload(id, packets)
    }

    /// The core makes the queue's next copies, whoever is bound to it: for a packet that has more copies than there is
    /// room for in any channel.
    #[cold]
    pub fn plan_by_core(&mut self, id: QueueId) -> Plan {
        Plan { channel: None, packets: self.ring(id).room(), copies: usize::MAX }
    }

    fn plan_offload(&mut self, id: QueueId, packets: usize) -> Plan {
        let Self { queues, channels, .. } = self;
        let Some(queue) = queues[usize::from(id.0)].as_mut() else {
            return Plan { channel: None, packets, copies: usize::MAX };
        };
        let n = queue.channels.len();
        let mut best = (0, None);
        for i in 0..n {
            let candidate = queue.channels[(queue.turn + i) % n];
            let Some(slot) = channels[candidate.index()].as_ref() else { continue };
            let room = if slot.resetting { 0 } else { slot.channel.room() };
            if room > best.0 {
                best = (room, Some(candidate));
            }
        }
        queue.turn = queue.turn.wrapping_add(1);
        match best {
            (room, Some(channel)) => Plan { channel: Some(channel), packets, copies: room },
            _ => Plan { channel: None, packets, copies: usize::MAX },
        }
    }

    /// Makes the copies of `list`, or hands them to the planned channel. Every packet named by the tokens has been
    /// entered in the queue's reorder ring with [`Plan::outstanding`] copies.
    ///
    /// # Safety
    /// The memory of every copy must stay valid, and be used by nobody else in a way that conflicts, until its packet
    /// is ready in the reorder ring.
    #[inline(always)]
    pub unsafe fn submit(&mut self, queue: QueueId, plan: Plan, list: &[Copy], clock: &mut StageClock) {
        match plan.channel {
            None => {
                let queue = self.queue(queue);
                // SAFETY: the caller's promises cover the time of the call.
                unsafe { queue.copier.copy_burst(list) };
                let planned = queue.mode == Mode::Cpu;
                self.stats.core_copies += list.len() as u64;
                self.stats.core_bytes += list.iter().map(|c| u64::from(c.len)).sum::<u64>();
                self.stats.overflow += if planned { 0 } else { list.len() as u64 };
                clock.lap(Stage::Copy);
            }
            Some(channel) => {
                // SAFETY: the caller's promises, passed on.
                unsafe { self.hand_over(channel, list) };
                clock.lap(Stage::Submit);
            }
        }
    }

    /// # Safety
    /// As for [`Mover::submit`].
    #[inline]
    unsafe fn hand_over(&mut self, id: ChannelId, list: &[Copy]) {
        let mut accepted = 0;
        if let Some(slot) = self.channels[id.index()].as_mut() {
            // SAFETY: the caller keeps the memory until the packet is ready, which is after its token was reported or
            // its channel was reset.
            accepted = unsafe { slot.channel.copy(list) };
            slot.channel.submit();
        }
        for op in &list[accepted..] {
            // The channel had said that it had room. Whatever made it change its mind: the core copies.
            // SAFETY: as above.
            unsafe { self.redo(&Operation::Copy(*op), 0) };
        }
    }

    /// Collects what has completed on every channel and notes it in the reorder rings.
    #[inline]
    pub fn poll(&mut self, clock: &mut StageClock) {
        if self.channels.is_empty() {
            return;
        }
        let mut waiting = false;
        for index in 0..self.channels.len() {
            waiting |= self.poll_channel(index);
        }
        if !waiting {
            return;
        }
        self.until_lost_check -= 1;
        if self.until_lost_check == 0 {
            self.until_lost_check = LOST_CHECK;
            self.look_for_lost();
        }
        clock.lap(Stage::Poll);
    }

    /// Returns whether the channel had anything in flight.
    #[inline]
    fn poll_channel(&mut self, index: usize) -> bool {
        let Some(slot) = self.channels[index].as_ref() else { return false };
        let resetting = slot.resetting;
        if slot.channel.in_flight() == 0 && !resetting {
            return false;
        }
        self.collect(index);
        if resetting {
            self.go_on_resetting(index);
        }
        true
    }

    /// Notes what a channel reports; returns how many operations that were.
    #[inline(always)]
    fn collect(&mut self, index: usize) -> usize {
        let Self { queues, channels, completions, .. } = self;
        let Some(slot) = channels[index].as_mut() else { return 0 };
        completions.clear();
        slot.channel.poll(completions);
        for &token in &completions.tokens {
            if let Some(queue) = queues.get_mut(token as usize >> 16).and_then(Option::as_mut) {
                queue.ring.complete(token as usize & 0xffff);
            }
        }
        let reported = completions.tokens.len() + completions.failed.len();
        if !completions.failed.is_empty() {
            self.recover();
        }
        reported
    }

    /// The core finishes what failed.
    #[cold]
    fn recover(&mut self) {
        let failed: ArrayVec<Failed, 16> = self.completions.failed.take();
        for Failed { operation, done, .. } in failed {
            // SAFETY: the operation was submitted through this mover, so its memory is valid until its packet is ready,
            // which it is not before `redo` completes it; the engine has reported it, so it touches it no more.
            unsafe { self.redo(&operation, done) };
        }
    }

    /// Makes an operation from byte `done` on, and notes that it is complete.
    ///
    /// # Safety
    /// The operation's memory is valid and no engine touches it any more.
    #[cold]
    unsafe fn redo(&mut self, operation: &Operation, done: u32) {
        match operation {
            // SAFETY: the caller's promise.
            Operation::Copy(copy) => unsafe { cpu::copy_one(copy, done) },
            // SAFETY: the caller's promise.
            Operation::Fill(fill) => unsafe { cpu::fill_one(fill, done) },
        }
        self.stats.fallbacks += 1;
        let token = operation.token() as usize;
        if let Some(queue) = self.queues.get_mut(token >> 16).and_then(Option::as_mut) {
            queue.ring.complete(token & 0xffff);
        }
    }

    /// A queue whose oldest packet has been outstanding for too long has lost a copy. Which channel has it is not
    /// known (the queue may have been bound anew since), so every channel with work in flight is reset.
    #[cold]
    fn look_for_lost(&mut self) {
        let now = tsc::now();
        let mut late = false;
        for queue in self.queues.iter_mut().flatten() {
            let waits = queue.ring.in_flight() > 0 && queue.ring.ready() == 0;
            queue.watched = match queue.watched {
                _ if !waits => None,
                Some((oldest, since)) if oldest == queue.ring.oldest() => {
                    late |= now.wrapping_sub(since) > self.lost_after;
                    Some((oldest, since))
                }
                _ => Some((queue.ring.oldest(), now)),
            };
        }
        if !late {
            return;
        }
        for index in 0..self.channels.len() {
            if let Some(slot) = self.channels[index].as_mut()
                && slot.channel.in_flight() > 0
                && !slot.resetting
            {
                slot.resetting = true;
                self.stats.resets += 1;
                self.go_on_resetting(index);
            }
        }
    }

    #[cold]
    fn go_on_resetting(&mut self, index: usize) {
        let Some(slot) = self.channels[index].as_mut() else { return };
        let state = slot.channel.reset();
        if state == Reset::Pending && self.quarantine {
            return;
        }
        slot.resetting = false;
        // What completed before the reset did is reported first, so that it is not copied again.
        while self.collect(index) > 0 {}
        let Some(slot) = self.channels[index].as_mut() else { return };
        // Cold: once per lost copy.
        let mut dead = Vec::new();
        slot.channel.take_outstanding(&mut dead);
        self.stats.quarantined += dead.len() as u64;
        for operation in &dead {
            // SAFETY: submitted through this mover and not reported, so its packet is not ready and its memory valid;
            // the reset has proved that the engine touches it no more.
            unsafe { self.redo(operation, 0) };
        }
    }

    /// Test switch: lost copies are made by the core at once, without waiting for proof that they are dead.
    #[cfg(feature = "test-switches")]
    pub fn switch_off_quarantine(&mut self) {
        self.quarantine = false;
    }
}

impl Drop for Mover {
    /// Channels finish or stop what is in flight before they go, so nothing lands afterwards.
    fn drop(&mut self) {
        self.channels.clear();
    }
}

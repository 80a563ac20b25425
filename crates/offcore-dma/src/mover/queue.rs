//! The mover's state of a queue.

use arrayvec::ArrayVec;

use super::choice::Choice;
use super::health::Health;
use super::latency::Latency;
use super::stats::Reason;
use super::tally::Tally;
use super::{ChannelId, MAX_CHANNELS_PER_QUEUE, Mode};
use crate::channel::Token;
use crate::cpu::Copier;
use crate::reorder::ReorderRing;

#[derive(Debug)]
pub(crate) struct Queue {
    pub(crate) ring: ReorderRing,
    pub(super) mode: Mode,
    pub(super) channels: ArrayVec<ChannelId, MAX_CHANNELS_PER_QUEUE>,
    pub(super) turn: usize,
    pub(super) copier: Copier,
    /// In mode `auto`: the choice between core and engine, its statistics, and the reason why a chosen engine is
    /// presently not used.
    pub(super) choice: Choice,
    pub(super) tally: Tally,
    pub(super) unavailable: Option<Reason>,
    /// Used in mode `auto` with a latency limit.
    pub(super) latency: Latency,
    pub(super) weight: u16,
    /// Number of copies in flight in channels.
    pub(super) outstanding: usize,
    /// Number of copies given to channels so far.
    pub(super) by_engine: u64,
    /// Number of copies that may be in flight in channels.
    pub(super) share: usize,
    /// Whether the queue had work for its channels in the previous period, and in the present one.
    pub(super) active: bool,
    pub(super) worked: bool,
    /// Counts failures because its guest's memory was inaccessible.
    pub(super) faults: Health,
    /// TSC ticks after which a copy counts as lost, if they differ from the mover's.
    pub(crate) lost_after: Option<u64>,
    /// The oldest outstanding packet at the last check, and the time since when it has been the oldest.
    pub(super) watched: Option<(u32, u64)>,
}

impl Queue {
    /// Creates a queue with room for `packets` in flight. The core makes its copies with `copier`.
    pub(super) fn new(packets: usize, copier: Copier) -> Self {
        Self {
            ring: ReorderRing::new(packets),
            mode: Mode::Cpu,
            channels: ArrayVec::new(),
            turn: 0,
            copier,
            choice: Choice::new(),
            tally: Tally::default(),
            unavailable: None,
            latency: Latency::new(),
            weight: 1,
            outstanding: 0,
            by_engine: 0,
            share: 0,
            active: false,
            worked: false,
            faults: Health::new(),
            lost_after: None,
            watched: None,
        }
    }

    /// Whether mode `auto` has a choice for this queue.
    pub(super) fn is_auto(&self) -> bool {
        self.mode == Mode::Auto && !self.channels.is_empty()
    }

    /// Records the completions at the start of `tokens` that belong to this queue (the first does). Returns their
    /// number.
    #[inline(always)]
    pub(super) fn completed(&mut self, tokens: &[Token]) -> usize {
        let run = self.ring.complete_run(tokens);
        self.outstanding = self.outstanding.saturating_sub(run);
        self.faults.succeeded(run as u32);
        run
    }
}

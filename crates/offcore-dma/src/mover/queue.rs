//! The mover's state of a queue.

use arrayvec::ArrayVec;

use super::choice::QueueChoice;
use super::health::Health;
use super::latency::Latency;
use super::recovery::Watch;
use super::shares::Share;
use super::stats::Reason;
use super::tally::Tally;
use super::{ChannelId, MAX_CHANNELS_PER_QUEUE, Mode};
use crate::channel::Token;
use crate::cpu::Copier;
use crate::reorder::ReorderRing;

#[derive(Debug)]
pub(crate) struct MoverQueue {
    pub(crate) ring: ReorderRing,
    pub(super) mode: Mode,
    pub(super) channels: Turns,
    pub(super) copier: Copier,
    /// In mode `auto`: the choice between core and engine, its statistics, and the reason why a chosen engine is
    /// presently not used.
    pub(super) choice: QueueChoice,
    pub(super) tally: Tally,
    pub(super) unavailable: Option<Reason>,
    /// Used in mode `auto` with a latency limit.
    pub(super) latency: Latency,
    /// Number of copies in flight in channels.
    pub(super) outstanding: usize,
    /// Number of copies given to channels so far.
    pub(super) by_engine: u64,
    pub(super) share: Share,
    /// Counts failures because its guest's memory was inaccessible.
    pub(super) faults: Health,
    pub(crate) watch: Watch,
}

/// The channels of a queue, used in turn.
#[derive(Debug, Default)]
pub(super) struct Turns {
    channels: ArrayVec<ChannelId, MAX_CHANNELS_PER_QUEUE>,
    turn: usize,
}

impl Turns {
    pub(super) fn new(channels: ArrayVec<ChannelId, MAX_CHANNELS_PER_QUEUE>) -> Self {
        Self { channels, turn: 0 }
    }

    #[inline(always)]
    pub(super) fn all(&self) -> &[ChannelId] {
        &self.channels
    }

    /// Returns the channel `ahead` turns after the next one; `ahead` is less than the number of channels.
    #[inline(always)]
    pub(super) fn ahead(&self, ahead: usize) -> ChannelId {
        let (n, turn) = (self.channels.len(), self.turn + ahead);
        self.channels[if turn < n { turn } else { turn - n }]
    }

    #[inline(always)]
    pub(super) fn advance(&mut self) {
        self.turn = if self.turn + 1 < self.channels.len() { self.turn + 1 } else { 0 };
    }
}

impl MoverQueue {
    /// Creates a queue with room for `packets` in flight. The core makes its copies with `copier`.
    pub(super) fn new(packets: usize, copier: Copier) -> Self {
        Self {
            ring: ReorderRing::new(packets),
            mode: Mode::Cpu,
            channels: Turns::default(),
            copier,
            choice: QueueChoice::new(),
            tally: Tally::default(),
            unavailable: None,
            latency: Latency::new(),
            outstanding: 0,
            by_engine: 0,
            share: Share::default(),
            faults: Health::new(),
            watch: Watch::default(),
        }
    }

    /// Whether mode `auto` has a choice for this queue.
    pub(super) fn is_auto(&self) -> bool {
        self.mode == Mode::Auto && !self.channels.all().is_empty()
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

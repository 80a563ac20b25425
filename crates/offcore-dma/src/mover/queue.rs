//! What the mover keeps of one queue.

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
    /// In mode `auto`: who copies, what has been copied, and why the engine is not used just now although it is chosen.
    pub(super) choice: Choice,
    pub(super) tally: Tally,
    pub(super) unavailable: Option<Reason>,
    /// In mode `auto`, when there is a longest time that packets may take.
    pub(super) latency: Latency,
    pub(super) weight: u16,
    /// Copies in channels.
    pub(super) outstanding: usize,
    /// Copies ever given to channels.
    pub(super) by_engine: u64,
    /// Copies that may be in channels.
    pub(super) share: usize,
    /// Whether it had work for its channels in the period before, and in this one.
    pub(super) active: bool,
    pub(super) worked: bool,
    /// How often its guest's memory could not be reached.
    pub(super) faults: Health,
    /// TSC ticks after which a copy counts as lost, where it is not the mover's.
    pub(crate) lost_after: Option<u64>,
    /// The packet that was outstanding and the oldest when the queue was last looked at, and since when.
    pub(super) watched: Option<(u32, u64)>,
}

impl Queue {
    /// A queue with room for `packets` in flight, whose copies the core makes, by `copier`.
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

    /// Whether mode `auto` has something to choose.
    pub(super) fn is_auto(&self) -> bool {
        self.mode == Mode::Auto && !self.channels.is_empty()
    }

    /// Notes the completions at the start of `tokens` that are this queue's, the first at least; returns their number.
    #[inline(always)]
    pub(super) fn completed(&mut self, tokens: &[Token]) -> usize {
        let run = self.ring.complete_run(tokens);
        self.outstanding = self.outstanding.saturating_sub(run);
        self.faults.succeeded(run as u32);
        run
    }
}

//! The stage clock measures the time that a core spends in each stage of the data path.
//!
//! A pair of RDTSC reads costs about 40 cycles, more than a stage may take per packet. Therefore one burst in
//! [`SAMPLE`] is timed as a whole, stage by stage. In the other bursts, a lap is one predictable branch.

use crate::counter::Counter;
use crate::family::Family;
use crate::page::Block;
use crate::{counters, named, tsc};

/// One burst in this number is timed.
pub const SAMPLE: u32 = 64;

named! {
    /// A stage of the data path, in the order in which a packet passes them.
    #[repr(u8)]
    pub enum Stage counts Ticks {
        /// Receiving from a port that is not a virtqueue.
        Rx = "rx",
        /// Reading available descriptors, translating addresses.
        Virtqueue = "virtqueue",
        /// Packet and virtio-net headers: building, parsing, rewriting.
        Header = "header",
        /// Payload copies made by this core.
        Copy = "copy",
        /// Submitting copies to a channel, including the doorbell.
        Submit = "submit",
        /// Collecting completions from channels.
        Poll = "poll",
        /// Writing used descriptors and notifying.
        Publish = "publish",
        /// Sending to a port that is not a virtqueue.
        Tx = "tx",
        /// The application's own work per packet (`--work-ns`).
        Application = "application",
        /// Polls without work.
        Idle = "idle",
    }
}

impl Stage {
    /// Returns the group, in Figure 3 of the vhost guide, to which the stage belongs; `None` for work outside the data
    /// path.
    pub const fn group(self) -> Option<Group> {
        match self {
            Stage::Rx | Stage::Tx | Stage::Header => Some(Group::Switching),
            Stage::Virtqueue | Stage::Publish => Some(Group::Virtqueue),
            Stage::Copy | Stage::Submit | Stage::Poll => Some(Group::Copy),
            Stage::Application | Stage::Idle => None,
        }
    }
}

named! {
    /// The three groups of Figure 3 of the vhost guide (758358-001US).
    pub enum Group {
        /// rx, tx and header: forwarding itself.
        Switching = "switching",
        /// virtqueue and publish: descriptors in and out.
        Virtqueue = "virtqueue",
        /// copy, submit and poll: payload, by the core or an engine.
        Copy = "copy",
    }
}

/// Ticks charged to each stage in the sampled bursts of a worker.
#[derive(Debug)]
pub struct StageClock {
    last: u64,
    sampling: bool,
    countdown: u32,
    ticks: Block,
}

counters! {
    /// Counters of a stage clock in addition to the stages.
    pub struct StageCounts {
        /// Bursts that were timed.
        sampled_bursts: Bursts,
    }
}

/// The counters of a worker's stage clock.
pub static STAGES: Family = Family::new(
    "stages",
    "Time that a worker spent in each stage of the data path, in the timed bursts.",
    &[&Stage::COUNTERS, &StageCounts::COUNTERS],
);

impl StageClock {
    /// Creates a clock that counts in `ticks`, a block of the family [`STAGES`].
    ///
    /// # Panics
    /// If the block has another number of counters.
    pub fn new(ticks: Block) -> Self {
        assert_eq!(ticks.len(), STAGES.size(), "a stage clock's block is of the family STAGES");
        Self { last: 0, sampling: false, countdown: 1, ticks }
    }

    /// Creates a clock with private counters.
    pub fn private() -> Self {
        Self::new(Block::private(&STAGES))
    }

    /// Begins a burst, and decides whether it is timed.
    #[inline(always)]
    pub fn begin(&mut self) {
        self.countdown -= 1;
        if self.countdown == 0 {
            self.start_sample();
        }
    }

    #[cold]
    fn start_sample(&mut self) {
        self.countdown = SAMPLE;
        self.sampling = true;
        self.ticks.counter(Stage::ALL.len()).add(1);
        self.last = tsc::now();
    }

    /// Charges the time since the last lap (or the begin) to `stage`.
    #[inline(always)]
    pub fn lap(&mut self, stage: Stage) {
        if self.sampling {
            self.charge(stage);
        }
    }

    #[cold]
    fn charge(&mut self, stage: Stage) {
        let now = tsc::now();
        self.ticks.counter(stage as usize).add(now.wrapping_sub(self.last));
        self.last = now;
    }

    /// Ends the burst. Uncharged time is charged to `rest`.
    #[inline(always)]
    pub fn end(&mut self, rest: Stage) {
        if self.sampling {
            self.charge(rest);
            self.sampling = false;
        }
    }

    /// Returns the ticks charged to `stage` so far, in sampled bursts only.
    pub fn ticks(&self, stage: Stage) -> u64 {
        self.counter(stage as usize).value()
    }

    fn counter(&self, index: usize) -> &Counter {
        self.ticks.counter(index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_burst_in_sample_is_charged() {
        let mut clock = StageClock::private();
        for _ in 0..2 * SAMPLE {
            clock.begin();
            clock.lap(Stage::Virtqueue);
            clock.lap(Stage::Copy);
            clock.end(Stage::Publish);
        }
        assert_eq!(clock.counter(10).value(), 2);
        assert!(clock.ticks(Stage::Copy) > 0);
        assert_eq!(clock.ticks(Stage::Rx), 0);
    }
}

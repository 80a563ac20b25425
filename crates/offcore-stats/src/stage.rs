//! The stage clock: where a core's cycles go.
//!
//! A pair of RDTSC reads costs some 40 cycles, more than a stage may take per packet. So one burst in
//! [`SAMPLE`] is timed as a whole, stage by stage; on the other bursts a lap is one predictable branch.

use std::fmt;

use crate::page::Block;
use crate::{counter::Counter, tsc};

/// One burst in this many is timed.
pub const SAMPLE: u32 = 64;

/// A stage of the data path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Stage {
    /// Receiving from a port that is not a virtqueue.
    Rx,
    /// Reading available descriptors, translating addresses.
    Virtqueue,
    /// Packet and virtio-net headers: building, parsing, rewriting.
    Header,
    /// Payload copies made by this core.
    Copy,
    /// Handing copies to a channel, doorbell included.
    Submit,
    /// Collecting completions from channels.
    Poll,
    /// Writing used descriptors and notifying.
    Publish,
    /// Sending to a port that is not a virtqueue.
    Tx,
    /// The application's own work per packet (`--work-ns`).
    Application,
    /// Polls that found nothing to do.
    Idle,
}

impl Stage {
    /// Every stage, in the order of the packet's way.
    pub const ALL: [Stage; 10] = [
        Stage::Rx,
        Stage::Virtqueue,
        Stage::Header,
        Stage::Copy,
        Stage::Submit,
        Stage::Poll,
        Stage::Publish,
        Stage::Tx,
        Stage::Application,
        Stage::Idle,
    ];

    /// The name used in reports and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Stage::Rx => "rx",
            Stage::Virtqueue => "virtqueue",
            Stage::Header => "header",
            Stage::Copy => "copy",
            Stage::Submit => "submit",
            Stage::Poll => "poll",
            Stage::Publish => "publish",
            Stage::Tx => "tx",
            Stage::Application => "application",
            Stage::Idle => "idle",
        }
    }

    /// The group of Figure 3 of the vhost guide that the stage is summed into; `None` for work outside the data path.
    pub const fn group(self) -> Option<Group> {
        match self {
            Stage::Rx | Stage::Tx | Stage::Header => Some(Group::Switching),
            Stage::Virtqueue | Stage::Publish => Some(Group::Virtqueue),
            Stage::Copy | Stage::Submit | Stage::Poll => Some(Group::Copy),
            Stage::Application | Stage::Idle => None,
        }
    }
}

/// The three groups of Figure 3 of the vhost guide (758358-001US).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Group {
    /// rx, tx and header: forwarding itself.
    Switching,
    /// virtqueue and publish: descriptors in and out.
    Virtqueue,
    /// copy, submit and poll: payload, by the core or an engine.
    Copy,
}

impl Group {
    /// All three, in Figure 3's order.
    pub const ALL: [Group; 3] = [Group::Switching, Group::Virtqueue, Group::Copy];

    /// The name used in reports and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Group::Switching => "switching",
            Group::Virtqueue => "virtqueue",
            Group::Copy => "copy",
        }
    }
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Ticks charged to each stage over the sampled bursts of one worker.
#[derive(Debug)]
pub struct StageClock {
    last: u64,
    sampling: bool,
    countdown: u32,
    ticks: Block,
}

/// The names of the clock's counters on the statistics page: the stages, then the number of sampled bursts.
pub const COUNTERS: [&str; 11] = [
    "rx",
    "virtqueue",
    "header",
    "copy",
    "submit",
    "poll",
    "publish",
    "tx",
    "application",
    "idle",
    "sampled_bursts",
];

impl StageClock {
    /// A clock that counts in `ticks`, a block made with [`COUNTERS`].
    ///
    /// # Panics
    /// When the block has another number of counters.
    pub fn new(ticks: Block) -> Self {
        assert_eq!(ticks.len(), COUNTERS.len(), "a stage clock's block is made with stage::COUNTERS");
        Self { last: 0, sampling: false, countdown: 1, ticks }
    }

    /// A clock whose counters nobody else sees.
    pub fn private() -> Self {
        Self::new(Block::private(&COUNTERS))
    }

    /// Begins a burst; decides whether this one is timed.
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

    /// Ends the burst; what has not been charged yet goes to `rest`.
    #[inline(always)]
    pub fn end(&mut self, rest: Stage) {
        if self.sampling {
            self.charge(rest);
            self.sampling = false;
        }
    }

    /// Ticks charged to `stage` so far, over the sampled bursts only.
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

    #[test]
    fn counters_are_named_after_the_stages() {
        for (stage, name) in Stage::ALL.iter().zip(COUNTERS) {
            assert_eq!(stage.name(), name);
        }
    }
}

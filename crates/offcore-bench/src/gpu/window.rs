//! A window: what all threads of a measurement do for a while, and what they have seen of it.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

use offcore_stats::{Histogram, tsc};

/// How packets come.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Traffic {
    /// As fast as they are taken.
    Closed,
    /// As fast as they are taken, so many of them, and every one is looked at in full: untimed.
    EveryOne(u64),
    /// At a pace, each at its time.
    Paced {
        /// TSC ticks from one packet of a pipeline to the next.
        interval: f64,
        /// TSC ticks that a packet waits for others of its burst.
        timeout: u64,
    },
}

/// What is asked of a pipeline's ends.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub burst: usize,
    /// Bytes of a packet, without FCS.
    pub len: usize,
    /// Packets that a pipeline has in use.
    pub circulating: usize,
    pub traffic: Traffic,
}

/// What is going on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Phase {
    /// Not counted yet.
    WarmUp,
    /// Counted.
    Measured,
    /// No more packets are sent.
    Ending,
}

/// One pipeline's part of a window.
#[derive(Debug)]
pub(super) struct PipelineState {
    /// Packets that were sent, once no more will be; before that [`u64::MAX`].
    sent: AtomicU64,
    /// Bursts that were counted.
    counted: AtomicU64,
}

/// A window that is going on.
#[derive(Debug)]
pub(super) struct Window {
    pub plan: Plan,
    /// TSC when the first packet of every pipeline is due, where there is a pace.
    pub origin: u64,
    phase: AtomicU8,
    /// TSC when it ended; before that [`u64::MAX`].
    ended: AtomicU64,
    failed: AtomicBool,
    pipelines: Vec<PipelineState>,
}

impl Window {
    /// A window of `pipelines` pipelines that warms up.
    pub(super) fn new(plan: Plan, pipelines: usize) -> Self {
        let pipeline = |_| PipelineState { sent: AtomicU64::new(u64::MAX), counted: AtomicU64::new(0) };
        Self {
            plan,
            // Some time from now, so that everybody is there.
            origin: tsc::now() + tsc::hz() / 1000,
            phase: AtomicU8::new(Phase::WarmUp as u8),
            ended: AtomicU64::new(u64::MAX),
            failed: AtomicBool::new(false),
            pipelines: (0..pipelines).map(pipeline).collect(),
        }
    }

    /// What is going on.
    #[inline(always)]
    pub(super) fn phase(&self) -> Phase {
        match self.phase.load(Ordering::Acquire) {
            0 => Phase::WarmUp,
            1 => Phase::Measured,
            _ => Phase::Ending,
        }
    }

    /// Counting begins, unless something was wrong before.
    pub(super) fn begin_to_measure(&self) {
        let (from, to) = (Phase::WarmUp as u8, Phase::Measured as u8);
        let _ = self.phase.compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// No more packets are to be sent.
    pub(super) fn end(&self) {
        self.ended.fetch_min(tsc::now(), Ordering::Relaxed);
        self.phase.store(Phase::Ending as u8, Ordering::Release);
    }

    /// TSC when it ended, if it has.
    pub(super) fn ended(&self) -> Option<u64> {
        let ended = self.ended.load(Ordering::Relaxed);
        (ended != u64::MAX).then_some(ended)
    }

    /// Something is wrong: no more packets are sent.
    pub(super) fn fail(&self) {
        self.failed.store(true, Ordering::Relaxed);
        self.end();
    }

    /// Whether something is wrong.
    pub(super) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }

    /// Pipeline `pipeline` has sent `packets`, and sends no more.
    pub(super) fn has_sent(&self, pipeline: usize, packets: u64) {
        self.pipelines[pipeline].sent.store(packets, Ordering::Release);
    }

    /// Packets that pipeline `pipeline` has sent, if it sends no more.
    #[inline(always)]
    pub(super) fn sent(&self, pipeline: usize) -> Option<u64> {
        let sent = self.pipelines[pipeline].sent.load(Ordering::Acquire);
        (sent != u64::MAX).then_some(sent)
    }

    /// Pipeline `pipeline` has counted `bursts` so far.
    #[inline(always)]
    pub(super) fn has_counted(&self, pipeline: usize, bursts: u64) {
        self.pipelines[pipeline].counted.store(bursts, Ordering::Relaxed);
    }

    /// Bursts that the pipeline with the fewest has counted.
    pub(super) fn counted(&self) -> u64 {
        self.pipelines
            .iter()
            .map(|pipeline| pipeline.counted.load(Ordering::Relaxed))
            .min()
            .unwrap_or_default()
    }
}

/// What was seen in a window.
#[derive(Clone, Debug, Default)]
pub(super) struct Seen {
    /// Million packets a second while it was measured, of all pipelines.
    pub mpps: f64,
    pub bursts: u64,
    /// Packets that came back, counted or not.
    pub received: u64,
    /// Packets that were looked at in full.
    pub verified: u64,
    /// TSC ticks from submission, or from when a packet was due, until it was back.
    pub latencies: Histogram,
    /// TSC ticks that handing bursts over took, and how many those were.
    pub submits: (u64, u64),
    /// TSC ticks that taking the counted bursts took, with the work where the lcore does it.
    pub collects: u64,
}

impl Seen {
    /// What two have seen together.
    pub(super) fn add(&mut self, other: &Self) {
        self.mpps += other.mpps;
        self.bursts += other.bursts;
        self.received += other.received;
        self.verified += other.verified;
        self.latencies.merge(&other.latencies);
        self.submits.0 += other.submits.0;
        self.submits.1 += other.submits.1;
        self.collects += other.collects;
    }
}

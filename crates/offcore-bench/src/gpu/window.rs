//! A window: the common plan of all threads for a period, and its results.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

use offcore_stats::{Histogram, tsc};

/// Arrival of packets.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Traffic {
    /// Closed loop at the maximum rate.
    Closed,
    /// Closed loop with this number of packets, which are all checked completely. Untimed.
    EveryOne(u64),
    /// Fixed rate, where each packet has a due time.
    Paced {
        /// TSC ticks between two packets of a pipeline.
        interval: f64,
        /// Maximum TSC ticks that a packet waits for other packets of its burst.
        timeout: u64,
    },
}

/// Parameters of a window for the ends of a pipeline.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub burst: usize,
    /// Length of a packet in bytes, without FCS.
    pub len: usize,
    /// Number of packets that a pipeline uses.
    pub circulating: usize,
    pub traffic: Traffic,
}

/// Phase of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Phase {
    /// Packets circulate and are not counted yet.
    WarmUp,
    /// Packets are counted.
    Measured,
    /// Sending has ended.
    Ending,
}

/// State of a pipeline in a window.
#[derive(Debug)]
pub(super) struct PipelineState {
    /// Number of sent packets after sending has ended; [`u64::MAX`] before.
    sent: AtomicU64,
    /// Number of counted bursts.
    counted: AtomicU64,
}

/// A window in progress.
#[derive(Debug)]
pub(super) struct Window {
    pub plan: Plan,
    /// TSC at which the first packet of every pipeline is due at a fixed rate.
    pub origin: u64,
    phase: AtomicU8,
    /// TSC at the end of the window; [`u64::MAX`] before.
    ended: AtomicU64,
    failed: AtomicBool,
    pipelines: Vec<PipelineState>,
}

impl Window {
    /// Creates a window of `pipelines` pipelines in the warm-up phase.
    pub(super) fn new(plan: Plan, pipelines: usize) -> Self {
        let pipeline = |_| PipelineState { sent: AtomicU64::new(u64::MAX), counted: AtomicU64::new(0) };
        Self {
            plan,
            // Slightly in the future, so that all threads are ready.
            origin: tsc::now() + tsc::hz() / 1000,
            phase: AtomicU8::new(Phase::WarmUp as u8),
            ended: AtomicU64::new(u64::MAX),
            failed: AtomicBool::new(false),
            pipelines: (0..pipelines).map(pipeline).collect(),
        }
    }

    /// Returns the current phase.
    #[inline(always)]
    pub(super) fn phase(&self) -> Phase {
        match self.phase.load(Ordering::Acquire) {
            0 => Phase::WarmUp,
            1 => Phase::Measured,
            _ => Phase::Ending,
        }
    }

    /// Starts counting, unless the window has already failed.
    pub(super) fn begin_to_measure(&self) {
        let (from, to) = (Phase::WarmUp as u8, Phase::Measured as u8);
        let _ = self.phase.compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Ends sending.
    pub(super) fn end(&self) {
        self.ended.fetch_min(tsc::now(), Ordering::Relaxed);
        self.phase.store(Phase::Ending as u8, Ordering::Release);
    }

    /// Returns the TSC at the end of the window, if it has ended.
    pub(super) fn ended(&self) -> Option<u64> {
        let ended = self.ended.load(Ordering::Relaxed);
        (ended != u64::MAX).then_some(ended)
    }

    /// Records an error and ends sending.
    pub(super) fn fail(&self) {
        self.failed.store(true, Ordering::Relaxed);
        self.end();
    }

    /// Returns whether an error has occurred.
    pub(super) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }

    /// Records that pipeline `pipeline` has ended sending after `packets` packets.
    pub(super) fn has_sent(&self, pipeline: usize, packets: u64) {
        self.pipelines[pipeline].sent.store(packets, Ordering::Release);
    }

    /// Returns the number of packets that pipeline `pipeline` has sent, if it has ended sending.
    #[inline(always)]
    pub(super) fn sent(&self, pipeline: usize) -> Option<u64> {
        let sent = self.pipelines[pipeline].sent.load(Ordering::Acquire);
        (sent != u64::MAX).then_some(sent)
    }

    /// Records that pipeline `pipeline` has counted `bursts` bursts so far.
    #[inline(always)]
    pub(super) fn has_counted(&self, pipeline: usize, bursts: u64) {
        self.pipelines[pipeline].counted.store(bursts, Ordering::Relaxed);
    }

    /// Returns the number of counted bursts of the pipeline with the fewest.
    pub(super) fn counted(&self) -> u64 {
        self.pipelines
            .iter()
            .map(|pipeline| pipeline.counted.load(Ordering::Relaxed))
            .min()
            .unwrap_or_default()
    }
}

/// Results of a window.
#[derive(Clone, Debug, Default)]
pub(super) struct Seen {
    /// Million packets per second in the measured phase, of all pipelines.
    pub mpps: f64,
    pub bursts: u64,
    /// Number of returned packets, counted or not.
    pub received: u64,
    /// Number of completely checked packets.
    pub verified: u64,
    /// TSC ticks from submission, or from the due time of a packet, until its return.
    pub latencies: Histogram,
    /// TSC ticks spent on submission, and number of submitted bursts.
    pub submits: (u64, u64),
    /// TSC ticks spent on collecting the counted bursts, including the work if the lcore does it.
    pub collects: u64,
}

impl Seen {
    /// Adds the results of another thread or window.
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

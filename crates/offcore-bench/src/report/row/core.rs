//! Columns of core costs: ratios of modes, shares, copies, and the model of the device.

use serde::Serialize;

use crate::report::sample::{Bounds, SumRatio};

/// Copies of a core or an engine, and the sharing of its channel.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct DmaColumns {
    /// Gigabytes per second that the copier moved, by its own clock: the TSC, or the virtual clock of a model.
    pub gigabytes_per_s: Option<f64>,
    /// Sharing of a channel between workers: `lock`, `swq` or `bound`.
    pub sharing: Option<&'static str>,
    /// Number of workers that submit concurrently.
    pub workers: Option<usize>,
    /// TSC ticks per copy for submission.
    pub submit_cycles: Option<f64>,
    /// TSC ticks per copy for completion.
    pub reap_cycles: Option<f64>,
}

/// Comparison of a model with a published figure.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct ModelColumns {
    /// The upper end of a published range; equal to `published` for a single figure, null for a lower bound.
    pub published_high: Option<f64>,
    /// Whether the published figure is a lower bound.
    pub at_least: Option<bool>,
    /// The source of the figure, and the assumed model inputs that the source leaves open.
    pub source: Option<&'static str>,
    /// `fitted`, `taken` (a parameter equals this figure), `assumed` (a load was chosen for it) or `judged`.
    pub role: Option<&'static str>,
    /// Nanoseconds in the model's result that belong to the source's own software.
    pub software_ns: Option<f64>,
    /// Deviation as a share of the published figure; 0 inside a range or above a bound.
    pub error: Option<f64>,
    /// Whether the deviation is acceptable.
    pub pass: Option<bool>,
}

/// Ratios of the variants that alternated, and their noise.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Ratios {
    #[serde(flatten)]
    pub noise: Noise,
    #[serde(flatten)]
    pub offload: OffloadRatio,
    #[serde(flatten)]
    pub auto: AutoRatios,
}

/// Noise of ratios, measured with two equal variants.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Noise {
    /// Noise floor: maximum deviation from 1 of the ratio of a variant to itself, measured just before (A/A), as a
    /// share. A ratio of the row that deviates less from 1 is not significant.
    pub noise_floor: Option<f64>,
    /// The interval of that ratio: the 90 % bootstrap interval, extended to the ratios of both halves of the blocks.
    pub noise_lower: Option<f64>,
    pub noise_upper: Option<f64>,
}

impl From<Option<Bounds>> for Noise {
    fn from(bounds: Option<Bounds>) -> Self {
        Self {
            noise_floor: bounds.map(Bounds::noise_floor),
            noise_lower: bounds.map(|bounds| bounds.lower),
            noise_upper: bounds.map(|bounds| bounds.upper),
        }
    }
}

/// Mode `offload`: speed relative to `cpu`, which alternated with it; above 1 is faster.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct OffloadRatio {
    /// Ratio of sums.
    pub offload_over_cpu: Option<f64>,
    /// TCP: median of the ratios of paired blocks.
    pub offload_over_cpu_median: Option<f64>,
    /// Lower bound of the ratio of sums by bootstrap.
    pub offload_over_cpu_lower: Option<f64>,
    /// TCP: the ratio of sums of core, far host and applications together. The engine's time is excluded on both sides.
    pub offload_over_cpu_both: Option<f64>,
}

impl OffloadRatio {
    /// Returns the columns except the two of TCP.
    pub(crate) fn new(ratio: Option<SumRatio>) -> Self {
        Self {
            offload_over_cpu: ratio.map(|ratio| ratio.sums),
            offload_over_cpu_lower: ratio.map(|ratio| ratio.lower),
            ..Self::default()
        }
    }
}

/// Mode `auto`: speed relative to the modes that alternated with it; above 1 is faster.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct AutoRatios {
    /// Relative to `cpu`: ratio of the sums of the whole run, including the settling phase in which `auto` learns.
    pub auto_over_cpu: Option<f64>,
    /// The same relative to `offload` on the same engine.
    pub auto_over_offload: Option<f64>,
    /// The same relative to the faster of the two.
    pub auto_over_better: Option<f64>,
    /// Median of the ratios of paired blocks.
    pub auto_over_better_median: Option<f64>,
    /// Lower bound of the ratio of sums by bootstrap.
    pub auto_over_better_lower: Option<f64>,
    /// The ratio of sums over the settling phase alone, about two thousand bursts.
    pub auto_settling_over_better: Option<f64>,
    /// Data of changing temperature: speed relative to an oracle that uses the better mode at each temperature, as a
    /// ratio of sums.
    pub auto_over_oracle: Option<f64>,
    /// Lower bound of that ratio by bootstrap.
    pub auto_over_oracle_lower: Option<f64>,
}

/// Shares of the core's cycles.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Shares {
    /// Switching, that is, headers and forwarding (Figure 3 of the vhost guide).
    pub share_switching: Option<f64>,
    /// Descriptors: fetching available ones, writing used ones.
    pub share_virtqueue: Option<f64>,
    /// Copying, or submitting copies and reaping completions.
    pub share_copy: Option<f64>,
}

/// Work of the core and of an engine per packet, and the copies that they made.
#[derive(Clone, Debug, Default, Serialize)]
pub struct CoreColumns {
    /// TSC ticks of a poll without packets.
    pub empty_poll_cycles: Option<f64>,
    pub engine_ns_per_copy: Option<f64>,
    /// Bytes that core and engines copied per packet, including virtio-net headers: twice the packet's length in a
    /// loop. In one copy from guest to guest it is once the length, except for the first 64 bytes, which the core
    /// writes itself.
    pub copied_bytes_per_packet: Option<f64>,
    /// Engine whose channel was attached but idle while the core copied: this measures the cost of an idle channel.
    pub idle_channel: Option<&'static str>,
    /// `cpu` with an idle channel: speed relative to `cpu` without it, as a ratio of sums.
    pub idle_channel_over_cpu: Option<f64>,
    /// Routines with which the core copied: out of guest memory and into it, or from guest to guest. Stores that bypass
    /// the caches (`non-temporal`, `direct`) lower the core's cost and raise the reader's.
    pub copy_routine: Option<String>,
    /// Nanoseconds per packet that the guests spent on their virtqueues, on writing packets and on reading them; the
    /// mean. TCP: nanoseconds of the far host and both applications.
    pub guest_ns_per_packet: Option<f64>,
    /// Nanoseconds per packet of core and guests together; the mean.
    pub both_ns_per_packet: Option<f64>,
    /// Our speed relative to the peer's, for core and guests together, as a ratio of sums.
    pub peer_both_ratio: Option<f64>,
    /// Whether a background copier on the other core made as many copies as this core during the timed parts.
    pub background: bool,
    pub background_copies_per_packet: Option<f64>,
    /// Million packets per second that core and engine reach together.
    pub sustained_mpps: Option<f64>,
    /// The bottleneck: `core` or `engine`.
    pub bound: Option<&'static str>,
}

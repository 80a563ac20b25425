//! One row of a report: the stable JSON object of every benchmark.
//!
//! The fields of a row are grouped by subject. In JSON all groups are one flat object, whose field names and order are
//! a public interface for scripts. Groups and their fields are in this order.

mod core;
mod gpu;
mod peer;
mod tcp;

use std::fmt;

use offcore_stats::{Histogram, tsc};
use serde::Serialize;

pub use self::core::{
    AutoRatios, CoreColumns, DmaColumns, ModelColumns, Noise, OffloadRatio, Ratios, Shares,
};
pub use self::gpu::{BreakEven, GpuColumns, GpuModel, GpuSetup, GpuTimes};
pub use self::peer::{AboutPeer, Ends, Load, PeerRatio};
pub use self::tcp::{BesideRatio, CostPerKib, CostPerRequest, Payload, TcpColumns};
use crate::BURST;
use crate::report::sample::{Spread, Steadiness};

/// Current version of the row schema.
pub const SCHEMA: u32 = 5;

/// A row.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Row {
    #[serde(flatten)]
    pub head: Head,
    #[serde(flatten)]
    pub tcp: TcpColumns,
    #[serde(flatten)]
    pub figures: Figures,
    #[serde(flatten)]
    pub latency: Latency,
    #[serde(flatten)]
    pub load: Load,
    #[serde(flatten)]
    pub published: Published,
    #[serde(flatten)]
    pub dma: DmaColumns,
    #[serde(flatten)]
    pub model: ModelColumns,
    #[serde(flatten)]
    pub peer: PeerRatio,
    #[serde(flatten)]
    pub ratios: Ratios,
    #[serde(flatten)]
    pub shares: Shares,
    #[serde(flatten)]
    pub counts: Counts,
    #[serde(flatten)]
    pub core: CoreColumns,
    #[serde(flatten)]
    pub clock: Steadiness,
    #[serde(flatten)]
    pub ends: Ends,
    /// Columns of `offcore bench gpu` only.
    #[serde(flatten)]
    pub gpu: Option<GpuColumns>,
}

/// The measured object and the method.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Head {
    /// Version of the row schema. It changes whenever a field changes its meaning or is removed.
    pub schema: u32,
    /// CPU model of the machine.
    pub cpu: Option<&'static str>,
    /// Git commit from which the program was built.
    pub commit: Option<&'static str>,
    /// The subcommand: `vhost`, `copy`, `dma`, `gpu`, `tcp`, `model`, or `predict`.
    pub bench: &'static str,
    /// The benchmark case: `loop`, `guest-to-guest`, `submit_reap`, …
    pub case: String,
    /// `core-cost`, `end-to-end`, `open-loop` or `virtual-clock`.
    pub arrangement: &'static str,
    /// Frame length in bytes, including the 4-byte FCS.
    pub frame: usize,
    /// Port type, if a port is involved: `af_xdp`, `af_packet`.
    pub port: Option<&'static str>,
    /// `cpu`, `offload` or `auto`.
    pub mode: String,
    /// `cpu`, `core:1`, …
    pub engine: String,
    /// Virtqueue format: `split` or `packed`; `none` without virtqueues.
    pub ring: &'static str,
    /// Virtqueue usage of the guests: `simple` or `linux`.
    pub guest: Option<&'static str>,
    /// The negotiated virtio features except VIRTIO_F_VERSION_1.
    pub features: Option<String>,
    pub burst: usize,
    /// `hot`, `remote` or `cold`; `none` if no temperature applies.
    pub temperature: String,
    /// Packets per window, or concurrent requests.
    pub window: usize,
}

/// Distribution of the samples, and the cost and rate that follow from its median.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Figures {
    /// Application work per packet in nanoseconds. It is included in the timed part.
    pub work_ns: u64,
    pub simulated: bool,
    /// Quantity of the spread.
    pub metric: &'static str,
    pub unit: &'static str,
    #[serde(flatten)]
    pub spread: Spread,
    /// Mean of the samples. Ratios are computed from the sums of samples.
    pub mean: Option<f64>,
    /// Minimum number of timed bursts per turn.
    pub bursts_per_turn: Option<usize>,
    pub ns_per_packet: f64,
    /// TSC ticks per packet, at the median.
    pub cycles_per_packet: f64,
    /// TSC ticks per second.
    pub tsc_hz: u64,
    /// Million packets per second that the core alone would reach.
    pub mpps: f64,
    /// `mpps` in Gbit/s of frames.
    pub gbps: f64,
    /// `gbps` including the 20 bytes of preamble, start delimiter and inter-packet gap that each frame takes on the
    /// wire.
    pub gbps_l1: f64,
}

/// Latency percentiles, if measured.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Latency {
    pub p50_ns: Option<f64>,
    pub p90_ns: Option<f64>,
    pub p99_ns: Option<f64>,
    /// HTTP: latency percentiles of the peer.
    pub peer_p50_ns: Option<f64>,
    pub peer_p99_ns: Option<f64>,
    pub p999_ns: Option<f64>,
}

impl Latency {
    /// Returns the percentiles of a histogram of TSC ticks.
    pub(crate) fn of(ticks: &Histogram) -> Self {
        let percentile = |part| (ticks.values() > 0).then(|| tsc::to_ns(ticks.percentile(part)));
        Self {
            p50_ns: percentile(0.5),
            p90_ns: percentile(0.9),
            p99_ns: percentile(0.99),
            p999_ns: percentile(0.999),
            ..Self::default()
        }
    }
}

/// The published figure.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Published {
    /// The figure published in the guide.
    pub published: Option<f64>,
    /// Unit of `published` and the system on which it was measured.
    pub published_unit: Option<&'static str>,
}

impl Published {
    /// Returns the columns for a figure, if there is one.
    pub(crate) fn new(figure: Option<f64>, unit: &'static str) -> Self {
        Self { published: figure, published_unit: figure.map(|_| unit) }
    }
}

/// Packet counters.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Counts {
    pub received: u64,
    /// Packets whose content and order were checked. HTTP: answers that were compared byte by byte. TCP over veth: the
    /// bytes of our windows, all of them compared, divided by the length of a full segment.
    pub verified: u64,
    pub lost: u64,
}

impl Counts {
    /// Returns the counters of `count` received and checked packets.
    pub(crate) fn all_of(count: u64) -> Self {
        Self { received: count, verified: count, lost: 0 }
    }
}

impl Row {
    /// Returns a row of the core's own copies in bursts, without virtqueues.
    pub(crate) fn new(bench: &'static str, case: impl fmt::Display, arrangement: &'static str) -> Self {
        let (case, mode, engine) = (case.to_string(), "cpu".into(), "cpu".into());
        let (ring, burst, temperature) = ("none", BURST, "none".into());
        let head =
            Head { bench, case, arrangement, mode, engine, ring, burst, temperature, ..Head::default() };
        Self { head, ..Self::default() }
    }

    /// Sets the columns that are derived from ticks per packet.
    pub fn set_cycles(&mut self, spread: Spread, tsc_hz: u64) {
        self.set_spread("core_cost", "tsc_cycles_per_packet", spread);
        self.figures.tsc_hz = tsc_hz;
        self.figures.cycles_per_packet = spread.median;
        self.figures.ns_per_packet = spread.median * 1e9 / tsc_hz as f64;
        self.set_mpps(1e3 / self.figures.ns_per_packet);
    }

    /// Sets the columns that are derived from ticks per copy, for submission and completion together and apart.
    pub(crate) fn set_submit_and_reap(&mut self, both: &[f64], [submit, reap]: [&[f64]; 2]) {
        self.set_cycles(Spread::of(both), tsc::hz());
        (self.figures.metric, self.figures.unit) = ("submit_and_reap", "tsc_cycles_per_copy");
        self.dma.submit_cycles = Some(Spread::of(submit).median);
        self.dma.reap_cycles = Some(Spread::of(reap).median);
    }

    /// Sets the columns that are derived from the packet rate.
    pub fn set_rate(&mut self, spread: Spread, tsc_hz: u64) {
        self.set_spread("rate", "mpps", spread);
        self.figures.tsc_hz = tsc_hz;
        self.figures.ns_per_packet = 1e3 / spread.median;
        self.figures.cycles_per_packet = self.figures.ns_per_packet * tsc_hz as f64 / 1e9;
        self.set_mpps(spread.median);
    }

    /// Sets the columns of latencies in TSC ticks.
    pub(crate) fn set_latency(&mut self, ticks: &Histogram) {
        self.latency = Latency::of(ticks);
        let [min, median, max] = [ticks.min(), ticks.percentile(0.5), ticks.max()].map(tsc::to_ns);
        self.set_spread("latency", "ns", Spread { runs: ticks.values() as usize, min, median, max });
        self.figures.tsc_hz = tsc::hz();
    }

    /// Sets the samples' distribution and its quantity.
    pub(crate) fn set_spread(&mut self, metric: &'static str, unit: &'static str, spread: Spread) {
        (self.figures.metric, self.figures.unit, self.figures.spread) = (metric, unit, spread);
    }

    /// Sets the columns that are derived from `mpps`, in million packets per second.
    pub(crate) fn set_mpps(&mut self, mpps: f64) {
        self.figures.mpps = mpps;
        self.figures.gbps = mpps * self.head.frame as f64 * 8.0 / 1e3;
        self.figures.gbps_l1 = mpps * (self.head.frame + 20) as f64 * 8.0 / 1e3;
    }

    /// Sets the columns for core and engine together, with `copies` copies per packet.
    pub fn set_engine(&mut self, engine_ns_per_copy: f64, copies: f64) {
        let (core_mpps, engine_mpps) = (self.figures.mpps, 1e3 / (engine_ns_per_copy * copies));
        self.core.engine_ns_per_copy = Some(engine_ns_per_copy);
        self.core.sustained_mpps = Some(core_mpps.min(engine_mpps));
        self.core.bound = Some(if engine_mpps < core_mpps { "engine" } else { "core" });
    }
}

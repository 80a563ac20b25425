//! One row of a report: the stable JSON object of every benchmark.

use serde::Serialize;

use crate::report::sample::{Bounds, Spread};

/// Current version of the row schema.
pub const SCHEMA: u32 = 5;

/// A row. The field names are a public interface for scripts.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Row {
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
    /// TCP: bytes per write of an application.
    pub chunk: Option<usize>,
    /// TCP: number of connections that take turns.
    pub connections: Option<usize>,
    /// TCP, case idle: number of additional idle connections.
    pub idle_connections: Option<usize>,
    /// TCP, case idle: speed with idle connections relative to the speed without them, which alternated, as a ratio of
    /// sums.
    pub beside_over_alone: Option<f64>,
    /// Median of the ratios of paired blocks.
    pub beside_over_alone_median: Option<f64>,
    /// Lower bound of the ratio of sums by bootstrap, and not above the ratio of either half of the blocks.
    pub beside_over_alone_lower: Option<f64>,
    /// TCP over paths: rate, round-trip time, loss and reordering.
    pub path: Option<String>,
    /// TCP over veth: whether ports and kernel use segmentation and checksum offloads.
    pub offloads: Option<bool>,
    /// TCP over veth: busy time of the host's core in nanoseconds per 1024 bytes, and the same for the kernel as the
    /// peer.
    pub ns_per_kib: Option<f64>,
    pub peer_ns_per_kib: Option<f64>,
    /// TCP over veth: the same for the core of the other end.
    pub far_ns_per_kib: Option<f64>,
    pub peer_far_ns_per_kib: Option<f64>,
    /// TCP over veth: the same for both cores. This is the decisive figure, because a kernel processes received packets
    /// on the transmitting core.
    pub both_ns_per_kib: Option<f64>,
    pub peer_both_ns_per_kib: Option<f64>,
    /// HTTP: CPU time of the server's processes in microseconds per request, and the same with the kernel's stack.
    pub server_us_per_request: Option<f64>,
    pub peer_server_us_per_request: Option<f64>,
    /// HTTP: the same for server and client together.
    pub both_us_per_request: Option<f64>,
    pub peer_both_us_per_request: Option<f64>,
    /// TCP over veth: busy share of the other end's core; HTTP: the share that wrk uses. The `peer` field is the same
    /// with the kernel as the peer.
    pub far_busy: Option<f64>,
    pub peer_far_busy: Option<f64>,
    /// TCP: Gbit/s of payload, for the measured core alone; over veth, end to end.
    pub payload_gbps: Option<f64>,
    /// TCP: mean payload of a segment in bytes. `frame` is the length of a full segment.
    pub payload_per_packet: Option<f64>,
    /// TCP: windows that were discarded and repeated because segments were retransmitted or dropped in them.
    pub windows_again: Option<u64>,
    /// Application work per packet in nanoseconds. It is included in the timed part.
    pub work_ns: u64,
    pub simulated: bool,
    /// Quantity of `min`, `median` and `max`.
    pub metric: &'static str,
    pub unit: &'static str,
    pub runs: usize,
    pub min: f64,
    pub median: f64,
    pub max: f64,
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
    /// Latency percentiles, if measured.
    pub p50_ns: Option<f64>,
    pub p90_ns: Option<f64>,
    pub p99_ns: Option<f64>,
    /// HTTP: latency percentiles of the peer.
    pub peer_p50_ns: Option<f64>,
    pub peer_p99_ns: Option<f64>,
    /// The 99.9th latency percentile, if measured.
    pub p999_ns: Option<f64>,
    /// Neighbour: the attack of the malicious guest, the longest turn of any guest in microseconds, and the honest
    /// guest's share of the core while it had packets.
    pub attack: Option<&'static str>,
    pub longest_turn_us: Option<f64>,
    pub core_share: Option<f64>,
    /// Neighbour of TCP: the rate from 5 s after the end of the attack, relative to the rate before it.
    pub after_over_alone: Option<f64>,
    /// Neighbour of TCP: the smallest number of attackers during the attack. The unit depends on the attack:
    /// connections, connection attempts per second, programs or listeners.
    pub attackers: Option<u64>,
    /// Latency: the send rate as a share of `capacity_mpps`.
    pub load: Option<f64>,
    /// Latency: million packets per second that a closed loop reaches in the same arrangement.
    pub capacity_mpps: Option<f64>,
    /// Latency: limit in microseconds above which mode `auto` has to decline an engine.
    pub max_latency_us: Option<f64>,
    /// Latency: the share of copies that mode `auto` submitted to the engine.
    pub engine_share: Option<f64>,
    /// The figure published in the guide.
    pub published: Option<f64>,
    /// Unit of `published` and the system on which it was measured.
    pub published_unit: Option<&'static str>,
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
    /// Model: the upper end of a published range; equal to `published` for a single figure, null for a lower bound.
    pub published_high: Option<f64>,
    /// Model: whether the published figure is a lower bound.
    pub at_least: Option<bool>,
    /// Model: the source of the figure, and the assumed model inputs that the source leaves open.
    pub source: Option<&'static str>,
    /// Model: `fitted`, `taken` (a parameter equals this figure), `assumed` (a load was chosen for it) or `judged`.
    pub role: Option<&'static str>,
    /// Model: nanoseconds in the model's result that belong to the source's own software.
    pub software_ns: Option<f64>,
    /// Model: deviation as a share of the published figure; 0 inside a range or above a bound.
    pub error: Option<f64>,
    /// Model: whether the deviation is acceptable.
    pub pass: Option<bool>,
    /// Page size of the guests' memory, their virtqueues and our packet buffers: `4K`, `2M` or `1G`.
    pub pages: Option<&'static str>,
    pub peer: Option<String>,
    /// The peer's median, in the row's unit.
    pub peer_median: Option<f64>,
    /// Our speed relative to the peer's; above 1 is faster. Core cost: ratio of the sums of all blocks; end to end:
    /// median of the ratios of paired windows.
    pub peer_ratio: Option<f64>,
    /// Core cost: median of the ratios of paired blocks.
    pub peer_ratio_median: Option<f64>,
    pub peer_ratio_lower: Option<f64>,
    /// All variants that alternated in the cell, including this one, each as mode and engine.
    pub variants: Option<String>,
    /// Noise floor: maximum deviation from 1 of the ratio of a variant to itself, measured just before (A/A), as a
    /// share. A ratio of the row that deviates less from 1 is not significant.
    pub noise_floor: Option<f64>,
    /// The interval of that ratio: the 90 % bootstrap interval, extended to the ratios of both halves of the blocks.
    pub noise_lower: Option<f64>,
    pub noise_upper: Option<f64>,
    /// `offload`: speed relative to `cpu`, which alternated with it, as a ratio of sums; above 1 is faster.
    pub offload_over_cpu: Option<f64>,
    /// TCP: median of the ratios of paired blocks.
    pub offload_over_cpu_median: Option<f64>,
    /// Lower bound of that ratio by bootstrap.
    pub offload_over_cpu_lower: Option<f64>,
    /// TCP: the ratio of sums of core, far host and applications together. The engine's time is excluded on both sides.
    pub offload_over_cpu_both: Option<f64>,
    /// `auto`: speed relative to `cpu`, which alternated with it, as a ratio of the sums of the whole run, including
    /// the settling phase in which it learns; above 1 is faster.
    pub auto_over_cpu: Option<f64>,
    /// `auto`: the same relative to `offload` on the same engine.
    pub auto_over_offload: Option<f64>,
    /// `auto`: the same relative to the faster of the two.
    pub auto_over_better: Option<f64>,
    /// `auto`: median of the ratios of paired blocks.
    pub auto_over_better_median: Option<f64>,
    /// `auto`: lower bound of the ratio of sums by bootstrap.
    pub auto_over_better_lower: Option<f64>,
    /// `auto`: the ratio of sums over the settling phase alone, about two thousand bursts.
    pub auto_settling_over_better: Option<f64>,
    /// `auto`, data of changing temperature: speed relative to an oracle that uses the better mode at each temperature,
    /// as a ratio of sums.
    pub auto_over_oracle: Option<f64>,
    /// Lower bound of that ratio by bootstrap.
    pub auto_over_oracle_lower: Option<f64>,
    /// Share of the core's cycles spent on switching, that is, on headers and forwarding (Figure 3 of the vhost guide).
    pub share_switching: Option<f64>,
    /// Share spent on descriptors: fetching available ones, writing used ones.
    pub share_virtqueue: Option<f64>,
    /// Share spent on copying, or on submitting copies and reaping completions.
    pub share_copy: Option<f64>,
    pub received: u64,
    /// Packets whose content and order were checked. HTTP: answers that were compared byte by byte. TCP over veth: the
    /// bytes of our windows, all of them compared, divided by the length of a full segment.
    pub verified: u64,
    pub lost: u64,
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
    /// Rounds that were discarded because the core's clock had changed. HTTP: pairs of windows that were discarded
    /// because other processes used the cores; neighbour of TCP: windows.
    pub rejected: usize,
    /// Rounds that were counted although the clock had changed, because too many had been discarded before. If not 0,
    /// the row is unreliable.
    pub unsteady: usize,
    /// Core cycles per TSC tick, measured with a calibrated loop.
    pub core_cycles_per_tick: Option<f64>,
    /// End to end: TSC ticks per packet of the rounds that moved packets, as counted by the back end itself.
    pub busy_cycles_per_packet: Option<f64>,
    /// The same as counted by the peer (testpmd's record-core-cycles).
    pub peer_cycles_per_packet: Option<f64>,
    /// End to end: whether the front end was busy for more than 90 % of the time and therefore was the bottleneck. TCP
    /// over veth: the same for the core of the other end.
    pub fe_bound: Option<bool>,
    /// End to end: forwarding mode of both sides: `mac`, or `l2`, a learning switch.
    pub forward: Option<&'static str>,
    #[serde(flatten)]
    pub about_peer: AboutPeer,
    /// Columns of `offcore bench gpu` only.
    #[serde(flatten)]
    pub gpu: Option<GpuColumns>,
}

impl Row {
    /// Sets the columns that are derived from ticks per packet.
    pub fn set_cycles(&mut self, spread: Spread, tsc_hz: u64) {
        (self.metric, self.unit) = ("core_cost", "tsc_cycles_per_packet");
        (self.runs, self.min, self.median, self.max) = (spread.runs, spread.min, spread.median, spread.max);
        self.tsc_hz = tsc_hz;
        self.cycles_per_packet = spread.median;
        self.ns_per_packet = spread.median * 1e9 / tsc_hz as f64;
        self.set_mpps(1e3 / self.ns_per_packet);
    }

    /// Sets the columns that are derived from the packet rate.
    pub fn set_rate(&mut self, spread: Spread, tsc_hz: u64) {
        (self.metric, self.unit) = ("rate", "mpps");
        (self.runs, self.min, self.median, self.max) = (spread.runs, spread.min, spread.median, spread.max);
        self.tsc_hz = tsc_hz;
        self.ns_per_packet = 1e3 / spread.median;
        self.cycles_per_packet = self.ns_per_packet * tsc_hz as f64 / 1e9;
        self.set_mpps(spread.median);
    }

    /// Sets the columns that are derived from `mpps`, in million packets per second.
    pub(crate) fn set_mpps(&mut self, mpps: f64) {
        self.mpps = mpps;
        self.gbps = mpps * self.frame as f64 * 8.0 / 1e3;
        self.gbps_l1 = mpps * (self.frame + 20) as f64 * 8.0 / 1e3;
    }

    /// Sets the noise columns.
    pub(crate) fn set_noise(&mut self, noise: Option<Bounds>) {
        self.noise_floor = noise.map(Bounds::noise_floor);
        (self.noise_lower, self.noise_upper) =
            (noise.map(|noise| noise.lower), noise.map(|noise| noise.upper));
    }

    /// Sets the columns for core and engine together, with `copies` copies per packet.
    pub fn set_engine(&mut self, engine_ns_per_copy: f64, copies: f64) {
        let engine_mpps = 1e3 / (engine_ns_per_copy * copies);
        self.engine_ns_per_copy = Some(engine_ns_per_copy);
        self.sustained_mpps = Some(self.mpps.min(engine_mpps));
        self.bound = Some(if engine_mpps < self.mpps { "engine" } else { "core" });
    }
}

/// Columns that describe the peer.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct AboutPeer {
    /// The peer's software: `DPDK 22.11.11`.
    pub peer_version: Option<String>,
    /// Compilation target of the peer's DPDK: `corei7, SSE4.2`, `native, AVX2`.
    pub peer_target: Option<String>,
    /// The virtio features negotiated with it, by name; for guest to guest, the sender's features.
    pub peer_features: Option<String>,
    /// Page size of its packet buffers in bytes.
    pub peer_page_bytes: Option<u64>,
}

/// Columns of `offcore bench gpu`.
#[derive(Clone, Debug, Default, Serialize)]
pub struct GpuColumns {
    /// Unit that processes the bursts: `none`, `cpu`, `kernel`, `persistent`, `graph`; `core` is a single core without
    /// a pipeline.
    pub workload: &'static str,
    /// The operation: `nothing`, `swap`, `crc32c`, `checksum`, `match`.
    pub work: &'static str,
    /// Location of the packets: `host` or `gpu`.
    pub memory: &'static str,
    /// The device: `cuda:0`, `host`; `none` if no device is used.
    pub device: String,
    /// Description of the device: a GPU's name and memory, or a note that threads replace the GPU; null if no device is
    /// used.
    pub device_name: Option<String>,
    /// Pipelines, each with a generator and a verifier.
    pub pipelines: usize,
    /// Lcores of generator and verifier: 2, or 1 if they share one.
    pub lcores_per_pipeline: usize,
    /// Maximum number of bursts in flight per pipeline.
    pub slots: usize,
    /// Thread blocks that serve a pipeline with workload `persistent`. `kernel` uses one for each 256 packets, `graph`
    /// one for each burst.
    pub blocks: Option<u32>,
    /// Effective threads per block: on a GPU at least 32, with a kernel per burst at most 256.
    pub threads: Option<u32>,
    /// Thousand bursts per second of all pipelines.
    pub kbursts_per_s: f64,
    /// Nanoseconds of the generator's lcore for submitting a burst.
    pub submit_ns_per_burst: Option<f64>,
    /// Nanoseconds of the verifier's lcore for collecting a burst, including the work if that lcore does it, excluding
    /// the checks.
    pub collect_ns_per_burst: Option<f64>,
    /// Million packets per second of generator and verifier alone, with bursts of this size.
    pub ends_mpps: Option<f64>,
    /// The published figure for a V100; `published` is for an A100.
    pub published_v100: Option<f64>,
    /// The result of the model of the published program for this cell, in Gbit/s.
    pub model_gbps: Option<f64>,
    pub model: Option<&'static str>,
    /// Artificial processing time per packet in nanoseconds.
    pub forced_ns_per_packet: Option<u64>,
    /// Minimum processing time per burst that follows from it: a core processes packets sequentially, the threads of a
    /// block process them in parallel.
    pub forced_ns_per_burst: Option<u64>,
    /// Break-even: the single core's method.
    pub baseline: Option<&'static str>,
    /// Break-even: million packets per second of that core, with its best burst size.
    pub baseline_mpps: Option<f64>,
    /// Break-even: speed of all pipelines relative to the core.
    pub over_baseline: Option<f64>,
    /// Break-even: the smallest measured burst at which one pipeline's share of `pipelines` concurrent pipelines
    /// exceeds the core's rate, provided that all longer bursts exceed it as well; null without such a burst.
    pub break_even_burst: Option<usize>,
    /// Break-even: the same by the model, for one pipeline's share of four concurrent pipelines.
    pub model_break_even_burst: Option<usize>,
}

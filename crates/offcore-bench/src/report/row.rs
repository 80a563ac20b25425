//! One line of a report: the stable JSON object of every benchmark.

use serde::Serialize;

use crate::report::sample::{Bounds, Spread};

/// The number of the present description of a row.
pub const SCHEMA: u32 = 3;

/// A row. Field names are the interface: scripts read them.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Row {
    /// The number of this description of a row: it changes whenever a field changes its meaning or goes.
    pub schema: u32,
    /// The model of the machine's CPU.
    pub cpu: Option<&'static str>,
    /// What was checked out when the program was built.
    pub commit: Option<&'static str>,
    /// The subcommand: `vhost`, `copy`, `dma`, `gpu`, `tcp`, `model`, or `predict`.
    pub bench: &'static str,
    /// What was done: `loop`, `guest-to-guest`, `submit_reap`, …
    pub case: String,
    /// `core-cost`, `end-to-end`, `open-loop` or `virtual-clock`.
    pub arrangement: &'static str,
    /// Frame length in bytes, the 4-byte FCS included.
    pub frame: usize,
    /// The kind of port under it, where there is one: `af_xdp`, `af_packet`.
    pub port: Option<&'static str>,
    /// `cpu`, `offload` or `auto`.
    pub mode: String,
    /// `cpu`, `core:1`, …
    pub engine: String,
    /// The virtqueues' format: `split` or `packed`; `none` where there are none.
    pub ring: &'static str,
    /// How the guests use them: `simple` or `linux`.
    pub guest: Option<&'static str>,
    /// The virtio features that were negotiated, VIRTIO_F_VERSION_1 left out.
    pub features: Option<String>,
    pub burst: usize,
    /// `hot`, `remote` or `cold`; `none` where the buffers are none of these.
    pub temperature: String,
    /// Packets of a window; of requests those that come together.
    pub window: usize,
    /// TCP: bytes that applications write at a time.
    pub chunk: Option<usize>,
    /// TCP: connections that take turns.
    pub connections: Option<usize>,
    /// TCP, case idle: connections beside them on which nothing happens.
    pub idle_connections: Option<usize>,
    /// TCP, case idle: the speed beside idle connections over that alone, which alternated with it, as a ratio of sums.
    pub beside_over_alone: Option<f64>,
    /// Median of the ratios of paired blocks.
    pub beside_over_alone_median: Option<f64>,
    /// Lower bound of the ratio of sums by bootstrap, no higher than that of either half of the blocks.
    pub beside_over_alone_lower: Option<f64>,
    /// TCP over paths: rate, round trip, loss and reordering.
    pub path: Option<String>,
    /// TCP over veth: whether ports and kernel segment, and leave checksums open.
    pub offloads: Option<bool>,
    /// TCP over veth: nanoseconds that the host's core has work for 1024 bytes; the kernel's in its place.
    pub ns_per_kib: Option<f64>,
    pub peer_ns_per_kib: Option<f64>,
    /// TCP over veth: the same of the other end's core.
    pub far_ns_per_kib: Option<f64>,
    pub peer_far_ns_per_kib: Option<f64>,
    /// TCP over veth: the same of both cores, which is what counts: a kernel receives on the core that transmits.
    pub both_ns_per_kib: Option<f64>,
    pub peer_both_ns_per_kib: Option<f64>,
    /// HTTP: microseconds of the server's processes for a request; the same on the kernel's stack.
    pub server_us_per_request: Option<f64>,
    pub peer_server_us_per_request: Option<f64>,
    /// HTTP: the same of server and client.
    pub both_us_per_request: Option<f64>,
    pub peer_both_us_per_request: Option<f64>,
    /// TCP over veth: the part of the time in which the other end's core is busy, of HTTP, that wrk uses of it; the same of the
    /// kernel to itself.
    pub far_busy: Option<f64>,
    pub peer_far_busy: Option<f64>,
    /// TCP: Gbit/s of payload, of the measured core alone; over veth, end to end.
    pub payload_gbps: Option<f64>,
    /// TCP: bytes of payload in a segment, the mean: `frame` is of a full one.
    pub payload_per_packet: Option<f64>,
    /// TCP: windows that were thrown away and made anew because segments were sent again in them, or dropped.
    pub windows_again: Option<u64>,
    /// Application work per packet in nanoseconds, part of what was timed.
    pub work_ns: u64,
    pub simulated: bool,
    /// What `min`, `median` and `max` are.
    pub metric: &'static str,
    pub unit: &'static str,
    pub runs: usize,
    pub min: f64,
    pub median: f64,
    pub max: f64,
    /// Mean of the samples; their sums make the ratios.
    pub mean: Option<f64>,
    /// Bursts of a turn that are timed, at least.
    pub bursts_per_turn: Option<usize>,
    pub ns_per_packet: f64,
    /// TSC ticks a packet, at the median.
    pub cycles_per_packet: f64,
    /// TSC ticks a second.
    pub tsc_hz: u64,
    /// Million packets a second that the core alone would reach.
    pub mpps: f64,
    /// `mpps` in Gbit/s of frames.
    pub gbps: f64,
    /// `gbps` with the 20 bytes that a frame takes besides on the wire.
    pub gbps_l1: f64,
    /// Latency percentiles, where measured.
    pub p50_ns: Option<f64>,
    pub p90_ns: Option<f64>,
    pub p99_ns: Option<f64>,
    /// HTTP: the peer's percentiles.
    pub peer_p50_ns: Option<f64>,
    pub peer_p99_ns: Option<f64>,
    /// As above: of 1000 packets, 999 take no longer.
    pub p999_ns: Option<f64>,
    /// Neighbour: what the bad guest did, microseconds of the longest turn that any guest had, and the honest one's part of the core while
    /// it had packets.
    pub attack: Option<&'static str>,
    pub longest_turn_us: Option<f64>,
    pub core_share: Option<f64>,
    /// Neighbour of TCP: the rate from 5 s after the attack on, over the rate before it.
    pub after_over_alone: Option<f64>,
    /// Latency: the share of `capacity_mpps` at which packets were sent.
    pub load: Option<f64>,
    /// Latency: million packets a second that a closed loop of the same arrangement reaches.
    pub capacity_mpps: Option<f64>,
    /// Latency: mode auto was to decline an engine through which packets take longer than these microseconds.
    pub max_latency_us: Option<f64>,
    /// Latency: the share of the copies that mode auto gave to the engine.
    pub engine_share: Option<f64>,
    /// The guide's figure.
    pub published: Option<f64>,
    /// Its unit, and on what it was measured.
    pub published_unit: Option<&'static str>,
    /// Gigabytes a second that whoever copies moved, by its own clock: the TSC, or a model's virtual one.
    pub gigabytes_per_s: Option<f64>,
    /// `lock`, `swq` or `bound`: how workers share a channel.
    pub sharing: Option<&'static str>,
    /// Workers that submit at the same time.
    pub workers: Option<usize>,
    /// TSC ticks a copy for handing it over.
    pub submit_cycles: Option<f64>,
    /// TSC ticks a copy for learning that it is done.
    pub reap_cycles: Option<f64>,
    /// Model: the highest published figure; equal to `published` unless it is a range, null for a lower bound.
    pub published_high: Option<f64>,
    /// Model: whether the published figure is a lower bound.
    pub at_least: Option<bool>,
    /// Model: who published the figure, and what the model was given where that is left open.
    pub source: Option<&'static str>,
    /// Model: `fitted`, `taken` (a parameter is this figure), `assumed` (a load was chosen for it) or `judged`.
    pub role: Option<&'static str>,
    /// Model: nanoseconds of the source's own software in what the model says.
    pub software_ns: Option<f64>,
    /// Model: how far it is off, as a share of the published figure; 0 inside a range or above a bound.
    pub error: Option<f64>,
    /// Model: whether that is close enough.
    pub pass: Option<bool>,
    /// Pages of the guests' memory, its virtqueues and our packet buffers: `4K`, `2M` or `1G`.
    pub pages: Option<&'static str>,
    pub peer: Option<String>,
    /// The peer's median, in the row's unit.
    pub peer_median: Option<f64>,
    /// Our speed over the peer's: above 1 is faster. Core cost: ratio of the sums of all blocks; end to end: median of the
    /// ratios of paired windows.
    pub peer_ratio: Option<f64>,
    /// Core cost: median of the ratios of paired blocks.
    pub peer_ratio_median: Option<f64>,
    pub peer_ratio_lower: Option<f64>,
    /// What alternated in the cell, itself included, each as mode and engine.
    pub variants: Option<String>,
    /// How far the ratio of a variant to itself may be from 1, by what was measured just before (A/A), as a share: a ratio
    /// of the row that is less far from 1 says nothing.
    pub noise_floor: Option<f64>,
    /// The interval of that ratio: 90 % by bootstrap, and both halves of the blocks.
    pub noise_lower: Option<f64>,
    pub noise_upper: Option<f64>,
    /// `offload`: its speed over `cpu`'s, which alternated with it, as a ratio of sums; above 1 is faster.
    pub offload_over_cpu: Option<f64>,
    /// TCP: median of the ratios of paired blocks.
    pub offload_over_cpu_median: Option<f64>,
    /// Lower bound of that ratio by bootstrap.
    pub offload_over_cpu_lower: Option<f64>,
    /// TCP: the ratio of sums of core, far host and applications together; the engine's time is in neither.
    pub offload_over_cpu_both: Option<f64>,
    /// `auto`: its speed over `cpu`'s, which alternated with it, as a ratio of the sums of the whole run, the beginning
    /// included, in which it learns; above 1 is faster.
    pub auto_over_cpu: Option<f64>,
    /// `auto`: the same over `offload`'s on the same engine.
    pub auto_over_offload: Option<f64>,
    /// `auto`: the same over that of whichever of the two is faster here.
    pub auto_over_better: Option<f64>,
    /// `auto`: median of the ratios of paired blocks.
    pub auto_over_better_median: Option<f64>,
    /// `auto`: lower bound of the ratio of sums by bootstrap.
    pub auto_over_better_lower: Option<f64>,
    /// `auto`: the ratio of sums of the beginning alone, some two thousand bursts.
    pub auto_settling_over_better: Option<f64>,
    /// `auto`, data of changing temperature: its speed over that of whoever knows and takes the better mode at each, as a
    /// ratio of sums.
    pub auto_over_oracle: Option<f64>,
    /// Lower bound of that ratio by bootstrap.
    pub auto_over_oracle_lower: Option<f64>,
    /// Share of the core's cycles that switching takes (Figure 3 of the vhost guide): headers and forwarding.
    pub share_switching: Option<f64>,
    /// Share of descriptors: fetching available ones, writing used ones.
    pub share_virtqueue: Option<f64>,
    /// Share of copying, or of handing copies over and learning of their end.
    pub share_copy: Option<f64>,
    pub received: u64,
    /// Packets whose content and order were checked; of HTTP answers that were compared, byte by byte; of TCP over veth the bytes of our windows, all of which are compared,
    /// by the length of a full segment.
    pub verified: u64,
    pub lost: u64,
    /// TSC ticks of a poll that finds nothing.
    pub empty_poll_cycles: Option<f64>,
    pub engine_ns_per_copy: Option<f64>,
    /// Bytes that core and engines have copied for each packet, virtio-net headers included: twice its length in a loop;
    /// once, but for the head of 64 bytes that the core writes itself, from guest to guest in one copy.
    pub copied_bytes_per_packet: Option<f64>,
    /// The core copied, and this engine's channel was attached and idle: what it costs to have one.
    pub idle_channel: Option<&'static str>,
    /// `cpu` with an idle channel: its speed over that of `cpu` without, as a ratio of sums.
    pub idle_channel_over_cpu: Option<f64>,
    /// The routines by which the core copied: out of the guest's memory and into it, or from guest to guest. Stores past
    /// the caches (`non-temporal`, `direct`) make the core cheaper and the reader dearer.
    pub copy_routine: Option<String>,
    /// Nanoseconds a packet that the guests spent on their virtqueues, on writing packets and on reading them; the mean. TCP:
    /// that the far host and both applications spent.
    pub guest_ns_per_packet: Option<f64>,
    /// Core and guests together, nanoseconds a packet; the mean.
    pub both_ns_per_packet: Option<f64>,
    /// Our speed over the peer's, core and guests together, as a ratio of sums.
    pub peer_both_ratio: Option<f64>,
    /// Whether a copier on the other core made as many copies as this one while this one was timed.
    pub background: bool,
    pub background_copies_per_packet: Option<f64>,
    /// Million packets a second that core and engine reach together.
    pub sustained_mpps: Option<f64>,
    /// Which of the two is the limit.
    pub bound: Option<&'static str>,
    /// Rounds thrown away because the core's clock had changed; of HTTP pairs of windows, because others used the cores.
    pub rejected: usize,
    /// Rounds that count although it had, since too many were thrown away before: the row is not to be trusted.
    pub unsteady: usize,
    /// Core cycles in a TSC tick, by a known loop.
    pub core_cycles_per_tick: Option<f64>,
    /// End to end: TSC ticks a packet of the rounds that moved packets, as the back end itself counts them.
    pub busy_cycles_per_packet: Option<f64>,
    /// The peer's account of the same (testpmd's record-core-cycles).
    pub peer_cycles_per_packet: Option<f64>,
    /// End to end: whether the front end was busy for more than 90 % of the time, and so was what was measured; of TCP over
    /// veth the other end's core.
    pub fe_bound: Option<bool>,
    /// End to end: how both sides forward: `mac`, or `l2`, a learning switch.
    pub forward: Option<&'static str>,
    #[serde(flatten)]
    pub about_peer: AboutPeer,
    /// What only `offcore bench gpu` has.
    #[serde(flatten)]
    pub gpu: Option<GpuColumns>,
}

impl Row {
    /// Fills in what follows from ticks a packet.
    pub fn set_cycles(&mut self, spread: Spread, tsc_hz: u64) {
        (self.metric, self.unit) = ("core_cost", "tsc_cycles_per_packet");
        (self.runs, self.min, self.median, self.max) = (spread.runs, spread.min, spread.median, spread.max);
        self.tsc_hz = tsc_hz;
        self.cycles_per_packet = spread.median;
        self.ns_per_packet = spread.median * 1e9 / tsc_hz as f64;
        self.set_mpps(1e3 / self.ns_per_packet);
    }

    /// Fills in what follows from packets a second.
    pub fn set_rate(&mut self, spread: Spread, tsc_hz: u64) {
        (self.metric, self.unit) = ("rate", "mpps");
        (self.runs, self.min, self.median, self.max) = (spread.runs, spread.min, spread.median, spread.max);
        self.tsc_hz = tsc_hz;
        self.ns_per_packet = 1e3 / spread.median;
        self.cycles_per_packet = self.ns_per_packet * tsc_hz as f64 / 1e9;
        self.set_mpps(spread.median);
    }

    /// Fills in what follows from million packets a second.
    pub(crate) fn set_mpps(&mut self, mpps: f64) {
        self.mpps = mpps;
        self.gbps = mpps * self.frame as f64 * 8.0 / 1e3;
        self.gbps_l1 = mpps * (self.frame + 20) as f64 * 8.0 / 1e3;
    }

    /// Says how far ratios are from 1 for no reason.
    pub(crate) fn set_noise(&mut self, noise: Option<Bounds>) {
        self.noise_floor = noise.map(Bounds::noise_floor);
        (self.noise_lower, self.noise_upper) =
            (noise.map(|noise| noise.lower), noise.map(|noise| noise.upper));
    }

    /// Says what core and engine reach together: `copies` copies a packet.
    pub fn set_engine(&mut self, engine_ns_per_copy: f64, copies: f64) {
        let engine_mpps = 1e3 / (engine_ns_per_copy * copies);
        self.engine_ns_per_copy = Some(engine_ns_per_copy);
        self.sustained_mpps = Some(self.mpps.min(engine_mpps));
        self.bound = Some(if engine_mpps < self.mpps { "engine" } else { "core" });
    }
}

/// Columns of a row that was measured beside a peer.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct AboutPeer {
    /// The peer's software: `DPDK 22.11.11`.
    pub peer_version: Option<String>,
    /// What its DPDK was compiled for: `corei7, SSE4.2`, `native, AVX2`.
    pub peer_target: Option<String>,
    /// The virtio features negotiated with it, by name; of guest to guest the sender's.
    pub peer_features: Option<String>,
    /// Bytes of a page under its packet buffers.
    pub peer_page_bytes: Option<u64>,
}

/// Columns of a row of `offcore bench gpu`.
#[derive(Clone, Debug, Default, Serialize)]
pub struct GpuColumns {
    /// Who works on bursts: `none`, `cpu`, `kernel`, `persistent`, `graph`; `core`: one core by itself, no pipeline.
    pub workload: &'static str,
    /// What is done: `nothing`, `swap`, `crc32c`, `checksum`, `match`.
    pub work: &'static str,
    /// Where it is done: `host` or `gpu`.
    pub memory: &'static str,
    /// The device: `cuda:0`, `host`; `none` where none takes part.
    pub device: String,
    /// What the device is, in words: a GPU's name and memory, or that threads stand in for one; null where none takes
    /// part.
    pub device_name: Option<String>,
    /// Pipelines, each with a generator and a verifier.
    pub pipelines: usize,
    /// Lcores of the two: 2, or 1 that is both.
    pub lcores_per_pipeline: usize,
    /// Bursts on their way in each pipeline, at most.
    pub slots: usize,
    /// Blocks that serve a pipeline: of workload `persistent`. A kernel has one for each 256 packets, a graph one for
    /// each burst.
    pub blocks: Option<u32>,
    /// Threads per block, as they run: on a GPU 32 at least, with a kernel per burst 256 at most.
    pub threads: Option<u32>,
    /// Thousand bursts a second, of all pipelines.
    pub kbursts_per_s: f64,
    /// Nanoseconds that handing a burst over takes the generator's lcore.
    pub submit_ns_per_burst: Option<f64>,
    /// Nanoseconds that taking a burst back takes the verifier's, with the work where it does it; no checks.
    pub collect_ns_per_burst: Option<f64>,
    /// Million packets a second of generator and verifier by themselves, with these bursts.
    pub ends_mpps: Option<f64>,
    /// The published figure on a V100; that on an A100 is `published`.
    pub published_v100: Option<f64>,
    /// What the model of the published program says for this cell, in Gbit/s.
    pub model_gbps: Option<f64>,
    pub model: Option<&'static str>,
    /// Nanoseconds that each packet was made to take.
    pub forced_ns_per_packet: Option<u64>,
    /// How long a burst takes at least by that: packets of a core one after the other, those of a block's threads at the
    /// same time.
    pub forced_ns_per_burst: Option<u64>,
    /// Break-even: what one core does the work with.
    pub baseline: Option<&'static str>,
    /// Break-even: million packets a second of that core, with the bursts that suit it best.
    pub baseline_mpps: Option<f64>,
    /// Break-even: speed of all pipelines over the core's.
    pub over_baseline: Option<f64>,
    /// Break-even: the smallest burst that was measured with which one pipeline's share of `pipelines` at once is more
    /// than the core does, as it is with all longer ones; null where it never is.
    pub break_even_burst: Option<usize>,
    /// Break-even: the same by the model, one pipeline's share of four at once.
    pub model_break_even_burst: Option<usize>,
}

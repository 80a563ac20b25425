//! Columns of `offcore bench gpu`.

use serde::Serialize;

/// Columns of `offcore bench gpu`.
#[derive(Clone, Debug, Default, Serialize)]
pub struct GpuColumns {
    #[serde(flatten)]
    pub setup: GpuSetup,
    #[serde(flatten)]
    pub times: GpuTimes,
    #[serde(flatten)]
    pub model: GpuModel,
    /// Artificial processing time per packet in nanoseconds.
    pub forced_ns_per_packet: Option<u64>,
    /// Minimum processing time per burst that follows from it: a core processes packets sequentially, the threads of a
    /// block process them in parallel.
    pub forced_ns_per_burst: Option<u64>,
    #[serde(flatten)]
    pub break_even: BreakEven,
}

/// Workload, device and pipelines.
#[derive(Clone, Debug, Default, Serialize)]
pub struct GpuSetup {
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
}

/// Rate and cost of bursts.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct GpuTimes {
    /// Thousand bursts per second of all pipelines.
    pub kbursts_per_s: f64,
    /// Nanoseconds of the generator's lcore for submitting a burst.
    pub submit_ns_per_burst: Option<f64>,
    /// Nanoseconds of the verifier's lcore for collecting a burst, including the work if that lcore does it, excluding
    /// the checks.
    pub collect_ns_per_burst: Option<f64>,
    /// Million packets per second of generator and verifier alone, with bursts of this size.
    pub ends_mpps: Option<f64>,
}

/// Published and modelled figures.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct GpuModel {
    /// The published figure for a V100; `published` is for an A100.
    pub published_v100: Option<f64>,
    /// The result of the model of the published program for this cell, in Gbit/s.
    pub model_gbps: Option<f64>,
    pub model: Option<&'static str>,
}

/// Comparison with a single core.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct BreakEven {
    /// The core's method.
    pub baseline: Option<&'static str>,
    /// Million packets per second of that core, with its best burst size.
    pub baseline_mpps: Option<f64>,
    /// Speed of all pipelines relative to the core.
    pub over_baseline: Option<f64>,
    /// The smallest measured burst at which one pipeline's share of `pipelines` concurrent pipelines exceeds the core's
    /// rate, provided that all longer bursts exceed it as well; null without such a burst.
    pub break_even_burst: Option<usize>,
    /// The same by the model, for one pipeline's share of four concurrent pipelines.
    pub model_break_even_burst: Option<usize>,
}

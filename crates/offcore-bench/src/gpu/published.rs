//! The published figures of l2fwd-nv, and a model fitted to them.
//!
//! The tables are from its README (November 2021), measured with a 100 Gbit/s port. Four pipelines and frame lengths
//! including the FCS are assumed. The model gives the time of such a program per burst, independent of the burst's
//! content. It was fitted to the second table, where its error is 8.7 % (root mean square of the logarithm) over the 24
//! cells, mostly caused by the cells of graphs.

use offcore_gpu::device::{Launch, Memory};

use super::Workload;

/// System on which the figures were measured.
pub(super) const UNIT: &str = "gbps, l2fwd-nv, four pipelines (assumed), one port of 100 Gbit/s; packets in an A100's memory, or in CPU memory";
/// Description of the model.
pub(super) const MODEL: &str =
    "model of l2fwd-nv on an A100, four pipelines (assumed), packets in its memory, fitted to its table";

/// Frame lengths of the first table.
pub(super) const SIZES: [usize; 5] = [64, 128, 256, 512, 1024];
/// Bursts of the second table.
pub(super) const BURSTS: [usize; 4] = [16, 32, 64, 128];
/// Frame length of the second table.
pub(super) const FRAME: usize = 1024;
/// Burst of the first table.
pub(super) const BURST: usize = 64;

/// Gbit/s by frame length: packets in CPU memory, in a V100's memory, in an A100's memory.
const IO: [[f64; 3]; 5] =
    [[18.0, 19.0, 19.0], [36.0, 37.0, 37.0], [68.0, 67.0, 67.0], [97.0, 94.0, 95.0], [98.0, 94.0, 97.0]];
/// Gbit/s by burst: (V100, A100) for kernel, persistent, graph.
const WORKLOADS: [[(f64, f64); 3]; 4] = [
    [(18.0, 23.0), (50.0, 50.0), (48.0, 30.0)],
    [(37.0, 49.0), (88.0, 97.0), (62.0, 85.0)],
    [(90.0, 97.0), (90.0, 97.0), (90.0, 97.0)],
    [(90.0, 97.0), (90.0, 97.0), (90.0, 97.0)],
];
/// Number of pipelines of the published runs.
const PIPELINES: f64 = 4.0;
/// Maximum rate of the published runs on the A100, in Gbit/s.
const CAP: f64 = 97.0;
/// Time per packet of a core of the program in nanoseconds, in addition to the artificial processing time.
const CORE_NS: f64 = 10.0;

/// A published figure for the A100 (or CPU memory), and for the V100 if published.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Published {
    pub gbps: f64,
    pub v100: Option<f64>,
}

/// Returns the figure for forwarding without work.
pub(super) fn io(frame: usize, memory: Memory) -> Option<Published> {
    let [cpu, v100, a100] = IO[SIZES.iter().position(|&size| size == frame)?];
    Some(match memory {
        Memory::Host => Published { gbps: cpu, v100: None },
        Memory::Gpu | Memory::Direct => Published { gbps: a100, v100: Some(v100) },
    })
}

/// Returns the figure for MAC swap. The table covers only packets in GPU memory.
pub(super) fn workload(workload: Workload, memory: Memory, frame: usize, burst: usize) -> Option<Published> {
    let Workload::Device(launch) = workload else { return None };
    if memory == Memory::Host {
        return None;
    }
    let row = WORKLOADS[BURSTS.iter().position(|&known| known == burst)?];
    let (v100, a100) = row[Launch::ALL.iter().position(|&known| known == launch)?];
    (frame == FRAME).then_some(Published { gbps: a100, v100: Some(v100) })
}

/// Returns the time per burst over all pipelines in microseconds.
const fn burst_us(launch: Launch) -> f64 {
    match launch {
        Launch::Kernel => 5.0,
        Launch::Persistent => 2.29,
        Launch::Graph => 3.32,
    }
}

/// Returns the rate by the model in Gbit/s. The time per burst is constant, and a burst holds two packets fewer than
/// its size, because the program does not wait for the last four. An artificial processing time, in nanoseconds per
/// packet, is added: threads wait for all packets of a burst at the same time, and cores wait for one packet after the
/// other.
pub(super) fn model(workload: Workload, frame: usize, burst: usize, forced_ns: f64) -> Option<f64> {
    let bits = frame as f64 * 8.0;
    match workload {
        Workload::Device(launch) => {
            let us = burst_us(launch) + forced_ns / 1e3 / PIPELINES;
            Some((bits * (burst as f64 - 2.0).max(0.0) / us / 1e3).min(CAP))
        }
        // If the core does the work, the result covers only the artificial processing time, because the model is fitted
        // to l2fwd-nv's second table.
        Workload::Cpu if forced_ns > 0.0 => Some((bits * PIPELINES / (forced_ns + CORE_NS)).min(CAP)),
        _ => None,
    }
}

/// Returns the burst size from which a pipeline of the program, with the others running, needs less time than a core
/// that takes `core_ns` per packet.
pub(super) fn model_break_even(workload: Workload, core_ns: f64) -> Option<usize> {
    match workload {
        Workload::Device(launch) => {
            Some((PIPELINES * burst_us(launch) * 1e3 / core_ns).ceil().max(1.0) as usize)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_figures_match_tables() {
        assert_eq!(io(64, Memory::Host), Some(Published { gbps: 18.0, v100: None }));
        assert_eq!(io(1024, Memory::Gpu), Some(Published { gbps: 97.0, v100: Some(94.0) }));
        assert_eq!((io(1518, Memory::Host), workload(Workload::Cpu, Memory::Host, 1024, 16)), (None, None));
        let of = |launch, burst| workload(Workload::Device(launch), Memory::Gpu, 1024, burst).unwrap();
        assert_eq!(of(Launch::Kernel, 16), Published { gbps: 23.0, v100: Some(18.0) });
        assert_eq!(of(Launch::Graph, 32), Published { gbps: 85.0, v100: Some(62.0) });
        assert_eq!(workload(Workload::Device(Launch::Graph), Memory::Gpu, 512, 32), None);
        // The second table covers only packets in GPU memory.
        assert_eq!(workload(Workload::Device(Launch::Graph), Memory::Host, 1024, 32), None);
    }

    #[test]
    fn model_error_is_within_stated_bounds() {
        for (burst, row) in BURSTS.into_iter().zip(WORKLOADS) {
            for (launch, (_, published)) in Launch::ALL.into_iter().zip(row) {
                let error = model(Workload::Device(launch), FRAME, burst, 0.0).unwrap() / published - 1.0;
                let most = if launch == Launch::Graph { 0.16 } else { 0.01 };
                assert!(error.abs() <= most, "{launch}, {burst}: {error}");
            }
        }
        // At a microsecond per packet, a core processes a million packets per second. A block of threads waits once per
        // burst.
        let core = model(Workload::Cpu, FRAME, 64, 1000.0).unwrap();
        assert!((core - 4.0 * 8.192 / 1.01).abs() < 0.01, "{core}");
        let block = model(Workload::Device(Launch::Persistent), FRAME, 64, 1000.0).unwrap();
        assert_eq!(block, 97.0);
        let waits = model(Workload::Device(Launch::Persistent), FRAME, 64, 100_000.0).unwrap();
        assert!((waits - 8.192 * 62.0 / 27.29).abs() < 0.01, "{waits}");
        assert_eq!(model(Workload::None, FRAME, 64, 0.0), None);
        // With a burst every 5 µs over four pipelines, one pipeline takes 20 µs, in which a core processes 2222
        // packets.
        assert_eq!(model_break_even(Workload::Device(Launch::Kernel), 9.0), Some(2223));
    }
}

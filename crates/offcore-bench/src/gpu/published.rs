//! The published figures of l2fwd-nv, and a model fitted to them.
//!
//! The tables are those of its README (November 2021): a 100 Gbit/s port; four pipelines and frames with FCS are assumed. The
//! model says what such a program takes for a burst whatever is in it; it was fitted to the second table, where its
//! error is 8.7 % (root mean square of the logarithm) over the 24 cells, mostly by those of graphs.

use offcore_gpu::device::{Launch, Memory};

use super::Workload;

/// What the figures were measured on.
pub(super) const UNIT: &str = "gbps, l2fwd-nv, four pipelines (assumed), one port of 100 Gbit/s; packets in an A100's memory, or in CPU memory";
/// What the model is.
pub(super) const MODEL: &str =
    "model of l2fwd-nv on an A100, four pipelines (assumed), packets in its memory, fitted to its table";

/// Frame lengths of the first table.
pub(super) const SIZES: [usize; 5] = [64, 128, 256, 512, 1024];
/// Bursts of the second one.
pub(super) const BURSTS: [usize; 4] = [16, 32, 64, 128];
/// Frame length of the second one.
pub(super) const FRAME: usize = 1024;
/// Burst of the first one.
pub(super) const BURST: usize = 64;

/// Gbit/s by frame: packets in CPU memory, in a V100's, in an A100's.
const IO: [[f64; 3]; 5] =
    [[18.0, 19.0, 19.0], [36.0, 37.0, 37.0], [68.0, 67.0, 67.0], [97.0, 94.0, 95.0], [98.0, 94.0, 97.0]];
/// Gbit/s by burst: (V100, A100) of kernel, persistent, graph.
const WORKLOADS: [[(f64, f64); 3]; 4] = [
    [(18.0, 23.0), (50.0, 50.0), (48.0, 30.0)],
    [(37.0, 49.0), (88.0, 97.0), (62.0, 85.0)],
    [(90.0, 97.0), (90.0, 97.0), (90.0, 97.0)],
    [(90.0, 97.0), (90.0, 97.0), (90.0, 97.0)],
];
/// Pipelines of the published runs.
const PIPELINES: f64 = 4.0;
/// What the published runs reach at most on the A100, in Gbit/s.
const CAP: f64 = 97.0;
/// Nanoseconds a packet that a core of theirs takes besides the forced time.
const CORE_NS: f64 = 10.0;

/// A published figure: of the A100 (or CPU memory), and of the V100 where there is one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Published {
    pub gbps: f64,
    pub v100: Option<f64>,
}

/// Forwarding without work.
pub(super) fn io(frame: usize, memory: Memory) -> Option<Published> {
    let [cpu, v100, a100] = IO[SIZES.iter().position(|&size| size == frame)?];
    Some(match memory {
        Memory::Host => Published { gbps: cpu, v100: None },
        Memory::Gpu | Memory::Direct => Published { gbps: a100, v100: Some(v100) },
    })
}

/// MAC swap. The table is of packets in GPU memory: there is nothing beside those in another.
pub(super) fn workload(workload: Workload, memory: Memory, frame: usize, burst: usize) -> Option<Published> {
    let Workload::Device(launch) = workload else { return None };
    if memory == Memory::Host {
        return None;
    }
    let row = WORKLOADS[BURSTS.iter().position(|&known| known == burst)?];
    let (v100, a100) = row[Launch::ALL.iter().position(|&known| known == launch)?];
    (frame == FRAME).then_some(Published { gbps: a100, v100: Some(v100) })
}

/// Microseconds that a burst takes, over all pipelines.
const fn burst_us(launch: Launch) -> f64 {
    match launch {
        Launch::Kernel => 5.0,
        Launch::Persistent => 2.29,
        Launch::Graph => 3.32,
    }
}

/// Gbit/s by the model: a burst takes as long as it takes, and holds two packets fewer than it could, since the
/// program does not wait for the last four. A forced time, in nanoseconds a packet, comes beside that: its threads wait for
/// all packets of a burst at the same time, its cores for one after the other.
pub(super) fn model(workload: Workload, frame: usize, burst: usize, forced_ns: f64) -> Option<f64> {
    let bits = frame as f64 * 8.0;
    match workload {
        Workload::Device(launch) => {
            let us = burst_us(launch) + forced_ns / 1e3 / PIPELINES;
            Some((bits * (burst as f64 - 2.0).max(0.0) / us / 1e3).min(CAP))
        }
        // Where the core works, only the forced time is in it: the model is of l2fwd-nv's second table.
        Workload::Cpu if forced_ns > 0.0 => Some((bits * PIPELINES / (forced_ns + CORE_NS)).min(CAP)),
        _ => None,
    }
}

/// The burst from which on one of the program's pipelines, with the others at work beside it, takes less time for it
/// than a core that takes `core_ns` for a packet.
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
        // The second table is of packets in GPU memory.
        assert_eq!(workload(Workload::Device(Launch::Graph), Memory::Host, 1024, 32), None);
    }

    #[test]
    fn the_model_is_as_near_to_them_as_it_says() {
        for (burst, row) in BURSTS.into_iter().zip(WORKLOADS) {
            for (launch, (_, published)) in Launch::ALL.into_iter().zip(row) {
                let error = model(Workload::Device(launch), FRAME, burst, 0.0).unwrap() / published - 1.0;
                let most = if launch == Launch::Graph { 0.16 } else { 0.01 };
                assert!(error.abs() <= most, "{launch}, {burst}: {error}");
            }
        }
        // A microsecond a packet: a core does a million a second; a block of threads waits once for a burst.
        let core = model(Workload::Cpu, FRAME, 64, 1000.0).unwrap();
        assert!((core - 4.0 * 8.192 / 1.01).abs() < 0.01, "{core}");
        let block = model(Workload::Device(Launch::Persistent), FRAME, 64, 1000.0).unwrap();
        assert_eq!(block, 97.0);
        let waits = model(Workload::Device(Launch::Persistent), FRAME, 64, 100_000.0).unwrap();
        assert!((waits - 8.192 * 62.0 / 27.29).abs() < 0.01, "{waits}");
        assert_eq!(model(Workload::None, FRAME, 64, 0.0), None);
        // A burst every 5 us of four pipelines: 20 us of one of them, in which a core does 2222 packets.
        assert_eq!(model_break_even(Workload::Device(Launch::Kernel), 9.0), Some(2223));
    }
}

//! `offcore switch --demo`: shows the savings of offloading by packet size, with guests in this process.

use std::time::Duration;

use anyhow::Result;
use offcore_mem::Hugepages;
use serde::Serialize;

use crate::guests::workload::{GuestKind, Ring, Route};
use crate::method::alternate::{Extent, TURN_BURSTS};
use crate::method::copier::Setup;
use crate::method::temperature::Temperature;
use crate::report::progress::Progress;
use crate::report::row::Row;
use crate::vhost::{self, FRAMES};

/// Number of A B B A blocks per packet size.
const BLOCKS: usize = 200;
/// Number of blocks with `--quick`.
const QUICK_BLOCKS: usize = 20;
/// Time limit per packet size, also on a busy machine.
const TIMEOUT: Duration = Duration::from_millis(2500);

/// Options of the demo.
#[derive(Clone, Debug)]
pub struct Options {
    /// Whether to make a shorter, less accurate run.
    pub quick: bool,
    /// Page size for guests and packet buffers.
    pub hugepages: Hugepages,
    pub lcore: usize,
    /// The core of the guests and the engine.
    pub other_lcore: Option<usize>,
}

/// Result for a packet size.
#[derive(Clone, Debug, Default, Serialize)]
pub struct DemoRow {
    /// Frame length, including the FCS.
    pub frame: usize,
    /// TSC ticks per packet if the core copies.
    pub cpu_cycles: f64,
    pub cpu_ns: f64,
    /// TSC ticks per packet if a helper core copies.
    pub offload_cycles: f64,
    pub offload_ns: f64,
    /// Nanoseconds of the helper core per copy. Each packet is copied twice.
    pub engine_ns_per_copy: f64,
    /// Million packets per second that core and helper reach together.
    pub sustained_mpps: f64,
    /// The bottleneck: `core` or `engine`.
    pub bound: &'static str,
    /// Packets whose content and order were checked.
    pub verified: u64,
    pub lost: u64,
}

/// Result of the demo. The data is `remote`: the guests' core wrote it and last read it.
#[derive(Clone, Debug, Serialize)]
pub struct DemoResult {
    /// Rows by packet size.
    pub rows: Vec<DemoRow>,
    /// TSC ticks per second.
    pub tsc_hz: u64,
}

/// Runs the demo.
///
/// # Errors
/// If something cannot be set up, or a packet is lost or changed.
pub fn run(options: &Options, progress: &Progress) -> Result<DemoResult> {
    let measure = vhost::Options {
        route: Route::Loop,
        rings: vec![Ring::Split],
        guests: vec![GuestKind::Simple],
        one_copy: true,
        frames: FRAMES.to_vec(),
        imix: false,
        temperatures: vec![Temperature::Remote],
        setups: vec![Setup::CPU, Setup::HELPER],
        background: false,
        breakdown: false,
        dpdk_lib: false,
        noise_floor: false,
        extent: Extent {
            blocks: if options.quick { QUICK_BLOCKS } else { BLOCKS },
            bursts: TURN_BURSTS,
            timeout: Some(TIMEOUT),
            hugepages: options.hugepages,
            lcore: options.lcore,
            other_lcore: options.other_lcore,
        },
    };
    let mut result = DemoResult { rows: Vec::new(), tsc_hz: offcore_stats::tsc::hz() };
    vhost::run(&measure, progress, &mut |row| result.add(&row))?;
    Ok(result)
}

impl DemoResult {
    fn add(&mut self, row: &Row) {
        if self.rows.last().is_none_or(|last| last.frame != row.head.frame) {
            self.rows.push(DemoRow { frame: row.head.frame, ..DemoRow::default() });
        }
        let Some(demo) = self.rows.last_mut() else { return };
        demo.verified += row.counts.verified;
        demo.lost += row.counts.lost;
        if row.head.mode == "cpu" {
            (demo.cpu_cycles, demo.cpu_ns) = (row.figures.cycles_per_packet, row.figures.ns_per_packet);
        } else {
            (demo.offload_cycles, demo.offload_ns) =
                (row.figures.cycles_per_packet, row.figures.ns_per_packet);
            demo.engine_ns_per_copy = row.core.engine_ns_per_copy.unwrap_or_default();
            demo.sustained_mpps = row.core.sustained_mpps.unwrap_or_default();
            demo.bound = row.core.bound.unwrap_or_default();
        }
    }
}

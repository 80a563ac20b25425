//! `offcore switch --demo`: what offloading saves here, by packet size, with guests in this process.

use std::time::Duration;

use anyhow::Result;
use offcore_mem::Hugepages;
use serde::Serialize;

use crate::guests::workload::{GuestKind, Ring, Route};
use crate::method::alternate::TURN_BURSTS;
use crate::method::copier::Setup;
use crate::method::temperature::Temperature;
use crate::report::progress::Progress;
use crate::report::row::Row;
use crate::vhost::{self, FRAMES};

/// A B B A blocks of a packet size.
const BLOCKS: usize = 200;
/// The same with `--quick`.
const QUICK_BLOCKS: usize = 20;
/// How long one packet size may take, however busy the machine is.
const TIMEOUT: Duration = Duration::from_millis(2500);

/// What the demo needs to know.
#[derive(Clone, Debug)]
pub struct Options {
    /// A shorter, rougher run.
    pub quick: bool,
    /// Pages for guests and packet buffers.
    pub hugepages: Hugepages,
    pub lcore: usize,
    /// The guests' and the engine's core.
    pub other_lcore: Option<usize>,
}

/// One packet size.
#[derive(Clone, Debug, Default, Serialize)]
pub struct DemoRow {
    /// Frame length, FCS included.
    pub frame: usize,
    /// TSC ticks a packet with the core copying.
    pub cpu_cycles: f64,
    pub cpu_ns: f64,
    /// TSC ticks a packet with a helper core copying.
    pub offload_cycles: f64,
    pub offload_ns: f64,
    /// Nanoseconds that the helper core takes for one of a packet's two copies.
    pub engine_ns_per_copy: f64,
    /// Million packets a second that core and helper reach together.
    pub sustained_mpps: f64,
    /// Which of the two is the limit.
    pub bound: &'static str,
    /// Packets whose content and order were checked.
    pub verified: u64,
    pub lost: u64,
}

/// The demo's result. Data is `remote`: the guests' core wrote it and read it last.
#[derive(Clone, Debug, Serialize)]
pub struct DemoResult {
    /// By packet size.
    pub rows: Vec<DemoRow>,
    /// TSC ticks a second.
    pub tsc_hz: u64,
}

/// Runs the demo.
///
/// # Errors
/// When something cannot be set up, or a packet is lost or changed.
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
        blocks: if options.quick { QUICK_BLOCKS } else { BLOCKS },
        bursts: TURN_BURSTS,
        timeout: Some(TIMEOUT),
        hugepages: options.hugepages,
        lcore: options.lcore,
        other_lcore: options.other_lcore,
    };
    let mut result = DemoResult { rows: Vec::new(), tsc_hz: offcore_stats::tsc::hz() };
    vhost::run(&measure, progress, &mut |row| result.add(&row))?;
    Ok(result)
}

impl DemoResult {
    fn add(&mut self, row: &Row) {
        if self.rows.last().is_none_or(|last| last.frame != row.frame) {
            self.rows.push(DemoRow { frame: row.frame, ..DemoRow::default() });
        }
        let Some(demo) = self.rows.last_mut() else { return };
        demo.verified += row.verified;
        demo.lost += row.lost;
        if row.mode == "cpu" {
            (demo.cpu_cycles, demo.cpu_ns) = (row.cycles_per_packet, row.ns_per_packet);
        } else {
            (demo.offload_cycles, demo.offload_ns) = (row.cycles_per_packet, row.ns_per_packet);
            demo.engine_ns_per_copy = row.engine_ns_per_copy.unwrap_or_default();
            demo.sustained_mpps = row.sustained_mpps.unwrap_or_default();
            demo.bound = row.bound.unwrap_or_default();
        }
    }
}

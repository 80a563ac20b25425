//! `offcore bench copy`: re-measures Table 5 of the packet-copy guide (DPDK's dpdk-dma) as core cost, and over veth in
//! comparison with dpdk-testpmd.
//!
//! - [`run`]: core cost of receiving, copying into a new buffer, rewriting addresses and handing over, by copy mode. No
//!   network card driver is included.
//! - [`veth`]: packet rate of the af_xdp and af_packet ports over a veth pair,
//! - `conversion` (feature `dpdk`): conversion of DPDK's packet buffers to packet handles and back.

#[cfg(feature = "dpdk")]
pub mod conversion;
mod nic;
mod variant;
pub mod veth;

use std::sync::{Arc, Mutex};

use anyhow::{Context, Result};
use offcore_dma::Mode;
use offcore_mem::Pool;
use offcore_stats::tsc;
use offcore_wire::ethernet::FCS_LEN;

use crate::BURST;
use crate::guests::memory::{page_name, pages_for};
use crate::method::alternate::{Alternating, Extent};
use crate::method::copier::Setup;
use crate::method::temperature::Temperature;
use crate::model::rate::{DeviceRate, DsaGroups};
use crate::report::progress::Progress;
use crate::report::row::{AutoRatios, Counts, OffloadRatio, Published, Row};
use crate::report::sample::{ClockCheck, SumRatio};
use nic::Nic;
use variant::{Variant, counterpart, is};

/// Default frame lengths: the frame lengths of the published table, and Ethernet's maximum.
pub const FRAMES: [usize; 7] = [64, 128, 256, 512, 1024, 1280, 1518];

/// Table 5 of the guide in Gbit/s: frame length, core copies (software), DSA copies (hardware).
const PUBLISHED: [(usize, f64, f64); 6] = [
    (64, 18.0, 12.0),
    (128, 30.0, 30.0),
    (256, 44.0, 56.0),
    (512, 40.0, 114.0),
    (1024, 44.0, 200.0),
    (1280, 48.0, 200.0),
];
/// System on which Table 5 was measured.
const PUBLISHED_UNIT: &str = "gbps, Xeon Gold 6438N 2.0 GHz, one lcore, two ports of 100 Gbit/s";
/// Size of a packet buffer in bytes, including headroom.
const BUFFER: usize = 2048;

/// Options of the measurement.
#[derive(Clone, Debug)]
pub struct Options {
    /// Frame lengths, including the FCS.
    pub frames: Vec<usize>,
    /// Cache temperatures of the data.
    pub temperatures: Vec<Temperature>,
    /// Modes and engines that alternate.
    pub setups: Vec<Setup>,
    /// Whether the variant of mode `cpu` is measured a second time with an equal-rate copier on the other core.
    pub background: bool,
    pub extent: Extent,
}

/// Measures everything that `options` selects and passes each finished row to `emit`.
///
/// # Errors
/// If something cannot be set up, or a packet is lost or changed.
pub fn run(options: &Options, progress: &Progress, emit: &mut dyn FnMut(Row)) -> Result<()> {
    let other = options.extent.start()?;
    let buffers = options.temperatures.iter().map(|&temperature| nic::buffers(temperature)).max();
    let buffers = buffers.unwrap_or(0).max(BURST);
    // Two MiB more than needed, because the rest of the last page is also allocated.
    let hugepages = pages_for(options.extent.hugepages, ((buffers * BUFFER) >> 20) + 2)?;
    let pool = Pool::new(buffers, BUFFER, hugepages)?;
    let mut clock = ClockCheck::new();
    progress.begin(options.temperatures.len() * options.frames.len() * options.extent.blocks);
    for &temperature in &options.temperatures {
        for &frame in &options.frames {
            progress.say(&format!("copy, {temperature}, {frame} B"));
            let mut cell = cell(options, pool, temperature, frame)?;
            let schedule = options.extent.schedule(temperature);
            cell.measure(schedule, &other, &mut clock, progress)
                .with_context(|| format!("{temperature}, {frame} B"))?;
            progress.steps(options.extent.blocks - schedule.blocks);
            for mut row in rows(&mut cell, temperature, frame)? {
                row.peer.pages = Some(page_name(pool.page_size()));
                row.figures.bursts_per_turn = Some(options.extent.bursts);
                emit(row);
            }
        }
    }
    progress.end();
    Ok(())
}

/// Creates the variants of one frame length, which share a network card.
fn cell(
    options: &Options,
    pool: &'static Pool,
    temperature: Temperature,
    frame: usize,
) -> Result<Alternating<Variant>> {
    let nic = Arc::new(Mutex::new(Nic::new(pool, temperature, frame)?));
    let mut cell = Alternating::new();
    for &setup in &options.setups {
        let open = || Variant::new(setup, &nic, pool, temperature);
        cell.add(open()?);
        if options.background && setup == Setup::CPU {
            cell.add(open()?.with_background(frame));
        }
    }
    Ok(cell)
}

fn rows(cell: &mut Alternating<Variant>, temperature: Temperature, frame: usize) -> Result<Vec<Row>> {
    let hz = tsc::hz();
    let steadiness = cell.steadiness();
    let core = cell.blocks_of(is(Setup::CPU)).cloned();
    let against: Vec<_> = cell
        .iter()
        .map(|(variant, blocks)| match variant.setup.mode {
            Mode::Auto => {
                let of = |mode| cell.blocks_of(is(counterpart(variant.setup, mode)));
                AutoRatios::new(blocks, of(Mode::Cpu), of(Mode::Offload))
            }
            Mode::Cpu | Mode::Offload => AutoRatios::default(),
        })
        .collect();
    let mut rows = Vec::new();
    for ((variant, blocks), against) in cell.iter_mut().zip(against) {
        let setup = variant.setup;
        let mut row = Row::new("copy", "forward", "core-cost");
        setup.describe(&mut row);
        row.head.frame = frame;
        (row.head.temperature, row.head.window) = (temperature.name().into(), temperature.window());
        row.counts = Counts::all_of(variant.packets());
        row.published = Published::new(published(frame, setup.mode), PUBLISHED_UNIT);
        row.core.empty_poll_cycles = Some(variant.empty_poll());
        row.core.background = variant.background_copies().is_some();
        row.core.background_copies_per_packet = variant.background_copies();
        row.core.copied_bytes_per_packet = Some(variant.copied_bytes());
        blocks.enter(&mut row, hz);
        row.clock = steadiness;
        let engine_ns = match setup.copier.simulated() {
            // Windows are too short to keep a device busy, so its rate under full load is measured separately.
            true => {
                let groups = DsaGroups { count: 1, queues: 1, engines: 4 };
                let device = DeviceRate::of_copies((frame - FCS_LEN) as u32, groups, setup.copier.batch())?;
                Some(1e3 / device.mcopies)
            }
            false => variant.engine_ns_per_copy(),
        };
        if let Some(ns) = engine_ns {
            row.set_engine(ns, 1.0);
        }
        if setup.mode == Mode::Offload
            && let Some(core) = &core
        {
            row.ratios.offload = OffloadRatio::new(SumRatio::of(&core.core, &blocks.core));
        }
        row.ratios.auto = against;
        rows.push(row);
    }
    Ok(rows)
}

/// Returns the published figure. The guide has no figure for `auto` and for 1518 bytes.
fn published(frame: usize, mode: Mode) -> Option<f64> {
    let (_, software, hardware) = PUBLISHED.into_iter().find(|(f, ..)| *f == frame)?;
    match mode {
        Mode::Cpu => Some(software),
        Mode::Offload => Some(hardware),
        Mode::Auto => None,
    }
}

#[cfg(test)]
mod tests;

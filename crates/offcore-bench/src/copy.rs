//! `offcore bench copy`: Table 5 of the packet-copy guide (DPDK's dpdk-dma), re-measured as core cost, and over veth
//! beside dpdk-testpmd.
//!
//! * [`run`]: what receiving, copying into a new buffer, rewriting addresses and handing over costs the core, by who
//!   copies; no network card's driver is in it.
//! * [`veth`]: packets a second of the af_xdp and af_packet ports over a veth pair,
//! * `conversion` (feature `dpdk`): DPDK's packet buffers made into handles, and back.

#[cfg(feature = "dpdk")]
pub mod conversion;
mod nic;
mod variant;
pub mod veth;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result};
use offcore_dma::Mode;
use offcore_mem::{Hugepages, Pool};
use offcore_stats::tsc;
use offcore_wire::ethernet::FCS_LEN;

use crate::BURST;
use crate::guests::memory::{page_name, pages_for};
use crate::method::alternate::{Against, Alternating, FEWEST, Schedule};
use crate::method::copier::Setup;
use crate::method::lockstep::OtherCore;
use crate::method::temperature::Temperature;
use crate::model::rate::DeviceRate;
use crate::report::progress::Progress;
use crate::report::row::Row;
use crate::report::sample::{ClockCheck, SumRatio};
use nic::Nic;
use variant::{Variant, counterpart, is};

/// Frame lengths that are measured where nothing else is said: those of the published table, and the longest of Ethernet.
pub const FRAMES: [usize; 7] = [64, 128, 256, 512, 1024, 1280, 1518];

/// The guide's Table 5 in Gbit/s: frame, core copies (software), DSA copies (hardware).
const PUBLISHED: [(usize, f64, f64); 6] = [
    (64, 18.0, 12.0),
    (128, 30.0, 30.0),
    (256, 44.0, 56.0),
    (512, 40.0, 114.0),
    (1024, 44.0, 200.0),
    (1280, 48.0, 200.0),
];
/// What that was measured on.
const PUBLISHED_UNIT: &str = "gbps, Xeon Gold 6438N 2.0 GHz, one lcore, two ports of 100 Gbit/s";
/// Bytes of a packet buffer, headroom included.
const BUFFER: usize = 2048;

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// Frame lengths, FCS included.
    pub frames: Vec<usize>,
    /// How warm the data is.
    pub temperatures: Vec<Temperature>,
    /// Who copies: what is measured alternately.
    pub setups: Vec<Setup>,
    /// Whether the variant of mode `cpu` is measured once more with an equal-rate copier on the other core.
    pub background: bool,
    /// A B B A blocks per cell.
    pub blocks: usize,
    /// Bursts of a turn that are timed, at least: [`TURN_BURSTS`](crate::method::alternate::TURN_BURSTS).
    pub bursts: usize,
    /// How long a cell may take: then fewer blocks have to do, but never fewer than ten.
    pub timeout: Option<Duration>,
    /// Pages of the packet buffers.
    pub hugepages: Hugepages,
    pub lcore: usize,
    /// The other core: the network card, and the engine.
    pub other_lcore: Option<usize>,
}

/// Measures everything that `options` asks for; `emit` gets each row as it is ready.
///
/// # Errors
/// When something cannot be set up, or a packet is lost or changed.
pub fn run(options: &Options, progress: &Progress, emit: &mut dyn FnMut(Row)) -> Result<()> {
    offcore_stats::lcore::pin(options.lcore)?;
    let other = OtherCore::start(options.other_lcore)?;
    let buffers = options.temperatures.iter().map(|&temperature| nic::buffers(temperature)).max();
    let buffers = buffers.unwrap_or(0).max(BURST);
    // Two MiB more than needed, since what is left of the last page is taken, too.
    let hugepages = pages_for(options.hugepages, ((buffers * BUFFER) >> 20) + 2)?;
    let pool = Pool::new(buffers, BUFFER, hugepages)?;
    let mut clock = ClockCheck::new();
    progress.begin(options.temperatures.len() * options.frames.len() * options.blocks);
    for &temperature in &options.temperatures {
        for &frame in &options.frames {
            progress.say(&format!("copy, {temperature}, {frame} B"));
            let cold = temperature == Temperature::Cold;
            let blocks = if cold { options.blocks.div_ceil(2) } else { options.blocks };
            let mut cell = cell(options, pool, temperature, frame)?;
            let schedule =
                Schedule { blocks, bursts: options.bursts, limit: options.timeout, fewest: FEWEST };
            cell.measure(schedule, &other, &mut clock, progress)
                .with_context(|| format!("{temperature}, {frame} B"))?;
            progress.steps(options.blocks - blocks);
            for mut row in rows(&mut cell, temperature, frame)? {
                row.pages = Some(page_name(pool.page_size()));
                row.bursts_per_turn = Some(options.bursts);
                emit(row);
            }
        }
    }
    progress.end();
    Ok(())
}

/// The variants of one frame length, which share a network card.
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
                Against::new(blocks, of(Mode::Cpu), of(Mode::Offload))
            }
            Mode::Cpu | Mode::Offload => Against::default(),
        })
        .collect();
    let mut rows = Vec::new();
    for ((variant, blocks), against) in cell.iter_mut().zip(against) {
        let setup = variant.setup;
        let mut row = Row {
            bench: "copy",
            case: "forward".into(),
            arrangement: "core-cost",
            frame,
            mode: setup.mode.to_string(),
            engine: setup.copier.name().into(),
            ring: "none",
            burst: BURST,
            temperature: temperature.name().into(),
            window: temperature.window(),
            simulated: setup.copier.simulated(),
            received: variant.packets(),
            verified: variant.packets(),
            published: published(frame, setup.mode),
            empty_poll_cycles: Some(variant.empty_poll()),
            background: variant.background_copies().is_some(),
            background_copies_per_packet: variant.background_copies(),
            copied_bytes_per_packet: Some(variant.copied_bytes()),
            ..Row::default()
        };
        blocks.enter(&mut row, hz);
        steadiness.enter(&mut row);
        row.published_unit = row.published.map(|_| PUBLISHED_UNIT);
        let engine_ns = match setup.copier.simulated() {
            // Windows are too short to keep a device busy: it is asked for what it does when it is.
            true => {
                let device =
                    DeviceRate::of_copies((frame - FCS_LEN) as u32, (1, 1, 4), setup.copier.batch())?;
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
            let ratio = SumRatio::of(&core.core, &blocks.core);
            row.offload_over_cpu = ratio.map(|ratio| ratio.sums);
            row.offload_over_cpu_lower = ratio.map(|ratio| ratio.lower);
        }
        against.enter(&mut row);
        rows.push(row);
    }
    Ok(rows)
}

/// The guide's figure. It has none for `auto`, which would have followed the better of the two, and none for 1518 bytes.
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

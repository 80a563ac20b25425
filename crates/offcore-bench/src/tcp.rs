//! `offcore bench tcp`: what a segment costs the core of the TCP host stack that sends or receives it.

mod link;
mod streams;
mod wire;

use std::time::Duration;

use anyhow::{Context, Result};
use offcore_dma::Mode;
use offcore_mem::{Hugepages, Pool};
use offcore_stats::tsc;

use crate::BURST;
use crate::guests::memory::{page_name, pages_for};
use crate::method::alternate::{Against, Alternating, FEWEST, Schedule};
use crate::method::copier::Setup;
use crate::method::lockstep::OtherCore;
use crate::method::temperature::Temperature;
use crate::report::progress::Progress;
use crate::report::row::Row;
use crate::report::sample::{ClockCheck, SumRatio};
use link::{Link, Traffic};

pub use link::Side;

/// Bytes that applications write at a time, where nothing else is said.
pub const CHUNKS: [usize; 4] = [4 << 10, 64 << 10, 256 << 10, 2 << 20];
/// Temperatures that are measured.
pub const TEMPERATURES: [Temperature; 2] = [Temperature::Hot, Temperature::Remote];
/// Bytes of payload of a segment, where nothing else is said: Ethernet's, with timestamps.
pub const SEGMENT: usize = 1448;
/// Headers of a segment, FCS included.
pub const HEADERS: usize = 70;
/// Packet buffers, and bytes of one, headroom included: of Ethernet's segments, and of longer ones.
const BUFFERS: usize = 8192;
const BUFFER: usize = 2048;
const LONG_BUFFER: usize = 16384;

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// Which host's core.
    pub sides: Vec<Side>,
    pub chunks: Vec<usize>,
    /// Bytes of payload in a segment, at most 8192.
    pub segments: Vec<usize>,
    /// Connections that take turns.
    pub connections: Vec<usize>,
    pub temperatures: Vec<Temperature>,
    /// Who copies: what is measured alternately.
    pub setups: Vec<Setup>,
    /// Whether the port completes and verifies checksums; otherwise the core reads all payload.
    pub checksums: bool,
    /// A B B A blocks per cell.
    pub blocks: usize,
    /// Bursts of a turn that are timed, at least.
    pub bursts: usize,
    /// How long a cell may take: then fewer blocks have to do, but never fewer than ten.
    pub timeout: Option<Duration>,
    pub hugepages: Hugepages,
    pub lcore: usize,
    /// The other core: the far host, the applications, and the engine.
    pub other_lcore: Option<usize>,
}

/// Measures everything that `options` asks for; `emit` gets each row as it is ready.
///
/// # Errors
/// When something cannot be set up, or a byte is lost or changed.
pub fn run(options: &Options, progress: &Progress, emit: &mut dyn FnMut(Row)) -> Result<()> {
    offcore_stats::lcore::pin(options.lcore)?;
    let other = OtherCore::start(options.other_lcore)?;
    let buffer =
        if options.segments.iter().all(|&segment| segment <= SEGMENT) { BUFFER } else { LONG_BUFFER };
    let hugepages = pages_for(options.hugepages, ((BUFFERS * buffer) >> 20) + 2)?;
    let mut clock = ClockCheck::new();
    let cells = options.sides.len() * options.connections.len() * options.segments.len();
    progress.begin(cells * options.temperatures.len() * options.chunks.len() * options.blocks);
    // One pool for each setup: what one has sent warms no other's buffers.
    let pools: Vec<_> =
        options.setups.iter().map(|_| Pool::new(BUFFERS, buffer, hugepages)).collect::<Result<_, _>>()?;
    let pages = Some(page_name(pools[0].mapping().page_size()));
    let wires = options.segments.iter().flat_map(|&segment| {
        let sides = options.sides.iter().map(move |&side| (side, segment));
        sides.flat_map(|wire| options.connections.iter().map(move |&connections| (wire, connections)))
    });
    for ((side, segment), connections) in wires {
        progress.say("tcp, opening connections");
        let traffic = Traffic { side, segment, connections, checksums: options.checksums };
        let open = |(&setup, pool): (&Setup, &&'static Pool)| Link::open(setup, traffic, pool);
        let links: Result<Vec<Link>> = options.setups.iter().zip(&pools).map(open).collect();
        let mut links = links?;
        for &temperature in &options.temperatures {
            for &chunk in &options.chunks {
                progress.say(&format!("tcp, {side}, {temperature}, {chunk} B"));
                let mut cell = Alternating::new();
                for link in &mut links {
                    link.set(temperature, chunk);
                    cell.add(link);
                }
                let Options { blocks, bursts, timeout, .. } = *options;
                let schedule = Schedule { blocks, bursts, limit: timeout, fewest: FEWEST };
                cell.measure(schedule, &other, &mut clock, progress)
                    .with_context(|| format!("{side}, {temperature}, chunks of {chunk} bytes"))?;
                for row in rows(&cell, traffic, temperature) {
                    let (chunk, connections) = (Some(chunk), Some(connections));
                    let bursts_per_turn = Some(bursts);
                    emit(Row { chunk, connections, pages, bursts_per_turn, ..row });
                }
            }
        }
    }
    progress.end();
    Ok(())
}

fn rows(cell: &Alternating<&mut Link>, traffic: Traffic, temperature: Temperature) -> Vec<Row> {
    let of = |setup: Setup| cell.blocks_of(move |link: &&mut Link| link.setup == setup);
    let core = of(Setup::CPU);
    let steadiness = cell.steadiness();
    let mut rows = Vec::new();
    for (link, blocks) in cell.iter() {
        let setup = link.setup;
        let mut row = Row {
            bench: "tcp",
            case: traffic.side.name().into(),
            arrangement: "core-cost",
            frame: traffic.segment + HEADERS,
            mode: setup.mode.to_string(),
            engine: setup.copier.name().into(),
            ring: "none",
            burst: BURST,
            temperature: temperature.name().into(),
            simulated: setup.copier.simulated(),
            received: link.segments(),
            verified: link.segments(),
            ..Row::default()
        };
        blocks.enter(&mut row, tsc::hz());
        steadiness.enter(&mut row);
        row.payload_gbps = Some(traffic.segment as f64 * 8.0 / row.ns_per_packet);
        if let Some(ns) = link.engine_ns_per_copy() {
            row.set_engine(ns, 1.0);
        }
        match (setup.mode, core) {
            (Mode::Offload, Some(core)) => {
                let ratio = SumRatio::of(&core.core, &blocks.core);
                row.offload_over_cpu = ratio.map(|ratio| ratio.sums);
                row.offload_over_cpu_lower = ratio.map(|ratio| ratio.lower);
            }
            (Mode::Auto, core) => {
                let offload = of(Setup { mode: Mode::Offload, ..setup });
                Against::new(blocks, core, offload).enter(&mut row);
            }
            _ => {}
        }
        rows.push(row);
    }
    rows
}

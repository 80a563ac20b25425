//! `offcore bench tcp`: what a segment, or a connection, costs the core of the TCP host stack.
//!
//! * [`run`]: a segment, by who copies it.
//! * [`idle`]: the same beside connections on which nothing happens, against alone.
//! * [`open_close`]: connections that are opened, used once and closed.
//! * [`veth`]: a stream to and from the kernel's TCP, beside the kernel's in our place.
//! * [`paths`]: such a stream over a slow, long or lossy path.
//! * [`flows`]: many connections at once, and short ones over a lossy path.
//! * [`neighbour`]: the rate of an honest client during attacks on the stack.
//! * [`http`]: nginx, beside the same on the kernel's TCP.
//! * [`programs`]: nginx, PostgreSQL and PHP behind a TAP, beside the same on the kernel's.

pub mod flows;
pub mod http;
pub mod idle;
mod link;
pub mod neighbour;
pub mod open_close;
mod pair;
pub mod paths;
pub mod programs;
mod share;
mod streams;
pub mod veth;
mod visits;
mod wire;

use std::time::Duration;

use anyhow::{Context, Result};
use offcore_dma::Mode;
use offcore_mem::{Hugepages, Pool};
use offcore_stats::tsc;

use crate::BURST;
use crate::guests::memory::{page_name, pages_for};
use crate::method::alternate::{Against, Alternating, Blocks, FEWEST, Schedule, Steadiness, mean};
use crate::method::copier::Setup;
use crate::method::lockstep::OtherCore;
use crate::method::temperature::Temperature;
use crate::report::progress::Progress;
use crate::report::row::Row;
use crate::report::sample::{ClockCheck, SumRatio};
use link::{Link, Load, Moved, Traffic};

pub use link::Side;

/// Bytes that applications write at a time, where nothing else is said.
pub const CHUNKS: [usize; 4] = [4 << 10, 64 << 10, 256 << 10, 2 << 20];
/// Bytes of payload of a segment, where nothing else is said: Ethernet's, with timestamps.
pub const SEGMENT: usize = 1448;
/// Headers of a segment, FCS included.
pub const HEADERS: usize = 70;
/// What the VPP guide says of copies from packets to FIFOs; of the kernel's `copy_user` it says 42 %.
const PUBLISHED: (f64, &str) =
    (36.5, "percent of a VPP core in copies to FIFOs, iperf3 (739269-002US, figure 2)");
/// What the mTCP library with DSA is said to gain, and from what length on.
const GAIN: (f64, &str) = (1.7, "times, up to, epping by DSA at 256 KB and above (mTCP, VDSL 2022)");
const GAINS_FROM: usize = 256 << 10;
/// Packet buffers, and bytes of one, headroom included: of Ethernet's segments, and of longer ones.
const BUFFERS: usize = 8192;
const BUFFER: usize = 2048;
const LONG_BUFFER: usize = 16384;
/// Links that a pair has open, each with packet buffers of its own.
const PAIR: usize = 2;

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// Which host's core.
    pub sides: Vec<Side>,
    pub chunks: Vec<usize>,
    /// Bytes of payload in a segment, at most 8192.
    pub segments: Vec<usize>,
    /// Connections that take turns; in [`idle`], those beside that do not; in [`open_close`], those that are open at a time.
    pub connections: Vec<usize>,
    pub temperatures: Vec<Temperature>,
    /// No longer chunks are measured hot: a core's own caches have to hold one twice, in the FIFO and in packets.
    pub largest_hot: usize,
    /// Who copies: what is measured alternately.
    pub setups: Vec<Setup>,
    /// Whether the port completes and verifies checksums; otherwise the core reads all payload.
    pub checksums: bool,
    /// Whether the measured core may store past the caches, as it does otherwise. The far host and a helper core never do.
    pub past_caches: bool,
    /// Whether chunks are sent when they are asked for, by requests that the other host sends, and requests are counted.
    pub asks: bool,
    /// Whether the core is measured against itself first, for the noise floor of all ratios.
    pub noise_floor: bool,
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

impl Options {
    /// How long a cell is measured.
    fn schedule(&self, load: Load, segment: usize) -> Schedule {
        let cold = load.temperature == Temperature::Cold;
        let blocks = if cold { self.blocks.div_ceil(2) } else { self.blocks };
        // What is counted is segments, or requests of which each has many.
        let segments = if self.asks { load.chunk.div_ceil(segment) } else { 1 };
        Schedule { blocks, bursts: self.bursts.div_ceil(segments), limit: self.timeout, fewest: FEWEST }
    }

    /// What goes over each wire, in turns.
    fn loads(&self) -> Vec<Load> {
        let of = |&temperature| self.chunks.iter().map(move |&chunk| Load { temperature, chunk });
        let can_be = |load: &Load| load.temperature != Temperature::Hot || load.chunk <= self.largest_hot;
        self.temperatures.iter().flat_map(of).filter(can_be).collect()
    }

    /// Which host, how long its segments are, and how many connections.
    fn wires(&self) -> impl Iterator<Item = (Side, usize, usize)> {
        self.segments.iter().flat_map(move |&segment| {
            let sides = self.sides.iter().map(move |&side| (side, segment));
            sides.flat_map(|(side, segment)| self.connections.iter().map(move |&n| (side, segment, n)))
        })
    }

    /// Blocks of all wires, those of a cell counted so often.
    fn steps(&self, often: usize) -> usize {
        let blocks: usize = self.loads().iter().map(|load| self.schedule(*load, SEGMENT).blocks).sum();
        self.wires().count() * blocks * often
    }
}

/// What everything in a run is measured with.
struct Rig {
    other: OtherCore,
    clock: ClockCheck,
    /// One for each link that is open: what one has sent warms no other's buffers.
    pools: Vec<&'static Pool>,
}

impl Rig {
    fn new(options: &Options, pools: usize) -> Result<Self> {
        offcore_stats::lcore::pin(options.lcore)?;
        let other = OtherCore::start(options.other_lcore)?;
        let short = options.segments.iter().all(|&segment| segment <= SEGMENT);
        let buffer = if short { BUFFER } else { LONG_BUFFER };
        let hugepages = pages_for(options.hugepages, pools * (((BUFFERS * buffer) >> 20) + 2))?;
        let pools: Result<Vec<_>, _> = (0..pools).map(|_| Pool::new(BUFFERS, buffer, hugepages)).collect();
        Ok(Self { other, clock: ClockCheck::new(), pools: pools? })
    }

    fn pages(&self) -> Option<&'static str> {
        self.pools.first().map(|pool| page_name(pool.page_size()))
    }
}

/// Measures everything that `options` asks for; `emit` gets each row as it is ready.
///
/// # Errors
/// When something cannot be set up, or a byte is lost or changed.
pub fn run(options: &Options, progress: &Progress, emit: &mut dyn FnMut(Row)) -> Result<()> {
    let mut rig = Rig::new(options, options.setups.len().max(PAIR))?;
    let pages = rig.pages();
    // Without a ratio there is nothing that the floor would be for.
    let with_noise = options.noise_floor && options.setups.len() > 1;
    progress.begin(options.steps(1 + usize::from(with_noise)));
    let loads = options.loads();
    for (side, segment, connections) in options.wires() {
        let (fifo, checksums, past_caches) =
            (link::fifo_of(connections), options.checksums, options.past_caches);
        let asks = options.asks;
        let traffic = Traffic { side, segment, connections, idle: 0, fifo, checksums, past_caches, asks };
        let noise = match with_noise {
            true => pair::noise(&mut rig, traffic, &loads, options, progress)?,
            false => vec![None; loads.len()],
        };
        progress.say("tcp, opening connections");
        let open = |(&setup, pool): (&Setup, &&'static Pool)| Link::open(setup, traffic, pool);
        let links: Result<Vec<Link>> = options.setups.iter().zip(&rig.pools).map(open).collect();
        let mut links = links?;
        for (&load, noise) in loads.iter().zip(noise) {
            let Load { temperature, chunk } = load;
            progress.say(&format!("tcp, {side}, {temperature}, {chunk} B"));
            let mut cell = Alternating::new();
            for link in &mut links {
                link.set(load);
                cell.add(link);
            }
            let schedule = options.schedule(load, segment);
            cell.measure(schedule, &rig.other, &mut rig.clock, progress)
                .with_context(|| format!("{side}, {temperature}, chunks of {chunk} bytes"))?;
            for mut row in rows(&cell, traffic, load) {
                row.set_noise(noise);
                emit(Row { pages, bursts_per_turn: Some(schedule.bursts), ..row });
            }
        }
    }
    progress.end();
    Ok(())
}

fn rows(cell: &Alternating<&mut Link>, traffic: Traffic, load: Load) -> Vec<Row> {
    let of = |setup: Setup| cell.blocks_of(move |link: &&mut Link| link.setup == setup);
    let core = of(Setup::CPU);
    let mut rows = Vec::new();
    for (link, blocks) in cell.iter() {
        let setup = link.setup;
        let mut row = row(setup, traffic, load, (blocks, cell.steadiness()), link.moved());
        if let Some(ns) = link.engine_ns_per_copy() {
            // A copy for each segment; a request has several.
            let moved = link.moved();
            let units =
                if traffic.asks { moved.bytes as f64 / load.chunk as f64 } else { moved.segments as f64 };
            row.set_engine(ns, moved.segments as f64 / units.max(1.0));
        }
        row.copy_routine = link.copy_routine();
        row.share_copy = link.copy_share();
        row.share_switching = row.share_copy.map(|copy| 1.0 - copy);
        if traffic.asks && setup.mode == Mode::Offload && load.chunk >= GAINS_FROM {
            (row.published, row.published_unit) = (Some(GAIN.0), Some(GAIN.1));
        }
        if traffic.side == Side::Receive && setup.mode == Mode::Cpu {
            (row.published, row.published_unit) = (Some(PUBLISHED.0), Some(PUBLISHED.1));
        }
        match (setup.mode, core) {
            (Mode::Offload, Some(core)) => {
                let ratio = SumRatio::of(&core.core, &blocks.core);
                row.offload_over_cpu = ratio.map(|ratio| ratio.sums);
                row.offload_over_cpu_median = ratio.map(|ratio| ratio.median);
                row.offload_over_cpu_lower = ratio.map(|ratio| ratio.lower);
                row.offload_over_cpu_both =
                    SumRatio::of(&core.both(), &blocks.both()).map(|ratio| ratio.sums);
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

/// What a link has taken, and what it was.
fn row(
    setup: Setup,
    traffic: Traffic,
    load: Load,
    (blocks, steadiness): (&Blocks, Steadiness),
    moved: Moved,
) -> Row {
    let mut row = Row {
        bench: "tcp",
        case: traffic.side.name().into(),
        arrangement: "core-cost",
        frame: traffic.segment + HEADERS,
        mode: setup.mode.to_string(),
        engine: setup.copier.name().into(),
        ring: "none",
        burst: BURST,
        temperature: load.temperature.name().into(),
        chunk: Some(load.chunk),
        connections: Some(traffic.connections),
        simulated: setup.copier.simulated(),
        received: moved.segments,
        verified: moved.segments,
        windows_again: Some(moved.again),
        ..Row::default()
    };
    blocks.enter(&mut row, tsc::hz());
    steadiness.enter(&mut row);
    let ns = |samples: &[f64]| mean(samples).map(|ticks| ticks * 1e9 / tsc::hz() as f64);
    row.guest_ns_per_packet = ns(&blocks.guest);
    row.both_ns_per_packet = ns(&blocks.both());
    // Not all segments are full: a chunk's last one, and any that the window has no room for.
    let segment = moved.bytes as f64 / moved.segments.max(1) as f64;
    let payload = if traffic.asks { load.chunk as f64 } else { segment };
    row.payload_per_packet = Some(payload);
    let gbps = payload * 8.0 / row.ns_per_packet;
    row.payload_gbps = Some(gbps);
    row.gbps = gbps * (segment + HEADERS as f64) / segment;
    row.gbps_l1 = gbps * (segment + HEADERS as f64 + 20.0) / segment;
    if traffic.asks {
        (row.case, row.unit) = ("requests".into(), "tsc_cycles_per_request");
        row.window = link::at_a_time(load.chunk, (true, traffic.connections));
        row.verified = moved.bytes / load.chunk as u64;
        row.received = row.verified;
    }
    row
}

#[cfg(test)]
mod tests;

//! `offcore bench tcp`: measures the cost of a segment or a connection on the core of the TCP host stack.
//!
//! - [`run`]: cost of a segment, by copy mode.
//! - [`idle`]: the same with and without idle connections.
//! - [`open_close`]: connections that are opened, used once and closed.
//! - [`veth`]: a stream to and from the kernel's TCP, compared with the kernel's TCP on our side.
//! - [`paths`]: such a stream over a slow, long or lossy path.
//! - [`flows`]: many concurrent connections, and short connections over a lossy path.
//! - [`neighbour`]: the rate of an honest client during attacks on the stack.
//! - [`http`]: nginx, compared with nginx on the kernel's TCP.
//! - [`programs`]: nginx, PostgreSQL and PHP behind a TAP, compared with the same programs on the kernel's TCP.

mod cores;
pub mod flows;
pub mod http;
pub mod idle;
pub mod kernel;
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

use anyhow::{Context, Result};
use offcore_dma::Mode;
use offcore_mem::Pool;
use offcore_stats::tsc;

use crate::guests::memory::{page_name, pages_for};
use crate::method::alternate::{Alternating, Blocks, Extent, Schedule, mean};
use crate::method::copier::Setup;
use crate::method::lockstep::OtherCore;
use crate::method::temperature::Temperature;
use crate::report::progress::Progress;
use crate::report::row::{AutoRatios, Counts, OffloadRatio, Published, Row};
use crate::report::sample::{ClockCheck, Steadiness, SumRatio};
use link::{Link, Load, Moved, Traffic};

pub use link::Side;

/// Default write sizes of applications in bytes.
pub const CHUNKS: [usize; 4] = [4 << 10, 64 << 10, 256 << 10, 2 << 20];
/// Default payload of a segment in bytes: Ethernet's MTU with TCP timestamps.
pub const SEGMENT: usize = 1448;
/// Bytes of headers per segment, including the FCS.
pub const HEADERS: usize = 70;
/// Share of copies from packets to FIFOs, as published in the VPP guide. The guide's figure for the kernel's
/// `copy_user` is 42 %.
const PUBLISHED: (f64, &str) =
    (36.5, "percent of a VPP core in copies to FIFOs, iperf3 (739269-002US, figure 2)");
/// Published gain of the mTCP library with DSA, and the minimum length for it.
const GAIN: (f64, &str) = (1.7, "times, up to, epping by DSA at 256 KB and above (mTCP, VDSL 2022)");
const GAINS_FROM: usize = 256 << 10;
/// Number of packet buffers, and their size in bytes including headroom: for Ethernet's segments, and for longer ones.
const BUFFERS: usize = 8192;
const BUFFER: usize = 2048;
const LONG_BUFFER: usize = 16384;
/// Number of links that a pair keeps open, each with separate packet buffers.
const PAIR: usize = 2;

/// Options of the measurement.
#[derive(Clone, Debug)]
pub struct Options {
    /// Hosts whose core is measured.
    pub sides: Vec<Side>,
    pub chunks: Vec<usize>,
    /// Payload of a segment in bytes, at most 8192.
    pub segments: Vec<usize>,
    /// Number of connections that take turns; in [`idle`] the number of idle connections, in [`open_close`] the number
    /// of concurrently open connections.
    pub connections: Vec<usize>,
    pub temperatures: Vec<Temperature>,
    /// Maximum chunk size for hot data: a core's private caches have to hold a chunk twice, in the FIFO and in packets.
    pub largest_hot: usize,
    /// Modes and engines that alternate.
    pub setups: Vec<Setup>,
    /// Whether the port completes and verifies checksums. Otherwise the core reads all payload.
    pub checksums: bool,
    /// Whether the measured core may use stores that bypass the caches, which is its default. The far host and a helper
    /// core never do.
    pub past_caches: bool,
    /// Whether a chunk is sent only in response to a request of the other host. Requests are counted then.
    pub asks: bool,
    /// Whether to first measure the core against itself, to get the noise floor of all ratios.
    pub noise_floor: bool,
    pub extent: Extent,
}

impl Options {
    /// Returns the schedule of a cell.
    fn schedule(&self, load: Load, segment: usize) -> Schedule {
        // The counted units are segments, or requests with several segments each.
        let segments = if self.asks { load.chunk.div_ceil(segment) } else { 1 };
        let schedule = self.extent.schedule(load.temperature);
        Schedule { bursts: schedule.bursts.div_ceil(segments), ..schedule }
    }

    /// Returns the loads that take turns on each wire.
    fn loads(&self) -> Vec<Load> {
        let of = |&temperature| self.chunks.iter().map(move |&chunk| Load { temperature, chunk });
        let can_be = |load: &Load| load.temperature != Temperature::Hot || load.chunk <= self.largest_hot;
        self.temperatures.iter().flat_map(of).filter(can_be).collect()
    }

    /// Returns the combinations of measured host, segment length and number of connections.
    fn wires(&self) -> impl Iterator<Item = (Side, usize, usize)> {
        self.segments.iter().flat_map(move |&segment| {
            let sides = self.sides.iter().map(move |&side| (side, segment));
            sides.flat_map(|(side, segment)| self.connections.iter().map(move |&n| (side, segment, n)))
        })
    }

    /// Returns the number of blocks of all wires, where each cell counts `often` times.
    fn steps(&self, often: usize) -> usize {
        let blocks: usize = self.loads().iter().map(|load| self.schedule(*load, SEGMENT).blocks).sum();
        self.wires().count() * blocks * often
    }
}

/// State shared by all measurements of a run.
struct Rig {
    other: OtherCore,
    clock: ClockCheck,
    /// One pool per open link, so that one link's packets do not warm another link's buffers.
    pools: Vec<&'static Pool>,
}

impl Rig {
    fn new(options: &Options, pools: usize) -> Result<Self> {
        let other = options.extent.start()?;
        let short = options.segments.iter().all(|&segment| segment <= SEGMENT);
        let buffer = if short { BUFFER } else { LONG_BUFFER };
        let hugepages = pages_for(options.extent.hugepages, pools * (((BUFFERS * buffer) >> 20) + 2))?;
        let pools: Result<Vec<_>, _> = (0..pools).map(|_| Pool::new(BUFFERS, buffer, hugepages)).collect();
        Ok(Self { other, clock: ClockCheck::new(), pools: pools? })
    }

    fn pages(&self) -> Option<&'static str> {
        self.pools.first().map(|pool| page_name(pool.page_size()))
    }
}

/// Measures everything that `options` selects and passes each finished row to `emit`.
///
/// # Errors
/// If something cannot be set up, or a byte is lost or changed.
pub fn run(options: &Options, progress: &Progress, emit: &mut dyn FnMut(Row)) -> Result<()> {
    let mut rig = Rig::new(options, options.setups.len().max(PAIR))?;
    let pages = rig.pages();
    // Without a ratio a noise floor has no use.
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
                row.ratios.noise = noise.into();
                (row.peer.pages, row.figures.bursts_per_turn) = (pages, Some(schedule.bursts));
                emit(row);
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
        let mut row = row(setup, traffic, load, blocks, cell.steadiness(), link.moved());
        if let Some(ns) = link.engine_ns_per_copy() {
            // Each segment is one copy, and a request has several segments.
            let moved = link.moved();
            let units =
                if traffic.asks { moved.bytes as f64 / load.chunk as f64 } else { moved.segments as f64 };
            row.set_engine(ns, moved.segments as f64 / units.max(1.0));
        }
        row.core.copy_routine = link.copy_routine();
        row.shares.share_copy = link.copy_share();
        row.shares.share_switching = row.shares.share_copy.map(|copy| 1.0 - copy);
        if traffic.asks && setup.mode == Mode::Offload && load.chunk >= GAINS_FROM {
            row.published = Published::new(Some(GAIN.0), GAIN.1);
        }
        if traffic.side == Side::Receive && setup.mode == Mode::Cpu {
            row.published = Published::new(Some(PUBLISHED.0), PUBLISHED.1);
        }
        match (setup.mode, core) {
            (Mode::Offload, Some(core)) => {
                let ratio = SumRatio::of(&core.core, &blocks.core);
                let both = SumRatio::of(&core.both(), &blocks.both());
                row.ratios.offload = OffloadRatio {
                    offload_over_cpu_median: ratio.map(|ratio| ratio.median),
                    offload_over_cpu_both: both.map(|both| both.sums),
                    ..OffloadRatio::new(ratio)
                };
            }
            (Mode::Auto, core) => {
                let offload = of(Setup { mode: Mode::Offload, ..setup });
                row.ratios.auto = AutoRatios::new(blocks, core, offload);
            }
            _ => {}
        }
        rows.push(row);
    }
    rows
}

/// Returns the row of a link.
fn row(
    setup: Setup,
    traffic: Traffic,
    load: Load,
    blocks: &Blocks,
    steadiness: Steadiness,
    moved: Moved,
) -> Row {
    let mut row = Row::new("tcp", traffic.side, "core-cost");
    setup.describe(&mut row);
    (row.head.frame, row.head.temperature) = (traffic.segment + HEADERS, load.temperature.name().into());
    (row.tcp.chunk, row.tcp.connections) = (Some(load.chunk), Some(traffic.connections));
    row.counts = Counts::all_of(moved.segments);
    row.tcp.payload.windows_again = Some(moved.again);
    blocks.enter(&mut row, tsc::hz());
    row.clock = steadiness;
    let ns = |samples: &[f64]| mean(samples).map(|ticks| ticks * 1e9 / tsc::hz() as f64);
    row.core.guest_ns_per_packet = ns(&blocks.guest);
    row.core.both_ns_per_packet = ns(&blocks.both());
    // Not all segments are full: the last segment of a chunk, and segments that are limited by the window.
    let segment = moved.bytes as f64 / moved.segments.max(1) as f64;
    let payload = if traffic.asks { load.chunk as f64 } else { segment };
    row.tcp.payload.payload_per_packet = Some(payload);
    let gbps = payload * 8.0 / row.figures.ns_per_packet;
    row.tcp.payload.payload_gbps = Some(gbps);
    row.figures.gbps = gbps * (segment + HEADERS as f64) / segment;
    row.figures.gbps_l1 = gbps * (segment + HEADERS as f64 + 20.0) / segment;
    if traffic.asks {
        (row.head.case, row.figures.unit) = ("requests".into(), "tsc_cycles_per_request");
        row.head.window = link::chunks_per_window(load.chunk, true, traffic.connections);
        row.counts = Counts::all_of(moved.bytes / load.chunk as u64);
    }
    row
}

#[cfg(test)]
mod tests;

//! `offcore bench vhost`: Table 8 of the vhost guide, re-measured as core cost, beside DPDK's librte_vhost.
//!
//! The case is the guide's: a packet is dequeued from a guest, its Ethernet addresses are rewritten, and it is enqueued
//! to a guest: the same one (`loop`) or another (`guest-to-guest`).

mod cell;
pub mod core_cost;
pub mod demo;
pub mod end_to_end;
pub mod flip;
pub mod latency;
pub mod neighbour;
mod round_trips;
pub mod work_sweep;

use std::time::Duration;

#[cfg(feature = "dpdk")]
use anyhow::Context;
use anyhow::Result;
use offcore_mem::Hugepages;

use crate::guests::memory::{Need, RunMemory, Testbed, page_name};
use crate::guests::workload::{GuestKind, IMIX_MEAN, Ring, Route, Workload};
use crate::method::alternate::{FEWEST, Schedule};
use crate::method::copier::Setup;
use crate::method::lockstep::OtherCore;
use crate::method::temperature::Temperature;
use crate::report::progress::Progress;
use crate::report::row::Row;
use crate::report::sample::ClockCheck;
use cell::{Cell, Kind};

/// Frame lengths of the published table, FCS included.
pub const FRAMES: [usize; 7] = [64, 128, 256, 512, 1024, 1280, 1518];

/// The guide's Table 8 in million packets a second: frame, core copies, DSA copies.
pub(crate) const PUBLISHED: [(usize, f64, f64); 7] = [
    (64, 7.19, 4.59),
    (128, 7.02, 4.64),
    (256, 6.44, 4.65),
    (512, 4.08, 4.64),
    (1024, 2.67, 4.63),
    (1280, 2.31, 4.62),
    (1518, 2.04, 4.67),
];
/// Copies that a packet of the loop takes: out of the guest, into the guest.
pub(crate) const COPIES: f64 = 2.0;

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    pub route: Route,
    pub rings: Vec<Ring>,
    pub guests: Vec<GuestKind>,
    /// Whether ours copies a payload from guest to guest once, where it can.
    pub one_copy: bool,
    /// Frame lengths, FCS included.
    pub frames: Vec<usize>,
    /// Whether they are those of the Internet mix instead.
    pub imix: bool,
    /// How warm the data is.
    pub temperatures: Vec<Temperature>,
    /// Who copies: what is measured alternately.
    pub setups: Vec<Setup>,
    /// Whether the variants of mode `cpu` are measured once more with an equal-rate copier on the other core.
    pub background: bool,
    /// Whether the shares of Figure 3 are measured, too.
    pub breakdown: bool,
    /// Whether librte_vhost is measured beside.
    pub dpdk_lib: bool,
    /// Whether the core is measured against itself first, for the noise floor of all ratios.
    pub noise_floor: bool,
    /// A B B A blocks per cell.
    pub blocks: usize,
    /// Bursts of a turn that are timed, at least: [`TURN_BURSTS`](crate::method::alternate::TURN_BURSTS).
    pub bursts: usize,
    /// How long a cell may take: then fewer blocks have to do, but never fewer than ten.
    pub timeout: Option<Duration>,
    /// Pages for guests and packet buffers.
    pub hugepages: Hugepages,
    pub lcore: usize,
    pub other_lcore: Option<usize>,
}

impl Options {
    /// The cells, in their order.
    fn workloads(&self) -> Vec<Workload> {
        let &Self { route, one_copy, imix, ref rings, ref guests, ref temperatures, .. } = self;
        let frames = if imix { &[IMIX_MEAN][..] } else { &self.frames };
        let all = rings.iter().flat_map(|&ring| {
            guests.iter().flat_map(move |&guest| {
                temperatures.iter().flat_map(move |&temperature| {
                    let workload =
                        move |&frame| Workload { route, ring, temperature, frame, imix, guest, one_copy };
                    frames.iter().map(workload)
                })
            })
        });
        all.collect()
    }
}

/// Measures everything that `options` asks for; `emit` gets each row as it is ready.
///
/// # Errors
/// When something cannot be set up, or a packet is lost or changed.
pub fn run(options: &Options, progress: &Progress, emit: &mut dyn FnMut(Row)) -> Result<()> {
    offcore_stats::lcore::pin(options.lcore)?;
    let other = OtherCore::start(options.other_lcore)?;
    let need = Need { peer_mib: Peers::mib(options), ..Need::of(options.route, &options.temperatures) };
    let mut memory = RunMemory::new(need, options.hugepages)?;
    let peers = Peers::open(options, memory.hugepages)?;
    let mut clock = ClockCheck::new();
    let workloads = options.workloads();
    let kinds = Kind::all(options);
    progress.begin(workloads.len() * kinds.len() * options.blocks);
    for workload in &workloads {
        let mut noise = None;
        for &kind in &kinds {
            progress.say(&format!("{workload}, {kind}"));
            let mut anew = || {
                memory.renew(workload)?;
                Testbed::new(&memory, workload)
            };
            let mut cell = Cell::new(kind, options, &peers, &anew()?)?;
            let schedule = schedule(options, workload).part_of(kind.parts());
            for part in 0..kind.parts() {
                if part > 0 {
                    cell.renew(&peers, &anew()?)?;
                }
                cell.variants.measure(schedule, &other, &mut clock, progress)?;
            }
            progress.steps(options.blocks.saturating_sub(schedule.blocks * kind.parts()));
            if kind == Kind::Noise {
                noise = cell.variants.noise();
                continue;
            }
            let breakdown = (options.breakdown && kind == Kind::Modes).then_some(&other);
            for mut row in cell.rows(workload, breakdown)? {
                row.set_noise(noise);
                row.bursts_per_turn = Some(options.bursts);
                row.pages = Some(page_name(memory.page_size()));
                emit(row);
            }
        }
    }
    progress.end();
    Ok(())
}

/// How long a cell is measured.
fn schedule(options: &Options, workload: &Workload) -> Schedule {
    let cold = workload.temperature == Temperature::Cold;
    let blocks = if cold { options.blocks.div_ceil(2) } else { options.blocks };
    Schedule { blocks, bursts: options.bursts, limit: options.timeout, fewest: FEWEST }
}

/// What a peer needs once per process.
struct Peers {
    #[cfg(feature = "dpdk")]
    dpdk: Option<std::rc::Rc<crate::peer::dpdk_lib::DpdkLib>>,
}

#[cfg(feature = "dpdk")]
impl Peers {
    /// Packet buffers of librte_vhost's side.
    const MBUFS: u32 = 16_384;

    /// MiB of memory that the peers take.
    fn mib(options: &Options) -> usize {
        if options.dpdk_lib { crate::peer::dpdk_lib::memory_mib(Self::MBUFS) as usize } else { 0 }
    }

    /// On the same pages as ours.
    fn open(options: &Options, hugepages: Hugepages) -> Result<Self> {
        use crate::peer::dpdk_lib::{DpdkConfig, DpdkLib, Pages};
        let pages = if hugepages == Hugepages::None { Pages::Ordinary } else { Pages::Huge };
        let config = DpdkConfig { pages, lcore: options.lcore, mbufs: Self::MBUFS };
        let dpdk =
            options.dpdk_lib.then(|| DpdkLib::open(&config)).transpose().context("opening librte_vhost")?;
        Ok(Self { dpdk: dpdk.map(std::rc::Rc::new) })
    }

    /// The peer in a testbed.
    fn variant(&self, bed: &Testbed) -> Result<cell::Variant> {
        let dpdk = self.dpdk.as_ref().context("no peer was opened")?;
        Ok(cell::Variant::DpdkLib(Box::new(crate::peer::variant::PeerVariant::new(dpdk, bed)?)))
    }
}

#[cfg(not(feature = "dpdk"))]
impl Peers {
    fn mib(_options: &Options) -> usize {
        0
    }

    fn open(options: &Options, _hugepages: Hugepages) -> Result<Self> {
        anyhow::ensure!(
            !options.dpdk_lib,
            "--peer dpdk-lib is not in this build: install libdpdk-dev and build with --features dpdk"
        );
        Ok(Self {})
    }

    fn variant(&self, _bed: &Testbed) -> Result<cell::Variant> {
        anyhow::bail!("no peer was opened")
    }
}

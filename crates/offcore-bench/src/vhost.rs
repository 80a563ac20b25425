//! `offcore bench vhost`: re-measures Table 8 of the vhost guide as core cost, side by side with DPDK's librte_vhost.
//!
//! The case follows the guide: a packet is dequeued from a guest, its Ethernet addresses are rewritten, and it is
//! enqueued to a guest: to the same guest (`loop`) or to another one (`guest-to-guest`).

mod cell;
pub mod core_cost;
pub mod demo;
pub mod end_to_end;
pub mod flip;
pub mod latency;
pub mod neighbour;
mod round_trips;
pub mod work_sweep;

#[cfg(feature = "dpdk")]
use anyhow::Context;
use anyhow::Result;
use offcore_mem::Hugepages;

use crate::guests::memory::{Need, RunMemory, Testbed, page_name};
use crate::guests::workload::{GuestKind, IMIX_MEAN, Ring, Route, Workload};
use crate::method::alternate::Extent;
use crate::method::copier::Setup;
use crate::method::temperature::Temperature;
use crate::report::progress::Progress;
use crate::report::row::Row;
use crate::report::sample::ClockCheck;
use cell::{Cell, Kind};

/// Frame lengths of the published table, including the FCS.
pub const FRAMES: [usize; 7] = [64, 128, 256, 512, 1024, 1280, 1518];

/// Table 8 of the guide in million packets per second: frame length, core copies, DSA copies.
pub(crate) const PUBLISHED: [(usize, f64, f64); 7] = [
    (64, 7.19, 4.59),
    (128, 7.02, 4.64),
    (256, 6.44, 4.65),
    (512, 4.08, 4.64),
    (1024, 2.67, 4.63),
    (1280, 2.31, 4.62),
    (1518, 2.04, 4.67),
];
/// Copies per packet of the loop: out of the guest and into the guest.
pub(crate) const COPIES: f64 = 2.0;

/// Options of the measurement.
#[derive(Clone, Debug)]
pub struct Options {
    pub route: Route,
    pub rings: Vec<Ring>,
    pub guests: Vec<GuestKind>,
    /// Whether our back end copies a payload only once from guest to guest where possible.
    pub one_copy: bool,
    /// Frame lengths, including the FCS.
    pub frames: Vec<usize>,
    /// Whether to use the frame lengths of the Internet mix instead.
    pub imix: bool,
    /// Cache temperatures of the data.
    pub temperatures: Vec<Temperature>,
    /// Modes and engines that alternate.
    pub setups: Vec<Setup>,
    /// Whether the variants of mode `cpu` are measured a second time with an equal-rate copier on the other core.
    pub background: bool,
    /// Whether to measure the shares of Figure 3 as well.
    pub breakdown: bool,
    /// Whether to measure librte_vhost as a peer.
    pub dpdk_lib: bool,
    /// Whether to first measure the core against itself, to get the noise floor of all ratios.
    pub noise_floor: bool,
    pub extent: Extent,
}

impl Options {
    /// Returns the cells in their order.
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

/// Measures everything that `options` selects and passes each finished row to `emit`.
///
/// # Errors
/// If something cannot be set up, or a packet is lost or changed.
pub fn run(options: &Options, progress: &Progress, emit: &mut dyn FnMut(Row)) -> Result<()> {
    let other = options.extent.start()?;
    let need = Need { peer_mib: Peers::mib(options), ..Need::of(options.route, &options.temperatures) };
    let mut memory = RunMemory::new(need, options.extent.hugepages)?;
    let peers = Peers::open(options, memory.hugepages)?;
    let mut clock = ClockCheck::new();
    let workloads = options.workloads();
    let kinds = Kind::all(options);
    progress.begin(workloads.len() * kinds.len() * options.extent.blocks);
    for workload in &workloads {
        let mut noise = None;
        for &kind in &kinds {
            progress.say(&format!("{workload}, {kind}"));
            let mut anew = || {
                memory.renew(workload)?;
                Testbed::new(&memory, workload)
            };
            let mut cell = Cell::new(kind, options, &peers, &anew()?)?;
            let schedule = options.extent.schedule(workload.temperature).part_of(kind.parts());
            for part in 0..kind.parts() {
                if part > 0 {
                    cell.renew(&peers, &anew()?)?;
                }
                cell.variants.measure(schedule, &other, &mut clock, progress)?;
            }
            progress.steps(options.extent.blocks.saturating_sub(schedule.blocks * kind.parts()));
            if kind == Kind::Noise {
                noise = cell.variants.noise();
                continue;
            }
            let breakdown = (options.breakdown && kind == Kind::Modes).then_some(&other);
            for mut row in cell.rows(workload, breakdown)? {
                row.ratios.noise = noise.into();
                row.figures.bursts_per_turn = Some(options.extent.bursts);
                row.peer.pages = Some(page_name(memory.page_size()));
                emit(row);
            }
        }
    }
    progress.end();
    Ok(())
}

/// State of the peers that is set up once per process.
struct Peers {
    #[cfg(feature = "dpdk")]
    dpdk: Option<std::rc::Rc<crate::peer::dpdk_lib::DpdkLib>>,
}

#[cfg(feature = "dpdk")]
impl Peers {
    /// Number of packet buffers of librte_vhost.
    const MBUFS: u32 = 16_384;

    /// Returns the MiB of memory that the peers need.
    fn mib(options: &Options) -> usize {
        if options.dpdk_lib { crate::peer::dpdk_lib::memory_mib(Self::MBUFS) as usize } else { 0 }
    }

    /// Opens the peers on pages of the same size as ours.
    fn open(options: &Options, hugepages: Hugepages) -> Result<Self> {
        use crate::peer::dpdk_lib::{DpdkConfig, DpdkLib, Pages};
        let pages = if hugepages == Hugepages::None { Pages::Ordinary } else { Pages::Huge };
        let config = DpdkConfig { pages, lcore: options.extent.lcore, mbufs: Self::MBUFS };
        let dpdk =
            options.dpdk_lib.then(|| DpdkLib::open(&config)).transpose().context("opening librte_vhost")?;
        Ok(Self { dpdk: dpdk.map(std::rc::Rc::new) })
    }

    /// Creates the peer's variant in a testbed.
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

//! `offcore bench vhost`: Table 8 of the vhost guide, re-measured as core cost, beside DPDK's librte_vhost.
//!
//! The case is the guide's: a packet is dequeued from a guest, its Ethernet addresses are rewritten, and it is enqueued
//! to a guest: the same one (`loop`) or another (`guest-to-guest`).

use std::time::Duration;

#[cfg(feature = "dpdk")]
use anyhow::Context;
use anyhow::Result;
use offcore_dma::Mode;
use offcore_mem::{Hugepages, Pool};
use offcore_stats::tsc;

use crate::alternate::{Against, Alternating, Subject as Alternates};
use crate::copier::{Copier, Setup};
use crate::core_cost::{BURST, Lane};
use crate::lockstep::OtherCore;
use crate::peer::about::AboutPeer;
use crate::predict::DeviceRate;
use crate::progress::Progress;
use crate::row::Row;
use crate::sample::{ClockCheck, Spread, paired_ratio};
use crate::temperature::Temperature;
use crate::workload::{Ring, Route, Workload};

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
/// Windows over which Figure 3's shares are taken.
const BREAKDOWN: usize = 192;

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// From whom to whom packets go.
    pub route: Route,
    /// Formats of virtqueues.
    pub rings: Vec<Ring>,
    /// Whether ours copies a payload from guest to guest once, where it can.
    pub one_copy: bool,
    /// Frame lengths, FCS included.
    pub frames: Vec<usize>,
    /// How warm the data is.
    pub temperatures: Vec<Temperature>,
    /// Who copies: what is measured alternately.
    pub setups: Vec<Setup>,
    /// Whether the lanes of mode `cpu` are measured once more with an equal-rate copier on the other core.
    pub background: bool,
    /// Whether the shares of Figure 3 are measured, too.
    pub breakdown: bool,
    /// Whether librte_vhost is measured beside.
    pub dpdk_lib: bool,
    /// A B B A blocks per cell.
    pub blocks: usize,
    /// How long a cell may take: then fewer blocks have to do, but never fewer than ten.
    pub patience: Option<Duration>,
    /// Pages for guests and packet buffers.
    pub hugepages: Hugepages,
    /// The measured core.
    pub lcore: usize,
    /// The other core.
    pub other_lcore: Option<usize>,
}

impl Options {
    /// The cells, in their order.
    fn workloads(&self) -> Vec<Workload> {
        let &Self { route, ref rings, one_copy, ref temperatures, ref frames, .. } = self;
        let all = rings.iter().flat_map(|&ring| {
            temperatures.iter().flat_map(move |&temperature| {
                let workload = move |&frame| Workload { route, ring, temperature, frame, one_copy };
                frames.iter().map(workload)
            })
        });
        all.collect()
    }
}

/// A cell: what is measured alternately in it.
struct Cell {
    lanes: Alternating<Subject>,
}

enum Subject {
    Ours {
        setup: Setup,
        background: bool,
        lane: Box<Lane>,
    },
    #[cfg(feature = "dpdk")]
    DpdkLib(Box<crate::peer::lane::PeerLane>),
}

impl Subject {
    /// What it is called when it is not ours.
    fn peer_name(&self) -> Option<&'static str> {
        match self {
            Self::Ours { .. } => None,
            #[cfg(feature = "dpdk")]
            Self::DpdkLib(_) => Some("dpdk-lib"),
        }
    }
}

impl Alternates for Subject {
    fn is_auto(&self) -> bool {
        matches!(self, Self::Ours { setup, .. } if setup.mode == Mode::Auto)
    }

    fn turn(&mut self, other: &OtherCore) -> Result<f64> {
        match self {
            Self::Ours { lane, .. } => lane.turn(other),
            #[cfg(feature = "dpdk")]
            Self::DpdkLib(lane) => lane.turn(other),
        }
    }
}

/// Measures everything that `options` asks for; `emit` gets each row as it is ready.
///
/// # Errors
/// When something cannot be set up, or a packet is lost or changed.
pub fn run(options: &Options, progress: &Progress, emit: &mut dyn FnMut(Row)) -> Result<()> {
    offcore_stats::lcore::pin(options.lcore)?;
    let other = OtherCore::start(options.other_lcore)?;
    let pool = Pool::new(8192, 2048, options.hugepages)?;
    let peers = Peers::open(options)?;
    let mut clock = ClockCheck::new();
    let workloads = options.workloads();
    progress.begin(workloads.len() * options.blocks);
    for workload in &workloads {
        progress.say(&workload.to_string());
        let mut cell = Cell::new(options, &peers, workload, pool)?;
        let cold = workload.temperature == Temperature::Cold;
        let blocks = if cold { options.blocks.div_ceil(2) } else { options.blocks };
        cell.lanes.measure(blocks, options.patience, &other, &mut clock, progress)?;
        for row in cell.rows(workload, options.breakdown.then_some(&other))? {
            emit(row);
        }
    }
    progress.end();
    Ok(())
}

impl Cell {
    /// Every lane on the same pages: hugepages for all, or for none when there are too few.
    fn new(options: &Options, peers: &Peers, workload: &Workload, pool: &'static Pool) -> Result<Self> {
        let on = |hugepages| -> Result<Self> {
            let mut cell = Self { lanes: Alternating::new() };
            for &setup in &options.setups {
                let open = || Lane::new(workload, (setup.mode, setup.open()?), pool, hugepages);
                cell.add(Subject::Ours { setup, background: false, lane: Box::new(open()?) });
                if options.background && setup == Setup::CPU {
                    let lane = Box::new(open()?.with_background());
                    cell.add(Subject::Ours { setup, background: true, lane });
                }
            }
            peers.add_lane(&mut cell, workload, hugepages)?;
            Ok(cell)
        };
        match options.hugepages {
            Hugepages::Auto => on(Hugepages::Size2M).or_else(|_| on(Hugepages::None)),
            chosen => on(chosen),
        }
    }

    fn add(&mut self, subject: Subject) {
        self.lanes.add(subject);
    }

    fn peer(&self) -> Option<(&'static str, &[f64])> {
        self.lanes.iter().find_map(|(subject, blocks)| Some((subject.peer_name()?, blocks)))
    }

    /// What the peer is.
    fn about_peer(&self) -> Result<AboutPeer> {
        #[cfg(feature = "dpdk")]
        for (subject, _) in self.lanes.iter() {
            if let Subject::DpdkLib(lane) = subject {
                return lane.about();
            }
        }
        Ok(AboutPeer::default())
    }

    /// The blocks of our lane in `mode` over the engine of `like`; the core's has no engine.
    fn ours(&self, mode: Mode, like: Copier) -> Option<&[f64]> {
        let copier = if mode == Mode::Cpu { Copier::Core } else { like };
        let wanted = Setup { mode, copier };
        self.lanes.blocks_of(
            |subject| matches!(subject, Subject::Ours { setup, background: false, .. } if *setup == wanted),
        )
    }

    /// The rows of all lanes; with the other core, Figure 3's shares are measured for them.
    fn rows(&mut self, workload: &Workload, breakdown: Option<&OtherCore>) -> Result<Vec<Row>> {
        let &Workload { route, ring, temperature, frame, .. } = workload;
        let hz = tsc::hz();
        let against = self.lanes.iter().map(|(subject, blocks)| match subject {
            Subject::Ours { setup: Setup { mode: Mode::Auto, copier }, .. } => {
                let (cpu, offload) = (self.ours(Mode::Cpu, *copier), self.ours(Mode::Offload, *copier));
                Against::new(blocks, cpu, offload)
            }
            _ => Against::default(),
        });
        let against: Vec<_> = against.collect();
        let peer = self.peer().map(|(name, blocks)| (name, blocks.to_vec()));
        let about_peer = self.about_peer()?;
        let rejected = self.lanes.rejected();
        let mut rows = Vec::new();
        for ((subject, blocks), against) in self.lanes.iter_mut().zip(against) {
            let mut row = Row {
                bench: "vhost",
                case: route.name().into(),
                arrangement: "core-cost",
                frame,
                ring: ring.name(),
                burst: BURST,
                temperature: temperature.name().into(),
                window: temperature.window(),
                rejected,
                ..Row::default()
            };
            row.set_cycles(Spread::of(blocks), hz);
            match subject {
                Subject::Ours { setup, background, lane } => {
                    let seen = lane.seen();
                    (row.received, row.verified, row.lost) =
                        (seen.received, seen.verified, seen.sent - seen.received);
                    row.empty_poll_cycles = Some(lane.empty_poll());
                    (row.mode, row.engine) = (setup.mode.to_string(), setup.copier.name().into());
                    row.simulated = setup.copier.simulated();
                    row.background = *background;
                    row.background_copies_per_packet = lane.background_copies();
                    row.copied_bytes_per_packet = Some(lane.copied_bytes());
                    row.published = published(frame, setup.mode).filter(|_| route == Route::Loop);
                    row.published_unit =
                        row.published.map(|_| "mpps, Xeon 8471N 1.8 GHz, whole forwarding core");
                    let engine_ns = match setup.copier.simulated() {
                        // Windows are too short to keep a device busy: it is asked for what it does when it is.
                        true => Some(1e3 / DeviceRate::of(frame, (1, 1, 4), setup.copier.batch())?.mcopies),
                        false => lane.engine_ns_per_copy(),
                    };
                    if let Some(ns) = engine_ns {
                        row.set_engine(ns, lane.copies());
                    }
                    if let Some(other) = breakdown {
                        let [switching, virtqueue, copy] = lane.breakdown(other, BREAKDOWN)?;
                        (row.share_switching, row.share_virtqueue) = (Some(switching), Some(virtqueue));
                        row.share_copy = Some(copy);
                    }
                    if let Some((name, theirs)) = &peer {
                        let pairs: Vec<_> = theirs.iter().copied().zip(blocks.iter().copied()).collect();
                        row.peer = Some((*name).to_string());
                        row.about_peer = about_peer.clone();
                        row.peer_median = Some(Spread::of(theirs).median);
                        let ratio = paired_ratio(&pairs);
                        row.peer_ratio = ratio.map(|r| r.median);
                        row.peer_ratio_lower = ratio.map(|r| r.lower);
                    }
                }
                #[cfg(feature = "dpdk")]
                Subject::DpdkLib(lane) => {
                    let seen = lane.seen();
                    (row.received, row.verified, row.lost) =
                        (seen.received, seen.verified, seen.sent - seen.received);
                    (row.mode, row.engine) = ("cpu".into(), "dpdk-lib".into());
                }
            }
            against.enter(&mut row);
            rows.push(row);
        }
        Ok(rows)
    }
}

/// The guide's figure. It has none for `auto`, which would have followed the better of the two.
fn published(frame: usize, mode: Mode) -> Option<f64> {
    let (_, core, dsa) = PUBLISHED.into_iter().find(|(f, ..)| *f == frame)?;
    Some(match mode {
        Mode::Cpu => core,
        Mode::Offload => dsa,
        Mode::Auto => return None,
    })
}

/// What a peer needs once per process.
struct Peers {
    #[cfg(feature = "dpdk")]
    dpdk: Option<std::rc::Rc<crate::peer::dpdk_lib::DpdkLib>>,
}

#[cfg(feature = "dpdk")]
impl Peers {
    fn open(options: &Options) -> Result<Self> {
        use crate::peer::dpdk_lib::{DpdkConfig, DpdkLib, Pages};
        let mbufs = 16_384;
        let config = DpdkConfig { pages: Pages::best_for(mbufs), lcore: options.lcore, mbufs };
        let dpdk =
            options.dpdk_lib.then(|| DpdkLib::open(&config)).transpose().context("opening librte_vhost")?;
        Ok(Self { dpdk: dpdk.map(std::rc::Rc::new) })
    }

    fn add_lane(&self, cell: &mut Cell, workload: &Workload, hugepages: Hugepages) -> Result<()> {
        if let Some(dpdk) = &self.dpdk {
            let lane = crate::peer::lane::PeerLane::new(dpdk, workload, hugepages)?;
            cell.add(Subject::DpdkLib(Box::new(lane)));
        }
        Ok(())
    }
}

#[cfg(not(feature = "dpdk"))]
impl Peers {
    fn open(options: &Options) -> Result<Self> {
        anyhow::ensure!(
            !options.dpdk_lib,
            "--peer dpdk-lib is not in this build: install libdpdk-dev and build with --features dpdk"
        );
        Ok(Self {})
    }

    fn add_lane(&self, _cell: &mut Cell, _workload: &Workload, _hugepages: Hugepages) -> Result<()> {
        Ok(())
    }
}

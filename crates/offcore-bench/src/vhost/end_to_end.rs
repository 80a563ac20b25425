//! The `end-to-end` arrangement of `offcore bench vhost`: measures the packet rate that a back end on one core returns
//! to a front end on another core, with core copies. Our back end alternates with dpdk-testpmd's net_vhost or Open
//! vSwitch.
//!
//! ```text
//! lcore                                     other lcore
//! ours:   VhostPort, mac, worker  ──┐
//!         (one forwards, the other  ├── one front end each: sends, receives, checks, counts
//!          rests)                   │
//! theirs: dpdk-testpmd, net_vhost ──┘
//! ```
//! From guest to guest, two sockets and two front ends are used. A single thread drives both: it sends on one and
//! receives on the other.
//!
//! Offload engines are not measured here: a third spinning thread on two cores would measure the scheduler. Windows are
//! paired (ours theirs, theirs ours). Each restart begins with new processes, new memory and new threads, because the
//! placement of memory influences the result more than most changes of the code.

pub(crate) mod back_end;
mod load;
pub(crate) mod paired;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use offcore_flow::Forward;
use offcore_mem::{Hugepages, Pool};
use offcore_stats::{lcore, named};

use crate::guests::guest::{PEER_MAC, PORT_MAC};
use crate::guests::workload::{Ring, Route};
use crate::machine::{self, find_program, free_hugepage_mib};
use crate::peer::about::feature_names;
use crate::peer::ovs;
use crate::peer::tempdir::TempDir;
use crate::peer::testpmd::Memory;
use crate::report::progress::Progress;
use crate::report::row::{AboutPeer, Row};
use crate::vhost::round_trips::{RoundTrips, WINDOW, Way};
use back_end::{BUFFERS, BackEnd, Ours, TheirSwitch, Theirs};
use paired::{Gathered, Schedule, Variant};

/// MiB of hugepages in total: testpmd's memory, our pool and the front ends' buffers.
const HUGEPAGE_MIB: u32 = 384;

named! {
    /// The peer that is compared with our back end.
    pub enum Peer {
        /// dpdk-testpmd with net_vhost.
        Testpmd = "dpdk-testpmd",
        /// Open vSwitch with DPDK, from guest to guest. Both sides are learning switches.
        Ovs = "ovs-dpdk",
    }
}

impl Peer {
    /// Returns the reason why the peer cannot be measured on this machine, with a remedy.
    fn refused(self, route: Route) -> Option<String> {
        match self {
            Self::Testpmd => find_program("dpdk-testpmd").is_none().then(|| {
                "--peer dpdk: there is no dpdk-testpmd: apt-get install dpdk-dev, or leave out --peer".into()
            }),
            Self::Ovs if route == Route::Loop => Some(
                "--peer ovs: a learning switch sends no packet back to its port: use guest-to-guest-e2e"
                    .into(),
            ),
            Self::Ovs => ovs::missing().map(|missing| format!("--peer ovs: {missing}, or leave out --peer")),
        }
    }
}

/// Options of the measurement.
#[derive(Clone, Debug)]
pub struct EndToEndOptions {
    /// Frame lengths, including the FCS.
    pub frames: Vec<usize>,
    pub route: Route,
    pub rings: Vec<Ring>,
    /// Whether our back end copies a payload only once from guest to guest where possible.
    pub one_copy: bool,
    /// Number of restarts for each frame length.
    pub restarts: usize,
    /// Windows of each side between two restarts.
    pub pairs: usize,
    pub window: Duration,
    pub peer: Option<Peer>,
    /// Page size of both back ends and of the front ends.
    pub hugepages: Hugepages,
    pub lcore: usize,
    pub other_lcore: Option<usize>,
}

impl EndToEndOptions {
    /// Returns options for the loop over split virtqueues with the windows that the benchmark's acceptance bars
    /// require: 24 pairs of 0.4 s over 4 restarts. With `quick`, 4 pairs after one start.
    pub fn new(frames: &[usize], quick: bool, lcore: usize, other_lcore: Option<usize>) -> Self {
        let (restarts, pairs) = if quick { (1, 4) } else { (4, 6) };
        Self {
            frames: frames.into(),
            route: Route::Loop,
            rings: vec![Ring::Split],
            one_copy: true,
            restarts,
            pairs,
            window: Duration::from_millis(400),
            peer: None,
            hugepages: Hugepages::Auto,
            lcore,
            other_lcore,
        }
    }
}

/// Measures everything that `options` selects and passes each finished row to `emit`.
///
/// # Errors
/// If two lcores are not available, testpmd or its memory is missing, something cannot be set up, or a packet comes
/// back changed or out of order.
pub fn run(options: &EndToEndOptions, progress: &Progress, emit: &mut dyn FnMut(Row)) -> Result<()> {
    let Some(other_lcore) = options.other_lcore.filter(|&other| other != options.lcore) else {
        bail!("end to end needs two lcores: one for the back end, one for the front end; see --lcores");
    };
    if let Some(refused) = options.peer.and_then(|peer| peer.refused(options.route)) {
        bail!("{refused}");
    }
    let pages = Pages::choose(options)?;
    let pool = Pool::new(BUFFERS as usize, 2048, pages.ours)?;
    progress.begin(options.rings.len() * options.frames.len() * options.restarts * options.pairs);
    let links = options.rings.iter().flat_map(|&ring| {
        let route = options.route;
        options.frames.iter().map(move |&frame| Link { route, ring, frame })
    });
    for link in links {
        let Link { route, ring, frame } = link;
        progress.say(&format!("end to end, {route}, {ring}, {frame} B"));
        let row = std::thread::scope(|scope| {
            let front_end = std::thread::Builder::new().name("bench-front-end".into());
            let thread = front_end.spawn_scoped(scope, || {
                // Pinned first, so that all threads and processes started here stay off the back ends' core unless they
                // belong there.
                lcore::pin(other_lcore)?;
                cell(options, link, pages, pool, progress)
            })?;
            thread.join().map_err(|_| anyhow!("the front end's thread has panicked"))?
        });
        emit(row.with_context(|| format!("{route}, {ring}, {frame} B"))?);
    }
    progress.end();
    Ok(())
}

/// Traffic through a back end: route, virtqueue format and frame length.
#[derive(Clone, Copy, Debug)]
struct Link {
    route: Route,
    ring: Ring,
    frame: usize,
}

impl Link {
    /// Returns the socket path of each guest.
    fn sockets(self, dir: &TempDir, name: &str) -> Vec<PathBuf> {
        (0..self.route.guests()).map(|guest| dir.file(&format!("{name}{guest}"))).collect()
    }
}

/// Page sizes of both sides.
#[derive(Clone, Copy, Debug)]
struct Pages {
    ours: Hugepages,
    theirs: Memory,
}

impl Pages {
    /// Chooses the same page size for both sides.
    fn choose(options: &EndToEndOptions) -> Result<Self> {
        if options.peer.is_none() {
            return Ok(Self { ours: options.hugepages, theirs: Memory::Ordinary });
        }
        let huge = Self { ours: Hugepages::Size2M, theirs: Memory::Hugepages };
        let ordinary = Self { ours: Hugepages::None, theirs: Memory::Ordinary };
        let free = free_hugepage_mib();
        Ok(match options.hugepages {
            Hugepages::Auto if free >= HUGEPAGE_MIB => huge,
            Hugepages::None if options.peer == Some(Peer::Ovs) => {
                bail!(
                    "--peer ovs: Open vSwitch has its packet buffers on 2 MiB pages: leave --hugepages none out"
                )
            }
            Hugepages::Auto if options.peer == Some(Peer::Ovs) => bail!(
                "--peer ovs: Open vSwitch has its packet buffers on 2 MiB pages: {}",
                machine::more_hugepages(HUGEPAGE_MIB)
            ),
            Hugepages::Auto | Hugepages::None => ordinary,
            Hugepages::Size2M if free >= HUGEPAGE_MIB => huge,
            Hugepages::Size2M => bail!("{}", machine::more_hugepages(HUGEPAGE_MIB)),
            Hugepages::Size1G => bail!("both sides get 2 MiB pages or ordinary ones: --hugepages 2M or none"),
        })
    }
}

/// Measures one frame length with one virtqueue format.
fn cell(
    options: &EndToEndOptions,
    link: Link,
    pages: Pages,
    pool: &'static Pool,
    progress: &Progress,
) -> Result<Row> {
    let mut gathered = Gathered::beside(options.peer.map_or("", Peer::name));
    let mut about_peer = AboutPeer::default();
    let schedule = Schedule { pairs: options.pairs, window: options.window };
    for _ in 0..options.restarts {
        let dir = TempDir::new()?;
        let ours = our_variant(&link.sockets(&dir, "ours"), options, link, pages, pool)?;
        let mut theirs = None;
        if let Some(peer) = options.peer {
            let (variant, about) = match peer {
                Peer::Testpmd => their_variant(&link.sockets(&dir, "theirs"), options.lcore, link, pages),
                Peer::Ovs => their_switch(options.lcore, link, pages),
            }
            .context(peer.name())?;
            (theirs, about_peer) = (Some(variant), about);
        }
        gathered.restart(ours, theirs, schedule, progress)?;
    }
    let mut row = Row::new("vhost", link.route.name(), "end-to-end");
    (row.head.frame, row.head.ring, row.head.window) = (link.frame, link.ring.name(), WINDOW);
    row.head.temperature = "remote".into();
    row.ends.forward = Some(if forward(options).is_none() { "l2" } else { "mac" });
    row.ends.about_peer = about_peer;
    gathered.enter(&mut row)?;
    Ok(row)
}

/// Returns our forwarding mode, which equals the peer's; `None` for a learning switch.
fn forward(options: &EndToEndOptions) -> Option<Forward> {
    (options.peer != Some(Peer::Ovs)).then_some(Forward::Mac)
}

fn our_variant(
    sockets: &[PathBuf],
    options: &EndToEndOptions,
    link: Link,
    pages: Pages,
    pool: &'static Pool,
) -> Result<Variant<Ours, RoundTrips>> {
    let forward = forward(options);
    let mut back_end = Ours::start(sockets, options.lcore, pool, forward, options.one_copy)?;
    let way = if forward.is_none() { Way::Switched } else { Way::Rewritten(Some(PORT_MAC)) };
    let mut load = RoundTrips::connect(sockets, link.ring, link.frame, way, pages.ours)?;
    if forward.is_none() {
        load.introduce()?;
    }
    back_end.pause()?;
    Ok(Variant::new(back_end, load))
}

/// A peer's variant and its description.
type TheirVariant = (Variant<Box<dyn BackEnd>, RoundTrips>, AboutPeer);

fn their_variant(sockets: &[PathBuf], lcore: usize, link: Link, pages: Pages) -> Result<TheirVariant> {
    let mut back_end = Theirs::start(sockets, lcore, pages.theirs)?;
    let way = Way::Rewritten(None); // The source address is the port's own, which testpmd generates.
    let load = RoundTrips::connect(sockets, link.ring, link.frame, way, pages.ours)?;
    back_end.wait_ready()?;
    let about = about(AboutPeer::process(back_end.id())?, &load, pages);
    Ok((Variant::new(Box::new(back_end), load), about))
}

fn their_switch(lcore: usize, link: Link, pages: Pages) -> Result<TheirVariant> {
    let mut back_end = TheirSwitch::start(lcore)?;
    let sockets = back_end.ovs.sockets();
    let mut load = RoundTrips::connect(&sockets, link.ring, link.frame, Way::Switched, pages.ours)?;
    back_end.ovs.wait_ready()?;
    load.introduce()?;
    back_end.ovs.wait_learned(&PEER_MAC.to_string())?;
    let mut about = about(AboutPeer::process(back_end.ovs.id())?, &load, pages);
    let dpdk = about.peer_version.unwrap_or_else(|| "DPDK".into());
    about.peer_version = Some(format!("{}, {dpdk}", back_end.ovs.version()?));
    back_end.pause()?;
    Ok((Variant::new(Box::new(back_end), load), about))
}

fn about(process: AboutPeer, load: &RoundTrips, pages: Pages) -> AboutPeer {
    let huge = pages.theirs == Memory::Hugepages;
    AboutPeer {
        peer_features: Some(feature_names(load.features())),
        peer_page_bytes: Some(if huge { 2 << 20 } else { rustix::param::page_size() as u64 }),
        ..process
    }
}

#[cfg(test)]
pub(crate) mod tests;

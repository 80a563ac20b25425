//! The `end-to-end` arrangement of `offcore bench vhost`: packets a second that a back end on one core returns to a
//! front end on another, the core copying; ours beside dpdk-testpmd's net_vhost.
//!
//! ```text
//! lcore                                     other lcore
//! ours:   VhostPort, mac, worker  ──┐
//!         (one forwards, the other  ├── one front end each: sends, receives, checks, counts
//!          rests)                   │
//! theirs: dpdk-testpmd, net_vhost ──┘
//! ```
//! From guest to guest it is two sockets and two front ends, driven by the same thread: it sends on the one and receives
//! on the other.
//!
//! Without an offload engine only: a third spinning thread on two cores would measure the scheduler. Windows are paired
//! (ours theirs, theirs ours) and each restart begins with new processes, new memory and new threads, since where
//! memory happens to be decides more than most changes of code.

pub(crate) mod back_end;
mod load;
pub(crate) mod paired;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use offcore_flow::Forward;
use offcore_mem::{Hugepages, Pool};
use offcore_stats::lcore;

use crate::guest::PORT_MAC;
use crate::peer::machine::{find_program, free_hugepage_mib};
use crate::peer::tempdir::TempDir;
use crate::peer::testpmd::Memory;
use crate::progress::Progress;
use crate::row::Row;
use crate::workload::{Ring, Route};
use back_end::{BUFFERS, BURST, Ours, Theirs};
use load::{RoundTrips, WINDOW};
use paired::{BackEnd, Gathered, Lane, Schedule};

/// Frame lengths of a quick run.
pub const QUICK_FRAMES: [usize; 3] = [64, 512, 1518];

/// MiB of hugepages for everything: testpmd's memory, our pool, the front ends' buffers.
const HUGEPAGE_MIB: u32 = 384;

/// What to measure.
#[derive(Clone, Debug)]
pub struct EndToEndOptions {
    /// Frame lengths, FCS included.
    pub frames: Vec<usize>,
    /// From whom to whom packets go.
    pub route: Route,
    /// Formats of virtqueues.
    pub rings: Vec<Ring>,
    /// Whether ours copies a payload from guest to guest once, where it can.
    pub one_copy: bool,
    /// How often everything is started anew, for each frame length.
    pub restarts: usize,
    /// Windows of each side between two restarts.
    pub pairs: usize,
    /// Length of a window.
    pub window: Duration,
    /// Whether dpdk-testpmd is measured beside.
    pub testpmd: bool,
    /// Pages of both back ends and of the front ends.
    pub hugepages: Hugepages,
    /// The back ends' core.
    pub lcore: usize,
    /// The front ends' core.
    pub other_lcore: Option<usize>,
}

impl EndToEndOptions {
    /// The loop over split virtqueues, windows as the bars ask for them: 24 pairs of 0.4 s over 4 restarts; with `quick` 4
    /// pairs after one start.
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
            testpmd: false,
            hugepages: Hugepages::Auto,
            lcore,
            other_lcore,
        }
    }
}

/// Measures everything that `options` asks for; `emit` gets each row as it is ready.
///
/// # Errors
/// When there are not two lcores, testpmd or the memory for it is missing, something cannot be set up, or a packet
/// comes back changed or out of order.
pub fn run(options: &EndToEndOptions, progress: &Progress, emit: &mut dyn FnMut(Row)) -> Result<()> {
    let Some(other_lcore) = options.other_lcore.filter(|&other| other != options.lcore) else {
        bail!("end to end needs two lcores: one for the back end, one for the front end; see --lcores");
    };
    if options.testpmd && find_program("dpdk-testpmd").is_none() {
        bail!("--peer dpdk: there is no dpdk-testpmd: apt-get install dpdk-dev, or leave out --peer");
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
                // First of all, so that what is started here stays off the back ends' core unless it belongs there.
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

/// What goes through a back end: from whom to whom, over which virtqueues, how long.
#[derive(Clone, Copy, Debug)]
struct Link {
    route: Route,
    ring: Ring,
    frame: usize,
}

impl Link {
    /// A socket for each guest.
    fn sockets(self, dir: &TempDir, name: &str) -> Vec<PathBuf> {
        (0..self.route.guests()).map(|guest| dir.file(&format!("{name}{guest}"))).collect()
    }
}

/// The pages of both sides.
#[derive(Clone, Copy, Debug)]
struct Pages {
    ours: Hugepages,
    theirs: Memory,
}

impl Pages {
    /// The same pages for everybody.
    fn choose(options: &EndToEndOptions) -> Result<Self> {
        if !options.testpmd {
            return Ok(Self { ours: options.hugepages, theirs: Memory::Ordinary });
        }
        let huge = Self { ours: Hugepages::Size2M, theirs: Memory::Hugepages };
        let ordinary = Self { ours: Hugepages::None, theirs: Memory::Ordinary };
        let free = free_hugepage_mib();
        Ok(match options.hugepages {
            Hugepages::Auto if free >= HUGEPAGE_MIB => huge,
            Hugepages::Auto | Hugepages::None => ordinary,
            Hugepages::Size2M if free >= HUGEPAGE_MIB => huge,
            Hugepages::Size2M => bail!(
                "{free} MiB of free 2 MiB pages; {HUGEPAGE_MIB} needed for both sides: sysctl -w vm.nr_hugepages={}",
                HUGEPAGE_MIB / 2
            ),
            Hugepages::Size1G => bail!("both sides get 2 MiB pages or ordinary ones: --hugepages 2M or none"),
        })
    }
}

/// Measures one frame length over one format.
fn cell(
    options: &EndToEndOptions,
    link: Link,
    pages: Pages,
    pool: &'static Pool,
    progress: &Progress,
) -> Result<Row> {
    let mut gathered = Gathered::default();
    let schedule = Schedule { pairs: options.pairs, window: options.window };
    for _ in 0..options.restarts {
        let dir = TempDir::new()?;
        let ours = our_lane(&link.sockets(&dir, "ours"), options, link, pages, pool)?;
        let theirs = match options.testpmd {
            true => Some(their_lane(&link.sockets(&dir, "theirs"), options.lcore, link, pages)?),
            false => None,
        };
        gathered.restart(ours, theirs, schedule, progress)?;
    }
    let mut row = Row {
        bench: "vhost",
        case: link.route.name().into(),
        frame: link.frame,
        mode: "cpu".into(),
        engine: "cpu".into(),
        ring: link.ring.name(),
        burst: BURST,
        temperature: "remote".into(),
        window: WINDOW,
        ..Row::default()
    };
    gathered.enter(&mut row)?;
    Ok(row)
}

fn our_lane(
    sockets: &[PathBuf],
    options: &EndToEndOptions,
    link: Link,
    pages: Pages,
    pool: &'static Pool,
) -> Result<Lane<Ours, RoundTrips>> {
    let mut back_end = Ours::start(sockets, options.lcore, pool, (Forward::Mac, options.one_copy))?;
    let load = RoundTrips::connect(sockets, link.ring, link.frame, Some(PORT_MAC), pages.ours)?;
    back_end.pause()?;
    Ok(Lane::new(back_end, load))
}

fn their_lane(
    sockets: &[PathBuf],
    lcore: usize,
    link: Link,
    pages: Pages,
) -> Result<Lane<Theirs, RoundTrips>> {
    let mut back_end = Theirs::start(sockets, lcore, pages.theirs)?;
    // The address that testpmd writes is its port's own, which it makes up.
    let load =
        RoundTrips::connect(sockets, link.ring, link.frame, None, pages.ours).context("dpdk-testpmd")?;
    back_end.wait_ready()?;
    Ok(Lane::new(back_end, load))
}

#[cfg(test)]
mod tests;

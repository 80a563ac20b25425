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

mod back_end;
mod load;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use offcore_flow::Forward;
use offcore_mem::{Hugepages, Pool};
use offcore_stats::{lcore, tsc};

use crate::guest::PORT_MAC;
use crate::peer::machine::{find_program, free_hugepage_mib};
use crate::peer::tempdir::TempDir;
use crate::peer::testpmd::Memory;
use crate::progress::Progress;
use crate::row::Row;
use crate::sample::{Spread, paired_ratio};
use crate::workload::{Ring, Route};
use back_end::{BUFFERS, BURST, BackEnd, Ours, Theirs};
use load::{Load, WINDOW, Window};

/// Frame lengths of a quick run.
pub const QUICK_FRAMES: [usize; 3] = [64, 512, 1518];

/// A window is not counted before it has run for so long.
const SETTLE: Duration = Duration::from_millis(50);
/// Pairs are rejected when the core's clock changes: for so long at most, until one counts.
const PATIENCE: Duration = Duration::from_secs(30);
/// A front end that is busy for a larger part of the time is what was measured.
const FE_BOUND: f64 = 0.9;
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

/// A back end and its front end.
struct Lane<B> {
    // The back end goes first: a front end that goes is waited for by a worker at rest.
    back_end: B,
    load: Load,
    /// Million packets a second of each window that counts.
    mpps: Vec<f64>,
    /// Ticks a packet that the back end itself has counted, by restart.
    cycles: Vec<f64>,
    fe_busy: Vec<f64>,
}

impl<B: BackEnd> Lane<B> {
    fn new(back_end: B, load: Load) -> Self {
        Self { back_end, load, mpps: Vec::new(), cycles: Vec::new(), fe_busy: Vec::new() }
    }

    fn window(&mut self, length: Duration) -> Result<Window> {
        self.back_end.resume()?;
        let window = self.load.window(SETTLE, length)?;
        self.back_end.pause()?;
        Ok(window)
    }

    fn keep(&mut self, window: Window) {
        self.mpps.push(window.mpps());
        self.fe_busy.push(window.busy_share());
    }

    /// One more window, whose rate does not count: counting cycles takes some.
    fn cycles(&mut self, length: Duration) -> Result<()> {
        self.back_end.count_cycles(true)?;
        self.back_end.resume()?;
        self.load.window(SETTLE, length)?;
        let cycles = self.back_end.pause()?;
        self.cycles.extend(cycles);
        self.back_end.count_cycles(false)
    }
}

/// What a cell has gathered over its restarts.
#[derive(Debug, Default)]
struct Gathered {
    ours: Vec<f64>,
    theirs: Vec<f64>,
    our_cycles: Vec<f64>,
    their_cycles: Vec<f64>,
    fe_busy: Vec<f64>,
    their_fe_busy: Vec<f64>,
    received: u64,
    verified: u64,
    lost: u64,
    rejected: usize,
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
    for _ in 0..options.restarts {
        gathered.restart(options, link, pages, pool, progress)?;
    }
    gathered.row(link)
}

impl Gathered {
    fn restart(
        &mut self,
        options: &EndToEndOptions,
        link: Link,
        pages: Pages,
        pool: &'static Pool,
        progress: &Progress,
    ) -> Result<()> {
        let dir = TempDir::new()?;
        let mut ours = our_lane(&link.sockets(&dir, "ours"), options, link, pages, pool)?;
        let mut theirs = match options.testpmd {
            true => Some(their_lane(&link.sockets(&dir, "theirs"), options.lcore, link, pages)?),
            false => None,
        };
        let (mut counted, mut since) = (0, Instant::now());
        while counted < options.pairs {
            ensure!(since.elapsed() < PATIENCE, "the clock of lcore {} never holds still", options.lcore);
            let before = ours.back_end.clock_holds()?;
            let theirs_first = counted % 2 == 1;
            let their_window = |theirs: &mut Option<Lane<Theirs>>| {
                theirs.as_mut().map(|lane| lane.window(options.window).context("dpdk-testpmd")).transpose()
            };
            let early = if theirs_first { their_window(&mut theirs)? } else { None };
            let our_window = ours.window(options.window)?;
            let late = if theirs_first { None } else { their_window(&mut theirs)? };
            if !(before && ours.back_end.clock_holds()?) {
                self.rejected += 1;
                continue;
            }
            ours.keep(our_window);
            if let (Some(lane), Some(window)) = (&mut theirs, early.or(late)) {
                lane.keep(window);
            }
            (counted, since) = (counted + 1, Instant::now());
            progress.step();
        }
        ours.cycles(options.window / 2)?;
        if let Some(lane) = &mut theirs {
            lane.cycles(options.window / 2).context("dpdk-testpmd")?;
            ensure!(lane.load.lost() == 0, "dpdk-testpmd has lost {} packets", lane.load.lost());
            self.theirs.append(&mut lane.mpps);
            self.their_cycles.append(&mut lane.cycles);
            self.their_fe_busy.append(&mut lane.fe_busy);
        }
        let seen = ours.load.seen();
        self.received += seen.received;
        self.verified += seen.verified;
        self.lost += ours.load.lost();
        self.ours.append(&mut ours.mpps);
        self.our_cycles.append(&mut ours.cycles);
        self.fe_busy.append(&mut ours.fe_busy);
        Ok(())
    }

    fn row(&self, link: Link) -> Result<Row> {
        ensure!(
            !self.ours.is_empty(),
            "no window was measured: at least one restart and one pair are needed"
        );
        let median = |samples: &[f64]| (!samples.is_empty()).then(|| Spread::of(samples).median);
        let fe_busy = [&self.fe_busy, &self.their_fe_busy].into_iter().filter_map(|busy| median(busy));
        let mut row = Row {
            bench: "vhost",
            case: link.route.name().into(),
            arrangement: "end-to-end",
            frame: link.frame,
            mode: "cpu".into(),
            engine: "cpu".into(),
            ring: link.ring.name(),
            burst: BURST,
            temperature: "remote".into(),
            window: WINDOW,
            received: self.received,
            verified: self.verified,
            lost: self.lost,
            rejected: self.rejected,
            busy_cycles_per_packet: median(&self.our_cycles),
            // Of either side: a peer that waits for its front end looks slower than it is.
            fe_bound: Some(fe_busy.fold(0.0, f64::max) > FE_BOUND),
            ..Row::default()
        };
        row.set_rate(Spread::of(&self.ours), tsc::hz());
        if !self.theirs.is_empty() {
            let pairs: Vec<_> = self.ours.iter().copied().zip(self.theirs.iter().copied()).collect();
            let ratio = paired_ratio(&pairs);
            row.peer = Some("dpdk-testpmd".into());
            row.peer_median = median(&self.theirs);
            row.peer_ratio = ratio.map(|ratio| ratio.median);
            row.peer_ratio_lower = ratio.map(|ratio| ratio.lower);
            row.peer_cycles_per_packet = median(&self.their_cycles);
        }
        Ok(row)
    }
}

fn our_lane(
    sockets: &[PathBuf],
    options: &EndToEndOptions,
    link: Link,
    pages: Pages,
    pool: &'static Pool,
) -> Result<Lane<Ours>> {
    let mut back_end = Ours::start(sockets, options.lcore, pool, (Forward::Mac, options.one_copy))?;
    let load = Load::connect(sockets, link.ring, link.frame, Some(PORT_MAC), pages.ours)?;
    back_end.pause()?;
    Ok(Lane::new(back_end, load))
}

fn their_lane(sockets: &[PathBuf], lcore: usize, link: Link, pages: Pages) -> Result<Lane<Theirs>> {
    let mut back_end = Theirs::start(sockets, lcore, pages.theirs)?;
    // The address that testpmd writes is its port's own, which it makes up.
    let load = Load::connect(sockets, link.ring, link.frame, None, pages.ours).context("dpdk-testpmd")?;
    back_end.wait_ready()?;
    Ok(Lane::new(back_end, load))
}

#[cfg(test)]
mod tests;

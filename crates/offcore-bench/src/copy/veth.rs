//! The `end-to-end` arrangement of `offcore bench copy`: packets a second of a port over a veth pair, ours beside
//! dpdk-testpmd's poll-mode driver for the same kind of socket.
//!
//! ```text
//! lcore                                           other lcore
//! ours:   af_xdp or af_packet, worker ── veth ──┐
//!         (one works, the other rests)          ├── the kernel sends frames, and counts those that arrive
//! theirs: dpdk-testpmd ───────────────── veth ──┘
//! ```
//! Each side has a pair of its own, made alike in the same two network namespaces, since an interface has one XDP program
//! and one socket a queue. Who is measured does nothing that this lcore does not see: what it sends is received on its own
//! core, as far as a socket that is not there; what it receives was sent, and put into its ring, on the other core.
//!
//! * `txonly`: packets that the interface at the far end counts; before anything is timed, some thousand are looked at.
//! * `rxonly`: packets that the back end has received of those that the kernel sends as fast as it can.
//! * `forward`: packets that come back with their addresses swapped (`macswap`, to the port that they came from), of
//!   those that the kernel sends as fast as it can. Before anything is timed, some thousand are sent a few at a time, and
//!   each is checked when it is back.
//!
//! Where a back end took nearly all of what was sent, the sender was the limit: `fe_bound`.

mod device;
mod load;

use std::fmt;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use offcore_mem::{Hugepages, Pool};
use offcore_stats::{lcore, named};
use offcore_wire::ethernet::FCS_LEN;

use crate::BURST;
use crate::peer::netns::{self, Netns};
use crate::report::progress::Progress;
use crate::report::row::Row;
use crate::vhost::end_to_end::back_end::{BUFFERS, Ours};
use crate::vhost::end_to_end::paired::{Gathered, Schedule, Variant};
use device::Theirs;
use load::FarEnd;

/// Frame lengths that are measured where nothing else is said: what costs most a packet, and most a byte.
pub const FRAMES: [usize; 2] = [64, 1518];
/// The largest frame of an interface with an MTU of 1500, FCS included.
const LARGEST: usize = 1518;

named! {
    /// A kind of port.
    pub enum PortKind {
        /// XDP sockets, in copy mode: veth has no other.
        AfXdp = "af_xdp",
        /// Packet sockets with rings.
        AfPacket = "af_packet",
    }
}

named! {
    /// Which way packets go, seen from the back end.
    pub enum Direction {
        /// It sends.
        Txonly = "txonly",
        /// It receives.
        Rxonly = "rxonly",
        /// It sends back what it receives.
        Forward = "forward",
    }
}

/// What to measure.
#[derive(Clone, Debug)]
pub struct VethOptions {
    /// Frame lengths, FCS included.
    pub frames: Vec<usize>,
    pub ports: Vec<PortKind>,
    /// Which way packets go.
    pub directions: Vec<Direction>,
    /// How often everything is started anew, for each cell.
    pub restarts: usize,
    /// Windows of each side between two restarts.
    pub pairs: usize,
    pub window: Duration,
    /// Whether dpdk-testpmd is measured beside.
    pub testpmd: bool,
    /// Pages of our packet buffers.
    pub hugepages: Hugepages,
    /// The back ends' core.
    pub lcore: usize,
    /// The core of whoever sends to them.
    pub other_lcore: Option<usize>,
}

impl VethOptions {
    /// Windows as the bars ask for them: 24 pairs of 0.4 s over 4 restarts; with `quick` 4 pairs after one start.
    pub fn new(frames: &[usize], quick: bool, lcore: usize, other_lcore: Option<usize>) -> Self {
        let (restarts, pairs) = if quick { (1, 4) } else { (4, 6) };
        Self {
            frames: frames.into(),
            ports: PortKind::ALL.into(),
            directions: Direction::ALL.into(),
            restarts,
            pairs,
            window: Duration::from_millis(400),
            testpmd: false,
            hugepages: Hugepages::Auto,
            lcore,
            other_lcore,
        }
    }

    /// What this machine lacks for it, if anything.
    pub fn missing(&self) -> Option<String> {
        let testpmd = [("dpdk-testpmd", "dpdk-dev")];
        netns::missing((self.lcore, self.other_lcore), if self.testpmd { &testpmd } else { &[] })
    }
}

/// A cell of the measurement.
#[derive(Clone, Copy, Debug)]
struct Cell {
    port: PortKind,
    direction: Direction,
    frame: usize,
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { port, direction, frame } = self;
        write!(f, "{port}, {direction}, {frame} B")
    }
}

/// Measures everything that `options` asks for; `emit` gets each row as it is ready.
///
/// # Errors
/// When something is missing ([`VethOptions::missing`]) or cannot be set up, or a packet comes back changed or out of
/// order.
pub fn run(options: &VethOptions, progress: &Progress, emit: &mut dyn FnMut(Row)) -> Result<()> {
    if let Some(missing) = options.missing() {
        bail!("end to end over veth: {missing}");
    }
    Netns::sweep()?;
    let pool = Pool::new(BUFFERS as usize, 2048, options.hugepages)?;
    let cells = options.ports.iter().flat_map(|&port| {
        options.directions.iter().flat_map(move |&direction| {
            options.frames.iter().map(move |&frame| Cell { port, direction, frame })
        })
    });
    let cells: Vec<_> = cells.collect();
    progress.begin(cells.len() * options.restarts * options.pairs);
    for cell in cells {
        progress.say(&format!("veth, {cell}"));
        emit(cell.measure(options, pool, progress).with_context(|| cell.to_string())?);
    }
    progress.end();
    Ok(())
}

impl Cell {
    fn measure(self, options: &VethOptions, pool: &'static Pool, progress: &Progress) -> Result<Row> {
        ensure!(
            self.frame <= LARGEST,
            "the MTU of a veth interface is 1500: at most {LARGEST} bytes a frame"
        );
        let other_lcore = options.other_lcore.context("end to end needs two lcores")?;
        let mut gathered = Gathered::beside("dpdk-testpmd");
        let schedule = Schedule { pairs: options.pairs, window: options.window };
        for _ in 0..options.restarts {
            let (device, far) = (Netns::new()?, Netns::new()?);
            let ours = Pair::new("ours", &device, &far)?;
            let theirs = options.testpmd.then(|| Pair::new("theirs", &device, &far)).transpose()?;
            far.within(|| {
                lcore::pin(other_lcore)?;
                let ours = self.our_variant(&ours, &device, options, pool)?;
                let theirs = theirs.map(|pair| self.their_variant(&pair, &device, options)).transpose()?;
                gathered.restart(ours, theirs, schedule, progress)
            })?;
        }
        let mut row = Row {
            bench: "copy",
            case: self.direction.name().into(),
            port: Some(self.port.name()),
            frame: self.frame,
            mode: "cpu".into(),
            engine: "cpu".into(),
            ring: "none",
            burst: BURST,
            temperature: "remote".into(),
            ..Row::default()
        };
        gathered.enter(&mut row)?;
        Ok(row)
    }

    /// Length of a frame without FCS.
    fn frame_len(self) -> usize {
        self.frame - FCS_LEN
    }

    fn our_variant(
        self,
        pair: &Pair,
        device: &Netns,
        options: &VethOptions,
        pool: &'static Pool,
    ) -> Result<Variant<Ours, FarEnd>> {
        let back_end = device::ours(self, &pair.near, device, options.lcore, pool)?;
        Ok(Variant::new(back_end, FarEnd::new(self, &pair.far)?))
    }

    fn their_variant(
        self,
        pair: &Pair,
        device: &Netns,
        options: &VethOptions,
    ) -> Result<Variant<Theirs, FarEnd>> {
        let back_end = Theirs::start(self, &pair.near, device, options.lcore).context("dpdk-testpmd")?;
        Ok(Variant::new(back_end, FarEnd::new(self, &pair.far)?))
    }
}

/// A veth pair.
#[derive(Debug)]
struct Pair {
    /// The interface of the back end's port.
    near: String,
    /// The other one, in the namespace of whoever sends and counts.
    far: String,
}

impl Pair {
    fn new(name: &str, device: &Netns, far: &Netns) -> Result<Self> {
        let pair = Self { near: format!("{name}0"), far: format!("{name}1") };
        device.veth(&pair.near, far, &pair.far)?;
        for (netns, interface) in [(device, &pair.near), (far, &pair.far)] {
            // Nothing of the kernel's own on the wire.
            netns.ip(&["link", "set", interface, "addrgenmode", "none"])?;
            netns.ip(&["link", "set", interface, "up"])?;
        }
        // What arrives there is received in a NAPI loop whether there is an XDP program or not: so the kernel can send to
        // it without a socket buffer for each frame.
        device.run("ethtool", &["-K", &pair.near, "gro", "on"])?;
        Ok(pair)
    }
}

#[cfg(test)]
mod tests;

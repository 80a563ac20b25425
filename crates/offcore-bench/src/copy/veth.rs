//! The `end-to-end` arrangement of `offcore bench copy`: measures the packet rate of a port over a veth pair, compared
//! with dpdk-testpmd's poll-mode driver for the same type of socket.
//!
//! ```text
//! lcore                                           other lcore
//! ours:   af_xdp or af_packet, worker ── veth ──┐
//!         (one works, the other rests)          ├── the kernel sends frames, and counts those that arrive
//! theirs: dpdk-testpmd ───────────────── veth ──┘
//! ```
//! Each side has its own veth pair, configured identically in the same two network namespaces, because an interface has
//! one XDP program and one socket per queue. No work of the measured side is hidden on the other core: the kernel
//! receives its sent packets on the measured core, up to the lookup of a socket that does not exist. The packets that
//! it receives were sent, and put into its ring, on the other core.
//!
//! - `txonly`: packets that the interface at the far end counts. Before the timed part, several thousand are checked.
//! - `rxonly`: packets that the back end receives while the kernel sends as fast as it can.
//! - `forward`: packets that come back with swapped addresses (`macswap`, to the port on which they arrived) while the
//!   kernel sends as fast as it can. Before the timed part, several thousand are sent a few at a time, and each
//!   returned packet is checked.
//!
//! If a back end received nearly all sent packets, the sender was the bottleneck: `fe_bound`.

mod device;
mod load;

use std::fmt;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use offcore_mem::{Hugepages, Pool};
use offcore_stats::{lcore, named};
use offcore_wire::ethernet::FCS_LEN;

use crate::peer::netns::{self, Netns};
use crate::report::progress::Progress;
use crate::report::row::Row;
use crate::vhost::end_to_end::back_end::{BUFFERS, Ours};
use crate::vhost::end_to_end::paired::{Gathered, Schedule, Variant};
use device::Theirs;
use load::FarEnd;

/// Default frame lengths: the most expensive ones per packet and per byte.
pub const FRAMES: [usize; 2] = [64, 1518];
/// The maximum frame length of an interface with an MTU of 1500, including the FCS.
const LARGEST: usize = 1518;

named! {
    /// A port type.
    pub enum PortKind {
        /// XDP sockets in copy mode, the only mode of veth.
        AfXdp = "af_xdp",
        /// Packet sockets with rings.
        AfPacket = "af_packet",
    }
}

named! {
    /// Direction of the packets, as seen from the back end.
    pub enum Direction {
        /// The back end sends.
        Txonly = "txonly",
        /// The back end receives.
        Rxonly = "rxonly",
        /// The back end returns received packets.
        Forward = "forward",
    }
}

/// Options of the measurement.
#[derive(Clone, Debug)]
pub struct VethOptions {
    /// Frame lengths, including the FCS.
    pub frames: Vec<usize>,
    pub ports: Vec<PortKind>,
    /// Directions of the packets.
    pub directions: Vec<Direction>,
    /// Number of restarts for each cell.
    pub restarts: usize,
    /// Windows of each side between two restarts.
    pub pairs: usize,
    pub window: Duration,
    /// Whether to measure dpdk-testpmd as a peer.
    pub testpmd: bool,
    /// Page size of our packet buffers.
    pub hugepages: Hugepages,
    /// The back ends' core.
    pub lcore: usize,
    /// The core of the sender.
    pub other_lcore: Option<usize>,
}

impl VethOptions {
    /// Returns options with the windows that the benchmark's acceptance bars require: 24 pairs of 0.4 s over 4
    /// restarts. With `quick`, 4 pairs after one start.
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

    /// Returns a missing requirement of this machine, if any.
    pub fn missing(&self) -> Option<String> {
        let testpmd = [("dpdk-testpmd", "dpdk-dev")];
        netns::missing(self.lcore, self.other_lcore, if self.testpmd { &testpmd } else { &[] })
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

/// Measures everything that `options` selects and passes each finished row to `emit`.
///
/// # Errors
/// If something is missing ([`VethOptions::missing`]) or cannot be set up, or a packet comes back changed or out of
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
        let mut row = Row::new("copy", self.direction, "end-to-end");
        (row.head.port, row.head.frame) = (Some(self.port.name()), self.frame);
        row.head.temperature = "remote".into();
        gathered.enter(&mut row)?;
        Ok(row)
    }

    /// Returns the frame length without FCS.
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
    /// The other interface, in the namespace of the sender.
    far: String,
}

impl Pair {
    fn new(name: &str, device: &Netns, far: &Netns) -> Result<Self> {
        let pair = Self { near: format!("{name}0"), far: format!("{name}1") };
        device.veth(&pair.near, far, &pair.far)?;
        for (netns, interface) in [(device, &pair.near), (far, &pair.far)] {
            // The kernel must not send packets by itself.
            netns.ip(&["link", "set", interface, "addrgenmode", "none"])?;
            netns.ip(&["link", "set", interface, "up"])?;
        }
        // With GRO, packets that arrive there are received in a NAPI loop even without an XDP program. The kernel can
        // then send to the interface without a socket buffer for each frame.
        device.run("ethtool", &["-K", &pair.near, "gro", "on"])?;
        Ok(pair)
    }
}

#[cfg(test)]
mod tests;

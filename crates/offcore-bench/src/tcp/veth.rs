//! The `end-to-end` arrangement of `offcore bench tcp`: measures a stream over a veth pair between our host and the
//! kernel's TCP, compared with the same stream between two kernels.
//!
//! ```text
//! lcore                                             other lcore
//! ours:   af_packet or af_xdp, host ──── veth ──┐
//!         (one works, the other rests)          ├── the kernel's TCP: reads or writes, in a namespace of its own
//! theirs: the kernel's TCP ───────────── veth ──┘
//! ```
//! Each side has its own veth pair, configured identically, with the same offloads on both ends. Every window is a new
//! connection with a run-in time of a tenth of a second. The reader compares every byte. The kernel passes its packets
//! over a veth pair by reference, whereas our port copies each packet out of the kernel or into it. The result is
//! therefore reported without an acceptance bar.
//!
//! The cost of a byte is the time of both cores together: over veth, the kernel processes received packets on the
//! transmitting core, so that neither core alone shows the cost of its end. For the kernel and for the far end, the
//! busy time of a core is taken from `/proc/stat`. For our worker, which polls, it is the time of all stages of the
//! stage clock except idle.

mod far;
mod hosts;
mod stream;

use std::fmt;
use std::time::Duration;

use anyhow::{Context, Result};
use offcore_mem::Pool;
use offcore_stats::{named, tsc};

use super::kernel::{KernelOptions, alternate, connect};
use super::link::Side;
use super::{BUFFER, BUFFERS, HEADERS, SEGMENT};
use crate::peer::netns::Netns;
use crate::report::progress::Progress;
use crate::report::row::{CostPerKib, Counts, PeerRatio, Row};
use crate::report::sample::{Bounds, Spread};
pub(super) use far::Far;
pub(super) use hosts::Host;
use hosts::{Kernel, Near};
use stream::SETTLE;

/// Length of a window.
const WINDOW: Duration = Duration::from_millis(400);
/// Time between windows.
const DRAIN: Duration = Duration::from_millis(20);
/// If the far end's core is busy for a larger share of the time, it is the bottleneck.
pub(super) const FAR_BOUND: f64 = 0.9;

named! {
    /// The port of our host.
    pub enum Under {
        /// Packet sockets with rings. Ports and kernel use segmentation and checksum offloads.
        AfPacketOffloads = "af_packet, offloads",
        /// The same without offloads: each segment is a packet with a complete checksum.
        AfPacket = "af_packet",
        /// XDP sockets, which have no offloads.
        AfXdp = "af_xdp",
    }
}

impl Under {
    const fn offloads(self) -> bool {
        matches!(self, Self::AfPacketOffloads)
    }

    /// Returns the port type as named in rows.
    const fn port(self) -> &'static str {
        match self {
            Self::AfPacketOffloads | Self::AfPacket => "af_packet",
            Self::AfXdp => "af_xdp",
        }
    }
}

/// Returns the number of pairs of windows of a cell. A pair consists of a window with our stack and a window with the
/// kernel's stack.
const fn pairs(quick: bool) -> usize {
    if quick { 4 } else { 24 }
}

/// Measures everything that `options` selects and passes each finished row to `emit`.
///
/// # Errors
/// If a requirement is missing or something cannot be set up, or a byte is lost or changed.
pub fn run(options: &KernelOptions, progress: &Progress, emit: &mut dyn FnMut(Row)) -> Result<()> {
    let other_lcore = options.start("end to end over veth", &[], || None)?;
    let pool = Pool::new(BUFFERS, BUFFER, options.hugepages)?;
    let cells =
        Under::ALL.iter().flat_map(|&under| options.sides.iter().map(move |&side| Cell { side, under }));
    let cells: Vec<_> = cells.collect();
    progress.begin(cells.len() * pairs(options.quick));
    for cell in cells {
        progress.say(&format!("tcp over veth, {cell}"));
        emit(cell.measure(options, other_lcore, pool, progress).with_context(|| cell.to_string())?);
    }
    progress.end();
    Ok(())
}

/// A cell of the measurement.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cell {
    pub(super) side: Side,
    pub(super) under: Under,
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", self.side, self.under)
    }
}

/// Result of a window.
#[derive(Clone, Copy, Debug)]
pub(super) struct Window {
    bytes: u64,
    /// Duration in ticks, and the share of it in which the host's core and the other end's core were busy or our worker
    /// had work.
    ticks: u64,
    busy: f64,
    far_busy: f64,
}

impl Window {
    /// Returns million full-length segments per second.
    fn mpps(&self) -> f64 {
        self.bytes as f64 / SEGMENT as f64 * 1e3 / tsc::to_ns(self.ticks)
    }

    /// Returns the nanoseconds of the host's core per 1024 bytes.
    fn cost(&self) -> f64 {
        self.busy * self.ns_per_kib()
    }

    /// Returns the nanoseconds of the other end's core per 1024 bytes.
    fn far_cost(&self) -> f64 {
        self.far_busy * self.ns_per_kib()
    }

    /// Returns the nanoseconds of both cores per 1024 bytes.
    fn both_cost(&self) -> f64 {
        self.cost() + self.far_cost()
    }

    fn ns_per_kib(&self) -> f64 {
        tsc::to_ns(self.ticks) / (self.bytes.max(1) as f64 / 1024.0)
    }
}

impl Cell {
    fn measure(
        self,
        options: &KernelOptions,
        lcore: usize,
        pool: &'static Pool,
        progress: &Progress,
    ) -> Result<Row> {
        let (near, far) = (Netns::new()?, Netns::new()?);
        let [interface, _] = connect([&near, &near], None, &far, self.under.offloads(), "cubic")?;
        let (side, near_lcore) = (self.side, options.lcore);
        let far = Far { netns: &far, side, near_lcore, lcore, settle: SETTLE, drain: DRAIN };
        let lengths = [WINDOW, WINDOW];
        let ours = Host::open(self, &near, &interface, pool)?;
        let windows = self.windows(ours, &near, far, lengths, pairs(options.quick), progress)?;
        Ok(self.row(&windows))
    }

    /// Measures pairs of windows, after a warm-up of each near end with duplicate address detection and neighbour
    /// discovery. `lengths` are the length of the warm-up and the length of a window.
    pub(super) fn windows(
        self,
        mut ours: Host,
        near: &Netns,
        far: Far<'_>,
        [warm_up, length]: [Duration; 2],
        pairs: usize,
        progress: &Progress,
    ) -> Result<[Vec<Window>; 2]> {
        let mut theirs = Kernel::listen(self.side, near)?;
        let mut ends: [&mut dyn Near; 2] = [&mut ours, &mut theirs];
        for end in &mut ends {
            far.window(&mut **end, warm_up)?;
        }
        alternate(pairs, progress, |turn| far.window(&mut *ends[turn], length))
    }

    pub(super) fn row(self, [ours, theirs]: &[Vec<Window>; 2]) -> Row {
        let rates = [ours, theirs].map(|windows| windows.iter().map(Window::mpps).collect::<Vec<_>>());
        let [our_rates, their_rates] = &rates;
        let mut row = compare_with_kernel(self.side, "mpps", [our_rates, their_rates]);
        (row.head.port, row.tcp.offloads) = (Some(self.under.port()), Some(self.under.offloads()));
        (row.head.frame, row.head.temperature) = (SEGMENT + HEADERS, "remote".into());
        row.tcp.connections = Some(1);
        row.set_rate(Spread::of(our_rates), tsc::hz());
        row.tcp.payload.payload_gbps = Some(row.figures.mpps * SEGMENT as f64 * 8.0 / 1e3);
        row.counts = Counts::all_of(ours.iter().map(|window| window.bytes / SEGMENT as u64).sum());
        let medians = |of: fn(&Window) -> f64| [ours, theirs].map(|windows| median(windows, of));
        let [ns_per_kib, peer_ns_per_kib] = medians(Window::cost);
        let [far_ns_per_kib, peer_far_ns_per_kib] = medians(Window::far_cost);
        let [both_ns_per_kib, peer_both_ns_per_kib] = medians(Window::both_cost);
        row.tcp.per_kib = CostPerKib {
            ns_per_kib,
            peer_ns_per_kib,
            far_ns_per_kib,
            peer_far_ns_per_kib,
            both_ns_per_kib,
            peer_both_ns_per_kib,
        };
        [row.tcp.payload.far_busy, row.tcp.payload.peer_far_busy] = medians(|window| window.far_busy);
        row.ends.fe_bound = row.tcp.payload.far_busy.map(|busy| busy > FAR_BOUND);
        row
    }
}

/// Returns the median of a figure of windows.
pub(super) fn median<W>(windows: &[W], of: impl Fn(&W) -> f64) -> Option<f64> {
    Some(Spread::of(&windows.iter().map(of).collect::<Vec<_>>()).median)
}

/// Returns the wider noise interval of both sides, each measured by its own windows: the deviation of a ratio from 1
/// that occurs by chance.
pub(super) fn noise(ours: &[f64], theirs: &[f64]) -> Option<Bounds> {
    let of = |rates: &[f64]| {
        let [a, b] = [0, 1].map(|first| rates.iter().skip(first).step_by(2).copied().collect::<Vec<_>>());
        Bounds::of(&a, &b, a.len() / 2)
    };
    let [ours, theirs] = [of(ours)?, of(theirs)?];
    Some(Bounds { lower: ours.lower.min(theirs.lower), upper: ours.upper.max(theirs.upper) })
}

/// Returns a row of rates in `unit`. The peer is the kernel's stack at the near end.
pub(super) fn compare_with_kernel(
    case: impl fmt::Display,
    unit: &'static str,
    [ours, theirs]: [&[f64]; 2],
) -> Row {
    let mut row = Row::new("tcp", case, "end-to-end");
    row.set_spread("rate", unit, Spread::of(ours));
    row.figures.tsc_hz = tsc::hz();
    row.peer = PeerRatio::of_windows("kernel", ours, theirs);
    row.ratios.noise = noise(ours, theirs).into();
    row
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::golden;

    #[test]
    fn cost_includes_both_cores() {
        let ticks = tsc::hz() / 1000;
        let window = Window { bytes: 1 << 20, ticks, busy: 0.5, far_busy: 0.95 };
        // One millisecond for 1024 × 1024 bytes.
        let near = |a: f64, b: f64| assert!((a / b - 1.0).abs() < 0.01, "{a} {b}");
        near(window.cost(), 1e6 / 1024.0 * 0.5);
        near(window.both_cost(), 1e6 / 1024.0 * 1.45);
        let row = Cell { side: Side::Send, under: Under::AfXdp }.row(&[vec![window; 4], vec![window; 4]]);
        golden::check("tcp, veth", &row);
        let mut path = row.clone();
        path.tcp.path = Some(String::new());
        golden::check("tcp, paths", &path);
        assert_eq!((row.ends.fe_bound, row.ratios.noise.noise_floor), (Some(true), Some(0.0)));
        near(
            row.tcp.per_kib.both_ns_per_kib.unwrap(),
            row.tcp.per_kib.ns_per_kib.unwrap() + row.tcp.per_kib.far_ns_per_kib.unwrap(),
        );
        let floor = |ours: &[f64], theirs: &[f64]| noise(ours, theirs).unwrap().noise_floor();
        let (steady, other) = ([1.0; 8], [1.0, 0.5, 1.0, 0.5, 1.0, 0.5, 1.0, 0.5]);
        assert_eq!((floor(&steady, &steady), floor(&steady, &other)), (0.0, 1.0));
        assert_eq!(floor(&other, &steady), 1.0);
    }
}

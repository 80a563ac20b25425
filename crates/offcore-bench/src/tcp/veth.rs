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

use anyhow::{Context, Result, bail};
use offcore_mem::{Hugepages, Pool};
use offcore_stats::{named, tsc};

use super::link::Side;
use super::{BUFFER, BUFFERS, HEADERS, SEGMENT};
use crate::BURST;
use crate::peer::netns::{self, Netns};
use crate::report::progress::Progress;
use crate::report::row::Row;
use crate::report::sample::{Bounds, Spread, paired_ratio};
pub(super) use far::Far;
pub(super) use hosts::{Host, Kernel};
use stream::SETTLE;

/// MTU of the pairs, which yields segments of [`SEGMENT`] bytes.
const MTU: &str = "1500";
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

/// Options of the measurement.
#[derive(Clone, Debug)]
pub struct VethOptions {
    /// Whether the near end, our host or the kernel, sends or receives.
    pub sides: Vec<Side>,
    /// Number of pairs of windows per cell. A pair consists of a window with our stack and a window with the kernel's
    /// stack.
    pub pairs: usize,
    pub window: Duration,
    pub hugepages: Hugepages,
    pub lcore: usize,
    /// The core of the other end.
    pub other_lcore: Option<usize>,
}

impl VethOptions {
    /// Returns options with 24 pairs of windows of 0.4 s in each cell, or 4 with `quick`.
    pub fn new(quick: bool, lcore: usize, other_lcore: Option<usize>) -> Self {
        Self {
            sides: Side::ALL.into(),
            pairs: if quick { 4 } else { 24 },
            window: Duration::from_millis(400),
            hugepages: Hugepages::Auto,
            lcore,
            other_lcore,
        }
    }

    /// Returns a missing requirement of this machine, if any.
    pub fn missing(&self) -> Option<String> {
        netns::missing((self.lcore, self.other_lcore), &[])
    }
}

/// Measures everything that `options` selects and passes each finished row to `emit`.
///
/// # Errors
/// If something is missing ([`VethOptions::missing`]) or cannot be set up, or a byte is lost or changed.
pub fn run(options: &VethOptions, progress: &Progress, emit: &mut dyn FnMut(Row)) -> Result<()> {
    if let Some(missing) = options.missing() {
        bail!("end to end over veth: {missing}");
    }
    Netns::sweep()?;
    let pool = Pool::new(BUFFERS, BUFFER, options.hugepages)?;
    let cells =
        Under::ALL.iter().flat_map(|&under| options.sides.iter().map(move |&side| Cell { side, under }));
    let cells: Vec<_> = cells.collect();
    progress.begin(cells.len() * options.pairs);
    for cell in cells {
        progress.say(&format!("tcp over veth, {cell}"));
        emit(cell.measure(options, pool, progress).with_context(|| cell.to_string())?);
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
    fn measure(self, options: &VethOptions, pool: &'static Pool, progress: &Progress) -> Result<Row> {
        let other_lcore = options.other_lcore.context("end to end needs two lcores")?;
        let (near, far) = (Netns::new()?, Netns::new()?);
        pair("ours", Some("10.77.0.1/24"), &near, &far, self.under.offloads())?;
        pair("theirs", Some("10.78.0.1/24"), &near, &far, self.under.offloads())?;
        near.configure("theirs0", "10.78.0.2/24")?;
        congestion_control((&near, "theirs0"), (&far, ["theirs1", "ours1"]), "cubic")?;
        let mut ours = Host::open(self, &near, "ours0", pool)?;
        let mut theirs = Kernel::listen(self.side, &near)?;
        let (side, near_lcore) = (self.side, options.lcore);
        let far = Far { netns: &far, side, near_lcore, lcore: other_lcore, settle: SETTLE, drain: DRAIN };
        let (mut our_windows, mut their_windows) = (Vec::new(), Vec::new());
        // Warm-up, with duplicate address detection and neighbour discovery.
        far.window(&mut ours, options.window)?;
        far.window(&mut theirs, options.window)?;
        for pair in 0..options.pairs {
            let theirs_first = pair % 2 == 1;
            if theirs_first {
                their_windows.push(far.window(&mut theirs, options.window)?);
            }
            our_windows.push(far.window(&mut ours, options.window)?);
            if !theirs_first {
                their_windows.push(far.window(&mut theirs, options.window)?);
            }
            progress.step();
        }
        Ok(self.row(&our_windows, &their_windows))
    }

    pub(super) fn row(self, ours: &[Window], theirs: &[Window]) -> Row {
        let rates = |windows: &[Window]| windows.iter().map(Window::mpps).collect::<Vec<_>>();
        let median = |windows: &[Window], of: fn(&Window) -> f64| {
            Spread::of(&windows.iter().map(of).collect::<Vec<_>>()).median
        };
        let (our_rates, their_rates) = (rates(ours), rates(theirs));
        let mut row = Row {
            case: self.side.name().into(),
            port: Some(self.under.port()),
            offloads: Some(self.under.offloads()),
            frame: SEGMENT + HEADERS,
            temperature: "remote".into(),
            connections: Some(1),
            ..compare_with_kernel(&our_rates, &their_rates)
        };
        row.set_rate(Spread::of(&our_rates), tsc::hz());
        row.payload_gbps = Some(row.mpps * SEGMENT as f64 * 8.0 / 1e3);
        row.received = ours.iter().map(|window| window.bytes / SEGMENT as u64).sum();
        row.verified = row.received;
        row.ns_per_kib = Some(median(ours, Window::cost));
        row.peer_ns_per_kib = Some(median(theirs, Window::cost));
        row.far_ns_per_kib = Some(median(ours, Window::far_cost));
        row.peer_far_ns_per_kib = Some(median(theirs, Window::far_cost));
        row.both_ns_per_kib = Some(median(ours, Window::both_cost));
        row.peer_both_ns_per_kib = Some(median(theirs, Window::both_cost));
        let far = [ours, theirs].map(|windows| median(windows, |window| window.far_busy));
        (row.far_busy, row.peer_far_busy) = (Some(far[0]), Some(far[1]));
        row.fe_bound = Some(far[0] > FAR_BOUND);
        row
    }
}

/// Creates a veth pair NAME0 and NAME1, and sets the address of its far end.
pub(super) fn pair(
    name: &str,
    address: Option<&str>,
    near: &Netns,
    far: &Netns,
    offloads: bool,
) -> Result<()> {
    let ends = [format!("{name}0"), format!("{name}1")];
    near.veth(&ends[0], far, &ends[1])?;
    for (netns, end) in [near, far].into_iter().zip(&ends) {
        // The kernel must not send packets by itself.
        netns.ip(&["link", "set", end, "mtu", MTU, "addrgenmode", "none"])?;
        netns.ip(&["link", "set", end, "up"])?;
        match offloads {
            true => netns.enable_offloads(end)?,
            false => netns.disable_offloads(end)?,
        }
    }
    address.map_or(Ok(()), |address| far.configure(&ends[1], address))
}

/// Sets the congestion control `name` of the kernel at 10.78.0.2 and of the far kernel. Our stack has CUBIC.
pub(super) fn congestion_control(
    (theirs, interface): (&Netns, &str),
    (far, [to_theirs, to_ours]): (&Netns, [&str; 2]),
    name: &str,
) -> Result<()> {
    for (netns, interface, network, address) in [
        (theirs, interface, "10.78.0.0/24", "10.78.0.2"),
        (far, to_theirs, "10.78.0.0/24", "10.78.0.1"),
        (far, to_ours, "10.77.0.0/24", "10.77.0.1"),
    ] {
        netns.ip(&["route", "change", network, "dev", interface, "src", address, "congctl", name])?;
    }
    Ok(())
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

/// Returns a row of rates. The peer is the kernel's stack at the near end.
pub(super) fn compare_with_kernel(ours: &[f64], theirs: &[f64]) -> Row {
    let pairs: Vec<_> = ours.iter().copied().zip(theirs.iter().copied()).collect();
    let (ratio, rates) = (paired_ratio(&pairs), Spread::of(ours));
    let mut row = Row {
        bench: "tcp",
        arrangement: "end-to-end",
        mode: "cpu".into(),
        engine: "cpu".into(),
        ring: "none",
        burst: BURST,
        temperature: "none".into(),
        metric: "rate",
        tsc_hz: tsc::hz(),
        runs: rates.runs,
        min: rates.min,
        median: rates.median,
        max: rates.max,
        peer: Some("kernel".into()),
        peer_median: Some(Spread::of(theirs).median),
        peer_ratio: ratio.map(|ratio| ratio.median),
        peer_ratio_lower: ratio.map(|ratio| ratio.lower),
        ..Row::default()
    };
    row.set_noise(noise(ours, theirs));
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
        let row = Cell { side: Side::Send, under: Under::AfXdp }.row(&[window; 4], &[window; 4]);
        golden::check("tcp, veth", &row);
        golden::check("tcp, paths", &Row { path: Some(String::new()), ..row.clone() });
        assert_eq!((row.fe_bound, row.noise_floor), (Some(true), Some(0.0)));
        near(row.both_ns_per_kib.unwrap(), row.ns_per_kib.unwrap() + row.far_ns_per_kib.unwrap());
        let floor = |ours: &[f64], theirs: &[f64]| noise(ours, theirs).unwrap().noise_floor();
        let (steady, other) = ([1.0; 8], [1.0, 0.5, 1.0, 0.5, 1.0, 0.5, 1.0, 0.5]);
        assert_eq!((floor(&steady, &steady), floor(&steady, &other)), (0.0, 1.0));
        assert_eq!(floor(&other, &steady), 1.0);
    }
}

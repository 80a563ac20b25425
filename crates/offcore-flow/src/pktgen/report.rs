//! Reports of a generator: counts and latencies of each direction and of all directions together.

use std::ops::Add;
use std::time::{Duration, Instant};

use offcore_port::{RxCounters, TxCounters};
use offcore_stats::{Histogram, counters, tsc};
use offcore_wire::ethernet::FCS_LEN;
use serde::Serialize;

use super::rate::WIRE_OVERHEAD;
use super::receiver::Received;
use super::sender::Sent;
use super::{Direction, Running};

/// The longest time between two checks for received packets.
const LOOKS: Duration = Duration::from_millis(200);
/// Maximum time in which receivers hand over their latencies.
const TIMEOUT: Duration = Duration::from_millis(200);

counters! {
    /// Counts of one direction, or the sum of several. `lost` may decrease.
    #[derive(Serialize)]
    pub struct Counts {
        /// Packets that the port sent.
        sent: Packets,
        /// Bytes of sent packets, including the FCS.
        sent_bytes: Bytes,
        /// Packets that the port accepted but did not send, because they were too big or the link was down.
        tx_dropped: Packets,
        /// Due packets that were given up because nothing could be sent for a second.
        given_up: Packets,
        /// Packets received, including duplicates.
        received: Packets,
        /// Bytes of packets received for the first time, including the FCS.
        received_bytes: Bytes,
        /// Packets whose content was compared byte for byte.
        verified: Packets,
        /// Missing packets below the highest number received in their flow; in a final report, all missing packets.
        lost: Packets gauge,
        /// Packets received after a packet of their flow with a higher number.
        reordered: Packets,
        /// Packets received again; their first arrival is not included.
        duplicates: Packets,
        /// Packets whose content, length or number differs from the packet that was sent. If the number or the headers
        /// are corrupt, the packet does not count as received, and therefore counts as lost.
        corrupt: Packets,
        /// Packets that the receiving port dropped before they could be identified. They count as lost.
        rx_dropped: Packets,
        /// Packets from other senders.
        foreign: Packets,
        /// Invalid packets: shorter than their headers, or shorter than the headers say.
        malformed: Packets,
    }
}

impl Counts {
    /// Whether every sent packet arrived once, in order and unchanged.
    pub fn is_clean(&self) -> bool {
        self.lost == 0 && self.reordered == 0 && self.duplicates == 0 && self.corrupt == 0
    }

    /// Counts all missing packets as lost.
    fn give_up(&mut self) {
        self.lost = self.sent.saturating_sub(self.unique());
    }

    /// Returns the number of received packets without duplicates.
    pub fn unique(&self) -> u64 {
        self.received.saturating_sub(self.duplicates)
    }
}

/// Latencies in nanoseconds, measured from the times at which packets were due. `None` if no latency was measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Latencies {
    pub min_ns: Option<f64>,
    /// The latency that 50 % of the packets did not exceed.
    pub p50_ns: Option<f64>,
    pub p90_ns: Option<f64>,
    pub p99_ns: Option<f64>,
    /// The latency that 99.9 % of the packets did not exceed.
    pub p999_ns: Option<f64>,
    pub max_ns: Option<f64>,
}

impl From<&Histogram> for Latencies {
    fn from(ticks: &Histogram) -> Self {
        let ns = |ticks_or_none: u64| (ticks.values() > 0).then(|| tsc::to_ns(ticks_or_none).round());
        Self {
            min_ns: ns(ticks.min()),
            p50_ns: ns(ticks.percentile(0.5)),
            p90_ns: ns(ticks.percentile(0.9)),
            p99_ns: ns(ticks.percentile(0.99)),
            p999_ns: ns(ticks.percentile(0.999)),
            max_ns: ns(ticks.max()),
        }
    }
}

/// Counts, rates and latencies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Figures {
    /// Counts since the start, or since they were cleared.
    #[serde(flatten)]
    pub counts: Counts,
    pub tx_mpps: f64,
    pub rx_mpps: f64,
    /// Sent frames in Gbit/s, including the FCS.
    pub tx_gbps: f64,
    /// Received frames in Gbit/s, including the FCS.
    pub rx_gbps: f64,
    /// Received frames in Gbit/s on the wire, including preambles and gaps.
    pub gbps_l1: f64,
    #[serde(flatten)]
    pub latencies: Latencies,
}

impl Figures {
    /// `tx` and `rx`: the seconds in which packets were sent and received since `since`.
    fn new(counts: Counts, since: Counts, tx: f64, rx: f64, latencies: &Histogram) -> Self {
        let passed = counts - since;
        let rate = |count: u64, seconds: f64| count as f64 / seconds.max(1e-9);
        let bits = |bytes: u64, seconds| rate(bytes, seconds) * 8.0 / 1e9;
        Self {
            counts,
            tx_mpps: rate(passed.sent, tx) / 1e6,
            rx_mpps: rate(passed.received, rx) / 1e6,
            tx_gbps: bits(passed.sent_bytes, tx),
            rx_gbps: bits(passed.received_bytes, rx),
            gbps_l1: bits(passed.received_bytes + passed.unique() * WIRE_OVERHEAD as u64, rx),
            latencies: latencies.into(),
        }
    }
}

/// Counts of a port's queues, for any packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PortCounts {
    pub tx_packets: u64,
    pub rx_packets: u64,
    /// Packets dropped instead of sent.
    pub tx_dropped: u64,
    /// Packets dropped during reception.
    pub rx_dropped: u64,
}

/// Figures of one direction.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct DirectionReport {
    pub from: usize,
    pub to: usize,
    #[serde(flatten)]
    pub figures: Figures,
}

/// A report.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PktgenReport {
    /// `interval`, `stats` or `final`.
    pub report: &'static str,
    pub seconds: f64,
    pub over_seconds: f64,
    /// Whether packets are being sent.
    pub running: bool,
    pub rate: String,
    pub size: String,
    pub flows: u32,
    /// Packets that are due together.
    pub burst: u32,
    /// The sum of all directions.
    #[serde(flatten)]
    pub all: Figures,
    pub directions: Vec<DirectionReport>,
}

/// Creates reports.
#[derive(Debug)]
pub struct Reporter {
    started: Instant,
    /// End of the last interval, and the counts at that time.
    last: (Instant, Vec<Counts>),
    cleared: Vec<Counts>,
    latencies: Vec<Histogram>,
    /// Last check before any packet was received. `came` is the number of packets received, and the time of the check
    /// that saw it increase.
    quiet: Instant,
    came: (u64, Instant),
}

impl Reporter {
    /// Creates a reporter for `running`. Its counts start now.
    pub fn new(running: &Running) -> Self {
        let counts: Vec<_> = running.directions.iter().map(counts).collect();
        let latencies = running.directions.iter().map(|_| Histogram::new()).collect();
        let now = Instant::now();
        Self {
            started: now,
            last: (now, counts.clone()),
            cleared: counts,
            latencies,
            quiet: now,
            came: (0, now),
        }
    }

    /// Checks whether packets arrive. Call it regularly: if the rate is limited or packets are delayed on their way,
    /// they arrive for longer than they are sent.
    pub fn look(&mut self, running: &Running) {
        let now = Instant::now();
        let cleared: u64 = self.cleared.iter().map(|counts| counts.received).sum();
        match running.counted().received.saturating_sub(cleared) {
            0 => self.quiet = now,
            packets if packets != self.came.0 => self.came = (packets, now),
            _ => {}
        }
    }

    /// Returns counts since the start or [`clear`](Self::clear), and rates and latencies since the previous interval
    /// report.
    pub fn interval(&mut self, running: &Running, kind: &'static str) -> PktgenReport {
        let latencies = self.collect(running);
        let now = Instant::now();
        let counted: Vec<_> = running.directions.iter().map(counts).collect();
        let (then, before) = std::mem::replace(&mut self.last, (now, counted.clone()));
        let over = now - then;
        self.report(running, kind, counted, &before, (over, over), &latencies)
    }

    /// Returns counts, rates and latencies since the start or [`clear`](Self::clear). Sending took `active` of that
    /// time, and the next packet would have been due `gap` later. Missing packets count as lost.
    pub fn last(&mut self, running: &Running, active: Duration, gap: Duration) -> PktgenReport {
        self.collect(running);
        let mut counted: Vec<_> = running.directions.iter().map(counts).collect();
        // All packets since the start are compared: packets in flight at a clear arrive later, and must not hide
        // losses.
        counted.iter_mut().for_each(Counts::give_up);
        let (cleared, latencies) = (self.cleared.clone(), std::mem::take(&mut self.latencies));
        self.look(running);
        // Checks are some time apart, so small differences do not count.
        let coming = Some(self.came.1.saturating_duration_since(self.quiet))
            .filter(|time| *time > active + gap + LOOKS);
        let over = (active + gap, coming.map_or(active + gap, |coming| with_last_gap(coming, self.came.0)));
        let mut report = self.report(running, "final", counted, &cleared, over, &latencies);
        report.over_seconds = active.as_secs_f64();
        self.latencies = latencies;
        report
    }

    /// Resets all counts to 0.
    pub fn clear(&mut self, running: &Running) {
        self.collect(running);
        self.latencies.iter_mut().for_each(Histogram::clear);
        self.cleared = running.directions.iter().map(counts).collect();
        // While packets are sent, some are in flight.
        if !running.settings().running {
            self.cleared.iter_mut().for_each(Counts::give_up);
        }
        self.last = (Instant::now(), self.cleared.clone());
        (self.quiet, self.came) = (self.last.0, (0, self.last.0));
    }

    /// Returns the latencies of each direction since the last call, and adds them to the totals.
    fn collect(&mut self, running: &Running) -> Vec<Histogram> {
        running.directions.iter().for_each(|direction| direction.handover.ask());
        let asked = Instant::now();
        // A worker that has ended has already handed over its latencies.
        while running.is_running()
            && asked.elapsed() < TIMEOUT
            && !running.directions.iter().all(|direction| direction.handover.is_answered())
        {
            std::thread::sleep(Duration::from_micros(50));
        }
        let taken = running.directions.iter().zip(&mut self.latencies).map(|(direction, all)| {
            let mut one = Histogram::new();
            direction.handover.take(&mut one);
            all.merge(&one);
            one
        });
        taken.collect()
    }

    fn report(
        &self,
        running: &Running,
        kind: &'static str,
        counted: Vec<Counts>,
        before: &[Counts],
        over: (Duration, Duration),
        latencies: &[Histogram],
    ) -> PktgenReport {
        let (sending, receiving) = (over.0.as_secs_f64(), over.1.as_secs_f64());
        let (mut all, mut all_before) = (Counts::default(), Counts::default());
        let (mut together, mut directions) = (Histogram::new(), Vec::new());
        for (index, direction) in running.directions.iter().enumerate() {
            let since_clear = |counts: Counts| {
                let mut since = counts - self.cleared[index];
                // A packet that was lost before the clear may have arrived since.
                since.lost = if since.lost.cast_signed() < 0 { 0 } else { since.lost };
                // A packet sent before the clear does not count as lost since then, even if it never arrives.
                since.lost = since.lost.min(since.sent);
                since
            };
            let (counts, earlier) = (since_clear(counted[index]), since_clear(before[index]));
            let figures = Figures::new(counts, earlier, sending, receiving, &latencies[index]);
            directions.push(DirectionReport { from: direction.from, to: direction.to, figures });
            (all, all_before) = (all + counts, all_before + earlier);
            together.merge(&latencies[index]);
        }
        let settings = running.settings();
        PktgenReport {
            report: kind,
            seconds: self.started.elapsed().as_secs_f64(),
            over_seconds: sending,
            running: settings.running && !running.is_done(),
            rate: settings.rate.to_string(),
            size: settings.sizes.to_string(),
            flows: settings.flows,
            burst: settings.burst,
            all: Figures::new(all, all_before, sending, receiving, &together),
            directions,
        }
    }
}

/// Returns the duration for a rate of `packets` packets, if `between` is the time from the first to the last packet.
fn with_last_gap(between: Duration, packets: u64) -> Duration {
    let gaps = packets.saturating_sub(1).max(1);
    between + Duration::from_secs_f64(between.as_secs_f64() / gaps as f64)
}

/// Returns the counts of a direction since the start. `lost` is the number of packets missing below the highest
/// numbers.
fn counts(direction: &Direction) -> Counts {
    let sent = |what: Sent| direction.sent.counter(what as usize).value();
    let tx_dropped: u64 = direction.tx.iter().map(TxCounters::dropped_total).sum();
    let Received { received, bytes, verified, lost, reordered, duplicates, corrupt, foreign, malformed } =
        Received::read(&direction.received);
    let sent_packets = sent(Sent::Handed).saturating_sub(tx_dropped);
    // Packets dropped by the port leave gaps in the received numbers, so `lost` is limited to packets that did not
    // arrive.
    let lost = if lost.cast_signed() < 0 { 0 } else { lost };
    let lost = lost.min(sent_packets.saturating_sub(received.saturating_sub(duplicates)));
    Counts {
        sent: sent_packets,
        sent_bytes: direction.tx.iter().map(|tx| tx.bytes() + tx.packets() * FCS_LEN as u64).sum(),
        tx_dropped,
        given_up: sent(Sent::GivenUp),
        received,
        received_bytes: bytes,
        verified,
        lost,
        reordered,
        duplicates,
        corrupt,
        rx_dropped: direction.rx.iter().map(RxCounters::dropped_total).sum(),
        foreign,
        malformed,
    }
}

impl Running {
    /// Returns the counts of each port's queues since the start.
    pub fn port_counts(&self) -> Vec<PortCounts> {
        let counts = self.counters.iter().map(|port| PortCounts {
            tx_packets: port.tx.iter().map(TxCounters::packets).sum(),
            rx_packets: port.rx.iter().map(RxCounters::packets).sum(),
            tx_dropped: port.tx.iter().map(TxCounters::dropped_total).sum(),
            rx_dropped: port.rx.iter().map(RxCounters::dropped_total).sum(),
        });
        counts.collect()
    }

    /// Returns the counts since the start, summed over all directions.
    pub(super) fn counted(&self) -> Counts {
        self.directions.iter().map(counts).fold(Counts::default(), Add::add)
    }
}

//! The front end of a latency measurement: sends at a fixed rate independent of returning packets, and knows the due
//! time of each packet that returns.
//!
//! Packet `n` of a window is due `n` intervals after the start of the window. The due time therefore follows from the
//! sequence number, which every packet carries and which is checked in every returned packet. Even the shortest packet
//! has room for it. The latency of a packet that is sent late, because this side was busy or a ring was full, counts
//! from its due time.
//!
//! The same thread steps the engine, if present: two threads on one core would measure the scheduler.

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};
use offcore_mem::Hugepages;
use offcore_stats::{Histogram, tsc};

use super::back_end::BackEnd;
use crate::BURST;
use crate::guests::guest::{PORT_MAC, Seen};
use crate::guests::workload::Ring;
use crate::vhost::round_trips::{CONTENT_EVERY, RING, RoundTrips, WINDOW, Way};

/// Minimum number of packets sent to a slow back end regardless of the time, so that enough packets are checked and
/// measured.
const FEWEST: u64 = 4 * CONTENT_EVERY as u64;
/// Time after which an outstanding packet counts as lost.
const TIMEOUT: Duration = Duration::from_secs(1);

/// Schedule of the packets of an open loop.
#[derive(Clone, Copy, Debug)]
struct Pace {
    /// Sequence number of the first packet.
    first: u64,
    /// Sequence number of the first packet whose latency counts.
    counted: u64,
    /// Sequence number after the last packet.
    end: u64,
    /// TSC value at which the first packet is due.
    start: u64,
    /// TSC ticks between two packets.
    interval: f64,
}

impl Pace {
    /// Returns the TSC value at which packet `sequence` is due.
    #[inline(always)]
    fn due(&self, sequence: u64) -> u64 {
        self.start + ((sequence - self.first) as f64 * self.interval) as u64
    }

    /// Returns the sequence number after the last packet that is due at `now`.
    #[inline(always)]
    fn due_until(&self, now: u64) -> u64 {
        let elapsed = now.saturating_sub(self.start);
        (self.first + 1 + (elapsed as f64 / self.interval) as u64).min(self.end)
    }
}

/// A front end with paced packets.
#[derive(Debug)]
pub(super) struct Paced(RoundTrips);

impl Paced {
    /// Connects to the back end at `socket` and starts its virtqueues. Frames are `frame` bytes long, including the
    /// FCS.
    pub(super) fn connect(socket: &Path, frame: usize, hugepages: Hugepages) -> Result<Self> {
        let way = Way::Rewritten(Some(PORT_MAC));
        RoundTrips::connect(&[socket.into()], Ring::Split, frame, way, hugepages).map(Self)
    }

    /// Returns the packet counters so far.
    pub(super) fn seen(&self) -> Seen {
        self.0.seen()
    }

    /// Returns the number of packets that did not come back.
    pub(super) fn lost(&self) -> u64 {
        self.0.lost()
    }

    /// Runs a closed loop that keeps the maximum number of packets in flight for `length`. Returns packets per TSC
    /// tick.
    pub(super) fn closed(&mut self, back_end: &mut BackEnd, length: Duration) -> Result<f64> {
        let (ticks, start) = (tsc::ticks(length), tsc::now());
        let (mut last, mut received) = (start, 0);
        while last - start < ticks || received == 0 {
            ensure!(last - start < ticks + tsc::ticks(self.0.timeout()), "no packet has come back for 10 s");
            back_end.step();
            self.0.send(WINDOW - self.0.outstanding())?;
            received += self.0.receive()?;
            last = tsc::now();
        }
        self.0.gather_in(TIMEOUT, |packets| {
            back_end.step();
            packets.receive()
        })?;
        Ok(received as f64 / (last - start) as f64)
    }

    /// Runs an open loop: sends a packet every `interval` TSC ticks for `length`, or longer if that gives too few
    /// packets. The first fifth is not counted. For the other packets, the times from when they were due until they
    /// were taken from the ring are recorded in `latencies`.
    pub(super) fn open(
        &mut self,
        back_end: &mut BackEnd,
        interval: f64,
        length: Duration,
        latencies: &mut Histogram,
    ) -> Result<()> {
        let packets = ((tsc::ticks(length) as f64 / interval) as u64).max(FEWEST);
        let (first, start) = (self.0.next(), tsc::now());
        let pace = Pace { first, counted: first + packets / 5, end: first + packets, start, interval };
        let mut moved = start;
        while self.0.next() < pace.end {
            back_end.step();
            let received = receive(&mut self.0, pace, latencies)?;
            let now = tsc::now();
            let due = pace.due_until(now).saturating_sub(self.0.next());
            // More packets would be dropped because no RX buffer is left. Deferred packets count from their due time
            // like all others, whereas dropped packets would be missing among the late ones.
            let room = usize::from(RING) - self.0.outstanding();
            let sent = if due > 0 { self.0.send((due as usize).min(BURST).min(room))? } else { 0 };
            if received + sent > 0 || due == 0 {
                moved = now;
            }
            ensure!(
                now - moved < tsc::ticks(self.0.timeout()),
                "no packet has moved for 10 s; {} are on their way",
                self.0.outstanding()
            );
        }
        self.0.gather_in(TIMEOUT, |packets| {
            back_end.step();
            receive(packets, pace, latencies)
        })
    }
}

/// Takes up to a burst of returned packets and checks them. Records the times since they were due in `latencies`.
/// Returns the number of packets.
#[inline]
fn receive(packets: &mut RoundTrips, pace: Pace, latencies: &mut Histogram) -> Result<usize> {
    let ready = packets.ready()?;
    if ready > 0 {
        let now = tsc::now();
        packets.take(ready, |sequence| {
            if sequence >= pace.counted {
                latencies.record(now.saturating_sub(pace.due(sequence)));
            }
        })?;
    }
    Ok(ready)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_are_due_at_even_intervals() {
        let pace = Pace { first: 100, counted: 100, end: 110, start: 5000, interval: 250.5 };
        assert_eq!((pace.due(100), pace.due(101), pace.due(102)), (5000, 5250, 5501));
        assert_eq!((pace.due_until(0), pace.due_until(5000), pace.due_until(5250)), (101, 101, 101));
        assert_eq!((pace.due_until(5251), pace.due_until(1_000_000)), (102, 110));
        for sequence in pace.first..pace.end {
            assert!(pace.due_until(pace.due(sequence) + 1) > sequence);
        }
    }
}

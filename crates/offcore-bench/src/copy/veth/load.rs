//! The far end of a veth pair: the kernel sends from it as fast as it can, and counts arriving packets.

use std::panic::resume_unwind;
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use offcore_port::netdev::NetDev;
use offcore_stats::tsc;
use offcore_wire::probe::{self, ProbeHeader};
use offcore_wire::template::{UDP_HEADERS_LEN, UdpTemplate};
use offcore_wire::{EtherType, EthernetFrame, IpProtocol, Ipv4Packet, UdpFlow};

use super::{Cell, Direction};
use crate::guests::guest::{GUEST_MAC, PORT_MAC, Seen};
use crate::peer::frames::{FrameSink, FrameSource};
use crate::vhost::end_to_end::back_end::BackEnd;
use crate::vhost::end_to_end::paired::{Load, Window};

/// Number of frames per call of the kernel. If the other core polls, a call takes about 25 ms in addition to the time
/// of its frames, as measured with more frames per call. The cause is not known. A grace period of RCU would take as
/// long.
const AT_ONCE: u32 = 1 << 16;
/// Number of sending threads on one core: one sends while the others wait.
const SENDERS: usize = 3;
/// Number of frames that are sent at a time for checks. It is less than the size of any ring.
const CHECKED_AT_ONCE: u32 = 32;
/// Number of such checks.
const CHECKED_TIMES: u32 = 64;
/// Time without a returned packet after which a back end counts as stalled.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum time for the remaining packets to arrive, which fit into a ring.
const DRAIN: Duration = Duration::from_millis(5);
/// If a back end receives a larger share of the sent packets, the sender is the bottleneck.
const NEARLY_ALL: f64 = 0.98;

/// The far end.
#[derive(Debug)]
pub(super) struct FarEnd {
    direction: Direction,
    interface: NetDev,
    /// Sources of packets, not used with `txonly`. Checked packets come from the first source.
    sources: Vec<FrameSource>,
    frame_len: usize,
    seen: Seen,
    lost: u64,
}

impl FarEnd {
    /// Opens the far end `interface` in the calling thread's namespace.
    pub(super) fn new(cell: Cell, interface: &str) -> Result<Self> {
        let interface = NetDev::open(interface).with_context(|| format!("interface {interface}"))?;
        let mut frame = vec![0; cell.frame_len()];
        UdpTemplate::new(&UdpFlow::txonly(GUEST_MAC, PORT_MAC), frame.len())
            .context("frame length")?
            .write(&mut frame)?;
        probe::write(&mut frame, ProbeHeader { fill: 0x5eed, sequence: 0 })?;
        let sources =
            (0..SENDERS).map(|_| FrameSource::new(interface.index(), &frame)).collect::<Result<_>>()?;
        let frame_len = cell.frame_len();
        Ok(Self { direction: cell.direction, interface, sources, frame_len, seen: Seen::default(), lost: 0 })
    }

    /// Sends for `length` as fast as the kernel can. Returns the duration in TSC ticks.
    fn blast(&mut self, length: Duration) -> Result<u64> {
        let start = tsc::now();
        let send = |source: &mut FrameSource| -> Result<()> {
            while tsc::now() - start < tsc::ticks(length) {
                source.send(AT_ONCE)?;
            }
            Ok(())
        };
        thread::scope(|scope| {
            // The threads inherit this thread's core and network namespace.
            let threads: Vec<_> =
                self.sources.iter_mut().map(|source| scope.spawn(move || send(source))).collect();
            let ends = threads.into_iter().map(|thread| thread.join());
            ends.into_iter().try_for_each(|end| end.unwrap_or_else(|panic| resume_unwind(panic)))
        })?;
        Ok(tsc::now() - start)
    }

    /// Returns the number of frames sent so far.
    fn sent(&self) -> u64 {
        self.sources.iter().map(FrameSource::sent).sum()
    }

    /// Returns the number of packets and bytes that have arrived at this end, as counted by the kernel.
    fn arrived(&self) -> Result<(u64, u64)> {
        let counters = self.interface.counters().context("the interface's counters")?;
        Ok((counters.rx_packets, counters.rx_bytes))
    }

    /// Runs a window of a back end that sends by itself.
    fn receive(&mut self, settle: Duration, length: Duration) -> Result<Window> {
        let since = Instant::now();
        let before = self.arrived()?;
        while self.arrived()?.0 == before.0 {
            ensure!(since.elapsed() < TIMEOUT, "no packet has arrived for {:?}", since.elapsed());
        }
        sleep(settle);
        let (start, before) = (tsc::now(), self.arrived()?);
        sleep(length);
        let (mut end, mut after) = (tsc::now(), self.arrived()?);
        // The back end's thread may be preempted.
        while after.0 == before.0 {
            ensure!(since.elapsed() < settle + length + TIMEOUT, "no packet has arrived for {TIMEOUT:?}");
            (end, after) = (tsc::now(), self.arrived()?);
        }
        let (packets, bytes) = (after.0 - before.0, after.1 - before.1);
        let expected = packets * self.frame_len as u64;
        ensure!(bytes == expected, "{packets} packets of {} bytes have {bytes} bytes", self.frame_len);
        Ok(Window { received: packets, ticks: end - start, busy: 0 })
    }

    /// Runs a window of a back end to which packets are sent.
    fn send(&mut self, settle: Duration, length: Duration, back_end: &mut dyn BackEnd) -> Result<Window> {
        self.blast(settle)?;
        let before = self.given_back(back_end)?;
        let sent = self.sent();
        let ticks = self.blast(length)?;
        let sent = self.sent() - sent;
        let since = Instant::now();
        let mut received = self.given_back(back_end)? - before;
        while received == 0 {
            ensure!(since.elapsed() < TIMEOUT, "nothing of {sent} packets has arrived for {TIMEOUT:?}");
            received = self.given_back(back_end)? - before;
        }
        let busy = if received as f64 > NEARLY_ALL * sent as f64 { ticks } else { 0 };
        Ok(Window { received, ticks, busy })
    }

    /// Returns the number of packets that the back end has received or returned so far, after all packets have left the
    /// path.
    fn given_back(&self, back_end: &mut dyn BackEnd) -> Result<u64> {
        sleep(DRAIN);
        match self.direction {
            Direction::Txonly | Direction::Forward => Ok(self.arrived()?.0),
            Direction::Rxonly => back_end.moved(),
        }
    }

    /// Checks some of the packets that a back end creates: each must be a UDP packet of the right length.
    fn check_made(&mut self) -> Result<()> {
        let mut sink = FrameSink::new(self.interface.index())?;
        let mut room = [0; 2048];
        let (wanted, mut moved) = (u64::from(CHECKED_AT_ONCE * CHECKED_TIMES), Instant::now());
        while self.seen.verified < wanted {
            let Some(frame) = sink.next(&mut room)? else {
                ensure!(moved.elapsed() < TIMEOUT, "no packet has arrived for {TIMEOUT:?}");
                continue;
            };
            moved = Instant::now();
            ensure!(
                is_udp(frame, self.frame_len)?,
                "what has arrived is no UDP packet of {} bytes: {} bytes, {:02x?}",
                self.frame_len,
                frame.len(),
                &frame[..frame.len().min(UDP_HEADERS_LEN)]
            );
            self.seen.received += 1;
            self.seen.verified += 1;
        }
        Ok(())
    }

    /// Sends a few packets at a time through the back end and checks each returned packet.
    fn check(&mut self) -> Result<()> {
        let mut sink = FrameSink::new(self.interface.index())?;
        // The first packets may be lost while both ends start up.
        let since = Instant::now();
        while self.check_some(&mut sink, 1, Duration::from_millis(200))? == 0 {
            ensure!(since.elapsed() < TIMEOUT, "no packet has come back for {:?}", since.elapsed());
        }
        for _ in 0..CHECKED_TIMES {
            let checked = self.check_some(&mut sink, CHECKED_AT_ONCE, TIMEOUT)?;
            self.lost += u64::from(CHECKED_AT_ONCE) - checked;
            if self.lost > 0 {
                // Waiting for many lost packets would take minutes, and a single loss is already an error.
                break;
            }
        }
        Ok(())
    }

    /// Sends `count` packets, checks the returned packets, and waits until none has arrived for `timeout`. Returns the
    /// number of checked packets.
    fn check_some(&mut self, sink: &mut FrameSink, count: u32, timeout: Duration) -> Result<u64> {
        let mut room = [0; 2048];
        let Some(source) = self.sources.first_mut() else { return Ok(0) };
        let first = source.sent();
        let (mut expected, end) = (first, first + u64::from(count));
        source.send(count)?;
        let (mut checked, mut moved) = (0, Instant::now());
        while expected < end && moved.elapsed() < timeout {
            let Some(frame) = sink.next(&mut room)? else { continue };
            moved = Instant::now();
            ensure!(
                frame.len() == self.frame_len,
                "{} bytes have come back of {}",
                frame.len(),
                self.frame_len
            );
            let header = probe::check_header(frame)?;
            if header.sequence < first {
                // The packet is late and has already been counted as lost.
                continue;
            }
            ensure!(
                (expected..end).contains(&header.sequence),
                "packet {} has come back where {expected} was due; those before {end} were sent",
                header.sequence
            );
            ensure!(
                frame[..6] == GUEST_MAC.0 && frame[6..12] == PORT_MAC.0,
                "packet {}: its addresses are {:02x?}, which is not swapped",
                header.sequence,
                &frame[..12]
            );
            probe::check_content(frame).with_context(|| format!("packet {}", header.sequence))?;
            expected = header.sequence + 1;
            checked += 1;
        }
        self.seen.sent += u64::from(count);
        self.seen.received += checked;
        self.seen.verified += checked;
        Ok(checked)
    }
}

/// Returns whether `frame` is a complete UDP packet over IPv4 with a length of `len` bytes and a correct header
/// checksum.
fn is_udp(frame: &[u8], len: usize) -> Result<bool> {
    let ethernet = EthernetFrame::new_checked(frame)?;
    if frame.len() != len || ethernet.ethertype() != EtherType::IPV4 {
        return Ok(false);
    }
    let ip = Ipv4Packet::new_checked(ethernet.payload())?;
    let whole = usize::from(ip.total_len()) == ethernet.payload().len();
    Ok(whole && ip.verify_checksum() && ip.protocol() == IpProtocol::UDP)
}

impl Load for FarEnd {
    fn window(&mut self, settle: Duration, length: Duration, back_end: &mut dyn BackEnd) -> Result<Window> {
        let window = match self.direction {
            Direction::Txonly => {
                if self.seen.verified == 0 {
                    self.check_made()?;
                }
                self.receive(settle, length)?
            }
            Direction::Rxonly => self.send(settle, length, back_end)?,
            Direction::Forward => {
                if self.seen.verified == 0 {
                    self.check()?;
                }
                self.send(settle, length, back_end)?
            }
        };
        self.seen.received += window.received;
        Ok(window)
    }

    fn seen(&self) -> Seen {
        self.seen
    }

    /// Returns the losses among the packets that were sent a few at a time. Other packets may be dropped.
    fn lost(&self) -> u64 {
        self.lost
    }
}

//! The front end of a latency measurement: sends at a pace of its own, whatever comes back, and knows of each packet that
//! does when it should have been sent.
//!
//! Packet `n` of a window is due `n` intervals after its beginning. So the time it was due follows from its sequence
//! number, which every packet has and which is looked at in every one that comes back: no packet is too short for that.
//! A packet that is sent late, because this side was busy or a ring was full, counts from when it was due.
//!
//! The same thread steps the engine, where there is one: two threads on one core would measure the scheduler.

use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use offcore_mem::{GuestMemory, GuestRegion, HEADROOM, Hugepages, Mapping};
use offcore_ring::split::device::Direction;
use offcore_ring::split::driver::Queue;
use offcore_ring::{Layout, prefetch};
use offcore_stats::{Histogram, tsc};
use offcore_vhost::features::{NET_HEADER, VIRTIO_F_INDIRECT_DESC, VIRTIO_NET_F_MRG_RXBUF};
use offcore_vhost::{FrontEnd, FrontEndConfig, MemoryFd};
use offcore_wire::probe::{self, PROBE_LEN, ProbeHeader};
use offcore_wire::template::{UDP_HEADERS_LEN, UdpTemplate};
use offcore_wire::{UdpFlow, ethernet};

use super::back_end::BackEnd;
use crate::guest::{GUEST_MAC, PEER_MAC, PORT_MAC, Seen};

/// Descriptors of each virtqueue, and buffers of each direction.
const RING: u16 = 256;
/// Packets on their way in the closed loop.
const WINDOW: usize = 128;
/// Packets that are taken from the ring, or sent, at a time.
const BURST: usize = 32;
/// One packet in this many is checked byte by byte.
const CONTENT_EVERY: u64 = 64;
/// A slow back end is sent so many packets however long it takes, so that there are some to check and to measure.
const FEWEST: u64 = 4 * CONTENT_EVERY;
/// Bytes between two buffers: an odd number of lines.
const STRIDE: usize = 37 * prefetch::LINE;
/// Where a frame begins in its buffer; the virtio-net header is before it.
const FRAME: usize = HEADROOM;
/// Where the sequence number is in a frame.
const SEQUENCE: usize = UDP_HEADERS_LEN + PROBE_LEN - 8;
/// What has not come back for so long is lost.
const TIMEOUT: Duration = Duration::from_secs(1);

/// The packets of an open loop.
#[derive(Clone, Copy, Debug)]
struct Pace {
    /// Sequence number of the first.
    first: u64,
    /// Sequence number of the first whose latency counts.
    counted: u64,
    /// Sequence number after the last.
    end: u64,
    /// TSC when the first is due.
    start: u64,
    /// TSC ticks from packet to packet.
    interval: f64,
}

impl Pace {
    /// TSC when packet `sequence` is due.
    #[inline(always)]
    fn due(&self, sequence: u64) -> u64 {
        self.start + ((sequence - self.first) as f64 * self.interval) as u64
    }

    /// Sequence number after the last packet that is due at `now`.
    #[inline(always)]
    fn due_until(&self, now: u64) -> u64 {
        let elapsed = now.saturating_sub(self.start);
        (self.first + 1 + (elapsed as f64 / self.interval) as u64).min(self.end)
    }
}

/// A front end and its packets.
#[derive(Debug)]
pub(super) struct Paced {
    front_end: FrontEnd,
    memory: Arc<GuestMemory>,
    rx: Queue<u32>,
    tx: Queue<u32>,
    /// TX buffers that the back end does not have.
    free: Vec<u32>,
    frame_len: usize,
    scratch: Vec<u8>,
    /// Sequence number of the next packet to be sent.
    next: u64,
    /// Sequence number of the next packet to come back.
    expected: u64,
    seen: Seen,
    lost: u64,
}

impl Paced {
    /// Connects to the back end at `socket` and starts its virtqueues. Frames are `frame` bytes long, FCS included.
    pub(super) fn connect(socket: &Path, frame: usize, hugepages: Hugepages) -> Result<Self> {
        let (mapping, fd) = Mapping::memfd("bench-latency", 2 * usize::from(RING) * STRIDE, hugepages)?;
        let (address, len) = (mapping.base().as_ptr() as u64, mapping.len() as u64);
        let region = GuestRegion::new(address, address, len, mapping, 0)?;
        let memory = Arc::new(GuestMemory::new(vec![region])?);
        let config = FrontEndConfig {
            queue_size: RING,
            features: VIRTIO_NET_F_MRG_RXBUF | VIRTIO_F_INDIRECT_DESC,
            ..FrontEndConfig::new(socket)
        };
        let shared = MemoryFd::new(memory.regions()[0].mapping(), fd.as_fd());
        let front_end = FrontEnd::connect(&config, &[shared]).context("connecting to the back end")?;
        let [rx, tx] = front_end.queues() else { bail!("expected two virtqueues") };
        // Made before the back end starts its side, since they zero the rings.
        let (Layout::Split(rx), Layout::Split(tx)) = (rx.layout(), tx.layout()) else {
            bail!("packed rings were not asked for");
        };
        let (rx, tx) = (Queue::new(rx, false), Queue::new(tx, false));
        let frame_len = frame.saturating_sub(ethernet::FCS_LEN);
        let mut paced = Self {
            memory,
            rx,
            tx,
            free: scattered().collect(),
            frame_len,
            scratch: vec![0; STRIDE],
            next: 0,
            expected: 0,
            seen: Seen::default(),
            lost: 0,
            front_end,
        };
        paced.rx.set_notification(false);
        paced.tx.set_notification(false);
        paced.prepare()?;
        paced.front_end.start().context("starting the virtqueues")?;
        Ok(paced)
    }

    /// Fills the TX buffers and makes the RX buffers available.
    fn prepare(&mut self) -> Result<()> {
        let flow = UdpFlow::txonly(GUEST_MAC, PORT_MAC);
        let template = UdpTemplate::new(&flow, self.frame_len).context("frame length")?;
        let end = NET_HEADER + self.frame_len;
        for buffer in 0..u32::from(RING) {
            let packet = &mut self.scratch[..end];
            packet[..NET_HEADER].fill(0);
            let frame = &mut packet[NET_HEADER..];
            template.write(frame)?;
            probe::write(frame, ProbeHeader { fill: buffer ^ 0x5eed, sequence: 0 })?;
            self.mapping().write_at(tx_frame(buffer) - NET_HEADER, &self.scratch[..end]);
        }
        scattered().for_each(|buffer| self.post(buffer));
        self.rx.publish();
        Ok(())
    }

    /// What has been seen so far.
    pub(super) fn seen(&self) -> Seen {
        self.seen
    }

    /// Packets that did not come back.
    pub(super) fn lost(&self) -> u64 {
        self.lost
    }

    /// A closed loop: as many packets as fit are kept on their way for `length`. Returns packets per TSC tick.
    pub(super) fn closed(&mut self, back_end: &mut BackEnd, length: Duration) -> Result<f64> {
        let (ticks, start) = (tsc::ticks(length), tsc::now());
        let (mut last, mut received) = (start, 0);
        while last - start < ticks || received == 0 {
            ensure!(last - start < ticks + 10 * tsc::ticks(TIMEOUT), "no packet has come back for 10 s");
            back_end.step();
            self.send(WINDOW - self.outstanding())?;
            received += self.receive(None)?;
            last = tsc::now();
        }
        self.gather_in(back_end, None)?;
        Ok(received as f64 / (last - start) as f64)
    }

    /// An open loop: a packet every `interval` TSC ticks for `length`, or longer where that makes too few. Those of the
    /// first fifth do not count; of the others, the times from when they were due until they were taken from the ring go
    /// into `latencies`.
    pub(super) fn open(
        &mut self,
        back_end: &mut BackEnd,
        interval: f64,
        length: Duration,
        latencies: &mut Histogram,
    ) -> Result<()> {
        let packets = ((tsc::ticks(length) as f64 / interval) as u64).max(FEWEST);
        let (first, start) = (self.next, tsc::now());
        let pace = Pace { first, counted: first + packets / 5, end: first + packets, start, interval };
        let mut moved = start;
        while self.next < pace.end {
            back_end.step();
            let received = self.receive(Some((pace, latencies)))?;
            let now = tsc::now();
            let due = pace.due_until(now).saturating_sub(self.next);
            // More would be dropped for want of a buffer to come back to. Those that are held back count from when they
            // were due like all others, while the dropped would be missing among the late.
            let room = usize::from(RING) - self.outstanding();
            let sent = if due > 0 { self.send((due as usize).min(BURST).min(room))? } else { 0 };
            if received + sent > 0 || due == 0 {
                moved = now;
            }
            ensure!(
                now - moved < 10 * tsc::ticks(TIMEOUT),
                "no packet has moved for 10 s; {} are on their way",
                self.outstanding()
            );
        }
        self.gather_in(back_end, Some((pace, latencies)))
    }

    /// Receives what is on its way and sends nothing; what does not come is lost.
    fn gather_in(
        &mut self,
        back_end: &mut BackEnd,
        mut latencies: Option<(Pace, &mut Histogram)>,
    ) -> Result<()> {
        let mut moved = tsc::now();
        while self.outstanding() > 0 {
            back_end.step();
            let latencies = latencies.as_mut().map(|(pace, latencies)| (*pace, &mut **latencies));
            if self.receive(latencies)? > 0 {
                moved = tsc::now();
            } else if tsc::now() - moved > tsc::ticks(TIMEOUT) {
                self.lost += self.outstanding() as u64;
                self.expected = self.next;
            }
        }
        Ok(())
    }

    /// Packets on their way.
    #[inline(always)]
    fn outstanding(&self) -> usize {
        (self.next - self.expected) as usize
    }

    /// Takes up to a burst of packets that have come back, and checks them; their number.
    #[inline]
    fn receive(&mut self, mut latencies: Option<(Pace, &mut Histogram)>) -> Result<usize> {
        let ready = usize::from(self.rx.used()?).min(BURST);
        if ready == 0 {
            return Ok(0);
        }
        let now = tsc::now();
        let mut burst = [(0, 0); BURST];
        let burst = &mut burst[..ready];
        for slot in burst.iter_mut() {
            let Some(used) = self.rx.pop()? else { bail!("the RX ring has fewer packets than it said") };
            prefetch::read(self.pointer(rx_frame(used.token)));
            *slot = (used.token, used.len);
        }
        for &(buffer, len) in burst.iter() {
            let sequence = self.check(buffer, len)?;
            if let Some((pace, latencies)) = &mut latencies
                && sequence >= pace.counted
            {
                latencies.record(now.saturating_sub(pace.due(sequence)));
            }
        }
        for &(buffer, _) in burst.iter().rev() {
            self.post(buffer);
        }
        self.rx.publish();
        self.tx.used()?;
        while let Some(used) = self.tx.pop()? {
            self.free.push(used.token);
        }
        Ok(ready)
    }

    /// Checks a packet that has come back; its sequence number.
    #[inline(always)]
    fn check(&mut self, buffer: u32, len: u32) -> Result<u64> {
        let mut sequence = [0; 8];
        self.mapping().read_at(rx_frame(buffer) + SEQUENCE, &mut sequence);
        let sequence = u64::from_le_bytes(sequence);
        ensure!(
            (self.expected..self.next).contains(&sequence),
            "packet {sequence} has come back where {} was due; those before {} were sent",
            self.expected,
            self.next
        );
        let expected = NET_HEADER + self.frame_len;
        ensure!(
            len as usize == expected,
            "packet {sequence}: {len} bytes have come back, {expected} were sent"
        );
        // Those that are missing before it were dropped.
        self.lost += sequence - self.expected;
        self.expected = sequence + 1;
        self.seen.received += 1;
        if self.seen.received.is_multiple_of(CONTENT_EVERY) {
            self.check_content(buffer, sequence)?;
        }
        Ok(sequence)
    }

    #[inline(never)]
    fn check_content(&mut self, buffer: u32, sequence: u64) -> Result<()> {
        let mut packet = std::mem::take(&mut self.scratch);
        let frame = &mut packet[..self.frame_len];
        self.mapping().read_at(rx_frame(buffer), frame);
        let header = probe::check_header(frame).with_context(|| format!("packet {sequence}"))?;
        ensure!(header.sequence == sequence, "packet {sequence} has changed while it was looked at");
        let addresses = [PEER_MAC.0, PORT_MAC.0].concat();
        ensure!(frame[..12] == addresses, "packet {sequence}: its addresses are {:02x?}", &frame[..12]);
        probe::check_content(frame).with_context(|| format!("packet {sequence}"))?;
        self.seen.verified += 1;
        self.scratch = packet;
        Ok(())
    }

    /// Makes an RX buffer available, not yet visibly.
    #[inline(always)]
    fn post(&mut self, buffer: u32) {
        let at = rx_frame(buffer) - NET_HEADER;
        let len = (STRIDE - (FRAME - NET_HEADER)) as u32;
        // There is room: the ring has a descriptor for each buffer.
        let _ = self.rx.add(self.pointer(at) as u64, len, Direction::Writable, buffer);
    }

    /// Sends up to `count` packets; how many there were buffers for.
    #[inline]
    fn send(&mut self, count: usize) -> Result<usize> {
        let mut sent = 0;
        while sent < count {
            // What the back end still has is sent later.
            let Some(buffer) = self.free.pop() else { break };
            self.mapping().write_at(tx_frame(buffer) + SEQUENCE, &self.next.to_le_bytes());
            let at = self.pointer(tx_frame(buffer) - NET_HEADER) as u64;
            let len = (NET_HEADER + self.frame_len) as u32;
            if self.tx.add(at, len, Direction::Readable, buffer).is_err() {
                bail!("the TX ring has fewer descriptors than buffers");
            }
            self.next += 1;
            sent += 1;
        }
        self.seen.sent += sent as u64;
        self.tx.publish();
        if sent < count && self.rx.used()? == 0 {
            self.reclaim()?;
        }
        Ok(sent)
    }

    /// Takes back TX buffers although no packet has come.
    #[cold]
    fn reclaim(&mut self) -> Result<()> {
        self.tx.used()?;
        while let Some(used) = self.tx.pop()? {
            self.free.push(used.token);
        }
        Ok(())
    }

    #[inline(always)]
    fn mapping(&self) -> &Mapping {
        self.memory.regions()[0].mapping()
    }

    /// The address of byte `offset` of the memory.
    #[inline(always)]
    fn pointer(&self, offset: usize) -> *const u8 {
        self.mapping().base().as_ptr().wrapping_add(offset)
    }
}

/// All buffers of a direction, none beside its neighbour, which the other core would fetch along.
fn scattered() -> impl Iterator<Item = u32> {
    (0..u32::from(RING)).map(|i| i * 77 % u32::from(RING))
}

/// Where the frame of a TX buffer is. RX buffers are behind the TX buffers.
#[inline(always)]
const fn tx_frame(buffer: u32) -> usize {
    buffer as usize * STRIDE + FRAME
}

/// Where the frame of an RX buffer is.
#[inline(always)]
const fn rx_frame(buffer: u32) -> usize {
    tx_frame(buffer + RING as u32)
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

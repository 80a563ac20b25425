//! A front end that sends packets through a back end and checks each returned packet. Alternatively, it consists of two
//! front ends: the first sends and the second receives. The measurement decides when to send.
//!
//! TX buffers are filled once. Afterwards a new packet is a buffer with a new sequence number. Length and sequence
//! number of every returned packet are checked, and every byte of one packet in [`CONTENT_EVERY`]. A returned packet
//! makes room for the next. Both sides poll, without kicks and notifications.
//!
//! The back end is the measured object, so this side must be faster. Between two cores, the number of transferred cache
//! lines determines the speed:
//! - a descriptor of a split virtqueue always refers to the same buffer and is never rewritten,
//! - buffers are not used in the order of their addresses, because the back end's core would prefetch buffers that are
//!   being written here,
//! - data is prefetched before it is needed.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use offcore_mem::{GuestMemory, GuestRegion, HEADROOM, Hugepages, Mapping};
use offcore_ring::device::Direction;
use offcore_ring::driver::RingDriver;
use offcore_ring::prefetch;
use offcore_stats::tsc;
use offcore_vhost::features::{NET_HEADER, VIRTIO_F_INDIRECT_DESC, VIRTIO_NET_F_MRG_RXBUF};
use offcore_vhost::{FrontEnd, FrontEndConfig, MemoryFd};
use offcore_wire::probe::{self, PROBE_LEN, ProbeHeader};
use offcore_wire::template::{UDP_HEADERS_LEN, UdpTemplate};
use offcore_wire::{MacAddr, UdpFlow, ethernet};

use crate::BURST;
use crate::guests::guest::{GUEST_MAC, PEER_MAC, PORT_MAC, Seen};
use crate::guests::workload::Ring;
use crate::method::temperature::STRIDE;

/// Number of descriptors of each virtqueue and of buffers of each direction: virtio's usual size.
pub(crate) const RING: u16 = 256;
/// Packets in flight in a closed loop. At least as many RX buffers are always available, so that no packet is dropped.
pub(crate) const WINDOW: usize = 128;
/// One packet in this many is checked byte by byte, unless all packets are checked.
pub(crate) const CONTENT_EVERY: u32 = 64;

/// Offset of a frame in its buffer, as in a packet buffer. The virtio-net header precedes it.
const FRAME: usize = HEADROOM;
/// Offset of the sequence number in a frame.
const SEQUENCE: usize = UDP_HEADERS_LEN + PROBE_LEN - 8;
/// Time without a returned packet after which the back end counts as stalled.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A front end and its memory: TX buffers, then RX buffers.
#[derive(Debug)]
struct Guest {
    front_end: FrontEnd,
    memory: Arc<GuestMemory>,
}

impl Guest {
    /// Connects a front end to `socket` without starting it.
    fn connect(socket: &Path, ring: Ring, hugepages: Hugepages) -> Result<Self> {
        let buffers = usize::from(RING);
        let (mapping, fd) = Mapping::memfd("bench-front-end", 2 * buffers * STRIDE, hugepages)?;
        let (address, len) = (mapping.base().as_ptr() as u64, mapping.len() as u64);
        let region = GuestRegion::new(address, address, len, mapping, 0)?;
        let memory = Arc::new(GuestMemory::new(vec![region])?);
        let config = FrontEndConfig {
            queue_size: RING,
            features: VIRTIO_NET_F_MRG_RXBUF | VIRTIO_F_INDIRECT_DESC | ring.features(),
            ..FrontEndConfig::new(socket)
        };
        let shared = MemoryFd::new(memory.regions()[0].mapping(), fd.as_fd());
        let front_end = FrontEnd::connect(&config, &[shared]).context("connecting to the back end")?;
        ensure!(
            front_end.features() & Ring::Packed.features() == ring.features(),
            "the back end does not agree to {ring} virtqueues"
        );
        Ok(Self { front_end, memory })
    }

    /// Returns the driver's side of virtqueue `index`.
    fn queue(&self, index: usize) -> Result<RingDriver<u32>> {
        let queue = self.front_end.queues().get(index).context("expected two virtqueues")?;
        let mut queue = RingDriver::new(queue.layout(), false);
        queue.set_notification(false);
        Ok(queue)
    }
}

/// Handling of a packet's addresses on its way.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Way {
    /// The back end writes [`PEER_MAC`] as the destination and this address, if it is known, as the source.
    Rewritten(Option<MacAddr>),
    /// The addresses remain unchanged. The receiver is a station with the address [`PEER_MAC`], which a learning switch
    /// knows.
    Switched,
}

impl Way {
    /// Returns the addresses of a sent packet.
    fn flow(self) -> UdpFlow {
        match self {
            Self::Rewritten(_) => UdpFlow::txonly(GUEST_MAC, PORT_MAC),
            Self::Switched => UdpFlow::txonly(GUEST_MAC, PEER_MAC),
        }
    }

    /// Returns the source address of a received packet, if it is known.
    fn source(self) -> Option<MacAddr> {
        match self {
            Self::Rewritten(source) => source,
            Self::Switched => Some(GUEST_MAC),
        }
    }
}

/// Front ends and their packets.
#[derive(Debug)]
pub(crate) struct RoundTrips {
    guests: Vec<Guest>,
    tx_memory: Arc<GuestMemory>,
    rx_memory: Arc<GuestMemory>,
    rx: RingDriver<u32>,
    tx: RingDriver<u32>,
    /// TX buffers that the back end does not hold. They are used in LIFO order, like the ring's descriptors.
    free: Vec<u32>,
    frame_len: usize,
    way: Way,
    scratch: Vec<u8>,
    /// Sequence number of the next packet to send.
    next: u64,
    /// Sequence number of the next packet to return.
    expected: u64,
    content_every: u32,
    until_content: u32,
    seen: Seen,
    lost: u64,
    timeout: Duration,
}

impl RoundTrips {
    /// Connects to the back end at `sockets` and starts its virtqueues. Packets are sent to the first socket and
    /// received from the last. Nothing is sent yet. Frames are `frame` bytes long, including the FCS.
    pub(crate) fn connect(
        sockets: &[PathBuf],
        ring: Ring,
        frame: usize,
        way: Way,
        hugepages: Hugepages,
    ) -> Result<Self> {
        let guests: Vec<_> =
            sockets.iter().map(|socket| Guest::connect(socket, ring, hugepages)).collect::<Result<_>>()?;
        let (Some(from), Some(to)) = (guests.first(), guests.last()) else { bail!("expected a socket") };
        // Created before the back end starts its side, because creation zeroes the rings.
        let (rx, tx) = (to.queue(0)?, from.queue(1)?);
        let mut load = Self {
            tx_memory: Arc::clone(&from.memory),
            rx_memory: Arc::clone(&to.memory),
            rx,
            tx,
            free: scattered().collect(),
            frame_len: frame.saturating_sub(ethernet::FCS_LEN),
            way,
            scratch: vec![0; STRIDE],
            next: 0,
            expected: 0,
            content_every: CONTENT_EVERY,
            until_content: 1,
            seen: Seen::default(),
            lost: 0,
            timeout: TIMEOUT,
            guests,
        };
        load.prepare()?;
        for guest in &mut load.guests {
            guest.front_end.start().context("starting the virtqueues")?;
        }
        Ok(load)
    }

    /// Fills the TX buffers and makes the RX buffers available.
    fn prepare(&mut self) -> Result<()> {
        let template = UdpTemplate::new(&self.way.flow(), self.frame_len).context("frame length")?;
        let end = NET_HEADER + self.frame_len;
        for buffer in 0..u32::from(RING) {
            let packet = &mut self.scratch[..end];
            packet[..NET_HEADER].fill(0);
            let frame = &mut packet[NET_HEADER..];
            template.write(frame)?;
            probe::write(frame, ProbeHeader { fill: buffer ^ 0x5eed, sequence: 0 })?;
            self.tx_mapping().write_at(tx_frame(buffer) - NET_HEADER, &self.scratch[..end]);
        }
        scattered().for_each(|buffer| self.post(buffer));
        self.rx.publish();
        Ok(())
    }

    /// Makes the receiver send a packet, so that a switch learns its port. The back end must be running.
    pub(crate) fn introduce(&mut self) -> Result<()> {
        let receiver = self.guests.last().context("there is a guest")?;
        let mut tx = receiver.queue(1)?;
        let len = probe::MIN_FRAME_LEN.max(60);
        let packet = &mut self.scratch[..NET_HEADER + len];
        packet[..NET_HEADER].fill(0);
        UdpTemplate::new(&UdpFlow::txonly(PEER_MAC, GUEST_MAC), len)?.write(&mut packet[NET_HEADER..])?;
        self.rx_mapping().write_at(tx_frame(0) - NET_HEADER, &self.scratch[..NET_HEADER + len]);
        let at = pointer(self.rx_mapping(), tx_frame(0) - NET_HEADER) as u64;
        let added = tx.add(at, (NET_HEADER + len) as u32, Direction::Readable, 0);
        ensure!(added.is_ok(), "the receiver's TX ring is empty and has no room");
        tx.publish();
        let start = tsc::now();
        while tx.used()? == 0 {
            ensure!(tsc::now() - start < tsc::ticks(self.timeout), "the receiver's packet was not taken");
        }
        Ok(())
    }

    /// Returns the virtio features that the sending guest has negotiated.
    pub(crate) fn features(&self) -> u64 {
        self.guests.first().map_or(0, |guest| guest.front_end.features())
    }

    /// Returns the packet counters so far.
    pub(crate) fn seen(&self) -> Seen {
        self.seen
    }

    /// Returns the number of packets that did not come back.
    pub(crate) fn lost(&self) -> u64 {
        self.lost
    }

    /// Returns the time without a returned packet after which the back end counts as stalled.
    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Selects whether every packet is checked byte by byte, or one in [`CONTENT_EVERY`].
    pub(crate) fn check_all(&mut self, all: bool) {
        self.content_every = if all { 1 } else { CONTENT_EVERY };
    }

    /// Receives the packets in flight with `receive` without sending. Packets that do not arrive within `timeout` count
    /// as lost.
    pub(crate) fn gather_in(
        &mut self,
        timeout: Duration,
        mut receive: impl FnMut(&mut Self) -> Result<usize>,
    ) -> Result<()> {
        let timeout = tsc::ticks(timeout);
        let mut moved = tsc::now();
        while self.outstanding() > 0 {
            if receive(self)? > 0 {
                moved = tsc::now();
            } else if tsc::now() - moved > timeout {
                self.lost += self.outstanding() as u64;
                self.expected = self.next;
            }
        }
        Ok(())
    }

    /// Sets a shorter timeout.
    #[cfg(test)]
    pub(crate) fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// Returns the number of packets in flight.
    #[inline(always)]
    pub(crate) fn outstanding(&self) -> usize {
        (self.next - self.expected) as usize
    }

    /// Returns the sequence number of the next packet to send.
    #[inline(always)]
    pub(crate) fn next(&self) -> u64 {
        self.next
    }

    /// Returns the number of returned packets, up to a burst.
    #[inline(always)]
    pub(crate) fn ready(&mut self) -> Result<usize> {
        Ok(usize::from(self.rx.used()?).min(BURST))
    }

    /// Takes up to a burst of returned packets and checks them. Returns their number.
    #[inline]
    pub(crate) fn receive(&mut self) -> Result<usize> {
        let ready = self.ready()?;
        if ready > 0 {
            self.take(ready, |_| ())?;
        }
        Ok(ready)
    }

    /// Takes and checks `ready` packets, the number that [`RoundTrips::ready`] returned. `each` gets their sequence
    /// numbers.
    #[inline]
    pub(crate) fn take(&mut self, ready: usize, mut each: impl FnMut(u64)) -> Result<()> {
        let mut burst = [(0, 0); BURST];
        let burst = &mut burst[..ready];
        for slot in burst.iter_mut() {
            let Some(used) = self.rx.pop()? else { bail!("the RX ring has fewer packets than it said") };
            prefetch::read(pointer(self.rx_mapping(), rx_frame(used.token)));
            *slot = (used.token, used.len);
        }
        self.reclaim()?;
        // The back end was the last to read the sequence numbers of the buffers that are sent next.
        for &buffer in self.free.iter().rev().take(ready) {
            prefetch::write(pointer(self.tx_mapping(), tx_frame(buffer)));
        }
        for &(buffer, len) in burst.iter() {
            each(self.check(buffer, len)?);
        }
        // Each buffer returns to its own descriptor: the last freed descriptor is used first.
        for &(buffer, _) in burst.iter().rev() {
            self.post(buffer);
        }
        self.rx.publish();
        Ok(())
    }

    /// Reclaims TX buffers.
    #[inline(always)]
    fn reclaim(&mut self) -> Result<()> {
        self.tx.used()?;
        while let Some(used) = self.tx.pop()? {
            self.free.push(used.token);
        }
        Ok(())
    }

    /// Checks a returned packet. Returns its sequence number.
    #[inline(always)]
    fn check(&mut self, buffer: u32, len: u32) -> Result<u64> {
        let mut sequence = [0; 8];
        self.rx_mapping().read_at(rx_frame(buffer) + SEQUENCE, &mut sequence);
        let sequence = u64::from_le_bytes(sequence);
        if sequence != self.expected {
            self.check_gap(sequence)?;
        }
        let expected = NET_HEADER + self.frame_len;
        ensure!(
            len as usize == expected,
            "packet {sequence}: {len} bytes have come back, {expected} were sent"
        );
        self.expected = sequence + 1;
        self.seen.received += 1;
        self.until_content -= 1;
        if self.until_content == 0 {
            self.until_content = self.content_every;
            self.check_content(buffer, sequence)?;
        }
        Ok(sequence)
    }

    /// Handles an unexpected sequence number: the skipped packets are lost. Fails if the number is implausible.
    #[cold]
    fn check_gap(&mut self, sequence: u64) -> Result<()> {
        ensure!(
            (self.expected..self.next).contains(&sequence),
            "packet {sequence} has come back where {} was due; those before {} were sent",
            self.expected,
            self.next
        );
        self.lost += sequence - self.expected;
        Ok(())
    }

    #[inline(never)]
    fn check_content(&mut self, buffer: u32, sequence: u64) -> Result<()> {
        let mut packet = std::mem::take(&mut self.scratch);
        let frame = &mut packet[..self.frame_len];
        self.rx_mapping().read_at(rx_frame(buffer), frame);
        let header = probe::check_header(frame).with_context(|| format!("packet {sequence}"))?;
        ensure!(header.sequence == sequence, "packet {sequence} has changed while it was looked at");
        ensure!(
            frame[..6] == PEER_MAC.0 && self.way.source().is_none_or(|source| frame[6..12] == source.0),
            "packet {sequence}: its addresses are {:02x?}",
            &frame[..12]
        );
        probe::check_content(frame).with_context(|| format!("packet {sequence}"))?;
        self.seen.verified += 1;
        self.scratch = packet;
        Ok(())
    }

    /// Adds an RX buffer without publishing it.
    #[inline(always)]
    fn post(&mut self, buffer: u32) {
        let at = rx_frame(buffer) - NET_HEADER;
        let len = (STRIDE - (FRAME - NET_HEADER)) as u32;
        // The ring has a descriptor for each buffer.
        let _ = self.rx.add(pointer(self.rx_mapping(), at) as u64, len, Direction::Writable, buffer);
    }

    /// Sends up to `count` packets. Returns the number sent, which is limited by free buffers.
    #[inline]
    pub(crate) fn send(&mut self, count: usize) -> Result<usize> {
        let mut sent = 0;
        while sent < count {
            // A back end may return TX buffers late. The remaining packets are sent in a later call.
            let Some(buffer) = self.free.pop() else { break };
            self.tx_mapping().write_at(tx_frame(buffer) + SEQUENCE, &self.next.to_le_bytes());
            let at = pointer(self.tx_mapping(), tx_frame(buffer) - NET_HEADER) as u64;
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

    #[inline(always)]
    fn tx_mapping(&self) -> &Mapping {
        self.tx_memory.regions()[0].mapping()
    }

    #[inline(always)]
    fn rx_mapping(&self) -> &Mapping {
        self.rx_memory.regions()[0].mapping()
    }
}

/// Returns the address of byte `offset` of a memory.
#[inline(always)]
fn pointer(memory: &Mapping, offset: usize) -> *const u8 {
    memory.base().as_ptr().wrapping_add(offset)
}

/// Returns all buffers of a direction, so that consecutive buffers are not adjacent in memory.
fn scattered() -> impl Iterator<Item = u32> {
    // Coprime to the number of buffers, so that each buffer occurs once.
    const STEP: u32 = 77;
    (0..u32::from(RING)).map(|i| i * STEP % u32::from(RING))
}

/// Returns the offset of a TX buffer's frame. RX buffers follow the TX buffers.
#[inline(always)]
const fn tx_frame(buffer: u32) -> usize {
    buffer as usize * STRIDE + FRAME
}

/// Returns the offset of an RX buffer's frame.
#[inline(always)]
const fn rx_frame(buffer: u32) -> usize {
    tx_frame(buffer + RING as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequence_gap_is_loss_repeat_is_error() {
        let dir = crate::peer::tempdir::TempDir::new().unwrap();
        let (_back_end, mut load) = crate::vhost::end_to_end::tests::pair(&dir, offcore_flow::Forward::Mac);
        (load.expected, load.next) = (3, 10);
        assert!(load.check_gap(5).is_ok());
        assert_eq!(load.lost(), 2);
        for sequence in [2, 10] {
            let error = load.check_gap(sequence).unwrap_err().to_string();
            assert!(error.contains("where 3 was due"), "{error}");
        }
    }

    #[test]
    fn sequence_number_place_matches_probe() {
        let mut frame = [0; 60];
        probe::write(&mut frame, ProbeHeader { fill: 7, sequence: 1 }).unwrap();
        let mut patched = frame;
        probe::patch_sequence(&mut patched, 0x0102_0304_0506_0708).unwrap();
        frame[SEQUENCE..SEQUENCE + 8].copy_from_slice(&0x0102_0304_0506_0708u64.to_le_bytes());
        assert_eq!(frame, patched);
    }

    #[test]
    fn every_buffer_is_named_once() {
        let named: std::collections::BTreeSet<u32> = scattered().collect();
        assert_eq!(named, (0..u32::from(RING)).collect());
    }

    #[test]
    fn header_and_sequence_number_share_a_line() {
        assert!(FRAME.is_multiple_of(prefetch::LINE) && SEQUENCE + 8 <= prefetch::LINE);
        assert!(WINDOW <= usize::from(RING) && FRAME >= NET_HEADER);
    }
}

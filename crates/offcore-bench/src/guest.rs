//! The guests of a core-cost measurement: one fills TX buffers, one (the same, or another) takes RX buffers back and
//! checks every packet. What the measured core spends is not in here; what the guests spend on their virtqueues and on
//! writing and reading packets is timed, too, and what they spend on making and checking them is not.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result, bail};
use offcore_mem::{GuestMemory, Mapping};
use offcore_ring::device::Direction;
use offcore_ring::split::DESC_NEXT;
use offcore_ring::{Layout, driver};
use offcore_stats::tsc;
use offcore_vhost::features::NET_HEADER;
use offcore_wire::ethernet::FCS_LEN;
use offcore_wire::probe::{self, ProbeHeader};
use offcore_wire::template::{UDP_HEADERS_LEN, UdpTemplate};
use offcore_wire::virtio_net::{self, NetHeader};
use offcore_wire::{MacAddr, UdpFlow};

use crate::temperature::{BUFFER, Temperature};
use crate::workload::{GuestKind, Workload};

/// The address that the forwarding under test writes as source.
pub const PORT_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 0xa0]);
/// The address that it writes as destination.
pub const PEER_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 0xb0]);
/// The sending guest's own address.
pub(crate) const GUEST_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 1]);

/// Packets that a guest writes or reads at a time, between two readings of the clock.
const GROUP: usize = 16;

/// A Linux guest sends shorter packets in one piece, with virtio-net header.
const LINEAR: usize = 128;
/// Bytes of its first piece otherwise: virtio-net, Ethernet, IPv4 and UDP headers.
const HEADERS: usize = NET_HEADER + UDP_HEADERS_LEN;
/// Where the second one begins in the buffer: in lines of its own, as a fragment is in a page of its own.
const PAYLOAD: usize = 256;
/// Bytes of a table of two indirect descriptors.
const TABLE: usize = 32;
/// Its header says: the UDP checksum, which begins at the UDP header, is left to the device.
const NEEDS_CSUM: NetHeader = NetHeader {
    flags: virtio_net::F_NEEDS_CSUM,
    gso_type: virtio_net::GSO_NONE,
    hdr_len: 0,
    gso_size: 0,
    csum_start: 34,
    csum_offset: 6,
    num_buffers: 0,
};

/// Bytes of the buffers of one direction.
pub fn buffers_len(temperature: Temperature) -> usize {
    temperature.buffers() * BUFFER
}

/// What the guests have seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Packets made available.
    pub sent: u64,
    /// Packets received, in order, with the right length and addresses.
    pub received: u64,
    /// Of those, packets whose content was checked byte by byte.
    pub verified: u64,
}

/// Buffers of one direction, in the first region of a guest's memory.
#[derive(Debug)]
struct Buffers {
    memory: Arc<GuestMemory>,
    /// Offset of the first in the region.
    base: usize,
    order: Vec<u32>,
    next: usize,
    /// Only so many of them are used.
    few: usize,
}

impl Buffers {
    fn new(memory: &Arc<GuestMemory>, base: usize, order: Vec<u32>) -> Result<Self> {
        let len = memory.regions().first().map_or(0, |region| region.mapping().len());
        let needed = base + order.len() * BUFFER;
        if len < needed {
            bail!("{len} bytes of guest memory: {} buffers from byte {base} on need {needed}", order.len());
        }
        Ok(Self { memory: Arc::clone(memory), base, few: order.len(), order, next: 0 })
    }

    fn next(&mut self) -> u32 {
        let buffer = self.order[self.next];
        self.next = (self.next + 1) % self.few;
        buffer
    }

    /// From now on as few buffers as data of this temperature has.
    fn become_as(&mut self, temperature: Temperature) {
        self.few = temperature.buffers().min(self.order.len());
        self.next %= self.few;
    }

    fn offset(&self, buffer: u32) -> usize {
        self.base + buffer as usize * BUFFER
    }

    /// The guest address of a buffer.
    fn address(&self, buffer: u32) -> u64 {
        self.memory.regions()[0].guest() + self.offset(buffer) as u64
    }

    fn mapping(&self) -> &Mapping {
        self.memory.regions()[0].mapping()
    }
}

/// The packets of one or two guests and the buffers that they are in, which all variants of a cell share: they take turns,
/// and each leaves every buffer to the next. So a buffer is as warm as the temperature says, however many variants there
/// are.
#[derive(Debug)]
pub struct Traffic {
    sent: Buffers,
    received: Buffers,
    temperature: Temperature,
    kind: GuestKind,
    /// By the packet's number, in turn.
    templates: Vec<UdpTemplate>,
    /// The number of the packet in each TX buffer.
    holds: Vec<u64>,
    sequence: u64,
    scratch: Vec<u8>,
}

impl Traffic {
    /// The packets of `workload` between these two guests. The buffers of each are in the first region of its memory, and
    /// its virtqueues behind them; where both are one guest, the buffers that it receives in come after those that it sends.
    ///
    /// # Errors
    /// When the frame length is impossible or the memory too small.
    pub fn new(from: &Arc<GuestMemory>, to: &Arc<GuestMemory>, workload: &Workload) -> Result<Self> {
        Self::over(from, to, workload, workload.temperature.buffers())
    }

    /// As [`Traffic::new`], with so many buffers in each direction.
    fn over(
        from: &Arc<GuestMemory>,
        to: &Arc<GuestMemory>,
        workload: &Workload,
        buffers: usize,
    ) -> Result<Self> {
        let &Workload { temperature, guest: kind, .. } = workload;
        let base = if Arc::ptr_eq(from, to) { buffers * BUFFER } else { 0 };
        let [sending, mut receiving] = [11, 23].map(|seed| {
            let mut order = temperature.order(seed);
            order.retain(|&buffer| (buffer as usize) < buffers);
            order
        });
        if temperature == Temperature::Cold {
            // Cold packets are written once. One buffer fewer to receive in, so that on its next turn each gets another
            // packet: what an earlier one has left there is not what is due.
            receiving.pop();
        }
        let flow = UdpFlow::txonly(GUEST_MAC, PORT_MAC);
        let templates = workload.frames().into_iter().map(|frame| UdpTemplate::new(&flow, frame - FCS_LEN));
        let templates = templates.collect::<Result<Vec<_>, _>>().context("frame length")?;
        let mut traffic = Self {
            sent: Buffers::new(from, 0, sending)?,
            received: Buffers::new(to, base, receiving)?,
            temperature,
            kind,
            templates,
            holds: vec![0; buffers],
            sequence: 0,
            scratch: vec![0; GROUP * BUFFER],
        };
        if temperature == Temperature::Cold {
            for _ in 0..buffers {
                let buffer = traffic.sent.next();
                let len = traffic.make(buffer, 0)?;
                traffic.put(buffer, 0, len);
            }
        }
        Ok(traffic)
    }

    /// From now on data of this temperature, in as many of the buffers as it has.
    pub(crate) fn become_as(&mut self, temperature: Temperature) {
        self.temperature = temperature;
        self.sent.become_as(temperature);
        self.received.become_as(temperature);
    }

    fn template(&self, sequence: u64) -> &UdpTemplate {
        &self.templates[sequence as usize % self.templates.len()]
    }

    /// Bytes of a packet with virtio-net header.
    fn len(&self, sequence: u64) -> usize {
        NET_HEADER + self.template(sequence).frame_len()
    }

    /// Bytes between two packets of a group: no more than they need, so that they stay in the first-level cache.
    fn stride(&self) -> usize {
        let longest = self.templates.iter().map(UdpTemplate::frame_len).max().unwrap_or(0);
        (NET_HEADER + longest).next_multiple_of(64)
    }

    /// Makes the next packet, which is to be put into `buffer`, as number `at` of a group; its length with header.
    fn make(&mut self, buffer: u32, at: usize) -> Result<usize> {
        let sequence = self.sequence;
        self.sequence += 1;
        self.holds[buffer as usize] = sequence;
        let start = at * self.stride();
        let len = self.len(sequence);
        let Self { scratch, templates, kind, .. } = self;
        let packet = &mut scratch[start..start + len];
        // copy-ok: the guest makes its own packet
        packet[..NET_HEADER].copy_from_slice(&match kind {
            GuestKind::Simple => [0; NET_HEADER],
            GuestKind::Linux => NEEDS_CSUM.to_bytes(),
        });
        let frame = &mut packet[NET_HEADER..];
        templates[sequence as usize % templates.len()].write(frame)?;
        probe::write(frame, ProbeHeader { fill: sequence as u32 ^ 0x5eed, sequence })?;
        Ok(len)
    }

    /// Puts packet `at` of a group, `len` bytes long, into `buffer`.
    fn put(&self, buffer: u32, at: usize, len: usize) {
        let start = at * self.stride();
        let (mapping, offset) = (self.sent.mapping(), self.sent.offset(buffer));
        let packet = &self.scratch[start..start + len];
        if self.in_pieces(len) {
            mapping.write_at(offset, &packet[..HEADERS]);
            mapping.write_at(offset + PAYLOAD, &packet[HEADERS..]);
        } else {
            mapping.write_at(offset, packet);
        }
    }

    /// Whether the guest sends `len` bytes, virtio-net header included, in two pieces.
    fn in_pieces(&self, len: usize) -> bool {
        self.kind == GuestKind::Linux && len > LINEAR + NET_HEADER
    }

    /// Writes the table of the two pieces of `len` bytes in `buffer` to `offset` of the region; its guest address.
    fn write_table(&self, offset: usize, buffer: u32, len: usize, packed: bool) -> u64 {
        let address = self.sent.address(buffer);
        let pieces = [(address, HEADERS), (address + PAYLOAD as u64, len - HEADERS)];
        let mut table = [0; TABLE];
        for (i, ((address, len), entry)) in pieces.into_iter().zip(table.as_chunks_mut::<16>().0).enumerate()
        {
            let last = i == pieces.len() - 1;
            // Split: flags, next. Packed: buffer id, flags, and the order in the table is that of the chain.
            let (flags, next) = if last { (0, 0) } else { (DESC_NEXT, 1) };
            let words: [u16; 2] = if packed { [0, 0] } else { [flags, next] };
            let bytes = u128::from(address)
                | (len as u128) << 64
                | u128::from(words[0]) << 96
                | u128::from(words[1]) << 112;
            *entry = bytes.to_le_bytes();
        }
        self.sent.mapping().write_at(offset, &table);
        self.sent.memory.regions()[0].guest() + offset as u64
    }

    /// Reads the packet of `len` bytes in `buffer` as number `at` of a group.
    fn take(&mut self, buffer: u32, at: usize, len: usize) {
        let start = at * self.stride();
        let packet = &mut self.scratch[start..start + len];
        self.received.mapping().read_at(self.received.offset(buffer), packet);
    }

    /// Checks packet `at` of a group, where number `expected` is due.
    fn check(&self, at: usize, len: usize, expected: u64) -> Result<()> {
        let end = self.len(expected);
        if len != end {
            bail!("packet {expected}: {len} bytes arrived, {end} were sent");
        }
        let start = at * self.stride();
        let frame = &self.scratch[start + NET_HEADER..start + len];
        let header = probe::check_header(frame).with_context(|| format!("packet {expected}"))?;
        if header.sequence != expected {
            bail!("packet {} arrived where {expected} was due", header.sequence);
        }
        if frame[..6] != PEER_MAC.0 || frame[6..12] != PORT_MAC.0 {
            bail!("packet {expected}: its addresses were not rewritten");
        }
        probe::check_content(frame).with_context(|| format!("packet {expected}"))
    }
}

/// The driver's side of one TX and one RX virtqueue: those of one guest, or of two.
#[derive(Debug)]
pub struct Guests {
    traffic: Arc<Mutex<Traffic>>,
    tx: driver::Queue<u32>,
    rx: driver::Queue<u32>,
    /// Where the tables of indirect descriptors are in the region of the guest that sends, and the next one.
    tables: usize,
    next_table: usize,
    /// RX buffers to be kept available.
    window: usize,
    /// The numbers of packets on their way.
    expected: VecDeque<u64>,
    seen: Seen,
    ticks: u64,
}

impl Guests {
    /// The driver's side of `rx` and `tx`, which move the packets of `traffic`. Both virtqueues are set to what one begins
    /// with. From `tables` on in the region of the guest that sends there are 32 bytes for each descriptor of `tx`.
    pub fn new(traffic: &Arc<Mutex<Traffic>>, (rx, tx): (Layout, Layout), tables: usize) -> Self {
        let event_idx = lock(traffic).kind == GuestKind::Linux;
        let mut guests = Self {
            traffic: Arc::clone(traffic),
            tx: driver::Queue::new(tx, event_idx),
            rx: driver::Queue::new(rx, event_idx),
            tables,
            next_table: 0,
            window: lock(traffic).temperature.window(),
            expected: VecDeque::new(),
            seen: Seen::default(),
            ticks: 0,
        };
        // A worker that polls needs no notifications, and neither do these guests.
        guests.tx.set_notification(false);
        guests.rx.set_notification(false);
        let mut traffic = lock(&guests.traffic);
        replenish(&mut guests.rx, &mut traffic.received, guests.window);
        drop(traffic);
        guests
    }

    /// From now on data of this temperature: see [`Traffic`]. What a variant has posted to receive in stays.
    pub(crate) fn become_as(&self, temperature: Temperature) {
        lock(&self.traffic).become_as(temperature);
    }

    /// What has been seen so far.
    pub fn seen(&self) -> Seen {
        self.seen
    }

    /// TSC ticks that the guests have spent on their virtqueues, on writing packets and on reading them.
    pub fn ticks(&self) -> u64 {
        self.ticks
    }

    /// Makes `packets` packets available for transmission.
    ///
    /// # Errors
    /// When the ring has no room: the device under test has not returned what it was given.
    pub fn transmit(&mut self, packets: usize) -> Result<()> {
        let mut traffic = lock(&self.traffic);
        let mut left = packets;
        while left > 0 {
            let group = left.min(GROUP);
            let mut made = [(0, 0); GROUP];
            let cold = traffic.temperature == Temperature::Cold;
            for (at, made) in made[..group].iter_mut().enumerate() {
                let buffer = traffic.sent.next();
                let len = match cold {
                    true => traffic.len(traffic.holds[buffer as usize]),
                    false => traffic.make(buffer, at)?,
                };
                *made = (buffer, len);
                self.expected.push_back(traffic.holds[buffer as usize]);
            }
            let start = tsc::now();
            for (at, &(buffer, len)) in made[..group].iter().enumerate() {
                if !cold {
                    traffic.put(buffer, at, len);
                }
                let added = if traffic.in_pieces(len) {
                    let at = self.tables + self.next_table * TABLE;
                    self.next_table = (self.next_table + 1) % usize::from(self.tx.size());
                    let packed = matches!(self.tx, driver::Queue::Packed(_));
                    self.tx.add_indirect(traffic.write_table(at, buffer, len, packed), TABLE as u32, buffer)
                } else {
                    self.tx.add(traffic.sent.address(buffer), len as u32, Direction::Readable, buffer)
                };
                if added.is_err() {
                    bail!("the TX ring is full: {} chains were not returned", self.tx.in_flight());
                }
            }
            self.ticks += tsc::now() - start;
            left -= group;
        }
        let start = tsc::now();
        self.tx.publish();
        self.ticks += tsc::now() - start;
        self.seen.sent += packets as u64;
        Ok(())
    }

    /// Takes back what was returned, and checks every received packet.
    ///
    /// # Errors
    /// When a packet is missing, out of order or not what was sent.
    pub fn collect(&mut self) -> Result<()> {
        let mut traffic = lock(&self.traffic);
        let start = tsc::now();
        while self.tx.used()? > 0 {
            while self.tx.pop()?.is_some() {}
        }
        self.ticks += tsc::now() - start;
        loop {
            let (mut group, mut lens) = (0, [0; GROUP]);
            let start = tsc::now();
            while group < GROUP && self.rx.used()? > 0 {
                let Some(used) = self.rx.pop()? else { break };
                lens[group] = used.len as usize;
                let len = lens[group].min(traffic.stride());
                traffic.take(used.token, group, len);
                group += 1;
            }
            self.ticks += tsc::now() - start;
            for (at, &len) in lens[..group].iter().enumerate() {
                let expected =
                    self.expected.pop_front().context("a packet was received that was never sent")?;
                traffic.check(at, len, expected)?;
                self.seen.received += 1;
                self.seen.verified += 1;
            }
            if group < GROUP {
                break;
            }
        }
        let start = tsc::now();
        replenish(&mut self.rx, &mut traffic.received, self.window);
        self.ticks += tsc::now() - start;
        Ok(())
    }

    /// Packets sent and not yet received.
    pub fn outstanding(&self) -> usize {
        self.expected.len()
    }
}

/// Keeps a window of buffers available.
fn replenish(queue: &mut driver::Queue<u32>, buffers: &mut Buffers, window: usize) {
    while usize::from(queue.in_flight()) < window.min(queue.size().into()) {
        let buffer = buffers.next();
        // There is room: no more than the ring's size are in flight, one descriptor each.
        let _ = queue.add(buffers.address(buffer), BUFFER as u32, Direction::Writable, buffer);
    }
    queue.publish();
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use offcore_mem::{GuestRegion, Hugepages};
    use offcore_ring::device::{self, Buffer, DeviceQueue};
    use offcore_ring::with_queue;
    use offcore_vhost::frontend::ring_parts;

    const BUFFERS: usize = 512;
    const RING: u16 = 256;
    const WINDOW: usize = 64;

    /// A guest that sends to itself, and a device that copies as it is told.
    struct Looped {
        guests: Guests,
        memory: Arc<GuestMemory>,
        rx: device::Queue,
        tx: device::Queue,
    }

    impl Looped {
        fn new(temperature: Temperature) -> Self {
            let buffers = if temperature == Temperature::Cold { BUFFERS } else { temperature.buffers() };
            let (mapping, _fd) =
                Mapping::memfd("guest", 2 * buffers * BUFFER + (1 << 16), Hugepages::None).unwrap();
            let address = mapping.base().as_ptr() as u64;
            let region = GuestRegion::new(address, address, mapping.len() as u64, mapping, 0).unwrap();
            let memory = Arc::new(GuestMemory::new(vec![region]).unwrap());
            let workload = Workload::table8(temperature, 512);
            let traffic = Traffic::over(&memory, &memory, &workload, buffers).unwrap();
            let ring = |index| {
                let parts = ring_parts(address + (2 * buffers * BUFFER) as u64, index, RING, false);
                Layout::in_memory(&memory, parts, RING.into(), false).unwrap()
            };
            let guests = Guests::new(&Arc::new(Mutex::new(traffic)), (ring(0), ring(1)), 0);
            let [rx, tx] =
                [ring(0), ring(1)].map(|layout| device::Queue::new(layout, 0, false, false).unwrap());
            Self { guests, memory, rx, tx }
        }

        /// Moves a window of packets; `spoil` gets what arrives and what was in the buffer before.
        fn window(&mut self, spoil: impl Fn(&mut [u8], &[u8])) -> Result<()> {
            self.guests.transmit(WINDOW)?;
            let Self { memory, rx, tx, .. } = self;
            let mapping = memory.regions()[0].mapping();
            let offset = |buffer: &Buffer| buffer.addr.as_ptr() as usize - mapping.base().as_ptr() as usize;
            for _ in 0..WINDOW {
                let [mut packet, mut before] = [[0; BUFFER]; 2];
                let len = with_queue!(&mut *tx, queue => {
                    queue.look(1)?;
                    let (buffer, chain) =
                        queue.single(0, memory, Direction::Readable)?.context("one buffer")?;
                    mapping.read_at(offset(&buffer), &mut packet[..buffer.len as usize]);
                    queue.push_used(chain, 0);
                    queue.consume(1);
                    queue.publish();
                    buffer.len as usize
                });
                packet[NET_HEADER..NET_HEADER + 6].copy_from_slice(&PEER_MAC.0); // copy-ok: a test
                packet[NET_HEADER + 6..NET_HEADER + 12].copy_from_slice(&PORT_MAC.0); // copy-ok: a test
                with_queue!(&mut *rx, queue => {
                    queue.look(1)?;
                    let (buffer, chain) =
                        queue.single(0, memory, Direction::Writable)?.context("one buffer")?;
                    mapping.read_at(offset(&buffer), &mut before);
                    spoil(&mut packet[..len], &before[..len]);
                    mapping.write_at(offset(&buffer), &packet[..len]);
                    queue.push_used(chain, len as u32);
                    queue.consume(1);
                    queue.publish();
                });
            }
            self.guests.collect()
        }
    }

    /// Passes over all buffers, after which everything in them has been right once.
    fn passed(temperature: Temperature) -> Looped {
        let mut looped = Looped::new(temperature);
        for _ in 0..3 * BUFFERS / WINDOW {
            looped.window(|_, _| ()).unwrap();
        }
        let seen = looped.guests.seen();
        assert_eq!((seen.received, seen.verified), (seen.sent, seen.sent));
        assert!(looped.guests.ticks() > 0);
        looped
    }

    #[test]
    fn a_packet_that_was_not_copied_is_noticed_on_every_pass() {
        for temperature in [Temperature::Remote, Temperature::Cold] {
            // Nothing is written: what an earlier packet has left is there.
            let error = passed(temperature).window(|packet, before| packet.clone_from_slice(before));
            let error = format!("{:#}", error.unwrap_err());
            assert!(error.contains("where") && error.contains("was due"), "{temperature}: {error}");
        }
    }

    #[test]
    fn a_byte_is_noticed_on_every_pass() {
        for temperature in [Temperature::Remote, Temperature::Cold] {
            // The last line of each packet is left as an earlier packet had it.
            let error = passed(temperature).window(|packet, before| {
                let from = packet.len() - 64;
                packet[from..].copy_from_slice(&before[from..]); // copy-ok: a test
            });
            let error = format!("{:#}", error.unwrap_err());
            assert!(error.contains("content changed"), "{temperature}: {error}");
            let error = passed(temperature).window(|packet, _| packet[300] ^= 1).unwrap_err();
            assert!(format!("{error:#}").contains("byte 288"), "{temperature}: {error:#}");
        }
    }
}

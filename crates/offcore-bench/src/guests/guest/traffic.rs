//! The packets of the guests: their buffers, their generation, and the expected packets at the receiver.

use std::sync::Arc;

use anyhow::{Context, Result, bail};
use offcore_mem::{GuestMemory, Mapping};
use offcore_ring::split::VIRTQ_DESC_F_NEXT;
use offcore_vhost::features::NET_HEADER;
use offcore_wire::UdpFlow;
use offcore_wire::checksum::Sum;
use offcore_wire::ethernet::FCS_LEN;
use offcore_wire::ip::IpProtocol;
use offcore_wire::probe::{self, ProbeHeader};
use offcore_wire::template::{UDP_HEADERS_LEN, UdpTemplate};
use offcore_wire::virtio_net::{self, NetHeader};

use super::{GUEST_MAC, PEER_MAC, PORT_MAC};
use crate::guests::workload::{GuestKind, Workload};
use crate::method::temperature::{BUFFER, STRIDE, Temperature};

/// Number of packets that a guest writes or reads between two readings of the clock.
pub(super) const GROUP: usize = 16;

/// A Linux guest sends packets up to this length in one piece, with the virtio-net header.
const LINEAR: usize = 128;
/// Length of its first piece for longer packets: virtio-net, Ethernet, IPv4 and UDP headers.
const HEADERS: usize = NET_HEADER + UDP_HEADERS_LEN;
/// Offset of the second piece in the buffer. It uses separate cache lines, like a fragment in a separate page.
const PAYLOAD: usize = 256;
/// Size of a table of two indirect descriptors in bytes.
pub(super) const TABLE: usize = 32;
/// Header of a Linux guest: the UDP checksum, which starts at the UDP header, is left to the device.
const NEEDS_CSUM: NetHeader = NetHeader {
    flags: virtio_net::VIRTIO_NET_HDR_F_NEEDS_CSUM,
    gso_type: virtio_net::VIRTIO_NET_HDR_GSO_NONE,
    hdr_len: 0,
    gso_size: 0,
    csum_start: 34,
    csum_offset: 6,
    num_buffers: 0,
};
/// Offset of the UDP checksum in a frame.
const CHECKSUM: usize = (NEEDS_CSUM.csum_start + NEEDS_CSUM.csum_offset) as usize;

/// Returns the size of the buffers of one direction in bytes.
pub fn buffers_len(temperature: Temperature) -> usize {
    temperature.buffers() * STRIDE
}

/// Buffers of one direction, in the first region of a guest's memory.
#[derive(Debug)]
pub(super) struct Buffers {
    memory: Arc<GuestMemory>,
    /// Offset of the first buffer in the region.
    base: usize,
    order: Vec<u32>,
    next: usize,
    /// Number of buffers in use.
    few: usize,
}

impl Buffers {
    fn new(memory: &Arc<GuestMemory>, base: usize, order: Vec<u32>) -> Result<Self> {
        let len = memory.regions().first().map_or(0, |region| region.mapping().len());
        let needed = base + order.len() * STRIDE;
        if len < needed {
            bail!("{len} bytes of guest memory: {} buffers from byte {base} on need {needed}", order.len());
        }
        Ok(Self { memory: Arc::clone(memory), base, few: order.len(), order, next: 0 })
    }

    pub(super) fn next(&mut self) -> u32 {
        let buffer = self.order[self.next];
        self.next = (self.next + 1) % self.few;
        buffer
    }

    /// Limits the buffers in use to the number for this temperature.
    fn set_temperature(&mut self, temperature: Temperature) {
        self.few = temperature.buffers().min(self.order.len());
        self.next %= self.few;
    }

    fn offset(&self, buffer: u32) -> usize {
        self.base + buffer as usize * STRIDE
    }

    /// Returns the guest address of a buffer.
    pub(super) fn address(&self, buffer: u32) -> u64 {
        self.memory.regions()[0].guest() + self.offset(buffer) as u64
    }

    fn mapping(&self) -> &Mapping {
        self.memory.regions()[0].mapping()
    }
}

/// Common properties of all packets of one length.
#[derive(Clone, Copy, Debug)]
struct Template {
    /// Length in bytes, including the virtio-net header.
    len: usize,
    /// Headers of a sent packet, starting with the virtio-net header.
    sent: [u8; HEADERS],
    /// Expected headers of a received packet.
    due: [u8; HEADERS],
}

impl Template {
    /// Creates a template for frames of `len` bytes.
    fn new(kind: GuestKind, len: usize) -> Result<Self> {
        let headers = |net: NetHeader, from, to| -> Result<_> {
            let flow = UdpFlow::txonly(from, to);
            let mut headers = [0; HEADERS];
            let (front, frame) = headers.split_at_mut(NET_HEADER);
            front.copy_from_slice(&net.to_bytes()); // copy-ok: headers
            frame.copy_from_slice(UdpTemplate::new(&flow, len)?.as_bytes()); // copy-ok: headers
            if net.needs_checksum() {
                // The partial checksum of the pseudo-header, which the device completes.
                let udp = (len - usize::from(net.csum_start)) as u16;
                let sum = Sum::pseudo_v4(flow.src.ip, flow.dst.ip, IpProtocol::UDP, udp);
                frame[CHECKSUM..CHECKSUM + 2].copy_from_slice(&sum.value().to_be_bytes()); // copy-ok: two bytes
            }
            Ok(headers)
        };
        let net = if kind == GuestKind::Linux { NEEDS_CSUM } else { NetHeader::default() };
        Ok(Self {
            len: NET_HEADER + len,
            sent: headers(net, GUEST_MAC, PORT_MAC)?,
            // The checksum request is passed on, and a packet uses one buffer.
            due: headers(NetHeader { num_buffers: 1, ..net }, PORT_MAC, PEER_MAC)?,
        })
    }

    /// Checks the headers of a received packet.
    fn check(&self, headers: &[u8]) -> Result<()> {
        let Some(at) = (0..HEADERS).find(|&at| headers[at] != self.due[at]) else { return Ok(()) };
        let place = match at.checked_sub(NET_HEADER) {
            None => format!("byte {at} of its virtio-net header"),
            Some(at) => format!("byte {at} of its headers"),
        };
        bail!("{place} is {:#04x}, {:#04x} was due", headers[at], self.due[at])
    }
}

/// The packets of one or two guests and their buffers. All variants of a cell share them: they take turns, and each
/// variant releases all buffers before the next one. Each buffer therefore has the required temperature, independent of
/// the number of variants.
#[derive(Debug)]
pub struct Traffic {
    pub(super) sent: Buffers,
    pub(super) received: Buffers,
    pub(super) temperature: Temperature,
    pub(super) kind: GuestKind,
    /// Templates, used in turn by sequence number.
    templates: Vec<Template>,
    /// Sequence number of the packet in each TX buffer.
    pub(super) holds: Vec<u64>,
    sequence: u64,
    scratch: Vec<u8>,
}

impl Traffic {
    /// Creates the packets of `workload` between these two guests. The buffers of each guest are in the first region of
    /// its memory, followed by its virtqueues. If both are the same guest, its RX buffers follow its TX buffers.
    ///
    /// # Errors
    /// If the frame length is invalid or the memory is too small.
    pub fn new(from: &Arc<GuestMemory>, to: &Arc<GuestMemory>, workload: &Workload) -> Result<Self> {
        Self::over(from, to, workload, workload.temperature.buffers())
    }

    /// As [`Traffic::new`], with `buffers` buffers in each direction.
    pub(super) fn over(
        from: &Arc<GuestMemory>,
        to: &Arc<GuestMemory>,
        workload: &Workload,
        buffers: usize,
    ) -> Result<Self> {
        let &Workload { temperature, guest: kind, .. } = workload;
        let base = if Arc::ptr_eq(from, to) { buffers * STRIDE } else { 0 };
        let [sending, mut receiving] = [11, 23].map(|seed| {
            let mut order = temperature.order(seed);
            order.retain(|&buffer| (buffer as usize) < buffers);
            order
        });
        if temperature == Temperature::Cold {
            // Cold packets are written only once. With one RX buffer less than TX buffers, each RX buffer receives a
            // different packet in its next turn, so that the content of an earlier packet differs from the expected
            // one.
            receiving.pop();
        }
        let templates = workload.frames().into_iter().map(|frame| Template::new(kind, frame - FCS_LEN));
        let templates = templates.collect::<Result<Vec<_>>>().context("frame length")?;
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

    /// Changes the temperature of the data and the number of buffers in use.
    pub(crate) fn set_temperature(&mut self, temperature: Temperature) {
        self.temperature = temperature;
        self.sent.set_temperature(temperature);
        self.received.set_temperature(temperature);
    }

    fn template(&self, sequence: u64) -> &Template {
        &self.templates[sequence as usize % self.templates.len()]
    }

    /// Returns the length of a packet including the virtio-net header, in bytes.
    pub(super) fn len(&self, sequence: u64) -> usize {
        self.template(sequence).len
    }

    /// Returns the distance between two packets of a group in bytes. It is as small as possible, so that the group
    /// stays in the first-level cache.
    pub(super) fn stride(&self) -> usize {
        let longest = self.templates.iter().map(|template| template.len).max().unwrap_or(0);
        longest.next_multiple_of(64)
    }

    /// Generates the next packet, for `buffer`, as number `at` of a group. Returns its length including the header.
    pub(super) fn make(&mut self, buffer: u32, at: usize) -> Result<usize> {
        let sequence = self.sequence;
        self.sequence += 1;
        self.holds[buffer as usize] = sequence;
        let start = at * self.stride();
        let len = self.len(sequence);
        let Self { scratch, templates, .. } = self;
        let packet = &mut scratch[start..start + len];
        // copy-ok: the guest generates its own packet
        packet[..HEADERS].copy_from_slice(&templates[sequence as usize % templates.len()].sent);
        let fill = sequence as u32 ^ 0x5eed;
        probe::write(&mut packet[NET_HEADER..], ProbeHeader { fill, sequence })?;
        Ok(len)
    }

    /// Writes packet `at` of a group, `len` bytes long, into `buffer`.
    pub(super) fn put(&self, buffer: u32, at: usize, len: usize) {
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

    /// Returns whether the guest sends `len` bytes, including the virtio-net header, in two pieces.
    pub(super) fn in_pieces(&self, len: usize) -> bool {
        self.kind == GuestKind::Linux && len > LINEAR + NET_HEADER
    }

    /// Writes the table of the two pieces of `len` bytes in `buffer` to `offset` in the region. Returns its guest
    /// address.
    pub(super) fn write_table(&self, offset: usize, buffer: u32, len: usize, packed: bool) -> u64 {
        let address = self.sent.address(buffer);
        let pieces = [(address, HEADERS), (address + PAYLOAD as u64, len - HEADERS)];
        let mut table = [0; TABLE];
        for (i, ((address, len), entry)) in pieces.into_iter().zip(table.as_chunks_mut::<16>().0).enumerate()
        {
            let last = i == pieces.len() - 1;
            // Split: flags, next. Packed: buffer ID, flags; the order in the table is the order of the chain.
            let (flags, next) = if last { (0, 0) } else { (VIRTQ_DESC_F_NEXT, 1) };
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
    pub(super) fn take(&mut self, buffer: u32, at: usize, len: usize) {
        let start = at * self.stride();
        let packet = &mut self.scratch[start..start + len];
        self.received.mapping().read_at(self.received.offset(buffer), packet);
    }

    /// Checks packet `at` of a group, whose sequence number must be `expected`.
    pub(super) fn check(&self, at: usize, len: usize, expected: u64) -> Result<()> {
        let end = self.len(expected);
        if len != end {
            bail!("packet {expected}: {len} bytes arrived, {end} were sent");
        }
        let start = at * self.stride();
        let (headers, frame) =
            (&self.scratch[start..start + HEADERS], &self.scratch[start + NET_HEADER..start + len]);
        let header = probe::check_header(frame).with_context(|| format!("packet {expected}"))?;
        if header.sequence != expected {
            bail!("packet {} arrived where {expected} was due", header.sequence);
        }
        self.template(expected).check(headers).with_context(|| format!("packet {expected}"))?;
        probe::check_content(frame).with_context(|| format!("packet {expected}"))
    }
}

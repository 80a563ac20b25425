//! The guest of a core-cost measurement: fills TX buffers, takes RX buffers back, checks every packet. Never timed.

use std::sync::Arc;

use anyhow::{Context, Result, bail};
use offcore_mem::{GuestMemory, Mapping};
use offcore_ring::split::device::Direction;
use offcore_ring::split::{Layout, driver};
use offcore_vhost::features::NET_HEADER;
use offcore_wire::probe::{self, ProbeHeader};
use offcore_wire::template::UdpTemplate;
use offcore_wire::{MacAddr, UdpFlow};

use crate::temperature::{BUFFER, Temperature};

/// The address that the forwarding under test writes as source.
pub const PORT_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 0xa0]);
/// The address that it writes as destination.
pub const PEER_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 0xb0]);
/// The guest's own addresses.
pub(crate) const GUEST_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 1]);

/// What the guest has seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Packets made available.
    pub sent: u64,
    /// Packets received, in order, with the right length and addresses.
    pub received: u64,
    /// Of those, packets whose content was checked byte by byte.
    pub verified: u64,
}

/// Buffers of one direction.
#[derive(Debug)]
struct Buffers {
    /// Offset of the first in the mapping.
    base: usize,
    order: Vec<u32>,
    next: usize,
}

impl Buffers {
    fn next(&mut self) -> u32 {
        let buffer = self.order[self.next];
        self.next = (self.next + 1) % self.order.len();
        buffer
    }

    fn offset(&self, buffer: u32) -> usize {
        self.base + buffer as usize * BUFFER
    }
}

/// The guest's side of one queue pair.
#[derive(Debug)]
pub struct Guest {
    memory: Arc<GuestMemory>,
    tx: driver::Queue<u32>,
    rx: driver::Queue<u32>,
    tx_buffers: Buffers,
    rx_buffers: Buffers,
    temperature: Temperature,
    template: UdpTemplate,
    scratch: Vec<u8>,
    /// Cold buffers are written once: their packets are told apart by what they hold.
    expected: std::collections::VecDeque<u64>,
    sequence: u64,
    seen: Seen,
}

/// Bytes of guest memory that a temperature needs.
pub const fn memory_len(temperature: Temperature) -> usize {
    2 * temperature.buffers() * BUFFER
}

impl Guest {
    /// A guest whose buffers are in the first region of `memory`, and whose rings are at `rx` and `tx`. Frames are `frame` bytes long, FCS included.
    ///
    /// # Errors
    /// When the frame length is impossible or the memory too small.
    pub fn new(
        memory: Arc<GuestMemory>,
        (rx, tx): (Layout, Layout),
        temperature: Temperature,
        frame: usize,
    ) -> Result<Self> {
        let len = memory.regions().first().map_or(0, |region| region.mapping().len());
        if len < memory_len(temperature) {
            bail!("{len} bytes of guest memory; {temperature} needs {}", memory_len(temperature));
        }
        let template =
            UdpTemplate::new(&UdpFlow::txonly(GUEST_MAC, PORT_MAC), frame - 4).context("frame length")?;
        let half = temperature.buffers() * BUFFER;
        let mut guest = Self {
            memory,
            tx: driver::Queue::new(tx, false),
            rx: driver::Queue::new(rx, false),
            tx_buffers: Buffers { base: 0, order: temperature.order(11), next: 0 },
            rx_buffers: Buffers { base: half, order: temperature.order(23), next: 0 },
            temperature,
            scratch: vec![0; BUFFER],
            template,
            expected: std::collections::VecDeque::new(),
            sequence: 0,
            seen: Seen::default(),
        };
        // A worker that polls needs no notifications, and neither does this guest.
        guest.tx.set_notification(false);
        guest.rx.set_notification(false);
        if temperature == Temperature::Cold {
            for buffer in 0..temperature.buffers() as u32 {
                guest.write_packet(buffer, buffer.into())?;
            }
        }
        guest.replenish();
        Ok(guest)
    }

    /// What has been seen so far.
    pub fn seen(&self) -> Seen {
        self.seen
    }

    fn frame_len(&self) -> usize {
        self.template.frame_len()
    }

    fn mapping(&self) -> &Mapping {
        self.memory.regions()[0].mapping()
    }

    /// The guest address of a buffer.
    fn address(&self, offset: usize) -> u64 {
        self.memory.regions()[0].guest() + offset as u64
    }

    fn write_packet(&mut self, buffer: u32, sequence: u64) -> Result<()> {
        let end = NET_HEADER + self.frame_len();
        self.scratch[..NET_HEADER].fill(0);
        let frame = &mut self.scratch[NET_HEADER..end];
        self.template.write(frame)?;
        probe::write(frame, ProbeHeader { fill: sequence as u32 ^ 0x5eed, sequence })?;
        self.mapping().write_at(self.tx_buffers.offset(buffer), &self.scratch[..end]);
        Ok(())
    }

    /// Makes `packets` packets available for transmission.
    ///
    /// # Errors
    /// When the ring has no room: the device under test has not returned what it was given.
    pub fn transmit(&mut self, packets: usize) -> Result<()> {
        for _ in 0..packets {
            let buffer = self.tx_buffers.next();
            let sequence = match self.temperature {
                Temperature::Cold => buffer.into(),
                Temperature::Hot | Temperature::Remote => {
                    self.write_packet(buffer, self.sequence)?;
                    self.sequence
                }
            };
            self.expected.push_back(sequence);
            self.sequence += 1;
            let address = self.address(self.tx_buffers.offset(buffer));
            let len = (NET_HEADER + self.frame_len()) as u32;
            if self.tx.add(address, len, Direction::Readable, buffer).is_err() {
                bail!("the TX ring is full: {} chains were not returned", self.tx.in_flight());
            }
        }
        self.tx.publish();
        self.seen.sent += packets as u64;
        Ok(())
    }

    /// Keeps a window of RX buffers available.
    fn replenish(&mut self) {
        while usize::from(self.rx.in_flight()) < self.temperature.window().min(self.rx.size().into()) {
            let buffer = self.rx_buffers.next();
            let address = self.address(self.rx_buffers.offset(buffer));
            // There is room: no more than the ring's size are in flight, one descriptor each.
            let _ = self.rx.add(address, BUFFER as u32, Direction::Writable, buffer);
        }
        self.rx.publish();
    }

    /// Takes back what was returned, and checks every received packet.
    ///
    /// # Errors
    /// When a packet is missing, out of order or not what was sent.
    pub fn collect(&mut self) -> Result<()> {
        self.tx.used()?;
        while self.tx.pop()?.is_some() {}
        while self.rx.used()? > 0 {
            let Some(used) = self.rx.pop()? else { break };
            self.check(used.token, used.len as usize)?;
        }
        self.replenish();
        Ok(())
    }

    fn check(&mut self, buffer: u32, len: usize) -> Result<()> {
        let expected = self.expected.pop_front().context("a packet was received that was never sent")?;
        let end = NET_HEADER + self.frame_len();
        if len != end {
            bail!("packet {expected}: {len} bytes arrived, {end} were sent");
        }
        let from = self.rx_buffers.offset(buffer);
        self.memory.regions()[0].mapping().read_at(from, &mut self.scratch[..end]);
        let frame = &self.scratch[NET_HEADER..end];
        let header = probe::check_header(frame).with_context(|| format!("packet {expected}"))?;
        if header.sequence != expected {
            bail!("packet {} arrived where {expected} was due", header.sequence);
        }
        if frame[..6] != PEER_MAC.0 || frame[6..12] != PORT_MAC.0 {
            bail!("packet {expected}: its addresses were not rewritten");
        }
        probe::check_content(frame).with_context(|| format!("packet {expected}"))?;
        self.seen.received += 1;
        self.seen.verified += 1;
        Ok(())
    }

    /// Packets sent and not yet received.
    pub fn outstanding(&self) -> usize {
        self.expected.len()
    }
}

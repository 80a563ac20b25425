//! The guests of a core-cost measurement: one fills TX buffers, one (the same, or another) takes RX buffers back and
//! checks every packet. Never timed.

use std::collections::VecDeque;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use offcore_mem::{GuestMemory, Mapping};
use offcore_ring::device::Direction;
use offcore_ring::{Layout, driver};
use offcore_vhost::features::NET_HEADER;
use offcore_wire::probe::{self, ProbeHeader};
use offcore_wire::template::UdpTemplate;
use offcore_wire::{MacAddr, UdpFlow};

use crate::temperature::{BUFFER, Temperature};

/// The address that the forwarding under test writes as source.
pub const PORT_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 0xa0]);
/// The address that it writes as destination.
pub const PEER_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 0xb0]);
/// The sending guest's own address.
pub(crate) const GUEST_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 1]);

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
}

impl Buffers {
    fn new(memory: Arc<GuestMemory>, base: usize, order: Vec<u32>) -> Result<Self> {
        let len = memory.regions().first().map_or(0, |region| region.mapping().len());
        let needed = base + order.len() * BUFFER;
        if len < needed {
            bail!("{len} bytes of guest memory: {} buffers from byte {base} on need {needed}", order.len());
        }
        Ok(Self { memory, base, order, next: 0 })
    }

    fn next(&mut self) -> u32 {
        let buffer = self.order[self.next];
        self.next = (self.next + 1) % self.order.len();
        buffer
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

/// The guest that sends.
#[derive(Debug)]
struct Sender {
    queue: driver::Queue<u32>,
    buffers: Buffers,
    temperature: Temperature,
    template: UdpTemplate,
    scratch: Vec<u8>,
    sequence: u64,
}

impl Sender {
    fn write_packet(&mut self, buffer: u32, sequence: u64) -> Result<()> {
        let end = NET_HEADER + self.template.frame_len();
        self.scratch[..NET_HEADER].fill(0);
        let frame = &mut self.scratch[NET_HEADER..end];
        self.template.write(frame)?;
        probe::write(frame, ProbeHeader { fill: sequence as u32 ^ 0x5eed, sequence })?;
        self.buffers.mapping().write_at(self.buffers.offset(buffer), &self.scratch[..end]);
        Ok(())
    }

    /// Makes a packet available, not yet visibly; the sequence number in it.
    fn send(&mut self) -> Result<u64> {
        let buffer = self.buffers.next();
        let sequence = match self.temperature {
            Temperature::Cold => buffer.into(),
            Temperature::Hot | Temperature::Remote => {
                self.write_packet(buffer, self.sequence)?;
                self.sequence
            }
        };
        self.sequence += 1;
        let len = (NET_HEADER + self.template.frame_len()) as u32;
        if self.queue.add(self.buffers.address(buffer), len, Direction::Readable, buffer).is_err() {
            bail!("the TX ring is full: {} chains were not returned", self.queue.in_flight());
        }
        Ok(sequence)
    }

    fn take_back(&mut self) -> Result<()> {
        while self.queue.used()? > 0 {
            while self.queue.pop()?.is_some() {}
        }
        Ok(())
    }
}

/// The guest that receives.
#[derive(Debug)]
struct Receiver {
    queue: driver::Queue<u32>,
    buffers: Buffers,
    window: usize,
    frame_len: usize,
    scratch: Vec<u8>,
}

impl Receiver {
    /// Keeps a window of buffers available.
    fn replenish(&mut self) {
        while usize::from(self.queue.in_flight()) < self.window.min(self.queue.size().into()) {
            let buffer = self.buffers.next();
            // There is room: no more than the ring's size are in flight, one descriptor each.
            let _ = self.queue.add(self.buffers.address(buffer), BUFFER as u32, Direction::Writable, buffer);
        }
        self.queue.publish();
    }

    /// Checks the packet of `len` bytes that has arrived in `buffer`, where number `expected` is due.
    fn check(&mut self, buffer: u32, len: usize, expected: u64) -> Result<()> {
        let end = NET_HEADER + self.frame_len;
        if len != end {
            bail!("packet {expected}: {len} bytes arrived, {end} were sent");
        }
        self.buffers.mapping().read_at(self.buffers.offset(buffer), &mut self.scratch[..end]);
        let frame = &self.scratch[NET_HEADER..end];
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
    sender: Sender,
    receiver: Receiver,
    /// Cold buffers are written once: their packets are told apart by what they hold.
    expected: VecDeque<u64>,
    seen: Seen,
}

/// Bytes that the buffers of one direction take.
pub const fn buffers_len(temperature: Temperature) -> usize {
    temperature.buffers() * BUFFER
}

impl Guests {
    /// One guest that sends to itself. Its buffers are in the first region of `memory`, TX before RX; its rings are at
    /// `rx` and `tx`. Frames are `frame` bytes long, FCS included.
    ///
    /// # Errors
    /// When the frame length is impossible or the memory too small.
    pub fn looped(
        memory: Arc<GuestMemory>,
        (rx, tx): (Layout, Layout),
        temperature: Temperature,
        frame: usize,
    ) -> Result<Self> {
        let sent = Buffers::new(Arc::clone(&memory), 0, temperature.order(11))?;
        let received = Buffers::new(memory, buffers_len(temperature), temperature.order(23))?;
        Self::new((sent, tx), (received, rx), temperature, frame)
    }

    /// Two guests. The buffers of each are in the first region of its memory, its ring is beside.
    ///
    /// # Errors
    /// As for [`Guests::looped`].
    pub fn two(
        (senders, tx): (Arc<GuestMemory>, Layout),
        (receivers, rx): (Arc<GuestMemory>, Layout),
        temperature: Temperature,
        frame: usize,
    ) -> Result<Self> {
        let sent = Buffers::new(senders, 0, temperature.order(11))?;
        let received = Buffers::new(receivers, 0, temperature.order(23))?;
        Self::new((sent, tx), (received, rx), temperature, frame)
    }

    fn new(
        (sent, tx): (Buffers, Layout),
        (received, rx): (Buffers, Layout),
        temperature: Temperature,
        frame: usize,
    ) -> Result<Self> {
        let template =
            UdpTemplate::new(&UdpFlow::txonly(GUEST_MAC, PORT_MAC), frame - 4).context("frame length")?;
        let receiver = Receiver {
            queue: driver::Queue::new(rx, false),
            buffers: received,
            window: temperature.window(),
            frame_len: template.frame_len(),
            scratch: vec![0; BUFFER],
        };
        let sender = Sender {
            queue: driver::Queue::new(tx, false),
            buffers: sent,
            temperature,
            template,
            scratch: vec![0; BUFFER],
            sequence: 0,
        };
        let mut guests = Self { sender, receiver, expected: VecDeque::new(), seen: Seen::default() };
        // A worker that polls needs no notifications, and neither do these guests.
        guests.sender.queue.set_notification(false);
        guests.receiver.queue.set_notification(false);
        if temperature == Temperature::Cold {
            for buffer in 0..temperature.buffers() as u32 {
                guests.sender.write_packet(buffer, buffer.into())?;
            }
        }
        guests.receiver.replenish();
        Ok(guests)
    }

    /// What has been seen so far.
    pub fn seen(&self) -> Seen {
        self.seen
    }

    /// Makes `packets` packets available for transmission.
    ///
    /// # Errors
    /// When the ring has no room: the device under test has not returned what it was given.
    pub fn transmit(&mut self, packets: usize) -> Result<()> {
        for _ in 0..packets {
            self.expected.push_back(self.sender.send()?);
        }
        self.sender.queue.publish();
        self.seen.sent += packets as u64;
        Ok(())
    }

    /// Takes back what was returned, and checks every received packet.
    ///
    /// # Errors
    /// When a packet is missing, out of order or not what was sent.
    pub fn collect(&mut self) -> Result<()> {
        self.sender.take_back()?;
        while self.receiver.queue.used()? > 0 {
            let Some(used) = self.receiver.queue.pop()? else { break };
            let expected = self.expected.pop_front().context("a packet was received that was never sent")?;
            self.receiver.check(used.token, used.len as usize, expected)?;
            self.seen.received += 1;
            self.seen.verified += 1;
        }
        self.receiver.replenish();
        Ok(())
    }

    /// Packets sent and not yet received.
    pub fn outstanding(&self) -> usize {
        self.expected.len()
    }
}

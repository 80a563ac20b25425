//! The guests of a core-cost measurement: one fills TX buffers, one (the same, or another) takes RX buffers back and
//! checks every packet. What the measured core spends is not in here; what the guests spend on their virtqueues and on
//! writing and reading packets is timed, too, and what they spend on making and checking them is not.

mod traffic;

use std::collections::VecDeque;
use std::ops::AddAssign;
use std::sync::{Arc, Mutex};

use anyhow::{Context, Result, bail};
use offcore_ring::device::Direction;
use offcore_ring::{Layout, driver};
use offcore_stats::tsc;
use offcore_wire::MacAddr;

use crate::guests::workload::GuestKind;
use crate::method::lockstep::lock;
use crate::method::temperature::{BUFFER, Temperature};
use traffic::{Buffers, GROUP, TABLE};
pub use traffic::{Traffic, buffers_len};

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

impl AddAssign for Seen {
    fn add_assign(&mut self, other: Self) {
        self.sent += other.sent;
        self.received += other.received;
        self.verified += other.verified;
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

#[cfg(test)]
mod tests;

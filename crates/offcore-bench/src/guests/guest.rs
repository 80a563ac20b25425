//! The guests of a core-cost measurement: one fills TX buffers, and one (the same or another) takes back RX buffers and
//! checks every packet. The guests' work is not part of the measured core's cost. The time that the guests spend on
//! their virtqueues and on writing and reading packets is measured, too, but not the time for generating and checking
//! packets.

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
use crate::report::row::Counts;
use traffic::{Buffers, GROUP, TABLE};
pub use traffic::{Traffic, buffers_len};

/// Source address that the forwarding under test writes.
pub const PORT_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 0xa0]);
/// Destination address that it writes.
pub const PEER_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 0xb0]);
/// Address of the sending guest.
pub(crate) const GUEST_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 1]);

/// Packet counters of the guests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Packets made available.
    pub sent: u64,
    /// Packets received, in order, with the right length and addresses.
    pub received: u64,
    /// Packets among these whose content was checked byte by byte.
    pub verified: u64,
}

impl Seen {
    /// Returns the counters of a row in which every packet that has not arrived is lost.
    pub(crate) fn counts(self) -> Counts {
        Counts { received: self.received, verified: self.verified, lost: self.sent - self.received }
    }
}

impl AddAssign for Seen {
    fn add_assign(&mut self, other: Self) {
        self.sent += other.sent;
        self.received += other.received;
        self.verified += other.verified;
    }
}

/// The driver's side of one TX and one RX virtqueue, which belong to one guest or to two guests.
#[derive(Debug)]
pub struct Guests {
    traffic: Arc<Mutex<Traffic>>,
    tx: driver::RingDriver<u32>,
    rx: driver::RingDriver<u32>,
    /// Offset of the tables of indirect descriptors in the sending guest's region, and index of the next table.
    tables: usize,
    next_table: usize,
    /// Number of RX buffers that are kept available.
    window: usize,
    /// Sequence numbers of the packets in flight.
    expected: VecDeque<u64>,
    seen: Seen,
    ticks: u64,
}

impl Guests {
    /// Creates the driver's side of `rx` and `tx`, which transfer the packets of `traffic`. Both virtqueues are reset
    /// to their initial state. From offset `tables` on, the sending guest's region must have 32 bytes for each
    /// descriptor of `tx`.
    pub fn new(traffic: &Arc<Mutex<Traffic>>, rx: Layout, tx: Layout, tables: usize) -> Self {
        let event_idx = lock(traffic).kind == GuestKind::Linux;
        let mut guests = Self {
            traffic: Arc::clone(traffic),
            tx: driver::RingDriver::new(tx, event_idx),
            rx: driver::RingDriver::new(rx, event_idx),
            tables,
            next_table: 0,
            window: lock(traffic).temperature.window(),
            expected: VecDeque::new(),
            seen: Seen::default(),
            ticks: 0,
        };
        // Both the polling worker and the guests work without notifications.
        guests.tx.set_notification(false);
        guests.rx.set_notification(false);
        let mut traffic = lock(&guests.traffic);
        replenish(&mut guests.rx, &mut traffic.received, guests.window);
        drop(traffic);
        guests
    }

    /// Changes the temperature of the data: see [`Traffic`]. RX buffers that a variant has already posted stay in use.
    pub(crate) fn set_temperature(&self, temperature: Temperature) {
        lock(&self.traffic).set_temperature(temperature);
    }

    /// Returns the packet counters so far.
    pub fn seen(&self) -> Seen {
        self.seen
    }

    /// Returns the TSC ticks that the guests have spent on their virtqueues, on writing packets and on reading them.
    pub fn ticks(&self) -> u64 {
        self.ticks
    }

    /// Makes `packets` packets available for transmission.
    ///
    /// # Errors
    /// If the ring has no room because the device under test has not returned earlier packets.
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
                    let packed = matches!(self.tx, driver::RingDriver::Packed(_));
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

    /// Takes back returned buffers and checks every received packet.
    ///
    /// # Errors
    /// If a packet is missing, out of order or different from the sent one.
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

    /// Returns the number of packets that were sent and have not been received yet.
    pub fn outstanding(&self) -> usize {
        self.expected.len()
    }
}

/// Keeps a window of buffers available.
fn replenish(queue: &mut driver::RingDriver<u32>, buffers: &mut Buffers, window: usize) {
    while usize::from(queue.in_flight()) < window.min(queue.size().into()) {
        let buffer = buffers.next();
        // The ring has room: the number of buffers in flight never exceeds its size, and each takes one descriptor.
        let _ = queue.add(buffers.address(buffer), BUFFER as u32, Direction::Writable, buffer);
    }
    queue.publish();
}

#[cfg(test)]
mod tests;

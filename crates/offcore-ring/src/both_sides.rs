//! Tests of both sides of a queue against each other and against a model, for either format.

use std::collections::VecDeque;
use std::sync::Arc;

use offcore_mem::GuestMemory;
use offcore_mem::testing::guest_memory;
use proptest::prelude::*;

use crate::chain::VIRTQ_DESC_F_NEXT;
use crate::device::{Chain, DeviceQueue, Direction, Single, Wanted};
use crate::driver::{self, Used};
use crate::testing::single;
use crate::vector::Level;
use crate::{Areas, Layout, packed, split};

const BUFFERS: u64 = 0x1_0000;
const TABLES: u64 = 0x2_0000;

fn guest(size: u16, packed: bool) -> (Arc<GuestMemory>, Layout) {
    let memory = guest_memory(1 << 20);
    let areas = Areas { descriptors: 0x1000, driver: 0x4000, device: 0x6000 };
    let layout = Layout::in_memory(&memory, areas, size.into(), packed).unwrap();
    (memory, layout)
}

#[derive(Clone, Debug)]
enum Op {
    /// Adds a chain of this many buffers, in an indirect table or in the ring.
    Add(u8, bool),
    Submit,
    Take(u8),
    /// Takes chains of one buffer each and returns them at once.
    UseSingles(u8),
    Return(u8),
    Publish,
    Collect(u8),
    DeviceWaits,
    DriverWaits,
    DeviceIsBusy,
    DriverIsBusy,
    Restart,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        4 => (1u8..5, any::<bool>()).prop_map(|(n, table)| Op::Add(n, table)),
        3 => Just(Op::Submit),
        3 => (1u8..9).prop_map(Op::Take),
        2 => (0u8..40).prop_map(Op::UseSingles),
        4 => any::<u8>().prop_map(Op::Return),
        3 => Just(Op::Publish),
        3 => (1u8..9).prop_map(Op::Collect),
        1 => Just(Op::DeviceWaits),
        1 => Just(Op::DriverWaits),
        1 => Just(Op::DeviceIsBusy),
        1 => Just(Op::DriverIsBusy),
        1 => Just(Op::Restart),
    ];
    proptest::collection::vec(op, 1..600)
}

/// The last notification request of a side to the other side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asked {
    /// Notify of the next entry. None was available at the time of the request.
    Waits,
    /// Do not notify.
    Busy,
    /// Unspecified: the awaited entry has arrived, or no request was made.
    Either,
}

/// A chain in the test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct TestChain {
    serial: u32,
    buffers: u8,
    /// Whether the buffers are in an indirect table.
    table: bool,
}

impl TestChain {
    /// Number of descriptors in the ring.
    fn entries(self) -> u16 {
        if self.table { 1 } else { self.buffers.into() }
    }
}

/// The two sides, and the expected state of the chains.
struct Rig<Device> {
    driver: driver::RingDriver<TestChain>,
    device: Device,
    memory: Arc<GuestMemory>,
    is_packed: bool,
    direction: Direction,
    serial: u32,
    added: VecDeque<TestChain>,
    available: VecDeque<TestChain>,
    held: Vec<(TestChain, Chain)>,
    returned: VecDeque<Used<TestChain>>,
    used: VecDeque<Used<TestChain>>,
    device_asked: Asked,
    driver_asked: Asked,
    /// Whether the device has notified before. The first time, it always notifies.
    has_notified: bool,
}

impl<Device: DeviceQueue> Rig<Device> {
    fn buffers(&self, TestChain { serial, buffers, .. }: TestChain) -> Vec<(u64, u32)> {
        (0..u32::from(buffers))
            .map(|i| (BUFFERS + u64::from((serial * 7 + i) % 512) * 64, (serial + i) % 64 + 1))
            .collect()
    }

    fn play(&mut self, op: Op, restart: impl Fn(u32) -> Device) -> Result<(), TestCaseError> {
        match op {
            Op::Add(n, table) => self.add(n, table)?,
            Op::Submit => self.submit()?,
            Op::Take(n) => self.take(n)?,
            Op::UseSingles(n) => self.use_singles(n)?,
            Op::Return(pick) if !self.held.is_empty() => {
                let (test_chain, chain) = self.held.remove(usize::from(pick) % self.held.len());
                let len = if self.direction == Direction::Writable { test_chain.serial % 5 * 100 } else { 0 };
                self.device.push_used(chain, len);
                self.returned.push_back(Used { token: test_chain, len });
            }
            Op::Publish => self.publish()?,
            Op::Collect(n) => {
                let found = self.driver.used().unwrap();
                prop_assert!(usize::from(found) <= self.used.len());
                prop_assert_eq!(found == 0, self.used.is_empty());
                for _ in 0..n.min(found.try_into().unwrap_or(u8::MAX)) {
                    prop_assert_eq!(self.driver.pop().unwrap(), self.used.pop_front());
                }
            }
            Op::DeviceWaits => {
                self.device.set_notification(true);
                let nothing = self.device.look(1).unwrap() == 0;
                prop_assert_eq!(nothing, self.available.is_empty());
                self.device_asked = if nothing { Asked::Waits } else { Asked::Either };
            }
            Op::DriverWaits => {
                self.driver.set_notification(true);
                let nothing = self.driver.used().unwrap() == 0;
                self.driver_asked = if nothing { Asked::Waits } else { Asked::Either };
            }
            Op::DeviceIsBusy => {
                self.device.set_notification(false);
                self.device_asked = Asked::Busy;
            }
            Op::DriverIsBusy => {
                self.driver.set_notification(false);
                self.driver_asked = Asked::Busy;
            }
            Op::Restart if self.held.is_empty() && self.returned.is_empty() => {
                let base = self.device.base();
                self.device = restart(base);
                prop_assert_eq!(self.device.base(), base);
                self.has_notified = false;
            }
            Op::Return(_) | Op::Restart => {}
        }
        self.account()
    }

    /// Writes the indirect table of a chain. Returns its address and its length in bytes.
    fn table(&self, chain: TestChain) -> (u64, u32) {
        let table = TABLES + u64::from(chain.serial % 512) * 64;
        for (i, (addr, len)) in (1u16..).zip(self.buffers(chain)) {
            let more = if i < chain.buffers.into() { VIRTQ_DESC_F_NEXT } else { 0 };
            let flags = self.direction.flag();
            // Only the descriptors of a split table refer to the next one.
            let (low, high) = if self.is_packed { (0, flags) } else { (flags | more, i) };
            let raw =
                u128::from(addr) | u128::from(len) << 64 | u128::from(low) << 96 | u128::from(high) << 112;
            let at = table as usize + 16 * usize::from(i - 1);
            self.memory.regions()[0].mapping().write_at(at, &raw.to_le_bytes());
        }
        (table, u32::from(chain.buffers) * 16)
    }

    fn add(&mut self, buffers: u8, table: bool) -> Result<(), TestCaseError> {
        let test_chain = TestChain { serial: self.serial, buffers, table };
        let fits = self.driver.free() >= test_chain.entries();
        let buffers = self.buffers(test_chain);
        let result = match buffers[..] {
            _ if table => {
                let (address, len) = self.table(test_chain);
                self.driver.add_indirect(address, len, test_chain)
            }
            [(addr, len)] => self.driver.add(addr, len, self.direction, test_chain),
            _ => self.driver.add_chain(&buffers, self.direction, test_chain),
        };
        prop_assert_eq!(result, if fits { Ok(()) } else { Err(test_chain) });
        if fits {
            self.added.push_back(test_chain);
        }
        self.serial += 1;
        Ok(())
    }

    fn submit(&mut self) -> Result<(), TestCaseError> {
        let new = !self.added.is_empty();
        self.driver.publish();
        self.available.append(&mut self.added);
        let kick = self.driver.needs_kick();
        prop_assert!(new || !kick);
        match self.device_asked {
            Asked::Waits if new => {
                prop_assert!(kick, "the device waits");
                self.device_asked = Asked::Either;
            }
            Asked::Busy => prop_assert!(!kick, "the device is busy"),
            _ => {}
        }
        Ok(())
    }

    fn take(&mut self, n: u8) -> Result<(), TestCaseError> {
        self.device.look(n.into()).unwrap();
        let mut ahead = 0;
        for _ in 0..n {
            prop_assert_eq!(self.device.has(ahead).unwrap(), !self.available.is_empty());
            let Some(test_chain) = self.available.pop_front() else { break };
            let expected = self.buffers(test_chain);
            let mut found = Vec::new();
            let base = self.memory.translate_user(0, 1).unwrap();
            let chain = self.device.walk(ahead, &self.memory, self.direction, &mut 64, |buffer| {
                found.push((buffer.addr.as_ptr() as u64 - base.as_ptr() as u64, buffer.len));
            });
            let chain = chain.unwrap();
            prop_assert_eq!(&found, &expected);
            if let Some((buffer, single)) = single(&mut self.device, ahead, &self.memory, self.direction) {
                prop_assert_eq!(
                    (buffer.len, single, found.len(), test_chain.table),
                    (expected[0].1, chain, 1, false)
                );
            }
            self.held.push((test_chain, chain));
            ahead += chain.entries;
        }
        self.device.consume(ahead);
        Ok(())
    }

    fn use_singles(&mut self, n: u8) -> Result<(), TestCaseError> {
        let ready = self.device.look(n.into()).unwrap();
        let wanted = Wanted { direction: self.direction, least: 0, most: u32::MAX };
        let singles = self.device.singles(0, n.into(), &self.memory, wanted);
        let found: Vec<_> = singles.iter().map(Single::len).collect();
        let expected = self
            .available
            .iter()
            .take(ready.min(n.into()))
            .take_while(|chain| chain.buffers == 1 && !chain.table);
        let expected: Vec<_> = expected.map(|&chain| self.buffers(chain)[0].1).collect();
        // A packed queue may find only a part of them. The next call finds the rest.
        prop_assert!(expected.starts_with(&found), "{:?}, expected {:?}", found, expected);
        prop_assert!(self.is_packed || found.len() == expected.len());
        self.device.push_used_singles(0, found.len() as u16, self.direction);
        self.device.consume(found.len() as u16);
        for (token, len) in self.available.drain(..found.len()).zip(found) {
            let len = if self.direction == Direction::Writable { len } else { 0 };
            self.returned.push_back(Used { token, len });
        }
        Ok(())
    }

    fn publish(&mut self) -> Result<(), TestCaseError> {
        let new = !self.returned.is_empty();
        self.device.publish();
        self.used.append(&mut self.returned);
        let notify = self.device.needs_notification();
        prop_assert!(new || !notify);
        match self.driver_asked {
            Asked::Waits if new => {
                prop_assert!(notify, "the driver waits");
                self.driver_asked = Asked::Either;
            }
            Asked::Busy if self.has_notified => prop_assert!(!notify, "the driver is busy"),
            _ => {}
        }
        self.has_notified |= new;
        Ok(())
    }

    fn account(&self) -> Result<(), TestCaseError> {
        let (held, used) = (self.held.iter().map(|held| held.0), self.returned.iter().chain(&self.used));
        let chains =
            self.added.iter().chain(&self.available).copied().chain(held).chain(used.map(|used| used.token));
        let (n, entries) = chains.fold((0, 0), |(n, entries), chain| (n + 1, entries + chain.entries()));
        prop_assert_eq!((self.driver.in_flight(), self.driver.size() - self.driver.free()), (n, entries));
        Ok(())
    }
}

fn agree<Device: DeviceQueue>(
    memory: Arc<GuestMemory>,
    layout: Layout,
    ops: Vec<Op>,
    event_idx: bool,
    direction: Direction,
    base: u32,
    device: impl Fn(u32) -> Device,
) -> Result<(), TestCaseError> {
    let mut rig = Rig {
        is_packed: matches!(layout, Layout::Packed(_)),
        driver: driver::RingDriver::new(layout, event_idx),
        device: device(base),
        memory,
        direction,
        serial: 0,
        added: VecDeque::new(),
        available: VecDeque::new(),
        held: Vec::new(),
        returned: VecDeque::new(),
        used: VecDeque::new(),
        device_asked: Asked::Either,
        driver_asked: Asked::Either,
        has_notified: false,
    };
    for op in ops {
        rig.play(op, &device)?;
    }
    let mut in_flight: Vec<_> = rig.driver.take_in_flight().collect();
    in_flight.sort_unstable();
    in_flight.dedup();
    prop_assert_eq!(in_flight.len(), usize::from(rig.driver.in_flight()));
    Ok(())
}

fn levels() -> impl Strategy<Value = Level> {
    proptest::sample::select(Level::available().collect::<Vec<_>>())
}

fn directions() -> impl Strategy<Value = Direction> {
    prop_oneof![Just(Direction::Readable), Just(Direction::Writable)]
}

proptest! {
    /// Chains arrive at the device side complete and in order, and at the driver side in the order in which they were
    /// returned, over any number of turns and restarts. No waiting side misses a notification, and no busy side
    /// receives one.
    #[test]
    fn packed_sides_agree(
        ops in ops(), event_idx: bool, direction in directions(), size in 1u16..80, level in levels(),
    ) {
        let (memory, layout) = guest(size, true);
        let Layout::Packed(ring) = layout.clone() else { unreachable!() };
        let device = |base| {
            packed::device::PackedDevice::new(ring.clone(), base, event_idx, true).unwrap().at_level(level)
        };
        agree(memory, layout, ops, event_idx, direction, packed::FRESH_BASE, device)?;
    }

    /// The same for a split queue.
    #[test]
    fn split_sides_agree(
        ops in ops(), event_idx: bool, direction in directions(), size_bits in 0u32..7, level in levels(),
    ) {
        let (memory, layout) = guest(1 << size_bits, false);
        let Layout::Split(ring) = layout.clone() else { unreachable!() };
        let device =
            |base| split::device::SplitDevice::new(ring.clone(), base as u16, event_idx, true).at_level(level);
        agree(memory, layout, ops, event_idx, direction, 0, device)?;
    }
}

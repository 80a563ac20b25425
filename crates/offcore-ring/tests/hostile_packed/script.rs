//! A script for the other side of a packed queue, as a string of bytes. It defines the data that is written and the
//! calls of the side under test. Any byte string is a valid script. Most of the generated data is almost valid, because
//! most bugs are found with such data.
#![allow(dead_code, reason = "the fuzz target uses its own part")]

use std::collections::HashSet;
use std::ptr::NonNull;
use std::sync::Arc;

use offcore_mem::GuestMemory;
use offcore_mem::testing::guest_regions;
use offcore_ring::Areas;
use offcore_ring::device::{Buffer, Chain, DeviceQueue, Direction};
use offcore_ring::driver;
use offcore_ring::packed::{
    FRESH_BASE, PackedLayout, VIRTQ_DESC_F_AVAIL, VIRTQ_DESC_F_USED, device, ring_len,
};
use offcore_ring::split::{VIRTQ_DESC_F_INDIRECT, VIRTQ_DESC_F_NEXT, VIRTQ_DESC_F_WRITE};
use offcore_ring::testing::single;

use crate::bytes::Script;

const DRIVER_EVENT: usize = 0x100;
const DEVICE_EVENT: usize = 0x200;
const RING: usize = 0x300;
const TABLES: usize = 0x1000;
/// End of the first region and start of the second one, which is at another place in host memory.
const SEAM: usize = 0x2000;
const END: usize = 0x4000;

/// Maximum number of buffers taken from a chain.
const MAX_BUFFERS: usize = 40;

/// Statistics of a script, so that tests can check that scripts exercise the code.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Outcome {
    /// Chains taken by the device side.
    pub(crate) taken: usize,
    /// Errors detected by the device side.
    pub(crate) refused: usize,
    /// Chains returned to the driver side.
    pub(crate) popped: usize,
    /// Number of times that a chain was returned that was not in flight.
    pub(crate) disowned: usize,
}

/// Runs a script and adds its results to `outcome`.
///
/// # Panics
/// Panics if the other side has broken an invariant.
pub(crate) fn play(script: &[u8], outcome: &mut Outcome) {
    let mut script = Script(script);
    let options = script.u8();
    let size = [1, 2, 3, 8, 37, 64, 70, 100][usize::from(options & 7)];
    let memory = Memory::new(size);
    if options & 8 != 0 {
        driver_side(script, &memory, options, outcome)
    } else {
        device_side(script, &memory, options, outcome)
    }
}

/// Next step of a hostile driver or of the device side under test.
enum DriverOp {
    /// Makes a chain of this many descriptors available.
    Offer(u8),
    /// Writes a descriptor at this index of the tables.
    Table(u8),
    Anything(Write),
    Look(usize),
    /// Takes this many chains.
    Take(u8),
    /// Returns a chain that was taken.
    Return(u8, u32),
    Publish,
    /// Accesses entries that may not exist.
    Probe([u16; 3]),
    Notify(bool),
    /// Restarts the queue, at the given position or at the current one.
    Restart(Option<u16>),
}

/// Next step of a hostile device or of the driver side under test.
enum DeviceOp {
    /// Adds a chain of this many buffers.
    Add(u8),
    Publish,
    /// Writes a used descriptor with this ID and length, and skips this many descriptors.
    Use(u16, u8, u16),
    Anything(Write),
    Notify(bool),
    Collect,
}

/// Data that the other side may write at any time.
enum Write {
    Ring(u16, u128),
    /// The event structure of the other side.
    Event(u32),
}

/// Plays a hostile driver.
fn device_side(mut script: Script<'_>, memory: &Memory, options: u8, outcome: &mut Outcome) {
    let direction = if options & 16 != 0 { Direction::Writable } else { Direction::Readable };
    let size = memory.size;
    let start = |base| device::PackedDevice::new(memory.layout(), base, options & 32 != 0, options & 64 != 0);
    let mut queue = start(FRESH_BASE).unwrap();
    let (mut next, mut wrap) = (0u16, true);
    let mut held: Vec<Chain> = Vec::new();
    // Numbers of descriptors that the driver does not own: taken, and returned but not published.
    let (mut out, mut unpublished) = (0u32, 0u32);
    while !script.0.is_empty() {
        match script.driver_op(size, !held.is_empty()) {
            DriverOp::Offer(descriptors) => {
                for more in (0..descriptors).rev() {
                    let state = if wrap { VIRTQ_DESC_F_AVAIL } else { VIRTQ_DESC_F_USED };
                    let next_flag = if more > 0 { VIRTQ_DESC_F_NEXT } else { 0 };
                    memory.write_ring(next, script.descriptor(direction, state | next_flag));
                    next += 1;
                    if next == size {
                        (next, wrap) = (0, !wrap);
                    }
                }
            }
            DriverOp::Table(at) => {
                memory.write(TABLES + usize::from(at), &script.descriptor(direction, 0).to_le_bytes());
            }
            DriverOp::Anything(write) => memory.anything(write, DRIVER_EVENT),
            DriverOp::Look(wanted) => match queue.look(wanted) {
                Ok(known) => assert!(known <= wanted && known as u32 + out <= size.into()),
                Err(error) => outcome.refused += usize::from(!error.to_string().is_empty()),
            },
            DriverOp::Take(chains) => {
                let ahead = take(&mut queue, chains, memory, direction, &mut held, outcome);
                out += u32::from(ahead);
                assert!(out <= size.into(), "{out} of {size} descriptors are out");
                queue.consume(ahead);
            }
            DriverOp::Return(pick, written) => {
                let chain = held.remove(usize::from(pick) % held.len());
                queue.push_used(chain, written);
                unpublished += u32::from(chain.entries);
            }
            DriverOp::Publish => {
                queue.publish();
                out -= std::mem::take(&mut unpublished);
                let _ = queue.needs_notification();
            }
            DriverOp::Probe([has, is_single, chains]) => {
                let _ = queue.has(has);
                let _ = single(&mut queue, is_single, &memory.guest, direction);
                queue.prefetch_used(chains.into());
            }
            DriverOp::Notify(wanted) => queue.set_notification(wanted),
            DriverOp::Restart(base) => {
                let base = base.map_or_else(|| queue.base(), u32::from);
                let fits = base & 0x7fff < size.into();
                match start(base) {
                    Ok(started) if fits => queue = started,
                    result => assert!(result.is_err() && !fits, "{base:#x} of {size}"),
                }
                if fits {
                    (out, unpublished) = (0, 0);
                    held.clear();
                }
            }
        }
    }
    memory.check_unwritten(DEVICE_EVENT);
}

/// Takes up to `chains` chains into `held`. Returns the number of their entries.
fn take(
    queue: &mut device::PackedDevice,
    chains: u8,
    memory: &Memory,
    direction: Direction,
    held: &mut Vec<Chain>,
    outcome: &mut Outcome,
) -> u16 {
    let mut ahead = 0;
    for _ in 0..chains {
        if !queue.has(ahead).unwrap_or(false) {
            break;
        }
        let single = single(queue, ahead, &memory.guest, direction);
        let mut buffers = 0;
        let walked = queue.walk(ahead, &memory.guest, direction, &mut { MAX_BUFFERS }, |buffer| {
            buffers += 1;
            memory.check(buffer);
        });
        assert!(buffers <= MAX_BUFFERS);
        match walked {
            Ok(chain) => {
                if let Some((buffer, single)) = single {
                    memory.check(buffer);
                    assert_eq!(single, chain);
                }
                ahead += chain.entries;
                held.push(chain);
                outcome.taken += 1;
            }
            Err(error) => {
                outcome.refused += usize::from(!error.to_string().is_empty());
                break;
            }
        }
    }
    ahead
}

/// Plays a hostile device.
fn driver_side(mut script: Script<'_>, memory: &Memory, options: u8, outcome: &mut Outcome) {
    let size = memory.size;
    let mut queue = driver::RingDriver::new(memory.layout(), options & 32 != 0);
    let mut in_flight = HashSet::new();
    let (mut serial, mut used, mut wrap) = (0u64, 0u16, true);
    while !script.0.is_empty() {
        match script.device_op(size) {
            DeviceOp::Add(buffers) => {
                let token = (serial, u16::from(buffers));
                let buffers = vec![(0x1000, 64); buffers.into()];
                if queue.add_chain(&buffers, Direction::Writable, token).is_ok() {
                    in_flight.insert(token);
                }
                serial += 1;
            }
            DeviceOp::Publish => {
                queue.publish();
                let _ = queue.needs_kick();
            }
            DeviceOp::Use(id, len, step) => {
                let state = if wrap { VIRTQ_DESC_F_AVAIL | VIRTQ_DESC_F_USED } else { 0 };
                let flags = u128::from(state | VIRTQ_DESC_F_WRITE);
                memory.write_ring(used, (u128::from(len) | u128::from(id) << 32 | flags << 48) << 64);
                used += step;
                if used >= size {
                    (used, wrap) = (used % size, !wrap);
                }
            }
            DeviceOp::Anything(write) => memory.anything(write, DEVICE_EVENT),
            DeviceOp::Notify(wanted) => queue.set_notification(wanted),
            DeviceOp::Collect => {
                match queue.used() {
                    Ok(found) => assert!(usize::from(found) <= in_flight.len()),
                    Err(error) => outcome.disowned += usize::from(!error.to_string().is_empty()),
                }
                while let Some(used) = queue.pop().expect("`used` looks at what it says is there") {
                    assert!(in_flight.remove(&used.token), "{:?} came twice", used.token);
                    outcome.popped += 1;
                }
            }
        }
        let entries: u16 = in_flight.iter().map(|token| token.1).sum();
        assert_eq!((usize::from(queue.in_flight()), size - queue.free()), (in_flight.len(), entries));
    }
    let left: HashSet<_> = queue.take_in_flight().collect();
    assert_eq!(left, in_flight);
    memory.check_unwritten(DRIVER_EVENT);
}

/// Memory of both sides: two regions that are adjacent in guest addresses but not in host addresses.
struct Memory {
    guest: Arc<GuestMemory>,
    regions: [NonNull<u8>; 2],
    size: u16,
    /// The bytes written by the other side; initially a pattern.
    written: std::cell::RefCell<Vec<u8>>,
}

impl Memory {
    fn new(size: u16) -> Self {
        let guest = guest_regions([(0, 0, SEAM), (SEAM as u64, 1 << 40, SEAM)]);
        let regions = [0, 1].map(|region| guest.regions()[region].mapping().base());
        let mut written: Vec<u8> = (0..END).map(|i| ((i * 31) >> 3) as u8).collect();
        written[DRIVER_EVENT..RING + ring_len(size)].fill(0);
        for (region, bytes) in regions.iter().zip(written.chunks(SEAM)) {
            for (i, &byte) in bytes.iter().enumerate() {
                // SAFETY: each region is as long as its chunk.
                unsafe { region.add(i).write_volatile(byte) };
            }
        }
        Self { guest, regions, size, written: written.into() }
    }

    fn layout(&self) -> PackedLayout {
        let areas =
            Areas { descriptors: RING as u64, driver: DRIVER_EVENT as u64, device: DEVICE_EVENT as u64 };
        PackedLayout::in_memory(&self.guest, areas, self.size.into()).unwrap()
    }

    fn at(&self, address: usize) -> NonNull<u8> {
        assert!(address < END);
        // SAFETY: each region has `SEAM` bytes.
        unsafe { self.regions[address / SEAM].add(address % SEAM) }
    }

    fn write(&self, address: usize, bytes: &[u8]) {
        for (at, &byte) in (address..).zip(bytes) {
            // SAFETY: `at` returns an address inside a region.
            unsafe { self.at(at).write_volatile(byte) };
            self.written.borrow_mut()[at] = byte;
        }
    }

    fn write_ring(&self, index: u16, descriptor: u128) {
        self.write(RING + usize::from(index) * 16, &descriptor.to_le_bytes());
    }

    fn anything(&self, write: Write, event: usize) {
        match write {
            Write::Ring(index, descriptor) => self.write_ring(index, descriptor),
            Write::Event(value) => self.write(event, &value.to_le_bytes()),
        }
    }

    /// Checks that a buffer is completely in one region.
    fn check(&self, buffer: Buffer) {
        let (start, end) =
            (buffer.addr.as_ptr() as usize, buffer.addr.as_ptr() as usize + buffer.len as usize);
        let inside = |region: &NonNull<u8>| {
            let base = region.as_ptr() as usize;
            base <= start && end <= base + SEAM
        };
        assert!(self.regions.iter().any(inside), "{buffer:?}");
    }

    /// Checks that the side under test has only written to the ring and to its event structure at `event`.
    fn check_unwritten(&self, event: usize) {
        let ours = [event..event + 4, RING..RING + ring_len(self.size)];
        for (address, &byte) in self.written.borrow().iter().enumerate() {
            // SAFETY: `at` returns an address inside a region.
            let found = unsafe { self.at(address).read_volatile() };
            assert!(
                found == byte || ours.iter().any(|part| part.contains(&address)),
                "{address:#x} was written"
            );
        }
    }
}

impl Script<'_> {
    fn u128(&mut self) -> u128 {
        u128::from_le_bytes(self.bytes())
    }

    fn driver_op(&mut self, size: u16, holds: bool) -> DriverOp {
        match self.u8() % 32 {
            0..8 => DriverOp::Offer(if self.u8() < 240 { 1 + self.u8() % 5 } else { self.u8() }),
            8..10 => DriverOp::Table(self.u8()),
            10 => DriverOp::Anything(Write::Ring(self.u16() % size, self.u128())),
            11 => DriverOp::Anything(Write::Event(self.u128() as u32)),
            12..15 => DriverOp::Look((self.u8() % 80).into()),
            15..22 => DriverOp::Take(self.u8() % 8),
            22..26 if holds => DriverOp::Return(self.u8(), self.u8().into()),
            22..29 => DriverOp::Publish,
            29 => DriverOp::Probe([self.u16(), self.u16(), self.u16()]),
            30 => DriverOp::Notify(self.u8() < 128),
            _ => DriverOp::Restart((self.u8() >= 160).then(|| self.u16())),
        }
    }

    fn device_op(&mut self, size: u16) -> DeviceOp {
        match self.u8() % 16 {
            0..4 => DeviceOp::Add(1 + self.u8() % 4),
            4..6 => DeviceOp::Publish,
            6..10 => {
                let id = if self.u8() < 240 { u16::from(self.u8()) % size } else { self.u16() };
                DeviceOp::Use(id, self.u8(), 1 + u16::from(self.u8()) / 128)
            }
            10 => DeviceOp::Anything(Write::Ring(self.u16() % size, self.u128())),
            11 => DeviceOp::Anything(Write::Event(self.u128() as u32)),
            12 => DeviceOp::Notify(self.u8() < 128),
            _ => DeviceOp::Collect,
        }
    }

    /// Returns an available descriptor, in its memory format, which is valid in most cases.
    fn descriptor(&mut self, direction: Direction, state: u16) -> u128 {
        let write = if direction == Direction::Writable { VIRTQ_DESC_F_WRITE } else { 0 };
        let near = u64::from(self.u8());
        let (addr, len, flags) = match self.u8() {
            0..160 => (TABLES as u64 + near * 8, near as u32, state | write),
            160..180 => (SEAM as u64 - near, near as u32 * 2, state | write),
            180..220 => {
                let odd = if near < 8 { near as u32 } else { 0 };
                (
                    TABLES as u64 + near,
                    near as u32 / 16 * 16 + odd,
                    state & !VIRTQ_DESC_F_NEXT | VIRTQ_DESC_F_INDIRECT,
                )
            }
            220..230 => (END as u64 - near, u32::from(self.u8()), state | write),
            230..236 => (u64::MAX - near, u32::from(self.u16()) << 16, state | write),
            236..250 => (TABLES as u64, self.u16().into(), state ^ self.u16() & 7),
            _ => (near << 16, self.u16().into(), self.u16()),
        };
        let id = self.u16();
        u128::from(addr) | u128::from(len) << 64 | u128::from(id) << 96 | u128::from(flags) << 112
    }
}

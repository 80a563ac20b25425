//! The other side of a packed queue as a string of bytes: what it writes where, and when our side has its turns. Any
//! bytes are a script; most of what comes out is nearly right, which is where the mistakes are.
#![allow(dead_code, reason = "the fuzz target uses its own part")]

use std::collections::HashSet;
use std::ptr::NonNull;
use std::sync::Arc;

use offcore_mem::GuestMemory;
use offcore_mem::testing::guest_regions;
use offcore_ring::device::{Buffer, Chain, DeviceQueue, Direction};
use offcore_ring::packed::{
    FRESH_BASE, Layout, VIRTQ_DESC_F_AVAIL, VIRTQ_DESC_F_USED, device, driver, ring_len,
};
use offcore_ring::split::{VIRTQ_DESC_F_INDIRECT, VIRTQ_DESC_F_NEXT, VIRTQ_DESC_F_WRITE};
use offcore_ring::testing::single;

const DRIVER_EVENT: usize = 0x100;
const DEVICE_EVENT: usize = 0x200;
const RING: usize = 0x300;
const TABLES: usize = 0x1000;
/// Where the first region ends and the second begins, somewhere else in the host's memory.
const SEAM: usize = 0x2000;
const END: usize = 0x4000;

/// More buffers than this are not taken from a chain.
const MAX_BUFFERS: usize = 40;

/// What came of a script, so that tests can see that scripts do something.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Outcome {
    /// Chains that the device side took.
    pub(crate) taken: usize,
    /// Times that it found something wrong.
    pub(crate) refused: usize,
    /// Chains that the driver side got back.
    pub(crate) popped: usize,
    /// Times that it was given back what was not in flight.
    pub(crate) disowned: usize,
}

impl Outcome {
    pub(crate) fn and(self, other: Self) -> Self {
        Self {
            taken: self.taken + other.taken,
            refused: self.refused + other.refused,
            popped: self.popped + other.popped,
            disowned: self.disowned + other.disowned,
        }
    }
}

/// Plays a script.
///
/// # Panics
/// When the other side got what it wanted.
pub(crate) fn play(script: &[u8]) -> Outcome {
    let mut script = Script(script);
    let options = script.u8();
    let size = [1, 2, 3, 8, 37, 64, 70, 100][usize::from(options & 7)];
    let memory = Memory::new(size);
    if options & 8 != 0 {
        driver_side(script, &memory, options)
    } else {
        device_side(script, &memory, options)
    }
}

/// A hostile driver.
fn device_side(mut script: Script<'_>, memory: &Memory, options: u8) -> Outcome {
    let direction = if options & 16 != 0 { Direction::Writable } else { Direction::Readable };
    let size = memory.size;
    let start = |base| device::Queue::new(memory.layout(), base, options & 32 != 0, options & 64 != 0);
    let mut queue = start(FRESH_BASE).unwrap();
    let (mut next, mut wrap) = (0u16, true);
    let mut held: Vec<Chain> = Vec::new();
    // Descriptors that the driver cannot have: taken, and not published.
    let (mut out, mut unpublished) = (0u32, 0u32);
    let mut outcome = Outcome::default();
    while !script.0.is_empty() {
        match script.u8() % 32 {
            0..8 => {
                let chain = if script.u8() < 240 { 1 + script.u8() % 5 } else { script.u8() };
                for more in (0..chain).rev() {
                    let state = if wrap { VIRTQ_DESC_F_AVAIL } else { VIRTQ_DESC_F_USED };
                    let next_flag = if more > 0 { VIRTQ_DESC_F_NEXT } else { 0 };
                    let descriptor = script.descriptor(direction, state | next_flag);
                    memory.write(RING + usize::from(next) * 16, descriptor);
                    next += 1;
                    if next == size {
                        (next, wrap) = (0, !wrap);
                    }
                }
            }
            8..10 => {
                let index = usize::from(script.u8());
                memory.write(TABLES + index, script.descriptor(direction, 0));
            }
            10 => memory.write(RING + usize::from(script.u16() % size) * 16, script.u128()),
            11 => memory.write_u32(DRIVER_EVENT, script.u128() as u32),
            12..15 => {
                let wanted = usize::from(script.u8() % 80);
                match queue.look(wanted) {
                    Ok(known) => assert!(known <= wanted && known as u32 + out <= size.into()),
                    Err(error) => outcome.refused += usize::from(!error.to_string().is_empty()),
                }
            }
            15..22 => {
                let mut ahead = 0;
                for _ in 0..script.u8() % 8 {
                    if !queue.has(ahead).unwrap_or(false) {
                        break;
                    }
                    let single = single(&mut queue, ahead, &memory.guest, direction);
                    let mut buffers = 0;
                    let walked =
                        queue.walk(ahead, &memory.guest, direction, &mut { MAX_BUFFERS }, |buffer| {
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
                out += u32::from(ahead);
                assert!(out <= size.into(), "{out} of {size} descriptors are out");
                queue.consume(ahead);
            }
            22..26 if !held.is_empty() => {
                let chain = held.remove(usize::from(script.u8()) % held.len());
                queue.push_used(chain, script.u8().into());
                unpublished += u32::from(chain.entries);
            }
            22..29 => {
                queue.publish();
                out -= std::mem::take(&mut unpublished);
                let _ = queue.needs_notification();
            }
            29 => {
                let _ = queue.has(script.u16());
                let _ = single(&mut queue, script.u16(), &memory.guest, direction);
                queue.prefetch_used(script.u16().into());
            }
            30 => queue.set_notification(script.u8() < 128),
            _ => {
                let base = if script.u8() < 160 { queue.base() } else { script.u16().into() };
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
    outcome
}

/// A hostile device.
fn driver_side(mut script: Script<'_>, memory: &Memory, options: u8) -> Outcome {
    let size = memory.size;
    let mut queue = driver::Queue::new(memory.layout(), options & 32 != 0);
    let mut in_flight = HashSet::new();
    let (mut serial, mut used, mut wrap) = (0u64, 0u16, true);
    let mut outcome = Outcome::default();
    while !script.0.is_empty() {
        match script.u8() % 16 {
            0..4 => {
                let buffers = vec![(0x1000, 64); 1 + usize::from(script.u8() % 4)];
                if queue.add_chain(&buffers, Direction::Writable, (serial, buffers.len() as u16)).is_ok() {
                    in_flight.insert((serial, buffers.len() as u16));
                }
                serial += 1;
            }
            4..6 => {
                queue.publish();
                let _ = queue.needs_kick();
            }
            6..10 => {
                let state = if wrap { VIRTQ_DESC_F_AVAIL | VIRTQ_DESC_F_USED } else { 0 };
                let id = if script.u8() < 240 { u16::from(script.u8()) % size } else { script.u16() };
                let word = u128::from(script.u8())
                    | u128::from(id) << 32
                    | u128::from(state | VIRTQ_DESC_F_WRITE) << 48;
                memory.write(RING + usize::from(used) * 16, word << 64);
                used += 1 + u16::from(script.u8()) / 128;
                if used >= size {
                    (used, wrap) = (used % size, !wrap);
                }
            }
            10 => memory.write(RING + usize::from(script.u16() % size) * 16, script.u128()),
            11 => memory.write_u32(DEVICE_EVENT, script.u128() as u32),
            12 => queue.set_notification(script.u8() < 128),
            _ => {
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
    outcome
}

/// Memory of both sides: two regions that follow each other in guest addresses but not in the host's.
struct Memory {
    guest: Arc<GuestMemory>,
    regions: [NonNull<u8>; 2],
    size: u16,
    /// What the other side wrote; before that, a pattern.
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

    fn layout(&self) -> Layout {
        let parts = (RING as u64, DRIVER_EVENT as u64, DEVICE_EVENT as u64);
        Layout::in_memory(&self.guest, parts, self.size.into()).unwrap()
    }

    fn at(&self, address: usize) -> NonNull<u8> {
        assert!(address < END);
        // SAFETY: both regions are as long as the seam is far.
        unsafe { self.regions[address / SEAM].add(address % SEAM) }
    }

    fn write(&self, address: usize, value: u128) {
        for (i, byte) in value.to_le_bytes().into_iter().enumerate() {
            // SAFETY: `at` is in a region.
            unsafe { self.at(address + i).write_volatile(byte) };
            self.written.borrow_mut()[address + i] = byte;
        }
    }

    fn write_u32(&self, address: usize, value: u32) {
        for (i, byte) in value.to_le_bytes().into_iter().enumerate() {
            // SAFETY: `at` is in a region.
            unsafe { self.at(address + i).write_volatile(byte) };
            self.written.borrow_mut()[address + i] = byte;
        }
    }

    /// A buffer is in one region as a whole.
    fn check(&self, buffer: Buffer) {
        let (start, end) =
            (buffer.addr.as_ptr() as usize, buffer.addr.as_ptr() as usize + buffer.len as usize);
        let inside = |region: &NonNull<u8>| {
            let base = region.as_ptr() as usize;
            base <= start && end <= base + SEAM
        };
        assert!(self.regions.iter().any(inside), "{buffer:?}");
    }

    /// Our side wrote nothing but the ring and its own event structure at `event`.
    fn check_unwritten(&self, event: usize) {
        let ours = [event..event + 4, RING..RING + ring_len(self.size)];
        for (address, &byte) in self.written.borrow().iter().enumerate() {
            // SAFETY: `at` is in a region.
            let found = unsafe { self.at(address).read_volatile() };
            assert!(
                found == byte || ours.iter().any(|part| part.contains(&address)),
                "{address:#x} was written"
            );
        }
    }
}

struct Script<'a>(&'a [u8]);

impl Script<'_> {
    fn u8(&mut self) -> u8 {
        let Some((&first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        first
    }

    fn u16(&mut self) -> u16 {
        u16::from_le_bytes([self.u8(), self.u8()])
    }

    fn u128(&mut self) -> u128 {
        u128::from_le_bytes(std::array::from_fn(|_| self.u8()))
    }

    /// An available descriptor that is mostly as it should be, as it is in memory.
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

//! A device that terminates at any moment. The next one finds all chains that were not returned, in order.

use std::collections::VecDeque;

use offcore_mem::testing::guest_memory;
use offcore_mem::{GuestMemory, Hugepages, Mapping};

use super::*;
use crate::device::{Chain, DeviceQueue, Direction, RingDevice};
use crate::vector::Wanted;
use crate::{Areas, Layout, driver, packed, with_queue};

#[cfg(not(miri))]
mod exhaustive;

const LEN: usize = 0x1_0000;
const AREAS: Areas = Areas { descriptors: 0x1000, driver: 0x3000, device: 0x4000 };
const BUFFERS: u64 = 0x8000;

/// The memory of a ring, and the region for descriptors in flight.
struct World {
    memory: Arc<GuestMemory>,
    region: Arc<Guarded>,
    layout: Layout,
}

impl World {
    fn new(size: u16, is_packed: bool) -> Self {
        let memory = guest_memory(LEN);
        let (mapping, _fd) = Mapping::memfd("inflight", LEN, Hugepages::None).unwrap();
        let layout = Layout::in_memory(&memory, AREAS, size.into(), is_packed).unwrap();
        Self { memory, region: Arc::new(Guarded::new(mapping)), layout }
    }

    fn fresh(&self) -> u32 {
        if matches!(self.layout, Layout::Packed(_)) { packed::FRESH_BASE } else { 0 }
    }

    fn inflight(&self) -> Inflight {
        Inflight::new(&self.region, 64, self.layout.size())
    }

    fn device(&self, base: u32) -> RingDevice {
        let mut device = RingDevice::new(self.layout.clone(), base, false, true).unwrap();
        device.track(self.inflight());
        device
    }

    fn memory(&self) -> Vec<u8> {
        bytes(self.memory.regions()[0].mapping())
    }

    /// Creates another world with this content.
    fn of(&self, memory: &[u8], region: &[u8]) -> Self {
        let other = Self::new(self.layout.size(), matches!(self.layout, Layout::Packed(_)));
        other.memory.regions()[0].mapping().write_at(0, memory);
        other.region.write_at(0, region);
        other
    }

    /// Returns the first address of each chain that a device finds when it resumes the ring.
    fn taken_up(&self) -> Vec<u64> {
        let base = self.layout.take_up(&self.inflight(), 77).unwrap().expect("in use");
        let mut device = self.device(base);
        let host = self.memory.regions()[0].mapping().base().as_ptr() as u64;
        let (mut found, mut ahead) = (Vec::new(), 0);
        with_queue!(&mut device, device => {
            while ahead < device.size() && device.has(ahead).unwrap() {
                let mut first = None;
                let chain = device.walk(ahead, &self.memory, Direction::Readable, &mut 80, |buffer| {
                    first.get_or_insert(buffer.addr.as_ptr() as u64 - host);
                });
                ahead += chain.unwrap().entries;
                found.push(first.unwrap());
            }
        });
        found
    }
}

fn bytes(mapping: &Mapping) -> Vec<u8> {
    let mut bytes = vec![0; LEN];
    mapping.read_at(0, &mut bytes);
    bytes
}

/// A driver and a device that work on the same ring.
struct Run {
    world: World,
    driver: driver::RingDriver<u64>,
    device: RingDevice,
    /// Addresses of chains that the driver has made available and not got back.
    out: VecDeque<u64>,
    /// Chains taken and not pushed yet.
    taken: VecDeque<Chain>,
    /// Number of chains pushed and not published yet.
    pushed: usize,
    random: u32,
    sent: u64,
}

impl Run {
    fn new(size: u16, is_packed: bool, random: u32) -> Self {
        let world = World::new(size, is_packed);
        let driver = driver::RingDriver::new(world.layout.clone(), false);
        assert_eq!(world.layout.take_up(&world.inflight(), world.fresh()), Ok(None));
        let device = world.device(world.fresh());
        let (out, taken) = (VecDeque::new(), VecDeque::new());
        Self { world, driver, device, out, taken, pushed: 0, random, sent: 0 }
    }

    /// Returns a pseudo-random number below `most`.
    fn below(&mut self, most: u32) -> u32 {
        self.random = self.random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (self.random >> 16) % most
    }

    fn check(&self) {
        let region = bytes(&self.world.region);
        assert_eq!(self.out, self.world.of(&self.world.memory(), &region).taken_up());
    }

    fn drive(&mut self) {
        while let Ok(1..) = self.driver.used() {
            self.driver.pop().unwrap();
        }
        for _ in 0..self.below(40) {
            let addr = BUFFERS + self.sent % 512 * 64;
            let buffers: Vec<_> = (0..1 + u64::from(self.below(3))).map(|i| (addr + i * 16, 16)).collect();
            if self.driver.add_chain(&buffers, Direction::Readable, addr).is_err() {
                break;
            }
            self.out.push_back(addr);
            self.sent += 1;
        }
        self.driver.publish();
    }

    fn take(&mut self) {
        let (most, mut ahead) = (self.below(80), 0);
        with_queue!(&mut self.device, device => {
            device.look(most as usize).unwrap();
            for _ in 0..most {
                if ahead >= device.size() || !device.has(ahead).unwrap() {
                    break;
                }
                let memory = &self.world.memory;
                let chain = device.walk(ahead, memory, Direction::Readable, &mut 80, |_| ()).unwrap();
                ahead += chain.entries;
                self.taken.push_back(chain);
            }
            device.consume(ahead);
        });
    }

    fn push(&mut self) {
        for _ in 0..self.below(30) {
            let Some(chain) = self.taken.pop_front() else { break };
            with_queue!(&mut self.device, device => device.push_used(chain, 7));
            self.pushed += 1;
            self.check();
        }
    }

    fn publish(&mut self) {
        let before = self.world.memory();
        self.device.publish();
        // The state between the two stores of a publication.
        assert_eq!(self.out, self.world.of(&before, &bytes(&self.world.region)).taken_up());
        self.out.drain(..std::mem::take(&mut self.pushed));
    }

    /// The device terminates, and another one continues.
    fn end(&mut self) {
        let base = self.world.layout.take_up(&self.world.inflight(), 77).unwrap().unwrap();
        self.device = self.world.device(base);
        self.taken.clear();
        self.pushed = 0;
    }
}

#[test]
fn inflight_chains_are_recovered_after_crash() {
    for (size, is_packed) in
        [(3, true), (5, true), (8, true), (70, true), (200, true), (8, false), (128, false)]
    {
        for seed in 0..4 {
            let mut run = Run::new(size, is_packed, seed);
            for _ in 0..200 {
                match run.below(12) {
                    0..3 => run.drive(),
                    3..6 => run.take(),
                    6..9 => run.push(),
                    9..11 => run.publish(),
                    _ => run.end(),
                }
                run.check();
            }
            assert!(run.sent > 10, "{size}: {}", run.sent);
        }
    }
}

#[test]
fn stopped_ring_starts_at_given_base() {
    let world = World::new(8, true);
    let inflight = world.inflight();
    assert_eq!(world.layout.take_up(&inflight, 3 | 3 << 16), Ok(None));
    assert_eq!(world.layout.take_up(&inflight, 5 | 5 << 16), Ok(Some(3 | 3 << 16)));
    inflight.end();
    assert_eq!(world.layout.take_up(&inflight, 5 | 5 << 16), Ok(None));
    assert_eq!(world.layout.take_up(&inflight, 0), Ok(Some(5 | 5 << 16)));
    // A split ring that begins at another position than its used index is not recorded.
    let world = World::new(8, false);
    assert_eq!(world.layout.take_up(&world.inflight(), 3), Ok(None));
    assert_eq!(world.layout.take_up(&world.inflight(), 0), Ok(None));
    assert_eq!(world.layout.take_up(&world.inflight(), 3), Ok(Some(0)));
}

/// Arbitrary content of the region leads to an error or a position in the ring.
#[test]
fn inflight_region_content_is_checked() {
    let world = World::new(8, true);
    let inflight = world.inflight();
    let wrong = |result: Result<Option<u32>, RingError>| matches!(result, Err(RingError::Inflight { .. }));
    let features = IN_ORDER | PACKED;
    for (version, features, size) in
        [(1, 0, 8), (1, IN_ORDER, 8), (2, features, 8), (1, features, 9), (1, features, 0)]
    {
        inflight.u64_at(FEATURES_AT).store(features, Ordering::Relaxed);
        inflight.u16_at(VERSION_AT).store(version, Ordering::Relaxed);
        inflight.u16_at(SIZE_AT).store(size, Ordering::Relaxed);
        assert!(wrong(world.layout.take_up(&inflight, 0)), "{version} {features:#x} {size}");
    }
    // More descriptors than the part has room for.
    let layout = Layout::in_memory(&world.memory, AREAS, 16, true).unwrap();
    inflight.end();
    assert!(wrong(layout.take_up(&inflight, 0)));
    inflight.u16_at(SIZE_AT).store(8, Ordering::Relaxed);
    inflight.u16_at(VERSION_AT).store(1, Ordering::Relaxed);
    world.region.write_at(64 + USED_AT + 2, &[0xff; 4]);
    assert!(matches!(world.layout.take_up(&inflight, 0), Err(RingError::Base { .. })));
    // Entries and rings with arbitrary content.
    for seed in 0..=255_u8 {
        world.region.write_at(64 + USED_AT, &[seed % 8, 0, seed / 8 % 8, 0, seed, seed / 2]);
        let filling: Vec<_> = (0..256).map(|i| seed.wrapping_mul(i as u8).wrapping_add(i as u8)).collect();
        world.region.write_at(64 + HEADER, &filling);
        world.memory.regions()[0].mapping().write_at(AREAS.descriptors as usize, &filling[..128]);
        let base = world.layout.take_up(&inflight, 0).unwrap().unwrap();
        assert!(base & 0x7fff < 8 && base & 0xffff == base >> 16);
    }
}

#[test]
fn unpublished_bursts_are_recovered() {
    for packed in [false, true] {
        let mut run = Run::new(64, packed, 1);
        for addr in (0..32).map(|i| BUFFERS + i * 64) {
            run.driver.add_chain(&[(addr, 16)], Direction::Readable, addr).unwrap();
            run.out.push_back(addr);
        }
        run.driver.publish();
        let memory = Arc::clone(&run.world.memory);
        with_queue!(&mut run.device, device => {
            device.look(32).unwrap();
            let wanted = Wanted { direction: Direction::Readable, least: 1, most: u32::MAX };
            assert_eq!(device.singles(0, 32, &memory, wanted).len(), 32);
            // They occupy more than one cache line.
            device.push_used_singles(0, 32, Direction::Readable);
        });
        run.check();
    }
}

//! An in-process guest for tests: memory, the driver side of one virtqueue, and buffers. No socket is needed.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Arc;
use std::time::Duration;

use crate::features::{
    VIRTIO_F_INDIRECT_DESC, VIRTIO_F_RING_PACKED, VIRTIO_F_VERSION_1, VIRTIO_NET_F_MRG_RXBUF,
};
use crate::{VringCell, VringConfig};
use offcore_dma::core::CoreDevice;
use offcore_dma::cpu::CpuDevice;
use offcore_dma::fault::{Faults, FaultyChannel};
use offcore_dma::{ChannelId, Context, CopyDevice, Mover};
use offcore_mem::testing::guest_regions;
use offcore_mem::{Burst, GuestMemory, Hugepages, Pool, PoolCache};
use offcore_ring::{Areas, Layout, device::Direction, driver};
use offcore_stats::{StageClock, tsc};

/// Guest physical address of the buffers. The rings are at lower addresses.
pub const BUFFERS: u64 = 1 << 20;
/// Bytes of a guest's memory.
pub const MEMORY: usize = 16 << 20;
/// Guest physical address of the first byte of memory.
pub const GUEST: u64 = 0x4000_0000;
/// Front-end address of the first byte of memory.
const USER: u64 = 1 << 40;

/// Returns the ID of a channel that does not exist in a mover with fewer than nine channels.
pub fn channel_of_another_mover() -> ChannelId {
    let mut mover = Mover::new();
    let mut channel = || mover.add_channel(CoreDevice::stepped().0.open_channel(64).unwrap());
    (0..8).for_each(|_| _ = channel());
    channel()
}

/// A guest with one virtqueue.
#[derive(Debug)]
pub struct Guest {
    /// The guest's memory.
    pub memory: Arc<GuestMemory>,
    /// The first virtqueue.
    pub layout: Layout,
    /// The second virtqueue, for guests that also transmit.
    pub tx_layout: Layout,
}

impl Guest {
    /// Creates a guest with split virtqueues.
    pub fn new(size: u16) -> Self {
        Self::with_rings(size, false)
    }

    /// Creates a guest with packed or split virtqueues.
    pub fn with_rings(size: u16, packed: bool) -> Self {
        let memory = guest_regions([(GUEST, USER, MEMORY)]);
        let at = |offset: u64| USER + offset;
        let ring = |descriptors, driver, device| {
            let areas = Areas { descriptors: at(descriptors), driver: at(driver), device: at(device) };
            Layout::in_memory(&memory, areas, size.into(), packed).unwrap()
        };
        let layout = ring(0, 0x8_0000, 0xa_0000);
        let tx_layout = ring(0x4_0000, 0x9_0000, 0xc_0000);
        Self { memory, layout, tx_layout }
    }

    /// Zeroes the parts of both virtqueues, for sizes up to 512, so that new drivers can be created.
    pub fn reset_rings(&self) {
        for part in [0, 0x8_0000, 0xa_0000, 0x4_0000, 0x9_0000, 0xc_0000] {
            self.write(GUEST + part, &[0; 0x2000]);
        }
    }

    /// Whether the virtqueues are packed.
    pub fn packed(&self) -> bool {
        matches!(self.layout, Layout::Packed(_))
    }

    /// Start position of a new virtqueue. For a packed one, both wrap counters are set.
    fn begin(&self) -> u32 {
        if self.packed() { 0x8000_8000 } else { 0 }
    }

    /// Returns the configuration that starts the first virtqueue.
    pub fn config(&self, features: u64) -> VringConfig {
        VringConfig {
            memory: Arc::clone(&self.memory),
            layout: self.layout.clone(),
            start: VringConfig::next_start(),
            base: self.begin(),
            features: if self.packed() { features | VIRTIO_F_RING_PACKED } else { features },
            call: None,
            kick: None,
            log: None,
            inflight: None,
            enabled: true,
        }
    }

    /// Guest address of buffer `index`, if each buffer has `size` bytes.
    pub fn buffer(&self, index: usize, size: usize) -> u64 {
        assert!(BUFFERS as usize + (index + 1) * size <= MEMORY);
        GUEST + BUFFERS + (index * size) as u64
    }

    /// Reads `len` bytes at `address`.
    pub fn read(&self, address: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.regions()[0].mapping().read_at((address - GUEST) as usize, &mut bytes);
        bytes
    }

    /// Writes to `address`.
    pub fn write(&self, address: u64, bytes: &[u8]) {
        self.memory.regions()[0].mapping().write_at((address - GUEST) as usize, bytes);
    }
}

/// Features of a driver that supports mergeable buffers and indirect descriptors.
pub const FEATURES: u64 = VIRTIO_F_VERSION_1 | VIRTIO_NET_F_MRG_RXBUF | VIRTIO_F_INDIRECT_DESC;

/// State of a worker.
#[derive(Debug)]
pub struct Worker {
    /// Makes the copies.
    pub mover: Mover,
    /// Packet buffers.
    pub cache: PoolCache,
    /// Time of the stages.
    pub clock: StageClock,
    /// Maximum number of packets in one call.
    pub burst: usize,
}

impl Worker {
    /// Creates a worker with a pool of 4096 packet buffers of 2 KiB.
    #[allow(clippy::new_without_default, reason = "a test says what it makes")]
    pub fn new() -> Self {
        Self::over(Pool::new(4096, 2048, Hugepages::None).unwrap())
    }

    /// Creates a worker that uses `pool`.
    pub fn over(pool: &'static Pool) -> Self {
        Self { mover: Mover::new(), cache: pool.cache(), clock: StageClock::private(), burst: 64 }
    }

    /// Adds an engine with all kinds of faults, including lost and late copies.
    pub fn add_faulty(&mut self, seed: u64) -> ChannelId {
        self.mover.set_lost_after(tsc::ticks(Duration::from_micros(100)));
        let faults = Faults {
            seed,
            error: 50,
            partial: 50,
            delay: 200,
            never: 2,
            late: 3,
            reorder: 300,
            delay_polls: 5,
            late_polls: 2000,
            reset_calls: 2,
        };
        let channel = FaultyChannel::new(CpuDevice.open_channel(256).unwrap(), faults);
        self.mover.add_channel(Box::new(channel))
    }

    /// Returns the context for calls of this worker's queues.
    pub fn ctx(&mut self) -> Context<'_> {
        Context { mover: &mut self.mover, cache: &mut self.cache, clock: &mut self.clock, burst: self.burst }
    }

    /// Returns a burst of packets with these lengths. Packet `i` is filled with bytes derived from `serial + i`.
    pub fn packets(&mut self, serial: u64, lengths: &[usize]) -> Burst {
        let pool = self.cache.pool();
        let mut burst = Burst::new();
        for (i, &len) in lengths.iter().enumerate() {
            let mut packet = self.cache.take().unwrap();
            packet.set_range(pool, offcore_mem::HEADROOM, len);
            packet.bytes_mut().copy_from_slice(&pattern(serial + i as u64, len)); // copy-ok: a test
            burst.push(packet);
        }
        burst
    }
}

/// The bytes of packet `serial`.
pub fn pattern(serial: u64, len: usize) -> Vec<u8> {
    (0..len).map(|i| (serial.wrapping_mul(31) + i as u64 * 7) as u8).collect()
}

/// Starts a virtqueue.
pub fn start(cell: &VringCell, config: VringConfig) {
    cell.publish(|wanted| wanted.vring = Some(Arc::new(config)));
}

/// Maximum time to wait for an event that should happen at once.
pub const TIMEOUT: Duration = Duration::from_secs(10);

/// A driver that keeps an RX virtqueue filled with buffers of one size, and checks the returned ones.
#[derive(Debug)]
pub struct Receiver {
    /// The driver's side of the virtqueue.
    pub driver: driver::RingDriver<u64>,
    size: u32,
}

impl Receiver {
    /// Fills the virtqueue of `guest` with buffers of `size` bytes.
    pub fn new(guest: &Guest, size: u32) -> Self {
        let mut driver = driver::RingDriver::new(guest.layout.clone(), false);
        for i in 0..usize::from(guest.layout.size()) {
            let address = guest.buffer(i, 2048);
            driver.add(address, size, Direction::Writable, address).unwrap();
        }
        driver.publish();
        Self { driver, size }
    }

    /// Returns the next packet, virtio-net header included, merged from its buffers. The buffers are made available
    /// again.
    pub fn receive(&mut self, guest: &Guest) -> Option<Vec<u8>> {
        if self.driver.used().unwrap() == 0 {
            return None;
        }
        let mut packet = Vec::new();
        let mut buffers = 1u16;
        let mut first = true;
        while buffers > 0 {
            let used = self.driver.pop().unwrap().expect("a merged packet is published as a whole");
            assert!(used.len <= self.size);
            let bytes = guest.read(used.token, used.len as usize);
            if first {
                buffers = u16::from_le_bytes([bytes[10], bytes[11]]);
                first = false;
            }
            packet.extend(bytes);
            self.driver.add(used.token, self.size, Direction::Writable, used.token).unwrap();
            buffers -= 1;
            if buffers > 0 {
                assert!(self.driver.used().unwrap() > 0, "a merged packet is published as a whole");
            }
        }
        self.driver.publish();
        Some(packet)
    }
}

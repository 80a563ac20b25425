//! An in-process guest: its memory, one virtqueue's driver side, and buffers, without a socket.
#![allow(dead_code, reason = "each test binary uses its own part")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Arc;
use std::time::Duration;

use offcore_dma::core::CoreDevice;
use offcore_dma::{ChannelId, Context, Device, Mover};
use offcore_mem::{Burst, GuestMemory, GuestRegion, Hugepages, Mapping, Pool, PoolCache};
use offcore_ring::{Layout, device::Direction, driver};
use offcore_stats::StageClock;
use offcore_vhost::features::{
    VIRTIO_F_EVENT_IDX, VIRTIO_F_INDIRECT_DESC, VIRTIO_F_RING_PACKED, VIRTIO_F_VERSION_1,
    VIRTIO_NET_F_MRG_RXBUF,
};
use offcore_vhost::{VringCell, VringConfig};

/// Guest physical address of the buffers; the rings are below.
pub(crate) const BUFFERS: u64 = 1 << 20;
pub(crate) const MEMORY: usize = 16 << 20;
pub(crate) const GUEST: u64 = 0x4000_0000;

/// A channel that a worker with fewer than eight has not.
pub(crate) fn channel_of_another_mover() -> ChannelId {
    let mut mover = Mover::new();
    let mut channel = || mover.add_channel(CoreDevice::stepped().0.open_channel(64).unwrap());
    (0..8).for_each(|_| _ = channel());
    channel()
}

/// A guest with one virtqueue.
pub(crate) struct Guest {
    pub(crate) memory: Arc<GuestMemory>,
    pub(crate) layout: Layout,
    /// A second virtqueue, for guests that transmit as well.
    pub(crate) tx_layout: Layout,
    base: *mut u8,
}

// SAFETY: the base pointer is to a mapping that `memory` keeps; tests access disjoint parts.
unsafe impl Send for Guest {}

impl Guest {
    /// A guest with split virtqueues.
    pub(crate) fn new(size: u16) -> Self {
        Self::with_rings(size, false)
    }

    /// A guest with packed virtqueues, or with split ones.
    pub(crate) fn with_rings(size: u16, packed: bool) -> Self {
        let (mapping, _fd) = Mapping::memfd("guest", MEMORY, Hugepages::None).unwrap();
        let base = mapping.base().as_ptr();
        let region = GuestRegion::new(GUEST, base as u64, MEMORY as u64, mapping, 0).unwrap();
        let memory = Arc::new(GuestMemory::new(vec![region]).unwrap());
        let at = |offset: u64| base as u64 + offset;
        let ring = |parts| Layout::in_memory(&memory, parts, size.into(), packed).unwrap();
        let layout = ring((at(0), at(0x8_0000), at(0xa_0000)));
        let tx_layout = ring((at(0x4_0000), at(0x9_0000), at(0xc_0000)));
        Self { memory, layout, tx_layout, base }
    }

    /// Zeroes the parts of both virtqueues, for sizes up to 512: drivers can begin anew.
    pub(crate) fn reset_rings(&self) {
        for part in [0, 0x8_0000, 0xa_0000, 0x4_0000, 0x9_0000, 0xc_0000] {
            self.write(GUEST + part, &[0; 0x2000]);
        }
    }

    pub(crate) fn packed(&self) -> bool {
        matches!(self.layout, Layout::Packed(_))
    }

    /// Where a fresh virtqueue begins: a packed one with both wrap counters set.
    fn begin(&self) -> u32 {
        if self.packed() { 0x8000_8000 } else { 0 }
    }

    pub(crate) fn config(&self, features: u64) -> VringConfig {
        VringConfig {
            memory: Arc::clone(&self.memory),
            layout: self.layout.clone(),
            start: VringConfig::next_start(),
            base: self.begin(),
            features: if self.packed() { features | VIRTIO_F_RING_PACKED } else { features },
            call: None,
            kick: None,
            enabled: true,
        }
    }

    /// Guest address of buffer `index` of `size` bytes.
    pub(crate) fn buffer(&self, index: usize, size: usize) -> u64 {
        assert!(BUFFERS as usize + (index + 1) * size <= MEMORY);
        GUEST + BUFFERS + (index * size) as u64
    }

    pub(crate) fn read(&self, address: u64, len: usize) -> Vec<u8> {
        let offset = (address - GUEST) as usize;
        assert!(offset + len <= MEMORY);
        // SAFETY: inside the mapping; in these tests nobody writes there at the same time.
        unsafe { std::slice::from_raw_parts(self.base.add(offset), len) }.to_vec()
    }

    pub(crate) fn write(&self, address: u64, bytes: &[u8]) {
        let offset = (address - GUEST) as usize;
        assert!(offset + bytes.len() <= MEMORY);
        // SAFETY: as in `read`.
        unsafe { self.base.add(offset).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }
}

pub(crate) const FEATURES: u64 = VIRTIO_F_VERSION_1 | VIRTIO_NET_F_MRG_RXBUF | VIRTIO_F_INDIRECT_DESC;
pub(crate) const FEATURES_EVENT: u64 = FEATURES | VIRTIO_F_EVENT_IDX;

/// What a worker owns.
pub(crate) struct Worker {
    pub(crate) mover: Mover,
    pub(crate) cache: PoolCache,
    pub(crate) clock: StageClock,
}

impl Worker {
    pub(crate) fn new() -> Self {
        let pool = Pool::new(4096, 2048, Hugepages::None).unwrap();
        Self { mover: Mover::new(), cache: pool.cache(), clock: StageClock::private() }
    }

    pub(crate) fn ctx(&mut self) -> Context<'_> {
        Context { mover: &mut self.mover, cache: &mut self.cache, clock: &mut self.clock, burst: 64 }
    }

    /// A burst of packets of these lengths; packet `i` is filled with bytes derived from `serial + i`.
    pub(crate) fn packets(&mut self, serial: u64, lengths: &[usize]) -> Burst {
        let pool = self.cache.pool();
        let mut burst = Burst::new();
        for (i, &len) in lengths.iter().enumerate() {
            let mut packet = self.cache.take().unwrap();
            packet.set_range(pool, offcore_mem::HEADROOM, len);
            packet.bytes_mut().copy_from_slice(&pattern(serial + i as u64, len));
            burst.push(packet);
        }
        burst
    }
}

/// The bytes of packet `serial`.
pub(crate) fn pattern(serial: u64, len: usize) -> Vec<u8> {
    (0..len).map(|i| (serial.wrapping_mul(31) + i as u64 * 7) as u8).collect()
}

pub(crate) fn start(cell: &VringCell, config: VringConfig) {
    cell.publish(|wanted| wanted.vring = Some(Arc::new(config)));
}

pub(crate) const TIMEOUT: Duration = Duration::from_secs(10);

/// A driver that keeps an RX virtqueue full of buffers of one size, and checks what comes back.
pub(crate) struct Receiver {
    pub(crate) driver: driver::Queue<u64>,
    size: u32,
}

impl Receiver {
    pub(crate) fn new(guest: &Guest, size: u32) -> Self {
        let mut driver = driver::Queue::new(guest.layout.clone(), false);
        for i in 0..usize::from(guest.layout.size()) {
            let address = guest.buffer(i, 2048);
            driver.add(address, size, Direction::Writable, address).unwrap();
        }
        driver.publish();
        Self { driver, size }
    }

    /// The next packet, `virtio-net` header included, put together from its buffers, which are made available again.
    pub(crate) fn receive(&mut self, guest: &Guest) -> Option<Vec<u8>> {
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

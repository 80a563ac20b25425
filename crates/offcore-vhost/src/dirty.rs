//! Logging of dirty pages for live migration (vhost-user specification, "Migration").
//!
//! While a front end copies the memory of its guest to another machine, it shares a log with one bit for each page of 4
//! KiB, indexed by guest physical address. A page is marked only after the copies into it are complete: the front end
//! may clear a bit at any time, and then reads the page as it is.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use offcore_mem::sigbus::Guarded;
use offcore_mem::{GuestMemory, Mapping};
use offcore_ring::Layout;

use crate::pieces::Piece;

/// Length of a page in bytes (VHOST_LOG_PAGE).
const PAGE: u64 = 4096;

/// The dirty log, in memory shared by the front end.
#[derive(Debug)]
pub struct DirtyLog {
    mapping: Guarded,
    bits: usize,
    len: usize,
}

impl DirtyLog {
    /// Uses the log of `len` bytes at `offset` in `mapping`.
    ///
    /// # Panics
    /// Panics if the mapping ends before the log.
    pub(crate) fn new(mapping: Mapping, offset: usize, len: usize) -> Self {
        assert!(offset.checked_add(len).is_some_and(|end| end <= mapping.len()));
        Self { mapping: Guarded::new(mapping), bits: offset, len }
    }

    /// The guest address at which the log ends.
    pub(crate) fn end(&self) -> u64 {
        (self.len as u64).saturating_mul(8 * PAGE)
    }

    /// Number of bytes mapped for the log.
    pub(crate) fn mapped(&self) -> u64 {
        self.mapping.len() as u64
    }

    /// Whether the file of the log was truncated.
    pub(crate) fn has_vanished(&self) -> bool {
        self.mapping.has_vanished()
    }

    /// Marks the pages of the `len` bytes at guest address `guest` as written. Pages beyond the end of the log are
    /// ignored: no virtqueue runs with such memory.
    fn mark(&self, guest: u64, len: u64) {
        if len == 0 {
            return;
        }
        for page in guest / PAGE..=(guest.saturating_add(len - 1)) / PAGE {
            let byte = usize::try_from(page / 8).unwrap_or(usize::MAX);
            if byte >= self.len {
                return;
            }
            // SAFETY: the byte is within the mapping, as checked above and in `new`. It is shared with the front end,
            // which also changes it atomically.
            let byte = unsafe { AtomicU8::from_ptr(self.mapping.base().as_ptr().add(self.bits + byte)) };
            // Done even if the bit is set, because the front end may be about to clear it and read the page. The
            // ordering makes the preceding writes visible first.
            byte.fetch_or(1 << (page % 8), Ordering::SeqCst);
        }
    }
}

/// The parts of a virtqueue to mark, and the log.
#[derive(Clone, Debug)]
pub struct RingLog {
    log: Arc<DirtyLog>,
    /// Guest addresses and lengths of the ring parts that the device writes.
    parts: [(u64, u64); 2],
}

impl RingLog {
    /// Describes the ring in `layout`, inside `memory`. A front end may have the device area (the used ring of a split
    /// ring) logged at another address, `device_area`.
    pub(crate) fn new(
        log: &Arc<DirtyLog>,
        memory: &GuestMemory,
        layout: &Layout,
        device_area: Option<u64>,
    ) -> Self {
        let mut parts =
            layout.written().map(|(host, len)| (memory.guest_address(host).unwrap_or(0), len as u64));
        parts[0].0 = device_area.unwrap_or(parts[0].0);
        Self { log: Arc::clone(log), parts }
    }
}

/// A destination buffer of a packet in flight.
#[derive(Debug)]
struct Written {
    guest: u64,
    len: u32,
    /// Whether it is the last buffer of its packet.
    is_last: bool,
}

/// The dirty log of one virtqueue, used by its worker.
#[derive(Debug)]
pub(crate) struct Logging {
    ring: RingLog,
    /// Buffers of the packets in flight, in order.
    buffers: VecDeque<Written>,
}

impl Logging {
    pub(crate) fn new(ring: RingLog) -> Self {
        Self { ring, buffers: VecDeque::new() }
    }

    /// Records the destination of the next packet in `memory`.
    #[cold]
    #[inline(never)]
    pub(crate) fn note(&mut self, memory: &GuestMemory, to: &[Piece]) {
        for (index, piece) in to.iter().enumerate() {
            let guest = std::ptr::NonNull::new(piece.addr).and_then(|addr| memory.guest_address(addr));
            let is_last = index + 1 == to.len();
            self.buffers.push_back(Written { guest: guest.unwrap_or(0), len: piece.len, is_last });
        }
    }

    /// Marks the pages written by the oldest `packets` recorded. Their copies must be complete.
    #[cold]
    #[inline(never)]
    pub(crate) fn complete(&mut self, mut packets: usize) {
        while packets > 0
            && let Some(Written { guest, len, is_last }) = self.buffers.pop_front()
        {
            self.ring.log.mark(guest, len.into());
            packets -= usize::from(is_last);
        }
    }

    /// Marks the ring parts that the device writes.
    #[cold]
    #[inline(never)]
    pub(crate) fn mark_ring(&self) {
        for (guest, len) in self.ring.parts {
            self.ring.log.mark(guest, len);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use offcore_dma::core::CoreDevice;
    use offcore_dma::{Binding, CopyDevice, Mode};
    use offcore_mem::Hugepages;

    use super::*;
    use crate::testing::{FEATURES, GUEST, Guest, Receiver, Worker, start};
    use crate::{Enqueue, VringCell, VringConfig};

    #[test]
    fn dirty_log_has_a_bit_per_page() {
        let (shared, fd) = Mapping::memfd("log", 4096, Hugepages::None).unwrap();
        let mapping = Mapping::shared(std::os::fd::AsFd::as_fd(&fd), 0, 4096).unwrap();
        let log = DirtyLog::new(mapping, 16, 8);
        assert_eq!(log.end(), 8 * 8 * 4096);
        let set = || {
            let mut bytes = [0; 32];
            shared.read_at(0, &mut bytes);
            (0..256)
                .filter(|bit| bytes[bit / 8] >> (bit % 8) & 1 == 1)
                .map(|bit| bit as i32 - 128)
                .collect::<Vec<_>>()
        };
        log.mark(0, 0);
        assert_eq!(set(), []);
        log.mark(4096, 1);
        log.mark(3 * 4096 - 1, 2);
        log.mark(7 * 4096, 2 * 4096);
        assert_eq!(set(), [1, 2, 3, 7, 8]);
        // Addresses beyond the end are ignored.
        log.mark(63 * 4096, 8 * 4096);
        log.mark(u64::MAX - 1, u64::MAX);
        assert_eq!(set(), [1, 2, 3, 7, 8, 63]);
        assert!(!log.has_vanished());
    }

    #[test]
    fn logging_waits_for_inflight_copies() {
        for packed in [false, true] {
            let (guest, mut worker) = (Guest::with_rings(16, packed), Worker::new());
            let (device, mut stepper) = CoreDevice::stepped();
            let channel = worker.mover.add_channel(device.open_channel(64).unwrap());
            let cell = Arc::new(VringCell::new(0));
            cell.publish(|wanted| wanted.binding = Binding::new(Mode::Offload, vec![channel]));
            let mut enqueue = Enqueue::attach(&cell, &mut worker.mover).unwrap();
            let config = guest.config(FEATURES);
            start(&cell, config.clone());
            let mut receiver = Receiver::new(&guest, 2048);
            let len = (GUEST as usize).div_ceil(8 * 4096) + (64 << 10);
            let (bits, fd) = Mapping::memfd("log", len, Hugepages::None).unwrap();
            let mapping = Mapping::shared(std::os::fd::AsFd::as_fd(&fd), 0, len).unwrap();
            let log = Arc::new(DirtyLog::new(mapping, 0, len));
            let mut send = |worker: &mut Worker| {
                let mut burst = worker.packets(0, &[1000; 3]);
                let mut ctx = worker.ctx();
                ctx.mover.poll(ctx.clock);
                enqueue.submit(&mut ctx, &mut burst);
                enqueue.poll_completed(&mut ctx);
                ctx.cache.free_all(burst.drain(..));
            };
            let is_marked = |address: u64| {
                let mut byte = [0];
                bits.read_at((address / 4096 / 8) as usize, &mut byte);
                byte[0] >> (address / 4096 % 8) & 1 == 1
            };
            send(&mut worker);
            let ring = RingLog::new(&log, &config.memory, &config.layout, None);
            start(&cell, VringConfig { log: Some(ring), ..config });
            for _ in 0..10 {
                send(&mut worker);
                assert!(cell.wait(Duration::ZERO).is_err(), "copies into memory that is not logged go on");
            }
            for _ in 0..1000 {
                stepper.step();
                send(&mut worker);
            }
            cell.wait(Duration::ZERO).unwrap();
            // The first three packets were received before the front end got its answer. It copies all memory after
            // that.
            let logged = guest.buffer(3, 2048);
            assert!(receiver.receive(&guest).is_some());
            assert!(is_marked(logged));
        }
    }
}

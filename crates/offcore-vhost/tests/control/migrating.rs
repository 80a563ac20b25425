//! A guest that migrates, and the front end that moves it.
//!
//! The front end repeatedly copies the dirty pages of the guest's memory while the guest is running. Then it stops the
//! virtqueues, copies the remaining pages, and compares all memory. The guest then continues at the same position, at
//! the same addresses.

use std::collections::HashSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use offcore_mem::{GuestMemory, GuestRegion, Hugepages, Mapping};
use offcore_ring::device::Direction;
use offcore_ring::{Areas, Layout, driver, packed};
use offcore_vhost::features::{VHOST_F_LOG_ALL, VIRTIO_F_RING_PACKED};
use offcore_vhost::message::{LogArea, MemoryRegion, Request, VHOST_VRING_F_LOG, VringAddr, VringFd};
use offcore_vhost::testing;

use crate::peer::*;

const PAGE: usize = 4096;
pub(crate) const HEADER: u64 = offcore_vhost::features::NET_HEADER as u64;
pub(crate) const LEN: u64 = 700;
/// Number of buffers for each direction.
pub(crate) const COUNT: u32 = 128;
/// Number of descriptors of a ring. The ring extends over several pages.
const SIZE: u32 = 1024;
/// Offsets of the buffers in the guest's memory: receive buffers and transmit buffers.
const BUFFERS: [u64; 2] = [0x4_0000, 0x9_0000];
/// Each buffer begins in one page and ends in the next.
const BUFFER: u64 = 2048;
const OFFSET: u64 = 1500;

/// A guest whose memory can be replaced while it runs.
pub(crate) struct Migrating {
    packed: bool,
    /// Whether it sends the packets that it receives.
    sends: bool,
    fd: OwnedFd,
    memory: Arc<GuestMemory>,
    rx: driver::RingDriver<u64>,
    tx: driver::RingDriver<u64>,
    free: Vec<u64>,
    pub(crate) sent: u64,
    /// The smallest sequence number that may arrive next.
    due: u64,
    pub(crate) received: u64,
    /// Positions at which its virtqueues continue.
    bases: [u32; 2],
}

impl Migrating {
    pub(crate) fn new(packed: bool, sends: bool) -> Self {
        let guest = Guest::new();
        let region = guest.region();
        let mapping = Mapping::shared(guest.fd.as_fd(), 0, guest.mapping.len()).unwrap();
        let region = GuestRegion::new(region.guest, region.user, region.size, mapping, 0).unwrap();
        let memory = Arc::new(GuestMemory::new(vec![region]).unwrap());
        let queue = |index| {
            let ring = addresses(index);
            let areas = Areas { descriptors: ring.desc, driver: ring.avail, device: ring.used };
            let layout = Layout::in_memory(&memory, areas, SIZE, packed);
            driver::RingDriver::new(layout.unwrap(), false)
        };
        let mut rx: driver::RingDriver<u64> = queue(0);
        for i in 0..u64::from(COUNT) {
            let address = Guest::PHYSICAL + BUFFERS[0] + i * BUFFER + OFFSET;
            rx.add(address, BUFFER as u32, Direction::Writable, address).unwrap();
        }
        rx.publish();
        let free = (0..u64::from(COUNT)).map(|i| Guest::PHYSICAL + BUFFERS[1] + i * BUFFER).collect();
        let tx = queue(1);
        let bases = [if packed { packed::FRESH_BASE } else { 0 }; 2];
        Self { packed, sends, fd: guest.fd, memory, rx, tx, free, sent: 0, due: 0, received: 0, bases }
    }

    fn mapping(&self) -> &Mapping {
        self.memory.regions()[0].mapping()
    }

    fn at(address: u64) -> usize {
        (address - Guest::PHYSICAL) as usize
    }

    fn transmit(&mut self) {
        while self.tx.used().unwrap() > 0 {
            self.free.push(self.tx.pop().unwrap().unwrap().token);
        }
        for _ in 0..8 {
            let Some(address) = self.free.pop() else { break };
            self.mapping().write_at(Self::at(address + HEADER), &packet(self.sent));
            self.tx.add(address, (HEADER + LEN) as u32, Direction::Readable, address).unwrap();
            self.sent += 1;
        }
        self.tx.publish();
    }

    /// Receives packets. Each must be complete and in order.
    pub(crate) fn receive(&mut self) {
        while self.rx.used().unwrap() > 0 {
            let used = self.rx.pop().unwrap().unwrap();
            assert_eq!(u64::from(used.len), HEADER + LEN);
            let mut bytes = vec![0; LEN as usize];
            self.mapping().read_at(Self::at(used.token + HEADER), &mut bytes);
            let number = u64::from_ne_bytes(bytes[..8].try_into().unwrap());
            assert!(bytes == packet(number), "packet {number} is not whole");
            assert!(number >= self.due, "packet {number} came after {}", self.due);
            self.due = number + 1;
            self.received += 1;
            self.rx.add(used.token, BUFFER as u32, Direction::Writable, used.token).unwrap();
        }
        self.rx.publish();
    }

    /// Runs until `packets` more packets are received.
    pub(crate) fn run(&mut self, packets: u64) {
        let until = self.received + packets;
        while self.received < until {
            if self.sends {
                self.transmit();
            }
            self.receive();
            std::thread::yield_now();
        }
    }

    /// Pages that the guest writes at any time. A hypervisor knows them without the log. A packed ring is written by
    /// both sides.
    fn own_pages() -> Vec<usize> {
        let rings = (0..2).flat_map(|index| {
            let ring = addresses(index);
            pages(ring.desc, SIZE as usize * 16).chain(pages(ring.avail, 6 + SIZE as usize * 2))
        });
        rings.chain(pages(Guest::USER + BUFFERS[1], (u64::from(COUNT) * BUFFER) as usize)).collect()
    }

    /// Pages in which the back end returns buffers. It must have marked them.
    fn ring_pages(&self) -> Vec<usize> {
        let size = SIZE as usize;
        let part =
            |ring: VringAddr| if self.packed { (ring.desc, size * 16) } else { (ring.used, 6 + size * 8) };
        let parts = (0..1 + u32::from(self.sends)).map(|index| part(addresses(index)));
        parts.flat_map(|(at, len)| pages(at, len)).collect()
    }

    /// Sends memory and virtqueues to the back end behind `peer`, and starts the virtqueues at their current positions.
    pub(crate) fn start(&self, peer: &mut Peer) {
        assert_eq!(peer.ask(table(self.fd.as_fd(), self.mapping().len())), 0);
        assert_eq!(peer.ask(Request::SetFeatures(FEATURES | self.format())), 0);
        for index in 0..2 {
            for request in [
                Request::SetVringNum(state(index, SIZE)),
                Request::SetVringBase(state(index, self.bases[index as usize])),
                Request::SetVringAddr(addresses(index)),
                Request::SetVringEnable(state(index, 1)),
                Request::SetVringKick(VringFd { index: index as u8, fd: None }),
            ] {
                assert_eq!(peer.ask(request), 0);
            }
        }
    }

    fn format(&self) -> u64 {
        if self.packed { VIRTIO_F_RING_PACKED } else { 0 }
    }

    /// Copies the memory while the guest runs, stops the virtqueues, and moves the guest to the copy.
    pub(crate) fn leave(&mut self, peer: &mut Peer) {
        let len = self.mapping().len();
        let (copy, copy_fd) = Mapping::memfd("copy", len, Hugepages::None).unwrap();
        let (bitmap, bitmap_fd) = Mapping::memfd("log", PAGE, Hugepages::None).unwrap();
        self.log(peer, &bitmap_fd);
        let all: Vec<_> = (0..len / PAGE).collect();
        copy_pages(self.mapping(), &copy, &all);
        let mut marked = HashSet::new();
        for _ in 0..200 {
            let dirty = take_dirty(&bitmap);
            copy_pages(self.mapping(), &copy, &dirty);
            marked.extend(dirty);
            self.run(20);
        }
        let rings = self.ring_pages();
        assert!(
            rings.iter().all(|page| marked.contains(page)),
            "{rings:x?} of {marked:x?}, packed: {}",
            self.packed
        );
        self.bases = [0, 1].map(|index| peer.base(index));
        let dirty = take_dirty(&bitmap);
        copy_pages(self.mapping(), &copy, &dirty);
        copy_pages(self.mapping(), &copy, &Self::own_pages());
        let differing = differing(self.mapping(), &copy);
        assert!(differing.is_empty(), "pages {differing:x?} differ, packed: {}", self.packed);
        assert!(take_dirty(&bitmap).is_empty(), "nothing is written to a stopped ring");
        self.move_to(copy_fd);
    }

    /// Starts logging in the same way as QEMU: sets the log and the feature, and sends the addresses again, with the
    /// flag.
    fn log(&self, peer: &mut Peer, fd: &OwnedFd) {
        let area = LogArea { size: PAGE as u64, offset: 0 };
        assert_eq!(peer.ask(Request::SetLogBase(area, fd.as_fd())), 0);
        assert_eq!(peer.ask(Request::SetFeatures(FEATURES | VHOST_F_LOG_ALL | self.format())), 0);
        for index in 0..2 {
            let ring = addresses(index);
            let log = ring.used - Guest::USER + Guest::PHYSICAL;
            assert_eq!(
                peer.ask(Request::SetVringAddr(VringAddr { flags: VHOST_VRING_F_LOG, log, ..ring })),
                0
            );
        }
    }

    /// Replaces the guest's memory at the same addresses.
    fn move_to(&mut self, fd: OwnedFd) {
        use rustix::mm::{MapFlags, ProtFlags, mmap};
        let base = self.mapping().base().as_ptr();
        let (rights, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::FIXED);
        // SAFETY: the test's own mapping is replaced by another one of the same length, whose file has this length.
        let replaced = unsafe { mmap(base.cast(), self.mapping().len(), rights, flags, &fd, 0) };
        assert_eq!(replaced.unwrap(), base.cast());
        self.fd = fd;
    }
}

pub(crate) fn packet(number: u64) -> Vec<u8> {
    let mut bytes = testing::pattern(number, LEN as usize);
    bytes[..8].copy_from_slice(&number.to_ne_bytes());
    bytes
}

/// Pages of a part of the guest's memory at this front-end address.
fn pages(address: u64, len: usize) -> std::ops::Range<usize> {
    let at = (address - Guest::USER) as usize;
    at / PAGE..(at + len).div_ceil(PAGE)
}

/// The request that describes the guest's memory in this file.
fn table(fd: BorrowedFd<'_>, len: usize) -> Request<BorrowedFd<'_>> {
    let region = MemoryRegion { guest: Guest::PHYSICAL, size: len as u64, user: Guest::USER, mmap_offset: 0 };
    Request::SetMemTable(vec![(region, fd)])
}

/// Returns the dirty pages of the guest's memory and clears them.
fn take_dirty(log: &Mapping) -> Vec<usize> {
    let byte = |at: usize| {
        assert!(at < log.len());
        // SAFETY: the byte is inside the mapping, and all sides access it atomically.
        unsafe { AtomicU8::from_ptr(log.base().as_ptr().add(at)) }.swap(0, Ordering::SeqCst)
    };
    let first = Guest::PHYSICAL as usize / PAGE;
    let bits = (0..log.len()).flat_map(|at| {
        let found = byte(at);
        (0..8).filter(move |bit| found >> bit & 1 == 1).map(move |bit| at * 8 + bit)
    });
    bits.map(|page| page.checked_sub(first).expect("a page of the guest")).collect()
}

fn copy_pages(from: &Mapping, to: &Mapping, pages: &[usize]) {
    let mut bytes = vec![0; PAGE];
    for page in pages {
        from.read_at(page * PAGE, &mut bytes);
        to.write_at(page * PAGE, &bytes);
    }
}

/// Pages in which the content of two memories differs.
fn differing(a: &Mapping, b: &Mapping) -> Vec<usize> {
    let read = |mapping: &Mapping, page: usize| {
        let mut bytes = vec![0; PAGE];
        mapping.read_at(page * PAGE, &mut bytes);
        bytes
    };
    (0..a.len() / PAGE).filter(|&page| read(a, page) != read(b, page)).collect()
}

//! The dirty log: valid and invalid requests of front ends.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use offcore_mem::{Hugepages, Mapping};
use offcore_vhost::Enqueue;
use offcore_vhost::backend::RingState;
use offcore_vhost::features::VHOST_F_LOG_ALL;
use offcore_vhost::message::{LogArea, Request, VHOST_VRING_F_LOG, VringAddr};
use offcore_vhost::testing::Worker;

use crate::peer::*;

/// Length in bytes of a log that exactly covers the memory of a [`Guest`].
const LEN: u64 = (Guest::PHYSICAL + (1 << 20)) / 4096 / 8;

fn file(len: usize) -> (Mapping, OwnedFd) {
    Mapping::memfd("log", len, Hugepages::None).unwrap()
}

fn log(fd: &OwnedFd, size: u64, offset: u64) -> Request<BorrowedFd<'_>> {
    Request::SetLogBase(LogArea { size, offset }, fd.as_fd())
}

/// A front end always waits for the reply to this message. If the back end cannot reply, it closes the connection.
#[track_caller]
fn ends(request: Request<BorrowedFd<'_>>, why: &str) {
    let (_dir, backend, _guest, mut peer) = connected();
    peer.send(request);
    peer.closed();
    wait_for_error(backend.device(), why);
    assert_serves(&backend);
}

/// CVE-2020-10722: the sum of size and offset was not checked.
#[test]
fn invalid_log_is_refused() {
    let (_mapping, fd) = file(4096);
    ends(log(&fd, 0, 0), "is empty or wraps around");
    ends(log(&fd, u64::MAX, 4096), "is empty or wraps around");
    ends(log(&fd, 4096, u64::MAX - 4095), "is empty or wraps around");
    ends(log(&fd, 4096, 1), "needs a longer file");
    ends(log(&fd, 4097, 0), "needs a longer file");
    ends(log(&fd, 1 << 60, 0), "MiB of log and region in flight, expected at most");
    let other = OwnedFd::from(std::fs::File::open("/proc/self/status").unwrap());
    ends(log(&other, 4096, 0), "its file is on file system");
}

#[test]
fn log_needs_its_protocol_feature() {
    let dir = Dir::new();
    let (backend, (_mapping, fd)) = (backend(&dir), file(4096));
    let mut peer = Peer::connect(&dir.file("vhost.sock"));
    peer.send(log(&fd, 4096, 0));
    peer.closed();
    wait_for_error(backend.device(), "protocol feature LOG_SHMFD (bit 1) was not negotiated");
}

#[test]
fn rings_wait_for_dirty_log() {
    let (_dir, backend, guest, mut peer) = connected();
    let features = FEATURES | VHOST_F_LOG_ALL;
    let state = |queue: usize| backend.device().status().vrings[queue].state;
    // Before the virtqueues are set up, the feature may be set before the log. The virtqueues then wait for the log.
    assert_eq!(peer.ask(Request::SetFeatures(features)), 0);
    peer.start_pair();
    assert_eq!(state(0), RingState::Stopped);
    let (bitmap, fd) = file(2 * 4096);
    assert_eq!(peer.ask(log(&fd, LEN, 4000)), 0);
    assert_eq!((state(0), state(1)), (RingState::Enabled, RingState::Enabled));
    assert!(backend.device().status().to_string().contains(", written pages are logged"));
    // Without a worker, no page is written. A log that ends before the memory is refused, and the previous one stays.
    let mut bytes = [1; 8192];
    bitmap.read_at(0, &mut bytes);
    assert_eq!(bytes, [0; 8192]);
    let far = offcore_vhost::message::MemoryRegion { guest: 1 << 30, ..guest.region() };
    let table = Request::SetMemTable(vec![(guest.region(), guest.fd.as_fd()), (far, guest.fd.as_fd())]);
    refused(
        &backend,
        &mut peer,
        table,
        "the log of dirty pages ends at guest address 0x200000, expected at least 0x40100000",
    );
    let add = Request::AddMemReg(far, guest.fd.as_fd());
    refused(&backend, &mut peer, add, "ends at guest address 0x200000, expected at least");
    let log_at = |log| VringAddr { flags: VHOST_VRING_F_LOG, log, ..addresses(0) };
    assert_eq!(peer.ask(Request::SetVringAddr(log_at(0x1f_f000))), 0);
    refused(&backend, &mut peer, Request::SetVringAddr(log_at(0x1f_ffff)), "ends at guest address 0x200000");
    refused(&backend, &mut peer, Request::SetVringAddr(log_at(u64::MAX)), "ends at guest address 0x200000");
    assert_eq!(state(0), RingState::Enabled);
    // Logging can be switched off while virtqueues run, and cannot be switched on without a log.
    assert_eq!(peer.ask(Request::SetFeatures(FEATURES)), 0);
    assert_eq!(peer.ask(Request::SetFeatures(features)), 0);
    peer.send(log(&fd, LEN - 1, 0));
    peer.closed();
    wait_for_error(backend.device(), "SET_LOG_BASE: the log of dirty pages ends at guest address 0x1f8000");
    let mut peer = Peer::with_memory(backend.device().path(), &guest);
    peer.start_pair();
    refused(&backend, &mut peer, Request::SetFeatures(features), "requires a log; send SET_LOG_BASE first");
    assert_eq!(state(0), RingState::Enabled);
}

#[test]
fn log_that_vanishes_ends_the_connection() {
    let (_dir, backend, _guest, mut peer) = connected();
    // A file that may shrink.
    let fd = rustix::fs::memfd_create("log", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, 4096).unwrap();
    assert_eq!(peer.ask(log(&fd, 4096, 0)), 0);
    assert_eq!(peer.ask(Request::SetFeatures(FEATURES | VHOST_F_LOG_ALL)), 0);
    let mut worker = Worker::new();
    let mut enqueue = Enqueue::attach(&backend.cells()[0], &mut worker.mover).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _ends = Ends(&stop);
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                enqueue.poll_completed(&mut worker.ctx());
                std::thread::yield_now();
            }
        });
        rustix::fs::ftruncate(&fd, 0).unwrap();
        // The worker disables kicks in the ring, and marks this write.
        peer.start_ring(0);
        peer.closed();
        wait_for_error(backend.device(), "or of the log, was truncated");
    });
}

/// Each log replaces the previous one.
#[test]
fn dirty_logs_do_not_accumulate() {
    let (_dir, _backend, _guest, mut peer) = connected();
    let count = |dir: &str| std::fs::read_dir(dir).unwrap().count();
    let maps = || std::fs::read_to_string("/proc/self/maps").unwrap().matches("memfd:counted").count();
    let (_bitmap, fd) = Mapping::memfd("counted", 4096, Hugepages::None).unwrap();
    let before = count("/proc/self/fd");
    for _ in 0..300 {
        assert_eq!(peer.ask(log(&fd, 4096, 0)), 0);
    }
    assert_eq!(maps(), 2, "the test's own, and the last");
    // Other tests of this process open and close files at the same time.
    assert!(count("/proc/self/fd") < before + 200);
}

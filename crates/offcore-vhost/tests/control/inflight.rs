//! The region for descriptors in flight: requests by front ends, and the position at which virtqueues resume after a
//! back end terminates.

use std::os::fd::{AsFd, OwnedFd};

use offcore_mem::{Hugepages, Mapping};
use offcore_ring::Inflight;
use offcore_vhost::PassedFd;
use offcore_vhost::features::{self, VIRTIO_F_RING_PACKED};
use offcore_vhost::message::{Code, InflightArea, Reply, Request};

use crate::peer::*;

const SIZE: u16 = 256;
const ASKED: InflightArea = InflightArea { size: 0, offset: 0, queues: 2, queue_size: SIZE };
/// Offsets in a virtqueue's part: the version, which is set while it is in use, and the range of descriptors used last.
const VERSION_AT: usize = 8;
const USED_AT: usize = 16;

fn region(peer: &mut Peer) -> (InflightArea, PassedFd) {
    peer.send(Request::GetInflightFd(ASKED));
    match peer.reply(Code::GET_INFLIGHT_FD).unwrap() {
        Reply::Inflight(area, fd) => (area, fd),
        reply => panic!("{reply:?}"),
    }
}

/// Each reply that is not read keeps a file of this process open.
#[test]
fn inflight_regions_per_connection_are_limited() {
    let (_dir, backend, _guest, mut peer) = connected();
    (0..8).for_each(|_| drop(region(&mut peer)));
    peer.send(Request::GetInflightFd(ASKED));
    peer.closed();
    wait_for_error(backend.device(), "GET_INFLIGHT_FD: too many regions, expected at most 8 per connection");
    assert_serves(&backend);
}

/// CVE-2021-3839: writes beyond the existing virtqueues. The request expects a reply, so the connection is closed.
#[test]
fn out_of_range_inflight_area_is_refused() {
    for (queues, queue_size) in [(0, SIZE), (3, SIZE), (u16::MAX, SIZE), (2, 0), (2, 32_769), (2, u16::MAX)] {
        let why = format!("{queues} virtqueues of {queue_size} descriptors, expected 1 to 2, of 1 to 32768");
        let area = InflightArea { queues, queue_size, ..ASKED };
        let (_dir, backend, _guest, mut peer) = connected();
        peer.send(Request::GetInflightFd(area));
        peer.closed();
        wait_for_error(backend.device(), &format!("GET_INFLIGHT_FD: {why}"));
        let mut peer = Peer::negotiated(backend.device().path());
        let (_mapping, fd) = Mapping::memfd("inflight", 1 << 16, Hugepages::None).unwrap();
        let set = Request::SetInflightFd(InflightArea { size: 1 << 16, ..area }, fd.as_fd());
        refused(&backend, &mut peer, set, &format!("SET_INFLIGHT_FD: {why}"));
    }
}

#[test]
fn invalid_inflight_region_is_refused() {
    let (_dir, backend, _guest, mut peer) = connected();
    let (area, fd) = region(&mut peer);
    assert_eq!((area.size, area.queues), (2 * Inflight::len(SIZE) as u64, 2));
    for (size, offset, why) in [
        (area.size - 1, 0, "expected at least 16512, at a multiple of 8"),
        (0, 0, "expected at least"),
        (area.size, 4, "at a multiple of 8"),
        (area.size, 8192, "needs a longer file"),
        (area.size, u64::MAX - 7, "is empty or wraps around"),
        (1 << 60, 0, "MiB of log and region in flight, expected at most"),
    ] {
        let set = Request::SetInflightFd(InflightArea { size, offset, ..area }, fd.as_fd());
        refused(&backend, &mut peer, set, why);
    }
    let other = OwnedFd::from(std::fs::File::open("/proc/self/status").unwrap());
    refused(&backend, &mut peer, Request::SetInflightFd(area, other.as_fd()), "its file is on file system");
    peer.start_ring(1);
    refused(&backend, &mut peer, Request::SetInflightFd(area, fd.as_fd()), "virtqueue 1 is running");
    // The feature was not negotiated.
    drop(peer);
    let mut peer = Peer::connect(backend.device().path());
    peer.send(Request::SetProtocolFeatures(
        features::PROTOCOL_OFFERED & !features::VHOST_USER_PROTOCOL_F_INFLIGHT_SHMFD,
    ));
    refused(&backend, &mut peer, Request::SetInflightFd(area, fd.as_fd()), "INFLIGHT_SHMFD (bit 12)");
    drop(peer);
    assert_serves(&backend);
}

/// Writes the part of a back end that was about to return the descriptors `old` to `new`. None of them is in the ring.
fn leave(file: &Mapping, queue: usize, [old, new]: [u8; 2]) {
    let at = queue * Inflight::len(SIZE);
    file.write_at(at + USED_AT, &[new, 0, old, 0, 1, 1]);
    file.write_at(at + VERSION_AT, &[1]);
}

#[test]
fn inflight_region_restores_ring_position() {
    let (_dir, backend, _guest, mut peer) = connected();
    assert_eq!(peer.ask(Request::SetFeatures(FEATURES | VIRTIO_F_RING_PACKED)), 0);
    let (area, fd) = region(&mut peer);
    let file = Mapping::shared(fd.as_fd(), 0, area.size as usize).unwrap();
    let base = 0x8000_u32;
    let begin = |peer: &mut Peer| {
        assert_eq!(peer.ask(Request::SetInflightFd(area, fd.as_fd())), 0);
        peer.start_ring(0);
        peer.start_ring(1);
    };
    begin(&mut peer);
    // The front end disconnects. The same back end continues with the next front end, which does not know the base.
    for [old, new] in [[0, 7], [7, 9], [3, 4]] {
        drop(peer);
        leave(&file, 0, [old, new]);
        peer = Peer::negotiated(backend.device().path());
        assert_eq!(peer.ask(Request::SetFeatures(FEATURES | VIRTIO_F_RING_PACKED)), 0);
        assert_eq!(peer.ask(Guest::new().table()), 0);
        begin(&mut peer);
        // In a ring of zeroes, no descriptor is available, so the last burst counts as returned.
        let half = base | u32::from(new);
        assert_eq!(peer.base(0), half | half << 16);
    }
    // After a stop, the base given by the front end is used again. The same holds after a reset.
    peer.start_ring(0);
    assert_eq!(peer.base(0), 0);
    leave(&file, 0, [1, 5]);
    leave(&file, 1, [1, 5]);
    assert_eq!(peer.ask(Request::ResetDevice), 0);
    assert_eq!(peer.ask(Request::SetFeatures(FEATURES | VIRTIO_F_RING_PACKED)), 0);
    peer.start_ring(1);
    assert_eq!(peer.base(1), 0);
}

/// A region of another back end, or of a ring of another format, is refused.
#[test]
fn foreign_inflight_region_is_refused() {
    let (_dir, backend, _guest, mut peer) = connected();
    let (area, fd) = region(&mut peer);
    let file = Mapping::shared(fd.as_fd(), 0, area.size as usize).unwrap();
    assert_eq!(peer.ask(Request::SetInflightFd(area, fd.as_fd())), 0);
    leave(&file, 1, [0, 1]);
    peer.start_ring(0);
    assert_eq!(peer.ask(Request::SetVringNum(state(1, 256))), 0);
    assert_eq!(peer.ask(Request::SetVringBase(state(1, 0))), 0);
    assert_eq!(peer.ask(Request::SetVringAddr(addresses(1))), 0);
    let kick = Request::SetVringKick(offcore_vhost::message::VringFd { index: 1, fd: None });
    refused(&backend, &mut peer, kick, "belongs to another ring or back end: version 1, features 0x0");
    assert_eq!(peer.base(0), 0);
}

/// If the file of a region is truncated, only its own connection ends.
#[test]
fn region_that_vanishes_ends_the_connection() {
    let (_dir, backend, _guest, mut peer) = connected();
    // The file created by a back end cannot be truncated.
    let (area, fd) = region(&mut peer);
    assert!(rustix::fs::ftruncate(&fd, 0).is_err());
    let fd = rustix::fs::memfd_create("inflight", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, area.size).unwrap();
    assert_eq!(peer.ask(Request::SetInflightFd(area, fd.as_fd())), 0);
    rustix::fs::ftruncate(&fd, 0).unwrap();
    peer.send(Request::SetVringNum(state(0, 256)));
    peer.send(Request::SetVringBase(state(0, 0)));
    peer.send(Request::SetVringAddr(addresses(0)));
    peer.send(Request::SetVringKick(offcore_vhost::message::VringFd { index: 0, fd: None }));
    peer.closed();
    wait_for_error(backend.device(), "guest memory has vanished");
    assert_serves(&backend);
}

/// The regions are memory of this process. They must not accumulate, even if the front end keeps the files.
#[test]
fn inflight_regions_do_not_accumulate() {
    let memory = |fd: &PassedFd| rustix::fs::fstat(fd).unwrap().st_blocks as u64 * 512;
    let (_dir, backend, _guest, mut peer) = connected();
    let written = |peer: &mut Peer| {
        let (area, fd) = region(peer);
        rustix::io::pwrite(&fd, &vec![0; area.size as usize], 0).unwrap();
        (area, fd)
    };
    let mut kept: Vec<PassedFd> = (0..3).map(|_| written(&mut peer).1).collect();
    drop(peer);
    let mut peer = Peer::negotiated(backend.device().path());
    let (area, fd) = written(&mut peer);
    assert!(kept.iter().all(|fd| memory(fd) == 0) && memory(&fd) >= area.size);
    assert_eq!(peer.ask(Request::SetInflightFd(area, fd.as_fd())), 0);
    kept.push(fd);
    // The region stays until another one is requested.
    drop(peer);
    let mut peer = Peer::negotiated(backend.device().path());
    assert_eq!(peer.ask(Request::SetInflightFd(area, kept[3].as_fd())), 0);
    drop(peer);
    // No region is created while a virtqueue is running.
    let guest = Guest::new();
    let mut peer = Peer::with_memory(backend.device().path(), &guest);
    peer.start_ring(1);
    peer.send(Request::GetInflightFd(ASKED));
    peer.closed();
    wait_for_error(backend.device(), "virtqueue 1 is running");
}

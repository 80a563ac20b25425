//! Regions of guest memory that are added and removed one by one.

use std::os::fd::AsFd;

use offcore_mem::{Hugepages, Mapping, RegionCache};
use offcore_vhost::backend::RingState;
use offcore_vhost::message::{InflightArea, LogArea, MemoryRegion, Request};
use offcore_vhost::{Backend, BackendConfig, FrontEnd, FrontEndConfig, MemoryFd};

use crate::peer::*;

/// Region number `i` of one page, in a file of 1 MiB.
fn page(i: u64) -> MemoryRegion {
    let at = i * 4096;
    MemoryRegion { guest: (1 << 33) + at, size: 4096, user: (1 << 43) + at, mmap_offset: at }
}

#[test]
fn memory_slots_are_limited_to_64() {
    let (_dir, backend, guest, mut peer) = negotiated();
    let slots = peer.ask(Request::GetMaxMemSlots);
    assert_eq!(slots, 64);
    let add = |i: u64| Request::AddMemReg(page(i), guest.fd.as_fd());
    for i in 0..slots {
        assert_eq!(peer.ask(add(i)), 0);
        assert_eq!(backend.device().status().regions as u64, i + 1);
    }
    refused(&backend, &mut peer, add(64), "is one too many, expected at most 64");
    assert_eq!(peer.ask(add(3)), 0, "one that is there takes no slot");
    assert_eq!(peer.ask(Request::RemMemReg(page(9), None)), 0);
    assert_eq!(peer.ask(add(64)), 0);
    refused(&backend, &mut peer, add(9), "is one too many");
    // A table replaces all of them.
    assert_eq!(peer.ask(guest.table()), 0);
    assert_eq!(backend.device().status().regions, 1);
}

/// Sparse files need no memory, and could use up the address space.
#[test]
fn guest_memory_per_port_is_limited() {
    let dir = Dir::new();
    let config = BackendConfig { max_memory: 8 << 20, ..BackendConfig::new(dir.file("vhost.sock")) };
    let backend = Backend::start(config, Box::new(())).unwrap();
    let mut peer = Peer::negotiated(&dir.file("vhost.sock"));
    let fd = rustix::fs::memfd_create("sparse", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, 1 << 40).unwrap();
    let part = |i: u64, size| MemoryRegion { guest: i << 32, size, user: i << 32, mmap_offset: 0 };
    let add = |i, size| Request::AddMemReg(part(i, size), fd.as_fd());
    assert_eq!(peer.ask(add(0, 4 << 20)), 0);
    assert_eq!(peer.ask(add(1, 3 << 20)), 0);
    refused(&backend, &mut peer, add(2, 2 << 20), "9 MiB of guest memory, expected at most 8: max_memory=");
    refused(&backend, &mut peer, add(2, 1 << 40), "1048583 MiB of guest memory, expected at most 8");
    assert_eq!(peer.ask(add(1, 3 << 20)), 0, "another one in its place");
    let table = |parts: &[(u64, u64)]| {
        Request::SetMemTable(parts.iter().map(|&(i, size)| (part(i, size), fd.as_fd())).collect())
    };
    refused(
        &backend,
        &mut peer,
        table(&[(0, 8 << 20), (1, 4096)]),
        "9 MiB of guest memory, expected at most 8",
    );
    assert_eq!(peer.ask(table(&[(0, 8 << 20)])), 0);
    assert_eq!(backend.device().status().regions, 1);
    // In addition, a log and a region for descriptors in flight are allowed, up to a common limit.
    let log = |size| Request::SetLogBase(LogArea { size, offset: 0 }, fd.as_fd());
    let in_flight = |size| {
        let area = InflightArea { size, offset: 0, queues: 2, queue_size: 256 };
        Request::SetInflightFd(area, fd.as_fd())
    };
    assert_eq!(peer.ask(log(128 << 20)), 0);
    refused(
        &backend,
        &mut peer,
        in_flight(129 << 20),
        "SET_INFLIGHT_FD: 257 MiB of log and region in flight, expected at most 256",
    );
    assert_eq!(peer.ask(in_flight(128 << 20)), 0);
    assert_eq!(peer.ask(table(&[(0, 8 << 20)])), 0);
    peer.send(log(1 << 20));
    peer.closed();
    wait_for_error(backend.device(), "257 MiB of log and region in flight, expected at most 256");
    // By default, the limit is the memory of the machine.
    let default = BackendConfig::new("/").max_memory;
    assert!((1 << 20..1 << 46).contains(&default), "{default}");
}

/// QEMU adds every region separately, and then sets up the rings.
#[test]
fn rings_run_in_added_regions() {
    let (_dir, backend, guest, mut peer) = negotiated();
    let piece = |i: u64| {
        let (at, size) = (i << 16, 1 << 16);
        MemoryRegion { guest: Guest::PHYSICAL + at, size, user: Guest::USER + at, mmap_offset: at }
    };
    for i in 0..16 {
        assert_eq!(peer.ask(Request::AddMemReg(piece(i), guest.fd.as_fd())), 0);
    }
    peer.start_pair();
    let memory = backend.cells()[1].wanted().vring.unwrap().memory.clone();
    for i in 0..16 {
        guest.mapping.write_at(i << 16, &[100 + i as u8]);
        let at = memory.translate(Guest::PHYSICAL + (i << 16) as u64, 1, &mut RegionCache::empty()).unwrap();
        // SAFETY: the address is inside the table, which `memory` keeps mapped.
        assert_eq!(unsafe { at.as_ptr().read_volatile() }, 100 + i as u8);
    }
    // Regions without rings can be added and removed. The table that a worker had is not changed.
    assert_eq!(peer.ask(Request::RemMemReg(piece(15), None)), 0);
    let end = Guest::PHYSICAL + (15 << 16);
    assert!(memory.translate(end, 1, &mut RegionCache::empty()).is_some());
    let now = backend.cells()[1].wanted().vring.unwrap().memory.clone();
    assert!(now.translate(end, 1, &mut RegionCache::empty()).is_none());
    assert_eq!(backend.device().status().vrings[1].state, RingState::Enabled);
    // Removing a region with a ring stops this ring, but not the other one.
    assert_eq!(peer.ask(Request::RemMemReg(piece(1), None)), 0);
    let states = |i: usize| backend.device().status().vrings[i].state;
    assert_eq!((states(0), states(1)), (RingState::Enabled, RingState::Stopped));
    assert_eq!(peer.ask(Request::AddMemReg(piece(1), guest.fd.as_fd())), 0);
    assert_eq!((states(0), states(1)), (RingState::Enabled, RingState::Enabled));
    assert_eq!((peer.base(0), peer.base(1)), (0, 0));
}

/// A front end is not required to describe its memory first.
#[test]
fn ring_waits_for_its_memory() {
    let (_dir, backend, guest, mut peer) = negotiated();
    peer.start_ring(1);
    let state = || backend.device().status().vrings[1].state;
    assert_eq!(peer.ask(Request::AddMemReg(page(0), guest.fd.as_fd())), 0);
    assert_eq!(state(), RingState::Stopped);
    assert_eq!(peer.ask(Request::AddMemReg(guest.region(), guest.fd.as_fd())), 0);
    assert_eq!(state(), RingState::Disabled);
    assert_eq!(backend.device().status().refused, 0);
}

#[test]
fn invalid_memory_regions_are_refused() {
    let (_dir, backend, guest, mut peer) = connected();
    peer.start_ring(0);
    let before = backend.cells()[0].wanted().vring.unwrap();
    let good = guest.region();
    let added = |region: MemoryRegion| Request::AddMemReg(region, guest.fd.as_fd());
    let mut refused = |request, why: &str| refused(&backend, &mut peer, request, why);
    refused(
        added(MemoryRegion { size: 0, ..page(0) }),
        "ADD_MEM_REG: region 0x200000000+0x0 at file offset 0x0",
    );
    refused(added(MemoryRegion { guest: u64::MAX - 4094, ..page(0) }), "is empty or wraps around");
    refused(added(MemoryRegion { user: u64::MAX - 4094, ..page(0) }), "is empty or wraps around");
    refused(added(MemoryRegion { mmap_offset: u64::MAX - 4094, ..page(0) }), "is empty or wraps around");
    refused(added(MemoryRegion { mmap_offset: good.size, ..page(0) }), "needs a longer file");
    refused(
        added(MemoryRegion { guest: good.guest + good.size - 1, ..page(0) }),
        "ADD_MEM_REG: guest memory regions",
    );
    refused(added(MemoryRegion { user: good.user + 4096, ..good }), "overlap");
    let pipe = std::io::pipe().unwrap();
    refused(Request::AddMemReg(page(0), pipe.0.as_fd()), "ADD_MEM_REG: region 0x200000000:");
    let why = "REM_MEM_REG: no region is ";
    refused(Request::RemMemReg(page(0), None), why);
    refused(Request::RemMemReg(MemoryRegion { size: good.size - 1, ..good }, None), why);
    refused(Request::RemMemReg(MemoryRegion { user: good.user + 1, ..good }, None), why);
    refused(Request::RemMemReg(MemoryRegion { guest: 0, ..good }, None), why);
    let after = backend.cells()[0].wanted().vring.unwrap();
    assert!(std::sync::Arc::ptr_eq(&before, &after), "the ring was not even touched");
    // In a removal, the file offset is ignored, and so is any descriptor.
    let removal = MemoryRegion { mmap_offset: 77, ..good };
    assert_eq!(peer.ask(Request::RemMemReg(removal, Some(pipe.1.as_fd()))), 0);
    assert_eq!(backend.device().status().regions, 0);
}

#[test]
fn add_mem_reg_exceeds_table_size() {
    let dir = Dir::new();
    let backend = backend(&dir);
    let memories: Vec<_> =
        (0..64).map(|_| Mapping::memfd("packets", 1 << 16, Hugepages::None).unwrap()).collect();
    let regions: Vec<_> = memories.iter().map(|(mapping, fd)| MemoryFd::new(mapping, fd.as_fd())).collect();
    let mut front_end =
        FrontEnd::connect(&FrontEndConfig::new(dir.file("vhost.sock")), &regions[..30]).unwrap();
    front_end.start().unwrap();
    let has = |i: usize| {
        let memory = backend.cells()[0].wanted().vring.unwrap().memory.clone();
        memory.translate(regions[i].address, 1 << 16, &mut RegionCache::empty()).is_some()
    };
    let check = |range: std::ops::Range<usize>| {
        let status = backend.device().status();
        assert_eq!((status.regions, status.refused), (range.len() + 1, 0));
        assert_eq!(status.vrings[1].state, RingState::Enabled);
        (0..64).for_each(|i| assert_eq!(has(i), range.contains(&i), "region {i}"));
    };
    check(0..30);
    for range in [10..50, 20..60, 20..22, 0..7, 1..8, 1..9, 0..63, 62..62] {
        front_end.set_memory(&regions[range.clone()]).unwrap();
        check(range);
    }
    let error = front_end.set_memory(&regions).unwrap_err();
    assert_eq!(
        error.to_string(),
        "64 regions of memory, expected at most 63: the back end takes these and one for the rings"
    );
    check(62..62);
    front_end.reset(&regions[..40]).unwrap();
    front_end.start().unwrap();
    check(0..40);
}

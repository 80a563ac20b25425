//! Setup sequences of well-behaved front ends.

use std::os::fd::AsFd;

use offcore_vhost::backend::RingState;
use offcore_vhost::message::{Request, VringFd};
use offcore_vhost::{Backend, BackendConfig, features};

use crate::peer::*;

fn backend_of(dir: &Dir, queue_pairs: u16) -> Backend {
    start(BackendConfig { queue_pairs, ..BackendConfig::new(dir.file("vhost.sock")) })
}

fn ring(backend: &Backend, index: usize) -> RingState {
    backend.device().status().vrings[index].state
}

#[test]
fn features_are_offered_and_chosen() {
    let dir = Dir::new();
    let backend = backend_of(&dir, 4);
    let mut peer = Peer::connect(&dir.file("vhost.sock"));
    assert_eq!(peer.ask(Request::GetFeatures), features::OFFERED);
    let protocol = features::PROTOCOL_OFFERED;
    assert_eq!(peer.ask(Request::GetProtocolFeatures), protocol);
    peer.send(Request::SetProtocolFeatures(protocol));
    assert_eq!(peer.ask(Request::GetQueueNum), 4);
    peer.send(Request::SetOwner);
    assert_eq!(peer.ask(Request::SetFeatures(FEATURES)), 0);
    let status = backend.device().status();
    assert!(status.connected);
    assert_eq!((status.features, status.protocol_features), (Some(FEATURES), protocol));
    assert_eq!((status.messages, status.refused, status.connects), (6, 0, 1));
    assert_eq!((status.vrings.len(), backend.cells().len()), (8, 8));
    assert!(status.last_error.is_none());
}

#[test]
fn one_pair_offers_no_multiqueue() {
    let dir = Dir::new();
    let config = BackendConfig {
        features: features::VIRTIO_NET_F_MRG_RXBUF | features::VIRTIO_NET_F_MQ,
        ..BackendConfig::new(dir.file("vhost.sock"))
    };
    let _backend = Backend::start(config, Box::new(())).unwrap();
    let offered = Peer::connect(&dir.file("vhost.sock")).ask(Request::GetFeatures);
    assert_eq!(offered, features::VIRTIO_NET_F_MRG_RXBUF | features::VIRTIO_F_VERSION_1);
}

#[test]
fn no_ack_unless_negotiated() {
    let dir = Dir::new();
    let _backend = backend(&dir);
    let mut peer = Peer::connect(&dir.file("vhost.sock"));
    peer.message(3, 1 | 8, &[], &[]);
    // If SET_OWNER had been acknowledged, this would receive that reply instead.
    assert_eq!(peer.ask(Request::GetQueueNum), 1);
}

/// A ring starts exactly when its configuration is complete, for any order of the messages.
#[test]
fn ring_starts_when_fully_configured() {
    let dir = Dir::new();
    let backend = backend(&dir);
    let guest = Guest::new();
    let mut order = [0, 1, 2, 3, 4, 5];
    let mut orders = 0;
    permutations(&mut order, 0, &mut |order| {
        orders += 1;
        let mut peer = Peer::connect(&dir.file("vhost.sock"));
        peer.send(Request::SetProtocolFeatures(features::VHOST_USER_PROTOCOL_F_REPLY_ACK));
        for (sent, part) in order.iter().enumerate() {
            assert_eq!(ring(&backend, 1), RingState::Stopped, "after {sent} of {order:?}");
            let kick = eventfd();
            let request = match part {
                0 => Request::SetFeatures(features::VIRTIO_F_VERSION_1),
                1 => guest.table(),
                2 => Request::SetVringNum(state(1, 256)),
                3 => Request::SetVringAddr(addresses(1)),
                4 => Request::SetVringBase(state(1, 0)),
                _ => Request::SetVringKick(VringFd { index: 1, fd: Some(kick.as_fd()) }),
            };
            assert_eq!(peer.ask(request), 0, "{order:?}");
        }
        assert_eq!(ring(&backend, 1), RingState::Enabled, "{order:?}");
        let wanted = backend.cells()[1].wanted().vring.unwrap();
        assert_eq!((wanted.layout.size(), wanted.base, wanted.enabled), (256, 0, true));
        drop(peer);
        until("torn down", || !backend.device().status().connected);
        assert!(backend.cells()[1].wanted().vring.is_none());
    });
    assert_eq!(orders, 720);
}

fn permutations(order: &mut [usize; 6], from: usize, each: &mut impl FnMut(&[usize; 6])) {
    if from == order.len() {
        return each(order);
    }
    for i in from..order.len() {
        order.swap(from, i);
        permutations(order, from + 1, each);
        order.swap(from, i);
    }
}

#[test]
fn ring_waits_to_be_enabled() {
    let (_dir, backend, _guest, mut peer) = connected();
    peer.start_ring(0);
    assert_eq!(ring(&backend, 0), RingState::Disabled);
    assert!(!backend.cells()[0].wanted().vring.unwrap().enabled);
    peer.enable(0, true);
    assert_eq!(ring(&backend, 0), RingState::Enabled);
    peer.enable(0, false);
    assert_eq!(ring(&backend, 0), RingState::Disabled);
    // Enabled before the start.
    peer.enable(1, true);
    assert_eq!(ring(&backend, 1), RingState::Stopped);
    peer.start_ring(1);
    assert_eq!(ring(&backend, 1), RingState::Enabled);
}

#[test]
fn a_polling_driver_has_no_eventfds() {
    let (_dir, backend, _guest, mut peer) = connected();
    peer.start_ring(0);
    assert!(backend.device().status().vrings[0].kicks);
    for request in [Request::SetVringKick, Request::SetVringCall, Request::SetVringErr] {
        assert_eq!(peer.ask(request(VringFd { index: 0, fd: None })), 0);
    }
    let vring = &backend.device().status().vrings[0];
    assert_eq!((vring.kicks, vring.calls, vring.state), (false, false, RingState::Disabled));
}

#[test]
fn call_eventfd_reaches_the_worker() {
    let (_dir, backend, _guest, mut peer) = connected();
    peer.start_ring(0);
    assert!(backend.cells()[0].wanted().vring.unwrap().call.is_none());
    let call = eventfd();
    assert_eq!(peer.ask(Request::SetVringCall(VringFd { index: 0, fd: Some(call.as_fd()) })), 0);
    let theirs = backend.cells()[0].wanted().vring.unwrap().call.clone().unwrap();
    rustix::io::write(&*theirs, &5u64.to_ne_bytes()).unwrap();
    let mut count = [0; 8];
    rustix::io::read(&call, &mut count).unwrap();
    assert_eq!(u64::from_ne_bytes(count), 5);
    // A worker that writes to it must never block, even if it is not read.
    let flags = rustix::fs::fcntl_getfl(&*theirs).unwrap();
    assert!(flags.contains(rustix::fs::OFlags::NONBLOCK));
}

#[test]
fn get_vring_base_stops_the_ring() {
    let (_dir, backend, _guest, mut peer) = connected();
    assert_eq!(peer.base(0), 0, "never set up");
    assert_eq!(peer.ask(Request::SetVringBase(state(0, 77))), 0);
    assert_eq!(peer.base(0), 77, "never started");
    peer.start_ring(0);
    assert_eq!(peer.ask(Request::SetVringBase(state(0, 5))), 1, "running");
    assert_eq!(peer.base(0), 0);
    assert_eq!(ring(&backend, 0), RingState::Stopped);
    assert!(backend.cells()[0].wanted().vring.is_none());
    // A kick alone must not restart the ring, because the guest may use the memory for something else.
    assert_eq!(peer.ask(Request::SetVringKick(VringFd { index: 0, fd: None })), 0);
    assert_eq!(ring(&backend, 0), RingState::Stopped);
    assert_eq!(peer.ask(Request::SetVringBase(state(0, 5))), 0);
    assert_eq!(peer.ask(Request::SetVringAddr(addresses(0))), 0);
    assert_eq!(ring(&backend, 0), RingState::Disabled);
    assert_eq!(peer.base(0), 5);
}

/// DPDK's virtio-user as a server, after its back end has terminated and another one connects.
#[test]
fn unknown_base_starts_at_used_index() {
    let dir = Dir::new();
    let backend = backend(&dir);
    let guest = Guest::new();
    let used = addresses(0).used - Guest::USER;
    rustix::io::pwrite(&guest.fd, &1234u16.to_ne_bytes(), used + 2).unwrap();
    let mut peer = Peer::with_memory(&dir.file("vhost.sock"), &guest);
    peer.start_ring(0);
    let base = || backend.cells()[0].wanted().vring.unwrap().base;
    assert_eq!(base(), 1234, "SET_VRING_BASE said 0");
    peer.base(0);
    assert_eq!(peer.ask(Request::SetVringBase(state(0, 5))), 0);
    assert_eq!(peer.ask(Request::SetVringAddr(addresses(0))), 0);
    assert_eq!(peer.ask(Request::SetVringKick(VringFd { index: 0, fd: None })), 0);
    assert_eq!(base(), 5, "any other base is believed");
}

#[test]
fn a_new_memory_table_goes_to_running_rings() {
    let dir = Dir::new();
    let backend = backend(&dir);
    let (first, second) = (Guest::new(), Guest::new());
    let mut peer = Peer::with_memory(&dir.file("vhost.sock"), &first);
    peer.start_pair();
    let before = backend.cells()[0].wanted().vring.unwrap();
    assert_eq!(peer.ask(second.table()), 0);
    let after = backend.cells()[0].wanted().vring.unwrap();
    assert_eq!(ring(&backend, 0), RingState::Enabled);
    let first_byte = |vring: &offcore_vhost::VringConfig| {
        let mut cache = offcore_mem::RegionCache::empty();
        vring.memory.translate(Guest::PHYSICAL, 1, &mut cache).unwrap()
    };
    assert_ne!(first_byte(&before), first_byte(&after));
    // The new table is the second guest's: data written there arrives.
    second.mapping.write_at(0, &[42]);
    // SAFETY: the address is inside the new table, which `after` keeps mapped.
    assert_eq!(unsafe { first_byte(&after).as_ptr().read_volatile() }, 42);
}

/// In QEMU's tables, regions may begin anywhere in their file, also on hugepages.
#[test]
fn regions_need_not_be_aligned() {
    let (_dir, backend, _, mut peer) = negotiated();
    for pages in [offcore_mem::Hugepages::None, offcore_mem::Hugepages::Auto] {
        let (mapping, fd) = offcore_mem::Mapping::memfd("guest", 4 << 20, pages).unwrap();
        let region = |guest: u64, size: u64, mmap_offset: u64| {
            let user = Guest::USER + mmap_offset;
            (offcore_vhost::message::MemoryRegion { guest, size, user, mmap_offset }, fd.as_fd())
        };
        let table = vec![region(0, 0xa_0000, 0), region(0xc_0000, 0x10_0000, 0xc_0000)];
        assert_eq!(peer.ask(Request::SetMemTable(table)), 0);
        peer.start_ring(0);
        let memory = backend.cells()[0].wanted().vring.unwrap().memory.clone();
        let mut cache = offcore_mem::RegionCache::empty();
        let at = memory.translate(0xc_0000, 0x10_0000, &mut cache).unwrap();
        mapping.write_at(0xc_0000, &[7]);
        // SAFETY: the address is inside the table, which `memory` keeps mapped.
        assert_eq!(unsafe { at.as_ptr().read_volatile() }, 7);
        assert!(memory.translate(0xa_0000, 1, &mut cache).is_none());
        assert_eq!(peer.base(0), 0);
    }
}

#[test]
fn features_may_be_set_again() {
    let dir = Dir::new();
    let backend = backend_of(&dir, 2);
    let guest = Guest::new();
    let mut peer = Peer::with_memory(&dir.file("vhost.sock"), &guest);
    peer.start_pair();
    // QEMU repeats this for every further queue pair.
    assert_eq!(peer.ask(Request::SetFeatures(FEATURES)), 0);
    assert_eq!(peer.ask(Request::SetVringNum(state(0, 256))), 0);
    assert_eq!(peer.ask(Request::SetVringAddr(addresses(0))), 0);
    assert_eq!(peer.ask(Request::ResetOwner), 0, "deprecated, ignored");
    assert_eq!(ring(&backend, 0), RingState::Enabled);
}

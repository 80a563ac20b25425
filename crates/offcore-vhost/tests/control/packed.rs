//! Packed rings in the control path: sizes, addresses and bases.

use std::os::fd::AsFd;

use offcore_ring::Layout;
use offcore_vhost::backend::RingState;
use offcore_vhost::features::{self, VIRTIO_F_RING_PACKED};
use offcore_vhost::message::{Request, VringAddr, VringFd};
use offcore_vhost::{Backend, BackendConfig, FrontEnd, FrontEndConfig};

use crate::peer::*;

fn packed() -> (Dir, Backend, Guest, Peer) {
    let (dir, backend, guest, mut peer) = connected();
    assert_eq!(peer.ask(Request::SetFeatures(FEATURES | VIRTIO_F_RING_PACKED)), 0);
    (dir, backend, guest, peer)
}

/// Sets up a ring of `size` at `base`, without its kick.
fn set_up(peer: &mut Peer, size: u32, base: u32) {
    assert_eq!(peer.ask(Request::SetVringNum(state(0, size))), 0);
    assert_eq!(peer.ask(Request::SetVringBase(state(0, base))), 0);
    assert_eq!(peer.ask(Request::SetVringAddr(addresses(0))), 0);
}

#[test]
fn bases_of_32_and_16_bits() {
    let (_dir, backend, _guest, mut peer) = packed();
    // The start positions sent by QEMU and by DPDK, followed by other positions with all wrap counters.
    for base in [0x8000_8000, 0x8000, 0, 0x0063_8063, 0x8063_0063, 99] {
        set_up(&mut peer, 100, base);
        assert_eq!(peer.ask(Request::SetVringKick(VringFd { index: 0, fd: None })), 0);
        let vring = backend.cells()[0].wanted().vring.unwrap();
        assert_eq!((vring.base, vring.layout.size()), (base, 100));
        assert!(matches!(vring.layout, Layout::Packed(_)));
        assert_eq!(peer.base(0), base, "it has not been used");
    }
    let line = backend.device().status().to_string();
    assert!(line.contains(", packed rings, features"), "{line}");
}

#[test]
fn bases_outside_the_ring_are_refused() {
    let (dir, backend, guest, mut peer) = packed();
    assert_eq!(peer.ask(Request::SetVringNum(state(0, 100))), 0);
    for base in [100, 0x7fff, 0x8064, 0x0064_0000, 0xffff_ffff, 0x7fff_8000] {
        let why = format!("packed virtqueue 0 at {base:#x}, expected descriptors below 100");
        refused(&backend, &mut peer, Request::SetVringBase(state(0, base)), &why);
    }
    // A base that arrives before the size is checked when the ring starts.
    set_up(&mut peer, 300, 0x812b);
    assert_eq!(peer.ask(Request::SetVringNum(state(0, 299))), 0);
    let kick = || Request::SetVringKick(VringFd { index: 0, fd: None });
    refused(&backend, &mut peer, kick(), "packed virtqueue 0 at 0x812b, expected descriptors below 299");
    assert_eq!(peer.ask(Request::SetOwner), 0, "said once");
    set_up(&mut peer, 300, 0x812b);
    assert_eq!(backend.device().status().vrings[0].state, RingState::Disabled);
    // The same applies to a base that arrives before the features: 32 bits are too many for a split ring.
    let mut peer = {
        drop(peer);
        Peer::connect(&dir.file("vhost.sock"))
    };
    peer.send(Request::SetProtocolFeatures(features::PROTOCOL_OFFERED));
    assert_eq!(peer.ask(guest.table()), 0);
    set_up(&mut peer, 256, 0x8000_8000);
    assert_eq!(peer.ask(kick()), 0);
    refused(
        &backend,
        &mut peer,
        Request::SetFeatures(FEATURES),
        "virtqueue 0 at 2147516416, expected at most 65535",
    );
}

#[test]
fn sizes_need_not_be_powers_of_two() {
    let (_dir, backend, _guest, mut peer) = packed();
    for size in [1, 3, 100, 255, 1000, 1023] {
        set_up(&mut peer, size, 0x8000_8000);
        assert_eq!(peer.ask(Request::SetVringKick(VringFd { index: 0, fd: None })), 0);
        assert_eq!(u32::from(backend.device().status().vrings[0].size), size);
        assert_eq!(backend.device().status().vrings[0].state, RingState::Disabled);
        peer.base(0);
    }
    for size in [0, 32769, 65536 + 100, u32::MAX] {
        let why = format!("virtqueue 0 of {size}, expected a number from 1 to 32768");
        refused(&backend, &mut peer, Request::SetVringNum(state(0, size)), &why);
    }
    // The size was set before the features were known.
    assert_eq!(peer.ask(Request::ResetDevice), 0);
    set_up(&mut peer, 100, 0);
    assert_eq!(peer.ask(Request::SetVringKick(VringFd { index: 0, fd: None })), 0);
    refused(&backend, &mut peer, Request::SetFeatures(FEATURES), "virtqueue 0: queue size 100");
}

#[test]
fn areas_are_inside_and_aligned() {
    let (_dir, backend, guest, mut peer) = packed();
    assert_eq!(peer.ask(Request::SetVringNum(state(0, 100))), 0);
    let (begin, good) = (Guest::USER, addresses(0));
    let end = begin + guest.mapping.len() as u64;
    for addr in [
        VringAddr { desc: end - 1600 + 16, ..good },
        VringAddr { desc: begin + 8, ..good },
        VringAddr { desc: 0, ..good },
        VringAddr { avail: end - 2, ..good },
        VringAddr { avail: begin + 2, ..good },
        VringAddr { used: u64::MAX - 3, ..good },
        VringAddr { used: begin + 1, ..good },
    ] {
        refused(&backend, &mut peer, Request::SetVringAddr(addr), "virtqueue 0: ");
    }
    // An event suppression structure has 4 bytes, and the ring ends at the end of the memory.
    let tight = VringAddr { desc: end - 1600, avail: begin, used: end - 1604, ..good };
    assert_eq!(peer.ask(Request::SetVringAddr(tight)), 0);
}

#[test]
fn front_end_begins_packed_rings() {
    let dir = Dir::new();
    let backend = backend(&dir);
    let features = FrontEndConfig::new("").features | VIRTIO_F_RING_PACKED;
    let config = FrontEndConfig { queue_size: 100, features, ..FrontEndConfig::new(dir.file("vhost.sock")) };
    for _ in 0..2 {
        let mut front_end = FrontEnd::connect(&config, &[]).unwrap();
        assert_ne!(front_end.features() & VIRTIO_F_RING_PACKED, 0);
        let base = || backend.cells()[1].wanted().vring.unwrap().base;
        for _ in 0..2 {
            front_end.start().unwrap();
            assert_eq!(base(), 0x8000_8000);
            assert!(matches!(front_end.queues()[1].layout(), Layout::Packed(_)));
            assert_eq!(front_end.queues()[1].layout().size(), 100);
            front_end.stop().unwrap();
        }
        front_end.reset(&[]).unwrap();
        front_end.start().unwrap();
        assert_eq!(base(), 0x8000_8000);
        assert_eq!(backend.device().status().refused, 0);
    }
    // If packed rings are not offered, split rings are negotiated, with a size that is valid for them.
    let split = Dir::new();
    let offered = features::OFFERED & !VIRTIO_F_RING_PACKED;
    let _backend = start(BackendConfig { features: offered, ..BackendConfig::new(split.file("vhost.sock")) });
    let config = FrontEndConfig { path: split.file("vhost.sock"), ..config };
    let error = FrontEnd::connect(&config, &[]).unwrap_err();
    assert!(error.to_string().contains("queue size 100"), "{error}");
    let front_end = FrontEnd::connect(&FrontEndConfig { queue_size: 128, ..config }, &[]).unwrap();
    assert!(matches!(front_end.queues()[0].layout(), Layout::Split(_)));
}

/// Changing the kick descriptor does not affect any other state of the ring.
#[test]
fn kick_changes_only_its_eventfd() {
    let (_dir, backend, _guest, mut peer) = packed();
    set_up(&mut peer, 100, 0x8005);
    for _ in 0..3 {
        let kick = eventfd();
        assert_eq!(peer.ask(Request::SetVringKick(VringFd { index: 0, fd: Some(kick.as_fd()) })), 0);
        let vring = backend.cells()[0].wanted().vring.unwrap();
        rustix::io::write(&kick, &3u64.to_ne_bytes()).unwrap();
        let mut count = [0; 8];
        rustix::io::read(&**vring.kick.as_ref().unwrap(), &mut count).unwrap();
        assert_eq!((u64::from_ne_bytes(count), vring.base), (3, 0x8005));
    }
}

#[test]
fn eight_packed_queue_pairs_run() {
    crate::own_front_end::eight_queue_pairs(VIRTIO_F_RING_PACKED, "packed");
}

//! Tests of receiving, in which the test plays the kernel's part.

use std::sync::Arc;

use offcore_dma::Mover;
use offcore_mem::{Hugepages, Pool};
use offcore_stats::StageClock;
use offcore_wire::virtio_net::{
    GSO_TUNNEL, NetHeader, VIRTIO_NET_HDR_F_NEEDS_CSUM, VIRTIO_NET_HDR_GSO_TCPV4,
};

use super::*;
use crate::af_packet::ring::Direction;
use crate::base::cell::Cell;

/// Offset at which the kernel puts frames.
const FRAME: u16 = 76;
const SLOTS: usize = 8;

struct Fixture {
    rx: AfPacketRx,
    cache: PoolCache,
    put: usize,
}

impl Fixture {
    fn new(frame: usize, chunks: usize) -> Self {
        let cell = Arc::new(Cell::new());
        cell.publish(Some(Ring::alone(Direction::Rx, SLOTS, frame)));
        let pool = Pool::new(chunks, 2048, Hugepages::None).unwrap();
        Self { rx: AfPacketRx::new(End::new(cell), RxCounters::private()), cache: pool.cache(), put: 0 }
    }

    /// The kernel receives a packet.
    fn put(&mut self, header: Header, vnet: &NetHeader, frame: &[u8]) {
        let ring = self.rx.end.ring.as_mut().unwrap();
        assert_eq!(ring.status(self.put), ring::IDLE, "the ring is full");
        ring.put(self.put, header, *vnet.to_bytes().first_chunk().unwrap(), frame);
        self.put += 1;
    }

    fn put_plain(&mut self, frame: &[u8]) {
        self.put(header(frame.len()), &NetHeader::default(), frame);
    }

    fn rx(&mut self) -> Burst {
        let before = self.waiting();
        let (mut mover, mut clock) = (Mover::new(), StageClock::private());
        let mut ctx = Context { mover: &mut mover, cache: &mut self.cache, clock: &mut clock, burst: BURST };
        let mut burst = Burst::new();
        self.rx.rx(&mut ctx, &mut burst);
        self.put -= before - self.waiting();
        burst
    }

    fn waiting(&self) -> usize {
        let ring = self.rx.end.ring.as_ref().unwrap();
        (0..SLOTS).filter(|&slot| ring.status(slot) & ring::USER != 0).count()
    }

    fn bytes(&self, packet: &Packet) -> Vec<u8> {
        self.cache.pool().segments(packet).flatten().copied().collect()
    }
}

fn header(len: usize) -> Header {
    Header { status: ring::USER, len: len as u32, there: len as u32, frame: FRAME, ..Header::default() }
}

fn frame(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + i / 256 + seed) as u8).collect()
}

#[test]
fn ring_returns_packets_unchanged() {
    let mut fixture = Fixture::new(1518, 64);
    for round in 0..10 {
        let frames: Vec<_> = [14, 60, 1514].iter().map(|&len| frame(len, round)).collect();
        frames.iter().for_each(|frame| fixture.put_plain(frame));
        let burst = fixture.rx();
        assert_eq!(burst.iter().map(|packet| fixture.bytes(packet)).collect::<Vec<_>>(), frames);
        assert!(Packet::all_plain(&burst));
        assert_eq!(fixture.waiting(), 0);
        fixture.cache.free_all(burst);
    }
    assert_eq!((fixture.rx.counters.packets(), fixture.rx.counters.bytes()), (30, 10 * (14 + 60 + 1514)));
    assert!(fixture.rx().is_empty());
}

#[test]
fn vlan_tag_shifts_checksum_start() {
    let mut fixture = Fixture::new(1518, 64);
    let plain = frame(200, 1);
    let vnet = NetHeader {
        flags: VIRTIO_NET_HDR_F_NEEDS_CSUM,
        gso_type: VIRTIO_NET_HDR_GSO_TCPV4,
        hdr_len: 54,
        gso_size: 100,
        csum_start: 34,
        csum_offset: 16,
        num_buffers: 0,
    };
    let status = ring::USER | ring::VLAN_VALID;
    fixture.put(Header { status, vlan_tci: 0x6007, ..header(200) }, &vnet, &plain);
    let qinq =
        Header { status: status | ring::VLAN_TPID_VALID, vlan_tci: 9, vlan_tpid: 0x88a8, ..header(200) };
    fixture.put(qinq, &NetHeader::default(), &plain);
    let burst = fixture.rx();
    for (packet, tag) in burst.iter().zip([[0x81, 0x00, 0x60, 0x07], [0x88, 0xa8, 0, 9]]) {
        let expected = [&plain[..12], &tag, &plain[12..]].concat();
        assert_eq!(fixture.bytes(packet), expected);
    }
    let asked = crate::offload_fallback::header(&burst[0]);
    assert_eq!(asked, NetHeader { csum_start: 38, hdr_len: 58, ..vnet });
    assert!(!burst[1].has_offload());
    fixture.cache.free_all(burst);
}

/// The kernel reports the type and checksum of the inner packet. Only the frame shows the outer packet.
#[test]
fn tunnelled_packet_is_noted() {
    let mut fixture = Fixture::new(1518, 64);
    let vnet = |csum_start| NetHeader {
        flags: VIRTIO_NET_HDR_F_NEEDS_CSUM,
        gso_type: VIRTIO_NET_HDR_GSO_TCPV4,
        gso_size: 100,
        csum_start,
        csum_offset: 16,
        ..NetHeader::default()
    };
    let mut bytes = frame(500, 1);
    bytes[12..34].copy_from_slice(&[8, 0, 0x45, 0, 0, 0, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    let tagged = Header { status: ring::USER | ring::VLAN_VALID, vlan_tci: 7, ..header(500) };
    fixture.put(header(500), &vnet(84), &bytes);
    fixture.put(tagged, &vnet(84), &bytes);
    fixture.put(header(500), &vnet(34), &bytes);
    fixture.put(tagged, &vnet(34), &bytes);
    let burst = fixture.rx();
    let asked: Vec<_> = burst.iter().map(crate::offload_fallback::header).collect();
    let found: Vec<_> = asked.iter().map(|header| (header.csum_start, header.gso_type)).collect();
    let tunnel = VIRTIO_NET_HDR_GSO_TCPV4 | GSO_TUNNEL;
    let plain = VIRTIO_NET_HDR_GSO_TCPV4;
    assert_eq!(found, [(84, tunnel), (88, tunnel), (34, plain), (38, plain)]);
    fixture.cache.free_all(burst);
}

#[test]
fn long_frame_takes_several_buffers() {
    let mut fixture = Fixture::new(9018, 64);
    let frames = [frame(9018, 3), frame(1793, 4), frame(1792, 5)];
    frames.iter().for_each(|frame| fixture.put_plain(frame));
    let burst = fixture.rx();
    assert_eq!(burst.iter().map(|packet| fixture.bytes(packet)).collect::<Vec<_>>(), frames);
    assert_eq!(burst.iter().map(|p| fixture.cache.pool().segment_count(p)).collect::<Vec<_>>(), [6, 2, 1]);
    fixture.cache.free_all(burst);
}

#[test]
fn invalid_frames_are_dropped_and_counted() {
    let mut fixture = Fixture::new(1518, 64);
    let bytes = frame(100, 0);
    let none = NetHeader::default();
    // A runt, two slots with an invalid frame offset, and a checksum outside the frame.
    fixture.put(header(13), &none, &bytes);
    fixture.put(Header { frame: 10, ..header(100) }, &none, &bytes);
    fixture.put(Header { frame: u16::MAX, ..header(100) }, &none, &bytes);
    fixture.put(
        header(100),
        &NetHeader { flags: VIRTIO_NET_HDR_F_NEEDS_CSUM, csum_start: 99, csum_offset: 16, ..none },
        &bytes,
    );
    fixture.put(
        header(100),
        &NetHeader { flags: VIRTIO_NET_HDR_F_NEEDS_CSUM, csum_start: u16::MAX, ..none },
        &bytes,
    );
    let tagged = Header { status: ring::USER | ring::VLAN_VALID, ..header(100) };
    fixture.put(
        tagged,
        &NetHeader { flags: VIRTIO_NET_HDR_F_NEEDS_CSUM, csum_start: u16::MAX, ..none },
        &bytes,
    );
    // A truncated packet; the kernel had no room for the complete one.
    fixture.put(Header { len: 60_000, ..header(1000) }, &none, &bytes);
    fixture.put_plain(&bytes);
    let burst = fixture.rx();
    assert_eq!(burst.len(), 1);
    let counters = &fixture.rx.counters;
    assert_eq!((counters.dropped(DropReason::Malformed), counters.dropped(DropReason::Full)), (6, 1));
    assert_eq!((counters.dropped_total(), fixture.waiting()), (7, 0));
    fixture.cache.free_all(burst);
}

#[test]
fn dry_pool_keeps_packets_in_the_ring() {
    let mut fixture = Fixture::new(1518, 64);
    let taken: Vec<_> = std::iter::from_fn(|| fixture.cache.take()).collect();
    fixture.put_plain(&frame(60, 1));
    assert!(fixture.rx().is_empty());
    assert_eq!((fixture.waiting(), fixture.rx.counters.dropped_total()), (1, 0));
    fixture.cache.free_all(taken);
    let burst = fixture.rx();
    assert_eq!((burst.len(), fixture.waiting()), (1, 0));
    fixture.cache.free_all(burst);
}

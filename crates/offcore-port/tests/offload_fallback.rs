//! Tests packets with offload requests and several buffers on queues that accept them, some of them, or none of them.
//! `hostile::offloads` compares any such packet with a second implementation.

#![allow(clippy::unwrap_used, reason = "a test that cannot continue has failed")]

mod common;

use common::tcp::{are_segments, whole};
use common::{Worker, frame, pool};
use offcore_mem::{BURST, Burst, Packet};
use offcore_port::offload_fallback::fall_back;
use offcore_port::{Accepts, Context, DropReason, TxCounters, TxQueue};
use offcore_wire::virtio_net::{
    NetHeader, Offloads, VIRTIO_NET_HDR_GSO_NONE, VIRTIO_NET_HDR_GSO_TCPV4, VIRTIO_NET_HDR_GSO_TCPV6,
    VIRTIO_NET_HDR_GSO_UDP,
};

/// Keeps sent packets while it has room.
#[derive(Debug)]
struct Sink {
    accepts: Accepts,
    sent: Vec<(NetHeader, Vec<u8>)>,
    calls: usize,
    room: usize,
    counters: TxCounters,
}

impl Sink {
    fn new(offloads: Offloads, segments: bool) -> Self {
        let accepts = Accepts { offloads, segments };
        Self { accepts, sent: Vec::new(), calls: 0, room: usize::MAX, counters: TxCounters::private() }
    }

    fn frames(&self) -> Vec<Vec<u8>> {
        self.sent.iter().map(|(_, frame)| frame.clone()).collect()
    }
}

impl TxQueue for Sink {
    fn tx(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        self.calls += 1;
        let pool = ctx.cache.pool();
        let taken = burst.len().min(self.room);
        self.room -= taken;
        for packet in burst.drain(..taken) {
            assert!(self.accepts.takes(&packet), "{packet:?}");
            let (header, bytes) = frame(pool, &packet);
            assert_eq!(header.check(bytes.len()), Ok(()));
            self.counters.add(1, bytes.len() as u64);
            self.sent.push((header, bytes));
            ctx.cache.free(packet);
        }
    }

    fn accepts(&self) -> Accepts {
        self.accepts
    }

    fn counters(&self) -> &TxCounters {
        &self.counters
    }
}

/// Sends a burst as a worker does, and checks that no packet buffer is lost.
fn send(worker: &mut Worker, sink: &mut Sink, packets: impl FnOnce(&mut Worker) -> Burst) {
    let free = worker.free_chunks();
    let mut burst = packets(worker);
    fall_back(sink, &mut worker.ctx(), &mut burst);
    sink.tx(&mut worker.ctx(), &mut burst);
    sink.counters.drop_all(DropReason::Full, &mut burst, &mut worker.cache);
    assert_eq!(worker.free_chunks(), free);
}

fn send_one(worker: &mut Worker, sink: &mut Sink, header: &NetHeader, bytes: &[u8]) {
    send(worker, sink, |worker| Burst::from_iter([worker.packet_with(header, bytes)]));
}

const TSO: Offloads = Offloads { ecn: false, ..Offloads::ALL };
const NONE: Offloads = Offloads { checksum: false, tso4: false, tso6: false, ecn: false, uso: false };

#[test]
fn plain_packets_are_left_alone() {
    let mut worker = Worker::new(pool(64));
    let mut burst: Burst = (0..40u8).map(|n| worker.packet(&[n; 60])).collect();
    let before: Vec<_> = burst.iter().map(|packet| (packet.chunk(), packet.data())).collect();
    let mut sink = Sink::new(NONE, false);
    fall_back(&mut sink, &mut worker.ctx(), &mut burst);
    assert!(burst.iter().map(|packet| (packet.chunk(), packet.data())).eq(before));
    assert_eq!(sink.calls, 0);
    worker.free(&mut burst);
}

#[test]
fn tcp_is_segmented_in_place() {
    let mut worker = Worker::new(pool(512));
    for v6 in [false, true] {
        for offloads in [NONE, Offloads { tso4: v6, tso6: !v6, ..NONE }] {
            let mut sink = Sink::new(offloads, true);
            let (header, bytes) = whole(v6, 65_000, 536);
            send(&mut worker, &mut sink, |worker| {
                let mut burst = Burst::new();
                burst.push(worker.packet(&[1; 60]));
                burst.push(worker.packet_with(&header, &bytes));
                burst.push(worker.packet(&[2; 60]));
                burst
            });
            let frames = sink.frames();
            assert_eq!(
                (frames[0].clone(), frames[123].clone(), frames.len()),
                (vec![1; 60], vec![2; 60], 124)
            );
            are_segments(&frames[1..123], &bytes, &header);
            assert!(sink.sent.iter().all(|(header, _)| *header == NetHeader::default()));
            assert_eq!((sink.calls, sink.counters.dropped_total()), (2, 0));
        }
    }
}

#[test]
fn segmentation_yields_several_bursts() {
    let mut worker = Worker::new(pool(1024));
    let mut sink = Sink::new(NONE, false);
    let (header, bytes) = whole(false, 20_000, 100);
    send(&mut worker, &mut sink, |worker| (0..64).map(|_| worker.packet_with(&header, &bytes)).collect());
    assert_eq!((sink.sent.len(), sink.calls), (64 * 200, 200));
    for frames in sink.frames().chunks(200) {
        are_segments(frames, &bytes, &header);
    }
}

/// Creates a packet of `bytes` in two buffers although one is sufficient, as a guest may send it.
fn in_two(worker: &mut Worker, header: &NetHeader, bytes: &[u8], cut: usize) -> Packet {
    let rest = worker.packet(&bytes[cut..]);
    let mut front = worker.packet_with(header, bytes);
    front.truncate(cut);
    worker.cache.pool().link(front, rest)
}

#[test]
fn buffers_are_joined_where_they_fit() {
    let mut worker = Worker::new(pool(128));
    let (header, bytes) = whole(true, 1500, 700);
    for cut in [1, 60, 61, 1573] {
        // If the queue accepts the header, the joined packet keeps it.
        let mut sink = Sink::new(TSO, false);
        send(&mut worker, &mut sink, |worker| Burst::from_iter([in_two(worker, &header, &bytes, cut)]));
        assert_eq!(sink.sent, [(header, bytes.clone())]);
        let mut sink = Sink::new(NONE, false);
        send(&mut worker, &mut sink, |worker| Burst::from_iter([in_two(worker, &header, &bytes, cut)]));
        are_segments(&sink.frames(), &bytes, &header);
        let plain = NetHeader::default();
        let mut sink = Sink::new(NONE, false);
        send(&mut worker, &mut sink, |worker| Burst::from_iter([in_two(worker, &plain, &bytes, cut)]));
        assert_eq!(sink.sent, [(plain, bytes.clone())]);
    }
    // A TCP packet that does not fit into one buffer is segmented although the queue accepts segmentation. Other
    // packets that do not fit are dropped.
    let (header, bytes) = whole(true, 5000, 1448);
    let mut sink = Sink::new(TSO, false);
    send_one(&mut worker, &mut sink, &header, &bytes);
    are_segments(&sink.frames(), &bytes, &header);
    send_one(&mut worker, &mut sink, &NetHeader::default(), &bytes);
    let open = NetHeader { gso_type: VIRTIO_NET_HDR_GSO_NONE, ..header };
    send_one(&mut worker, &mut sink, &open, &bytes);
    assert_eq!((sink.sent.len(), sink.counters.dropped(DropReason::TooBig)), (4, 2));
}

#[test]
fn nonsense_is_dropped_and_counted() {
    let mut worker = Worker::new(pool(128));
    let mut sink = Sink::new(NONE, false);
    let (header, bytes) = whole(false, 5000, 1448);
    let mut no_tcp = bytes.clone();
    no_tcp[23] = 17;
    send_one(&mut worker, &mut sink, &header, &no_tcp);
    send_one(&mut worker, &mut sink, &NetHeader { gso_type: VIRTIO_NET_HDR_GSO_UDP, ..header }, &bytes);
    send_one(&mut worker, &mut sink, &NetHeader { gso_type: VIRTIO_NET_HDR_GSO_TCPV6, ..header }, &bytes);
    send_one(&mut worker, &mut sink, &NetHeader { gso_size: 1, ..header }, &bytes);
    send_one(&mut worker, &mut sink, &header, &bytes[..40]);
    let outside = NetHeader { csum_start: u16::MAX, gso_type: VIRTIO_NET_HDR_GSO_NONE, ..header };
    send_one(&mut worker, &mut sink, &outside, &bytes[..100]);
    assert_eq!((sink.counters.dropped(DropReason::Malformed), sink.counters.dropped_total()), (6, 6));
    // Segments that are longer than a packet buffer.
    send_one(
        &mut worker,
        &mut sink,
        &NetHeader { gso_size: 4000, gso_type: VIRTIO_NET_HDR_GSO_TCPV4, ..header },
        &bytes,
    );
    assert_eq!((sink.counters.dropped(DropReason::TooBig), sink.counters.dropped_total()), (1, 7));
    assert!(sink.sent.is_empty());
}

/// TCP allows segments of eight bytes. A guest that requests thousands of them must not cause other packets to be lost.
#[test]
fn a_packet_becomes_256_segments_at_most() {
    let mut worker = Worker::new(pool(4096));
    let mut sink = Sink::new(NONE, false);
    let (many, its_bytes) = whole(false, 256 * 8 + 1, 8);
    let (header, bytes) = whole(false, 256 * 8, 8);
    send(&mut worker, &mut sink, |worker| {
        let mut burst: Burst = (0..BURST - 1).map(|_| worker.packet_with(&many, &its_bytes)).collect();
        burst.push(worker.packet_with(&header, &bytes));
        burst
    });
    are_segments(&sink.frames(), &bytes, &header);
    assert_eq!((sink.sent.len(), sink.counters.dropped(DropReason::TooBig)), (256, BURST as u64 - 1));
}

#[test]
fn segments_without_room_are_counted() {
    let mut worker = Worker::new(pool(64));
    let (header, bytes) = whole(false, 14_480, 1448);
    let mut sink = Sink::new(NONE, false);
    sink.room = 4;
    send_one(&mut worker, &mut sink, &header, &bytes);
    assert_eq!((sink.sent.len(), sink.counters.dropped(DropReason::Full)), (4, 6));

    let mut sink = Sink::new(NONE, false);
    let mut behind = 0;
    send(&mut worker, &mut sink, |worker| {
        let packet = worker.packet_with(&header, &bytes);
        let mut burst: Burst = std::iter::from_fn(|| worker.cache.take()).collect();
        let free: Vec<Packet> = burst.drain(..3).collect();
        worker.cache.free_all(free);
        behind = burst.len();
        burst.insert(0, packet);
        burst
    });
    // Three of ten segments, and all packets behind them.
    assert_eq!(sink.sent.len(), 3 + behind);
    assert_eq!((sink.counters.dropped(DropReason::NoBuffer), sink.counters.dropped_total()), (7, 7));
}

//! Tests offloads between a TAP port and the kernel: partial checksums, unsegmented packets, and packets longer than a
//! packet buffer. Two ports are connected by a bridge in a separate network namespace.

#![allow(clippy::unwrap_used, reason = "a test that cannot continue has failed")]

mod common;

use std::net::UdpSocket;

use common::tcp::{are_segments, whole};
use common::udp;
use common::{TIMEOUT, Worker, frame, in_namespace, ip, pool, until};
use offcore_mem::Burst;
use offcore_port::spec::PortSpec;
use offcore_port::tap::TapPort;
use offcore_port::{DropReason, Port, RxQueue, TxQueue};
use offcore_wire::virtio_net::{NetHeader, Offloads, VIRTIO_NET_HDR_GSO_ECN, VIRTIO_NET_HDR_GSO_NONE};

/// A port, its queues, and their worker.
struct Tap {
    worker: Worker,
    port: TapPort,
    rx: Box<dyn RxQueue>,
    tx: Box<dyn TxQueue>,
}

impl Tap {
    fn new(text: &str) -> Self {
        let pool = pool(512);
        let mut worker = Worker::new(pool);
        let PortSpec::Tap(spec) = text.parse().unwrap() else { panic!("{text}") };
        let mut port = TapPort::open(&spec, pool).unwrap_or_else(|e| panic!("{e}"));
        let rx = worker.rx_queue(&mut port, 0).unwrap();
        let tx = worker.tx_queue(&mut port, 0).unwrap();
        Self { worker, port, rx, tx }
    }

    /// Creates two ports connected by a bridge.
    fn bridged(first: &str, second: &str) -> [Self; 2] {
        let taps = [Self::new(first), Self::new(second)];
        ip("link add br0 type bridge");
        for tap in &taps {
            ip(&format!("link set {} master br0", tap.port.interface()));
        }
        ip("link set br0 up");
        taps
    }

    fn send(&mut self, header: &NetHeader, bytes: &[u8]) {
        let packet = self.worker.packet_with(header, bytes);
        assert!(self.tx.accepts().takes(&packet));
        let mut burst = Burst::from_iter([packet]);
        self.worker.tx(&mut *self.tx, &mut burst);
        assert!(burst.is_empty());
    }

    /// Returns the received packets that have the addresses of `bytes`. The kernel also sends other packets.
    fn receive(&mut self, bytes: &[u8]) -> Vec<(NetHeader, Vec<u8>)> {
        let mut burst = Burst::new();
        self.worker.rx(&mut *self.rx, &mut burst);
        let pool = self.worker.cache.pool();
        let frames: Vec<_> = burst.iter().map(|packet| frame(pool, packet)).collect();
        for (header, frame) in &frames {
            assert_eq!(header.check(frame.len()), Ok(()));
        }
        self.worker.free(&mut burst);
        frames.into_iter().filter(|(_, frame)| frame.starts_with(&bytes[..12])).collect()
    }

    fn receive_one(&mut self, bytes: &[u8]) -> (NetHeader, Vec<u8>) {
        let mut frames = Vec::new();
        until("a packet arrives", || {
            frames.extend(self.receive(bytes));
            !frames.is_empty()
        });
        assert_eq!(frames.len(), 1);
        frames.remove(0)
    }

    /// Checks that no packet was dropped and that every packet buffer is back in the pool.
    fn end_whole(mut self) {
        assert_eq!((self.rx.counters().dropped_total(), self.tx.counters().dropped_total()), (0, 0));
        assert_eq!(self.rx.drain(&mut self.worker.ctx(), &mut Burst::new()), 0);
        assert_eq!(self.worker.free_chunks(), 512);
    }
}

#[test]
fn gso_packet_passes_unchanged() {
    in_namespace("gso_packet_passes_unchanged", || {
        let [mut a, mut b] = Tap::bridged("tap:oc0", "tap:oc1");
        assert_eq!(a.tx.accepts().offloads, Offloads::ALL);
        for (v6, len) in [(false, 40_000), (true, 64_000), (false, 1_449), (true, 5_000)] {
            for ecn in [0, VIRTIO_NET_HDR_GSO_ECN] {
                let (header, bytes) = whole(v6, len, 1448);
                let header = NetHeader { gso_type: header.gso_type | ecn, ..header };
                a.send(&header, &bytes);
                let (found, frame) = b.receive_one(&bytes);
                // The kernel reports the length of its linear buffer, which is only a hint.
                assert!(found.hdr_len >= header.hdr_len);
                assert_eq!(NetHeader { hdr_len: header.hdr_len, ..found }, header);
                assert!(frame == bytes, "{len} bytes, byte for byte");
            }
        }
        a.end_whole();
        b.end_whole();
    });
}

/// The kernel passes the packet from one port to the other. A port without offloads gets the datagrams.
#[test]
fn unsegmented_udp_passes_unchanged() {
    in_namespace("unsegmented_udp_passes_unchanged", || {
        let [mut a, mut b] = Tap::bridged("tap:oc0", "tap:oc1");
        let mut plain = Tap::new("tap:oc2,offloads=off");
        ip("link set oc2 master br0");
        if !a.tx.accepts().offloads.uso {
            return eprintln!("SKIP: unsegmented_udp_passes_unchanged: it needs Linux 6.2");
        }
        for (v6, len) in [(false, 60_000), (true, 60_000), (false, 2401), (true, 5000)] {
            let (header, bytes, datagrams) = udp::whole(v6, len, 1200);
            a.send(&header, &bytes);
            let (found, frame) = b.receive_one(&bytes);
            assert_eq!(NetHeader { hdr_len: header.hdr_len, ..found }, header);
            assert!(frame == bytes, "{len} bytes, byte for byte");
            let mut frames = Vec::new();
            until("the datagrams arrive", || {
                frames.extend(plain.receive(&bytes).into_iter().map(|(_, frame)| frame));
                frames.len() >= datagrams.len()
            });
            assert!(frames == datagrams, "{len} bytes");
        }
        a.end_whole();
        b.end_whole();
        plain.end_whole();
    });
}

#[test]
fn gso_packets_follow_ordinary_runs() {
    in_namespace("gso_packets_follow_ordinary_runs", || {
        let [mut a, mut b] = Tap::bridged("tap:oc0", "tap:oc1");
        let (ordinary, long) = (whole(false, 1000, 1448), whole(false, 50_000, 1448));
        let open = NetHeader { gso_type: VIRTIO_NET_HDR_GSO_NONE, gso_size: 0, hdr_len: 0, ..ordinary.0 };
        // Runs of ordinary packets after which the port does or does not expect long packets.
        for run in [0, 70, 63, 64, 65, 1, 0, 0, 200] {
            for _ in 0..run {
                a.send(&open, &ordinary.1);
                assert!(b.receive_one(&ordinary.1).1 == ordinary.1);
            }
            a.send(&long.0, &long.1);
            assert!(b.receive_one(&long.1).1 == long.1, "after {run} ordinary packets");
        }
        a.end_whole();
        b.end_whole();
    });
}

#[test]
fn partial_checksum_stays_partial() {
    in_namespace("partial_checksum_stays_partial", || {
        let [mut a, mut b] = Tap::bridged("tap:oc0", "tap:oc1");
        for len in [0, 1, 500, 1400] {
            let (header, bytes) = whole(false, len, 1448);
            let header = NetHeader { gso_type: VIRTIO_NET_HDR_GSO_NONE, gso_size: 0, hdr_len: 0, ..header };
            a.send(&header, &bytes);
            let (found, frame) = b.receive_one(&bytes);
            assert_eq!((NetHeader { hdr_len: 0, ..found }, frame), (header, bytes));
        }
        a.end_whole();
        b.end_whole();
    });
}

#[test]
fn port_without_offloads_gets_segments() {
    in_namespace("port_without_offloads_gets_segments", || {
        let [mut a, mut b] = Tap::bridged("tap:oc0", "tap:oc1,offloads=off");
        assert!(b.tx.accepts().segments && b.tx.accepts().offloads == Offloads::default());
        for v6 in [false, true] {
            let (header, bytes) = whole(v6, 30_000, 1400);
            a.send(&header, &bytes);
            let mut frames = Vec::new();
            until("the segments arrive", || {
                frames.extend(b.receive(&bytes));
                frames.len() >= 22
            });
            let frames: Vec<Vec<u8>> = frames
                .into_iter()
                .map(|(header, frame)| {
                    assert!(!header.leaves_work());
                    frame
                })
                .collect();
            are_segments(&frames, &bytes, &header);
        }
        a.end_whole();
        b.end_whole();
    });
}

#[test]
fn long_packets_pass_both_ways() {
    in_namespace("long_packets_pass_both_ways", || {
        for offloads in ["on", "off"] {
            // The interface gets its final MTU before the port is opened.
            ip("tuntap add oc0 mode tap");
            ip("link set oc0 mtu 9000");
            let mut tap = Tap::new(&format!("tap:oc0,offloads={offloads}"));
            assert_eq!(tap.port.mtu(), Some(9000));
            let status = tap.port.status();
            assert!(status.contains("MTU 9000") && status.ends_with(offloads), "{status}");
            ip("addr add 10.77.0.1/24 dev oc0");
            ip("neigh add 10.77.0.2 lladdr 02:00:00:00:00:22 dev oc0");
            let socket = UdpSocket::bind("10.77.0.1:9").unwrap();
            socket.set_read_timeout(Some(TIMEOUT)).unwrap();
            let mac = tap.port.mac().0;
            for len in [1500, 1750, 1751, 8000, 8972] {
                let payload: Vec<u8> = (0..len).map(|i| (i * 31 + len) as u8).collect();
                socket.send_to(&payload, "10.77.0.2:9").unwrap();
                let addresses = [[2, 0, 0, 0, 0, 0x22], mac].concat();
                let (header, frame) = tap.receive_one(&addresses);
                assert_eq!(frame.len(), 42 + len);
                assert!(frame[42..] == payload);
                assert_eq!(header.needs_checksum(), offloads == "on");
                // The same packet in the other direction: exchanging addresses and ports does not change the checksum.
                let mut back = frame.clone();
                back.copy_within(0..6, 6);
                back[..6].copy_from_slice(&mac);
                let (src, dst) = (frame[26..30].to_vec(), frame[30..34].to_vec());
                back[26..30].copy_from_slice(&dst);
                back[30..34].copy_from_slice(&src);
                tap.send(&header, &back);
                let mut received = vec![0; 10_000];
                assert_eq!(socket.recv(&mut received).unwrap(), len);
                assert!(received[..len] == payload);
            }
            tap.end_whole();
            ip("link del oc0");
        }
    });
}

#[test]
fn kernel_refusals_are_counted() {
    in_namespace("kernel_refusals_are_counted", || {
        let mut tap = Tap::new("tap:oc0");
        let (header, bytes) = whole(false, 5000, 1448);
        let mut no_ip = bytes.clone();
        no_ip[12..14].copy_from_slice(&[0x88, 0xb5]);
        // All of these pass the checks of a header alone, as a guest's header would.
        let hostile = [
            (header, &no_ip[..]),
            (NetHeader { gso_type: header.gso_type | 4, ..header }, &bytes),
            (NetHeader { csum_start: 5000, ..header }, &bytes),
            (NetHeader { csum_offset: 4000, ..header }, &bytes),
            (NetHeader { csum_start: 0, csum_offset: 0, gso_size: 1, ..header }, &bytes),
            (NetHeader { flags: 0, gso_size: u16::MAX, ..header }, &bytes),
            (header, &bytes[..60]),
        ];
        for (header, bytes) in hostile {
            if header.check(bytes.len()).is_ok() && tap.tx.accepts().offloads.allows(&header) {
                tap.send(&header, bytes);
            }
        }
        let counters = tap.tx.counters();
        assert!(counters.dropped(DropReason::Failed) > 0, "{counters:?}");
        assert_eq!(counters.dropped(DropReason::Failed), counters.dropped_total());
        assert_eq!(tap.rx.drain(&mut tap.worker.ctx(), &mut Burst::new()), 0);
        assert_eq!(tap.worker.free_chunks(), 512);
    });
}

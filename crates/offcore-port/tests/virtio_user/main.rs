//! Tests the virtio-user port against a back end whose data path is part of the test, so that it can misbehave in ways
//! that a real back end does not.

#![allow(clippy::unwrap_used, reason = "a test that cannot continue has failed")]

#[path = "../common/mod.rs"]
mod common;
mod rig;

use common::{TempDir, Worker, pool, until};
use offcore_mem::Burst;
use offcore_port::virtio_user::VirtioUserPort;
use offcore_port::{DropReason, Port};
use offcore_ring::device::{Chain, DeviceQueue};
use offcore_vhost::backend::{Backend, BackendConfig};
use offcore_vhost::features::{VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_MRG_RXBUF};
use offcore_wire::MacAddr;
use offcore_wire::virtio_net::{
    HEADER_LEN, NetHeader, VIRTIO_NET_HDR_F_NEEDS_CSUM, VIRTIO_NET_HDR_GSO_TCPV4, VIRTIO_NET_HDR_GSO_UDP_L4,
};
use rig::*;

#[test]
fn packets_pass_both_ways() {
    for options in ["", ",mrg=off", ",event_idx=off,queue_size=64", ",queue_size=1024"] {
        let mut setup = Setup::new(options);
        let size = usize::from(spec(&format!("virtio-user:x{options}")).queue_size);
        assert_eq!(setup.to_us.available(), size, "the RX ring is kept full");
        // Enough rounds for the rings to wrap a few times.
        for _ in 0..60 {
            let some = frames(40);
            some.iter().for_each(|frame| setup.to_us.send(frame));
            assert_eq!(setup.receive(), some);
            assert_eq!(setup.send(&some), 0);
            let sent: Vec<Vec<u8>> = some.iter().map(|_| setup.from_us.receive()).collect();
            assert_eq!(sent, some);
        }
        let bytes = 60 * frames(40).iter().map(Vec::len).sum::<usize>() as u64;
        for counters in [
            (setup.rx.counters().packets(), setup.rx.counters().bytes(), setup.rx.counters().dropped_total()),
            (setup.tx.counters().packets(), setup.tx.counters().bytes(), setup.tx.counters().dropped_total()),
        ] {
            assert_eq!(counters, (2400, bytes, 0));
        }
        setup.close();
    }
}

#[test]
fn a_call_receives_no_more_than_asked_for() {
    let mut setup = Setup::new("");
    let some = frames(200);
    some.iter().for_each(|frame| setup.to_us.send(frame));
    let mut received = Vec::new();
    for expected in [64, 64, 64, 8] {
        let burst = setup.receive();
        assert_eq!(burst.len(), expected);
        received.extend(burst);
    }
    assert_eq!(received, some);
    setup.close();
}

#[test]
fn full_ring_leaves_packets() {
    let mut setup = Setup::new(",queue_size=64");
    assert_eq!(setup.send(&frames(100)), 36);
    assert_eq!(setup.tx.counters().packets(), 64);
    for n in 0..10 {
        assert_eq!(setup.from_us.receive(), frame(n));
    }
    assert_eq!(setup.send(&frames(100)), 90, "ten descriptors have come back");
    assert!(!setup.tx.stop(&mut setup.worker.ctx()), "packets are in flight");
    while setup.from_us.available() > 0 {
        setup.from_us.receive();
    }
    assert!(setup.tx.stop(&mut setup.worker.ctx()));
    setup.close();
}

#[test]
fn used_lengths_are_checked() {
    let mut setup = Setup::new("");
    let good = NetHeader { num_buffers: 1, ..NetHeader::default() };
    let limit = HEADER_LEN + ROOM;
    for (len, ok) in [
        (0, false),
        (HEADER_LEN - 1, false),
        (HEADER_LEN, false),
        (HEADER_LEN + 13, false),
        (HEADER_LEN + 14, true),
        (limit, true),
        (limit + 1, false),
        (65536 + HEADER_LEN + 60, false),
        (u32::MAX as usize, false),
    ] {
        let before = setup.rx_dropped(DropReason::Malformed);
        setup.to_us.give(good, &[1; 60], len);
        let received = setup.receive();
        let lengths: Vec<usize> = received.iter().map(Vec::len).collect();
        if ok {
            assert_eq!(lengths, [len - HEADER_LEN]);
        } else {
            assert!(lengths.is_empty(), "{len} bytes claimed");
        }
        assert_eq!(setup.rx_dropped(DropReason::Malformed) - before, u64::from(!ok), "{len} bytes claimed");
    }
    setup.still_receives();
    setup.close();
}

#[test]
fn impossible_headers_are_counted() {
    let mut setup = Setup::new("");
    let good = NetHeader { num_buffers: 1, ..NetHeader::default() };
    for bad in [
        NetHeader { num_buffers: 0, ..good },
        NetHeader { num_buffers: 257, ..good },
        NetHeader { num_buffers: u16::MAX, ..good },
        NetHeader { gso_type: VIRTIO_NET_HDR_GSO_TCPV4, gso_size: 1448, ..good },
        NetHeader { flags: VIRTIO_NET_HDR_F_NEEDS_CSUM, csum_start: 59, csum_offset: 0, ..good },
        NetHeader { flags: VIRTIO_NET_HDR_F_NEEDS_CSUM, csum_start: u16::MAX, csum_offset: u16::MAX, ..good },
    ] {
        let before = setup.rx_dropped(DropReason::Malformed);
        setup.to_us.give(bad, &[1; 60], HEADER_LEN + 60);
        assert!(setup.receive().is_empty(), "{bad:?}");
        assert_eq!(setup.rx_dropped(DropReason::Malformed) - before, 1, "{bad:?}");
        setup.still_receives();
    }
    setup.close();
}

#[test]
fn merged_buffers_are_one_packet() {
    let mut setup = Setup::new("");
    for _ in 0..10 {
        for len in LONG {
            setup.to_us.send(&frame(1));
            setup.to_us.send_merged(NetHeader::default(), &long(len));
            setup.to_us.send(&frame(2));
            assert_eq!(setup.receive(), [frame(1), long(len), frame(2)], "{len} bytes");
        }
    }
    assert_eq!(setup.rx.counters().packets(), 240);
    let bytes = 10 * LONG.iter().map(|len| len + frame(1).len() + frame(2).len()).sum::<usize>();
    assert_eq!((setup.rx.counters().bytes(), setup.rx.counters().dropped_total()), (bytes as u64, 0));

    // The packet's buffers may arrive one at a time.
    let several = NetHeader { num_buffers: 3, ..NetHeader::default() };
    setup.to_us.give(several, &[1; 1000], HEADER_LEN + 1000);
    assert!(setup.receive().is_empty());
    setup.to_us.fill(&[2; 10], 10);
    assert!(setup.receive().is_empty());
    setup.to_us.fill(&[3; 1], 1);
    setup.to_us.send(&frame(2));
    assert_eq!(setup.receive(), [[&[1; 1000][..], &[2; 10], &[3; 1]].concat(), frame(2)]);

    // Each packet has more buffers than a burst has packets.
    setup.to_us.send_merged(NetHeader::default(), &long(65_000));
    setup.to_us.send_merged(NetHeader::default(), &long(65_001));
    assert_eq!(setup.receive(), [long(65_000)]);
    assert_eq!(setup.receive(), [long(65_001)]);
    setup.close();

    // Without mergeable buffers `num_buffers` is ignored.
    let mut setup = Setup::new(",mrg=off");
    setup.to_us.give(several, &frame(1), HEADER_LEN + frame(1).len());
    assert_eq!(setup.receive(), [frame(1)]);
    setup.close();
}

#[test]
fn bad_buffer_drops_the_whole_packet() {
    let mut setup = Setup::new("");
    let room = HEADER_LEN + ROOM;
    // The length claimed for each buffer, and the reason for dropping the packet.
    let cases: [(Vec<usize>, DropReason); 7] = [
        (vec![room, 0, 60], DropReason::Malformed),
        (vec![room, 60, 0], DropReason::Malformed),
        (vec![room, room + 1, 60], DropReason::Malformed),
        (vec![room, u32::MAX as usize, room + 1], DropReason::Malformed),
        (vec![HEADER_LEN + 13, 1000], DropReason::Malformed),
        (vec![room; 37], DropReason::TooBig),
        (vec![HEADER_LEN + 60; 65], DropReason::TooBig),
    ];
    for (claims, reason) in cases {
        let before = (setup.rx_dropped(reason), setup.rx.counters().dropped_total());
        let header = NetHeader { num_buffers: claims.len() as u16, ..NetHeader::default() };
        for (n, &claim) in claims.iter().enumerate() {
            if n == 0 {
                setup.to_us.give(header, &[1; 60], claim);
            } else {
                setup.to_us.fill(&[1; 60], claim);
            }
        }
        setup.to_us.send(&frame(2));
        let received: Vec<_> = (0..2).flat_map(|_| setup.receive()).collect();
        assert_eq!(received, [frame(2)], "{claims:?}");
        let after = (setup.rx_dropped(reason), setup.rx.counters().dropped_total());
        assert_eq!(after, (before.0 + 1, before.1 + 1), "{claims:?}");
        setup.still_receives();
    }
    setup.close();
}

#[test]
fn loss_inside_a_packet_leaks_nothing() {
    let mut setup = Setup::new("");
    setup.to_us.give(NetHeader { num_buffers: 5, ..NetHeader::default() }, &[1; 60], HEADER_LEN + ROOM);
    setup.to_us.fill(&[2; 60], 1000);
    assert!(setup.receive().is_empty());
    setup.lose();
    setup.worker.rx(&mut *setup.rx, &mut Burst::new());
    setup.close();
}

#[test]
fn long_packets_are_sent_as_chains() {
    let mut setup = Setup::new("");
    let all = [&[60], &LONG[..]].concat();
    for _ in 0..10 {
        for &len in &all {
            assert_eq!(setup.send(&[long(len), frame(1)]), 0);
            let (header, sent, buffers) = setup.from_us.receive_with();
            assert_eq!((header, buffers), (NetHeader::default(), len.div_ceil(ROOM)));
            assert!(sent == long(len), "{len} bytes");
            assert_eq!(setup.from_us.receive(), frame(1));
        }
    }
    let bytes = 10 * (all.iter().sum::<usize>() + all.len() * frame(1).len());
    assert_eq!((setup.tx.counters().packets(), setup.tx.counters().bytes()), (180, bytes as u64));
    assert_eq!(setup.tx.counters().dropped_total(), 0);
    setup.close();
}

#[test]
fn long_packets_wait_for_descriptors() {
    let mut setup = Setup::new(",queue_size=16");
    // Packets of six buffers, and a packet of two.
    let packets = [long(9014), long(9014), long(2000), long(9014), long(60)];
    assert_eq!(setup.send(&packets), 2, "twice six and two of sixteen descriptors are in use");
    assert_eq!(setup.from_us.receive(), long(9014));
    assert_eq!(setup.send(&packets[3..]), 0);
    for packet in &packets[1..] {
        assert_eq!(&setup.from_us.receive(), packet);
    }
    // Packets with more buffers than the ring has descriptors, or than a packet may have.
    assert_eq!(setup.send(&[long(17 * ROOM), long(16 * ROOM), long(65 * ROOM)]), 0);
    assert_eq!(setup.from_us.receive(), long(16 * ROOM));
    assert_eq!(
        (setup.tx.counters().dropped(DropReason::TooBig), setup.tx.counters().dropped_total()),
        (2, 2)
    );
    setup.close();
    let mut setup = Setup::new("");
    assert_eq!(setup.send(&[long(65_558), long(65_557), long(100_000)]), 0);
    assert_eq!(setup.from_us.receive(), long(65_557));
    assert_eq!(setup.tx.counters().dropped(DropReason::TooBig), 2);
    setup.close();
}

#[test]
fn mtu_bounds_unmerged_packets() {
    let mut setup = Setup::new(",mrg=off,mtu=9000");
    // A frame of 9022 bytes, including two tags, takes six buffers.
    assert_eq!(setup.to_us.available(), 256 / 6);
    for _ in 0..20 {
        for len in [14, 60, ROOM, ROOM + 1, 9014, 9022] {
            setup.to_us.send(&long(len));
            assert_eq!(setup.receive(), [long(len)], "{len} bytes");
        }
    }
    for claim in [0, HEADER_LEN + 13, HEADER_LEN + 9023, u32::MAX as usize] {
        let before = setup.rx_dropped(DropReason::Malformed);
        setup.to_us.give(NetHeader::default(), &[1; 60], claim);
        assert!(setup.receive().is_empty());
        assert_eq!(setup.rx_dropped(DropReason::Malformed), before + 1, "{claim} bytes claimed");
    }
    setup.still_receives();
    assert_eq!(setup.backend.as_ref().unwrap().device().status().mtu, Some(9000));
    setup.close();

    // With mergeable buffers, each descriptor chain is a single buffer.
    let mut setup = Setup::new(",mtu=9000");
    assert_eq!(setup.to_us.available(), 256);
    setup.to_us.send_merged(NetHeader::default(), &long(9014));
    assert_eq!(setup.receive(), [long(9014)]);
    setup.close();
}

#[test]
fn too_large_mtu_is_refused() {
    let text = "virtio-user:x,mrg=off,mtu=9000,queue_size=4";
    let error = VirtioUserPort::open(&spec(text), pool(64)).unwrap_err().to_string();
    let expected = "mtu=9000: packets take 6 buffers of 1792 bytes, expected at most 4: use larger ones (--mbuf-size) or a \
                    larger queue_size";
    assert!(error.ends_with(expected), "{error}");
}

#[test]
fn negotiated_offloads_pass_both_ways() {
    let open = NetHeader {
        flags: VIRTIO_NET_HDR_F_NEEDS_CSUM,
        csum_start: 34,
        csum_offset: 16,
        ..Default::default()
    };
    let tcp = NetHeader { gso_type: VIRTIO_NET_HDR_GSO_TCPV4, gso_size: 1448, hdr_len: 54, ..open };
    let mut setup = Setup::new("");
    let udp = NetHeader { gso_type: VIRTIO_NET_HDR_GSO_UDP_L4, gso_size: 1200, csum_offset: 6, ..tcp };
    for (header, len) in [(open, 1000), (open, 9000), (tcp, 1700), (tcp, 65_000), (udp, 65_000)] {
        setup.to_us.send_merged(header, &long(len));
        assert_eq!(setup.receive_one(), (header, long(len)));
        assert!(setup.tx.accepts().segments && setup.tx.accepts().offloads.allows(&header));
        let mut burst = Burst::from_iter([setup.worker.packet_with(&header, &long(len))]);
        setup.worker.tx(&mut *setup.tx, &mut burst);
        assert!(burst.is_empty());
        let (sent, frame, _) = setup.from_us.receive_with();
        assert_eq!((sent, frame), (header, long(len)));
    }
    // A header that requests segmentation must have a partial checksum.
    setup.to_us.send_merged(NetHeader { flags: 0, ..tcp }, &long(9000));
    assert!(setup.receive().is_empty());
    assert_eq!(setup.rx_dropped(DropReason::Malformed), 1);
    setup.close();

    let mut setup = Setup::new(",offloads=off");
    assert_eq!(setup.tx.accepts().offloads, Default::default());
    let mut burst = Burst::from_iter([setup.worker.packet_with(&open, &long(100))]);
    setup.worker.tx(&mut *setup.tx, &mut burst);
    assert_eq!((burst.len(), setup.tx.counters().dropped(DropReason::Failed)), (0, 1));
    setup.to_us.send_merged(tcp, &long(9000));
    assert!(setup.receive().is_empty());
    setup.close();

    // The back end may not send unsegmented packets to a driver without mergeable buffers.
    let mut setup = Setup::new(",mrg=off");
    let features = setup.backend.as_ref().unwrap().device().status().features.unwrap();
    assert_eq!(features & (VIRTIO_NET_F_GUEST_CSUM | VIRTIO_NET_F_GUEST_TSO4), VIRTIO_NET_F_GUEST_CSUM);
    assert!(setup.tx.accepts().offloads.tso4);
    setup.still_receives();
    setup.close();
}

#[test]
fn broken_ring_leaves_others_running() {
    let mut setup = Setup::new("");
    // A chain that was not made available.
    setup.to_us.send(&frame(1));
    setup.to_us.queue.push_used(Chain::one(4000), 60);
    setup.to_us.queue.publish();
    assert_eq!(setup.receive(), [frame(1)], "what came before is good");
    let status = setup.port.status();
    assert!(status.contains("virtqueue 0 is broken: used element names chain 4000"), "{status}");
    assert!(setup.receive().is_empty());
    // The other virtqueue keeps working.
    assert_eq!(setup.send(&frames(3)), 0);
    assert_eq!(setup.from_us.receive(), frame(0));

    // A used index beyond the packets in flight: three elements for two packets.
    for _ in 0..3 {
        setup.from_us.queue.push_used(Chain::one(0), 0);
    }
    setup.from_us.queue.publish();
    assert_eq!(setup.send(&frames(1)), 0);
    assert_eq!(setup.tx.counters().dropped(DropReason::Down), 1);
    assert_eq!(setup.port.broken().len(), 2);
    assert!(setup.tx.stop(&mut setup.worker.ctx()), "nothing comes back from a broken ring");
    setup.close();
}

#[test]
fn a_chain_returned_twice_breaks_its_ring() {
    let mut setup = Setup::new("");
    assert_eq!(setup.send(&frames(2)), 0);
    let (chain, _) = setup.from_us.take();
    setup.from_us.queue.push_used(chain, 0);
    setup.from_us.queue.push_used(chain, 0);
    setup.from_us.queue.publish();
    setup.tx.poll(&mut setup.worker.ctx());
    assert_eq!(setup.port.broken().len(), 1);
    setup.close();
}

#[test]
fn empty_pool_loses_no_packet() {
    let mut setup = Setup::new("");
    let mut hoard: Vec<_> = std::iter::from_fn(|| setup.worker.cache.take()).collect();
    for n in 0..256 {
        setup.to_us.send(&frame(n));
    }
    // Received packets occupy packet buffers, so they are kept, too.
    for _ in 0..5 {
        let mut burst = Burst::new();
        setup.worker.rx(&mut *setup.rx, &mut burst);
        hoard.extend(burst);
    }
    assert_eq!(setup.rx.counters().packets(), 256);
    assert_eq!(setup.to_us.available(), 0, "there is nothing to fill the ring with");
    setup.worker.cache.free_all(hoard);
    assert!(setup.receive().is_empty());
    assert_eq!(setup.to_us.available(), 256);
    setup.still_receives();
    assert_eq!(setup.rx.counters().dropped_total(), 0);
    setup.close();
}

#[test]
fn back_end_reconnect_resumes_rings() {
    let mut setup = Setup::new("");
    assert_eq!(setup.send(&frames(10)), 0);
    setup.to_us.send(&frame(1));
    // The back end disconnects with packets in flight in both directions.
    setup.lose();
    let status = setup.port.status();
    assert!(status.contains("waiting for a back end"), "{status}");
    // The virtqueues stay as they are for the next back end.
    assert_eq!(setup.send(&[frame(20)]), 0);
    assert_eq!(setup.receive(), [frame(1)]);
    setup.resumed();
    for frame in frames(10).into_iter().chain([frame(20)]) {
        assert_eq!(setup.from_us.receive(), frame);
    }
    assert_eq!(setup.tx.counters().dropped_total(), 0);
    setup.still_receives();
    // A port may be closed while it waits.
    setup.lose();
    setup.close();
}

#[test]
fn new_back_end_resets_broken_ring() {
    let mut setup = Setup::new("");
    setup.to_us.queue.push_used(Chain::one(4000), 60);
    setup.to_us.queue.publish();
    assert!(setup.receive().is_empty());
    assert_eq!(setup.port.broken().len(), 1);
    setup.lose();
    assert!(setup.port.broken().is_empty());
    setup.comes_back();
}

#[test]
fn queues_may_outlive_their_port() {
    let mut setup = Setup::new("");
    assert_eq!(setup.send(&frames(10)), 0);
    let Setup { mut worker, port, mut rx, mut tx, chunks, .. } = setup;
    drop(port);
    let mut burst = Burst::from_iter([worker.packet(&frame(0))]);
    worker.tx(&mut *tx, &mut burst);
    assert_eq!(tx.counters().dropped(DropReason::Down), 1);
    worker.rx(&mut *rx, &mut burst);
    assert_eq!(worker.free_chunks(), chunks);
}

#[test]
fn drain_takes_nothing_new() {
    let mut setup = Setup::new("");
    for n in 0..100 {
        setup.to_us.send(&frame(n));
    }
    let available = setup.to_us.available();
    let mut received = Vec::new();
    for left in [36, 0, 0] {
        let mut burst = Burst::new();
        assert_eq!(setup.rx.drain(&mut setup.worker.ctx(), &mut burst), left);
        received.extend(burst.iter().map(|p| p.bytes().to_vec()));
        setup.worker.free(&mut burst);
    }
    assert_eq!(received, frames(100));
    assert_eq!(setup.to_us.available(), available, "no buffers are made available any more");
    setup.close();
}

#[test]
fn two_queue_pairs_carry_packets() {
    let dir = TempDir::new();
    let backend = start(&dir, None, 2);
    let pool = pool(2048);
    let mut worker = Worker::new(pool);
    let text = format!("virtio-user:{},queues=2,mac=02:00:00:00:00:07", dir.file("s").display());
    let mut port = VirtioUserPort::open(&spec(&text), pool).unwrap();
    until("the port is connected", || port.is_connected());
    assert_eq!((port.queues(), port.mac()), (2, MacAddr::local(7)));
    for queue in 0..2u16 {
        let mut rx = worker.rx_queue(&mut port, queue).unwrap();
        let mut tx = worker.tx_queue(&mut port, queue).unwrap();
        let mut burst = Burst::new();
        worker.rx(&mut *rx, &mut burst);
        Played::new(&backend, usize::from(queue) * 2).send(&frame(queue.into()));
        worker.rx(&mut *rx, &mut burst);
        assert_eq!(burst.len(), 1);
        assert_eq!(burst[0].bytes(), frame(queue.into()));
        worker.tx(&mut *tx, &mut burst);
        assert_eq!(Played::new(&backend, usize::from(queue) * 2 + 1).receive(), frame(queue.into()));
    }
    assert!(worker.rx_queue(&mut port, 0).is_err(), "a queue is given out once");
}

#[test]
fn back_end_may_be_late_or_client() {
    let dir = TempDir::new();
    let pool = pool(1024);
    let text = format!("virtio-user:{}", dir.file("s").display());
    let port = VirtioUserPort::open(&spec(&text), pool).unwrap();
    assert!(!port.is_connected());
    assert!(port.status().contains("waiting for a back end at"), "{}", port.status());
    let backend = start(&dir, None, 1);
    until("the port is connected", || port.is_connected());
    drop(port);
    drop(backend);

    let dir = TempDir::new();
    let text = format!("virtio-user:{},server", dir.file("s").display());
    let port = VirtioUserPort::open(&spec(&text), pool).unwrap();
    assert!(port.status().contains("waiting for a back end to connect to"), "{}", port.status());
    let config =
        BackendConfig { role: offcore_vhost::connection::Role::Client, ..BackendConfig::new(dir.file("s")) };
    let _backend = Backend::start(config, Box::new(())).unwrap();
    until("the port is connected", || port.is_connected());
}

#[test]
fn permanent_connect_failures_are_errors() {
    let dir = TempDir::new();
    let pool = pool(1024);
    let text = |options: &str| format!("virtio-user:{}{options}", dir.file("s").display());
    let error = |options: &str| VirtioUserPort::open(&spec(&text(options)), pool).unwrap_err().to_string();
    let _backend = start(&dir, Some(VIRTIO_NET_F_MRG_RXBUF), 1);
    let message = error(",queues=2");
    assert!(message.contains("does not offer NET_MQ") && message.contains("2 queue pairs need"), "{message}");
    let message = error(",server");
    assert!(message.contains("in use"), "{message}");
    std::fs::write(dir.file("file"), b"").unwrap();
    let text = format!("virtio-user:{},server", dir.file("file").display());
    let message = VirtioUserPort::open(&spec(&text), pool).unwrap_err().to_string();
    assert!(message.contains("not a socket"), "{message}");
}

//! Front ends that send invalid requests. The back end reports the error, changes nothing, and serves the next front
//! end.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use offcore_ring::device::DeviceQueue;
use offcore_ring::with_queue;
use offcore_vhost::backend::{ControlError, RingState};
use offcore_vhost::features;
use offcore_vhost::message::{Code, MAX_PAYLOAD, MemoryRegion, Reply, Request, VringAddr, VringFd};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use crate::peer::*;

#[test]
fn unparsable_header_closes_the_connection() {
    let dir = Dir::new();
    let backend = backend(&dir);
    let oversize = [2, 1, MAX_PAYLOAD as u32 + 1].map(u32::to_ne_bytes).concat();
    let huge = [5, 1, u32::MAX].map(u32::to_ne_bytes).concat();
    let version = [1, 2, 0].map(u32::to_ne_bytes).concat();
    let flags = [1, 0x101, 0].map(u32::to_ne_bytes).concat();
    for (bytes, why) in [
        (oversize, "SET_FEATURES: payload of 1033 bytes, expected at most 1032"),
        (huge, "SET_MEM_TABLE: payload of 4294967295 bytes"),
        (version, "GET_FEATURES: protocol version 2, expected 1"),
        (flags, "GET_FEATURES: flags 0x101"),
    ] {
        let mut peer = Peer::connect(&dir.file("vhost.sock"));
        peer.raw(&bytes, &[]);
        peer.closed();
        wait_for_error(backend.device(), why);
        assert_serves(&backend);
    }
}

#[test]
fn disconnect_inside_message_is_reported() {
    let dir = Dir::new();
    let backend = backend(&dir);
    let guest = Guest::new();
    let whole = bytes_of(guest.table());
    for cut in 1..whole.len() {
        let mut peer = Peer::connect(&dir.file("vhost.sock"));
        peer.raw(&whole[..cut], &[guest.fd.as_fd()]);
        drop(peer);
        let why = match cut {
            ..12 => format!("after {cut} of 12 bytes of a message's header"),
            _ => format!("after {} of 40 bytes of a message's payload", cut - 12),
        };
        wait_for_error(backend.device(), &why);
    }
    assert_serves(&backend);
}

#[test]
fn bad_lengths_and_codes_are_refused() {
    let (_dir, backend, _, mut peer) = negotiated();
    let need_reply = 1 | 8;
    for (code, payload, why) in [
        (2, 4, "SET_FEATURES: payload of 4 bytes, expected 8"),
        (2, 16, "SET_FEATURES: payload of 16 bytes, expected 8"),
        (3, 8, "SET_OWNER: payload of 8 bytes, expected 0"),
        (5, 0, "SET_MEM_TABLE: payload of 0 bytes"),
        (8, 12, "SET_VRING_NUM: payload of 12 bytes, expected 8"),
        (9, 48, "SET_VRING_ADDR: payload of 48 bytes, expected 40"),
        (12, 0, "SET_VRING_KICK: payload of 0 bytes, expected 8"),
        (7, 0, "SET_LOG_FD is not supported"),
        (20, 4, "NET_SET_MTU: payload of 4 bytes, expected 8"),
        (22, 40, "IOTLB_MSG is not supported"),
        (21, 8, "SET_BACKEND_REQ_FD: payload of 8 bytes, expected 0"),
        (34, 8, "RESET_DEVICE: payload of 8 bytes, expected 0"),
        (37, 32, "ADD_MEM_REG: payload of 32 bytes, expected 40"),
        (38, 48, "REM_MEM_REG: payload of 48 bytes, expected 40"),
        (39, 1, "SET_STATUS: payload of 1 bytes, expected 8"),
        (0, 0, "request 0 is not supported"),
        (4_000_000_000, MAX_PAYLOAD, "request 4000000000 is not supported"),
    ] {
        peer.message(code, need_reply, &vec![0; payload], &[]);
        let reply = peer.reply(Code(code)).unwrap();
        assert!(matches!(reply, Reply::Value(1)), "{why}");
        assert!(last_error(&backend.device().status()).contains(why), "{why}");
    }
    // Without need_reply, no answer is sent. The connection stays open, and the refusal is counted.
    let before = backend.device().status();
    peer.message(19, 1, &[0; 8], &[]);
    assert_eq!(peer.ask(Request::GetQueueNum), 1);
    let after = backend.device().status();
    assert_eq!((after.refused, after.messages), (before.refused + 1, before.messages + 2));
    assert!(last_error(&after).contains("SEND_RARP is not supported"));
    // A reply is not accepted as a request.
    peer.message(3, 1 | 4 | 8, &[], &[]);
    assert!(matches!(peer.reply(Code::SET_OWNER), Ok(Reply::Value(1))));
}

/// A front end that waits for a reply would wait forever.
#[test]
fn unanswerable_request_ends_connection() {
    let dir = Dir::new();
    let backend = backend(&dir);
    for (code, payload, why) in [
        (1, 8, "GET_FEATURES: payload of 8 bytes, expected 0"),
        (11, 4, "GET_VRING_BASE: payload of 4 bytes, expected 8"),
        (24, 12, "GET_CONFIG is not supported"),
        (31, 21, "GET_INFLIGHT_FD: payload of 21 bytes, expected 24"),
        (36, 8, "GET_MAX_MEM_SLOTS: payload of 8 bytes, expected 0"),
        (40, 1, "GET_STATUS: payload of 1 bytes, expected 0"),
        (44, 0, "GET_SHMEM_CONFIG is not supported"),
    ] {
        let mut peer = Peer::negotiated(&dir.file("vhost.sock"));
        peer.message(code, 1, &vec![0; payload], &[]);
        peer.closed();
        wait_for_error(backend.device(), why);
    }
    let mut peer = Peer::negotiated(&dir.file("vhost.sock"));
    peer.send(Request::GetVringBase(state(2, 0)));
    peer.closed();
    wait_for_error(backend.device(), "GET_VRING_BASE: virtqueue 2, expected one below 2");
    assert_serves(&backend);
}

#[test]
fn wrong_fd_counts_are_refused() {
    let (_dir, backend, guest, mut peer) = negotiated();
    let fds: Vec<OwnedFd> = (0..40).map(|_| eventfd()).collect();
    let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    let kick = |none: u64| (1u64 | none << 8).to_ne_bytes();
    let mut table = bytes_of(guest.table());
    let table = table.split_off(12);
    for (code, payload, count, why) in [
        (3, &[][..], 1, "SET_OWNER: 1 file descriptors, expected 0"),
        (2, &FEATURES.to_ne_bytes()[..], 32, "SET_FEATURES: 32 file descriptors, expected 0"),
        (12, &kick(0)[..], 0, "SET_VRING_KICK: 0 file descriptors, expected 1"),
        (12, &kick(0)[..], 2, "SET_VRING_KICK: 2 file descriptors, expected 1"),
        (13, &kick(1)[..], 1, "SET_VRING_CALL: 1 file descriptors, expected 0"),
        (5, &table[..], 0, "SET_MEM_TABLE: 0 file descriptors, expected 1"),
        (5, &table[..], 2, "SET_MEM_TABLE: 2 file descriptors, expected 1"),
        (37, &[0; 40][..], 0, "ADD_MEM_REG: 0 file descriptors, expected 1"),
        (37, &[0; 40][..], 2, "ADD_MEM_REG: 2 file descriptors, expected 1"),
        (38, &[0; 40][..], 2, "REM_MEM_REG: 2 file descriptors, expected 1"),
        (21, &[][..], 0, "SET_BACKEND_REQ_FD: 0 file descriptors, expected 1"),
        (21, &[][..], 2, "SET_BACKEND_REQ_FD: 2 file descriptors, expected 1"),
        (39, &[0; 8][..], 1, "SET_STATUS: 1 file descriptors, expected 0"),
    ] {
        peer.message(code, 1 | 8, payload, &fds[..count]);
        assert!(matches!(peer.reply(Code(code)), Ok(Reply::Value(1))), "{why}");
        let said = last_error(&backend.device().status());
        assert!(said.contains(why), "'{said}' does not say '{why}'");
    }
    assert_eq!(peer.ask(guest.table()), 0);
    peer.message(3, 1 | 8, &[], &fds);
    assert!(peer.reply(Code(3)).is_err());
    wait_for_error(backend.device(), "40 file descriptors came with one message, expected at most 32");
    assert_serves(&backend);
}

#[test]
fn legacy_and_unoffered_features_are_refused() {
    let (_dir, backend, _guest, mut peer) = connected();
    let legacy = features::VIRTIO_NET_F_MRG_RXBUF;
    refused(&backend, &mut peer, Request::SetFeatures(legacy), "VIRTIO_F_VERSION_1 (bit 32) is missing");
    let invented = FEATURES | 1 << 36;
    refused(&backend, &mut peer, Request::SetFeatures(invented), "0x1000000000 of them were not offered");
    refused(&backend, &mut peer, Request::SetProtocolFeatures(4), "0x4 of them were not offered");
    // Without negotiated features, no virtqueue starts.
    peer.start_ring(0);
    assert_eq!(backend.device().status().vrings[0].state, RingState::Stopped);
    assert_eq!(peer.ask(Request::SetFeatures(FEATURES)), 0);
    assert_eq!(backend.device().status().vrings[0].state, RingState::Disabled);
    let changed = FEATURES | features::VIRTIO_NET_F_MRG_RXBUF;
    refused(&backend, &mut peer, Request::SetFeatures(changed), "virtqueue 0 is running with");
    refused(&backend, &mut peer, Request::SetFeatures(0), "virtqueue 0 is running with");
    assert_eq!(backend.device().status().features, Some(FEATURES));
    assert_eq!(backend.device().status().vrings[0].state, RingState::Disabled);
}

#[test]
fn unknown_virtqueues_are_refused() {
    let (_dir, backend, _, mut peer) = negotiated();
    // The last two are equal to virtqueue 0 or 1 when truncated.
    for index in [2, 255, 256, 65536, 0x8000_0001, u32::MAX] {
        let why = format!("virtqueue {index}, expected one below 2");
        refused(&backend, &mut peer, Request::SetVringNum(state(index, 256)), &why);
        refused(&backend, &mut peer, Request::SetVringBase(state(index, 0)), &why);
        refused(&backend, &mut peer, Request::SetVringEnable(state(index, 1)), &why);
        refused(&backend, &mut peer, Request::SetVringAddr(VringAddr { index, ..addresses(0) }), &why);
    }
    let fd = eventfd();
    for request in [Request::SetVringKick, Request::SetVringCall, Request::SetVringErr] {
        let event = VringFd { index: 255, fd: Some(fd.as_fd()) };
        refused(&backend, &mut peer, request(event), "virtqueue 255, expected one below 2");
    }
    peer.message(12, 1 | 8, &0x1_0000_0100u64.to_ne_bytes(), &[]);
    assert!(matches!(peer.reply(Code::SET_VRING_KICK), Ok(Reply::Value(1))));
    wait_for_error(backend.device(), "SET_VRING_KICK: payload 0x100000100");
}

#[test]
fn out_of_range_vring_values_are_refused() {
    let (_dir, backend, _, mut peer) = negotiated();
    for size in [0, 3, 255, 257, 65536, 0x10100, u32::MAX] {
        let why = format!("virtqueue 0 of {size}, expected a power of two from 1 to 32768");
        refused(&backend, &mut peer, Request::SetVringNum(state(0, size)), &why);
    }
    refused(&backend, &mut peer, Request::SetVringBase(state(0, 65536)), "at 65536, expected at most 65535");
    refused(&backend, &mut peer, Request::SetVringEnable(state(0, 2)), "state 2, expected 0 or 1");
    let flags = VringAddr { flags: 2, ..addresses(0) };
    refused(&backend, &mut peer, Request::SetVringAddr(flags), "flags 0x2, expected 0 or 1");
}

#[test]
fn ring_parts_are_inside_and_aligned() {
    let (dir, backend, guest, mut peer) = connected();
    assert_eq!(peer.ask(Request::SetVringNum(state(0, 256))), 0);
    let (begin, good) = (Guest::USER, addresses(0));
    let end = begin + guest.mapping.len() as u64;
    for (addr, why) in [
        (VringAddr { desc: end - 4095, ..good }, "descriptor table"),
        (VringAddr { desc: begin - 16, ..good }, "descriptor table"),
        (VringAddr { desc: u64::MAX - 15, ..good }, "descriptor table"),
        (VringAddr { desc: 0, ..good }, "descriptor table"),
        (VringAddr { desc: Guest::PHYSICAL, ..good }, "descriptor table"),
        (VringAddr { avail: end - 516, ..good }, "available ring"),
        (VringAddr { used: end - 2052, ..good }, "used ring"),
        (VringAddr { desc: begin + 8, ..good }, "descriptor table"),
        (VringAddr { avail: begin + 1, ..good }, "available ring"),
        (VringAddr { used: begin + 2, ..good }, "used ring"),
    ] {
        refused(&backend, &mut peer, Request::SetVringAddr(addr), why);
    }
    assert_eq!(peer.ask(Request::SetVringAddr(good)), 0);

    // Addresses sent before the memory are checked when the ring starts, and are then discarded.
    let mut peer = {
        drop(peer);
        Peer::negotiated(&dir.file("vhost.sock"))
    };
    let kick = Request::SetVringKick(VringFd { index: 0, fd: None });
    assert_eq!(peer.ask(Request::SetVringNum(state(0, 256))), 0);
    assert_eq!(peer.ask(Request::SetVringBase(state(0, 0))), 0);
    assert_eq!(peer.ask(Request::SetVringAddr(VringAddr { used: end, ..good })), 0);
    assert_eq!(peer.ask(guest.table()), 0);
    refused(&backend, &mut peer, kick, "virtqueue 0: used ring");
    assert_eq!(peer.ask(Request::SetOwner), 0, "said once, not for ever");
    assert_eq!(peer.ask(Request::SetVringAddr(good)), 0);
    assert_eq!(backend.device().status().vrings[0].state, RingState::Disabled);
}

#[test]
fn running_virtqueue_is_not_changed() {
    let (_dir, backend, guest, mut peer) = connected();
    peer.start_ring(0);
    let before = backend.cells()[0].wanted().vring.unwrap();
    let running = "virtqueue 0 is running; stop it by GET_VRING_BASE first";
    refused(&backend, &mut peer, Request::SetVringNum(state(0, 128)), running);
    refused(&backend, &mut peer, Request::SetVringBase(state(0, 1)), running);
    let elsewhere = VringAddr { index: 0, ..addresses(1) };
    refused(&backend, &mut peer, Request::SetVringAddr(elsewhere), running);
    // A memory table that does not contain a running virtqueue is refused completely, and the old one stays in use.
    let moved = MemoryRegion { user: Guest::USER + (1 << 40), ..guest.region() };
    let table = Request::SetMemTable(vec![(moved, guest.fd.as_fd())]);
    refused(&backend, &mut peer, table, "virtqueue 0: descriptor table");
    let after = backend.cells()[0].wanted().vring.unwrap();
    assert!(std::sync::Arc::ptr_eq(&before, &after));
}

#[test]
fn invalid_memory_tables_are_refused() {
    let (_dir, backend, guest, mut peer) = negotiated();
    let good = guest.region();
    let region = |guest, size, user, mmap_offset| MemoryRegion { guest, size, user, mmap_offset };
    let mut table = |regions: &[MemoryRegion], why: &str| {
        let table = regions.iter().map(|region| (*region, guest.fd.as_fd())).collect();
        refused(&backend, &mut peer, Request::SetMemTable(table), why);
    };
    let len = good.size;
    table(&[region(0, 0, 0, 0)], "is empty or wraps around");
    table(&[region(u64::MAX - 4095, 8192, 0, 0)], "is empty or wraps around");
    table(&[region(0, 8192, u64::MAX - 4095, 0)], "is empty or wraps around");
    table(&[region(0, 8192, 0, u64::MAX - 4095)], "is empty or wraps around");
    table(&[region(0, u64::MAX, 0, 4096)], "is empty or wraps around");
    table(&[region(0, len + 1, 0, 0)], "needs a longer file");
    table(&[region(0, len, 0, 4096)], "needs a longer file");
    table(&[region(0, 1 << 62, 0, 0)], "MiB of guest memory, expected at most");
    table(&[good, region(good.guest + len - 1, 4096, 0, 0)], "overlap");
    table(&[good, good], "overlap");
    // Files that are not memory.
    let (reader, _writer) = std::io::pipe().unwrap();
    for fd in [reader.into(), eventfd()] {
        let request = Request::SetMemTable(vec![(region(0, 4096, 0, 0), fd.as_fd())]);
        refused(&backend, &mut peer, request, "SET_MEM_TABLE: region 0x0");
    }
    assert_eq!(backend.device().status().regions, 0);
    assert_eq!(peer.ask(guest.table()), 0);
    assert_eq!(backend.device().status().regions, 1);
}

/// Workers write to these descriptors or read from them. A full pipe, or a file on a slow server, would block them.
#[test]
fn only_eventfds_are_accepted() {
    let (_dir, backend, _, mut peer) = negotiated();
    let (_reader, writer) = std::io::pipe().unwrap();
    let writer: OwnedFd = writer.into();
    for request in [Request::SetVringKick, Request::SetVringCall, Request::SetVringErr] {
        let event = VringFd { index: 0, fd: Some(writer.as_fd()) };
        refused(&backend, &mut peer, request(event), "expected an eventfd");
    }
}

/// A message without descriptors that needs no reply.
const SET_OWNER: u32 = 3;

/// A TCP socket whose last close takes a minute.
fn lingering() -> (std::net::TcpStream, OwnedFd) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut sender = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (receiver, _) = listener.accept().unwrap();
    sender.set_nonblocking(true).unwrap();
    while std::io::Write::write(&mut sender, &[0; 1 << 16]).is_ok() {}
    let linger = libc::linger { l_onoff: 1, l_linger: 60 };
    nix::sys::socket::setsockopt(&sender, nix::sys::socket::sockopt::Linger, &linger).unwrap();
    (receiver, sender.into())
}

/// Closes the other side's copy on another thread. The last close blocks.
fn close_elsewhere(what: impl Send + 'static) {
    std::thread::spawn(move || drop(what));
}

/// The socket is passed directly, and inside another socket.
#[test]
fn slow_close_does_not_block() {
    let (_dir, backend, guest, mut peer) = negotiated();
    let begin = Instant::now();
    let mut receivers = Vec::new();
    let mut wrapped = || {
        let (receiver, socket) = lingering();
        receivers.push(receiver);
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        Peer::over(ours.into()).raw(b"x", &[socket.as_fd()]);
        (OwnedFd::from(theirs), lingering())
    };
    let (carrier, (receiver, socket)) = wrapped();
    for fd in [&carrier, &socket] {
        peer.message(SET_OWNER, 1, &[], &[fd.as_fd()]);
    }
    close_elsewhere((carrier, socket));
    // Both requests have been refused.
    peer.ask(Request::GetFeatures);
    let (carrier, (other_receiver, socket)) = wrapped();
    for fd in [&carrier, &socket] {
        let event = VringFd { index: 0, fd: Some(fd.as_fd()) };
        refused(&backend, &mut peer, Request::SetVringKick(event), "expected an eventfd");
    }
    refused(&backend, &mut peer, Request::SetBackendReqFd(socket.as_fd()), "not a Unix socket");
    peer.send(Request::SetBackendReqFd(carrier.as_fd()));
    close_elsewhere((carrier, socket));
    assert_eq!(peer.ask(guest.table()), 0);
    // In messages that are read after all other copies are closed, or are not read at all.
    let mut next = Peer::connect(backend.device().path());
    let (receiver_of_next, socket) = lingering();
    next.message(SET_OWNER, 1, &[], &[socket.as_fd()]);
    drop(socket);
    let (receiver_of_last, socket) = lingering();
    peer.raw(&[1], &[socket.as_fd()]);
    drop(peer);
    close_elsewhere(socket);
    next.send(Request::GetFeatures);
    assert!(next.reply(Code::GET_FEATURES).is_ok());
    drop(next);
    assert_serves(&backend);
    backend.stop();
    assert!(begin.elapsed() < Duration::from_secs(60));
    drop((receiver, other_receiver, receiver_of_next, receiver_of_last));
}

/// A front end with many of them is no longer served.
#[test]
fn unclosed_descriptors_are_limited() {
    let (dir, backend, _guest, first) = negotiated();
    // It is read after all other copies are closed.
    let mut peer = Peer::connect(&dir.file("vhost.sock"));
    let (receiver, socket) = lingering();
    peer.message(SET_OWNER, 1, &[], &[socket.as_fd()]);
    drop((socket, first));
    let (reader, _writer) = std::io::pipe().unwrap();
    for _ in 0..100 {
        if !peer.is_alive() {
            break;
        }
        peer.try_raw(&[SET_OWNER, 1, 0].map(u32::to_ne_bytes).concat(), &[reader.as_fd()]);
    }
    peer.closed();
    wait_for_error(backend.device(), "file descriptors of this port's front ends are still being closed");
    drop(receiver);
    assert_serves(&backend);
}

#[test]
fn memory_that_vanishes_ends_the_connection() {
    let dir = Dir::new();
    let backend = backend(&dir);
    let fd = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, 1 << 20).unwrap();
    let mut peer = Peer::negotiated(&dir.file("vhost.sock"));
    let region = MemoryRegion { guest: 0, size: 1 << 20, user: Guest::USER, mmap_offset: 0 };
    assert_eq!(peer.ask(Request::SetMemTable(vec![(region, fd.as_fd())])), 0);
    peer.start_ring(0);
    let vring = backend.cells()[0].wanted().vring.unwrap();
    rustix::fs::ftruncate(&fd, 4096).unwrap();
    assert!(peer.is_alive(), "it has not been checked yet");
    // A worker reads the ring.
    let mut queue = offcore_ring::device::RingDevice::new(vring.layout.clone(), 0, false, false).unwrap();
    assert_eq!(with_queue!(&mut queue, queue => queue.look(1)), Ok(0));
    peer.closed();
    wait_for_error(backend.device(), "guest memory has vanished");
    let error = backend.device().status().last_error.unwrap();
    assert!(matches!(*error, ControlError::Vanished));
    until("stopped", || backend.cells()[0].wanted().vring.is_none());
    assert_serves(&backend);
}

#[test]
fn messages_are_rate_limited() {
    let (_dir, backend, _guest, mut peer) = negotiated();
    let start = Instant::now();
    // The front end does not wait for replies, because this would also slow it down.
    let hundred = [SET_OWNER, 1, 0].map(u32::to_ne_bytes).concat().repeat(100);
    (0..92).for_each(|_| peer.raw(&hundred, &[]));
    peer.ask(Request::GetFeatures);
    // The limits are 4096 at once and 10,000 per second. Without them, this would take about 50 ms.
    assert!(start.elapsed() >= Duration::from_millis(480), "{:?}", start.elapsed());
    drop(peer);
    assert_serves(&backend);
}

#[test]
fn connections_are_rate_limited() {
    let (_dir, backend, _guest, peer) = negotiated();
    drop(peer);
    let start = Instant::now();
    (0..100).for_each(|_| drop(Peer::negotiated(backend.device().path())));
    // The limits are 64 at once and 100 per second.
    assert!(start.elapsed() >= Duration::from_millis(300), "{:?}", start.elapsed());
    assert_serves(&backend);
}

/// Messages of any kind with arbitrary content, in any order. The back end does not crash, and works afterwards.
#[test]
fn arbitrary_messages_do_no_harm() {
    let dir = Dir::new();
    let backend = backend(&dir);
    let guest = Guest::new();
    let small = || prop_oneof![0u32..4, any::<u32>()];
    let payload = prop_oneof![
        prop::collection::vec(any::<u8>(), 0..64),
        (small(), prop_oneof![Just(256u32), small()])
            .prop_map(|(a, b)| [a.to_ne_bytes(), b.to_ne_bytes()].concat()),
        (0u32..3, 0u64..4).prop_map(|(index, page)| {
            let at = Guest::USER + page * 0x1_0000;
            let words = [u64::from(index), at, at + 0x8000, at + 0x4000, 0];
            words.map(u64::to_ne_bytes).concat()
        }),
        (1u64..3, 0u64..3).prop_map(|(count, shift)| {
            let mut words = vec![count];
            for i in 0..count {
                let at = i << 18;
                words.extend([Guest::PHYSICAL + at, 1 << 18, Guest::USER + at, shift << 12]);
            }
            words.into_iter().flat_map(u64::to_ne_bytes).collect()
        }),
        Just((FEATURES).to_ne_bytes().to_vec()),
        Just((FEATURES | features::OFFERED).to_ne_bytes().to_vec()),
        Just(features::PROTOCOL_OFFERED.to_ne_bytes().to_vec()),
        prop_oneof![Just(0u64), 0u64..256].prop_map(|status| status.to_ne_bytes().to_vec()),
        (0u64..4, prop_oneof![Just(1u64 << 20), Just(1 << 18)]).prop_map(|(i, size)| {
            let at = i << 18;
            let words = [0, Guest::PHYSICAL + at, size, Guest::USER + at, at];
            words.map(u64::to_ne_bytes).concat()
        }),
        Just(Vec::new()),
    ];
    let message = (prop_oneof![0u32..20, 20u32..45, any::<u32>()], any::<bool>(), payload, 0usize..4);
    let mut runner = TestRunner::new(Config { cases: 300, ..Config::default() });
    runner
        .run(&prop::collection::vec(message, 1..60), |messages| {
            let mut peer = Peer::negotiated(&dir.file("vhost.sock"));
            peer.start_ring(0);
            for (code, need_reply, payload, fds) in messages {
                let fds = vec![guest.fd.as_fd(); fds];
                let mut bytes = Vec::new();
                for word in [code, 1 | u32::from(need_reply) << 3, payload.len() as u32] {
                    bytes.extend(word.to_ne_bytes());
                }
                bytes.extend(payload);
                if !peer.try_raw(&bytes, &fds) {
                    break;
                }
            }
            Ok(())
        })
        .unwrap();
    assert_serves(&backend);
}

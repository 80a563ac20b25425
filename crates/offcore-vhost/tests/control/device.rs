//! Device-wide requests of front ends: status, MTU, a socket for requests by the back end, and resets.

use std::os::fd::{AsFd, OwnedFd};

use offcore_vhost::backend::{RingState, StartError};
use offcore_vhost::features::{self, STATUS_FEATURES_OK};
use offcore_vhost::message::Request;
use offcore_vhost::{Backend, BackendConfig};

use crate::peer::*;

fn jumbo_backend(dir: &Dir) -> Backend {
    start(BackendConfig { max_mtu: 9000, ..BackendConfig::new(dir.file("vhost.sock")) })
}

#[test]
fn device_status_is_kept() {
    let dir = Dir::new();
    let backend = jumbo_backend(&dir);
    let mut peer = Peer::connect(&dir.file("vhost.sock"));
    assert_eq!(peer.ask(Request::GetStatus), 0);
    peer.send(Request::SetProtocolFeatures(features::PROTOCOL_OFFERED));
    // The same sequence as DPDK's virtio-user and QEMU.
    for status in [0, 1, 3] {
        assert_eq!(peer.ask(Request::SetStatus(status)), 0);
        assert_eq!(peer.ask(Request::GetStatus), status);
    }
    assert_eq!(peer.ask(Request::SetFeatures(features::VIRTIO_NET_F_MRG_RXBUF)), 1, "legacy");
    assert_eq!(peer.ask(Request::SetStatus(0xb)), 0);
    assert_eq!(peer.ask(Request::GetStatus), 3, "not with these features");
    assert_eq!(peer.ask(Request::SetFeatures(FEATURES)), 0);
    assert_eq!(peer.ask(Request::SetStatus(0xf)), 0);
    assert_eq!(peer.ask(Request::GetStatus), 0xf);
    assert_eq!(peer.ask(Request::SetFeatures(FEATURES)), 0, "the same again");
    assert_eq!(peer.ask(Request::GetStatus), 0xf);
    assert_eq!(peer.ask(Request::SetFeatures(FEATURES | 1 << 63)), 1);
    assert_eq!(peer.ask(Request::GetStatus), u64::from(0xf & !STATUS_FEATURES_OK));
    assert_eq!(peer.ask(Request::SetFeatures(FEATURES)), 0);
    assert_eq!(peer.ask(Request::SetStatus(0x8f)), 0, "a driver that has given up says so");
    for garbage in [0x100, 0x1_0000_0000, u64::MAX] {
        refused(&backend, &mut peer, Request::SetStatus(garbage), "expected one byte");
    }
    assert_eq!(peer.ask(Request::GetStatus), 0x8f);
    let line = backend.device().status().to_string();
    assert!(line.contains(", split rings, features 0x140000000, virtio status 0x8f"), "{line}");
}

#[test]
fn mtu_is_bounded_and_shown() {
    let dir = Dir::new();
    let backend = jumbo_backend(&dir);
    let mut peer = Peer::negotiated(&dir.file("vhost.sock"));
    for mtu in [0, 67, 9001, 65536, u64::MAX] {
        let why = format!("NET_SET_MTU: {mtu} bytes, expected 68 to 9000");
        refused(&backend, &mut peer, Request::NetSetMtu(mtu), &why);
    }
    assert_eq!(backend.device().status().mtu, None);
    for mtu in [68, 1500, 9000] {
        assert_eq!(peer.ask(Request::NetSetMtu(mtu.into())), 0);
        assert_eq!(backend.device().status().mtu, Some(mtu));
    }
    let line = backend.device().status().to_string();
    assert!(line.contains(", MTU 9000"), "{line}");
    drop(peer);
    until("forgotten", || backend.device().status().mtu.is_none());
    let config = BackendConfig { max_mtu: 67, ..BackendConfig::new(dir.file("vhost.sock")) };
    let error = Backend::start(config, Box::new(())).unwrap_err();
    assert!(matches!(error, StartError::Mtu { found: 67 }), "{error}");
}

#[test]
fn backend_request_socket_is_kept_open() {
    let dir = Dir::new();
    let backend = jumbo_backend(&dir);
    let mut peer = Peer::negotiated(&dir.file("vhost.sock"));
    let pair = || std::os::unix::net::UnixStream::pair().unwrap();
    let closed = |theirs: &std::os::unix::net::UnixStream| {
        theirs.set_nonblocking(true).unwrap();
        !std::io::Read::read(&mut &*theirs, &mut [0])
            .is_err_and(|e| e.kind() == std::io::ErrorKind::WouldBlock)
    };
    let (_reader, writer) = std::io::pipe().unwrap();
    let writer: OwnedFd = writer.into();
    for fd in [&writer, &eventfd()] {
        refused(&backend, &mut peer, Request::SetBackendReqFd(fd.as_fd()), "is not a Unix socket");
    }
    assert!(!backend.device().status().back_channel);
    let (first, ours) = pair();
    assert_eq!(peer.ask(Request::SetBackendReqFd(ours.as_fd())), 0);
    drop(ours);
    assert!(!closed(&first) && backend.device().status().back_channel);
    let (second, ours) = pair();
    assert_eq!(peer.ask(Request::SetBackendReqFd(ours.as_fd())), 0);
    drop(ours);
    until("the second one replaces it", || closed(&first));
    assert_eq!(peer.ask(Request::ResetDevice), 0);
    assert!(!closed(&second) && backend.device().status().back_channel, "it belongs to the connection");
    drop(peer);
    until("closed with the connection", || closed(&second));
}

#[test]
fn unnegotiated_requests_are_refused() {
    let dir = Dir::new();
    let backend = jumbo_backend(&dir);
    let guest = Guest::new();
    let mut peer = Peer::negotiated(&dir.file("vhost.sock"));
    assert_eq!(peer.ask(guest.table()), 0);
    peer.send(Request::SetProtocolFeatures(features::VHOST_USER_PROTOCOL_F_REPLY_ACK));
    let (_theirs, ours) = std::os::unix::net::UnixStream::pair().unwrap();
    for (request, why) in [
        (Request::NetSetMtu(1500), "NET_SET_MTU: protocol feature NET_MTU (bit 4) was not"),
        (
            Request::SetBackendReqFd(ours.as_fd()),
            "SET_BACKEND_REQ_FD: protocol feature BACKEND_REQ (bit 5) was not",
        ),
        (Request::ResetDevice, "RESET_DEVICE: protocol feature RESET_DEVICE (bit 13) was not"),
        (
            Request::AddMemReg(guest.region(), guest.fd.as_fd()),
            "ADD_MEM_REG: protocol feature CONFIGURE_MEM_SLOTS (bit 15) was not",
        ),
        (
            Request::RemMemReg(guest.region(), None),
            "REM_MEM_REG: protocol feature CONFIGURE_MEM_SLOTS (bit 15) was not",
        ),
        (Request::SetStatus(0), "SET_STATUS: protocol feature STATUS (bit 16) was not"),
    ] {
        refused(&backend, &mut peer, request, why);
    }
    let status = backend.device().status();
    assert_eq!((status.features, status.regions, status.mtu), (Some(FEATURES), 1, None));
    // Requests that only read state are answered, because their front ends wait.
    assert_eq!(peer.ask(Request::GetMaxMemSlots), 64);
    assert_eq!(peer.ask(Request::GetStatus), 0);
}

#[test]
fn reset_device_clears_all_state() {
    let dir = Dir::new();
    let backend = jumbo_backend(&dir);
    let guest = Guest::new();
    let mut peer = Peer::with_memory(&dir.file("vhost.sock"), &guest);
    for reset in [Request::ResetDevice, Request::SetStatus(0)] {
        for _ in 0..3 {
            assert_eq!(peer.ask(Request::SetFeatures(FEATURES)), 0);
            assert_eq!(peer.ask(Request::SetStatus(0xf)), 0);
            assert_eq!(peer.ask(Request::NetSetMtu(1500)), 0);
            peer.start_pair();
            assert_eq!(peer.ask(reset.clone()), 0);
            let status = backend.device().status();
            assert_eq!((status.features, status.virtio_status, status.mtu), (None, 0, None));
            for (vring, cell) in status.vrings.iter().zip(backend.cells()) {
                assert_eq!((vring.state, vring.size, vring.kicks), (RingState::Stopped, 0, false));
                assert!(cell.wanted().vring.is_none());
            }
            assert_eq!((status.connects, status.regions), (1, 1));
        }
    }
    // A front end may describe its memory again, but does not have to.
    assert_eq!(peer.ask(Request::AddMemReg(guest.region(), guest.fd.as_fd())), 0);
    assert_eq!(peer.ask(guest.table()), 0);
    assert_eq!(backend.device().status().refused, 0);
}

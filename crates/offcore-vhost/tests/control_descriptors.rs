//! No message leaks a file descriptor, however often it is sent and whatever is passed with it. This is a separate test
//! program, because it counts the descriptors of the whole process.
#![allow(clippy::unwrap_used, reason = "a test that finds something else fails")]

#[path = "control/peer.rs"]
#[allow(dead_code, reason = "the other test program uses more of it")]
mod peer;

use std::os::fd::{AsFd, BorrowedFd};

use offcore_vhost::message::{Code, InflightArea, MemoryRegion, Reply, Request, VringFd};
use offcore_vhost::{Backend, BackendConfig, FrontEnd, FrontEndConfig};
use rustix::process::{Resource, Rlimit};

use peer::*;

fn open() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn mappings() -> usize {
    std::fs::read_to_string("/proc/self/maps").unwrap().lines().count()
}

/// Calls `round` a thousand times. Afterwards, not more descriptors and mappings may exist than after the first few
/// calls.
fn a_thousand(what: &str, mut round: impl FnMut(usize)) {
    (0..10).for_each(&mut round);
    let before = (open(), mappings());
    (0..1000).for_each(&mut round);
    let mut after = (0, 0);
    // The connection that was closed last may still be shutting down.
    until(&format!("{what}: before {before:?}"), || {
        after = (open(), mappings());
        after.0 <= before.0 && after.1 <= before.1 + 4
    });
}

/// If the process cannot open all descriptors of a message, the others are lost and the message is refused.
fn a_full_process(backend: &Backend) {
    let mut peer = Peer::negotiated(backend.device().path());
    let fds: Vec<_> = (0..8).map(|_| eventfd()).collect();
    let borrowed: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    let before = rustix::process::getrlimit(Resource::Nofile);
    let full = Rlimit { current: Some(open() as u64 + 64), ..before };
    rustix::process::setrlimit(Resource::Nofile, full).unwrap();
    let mut filling: Vec<_> = std::iter::from_fn(|| fds[0].try_clone().ok()).collect();
    filling.truncate(filling.len() - 3);
    peer.message(5, 1 | 8, &[0; 8], &borrowed);
    assert!(peer.reply(Code::SET_MEM_TABLE).is_ok());
    rustix::process::setrlimit(Resource::Nofile, before).unwrap();
    let said = last_error(&backend.device().status());
    assert!(said.starts_with("SET_MEM_TABLE: file descriptors were lost"), "{said}");
}

/// CVE-2020-10726: each request leaked a descriptor and a mapping.
fn regions_in_flight(dir: &Dir) {
    let asked = InflightArea { size: 0, offset: 0, queues: 2, queue_size: 256 };
    let mut peer = None;
    a_thousand("regions for what is in flight", |round| {
        if round % 8 == 0 {
            // Connections are used one after the other.
            drop(peer.take());
        }
        let peer = peer.get_or_insert_with(|| Peer::negotiated(&dir.file("vhost.sock")));
        peer.send(Request::GetInflightFd(asked));
        let Ok(Reply::Inflight(area, fd)) = peer.reply(Code::GET_INFLIGHT_FD) else { panic!("no region") };
        assert_eq!(peer.ask(Request::SetInflightFd(area, fd.as_fd())), 0);
        assert_eq!(peer.ask(Request::SetInflightFd(InflightArea { offset: 4, ..area }, fd.as_fd())), 1);
    });
}

#[test]
fn requests_leak_no_descriptors() {
    let dir = Dir::new();
    let backend = Backend::start(BackendConfig::new(dir.file("vhost.sock")), Box::new(())).unwrap();
    let guest = Guest::new();

    let mut peer = Peer::with_memory(&dir.file("vhost.sock"), &guest);
    peer.start_pair();
    a_thousand("memory tables", |_| assert_eq!(peer.ask(guest.table()), 0));

    a_thousand("eventfds", |round| {
        let fd = eventfd();
        for request in [Request::SetVringKick, Request::SetVringCall, Request::SetVringErr] {
            let event = VringFd { index: (round % 2) as u8, fd: Some(fd.as_fd()) };
            assert_eq!(peer.ask(request(event)), 0);
        }
    });

    let region = MemoryRegion { guest: 1 << 33, user: 1 << 43, ..guest.region() };
    a_thousand("memory regions", |round| {
        assert_eq!(peer.ask(Request::AddMemReg(region, guest.fd.as_fd())), 0);
        assert_eq!(peer.ask(Request::AddMemReg(region, guest.fd.as_fd())), 0, "mapped again");
        let needless = (round % 2 == 0).then(|| guest.fd.as_fd());
        assert_eq!(peer.ask(Request::RemMemReg(region, needless)), 0);
        assert_eq!(peer.ask(Request::RemMemReg(region, needless)), 1);
    });

    let (ours, _theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    a_thousand("sockets for requests, and resets", |_| {
        assert_eq!(peer.ask(Request::SetBackendReqFd(ours.as_fd())), 0);
        assert_eq!(peer.ask(Request::SetBackendReqFd(guest.fd.as_fd())), 1);
        assert_eq!(peer.ask(Request::ResetDevice), 0);
        assert_eq!(peer.ask(Request::SetFeatures(FEATURES)), 0);
        peer.start_pair();
    });

    drop(peer);
    regions_in_flight(&dir);

    let mut peer = Peer::negotiated(&dir.file("vhost.sock"));
    let fds: Vec<_> = (0..40).map(|_| eventfd()).collect();
    let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    a_thousand("refused messages", |round| {
        // Too many descriptors for the message, an unknown message, or a wrong length.
        let refused = [
            (3, 0, 1),
            (12, 8, 3),
            (77, 100, 32),
            (5, 8, 32),
            (5, 40, 5),
            (37, 40, 2),
            (38, 40, 3),
            (21, 8, 1),
            (32, 24, 2),
            (32, 21, 1),
        ];
        let (code, size, count) = refused[round % refused.len()];
        peer.message(code, 1 | 8, &vec![0; size], &fds[..count]);
        assert!(peer.reply(Code(code)).is_ok());
    });
    drop(peer);

    a_thousand("connections that end in a message", |round| {
        let mut peer = Peer::connect(&dir.file("vhost.sock"));
        let bytes = bytes_of(guest.table());
        // With more descriptors than any message has, the connection is closed.
        let count = if round % 2 == 0 { 8 } else { 40 };
        peer.raw(&bytes[..1 + round % (bytes.len() - 1)], &fds[..count]);
    });

    a_thousand("front ends", |_| {
        let mut front_end = FrontEnd::connect(&FrontEndConfig::new(dir.file("vhost.sock")), &[]).unwrap();
        front_end.start().unwrap();
    });

    let before = open();
    a_full_process(&backend);
    until("closed", || open() <= before);
    assert_serves(&backend);
}

//! Bad input to the running binary: front ends that break the protocol, sockets that are in use, a pool that is
//! exhausted.
//!
//! The device's own tests check the effect of each invalid message on the device. These tests check the user's view:
//! the log names the error, other ports are not affected, and the next correct front end is served.

use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;

use peers::offcore::Signal;
use peers::{Need, Offcore, TempDir, exclusive};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use crate::switch::{self, Copies, Report};

const GET_FEATURES: u32 = 1;
const SET_FEATURES: u32 = 2;
const SET_MEM_TABLE: u32 = 5;
const SET_VRING_NUM: u32 = 8;
const SET_VRING_ADDR: u32 = 9;
const SET_VRING_CALL: u32 = 13;
const SET_VRING_ENABLE: u32 = 18;
/// Protocol version 1, without flags.
const VERSION: u32 = 1;

/// A connection whose other end may behave in any way.
struct Peer(UnixStream);

impl Peer {
    /// Connects. The switch serves one front end at a time, so a reply may be delayed until the previous front end is
    /// gone.
    fn connect(socket: &Path) -> Self {
        let stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        Self(stream)
    }

    fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(fds.len()))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        }
        let sent = rustix::net::sendmsg(&self.0, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL);
        assert_eq!(sent.unwrap(), bytes.len());
    }

    /// Requests the features. Returns `None` if the connection has ended instead.
    fn features(&mut self) -> Option<u64> {
        self.send(&message(GET_FEATURES, VERSION, &[]), &[]);
        let mut reply = [0; 20];
        self.0.read_exact(&mut reply).ok()?;
        assert_eq!(reply[..4], GET_FEATURES.to_ne_bytes());
        Some(u64::from_ne_bytes(reply[12..].try_into().unwrap()))
    }

    /// Waits until the other side has closed the connection.
    fn assert_closed(&mut self, what: &str) {
        // The connection is reset if the other side had not read everything.
        let end = self.0.read(&mut [0; 64]);
        let reset = end.as_ref().is_err_and(|e| e.kind() == std::io::ErrorKind::ConnectionReset);
        assert!(reset || matches!(end, Ok(0)), "{what}: the connection continues: {end:?}");
    }
}

/// Returns a message whose header has the correct length.
fn message(code: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    let size = u32::try_from(payload.len()).unwrap();
    [&header(code, flags, size)[..], payload].concat()
}

fn header(code: u32, flags: u32, size: u32) -> Vec<u8> {
    [code, flags, size].into_iter().flat_map(u32::to_ne_bytes).collect()
}

fn words<const N: usize>(words: [u64; N]) -> Vec<u8> {
    words.into_iter().flat_map(u64::to_ne_bytes).collect()
}

fn null() -> OwnedFd {
    std::fs::File::open("/dev/null").unwrap().into()
}

/// The consequence of an invalid message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Then {
    /// The message is refused, and the connection stays open.
    Refused,
    /// The connection is closed.
    Closed,
}

/// A message that the protocol does not allow: name, bytes, number of file descriptors, consequence, and log message.
type Bad = (&'static str, Vec<u8>, usize, Then, &'static str);

fn bad_messages() -> Vec<Bad> {
    use Then::{Closed, Refused};
    let plain = |request, payload: &[u8]| message(request, VERSION, payload);
    let vring = |index: u32, num: u32| [index.to_ne_bytes(), num.to_ne_bytes()].concat();
    let region = words([1, 0, 4096, 0, 0]);
    let addr = [&vring(0, 0)[..], &words([0x1000, 0x2000, 0x3000, 0])].concat();
    #[rustfmt::skip]
    let bad = vec![
        ("short", plain(SET_FEATURES, &[0; 4]), 0, Refused, "SET_FEATURES: payload of 4 bytes, expected 8"),
        ("long", plain(SET_VRING_NUM, &[0; 64]), 0, Refused, "SET_VRING_NUM: payload of 64 bytes, expected 8"),
        ("oversized", header(SET_MEM_TABLE, VERSION, 1 << 20), 0, Closed, "SET_MEM_TABLE: payload of 1048576 bytes"),
        ("huge", header(SET_MEM_TABLE, VERSION, u32::MAX), 0, Closed, "payload of 4294967295 bytes"),
        ("unknown", plain(250, &[0; 8]), 0, Refused, "request 250 is not supported"),
        ("another version", message(SET_FEATURES, 2, &[0; 8]), 0, Closed, "protocol version 2, expected 1"),
        ("a reply", message(SET_FEATURES, VERSION | 4, &[0; 8]), 0, Refused, "a reply, expected a request"),
        ("unknown flags", message(SET_FEATURES, VERSION | 1 << 20, &[0; 8]), 0, Closed, "expected only version"),
        ("a legacy driver", plain(SET_FEATURES, &words([0])), 0, Refused, "VIRTIO_F_VERSION_1 (bit 32)"),
        ("not offered", plain(SET_FEATURES, &words([1 << 32 | 1 << 63])), 0, Refused, "were not offered"),
        ("no such virtqueue", plain(SET_VRING_ENABLE, &vring(99, 1)), 0, Refused, "virtqueue 99, expected one below 2"),
        ("size", plain(SET_VRING_NUM, &vring(0, 40_000)), 0, Refused, "expected a number from 1 to 32768"),
        ("extra descriptors", plain(SET_VRING_NUM, &vring(0, 256)), 3, Refused, "3 file descriptors, expected 0"),
        ("extra descriptors, with a reply due", plain(GET_FEATURES, &[]), 2, Closed, "2 file descriptors, expected 0"),
        ("no descriptor", plain(SET_VRING_CALL, &words([0])), 0, Refused, "0 file descriptors, expected 1"),
        ("not an eventfd", plain(SET_VRING_CALL, &words([0])), 1, Refused, "expected an eventfd"),
        ("memory in no file", plain(SET_MEM_TABLE, &region), 1, Refused, "SET_MEM_TABLE: region 0x0"),
        ("too many regions", plain(SET_MEM_TABLE, &words([33])), 0, Refused, "33 regions, expected 1 to 32"),
        // This message precedes the memory table and the size that it refers to. It is only stored.
        ("out of order", plain(SET_VRING_ADDR, &addr), 0, Refused, ""),
    ];
    bad
}

/// Waits until the log has more than `before` lines that contain `text`.
fn wait_for_log(offcore: &Offcore, text: &str, before: usize) {
    switch::wait_until(&format!("{text:?} is logged"), || count(offcore, text) > before);
}

fn count(offcore: &Offcore, text: &str) -> usize {
    offcore.stderr().lines().filter(|line| line.contains(text)).count()
}

fn open_files(offcore: &Offcore) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", offcore.id())).unwrap().count()
}

/// Waits until the switch has no more than `before` open files. It has then noticed that the last front end is gone,
/// and has closed all unneeded file descriptors.
fn wait_for_files(offcore: &Offcore, before: usize) {
    switch::wait_until(&format!("{before} files are open"), || open_files(offcore) <= before);
}

/// Starts an Offcore front end with a generator on lcore 1. A switch sends its packets back.
fn good_front_end(socket: &Path, generator: &str) -> Offcore {
    let front_end = format!("virtio-user:{},queue_size=1024", socket.display());
    switch::start_on(1, &[&front_end, generator], Copies::Core, 1, &["--mbufs", "8192"])
}

/// Asserts that a switch received everything that a correct front end sent. The front end must have received, in order
/// and unchanged, all packets that the switch did not drop for lack of room, except for packets in flight at the stop.
fn assert_served(front_end: &Report, switch: &Report, port: usize) {
    assert_eq!(switch.packets(port, "rx"), front_end.packets(0, "tx"), "{front_end} {switch}");
    assert_eq!(switch.packets(port, "tx") + switch.full(port), switch.packets(port, "rx"), "{switch}");
    let found = front_end.generator(1);
    let on_their_way = switch.packets(port, "tx").checked_sub(found.received);
    assert!(on_their_way.is_some_and(|packets| packets <= 1024), "{front_end} {switch}");
    assert_eq!((found.wrong, found.verified), (0, found.received), "{front_end}");
    // Drops happened before the connection existed, and in the burst that still waited for room at the end.
    front_end.assert_only_drops(&["port0 tx down", "port0 tx full"]);
    assert!(front_end.full(0) <= 32, "{front_end}");
    let early = front_end.dropped("port0 tx down");
    assert!(found.lost <= early + switch.full(port), "{front_end} {switch}");
}

#[test]
fn bad_front_ends_leave_neighbours_unharmed() {
    let Some(_cores) = exclusive(&[Need::Cores(2)]) else { return };
    let dir = TempDir::new().unwrap();
    let (attacked, neighbour) = (dir.file("attacked"), dir.file("neighbour"));
    let ports = [&attacked, &neighbour].map(|socket| format!("vhost:{}", socket.display()));
    let mut offcore = switch::start(&ports, Copies::Core, 1, &["--port-topology", "loop"]);
    switch::wait_for_status(&mut offcore, 0, "waiting for a front end");
    let mut traffic = good_front_end(&neighbour, "gen:size=256,rate=20k");
    switch::wait_for_packets(&mut traffic, 1, "tx", 1);

    let files = open_files(&offcore);
    for (name, bytes, fds, then, says) in bad_messages() {
        let before = count(&offcore, says);
        let fds: Vec<OwnedFd> = (0..fds).map(|_| null()).collect();
        let mut peer = Peer::connect(&attacked);
        assert!(peer.features().is_some(), "before {name}");
        peer.send(&bytes, &fds.iter().map(AsFd::as_fd).collect::<Vec<_>>());
        match then {
            Then::Refused => assert!(peer.features().is_some(), "{name}: the connection was closed"),
            Then::Closed => peer.assert_closed(name),
        }
        if !says.is_empty() {
            wait_for_log(&offcore, says, before);
        }
    }
    // Every message is truncated: in the header, between header and payload, and in the payload.
    for cut in [1, 11, 12, 15] {
        let before = count(&offcore, "closed the connection after");
        let mut peer = Peer::connect(&attacked);
        assert!(peer.features().is_some());
        peer.send(&message(SET_FEATURES, VERSION, &[0; 8])[..cut], &[null().as_fd()]);
        drop(peer);
        wait_for_log(&offcore, "closed the connection after", before);
    }
    // More errors than a log should hold.
    let mut peer = Peer::connect(&attacked);
    for _ in 0..1000 {
        peer.send(&message(250, VERSION, &[]), &[]);
    }
    assert!(peer.features().is_some());
    assert!(count(&offcore, "request 250 is not supported") < 100, "{}", offcore.stderr());
    // A front end that stops in the middle of a message blocks only the next front end, until it is gone.
    peer.send(&header(SET_FEATURES, VERSION, 8), &[]);
    let by_now = switch::latest(&traffic).packets(1, "tx");
    switch::wait_for_packets(&mut traffic, 1, "tx", by_now + 5_000);
    drop(peer);
    wait_for_files(&offcore, files);

    const PACKETS: u64 = 50_000;
    let mut good = good_front_end(&attacked, "gen:size=1518");
    switch::wait_for_packets(&mut good, 1, "tx", PACKETS);
    let (good, traffic) = (switch::stop(good), switch::stop(traffic));
    let (report, log) = switch::stop_with_log(offcore);
    assert_served(&good, &report, 0);
    assert_served(&traffic, &report, 1);
    assert!(!log.contains("ERROR"), "{log}");
}

#[test]
fn socket_in_use_is_not_taken() {
    let dir = TempDir::new().unwrap();
    let path = dir.file("s");
    let listener = UnixListener::bind(&path).unwrap();
    let path = path.display().to_string();
    for port in [format!("vhost:{path}"), format!("virtio-user:{path},server")] {
        let finished = Offcore::run(&["switch", "--port", &port, "--duration", "5"]).unwrap();
        assert_eq!(finished.status.code(), Some(1), "{finished:?}");
        for part in [&*port, &*path, "in use", "stop that process or choose another path"] {
            assert!(finished.stderr.contains(part), "{part:?} is missing: {}", finished.stderr);
        }
        assert!(!finished.stderr.contains("panicked"), "{}", finished.stderr);
    }
    drop(listener);
    assert!(Path::new(&path).exists(), "another program's socket was removed");
}

#[test]
fn stale_socket_is_replaced() {
    let Some(_cores) = exclusive(&[Need::Cores(2)]) else { return };
    let dir = TempDir::new().unwrap();
    let socket = dir.file("s");
    let port = format!("vhost:{}", socket.display());
    let mut first = switch::start(&[&port], Copies::Core, 1, &[]);
    switch::wait_for_status(&mut first, 0, "waiting for a front end");
    // While the first process lives, a second one is refused.
    let second = Offcore::run(&["switch", "--port", &port, "--duration", "5"]).unwrap();
    assert_eq!(second.status.code(), Some(1), "{second:?}");
    assert!(Peer::connect(&socket).features().is_some(), "the first one was harmed");
    first.signal(Signal::KILL).unwrap();
    first.wait().unwrap();
    assert!(socket.exists());
    let mut third = switch::start(&[&port], Copies::Core, 1, &[]);
    switch::wait_for_status(&mut third, 0, "waiting for a front end");
    assert!(Peer::connect(&socket).features().is_some());
    switch::stop(third);
    assert!(!socket.exists(), "a switch that stops takes its socket with it");
}

/// With the smallest pool, and an engine that holds all of it, packets wait in the guest. None is lost or changed.
#[test]
fn a_pool_that_runs_dry_makes_packets_wait() {
    let Some(_cores) = exclusive(&[Need::Cores(2)]) else { return };
    const PACKETS: u64 = 20_000;
    let dir = TempDir::new().unwrap();
    let socket = dir.file("s");
    let port = format!("vhost:{}", socket.display());
    let mut offcore = switch::start(&[&port], Copies::Helper, 1, &["--mbufs", "64"]);
    switch::wait_for_status(&mut offcore, 0, "waiting for a front end");
    let mut good = good_front_end(&socket, "gen:size=1518");
    switch::wait_for_packets(&mut good, 1, "tx", PACKETS);
    let (good, report) = (switch::stop(good), switch::stop(offcore));
    assert_served(&good, &report, 0);
    report.assert_only_drops(&["port0 tx full"]);
    assert!(report.starved(0, "rx") > 0, "the pool did not run dry: {report}");
}

//! Header fields of datagrams, UDP segmentation, and the path MTU.

use std::net::IpAddr;

use offcore_session::datagram::{More, PathMtu};
use offcore_stats::time::{Micros, Time};
use offcore_tcp::proto::Event;
use offcore_wire::{IpProtocol, Sum, icmpv4, icmpv6};

use crate::content;
use crate::world::{PORT, World, addresses};

/// A closed port.
const NOBODY: u16 = 9;
const MTU: usize = 1500;
const EMSGSIZE: u16 = 90;

/// Returns the type of service and the TTL of a frame.
fn fields(frame: &[u8]) -> (u8, u8) {
    match frame[12..14] {
        [8, 0] => (frame[15], frame[22]),
        _ => (frame[14] << 4 | frame[15] >> 4, frame[21]),
    }
}

/// Returns whether an IPv4 frame has the Don't Fragment flag.
fn stays_whole(frame: &[u8]) -> bool {
    frame[20] & 0x40 != 0
}

/// Sends to host 2 and returns the frames.
fn frames(world: &mut World, to: IpAddr, len: usize, more: More) -> Vec<Vec<u8>> {
    assert!(world.ends[0].send_with((to, PORT).into(), &content(1, len), more));
    let mut frames = Vec::new();
    world.run(|from, frame| {
        frames.extend((from == 0).then(|| frame.clone()));
        vec![frame]
    });
    frames
}

#[test]
fn header_fields_are_sent_and_reported() {
    for to in addresses(2) {
        let mut world = World::new(false);
        world.resolve_neighbours(to);
        world.ends[1].path.stack.set_unix_time(world.now, 1_000_000_000_000_000 + world.now.as_micros());
        world.ends[1].path.stack.set_index(0, 77);
        for (hops, tos) in [(0, 0), (7, 0x48), (255, 0xff)] {
            let sent = frames(&mut world, to, 5, More { hops, tos, ..More::default() });
            let wire = (tos, if hops == 0 { 64 } else { hops });
            assert_eq!(sent.iter().map(|frame| fields(frame)).collect::<Vec<_>>(), [wire], "{to}");
            let (header, _) = world.ends[1].take_header().unwrap();
            assert_eq!((header.more.tos, header.more.hops), wire);
            assert_eq!((header.local, header.more.index, header.more.lost), (to, 77, 0));
            let time = Time::from_micros(header.more.time - 1_000_000_000_000_000);
            assert!(
                time <= world.now && time + Micros::from_millis(10) > world.now,
                "{time:?} of {:?}",
                world.now
            );
        }
    }
}

#[test]
fn lost_datagrams_are_counted() {
    let mut world = World::new(false);
    let to = addresses(2)[0];
    world.resolve_neighbours(to);
    let mut sent = 1;
    let lost = |world: &World| world.ends[1].path.stack.drops().get(offcore_tcp::proto::DropReason::NoSpace);
    while lost(&world) < 3 {
        sent += 1;
        frames(&mut world, to, 60_000, More::default());
    }
    let last = std::iter::from_fn(|| world.ends[1].take_header()).count() as u64;
    assert_eq!(last + lost(&world), sent - 1);
    frames(&mut world, to, 5, More::default());
    assert_eq!(u64::from(world.ends[1].take_header().unwrap().0.more.lost), lost(&world));
}

#[test]
fn datagrams_are_segmented() {
    for by_engine in [false, true] {
        for to in addresses(2) {
            let mut world = World::new(by_engine);
            world.resolve_neighbours(to);
            for (len, segment, expected) in [
                (3000, 1200, vec![1200, 1200, 600]),
                (2400, 1200, vec![1200, 1200]),
                (1200, 1200, vec![1200]),
                (5, 1200, vec![5]),
                (128, 1, vec![1; 128]),
            ] {
                let more = More { segment, ..More::default() };
                assert!(world.ends[0].send_with((to, PORT).into(), &content(3, len), more));
                // The next datagram in the FIFO follows.
                assert!(world.ends[0].send((to, PORT).into(), b"next"));
                world.run(|_, frame| vec![frame]);
                let got: Vec<_> =
                    std::iter::from_fn(|| world.ends[1].take().map(|(_, bytes)| bytes)).collect();
                let (last, segments) = got.split_last().unwrap();
                assert_eq!(segments.iter().map(Vec::len).collect::<Vec<_>>(), expected);
                assert!(segments.concat() == content(3, len), "{len} bytes to {to}");
                assert_eq!(last, b"next");
            }
            // There are too many segments for one datagram, or the segments are longer than the MTU.
            let refused = world.ends[0].path.stack.counts().datagrams_refused;
            for (len, segment) in [(129, 1), (3000, 1473)] {
                assert!(frames(&mut world, to, len, More { segment, ..More::default() }).is_empty());
            }
            assert_eq!(world.ends[0].path.stack.counts().datagrams_refused, refused + 2);
        }
    }
}

#[test]
fn closed_socket_sends_all_segments() {
    let mut world = World::new(true);
    let to = addresses(2)[0];
    world.resolve_neighbours(to);
    let more = More { segment: 10, ..More::default() };
    assert!(world.ends[0].send_with((to, PORT).into(), &content(3, 1280), more));
    let socket = world.ends[0].socket;
    let (stack, out) = world.ends[0].path.call();
    stack.close(Time::from_micros(1), socket, out);
    world.run(|_, frame| vec![frame]);
    assert_eq!(std::iter::from_fn(|| world.ends[1].take()).count(), 128);
}

/// Returns a frame with an ICMP error that reports `mtu`, made from host 2's error for a closed port.
fn too_long(world: &mut World, to: IpAddr, mtu: u16) -> Vec<u8> {
    assert!(world.ends[0].send((to, NOBODY).into(), b"anybody?"));
    let mut error = Vec::new();
    world.run(|from, frame| {
        if from == 1 && (frame[23] == 1 && to.is_ipv4() || frame[20] == 58 && frame[54] == 1) {
            error = frame;
            return Vec::new();
        }
        vec![frame]
    });
    let [high, low] = mtu.to_be_bytes();
    match (to, addresses(1)[1]) {
        (IpAddr::V6(from), IpAddr::V6(own)) => {
            let message = &mut error[54..];
            message[..8].copy_from_slice(&[icmpv6::PACKET_TOO_BIG, 0, 0, 0, 0, 0, high, low]);
            let pseudo = Sum::pseudo_v6(from, own, IpProtocol::ICMPV6, message.len() as u32);
            let checksum = (pseudo + Sum::of(message)).checksum();
            message[2..4].copy_from_slice(&checksum.to_be_bytes());
        }
        _ => {
            let message = &mut error[34..];
            message[..8].copy_from_slice(&[icmpv4::DESTINATION_UNREACHABLE, 4, 0, 0, 0, 0, high, low]);
            let checksum = Sum::of(message).checksum();
            message[2..4].copy_from_slice(&checksum.to_be_bytes());
        }
    }
    error
}

#[test]
fn path_mtu_is_learned() {
    for to in addresses(2) {
        let headers = if to.is_ipv4() { 28 } else { 48 };
        let mut world = World::new(false);
        world.resolve_neighbours(to);
        let mode = |path_mtu: PathMtu| More { path_mtu: path_mtu as u8, ..More::default() };
        let count = |world: &mut World, len: usize, path_mtu| {
            let frames = frames(world, to, len, mode(path_mtu));
            assert!(frames.iter().all(|frame| frame.len() <= 14 + MTU));
            assert_eq!(
                world.ends[1].take().map(|(_, bytes)| bytes.len()),
                (!frames.is_empty()).then_some(len)
            );
            frames.len()
        };
        let whole = MTU - headers;
        assert_eq!(world.ends[0].mtu(), MTU as u32);
        assert_eq!(count(&mut world, whole, PathMtu::Do), 1);
        assert_eq!([PathMtu::Do, PathMtu::Probe].map(|mode| count(&mut world, whole + 1, mode)), [0, 0]);
        assert_eq!([PathMtu::Want, PathMtu::Ignore].map(|mode| count(&mut world, whole + 1, mode)), [2, 2]);

        let socket = world.ends[0].socket;
        let peer = Some((to, NOBODY).into());
        world.ends[0].path.call().0.connect_datagrams(Time::from_micros(1), socket, peer).unwrap();
        let error = too_long(&mut world, to, 1300);
        world.ends[0].events.clear();
        let now = world.now;
        // The socket is connected, but allows fragmentation.
        world.ends[0].receive(now, &error);
        world.run(|_, frame| vec![frame]);
        assert_eq!((world.ends[0].mtu(), &world.ends[0].events[..]), (1300, &[][..]));
        let failed = Event::Failed(socket, EMSGSIZE);
        for path_mtu in [PathMtu::Want, PathMtu::Do, PathMtu::Probe] {
            world.ends[0].send_with((to, NOBODY).into(), b"x", mode(path_mtu));
            world.run(|_, frame| vec![frame]);
            world.ends[0].events.clear();
            let now = world.now;
            world.ends[0].receive(now, &error);
            world.run(|_, frame| vec![frame]);
            assert_eq!(world.ends[0].events, [failed], "{path_mtu:?}");
        }
        // Another socket uses the same path.
        world.ends[0].path.call().0.connect_datagrams(Time::from_micros(1), socket, None).unwrap();
        let path = 1300 - headers;
        assert_eq!(count(&mut world, path, PathMtu::Do), 1);
        assert_eq!(count(&mut world, path + 1, PathMtu::Do), 0);
        assert_eq!([PathMtu::Want, PathMtu::Ignore].map(|mode| count(&mut world, path + 1, mode)), [2, 2]);
        assert_eq!(count(&mut world, whole, PathMtu::Probe), 1, "PROBE ignores the path MTU");
        world.now += Micros::from_secs(601);
        world.run(|_, frame| vec![frame]);
        world.resolve_neighbours(to);
        assert_eq!(count(&mut world, whole, PathMtu::Do), 1, "the path MTU expires after ten minutes");
    }
}

#[test]
fn expired_path_mtu_is_not_reported() {
    let to = addresses(2)[0];
    let mut world = World::new(false);
    world.resolve_neighbours(to);
    let connect = |world: &mut World| {
        let (now, socket) = (world.now, world.ends[0].socket);
        world.ends[0].path.call().0.connect_datagrams(now, socket, Some((to, NOBODY).into())).unwrap();
        world.ends[0].mtu()
    };
    assert_eq!(connect(&mut world), MTU as u32);
    let error = too_long(&mut world, to, 1300);
    let now = world.now;
    world.ends[0].receive(now, &error);
    world.run(|_, frame| vec![frame]);
    assert_eq!(connect(&mut world), 1300);
    world.now += Micros::from_secs(601);
    assert_eq!(connect(&mut world), MTU as u32);
}

#[test]
fn dont_fragment_follows_path_mtu_mode() {
    let mut world = World::new(false);
    let to = addresses(2)[0];
    world.resolve_neighbours(to);
    for (path_mtu, len, whole) in [
        (PathMtu::Ignore, 100, false),
        (PathMtu::Want, 100, true),
        (PathMtu::Do, 100, true),
        (PathMtu::Probe, 1472, true),
        (PathMtu::Want, 3000, false),
    ] {
        let more = More { path_mtu: path_mtu as u8, ..More::default() };
        let frames = frames(&mut world, to, len, more);
        assert!(frames.iter().all(|frame| stays_whole(frame) == whole), "{path_mtu:?} {len}");
    }
}

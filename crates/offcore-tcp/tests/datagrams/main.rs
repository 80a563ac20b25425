//! UDP datagrams and IP fragments between two hosts, including all copies of their data.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod groups;
mod many;
mod more;
mod one_peer;
mod shares;
mod sharing;
mod undelivered;
mod users;
mod world;

use std::net::IpAddr;

use offcore_stats::SplitMix;
use offcore_stats::time::{Micros, Time};
use offcore_tcp::proto::{AppId, Cause, DropReason, Event};
use offcore_wire::{Icmpv4, Icmpv6, IpProtocol, Sum, icmpv4, icmpv6};

use world::{PORT, World, addresses};

const SIZES: [usize; 10] = [0, 1, 7, 1452, 1453, 1472, 1473, 3000, 20_000, 65_507];

/// Bytes of memory for slots, which are never released.
const SLOTS: usize = 4096;

fn content(seed: u64, len: usize) -> Vec<u8> {
    let mut chance = SplitMix::new(seed);
    (0..len).map(|_| chance.below(256) as u8).collect()
}

/// Checks that fragments and lost packets hold no buffers any more.
fn assert_no_buffers_held(world: &World, before: usize) {
    let [a, b] = &world.ends;
    assert_eq!(
        a.cache.pool().available() + magazines(world),
        before,
        "{:?} {:?}",
        a.path.stats(),
        b.path.stats()
    );
}

fn magazines(world: &World) -> usize {
    let shared = world.ends[0].cache.pool().available();
    world.ends.iter().map(|end| end.cache.available() - shared).sum()
}

fn free(world: &World) -> usize {
    world.ends[0].cache.pool().available() + magazines(world)
}

#[test]
fn datagrams_of_any_length_arrive() {
    for by_engine in [false, true] {
        let mut world = World::new(by_engine);
        let before = free(&world);
        for (to, from) in addresses(2).into_iter().zip(addresses(1)) {
            for (seed, len) in SIZES.into_iter().enumerate() {
                let bytes = content(seed as u64, len);
                assert!(world.ends[0].send((to, PORT).into(), &bytes));
                world.run(|_, frame| {
                    assert!(frame.len() <= 1514, "{} bytes", frame.len());
                    vec![frame]
                });
                let (peer, got) = world.ends[1].take().unwrap();
                assert_eq!(peer, (from, PORT).into());
                assert!(got == bytes, "{len} bytes to {to}");
                assert_eq!(world.ends[1].take(), None);
            }
        }
        assert_no_buffers_held(&world, before);
    }
}

#[test]
fn datagrams_keep_order_and_boundaries() {
    let mut world = World::new(true);
    let before = free(&world);
    let to = addresses(2)[0];
    world.resolve_neighbours(to);
    let sizes = || (0..400usize).map(|number| number * 37 % 3000);
    let mut sent = 0;
    for (seed, len) in sizes().enumerate() {
        if !world.ends[0].send((to, PORT).into(), &content(seed as u64, len)) {
            break;
        }
        sent += 1;
    }
    assert!(sent > 100, "there is room for {sent} datagrams only");
    world.run(|_, frame| vec![frame]);
    for (seed, len) in sizes().enumerate().take(sent) {
        let Some((_, bytes)) = world.ends[1].take() else { panic!("{seed} of {sent} have come") };
        assert!(bytes == content(seed as u64, len), "datagram {seed}");
    }
    assert_no_buffers_held(&world, before);
}

#[test]
fn fragments_reassemble_in_any_order() {
    for to in addresses(2) {
        let mut world = World::new(true);
        let before = free(&world);
        let bytes = content(1, 30_000);
        let mut parts = world.frames_of(to, &bytes);
        assert!(parts.len() > 20, "{} parts", parts.len());
        let mut chance = SplitMix::new(7);
        for at in (1..parts.len()).rev() {
            parts.swap(at, chance.below(at as u64 + 1) as usize);
        }
        let last = parts.len() - 1;
        for (at, part) in parts.iter().enumerate() {
            let now = world.now;
            world.ends[1].receive(now, part);
            if at < last {
                world.ends[1].receive(now, part);
                assert_eq!(world.ends[1].take(), None);
            }
        }
        world.run(|_, frame| vec![frame]);
        assert!(world.ends[1].take().unwrap().1 == bytes, "to {to}");
        assert_eq!(world.ends[1].path.stats().fragments_dropped, 0);
        assert_no_buffers_held(&world, before);
    }
}

#[test]
fn overlapping_fragments_discard_datagram() {
    let mut world = World::new(false);
    let before = free(&world);
    let parts = world.frames_of(addresses(2)[0], &content(1, 4000));
    assert_eq!(parts.len(), 3);
    let mut overlapping = parts[1].clone();
    // The fragment offset counts units of 8 bytes. The header checksum changes by the same amount.
    let offset = u16::from_be_bytes([overlapping[20], overlapping[21]]) - 1;
    overlapping[20..22].copy_from_slice(&offset.to_be_bytes());
    let checksum = u16::from_be_bytes([overlapping[24], overlapping[25]]) + 1;
    overlapping[24..26].copy_from_slice(&checksum.to_be_bytes());
    let now = world.now;
    for part in [&parts[0], &overlapping, &parts[2]] {
        world.ends[1].receive(now, part);
    }
    world.run(|_, frame| vec![frame]);
    assert_eq!(world.ends[1].take(), None);
    assert_eq!(world.ends[1].path.stats().fragments_dropped, 2);
    world.now += Micros::from_secs(31);
    world.run(|_, frame| vec![frame]);
    assert_eq!(
        world.ends[1].path.stats().fragments_dropped,
        3,
        "the last part waited for the others in vain"
    );
    assert_no_buffers_held(&world, before);
}

#[test]
fn incomplete_reassembly_times_out() {
    for to in addresses(2) {
        let mut world = World::new(false);
        let before = free(&world);
        let parts = world.frames_of(to, &content(1, 9000));
        let now = world.now;
        parts[1..].iter().for_each(|part| world.ends[1].receive(now, part));
        world.run(|_, frame| vec![frame]);
        assert!(free(&world) < before, "parts are kept");
        world.now += Micros::from_secs(31);
        world.run(|_, frame| vec![frame]);
        assert_no_buffers_held(&world, before);
        assert_eq!(world.ends[1].take(), None);
    }
}

/// Returns the fragment as if host `last` had sent it as part of packet `ident`.
fn forged(part: &[u8], last: u8, ident: u16) -> Vec<u8> {
    let mut part = part.to_vec();
    part[18..20].copy_from_slice(&ident.to_be_bytes());
    part[29] = last;
    part[24..26].fill(0);
    let checksum = Sum::of(&part[14..34]).checksum();
    part[24..26].copy_from_slice(&checksum.to_be_bytes());
    part
}

#[test]
fn fragment_flood_spares_other_senders() {
    let mut world = World::new(false);
    let bytes = content(1, 3000);
    let [parts, mut long] =
        [&bytes, &content(2, 30_000)].map(|bytes| world.frames_of(addresses(2)[0], bytes));
    // The last fragment of a forged datagram never arrives.
    long.pop();
    let (now, before) = (world.now, free(&world));
    // Returns the maximum number of buffers that fragments hold during a flood.
    let flood = |world: &mut World, senders: std::ops::Range<u8>| {
        let mut most = 0;
        for (sender, ident) in senders.flat_map(|sender| (0..40).map(move |ident| (sender, ident))) {
            for part in &long {
                world.ends[1].receive(now, &forged(part, sender, ident));
                most = most.max(before - free(world));
            }
        }
        most
    };
    world.ends[1].receive(now, &parts[0]);
    assert_eq!(flood(&mut world, 77..78), 1 + 128, "half of the buffers for fragments");
    parts[1..].iter().for_each(|part| world.ends[1].receive(now, part));
    world.run(|_, frame| vec![frame]);
    assert!(world.ends[1].take().unwrap().1 == bytes);
    assert_eq!(flood(&mut world, 78..88), 256, "an eighth of all buffers");
}

#[test]
fn zero_udp_checksum_is_ipv4_only() {
    for (to, at) in addresses(2).into_iter().zip([14 + 20 + 6, 14 + 40 + 6]) {
        let mut world = World::new(false);
        let frame = world.frames_of(to, b"some words").remove(0);
        let now = world.now;
        let mut wrong = frame.clone();
        wrong[at] ^= 1;
        world.ends[1].receive(now, &wrong);
        let mut none = frame.clone();
        none[at..at + 2].fill(0);
        world.ends[1].receive(now, &none);
        world.run(|_, frame| vec![frame]);
        let taken = usize::from(to.is_ipv4());
        assert_eq!((0..2).map_while(|_| world.ends[1].take()).count(), taken, "{to}");
        assert_eq!(world.ends[1].path.stack.drops().get(DropReason::Checksum), 2 - taken as u64);
    }
}

/// Some cameras and old stacks append bytes that the IP length includes and the UDP length does not. RFC 768 does not
/// mention them, and Linux ignores them.
#[test]
fn trailing_bytes_are_ignored() {
    for (to, len) in [5, 100, 1300].into_iter().flat_map(|len| addresses(2).map(|to| (to, len))) {
        let mut world = World::new(false);
        let mut frame = world.frames_of(to, &content(1, len)).remove(0);
        let now = world.now;
        frame.extend([7; 9]);
        if to.is_ipv4() {
            let total = (frame.len() - 14) as u16;
            frame[16..18].copy_from_slice(&total.to_be_bytes());
            frame[24..26].fill(0);
            let checksum = Sum::of(&frame[14..34]).checksum();
            frame[24..26].copy_from_slice(&checksum.to_be_bytes());
        } else {
            let payload = (frame.len() - 54) as u16;
            frame[18..20].copy_from_slice(&payload.to_be_bytes());
        }
        world.ends[1].receive(now, &frame);
        // A wrong checksum is still detected.
        let last = frame.len() - 10;
        frame[last] ^= 1;
        world.ends[1].receive(now, &frame);
        world.run(|_, frame| vec![frame]);
        assert!(world.ends[1].take().unwrap().1 == content(1, len), "{len} bytes to {to}");
        assert_eq!(world.ends[1].take(), None);
        assert_eq!(world.ends[1].path.stack.drops().get(DropReason::Checksum), 1);
    }
}

#[test]
fn partial_checksums_are_counted_separately() {
    for ((to, from), ip) in addresses(2).into_iter().zip(addresses(1)).zip([20, 40]) {
        let mut world = World::new(false);
        let mut frame = world.frames_of(to, b"some words").remove(0);
        let (at, now) = (14 + ip + 6, world.now);
        let len = frame.len() - 14 - ip;
        let pseudo = match (from, to) {
            (IpAddr::V4(from), IpAddr::V4(to)) => Sum::pseudo_v4(from, to, IpProtocol::UDP, len as u16),
            (IpAddr::V6(from), IpAddr::V6(to)) => Sum::pseudo_v6(from, to, IpProtocol::UDP, len as u32),
            _ => panic!("{from} and {to} are of two kinds"),
        };
        frame[at..at + 2].copy_from_slice(&pseudo.value().to_be_bytes());
        world.ends[1].receive(now, &frame);
        frame[at] ^= 1;
        world.ends[1].receive(now, &frame);
        let drops = world.ends[1].path.stack.drops();
        assert_eq!(
            [DropReason::OpenChecksum, DropReason::Checksum].map(|why| drops.get(why)),
            [1, 1],
            "{to}"
        );
    }
}

#[test]
fn closed_port_sends_port_unreachable() {
    let mut world = World::new(false);
    for to in addresses(2) {
        assert!(world.ends[0].send((to, 9).into(), b"to no socket"));
        let mut told = 0;
        world.run(|from, frame| {
            told += usize::from(
                from == 1
                    && match to.is_ipv4() {
                        true if frame[23] == 1 => matches!(
                            Icmpv4::parse(&frame[34..]),
                            Ok(Icmpv4::Unreachable { code: icmpv4::PORT_UNREACHABLE, quoted, .. })
                                if quoted[20..24] == [0, 7, 0, 9]
                        ),
                        false if frame[20] == 58 => matches!(
                            Icmpv6::parse(&frame[54..]),
                            Ok(Icmpv6::Unreachable { code: icmpv6::PORT_UNREACHABLE, quoted, .. })
                                if quoted[40..44] == [0, 7, 0, 9]
                        ),
                        _ => false,
                    },
            );
            vec![frame]
        });
        assert_eq!(told, 1, "{to}");
    }
}

#[test]
fn port_unreachables_are_rate_limited() {
    let mut world = World::new(false);
    let mut frame = world.frames_of(addresses(2)[0], b"to no socket").remove(0);
    // Port 9 is closed. A UDP checksum of 0 means none.
    frame[36..38].copy_from_slice(&9u16.to_be_bytes());
    frame[40..42].fill(0);
    let mut told = [0; 4];
    for told in &mut told {
        world.now += Micros::from_secs(1);
        let now = world.now;
        for _ in 0..3000 {
            world.ends[1].receive(now, &frame);
            *told += world.ends[1].turn(now).len();
        }
    }
    // The limit is randomized, so that a sender cannot rely on an exact number.
    assert!(told.iter().all(|told| (400..=1000).contains(told)), "{told:?}");
    assert!(told.iter().any(|other| *other != told[0]), "{told:?}");
}

#[test]
fn malformed_record_closes_only_its_socket() {
    for nonsense in [vec![0xff; 72], vec![4; 16], vec![0; 64]] {
        let mut world = World::new(false);
        world.ends[0].write_nonsense(&nonsense);
        world.run(|_, frame| vec![frame]);
        let end = &mut world.ends[0];
        let closed = Event::Closed(end.socket, Cause::Aborted);
        assert_eq!(end.events.iter().filter(|event| **event == closed).count(), 1);
        let (stack, out) = end.path.call();
        stack.close(Time::from_micros(1), end.socket, out);
        assert!(stack.memory_used() <= SLOTS, "its memory is free");
        assert!(stack.open_datagrams(AppId::OWN, None, PORT).is_ok(), "its port, too");
    }
}

#[test]
fn closed_socket_sends_written_data() {
    let mut world = World::new(true);
    let to = addresses(2)[0];
    assert!(world.ends[0].send((to, PORT).into(), b"the last words"));
    let end = &mut world.ends[0];
    let socket = end.socket;
    let (stack, out) = end.path.call();
    stack.close(Time::from_micros(1), socket, out);
    world.run(|_, frame| vec![frame]);
    assert_eq!(world.ends[1].take().unwrap().1, b"the last words");
    assert!(world.ends[0].path.stack.memory_used() <= SLOTS);
}

#[test]
fn refused_datagrams_are_counted() {
    let mut world = World::new(false);
    for to in ["192.168.1.1:7", "255.255.255.255:7", "10.0.0.255:7", "0.0.0.0:7", "10.0.0.2:0"] {
        assert!(world.ends[0].send(to.parse().unwrap(), b"lost"), "{to}");
    }
    world.run(|_, frame| vec![frame]);
    assert_eq!(world.ends[0].path.stack.counts().datagrams_refused, 5);
    assert!(world.ends[0].send((addresses(2)[0], PORT).into(), b"goes"));
    world.run(|_, frame| vec![frame]);
    assert_eq!(world.ends[1].take().unwrap().1, b"goes");
}

#[test]
fn unresolved_datagrams_hold_few_buffers() {
    let mut world = World::new(false);
    let before = free(&world);
    for last in 10..110 {
        assert!(world.ends[0].send(([10, 0, 0, last], PORT).into(), &content(1, 20_000)));
        world.run(|_, frame| vec![frame]);
    }
    assert!(before - free(&world) <= 2048 / 16, "they hold {} buffers", before - free(&world));
    // A neighbour that is present still receives its datagram.
    world.resolve_neighbours(addresses(2)[0]);
    world.now += Micros::from_secs(4);
    world.run(|_, frame| vec![frame]);
    assert_no_buffers_held(&world, before);
}

#[test]
fn absent_neighbours_leave_room_for_others() {
    let mut world = World::new(false);
    assert!(world.ends[0].send((addresses(2)[0], PORT).into(), b"first"));
    for number in 0..200u8 {
        assert!(world.ends[0].send(([10, 0, 0, 99], PORT).into(), &[number]));
    }
    // All ARP requests are lost. Then the neighbour is asked again.
    world.run(|_, _| vec![]);
    world.now += Micros::from_secs(1);
    world.run(|_, frame| vec![frame]);
    assert_eq!(world.ends[1].take().unwrap().1, b"first");
}

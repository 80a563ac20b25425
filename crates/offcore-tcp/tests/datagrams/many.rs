//! Multicast and broadcast datagrams.

use std::net::SocketAddr;

use offcore_session::datagram::More;

use crate::world::{PORT, World, addresses};

/// Sends a datagram, passes its frames to host 2 and returns them.
fn frames(world: &mut World, to: &str, more: More) -> Vec<Vec<u8>> {
    let to: SocketAddr = to.parse().unwrap();
    assert!(world.ends[0].send_with(to, b"to many", more));
    let mut frames = Vec::new();
    world.run(|from, frame| {
        frames.extend((from == 0).then(|| frame.clone()));
        assert!(from == 0, "an answer to a datagram for many");
        vec![frame]
    });
    frames
}

#[test]
fn multicast_needs_no_resolution() {
    for (to, station, at, hops) in [
        ("224.0.0.251:5353", [0x01, 0, 0x5e, 0, 0, 0xfb], 22, 1),
        ("239.129.1.2:5353", [0x01, 0, 0x5e, 1, 1, 2], 22, 1),
        ("[ff02::fb]:5353", [0x33, 0x33, 0, 0, 0, 0xfb], 21, 1),
    ] {
        let mut world = World::new(false);
        for (more, hops) in
            [(0, hops), (5, 5)].map(|(set, hops)| (More { hops: set, ..More::default() }, hops))
        {
            let sent = frames(&mut world, to, more);
            assert_eq!(sent.len(), 1, "{to}");
            assert_eq!((&sent[0][..6], sent[0][at]), (&station[..], hops), "{to}");
        }
    }
}

#[test]
fn broadcasts_are_received() {
    for to in ["255.255.255.255", "10.0.0.255", "224.0.0.1", "[ff02::1]"] {
        let mut world = World::new(false);
        let more = More { broadcast: true, ..More::default() };
        let sent = frames(&mut world, &format!("{to}:{PORT}"), more);
        assert_eq!(sent.len(), 1, "{to}");
        let (header, bytes) = world.ends[1].take_header().unwrap();
        assert_eq!(bytes, b"to many");
        assert_eq!(header.local, to.trim_matches(['[', ']']).parse::<std::net::IpAddr>().unwrap());
        // A closed port sends no error.
        assert_eq!(frames(&mut world, &format!("{to}:9"), more).len(), 1);
    }
}

#[test]
fn broadcast_needs_permission() {
    let mut world = World::new(false);
    for to in ["255.255.255.255:7", "10.0.0.255:7"] {
        assert!(frames(&mut world, to, More::default()).is_empty());
    }
    assert_eq!(world.ends[0].path.stack.counts().datagrams_refused, 2);
}

/// A unicast packet in a link-layer broadcast is dropped silently (RFC 1122, 3.3.6).
#[test]
fn unicast_in_link_broadcast_is_dropped() {
    let mut world = World::new(false);
    let mut frame = world.frames_of(addresses(2)[0], b"by broadcast").remove(0);
    frame[..6].fill(0xff);
    let now = world.now;
    world.ends[1].receive(now, &frame);
    world.run(|_, frame| vec![frame]);
    assert_eq!(world.ends[1].take(), None);
}

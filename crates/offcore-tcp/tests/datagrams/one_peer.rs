//! Connected sockets: which datagrams and which ICMP errors they receive.

use std::net::{IpAddr, SocketAddr};

use offcore_stats::time::{Micros, Time};
use offcore_tcp::proto::{CallError, DropReason, Event, IfaceConfig, Prefix};
use offcore_wire::{MacAddr, Sum};

use crate::sharing::{NONE, Socket};
use crate::world::{PORT, World, addresses};

/// A closed port.
pub(crate) const NOBODY: u16 = 9;
const ENOPROTOOPT: u16 = 92;
const ECONNREFUSED: u16 = 111;

fn connect(world: &mut World, host: usize, peer: Option<SocketAddr>) -> Result<Option<IpAddr>, CallError> {
    let end = &mut world.ends[host];
    end.path.call().0.connect_datagrams(Time::from_micros(1), end.socket, peer)
}

/// Takes the errors that host 1's socket was told.
fn failures(world: &mut World) -> Vec<u16> {
    let socket = world.ends[0].socket;
    let events = world.ends[0].events.drain(..);
    let failures = events.filter_map(|event| match event {
        Event::Failed(id, errno) if id == socket => Some(errno),
        _ => None,
    });
    failures.collect()
}

/// Sends to a closed port of host 2 and returns the frames with the resulting errors.
pub(crate) fn refused(world: &mut World, to: IpAddr) -> Vec<Vec<u8>> {
    assert!(world.ends[0].send((to, NOBODY).into(), b"anybody?"));
    let mut errors = Vec::new();
    world.run(|from, frame| {
        let is_error = match to {
            IpAddr::V4(_) => frame[12..14] == [8, 0] && frame[23] == 1,
            IpAddr::V6(_) => frame[12..14] == [0x86, 0xdd] && frame[20] == 58 && frame[54] == 1,
        };
        if from == 1 && is_error {
            errors.push(frame.clone());
        }
        vec![frame]
    });
    errors
}

#[test]
fn connected_socket_gets_econnrefused() {
    for (to, from) in addresses(2).into_iter().zip(addresses(1)) {
        let mut world = World::new(false);
        assert_eq!(connect(&mut world, 0, Some((to, NOBODY).into())), Ok(Some(from)));
        for _ in 0..3 {
            assert_eq!(refused(&mut world, to).len(), 1);
            assert_eq!(failures(&mut world), [ECONNREFUSED], "{to}");
        }
        // Errors about another port are not reported. A socket without a peer gets none at all.
        connect(&mut world, 0, Some((to, NOBODY + 1).into())).unwrap();
        assert_eq!(refused(&mut world, to).len(), 1);
        assert_eq!(failures(&mut world), []);
        assert_eq!(connect(&mut world, 0, None), Ok(None));
        assert_eq!(refused(&mut world, to).len(), 1);
        assert_eq!(failures(&mut world), []);
        assert!(world.ends[0].send((to, PORT).into(), b"continued"));
        world.run(|_, frame| vec![frame]);
        assert_eq!(world.ends[1].take().unwrap().1, b"continued");
    }
}

/// Returns an ICMP message with the byte at `at` changed and the checksum updated.
pub(crate) fn altered(error: &[u8], at: usize) -> Vec<u8> {
    let mut error = error.to_vec();
    error[at] ^= 1;
    error[36..38].fill(0);
    let sum = Sum::of(&error[34..]).checksum();
    error[36..38].copy_from_slice(&sum.to_be_bytes());
    error
}

#[test]
fn icmp_error_must_quote_both_endpoints() {
    let to = addresses(2)[0];
    let mut world = World::new(false);
    connect(&mut world, 0, Some((to, NOBODY).into())).unwrap();
    let error = refused(&mut world, to).remove(0);
    assert_eq!(failures(&mut world), [ECONNREFUSED]);
    let hears = |world: &mut World, error: &[u8]| {
        let now = world.now;
        world.ends[0].receive(now, error);
        world.run(|_, frame| vec![frame]);
        failures(world)
    };
    assert_eq!(hears(&mut world, &error), [ECONNREFUSED], "the same once more");
    // The quoted packet begins at byte 42 with an IPv4 header of 20 bytes, which has the protocol and both addresses.
    // The ports follow it.
    for (at, what) in
        [(51, "protocol"), (57, "source"), (61, "destination"), (63, "port"), (65, "peer's port")]
    {
        assert_eq!(hears(&mut world, &altered(&error, at)), [], "{what}");
    }
    // Code 2 (protocol unreachable) is a hard error. Code 12 (host unreachable for the type of service) is not.
    for (code, told) in [(2, vec![ENOPROTOOPT]), (12, vec![])] {
        let mut other = altered(&error, 35);
        other[35] = code;
        let other = altered(&altered(&other, 41), 41);
        assert_eq!(hears(&mut world, &other), told, "code {code}");
    }
    // A socket that has sent nothing cannot have caused an error.
    let mut silent = World::new(false);
    connect(&mut silent, 0, Some((to, NOBODY).into())).unwrap();
    assert_eq!(hears(&mut silent, &error), []);
}

#[test]
fn connected_socket_receives_only_from_peer() {
    for (to, from) in addresses(2).into_iter().zip(addresses(1)) {
        let mut world = World::new(false);
        let say = |world: &mut World, what: &[u8]| {
            assert!(world.ends[0].send((to, PORT).into(), what));
            world.run(|_, frame| vec![frame]);
        };
        say(&mut world, b"before");
        connect(&mut world, 1, Some((from, PORT + 1).into())).unwrap();
        // A connected sender gets the same error as for a closed port.
        connect(&mut world, 0, Some((to, PORT).into())).unwrap();
        say(&mut world, b"from another");
        assert_eq!(failures(&mut world), [ECONNREFUSED]);
        assert_eq!(world.ends[1].path.stack.drops().get(DropReason::NoConnection), 1);
        assert_eq!(world.ends[1].take().unwrap().1, b"before", "what has come before stays");
        assert_eq!(world.ends[1].take(), None);
        connect(&mut world, 1, Some((from, PORT).into())).unwrap();
        say(&mut world, b"from the peer");
        assert_eq!(world.ends[1].take().unwrap().1, b"from the peer");
        connect(&mut world, 1, None).unwrap();
        say(&mut world, b"from anybody");
        assert_eq!(world.ends[1].take().unwrap().1, b"from anybody");
        assert_eq!(failures(&mut world), []);
    }
}

#[test]
fn connect_needs_route_to_peer() {
    let mut world = World::new(false);
    for to in ["192.168.1.1:7", "0.0.0.0:7", "[::]:7"] {
        assert_eq!(connect(&mut world, 0, Some(to.parse().unwrap())), Err(CallError::NoRoute), "{to}");
    }
    let [ours, _] = addresses(1);
    for all in ["255.255.255.255:7", "10.0.0.255:7"] {
        assert_eq!(connect(&mut world, 0, Some(all.parse().unwrap())), Ok(Some(ours)), "{all}");
    }
    assert_eq!(connect(&mut world, 0, Some("224.0.0.1:7".parse().unwrap())), Ok(Some(ours)), "a group");
    let end = &mut world.ends[0];
    let (stack, out) = end.path.call();
    let bound = stack.open_datagrams(offcore_tcp::proto::AppId::OWN, Some(ours), 0).unwrap();
    let v6 = SocketAddr::new(addresses(2)[1], 7);
    assert_eq!(
        stack.connect_datagrams(Time::from_micros(1), bound, Some(v6)),
        Err(CallError::NoRoute),
        "another family"
    );
    assert_eq!(stack.connect_datagrams(Time::from_micros(1), bound, None), Ok(Some(ours)));
    stack.close(Time::from_micros(1), bound, out);
    assert_eq!(stack.connect_datagrams(Time::from_micros(1), bound, None), Err(CallError::Gone));
}

#[test]
fn tentative_address_is_never_source() {
    let mut world = World::new(false);
    let to = addresses(2)[1];
    world.resolve_neighbours(to);
    let address: IpAddr = "2001:db8:1::5".parse().unwrap();
    let (now, addresses) = (world.now, vec![Prefix { address, len: 64 }]);
    let config = IfaceConfig { mac: MacAddr([2, 0, 0, 0, 9, 1]), mtu: 1500, addresses, routes: Vec::new() };
    let (stack, out) = world.ends[0].path.call();
    stack.add_iface(now, &config, out);
    out.controls.clear();
    let mut socket = Socket::open(&mut world.ends[0], Some("2001:db8:1::5"), 99, NONE).unwrap();
    let mut sent = |world: &mut World| {
        socket.send(&mut world.ends[0], (to, PORT).into());
        world.run(|_, frame| vec![frame]);
        world.ends[1].take().map(|(from, _)| from.ip())
    };
    assert_eq!(sent(&mut world), None);
    world.now += Micros::from_millis(1100);
    world.run(|_, frame| vec![frame]);
    assert_eq!(sent(&mut world), Some(address));
}

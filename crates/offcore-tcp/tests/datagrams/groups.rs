//! Multicast groups: which sockets receive a datagram that is sent to a group or a broadcast address.

use std::net::{IpAddr, SocketAddr};

use offcore_session::datagram::More;
use offcore_stats::time::Time;
use offcore_tcp::proto::{Membership, Reuse};

use crate::sharing::{ADDRESS, NONE, STRANGER, Socket};
use crate::world::{End, PORT, World, addresses};

const SHARED: u16 = 5353;
const GROUPS: [&str; 2] = ["239.1.2.3", "ff05::1234"];

fn joins(end: &mut End, socket: &Socket, group: &str) {
    let membership = Membership { group: group.parse().unwrap(), index: 0, address: None };
    let (stack, _) = end.path.call();
    stack.join_group(Time::from_micros(1), socket.id, &membership).unwrap();
}

fn takes_only_its_groups(end: &mut End, socket: &Socket) {
    end.path.call().0.receive_all_groups(socket.id, false, false);
}

/// Sends from host 1 to a group of host 2, to the port that the sockets share.
fn send(world: &mut World, group: &str, more: More) {
    let to = SocketAddr::new(group.parse().unwrap(), SHARED);
    assert!(world.ends[0].send_with(to, b"all", more));
    world.run(|_, frame| vec![frame]);
}

#[test]
fn each_socket_gets_a_copy() {
    for (group, by_engine) in GROUPS.into_iter().flat_map(|group| [(group, false), (group, true)]) {
        let mut world = World::new(by_engine);
        let end = &mut world.ends[1];
        let mut all: Vec<Socket> = [None, None, Some(group)]
            .map(|address| Socket::open(end, address, SHARED, ADDRESS).unwrap())
            .into();
        let mut others = [
            Socket::open(end, None, 5354, NONE).unwrap(),
            // A socket that is bound to its own address, or connected to a peer, receives no multicast datagrams.
            Socket::open(end, Some(&addresses(2)[0].to_string()), SHARED, ADDRESS).unwrap(),
            Socket::open(end, None, SHARED, ADDRESS).unwrap(),
        ];
        let peer = SocketAddr::new(addresses(1)[usize::from(group.contains(':'))], PORT);
        end.path.call().0.connect_datagrams(Time::from_micros(1), others[2].id, Some(peer)).unwrap();
        send(&mut world, group, More::default());
        assert!(all.iter_mut().all(|socket| socket.taken().is_empty()), "no socket has joined {group}");
        joins(&mut world.ends[1], &all[1], group);
        send(&mut world, group, More::default());
        send(&mut world, group, More::default());
        assert!(all.iter_mut().all(|socket| socket.taken() == [peer; 2]), "{group}");
        assert!(others.iter_mut().all(|socket| socket.taken().is_empty()), "{group}");
        // The host leaves the group when its last member is closed.
        all.remove(1).close(&mut world.ends[1]);
        send(&mut world, group, More::default());
        assert!(all.iter_mut().all(|socket| socket.taken().is_empty()), "{group}");
    }
}

#[test]
fn broadcast_reaches_each_socket() {
    let mut world = World::new(false);
    let mut all = [(); 2].map(|()| Socket::open(&mut world.ends[1], None, SHARED, ADDRESS).unwrap());
    send(&mut world, "10.0.0.255", More { broadcast: true, ..More::default() });
    assert!(all.iter_mut().all(|socket| socket.taken().len() == 1));
}

#[test]
fn multicast_all_off_filters_other_groups() {
    for group in GROUPS {
        let mut world = World::new(false);
        let end = &mut world.ends[1];
        let mut sockets = [(); 3].map(|()| Socket::open(end, None, SHARED, ADDRESS).unwrap());
        for socket in &sockets[1..] {
            takes_only_its_groups(end, socket);
        }
        joins(end, &sockets[2], group);
        send(&mut world, group, More::default());
        assert_eq!(sockets.each_mut().map(|socket| socket.taken().len()), [1, 0, 1], "{group}");
    }
}

#[test]
fn full_receiver_drops_only_its_copies() {
    let mut world = World::new(false);
    let end = &mut world.ends[1];
    let mut sockets = [(); 2].map(|()| Socket::open(end, None, SHARED, ADDRESS).unwrap());
    joins(end, &sockets[0], GROUPS[0]);
    let small = offcore_tcp::proto::Buffers { receive: 300, ..Default::default() };
    end.path.call().0.set_buffers(sockets[1].id, small);
    for _ in 0..10 {
        send(&mut world, GROUPS[0], More::default());
    }
    assert_eq!(sockets.each_mut().map(|socket| socket.taken().len()), [10, 4]);
}

#[test]
fn receivers_of_a_datagram_are_limited() {
    let mut world = World::new(false);
    let end = &mut world.ends[1];
    let mut sockets: Vec<_> = (0..80).map(|_| Socket::open(end, None, SHARED, ADDRESS).unwrap()).collect();
    joins(end, &sockets[0], GROUPS[0]);
    send(&mut world, GROUPS[0], More::default());
    let taken: Vec<_> = sockets.iter_mut().map(|socket| socket.taken().len()).collect();
    assert_eq!(taken.iter().sum::<usize>(), 64);
    assert!(taken[16..].iter().all(|count| *count == 1), "the newest ones");
}

#[test]
fn sent_datagrams_loop_back() {
    for (group, family) in GROUPS.into_iter().zip([0, 1]) {
        let mut world = World::new(false);
        let end = &mut world.ends[0];
        let mut sockets = [(); 2].map(|()| Socket::open(end, None, SHARED, ADDRESS).unwrap());
        send(&mut world, group, More::default());
        assert_eq!(sockets.each_mut().map(|socket| socket.taken().len()), [0, 0], "no member: {group}");
        joins(&mut world.ends[0], &sockets[0], group);
        send(&mut world, group, More::default());
        let own = SocketAddr::new(addresses(1)[family], PORT);
        assert!(sockets.iter_mut().all(|socket| socket.taken() == [own]), "{group}");
        send(&mut world, group, More { no_loop: true, ..More::default() });
        assert_eq!(sockets.each_mut().map(|socket| socket.taken().len()), [0, 0], "{group}");
    }
    let mut world = World::new(false);
    let mut socket = Socket::open(&mut world.ends[0], None, SHARED, NONE).unwrap();
    send(&mut world, "10.0.0.255", More { broadcast: true, ..More::default() });
    assert_eq!(socket.taken().len(), 1, "a broadcast");
}

#[test]
fn group_datagram_reports_local_address() {
    let mut world = World::new(false);
    let socket = world.ends[1].socket;
    let membership = Membership { group: GROUPS[0].parse().unwrap(), index: 1, address: None };
    world.ends[1].path.call().0.join_group(Time::from_micros(1), socket, &membership).unwrap();
    for to in [GROUPS[0], "10.0.0.255"] {
        let to = SocketAddr::new(to.parse().unwrap(), PORT);
        assert!(world.ends[0].send_with(to, b"x", More { broadcast: true, ..More::default() }));
        world.run(|_, frame| vec![frame]);
        let (header, _) = world.ends[1].take_header().unwrap();
        assert_eq!((header.local, header.more.own.map(IpAddr::from)), (to.ip(), Some(addresses(2)[0])));
    }
}

#[test]
fn multicast_fragments_are_reassembled() {
    let mut world = World::new(false);
    let end = &mut world.ends[1];
    let mut sockets = [(); 2].map(|()| Socket::open(end, None, SHARED, ADDRESS).unwrap());
    joins(end, &sockets[0], GROUPS[0]);
    let to = SocketAddr::new(GROUPS[0].parse().unwrap(), SHARED);
    assert!(world.ends[0].send(to, &[7; 4000]));
    world.run(|_, frame| vec![frame]);
    assert!(sockets.iter_mut().all(|socket| socket.taken().len() == 1));
}

#[test]
fn groups_need_no_route() {
    let mut world = World::new(false);
    for (group, family) in GROUPS.into_iter().zip([0, 1]) {
        let source = world.ends[0].path.call().0.source_to(group.parse().unwrap());
        assert_eq!(source, Ok(addresses(1)[family]));
    }
}

#[test]
fn group_is_never_source_address() {
    let mut world = World::new(false);
    let mut bound = Socket::open(&mut world.ends[0], Some(GROUPS[0]), SHARED, NONE).unwrap();
    let stranger = Reuse { address: true, ..STRANGER };
    assert!(Socket::open(&mut world.ends[0], Some(GROUPS[0]), SHARED, stranger).is_err());
    let mut receiver = Socket::open(&mut world.ends[1], None, SHARED, NONE).unwrap();
    world.resolve_neighbours(addresses(2)[0]);
    bound.send(&mut world.ends[0], SocketAddr::new(addresses(2)[0], SHARED));
    world.run(|_, frame| vec![frame]);
    assert_eq!(receiver.taken(), [SocketAddr::new(addresses(1)[0], SHARED)]);
}

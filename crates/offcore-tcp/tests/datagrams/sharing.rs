//! Sockets that share a port: conflicts, and the choice of the receiving socket.

use std::net::{IpAddr, SocketAddr};

use offcore_session::Datagrams;
use offcore_session::datagram::Header;
use offcore_stats::time::Time;
use offcore_tcp::proto::{AppId, CallError, ConnId, Reuse};

use crate::world::{End, World, addresses};

const SHARED: u16 = 5353;

pub(crate) const NONE: Reuse = Reuse { address: false, port: false, user: 7 };
pub(crate) const ADDRESS: Reuse = Reuse { address: true, ..NONE };
const PORT: Reuse = Reuse { port: true, ..NONE };
pub(crate) const STRANGER: Reuse = Reuse { user: 8, address: true, port: true };

/// Opens another socket of a host.
pub(crate) struct Socket {
    pub(crate) id: ConnId,
    datagrams: Datagrams,
}

impl Socket {
    pub(crate) fn open(
        end: &mut End,
        address: Option<&str>,
        port: u16,
        reuse: Reuse,
    ) -> Result<Self, CallError> {
        let address = address.map(|address| address.parse().unwrap());
        let (stack, _) = end.path.call();
        let id = stack.open_reused_datagrams(AppId::OWN, address, port, reuse)?;
        let datagrams = Datagrams::new(stack.memory(AppId::OWN), stack.slot(id).unwrap()).unwrap();
        Ok(Self { id, datagrams })
    }

    pub(crate) fn send(&mut self, end: &mut End, to: SocketAddr) {
        let local = if to.is_ipv4() { [0; 4].into() } else { [0u16; 8].into() };
        assert!(self.datagrams.send(&Header::new(4, to, local), b"here"));
        let (stack, out) = end.path.call();
        stack.written(Time::from_micros(1), self.id, out).unwrap();
    }

    pub(crate) fn close(self, end: &mut End) {
        let (stack, out) = end.path.call();
        stack.close(Time::from_micros(1), self.id, out);
    }

    /// Returns the senders of all received datagrams.
    pub(crate) fn taken(&mut self) -> Vec<SocketAddr> {
        std::iter::from_fn(|| self.datagrams.receive(&mut [0; 9])).map(|header| header.peer).collect()
    }
}

/// Sends from host 1's socket `source` to a port of host 2's addresses.
fn send(world: &mut World, source: &mut Socket, to: &[IpAddr]) {
    for to in to {
        // The first datagram triggers address resolution.
        world.resolve_neighbours(*to);
        source.send(&mut world.ends[0], (*to, SHARED).into());
        world.run(|_, frame| vec![frame]);
    }
}

#[test]
fn families_share_a_port() {
    let mut world = World::new(false);
    let mut source = Socket::open(&mut world.ends[0], None, 0, NONE).unwrap();
    let end = &mut world.ends[1];
    let mut v4 = Socket::open(end, Some("0.0.0.0"), SHARED, NONE).unwrap();
    let mut v6 = Socket::open(end, Some("::"), SHARED, NONE).unwrap();
    assert_eq!(Socket::open(end, None, SHARED, NONE).err(), Some(CallError::InUse), "a dual-stack socket");
    let to = addresses(2);
    send(&mut world, &mut source, &to);
    assert_eq!([v4.taken().len(), v6.taken().len()], [1, 1]);
    // Each socket sends over its own family only.
    for (socket, to) in [(&mut v4, addresses(1)[1]), (&mut v6, addresses(1)[0])] {
        socket.send(&mut world.ends[1], (to, 7).into());
    }
    world.run(|_, frame| vec![frame]);
    assert_eq!(world.ends[1].path.stack.counts().datagrams_refused, 2);
    // After both close, a dual-stack socket can bind the port.
    v4.close(&mut world.ends[1]);
    v6.close(&mut world.ends[1]);
    assert!(Socket::open(&mut world.ends[1], None, SHARED, NONE).is_ok());
}

#[test]
fn bind_conflicts_match_linux() {
    let (any, any4, any6, own) = (None, Some("0.0.0.0"), Some("::"), Some("10.0.0.2"));
    for (first, one, second, other, conflict) in [
        (any4, NONE, any6, NONE, false),
        (any4, NONE, any, NONE, true),
        (any6, NONE, any, NONE, true),
        (any, NONE, own, NONE, true),
        (own, NONE, any4, NONE, true),
        (own, NONE, any6, NONE, false),
        (own, NONE, own, NONE, true),
        (own, NONE, Some("2001:db8::2"), NONE, false),
        // Both sockets need the same option.
        (own, ADDRESS, own, ADDRESS, false),
        (own, PORT, own, PORT, false),
        (own, ADDRESS, own, NONE, true),
        (own, ADDRESS, own, PORT, true),
        (any, PORT, own, PORT, false),
        // Another user's sockets are never shared.
        (own, Reuse { address: true, ..PORT }, own, STRANGER, true),
        (any4, ADDRESS, own, STRANGER, true),
    ] {
        let mut world = World::new(false);
        let end = &mut world.ends[1];
        Socket::open(end, first, SHARED, one).unwrap();
        let error = Socket::open(end, second, SHARED, other).err();
        let expected = conflict.then_some(CallError::InUse);
        assert_eq!(error, expected, "{first:?} {one:?} and {second:?} {other:?}");
    }
}

#[test]
fn connected_socket_excludes_other_users() {
    let mut world = World::new(false);
    let end = &mut world.ends[1];
    let connected = Socket::open(end, None, SHARED, NONE).unwrap();
    let peer = SocketAddr::new(addresses(1)[0], 9);
    end.path.call().0.connect_datagrams(Time::from_micros(1), connected.id, Some(peer)).unwrap();
    // Only the user of the socket may rely on its connection, which can change.
    assert_eq!(Socket::open(end, Some("::"), SHARED, STRANGER).err(), Some(CallError::InUse));
    assert!(Socket::open(end, Some("::"), SHARED, NONE).is_ok());
}

#[test]
fn closest_match_receives() {
    let mut world = World::new(false);
    let to = addresses(2)[0];
    let [mut near, mut far] = [(); 2].map(|()| Socket::open(&mut world.ends[0], None, 0, NONE).unwrap());
    let end = &mut world.ends[1];
    let mut all = Socket::open(end, None, SHARED, ADDRESS).unwrap();
    let mut family = Socket::open(end, Some("0.0.0.0"), SHARED, ADDRESS).unwrap();
    let mut older = Socket::open(end, Some("10.0.0.2"), SHARED, ADDRESS).unwrap();
    let mut newer = Socket::open(end, Some("10.0.0.2"), SHARED, ADDRESS).unwrap();
    send(&mut world, &mut near, &[to]);
    assert_eq!([older.taken().len(), newer.taken().len()], [0, 1], "the newest of one address");
    let peer = SocketAddr::new(addresses(1)[0], world.port_of(0, near.id));
    let connect = |world: &mut World, socket: &Socket, peer| {
        world.ends[1].path.call().0.connect_datagrams(Time::from_micros(1), socket.id, peer)
    };
    assert_eq!(connect(&mut world, &all, Some(peer)), Ok(Some(to)));
    send(&mut world, &mut near, &[to]);
    send(&mut world, &mut far, &[to]);
    assert_eq!(all.taken(), [peer], "the connected one has its peer's");
    assert_eq!(newer.taken().len(), 1, "and only its own");
    newer.close(&mut world.ends[1]);
    send(&mut world, &mut far, &[to]);
    assert_eq!(older.taken().len(), 1);
    older.close(&mut world.ends[1]);
    send(&mut world, &mut far, &[to]);
    assert_eq!(family.taken().len(), 1, "all of one family before all");
    family.close(&mut world.ends[1]);
    let refused = |world: &mut World, source: &mut Socket, to| {
        let before = world.ends[1].path.stack.counts().datagrams_received;
        send(world, source, &[to]);
        // One datagram comes from neighbour resolution.
        world.ends[1].path.stack.counts().datagrams_received == before + 1
    };
    assert!(refused(&mut world, &mut far, to), "only the connected one is left");
    connect(&mut world, &all, None).unwrap();
    send(&mut world, &mut far, &addresses(2));
    assert_eq!(all.taken().len(), 2, "it takes all again");
    all.close(&mut world.ends[1]);
    assert!(refused(&mut world, &mut near, to));
}

/// A server with one socket per client connects the listening socket to the client and opens another one.
#[test]
fn connected_socket_frees_its_port() {
    let mut world = World::new(false);
    let to = addresses(2)[0];
    let mut servers: Vec<Socket> = Vec::new();
    let mut clients = [(); 5].map(|()| Socket::open(&mut world.ends[0], None, 0, NONE).unwrap());
    let mut waiting = Socket::open(&mut world.ends[1], None, SHARED, ADDRESS).unwrap();
    for client in &mut clients {
        send(&mut world, client, &[to]);
        let [peer] = waiting.taken()[..] else { panic!("one has come") };
        let (stack, _) = world.ends[1].path.call();
        stack.connect_datagrams(Time::from_micros(1), waiting.id, Some(peer)).unwrap();
        servers.push(waiting);
        waiting = Socket::open(&mut world.ends[1], None, SHARED, ADDRESS).unwrap();
    }
    for (client, server) in clients.iter_mut().zip(&mut servers) {
        send(&mut world, client, &[to]);
        assert_eq!(server.taken(), [SocketAddr::new(addresses(1)[0], world.port_of(0, client.id))]);
    }
    assert!(waiting.taken().is_empty());
}

#[test]
fn reuse_port_spreads_clients() {
    let mut world = World::new(false);
    let to = addresses(2)[0];
    let mut servers = [(); 4].map(|()| Socket::open(&mut world.ends[1], None, SHARED, PORT).unwrap());
    let clients = 40_000..40_060;
    let mut rounds = Vec::new();
    for _ in 0..2 {
        for port in clients.clone() {
            let mut client = Socket::open(&mut world.ends[0], None, port, NONE).unwrap();
            send(&mut world, &mut client, &[to]);
            client.close(&mut world.ends[0]);
        }
        rounds.push(servers.each_mut().map(|server| {
            let mut taken = server.taken();
            let (stack, out) = world.ends[1].path.call();
            stack.consumed(Time::from_micros(1), server.id, out).unwrap();
            taken.sort();
            taken
        }));
    }
    assert_eq!(rounds[0], rounds[1], "a client stays with its server");
    assert_eq!(rounds[0].iter().map(Vec::len).sum::<usize>(), clients.len());
    assert!(rounds[0].iter().all(|taken| taken.len() > 3), "{:?}", rounds[0].each_ref().map(Vec::len));
}

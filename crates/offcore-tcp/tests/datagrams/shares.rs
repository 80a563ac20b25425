//! Blocked ports and workers leave packet buffers to others.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;

use offcore_mem::{BURST, Burst, HEADROOM, Hugepages, Pool};
use offcore_session::{Reader, Writer};
use offcore_stats::time::{Micros, Time};
use offcore_tcp::proto::{AppId, ConnId, Event, Share};
use offcore_wire::Sum;
use offcore_wire::virtio_net::{self, NetHeader, Offloads};

use crate::sharing::{NONE, Socket};
use crate::world::{End, PORT, World, addresses};

/// Returns both fragments of a datagram with the identification `number`.
fn numbered(parts: &[Vec<u8>], number: u16) -> Vec<Vec<u8>> {
    let mut parts = parts.to_vec();
    for part in &mut parts {
        part[18..20].copy_from_slice(&number.to_be_bytes());
        part[24..26].fill(0);
        let sum = Sum::of(&part[14..34]).checksum();
        part[24..26].copy_from_slice(&sum.to_be_bytes());
    }
    // A different source port may select a different worker. The checksum is removed.
    parts[0][34..36].copy_from_slice(&number.to_be_bytes());
    parts[0][40..42].fill(0);
    parts
}

#[test]
fn reassembled_datagrams_hold_few_buffers() {
    let mut world = World::new(false);
    let parts = world.frames_of(addresses(2)[0], &[7; 1600]);
    assert_eq!(parts.len(), 2);
    let pool = Pool::new(4096, 2048, Hugepages::None).unwrap();
    let mut end = End::shared(2, pool, Share { worker: 0, of: 8 });
    let (before, mut number) = (end.cache.available(), 0u16);
    for round in 0..100 {
        let now = Time::from_secs(3) + round * Micros::new(100);
        // One burst comes from the worker's own queue, and one from each ring of the other seven workers.
        for _ in 0..8 {
            let mut burst = Burst::new();
            while burst.len() + 2 <= BURST {
                number = number.wrapping_add(1);
                for frame in numbered(&parts, number) {
                    let Some(mut packet) = end.cache.take_sized(HEADROOM, frame.len()) else {
                        panic!("no packet buffer is left in round {round}");
                    };
                    packet.bytes_mut().copy_from_slice(&frame);
                    burst.push(packet);
                }
            }
            end.with(|path, ctx| path.receive(ctx, now, 0, &mut burst));
        }
        // Not all packets are passed on, because the rings of the other workers are full.
        let mut burst = Burst::new();
        end.path.take_elsewhere(0, &mut burst);
        assert!(!burst.is_empty());
        end.cache.free_all(burst.drain(..));
        end.turn(now);
        assert!(before - end.cache.available() <= 4096 / 8 / 4, "in round {round}");
    }
    assert!(end.path.stats().starved > 0);
    loop {
        let mut burst = Burst::new();
        end.path.take_elsewhere(0, &mut burst);
        if burst.is_empty() {
            break;
        }
        end.cache.free_all(burst.drain(..));
    }
    end.turn(Time::from_secs(40));
    assert_eq!(end.cache.available(), before);
}

/// A connection's FIFOs.
struct Fifos {
    conn: ConnId,
    reader: Reader,
    writer: Writer,
}

impl Fifos {
    fn new(end: &mut End, conn: ConnId) -> Self {
        let (stack, _) = end.path.call();
        let (memory, slot) = (stack.memory(AppId::OWN), stack.slot(conn).unwrap());
        let reader = Reader::new(Arc::clone(memory), slot).unwrap();
        Self { conn, reader, writer: Writer::new(Arc::clone(memory), slot).unwrap() }
    }

    fn write(&mut self, end: &mut End, now: Time) {
        if self.writer.space() > 0 {
            self.writer.write(&[0; 256 << 10]);
            let (stack, out) = end.path.call();
            let _ = stack.written(now, self.conn, out);
        }
    }

    fn read(&mut self, end: &mut End, now: Time) -> usize {
        let n = self.reader.available();
        if n > 0 {
            self.reader.consume(n);
            let (stack, out) = end.path.call();
            let _ = stack.consumed(now, self.conn, out);
        }
        n
    }
}

/// Receives a frame on interface `iface`, from a port that completes checksums and coalesces segments.
fn feed(end: &mut End, now: Time, iface: u8, frame: &[u8]) {
    let mut packet = end.cache.take_chain(HEADROOM, frame.len()).expect("a buffer for what comes");
    let mut rest = frame;
    for segment in end.cache.pool().segments_mut(&mut packet) {
        let (here, behind) = rest.split_at(segment.len());
        segment.copy_from_slice(here);
        rest = behind;
    }
    let header = NetHeader { flags: virtio_net::VIRTIO_NET_HDR_F_NEEDS_CSUM, ..NetHeader::default() };
    packet.headroom_mut(virtio_net::HEADER_LEN).copy_from_slice(&header.to_bytes());
    packet.set_offload(true);
    let mut burst = Burst::new();
    burst.push(packet);
    end.with(|path, ctx| path.receive(ctx, now, iface, &mut burst));
}

/// Takes the frames that wait for the port of interface `iface`.
fn sent(end: &mut End, iface: u8) -> Vec<Vec<u8>> {
    let packets: Vec<_> = end.path.to_send(iface).drain(..).collect();
    let pool = end.cache.pool();
    let frames = packets.iter().map(|packet| pool.segments(packet).collect::<Vec<_>>().concat()).collect();
    end.cache.free_all(packets);
    frames
}

/// A server with two ports sends streams to one client behind each port. Then the first port accepts no more packets.
#[test]
fn hung_port_leaves_buffers_to_others() {
    const CLIENTS: usize = 12;
    let pools = [2048, 8192, 8192].map(|len| Pool::new(len, 2048, Hugepages::None).unwrap());
    let mut server = End::streaming(&[[10, 0, 0, 1], [10, 0, 1, 1]], pools[0]);
    let mut clients = [[10, 0, 0, 2], [10, 0, 1, 2]].map(|address| End::streaming(&[address], pools[1]));
    let tso = Offloads { checksum: true, tso4: true, tso6: true, ..Offloads::default() };
    server.path.set_link(0, tso, true);
    server.path.set_link(1, tso, true);
    clients.iter_mut().for_each(|end| end.path.set_link(0, tso, true));
    let listener = server.path.call().0.listen(AppId::OWN, None, 80, 1024, false).unwrap();
    let mut connections: [Vec<Fifos>; 2] = Default::default();
    for (number, (end, connections)) in clients.iter_mut().zip(&mut connections).enumerate() {
        let to = SocketAddr::from(([10, 0, number as u8, 1], 80));
        for _ in 0..CLIENTS {
            let (stack, out) = end.path.call();
            let conn = stack.connect(Time::from_micros(1), AppId::OWN, None, to, out).unwrap();
            connections.push(Fifos::new(end, conn));
        }
    }
    let mut accepted: Vec<Fifos> = Vec::new();
    let (all, mut least, mut got, mut longest) = (server.cache.available(), usize::MAX, 0, 0);
    let mut wires: [VecDeque<(Time, Vec<u8>)>; 2] = Default::default();
    for now in (1..3_000_000).step_by(1000).map(Time::from_micros) {
        let hung = now > Time::from_millis(1500);
        while let Some(conn) = server.path.call().0.accept(listener) {
            accepted.push(Fifos::new(&mut server, conn));
        }
        accepted.iter_mut().for_each(|fifos| fifos.write(&mut server, now));
        server.with(|path, ctx| {
            ctx.mover.poll(ctx.clock);
            path.turn(ctx, now, BURST);
        });
        least = least.min(server.cache.available());
        for (number, client) in clients.iter_mut().enumerate() {
            for fifos in &mut connections[number] {
                let read = fifos.read(client, now);
                // After half a second, all data that the hung port blocks is known to be lost.
                got += if number == 1 && now > Time::from_secs(2) { read } else { 0 };
            }
            for frame in client.turn(now) {
                feed(&mut server, now, number as u8, &frame);
            }
            let wire = &mut wires[number];
            if !hung || number == 1 {
                let frames = sent(&mut server, number as u8).into_iter();
                wire.extend(frames.map(|frame| (now + Micros::from_millis(5), frame)));
            }
            while let Some((_, frame)) = wire.pop_front_if(|(at, _)| *at <= now) {
                feed(client, now, 0, &frame);
            }
        }
        longest = longest.max(server.path.to_send(0).buffers());
        for end in [&mut server].into_iter().chain(&mut clients) {
            end.path.take_events(&mut end.events);
            end.events.retain(|event| matches!(event, Event::Closed(..)));
        }
    }
    assert_eq!(accepted.len(), 2 * CLIENTS);
    assert!(longest > all / 16, "nothing was queued: {longest} buffers");
    assert!(longest <= all / 4 + 64, "the hung port has {longest} of {all} buffers");
    assert!(least > all / 4, "{least} of {all} buffers were left");
    assert!(got > 20_000_000, "the other port's clients got {got} bytes");
}

/// A port with a full queue delays answers, but drops none.
#[test]
fn answers_wait_for_hung_port() {
    const CLIENTS: usize = 2500;
    let pools = [(); 2].map(|()| Pool::new(8192, 2048, Hugepages::None).unwrap());
    let mut server = End::streaming(&[[10, 0, 0, 1]], pools[0]);
    let mut client = End::streaming(&[[10, 0, 0, 2]], pools[1]);
    let listener = server.path.call().0.listen(AppId::OWN, None, 80, 4096, false).unwrap();
    let connect = |client: &mut End, now| {
        let (stack, out) = client.path.call();
        let conn = stack.connect(now, AppId::OWN, None, ([10, 0, 0, 1], 80).into(), out).unwrap();
        Fifos::new(client, conn)
    };
    let mut connections = vec![connect(&mut client, Time::from_micros(1))];
    let (mut accepted, mut got, mut longest) = (Vec::new(), 0, 0);
    for now in (1..900_000).step_by(1000).map(Time::from_micros) {
        if now == Time::from_micros(100_001) {
            connections.extend((1..CLIENTS).map(|_| connect(&mut client, now)));
        }
        if now == Time::from_micros(300_001) {
            connections.iter_mut().for_each(|fifos| fifos.write(&mut client, now));
        }
        for frame in client.turn(now) {
            feed(&mut server, now, 0, &frame);
        }
        while let Some(conn) = server.path.call().0.accept(listener) {
            accepted.push(Fifos::new(&mut server, conn));
        }
        got += accepted.iter_mut().map(|fifos| fifos.read(&mut server, now)).sum::<usize>();
        server.with(|path, ctx| {
            ctx.mover.poll(ctx.clock);
            path.turn(ctx, now, BURST);
        });
        let hung =
            (100_000..150_000).contains(&now.as_micros()) || (300_000..350_000).contains(&now.as_micros());
        longest = longest.max(server.path.to_send(0).len());
        let frames = if hung { Vec::new() } else { sent(&mut server, 0) };
        frames.iter().for_each(|frame| feed(&mut client, now, 0, frame));
        for end in [&mut server, &mut client] {
            end.path.take_events(&mut end.events);
            end.events.clear();
        }
    }
    assert_eq!(accepted.len(), CLIENTS);
    assert!(got >= 4096 * CLIENTS, "{got} bytes have come");
    assert_eq!([&server, &client].map(|end| end.path.stats().starved), [0, 0]);
    assert!((500..600).contains(&longest), "{longest} packets waited");
}

/// A hung port delays the datagrams of its sockets, but drops none. Meanwhile, sockets on another port continue to
/// send.
#[test]
fn datagrams_wait_for_hung_port() {
    const DATAGRAMS: usize = 2000;
    let pools = [8192, 2048, 2048].map(|len| Pool::new(len, 2048, Hugepages::None).unwrap());
    let mut server = End::streaming(&[[10, 0, 0, 1], [10, 0, 1, 1]], pools[0]);
    let mut clients = [[10, 0, 0, 2], [10, 0, 1, 2]].map(|address| End::streaming(&[address], pools[1]));
    let mut other = Socket::open(&mut server, None, 99, NONE).unwrap();
    let peers = [0, 1].map(|number| SocketAddr::from(([10, 0, number, 2], PORT)));
    let (mut sent_by, mut got, mut meanwhile) = ([0; 2], [0; 2], 0);
    for now in (1..600_000).step_by(1000).map(Time::from_micros) {
        let hung = (100_000..300_000).contains(&now.as_micros());
        // The first datagrams trigger neighbour resolution.
        let most = if now < Time::from_millis(50) { 1 } else { DATAGRAMS };
        while sent_by[0] < most && server.send(peers[0], b"here") {
            sent_by[0] += 1;
        }
        if hung && sent_by[1] < DATAGRAMS / 10 || sent_by[1] == 0 {
            other.send(&mut server, peers[1]);
            sent_by[1] += 1;
        }
        server.with(|path, ctx| {
            ctx.mover.poll(ctx.clock);
            path.turn(ctx, now, BURST);
        });
        for (number, client) in clients.iter_mut().enumerate() {
            let answers = client.turn(now);
            answers.iter().for_each(|frame| feed(&mut server, now, number as u8, frame));
            if number == 1 || !(50_000..300_000).contains(&now.as_micros()) {
                let frames = sent(&mut server, number as u8);
                frames.iter().for_each(|frame| client.receive(now, frame));
            }
            got[number] += std::iter::from_fn(|| client.take()).count();
        }
        if hung {
            meanwhile = got[1];
        }
    }
    assert_eq!(sent_by, [DATAGRAMS, DATAGRAMS / 10]);
    assert_eq!(got, sent_by, "{:?}", server.path.stats());
    assert_eq!(meanwhile, DATAGRAMS / 10);
    assert_eq!(server.path.stats().starved, 0);
}

#[test]
fn datagrams_leave_room_to_streams() {
    let pools = [(); 2].map(|()| Pool::new(8192, 2048, Hugepages::None).unwrap());
    let mut server = End::streaming(&[[10, 0, 0, 1]], pools[0]);
    let mut client = End::streaming(&[[10, 0, 0, 2]], pools[1]);
    let listener = server.path.call().0.listen(AppId::OWN, None, 80, 16, false).unwrap();
    let (stack, out) = client.path.call();
    let conn =
        stack.connect(Time::from_micros(1), AppId::OWN, None, ([10, 0, 0, 1], 80).into(), out).unwrap();
    let mut connection = Fifos::new(&mut client, conn);
    let (mut accepted, mut got, mut datagrams) = (Vec::new(), 0, 0);
    for now in (1..400_000).step_by(1000).map(Time::from_micros) {
        while let Some(conn) = server.path.call().0.accept(listener) {
            accepted.push(Fifos::new(&mut server, conn));
        }
        accepted.iter_mut().for_each(|fifos| fifos.write(&mut server, now));
        for _ in 0..2 * BURST {
            server.send(([10, 0, 0, 2], PORT).into(), b"d");
        }
        server.with(|path, ctx| {
            ctx.mover.poll(ctx.clock);
            path.turn(ctx, now, BURST);
        });
        sent(&mut server, 0).iter().for_each(|frame| feed(&mut client, now, 0, frame));
        client.turn(now).iter().for_each(|frame| feed(&mut server, now, 0, frame));
        got += connection.read(&mut client, now);
        datagrams += std::iter::from_fn(|| client.take()).count();
    }
    // Each gets half of 400 bursts.
    assert!(got > 150 * BURST * 1000, "{got} bytes of the stream");
    assert!(datagrams > 150 * BURST, "{datagrams} datagrams");
}

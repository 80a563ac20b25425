//! Attacks by unknown hosts, peers and stations on the link. They must not hold memory, starve others, or end or slow
//! down connections whose packets they cannot see.

use std::net::Ipv4Addr;

use offcore_stats::time::{Micros, Time};
use offcore_tcp::proto::{AppId, Config, ConnId, DropReason};
use offcore_wire::{Arp, ArpOperation, EtherType, MacAddr, TcpFlags, TcpHeader, TcpOptions, arp, ethernet};

use crate::frame::{self, append, forge};
use crate::host::{Host, mac};
use crate::hostile::peer::{self, THEIRS};
use crate::world::World;

const SECOND: Micros = Micros::from_secs(1);
const ISN: u32 = 100;

fn header(port: u16, seq: u32, ack: u32, flags: TcpFlags, window: u16) -> TcpHeader {
    TcpHeader { src_port: port, dst_port: 7, seq, ack, flags, window, urgent: 0 }
}

fn send(
    host: &mut Host,
    now: Time,
    from: Ipv4Addr,
    header: &TcpHeader,
    options: &TcpOptions,
    payload: &[u8],
) {
    let mut frame = forge(&peer::front(), from, header, options);
    if !payload.is_empty() {
        append(&mut frame, payload);
    }
    host.receive(now, &mut [frame]);
}

/// Answers an ARP request for the peer.
fn resolve(host: &mut Host, now: Time) {
    if host.frames.iter().any(|frame| peer::asks(frame)) {
        host.receive(now, &mut [peer::arp(ArpOperation::Reply)]);
    }
}

/// Performs a handshake. Returns the host's next sequence number and its connection.
fn perform_handshake(
    host: &mut Host,
    now: Time,
    port: u16,
    window: u16,
    scale: Option<u8>,
) -> Option<(u32, ConnId)> {
    let options = TcpOptions { mss: Some(1460), window_scale: scale, ..TcpOptions::default() };
    host.frames.clear();
    let accepted = host.accepted.len();
    host.receive(now, &mut [peer::arp(ArpOperation::Request)]);
    send(host, now, THEIRS, &header(port, ISN, 0, TcpFlags::SYN, window), &options, &[]);
    let answer =
        host.frames.iter().filter_map(|frame| frame::read(frame)).find(|seen| seen.ports.1 == port)?;
    let isn = answer.seq.wrapping_add(1);
    send(host, now, THEIRS, &header(port, ISN + 1, isn, TcpFlags::ACK, window), &TcpOptions::NONE, &[]);
    host.frames.clear();
    (host.accepted.len() > accepted).then(|| (isn, host.accepted[accepted]))
}

fn host(config: Config) -> Host {
    let mut host = Host::new(1, 1500, config);
    host.listen(7, 4096);
    host.receive(Time::from_secs(1), &mut [peer::arp(ArpOperation::Request)]);
    host.frames.clear();
    host
}

fn arp_from(ip: Ipv4Addr) -> Vec<u8> {
    let mut frame = vec![0; ethernet::HEADER_LEN + arp::LEN];
    let (link, message) = frame.split_first_chunk_mut().unwrap();
    ethernet::write_header(link, mac(1), mac(66), EtherType::ARP);
    let said = Arp {
        operation: ArpOperation::Request,
        sender_mac: mac(66),
        sender_ip: ip,
        target_mac: MacAddr([0; 6]),
        target_ip: Ipv4Addr::new(10, 0, 0, 1),
    };
    said.write(message.first_chunk_mut().unwrap());
    frame
}

/// Returns the identification of the host's packets, as an attacker can see it by sending to a closed port.
fn ident(host: &mut Host, now: Time, me: Ipv4Addr) -> u16 {
    host.frames.clear();
    let mut question = header(5555, 1, 1, TcpFlags::ACK, 1000);
    question.dst_port = 9999;
    send(host, now, me, &question, &TcpOptions::NONE, &[]);
    let mine = me.octets();
    let frame = host.frames.iter().find(|frame| frame[30..34] == mine).expect("a reset");
    u16::from_be_bytes([frame[18], frame[19]])
}

fn udp(from: Ipv4Addr, ports: (u16, u16)) -> Vec<u8> {
    let mut frame = peer::front();
    frame[23] = 17;
    frame[26..30].copy_from_slice(&from.octets());
    frame.extend_from_slice(&ports.0.to_be_bytes());
    frame.extend_from_slice(&ports.1.to_be_bytes());
    frame.extend_from_slice(&[0, 12, 0, 0, 1, 2, 3, 4]);
    let len = (frame.len() - 14) as u16;
    frame[16..18].copy_from_slice(&len.to_be_bytes());
    frame[24..26].fill(0);
    let sum = offcore_wire::Sum::of(&frame[14..34]).checksum();
    frame[24..26].copy_from_slice(&sum.to_be_bytes());
    frame
}

/// The application has closed a connection whose peer keeps its window closed and answers probes.
#[test]
fn zero_window_orphan_times_out() {
    let mut host = host(Config::default());
    let mut now = Time::from_secs(2);
    let (isn, conn) = perform_handshake(&mut host, now, 4000, 0, None).unwrap();
    host.send(now, conn, &vec![7; 256 << 10]);
    host.release(now, conn);
    let mut next = now;
    while now < Time::ZERO + 3600 * SECOND && host.stack.connections() > 0 {
        now = next.max(now + Micros::new(1));
        next = host.poll(now).unwrap_or(Time::NEVER);
        resolve(&mut host, now);
        let asked = host.frames.drain(..).filter_map(|frame| frame::read(&frame)).count();
        if asked > 0 {
            send(
                &mut host,
                now,
                THEIRS,
                &header(4000, ISN + 1, isn, TcpFlags::ACK, 0),
                &TcpOptions::NONE,
                &[],
            );
            next = now + Micros::new(1);
        }
        if next == Time::NEVER {
            break;
        }
    }
    // Five minutes, and a second per KiB of the data.
    assert_eq!((now.as_secs() - 2, host.stack.connections()), (300 + 256, 0));
}

/// A peer with many cheap connections must not prevent the service of others.
#[test]
fn out_of_order_flood_spares_others() {
    let mut host = host(Config::default());
    let now = Time::from_secs(2);
    let (mut packets, mut conns) = (0, 0);
    for port in 2000..4000u16 {
        let Some((isn, _)) = perform_handshake(&mut host, now, port, u16::MAX, Some(7)) else { break };
        (packets, conns) = (packets + 2, conns + 1);
        for block in 0..4u32 {
            let seq = ISN + 1 + 10 + block * 65_536;
            send(
                &mut host,
                now,
                THEIRS,
                &header(port, seq.min(ISN + 262_000), isn, TcpFlags::ACK, 512),
                &TcpOptions::NONE,
                b"x",
            );
            packets += 1;
        }
        host.frames.clear();
    }
    println!(
        "{conns} connections, {packets} packets; drops {:?}",
        host.stack.drops().iter().filter(|d| d.1 > 0).collect::<Vec<_>>()
    );
    // The attacker is silent for an hour.
    let mut later = now;
    while later < now + 3600 * SECOND {
        later += SECOND;
        host.poll(later);
        host.frames.clear();
    }
    let honest = perform_handshake(&mut host, later, 60_000, u16::MAX, Some(7));
    assert!(honest.is_some(), "who connects an hour later is not served");
    let (_, conn) = honest.unwrap();
    host.send(later, conn, &vec![7; 200_000]);
    assert!(
        host.sessions[&conn].sent > 100_000,
        "{} of 200000 bytes can be written",
        host.sessions[&conn].sent
    );
}

/// Connections receive bytes behind holes. The last free memory is kept for segments that applications can read next.
#[test]
fn segments_below_holes_have_priority() {
    const CONNECTIONS: u16 = 300;
    let mut host = host(Config { memory: 4 << 20, ..Config::default() });
    let mut now = Time::from_secs(2);
    let mut conns = Vec::new();
    for port in 2000..2000 + CONNECTIONS {
        conns.push((port, perform_handshake(&mut host, now, port, u16::MAX, Some(7)).unwrap()));
        if port % 8 == 0 {
            // Quiet connections keep their windows, but promise no memory.
            for _ in 0..20 {
                now += SECOND / 4;
                host.poll(now);
            }
        }
    }
    let drops = |host: &Host| host.stack.drops().get(DropReason::NoSpace);
    let mut sent = 0;
    for (port, (isn, _)) in &conns {
        let segment = header(*port, ISN + 1 + 40_000, *isn, TcpFlags::ACK, 512);
        send(&mut host, now, THEIRS, &segment, &TcpOptions::NONE, b"x");
        sent += 1;
    }
    let dropped = drops(&host);
    assert!((20..sent - 20).contains(&dropped), "{dropped} of {sent} segments behind holes");
    for (port, (isn, conn)) in &conns {
        let segment = header(*port, ISN + 1, *isn, TcpFlags::ACK, 512);
        send(&mut host, now, THEIRS, &segment, &TcpOptions::NONE, b"next");
        assert_eq!(host.sessions[conn].received, b"next", "port {port}");
    }
    assert_eq!(drops(&host), dropped);
}

/// Returns the number of segments that each of five calls sends when many timers are due.
fn sent_per_call(host: &mut Host, now: Time) -> [usize; 5] {
    [(); 5].map(|()| {
        host.stack.timers(now, &mut host.out);
        host.out.controls.drain(..).filter(|sent| frame::read(sent.bytes()).is_some()).count()
    })
}

#[test]
fn timers_of_a_call_are_limited() {
    const COUNT: u16 = 200;
    const CALLS: [usize; 5] = [64, 64, 64, 8, 0];
    let now = Time::from_secs(2);
    let mut half_open = host(Config::default());
    for port in 2000..2000 + COUNT {
        send(&mut half_open, now, THEIRS, &header(port, ISN, 0, TcpFlags::SYN, 512), &TcpOptions::NONE, &[]);
    }
    assert_eq!(sent_per_call(&mut half_open, now + 2 * SECOND), CALLS, "handshakes");
    let mut opening = host(Config::default());
    let to = format!("{THEIRS}:9");
    for _ in 0..COUNT {
        opening.connect(now, &to);
    }
    assert_eq!(sent_per_call(&mut opening, now + 2 * SECOND), CALLS, "connections");
    let mut closed = host(Config::default());
    for port in 2000..2000 + COUNT {
        let (isn, conn) = perform_handshake(&mut closed, now, port, u16::MAX, Some(7)).unwrap();
        closed.release(now, conn);
        closed.poll(now);
        let fin = header(port, ISN + 1, isn.wrapping_add(1), TcpFlags::ACK | TcpFlags::FIN, 512);
        send(&mut closed, now, THEIRS, &fin, &TcpOptions::NONE, &[]);
    }
    assert_eq!((closed.stack.connections(), closed.stack.flows()), (0, COUNT.into()), "in TIME-WAIT");
    let ended = CALLS.map(|_| {
        let before = closed.stack.flows();
        closed.stack.timers(now + 61 * SECOND, &mut closed.out);
        before - closed.stack.flows()
    });
    assert_eq!(ended, CALLS, "connections in TIME-WAIT");
}

/// When memory is short, an idle connection occupies only its slot.
#[test]
fn idle_connections_do_not_exhaust_memory() {
    let mut host = host(Config::default());
    let mut now = Time::from_secs(2);
    for port in 1024..31_024u16 {
        assert!(
            perform_handshake(&mut host, now, port, u16::MAX, Some(7)).is_some(),
            "{} connections",
            port - 1024
        );
        if port % 256 == 0 {
            now += 3 * SECOND;
            for _ in 0..40 {
                host.poll(now);
            }
            host.frames.clear();
        }
    }
    let (_, conn) = perform_handshake(&mut host, now, 60_000, u16::MAX, Some(7)).unwrap();
    host.send(now, conn, &vec![7; 200_000]);
    now += SECOND;
    host.poll(now);
    // Memory is scarce, but more than the initial window fits.
    let sent = host.sessions[&conn].sent;
    assert!(sent > 20_000, "{sent} of 200000 bytes can be written");
}

/// Data for a peer is only sent to its own MAC address.
#[test]
fn payload_is_not_broadcast() {
    let mut world = World::new(1, 1500, Config::default());
    world.hosts[0].listen(7, 16);
    world.run(2 * SECOND);
    let conn = world.hosts[1].connect(world.now, "10.0.0.1:7");
    world.run(SECOND);
    let there = world.hosts[0].accepted[0];
    world.run(700 * SECOND);
    world.trace.clear();
    let now = world.now;
    world.hosts[0].send(now, there, b"a secret of two");
    world.run(SECOND);
    let _ = conn;
    let leaked = world.trace.iter().filter(|(_, _, frame)| {
        frame[..6] == [0xff; 6] && frame.windows(8).any(|bytes| bytes == b"a secret")
    });
    assert_eq!(leaked.count(), 0, "payload was sent to the broadcast station");
}

/// A station on the link claims many addresses.
#[test]
fn arp_flood_keeps_used_neighbours() {
    let mut world = World::new(1, 1500, Config::default());
    world.hosts[0].listen(7, 16);
    world.run(2 * SECOND);
    world.hosts[1].connect(world.now, "10.0.0.1:7");
    world.run(SECOND);
    let there = world.hosts[0].accepted[0];
    let now = world.now;
    world.hosts[0].send(now, there, b"hello");
    world.run(2 * SECOND);
    let now = world.now;
    for number in 0..(1u32 << 14) + 1 {
        // These addresses are not even part of the link's network.
        world.hosts[0].receive(now, &mut [arp_from(Ipv4Addr::from(0xac10_0000 + number))]);
    }
    world.hosts[0].frames.clear();
    world.trace.clear();
    world.hosts[0].send(now, there, b"a secret of two");
    world.run(SECOND / 1000);
    let payload =
        world.trace.iter().filter(|(_, _, frame)| frame.windows(8).any(|bytes| bytes == b"a secret"));
    let broadcast: Vec<bool> = payload.map(|(_, _, frame)| frame[..6] == [0xff; 6]).collect();
    assert_eq!(broadcast, [false], "a neighbour in use was displaced");
}

/// By sending to a closed port, an attacker must not learn from IP identifications whether the host has sent packets to
/// others. The attacker could use this to find the window of a connection and to reset it.
#[test]
fn ip_identification_is_per_destination() {
    let me = Ipv4Addr::new(192, 168, 0, 66);
    let mut host = host(Config::default());
    let now = Time::from_secs(2);
    perform_handshake(&mut host, now, 4000, u16::MAX, None).unwrap();
    let before = ident(&mut host, now, me);
    // A reset in the window with the peer's source address causes a challenge ACK.
    host.frames.clear();
    send(&mut host, now, THEIRS, &header(4000, ISN + 100, 0, TcpFlags::RST, 0), &TcpOptions::NONE, &[]);
    assert_eq!(host.frames.len(), 1);
    assert_eq!(ident(&mut host, now, me), before);
}

/// A segment has the maximum length of an IP packet, and most of it was received before.
#[test]
fn long_overlapping_segment_is_trimmed() {
    let mut host = host(Config::default());
    let now = Time::from_secs(2);
    let (isn, conn) = perform_handshake(&mut host, now, 4000, u16::MAX, Some(7)).unwrap();
    let bytes: Vec<u8> = (0..65_495u32).map(|at| (at / 256) as u8).collect();
    let first = header(4000, ISN + 1, isn, TcpFlags::ACK, 512);
    send(&mut host, now, THEIRS, &first, &TcpOptions::NONE, &bytes[..65_485]);
    send(&mut host, now, THEIRS, &first, &TcpOptions::NONE, &bytes);
    let received = &host.sessions[&conn].received;
    assert_eq!(received.len(), bytes.len());
    assert_eq!(received[65_485..], bytes[65_485..], "bytes of the headers are in the stream");
}

/// Short segments that follow a long one are still acknowledged in time (RFC 9293, MUST-58, SHLD-18).
#[test]
fn long_segment_delays_no_later_acks() {
    let mut host = host(Config::default());
    let now = Time::from_secs(2);
    let (isn, _) = perform_handshake(&mut host, now, 4000, u16::MAX, Some(7)).unwrap();
    let mut seq = ISN + 1;
    let mut push = |host: &mut Host, now: Time, len: usize| {
        let sent = header(4000, seq, isn, TcpFlags::ACK, 512);
        send(host, now, THEIRS, &sent, &TcpOptions::NONE, &vec![7; len]);
        seq += len as u32;
    };
    for _ in 0..40 {
        push(&mut host, now, 1448);
    }
    host.frames.clear();
    for _ in 0..10 {
        push(&mut host, now, 1448);
    }
    push(&mut host, now, 64_000);
    host.poll(now + SECOND);
    host.frames.clear();
    for _ in 0..10 {
        push(&mut host, now + 2 * SECOND, 1448);
    }
    assert!(host.frames.len() >= 5);
}

/// SAD DNS (CVE-2020-25705): a global limit of ICMP errors would reveal open ports to an attacker with spoofed
/// addresses.
#[test]
fn icmp_rate_limit_hides_open_ports() {
    let me = Ipv4Addr::new(192, 168, 0, 66);
    let mut host = host(Config::default());
    let socket = host.stack.open_datagrams(AppId::OWN, None, 0).unwrap();
    let _ = socket;
    let mut found = Vec::new();
    let mut now = Time::from_secs(10);
    for first in (32_000..34_000u16).step_by(1000) {
        now += SECOND;
        host.receive(now, &mut [peer::arp(ArpOperation::Request)]);
        host.frames.clear();
        let mut frames: Vec<_> = (first..first + 1000).map(|port| udp(THEIRS, (53, port))).collect();
        host.receive(now, &mut frames);
        host.frames.clear();
        host.receive(now, &mut [udp(me, (5000, 9))]);
        if host.frames.iter().any(|frame| frame[30..34] == me.octets()) {
            found.push(first);
        }
    }
    assert!(
        found.is_empty(),
        "an attacker off the path learns that one of the 1000 ports from {found:?} on is open"
    );
}

/// Ephemeral ports of datagram sockets are random.
#[test]
fn datagram_ports_are_random() {
    let ports = [1u8, 2].map(|_| {
        let mut host = host(Config::default());
        host.stack.open_datagrams(AppId::OWN, None, 0).unwrap();
        host.frames.clear();
        // This is the first port of the range. If it is open, no ICMP error is sent.
        host.receive(Time::from_secs(3), &mut [udp(THEIRS, (53, 32_768))]);
        host.frames.is_empty()
    });
    assert_ne!(ports, [true; 2], "it is always 32768");
}

/// Unacceptable segments do not keep a dead connection alive.
#[test]
fn spoofed_segments_do_not_delay_keepalive() {
    let mut host = host(Config::default());
    let mut now = Time::from_secs(2);
    let (_, conn) = perform_handshake(&mut host, now, 4000, u16::MAX, None).unwrap();
    let wanted = offcore_tcp::proto::KeepAlive { idle: 10 * SECOND, interval: SECOND, probes: 3 };
    host.stack.set_keepalive(now, conn, Some(wanted), &mut host.out).unwrap();
    for _ in 0..600 {
        now += SECOND;
        host.poll(now);
        resolve(&mut host, now);
        host.frames.clear();
        // The segment is outside of the window. The attacker only knows the ports.
        send(&mut host, now, THEIRS, &header(4000, 0x7000_0000, 1, TcpFlags::ACK, 1), &TcpOptions::NONE, &[]);
    }
    assert!(
        host.sessions[&conn].closed.is_some(),
        "ten minutes later the dead peer's connection is still there"
    );
}

/// An off-path attacker without knowledge of the sequence numbers reports a small path MTU.
#[test]
fn forged_path_mtu_does_not_last() {
    let mut world = World::new(1, 1500, Config::default());
    world.delay = Micros::from_millis(20);
    world.hosts[1].listen(7, 16);
    world.run(2 * SECOND);
    let conn = world.hosts[0].connect(world.now, "10.0.0.2:7");
    world.run(SECOND);
    let now = world.now;
    world.hosts[0].send(now, conn, &vec![7; 60 << 20]);
    world.run_until(SECOND, |hosts| hosts[0].stack.info(conn).unwrap().recovery.pipe > 1 << 20);
    let info = world.hosts[0].stack.info(conn).unwrap();
    let peer = peer::Peer::new((info.local.port(), 7), false);
    let now = world.now;
    let step = 256 << 10;
    for at in 0..(1u64 << 32) / step {
        world.hosts[0].receive(now, &mut [peer.error(4, 552, (at * step) as u32)]);
        if world.hosts[0].stack.info(conn).unwrap().mss < 600 {
            break;
        }
    }
    let there = world.hosts[1].accepted[0];
    assert!(world.run_until(600 * SECOND, |hosts| hosts[1].sessions[&there].received.len() == 60 << 20));
    world.run(3600 * SECOND);
    assert!(
        world.hosts[0].stack.info(conn).unwrap().mss > 1000,
        "an hour later it is still {}",
        world.hosts[0].stack.info(conn).unwrap().mss
    );
}

//! Effects of connection and listener options on packets.

use offcore_stats::time::Micros;
use offcore_tcp::proto::{Algorithm, AppId, Config, ConnId, ConnOptions};
use offcore_wire::TcpFlags;

use crate::frame;
use crate::streams::content;
use crate::world::World;

const SECOND: Micros = Micros::from_secs(1);

/// Opens a connection from host 0 to host 1 with options at both ends, and exchanges some data.
fn connected(to: &str, options: [ConnOptions; 2]) -> (World, [ConnId; 2]) {
    let mut world = World::new(1, 1500, Config::default());
    world.run(2 * SECOND);
    world.hosts[1].listen(7, 8);
    let listener = world.hosts[1].listener.unwrap();
    world.hosts[1].stack.set_listener_options(listener, options[1]);
    let conn = world.hosts[0].connect_with(AppId::OWN, options[0], world.now, to);
    assert!(world.run_until(10 * SECOND, |hosts| !hosts[1].accepted.is_empty()));
    let ends = [conn, world.hosts[1].accepted[0]];
    exchange(&mut world, ends);
    (world, ends)
}

fn exchange(world: &mut World, ends: [ConnId; 2]) {
    for (host, conn) in ends.into_iter().enumerate() {
        world.hosts[host].sessions.get_mut(&conn).unwrap().received.clear();
        world.hosts[host].send(world.now, conn, &content(1, 20_000));
    }
    let full = |hosts: &mut [crate::host::Host; 2]| {
        (0..2).all(|host| hosts[host].sessions[&ends[host]].received.len() == 20_000)
    };
    assert!(world.run_until(10 * SECOND, full));
}

/// Returns the traffic class and TTL of the TCP packets that a host has sent.
fn marks(world: &World, by: usize) -> Vec<(u8, u8)> {
    let of = |frame: &Vec<u8>| match frame[12..14] {
        [0x08, 0x00] if frame[23] == 6 => Some((frame[15], frame[22])),
        [0x86, 0xdd] if frame[20] == 6 => Some((frame[14] << 4 | frame[15] >> 4, frame[21])),
        _ => None,
    };
    let sent = world.trace.iter().filter(|(_, host, _)| *host == by);
    let mut marks: Vec<_> =
        sent.filter_map(|(_, _, frame)| of(frame)).map(|(class, hops)| (class & !3, hops)).collect();
    marks.dedup();
    marks
}

#[test]
fn packets_carry_traffic_class_and_ttl() {
    let here = ConnOptions { traffic_class: 0x4b, hops: Some(7), ..ConnOptions::default() };
    let there = ConnOptions { traffic_class: 0x10, hops: Some(9), ..ConnOptions::default() };
    for to in ["10.0.0.2:7", "[2001:db8::2]:7"] {
        let (mut world, ends) = connected(to, [here, there]);
        // The options apply from the SYN and the SYN-ACK on.
        assert_eq!((marks(&world, 0), marks(&world, 1)), (vec![(0x48, 7)], vec![(0x10, 9)]), "{to}");
        // Delayed acknowledgements still have the old options.
        world.run(SECOND);
        world.trace.clear();
        world.hosts[0].stack.set_options(ends[0], ConnOptions::default()).unwrap();
        exchange(&mut world, ends);
        assert_eq!((marks(&world, 0), marks(&world, 1)), (vec![(0, 64)], vec![(0x10, 9)]), "{to}");
    }
}

#[test]
fn maxseg_limits_segments() {
    let short = ConnOptions { segment: Some(1000), ..ConnOptions::default() };
    let usual = ConnOptions::default();
    for options in [[short, usual], [usual, short]] {
        let (world, _) = connected("10.0.0.2:7", options);
        let seen = |by: usize| {
            let sent = world.trace.iter().filter(move |(_, host, _)| *host == by);
            sent.filter_map(|(_, _, frame)| frame::read(frame)).collect::<Vec<_>>()
        };
        for (by, wanted) in options.iter().enumerate() {
            let syn = seen(by).into_iter().find(|seen| seen.flags.intersects(TcpFlags::SYN)).unwrap();
            assert_eq!(syn.options.mss, Some(wanted.segment.unwrap_or(1460)), "{options:?}");
            // Timestamps take 12 bytes of each segment.
            assert_eq!(seen(by).iter().map(|seen| seen.len).max(), Some(988), "{options:?}");
        }
    }
}

#[test]
fn congestion_control_can_be_chosen() {
    let newreno = ConnOptions { algorithm: Some(Algorithm::NewReno), ..ConnOptions::default() };
    let (mut world, ends) = connected("10.0.0.2:7", [newreno, ConnOptions::default()]);
    let bbr = ConnOptions { algorithm: Some(Algorithm::Bbr), ..ConnOptions::default() };
    for options in [ConnOptions::default(), newreno, bbr, newreno, bbr, ConnOptions::default()] {
        world.hosts[0].stack.set_options(ends[0], options).unwrap();
        exchange(&mut world, ends);
    }
}

#[test]
fn pacing_rates_spread_data() {
    let usual = ConnOptions::default();
    let paced = ConnOptions { pacing_rate: Some(100_000), ..usual };
    for (options, by) in [([paced, usual], 0), ([usual, paced], 1)] {
        let (mut world, ends) = connected("10.0.0.2:7", options);
        let transfer = |world: &mut World, bytes: usize| {
            world.hosts[1 - by].sessions.get_mut(&ends[1 - by]).unwrap().received.clear();
            world.trace.clear();
            let began = world.now;
            world.hosts[by].send(world.now, ends[by], &content(1, bytes));
            let full = |hosts: &mut [crate::host::Host; 2]| {
                hosts[1 - by].sessions[&ends[1 - by]].received.len() == bytes
            };
            assert!(world.run_until(20 * SECOND, full));
            world.now - began
        };
        let took = transfer(&mut world, 200_000);
        assert!((Micros::from_millis(1900)..Micros::from_millis(2050)).contains(&took), "{took:?}");
        // Two segments are sent at once, every 30 ms.
        let sent = world.trace.iter().filter(|(_, host, frame)| *host == by && frame.len() > 1000);
        let times: Vec<_> = sent.map(|(time, ..)| *time).collect();
        assert!(times.windows(5).all(|times| times[4] - times[0] > Micros::from_millis(20)), "{times:?}");
        world.hosts[by].stack.set_options(ends[by], usual).unwrap();
        assert!(transfer(&mut world, 200_000) < SECOND / 2);
    }
}

#[test]
fn deferred_connection_needs_data() {
    let deferred = ConnOptions { defer: 2, ..ConnOptions::default() };
    let mut world = World::new(1, 1500, Config::default());
    world.hosts[1].listen(7, 8);
    let listener = world.hosts[1].listener.unwrap();
    world.hosts[1].stack.set_listener_options(listener, deferred);
    let conn = world.hosts[0].connect(world.now, "10.0.0.2:7");
    world.run(SECOND / 2);
    assert!(world.hosts[1].accepted.is_empty());
    world.hosts[0].send(world.now, conn, b"request");
    assert!(world.run_until(SECOND / 10, |hosts| hosts[1].accepted.len() == 1));
    let there = world.hosts[1].accepted[0];
    assert!(world.run_until(SECOND, |hosts| hosts[1].sessions[&there].received == b"request"));
    // A connection without data is reported after another acknowledgement. The SYN-ACK is retransmitted after 1 + 2
    // seconds.
    world.hosts[0].connect(world.now, "10.0.0.2:7");
    world.run(2 * SECOND + SECOND / 2);
    assert_eq!(world.hosts[1].accepted.len(), 1);
    world.run(SECOND);
    assert_eq!(world.hosts[1].accepted.len(), 2);
}

#[test]
fn linger2_ends_half_closed_connection() {
    for (timeout, wanted) in [(Some(2 * SECOND), 2), (Some(900 * SECOND), 120), (None, 60)] {
        let options = ConnOptions { fin_timeout: timeout, ..ConnOptions::default() };
        let (mut world, ends) = connected("10.0.0.2:7", [options, ConnOptions::default()]);
        world.hosts[0].release(world.now, ends[0]);
        let gone = |world: &World| world.hosts[0].stack.info(ends[0]).is_none();
        world.run(wanted * SECOND - SECOND / 2);
        assert!(!gone(&world), "{timeout:?}");
        world.run(SECOND);
        assert!(gone(&world), "{timeout:?}");
    }
}

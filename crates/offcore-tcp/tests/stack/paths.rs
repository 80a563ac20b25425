//! Path MTUs reported by routers.

use std::net::Ipv4Addr;

use offcore_stats::time::Micros;
use offcore_tcp::proto::Config;
use offcore_wire::{IpProtocol, Ipv4Header, Sum, icmpv4};

use crate::streams::content;
use crate::world::World;

const SECOND: Micros = Micros::from_secs(1);
const IP: usize = 14;
const MTU: usize = 1300;

/// Returns a router's report that a frame of host 1 is too long for the next link.
fn too_long(frame: &[u8]) -> Vec<u8> {
    let quoted = &frame[IP..IP + 28];
    let mut message = vec![icmpv4::DESTINATION_UNREACHABLE, icmpv4::FRAGMENTATION_NEEDED, 0, 0, 0, 0, 0, 0];
    message[6..8].copy_from_slice(&(MTU as u16).to_be_bytes());
    message.extend_from_slice(quoted);
    let sum = Sum::of(&message).checksum();
    message[2..4].copy_from_slice(&sum.to_be_bytes());
    let header = Ipv4Header {
        src: Ipv4Addr::new(10, 9, 9, 9),
        dst: Ipv4Addr::new(10, 0, 0, 1),
        protocol: IpProtocol::ICMP,
        dscp_ecn: 0,
        ident: 1,
        dont_fragment: true,
        ttl: 64,
        total_len: (20 + message.len()) as u16,
    };
    let mut report = frame[..IP].to_vec();
    let (to, from) = report.split_at_mut(6);
    to.swap_with_slice(&mut from[..6]);
    let mut ip = [0; 20];
    header.write(&mut ip);
    [report, ip.to_vec(), message].concat()
}

// RFC 1191, 3: the estimate belongs to a path, so all connections to the same destination share it.
#[test]
fn connections_share_the_path_mtu() {
    let mut world = World::new(1, 1500, Config::default());
    world.hosts[1].listen(7, 16);
    world.run(2 * SECOND);
    let now = world.now;
    let first = world.hosts[0].connect(now, "10.0.0.2:7");
    let second = world.hosts[0].connect(now, "10.0.0.2:7");
    assert!(world.run_until(SECOND, |hosts| hosts[1].accepted.len() == 2));
    world.swallows = |frame| frame.len() > IP + MTU;
    let now = world.now;
    world.hosts[0].send(now, first, &content(1, 20_000));
    world.run(Micros::from_millis(1));
    let long = world.trace.iter().find(|(_, host, frame)| *host == 0 && frame.len() > IP + MTU).unwrap();
    let mut report = [too_long(&long.2)];
    let now = world.now;
    world.hosts[0].receive(now, &mut report);
    let from = world.trace.len();
    let third = world.hosts[0].connect(now, "10.0.0.2:7");
    for (conn, seed) in [(second, 2), (third, 3)] {
        let now = world.now;
        world.hosts[0].send(now, conn, &content(seed, 20_000));
    }
    let received = |hosts: &mut [crate::host::Host; 2]| {
        let sessions = hosts[1].sessions.values();
        sessions.filter(|session| session.received.len() == 20_000).count() == 3
    };
    assert!(world.run_until(2 * SECOND, received));
    let longest =
        world.trace[from..].iter().filter(|(_, host, _)| *host == 0).map(|(.., frame)| frame.len()).max();
    assert_eq!(longest, Some(IP + MTU), "no connection has to learn it again");
}

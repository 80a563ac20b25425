//! Connections of a host to its own addresses.

use offcore_stats::time::{Micros, Time};
use offcore_tcp::proto::{AppId, CallError, Cause, Config, IfaceConfig, Prefix};

use crate::host::Host;
use crate::streams::content;

const SECOND: Micros = Micros::from_secs(1);
/// The port has interface 0.
const LOOPBACK: u8 = 1;

/// Returns a host with a loopback interface and a listener on port 7, after address conflict detection.
fn host(config: Config) -> Host {
    let mut host = Host::new(1, 1500, config);
    assert_eq!(host.stack.add_loopback(), LOOPBACK);
    host.poll(Time::from_secs(2));
    host.frames.clear();
    host.listen(7, 8);
    host
}

/// Delivers the frames of the loopback interface. Address announcements are sent by the port.
#[track_caller]
fn run(host: &mut Host, now: &mut Time, until: impl Fn(&Host) -> bool) {
    for _ in 0..10_000 {
        if until(host) {
            return;
        }
        *now += Micros::new(100);
        host.poll(*now);
        let mut frames = std::mem::take(&mut host.frames);
        frames.retain(|frame| frame[..6] == [0; 6]);
        host.receive_by(LOOPBACK, *now, &mut frames);
    }
    panic!("no progress");
}

#[test]
fn own_addresses_accept_connections() {
    for to in ["10.0.0.1:7", "[2001:db8::1]:7"] {
        let (mut host, mut now) = (host(Config::default()), Time::from_secs(3));
        assert!(host.stack.reaches_listener(to.parse().unwrap()));
        let client = host.connect(now, to);
        run(&mut host, &mut now, |host| !host.accepted.is_empty());
        let server = host.accepted[0];
        let [there, back] = [1, 2].map(|seed| content(seed, 200_000));
        host.send(now, client, &there);
        host.send(now, server, &back);
        let received = |host: &Host, conn| host.sessions[&conn].received.len();
        run(&mut host, &mut now, |host| {
            received(host, client) == 200_000 && received(host, server) == 200_000
        });
        assert!(host.sessions[&server].received == there && host.sessions[&client].received == back);
        for conn in [client, server] {
            host.close_after(now, conn);
        }
        let is_over = |host: &Host, conn| host.sessions[&conn].closed == Some(Cause::Finished);
        run(&mut host, &mut now, |host| is_over(host, client) && is_over(host, server));
    }
}

#[test]
fn closed_ports_refuse_connections() {
    let (mut host, mut now) = (host(Config::default()), Time::from_secs(3));
    assert!(!host.stack.reaches_listener("10.0.0.1:8".parse().unwrap()));
    assert!(!host.stack.reaches_listener("10.0.0.9:7".parse().unwrap()), "another host's address");
    let conn = host.connect(now, "10.0.0.1:8");
    run(&mut host, &mut now, |host| host.sessions[&conn].closed.is_some());
}

/// A client with the server's port would connect to itself.
#[test]
fn ephemeral_ports_differ_from_the_server() {
    let mut host = host(Config { ports: 7..=8, ..Config::default() });
    let client = host.connect(Time::from_secs(3), "10.0.0.1:7");
    assert_eq!(host.stack.info(client).unwrap().local.port(), 8);
    let to = "10.0.0.1:7".parse().unwrap();
    let again = host.stack.connect(Time::from_secs(3), AppId::OWN, None, to, &mut host.out);
    assert_eq!(again.unwrap_err(), CallError::NoPort);
}

/// A packet from the network with the host's own address as its source is forged.
#[test]
fn forged_own_sources_are_dropped() {
    let (mut host, now) = (host(Config::default()), Time::from_secs(3));
    host.connect(now, "10.0.0.1:7");
    host.poll(now);
    let mut frames = std::mem::take(&mut host.frames);
    for frame in &mut frames {
        frame[..6].copy_from_slice(&crate::host::mac(1).0);
    }
    host.receive(now, &mut frames);
    host.poll(now);
    assert!(host.frames.is_empty() && host.accepted.is_empty());
}

/// A packet with the address of another interface of the host is forged, too.
#[test]
fn forged_sources_of_other_interfaces_are_dropped() {
    let (mut host, mut now) = (host(Config::default()), Time::from_secs(3));
    let addresses = vec![Prefix { address: [10, 1, 0, 1].into(), len: 24 }];
    let config = IfaceConfig { mac: crate::host::mac(9), mtu: 1500, addresses, routes: Vec::new() };
    let other = host.stack.add_iface(now, &config, &mut host.out);
    now += 5 * SECOND;
    host.poll(now);
    host.frames.clear();
    let (from, to) = ("10.0.0.1:0".parse().unwrap(), "10.1.0.1:7".parse().unwrap());
    host.stack.connect(now, AppId::OWN, Some(from), to, &mut host.out).unwrap();
    host.poll(now);
    let mut frames = std::mem::take(&mut host.frames);
    frames.retain(|frame| frame[..6] == [0; 6]);
    assert!(!frames.is_empty());
    for frame in &mut frames {
        frame[..6].copy_from_slice(&crate::host::mac(9).0);
    }
    host.receive_by(other, now, &mut frames);
    host.poll(now);
    host.frames.retain(|frame| frame[12..14] != [8, 6]);
    assert!(host.frames.is_empty(), "nothing answers");
}

//! `offcore tcp` against the kernel's TCP/IP stack: a TAP interface in a network namespace, with the kernel at one end
//! and Offcore at the other.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use peers::offcore::Finished;
use peers::{Need, Netns, Offcore, one_core};

pub(super) const TAP: &str = "tap0";
pub(super) const KERNEL: [&str; 2] = ["10.77.0.1/24", "fd77::1/64"];
pub(super) const OURS: [&str; 2] = ["10.77.0.2", "fd77::2"];
pub(super) const NEEDS: [Need; 5] = [Need::Root, Need::Tun, Need::Ip, Need::Ping, Need::Cores(2)];
/// A test fails after this time without progress.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Starts a host on a port, and waits for its first report.
pub(super) fn start(netns: &Netns, port: &str, more: &[&str]) -> Offcore {
    let args = ["tcp", "--port", port, "--stats-interval", "0.2", "--format", "json"];
    let mut offcore = Offcore::start_in(netns, &[&args[..], more].concat()).unwrap();
    offcore.wait_for("a report", |line| line.json.is_some()).unwrap();
    offcore
}

/// Starts a host in a namespace, with the kernel as its peer.
pub(super) fn host(netns: &Netns, port: &str, more: &[&str]) -> Offcore {
    host_at(netns, &format!("tap:{TAP}{port}"), more)
}

/// Like `host`, for a port with a complete description.
pub(super) fn host_at(netns: &Netns, port: &str, more: &[&str]) -> Offcore {
    let port = format!("{port},addr={}/24,addr={}/64", OURS[0], OURS[1]);
    let offcore = start(netns, &port, more);
    netns.ip(&["addr", "add", KERNEL[0], "dev", TAP]).unwrap();
    netns.ip(&["addr", "add", KERNEL[1], "dev", TAP, "nodad"]).unwrap();
    for address in OURS {
        let ping = || netns.run("ping", &["-c1", "-W1", address]);
        assert!((0..20).any(|_| ping().is_ok()), "{address} answers no ping: {}", offcore.tail());
    }
    offcore
}

/// Runs `job` on a thread in a namespace.
pub(super) fn inside(netns: &Netns, job: impl FnOnce() + Send) {
    let job = || {
        job();
        Ok(())
    };
    netns.within(job).unwrap();
}

/// Connects a kernel socket to the host.
pub(super) fn connect(address: &str, port: u16) -> TcpStream {
    let to = SocketAddr::new(address.parse().unwrap(), port);
    let stream = TcpStream::connect_timeout(&to, TIMEOUT).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream.set_write_timeout(Some(TIMEOUT)).unwrap();
    stream
}

/// Returns bytes that differ for each seed.
pub(super) fn content(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..len).map(next).collect()
}

/// Sends bytes to an echo server and reads them back at the same time.
pub(super) fn echo(address: &str, port: u16, seed: u64, len: usize) {
    let mut stream = connect(address, port);
    let bytes = content(seed, len);
    let mut reading = stream.try_clone().unwrap();
    let reader = thread::spawn(move || {
        let mut back = Vec::new();
        reading.read_to_end(&mut back).unwrap();
        back
    });
    stream.write_all(&bytes).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let back = reader.join().unwrap();
    assert!(back == bytes, "{address}: {} of {len} bytes came back", back.len());
}

/// Stops the host. It must have no copies unfinished or failed.
pub(super) fn stop(offcore: Offcore) -> Finished {
    let finished = offcore.stop().unwrap();
    assert!(finished.status.success(), "{finished:?}");
    finished
}

#[test]
fn echo_over_tap() {
    let Some(_core) = one_core(&NEEDS) else { return };
    let netns = Netns::new().unwrap();
    for port in ["", ",offloads=off"] {
        let offcore = host(&netns, port, &[]);
        inside(&netns, || {
            for address in OURS {
                echo(address, 7, 1, 0);
                echo(address, 7, 2, 1);
                thread::scope(|scope| {
                    for seed in 0..4 {
                        scope.spawn(move || echo(address, 7, seed, 2_000_000));
                    }
                });
            }
        });
        stop(offcore);
    }
}

/// Returns, from the last report, the number of packets that each half of the queue dropped on purpose, and the port's
/// status.
pub(super) fn impaired(finished: &Finished) -> ([u64; 2], String) {
    let report = finished.lines.iter().rev().find_map(|line| line.json.as_ref()).unwrap();
    let dropped = |half: &str| {
        let queues = report["queues"].as_array().unwrap().iter();
        queues
            .filter(|queue| queue["half"] == half)
            .filter_map(|queue| queue["drops"]["impaired"].as_u64())
            .sum()
    };
    (["rx", "tx"].map(dropped), report["ports"][0]["status"].to_string())
}

#[test]
fn echo_over_a_bad_link() {
    const LINK: &str = "impair:loss=1%,reorder=2%,duplicate=1%,corrupt=0.5%,delay=1ms";
    let Some(_core) = one_core(&NEEDS) else { return };
    let netns = Netns::new().unwrap();
    for (port, more) in [("", &["--idle", "sleep"][..]), (",offloads=off", &[])] {
        let offcore = host_at(&netns, &format!("{LINK},tap:{TAP}{port}"), more);
        inside(&netns, || {
            thread::scope(|scope| {
                for (seed, address) in (0..).zip(OURS) {
                    scope.spawn(move || echo(address, 7, seed, 3_000_000));
                }
            });
        });
        let (dropped, status) = impaired(&stop(offcore));
        assert!(dropped.iter().all(|&packets| packets > 0), "{dropped:?}: {status}");
        for what in ["reordered", "duplicated", "corrupted"] {
            let none = format!(" 0 {what}");
            assert!(status.matches(&none).count() < 2, "none in either direction: {status}");
        }
    }
}

#[test]
fn data_over_a_slow_link_comes_both_ways() {
    let Some(_core) = one_core(&NEEDS) else { return };
    let netns = Netns::new().unwrap();
    let link = format!("impair:rate=20M,delay=5ms,jitter=1ms,loss=0.5%,seed=5,tap:{TAP},offloads=off");
    let offcore = host_at(&netns, &link, &["--idle", "sleep"]);
    inside(&netns, || {
        let start = Instant::now();
        echo(OURS[0], 7, 9, 1_000_000);
        // 8 Mbit at 20 Mbit/s, minus the initial content of the token bucket.
        assert!(start.elapsed() > Duration::from_millis(390), "{:?}", start.elapsed());
    });
    stop(offcore);
}

#[test]
fn copies_by_an_engine() {
    let Some(_core) = one_core(&NEEDS) else { return };
    let netns = Netns::new().unwrap();
    for mode in ["offload", "auto"] {
        let offcore =
            host(&netns, "", &["--dma", "rxq0@core:1;txq0@core:1", "--mode", mode, "--lcores", "0"]);
        inside(&netns, || {
            OURS.iter().for_each(|address| echo(address, 7, 3, 2_000_000));
        });
        let finished = offcore.stop().unwrap();
        assert!(finished.status.success(), "{finished:?}");
    }
}

#[test]
fn closed_port_refuses_connections() {
    let Some(_core) = one_core(&NEEDS) else { return };
    let netns = Netns::new().unwrap();
    let offcore = host(&netns, "", &[]);
    inside(&netns, || {
        for address in OURS {
            let to = SocketAddr::new(address.parse().unwrap(), 8);
            let refused = TcpStream::connect_timeout(&to, TIMEOUT).unwrap_err();
            assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
        }
    });
    stop(offcore);
}

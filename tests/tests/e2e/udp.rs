//! UDP and long pings between `offcore tcp` and the kernel.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::Duration;

use peers::{Need, Netns, one_core};

use super::tcp::{NEEDS, OURS, content, host, stop};
use crate::tcp::inside;

/// A datagram whose echo has not arrived after this time is lost, and sent again.
const TIMEOUT: Duration = Duration::from_secs(2);

/// Returns a kernel socket that is connected to the host.
pub(super) fn connected(address: &str, port: u16) -> UdpSocket {
    let any: IpAddr = if address.contains(':') { [0u16; 8].into() } else { [0u8; 4].into() };
    let socket = UdpSocket::bind((any, 0)).unwrap();
    socket.set_read_timeout(Some(TIMEOUT)).unwrap();
    socket.connect(SocketAddr::new(address.parse().unwrap(), port)).unwrap();
    socket
}

/// Sends a datagram until its echo arrives. The kernel drops datagrams when a buffer is full.
pub(super) fn echo(socket: &UdpSocket, bytes: &[u8]) {
    let mut back = vec![0; 65_535];
    for _ in 0..5 {
        socket.send(bytes).unwrap();
        while let Ok(len) = socket.recv(&mut back) {
            if back[..len] == *bytes {
                return;
            }
        }
    }
    panic!("{} bytes never came back from {:?}", bytes.len(), socket.peer_addr());
}

/// A Python program that sends 50 datagrams of 1200 bytes in five calls, and prints the number of answers.
const SEGMENTED: &str = "
import socket, sys
s = socket.socket(socket.AF_INET6 if ':' in sys.argv[1] else socket.AF_INET, socket.SOCK_DGRAM)
s.setsockopt(17, 103, 1200)
s.connect((sys.argv[1], 7))
s.settimeout(2)
for k in range(5): s.send(bytes([k]) * 12000)
back = 0
try:
    while back < 50:
        d = s.recv(70000)
        back += len(d) == 1200 and len(set(d)) == 1
except socket.timeout: pass
print(back)
";

/// The kernel passes the datagrams of a call with UDP_SEGMENT to a TAP port as one packet.
#[test]
fn segmented_datagrams_arrive_singly() {
    let Some(_core) = one_core(&[&NEEDS[..], &[Need::Python]].concat()) else { return };
    let netns = Netns::new().unwrap();
    let offcore = host(&netns, "", &[]);
    for address in OURS {
        // The kernel drops datagrams if a buffer is full.
        let came = || netns.run("python3", &["-c", SEGMENTED, address]).unwrap().trim() == "50";
        assert!((0..5).any(|_| came()), "{address}");
    }
    stop(offcore);
}

#[test]
fn datagrams_of_any_length_come_back() {
    let Some(_core) = one_core(&NEEDS) else { return };
    let netns = Netns::new().unwrap();
    let engine = ["--dma", "rxq0@core:1;txq0@core:1", "--lcores", "0"];
    for (port, more) in [("", &[][..]), (",offloads=off", &[]), ("", &engine)] {
        let offcore = host(&netns, port, more);
        inside(&netns, || {
            for address in OURS {
                let socket = connected(address, 7);
                for len in [0, 1, 1452, 1453, 1472, 1473, 9000, 65_507] {
                    echo(&socket, &content(len as u64 + 1, len));
                }
            }
        });
        stop(offcore);
    }
}

#[test]
fn long_pings_are_answered() {
    let Some(_core) = one_core(&NEEDS) else { return };
    let netns = Netns::new().unwrap();
    let offcore = host(&netns, "", &[]);
    for address in OURS {
        for len in ["1472", "1473", "8000", "60000"] {
            let ping = || netns.run("ping", &["-c1", "-W2", "-s", len, address]);
            assert!((0..5).any(|_| ping().is_ok()), "{address}: {len} bytes: {}", offcore.tail());
        }
    }
    stop(offcore);
}

#[test]
fn closed_udp_port_is_unreachable() {
    let Some(_core) = one_core(&NEEDS) else { return };
    let netns = Netns::new().unwrap();
    let offcore = host(&netns, "", &[]);
    inside(&netns, || {
        for address in OURS {
            let socket = connected(address, 8);
            socket.send(b"is a server there").unwrap();
            let refused = socket.recv(&mut [0; 9]).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::ConnectionRefused, "{address}");
        }
    });
    stop(offcore);
}

//! An XDP socket cannot know that the kernel has left checksums to a veth pair. The user gets a message.

use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use peers::one_core;

use crate::tcp::inside;
use crate::tcp::{OURS, echo, stop};
use crate::udp;

use super::{NEEDS, Veth};

#[test]
fn partial_checksum_drops_are_explained() {
    let Some(_core) = one_core(&NEEDS) else { return };
    let veth = Veth::new(1500);
    let mut offcore = veth.host("af_xdp:p0", &["--idle", "sleep"]);
    let dropped = |reason: &'static str| {
        move |report: &serde_json::Value| Some(report["tcp"][0]["drops"][reason].as_u64().unwrap_or(0))
    };
    for (count, address) in (0..).zip(OURS) {
        inside(&veth.kernel, || {
            let to = SocketAddr::new(address.parse().unwrap(), 7);
            let late = TcpStream::connect_timeout(&to, Duration::from_millis(500)).unwrap_err();
            assert_eq!(late.kind(), std::io::ErrorKind::TimedOut, "{address}");
            udp::connected(address, 7).send(b"without a checksum").unwrap();
        });
        // At least one segment and one datagram.
        offcore.wait_for_count("open checksums", 2 * (count + 1), dropped("open_checksum")).unwrap();
    }
    // The remedy in the message works.
    veth.kernel.run("ethtool", &["-K", super::PEER, "tx", "off"]).unwrap();
    inside(&veth.kernel, || {
        for address in OURS {
            echo(address, 7, 1, 100_000);
            udp::echo(&udp::connected(address, 7), b"with a checksum");
        }
    });
    let finished = stop(offcore);
    let last = finished.lines.iter().rev().find_map(|line| line.json.as_ref()).unwrap();
    assert_eq!(dropped("checksum")(last), Some(0), "{last}");
    assert_eq!(finished.stderr.matches("`ethtool -K INTERFACE tx off`").count(), 1, "{}", finished.stderr);
}

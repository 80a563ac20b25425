//! Echo, sink and source over each kind of port on a veth pair, with the kernel's offloads on and off.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::thread;

use peers::offcore::Finished;
use peers::{Need, Offcore, one_core};
use serde_json::Value;

use crate::tcp::{OURS, connect, content, echo, stop};
use crate::udp;

use super::{NEEDS, Veth};

/// Number of bytes per connection.
const LEN: usize = 2_000_000;

/// How Offcore's end is opened, and the expected results.
#[derive(Clone, Copy, Debug)]
struct Case {
    port: &'static str,
    mtu: u16,
    /// Additional flags.
    more: &'static [&'static str],
    /// Whether offloads (checksums and segmentation) are on at Offcore's end and at the kernel's end.
    offloads: [bool; 2],
    /// Whether received packets, and sent packets, are longer than the MTU allows.
    long: [bool; 2],
}

/// Returns the last report.
fn report(finished: &Finished) -> &Value {
    finished.lines.iter().rev().find_map(|line| line.json.as_ref()).unwrap()
}

impl Case {
    fn veth(&self) -> Veth {
        let veth = Veth::new(self.mtu);
        for (end, on) in self.offloads.into_iter().enumerate() {
            veth.set_offloads(end, on);
        }
        veth
    }

    /// Starts a host that answers pings of the MTU's size.
    fn host(&self, veth: &Veth, app: &str) -> Offcore {
        let port = format!("{},mtu={}", self.port, self.mtu);
        let offcore = veth.host(&port, &[&["--app", app, "--idle", "sleep"], self.more].concat());
        for (address, headers) in OURS.into_iter().zip([28, 48]) {
            let len = usize::from(self.mtu) - headers;
            let answered = (0..20).any(|_| veth.ping(address, len));
            assert!(answered, "{self:?}: {len} bytes to {address}: {}", offcore.tail());
        }
        offcore
    }

    /// Stops the host. It must have dropped nothing because of missing checksums, and accepted `connections`
    /// connections.
    fn stop(&self, offcore: Offcore, connections: u64) -> Finished {
        let finished = stop(offcore);
        let tcp = &report(&finished)["tcp"][0];
        for reason in ["checksum", "open_checksum", "malformed"] {
            assert!(tcp["drops"][reason].is_null(), "{self:?}: {tcp}");
        }
        assert_eq!(tcp["accepted"], connections, "{self:?}: {tcp}");
        finished
    }

    /// Asserts that the mean packet length of one half, 0 or 1, is as expected.
    fn assert_length(&self, finished: &Finished, half: usize) {
        let name = ["rx", "tx"][half];
        let queue = report(finished)["queues"].as_array().unwrap().iter().find(|queue| queue["half"] == name);
        let [bytes, packets] = ["bytes", "packets"].map(|what| queue.unwrap()[what].as_u64().unwrap());
        let (mean, frame) = (bytes / packets, u64::from(self.mtu) + 14);
        assert!(mean <= frame || self.long[half], "{self:?}: {name}: {mean} bytes");
        assert!(mean > frame || !self.long[half], "{self:?}: {name}: {mean} bytes");
    }
}

/// The host echoes several connections at once.
fn echoes(case: &Case, veth: &Veth) {
    let offcore = case.host(veth, "echo");
    let run = veth.kernel.within(|| {
        thread::scope(|scope| {
            for (seed, address) in (0..).zip([OURS, OURS].concat()) {
                scope.spawn(move || echo(address, 7, seed, LEN));
            }
        });
        for address in OURS {
            udp::echo(&udp::connected(address, 7), &content(9, 20_000));
        }
        Ok(())
    });
    run.unwrap_or_else(|error| panic!("{case:?}: {error:#}"));
    let finished = case.stop(offcore, 4);
    assert_eq!(report(&finished)["tcp"][0]["finished"], 4, "{case:?}");
}

/// The host acknowledges everything, and the stream ends normally.
fn sinks(case: &Case, veth: &Veth) {
    let offcore = case.host(veth, "sink");
    let run = veth.kernel.within(|| {
        for (seed, address) in (0..).zip(OURS) {
            let mut stream = connect(address, 9);
            stream.write_all(&content(seed, LEN))?;
            stream.shutdown(Shutdown::Write)?;
            assert_eq!(stream.read(&mut [0; 8])?, 0, "{address} sends something back");
        }
        Ok(())
    });
    run.unwrap_or_else(|error| panic!("{case:?}: {error:#}"));
    case.assert_length(&case.stop(offcore, 2), 0);
}

/// The bytes of a source have the documented content.
fn sources(case: &Case, veth: &Veth) {
    let offcore = case.host(veth, "source");
    let run = veth.kernel.within(|| {
        for address in OURS {
            let mut stream = connect(address, 19);
            let mut bytes = vec![0; LEN];
            stream.read_exact(&mut bytes)?;
            for (number, word) in (0u64..).zip(bytes.chunks_exact(8)) {
                assert_eq!(word, number.to_be_bytes(), "{address}");
            }
        }
        Ok(())
    });
    run.unwrap_or_else(|error| panic!("{case:?}: {error:#}"));
    case.assert_length(&case.stop(offcore, 2), 1);
}

fn applications(cases: &[Case], more: &[Need]) {
    let Some(_core) = one_core(&[&NEEDS[..], more].concat()) else { return };
    for case in cases {
        // Duplicate address detection delays a host's start by one second.
        thread::scope(|scope| {
            for app in [echoes, sinks, sources] {
                scope.spawn(move || app(case, &case.veth()));
            }
        });
    }
}

const PLAIN: Case = Case { port: "af_packet:p0", mtu: 1500, more: &[], offloads: [true; 2], long: [true; 2] };

#[test]
fn applications_over_af_packet() {
    applications(
        &[
            PLAIN,
            Case { offloads: [false; 2], long: [false, true], ..PLAIN },
            // The kernel completes checksums, but does not segment.
            Case { port: "af_packet:p0,qdisc_bypass", offloads: [false, true], long: [true, false], ..PLAIN },
        ],
        &[],
    );
}

#[test]
fn jumbo_applications_over_af_packet() {
    const JUMBO: Case = Case { mtu: 9000, ..PLAIN };
    applications(
        &[
            JUMBO,
            Case { more: &["--mbuf-size", "16384"], offloads: [false; 2], long: [false, true], ..JUMBO },
            Case { port: "af_packet:p0,qdisc_bypass", long: [true, false], ..JUMBO },
        ],
        &[],
    );
}

/// An XDP socket does not learn which checksums are missing, so the kernel has to compute them.
const XDP: Case = Case { port: "af_xdp:p0", mtu: 1500, more: &[], offloads: [true, false], long: [false; 2] };

#[test]
fn applications_over_af_xdp() {
    applications(
        &[
            XDP,
            Case {
                port: "af_xdp:p0,mode=skb",
                more: &["--dma", "rxq0@core:1;txq0@core:1", "--lcores", "0"],
                ..XDP
            },
            Case { mtu: 9000, more: &["--mbuf-size", "4096"], ..XDP },
            Case { port: "af_xdp:p0,mode=skb", mtu: 9000, ..XDP },
        ],
        &[],
    );
}

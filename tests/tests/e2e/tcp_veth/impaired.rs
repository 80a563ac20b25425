//! A veth pair that loses, reorders, duplicates and corrupts packets in both directions.

use std::thread;

use peers::one_core;

use crate::tcp::inside;
use crate::tcp::{OURS, echo, impaired, stop};

use super::{NEEDS, Veth};

/// Impairments for packets of the MTU's length, and for the fewer packets that need segmentation.
const WIRE: &str = "impair:loss=1%,reorder=2%,duplicate=1%,corrupt=0.5%,delay=1ms";
const LONG: &str = "impair:loss=3%,reorder=5%,duplicate=5%,corrupt=4%,delay=1ms";

/// All bytes return, in connections that end normally.
fn echoes(link: &str, port: &str) {
    let veth = Veth::new(1500);
    [0, 1].into_iter().for_each(|end| veth.set_offloads(end, link == LONG));
    let mut offcore = veth.host(&format!("{link},{port}"), &["--idle", "sleep"]);
    inside(&veth.kernel, || {
        thread::scope(|scope| {
            for (seed, address) in (0..).zip([OURS, OURS].concat()) {
                scope.spawn(move || echo(address, 7, seed, 1_000_000));
            }
        });
    });
    // The kernel's last segment may have been lost. It is then retransmitted.
    let finished = |report: &serde_json::Value| report["tcp"][0]["finished"].as_u64();
    offcore.wait_for_count("finished connections", 4, finished).unwrap();
    let finished = stop(offcore);
    let tcp = &finished.lines.iter().rev().find_map(|line| line.json.as_ref()).unwrap()["tcp"][0];
    assert_eq!((&tcp["accepted"], &tcp["finished"]), (&4.into(), &4.into()), "{port}: {tcp}");
    assert!(tcp["drops"]["checksum"].as_u64() > Some(0), "{port}: {tcp}");
    let (dropped, status) = impaired(&finished);
    assert!(dropped.iter().all(|&packets| packets > 0), "{port}: {dropped:?}: {status}");
}

#[test]
fn echo_over_a_bad_pair() {
    let Some(_core) = one_core(&NEEDS) else { return };
    thread::scope(|scope| {
        for (link, port) in [(LONG, "af_packet:p0"), (WIRE, "af_packet:p0,qdisc_bypass"), (WIRE, "af_xdp:p0")]
        {
            scope.spawn(move || echoes(link, port));
        }
    });
}

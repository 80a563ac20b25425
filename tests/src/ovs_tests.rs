//! Open vSwitch with DPDK beside Offcore's learning switch: the benchmark measures it and leaves nothing behind.

use std::path::{Path, PathBuf};
use std::time::Duration;

use offcore_bench::end_to_end::{EndToEndOptions, Peer, run};
use offcore_bench::peer::ovs::Ovs;
use offcore_bench::progress::Progress;
use offcore_bench::workload::{Ring, Route};

use crate::{Need, exclusive};

/// The measured rates are not asserted.
#[test]
fn benchmark_alternates_with_ovs() {
    let Some(_cores) = exclusive(&[Need::Ovs, Need::Hugepages(384), Need::Cores(2)]) else { return };
    let options = EndToEndOptions {
        route: Route::GuestToGuest,
        rings: Ring::ALL.into(),
        pairs: 2,
        window: Duration::from_millis(50),
        peer: Some(Peer::Ovs),
        ..EndToEndOptions::new(&[512], true, 0, Some(1))
    };
    let mut rows = Vec::new();
    run(&options, &Progress::hidden(), &mut |row| rows.push(row)).unwrap();
    assert_eq!(rows.iter().map(|row| row.head.ring).collect::<Vec<_>>(), ["split", "packed"]);
    for row in &rows {
        assert_eq!(
            (row.peer.peer.as_deref(), row.ends.forward, row.figures.spread.runs, row.counts.lost),
            (Some("ovs-dpdk"), Some("l2"), 2, 0)
        );
        assert!(row.counts.verified >= 4096 && row.counts.verified <= row.counts.received, "{row:?}");
        assert!(
            row.peer.peer_median.unwrap() > 0.0 && row.ends.peer_cycles_per_packet.unwrap() > 0.0,
            "{row:?}"
        );
        let about = &row.ends.about_peer;
        assert!(about.peer_version.as_ref().unwrap().starts_with("Open vSwitch "), "{row:?}");
        assert_eq!(about.peer_features.as_ref().unwrap().contains("RING_PACKED"), row.head.ring == "packed");
    }
}

#[test]
fn nothing_of_open_vswitch_is_left_behind() {
    let Some(_cores) = exclusive(&[Need::Ovs, Need::Hugepages(256)]) else { return };
    let mut ovs = Ovs::start(0).unwrap();
    let [socket, _] = ovs.sockets();
    let home = socket.parent().unwrap().to_owned();
    let proc = PathBuf::from(format!("/proc/{}", ovs.id()));
    assert!(proc.exists() && socket.exists());
    // Its TAP devices are in a separate network namespace and are deleted with it.
    let namespace = |proc: &Path| std::fs::read_link(proc.join("ns/net")).unwrap();
    assert_ne!(namespace(&proc), namespace(Path::new("/proc/self")));
    // It also ends when it is stopped.
    ovs.set_running(false).unwrap();
    drop(ovs);
    assert!(!proc.exists() && !home.exists());
}

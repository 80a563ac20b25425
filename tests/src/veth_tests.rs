//! `offcore bench copy --case end-to-end` and `offcore bench tcp --case veth` measure the named cases, over their own
//! interfaces.

use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use offcore_bench::copy::veth::{self, Direction, PortKind, VethOptions};
use offcore_bench::peer::frames::{FrameSink, FrameSource};
use offcore_bench::peer::process::TIMEOUT;
use offcore_bench::progress::Progress;
use offcore_bench::row::Row;
use offcore_bench::tcp;
use offcore_mem::Hugepages;

use crate::netns::checked;
use crate::offcore::{Offcore, Signal};
use crate::{Need, Netns, exclusive, require};

/// Uses the two cores of the test.
fn options() -> VethOptions {
    VethOptions {
        restarts: 1,
        pairs: 1,
        window: Duration::from_millis(50),
        ..VethOptions::new(&[64, 1518], true, 0, Some(1))
    }
}

fn measured(options: &VethOptions) -> Vec<Row> {
    let mut rows = Vec::new();
    veth::run(options, &Progress::hidden(), &mut |row| rows.push(row)).unwrap();
    rows
}

/// Takes seconds: 24 namespaces and 12 pairs of interfaces are created and deleted.
#[test]
fn every_direction_is_measured() {
    let Some(_cores) = exclusive(&[Need::Root, Need::Ip, Need::Ethtool, Need::Cores(2)]) else { return };
    let rows = measured(&options());
    assert_eq!(rows.len(), 2 * 3 * 2);
    for row in &rows {
        assert_eq!(
            (row.head.bench, row.head.arrangement, row.figures.metric, row.figures.unit),
            ("copy", "end-to-end", "rate", "mpps")
        );
        assert!(
            row.figures.spread.median > 0.0 && row.counts.received > 0 && row.ends.fe_bound.is_some(),
            "{row:?}"
        );
        assert!(row.ends.busy_cycles_per_packet > Some(0.0) && row.peer.peer.is_none(), "{row:?}");
        // Forwarded and generated packets are checked before the measurement. Received packets are only counted.
        assert_eq!((row.counts.verified > 2000, row.counts.lost), (row.head.case != "rxonly", 0), "{row:?}");
    }
    let ports: Vec<_> = rows.iter().filter_map(|row| row.head.port).collect();
    assert_eq!((&ports[..6], &ports[6..]), (&["af_xdp"; 6][..], &["af_packet"; 6][..]));
}

#[test]
fn a_run_that_is_interrupted_leaves_nothing() {
    let Some(_cores) = exclusive(&[Need::Root, Need::Ip, Need::Ethtool, Need::Cores(2)]) else { return };
    for signal in [Signal::INT, Signal::TERM] {
        let mut bench = Offcore::start(&["bench", "copy", "--case", "end-to-end"]).unwrap();
        let prefix = format!("oc{}n", bench.id());
        let exists = || {
            let namespaces = checked(Command::new("ip").args(["netns", "list"])).unwrap();
            namespaces.lines().any(|line| line.starts_with(&prefix))
        };
        let since = Instant::now();
        while !exists() {
            assert!(!bench.has_ended() && since.elapsed() < TIMEOUT);
        }
        bench.signal(signal).unwrap();
        let finished = bench.wait().unwrap();
        assert_eq!(finished.status.signal(), Some(signal.as_raw()), "{}", finished.stderr);
        assert!(!exists());
    }
}

#[test]
fn veth_benchmark_alternates_with_testpmd() {
    let Some(_cores) = exclusive(&[Need::Root, Need::Ip, Need::Ethtool, Need::Testpmd, Need::Cores(2)])
    else {
        return;
    };
    for port in PortKind::ALL {
        let options = VethOptions {
            frames: vec![512],
            ports: vec![port],
            directions: vec![Direction::Forward],
            pairs: 2,
            testpmd: true,
            ..options()
        };
        let rows = measured(&options);
        let [row] = &rows[..] else { panic!("{rows:?}") };
        assert_eq!(
            (row.figures.spread.runs, row.peer.peer.as_deref(), row.counts.lost),
            (2, Some("dpdk-testpmd"), 0)
        );
        assert!(row.peer.peer_median > Some(0.0) && row.peer.peer_ratio_lower > Some(0.0), "{row:?}");
    }
}

#[test]
fn kernel_sends_numbered_frames() {
    let Some(()) = require(&[Need::Root, Need::Ip, Need::Ethtool]) else { return };
    let (near, far) = (Netns::new().unwrap(), Netns::new().unwrap());
    near.veth("near", &far, "far").unwrap();
    for (netns, interface) in [(&near, "near"), (&far, "far")] {
        netns.ip(&["link", "set", interface, "addrgenmode", "none"]).unwrap();
        netns.ip(&["link", "set", interface, "up"]).unwrap();
    }
    near.run("ethtool", &["-K", "near", "gro", "on"]).unwrap();
    let index = |netns: &Netns, interface: &str| -> u32 {
        let text = netns.ip(&["-o", "link", "show", interface]).unwrap();
        text.split(':').next().unwrap().parse().unwrap()
    };
    let (from, to) = (index(&far, "far"), index(&near, "near"));
    let mut sink = near.within(|| FrameSink::new(to)).unwrap();
    let mut source = far
        .within(|| {
            let mut source = FrameSource::new(from, &[7; 60])?;
            source.send(3)?;
            source.send(1)?;
            Ok(source)
        })
        .unwrap();
    let mut room = [0; 2048];
    for sequence in 0..4u64 {
        let since = Instant::now();
        let len = loop {
            // A busy core receives late.
            assert!(since.elapsed() < Duration::from_secs(10), "frame {sequence} never arrived");
            if let Some(frame) = sink.next(&mut room).unwrap() {
                break frame.len();
            }
        };
        let frame = &room[..len];
        let (head, rest) = frame.split_at(50);
        assert!(head.iter().all(|&byte| byte == 7) && rest[8..] == [7; 2], "{frame:02x?}");
        assert_eq!(rest[..8], sequence.to_le_bytes());
    }
    assert_eq!((sink.next(&mut room).unwrap(), source.sent()), (None, 4));
    assert!(FrameSource::new(from, &[7; 57]).unwrap_err().to_string().contains("no room"));
    // The interface is deleted in the meantime.
    far.ip(&["link", "del", "far"]).unwrap();
    assert!(far.within(|| source.send(1)).is_err());
}

#[test]
fn tcp_benchmark_compares_with_kernel() {
    let Some(_cores) = exclusive(&[Need::Root, Need::Ip, Need::Ethtool, Need::Cores(2)]) else { return };
    let options = tcp::kernel::KernelOptions {
        binary: PathBuf::new(),
        quick: true,
        sides: tcp::Side::ALL.into(),
        hugepages: Hugepages::None,
        lcore: 0,
        other_lcore: Some(1),
    };
    let mut rows = Vec::new();
    tcp::veth::run(&options, &Progress::hidden(), &mut |row| rows.push(row)).unwrap();
    assert_eq!(rows.len(), 3 * 2);
    for row in &rows {
        assert_eq!(
            (row.head.bench, row.head.arrangement, row.peer.peer.as_deref()),
            ("tcp", "end-to-end", Some("kernel"))
        );
        assert!(
            row.counts.received > 0 && row.counts.received == row.counts.verified && row.counts.lost == 0,
            "{row:?}"
        );
        // The kernel's clock may not tick within a short window.
        assert!(row.tcp.per_kib.ns_per_kib.is_some() && row.peer.peer_ratio > Some(0.0), "{row:?}");
        // The cost on both cores is at least the cost on one.
        assert!(
            row.tcp.per_kib.both_ns_per_kib >= row.tcp.per_kib.ns_per_kib
                && row.tcp.per_kib.peer_both_ns_per_kib.is_some(),
            "{row:?}"
        );
        assert!(
            row.tcp.per_kib.far_ns_per_kib.is_some()
                && row.ends.fe_bound.is_some()
                && row.ratios.noise.noise_floor.is_some(),
            "{row:?}"
        );
    }
    let offloads: Vec<_> = rows.iter().filter_map(|row| row.tcp.offloads).collect();
    assert_eq!(offloads, [true, true, false, false, false, false]);
}

//! Tests of the measurement itself with our back end: it measures, and it detects errors.

use super::paired::{Load, SETTLE};
use super::*;
use crate::report::golden;

/// Creates a back end in forwarding mode `mode`, and a front end with frames of 64 bytes.
pub(crate) fn pair(dir: &TempDir, mode: Forward) -> (Ours, RoundTrips) {
    let pool = Pool::new(BUFFERS as usize, 2048, Hugepages::None).unwrap();
    let core = lcore::available().unwrap()[0];
    let sockets = [dir.file("s")];
    let ours = Ours::start(&sockets, core, pool, Some(mode), true).unwrap();
    let load =
        RoundTrips::connect(&sockets, Ring::Split, 64, Way::Rewritten(Some(PORT_MAC)), Hugepages::None)
            .unwrap();
    (ours, load)
}

fn options() -> EndToEndOptions {
    let lcores = lcore::available().unwrap();
    EndToEndOptions {
        restarts: 2,
        pairs: 1,
        window: Duration::from_millis(50),
        hugepages: Hugepages::None,
        ..EndToEndOptions::new(&[64, 1518], true, lcores[0], lcores.get(1).copied())
    }
}

#[test]
fn round_trips_are_counted() {
    let options = options();
    let mut rows = Vec::new();
    let result = run(&options, &Progress::hidden(), &mut |row| rows.push(row));
    if options.other_lcore.is_none() {
        assert!(result.unwrap_err().to_string().contains("two lcores"));
        return;
    }
    result.unwrap();
    assert_eq!(rows.iter().map(|row| row.head.frame).collect::<Vec<_>>(), options.frames);
    for row in &rows {
        golden::check("vhost, end-to-end", row);
        assert_eq!(
            (row.head.arrangement, row.figures.metric, row.figures.unit, row.figures.spread.runs),
            ("end-to-end", "rate", "mpps", 2)
        );
        assert_eq!((row.counts.lost, row.peer.peer.as_deref(), row.peer.peer_ratio), (0, None, None));
        // Every packet of the first rounds and every 64th of the rest.
        assert!(row.counts.verified >= 2 * 4096 && row.counts.verified <= row.counts.received, "{row:?}");
        assert!(
            row.figures.spread.median > 0.0
                && row.ends.busy_cycles_per_packet.is_some()
                && row.ends.fe_bound.is_some(),
            "{row:?}"
        );
    }
}

#[test]
fn packets_of_one_guest_arrive_at_the_other() {
    let mut options = EndToEndOptions { route: Route::GuestToGuest, restarts: 1, ..options() };
    (options.frames, options.rings) = (vec![512], Ring::ALL.into());
    if options.other_lcore.is_none() {
        return;
    }
    let mut rows = Vec::new();
    run(&options, &Progress::hidden(), &mut |row| rows.push(row)).unwrap();
    assert_eq!(rows.iter().map(|row| row.head.ring).collect::<Vec<_>>(), ["split", "packed"]);
    for row in &rows {
        assert_eq!((row.head.case.as_str(), row.head.arrangement), ("guest-to-guest", "end-to-end"));
        assert!(
            row.counts.lost == 0 && row.counts.verified >= 4096 && row.counts.received > row.counts.verified,
            "{row:?}"
        );
    }
}

#[test]
fn unrewritten_addresses_are_noticed() {
    let dir = TempDir::new().unwrap();
    let (mut ours, mut load) = pair(&dir, Forward::Io);
    let error = load.window(SETTLE, SETTLE, &mut ours).unwrap_err().to_string();
    assert!(error.contains("addresses"), "{error}");
}

#[test]
fn silent_back_end_is_noticed() {
    let dir = TempDir::new().unwrap();
    let (mut ours, mut load) = pair(&dir, Forward::Rxonly);
    load.set_timeout(Duration::from_millis(300));
    let error = load.window(SETTLE, SETTLE, &mut ours).unwrap_err().to_string();
    assert!(error.contains("no packet has come back"), "{error}");
}

#[test]
fn unmeasurable_options_are_refused() {
    let mut options = options();
    options.other_lcore = Some(options.lcore);
    let refused = |options: &EndToEndOptions| {
        run(options, &Progress::hidden(), &mut |row| panic!("{row:?}")).unwrap_err().to_string()
    };
    assert!(refused(&options).contains("--lcores"));
    options.other_lcore = Some(options.lcore + 1);
    options.peer = Some(Peer::Testpmd);
    options.hugepages = Hugepages::Size1G;
    let error = refused(&options);
    assert!(error.contains("--hugepages 2M or none") || error.contains("apt-get install dpdk"), "{error}");
}

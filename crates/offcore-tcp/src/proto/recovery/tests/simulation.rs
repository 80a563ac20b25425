//! Transfers over many kinds of links. Times are virtual and seeds fixed, so the bounds are deterministic.

use offcore_stats::time::{Micros, Time};

use super::super::Algorithm::{Bbr, Cubic, NewReno};
use super::super::{Ack, Recovery, TimerAction};
use super::link::{Link, MB, Peer, Report, Transfer};

/// Every combination of algorithm, SACK and timestamps.
fn peers() -> impl Iterator<Item = Peer> {
    [NewReno, Cubic, Bbr].into_iter().flat_map(|algorithm| {
        [(true, true), (true, false), (false, true), (false, false)].map(|(sack, timestamps)| Peer {
            algorithm,
            sack,
            timestamps,
            ..Peer::default()
        })
    })
}

fn run(link: Link, peer: Peer, bytes: u64) -> Report {
    Transfer::new(link, peer, bytes).run()
}

#[test]
fn pure_delay_retransmits_nothing() {
    for peer in peers() {
        for (burst, copy) in [(1, 0), (44, 0), (1, 300), (44, 2000)] {
            let peer = Peer { burst, copy: Micros::new(copy), window: 200_000, ..peer };
            let report = run(Link { queue: MB, ..Link::default() }, peer, 4 * MB);
            let stats = report.stats;
            assert_eq!((report.useless, report.dropped), (0, 0), "{peer:?} {report:?}");
            assert_eq!(stats.fast + stats.timeout + stats.probes + stats.timeouts, 0, "{report:?}");
            assert!(report.rate(4 * MB) > 5e6, "{peer:?} {report:?}");
        }
    }
}

#[test]
fn full_queue_keeps_link_busy() {
    for peer in peers() {
        let bytes = 40 * MB;
        let report = run(Link::default(), peer, bytes);
        assert!(report.dropped > 0);
        // Without SACK, BBR continues to send while it repairs one segment per round trip.
        let may_time_out = peer.algorithm == Bbr && !peer.sack;
        assert!(report.stats.timeouts == 0 || may_time_out, "{peer:?} {report:?}");
        // Without SACK, one segment per round trip is repaired after slow start has overshot.
        let least = if peer.sack { 10e6 } else { 1.5e6 };
        assert!(report.rate(bytes) > least, "{peer:?}: {} {report:?}", report.rate(bytes));
    }
}

// Mathis's formula: MSS / RTT * 1.22 / sqrt(p), or 0.87 with delayed ACKs. CUBIC is not slower.
#[test]
fn random_loss_rate_matches_mathis() {
    for peer in peers().filter(|peer| peer.sack && peer.algorithm != Bbr) {
        let link = Link { rate: 125_000_000, queue: 8 * MB, loss: 0.001, ..Link::default() };
        let bytes = 40 * MB;
        let report = run(link, peer, bytes);
        let theory = 1448.0 / 0.020 * 1.0 / 0.001_f64.sqrt();
        let got = report.rate(bytes) / theory;
        assert!((0.6..3.0).contains(&got), "{got} {peer:?} {report:?}");
        assert_eq!(report.useless, u64::from(report.stats.probes).min(report.useless), "{report:?}");
    }
}

#[test]
fn heavy_loss_is_recovered() {
    for peer in peers() {
        for seed in 0..8 {
            let link = Link { loss: 0.05, ack_loss: 0.05, seed, ..Link::default() };
            let report =
                run(link, Peer { burst: 1 + seed * 5, copy: Micros::new(seed * 100), ..peer }, MB / 2);
            let resent = report.stats.fast + report.stats.timeout + report.stats.probes;
            let useless = if peer.algorithm == Bbr && !peer.sack { 400 } else { 200 };
            assert!(u64::from(resent) + 60 < 2 * report.dropped + useless, "{peer:?} {report:?}");
        }
    }
}

#[test]
fn combined_impairments_are_recovered() {
    for peer in peers() {
        for seed in 0..12 {
            let link = Link {
                loss: 0.02,
                ack_loss: 0.1,
                reorder: 0.1,
                late: Micros::from_millis(30),
                duplicate: 0.02,
                marks: seed % 2 == 0,
                seed,
                ..Link::default()
            };
            let report = run(link, Peer { burst: 1 + seed, ..peer }, MB / 2);
            assert!(report.most_runs < 1000, "{report:?}");
        }
    }
}

// RFC 8985, section 3.3.2: reordering widens the window, which avoids needless retransmissions.
#[test]
fn rack_adapts_to_reordering() {
    for algorithm in [NewReno, Cubic] {
        let peer = Peer { algorithm, window: 200_000, ..Peer::default() };
        let link = Link { reorder: 0.02, late: Micros::from_millis(4), queue: MB, ..Link::default() };
        let bytes = 20 * MB;
        let report = run(link, peer, bytes);
        assert!(report.stats.reordered > 20, "{report:?}");
        assert!(report.useless < 30, "{report:?}");
        assert!(report.rate(bytes) > 5e6, "{} {report:?}", report.rate(bytes));
    }
}

#[test]
fn ecn_marks_reduce_without_timeout() {
    for algorithm in [NewReno, Cubic] {
        let link = Link { marks: true, queue: 500_000, ..Link::default() };
        let bytes = 40 * MB;
        let report = run(link, Peer { algorithm, ..Peer::default() }, bytes);
        assert!(report.stats.marks > 0 && report.stats.timeouts == 0, "{report:?}");
        assert!(report.rate(bytes) > 10e6, "{} {report:?}", report.rate(bytes));
    }
}

// RFC 8985, section 3.2: a lost tail is repaired by a probe in two round trips, without a timeout.
#[test]
fn tlp_repairs_lost_tail() {
    let mut transfer = Transfer::new(Link::default(), Peer::default(), 10 * 1448);
    transfer.victims = vec![9, 10];
    let report = transfer.run();
    assert_eq!((report.stats.probes, report.stats.timeouts), (1, 0), "{report:?}");
    assert!(report.took < Micros::from_millis(150), "{report:?}");
    let peer = Peer { sack: false, ..Peer::default() };
    let mut transfer = Transfer::new(Link::default(), peer, 10 * 1448);
    transfer.victims = vec![9, 10];
    let report = transfer.run();
    assert_eq!((report.stats.probes, report.stats.timeouts), (0, 1), "{report:?}");
}

// RFC 8985, section 3.1: lost retransmissions are detected without a timeout.
#[test]
fn lost_retransmission_needs_no_timeout() {
    let mut transfer = Transfer::new(Link::default(), Peer::default(), 400 * 1448);
    transfer.victims = vec![20];
    let once = transfer.run();
    // The retransmission is the first segment sent after detection of the loss, and has its number.
    let mut found = false;
    for repeat in 21..80 {
        let mut transfer = Transfer::new(Link::default(), Peer::default(), 400 * 1448);
        transfer.victims = vec![20, repeat];
        let report = transfer.run();
        assert_eq!(report.stats.timeouts, 0, "{report:?}");
        found |= report.stats.fast == 2 && report.took > once.took + Micros::from_millis(5);
    }
    assert!(found);
}

#[test]
fn transfer_survives_outage() {
    for peer in peers() {
        let mut transfer = Transfer::new(Link::default(), peer, 4 * MB);
        transfer.outage = Time::from_millis(1100)..Time::from_secs(4);
        let report = transfer.run();
        assert!(report.stats.timeouts >= 3, "{report:?}");
        assert!(report.took < Micros::from_secs(10), "{peer:?} {report:?}");
    }
}

// RFC 3522 and 4015: a pause of the path looks like a loss, and is undone when it proves to be none.
#[test]
fn path_pause_is_detected_as_spurious() {
    for peer in peers().filter(|peer| peer.timestamps || peer.sack) {
        let peer = Peer { window: 200_000, ..peer };
        let mut transfer = Transfer::new(Link { queue: MB, ..Link::default() }, peer, 8 * MB);
        transfer.outage = Time::from_millis(1300)..Time::from_millis(2300);
        transfer.pause = true;
        let report = transfer.run();
        assert_eq!(report.dropped, 0);
        assert!(report.stats.timeouts >= 1 && report.stats.spurious >= 1, "{peer:?} {report:?}");
        assert!(report.took < Micros::from_millis(2600), "{peer:?} {report:?}");
    }
}

// RFC 8985, section 7.2, compensates for the delayed ACK of one segment. Linux delays the ACK of any number of segments
// while its application does not read: by 20 ms in this test.
#[test]
fn spurious_probes_become_rare() {
    let mut sender = Recovery::new(1000, Cubic, true, true);
    sender.first_rtt(Time::from_micros(1), Micros::new(100));
    let (mut now, mut probes) = (Time::from_millis(1), 0);
    for _ in 0..50 {
        let from = sender.planned_to();
        sender.plan_new(now, 3000);
        sender.published(now, from..from + 3000, false);
        let mut answer = Ack { una: from + 3000, ..Ack::default() };
        now += Micros::from_millis(20);
        while let Some(due) = sender.deadline().filter(|due| *due < now) {
            if sender.timer(due) == TimerAction::Probe
                && let Some(range) = sender.next_probe()
            {
                answer.dsack = Some((range.start, range.end));
                sender.published(due, range, true);
                probes += 1;
                now = due + Micros::new(100);
            }
        }
        sender.ack(now, &answer);
        assert_eq!(sender.una(), from + 3000);
        now += Micros::from_millis(1);
    }
    assert!((1..=3).contains(&probes), "{probes}");
}

// RFC 9406, section 3: slow start ends before the queue has lost a window of data.
#[test]
fn hystart_ends_slow_start_early() {
    let link = Link { queue: MB, ..Link::default() };
    let dropped = |algorithm| {
        let peer = Peer { algorithm, window: 64 * MB, ..Peer::default() };
        let report = run(link, peer, 8 * MB);
        assert!(report.rate(8 * MB) > 9e6, "{algorithm:?} {report:?}");
        report.dropped
    };
    let (without, with) = (dropped(NewReno), dropped(Cubic));
    assert!(without > 500 && with * 3 < without, "{without} without HyStart++, {with} with it");
}

// RFC 9406, section 4.3: with constant round-trip times, slow start is as fast as without HyStart++.
#[test]
fn constant_rtt_keeps_slow_start() {
    let link =
        Link { rate: 1_250_000_000, delay: Micros::from_millis(50), queue: 64 * MB, ..Link::default() };
    let took = |algorithm| {
        let peer = Peer { algorithm, window: 16 * MB, ..Peer::default() };
        run(link, peer, 64 * MB).took
    };
    assert_eq!(took(Cubic), took(NewReno));
}

//! BBR and pacing over links in virtual time.

use offcore_stats::time::{Micros, Time};

use super::super::Algorithm::{Bbr, Cubic};
use super::link::{Link, MB, Peer, Report, Transfer};

fn run(link: Link, peer: Peer, bytes: u64) -> Report {
    Transfer::new(link, Peer { window: 64 * MB, ..peer }, bytes).run()
}

fn bbr() -> Peer {
    Peer { algorithm: Bbr, ..Peer::default() }
}

/// 100 Mbit/s, 40 ms.
fn path() -> Link {
    Link { delay: Micros::from_millis(20), queue: 500_000, ..Link::default() }
}

// draft-ietf-ccwg-bbr, section 3.2: losses below 2 % do not reduce the rate.
#[test]
fn random_loss_keeps_bbr_rate() {
    let link = Link { loss: 0.01, ..path() };
    let rates = [Bbr, Cubic].map(|algorithm| run(link, Peer { algorithm, ..bbr() }, 60 * MB).rate(60 * MB));
    assert!(rates[0] > 0.75 * 12.5e6 && rates[0] > 5.0 * rates[1], "{rates:?}");
}

#[test]
fn bbr_fills_clean_path() {
    for (burst, copy) in [(1, 0), (44, 300)] {
        let report = run(path(), Peer { burst, copy: Micros::new(copy), ..bbr() }, 60 * MB);
        assert!(report.rate(60 * MB) > 0.88 * 12.5e6, "{} {report:?}", report.rate(60 * MB));
        assert_eq!(report.stats.timeouts, 0, "{report:?}");
    }
}

// Section 3: a queue of a tenth of the bandwidth-delay product is enough.
#[test]
fn bbr_fills_path_with_shallow_buffer() {
    let report = run(Link { queue: 50_000, ..path() }, bbr(), 60 * MB);
    assert!(report.rate(60 * MB) > 0.8 * 12.5e6, "{} {report:?}", report.rate(60 * MB));
    assert!(report.dropped < 1500, "{report:?}");
}

// Section 3: a deep queue stays short.
#[test]
fn deep_buffer_queue_stays_short() {
    let link = Link { queue: 16 * MB, ..path() };
    let report = run(link, bbr(), 60 * MB);
    assert!(report.rate(60 * MB) > 0.88 * 12.5e6, "{} {report:?}", report.rate(60 * MB));
    assert!(report.most_queued < 700_000 && report.dropped == 0, "{report:?}");
}

// Section 4.1.1.3: a slow application does not reduce the estimated bandwidth.
#[test]
fn app_limited_sender_keeps_bandwidth_estimate() {
    let mut transfer =
        Transfer::new(path(), Peer { writes: (20_000, Micros::from_millis(20)), ..bbr() }, 60 * MB);
    transfer.begin(Time::from_secs(1));
    while transfer.next() < Time::from_secs(12) {
        transfer.step();
    }
    let slow = transfer.sender.una();
    assert!((9_000_000..12_000_000).contains(&slow), "{slow} of 1 MB a second");
    assert!(transfer.sender.pacing_rate() > 3_000_000, "{}", transfer.sender.pacing_rate());
    // Then it writes without delays.
    transfer.write_all();
    while transfer.next() < Time::from_secs(14) {
        transfer.step();
    }
    let rate = (transfer.sender.una() - slow) / 2;
    assert!(rate > 9_000_000, "{rate} bytes a second");
}

// Section 3: flows converge to similar shares.
#[test]
fn two_bbr_flows_share_bandwidth() {
    let (mut first, mut second) =
        (Transfer::new(path(), bbr(), 1 << 30), Transfer::new(path(), bbr(), 1 << 30));
    second.share(&first);
    first.begin(Time::from_secs(1));
    second.begin(Time::from_secs(4));
    let mut before = (0, 0);
    while first.next().min(second.next()) < Time::from_secs(64) {
        let next = if first.next() <= second.next() { &mut first } else { &mut second };
        next.step();
        if next.next() < Time::from_secs(24) {
            before = (first.sender.una(), second.sender.una());
        }
    }
    let shares =
        [first.sender.una() - before.0, second.sender.una() - before.1].map(|bytes| bytes as f64 / 40.0);
    assert!(shares[0] + shares[1] > 0.85 * 12.5e6, "{shares:?}");
    assert!(shares.iter().all(|share| *share > 0.25 * 12.5e6), "{shares:?}");
}

// Section 5.3.4: the round-trip time is measured with less data in flight, twice in ten seconds.
#[test]
fn probe_rtt_learns_longer_path() {
    let mut transfer = Transfer::new(path(), bbr(), 1 << 30);
    transfer.begin(Time::from_secs(1));
    while transfer.next() < Time::from_secs(6) {
        transfer.step();
    }
    transfer.set_delay(Micros::from_millis(60));
    while transfer.next() < Time::from_secs(26) {
        transfer.step();
    }
    let before = transfer.sender.una();
    while transfer.next() < Time::from_secs(36) {
        transfer.step();
    }
    let rate = (transfer.sender.una() - before) as f64 / 10.0;
    assert!(rate > 0.85 * 12.5e6, "{rate}");
}

// `SO_MAX_PACING_RATE`: the rate is limited, without bursts.
#[test]
fn max_pacing_rate_limits_rate() {
    for algorithm in [Bbr, Cubic] {
        for pacing in [125_000, 1_250_000, 5_000_000] {
            let bytes = 4 * pacing;
            let report = run(Link { queue: 20_000, ..path() }, Peer { algorithm, pacing, ..bbr() }, bytes);
            let rate = report.rate(bytes) / pacing as f64;
            assert!((0.9..1.02).contains(&rate), "{algorithm:?} {pacing}: {rate} {report:?}");
            assert_eq!(report.dropped, 0, "{algorithm:?} {pacing}: {report:?}");
        }
    }
}

// RFC 3168, section 6.1.2: the response to marks is the same as to losses.
#[test]
fn ecn_marks_keep_queue_short() {
    let report = run(Link { marks: true, queue: 500_000, ..path() }, bbr(), 60 * MB);
    assert!(report.stats.marks > 0 && report.dropped < 100, "{report:?}");
    assert!(report.rate(60 * MB) > 0.8 * 12.5e6, "{} {report:?}", report.rate(60 * MB));
}

//! A packet generator between ports with known faults: its counts match the faults.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod faulty;

use std::net::IpAddr;
use std::time::{Duration, Instant};

use faulty::{Fault, looped, pair};
use offcore_flow::pktgen::rate::Rate;
use offcore_flow::pktgen::report::{Counts, PktgenReport, Reporter};
use offcore_flow::pktgen::search::{Limit, SearchOptions, search};
use offcore_flow::pktgen::trial::{TrialError, TrialPlan};
use offcore_flow::pktgen::{Payload, PktgenConfig, Running, Settings, start};
use offcore_mem::{Hugepages, Pool};
use offcore_port::Port;
use offcore_stats::lcore;
use offcore_wire::MacAddr;
use offcore_wire::traffic::{HeaderTemplate, Traffic, Transport, Vary};

const NO_PROGRESS: Duration = Duration::from_secs(10);

fn config(size: &str, flows: u32, count: u64) -> PktgenConfig {
    let traffic = Traffic {
        src_mac: MacAddr::local(1),
        dst_mac: MacAddr::local(2),
        vlan: None,
        src_ip: IpAddr::from([198, 18, 0, 1]),
        dst_ip: IpAddr::from([198, 18, 0, 2]),
        transport: Transport::Udp,
        src_port: 9,
        dst_port: 9,
        vary: Vary { src_port: true, ..Vary::default() },
    };
    let template = HeaderTemplate::new(&traffic).unwrap();
    PktgenConfig {
        payload: Payload::Made(vec![template.clone(), template]),
        bidirectional: false,
        settings: Settings {
            running: false,
            rate: Rate::Unlimited,
            sizes: size.parse().unwrap(),
            flows,
            burst: 1,
            count: Some(count),
            start: 0,
        },
        verify: 1,
        seed: 1,
        lcores: lcore::available().unwrap()[..1].into(),
    }
}

fn started(config: PktgenConfig, ports: Vec<Box<dyn Port>>) -> (Running, Reporter) {
    let running = start(config, ports, Pool::new(8192, 2048, Hugepages::None).unwrap()).unwrap();
    let reporter = Reporter::new(&running);
    (running, reporter)
}

/// Sends the count and waits until all `expected` packets have arrived.
fn sent_and_received(running: &mut Running, reporter: &mut Reporter, expected: u64) -> PktgenReport {
    running.begin().unwrap();
    let (mut last, mut progress) = (0, Instant::now());
    loop {
        let report = reporter.interval(running, "interval");
        let counts = report.all.counts;
        let came = counts.received + counts.corrupt + counts.foreign + counts.malformed;
        if running.is_done() && came >= expected {
            break;
        }
        if came > last {
            (last, progress) = (came, Instant::now());
        }
        assert!(progress.elapsed() < NO_PROGRESS, "{counts:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
    reporter.last(running, running.took(), running.gap())
}

#[test]
fn unchanged_traffic_is_clean() {
    for size in ["64", "imix", "64-9018", "65535:1,64:40"] {
        let (mut running, mut reporter) = started(config(size, 7, 20_000), looped(|_| None));
        let report = sent_and_received(&mut running, &mut reporter, 20_000);
        let counts = report.all.counts;
        assert_eq!((counts.sent, counts.received, counts.verified), (20_000, 20_000, 20_000), "{size}");
        assert!(
            counts.is_clean() && counts.foreign + counts.malformed + counts.tx_dropped == 0,
            "{counts:?}"
        );
        assert_eq!(counts.sent_bytes, counts.received_bytes);
        let latencies = report.all.latencies;
        assert!(latencies.min_ns.unwrap() <= latencies.p50_ns.unwrap());
        assert!(latencies.p999_ns.unwrap() <= latencies.max_ns.unwrap());
        assert_eq!(running.stop(), 0);
    }
}

/// A frame from the kernel, and a frame with an invalid IPv4 header.
const ARP: [u8; 60] = {
    let mut frame = [0; 60];
    (frame[12], frame[13]) = (8, 6);
    frame
};
const BROKEN: [u8; 60] = {
    let mut frame = [0; 60];
    (frame[12], frame[14]) = (8, 0x41);
    frame
};

#[test]
fn faults_are_counted_by_kind() {
    const PACKETS: u64 = 100_000;
    fn faults(number: u64) -> Option<Fault> {
        match number % 1000 {
            100 => Some(Fault::Lost),
            150 | 151 => Some(Fault::Twice),
            200 => Some(Fault::Late(40)),
            // Faults in the content, and in the number.
            300 => Some(Fault::Flipped(1)),
            301 => Some(Fault::Flipped(52)),
            400 => Some(Fault::Cut),
            500..503 => Some(Fault::Before(&ARP)),
            600 => Some(Fault::Before(&BROKEN)),
            _ => None,
        }
    }
    let (mut running, mut reporter) = started(config("104", 4, PACKETS), looped(faults));
    let thousands = PACKETS / 1000;
    // Per thousand packets: one is lost, two arrive twice, three plus one are from other senders, and one corrupt
    // packet also counts as received.
    let report = sent_and_received(&mut running, &mut reporter, PACKETS + thousands * (2 + 3 + 1 - 1 + 1));
    let expected = Counts {
        sent: PACKETS,
        sent_bytes: PACKETS * 104,
        // Without the lost packet, and two corrupt packets whose numbers are not trusted.
        received: PACKETS + 2 * thousands - 3 * thousands,
        received_bytes: (PACKETS - thousands * 3) * 104,
        verified: PACKETS + 2 * thousands - 3 * thousands,
        lost: 3 * thousands,
        reordered: thousands,
        duplicates: 2 * thousands,
        corrupt: 3 * thousands,
        foreign: 3 * thousands,
        malformed: thousands,
        ..Counts::default()
    };
    assert_eq!(report.all.counts, expected);
    assert!(!report.all.counts.is_clean());
}

#[test]
fn bidirectional_counts_are_separate() {
    let lost = |number| (number % 100 == 7).then_some(Fault::Lost);
    let lcores = lcore::available().unwrap();
    for lcores in [&lcores[..1], &lcores[..lcores.len().min(2)]] {
        let both = PktgenConfig { bidirectional: true, lcores: lcores.into(), ..config("64", 3, 10_000) };
        let (mut running, mut reporter) = started(both, pair(lost));
        let report = sent_and_received(&mut running, &mut reporter, 19_900);
        let of = |index: usize| {
            let one = &report.directions[index];
            (one.from, one.to, one.figures.counts.received, one.figures.counts.lost)
        };
        assert_eq!((of(0), of(1)), ((0, 1, 9_900, 100), (1, 0, 10_000, 0)));
        assert_eq!((report.all.counts.sent, report.all.counts.lost), (20_000, 100));
    }
}

#[test]
fn settings_change_while_packets_are_sent() {
    let (mut running, mut reporter) = started(config("64", 1, 1_000), looped(|_| None));
    let first = sent_and_received(&mut running, &mut reporter, 1_000).all.counts;
    assert_eq!(first.sent_bytes, 64_000);
    reporter.clear(&running);
    running.change(|settings| (settings.flows, settings.sizes) = (1000, "512".parse().unwrap())).unwrap();
    let second = sent_and_received(&mut running, &mut reporter, 1_000);
    assert_eq!((second.all.counts.sent, second.all.counts.sent_bytes), (1_000, 512_000));
    assert!(second.all.counts.is_clean(), "{second:?}");
    assert_eq!((second.flows, second.size.as_str()), (1000, "512"));
    // Numbers continue where they were when there are fewer flows again.
    reporter.clear(&running);
    running.change(|settings| settings.flows = 2).unwrap();
    assert!(sent_and_received(&mut running, &mut reporter, 1_000).all.counts.is_clean());
    for refused in
        [running.change(|settings| settings.flows = 0), running.change(|settings| settings.burst = 0)]
    {
        assert!(refused.unwrap_err().to_string().contains("expected"));
    }
    assert_eq!(running.settings().flows, 2);
}

#[test]
fn in_flight_packets_hide_no_loss() {
    // Delayed packets arrive after the clear. The same number of packets is lost in the second thousand.
    let faults = |number| match number {
        900..1000 => Some(Fault::Late(150)),
        1500..1600 => Some(Fault::Lost),
        _ => None,
    };
    let (mut running, mut reporter) = started(config("64", 1, 1_000), looped(faults));
    running.begin().unwrap();
    while reporter.interval(&running, "interval").all.counts.received < 900 {
        std::thread::sleep(Duration::from_millis(1));
    }
    reporter.clear(&running);
    let counts = sent_and_received(&mut running, &mut reporter, 1_000).all.counts;
    assert_eq!((counts.lost, counts.is_clean()), (100, false), "{counts:?}");
}

#[test]
fn burst_rate_is_kept() {
    let mut config = config("64", 1, 2_000);
    (config.settings.rate, config.settings.burst) = (Rate::Packets(20_000.0), 100);
    let (mut running, mut reporter) = started(config, looped(|_| None));
    let report = sent_and_received(&mut running, &mut reporter, 2_000);
    assert!(report.all.counts.is_clean());
    // The last burst is due after 95 ms, and never sent earlier.
    assert!(running.took() >= Duration::from_millis(95), "{:?}", running.took());
}

/// Three packets have two gaps between them, but a rate includes three.
#[test]
fn rate_includes_last_gap() {
    for (count, burst) in [(1, 1), (3, 1), (6, 3)] {
        let mut config = config("64", 1, count);
        (config.settings.rate, config.settings.burst) = (Rate::Packets(10.0), burst);
        let (mut running, mut reporter) = started(config, looped(|_| None));
        let report = sent_and_received(&mut running, &mut reporter, count);
        let [sent, received] = [report.all.tx_mpps, report.all.rx_mpps].map(|mpps| mpps * 1e6);
        // A delayed sender is slower, never faster.
        assert!(
            (2.0..10.01).contains(&sent) && (2.0..10.01).contains(&received),
            "{count}: {sent}, {received}"
        );
    }
}

#[test]
fn oversized_headers_are_rejected() {
    let mut config = config("64", 1, 1);
    let traffic = Traffic {
        src_mac: MacAddr::local(1),
        dst_mac: MacAddr::local(2),
        vlan: Some(7),
        src_ip: IpAddr::from([198, 18, 0, 1]),
        dst_ip: IpAddr::from([198, 18, 0, 2]),
        transport: Transport::Tcp,
        src_port: 9,
        dst_port: 9,
        vary: Vary::default(),
    };
    config.payload = Payload::Made(vec![HeaderTemplate::new(&traffic).unwrap()]);
    let pool = Pool::new(64, 2048, Hugepages::None).unwrap();
    let error = start(config, looped(|_| None), pool).unwrap_err().to_string();
    assert!(error.contains("Sizes: 64") && error.contains("80 bytes"), "{error}");
}

#[test]
fn search_finds_actual_loss() {
    // One packet in a thousand is lost at any rate.
    let lost = |number| (number % 1000 == 999).then_some(Fault::Lost);
    let (mut running, mut reporter) = started(config("64", 1, 1), looped(lost));
    let plan = TrialPlan { size: 128, duration: Duration::from_millis(50), wait: Duration::from_millis(200) };
    let mut go_on = |_: &mut Running| true;
    running.learn(plan.size, Duration::from_secs(5), &mut go_on).unwrap();
    let options = SearchOptions { losses: vec![0.0, 0.01], max_rate: 40_000.0, resolution: 0.25 };
    let found =
        search(&options, |rate| running.patient_trial(&mut reporter, &plan, rate, &mut go_on)).unwrap();
    let [none, little] = found[..] else { panic!("{found:?}") };
    // Trials of more than a thousand packets lose one. Whether the rate itself was kept depends on this machine.
    assert!(none.best.is_none_or(|best| best.outcome.rate < 40_000.0), "{none:?}");
    assert!(none.limit != Limit::MaxRate, "{none:?}");
    if let Some(best) = little.best {
        assert!(best.outcome.loss() <= 0.01 && best.figures.counts.verified > 0, "{best:?}");
    }
    // If every packet is lost, no learning frame arrives.
    let nothing = |_| Some(Fault::Lost);
    let (mut running, _) = started(config("64", 1, 1), looped(nothing));
    let error = running.learn(64, Duration::from_millis(100), &mut go_on).unwrap_err();
    assert!(matches!(error, TrialError::NothingCame { size: 64, .. }), "{error}");
    // A port that accepts no packets does not block this forever.
    let (mut running, _) = started(config("64", 1, 1), looped(|_| Some(Fault::Refused)));
    let error = running.learn(64, Duration::from_millis(100), &mut go_on).unwrap_err();
    assert!(matches!(error, TrialError::NothingCame { size: 64, .. }), "{error}");
}

#[test]
fn oversized_packets_are_refused() {
    let pool = Pool::new(64, 2048, Hugepages::None).unwrap();
    let error = start(config("64-65535", 1, 1), looped(|_| None), pool).unwrap_err().to_string();
    assert!(error.contains("65535") && error.contains("Pool"), "{error}");
    let mut running = start(config("64", 1, 1), looped(|_| None), pool).unwrap();
    let error = running.change(|settings| settings.sizes = "30000".parse().unwrap()).unwrap_err().to_string();
    assert!(error.contains("30000") && error.contains("Pool"), "{error}");
}

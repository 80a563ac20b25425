//! The learning switch and mirrors, as a switch with two workers.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::fs::File;
use std::io::BufReader;
use std::path::Path;
use std::time::{Duration, Instant};

use offcore_flow::bridge::BridgeConfig;
use offcore_flow::mirror::{Direction, Mirror};
use offcore_flow::report::{QueueReport, Report};
use offcore_flow::switch::{self, Run};
use offcore_flow::{Forward, SwitchConfig};
use offcore_mem::{Hugepages, Pool};
use offcore_port::Port;
use offcore_port::generator::{GenCounters, GenPort, GenReport};
use offcore_port::pcap::PcapPort;
use offcore_port::spec::PortSpec;
use offcore_stats::lcore;
use offcore_wire::pcap::PcapReader;

fn generator(text: &str, pool: &Pool) -> (Box<dyn Port>, GenCounters) {
    let PortSpec::Gen(spec) = text.parse().unwrap() else { panic!("{text} is no generator") };
    let port = GenPort::open(&spec, pool).unwrap();
    let counters = port.counters();
    (Box::new(port), counters)
}

fn capture(path: &Path) -> Box<dyn Port> {
    let PortSpec::Pcap(spec) = format!("pcap:-,{}", path.display()).parse().unwrap() else {
        panic!("no capture")
    };
    Box::new(PcapPort::open(&spec).unwrap())
}

fn packets_in(path: &Path) -> u64 {
    let mut reader = PcapReader::new(BufReader::new(File::open(path).unwrap())).unwrap();
    let mut buffer = vec![0; 65536];
    std::iter::from_fn(|| reader.next_record(&mut buffer).unwrap()).count() as u64
}

/// Runs a switch until the generators have received `received` packets. Returns the generators' reports and the last
/// report of the switch.
fn run(config: &SwitchConfig, specs: &[&str], captures: &[&Path], received: u64) -> (Vec<GenReport>, Report) {
    let pool = Pool::new(8192, 2048, Hugepages::None).unwrap();
    let (mut ports, generators): (Vec<_>, Vec<_>) = specs.iter().map(|spec| generator(spec, pool)).unzip();
    ports.extend(captures.iter().map(|path| capture(path)));
    let lcores = lcore::available().unwrap();
    // Two workers, which share an lcore if there is only one.
    let config = SwitchConfig { lcores: vec![lcores[0], lcores[lcores.len() - 1]], ..config.clone() };
    let mut running = switch::start(&config, ports, pool).unwrap();
    let mut reporter = running.reporter().unwrap();
    let reports = || generators.iter().map(GenCounters::report).collect::<Vec<_>>();
    let (mut seen, mut moved) = (0, Instant::now());
    while seen < received {
        std::thread::sleep(Duration::from_millis(20));
        running.tend();
        let now = reports().iter().map(|report| report.received).sum();
        if now > seen {
            (seen, moved) = (now, Instant::now());
        }
        assert!(moved.elapsed() < Duration::from_secs(10), "{seen} of {received} packets: {:?}", reports());
    }
    assert_eq!(running.stop(), 0);
    (reports(), reporter.report("final").unwrap())
}

fn packets(report: &Report, port: &str) -> u64 {
    report.queues.iter().filter(|queue| queue.port == port).map(|queue| queue.packets).sum()
}

/// Returns the number of copies that the mirror to this port dropped. Only mirrors may lose packets: a mirror's worker
/// may lose its core for so long that the rings to it become full.
fn dropped_by_mirror(report: &Report, to: usize) -> u64 {
    let rings = format!("mirror{to}");
    let drops = |queue: &QueueReport| queue.drops.iter().map(|(_, packets)| packets).sum::<u64>();
    report.queues.iter().filter(|queue| queue.port == rings).map(drops).sum()
}

fn assert_no_drops_but_of_mirrors(report: &Report) {
    for queue in report.queues.iter().filter(|queue| !queue.port.starts_with("mirror")) {
        assert_eq!(queue.drops, [], "{queue:?}");
    }
}

#[test]
fn flooded_packets_reach_mirror_captures() {
    let dir = std::env::temp_dir().join(format!("offcore-l2-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let (both, sent) = (dir.join("both.pcap"), dir.join("sent.pcap"));
    let mirrors = vec![
        Mirror { port: 0, direction: Direction::Both, to: 3 },
        Mirror { port: 1, direction: Direction::Tx, to: 4 },
    ];
    let config =
        SwitchConfig { run: Run::Bridge(BridgeConfig::default()), mirrors, ..SwitchConfig::default() };
    const EACH: u64 = 10_000;
    let specs =
        [64, 512, 1518].map(|size| format!("gen:size={size},count={EACH},rate=20k,flows=16,queues=2"));
    let specs = specs.each_ref().map(String::as_str);
    let (found, report) = run(&config, &specs, &[&both, &sent], 6 * EACH);
    assert_no_drops_but_of_mirrors(&report);
    for one in found {
        assert_eq!((one.sent, one.received), (EACH, 2 * EACH), "{one:?}");
        assert!(one.is_clean() && one.foreign == 0, "{one:?}");
    }
    let bridge = report.bridge.as_ref().unwrap();
    assert_eq!(bridge.addresses, 3);
    assert!(bridge.ports.iter().all(|port| port.flooded == EACH && port.learned == 1), "{bridge:?}");
    assert_eq!(packets_in(&both) + dropped_by_mirror(&report, 3), packets(&report, "port0"));
    assert_eq!(packets_in(&sent) + dropped_by_mirror(&report, 4), 2 * EACH);
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn every_forward_mode_mirrors() {
    let dir = std::env::temp_dir().join(format!("offcore-mirror-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    for forward in [Forward::Io, Forward::Mac, Forward::Macswap] {
        let file = dir.join(format!("{forward:?}"));
        let mirrors = vec![Mirror { port: 1, direction: Direction::Both, to: 2 }];
        let config = SwitchConfig { run: Run::forward(forward), mirrors, ..SwitchConfig::default() };
        let specs = ["gen:size=64,count=5000,rate=20k,queues=2", "gen:size=256,count=5000,rate=20k,queues=2"];
        let (found, report) = run(&config, &specs, &[&file], 10_000);
        assert_no_drops_but_of_mirrors(&report);
        assert!(found.iter().all(|one| one.is_clean() && one.received == 5000), "{forward:?}: {found:?}");
        assert_eq!(packets_in(&file) + dropped_by_mirror(&report, 2), 10_000, "{forward:?}");
    }
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn invalid_switch_configs_are_rejected() {
    let refused = |config: SwitchConfig, specs: &[&str]| {
        let pool = Pool::new(64, 2048, Hugepages::None).unwrap();
        let ports = specs.iter().map(|spec| generator(spec, pool).0).collect();
        let lcores = config.lcores.iter().map(|_| lcore::available().unwrap()[0]).collect();
        switch::start(&SwitchConfig { lcores, ..config }, ports, pool).unwrap_err().to_string()
    };
    let l2 = SwitchConfig { run: Run::Bridge(BridgeConfig::default()), ..SwitchConfig::default() };
    let error = refused(l2.clone(), &["gen:"]);
    assert!(error.contains("Ports: 1, expected 2 to 64"), "{error}");
    let error = refused(SwitchConfig { lcores: vec![0; 3], ..l2.clone() }, &["gen:queues=4", "gen:queues=2"]);
    assert!(error.contains("3 lcores") && error.contains("port1") && error.contains("queues=3"), "{error}");
    let vlans = vec!["5=access:10".parse().unwrap()];
    let run = Run::Bridge(BridgeConfig { vlans, ..BridgeConfig::default() });
    let error = refused(SwitchConfig { run, ..l2 }, &["gen:", "gen:size=65"]);
    assert!(error.contains("Vlans: port 5"), "{error}");
    let mirrors = vec![Mirror { port: 1, direction: Direction::Rx, to: 1 }];
    let error = refused(SwitchConfig { mirrors, ..SwitchConfig::default() }, &["gen:", "gen:size=65"]);
    assert!(error.contains("Mirrors: port 1"), "{error}");
}

//! `offcore run` and `offcore check`: each file of examples/run, with veth interfaces and a simulated DSA device in
//! place of hardware, and wrong files.

use std::fs;
use std::net::TcpListener;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::time::Duration;

use peers::offcore::Signal;
use peers::{Need, Netns, Offcore, TempDir, exclusive};

use crate::switch::{self, Report};
use crate::tcp::inside;

/// A namespace whose `eth0` and `eth1` are connected to a second one, and a directory for files.
struct VethNamespaces {
    here: Netns,
    there: Netns,
    dir: TempDir,
}

impl VethNamespaces {
    fn new() -> Self {
        let place =
            Self { here: Netns::new().unwrap(), there: Netns::new().unwrap(), dir: TempDir::new().unwrap() };
        for name in ["eth0", "eth1"] {
            switch::quiet(&place.here);
            switch::quiet(&place.there);
            let queues = ["numrxqueues", "2", "numtxqueues", "2"];
            let here = [&["link", "add", name, "netns", place.here.name()][..], &queues].concat();
            let there = [&["type", "veth", "peer", "name", name][..], &queues].concat();
            place.here.ip(&[&here[..], &there, &["netns", place.there.name()]].concat()).unwrap();
            for netns in [&place.here, &place.there] {
                netns.ip(&["link", "set", name, "up"]).unwrap();
            }
        }
        place
    }

    /// Writes an example with some text replaced. Each text must occur.
    fn example(&self, name: &str, replaced: &[(&str, &str)]) -> PathBuf {
        let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/run");
        let mut text = fs::read_to_string(examples.join(name)).unwrap();
        for (from, to) in replaced {
            assert!(text.contains(from), "{name} has no {from}");
            text = text.replace(from, to);
        }
        let path = self.dir.file(name);
        fs::write(&path, text).unwrap();
        path
    }

    /// Runs a file in the first namespace, with a report five times per second, and waits for the first one.
    fn run(&self, file: &Path) -> Offcore {
        let file = file.to_str().unwrap();
        let args = ["run", file, "--stats-interval", "0.2", "--format", "json"];
        let mut offcore = Offcore::start_in(&self.here, &args).unwrap();
        switch::wait_for_report(&mut offcore);
        offcore
    }
}

/// Returns the packets of a port in a report.
fn packets(report: &Report, port: &str, half: &str) -> u64 {
    let queues = report.0["queues"].as_array().unwrap();
    let of = queues.iter().filter(|queue| queue["port"] == port && queue["half"] == half);
    of.map(|queue| queue["packets"].as_u64().unwrap()).sum()
}

/// Waits until a port has sent packets.
fn wait_for_sent(offcore: &mut Offcore, port: &str, at_least: u64) {
    switch::wait_for(offcore, "sent packets", at_least, |report| packets(report, port, "tx"));
}

const NEEDS: [Need; 3] = [Need::Root, Need::Tun, Need::Ip];

#[test]
fn vhost_example_switches_and_mirrors() {
    let Some(_cores) = exclusive(&NEEDS) else { return };
    let place = VethNamespaces::new();
    let socket = place.dir.file("web1").display().to_string();
    let simulated = |queue| format!("kind = \"dsa-sim\"\ndevice = 0\nwork_queues = [{queue}]");
    let file = place.example(
        "vhost.toml",
        &[
            ("lcores = [2, 3]", "lcores = [0]"),
            ("buffers = 65536", "buffers = 16384"),
            ("/run/offcore/ports/web1", &socket),
            ("kind = \"dsa\"                     #", "kind = \"dsa\" #"),
            ("kind = \"dsa\" # kind = \"dsa-sim\", profile = \"vhost\", work_queues = [0] needs no hardware\nwork_queues = [\"wq0.0\"]", &format!("{}\nprofile = \"vhost\"\nlcore = 1", simulated(0))),
            ("kind = \"dsa\"\nwork_queues = [\"wq0.1\"]", &simulated(1)),
        ],
    );
    let mut offcore = place.run(&file);
    // A guest that sends to an unknown station: its packets are flooded to the uplink and mirrored.
    let port = format!("virtio-user:{socket},queues=2,mac=52:54:00:00:00:02");
    let guest = Offcore::start(&[
        "switch",
        "--port",
        &port,
        "--forward",
        "txonly",
        "--lcores",
        "1",
        "--duration",
        "1",
    ]);
    assert!(guest.unwrap().wait().unwrap().status.success());
    wait_for_sent(&mut offcore, "uplink", 1);
    let report = switch::stop_with_log(offcore).0;
    assert!(packets(&report, "web1", "rx") > 0 && packets(&report, "monitor", "tx") > 0, "{report}");
    let bridge = report.0["bridge"]["ports"].as_array().unwrap();
    assert_eq!(
        (&bridge[0]["port"], &report.0["ports"][0]["port"]),
        (&"web1".into(), &"web1".into()),
        "{report}"
    );
    assert_eq!((&bridge[0]["refused"], &bridge[0]["learned"]), (&0.into(), &0.into()), "{report}");
    assert!(report.sum("channels", "completed") + report.sum("workers", "core_copies") > 0, "{report}");
    assert!(
        report.0["channels"]
            .as_array()
            .unwrap()
            .iter()
            .all(|c| c["channel"].as_str().unwrap().starts_with("dsa-sim0:")),
        "{report}"
    );
}

#[test]
fn copy_example_returns_packets() {
    let Some(_cores) = exclusive(&NEEDS) else { return };
    let place = VethNamespaces::new();
    let mut offcore = place.run(&place.example("copy.toml", &[]));
    let pktgen = ["pktgen", "--port", "af_packet:eth0", "--count", "500", "--rate", "5k", "--format", "json"];
    let finished = Offcore::start_in(&place.there, &pktgen).unwrap().wait().unwrap();
    let counted = Report::last_of(&finished).0;
    // The interface may not be up yet for the first packets, which are not sent then.
    let sent = counted["sent"].as_u64().unwrap();
    assert!(sent > 0 && counted["received"] == sent && counted["lost"] == 0, "{counted}");
    wait_for_sent(&mut offcore, "a", sent);
    let report = switch::stop(offcore);
    assert!(report.sum("channels", "completed") > 0, "the helper copies: {report}");
}

#[test]
fn gpu_example_drops_matches() {
    let Some(_cores) = exclusive(&NEEDS[..1]) else { return };
    let place = VethNamespaces::new();
    let rules = place.dir.file("rules.txt").display().to_string();
    // Every packet of a generator contains this pattern: its UDP ports.
    fs::write(&rules, "\\x00\\x09\\x00\\x09\n").unwrap();
    let file = place.example(
        "gpu.toml",
        &[
            ("/etc/offcore/rules.txt", &rules),
            ("size = 1024", "size = 1024\ncount = 1000"),
            ("kind = \"match\"", "kind = \"match\"\nskip = 0"),
        ],
    );
    let args = ["run", file.to_str().unwrap(), "--until-idle", "--format", "json"];
    let finished = Offcore::start_in(&place.here, &args).unwrap().wait().unwrap();
    let report = Report::last_of(&finished);
    let work = &report.0["work"][0];
    assert_eq!((&work["hits"], &work["dropped"]), (&1000.into(), &1000.into()), "{report}");
}

#[test]
fn tcp_example_serves_applications() {
    let Some(_cores) = exclusive(&NEEDS) else { return };
    let place = VethNamespaces::new();
    let socket = place.dir.file("stack.sock").display().to_string();
    let file = place.example(
        "tcp.toml",
        &[
            ("lcores = [2]", "lcores = [0]"),
            ("serve = \"/run/offcore/stack.sock\"", &format!("serve = \"{socket}\"")),
            ("\"www-data\", \"redis\"", "\"nobody\""),
            ("profile = \"vpp\"", "profile = \"vpp\"\nlcore = 1"),
        ],
    );
    let offcore = place.run(&file);
    switch::wait_until("the socket is there", || Path::new(&socket).exists());
    place.there.configure("eth1", "192.0.2.1/24").unwrap();
    place.there.run("ping", &["-c2", "-i0.2", "-W5", "192.0.2.10"]).unwrap();
    let report = switch::stop(offcore);
    assert_eq!(report.0["interfaces"][0]["addresses"].as_array().map(Vec::len), Some(3), "{report}");
}

#[test]
fn epping_example_streams() {
    let Some(_cores) = exclusive(&NEEDS) else { return };
    let place = VethNamespaces::new();
    let mut offcore = place.run(&place.example("epping.toml", &[]));
    place.here.ip(&["addr", "add", "10.0.0.1/24", "dev", "tap0"]).unwrap();
    inside(&place.here, || {
        let listener = TcpListener::bind("10.0.0.1:9").unwrap();
        let (mut stream, _) = listener.accept().unwrap();
        let mut bytes = vec![0; 1 << 20];
        std::io::Read::read_exact(&mut stream, &mut bytes).unwrap();
        std::thread::spawn(move || std::io::copy(&mut stream, &mut std::io::sink()));
    });
    wait_for_sent(&mut offcore, "net0", 500);
    let finished = offcore.stop().unwrap();
    let summary = finished.lines.last().and_then(|line| line.json.clone()).unwrap();
    assert!(summary["chunks"].as_u64() >= Some(3), "{summary}");
}

#[test]
fn service_notifies_its_manager() {
    let Some(_cores) = exclusive(&NEEDS) else { return };
    let place = VethNamespaces::new();
    let file = place.dir.file("service.toml");
    let tap = "[[port]]\nname = \"t\"\nkind = \"tap\"\ninterface = \"tap0\"\nmac = \"02:00:00:00:77:02\"\nmtu = 1400\n";
    fs::write(&file, format!("version = 1\n[process]\nlcores = [0]\nidle = \"sleep\"\n[switch]\n{tap}"))
        .unwrap();
    let path = place.dir.file("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let expect = |wanted: &str| loop {
        let mut message = [0; 256];
        let read = manager.recv(&mut message).unwrap_or_else(|error| panic!("no {wanted}: {error}"));
        if String::from_utf8_lossy(&message[..read]).lines().any(|line| line == wanted) {
            return;
        }
    };
    let socket = format!("NOTIFY_SOCKET={}", path.display());
    let start = || {
        let args = ["run", file.to_str().unwrap(), "--format", "json"];
        let started = Offcore::start_behind(&place.here, &["env", &socket, "WATCHDOG_USEC=200000"], &args);
        expect("READY=1");
        started.unwrap()
    };
    let address =
        || place.here.run("cat", &["/sys/class/net/tap0/address", "/sys/class/net/tap0/mtu"]).unwrap();
    let mut offcore = start();
    assert_eq!(address(), "02:00:00:00:77:02\n1400\n");
    expect("WATCHDOG=1");
    expect("WATCHDOG=1");
    // After a crash the manager starts it again, and the interface is the same.
    offcore.signal(Signal::KILL).unwrap();
    drop(offcore);
    let mut offcore = start();
    assert_eq!(address(), "02:00:00:00:77:02\n1400\n");
    offcore.signal(Signal::TERM).unwrap();
    expect("STOPPING=1");
    let finished = offcore.wait().unwrap();
    assert_eq!(
        finished.lines.len(),
        1,
        "without a terminal there is only the final report: {}",
        finished.stdout
    );
    Report::last_of(&finished);
}

#[test]
fn printed_file_runs_like_its_flags() {
    let Some(_cores) = exclusive(&[]) else { return };
    let dir = TempDir::new().unwrap();
    let flags = [
        "copy",
        "--port",
        "gen:size=1518,count=3000",
        "--dma",
        "rxq0@core:1",
        "--lcores",
        "0",
        "--no-mac-updating",
    ];
    let printed = Offcore::run(&[&flags[..], &["--print-config"]].concat()).unwrap();
    assert!(printed.status.success(), "{}", printed.stderr);
    let file = dir.file("printed.toml");
    fs::write(&file, &printed.stdout).unwrap();
    let file = file.to_str().unwrap();
    let checked = Offcore::run(&["check", file]).unwrap();
    assert!(checked.stdout.contains("instance 'printed' with 1 port, no problems"), "{}", checked.stdout);
    let end = ["--until-idle", "--format", "json"];
    let by_flags = Report::last_of(&Offcore::run(&[&flags[..], &end].concat()).unwrap());
    let by_file = Report::last_of(&Offcore::run(&[&["run", file][..], &end].concat()).unwrap());
    for report in [by_flags, by_file] {
        let generated = report.generator(0);
        assert_eq!((generated.sent, generated.verified, generated.lost), (3000, 3000, 0), "{report}");
    }
}

#[test]
fn wrong_files_are_refused_with_lines() {
    let dir = TempDir::new().unwrap();
    let file = dir.file("wrong.toml");
    let path = file.to_str().unwrap();
    let long = "#".repeat(2 << 20);
    let nested = format!("version = 1\nx = {}", "[".repeat(100_000));
    let cases: [(&[u8], &str); 9] = [
        (
            b"version = 1\n[switch]\n[[port]]\nname = \"a\"\nkind = \"gen\"\nsize = 1\n",
            ":6: port.a.size: found 1, expected",
        ),
        (b"version = 1\n[switch]\nforward = \n", ":3: "),
        (b"", "version: is missing"),
        (b"\0\0\0\0", ":1: "),
        (b"version = 1\n\xff\xfe", ":2: not UTF-8"),
        (long.as_bytes(), "longer than 1048576 bytes"),
        (nested.as_bytes(), "wrong.toml:2: "),
        (b"version = 1\nversion = 1\n", ":2: duplicate key"),
        (b"version = 99999999999999999999999999\n[switch]\n", ":1: version: expected 1"),
    ];
    for (text, expected) in cases {
        fs::write(&file, text).unwrap();
        for command in ["check", "run"] {
            let finished = Offcore::run(&[command, path]).unwrap();
            let shown = String::from_utf8_lossy(&text[..text.len().min(99)]);
            assert_eq!(finished.status.code(), Some(2), "{shown}: {}", finished.stderr);
            assert!(finished.stderr.contains(expected), "{shown}: {}", finished.stderr);
            assert!(!finished.stderr.contains("panicked"), "{}", finished.stderr);
        }
    }
    fs::write(
        &file,
        "version = 1\n[switch]\nforward = \"txonly\"\n[[port]]\nname = \"a\"\nkind = \"gen\"\ncount = 1\n",
    )
    .unwrap();
    let endless = Offcore::run(&["run", path, "--until-idle"]).unwrap();
    assert!(endless.stderr.contains("this forwarding mode never stops sending"), "{}", endless.stderr);
    let missing = Offcore::run(&["run", "/no/such.toml"]).unwrap();
    assert!(missing.stderr.contains("/no/such.toml: cannot be read: No such file"), "{}", missing.stderr);
}

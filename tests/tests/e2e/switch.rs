//! Starts `offcore switch` and checks its reports.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use offcore_bench::peer::process::Process;
use peers::offcore::Finished;
use peers::{Netns, Offcore};
use serde_json::Value;

/// Feature bit of packed virtqueues.
pub(crate) const VIRTIO_F_RING_PACKED: u64 = 1 << 34;

/// The engine that makes the copies of the vhost ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Copies {
    /// The worker's core.
    Core,
    /// A helper thread on lcore 1.
    Helper,
    /// A simulated DSA device on lcore 1. One copy in a thousand has a page fault.
    Simulator,
}

impl Copies {
    /// The engines that are fast enough for a polling peer.
    pub(crate) const ALL: [Self; 2] = [Self::Core, Self::Helper];

    /// Returns the value of `--dma` for ports with `queues` queue pairs, if any.
    fn map(self, queues: u16) -> Option<String> {
        let [tx, rx] = match self {
            Self::Core => return None,
            Self::Helper => ["core:1"; 2],
            Self::Simulator => ["dsa-sim0:wq0.0", "dsa-sim0:wq0.1"],
        };
        let queue = |queue| format!("txq{queue}@{tx};rxq{queue}@{rx}");
        Some((0..queues).map(queue).collect::<Vec<_>>().join(";"))
    }

    /// Returns the flags that the engine needs.
    fn flags(self) -> &'static [&'static str] {
        match self {
            Self::Core | Self::Helper => &[],
            Self::Simulator => &["--dsa-sim", "0:profile=vhost,lcore=1,fault=page:0.001"],
        }
    }
}

/// Returns whether `OFFCORE_FULL=1` requests every combination and longer transfers.
pub(crate) fn full() -> bool {
    std::env::var_os("OFFCORE_FULL").is_some_and(|full| full == "1")
}

/// Returns flags with which an idle switch leaves its lcores to guests and stacks. In a full run it polls.
pub(crate) fn idle() -> &'static [&'static str] {
    if full() { &[] } else { &["--idle", "sleep"] }
}

/// Returns the arguments of a switch between `ports` with one worker on lcore 0 and five reports per second. The engine
/// `copies` makes the copies of the first `queues` queues.
pub(crate) fn arguments(
    ports: &[impl AsRef<str>],
    copies: Copies,
    queues: u16,
    more: &[&str],
) -> Vec<String> {
    arguments_on("0", ports, copies, queues, more)
}

/// Like [`arguments`], with the worker on other lcores.
pub(crate) fn arguments_on(
    lcores: &str,
    ports: &[impl AsRef<str>],
    copies: Copies,
    queues: u16,
    more: &[&str],
) -> Vec<String> {
    let mut args: Vec<String> = vec!["switch".into()];
    args.extend(ports.iter().flat_map(|port| ["--port", port.as_ref()].map(String::from)));
    args.extend(["--lcores", lcores].map(String::from));
    args.extend(["--stats-interval", "0.2", "--format", "json"].map(String::from));
    args.extend(copies.map(queues).into_iter().flat_map(|map| ["--dma".into(), map]));
    args.extend(copies.flags().iter().map(|flag| (*flag).to_owned()));
    args.extend(more.iter().map(|flag| (*flag).to_owned()));
    args
}

/// Starts a switch: see [`arguments`].
pub(crate) fn start(ports: &[impl AsRef<str>], copies: Copies, queues: u16, more: &[&str]) -> Offcore {
    start_on(0, ports, copies, queues, more)
}

/// Like [`start`], with the worker on another lcore.
pub(crate) fn start_on(
    lcore: usize,
    ports: &[impl AsRef<str>],
    copies: Copies,
    queues: u16,
    more: &[&str],
) -> Offcore {
    let args = arguments_on(&lcore.to_string(), ports, copies, queues, more);
    Offcore::start(&args.iter().map(String::as_str).collect::<Vec<_>>()).unwrap()
}

/// Starts a switch in a namespace, with the worker on these lcores. The core makes the copies.
pub(crate) fn start_in(netns: &Netns, lcores: &str, ports: &[impl AsRef<str>], more: &[&str]) -> Offcore {
    let args = arguments_on(lcores, ports, Copies::Core, 1, more);
    Offcore::start_in(netns, &args.iter().map(String::as_str).collect::<Vec<_>>()).unwrap()
}

/// Waits for the first report. By then the ports are open.
pub(crate) fn wait_for_report(offcore: &mut Offcore) {
    offcore.wait_for("a report", |line| line.json.is_some()).unwrap();
}

/// Waits up to 10 seconds until a condition holds.
pub(crate) fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(10);
    while !done() {
        assert!(Instant::now() < end, "waited 10 s until {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Starts an iperf3 server in a namespace and waits until it listens. It ends when dropped.
pub(crate) fn iperf3_server(netns: &Netns, more: &[&str]) -> Process {
    let mut command = netns.command("iperf3");
    command.args(["--server", "--forceflush"]).args(more);
    let mut server = Process::spawn("iperf3", command).unwrap();
    let listening = |text: &str| text.contains("listening").then_some(());
    server.wait_for(0, Duration::from_secs(10), "iperf3 to listen", listening).unwrap();
    server
}

/// Starts tcpdump in a namespace, which captures the frames that an interface receives, and waits until it captures.
/// Its buffer is large: with a smaller one, frames were missing on a busy machine.
pub(crate) fn tcpdump(netns: &Netns, interface: &str, file: &Path, more: &[&str]) -> Process {
    let mut command = netns.command("tcpdump");
    command
        .args(["-i", interface, "-Q", "in", "-n", "-U", "-B", "16384", "-Z", "root", "-w"])
        .arg(file)
        .args(more);
    let tcpdump = Process::spawn("tcpdump", command).unwrap();
    let has_header = || std::fs::metadata(file).is_ok_and(|file| file.len() >= 24);
    wait_until("tcpdump has begun", has_header);
    tcpdump
}

/// Creates a veth pair in a namespace and sets both ends up.
pub(crate) fn veth_in(netns: &Netns, left: &str, right: &str) {
    netns.veth(left, netns, right).unwrap();
    for end in [left, right] {
        netns.ip(&["link", "set", end, "up"]).unwrap();
    }
}

/// Prevents new interfaces of a namespace from sending packets by themselves.
pub(crate) fn quiet(netns: &Netns) {
    netns.run("sysctl", &["-qw", "net.ipv6.conf.default.disable_ipv6=1"]).unwrap();
}

/// Waits until a report says that at least this many packets have passed the `half` of `port`.
pub(crate) fn wait_for_packets(offcore: &mut Offcore, port: usize, half: &str, at_least: u64) -> Report {
    let what = format!("port {port}'s {half} packets");
    wait_for(offcore, &what, at_least, |report| report.packets(port, half))
}

/// Waits until a report has at least this count.
pub(crate) fn wait_for(
    offcore: &mut Offcore,
    what: &str,
    at_least: u64,
    count: impl Fn(&Report) -> u64,
) -> Report {
    let line = offcore.wait_for_count(what, at_least, |report| Some(count(&Report(report.clone()))));
    Report(line.unwrap().json.unwrap())
}

/// Returns the last report printed.
pub(crate) fn latest(offcore: &Offcore) -> Report {
    let last = offcore.lines().pop().and_then(|line| line.json);
    Report(last.unwrap_or_else(|| panic!("no report yet: {}", offcore.tail())))
}

/// Waits until a report's status line of `port` contains `text`.
pub(crate) fn wait_for_status(offcore: &mut Offcore, port: usize, text: &str) {
    let what = format!("port {port}'s status to say {text:?}");
    let says = |report: &Value| Report(report.clone()).status(port).contains(text);
    offcore.wait_for(&what, |line| line.json.as_ref().is_some_and(says)).unwrap();
}

/// Stops a switch and returns its final report. The switch must have ended with status 0, with no copies unfinished or
/// failed, and with no warnings in the log.
pub(crate) fn stop(offcore: Offcore) -> Report {
    let (report, log) = stop_with_log(offcore);
    let worries: Vec<_> = log.lines().filter(|line| is_worry(line)).collect();
    assert!(worries.is_empty(), "the switch logged:\n{log}\n{report}");
    report
}

/// Like [`stop`], for a switch that may have logged warnings. Returns the log.
pub(crate) fn stop_with_log(offcore: Offcore) -> (Report, String) {
    let finished = offcore.stop().unwrap();
    let report = Report::last_of(&finished);
    for worker in report.list("workers") {
        for bad in ["fallbacks", "resets", "quarantined"] {
            assert_eq!(worker[bad], 0, "{report}");
        }
    }
    for channel in report.list("channels") {
        assert_eq!((&channel["failed"], &channel["in_flight"]), (&0.into(), &0.into()), "{report}");
        assert_eq!(channel["submitted"], channel["completed"], "{report}");
    }
    (report, finished.stderr)
}

fn is_worry(line: &str) -> bool {
    [" WARN ", " ERROR ", "last error", "is broken"].iter().any(|bad| line.contains(bad))
}

/// A report of a switch.
#[derive(Clone, Debug)]
pub(crate) struct Report(pub(crate) Value);

/// Counters of a generator port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Generated {
    /// Packets generated.
    pub(crate) sent: u64,
    /// Probes received.
    pub(crate) received: u64,
    /// Probes whose content was checked.
    pub(crate) verified: u64,
    /// Numbers missing below the highest received number.
    pub(crate) lost: u64,
    /// Probes received twice.
    pub(crate) duplicates: u64,
    /// Probes that are out of order, duplicated or changed, and packets that are not probes.
    pub(crate) wrong: u64,
}

impl Report {
    /// Returns the final report of a run that ended successfully with no copies unfinished.
    pub(crate) fn last_of(finished: &Finished) -> Self {
        let last = finished.lines.last().and_then(|line| line.json.clone());
        let report = Self(last.unwrap_or_else(|| panic!("no final report: {finished:?}")));
        assert_eq!(finished.status.code(), Some(0), "{}\n{report}", finished.stderr);
        assert_eq!((&report.0["report"], &report.0["unfinished"]), (&"final".into(), &0.into()), "{report}");
        assert!(!finished.stderr.contains("panicked"), "{}", finished.stderr);
        report
    }

    fn list(&self, name: &str) -> &[Value] {
        self.0[name].as_array().unwrap_or_else(|| panic!("no {name:?} in {self}"))
    }

    fn queues(&self, port: usize, half: &str) -> impl Iterator<Item = &Value> {
        let of = move |queue: &&Value| queue["port"] == format!("port{port}") && queue["half"] == half;
        let queues: Vec<_> = self.list("queues").iter().filter(of).collect();
        assert!(!queues.is_empty(), "no port{port} {half} in {self}");
        queues.into_iter()
    }

    /// Returns the number of packets for each queue of one half of a port.
    pub(crate) fn packets_by_queue(&self, port: usize, half: &str) -> Vec<u64> {
        self.queues(port, half).map(|queue| number(queue, "packets")).collect()
    }

    /// Returns the number of packets of one half of a port.
    pub(crate) fn packets(&self, port: usize, half: &str) -> u64 {
        self.packets_by_queue(port, half).iter().sum()
    }

    /// Returns the number of bytes, without FCS.
    pub(crate) fn bytes(&self, port: usize, half: &str) -> u64 {
        self.queues(port, half).map(|queue| number(queue, "bytes")).sum()
    }

    /// Returns the number of polls of one half of a port that left packets in the ring for lack of packet buffers.
    pub(crate) fn starved(&self, port: usize, half: &str) -> u64 {
        self.queues(port, half).map(|queue| number(queue, "starved")).sum()
    }

    /// Returns dropped packets by port, half and reason, such as `port0 tx full`, summed over queues.
    pub(crate) fn drops(&self) -> BTreeMap<String, u64> {
        let mut all = BTreeMap::new();
        for queue in self.list("queues") {
            let [port, half] = [&queue["port"], &queue["half"]].map(|name| name.as_str().unwrap_or_default());
            let drops = queue["drops"].as_object().unwrap_or_else(|| panic!("no drops in {queue}"));
            for (reason, packets) in drops {
                *all.entry(format!("{port} {half} {reason}")).or_default() += packets.as_u64().unwrap();
            }
        }
        all
    }

    /// Returns the packets dropped for one reason, named as in [`Report::drops`].
    pub(crate) fn dropped(&self, reason: &str) -> u64 {
        self.drops().get(reason).copied().unwrap_or(0)
    }

    /// Returns the packets dropped for any reason.
    pub(crate) fn dropped_in_all(&self) -> u64 {
        self.drops().values().sum()
    }

    /// Returns the number of packets for which the other side of a port had no room.
    pub(crate) fn full(&self, port: usize) -> u64 {
        self.dropped(&format!("port{port} tx full"))
    }

    /// Asserts that packets were dropped only for these reasons.
    pub(crate) fn assert_only_drops(&self, expected: &[&str]) {
        let drops = self.drops();
        assert!(drops.keys().all(|drop| expected.contains(&drop.as_str())), "dropped {drops:?}: {self}");
    }

    /// Sums a counter over all entries of a list.
    pub(crate) fn sum(&self, list: &str, name: &str) -> u64 {
        self.list(list).iter().map(|entry| number(entry, name)).sum()
    }

    /// Asserts that the right engine made the copies. A helper makes at least one copy for each of `packets` packets,
    /// except for packets that arrived when its channel was full. Without a helper, no channels exist.
    pub(crate) fn assert_copies(&self, copies: Copies, packets: u64) {
        let (offloaded, core) = (self.sum("channels", "completed"), self.sum("workers", "core_copies"));
        match copies {
            Copies::Core => {
                assert!(self.list("channels").is_empty(), "{self}");
                assert!(core >= packets, "{core} copies of {packets} packets: {self}");
            }
            Copies::Helper | Copies::Simulator => {
                let all = offloaded + self.sum("workers", "overflow") + self.sum("workers", "fallbacks");
                assert!(offloaded > 0 && all >= packets, "{all} copies of {packets} packets: {self}");
            }
        }
    }

    /// Returns the counters of the generator at `port`.
    pub(crate) fn generator(&self, port: usize) -> Generated {
        let generator = &self.port(port)["generator"];
        assert!(generator.is_object(), "port {port} is no generator: {self}");
        let get = |name| number(generator, name);
        let wrong = ["reordered", "duplicates", "corrupt", "foreign"];
        Generated {
            sent: get("sent"),
            received: get("received"),
            verified: get("verified"),
            // The counter is missing if nothing was received.
            lost: generator["lost"].as_u64().unwrap_or_default(),
            duplicates: get("duplicates"),
            wrong: wrong.into_iter().map(get).sum(),
        }
    }

    /// Returns the port's status line.
    pub(crate) fn status(&self, port: usize) -> &str {
        self.port(port)["status"].as_str().unwrap_or_default()
    }

    /// Returns the virtio features that a vhost port's front end has negotiated, from its status line.
    pub(crate) fn features(&self, port: usize) -> u64 {
        let status = self.status(port);
        let features = status.split_once("features 0x").map(|(_, text)| text);
        let digits = features.and_then(|text| text.split(|c: char| !c.is_ascii_hexdigit()).next());
        let features = digits.and_then(|digits| u64::from_str_radix(digits, 16).ok());
        features.unwrap_or_else(|| panic!("no features in {status:?}"))
    }

    fn port(&self, port: usize) -> &Value {
        &self.list("ports")[port]
    }
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:#}", self.0)
    }
}

fn number(value: &Value, name: &str) -> u64 {
    value[name].as_u64().unwrap_or_else(|| panic!("no number {name:?} in {value}"))
}

//! `offcore bench tcp --case neighbour`: measures the rate of an honest client during attacks by peers and by programs
//! on the same stack.
//!
//! ```text
//! lcore                                       other lcore
//! a server of files, or nginx under           the honest client: a new connection for each file,
//! `offcore exec`; host, af_packet ── veth ──  and hostile peers, in a namespace of their own
//! ```
//! Each attack gets a new stack. Windows are measured before the attack, during the attack, and from 5 s after its end.
//! Hostile peers and programs share the core of the honest client, which lowers our result. The client compares every
//! byte.

mod attack;
mod honest;

use std::fs;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use super::http::server::{self, PORT, Server, Site};
use super::veth::pair;
use crate::BURST;
use crate::peer::netns::{self, Netns};
use crate::peer::process::Process;
use crate::peer::tempdir::TempDir;
use crate::report::progress::Progress;
use crate::report::row::Row;
use crate::report::sample::Spread;
use attack::{Attack, Running};
use honest::{Client, Window};

/// The unit of the rows.
pub const UNIT: &str = "kept_of_requests_per_s";

/// Addresses of the stack, the honest client, and hostile peers.
const ADDRESS: &str = "10.77.0.2";
const HONEST: &str = "10.77.0.1/24";
const HOSTILE: [&str; 3] = ["10.77.0.10", "10.77.0.11", "10.77.0.12"];
/// Size of the honest client's file in bytes.
const SIZE: usize = 32 << 10;
/// Time without an attack before the last windows.
const REST: Duration = Duration::from_secs(5);
/// User ID of hostile programs.
const USER: &str = "65534";
const PROGRAMS: [(&str, &str); 4] =
    [("nginx", "nginx"), ("taskset", "util-linux"), ("setpriv", "util-linux"), ("python3", "python3")];

/// Parameters of a measurement.
#[derive(Clone, Debug)]
pub struct NeighbourOptions {
    /// Path of this program: `offcore`.
    pub binary: PathBuf,
    /// Number of windows in each phase: without an attack, during it, and after it.
    pub windows: usize,
    pub window: Duration,
    /// The core of the stack and nginx.
    pub lcore: usize,
    /// The core of the client and the hostile peers.
    pub other_lcore: Option<usize>,
}

impl NeighbourOptions {
    /// Returns options with 10 windows of 1 s each, or 4 with `quick`.
    pub fn new(quick: bool, binary: PathBuf, lcore: usize, other_lcore: Option<usize>) -> Self {
        let windows = if quick { 4 } else { 10 };
        Self { binary, windows, window: Duration::from_secs(1), lcore, other_lcore }
    }

    /// Returns a missing requirement of this machine, if any.
    pub fn missing(&self) -> Option<String> {
        netns::missing((self.lcore, self.other_lcore), &PROGRAMS).or_else(server::missing)
    }
}

/// Measures all attacks and passes each finished row to `emit`.
///
/// # Errors
/// A missing requirement ([`NeighbourOptions::missing`]), a failed setup, or a wrong byte.
pub fn run(options: &NeighbourOptions, progress: &Progress, emit: &mut dyn FnMut(Row)) -> Result<()> {
    if let Some(missing) = options.missing() {
        bail!("neighbours on a stack: {missing}");
    }
    Netns::sweep()?;
    progress.begin(3 * Attack::ALL.len() * options.windows);
    for attack in Attack::ALL {
        progress.say(&format!("neighbour, {attack}"));
        emit(measure(attack, options, progress).with_context(|| attack.to_string())?);
    }
    progress.end();
    Ok(())
}

/// A stack with its server.
struct Stack {
    process: Process,
    socket: PathBuf,
    _nginx: Option<Server>,
}

impl Stack {
    fn start(site: &Site<'_>, near: &Netns, attack: Attack, options: &NeighbourOptions) -> Result<Self> {
        let socket = site.dir.file("stack");
        let mut command = site.command(near, &options.binary);
        command.args(["tcp", "--lcores", &options.lcore.to_string(), "--stats-interval", "0"]);
        command.args(["--idle", "sleep", "--port", &format!("af_packet:ours0,addr={ADDRESS}/24")]);
        if attack.is_of_peers() {
            let files = site.dir.file("files");
            command.args(["--app", &format!("http:{}:{PORT}", files.display())]);
        } else {
            command.arg("--serve").arg(&socket).args(["--allow-uid", USER]);
        }
        let mut process = Process::spawn("offcore tcp", command)?;
        if attack.is_of_peers() {
            return Ok(Self { process, socket, _nginx: None });
        }
        server::wait_for_socket(&mut process, &socket)?;
        let mut nginx = site.command(near, &options.binary);
        nginx.args(["exec", "--stack"]).arg(&socket).arg("--");
        let nginx = Server::start(site, (nginx, "ours"), ADDRESS, None)?;
        Ok(Self { process, socket, _nginx: Some(nginx) })
    }
}

fn measure(attack: Attack, options: &NeighbourOptions, progress: &Progress) -> Result<Row> {
    let other_lcore = options.other_lcore.context("neighbours need two lcores")?;
    let (near, far, dir) = (Netns::new()?, Netns::new()?, TempDir::new()?);
    pair("ours", Some(HONEST), &near, &far, true)?;
    for address in HOSTILE {
        far.ip(&["addr", "add", &format!("{address}/24"), "dev", "ours1"])?;
    }
    far.run("sysctl", &["-qw", "net.ipv4.ip_local_port_range=1024 65535"])?;
    let site = Site::new(&dir, options.lcore, &far)?;
    fs::write(dir.file("files/hostile"), vec![0; attack::HOSTILE_SIZE]).context("a file")?;
    let mut stack = Stack::start(&site, &near, attack, options)?;
    let client = Client {
        address: format!("{ADDRESS}:{PORT}").parse()?,
        name: site.add(SIZE)?,
        content: site.content(SIZE),
        window: options.window,
    };
    let measured = far.within(|| {
        offcore_stats::lcore::pin(other_lcore)?;
        client.wait_for_server()?;
        let windows = || -> Result<Vec<Window>> {
            let one = || {
                let window = client.window();
                progress.step();
                window
            };
            (0..options.windows).map(|_| one()).collect()
        };
        client.window()?;
        let alone = windows()?;
        let running = Running::start(attack, &site, &near, &stack.socket, options)?;
        let beside = windows()?;
        running.stop()?;
        thread::sleep(REST);
        Ok([alone, beside, windows()?])
    });
    let ended = stack.process.exit_status(Duration::ZERO);
    ensure!(ended.is_none(), "the stack has ended: {ended:?}\n{}", stack.process.tail());
    Ok(row(attack, &measured.with_context(|| stack.process.tail())?))
}

fn row(attack: Attack, [alone, beside, after]: &[Vec<Window>; 3]) -> Row {
    let rates = |windows: &[Window]| windows.iter().map(Window::rate).collect::<Vec<_>>();
    let mean = |windows: &[Window]| rates(windows).iter().sum::<f64>() / windows.len().max(1) as f64;
    let kept: Vec<f64> = rates(beside).iter().map(|rate| rate / mean(alone)).collect();
    let kept = Spread::of(&kept);
    let (first, second) = alone.split_at(alone.len() / 2);
    let answers = [alone, beside, after].into_iter().flatten().map(Window::answers).sum();
    Row {
        bench: "tcp",
        case: "neighbour".into(),
        arrangement: "end-to-end",
        mode: "cpu".into(),
        engine: "cpu".into(),
        ring: "none",
        burst: BURST,
        temperature: "none".into(),
        port: Some("af_packet"),
        offloads: Some(true),
        chunk: Some(SIZE),
        attack: Some(attack.name()),
        metric: "kept",
        unit: UNIT,
        runs: kept.runs,
        min: kept.min,
        median: kept.median,
        max: kept.max,
        beside_over_alone: Some(mean(beside) / mean(alone)),
        after_over_alone: Some(mean(after) / mean(alone)),
        noise_floor: Some((mean(first) / mean(second) - 1.0).abs()),
        capacity_mpps: Some(mean(alone) / 1e6),
        mpps: mean(beside) / 1e6,
        p99_ns: honest::percentile(beside, 0.99),
        peer_p99_ns: honest::percentile(alone, 0.99),
        received: answers,
        verified: answers,
        lost: beside.iter().map(|window| window.failed).sum(),
        ..Row::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_compare_windows() {
        let of = |answers: usize, ms: u64| Window {
            seconds: 1.0,
            latencies: vec![Duration::from_millis(ms); answers],
            failed: 1,
        };
        let windows = [vec![of(100, 1); 4], vec![of(50, 3); 4], vec![of(90, 1); 4]];
        let row = row(Attack::HalfRequests, &windows);
        assert_eq!((row.beside_over_alone, row.after_over_alone), (Some(0.5), Some(0.9)));
        assert_eq!((row.p99_ns, row.peer_p99_ns), (Some(3e6), Some(1e6)));
        assert_eq!((row.verified, row.lost, row.noise_floor), (960, 4, Some(0.0)));
    }
}

//! `offcore bench tcp --case neighbour`: measures the rate of honest clients during attacks by peers and by programs on
//! the same stack.
//!
//! ```text
//! lcore                                       other lcore
//! host, af_packet ────────────────── veth ──  honest clients, with a new connection for each file,
//! and the server of files                     and hostile peers, in a namespace of their own;
//!                                             nginx and hostile programs under `offcore exec`
//! ```
//! Each attack gets a new stack. Windows are measured before the attack, during the attack, and from 5 s after its end.
//! A window without an attack in which other processes used a core is repeated. Hostile peers and programs share the
//! core of nginx and the honest clients, which have a higher priority than programs. This weakens the attackers, and
//! their packets and timers still take time from the clients. The clients compare every byte. Between the windows the
//! strength of the attack is recorded: an attack that does not reach half of its intended strength is an error.

mod attack;
mod honest;
mod source;
mod strength;

use std::fs;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::cores::{Cores, OTHERS, seconds_of, seconds_of_softirqs, ticks};
use super::http::server::{self, PORT, Server, Site};
use super::kernel::{KernelOptions, pair};

use crate::peer::netns::Netns;
use crate::peer::process::Process;
use crate::peer::tempdir::TempDir;
use crate::report::progress::Progress;
use crate::report::row::{Counts, Load, Row};
use crate::report::sample::{Spread, Steadiness};
use attack::{Attack, Running};
use honest::{Client, Window};

/// The unit of the rows.
pub const UNIT: &str = "kept_of_requests_per_s";

/// Addresses of the stack, the honest clients, and hostile peers.
const ADDRESS: &str = "10.77.0.2";
const HONEST: &str = "10.77.0.1/24";
const HOSTILE: [&str; 3] = ["10.77.0.10", "10.77.0.11", "10.77.0.12"];
/// Size of the honest clients' file in bytes.
const SIZE: usize = 32 << 10;
/// Length of a window.
const WINDOW: Duration = Duration::from_secs(1);
/// Time without an attack before the last windows.
const REST: Duration = Duration::from_secs(5);
/// User ID of hostile programs.
const USER: &str = "65534";
const PROGRAMS: [(&str, &str); 4] =
    [("nginx", "nginx"), ("taskset", "util-linux"), ("setpriv", "util-linux"), ("python3", "python3")];

/// Returns the number of windows in each phase: without an attack, during it, and after it.
const fn windows_of_phase(quick: bool) -> usize {
    if quick { 4 } else { 10 }
}

/// Measures all attacks and passes each finished row to `emit`.
///
/// # Errors
/// A missing requirement, a failed setup, or a wrong byte.
pub fn run(options: &KernelOptions, progress: &Progress, emit: &mut dyn FnMut(Row)) -> Result<()> {
    let other_lcore = options.start("neighbours on a stack", &PROGRAMS, server::missing)?;
    progress.begin(3 * Attack::ALL.len() * windows_of_phase(options.quick));
    for attack in Attack::ALL {
        progress.say(&format!("neighbour, {attack}"));
        emit(measure(attack, options, other_lcore, progress).with_context(|| attack.to_string())?);
    }
    progress.end();
    Ok(())
}

/// A stack with its server.
struct Stack {
    process: Process,
    socket: PathBuf,
    nginx: Option<Server>,
}

impl Stack {
    fn start(
        site: &Site<'_>,
        near: &Netns,
        attack: Attack,
        options: &KernelOptions,
        other_lcore: usize,
    ) -> Result<Self> {
        let socket = site.dir.file("stack");
        let mut command = site.command(near, &options.binary);
        command.args(["tcp", "--lcores", &options.lcore.to_string(), "--stats-interval", "0"]);
        // A polling stack serves the clients so fast that they leave too little of their core to the attackers.
        command.args(["--idle", "sleep", "--port", &format!("af_packet:ours0,addr={ADDRESS}/24")]);
        if attack.is_of_peers() {
            let files = site.dir.file("files");
            command.args(["--app", &format!("http:{}:{PORT}", files.display())]);
        } else {
            command.arg("--serve").arg(&socket).args(["--allow-uid", USER]);
        }
        let mut process = Process::spawn("offcore tcp", command)?;
        if attack.is_of_peers() {
            return Ok(Self { process, socket, nginx: None });
        }
        server::wait_for_socket(&mut process, &socket)?;
        let mut nginx = near.command("taskset");
        nginx.args(["-c", &other_lcore.to_string(), "nice", "-n", &honest::NICE.to_string()]);
        nginx.arg(&options.binary).args(["exec", "--stack"]).arg(&socket).arg("--");
        let nginx = Server::start(site, nginx, "ours", ADDRESS, None)?;
        Ok(Self { process, socket, nginx: Some(nginx) })
    }

    /// Returns the CPU time in seconds that the stack and nginx have used.
    fn used(&self) -> Result<[f64; 2]> {
        let nginx = self.nginx.as_ref().map(Server::used).transpose()?;
        Ok([seconds_of(ticks(&self.process.id().to_string())?), nginx.unwrap_or_default()])
    }
}

/// Measures windows.
struct Meter<'a> {
    client: &'a Client<'a>,
    stack: &'a Stack,
    /// The cores of the stack and of the clients.
    lcores: [usize; 2],
    /// Number of windows in each phase.
    windows: usize,
    progress: &'a Progress,
    /// Number of requests without a complete answer in all phases, those in repeated windows included.
    failed: u64,
    repeats: Steadiness,
}

impl Meter<'_> {
    /// Measures the windows of a phase, beside an attack if there is one. Windows beside an attack are never discarded:
    /// the work of the kernel that disturbs them may be the attack's.
    fn phase(&mut self, mut attack: Option<&mut Running>) -> Result<Vec<Window>> {
        let repeated = if attack.is_some() { 0 } else { self.windows };
        let (mut windows, most) = (Vec::new(), self.repeats.rejected + repeated);
        while windows.len() < self.windows {
            let (cores, before) = (Cores::watch(self.lcores)?, self.used(attack.as_deref())?);
            let window = self.client.window()?;
            let after = self.used(attack.as_deref())?;
            let others = cores.others([0, 1].map(|core| after[core] - before[core]))?;
            if let Some(attack) = &mut attack {
                attack.observe()?;
            }
            self.failed += window.failed;
            if self.repeats.counts(others <= OTHERS, most) {
                windows.push(window);
                self.progress.step();
            }
        }
        Ok(windows)
    }

    /// Returns the CPU time in seconds that the stack has used, and that nginx, clients and attackers have used. Both
    /// times include the kernel's softirq thread of the core, which processes their packets.
    fn used(&self, attack: Option<&Running>) -> Result<[f64; 2]> {
        let attackers = attack.map(Running::used).transpose()?.unwrap_or_default();
        let softirqs = self.lcores.map(seconds_of_softirqs);
        let [stack, nginx] = self.stack.used()?;
        let others = nginx + seconds_of(ticks("self")?) + attackers;
        Ok([stack + softirqs[0], others + softirqs[1]])
    }
}

/// The result of an attack.
struct Measured {
    before: Vec<Window>,
    during: Vec<Window>,
    after: Vec<Window>,
    failed: u64,
    repeats: Steadiness,
    /// The smallest number of attackers during the attack.
    attackers: Option<u64>,
}

fn measure(attack: Attack, options: &KernelOptions, other_lcore: usize, progress: &Progress) -> Result<Row> {
    let (near, far, dir) = (Netns::new()?, Netns::new()?, TempDir::new()?);
    pair("ours", Some(HONEST), &near, &far, true)?;
    for address in HOSTILE {
        far.ip(&["addr", "add", &format!("{address}/24"), "dev", "ours1"])?;
    }
    far.run("sysctl", &["-qw", "net.ipv4.ip_local_port_range=1024 65535"])?;
    let site = Site::new(&dir, options.lcore, &far)?;
    fs::write(dir.file("files/hostile"), vec![0; attack::HOSTILE_SIZE]).context("a file")?;
    let mut stack = Stack::start(&site, &near, attack, options, other_lcore)?;
    let client = Client {
        address: format!("{ADDRESS}:{PORT}").parse()?,
        name: site.add(SIZE)?,
        content: site.content(SIZE),
        window: WINDOW,
        nice: if attack.is_of_peers() { 0 } else { honest::NICE },
    };
    let measured = far.within(|| {
        offcore_stats::lcore::pin(other_lcore)?;
        client.wait_for_server()?;
        let mut meter = Meter {
            client: &client,
            stack: &stack,
            lcores: [options.lcore, other_lcore],
            windows: windows_of_phase(options.quick),
            progress,
            failed: 0,
            repeats: Steadiness::default(),
        };
        client.window()?;
        let before = meter.phase(None)?;
        let mut running = Running::start(attack, &site, &near, &stack.socket, options)?;
        let during = meter.phase(Some(&mut running))?;
        // The attackers fall silent, instead of freeing the server's memory by resets of their connections.
        for address in HOSTILE {
            far.ip(&["rule", "add", "from", address, "blackhole"])?;
        }
        let attackers = running.stop()?;
        thread::sleep(REST);
        let after = meter.phase(None)?;
        let Meter { failed, repeats, .. } = meter;
        Ok(Measured { before, during, after, failed, repeats, attackers })
    });
    let ended = stack.process.exit_status(Duration::ZERO);
    ensure!(ended.is_none(), "the stack has ended: {ended:?}\n{}", stack.process.tail());
    Ok(row(attack, &measured.with_context(|| stack.process.tail())?))
}

/// Returns the mean rate of windows.
fn mean<'a>(windows: impl IntoIterator<Item = &'a Window>) -> f64 {
    let rates: Vec<f64> = windows.into_iter().map(|window| window.rate).collect();
    rates.iter().sum::<f64>() / rates.len().max(1) as f64
}

/// Returns how far the ratio of two rates is from 1: the larger one over the smaller one, minus 1.
fn distance(a: f64, b: f64) -> f64 {
    a.max(b) / a.min(b) - 1.0
}

/// Returns the noise floor: the deviation from 1 of the ratio between the two halves of a phase. It is the larger one
/// of the deviations before and after the attack. The ratio between the two phases is a result, not noise.
fn noise(before: &[Window], after: &[Window]) -> f64 {
    let halves = [before, after].map(|windows| {
        let (first, second) = windows.split_at(windows.len() / 2);
        distance(mean(first), mean(second))
    });
    halves[0].max(halves[1])
}

fn row(attack: Attack, measured: &Measured) -> Row {
    let Measured { before, during, after, failed, repeats, attackers } = measured;
    let (alone, recovered) = (mean(before), mean(after));
    // A rate before the attack that was too low by chance must not hide a loss.
    let baseline = alone.max(recovered);
    let kept: Vec<f64> = during.iter().map(|window| window.rate / baseline).collect();
    let answers = [before, during, after].into_iter().flatten().map(Window::answers).sum();
    let mut row = Row::new("tcp", "neighbour", "end-to-end");
    (row.head.port, row.tcp.offloads) = (Some("af_packet"), Some(true));
    (row.tcp.chunk, row.tcp.connections) = (Some(SIZE), Some(honest::CLIENTS));
    row.set_spread("kept", UNIT, Spread::of(&kept));
    row.figures.mpps = mean(during) / 1e6;
    row.tcp.beside.beside_over_alone = Some(mean(during) / baseline);
    row.load = Load {
        attack: Some(attack.name()),
        attackers: *attackers,
        after_over_alone: Some(recovered / alone),
        capacity_mpps: Some(alone / 1e6),
        ..Load::default()
    };
    row.ratios.noise.noise_floor = Some(noise(before, after));
    row.latency.p99_ns = honest::percentile(during, 0.99);
    row.latency.peer_p99_ns = honest::percentile(before, 0.99);
    row.counts = Counts { received: answers, verified: answers, lost: *failed };
    row.clock = *repeats;
    row
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::golden;

    fn windows(rates: [f64; 4], ms: u64) -> Vec<Window> {
        let of = |rate| Window { rate, latencies: vec![Duration::from_millis(ms); 10], failed: 0 };
        rates.map(of).to_vec()
    }

    fn measured(before: [f64; 4], after: [f64; 4]) -> Measured {
        let repeats = Steadiness { rejected: 2, unsteady: 1, ..Steadiness::default() };
        let [before, during, after] =
            [(before, 1), ([60.0; 4], 3), (after, 1)].map(|(rates, ms)| windows(rates, ms));
        Measured { before, during, after, failed: 7, repeats, attackers: Some(5) }
    }

    #[test]
    fn rows_compare_windows() {
        let row = row(Attack::HalfRequests, &measured([100.0; 4], [80.0; 4]));
        golden::check("tcp, neighbour", &row);
        assert_eq!((row.tcp.beside.beside_over_alone, row.load.after_over_alone), (Some(0.6), Some(0.8)));
        assert_eq!((row.latency.p99_ns, row.latency.peer_p99_ns), (Some(3e6), Some(1e6)));
        assert_eq!(
            (row.counts.verified, row.counts.lost, row.clock.rejected, row.clock.unsteady),
            (120, 7, 2, 1)
        );
        assert_eq!((row.ratios.noise.noise_floor, row.load.attackers), (Some(0.0), Some(5)));
    }

    #[test]
    fn a_low_rate_before_the_attack_does_not_flatter() {
        let row = row(Attack::HalfRequests, &measured([80.0; 4], [120.0; 4]));
        assert_eq!((row.tcp.beside.beside_over_alone, row.load.after_over_alone), (Some(0.5), Some(1.5)));
    }

    #[test]
    fn noise_is_measured_per_phase() {
        let (steady, unsteady) = (windows([75.0; 4], 1), windows([50.0, 50.0, 100.0, 100.0], 1));
        assert_eq!((noise(&steady, &unsteady), noise(&unsteady, &steady)), (1.0, 1.0));
        assert_eq!(noise(&windows([50.0; 4], 1), &steady), 0.0);
    }

    #[test]
    fn failed_requests_count_as_slow() {
        let mut during = windows([60.0; 4], 3);
        assert_eq!(honest::percentile(&during, 0.99), Some(3e6));
        during[0].failed = 1;
        assert_eq!(honest::percentile(&during, 0.99), Some(2e9));
    }
}

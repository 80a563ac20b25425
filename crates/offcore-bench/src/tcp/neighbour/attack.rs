//! Attacks on a stack: by peers on the network, and by programs on the stack.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use offcore_stats::named;
use rustix::process::{Resource, Signal, getrlimit};

use super::strength::{Report, Sample, Strength};
use super::{ADDRESS, HOSTILE, USER, source};
use crate::peer::netns::Netns;
use crate::peer::process::{Process, TIMEOUT};
use crate::tcp::cores::seconds_of_first_thread;
use crate::tcp::http::server::{PORT, Site};
use crate::tcp::kernel::KernelOptions;

/// Size of the file that hostile peers request, in bytes.
pub(super) const HOSTILE_SIZE: usize = 4 << 20;
/// Number of connections that read nothing of an answer.
const ZERO_WINDOWS: usize = 3000;
/// Number of connections with an incomplete request. It exceeds the number of 4 KB blocks in the default memory.
const HALF_REQUESTS: usize = 70_000;
/// Number of listeners whose program does not accept, and their first port.
const LISTENERS: u16 = 380;
const FIRST_PORT: u16 = 20_000;
/// Intended number of established connections to each of these listeners, and number of connections that peers try to
/// have. The latter exceeds the listener's backlog of 64.
const UNACCEPTED: usize = 45;
const TRIED: usize = 80;
/// Number of ports of the stack that a user may have.
const PORTS: u64 = 14_115;
/// Number of the stack's descriptors for a listener that also listens in the kernel.
const DESCRIPTORS_PER_LISTENER: u64 = 19;
/// Number of applications that claim marks.
const CLAIMING: usize = 64;
/// Number of connections that transfer bulk data.
const BULK_CONNECTIONS: usize = 64;
/// Intended rates: MB of bulk data, claims of marks, and opened listeners per second.
const BULK_RATE: u64 = 16;
const CLAIMS: u64 = 100 * CLAIMING as u64;
const CHURN: u64 = 200;
/// Size of the hostile peers' receive buffers in bytes.
const BUFFER: usize = 4096;
/// Maximum number of connections per process of hostile peers, because descriptors are limited per process.
const CONNECTIONS: usize = 14_000;
/// Maximum number of connections that a process of hostile peers opens per second: at first, and later, when it
/// replaces connections that have ended.
const RATES: [usize; 2] = [2000, 400];

named! {
    /// Attacks.
    pub(super) enum Attack {
        /// Peers request a large file and read nothing of it.
        ZeroWindows = "zero-windows",
        /// Peers send an incomplete request.
        HalfRequests = "half-requests",
        /// A program has listeners with full queues and accepts nothing. Peers connect again and again.
        FullQueues = "full-queues",
        /// Applications claim marks of sessions that do not have any.
        ClaimedMarks = "claimed-marks",
        /// A program opens as many listeners as it can, then closes and opens listeners without a pause.
        Descriptors = "descriptors",
        /// A program receives as much data from peers as it can.
        Uploads = "uploads",
        /// A program sends as much data to peers as it can.
        Downloads = "downloads",
        /// The control: a program on the stack that only uses CPU time of the clients' core.
        Spinning = "spinning",
    }
}

impl Attack {
    /// Returns whether peers on the network attack a file server. Otherwise programs attack a stack that they share
    /// with other programs.
    pub(super) fn is_of_peers(self) -> bool {
        matches!(self, Self::ZeroWindows | Self::HalfRequests)
    }

    /// Returns the source of the hostile programs on the stack, and their number.
    fn programs(self) -> Option<(&'static str, usize)> {
        match self {
            Self::ZeroWindows | Self::HalfRequests => None,
            Self::FullQueues => Some((source::FULL_QUEUES, 1)),
            Self::ClaimedMarks => Some((source::CLAIMED_MARKS, CLAIMING)),
            Self::Descriptors => Some((source::DESCRIPTORS, 1)),
            Self::Uploads | Self::Downloads => Some((source::BULK, 1)),
            Self::Spinning => Some((source::SPINNING, 1)),
        }
    }

    /// Returns the number of connections of hostile peers, the first port and the number of ports, and the data sent on
    /// each connection.
    fn peers(self) -> Option<(usize, u16, u16, &'static str)> {
        match self {
            Self::ZeroWindows => Some((ZERO_WINDOWS, PORT, 1, "GET /hostile HTTP/1.1\r\nHost: a\r\n\r\n")),
            Self::HalfRequests => Some((HALF_REQUESTS, PORT, 1, "GET /hostile HTTP/1.1\r\nHost: ")),
            Self::FullQueues => Some((usize::from(LISTENERS) * TRIED, FIRST_PORT, LISTENERS, "hostile")),
            _ => None,
        }
    }

    /// Returns whether the program on the stack sends or receives bulk data, and then the same for its peers.
    fn bulk(self) -> Option<[&'static str; 2]> {
        match self {
            Self::Uploads => Some(["receive", "send"]),
            Self::Downloads => Some(["send", "receive"]),
            _ => None,
        }
    }

    /// Returns the arguments of the hostile programs on the stack.
    fn arguments(self) -> Vec<String> {
        match self.bulk() {
            Some([ours, _]) => vec![ours.to_owned(), FIRST_PORT.to_string(), BULK_CONNECTIONS.to_string()],
            None => [FIRST_PORT, LISTENERS].map(|number| number.to_string()).to_vec(),
        }
    }
}

/// Returns the number of descriptors of the stack for a user of hostile programs: the stack divides its descriptors
/// between this user and its own user.
fn descriptors() -> u64 {
    getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX) / 2
}

/// An attack in progress.
#[derive(Debug)]
pub(super) struct Running {
    attack: Attack,
    processes: Vec<Process>,
    last: Option<Sample>,
    /// The smallest number of attackers so far.
    weakest: Option<u64>,
}

impl Running {
    /// Starts the attack and waits until it is complete.
    pub(super) fn start(
        attack: Attack,
        site: &Site<'_>,
        near: &Netns,
        socket: &Path,
        options: &KernelOptions,
    ) -> Result<Self> {
        let lcore = options.other_lcore.context("neighbours need two lcores")?.to_string();
        let mut running = Self { attack, processes: Vec::new(), last: None, weakest: None };
        if let Some((program, count)) = attack.programs() {
            for _ in 0..count {
                let mut command = near.command("taskset");
                command.args(["-c", &lcore]);
                command.args(["setpriv", "--reuid", USER, "--regid", USER, "--clear-groups"]);
                command.arg(&options.binary).args(["exec", "--stack"]).arg(socket).arg("--");
                command.args(["python3", "-c", program]);
                command.args(attack.arguments());
                command.current_dir(site.dir.path());
                running.processes.push(Process::spawn("a hostile program", command)?);
            }
            running.wait()?;
        }
        if let Some((mut left, first, ports, request)) = attack.peers() {
            let request: String = request.bytes().map(|byte| format!("{byte:02x}")).collect();
            while left > 0 {
                let count = left.min(CONNECTIONS);
                left -= count;
                let mut command = site.far.command("taskset");
                command.args(["-c", &lcore, "python3", "-c", source::PEERS, ADDRESS]);
                let numbers = [usize::from(first), usize::from(ports), count, BUFFER, RATES[0], RATES[1]];
                command.args(numbers.map(|number| number.to_string()));
                command.arg(&request).args(HOSTILE);
                running.processes.push(Process::spawn("hostile peers", command)?);
            }
            running.wait()?;
        }
        if let Some([_, theirs]) = attack.bulk() {
            let mut command = site.far.command("taskset");
            command.args(["-c", &lcore, "python3", "-c", source::BULK, theirs]);
            command
                .args([FIRST_PORT.to_string(), BULK_CONNECTIONS.to_string(), ADDRESS.to_owned()])
                .args(HOSTILE);
            running.processes.push(Process::spawn("hostile peers", command)?);
            running.wait()?;
        }
        running.observe()?;
        Ok(running)
    }

    fn wait(&mut self) -> Result<()> {
        let ready = |text: &str| text.contains("ready").then_some(());
        self.processes.iter_mut().try_for_each(|process| process.wait_for(0, TIMEOUT, "ready", ready))
    }

    /// Records the strength of the attack since the last call. It runs in the namespace of the hostile peers.
    ///
    /// # Errors
    /// If the attack has less than half of its intended strength.
    pub(super) fn observe(&mut self) -> Result<()> {
        let reports = self.processes.iter().map(|process| Report::last(&process.stdout_from(0)));
        let sample = Sample::new(reports.collect(), &HOSTILE)?;
        if let Some(last) = self.last.replace(sample.clone()) {
            let Strength { attackers, target, is_enough, unit } = self.strength(&last, &sample);
            ensure!(
                is_enough,
                "the attack is too weak: {attackers} {unit}, expected at least half of {target} \
                 (established connections of attackers: {}, {})\n{}",
                last.established,
                sample.established,
                self.processes.first().map(Process::tail).unwrap_or_default()
            );
            self.weakest = Some(self.weakest.map_or(attackers, |weakest| weakest.min(attackers)));
        }
        Ok(())
    }

    /// Returns the strength of the attack between two samples.
    fn strength(&self, last: &Sample, sample: &Sample) -> Strength {
        let established = last.established.min(sample.established);
        let rate = sample.attempts_per_second(last);
        match self.attack {
            Attack::ZeroWindows | Attack::HalfRequests => {
                let wanted = self.attack.peers().map_or(0, |(count, ..)| count) as u64;
                let target = (self.processes.len() * RATES[1]) as u64;
                // Connections that were attempted earlier may still become established.
                let tried = Strength::of(rate.max(sample.growth_per_second(last)), target, "connections/s");
                // Without resets there is nothing to replace.
                Strength { is_enough: tried.is_enough || established >= wanted / 2, ..tried }
            }
            Attack::FullQueues => {
                let wanted = (usize::from(LISTENERS) * UNACCEPTED) as u64;
                Strength::of(established, wanted.min(descriptors()), "established connections")
            }
            Attack::ClaimedMarks => {
                let programs =
                    Strength::of(sample.advanced(last), CLAIMING as u64, "programs that set marks");
                let claims = Strength::of(rate, CLAIMS, "claims/s");
                if programs.is_enough { claims } else { programs }
            }
            Attack::Uploads | Attack::Downloads => {
                let open = Strength::of(established, BULK_CONNECTIONS as u64, "established connections");
                if open.is_enough { Strength::of(rate, BULK_RATE, "MB/s") } else { open }
            }
            Attack::Spinning => Strength::of(sample.advanced(last), 1, "programs that run"),
            Attack::Descriptors => {
                let churn = Strength::of(rate, CHURN, "opened listeners/s");
                let target = PORTS.min(descriptors() / DESCRIPTORS_PER_LISTENER);
                let open = Strength::of(last.open().min(sample.open()), target, "open listeners");
                if churn.is_enough { open } else { churn }
            }
        }
    }

    /// Returns the CPU time of the attackers so far, in seconds.
    pub(super) fn used(&self) -> Result<f64> {
        self.processes.iter().map(|process| seconds_of_first_thread(process.id())).sum()
    }

    /// Ends the attack. Returns the smallest number of attackers.
    ///
    /// # Errors
    /// If a process has ended before.
    pub(super) fn stop(mut self) -> Result<Option<u64>> {
        self.processes.iter_mut().try_for_each(|process| process.signal(Signal::TERM))?;
        for process in &mut self.processes {
            let _ = process.exit_status(TIMEOUT);
        }
        Ok(self.weakest)
    }
}

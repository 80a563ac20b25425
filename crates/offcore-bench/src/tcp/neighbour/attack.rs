//! Attacks on a stack: by peers on the network, and by programs on the stack.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use offcore_stats::named;
use rustix::process::Signal;

use super::peers::{Peers, Thread};
use super::{ADDRESS, HOSTILE, NeighbourOptions, USER};
use crate::peer::netns::Netns;
use crate::peer::process::{Process, TIMEOUT};
use crate::tcp::http::server::{PORT, Site};

/// Bytes of the file that hostile peers request.
pub(super) const HOSTILE_SIZE: usize = 4 << 20;
/// Connections that take nothing of an answer.
const ZERO_WINDOWS: usize = 3000;
/// Connections with a part of a request: more than the default memory has blocks of 4 KB.
const HALF_REQUESTS: usize = 70_000;
/// Listeners whose program does not accept, their first port, and connections to each.
const LISTENERS: u16 = 380;
const FIRST_PORT: u16 = 20_000;
const UNACCEPTED: usize = 45;
/// Applications that claim marks.
const CLAIMING: usize = 64;
/// Time in which hostile peers open their first connections. Some are reset meanwhile.
const OPENING: Duration = Duration::from_secs(15);

named! {
    /// What attackers do.
    pub enum Attack {
        /// Peers request a large file, and read nothing of it.
        ZeroWindows = "zero-windows",
        /// Peers send a part of a request.
        HalfRequests = "half-requests",
        /// Listeners of a program that accepts nothing have full queues.
        FullQueues = "full-queues",
        /// Applications claim marks of sessions that have none.
        ClaimedMarks = "claimed-marks",
        /// A program opens as many listeners as it can.
        Descriptors = "descriptors",
    }
}

const FULL_QUEUES_PROGRAM: &str = "
import socket, sys, time
kept = []
for port in range(int(sys.argv[1]), int(sys.argv[1]) + int(sys.argv[2])):
    s = socket.socket()
    s.bind(('0.0.0.0', port))
    s.listen(64)
    kept.append(s)
print('ready', flush=True)
time.sleep(10000)
";
/// The summary is behind three cache lines of the page that an application shares with the stack.
const CLAIMED_MARKS_PROGRAM: &str = "
import ctypes, re, socket, time
s = socket.socket()
s.bind(('0.0.0.0', 0))
s.listen(1)
maps = open('/proc/self/maps').read()
areas = re.findall(r'^(\\w+)-\\w+ rw-s .*offcore-control', maps, re.M)
assert areas, maps
print('ready', flush=True)
while True:
    for area in areas:
        ctypes.memset(int(area, 16) + 192, 255, 128)
    time.sleep(0.05)
";
const DESCRIPTORS_PROGRAM: &str = "
import resource, socket, time
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
kept = []
try:
    while len(kept) < 30000:
        s = socket.socket()
        s.bind(('0.0.0.0', 0))
        s.listen(1)
        kept.append(s)
except OSError:
    pass
print('ready', flush=True)
time.sleep(10000)
";

impl Attack {
    /// Whether peers on the network attack a server of files, and not programs a stack with others.
    pub(super) fn is_of_peers(self) -> bool {
        matches!(self, Self::ZeroWindows | Self::HalfRequests)
    }

    fn peers(self) -> Option<Peers> {
        let server = |port| format!("{ADDRESS}:{port}").parse().ok();
        let peers = Peers {
            from: HOSTILE.iter().filter_map(|address| address.parse().ok()).collect(),
            to: server(PORT).into_iter().collect(),
            count: ZERO_WINDOWS,
            request: b"GET /hostile HTTP/1.1\r\nHost: a\r\n\r\n".to_vec(),
            receives: 4096,
        };
        match self {
            Self::ZeroWindows => Some(peers),
            Self::HalfRequests => {
                let request = b"GET /hostile HTTP/1.1\r\nHost: ".to_vec();
                Some(Peers { count: HALF_REQUESTS, request, ..peers })
            }
            Self::FullQueues => Some(Peers {
                to: (FIRST_PORT..FIRST_PORT + LISTENERS).filter_map(server).collect(),
                count: usize::from(LISTENERS) * UNACCEPTED,
                ..peers
            }),
            Self::ClaimedMarks | Self::Descriptors => None,
        }
    }

    /// The program, and how often it runs.
    fn program(self) -> Option<(&'static str, usize)> {
        match self {
            Self::ZeroWindows | Self::HalfRequests => None,
            Self::FullQueues => Some((FULL_QUEUES_PROGRAM, 1)),
            Self::ClaimedMarks => Some((CLAIMED_MARKS_PROGRAM, CLAIMING)),
            Self::Descriptors => Some((DESCRIPTORS_PROGRAM, 1)),
        }
    }
}

/// An attack in progress.
pub(super) struct Running {
    programs: Vec<Process>,
    peers: Option<Thread>,
}

impl Running {
    /// Starts it, and waits until it is complete.
    pub(super) fn start(
        attack: Attack,
        site: &Site<'_>,
        near: &Netns,
        socket: &Path,
        options: &NeighbourOptions,
    ) -> Result<Self> {
        let mut programs = Vec::new();
        if let Some((program, count)) = attack.program() {
            let lcore = options.other_lcore.context("neighbours need two lcores")?;
            for _ in 0..count {
                let mut command = near.command("taskset");
                command.args(["-c", &lcore.to_string(), "setpriv", "--reuid", USER, "--regid", USER]);
                command.arg("--clear-groups").arg(&options.binary).args(["exec", "--stack"]).arg(socket);
                command.args(["--", "python3", "-c", program]);
                command.args([FIRST_PORT, LISTENERS].map(|number| number.to_string()));
                command.current_dir(site.dir.path());
                programs.push(Process::spawn("a hostile program", command)?);
            }
            for program in &mut programs {
                program.wait_for(0, TIMEOUT, "ready", |text| text.contains("ready").then_some(()))?;
            }
        }
        let peers = attack.peers().map(|peers| (peers.count, Thread::start(peers)));
        let peers = peers.map(|(count, thread)| {
            thread.wait(count, OPENING);
            thread
        });
        Ok(Self { programs, peers })
    }

    /// # Errors
    /// When hostile peers could not open connections.
    pub(super) fn stop(mut self) -> Result<()> {
        for program in &mut self.programs {
            program.signal(Signal::TERM)?;
        }
        for program in &mut self.programs {
            let _ = program.exit_status(TIMEOUT);
        }
        self.peers.map_or(Ok(()), Thread::stop)
    }
}

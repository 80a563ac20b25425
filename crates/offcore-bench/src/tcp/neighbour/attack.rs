//! Attacks on a stack: by peers on the network, and by programs on the stack.

use std::path::Path;

use anyhow::{Context, Result};
use offcore_stats::named;
use rustix::process::Signal;

use super::{ADDRESS, HOSTILE, NeighbourOptions, USER};
use crate::peer::netns::Netns;
use crate::peer::process::{Process, TIMEOUT};
use crate::tcp::http::server::{PORT, Site};

/// Size of the file that hostile peers request, in bytes.
pub(super) const HOSTILE_SIZE: usize = 4 << 20;
/// Number of connections that read nothing of an answer.
const ZERO_WINDOWS: usize = 3000;
/// Number of connections with an incomplete request. It exceeds the number of 4 KB blocks in the default memory.
const HALF_REQUESTS: usize = 70_000;
/// Number of listeners whose program does not accept, their first port, and connections to each of them.
const LISTENERS: u16 = 380;
const FIRST_PORT: u16 = 20_000;
const UNACCEPTED: usize = 45;
/// Number of applications that claim marks.
const CLAIMING: usize = 64;
/// Size of the hostile peers' receive buffers in bytes.
const BUFFER: usize = 4096;
/// Maximum number of connections per process of hostile peers, because descriptors are limited per process.
const CONNECTIONS: usize = 14_000;

named! {
    /// Attacks.
    pub(super) enum Attack {
        /// Peers request a large file and read nothing of it.
        ZeroWindows = "zero-windows",
        /// Peers send an incomplete request.
        HalfRequests = "half-requests",
        /// A program has listeners with full queues and accepts nothing.
        FullQueues = "full-queues",
        /// Applications claim marks of sessions that do not have any.
        ClaimedMarks = "claimed-marks",
        /// A program opens as many listeners as it can.
        Descriptors = "descriptors",
    }
}

/// Opens connections, sends a request on each, and reads nothing. It opens at most 2,000 connections per second. Later
/// it replaces connections that end, at most 400 per second.
const PEERS_PROGRAM: &str = "
import select, socket, struct, sys, time
to, first, ports, count, buffer = sys.argv[1], *map(int, sys.argv[2:6])
request, sources = bytes.fromhex(sys.argv[6]), sys.argv[7:]
ends = select.EPOLLHUP | select.EPOLLERR | select.EPOLLRDHUP
poll, kept, sent, number, said = select.epoll(), {}, set(), 0, False
since = time.monotonic()
while True:
    for _ in range(min(2 if said else 10, count - len(kept))):
        s = socket.socket()
        s.setblocking(False)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
        s.bind((sources[number % len(sources)], 0))
        s.connect_ex((to, first + number % ports))
        kept[s.fileno()] = s
        poll.register(s, select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET)
        number += 1
    if not said and (number >= count or time.monotonic() > since + 20):
        print('ready', flush=True)
        said = True
    for fd, events in poll.poll(0):
        try:
            if events & ends:
                raise OSError
            if fd not in sent:
                kept[fd].send(request)
                sent.add(fd)
        except OSError:
            sent.discard(fd)
            kept.pop(fd).close()
    time.sleep(0.005)
";
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
/// The summary follows three cache lines of the page that an application shares with the stack.
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
    /// Returns whether peers on the network attack a file server. Otherwise programs attack a stack that they share
    /// with other programs.
    pub(super) fn is_of_peers(self) -> bool {
        matches!(self, Self::ZeroWindows | Self::HalfRequests)
    }

    /// Returns the source of the hostile programs on the stack, and their number.
    fn programs(self) -> Option<(&'static str, usize)> {
        match self {
            Self::ZeroWindows | Self::HalfRequests => None,
            Self::FullQueues => Some((FULL_QUEUES_PROGRAM, 1)),
            Self::ClaimedMarks => Some((CLAIMED_MARKS_PROGRAM, CLAIMING)),
            Self::Descriptors => Some((DESCRIPTORS_PROGRAM, 1)),
        }
    }

    /// Returns the number of connections of hostile peers, the first port and the number of ports, and the data sent on
    /// each connection.
    fn peers(self) -> Option<(usize, u16, u16, &'static str)> {
        match self {
            Self::ZeroWindows => Some((ZERO_WINDOWS, PORT, 1, "GET /hostile HTTP/1.1\r\nHost: a\r\n\r\n")),
            Self::HalfRequests => Some((HALF_REQUESTS, PORT, 1, "GET /hostile HTTP/1.1\r\nHost: ")),
            Self::FullQueues => Some((usize::from(LISTENERS) * UNACCEPTED, FIRST_PORT, LISTENERS, "hostile")),
            Self::ClaimedMarks | Self::Descriptors => None,
        }
    }
}

/// An attack in progress.
pub(super) struct Running(Vec<Process>);

impl Running {
    /// Starts the attack and waits until it is complete.
    pub(super) fn start(
        attack: Attack,
        site: &Site<'_>,
        near: &Netns,
        socket: &Path,
        options: &NeighbourOptions,
    ) -> Result<Self> {
        let lcore = options.other_lcore.context("neighbours need two lcores")?.to_string();
        let mut running = Self(Vec::new());
        if let Some((program, count)) = attack.programs() {
            for _ in 0..count {
                let mut command = near.command("taskset");
                command.args(["-c", &lcore, "setpriv", "--reuid", USER, "--regid", USER, "--clear-groups"]);
                command.arg(&options.binary).args(["exec", "--stack"]).arg(socket).arg("--");
                command.args(["python3", "-c", program]);
                command.args([FIRST_PORT, LISTENERS].map(|number| number.to_string()));
                command.current_dir(site.dir.path());
                running.0.push(Process::spawn("a hostile program", command)?);
            }
            running.wait()?;
        }
        if let Some((mut left, first, ports, request)) = attack.peers() {
            let request: String = request.bytes().map(|byte| format!("{byte:02x}")).collect();
            while left > 0 {
                let count = left.min(CONNECTIONS);
                left -= count;
                let mut command = site.far.command("taskset");
                command.args(["-c", &lcore, "python3", "-c", PEERS_PROGRAM, ADDRESS]);
                command.args(
                    [usize::from(first), usize::from(ports), count, BUFFER].map(|number| number.to_string()),
                );
                command.arg(&request).args(HOSTILE);
                running.0.push(Process::spawn("hostile peers", command)?);
            }
            running.wait()?;
        }
        Ok(running)
    }

    fn wait(&mut self) -> Result<()> {
        let ready = |text: &str| text.contains("ready").then_some(());
        self.0.iter_mut().try_for_each(|process| process.wait_for(0, TIMEOUT, "ready", ready))
    }

    /// # Errors
    /// If a process has ended before.
    pub(super) fn stop(mut self) -> Result<()> {
        self.0.iter_mut().try_for_each(|process| process.signal(Signal::TERM))?;
        for process in &mut self.0 {
            let _ = process.exit_status(TIMEOUT);
        }
        Ok(())
    }
}

//! The stack of a program: a running one, or a private one.

use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{fs, io, thread};

use anyhow::{Context, Result, anyhow, bail};
use offcore_session::message::{ASK, Hello, KEY, VERSION, Welcome};
use offcore_tcp::proto::Algorithm;
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketType, connect, recv, send, socket,
};
use rustix::process::{Pid, Signal, WaitOptions, getpid, kill_process, set_child_subreaper, wait};
use signal_hook::consts::SIGCHLD;

use super::directory::Directory;
use super::signals::Signals;
use crate::output::say;

/// The socket's name in the directory of a private stack.
const SOCKET: &str = "stack.sock";
/// Time limits for the start of a stack, and for the end of a program or a stack.
const START_TIMEOUT: Duration = Duration::from_secs(30);
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// Time until the user is told that the stack does not answer yet.
const QUIET: Duration = Duration::from_secs(2);
/// Time for which a stack may be busy with other programs that start.
const BUSY_TIMEOUT: Duration = Duration::from_secs(30);
/// Time for which the access rights of the socket may refuse a user with too many files to be closed.
const REFUSED_TIMEOUT: Duration = Duration::from_millis(500);
/// Polling intervals: in general, and for remaining processes.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
const ORPHAN_POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Checks that a stack of this version serves at a path and accepts this user.
///
/// # Errors
/// The kernel's or the stack's reason, as text.
pub(super) fn reach(path: &Path) -> Result<()> {
    let address = SocketAddrUnix::new(path).map_err(|error| {
        let found = path.as_os_str().len();
        anyhow!("--stack: {error}: a path of {found} bytes, expected 1 to 107: choose a shorter one")
    })?;
    let since = Instant::now();
    let found = loop {
        let socket = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).context("a socket")?;
        let connected = connect(&socket, &address);
        if connected == Err(Errno::ACCESS) && since.elapsed() < REFUSED_TIMEOUT {
            thread::sleep(POLL_INTERVAL);
            continue;
        }
        match connected.and_then(|()| ask(&socket)) {
            // The stack may be busy with other programs.
            Err(Errno::CONNRESET | Errno::PIPE) if since.elapsed() < BUSY_TIMEOUT => {
                thread::sleep(POLL_INTERVAL)
            }
            Err(error) => bail!("no stack at {}: {}", path.display(), missing(path, error)),
            Ok(found) => break found,
        }
    };
    let path = path.display();
    match found {
        Some(Welcome { version: VERSION, error: 0, .. }) => Ok(()),
        Some(Welcome { version: VERSION, error, .. }) => {
            bail!("no stack at {path}: {}", io::Error::from_raw_os_error(error.cast_signed()))
        }
        Some(Welcome { version, .. }) => bail!(
            "the stack at {path} has version {version}, this program has version {VERSION}: use the same build of both"
        ),
        None => bail!("no stack at {path}: the process that serves it is not a stack"),
    }
}

/// Explains why no stack can be reached at a path, and the remedy.
fn missing(path: &Path, error: Errno) -> String {
    let serve = format!("start `offcore tcp --port ... --serve {}`, or give --port here", path.display());
    let expected = "expected the socket of `offcore tcp --serve`: name that, or give --port here";
    match (error, fs::metadata(path)) {
        (Errno::NOENT | Errno::NOTDIR, _) => format!("no such file: {serve}"),
        (Errno::CONNREFUSED, Ok(found)) if found.is_dir() => format!("found a directory, {expected}"),
        (Errno::CONNREFUSED, Ok(found)) if !found.file_type().is_socket() => {
            format!("found a file that is not a socket, {expected}")
        }
        (Errno::CONNREFUSED, _) => format!("no process listens there: {serve}"),
        (Errno::PROTOTYPE, _) => format!("found the socket of another program, {expected}"),
        (Errno::ACCESS, _) => "access denied for this user: either --allow-uid of `offcore tcp` does not admit it, or the stack must first close files of this user: try again".into(),
        (Errno::AGAIN, _) => {
            let time = START_TIMEOUT.as_secs();
            format!("the stack has not answered within {time} s: continue it if it is stopped, or restart it")
        }
        (Errno::CONNRESET | Errno::PIPE, _) => {
            "the server closed the connection: it is not a stack, or too many programs start at once".into()
        }
        (error, _) => error.to_string(),
    }
}

/// Requests a stack's version. Returns `None` if the other side is not a stack.
fn ask(socket: &OwnedFd) -> Result<Option<Welcome>, Errno> {
    send(socket, &Hello { version: ASK, key: [0; KEY] }.to_bytes(), SendFlags::NOSIGNAL)?;
    let mut bytes = [0; 256];
    let mut answer_within = |time| {
        set_socket_timeout(socket, Timeout::Recv, Some(time))?;
        recv(socket, &mut bytes[..], RecvFlags::empty())
    };
    let (len, _) = match answer_within(QUIET) {
        Err(Errno::AGAIN) => {
            say("waiting for the stack: it is busy, or has no address from the network yet");
            answer_within(START_TIMEOUT)?
        }
        received => received?,
    };
    if len == 0 {
        return Err(Errno::CONNRESET);
    }
    let welcome = bytes.get(..len).and_then(Welcome::from_bytes);
    match welcome {
        Some(Welcome { version: VERSION, error, .. })
            if error == Errno::ACCESS.raw_os_error().unsigned_abs() =>
        {
            Err(Errno::ACCESS)
        }
        welcome => Ok(welcome),
    }
}

/// A private stack of this command.
#[derive(Debug)]
pub(super) struct Stack {
    process: Child,
    /// Whether its end was noticed.
    ended: bool,
    directory: Directory,
}

impl Stack {
    /// Starts a stack on ports.
    ///
    /// # Errors
    /// System errors.
    pub(super) fn start(ports: &[String], congestion: Option<Algorithm>) -> Result<Self> {
        let directory = Directory::make()?;
        let mut command = Command::new(std::env::current_exe().context("this program")?);
        command.args(["tcp", "--idle", "sleep", "--stats-interval", "0"]);
        // The service manager expects messages of the program only.
        command.env_remove("NOTIFY_SOCKET");
        command.arg("--serve").arg(directory.path().join(SOCKET));
        // It also ends when this process is killed.
        command.arg("--parent").arg(std::process::id().to_string());
        if let Some(name) = congestion.map(Algorithm::name) {
            command.args(["--congestion", name]);
        }
        for port in ports {
            command.arg("--port").arg(port);
        }
        // The terminal's signals must not reach the stack, which runs until the program has ended.
        command.process_group(0);
        command.stdin(directory.claim().context("the stack's directory")?);
        // The stack's last report is not part of the program's output.
        command.stdout(Stdio::null());
        let process = command.spawn().context("the stack")?;
        Ok(Self { process, ended: false, directory })
    }

    /// Waits until the stack serves or this command is told to end.
    ///
    /// # Errors
    /// If the stack ends instead. It has then printed the reason.
    pub(super) fn wait_until_serving(&mut self, signals: &mut Signals) -> Result<()> {
        let since = Instant::now();
        while signals.ends().is_none() && reach(&self.path()).is_err() {
            if let Some(status) = self.process.try_wait().context("the stack")? {
                self.ended = true;
                bail!("the stack has ended: {status}");
            }
            if since.elapsed() > START_TIMEOUT {
                bail!("the stack did not start within {} s", START_TIMEOUT.as_secs());
            }
            thread::sleep(POLL_INTERVAL);
        }
        // Makes the ends of children visible, even if the parent of this command ignores them.
        signal_hook::flag::register(SIGCHLD, Arc::default()).context("handling SIGCHLD")?;
        // This process becomes the parent of processes that the program leaves behind.
        set_child_subreaper(Some(getpid())).context("prctl(PR_SET_CHILD_SUBREAPER)")?;
        Ok(())
    }

    /// Returns the path of its socket.
    pub(super) fn path(&self) -> PathBuf {
        self.directory.path().join(SOCKET)
    }

    /// Waits for the end of a program, and of processes that it leaves behind, such as daemons. Signals to this command
    /// are passed to them.
    ///
    /// # Errors
    /// System errors.
    pub(super) fn wait(&mut self, program: &Child, signals: &mut Signals) -> Result<ExitStatus> {
        let program = pid_of(program);
        let mut status = None;
        self.wait_for(signals, POLL_INTERVAL, |stack| {
            status = status.or(stack.reap(program));
            if status.is_some() { Vec::new() } else { vec![program] }
        });
        let mut said = false;
        self.wait_for(signals, ORPHAN_POLL_INTERVAL, |stack| {
            stack.reap(program);
            let left = if stack.ended { Vec::new() } else { stack.left() };
            if let Some(first) = left.first().filter(|_| !said) {
                said = true;
                say(&format!(
                    "the program has ended and left process {} ({}): the stack runs until that process ends; Ctrl-C ends both",
                    first.as_raw_pid(),
                    name_of(*first)
                ));
            }
            left
        });
        status.context("the program ended, but its exit status was not found")
    }

    /// Waits until no process is alive. When this command is told to stop, it sends SIGTERM to the processes, and
    /// SIGKILL after a time limit or a second signal. Processes that the terminal has already signalled get the same
    /// time before SIGTERM.
    fn wait_for(
        &mut self,
        signals: &mut Signals,
        every: Duration,
        mut alive: impl FnMut(&mut Self) -> Vec<Pid>,
    ) {
        let (mut since, mut told) = (None, Vec::new());
        loop {
            let alive = alive(self);
            if alive.is_empty() {
                return;
            }
            if let Some(stop) = signals.pass_on(&alive) {
                let waited = since.get_or_insert_with(Instant::now).elapsed();
                for pid in alive {
                    let time = if stop.has_had(pid) { STOP_TIMEOUT } else { Duration::ZERO };
                    if stop.at_once || waited > time + STOP_TIMEOUT {
                        let _ = kill_process(pid, Signal::KILL);
                    } else if waited >= time && !told.contains(&pid) {
                        told.push(pid);
                        let _ = kill_process(pid, Signal::TERM);
                    }
                }
            }
            thread::sleep(every);
        }
    }

    /// Reaps all children. Returns the program's exit status if it has ended.
    fn reap(&mut self, program: Pid) -> Option<ExitStatus> {
        let (stack, mut ended) = (pid_of(&self.process), None);
        while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) {
            if pid == stack {
                self.ended = true;
                let status = ExitStatus::from_raw(status.as_raw());
                say(&format!("the stack has ended ({status}): all its connections are lost"));
            }
            if pid == program {
                ended = Some(ExitStatus::from_raw(status.as_raw()));
            }
        }
        ended
    }

    /// Returns this process's children without the stack.
    fn left(&self) -> Vec<Pid> {
        let (stack, own) = (pid_of(&self.process), getpid());
        let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = entries.filter_map(|entry| Pid::from_raw(entry.file_name().to_str()?.parse().ok()?));
        pids.filter(|pid| *pid != stack && parent_of(*pid) == Some(own)).collect()
    }
}

/// Returns the parent of a process, from `/proc`.
fn parent_of(pid: Pid) -> Option<Pid> {
    let stat = fs::read(format!("/proc/{}/stat", pid.as_raw_pid())).ok()?;
    // The name is in parentheses and may contain any character. State and parent follow it.
    let stat = String::from_utf8_lossy(&stat);
    let parent = stat.rsplit_once(')')?.1.split_whitespace().nth(1)?;
    Pid::from_raw(parent.parse().ok()?)
}

fn name_of(pid: Pid) -> String {
    let name = fs::read_to_string(format!("/proc/{}/comm", pid.as_raw_pid())).unwrap_or_default();
    name.trim_end().into()
}

impl Drop for Stack {
    fn drop(&mut self) {
        if !self.ended {
            let _ = kill_process(pid_of(&self.process), Signal::TERM);
        }
        let since = Instant::now();
        while !self.ended && matches!(self.process.try_wait(), Ok(None)) {
            if since.elapsed() > STOP_TIMEOUT {
                let _ = self.process.kill();
            }
            thread::sleep(POLL_INTERVAL);
        }
    }
}

fn pid_of(child: &Child) -> Pid {
    Pid::from_child(child)
}

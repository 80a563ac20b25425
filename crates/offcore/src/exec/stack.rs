//! The stack that a program runs on: one that is served, or one that is started for it.

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

/// The socket's name in the directory of a stack of this command's own.
const SOCKET: &str = "stack.sock";
/// How long a stack may take to begin, and a program or a stack to end.
const BEGINS_WITHIN: Duration = Duration::from_secs(30);
const ENDS_WITHIN: Duration = Duration::from_secs(10);
/// Time until the user is told that the stack does not answer yet.
const QUIET: Duration = Duration::from_secs(2);
/// How long a stack may be busy with other programs that begin.
const TURN_WITHIN: Duration = Duration::from_secs(30);
/// Time between two looks, and two for processes that have been left.
const LOOK_EVERY: Duration = Duration::from_millis(20);
const LEFT_EVERY: Duration = Duration::from_millis(200);

/// Whether somebody serves at a path, who is of this version and lets this user in.
///
/// # Errors
/// What the kernel says, or the stack, in words.
pub(super) fn reach(path: &Path) -> Result<()> {
    let address = SocketAddrUnix::new(path).map_err(|error| {
        let found = path.as_os_str().len();
        anyhow!("--stack: {error}: a path of {found} bytes, expected 1 to 107: choose a shorter one")
    })?;
    let since = Instant::now();
    let found = loop {
        let socket = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).context("a socket")?;
        match connect(&socket, &address).and_then(|()| ask(&socket)) {
            // It may be the turn of others.
            Err(Errno::CONNRESET | Errno::PIPE) if since.elapsed() < TURN_WITHIN => thread::sleep(LOOK_EVERY),
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

/// Why nobody is reached at a path, and what to do.
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
        (Errno::ACCESS, _) => "access denied for this user: see --allow-uid of `offcore tcp`".into(),
        (Errno::AGAIN, _) => {
            let time = BEGINS_WITHIN.as_secs();
            format!("the stack has not answered within {time} s: continue it if it is stopped, or restart it")
        }
        (Errno::CONNRESET | Errno::PIPE, _) => {
            "the server closed the connection: it is not a stack, or too many programs start at once".into()
        }
        (error, _) => error.to_string(),
    }
}

/// Asks a stack which version it has; `None`: it is none.
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
            answer_within(BEGINS_WITHIN)?
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

/// A stack of this command's own.
#[derive(Debug)]
pub(super) struct Stack {
    process: Child,
    /// Its end has been seen.
    ended: bool,
    directory: Directory,
}

impl Stack {
    /// Starts a stack on ports.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn start(ports: &[String], congestion: Option<Algorithm>) -> Result<Self> {
        let directory = Directory::make()?;
        let mut command = Command::new(std::env::current_exe().context("this program")?);
        command.args(["tcp", "--idle", "sleep", "--stats-interval", "0"]);
        command.arg("--serve").arg(directory.path().join(SOCKET));
        // It ends, too, when this process is killed.
        command.arg("--parent").arg(std::process::id().to_string());
        if let Some(name) = congestion.map(Algorithm::name) {
            command.args(["--congestion", name]);
        }
        for port in ports {
            command.arg("--port").arg(port);
        }
        // A terminal's signals are not for it: it is there until the program has ended.
        command.process_group(0);
        command.stdin(directory.claim().context("the stack's directory")?);
        // Its last report is not the program's output.
        command.stdout(Stdio::null());
        let process = command.spawn().context("the stack")?;
        Ok(Self { process, ended: false, directory })
    }

    /// Waits until it serves, or this command is to end.
    ///
    /// # Errors
    /// When it ends instead; it has said why.
    pub(super) fn wait_until_it_serves(&mut self, signals: &mut Signals) -> Result<()> {
        let since = Instant::now();
        while signals.ends().is_none() && reach(&self.path()).is_err() {
            if let Some(status) = self.process.try_wait().context("the stack")? {
                self.ended = true;
                bail!("the stack has ended: {status}");
            }
            if since.elapsed() > BEGINS_WITHIN {
                bail!("the stack did not start within {} s", BEGINS_WITHIN.as_secs());
            }
            thread::sleep(LOOK_EVERY);
        }
        // The ends of children are to be seen, also where whoever has started this command ignores them.
        signal_hook::flag::register(SIGCHLD, Arc::default()).context("handling SIGCHLD")?;
        // What the program leaves is this process's to wait for.
        set_child_subreaper(Some(getpid())).context("prctl(PR_SET_CHILD_SUBREAPER)")?;
        Ok(())
    }

    /// Path of its socket.
    pub(super) fn path(&self) -> PathBuf {
        self.directory.path().join(SOCKET)
    }

    /// Waits for a program's end, and then for that of the processes that it has left: servers go into the background so.
    /// Signals to this command are theirs.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn wait(&mut self, program: &Child, signals: &mut Signals) -> Result<ExitStatus> {
        let program = pid_of(program);
        let mut status = None;
        self.wait_for(signals, LOOK_EVERY, |stack| {
            status = status.or(stack.reap(program));
            if status.is_some() { Vec::new() } else { vec![program] }
        });
        let mut said = false;
        self.wait_for(signals, LEFT_EVERY, |stack| {
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

    /// Waits until no process is alive. Once this command is told to stop, they are, and killed if they do not, or if it is told
    /// again. Who has been told by the terminal has time to do what it wants to.
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
                    let time = if stop.has_had(pid) { ENDS_WITHIN } else { Duration::ZERO };
                    if stop.at_once || waited > time + ENDS_WITHIN {
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

    /// Takes the ends of all children: how the program has ended, if it has.
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

    /// This process's children but the stack.
    fn left(&self) -> Vec<Pid> {
        let (stack, own) = (pid_of(&self.process), getpid());
        let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = entries.filter_map(|entry| Pid::from_raw(entry.file_name().to_str()?.parse().ok()?));
        pids.filter(|pid| *pid != stack && parent_of(*pid) == Some(own)).collect()
    }
}

/// The parent of a process, by its line in `/proc`.
fn parent_of(pid: Pid) -> Option<Pid> {
    let stat = fs::read(format!("/proc/{}/stat", pid.as_raw_pid())).ok()?;
    // The name, in parentheses, may have any character; behind it are the state and the parent.
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
            if since.elapsed() > ENDS_WITHIN {
                let _ = self.process.kill();
            }
            thread::sleep(LOOK_EVERY);
        }
    }
}

fn pid_of(child: &Child) -> Pid {
    Pid::from_child(child)
}

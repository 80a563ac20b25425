//! The stack that a program runs on: one that is served, or one that is started for it.

use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use std::{fs, io, thread};

use anyhow::{Context, Result, anyhow, bail};
use offcore_session::message::{ASK, Hello, KEY, VERSION, Welcome};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketType, connect, recv, send, socket,
};
use rustix::process::{Pid, Signal, kill_process};

/// How long a stack may take to begin, and a program or a stack to end.
const BEGINS_WITHIN: Duration = Duration::from_secs(30);
const ENDS_WITHIN: Duration = Duration::from_secs(10);
/// Time between two looks.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Whether somebody serves at a path, who is of this version and lets this user in.
///
/// # Errors
/// What the kernel says, or the stack, in words.
pub(super) fn reach(path: &Path) -> Result<()> {
    let address = SocketAddrUnix::new(path).map_err(|error| {
        let found = path.as_os_str().len();
        anyhow!("--stack: {error}: a path of {found} bytes, expected 1 to 107: choose a shorter one")
    })?;
    let socket = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).context("a socket")?;
    let connected = connect(&socket, &address).and_then(|()| ask(&socket));
    let found =
        connected.map_err(|error| anyhow!("no stack at {}: {}", path.display(), missing(path, error)))?;
    let path = path.display();
    match found {
        Some(Welcome { version: VERSION, error: 0, .. }) => Ok(()),
        Some(Welcome { version: VERSION, error, .. }) => {
            bail!("no stack at {path}: {}", io::Error::from_raw_os_error(error.cast_signed()))
        }
        Some(Welcome { version, .. }) => bail!(
            "the stack at {path} speaks version {version}, this program version {VERSION}: use both of one build"
        ),
        None => bail!("no stack at {path}: who serves it is none"),
    }
}

/// Why nobody is reached at a path, and what to do.
fn missing(path: &Path, error: Errno) -> String {
    let serve = format!("start `offcore tcp --port ... --serve {}`, or give --port here", path.display());
    let expected = "expected the socket of `offcore tcp --serve`: name that, or give --port here";
    match (error, fs::metadata(path)) {
        (Errno::NOENT | Errno::NOTDIR, _) => format!("nothing is there: {serve}"),
        (Errno::CONNREFUSED, Ok(found)) if found.is_dir() => format!("found a directory, {expected}"),
        (Errno::CONNREFUSED, Ok(found)) if !found.file_type().is_socket() => {
            format!("found a file that is no socket, {expected}")
        }
        (Errno::CONNREFUSED, _) => format!("nobody serves it: {serve}"),
        (Errno::PROTOTYPE, _) => format!("found the socket of something else, {expected}"),
        (Errno::ACCESS, _) => "this user may not: see --allow-uid of `offcore tcp`".into(),
        (Errno::AGAIN, _) => format!("who serves it has not answered within {} s", BEGINS_WITHIN.as_secs()),
        (error, _) => error.to_string(),
    }
}

/// Asks a stack which version it has; `None`: it is none.
fn ask(socket: &OwnedFd) -> Result<Option<Welcome>, Errno> {
    set_socket_timeout(socket, Timeout::Recv, Some(BEGINS_WITHIN))?;
    send(socket, &Hello { version: ASK, key: [0; KEY] }.to_bytes(), SendFlags::NOSIGNAL)?;
    let mut bytes = [0; 256];
    let (len, _) = recv(socket, &mut bytes[..], RecvFlags::empty())?;
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
    dir: PathBuf,
}

impl Stack {
    /// Starts a stack on ports, and waits until it serves.
    ///
    /// # Errors
    /// When it ends instead; it has said why.
    pub(super) fn start(ports: &[String]) -> Result<Self> {
        let dir = std::env::temp_dir().join(format!("offcore-exec-{}", std::process::id()));
        fs::DirBuilder::new().mode(0o700).create(&dir).with_context(|| dir.display().to_string())?;
        let mut command = Command::new(std::env::current_exe().context("this program")?);
        command
            .args(["tcp", "--idle", "sleep", "--stats-interval", "0", "--serve"])
            .arg(dir.join("stack.sock"));
        for port in ports {
            command.arg("--port").arg(port);
        }
        // Its last report is not the program's output.
        command.stdin(std::process::Stdio::null()).stdout(std::process::Stdio::null());
        let process = command.spawn();
        if process.is_err() {
            let _ = fs::remove_dir_all(&dir);
        }
        let mut stack = Self { process: process.context("the stack")?, dir };
        let since = Instant::now();
        while reach(&stack.path()).is_err() {
            if let Some(status) = stack.process.try_wait().context("the stack")? {
                bail!("the stack has ended: {status}");
            }
            if since.elapsed() > BEGINS_WITHIN {
                bail!("the stack does not serve within {} s", BEGINS_WITHIN.as_secs());
            }
            thread::sleep(LOOK_EVERY);
        }
        Ok(stack)
    }

    /// Path of its socket.
    pub(super) fn path(&self) -> PathBuf {
        self.dir.join("stack.sock")
    }

    /// Waits for a program's end; a signal to this command is the program's.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn wait(&self, mut child: Child, stopped: &AtomicBool) -> Result<ExitStatus> {
        let mut told = None;
        loop {
            if let Some(status) = child.try_wait().context("the program")? {
                return Ok(status);
            }
            if stopped.load(Ordering::Relaxed) {
                let since = *told.get_or_insert_with(|| {
                    terminate(&child);
                    Instant::now()
                });
                if since.elapsed() > ENDS_WITHIN {
                    child.kill().context("the program")?;
                }
            }
            thread::sleep(LOOK_EVERY);
        }
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        terminate(&self.process);
        let since = Instant::now();
        while matches!(self.process.try_wait(), Ok(None)) {
            if since.elapsed() > ENDS_WITHIN {
                let _ = self.process.kill();
            }
            thread::sleep(LOOK_EVERY);
        }
        let _: io::Result<()> = fs::remove_dir_all(&self.dir);
    }
}

fn terminate(child: &Child) {
    if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        let _ = kill_process(pid, Signal::TERM);
    }
}

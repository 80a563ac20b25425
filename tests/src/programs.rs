//! C programs that test socket calls and print a line for each observation, and the link on which they run.
//!
//! ```text
//! here: 10.99.0.2, fd99::2   t0 ── k0   far: 10.99.0.1, fd99::1
//! a program, on any stack               the peer, on the kernel's
//!        └──────── Unix socket: what the peer shall do ────┘
//! ```
//!
//! The kernel is the oracle: a program must print the same on every other stack.

use std::ffi::OsStr;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use offcore_bench::peer::process::{Process, TIMEOUT};

use crate::netns::{Netns, checked};
use crate::offcore::profile_dir;
use crate::tempdir::{TempDir, unique_name};

/// The tested side's interface.
pub const HERE: &str = "t0";
/// The peer's interface.
pub const FAR: &str = "k0";
/// The tested side's addresses.
pub const HERE_ADDRESSES: [&str; 2] = ["10.99.0.2", "fd99::2"];
/// The peer's addresses.
pub const FAR_ADDRESSES: [&str; 2] = ["10.99.0.1", "fd99::1"];

/// Directory of the sources.
const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/programs");

/// Compiler flags of every program.
const FLAGS: [&str; 5] = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-pthread"];

/// The program that needs the compiler's checked variants of the calls.
const CHECKED: &str = "fortify";

/// Time limit for a program. Its own watchdog ends it 30 s after its last line.
const LONGEST: Duration = Duration::from_secs(300);

/// Two namespaces with a veth pair between them. The peer runs in the second one.
#[derive(Debug)]
pub struct Link {
    // Dropped first: a namespace can only be deleted when no process runs in it.
    _peer: Process,
    here: Netns,
    far: Netns,
    control: PathBuf,
    _dir: TempDir,
}

impl Link {
    /// Creates a link whose tested side is up and has no address: a stack that opens [`HERE`] brings its own addresses.
    ///
    /// # Errors
    /// Without a compiler or the permission to create namespaces, or if the peer does not start.
    pub fn new() -> Result<Self> {
        let peer = compiled("peer")?;
        let (here, far) = (Netns::new()?, Netns::new()?);
        here.veth(HERE, &far, FAR)?;
        here.ip(&["link", "set", HERE, "up"])?;
        far.ip(&["link", "set", FAR, "up"])?;
        give(&far, FAR, FAR_ADDRESSES)?;
        // Every datagram to a closed port gets an ICMP error, without the usual rate limit.
        far.run("sysctl", &["-qw", "net.ipv4.icmp_ratelimit=0", "net.ipv6.icmp.ratelimit=0"])?;
        let dir = TempDir::new()?;
        let control = dir.file("control");
        let mut command = far.command(peer);
        command.arg(&control);
        let mut peer = Process::spawn("peer", command)?;
        peer.wait_for(0, TIMEOUT, "the peer", |text| text.contains("peer: ready").then_some(()))?;
        Ok(Self { _peer: peer, here, far, control, _dir: dir })
    }

    /// Creates a link whose tested side is the kernel's stack.
    ///
    /// # Errors
    /// As [`Link::new`].
    pub fn with_kernel() -> Result<Self> {
        let link = Self::new()?;
        give(&link.here, HERE, HERE_ADDRESSES)?;
        Ok(link)
    }

    /// Returns the namespace in which programs run.
    pub fn here(&self) -> &Netns {
        &self.here
    }

    /// Returns the peer's namespace.
    pub fn far(&self) -> &Netns {
        &self.far
    }

    /// Runs the program `tests/programs/NAME.c` behind `prefix`, a command that executes its arguments (empty: the
    /// program itself), and returns its lines without the last one, which is `end`.
    ///
    /// # Errors
    /// If it does not compile, fails, or does not end with `end`. The error has the end of its output.
    pub fn run(&self, name: &str, prefix: &[&str]) -> Result<Vec<String>> {
        lines(self.start(name, prefix, &[])?)
    }

    /// Starts a program. [`lines`] waits for its end.
    ///
    /// # Errors
    /// If it does not compile, or cannot be started.
    pub fn start(&self, name: &str, prefix: &[&str], more: &[&str]) -> Result<Process> {
        let program = compiled(name)?;
        let mut words = prefix.iter().map(AsRef::<OsStr>::as_ref).chain([program.as_os_str()]);
        let first = words.next().context("a program's name is there")?;
        let mut command = self.here.command(first);
        command.args(words).arg(&self.control);
        for (here, far) in HERE_ADDRESSES.iter().zip(FAR_ADDRESSES) {
            command.args([here, far]);
        }
        command.args(more);
        Process::spawn(name, command)
    }
}

/// Waits for a [started](Link::start) program to end. Returns its lines without the last one, which is `end`.
///
/// # Errors
/// As [`Link::run`].
pub fn lines(mut running: Process) -> Result<Vec<String>> {
    let status = running.wait_for_exit(LONGEST)?;
    let output = running.stdout_from(0);
    let mut lines: Vec<String> = output.lines().map(str::to_owned).collect();
    if !status.success() || lines.pop().is_none_or(|last| last != "end") {
        bail!("it ended with {status}\n{}", running.tail());
    }
    Ok(lines)
}

fn give(netns: &Netns, interface: &str, [four, six]: [&str; 2]) -> Result<()> {
    netns.ip(&["addr", "add", &format!("{four}/24"), "dev", interface])?;
    netns.ip(&["addr", "add", &format!("{six}/64"), "dev", interface, "nodad"]).map(drop)
}

/// Returns the first line that differs between two runs, as a failure message.
pub fn difference(one: &[String], other: &[String]) -> Option<String> {
    let longest = one.len().max(other.len());
    let end = |lines: &[String], at: usize| lines.get(at).cloned().unwrap_or_else(|| "nothing more".into());
    let at = (0..longest).find(|&at| one.get(at) != other.get(at))?;
    Some(format!("line {}: {} | {}", at + 1, end(one, at), end(other, at)))
}

/// Returns the executable of a program. It is compiled unless the target directory has one from the same sources.
fn compiled(name: &str) -> Result<PathBuf> {
    let sources = [name, "common"].map(|name| Path::new(SOURCES).join(format!("{name}.c")));
    let header = Path::new(SOURCES).join("common.h");
    let level: &[&str] =
        if name == CHECKED { &["-O2", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2"] } else { &["-O1"] };
    let mut hasher = DefaultHasher::new();
    (FLAGS, level).hash(&mut hasher);
    for path in sources.iter().chain([&header]) {
        fs::read(path).with_context(|| format!("cannot read {}", path.display()))?.hash(&mut hasher);
    }
    let profile = profile_dir()?;
    let dir = profile.parent().context("the profile's directory is in the target directory")?;
    let dir = dir.join("test-programs");
    fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    let program = dir.join(format!("{name}-{:016x}", hasher.finish()));
    if !program.exists() {
        // Another test may need it at the same time, so the complete file is renamed into place.
        let part = dir.join(unique_name());
        checked(Command::new("cc").args(FLAGS).args(level).args(sources).arg("-o").arg(&part))?;
        fs::rename(&part, &program).with_context(|| format!("cannot make {}", program.display()))?;
    }
    Ok(program)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Need, require};

    #[test]
    fn first_difference_is_found() {
        let lines = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(difference(&lines("a b"), &lines("a b")), None);
        assert_eq!(difference(&lines("a b"), &lines("a c")).unwrap(), "line 2: b | c");
        assert_eq!(difference(&lines("a b"), &lines("a")).unwrap(), "line 2: b | nothing more");
    }

    #[test]
    fn failed_program_is_an_error() {
        let Some(()) = require(&[Need::Root, Need::Ip, Need::Cc]) else { return };
        let link = Link::with_kernel().unwrap();
        let error = link.run("fortify", &["sh", "-c", "echo one; echo two"]).unwrap_err().to_string();
        assert!(error.contains("exit status: 0") && error.contains("two"), "{error}");
        let error = link.run("fortify", &["sh", "-c", "echo end; exit 3"]).unwrap_err().to_string();
        assert!(error.contains("exit status: 3"), "{error}");
        assert_eq!(link.run("fortify", &["env", "A=b"]).unwrap(), link.run("fortify", &[]).unwrap());
        assert!(link.run("no-such-program", &[]).unwrap_err().to_string().contains("no-such-program"));
        assert!(link.here().run("ping", &["-c1", FAR_ADDRESSES[1]]).is_ok());
    }
}

//! Unmodified programs on the stack by `offcore exec`: servers and clients as distributions ship them, with the
//! kernel's stack at the other end of a TAP interface.

mod alone;
mod ended;
mod explain;
mod home;
mod iperf;
mod load;
mod loopback;
mod names;
mod network;
mod nginx;
mod python;
mod redis;
mod refused;
mod signals;
mod soak;
mod ssh;
mod stack;

use std::fs;
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use offcore_bench::peer::process::Process;
use peers::offcore::Signal;
use peers::require::OneCore;
use peers::{Need, Netns, Offcore, TempDir, offcore, one_core};

use super::tcp::{self, OURS, host};

/// The stack's addresses.
const STACK: [&str; 2] = OURS;
/// The kernel's address on the same link.
const KERNEL: &str = "10.77.0.1";
const NEEDS: [Need; 5] = tcp::NEEDS;
/// A test fails after this time without progress.
const TIMEOUT: Duration = Duration::from_secs(20);

/// A stack for programs, in its own namespace, and the core that the test keeps busy. Dropping it ends everything in
/// the namespace.
struct Stage {
    stack: Option<Offcore>,
    /// Additional options of the stack.
    options: Vec<String>,
    // Kills remaining processes before the namespace is deleted.
    _guards: [Guard; 2],
    netns: Netns,
    /// Another namespace without interfaces. Programs there reach the network only through the stack.
    apart: Netns,
    dir: TempDir,
    _core: OneCore,
}

impl Stage {
    /// Creates a stage for a test with these requirements, in addition to [`NEEDS`].
    fn new(more: &[Need]) -> Option<Self> {
        Self::with_options(more, &["--idle", "sleep"])
    }

    fn with_options(more: &[Need], options: &[&str]) -> Option<Self> {
        let core = one_core(&[&NEEDS[..], more].concat())?;
        let (netns, apart, dir) = (Netns::new().unwrap(), Netns::new().unwrap(), TempDir::new().unwrap());
        // Servers change to users who must be able to read the directory.
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let guards = [Guard::new(&netns), Guard::new(&apart)];
        let options = options.iter().map(ToString::to_string).collect();
        let mut stage = Self { stack: None, options, _guards: guards, netns, apart, dir, _core: core };
        stage.start_stack();
        Some(stage)
    }

    fn socket(&self) -> String {
        self.path("stack")
    }

    fn start_stack(&mut self) {
        let socket = self.socket();
        let options = self.options.iter().map(String::as_str);
        let options: Vec<_> = ["--serve", &socket].into_iter().chain(options).collect();
        self.stack = Some(host(&self.netns, "", &options));
    }

    /// Ends the stack with a signal.
    fn end_stack(&mut self, signal: Signal) {
        let mut stack = self.stack.take().unwrap();
        stack.signal(signal).unwrap();
        until("the stack's end", || stack.has_ended(), || "it still runs".to_owned());
    }

    fn path(&self, name: &str) -> String {
        self.dir.file(name).display().to_string()
    }

    /// Writes a file that every user may read. Returns its path.
    fn write(&self, name: &str, content: impl AsRef<[u8]>) -> String {
        let path = self.dir.file(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, content).unwrap();
        path.display().to_string()
    }

    /// Returns the command for a program on the stack, in a namespace. The kernel's addresses in that namespace count
    /// as local.
    fn on_stack(&self, netns: &Netns, rules: &[&str], program: &[&str]) -> Command {
        let mut command = netns.command(offcore::binary().unwrap());
        command.args(["exec", "--stack", &self.socket()]);
        command.args(rules.iter().flat_map(|rule| ["--only", rule]));
        command.arg("--").args(program);
        command
    }

    /// Starts a program on the stack.
    fn start(&self, program: &[&str]) -> Process {
        Process::spawn(program[0], self.on_stack(&self.netns, &[], program)).unwrap()
    }

    /// Starts a program that reaches the kernel's address through the stack.
    fn start_apart(&self, program: &[&str]) -> Process {
        Process::spawn(program[0], self.on_stack(&self.apart, &[], program)).unwrap()
    }

    /// Starts a program on the kernel's stack.
    fn start_beside(&self, program: &[&str]) -> Process {
        let mut command = self.netns.command(program[0]);
        command.args(&program[1..]);
        Process::spawn(program[0], command).unwrap()
    }

    /// Runs a program on the stack, which must succeed. Returns its output.
    fn run(&self, program: &[&str]) -> String {
        finish(self.start(program))
    }

    /// Runs a program that reaches the kernel's address through the stack, and must succeed. Returns its output.
    fn run_apart(&self, program: &[&str]) -> String {
        finish(self.start_apart(program))
    }

    /// Runs a program on the kernel's stack, which must succeed. Returns its output.
    fn run_beside(&self, program: &[&str]) -> String {
        finish(self.start_beside(program))
    }

    /// Waits until the kernel can connect to an address.
    fn wait_listening(&self, address: &str, port: u16, server: &Process) {
        until("a listener", || self.connects(address, port), || server.tail());
    }

    /// Waits until no program listens at an address and port. The stack notices a program's end later than its parent
    /// does.
    fn wait_free(&self, address: &str, port: u16) {
        until("the end of a listener", || !self.connects(address, port), String::new);
    }

    fn connects(&self, address: &str, port: u16) -> bool {
        let to = SocketAddr::new(address.parse().unwrap(), port);
        self.netns.within(|| Ok(TcpStream::connect_timeout(&to, Duration::from_secs(2)).is_ok())).unwrap()
    }
}

impl Drop for Stage {
    /// Ends a stack that still runs, which must report no error.
    fn drop(&mut self) {
        if let Some(stack) = self.stack.take().filter(|_| !thread::panicking()) {
            tcp::stop(stack);
        }
    }
}

/// Waits for a program to end successfully. Returns its output.
fn finish(mut program: Process) -> String {
    let status = program.wait_for_exit(TIMEOUT).unwrap();
    assert!(status.success(), "{status}: {}", program.tail());
    program.stdout_from(0)
}

/// Waits until a condition holds.
pub(super) fn until(what: &str, mut holds: impl FnMut() -> bool, tail: impl Fn() -> String) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < TIMEOUT, "waited for {what}: {}", tail());
        thread::sleep(Duration::from_millis(20));
    }
}

/// Kills the processes in a namespace when it is dropped or when this process has ended. Servers may leave themselves
/// or children behind.
struct Guard(Child);

impl Guard {
    fn new(netns: &Netns) -> Self {
        const SCRIPT: &str = "trap '' INT TERM HUP; read -r _
            for round in 1 2 3 4 5 6 7 8; do
                pids=$(ip netns pids \"$1\" 2>&-) || exit
                [ -n \"$pids\" ] || exit
                kill -9 $pids 2>&-
            done";
        let mut command = Command::new("sh");
        command.args(["-c", SCRIPT, "guard", netns.name()]);
        Self(command.stdin(Stdio::piped()).spawn().unwrap())
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(mut stdin) = self.0.stdin.take() {
            let _ = stdin.write_all(b"\n");
        }
        let _ = self.0.wait();
    }
}

/// Returns a process's children.
fn children(parent: u32) -> Vec<u32> {
    let processes = fs::read_dir("/proc").unwrap().filter_map(|entry| {
        let path: PathBuf = entry.ok()?.path();
        Some((path.file_name()?.to_str()?.parse().ok()?, path))
    });
    processes.filter(|(_, path)| parent_of(path) == Some(parent)).map(|(id, _)| id).collect()
}

/// Returns the parent of a live process, given its directory in `/proc`.
fn parent_of(process: &Path) -> Option<u32> {
    let stat = fs::read_to_string(process.join("stat")).ok()?;
    // The name is in parentheses and may contain any character.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    (fields.next()? != "Z").then(|| fields.next()?.parse().ok())?
}

fn lives(process: u32) -> bool {
    parent_of(Path::new(&format!("/proc/{process}"))).is_some()
}

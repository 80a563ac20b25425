//! The programs under `offcore exec`: their output must equal the output on the kernel's stack, except for the
//! deviations that `tests/programs/deviations.txt` lists with reasons.

use std::fs;
use std::path::{Path, PathBuf};

use offcore_bench::peer::process::Process;
use peers::offcore::Finished;
use peers::programs::{HERE_ADDRESSES, lines};
use peers::{Link, Need, Offcore, require};

const LIST: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/programs/deviations.txt");
const DOCS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/exec.md");

/// A line that differs on the stack.
struct Deviation {
    label: String,
    sometimes: bool,
    /// The line of the list, for messages.
    line: String,
}

impl Deviation {
    /// Returns the deviations of a program.
    fn of(program: &str) -> Vec<Self> {
        let list = fs::read_to_string(LIST).unwrap();
        let lines = list.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
        let ours = lines.filter_map(|line| line.split_once(' ').filter(|(name, _)| *name == program));
        let parsed = ours.map(|(_, rest)| {
            let (label, why) = rest.split_once(" : ").unwrap_or_else(|| panic!("{rest}: no reason"));
            assert!(!why.trim().is_empty(), "{rest}: no reason");
            let (sometimes, label) = label.strip_prefix('?').map_or((false, label), |label| (true, label));
            Self { label: label.trim().into(), sometimes, line: rest.into() }
        });
        parsed.collect()
    }

    fn is_of(&self, label: &str) -> bool {
        let (pattern, rest) = match self.label.strip_suffix('*') {
            Some(start) => (start, true),
            None => (&*self.label, false),
        };
        let long_enough = if rest { label.len() >= pattern.len() } else { label.len() == pattern.len() };
        // A `?` inside the label matches any character.
        let same =
            pattern.bytes().zip(label.bytes()).all(|(wanted, found)| wanted == b'?' || wanted == found);
        long_enough && same
    }
}

/// The stack on the tested side of a link, and the socket that programs use to find it.
pub(crate) struct Stack {
    // Dropped first: a namespace can only be deleted when no process runs in it.
    pub(crate) stack: Offcore,
    pub(crate) link: Link,
    pub(crate) socket: String,
    _dir: Dir,
}

impl Stack {
    pub(crate) fn new(name: &str) -> Self {
        Self::behind(name, &[])
    }

    /// Starts the stack behind `prefix`, a command that executes its arguments.
    pub(crate) fn behind(name: &str, prefix: &[&str]) -> Self {
        let link = Link::new().unwrap();
        link.here().disable_offloads("t0").unwrap();
        link.far().disable_offloads("k0").unwrap();
        link.here().run("sysctl", &["-qw", "net.ipv6.conf.t0.disable_ipv6=1"]).unwrap();
        let dir = std::env::temp_dir().join(format!("offcore-e2e-{name}-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let socket = dir.join("stack.sock").display().to_string();
        let port = format!("af_packet:t0,addr={}/24,addr={}/64", HERE_ADDRESSES[0], HERE_ADDRESSES[1]);
        let args = ["tcp", "--port", &port, "--idle", "sleep", "--serve", &socket];
        let args = [&args[..], &["--format", "json", "--stats-interval", "0.2"]].concat();
        let mut stack = Offcore::start_behind(link.here(), prefix, &args).unwrap();
        stack.wait_for("a report", |line| line.json.is_some()).unwrap();
        for address in HERE_ADDRESSES {
            let ping = || link.far().run("ping", &["-c1", "-W1", address]);
            assert!((0..20).any(|_| ping().is_ok()), "{address} answers no ping: {}", stack.tail());
        }
        Self { stack, link, socket, _dir: Dir(dir) }
    }

    pub(crate) fn finish(self) -> Finished {
        self.stack.stop().unwrap()
    }

    /// Runs a program on the stack. Returns its output.
    pub(crate) fn run(&self, program: &str, more: &[&str]) -> Vec<String> {
        lines(self.start(program, &[], more)).unwrap()
    }

    /// Starts a program on the stack, behind a command that executes its arguments.
    pub(crate) fn start(&self, program: &str, prefix: &[&str], more: &[&str]) -> Process {
        let binary = peers::offcore::binary().unwrap();
        let binary = binary.to_str().unwrap();
        let exec = [prefix, &[binary, "exec", "--stack", &self.socket, "--"]].concat();
        self.link.start(program, &exec, more).unwrap()
    }
}

/// A directory that is removed with the stack.
struct Dir(PathBuf);

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Runs a program on both stacks and compares, line by line.
pub(super) fn same_on_stack(program: &str) {
    let Some(()) = require(&[Need::Root, Need::Ip, Need::Cc]) else { return };
    let kernel = Link::with_kernel().unwrap().run(program, &[]).unwrap();
    let stack = Stack::new(program).run(program, &[]);
    let deviations = Deviation::of(program);
    let (mut seen, mut wrong, mut differ) = (vec![false; deviations.len()], Vec::new(), 0);
    for (theirs, ours) in kernel.iter().zip(&stack).filter(|(theirs, ours)| theirs != ours) {
        let label = theirs.split(": ").next().unwrap_or_default();
        differ += 1;
        match deviations.iter().position(|deviation| deviation.is_of(label)) {
            Some(at) => seen[at] = true,
            None => wrong.push(format!("the kernel has {theirs:?}, the stack {ours:?}")),
        }
    }
    assert_eq!(kernel.len(), stack.len(), "{program}: {:?} is the last line", stack.last());
    assert!(wrong.is_empty(), "{program}: lines that no deviation is listed for:\n{}", wrong.join("\n"));
    let listed = deviations.iter().zip(seen).filter(|(deviation, seen)| !seen && !deviation.sometimes);
    let gone: Vec<_> = listed.map(|(deviation, _)| &deviation.line).collect();
    assert!(gone.is_empty(), "{program}: the same on both stacks: remove from the list: {gone:?}");
    is_in_docs(program, kernel.len(), differ);
}

/// Asserts that the table in the documentation contains the current result.
fn is_in_docs(program: &str, lines: usize, differ: usize) {
    let docs = fs::read_to_string(Path::new(DOCS)).unwrap();
    let row = docs.lines().find(|line| line.starts_with(&format!("| `{program}` |")));
    let row = row.unwrap_or_else(|| panic!("docs/exec.md has no row of {program}"));
    let mut cells = row.trim_matches('|').rsplit('|').map(str::trim);
    let (most, told) = (cells.next().unwrap_or_default(), cells.next().unwrap_or_default());
    assert_eq!(told, lines.to_string(), "{program}: lines that are compared, in {row}");
    let most: usize = most.parse().unwrap_or_else(|_| panic!("{row}: no number"));
    assert!(differ <= most, "{program}: {differ} lines differ, more than in {row}");
}

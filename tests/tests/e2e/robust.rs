//! Applications that die in the middle of a call, overwrite shared memory, are slow, or run out of resources. Other
//! applications continue, and the stack releases everything of the failed ones.

mod exhausted;
mod scribbled;
mod slow;
mod stepped;
mod versions;

use std::fs;
use std::time::Duration;

use offcore_bench::peer::process::Process;
use peers::programs::lines;
use peers::{Need, Offcore};

use super::exec::until;
use super::programs::on_stack::Stack;
use super::switch::full;

const NEEDS: [Need; 3] = [Need::Root, Need::Ip, Need::Cc];
/// A test fails after this time without progress.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Memory in KiB that a stack may retain after an application has ended, because its allocator caches it.
const KEPT: u64 = 16 << 10;

/// A stack, and another application on it whose streams are checked.
struct Beside {
    neighbour: Process,
    stack: Stack,
    before: Before,
}

/// Resources that a stack holds for its applications.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Held {
    applications: u64,
    processes: u64,
    sessions: u64,
    descriptors: usize,
    /// Shared mappings, including the ones shared with applications.
    shared: usize,
}

impl Held {
    pub(super) fn by(stack: &Offcore) -> Self {
        let count = |name: &str| served(stack, name);
        Self {
            applications: count("applications"),
            processes: count("processes"),
            sessions: count("sessions"),
            descriptors: fs::read_dir(format!("/proc/{}/fd", stack.id())).unwrap().count(),
            shared: fs::read_to_string(format!("/proc/{}/maps", stack.id()))
                .unwrap()
                .matches("/memfd:")
                .count(),
        }
    }
}

/// Returns a counter of the stack's application server.
fn served(stack: &Offcore, name: &str) -> u64 {
    let report = stack.last_report().unwrap();
    report["tcp"][0]["serve"][name].as_u64().unwrap_or_else(|| panic!("no {name}: {report}"))
}

/// Returns a stack's private memory in KiB. Freed pages of shared memory may be noticed late.
fn memory(stack: &Offcore) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", stack.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// The resources of a stack at a point in time, with the memory in KiB. Later it must not hold more.
#[derive(Debug)]
pub(super) struct Before {
    held: Held,
    memory: u64,
}

impl Before {
    pub(super) fn now(stack: &Offcore) -> Self {
        Self { held: Held::by(stack), memory: memory(stack) }
    }

    /// Waits until everything that was added since then is released.
    pub(super) fn is_all(&self, stack: &Offcore) {
        let now = || Self::now(stack);
        let is_all = || {
            let Self { held, memory } = now();
            held == self.held && memory <= self.memory + KEPT
        };
        until("what is left to go", is_all, || format!("{:?}, not {self:?}: {}", now(), stack.tail()));
    }
}

impl Beside {
    fn new(name: &str) -> Self {
        Self::on(Stack::new(name))
    }

    fn on(stack: Stack) -> Self {
        let mut neighbour = stack.start("neighbour", &[], &[]);
        goes_on(&mut neighbour);
        until("a report", || served(&stack.stack, "sessions") == 1, || stack.stack.tail());
        let before = Before::now(&stack.stack);
        Self { neighbour, stack, before }
    }

    /// Waits for the neighbour's next rounds. It checks every byte.
    fn goes_on(&mut self) {
        goes_on(&mut self.neighbour);
    }

    /// Ends the test: everything must work, and the stack must hold resources only for the neighbour.
    fn stop(mut self) {
        self.goes_on();
        self.before.is_all(&self.stack.stack);
        self.neighbour.write_line("end").unwrap();
        lines(self.neighbour).unwrap();
        let finished = self.stack.finish();
        assert!(finished.status.success(), "{finished:?}");
        assert!(!finished.stderr.contains("panicked"), "{}", finished.stderr);
    }
}

fn goes_on(neighbour: &mut Process) {
    let from = neighbour.printed();
    neighbour.wait_for(from, TIMEOUT, "rounds", |text| text.contains("rounds").then_some(())).unwrap();
}

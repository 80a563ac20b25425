//! `offcore exec --port` ends after a signal or is killed. Nothing is left behind, and the program gets its own
//! signals.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use offcore_bench::peer::process::Process;
use peers::offcore::Signal;
use peers::{Need, Netns, TempDir, offcore, one_core};
use rustix::process::{Pid, kill_process};

use super::super::http::curl;
use super::super::tcp::{KERNEL, TAP};
use super::{Guard, NEEDS, STACK, TIMEOUT, children, lives, until};

/// A namespace and a directory for temporary files.
struct Place {
    _guard: Guard,
    netns: Netns,
    dir: TempDir,
}

impl Place {
    fn new() -> Self {
        let netns = Netns::new().unwrap();
        Self { _guard: Guard::new(&netns), netns, dir: TempDir::new().unwrap() }
    }

    /// Starts a shell script with a stack, behind a command that executes its arguments.
    fn start(&self, prefix: &[&str], script: &str) -> Process {
        let port = format!("tap:{TAP},addr={}/24", STACK[0]);
        let binary = offcore::binary().unwrap();
        let words =
            [prefix, &[binary.to_str().unwrap(), "exec", "--port", &port, "sh", "-c", script]].concat();
        let mut command = self.netns.command(words[0]);
        command.args(&words[1..]).env("TMPDIR", self.dir.path());
        Process::spawn("offcore", command).unwrap()
    }

    /// Returns the number of stack directories.
    fn directories(&self) -> usize {
        let names = fs::read_dir(self.dir.path()).unwrap().map(|entry| entry.unwrap().file_name());
        names.filter(|name| name.as_encoded_bytes().starts_with(b"offcore-exec-")).count()
    }

    /// Asserts that no directory, interface or process is left.
    fn assert_clean(&self, processes: &[u32], program: &Process) {
        assert_eq!(self.directories(), 0, "{}", program.tail());
        assert!(self.netns.run("ip", &["link", "show", TAP]).is_err(), "{}", program.tail());
        assert!(!processes.iter().any(|process| lives(*process)), "{processes:?}: {}", program.tail());
    }
}

fn wait_for_word(word: &str, program: &Process) {
    until(word, || program.stdout_from(0).contains(word), || program.tail());
}

#[test]
fn second_signal_kills_the_process_tree() {
    let Some(_core) = one_core(&NEEDS) else { return };
    let place = Place::new();
    let deaf = "trap '' TERM INT; sleep 600 & echo ready; while :; do sleep 1; done";
    let mut program = place.start(&[], deaf);
    wait_for_word("ready", &program);
    let all: Vec<u32> =
        children(program.id()).into_iter().flat_map(|pid| [vec![pid], children(pid)].concat()).collect();
    assert!(all.len() >= 3, "{all:?}");
    program.signal(Signal::TERM).unwrap();
    thread::sleep(Duration::from_millis(500));
    assert_eq!(program.exit_status(Duration::ZERO), None, "{}", program.tail());
    let since = Instant::now();
    program.signal(Signal::TERM).unwrap();
    assert_eq!(program.wait_for_exit(TIMEOUT).unwrap().code(), Some(137), "{}", program.tail());
    assert!(since.elapsed() < Duration::from_secs(8), "it was not waited for: {:?}", since.elapsed());
    place.assert_clean(&all, &program);
}

#[test]
fn signal_during_stack_start_ends_both() {
    let Some(_core) = one_core(&NEEDS) else { return };
    let place = Place::new();
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let mut program = place.start(&[], "echo it runs; sleep 600");
        let since = Instant::now();
        while place.directories() == 0 {
            assert!(since.elapsed() < TIMEOUT, "{}", program.tail());
            thread::sleep(Duration::from_millis(1));
        }
        program.signal(signal).unwrap();
        assert_eq!(program.wait_for_exit(TIMEOUT).unwrap().code(), Some(code), "{}", program.tail());
        assert_eq!(program.stdout_from(0), "", "{}", program.tail());
        place.assert_clean(&[], &program);
    }
}

#[test]
fn signals_are_forwarded_to_the_program() {
    let Some(_core) = one_core(&NEEDS) else { return };
    let place = Place::new();
    let signals = [
        ("INT", Signal::INT),
        ("QUIT", Signal::QUIT),
        ("HUP", Signal::HUP),
        ("USR1", Signal::USR1),
        ("USR2", Signal::USR2),
        ("WINCH", Signal::WINCH),
    ];
    let traps: String = signals.iter().map(|(name, _)| format!("trap 'echo has {name}.' {name}; ")).collect();
    let mut program = place.start(&[], &format!("{traps} echo ready; while :; do sleep 0.05; done"));
    wait_for_word("ready", &program);
    // A second signal of the same kind also goes to the program.
    for round in 1..=2 {
        for (name, signal) in signals {
            program.signal(signal).unwrap();
            let has = || program.stdout_from(0).matches(&format!("has {name}.")).count() == round;
            until(name, has, || program.tail());
        }
    }
    assert_eq!(program.exit_status(Duration::ZERO), None, "{}", program.tail());
    program.signal(Signal::TERM).unwrap();
    assert_eq!(program.wait_for_exit(TIMEOUT).unwrap().code(), Some(143), "{}", program.tail());
    place.assert_clean(&[], &program);
    // Ignored signals stay ignored.
    let mut program = place.start(&["nohup"], "kill -HUP $$; exit 5");
    assert_eq!(program.wait_for_exit(TIMEOUT).unwrap().code(), Some(5), "{}", program.tail());
}

#[test]
fn a_killed_command_leaves_nothing() {
    let Some(_core) = one_core(&[&NEEDS[..], &[Need::Python, Need::Curl]].concat()) else { return };
    let place = Place::new();
    // No program uses the stack, so it ends immediately.
    for signal in [Signal::KILL, Signal::ALARM] {
        let mut program = place.start(&[], "echo ready; exec sleep 600");
        wait_for_word("ready", &program);
        let all = children(program.id());
        let [stack, sleep] = all.as_slice() else { panic!("{all:?}") };
        program.signal(signal).unwrap();
        program.wait_for_exit(TIMEOUT).unwrap();
        until("the stack's end", || !lives(*stack), || program.tail());
        kill_process(Pid::from_raw(sleep.cast_signed()).unwrap(), Signal::KILL).unwrap();
        place.assert_clean(&[], &program);
    }
    // A server keeps its stack until it ends.
    fs::write(place.dir.file("page"), "it is served").unwrap();
    let dir = place.dir.path().display();
    let mut program =
        place.start(&[], &format!("echo ready; exec python3 -m http.server 8080 --directory {dir}"));
    wait_for_word("ready", &program);
    place.netns.ip(&["addr", "replace", KERNEL[0], "dev", TAP]).unwrap();
    let page = format!("http://{}:8080/page", STACK[0]);
    let serves = || place.netns.run("curl", &["--silent", "--fail", "--max-time", "1", &page]).is_ok();
    until("a page", serves, || program.tail());
    let all = children(program.id());
    let [stack, server] = all.as_slice() else { panic!("{all:?}") };
    program.signal(Signal::KILL).unwrap();
    program.wait_for_exit(TIMEOUT).unwrap();
    // The stack checks its parent many times per second.
    thread::sleep(Duration::from_secs(1));
    assert_eq!(curl(&place.netns, &[&page]), b"it is served");
    kill_process(Pid::from_raw(server.cast_signed()).unwrap(), Signal::KILL).unwrap();
    until("the stack's end", || !lives(*stack), || program.tail());
    place.assert_clean(&[], &program);
}

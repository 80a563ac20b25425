//! The signals of `offcore exec` beside a stack of its own: some end both, the others are the program's.

use std::io;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, getpgid, getpgrp, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH};
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::WithOrigin;
use signal_hook::low_level::siginfo::{Cause, Origin};

use crate::signals::ignored_signals;

/// What is taken.
const TAKEN: [i32; 7] = [SIGTERM, SIGINT, SIGQUIT, SIGHUP, SIGUSR1, SIGUSR2, SIGWINCH];
/// What comes sooner after the first is the same one: `timeout` tells this process, and then its group.
const SAME_WITHIN: Duration = Duration::from_millis(100);

/// What this command is told.
#[derive(Debug)]
pub(super) struct Signals {
    arriving: SignalsInfo<WithOrigin>,
    /// The first that ends this command while no program runs.
    ends: Option<i32>,
    stop: Option<Stop>,
}

/// Both are to end.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stop {
    first: Instant,
    /// The terminal says so, which tells all processes of its foreground group.
    by_terminal: bool,
    /// It has been said again: nobody is to be waited for any more.
    pub at_once: bool,
}

impl Signals {
    /// Takes them from now on, but for those that are ignored, as `nohup` has it: they are so for the program, too.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn new() -> io::Result<Self> {
        let ignored = ignored_signals()?;
        let taken = TAKEN.into_iter().filter(|number| ignored & (1 << (number - 1)) == 0);
        Ok(Self { arriving: SignalsInfo::new(taken)?, ends: None, stop: None })
    }

    /// Which signal ends this command, while no program runs that it could be for: all but that of a window's size, which
    /// nobody minds.
    pub(super) fn ends(&mut self) -> Option<i32> {
        for origin in self.arriving.pending().filter(|origin| origin.signal != SIGWINCH) {
            self.ends.get_or_insert(origin.signal);
        }
        self.ends
    }

    /// Passes on to processes what others have sent, but for SIGTERM. That, and what the terminal sends, is to end both.
    pub(super) fn pass_on(&mut self, processes: &[Pid]) -> Option<Stop> {
        let arrived: Vec<Origin> = self.arriving.pending().collect();
        for origin in arrived {
            let by_terminal = origin.cause == Cause::Kernel;
            match (origin.signal, by_terminal) {
                (SIGTERM, _) | (SIGINT | SIGQUIT | SIGHUP, true) => self.stop(by_terminal),
                // The program has it from the terminal, too.
                (_, true) => {}
                (number, false) => pass_on(number, processes),
            }
        }
        self.stop
    }

    fn stop(&mut self, by_terminal: bool) {
        let now = Instant::now();
        let stop = self.stop.get_or_insert(Stop { first: now, by_terminal, at_once: false });
        stop.at_once |= now - stop.first > SAME_WITHIN;
    }
}

impl Stop {
    /// Whether a process has had the signal from its terminal.
    pub(super) fn has_had(self, pid: Pid) -> bool {
        self.by_terminal && getpgid(Some(pid)) == Ok(getpgrp())
    }
}

fn pass_on(number: i32, processes: &[Pid]) {
    let Some(signal) = Signal::from_named_raw(number) else { return };
    for pid in processes {
        let _ = kill_process(*pid, signal);
    }
}

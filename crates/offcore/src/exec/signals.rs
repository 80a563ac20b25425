//! The signals of `offcore exec` with a private stack: some end both processes, others are passed to the program.

use std::io;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, getpgid, getpgrp, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH};
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::WithOrigin;
use signal_hook::low_level::siginfo::{Cause, Origin};

use crate::signals::ignored_signals;

/// Signals that are handled.
const TAKEN: [i32; 7] = [SIGTERM, SIGINT, SIGQUIT, SIGHUP, SIGUSR1, SIGUSR2, SIGWINCH];
/// A signal that follows the first within this time is a duplicate: `timeout` signals this process and then its group.
const DUPLICATE_WINDOW: Duration = Duration::from_millis(100);

/// Signals to this command.
#[derive(Debug)]
pub(super) struct Signals {
    arriving: SignalsInfo<WithOrigin>,
    /// The first signal that ends this command while no program runs.
    ends: Option<i32>,
    stop: Option<Stop>,
}

/// A request to end both processes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stop {
    first: Instant,
    /// The terminal sent it, and therefore sent it to all processes of its foreground group.
    by_terminal: bool,
    /// It was sent again: do not wait for any process.
    pub at_once: bool,
}

impl Signals {
    /// Starts to handle the signals, except for ignored ones (as with `nohup`), which the program also ignores.
    ///
    /// # Errors
    /// System errors.
    pub(super) fn new() -> io::Result<Self> {
        let ignored = ignored_signals()?;
        let taken = TAKEN.into_iter().filter(|number| ignored & (1 << (number - 1)) == 0);
        Ok(Self { arriving: SignalsInfo::new(taken)?, ends: None, stop: None })
    }

    /// Returns the signal that ends this command while no program runs that could handle it. All signals do, except for
    /// a change of the window size.
    pub(super) fn ends(&mut self) -> Option<i32> {
        for origin in self.arriving.pending().filter(|origin| origin.signal != SIGWINCH) {
            self.ends.get_or_insert(origin.signal);
        }
        self.ends
    }

    /// Passes signals that other processes have sent to the program's processes, except for SIGTERM. SIGTERM and
    /// signals from the terminal end both.
    pub(super) fn pass_on(&mut self, processes: &[Pid]) -> Option<Stop> {
        let arrived: Vec<Origin> = self.arriving.pending().collect();
        for origin in arrived {
            let by_terminal = origin.cause == Cause::Kernel;
            match (origin.signal, by_terminal) {
                (SIGTERM, _) | (SIGINT | SIGQUIT | SIGHUP, true) => self.stop(by_terminal),
                // The terminal has also sent it to the program.
                (_, true) => {}
                (number, false) => pass_on(number, processes),
            }
        }
        self.stop
    }

    fn stop(&mut self, by_terminal: bool) {
        let now = Instant::now();
        let stop = self.stop.get_or_insert(Stop { first: now, by_terminal, at_once: false });
        stop.at_once |= now - stop.first > DUPLICATE_WINDOW;
    }
}

impl Stop {
    /// Returns whether a process has received the signal from its terminal.
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

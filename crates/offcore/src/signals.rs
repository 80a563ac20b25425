//! Signals that end long-running commands.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use std::{fs, io};

use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;

/// Maximum time of a clean stop before another signal may end the process.
const CLEANUP_TIME: Duration = Duration::from_secs(2);

/// Other signals that stop the process, unless its parent has ignored them. For example, `nohup` ignores SIGHUP so that
/// the process outlives its terminal.
const STOP_SIGNALS_UNLESS_IGNORED: [i32; 11] = [
    SIGHUP,
    SIGQUIT,
    SIGUSR1,
    SIGUSR2,
    libc::SIGALRM,
    libc::SIGVTALRM,
    libc::SIGPROF,
    libc::SIGIO,
    libc::SIGPWR,
    libc::SIGSTKFLT,
    libc::SIGXCPU,
];

/// Whether a signal has told this process to stop.
static STOPPING: AtomicBool = AtomicBool::new(false);

/// Returns whether a signal of [`stop_on_signals`] has arrived.
pub(crate) fn is_stopping() -> bool {
    STOPPING.load(Ordering::Relaxed)
}

/// Returns a flag. Every signal that would end the process sets it, except SIGKILL and signals of program errors. If
/// the stop takes longer than `CLEANUP_TIME`, a further signal ends the process.
pub(crate) fn stop_on_signals() -> io::Result<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    let ignored = ignored_signals()?;
    let taken = STOP_SIGNALS_UNLESS_IGNORED.into_iter().filter(|number| ignored & 1 << (number - 1) == 0);
    let mut signals = Signals::new(taken.chain([SIGINT, SIGTERM]))?;
    // If a capture exceeds the file size limit (ulimit -f), the write fails and is reported. Otherwise the signal would
    // end the process.
    signal_hook::flag::register(libc::SIGXFSZ, Arc::default())?;
    let stop = Arc::clone(&flag);
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        let mut first = None;
        for _ in signals.forever() {
            STOPPING.store(true, Ordering::Relaxed);
            stop.store(true, Ordering::Relaxed);
            if first.get_or_insert_with(Instant::now).elapsed() > CLEANUP_TIME {
                signal_hook::low_level::exit(1);
            }
        }
    })?;
    Ok(flag)
}

/// Returns the signals that this process ignores, with one bit for each.
///
/// # Errors
/// System errors.
pub(crate) fn ignored_signals() -> io::Result<u64> {
    Ok(ignored(&fs::read_to_string("/proc/self/status")?))
}

/// Returns the ignored signals, with one bit for each, from a status file in `/proc`.
fn ignored(status: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sigign_mask_is_parsed() {
        assert_eq!(ignored("Name:\tx\nSigBlk:\t00000000000000ff\nSigIgn:\t0000000000001001\n"), 0x1001);
        assert_eq!(ignored("nothing"), 0);
    }
}

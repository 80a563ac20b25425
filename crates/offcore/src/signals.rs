//! Signals that end what runs until somebody stops it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use std::{fs, io};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// How long a stop takes at most before another signal may end it.
const CLEANING: Duration = Duration::from_secs(2);

/// Whether a signal has asked this process to stop.
static STOPPING: AtomicBool = AtomicBool::new(false);

/// Whether a signal of [`stop_on_signals`] has come.
pub(crate) fn is_stopping() -> bool {
    STOPPING.load(Ordering::Relaxed)
}

/// A flag that SIGINT, SIGTERM and SIGHUP set. Another one ends the process, once cleaning up has had its time.
pub(crate) fn stop_on_signals() -> io::Result<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    // Whoever had it ignored (nohup) wants a process that outlives its terminal.
    if ignored_signals()? & 1 << (SIGHUP - 1) == 0 {
        signals.add_signal(SIGHUP)?;
    }
    // A capture that may not grow (ulimit -f) fails to be written, and that is said: the signal alone would end the process.
    signal_hook::flag::register(libc::SIGXFSZ, Arc::default())?;
    let stop = Arc::clone(&flag);
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        let mut first = None;
        for _ in signals.forever() {
            STOPPING.store(true, Ordering::Relaxed);
            stop.store(true, Ordering::Relaxed);
            if first.get_or_insert_with(Instant::now).elapsed() > CLEANING {
                signal_hook::low_level::exit(1);
            }
        }
    })?;
    Ok(flag)
}

/// Which signals this process ignores, a bit for each.
///
/// # Errors
/// The system's.
pub(crate) fn ignored_signals() -> io::Result<u64> {
    Ok(ignored(&fs::read_to_string("/proc/self/status")?))
}

/// Which signals are ignored, a bit for each, by what `/proc` says of a process.
fn ignored(status: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignored_signals_are_bits() {
        assert_eq!(ignored("Name:\tx\nSigBlk:\t00000000000000ff\nSigIgn:\t0000000000001001\n"), 0x1001);
        assert_eq!(ignored("nothing"), 0);
    }
}

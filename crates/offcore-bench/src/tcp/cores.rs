//! Detects other processes on the cores of a measurement, so that disturbed windows can be repeated.

use std::fs;
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use crate::machine::CoreTime;

/// Maximum share of a core that other processes may use in a window. Otherwise the window is repeated.
pub(super) const OTHERS: f64 = 0.05;

/// CPU time of the two cores at the start of a window.
#[derive(Debug)]
pub(super) struct Cores {
    lcores: [usize; 2],
    before: [CoreTime; 2],
    start: Instant,
}

impl Cores {
    /// Begins a window.
    pub(super) fn watch(lcores: [usize; 2]) -> Result<Self> {
        let start = Instant::now();
        Ok(Self { lcores, before: times(lcores)?, start })
    }

    /// Returns the share of a core that other processes and other virtual machines have used since the start of the
    /// window, for the core with the larger share. `ours` is the CPU time in seconds that the measured processes have
    /// used on each core in the meantime.
    pub(super) fn others(&self, ours: [f64; 2]) -> Result<f64> {
        let (seconds, after) = (self.start.elapsed().as_secs_f64(), times(self.lcores)?);
        let of = |core: usize| {
            let used = |time: &CoreTime| time.busy + time.stolen;
            seconds_of(used(&after[core]).saturating_sub(used(&self.before[core]))) - ours[core]
        };
        Ok(of(0).max(of(1)) / seconds)
    }
}

fn times([first, second]: [usize; 2]) -> Result<[CoreTime; 2]> {
    Ok([CoreTime::of(first)?, CoreTime::of(second)?])
}

/// Converts ticks of the kernel's clock to seconds.
pub(super) fn seconds_of(ticks: u64) -> f64 {
    ticks as f64 / rustix::param::clock_ticks_per_second() as f64
}

/// Returns the ticks of the kernel's clock that a process, or this thread (`thread-self`), has used in user and kernel
/// mode (proc_pid_stat(5)).
pub(super) fn ticks(process: &str) -> Result<u64> {
    let path = format!("/proc/{process}/stat");
    let text = fs::read_to_string(&path).with_context(|| format!("{path}: a process has ended"))?;
    // The name is in parentheses and may contain any character.
    let fields = text.rsplit(')').next().unwrap_or_default().split_whitespace();
    let used: Vec<u64> = fields.skip(11).take(2).map_while(|field| field.parse().ok()).collect();
    ensure!(used.len() == 2, "{path}: {text:?}");
    Ok(used.iter().sum())
}

/// Returns the CPU time in seconds that the first thread of a process has used. It is exact, unlike [`ticks`], whose
/// rounding errors add up over many processes. Kernels without scheduler statistics report ticks.
pub(super) fn seconds_of_first_thread(process: u32) -> Result<f64> {
    let text = fs::read_to_string(format!("/proc/{process}/schedstat")).unwrap_or_default();
    match text.split_whitespace().next().and_then(|field| field.parse::<u64>().ok()) {
        Some(ns) => Ok(ns as f64 / 1e9),
        None => Ok(seconds_of(ticks(&process.to_string())?)),
    }
}

/// Returns the CPU time in seconds that the kernel's softirq thread of a core has used, or 0 if it is not visible.
pub(super) fn seconds_of_softirqs(lcore: usize) -> f64 {
    let name = format!("ksoftirqd/{lcore}\n");
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut ids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let thread = ids.find(|id| fs::read_to_string(format!("/proc/{id}/comm")).is_ok_and(|comm| comm == name));
    thread.and_then(|id| seconds_of_first_thread(id).ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_of_this_process_is_read() {
        assert!(ticks("self").is_ok() && ticks("thread-self").is_ok());
        assert!(seconds_of_first_thread(std::process::id()).unwrap() >= 0.0);
    }
}

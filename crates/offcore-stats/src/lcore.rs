//! Pinning worker threads to lcores.

use rustix::thread::CpuSet;

/// Errors of the pinning of a thread.
#[derive(Debug, displaydoc::Display, thiserror::Error)]
pub enum LcoreError {
    /// lcore {found} is not available; available lcores: {available:?}
    Unavailable { found: usize, available: Vec<usize> },
    /// lcore list '{found}': expected numbers and ranges such as 0,2-3
    Syntax { found: String },
    /// real-time priority {priority} was refused ({source}): it needs root or CAP_SYS_NICE and a priority of 1-99
    Realtime { priority: i32, source: std::io::Error },
    /// pinning a thread: {0}
    System(#[from] rustix::io::Errno),
}

/// Returns the lcores that this process may use, in ascending order.
///
/// # Errors
/// The kernel does not report them.
pub fn available() -> Result<Vec<usize>, LcoreError> {
    let set = rustix::thread::sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect())
}

/// Pins the calling thread to `lcore`.
///
/// # Errors
/// [`LcoreError::Unavailable`] if the process may not run on this lcore.
pub fn pin(lcore: usize) -> Result<(), LcoreError> {
    let refuse = || -> LcoreError {
        LcoreError::Unavailable { found: lcore, available: available().unwrap_or_default() }
    };
    if lcore >= CpuSet::MAX_CPU {
        return Err(refuse());
    }
    let mut set = CpuSet::new();
    set.set(lcore);
    rustix::thread::sched_setaffinity(None, &set).map_err(|_| refuse())
}

/// Gives the calling thread the SCHED_FIFO `priority` (1–99), as `chrt -f` does.
///
/// # Errors
/// [`LcoreError::Realtime`] without the privilege, or if the priority is out of range.
pub fn realtime(priority: i32) -> Result<(), LcoreError> {
    let param = libc::sched_param { sched_priority: priority };
    // SAFETY: `param` is a valid sched_param that outlives the call; pid 0 is the calling thread.
    if unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const param) } == 0 {
        return Ok(());
    }
    Err(LcoreError::Realtime { priority, source: std::io::Error::last_os_error() })
}

/// Returns the NUMA node of `lcore`, if sysfs reports it.
pub fn numa_node(lcore: usize) -> Option<usize> {
    let entries = std::fs::read_dir(format!("/sys/devices/system/cpu/cpu{lcore}")).ok()?;
    entries.flatten().find_map(|e| e.file_name().to_str()?.strip_prefix("node")?.parse().ok())
}

/// Parses `0,2-3` into lcores, in the order given.
///
/// # Errors
/// [`LcoreError::Syntax`].
pub fn parse_list(text: &str) -> Result<Vec<usize>, LcoreError> {
    let syntax = || LcoreError::Syntax { found: text.to_string() };
    let mut lcores = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let first: usize = first.trim().parse().map_err(|_| syntax())?;
        let last: usize = last.trim().parse().map_err(|_| syntax())?;
        if first > last || last >= CpuSet::MAX_CPU {
            return Err(syntax());
        }
        lcores.extend(first..=last);
    }
    Ok(lcores)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists() {
        assert_eq!(parse_list("0,2-4").unwrap(), [0, 2, 3, 4]);
        for bad in ["", "x", "3-1", "1-", "99999"] {
            assert!(matches!(parse_list(bad), Err(LcoreError::Syntax { .. })), "{bad}");
        }
    }

    #[test]
    fn pinning_holds_and_refuses() {
        std::thread::spawn(|| {
            let first = available().unwrap()[0];
            pin(first).unwrap();
            assert_eq!(available().unwrap(), [first]);
            assert!(matches!(pin(1023), Err(LcoreError::Unavailable { .. })));
            assert!(matches!(pin(1 << 20), Err(LcoreError::Unavailable { .. })));
        })
        .join()
        .unwrap();
    }
}

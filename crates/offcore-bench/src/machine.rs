//! Properties of the machine that peers depend on: installed programs, free hugepages and the CPU time of cores.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

/// Directory in which the kernel reports and configures 2 MiB pages.
const HUGEPAGES: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";

/// Returns the path of `name`, searched in PATH and in the administrators' directories that an ordinary user's PATH
/// lacks.
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin"].map(PathBuf::from))
        .map(|dir| dir.join(name))
        .find(|path| path.is_file())
}

/// Returns the MiB of 2 MiB hugepages that are neither in use nor reserved.
pub fn free_hugepage_mib() -> u32 {
    hugepages("free_hugepages").saturating_sub(hugepages("resv_hugepages")).saturating_mul(2)
}

/// Returns the message for less than `needed` MiB of free 2 MiB pages: the number of free pages and the command that
/// increases the pool to the required size.
pub fn more_hugepages(needed: u32) -> String {
    let free = free_hugepage_mib();
    let all = hugepages("nr_hugepages").saturating_add(needed.saturating_sub(free).div_ceil(2));
    format!(
        "{needed} MiB of 2 MiB pages are needed for both sides and {free} MiB are free: echo {all} > {HUGEPAGES}/nr_hugepages"
    )
}

/// CPU time of a core since boot, in ticks of the kernel's clock (proc_stat(5)).
#[derive(Clone, Copy, Debug)]
pub(crate) struct CoreTime {
    pub(crate) busy: u64,
    /// Busy and idle time, without stolen time.
    pub(crate) all: u64,
    /// Stolen time, which the hypervisor gave to other machines.
    pub(crate) stolen: u64,
}

impl CoreTime {
    /// Reads the times of `lcore`.
    pub(crate) fn of(lcore: usize) -> Result<Self> {
        let text = std::fs::read_to_string("/proc/stat").context("/proc/stat")?;
        let name = format!("cpu{lcore} ");
        let line = text.lines().find_map(|line| line.strip_prefix(&name));
        let line = line.with_context(|| format!("/proc/stat has no {name}"))?;
        let fields: Vec<u64> = line.split_whitespace().map_while(|field| field.parse().ok()).collect();
        // user nice system idle iowait irq softirq steal
        ensure!(fields.len() >= 8, "/proc/stat: {line:?}");
        let all: u64 = fields[..7].iter().sum();
        Ok(Self { busy: all - fields[3] - fields[4], all, stolen: fields[7] })
    }
}

fn hugepages(name: &str) -> u32 {
    std::fs::read_to_string(Path::new(HUGEPAGES).join(name))
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .unwrap_or(0)
}

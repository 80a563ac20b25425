//! What a peer finds on the machine: programs and free hugepages; and who uses its cores.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

/// What the kernel says of 2 MiB pages, and is told.
const HUGEPAGES: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";

/// Where `name` is, in PATH or the directories for administrators that an ordinary user's PATH leaves out.
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin"].map(PathBuf::from))
        .map(|dir| dir.join(name))
        .find(|path| path.is_file())
}

/// MiB of 2 MiB hugepages that nobody uses or has reserved.
pub fn free_hugepage_mib() -> u32 {
    hugepages("free_hugepages").saturating_sub(hugepages("resv_hugepages")).saturating_mul(2)
}

/// What to say where fewer than `needed` MiB of 2 MiB pages are free: how many there are, and the command that adds what
/// is missing to those that others use.
pub fn more_hugepages(needed: u32) -> String {
    let free = free_hugepage_mib();
    let all = hugepages("nr_hugepages").saturating_add(needed.saturating_sub(free).div_ceil(2));
    format!(
        "{needed} MiB of 2 MiB pages are needed for both sides and {free} MiB are free: echo {all} > {HUGEPAGES}/nr_hugepages"
    )
}

/// What a core's time went to since the machine began, in ticks of the kernel's clock (proc_stat(5)).
#[derive(Clone, Copy, Debug)]
pub(crate) struct CoreTime {
    pub(crate) busy: u64,
    /// Busy and idle; time that the machine did not have is in neither.
    pub(crate) all: u64,
    /// That time.
    pub(crate) stolen: u64,
}

impl CoreTime {
    /// That of an lcore.
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

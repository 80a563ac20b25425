//! The work queues of this machine, as found in sysfs and /dev/dsa.
//!
//! The two directories can be replaced with [`Roots`] or with the environment variables that DPDK uses:
//! `DSA_SYSFS_PATH` for `/sys/bus/dsa/devices` and `DSA_DEV_PATH` for `/dev/dsa`.

#[cfg(test)]
mod tests;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use crate::config::json::op_set;
use crate::config::sysfs::{Roots, names};
use crate::sim::SimError;
use crate::wq::{OpSet, WqInfo, WqMode};

/// Why a work queue cannot be used, and what to do.
#[derive(Debug, displaydoc::Display, thiserror::Error)]
pub enum WqError {
    /// '{0}' names no work queue: expected wqDEVICE.QUEUE, such as wq0.1
    Name(String),
    /// {wq} is not there ({there}): `offcore dsa list` shows what is; load the idxd driver (modprobe idxd) or
    /// configure the device (`offcore dsa configure`)
    NotThere { wq: String, there: String },
    /// {wq} is {state}, not enabled: accel-config enable-wq {device}/{wq}, or `offcore dsa configure`
    NotEnabled { wq: String, device: String, state: String },
    /// {wq} is of type {found}, expected user: disable it and set its type to user (accel-config config-wq
    /// --type=user {device}/{wq}), or use another one
    Type { wq: String, device: String, found: String },
    /// {wq} is named '{found}', expected '{expected}…': it is another application's; use one of yours
    OtherName { wq: String, found: String, expected: String },
    /// {wq} has driver_name '{found}', expected 'user': disable it, write 'user' to its driver_name (kernels since
    /// 6.7 ask for it), and enable it again
    OtherDriver { wq: String, found: String },
    /// {wq} is dedicated and in use by another process: stop that, or use a shared work queue
    Busy { wq: String },
    /// no permission to open {node} for {wq}: chmod or chown it (a udev rule does so for good), or run as root
    NoPermission { wq: String, node: String },
    /// {device} has no shared virtual memory (see pasid_enabled): boot with intel_iommu=on,sm_on and a kernel with
    /// CONFIG_INTEL_IOMMU_SVM, with VT-d on in the firmware
    NoSva { device: String },
    /// {node} of {wq} cannot be opened ({reason}): is it enabled, and is /dev/dsa there?
    Open { wq: String, node: String, reason: Errno },
    /// nothing can be submitted to {wq} through {node}: {mapping}, and write() is refused ({writing}): give the
    /// process CAP_SYS_RAWIO, or use a kernel with write() submission (6.10, 6.6.31 or later)
    NoWay { wq: String, node: String, mapping: String, writing: Errno },
    /// {path}: found '{found}', expected {expected}
    Attribute { path: String, found: String, expected: &'static str },
    /// {path} cannot be read: {error}; is {wq} there, and the idxd driver loaded?
    Read { path: String, wq: String, error: io::Error },
    /// {0}
    Simulator(SimError),
}

/// A work queue as described by sysfs.
#[derive(Clone, Debug)]
pub struct Found {
    pub info: WqInfo,
    pub device: String,
    /// `enabled`, `disabled`, …
    pub state: String,
    /// `user`, `kernel` or `none`.
    pub kind: String,
    pub name: String,
    /// The driver that may bind the queue; empty on kernels before 6.7.
    pub driver_name: String,
    /// Whether the device can use a process's virtual addresses.
    pub pasid_enabled: bool,
    pub(crate) state_file: PathBuf,
}

impl Found {
    /// Checks that a process can use the queue. If `name` is given, the queue's name must begin with it.
    ///
    /// # Errors
    /// The first problem found.
    pub fn check(&self, name: Option<&str>) -> Result<(), WqError> {
        let (wq, device) = (self.info.name.clone(), self.device.clone());
        if self.kind != "user" {
            return Err(WqError::Type { wq, device, found: self.kind.clone() });
        }
        if !matches!(self.driver_name.as_str(), "" | "user") {
            return Err(WqError::OtherDriver { wq, found: self.driver_name.clone() });
        }
        if !self.pasid_enabled {
            return Err(WqError::NoSva { device });
        }
        if self.state != "enabled" {
            return Err(WqError::NotEnabled { wq, device, state: self.state.clone() });
        }
        if let Some(expected) = name.filter(|expected| !self.name.starts_with(expected)) {
            return Err(WqError::OtherName { wq, found: self.name.clone(), expected: expected.into() });
        }
        Ok(())
    }

    /// Returns a warning if the device is on another NUMA node than `wanted`.
    pub fn numa_warning(&self, wanted: Option<u32>) -> Option<String> {
        let (wanted, found) = (wanted?, self.info.numa_node?);
        (wanted != found).then(|| {
            format!(
                "{} is on NUMA node {found}, its user on node {wanted}: copies cross the interconnect; use a work queue \
                 of node {wanted}",
                self.info.name
            )
        })
    }
}

/// Returns all work queues in sysfs, by device and number, usable or not.
///
/// # Errors
/// If an attribute cannot be read. A missing directory is not an error: it means that the machine has no device.
pub fn list(roots: &Roots) -> Result<Vec<Found>, WqError> {
    numbers(roots).into_iter().map(|(device, queue)| find(roots, &format!("wq{device}.{queue}"))).collect()
}

fn numbers(roots: &Roots) -> Vec<(u32, u32)> {
    let mut numbers = Vec::new();
    for device in names(&roots.sysfs).iter().filter_map(|name| name.strip_prefix("dsa")?.parse::<u32>().ok())
    {
        let inside = names(&roots.sysfs.join(format!("dsa{device}")));
        numbers.extend(inside.iter().filter_map(|name| parse(name)).filter(|&(of, _)| of == device));
    }
    numbers.sort_unstable();
    numbers
}

/// Parses device and queue number from a name such as `wq0.1`.
fn parse(wq: &str) -> Option<(u32, u32)> {
    let (device, queue) = wq.strip_prefix("wq")?.split_once('.')?;
    Some((device.parse().ok()?, queue.parse().ok()?))
}

/// Reads the description of a work queue from sysfs.
///
/// # Errors
/// [`WqError::Name`], [`WqError::NotThere`], or a file that is missing or has unexpected contents.
pub fn find(roots: &Roots, wq: &str) -> Result<Found, WqError> {
    let (number, _) = parse(wq).ok_or_else(|| WqError::Name(wq.into()))?;
    let device = format!("dsa{number}");
    let device_dir = roots.sysfs.join(&device);
    let dir = device_dir.join(wq);
    if !dir.is_dir() {
        let there: Vec<String> = numbers(roots).iter().map(|(d, q)| format!("wq{d}.{q}")).collect();
        let there =
            if there.is_empty() { "no work queue is".into() } else { format!("{} are", there.join(", ")) };
        return Err(WqError::NotThere { wq: wq.into(), there });
    }
    let of_queue = Attributes { dir: &dir, wq };
    let of_device = Attributes { dir: &device_dir, wq };
    let size = of_queue.number("size")? as u32;
    let mode = match of_queue.text("mode")?.as_str() {
        "dedicated" => WqMode::Dedicated,
        "shared" => WqMode::Shared,
        _ => return Err(of_queue.unexpected("mode", "dedicated or shared")),
    };
    let threshold = match mode {
        WqMode::Dedicated => size,
        WqMode::Shared => of_queue.number("threshold")? as u32,
    };
    let device_ops = of_device.ops("op_cap");
    let info = WqInfo {
        name: wq.into(),
        mode,
        size,
        threshold,
        max_batch_size: of_queue.number("max_batch_size")? as u32,
        max_transfer_size: of_queue.number("max_transfer_size")?,
        block_on_fault: of_queue.number("block_on_fault").unwrap_or(0) == 1,
        // Kernels before 6.0 have no op_config: the queue supports all operations of the device.
        ops: of_queue.ops("op_config").or(device_ops).unwrap_or_default(),
        gen_cap: of_device.number("gen_cap")?,
        version: of_device.number("version")? as u32,
        engines: engines(&device_dir, number, of_queue.number("group_id").ok()),
        numa_node: of_device.text("numa_node").ok().and_then(|text| text.parse().ok()),
    };
    Ok(Found {
        info,
        device,
        state: of_queue.text("state")?,
        kind: of_queue.text("type")?,
        name: of_queue.text("name").unwrap_or_default(),
        driver_name: of_queue.text("driver_name").unwrap_or_default(),
        pasid_enabled: of_device.number("pasid_enabled").unwrap_or(0) == 1,
        state_file: dir.join("state"),
    })
}

/// Returns the number of DSA engines in a group; 1 if it cannot be determined.
fn engines(device: &Path, number: u32, group: Option<u64>) -> u32 {
    let Some(group) = group else { return 1 };
    let group_of = |name: String| {
        let path =
            name.starts_with(&format!("engine{number}.")).then(|| device.join(&name).join("group_id"))?;
        fs::read_to_string(path).ok()?.trim().parse::<u64>().ok()
    };
    names(device).into_iter().filter_map(group_of).filter(|&of| of == group).count().max(1) as u32
}

/// The attributes of a device or a work queue.
struct Attributes<'a> {
    dir: &'a Path,
    wq: &'a str,
}

impl Attributes<'_> {
    fn text(&self, name: &str) -> Result<String, WqError> {
        let path = self.dir.join(name);
        match fs::read_to_string(&path) {
            Ok(text) => Ok(text.trim().to_owned()),
            Err(error) => Err(WqError::Read { path: path.display().to_string(), wq: self.wq.into(), error }),
        }
    }

    fn number(&self, name: &str) -> Result<u64, WqError> {
        let text = self.text(name)?;
        let parsed = match text.strip_prefix("0x") {
            Some(digits) => u64::from_str_radix(digits, 16),
            None => text.parse(),
        };
        parsed.map_err(|_| self.unexpected(name, "a number"))
    }

    fn ops(&self, name: &str) -> Option<OpSet> {
        op_set(&self.text(name).ok()?)
    }

    fn unexpected(&self, name: &str, expected: &'static str) -> WqError {
        let found = self.text(name).unwrap_or_default();
        WqError::Attribute { path: self.dir.join(name).display().to_string(), found, expected }
    }
}

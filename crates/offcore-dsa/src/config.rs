//! The layout of a device: groups, work queues and DSA engines, with accel-config's names.
//!
//! * [`DeviceConfig`]: a layout. [`profile`] returns a built-in layout, [`one_line`] parses a one-line form,
//! * [`DeviceCapabilities`]: the limits of a device's layout; [`check`]: every rule of the specification by name,
//! * [`json`]: accel-config's files; [`commands`]: accel-config's command lines,
//! * [`sysfs`]: the present layout as the kernel reports it; [`apply`]: changes of the layout.

pub mod apply;
mod capabilities;
pub mod commands;
pub mod json;
mod layouts;
mod rules;
pub mod status;
pub mod sysfs;

use std::path::PathBuf;

pub use capabilities::DeviceCapabilities;
pub use layouts::{BUILT_IN, OneLine, built_in, one_line, profile};
pub use rules::{Rule, RuleBroken, check};

use crate::wq::{OpSet, WqMode};

/// A device's layout. Groups, work queues and DSA engines are counted from 0: `wqs[1]` of `dsa0` is `wq0.1`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceConfig {
    /// `dsa0`.
    pub name: String,
    /// Read buffers that the groups with [`Group::use_read_buffer_limit`] share; 0 for no limit (section 9.2.8).
    pub read_buffer_limit: u32,
    /// Entries of the event log, 64 or more; `None` leaves the kernel's default.
    pub event_log_size: Option<u32>,
    /// Groups. A group without work queues and engines is unused.
    pub groups: Vec<Group>,
    /// Work queues. A queue of size 0 is unused.
    pub wqs: Vec<WqConfig>,
    /// The group that each DSA engine is in, if any.
    pub engines: Vec<Option<usize>>,
}

/// The settings of a group (section 9.2.23).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Group {
    /// Traffic class of addresses whose selector is 0; `None` leaves the device's.
    pub traffic_class_a: Option<u32>,
    /// Traffic class of addresses whose selector is 1; `None` leaves the device's.
    pub traffic_class_b: Option<u32>,
    pub read_buffers_reserved: u32,
    /// Read buffers that the group may use; `None` for all of the device's.
    pub read_buffers_allowed: Option<u32>,
    /// Whether [`DeviceConfig::read_buffer_limit`] applies to the group.
    pub use_read_buffer_limit: bool,
    /// Limit of work descriptors in progress in an engine: 1/2^N of the maximum, N from 0 to 3.
    pub desc_progress_limit: u32,
    /// Limit of batch descriptors in progress in an engine: 1/2^N of the maximum, N from 0 to 3.
    pub batch_progress_limit: u32,
}

/// The settings of a work queue (section 9.2.24 and additions of the kernel).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WqConfig {
    /// The access mode.
    pub mode: WqMode,
    /// Number of descriptors that the queue holds; 0 for an unused queue.
    pub size: u32,
    /// Shared: number of descriptors that the queue holds for user clients. Dedicated: unused.
    pub threshold: u32,
    pub group: Option<usize>,
    /// Weight among the queues of its group, 1 to 15.
    pub priority: u32,
    /// Whether descriptors may ask the device to wait for page faults.
    pub block_on_fault: bool,
    pub max_batch_size: u32,
    pub max_transfer_size: u64,
    pub kind: WqType,
    /// The name with which programs find the queue. DPDK takes queues with names that begin with `dpdk_`.
    pub label: String,
    /// The kernel driver to bind: `user` (required since Linux 6.7), `dmaengine`, …
    pub driver_name: String,
    /// Turns the address translation service off.
    pub ats_disable: bool,
    /// Turns the page request service off.
    pub prs_disable: bool,
    /// Allowed operations; `None` for all of the device's.
    pub op_config: Option<OpSet>,
}

impl Default for WqConfig {
    /// Returns an unused queue, with useful reset values of the device.
    fn default() -> Self {
        Self {
            mode: WqMode::Dedicated,
            size: 0,
            threshold: 0,
            group: None,
            priority: 10,
            block_on_fault: false,
            max_batch_size: 32,
            max_transfer_size: 2 << 20,
            kind: WqType::User,
            label: String::new(),
            driver_name: "user".into(),
            ats_disable: false,
            prs_disable: false,
            op_config: None,
        }
    }
}

/// The intended user of a work queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WqType {
    /// None: the queue has not been configured.
    None,
    /// The kernel, such as its DMA engine.
    Kernel,
    /// Programs, through a character device.
    #[default]
    User,
}

impl WqType {
    /// Returns the name that sysfs and accel-config use.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Kernel => "kernel",
            Self::User => "user",
        }
    }
}

impl DeviceConfig {
    /// Returns the device's number: 0 for `dsa0`; `None` for a name without a number.
    pub fn number(&self) -> Option<u32> {
        device_number(&self.name)
    }

    /// Returns `wq0.1` for work queue 1 of `dsa0`.
    pub fn wq_name(&self, wq: usize) -> String {
        format!("wq{}.{wq}", self.number().unwrap_or(0))
    }

    /// Returns `group0.1` for group 1 of `dsa0`.
    pub fn group_name(&self, group: usize) -> String {
        format!("group{}.{group}", self.number().unwrap_or(0))
    }

    /// Returns `engine0.1` for DSA engine 1 of `dsa0`.
    pub fn engine_name(&self, engine: usize) -> String {
        format!("engine{}.{engine}", self.number().unwrap_or(0))
    }

    /// Returns the used work queues with their numbers.
    pub fn used_wqs(&self) -> impl Iterator<Item = (usize, &WqConfig)> {
        self.wqs.iter().enumerate().filter(|(_, wq)| wq.size > 0)
    }

    /// Returns the same layout for another device: `dpdk_wq0.1` becomes `dpdk_wq2.1` on `dsa2`.
    #[must_use]
    pub fn renamed(mut self, name: &str) -> Self {
        let old: Vec<String> = (0..self.wqs.len()).map(|wq| self.wq_name(wq)).collect();
        self.name = name.into();
        for (wq, old) in old.iter().enumerate() {
            let new = self.wq_name(wq);
            if let Some(prefix) = self.wqs[wq].label.strip_suffix(old.as_str()) {
                self.wqs[wq].label = format!("{prefix}{new}");
            }
        }
        self
    }

    /// Removes settings that a device with these capabilities does not have, as accel-config and the kernel do, and
    /// fills in the values that accel-config's template for users leaves open. Returns the changes, in words.
    pub fn fit(&mut self, device: &DeviceCapabilities) -> Vec<String> {
        let mut notes = Vec::new();
        if self.is_template() {
            notes.push(format!(
                "{}: sizes and engines are not given: filled in as by accel-config config-user-default",
                self.name
            ));
            self.fill(device);
        }
        if !device.event_log && self.event_log_size.take().is_some() {
            notes.push(format!("{}: event_log_size left out: the device has no event log", self.name));
        }
        for number in 0..self.groups.len() {
            let name = self.group_name(number);
            let group = &mut self.groups[number];
            if !device.progress_limits && group.desc_progress_limit + group.batch_progress_limit > 0 {
                (group.desc_progress_limit, group.batch_progress_limit) = (0, 0);
                notes.push(format!("{name}: progress limits left out: the device has none"));
            }
        }
        for number in 0..self.wqs.len() {
            let name = self.wq_name(number);
            let wq = &mut self.wqs[number];
            if wq.prs_disable && !(device.wq_prs_control && device.event_log) {
                wq.prs_disable = false;
                notes.push(format!("{name}: prs_disable left out: the device has no such control"));
            }
            if wq.prs_disable && wq.block_on_fault {
                wq.block_on_fault = false;
                notes.push(format!("{name}: block_on_fault is off: the kernel lets prs_disable override it"));
            }
        }
        notes
    }

    /// Whether this is accel-config's template for users: queues with names but without sizes, and no engines.
    fn is_template(&self) -> bool {
        let named = |wq: &WqConfig| !wq.label.is_empty();
        self.wqs.iter().any(named)
            && self.used_wqs().next().is_none()
            && self.engines.iter().all(Option::is_none)
    }

    /// Gives the named queues equal shares of the queue space, and all engines to the first group.
    fn fill(&mut self, device: &DeviceCapabilities) {
        let size = device.total_wq_size / device.wqs.max(1) as u32;
        for wq in self.wqs.iter_mut().filter(|wq| !wq.label.is_empty()) {
            let group = Some(wq.group.unwrap_or(0));
            *wq = WqConfig {
                size,
                threshold: size,
                group,
                max_batch_size: device.max_batch_size,
                max_transfer_size: device.max_transfer_size,
                ..wq.clone()
            };
        }
        let group = self.used_wqs().find_map(|(_, wq)| wq.group);
        self.engines = vec![group; device.engines];
    }

    /// Returns the number of DSA engines in a group.
    pub fn engines_in(&self, group: usize) -> usize {
        self.engines.iter().filter(|engine| **engine == Some(group)).count()
    }
}

/// Returns the number formed by the digits at the end: 0 for `dsa0` or `dsa-sim0`.
pub(crate) fn device_number(name: &str) -> Option<u32> {
    let digits = name.len() - name.bytes().rev().take_while(u8::is_ascii_digit).count();
    name[digits..].parse().ok()
}

/// Errors of reading, checking and applying layouts.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// There is neither a built-in layout nor a file of this name.
    #[error("'{found}' is no built-in layout and no file: expected {} or the path of an accel-config JSON file",
        BUILT_IN.join(", "))]
    UnknownName { found: String },
    /// A file cannot be read or written.
    #[error("{path}: {error}")]
    File { path: PathBuf, error: std::io::Error },
    /// A file is not accel-config's JSON.
    #[error("{place}: {problem}")]
    Json { place: String, problem: String },
    /// A one-line form is invalid for the device.
    #[error("{0}")]
    OneLine(String),
    /// Rules are violated; the list is complete.
    #[error("{}", rules::list(.0))]
    Rules(Vec<RuleBroken>),
    /// The device does not exist.
    #[error("{device}: not found under {root}; found {found}. Load the idxd driver, or name another device")]
    NoDevice { device: String, root: PathBuf, found: String },
    /// A step of applying a layout failed.
    #[error(transparent)]
    Apply(#[from] apply::ApplyError),
}

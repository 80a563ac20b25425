//! Devices as the kernel reports them: sysfs and the character devices, under configurable root directories.

use std::fmt::Display;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use super::{ConfigError, DeviceCapabilities, DeviceConfig, Group, WqConfig, WqType, json};
use crate::wq::{OpSet, WqMode, gen_cap};

/// The directories in which the kernel exposes its devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Roots {
    /// The devices: `/sys/bus/dsa/devices`.
    pub sysfs: PathBuf,
    /// The character devices: `/dev/dsa`.
    pub dev: PathBuf,
}

impl Default for Roots {
    fn default() -> Self {
        Self { sysfs: "/sys/bus/dsa/devices".into(), dev: "/dev/dsa".into() }
    }
}

impl Roots {
    /// Returns the directories in DPDK's environment variables `DSA_SYSFS_PATH` and `DSA_DEV_PATH`; the kernel's by
    /// default.
    pub fn from_env() -> Self {
        let default = Self::default();
        Self {
            sysfs: std::env::var_os("DSA_SYSFS_PATH").map_or(default.sysfs, PathBuf::from),
            dev: std::env::var_os("DSA_DEV_PATH").map_or(default.dev, PathBuf::from),
        }
    }

    /// Returns the path of a work queue's device file.
    pub fn device_node(&self, wq: &str) -> PathBuf {
        self.dev.join(wq)
    }

    /// Returns the kernel's directories in a tree that begins at `root`.
    pub fn under(root: &Path) -> Self {
        Self { sysfs: root.join("sys/bus/dsa/devices"), dev: root.join("dev/dsa") }
    }

    /// Returns the directory of the drivers: `/sys/bus/dsa/drivers`.
    pub fn drivers(&self) -> PathBuf {
        self.sysfs.parent().unwrap_or(Path::new("")).join("drivers")
    }

    /// Returns the directory of a part of a device, such as `wq0.1`: inside the device's directory, or next to it as on
    /// the bus.
    pub fn part(&self, device: &str, part: &str) -> PathBuf {
        let inside = self.sysfs.join(device).join(part);
        if inside.is_dir() { inside } else { self.sysfs.join(part) }
    }
}

/// A device as the kernel reports it.
#[derive(Clone, Debug)]
pub struct SysfsDevice {
    pub config: DeviceConfig,
    /// The limits of its layout.
    pub capabilities: DeviceCapabilities,
    pub path: PathBuf,
    /// `enabled`, `disabled`, `halted`, …
    pub state: String,
    pub clients: Option<u32>,
    /// The result of the last administrative command; see [`super::status`].
    pub cmd_status: Option<u32>,
    /// SWERROR, as four words.
    pub errors: Option<String>,
    /// The device's NUMA node, if it has one.
    pub numa_node: Option<u32>,
    /// Whether the layout can be changed.
    pub configurable: bool,
    pub driver: Option<String>,
    /// The states of its work queues, in the layout's order.
    pub wqs: Vec<WqState>,
}

/// The state of a work queue, in addition to its layout.
#[derive(Clone, Debug)]
pub struct WqState {
    pub path: PathBuf,
    /// `enabled`, `disabled`, `locked`.
    pub state: String,
    /// Number of programs or kernel clients that use it.
    pub clients: Option<u32>,
    /// Descriptors in it now, if the device reports them.
    pub occupancy: Option<u32>,
    /// Retries of the kernel's own ENQCMDS.
    pub enqcmds_retries: Option<u32>,
    pub driver: Option<String>,
    /// Whether the attribute `driver_name` exists (Linux 6.7 and later).
    pub has_driver_name: bool,
    pub node: Option<PathBuf>,
    /// The programs that have it open, if the kernel reports them (Linux 6.4).
    pub files: Vec<OpenFile>,
}

/// An open file of a work queue's character device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OpenFile {
    pub pid: Option<u32>,
    /// Page faults on completion records that the kernel resolved for this program.
    pub cr_faults: u64,
    /// Page faults on completion records that could not be resolved: bad addresses in descriptors.
    pub cr_fault_failures: u64,
}

/// Returns the DSA devices under the roots, by number; an empty list on a system without a DSA bus.
///
/// # Errors
/// The system's error of reading the directory. A missing directory is not an error.
pub fn devices(roots: &Roots) -> io::Result<Vec<SysfsDevice>> {
    let entries = match fs::read_dir(&roots.sysfs) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other?,
    };
    let mut names: Vec<(u32, String)> = Vec::new();
    for entry in entries {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if let Some(number) = name.strip_prefix("dsa").and_then(|digits| digits.parse().ok()) {
            names.push((number, name));
        }
    }
    names.sort();
    Ok(names.into_iter().map(|(_, name)| device(roots, &name)).collect())
}

/// Returns the device of this name.
///
/// # Errors
/// [`ConfigError::NoDevice`] lists the existing devices.
pub fn find(roots: &Roots, name: &str) -> Result<SysfsDevice, ConfigError> {
    let all = devices(roots).map_err(|error| ConfigError::File { path: roots.sysfs.clone(), error })?;
    let names: Vec<&str> = all.iter().map(|device| device.config.name.as_str()).collect();
    let found = if names.is_empty() { "none".into() } else { names.join(", ") };
    all.iter().find(|device| device.config.name == name).cloned().ok_or_else(|| ConfigError::NoDevice {
        device: name.into(),
        root: roots.sysfs.clone(),
        found,
    })
}

/// Returns an attribute's text without the newline; `None` if it does not exist or cannot be read.
pub(crate) fn read(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

fn number<T: FromStr>(dir: &Path, name: &str) -> Option<T> {
    read(&dir.join(name))?.parse().ok()
}

fn hex(dir: &Path, name: &str) -> Option<u64> {
    let text = read(&dir.join(name))?;
    u64::from_str_radix(text.trim_start_matches("0x"), 16).ok()
}

fn flag(dir: &Path, name: &str) -> bool {
    number::<u32>(dir, name) == Some(1)
}

/// Reads an attribute under its present name, or under its name before Linux 5.17.
fn buffers<T: FromStr>(dir: &Path, name: &str) -> Option<T> {
    number(dir, name).or_else(|| number(dir, &name.replace("read_buffer", "token")))
}

fn driver(dir: &Path) -> Option<String> {
    let link = fs::read_link(dir.join("driver")).ok()?;
    Some(link.file_name()?.to_string_lossy().into_owned())
}

fn device(roots: &Roots, name: &str) -> SysfsDevice {
    let path = roots.sysfs.join(name);
    let device = super::device_number(name).unwrap_or(0);
    let part = |kind: &str, index: usize| roots.part(name, &format!("{kind}{device}.{index}"));
    let count = |attribute: &str| number::<usize>(&path, attribute).unwrap_or(0).min(256);
    let (groups, wqs, engines) = (count("max_groups"), count("max_work_queues"), count("max_engines"));
    let group_dirs: Vec<PathBuf> = (0..groups).map(|group| part("group", group)).collect();
    let wq_dirs: Vec<PathBuf> = (0..wqs).map(|wq| part("wq", wq)).collect();
    let first_group = group_dirs.first().map_or(Path::new(""), |dir| dir);
    let first_wq = wq_dirs.first().map_or(Path::new(""), |dir| dir);
    let pasid = flag(&path, "pasid_enabled");
    let gen_cap = hex(&path, "gen_cap").unwrap_or(0);
    let capabilities = DeviceCapabilities {
        version: hex(&path, "version").unwrap_or(0) as u32,
        gen_cap,
        ops: op_cap(&path),
        groups,
        wqs,
        engines,
        total_wq_size: number(&path, "max_work_queues_size").unwrap_or(0),
        read_buffers: buffers(&path, "max_read_buffers").unwrap_or(0),
        max_batch_size: number(&path, "max_batch_size").unwrap_or(1),
        max_transfer_size: number(&path, "max_transfer_size").unwrap_or(0),
        pasid,
        // The driver enables page requests together with SVA, and reports only whether both are enabled.
        page_requests: pasid && gen_cap & gen_cap::BLOCK_ON_FAULT != 0,
        event_log: path.join("event_log_size").exists(),
        wq_ats_control: first_wq.join("ats_disable").exists(),
        wq_prs_control: first_wq.join("prs_disable").exists(),
        wq_op_config: first_wq.join("op_config").exists(),
        read_buffer_limit: ["read_buffer_limit", "token_limit"].iter().any(|name| path.join(name).exists()),
        progress_limits: first_group.join("desc_progress_limit").exists(),
    };
    let config = DeviceConfig {
        name: name.into(),
        read_buffer_limit: buffers(&path, "read_buffer_limit").unwrap_or(0),
        event_log_size: number(&path, "event_log_size"),
        groups: group_dirs.iter().map(|dir| group(dir)).collect(),
        wqs: wq_dirs.iter().map(|dir| wq(dir)).collect(),
        engines: (0..engines).map(|engine| number(&part("engine", engine), "group_id")).collect(),
    };
    SysfsDevice {
        wqs: wq_dirs
            .into_iter()
            .enumerate()
            .map(|(wq, dir)| wq_state(roots, &config.wq_name(wq), dir))
            .collect(),
        config,
        capabilities,
        state: read(&path.join("state")).unwrap_or_else(|| "unknown".into()),
        clients: number(&path, "clients"),
        cmd_status: hex(&path, "cmd_status").map(|status| status as u32),
        errors: read(&path.join("errors")),
        numa_node: number(&path, "numa_node"),
        configurable: flag(&path, "configurable"),
        driver: driver(&path),
        path,
    }
}

/// Returns the device's operations. The kernel prints 4 words of 64 bits, later kernels a bitmap; both start with the
/// highest word.
fn op_cap(path: &Path) -> OpSet {
    read(&path.join("op_cap")).and_then(|text| json::op_set(&text)).unwrap_or_default()
}

fn group(dir: &Path) -> Group {
    Group {
        traffic_class_a: number(dir, "traffic_class_a"),
        traffic_class_b: number(dir, "traffic_class_b"),
        read_buffers_reserved: buffers(dir, "read_buffers_reserved").unwrap_or(0),
        read_buffers_allowed: buffers(dir, "read_buffers_allowed").filter(|allowed: &u32| *allowed > 0),
        use_read_buffer_limit: buffers::<u32>(dir, "use_read_buffer_limit") == Some(1),
        desc_progress_limit: number(dir, "desc_progress_limit").unwrap_or(0),
        batch_progress_limit: number(dir, "batch_progress_limit").unwrap_or(0),
    }
}

fn wq(dir: &Path) -> WqConfig {
    let text = |name: &str| read(&dir.join(name)).unwrap_or_default();
    WqConfig {
        mode: if text("mode") == "shared" { WqMode::Shared } else { WqMode::Dedicated },
        size: number(dir, "size").unwrap_or(0),
        threshold: number(dir, "threshold").unwrap_or(0),
        group: number(dir, "group_id"),
        priority: number(dir, "priority").unwrap_or(0),
        block_on_fault: flag(dir, "block_on_fault"),
        max_batch_size: number(dir, "max_batch_size").unwrap_or(1),
        max_transfer_size: number(dir, "max_transfer_size").unwrap_or(0),
        kind: match text("type").as_str() {
            "user" => WqType::User,
            "kernel" => WqType::Kernel,
            _ => WqType::None,
        },
        label: text("name"),
        driver_name: text("driver_name"),
        ats_disable: flag(dir, "ats_disable"),
        prs_disable: flag(dir, "prs_disable"),
        op_config: read(&dir.join("op_config")).and_then(|text| json::op_set(&text)),
    }
}

fn wq_state(roots: &Roots, name: &str, path: PathBuf) -> WqState {
    let node = roots.dev.join(name);
    WqState {
        state: read(&path.join("state")).unwrap_or_else(|| "unknown".into()),
        clients: number(&path, "clients"),
        occupancy: number(&path, "occupancy"),
        enqcmds_retries: number(&path, "enqcmds_retries"),
        driver: driver(&path),
        has_driver_name: path.join("driver_name").exists(),
        node: node.exists().then_some(node),
        files: open_files(&path),
        path,
    }
}

/// Reads the entries `dsa!wq0.1/file0` and so on.
fn open_files(wq: &Path) -> Vec<OpenFile> {
    let device = names(wq).into_iter().find(|name| name.contains("!wq"));
    let Some(device) = device.map(|name| wq.join(name)) else { return Vec::new() };
    let files = names(&device).into_iter().filter(|name| name.starts_with("file"));
    let open = files.map(|file| device.join(file)).map(|file| OpenFile {
        pid: number(&file, "pid"),
        cr_faults: number(&file, "cr_faults").unwrap_or(0),
        cr_fault_failures: number(&file, "cr_fault_failures").unwrap_or(0),
    });
    open.collect()
}

/// Returns the names in a directory, sorted; an empty list if it does not exist.
pub(crate) fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// Access to the attributes that applying a layout reads and writes: the file system, or a model of the kernel in
/// tests.
pub trait Attributes {
    /// Returns an attribute's text; `None` if the attribute does not exist.
    fn read(&self, path: &Path) -> Option<String>;

    /// Writes an attribute.
    ///
    /// # Errors
    /// The error that the kernel's driver returns.
    fn write(&mut self, path: &Path, value: &dyn Display) -> io::Result<()>;
}

/// The kernel's sysfs.
#[derive(Clone, Copy, Debug, Default)]
pub struct FileSystem;

impl Attributes for FileSystem {
    fn read(&self, path: &Path) -> Option<String> {
        read(path)
    }

    fn write(&mut self, path: &Path, value: &dyn Display) -> io::Result<()> {
        // Attributes are never created: this kernel does not support a missing attribute.
        let mut file = fs::OpenOptions::new().write(true).open(path)?;
        io::Write::write_all(&mut file, value.to_string().as_bytes())
    }
}

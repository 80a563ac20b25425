//! The built-in layouts: accel-config's profiles, the layouts of the guides, and the one-line form.

use std::path::Path;

use super::{ConfigError, DeviceCapabilities, DeviceConfig, Group, WqConfig, WqType, json};
use crate::wq::WqMode;

/// The names that [`profile`] accepts: accel-config's profiles, then the guides' layouts.
pub const BUILT_IN: [&str; 9] =
    ["os", "app", "net", "storage", "user_default", "vhost", "vpp", "mtcp", "dpdk"];

/// Returns the layout of this name for a device of the first generation, or the first device of an accel-config JSON
/// file.
///
/// # Errors
/// [`ConfigError::UnknownName`] if the name is neither a layout nor a file, and the errors of reading the file.
pub fn profile(name: &str) -> Result<DeviceConfig, ConfigError> {
    if let Some(config) = built_in(name, &DeviceCapabilities::spr()) {
        return Ok(config);
    }
    let path = Path::new(name);
    if !name.contains(['/', '.']) && !path.exists() {
        return Err(ConfigError::UnknownName { found: name.into() });
    }
    let mut loaded = json::load(path)?;
    if loaded.devices.is_empty() {
        let problem = "no DSA device: expected an object with \"dev\": \"dsa0\"".into();
        return Err(ConfigError::Json { place: name.into(), problem });
    }
    Ok(loaded.devices.swap_remove(0))
}

/// Returns the layout of this name for a device with these capabilities; `None` for an unknown name.
pub fn built_in(name: &str, device: &DeviceCapabilities) -> Option<DeviceConfig> {
    let layout = Layout::new(device);
    Some(match name {
        "os" => layout.os(),
        "app" => layout.app(),
        "net" => layout.net(),
        "storage" => layout.storage(),
        "user_default" => layout.user_default(),
        "vhost" => layout.vhost(),
        "vpp" => layout.vpp(),
        "mtcp" => layout.mtcp(),
        "dpdk" => layout.dpdk(),
        _ => return None,
    })
}

/// `-d dsa0 -w 1 -m d -e 4`: the options of setup_dsa.sh in dsa-perf-micros and the mTCP guide.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OneLine {
    pub device: String,
    pub wqs: usize,
    pub mode: WqMode,
    /// `-e`: number of DSA engines.
    pub engines: usize,
}

/// Returns a layout of one group with `engines` DSA engines and `wqs` queues that share the queue space equally.
///
/// # Errors
/// [`ConfigError::OneLine`] if the device has fewer queues or engines.
pub fn one_line(line: &OneLine, device: &DeviceCapabilities) -> Result<DeviceConfig, ConfigError> {
    for (flag, found, most) in [("-w", line.wqs, device.wqs), ("-e", line.engines, device.engines)] {
        if !(1..=most).contains(&found) {
            let device = &line.device;
            return Err(ConfigError::OneLine(format!("{flag} {found}: {device} allows 1 to {most}")));
        }
    }
    let mut layout = Layout::new(device);
    layout.config.name.clone_from(&line.device);
    let size = device.total_wq_size / line.wqs as u32;
    for _ in 0..line.wqs {
        // setup_dsa.sh leaves the device's maximum sizes.
        let wq = WqConfig {
            mode: line.mode,
            threshold: threshold(line.mode, size),
            max_batch_size: device.max_batch_size,
            max_transfer_size: device.max_transfer_size,
            ..user(size)
        };
        layout.add(0, "dsa_user", wq);
    }
    Ok(layout.engines(0, line.engines))
}

/// A layout under construction.
struct Layout<'a> {
    device: &'a DeviceCapabilities,
    config: DeviceConfig,
}

/// Returns a dedicated user queue.
fn user(size: u32) -> WqConfig {
    WqConfig { size, ..WqConfig::default() }
}

/// Returns the threshold: a shared queue keeps one entry for the kernel if it can.
fn threshold(mode: WqMode, size: u32) -> u32 {
    match mode {
        WqMode::Dedicated => 0,
        WqMode::Shared => size.saturating_sub(1).max(1),
    }
}

impl<'a> Layout<'a> {
    fn new(device: &'a DeviceCapabilities) -> Self {
        // A device without queues, or with unreadable counts, still gets one queue, so that `check` reports it.
        let config = DeviceConfig {
            name: "dsa0".into(),
            groups: vec![Group::default(); device.groups],
            wqs: vec![WqConfig::default(); device.wqs.max(1)],
            engines: vec![None; device.engines],
            ..DeviceConfig::default()
        };
        Self { device, config }
    }

    /// Adds the first unused queue of the device to a group. If none is left, `check` reports the missing queue.
    fn add(&mut self, group: usize, label: &str, wq: WqConfig) {
        if let Some(free) = self.config.wqs.iter_mut().find(|wq| wq.size == 0) {
            *free = WqConfig { group: Some(group), label: label.into(), ..wq };
        }
    }

    /// Adds the first `count` unused engines to a group, and returns the complete layout.
    fn engines(mut self, group: usize, count: usize) -> DeviceConfig {
        self.take(group, count);
        self.config
    }

    fn take(&mut self, group: usize, count: usize) {
        let free = self.config.engines.iter_mut().filter(|engine| engine.is_none());
        free.take(count).for_each(|engine| *engine = Some(group));
    }

    /// Page zeroing and compaction in the kernel.
    fn os(mut self) -> DeviceConfig {
        let wq = WqConfig {
            mode: WqMode::Shared,
            threshold: 15,
            kind: WqType::Kernel,
            driver_name: "dmaengine".into(),
            ..user(16)
        };
        self.add(0, "dmaengine", wq);
        self.engines(0, 1)
    }

    /// A shared queue for small copies and a shared queue for large copies, each with a DSA engine.
    fn app(mut self) -> DeviceConfig {
        let shared = |size, threshold, max_transfer_size| WqConfig {
            mode: WqMode::Shared,
            threshold,
            max_transfer_size,
            ..user(size)
        };
        self.add(0, "app1", shared(8, 6, 16 << 10));
        self.add(1, "app2", shared(32, 28, 2 << 20));
        for group in [0, 1] {
            self.take(group, 1);
            if let Some(group) = self.config.groups.get_mut(group) {
                group.read_buffers_allowed = Some(8);
            }
        }
        self.config
    }

    /// Four queues, each with its own DSA engine.
    fn net(mut self) -> DeviceConfig {
        for group in 0..4 {
            let wq = WqConfig { max_batch_size: 1024, max_transfer_size: 16 << 10, ..user(32) };
            self.add(group, &format!("app{}", group + 1), wq);
            self.take(group, 1);
        }
        self.config
    }

    /// A queue for low latency and a queue for high throughput, each with a DSA engine.
    fn storage(mut self) -> DeviceConfig {
        self.add(0, "app1", WqConfig { max_transfer_size: 16 << 10, ..user(32) });
        self.add(1, "app2", user(32));
        self.take(0, 1);
        self.engines(1, 1)
    }

    /// Every queue and every engine in one group, shared. The profile asks for block on fault and for PRS off. If the
    /// device can turn PRS off, PRS is turned off and block on fault is not set, as Linux does.
    fn user_default(mut self) -> DeviceConfig {
        let wqs = self.device.wqs.max(1);
        let size = self.device.total_wq_size / wqs as u32;
        let prs_disable = self.device.wq_prs_control && self.device.event_log;
        for _ in 0..wqs {
            let wq = WqConfig {
                mode: WqMode::Shared,
                threshold: size,
                priority: 1,
                block_on_fault: !prs_disable,
                prs_disable,
                max_transfer_size: self.device.max_transfer_size,
                max_batch_size: self.device.max_batch_size,
                ..user(size)
            };
            self.add(0, "user_default_wq", wq);
        }
        let engines = self.device.engines;
        self.engines(0, engines)
    }

    /// The layout of the vhost guide: two queues of 64 descriptors for the two directions, and all four engines.
    fn vhost(mut self) -> DeviceConfig {
        for direction in 0..2 {
            let wq = WqConfig { max_batch_size: self.device.max_batch_size, ..user(64) };
            self.add(0, &format!("dpdk_wq0.{direction}"), wq);
        }
        self.engines(0, 4)
    }

    /// The layout of the VPP host stack guide: one queue and one engine per process, address translation by ATS.
    fn vpp(mut self) -> DeviceConfig {
        let wq = WqConfig { ats_disable: false, ..self.whole() };
        self.add(0, "vpp_wq0.0", wq);
        self.engines(0, 1)
    }

    /// The layout of the mTCP guide: `setup_dsa.sh -d dsa0 -w 1 -m d -e 4`.
    fn mtcp(mut self) -> DeviceConfig {
        let wq = self.whole();
        self.add(0, "mtcp_wq0.0", wq);
        self.engines(0, 4)
    }

    /// The layout of dpdk_idxd_cfg.py: all queues, spread over one group per engine, with priority 1.
    fn dpdk(mut self) -> DeviceConfig {
        let groups = self.device.engines.min(self.device.groups);
        let wqs = self.device.wqs.max(1);
        let size = self.device.total_wq_size / wqs as u32;
        for number in 0..wqs {
            let wq = WqConfig { priority: 1, max_batch_size: self.device.max_batch_size, ..user(size) };
            self.add(number % groups.max(1), &format!("dpdk_wq0.{number}"), wq);
        }
        (0..groups).for_each(|group| self.take(group, 1));
        self.config
    }

    /// A queue with the device's maximum sizes.
    fn whole(&self) -> WqConfig {
        WqConfig {
            max_batch_size: self.device.max_batch_size,
            max_transfer_size: self.device.max_transfer_size,
            ..user(self.device.total_wq_size)
        }
    }
}

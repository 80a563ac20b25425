//! Application of a layout: the device is disabled, configured and enabled, and every step is read back. If a step
//! fails, the earlier layout is restored.
//!
//! The order follows the kernel's checks: it checks a group's read buffers against the device's limit, a queue's size
//! against the space that other queues have claimed, and a queue's threshold against its size and mode. A change of the
//! type clears the queue's name.

use std::fmt::Display;
use std::io;
use std::path::{Path, PathBuf};

use super::status;
use super::sysfs::{Attributes, Roots, SysfsDevice};
use super::{DeviceConfig, Group, WqConfig, WqType, json};
use crate::Opcode;
use crate::wq::{OpSet, WqMode};

/// The result of applying a layout.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// Number of attributes written. Attributes that already had the right value are not written.
    pub writes: usize,
    /// The settings that were left out and the reasons, in words.
    pub notes: Vec<String>,
}

/// Why a layout was not applied.
#[derive(Debug, displaydoc::Display, thiserror::Error)]
pub enum ApplyError {
    /// {device}: its layout cannot be changed ('configurable' is 0): use the work queues that it has
    Fixed { device: String },
    /// {place}: {clients} clients use it: stop them first, or take it away from them with --force
    Busy { place: String, clients: u32 },
    // The failed step with its reason, and the present state of the device.
    /// {step}. {after}
    Step { step: String, after: String },
}

/// Applies a layout to a device. The layout must have passed [`super::check`].
///
/// # Errors
/// [`ApplyError::Fixed`] and [`ApplyError::Busy`] before anything is changed. [`ApplyError::Step`] names the attribute,
/// says whether the earlier layout is restored, and describes the device's state if it is not.
pub fn apply(
    config: &DeviceConfig,
    device: &SysfsDevice,
    roots: &Roots,
    force: bool,
    attributes: &mut dyn Attributes,
) -> Result<Applied, ApplyError> {
    let name = &device.config.name;
    if !device.configurable {
        return Err(ApplyError::Fixed { device: name.clone() });
    }
    check_clients(device, force)?;
    let mut work = Work { roots, device, attributes, done: Applied::default() };
    match work.all(config) {
        Ok(()) => Ok(work.done),
        Err(step) => Err(ApplyError::Step { step, after: work.back() }),
    }
}

/// Disables the device's work queues and the device.
///
/// # Errors
/// As [`apply`], but the earlier layout is not restored.
pub fn disable(
    device: &SysfsDevice,
    roots: &Roots,
    force: bool,
    attributes: &mut dyn Attributes,
) -> Result<Applied, ApplyError> {
    check_clients(device, force)?;
    let mut work = Work { roots, device, attributes, done: Applied::default() };
    let name = &device.config.name;
    work.disable()
        .map_err(|step| ApplyError::Step { step, after: format!("{name} may be in part enabled.") })?;
    Ok(work.done)
}

fn check_clients(device: &SysfsDevice, force: bool) -> Result<(), ApplyError> {
    let clients = device.wqs.iter().map(|wq| wq.clients.unwrap_or(0)).enumerate();
    match clients.filter(|_| !force).find(|(_, clients)| *clients > 0) {
        Some((wq, clients)) => Err(ApplyError::Busy { place: device.config.wq_name(wq), clients }),
        None => Ok(()),
    }
}

/// The result of a step; the error describes the failure in words.
type Step<T> = Result<T, String>;

struct Work<'a> {
    roots: &'a Roots,
    device: &'a SysfsDevice,
    attributes: &'a mut dyn Attributes,
    done: Applied,
}

impl Work<'_> {
    fn all(&mut self, config: &DeviceConfig) -> Step<()> {
        self.lay_out(config)?;
        if config.used_wqs().next().is_some() {
            self.enable(config, |_| true)?;
        }
        Ok(())
    }

    /// Disables the device and writes the layout. The device stays disabled.
    fn lay_out(&mut self, config: &DeviceConfig) -> Step<()> {
        self.disable()?;
        self.clear()?;
        self.device_settings(config)?;
        for number in 0..self.device.config.groups.len() {
            self.group(config, number, &config.groups.get(number).cloned().unwrap_or_default())?;
        }
        for (number, group) in config.engines.iter().enumerate() {
            if let Some(group) = group {
                let dir = self.part(&self.device.config.engine_name(number));
                self.set(&dir.join("group_id"), group)?;
            }
        }
        for (number, wq) in config.used_wqs() {
            self.wq(number, wq)?;
        }
        Ok(())
    }

    /// Restores the earlier layout, enables the earlier queues again, and describes the result.
    fn back(&mut self) -> String {
        let device = self.device;
        let name = &device.config.name;
        let done = self.lay_out(&device.config).and_then(|()| match device.state.as_str() {
            "enabled" => self.enable(&device.config, |wq| device.wqs[wq].state == "enabled"),
            _ => Ok(()),
        });
        let state = self.attributes.read(&device.path.join("state"));
        let state = state.unwrap_or_else(|| "in a state that cannot be read".into());
        match done {
            Ok(()) => format!("{name} has its earlier layout again: it is {state}, and was {}", device.state),
            Err(step) => format!(
                "{name} is {state}, and its layout may be in part the new one: putting the earlier one back failed, \
                 too ({step})"
            ),
        }
    }

    fn part(&self, part: &str) -> PathBuf {
        self.roots.part(&self.device.config.name, part)
    }

    fn disable(&mut self) -> Step<()> {
        for (number, wq) in self.device.wqs.iter().enumerate() {
            let name = self.device.config.wq_name(number);
            let state = wq.path.join("state");
            if self.attributes.read(&state).is_some_and(|state| state != "disabled") {
                let driver = match self.device.config.wqs[number].kind {
                    _ if wq.driver.is_some() => wq.driver.as_deref().unwrap_or_default(),
                    WqType::Kernel => "dmaengine",
                    _ => "user",
                };
                self.bind(driver, "unbind", &name)?;
                self.expect(&state, "disabled", &name)?;
            }
        }
        let state = self.device.path.join("state");
        if self.attributes.read(&state).is_some_and(|state| state != "disabled") {
            let name = &self.device.config.name;
            self.bind("idxd", "unbind", name)?;
            self.expect(&state, "disabled", name)?;
        }
        Ok(())
    }

    /// Releases read buffers and queue space, and removes queues and engines from their groups. Disabling a device does
    /// so as well, but not if it is disabled already.
    fn clear(&mut self) -> Step<()> {
        let device = self.device;
        let limit = self.buffers(&device.path, "read_buffer_limit", false);
        let limited = limit.and_then(|path| self.attributes.read(&path)).is_some_and(|limit| limit != "0");
        for group in 0..device.config.groups.len() {
            let dir = self.part(&device.config.group_name(group));
            // The kernel refuses to write `use_read_buffer_limit`, even 0, while the device has no limit.
            for (name, there) in [("read_buffers_reserved", true), ("use_read_buffer_limit", limited)] {
                if let Some(path) = self.buffers(&dir, name, false).filter(|_| there) {
                    self.set(&path, &0)?;
                }
            }
        }
        for wq in &self.device.wqs {
            for (attribute, none) in [("group_id", "-1"), ("size", "0")] {
                self.set(&wq.path.join(attribute), &none)?;
            }
        }
        for engine in 0..self.device.config.engines.len() {
            let dir = self.part(&self.device.config.engine_name(engine));
            self.set(&dir.join("group_id"), &-1)?;
        }
        Ok(())
    }

    fn device_settings(&mut self, config: &DeviceConfig) -> Step<()> {
        let dir = self.device.path.clone();
        if let Some(limit) = self.buffers(&dir, "read_buffer_limit", config.read_buffer_limit > 0) {
            self.set(&limit, &config.read_buffer_limit)?;
        }
        match config.event_log_size {
            Some(size) => self.set_or_note(&dir.join("event_log_size"), &size),
            None => Ok(()),
        }
    }

    /// Returns the path of a read buffer attribute, under the name that this kernel uses.
    fn buffers(&mut self, dir: &Path, name: &str, wanted: bool) -> Option<PathBuf> {
        let names = [name.to_owned(), name.replace("read_buffer", "token")];
        let found = names.iter().map(|name| dir.join(name)).find(|path| self.attributes.read(path).is_some());
        if found.is_none() && wanted {
            self.missing(&dir.join(name));
        }
        found
    }

    fn missing(&mut self, path: &Path) {
        let note = format!("{}: left out, this kernel or device does not have it", short(path));
        self.done.notes.push(note);
    }

    fn group(&mut self, config: &DeviceConfig, number: usize, group: &Group) -> Step<()> {
        let dir = self.part(&self.device.config.group_name(number));
        let reserved = group.read_buffers_reserved;
        if let Some(path) = self.buffers(&dir, "read_buffers_reserved", reserved > 0) {
            self.set(&path, &reserved)?;
        }
        // The kernel refuses to write this attribute, even 0, while the device has no limit.
        if config.read_buffer_limit > 0 || group.use_read_buffer_limit {
            let path = self.buffers(&dir, "use_read_buffer_limit", group.use_read_buffer_limit);
            if let Some(path) = path {
                self.set(&path, &u8::from(group.use_read_buffer_limit))?;
            }
        }
        if let Some(allowed) = group.read_buffers_allowed.or_else(|| self.most_read_buffers(config, group)) {
            let path = self.buffers(&dir, "read_buffers_allowed", group.read_buffers_allowed.is_some());
            if let Some(path) = path {
                self.set(&path, &allowed)?;
            }
        }
        for (name, class) in
            [("traffic_class_a", group.traffic_class_a), ("traffic_class_b", group.traffic_class_b)]
        {
            if let Some(class) = class {
                self.traffic_class(&dir.join(name), class)?;
            }
        }
        for (name, limit) in [
            ("desc_progress_limit", group.desc_progress_limit),
            ("batch_progress_limit", group.batch_progress_limit),
        ] {
            let path = dir.join(name);
            if limit > 0 || self.attributes.read(&path).is_some() {
                self.set_or_note(&path, &limit)?;
            }
        }
        Ok(())
    }

    /// Returns the read buffers that a group reserves plus the unreserved ones; `None` if the device reports no number.
    fn most_read_buffers(&self, config: &DeviceConfig, group: &Group) -> Option<u32> {
        let total = Some(self.device.capabilities.read_buffers).filter(|total| *total > 0)?;
        let reserved = config.groups.iter().map(|group| group.read_buffers_reserved);
        let free = reserved.fold(total, u32::saturating_sub);
        Some(free.saturating_add(group.read_buffers_reserved))
    }

    /// Sets a traffic class if it differs. If the kernel does not allow it, a note says why, and the old value stays.
    fn traffic_class(&mut self, path: &Path, class: u32) -> Step<()> {
        let found = self.attributes.read(path);
        if found.as_deref() == Some(&class.to_string()) {
            return Ok(());
        }
        match self.attributes.write(path, &class) {
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => {
                self.done.notes.push(format!(
                    "{}: stays {}, {class} was not written: the kernel does not let traffic classes be changed on \
                     devices up to version 2 unless idxd is loaded with tc_override=1 (modprobe idxd tc_override=1)",
                    short(path),
                    found.unwrap_or_else(|| "as it is".into()),
                ));
                Ok(())
            }
            other => self.written(path, &class, other),
        }
    }

    fn wq(&mut self, number: usize, wq: &WqConfig) -> Step<()> {
        let dir = self.part(&self.device.config.wq_name(number));
        let at = |name: &str| dir.join(name);
        if let Some(group) = wq.group {
            self.set(&at("group_id"), &group)?;
        }
        self.set(&at("mode"), &wq.mode)?;
        self.set(&at("size"), &wq.size)?;
        self.set(&at("priority"), &wq.priority)?;
        // A queue of an earlier layout that was never enabled may have no threshold, name or driver. These cannot be
        // written: the kernel refuses a threshold of 0, and an empty text is not written at all.
        if wq.mode == WqMode::Shared && wq.threshold > 0 {
            self.set(&at("threshold"), &wq.threshold)?;
        }
        self.set(&at("type"), &wq.kind.name())?;
        if !wq.label.is_empty() {
            self.set(&at("name"), &wq.label)?;
        }
        // Linux before 6.7 has no driver_name and needs none.
        if !wq.driver_name.is_empty() && self.attributes.read(&at("driver_name")).is_some() {
            self.set(&at("driver_name"), &wq.driver_name)?;
        }
        self.set(&at("max_transfer_size"), &wq.max_transfer_size)?;
        self.set_or_note(&at("max_batch_size"), &wq.max_batch_size)?;
        // Turning PRS off also turns block on fault off, so PRS is written last.
        for (name, on) in [
            ("ats_disable", wq.ats_disable),
            ("block_on_fault", wq.block_on_fault),
            ("prs_disable", wq.prs_disable),
        ] {
            let path = at(name);
            if on || self.attributes.read(&path).is_some() {
                self.set_or_note(&path, &u8::from(on))?;
            }
        }
        self.operations(&at("op_config"), wq.op_config)
    }

    /// Sets the operations that a queue allows; all of the device's if `said` is `None`.
    fn operations(&mut self, path: &Path, said: Option<OpSet>) -> Step<()> {
        let Some(now) = self.attributes.read(path) else {
            if said.is_some() {
                self.missing(path);
            }
            return Ok(());
        };
        let told = self.device.capabilities.ops;
        let Some(wanted) = said.or_else(|| (told != OpSet::default()).then_some(told)) else {
            return Ok(());
        };
        // Some kernels hide Batch in this attribute and in op_cap, but accept it. All reported operations then include
        // Batch.
        let batch_told = told.contains(Opcode::Batch);
        let shown = |ops: OpSet| if batch_told { ops } else { ops.without(Opcode::Batch) };
        if json::op_set(&now) == Some(shown(wanted)) {
            return Ok(());
        }
        let value = json::op_text(&if wanted == told { wanted.with(Opcode::Batch) } else { wanted });
        let result = self.attributes.write(path, &value);
        self.wrote(path, &value, result)?;
        let found = self.attributes.read(path);
        let same = |found: &String| json::op_set(found) == Some(shown(wanted));
        if found.as_ref().is_some_and(same) { Ok(()) } else { Err(misread(path, &value, found)) }
    }

    /// Enables the device, and the used queues for which `wanted` returns true.
    fn enable(&mut self, config: &DeviceConfig, wanted: impl Fn(usize) -> bool) -> Step<()> {
        let name = &self.device.config.name;
        self.bind("idxd", "bind", name)?;
        self.expect(&self.device.path.join("state"), "enabled", name)?;
        for (number, wq) in config.used_wqs().filter(|(number, _)| wanted(*number)) {
            let driver = match wq.driver_name.as_str() {
                "" if wq.kind == WqType::Kernel => "dmaengine",
                "" => "user",
                driver => driver,
            };
            let name = self.device.config.wq_name(number);
            self.bind(driver, "bind", &name)?;
            self.expect(&self.part(&name).join("state"), "enabled", &name)?;
        }
        Ok(())
    }

    /// Binds a device or queue to a driver. The device's error is in `cmd_status`.
    fn bind(&mut self, driver: &str, action: &str, name: &str) -> Step<()> {
        let mut path = self.roots.drivers().join(driver).join(action);
        // Linux before 5.15 had one driver for everything.
        if !path.exists() && self.roots.drivers().join("dsa").join(action).exists() {
            path = self.roots.drivers().join("dsa").join(action);
        }
        self.done.writes += 1;
        self.attributes.write(&path, &name).map_err(|error| {
            format!("{name}: {action} by {}: {}{}", path.display(), reason(&error), self.cmd_status())
        })
    }

    /// Returns the error of the device's last command; empty if it succeeded.
    fn cmd_status(&self) -> String {
        let text = self.attributes.read(&self.device.path.join("cmd_status"));
        let number =
            text.and_then(|text| u32::from_str_radix(text.trim_start_matches("0x"), 16).ok()).unwrap_or(0);
        if number == 0 { String::new() } else { format!("; cmd_status {}", status::text(number)) }
    }

    fn expect(&self, state: &Path, wanted: &str, name: &str) -> Step<()> {
        match self.attributes.read(state) {
            Some(found) if found == wanted => Ok(()),
            Some(found) => Err(format!("{name}: its state is {found}, not {wanted}{}", self.cmd_status())),
            None => Err(format!("{name}: its state cannot be read at {}", state.display())),
        }
    }

    /// Writes an attribute if it has another value, and reads it back.
    fn set(&mut self, path: &Path, value: &dyn Display) -> Step<()> {
        if self.attributes.read(path).as_deref() == Some(&value.to_string()) {
            return Ok(());
        }
        let result = self.attributes.write(path, value);
        self.written(path, value, result)
    }

    /// As `set`, for an attribute that some kernels or devices do not have.
    fn set_or_note(&mut self, path: &Path, value: &dyn Display) -> Step<()> {
        match self.attributes.read(path) {
            Some(_) => self.set(path, value),
            None => {
                self.missing(path);
                Ok(())
            }
        }
    }

    /// Checks the result of a write, and that the same value is read back.
    fn written(&mut self, path: &Path, value: &dyn Display, result: io::Result<()>) -> Step<()> {
        self.wrote(path, value, result)?;
        match self.attributes.read(path) {
            Some(found) if found == value.to_string() => Ok(()),
            found => Err(misread(path, value, found)),
        }
    }

    fn wrote(&mut self, path: &Path, value: &dyn Display, result: io::Result<()>) -> Step<()> {
        self.done.writes += 1;
        result.map_err(|error| {
            format!("{}: writing {value}: {}{}", path.display(), reason(&error), self.cmd_status())
        })
    }
}

fn misread(path: &Path, value: &dyn Display, found: Option<String>) -> String {
    let found = found.unwrap_or_else(|| "nothing".into());
    format!("{}: {value} was written, and {found} is read", path.display())
}

/// Returns the last two components of a sysfs path, such as `wq0.1/size`.
fn short(path: &Path) -> String {
    let names: Vec<_> =
        path.components().rev().take(2).map(|part| part.as_os_str().to_string_lossy()).collect();
    names.into_iter().rev().collect::<Vec<_>>().join("/")
}

/// Returns the meaning of a sysfs error.
fn reason(error: &io::Error) -> String {
    let meaning = match error.raw_os_error() {
        Some(libc::EACCES) => "only root may write this",
        Some(libc::EPERM) => "the device or queue is enabled, or the kernel does not allow it here",
        Some(libc::EINVAL) => "out of the range that the device allows",
        Some(libc::EOPNOTSUPP) => "not supported: a user queue needs SVA (boot with intel_iommu=on,sm_on)",
        Some(libc::ENODEV) => "no such device here, or driver_name is not that of the driver",
        Some(libc::ENXIO) => "the device is not enabled, or its checks failed",
        Some(libc::EBUSY) => "it is in use",
        Some(libc::ENOENT) => "it is not there: is the driver loaded (modprobe idxd)?",
        _ => return error.to_string(),
    };
    format!("{error}: {meaning}")
}

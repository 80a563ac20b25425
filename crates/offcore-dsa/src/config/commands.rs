//! A layout as accel-config command lines: the output of `configure --print`, and text for scripts.

use super::{Capabilities, DeviceConfig, Group, WqConfig, json};
use crate::wq::WqMode;

/// Returns the commands in the order in which they must be given, for a disabled device.
pub fn commands(config: &DeviceConfig, device: &Capabilities) -> Vec<String> {
    let name = &config.name;
    let mut lines = Vec::new();
    let mut settings = Vec::new();
    if config.read_buffer_limit > 0 {
        settings.push(format!("--read-buffer-limit={}", config.read_buffer_limit));
    }
    if let Some(size) = config.event_log_size {
        settings.push(format!("--event-log-size={size}"));
    }
    line(&mut lines, format!("accel-config config-device {name}"), &settings);
    for (number, group) in config.groups.iter().enumerate() {
        let command = format!("accel-config config-group {name}/{}", config.group_name(number));
        line(&mut lines, command, &group_settings(group, device));
    }
    for (number, group) in config.engines.iter().enumerate() {
        if let Some(group) = group {
            let engine = config.engine_name(number);
            lines.push(format!("accel-config config-engine {name}/{engine} --group-id={group}"));
        }
    }
    for (number, wq) in config.used_wqs() {
        let command = format!("accel-config config-wq {name}/{}", config.wq_name(number));
        line(&mut lines, command, &wq_settings(wq));
    }
    lines.push(format!("accel-config enable-device {name}"));
    let enable = config.used_wqs();
    lines.extend(
        enable.map(|(number, _)| format!("accel-config enable-wq {name}/{}", config.wq_name(number))),
    );
    lines
}

/// Returns the command that disables a device before it is configured.
pub fn disable(name: &str) -> String {
    format!("accel-config disable-device {name}")
}

fn line(lines: &mut Vec<String>, command: String, settings: &[String]) {
    if !settings.is_empty() {
        lines.push(format!("{command} {}", settings.join(" ")));
    }
}

fn group_settings(group: &Group, device: &Capabilities) -> Vec<String> {
    let mut settings = Vec::new();
    let mut set = |name: &str, value: u32| settings.push(format!("--{name}={value}"));
    if group.use_read_buffer_limit {
        set("use-read-buffer-limit", 1);
    }
    if group.read_buffers_reserved > 0 {
        set("read-buffers-reserved", group.read_buffers_reserved);
    }
    if let Some(allowed) = group.read_buffers_allowed {
        set("read-buffers-allowed", allowed);
    }
    // accel-config refuses to set traffic classes of version 1 devices.
    if device.version >= 0x200 {
        if let Some(class) = group.traffic_class_a {
            set("traffic-class-a", class);
        }
        if let Some(class) = group.traffic_class_b {
            set("traffic-class-b", class);
        }
    }
    if group.desc_progress_limit > 0 {
        set("desc-progress-limit", group.desc_progress_limit);
    }
    if group.batch_progress_limit > 0 {
        set("batch-progress-limit", group.batch_progress_limit);
    }
    settings
}

fn wq_settings(wq: &WqConfig) -> Vec<String> {
    let mut settings = vec![
        format!("--group-id={}", wq.group.map_or("-1".into(), |group| group.to_string())),
        format!("--mode={}", wq.mode),
        format!("--wq-size={}", wq.size),
        format!("--priority={}", wq.priority),
        format!("--type={}", wq.kind.name()),
        format!("--name={}", wq.label),
        format!("--driver-name={}", wq.driver_name),
        format!("--block-on-fault={}", u8::from(wq.block_on_fault)),
        format!("--max-batch-size={}", wq.max_batch_size),
        format!("--max-transfer-size={}", wq.max_transfer_size),
    ];
    if wq.mode == WqMode::Shared {
        settings.push(format!("--threshold={}", wq.threshold));
    }
    for (name, on) in [("ats-disable", wq.ats_disable), ("prs-disable", wq.prs_disable)] {
        if on {
            settings.push(format!("--{name}=1"));
        }
    }
    if let Some(ops) = &wq.op_config {
        settings.push(format!("--op-config={}", json::op_text(ops)));
    }
    settings
}

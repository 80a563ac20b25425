//! A layout as accel-config command lines: the output of `configure --print`, and text for scripts.

use serde_json::Value;

use super::{DeviceCapabilities, DeviceConfig, WqConfig, json};
use crate::wq::WqMode;

/// Returns the commands in the order in which they must be given, for a disabled device.
pub fn commands(config: &DeviceConfig, device: &DeviceCapabilities) -> Vec<String> {
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
    for number in 0..config.groups.len() {
        let command = format!("accel-config config-group {name}/{}", config.group_name(number));
        line(&mut lines, command, &group_settings(config, number, device));
    }
    for (number, group) in config.engines.iter().enumerate() {
        if let Some(group) = group {
            let engine = config.engine_name(number);
            lines.push(format!("accel-config config-engine {name}/{engine} --group-id={group}"));
        }
    }
    for (number, wq) in config.used_wqs() {
        let command = format!("accel-config config-wq {name}/{}", config.wq_name(number));
        line(&mut lines, command, &wq_settings(config, number, wq));
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

/// Returns the options for the settings in an object of accel-config's file that `is_given` selects.
fn settings(object: &Value, is_given: impl Fn(&str, &Value) -> bool) -> Vec<String> {
    let fields = object.as_object().into_iter().flatten();
    let scalars = fields.filter(|(key, value)| *key != "dev" && !value.is_array() && is_given(key, value));
    let option = |(key, value): (&String, &Value)| {
        let name = if key == "size" { "wq-size".into() } else { key.replace('_', "-") };
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        format!("--{name}={}", if value.is_null() { "-1" } else { &text })
    };
    scalars.map(option).collect()
}

fn group_settings(config: &DeviceConfig, number: usize, device: &DeviceCapabilities) -> Vec<String> {
    settings(&json::group_json(config, number), |key, value| match key {
        // accel-config refuses to set traffic classes of version 1 devices.
        "traffic_class_a" | "traffic_class_b" => device.version >= 0x200,
        _ => value != 0,
    })
}

fn wq_settings(config: &DeviceConfig, number: usize, wq: &WqConfig) -> Vec<String> {
    settings(&json::wq_json(config, number, wq), |key, value| match key {
        "threshold" => wq.mode == WqMode::Shared,
        "ats_disable" | "prs_disable" => value == 1,
        _ => true,
    })
}

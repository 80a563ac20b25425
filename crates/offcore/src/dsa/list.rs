//! `offcore dsa list`: devices, groups, work queues and DSA engines.

use std::fmt::Write;

use offcore_dsa::config::json;
use offcore_dsa::config::sysfs::SysfsDevice;
use serde_json::{Value, json};

use crate::args::Format;
use crate::output::table::{columns, or_dash};

pub(super) const EXAMPLES: &str = "\
Examples:
    offcore dsa list
    offcore dsa list dsa0 --format json

A simulated or copied tree (DPDK's DSA_SYSFS_PATH and DSA_DEV_PATH work, too):
    offcore dsa list --sysfs /tmp/sys/bus/dsa/devices --dev /tmp/dev/dsa";

pub(super) fn text(devices: &[SysfsDevice], format: Format) -> anyhow::Result<String> {
    match format {
        Format::Table => Ok(tables(devices)),
        Format::Json => {
            let lines = devices.iter().map(|device| serde_json::to_string(&object(device)));
            Ok(lines.collect::<Result<Vec<_>, _>>()?.join("\n") + "\n")
        }
    }
}

/// Returns accel-config's object, with additional fields for facts that are not settings.
fn object(device: &SysfsDevice) -> Value {
    let caps = &device.capabilities;
    let mut object = json::device_json(&device.config);
    object["version"] = json!(format!("{:#x}", caps.version));
    object["state"] = json!(device.state);
    object["driver"] = json!(device.driver);
    object["numa_node"] = json!(device.numa_node);
    object["clients"] = json!(device.clients);
    object["pasid_enabled"] = json!(u8::from(caps.pasid));
    object["max_groups"] = json!(caps.groups);
    object["max_work_queues"] = json!(caps.wqs);
    object["max_engines"] = json!(caps.engines);
    object["work_queue_size"] = json!(caps.total_wq_size);
    object["max_read_buffers"] = json!(caps.read_buffers);
    object["max_batch_size"] = json!(caps.max_batch_size);
    object["max_transfer_size"] = json!(caps.max_transfer_size);
    object["gen_cap"] = json!(format!("{:#x}", caps.gen_cap));
    object["op_cap"] = json!(format!("{:?}", caps.ops));
    for group in object["groups"].as_array_mut().into_iter().flatten() {
        for wq in group["grouped_workqueues"].as_array_mut().into_iter().flatten() {
            let index =
                (0..device.wqs.len()).find(|wq_number| wq["dev"] == device.config.wq_name(*wq_number));
            let Some(state) = index.map(|index| &device.wqs[index]) else { continue };
            wq["state"] = json!(state.state);
            wq["clients"] = json!(state.clients);
            wq["occupancy"] = json!(state.occupancy);
            wq["driver"] = json!(state.driver);
            wq["node"] = json!(state.node);
        }
    }
    object
}

fn tables(devices: &[SysfsDevice]) -> String {
    let rows = devices.iter().map(|device| {
        let caps = &device.capabilities;
        let claimed: u32 = device.config.wqs.iter().map(|wq| wq.size).sum();
        let engines = device.config.engines.iter().flatten().count();
        [
            device.config.name.clone(),
            device.state.clone(),
            format!("{:#x}", caps.version),
            or_dash(device.driver.as_ref()),
            or_dash(device.numa_node),
            format!("{claimed} of {}", caps.total_wq_size),
            format!("{engines} of {}", caps.engines),
            caps.max_batch_size.to_string(),
            bytes(caps.max_transfer_size),
            if caps.pasid { "on" } else { "off" }.into(),
        ]
    });
    let mut text = columns(
        "<device|<state|<version|<driver|node|queue space|engines|largest batch|transfer|<PASID",
        rows,
    );
    text += &queues(devices);
    text += &groups(devices);
    text
}

fn queues(devices: &[SysfsDevice]) -> String {
    let mut rows = Vec::new();
    for device in devices {
        for (number, wq) in device.config.used_wqs() {
            let state = &device.wqs[number];
            rows.push([
                device.config.wq_name(number),
                state.state.clone(),
                wq.mode.to_string(),
                wq.kind.name().into(),
                wq.size.to_string(),
                if wq.threshold == 0 { "-".into() } else { wq.threshold.to_string() },
                or_dash(wq.group),
                wq.priority.to_string(),
                wq.max_batch_size.to_string(),
                bytes(wq.max_transfer_size),
                if wq.label.is_empty() { "-".into() } else { wq.label.clone() },
                or_dash(state.driver.as_ref()),
                or_dash(state.clients),
            ]);
        }
    }
    match rows.len() {
        0 => "  no work queue has a size: 'offcore dsa configure' sets the sizes\n".into(),
        _ => columns(
            "<queue|<state|<mode|<type|size|threshold|group|priority|batch|transfer|<name|<driver|\
                 clients",
            rows,
        ),
    }
}

fn groups(devices: &[SysfsDevice]) -> String {
    let mut text = String::new();
    for device in devices {
        let config = &device.config;
        for number in 0..config.groups.len() {
            let wqs = config.used_wqs().filter(|(_, wq)| wq.group == Some(number));
            let wqs: Vec<String> = wqs.map(|(wq, _)| config.wq_name(wq)).collect();
            let engines = config.engines.iter().enumerate().filter(|(_, group)| **group == Some(number));
            let engines: Vec<String> = engines.map(|(engine, _)| config.engine_name(engine)).collect();
            if wqs.is_empty() && engines.is_empty() {
                continue;
            }
            let group = &config.groups[number];
            // Writing to a String cannot fail.
            let _ = writeln!(
                text,
                "  {}: {} on {}; traffic classes {} and {}; read buffers {} reserved, {} allowed",
                config.group_name(number),
                if wqs.is_empty() { "no queue".into() } else { wqs.join(", ") },
                if engines.is_empty() { "no engine".into() } else { engines.join(", ") },
                or_dash(group.traffic_class_a),
                or_dash(group.traffic_class_b),
                group.read_buffers_reserved,
                group.read_buffers_allowed.map_or("all".into(), |allowed| allowed.to_string()),
            );
        }
    }
    text
}

/// Formats sizes such as `2 MiB`. The limits are powers of two.
fn bytes(count: u64) -> String {
    match count {
        0..1024 => format!("{count} B"),
        _ if count.is_multiple_of(1 << 30) => format!("{} GiB", count >> 30),
        _ if count.is_multiple_of(1 << 20) => format!("{} MiB", count >> 20),
        _ => format!("{} KiB", count >> 10),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dsa::fixtures::Tree;
    use offcore_dsa::config::sysfs;

    #[test]
    fn device_is_listed_as_table_and_object() {
        let tree = Tree::healthy();
        let devices = sysfs::devices(&tree.roots()).unwrap();
        let table = text(&devices, Format::Table).unwrap();
        for words in
            ["dsa0", "128 of 128", "4 of 4", "dpdk_wq0.1", "wq0.0, wq0.1 on engine0.0", "2 GiB", "2 MiB"]
        {
            assert!(table.contains(words), "{words}: {table}");
        }
        let lines = text(&devices, Format::Json).unwrap();
        let object: Value = serde_json::from_str(lines.trim()).unwrap();
        assert_eq!((&object["dev"], &object["state"]), (&json!("dsa0"), &json!("enabled")));
        let wq = &object["groups"][0]["grouped_workqueues"][1];
        assert_eq!((&wq["dev"], &wq["size"], &wq["state"]), (&json!("wq0.1"), &json!(64), &json!("enabled")));
        // The list can be loaded as a configuration: facts are separate from settings.
        let loaded = json::parse(&format!("[{lines}]")).unwrap();
        assert_eq!((loaded.devices[0].wqs[1].size, loaded.devices[0].engines.len()), (64, 4));
    }
}

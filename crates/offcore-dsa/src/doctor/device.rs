//! Checks of a device: its state, its errors, its layout, and its NUMA distance.

use offcore_stats::finding::{Report, Rights};
use offcore_stats::lcore;

use super::System;
use crate::config::sysfs::SysfsDevice;
use crate::config::{check, status};

/// Checks everything about a device except its work queues.
pub(super) fn examine(system: &System, me: &Rights, device: &SysfsDevice, report: &mut Report) {
    state(device, report);
    errors(device, report);
    virtual_memory(device, report);
    layout(device, report);
    traffic_classes(system, device, report);
    distance(system, me, device, report);
}

fn state(device: &SysfsDevice, report: &mut Report) {
    let name = &device.config.name;
    match device.state.as_str() {
        "enabled" => report.check("device-state", name).ok("enabled"),
        "halted" => report.check("device-state", name).problem(
            "halted: an error that it cannot go on from",
            format!(
                "dmesg says which; then reset it: echo 1 > {}/../reset, or boot, and configure it again",
                device.path.display()
            ),
        ),
        other => report.check("device-state", name).problem(
            format!("{other}: nothing can be submitted"),
            format!("offcore dsa configure vhost -d {name}, or accel-config load-config -c FILE -e"),
        ),
    }
}

fn errors(device: &SysfsDevice, report: &mut Report) {
    let name = &device.config.name;
    let command = device.cmd_status.unwrap_or(0);
    if command == 0 {
        report.check("command-status", name).ok("the last command succeeded");
    } else {
        let found = format!("the last command failed: {}", status::text(command));
        let advice = "correct that and configure it again; writing to cmd_status clears it";
        if device.state == "enabled" && device.wqs.iter().any(|wq| wq.state == "enabled") {
            report.check("command-status", name).warning(found, advice);
        } else {
            report.check("command-status", name).problem(found, advice);
        }
    }
    // The first of four words of SWERROR; section 9.2.15.
    let text = device.errors.as_deref().unwrap_or_default();
    let words = text.split_whitespace().map(|word| u64::from_str_radix(word.trim_start_matches("0x"), 16));
    let Some(Ok(word)) = words.into_iter().next() else {
        return report.check("software-error", name).not_applicable("the kernel does not tell");
    };
    if word & 1 == 0 {
        return report.check("software-error", name).ok("none recorded");
    }
    let code = word >> 8 & 0xff;
    let queue = if word >> 3 & 1 == 1 {
        device.config.wq_name((word >> 16 & 0xff) as usize)
    } else {
        "a queue".into()
    };
    let more = if word >> 1 & 1 == 1 { ", and others after it" } else { "" };
    let found =
        format!("status {code:#04x} by a descriptor of {queue} (operation {:#04x}){more}", word >> 32 & 0xff);
    let advice = format!("offcore dsa explain {code:#04x} says what it means");
    report.check("software-error", name).warning(found, advice);
}

fn virtual_memory(device: &SysfsDevice, report: &mut Report) {
    let name = &device.config.name;
    if device.capabilities.pasid {
        report
            .check("shared-virtual-memory", name)
            .ok("PASIDs are on: programs can pass their own addresses");
    } else {
        let found = "PASIDs are off: neither user nor shared work queues can be enabled";
        let advice =
            "boot with intel_iommu=on,sm_on; turn on PASID and page requests (ATS, PRS) in the firmware";
        report.check("shared-virtual-memory", name).problem(found, advice);
    }
}

fn layout(device: &SysfsDevice, report: &mut Report) {
    let name = &device.config.name;
    if device.config.used_wqs().next().is_none() {
        let advice = format!("offcore dsa configure vhost -d {name}");
        return report.check("layout", name).problem("no work queue has a size", advice);
    }
    match check(&device.config, &device.capabilities) {
        Ok(()) => report.check("layout", name).ok("keeps all rules"),
        Err(broken) => {
            // Linux before 6.7 has no driver_name. PASIDs are checked separately.
            let named = device.wqs.iter().any(|wq| wq.has_driver_name);
            let broken = broken.into_iter().filter(|broken| match broken.rule.name() {
                "driver-name" => named,
                "user-needs-pasid" | "shared-needs-pasid" => false,
                _ => true,
            });
            let broken: Vec<_> = broken.collect();
            for broken in &broken {
                let rule = broken.rule.name();
                let found = format!("breaks {rule}: found {}", broken.found);
                report.check("layout", &broken.place).problem(found, format!("allowed: {}", broken.allowed));
            }
            if broken.is_empty() {
                report.check("layout", name).ok("keeps all rules");
            }
        }
    }
}

fn traffic_classes(system: &System, device: &SysfsDevice, report: &mut Report) {
    if device.capabilities.version > 0x200 {
        return report
            .check("traffic-class", &device.config.name)
            .not_applicable("later than version 2: any class");
    }
    let changed = system.read("sys/module/idxd/parameters/tc_override");
    let changed = matches!(changed.as_deref(), Some("Y" | "1"));
    let used = (0..device.config.groups.len()).filter(|group| device.config.engines_in(*group) > 0);
    let mut fine = true;
    for number in used {
        let group = &device.config.groups[number];
        let classes = [group.traffic_class_a, group.traffic_class_b];
        // The kernel sets 1 on devices up to version 2. Other classes may lack their own channel on these devices.
        if classes != [Some(1); 2] && classes != [None; 2] {
            fine = false;
            let class = |class: Option<u32>| class.map_or("none".into(), |class| class.to_string());
            let found = format!("classes {} and {}, not 1 and 1", class(classes[0]), class(classes[1]));
            let how = if changed {
                "idxd has tc_override=1"
            } else {
                "idxd without tc_override=1 sets 1 by itself"
            };
            let advice = format!("descriptors may fail with status 0x1e: set both to 1 ({how})");
            report.check("traffic-class", &device.config.group_name(number)).warning(found, advice);
        }
    }
    if fine {
        report.check("traffic-class", &device.config.name).ok("as the kernel sets them");
    }
}

/// Checks whether the lcores that this process may run on are on the device's NUMA node.
fn distance(system: &System, me: &Rights, device: &SysfsDevice, report: &mut Report) {
    let name = &device.config.name;
    let Some(node) = device.numa_node else {
        return report.check("numa-distance", name).not_applicable("the device has no NUMA node");
    };
    let list = |node: &str| system.read(&format!("sys/devices/system/node/{node}/cpulist"));
    let near = list(&format!("node{node}")).unwrap_or_default();
    let near = lcore::parse_list(&near).unwrap_or_default();
    if near.is_empty() {
        return report.check("numa-distance", name).not_applicable(format!("node {node} has no lcores"));
    }
    if me.lcores.iter().any(|lcore| near.contains(lcore)) || me.lcores.is_empty() {
        return report.check("numa-distance", name).ok(format!("node {node}, which we may run on"));
    }
    let distances = system.read(&format!("sys/devices/system/node/node{node}/distance")).unwrap_or_default();
    let farthest =
        distances.split_whitespace().filter_map(|text| text.parse::<u32>().ok()).max().unwrap_or(0);
    let found =
        format!("node {node}, and none of our lcores is on it (distance up to {farthest}, 10 is local)");
    let advice = format!("run on lcores {}", list(&format!("node{node}")).unwrap_or_default());
    report.check("numa-distance", name).warning(found, advice);
}

//! Checks of work queues: whether a program can open them, and whether their layout is suitable.

use offcore_stats::finding::{Report, Rights};

use super::System;
use crate::config::sysfs::{SysfsDevice, WqState};
use crate::config::{WqConfig, WqType};
use crate::wq::WqMode;

/// In smaller queues the device waits for the core. Throughput stops growing at about this number of descriptors.
const SMALL: u32 = 16;
/// Descriptors of a burst. A smaller batch size needs several doorbells per burst.
const BURST: u32 = 32;

/// Checks all queues of a device that have a size.
pub(super) fn examine(system: &System, me: &Rights, device: &SysfsDevice, report: &mut Report) {
    for (number, wq) in device.config.used_wqs() {
        let name = device.config.wq_name(number);
        let state = &device.wqs[number];
        if wq.kind == WqType::Kernel {
            kernel(&name, wq, state, report);
            continue;
        }
        enabled(device, &name, wq, state, report);
        binding(&name, wq, state, report);
        node(system, me, &name, state, report);
        clients(&name, wq, state, report);
        size(&name, wq, report);
        faults(&name, wq, report);
    }
}

fn kernel(name: &str, wq: &WqConfig, state: &WqState, report: &mut Report) {
    let clients = state.clients.unwrap_or(0);
    let driver = if wq.driver_name.is_empty() { "the kernel" } else { &wq.driver_name };
    let found = format!("type kernel, for {driver}, {clients} clients: programs cannot use it");
    report.check("wq-type", name).not_applicable(found);
}

fn enabled(device: &SysfsDevice, name: &str, wq: &WqConfig, state: &WqState, report: &mut Report) {
    match state.state.as_str() {
        "enabled" => {
            report.check("wq-state", name).ok(format!("enabled, {}, {} descriptors", wq.mode, wq.size))
        }
        other => {
            let advice =
                format!("accel-config enable-wq {}/{name}, or offcore dsa configure", device.config.name);
            report.check("wq-state", name).problem(format!("{other}: it takes no descriptors"), advice);
        }
    }
    if wq.kind == WqType::None {
        report.check("wq-type", name).problem("type none: no program can use it", "set its type to user");
    } else {
        report.check("wq-type", name).ok("user");
    }
}

fn binding(name: &str, wq: &WqConfig, state: &WqState, report: &mut Report) {
    if !state.has_driver_name {
        let found = "the kernel has no driver_name (before Linux 6.7)";
        report.check("driver-name", name).not_applicable(found);
    } else if wq.driver_name == "user" {
        report.check("driver-name", name).ok("user");
    } else {
        let found = match wq.driver_name.as_str() {
            "" => "driver_name is not set".into(),
            other => format!("driver_name is '{other}'"),
        };
        let advice = "Linux 6.7 and later bind nothing else: disable it, write 'user' to driver_name \
                      (accel-config config-wq --driver-name=user), enable it";
        report.check("driver-name", name).problem(found, advice);
    }
    let enabled = state.state == "enabled";
    match state.driver.as_deref() {
        Some("user" | "dsa") => report.check("wq-driver", name).ok("bound to user"),
        Some(other) => {
            let found = format!("bound to {other}");
            report.check("wq-driver", name).problem(found, "unbind it, and bind it to user");
        }
        None if enabled => {
            report.check("wq-driver", name).not_applicable("the kernel does not tell the driver")
        }
        None => {
            let advice = format!("echo {name} > /sys/bus/dsa/drivers/user/bind (offcore dsa configure does)");
            report.check("wq-driver", name).problem("bound to no driver", advice);
        }
    }
    if wq.label.starts_with("dpdk_") {
        report.check("wq-name", name).ok(format!("'{}': DPDK programs take it, too", wq.label));
    } else {
        let found = format!("'{}': DPDK takes only names that begin with dpdk_", wq.label);
        report.check("wq-name", name).not_applicable(found);
    }
}

fn node(system: &System, me: &Rights, name: &str, state: &WqState, report: &mut Report) {
    let path = system.dsa.dev.join(name);
    if state.node.is_none() {
        let found = format!("{} is not there", path.display());
        if state.state == "enabled" {
            let advice = "udev makes it when the queue is enabled; in a container, pass the device through";
            report.check("permissions", name).problem(found, advice);
        } else {
            report
                .check("permissions", name)
                .not_applicable(found + ": it comes with the queue being enabled");
        }
        return;
    }
    let rights = std::fs::metadata(&path).map(|meta| me.may_use(&meta));
    match rights.unwrap_or_else(|error| (false, error.to_string())) {
        (true, _) => report.check("permissions", name).ok(format!("{} may be opened", path.display())),
        (false, why) => report.check("permissions", name).problem(
            format!("{} may not be opened for reading and writing ({why})", path.display()),
            format!(
                "chgrp GROUP {0} && chmod 660 {0}, or a udev rule for SUBSYSTEM==\"dsa\"",
                path.display()
            ),
        ),
    }
}

fn clients(name: &str, wq: &WqConfig, state: &WqState, report: &mut Report) {
    let clients = state.clients.unwrap_or(0);
    match wq.mode {
        WqMode::Shared => report.check("wq-clients", name).ok(format!("{clients}, and others may join")),
        WqMode::Dedicated if clients == 0 => report.check("wq-clients", name).ok("none: it is free"),
        WqMode::Dedicated => {
            let pids = state.files.iter().filter_map(|file| file.pid).map(|pid| pid.to_string());
            let pids: Vec<String> = pids.collect();
            let by = if pids.is_empty() { String::new() } else { format!(" by process {}", pids.join(", ")) };
            let found = format!("in use{by}: opening it gives EBUSY");
            report
                .check("wq-clients", name)
                .warning(found, "end that program, or take another queue or a shared one");
        }
    }
}

fn size(name: &str, wq: &WqConfig, report: &mut Report) {
    let check = "wq-size";
    if wq.size < SMALL {
        let found = format!("{} descriptors: the device will often have nothing to do", wq.size);
        report.check(check, name).warning(found, "give it 32 or more, on fewer queues");
    } else if wq.mode == WqMode::Shared && wq.threshold < wq.size / 2 {
        let found =
            format!("threshold {} of {}: programs may use less than half of it", wq.threshold, wq.size);
        report.check(check, name).warning(found, format!("set threshold to {}", wq.size - 1));
    } else if wq.max_batch_size < BURST {
        let found = format!("batches of {} at most, less than a burst of {BURST}", wq.max_batch_size);
        report.check(check, name).warning(found, "set max_batch_size to 32 or more");
    } else {
        let found = format!("{} descriptors, batches of up to {}", wq.size, wq.max_batch_size);
        report.check(check, name).ok(found);
    }
}

fn faults(name: &str, wq: &WqConfig, report: &mut Report) {
    if wq.block_on_fault {
        let found = "1: a page fault of one program can hold up the others on the same engine";
        let advice = "0 if others share the device: Offcore resumes a copy that faulted, with the core";
        report.check("block-on-fault", name).warning(found, advice);
    } else {
        report.check("block-on-fault", name).ok("0: a fault ends the copy, which is then resumed");
    }
    if wq.ats_disable {
        let found = "ats_disable 1: faults of writes are not reported, a copy may be lost without a word";
        report.check("ats", name).warning(found, "set ats_disable to 0");
    } else {
        report.check("ats", name).ok("on");
    }
}

//! `offcore port`: the devices that can be used as ports.

use std::fmt::Write;
use std::path::PathBuf;

use anyhow::anyhow;
use clap::{Args, Subcommand};
use offcore_port::inventory::{self, Interface, PciDevice, PciKind};
use offcore_port::netdev::{Channels, Link};
use serde_json::{Value, json};

use crate::args::Format;
use crate::doctor::check_root;
use crate::failure::Failure;
use crate::output::table::{columns, or_dash};
use crate::output::write;

#[derive(Debug, Subcommand)]
pub(crate) enum PortCommand {
    /// Show network interfaces and PCI devices, the port types that can open them, and unmet requirements
    #[command(after_help = EXAMPLES)]
    List(ListArgs),
}

const EXAMPLES: &str = "\
Examples:
    offcore port list
    offcore port list --format json

A copied tree of another machine's devices:
    offcore port list --sysfs /tmp/sys";

#[derive(Args, Debug)]
pub(crate) struct ListArgs {
    /// Directory of the kernel's device tree
    #[arg(long, value_name = "DIR", default_value = "/sys")]
    pub sysfs: PathBuf,

    /// A table, or JSON with one device per line
    #[arg(long, value_name = "FORMAT", default_value = "table")]
    pub format: Format,
}

pub(crate) fn run(command: &PortCommand) -> Result<(), Failure> {
    let PortCommand::List(args) = command;
    check_root("--sysfs", &args.sysfs)?;
    let interfaces =
        inventory::interfaces(&args.sysfs).map_err(|e| anyhow!("asking for the network interfaces: {e}"))?;
    let devices = inventory::devices(&args.sysfs, &interfaces)
        .map_err(|e| anyhow!("PCI devices in '{}': {e}", args.sysfs.display()))?;
    let text = match args.format {
        Format::Table => tables(&interfaces, &devices),
        Format::Json => {
            let objects = interfaces.iter().map(of_interface).chain(devices.iter().map(of_device));
            objects.fold(String::new(), |text, object| format!("{text}{object}\n"))
        }
    };
    write(&text)?;
    Ok(())
}

fn link_name(link: Link) -> &'static str {
    match link {
        Link::Up => "up",
        Link::NoCarrier => "no carrier",
        Link::Down => "down",
        Link::Gone => "gone",
    }
}

fn of_interface(interface: &Interface) -> Value {
    let channels = interface
        .channels
        .map(|Channels { combined, rx, tx }| json!({ "combined": combined, "rx": rx, "tx": tx }));
    json!({
        "kind": "interface",
        "name": interface.name,
        "driver": interface.driver,
        "bus": interface.bus,
        "numa_node": interface.numa_node,
        "mtu": interface.mtu,
        "mac": interface.mac.to_string(),
        "link": link_name(interface.link),
        "speed_mbit": interface.speed,
        "queues": channels,
        "addresses": interface.addresses,
        "in_use": interface.uses,
        "xdp": interface.xdp.name(),
        "xdp_program": interface.program,
        "ports": interface.ports(),
        "notes": interface.notes(),
    })
}

fn kind_name(kind: PciKind) -> &'static str {
    match kind {
        PciKind::Network => "network",
        PciKind::Dma => "dma",
    }
}

fn of_device(device: &PciDevice) -> Value {
    json!({
        "kind": "pci",
        "address": device.address,
        "class": kind_name(device.kind),
        "vendor": format!("{:04x}", device.vendor),
        "device": format!("{:04x}", device.device),
        "driver": device.driver,
        "numa_node": device.numa_node,
        "interfaces": device.interfaces,
        "in_use": device.in_use,
        "dpdk": device.is_for_userspace(),
        "ports": device.uses(),
        "notes": device.notes(),
    })
}

fn listed(items: &[String]) -> String {
    or_dash(Some(items.join(" ")))
}

fn tables(interfaces: &[Interface], devices: &[PciDevice]) -> String {
    let rows = interfaces.iter().map(|interface| {
        let queues = |channels: Channels| channels.combined + channels.rx.max(channels.tx);
        [
            interface.name.clone(),
            or_dash(interface.driver.clone()),
            or_dash(interface.bus.clone()),
            or_dash(interface.numa_node),
            interface.mtu.to_string(),
            link_name(interface.link).into(),
            or_dash(interface.speed),
            or_dash(interface.channels.map(queues)),
            interface.xdp.name().into(),
            listed(&interface.ports()),
        ]
    });
    let mut text = columns("<interface|<driver|<device|node|MTU|<link|Mbit/s|queues|<XDP|<ports", rows);
    for interface in interfaces {
        for address in &interface.addresses {
            let _ = writeln!(text, "  {}: address {address}", interface.name);
        }
        for note in interface.notes() {
            let _ = writeln!(text, "  {}: {note}", interface.name);
        }
    }
    if devices.is_empty() {
        return text + "no PCI devices for networks or copies\n";
    }
    let rows = devices.iter().map(|device| {
        [
            device.address.clone(),
            kind_name(device.kind).into(),
            format!("{:04x}:{:04x}", device.vendor, device.device),
            or_dash(device.driver.clone()),
            or_dash(device.numa_node),
            listed(&device.interfaces),
            listed(&device.uses()),
        ]
    });
    text += &columns("<PCI device|<class|<vendor:device|<driver|node|<interfaces|<ports, channels", rows);
    for device in devices {
        for note in device.notes() {
            let _ = writeln!(text, "  {}: {note}", device.address);
        }
    }
    text
}

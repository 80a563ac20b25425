//! Layouts applied to a device that is represented by sysfs files.

use offcore_dsa::Opcode;
use offcore_dsa::config::{
    BUILT_IN, DeviceCapabilities, DeviceConfig, Group, WqConfig, apply, built_in, json, profile,
};
use offcore_dsa::wq::OpSet;

use crate::fixtures::kernel::Kernel;
use crate::fixtures::{Tree, bitmap};
use crate::{present, vhost};

/// Creates the drivers that accept work queues.
fn drivers(tree: &Tree) {
    for file in ["bind", "unbind"] {
        for driver in ["idxd", "user", "dmaengine"] {
            tree.set(&format!("sys/bus/dsa/drivers/{driver}/{file}"), "");
        }
    }
}

fn apply(
    config: &DeviceConfig,
    tree: &Tree,
    force: bool,
    kernel: &mut Kernel,
) -> Result<apply::Applied, String> {
    apply::apply(config, &present(tree), &tree.roots(), force, kernel).map_err(|error| error.to_string())
}

/// Returns the compared parts of the layout of a device as the kernel reports it.
fn used(config: &DeviceConfig) -> (Vec<(usize, WqConfig)>, Vec<Option<usize>>) {
    let forget = |(number, wq): (usize, &WqConfig)| (number, WqConfig { op_config: None, ..wq.clone() });
    (config.used_wqs().map(forget).collect(), config.engines.clone())
}

/// Returns a layout's groups as a device has them: all read buffers if the layout sets no number, and the kernel's
/// traffic classes.
fn groups(config: &DeviceConfig, caps: &DeviceCapabilities) -> Vec<Group> {
    let reserved: u32 = config.groups.iter().map(|group| group.read_buffers_reserved).sum();
    let on_device = |group: &Group| Group {
        traffic_class_a: group.traffic_class_a.or(Some(1)),
        traffic_class_b: group.traffic_class_b.or(Some(1)),
        read_buffers_allowed: group
            .read_buffers_allowed
            .or(Some(caps.read_buffers - reserved + group.read_buffers_reserved)),
        ..group.clone()
    };
    config.groups.iter().map(on_device).collect()
}

#[test]
fn layouts_apply_after_one_another() {
    for caps in [DeviceCapabilities::spr(), DeviceCapabilities::dsa2()] {
        let tree = Tree::new();
        tree.device(&DeviceConfig { ..built_in("vhost", &caps).unwrap() }, &caps);
        drivers(&tree);
        let mut kernel = Kernel::new(tree.roots());
        for name in BUILT_IN.iter().chain(BUILT_IN.iter().rev()) {
            let config = built_in(name, &caps).unwrap();
            let device = present(&tree);
            assert_eq!(device.capabilities, caps);
            let applied =
                apply(&config, &tree, false, &mut kernel).unwrap_or_else(|error| panic!("{name}: {error}"));
            assert_eq!(applied.notes, [""; 0], "{name}");
            let device = present(&tree);
            assert_eq!(used(&device.config), used(&config), "{name}");
            assert_eq!(device.config.groups, groups(&config, &caps), "{name}");
            assert_eq!(device.state, "enabled");
            for (number, _) in config.used_wqs() {
                assert_eq!(device.wqs[number].state, "enabled", "{name} {number}");
            }
            // When the same layout is applied again, only the attributes that the kernel resets on disabling are
            // written.
            assert!(json::parse(&json::write(&[device.config])).unwrap().ignored.is_empty());
        }
    }
}

#[test]
fn failed_layout_restores_the_earlier_one() {
    let tree = Tree::healthy();
    let mut kernel = Kernel::new(tree.roots());
    kernel.fails = Some(("wq0.2", 0x8011_0000, 1));
    let (device, config) = (present(&tree), profile("net").unwrap());
    let before = used(&device.config);
    let text = apply(&config, &tree, false, &mut kernel).unwrap_err();
    for word in ["wq0.2", "bind", "shared virtual memory", "earlier layout again"] {
        assert!(text.contains(word), "{text}");
    }
    let device = present(&tree);
    assert_eq!(used(&device.config), before);
    assert_eq!((device.state.as_str(), device.wqs[1].state.as_str()), ("enabled", "enabled"));
    // If the restoration fails as well, the error describes the device's state.
    kernel.fails = Some(("dsa0", 0x05, 2));
    let text = apply(&config, &tree, false, &mut kernel).unwrap_err();
    for word in ["dsa0 is disabled", "may be in part the new one", "halted"] {
        assert!(text.contains(word), "{text}");
    }
    assert_eq!(present(&tree).state, "disabled");
}

#[test]
fn failed_apply_leaves_device_disabled() {
    let tree = Tree::new();
    tree.device(&vhost(), &DeviceCapabilities::spr());
    drivers(&tree);
    let mut kernel = Kernel::new(tree.roots());
    kernel.fails = Some(("wq0.2", 0x8011_0000, 1));
    let (device, config) = (present(&tree), profile("net").unwrap());
    let text = apply(&config, &tree, false, &mut kernel).unwrap_err();
    assert!(text.contains("earlier layout again: it is disabled, and was disabled"), "{text}");
    let now = present(&tree);
    assert_eq!((now.state.as_str(), used(&now.config)), ("disabled", used(&device.config)));
    assert!(now.wqs.iter().all(|wq| wq.state == "disabled"));
}

#[test]
fn failed_apply_leaves_queue_disabled() {
    let tree = Tree::healthy();
    let dir = "sys/bus/dsa/devices/dsa0";
    // A size, but not the other settings that enabling requires.
    for (name, value) in [
        ("state", "disabled"),
        ("mode", "shared"),
        ("threshold", "0"),
        ("type", "none"),
        ("name", ""),
        ("driver_name", ""),
    ] {
        tree.set(&format!("{dir}/wq0.1/{name}"), value);
    }
    tree.remove(&format!("{dir}/wq0.1/driver"));
    let mut kernel = Kernel::new(tree.roots());
    kernel.fails = Some(("wq0.2", 0x8011_0000, 1));
    let config = profile("net").unwrap();
    let text = apply(&config, &tree, false, &mut kernel).unwrap_err();
    assert!(text.contains("earlier layout again: it is enabled"), "{text}");
    let now = present(&tree);
    assert_eq!((now.state.as_str(), now.wqs[0].state.as_str()), ("enabled", "enabled"));
    assert_eq!((now.wqs[1].state.as_str(), now.config.wqs[1].size), ("disabled", 64));
    assert!(!kernel.log.iter().any(|line| line.ends_with('=')), "{:?}", kernel.log);
}

#[test]
fn disabled_device_settings_are_overwritten() {
    let tree = Tree::new();
    // Newer kernels do not report Batch on the first generation, but accept it.
    let caps = DeviceCapabilities {
        ops: DeviceCapabilities::spr().ops.without(Opcode::Batch),
        ..DeviceCapabilities::spr()
    };
    let mut earlier = vhost();
    earlier.read_buffer_limit = 32;
    for group in &mut earlier.groups {
        *group = Group {
            read_buffers_reserved: 20,
            read_buffers_allowed: Some(36),
            use_read_buffer_limit: true,
            ..Group::default()
        };
    }
    earlier.wqs[0].op_config = Some(OpSet::default().with(Opcode::Noop));
    tree.device(&earlier, &caps);
    drivers(&tree);
    let mut kernel = Kernel::new(tree.roots());
    let mut config = vhost();
    config.groups[0].read_buffers_reserved = 40;
    let applied = apply(&config, &tree, false, &mut kernel).unwrap();
    assert_eq!(applied.notes, [""; 0]);
    let now = present(&tree).config;
    assert_eq!((now.read_buffer_limit, now.groups), (0, groups(&config, &caps)));
    assert_eq!(now.wqs[0].op_config, Some(caps.ops));
    let written = format!("wq0.0/op_config={}", bitmap(&caps.ops.with(Opcode::Batch)));
    assert!(kernel.log.contains(&written), "{written}: {:?}", kernel.log);
}

#[test]
fn device_in_use_needs_force() {
    let tree = Tree::healthy();
    tree.set("sys/bus/dsa/devices/dsa0/wq0.1/clients", 2);
    let mut kernel = Kernel::new(tree.roots());
    let config = profile("net").unwrap();
    let text = apply(&config, &tree, false, &mut kernel).unwrap_err();
    assert!(text.contains("wq0.1: 2 clients") && text.contains("--force"), "{text}");
    assert!(kernel.log.is_empty());
    apply(&config, &tree, true, &mut kernel).unwrap();
    tree.set("sys/bus/dsa/devices/dsa0/configurable", 0);
    let text = apply(&config, &tree, true, &mut kernel).unwrap_err();
    assert!(text.contains("configurable"), "{text}");
}

#[test]
fn read_only_traffic_classes_are_explained() {
    let tree = Tree::healthy();
    let mut config = vhost();
    config.groups[0].traffic_class_a = Some(1);
    config.groups[0].traffic_class_b = Some(1);
    let mut kernel = Kernel::new(tree.roots());
    let applied = apply(&config, &tree, false, &mut kernel).unwrap();
    assert_eq!(applied.notes, [""; 0]);
    assert!(!kernel.log.iter().any(|line| line.contains("traffic_class")));
    config.groups[0].traffic_class_b = Some(3);
    let applied = apply(&config, &tree, false, &mut kernel).unwrap();
    assert_eq!(applied.notes.len(), 1);
    let note = &applied.notes[0];
    assert!(
        ["group0.0/traffic_class_b", "stays 1", "tc_override=1"].iter().all(|word| note.contains(word)),
        "{note}"
    );
    kernel.tc_override = true;
    let applied = apply(&config, &tree, false, &mut kernel).unwrap();
    assert_eq!((applied.notes.len(), present(&tree).config.groups[0].traffic_class_b), (0, Some(3)));
}

#[test]
fn older_kernels_have_fewer_attributes() {
    let tree = Tree::healthy();
    let dir = "sys/bus/dsa/devices/dsa0";
    for wq in 0..8 {
        tree.remove(&format!("{dir}/wq0.{wq}/driver_name"));
        tree.remove(&format!("{dir}/wq0.{wq}/max_batch_size"));
    }
    for group in 0..4 {
        let dir = format!("{dir}/group0.{group}");
        std::fs::rename(
            tree.file(&format!("{dir}/read_buffers_allowed")),
            tree.file(&format!("{dir}/tokens_allowed")),
        )
        .unwrap();
    }
    let mut kernel = Kernel::new(tree.roots());
    let config = profile("app").unwrap();
    let applied = apply(&config, &tree, false, &mut kernel).unwrap();
    assert!(
        applied.notes.iter().any(|note| note.starts_with("wq0.0/max_batch_size: left out")),
        "{applied:?}"
    );
    assert_eq!(tree.get(&format!("{dir}/group0.1/tokens_allowed")), "8");
    assert_eq!(present(&tree).wqs[0].state, "enabled");
}

#[test]
fn kernels_value_is_read_back() {
    let tree = Tree::healthy();
    let mut config = vhost();
    // The rules would have reported this. Without them, the kernel rounds the value.
    config.wqs[1].max_transfer_size = 3000;
    let mut kernel = Kernel::new(tree.roots());
    let text = apply(&config, &tree, false, &mut kernel).unwrap_err();
    assert!(text.contains("wq0.1/max_transfer_size: 3000 was written, and 4096 is read"), "{text}");
}

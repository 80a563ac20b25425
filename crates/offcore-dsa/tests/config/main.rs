//! Layouts: the built-in ones, every rule by name, and accel-config's files. [`apply`] tests their application.

#![allow(clippy::unwrap_used, reason = "tests may")]

mod apply;
#[path = "../fixtures/mod.rs"]
mod fixtures;

use fixtures::Tree;
use offcore_dsa::config::sysfs::{self, SysfsDevice};
use offcore_dsa::config::{
    BUILT_IN, ConfigError, DeviceCapabilities, DeviceConfig, Group, OneLine, Rule, RuleBroken, WqConfig,
    WqType, built_in, check, commands, json, one_line, profile,
};
use offcore_dsa::sim::{Profile, SimDevice, SimError, SimOptions};
use offcore_dsa::wq::{OpSet, gen_cap};
use offcore_dsa::{Opcode, WqMode};

fn vhost() -> DeviceConfig {
    profile("vhost").unwrap()
}

fn present(tree: &Tree) -> SysfsDevice {
    sysfs::find(&tree.roots(), "dsa0").unwrap()
}

fn broken(config: &DeviceConfig, device: &DeviceCapabilities) -> Vec<RuleBroken> {
    check(config, device).err().unwrap_or_default()
}

#[test]
fn built_in_layouts_keep_all_rules() {
    for name in BUILT_IN {
        for device in [DeviceCapabilities::spr(), DeviceCapabilities::dsa2()] {
            let config = built_in(name, &device).unwrap();
            assert_eq!(check(&config, &device), Ok(()), "{name} {:#x}", device.version);
        }
        assert_eq!(profile(name).unwrap(), built_in(name, &DeviceCapabilities::spr()).unwrap());
    }
}

#[test]
fn unreadable_counts_break_named_rules() {
    let counts = ["max_groups", "max_work_queues", "max_engines"];
    for (bad, rubbish) in
        [&counts[..1], &counts[1..2], &counts[2..], &counts].into_iter().zip(["", "-1", "many", "0"])
    {
        let tree = Tree::healthy();
        bad.iter().for_each(|count| tree.set(&format!("sys/bus/dsa/devices/dsa0/{count}"), rubbish));
        let device = present(&tree);
        for name in BUILT_IN {
            let found = broken(&built_in(name, &device.capabilities).unwrap(), &device.capabilities);
            let named = [Rule::Numbers, Rule::GroupComplete];
            assert!(found.iter().any(|broken| named.contains(&broken.rule)), "{name} {bad:?}: {found:?}");
        }
    }
}

#[test]
fn presets_match_the_guides() {
    let vhost = vhost();
    let queues: Vec<_> = vhost.used_wqs().map(|(_, wq)| (wq.mode, wq.size, wq.priority, wq.group)).collect();
    assert_eq!(queues, [(WqMode::Dedicated, 64, 10, Some(0)); 2]);
    assert_eq!(vhost.engines, [Some(0); 4]);
    assert!(vhost.used_wqs().all(|(_, wq)| wq.label.starts_with("dpdk_") && wq.driver_name == "user"));
    let vpp = profile("vpp").unwrap();
    assert_eq!((vpp.used_wqs().count(), vpp.engines_in(0), vpp.wqs[0].ats_disable), (1, 1, false));
    let dpdk = profile("dpdk").unwrap();
    let groups: Vec<_> = dpdk.used_wqs().map(|(_, wq)| (wq.group.unwrap(), wq.size, wq.priority)).collect();
    assert_eq!(groups, [0, 1, 2, 3, 0, 1, 2, 3].map(|group| (group, 16, 1)));
    assert_eq!(dpdk.engines, [0, 1, 2, 3].map(Some));
    let line = OneLine { device: "dsa0".into(), wqs: 1, mode: WqMode::Dedicated, engines: 4 };
    let (line, mtcp) = (one_line(&line, &DeviceCapabilities::spr()).unwrap(), profile("mtcp").unwrap());
    assert_eq!((line.wqs[0].size, &line.engines), (mtcp.wqs[0].size, &mtcp.engines));
    let net = profile("net").unwrap();
    assert!(net.used_wqs().all(|(number, wq)| {
        (wq.size, wq.max_batch_size, wq.max_transfer_size, wq.group) == (32, 1024, 16384, Some(number))
    }));
    assert_eq!(profile("os").unwrap().wqs[0].kind, WqType::Kernel);
}

#[test]
fn unknown_layout_lists_known_ones() {
    let text = profile("vhosts").unwrap_err().to_string();
    assert!(text.contains("vhosts") && text.contains("vhost, vpp, mtcp, dpdk"), "{text}");
    assert!(profile("/no/such.json").unwrap_err().to_string().contains("/no/such.json"));
    let line = OneLine { device: "dsa1".into(), wqs: 9, mode: WqMode::Shared, engines: 1 };
    let text = one_line(&line, &DeviceCapabilities::spr()).unwrap_err().to_string();
    assert_eq!(text, "-w 9: dsa1 allows 1 to 8");
}

fn with(change: fn(&mut DeviceConfig)) -> DeviceConfig {
    let mut config = vhost();
    change(&mut config);
    config
}

fn wq(change: fn(&mut WqConfig)) -> DeviceConfig {
    let mut config = vhost();
    change(&mut config.wqs[0]);
    config
}

/// For each rule about devices and groups, returns a layout that violates only this rule.
fn breakers() -> Vec<(Rule, DeviceCapabilities, DeviceConfig)> {
    let (spr, dsa2) = (DeviceCapabilities::spr, DeviceCapabilities::dsa2);
    vec![
        (Rule::Numbers, DeviceCapabilities { engines: 2, ..spr() }, vhost()),
        (Rule::TotalWqSize, spr(), wq(|wq| wq.size = 65)),
        (Rule::WqInOneGroup, spr(), wq(|wq| wq.group = None)),
        (Rule::EmptyWqInNoGroup, spr(), with(|config| config.wqs[7].group = Some(0))),
        (Rule::GroupComplete, spr(), with(|config| config.engines[3] = Some(1))),
        (
            Rule::ReadBufferLimitSupport,
            DeviceCapabilities { read_buffer_limit: false, ..spr() },
            with(|config| config.read_buffer_limit = 16),
        ),
        (Rule::ReadBufferLimitRange, spr(), with(|config| config.read_buffer_limit = 97)),
        (
            Rule::ReadBufferLimitPerEngine,
            spr(),
            with(|config| {
                config.read_buffer_limit = 15;
                config.groups[0].use_read_buffer_limit = true;
            }),
        ),
        (
            Rule::ReadBuffersReserved,
            spr(),
            with(|config| {
                config.groups[0].read_buffers_reserved = 97;
                config.groups[0].read_buffers_allowed = Some(97);
            }),
        ),
        (Rule::ReadBuffersPerEngine, spr(), with(|config| config.groups[0].read_buffers_allowed = Some(15))),
        (
            Rule::ReadBuffersAtLeastReserved,
            spr(),
            with(|config| {
                config.groups[0].read_buffers_reserved = 20;
                config.groups[0].read_buffers_allowed = Some(19);
            }),
        ),
        (Rule::ReadBuffersAtMostFree, spr(), with(|config| config.groups[0].read_buffers_allowed = Some(97))),
        (Rule::EventLog, dsa2(), with(|config| config.event_log_size = Some(63))),
        (Rule::EventLog, spr(), with(|config| config.event_log_size = Some(64))),
        (Rule::TrafficClass, spr(), with(|config| config.groups[0].traffic_class_b = Some(8))),
        (Rule::ProgressLimit, dsa2(), with(|config| config.groups[0].desc_progress_limit = 4)),
        (Rule::ProgressLimit, spr(), with(|config| config.groups[0].batch_progress_limit = 1)),
    ]
}

/// The same for rules about work queues.
fn breakers_of_wqs() -> Vec<(Rule, DeviceCapabilities, DeviceConfig)> {
    let (spr, dsa2) = (DeviceCapabilities::spr, DeviceCapabilities::dsa2);
    vec![
        (Rule::WqSizeNonZero, spr(), with(|config| config.wqs[5].label = "app".into())),
        (Rule::WqPriority, spr(), wq(|wq| wq.priority = 0)),
        (Rule::WqPriority, spr(), wq(|wq| wq.priority = 16)),
        (Rule::SharedNeedsPasid, DeviceCapabilities { pasid: false, ..spr() }, {
            let mut config = profile("os").unwrap();
            config.wqs[0].block_on_fault = false;
            config
        }),
        (
            Rule::BlockOnFaultNeedsPageRequests,
            DeviceCapabilities { page_requests: false, ..spr() },
            wq(|wq| wq.block_on_fault = true),
        ),
        (
            Rule::BlockOnFaultNeedsPageRequests,
            DeviceCapabilities { gen_cap: spr().gen_cap & !gen_cap::BLOCK_ON_FAULT, ..spr() },
            wq(|wq| wq.block_on_fault = true),
        ),
        (Rule::MaxTransferSize, spr(), wq(|wq| wq.max_transfer_size = 1 << 32)),
        (Rule::MaxBatchSize, spr(), wq(|wq| wq.max_batch_size = 0)),
        (Rule::MaxBatchSize, spr(), wq(|wq| wq.max_batch_size = 2048)),
        (Rule::OpConfig, spr(), wq(|wq| wq.op_config = Some(OpSet::default().with(Opcode::InterDomainCopy)))),
        (
            Rule::AtsDisableSupport,
            DeviceCapabilities { wq_ats_control: false, ..spr() },
            wq(|wq| wq.ats_disable = true),
        ),
        (Rule::PrsDisableNeedsEventLog, spr(), wq(|wq| wq.prs_disable = true)),
        (
            Rule::PrsDisableWithBlockOnFault,
            dsa2(),
            wq(|wq| (wq.prs_disable, wq.block_on_fault) = (true, true)),
        ),
        (Rule::Threshold, spr(), wq(|wq| wq.mode = WqMode::Shared)),
        (Rule::Threshold, spr(), wq(|wq| (wq.mode, wq.threshold) = (WqMode::Shared, 65))),
        (Rule::PowerOfTwo, spr(), wq(|wq| wq.max_transfer_size = 3000)),
        (Rule::WqType, spr(), wq(|wq| wq.kind = WqType::None)),
        (Rule::WqName, spr(), wq(|wq| wq.label = String::new())),
        (Rule::DriverName, spr(), wq(|wq| wq.driver_name = String::new())),
        (Rule::DriverName, spr(), wq(|wq| wq.driver_name = "dmaengine".into())),
        (Rule::UserNeedsPasid, DeviceCapabilities { pasid: false, ..spr() }, {
            let mut config = vhost();
            config.wqs[1] = WqConfig::default();
            config
        }),
    ]
}

#[test]
fn each_broken_rule_is_reported_alone() {
    let mut seen = Vec::new();
    for (rule, device, config) in breakers().into_iter().chain(breakers_of_wqs()) {
        let broken = broken(&config, &device);
        let rules: Vec<Rule> = broken.iter().map(|broken| broken.rule).collect();
        assert_eq!(rules, [rule], "{broken:?}");
        let text = broken[0].to_string();
        assert!(text.contains(rule.name()) && text.contains("found") && text.contains("allowed"), "{text}");
        seen.push(rule);
        // The simulated device is not enabled with such a layout, as a real one.
        let profile = Profile::Layout(Box::new(config));
        let options = SimOptions { profile, capabilities: Some(device), ..SimOptions::default() };
        let refused = SimDevice::stepped("dsa-sim0", options);
        assert!(matches!(refused, Err(SimError::Config(_))), "{rule:?}: {refused:?}");
    }
    for rule in Rule::ALL {
        // Only a file can put an engine into two groups: see below.
        assert!(seen.contains(&rule) || rule == Rule::EngineInOneGroup, "nothing breaks {}", rule.name());
    }
}

#[test]
fn all_broken_rules_are_found_at_once() {
    let mut config = vhost();
    config.wqs[0].size = 100;
    config.wqs[0].priority = 0;
    config.wqs[1].max_batch_size = 0;
    config.engines = vec![None; 4];
    let found = broken(&config, &DeviceCapabilities::spr());
    let rules: Vec<(Rule, &str)> = found.iter().map(|broken| (broken.rule, broken.place.as_str())).collect();
    assert_eq!(
        rules,
        [
            (Rule::TotalWqSize, "dsa0"),
            (Rule::GroupComplete, "group0.0"),
            (Rule::WqPriority, "wq0.0"),
            (Rule::MaxBatchSize, "wq0.1"),
        ]
    );
    let text = ConfigError::Rules(found).to_string();
    assert!(text.starts_with("4 rules are broken:") && text.lines().count() == 5, "{text}");
}

#[test]
fn read_buffers_follow_the_example() {
    // 74 buffers in total, 3 reserved in each of 4 groups: 62 are free, and a group may use 65.
    let device = DeviceCapabilities { read_buffers: 74, ..DeviceCapabilities::spr() };
    let with = |allowed| {
        let mut config = profile("net").unwrap();
        let group = Group { read_buffers_reserved: 3, read_buffers_allowed: Some(65), ..Group::default() };
        config.groups = vec![group; 4];
        config.groups[2].read_buffers_allowed = Some(allowed);
        check(&config, &device)
    };
    assert_eq!(with(65), Ok(()));
    let found = with(66).unwrap_err();
    assert_eq!(
        (found.len(), found[0].rule, found[0].place.as_str()),
        (1, Rule::ReadBuffersAtMostFree, "group0.2")
    );
    assert!(found[0].allowed.starts_with("at most 65"), "{}", found[0]);
}

#[test]
fn written_files_are_read_back() {
    for name in BUILT_IN {
        for device in [DeviceCapabilities::spr(), DeviceCapabilities::dsa2()] {
            let mut config = built_in(name, &device).unwrap();
            config.wqs[0].op_config = Some(device.ops);
            let loaded = json::parse(&json::write(std::slice::from_ref(&config))).unwrap();
            assert_eq!(loaded.ignored, [""; 0], "{name}");
            let read = &loaded.devices[0];
            let used =
                |config: &DeviceConfig| config.used_wqs().map(|(n, wq)| (n, wq.clone())).collect::<Vec<_>>();
            assert_eq!(used(read), used(&config), "{name}");
            let engines =
                |config: &DeviceConfig| config.engines.iter().flatten().copied().collect::<Vec<_>>();
            assert_eq!(engines(read), engines(&config), "{name}");
            assert_eq!(check(read, &device), Ok(()));
        }
    }
}

/// A file in the style of accel-config's own files: older names, numbers in quotes, extra commas, facts among settings.
const FILE: &str = r#"[
  {
    "dev":"dsa3", "token_limit":0, "max_groups":4, "state":"enabled", "colour":"red",
    "groups":[
      {
        "dev":"group3.1", "tokens_reserved":2, "use_token_limit":0, "tokens_allowed":8,
        "traffic_class_a":-1, "traffic_class_b":1,
        "grouped_workqueues":[
          { "dev":"wq3.2", "mode":"shared", "size":"16", "group_id":1, "priority":10, "block_on_fault":1,
            "max_batch_size":32, "max_transfer_size":16384, "cdev_minor":0, "type":"user",
            "name":"a,}b", "threshold":6, "shape":1 },
        ],
        "grouped_engines":[ { "dev":"engine3.0", "group_id":1 }, ]
      },
    ]
  },
  { "dev":"iax1", "groups":[] }
]"#;

#[test]
fn accel_config_files_are_read() {
    let loaded = json::parse(FILE).unwrap();
    assert_eq!(
        loaded.ignored,
        ["dsa3: key 'colour' is not known", "wq3.2: key 'shape' is not known", "iax1: no DSA device"]
    );
    let config = &loaded.devices[0];
    assert_eq!((config.name.as_str(), config.engines.as_slice()), ("dsa3", [Some(1)].as_slice()));
    let group = &config.groups[1];
    assert_eq!((group.read_buffers_reserved, group.read_buffers_allowed), (2, Some(8)));
    assert_eq!((group.traffic_class_a, group.traffic_class_b), (None, Some(1)));
    let wq = &config.wqs[2];
    assert_eq!((wq.mode, wq.size, wq.threshold, wq.group), (WqMode::Shared, 16, 6, Some(1)));
    assert!(wq.block_on_fault && wq.driver_name == "user" && wq.label == "a,}b");
    assert_eq!(check(config, &DeviceCapabilities::spr()), Ok(()));
}

#[test]
fn zero_maxima_mean_device_maxima() {
    let text = FILE.replacen(r#""max_batch_size":32"#, r#""max_batch_size":0"#, 1).replacen(
        r#""max_transfer_size":16384"#,
        r#""max_transfer_size":0"#,
        1,
    );
    let loaded = json::parse(&text).unwrap();
    let (wq, default) = (&loaded.devices[0].wqs[2], WqConfig::default());
    assert_eq!(
        (wq.max_batch_size, wq.max_transfer_size),
        (default.max_batch_size, default.max_transfer_size)
    );
    assert_eq!(check(&loaded.devices[0], &DeviceCapabilities::spr()), Ok(()));
}

#[test]
fn wrong_file_names_the_place() {
    for (from, to, words) in [
        (
            r#""priority":10"#,
            r#""priority":"high""#,
            &["wq3.2", "\"priority\"", "\"high\"", "whole number"][..],
        ),
        (r#""mode":"shared""#, r#""mode":"common""#, &["wq3.2", "\"mode\"", "common", "dedicated, shared"]),
        (r#""type":"user""#, r#""type":1"#, &["wq3.2", "\"type\"", "text"]),
        (r#""block_on_fault":1"#, r#""block_on_fault":2"#, &["wq3.2", "block_on_fault", "0 or 1"]),
        (r#""size":"16""#, r#""size":-7"#, &["wq3.2", "\"size\"", "-7", "out of range"]),
        (r#""dev":"wq3.2""#, r#""dev":"wq0.2""#, &["wq0.2", "wq3.0 to wq3.255"]),
        (r#""dev":"engine3.0""#, r#""dev":"engine3.999999""#, &["engine3.999999", "expected"]),
        (r#""dev":"dsa3","#, "", &["a device", "no \"dev\""]),
        (r#""token_limit":0,"#, r#""token_limit":0"#, &["line 3", "no JSON"]),
        (r#""grouped_engines":["#, r#""grouped_engines":1,"x":["#, &["group3.1", "grouped_engines", "array"]),
    ] {
        assert!(FILE.contains(from), "{from}");
        let text = json::parse(&FILE.replacen(from, to, 1)).unwrap_err().to_string();
        assert!(words.iter().all(|word| text.contains(word)), "{to}: {text}");
    }
    assert!(json::parse("{}").unwrap_err().to_string().contains("array of devices"));
}

#[test]
fn a_file_with_two_groups_is_refused() {
    // Errors that a layout cannot represent are found while reading.
    for (from, to, rule) in [
        (r#""group_id":1, "priority""#, r#""group_id":0, "priority""#, Rule::WqInOneGroup),
        (r#""dev":"engine3.0", "group_id":1"#, r#""dev":"engine3.0", "group_id":2"#, Rule::EngineInOneGroup),
        (
            r#""groups":["#,
            r#""groups":[ { "dev":"group3.0", "grouped_engines":[ { "dev":"engine3.0" } ] },"#,
            Rule::EngineInOneGroup,
        ),
    ] {
        let Err(ConfigError::Rules(found)) = json::parse(&FILE.replacen(from, to, 1)) else { panic!("{to}") };
        assert_eq!(found[0].rule, rule, "{to}: {found:?}");
    }
}

#[test]
fn user_template_fits_the_device() {
    let text = r#"[ { "dev":"dsa0", "groups":[ { "dev":"group0.0", "grouped_workqueues":[
        { "dev":"wq0.0", "mode":"shared", "group_id":0, "priority":10, "block_on_fault":1,
          "name":"user_default_wq", "ats_disable":0, "prs_disable":1 } ] } ] } ]"#;
    for (device, size, block) in
        [(DeviceCapabilities::spr(), 16, true), (DeviceCapabilities::dsa2(), 32, false)]
    {
        let mut config = json::parse(text).unwrap().devices.remove(0);
        let notes = config.fit(&device);
        assert_eq!(notes.len(), 2, "{notes:?}");
        let wq = &config.wqs[0];
        assert_eq!((wq.size, wq.threshold, wq.block_on_fault, config.engines_in(0)), (size, size, block, 4));
        assert_eq!(wq.prs_disable, !block);
        assert_eq!(check(&config, &device), Ok(()));
    }
}

#[test]
fn commands_have_a_working_order() {
    let lines = commands::commands(&profile("app").unwrap(), &DeviceCapabilities::spr());
    let position =
        |text: &str| lines.iter().position(|line| line.contains(text)).unwrap_or_else(|| panic!("{text}"));
    let wq = &lines[position("config-wq dsa0/wq0.1")];
    for word in ["--wq-size=32", "--mode=shared", "--threshold=28", "--driver-name=user", "--group-id=1"] {
        assert!(wq.contains(word), "{wq}");
    }
    assert!(
        position("config-group dsa0/group0.0 --read-buffers-allowed=8") < position("config-wq dsa0/wq0.0")
    );
    assert!(position("config-engine dsa0/engine0.1 --group-id=1") < position("enable-device dsa0"));
    assert!(position("config-wq dsa0/wq0.1") < position("enable-device dsa0"));
    assert!(position("enable-device dsa0") < position("enable-wq dsa0/wq0.0"));
}

#[test]
fn layout_moves_to_another_device() {
    let config = vhost().renamed("dsa2");
    assert_eq!((config.wq_name(1).as_str(), config.wqs[1].label.as_str()), ("wq2.1", "dpdk_wq2.1"));
    let text = sysfs::find(&Tree::healthy().roots(), "dsa2").unwrap_err().to_string();
    assert!(text.contains("dsa2: not found") && text.contains("found dsa0"), "{text}");
}

#[test]
fn older_kernels_print_lowest_word_first() {
    let tree = Tree::healthy();
    tree.set("sys/bus/dsa/devices/dsa0/op_cap", "0x1003f03ff 0x0 0x0 0x0");
    assert_eq!(present(&tree).capabilities.ops, OpSet([0x1_003f_03ff, 0, 0, 0]));
}

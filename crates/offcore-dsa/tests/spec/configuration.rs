//! C.6, 10 and 11: a layout that the device would not enable is refused. The order of the reported rules is not
//! specified.

use crate::rig::*;
use offcore_dsa::config::{Capabilities, DeviceConfig, Group, WqConfig};
use offcore_dsa::sim::{SimDevice, SimError, SimOptions};
use offcore_dsa::{Opcode, wq::gen_cap};

fn is_refused(options: SimOptions) -> bool {
    matches!(SimDevice::stepped("dsa-sim0", options), Err(SimError::Config(_)))
}

fn refuses(change: impl Fn(&mut DeviceConfig)) -> bool {
    let mut config = layout(&[dedicated()], 1);
    assert!(!is_refused(options(config.clone())));
    change(&mut config);
    is_refused(options(config))
}

#[test]
fn rule_10_queue_sizes_fit_the_device() {
    assert!(refuses(|config| config.wqs[0].size = 129));
    assert!(refuses(|config| config.wqs[1] = WqConfig { size: 65, ..dedicated() }));
    let large = WqConfig { size: 256, ..dedicated() };
    assert!(!is_refused(second_generation(layout(&[large], 1))));
}

#[test]
fn rule_10_sized_queues_are_in_a_group() {
    assert!(refuses(|config| config.wqs[0].group = None));
    assert!(refuses(|config| config.wqs[3].group = Some(0)));
}

#[test]
fn rule_10_group_has_queues_and_engines() {
    assert!(refuses(|config| config.engines[0] = None));
    assert!(refuses(|config| config.engines[1] = Some(2)));
    assert!(refuses(|config| config.wqs[0].group = Some(9)));
}

#[test]
fn rule_10_read_buffers_per_engine() {
    let with = |reserved, allowed| {
        let capabilities = Capabilities { read_buffers: 74, ..Capabilities::spr() };
        let wqs: Vec<WqConfig> =
            (0..4).map(|group| WqConfig { size: 16, group: Some(group), ..dedicated() }).collect();
        let mut config = layout(&wqs, 4);
        config.engines = (0..4).map(Some).collect();
        let group = Group {
            read_buffers_reserved: reserved,
            read_buffers_allowed: Some(allowed),
            ..Group::default()
        };
        config.groups.fill(group);
        is_refused(SimOptions { capabilities: Some(capabilities), ..options(config) })
    };
    // The specification's example: 74 buffers in total, 3 reserved in each of 4 groups, at most 65 allowed.
    assert!(!with(3, 65) && with(3, 66));
    assert!(!with(3, 4) && with(3, 3));
    assert!(with(5, 4));
    assert!(with(19, 19));
}

#[test]
fn rule_11_a_work_queue_has_a_priority() {
    assert!(refuses(|config| config.wqs[0].priority = 0));
    assert!(refuses(|config| config.wqs[0].priority = 16));
}

#[test]
fn rule_11_shared_queue_needs_identities() {
    let config = layout(&[shared(8)], 1);
    assert!(!is_refused(options(config.clone())));
    let capabilities = Capabilities { pasid: false, ..Capabilities::spr() };
    assert!(is_refused(SimOptions { capabilities: Some(capabilities), ..options(config) }));
}

#[test]
fn rule_11_block_on_fault_needs_requests() {
    let config = layout(&[dedicated()], 1);
    let spr = Capabilities::spr;
    for capabilities in [
        Capabilities { page_requests: false, ..spr() },
        Capabilities { gen_cap: spr().gen_cap & !gen_cap::BLOCK_ON_FAULT, ..spr() },
    ] {
        assert!(is_refused(SimOptions { capabilities: Some(capabilities), ..options(config.clone()) }));
    }
}

#[test]
fn rule_11_maxima_fit_the_device() {
    assert!(refuses(|config| config.wqs[0].max_transfer_size = 1 << 32));
    assert!(refuses(|config| config.wqs[0].max_batch_size = 0));
    assert!(refuses(|config| config.wqs[0].max_batch_size = 2048));
}

#[test]
fn rule_11_op_config_fits_the_device() {
    let ops = Capabilities::spr().ops;
    assert!(refuses(|config| config.wqs[0].op_config = Some(ops.with(Opcode::ScatterCopy))));
    assert!(!refuses(|config| config.wqs[0].op_config = Some(ops.without(Opcode::Fill))));
}

#[test]
fn rule_11_page_requests_off_needs_a_log() {
    let off = WqConfig { prs_disable: true, block_on_fault: false, ..dedicated() };
    assert!(is_refused(options(layout(std::slice::from_ref(&off), 1))));
    assert!(!is_refused(second_generation(layout(std::slice::from_ref(&off), 1))));
    let both = WqConfig { block_on_fault: true, ..off };
    assert!(is_refused(second_generation(layout(&[both], 1))));
}

//! Every status of an invalid descriptor (Table 5-6), one error at a time.

use crate::rig::*;
use offcore_dsa::config::DeviceCapabilities;
use offcore_dsa::sim::SimOptions;
use offcore_dsa::wq::gen_cap;
use offcore_dsa::{Descriptor, Flags, Opcode, Status};

#[test]
fn unsupported_operations_are_refused() {
    let modelled = [0x00, 0x01, 0x02, 0x03, 0x04, 0x05, 0x10];
    for mut rig in [Rig::plain(), Rig::new(second_generation(layout(&[dedicated()], 1)))] {
        for code in (0..=0xff).filter(|code| !modelled.contains(code)) {
            let unknown = Descriptor { flags_opcode: code << 24, ..noop() };
            assert_eq!(rig.run(unknown).status, Status::BAD_OPCODE, "{code:#x}");
        }
    }
}

#[test]
fn queue_forbids_operations() {
    let device = DeviceCapabilities::spr();
    let wq = offcore_dsa::config::WqConfig {
        op_config: Some(device.ops.without(Opcode::MemoryMove)),
        ..dedicated()
    };
    let mut rig = Rig::new(options(layout(&[wq], 1)));
    let (src, mut dst) = (pattern(64, 1), vec![0; 64]);
    assert_eq!(rig.run(copy(&src, &mut dst)).status, Status::BAD_OPCODE);
    assert_eq!(rig.run(noop()).status, Status::SUCCESS);
}

#[test]
fn foreign_flags_are_invalid_and_named() {
    let mut rig = Rig::plain();
    let (src, mut dst) = (pattern(64, 1), vec![0; 64]);
    let copy = copy(&src, &mut dst);
    for flag in [
        Flags::CHECK_RESULT,
        Flags::ADDR3_TC,
        Flags::CACHE_CONTROL_3,
        Flags::OP_0,
        Flags::OP_7,
        Flags::from_bits_retain(1 << 6),
        Flags::from_bits_retain(1 << 15),
    ] {
        let record = rig.run(copy.with_flags(flag));
        assert_eq!((record.status, record.specific[0] as u32), (Status::INVALID_FLAGS, flag.bits()));
    }
    assert_eq!(
        rig.run(copy.with_flags(Flags::CACHE_CONTROL_1 | Flags::STRICT_ORDER)).status,
        Status::SUCCESS
    );
    assert_eq!(rig.run(noop().with_flags(Flags::BLOCK_ON_FAULT)).status, Status::INVALID_FLAGS);
}

#[test]
fn results_need_a_requested_record() {
    let mut rig = Rig::plain();
    let data = pattern(64, 1);
    for op in [Opcode::Compare, Opcode::CrcGeneration] {
        let mut descriptor = operation(op, data.as_ptr() as u64, 0, 64).with_flags(Flags::CRAV);
        descriptor.completion = rig.place(5);
        rig.record(5).clear();
        rig.submit_raw(&descriptor);
        rig.engine.run_until_idle();
        let record = rig.record(5).read().unwrap();
        assert_eq!((record.status, record.specific[0] as u32), (Status::INVALID_FLAGS, Flags::RCR.bits()));
    }
    // A drain without a completion record is useless.
    let mut drain = Descriptor::new(Opcode::Drain, Flags::CRAV);
    drain.completion = rig.place(5);
    rig.record(5).clear();
    rig.submit_raw(&drain);
    rig.engine.run_until_idle();
    assert_eq!(rig.record(5).read().unwrap().status, Status::INVALID_FLAGS);
}

#[test]
fn cache_control_needs_its_capability() {
    let missing = gen_cap::CACHE_CONTROL_MEMORY | gen_cap::DESTINATION_READBACK;
    let capabilities = DeviceCapabilities {
        gen_cap: DeviceCapabilities::spr().gen_cap & !missing,
        ..DeviceCapabilities::spr()
    };
    let mut rig =
        Rig::new(SimOptions { capabilities: Some(capabilities), ..options(layout(&[dedicated()], 1)) });
    let (src, mut dst) = (pattern(64, 1), vec![0; 64]);
    for flag in [Flags::CACHE_CONTROL_1, Flags::CACHE_CONTROL_2] {
        let descriptor = copy(&src, &mut dst).with_flags(flag);
        assert_eq!(rig.run(descriptor).status, Status::INVALID_FLAGS);
        assert_eq!(Rig::plain().run(descriptor).status, Status::SUCCESS);
    }
}

#[test]
fn reserved_fields_must_be_zero() {
    let mut rig = Rig::plain();
    let (src, mut dst) = (pattern(64, 1), vec![0; 64]);
    let good = copy(&src, &mut dst);
    let mut specific = good;
    specific.specific[2] = 1;
    for wrong in [Descriptor { reserved: 1, ..good }, Descriptor { interrupt: 1, ..good }, specific] {
        assert_eq!(rig.run(wrong).status, Status::NONZERO_RESERVED);
    }
    assert_eq!(rig.run(Descriptor { src: 1, ..noop() }).status, Status::NONZERO_RESERVED);
    assert_eq!(dst, [0; 64]);
}

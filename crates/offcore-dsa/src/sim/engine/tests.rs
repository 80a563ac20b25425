//! The scheduler's timing: the duration of descriptors, alone and concurrent with others.

use super::*;
use crate::completion::CompletionRecord;
use crate::portal::Submitted;
use crate::sim::{SimDevice, SimPortal};

/// Returns a stepped device with a built-in layout, and opens its first queue.
fn device(profile: &str) -> (SimDevice, SimEngine, SimPortal) {
    let options = format!("profile={profile}").parse().unwrap();
    let (device, engine) = SimDevice::stepped("dsa-sim0", options).unwrap();
    let portal = device.open(&device.work_queues()[0].name).unwrap();
    (device, engine, portal)
}

/// Submits a descriptor of a test. Its memory stays valid until the device has stopped.
fn send(portal: &mut SimPortal, descriptor: &Descriptor) -> Submitted {
    // SAFETY: the tests keep the descriptor's memory valid until the device has stopped.
    unsafe { portal.submit(descriptor) }
}

struct Buffers {
    src: Vec<u8>,
    dst: Vec<u8>,
    records: Vec<CompletionRecord>,
}

impl Buffers {
    fn new() -> Self {
        let records = std::iter::repeat_with(CompletionRecord::default).take(512).collect();
        Self { src: vec![1; 2 << 20], dst: vec![0; 2 << 20], records }
    }

    fn copy(&mut self, size: u32, record: usize) -> Descriptor {
        self.records[record].clear();
        Descriptor {
            completion: &raw const self.records[record] as u64,
            src: self.src.as_ptr() as u64,
            dst: self.dst.as_mut_ptr() as u64,
            size,
            ..Descriptor::new(Opcode::MemoryMove, Flags::CRAV | Flags::RCR)
        }
    }
}

/// Returns the nanoseconds until the last of `n` copies of `size` bytes is completed.
fn takes(profile: &str, size: u32, n: usize) -> f64 {
    let (_device, mut engine, mut portal) = device(profile);
    let mut buffers = Buffers::new();
    for index in 0..n {
        assert_eq!(send(&mut portal, &buffers.copy(size, index)), Submitted::Accepted);
    }
    assert_eq!(engine.run_until_idle(), n);
    engine.now as f64 / 1000.0
}

#[test]
fn lone_copy_takes_the_models_time() {
    let timing = Timing::default();
    for size in [1, 1518, 4096, 65_536, 1 << 20] {
        let (ns, model) = (takes("vpp", size, 1), timing.alone_ns(u64::from(size)));
        assert!((ns - model).abs() < 1.0, "{size} bytes: {ns} ns, model {model}");
    }
}

#[test]
fn bandwidth_or_front_limits_copies() {
    let timing = Timing::default();
    let long = takes("vpp", 256 << 10, 16) - timing.fixed_ns();
    let model = timing.transfer_ns(16 * (256 << 10), 1);
    assert!((long / model - 1.0).abs() < 0.01, "{long} ns, model {model}");
    let short = takes("vpp", 64, 16) - timing.fixed_ns();
    let model = 15.0 * timing.occupancy_ns;
    assert!((short / model - 1.0).abs() < 0.02, "{short} ns, model {model}");
}

#[test]
fn moving_engines_share_the_device() {
    let timing = Timing::default();
    // Four groups of one DSA engine each: four concurrent large copies take four times as long as a single one.
    let (device, mut engine, _) = device("net");
    let mut buffers = Buffers::new();
    let mut portals: Vec<SimPortal> =
        device.work_queues().iter().map(|wq| device.open(&wq.name).unwrap()).collect();
    assert_eq!(portals.len(), 4);
    let size = 16 << 10;
    for (index, portal) in portals.iter_mut().enumerate() {
        assert_eq!(send(portal, &buffers.copy(size, index)), Submitted::Accepted);
    }
    engine.run_until_idle();
    let (ns, model) =
        (engine.now as f64 / 1000.0, timing.fixed_ns() + 4.0 * timing.transfer_ns(size.into(), 1));
    assert!((ns / model - 1.0).abs() < 0.01, "{ns} ns, model {model}");
}

#[test]
fn batch_adds_its_list_and_its_record() {
    let timing = Timing::default();
    let (_device, mut engine, mut portal) = device("vpp");
    let mut buffers = Buffers::new();
    let members: Vec<Descriptor> = (1..33).map(|index| buffers.copy(1, index)).collect();
    let list = Descriptor { src: members.as_ptr() as u64, size: 32, dst: 0, ..buffers.copy(1, 0) };
    let batch = Descriptor { flags_opcode: (1 << 24) | list.flags_opcode & 0xff_ffff, ..list };
    assert_eq!(send(&mut portal, &batch), Submitted::Accepted);
    assert_eq!(engine.run_until_idle(), 33);
    let model = timing.fixed_ns() + 31.0 * timing.occupancy_ns + timing.read_ns + timing.record_ns;
    let ns = engine.now as f64 / 1000.0;
    assert!((ns / model - 1.0).abs() < 0.01, "{ns} ns, model {model}");
    assert!(buffers.records[..33].iter().all(CompletionRecord::is_plain_success));
}

#[test]
fn depth_helps_until_the_front_is_busy() {
    let each = [1, 2, 4, 8, 32].map(|depth| takes("vpp", 256, depth) / depth as f64);
    assert!(each.is_sorted_by(|a, b| a > b), "{each:?}");
}

#[test]
fn slower_device_has_faults_when_asked() {
    let mut buffers = Buffers::new();
    let [normal, slow] = ["vpp", "vpp,slower=10"].map(|options| {
        let (device, mut engine, mut portal) = device(options);
        let mut run = || {
            assert_eq!(send(&mut portal, &buffers.copy(4096, 0)), Submitted::Accepted);
            engine.run_until_idle();
            engine.now
        };
        let took = run();
        device.set_faults(Faults { hardware: 1.0, ..Faults::default() });
        run();
        assert_eq!((device.stats().failed, device.stats().completed), (1, 2));
        took
    });
    assert!((slow as f64 / normal as f64 - 10.0).abs() < 0.01, "{slow} {normal}");
}

#[test]
fn latest_completion_saturates_the_clock() {
    let (device, mut engine, mut portal) = device("vpp");
    let mut buffers = Buffers::new();
    device.set_faults(Faults { late: 1.0, late_ns: u64::MAX, ..Faults::default() });
    for completed in [1, 0] {
        assert_eq!(send(&mut portal, &buffers.copy(64, completed)), Submitted::Accepted);
        assert_eq!(engine.run_until_idle(), completed);
    }
    assert!(buffers.records[1].is_plain_success() && buffers.records[0].read().is_none());
    assert_eq!(engine.now, u64::MAX);
}

#[test]
fn device_without_its_engine_is_dead() {
    let (device, engine, mut portal) = device("vpp");
    assert!(portal.is_alive());
    drop(engine);
    assert!(!portal.is_alive());
    // Submission succeeds, although the device never executes the descriptor.
    assert_eq!(send(&mut portal, &Descriptor::default()), Submitted::Accepted);
    drop(portal);
    device.reset();
}

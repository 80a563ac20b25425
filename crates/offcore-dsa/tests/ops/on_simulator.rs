//! On the simulated device, the results equal the core's under every fault, and the executor is reported.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use offcore_dsa::ops::{Done, DoneBy, Engine, Operation, OpsError, Options, Why};
use offcore_dsa::sim::{SimDevice, SimEngine, SimOptions};
use offcore_dsa::{Opcode, Portal, Status, WqInfo};

use super::{copy, unbounded};

/// A device that a thread steps continuously, so that calls can wait for it.
struct Device {
    device: SimDevice,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Device {
    fn new(options: &str) -> Self {
        let (device, mut engine) = SimDevice::stepped("dsa-sim0", options.parse().unwrap()).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                if engine.run_until_idle() == 0 {
                    std::thread::yield_now();
                }
            }
        });
        Self { device, stop, thread: Some(thread) }
    }

    fn queue(&self) -> WqInfo {
        self.device.work_queues().remove(0)
    }

    fn engine(&self, options: Options) -> Engine {
        let wq = self.queue();
        Engine::new(Portal::from(self.device.open(&wq.name).unwrap()), wq, options)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

fn bytes(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|at| (at as u8).wrapping_mul(seed) ^ (at >> 8) as u8).collect()
}

/// Runs every operation; returns the results and the contents of memory.
fn everything(engine: &mut Engine, len: usize) -> Vec<(Opcode, Done, Vec<u8>)> {
    let data = bytes(len, 7);
    let mut other = data.clone();
    other.iter_mut().skip(len / 3).step_by(97).for_each(|byte| *byte ^= 0x40);
    (0..5)
        .map(|which| {
            let mut memory = vec![0; len];
            let (src, dst) = (data[..].into(), memory[..].as_mut().into());
            let operation = match which {
                0 => Operation::Copy { src, dst },
                1 => Operation::Fill { pattern: 0x0123_4567_89ab_cdef, dst },
                2 => Operation::Compare { first: src, second: other[..].into() },
                3 => Operation::Compare { first: src, second: src },
                _ => Operation::Crc { src, seed: 5 },
            };
            let opcode = operation.opcode();
            let done = engine.run(operation).unwrap();
            (opcode, done, memory)
        })
        .collect()
}

/// Checks that the results equal the core's, and returns them.
fn same_as_core(engine: &mut Engine, len: usize) -> Vec<(Opcode, Done)> {
    let ours = everything(engine, len);
    let cores = everything(&mut Engine::core(), len);
    for ((opcode, done, memory), (_, by_core, expected)) in ours.iter().zip(&cores) {
        assert_eq!((done.difference, done.crc), (by_core.difference, by_core.crc), "{opcode:?}");
        assert!(memory == expected, "{opcode:?} left something else in memory");
    }
    ours.into_iter().map(|(opcode, done, _)| (opcode, done)).collect()
}

#[test]
fn core_does_what_the_device_cannot() {
    for options in ["gen=spr", "gen=dsa2", "gen=spr,ops=3f", "gen=dsa2,profile=app"] {
        let device = Device::new(options);
        let ops = device.queue().ops;
        for flag in [false, true] {
            let options = Options { to_cache: flag, block_on_fault: flag, ..Options::default() };
            let mut engine = device.engine(options);
            for (opcode, done) in same_as_core(&mut engine, 5000) {
                match ops.contains(opcode) {
                    true => assert_eq!((done.done_by, done.descriptors), (DoneBy::Device, 1), "{opcode:?}"),
                    false => assert_eq!(done.done_by, DoneBy::Core(Why::Unsupported), "{opcode:?}"),
                }
            }
        }
    }
}

#[test]
fn long_operations_are_split() {
    let device = Device::new("gen=dsa2,profile=net");
    let most = device.queue().max_transfer_size as usize;
    assert_eq!(most, 16 << 10);
    let mut engine = device.engine(Options::default());
    let (src, mut dst) = (bytes(100_000, 5), vec![0; 100_000]);
    let done = copy(&mut engine, &src, &mut dst);
    assert_eq!((done.done_by, done.descriptors), (DoneBy::Device, 7));
    assert_eq!(src, dst);
    for (opcode, done) in same_as_core(&mut engine, 100_000) {
        assert!(done.descriptors > 1 || done.difference.is_some(), "{opcode:?} {done:?}");
    }
}

#[test]
fn device_resumes_to_the_same_result() {
    for seed in 1..6 {
        let device = Device::new(&format!("gen=dsa2,profile=net,seed={seed},fault=page:0.6"));
        let mut engine = device.engine(Options { resumes: 1000, ..Options::default() });
        let done = same_as_core(&mut engine, 60_000);
        let resumed: u32 = done.iter().map(|(_, done)| done.resumed).sum();
        assert!(resumed > 10, "{done:?}");
        for (opcode, done) in done {
            // The core completes pieces that the device copied backwards.
            let faulted = matches!(done.done_by, DoneBy::Both(Why::PageFault { .. }));
            assert!(done.done_by == DoneBy::Device || faulted, "{opcode:?} {done:?}");
        }
    }
}

#[test]
fn core_finishes_a_fault_where_asked() {
    let device = Device::new("gen=dsa2,seed=3,fault=page:1");
    let mut engine = device.engine(Options { resumes: 0, ..Options::default() });
    let mut finished = 0;
    for (opcode, done) in same_as_core(&mut engine, 9000) {
        assert_eq!(done.resumed, 0);
        let by_core = matches!(done.done_by, DoneBy::Both(Why::PageFault { .. }));
        finished += u32::from(by_core);
        assert!(by_core || done.difference.is_some(), "{opcode:?} {done:?}");
    }
    assert!(finished >= 4);
}

#[test]
fn core_redoes_a_piece_after_an_error() {
    let device = Device::new("gen=dsa2,profile=net,fault=hw:1");
    let mut engine = device.engine(Options::default());
    let (src, mut dst) = (bytes(50_000, 5), vec![0; 50_000]);
    let done = copy(&mut engine, &src, &mut dst);
    assert_eq!((done.done_by, done.descriptors), (DoneBy::Both(Why::Failed(Status::HARDWARE)), 1));
    assert_eq!(src, dst);
    assert_eq!(
        done.done_by.to_string(),
        "device, finished by the core: the device failed: hardware error (0x20)"
    );
    same_as_core(&mut engine, 9000);
}

#[test]
fn core_makes_overlapping_copies() {
    let device = Device::new("gen=spr,fault=hw:1");
    let mut engine = device.engine(Options::default());
    let mut memory = bytes(4096, 9);
    let mut expected = memory.clone();
    expected.copy_within(..2048, 100);
    let base = memory.as_mut_ptr();
    let done = engine.run(unbounded(base, base.wrapping_add(100), 2048)).unwrap();
    assert_eq!((done.done_by, memory), (DoneBy::Core(Why::Overlap), expected));
}

#[test]
fn mute_device_loses_nothing() {
    for fault in ["drop:1", "lost:1", "halt:1"] {
        let device = Device::new(&format!("gen=spr,fault={fault}"));
        let mut engine = device.engine(Options { timeout: Duration::from_millis(50), ..Options::default() });
        let (src, mut dst) = (bytes(5000, 5), vec![0; 5000]);
        if fault == "halt:1" {
            copy(&mut engine, &src, &mut dst);
            dst.fill(0);
        }
        let done = copy(&mut engine, &src, &mut dst);
        assert_eq!(done.done_by, DoneBy::Both(Why::Lost), "{fault}");
        assert_eq!(src, dst);
        assert!(!engine.has_device());
        dst.fill(0);
        assert_eq!(copy(&mut engine, &src, &mut dst).done_by, DoneBy::Core(Why::NoDevice));
        assert_eq!(src, dst);
    }
}

#[test]
fn record_is_reused_only_after_a_fence() {
    let device = Device::new("gen=spr,fault=weak");
    let mut engine = device.engine(Options { timeout: Duration::from_secs(2), ..Options::default() });
    let (src, mut dst) = (bytes(500, 5), vec![0; 500]);
    for _ in 0..100 {
        assert_eq!(copy(&mut engine, &src, &mut dst).done_by, DoneBy::Device);
    }
}

#[test]
fn full_shared_queue_leaves_it_to_the_core() {
    let device = Device::new("gen=spr,profile=app,fault=retry:1:100000000");
    let mut engine = device.engine(Options::default());
    let (src, mut dst) = (bytes(5000, 5), vec![0; 5000]);
    assert_eq!(copy(&mut engine, &src, &mut dst).done_by, DoneBy::Core(Why::QueueFull));
    assert_eq!(src, dst);
}

fn stepped(options: &str) -> (Engine, SimEngine, WqInfo) {
    stepped_with(options, Options::default().timeout)
}

fn stepped_with(options: &str, timeout: Duration) -> (Engine, SimEngine, WqInfo) {
    let (device, sim) = SimDevice::stepped("dsa-sim0", options.parse::<SimOptions>().unwrap()).unwrap();
    let wq = device.work_queues().remove(0);
    let portal = device.open(&wq.name).unwrap();
    (Engine::new(Portal::from(portal), wq.clone(), Options { timeout, ..Options::default() }), sim, wq)
}

/// Nothing completes while the only stepping thread waits.
#[test]
fn device_without_stepper_is_refused() {
    let (src, mut dst) = (bytes(100, 3), [0; 100]);
    let run = |engine: &mut Engine, dst: &mut [u8]| {
        engine.run(Operation::Copy { src: src[..].into(), dst: dst.into() })
    };
    // After a step in this thread, the call is refused at once, without the timeout.
    let (mut engine, mut sim, wq) = stepped_with("gen=spr", Duration::MAX);
    sim.step();
    let refused = Err(OpsError::Stepped { wq: wq.name });
    assert_eq!(run(&mut engine, &mut dst), refused);
    assert!(engine.has_device() && engine.in_flight() == 0);
    assert_eq!(dst, [0; 100]);
    let (mut unstepped, _kept, _) = stepped_with("gen=spr", Duration::from_millis(20));
    assert_eq!(run(&mut unstepped, &mut dst), refused, "no step was made within the timeout");
    assert!(unstepped.has_device());
}

#[test]
fn many_operations_are_in_flight() {
    let (mut engine, mut sim, wq) = stepped("gen=spr,profile=vhost");
    let limit = wq.size as usize;
    let src = bytes(3000, 11);
    let mut dst = vec![vec![0; 3000]; limit + 1];
    let submit = |engine: &mut Engine, dst: &mut Vec<u8>| {
        engine.submit(unbounded(src.as_ptr(), dst.as_mut_ptr(), 3000))
    };
    let (last, others) = dst.split_last_mut().unwrap();
    let mut tickets: Vec<_> = others.iter_mut().map(|dst| submit(&mut engine, dst).unwrap()).collect();
    let full = submit(&mut engine, last).unwrap_err();
    assert_eq!(full, OpsError::Full { wq: "wq0.0".into(), limit });
    assert!(full.to_string().contains("poll first"));
    assert_eq!(engine.poll(), None, "the device has not been stepped");
    assert!(others.iter().all(|dst| dst.iter().all(|&byte| byte == 0)), "nothing is copied at submission");
    assert_eq!(sim.run_until_idle(), limit);
    while let Some((ticket, done)) = engine.poll() {
        assert_eq!((done.done_by, done.descriptors), (DoneBy::Device, 1));
        let at = tickets.iter().position(|&waiting| waiting == ticket).expect("a ticket comes once");
        tickets.swap_remove(at);
    }
    assert!(tickets.is_empty() && engine.in_flight() == 0);
    assert!(others.iter().all(|dst| *dst == src));
    submit(&mut engine, last).unwrap();
    drop(engine);
    sim.run_until_idle();
    assert!(last.iter().all(|&byte| byte == 0), "a dropped engine's operations do not touch memory");
}

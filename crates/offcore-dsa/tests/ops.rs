//! Operations: their results do not depend on the executor.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use offcore_dsa::ops::{Done, DoneBy, Engine, Operation, Why};
use offcore_dsa::sim::SimDevice;
use offcore_dsa::wq::OpSet;
use offcore_dsa::{Opcode, Portal, Status};

/// A device that a thread steps continuously.
struct Device {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Device {
    /// Returns a device, an engine over its first queue, and the operations of the queue.
    fn start(options: &str, timeout: Duration) -> (Self, Engine, OpSet) {
        let (device, mut steps) = SimDevice::stepped("dsa-sim0", options.parse().unwrap()).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                if steps.run_until_idle() == 0 {
                    std::thread::yield_now();
                }
            }
        });
        let wq = device.work_queues().remove(0);
        let (portal, ops) = (Portal::from(device.open(&wq.name).unwrap()), wq.ops);
        (Self { stop, thread: Some(thread) }, Engine::new(portal, wq, timeout), ops)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

const TIMEOUT: Duration = Duration::from_secs(10);

/// Runs every operation on `len` bytes; returns the results and the contents of memory.
fn everything(engine: &mut Engine, len: usize) -> Vec<(Opcode, Done, Vec<u8>)> {
    let data: Vec<u8> = (0..len).map(|at| (at as u8).wrapping_mul(7) ^ (at >> 8) as u8).collect();
    let mut other = data.clone();
    other.iter_mut().skip(len / 3).step_by(97).for_each(|byte| *byte ^= 0x40);
    let run = |which| {
        let mut memory = vec![0; len];
        let (src, dst) = (&data[..], &mut memory[..]);
        let operation = match which {
            0 => Operation::Copy { src, dst },
            1 => Operation::Fill { pattern: 0x0123_4567_89ab_cdef, dst },
            2 => Operation::Compare { first: src, second: &other },
            3 => Operation::Compare { first: src, second: src },
            _ => Operation::Crc { src, seed: 5 },
        };
        let opcode = operation.opcode();
        (opcode, engine.run(operation).unwrap(), memory)
    };
    (0..5).map(run).collect()
}

/// Checks that the results equal the core's, and returns them.
fn same_as_core(engine: &mut Engine, len: usize) -> Vec<(Opcode, Done)> {
    let (ours, cores) = (everything(engine, len), everything(&mut Engine::core(), len));
    for ((opcode, done, memory), (_, by_core, expected)) in ours.iter().zip(&cores) {
        assert_eq!((done.difference, done.crc), (by_core.difference, by_core.crc), "{opcode:?}");
        assert!(memory == expected, "{opcode:?} left something else in memory");
    }
    ours.into_iter().map(|(opcode, done, _)| (opcode, done)).collect()
}

#[test]
fn core_has_every_operation() {
    let mut engine = Engine::core();
    let (digits, mut dst) = (*b"123456789", [0; 9]);
    let done = Done { difference: None, crc: 0, done_by: DoneBy::Core(Why::NoDevice), descriptors: 0 };
    assert_eq!(engine.run(Operation::Copy { src: &digits, dst: &mut dst }), Ok(done));
    assert_eq!(dst, digits);
    // The check value of CRC-32C (iSCSI).
    let crc = engine.run(Operation::Crc { src: &digits, seed: 0 });
    assert_eq!(crc, Ok(Done { crc: 0xe306_9283, ..done }));
    assert_eq!(engine.run(Operation::Compare { first: &digits, second: &dst }), Ok(done));
    dst[7] = 0;
    let different = engine.run(Operation::Compare { first: &digits, second: &dst });
    assert_eq!(different, Ok(Done { difference: Some(7), ..done }));
    assert_eq!(engine.run(Operation::Fill { pattern: 0x0807_0605_0403_0201, dst: &mut dst }), Ok(done));
    assert_eq!(dst, [1, 2, 3, 4, 5, 6, 7, 8, 1]);
    let nothing = engine.run(Operation::Crc { src: &[], seed: 7 });
    assert_eq!(nothing, Ok(Done { crc: 7, done_by: DoneBy::Core(Why::Nothing), ..done }));
    let error = engine.run(Operation::Copy { src: &digits, dst: &mut dst[..2] }).unwrap_err();
    assert_eq!(error.to_string(), "memory move: the second slice has 2 bytes, expected 9");
}

#[test]
fn core_executes_unsupported_operations() {
    for options in ["gen=spr", "gen=dsa2", "gen=spr,ops=3f", "gen=dsa2,profile=app"] {
        let (_device, mut engine, ops) = Device::start(options, TIMEOUT);
        for (opcode, done) in same_as_core(&mut engine, 5000) {
            match ops.contains(opcode) {
                true => assert_eq!((done.done_by, done.descriptors), (DoneBy::Device, 1), "{opcode:?}"),
                false => assert_eq!(done.done_by, DoneBy::Core(Why::Unsupported), "{opcode:?}"),
            }
        }
    }
}

#[test]
fn long_operations_are_split() {
    // The maximum transfer size is 16 KiB. The first difference is in the third piece.
    let (_device, mut engine, _) = Device::start("gen=dsa2,profile=net", TIMEOUT);
    let done = same_as_core(&mut engine, 100_000);
    assert!(done.iter().all(|(_, done)| done.done_by == DoneBy::Device));
    assert_eq!(done.iter().map(|(_, done)| done.descriptors).collect::<Vec<_>>(), [7, 7, 3, 7, 7]);
}

#[test]
fn core_finishes_failed_operations() {
    for (fault, failed) in [
        ("profile=net,fault=page:0.3", Why::Failed(Status::PAGE_FAULT)),
        ("profile=net,fault=hw:0.3", Why::Failed(Status::HARDWARE)),
        ("profile=app,fault=retry:1:100000000", Why::QueueFull),
    ] {
        let mut finished = 0;
        for seed in 1..6 {
            let (_device, mut engine, _) = Device::start(&format!("gen=dsa2,seed={seed},{fault}"), TIMEOUT);
            for (opcode, Done { done_by, .. }) in same_as_core(&mut engine, 60_000) {
                let by_core = matches!(done_by, DoneBy::Core(why) | DoneBy::Both(why) if why == failed);
                finished += u32::from(by_core);
                assert!(by_core || done_by == DoneBy::Device, "{opcode:?} {done_by}");
            }
        }
        assert!(finished > 5, "{fault}: {finished}");
    }
}

#[test]
fn unresponsive_device_loses_nothing() {
    for fault in ["drop:1", "lost:1", "halt:1"] {
        let (_device, mut engine, _) =
            Device::start(&format!("gen=spr,fault={fault}"), Duration::from_millis(50));
        let done = same_as_core(&mut engine, 5000);
        assert!(done.iter().any(|(_, done)| done.done_by == DoneBy::Both(Why::Lost)), "{fault}: {done:?}");
        let (_, last) = done[4];
        assert_eq!((last.done_by, last.descriptors), (DoneBy::Core(Why::NoDevice), 0), "{fault}");
    }
}

#[test]
fn record_is_reused_only_after_a_fence() {
    let (_device, mut engine, _) = Device::start("gen=spr,fault=weak", Duration::from_secs(2));
    for _ in 0..20 {
        assert!(same_as_core(&mut engine, 500).iter().all(|(_, done)| done.done_by == DoneBy::Device));
    }
}

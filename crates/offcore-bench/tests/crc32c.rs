//! Tests that all engines compute the same CRC-32C for the same bytes: the core, DSA (simulated) with its CRC
//! generation operation, and a device's kernel (its replacement on threads).
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use offcore_dsa::Portal;
use offcore_dsa::ops::{DoneBy, Engine, Operation};
use offcore_dsa::sim::SimDevice;
use offcore_gpu::device::{Launch, Memory};
use offcore_gpu::host::HostDevice;
use offcore_gpu::layout::Kind;
use offcore_gpu::pipeline::{PipelineWorker, Setup, Work, pipeline};
use offcore_mem::{HEADROOM, Hugepages, Packet, Pool};

const SKIP: usize = 42;

/// Returns for packets of these lengths their bytes and the results of a pipeline.
fn results(worker: PipelineWorker<'_>, lens: &[usize]) -> Vec<(Vec<u8>, u32)> {
    let pool = Pool::new(1024, 2048, Hugepages::None).unwrap();
    let mut cache = pool.cache();
    let work = Work { kind: Kind::Crc32c, skip: SKIP as u32, ..Work::default() };
    let timeout = Duration::from_secs(10);
    let setup =
        Setup { burst: lens.len(), slots: 2, worker, work, timeout, pool, hugepages: Hugepages::None };
    let (mut front, mut back) = pipeline(setup).unwrap();
    let mut packets: Vec<Packet> = lens
        .iter()
        .map(|&len| {
            let mut packet = cache.take_sized(HEADROOM, len).unwrap();
            packet.bytes_mut().iter_mut().enumerate().for_each(|(i, byte)| *byte = ((i * 31) ^ len) as u8);
            packet
        })
        .collect();
    assert!(front.submit(&mut packets));
    let since = Instant::now();
    while back.done().is_none() {
        assert!(since.elapsed() < Duration::from_secs(10), "no progress for 10 s");
        std::thread::yield_now();
    }
    let done = back.done().unwrap();
    let results = done.packets.drain(..).zip(done.results).map(|(packet, &result)| {
        let bytes = packet.bytes().to_vec();
        cache.free(packet);
        (bytes, result)
    });
    let results = results.collect();
    back.retire();
    results
}

/// Calls `call` with an engine on a simulated device that runs in parallel.
fn by_dsa(call: impl FnOnce(&mut Engine)) {
    let (device, mut steps) = SimDevice::stepped("dsa-sim0", "profile=net".parse().unwrap()).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                if steps.run_until_idle() == 0 {
                    std::thread::yield_now();
                }
            }
        });
        let wq = device.work_queues().remove(0);
        let portal = Portal::from(device.open(&wq.name).unwrap());
        call(&mut Engine::new(portal, wq, Duration::from_secs(10)));
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn core_dsa_and_kernels_agree() {
    let lens: Vec<usize> = (SKIP..SKIP + 70).chain([128, 512, 1024, 1514]).collect();
    let by_core = results(PipelineWorker::Cpu, &lens);
    by_dsa(|dsa| {
        for (bytes, result) in &by_core {
            let payload = &bytes[SKIP..];
            let done = dsa.run(Operation::Crc { src: payload, seed: 0 }).unwrap();
            // The device does not process an operation of zero bytes.
            assert!(payload.is_empty() || done.done_by == DoneBy::Device, "{:?}", done.done_by);
            assert_eq!(done.crc, *result, "{} bytes", payload.len());
        }
    });
    let Ok(mut device) = HostDevice::new() else { return };
    for launch in Launch::ALL {
        for memory in Memory::ALL {
            let worker =
                PipelineWorker::Device { device: &mut device, launch, blocks: 1, threads: 64, memory };
            assert_eq!(results(worker, &lens), by_core, "{launch}, {memory}");
        }
    }
}

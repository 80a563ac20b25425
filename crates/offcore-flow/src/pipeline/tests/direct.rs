//! Packets in device memory. Their data is not in the pool.

use offcore_gpu::device::GpuDevice;
use offcore_gpu::host::Fault;

use super::*;

/// A device with memory for the packets of `pool`; `None` without a C++ compiler.
fn device(pool: &Pool) -> Option<HostDevice> {
    let mut device = HostDevice::new().ok()?;
    device.pool(pool.chunks() * pool.chunk_size()).unwrap();
    Some(device)
}

fn work_queues_of(pool: &'static Pool, stats: &StatsPage, device: &mut HostDevice) -> (WorkTx, WorkRx) {
    let worker = PipelineWorker::Device {
        device,
        launch: Launch::Kernel,
        blocks: 1,
        threads: 32,
        memory: Memory::Direct,
    };
    let work = Work { kind: Kind::Crc32c, swap: true, ..Work::default() };
    let mut setup = setup(pool, worker, 8, work);
    setup.timeout = Duration::from_millis(300);
    work_queues(setup, queues(stats, Duration::ZERO, OnHit::Pass)).unwrap()
}

/// Packets filled with a pattern, so that writes to the pool are detected.
fn packets(side: &mut Side, count: usize) -> Burst {
    let packet = |side: &mut Side| {
        let mut packet = side.cache.take_sized(HEADROOM, 60).unwrap();
        packet.bytes_mut().fill(0xee); // copy-ok: a test fills packets
        packet
    };
    (0..count).map(|_| packet(side)).collect()
}

fn all_are_back(pool: &Pool, side: &mut Side) {
    let all: Vec<Packet> = std::iter::from_fn(|| side.cache.take()).collect();
    assert_eq!(all.len(), pool.chunks());
    side.cache.free_all(all);
}

#[test]
fn segmented_direct_packets_are_dropped() {
    let pool = Pool::new(256, 2048, Hugepages::None).unwrap();
    let stats = StatsPage::new(1 << 14).unwrap();
    let Some(mut device) = device(pool) else { return };
    let (mut tx, mut rx) = work_queues_of(pool, &stats, &mut device);
    let mut side = side(pool);
    let mut burst = packets(&mut side, 6);
    burst.push(side.cache.take_chain(HEADROOM, 5000).unwrap());
    burst.extend(packets(&mut side, 2));
    tx.tx(&mut side.ctx(), &mut burst);
    assert_eq!((burst.len(), tx.counters().dropped(DropReason::TooBig)), (0, 1));
    let since = Instant::now();
    let mut came = Burst::new();
    while came.len() < 8 {
        assert!(since.elapsed() < Duration::from_secs(10), "nothing has come for 10 s");
        rx.rx(&mut side.ctx(), &mut came);
    }
    assert!(came.iter().all(|packet| packet.bytes().iter().all(|byte| *byte == 0xee)));
    side.cache.free_all(came);
    assert!(tx.stop(&mut side.ctx()));
    all_are_back(pool, &mut side);
}

#[test]
fn packets_of_a_failed_device_are_dropped() {
    for fault in [Fault::Dies(2), Fault::Hangs(2)] {
        let pool = Pool::new(256, 2048, Hugepages::None).unwrap();
        let stats = StatsPage::new(1 << 14).unwrap();
        let Some(device) = device(pool) else { return };
        let (mut tx, mut rx) = work_queues_of(pool, &stats, &mut device.with_fault(fault));
        let mut side = side(pool);
        let (mut came, mut moved, mut left) = (0, Instant::now(), 10 * 8);
        while came + rx.counters().dropped(DropReason::Failed) < 80 {
            assert!(moved.elapsed() < Duration::from_secs(10), "nothing has come for 10 s");
            let mut burst = packets(&mut side, left.min(8));
            let offered = burst.len();
            tx.tx(&mut side.ctx(), &mut burst);
            left -= offered - burst.len();
            side.cache.free_all(burst.drain(..));
            rx.rx(&mut side.ctx(), &mut burst);
            if !burst.is_empty() {
                (came, moved) = (came + burst.len() as u64, Instant::now());
            }
            side.cache.free_all(burst);
        }
        assert_eq!((came, rx.counters().dropped(DropReason::Failed)), (16, 64), "{fault:?}");
        assert_eq!(
            [WorkCount::Failed, WorkCount::Quarantined].map(|which| rx.work.counter(which as usize).value()),
            [1, 0]
        );
        assert!(tx.stop(&mut side.ctx()));
        all_are_back(pool, &mut side);
    }
}

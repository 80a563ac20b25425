use offcore_mem::{HEADROOM, Hugepages, Packet, Pool, PoolCache};

use super::*;
use crate::device::Memory;
use crate::layout::{Kind, PoolView, TrieView, WorkView};
use crate::ring::{Collector, RingConfig, Submitter, burst_ring};

fn ring(slots: usize, burst: usize) -> (Submitter, Collector) {
    burst_ring(&RingConfig { slots, burst, keep_addresses: false, split: None, hugepages: Hugepages::None })
        .unwrap()
}

/// Returns a view with swap, and CRC-32C of all but the first 14 bytes.
fn view(pool: &Pool, submitter: &Submitter) -> PipelineView {
    PipelineView {
        pool: PoolView {
            base: pool.memory().0.as_ptr(),
            staging: ptr::null_mut(),
            chunk_shift: pool.chunk_size().trailing_zeros(),
            chunks: pool.chunks() as u32,
        },
        ring: submitter.view(),
        work: WorkView { kind: Kind::Crc32c, swap: 1, skip: 14, forced_ns: 0, trie: TrieView::EMPTY },
    }
}

/// Returns a service with one thread.
fn service(view: PipelineView, launch: Launch, memory: Memory) -> Service {
    Service { view, trie: None, launch, blocks: 1, threads: 1, memory }
}

/// Returns a packet whose bytes depend on its number.
fn packet(cache: &mut PoolCache, number: usize) -> Packet {
    let mut packet = cache.take_sized(HEADROOM, 60 + number % 400).unwrap();
    packet.bytes_mut().iter_mut().enumerate().for_each(|(at, byte)| *byte = content(number, at));
    packet
}

fn content(number: usize, at: usize) -> u8 {
    (number.wrapping_mul(2_654_435_761) >> 7).wrapping_add(at * 7) as u8
}

/// Checks a processed packet.
fn check(packet: &Packet, result: u32, number: usize) {
    let mut expected: Vec<u8> = (0..60 + number % 400).map(|at| content(number, at)).collect();
    expected[..12].rotate_left(6);
    assert_eq!(packet.bytes(), expected, "packet {number}");
    assert_eq!(result, crc32c::crc32c(&expected[14..]), "packet {number}");
}

/// Sends `bursts` bursts of `len` packets and checks every packet that comes back, also in staging memory.
fn every_packet_comes_back(
    pool: &'static Pool,
    launch: Launch,
    memory: Memory,
    blocks: u32,
    threads: u32,
    len: usize,
    bursts: u64,
) {
    let mut cache = pool.cache();
    let (mut submitter, mut collector) = ring(4, len);
    let service = Service { view: view(pool, &submitter), trie: None, launch, blocks, threads, memory };
    // SAFETY: pool and ring stay until the service has ended, below, and packets are read after their answer.
    let (mut launcher, mut watch) = unsafe { HostDevice::new().unwrap().serve(service) }.unwrap();
    let state = Arc::clone(&launcher.state);
    assert_eq!(state.staging.is_some(), memory == Memory::Gpu);
    let (mut next, mut expected, mut burst) = (0, 0, Vec::new());
    let (mut results, mut moved) = (vec![0; len], Instant::now());
    while expected < bursts as usize * len {
        if submitter.turn() < bursts && submitter.room(1) > 0 {
            burst.extend((next..next + len).map(|number| packet(&mut cache, number)));
            next += len;
            let turn = submitter.submit(&mut burst).unwrap();
            launcher.submitted(turn, len);
        }
        let Some(hits) = collector.answer(&mut results) else {
            assert!(moved.elapsed() < Duration::from_secs(10), "no burst has come back for 10 s");
            thread::yield_now();
            continue;
        };
        moved = Instant::now();
        assert_eq!(hits as usize, results.iter().filter(|result| **result != 0).count());
        let packets = &mut collector.oldest().unwrap().packets;
        for (packet, result) in packets.drain(..).zip(&results) {
            check(&packet, *result, expected);
            if let Some(staging) = &state.staging {
                let mut staged = vec![0; packet.len()];
                let at = packet.bytes().as_ptr().addr() - pool.memory().0.as_ptr().addr();
                staging.read_at(at, &mut staged);
                assert_eq!(staged, packet.bytes(), "packet {expected} in staging memory");
            }
            cache.free(packet);
            expected += 1;
        }
        collector.retire();
    }
    assert_eq!(watch.failure(), None);
    assert!(submitter.quit(launcher.waiters()) && Box::new(launcher).end());
    // The only other reference was the watch's.
    drop(watch);
    assert_eq!(Arc::strong_count(&state), 1);
}

#[test]
fn every_launch_processes_every_packet() {
    // Bursts of 1 to 4 packets, bursts longer than a block of 256 threads, and several laps.
    for (len, bursts) in [(1, 50), (4, 50), (7, 20), (64, 20), (257, 9), (1024, 6), (4096, 3)] {
        let pool = Pool::new(8 * len.max(64), 2048, Hugepages::None).unwrap();
        for (launch, memory) in
            Launch::ALL.into_iter().flat_map(|launch| Memory::ALL.map(|memory| (launch, memory)))
        {
            for (blocks, threads) in [(1, 1), (3, 32), (2, 1024)] {
                every_packet_comes_back(pool, launch, memory, blocks, threads, len, bursts);
            }
        }
    }
}

/// One device, two services.
#[test]
fn notes_name_the_stand_in_and_its_memory() {
    let pool = Pool::new(1024, 2048, Hugepages::None).unwrap();
    let mut device = HostDevice::new().unwrap();
    let mut notes = Vec::new();
    for memory in [Memory::Host, Memory::Gpu] {
        let (submitter, _collector) = ring(4, 1);
        let service = service(view(pool, &submitter), Launch::Kernel, memory);
        // SAFETY: the service ends before the ring is dropped.
        let Started { launcher, .. } = unsafe { device.start(service) }.unwrap();
        assert!(launcher.end());
        notes.push(device.notes());
    }
    assert!(notes[0].len() == 1 && notes[0][0].contains("say nothing about one"), "{notes:?}");
    let len = (pool.chunks() * pool.chunk_size()) >> 20;
    assert_eq!(notes[1][0], notes[0][0]);
    assert!(
        notes[1].len() == 2 && notes[1][1].starts_with(&format!("{len} MiB of this machine's")),
        "{notes:?}"
    );
}

/// A pool larger than any memory. None of it is accessed.
#[test]
fn unavailable_memory_is_refused() {
    let pool = Pool::new(64, 2048, Hugepages::None).unwrap();
    let (submitter, _collector) = ring(4, 1);
    let mut view = view(pool, &submitter);
    view.pool.chunks = u32::MAX;
    let service = service(view, Launch::Graph, Memory::Gpu);
    let mut device = HostDevice::new().unwrap();
    // SAFETY: nothing is started.
    let error = unsafe { device.start(service) }.unwrap_err().to_string();
    assert!(error.starts_with("host cannot serve a burst ring") && error.contains("MiB"), "{error}");
    assert_eq!(device.notes().len(), 1);
}

/// Submits three bursts to a device that fails at the second. Returns the failure, if it is detected.
fn second_burst_fails(fault: Fault) -> Option<String> {
    let pool = Pool::new(64, 2048, Hugepages::None).unwrap();
    let mut cache = pool.cache();
    let (mut submitter, mut collector) = ring(4, 1);
    let service = service(view(pool, &submitter), Launch::Kernel, Memory::Host);
    let mut device = HostDevice::new().unwrap().with_fault(fault);
    // SAFETY: pool and ring stay until the service has ended, below.
    let Started { mut launcher, mut watch, .. } = unsafe { device.start(service) }.unwrap();
    for number in 0..3 {
        let turn = submitter.submit(&mut vec![packet(&mut cache, number)]).unwrap();
        launcher.submitted(turn, 1);
    }
    let since = Instant::now();
    while collector.answer(&mut [0]).is_none() {
        assert!(since.elapsed() < Duration::from_secs(10), "the first burst was not answered");
        thread::yield_now();
    }
    cache.free_all(collector.oldest().unwrap().packets.drain(..));
    collector.retire();
    let since = Instant::now();
    let mut failure = None;
    while failure.is_none() && since.elapsed() < Duration::from_millis(200) {
        assert!(collector.answer(&mut [0]).is_none(), "what was not launched was answered");
        failure = watch.failure();
        thread::yield_now();
    }
    assert!(launcher.end());
    // The other packets are unchanged.
    for number in 1..3 {
        let oldest = collector.oldest().unwrap();
        assert_eq!((oldest.turn, oldest.packets[0].bytes()[0]), (number, content(number as usize, 0)));
        cache.free_all(oldest.packets.drain(..));
        collector.retire();
    }
    failure
}

#[test]
fn only_dead_device_reports_failure() {
    assert_eq!(second_burst_fails(Fault::Dies(1)).unwrap(), "its threads have ended");
    assert_eq!(second_burst_fails(Fault::Hangs(1)), None);
}

#[test]
fn numbers_out_of_range_are_refused() {
    let pool = Pool::new(64, 2048, Hugepages::None).unwrap();
    let (submitter, _collector) = ring(4, 1);
    for (blocks, threads, words) in
        [(0, 1, "0 blocks"), (65, 1, "1 to 64"), (1, 0, "0 threads"), (1, 1025, "1 to 1024")]
    {
        let service =
            Service { blocks, threads, ..service(view(pool, &submitter), Launch::Kernel, Memory::Host) };
        // SAFETY: nothing is started.
        let error = unsafe { HostDevice::new().unwrap().start(service) }.unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}

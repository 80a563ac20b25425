use std::time::Instant;

use offcore_mem::{HEADROOM, PoolCache};

use super::*;
use crate::host::{Fault, HostDevice};

const PATIENCE: Duration = Duration::from_millis(20);

fn work(kind: Kind, patterns: Option<&Patterns>) -> Work<'_> {
    Work { kind, swap: true, skip: 14, forced_ns: 0, patterns }
}

/// Bytes of packet `number`: lengths from 60 on, now and then several buffers.
fn content(number: usize) -> Vec<u8> {
    let len = if number % 37 == 36 { 5000 } else { 60 + number * 7 % 1400 };
    (0..len).map(|at| (number.wrapping_mul(2_654_435_761) >> 9).wrapping_add(at * 13) as u8).collect()
}

fn packet(pool: &Pool, cache: &mut PoolCache, number: usize) -> Packet {
    let bytes = content(number);
    let mut packet = cache.take_chain(HEADROOM, bytes.len()).unwrap();
    pool.segments_mut(&mut packet).flatten().zip(&bytes).for_each(|(to, from)| *to = *from);
    packet
}

/// What the packet must be afterwards, and its result.
fn expected(number: usize, kind: Kind) -> (Vec<u8>, u32) {
    let mut bytes = content(number);
    bytes[..12].rotate_left(6);
    let result = match kind {
        Kind::Crc32c => crc32c::crc32c(&bytes[14..]),
        Kind::Match => u32::from(bytes[14..].windows(3).any(|window| window == pattern())),
        _ => 0,
    };
    (bytes, result)
}

/// Occurs in some packets: 13 apart, as their bytes are.
fn pattern() -> [u8; 3] {
    [200, 213, 226]
}

/// Sends bursts of `burst` packets and looks at every packet that comes back. Returns what failed.
fn every_packet_is_right(worker: Worker<'_>, kind: Kind, burst: usize, bursts: usize) -> Option<String> {
    let pool = Pool::new(8 * burst.max(128), 2048, Hugepages::None).unwrap();
    let mut cache = pool.cache();
    let patterns = Patterns::from_list([pattern()]).unwrap();
    let swapped = !matches!(worker, Worker::Nobody);
    let setup = Setup {
        burst,
        slots: 4,
        worker,
        work: work(kind, Some(&patterns)),
        patience: PATIENCE,
        pool,
        hugepages: Hugepages::None,
    };
    let (mut front, mut back) = pipeline(setup).unwrap();
    let (mut sent, mut received, mut gathered) = (0, 0, Vec::new());
    let mut moved = Instant::now();
    while received < bursts * burst {
        if sent < bursts * burst && front.room(1) > 0 {
            gathered.extend((sent..sent + burst).map(|number| packet(pool, &mut cache, number)));
            sent += burst;
            assert!(front.submit(&mut gathered) && gathered.is_empty());
        }
        let Some(done) = back.done() else {
            assert!(moved.elapsed() < Duration::from_secs(10), "nothing has come back for 10 s");
            std::thread::yield_now();
            continue;
        };
        moved = Instant::now();
        assert_eq!(done.hits as usize, done.results[..burst].iter().filter(|result| **result != 0).count());
        for (packet, result) in done.packets.drain(..).zip(done.results) {
            let right = if swapped { expected(received, kind) } else { (content(received), 0) };
            let found: Vec<u8> = pool.segments(&packet).flatten().copied().collect();
            assert_eq!((found, *result), right, "packet {received}");
            received += 1;
            cache.free(packet);
        }
        back.retire();
    }
    assert!(back.done().is_none() && back.is_waiting() && front.is_empty());
    drop(front);
    assert!(!back.is_waiting());
    let all: Vec<Packet> = std::iter::from_fn(|| cache.take()).collect();
    assert_eq!(all.len(), pool.chunks());
    cache.free_all(all);
    back.failure().map(str::to_owned)
}

#[test]
fn every_packet_has_its_result_whoever_works() {
    for kind in [Kind::Nothing, Kind::Crc32c, Kind::Match] {
        for (burst, bursts) in [(1, 100), (7, 40), (64, 12), (257, 8), (1024, 6)] {
            assert_eq!(every_packet_is_right(Worker::Nobody, kind, burst, bursts), None);
            assert_eq!(every_packet_is_right(Worker::Cpu, kind, burst, bursts), None);
            for launch in Launch::ALL {
                let mut device = HostDevice::new().unwrap();
                let worker = Worker::Device {
                    device: &mut device,
                    launch,
                    blocks: 2,
                    lanes: 64,
                    memory: Memory::Host,
                };
                assert_eq!(every_packet_is_right(worker, kind, burst, bursts), None);
            }
        }
    }
}

/// What it swapped is not swapped again, and what it did not is.
#[test]
fn the_cpu_goes_on_where_a_device_dies_or_stands_still() {
    for (fault, words) in [(Fault::Dies(5), "have ended"), (Fault::Stuck(5), "has not answered")] {
        for burst in [1, 64, 300] {
            let mut device = HostDevice::new().unwrap().with_fault(fault);
            let worker = Worker::Device {
                device: &mut device,
                launch: Launch::Kernel,
                blocks: 1,
                lanes: 32,
                memory: Memory::Host,
            };
            let failure = every_packet_is_right(worker, Kind::Crc32c, burst, 40).unwrap();
            assert!(failure.contains(words), "{failure}");
        }
    }
}

#[test]
fn a_burst_that_a_device_has_half_done_is_done_once() {
    let pool = Pool::new(128, 2048, Hugepages::None).unwrap();
    let mut cache = pool.cache();
    let mut device = HostDevice::new().unwrap().with_fault(Fault::Dies(0));
    let worker = Worker::Device {
        device: &mut device,
        launch: Launch::Kernel,
        blocks: 1,
        lanes: 1,
        memory: Memory::Host,
    };
    let setup = Setup {
        burst: 2,
        slots: 2,
        worker,
        work: work(Kind::Crc32c, None),
        patience: PATIENCE,
        pool,
        hugepages: Hugepages::None,
    };
    let (mut front, mut back) = pipeline(setup).unwrap();
    let mut packets = vec![packet(pool, &mut cache, 0), packet(pool, &mut cache, 1)];
    assert!(front.submit(&mut packets));
    let since = Instant::now();
    while back.watch.as_mut().unwrap().failure().is_none() {
        assert!(since.elapsed() < Duration::from_secs(10), "the device lives");
        std::thread::yield_now();
    }
    // As if the device had swapped the first packet's addresses before it died.
    back.collector.oldest().unwrap().packets[0].bytes_mut()[..12].rotate_left(6);
    let done = loop {
        match back.done() {
            Some(_) => break back.done().unwrap(),
            None => assert!(since.elapsed() < Duration::from_secs(10), "the burst does not come back"),
        }
    };
    for (number, packet) in done.packets.drain(..).enumerate() {
        let right = expected(number, Kind::Crc32c);
        assert_eq!((packet.bytes().to_vec(), done.results[number]), right);
        cache.free(packet);
    }
    back.retire();
}

#[test]
fn what_cannot_be_is_refused_by_name() {
    let pool = Pool::new(64, 2048, Hugepages::None).unwrap();
    let setup = |worker, burst, slots, kind| Setup {
        burst,
        slots,
        worker,
        work: work(kind, None),
        patience: PATIENCE,
        pool,
        hugepages: Hugepages::None,
    };
    let mut device = HostDevice::new().unwrap();
    let worker = Worker::Device {
        device: &mut device,
        launch: Launch::Persistent,
        blocks: 65,
        lanes: 1,
        memory: Memory::Host,
    };
    for (setup, words) in [
        (setup(Worker::Cpu, 0, 2, Kind::Nothing), "packets of a burst: found 0"),
        (setup(Worker::Cpu, 1, 3, Kind::Nothing), "slots of a burst ring: found 3"),
        (setup(Worker::Cpu, 1, 2, Kind::Match), "without patterns"),
        (setup(worker, 1, 2, Kind::Nothing), "65 blocks"),
    ] {
        let error = pipeline(setup).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}

mod direct;

use std::time::Instant;

use offcore_mem::{HEADROOM, PoolCache};

use super::*;
use crate::device::Watch;
use crate::host::{Fault, HostDevice};

/// With devices that fail, and with those that do not, however busy the machine is.
const PATIENCE: Duration = Duration::from_millis(300);
const MUCH_PATIENCE: Duration = Duration::from_secs(10);
const SKIP: usize = 14;

fn work(kind: Kind, patterns: Option<&Patterns>) -> Work<'_> {
    Work { kind, swap: true, skip: SKIP as u32, split_at: None, forced_ns: 0, patterns }
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

/// The packet with its first `at` bytes in a buffer of their own, if it has more and all of them in one.
fn split(pool: &Pool, cache: &mut PoolCache, mut packet: Packet, at: usize) -> Packet {
    if packet.is_segmented() || packet.len() <= at {
        return packet;
    }
    let mut header = cache.take_sized(HEADROOM, at).unwrap();
    header.bytes_mut().copy_from_slice(&packet.bytes()[..at]);
    // What the device must not need.
    packet.bytes_mut()[..at].fill(0xee);
    packet.pull(at);
    pool.link(header, packet)
}

/// What the packet must be afterwards, and its result.
fn expected(number: usize, kind: Kind, skip: usize) -> (Vec<u8>, u32) {
    let mut bytes = content(number);
    bytes[..12].rotate_left(6);
    let result = match kind {
        Kind::Crc32c => crc32c::crc32c(bytes.get(skip..).unwrap_or_default()),
        Kind::Match => {
            u32::from(bytes.get(skip..).unwrap_or_default().windows(3).any(|window| window == pattern()))
        }
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
    every_packet_is_right_split(worker, (kind, None), burst, bursts, MUCH_PATIENCE)
}

/// The same where packets are split, if `split_at` is given.
fn every_packet_is_right_split(
    worker: Worker<'_>,
    (kind, split_at): (Kind, Option<usize>),
    burst: usize,
    bursts: usize,
    patience: Duration,
) -> Option<String> {
    let skip = split_at.unwrap_or(SKIP);
    let pool = Pool::new(16 * burst.max(128), 2048, Hugepages::None).unwrap();
    let mut cache = pool.cache();
    let patterns = Patterns::from_list([pattern()]).unwrap();
    let swapped = !matches!(worker, Worker::Nobody);
    let setup = Setup {
        burst,
        slots: 4,
        worker,
        work: Work { split_at, ..work(kind, Some(&patterns)) },
        patience,
        pool,
        hugepages: Hugepages::None,
    };
    let (mut front, mut back) = pipeline(setup).unwrap();
    let (mut sent, mut received, mut gathered) = (0, 0, Vec::new());
    let mut moved = Instant::now();
    while received < bursts * burst {
        if sent < bursts * burst && front.room(1) > 0 {
            gathered.extend((sent..sent + burst).map(|number| {
                let packet = packet(pool, &mut cache, number);
                match split_at {
                    Some(at) => split(pool, &mut cache, packet, at),
                    None => packet,
                }
            }));
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
            let right = if swapped { expected(received, kind, skip) } else { (content(received), 0) };
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
    let failure = back.failure().map(str::to_owned);
    drop(back);
    let all: Vec<Packet> = std::iter::from_fn(|| cache.take()).collect();
    assert_eq!(all.len(), pool.chunks());
    cache.free_all(all);
    failure
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

#[test]
fn packets_that_are_split_have_the_results_of_what_is_behind_the_split() {
    for kind in [Kind::Nothing, Kind::Crc32c, Kind::Match] {
        for (split_at, burst, bursts) in
            [(60, 1, 100), (60, 257, 8), (61, 64, 12), (14, 64, 12), (1400, 64, 12)]
        {
            let split_at = Some(split_at);
            let right =
                every_packet_is_right_split(Worker::Cpu, (kind, split_at), burst, bursts, MUCH_PATIENCE);
            assert_eq!(right, None);
            for (launch, memory) in
                Launch::ALL.into_iter().flat_map(|launch| Memory::ALL.map(|memory| (launch, memory)))
            {
                let mut device = HostDevice::new().unwrap();
                let worker = Worker::Device { device: &mut device, launch, blocks: 2, lanes: 64, memory };
                assert_eq!(
                    every_packet_is_right_split(worker, (kind, split_at), burst, bursts, MUCH_PATIENCE),
                    None
                );
            }
        }
    }
    for fault in [Fault::Dies(5), Fault::Stuck(5)] {
        let mut device = HostDevice::new().unwrap().with_fault(fault);
        let worker = Worker::Device {
            device: &mut device,
            launch: Launch::Kernel,
            blocks: 1,
            lanes: 32,
            memory: Memory::Host,
        };
        every_packet_is_right_split(worker, (Kind::Crc32c, Some(60)), 64, 40, PATIENCE).unwrap();
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
            let failure =
                every_packet_is_right_split(worker, (Kind::Crc32c, None), burst, 40, PATIENCE).unwrap();
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
    while back.serving.as_mut().unwrap().watch.failure().is_none() {
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
        let right = expected(number, Kind::Crc32c, SKIP);
        assert_eq!((packet.bytes().to_vec(), done.results[number]), right);
        cache.free(packet);
    }
    back.retire();
}

/// A device that stands still for as long as `still` is set, and does not end when it is asked to.
#[derive(Debug, Default)]
struct Standing {
    still: Arc<AtomicBool>,
    view: Arc<std::sync::Mutex<Option<PipelineView>>>,
}

impl Device for Standing {
    fn name(&self) -> &str {
        "standing"
    }

    unsafe fn start(&mut self, service: Service) -> Result<Started, DeviceError> {
        self.still.store(true, Ordering::Relaxed);
        *self.view.lock().unwrap() = Some(service.view);
        let half = || Standing { still: Arc::clone(&self.still), view: Arc::default() };
        Ok(Started { launcher: Box::new(half()), watch: Box::new(half()), slots: None })
    }
}

// SAFETY: only this test's one thread looks at what the view points to.
unsafe impl Send for Standing {}

impl Launcher for Standing {
    fn submitted(&mut self, turn: u64, _: usize) {
        assert!(turn < 2, "it has failed, and is told of turn {turn}");
    }

    fn end(self: Box<Self>) -> bool {
        !self.still.load(Ordering::Relaxed)
    }

    fn waiters(&self) -> usize {
        1
    }
}

impl Watch for Standing {
    fn failure(&mut self) -> Option<String> {
        None
    }

    fn give_up(&mut self) -> bool {
        !self.still.load(Ordering::Relaxed)
    }
}

#[test]
fn what_a_device_that_stands_still_may_write_stays_behind_until_it_has_ended() {
    let pool = Pool::new(128, 2048, Hugepages::None).unwrap();
    let mut cache = pool.cache();
    let mut device = Standing::default();
    let (still, view) = (Arc::clone(&device.still), Arc::clone(&device.view));
    let worker = Worker::Device {
        device: &mut device,
        launch: Launch::Kernel,
        blocks: 1,
        lanes: 1,
        memory: Memory::Host,
    };
    let work = work(Kind::Crc32c, None);
    let setup =
        Setup { burst: 2, slots: 4, worker, work, patience: PATIENCE, pool, hugepages: Hugepages::None };
    let (mut front, mut back) = pipeline(setup).unwrap();
    let mut number = 0;
    let mut submit = |front: &mut Front, cache: &mut PoolCache| {
        let mut packets = vec![packet(pool, cache, number), packet(pool, cache, number + 1)];
        number += 2;
        assert!(front.submit(&mut packets));
    };
    let mut received = 0;
    let mut receive = |back: &mut Back, cache: &mut PoolCache| {
        let since = Instant::now();
        while back.done().is_none() {
            assert!(since.elapsed() < Duration::from_secs(10), "the burst does not come back");
        }
        let done = back.done().unwrap();
        for (packet, result) in done.packets.drain(..).zip(done.results) {
            assert_eq!((packet.bytes().to_vec(), *result), expected(received, Kind::Crc32c, SKIP));
            received += 1;
            cache.free(packet);
        }
        back.retire();
    };
    submit(&mut front, &mut cache);
    submit(&mut front, &mut cache);
    receive(&mut back, &mut cache);
    assert_eq!(back.quarantined(), 2);
    assert!(back.failure().unwrap().contains("does not end"), "{:?}", back.failure());
    receive(&mut back, &mut cache);
    assert_eq!(back.quarantined(), 4);
    // It is told of no more, so their packets go on themselves, whatever it does now to those that it knows.
    submit(&mut front, &mut cache);
    let known = view.lock().unwrap().unwrap();
    let ring = known.ring;
    for slot in 0..4 {
        // SAFETY: descriptors and packets are inside the ring and the pool, and this is the only thread.
        unsafe {
            let head = ring.slots.add(slot * ring.slot_stride as usize).cast::<u32>();
            assert_eq!(head.read(), u32::from(slot < 2), "the lap of slot {slot}");
            for index in 0..2 * usize::from(slot < 2) {
                let told = head.add(2).cast::<crate::layout::PacketDescriptor>().add(index).read();
                let at = ((told.chunk as usize) << known.pool.chunk_shift) + usize::from(told.offset);
                known.pool.base.add(at).write_bytes(0xee, 12);
            }
        }
    }
    receive(&mut back, &mut cache);
    assert_eq!(back.quarantined(), 4);
    // Now it has ended.
    still.store(false, Ordering::Relaxed);
    submit(&mut front, &mut cache);
    receive(&mut back, &mut cache);
    assert_eq!(back.quarantined(), 0);
    drop(front);
    let all: Vec<Packet> = std::iter::from_fn(|| cache.take()).collect();
    assert_eq!(all.len(), pool.chunks());
    cache.free_all(all);
}

/// A device that answers when it is told to, and counts how often it is asked whether it lives.
#[derive(Debug, Clone, Default)]
struct Asked(Arc<AtomicBool>, Arc<std::sync::atomic::AtomicUsize>);

impl Device for Asked {
    fn name(&self) -> &str {
        "asked"
    }

    unsafe fn start(&mut self, _: Service) -> Result<Started, DeviceError> {
        Ok(Started { launcher: Box::new(self.clone()), watch: Box::new(self.clone()), slots: None })
    }
}

impl Launcher for Asked {
    fn submitted(&mut self, _: u64, _: usize) {}

    fn end(self: Box<Self>) -> bool {
        true
    }

    fn waiters(&self) -> usize {
        0
    }
}

impl Watch for Asked {
    fn failure(&mut self) -> Option<String> {
        self.1.fetch_add(1, Ordering::Relaxed);
        self.0.load(Ordering::Relaxed).then(|| "it was told to".into())
    }

    fn give_up(&mut self) -> bool {
        false
    }
}

#[test]
fn a_device_is_asked_once_a_millisecond_at_most_whether_it_lives() {
    let pool = Pool::new(64, 2048, Hugepages::None).unwrap();
    let mut cache = pool.cache();
    let mut device = Asked::default();
    let (dead, asked) = (Arc::clone(&device.0), Arc::clone(&device.1));
    let worker = Worker::Device {
        device: &mut device,
        launch: Launch::Kernel,
        blocks: 1,
        lanes: 1,
        memory: Memory::Host,
    };
    let work = work(Kind::Nothing, None);
    let setup =
        Setup { burst: 1, slots: 2, worker, work, patience: MUCH_PATIENCE, pool, hugepages: Hugepages::None };
    let (mut front, mut back) = pipeline(setup).unwrap();
    assert!(front.submit(&mut vec![packet(pool, &mut cache, 0)]));
    let (since, mut looks) = (Instant::now(), 0);
    while since.elapsed() < Duration::from_millis(20) || looks < 1000 {
        assert!(back.done().is_none());
        looks += 1;
    }
    let most = since.elapsed().as_millis() as usize + 1;
    let times = asked.load(Ordering::Relaxed);
    assert!((1..=most).contains(&times), "asked {times} times in {most} ms, in {looks} looks");
    dead.store(true, Ordering::Relaxed);
    let since = Instant::now();
    while back.done().is_none() {
        assert!(since.elapsed() < Duration::from_secs(10), "nobody has noticed for 10 s");
    }
    assert_eq!(back.failure(), Some("it was told to"));
    cache.free_all(back.done().unwrap().packets.drain(..));
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

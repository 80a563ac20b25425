#[path = "../../tests/cuda/packets/content.rs"]
mod content;
mod direct;

use std::time::Instant;

use offcore_mem::PoolCache;

use super::*;
use crate::device::Watch;
use crate::host::{Fault, HostDevice};
use content::{PATTERN, SKIP, content, expected, packet};

/// Timeouts for failing devices, and for devices that must not fail on a busy machine.
const TIMEOUT: Duration = Duration::from_millis(300);
const LONG_TIMEOUT: Duration = Duration::from_secs(10);

fn work(kind: Kind, patterns: Option<&Patterns>) -> Work<'_> {
    Work { kind, swap: true, skip: SKIP as u32, split_at: None, forced_ns: 0, patterns }
}

/// Returns a worker with kernels of one block.
fn one_block(device: &mut dyn GpuDevice) -> PipelineWorker<'_> {
    PipelineWorker::Device { device, launch: Launch::Kernel, blocks: 1, threads: 32, memory: Memory::Host }
}

/// Returns the parameters of a pipeline with this number of slots.
fn setup<'a, 'd>(
    worker: PipelineWorker<'d>,
    work: Work<'a>,
    burst: usize,
    slots: usize,
    pool: &'static Pool,
) -> Setup<'a, 'd> {
    Setup { burst, slots, worker, work, timeout: TIMEOUT, pool, hugepages: Hugepages::None }
}

/// Waits for a burst to come back.
fn wait(back: &mut Back) -> Done<'_> {
    let since = Instant::now();
    while back.done().is_none() {
        assert!(since.elapsed() < Duration::from_secs(10), "the burst does not come back");
    }
    back.done().unwrap()
}

/// Asserts that all packet buffers are free.
fn assert_all_free(pool: &Pool, mut cache: PoolCache) {
    let all: Vec<Packet> = std::iter::from_fn(|| cache.take()).collect();
    assert_eq!(all.len(), pool.chunks());
    cache.free_all(all);
}

/// Sends bursts of `burst` packets, split at `split_at` if given, and checks every packet that comes back. Returns the
/// failure of the device.
fn every_packet_is_right(
    worker: PipelineWorker<'_>,
    kind: Kind,
    split_at: Option<usize>,
    burst: usize,
    bursts: usize,
    timeout: Duration,
) -> Option<String> {
    let skip = split_at.unwrap_or(SKIP);
    let pool = Pool::new(16 * burst.max(128), 2048, Hugepages::None).unwrap();
    let mut cache = pool.cache();
    let patterns = Patterns::from_list([PATTERN]).unwrap();
    let swapped = !matches!(worker, PipelineWorker::None);
    let work = Work { split_at, ..work(kind, Some(&patterns)) };
    let setup = Setup { timeout, ..setup(worker, work, burst, 4, pool) };
    let (mut front, mut back) = pipeline(setup).unwrap();
    let (mut sent, mut received, mut gathered) = (0, 0, Vec::new());
    let mut moved = Instant::now();
    while received < bursts * burst {
        if sent < bursts * burst && front.room(1) > 0 {
            gathered.extend((sent..sent + burst).map(|number| packet(pool, &mut cache, number, split_at)));
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
    assert_all_free(pool, cache);
    failure
}

#[test]
fn every_worker_has_the_same_results() {
    for kind in [Kind::Nothing, Kind::Crc32c, Kind::Match] {
        for (burst, bursts) in [(1, 100), (7, 40), (64, 12), (257, 8), (1024, 6)] {
            let right = |worker: PipelineWorker<'_>| {
                every_packet_is_right(worker, kind, None, burst, bursts, LONG_TIMEOUT)
            };
            assert_eq!(right(PipelineWorker::None), None);
            assert_eq!(right(PipelineWorker::Cpu), None);
            for launch in Launch::ALL {
                let mut device = HostDevice::new().unwrap();
                let (device, memory) = (&mut device, Memory::Host);
                assert_eq!(
                    right(PipelineWorker::Device { device, launch, blocks: 2, threads: 64, memory }),
                    None
                );
            }
        }
    }
}

#[test]
fn split_packets_have_payload_results() {
    for kind in [Kind::Nothing, Kind::Crc32c, Kind::Match] {
        for (split_at, burst, bursts) in
            [(60, 1, 100), (60, 257, 8), (61, 64, 12), (14, 64, 12), (1400, 64, 12)]
        {
            let right = |worker: PipelineWorker<'_>| {
                every_packet_is_right(worker, kind, Some(split_at), burst, bursts, LONG_TIMEOUT)
            };
            assert_eq!(right(PipelineWorker::Cpu), None);
            for (launch, memory) in
                Launch::ALL.into_iter().flat_map(|launch| Memory::ALL.map(|memory| (launch, memory)))
            {
                let device = &mut HostDevice::new().unwrap();
                assert_eq!(
                    right(PipelineWorker::Device { device, launch, blocks: 2, threads: 64, memory }),
                    None
                );
            }
        }
    }
    for fault in [Fault::Dies(5), Fault::Hangs(5)] {
        let mut device = HostDevice::new().unwrap().with_fault(fault);
        every_packet_is_right(one_block(&mut device), Kind::Crc32c, Some(60), 64, 40, TIMEOUT).unwrap();
    }
}

/// Addresses that were already swapped are not swapped again, others are.
#[test]
fn cpu_takes_over_from_failed_device() {
    for (fault, words) in [(Fault::Dies(5), "have ended"), (Fault::Hangs(5), "has not answered")] {
        for burst in [1, 64, 300] {
            let mut device = HostDevice::new().unwrap().with_fault(fault);
            let failure =
                every_packet_is_right(one_block(&mut device), Kind::Crc32c, None, burst, 40, TIMEOUT);
            assert!(failure.as_ref().unwrap().contains(words), "{failure:?}");
        }
    }
}

#[test]
fn half_done_burst_is_not_swapped_twice() {
    let pool = Pool::new(128, 2048, Hugepages::None).unwrap();
    let mut cache = pool.cache();
    let mut device = HostDevice::new().unwrap().with_fault(Fault::Dies(0));
    let setup = setup(one_block(&mut device), work(Kind::Crc32c, None), 2, 2, pool);
    let (mut front, mut back) = pipeline(setup).unwrap();
    assert!(front.submit(&mut [0, 1].map(|number| packet(pool, &mut cache, number, None)).into()));
    let since = Instant::now();
    while back.serving.as_mut().unwrap().watch.failure().is_none() {
        assert!(since.elapsed() < Duration::from_secs(10), "the device lives");
        std::thread::yield_now();
    }
    // As if the device had swapped the first packet's addresses before it died.
    back.collector.oldest().unwrap().packets[0].bytes_mut()[..12].rotate_left(6);
    let done = wait(&mut back);
    for (number, packet) in done.packets.drain(..).enumerate() {
        let right = expected(number, Kind::Crc32c, SKIP);
        assert_eq!((packet.bytes().to_vec(), done.results[number]), right);
        cache.free(packet);
    }
    back.retire();
}

/// A device that does not answer or stop while `hung` is set.
#[derive(Debug, Default)]
struct HungDevice {
    hung: Arc<AtomicBool>,
    view: Arc<std::sync::Mutex<Option<PipelineView>>>,
}

impl GpuDevice for HungDevice {
    fn name(&self) -> &str {
        "hung"
    }

    unsafe fn start(&mut self, service: Service) -> Result<Started, DeviceError> {
        self.hung.store(true, Ordering::Relaxed);
        *self.view.lock().unwrap() = Some(service.view);
        let half = || HungDevice { hung: Arc::clone(&self.hung), view: Arc::default() };
        Ok(Started { launcher: Box::new(half()), watch: Box::new(half()), slots: None })
    }
}

// SAFETY: only this test's single thread accesses the memory.
unsafe impl Send for HungDevice {}

impl Launcher for HungDevice {
    fn submitted(&mut self, turn: u64, _: usize) {
        assert!(turn < 2, "a failed device gets turn {turn}");
    }

    fn end(self: Box<Self>) -> bool {
        !self.hung.load(Ordering::Relaxed)
    }

    fn waiters(&self) -> usize {
        1
    }
}

impl Watch for HungDevice {
    fn failure(&mut self) -> Option<String> {
        None
    }

    fn request_abort(&mut self) -> bool {
        !self.hung.load(Ordering::Relaxed)
    }
}

#[test]
fn hung_device_packets_are_quarantined() {
    let pool = Pool::new(128, 2048, Hugepages::None).unwrap();
    let mut cache = pool.cache();
    let mut device = HungDevice::default();
    let (hung, view) = (Arc::clone(&device.hung), Arc::clone(&device.view));
    let setup = setup(one_block(&mut device), work(Kind::Crc32c, None), 2, 4, pool);
    let (mut front, mut back) = pipeline(setup).unwrap();
    let mut number = 0;
    let mut submit = |front: &mut Front, cache: &mut PoolCache| {
        assert!(front.submit(&mut [0, 1].map(|next| packet(pool, cache, number + next, None)).into()));
        number += 2;
    };
    let mut received = 0;
    let mut receive = |back: &mut Back, cache: &mut PoolCache| {
        let done = wait(back);
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
    assert!(back.failure().unwrap().contains("does not stop"), "{:?}", back.failure());
    receive(&mut back, &mut cache);
    assert_eq!(back.quarantined(), 4);
    // The device gets no more bursts: later packets are not copied, whatever it does to its current packets.
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
    // The device stops.
    hung.store(false, Ordering::Relaxed);
    submit(&mut front, &mut cache);
    receive(&mut back, &mut cache);
    assert_eq!(back.quarantined(), 0);
    drop(front);
    assert_all_free(pool, cache);
}

/// The device was slow: it answers after the CPU has taken over.
#[test]
fn late_answers_end_the_quarantine() {
    let pool = Pool::new(128, 2048, Hugepages::None).unwrap();
    let mut cache = pool.cache();
    let mut device = HungDevice::default();
    let (hung, view) = (Arc::clone(&device.hung), Arc::clone(&device.view));
    let setup = setup(one_block(&mut device), work(Kind::Crc32c, None), 2, 4, pool);
    let (mut front, mut back) = pipeline(setup).unwrap();
    let submit = |front: &mut Front, cache: &mut PoolCache| {
        assert!(front.submit(&mut [0, 1].map(|number| packet(pool, cache, number, None)).into()));
    };
    // Returns how many packets are in quarantine.
    let receive = |back: &mut Back, cache: &mut PoolCache| {
        cache.free_all(wait(back).packets.drain(..));
        back.retire();
        back.quarantined()
    };
    submit(&mut front, &mut cache);
    submit(&mut front, &mut cache);
    assert_eq!([receive(&mut back, &mut cache), receive(&mut back, &mut cache)], [2, 4]);
    let ring = view.lock().unwrap().unwrap().ring;
    for (turn, left) in [(1, 2), (0, 0)] {
        let answer = ring.answers.wrapping_add(turn * ring.answer_stride as usize).cast();
        // SAFETY: an answer of the ring starts with its lap.
        unsafe { std::sync::atomic::AtomicU32::from_ptr(answer) }.store(1, Ordering::Release);
        submit(&mut front, &mut cache);
        assert_eq!(receive(&mut back, &mut cache), left);
    }
    hung.store(false, Ordering::Relaxed);
    drop((front, back));
    assert_all_free(pool, cache);
}

/// A device that fails on request, and counts how often it is checked.
#[derive(Debug, Clone, Default)]
struct CountingDevice(Arc<AtomicBool>, Arc<std::sync::atomic::AtomicUsize>);

impl GpuDevice for CountingDevice {
    fn name(&self) -> &str {
        "counting"
    }

    unsafe fn start(&mut self, _: Service) -> Result<Started, DeviceError> {
        Ok(Started { launcher: Box::new(self.clone()), watch: Box::new(self.clone()), slots: None })
    }
}

impl Launcher for CountingDevice {
    fn submitted(&mut self, _: u64, _: usize) {}

    fn end(self: Box<Self>) -> bool {
        true
    }

    fn waiters(&self) -> usize {
        0
    }
}

impl Watch for CountingDevice {
    fn failure(&mut self) -> Option<String> {
        self.1.fetch_add(1, Ordering::Relaxed);
        self.0.load(Ordering::Relaxed).then(|| "it was told to".into())
    }

    fn request_abort(&mut self) -> bool {
        false
    }
}

#[test]
fn device_check_is_rate_limited() {
    let pool = Pool::new(64, 2048, Hugepages::None).unwrap();
    let mut cache = pool.cache();
    let mut device = CountingDevice::default();
    let (dead, asked) = (Arc::clone(&device.0), Arc::clone(&device.1));
    let setup = setup(one_block(&mut device), work(Kind::Nothing, None), 1, 2, pool);
    let (mut front, mut back) = pipeline(Setup { timeout: LONG_TIMEOUT, ..setup }).unwrap();
    assert!(front.submit(&mut vec![packet(pool, &mut cache, 0, None)]));
    let (since, mut looks) = (Instant::now(), 0);
    while since.elapsed() < Duration::from_millis(20) || looks < 1000 {
        assert!(back.done().is_none());
        looks += 1;
    }
    let most = since.elapsed().as_millis() as usize + 1;
    let times = asked.load(Ordering::Relaxed);
    assert!((1..=most).contains(&times), "asked {times} times in {most} ms, in {looks} looks");
    dead.store(true, Ordering::Relaxed);
    cache.free_all(wait(&mut back).packets.drain(..));
    assert_eq!(back.failure(), Some("it was told to"));
    back.retire();
}

#[test]
fn invalid_setup_is_refused() {
    let pool = Pool::new(64, 2048, Hugepages::None).unwrap();
    let setup = |worker, burst, slots, kind| setup(worker, work(kind, None), burst, slots, pool);
    let mut device = HostDevice::new().unwrap();
    let worker = PipelineWorker::Device {
        device: &mut device,
        launch: Launch::Persistent,
        blocks: 65,
        threads: 1,
        memory: Memory::Host,
    };
    for (setup, words) in [
        (setup(PipelineWorker::Cpu, 0, 2, Kind::Nothing), "packets of a burst: found 0"),
        (setup(PipelineWorker::Cpu, 1, 3, Kind::Nothing), "slots of a burst ring: found 3"),
        (setup(PipelineWorker::Cpu, 1, 2, Kind::Match), "without patterns"),
        (setup(worker, 1, 2, Kind::Nothing), "65 blocks"),
    ] {
        let error = pipeline(setup).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}

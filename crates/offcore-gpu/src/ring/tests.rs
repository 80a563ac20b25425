use offcore_mem::{HEADROOM, Pool, PoolCache};

use super::*;

fn config(slots: usize, burst: usize) -> RingConfig {
    RingConfig { slots, burst, keep_addresses: false, split: None, hugepages: Hugepages::None }
}

/// A minimal device that answers the bursts of its ring in order with the length of each packet.
struct Device {
    view: RingView,
    turn: u64,
}

// SAFETY: the tests keep the memory until the device has ended.
unsafe impl Send for Device {}

impl Device {
    fn new(submitter: &Submitter) -> Self {
        Self { view: submitter.view(), turn: 0 }
    }

    /// Returns the packets of the next burst, or a quit, if it has arrived.
    fn look(&self) -> Option<Result<Vec<PacketDescriptor>, Quit>> {
        let index = self.turn as usize % self.view.count as usize;
        let lap = (self.turn / u64::from(self.view.count)) as u32 + 1;
        // SAFETY: the view has valid addresses, and the ring exists.
        unsafe {
            let slot = self.view.slots.add(index * self.view.slot_stride as usize);
            if AtomicU32::from_ptr(slot.cast_mut().cast()).load(Ordering::Acquire) != lap {
                return None;
            }
            let count = slot.add(4).cast::<u32>().read_volatile();
            if count == QUIT {
                return Some(Err(Quit));
            }
            let packets = slot.add(8).cast::<PacketDescriptor>();
            Some(Ok((0..count as usize).map(|i| packets.add(i).read_volatile()).collect()))
        }
    }

    fn answer(&mut self, results: &[u32]) {
        let index = self.turn as usize % self.view.count as usize;
        let lap = (self.turn / u64::from(self.view.count)) as u32 + 1;
        // SAFETY: the view has valid addresses, the ring exists, and an answer has room for the results of a burst.
        unsafe {
            let answer = self.view.answers.add(index * self.view.answer_stride as usize);
            for (i, result) in results.iter().enumerate() {
                answer.add(8).cast::<u32>().add(i).write_volatile(*result);
            }
            let hits = results.iter().filter(|result| **result != 0).count();
            answer.add(4).cast::<u32>().write_volatile(hits as u32);
            AtomicU32::from_ptr(answer.cast()).store(lap, Ordering::Release);
        }
        self.turn += 1;
    }

    fn serve_one(&mut self) -> Option<Vec<PacketDescriptor>> {
        let packets = self.look()?.ok()?;
        self.answer(&packets.iter().map(|packet| packet.len.into()).collect::<Vec<_>>());
        Some(packets)
    }
}

#[derive(Debug)]
struct Quit;

/// Returns the results and the device's count, once the oldest burst has been answered.
fn answer(collector: &mut Collector) -> Option<(Vec<u32>, usize)> {
    let packets = collector.oldest()?.packets.len();
    let mut results = vec![0; packets];
    let hits = collector.answer(&mut results)?;
    Some((results, hits as usize))
}

/// Returns packets of `lens` bytes, whose first byte is their number.
fn packets(cache: &mut PoolCache, lens: &[usize]) -> Vec<Packet> {
    let make = |(i, &len): (usize, &usize)| {
        let mut packet = cache.take_sized(HEADROOM, len).unwrap();
        packet.bytes_mut().fill(i as u8);
        packet
    };
    lens.iter().enumerate().map(make).collect()
}

#[test]
fn bursts_keep_order_over_many_laps() {
    let pool = Pool::new(1024, 2048, Hugepages::None).unwrap();
    let mut cache = pool.cache();
    let (mut submitter, mut collector) = burst_ring(&config(4, 8)).unwrap();
    let mut device = Device::new(&submitter);
    for turn in 0..100 {
        let lens: Vec<_> = (0..turn % 9).map(|i| 60 + turn + i).collect();
        let mut burst = packets(&mut cache, &lens);
        let chunks: Vec<_> = burst.iter().map(|packet| (packet.chunk(), packet.len())).collect();
        assert_eq!(submitter.submit(&mut burst), Some(turn as u64));
        assert!(burst.is_empty() && answer(&mut collector).is_none());
        let seen = device.serve_one().unwrap();
        let told: Vec<_> = seen.iter().map(|packet| (packet.chunk, usize::from(packet.len))).collect();
        assert_eq!(told, chunks);
        assert!(seen.iter().all(|packet| usize::from(packet.offset) == HEADROOM));
        let (results, hits) = answer(&mut collector).unwrap();
        assert_eq!(results, lens.iter().map(|len| *len as u32).collect::<Vec<_>>());
        assert_eq!(hits, lens.len());
        let oldest = collector.oldest().unwrap();
        assert_eq!((oldest.turn, oldest.packets.len()), (turn as u64, lens.len()));
        cache.free_all(oldest.packets.drain(..));
        collector.retire();
    }
    assert!(collector.oldest().is_none() && answer(&mut collector).is_none());
}

#[test]
fn full_ring_refuses_bursts() {
    let pool = Pool::new(256, 2048, Hugepages::None).unwrap();
    let mut cache = pool.cache();
    let (mut submitter, mut collector) = burst_ring(&config(2, 4)).unwrap();
    let mut device = Device::new(&submitter);
    assert_eq!(submitter.room(8), 2);
    for _ in 0..2 {
        submitter.submit(&mut packets(&mut cache, &[60; 4])).unwrap();
    }
    let mut third = packets(&mut cache, &[61; 3]);
    assert_eq!((submitter.room(1), submitter.submit(&mut third), third.len()), (0, None, 3));
    // An answer alone does not free a slot. Its burst must be retired first.
    device.serve_one().unwrap();
    assert!(answer(&mut collector).is_some() && submitter.submit(&mut third).is_none());
    cache.free_all(collector.oldest().unwrap().packets.drain(..));
    collector.retire();
    assert_eq!(submitter.submit(&mut third), Some(2));
    // The returned vector holds a burst without reallocation.
    assert!(third.is_empty() && third.capacity() >= 4);
    for turn in 1..3 {
        device.serve_one().unwrap();
        let oldest = collector.oldest().unwrap();
        assert_eq!(oldest.turn, turn);
        cache.free_all(oldest.packets.drain(..));
        collector.retire();
    }
}

#[test]
fn answer_of_an_earlier_lap_is_ignored() {
    let (mut submitter, mut collector) = burst_ring(&config(2, 1)).unwrap();
    let mut device = Device::new(&submitter);
    for _ in 0..2 {
        submitter.submit(&mut Vec::new()).unwrap();
        device.serve_one().unwrap();
        assert!(answer(&mut collector).is_some());
        collector.retire();
    }
    // Slot 0 again; its answer of lap 1 is still there.
    submitter.submit(&mut Vec::new()).unwrap();
    assert!(answer(&mut collector).is_none());
    assert_eq!(device.serve_one(), Some(vec![]));
    assert!(answer(&mut collector).is_some());
}

#[test]
fn addresses_are_kept_on_request() {
    let pool = Pool::new(64, 2048, Hugepages::None).unwrap();
    let mut cache = pool.cache();
    let (mut submitter, mut collector) =
        burst_ring(&RingConfig { keep_addresses: true, ..config(2, 8) }).unwrap();
    let mut burst = packets(&mut cache, &[60, 12, 11]);
    burst.push(cache.take_chain(HEADROOM, 5000).unwrap());
    submitter.submit(&mut burst).unwrap();
    let device = Device::new(&submitter);
    let seen = device.look().unwrap().unwrap();
    assert_eq!(seen.iter().map(|packet| packet.len).collect::<Vec<_>>(), [60, 12, 11, 0]);
    let oldest = collector.oldest().unwrap();
    // A packet shorter than its addresses is never swapped.
    assert_eq!(oldest.addresses[..3], [[0; 12], [1; 12], [0; 12]]);
    cache.free_all(oldest.packets.drain(..));
}

#[test]
fn quit_needs_room_for_every_waiter() {
    let (mut submitter, mut collector) = burst_ring(&config(4, 1)).unwrap();
    let mut device = Device::new(&submitter);
    submitter.submit(&mut Vec::new()).unwrap();
    assert!(!submitter.quit(4));
    assert!(submitter.quit(2));
    device.serve_one().unwrap();
    answer(&mut collector).unwrap();
    collector.retire();
    for _ in 0..2 {
        assert!(matches!(device.look(), Some(Err(Quit))));
        device.turn += 1;
    }
    assert!(device.look().is_none());
}

#[test]
fn ring_works_across_threads() {
    const BURSTS: u64 = 20_000;
    let pool = Pool::new(1024, 2048, Hugepages::None).unwrap();
    let (mut submitter, mut collector) = burst_ring(&config(16, 4)).unwrap();
    let mut device = Device::new(&submitter);
    let served = std::thread::spawn(move || {
        loop {
            match device.look() {
                Some(Ok(packets)) => {
                    device.answer(&packets.iter().map(|packet| packet.chunk + 1).collect::<Vec<_>>());
                }
                Some(Err(Quit)) => return device.turn,
                None => std::thread::yield_now(),
            }
        }
    });
    let collecting = std::thread::spawn(move || {
        let mut cache = pool.cache();
        let mut expected = 0;
        while expected < BURSTS {
            let Some((results, _)) = answer(&mut collector) else {
                std::thread::yield_now();
                continue;
            };
            let oldest = collector.oldest().unwrap();
            assert_eq!(oldest.turn, expected);
            assert_eq!(results, oldest.packets.iter().map(|packet| packet.chunk() + 1).collect::<Vec<_>>());
            cache.free_all(oldest.packets.drain(..));
            collector.retire();
            expected += 1;
        }
    });
    let mut cache = pool.cache();
    let mut burst = Vec::new();
    while submitter.turn() < BURSTS {
        while burst.len() < (submitter.turn() % 5) as usize {
            let Some(packet) = cache.take() else { break };
            burst.push(packet);
        }
        if submitter.submit(&mut burst).is_none() {
            std::thread::yield_now();
        }
    }
    collecting.join().unwrap();
    assert!(submitter.quit(1));
    assert_eq!(served.join().unwrap(), BURSTS);
}

#[test]
fn invalid_ring_sizes_are_refused() {
    for (slots, burst, words) in [
        (3, 4, "slots of a burst ring: found 3"),
        (1, 4, "found 1"),
        (8192, 4, "found 8192"),
        (4, 0, "packets of a burst: found 0"),
        (4, 4097, "found 4097, expected 1 to 4096"),
    ] {
        let error = burst_ring(&config(slots, burst)).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}

/// Each side polls memory that the other writes: the CPU reads no slot, which may be in device memory across the bus.
/// (tests/kernels checks that devices read no answer.)
#[test]
fn pitfall_7_cpu_never_reads_a_slot() {
    let pool = Pool::new(64, 2048, Hugepages::None).unwrap();
    let mut cache = pool.cache();
    let (mut submitter, mut collector) = burst_ring(&config(2, 8)).unwrap();
    let view = submitter.view();
    // Lap, count and the first seven packets share a line.
    assert_eq!((view.slots.addr() % 64, view.slot_stride % 64), (0, 0));
    for turn in 0..6u64 {
        let mut packets = vec![cache.take_sized(HEADROOM, 60).unwrap()];
        assert_eq!(submitter.submit(&mut packets), Some(turn));
        let (slot, answer, lap) = submitter.shared.place(turn);
        // SAFETY: the offsets are within the ring, and its device is this test.
        unsafe {
            // The CPU must not read the slot any more.
            view.slots.cast_mut().add(slot).write_bytes(0xee, view.slot_stride as usize);
            let head = submitter.shared.mapping.base().as_ptr().add(answer).cast::<u32>();
            head.add(1).write(1);
            head.add(2).write(turn as u32 + 7);
            AtomicU32::from_ptr(head).store(lap, Ordering::Release);
        }
        let mut results = [0; 8];
        assert_eq!((collector.answer(&mut results), results[0]), (Some(1), turn as u32 + 7));
        cache.free_all(collector.oldest().unwrap().packets.drain(..));
        collector.retire();
    }
}

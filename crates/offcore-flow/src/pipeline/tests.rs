//! Two threads as two workers, with a burst ring between them.

mod direct;

use std::time::Instant;

use offcore_gpu::device::{Launch, Memory};
use offcore_gpu::host::HostDevice;
use offcore_gpu::layout::Kind;
use offcore_gpu::patterns::Patterns;
use offcore_gpu::pipeline::{Work, Worker};
use offcore_mem::{HEADROOM, Hugepages, PoolCache};
use offcore_vhost::testing::Worker as Side;

use super::*;
use crate::forwarding::Rules;
use crate::forwarding::forward::Rewrite;
use crate::ring::{RingSetup, ring};

const PACKETS: u64 = 20_000;
/// Longer than any packet waits in a test.
const NEVER: Duration = Duration::from_secs(3600);

fn side(pool: &'static Pool) -> Side {
    Side { burst: 32, ..Side::over(pool) }
}
/// Creates a packet with its number after a 14-byte header. Every tenth packet contains `mark` after that.
fn make(cache: &mut PoolCache, number: u64) -> Option<Packet> {
    let mut packet = cache.take_sized(HEADROOM, 60 + number as usize % 1000)?;
    let bytes = packet.bytes_mut();
    bytes.fill(0);
    (bytes[0], bytes[6]) = (1, 2);
    bytes[14..22].copy_from_slice(&number.to_le_bytes());
    if number.is_multiple_of(10) {
        bytes[30..34].copy_from_slice(b"mark");
    }
    Some(packet)
}

fn number(packet: &Packet, swapped: bool) -> u64 {
    let number = u64::from_le_bytes(packet.bytes()[14..22].try_into().unwrap());
    assert_eq!(packet.len(), 60 + number as usize % 1000);
    assert_eq!(
        (packet.bytes()[0], packet.bytes()[6]),
        if swapped { (2, 1) } else { (1, 2) },
        "packet {number}"
    );
    number
}

fn queues(stats: &StatsPage, burst_timeout: Duration, on_hit: OnHit) -> QueuesSetup<'_> {
    QueuesSetup { burst_timeout, on_hit, elsewhere: None, stats, name: "pipeline0", index: 0 }
}

fn setup<'a, 'd>(pool: &'static Pool, worker: Worker<'d>, burst: usize, work: Work<'a>) -> Setup<'a, 'd> {
    let timeout = Duration::from_secs(10);
    Setup { burst, slots: 8, worker, work, timeout, pool, hugepages: Hugepages::None }
}

/// Sends all packets, waiting for room, and then stops.
fn send(mut tx: WorkTx, mut side: Side) {
    let (mut burst, mut next) = (Burst::new(), 0);
    while next < PACKETS || !burst.is_empty() {
        while next < PACKETS && burst.len() < 32 {
            let Some(packet) = make(&mut side.cache, next) else { break };
            burst.push(packet);
            next += 1;
        }
        tx.tx(&mut side.ctx(), &mut burst);
        if !burst.is_empty() {
            std::thread::yield_now();
        }
    }
    while !tx.stop(&mut side.ctx()) {
        std::thread::yield_now();
    }
    assert_eq!(tx.counters().packets(), PACKETS);
}

/// Returns the numbers of the returned packets, and the counters of bursts, results and dropped packets. The others
/// must be zero.
fn through(worker: Worker<'_>, burst: usize, kind: Kind, on_hit: OnHit) -> (Vec<u64>, Vec<u64>) {
    let work = Work { kind, swap: true, skip: 14, ..Work::default() };
    let (numbers, counters, elsewhere) = through_with(worker, burst, work, on_hit, |_| ());
    assert_eq!((&counters[WorkCount::Marked as usize..], elsewhere), (&[0; 4][..], vec![]));
    (numbers, counters[..WorkCount::Marked as usize].to_vec())
}

/// Returns the numbers of the returned packets, all work counters, and the numbers of the steered packets. `see` is
/// called for every packet.
fn through_with(
    worker: Worker<'_>,
    burst: usize,
    work: Work<'_>,
    on_hit: OnHit,
    see: impl Fn(&Packet),
) -> (Vec<u64>, Vec<u64>, Vec<u64>) {
    let pool = Pool::new(4096, 2048, Hugepages::None).unwrap();
    let stats = StatsPage::new(1 << 14).unwrap();
    let patterns = Patterns::from_list(["mark"]).unwrap();
    let swapped = !matches!(worker, Worker::None);
    let work = Work { patterns: Some(&patterns), ..work };
    let ring_setup = RingSetup {
        packets: 8192,
        pool,
        waits: false,
        wakes: false,
        stats: &stats,
        name: "elsewhere",
        index: 0,
    };
    let (to, mut elsewhere) = ring(ring_setup).unwrap();
    let queues = QueuesSetup { elsewhere: Some(Stamping::new(to)), ..queues(&stats, NEVER, on_hit) };
    let (tx, mut rx) = work_queues(setup(pool, worker, burst, work), queues).unwrap();
    let sender = std::thread::spawn(move || send(tx, side(pool)));
    let (mut side, mut numbers) = (side(pool), Vec::new());
    let mut moved = Instant::now();
    loop {
        let mut burst = Burst::new();
        let left = rx.drain(&mut side.ctx(), &mut burst);
        if burst.is_empty() {
            if left == 0 {
                break;
            }
            assert!(moved.elapsed() < Duration::from_secs(10), "nothing has come for 10 s");
            std::thread::yield_now();
            continue;
        }
        moved = Instant::now();
        burst.iter().for_each(&see);
        numbers.extend(burst.iter().map(|packet| number(packet, swapped)));
        side.cache.free_all(burst.drain(..));
    }
    let mut others = Vec::new();
    loop {
        let mut burst = Burst::new();
        elsewhere.rx(&mut side.ctx(), &mut burst);
        if burst.is_empty() {
            break;
        }
        others.extend(burst.iter().map(|packet| number(packet, swapped)));
        side.cache.free_all(burst);
    }
    sender.join().unwrap();
    assert_eq!(rx.counters().packets(), numbers.len() as u64);
    let counters = (0..WorkCounts::COUNTERS.len()).map(|i| rx.work.counter(i).value()).collect();
    drop((rx, elsewhere, side));
    let mut cache = pool.cache();
    let all: Vec<Packet> = std::iter::from_fn(|| cache.take()).collect();
    assert_eq!(all.len(), pool.chunks(), "packet buffers were lost");
    (numbers, counters, others)
}

#[test]
fn packets_come_out_once_and_in_order() {
    let all: Vec<u64> = (0..PACKETS).collect();
    for burst in [1, 7, 64, 257, 1024] {
        let bursts = PACKETS.div_ceil(burst as u64);
        let (numbers, counters) = through(Worker::None, burst, Kind::Crc32c, OnHit::Pass);
        assert_eq!((numbers, counters), (all.clone(), vec![bursts, 0, 0]));
        let (numbers, counters) = through(Worker::Cpu, burst, Kind::Match, OnHit::Pass);
        assert_eq!((numbers, counters), (all.clone(), vec![bursts, PACKETS / 10, 0]));
        for launch in Launch::ALL {
            let Ok(mut device) = HostDevice::new() else { continue };
            let worker =
                Worker::Device { device: &mut device, launch, blocks: 1, threads: 32, memory: Memory::Host };
            let (numbers, counters) = through(worker, burst, Kind::Match, OnHit::Pass);
            assert_eq!((numbers, counters), (all.clone(), vec![bursts, PACKETS / 10, 0]), "{launch}");
        }
    }
}

#[test]
fn packets_are_filtered_by_result() {
    let dropped = through(Worker::Cpu, 100, Kind::Match, OnHit::Drop);
    let others: Vec<u64> = (0..PACKETS).filter(|number| number % 10 != 0).collect();
    assert_eq!(dropped, (others, vec![200, PACKETS / 10, PACKETS / 10]));
    let chosen = through(Worker::Cpu, 100, Kind::Match, OnHit::Only);
    let marked: Vec<u64> = (0..PACKETS).filter(|number| number % 10 == 0).collect();
    assert_eq!(chosen, (marked, vec![200, PACKETS / 10, PACKETS / 10 * 9]));
}

/// Bursts too small for l2fwd-nv are gathered and returned, with a device and with the CPU.
#[test]
fn pitfall_3_bursts_of_1_to_4_are_gathered() {
    let all: Vec<u64> = (0..PACKETS).collect();
    for burst in 1..=4 {
        let bursts = PACKETS.div_ceil(burst as u64);
        let found = through(Worker::Cpu, burst, Kind::Match, OnHit::Pass);
        assert_eq!(found, (all.clone(), vec![bursts, PACKETS / 10, 0]));
        let Ok(mut device) = HostDevice::new() else { continue };
        let (launch, memory) = (Launch::Persistent, Memory::Host);
        let worker = Worker::Device { device: &mut device, launch, blocks: 1, threads: 32, memory };
        let found = through(worker, burst, Kind::Match, OnHit::Pass);
        assert_eq!(found, (all.clone(), vec![bursts, PACKETS / 10, 0]));
    }
}

/// Returns a packet's DSCP. It is 0 in packets from `make`.
fn dscp_of(packet: &Packet) -> u8 {
    packet.bytes()[14 + 1] >> 2
}

/// With and without buffer split, and with any worker, packets return in one buffer and are handled by their result.
#[test]
fn packets_are_split_marked_and_steered() {
    let all: Vec<u64> = (0..PACKETS).collect();
    let (hits, others): (Vec<u64>, Vec<u64>) = all.iter().partition(|number| *number % 10 == 0);
    for split_at in [None, Some(24)] {
        let work = Work { kind: Kind::Match, swap: true, skip: 14, split_at, ..Work::default() };
        let plain = |packet: &Packet| assert!(packet.is_plain());
        let bursts = PACKETS.div_ceil(257);
        let steered = bursts_of(bursts, hits.len() as u64, |counts| {
            counts[WorkCount::Steered as usize] = hits.len() as u64
        });
        let found = through_with(Worker::Cpu, 257, work, OnHit::Steer, plain);
        assert_eq!(found, (others.clone(), steered.clone(), hits.clone()), "{split_at:?}");
        for (launch, memory) in
            Launch::ALL.into_iter().flat_map(|launch| Memory::ALL.map(|memory| (launch, memory)))
        {
            let Ok(mut device) = HostDevice::new() else { continue };
            let worker = Worker::Device { device: &mut device, launch, blocks: 1, threads: 32, memory };
            let found = through_with(worker, 257, work, OnHit::Steer, plain);
            assert_eq!(
                found,
                (others.clone(), steered.clone(), hits.clone()),
                "{split_at:?} {launch} {memory}"
            );
        }
    }
}

/// Returns the counters for these numbers of bursts and results.
fn bursts_of(bursts: u64, hits: u64, more: impl FnOnce(&mut [u64])) -> Vec<u64> {
    let mut counters = vec![0; WorkCounts::COUNTERS.len()];
    (counters[WorkCount::Bursts as usize], counters[WorkCount::Hits as usize]) = (bursts, hits);
    more(&mut counters);
    counters
}

#[test]
fn only_ip_packets_are_marked() {
    let pool = Pool::new(256, 2048, Hugepages::None).unwrap();
    let stats = StatsPage::new(1 << 14).unwrap();
    let patterns = Patterns::from_list(["mark"]).unwrap();
    for split_at in [None, Some(60)] {
        let mut side = side(pool);
        let work =
            Work { kind: Kind::Match, split_at, skip: 14, patterns: Some(&patterns), ..Work::default() };
        let name = if split_at.is_some() { "split" } else { "whole" };
        let queues = QueuesSetup { name, ..queues(&stats, Duration::ZERO, OnHit::Mark(46)) };
        let (mut tx, mut rx) = work_queues(setup(pool, Worker::Cpu, 64, work), queues).unwrap();
        let mut burst = Burst::new();
        // IPv4 with a match, IPv4 without, and non-IP with a match.
        for (ethertype, payload) in [(0x0800u16, &b"mark"[..]), (0x0800, b"mask"), (0x0806, b"mark")] {
            let mut packet = side.cache.take_sized(HEADROOM, 200).unwrap();
            let bytes = packet.bytes_mut();
            bytes.fill(0);
            bytes[12..14].copy_from_slice(&ethertype.to_be_bytes());
            bytes[14] = 0x45;
            bytes[100..104].copy_from_slice(payload);
            burst.push(packet);
        }
        tx.tx(&mut side.ctx(), &mut burst);
        tx.poll(&mut side.ctx());
        rx.rx(&mut side.ctx(), &mut burst);
        assert_eq!(burst.iter().map(dscp_of).collect::<Vec<_>>(), [46, 0, 0], "{name}");
        let counted = [WorkCount::Bursts, WorkCount::Hits, WorkCount::Marked]
            .map(|which| rx.work.counter(which as usize).value());
        assert_eq!(counted, [1, 2, 1], "{name}");
        // Packets that cannot be sent are returned first.
        rx.take_back(&mut burst);
        assert!(burst.is_empty());
        rx.rx(&mut side.ctx(), &mut burst);
        assert_eq!((burst.len(), rx.counters().packets()), (3, 3));
        side.cache.free_all(burst);
        assert!(tx.stop(&mut side.ctx()));
    }
}

#[test]
fn pitfall_4_partial_burst_waits() {
    let pool = Pool::new(256, 2048, Hugepages::None).unwrap();
    let stats = StatsPage::new(1 << 14).unwrap();
    let mut side = side(pool);
    for (timeout, goes) in [(NEVER, false), (Duration::ZERO, true)] {
        let work = Work::default();
        let name = if goes { "at-once" } else { "never" };
        let queues = QueuesSetup { name, ..queues(&stats, timeout, OnHit::Pass) };
        let (mut tx, mut rx) = work_queues(setup(pool, Worker::Cpu, 64, work), queues).unwrap();
        let mut burst = Burst::new();
        burst.extend((0..3).filter_map(|number| make(&mut side.cache, number)));
        tx.tx(&mut side.ctx(), &mut burst);
        tx.poll(&mut side.ctx());
        rx.rx(&mut side.ctx(), &mut burst);
        assert_eq!(burst.len(), if goes { 3 } else { 0 });
        side.cache.free_all(burst.drain(..));
        // Stopping does not wait for the timeout.
        let mut rest = 0;
        while !tx.stop(&mut side.ctx()) {
            rx.drain(&mut side.ctx(), &mut burst);
            rest += burst.len();
            side.cache.free_all(burst.drain(..));
        }
        assert_eq!((rest, rx.drain(&mut side.ctx(), &mut burst)), (if goes { 0 } else { 3 }, 0));
    }
}

#[test]
fn pitfall_5_full_pipeline_takes_no_more() {
    let pool = Pool::new(1024, 2048, Hugepages::None).unwrap();
    let stats = StatsPage::new(1 << 14).unwrap();
    let mut side = side(pool);
    let work = Work { swap: true, ..Work::default() };
    let (mut tx, mut rx) =
        work_queues(setup(pool, Worker::Cpu, 10, work), queues(&stats, NEVER, OnHit::Pass)).unwrap();
    let (mut next, mut burst) = (0, Burst::new());
    loop {
        while burst.len() < 32 {
            burst.push(make(&mut side.cache, next).unwrap());
            next += 1;
        }
        tx.tx(&mut side.ctx(), &mut burst);
        if !burst.is_empty() {
            break;
        }
    }
    // Eight bursts in flight, and one being gathered.
    let left = burst.len() as u64;
    assert_eq!(next - left, 90);
    side.cache.free_all(burst.drain(..));
    let mut numbers = Vec::new();
    while !tx.stop(&mut side.ctx()) {
        rx.drain(&mut side.ctx(), &mut burst);
        numbers.extend(burst.iter().map(|packet| number(packet, true)));
        side.cache.free_all(burst.drain(..));
    }
    assert_eq!(numbers, (0..90).collect::<Vec<_>>());
}

/// A queue that has received packets and takes them back.
#[derive(Debug)]
struct Source(Burst, RxCounters);

impl RxQueue for Source {
    fn rx(&mut self, _: &mut Context<'_>, burst: &mut Burst) {
        hand_over(&mut self.0, burst);
    }

    fn drain(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) -> usize {
        self.rx(ctx, burst);
        0
    }

    fn counters(&self) -> &RxCounters {
        &self.1
    }

    fn arm(&mut self) -> Wake<'_> {
        Wake::Poll
    }

    fn take_back(&mut self, burst: &mut Burst) {
        hand_over(burst, &mut self.0);
    }
}

#[test]
fn packets_wait_for_full_pipeline_at_end() {
    let pool = Pool::new(1024, 2048, Hugepages::None).unwrap();
    let stats = StatsPage::new(1 << 14).unwrap();
    let mut side = side(pool);
    let work = Work { swap: true, ..Work::default() };
    let (mut tx, mut rx) =
        work_queues(setup(pool, Worker::Cpu, 10, work), queues(&stats, NEVER, OnHit::Pass)).unwrap();
    let (mut rules, mut burst, mut numbers) = (Rules::sending(Rewrite::None, 0), Burst::new(), Vec::new());
    for number in 0..128 {
        burst.push(make(&mut side.cache, number).unwrap());
        if burst.len() == 32 && number < 127 {
            tx.tx(&mut side.ctx(), &mut burst);
        }
    }
    let mut source = Source(burst, RxCounters::private());
    while rules.drain(&mut source, &mut tx, 0, &mut side.ctx()) > 0 {
        let mut burst = Burst::new();
        rx.drain(&mut side.ctx(), &mut burst);
        numbers.extend(burst.iter().map(|packet| number(packet, true)));
        side.cache.free_all(burst.drain(..));
    }
    assert_eq!((numbers, tx.counters().dropped_total()), ((0..128).collect::<Vec<_>>(), 0));
}

//! Two threads act as two workers. Packets with one or several buffers arrive once, in order and complete. Packets that
//! do not fit are dropped and counted. The sender ends before the receiver.

use offcore_mem::{HEADROOM, Hugepages, PoolCache};
use offcore_port::DropReason;
use offcore_vhost::testing::Worker as Side;
use rustix::event::{PollFd, PollFlags, Timespec};

use super::*;

const PACKETS: u64 = 200_000;

fn side(pool: &'static Pool) -> Side {
    Side { burst: 32, ..Side::over(pool) }
}
fn make(cache: &mut PoolCache, number: u64) -> Option<Packet> {
    let mut packet = cache.take_chain(HEADROOM, length(number))?;
    packet.bytes_mut()[..8].copy_from_slice(&number.to_le_bytes());
    if number.is_multiple_of(5) {
        packet.headroom_mut(12).fill(number as u8);
        packet.set_offload(true);
    }
    Some(packet)
}

fn length(number: u64) -> usize {
    if number.is_multiple_of(100) { 5000 } else { 60 + number as usize % 1400 }
}

fn check(pool: &Pool, packet: &Packet) -> u64 {
    let number = u64::from_le_bytes(*packet.bytes().first_chunk().unwrap());
    assert_eq!(pool.total_len(packet), length(number), "packet {number}");
    assert_eq!(packet.has_offload(), number.is_multiple_of(5), "packet {number}");
    assert!(!packet.has_offload() || packet.headroom_bytes(12) == [number as u8; 12], "packet {number}");
    number
}

fn setup<'a>(pool: &'static Pool, stats: &'a StatsPage, waits: bool) -> RingSetup<'a> {
    RingSetup { packets: 100, pool, waits, wakes: true, stats, name: "ring0", index: 0 }
}

/// Sends all packets. Without `waits`, packets that do not fit are dropped.
fn send(mut tx: RingTx, mut side: Side, waits: bool) -> TxCounters {
    let mut burst = Burst::new();
    let mut next = 0;
    while next < PACKETS || !burst.is_empty() {
        while next < PACKETS && burst.len() < 32 {
            let Some(packet) = make(&mut side.cache, next) else { break };
            burst.push(packet);
            next += 1;
        }
        tx.tx(&mut side.ctx(), &mut burst);
        if burst.is_empty() {
            continue;
        }
        if !waits {
            tx.counters().drop_all(DropReason::Full, &mut burst, &mut side.cache);
        }
        std::thread::yield_now();
    }
    tx.counters().clone()
}

fn received(waits: bool) -> (u64, TxCounters, RxCounters) {
    let pool = Pool::new(1024, 2048, Hugepages::None).unwrap();
    let stats = StatsPage::new(1 << 14).unwrap();
    let (tx, mut rx) = ring(setup(pool, &stats, waits)).unwrap();
    let sender = std::thread::spawn(move || send(tx, side(pool), waits));
    let mut side = side(pool);
    let (mut last, mut received, mut polls) = (None, 0, 0u64);
    // Only `drain` detects that the sender has ended. Like `rx`, it receives packets.
    loop {
        let mut burst = Burst::new();
        let left = if polls.is_multiple_of(3) {
            rx.drain(&mut side.ctx(), &mut burst)
        } else {
            rx.rx(&mut side.ctx(), &mut burst);
            1
        };
        polls += 1;
        if waits && polls.is_multiple_of(7) {
            let mut back: Burst = burst.drain(burst.len() / 2..).collect();
            rx.take_back(&mut back);
            assert!(back.is_empty());
        }
        let nothing = burst.is_empty() && rx.returned.is_empty();
        for packet in burst {
            let number = check(pool, &packet);
            assert!(last.is_none_or(|last| last < number), "{number} after {last:?}");
            last = Some(number);
            received += 1;
            side.cache.free(packet);
        }
        if left == 0 && nothing {
            break;
        }
    }
    let sent = sender.join().unwrap();
    let counters = rx.counters().clone();
    // Every packet buffer was returned.
    assert_eq!(std::iter::from_fn(|| side.cache.take()).count(), 1024);
    (received, sent, counters)
}

#[test]
fn waiting_sender_loses_no_packet() {
    let (received, sent, counters) = received(true);
    assert_eq!((received, sent.dropped_total()), (PACKETS, 0));
    assert_eq!((sent.packets(), counters.packets()), (PACKETS, PACKETS));
    assert_eq!(sent.bytes(), (0..PACKETS).map(|number| length(number) as u64).sum::<u64>());
    assert_eq!(sent.bytes(), counters.bytes());
}

#[test]
fn nonwaiting_sender_counts_drops() {
    let (received, sent, counters) = received(false);
    assert_eq!(received + sent.dropped(DropReason::Full), PACKETS);
    assert_eq!((sent.packets(), counters.packets()), (received, received));
}

#[test]
fn full_ring_leaves_the_rest() {
    let pool = Pool::new(512, 2048, Hugepages::None).unwrap();
    let stats = StatsPage::new(1 << 14).unwrap();
    let (mut tx, mut rx) = ring(setup(pool, &stats, false)).unwrap();
    let mut side = side(pool);
    let mut made = 0;
    let mut burst = Burst::new();
    // 100 packets were requested; 128 fit.
    for _ in 0..5 {
        while burst.len() < 32 {
            burst.push(make(&mut side.cache, made).unwrap());
            made += 1;
        }
        tx.tx(&mut side.ctx(), &mut burst);
    }
    assert_eq!((made, burst.len()), (160, 32));
    assert!(matches!(rx.arm(), Wake::Now));
    tx.counters().drop_all(DropReason::Full, &mut burst, &mut side.cache);
    drop(tx);
    let mut out = 0;
    while rx.drain(&mut side.ctx(), &mut burst) > 0 || !burst.is_empty() {
        out += burst.len();
        side.cache.free_all(burst.drain(..));
    }
    assert_eq!(out, 128);
}

/// Sleeps like a worker until the ring has packets. Returns whether it has.
fn sleep(rx: &mut RingRx) -> bool {
    let has = match rx.arm() {
        Wake::Now => true,
        Wake::Event(event) => {
            let mut events = [PollFd::from_borrowed_fd(event, PollFlags::IN)];
            let longest = Timespec { tv_sec: 20, tv_nsec: 0 };
            rustix::event::poll(&mut events, Some(&longest)).unwrap() > 0
        }
        other => panic!("{other:?}"),
    };
    rx.disarm();
    has
}

#[test]
fn sender_wakes_a_sleeping_receiver_every_time() {
    const ROUNDS: u64 = 20_000;
    let pool = Pool::new(256, 2048, Hugepages::None).unwrap();
    let stats = StatsPage::new(1 << 14).unwrap();
    let (mut tx, mut rx) = ring(setup(pool, &stats, false)).unwrap();
    let (seen, next) = std::sync::mpsc::channel();
    let sender = std::thread::spawn(move || {
        let mut side = side(pool);
        for number in 0..ROUNDS {
            let mut burst: Burst = make(&mut side.cache, number).into_iter().collect();
            tx.tx(&mut side.ctx(), &mut burst);
            // The receiver may be checking, arming or asleep now.
            next.recv().unwrap();
        }
    });
    let mut side = side(pool);
    let mut burst = Burst::new();
    for number in 0..ROUNDS {
        while burst.is_empty() {
            assert!(sleep(&mut rx), "packet {number} has not been announced");
            rx.rx(&mut side.ctx(), &mut burst);
        }
        let packet = burst.pop().unwrap();
        assert_eq!(check(pool, &packet), number);
        side.cache.free(packet);
        seen.send(()).unwrap();
    }
    sender.join().unwrap();
    assert_eq!(rx.counters().packets(), ROUNDS);
}

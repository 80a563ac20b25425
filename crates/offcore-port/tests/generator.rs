//! Tests the generator port: the packets that it generates, and that its sink detects every kind of damage.

#![allow(clippy::unwrap_used, reason = "a test that cannot continue has failed")]

mod common;

use common::{Worker, pool};
use offcore_mem::{Burst, Packet};
use offcore_port::generator::{GenPort, GenReport};
use offcore_port::spec::{GenSpec, PortSpec};
use offcore_port::{Port, RxQueue, TxQueue};
use offcore_wire::{Ipv4Packet, MacAddr, probe};

fn spec(text: &str) -> GenSpec {
    let PortSpec::Gen(spec) = text.parse().unwrap() else { panic!("{text}") };
    spec
}

/// A generator between whose first queues a test forwards packets.
struct Loop {
    worker: Worker,
    port: GenPort,
    rx: Box<dyn RxQueue>,
    tx: Box<dyn TxQueue>,
    chunks: usize,
}

impl Loop {
    fn new(text: &str) -> Self {
        Self::of(text, 512)
    }

    /// Like `new`, with `chunks` packet buffers.
    fn of(text: &str, chunks: usize) -> Self {
        let pool = pool(chunks);
        let mut worker = Worker::new(pool);
        let mut port = GenPort::open(&spec(text), pool).unwrap();
        let rx = worker.rx_queue(&mut port, 0).unwrap();
        let tx = worker.tx_queue(&mut port, 0).unwrap();
        let chunks = worker.free_chunks();
        Self { worker, port, rx, tx, chunks }
    }

    fn receive(&mut self) -> Burst {
        let mut burst = Burst::new();
        self.worker.rx(&mut *self.rx, &mut burst);
        burst
    }

    fn send(&mut self, mut burst: Burst) {
        self.worker.tx(&mut *self.tx, &mut burst);
        assert!(burst.is_empty(), "a sink takes everything");
    }

    /// Forwards `bursts` bursts, each changed by `harm`, and returns the report. Checks that no packet buffer is lost.
    fn run(&mut self, bursts: usize, mut harm: impl FnMut(&mut Self, usize, &mut Burst)) -> GenReport {
        for n in 0..bursts {
            let mut burst = self.receive();
            harm(self, n, &mut burst);
            self.send(burst);
        }
        assert_eq!(self.worker.free_chunks(), self.chunks);
        self.port.report()
    }
}

#[test]
fn looped_packets_verify_clean() {
    for text in [
        "gen:",
        "gen:size=1518,flows=7",
        "gen:size=65,flows=65536",
        "gen:size=1518,verify=64",
        "gen:verify=off",
    ] {
        let mut port = Loop::new(text);
        let report = port.run(100, |_, _, burst| assert_eq!(burst.len(), 64));
        assert!(report.is_clean() && report.missing() == Some(0), "{text}: {report:?}");
        assert_eq!((report.sent, report.received, report.foreign), (6400, 6400, 0), "{text}");
        let verified = match spec(text).verify {
            0 => 0,
            every => 6400 / u64::from(every),
        };
        assert_eq!(report.verified, verified, "{text}");
        assert_eq!(port.rx.counters().bytes(), 6400 * (spec(text).size as u64 - 4));
        assert_eq!(port.tx.counters().bytes(), port.rx.counters().bytes());
        assert!(port.port.status().starts_with("6400 sent, 6400 received"), "{}", port.port.status());
    }
}

#[test]
fn packets_match_the_spec() {
    let mut port = Loop::new("gen:size=512,flows=3");
    let mut burst = port.receive();
    for (n, packet) in (0u64..).zip(&burst) {
        let frame = packet.bytes();
        assert_eq!(frame.len(), 508);
        assert_eq!(probe::check_header(frame).unwrap().sequence, n / 3);
        probe::check_content(frame).unwrap();
        assert_eq!(frame[6..12], port.port.mac().0);
        let ip = Ipv4Packet::new_checked(&frame[14..]).unwrap();
        assert!(ip.verify_checksum());
        assert_eq!(ip.dst().octets(), [198, 19, 0, (n % 3) as u8]);
    }
    // Neighboring packets differ in content, so that a mixed-up payload is detected.
    let payloads: std::collections::HashSet<&[u8]> = burst.iter().map(|p| &p.bytes()[58..]).collect();
    assert!(payloads.len() > 10, "{} different contents", payloads.len());
    port.worker.free(&mut burst);
}

#[test]
fn loss_is_counted() {
    let mut port = Loop::new("gen:flows=4");
    let mut taken = 0;
    let report = port.run(100, |port, n, burst| {
        if n % 10 == 3 {
            for packet in burst.drain(5..12) {
                port.worker.cache.free(packet);
                taken += 1;
            }
        }
    });
    assert_eq!((report.lost, report.missing(), report.received), (taken, Some(taken), 6400 - taken));
    assert_eq!((report.reordered, report.duplicates, report.corrupt), (0, 0, 0));
}

#[test]
fn tail_loss_counts_as_missing() {
    let mut port = Loop::new("gen:");
    let report = port.run(3, |port, n, burst| {
        if n == 2 {
            port.worker.free(burst);
        }
    });
    assert_eq!((report.lost, report.missing()), (0, Some(64)));
}

#[test]
fn reordering_is_counted() {
    let mut port = Loop::new("gen:");
    let report = port.run(100, |_, _, burst| burst.swap(10, 11));
    assert_eq!((report.reordered, report.lost, report.duplicates, report.corrupt), (100, 0, 0, 0));
    // Packets of different flows may overtake each other, but packets of one flow may not.
    let mut port = Loop::new("gen:flows=2");
    let report = port.run(100, |_, _, burst| burst.swap(10, 11));
    assert!(report.is_clean(), "{report:?}");
}

#[test]
fn duplicates_are_counted() {
    let mut port = Loop::new("gen:");
    let report = port.run(50, |port, _, burst| {
        let dropped = burst.pop().unwrap();
        port.worker.cache.free(dropped);
        let twice = port.worker.packet(burst[20].bytes());
        burst.push(twice);
    });
    assert_eq!((report.duplicates, report.reordered, report.corrupt), (50, 0, 0));
    // The packets that made room for duplicates are lost, except for the last one, after which no other packet was
    // received.
    assert_eq!((report.lost, report.missing()), (49, Some(50)));
}

#[test]
fn every_changed_byte_is_counted() {
    const LEN: usize = 124;
    // Starts at the EtherType. The MAC addresses before it may change.
    for at in 12..LEN {
        let mut port = Loop::new("gen:size=128,flows=3");
        let report = port.run(3, |_, n, burst| {
            if n == 1 {
                burst[30].bytes_mut()[at] ^= 0x10;
            }
        });
        let noticed = report.corrupt + report.foreign + report.lost + report.reordered + report.duplicates;
        // UDP ports and checksum are not checked; see `offcore_wire::probe`.
        let free = (34..38).contains(&at) || (40..42).contains(&at);
        assert_eq!(noticed == 0, free, "byte {at}: {report:?}");
        if at >= 58 {
            assert_eq!((report.corrupt, report.lost, report.received), (1, 0, 192), "byte {at}: {report:?}");
        }
    }
}

#[test]
fn a_changed_length_is_corrupt() {
    let mut port = Loop::new("gen:size=128");
    let report = port.run(2, |_, _, burst| burst[7].truncate(100));
    assert_eq!((report.corrupt, report.lost, report.foreign), (2, 2, 0));
}

#[test]
fn left_over_content_is_noticed() {
    // This is the result of a copy that was never made: the headers of one packet and the payload of another.
    let mut port = Loop::new("gen:size=1518");
    let report = port.run(10, |_, _, burst| {
        let stale = burst[0].bytes()[58..].to_vec();
        burst[33].bytes_mut()[58..].copy_from_slice(&stale);
    });
    assert_eq!((report.corrupt, report.lost), (10, 0));
}

#[test]
fn other_traffic_is_foreign() {
    let mut port = Loop::new("gen:");
    let report = port.run(10, |port, _, burst| {
        let dropped = burst.remove(0);
        port.worker.cache.free(dropped);
        burst.push(port.worker.packet(&[0xff; 60]));
    });
    assert_eq!((report.foreign, report.received), (10, 630));
    assert_eq!((report.corrupt, report.reordered, report.duplicates), (0, 0, 0));
}

#[test]
fn rewritten_mac_is_not_corruption() {
    let mut port = Loop::new("gen:");
    let report = port.run(10, |_, _, burst| {
        for packet in burst {
            packet.bytes_mut()[..6].copy_from_slice(&MacAddr::local(9).0);
        }
    });
    assert!(report.is_clean() && report.received == 640, "{report:?}");
}

#[test]
fn two_generators_in_one_sink() {
    let mut a = Loop::new("gen:flows=2");
    let (pool, mut worker) = (a.worker.cache.pool(), Worker::new(a.worker.cache.pool()));
    let mut b = GenPort::open(&spec("gen:flows=5"), pool).unwrap();
    let mut from_b = worker.rx_queue(&mut b, 0).unwrap();
    for _ in 0..20 {
        let burst = a.receive();
        let mut other = Burst::new();
        worker.rx(&mut *from_b, &mut other);
        let mixed: Vec<Packet> = burst.into_iter().zip(other).flat_map(|(a, b)| [a, b]).collect();
        let mut mixed = mixed.into_iter();
        a.send(mixed.by_ref().take(64).collect());
        a.send(mixed.collect());
    }
    let report = a.port.report();
    assert!(report.is_clean() && report.received == 2560, "{report:?}");
}

#[test]
fn count_is_shared_by_the_queues() {
    let pool = pool(512);
    let mut worker = Worker::new(pool);
    let mut port = GenPort::open(&spec("gen:count=201,queues=2"), pool).unwrap();
    assert_eq!(port.queues(), 2);
    let mut totals = [0, 0];
    for (index, total) in totals.iter_mut().enumerate() {
        let mut rx = worker.rx_queue(&mut port, index as u16).unwrap();
        for _ in 0..5 {
            let mut burst = Burst::new();
            worker.rx(&mut *rx, &mut burst);
            *total += burst.len();
            worker.free(&mut burst);
        }
    }
    assert_eq!((totals, port.report().sent), ([101, 100], 201));
    assert!(worker.rx_queue(&mut port, 0).is_err(), "a queue is given out once");
    assert!(worker.rx_queue(&mut port, 2).is_err());
}

#[test]
fn the_rate_is_kept() {
    let mut port = Loop::new("gen:rate=100k");
    let start = std::time::Instant::now();
    while start.elapsed() < std::time::Duration::from_millis(200) {
        let burst = port.receive();
        port.send(burst);
    }
    let (sent, due) = (port.port.report().sent, start.elapsed().as_secs_f64() * 100_000.0);
    // A pause of this thread of more than 10 ms is not made up for, so only the upper bound is exact.
    assert!(sent as f64 <= due + 2.0, "{sent} sent where {due} were due");
    assert!(sent > 1000, "{sent} sent where {due} were due");
}

#[test]
fn a_dry_pool_makes_no_packets() {
    let mut port = Loop::new("gen:");
    let hoard: Vec<Packet> = std::iter::from_fn(|| port.worker.cache.take()).collect();
    assert!(port.receive().is_empty());
    port.worker.cache.free_all(hoard);
    assert!(port.run(2, |_, _, _| ()).is_clean());
}

#[test]
fn packets_must_fit_the_pool() {
    let error = GenPort::open(&spec("gen:size=40000"), pool(64)).unwrap_err().to_string();
    assert_eq!(
        error,
        "port 'gen:size=40000': size=40000: expected at most 28676 with 64 packet buffers of 1792 bytes, a quarter of \
         which a packet may take: use more (--mbufs) or larger ones (--mbuf-size)"
    );
}

/// Lengths around those at which a packet needs one more buffer, and the longest ones.
const LONG: [usize; 8] = [1796, 1797, 3588, 3589, 9018, 9220, 65535, 65553];

#[test]
fn long_packets_come_back_clean() {
    for size in LONG {
        let mut port = Loop::of(&format!("gen:size={size},flows=5"), 4096);
        let pool = port.worker.cache.pool();
        let report = port.run(20, |_, _, burst| {
            assert_eq!(burst.len(), 64);
            assert!(burst.iter().all(|packet| pool.total_len(packet) == size - 4));
        });
        assert!(
            report.is_clean() && report.missing() == Some(0) && report.foreign == 0,
            "{size}: {report:?}"
        );
        assert_eq!((report.received, report.verified), (1280, 1280), "{size}");
        let bytes = 1280 * (size as u64 - 4);
        assert_eq!((port.rx.counters().bytes(), port.tx.counters().bytes()), (bytes, bytes), "{size}");
    }
}

#[test]
fn a_changed_byte_is_found_in_every_buffer() {
    const LEN: usize = 9014;
    for at in [58, 1791, 1792, 3583, 3584, 8960, LEN - 1] {
        let mut port = Loop::of("gen:size=9018,flows=3", 2048);
        let report = port.run(3, |port, n, burst| {
            if n == 1 {
                let pool = port.worker.cache.pool();
                *pool.segments_mut(&mut burst[30]).flatten().nth(at).unwrap() ^= 0x10;
            }
        });
        assert_eq!((report.corrupt, report.lost, report.received), (1, 0, 192), "byte {at}: {report:?}");
    }
    // A packet without its last buffer, and two packets whose last buffers were exchanged.
    let mut port = Loop::of("gen:size=9018", 2048);
    let report = port.run(2, |port, n, burst| {
        if n == 1 {
            port.worker.cache.truncate(&mut burst[7], 8960);
            let pool = port.worker.cache.pool();
            let [left, right] = [10, 11].map(|i| pool.split(&mut burst[i]).unwrap());
            for (i, rest) in [(10, right), (11, left)] {
                let front = burst.remove(i);
                burst.insert(i, pool.link(front, rest));
            }
        }
    });
    // The number of the truncated packet is not reliable, so it also counts as lost.
    assert_eq!((report.corrupt, report.lost, report.foreign), (3, 1, 0), "{report:?}");
}

#[test]
fn nearly_dry_pool_makes_whole_packets() {
    let mut port = Loop::of("gen:size=9018", 512);
    let all: Vec<Packet> = std::iter::from_fn(|| port.worker.cache.take()).collect();
    let mut hoard = all;
    for free in [0, 3, 5, 6, 11, 12, 40] {
        port.worker.cache.free_all(hoard.drain(..free));
        let burst = port.receive();
        assert_eq!(burst.len(), free / 6);
        port.send(burst);
        while hoard.len() < port.chunks {
            hoard.push(port.worker.cache.take().unwrap());
        }
    }
    port.worker.cache.free_all(hoard);
    assert!(port.run(2, |_, _, _| ()).is_clean());
}

#[test]
fn sink_counts_anything_once() {
    use proptest::prelude::*;
    let mut port = Loop::of("gen:size=200", 1024);
    let strategy = prop::collection::vec(
        (0..3u8, prop::collection::vec(any::<u8>(), 0..300), any::<prop::sample::Index>(), 0..6000usize),
        0..20,
    );
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(200));
    let port = std::cell::RefCell::new(&mut port);
    runner
        .run(&strategy, |steps| {
            let mut port = port.borrow_mut();
            let mut burst = port.receive();
            let pool = port.worker.cache.pool();
            let own = burst.len() as u64;
            let before = port.port.report();
            for (what, noise, index, len) in steps {
                match what {
                    // A packet of arbitrary bytes and length.
                    0 => {
                        let bytes: Vec<u8> = noise
                            .iter()
                            .copied()
                            .cycle()
                            .take(if noise.is_empty() { 0 } else { len })
                            .collect();
                        let dropped = burst.pop().unwrap();
                        port.worker.cache.free(dropped);
                        let packet = port.worker.packet_with(&Default::default(), &bytes);
                        burst.push(packet);
                    }
                    // Arbitrary bytes over the headers or the payload of a probe.
                    _ => {
                        let packet = index.get_mut(&mut burst);
                        let bytes = pool.segments_mut(packet).flatten().skip(len % 100);
                        bytes.zip(&noise).for_each(|(to, from)| *to = *from);
                    }
                }
            }
            port.send(burst);
            let after = port.port.report();
            // A returned probe is counted as received, and possibly as corrupt. Other packets are counted as corrupt or
            // foreign only.
            let counted = after.received + after.corrupt + after.foreign
                - before.received
                - before.corrupt
                - before.foreign;
            prop_assert!((own..=2 * own).contains(&counted), "{own} packets, {before:?} {after:?}");
            Ok(())
        })
        .unwrap();
    let port = port.into_inner();
    assert_eq!(port.worker.free_chunks(), port.chunks);
}

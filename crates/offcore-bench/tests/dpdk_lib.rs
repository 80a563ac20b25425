//! Tests the peer `dpdk-lib` with dpdk-testpmd as virtio-user front end. Every packet is counted, and every byte
//! compared.
#![cfg(feature = "dpdk")]
// clippy.toml allows it only in test functions. The helpers here are part of the tests.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use offcore_bench::machine::{find_program, free_hugepage_mib};
use offcore_bench::peer::dpdk_lib::{Burst, DpdkConfig, DpdkLib, Offer, Pages, Port};
use offcore_bench::peer::testpmd::{Testpmd, TestpmdConfig, VirtioUser};
use offcore_mem::testing::TempDir;
use offcore_stats::lcore;

const MBUFS: u32 = 8192;
/// MiB of hugepages that EAL needs for a pool of [`MBUFS`] buffers.
const HUGE_MIB: u32 = 84;
const BURST: usize = 32;
/// Offset of a packet's sequence number (8 bytes, big-endian): after Ethernet (14), IPv4 (20) and UDP (8).
const SEQUENCE_OFFSET: usize = 42;
const TIMEOUT: Duration = Duration::from_secs(20);
const VIRTIO_F_RING_PACKED: u64 = 1 << 34;
const MRG_RXBUF: u64 = 1 << 15;
/// Set in the process that repeats the test on hugepages, because EAL can start only once per process.
const HUGE: &str = "OFFCORE_TEST_DPDK_HUGE";

/// Serialises the tests, because a process can have only one peer at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn config() -> DpdkConfig {
    let pages = if std::env::var_os(HUGE).is_some() { Pages::Huge } else { Pages::Ordinary };
    DpdkConfig { pages, lcore: lcore::available().unwrap()[0], mbufs: MBUFS }
}

fn skip(reason: &str) {
    assert!(std::env::var_os("CI").is_none(), "a skip is a failure under CI: {reason}");
    println!("SKIP: {reason}");
}

fn testpmd_missing() -> bool {
    let missing = find_program("dpdk-testpmd").is_none();
    if missing {
        skip("dpdk-testpmd is not installed (Debian: apt-get install dpdk)");
    }
    missing
}

/// Starts dpdk-testpmd with one virtio-user port. It starts the device when it probes the port and again when it
/// configures the port. Packets of the first start would be lost, so this function returns after the second.
fn front_end(socket: &Path, packed_vq: bool, queues: u16) -> Testpmd {
    let port = VirtioUser { queues, packed_vq, ..VirtioUser::new(socket) };
    // A separate lcore if two are available.
    let core = *lcore::available().unwrap().last().unwrap();
    let config = TestpmdConfig {
        memory_mb: 512,
        mbufs: 8192,
        args: vec!["--no-flush-rx".into()],
        ..TestpmdConfig::virtio_user(core, &port)
    };
    Testpmd::start(&config).unwrap()
}

/// Returns an IPv4/UDP frame of `len` bytes (without FCS) whose payload is a pattern.
fn frame(len: u16) -> Vec<u8> {
    let mut frame: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
    frame[..14].copy_from_slice(&[0x02, 0, 0, 0, 0, 0xaa, 0x02, 0, 0, 0, 0, 0xbb, 0x08, 0x00]);
    frame[14] = 0x45;
    frame[23] = 17;
    frame
}

fn expected(frame: &[u8], sequence: u64) -> Vec<u8> {
    let mut packet = frame.to_vec();
    packet[SEQUENCE_OFFSET..SEQUENCE_OFFSET + 8].copy_from_slice(&sequence.to_be_bytes());
    packet
}

/// Sends `total` packets to a front end that echoes them. All must come back in order and unchanged.
fn echo(dpdk: &DpdkLib, port: &Port, pair: u8, len: u16, total: u64) {
    let frame = frame(len);
    let mut burst = dpdk.burst();
    let (mut sent, mut back) = (0_u64, 0_u64);
    let mut progress = Instant::now();
    while back < total {
        if sent - back <= 64 && sent < total {
            let count = BURST.min(usize::try_from(total - sent).unwrap());
            burst.fill(count, len, |i| expected(&frame, sent + i as u64)).unwrap();
            sent += dpdk.enqueue(port, pair, &mut burst).unwrap() as u64;
        }
        if dpdk.dequeue(port, pair, &mut burst, BURST).unwrap() > 0 {
            progress = Instant::now();
        }
        for i in 0..burst.len() {
            assert_eq!(burst.packet(i).unwrap(), expected(&frame, back), "packet {back} of {len} bytes");
            back += 1;
        }
        burst.clear();
        assert!(progress.elapsed() < TIMEOUT, "pair {pair}, {len} bytes: {sent} sent, {back} back");
    }
    assert_eq!((sent, back), (total, total));
}

/// Dequeues and drops packets until none has arrived for 300 ms. Returns their number.
fn drain(dpdk: &DpdkLib, port: &Port, burst: &mut Burst) -> u64 {
    let (mut total, mut last) = (0, Instant::now());
    while last.elapsed() < Duration::from_millis(300) {
        let n = dpdk.dequeue(port, 0, burst, BURST).unwrap();
        if n > 0 {
            last = Instant::now();
        }
        total += n as u64;
        burst.clear();
    }
    total
}

#[test]
fn every_ring_echoes_every_byte() {
    let _alone = alone();
    if testpmd_missing() {
        return;
    }
    let scratch = TempDir::new();
    let dpdk = DpdkLib::open(&config()).unwrap();
    let on_huge = config().pages == Pages::Huge;
    assert_eq!(dpdk.page_size() > 4096, on_huge, "pages of {} bytes", dpdk.page_size());
    for (packed, mergeable) in [(false, true), (false, false), (true, true)] {
        let offer = Offer { packed, mergeable, ..Offer::default() };
        let port = dpdk.register(&scratch.file("v.sock"), &offer).unwrap();
        // The front end supports both, so that the offer decides the result of the negotiation.
        let mut front_end = front_end(&scratch.file("v.sock"), true, 2);
        front_end.set_forward("io").unwrap();
        front_end.start_forwarding().unwrap();
        dpdk.wait_ready(&port, 2, TIMEOUT).unwrap();
        let features = dpdk.features(&port).unwrap();
        assert_eq!(features & VIRTIO_F_RING_PACKED != 0, packed, "{features:#x}");
        assert_eq!(features & MRG_RXBUF != 0, mergeable, "{features:#x}");
        for (pair, len, total) in [(0, 60, 5000), (1, 60, 1000), (0, 1514, 5000), (0, 2048, 500)] {
            echo(&dpdk, &port, pair, len, total);
        }
        drop(port);
        assert!(!scratch.file("v.sock").exists(), "the socket is removed with its port");
    }
}

#[test]
fn echo_on_hugepages() {
    let _alone = alone();
    if free_hugepage_mib() < HUGE_MIB {
        return skip("not enough free hugepages (sysctl -w vm.nr_hugepages=512)");
    }
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "every_ring_echoes_every_byte"])
        .env(HUGE, "1")
        .status()
        .unwrap();
    assert!(status.success(), "{status}");
}

#[test]
fn mac_forwarding_changes_addresses_only() {
    let _alone = alone();
    if testpmd_missing() {
        return;
    }
    const DESTINATION: [u8; 6] = [0x02, 1, 2, 3, 4, 5];
    const SOURCE: [u8; 6] = [0x02, 9, 8, 7, 6, 5];
    let scratch = TempDir::new();
    let dpdk = DpdkLib::open(&config()).unwrap();
    let port = dpdk.register(&scratch.file("v.sock"), &Offer::default()).unwrap();
    let mut front_end = front_end(&scratch.file("v.sock"), false, 1);
    front_end.set_forward("io").unwrap();
    front_end.set_tx_length(300).unwrap();
    front_end.start_forwarding_tx_first(2).unwrap();
    dpdk.wait_ready(&port, 1, TIMEOUT).unwrap();

    let mut burst = dpdk.burst();
    let mut original = Vec::new();
    let (mut received, mut sent, mut progress) = (0_u64, 0_u64, Instant::now());
    while sent < 50_000 {
        let n = dpdk.dequeue(&port, 0, &mut burst, BURST).unwrap();
        received += n as u64;
        for i in 0..n {
            let packet = burst.packet(i).unwrap();
            assert_eq!(packet.len(), 300);
            if original.is_empty() {
                original = packet.to_vec();
                assert_ne!(original[..12], [DESTINATION, SOURCE].concat());
            }
        }
        burst.rewrite_mac(&DESTINATION, &SOURCE);
        for i in 0..n {
            let packet = burst.packet(i).unwrap();
            assert_eq!(packet[..12], [DESTINATION, SOURCE].concat());
            // testpmd numbers its packets in the IPv4 header, which also changes the checksum.
            assert_eq!(packet[12..18], original[12..18]);
            assert_eq!(packet[26..], original[26..]);
        }
        if n > 0 {
            progress = Instant::now();
            sent += dpdk.enqueue(&port, 0, &mut burst).unwrap() as u64;
            assert!(burst.is_empty());
        }
        assert!(progress.elapsed() < TIMEOUT, "{sent} forwarded, then nothing");
    }
    assert_eq!(sent, received, "64 circulating packets always find room in a ring of 256");
    received += drain(&dpdk, &port, &mut burst);
    let stats = front_end.stop_forwarding().unwrap();
    let stats = stats.port(0).unwrap();
    assert_eq!((stats.rx_packets, stats.tx_packets), (sent, received), "testpmd's (received, sent)");
    assert_eq!(received - sent, 64);
}

#[test]
fn full_ring_accepts_what_fits() {
    let _alone = alone();
    if testpmd_missing() {
        return;
    }
    let scratch = TempDir::new();
    let dpdk = DpdkLib::open(&config()).unwrap();
    let port = dpdk.register(&scratch.file("v.sock"), &Offer::default()).unwrap();
    // testpmd does not receive before the "start" command.
    let mut front_end = front_end(&scratch.file("v.sock"), false, 1);
    dpdk.wait_ready(&port, 1, TIMEOUT).unwrap();
    let frame = frame(60);
    let mut burst = dpdk.burst();
    let send = |burst: &mut Burst, from: u64| {
        burst.fill(BURST, 60, |i| expected(&frame, from + i as u64)).unwrap();
        dpdk.enqueue(&port, 0, burst).unwrap() as u64
    };
    // The front end fills its ring after enabling it.
    let (mut taken, since) = (0, Instant::now());
    while taken < 256 {
        taken += send(&mut burst, taken);
        assert!(since.elapsed() < TIMEOUT, "{taken} taken");
    }
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(send(&mut burst, taken), 0, "queue_size=256");
    assert!(burst.is_empty());

    front_end.set_forward("io").unwrap();
    front_end.start_forwarding().unwrap();
    let mut back = 0;
    while back < 256 {
        dpdk.dequeue(&port, 0, &mut burst, BURST).unwrap();
        for i in 0..burst.len() {
            assert_eq!(burst.packet(i).unwrap(), expected(&frame, back));
            back += 1;
        }
        burst.clear();
        assert!(since.elapsed() < TIMEOUT, "{back} back");
    }
    assert_eq!(drain(&dpdk, &port, &mut burst), 0);
    assert_eq!(send(&mut burst, back), BURST as u64);
}

#[test]
fn front_end_may_crash_and_reconnect() {
    let _alone = alone();
    if testpmd_missing() {
        return;
    }
    let scratch = TempDir::new();
    let dpdk = DpdkLib::open(&config()).unwrap();
    let port = dpdk.register(&scratch.file("v.sock"), &Offer::default()).unwrap();
    let mut burst = dpdk.burst();
    for round in 0..3 {
        let mut front_end = front_end(&scratch.file("v.sock"), false, 1);
        front_end.set_forward("txonly").unwrap();
        front_end.start_forwarding().unwrap();
        dpdk.wait_ready(&port, 1, TIMEOUT).unwrap();
        let since = Instant::now();
        while dpdk.dequeue(&port, 0, &mut burst, BURST).unwrap() == 0 {
            assert!(since.elapsed() < TIMEOUT, "round {round}: nothing came");
        }
        burst.clear();
        // Killed while this thread is mostly inside librte_vhost.
        let kill = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            front_end.kill();
        });
        let (since, gone) = (
            Instant::now(),
            loop {
                match dpdk.dequeue(&port, 0, &mut burst, BURST) {
                    Ok(_) => burst.clear(),
                    Err(error) => break error,
                }
            },
        );
        assert!(since.elapsed() < TIMEOUT);
        kill.join().unwrap();
        let message = format!("{gone:#}");
        assert!(message.contains("no front end is connected to") && message.contains("v.sock"), "{message}");
        burst.fill(1, 60, |_| frame(60)).unwrap();
        dpdk.enqueue(&port, 0, &mut burst).unwrap_err();
        assert!(burst.is_empty());
    }
}

#[test]
fn invalid_settings_are_explained() {
    let _alone = alone();
    let scratch = TempDir::new();
    let refused = |result: anyhow::Result<DpdkLib>, words: &str| {
        let message = format!("{:#}", result.unwrap_err());
        assert!(message.contains(words), "{message}");
    };
    refused(DpdkLib::open(&DpdkConfig { mbufs: 100, ..config() }), "at least 1024");

    let dpdk = DpdkLib::open(&config()).unwrap();
    refused(DpdkLib::open(&config()), "open in this process already");
    let offer = Offer::default();
    let port = dpdk.register(&scratch.file("v.sock"), &offer).unwrap();
    let message = format!("{:#}", dpdk.register(&scratch.file("v.sock"), &offer).unwrap_err());
    assert!(message.contains("v.sock") && message.contains("in use"), "{message}");
    let long = scratch.file(&"x".repeat(120));
    dpdk.register(&long, &offer).unwrap_err();
    dpdk.register(&scratch.file("no/such/directory"), &offer).unwrap_err();

    let message = format!("{:#}", dpdk.wait_ready(&port, 1, Duration::from_millis(50)).unwrap_err());
    assert!(message.contains("v.sock") && message.contains("1 queue pair"), "{message}");
    dpdk.dequeue(&port, 0, &mut dpdk.burst(), 1).unwrap_err();
    dpdk.features(&port).unwrap_err();
    assert!(scratch.file("v.sock").exists(), "the refused second port left the first one's socket alone");

    // A packet longer than a buffer, and more packets than the pool has.
    dpdk.burst().fill(1, 2049, |_| frame(2049)).unwrap_err();
    let take = |packets: usize, len| -> anyhow::Result<Vec<Burst>> {
        let full = |_| {
            let mut burst = dpdk.burst();
            burst.fill(Burst::CAPACITY, len, |_| frame(len)).map(|()| burst)
        };
        (0..packets / Burst::CAPACITY).map(full).collect()
    };
    take(MBUFS as usize + Burst::CAPACITY, 60).unwrap_err();
    // The failed calls kept no buffers: the whole pool is available, except for buffers in the thread's cache.
    drop(take(MBUFS as usize - 512, 2048).unwrap());
    drop((port, dpdk));

    let other = if config().pages == Pages::Huge { Pages::Ordinary } else { Pages::Huge };
    refused(DpdkLib::open(&DpdkConfig { pages: other, ..config() }), "starts only once");
    // The same on a thread that EAL does not know yet.
    let again = std::thread::spawn(|| {
        let dpdk = DpdkLib::open(&config()).unwrap();
        dpdk.burst().fill(64, 60, |_| frame(60)).unwrap();
    });
    again.join().unwrap();
}

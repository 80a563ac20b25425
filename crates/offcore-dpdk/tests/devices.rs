//! Tests DPDK's virtual devices: sent packets are received unchanged, and every packet buffer is returned.
#![cfg(feature = "dpdk")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use offcore_dpdk::ethdev::{Ethdev, Request};
use std::sync::Arc;

use offcore_mem::{BURST, Burst, DeviceMemory, HEADROOM, Hugepages, Mapping, Packet, Pool, PoolCache};

fn pool() -> &'static Pool {
    Pool::new(8192, 2048, Hugepages::Auto).unwrap()
}

fn request(device: &str) -> Request {
    Request { device: device.into(), queues: 1, promiscuous: true, ..Request::default() }
}

/// Returns how many buffers can be taken, which is all of them if none was lost.
fn free_buffers(cache: &mut PoolCache) -> usize {
    let all: Vec<Packet> = std::iter::from_fn(|| cache.take()).collect();
    let count = all.len();
    cache.free_all(all);
    count
}

#[test]
fn net_null_sends_and_receives() {
    let pool = pool();
    let mut cache = pool.cache();
    let device = Ethdev::open(&request("net_null0"), pool).unwrap();
    assert_eq!(device.driver(), "net_null");
    let (mut rx, mut tx) = (device.rx(0), device.tx(0));
    let mut burst = Burst::new();
    for _ in 0..10_000 {
        let receipt = rx.rx(&mut cache, &mut burst, 32);
        assert_eq!((receipt.packets, receipt.bytes, receipt.malformed), (32, 32 * 64, 0));
        assert!(burst.iter().all(|packet| packet.len() == 64 && packet.is_plain() && pool.owns(packet)));
        let sent = tx.tx(&mut cache, &mut burst);
        assert_eq!((sent.packets, sent.bytes, burst.len()), (32, 32 * 64, 0));
    }
    drop((device, rx, tx));
    assert_eq!(free_buffers(&mut cache), pool.chunks());
}

#[test]
fn net_ring_returns_every_byte() {
    let pool = pool();
    let mut cache = pool.cache();
    let device = Ethdev::open(&request("net_ring0"), pool).unwrap();
    let (mut rx, mut tx) = (device.rx(0), device.tx(0));
    let (mut burst, mut next) = (Burst::new(), 0u32);
    let mut expected = 0u32;
    let bytes = |number: u32, len: usize| (0..len).map(move |at| (number as usize * 31 + at * 7) as u8);
    for round in 0..2000 {
        for _ in 0..1 + round % BURST {
            // Packets of one buffer, or of up to four.
            let len = 60 + (next as usize * 977) % if round % 3 == 0 { 6000 } else { 1400 };
            let mut packet = cache.take_chain(HEADROOM - round % 100, len).unwrap();
            let content = bytes(next, len);
            pool.segments_mut(&mut packet).flatten().zip(content).for_each(|(byte, value)| *byte = value);
            burst.push(packet);
            next += 1;
        }
        let count = burst.len();
        assert_eq!((tx.tx(&mut cache, &mut burst).packets, burst.len()), (count, 0));
        while expected < next {
            let receipt = rx.rx(&mut cache, &mut burst, 32);
            assert!(receipt.packets > 0 && receipt.malformed == 0, "{receipt:?}");
            for packet in burst.drain(..) {
                let len = pool.total_len(&packet);
                assert!(
                    pool.segments(&packet).flatten().copied().eq(bytes(expected, len)),
                    "packet {expected}"
                );
                cache.free(packet);
                expected += 1;
            }
        }
    }
    // The ring eventually becomes full. Packets that it does not accept stay in the burst, complete.
    let mut left = 0;
    let mut sent = 0;
    while left == 0 {
        burst.extend((0..32).map(|_| cache.take_chain(HEADROOM, 4000).unwrap()));
        let now = tx.tx(&mut cache, &mut burst);
        assert_eq!((now.packets + burst.len(), now.bytes), (32, now.packets as u64 * 4000));
        sent += now.packets;
        left = burst.len();
    }
    assert!(burst.iter().all(|packet| pool.segment_count(packet) == 3 && pool.total_len(packet) == 4000));
    cache.free_all(burst.drain(..));
    while sent > 0 {
        sent -= rx.rx(&mut cache, &mut burst, 64).packets;
        cache.free_all(burst.drain(..));
    }
    drop((device, rx, tx));
    assert_eq!(free_buffers(&mut cache), pool.chunks());
}

#[test]
fn empty_pool_delays_reception() {
    let pool = Pool::new(128, 2048, Hugepages::None).unwrap();
    let mut cache = pool.cache();
    let request = Request { rx_desc: Some(16), ..request("net_null1") };
    let device = Ethdev::open(&request, pool).unwrap();
    let mut rx = device.rx(0);
    let held: Vec<Packet> = std::iter::from_fn(|| cache.take()).collect();
    let mut burst = Burst::new();
    assert_eq!(rx.rx(&mut cache, &mut burst, 32).packets, 0);
    cache.free_all(held);
    assert_eq!(rx.rx(&mut cache, &mut burst, 32).packets, 32);
    cache.free_all(burst.drain(..));
    drop((device, rx));
    assert_eq!(free_buffers(&mut cache), 128);
}

#[test]
fn open_errors_name_the_remedy() {
    let pool = pool();
    let with = |request: Request, words: &[&str]| {
        let error = Ethdev::open(&request, pool).unwrap_err().to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{request:?}: {error}");
    };
    with(request("net_nothing0"), &["net_nothing0", "such as net_null0"]);
    with(request("0000:ff:1f.6"), &["there is no PCI device 0000:ff:1f.6", "lspci"]);
    with(request("net_af_xdp0"), &["af_xdp:INTERFACE"]);
    with(request("net_af_packet0"), &["net_af_packet0", "iface="]);
    with(Request { queues: 99, ..request("net_ring2") }, &["queues=99", "the device has"]);
    with(Request { rx_desc: Some(8192), ..request("net_null3") }, &["8192", "--mbufs"]);
    let there = Ethdev::open(&request("net_null4"), pool).unwrap();
    let args = Some("size=100".into());
    with(Request { args, ..request("net_null4") }, &["is there already", "--eal"]);
    drop(there);
    let again =
        Ethdev::open(&Request { args: Some("size=100".into()), ..request("net_null4") }, pool).unwrap();
    let mut cache = pool.cache();
    let mut burst = Burst::new();
    assert_eq!(again.rx(0).rx(&mut cache, &mut burst, 4).bytes, 400);
    cache.free_all(burst.drain(..));
}

/// Creates a mapping that represents a device's memory, for the packets of `pool`.
fn elsewhere(pool: &Pool) -> (Arc<Mapping>, DeviceMemory) {
    let len = pool.chunks() * pool.chunk_size();
    let mapping = Arc::new(Mapping::memfd("offcore-test", len, Hugepages::None).unwrap().0);
    let base = mapping.base().as_ptr().expose_provenance();
    let (len, page_size) = (mapping.len(), mapping.page_size());
    // SAFETY: the range is the mapping, which tests only read.
    (Arc::clone(&mapping), unsafe { DeviceMemory::new("host", base, len, page_size, true, mapping) })
}

/// net_pcap uses the CPU to copy received packets out of a file and sent packets into one.
#[test]
fn device_memory_receives_and_sends() {
    let pool = pool();
    let mut cache = pool.cache();
    let (mapping, memory) = elsewhere(pool);
    let directory = std::env::temp_dir();
    let [from, to] =
        ["from", "to"].map(|name| directory.join(format!("offcore-{}-{name}.pcap", std::process::id())));
    let content = |number: u8| (0..60).map(move |at| number.wrapping_mul(31) + at);
    // The file header says microsecond timestamps and Ethernet; each packet header has time 0, length 60, original
    // length 60.
    let mut file: Vec<u8> =
        [0xa1b2_c3d4, 4 << 16 | 2, 0, 0, 65_535, 1u32].iter().flat_map(|word| word.to_le_bytes()).collect();
    for number in 0..200 {
        file.extend([0, 0, 60, 60u32].iter().flat_map(|word| word.to_le_bytes()));
        file.extend(content(number));
    }
    std::fs::write(&from, &file).unwrap();
    let args = format!("rx_pcap={},tx_pcap={}", from.display(), to.display());
    let request = Request { args: Some(args), memory: Some(memory), ..request("net_pcap0") };
    let device = Ethdev::open(&request, pool).unwrap();
    let (mut rx, mut tx) = (device.rx(0), device.tx(0));
    let (mut burst, mut number) = (Burst::new(), 0);
    while number < 200 {
        rx.rx(&mut cache, &mut burst, 32);
        for packet in &burst {
            let place = packet.chunk() as usize * pool.chunk_size() + packet.headroom();
            let mut received = [0; 60];
            mapping.read_at(place, &mut received);
            assert!(packet.len() == 60 && content(number).eq(received), "packet {number}");
            // The test plays the device's part.
            mapping.write_at(place, b"swapped");
            number += 1;
        }
        let count = burst.len();
        assert_eq!(tx.tx(&mut cache, &mut burst).packets, count);
    }
    drop((device, rx, tx));
    let sent = std::fs::read(&to).unwrap();
    assert_eq!(sent.len(), file.len());
    for number in 0..200 {
        let packet = &sent[24 + usize::from(number) * 76 + 16..][..60];
        assert!(packet.starts_with(b"swapped") && content(number).skip(7).eq(packet[7..].iter().copied()));
    }
    // The pool's memory was not used.
    let (base, len) = pool.memory();
    for place in (0..len).step_by(64) {
        // SAFETY: the range is within the pool's memory, which is not used at this point.
        let own = unsafe { base.add(place).cast::<[u8; 64]>().read() };
        assert_eq!(own, [0; 64], "at {place}");
    }
    assert_eq!(free_buffers(&mut cache), pool.chunks());
    [from, to].iter().for_each(|file| std::fs::remove_file(file).unwrap());
}

#[test]
fn net_ring_passes_device_packets() {
    let pool = pool();
    let mut cache = pool.cache();
    let (mapping, memory) = elsewhere(pool);
    let request = Request { memory: Some(memory), ..request("net_ring1") };
    let device = Ethdev::open(&request, pool).unwrap();
    let (mut rx, mut tx) = (device.rx(0), device.tx(0));
    let mut burst = Burst::new();
    for round in 0..1000u32 {
        let mut sent = Vec::new();
        for number in 0..32 {
            let packet = cache.take_sized(HEADROOM - 4, 60 + number).unwrap();
            let place = packet.chunk() as usize * pool.chunk_size() + packet.headroom();
            mapping.write_at(place, &(round * 32 + number as u32).to_le_bytes());
            sent.push((packet.chunk(), packet.headroom(), packet.len()));
            burst.push(packet);
        }
        assert_eq!(tx.tx(&mut cache, &mut burst).packets, 32);
        assert_eq!(rx.rx(&mut cache, &mut burst, 32).packets, 32);
        for (number, packet) in burst.drain(..).enumerate() {
            assert_eq!((packet.chunk(), packet.headroom(), packet.len()), sent[number]);
            let mut bytes = [0; 4];
            mapping.read_at(packet.chunk() as usize * pool.chunk_size() + packet.headroom(), &mut bytes);
            assert_eq!(u32::from_le_bytes(bytes), round * 32 + number as u32);
            cache.free(packet);
        }
    }
    drop((device, rx, tx));
    assert_eq!(free_buffers(&mut cache), pool.chunks());
}

#[test]
fn unusable_device_memory_is_refused() {
    let pool = pool();
    let (mapping, _) = elsewhere(pool);
    let base = mapping.base().as_ptr().expose_provenance();
    // SAFETY: the range is at most the mapping, and it is not accessed.
    let of =
        |len, mapped| Some(unsafe { DeviceMemory::new("cuda:0", base, len, 4096, mapped, Arc::new(())) });
    let with = |request: Request, words: &[&str]| {
        let error = Ethdev::open(&request, pool).unwrap_err().to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{request:?}: {error}");
    };
    let small = Request { memory: of(4096, true), ..request("net_null6") };
    with(small, &["memory of cuda:0", "4096 bytes", "expected 16777216"]);
    let long = Request { memory: of(mapping.len(), true), mtu: Some(9000), ..request("net_null6") };
    with(long, &["MTU 9000", "--mbuf-size"]);
    let far = Request { memory: of(mapping.len(), false), ..request("net_null6") };
    with(far, &["net_null6 has no PCI address", "mlx5_core", "cuda:0"]);
}

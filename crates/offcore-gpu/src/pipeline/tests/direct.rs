//! Packets in device memory, written by the test in place of a network card.

use offcore_mem::{DeviceMemory, HEADROOM};

use super::*;

/// Returns the bytes of a packet in one buffer.
fn bytes(number: usize) -> Vec<u8> {
    content(if number % 37 == 36 { 0 } else { number })
}

/// Returns the address of a packet in device memory.
fn place(memory: &DeviceMemory, pool: &Pool, packet: &Packet) -> *mut u8 {
    memory.base().wrapping_add(packet.chunk() as usize * pool.chunk_size() + packet.headroom())
}

/// Returns a received packet: its bytes are in device memory, and the pool contains poison.
fn received(memory: &DeviceMemory, pool: &Pool, cache: &mut PoolCache, number: usize) -> Packet {
    let bytes = bytes(number);
    let mut packet = cache.take_sized(HEADROOM, bytes.len()).unwrap();
    packet.bytes_mut().fill(0xee);
    // SAFETY: the memory is as large as the pool, and the chunk is not shared.
    unsafe { place(memory, pool, &packet).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    packet
}

/// Returns the packet as a card would send it.
fn to_be_sent(memory: &DeviceMemory, pool: &Pool, packet: &Packet) -> Vec<u8> {
    // SAFETY: the memory is as large as the pool, and the device has answered, so it no longer accesses the chunk.
    unsafe { std::slice::from_raw_parts(place(memory, pool, packet), packet.len()) }.to_vec()
}

fn setup<'a, 'd>(
    device: &'d mut dyn GpuDevice,
    launch: Launch,
    pool: &'static Pool,
    kind: Kind,
    patterns: &'a Patterns,
    burst: usize,
) -> Setup<'a, 'd> {
    let worker = PipelineWorker::Device { device, launch, blocks: 2, threads: 64, memory: Memory::Direct };
    super::setup(worker, work(kind, Some(patterns)), burst, 4, pool)
}

/// Sends bursts and checks the packets that come back. Returns the number of lost packets.
fn through(device: &mut HostDevice, launch: Launch, kind: Kind, burst: usize, bursts: usize) -> u64 {
    let pool = Pool::new(16 * burst.max(128), 2048, Hugepages::None).unwrap();
    let memory = device.pool(pool.chunks() * pool.chunk_size()).unwrap();
    let mut cache = pool.cache();
    let patterns = Patterns::from_list([PATTERN]).unwrap();
    let mut setup = setup(device, launch, pool, kind, &patterns, burst);
    if bursts * burst < 1000 {
        setup.timeout = LONG_TIMEOUT;
    }
    let (mut front, mut back) = pipeline(setup).unwrap();
    let (mut sent, mut came, mut lost, mut gathered) = (0, 0, 0, Vec::new());
    let mut moved = Instant::now();
    while came < bursts * burst {
        if sent < bursts * burst && front.room(1) > 0 {
            gathered.extend((sent..sent + burst).map(|number| received(&memory, pool, &mut cache, number)));
            sent += burst;
            assert!(front.submit(&mut gathered) && gathered.is_empty());
        }
        let Some(done) = back.done() else {
            assert!(moved.elapsed() < Duration::from_secs(10), "nothing has come back for 10 s");
            std::thread::yield_now();
            continue;
        };
        moved = Instant::now();
        for (packet, result) in done.packets.drain(..).zip(done.results) {
            let number = if came % 37 == 36 { 0 } else { came };
            let found = (to_be_sent(&memory, pool, &packet), *result);
            assert_eq!(found, expected(number, kind, SKIP), "{launch}: packet {came}");
            assert!(packet.bytes().iter().all(|byte| *byte == 0xee), "{launch}: packet {came} in the pool");
            came += 1;
            cache.free(packet);
        }
        back.retire();
        let now = back.take_lost();
        (lost, came) = (lost + now, came + now as usize);
    }
    assert!(front.is_empty());
    drop((front, back));
    assert_all_free(pool, cache);
    lost
}

#[test]
fn direct_packets_use_no_pool_buffers() {
    for kind in [Kind::Nothing, Kind::Crc32c, Kind::Match] {
        for (burst, bursts) in [(1, 100), (7, 40), (64, 12), (300, 3)] {
            for launch in Launch::ALL {
                let mut device = HostDevice::new().unwrap();
                assert_eq!(through(&mut device, launch, kind, burst, bursts), 0);
                let notes = device.notes().join("\n");
                assert!(notes.contains("packets are received there"), "{notes}");
            }
        }
    }
}

#[test]
fn unanswered_direct_packets_are_counted() {
    for fault in [Fault::Dies(5), Fault::Hangs(5)] {
        for burst in [1, 64] {
            let mut device = HostDevice::new().unwrap().with_fault(fault);
            let bursts = 1024 / burst;
            let lost = through(&mut device, Launch::Kernel, Kind::Crc32c, burst, bursts);
            assert_eq!(lost, (burst * (bursts - 5)) as u64, "{fault:?}");
        }
    }
}

#[test]
fn packets_of_several_buffers_pass() {
    let pool = Pool::new(128, 2048, Hugepages::None).unwrap();
    let mut device = HostDevice::new().unwrap();
    let memory = device.pool(pool.chunks() * pool.chunk_size()).unwrap();
    let (mut cache, patterns) = (pool.cache(), Patterns::from_list([PATTERN]).unwrap());
    let setup = setup(&mut device, Launch::Persistent, pool, Kind::Crc32c, &patterns, 2);
    let (mut front, mut back) = pipeline(setup).unwrap();
    let jumbo = cache.take_chain(HEADROOM, 5000).unwrap();
    let mut packets = vec![jumbo, received(&memory, pool, &mut cache, 1)];
    assert!(front.submit(&mut packets));
    let done = wait(&mut back);
    assert_eq!((done.results[0], done.results[1], done.hits), (0, expected(1, Kind::Crc32c, SKIP).1, 1));
    cache.free_all(done.packets.drain(..));
    back.retire();
}

#[test]
fn hung_device_buffers_are_held_back() {
    let pool = Pool::new(128, 2048, Hugepages::None).unwrap();
    let (mut cache, patterns) = (pool.cache(), Patterns::from_list([PATTERN]).unwrap());
    let mut device = HungDevice::default();
    let hung = Arc::clone(&device.hung);
    let setup = setup(&mut device, Launch::Kernel, pool, Kind::Crc32c, &patterns, 2);
    let (mut front, mut back) = pipeline(setup).unwrap();
    let mut lost = |front: &mut Front, back: &mut Back, submit: usize| {
        for _ in 0..submit {
            assert!(front.submit(&mut [0, 1].map(|number| packet(pool, &mut cache, number, None)).into()));
        }
        assert!(wait(back).packets.is_empty());
        back.retire();
        (back.take_lost(), back.quarantined())
    };
    assert_eq!(lost(&mut front, &mut back, 2), (2, 2));
    assert!(back.failure().unwrap().contains("are held back"), "{:?}", back.failure());
    assert_eq!(lost(&mut front, &mut back, 0), (2, 4));
    // The device gets no more bursts.
    assert_eq!(lost(&mut front, &mut back, 1), (2, 4));
    hung.store(false, Ordering::Relaxed);
    assert_eq!(lost(&mut front, &mut back, 1), (2, 0));
    drop((front, back));
    assert_all_free(pool, cache);
}

#[test]
fn invalid_direct_setup_is_refused() {
    let pool = Pool::new(128, 2048, Hugepages::None).unwrap();
    let patterns = Patterns::from_list([PATTERN]).unwrap();
    let mut device = HostDevice::new().unwrap();
    let refused = |device: &mut HostDevice, split_at| {
        let mut setup = setup(device, Launch::Kernel, pool, Kind::Crc32c, &patterns, 2);
        setup.work.split_at = split_at;
        pipeline(setup).unwrap_err().to_string()
    };
    let text = refused(&mut device, None);
    assert!(text.contains("0 bytes for them, expected 262144"), "{text}");
    device.pool(262_144).unwrap();
    let text = refused(&mut device, Some(60));
    assert!(text.contains("cannot be split"), "{text}");
    // A device without memory for network cards.
    let text = HungDevice::default().pool(4096).unwrap_err().to_string();
    assert!(text.contains("hung") && text.contains("not for network cards"), "{text}");
}

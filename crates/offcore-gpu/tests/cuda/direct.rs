//! Packets in device memory, written by the test in place of a network card.

use std::ffi::{c_int, c_ulonglong};
use std::time::{Duration, Instant};

use libloading::Library;

use offcore_gpu::device::{Launch, Memory};
use offcore_gpu::devices;
use offcore_gpu::layout::Kind;
use offcore_gpu::pipeline::{PipelineWorker, Setup, Work, pipeline};
use offcore_mem::{HEADROOM, Hugepages, Packet, Pool};

use crate::rig::{FAKE_CUDA, Fake};

const BURSTS: usize = 4;
const BURST: usize = 64;

/// Writes to device memory like a network card. A device must be open, and no kernel may run.
fn write(at: *mut u8, bytes: &[u8]) {
    // SAFETY: the fake library is loaded. The function has the type in memory.cpp, which checks the address.
    let done = unsafe {
        let library = Library::new(FAKE_CUDA.unwrap()).unwrap();
        let copy =
            library.get::<unsafe extern "C" fn(c_ulonglong, *const u8, usize) -> c_int>("cuMemcpyHtoD_v2");
        copy.unwrap()(at.addr() as c_ulonglong, bytes.as_ptr(), bytes.len())
    };
    assert_eq!(done, 0);
}

fn content(number: usize) -> Vec<u8> {
    (0..60 + number * 7 % 1400).map(|at| (number * 31 + at * 13) as u8).collect()
}

/// Checks that every packet's result was computed from device memory, and that its addresses are swapped. Returns the
/// number of flushes.
fn check_device_memory_results(fake: &Fake, launch: Launch) -> u64 {
    let mut device = devices::open("cuda:0").unwrap();
    let pool = Pool::new(1024, 2048, Hugepages::None).unwrap();
    let memory = device.pool(pool.chunks() * pool.chunk_size()).unwrap();
    assert!(memory.base().addr().is_multiple_of(65_536) && !memory.is_mapped() && memory.holds(pool));
    assert_eq!(memory.device(), "cuda:0");
    let mut cache = pool.cache();
    let mut packets: Vec<Packet> = (0..BURSTS * BURST)
        .map(|number| {
            let bytes = content(number);
            let packet = cache.take_sized(HEADROOM, bytes.len()).unwrap();
            let place = packet.chunk() as usize * pool.chunk_size() + packet.headroom();
            write(memory.base().wrapping_add(place), &bytes);
            packet
        })
        .collect();
    let registered = fake.calls("cuMemHostRegister_v2");
    let worker = PipelineWorker::Device {
        device: &mut *device,
        launch,
        blocks: 2,
        threads: 64,
        memory: Memory::Direct,
    };
    let work = Work { kind: Kind::Crc32c, swap: true, ..Work::default() };
    let (slots, timeout) = (BURSTS, Duration::from_secs(10));
    let setup = Setup { burst: BURST, slots, worker, work, timeout, pool, hugepages: Hugepages::None };
    let (mut front, mut back) = pipeline(setup).unwrap();
    assert_eq!(fake.calls("cuMemHostRegister_v2"), registered + 1, "the ring alone");
    for _ in 0..BURSTS {
        assert!(front.submit(&mut packets.drain(..BURST).collect()));
    }
    let (mut number, since) = (0, Instant::now());
    while number < BURSTS * BURST {
        assert!(since.elapsed() < Duration::from_secs(10), "a burst does not come back");
        let Some(done) = back.done() else { continue };
        for (packet, result) in done.packets.drain(..).zip(done.results) {
            let mut expected = content(number);
            expected[..12].rotate_left(6);
            assert_eq!(*result, crc32c::crc32c(&expected), "{launch}: packet {number}");
            number += 1;
            cache.free(packet);
        }
        back.retire();
    }
    let notes = device.notes().join("\n");
    assert!(notes.contains("never run on a GPU") && notes.contains("in GPU memory"), "{notes}");
    let waits = fake.calls("cuFlushGPUDirectRDMAWrites");
    drop((front, back, device, memory));
    assert_eq!(fake.live(), "nothing");
    waits
}

#[test]
fn packets_are_processed_in_device_memory() {
    for launch in Launch::ALL {
        let fake = Fake::new();
        fake.set("gpudirect", 1);
        assert_eq!(check_device_memory_results(&fake, launch), BURSTS as u64, "once for each burst");
        drop(fake);
        // A device that sees a card's writes in order.
        let fake = Fake::new();
        fake.set("gpudirect", 2);
        assert_eq!(check_device_memory_results(&fake, launch), 0);
    }
}

#[test]
fn device_without_gpudirect_is_refused() {
    let _fake = Fake::new();
    let text = devices::open("cuda:0").unwrap().pool(1 << 20).unwrap_err().to_string();
    assert!(text.contains("cuda:0") && text.contains("memory gpu"), "{text}");
}

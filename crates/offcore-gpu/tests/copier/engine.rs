//! The engine under the suite, with memory that it does not reach, and with a device that is lost.

use std::time::{Duration, Instant};

use offcore_dma::channel::{Channel, Completions, Copy, Device, EngineError, Failure, Reset};
use offcore_dma::conformance::CHECKS;
use offcore_gpu::copier::CudaCopier;
use offcore_mem::{Hugepages, Pool};

use crate::arena::{elsewhere, memory};
use crate::rig::Fake;

/// The engine, which reaches all that this program allocates.
fn engine() -> CudaCopier {
    // SAFETY: the arena is there until the process ends.
    unsafe { CudaCopier::reaching(0, &[memory()]) }.unwrap()
}

fn run(name: &str) {
    let fake = Fake::new();
    let (_, check) = CHECKS.iter().find(|(n, _)| *n == name).unwrap();
    let device = engine();
    // So that copies are under way when a channel is reset or dropped.
    fake.set("copy_us", if name.starts_with("after_") { 50 } else { 0 });
    check(&|size| device.open_channel(size).unwrap(), &mut || ());
    // It does not fill.
    assert_eq!(fake.calls("cuMemcpyAsync") == 0, name.contains("fills"), "copies by the device");
    assert_eq!(fake.calls("host to host"), 0, "copies by the caller");
    drop(device);
    assert_eq!(fake.live(), "nothing");
}

macro_rules! suite {
    ($($check:ident),* $(,)?) => {
        $(
            #[test]
            fn $check() {
                run(stringify!($check));
            }
        )*

        #[test]
        fn every_check_is_run() {
            let here = [$(stringify!($check)),*];
            assert!(CHECKS.iter().map(|(name, _)| *name).eq(here), "the lists of checks differ");
        }
    };
}

suite![
    every_length_at_odd_offsets,
    every_alignment,
    scatter_gather,
    fills,
    copies_and_fills_mixed,
    a_full_ring_takes_no_more,
    rings_wrap_in_bursts_of_every_length,
    each_token_comes_back_once,
    order_is_kept_or_declared_open,
    polls_add_what_fits,
    channels_do_not_mix,
    ring_sizes_are_as_asked,
    too_long_is_refused,
    stop_and_start,
    statistics_are_exact,
    after_a_reset_nothing_lands,
    after_a_drop_nothing_lands,
    a_channel_moves_to_another_thread,
];

/// Polls until nothing is in flight: tokens that succeeded, and those that failed with their reason.
fn drain(channel: &mut dyn Channel) -> (Vec<u32>, Vec<(u32, Failure)>) {
    let (mut succeeded, mut failed, since) = (Vec::new(), Vec::new(), Instant::now());
    while channel.in_flight() > 0 {
        let mut completions = Completions::default();
        channel.poll(&mut completions);
        succeeded.extend(completions.tokens);
        failed.extend(completions.failed.iter().map(|one| (one.operation.token(), one.failure)));
        assert!(since.elapsed() < Duration::from_secs(10), "no progress for 10 s");
        std::thread::yield_now();
    }
    (succeeded, failed)
}

fn copy(src: *const u8, dst: *mut u8, len: u32, token: u32) -> Copy {
    Copy { src, dst, len, token }
}

#[test]
fn copies_in_memory_that_the_device_does_not_reach_fail_in_their_turn() {
    let fake = Fake::new();
    let pool = Pool::new(64, 2048, Hugepages::None).unwrap();
    let (base, len) = (pool.mapping().base().as_ptr(), pool.mapping().len());
    let far = elsewhere(4096);
    far.fill(9);
    fake.name("NVIDIA H200");
    let device = CudaCopier::open(0, Some(pool)).unwrap();
    let note = device.note();
    assert!(note.contains("NVIDIA H200") && note.contains("packet buffers only"), "{note}");
    let mut channel = device.open_channel(16).unwrap();
    // SAFETY: nobody else has the pool.
    unsafe { base.write_bytes(7, 4096) };
    let to = base.wrapping_add(8192);
    let last = base.wrapping_add(len - 64);
    let ops = [
        copy(base, to, 64, 0),
        copy(far.as_ptr(), to.wrapping_add(64), 64, 1),
        copy(base, to.wrapping_add(128), 0, 2),
        copy(base, far.as_mut_ptr(), 64, 3),
        copy(base, last, 64, 4),
        copy(base, last, 65, 5),
        copy(far.as_ptr(), far.as_mut_ptr().wrapping_add(64), 64, 6),
    ];
    // SAFETY: pool and memory stay; what is past the pool's end is not touched.
    assert_eq!(unsafe { channel.copy(&ops) }, 7);
    channel.submit();
    let (succeeded, failed) = drain(&mut *channel);
    assert_eq!(succeeded, [0, 2, 4]);
    assert_eq!(failed, [1, 3, 5, 6].map(|token| (token, Failure::PageFault)));
    assert_eq!(fake.calls("cuMemcpyAsync"), 2 * 2, "the driver is not asked for what it does not reach");
    let stats = channel.stats();
    assert_eq!((stats.submitted, stats.completed, stats.failed, stats.bytes), (7, 3, 4, 128));
    // SAFETY: nothing is in flight.
    let (near, end) = unsafe { (std::slice::from_raw_parts(to, 256), std::slice::from_raw_parts(last, 64)) };
    assert!(near[..64].iter().chain(end).all(|byte| *byte == 7) && near[64..].iter().all(|byte| *byte == 0));
    assert!(far.iter().all(|byte| *byte == 9));
    drop(channel);
    drop(device);
    assert_eq!(fake.live(), "nothing");
}

#[test]
fn more_bursts_than_events_are_reported_all_the_same() {
    let _fake = Fake::new();
    let device = engine();
    let mut channel = device.open_channel(1024).unwrap();
    let (source, mut destination) = (vec![7u8; 64], vec![0u8; 1024 * 64]);
    for token in 0..1024 {
        let at = destination.as_mut_ptr().wrapping_add(token as usize * 64);
        // SAFETY: both buffers outlive the channel's copies.
        assert_eq!(unsafe { channel.copy(&[copy(source.as_ptr(), at, 64, token)]) }, 1);
        channel.submit();
    }
    assert_eq!(drain(&mut *channel), ((0..1024).collect(), vec![]));
    assert!(destination.iter().all(|byte| *byte == 7));
}

#[test]
fn what_was_taken_out_before_it_was_done_is_not_reported_and_the_rest_is() {
    let _fake = Fake::new();
    let device = engine();
    let mut channel = device.open_channel(32).unwrap();
    let (source, mut destination) = (vec![7u8; 64], vec![0u8; 64 * 64]);
    let place = destination.as_mut_ptr();
    let ops: Vec<Copy> = (0..64)
        .map(|token| copy(source.as_ptr(), place.wrapping_add(token as usize * 64), 64, token))
        .collect();
    let mut outstanding = Vec::new();
    // SAFETY: the buffers outlive the channel.
    assert_eq!(unsafe { channel.copy(&ops[..16]) }, 16);
    channel.submit();
    // SAFETY: as above.
    assert_eq!(unsafe { channel.copy(&ops[16..24]) }, 8);
    channel.take_outstanding(&mut outstanding);
    assert_eq!((outstanding.len(), channel.in_flight(), channel.stats().failed), (24, 0, 24));
    // SAFETY: as above.
    assert_eq!(unsafe { channel.copy(&ops[32..48]) }, 16);
    channel.submit();
    assert_eq!(drain(&mut *channel), ((32..48).collect(), vec![]));
    drop(channel);
    assert!(destination[32 * 64..48 * 64].iter().all(|byte| *byte == 7));
    assert!(destination[16 * 64..32 * 64].iter().all(|byte| *byte == 0), "never submitted");
}

#[test]
fn a_lost_device_fails_its_copies_and_ends() {
    let fake = Fake::new();
    for entry in ["cuMemcpyAsync", "cuEventQuery", "cuEventRecord"] {
        let device = engine();
        let mut channel = device.open_channel(16).unwrap();
        let (source, mut destination) = (vec![7u8; 64], vec![0u8; 16 * 64]);
        let place = destination.as_mut_ptr();
        let op = |token| copy(source.as_ptr(), place.wrapping_add(token as usize * 64), 64, token);
        fake.set(entry, 719);
        fake.set("cuStreamQuery", 719);
        for _ in 0..3 {
            let ops: Vec<Copy> = (0..8).map(op).collect();
            // SAFETY: the buffers outlive the channel.
            assert_eq!(unsafe { channel.copy(&ops) }, 8);
            channel.submit();
            let (succeeded, failed) = drain(&mut *channel);
            assert_eq!(succeeded, [], "{entry}");
            assert_eq!(failed, (0..8).map(|token| (token, Failure::Hardware)).collect::<Vec<_>>(), "{entry}");
        }
        assert_eq!(channel.reset(), Reset::Done);
        drop(channel);
        fake.set(entry, 0);
        fake.set("cuStreamQuery", 0);
        drop(device);
        assert_eq!(fake.live(), "nothing", "{entry}");
    }
}

#[test]
fn numbers_and_devices_that_cannot_be_are_refused() {
    let fake = Fake::new();
    let device = engine();
    assert_eq!(device.name(), "cuda:0");
    for size in [0, 3, 1 << 15] {
        let refused = device.open_channel(size).unwrap_err();
        assert!(matches!(refused, EngineError::RingSize { found, .. } if found == size), "{refused}");
    }
    fake.set("cuEventCreate", 2);
    let refused = device.open_channel(16).unwrap_err().to_string();
    assert!(refused.contains("cuda:0") && refused.contains("cuEventCreate"), "{refused}");
    fake.set("cuEventCreate", 0);
    fake.set("memory", 1 << 20);
    let refused = device.open_channel(16).unwrap_err().to_string();
    assert!(refused.contains("cuda:0") && refused.contains("2 MiB"), "{refused}");
    fake.set("memory", 1 << 30);
    let refused = CudaCopier::open(3, None).unwrap_err().to_string();
    assert!(refused.contains("cuda:3") && refused.contains("expected cuda:0"), "{refused}");
    drop(device);
    assert_eq!(fake.live(), "nothing");
}

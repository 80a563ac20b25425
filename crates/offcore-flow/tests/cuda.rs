//! Channels `cuda:N` by their names, on a stand-in for the CUDA driver's library.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::time::{Duration, Instant};

use libloading::Library;
use offcore_dma::{Completions, Copy};
use offcore_flow::engines::Engines;
use offcore_flow::idle::Idle;
use offcore_gpu::fake_cuda::FAKE_CUDA;
use offcore_mem::{HEADROOM, Hugepages, Packet, Pool};

#[test]
fn workers_get_channels_of_a_gpu_that_reaches_the_packet_buffers() {
    let Some(path) = FAKE_CUDA else {
        println!(
            "SKIP: workers_get_channels_of_a_gpu_that_reaches_the_packet_buffers: no C++ compiler (install g++)"
        );
        assert_ne!(std::env::var("CI").as_deref(), Ok("true"), "CI has a C++ compiler");
        return;
    };
    // SAFETY: the stand-in does nothing when it is loaded. Who asks for `libcuda.so` afterwards gets it.
    std::mem::forget(unsafe { Library::new(path) }.unwrap());
    let pool = Pool::new(256, 2048, Hugepages::None).unwrap();
    let mut engines = Engines::new(&[], &[0, 1], None, Idle::default()).with_pool(pool);
    for (name, words) in
        [("cuda:x", "'x' is no GPU's number"), ("cuda:1", "expected cuda:0"), ("gpu:0", "cuda:N (GPU N)")]
    {
        let refused = engines.open_channel(name, 1).unwrap_err();
        assert!(refused.contains(name) && refused.contains(words), "{refused}");
    }
    // Each of two workers has one of its own.
    let mut channels = [0, 1].map(|_| engines.open_channel("cuda:0", 2).unwrap().0);
    assert_eq!(engines.notes().len(), 1);
    assert!(engines.notes()[0].contains("packet buffers only"), "{:?}", engines.notes());
    let mut cache = pool.cache();
    for (number, channel) in channels.iter_mut().enumerate() {
        let mut packet = || cache.take_sized(HEADROOM, 1500).unwrap();
        let mut pairs: Vec<(Packet, Packet)> = (0..32).map(|_| (packet(), packet())).collect();
        let copies: Vec<Copy> = (0u32..)
            .zip(&mut pairs)
            .map(|(token, (from, to))| {
                from.bytes_mut().fill(token as u8 + number as u8);
                to.bytes_mut().fill(0xee);
                Copy { src: from.bytes().as_ptr(), dst: to.bytes_mut().as_mut_ptr(), len: 1500, token }
            })
            .collect();
        // SAFETY: the packets are there, and nobody touches them until their tokens are back.
        assert_eq!(unsafe { channel.copy(&copies) }, 32);
        channel.submit();
        let (mut completions, since) = (Completions::default(), Instant::now());
        while channel.in_flight() > 0 {
            channel.poll(&mut completions);
            assert!(since.elapsed() < Duration::from_secs(10), "no progress for 10 s");
            std::thread::yield_now();
        }
        assert_eq!(completions.tokens[..], (0..32).collect::<Vec<_>>());
        for (from, to) in pairs {
            assert_eq!(from.bytes(), to.bytes());
            cache.free(from);
            cache.free(to);
        }
    }
}

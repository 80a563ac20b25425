//! Runs the engine conformance suite on DPDK's dma_skeleton, whose copies a DPDK thread performs, with one test per
//! check.
//!
//! A process can have one such device with one channel, so the tests take turns. Checks that need several channels get
//! what workers get in that case: handles of one channel that is shared with a lock.
//! channels at a time, they are what workers get then: handles of one channel that is shared by a lock.
#![cfg(feature = "dpdk")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::{Mutex, PoisonError};

use offcore_dma::channel::{Completions, CopyDevice, CopyOp, EngineError};
use offcore_dma::conformance::Check;
use offcore_dma::share::SharedChannel;
use offcore_dpdk::dmadev::DmaDevice;

static TURN: Mutex<()> = Mutex::new(());

fn run(check: Check) {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let device = DmaDevice::open("dma_skeleton", None).unwrap();
    if check.name == "channels_do_not_mix" {
        let shared = SharedChannel::new(device.open_channel(1024).unwrap());
        return (check.run)(&|_| Box::new(shared.handle()), &mut || ());
    }
    (check.run)(&|size| device.open_channel(size).unwrap(), &mut || ());
}

offcore_dma::conformance_suite! {
    skeleton => super::run,
}

#[test]
fn second_channel_is_refused() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let device = DmaDevice::open("dma_skeleton", None).unwrap();
    assert_eq!((device.name(), device.max_channels()), ("dmadev:dma_skeleton", 1));
    let first = device.open_channel(64).unwrap();
    let again = DmaDevice::open("dma_skeleton", None).unwrap();
    for device in [&device, &again] {
        let refused = device.open_channel(64).unwrap_err();
        assert!(matches!(refused, EngineError::NoChannel { max: 1, .. }), "{refused}");
    }
    drop(first);
    assert!(again.open_channel(64).is_ok());
    let refused = device.open_channel(1 << 15).unwrap_err();
    assert!(matches!(refused, EngineError::RingSize { found: 32768, .. }), "{refused}");
    assert!(device.open_channel(64).is_ok(), "a refusal takes nothing");
}

#[test]
fn taken_operations_are_not_reported() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let device = DmaDevice::open("dma_skeleton", None).unwrap();
    let mut channel = device.open_channel(32).unwrap();
    let (source, mut destination) = (vec![7u8; 64], vec![0u8; 32 * 64]);
    let mut copies = |from: u32, count: u32| -> Vec<CopyOp> {
        let place = destination.as_mut_ptr();
        let op = |token| CopyOp {
            src: source.as_ptr(),
            dst: place.wrapping_add(token as usize % 32 * 64),
            len: 64,
            token,
        };
        (from..from + count).map(op).collect()
    };
    let (mut completions, mut outstanding) = (Completions::default(), Vec::new());
    // SAFETY: the buffers outlive the channel; copies to the same place write the same bytes.
    assert_eq!(unsafe { channel.copy(&copies(0, 16)) }, 16);
    channel.submit();
    channel.take_outstanding(&mut outstanding);
    assert_eq!((outstanding.len(), channel.in_flight(), channel.stats().failed), (16, 0, 16));
    // SAFETY: as above.
    assert_eq!(unsafe { channel.copy(&copies(16, 8)) }, 8);
    channel.submit();
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
    while channel.in_flight() > 0 {
        channel.poll(&mut completions);
        assert!(std::time::Instant::now() < deadline, "no progress for 10 s");
        std::thread::yield_now();
    }
    assert_eq!(completions.tokens[..], [16, 17, 18, 19, 20, 21, 22, 23]);
    drop(channel);
    assert_eq!(destination[16 * 64..24 * 64], [7; 8 * 64]);
}

#[test]
fn missing_device_error_names_remedy() {
    for (name, expected) in [
        ("dma_nothing", "dma_skeleton"),
        ("0000:ff:1f.6", "there is no PCI device 0000:ff:1f.6"),
        ("net_null7", "is no DMA device"),
    ] {
        let error = DmaDevice::open(name, None).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains(expected), "{name}: {error}");
    }
}

//! Tests of features specific to this engine. The conformance suite tests the common features.

use std::time::{Duration, Instant};

use super::*;
use crate::channel::{Completions, CopyOp, Reset};
use crate::cpu::Copier;

fn copies(source: &[u8], destination: &mut [u8], n: usize) -> Vec<CopyOp> {
    let len = source.len() / n;
    (0..n)
        .map(|i| CopyOp {
            src: source[i * len..].as_ptr(),
            dst: destination[i * len..].as_mut_ptr(),
            len: len as u32,
            token: i as u32,
        })
        .collect()
}

#[test]
fn step_is_bounded_and_fair() {
    let (device, mut stepper) = CoreDevice::stepped();
    let (source, mut destination) = (vec![7u8; 2 * 256 * 8], vec![0u8; 2 * 256 * 8]);
    let ops = copies(&source, &mut destination, 2 * 256);
    let mut channels = [device.open_channel(256).unwrap(), device.open_channel(256).unwrap()];
    assert_eq!(stepper.step(), 0);
    for (channel, ops) in channels.iter_mut().zip(ops.chunks(256)) {
        // SAFETY: the buffers outlive the channels.
        assert_eq!(unsafe { channel.copy(ops) }, 256);
    }
    assert_eq!(stepper.step(), 0, "nothing was submitted");
    channels.iter_mut().for_each(|channel| channel.submit());
    let steps: Vec<usize> = (0..5).map(|_| stepper.step()).collect();
    assert_eq!(steps, [128, 128, 128, 128, 0]);
    drop(channels);
    assert_eq!(destination, source);
}

#[test]
fn streaming_stores_can_be_disabled() {
    for told in [false, true] {
        let (device, mut stepper) = CoreDevice::stepped();
        if told {
            stepper.disable_streaming_stores();
        }
        let channels = [device.open_channel(2).unwrap(), device.open_channel(2).unwrap()];
        stepper.step();
        let goes_past: Vec<_> = stepper.copiers().map(Copier::uses_streaming_stores).collect();
        assert_eq!(goes_past, [!told; 2]);
        drop(channels);
    }
}

#[test]
fn closed_channels_are_reusable() {
    let (device, mut stepper) = CoreDevice::stepped();
    let channels: Vec<_> = (0..MAX_CHANNELS).map(|_| device.open_channel(2).unwrap()).collect();
    let refused = device.open_channel(2);
    assert!(matches!(refused, Err(EngineError::NoChannel { max: MAX_CHANNELS, .. })), "{refused:?}");
    drop(channels);
    for _ in 0..2 * MAX_CHANNELS {
        let channel = device.open_channel(2).unwrap();
        stepper.step();
        drop(channel);
    }
}

#[test]
fn ring_sizes_out_of_range_are_named() {
    let (device, _stepper) = CoreDevice::stepped();
    for found in [0, 3, 2 * MAX_RING] {
        let refused = device.open_channel(found);
        assert!(matches!(refused, Err(EngineError::RingSize { found: f, .. }) if f == found), "{refused:?}");
    }
}

#[test]
fn dead_engine_returns_its_operations() {
    let (device, stepper) = CoreDevice::stepped();
    let (source, mut destination) = (vec![7u8; 64], vec![0u8; 64]);
    let mut channel = device.open_channel(8).unwrap();
    // SAFETY: the buffers outlive the channel.
    unsafe { channel.copy(&copies(&source, &mut destination, 4)) };
    channel.submit();
    assert_eq!(channel.reset(), Reset::Pending);
    drop(stepper);
    assert_eq!(channel.reset(), Reset::Done);
    let mut outstanding = Vec::new();
    channel.take_outstanding(&mut outstanding);
    assert_eq!(outstanding.iter().map(|op| op.token).collect::<Vec<_>>(), [0, 1, 2, 3]);
    assert_eq!((channel.in_flight(), channel.stats().failed), (0, 4));
    let mut completions = Completions::default();
    channel.poll(&mut completions);
    assert!(completions.tokens.is_empty());
}

#[test]
fn taken_slots_are_not_reused_early() {
    let (device, mut stepper) = CoreDevice::stepped();
    let (source, mut destination) = (vec![7u8; 64], vec![0u8; 64]);
    let mut channel = device.open_channel(4).unwrap();
    let ops = copies(&source, &mut destination, 4);
    // SAFETY: the buffers outlive the channel.
    assert_eq!(unsafe { channel.copy(&ops) }, 4);
    channel.submit();
    channel.take_outstanding(&mut Vec::new());
    assert_eq!((channel.in_flight(), channel.room()), (0, 0));
    // SAFETY: the buffers outlive the channel.
    assert_eq!(unsafe { channel.copy(&ops) }, 0);
    stepper.step();
    let mut completions = Completions::default();
    channel.poll(&mut completions);
    assert_eq!((completions.tokens.len(), channel.room()), (0, 4), "given up, then made: not reported");
    // SAFETY: the buffers outlive the channel.
    assert_eq!(unsafe { channel.copy(&ops) }, 4);
    channel.submit();
    stepper.step();
    channel.poll(&mut completions);
    assert_eq!(completions.tokens[..], [0, 1, 2, 3]);
}

#[test]
fn channels_open_and_close_during_copies() {
    let device = CoreDevice::start(lcore::available().unwrap()[0]).unwrap();
    let (source, mut destination) = (vec![7u8; 4096], vec![0u8; 4096]);
    let mut steady = device.open_channel(64).unwrap();
    let mut completions = Completions::default();
    for round in 0..200u8 {
        let source = vec![round; source.len()];
        destination.fill(!round);
        // SAFETY: the buffers live until all 16 completions have been seen.
        unsafe { steady.copy(&copies(&source, &mut destination, 16)) };
        steady.submit();
        let (other_source, mut other_destination) = (vec![round; 4096], vec![0u8; 4096]);
        let mut other = device.open_channel(16).unwrap();
        // SAFETY: the buffers outlive the channel, which is dropped first.
        unsafe { other.copy(&copies(&other_source, &mut other_destination, 16)) };
        other.submit();
        drop(other);
        let before = other_destination.clone();
        completions.clear();
        let deadline = Instant::now() + Duration::from_secs(10);
        while completions.tokens.len() < 16 {
            assert!(Instant::now() < deadline, "no progress for 10 s");
            steady.poll(&mut completions);
            std::thread::yield_now();
        }
        assert_eq!(destination, source, "round {round}");
        assert_eq!(other_destination, before, "round {round}: a dropped channel's operation landed");
    }
}

/// Returns the directories of this process's helper threads on an lcore in /proc.
fn helpers(lcore: usize) -> Vec<std::path::PathBuf> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten().map(|task| task.path());
    let name = format!("core:{lcore}");
    let is_helper = |task: &std::path::PathBuf| {
        std::fs::read_to_string(task.join("comm")).is_ok_and(|comm| comm.trim() == name)
    };
    tasks.filter(is_helper).collect()
}

#[test]
fn helper_is_named_pinned_and_ends() {
    let lcore = *lcore::available().unwrap().last().unwrap();
    let device = CoreDevice::start(lcore).unwrap();
    let pinned = format!("Cpus_allowed_list:\t{lcore}\n");
    let status = |task: std::path::PathBuf| std::fs::read_to_string(task.join("status")).ok();
    assert!(helpers(lcore).into_iter().filter_map(status).any(|status| status.contains(&pinned)));
    let channel = device.open_channel(2).unwrap();
    let thread = Arc::downgrade(device.engine._helper.as_ref().unwrap());
    drop(device);
    assert_eq!(thread.strong_count(), 1, "a channel keeps its engine running");
    drop(channel);
    // Dropping the last handle joins the thread.
    assert_eq!(thread.strong_count(), 0);
    let refused = CoreDevice::start(1023);
    assert!(
        matches!(&refused, Err(EngineError::Thread { device, .. }) if device == "core:1023"),
        "{refused:?}"
    );
}

/// The measurement of CPU time takes half a second.
#[test]
fn napping_helper_still_copies() {
    let lcore = *lcore::available().unwrap().last().unwrap();
    let device = CoreDevice::start_with(lcore, true).unwrap();
    let mut channel = device.open_channel(8).unwrap();
    let (source, mut destination) = (vec![9u8; 4096], vec![0u8; 4096]);
    let mut copy = || {
        destination.fill(0);
        let ops = copies(&source, &mut destination, 4);
        // SAFETY: the buffers live until all completions have been seen.
        assert_eq!(unsafe { channel.copy(&ops) }, 4);
        channel.submit();
        let mut completions = Completions::default();
        let deadline = Instant::now() + Duration::from_secs(10);
        while completions.tokens.len() < 4 {
            assert!(Instant::now() < deadline, "no progress for 10 s");
            channel.poll(&mut completions);
            std::thread::yield_now();
        }
        assert_eq!(destination, source);
    };
    copy();
    // User and system time, in hundredths of a second, of all threads with this name. Only this test's thread naps.
    let tasks: Vec<_> = helpers(lcore).into_iter().map(|task| task.join("stat")).collect();
    let used = || {
        let one = |path: &std::path::PathBuf| {
            let stat = std::fs::read_to_string(path).ok()?;
            let fields: Vec<_> = stat.rsplit_once(')')?.1.split_whitespace().collect();
            Some(fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?)
        };
        tasks.iter().map(one).collect::<Vec<_>>()
    };
    let before = used();
    std::thread::sleep(Duration::from_millis(500));
    let least = used().iter().zip(before).filter_map(|(now, before)| Some((*now)? - before?)).min().unwrap();
    assert!(least < 10, "{least} hundredths of a second of 50");
    copy();
}

//! Tests of several handles to one channel.

use std::cell::RefCell;
use std::collections::VecDeque;

use super::*;
use crate::channel::CopyDevice;
use crate::conformance::Check;
use crate::core::{CoreDevice, Stepper};
use crate::fault::{Faults, FaultyChannel};

const RING: usize = 64;

struct Rig {
    stepper: Stepper,
    handles: [SharedHandle; 2],
    src: Vec<u8>,
    dst: Vec<u8>,
}

impl Rig {
    fn new() -> Self {
        let (device, stepper) = CoreDevice::stepped();
        let shared = SharedChannel::new(device.open_channel(RING).unwrap());
        let handles = [shared.handle(), shared.handle()];
        Self { stepper, handles, src: vec![7; 64], dst: vec![0; 64 * 256] }
    }

    /// Gives `n` copies to a handle, with tokens from `first` on. Returns the number accepted.
    fn give(&mut self, handle: usize, first: u32, n: u32) -> usize {
        let dst = self.dst.as_mut_ptr();
        let ops: Vec<CopyOp> = (first..first + n)
            .map(|token| {
                let dst = dst.wrapping_add(token as usize % 256 * 64);
                CopyOp { src: self.src.as_ptr(), dst, len: 64, token }
            })
            .collect();
        // SAFETY: the buffers outlive the handles' use of them: every test polls or drops before it ends.
        unsafe { self.handles[handle].copy(&ops) }
    }

    fn poll(&mut self, handle: usize) -> Completions {
        let mut completions = Completions::default();
        self.handles[handle].poll(&mut completions);
        completions
    }
}

crate::conformance_suite! {
    handle => super::on_handle,
    handle_that_reorders => super::on_handle_that_reorders,
}

fn on_handle(check: Check) {
    let (device, stepper) = CoreDevice::stepped();
    let stepper = RefCell::new(stepper);
    let open = |size| -> Box<dyn Channel> {
        Box::new(SharedChannel::new(device.open_channel(size).unwrap()).handle())
    };
    (check.run)(&open, &mut || {
        stepper.borrow_mut().step();
    });
}

fn on_handle_that_reorders(check: Check) {
    let faults =
        Faults { seed: 3, delay: 300, delay_polls: 7, reorder: 500, reset_calls: 3, ..Faults::default() };
    let (device, stepper) = CoreDevice::stepped();
    let stepper = RefCell::new(stepper);
    let open = |size| -> Box<dyn Channel> {
        let faulty = FaultyChannel::new(device.open_channel(size).unwrap(), faults);
        Box::new(SharedChannel::new(Box::new(faulty)).handle())
    };
    (check.run)(&open, &mut || {
        stepper.borrow_mut().step();
    });
}

#[test]
fn completions_go_to_the_submitter() {
    let mut rig = Rig::new();
    // Both handles use the same tokens.
    assert_eq!((rig.give(0, 0, 16), rig.give(1, 0, 8), rig.give(0, 16, 4)), (16, 8, 4));
    rig.stepper.step();
    assert_eq!(*rig.poll(1).tokens, (0..8).collect::<Vec<_>>());
    assert_eq!(*rig.poll(0).tokens, (0..20).collect::<Vec<_>>());
    assert_eq!(rig.handles.each_ref().map(|h| (h.in_flight(), h.stats().completed)), [(0, 20), (0, 8)]);
}

#[test]
fn flooding_handle_leaves_a_half() {
    let mut rig = Rig::new();
    let mut made = [0; 2];
    // Each handle replaces its completed copies, the flooding one first and with as many as it can.
    for round in 0..200 {
        rig.give(0, 0, RING as u32);
        rig.give(1, 0, 32);
        rig.stepper.step();
        for (handle, made) in made.iter_mut().enumerate() {
            *made += rig.poll(handle).tokens.len() * usize::from(round >= 4);
        }
    }
    assert!(made[1] * 100 >= (made[0] + made[1]) * 45, "{made:?}");
}

#[test]
fn weights_part_the_ring() {
    let (device, mut stepper) = CoreDevice::stepped();
    let shared = SharedChannel::new(device.open_channel(RING).unwrap());
    let (mut heavy, mut light) = (shared.handle_of_weight(3), shared.handle_of_weight(1));
    let mut bytes = [0u8; 128];
    let base = bytes.as_mut_ptr();
    let list = [CopyOp { src: base, dst: base.wrapping_add(64), len: 64, token: 0 }; RING];
    for round in 0..3 {
        // SAFETY: the copies are between halves of an array that outlives them; they are polled for below.
        let taken = [&mut light, &mut heavy].map(|handle| unsafe { handle.copy(&list) });
        if round > 0 {
            assert_eq!(taken, [16, 48]);
        }
        stepper.step();
        for handle in [&mut light, &mut heavy] {
            handle.poll(&mut Completions::default());
        }
    }
}

#[test]
fn reset_aborts_the_other_handle() {
    let (device, _stepper) = CoreDevice::stepped();
    // No copy ever completes, so a reset finds all of them.
    let faults = Faults { never: 1000, ..Faults::default() };
    let shared = SharedChannel::new(Box::new(FaultyChannel::new(device.open_channel(RING).unwrap(), faults)));
    let (mut one, mut other) = (shared.handle(), shared.handle());
    let mut bytes = [0u8; 128];
    let base = bytes.as_mut_ptr();
    let list = |first: u32| -> [CopyOp; 8] {
        std::array::from_fn(|i| CopyOp {
            src: base,
            dst: base.wrapping_add(64),
            len: 64,
            token: first + i as u32,
        })
    };
    // SAFETY: the copies are between halves of an array; nothing is in flight when it is dropped.
    let taken = unsafe { (one.copy(&list(0)), other.copy(&list(100))) };
    assert_eq!(taken, (8, 8));
    assert_eq!(one.reset(), Reset::Done);
    let mut dead = Vec::new();
    one.take_outstanding(&mut dead);
    assert_eq!(dead.iter().map(|op| op.token).collect::<Vec<_>>(), (0..8).collect::<Vec<_>>());
    let mut completions = Completions::default();
    other.poll(&mut completions);
    let aborted = completions.failed.iter().map(|f| (f.copy.token, f.failure, f.done));
    assert_eq!(
        aborted.collect::<VecDeque<_>>(),
        (100..108).map(|t| (t, Failure::Aborted, 0)).collect::<VecDeque<_>>()
    );
    assert_eq!((one.in_flight(), other.in_flight(), other.room()), (0, 0, other.room()));
    assert!(other.room() > 0, "the channel continues");
}

#[test]
fn dropped_handle_closes_the_channel() {
    let mut rig = Rig::new();
    rig.give(0, 0, 8);
    rig.give(1, 100, 8);
    let Rig { mut stepper, handles: [dropped, mut left], src, dst } = rig;
    drop(dropped);
    stepper.step();
    assert!(dst.iter().all(|&byte| byte == 0), "nothing lands after the drop");
    let mut completions = Completions::default();
    left.poll(&mut completions);
    assert_eq!((completions.failed.len(), left.in_flight(), left.room()), (8, 0, 0));
    drop(src);
}

#[test]
fn two_threads_copy_through_one_channel() {
    let (device, mut stepper) = CoreDevice::stepped();
    let shared = SharedChannel::new(device.open_channel(RING).unwrap());
    let left = AtomicUsize::new(2);
    std::thread::scope(|scope| {
        for seed in [1u8, 2] {
            let (mut handle, left) = (shared.handle(), &left);
            scope.spawn(move || {
                let src: Vec<u8> = (0..64 * 32).map(|i| seed.wrapping_mul(i as u8)).collect();
                for round in 0..500u32 {
                    let mut dst = vec![0u8; src.len()];
                    let base = dst.as_mut_ptr();
                    let op = |i: usize| CopyOp {
                        src: src[64 * i..].as_ptr(),
                        dst: base.wrapping_add(64 * i),
                        len: 64,
                        token: round * 32 + i as u32,
                    };
                    let (mut given, mut done) = (0, Vec::new());
                    while done.len() < 32 {
                        let list: Vec<CopyOp> = (given..32).map(op).collect();
                        // SAFETY: both vectors live until every copy has been reported.
                        given += unsafe { handle.copy(&list) };
                        let mut completions = Completions::default();
                        handle.poll(&mut completions);
                        assert!(completions.failed.is_empty());
                        done.extend(completions.tokens);
                        std::thread::yield_now();
                    }
                    assert_eq!(done, (round * 32..round * 32 + 32).collect::<Vec<_>>());
                    assert_eq!(dst, src);
                }
                left.fetch_sub(1, Ordering::Release);
            });
        }
        while left.load(Ordering::Acquire) > 0 {
            stepper.step();
            std::thread::yield_now();
        }
    });
    assert_eq!(shared.stats().completed, 2 * 500 * 32);
}

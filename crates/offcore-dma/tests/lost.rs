//! Tests when the mover considers a copy lost, and when it must not.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::time::Duration;

use offcore_dma::core::{CoreDevice, Stepper};
use offcore_dma::{Begun, Binding, CopyQueue, Device, Mode, Mover};
use offcore_stats::{StageClock, tsc};

struct Rig {
    mover: Mover,
    queue: CopyQueue<()>,
    stepper: Stepper,
    clock: StageClock,
    bytes: Box<[u8; 128]>,
}

fn rig(lost_after: Duration) -> Rig {
    let (device, stepper) = CoreDevice::stepped();
    let mut mover = Mover::new();
    mover.set_lost_after(tsc::ticks(lost_after));
    let channel = mover.add_channel(device.open_channel(64).unwrap());
    let mut queue = CopyQueue::open(&mut mover, 64);
    queue.bind(&mut mover, &Binding::new(Mode::Offload, vec![channel])).unwrap();
    Rig { mover, queue, stepper, clock: StageClock::private(), bytes: Box::new([0; 128]) }
}

impl Rig {
    fn submit(&mut self) {
        let mut plan = self.queue.plan(&mut self.mover);
        let Begun::Queued(mut batch) = self.queue.begin(&mut self.mover, &mut plan) else {
            panic!("the core copies")
        };
        let base = self.bytes.as_mut_ptr();
        batch.copy(base, base.wrapping_add(64), 64);
        batch.enter(());
        // SAFETY: the copy is between two halves of an array that lives as long as the mover and is not used otherwise.
        unsafe { batch.submit(&mut self.clock) };
    }

    /// Polls often enough for the mover to check for lost copies.
    fn poll(&mut self) {
        (0..1000).for_each(|_| self.mover.poll(&mut self.clock));
    }

    fn finish(&mut self) {
        self.stepper.step();
        self.mover.poll(&mut self.clock);
        let ready = self.queue.ready(&mut self.mover);
        assert_eq!(ready.len(), 1);
        ready.retire(1);
    }
}

#[test]
fn first_copy_is_not_lost_at_once() {
    // The TSC of a machine that has been up for a day exceeds this number of ticks.
    let mut rig = rig(Duration::from_secs(60));
    rig.submit();
    rig.poll();
    assert_eq!(rig.mover.stats().resets, 0);
    rig.finish();
}

#[test]
fn a_copy_after_a_pause_is_not_lost_at_once() {
    // The limit is longer than 1000 polls take, even if another process has the core for a while.
    let limit = Duration::from_millis(300);
    let mut rig = rig(limit);
    for _ in 0..3 {
        rig.submit();
        rig.poll();
        rig.finish();
        std::thread::sleep(limit);
        rig.submit();
        rig.poll();
        assert_eq!(rig.mover.stats().resets, 0);
        rig.finish();
    }
}

#[test]
fn a_copy_that_is_not_answered_is_lost() {
    let limit = Duration::from_millis(1);
    let mut rig = rig(limit);
    rig.submit();
    rig.poll();
    std::thread::sleep(limit);
    rig.poll();
    assert_eq!(rig.mover.stats().resets, 1);
    rig.finish();
}

#[test]
fn queue_timeout_overrides_default() {
    let limit = Duration::from_millis(1);
    let mut rig = rig(Duration::from_secs(60));
    rig.queue.set_lost_after(&mut rig.mover, tsc::ticks(limit));
    rig.submit();
    rig.poll();
    std::thread::sleep(limit);
    rig.poll();
    assert_eq!(rig.mover.stats().resets, 1);
    rig.finish();
}

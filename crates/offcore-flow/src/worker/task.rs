//! What a worker does: a list of tasks, one round of each after the other.

use std::any::Any;
use std::fmt;

use offcore_port::{Context, RxQueue};
use offcore_stats::{Stage, tsc};

/// A part of a worker's work. It owns its queues; tasks know nothing of one another. `Any`, for who has put a worker
/// together and changes what one of its tasks does.
pub trait Task: Any + fmt::Debug + Send {
    /// Does one round of work, a burst of each queue at most; returns the packets received or generated.
    fn round(&mut self, ctx: &mut Context<'_>) -> usize;

    /// Finishes what is in flight and takes nothing new; returns how much is left. A worker that stops calls it until that
    /// is nothing, and then drops the task.
    fn drain(&mut self, ctx: &mut Context<'_>) -> usize;

    /// Calls `each` with every queue whose sender may wake the worker up.
    fn wake_sources<'a>(&'a mut self, each: &mut dyn FnMut(&'a mut dyn RxQueue));

    /// Stores counters that are not stored where they are counted: called now and then.
    fn publish(&mut self) {}

    /// Whether it makes packets of its own accord, so that its worker must not sleep.
    fn generates(&self) -> bool {
        false
    }
}

/// Stands for the application's own work on so many packets, in TSC ticks each: what asynchronous copies hide behind.
#[inline]
pub(crate) fn work(ticks: u64, packets: usize, ctx: &mut Context<'_>) {
    if ticks > 0 && packets > 0 {
        let (start, ticks) = (tsc::now(), ticks * packets as u64);
        while tsc::now().wrapping_sub(start) < ticks {
            std::hint::spin_loop();
        }
        ctx.clock.lap(Stage::Application);
    }
}

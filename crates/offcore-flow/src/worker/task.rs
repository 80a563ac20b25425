//! What a worker does: a list of tasks, one round of each after the other.

use std::any::Any;
use std::fmt;
use std::time::Duration;

use offcore_port::{Context, RxQueue, Wake};
use offcore_stats::{Stage, tsc};

use super::turns::Turns;

/// A part of a worker's work. It owns its queues; tasks know nothing of one another. `Any`, for who has put a worker
/// together and changes what one of its tasks does.
pub trait Task: Any + fmt::Debug + Send {
    /// Does one round of work, a burst of each queue at most; returns the packets received or generated.
    fn round(&mut self, ctx: &mut Context<'_>) -> usize;

    /// The same where turns are measured: each port that the task works for has one of its own.
    fn round_in_turns(&mut self, ctx: &mut Context<'_>, turns: &mut Turns) -> usize {
        turns.turn(None, ctx, |_, ctx| self.round(ctx))
    }

    /// Whether it works for several ports.
    fn shares(&self) -> bool {
        false
    }

    /// Finishes what is in flight and takes nothing new; returns how much is left. A worker that stops calls it until that
    /// is nothing, and then drops the task.
    fn drain(&mut self, ctx: &mut Context<'_>) -> usize;

    /// Calls `each` with everything that may wake the worker up.
    fn wake_sources<'a>(&'a mut self, each: &mut dyn FnMut(WakeSource<'a>));

    /// Stores counters that are not stored where they are counted: called now and then.
    fn publish(&mut self) {}

    /// The time until its next timer, which its worker must not sleep beyond.
    fn next_timer(&self) -> Option<Duration> {
        None
    }

    /// Whether it makes packets of its own accord, so that its worker must not sleep.
    fn generates(&self) -> bool {
        false
    }
}

/// What may wake a worker up that sleeps.
#[derive(Debug)]
pub enum WakeSource<'a> {
    /// A queue's sender.
    Queue(&'a mut dyn RxQueue),
    /// Anything else.
    Other(&'a mut dyn Wakes),
}

/// What may wake a worker up that sleeps, and is no queue.
pub trait Wakes: fmt::Debug {
    /// The worker is going to sleep: see [`RxQueue::arm`].
    fn arm(&mut self) -> Wake<'_>;

    /// It is awake.
    fn disarm(&mut self);
}

impl<'a> WakeSource<'a> {
    /// The worker is going to sleep.
    pub fn arm(self) -> Wake<'a> {
        match self {
            Self::Queue(queue) => queue.arm(),
            Self::Other(other) => other.arm(),
        }
    }

    /// The worker is awake.
    pub fn disarm(self) {
        match self {
            Self::Queue(queue) => queue.disarm(),
            Self::Other(other) => other.disarm(),
        }
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

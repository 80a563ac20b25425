//! Tasks of a worker. The worker runs one round of each task in turn.

use std::any::Any;
use std::fmt;
use std::time::Duration;

use offcore_port::{Context, RxQueue, Wake};
use offcore_stats::{Stage, tsc};

use super::turns::Turns;

/// A part of a worker's work. It owns its queues and does not depend on other tasks. `Any` allows the creator of a
/// worker to change the behaviour of a task.
pub trait Task: Any + fmt::Debug + Send {
    /// Runs one round, with at most one burst of each queue. Returns the number of packets received or generated.
    fn round(&mut self, ctx: &mut Context<'_>) -> usize;

    /// Runs one round while turns are measured. Each port of the task has its own turn.
    fn round_in_turns(&mut self, ctx: &mut Context<'_>, turns: &mut Turns) -> usize {
        turns.turn(None, ctx, |_, ctx| self.round(ctx))
    }

    /// Whether the task serves several ports.
    fn shares(&self) -> bool {
        false
    }

    /// Finishes the packets in flight and takes no new ones. Returns how much is left. A worker that stops calls this
    /// until nothing is left, and then drops the task.
    fn drain(&mut self, ctx: &mut Context<'_>) -> usize;

    /// Calls `each` with everything that may wake up the worker.
    fn wake_sources<'a>(&'a mut self, each: &mut dyn FnMut(WakeSource<'a>));

    /// Publishes counters that are not stored when they are counted. The worker calls this from time to time.
    fn publish(&mut self) {}

    /// Returns the time until the task's next timer. The worker must not sleep for longer.
    fn next_timer(&self) -> Option<Duration> {
        None
    }

    /// Whether the task generates packets. The worker must not sleep then.
    fn generates(&self) -> bool {
        false
    }
}

/// A source of wake-ups for a sleeping worker.
#[derive(Debug)]
pub enum WakeSource<'a> {
    /// The sender of a queue.
    Queue(&'a mut dyn RxQueue),
    /// Any other source.
    Other(&'a mut dyn Wakes),
}

/// A source of wake-ups that is not a queue.
pub trait Wakes: fmt::Debug {
    /// Announces that the worker is going to sleep: see [`RxQueue::arm`].
    fn arm(&mut self) -> Wake<'_>;

    /// Announces that the worker is awake.
    fn disarm(&mut self);
}

impl<'a> WakeSource<'a> {
    /// Announces that the worker is going to sleep.
    pub fn arm(self) -> Wake<'a> {
        match self {
            Self::Queue(queue) => queue.arm(),
            Self::Other(other) => other.arm(),
        }
    }

    /// Announces that the worker is awake.
    pub fn disarm(self) {
        match self {
            Self::Queue(queue) => queue.disarm(),
            Self::Other(other) => other.disarm(),
        }
    }
}

/// Simulates the application's own work, in TSC ticks per packet. Asynchronous copies can overlap with it.
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

//! Forwarding from one guest to another in one copy, or through packet buffers if one copy is not possible.

use offcore_port::Context;
use offcore_port::vhost::{Next, OneCopy};
use offcore_stats::Stage;

use crate::forwarding::Rules;
use crate::worker::task::{Task, WakeSource, work};
use crate::worker::turns::Turns;

/// Forwards packets from one guest to another.
#[derive(Debug)]
pub struct GuestPair {
    guests: OneCopy,
    rules: Rules,
}

impl GuestPair {
    /// Creates a task for these queues. The rules must be from a mode that forwards received packets.
    pub fn new(guests: OneCopy, rules: Rules) -> Self {
        Self { guests, rules }
    }

    /// Returns the rules, which the caller may change.
    pub fn rules(&mut self) -> &mut Rules {
        &mut self.rules
    }

    fn forward(guests: &mut OneCopy, rules: &mut Rules, ctx: &mut Context<'_>) -> usize {
        let (packets, next) = rules.rewrite.heads(ctx, guests);
        work(rules.work, packets, ctx);
        let take = match next {
            Next::Nothing => {
                if packets == 0 {
                    ctx.clock.lap(Stage::Idle);
                }
                return packets;
            }
            Next::Ordinary => true,
            Next::Finish => false,
        };
        let (rx, tx) = guests.queues();
        packets + rules.round(rx, tx, take, ctx)
    }
}

impl Task for GuestPair {
    fn round(&mut self, ctx: &mut Context<'_>) -> usize {
        Self::forward(&mut self.guests, &mut self.rules, ctx)
    }

    fn round_in_turns(&mut self, ctx: &mut Context<'_>, turns: &mut Turns) -> usize {
        let Self { guests, rules } = self;
        rules.turn(ctx, turns, |rules, ctx| Self::forward(guests, rules, ctx))
    }

    fn drain(&mut self, ctx: &mut Context<'_>) -> usize {
        let crossing = self.guests.drain(ctx);
        let (rx, tx) = self.guests.queues();
        self.rules.drain(rx, tx, crossing, ctx)
    }

    fn wake_sources<'a>(&'a mut self, each: &mut dyn FnMut(WakeSource<'a>)) {
        each(WakeSource::Queue(self.guests.queues().0));
    }
}

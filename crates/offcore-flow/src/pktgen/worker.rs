//! The loop of one lcore of a packet generator: runs its senders and receivers in turn.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use offcore_dma::Mover;
use offcore_mem::{BURST, PoolCache};
use offcore_port::Context;
use offcore_stats::{Stage, StageClock};

use super::receiver::Receiver;
use super::sender::Sender;

/// A worker that stops gives up if nothing has moved for this long.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The work of one lcore.
#[derive(Debug)]
pub(super) struct Worker {
    pub(super) senders: Vec<Sender>,
    pub(super) receivers: Vec<Receiver>,
    pub(super) mover: Mover,
    pub(super) cache: PoolCache,
    pub(super) clock: StageClock,
}

impl Worker {
    /// Runs until `stop` is set, then finishes the packets in flight. Returns the number of unfinished packets.
    pub(super) fn run(mut self, stop: &Arc<AtomicBool>) -> usize {
        while !stop.load(Ordering::Relaxed) {
            self.clock.begin();
            self.mover.poll(&mut self.clock);
            let Self { senders, receivers, mover, cache, clock } = &mut self;
            let mut ctx = Context { mover, cache, clock, burst: BURST };
            let sent: usize = senders.iter_mut().map(|sender| sender.round(&mut ctx)).sum();
            let received: usize = receivers.iter_mut().map(|receiver| receiver.round(&mut ctx)).sum();
            self.mover.end_round();
            self.clock.end(if sent + received > 0 { Stage::Header } else { Stage::Idle });
        }
        self.drain()
    }

    fn drain(&mut self) -> usize {
        let (mut last, mut progress) = (usize::MAX, Instant::now());
        loop {
            self.mover.poll(&mut self.clock);
            let Self { senders, receivers, mover, cache, clock } = self;
            let mut ctx = Context { mover, cache, clock, burst: BURST };
            let sending: usize = senders.iter_mut().map(|sender| usize::from(!sender.stop(&mut ctx))).sum();
            let receiving: usize = receivers.iter_mut().map(|receiver| receiver.drain(&mut ctx)).sum();
            let left = sending + receiving;
            if left == 0 {
                return 0;
            }
            if left != last {
                (last, progress) = (left, Instant::now());
            } else if progress.elapsed() > TIMEOUT {
                return left;
            }
        }
    }
}

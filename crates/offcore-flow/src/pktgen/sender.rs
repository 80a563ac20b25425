//! The sender: takes packets from a source when they are due, and passes them to a port.

use std::sync::Arc;

use offcore_mem::packet::BURST;
use offcore_mem::{Burst, Packet};
use offcore_port::offload_fallback::fall_back;
use offcore_port::{Context, TxCounters, TxQueue};
use offcore_stats::page::Block;
use offcore_stats::{Family, Stage, counters, tsc};

use super::control::{Control, Settings};
use super::rate::{Rate, Schedule};
use super::replay::Replay;
use super::source::Source;

counters! {
    /// Counters of a sender.
    pub(super) struct SentCounts, enum Sent {
        /// Packets passed to the port, including packets that the port drops.
        Handed = handed: Packets,
        /// Packets given up as too late.
        GivenUp = given_up: Packets,
        /// The version of the applied settings.
        Applied = applied: State gauge,
        /// Whether everything has been sent (1).
        Done = done: State gauge,
        /// Ticks from the start until everything was sent.
        Took = took: Ticks gauge,
        /// Ticks from then until the next packet would have been due.
        Gap = gap: Ticks gauge,
    }
}

/// The counters of a sender.
pub(super) static SENDER: Family =
    Family::new("sender", "Packets that a generator sends on a port.", &[&SentCounts::COUNTERS]);

/// The source of packets.
#[derive(Debug)]
pub(super) enum Packets {
    /// Packets are generated.
    Made(Box<Source>),
    /// Packets come from a capture.
    Captured(Box<Replay>),
    /// No packets: the port only receives, but its TX queues must be polled.
    None,
}

/// Sends on one port.
#[derive(Debug)]
pub(super) struct Sender {
    /// The port's TX queues. Packets go to the first one.
    queues: Vec<Box<dyn TxQueue>>,
    packets: Packets,
    control: Arc<Control>,
    /// The version of the applied settings.
    seen: u64,
    settings: Settings,
    schedule: Schedule,
    /// Remaining packets that are due together, and their time.
    together: (u32, u64),
    /// Remaining packets of the count.
    left: u64,
    /// When sending began, in ticks.
    began: u64,
    /// Packets that did not fit into the TX queue.
    waiting: Burst,
    counters: Block,
}

impl Sender {
    pub(super) fn new(
        queues: Vec<Box<dyn TxQueue>>,
        packets: Packets,
        control: Arc<Control>,
        counters: Block,
    ) -> Self {
        let settings = control.settings();
        let schedule = Schedule::by_tsc(settings.rate);
        let idle = Settings { running: false, start: 0, ..settings };
        let waiting = Burst::new();
        Self {
            queues,
            packets,
            control,
            seen: 0,
            settings: idle,
            schedule,
            together: (0, 0),
            left: 0,
            began: 0,
            waiting,
            counters,
        }
    }

    /// Returns the counters of the port's TX queues.
    pub(super) fn tx_counters(&self) -> Vec<TxCounters> {
        self.queues.iter().map(|queue| queue.counters().clone()).collect()
    }

    /// Sends the packets that are due, at most one burst. Returns the number of packets that the port accepted.
    #[inline]
    pub(super) fn round(&mut self, ctx: &mut Context<'_>) -> usize {
        if let Some((version, settings)) = self.control.changed(self.seen) {
            self.apply(version, settings);
        }
        let mut burst = std::mem::take(&mut self.waiting);
        if burst.is_empty() && self.settings.running && self.left > 0 {
            self.fill(ctx, &mut burst);
        }
        for queue in self.queues.iter_mut().skip(usize::from(!burst.is_empty())) {
            queue.poll(ctx);
        }
        if burst.is_empty() { 0 } else { self.send(ctx, burst) }
    }

    #[cold]
    fn apply(&mut self, version: u64, settings: Settings) {
        if settings.start > self.settings.start {
            self.left = settings.count.unwrap_or(u64::MAX);
            self.began = tsc::now();
            self.schedule = Schedule::by_tsc(settings.rate);
            if let Packets::Captured(replay) = &mut self.packets {
                replay.rewind();
            }
        } else if settings.rate != self.settings.rate || settings.running != self.settings.running {
            self.schedule = Schedule::by_tsc(settings.rate);
        }
        let other = settings.sizes != self.settings.sizes || settings.flows != self.settings.flows;
        if other && let Packets::Made(source) = &mut self.packets {
            source.set(&settings.sizes, settings.flows);
        }
        self.together = (0, 0);
        self.settings = settings;
        self.seen = version;
        self.publish_done();
        self.counters.counter(Sent::Applied as usize).set(version);
    }

    /// Publishes whether everything has been sent.
    fn publish_done(&self) {
        let over = match &self.packets {
            Packets::Captured(replay) => replay.is_over(),
            Packets::Made(_) => false,
            Packets::None => true,
        };
        let done = (over || self.left == 0) && self.waiting.is_empty();
        if done {
            let now = tsc::now();
            let next = match &self.packets {
                Packets::Captured(replay) if self.settings.rate == Rate::Unlimited => replay.end(),
                _ => self.schedule.next(),
            };
            self.counters.counter(Sent::Took as usize).set(now.wrapping_sub(self.began));
            self.counters.counter(Sent::Gap as usize).set(next.map_or(0, |next| next.saturating_sub(now)));
        }
        self.counters.counter(Sent::Done as usize).set(done.into());
    }

    /// Creates the packets that are due.
    #[inline]
    fn fill(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        let now = tsc::now();
        while burst.len() < BURST && self.left > 0 {
            let made = match &mut self.packets {
                Packets::Made(source) => {
                    let due = match self.together {
                        (1.., due) => due,
                        (0, _) => {
                            let Some((due, given_up)) = self.schedule.due(now) else { break };
                            self.counters.counter(Sent::GivenUp as usize).add(given_up);
                            self.together = (self.settings.burst, due);
                            due
                        }
                    };
                    source.make(ctx.cache, due)
                }
                Packets::Captured(replay) => {
                    let due = match self.settings.rate {
                        Rate::Unlimited => replay.due(now),
                        _ => self.schedule.due(now).map(|(due, given_up)| {
                            self.counters.counter(Sent::GivenUp as usize).add(given_up);
                            due
                        }),
                    };
                    if due.is_none_or(|due| due > now) {
                        break;
                    }
                    replay.make(ctx.cache)
                }
                Packets::None => None,
            };
            let Some((packet, size)) = made else { break };
            burst.push(packet);
            self.schedule.spend(size);
            self.together.0 = self.together.0.saturating_sub(1);
            self.left -= 1;
        }
        let over = matches!(&self.packets, Packets::Captured(replay) if replay.is_over());
        if over {
            self.left = 0;
            if burst.is_empty() {
                self.publish_done();
            }
        }
        ctx.clock.lap(Stage::Rx);
    }

    #[inline]
    fn send(&mut self, ctx: &mut Context<'_>, mut burst: Burst) -> usize {
        let packets = burst.len();
        let queue = &mut *self.queues[0];
        if !Packet::all_plain(&burst) {
            fall_back(queue, ctx, &mut burst);
        }
        queue.tx(ctx, &mut burst);
        let taken = packets - burst.len();
        self.counters.counter(Sent::Handed as usize).add(taken as u64);
        self.waiting = burst;
        if self.left == 0 {
            self.publish_done();
        }
        taken
    }

    /// Finishes the packets in flight. Returns whether none are left.
    pub(super) fn stop(&mut self, ctx: &mut Context<'_>) -> bool {
        ctx.cache.free_all(self.waiting.drain(..));
        let mut stopped = true;
        for queue in &mut self.queues {
            stopped &= queue.stop(ctx);
        }
        stopped
    }
}

#[cfg(test)]
mod tests {
    use offcore_dma::Mover;
    use offcore_mem::{Hugepages, Pool};
    use offcore_stats::StageClock;
    use offcore_wire::pcap::PcapWriter;

    use super::super::replay::Capture;
    use super::super::sizes::Sizes;
    use super::*;

    #[test]
    fn skipped_replay_packets_are_counted() {
        let path = std::env::temp_dir().join(format!("offcore-sender-{}", std::process::id()));
        let mut writer = PcapWriter::new(std::fs::File::create(&path).unwrap(), 65_535).unwrap();
        writer.write_record(0, &[0; 60]).unwrap();
        drop(writer);
        let capture = Capture::read(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        let settings = Settings {
            running: true,
            rate: Rate::Packets(10.0),
            sizes: Sizes::fixed(64).unwrap(),
            flows: 1,
            burst: 1,
            count: None,
            start: 1,
        };
        let replay = Replay::new(capture, true, 1.0, tsc::hz());
        let control = Arc::new(Control::new(settings.clone()));
        let block = Block::private(&SENDER);
        let packets = Packets::Captured(Box::new(replay));
        let mut sender = Sender::new(Vec::new(), packets, control, block.clone());
        sender.apply(1, settings);
        // Nothing could be sent since the first packet, three seconds ago.
        assert!(sender.schedule.due(tsc::now() - 3 * tsc::hz()).is_some());
        sender.schedule.spend(64);
        let (mut mover, mut clock) = (Mover::new(), StageClock::private());
        let mut cache = Pool::new(64, 2048, Hugepages::None).unwrap().cache();
        let mut ctx = Context { mover: &mut mover, cache: &mut cache, clock: &mut clock, burst: BURST };
        let mut burst = Burst::new();
        sender.fill(&mut ctx, &mut burst);
        assert_eq!((burst.len(), block.counter(Sent::GivenUp as usize).value()), (1, 29));
        cache.free_all(burst);
    }
}

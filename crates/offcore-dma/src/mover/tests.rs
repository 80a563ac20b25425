//! Tests of the mover with engines that are stepped manually and fail on demand.

use std::sync::Arc;

use super::*;
use crate::channel::CopyDevice;
use crate::core::{CoreDevice, Stepper};
use crate::fault::{FaultCounts, Faults, FaultyChannel};
use crate::{Batch, Begun, CopyQueue};

const RING: usize = 64;
const LEN: usize = 64;
/// Number of packets for which a queue has memory.
const PACKETS: usize = 512;

/// A queue and its packets' memory. Every packet has one copy, whose contents encode the packet's number.
struct Lane {
    /// The holders are the packets' numbers.
    queue: CopyQueue<usize>,
    src: Vec<u8>,
    dst: Vec<u8>,
    sent: usize,
    received: usize,
}

impl Lane {
    fn new(mover: &mut Mover, mode: Mode, channels: &[ChannelId]) -> Self {
        let mut queue = CopyQueue::open(mover, PACKETS);
        queue.bind(mover, &Binding::new(mode, channels.to_vec())).unwrap();
        Self { queue, src: vec![0; PACKETS * LEN], dst: vec![0; PACKETS * LEN], sent: 0, received: 0 }
    }

    fn id(&self) -> QueueId {
        self.queue.id()
    }

    /// Submits a burst of packets of these lengths. Returns the number of packets given to a channel.
    fn submit_lens(&mut self, mover: &mut Mover, lens: &[usize]) -> usize {
        let before = mover.decisions(self.id()).by_engine;
        let mut plan = self.queue.plan(mover);
        let lens = &lens[..lens.len().min(plan.packets).min(plan.copies)];
        match self.queue.begin(mover, &mut plan) {
            Begun::Immediate(mut batch) => {
                let numbers = gather(&mut batch, &mut self.src, &mut self.dst, &mut self.sent, lens);
                // SAFETY: the vectors live until the lane is dropped, which every test does after its mover.
                unsafe { batch.submit(&mut StageClock::private()) };
                for number in numbers {
                    assert_eq!(self.dst[number % PACKETS * LEN], number as u8 | 1, "packet {number}");
                    self.received += 1;
                }
            }
            Begun::Queued(mut batch) => {
                gather(&mut batch, &mut self.src, &mut self.dst, &mut self.sent, lens);
                // SAFETY: the vectors live until the lane is dropped, which every test does after its mover.
                unsafe { batch.submit(&mut StageClock::private()) };
            }
        }
        (mover.decisions(self.id()).by_engine - before) as usize
    }

    fn submit(&mut self, mover: &mut Mover, packets: usize) -> usize {
        self.submit_lens(mover, &vec![LEN; packets])
    }

    /// Takes complete packets and checks them. Returns their number.
    fn reap(&mut self, mover: &mut Mover) -> usize {
        let mut ready = self.queue.ready(mover);
        let packets = ready.len();
        for i in 0..packets {
            let at = self.received % PACKETS * LEN;
            assert_eq!(*ready.holder(i), self.received);
            assert_eq!(self.dst[at], self.received as u8 | 1, "packet {} is not complete", self.received);
            self.received += 1;
        }
        ready.retire(packets);
        packets
    }
}

/// Enters packets of these lengths. Returns the numbers of packets that are complete after the batch is submitted.
fn gather<const IMMEDIATE: bool>(
    batch: &mut Batch<'_, usize, IMMEDIATE>,
    src: &mut [u8],
    dst: &mut [u8],
    sent: &mut usize,
    lens: &[usize],
) -> Vec<usize> {
    let enter = |&len: &usize| {
        let at = *sent % PACKETS * LEN;
        src[at..at + len].fill(*sent as u8 | 1);
        dst[at..at + len].fill(0);
        batch.copy(src[at..].as_ptr(), dst[at..].as_mut_ptr(), len as u32);
        *sent += 1;
        batch.enter(*sent - 1)
    };
    lens.iter().filter_map(enter).collect()
}

/// Returns a mover with a faulty stepped channel.
fn faulty(faults: Faults) -> (Mover, ChannelId, Stepper, Arc<FaultCounts>) {
    let (device, stepper) = CoreDevice::stepped();
    let channel = FaultyChannel::new(device.open_channel(RING).unwrap(), faults);
    let counts = channel.counts();
    let mut mover = Mover::new();
    let channel = mover.add_channel(Box::new(channel));
    (mover, channel, stepper, counts)
}

fn sound(channels: usize) -> (Mover, Vec<ChannelId>, Stepper) {
    let (device, stepper) = CoreDevice::stepped();
    let mut mover = Mover::new();
    let open = |_| mover.add_channel(device.open_channel(RING).unwrap());
    let channels = (0..channels).map(open).collect();
    (mover, channels, stepper)
}

/// Runs a round: completed packets are taken, a burst is submitted, and the engine works.
fn round(mover: &mut Mover, lane: &mut Lane, stepper: &mut Stepper, packets: usize) -> usize {
    mover.poll(&mut StageClock::private());
    lane.reap(mover);
    let given = lane.submit(mover, packets);
    stepper.step();
    given
}

fn drain(mover: &mut Mover, lane: &mut Lane, stepper: &mut Stepper) {
    let mut idle = 0;
    while lane.received < lane.sent {
        stepper.step();
        mover.poll(&mut StageClock::private());
        idle = if lane.reap(mover) > 0 { 0 } else { idle + 1 };
        assert!(idle < 1_000_000, "{} of {} packets came", lane.received, lane.sent);
    }
}

#[test]
fn failing_channel_is_probed_less_often() {
    let (mut mover, channel, mut stepper, _) = faulty(Faults { error: 1000, ..Faults::default() });
    mover.set_back_off(tsc::hz() / 10_000, tsc::hz() / 1000);
    let mut lane = Lane::new(&mut mover, Mode::Offload, &[channel]);
    let mut given = 0;
    while mover.health(channel).probes < 4 {
        given += round(&mut mover, &mut lane, &mut stepper, 8);
    }
    drain(&mut mover, &mut lane, &mut stepper);
    let (stats, health) = (mover.stats(), mover.health(channel));
    // Two bursts made the channel fail, a third was in flight, and then each probe sent a burst.
    assert!(given <= 8 * (4 + health.probes as usize), "{given} copies, {health:?}");
    assert_eq!((stats.out_of_service, stats.channels_out, health.service), (1, 1, Service::Out));
    assert_eq!((stats.probes, stats.faults), (health.probes, 0));
    assert_eq!(stats.fallbacks, given as u64);
    assert_eq!(stats.overflow, (lane.sent - given) as u64);
}

#[test]
fn recovered_channel_returns_to_service() {
    let (mut mover, channel, mut stepper, counts) =
        faulty(Faults { error: 300, seed: 5, ..Faults::default() });
    mover.set_back_off(1, 1);
    let mut lane = Lane::new(&mut mover, Mode::Offload, &[channel]);
    // Occasionally, a probe of two copies finds no fault.
    let mut back = 0;
    for _ in 0..5000 {
        let out = mover.health(channel).service != Service::In;
        round(&mut mover, &mut lane, &mut stepper, 2);
        back += u32::from(out && mover.health(channel).service == Service::In);
    }
    drain(&mut mover, &mut lane, &mut stepper);
    let health = mover.health(channel);
    assert!(back > 10 && health.taken_out > 10 && health.probes > health.taken_out, "{back} {health:?}");
    assert_eq!(mover.stats().fallbacks, counts.errors.value());
}

#[test]
fn occasional_errors_keep_channel_in_service() {
    let (mut mover, channel, mut stepper, counts) = faulty(Faults { error: 5, seed: 1, ..Faults::default() });
    let mut lane = Lane::new(&mut mover, Mode::Offload, &[channel]);
    (0..3000).for_each(|_| drop(vec![round(&mut mover, &mut lane, &mut stepper, 32)]));
    drain(&mut mover, &mut lane, &mut stepper);
    assert!(counts.errors.value() > 300);
    assert_eq!((mover.stats().out_of_service, mover.stats().overflow), (0, 0));
    assert_eq!(mover.stats().fallbacks, counts.errors.value());
}

#[test]
fn memory_faults_charge_the_queue() {
    // Partial copies end with a page fault.
    let (mut mover, channel, mut stepper, counts) = faulty(Faults { partial: 1000, ..Faults::default() });
    mover.set_back_off(tsc::hz(), tsc::hz());
    let mut guilty = Lane::new(&mut mover, Mode::Offload, &[channel]);
    for _ in 0..10 {
        round(&mut mover, &mut guilty, &mut stepper, 8);
    }
    drain(&mut mover, &mut guilty, &mut stepper);
    let (stats, decisions) = (mover.stats(), mover.decisions(guilty.id()));
    assert_eq!((decisions.faults, decisions.fault_pauses), (counts.partials.value(), 1));
    assert_eq!((stats.faults, stats.out_of_service), (decisions.faults, 0));
    assert!(guilty.submit(&mut mover, 8) == 0, "the core copies for the guilty queue");
    // Another queue continues to use the channel.
    let mut other = Lane::new(&mut mover, Mode::Offload, &[channel]);
    assert_eq!((mover.health(channel).service, other.submit(&mut mover, 8)), (Service::In, 8));
    drain(&mut mover, &mut other, &mut stepper);
}

#[test]
fn a_lost_copy_counts_against_the_channel() {
    let (mut mover, channel, mut stepper, _) = faulty(Faults { never: 1000, ..Faults::default() });
    mover.set_lost_after(tsc::hz() / 100_000);
    mover.set_back_off(tsc::hz(), tsc::hz());
    let mut lane = Lane::new(&mut mover, Mode::Offload, &[channel]);
    for _ in 0..2 {
        lane.submit(&mut mover, 4);
        drain(&mut mover, &mut lane, &mut stepper);
    }
    assert_eq!((mover.stats().resets, mover.stats().quarantined), (2, 8));
    assert_eq!(mover.health(channel).service, Service::Out);
    assert_eq!(lane.submit(&mut mover, 4), 0);
}

/// Polls often enough for the mover to check for lost copies.
fn poll_long(mover: &mut Mover) {
    (0..1000).for_each(|_| mover.poll(&mut StageClock::private()));
}

#[test]
fn new_copies_are_not_lost_at_once() {
    // The TSC of a machine that has been up for a day exceeds the first limit. The second one is longer than 1000 polls
    // take, even if another process has the core for a while.
    for (limit, pause) in [(60_000, 0), (300, 300)] {
        let (mut mover, channels, mut stepper) = sound(1);
        mover.set_lost_after(tsc::ticks(Duration::from_millis(limit)));
        let mut lane = Lane::new(&mut mover, Mode::Offload, &channels);
        for _ in 0..4 {
            lane.submit(&mut mover, 1);
            poll_long(&mut mover);
            assert_eq!(mover.stats().resets, 0);
            drain(&mut mover, &mut lane, &mut stepper);
            std::thread::sleep(Duration::from_millis(pause));
        }
    }
}

#[test]
fn unanswered_copy_is_lost() {
    let (short, long) = (Duration::from_millis(1), Duration::from_secs(60));
    // The queue's limit takes precedence over the mover's.
    for (movers, queues) in [(short, None), (long, Some(tsc::ticks(short)))] {
        let (mut mover, channels, mut stepper) = sound(1);
        mover.set_lost_after(tsc::ticks(movers));
        let mut lane = Lane::new(&mut mover, Mode::Offload, &channels);
        if let Some(limit) = queues {
            lane.queue.set_lost_after(&mut mover, limit);
        }
        lane.submit(&mut mover, 1);
        poll_long(&mut mover);
        std::thread::sleep(short);
        poll_long(&mut mover);
        assert_eq!(mover.stats().resets, 1);
        drain(&mut mover, &mut lane, &mut stepper);
    }
}

/// Returns the percentage of a channel's copies that belong to the second queue, while the first queue floods the
/// channel. Both always have work; the engine makes as many copies as its ring holds.
fn part_of_the_other(mover: &mut Mover, lanes: &mut [Lane; 2], stepper: &mut Stepper) -> usize {
    let mut given = [0; 2];
    for round in 0..400 {
        mover.poll(&mut StageClock::private());
        for (index, (lane, packets)) in lanes.iter_mut().zip([4 * RING, 32]).enumerate() {
            lane.reap(mover);
            let packets = packets.min(PACKETS - (lane.sent - lane.received));
            given[index] += lane.submit(mover, packets) * usize::from(round >= 4);
        }
        stepper.step();
    }
    100 * given[1] / (given[0] + given[1])
}

#[test]
fn flooding_queue_leaves_its_share() {
    let (mut mover, channels, mut stepper) = sound(1);
    let mut lanes = [0, 1].map(|_| Lane::new(&mut mover, Mode::Offload, &channels));
    for (weight, expected) in [(3, 20..=30), (1, 45..=100)] {
        let binding = Binding { weight, ..Binding::new(Mode::Offload, channels.clone()) };
        lanes[0].queue.bind(&mut mover, &binding).unwrap();
        let part = part_of_the_other(&mut mover, &mut lanes, &mut stepper);
        assert!(expected.contains(&part), "{part} %");
    }
    // The test fails without shares.
    mover.switch_off_shares();
    let part = part_of_the_other(&mut mover, &mut lanes, &mut stepper);
    assert!(part < 45, "{part} % without shares");
}

#[test]
fn lone_queue_uses_the_whole_channel() {
    let (mut mover, channels, mut stepper) = sound(1);
    let [mut busy, mut idle] = [0, 1].map(|_| Lane::new(&mut mover, Mode::Offload, &channels));
    for _ in 0..3 {
        round(&mut mover, &mut busy, &mut stepper, RING);
        round(&mut mover, &mut idle, &mut stepper, 8);
    }
    drain(&mut mover, &mut busy, &mut stepper);
    drain(&mut mover, &mut idle, &mut stepper);
    assert_eq!(busy.submit(&mut mover, RING), RING / 2, "the other had work just now");
    drain(&mut mover, &mut busy, &mut stepper);
    (0..2 * shares::IDLE_AFTER).for_each(|_| mover.poll(&mut StageClock::private()));
    assert_eq!(busy.submit(&mut mover, RING), RING);
    drain(&mut mover, &mut busy, &mut stepper);
}

/// Makes copies of at least `from` bytes go to the engine until another choice is tried.
fn choose(mover: &mut Mover, queue: QueueId, from: u32) {
    mover.queue(queue).choice = QueueChoice { from, decided: from, ..QueueChoice::new() };
}

#[test]
fn split_burst_keeps_order() {
    let (mut mover, channels, mut stepper) = sound(2);
    let mut lane = Lane::new(&mut mover, Mode::Auto, &channels);
    choose(&mut mover, lane.id(), 33);
    let mut given = 0;
    for i in 0..2000 {
        mover.poll(&mut StageClock::private());
        lane.reap(&mut mover);
        let lens: Vec<usize> = (0..16).map(|k| if (i + k) % 3 == 0 { 64 } else { 1 + k * 4 }).collect();
        given += lane.submit_lens(&mut mover, &lens);
        if i % 3 == 0 {
            stepper.step();
        }
    }
    drain(&mut mover, &mut lane, &mut stepper);
    let [first, ..] = mover.decisions(lane.id()).classes;
    assert_eq!((first.by_core, first.by_engine), ((lane.sent - given) as u64, given as u64));
    assert!(first.by_core > 10_000 && first.by_engine > 10_000, "{first:?}");
    assert!(first.held_by_order > 10_000, "{first:?}");
    assert_eq!(mover.stats().held_by_order, first.held_by_order);
}

#[test]
fn auto_mode_tries_core_and_engine() {
    let (mut mover, channels, mut stepper) = sound(1);
    let mut lane = Lane::new(&mut mover, Mode::Auto, &channels);
    let mut given = 0;
    for _ in 0..5000 {
        given += round(&mut mover, &mut lane, &mut stepper, 32);
        mover.end_round();
    }
    drain(&mut mover, &mut lane, &mut stepper);
    let [first, ..] = mover.decisions(lane.id()).classes;
    assert_eq!((first.by_core, first.by_engine), ((lane.sent - given) as u64, given as u64));
    assert!(given > 100 && first.by_core > 100, "{first:?}");
    assert!(first.core_ticks > 0.0 && first.engine_ticks > 0.0, "{first:?}");
}

#[test]
fn auto_mode_needs_end_round() {
    let (mut mover, channels, mut stepper) = sound(1);
    let mut lane = Lane::new(&mut mover, Mode::Auto, &channels);
    let given: usize = (0..1000).map(|_| round(&mut mover, &mut lane, &mut stepper, 32)).sum();
    assert_eq!(given, 0);
}

#[test]
fn a_trial_ends_when_a_queue_comes() {
    let (mut mover, channels, mut stepper) = sound(1);
    let mut lane = Lane::new(&mut mover, Mode::Auto, &channels);
    while round(&mut mover, &mut lane, &mut stepper, 32) == 0 {
        mover.end_round();
    }
    assert_eq!(mover.queue(lane.id()).choice.decided, choice::NONE);
    let _other = Lane::new(&mut mover, Mode::Auto, &channels);
    assert_eq!(round(&mut mover, &mut lane, &mut stepper, 32), 0);
    drain(&mut mover, &mut lane, &mut stepper);
}

#[test]
fn auto_mode_reports_full_channel() {
    let (mut mover, channels, _stepper) = sound(1);
    let mut lane = Lane::new(&mut mover, Mode::Auto, &channels);
    choose(&mut mover, lane.id(), choice::ALL);
    // The engine is not stepped, so its ring fills.
    let given: usize = (0..4).map(|_| lane.submit(&mut mover, 32)).sum();
    assert_eq!(given, RING);
    let [first, ..] = mover.decisions(lane.id()).classes;
    assert_eq!((first.way, first.reason), (Way::Core, Reason::Full));
    assert_eq!(mover.stats().overflow, 128 - RING as u64);
    assert!(first.held_by_order > 0, "{first:?}");
}

/// Runs a queue in mode `auto` whose copies all go to an engine that completes them `delay` rounds later.
fn delayed(rounds: usize, delay: usize, mover: &mut Mover, lane: &mut Lane, stepper: &mut Stepper) -> usize {
    let mut given = 0;
    for round in 0..rounds {
        choose(mover, lane.id(), choice::ALL);
        mover.poll(&mut StageClock::private());
        lane.reap(mover);
        given += usize::from(lane.submit(mover, 4) > 0);
        if round % (delay + 1) == delay {
            stepper.step();
        }
    }
    given
}

/// Latency limits in TSC ticks. Any packet of an engine exceeds the first one, and no packet exceeds the second one,
/// regardless of the speed of the machine.
const ALWAYS_LATE: u64 = 0;
const NEVER_LATE: u64 = u64::MAX;

#[test]
fn slow_engine_is_reused_when_fast() {
    let (mut mover, channels, mut stepper) = sound(1);
    let mut lane = Lane::new(&mut mover, Mode::Auto, &channels);
    mover.set_max_latency(Some(ALWAYS_LATE));
    let given = delayed(600, 1, &mut mover, &mut lane, &mut stepper);
    drain(&mut mover, &mut lane, &mut stepper);
    assert!((1..=8).contains(&given), "{given} bursts");
    let decisions = mover.decisions(lane.id());
    let [first, ..] = decisions.classes;
    assert_eq!((first.way, first.reason), (Way::Core, Reason::Latency));
    assert!(decisions.late >= 1 && decisions.latency_pauses == 1, "{decisions:?}");
    assert_eq!(mover.stats().overflow, 0, "the engine had room");
    // Now the engine is in time. It is tried after 4096 bursts of the core, including those above.
    mover.set_max_latency(Some(NEVER_LATE));
    let given = delayed(8_192, 0, &mut mover, &mut lane, &mut stepper);
    assert!(given > 4_000, "{given} bursts, {:?}", mover.decisions(lane.id()));
    drain(&mut mover, &mut lane, &mut stepper);
    assert!(mover.decisions(lane.id()).longest_latency > 0);
}

/// Packets that are dropped, or so short that the core copies them itself.
#[test]
fn empty_packets_are_not_timed() {
    let (mut mover, channels, _stepper) = sound(1);
    let mut lane = Lane::new(&mut mover, Mode::Auto, &channels);
    mover.set_max_latency(Some(NEVER_LATE));
    choose(&mut mover, lane.id(), choice::ALL);
    let mut plan = lane.queue.plan(&mut mover);
    let Begun::Queued(mut batch) = lane.queue.begin(&mut mover, &mut plan) else { panic!("the core copies") };
    batch.enter(0);
    // SAFETY: the batch has no copies.
    unsafe { batch.submit(&mut StageClock::private()) };
    assert!(!mover.queue(lane.id()).latency.is_waiting());
}

#[test]
fn no_limit_uses_a_slow_engine() {
    let (mut mover, channels, mut stepper) = sound(1);
    let mut lane = Lane::new(&mut mover, Mode::Auto, &channels);
    let given = delayed(200, 1, &mut mover, &mut lane, &mut stepper);
    drain(&mut mover, &mut lane, &mut stepper);
    // The remaining bursts try the core.
    assert!(given > 100, "{given} bursts");
    assert_eq!(mover.decisions(lane.id()).late, 0);
}

#[test]
fn in_flight_until_taken() {
    let (mut mover, channels, mut stepper) = sound(1);
    let mut lane = Lane::new(&mut mover, Mode::Offload, &channels);
    assert_eq!(mover.in_flight(), 0);
    lane.submit(&mut mover, 4);
    assert!(mover.in_flight() > 4, "packets, and a channel that has copies");
    stepper.step();
    mover.poll(&mut StageClock::private());
    assert_eq!(mover.in_flight(), 4, "they have not been taken");
    lane.reap(&mut mover);
    assert_eq!(mover.in_flight(), 0);
}

#[test]
fn mover_can_disable_streaming_stores() {
    let mut mover = Mover::new();
    let before = Lane::new(&mut mover, Mode::Cpu, &[]);
    let goes_past = |mover: &mut Mover, lane: &Lane| mover.queue(lane.id()).copier.uses_streaming_stores();
    assert!(goes_past(&mut mover, &before));
    mover.disable_streaming_stores();
    let after = Lane::new(&mut mover, Mode::Cpu, &[]);
    assert!(![before, after].iter().any(|lane| goes_past(&mut mover, lane)));
}

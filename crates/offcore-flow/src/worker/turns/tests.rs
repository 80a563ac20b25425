use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use offcore_dma::Mover;
use offcore_mem::{Hugepages, Pool};
use offcore_port::vhost::{OneCopy, rx_over, tx_over};
use offcore_port::{RxCounters, TxCounters};
use offcore_ring::device::Direction;
use offcore_ring::driver;
use offcore_stats::StageClock;
use offcore_stats::page::Reader;
use offcore_vhost::testing::{FEATURES, Guest, Receiver, Worker as Parts, start};
use offcore_vhost::{VringCell, VringConfig};
use offcore_wire::MacAddr;

use super::*;
use crate::forwarding::forward::{Addresses, Forward};
use crate::forwarding::guest_pair::GuestPair;
use crate::forwarding::{Forwarding, Rules};
use crate::worker::Worker;
use crate::worker::task::{Task, WakeSource};

const US: u64 = 1000;
const SECOND: u64 = 1_000_000 * US;

thread_local! {
    /// The thread usage in a [`World`].
    static USAGE: Cell<Usage> = const { Cell::new(Usage { ran: 0, sleeps: 0, preempted: 0 }) };
}

/// Turns with a clock that ticks once per nanosecond.
struct World {
    turns: Turns,
    now: u64,
}

/// The cost of a turn: the thread runs, sleeps, or is preempted.
#[derive(Clone, Copy)]
enum Cost {
    Runs(u64),
    Sleeps(u64),
    Waits(u64),
}

use Cost::{Runs, Sleeps, Waits};

impl World {
    fn new(tasks: usize) -> Self {
        let mut turns = Turns::private();
        (turns.times.ahead, turns.times.linger, turns.times.turn, turns.times.measured) =
            (5 * US, 5 * US, 20 * US, 10 * SECOND);
        (turns.times.long_turn, turns.times.usage_interval, turns.times.expensive_turn) =
            (100 * US, 1000 * US, 1000 * US);
        (turns.began, turns.ended, turns.looked) = (1000 * US, 1000 * US, 1000 * US);
        USAGE.set(Usage::default());
        turns.look = || USAGE.get();
        (0..tasks).for_each(|task| turns.know(task));
        Self { turns, now: 1000 * US }
    }

    /// Runs rounds for `time`, with tasks whose turns with packets have these costs. Returns the time that each task
    /// used in turns with packets.
    fn run(&mut self, time: u64, costs: &[Cost], mut has: impl FnMut(u64, usize) -> bool) -> Vec<u64> {
        let (mut used, end) = (vec![0; costs.len()], self.now + time);
        while self.now < end {
            for (task, &cost) in costs.iter().enumerate() {
                if self.turns.waits(task, self.now) {
                    continue;
                }
                let packets = usize::from(has(self.now, task));
                let began = self.now;
                self.turns.ended = began;
                self.pass(if packets > 0 { cost } else { Runs(50) });
                self.turns.charge(task, self.now, packets);
                used[task] += (self.now - began) * packets as u64;
            }
            self.pass(Runs(10));
            self.turns.ended = self.now;
            self.turns.round(|_| 0);
        }
        used
    }

    fn pass(&mut self, cost: Cost) {
        let (Runs(ticks) | Sleeps(ticks) | Waits(ticks)) = cost;
        let Usage { ran, sleeps, preempted } = USAGE.get();
        self.now += ticks;
        // The next round begins now.
        self.turns.began = self.now;
        USAGE.set(match cost {
            Runs(_) => Usage { ran: ran + ticks, sleeps, preempted },
            Sleeps(_) => Usage { ran, sleeps: sleeps + 1, preempted },
            Waits(_) => Usage { ran, sleeps, preempted: preempted + 1 },
        });
    }

    fn waiting(&self) -> usize {
        (0..self.turns.parties.len()).filter(|&task| self.turns.waits(task, self.now)).count()
    }

    /// Returns two counters of a port: ticks used, and ticks in which it was active.
    fn counted_of(&self, port: usize) -> [u64; 2] {
        let PortTurnCounts { used_ticks, active_ticks, .. } = PortTurnCounts::read(&self.turns.ports[port]);
        [used_ticks, active_ticks]
    }

    fn counted(&self) -> [u64; 4] {
        TurnCounts::read(&self.turns.stats).values()
    }
}

/// Whether a task has packets: task 0 always, another task when `time` has passed since it last had some.
fn every(time: u64) -> impl FnMut(u64, usize) -> bool {
    let mut come = 0;
    move |now, task| {
        let has = task == 0 || now >= come;
        if has && task > 0 {
            come = now + time;
        }
        has
    }
}

fn always(_: u64, _: usize) -> bool {
    true
}

#[test]
fn expensive_task_gets_equal_share() {
    // 10 ms: work of the kernel for a task counts, too.
    for (cost, time) in [(50 * US, 1), (100 * US, 1), (900 * US, 1), (10_000 * US, 10), (100_000 * US, 100)] {
        let time = time * SECOND;
        let used = World::new(3).run(time, &[Runs(cost), Runs(4 * US), Runs(5 * US)], always);
        assert!(used.iter().all(|&used| used.abs_diff(time / 3) <= time / 50), "{cost}: {used:?}");
    }
}

#[test]
fn worker_waits_for_task_between_bursts() {
    // A guest with few packets in flight: they arrive 3 us after it got the last ones back.
    let used = World::new(2).run(SECOND, &[Runs(60 * US), Runs(4 * US)], every(7 * US));
    assert!(used[0].abs_diff(SECOND / 2) < SECOND / 20, "{used:?}");
}

#[test]
fn mostly_idle_task_is_not_awaited() {
    let mut world = World::new(2);
    let costs = [Runs(60 * US), Runs(US)];
    let used = world.run(SECOND, &costs, every(100 * US));
    assert!(used[0] > SECOND * 9 / 10, "{used:?}");
    // It has not saved up any time for later packets.
    let used = world.run(SECOND, &costs, always);
    assert!(used[0].abs_diff(used[1]) < SECOND / 50, "{used:?}");
}

/// A task with one packet per round, which takes `ticks`.
#[derive(Debug)]
struct Takes {
    ticks: u64,
    port: Option<usize>,
    used: Arc<AtomicU64>,
}

impl Task for Takes {
    fn round(&mut self, _: &mut Context<'_>) -> usize {
        let start = tsc::now();
        while tsc::now() - start < self.ticks {
            std::hint::spin_loop();
        }
        self.used.fetch_add(tsc::now() - start, Relaxed);
        1
    }

    fn round_in_turns(&mut self, ctx: &mut Context<'_>, turns: &mut Turns) -> usize {
        turns.turn(self.port, ctx, |_, ctx| self.round(ctx))
    }

    fn drain(&mut self, _: &mut Context<'_>) -> usize {
        0
    }

    fn wake_sources<'a>(&'a mut self, _: &mut dyn FnMut(WakeSource<'a>)) {}
}

#[test]
fn worker_shares_core_between_ports() {
    // Without turns, the first two tasks had 99 % of the time in each run.
    let used: [Arc<AtomicU64>; 3] = Default::default();
    let task = |us, port, used: &Arc<AtomicU64>| -> Box<dyn Task> {
        Box::new(Takes { ticks: tsc::ticks(Duration::from_micros(us)), port, used: Arc::clone(used) })
    };
    let tasks = vec![task(500, Some(0), &used[0]), task(500, Some(0), &used[1]), task(10, Some(1), &used[2])];
    let mut worker = Worker::new(tasks, Mover::new(), Pool::new(64, 2048, Hugepages::None).unwrap().cache());
    let (start, time) = (tsc::now(), tsc::ticks(Duration::from_millis(200)));
    while tsc::now() - start < time {
        worker.round();
    }
    let [a, b, c] = used.map(|used| used.load(Relaxed));
    assert!(c > (a + b + c) / 5, "{a} and {b} of a port with two queues, {c} of another one");
}

#[test]
fn light_senders_do_not_idle_core() {
    // A packet of 0.15 us from time to time, just soon enough to be waited for.
    for (tasks, least) in [(1, 85), (3, 65), (7, 35)] {
        let mut costs = vec![Runs(150); tasks + 1];
        costs[0] = Runs(60 * US);
        let mut come = vec![0; tasks + 1];
        let used = World::new(tasks + 1).run(SECOND, &costs, |now, task| {
            let has = task == 0 || now >= come[task];
            if has {
                come[task] = now + 3 * US;
            }
            has
        });
        assert!(used[0] > SECOND * least / 100, "{tasks}: {used:?}");
    }
}

#[test]
fn long_turns_shrink_burst() {
    let mut world = World::new(2);
    let mut turn = |cost, packets| {
        world.turns.ended = world.now;
        world.pass(Runs(cost));
        world.turns.charge(0, world.now, packets);
        world.turns.parties[0].burst
    };
    assert_eq!([turn(90 * US, 32), turn(45 * US, 16), turn(23 * US, 8), turn(12 * US, 4)], [16, 8, 4, 4]);
    assert_eq!([turn(9 * US, 3), turn(9 * US, 4), turn(US, 8), turn(US, 16)], [4, 8, 16, 32]);
    assert_eq!([turn(400 * US, 1), turn(400 * US, 1)], [1, 1]);
}

#[test]
fn equal_tasks_cause_no_wait() {
    let mut world = World::new(4);
    world.run(SECOND / 100, &[Runs(4 * US); 4], always);
    assert_eq!(world.waiting(), 0);
}

#[test]
fn tasks_without_packets_cause_no_wait() {
    let mut world = World::new(3);
    world.run(1000 * US, &[Runs(900 * US), Runs(4 * US), Runs(5 * US)], always);
    assert_eq!(world.waiting(), 1);
    world.run(10 * US, &[Runs(0); 3], |_, _| false);
    assert_eq!(world.waiting(), 0);
    world.run(SECOND / 100, &[Runs(0); 3], |_, _| false);
    assert_eq!(world.waiting(), 0);
}

#[test]
fn slow_memory_leaves_half_to_others() {
    // The number of such tasks does not matter: one rests while another is waited for.
    for slow in 1..=3 {
        let mut costs = vec![Runs(4 * US); 5];
        costs[..slow].fill(Sleeps(400_000 * US));
        let used = World::new(5).run(60 * SECOND, &costs, always);
        let others: u64 = used[slow..].iter().sum();
        assert!(others >= 60 * SECOND * 45 / 100, "{slow}: {used:?}");
        let (least, most) = (used[slow..].iter().min().unwrap(), used[slow..].iter().max().unwrap());
        assert!(most - least <= SECOND / 50, "{slow}: {used:?}");
    }
}

#[test]
fn short_stall_keeps_long_throttle() {
    let used =
        World::new(3).run(60 * SECOND, &[Sleeps(400_000 * US), Sleeps(1100 * US), Runs(200 * US)], always);
    assert!(used[2] >= 60 * SECOND * 45 / 100, "{used:?}");
}

#[test]
fn long_stalls_leave_half_to_others() {
    for seconds in [2, 8, 20, 50] {
        let time = 10 * seconds * SECOND;
        let used = World::new(2).run(time, &[Sleeps(seconds * SECOND), Runs(200 * US)], always);
        assert!(used[1] >= time * 45 / 100, "{seconds}: {used:?}");
    }
}

#[test]
fn expensive_receiver_is_throttled() {
    let mut world = World::new(0);
    [0, 2, 4].into_iter().for_each(|party| world.turns.know(party));
    let send = |world: &mut World, cost, packets| {
        world.turns.ended = world.now;
        let visited = world.now;
        world.pass(cost);
        world.turns.visited(2, visited, world.now, packets);
        world.turns.charge(0, world.now, 32);
        (world.turns.rests(2, world.now), world.turns.rests(0, world.now))
    };
    // A turn is expensive from a millisecond on, but not with many packets.
    assert_eq!(send(&mut world, Runs(2000 * US), 32), (false, false));
    assert_eq!(send(&mut world, Runs(2000 * US), 1), (false, false));
    let used = world.turns.parties[0].used;
    assert_eq!(send(&mut world, Runs(2000 * US), 1), (true, false));
    assert!(world.turns.parties[0].used - used < 100 * US, "that is no other one's time");
    world.pass(Runs(2000 * US));
    assert!(!world.turns.rests(2, world.now));
    // A sleep that is too short for an expensive turn throttles the owner of the memory, and not the sender.
    world.pass(Runs(SECOND));
    for again in [false, true, true, true] {
        assert_eq!(send(&mut world, Sleeps(950 * US), 32), (again, false));
        world.pass(Runs(60 * US));
    }
}

#[test]
fn preempted_task_is_not_charged() {
    let mut world = World::new(2);
    world.run(2000 * US, &[Runs(4 * US); 2], always);
    let used = world.turns.parties[0].used;
    world.turns.ended = world.now;
    world.pass(Waits(400_000 * US));
    world.turns.charge(0, world.now, 1);
    // At most the time since the thread's usage was last read.
    assert!(world.turns.parties[0].used - used <= 1000 * US);
    assert_eq!(world.counted()[1..], [400_000 * US, 0, 0]);
    assert!(!world.turns.rests(0, world.now));
    // A sleep for another task shortly before does not count.
    world.pass(Sleeps(50 * US));
    world.turns.ended = world.now;
    world.pass(Waits(900 * US));
    world.turns.charge(0, world.now, 1);
    assert!(!world.turns.rests(0, world.now));
}

#[test]
fn share_of_each_port_is_counted() {
    let mut world = World::new(0);
    let page = StatsPage::new(1 << 12).unwrap();
    world.turns.ports = Turns::on(&page, 3, &PortNames::default(), 2).unwrap().ports;
    // Two ports, and between them a task without a port and without packets.
    (0..3).for_each(|task| world.turns.know(task));
    world.run(100_000 * US, &[Runs(500 * US), Runs(US), Runs(2 * US)], |_, task| task != 1);
    let share = |port: usize| {
        let [used, active] = world.counted_of(port);
        used as f64 / active as f64
    };
    assert!((0.45..0.55).contains(&share(0)) && (0.45..0.55).contains(&share(1)));
    // A port without packets uses no time, and is not waited for.
    let before = world.counted_of(1);
    world.run(100_000 * US, &[Runs(500 * US), Runs(US), Runs(2 * US)], |_, task| task == 0);
    let after = world.counted_of(1);
    assert_eq!(after[0], before[0]);
    assert!(after[1] - before[1] < 1000 * US);
    world.run(10_000 * US, &[Runs(US), Runs(US), Sleeps(2000 * US)], |_, task| task == 2);
    let stalled = [0, 1].map(|port: usize| PortTurnCounts::read(&world.turns.ports[port]).stalled_ticks);
    assert!(stalled[0] == 0 && stalled[1] >= 4000 * US, "{stalled:?}");
    let blocks = Reader::open(page.fd()).unwrap().read().unwrap();
    let block = blocks.iter().find(|block| block.label(Label::Port) == Some("port1")).unwrap();
    assert_eq!((block.label(Label::Lcore), block.is_of(&PORT_TURNS)), (Some("3"), true));
    assert_eq!(PortTurnCounts::decode(block).stalled_ticks, stalled[1]);
}

#[test]
fn long_round_enables_turn_accounting() {
    let mut turns = Turns::private();
    // The test moves times by two hours instead of waiting, so that it does not depend on the machine's speed.
    let [hour, two_hours] = [1, 2].map(|hours| tsc::ticks(Duration::from_secs(hours * 3600)));
    (turns.times.long_round, turns.times.measured) = (hour, hour);
    (turns.times.ahead, turns.times.long_turn, turns.times.usage_interval) = (hour, hour, hour);
    turns.began = tsc::now();
    assert!(!turns.begin());
    turns.began = tsc::now().wrapping_sub(two_hours);
    turns.slept();
    assert!(!turns.begin(), "that was no round");
    turns.began = tsc::now().wrapping_sub(two_hours);
    assert!(turns.begin());
    let mut cache = Pool::new(64, 2048, Hugepages::None).unwrap().cache();
    let (mut mover, mut clock) = (Mover::new(), StageClock::private());
    let ctx = &mut Context { mover: &mut mover, cache: &mut cache, clock: &mut clock, burst: 32 };
    let mut all = |turns: &mut Turns| {
        let mut turn = |port, packets| turns.turn(port, ctx, |_, _| packets);
        turn(None, 3) + turn(Some(0), 4) + turn(Some(0), 5)
    };
    assert_eq!(turns.round(&mut all), 12);
    assert_eq!(turns.parties.len(), 2, "a port is one party, however many queues it has");
    turns.times.long_round = hour;
    assert!(turns.begin(), "turns are measured for an hour");
    turns.until = turns.until.map(|until| until.wrapping_sub(two_hours));
    assert!(turns.begin());
    turns.round(&mut all);
    assert!(!turns.begin(), "rounds have been short since");
}

#[test]
fn stuck_packets_are_not_awaited() {
    let mut turns = Turns::private();
    let mut cache = Pool::new(64, 2048, Hugepages::None).unwrap().cache();
    let (mut mover, mut clock) = (Mover::new(), StageClock::private());
    let ctx = &mut Context { mover: &mut mover, cache: &mut cache, clock: &mut clock, burst: 32 };
    turns.turn(Some(0), ctx, |_, _| 1);
    assert!(!turns.parties[0].idle);
    turns.turn(Some(1), ctx, |turns, _| {
        turns.set_stuck();
        1
    });
    assert!(turns.parties[2].empty.is_some());
}

#[test]
fn packets_between_guests_wait_for_their_turn() {
    for one_copy in [false, true] {
        let (guest, mut parts) = (Guest::new(16), Parts::new());
        let cells = [0, 1].map(|queue| Arc::new(VringCell::new(queue)));
        start(&cells[0], guest.config(FEATURES));
        start(&cells[1], VringConfig { layout: guest.tx_layout.clone(), ..guest.config(FEATURES) });
        let rx = rx_over(&cells[1], &mut parts.mover, RxCounters::private()).unwrap();
        let tx = tx_over(&cells[0], &mut parts.mover, TxCounters::private()).unwrap();
        let addresses = Addresses { source: MacAddr::local(1), destination: MacAddr::local(2) };
        let rules = Rules::new(Forward::Io, addresses, 0).of_port(3);
        let mut task: Box<dyn Task> = match one_copy {
            true => Box::new(GuestPair::new(OneCopy::between(rx, tx, &mut parts.mover).unwrap(), rules)),
            false => Box::new(Forwarding::new(rx, tx, rules)),
        };
        let _receiver = Receiver::new(&guest, 2048);
        let mut driver = driver::RingDriver::new(guest.tx_layout.clone(), false);
        for _ in 0..5 {
            driver.add(guest.buffer(100, 2048), 100, Direction::Readable, ()).unwrap();
        }
        driver.publish();
        let mut clock = StageClock::private();
        let ctx =
            &mut Context { mover: &mut parts.mover, cache: &mut parts.cache, clock: &mut clock, burst: 32 };
        let mut turns = Turns::private();
        turns.know(6);
        turns.parties[6].used = turns.times.ahead + 1;
        assert_eq!(task.round_in_turns(ctx, &mut turns), 0);
        turns.parties[6].used = 0;
        assert_eq!(task.round_in_turns(ctx, &mut turns), 5, "in one copy: {one_copy}");
        assert!(turns.parties[6].used > 0);
    }
}

//! Tests of the policy in simulated worlds with defined costs.

use super::super::choice::{self, ALL, NONE, QueueChoice, class};
use super::*;

/// The costs in a world, in ticks.
#[derive(Clone, Copy, Debug)]
struct World {
    /// A copy by the core: per copy, and per KiB.
    core: [f32; 2],
    /// A copy by an engine.
    engine: f32,
    /// Additional cost of a packet if queues use different ways.
    mixed: f32,
    /// Number of rounds until data that an engine brought from elsewhere is in the core's caches, and the relative
    /// additional cost of the first of these rounds.
    warming: (f32, f32),
}

/// A copy of 1514 bytes by the core costs 85 ticks, and up to 250 shortly after an engine was used.
const HOT: World = World { core: [26.0, 40.0], engine: 130.0, mixed: 60.0, warming: (4.0, 2.0) };
/// A copy by the core costs 1170 ticks for 1514 bytes and 107 ticks for 64 bytes.
const COLD: World = World { core: [60.0, 750.0], warming: (0.0, 0.0), ..HOT };

/// The packets that a worker forwards in a round: the copy lengths of each queue.
type Traffic = fn(&mut Dice) -> Vec<Vec<u32>>;

fn large(_: &mut Dice) -> Vec<Vec<u32>> {
    vec![vec![1514; 32]; 2]
}

fn imix(dice: &mut Dice) -> Vec<Vec<u32>> {
    let lens = [64, 64, 64, 64, 64, 64, 64, 590, 590, 590, 590, 1514];
    vec![(0..32).map(|_| lens[dice.next() as usize % lens.len()]).collect(); 2]
}

struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 >> 11
    }

    /// Returns a number from -1 to 1 with a higher probability in the middle.
    fn noise(&mut self) -> f32 {
        (0..3).map(|_| (self.next() % 2001) as f32 / 1000.0 - 1.0).sum::<f32>() / 3.0
    }
}

/// A worker whose rounds have the costs of a world.
struct Story {
    policy: Policy,
    queues: Vec<QueueChoice>,
    dice: Dice,
    lease: u32,
    since: u64,
    /// Number of consecutive rounds in which the core has made all copies.
    warm: f32,
    ticks: f64,
    /// The total cost if the better way had always been used.
    better: f64,
    trials: u32,
    adopted: u32,
    /// Time of the last trial, and the longest time between two trials, in ticks.
    pause: (f64, f64),
    /// Present slowdown of the CPU, as a factor.
    slower: f32,
}

impl Story {
    fn new(seed: u64) -> Self {
        Self {
            policy: Policy::new(),
            queues: vec![QueueChoice { busy: true, ..QueueChoice::new() }; 2],
            dice: Dice(seed | 1),
            lease: 0,
            since: 0,
            warm: 0.0,
            ticks: 0.0,
            better: 0.0,
            trials: 0,
            adopted: 0,
            pause: (0.0, 0.0),
            slower: 1.0,
        }
    }

    /// Returns the cost of the copies if copies of at least `from` bytes, per queue, go to the engine.
    fn cost(world: &World, lists: &[Vec<u32>], from: &[u32], warm: f32) -> f32 {
        let (rounds, dearer) = world.warming;
        let warming = 1.0 + if warm < rounds { dearer * (1.0 - warm / rounds) } else { 0.0 };
        let copies =
            lists.iter().zip(from).flat_map(|(lens, from)| lens.iter().map(move |&len| (len, *from)));
        let ticks = copies.map(|(len, from)| match len >= from {
            true => world.engine,
            false => (world.core[0] + world.core[1] * len as f32 / 1024.0) * warming,
        });
        let mixed = from.iter().any(|one| one != &from[0]);
        ticks.sum::<f32>() + if mixed { 32.0 * world.mixed } else { 0.0 }
    }

    fn round(&mut self, world: &World, traffic: Traffic) {
        let lists = traffic(&mut self.dice);
        let from: Vec<u32> = self.queues.iter().map(|queue| queue.from).collect();
        let mut ticks = Self::cost(world, &lists, &from, self.warm);
        self.warm = if from.iter().all(|&from| from == NONE) { self.warm + 1.0 } else { 0.0 };
        let best = [NONE, ALL].map(|from| Self::cost(world, &lists, &[from; 2], f32::MAX));
        self.better += f64::from(self.slower * best[0].min(best[1]));
        ticks *= self.slower * (1.0 + 0.1 * self.dice.noise());
        // An interrupt, with either way.
        if self.dice.next().is_multiple_of(200) {
            ticks += 15_000.0;
            self.better += 15_000.0;
        }
        self.ticks += f64::from(ticks);
        for (queue, lens) in self.queues.iter_mut().zip(&lists) {
            queue.seen = lens.iter().fold(0, |seen, &len| seen | 1 << class(len));
        }
        let half_copies = 2 * lists.iter().map(Vec::len).sum::<usize>() as u64;
        self.since += half_copies;
        if self.lease > 0 {
            self.lease = self.lease.saturating_sub(2);
            return;
        }
        let mut choices: Vec<&mut QueueChoice> = self.queues.iter_mut().collect();
        let since = if self.policy.samples() { std::mem::take(&mut self.since) } else { 0 };
        let engine = choices.iter().any(|choice| choice.from != NONE);
        let moves = choice::moves(&choices);
        match self.policy.round(&Round { half_copies, ticks: ticks as u64, engine, since, moves }) {
            Next::Again => {}
            Next::Lease => self.lease = LEASE,
            Next::Try(next) => {
                choice::apply_trial(&mut choices, next);
                self.trials += 1;
                self.pause = (self.ticks, self.pause.1.max(self.ticks - self.pause.0));
            }
            Next::Back => choice::back(&mut choices),
            Next::Adopt => {
                choices.iter_mut().for_each(|choice| choice.decided = choice.from);
                self.adopted += 1;
                self.lease = LEASE;
            }
        }
    }

    /// Continues for this time of work.
    fn run(&mut self, seconds: f64, world: &World, traffic: Traffic) {
        let end = self.ticks + seconds * tsc::hz() as f64;
        while self.ticks < end {
            self.round(world, traffic);
        }
    }

    /// Returns the achieved fraction of the better way's speed.
    fn ratio(&self) -> f64 {
        self.better / self.ticks
    }
}

/// Returns a world in which the engine's copy costs `ratio` times the core's copy of 1514 bytes.
fn near(ratio: f32) -> World {
    let core = HOT.core[0] + HOT.core[1] * 1514.0 / 1024.0;
    World { engine: core * ratio, ..HOT }
}

#[test]
fn steady_trials_cost_under_one_percent() {
    let worlds = [("hot", HOT, NONE), ("cold", COLD, ALL), ("a cheap engine", near(0.3), ALL)];
    for (name, world, from) in worlds {
        let mut story = Story::new(77);
        story.run(0.5, &world, large);
        let ms = story.pause.1 / tsc::hz() as f64 * 1e3;
        let said = format!("{name}: {:.4}, {} trials, {ms:.1} ms between two", story.ratio(), story.trials);
        assert!(story.ratio() > 0.992 && ms < 30.0, "{said}");
        assert!(story.queues.iter().all(|queue| queue.decided == from), "{said}");
    }
}

#[test]
fn a_change_of_temperature_is_followed() {
    for seed in [1, 20, 300] {
        let mut story = Story::new(seed);
        for flip in 0..6 {
            let (world, from) = if flip % 2 == 0 { (COLD, ALL) } else { (HOT, NONE) };
            story.run(0.1, &world, large);
            let decided = story.queues.iter().map(|queue| queue.decided);
            assert!(decided.clone().all(|decided| decided == from), "{seed}, flip {flip}: {decided:?}");
        }
        assert!(story.ratio() > 0.93, "{seed}: {:.4} of an oracle", story.ratio());
        println!("{seed}: {:.4} of an oracle {} {}", story.ratio(), story.trials, story.adopted);
    }
}

/// The costs of both ways rise by the same factor, and fall again.
#[test]
fn changing_clock_costs_little() {
    let worlds = [("hot", HOT, NONE), ("cold", COLD, ALL), ("a cheap engine", near(0.3), ALL)];
    for (name, world, from) in worlds {
        let mut story = Story::new(9);
        for change in 0..300 {
            story.slower = if change % 2 == 0 { 1.0 } else { 1.7 };
            story.run(0.001, &world, large);
        }
        let said =
            format!("{name}: {:.4}, {} trials, {} changes", story.ratio(), story.trials, story.adopted);
        println!("{said}");
        assert!(story.ratio() > 0.985, "{said}");
        assert!(story.queues.iter().all(|queue| queue.decided == from), "{said}");
    }
}

#[test]
fn lasting_small_difference_is_adopted() {
    for (ratio, from) in [(0.97, ALL), (1.0, NONE), (1.03, NONE), (1.2, NONE)] {
        for seed in [5, 60] {
            let mut story = Story::new(seed);
            story.run(0.25, &near(ratio), large);
            let decided: Vec<u32> = story.queues.iter().map(|queue| queue.decided).collect();
            let said =
                format!("{ratio}, {seed}: {:.4}, {} changes, {decided:?}", story.ratio(), story.adopted);
            println!("{said}");
            assert!(story.ratio() > 0.985, "{said}");
            assert!(ratio == 1.0 || decided == [from; 2], "{said}");
        }
    }
}

#[test]
fn imix_is_split_by_size_class() {
    for (name, world, from) in [("hot", HOT, NONE), ("cold", COLD, 513)] {
        for seed in [7, 80] {
            let mut story = Story::new(seed);
            story.run(0.3, &world, imix);
            let decided: Vec<u32> = story.queues.iter().map(|queue| queue.decided).collect();
            println!("{name}, {seed}: {:.4}, {decided:?}", story.ratio());
            assert!(story.ratio() > 0.985, "{name}, {seed}: {:.4}", story.ratio());
            assert_eq!(decided, [from; 2], "{name}, {seed}");
        }
    }
}

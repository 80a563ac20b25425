//! The policy, told what copies cost.

use super::*;

/// What things cost in a story, in TSC ticks a copy.
#[derive(Clone, Copy, Debug)]
struct World {
    core: f32,
    submit: f32,
    poll: f32,
    reap: f32,
    publish: f32,
}

const HOT: World = World { core: 40.0, submit: 30.0, poll: 8.0, reap: 25.0, publish: 12.0 };
const COLD: World = World { core: 500.0, ..HOT };

fn burst(lens: &[(u32, usize)]) -> Vec<Copy> {
    let copy = |len| Copy { src: std::ptr::null(), dst: std::ptr::null_mut(), len, token: 0 };
    lens.iter().flat_map(|&(len, n)| std::iter::repeat_n(copy(len), n)).collect()
}

/// Lets one burst happen as the mover would; returns the ticks of its copies.
fn play(policy: &mut Policy, list: &[Copy], world: World, in_flight: &mut bool) -> f32 {
    if policy.explore_is_due() {
        try_out(std::iter::once(&mut *policy));
    }
    let wanted = policy.wanted();
    let goes = |copy: &&Copy| wanted >> class(copy.len) & 1 != 0;
    let by_engine: Vec<Copy> = list.iter().filter(goes).copied().collect();
    let by_core: Vec<Copy> = list.iter().filter(|copy| !goes(copy)).copied().collect();
    let mut ticks = 0.0;
    if !by_engine.is_empty() {
        let n = by_engine.len() as f32;
        ticks += n * (world.submit + world.poll + world.reap);
        let (engine, timed) = policy.look(&by_engine);
        policy.took(Way::Engine, &engine, timed.then_some(n * world.submit));
    }
    if !by_core.is_empty() {
        // Twice the bytes, twice the ticks; `world` is for 1024.
        let cost: f32 = by_core.iter().map(|copy| world.core * copy.len as f32 / 1024.0).sum();
        ticks += cost + by_core.len() as f32 * world.publish;
        let (core, timed) = policy.look(&by_core);
        policy.took(Way::Core, &core, timed.then_some(cost));
        if timed && by_engine.is_empty() {
            policy.published(world.publish);
        }
    }
    let core = Made::of(&by_core);
    policy.ended(core.classes | Made::of(&by_engine).classes, Some(&core), *in_flight);
    *in_flight = !by_engine.is_empty();
    if !by_engine.is_empty() {
        policy.polled(world.poll);
        if policy.times_reap(by_engine.len()) {
            policy.reaped(world.reap);
        }
    }
    ticks
}

/// Bursts until the class of 1024 bytes goes `way`, at most `limit`.
fn until(policy: &mut Policy, list: &[Copy], world: World, way: Way, limit: usize) -> Option<usize> {
    let mut in_flight = false;
    (1..=limit).find(|_| {
        play(policy, list, world, &mut in_flight);
        policy.decision(class(1024)).way == way
    })
}

/// 10,000 packets in bursts of 32.
const SOON: usize = 312;

#[test]
fn classes_are_powers_of_two() {
    let classes = [0, 1, 64, 65, 128, 129, 1024, 1526, 65536, 65537, u32::MAX].map(class);
    assert_eq!(classes, [0, 0, 0, 1, 1, 2, 4, 5, 10, 11, 11]);
    assert!((0..CLASSES - 1).all(|c| class(up_to(c)) == c && class(up_to(c) + 1) == c + 1));
}

#[test]
fn it_begins_with_the_core_and_soon_knows_both() {
    let (mut policy, list) = (Policy::new(), burst(&[(1024, 32)]));
    assert_eq!(policy.wanted(), 0);
    assert!(until(&mut policy, &list, COLD, Way::Engine, 32).is_some());
    let decision = policy.decision(class(1024));
    assert_eq!((decision.reason, decision.changes), (Reason::Explored, 1));
    assert_eq!((decision.core_ticks, decision.engine_ticks), (512.0, 63.0 + ENTER));
}

#[test]
fn a_change_of_temperature_is_followed_within_10_000_packets_both_ways() {
    let (mut policy, list) = (Policy::new(), burst(&[(1024, 32)]));
    assert_eq!(until(&mut policy, &list, HOT, Way::Engine, 2000), None);
    for round in 0..20 {
        let there = until(&mut policy, &list, COLD, Way::Engine, SOON);
        assert!(there.is_some(), "round {round}: {:?}", policy.decision(class(1024)));
        // Every moment within a period of exploration is as good for the next change.
        until(&mut policy, &list, COLD, Way::Core, 2000 + 13 * round);
        let back = until(&mut policy, &list, HOT, Way::Core, SOON);
        assert!(back.is_some(), "round {round}: {:?}", policy.decision(class(1024)));
        until(&mut policy, &list, HOT, Way::Engine, 2000 + 17 * round);
    }
}

#[test]
fn a_change_of_the_engine_is_followed_within_10_000_packets_both_ways() {
    let (mut policy, list) = (Policy::new(), burst(&[(1024, 32)]));
    let quick = World { core: 150.0, ..HOT };
    let slow = World { submit: 300.0, poll: 50.0, ..quick };
    for round in 0..20 {
        assert!(until(&mut policy, &list, quick, Way::Engine, SOON).is_some(), "round {round}");
        until(&mut policy, &list, quick, Way::Core, 700 + 13 * round);
        assert!(until(&mut policy, &list, slow, Way::Core, SOON).is_some(), "round {round}");
        until(&mut policy, &list, slow, Way::Engine, 700 + 17 * round);
    }
}

#[test]
fn a_difference_within_the_hysteresis_changes_nothing() {
    let (mut policy, list) = (Policy::new(), burst(&[(1024, 32)]));
    // What an engine's copy costs.
    let near = |ratio: f32| World { core: (63.0 + ENTER) * ratio - HOT.publish, ..HOT };
    assert_eq!(until(&mut policy, &list, near(1.10), Way::Engine, 3000), None);
    assert!(until(&mut policy, &list, near(1.30), Way::Engine, SOON).is_some());
    assert_eq!(until(&mut policy, &list, near(1.0 / 1.10), Way::Core, 3000), None);
    assert!(until(&mut policy, &list, near(1.0 / 1.30), Way::Core, SOON).is_some());
}

#[test]
fn an_interrupt_does_not_change_the_choice_for_long() {
    for (world, way) in [(HOT, Way::Core), (World { core: 120.0, ..HOT }, Way::Engine)] {
        for moment in 0..600 {
            let (mut policy, list) = (Policy::new(), burst(&[(1024, 32)]));
            let mut in_flight = false;
            (0..600 + moment).for_each(|_| _ = play(&mut policy, &list, world, &mut in_flight));
            assert_eq!(policy.decision(class(1024)).way, way);
            let away = 1000.0;
            let late = World {
                core: world.core * away,
                submit: world.submit * away,
                poll: world.poll * away,
                reap: world.reap * away,
                publish: world.publish * away,
            };
            play(&mut policy, &list, late, &mut in_flight);
            let wrong = (0..2000).filter(|_| {
                play(&mut policy, &list, world, &mut in_flight);
                policy.decision(class(1024)).way != way
            });
            assert!(wrong.count() <= SOON, "{way:?} at {moment}: {:?}", policy.decision(class(1024)));
        }
    }
}

#[test]
fn each_size_has_a_choice_of_its_own() {
    let mut policy = Policy::new();
    let list = burst(&[(64, 16), (1526, 16)]);
    let mut in_flight = false;
    (0..1000).for_each(|_| _ = play(&mut policy, &list, COLD, &mut in_flight));
    let [short, long] = [64, 1526].map(|len| policy.decision(class(len)));
    assert_eq!((short.way, long.way), (Way::Core, Way::Engine));
    assert!(short.by_core > 15_000 && long.by_engine > 15_000, "{short:?} {long:?}");
    // Short packets wait behind long ones; that costs them, and is counted.
    assert!(short.held_by_order > 14_000, "{short:?}");
    let alone = COLD.core * 64.0 / 1024.0 + COLD.publish;
    assert!(short.core_ticks > alone + 5.0, "{short:?}: {alone} if they were not held");
}

#[test]
fn waiting_for_order_is_charged_to_the_core() {
    let world = World { core: 700.0, submit: 25.0, poll: 5.0, reap: 60.0, publish: 10.0 };
    let mut in_flight = false;
    let choices = [&[(64, 32)][..], &[(64, 16), (1526, 16)][..]].map(|lens| {
        let (mut policy, list) = (Policy::new(), burst(lens));
        (0..2000).for_each(|_| _ = play(&mut policy, &list, world, &mut in_flight));
        policy.decision(class(64))
    });
    assert_eq!(choices[0].way, Way::Core);
    assert!(choices[1].core_ticks > 1.5 * choices[0].core_ticks, "{choices:?}");
}

#[test]
fn with_buffers_that_turn_it_is_near_an_oracle() {
    let (mut policy, list) = (Policy::new(), burst(&[(1024, 32)]));
    let (mut ticks, mut best, mut in_flight) = (0.0f64, 0.0f64, false);
    let engine = HOT.submit + HOT.poll + HOT.reap;
    for period in 0..20 {
        // A tenth of a second at 10 Mpps.
        for _ in 0..30_000 {
            let world = if period % 2 == 0 { HOT } else { COLD };
            ticks += f64::from(play(&mut policy, &list, world, &mut in_flight));
            best += f64::from(32.0 * engine.min(world.core + world.publish));
        }
    }
    assert!(best / ticks >= 0.93, "{:.3} of an oracle", best / ticks);
}

/// A queue whose copies of 1024 bytes have these costs, and go that way.
fn queue(core: f32, engine: f32, way: Way) -> Policy {
    let mut policy = Policy::new();
    let class = class(1024);
    policy.seen[0] = 1 << class;
    policy.engine = if way == Way::Engine { 1 << class } else { 0 };
    policy.classes[class].costs = [Average(core), Average(engine)];
    (policy.poll, policy.reap, policy.publish) = (Average(1.0), Average(1.0), Average(1.0));
    policy
}

#[test]
fn queues_go_the_same_way_unless_it_matters() {
    let ways = |mut first: Policy, mut second: Policy| {
        try_out([&mut first, &mut second].into_iter());
        [&first, &second].map(|policy| policy.choice(class(1024)))
    };
    // Engine: 8 ticks more for the entry in the reorder ring, and 1 to collect.
    assert_eq!(ways(queue(50.0, 31.0, Way::Core), queue(50.0, 36.0, Way::Engine)), [Way::Engine; 2]);
    assert_eq!(ways(queue(40.0, 41.0, Way::Core), queue(50.0, 36.0, Way::Engine)), [Way::Core; 2]);
    let apart = ways(queue(40.0, 41.0, Way::Core), queue(900.0, 36.0, Way::Engine));
    assert_eq!(apart, [Way::Core, Way::Engine]);
}

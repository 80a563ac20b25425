use super::*;
use offcore_mem::Hugepages;

const TRAFFIC: Traffic = Traffic {
    side: Side::Send,
    segment: 1448,
    connections: 3,
    idle: 2,
    fifo: LARGE_FIFO,
    checksums: true,
    past_caches: false,
    asks: false,
};

#[test]
fn every_byte_arrives_with_each_copier() {
    let pool = Pool::new(4096, 2048, Hugepages::None).unwrap();
    let other = OtherCore::start(None).unwrap();
    for (side, setup, checksums) in [
        (Side::Send, Setup::HELPER, true),
        (Side::Receive, Setup::HELPER, false),
        (Side::Send, Setup::CPU, false),
    ] {
        let traffic = Traffic { side, checksums, ..TRAFFIC };
        let mut link = Link::open(setup, traffic, pool).unwrap();
        for (temperature, chunk) in
            [(Temperature::Hot, 4096), (Temperature::Remote, 2 << 20), (Temperature::Cold, 777)]
        {
            link.set(Load { temperature, chunk });
            let cost = link.window(&other).unwrap();
            let bytes = (WINDOW / chunk).max(1) * chunk;
            let moved = link.moved();
            assert_eq!((moved.segments, moved.bytes), (cost.packets, bytes as u64));
            assert!(cost.packets as usize >= bytes.div_ceil(1448), "{side}: {cost:?}");
            // The far host and both applications have done work, too.
            assert!(cost.core > 0 && cost.guest > 0, "{side}: {cost:?}");
        }
    }
}

#[test]
fn requests_are_answered_one_at_a_time() {
    let pool = Pool::new(4096, 2048, Hugepages::None).unwrap();
    let other = OtherCore::start(None).unwrap();
    for setup in [Setup::CPU, Setup::HELPER] {
        let mut link = Link::open(setup, Traffic { asks: true, ..TRAFFIC }, pool).unwrap();
        for (chunk, requests, segments) in [(1024, 3, 3..=3), (1 << 20, 1, 725..=2000)] {
            link.set(Load { temperature: Temperature::Remote, chunk });
            let cost = link.window(&other).unwrap();
            let moved = link.moved();
            assert_eq!((cost.packets, moved.bytes), (requests, requests * chunk as u64));
            assert!(segments.contains(&moved.segments), "{moved:?}");
        }
    }
}

#[test]
fn a_wrong_byte_is_noticed() {
    let pool = Pool::new(4096, 2048, Hugepages::None).unwrap();
    let other = OtherCore::start(None).unwrap();
    let traffic = Traffic { segment: 512, connections: 1, ..TRAFFIC };
    let mut link = Link::open(Setup::CPU, traffic, pool).unwrap();
    link.window(&other).unwrap();
    lock(&link.shared.streams).skip(0);
    let error = link.window(&other).unwrap_err();
    assert!(format!("{error:#}").contains("wrong bytes"), "{error:#}");
}

#[test]
fn link_copies_use_no_streaming_stores() {
    let pool = Pool::new(4096, 2048, Hugepages::None).unwrap();
    let other = OtherCore::start(None).unwrap();
    for side in Side::ALL {
        let mut link = Link::open(Setup::CPU, Traffic { side, ..TRAFFIC }, pool).unwrap();
        for temperature in [Temperature::Remote, Temperature::Cold] {
            link.set(Load { temperature, chunk: 64 << 10 });
            assert_eq!((link.moved(), link.near.routine_windows()), (Moved::default(), 0));
            // The stage clock samples few rounds. On a busy machine many windows may pass before a sample contains a
            // copy.
            let is_sampled = (0..10_000).any(|_| {
                link.window(&other).unwrap();
                // The number of rounds of a window may divide the sampling period. Then each sample is of the same
                // round.
                link.near.worker.round();
                link.copy_share().is_some_and(|share| share > 0.0 && share < 1.0)
            });
            assert!(is_sampled, "{side}: {:?}", link.copy_share());
            let past = |routine: String| routine.contains("non-temporal") || routine.contains("direct");
            assert!(!link.copy_routine().is_none_or(past), "{side}: {:?}", link.copy_routine());
            let far = &lock(&link.far).worker.mover;
            let routines = far.queues().filter_map(|queue| far.routine(queue)).map(|r| r.name().into());
            assert!(!routines.into_iter().any(past), "{side}: the far host stores past its caches");
        }
    }
}

#[test]
fn retransmissions_are_counted() {
    let pool = Pool::new(4096, 2048, Hugepages::None).unwrap();
    let other = OtherCore::start(None).unwrap();
    let mut link = Link::open(Setup::CPU, TRAFFIC, pool).unwrap();
    link.set(Load { temperature: Temperature::Remote, chunk: 64 << 10 });
    link.wire.drop_next();
    let cost = link.window(&other).unwrap();
    let moved = link.moved();
    assert_eq!((moved.segments, moved.bytes), (cost.packets, WINDOW as u64));
    assert!(moved.again > 0, "{moved:?}");
}

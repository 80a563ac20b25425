use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

const AGEING: Duration = Duration::from_secs(32);

fn of(vlan: u16, n: u32) -> Station {
    let [a, b, c, d] = n.to_be_bytes();
    Station::new(vlan, MacAddr([2, 0, a, b, c, d]))
}

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

#[test]
fn station_is_where_last_seen() {
    let fdb = Fdb::new(100, MAX_PORTS);
    assert_eq!(fdb.find(of(1, 1), 0), None);
    assert_eq!(fdb.learn(of(1, 1), 63, 0), Learned::New);
    assert_eq!(fdb.learn(of(1, 1), 63, 0), Learned::Known);
    assert_eq!(fdb.find(of(1, 1), 0), Some(63));
    assert_eq!(fdb.find(of(2, 1), 0), None, "the same address in another VLAN is another station");
    assert_eq!(fdb.learn(of(1, 1), 0, 0), Learned::Moved);
    assert_eq!((fdb.find(of(1, 1), 0), fdb.addresses()), (Some(0), 1));
}

#[test]
fn silent_station_ages_out() {
    let (fdb, mut clock) = (Fdb::new(100, MAX_PORTS), Clock::new(AGEING));
    fdb.learn(of(0, 1), 1, 0);
    fdb.learn(of(0, 2), 2, 0);
    for second in 1..=500 {
        clock.turn(&fdb, at(second));
        let now = fdb.now();
        assert_eq!(fdb.find(of(0, 1), now), (second <= 32).then_some(1), "after {second} s");
        assert_eq!(fdb.learn(of(0, 2), 2, now), Learned::Known);
    }
    assert_eq!((fdb.addresses(), fdb.aged(1), fdb.aged(2)), (1, 1, 0));
}

#[test]
fn clock_gap_ages_out_all_stations() {
    for gap in [33, 95, 96, 127, 128, 129, 1 << 40] {
        let (fdb, mut clock) = (Fdb::new(100, MAX_PORTS), Clock::new(AGEING));
        clock.turn(&fdb, at(5));
        fdb.learn(of(0, 1), 1, fdb.now());
        clock.turn(&fdb, at(5 + gap));
        assert_eq!((fdb.find(of(0, 1), fdb.now()), fdb.addresses()), (None, 0), "{gap} s later");
    }
}

#[test]
fn full_fdb_learns_nothing() {
    let (fdb, mut clock) = (Fdb::new(50, 1), Clock::new(AGEING));
    let learned: Vec<Learned> = (0..1000).map(|n| fdb.learn(of(0, n), 1, 0)).collect();
    assert_eq!(learned.iter().filter(|&&one| one == Learned::New).count(), 50);
    assert!(learned.iter().all(|one| matches!(one, Learned::New | Learned::Full)));
    assert_eq!(fdb.addresses(), 50);
    let known = (0..1000).filter(|&n| fdb.find(of(0, n), 0).is_some());
    assert_eq!(known.count(), 50);
    // Aged stations make room.
    clock.turn(&fdb, at(20));
    clock.turn(&fdb, at(50));
    assert_eq!(fdb.learn(of(0, 999), 1, fdb.now()), Learned::New);
}

#[test]
fn port_keeps_to_its_fdb_share() {
    let (fdb, mut clock) = (Fdb::new(800, 4), Clock::new(AGEING));
    let learn = |port: usize, ns: std::ops::Range<u32>| {
        ns.filter(|n| fdb.learn(of(port as u16, *n), port, fdb.now()) == Learned::New).count()
    };
    assert_eq!(learn(0, 0..5000), 500, "its part, and what is for all");
    assert_eq!([learn(1, 0..500), learn(2, 0..50), learn(3, 0..500)], [100, 50, 100]);
    assert_eq!(fdb.addresses(), 750);
    // A station that moves to a port with a full share is forgotten: its packets are flooded.
    assert_eq!(fdb.learn(of(2, 7), 1, 0), Learned::Full);
    assert_eq!((fdb.find(of(2, 7), 0), fdb.addresses()), (None, 749));
    assert_eq!(fdb.learn(of(1, 0), 2, 0), Learned::Moved);
    assert_eq!(learn(1, 900..950), 1, "there is room for one in the other one's place");
    clock.turn(&fdb, at(100));
    assert_eq!((fdb.addresses(), learn(3, 0..5000)), (0, 500));
}

#[test]
fn fdb_fills_almost_completely() {
    let fdb = Fdb::new(16384, 1);
    let full = (0..16384).filter(|&n| fdb.learn(of(n as u16 % 7, n), 5, 0) == Learned::Full).count();
    assert!(full < 16384 / 200, "{full} of 16384 stations found their bucket full");
}

/// Two workers learn the same stations at the same time, each behind its own port. A lookup always finds a port that
/// was learned. Afterwards, each station is still found.
#[test]
fn concurrent_learning_is_safe() {
    const STATIONS: u32 = 300;
    let fdb = Fdb::new(1000, MAX_PORTS);
    std::thread::scope(|scope| {
        for port in [3, 60] {
            let fdb = &fdb;
            scope.spawn(move || {
                for round in 0..300 {
                    for n in 0..STATIONS {
                        // The port depends on the VLAN: an entry that matched another station would give a wrong port.
                        let vlan = (n % 2) as u16;
                        fdb.learn(of(vlan, n), port + vlan as usize, round / 100);
                        let found = fdb.find(of(vlan, n), round / 100);
                        assert!(found.is_none_or(|p| [3, 60].contains(&(p - vlan as usize))), "{found:?}");
                    }
                }
            });
        }
    });
    for n in 0..STATIONS {
        let vlan = (n % 2) as u16;
        let found = fdb.find(of(vlan, n), 3).unwrap();
        assert!([3, 60].contains(&(found - vlan as usize)));
        assert_eq!(fdb.find(of(1 - vlan, n), 3), None);
    }
    assert!((STATIONS as usize..=2 * STATIONS as usize).contains(&fdb.addresses()));
}

proptest! {
    #[test]
    fn station_hash_is_injective(a in 0..=STATION_MASK, b in 0..=STATION_MASK, near in 0..64u32) {
        for b in [b, a ^ 1 << (near % STATION)] {
            prop_assert_eq!(mix(a) == mix(b), a == b);
        }
    }

    /// Compares the database with a map. It has room for all stations, and the clock advances in random steps.
    #[test]
    fn fdb_matches_ageing_map(
        steps in proptest::collection::vec((0..4u16, 0..20u32, 0..64usize, 0..20u64), 1..200)
    ) {
        let (fdb, mut clock) = (Fdb::new(1000, MAX_PORTS), Clock::new(AGEING));
        let mut model: HashMap<Station, (usize, u64)> = HashMap::new();
        let mut seconds = 0;
        for (vlan, n, port, pause) in steps {
            // Most pauses are zero.
            seconds += pause.saturating_sub(15) * 9;
            clock.turn(&fdb, at(seconds));
            let now = fdb.now();
            model.retain(|_, (_, seen)| seconds - *seen <= 32);
            let station = of(vlan, n);
            let expected = match model.insert(station, (port, seconds)) {
                None => Learned::New,
                Some((before, _)) if before == port => Learned::Known,
                Some(_) => Learned::Moved,
            };
            prop_assert_eq!(fdb.learn(station, port, now), expected);
            for vlan in 0..4 {
                for n in 0..20 {
                    let one = of(vlan, n);
                    prop_assert_eq!(fdb.find(one, now), model.get(&one).map(|(port, _)| *port));
                }
            }
        }
    }
}

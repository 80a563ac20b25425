//! The lanes of a core-cost measurement, without a clock: that every packet arrives, as often copied as it should be.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use offcore_bench::copier::{Copier, Setup};
use offcore_bench::core_cost::Lane;
use offcore_bench::lockstep::OtherCore;
use offcore_bench::temperature::Temperature;
use offcore_bench::workload::{Ring, Route, Workload};
use offcore_dma::Mode;
use offcore_mem::{Hugepages, Pool};

const TURNS: usize = 20;

fn workloads(frame: usize) -> Vec<Workload> {
    let mut all = Vec::new();
    for route in [Route::Loop, Route::GuestToGuest] {
        for ring in Ring::ALL {
            let with = |temperature| Workload { route, ring, temperature, frame, one_copy: true };
            all.extend([Temperature::Hot, Temperature::Remote].map(with));
        }
    }
    all
}

#[test]
fn every_packet_arrives_whoever_copies() {
    let other = OtherCore::start(None).unwrap();
    let pool = Pool::new(4096, 2048, Hugepages::None).unwrap();
    for workload in workloads(1518) {
        for setup in Setup::combine(&[Mode::Cpu, Mode::Offload], &Copier::ALL) {
            let mut lane =
                Lane::new(&workload, (setup.mode, setup.open().unwrap()), pool, Hugepages::None).unwrap();
            for _ in 0..TURNS {
                lane.turn(&other).unwrap_or_else(|error| panic!("{workload}, {setup}: {error:#}"));
            }
            let seen = lane.seen();
            let sent = (TURNS * workload.temperature.window()) as u64;
            assert_eq!((seen.sent, seen.received, seen.verified), (sent, sent, sent), "{workload}, {setup}");
            let copies = if workload.route == Route::GuestToGuest { 1.0 } else { 2.0 };
            assert_eq!(lane.copies(), copies, "{workload}, {setup}: {} bytes", lane.copied_bytes());
        }
    }
}

#[test]
fn two_copies_can_be_asked_for() {
    let other = OtherCore::start(None).unwrap();
    let pool = Pool::new(4096, 2048, Hugepages::None).unwrap();
    for workload in workloads(1024) {
        let workload = Workload { one_copy: false, ..workload };
        let mut lane = Lane::new(&workload, (Mode::Cpu, None), pool, Hugepages::None).unwrap();
        for _ in 0..TURNS {
            lane.turn(&other).unwrap();
        }
        assert_eq!(lane.copies(), 2.0, "{workload}: {} bytes", lane.copied_bytes());
    }
}

#[test]
fn a_copier_beside_the_core_disturbs_no_packet() {
    let other = OtherCore::start(None).unwrap();
    let pool = Pool::new(4096, 2048, Hugepages::None).unwrap();
    for workload in workloads(512) {
        let lane = Lane::new(&workload, (Mode::Cpu, None), pool, Hugepages::None).unwrap();
        assert_eq!(lane.background_copies(), None);
        let mut lane = lane.with_background();
        for _ in 0..TURNS {
            lane.turn(&other).unwrap();
        }
        let seen = lane.seen();
        assert_eq!((seen.received, seen.verified), (seen.sent, seen.sent));
        // As many as the core made, and more when the core was taken away; none at all is a copier that does nothing.
        assert!(lane.background_copies().unwrap() > 0.0, "{workload}");
    }
}

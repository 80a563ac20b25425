//! Tests the variants of a core-cost measurement without timing: every packet arrives and is copied the expected number
//! of times.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::rc::Rc;
use std::time::{Duration, Instant};

use offcore_bench::alternate::Subject;
use offcore_bench::copier::{Copier, Setup};
use offcore_bench::core_cost::OwnVariant;
use offcore_bench::lockstep::OtherCore;
use offcore_bench::memory::{Need, RunMemory, Testbed};
use offcore_bench::temperature::Temperature;
use offcore_bench::workload::{GuestKind, Ring, Route, Workload};
use offcore_dma::Mode;
use offcore_mem::Hugepages;

const TURNS: usize = 20;
/// If the machine preempts the engine's core for 100 ms, two guests use packet buffers for a second.
const LONGEST: Duration = Duration::from_secs(30);

fn workloads(frame: usize) -> Vec<Workload> {
    let mut all = Vec::new();
    for route in [Route::Loop, Route::GuestToGuest] {
        for ring in Ring::ALL {
            for guest in GuestKind::ALL {
                let with =
                    |temperature| Workload { route, ring, guest, ..Workload::table8(temperature, frame) };
                all.extend([Temperature::Hot, Temperature::Remote].map(with));
            }
        }
    }
    all
}

/// Returns memory for variants of either route.
fn memory() -> impl Fn(Route) -> Rc<RunMemory> {
    let new =
        |route| Rc::new(RunMemory::new(Need::of(route, &[Temperature::Remote]), Hugepages::None).unwrap());
    let both = [Route::Loop, Route::GuestToGuest].map(|route| (route, new(route)));
    move |route| Rc::clone(&both.iter().find(|(of, _)| *of == route).unwrap().1)
}

/// Runs one more window and returns the number of copies per packet.
fn window(variant: &mut OwnVariant, other: &OtherCore) -> u64 {
    let bytes = |variant: &OwnVariant| variant.copied_bytes() * variant.seen().received as f64;
    let (received, copied) = (variant.seen().received, bytes(variant));
    variant.window(other).unwrap();
    let packet = (1518 + 12) * (variant.seen().received - received);
    ((bytes(variant) - copied) / packet as f64).round() as u64
}

#[test]
fn every_packet_arrives_with_each_copier() {
    let other = OtherCore::start(None).unwrap();
    let memory = memory();
    for workload in workloads(1518) {
        let bed = Testbed::new(&memory(workload.route), &workload).unwrap();
        for setup in Setup::combine(&[Mode::Cpu, Mode::Offload], &Copier::ALL) {
            let mut variant = OwnVariant::new(&bed, setup.mode, setup.open().unwrap()).unwrap();
            let copies = if workload.route == Route::GuestToGuest { 1 } else { 2 };
            let start = Instant::now();
            let (mut turns, mut fewest) = (0, u64::MAX);
            while turns < TURNS || (fewest != copies && start.elapsed() < LONGEST) {
                fewest = fewest.min(window(&mut variant, &other));
                turns += 1;
            }
            let seen = variant.seen();
            let sent = (turns * workload.temperature.window()) as u64;
            assert_eq!((seen.sent, seen.received, seen.verified), (sent, sent, sent), "{workload}, {setup}");
            assert_eq!(fewest, copies, "{workload}, {setup}: {} bytes", variant.copied_bytes());
        }
    }
}

#[test]
fn two_copies_can_be_forced() {
    let other = OtherCore::start(None).unwrap();
    let memory = memory();
    for workload in workloads(1024) {
        let workload = Workload { one_copy: false, ..workload };
        let bed = Testbed::new(&memory(workload.route), &workload).unwrap();
        let mut variant = OwnVariant::new(&bed, Mode::Cpu, None).unwrap();
        for _ in 0..TURNS {
            variant.window(&other).unwrap();
        }
        assert_eq!(variant.copies(), 2.0, "{workload}: {} bytes", variant.copied_bytes());
    }
}

#[test]
fn copier_disturbs_no_packet() {
    let other = OtherCore::start(None).unwrap();
    let memory = memory();
    for workload in workloads(512) {
        let bed = Testbed::new(&memory(workload.route), &workload).unwrap();
        let variant = OwnVariant::new(&bed, Mode::Cpu, None).unwrap();
        assert_eq!(variant.background_copies(), None);
        let mut variant = variant.with_background();
        for _ in 0..TURNS {
            variant.window(&other).unwrap();
        }
        let seen = variant.seen();
        assert_eq!((seen.received, seen.verified), (seen.sent, seen.sent));
        // Usually the same number as the core, and more if the core was preempted. Zero would mean that the copier does
        // not work.
        assert!(variant.background_copies().unwrap() > 0.0, "{workload}");
    }
}

//! Tests librte_vhost in the core-cost harness: every packet arrives, from a guest to itself and from one guest to
//! another.
#![cfg(feature = "dpdk")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::rc::Rc;

use offcore_bench::alternate::Subject;
use offcore_bench::lockstep::OtherCore;
use offcore_bench::memory::{Need, RunMemory, Testbed};
use offcore_bench::peer::dpdk_lib::{DpdkConfig, DpdkLib, Pages};
use offcore_bench::peer::variant::PeerVariant;
use offcore_bench::temperature::Temperature;
use offcore_bench::workload::{GuestKind, Ring, Route, Workload};
use offcore_mem::Hugepages;
use offcore_stats::lcore;

#[test]
fn every_route_and_format_delivers() {
    let config = DpdkConfig { pages: Pages::Ordinary, lcore: lcore::available().unwrap()[0], mbufs: 4096 };
    let dpdk = Rc::new(DpdkLib::open(&config).unwrap());
    let other = OtherCore::start(None).unwrap();
    for route in [Route::Loop, Route::GuestToGuest] {
        let memory = RunMemory::new(Need::of(route, &[Temperature::Remote]), Hugepages::None).unwrap();
        for ring in Ring::ALL {
            for (temperature, guest, frame) in [
                (Temperature::Hot, GuestKind::Simple, 64),
                (Temperature::Remote, GuestKind::Simple, 1518),
                (Temperature::Remote, GuestKind::Linux, 64),
                (Temperature::Remote, GuestKind::Linux, 1518),
            ] {
                let workload = Workload { route, ring, guest, ..Workload::table8(temperature, frame) };
                let bed = Testbed::new(&memory, &workload).unwrap();
                let mut variant = PeerVariant::new(&dpdk, &bed).unwrap();
                for _ in 0..20 {
                    variant.window(&other).unwrap_or_else(|error| panic!("{workload}: {error:#}"));
                }
                let seen = variant.seen();
                let sent = 20 * temperature.window() as u64;
                assert_eq!((seen.sent, seen.received, seen.verified), (sent, sent, sent), "{workload}");
            }
        }
    }
}

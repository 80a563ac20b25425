//! The conformance suite on every engine of this crate: one test for each engine and check.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::cell::RefCell;

use offcore_dma::channel::{Channel, Device};
use offcore_dma::conformance::{CHECKS, Check};
use offcore_dma::core::CoreDevice;
use offcore_dma::cpu::CpuDevice;
use offcore_dma::fault::{Faults, FaultyChannel};

/// Makes a module with a test for each named check, which hands the check to `$run`.
macro_rules! suite {
    ($engine:ident, $run:expr, [$($check:ident),* $(,)?]) => {
        mod $engine {
            $(
                #[test]
                fn $check() {
                    let run: fn(super::Check) = $run;
                    run(super::named(stringify!($check)));
                }
            )*

            #[test]
            fn every_check_is_run() {
                let here = [$(stringify!($check)),*];
                assert!(super::CHECKS.iter().map(|(name, _)| *name).eq(here), "the lists of checks differ");
            }
        }
    };
}

macro_rules! suites {
    ($($engine:ident => $run:expr),* $(,)?) => {
        $(
            suite!($engine, $run, [
                every_length_at_odd_offsets,
                every_alignment,
                a_full_ring_takes_no_more,
                rings_wrap_in_bursts_of_every_length,
                each_token_comes_back_once,
                order_is_kept_or_declared_open,
                polls_add_what_fits,
                channels_do_not_mix,
                ring_sizes_are_as_asked,
                too_long_is_refused,
                statistics_are_exact,
                after_a_reset_nothing_lands,
                after_a_drop_nothing_lands,
                a_channel_moves_to_another_thread,
            ]);
        )*
    };
}

suites! {
    cpu => super::on_cpu,
    core_stepped => super::on_stepped_core,
    core_threaded => super::on_core_thread,
    faulty_order => super::on_faulty_order,
}

fn named(name: &str) -> Check {
    CHECKS.iter().find(|(n, _)| *n == name).map(|(_, check)| *check).unwrap()
}

fn on_cpu(check: Check) {
    check(&|size| CpuDevice.open_channel(size).unwrap(), &mut || ());
}

fn on_stepped_core(check: Check) {
    let (device, stepper) = CoreDevice::stepped();
    let stepper = RefCell::new(stepper);
    check(&|size| device.open_channel(size).unwrap(), &mut || {
        stepper.borrow_mut().step();
    });
}

fn on_core_thread(check: Check) {
    let lcore = *offcore_stats::lcore::available().unwrap().last().unwrap();
    let device = CoreDevice::start(lcore).unwrap();
    check(&|size| device.open_channel(size).unwrap(), &mut || ());
}

/// Delays and any order, as a device with several engines has them, but no errors.
fn on_faulty_order(check: Check) {
    let faults =
        Faults { seed: 1, delay: 300, delay_polls: 7, reorder: 500, reset_calls: 3, ..Faults::default() };
    let (device, stepper) = CoreDevice::stepped();
    let stepper = RefCell::new(stepper);
    let open = |size| -> Box<dyn Channel> {
        Box::new(FaultyChannel::new(device.open_channel(size).unwrap(), faults))
    };
    check(&open, &mut || {
        stepper.borrow_mut().step();
    });
}

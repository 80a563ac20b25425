//! The conformance suite on every engine of this crate: one test per engine and check.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::cell::RefCell;

use offcore_dma::channel::{Channel, CopyDevice};
use offcore_dma::conformance::Check;
use offcore_dma::core::CoreDevice;
use offcore_dma::cpu::CpuDevice;
use offcore_dma::fault::{Faults, FaultyChannel};

offcore_dma::conformance_suite! {
    cpu => super::on_cpu,
    core_stepped => super::on_stepped_core,
    core_threaded => super::on_core_thread,
    faulty_order => super::on_faulty_order,
}

fn on_cpu(check: Check) {
    (check.run)(&|size| CpuDevice.open_channel(size).unwrap(), &mut || ());
}

fn on_stepped_core(check: Check) {
    let (device, stepper) = CoreDevice::stepped();
    let stepper = RefCell::new(stepper);
    (check.run)(&|size| device.open_channel(size).unwrap(), &mut || {
        stepper.borrow_mut().step();
    });
}

fn on_core_thread(check: Check) {
    let lcore = *offcore_stats::lcore::available().unwrap().last().unwrap();
    let device = CoreDevice::start(lcore).unwrap();
    (check.run)(&|size| device.open_channel(size).unwrap(), &mut || ());
}

/// Runs a check with delays and arbitrary order, as with a device with several engines, but without errors.
fn on_faulty_order(check: Check) {
    let faults =
        Faults { seed: 1, delay: 300, delay_polls: 7, reorder: 500, reset_calls: 3, ..Faults::default() };
    let (device, stepper) = CoreDevice::stepped();
    let stepper = RefCell::new(stepper);
    let open = |size| -> Box<dyn Channel> {
        Box::new(FaultyChannel::new(device.open_channel(size).unwrap(), faults))
    };
    (check.run)(&open, &mut || {
        stepper.borrow_mut().step();
    });
}

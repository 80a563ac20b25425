//! The engine conformance suite on the simulated device: one test per arrangement and check. The arrangements are
//! dedicated and shared queues, one and four DSA engines, batches and single descriptors, stepped devices and devices
//! run by a thread.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::cell::RefCell;
use std::sync::{Mutex, PoisonError};

use offcore_dma::channel::{Channel, CopyDevice};
use offcore_dma::conformance::Check;
use offcore_dsa::config::{DeviceCapabilities, OneLine, one_line};
use offcore_dsa::driver::{DsaDevice, Options};
use offcore_dsa::sim::{Profile, SimDevice, SimOptions};
use offcore_dsa::wq::WqMode::{self, Dedicated, Shared};

offcore_dma::conformance_suite! {
    stepped_dedicated_batch_1 => |check| super::run(super::stepped(super::Dedicated, true, 1), check),
    stepped_dedicated_batch_4 => |check| super::run(super::stepped(super::Dedicated, true, 4), check),
    stepped_dedicated_direct_1 => |check| super::run(super::stepped(super::Dedicated, false, 1), check),
    stepped_dedicated_direct_4 => |check| super::run(super::stepped(super::Dedicated, false, 4), check),
    stepped_shared_batch_1 => |check| super::run(super::stepped(super::Shared, true, 1), check),
    stepped_shared_batch_4 => |check| super::run(super::stepped(super::Shared, true, 4), check),
    stepped_shared_direct_1 => |check| super::run(super::stepped(super::Shared, false, 1), check),
    stepped_shared_direct_4 => |check| super::run(super::stepped(super::Shared, false, 4), check),
    threaded_dedicated_batch_4 => |check| super::run(super::threaded(super::Dedicated, true, 4), check),
    threaded_dedicated_direct_1 => |check| super::run(super::threaded(super::Dedicated, false, 1), check),
    threaded_shared_batch_1 => |check| super::run(super::threaded(super::Shared, true, 1), check),
    threaded_shared_direct_4 => |check| super::run(super::threaded(super::Shared, false, 4), check),
}

/// The layout of the device and the way in which it runs.
struct Arrangement {
    mode: WqMode,
    batch: bool,
    engines: usize,
    threaded: bool,
}

fn stepped(mode: WqMode, batch: bool, engines: usize) -> Arrangement {
    Arrangement { mode, batch, engines, threaded: false }
}

fn threaded(mode: WqMode, batch: bool, engines: usize) -> Arrangement {
    Arrangement { threaded: true, ..stepped(mode, batch, engines) }
}

/// Number of simulator events between two polls.
const STEPS: usize = 8;
/// Helper threads spin. Only one runs at a time, so that the threaded arrangements take only some seconds.
static THREAD: Mutex<()> = Mutex::new(());

fn run(arrangement: Arrangement, check: Check) {
    let Arrangement { mode, batch, engines, threaded } = arrangement;
    // A dedicated queue has a single channel, and some checks open several.
    let wqs = if mode == Dedicated { 8 } else { 1 };
    let device = "dsa-sim0".to_owned();
    let layout = one_line(&OneLine { device, wqs, mode, engines }, &DeviceCapabilities::spr()).unwrap();
    let options = SimOptions { profile: Profile::Layout(Box::new(layout)), ..SimOptions::default() };
    if threaded {
        let _one_at_a_time = THREAD.lock().unwrap_or_else(PoisonError::into_inner);
        let lcore = *offcore_stats::lcore::available().unwrap().last().unwrap();
        let device = SimDevice::start("dsa-sim0", options, lcore).unwrap();
        let queues = queues(&device, batch);
        (check.run)(&|size| open(&queues, size), &mut || ());
    } else {
        let (device, engine) = SimDevice::stepped("dsa-sim0", options).unwrap();
        let engine = RefCell::new(engine);
        let queues = queues(&device, batch);
        (check.run)(&|size| open(&queues, size), &mut || {
            for _ in 0..STEPS {
                engine.borrow_mut().step();
            }
        });
    }
}

fn queues(device: &SimDevice, batch: bool) -> Vec<DsaDevice> {
    let options = Options { batch, ..Options::default() };
    let queues = device.work_queues();
    queues.iter().map(|wq| DsaDevice::simulated(device, &wq.name, options.clone()).unwrap()).collect()
}

/// Opens a channel of the first queue that accepts another one.
fn open(queues: &[DsaDevice], size: usize) -> Box<dyn Channel> {
    let mut refused = None;
    for queue in queues {
        match queue.open_channel(size) {
            Ok(channel) => {
                let capabilities = channel.info().capabilities;
                assert!(capabilities.simulated && !capabilities.synchronous);
                return channel;
            }
            Err(error) => refused = Some(error),
        }
    }
    panic!("no work queue has a channel left: {refused:?}");
}

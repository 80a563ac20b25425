//! What it costs a core to hand a copy over and to learn that it is done: bursts of 32 through `core:1`, reorder ring
//! and region references included.

use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Result, ensure};
use offcore_dma::Device;
use offcore_dma::core::CoreDevice;
use offcore_dma::cost::{BURST, SubmitReap};
use offcore_stats::tsc;

use crate::lockstep::OtherCore;
use crate::row::Row;
use crate::sample::{ClockCheck, Spread};

/// Operations that the channel holds.
const CHANNEL: usize = 1024;
/// Bursts that are not counted.
const WARM_UP: usize = 200;

/// Measures `bursts` bursts of copies of `len` bytes.
///
/// # Errors
/// When a copy is not reported.
pub fn run(len: u32, bursts: usize, other: &OtherCore) -> Result<Row> {
    let (device, stepper) = CoreDevice::stepped();
    let stepper = Arc::new(Mutex::new(stepper));
    let mut subject = SubmitReap::new(device.open_channel(CHANNEL)?, len);
    let mut clock = ClockCheck::new();
    let (mut samples, mut rejected) = (Vec::new(), 0);
    for round in 0..WARM_UP + bursts {
        let steady = round % 64 != 0 || clock.holds();
        let submitted = subject.submit();
        let stepper = Arc::clone(&stepper);
        other.run(move || {
            let mut stepper = stepper.lock().unwrap_or_else(PoisonError::into_inner);
            while stepper.step() > 0 {}
            Ok(())
        })?;
        let (reaped, copies) = subject.reap();
        ensure!(copies == BURST, "{copies} of {BURST} copies were reported");
        if round >= WARM_UP && steady {
            samples.push((submitted + reaped) as f64 / BURST as f64);
        } else {
            rejected += usize::from(!steady);
        }
    }
    let mut row = Row {
        bench: "vhost",
        case: "submit_reap".into(),
        arrangement: "core-cost",
        frame: len as usize,
        mode: "offload".into(),
        engine: "core:1".into(),
        ring: "none",
        burst: BURST,
        temperature: "remote".into(),
        window: BURST,
        rejected,
        ..Row::default()
    };
    row.set_cycles(Spread::of(&samples), tsc::hz());
    row.metric = "submit_and_reap";
    row.unit = "tsc_cycles_per_copy";
    row.received = (samples.len() * BURST) as u64;
    row.verified = row.received;
    Ok(row)
}

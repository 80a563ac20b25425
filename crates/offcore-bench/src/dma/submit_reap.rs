//! Core cost of submitting and reaping a copy: bursts of 32 copies through an engine's channel, including reorder ring
//! and region references.

use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use offcore_dma::Mode;
use offcore_dma::cost::{BURST, SubmitReap};

use crate::method::copier::{Copier, Setup};
use crate::method::lockstep::OtherCore;
use crate::report::row::{Counts, Row};
use crate::report::sample::ClockCheck;

/// Number of uncounted bursts.
const WARM_UP: usize = 200;

/// Measures `bursts` bursts of copies of `len` bytes through `copier`, which must not be the core.
///
/// # Errors
/// If the engine cannot be opened, or a copy is not reported.
pub fn run(copier: Copier, len: u32, bursts: usize, other: &OtherCore) -> Result<Row> {
    let mut engine = copier.open()?.context("submitting and reaping needs an engine")?;
    let channel = engine.take_channel().context("the engine has a channel")?;
    let engine = Arc::new(Mutex::new(engine));
    let mut subject = SubmitReap::new(channel, len);
    let mut clock = ClockCheck::new();
    let (mut samples, mut submits, mut reaps, mut rejected) = (Vec::new(), Vec::new(), Vec::new(), 0);
    for round in 0..WARM_UP + bursts {
        let steady = round % 64 != 0 || clock.holds();
        let engine = Arc::clone(&engine);
        let run = move || {
            engine.lock().unwrap_or_else(PoisonError::into_inner).run();
        };
        let (submitted, reaped) = burst(&mut subject, round as u64, run, other)?;
        if round >= WARM_UP && steady {
            samples.push((submitted + reaped) as f64 / BURST as f64);
            submits.push(submitted as f64 / BURST as f64);
            reaps.push(reaped as f64 / BURST as f64);
        } else {
            rejected += usize::from(!steady);
        }
    }
    let mut row = Row::new("vhost", "submit_reap", "core-cost");
    Setup { mode: Mode::Offload, copier }.describe(&mut row);
    (row.head.frame, row.head.burst, row.head.window) = (len as usize, BURST, BURST);
    row.head.temperature = "remote".into();
    row.set_submit_and_reap(&samples, [&submits, &reaps]);
    (row.clock.rejected, row.counts) = (rejected, Counts::all_of((samples.len() * BURST) as u64));
    Ok(row)
}

/// Submits burst `number`, makes the copies with `engine`, reaps them, and compares every byte. Returns the TSC ticks
/// of submission and reaping. The other core runs the untimed parts.
fn burst(
    subject: &mut SubmitReap,
    number: u64,
    engine: impl FnOnce() + Send + 'static,
    other: &OtherCore,
) -> Result<(u64, u64)> {
    let contents = subject.contents();
    other.run(move || {
        contents.write(number);
        Ok(())
    })?;
    let submitted = subject.submit();
    other.run(move || {
        engine();
        Ok(())
    })?;
    let (reaped, copies) = subject.reap();
    ensure!(copies == BURST, "{copies} of {BURST} copies were reported");
    let contents = subject.contents();
    other.run(move || {
        let arrived = contents.arrived(number);
        ensure!(arrived == BURST, "{arrived} of {BURST} copies arrived as they were sent");
        Ok(())
    })?;
    Ok((submitted, reaped))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::golden;
    use offcore_dma::CopyDevice;
    use offcore_dma::core::CoreDevice;

    #[test]
    fn rows_have_both_parts() {
        let row = run(Copier::Helper, 64, 1, &OtherCore::start(None).unwrap()).unwrap();
        golden::check("vhost, submit-reap", &row);
    }

    #[test]
    fn copies_of_other_bytes_are_noticed() {
        let (device, mut stepper) = CoreDevice::stepped();
        let mut subject = SubmitReap::new(device.open_channel(64).unwrap(), 100);
        let other = OtherCore::start(None).unwrap();
        let contents = subject.contents();
        let spoilt = move || {
            contents.write(1);
            while stepper.step() > 0 {}
        };
        let error = burst(&mut subject, 0, spoilt, &other).unwrap_err().to_string();
        assert!(error.contains("0 of 32 copies arrived"), "{error}");
    }
}

//! What it costs a core to hand a copy over and to learn that it is done: bursts of 32 through an engine's channel,
//! reorder ring and region references included.

use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use offcore_dma::cost::{BURST, SubmitReap};
use offcore_stats::tsc;

use crate::copier::Copier;
use crate::lockstep::OtherCore;
use crate::row::Row;
use crate::sample::{ClockCheck, Spread};

/// Bursts that are not counted.
const WARM_UP: usize = 200;

/// Measures `bursts` bursts of copies of `len` bytes through `copier`, which is not the core.
///
/// # Errors
/// When the engine cannot be had, or a copy is not reported.
pub fn run(copier: Copier, len: u32, bursts: usize, other: &OtherCore) -> Result<Row> {
    let mut engine = copier.open()?.context("submitting and reaping needs an engine")?;
    let channel = engine.take_channel().context("the engine has a channel")?;
    let engine = Arc::new(Mutex::new(engine));
    let mut subject = SubmitReap::new(channel, len);
    let mut clock = ClockCheck::new();
    let (mut samples, mut submits, mut reaps, mut rejected) = (Vec::new(), Vec::new(), Vec::new(), 0);
    for round in 0..WARM_UP + bursts {
        let steady = round % 64 != 0 || clock.holds();
        let submitted = subject.submit();
        let engine = Arc::clone(&engine);
        other.run(move || {
            engine.lock().unwrap_or_else(PoisonError::into_inner).run();
            Ok(())
        })?;
        let (reaped, copies) = subject.reap();
        ensure!(copies == BURST, "{copies} of {BURST} copies were reported");
        if round >= WARM_UP && steady {
            samples.push((submitted + reaped) as f64 / BURST as f64);
            submits.push(submitted as f64 / BURST as f64);
            reaps.push(reaped as f64 / BURST as f64);
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
        engine: copier.name().into(),
        simulated: copier.simulated(),
        ring: "none",
        burst: BURST,
        temperature: "remote".into(),
        window: BURST,
        rejected,
        ..Row::default()
    };
    row.set_cycles(Spread::of(&samples), tsc::hz());
    (row.submit_cycles, row.reap_cycles) =
        (Some(Spread::of(&submits).median), Some(Spread::of(&reaps).median));
    row.metric = "submit_and_reap";
    row.unit = "tsc_cycles_per_copy";
    row.received = (samples.len() * BURST) as u64;
    row.verified = row.received;
    Ok(row)
}

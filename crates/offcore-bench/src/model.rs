//! `offcore bench model`: compares the simulated device's timing with all published points, on the stepped virtual
//! clock.

pub mod load;
pub mod plot;
pub mod points;
pub mod rate;

use anyhow::{Context, Result};
use offcore_dsa::sim::Timing;

use crate::report::progress::Progress;
use crate::report::row::Row;
use points::{POINTS, Point, Target};

/// Tolerated relative error of a judged figure.
pub const TOLERANCE: f64 = 0.15;

/// Evaluates the model at every point.
///
/// # Errors
/// If the simulated device fails.
pub fn run(progress: &Progress, emit: &mut dyn FnMut(Row)) -> Result<()> {
    progress.begin(POINTS.len());
    for point in &POINTS {
        progress.say(point.name);
        let found =
            (point.measure)(point, Timing::PUBLISHED).with_context(|| format!("point '{}'", point.name))?;
        emit(row(point, found));
        progress.step();
    }
    progress.end();
    Ok(())
}

fn row(point: &Point, found: f64) -> Row {
    let (low, high) = point.target.limits();
    Row {
        bench: "model",
        case: point.name.into(),
        arrangement: "virtual-clock",
        frame: point.bytes as usize,
        mode: "offload".into(),
        engine: "dsa-sim".into(),
        ring: "none",
        simulated: true,
        metric: "model",
        unit: point.unit,
        runs: 1,
        min: found,
        median: found,
        max: found,
        published: Some(low),
        published_high: high,
        published_unit: Some(point.unit),
        role: Some(point.role.name()),
        source: Some(point.source),
        software_ns: Some(point.software_ns),
        error: Some(point.target.error(found)),
        pass: Some(point.target.is_met(found)),
        at_least: Some(matches!(point.target, Target::AtLeast(_))),
        ..Row::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::golden;

    #[test]
    fn rows_name_their_source() {
        for point in &POINTS {
            let kind = if point.target.limits().1.is_some() { "model" } else { "model, lower bound" };
            golden::check(kind, &row(point, 1.0));
        }
    }

    #[test]
    fn every_point_is_met() {
        let mut missed = Vec::new();
        run(&Progress::hidden(), &mut |row| {
            if row.pass != Some(true) {
                missed.push(format!("{}: {} {}", row.case, row.median, row.unit));
            }
        })
        .unwrap();
        assert!(missed.is_empty(), "{missed:?}");
    }
}

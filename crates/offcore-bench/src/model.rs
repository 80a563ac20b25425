//! `offcore bench model`: compares the simulated device's timing with all published points, on the stepped virtual
//! clock.

pub mod load;
pub mod plot;
pub mod points;
pub mod rate;

use anyhow::{Context, Result};
use offcore_dsa::sim::Timing;

use crate::report::progress::Progress;
use crate::report::row::{ModelColumns, Published, Row};
use crate::report::sample::Spread;
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
    let mut row = Row::new("model", point.name, "virtual-clock");
    (row.head.mode, row.head.engine) = ("offload".into(), "dsa-sim".into());
    (row.head.frame, row.head.burst, row.head.temperature) = (point.bytes as usize, 0, String::new());
    row.figures.simulated = true;
    row.set_spread("model", point.unit, Spread::of(&[found]));
    row.published = Published::new(Some(low), point.unit);
    row.model = ModelColumns {
        published_high: high,
        at_least: Some(matches!(point.target, Target::AtLeast(_))),
        source: Some(point.source),
        role: Some(point.role.name()),
        software_ns: Some(point.software_ns),
        error: Some(point.target.error(found)),
        pass: Some(point.target.is_met(found)),
    };
    row
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
            if row.model.pass != Some(true) {
                missed.push(format!("{}: {} {}", row.head.case, row.figures.spread.median, row.figures.unit));
            }
        })
        .unwrap();
        assert!(missed.is_empty(), "{missed:?}");
    }
}

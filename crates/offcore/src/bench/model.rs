//! `offcore bench model`: the simulated device's timing compared with published figures.

use std::fmt::Write;
use std::path::PathBuf;

use clap::Args;
use offcore_bench::model::points::OUTSIDE;
use offcore_bench::model::{self, TOLERANCE, plot};
use offcore_bench::progress::Progress;
use offcore_bench::row::Row;

use super::{Format, Rows, plot_file};
use crate::failure::Failure;
use crate::output::table::columns;

pub(crate) const EXAMPLES: &str = "\
Examples:
  Every published figure beside the model's:
    offcore bench model

  As objects, one a line; drawn:
    offcore bench model --format json --plot model.svg

The device's parameters are fitted on three figures and judged by those that
could have come out otherwise: at most 15 % off. Figures that follow from
parameters and lower bounds stand apart. What runs is the simulator, stepped, on
its virtual clock; nothing is measured on this machine.";

#[derive(Args, Debug)]
pub(crate) struct ModelArgs {
    /// Draw the errors as an SVG
    #[arg(long, value_name = "FILE.svg", value_parser = plot_file)]
    pub plot: Option<PathBuf>,

    /// A table for people, JSON with one object a line, or CSV
    #[arg(long, value_name = "FORMAT", default_value = "table")]
    pub format: Format,
}

/// Runs the model and writes the results.
///
/// # Errors
/// [`Failure::Failed`] if the simulator fails, but not if a figure deviates.
pub(crate) fn run(args: &ModelArgs) -> Result<(), Failure> {
    let mut rows = Rows::new(args.format, table);
    model::run(&Progress::visible(), &mut |row| rows.push(row))?;
    Ok(rows.finish(args.plot.as_ref(), plot::errors)?)
}

fn table(rows: &[Row]) -> String {
    let mut text = String::new();
    for (role, title) in [
        ("fitted", "Fitted:"),
        ("taken", "Taken as a parameter, or bounding one:"),
        ("assumed", "With a load or threshold that the source leaves open, chosen by us:"),
        ("derived", "Following from the bandwidth parameters:"),
        ("bounded", "Lower bounds, which a faster model meets as well:"),
        ("judged", "Judged:"),
    ] {
        let rows: Vec<_> = rows.iter().filter(|row| row.model.role == Some(role)).collect();
        let cells = rows.iter().map(|row| {
            [
                row.head.case.clone(),
                published(row),
                figure(row.figures.spread.median),
                row.figures.unit.into(),
                match row.model.error.unwrap_or_default() {
                    0.0 if row.published.published != row.model.published_high => "-".into(),
                    error => format!("{:+.1} %", error * 100.0),
                },
                if row.model.pass == Some(true) { "met" } else { "MISSED" }.into(),
                match row.model.software_ns {
                    Some(ns) if ns > 0.0 => format!("{} ({ns:.0} ns)", row.model.source.unwrap_or_default()),
                    _ => row.model.source.unwrap_or_default().into(),
                },
            ]
        });
        let _ =
            write!(text, "{title}\n{}\n", columns("<figure|published|model|<unit|error|<|<source", cells,));
    }
    let judged = rows.iter().filter(|row| row.model.role == Some("judged"));
    let met = judged.clone().filter(|row| row.model.pass == Some(true)).count();
    let _ = writeln!(
        text,
        "{met} of {} judged figures are met, at most {:.0} % off; only these could have come out otherwise.",
        judged.count(),
        TOLERANCE * 100.0
    );
    text += "Published, and not the device's alone:\n";
    for (figure, reason) in OUTSIDE {
        let _ = writeln!(text, "  {figure}: {reason}");
    }
    text
}

fn published(row: &Row) -> String {
    let low = row.published.published.unwrap_or_default();
    match row.model.published_high {
        None => format!(">= {}", figure(low)),
        Some(high) if high > low => format!("{}-{}", figure(low), figure(high)),
        Some(_) => figure(low),
    }
}

/// Formats three significant digits, or all digits before the point.
fn figure(value: f64) -> String {
    match value {
        v if v >= 100.0 => format!("{v:.0}"),
        v if v >= 10.0 => format!("{v:.1}"),
        v => format!("{v:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::lines::{command, examples};
    use offcore_bench::row::ModelColumns;

    #[test]
    fn every_example_of_the_help_is_accepted() {
        examples(EXAMPLES, 2).iter().for_each(|line| drop(command(line).unwrap()));
    }

    #[test]
    fn points_are_listed_by_role() {
        let row = |case: &str, role, published_high, error: f64| {
            let mut row = Row::default();
            row.head.case = case.into();
            row.published.published = Some(10.0);
            (row.figures.unit, row.figures.spread.median) = ("us", 10.0 * (1.0 + error));
            row.model = ModelColumns {
                role: Some(role),
                published_high,
                error: Some(error),
                pass: Some(error.abs() < 0.15),
                software_ns: Some(182.0),
                source: Some("somebody"),
                ..ModelColumns::default()
            };
            row
        };
        let text = table(&[
            row("a", "fitted", Some(10.0), 0.0),
            row("b", "judged", Some(10.0), 0.2),
            row("c", "judged", None, 0.0),
        ]);
        for words in ["+0.0 %  met", "+20.0 %  MISSED", ">= 10.0", "somebody (182 ns)", "1 of 2 judged"] {
            assert!(text.contains(words), "no '{words}' in {text}");
        }
    }
}

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
  All published figures beside the figures of the model:
    offcore bench model

  The same with results as JSON, and a plot:
    offcore bench model --format json --plot model.svg

The parameters of the device are fitted to three figures. The model is judged by
the figures that do not follow from its parameters: an error of at most 15 %
passes. Derived figures and lower bounds are listed separately. The simulator is
stepped on a virtual clock; nothing is measured on this machine.";

#[derive(Args, Debug)]
pub(crate) struct ModelArgs {
    /// Plot the errors to an SVG file
    #[arg(long, value_name = "FILE.svg", value_parser = plot_file)]
    pub plot: Option<PathBuf>,

    /// Results as a table, as JSON with one object per line, or as CSV
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
        ("taken", "Parameters, or bounds of parameters:"),
        ("assumed", "With an assumed load or threshold, which the source does not state:"),
        ("derived", "Derived from the bandwidth parameters:"),
        ("bounded", "Lower bounds, which any faster model also meets:"),
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
        "{met} of {} judged figures are met, with an error of at most {:.0} %; only these figures test the model.",
        judged.count(),
        TOLERANCE * 100.0
    );
    text += "Published figures that depend on more than the device:\n";
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
    fn help_examples_are_accepted() {
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
                source: Some("a guide"),
                ..ModelColumns::default()
            };
            row
        };
        let text = table(&[
            row("a", "fitted", Some(10.0), 0.0),
            row("b", "judged", Some(10.0), 0.2),
            row("c", "judged", None, 0.0),
        ]);
        for words in ["+0.0 %  met", "+20.0 %  MISSED", ">= 10.0", "a guide (182 ns)", "1 of 2 judged"] {
            assert!(text.contains(words), "no '{words}' in {text}");
        }
    }
}

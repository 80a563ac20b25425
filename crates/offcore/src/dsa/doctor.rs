//! `offcore dsa doctor`: what is wrong with the set-up.

use std::fmt::Write;

use anyhow::anyhow;
use offcore_dsa::doctor::{Report, System, Verdict, examine};
use serde_json::json;

use super::DoctorArgs;
use crate::Failure;
use crate::args::Format;
use crate::output::write;

/// The examples of `offcore dsa doctor --help`. A test parses each line that begins with `offcore`.
pub(super) const EXAMPLES: &str = "\
Examples:
    offcore dsa doctor
    offcore dsa doctor --all --format json

Another machine's files, copied to a directory:
    offcore dsa doctor --root /tmp/machine

Exit codes: 0 no problem (there may be warnings), 1 a problem, 2 usage.";

/// Looks, and writes what was found.
///
/// # Errors
/// [`Failure::Failed`] when there are problems.
pub(super) fn run(args: &DoctorArgs) -> Result<(), Failure> {
    let system = args.root.as_deref().map_or_else(System::default, System::under);
    let report = examine(&system);
    write(&text(&report, args.format, args.all)?)?;
    match report.count(Verdict::Problem) {
        0 => Ok(()),
        1 => Err(anyhow!("1 problem keeps DSA from being used").into()),
        many => Err(anyhow!("{many} problems keep DSA from being used").into()),
    }
}

fn text(report: &Report, format: Format, all: bool) -> anyhow::Result<String> {
    let mut text = String::new();
    for finding in &report.findings {
        match format {
            Format::Json => {
                let object = json!({
                    "check": finding.check,
                    "place": finding.place,
                    "verdict": finding.verdict.name(),
                    "found": finding.found,
                    "advice": finding.advice,
                });
                text += &(serde_json::to_string(&object)? + "\n");
            }
            Format::Table if all || finding.verdict >= Verdict::Warning => {
                // Writing to a String cannot fail.
                let verdict = finding.verdict;
                let _ =
                    writeln!(text, "{verdict:<15} {} {}: {}", finding.place, finding.check, finding.found);
                if !finding.advice.is_empty() {
                    let _ = writeln!(text, "{:<15} what to do: {}", "", finding.advice);
                }
            }
            Format::Table => {}
        }
    }
    if format == Format::Table {
        let count = |verdict| report.count(verdict);
        let _ = writeln!(
            text,
            "ok {}, warnings {}, problems {}, not applicable {}",
            count(Verdict::Ok),
            count(Verdict::Warning),
            count(Verdict::Problem),
            count(Verdict::NotApplicable)
        );
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dsa::fixtures::Tree;

    fn doctor(tree: &Tree) -> Result<(), Failure> {
        run(&DoctorArgs { root: Some(tree.root.clone()), all: false, format: Format::Json })
    }

    #[test]
    fn only_problems_end_with_a_failure() {
        let tree = Tree::healthy();
        assert!(doctor(&tree).is_ok());
        tree.set("sys/bus/dsa/devices/dsa0/wq0.0/block_on_fault", 1);
        assert!(doctor(&tree).is_ok(), "a warning");
        tree.set("sys/bus/dsa/devices/dsa0/state", "halted");
        let Err(Failure::Failed(error)) = doctor(&tree) else { panic!("a halted device is a problem") };
        assert!(error.to_string().starts_with("1 problem "), "{error}");
        let Err(Failure::Failed(error)) = doctor(&Tree::new()) else { panic!("no device is a problem") };
        assert!(error.to_string().starts_with("1 problem "), "{error}");
    }

    #[test]
    fn people_read_what_is_not_well_and_what_to_do() {
        let tree = Tree::healthy();
        tree.set("sys/bus/dsa/devices/dsa0/wq0.0/block_on_fault", 1);
        let report = examine(&System::under(&tree.root));
        let short = text(&report, Format::Table, false).unwrap();
        assert_eq!(short.lines().count(), 3, "{short}");
        assert!(
            short.starts_with("warning         wq0.0 block-on-fault: ") && short.contains("what to do: ")
        );
        assert!(short.ends_with("warnings 1, problems 0, not applicable 1\n"), "{short}");
        let long = text(&report, Format::Table, true).unwrap();
        assert!(long.lines().count() > report.findings.len());
        assert_eq!(text(&report, Format::Json, false).unwrap().lines().count(), report.findings.len());
    }
}

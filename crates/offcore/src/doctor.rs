//! Writes the findings of `offcore dsa doctor` and `offcore gpu doctor` as text or as JSON.

use std::fmt::Write;
use std::path::Path;

use anyhow::{anyhow, bail};
use offcore_stats::finding::{Finding, Report, Verdict};
use serde_json::json;

use crate::args::Format;
use crate::failure::Failure;
use crate::output::write;

/// Rejects a missing copy of a machine's directory tree, which would look like a machine without devices.
pub(crate) fn check_root(flag: &str, root: &Path) -> anyhow::Result<()> {
    if root.is_dir() { Ok(()) } else { bail!("{flag} {}: there is no such directory", root.display()) }
}

/// Writes the findings about `what`.
pub(crate) fn tell(report: &Report, format: Format, all: bool, what: &str) -> Result<(), Failure> {
    write(&text(report, format, all))?;
    match report.count(Verdict::Problem) {
        0 => Ok(()),
        1 => Err(anyhow!("1 problem keeps {what} from being used").into()),
        many => Err(anyhow!("{many} problems keep {what} from being used").into()),
    }
}

fn text(report: &Report, format: Format, all: bool) -> String {
    let findings = report.findings.iter();
    if format == Format::Json {
        return findings.map(object).collect();
    }
    let mut text: String = findings.filter(|f| all || f.verdict >= Verdict::NotKnown).map(words).collect();
    let count = |verdict| report.count(verdict);
    // Writing to a String cannot fail.
    let _ = writeln!(
        text,
        "ok {}, warnings {}, problems {}, not known {}, not applicable {}",
        count(Verdict::Ok),
        count(Verdict::Warning),
        count(Verdict::Problem),
        count(Verdict::NotKnown),
        count(Verdict::NotApplicable)
    );
    text
}

fn object(finding: &Finding) -> String {
    let Finding { check, place, verdict, found, wanted, why, advice } = finding;
    let verdict = verdict.to_string();
    let object = json!({
        "check": check, "place": place, "verdict": verdict, "found": found, "wanted": wanted, "why": why,
        "advice": advice,
    });
    format!("{object}\n")
}

fn words(finding: &Finding) -> String {
    let Finding { check, place, verdict, found, wanted, why, advice } = finding;
    let mut text = format!("{:<15} {place} {check}: {found}\n", verdict.to_string());
    let below = [("wanted", &wanted[..]), ("why", why), ("what to do", advice)];
    for (what, words) in below.into_iter().filter(|(_, words)| !words.is_empty()) {
        let _ = writeln!(text, "{:<15} {what}: {words}", "");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let mut report = Report::default();
        report.check("user-queues", "system").ok("programs can use wq0.0");
        report.check("block-on-fault", "wq0.0").warning("it is on", "switch it off");
        report.check("gpu", "system").wants("a GPU", "kernels are for CUDA").problem("none", "buy one");
        report.check("cuda", "system").not_known("it was not asked", "ask it");
        report.check("perf-events", "system").not_applicable("no device");
        report
    }

    #[test]
    fn table_shows_problem_and_remedy() {
        let short = text(&report(), Format::Table, false);
        let expected = "\
warning         wq0.0 block-on-fault: it is on
                what to do: switch it off
problem         system gpu: none
                wanted: a GPU
                why: kernels are for CUDA
                what to do: buy one
not known       system cuda: it was not asked
                what to do: ask it
ok 1, warnings 1, problems 1, not known 1, not applicable 1
";
        assert_eq!(short, expected);
        let long = text(&report(), Format::Table, true);
        assert!(long.starts_with("ok              system user-queues: programs can use wq0.0\n"), "{long}");
        assert!(long.contains("not applicable  system perf-events: no device\n"), "{long}");
    }

    #[test]
    fn json_has_one_finding_per_line() {
        let text = text(&report(), Format::Json, false);
        let objects: Vec<serde_json::Value> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(objects.len(), 5);
        assert_eq!(
            objects[2],
            json!({
                "check": "gpu", "place": "system", "verdict": "problem", "found": "none", "wanted": "a GPU",
                "why": "kernels are for CUDA", "advice": "buy one",
            })
        );
    }

    #[test]
    fn only_problems_are_a_failure() {
        let Err(Failure::Failed(error)) = tell(&report(), Format::Json, false, "DSA") else { panic!() };
        assert_eq!(error.to_string(), "1 problem keeps DSA from being used");
        assert!(tell(&Report::default(), Format::Json, false, "DSA").is_ok());
    }
}

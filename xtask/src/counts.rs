//! Instruction counts of hot functions. They are exact on any machine, unlike times on a shared machine.
//!
//! `crates/offcore-vhost/examples/counts.rs` and `crates/offcore-flow/examples/tcp_counts.rs` run one case at a time.
//! callgrind counts the instructions inside their function `counted`. The cost per packet is kept in counts.toml and
//! may grow by up to 3 %.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::project::Project;
use crate::setup;

const FILE: &str = "counts.toml";
const TABLE: &str = "[instructions-per-packet]";
const HEAD: &str = "\
# What one packet costs in the hot functions, in instructions, counted by callgrind on x86-64 with AVX2.
# `cargo xtask test` fails where a count grows by more than 3 %. After a change that is worth its instructions:
# `cargo xtask counts --update`, and say in the commit why. docs/measuring.md tells more.
";
/// The examples to count.
const EXAMPLES: [&str; 2] = ["counts", "tcp_counts"];
/// A count that has grown by no more than this factor is unchanged.
const TOLERANCE: f64 = 1.03;

type Counts = BTreeMap<String, f64>;

/// Returns whether the CPU has the vector instructions of the counted code. valgrind's CPU has AVX2 if this one does,
/// and never AVX-512.
fn has_avx2() -> bool {
    std::arch::is_x86_feature_detected!("avx2")
}

/// Counts again and writes the file.
pub(crate) fn update(project: &Project) -> Result<()> {
    ensure!(has_avx2(), "{FILE} is of CPUs with AVX2, which this one has not: update it on another machine");
    let counts = count(project)?;
    let path = project.root.join(FILE);
    fs::write(&path, render(&counts)).with_context(|| format!("cannot write {}", path.display()))
}

/// Counts again and returns a line for each count that differs from the file. Descriptors and packets are read and
/// copied by vector instructions in every case, so nothing can be compared on a CPU without AVX2.
pub(crate) fn compare(project: &Project) -> Result<Vec<String>> {
    if !has_avx2() {
        println!(
            "NOTE: {FILE} is of CPUs with AVX2, which this one has not: no instruction counts are compared"
        );
        return Ok(Vec::new());
    }
    let path = project.root.join(FILE);
    let text = fs::read_to_string(&path)
        .with_context(|| format!("cannot read {}: `cargo xtask counts --update` makes it", path.display()))?;
    let kept = parse(&text)?;
    let counted = count(project)?;
    for (case, is) in &counted {
        let was = kept.get(case).copied().unwrap_or(0.0);
        let note =
            if *is * TOLERANCE < was { ", better: `cargo xtask counts --update` keeps it" } else { "" };
        println!("{case:<24} was {was:>8.1}, is {is:>8.1} instructions per packet{note}");
    }
    Ok(differences(&kept, &counted))
}

fn differences(kept: &Counts, counted: &Counts) -> Vec<String> {
    let remedy = "find the reason, or accept it with `cargo xtask counts --update`";
    let mut lines = Vec::new();
    for (case, is) in counted {
        match kept.get(case) {
            Some(was) if *is <= was * TOLERANCE => {}
            Some(was) => lines.push(format!(
                "{case} takes {is:.1} instructions per packet, {:+.1} % over the {was:.1} in {FILE}: {remedy}",
                (is / was - 1.0) * 100.0
            )),
            None => lines.push(format!("{case} is not in {FILE}: `cargo xtask counts --update` adds it")),
        }
    }
    let gone = kept.keys().filter(|case| !counted.contains_key(*case));
    lines.extend(
        gone.map(|case| format!("{case} of {FILE} is not counted any more: `cargo xtask counts --update`")),
    );
    lines
}

/// Builds the examples and counts every case.
fn count(project: &Project) -> Result<Counts> {
    let examples = EXAMPLES.iter().flat_map(|example| ["--example", example]);
    let status = project
        .cargo()
        // Builds the whole workspace, because the tests have built it the same way.
        .args(["build", "--release", "--quiet", "--workspace"])
        .args(examples)
        .args(setup::features())
        .status()
        .context("cannot run cargo")?;
    ensure!(status.success(), "the examples {} do not build", EXAMPLES.join(" and "));
    let mut counts = Counts::new();
    for name in EXAMPLES {
        let example = project.target.join("release/examples").join(name);
        let listed =
            Command::new(&example).output().with_context(|| format!("cannot run {}", example.display()))?;
        let cases = String::from_utf8(listed.stdout).context("the names of the cases")?;
        ensure!(listed.status.success() && !cases.is_empty(), "{} lists no cases", example.display());
        for case in cases.lines() {
            counts.insert(case.to_owned(), count_case(project, &example, name, case)?);
        }
    }
    Ok(counts)
}

/// Runs one case of an example under callgrind; returns instructions per packet.
fn count_case(project: &Project, example: &PathBuf, name: &str, case: &str) -> Result<f64> {
    let profile = project.target.join(format!("callgrind.{case}.out"));
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--quiet", "--collect-atstart=no"])
        .arg(format!("--toggle-collect={name}::counted*"))
        .arg(format!("--callgrind-out-file={}", profile.display()))
        .arg(example)
        .arg(case)
        .output()
        .context("cannot run valgrind: apt-get install valgrind")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "valgrind on {case} failed: {said}");
    let packets: f64 = String::from_utf8_lossy(&output.stdout)
        .trim()
        .parse()
        .with_context(|| format!("{case} does not say how many packets it moved"))?;
    let text = fs::read_to_string(&profile).with_context(|| format!("cannot read {}", profile.display()))?;
    let total: f64 = text
        .lines()
        .find_map(|line| line.strip_prefix("totals: ")?.trim().parse().ok())
        .with_context(|| format!("{} has no totals", profile.display()))?;
    ensure!(total > 0.0 && packets > 0.0, "{case}: {total} instructions for {packets} packets");
    fs::remove_file(&profile).with_context(|| format!("cannot remove {}", profile.display()))?;
    // Rounded as in the file, so that unchanged counts are equal.
    Ok((total / packets * 10.0).round() / 10.0)
}

fn render(counts: &Counts) -> String {
    let lines: String = counts.iter().map(|(case, count)| format!("{case} = {count:.1}\n")).collect();
    format!("{HEAD}\n{TABLE}\n{lines}")
}

fn parse(text: &str) -> Result<Counts> {
    let mut counts = Counts::new();
    let lines = text.lines().zip(1..).filter(|(line, _)| !line.trim().is_empty() && !line.starts_with('#'));
    for (line, number) in lines {
        if line == TABLE {
            continue;
        }
        let entry = line.split_once(" = ").and_then(|(case, count)| Some((case, count.parse().ok()?)));
        let Some((case, count)) = entry else {
            bail!("{FILE}:{number}: '{line}': expected CASE = COUNT");
        };
        counts.insert(case.to_owned(), count);
    }
    Ok(counts)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(entries: &[(&str, f64)]) -> Counts {
        entries.iter().map(|&(case, count)| (case.to_owned(), count)).collect()
    }

    #[test]
    fn counts_file_round_trips() {
        let some = counts(&[("dequeue-64", 71.5), ("enqueue-64", 80.0)]);
        assert_eq!(parse(&render(&some)).unwrap(), some);
        assert!(parse("dequeue-64 = many\n").unwrap_err().to_string().contains("counts.toml:1"));
    }

    #[test]
    fn only_grown_or_unknown_counts_are_reported() {
        let kept = counts(&[("a", 100.0), ("b", 100.0), ("c", 100.0), ("gone", 1.0)]);
        let counted = counts(&[("a", 103.0), ("b", 103.1), ("c", 50.0), ("new", 1.0)]);
        let lines = differences(&kept, &counted);
        assert_eq!(lines.len(), 3, "{lines:?}");
        for (line, parts) in lines.iter().zip([
            ["b takes 103.1", "+3.1 % over the 100.0", "--update"],
            ["new is not in", "counts.toml", "--update"],
            ["gone of", "not counted", "--update"],
        ]) {
            assert!(parts.iter().all(|part| line.contains(part)), "{line}");
        }
    }
}

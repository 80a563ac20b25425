//! Judges whether a step has worked correctly, and describes the result.

use serde_json::Value;

use super::step::{Ended, last_line};

/// A description of the step's success, or of its failure.
pub(super) type Verdict = Result<String, String>;

/// Figures that deviate from the model by more than this share are reported.
const FAR: f64 = 0.25;

/// Judges a doctor's findings. A problem is a failure if the device is `needed`.
pub(super) fn doctor(ended: &Ended, needed: bool) -> Verdict {
    let findings: Vec<Value> = lines(&ended.output).filter(|line| line["verdict"].is_string()).collect();
    let of = |verdict: &str| findings.iter().filter(|one| one["verdict"] == verdict).collect::<Vec<_>>();
    let problems: Vec<_> = of("problem").iter().filter_map(|one| one["found"].as_str()).collect();
    if findings.is_empty() {
        return Err(format!("{}: {}", ended.status, last_line(&ended.log)));
    }
    let text = format!("{} checks passed, {} warnings", of("ok").len(), of("warning").len());
    match problems.join("; ") {
        none if none.is_empty() => Ok(text),
        found if needed => Err(format!("{text}, and problems: {found}")),
        found => Ok(format!("{text}; not available, and not needed: {found}")),
    }
}

/// Judges the cost of reads and launches, and the registers that kernels spill.
pub(super) fn costs(ended: &Ended) -> Verdict {
    let Some(costs) = lines(&ended.output).next().filter(|_| ended.status.success()) else {
        return Err(format!("{}: {}", ended.status, last_line(&ended.log)));
    };
    let us = |name: &str| match costs[name].as_f64() {
        Some(ns) if ns > 0.0 => Ok(format!("{:.2} us", ns / 1000.0)),
        _ => Err(format!("it does not tell {name}")),
    };
    let kernels = costs["kernels"].as_array().into_iter().flatten();
    let kernels = kernels.map(|kernel| {
        let spilled = match kernel["local_bytes"].as_u64() {
            Some(0) | None => String::new(),
            Some(bytes) => format!(" and {bytes} B of local memory"),
        };
        let name = kernel["name"].as_str().unwrap_or_default();
        format!("{name} {} registers{spilled}", kernel["registers"])
    });
    Ok(format!(
        "a read of pinned host memory {}, a launch {}, with the wait {}, a launch of a graph {}; {}",
        us("read_ns")?,
        us("launch_ns")?,
        us("launch_and_wait_ns")?,
        us("graph_launch_ns")?,
        kernels.collect::<Vec<_>>().join(", ")
    ))
}

/// Checks that every packet came back correctly or was counted as dropped.
pub(super) fn packets(ended: &Ended) -> Verdict {
    if !ended.status.success() {
        return Err(format!("{}: {}", ended.status, last_line(&ended.log)));
    }
    let Some(report) = lines(&ended.output).filter(|line| line["report"] == "final").last() else {
        return Err("it has made no last report".into());
    };
    let generator = &report["ports"][0]["generator"];
    let count = |name: &str| generator[name].as_u64().unwrap_or_default();
    if report["work"].as_array().is_some_and(|all| all.iter().any(|one| one["failed"] == true)) {
        return Err(format!("the device has failed: {}", last_line(&ended.log)));
    }
    let wrong = ["reordered", "duplicates", "corrupt", "foreign"].map(|name| (count(name), name));
    if let Some((packets, what)) = wrong.into_iter().find(|(packets, _)| *packets > 0) {
        return Err(format!("{packets} packets are {what}"));
    }
    let (sent, received, verified) = (count("sent"), count("received"), count("verified"));
    let dropped = drops(&report);
    if received == 0 || verified != received || sent != received + dropped {
        return Err(format!(
            "{sent} sent, {received} received, {verified} verified, {dropped} dropped and counted"
        ));
    }
    let seconds = report["seconds"].as_f64().unwrap_or_default();
    let around = (ended.took.as_secs_f64() - seconds).max(0.0);
    let ending = ended.ending.map_or(String::new(), |time| format!(", ended in {:.2} s", time.as_secs_f64()));
    let counted = if dropped > 0 { format!(", {dropped} dropped and counted") } else { String::new() };
    Ok(format!("{received} packets verified{counted}; start and end {around:.1} s{ending}"))
}

/// Checks that the process has ended after it was killed.
pub(super) fn killed(ended: &Ended) -> Verdict {
    match ended.ending {
        Some(time) if !ended.status.success() => Ok(format!("gone in {:.2} s", time.as_secs_f64())),
        _ => Err(format!("it has ended with {}", ended.status)),
    }
}

/// Describes benchmark rows: their speed, and deviations from the model.
pub(super) fn figures(ended: &Ended) -> Verdict {
    let rows: Vec<Value> = lines(&ended.output).filter(|line| line["bench"] == "gpu").collect();
    if !ended.status.success() || rows.is_empty() {
        return Err(format!("{}, {} rows: {}", ended.status, rows.len(), last_line(&ended.log)));
    }
    let best = |burst: u64| {
        let of = rows
            .iter()
            .filter(|row| row["case"] == "workload" && row["mode"] == "offload" && row["burst"] == burst);
        of.filter_map(|row| Some((row["gbps"].as_f64()?, row["workload"].as_str()?))).fold(
            None,
            |best, one| match best {
                Some((gbps, _)) if gbps >= one.0 => best,
                _ => Some(one),
            },
        )
    };
    let mut text = format!("{} rows", rows.len());
    if rows.iter().any(|row| row["simulated"] == true) {
        text += " of threads in place of a GPU, whose times do not show the times of a GPU";
    }
    for burst in [16, 32, 64, 1024] {
        if let Some((gbps, workload)) = best(burst) {
            text += &format!("; burst {burst}: at most {gbps:.1} Gbit/s ({workload})");
        }
    }
    for work in ["swap", "crc32c", "checksum", "match"] {
        text += &break_even(&rows, work).unwrap_or_default();
    }
    // The model does not apply to the host device.
    let far = rows.iter().filter(|row| row["simulated"] != true).filter_map(|row| {
        let (gbps, model) = (row["gbps"].as_f64()?, row["model_gbps"].as_f64()?);
        let off = gbps / model - 1.0;
        let (workload, burst) = (row["workload"].as_str()?, &row["burst"]);
        (off.abs() > FAR).then(|| format!("{workload} at burst {burst} {:+.0} %", 100.0 * off))
    });
    let far: Vec<_> = far.collect();
    if !far.is_empty() {
        text += &format!("; far from the model of the published program: {}", far.join(", "));
    }
    Ok(text)
}

/// Returns the smallest burst for which one pipeline outperforms a core at a kind of work, and the maximum speedup of
/// all pipelines.
fn break_even(rows: &[Value], work: &str) -> Option<String> {
    let of = rows.iter().filter(|row| {
        row["case"] == "break-even"
            && row["work"] == work
            && row["mode"] == "offload"
            && row["simulated"] != true
    });
    let of: Vec<_> = of.filter(|row| row["over_baseline"].is_number()).collect();
    let named =
        |row: &Value| Some(format!("{}, memory {}", row["workload"].as_str()?, row["memory"].as_str()?));
    let over = |row: &Value| row["over_baseline"].as_f64().unwrap_or_default();
    let best = of.iter().max_by(|a, b| over(a).total_cmp(&over(b)))?;
    let worth = of.iter().filter_map(|row| Some((row["break_even_burst"].as_u64()?, row)));
    let from = match worth.min_by_key(|(burst, _)| *burst) {
        Some((burst, row)) => format!("more than a core from bursts of {burst} on ({})", named(row)?),
        None => "never more than a core".into(),
    };
    Some(format!(
        "; {work}: one pipeline {from}, {} together at most {:.1} times one ({}, bursts of {})",
        best["pipelines"],
        over(best),
        named(best)?,
        best["burst"]
    ))
}

fn lines(text: &str) -> impl Iterator<Item = Value> {
    text.lines().filter_map(|line| serde_json::from_str(line).ok())
}

/// Returns the packets dropped by all queues.
fn drops(report: &Value) -> u64 {
    let queues = report["queues"].as_array().into_iter().flatten();
    let drops = queues.flat_map(|queue| queue["drops"].as_object().into_iter().flatten());
    drops.filter_map(|(_, packets)| packets.as_u64()).sum()
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;
    use std::time::Duration;

    use super::*;

    fn ended(code: i32, output: &str) -> Ended {
        let (took, log) = (Duration::from_secs(3), "a\nlast".into());
        Ended { status: ExitStatus::from_raw(code << 8), took, ending: None, output: output.into(), log }
    }

    fn report(generator: &str, drops: &str, failed: bool) -> String {
        format!(
            r#"{{"report":"final","seconds":1.0,"work":[{{"failed":{failed}}}],"queues":[{{"drops":{drops}}}],
            "ports":[{{"generator":{generator}}}]}}"#
        )
        .replace('\n', "")
    }

    #[test]
    fn packets_are_verified_or_counted() {
        let good =
            r#"{"sent":10,"received":9,"verified":9,"reordered":0,"duplicates":0,"corrupt":0,"foreign":0}"#;
        let text = packets(&ended(0, &report(good, r#"{"full":1}"#, false))).unwrap();
        assert!(text.contains("9 packets verified, 1 dropped") && text.contains("2.0 s"), "{text}");
        for (code, output, words) in [
            (1, report(good, r#"{"full":1}"#, false), "last"),
            (0, report(good, "{}", false), "10 sent, 9 received"),
            (0, report(good, r#"{"full":1}"#, true), "device has failed"),
            (
                0,
                report(&good.replace("\"corrupt\":0", "\"corrupt\":2"), "{}", false),
                "2 packets are corrupt",
            ),
            (0, String::new(), "no last report"),
        ] {
            let text = packets(&ended(code, &output)).unwrap_err();
            assert!(text.contains(words), "{text}");
        }
    }

    #[test]
    fn figures_are_compared_with_the_model() {
        let row = |workload: &str, burst: u32, gbps: f64, model: f64| {
            format!(
                r#"{{"bench":"gpu","case":"workload","mode":"offload","workload":"{workload}","burst":{burst},"gbps":{gbps},"model_gbps":{model}}}"#
            )
        };
        let rows = [row("kernel", 16, 50.0, 51.0), row("graph", 16, 60.0, 30.0)].join("\n");
        let text = figures(&ended(0, &rows)).unwrap();
        assert!(text.contains("2 rows; burst 16: at most 60.0 Gbit/s (graph)"), "{text}");
        assert!(text.ends_with("model of the published program: graph at burst 16 +100 %"), "{text}");
        assert!(figures(&ended(0, "")).is_err() && figures(&ended(1, &rows)).is_err());
    }

    #[test]
    fn break_even_burst_is_reported() {
        let row = |workload: &str, mode: &str, burst: u32, over: f64, from: &str| {
            format!(
                r#"{{"bench":"gpu","case":"break-even","work":"match","workload":"{workload}","memory":"gpu","mode":"{mode}",
                "burst":{burst},"over_baseline":{over},"break_even_burst":{from},"pipelines":4}}"#
            )
            .replace('\n', "")
        };
        let core = row("core", "cpu", 64, 1.0, "null");
        let rows = [
            core.clone(),
            row("graph", "offload", 64, 20.0, "16"),
            row("persistent", "offload", 1024, 31.96, "4"),
        ];
        let text = figures(&ended(0, &rows.join("\n"))).unwrap();
        assert!(
            text.ends_with(
                "match: one pipeline more than a core from bursts of 4 on (persistent, memory gpu), 4 together at most \
                 32.0 times one (persistent, memory gpu, bursts of 1024)"
            ),
            "{text}"
        );
        let rows = [core, row("graph", "offload", 64, 2.0, "null")];
        let text = figures(&ended(0, &rows.join("\n"))).unwrap();
        assert!(
            text.ends_with(
                "match: one pipeline never more than a core, 4 together at most 2.0 times one (graph, memory gpu, bursts of 64)"
            ),
            "{text}"
        );
    }

    #[test]
    fn kernel_costs_fit_one_line() {
        let costs_of = r#"{"read_ns":1120.0,"launch_ns":4400.0,"launch_and_wait_ns":11900.0,"graph_launch_ns":5200.0,"kernels":[
            {"name":"og_burst","registers":64,"local_bytes":0},{"name":"og_persistent","registers":64,"local_bytes":8}]}"#;
        let text = costs(&ended(0, &costs_of.replace('\n', ""))).unwrap();
        assert_eq!(
            text,
            "a read of pinned host memory 1.12 us, a launch 4.40 us, with the wait 11.90 us, a launch of a \
             graph 5.20 us; og_burst 64 registers, \
             og_persistent 64 registers and 8 B of local memory"
        );
        assert!(costs(&ended(1, "")).unwrap_err().contains("last"));
    }

    #[test]
    fn doctor_problem_fails_only_needed_device() {
        let found = r#"{"verdict":"problem","found":"no GPU"}"#;
        assert!(doctor(&ended(1, found), true).unwrap_err().contains("no GPU"));
        assert!(doctor(&ended(1, found), false).unwrap().contains("not needed: no GPU"));
        assert!(doctor(&ended(1, ""), false).unwrap_err().contains("last"));
    }
}

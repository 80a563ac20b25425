//! The reports of `offcore gpu` as tables.

use std::fmt::Write;

use offcore_flow::report::{QueueReport, WorkReport};

use crate::output::table::{columns, rate};
use crate::switch::report::{Line, Measurement, costs, heading, queues};

pub(crate) fn tables(line: &Line<'_>) -> String {
    let mut text = heading(line);
    if let Some(measured) = &line.measured {
        text += &measurement(measured);
    }
    text += &queues(&line.report.queues, line.report.over_seconds);
    text += &work(&line.report.work, &line.report.queues);
    text += &costs(line);
    text
}

/// Formats l2fwd-nv's final output, with the exact time.
fn measurement(measured: &Measurement) -> String {
    let Measurement { packets, seconds, mpps, gbps_l1, .. } = *measured;
    let of = |value: Option<f64>, unit| rate(value.unwrap_or_default() * unit, seconds);
    format!(
        "  measured: {packets} packets received in {seconds:.6} s: {} packets/s, {} bit/s (L1)\n",
        of(mpps, 1e6),
        of(gbps_l1, 1e9)
    )
}

fn work(pipelines: &[WorkReport], queues: &[QueueReport]) -> String {
    let rows = pipelines.iter().map(|work| {
        [
            format!("{} queue {}", work.pipeline, work.queue),
            work.bursts.to_string(),
            work.hits.to_string(),
            work.marked.to_string(),
            work.dropped.to_string(),
            work.steered.to_string(),
        ]
    });
    let mut text = columns("<pipeline|bursts|hits|marked|dropped|steered", rows);
    for work in pipelines.iter().filter(|work| work.failed) {
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "  {} queue {}: its device has failed: {}",
            work.pipeline,
            work.queue,
            match lost(work, queues) {
                0 => "the CPU has taken over".to_owned(),
                lost => format!("{lost} packets in its memory were dropped"),
            }
        );
        if work.quarantined > 0 {
            let held = work.quarantined;
            let _ = writeln!(
                text,
                "    {held} packet buffers are held back: the device is hung and may still write them"
            );
        }
    }
    text
}

/// Returns the packets that were dropped because their device has failed and the CPU cannot access them.
fn lost(work: &WorkReport, queues: &[QueueReport]) -> u64 {
    let is_it =
        |queue: &&QueueReport| (&queue.port, queue.queue, &*queue.half) == (&work.pipeline, work.queue, "rx");
    let drops = queues.iter().filter(is_it).flat_map(|queue| &queue.drops);
    drops.filter(|(reason, _)| reason == "failed").map(|(_, packets)| packets).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measurement_keeps_its_seconds() {
        let measured = Measurement::new(1_900_000, 1_900_000 * 60, std::time::Duration::from_millis(1900));
        let text = measurement(&measured);
        assert_eq!(
            text,
            "  measured: 1900000 packets received in 1.900000 s: 1.000 M packets/s, 672.000 M bit/s (L1)\n"
        );
    }

    #[test]
    fn failed_device_is_reported() {
        let work_report = |failed, quarantined| WorkReport {
            pipeline: "pipeline0".into(),
            queue: 1,
            bursts: 5,
            hits: 4,
            dropped: 3,
            marked: 2,
            steered: 1,
            failed,
            quarantined,
        };
        let squeeze = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        let text = squeeze(&work(&[work_report(false, 0)], &[]));
        assert_eq!(text, "pipeline bursts hits marked dropped steered pipeline0 queue 1 5 4 2 3 1");
        let text = work(&[work_report(true, 7)], &[]);
        assert!(text.contains("the CPU has taken over") && text.contains("7 packet buffers"), "{text}");
        let queue = QueueReport {
            port: "pipeline0".into(),
            half: "rx".into(),
            queue: 1,
            drops: vec![("full".into(), 8), ("failed".into(), 9)],
            ..QueueReport::default()
        };
        let text = work(&[work_report(true, 0)], &[queue]);
        assert!(text.contains("9 packets in its memory were dropped"), "{text}");
    }
}

//! The reports of `offcore copy` as tables: what dpdk-dma prints, and where the cycles went.

use std::collections::BTreeMap;
use std::fmt::Write;

use offcore_flow::report::Report;

use crate::output::table::columns;
use crate::switch::report::{Line, channels, costs, heading};

/// What dpdk-dma calls a channel's three lines; here they are one. A failed copy was finished by the core.
const CHANNEL_HEADS: &str = "total submitted ops|total completed ops|total failed ops";

pub(super) fn tables(line: &Line<'_>) -> String {
    let report = line.report;
    let mut text = heading(line);
    text += &ports(report);
    text += &channels(&report.channels, CHANNEL_HEADS);
    text += &costs(line);
    text
}

/// What the queues of a port add up to: the cells of its line, and polls that found the pool dry.
type Sums = [f64; 11];
/// Where packets, million a second and Gbit/s begin.
const RECEIVED: usize = 0;
const COPIED: usize = 3;
const SENT: usize = 4;
/// Where they are dropped: on RX, on copy, on TX.
const DROPPED: [usize; 3] = [7, 8, 9];
const STARVED: usize = 10;

fn by_port(report: &Report) -> BTreeMap<usize, Sums> {
    let mut ports = BTreeMap::<usize, Sums>::new();
    let mut add = |port: &str, sums: &[(usize, f64)]| {
        let number = port.trim_start_matches(|c: char| !c.is_ascii_digit()).parse().unwrap_or_default();
        let port = ports.entry(number).or_default();
        sums.iter().for_each(|&(column, sum)| port[column] += sum);
    };
    for queue in &report.queues {
        let drops = queue.drops.iter().map(|(_, packets)| packets).sum::<u64>() as f64;
        if queue.port.starts_with("ring") {
            // What the ring of a port's RX queues had no room for.
            add(&queue.port, &[(DROPPED[1], drops)]);
            continue;
        }
        let (first, dropped) = if queue.half == "rx" { (RECEIVED, DROPPED[0]) } else { (SENT, DROPPED[2]) };
        let rates = [queue.packets_per_second / 1e6, queue.bits_per_second / 1e9];
        add(&queue.port, &[(first, queue.packets as f64), (first + 1, rates[0]), (first + 2, rates[1])]);
        add(&queue.port, &[(dropped, drops), (STARVED, queue.starved as f64)]);
    }
    for copy in &report.copies {
        let dropped = (copy.too_big + copy.no_buffer) as f64;
        let sums = [(COPIED, copy.packets as f64), (DROPPED[1], dropped), (STARVED, copy.starved as f64)];
        add(&copy.port, &sums);
    }
    ports
}

fn ports(report: &Report) -> String {
    let ports = by_port(report);
    let total: Sums = std::array::from_fn(|column| ports.values().map(|sums| sums[column]).sum());
    let row = |name: String, sums: &Sums| {
        let digits = |column| if [1, 2, 5, 6].contains(&column) { 3 } else { 0 };
        let cells = sums[..STARVED].iter().enumerate();
        let cells = cells.map(|(column, sum)| format!("{sum:.0$}", digits(column)));
        [name].into_iter().chain(cells).collect::<Vec<_>>()
    };
    let several = (ports.len() > 1).then(|| row("total".into(), &total));
    let mut text = columns(
        "<port|received|Mpps|Gbit/s|copied|sent|Mpps|Gbit/s|dropped on rx|on copy|on tx",
        ports.iter().map(|(number, sums)| row(format!("port{number}"), sums)).chain(several),
    );
    if total[STARVED] > 0.0 {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "  the pool was dry in {:.0} polls", total[STARVED]);
    }
    text
}

#[cfg(test)]
mod tests {
    use offcore_flow::report::{ChannelReport, CopyReport, QueueReport};

    use super::*;

    #[test]
    fn ports_add_up_and_drops_stay_apart() {
        let queue = |port: &str, half: &str, queue, packets, drops: u64| QueueReport {
            port: port.into(),
            half: half.into(),
            queue,
            packets,
            bytes: packets * 60,
            packets_per_second: packets as f64 * 1e6,
            bits_per_second: packets as f64 * 1e9,
            drops: (drops > 0).then(|| ("full".into(), drops)).into_iter().collect(),
            starved: 0,
        };
        let copy = |queue, packets| CopyReport {
            port: "port0".into(),
            queue,
            packets,
            bytes: 0,
            too_big: 1,
            no_buffer: 2,
            starved: 4,
        };
        let channel = ChannelReport {
            lcore: 0,
            channel: "dsa:wq0.0".into(),
            sharing: "bound".into(),
            submitted: 10,
            completed: 9,
            failed: 1,
            bytes: 600,
            in_flight: 0,
        };
        let report = Report {
            report: "interval",
            seconds: 1.0,
            tsc_hz: 1,
            queues: vec![
                queue("port0", "rx", 0, 5, 0),
                queue("port0", "rx", 1, 6, 1),
                queue("port0", "tx", 0, 4, 2),
                queue("ring0", "tx", 0, 4, 7),
                queue("ring0", "rx", 0, 4, 0),
                queue("port1", "rx", 0, 1, 0),
            ],
            copies: vec![copy(0, 5), copy(1, 6)],
            channels: vec![channel],
            ..Report::default()
        };
        let text = tables(&Line::interval(&report, &[]));
        let expected = "\
── 1.0 s
  port   received    Mpps  Gbit/s  copied  sent   Mpps  Gbit/s  dropped on rx  on copy  on tx
  port0        11  11.000  11.000      11     4  4.000   4.000              1       13      2
  port1         1   1.000   1.000       0     0  0.000   0.000              0        0      0
  total        12  12.000  12.000      11     4  4.000   4.000              1       13      2
  the pool was dry in 8 polls
  channel          shared by  total submitted ops  total completed ops  total failed ops  in flight  bytes
  lcore0 dsa:wq0.0  -                           10                    9                 1          0    600
";
        let squeeze = |text: &str| {
            text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect::<Vec<_>>()
        };
        assert_eq!(squeeze(&text)[..8], squeeze(expected)[..]);
    }
}

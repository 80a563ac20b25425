//! The reports of `offcore copy` as tables: what dpdk-dma prints, and where the cycles went.

use std::fmt::Write;

use offcore_flow::report::{QueueReport, Report};

use crate::report::{Line, channels, costs, heading};
use crate::table::columns;

/// What dpdk-dma calls a channel's three lines; here they are one. A failed copy was finished by the core.
const CHANNEL_HEADS: &str = "total submitted ops|total completed ops|total failed ops";

/// The report as tables.
pub(super) fn tables(line: &Line<'_>) -> String {
    let report = line.report;
    let mut text = heading(line);
    text += &ports(report);
    text += &channels(&report.channels, CHANNEL_HEADS);
    text += &costs(line);
    text
}

/// What one port's queues add up to.
#[derive(Clone, Debug, Default)]
struct Port {
    name: String,
    received: u64,
    received_per_second: f64,
    received_bits: f64,
    copied: u64,
    sent: u64,
    sent_per_second: f64,
    sent_bits: f64,
    dropped: [u64; 3],
    starved: u64,
}

/// Where packets are dropped.
const RX: usize = 0;
const COPY: usize = 1;
const TX: usize = 2;

fn of<'a>(ports: &'a mut Vec<Port>, name: &str) -> &'a mut Port {
    let index = ports.iter().position(|port| port.name == name).unwrap_or_else(|| {
        ports.push(Port { name: name.into(), ..Port::default() });
        ports.len() - 1
    });
    &mut ports[index]
}

fn by_port(report: &Report) -> Vec<Port> {
    let mut ports = Vec::new();
    let drops = |queue: &QueueReport| queue.drops.iter().map(|(_, packets)| packets).sum::<u64>();
    for queue in &report.queues {
        if let Some(number) = queue.port.strip_prefix("ring") {
            // What the ring of a port's RX queues had no room for.
            of(&mut ports, &format!("port{number}")).dropped[COPY] += drops(queue);
            continue;
        }
        let port = of(&mut ports, &queue.port);
        if queue.half == "rx" {
            port.received += queue.packets;
            port.received_per_second += queue.packets_per_second;
            port.received_bits += queue.bits_per_second;
            port.dropped[RX] += drops(queue);
            port.starved += queue.starved;
        } else {
            port.sent += queue.packets;
            port.sent_per_second += queue.packets_per_second;
            port.sent_bits += queue.bits_per_second;
            port.dropped[TX] += drops(queue);
        }
    }
    for copy in &report.copies {
        let port = of(&mut ports, &copy.port);
        port.copied += copy.packets;
        port.dropped[COPY] += copy.too_big + copy.no_buffer;
        port.starved += copy.starved;
    }
    ports.sort_by_key(|port| port.name.strip_prefix("port").and_then(|number| number.parse::<usize>().ok()));
    ports
}

fn ports(report: &Report) -> String {
    let ports = by_port(report);
    let mut total = Port { name: "total".into(), ..Port::default() };
    for port in &ports {
        total.received += port.received;
        total.received_per_second += port.received_per_second;
        total.received_bits += port.received_bits;
        total.copied += port.copied;
        total.sent += port.sent;
        total.sent_per_second += port.sent_per_second;
        total.sent_bits += port.sent_bits;
        total.starved += port.starved;
        for (sum, dropped) in total.dropped.iter_mut().zip(port.dropped) {
            *sum += dropped;
        }
    }
    let several = ports.len() > 1;
    let rows = ports.iter().chain(several.then_some(&total)).map(row);
    let mut text =
        columns("<port|received|Mpps|Gbit/s|copied|sent|Mpps|Gbit/s|dropped on rx|on copy|on tx", rows);
    if total.starved > 0 {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "  the pool was dry in {} polls", total.starved);
    }
    text
}

fn row(port: &Port) -> [String; 11] {
    let [rx, copy, tx] = port.dropped;
    [
        port.name.clone(),
        port.received.to_string(),
        format!("{:.3}", port.received_per_second / 1e6),
        format!("{:.3}", port.received_bits / 1e9),
        port.copied.to_string(),
        port.sent.to_string(),
        format!("{:.3}", port.sent_per_second / 1e6),
        format!("{:.3}", port.sent_bits / 1e9),
        rx.to_string(),
        copy.to_string(),
        tx.to_string(),
    ]
}

#[cfg(test)]
mod tests {
    use offcore_flow::report::{ChannelReport, CopyReport};

    use super::*;

    #[test]
    fn ports_are_added_up_and_drops_are_told_apart() {
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
            work: Vec::new(),
            channels: vec![channel],
            workers: Vec::new(),
            decisions: Vec::new(),
            bridge: None,
        };
        let text =
            tables(&Line { report: &report, ports: &[], stopped_by: None, unfinished: None, measured: None });
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

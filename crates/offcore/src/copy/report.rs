//! The reports of `offcore copy` as tables: dpdk-dma's counters, and the distribution of cycles.

use std::borrow::Cow;
use std::fmt::Write;

use offcore_flow::report::{QueueReport, Report};
use offcore_port::stats::is_port;

use crate::output::table::columns;
use crate::switch::report::{Line, channels, costs, heading, traffic};

pub(crate) fn tables(line: &Line<'_>) -> String {
    let report = line.report;
    let mut text = heading(line);
    text += &ports(report);
    text += &channels(&report.channels);
    text += &costs(line);
    text
}

/// Packet counters of one port, or of all.
#[derive(Default)]
struct Packets<'a> {
    received: Vec<&'a QueueReport>,
    sent: Vec<&'a QueueReport>,
    copied: u64,
    /// Drops on RX, on copy, and on TX.
    dropped: [u64; 3],
    /// Polls that found the pool empty.
    starved: u64,
}

impl<'a> Packets<'a> {
    /// Returns the name of a port, also for the ring behind its RX queues.
    fn port(name: &str) -> Cow<'_, str> {
        match name.strip_prefix("ring") {
            Some(number) if !is_port(name) => format!("port{number}").into(),
            _ => name.strip_suffix(">ring").unwrap_or(name).into(),
        }
    }

    /// Returns the counters of a port, or of all ports.
    fn of(report: &'a Report, port: Option<&str>) -> Self {
        let mut packets = Self::default();
        let is_it = |name: &str| port.is_none_or(|port| Self::port(name) == port);
        for queue in report.queues.iter().filter(|queue| is_it(&queue.port)) {
            let drops = queue.drops.iter().map(|(_, packets)| packets).sum::<u64>();
            if !is_port(&queue.port) {
                // Packets for which the ring of a port's RX queues had no room.
                packets.dropped[1] += drops;
                continue;
            }
            packets.starved += queue.starved;
            let (queues, dropped) = match &*queue.half {
                "rx" => (&mut packets.received, 0),
                _ => (&mut packets.sent, 2),
            };
            queues.push(queue);
            packets.dropped[dropped] += drops;
        }
        for copy in report.copies.iter().filter(|copy| is_it(&copy.port)) {
            packets.copied += copy.packets;
            packets.dropped[1] += copy.too_big + copy.no_buffer;
            packets.starved += copy.starved;
        }
        packets
    }

    fn row(&self, name: String, seconds: f64) -> Vec<String> {
        let [received, sent] = [&self.received, &self.sent].map(|queues| traffic(queues, seconds));
        let cells = [vec![name], received.into(), vec![self.copied.to_string()], sent.into()];
        cells.into_iter().flatten().collect()
    }

    /// Lists where packets were dropped, if any.
    fn drops(&self, name: &str) -> String {
        let dropped = self.dropped.iter().zip(["rx", "copy", "tx"]).filter(|(packets, _)| **packets > 0);
        let dropped: Vec<_> = dropped.map(|(packets, on)| format!("{packets} on {on}")).collect();
        if dropped.is_empty() { String::new() } else { format!("  {name} dropped {}\n", dropped.join(", ")) }
    }
}

/// Formats the packet counters of all ports, and of each port.
fn ports(report: &Report) -> String {
    let mut ports: Vec<&str> = Vec::new();
    for name in report.queues.iter().map(|queue| &*queue.port).filter(|name| is_port(name)) {
        if !ports.contains(&name) {
            ports.push(name);
        }
    }
    let all = Packets::of(report, None);
    let row = |packets: &Packets<'_>, name| packets.row(name, report.over_seconds);
    let sum = (ports.len() > 1).then(|| row(&all, "all".into()));
    let each = ports.iter().map(|&port| row(&Packets::of(report, Some(port)), port.into()));
    let heads = "<port|received|packets/s|bit/s (L1)|copied|sent|packets/s|bit/s (L1)";
    let mut text = columns(heads, sum.into_iter().chain(each));
    for &port in &ports {
        text += &Packets::of(report, Some(port)).drops(port);
    }
    if all.starved > 0 {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "  the pool was dry in {} polls", all.starved);
    }
    text
}

#[cfg(test)]
mod tests {
    use offcore_flow::report::{ChannelReport, CopyReport};

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
            over_seconds: 1.0,
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
  port   received  packets/s  bit/s (L1)  copied  sent  packets/s  bit/s (L1)
  all          12   12.000 M    14.304 G      11     4    4.000 M     4.768 G
  port0        11   11.000 M    13.112 G      11     4    4.000 M     4.768 G
  port1         1    1.000 M     1.192 G       0     0          0           0
  port0 dropped 1 on rx, 13 on copy, 2 on tx
  the pool was dry in 8 polls
  channel           shared by  copies submitted  completed  failed  in flight  bytes
  lcore0 dsa:wq0.0  -                        10          9       1          0    600
";
        let squeeze = |text: &str| {
            text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect::<Vec<_>>()
        };
        assert_eq!(squeeze(&text)[..9], squeeze(expected)[..]);
    }
}

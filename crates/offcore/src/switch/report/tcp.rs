//! The part of reports about a TCP/IP host.

use std::fmt::Write;

use offcore_flow::host::serve::ServeCounts;
use offcore_flow::report::{ConnectionReport, IfaceReport, Report, TcpReport};
use offcore_tcp::proto::StackCounts;

use crate::output::table::columns;

/// Formats each lcore's host.
pub(super) fn hosts(report: &Report) -> String {
    report.tcp.iter().map(host).collect()
}

/// Formats a line for each interface whose configuration comes from the network.
pub(super) fn interfaces(report: &Report) -> String {
    let learned = |iface: &&IfaceReport| {
        iface.addresses.iter().any(|address| matches!(address.origin, "dhcp" | "slaac"))
    };
    report.interfaces.iter().filter(learned).map(interface).collect()
}

fn interface(iface: &IfaceReport) -> String {
    let list = |all: &mut dyn Iterator<Item = String>| all.collect::<Vec<_>>().join(", ");
    let mut text =
        format!("  {}: {}", iface.port, list(&mut iface.addresses.iter().map(ToString::to_string)));
    for (what, all) in [("gateways", &iface.gateways), ("name servers", &iface.name_servers)] {
        if !all.is_empty() {
            let _ = write!(text, "; {what} {}", list(&mut all.iter().map(ToString::to_string)));
        }
    }
    if let Some(server) = iface.dhcp_server {
        let _ = write!(text, "; DHCP server {server}");
    }
    text + &format!("; MTU {}\n", iface.mtu)
}

/// Formats a row for each connection.
pub(super) fn connections(report: &Report) -> String {
    let Some(all) = &report.connections else { return String::new() };
    let mut text = rows(all);
    let total: u64 = report.tcp.iter().map(|host| host.stack.connections).sum();
    if total > all.len() as u64 {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "  {} connections are not shown", total - all.len() as u64);
    }
    text
}

/// Formats the number of connections, and errors. Rare events are only shown if they happened.
fn host(host: &TcpReport) -> String {
    let stack = &host.stack;
    let mut text = format!(
        "  tcp lcore{}: {} connections, {} accepted, {} opened; {:.1} of {:.0} MiB of FIFOs used\n",
        host.lcore,
        stack.connections,
        stack.accepted,
        stack.opened,
        stack.memory_used as f64 / f64::from(1 << 20),
        stack.memory as f64 / f64::from(1 << 20),
    );
    if let Some(serve) = &host.serve {
        text += &applications(serve);
    }
    let (received, sent) = (stack.datagrams_received, stack.datagrams_sent);
    if received + sent > 0 {
        let _ = writeln!(text, "  udp: {received} datagrams received, {sent} sent");
    }
    let (fast, timeout, probe) = (stack.again_fast, stack.again_timeout, stack.again_probe);
    if fast + timeout + probe > 0 {
        let _ = writeln!(text, "  retransmitted: {fast} fast, {timeout} after timeouts, {probe} as probes");
    }
    for (what, counts) in [("now", &now(stack)[..]), ("ended", &ended(stack)), ("seen", &seen(host))] {
        let found = counts.iter().filter(|(count, _)| *count > 0);
        let found = found.map(|(count, words)| format!("{count} {words}")).collect::<Vec<_>>().join(", ");
        if !found.is_empty() {
            let _ = writeln!(text, "  {what}: {found}");
        }
    }
    if !host.drops.is_empty() {
        let drops = host.drops.iter().map(|(reason, count)| format!("{reason} {count}"));
        let _ = writeln!(text, "  dropped by the stack: {}", drops.collect::<Vec<_>>().join(", "));
    }
    text
}

/// Describes the served applications in other processes.
fn applications(serve: &ServeCounts) -> String {
    let mut text = format!(
        "  applications: {} in {} processes, {} sessions; {} tokens, {} gates opened",
        serve.applications, serve.processes, serve.sessions, serve.tokens, serve.gates,
    );
    for (count, what) in [(serve.woken, "woken"), (serve.refused, "refused"), (serve.misused, "misused")] {
        if count > 0 {
            let _ = write!(text, ", {count} {what}");
        }
    }
    text + "\n"
}

/// Returns counters of present connections with their names in the output.
fn now(stack: &StackCounts) -> [(u64, &'static str); 2] {
    [(stack.half_open, "half open"), (stack.time_wait, "in TIME-WAIT")]
}

fn ended(stack: &StackCounts) -> [(u64, &'static str); 6] {
    [
        (stack.finished, "finished"),
        (stack.reset, "reset by the peer"),
        (stack.refused, "refused"),
        (stack.timed_out, "timed out"),
        (stack.unreachable, "unreachable"),
        (stack.aborted, "aborted"),
    ]
}

fn seen(TcpReport { stack, path, .. }: &TcpReport) -> [(u64, &'static str); 13] {
    [
        (stack.timeouts, "timeouts"),
        (stack.spurious, "spurious reductions undone"),
        (stack.reordered, "ACKs that showed reordering"),
        (stack.duplicates, "ACKs of duplicates"),
        (stack.bad_sacks, "SACK blocks of nothing in flight"),
        (stack.marks, "ECN marks heeded"),
        (stack.no_station, "segments without the next hop's station"),
        (stack.cookies_sent, "SYN cookies sent"),
        (stack.time_wait_evicted, "connections evicted from TIME-WAIT"),
        (stack.address_conflicts, "address conflicts"),
        (stack.datagrams_refused, "datagrams that could not be sent"),
        (path.fragments_dropped, "fragments not put together"),
        (path.starved, "packets not made for want of buffers"),
    ]
}

fn rows(all: &[ConnectionReport]) -> String {
    let rows = all.iter().map(|connection| {
        let ConnectionReport { received, unread, acknowledged, unacknowledged, mss, cwnd, .. } = connection;
        [
            connection.local.to_string(),
            connection.remote.to_string(),
            connection.state.to_string(),
            received.to_string(),
            unread.to_string(),
            acknowledged.to_string(),
            unacknowledged.to_string(),
            mss.to_string(),
            cwnd.to_string(),
            format!("{:.3}", connection.srtt as f64 / 1000.0),
            connection.again.to_string(),
        ]
    });
    columns("<local|<remote|<state|received|unread|sent|unacked|mss|cwnd|rtt, ms|retrans", rows)
}

#[cfg(test)]
mod tests {
    use offcore_tcp::path::PathStats;

    use super::*;

    #[test]
    fn host_report_lists_events_and_connections() {
        let host = TcpReport {
            lcore: 0,
            stack: StackCounts {
                connections: 3,
                accepted: 12,
                memory_used: 3 << 19,
                memory: 64 << 20,
                again_fast: 5,
                again_probe: 1,
                finished: 9,
                time_wait: 2,
                marks: 4,
                datagrams_received: 21,
                ..StackCounts::default()
            },
            path: PathStats { fragments_dropped: 2, ..PathStats::default() },
            drops: vec![("checksum".into(), 7)],
            serve: Some(ServeCounts {
                applications: 1,
                processes: 3,
                sessions: 8,
                tokens: 40,
                refused: 2,
                ..ServeCounts::default()
            }),
        };
        let connection = ConnectionReport {
            local: "10.0.0.2:7".parse().unwrap(),
            remote: "10.0.0.1:40000".parse().unwrap(),
            state: "ESTABLISHED",
            received: 1000,
            unread: 10,
            acknowledged: 900,
            unacknowledged: 90,
            mss: 1448,
            cwnd: 14480,
            srtt: 1234,
            again: 6,
        };
        let report = Report { tcp: vec![host], connections: Some(vec![connection]), ..Report::default() };
        let expected = "  \
  tcp lcore0: 3 connections, 12 accepted, 0 opened; 1.5 of 64 MiB of FIFOs used
  applications: 1 in 3 processes, 8 sessions; 40 tokens, 0 gates opened, 2 refused
  udp: 21 datagrams received, 0 sent
  retransmitted: 5 fast, 0 after timeouts, 1 as probes
  now: 2 in TIME-WAIT
  ended: 9 finished
  seen: 4 ECN marks heeded, 2 fragments not put together
  dropped by the stack: checksum 7
  local       remote          state        received  unread  sent  unacked   mss   cwnd  rtt, ms  retrans
  10.0.0.2:7  10.0.0.1:40000  ESTABLISHED      1000      10   900       90  1448  14480    1.234        6
  2 connections are not shown
";
        assert_eq!(hosts(&report) + &connections(&report), expected);
    }
}

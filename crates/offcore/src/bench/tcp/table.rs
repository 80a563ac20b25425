//! The tables of `offcore bench tcp`, one for each case.

use offcore_bench::row::Row;
use offcore_bench::tcp::{HEADERS, flows, neighbour, programs};

use super::super::verified;
use crate::output::kib;
use crate::output::table::{columns, digits, or_dash, times};

pub(super) fn table(rows: &[Row]) -> String {
    let is_visit = |row: &&Row| row.unit == "tsc_cycles_per_connection";
    let is_idle = |row: &&Row| row.idle_connections.is_some();
    let is_request = |row: &&Row| row.unit == "tsc_cycles_per_request";
    let is_http = |row: &&Row| row.unit == "million_requests_per_s";
    let is_path = |row: &&Row| row.path.is_some();
    let is_program = |row: &&Row| row.unit == programs::UNIT;
    let is_flows = |row: &&Row| row.unit == flows::UNIT;
    let is_neighbour = |row: &&Row| row.unit == neighbour::UNIT;
    let is_other =
        |row: &&Row| is_http(row) || is_path(row) || is_program(row) || is_flows(row) || is_neighbour(row);
    let is_veth = |row: &&Row| row.arrangement == "end-to-end" && !is_other(row);
    let of = |wanted: &dyn Fn(&&Row) -> bool| rows.iter().filter(wanted).collect::<Vec<_>>();
    let tables = [
        core_cost(&of(&|row| {
            !is_visit(row) && !is_idle(row) && !is_request(row) && row.arrangement != "end-to-end"
        })),
        idle(&of(&is_idle)),
        open_close(&of(&is_visit)),
        requests(&of(&is_request)),
        veth(&of(&is_veth)),
        paths(&of(&is_path)),
        many_flows(&of(&is_flows)),
        neighbours(&of(&is_neighbour)),
        http(&of(&is_http)),
        behind_tap(&of(&is_program)),
    ];
    let tables: Vec<String> = tables.into_iter().filter(|table| !table.is_empty()).collect();
    tables.join("\n")
}

/// Formats the cycles per segment or connection, with a mark if the clock was unsteady, and their spread.
fn cycles(row: &Row) -> [String; 2] {
    let mark = if row.unsteady > 0 { "!" } else { "" };
    [format!("{:.0}{mark}", row.cycles_per_packet), format!("{:.0}-{:.0}", row.min, row.max)]
}

fn percent(share: Option<f64>) -> String {
    or_dash(share.map(|share| format!("{:.0} %", share * 100.0)))
}

/// Formats the noise floor if the row has a ratio.
fn noise(row: &Row, ratio: Option<f64>) -> String {
    or_dash(ratio.and(row.noise_floor).map(|share| format!("{:.1} %", share * 100.0)))
}

/// Formats a ratio and its lower bound.
fn bounded(ratio: Option<f64>, lower: Option<f64>) -> String {
    or_dash(lower.map(|lower| format!("{} >{lower:.2}", times(ratio))))
}

/// Formats the core cost by copying engine.
fn core_cost(rows: &[&Row]) -> String {
    let cells = rows.iter().map(|row| {
        let [cycles, spread] = cycles(row);
        [
            row.case.clone(),
            row.temperature.clone(),
            or_dash(row.connections),
            or_dash(row.chunk.map(kib)),
            segment(row),
            row.mode.clone(),
            row.engine.clone(),
            row.copy_routine.clone().filter(|_| row.mode != "offload").unwrap_or_else(|| "-".into()),
            cycles,
            spread,
            format!("{:.1}", row.ns_per_packet),
            digits(row.both_ns_per_packet, 0),
            digits(row.payload_gbps, 1),
            percent(row.share_copy),
            or_dash(row.bound),
            times(row.offload_over_cpu),
            times(row.offload_over_cpu_both),
            times(row.auto_over_better),
            times(row.offload_over_cpu_median.or(row.auto_over_better_median)),
            noise(row, row.offload_over_cpu.or(row.auto_over_better)),
            verified(row),
        ]
    });
    let text = columns(
        "<side|<data|connections|chunk|segment|<mode|<engine|<routine|cycles|min-max|ns|both|Gbit/s|copy|<bottleneck|over cpu|\
             of both|auto|median|noise|verified",
        cells,
    );
    if text.is_empty() {
        return text;
    }
    text + "segment: bytes of payload, the mean; cycles, ns: what a segment costs the core of the host that sends or receives\n\
            it, with the acknowledgements, the median; both: with what the far host and both applications take, no engine,\n\
            the mean; Gbit/s: payload of that core alone, no network card's driver in it; copy: what part of its time copies\n\
            take, or their hand-over (receiving VPP: 36.5 %, Linux: 42 %, by the guide); data: what is copied is in the core's\n\
            own cache, in the other core's, or (cold) in none; bottleneck: of core and engine together; over cpu: the\n\
            speed offloaded over that copied by the core, of both: the same of that sum, auto: over that of the better of the\n\
            two, which alternated with it, as ratios of sums; median: that of the ratios of paired blocks; noise: how far\n\
            from 1 the ratio of what two equal links cost the core was in this run; verified: segments whose bytes were\n\
            checked.\n"
        + &windows_again(rows)
}

/// Returns a line about repeated windows, if any.
fn windows_again(rows: &[&Row]) -> String {
    match rows.iter().filter_map(|row| row.windows_again).sum() {
        0u64 => String::new(),
        n => format!("{n} windows were made anew, because segments were sent again in them or dropped.\n"),
    }
}

/// Formats the payload bytes per segment.
fn segment(row: &Row) -> String {
    row.payload_per_packet.map_or_else(|| (row.frame - HEADERS).to_string(), |bytes| format!("{bytes:.0}"))
}

/// Formats the rate of honest clients during attacks.
fn neighbours(rows: &[&Row]) -> String {
    let rate = |mega: f64| format!("{:.0}", mega * 1e6);
    let ms = |ns: Option<f64>| digits(ns.map(|ns| ns / 1e6), 1);
    let cells = rows.iter().map(|row| {
        [
            row.attack.unwrap_or_default().to_owned(),
            or_dash(row.attackers),
            or_dash(row.capacity_mpps.map(rate)),
            format!("{}{}", rate(row.mpps), if row.unsteady > 0 { "!" } else { "" }),
            percent(row.beside_over_alone),
            format!("{} to {}", percent(Some(row.min)), percent(Some(row.max))),
            percent(row.after_over_alone),
            percent(row.noise_floor),
            ms(row.peer_p99_ns),
            ms(row.p99_ns),
            row.lost.to_string(),
            verified(row),
        ]
    });
    let text = columns(
        "<attack|attackers|alone/s|beside/s|kept|of windows|after|noise|p99 alone ms|beside|failed|verified",
        cells,
    );
    if text.is_empty() {
        return text;
    }
    text + "alone/s, beside/s: files of 32 KB a second before and during the attack, by 4 clients, each file on a new connection;\n\
            attackers: the smallest number during the attack of their connection attempts a second (zero-windows,\n\
            half-requests: the server defends itself by resets), established connections (full-queues), programs\n\
            (claimed-marks, spinning) or listeners (descriptors); kept: the rate during the attack over the rate before or\n\
            after it, whichever is higher; after: the rate from 5 s after its end over the rate before it; noise: how far\n\
            from 1 the ratio of the halves of the windows before or after the attack is, whichever is larger; p99: a failed\n\
            request counts as 2 s; failed: requests of all phases without a complete answer, or without progress for 2 s;\n\
            verified: files of which every byte was compared. !: others used more than 5 % of a core. Attackers share the\n\
            core of the clients, which counts against the stack.\n"
}

/// Formats the cost of requested files by copying engine.
fn requests(rows: &[&Row]) -> String {
    let cells = rows.iter().map(|row| {
        let [cycles, spread] = cycles(row);
        let published = row.published.map(|times| format!("{times}x"));
        [
            row.temperature.clone(),
            or_dash(row.chunk.map(kib)),
            row.window.to_string(),
            row.mode.clone(),
            row.engine.clone(),
            cycles,
            spread,
            format!("{:.2}", row.ns_per_packet / 1e3),
            digits(row.both_ns_per_packet.map(|ns| ns / 1e3), 2),
            format!("{:.0}", row.mpps * 1e6),
            digits(row.payload_gbps, 1),
            percent(row.share_copy),
            or_dash(row.bound),
            times(row.offload_over_cpu),
            times(row.offload_over_cpu_median),
            or_dash(published),
            times(row.auto_over_better),
            noise(row, row.offload_over_cpu.or(row.auto_over_better)),
            verified(row),
        ]
    });
    let text = columns(
        "<data|size|at a time|<mode|<engine|cycles|min-max|us|both|requests/s|Gbit/s|copy|<bottleneck|over cpu|median|published|\
         auto|noise|verified",
        cells,
    );
    if text.is_empty() {
        return text;
    }
    text + "cycles, us: what a request of 64 bytes, the bytes that are sent for it and their acknowledgements cost the core of\n\
            the stack, the median; at a time: requests that come together, each on a connection; both: with the far host and\n\
            both applications, which copy to and from FIFOs. No network card's driver, no wake-ups of applications in other\n\
            processes, no answer's head, no engine. requests/s: of that core alone. Over cpu: the speed offloaded over that\n\
            copied by the core, as a ratio of sums; median: of the ratios of paired blocks; published: what the mTCP library\n\
            with DSA is said to gain, up to, where the application's copy is offloaded, too (the VPP guide draws bars without\n\
            numbers); the rest as in core-cost.\n"
        + &windows_again(rows)
}

/// Formats costs with idle connections.
fn idle(rows: &[&Row]) -> String {
    let cells = rows.iter().map(|row| {
        let [cycles, spread] = cycles(row);
        [
            row.case.clone(),
            row.temperature.clone(),
            or_dash(row.idle_connections),
            or_dash(row.chunk.map(kib)),
            segment(row),
            row.mode.clone(),
            row.engine.clone(),
            cycles,
            spread,
            format!("{:.1}", row.ns_per_packet),
            digits(row.payload_gbps, 1),
            bounded(row.beside_over_alone, row.beside_over_alone_lower),
            times(row.beside_over_alone_median),
            noise(row, row.beside_over_alone),
            verified(row),
        ]
    });
    let text = columns(
        "<side|<data|idle|chunk|segment|<mode|<engine|cycles|min-max|ns|Gbit/s|over alone|median|noise|verified",
        cells,
    );
    if text.is_empty() {
        return text;
    }
    text + "One connection with data, beside so many that are open and idle: over alone is its speed beside them over that\n\
            without any, which alternated with it, as a ratio of sums, and its lower bound at 90 %; the rest as in core-cost.\n"
}

/// Formats the cost of whole connections.
fn open_close(rows: &[&Row]) -> String {
    let cells = rows.iter().map(|row| {
        let [cycles, spread] = cycles(row);
        let per_second = format!("{:.0}", row.mpps * 1e6);
        let host = row.case.rsplit(' ').next().unwrap_or_default().to_owned();
        let us = format!("{:.2}", row.ns_per_packet / 1e3);
        [host, or_dash(row.connections), cycles, spread, us, per_second, verified(row)]
    });
    let text = columns("<host|open|cycles|min-max|us|a second|verified", cells);
    if text.is_empty() {
        return text;
    }
    text + "cycles, us: what a connection costs that host's core that is opened, used for a request and an answer of 64\n\
            bytes and closed, its application included, the median; open: connections that are open at the same time;\n\
            a second: connections of that core alone; verified: those whose request and answer were checked.\n"
}

/// Formats results compared with the kernel's TCP.
fn veth(rows: &[&Row]) -> String {
    let cells = rows.iter().map(|row| {
        let kernel = row.peer_median.map(|mpps| mpps * (row.frame - HEADERS) as f64 * 8.0 / 1e3);
        [
            row.case.clone(),
            or_dash(row.port),
            if row.offloads == Some(true) { "on" } else { "off" }.into(),
            digits(row.payload_gbps, 2),
            digits(kernel, 2),
            bounded(row.peer_ratio, row.peer_ratio_lower),
            noise(row, row.peer_ratio),
            digits(row.both_ns_per_kib, 0),
            digits(row.peer_both_ns_per_kib, 0),
            parts(row.ns_per_kib, row.far_ns_per_kib),
            parts(row.peer_ns_per_kib, row.peer_far_ns_per_kib),
            percent(row.far_busy),
            percent(row.peer_far_busy),
            or_dash(row.fe_bound.unwrap_or_default().then_some("far end")),
            format!("{:.1}", row.verified as f64 * (row.frame - HEADERS) as f64 / 1e9),
        ]
    });
    let parts = "near+far|kernel|far busy|kernel";
    let text = columns(
        &format!(
            "<side|<port|<offloads|Gbit/s|kernel|ratio|noise|ns/KiB|kernel|{parts}|<bottleneck|GB compared"
        ),
        cells,
    );
    if text.is_empty() {
        return text;
    }
    text + "A stream over veth between our host, which sends or receives, and the kernel's TCP; kernel: the same with the\n\
            kernel's in our place, in turns. Offloads off: each segment of 1448 bytes is a packet with its checksums, at both\n\
            ends. Gbit/s: payload; ratio: median of the ratios of paired windows, and its lower bound at 90 %; noise: how far\n\
            from 1 that of our windows to one another is, or of the kernel's. ns/KiB: what 1024 bytes take of both cores,\n\
            which had work, of the kernel: were busy; near+far: of the host's core, and of the other end's. A kernel receives\n\
            on the core that transmits, so that only the sum says what a stream costs. Bottleneck: the other end's core was busy\n\
            for more than 90 %. The kernel passes packets by reference, our port copies them out of the kernel and into it.\n\
            GB compared: of our windows, all that went over.\n"
}

/// Formats streams over slow, long and lossy paths.
fn paths(rows: &[&Row]) -> String {
    let cells = rows.iter().map(|row| {
        let kernel = row.peer_median.map(|mpps| mpps * (row.frame - HEADERS) as f64 * 8.0);
        [
            row.case.clone(),
            or_dash(row.path.clone()),
            digits(row.payload_gbps.map(|gbps| gbps * 1e3), 1),
            digits(kernel, 1),
            bounded(row.peer_ratio, row.peer_ratio_lower),
            noise(row, row.peer_ratio),
            format!("{:.0}", row.verified as f64 * (row.frame - HEADERS) as f64 / 1e6),
        ]
    });
    let text = columns("<side|<path|Mbit/s|kernel|ratio|noise|MB compared", cells);
    if text.is_empty() {
        return text;
    }
    text + "A stream through a relay (offcore switch) that limits, delays, drops and reorders packets in both directions,\n\
            between our host, which sends or receives, and the kernel's TCP; kernel: two kernels, in turns. Mbit/s: payload\n\
            from the first byte of a connection on, the median; ratio: median of the ratios of paired windows, and its lower\n\
            bound at 90 %; noise: how far from 1 that of our windows to one another is, or of the kernel's.\n"
}

/// Formats the ratio to the peer with its lower bound. Within the noise, where a bound is meaningless, it has a `?`.
fn beyond_noise(row: &Row) -> String {
    let says = |ratio: f64| row.noise_floor.is_some_and(|floor| (ratio - 1.0).abs() > floor);
    match row.peer_ratio {
        Some(ratio) if !says(ratio) => format!("{} ?", times(row.peer_ratio)),
        ratio => bounded(ratio, row.peer_ratio_lower),
    }
}

fn milliseconds(ns: Option<f64>) -> String {
    digits(ns.map(|ns| ns / 1e6), 2)
}

/// Formats results of many connections to nginx, compared with the kernel's stack.
fn many_flows(rows: &[&Row]) -> String {
    let cells = rows.iter().map(|row| {
        [
            row.case.clone(),
            or_dash(row.chunk.map(kib)),
            or_dash(row.connections),
            format!("{:.0}", row.median),
            digits(row.peer_median, 0),
            beyond_noise(row),
            noise(row, row.peer_ratio),
            milliseconds(row.p50_ns),
            milliseconds(row.peer_p50_ns),
            milliseconds(row.p99_ns),
            milliseconds(row.peer_p99_ns),
            row.verified.to_string(),
        ]
    });
    let heads = "<path|file|at once|connections/s|kernel|ratio|noise|p50 ms|kernel|p99 ms|kernel|compared";
    let text = columns(heads, cells);
    if text.is_empty() {
        return text;
    }
    text + "Connections that fetch a file from nginx with Debian's configuration, on our stack over af_packet and on the kernel's\n\
            (kernel), over veth or a relay (offcore switch), in turns. Stack and nginx share a core; client and relay have the\n\
            other. The last connection ends a window. Ratio: median of the ratios of paired windows, and its lower bound at 90 %;\n\
            ?: inside of the noise; noise: how far from 1 that of our windows to one another is, or of the kernel's. p50, p99:\n\
            from connect to the end of the stream, medians of the windows; a lost SYN takes a second. Compared: files whose\n\
            bytes were compared. Over veth the kernel passes files by reference; ours are copied.\n"
}

/// Formats results of nginx, compared with the kernel's stack.
fn http(rows: &[&Row]) -> String {
    let cells = rows.iter().map(|row| {
        [
            row.case.strip_prefix("http ").unwrap_or(&row.case).into(),
            or_dash(row.chunk.map(kib)),
            or_dash(row.connections),
            format!("{:.0}{}", row.median * 1e6, if row.unsteady > 0 { "!" } else { "" }),
            digits(row.peer_median.map(|rate| rate * 1e6), 0),
            beyond_noise(row),
            noise(row, row.peer_ratio),
            digits(row.server_us_per_request, 1),
            digits(row.peer_server_us_per_request, 1),
            digits(row.both_us_per_request, 1),
            digits(row.peer_both_us_per_request, 1),
            milliseconds(row.p50_ns),
            milliseconds(row.peer_p50_ns),
            milliseconds(row.p99_ns),
            milliseconds(row.peer_p99_ns),
            percent(row.far_busy),
            percent(row.peer_far_busy),
            or_dash(row.fe_bound.unwrap_or_default().then_some("wrk")),
            format!("{} of {}", row.verified, row.received),
        ]
    });
    let heads = "<file|size|connections|requests/s|kernel|ratio|noise|us|kernel|both us|kernel|p50 ms|kernel|p99 ms|kernel|\
                 wrk|kernel|<bottleneck|compared";
    let text = columns(heads, cells);
    if text.is_empty() {
        return text;
    }
    text + "nginx with Debian's configuration under wrk, on our stack over af_packet, and on the kernel's (kernel), over veth pairs alike, in\n\
            turns; stack and nginx share a core, wrk has the other. File: nginx has the kernel send it (sendfile; push: without\n\
            tcp_nopush), or reads and writes it (read); close: a connection for each request. Ratio: median of the ratios of\n\
            paired windows, and its lower bound at 90 %; ?: inside of the noise. us: what nginx and the stack used for a\n\
            request, by /proc; both: with wrk, which is what counts: a kernel receives on the core that transmits. wrk: what\n\
            part of its core it used; bottleneck: more than 90 %. !: others used more than 5 % of a core. Compared: answers of our\n\
            windows whose bytes were, by a client of eight connections beside wrk; of wrk's how long they are together. The\n\
            kernel sends files, and passes packets over veth, by reference; ours are copied to the FIFO, to packets and by the\n\
            port.\n"
}

/// Formats results of programs behind a TAP interface, compared with the kernel's stack.
fn behind_tap(rows: &[&Row]) -> String {
    let cells = rows.iter().map(|row| {
        [
            row.case.clone(),
            or_dash(row.connections),
            format!("{:.0}", row.median),
            digits(row.peer_median, 0),
            beyond_noise(row),
            noise(row, row.peer_ratio),
            row.verified.to_string(),
        ]
    });
    let text = columns("<program, client|connections|answers/s|kernel|ratio|noise|checked", cells);
    if text.is_empty() {
        return text;
    }
    text + "Programs on our stack, which holds the client's TAP, and on the kernel's (kernel), behind a TAP and a relay (offcore\n\
            switch), in turns. Program, stack and relay share a core, the client has the other. Answers: requests, or\n\
            transactions of pgbench. Ratio: median of the ratios of paired windows, and its lower bound at 90 %; ?: inside of the\n\
            noise; noise: how far from 1 that of our windows to one another is, or of the kernel's. Checked: answers compared\n\
            byte by byte, one before each window, or transactions whose sums were compared.\n"
}

/// Formats both cores' parts of a sum.
fn parts(near: Option<f64>, far: Option<f64>) -> String {
    or_dash(near.zip(far).map(|(near, far)| format!("{near:.0}+{far:.0}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_case_has_its_table() {
        let row = Row {
            bench: "tcp",
            case: "send".into(),
            frame: 1448 + HEADERS,
            mode: "offload".into(),
            engine: "core:1".into(),
            temperature: "cold".into(),
            chunk: Some(256 << 10),
            connections: Some(1),
            cycles_per_packet: 260.4,
            ns_per_packet: 130.2,
            both_ns_per_packet: Some(351.0),
            payload_per_packet: Some(1402.4),
            windows_again: Some(2),
            offload_over_cpu: Some(1.84),
            offload_over_cpu_median: Some(1.83),
            offload_over_cpu_both: Some(1.31),
            noise_floor: Some(0.021),
            received: 9,
            verified: 9,
            ..Row::default()
        };
        let text = table(std::slice::from_ref(&row));
        for words in [
            "send  cold            1   256K     1402  offload  core:1  -           260",
            " 351 ",
            "1.84x",
            "1.31x",
            "1.83x",
            "2.1 %",
            "2 windows were made anew",
        ] {
            assert!(text.contains(words), "{words}: {text}");
        }
        assert!(!text.contains("over alone") && !text.contains("a second"), "{text}");
        let beside = Row {
            idle_connections: Some(10_000),
            beside_over_alone: Some(0.97),
            beside_over_alone_lower: Some(0.96),
            unsteady: 1,
            ..row.clone()
        };
        let visits = Row {
            case: "open-close server".into(),
            unit: "tsc_cycles_per_connection",
            connections: Some(10_000),
            mpps: 0.1,
            ..row.clone()
        };
        let veth = Row {
            arrangement: "end-to-end",
            ns_per_kib: Some(200.2),
            far_ns_per_kib: Some(300.3),
            both_ns_per_kib: Some(500.8),
            fe_bound: Some(true),
            verified: 1_000_000,
            ..row.clone()
        };
        let text = table(&[veth]);
        for words in ["  200+300  ", "far end", "  1.4\n", "501"] {
            assert!(text.contains(words), "{words}: {text}");
        }
        let text = table(&[row, beside, visits]);
        for words in ["  10000   256K", "0.97x >0.96", " 260! ", "server  10000     260", "  100000  "] {
            assert!(text.contains(words), "{words}: {text}");
        }
        assert_eq!(text.matches("\n\n").count(), 2, "{text}");
    }
}

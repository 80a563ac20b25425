//! The tables of `offcore bench tcp`, one for each case.

use offcore_bench::row::Row;
use offcore_bench::tcp::{HEADERS, flows, neighbour, programs};

use super::super::columns::*;
use crate::output::table::{digits, or_dash, times};

pub(super) fn table(rows: &[Row]) -> String {
    let is_visit = |row: &&Row| row.figures.unit == "tsc_cycles_per_connection";
    let is_idle = |row: &&Row| row.tcp.idle_connections.is_some();
    let is_request = |row: &&Row| row.figures.unit == "tsc_cycles_per_request";
    let is_http = |row: &&Row| row.figures.unit == "million_requests_per_s";
    let is_path = |row: &&Row| row.tcp.path.is_some();
    let is_program = |row: &&Row| row.figures.unit == programs::UNIT;
    let is_flows = |row: &&Row| row.figures.unit == flows::UNIT;
    let is_neighbour = |row: &&Row| row.figures.unit == neighbour::UNIT;
    let is_other =
        |row: &&Row| is_http(row) || is_path(row) || is_program(row) || is_flows(row) || is_neighbour(row);
    let is_veth = |row: &&Row| row.head.arrangement == "end-to-end" && !is_other(row);
    let of = |wanted: &dyn Fn(&&Row) -> bool| rows.iter().filter(wanted).collect::<Vec<_>>();
    let tables = [
        core_cost(&of(&|row| {
            !is_visit(row) && !is_idle(row) && !is_request(row) && row.head.arrangement != "end-to-end"
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

/// Payload bytes per segment.
const SEGMENT: Column = ("segment", |row| {
    let payload = row.tcp.payload.payload_per_packet;
    payload.map_or_else(|| (row.head.frame - HEADERS).to_string(), |bytes| format!("{bytes:.0}"))
});
/// The ratio to the kernel and its lower bound.
const RATIO: Column = ("ratio", |row| bounded(row.peer.peer_ratio, row.peer.peer_ratio_lower));
/// The same. Within the noise, where a bound is meaningless, it has a `?`.
const BEYOND_NOISE: Column = ("ratio", |row| {
    let says = |ratio: f64| row.ratios.noise.noise_floor.is_some_and(|floor| (ratio - 1.0).abs() > floor);
    match row.peer.peer_ratio {
        Some(ratio) if !says(ratio) => format!("{} ?", times(row.peer.peer_ratio)),
        _ => RATIO.1(row),
    }
});
const PEER_NOISE: Column = ("noise", |row| noise(row, row.peer.peer_ratio));
const RATE: Column = ("requests/s", |row| format!("{:.0}", row.figures.mpps * 1e6));
/// Answers or connections per second, and the kernel's.
const ANSWERS: Column = ("answers/s", |row| format!("{:.0}", row.figures.spread.median));
const KERNEL: Column = ("kernel", |row| digits(row.peer.peer_median, 0));
const P50_MS: Column = ("p50 ms", |row| milliseconds(row.latency.p50_ns));
const P99_MS: Column = ("p99 ms", |row| milliseconds(row.latency.p99_ns));
/// The kernel's percentiles.
const PEER_P50: Column = ("kernel", |row| milliseconds(row.latency.peer_p50_ns));
const PEER_P99: Column = ("kernel", |row| milliseconds(row.latency.peer_p99_ns));

fn milliseconds(ns: Option<f64>) -> String {
    digits(ns.map(|ns| ns / 1e6), 2)
}

/// Formats both cores' parts of a sum.
fn parts(near: Option<f64>, far: Option<f64>) -> String {
    or_dash(near.zip(far).map(|(near, far)| format!("{near:.0}+{far:.0}")))
}

/// Returns millions of bytes that were compared.
fn compared(row: &Row) -> f64 {
    row.counts.verified as f64 * (row.head.frame - HEADERS) as f64 / 1e6
}

/// Returns Gbit/s of the kernel's payload.
fn kernel_gbps(row: &Row) -> Option<f64> {
    row.peer.peer_median.map(|mpps| mpps * (row.head.frame - HEADERS) as f64 * 8.0 / 1e3)
}

/// Returns a line about repeated windows, if any.
fn windows_again(rows: &[&Row]) -> String {
    match rows.iter().filter_map(|row| row.tcp.payload.windows_again).sum() {
        0u64 => String::new(),
        n => format!("{n} windows were repeated because of retransmitted or dropped segments.\n"),
    }
}

/// Formats the core cost by copying engine.
fn core_cost(rows: &[&Row]) -> String {
    let list: &[Column] = &[
        ("<side", CASE.1),
        DATA,
        OPEN,
        CHUNK,
        SEGMENT,
        MODE,
        ENGINE,
        ("<routine", |row| or_dash(row.core.copy_routine.as_ref().filter(|_| row.head.mode != "offload"))),
        CYCLES,
        SPREAD,
        NS,
        ("both", |row| digits(row.core.both_ns_per_packet, 0)),
        PAYLOAD,
        COPY,
        BOUND,
        OVER_CPU,
        ("of both", |row| times(row.ratios.offload.offload_over_cpu_both)),
        AUTO,
        ("median", |row| {
            let ratios = row.ratios;
            times(ratios.offload.offload_over_cpu_median.or(ratios.auto.auto_over_better_median))
        }),
        NOISE,
        VERIFIED,
    ];
    listed(
        rows,
        list,
        "segment: mean payload in bytes; cycles, ns: cost of a segment for the core of the host that sends or\n\
         receives it, including acknowledgements, the median; both: the same plus the time of the far host and both\n\
         applications, without the engine, the mean; Gbit/s: payload of that core alone, without the driver of a\n\
         network card; copy: share of the core's time for copies, or for their submission and completion (when\n\
         receiving, by the guide: 36.5 % for VPP, 42 % for Linux); data: location of the source: the core's own cache\n\
         (hot), the other core's cache (remote), or no cache (cold); bottleneck: the slower of core and engine; over\n\
         cpu: speed of mode offload relative to mode cpu; of both: the same for the times in column both; auto: speed\n\
         relative to the better of cpu and offload, which alternated with it; these are ratios of sums; median: the\n\
         median ratio of paired blocks; noise: deviation from 1 of the ratio of two equal links in this run;\n\
         verified: segments whose bytes were checked.\n",
    ) + &windows_again(rows)
}

/// Formats the rate of honest clients during attacks.
fn neighbours(rows: &[&Row]) -> String {
    let list: &[Column] = &[
        ("<attack", |row| row.load.attack.unwrap_or_default().to_owned()),
        ("attackers", |row| or_dash(row.load.attackers)),
        ("alone/s", |row| digits(row.load.capacity_mpps.map(|mega| mega * 1e6), 0)),
        ("beside/s", |row| RATE.1(row) + mark(row)),
        ("kept", |row| percent(row.tcp.beside.beside_over_alone)),
        ("of windows", KEPT.1),
        ("after", |row| percent(row.load.after_over_alone)),
        ("noise", |row| percent(row.ratios.noise.noise_floor)),
        ("p99 alone ms", |row| digits(row.latency.peer_p99_ns.map(|ns| ns / 1e6), 1)),
        ("beside", |row| digits(row.latency.p99_ns.map(|ns| ns / 1e6), 1)),
        ("failed", LOST.1),
        VERIFIED,
    ];
    listed(
        rows,
        list,
        "alone/s, beside/s: files of 32 KB per second before and during the attack, for 4 clients that open a\n\
         connection per file; attackers: the smallest number of their new connections per second during the attack\n\
         (zero-windows, half-requests: the server resets these connections), established connections (full-queues),\n\
         claims/s (claimed-marks), listeners (descriptors), MB/s (uploads, downloads) or programs; kept: rate during\n\
         the attack relative to the rate before or after it, whichever is higher; after: rate from 5 s after its end\n\
         relative to the rate before it; noise: deviation from 1 of the ratio of the two halves of the windows before\n\
         or after the attack, whichever is larger; p99: a failed request counts as 2 s; failed: requests of all\n\
         phases without a complete answer, or without progress for 2 s; verified: files whose bytes were all\n\
         compared. !: other programs used more than 5 % of a core. Hostile processes share the clients' core;\n\
         programs have a lower priority than the clients.\n",
    )
}

/// Formats the cost of requested files by copying engine.
fn requests(rows: &[&Row]) -> String {
    let list: &[Column] = &[
        DATA,
        ("size", CHUNK.1),
        ("at a time", |row| row.head.window.to_string()),
        MODE,
        ENGINE,
        CYCLES,
        SPREAD,
        ("us", |row| format!("{:.2}", row.figures.ns_per_packet / 1e3)),
        ("both", |row| digits(row.core.both_ns_per_packet.map(|ns| ns / 1e3), 2)),
        RATE,
        PAYLOAD,
        COPY,
        BOUND,
        OVER_CPU,
        ("median", |row| times(row.ratios.offload.offload_over_cpu_median)),
        ("published", |row| or_dash(row.published.published.map(|times| format!("{times}x")))),
        AUTO,
        NOISE,
        VERIFIED,
    ];
    listed(
        rows,
        list,
        "cycles, us: cost of a request of 64 bytes, of its answer and of their acknowledgements for the core of the\n\
         stack, the median; at a time: concurrent requests, each on its own connection; both: the same plus the time\n\
         of the far host and both applications, which copy to and from FIFOs. Not included: drivers of network cards,\n\
         wake-ups of other processes, heads of answers, the engine. requests/s: rate of that core alone; over cpu:\n\
         speed of mode offload relative to mode cpu, a ratio of sums; median: the median ratio of paired blocks;\n\
         published: the maximum gain that is claimed for the mTCP library with DSA, where the application's copy is\n\
         also offloaded (the VPP guide has bars without numbers); other columns as with core-cost.\n",
    ) + &windows_again(rows)
}

/// Formats costs with idle connections.
fn idle(rows: &[&Row]) -> String {
    let list: &[Column] = &[
        ("<side", CASE.1),
        DATA,
        ("idle", |row| or_dash(row.tcp.idle_connections)),
        CHUNK,
        SEGMENT,
        MODE,
        ENGINE,
        CYCLES,
        SPREAD,
        NS,
        PAYLOAD,
        ("over alone", |row| {
            let beside = row.tcp.beside;
            bounded(beside.beside_over_alone, beside.beside_over_alone_lower)
        }),
        ("median", |row| times(row.tcp.beside.beside_over_alone_median)),
        ("noise", |row| noise(row, row.tcp.beside.beside_over_alone)),
        VERIFIED,
    ];
    listed(
        rows,
        list,
        "One connection with data beside open idle connections. over alone: its speed relative to its speed without\n\
         idle connections, which alternated, as a ratio of sums, and its lower bound at 90 %; other columns as with\n\
         core-cost.\n",
    )
}

/// Formats the cost of whole connections.
fn open_close(rows: &[&Row]) -> String {
    let list: &[Column] = &[
        ("<host", |row| row.head.case.rsplit(' ').next().unwrap_or_default().to_owned()),
        ("open", OPEN.1),
        CYCLES,
        SPREAD,
        ("us", |row| format!("{:.2}", row.figures.ns_per_packet / 1e3)),
        ("a second", RATE.1),
        VERIFIED,
    ];
    listed(
        rows,
        list,
        "cycles, us: cost of a connection for that host's core, the median: it is opened, used for a request and an\n\
         answer of 64 bytes, and closed; the host's application is included; open: connections that are open at the\n\
         same time; a second: connections per second of that core alone; verified: connections whose request and\n\
         answer were checked.\n",
    )
}

/// Formats results compared with the kernel's TCP.
fn veth(rows: &[&Row]) -> String {
    let list: &[Column] = &[
        ("<side", CASE.1),
        ("<port", |row| or_dash(row.head.port)),
        ("<offloads", |row| if row.tcp.offloads == Some(true) { "on" } else { "off" }.into()),
        ("Gbit/s", |row| digits(row.tcp.payload.payload_gbps, 2)),
        ("kernel", |row| digits(kernel_gbps(row), 2)),
        RATIO,
        PEER_NOISE,
        ("ns/KiB", |row| digits(row.tcp.per_kib.both_ns_per_kib, 0)),
        ("kernel", |row| digits(row.tcp.per_kib.peer_both_ns_per_kib, 0)),
        ("near+far", |row| parts(row.tcp.per_kib.ns_per_kib, row.tcp.per_kib.far_ns_per_kib)),
        ("kernel", |row| parts(row.tcp.per_kib.peer_ns_per_kib, row.tcp.per_kib.peer_far_ns_per_kib)),
        ("far busy", |row| percent(row.tcp.payload.far_busy)),
        ("kernel", |row| percent(row.tcp.payload.peer_far_busy)),
        ("<bottleneck", |row| or_dash(row.ends.fe_bound.unwrap_or_default().then_some("far end"))),
        ("GB compared", |row| format!("{:.1}", compared(row) / 1e3)),
    ];
    listed(
        rows,
        list,
        "A stream over veth between our host, which sends or receives, and the kernel's TCP; kernel: the same with\n\
         the kernel's TCP in place of our host, in turns. Offloads off: each segment of 1448 bytes is a packet with\n\
         its own checksums, at both ends. Gbit/s: payload; ratio: median ratio of paired windows, with its lower\n\
         bound at 90 %; noise: deviation from 1 of the ratio between our windows, or between the kernel's, whichever\n\
         is larger; ns/KiB: busy time of both cores for 1024 bytes; near+far: of the host's core and of the other\n\
         end's core. A kernel receives on the core that transmits, so only the sum is the cost of a stream.\n\
         bottleneck: the far end's core was busy for more than 90 % of the time. The kernel passes packets by\n\
         reference; our port copies them out of the kernel and into it. GB compared: all data of our windows.\n",
    )
}

/// Formats streams over slow, long and lossy paths.
fn paths(rows: &[&Row]) -> String {
    let list: &[Column] = &[
        ("<side", CASE.1),
        ("<path", |row| or_dash(row.tcp.path.clone())),
        ("Mbit/s", |row| digits(row.tcp.payload.payload_gbps.map(|gbps| gbps * 1e3), 1)),
        ("kernel", |row| digits(kernel_gbps(row).map(|gbps| gbps * 1e3), 1)),
        RATIO,
        PEER_NOISE,
        ("MB compared", |row| format!("{:.0}", compared(row))),
    ];
    listed(
        rows,
        list,
        "A stream through a relay (offcore switch) that limits, delays, drops and reorders packets in both\n\
         directions, between our host, which sends or receives, and the kernel's TCP; kernel: between two kernels, in\n\
         turns. Mbit/s: payload from the first byte of a connection on, the median; ratio: median ratio of paired\n\
         windows, with its lower bound at 90 %; noise: deviation from 1 of the ratio between our windows, or between\n\
         the kernel's, whichever is larger.\n",
    )
}

/// Formats results of many connections to nginx, compared with the kernel's stack.
fn many_flows(rows: &[&Row]) -> String {
    let list: &[Column] = &[
        ("<path", CASE.1),
        ("file", CHUNK.1),
        ("at once", OPEN.1),
        ("connections/s", ANSWERS.1),
        KERNEL,
        BEYOND_NOISE,
        PEER_NOISE,
        P50_MS,
        PEER_P50,
        P99_MS,
        PEER_P99,
        ("compared", CHECKED.1),
    ];
    listed(
        rows,
        list,
        "Connections that fetch a file from nginx with Debian's configuration, on our stack over af_packet and on the\n\
         kernel's stack (kernel), over veth or a relay (offcore switch), in turns. Stack and nginx share a core;\n\
         client and relay share the other one. A window ends with its last connection. ratio: median ratio of paired\n\
         windows, with its lower bound at 90 %; ?: within the noise; noise: deviation from 1 of the ratio between our\n\
         windows, or between the kernel's, whichever is larger; p50, p99: from connect to the end of the stream,\n\
         medians of the windows; a lost SYN takes a second. compared: files whose bytes were compared. Over veth the\n\
         kernel passes files by reference; our stack copies them.\n",
    )
}

/// Formats results of nginx, compared with the kernel's stack.
fn http(rows: &[&Row]) -> String {
    let list: &[Column] = &[
        ("<file", |row| row.head.case.strip_prefix("http ").unwrap_or(&row.head.case).into()),
        ("size", CHUNK.1),
        OPEN,
        ("requests/s", |row| format!("{:.0}{}", row.figures.spread.median * 1e6, mark(row))),
        ("kernel", |row| digits(row.peer.peer_median.map(|rate| rate * 1e6), 0)),
        BEYOND_NOISE,
        PEER_NOISE,
        ("us", |row| digits(row.tcp.per_request.server_us_per_request, 1)),
        ("kernel", |row| digits(row.tcp.per_request.peer_server_us_per_request, 1)),
        ("both us", |row| digits(row.tcp.per_request.both_us_per_request, 1)),
        ("kernel", |row| digits(row.tcp.per_request.peer_both_us_per_request, 1)),
        P50_MS,
        PEER_P50,
        P99_MS,
        PEER_P99,
        ("wrk", |row| percent(row.tcp.payload.far_busy)),
        ("kernel", |row| percent(row.tcp.payload.peer_far_busy)),
        ("<bottleneck", |row| or_dash(row.ends.fe_bound.unwrap_or_default().then_some("wrk"))),
        ("compared", |row| format!("{} of {}", row.counts.verified, row.counts.received)),
    ];
    listed(
        rows,
        list,
        "nginx with Debian's configuration under wrk, on our stack over af_packet and on the kernel's stack (kernel),\n\
         over identical veth pairs, in turns. Stack and nginx share a core; wrk has the other one. file: nginx sends\n\
         it with sendfile (push: without tcp_nopush), or reads and writes it (read); close: a connection per request.\n\
         ratio: median ratio of paired windows, with its lower bound at 90 %; ?: within the noise. us: processor time\n\
         of nginx and stack per request, from /proc; both us: including wrk. Compare both us, because a kernel\n\
         receives on the core that transmits. wrk: share of its core that wrk used; bottleneck: more than 90 %. !:\n\
         other programs used more than 5 % of a core. compared: answers of our windows whose bytes were compared, by\n\
         a client with eight connections beside wrk; of wrk's answers only the total length is checked. The kernel\n\
         sends files, and passes packets over veth, by reference. On our stack they are copied into the FIFO, into\n\
         packets, and by the port.\n",
    )
}

/// Formats results of programs behind a TAP interface, compared with the kernel's stack.
fn behind_tap(rows: &[&Row]) -> String {
    let list: &[Column] = &[
        ("<program, client", CASE.1),
        OPEN,
        ANSWERS,
        KERNEL,
        BEYOND_NOISE,
        PEER_NOISE,
        ("checked", CHECKED.1),
    ];
    listed(
        rows,
        list,
        "Programs on our stack, which opens the client's TAP, and on the kernel's stack (kernel), behind a TAP and a\n\
         relay (offcore switch), in turns. Program, stack and relay share a core; the client has the other one.\n\
         answers: requests, or transactions of pgbench. ratio: median ratio of paired windows, with its lower bound\n\
         at 90 %; ?: within the noise; noise: deviation from 1 of the ratio between our windows, or between the\n\
         kernel's, whichever is larger; checked: answers that were compared byte by byte, one before each window, or\n\
         transactions whose sums were compared.\n",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use offcore_bench::row::{Counts, OffloadRatio};

    #[test]
    fn each_case_has_its_table() {
        let mut row = Row::default();
        (row.head.case, row.head.frame, row.head.temperature) =
            ("send".into(), 1448 + HEADERS, "cold".into());
        (row.head.mode, row.head.engine) = ("offload".into(), "core:1".into());
        (row.tcp.chunk, row.tcp.connections) = (Some(256 << 10), Some(1));
        (row.figures.cycles_per_packet, row.figures.ns_per_packet) = (260.4, 130.2);
        row.core.both_ns_per_packet = Some(351.0);
        (row.tcp.payload.payload_per_packet, row.tcp.payload.windows_again) = (Some(1402.4), Some(2));
        row.ratios.offload = OffloadRatio {
            offload_over_cpu: Some(1.84),
            offload_over_cpu_median: Some(1.83),
            offload_over_cpu_both: Some(1.31),
            ..OffloadRatio::default()
        };
        row.ratios.noise.noise_floor = Some(0.021);
        row.counts = Counts { received: 9, verified: 9, lost: 0 };
        let text = table(std::slice::from_ref(&row));
        for words in [
            "send  cold            1   256K     1402  offload  core:1  -           260",
            " 351 ",
            "1.84x",
            "1.31x",
            "1.83x",
            "2.1 %",
            "2 windows were repeated",
        ] {
            assert!(text.contains(words), "{words}: {text}");
        }
        assert!(!text.contains("over alone") && !text.contains("a second"), "{text}");
        let mut beside = row.clone();
        (beside.tcp.idle_connections, beside.clock.unsteady) = (Some(10_000), 1);
        beside.tcp.beside.beside_over_alone = Some(0.97);
        beside.tcp.beside.beside_over_alone_lower = Some(0.96);
        let mut visits = row.clone();
        (visits.head.case, visits.figures.unit) = ("open-close server".into(), "tsc_cycles_per_connection");
        (visits.tcp.connections, visits.figures.mpps) = (Some(10_000), 0.1);
        let mut veth = row.clone();
        (veth.head.arrangement, veth.ends.fe_bound) = ("end-to-end", Some(true));
        veth.tcp.per_kib.ns_per_kib = Some(200.2);
        veth.tcp.per_kib.far_ns_per_kib = Some(300.3);
        veth.tcp.per_kib.both_ns_per_kib = Some(500.8);
        veth.counts.verified = 1_000_000;
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

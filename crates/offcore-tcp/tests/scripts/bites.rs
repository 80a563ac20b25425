//! The runner fails if a script is wrong, and reports the position of the error.

use crate::run::run;

const GOOD: &str = "+0 listen
+0 < S 0:0(0) win 1000 <mss 1000>
+0 > S. 0:0(0) ack 1 win 65535 <mss 1460>
+.1 < . 1:1(0) ack 1 win 1000
+0 accept
+0 < P. 1:101(100) ack 1 win 1000
+.04 > . 1:1(0) ack 101 win 65435
+0 %{ mss == 1000, cwnd == 10 mss, state == ESTABLISHED }%
+0 read(1000) = 100
+.1 write(10)
+0 > P. 1:11(10) ack 101 win 65435
";

/// Returns the error message of the good script with `from` replaced by `to`.
fn message(from: &str, to: &str) -> String {
    assert!(GOOD.contains(from), "{from}");
    run("x.pkt", &GOOD.replace(from, to), true).expect_err(to)
}

#[test]
fn correct_script_passes() {
    assert_eq!(run("x.pkt", GOOD, true).map(|trace| trace.len()), Ok(3));
}

#[test]
fn wrong_segments_are_found() {
    let text = message("> . 1:1(0) ack 101 win 65435", "> . 2:2(0) ack 101 win 65435");
    let (expected, came) = text.split_once('\n').unwrap();
    assert_eq!(expected, "x.pkt:7: expected 0.140000 > . 2:2(0) ack 101 win 65435");
    assert!(came.starts_with("  came     0.140") && came.ends_with("> . 1:1(0) ack 101 win 65435"), "{came}");
    for (from, to) in [
        ("> . 1:1(0) ack 101 win 65435", "> . 1:1(0) ack 100 win 65435"),
        ("> . 1:1(0) ack 101 win 65435", "> . 1:1(0) ack 101 win 65434"),
        ("> P. 1:11(10)", "> P. 1:10(9)"),
        ("> P. 1:11(10)", "> . 1:11(10)"),
        ("> P. 1:11(10)", "> [ect0] P. 1:11(10)"),
        ("<mss 1460>", "<mss 1460,nop,wscale 8>"),
        ("<mss 1460>", ""),
    ] {
        assert!(message(from, to).contains("came"), "{to}");
    }
}

#[test]
fn missing_packets_are_found() {
    let text = message(
        "+0 > P. 1:11(10) ack 101 win 65435\n",
        "+0 > P. 1:11(10) ack 101 win 65435\n+0 > . 11:11(0) ack 101 win *\n",
    );
    assert!(text.starts_with("x.pkt:12: expected") && text.contains("nothing until"), "{text}");
}

#[test]
fn unexpected_packets_are_found() {
    let text = message("+0 > P. 1:11(10) ack 101 win 65435\n", "");
    assert!(text.starts_with("x.pkt:10: expected nothing more") && text.contains("> P. 1:11(10)"), "{text}");
    let text = message("+.04 > . 1:1(0) ack 101 win 65435\n", "+.1 expect readable\n");
    assert!(text.starts_with("x.pkt:7: expected nothing more") && text.contains("ack 101"), "{text}");
}

#[test]
fn wrong_times_are_found() {
    for time in ["+.03", "+.05", "+0~+.03", "+.05~+.1"] {
        let text = message("+.04 > .", &format!("{time} > ."));
        assert!(text.starts_with("x.pkt:7: expected"), "{text}");
    }
    for time in ["+0~+.05", "*"] {
        let script = GOOD.replace("+.04 > .", &format!("{time} > ."));
        assert_eq!(run("x.pkt", &script, true).err(), None);
    }
}

#[test]
fn wrong_bytes_are_found() {
    let text = message("ack 1 win 1000\n+.04", "ack 1 win 1000 altered\n+.04");
    assert!(text.starts_with("x.pkt:9: expected another byte at 1"), "{text}");
    let text = message("read(1000) = 100", "read(1000) = 99");
    assert_eq!(text, "x.pkt:9: expected to read 99 bytes, were 100");
}

#[test]
fn wrong_state_and_events_are_found() {
    let text = message("cwnd == 10 mss", "cwnd == 11 mss");
    assert!(text.starts_with("x.pkt:8: expected cwnd == 11 mss") && text.contains("10000"), "{text}");
    assert!(message("state == ESTABLISHED", "state != ESTABLISHED").contains("state"));
    assert!(message("+.1 write(10)", "+.1 expect end").starts_with("x.pkt:10: expected event end"));
    let reset = message("+.1 write(10)\n+0 > P. 1:11(10) ack 101 win 65435\n", "+0 < R 101:101(0) win 0\n");
    assert!(reset.contains("unexpected event closed(Reset)"), "{reset}");
}

#[test]
fn malformed_lines_are_rejected() {
    for (line, found) in [
        ("+x listen", "expected a time"),
        ("+0 lissten", "expected <, >"),
        ("+0 < Q 1:1(0) win 0", "'Q'"),
        ("+0 < . 1:2(0) ack 1 win 0", "make"),
        ("+0 < . 1:1(0) win 0", "go together"),
        ("+0 < . 1:1(0) ack 1", "'win"),
        ("+0 < . 1:1(0) ack 1 win 0 <wscal 7>", "'wscal'"),
        ("+0 < . 1:1(0) ack 1 win 0 <nop> what", "'what'"),
        ("+0 %{ cwnd = 1 }%", "expected =="),
        ("+0 %{ cwnd == 1 }% 2", "}%"),
        ("option ipv7", "ipv7"),
    ] {
        let text = run("x.pkt", &format!("\n{line}\n"), true).expect_err(line);
        assert!(text.starts_with("x.pkt:2: ") && text.contains(found), "{text}");
    }
}

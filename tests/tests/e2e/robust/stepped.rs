//! A process is killed after a given number of instructions of a call, as described in `tests/programs/steps.c`.
//! `OFFCORE_FULL=1` tests every instruction.

use peers::require;

use super::{Beside, NEEDS, full};

/// Number of points that one process of the program tests.
const AT_ONCE: usize = 100;

/// A call, the number of instructions between two points, and the minimum number of points.
type Call = (&'static str, usize, usize);

/// Kills processes in each of these calls.
fn kill_during(name: &str, calls: &[Call]) {
    let Some(()) = require(&NEEDS) else { return };
    let mut beside = Beside::new(name);
    let stack = beside.stack.stack.id().to_string();
    for &(call, stride, least) in calls {
        let stride = if full() { 1 } else { stride };
        let (mut points, mut ended) = (0, false);
        while !ended {
            let numbers = [stride, points * stride, AT_ONCE].map(|number| number.to_string());
            let [stride, from, most] = &numbers;
            let said = beside.stack.run("steps", &[&stack, call, stride, from, most]);
            let line = said.last().unwrap();
            let (here, rest) =
                line.trim_start_matches(call).trim_start_matches(": ").split_once(' ').unwrap();
            points += here.parse::<usize>().unwrap();
            ended = rest.starts_with("points, end");
            assert!(ended || rest == "points, more", "{said:?}");
            println!("{line}");
        }
        assert!(points >= least, "{call}: {points} points");
        beside.goes_on();
    }
    beside.stop();
}

#[test]
fn kills_during_stream_calls() {
    kill_during(
        "stepped-streams",
        &[
            ("send", 11, 50),
            ("sendfile", 50, 15),
            ("send_to_full", 97, 5),
            ("recv", 11, 50),
            ("read_part", 50, 10),
            ("recvmsg", 50, 20),
        ],
    );
}

#[test]
fn kills_during_session_setup() {
    kill_during(
        "stepped-made",
        &[
            ("connect", 97, 15),
            ("connect_in_set", 97, 20),
            ("attach", 199, 15),
            ("listen", 97, 20),
            ("accept", 50, 10),
            ("execute", 397, 10),
            ("receive_passed", 97, 10),
        ],
    );
}

#[test]
fn kills_during_session_teardown() {
    kill_during(
        "stepped-end",
        &[
            ("shutdown", 50, 10),
            ("shutdown_both", 50, 10),
            ("close", 11, 10),
            ("last_close", 11, 10),
            ("dup2", 50, 10),
            ("fork", 11, 10),
            ("forked", 50, 20),
            ("tcp_info", 50, 20),
            ("setsockopt", 19, 10),
        ],
    );
}

#[test]
fn kills_during_datagram_calls() {
    kill_during("stepped-datagrams", &[("sendto", 50, 15), ("recvfrom", 50, 15), ("first_sendto", 97, 20)]);
}

//! `offcore tcp` against the kernel's TCP with changed settings: each value of a setting is combined with each value of
//! every other setting.

use peers::{Netns, one_core};

use crate::tcp::{NEEDS, OURS, echo, host, stop};

/// Number of bytes per connection in each direction.
const LEN: usize = 2_000_000;

/// Names of settings below `/proc/sys/net/ipv4`.
const NAMES: [&str; 6] =
    ["tcp_sack", "tcp_timestamps", "tcp_window_scaling", "tcp_ecn", "tcp_congestion_control", "buffers"];

/// Every pair of values of two settings is in at least one row.
const ROWS: [[&str; 6]; 8] = [
    ["1", "1", "1", "0", "cubic", LARGE],
    ["1", "0", "0", "1", "reno", SMALL],
    ["0", "1", "1", "2", "reno", SMALL],
    ["0", "0", "0", "2", "cubic", LARGE],
    ["0", "1", "1", "1", "cubic", LARGE],
    ["0", "1", "0", "0", "cubic", SMALL],
    ["1", "0", "1", "0", "reno", LARGE],
    ["1", "1", "1", "2", "cubic", LARGE],
];

/// Minimum, default and maximum number of bytes of `tcp_rmem` and `tcp_wmem`.
const LARGE: &str = "4096 262144 6291456";
const SMALL: &str = "4096 16384 32768";

/// Sets a setting in the current thread's namespace. If the congestion control algorithm is not available, the current
/// one stays.
fn set(name: &str, value: &str) -> anyhow::Result<()> {
    let path = |name: &str| format!("/proc/sys/net/ipv4/{name}");
    let names = match name {
        "buffers" => vec!["tcp_rmem", "tcp_wmem"],
        "tcp_congestion_control" => {
            // A namespace can only use algorithms that the machine's administrator has allowed.
            let allowed = std::fs::read_to_string(path("tcp_allowed_congestion_control"))?;
            if !allowed.split_whitespace().any(|known| known == value) {
                eprintln!("a namespace may not have congestion control {value} here, only {allowed}");
                return Ok(());
            }
            vec![name]
        }
        _ => vec![name],
    };
    for name in names {
        std::fs::write(path(name), value)?;
        let found = std::fs::read_to_string(path(name))?;
        assert!(found.split_whitespace().eq(value.split_whitespace()), "{name} is {found}, not {value}");
    }
    Ok(())
}

#[test]
fn settings_cover_every_pair() {
    let values = |at: usize| ROWS.map(|row| row[at]);
    for one in 0..NAMES.len() {
        for other in one + 1..NAMES.len() {
            for (a, b) in values(one).into_iter().flat_map(|a| values(other).map(|b| (a, b))) {
                let found = ROWS.iter().any(|row| (row[one], row[other]) == (a, b));
                assert!(found, "{} {a} with {} {b}", NAMES[one], NAMES[other]);
            }
        }
    }
}

#[test]
fn kernel_peer_with_any_settings() {
    let Some(_core) = one_core(&NEEDS) else { return };
    let netns = Netns::new().unwrap();
    let offcore = host(&netns, "", &["--app", "echo:7000"]);
    for (number, row) in (0..).zip(ROWS) {
        let run = netns.within(|| {
            NAMES.iter().zip(row).try_for_each(|(name, value)| set(name, value))?;
            for address in OURS {
                echo(address, 7000, number, LEN);
            }
            Ok(())
        });
        run.unwrap_or_else(|error| panic!("{row:?}: {error:#}"));
    }
    stop(offcore);
}

//! Packet scripts in the language of packetdrill. Each line describes a received packet, a sent packet or another
//! event, in virtual time.
//!
//! A script is `DIRECTORY/NAME.pkt`. It is named after the requirement that it tests, and begins with a comment that
//! quotes the requirement: `// RFC 9293, 3.10.7.3: "..."`. `option` lines follow (`ipv6`, `newreno`, `no_ecn`,
//! `mtu BYTES`, `receive_window BYTES`), and then events:
//!
//! ```text
//! +0 listen                                      a call: connect, accept, write(N) = M, read(N) = M, close, abort,
//!                                                shutdown; nodelay; cork; uncork; write(N) more (MSG_MORE);
//!                                                user_timeout(MILLISECONDS); syncnt(N);
//!                                                flow N (another port of the peer)
//! +0 < S 0:0(0) win 1000 <mss 1460,sackOK>       a packet of the peer
//! +0 > S. 0:0(0) ack 1 win 65535 <...>           a packet that is expected now; options `<...>`: any, `win *`: any
//! +.1 < [ce] . 1:101(100) ack 1 win 1000         0.1 s later; with a mark of ECN
//! +.04~+.2 > . 1:1(0) ack 101 win *              between 40 and 200 ms later; `*`: at any time
//! +0 < icmp unreachable port [1:101(100)]        an error about a segment of ours
//! +0 expect closed(Reset)                        an event that the application is told; `expect no NAME`
//! +0 engine hold                                 copies that are ordered are not made; release; fail: the core has to
//! +0 %{ cwnd == 10 mss, state == ESTABLISHED }%  fields of the connection; drops.NAME; connections
//! +0 renumber                                    the next SYN of ours begins a new sequence space
//! ```
//!
//! Sequence numbers are relative to the initial sequence number of their side, as in packetdrill. Our timestamps are
//! relative to the first one, whose value the script defines. A packet may end with `altered` (the payload differs from
//! the stream) or `bad_checksum`. Each sent packet must be expected, and its payload and checksums must be right. All
//! scripts were written for this project.

#![allow(clippy::unwrap_used, reason = "a test that panics has failed")]

mod bed;
mod bites;
mod frames;
mod language;
mod parse;
mod run;

use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scripts")
}

/// Returns the scripts in a directory.
fn scripts(directory: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(root().join(directory)).unwrap();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths
}

/// Runs a script with an engine and, unless it has engine commands, also with the core. In both cases, the host must
/// send the same bytes at the same times.
fn both_ways(name: &str, text: &str) -> Result<(), String> {
    let offloaded = run::run(name, text, true)?;
    if text.lines().any(|line| line.contains(" engine ")) {
        return Ok(());
    }
    let plain = run::run(name, text, false).map_err(|error| format!("{error}\n  with the core copying"))?;
    match plain.iter().zip(&offloaded).position(|(a, b)| a != b) {
        None if plain.len() == offloaded.len() => Ok(()),
        at => Err(format!("{name}: packet {at:?} is another one with an engine copying")),
    }
}

/// Runs all scripts of a directory and reports their failures.
fn directory(directory: &str) {
    let mut failures = Vec::new();
    let paths = scripts(directory);
    for path in &paths {
        let name = path.strip_prefix(root()).unwrap().display().to_string();
        let text = std::fs::read_to_string(path).unwrap();
        let result = both_ways(&format!("tests/scripts/{name}"), &text);
        println!("script {name} ... {}", if result.is_ok() { "ok" } else { "FAILED" });
        failures.extend(result.err());
    }
    let (failed, all) = (failures.len(), paths.len());
    assert!(all > 0, "{directory} has no scripts");
    assert!(failures.is_empty(), "{failed} of {all} scripts fail\n\n{}\n", failures.join("\n\n"));
}

macro_rules! directories {
    ($($name:ident)*) => {
        $(
            #[test]
            fn $name() {
                directory(stringify!($name));
            }
        )*

        const DIRECTORIES: &[&str] = &[$(stringify!($name)),*];
    };
}

directories! {
    close
    ecn
    engine
    handshake
    icmp
    options
    receive
    recovery
    reset
    send
    v6
}

#[test]
fn every_script_runs_and_cites_rfc() {
    for entry in std::fs::read_dir(root()).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        assert!(!path.is_dir() || DIRECTORIES.contains(&name), "{name} is not in the list of directories");
    }
    for path in DIRECTORIES.iter().flat_map(|directory| scripts(directory)) {
        let text = std::fs::read_to_string(&path).unwrap();
        let path = path.display();
        let comment: Vec<&str> = text.lines().take_while(|line| line.starts_with("// ")).collect();
        let source = comment.first().and_then(|first| first.strip_prefix("// RFC "));
        let source =
            source.and_then(|source| source.split_once(", ")).filter(|(_, rest)| rest.contains(": "));
        let is_named = source.is_some_and(|(number, _)| number.parse::<u16>().is_ok());
        assert!(is_named, "{path} begins with {comment:?}, expected '// RFC N, SECTION: \"...\"'");
        assert!(
            comment.concat().matches('"').count() >= 2,
            "{path} does not quote the sentence that it tests"
        );
    }
}

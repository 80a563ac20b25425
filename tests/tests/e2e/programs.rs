//! Programs that try the socket calls (`tests/programs`), on the kernel's stack: what they print is the same each time, so
//! that it can be held against another stack's.

use peers::programs::difference;
use peers::{Link, Need, require};

/// Runs a program twice and compares; `lines` is how many it prints at least, so that none falls silent.
fn same_twice(name: &str, lines: usize) {
    let Some(()) = require(&[Need::Root, Need::Ip, Need::Cc]) else { return };
    let link = Link::with_kernel().unwrap();
    let [first, second] = [(); 2].map(|()| link.run(name, &[]).unwrap());
    assert_eq!(difference(&first, &second), None, "{name}");
    assert!(first.len() >= lines, "{name}: {} lines", first.len());
}

#[test]
fn connect() {
    same_twice("connect", 70);
}

#[test]
fn descriptors() {
    same_twice("descriptors", 100);
}

#[test]
fn ending() {
    same_twice("ending", 135);
}

#[test]
fn files() {
    same_twice("files", 60);
}

#[test]
fn fortify() {
    same_twice("fortify", 13);
}

#[test]
fn listen() {
    same_twice("listen", 100);
}

#[test]
fn options() {
    same_twice("options", 230);
}

#[test]
fn polling() {
    same_twice("polling", 110);
}

#[test]
fn processes() {
    same_twice("processes", 90);
}

#[test]
fn stdio() {
    same_twice("stdio", 40);
}

#[test]
fn stream() {
    same_twice("stream", 105);
}

#[test]
fn threads() {
    same_twice("threads", 65);
}

#[test]
fn udp() {
    same_twice("udp", 160);
}

//! Programs that test socket calls (`tests/programs`). Their output is the same in each run on the kernel's stack, and
//! [the same on Offcore's stack](on_stack).

pub(super) mod on_stack;

use peers::programs::difference;
use peers::{Link, Need, require};

/// Runs a program twice and compares the output. It must have at least `lines` lines, to detect a program that prints
/// nothing.
fn same_twice(name: &str, lines: usize) {
    let Some(()) = require(&[Need::Root, Need::Ip, Need::Cc]) else { return };
    let link = Link::with_kernel().unwrap();
    let [first, second] = [(); 2].map(|()| link.run(name, &[]).unwrap());
    assert_eq!(difference(&first, &second), None, "{name}");
    assert!(first.len() >= lines, "{name}: {} lines", first.len());
}

#[test]
fn connect() {
    same_twice("connect", 111);
}

#[test]
fn control() {
    same_twice("control", 182);
}

#[test]
fn cork() {
    same_twice("cork", 58);
}

#[test]
fn descriptors() {
    same_twice("descriptors", 103);
}

#[test]
fn ending() {
    same_twice("ending", 138);
}

#[test]
fn epoll() {
    same_twice("epoll", 139);
}

#[test]
fn errors() {
    same_twice("errors", 158);
}

#[test]
fn exhausted() {
    same_twice("exhausted", 12);
}

#[test]
fn files() {
    same_twice("files", 75);
}

#[test]
fn fortify() {
    same_twice("fortify", 26);
}

#[test]
fn listen() {
    same_twice("listen", 109);
}

#[test]
fn multicast() {
    same_twice("multicast", 108);
}

#[test]
fn options() {
    same_twice("options", 373);
}

#[test]
fn polling() {
    same_twice("polling", 23);
}

#[test]
fn processes() {
    same_twice("processes", 68);
}

#[test]
fn servers() {
    same_twice("servers", 49);
}

#[test]
fn stdio() {
    same_twice("stdio", 43);
}

#[test]
fn stream() {
    same_twice("stream", 216);
}

#[test]
fn threads() {
    same_twice("threads", 77);
}

#[test]
fn udp() {
    same_twice("udp", 169);
}

/// Tests the same program on Offcore's stack.
macro_rules! on_stack {
    ($($name:ident)*) => {
        mod under_exec {
            $(
                #[test]
                fn $name() {
                    super::on_stack::same_on_stack(stringify!($name));
                }
            )*
        }
    };
}

on_stack! { connect control cork descriptors ending epoll errors exhausted files fortify listen multicast options polling processes servers stdio stream threads udp }

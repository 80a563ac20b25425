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

/// Defines a test of each program. The program's output must have at least this number of lines.
macro_rules! programs {
    ($($name:ident $lines:literal,)+) => {$(#[test] fn $name() { same_twice(stringify!($name), $lines); })+};
}

programs! {
    connect 111, control 182, cork 58, descriptors 103, ending 138, epoll 139, errors 158, exhausted 12,
    files 75, fortify 26, listen 109, multicast 108, options 373, polling 23, processes 68, servers 49,
    stdio 43, stream 216, threads 77, udp 169,
}

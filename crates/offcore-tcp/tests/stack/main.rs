//! Tests of two complete stacks against each other, in virtual time.

#![allow(clippy::unwrap_used, reason = "a test that panics has failed")]

mod answers;
mod apps;
mod attacks;
mod budgets;
mod buffers;
mod cookies;
mod endings;
mod foreign;
mod frame;
mod host;
mod hostile;
mod loopback;
mod options;
mod paths;
#[path = "../../../../fuzz/replay.rs"]
mod replay;
mod runs;
mod scale;
mod streams;
mod users;
mod windows;
mod world;

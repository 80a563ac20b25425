//! Tests of applications in other processes: the poll events of their sessions, and the end of sessions and
//! applications.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod awake;
mod calls;
mod datagrams;
mod door;
mod kernels;
mod lingering;
mod listening;
mod ports;
mod process;
mod processes;
mod raw;
mod setup;
mod streams;
mod turns;
mod waking;
#[path = "../apps/world.rs"]
mod world;

//! Applications in other processes: what their ends of sessions show, and what becomes of them.
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

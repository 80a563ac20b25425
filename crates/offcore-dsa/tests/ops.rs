//! Operations: their descriptors byte for byte, and their results, whoever computes them.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "ops/descriptors.rs"]
mod descriptors;
#[path = "ops/on_core.rs"]
mod on_core;
#[path = "ops/on_simulator.rs"]
mod on_simulator;

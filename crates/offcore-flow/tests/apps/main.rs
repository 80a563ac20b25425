//! Applications on a host, and peers that want too much of them.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod http;
mod streams;
mod world;

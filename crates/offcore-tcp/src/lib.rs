//! A TCP/IP host stack whose payload copies are made by engines.
//!
//! [`proto`] is the protocols, without I/O and without a clock: packets' heads and the time go in; verdicts, plans of
//! copies and events come out. Payload never crosses that line. [`path`] is the stack among packets and copy queues.
//! [`writes`] is what an application has an engine copy into its send FIFOs.

#![deny(unsafe_code)]

pub mod path;
pub mod proto;
#[allow(unsafe_code, reason = "copies are ordered here")]
pub mod writes;

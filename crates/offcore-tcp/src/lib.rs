//! A TCP/IP host stack whose payload copies are made by engines.
//!
//! [`proto`] is the protocols, without I/O and without a clock: packets' heads and the time go in; verdicts, plans of
//! copies and events come out. Payload never crosses that line.

#![forbid(unsafe_code)]

pub mod proto;

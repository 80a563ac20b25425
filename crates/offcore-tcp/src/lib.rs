//! A TCP/IP host stack that offloads payload copies to DMA engines.
//!
//! [`proto`] contains the protocols. It has neither I/O nor a clock: its inputs are packet headers and the time, its
//! outputs are verdicts, copy plans and events. Payload never enters it. [`path`] connects the stack to packets and
//! copy queues. [`writes`] offloads the copies from application buffers to send FIFOs.

#![deny(unsafe_code)]

pub mod path;
pub mod proto;
#[allow(unsafe_code, reason = "copies are ordered here")]
pub mod writes;

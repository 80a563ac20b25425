//! Receive, copy into a new buffer, give on: the stage that makes a switch the dpdk-dma application.
//!
//! The stage itself is an RX queue around another one, and lives with the queues: [`offcore_port::copy`].

pub use offcore_port::copy::{CopyCount, CopyRx, CopySetup};

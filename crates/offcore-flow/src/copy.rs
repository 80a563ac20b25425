//! The copy stage: received packets are copied into new buffers and passed on. With this stage, a switch does the same
//! as the dpdk-dma application.
//!
//! The stage is an RX queue that wraps another one. It is implemented with the queues: [`offcore_port::copy`].

pub use offcore_port::copy::{COPY, CopyCounts, CopyRx, CopySetup};

//! Intel Data Streaming Accelerator.
//!
//! * [`descriptor`], [`completion`]: what software and device exchange, byte for byte,
//! * [`wq`]: what a work queue can do, as the kernel or the simulator tells it,
//! * [`portal`]: the door through which descriptors go: MOVDIR64B, ENQCMD, write(), or the simulator,
//! * [`driver`]: finding work queues, and the copy engine over one of them,
//! * [`ops`]: fill, compare, CRC32C and the like, with the core where the device lacks them,
//! * [`config`]: accel-config's profiles, presets and rules,
//! * [`doctor`], [`explain`]: what is wrong with a set-up, and what a status code means, in words,
//! * [`sim`]: the device as the specification has it. What ran on it is labelled `dsa-sim`.

pub mod completion;
mod compute;
pub mod config;
pub mod descriptor;
pub mod doctor;
pub mod driver;
pub mod explain;
pub mod ops;
pub mod portal;
pub mod sim;
pub mod wq;

pub use completion::{CompletionRecord, Status};
pub use descriptor::{Descriptor, Flags, Opcode};
pub use portal::{Portal, Submitted};
pub use wq::{WqInfo, WqMode};

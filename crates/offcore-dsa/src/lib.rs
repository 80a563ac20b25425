//! Driver and software model of the Intel Data Streaming Accelerator (DSA).
//!
//! * [`descriptor`], [`completion`]: the structures that software and device exchange, byte for byte,
//! * [`wq`]: the capabilities of a work queue, as the kernel or the simulator reports them,
//! * [`portal`]: submission of descriptors by MOVDIR64B, ENQCMD, write() or to the simulator,
//! * [`driver`]: discovery of work queues, and the copy engine over a work queue,
//! * [`ops`]: fill, compare, CRC32C and other operations, computed by the CPU core where the device lacks them,
//! * [`config`]: accel-config's profiles, presets and rules,
//! * [`doctor`], [`explain`]: problems of a set-up, and the meaning of status codes, in words,
//! * [`sim`]: a simulated device that follows the specification. Its results are labelled `dsa-sim`.

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
pub use portal::{Portal, SubmitResult};
pub use wq::{WqInfo, WqMode};

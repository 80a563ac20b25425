//! Every operation of the device, with the core where the device lacks it.
//!
//! * [`Engine`]: operations on one work queue: synchronous on slices ([`Engine::copy`], [`Engine::crc`]),
//!   or any
//!   [`Operation`] on raw memory, submitted and polled,
//! * [`encode`]: the exact descriptor of every operation,
//! * [`software`]: what the operations compute, on slices: the core's way, and the simulator's.
//!
//! ```
//! use offcore_dsa::ops::{DoneBy, Engine, Why};
//!
//! let mut engine = Engine::core();
//! let crc = engine.crc(b"123456789", Default::default(), 0)?;
//! assert_eq!(crc.value, 0xe306_9283);
//! assert_eq!(crc.done_by, DoneBy::Core(Why::NoDevice));
//! # Ok::<(), offcore_dsa::ops::OpsError>(())
//! ```

mod calls;
pub mod encode;
mod engine;
mod operation;
mod outcome;
mod progress;
pub mod software;
mod stand_in;

pub use engine::{Completion, Engine, Options, Ticket};
pub use operation::{Destination, Expected, Operation, Source};
pub use outcome::{Delta, Done, DoneBy, OpsError, Value, Why};

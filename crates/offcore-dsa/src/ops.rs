//! Operations of a work queue: copy, fill, compare, CRC32C. The CPU core executes operations that the device does not
//! support.
//!
//! An [`Operation`] is passed to [`Engine::run`], which waits for it, or to [`Engine::submit`]; then [`Engine::poll`]
//! returns its result. The result is a [`Done`].
//!
//! ```
//! use offcore_dsa::ops::{DoneBy, Engine, Operation, Why};
//!
//! let mut engine = Engine::core();
//! let src = b"123456789"[..].into();
//! let done = engine.run(Operation::Crc { src, seed: 0 })?;
//! assert_eq!(done.crc, 0xe306_9283);
//! assert_eq!(done.done_by, DoneBy::Core(Why::NoDevice));
//! # Ok::<(), offcore_dsa::ops::OpsError>(())
//! ```

mod engine;
mod operation;
mod outcome;
mod progress;

pub use engine::{Completion, Engine, Options, Ticket};
pub use operation::{Destination, Operation, Source};
pub use outcome::{Done, DoneBy, OpsError, Why};

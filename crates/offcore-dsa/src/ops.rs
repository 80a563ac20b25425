//! Operations of one work queue: copy, fill, compare, CRC32C, copy with CRC32C, dualcast. What the device cannot do,
//! the core does.
//!
//! There is one way to ask for one: an [`Operation`] goes to [`Engine::run`], which waits for it, or to
//! [`Engine::submit`], and [`Engine::poll`] returns it. What comes back is [`Done`].
//!
//! ```
//! use offcore_dsa::ops::{Crc, DoneBy, Engine, Operation, Why};
//!
//! let mut engine = Engine::core();
//! let src = b"123456789"[..].into();
//! let done = engine.run(Operation::Crc { src, crc: Crc::default(), seed: 0 })?;
//! assert_eq!(done.crc, 0xe306_9283);
//! assert_eq!(done.done_by, DoneBy::Core(Why::NoDevice));
//! # Ok::<(), offcore_dsa::ops::OpsError>(())
//! ```

mod crc;
mod engine;
mod operation;
mod outcome;
mod pattern;
mod progress;

pub use crc::Crc;
pub use engine::{Completion, Engine, Options, Ticket};
pub use operation::{Destination, Operation, Source};
pub use outcome::{Done, DoneBy, OpsError, Why};
pub use pattern::Pattern;

/// The offset of the first byte in which the two differ, over the length of the shorter one.
pub(crate) fn compare(first: &[u8], second: &[u8]) -> Option<usize> {
    const STEP: usize = 64;
    let len = first.len().min(second.len());
    let (first, second) = (&first[..len], &second[..len]);
    let equal = first.chunks(STEP).zip(second.chunks(STEP)).take_while(|(a, b)| a == b).count() * STEP;
    let start = equal.min(len);
    first[start..].iter().zip(&second[start..]).position(|(a, b)| a != b).map(|at| start + at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_first_difference_is_found(
            bytes in prop::collection::vec(any::<u8>(), 1..400), at: prop::sample::Index,
        ) {
            let at = at.index(bytes.len());
            let mut other = bytes.clone();
            prop_assert_eq!(compare(&bytes, &other), None);
            other[at..].iter_mut().for_each(|byte| *byte ^= 0x80);
            prop_assert_eq!(compare(&bytes, &other), Some(at));
        }
    }
}

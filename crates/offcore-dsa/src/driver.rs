//! Discovery of work queues, and the copy engine over a work queue.
//!
//! * [`discover`]: the work queues in sysfs, and the reason why a queue cannot be used, in words,
//! * [`DsaDevice`]: an [`offcore_dma::CopyDevice`] over a work queue, real or simulated,
//! * [`DsaChannel`]: the part of it that a worker owns.

mod channel;
mod device;
pub mod discover;
#[cfg(test)]
mod fixture;
mod open;
mod way;

pub use crate::config::sysfs::Roots;
#[cfg(test)]
use crate::{CompletionRecord, Descriptor, Flags, Opcode, Status, completion::Completed};
pub use channel::{Credits, DsaChannel};
pub use device::DsaDevice;
pub use discover::WqError;
pub use open::{OpenedQueue, Options, open};

//! Finding work queues, and the copy engine over one of them.
//!
//! * [`discover`]: the work queues that sysfs tells of, and why one of them cannot be used, in words,
//! * [`DsaDevice`]: an [`offcore_dma::Device`] over one work queue, real or simulated,
//! * [`DsaChannel`]: what a worker owns of it.

mod channel;
mod device;
pub mod discover;
#[cfg(test)]
mod fixture;
mod open;
mod way;

pub use crate::config::sysfs::Roots;
#[cfg(test)]
use crate::descriptor::Descriptor;
pub use channel::{Credits, DsaChannel};
pub use device::DsaDevice;
pub use discover::WqError;
pub use open::{Opened, Options, open};

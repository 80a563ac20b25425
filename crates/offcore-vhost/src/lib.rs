//! vhost-user back end and front end for virtio-net devices (virtio 1.2, section 5.1). DMA engines or the core copy the
//! payload.
//!
//! Control plane: [`message`] encodes and decodes the protocol, [`backend`] serves front ends over a socket,
//! [`frontend`] implements the front end. Both hand each virtqueue to its worker through a [`cell::VringCell`].
//!
//! Data plane: a worker owns an [`Enqueue`] or a [`Dequeue`] per virtqueue. They submit copies through an
//! `offcore_dma::Mover` and publish completed packets.

pub mod backend;
pub mod cell;
pub mod connection;
pub mod dequeue;
pub mod dirty;
pub mod enqueue;
pub mod eventfd;
pub mod features;
pub mod frontend;
pub mod message;
pub mod pair;
mod passed;
mod pieces;
mod room;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod vring;

pub use backend::{Backend, BackendConfig, DeviceEvents, VhostDevice};
pub use cell::{VringCell, VringConfig};
pub use connection::Role;
pub use dequeue::Dequeue;
pub use enqueue::Enqueue;
pub use frontend::{DriverQueue, FrontEnd, FrontEndConfig, MemoryFd};
pub use pair::Pair;
pub use passed::{Errands, PassedFd};

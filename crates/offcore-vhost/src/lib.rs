//! vhost-user: back end and front end of virtio-net devices (virtio 1.2, section 5.1), with payload moved by engines.
//!
//! Control: [`message`] is the protocol's codec, [`backend`] serves front ends over a socket, [`frontend`] is our own
//! front end. They hand each virtqueue to the worker that owns it through a [`cell::VringCell`].
//! Data: [`Enqueue`] and [`Dequeue`] are the worker's side of one virtqueue each; they submit copies through an
//! `offcore_dma::Mover` and publish what has completed.

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

pub use backend::{Backend, BackendConfig, Device, DeviceEvents};
pub use cell::{VringCell, VringConfig};
pub use connection::Role;
pub use dequeue::Dequeue;
pub use enqueue::Enqueue;
pub use frontend::{DriverQueue, FrontEnd, FrontEndConfig, MemoryFd};
pub use pair::Pair;
pub use passed::{Errands, PassedFd};

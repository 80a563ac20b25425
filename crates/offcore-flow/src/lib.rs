//! Workers and the tasks that they run to move packets.
//!
//! * [`forward`]: forwarding modes, [`bridge`]: the learning switch,
//! * [`mirror`]: port mirroring,
//! * [`dma_map`]: assignment of channels to queues,
//! * [`engines`]: devices by name,
//! * [`simulator`]: simulated devices,
//! * [`copy`]: the copy stage, [`ring`]: packet rings between workers, [`pipeline`]: packets between workers through a
//!   GPU,
//! * [`worker`]: the loop of one lcore, [`task`]: its tasks: [`forwarding`], [`guest_pair`], a bridge, a mirror,
//! * [`idle`]: polling and sleeping of workers without work,
//! * [`switch`]: assembly of ports, engines and workers,
//! * [`report`]: reports of a running switch,
//! * [`pktgen`]: a packet generator, which is not a switch.

pub mod bridge;
pub mod copy;
pub mod engines;
mod error;
pub mod forwarding;
pub mod host;
pub mod mirror;
pub mod pipeline;
pub mod pktgen;
pub mod report;
pub mod ring;
pub mod switch;
pub mod worker;

pub use engines::dma_map::{self, DmaMap};
pub use engines::simulator::{self, Simulator};
pub use error::check_lcores;
pub use forwarding::forward::{self, Forward, Topology};
pub use forwarding::guest_pair;
pub use switch::{Running, SwitchConfig, SwitchError};
pub use worker::idle::{self, Idle};
pub use worker::task;

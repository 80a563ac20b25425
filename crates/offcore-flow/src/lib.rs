//! Workers and what they do with packets.
//!
//! * [`forward`]: the forwarding modes, [`bridge`]: the learning switch,
//! * [`mirror`]: what goes through a port, sent to another one, too,
//! * [`dma_map`]: which queue uses which channels,
//! * [`engines`]: devices by name,
//! * [`simulator`]: simulated devices,
//! * [`copy`]: packets given on as copies, [`ring`]: packets from one worker to another, [`pipeline`]: the same by way of a
//!   GPU,
//! * [`worker`]: one lcore's loop, [`task`]: what it does: [`forwarding`], [`guest_pair`], a bridge, a mirror,
//! * [`idle`]: what it does when there is nothing to do,
//! * [`switch`]: ports, engines and workers put together,
//! * [`report`]: what a running switch tells,
//! * [`pktgen`]: a packet generator, which is no switch.

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

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
pub mod dma_map;
pub mod engines;
mod error;
pub mod forward;
pub mod forwarding;
pub mod guest_pair;
pub mod idle;
pub mod mirror;
pub mod pipeline;
pub mod pktgen;
pub mod report;
pub mod ring;
pub mod simulator;
pub mod switch;
pub mod task;
mod threads;
pub mod worker;

pub use dma_map::DmaMap;
pub use forward::{Forward, Topology};
pub use idle::Idle;
pub use simulator::Simulator;
pub use switch::{Running, SwitchConfig, SwitchError};

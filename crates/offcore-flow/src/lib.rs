//! Workers and what they do with packets.
//!
//! * [`forward`]: the forwarding modes,
//! * [`dma_map`]: which queue uses which channels,
//! * [`engines`]: devices by name,
//! * [`simulator`]: simulated devices,
//! * [`worker`]: one lcore's loop,
//! * [`switch`]: ports, engines and workers put together,
//! * [`report`]: what a running switch tells.

pub mod dma_map;
pub mod engines;
pub mod forward;
pub mod report;
pub mod simulator;
pub mod switch;
pub mod worker;

pub use dma_map::DmaMap;
pub use forward::{Forward, Topology};
pub use simulator::Simulator;
pub use switch::{Running, SwitchConfig, SwitchError};

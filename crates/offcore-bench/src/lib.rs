//! The published tables, re-measured beside peers.

pub mod alternate;
mod background;
pub mod copier;
pub mod copy;
pub mod core_cost;
pub mod demo;
pub mod dma;
pub mod end_to_end;
pub mod flip;
pub mod gpu;
pub mod guest;
pub mod latency;
pub mod lockstep;
pub mod machine;
pub mod memory;
pub mod model;
pub mod peer;
pub mod plot;
pub mod predict;
pub mod progress;
mod round_trips;
pub mod row;
pub mod sample;
pub mod submit_reap;
pub mod temperature;
pub mod throughput_plot;
mod timed_worker;
pub mod vhost;
pub mod work_sweep;
pub mod workload;

/// Packets in a burst.
pub(crate) const BURST: usize = 32;

//! Benchmarks: re-measures the published tables, side by side with peers.

pub mod copy;
pub mod dma;
pub mod gpu;
mod guests;
pub mod machine;
mod method;
pub mod model;
pub mod peer;
pub mod plot;
pub mod predict;
mod report;
pub mod tcp;
pub mod vhost;

pub use dma::submit_reap;
pub use guests::{guest, memory, workload};
pub use method::{alternate, copier, lockstep, temperature};
pub use plot::throughput as throughput_plot;
pub use report::{progress, row, sample};
pub use vhost::{core_cost, demo, end_to_end, flip, latency, neighbour, work_sweep};

/// Packets per burst.
pub(crate) const BURST: usize = 32;

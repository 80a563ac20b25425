//! Ground floor: what every other room uses to count and to time.
//!
//! * [`tsc`]: the time stamp counter and its frequency,
//! * [`counter`]: single-writer counters,
//! * [`page`]: the shared statistics page that holds them,
//! * [`finding`]: what a doctor finds,
//! * [`pace`]: how often something may happen,
//! * [`histogram`]: how long things took,
//! * [`random`]: chance that a seed repeats,
//! * [`stage`]: the clock that says which stage of the data path a core's cycles go to,
//! * [`named`](mod@named): enums whose variants have names,
//! * [`lcore`]: pinning workers to cores.

pub mod counter;
pub mod finding;
pub mod histogram;
pub mod lcore;
pub mod named;
pub mod pace;
pub mod page;
pub mod random;
pub mod stage;
pub mod tsc;

pub use counter::Counter;
pub use histogram::Histogram;
pub use random::SplitMix;
pub use stage::{Stage, StageClock};

//! Common basis of the other crates for counting and timing.
//!
//! * [`tsc`]: the time stamp counter and its frequency,
//! * [`time`]: times and durations of the protocol stack,
//! * [`counter`]: single-writer counters,
//! * [`family`]: families of counters, with units and help,
//! * [`page`]: the shared statistics page that holds them,
//! * [`finding`]: the findings of a doctor,
//! * [`pace`]: rate limits,
//! * [`histogram`]: distributions of durations,
//! * [`random`]: reproducible random numbers from a seed,
//! * [`stage`]: the clock that charges a core's cycles to the stages of the data path,
//! * [`named`](mod@named): enums with named variants,
//! * [`lcore`]: pinning workers to cores.

pub mod counter;
pub mod family;
pub mod finding;
pub mod histogram;
pub mod lcore;
pub mod named;
pub mod pace;
pub mod page;
pub mod random;
pub mod stage;
pub mod time;
pub mod tsc;

pub use counter::Counter;
pub use family::{Family, Label};
pub use histogram::Histogram;
pub use random::SplitMix;
pub use stage::{Stage, StageClock};

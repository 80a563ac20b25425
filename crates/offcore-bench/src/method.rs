//! How something is measured: on one core, in turns with what works for it on another one.

pub mod alternate;
pub(crate) mod background;
pub mod copier;
pub(crate) mod flush;
pub mod lockstep;
pub mod temperature;
pub(crate) mod timed_worker;

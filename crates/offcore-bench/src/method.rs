//! Measurement methods: the measured code runs on one core and takes turns with guests and engines on another core.

pub mod alternate;
pub(crate) mod background;
pub mod copier;
pub(crate) mod flush;
pub mod lockstep;
pub mod temperature;
pub(crate) mod timed_worker;

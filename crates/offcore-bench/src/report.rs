//! Output of a measurement: rows, drawings and progress.

pub mod progress;
pub mod row;
pub mod sample;
pub(crate) mod svg;

//! Output of a measurement: rows, drawings and progress.

#[cfg(test)]
pub(crate) mod golden;
pub mod progress;
pub mod row;
pub mod sample;
pub(crate) mod svg;

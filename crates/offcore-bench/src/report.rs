//! What a measurement tells: rows, drawings, and how far it is.

pub mod progress;
pub mod row;
pub mod sample;
pub(crate) mod svg;

//! What a measurement tells: rows, and how far it is.

pub mod progress;
pub mod row;
pub mod sample;

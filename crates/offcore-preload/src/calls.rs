//! libc's functions that are replaced.

pub(crate) mod descriptors;
mod execute;
mod make;
mod number;
mod polling;
mod receive;
mod send;
mod state;
mod stdio;

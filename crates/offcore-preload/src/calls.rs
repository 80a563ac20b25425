//! libc's functions that are replaced.

pub(crate) mod descriptors;
mod execute;
mod make;
mod polling;
mod receive;
mod send;
mod state;

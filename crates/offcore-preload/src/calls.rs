//! libc's functions that are replaced.

mod descriptors;
mod duplicates;
mod epoll;
mod execute;
mod make;
mod names;
mod number;
mod polling;
mod receive;
mod send;
mod state;
pub(crate) mod stdio;

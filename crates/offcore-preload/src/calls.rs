//! Replacements for functions of libc.

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

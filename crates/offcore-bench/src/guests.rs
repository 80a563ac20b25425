//! Guests in this process, their memory and what they send.

pub mod guest;
pub mod memory;
pub mod workload;

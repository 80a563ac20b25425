//! Guests in this process, with their memory and traffic.

pub mod guest;
pub mod memory;
pub mod workload;

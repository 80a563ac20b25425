//! The published tables, re-measured beside peers.

pub mod core_cost;
pub mod demo;
pub mod end_to_end;
pub mod guest;
pub mod lockstep;
pub mod peer;
pub mod plot;
pub mod progress;
pub mod row;
pub mod sample;
pub mod submit_reap;
pub mod temperature;
pub mod vhost;
pub mod work_sweep;

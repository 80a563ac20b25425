//! The specification suite: one test for each rule that a DSA device keeps, with raw descriptors through a simulated
//! portal, without a driver. Where the specification leaves it open which of several errors is reported, only 'an error'
//! is expected.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "spec/batches.rs"]
mod batches;
#[path = "spec/configuration.rs"]
mod configuration;
#[path = "spec/errors.rs"]
mod errors;
#[path = "spec/faults.rs"]
mod faults;
#[path = "spec/operations.rs"]
mod operations;
#[path = "spec/order.rs"]
mod order;
#[path = "spec/partial.rs"]
mod partial;
#[path = "spec/rig.rs"]
mod rig;
#[path = "spec/submission.rs"]
mod submission;
#[path = "spec/visibility.rs"]
mod visibility;

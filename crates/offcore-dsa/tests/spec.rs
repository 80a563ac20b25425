//! The specification suite: one test for each rule that a DSA device follows, with raw descriptors through a simulated
//! portal and without a driver. If the specification leaves open which of several errors is reported, any error is
//! accepted.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "spec/batches.rs"]
mod batches;
#[path = "spec/errors.rs"]
mod errors;
#[path = "spec/faults.rs"]
mod faults;
#[path = "spec/operations.rs"]
mod operations;
#[path = "spec/order.rs"]
mod order;
#[path = "spec/pages.rs"]
mod pages;
#[path = "spec/partial.rs"]
mod partial;
#[path = "spec/rig.rs"]
mod rig;
#[path = "spec/submission.rs"]
mod submission;
#[path = "spec/timing.rs"]
mod timing;
#[path = "spec/visibility.rs"]
mod visibility;

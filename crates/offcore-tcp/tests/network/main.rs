//! The network layer of a host in virtual time: neighbours, routes, groups and errors.

#![allow(clippy::unwrap_used, reason = "a test that panics has failed")]

mod conflicts;
mod dhcp;
mod errors;
mod groups;
mod hostile;
mod labels;
#[path = "../../../../fuzz/replay.rs"]
mod replay;
mod routers;
mod routes;
#[path = "../../../../fuzz/script.rs"]
mod script;
mod scripts;
mod station;
mod vanished;

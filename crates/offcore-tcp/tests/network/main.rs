//! The network layer of a host in virtual time: neighbours, routes, groups and errors.

#![allow(clippy::unwrap_used, reason = "a test that panics has failed")]

mod conflicts;
mod dhcp;
mod errors;
mod groups;
mod labels;
mod routers;
mod routes;
mod station;
mod vanished;

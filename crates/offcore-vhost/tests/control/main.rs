//! The control plane of the vhost-user back end and front end, over real sockets.
#![allow(clippy::unwrap_used, reason = "a test that finds something else fails")]

mod device;
mod hostile;
mod inflight;
mod lifecycle;
mod log;
mod migrating;
mod migration;
mod own_front_end;
mod packed;
mod peer;
mod sequences;
mod slots;
mod under_way;

//! Guests that do their worst on the data path: whatever they write, whenever they write it, nothing panics, hangs,
//! leaks or reaches outside their memory, and their neighbours' packets keep moving.
#![allow(clippy::unwrap_used, reason = "a test that finds something else fails")]

mod arbitrary;
mod arena;
mod checklist;
mod live;
mod live_script;
mod messages;
mod neighbour;
#[path = "../../../../fuzz/replay.rs"]
mod replay;
mod rig;
mod rows;
mod scribble;
mod script;
mod vanish;

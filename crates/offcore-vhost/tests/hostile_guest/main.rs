//! Hostile guests on the data path. Whatever they write, at any time, nothing panics, hangs, leaks or accesses memory
//! beyond their own, and their neighbours' packets are still delivered.
#![allow(clippy::unwrap_used, reason = "a test that finds something else fails")]

mod arbitrary;
mod arena;
#[path = "../../../../fuzz/script.rs"]
mod bytes;
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

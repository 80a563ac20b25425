//! Applications in other processes: what their ends of sessions show, and what becomes of them.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod calls;
mod process;
mod processes;
mod streams;
#[path = "../apps/world.rs"]
mod world;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use offcore_flow::host::serve::{Serve, ServeConfig, ServeCounts, ServeError};
use offcore_stats::page::Block;
use offcore_tcp::proto::Config;
use world::World;

/// A path that no other test has.
fn path() -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("offcore-serve-{}-{number}", std::process::id()))
}

fn serve(path: &Path) -> Result<Serve, ServeError> {
    serve_also(path, &[])
}

/// A server that lets in these users, too.
fn serve_also(path: &Path, allow: &[u32]) -> Result<Serve, ServeError> {
    let config = ServeConfig { path: path.to_owned(), allow: allow.to_vec(), memory: 64 << 20 };
    Serve::open(config, Block::private(&ServeCounts::NAMES))
}

/// A stack that serves, and a peer.
fn world() -> (World<Serve>, PathBuf) {
    let path = path();
    (World::new(serve(&path).unwrap(), Config::default()), path)
}

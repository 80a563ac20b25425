//! Sets up a serving stack and a peer.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use offcore_flow::host::serve::{Serve, ServeConfig, ServeError, TCP_SERVE};
use offcore_stats::page::Block;
use offcore_tcp::proto::Config;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::world::World;

/// Returns a path that no other test uses.
pub(crate) fn path() -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("offcore-serve-{}-{number}", std::process::id()))
}

pub(crate) fn serve(path: &Path) -> Result<Serve, ServeError> {
    serve_also(path, &[])
}

/// A server that also admits these users.
pub(crate) fn serve_also(path: &Path, allow: &[u32]) -> Result<Serve, ServeError> {
    let path = path.to_owned();
    open(ServeConfig { path, allow: allow.to_vec(), memory: 64 << 20, connections: 1 << 16 })
}

fn open(config: ServeConfig) -> Result<Serve, ServeError> {
    Serve::open(config, Block::private(&TCP_SERVE))
}

/// A stack whose applications may have few connections, and a peer.
pub(crate) fn world_of_few(connections: usize) -> (World<Serve>, PathBuf) {
    let path = path();
    let config = ServeConfig { path: path.clone(), allow: Vec::new(), memory: 64 << 20, connections };
    (World::new(open(config).unwrap(), Config::default()), path)
}

/// A stack whose applications have little memory, and a peer.
pub(crate) fn world_of_small(memory: usize) -> (World<Serve>, PathBuf) {
    let path = path();
    let config = ServeConfig { path: path.clone(), allow: Vec::new(), memory, connections: 16 };
    (World::new(open(config).unwrap(), Config::default()), path)
}

/// A serving stack and a peer.
pub(crate) fn world() -> (World<Serve>, PathBuf) {
    let path = path();
    (World::new(serve(&path).unwrap(), Config::default()), path)
}

/// A peer, and a stack that admits thousands of users, so that the share of each is at most a few hundred descriptors.
pub(crate) fn world_of_many_users() -> (World<Serve>, PathBuf) {
    let limit = getrlimit(Resource::Nofile);
    let current = Some(limit.current.unwrap_or(u64::MAX).min(20_000));
    setrlimit(Resource::Nofile, Rlimit { current, ..limit }).unwrap();
    let (path, users): (_, Vec<u32>) = (path(), (100_000..104_000).collect());
    (World::new(serve_also(&path, &users).unwrap(), Config::default()), path)
}

//! What a run makes outside its process: it is removed when its owner is dropped, or when the run is interrupted.

use std::mem;
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::Result;

/// All that there is now. Who makes or removes something has the lock.
static MADE: Mutex<Vec<Leftover>> = Mutex::new(Vec::new());

/// Something with a name that nothing else has, and how it is removed.
#[derive(Debug)]
struct Leftover {
    name: String,
    remove: fn(&str),
}

/// Makes something.
pub(super) fn make(name: &str, make: impl FnOnce() -> Result<()>, remove: fn(&str)) -> Result<()> {
    let mut all = all();
    make()?;
    all.push(Leftover { name: name.into(), remove });
    Ok(())
}

/// Removes it.
pub(super) fn remove(name: &str) {
    let mut all = all();
    if let Some(at) = all.iter().position(|other| other.name == name) {
        (all.remove(at).remove)(name);
    }
}

/// Removes all that this process has made. Whoever would make or remove something from now on waits for the process's end.
pub fn remove_all() {
    let mut all = all();
    // The last ones first: a process in a namespace may still fill a directory.
    for last in all.drain(..).rev() {
        (last.remove)(&last.name);
    }
    mem::forget(all);
}

fn all() -> MutexGuard<'static, Vec<Leftover>> {
    MADE.lock().unwrap_or_else(PoisonError::into_inner)
}

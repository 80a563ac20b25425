//! External objects of a run, such as directories and namespaces. They are removed when their owner is dropped or when
//! the run is interrupted.

use std::mem;
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::Result;

/// All existing objects. The lock is held while an object is created or removed.
static MADE: Mutex<Vec<Leftover>> = Mutex::new(Vec::new());

/// An object with a unique name, and the function that removes it.
#[derive(Debug)]
struct Leftover {
    name: String,
    remove: fn(&str),
}

/// Creates an object and registers its removal.
pub(super) fn make(name: &str, make: impl FnOnce() -> Result<()>, remove: fn(&str)) -> Result<()> {
    let mut all = all();
    make()?;
    all.push(Leftover { name: name.into(), remove });
    Ok(())
}

/// Removes an object.
pub(super) fn remove(name: &str) {
    let mut all = all();
    if let Some(at) = all.iter().position(|other| other.name == name) {
        (all.remove(at).remove)(name);
    }
}

/// Removes all objects of this process. Later calls that create or remove an object block until the process ends.
pub fn remove_all() {
    let mut all = all();
    // In reverse order: a process in a namespace may still write to a directory.
    for last in all.drain(..).rev() {
        (last.remove)(&last.name);
    }
    mem::forget(all);
}

fn all() -> MutexGuard<'static, Vec<Leftover>> {
    MADE.lock().unwrap_or_else(PoisonError::into_inner)
}

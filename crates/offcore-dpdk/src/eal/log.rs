//! Forwards DPDK's log to the program's log, and keeps the last errors for error messages.

use std::ffi::c_char;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// `RTE_LOG_ERR` and `RTE_LOG_WARNING`; lower levels are more severe.
const ERROR: u32 = 4;
const WARNING: u32 = 5;
/// Number of errors that are kept.
const KEPT: usize = 6;

static COMPLAINTS: Mutex<Vec<String>> = Mutex::new(Vec::new());

fn lock() -> MutexGuard<'static, Vec<String>> {
    COMPLAINTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Discards the errors so far, before an operation whose errors are of interest.
pub(crate) fn forget() {
    lock().clear();
}

/// Returns the first errors since [`forget`].
pub(crate) fn said() -> Vec<String> {
    lock().clone()
}

/// The shim calls this with each line.
///
/// # Safety
/// `line` must have `len` bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn offcore_dpdk_log(level: u32, line: *const c_char, len: usize) {
    // SAFETY: the shim passes `len` bytes of its own, which do not change during the call.
    let line = unsafe { std::slice::from_raw_parts(line.cast::<u8>(), len) };
    let line = String::from_utf8_lossy(line);
    if level <= ERROR {
        tracing::warn!(target: "dpdk", "{line}");
        let mut complaints = lock();
        if complaints.len() < KEPT {
            complaints.push(line.into_owned());
        }
    } else if level == WARNING {
        tracing::info!(target: "dpdk", "{line}");
    } else {
        tracing::debug!(target: "dpdk", "{line}");
    }
}

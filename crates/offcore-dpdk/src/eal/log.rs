//! What DPDK logs: handed on to our log, and the last complaints kept for error messages.

use std::ffi::c_char;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// `RTE_LOG_ERR` and `RTE_LOG_WARNING`; lower is worse.
const ERROR: u32 = 4;
const WARNING: u32 = 5;
/// Complaints that are kept.
const KEPT: usize = 6;

static COMPLAINTS: Mutex<Vec<String>> = Mutex::new(Vec::new());

fn lock() -> MutexGuard<'static, Vec<String>> {
    COMPLAINTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Forgets the complaints so far: what comes next is about something else.
pub(crate) fn forget() {
    lock().clear();
}

/// The complaints since [`forget`], the first few.
pub(crate) fn said() -> Vec<String> {
    lock().clone()
}

/// Called by the shim with each line.
///
/// # Safety
/// `line` has `len` bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn offcore_dpdk_log(level: u32, line: *const c_char, len: usize) {
    // SAFETY: as the shim promises; the bytes are its own and stay as they are meanwhile.
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

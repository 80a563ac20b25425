//! The EAL, DPDK's environment abstraction layer. A process has one; it is started once and never stopped.
//!
//! [`configure`] takes the user's arguments (`--eal`), and [`start`] starts the EAL when the first device needs it. Its
//! threads receive no signals, its log is forwarded to the program's log (target `dpdk`), and the calling thread keeps
//! its CPU affinity.

mod args;
mod log;

use std::ffi::{CString, c_char, c_int};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::MemfdFlags;

use crate::ffi;

pub(crate) use log::{forget, said};

/// A failed initialization of DPDK.
#[derive(Clone, Debug, displaydoc::Display, thiserror::Error)]
pub enum EalError {
    /// --eal '{found}': {expected}
    Arguments { found: String, expected: String },
    /// the EAL does not start with '{arguments}': {reason}{said}
    Init {
        arguments: String,
        reason: String,
        /// Its output and log, after a "; ", or empty.
        said: String,
    },
    /// --eal '{found}': the EAL of this process runs already, expected its arguments before the first device
    Late { found: String },
    /// {owner} has started an EAL in this process, and there can be only one: use another process
    Taken { owner: String },
    /// starting the EAL: {0}
    System(String),
}

/// State of the process's EAL.
enum State {
    Down { arguments: String },
    Up { note: String },
    Failed(EalError),
    Taken { owner: String },
}

static EAL: Mutex<State> = Mutex::new(State::Down { arguments: String::new() });

fn lock() -> MutexGuard<'static, State> {
    EAL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sets the arguments with which the EAL will start, in the EAL's syntax; words that contain blanks are quoted. By
/// default, the EAL has no telemetry and no shared files, uses virtual addresses for devices and hugepages if some are
/// available, and probes only the PCI devices that are opened.
///
/// # Errors
/// Arguments that end the process or require another process; or the EAL is already running.
pub fn configure(text: &str) -> Result<(), EalError> {
    args::check(&args::split(text)?, text)?;
    let mut state = lock();
    match &mut *state {
        State::Down { arguments } => *arguments = text.into(),
        State::Taken { owner } => return Err(EalError::Taken { owner: owner.clone() }),
        State::Up { .. } | State::Failed(_) => return Err(EalError::Late { found: text.into() }),
    }
    Ok(())
}

/// Starts the EAL with these arguments, as [`configure`] and [`start`] do.
///
/// # Errors
/// As [`configure`] and [`start`].
pub fn init(text: &str) -> Result<(), EalError> {
    configure(text)?;
    start().map(|_| ())
}

/// Starts the EAL unless it is running; returns a line that describes its settings.
///
/// # Errors
/// The EAL's messages, and what to do about them. A failed start is not repeated.
pub fn start() -> Result<String, EalError> {
    let mut state = lock();
    let arguments = match &*state {
        State::Up { note } => return Ok(note.clone()),
        State::Failed(error) => return Err(error.clone()),
        State::Taken { owner } => return Err(EalError::Taken { owner: owner.clone() }),
        State::Down { arguments } => arguments.clone(),
    };
    match launch(&arguments) {
        Ok(note) => {
            tracing::info!(target: "dpdk", "{note}");
            *state = State::Up { note: note.clone() };
            Ok(note)
        }
        Err(error) => {
            *state = State::Failed(error.clone());
            Err(error)
        }
    }
}

/// Serializes the addition and removal of devices: both traverse and change the EAL's list of device arguments, which
/// has no lock.
pub(crate) fn one_at_a_time() -> MutexGuard<'static, ()> {
    static DEVICES: Mutex<()> = Mutex::new(());
    DEVICES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns whether the EAL is running.
pub fn is_up() -> bool {
    matches!(*lock(), State::Up { .. })
}

/// Reserves the process's EAL for other code that starts it, which `owner` names.
///
/// # Errors
/// If it is running, or reserved for another owner.
pub fn claim(owner: &str) -> Result<(), EalError> {
    let mut state = lock();
    match &*state {
        State::Down { .. } => *state = State::Taken { owner: owner.into() },
        State::Taken { owner: other } if other == owner => {}
        State::Taken { owner: other } => return Err(EalError::Taken { owner: other.clone() }),
        State::Up { .. } | State::Failed(_) => {
            return Err(EalError::Taken { owner: "a port or engine of DPDK".into() });
        }
    }
    Ok(())
}

/// Returns whether devices use virtual addresses.
pub(crate) fn iova_is_va() -> bool {
    // SAFETY: the function only returns a value.
    unsafe { ffi::off_iova_is_va() != 0 }
}

fn launch(text: &str) -> Result<String, EalError> {
    let machine = args::Machine::here();
    let arguments = args::complete(args::split(text)?, &machine);
    let shown = arguments.join(" ");
    let failed = |reason: String, said: String| EalError::Init { arguments: shown.clone(), reason, said };
    let words: Result<Vec<CString>, _> =
        std::iter::once("offcore".to_owned()).chain(arguments.iter().cloned()).map(CString::new).collect();
    let words = words.map_err(|_| failed("a zero byte is in it".into(), String::new()))?;
    // The EAL reorders the list and keeps some of the words.
    let words: Vec<*mut c_char> =
        words.into_iter().map(CString::into_raw).chain([std::ptr::null_mut()]).collect();
    let argc = words.len() as c_int - 1;
    let words = Box::leak(words.into_boxed_slice());
    let output = rustix::fs::memfd_create("offcore-eal", MemfdFlags::CLOEXEC)
        .map_err(|e| EalError::System(e.to_string()))?;
    forget();
    // SAFETY: the words and their null-terminated list live as long as the process, and the lock on `EAL` makes this
    // the only call.
    let rc = unsafe { ffi::off_eal_init(argc, words.as_mut_ptr(), output.as_raw_fd()) };
    if rc < 0 {
        let said = [complaints(&output), said()].concat().join("; ");
        let reason = remedy(rc, &said);
        let said = if said.is_empty() { said } else { format!("; it says: {said}") };
        return Err(failed(reason, said));
    }
    let has = |name: &str| arguments.iter().any(|argument| argument == name);
    let memory = if has("--no-huge") { "without hugepages" } else { "on hugepages" };
    let addresses = if iova_is_va() { "virtual" } else { "physical" };
    Ok(format!("DPDK's EAL runs {memory}, with {addresses} addresses for devices"))
}

/// Returns the lines of the output that getopt wrote.
fn complaints(output: &OwnedFd) -> Vec<String> {
    let mut text = vec![0; 16384];
    let read = rustix::io::pread(output, &mut text, 0).unwrap_or(0);
    let text = String::from_utf8_lossy(&text[..read]).into_owned();
    let said = text.lines().filter_map(|line| line.strip_prefix("offcore: "));
    let mut said: Vec<String> = said.map(str::to_owned).collect();
    // The EAL parses the arguments twice.
    said.dedup();
    said
}

fn remedy(rc: c_int, said: &str) -> String {
    let error = ffi::errno(rc);
    let advice = if said.contains("hugepage") || said.contains("Cannot get hugepage information") {
        "reserve hugepages (sysctl -w vm.nr_hugepages=N), or add --no-huge to --eal"
    } else if said.contains("IOVA") {
        "devices without an IOMMU need --iova-mode=pa, as root"
    } else {
        "correct --eal, or leave it out for what suits most machines"
    };
    format!("{error}: {advice}")
}

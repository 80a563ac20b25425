//! Opens work queues: the device file, and the submission method that this CPU and this kernel allow.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::Roots;
use super::discover::{self, Found, WqError};
use crate::portal::{Instructions, Page, Portal, Writer};
use crate::wq::{WqInfo, WqMode};

/// The first device version for which the kernel accepts batches by write().
const BATCH_BY_WRITE: u32 = 0x200;

/// Options for the use of a work queue.
#[derive(Clone, Debug)]
pub struct Options {
    /// Submits bursts as batch descriptors, if the queue and the submission method allow that.
    pub batch: bool,
    /// Lets the device wait until page faults are resolved, if the queue allows that. Later descriptors may wait, too.
    pub block_on_fault: bool,
    /// Writes data to the cache instead of memory, if the device supports that.
    pub cache_control: bool,
    /// Time limit of a drain. When it expires, the queue is closed instead.
    pub drain_limit: Duration,
    /// Time between two attempts to reopen a lost queue.
    pub reopen_every: Duration,
    /// The required beginning of the queue's name. A queue with another name is refused.
    pub wq_name: Option<String>,
    /// The NUMA node of the threads that use the queue. A queue on another node is used with a warning.
    pub numa_node: Option<u32>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            batch: true,
            block_on_fault: false,
            cache_control: true,
            drain_limit: Duration::from_millis(100),
            reopen_every: Duration::from_millis(10),
            wq_name: None,
            numa_node: None,
        }
    }
}

/// An open work queue.
#[derive(Debug)]
pub struct OpenedQueue {
    pub info: WqInfo,
    /// The portal of the queue. [`Portal::kind`] returns the chosen submission method.
    pub portal: Portal,
    /// Problems that do not prevent the use, in words.
    pub warnings: Vec<String>,
}

/// Opens a work queue for this process and chooses the submission method: MOVDIR64B or ENQCMD if the portal can be
/// mapped and the CPU has the instruction, write() otherwise.
///
/// # Errors
/// [`WqError`] states why the queue cannot be used, and gives advice.
pub fn open(roots: &Roots, wq: &str, options: &Options) -> Result<OpenedQueue, WqError> {
    let found = discover::find(roots, wq)?;
    found.check(options.wq_name.as_deref())?;
    let node = roots.device_node(wq);
    let file = rustix::fs::open(&node, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
        .map_err(|reason| refusal(reason, &node, &found))?;
    let warnings: Vec<String> = found.numa_warning(options.numa_node).into_iter().collect();
    let portal = choose(file, &found, &node)?;
    let info = found.info;
    tracing::debug!(wq, by = %portal.kind(), "work queue opened");
    for warning in &warnings {
        tracing::warn!("{warning}");
    }
    Ok(OpenedQueue { info, portal, warnings })
}

/// Returns the error for a device file that the kernel refuses to open.
pub(super) fn refusal(reason: Errno, node: &Path, found: &Found) -> WqError {
    let (wq, node) = (found.info.name.clone(), node.display().to_string());
    match reason {
        Errno::BUSY => WqError::Busy { wq },
        Errno::ACCESS | Errno::PERM => WqError::NoPermission { wq, node },
        // The kernel binds the process's address space to the device when the file is opened.
        Errno::OPNOTSUPP => WqError::NoSva { device: found.device.clone() },
        reason => WqError::Open { wq, node, reason },
    }
}

fn choose(file: OwnedFd, found: &Found, node: &Path) -> Result<Portal, WqError> {
    let has = Instructions::detect();
    let (instruction, name) = match found.info.mode {
        WqMode::Dedicated => (has.movdir64b, "MOVDIR64B"),
        WqMode::Shared => (has.enqcmd, "ENQCMD"),
    };
    let state = found.state_file.clone();
    let (file, why) = if instruction {
        match Page::map(file) {
            Ok(page) if found.info.mode == WqMode::Dedicated => return Ok(Portal::movdir64b(page, state)),
            Ok(page) => return Ok(Portal::enqcmd(page, state)),
            Err((reason, file)) => (file, format!("mapping the portal is refused ({reason})")),
        }
    } else {
        (file, format!("this CPU has no {name}"))
    };
    let batches = found.info.version >= BATCH_BY_WRITE;
    match Writer::probe(file) {
        Ok(writer) => Ok(Portal::write(writer, batches, state)),
        Err(reason) => Err(WqError::NoWay {
            wq: found.info.name.clone(),
            node: node.display().to_string(),
            mapping: why,
            writing: reason,
        }),
    }
}

//! The pcap port: receives the packets of a capture file, and writes sent packets to another.
//!
//! It reads and writes files within its bursts, which may block the worker: the port suits tests and the inspection of
//! traffic, not high rates. Pipes never block. Written data reaches the file when the port has been idle for a while,
//! and when it is stopped. Until then a capture is called `OUT.part`.
//!
//! The input file loses nothing by waiting: a packet that the other side has no room for is received again.
//!
//! Packets may be as long as capture files allow, 256 KiB. Packets longer than a packet buffer take several buffers. A
//! packet that was truncated during capture is received with the bytes that the file contains.

mod pipe;
mod rx;
mod tx;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use offcore_wire::pcap::PcapError;

use crate::base::PortBase;
use crate::spec::PcapSpec;
use crate::{Port, PortError, QueueSetup, RxQueue, TxQueue, address};

use rx::{PcapRx, Source};
pub use tx::part_of;
use tx::{PcapTx, Sink};

/// A pcap port. It has one queue pair.
#[derive(Debug)]
pub struct PcapPort {
    base: PortBase,
    source: Option<Source>,
    sink: Option<Sink>,
    input: Arc<FileState>,
    output: Arc<FileState>,
}

/// The state of a file as the status line shows it.
#[derive(Debug)]
struct FileState {
    path: Option<PathBuf>,
    /// Why the file is not used any more. The worker writes it once.
    end: Mutex<Option<End>>,
    /// Number of received packets that were truncated during capture.
    cut: AtomicU64,
    /// The file is a pipe that waits for its other end.
    waiting: AtomicBool,
}

#[derive(Clone, Debug)]
struct End {
    why: String,
    /// Whether it ended because of an error.
    is_failure: bool,
}

impl FileState {
    fn new(path: Option<PathBuf>) -> Arc<Self> {
        Arc::new(Self { path, end: Mutex::new(None), cut: AtomicU64::new(0), waiting: false.into() })
    }

    #[cold]
    fn end(&self, why: impl ToString) {
        self.set_end(End { why: why.to_string(), is_failure: false });
    }

    #[cold]
    fn fail(&self, why: impl ToString) {
        self.set_end(End { why: why.to_string(), is_failure: true });
    }

    fn set_end(&self, end: End) {
        self.waiting.store(false, Ordering::Relaxed);
        *self.end.lock().unwrap_or_else(PoisonError::into_inner) = Some(end);
    }

    fn ended(&self) -> Option<End> {
        self.end.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn failure(&self) -> Option<String> {
        let (end, path) = (self.ended().filter(|end| end.is_failure)?, self.path.as_ref()?);
        Some(format!("file '{}': {}", path.display(), end.why))
    }

    fn describe(&self) -> String {
        let Some(path) = &self.path else { return "none".into() };
        let cut = match self.cut.load(Ordering::Relaxed) {
            0 => String::new(),
            packets => format!(", {packets} packets were cut when they were captured"),
        };
        match self.ended() {
            None => format!("{}{cut}", path.display()),
            Some(End { why, .. }) => format!("{} ({why}){cut}", path.display()),
        }
    }
}

impl PcapPort {
    /// Opens the files.
    ///
    /// # Errors
    /// A file that cannot be opened, an output that exists without `overwrite`, or an input that is not a capture file
    /// of Ethernet packets. An input with `repeat` is read once to its end, so a damaged or empty file is refused, too.
    pub fn open(spec: &PcapSpec) -> Result<Self, PortError> {
        let name = spec.to_string();
        let fail = |path: &Path, error: PcapError| match error {
            PcapError::Io(source) => {
                PortError::System { port: name.clone(), what: format!("file '{}'", path.display()), source }
            }
            other => {
                PortError::Other { port: name.clone(), reason: format!("file '{}': {other}", path.display()) }
            }
        };
        let input = FileState::new(spec.input.clone());
        let open =
            |path: &PathBuf| Source::open(path, spec.repeat, Arc::clone(&input)).map_err(|e| fail(path, e));
        let source = spec.input.as_ref().map(open).transpose()?;
        let output = FileState::new(spec.output.clone());
        let open =
            |path: &PathBuf| Sink::open(path, spec.overwrite, Arc::clone(&output)).map_err(|e| fail(path, e));
        let sink = spec.output.as_ref().map(open).transpose()?;
        let base = PortBase::new(name.clone(), address::derived(&name), 1);
        Ok(Self { base, source, sink, input, output })
    }
}

impl Port for PcapPort {
    fn base(&self) -> &PortBase {
        &self.base
    }

    fn rx_queue(&mut self, index: u16, setup: QueueSetup<'_>) -> Result<Box<dyn RxQueue>, PortError> {
        let counters = self.base.take_rx(index, &setup)?;
        Ok(Box::new(PcapRx::new(self.source.take(), counters)))
    }

    fn tx_queue(&mut self, index: u16, setup: QueueSetup<'_>) -> Result<Box<dyn TxQueue>, PortError> {
        let counters = self.base.take_tx(index, &setup)?;
        Ok(Box::new(PcapTx::new(self.sink.take(), counters)))
    }

    fn status(&self) -> String {
        format!("input {}, output {}", self.input.describe(), self.output.describe())
    }

    fn is_waiting(&self) -> bool {
        [&self.input, &self.output].iter().any(|file| file.waiting.load(Ordering::Relaxed))
    }

    fn failure(&self) -> Option<String> {
        self.input.failure().or_else(|| self.output.failure())
    }
}

/// Describes an error in words.
fn reason(error: PcapError) -> String {
    match error {
        PcapError::Io(error) if error.kind() == io::ErrorKind::BrokenPipe => {
            format!("its reader has closed it: {error}")
        }
        PcapError::Io(error) => error.to_string(),
        other => other.to_string(),
    }
}

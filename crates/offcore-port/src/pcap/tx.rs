//! The sending half of a pcap port.
//!
//! A capture is written to `OUT.part` and renamed when the port stops. A file with the final name is therefore
//! complete, and an existing file is not lost if a run fails. Pipes and devices are written directly.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, fchown};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use offcore_mem::Burst;
use offcore_stats::Stage;
use offcore_wire::pcap::{MAX_RECORD_LEN, PcapError, PcapWriter};
use rustix::fs::{CWD, OFlags, RenameFlags, renameat_with};
use rustix::io::Errno;

use super::pipe::{PipeWriter, is_pipe};
use super::{FileState, reason};
use crate::{Accepts, Context, DropReason, TxCounters, TxQueue};

/// Rounds without a packet after which buffered data is written to the file.
const IDLE_ROUNDS: u32 = 1024;
/// How long the port waits for the reader of a pipe when it stops.
const READER_TIMEOUT: Duration = Duration::from_secs(1);
/// The suffix of an unfinished capture's name.
const PART: &str = ".part";

/// The name of the unfinished capture `path`.
pub fn part_of(path: &Path) -> PathBuf {
    let mut part = path.as_os_str().to_owned();
    part.push(PART);
    part.into()
}

/// The file that packets are written to.
#[derive(Debug)]
pub(super) struct Sink {
    writer: PcapWriter<Output>,
    /// `None` for pipes and devices.
    part: Option<Part>,
    /// Rounds since the last packet. At [`IDLE_ROUNDS`] all data has been flushed.
    idle: u32,
    state: Arc<FileState>,
}

#[derive(Debug)]
enum Output {
    File(BufWriter<File>),
    Pipe(PipeWriter),
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::File(file) => file.write(bytes),
            Self::Pipe(pipe) => pipe.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::File(file) => file.flush(),
            Self::Pipe(pipe) => pipe.flush(),
        }
    }
}

impl Sink {
    /// Opens the pipe or device `path`, or creates a capture file of that name.
    pub(super) fn open(path: &Path, overwrite: bool, state: Arc<FileState>) -> Result<Self, PcapError> {
        if is_pipe(path) {
            let writer = PcapWriter::new(Output::Pipe(PipeWriter::open(path)?), MAX_RECORD_LEN)?;
            return Ok(Self { writer, part: None, idle: 0, state });
        }
        let (file, part) = match fs::metadata(path) {
            Ok(found) if found.file_type().is_block_device() => {
                let why = "it is a block device: expected a file, a pipe or a character device";
                return Err(io::Error::other(why).into());
            }
            Ok(found) if !found.is_file() => (OpenOptions::new().write(true).open(path)?, None),
            Ok(_) if !overwrite => {
                let why = "it exists: expected a name that is not taken, or the option 'overwrite'";
                return Err(io::Error::other(why).into());
            }
            // If `path` is a symbolic link, its target is replaced, not the link.
            Ok(_) => Part::create(fs::canonicalize(path)?, overwrite)?,
            Err(error) if error.kind() != io::ErrorKind::NotFound || path.is_symlink() => {
                return Err(error.into());
            }
            Err(_) => Part::create(path.to_path_buf(), overwrite)?,
        };
        let file = Output::File(BufWriter::with_capacity(1 << 16, file));
        let mut writer = PcapWriter::new(file, MAX_RECORD_LEN)?;
        writer.flush()?;
        Ok(Self { writer, part, idle: IDLE_ROUNDS, state })
    }

    /// Writes a packet; returns `false` if the output has no room for it now.
    fn write<'a>(
        &mut self,
        now: u64,
        len: usize,
        parts: impl IntoIterator<Item = &'a [u8]>,
    ) -> Result<bool, PcapError> {
        if let Output::Pipe(pipe) = self.writer.output()
            && !pipe.has_room()?
        {
            return Ok(false);
        }
        self.writer.write_parts(now, len, parts)?;
        Ok(true)
    }

    /// Returns the number of bytes not written yet: a pipe may have no reader or no room.
    fn left(&mut self) -> usize {
        match self.writer.output() {
            Output::File(_) => 0,
            Output::Pipe(pipe) => pipe.left(),
        }
    }

    /// Records whether data waits for a reader.
    fn note_left(&mut self) {
        let waiting = self.left() > 0;
        self.state.waiting.store(waiting, Ordering::Relaxed);
    }

    /// Keeps the file even if the run fails, because it contains data.
    fn keep(&mut self) {
        if let Some(part) = &mut self.part {
            part.wanted = true;
        }
    }

    /// The file cannot be written any more. The written part is kept under its present name.
    #[cold]
    fn fail(mut self, why: &str) {
        match self.part.take().filter(|part| part.wanted) {
            None => self.state.fail(why),
            Some(part) => {
                self.state.fail(format!("{why}; what was written is in '{}'", part.part.display()));
            }
        }
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        let Some(part) = self.part.take().filter(|part| part.wanted) else { return };
        let finished = self.writer.flush().map_err(reason).and_then(|()| part.finish());
        if let Err(why) = finished {
            self.state.fail(why);
        }
    }
}

/// A capture file that is being written.
#[derive(Debug)]
struct Part {
    part: PathBuf,
    /// The name of the complete file.
    path: PathBuf,
    overwrite: bool,
    /// Whether the file is kept.
    wanted: bool,
}

impl Part {
    fn create(path: PathBuf, overwrite: bool) -> io::Result<(File, Option<Self>)> {
        let part = part_of(&path);
        if overwrite {
            remove_left(&part)?;
        }
        let mut options = OpenOptions::new();
        // A capture contains private data, whatever the umask is.
        options.write(true).create_new(true).mode(0o600);
        let file = options.open(&part).map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => io::Error::other(format!(
                "'{}' exists: it is being written, or a run that was killed left it; remove it, or give the option 'overwrite'",
                part.display()
            )),
            _ => error,
        })?;
        // File systems without locks are used without one.
        let _ = file.try_lock();
        // The new file gets the owner and the permissions of the file that it replaces.
        if let Ok(replaced) = fs::metadata(&path) {
            let _ = fchown(&file, Some(replaced.uid()), Some(replaced.gid()));
            file.set_permissions(replaced.permissions())?;
        }
        Ok((file, Some(Self { part, path, overwrite, wanted: false })))
    }

    /// Renames the file to its final name.
    fn finish(self) -> Result<(), String> {
        let flags = if self.overwrite { RenameFlags::empty() } else { RenameFlags::NOREPLACE };
        let renamed = match renameat_with(CWD, &self.part, CWD, &self.path, flags) {
            // The file system does not support the flag.
            Err(Errno::INVAL) if !self.path.exists() => rustix::fs::rename(&self.part, &self.path),
            renamed => renamed,
        };
        renamed.map_err(|error| format!("{error}: the capture is in '{}'", self.part.display()))
    }
}

/// Removes the file that a killed run has left. Only this name is removed: other hard links to the file stay.
fn remove_left(part: &Path) -> io::Result<()> {
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
    let file = match OpenOptions::new().read(true).custom_flags(flags).open(part) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        file => file?,
    };
    if !file.metadata()?.is_file() {
        return Err(io::Error::other(format!("'{}' is no file: remove it", part.display())));
    }
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => {
            Err(io::Error::other(format!("'{}' is being written by another process", part.display())))
        }
        _ => fs::remove_file(part),
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        if !self.wanted {
            // An error cannot be reported here.
            let _ = fs::remove_file(&self.part);
        }
    }
}

#[derive(Debug)]
pub(super) struct PcapTx {
    /// `None` without a file, and after a write error.
    sink: Option<Sink>,
    /// The reason for dropping packets without a file.
    without: DropReason,
    /// The time at which the queue began to stop.
    stopped: Option<Instant>,
    counters: TxCounters,
}

impl PcapTx {
    pub(super) fn new(sink: Option<Sink>, counters: TxCounters) -> Self {
        Self { sink, without: DropReason::Down, stopped: None, counters }
    }

    #[cold]
    fn fail(&mut self, error: PcapError) {
        if let Some(sink) = self.sink.take() {
            sink.fail(&reason(error));
            self.without = DropReason::Failed;
        }
    }

    fn hand_over(&mut self) {
        let Some(sink) = &mut self.sink else { return };
        match sink.writer.flush() {
            Ok(()) => sink.note_left(),
            Err(error) => self.fail(error),
        }
    }
}

impl TxQueue for PcapTx {
    fn tx(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        if burst.is_empty() {
            return;
        }
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let now = u64::try_from(since_1970.as_nanos()).unwrap_or(u64::MAX);
        let pool = ctx.cache.pool();
        let (mut packets, mut bytes) = (0, 0);
        for packet in burst.iter() {
            let Some(sink) = &mut self.sink else { break };
            let len = pool.total_len(packet);
            match sink.write(now, len, pool.segments(packet)) {
                Ok(true) => (packets, bytes) = (packets + 1, bytes + len as u64),
                Ok(false) => break,
                Err(error) => self.fail(error),
            }
        }
        self.counters.add(packets as u64, bytes);
        if let Some(sink) = &mut self.sink {
            if packets > 0 {
                sink.idle = 0;
                sink.keep();
            }
            sink.note_left();
        } else {
            self.counters.drop(self.without, (burst.len() - packets) as u64);
            packets = burst.len();
        }
        ctx.cache.free_all(burst.drain(..packets));
        ctx.clock.lap(Stage::Tx);
    }

    fn poll(&mut self, _ctx: &mut Context<'_>) {
        let Some(sink) = &mut self.sink else { return };
        if sink.left() > 0 {
            return self.hand_over();
        }
        if sink.idle == IDLE_ROUNDS {
            return;
        }
        sink.idle += 1;
        if sink.idle == IDLE_ROUNDS {
            self.hand_over();
        }
    }

    fn accepts(&self) -> Accepts {
        Accepts { segments: true, ..Accepts::default() }
    }

    fn counters(&self) -> &TxCounters {
        &self.counters
    }

    fn stop(&mut self, _ctx: &mut Context<'_>) -> bool {
        self.hand_over();
        let Some(sink) = &mut self.sink else { return true };
        // A capture without packets is kept, too.
        sink.keep();
        let left = sink.left();
        if left > 0 && self.counters.packets() > 0 {
            if self.stopped.get_or_insert_with(Instant::now).elapsed() < READER_TIMEOUT {
                return false;
            }
            if let Some(sink) = self.sink.take() {
                sink.fail(&format!("its last {left} bytes were not read"));
            }
        }
        true
    }
}

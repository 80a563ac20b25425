//! Pipes as capture files. Reads and writes never wait for the other end, which may be slow or may never connect.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::ops::Range;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use offcore_wire::pcap::MAX_RECORD_LEN;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use rustix::io::Errno;

/// Bytes per read, and the limit of buffered bytes for a reader: the default capacity of a pipe.
const BLOCK: usize = 1 << 16;

/// Number of flushes without a reader between two attempts to connect to one.
const LOOKS: u32 = 64;

/// Returns whether `path` names a pipe.
pub(super) fn is_pipe(path: &Path) -> bool {
    path.metadata().is_ok_and(|found| found.file_type().is_fifo())
}

/// Checks that the opened file is still a pipe. A regular file would be overwritten.
fn piped(file: File) -> io::Result<File> {
    match file.metadata()?.file_type().is_fifo() {
        true => Ok(file),
        false => Err(io::Error::other("it was a pipe and is none any more")),
    }
}

fn nonblocking() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.custom_flags(OFlags::NONBLOCK.bits().cast_signed());
    options
}

/// A pipe from which available data is read without waiting for the writer.
#[derive(Debug)]
pub(super) struct PipeReader {
    file: File,
    buffer: Box<[u8]>,
    /// The part of the buffer that was read from the pipe and not yet consumed.
    filled: Range<usize>,
    /// Whether a writer has connected.
    written: bool,
    /// Whether the writer has disconnected.
    ended: bool,
}

impl PipeReader {
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let file = piped(nonblocking().read(true).open(path)?)?;
        let buffer = vec![0; BLOCK + MAX_RECORD_LEN as usize].into();
        Ok(Self { file, buffer, filled: 0..0, written: false, ended: false })
    }

    /// Returns whether the next `bytes` can be read without waiting, because they are available or the writer has
    /// disconnected. `bytes` is at most the length of a packet and a header.
    pub(super) fn has(&mut self, bytes: usize) -> io::Result<bool> {
        while self.filled.len() < bytes && !self.ended {
            if !self.fill()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Reads more data; returns `false` if none is available now.
    #[cold]
    fn fill(&mut self) -> io::Result<bool> {
        if self.filled.start > 0 {
            // copy-ok: the rest of a block
            self.buffer.copy_within(self.filled.clone(), 0);
            self.filled = 0..self.filled.len();
        }
        match self.file.read(self.buffer.get_mut(self.filled.end..).unwrap_or_default()) {
            // Without a writer, a read returns 0, as after the writer has disconnected.
            Ok(0) if !self.written && !self.has_ended()? => return Ok(false),
            Ok(0) => self.ended = true,
            Ok(read) => (self.written, self.filled.end) = (true, self.filled.end + read),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                return Ok(false);
            }
            Err(error) => return Err(error),
        }
        Ok(true)
    }

    /// Returns whether a writer has connected and disconnected.
    fn has_ended(&self) -> io::Result<bool> {
        let mut pipe = [PollFd::new(&self.file, PollFlags::IN)];
        match poll(&mut pipe, Some(&Timespec::default())) {
            Ok(_) => Ok(pipe.iter().any(|pipe| pipe.revents().contains(PollFlags::HUP))),
            Err(Errno::INTR) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}

impl Read for PipeReader {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.buffer.get(self.filled.clone()).unwrap_or_default().read(into)?;
        self.filled.start += read;
        Ok(read)
    }
}

/// A pipe to which data is written without waiting for the reader.
#[derive(Debug)]
pub(super) struct PipeWriter {
    path: PathBuf,
    /// `None` until a reader connects.
    file: Option<File>,
    /// Number of flushes without a reader.
    tries: u32,
    /// Data that the pipe had no room for.
    buffer: Vec<u8>,
}

impl PipeWriter {
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let mut pipe = Self { path: path.into(), file: None, tries: 0, buffer: Vec::new() };
        pipe.connect()?;
        Ok(pipe)
    }

    /// Opens the pipe if it has a reader.
    fn connect(&mut self) -> io::Result<()> {
        match nonblocking().write(true).open(&self.path) {
            Ok(file) => self.file = Some(piped(file)?),
            Err(error) if error.raw_os_error() == Some(Errno::NXIO.raw_os_error()) => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Returns whether another packet of any length can be written.
    pub(super) fn has_room(&mut self) -> io::Result<bool> {
        if self.buffer.len() >= BLOCK {
            self.flush()?;
        }
        Ok(self.buffer.len() < BLOCK)
    }

    /// Returns the number of buffered bytes that the pipe has not accepted yet.
    pub(super) fn left(&self) -> usize {
        self.buffer.len()
    }
}

impl Write for PipeWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.buffer.write(bytes)
    }

    /// Writes as much as the pipe has room for. The connection to a reader is only tried now and then, because it takes
    /// longer than a write.
    fn flush(&mut self) -> io::Result<()> {
        if self.file.is_none() {
            self.tries = self.tries.wrapping_add(1);
            if self.tries.is_multiple_of(LOOKS) {
                self.connect()?;
            }
        }
        let Some(file) = &mut self.file else { return Ok(()) };
        let mut taken = 0;
        while let Some(rest) = self.buffer.get(taken..).filter(|rest| !rest.is_empty()) {
            match file.write(rest) {
                Ok(written) => taken += written,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.buffer.drain(..taken);
        Ok(())
    }
}

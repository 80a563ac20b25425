//! Files that are read directly into a session's transmit memory.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use super::Writer;
use crate::place::Segments;

impl<M: Segments> Writer<M> {
    /// Makes the kernel read up to `max` bytes of a file into the transmit memory, and commits them. Returns their
    /// number, which is less than requested only if no more space is available.
    ///
    /// # Errors
    /// System errors, and `UnexpectedEof` if the file ends early. The bytes read until then are committed.
    pub fn write_from(&mut self, file: BorrowedFd<'_>, position: u64, max: usize) -> io::Result<usize> {
        let (mut done, mut result) = (0, Ok(()));
        'spans: for span in self.spans(max) {
            let mut here = 0;
            while here < span.len {
                let at = i64::try_from(position.saturating_add((done + here) as u64)).unwrap_or(i64::MAX);
                // SAFETY: `span.len - here` bytes of the span are mapped from `here` on, and they belong to this writer
                // until it commits. The kernel writes them, so no reference exists to memory to which a stack in
                // another process could write.
                let read = unsafe {
                    libc::pread(file.as_raw_fd(), span.address.as_ptr().add(here).cast(), span.len - here, at)
                };
                match usize::try_from(read) {
                    Ok(0) => result = Err(io::ErrorKind::UnexpectedEof.into()),
                    Ok(read) => here += read,
                    Err(_) => result = Err(io::Error::last_os_error()),
                }
                match &result {
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => result = Ok(()),
                    Err(_) => {
                        done += here;
                        break 'spans;
                    }
                    Ok(()) => {}
                }
            }
            done += here;
        }
        self.commit(done);
        if result.is_ok() {
            self.want(max - done);
        }
        result.map(|()| done)
    }
}

#[cfg(all(test, not(loom)))]
#[allow(clippy::unwrap_used, reason = "tests may")]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;
    use std::sync::Arc;

    use super::*;
    use crate::{Arena, Fifo, Tx, Writer};

    #[test]
    #[cfg_attr(miri, ignore = "takes minutes")]
    fn write_from_stops_at_file_end() {
        let path = std::env::temp_dir().join(format!("offcore-session-{}", std::process::id()));
        let bytes: Vec<u8> = (0..9000u32).map(|at| (at % 251) as u8).collect();
        std::fs::write(&path, &bytes).unwrap();
        let file = File::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let mut arena = Arena::new(1 << 20).unwrap();
        let slot = arena.take_slot().unwrap();
        let mut tx = Fifo::<Tx>::new(slot);
        assert!(tx.grant(&mut arena, 4096));
        let mut writer = Writer::new(Arc::clone(arena.memory()), slot).unwrap();
        assert_eq!(writer.write_from(file.as_fd(), 100, 10).unwrap(), 10);
        assert_eq!(writer.write_from(file.as_fd(), 110, usize::MAX).unwrap(), 4086, "what there is room for");
        assert_eq!(tx.written(&arena).unwrap(), 4096);
        let sent = |tx: &Fifo<Tx>, arena: &Arena, from: u64, len| {
            let mut sent: Vec<u8> = Vec::new();
            for (address, len) in tx.pieces(arena, from, len) {
                // SAFETY: the piece has `len` mapped bytes, which were written and are not written again.
                sent.extend(unsafe { std::slice::from_raw_parts(address.as_ptr(), len) });
            }
            sent
        };
        assert!(sent(&tx, &arena, 0, 4096) == bytes[100..4196]);
        tx.acked(&mut arena, 4096);
        assert!(tx.grant(&mut arena, 8192));
        let error = writer.write_from(file.as_fd(), 8990, 100).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        assert_eq!(tx.written(&arena).unwrap(), 4106, "what the file has is written");
        assert!(sent(&tx, &arena, 4096, 10) == bytes[8990..]);
    }
}

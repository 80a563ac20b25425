//! Bytes in no cache, whichever core's, however large the caches are.

use std::arch::x86_64::{_mm_clflush, _mm_mfence};
use std::ptr;

use offcore_session::Writer;
use offcore_stats::tsc;

/// Bytes of a cache line.
const LINE: usize = 64;

/// Writes these bytes back to memory and drops their lines from all caches.
pub(crate) fn flush(bytes: &[u8]) {
    // SAFETY: a slice may be read.
    unsafe { flush_at(bytes.as_ptr(), bytes.len()) };
}

/// # Safety
/// The bytes are mapped and may be read.
unsafe fn flush_at(bytes: *const u8, len: usize) {
    for line in (bytes.addr() / LINE * LINE..bytes.addr() + len).step_by(LINE) {
        // SAFETY: the line has one of the bytes, and so is on a page that is mapped.
        unsafe { _mm_clflush(bytes.with_addr(line)) };
    }
    // SAFETY: every x86-64 CPU has SSE2. Whoever is told of the bytes next finds them in memory.
    unsafe { _mm_mfence() };
}

/// Writes as [`Writer::write`] does, and flushes what it has written. Returns how much that was, and the TSC ticks that
/// flushing took.
pub(crate) fn write(writer: &mut Writer, from: &[u8]) -> (usize, u64) {
    let (mut done, mut flushing) = (0, 0);
    for span in writer.spans(from.len()) {
        let (to, from) = (span.address().as_ptr(), &from[done..done + span.len()]);
        // SAFETY: a span is mapped and the writer's until it commits; the slice is as long and no shared memory.
        unsafe {
            // copy-ok: what a write is
            ptr::copy_nonoverlapping(from.as_ptr(), to, span.len());
            let start = tsc::now();
            flush_at(to, span.len());
            flushing += tsc::now() - start;
        }
        done += span.len();
    }
    writer.commit(done);
    (done, flushing)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_stay_what_they_are() {
        let bytes: Vec<u8> = (0..=255).collect();
        for range in [0..256, 1..2, 63..65, 7..7] {
            flush(&bytes[range]);
        }
        assert!(bytes.iter().enumerate().all(|(at, &byte)| at == usize::from(byte)));
    }
}

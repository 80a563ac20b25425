//! Evicts bytes from the caches of all cores, independent of the caches' sizes.

use std::arch::x86_64::{_mm_clflush, _mm_mfence};
use std::ptr;

use offcore_session::Writer;
use offcore_stats::tsc;

/// Bytes per cache line.
const LINE: usize = 64;

/// Writes `bytes` back to memory and evicts their lines from all caches.
pub(crate) fn flush(bytes: &[u8]) {
    // SAFETY: `bytes` is a slice, so its range is mapped and readable.
    unsafe { flush_at(bytes.as_ptr(), bytes.len()) };
}

/// # Safety
/// The range of `len` bytes at `bytes` must be mapped and readable.
unsafe fn flush_at(bytes: *const u8, len: usize) {
    for line in (bytes.addr() / LINE * LINE..bytes.addr() + len).step_by(LINE) {
        // SAFETY: the line contains at least one byte of the range, so it lies on a mapped page.
        unsafe { _mm_clflush(bytes.with_addr(line)) };
    }
    // SAFETY: every x86-64 CPU has SSE2. The fence orders the flushes before anything that publishes the bytes to
    // another reader.
    unsafe { _mm_mfence() };
}

/// Writes as [`Writer::write`] does and flushes the written bytes. Returns the number of written bytes and the TSC
/// ticks that flushing took.
pub(crate) fn write(writer: &mut Writer, from: &[u8]) -> (usize, u64) {
    let (mut done, mut flushing) = (0, 0);
    for span in writer.spans(from.len()) {
        let (to, from) = (span.address().as_ptr(), &from[done..done + span.len()]);
        // SAFETY: a span is mapped and belongs to the writer until the commit. `from` has the same length and is not
        // shared memory.
        unsafe {
            // copy-ok: this copy is the write itself
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
    fn flush_keeps_content() {
        let bytes: Vec<u8> = (0..=255).collect();
        for range in [0..256, 1..2, 63..65, 7..7] {
            flush(&bytes[range]);
        }
        assert!(bytes.iter().enumerate().all(|(at, &byte)| at == usize::from(byte)));
    }
}

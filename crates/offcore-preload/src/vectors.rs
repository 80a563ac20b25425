//! Copies between a program's buffers and shared memory.

use core::ffi::c_int;
use core::ptr;
use core::slice;

use libc::{c_void, iovec, msghdr};
use offcore_session::Span;

use crate::sys::Errno;

/// Maximum number of buffers of a call (`IOV_MAX`).
const MOST: usize = 1024;

/// A program's buffers, as in `readv`.
#[derive(Clone, Copy)]
pub(crate) struct Buffers<'a>(&'a [iovec]);

impl<'a> Buffers<'a> {
    /// # Safety
    /// `buffers` points to `count` buffers that live for `'a`.
    pub(crate) unsafe fn new(buffers: *const iovec, count: usize) -> Result<Self, Errno> {
        match count {
            0 => Ok(Self(&[])),
            1..=MOST if !buffers.is_null() => {
                // SAFETY: `buffers` is not null, so it points to `count` buffers that live for `'a`, as the caller
                // guarantees.
                Ok(Self(unsafe { slice::from_raw_parts(buffers, count) }))
            }
            1..=MOST => Err(libc::EFAULT),
            _ => Err(libc::EINVAL),
        }
    }

    /// # Safety
    /// The same as for [`new`](Self::new).
    pub(crate) unsafe fn counted(buffers: *const iovec, count: c_int) -> Result<Self, Errno> {
        let count = usize::try_from(count).map_err(|_| libc::EINVAL)?;
        // SAFETY: the caller guarantees that `buffers` points to `count` buffers that live for `'a`.
        unsafe { Self::new(buffers, count) }
    }

    /// Returns the buffers of a message.
    ///
    /// # Safety
    /// The header describes buffers as [`new`](Self::new) requires them.
    pub(crate) unsafe fn of_message(header: &'a msghdr) -> Result<Self, Errno> {
        if header.msg_iovlen > MOST {
            return Err(libc::EMSGSIZE);
        }
        // SAFETY: the caller guarantees that the header has `msg_iovlen` buffers that live for `'a`.
        unsafe { Self::new(header.msg_iov, header.msg_iovlen) }
    }

    /// Returns a list of one buffer.
    pub(crate) fn one(buffer: &'a iovec) -> Self {
        Self(slice::from_ref(buffer))
    }

    /// Returns the total length in bytes.
    pub(crate) fn len(self) -> usize {
        self.0.iter().map(|buffer| buffer.iov_len).fold(0, usize::saturating_add)
    }

    /// Returns the parts of the buffers from byte `skip` on.
    fn from(self, mut skip: usize) -> impl Iterator<Item = (*mut u8, usize)> {
        self.0.iter().filter_map(move |buffer| {
            let here = skip.min(buffer.iov_len);
            skip -= here;
            let left = buffer.iov_len - here;
            (left > 0).then(|| (buffer.iov_base.cast::<u8>().wrapping_add(here), left))
        })
    }

    /// Copies shared memory to the buffers from byte `skip` on. Returns the number of bytes.
    ///
    /// # Safety
    /// The buffers are valid for writes.
    pub(crate) unsafe fn fill<'s>(self, skip: usize, spans: impl Iterator<Item = Span<'s>>) -> usize {
        // SAFETY: the caller guarantees that the buffers are writable; spans are mapped, and do not overlap with a
        // program's buffers.
        // copy-ok: the application's core copies the data of a read
        self.pair_up(skip, spans, |ours, shared, len| unsafe { ptr::copy_nonoverlapping(shared, ours, len) })
    }

    /// Copies the buffers from byte `skip` on to shared memory. Returns the number of bytes.
    ///
    /// # Safety
    /// The buffers are valid for reads.
    pub(crate) unsafe fn drain<'s>(self, skip: usize, spans: impl Iterator<Item = Span<'s>>) -> usize {
        // SAFETY: the caller guarantees that the buffers are readable; spans are mapped, and do not overlap with a
        // program's buffers.
        // copy-ok: the application's core copies the data of a write
        self.pair_up(skip, spans, |ours, shared, len| unsafe { ptr::copy_nonoverlapping(ours, shared, len) })
    }

    /// Copies bytes of the library to the buffers. Returns the number of bytes.
    ///
    /// # Safety
    /// The buffers are valid for writes.
    pub(crate) unsafe fn put(self, bytes: &[u8]) -> usize {
        let mut rest = bytes;
        for (to, len) in self.from(0) {
            let (here, behind) = rest.split_at(len.min(rest.len()));
            // SAFETY: the caller guarantees that the buffers are writable; `here` is memory of the library, so they do
            // not overlap.
            // copy-ok: a few bytes of an error
            unsafe { ptr::copy_nonoverlapping(here.as_ptr(), to, here.len()) };
            rest = behind;
        }
        bytes.len() - rest.len()
    }

    /// Copies all buffers to `to`.
    ///
    /// # Safety
    /// The buffers are valid for reads, and `to` is valid for writes of their total length.
    pub(crate) unsafe fn gather(self, to: *mut u8) {
        let mut to = to;
        for (from, len) in self.from(0) {
            // SAFETY: the caller guarantees that the buffers are readable and that `to` has space for them; they do not
            // overlap.
            // copy-ok: the application's core copies the data of a write
            unsafe { ptr::copy_nonoverlapping(from, to, len) };
            to = to.wrapping_add(len);
        }
    }

    fn pair_up<'s>(
        self,
        skip: usize,
        spans: impl Iterator<Item = Span<'s>>,
        mut copy: impl FnMut(*mut u8, *mut u8, usize),
    ) -> usize {
        let (mut buffers, mut buffer) = (self.from(skip), (ptr::null_mut::<u8>(), 0usize));
        let mut done = 0;
        for span in spans {
            let mut at = 0;
            while at < span.len() {
                if buffer.1 == 0 {
                    let Some(next) = buffers.next() else { return done };
                    buffer = next;
                }
                let len = buffer.1.min(span.len() - at);
                copy(buffer.0, span.address().as_ptr().wrapping_add(at), len);
                buffer = (buffer.0.wrapping_add(len), buffer.1 - len);
                at += len;
                done += len;
            }
        }
        done
    }
}

/// Returns a buffer for calls without a list of buffers.
pub(crate) fn buffer(address: *const c_void, len: usize) -> iovec {
    iovec { iov_base: address.cast_mut(), iov_len: len.min(isize::MAX as usize) }
}

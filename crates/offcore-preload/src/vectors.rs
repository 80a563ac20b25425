//! Bytes between a program's buffers and shared memory.

use core::ffi::c_int;
use core::ptr;
use core::slice;

use libc::{c_void, iovec, msghdr};
use offcore_session::Span;

use crate::sys::Errno;

/// Buffers of a call, `IOV_MAX` at most.
const MOST: usize = 1024;

/// A program's buffers, as `readv` has them.
#[derive(Clone, Copy)]
pub(crate) struct Buffers<'a>(&'a [iovec]);

impl<'a> Buffers<'a> {
    /// # Safety
    /// `buffers` is a list of `count` buffers, which live for `'a`.
    pub(crate) unsafe fn new(buffers: *const iovec, count: usize) -> Result<Self, Errno> {
        match count {
            0 => Ok(Self(&[])),
            1..=MOST if !buffers.is_null() => {
                // SAFETY: the caller's promise.
                Ok(Self(unsafe { slice::from_raw_parts(buffers, count) }))
            }
            1..=MOST => Err(libc::EFAULT),
            _ => Err(libc::EINVAL),
        }
    }

    /// # Safety
    /// As [`new`](Self::new), with a count as calls have it.
    pub(crate) unsafe fn counted(buffers: *const iovec, count: c_int) -> Result<Self, Errno> {
        let count = usize::try_from(count).map_err(|_| libc::EINVAL)?;
        // SAFETY: the caller's promise.
        unsafe { Self::new(buffers, count) }
    }

    /// Those of a message.
    ///
    /// # Safety
    /// As [`new`](Self::new).
    pub(crate) unsafe fn of_message(header: &'a msghdr) -> Result<Self, Errno> {
        if header.msg_iovlen > MOST {
            return Err(libc::EMSGSIZE);
        }
        // SAFETY: the caller's promise.
        unsafe { Self::new(header.msg_iov, header.msg_iovlen) }
    }

    /// One buffer.
    pub(crate) fn one(buffer: &'a iovec) -> Self {
        Self(slice::from_ref(buffer))
    }

    /// Bytes of all of them.
    pub(crate) fn len(self) -> usize {
        self.0.iter().map(|buffer| buffer.iov_len).fold(0, usize::saturating_add)
    }

    /// Parts of the buffers from byte `skip` on.
    fn from(self, mut skip: usize) -> impl Iterator<Item = (*mut u8, usize)> {
        self.0.iter().filter_map(move |buffer| {
            let here = skip.min(buffer.iov_len);
            skip -= here;
            let left = buffer.iov_len - here;
            (left > 0).then(|| (buffer.iov_base.cast::<u8>().wrapping_add(here), left))
        })
    }

    /// Copies shared memory to the buffers from byte `skip` on; how many bytes.
    ///
    /// # Safety
    /// The buffers are the program's to be written.
    pub(crate) unsafe fn fill<'s>(self, skip: usize, spans: impl Iterator<Item = Span<'s>>) -> usize {
        // SAFETY: the program's buffer, as the caller promises, and bytes of a span, which are mapped; they do not overlap.
        // copy-ok: what a read is; the application's core makes it
        self.meet(skip, spans, |ours, shared, len| unsafe { ptr::copy_nonoverlapping(shared, ours, len) })
    }

    /// Copies the buffers from byte `skip` on to shared memory; how many bytes.
    ///
    /// # Safety
    /// The buffers are the program's to be read.
    pub(crate) unsafe fn drain<'s>(self, skip: usize, spans: impl Iterator<Item = Span<'s>>) -> usize {
        // SAFETY: as above.
        // copy-ok: the application's core copies the data of a write
        self.meet(skip, spans, |ours, shared, len| unsafe { ptr::copy_nonoverlapping(ours, shared, len) })
    }

    /// Copies bytes of the library's own to the buffers; how many.
    ///
    /// # Safety
    /// The buffers are the program's to be written.
    pub(crate) unsafe fn put(self, bytes: &[u8]) -> usize {
        let mut rest = bytes;
        for (to, len) in self.from(0) {
            let (here, behind) = rest.split_at(len.min(rest.len()));
            // SAFETY: the caller's promise; they do not overlap.
            // copy-ok: a few bytes of an error
            unsafe { ptr::copy_nonoverlapping(here.as_ptr(), to, here.len()) };
            rest = behind;
        }
        bytes.len() - rest.len()
    }

    /// Copies all of the buffers to `to`.
    ///
    /// # Safety
    /// The buffers can be read, and `to` has room for them.
    pub(crate) unsafe fn gather(self, to: *mut u8) {
        let mut to = to;
        for (from, len) in self.from(0) {
            // SAFETY: the caller's promise; they do not overlap.
            // copy-ok: the application's core copies the data of a write
            unsafe { ptr::copy_nonoverlapping(from, to, len) };
            to = to.wrapping_add(len);
        }
    }

    fn meet<'s>(
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

/// One buffer, as calls without vectors have it.
pub(crate) fn buffer(address: *const c_void, len: usize) -> iovec {
    iovec { iov_base: address.cast_mut(), iov_len: len.min(isize::MAX as usize) }
}

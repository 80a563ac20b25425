//! Streams: receiving and sending.

use core::ffi::c_int;
use core::sync::atomic::{AtomicU32, Ordering};

use libc::iovec;
use offcore_session::slot::{flags, state, wish};

use crate::lock::SlotLock;
use crate::session::Session;
use crate::sys::{self, Errno};
use crate::urgent;
use crate::vectors::Buffers;

/// Number of read bytes after which the stack is notified. The peer may then send as many more.
const TELL_EVERY: u32 = 16 << 10;
/// Maximum length that a call writes completely or not at all.
const ATOMIC: usize = 4096;
/// Number of bytes of a file that are read at once.
const FILE_CHUNK: usize = 256 << 10;

/// Receives as `recvmsg` does.
///
/// # Safety
/// The buffers are valid for writes.
pub(crate) unsafe fn receive(session: &Session, buffers: Buffers<'_>, how: c_int) -> Result<usize, Errno> {
    if how & libc::MSG_OOB != 0 {
        // SAFETY: the caller guarantees that the buffers are writable.
        return unsafe { urgent::receive(session, buffers, how) };
    }
    if how & libc::MSG_ERRQUEUE != 0 {
        return Err(libc::EAGAIN);
    }
    if !matches!(session.slot.state(), state::OPEN | state::CONNECTING) {
        return Err(session.take_error().unwrap_or(libc::ENOTCONN));
    }
    let peek = how & libc::MSG_PEEK != 0;
    let all = how & libc::MSG_WAITALL != 0 && !peek;
    let (wanted, mut done) = (buffers.len(), 0);
    let least = if all {
        wanted
    } else if peek {
        1
    } else {
        session.low_water_mark().min(wanted)
    };
    loop {
        // These flags are read before the data: when the end is visible, so is the data before it.
        let (is_over, is_ended) = (session.is_over(), session.slot.flags() & flags::ENDED != 0);
        // SAFETY: the caller guarantees that the buffers are writable.
        let (here, available) = unsafe { take(session, buffers, done, how) }?;
        done += here;
        if done > 0 && (done >= least || session.is_at_mark()) || wanted == 0 && available {
            return Ok(done);
        }
        if is_over || is_ended || session.has_option_bit(wish::NO_READ) {
            return match session.take_error() {
                Some(error) if done == 0 && !is_ended => Err(error),
                _ => Ok(done),
            };
        }
        if how & libc::MSG_DONTWAIT != 0 {
            return if done > 0 { Ok(done) } else { Err(libc::EAGAIN) };
        }
        match session.wait_readable() {
            Ok(true) => {}
            // The stack sets these flags before it shows the end. Without a flag, the stack is gone.
            Ok(false) if session.slot.flags() & flags::ENDED != 0 || session.is_over() => {}
            Err(libc::ECONNRESET) if session.is_over() => {}
            Ok(false) => return Ok(done),
            Err(_) if done > 0 => return Ok(done),
            Err(error) => return Err(error),
        }
    }
}

/// Takes available data from byte `skip` of the buffers on. Returns its length, and whether data was available.
///
/// # Safety
/// The buffers are valid for writes.
unsafe fn take(
    session: &Session,
    buffers: Buffers<'_>,
    skip: usize,
    how: c_int,
) -> Result<(usize, bool), Errno> {
    let wishes = &session.slot.wishes;
    let lock = SlotLock::new(&wishes.reading);
    if lock.is_nested() && wishes.moving.load(Ordering::Relaxed) != 0 {
        return Err(libc::EAGAIN);
    }
    let (reader, len, available) = loop {
        let mut reader = session.reader()?;
        let available = reader.available();
        let len = if how & libc::MSG_TRUNC != 0 {
            available.min(buffers.len() - skip)
        } else {
            // SAFETY: the caller guarantees that the buffers are writable.
            unsafe { buffers.fill(skip, reader.spans()) }
        };
        // A read that finds nothing else skips the urgent byte.
        let passes = available == 0 && reader.skips_urgent();
        let consumes = how & libc::MSG_PEEK == 0 && len > 0 || passes;
        // This fails if a signal handler has read in between.
        if !consumes || reader.consume_alone(len) {
            session.stop_at_urgent(&mut reader);
            break (reader, len, available);
        }
    };
    if how & libc::MSG_PEEK == 0 && len > 0 {
        tell_consumed(session, len);
        session.settle(&reader, reader.available());
    } else if available == 0 {
        session.settle(&reader, 0);
    }
    Ok((len, available > 0))
}

/// Counts read bytes, and notifies the stack occasionally.
fn tell_consumed(session: &Session, len: usize) {
    let untold = &session.slot.wishes.untold;
    let now = untold.load(Ordering::Relaxed).saturating_add(len as u32);
    if now < session.notify_interval(TELL_EVERY) {
        untold.store(now, Ordering::Relaxed);
    } else {
        untold.store(0, Ordering::Relaxed);
        session.mark();
    }
}

/// The source of sent bytes.
#[derive(Clone, Copy)]
enum Source<'a> {
    Buffers(Buffers<'a>),
    /// A file, and the position in it. -1 is the current position.
    File(c_int, i64),
}

/// Sends as `sendmsg` does.
///
/// # Safety
/// The buffers are valid for reads.
pub(crate) unsafe fn send(session: &Session, buffers: Buffers<'_>, how: c_int) -> Result<usize, Errno> {
    if how & (libc::MSG_ZEROCOPY | libc::MSG_FASTOPEN) != 0 {
        return Err(libc::EOPNOTSUPP);
    }
    // SAFETY: the caller guarantees that the buffers are readable.
    unsafe { send_from(session, Source::Buffers(buffers), buffers.len(), how) }
}

/// Sends a file as `sendfile` does, from `position` on. -1 is the current position.
pub(crate) fn send_file(
    session: &Session,
    file: c_int,
    position: i64,
    len: usize,
    how: c_int,
) -> Result<usize, Errno> {
    // SAFETY: the source is not a list of buffers.
    unsafe { send_from(session, Source::File(file, position), len, how) }
}

/// # Safety
/// Buffers in `source` are valid for reads.
unsafe fn send_from(session: &Session, source: Source<'_>, len: usize, how: c_int) -> Result<usize, Errno> {
    let mut done = 0;
    let mut nonblocking = (how & libc::MSG_DONTWAIT != 0).then_some(true);
    let mut signals = None;
    loop {
        // As on Linux, the next call reports the end.
        if done > 0 && (session.is_over() || session.has_option_bit(wish::END)) {
            return Ok(done);
        }
        let is_open = may_send(session, how)?;
        let mut ended = false;
        if is_open {
            // SAFETY: the caller guarantees that buffers in `source` are readable.
            match unsafe { put(session, source, done, len, how) } {
                Ok(Put { done: here, end, interrupts }) => {
                    done += here;
                    ended = end;
                    // The missing space may be held by the call that this one has interrupted.
                    nonblocking = if interrupts { Some(true) } else { nonblocking };
                }
                Err(error) if done == 0 => return Err(error),
                Err(_) => ended = true,
            }
        }
        if done == len || ended {
            return Ok(done);
        }
        if *nonblocking.get_or_insert_with(|| session.is_nonblocking()) {
            return if done > 0 { Ok(done) } else { Err(libc::EAGAIN) };
        }
        let waited = if done > 0 {
            // If a signal arrives, also while this call does not wait, the call returns the number of written bytes.
            session.wait_gate_or_signal(signals.get_or_insert_with(sys::Blocked::new))
        } else {
            session.wait_gate()
        };
        match waited {
            Ok(()) => {}
            Err(_) if session.is_over() => {}
            Err(_) if done > 0 => return Ok(done),
            Err(libc::EPIPE) => return Err(broken_pipe(how)),
            Err(error) => return Err(error),
        }
    }
}

/// Returns whether the session can be written to, or `false` while it connects.
fn may_send(session: &Session, how: c_int) -> Result<bool, Errno> {
    if session.has_option_bit(wish::END) {
        return Err(broken_pipe(how));
    }
    if session.is_over() {
        return Err(match session.take_error() {
            None | Some(libc::EPIPE) => broken_pipe(how),
            Some(error) => error,
        });
    }
    match session.slot.state() {
        state::OPEN => Ok(true),
        state::CONNECTING => Ok(false),
        _ => Err(broken_pipe(how)),
    }
}

/// Returns the error of a write without a reader, and raises `SIGPIPE`.
fn broken_pipe(how: c_int) -> Errno {
    if how & libc::MSG_NOSIGNAL == 0 {
        sys::raise(libc::SIGPIPE);
    }
    libc::EPIPE
}

/// Result of a write: the number of bytes, and whether the source is exhausted.
struct Put {
    done: usize,
    end: bool,
    /// This call runs in a signal handler that has interrupted another writing call.
    interrupts: bool,
}

/// Writes as many bytes as fit, from byte `skip` of `len` on. Closes the gate if some do not fit.
///
/// # Safety
/// Buffers in `source` are valid for reads.
unsafe fn put(
    session: &Session,
    source: Source<'_>,
    skip: usize,
    len: usize,
    how: c_int,
) -> Result<Put, Errno> {
    let mut done = 0;
    let lock = SlotLock::new(&session.slot.wishes.writing);
    if !lock.is_nested() {
        session.ask_for_blocks(len - skip);
    }
    loop {
        // SAFETY: the caller guarantees that buffers in `source` are readable.
        let mut put = unsafe { put_once(session, &lock, source, skip + done, len, how) }?;
        done += put.done;
        if skip + done < len && !put.end && !put.interrupts {
            session.close_gate();
            // As on Linux, a full buffer is sent although the socket is corked.
            session.slot.push();
            // SAFETY: the caller guarantees that buffers in `source` are readable.
            put = unsafe { put_once(session, &lock, source, skip + done, len, how) }?;
            done += put.done;
        }
        // The gate may have been opened because of more space, so another attempt follows a partial write.
        if skip + done == len || put.end || put.interrupts || put.done == 0 {
            if session.limits_unsent() && !put.interrupts {
                // `poll` reports space again when the stack has sent enough.
                session.close_gate();
            }
            session.mark();
            return Ok(Put { done, ..put });
        }
    }
}

/// # Safety
/// Buffers in `source` are valid for reads.
unsafe fn put_once(
    session: &Session,
    lock: &SlotLock<'_>,
    source: Source<'_>,
    skip: usize,
    len: usize,
    how: c_int,
) -> Result<Put, Errno> {
    let (least, most, _signals) = match source {
        // Short writes by several threads are not interleaved.
        Source::Buffers(_) => (if len <= ATOMIC { len - skip } else { 1 }, len - skip, None),
        // The length is only known afterwards. Until then, no signal handler may write behind this data.
        Source::File(..) => (1, (len - skip).min(FILE_CHUNK), Some(sys::Blocked::new())),
    };
    let turn = session.turn(lock)?;
    let interrupts = turn.is_inner();
    let Some(claim) = Session::claim(&turn, least, most) else {
        return Ok(Put { done: 0, end: false, interrupts });
    };
    let spans = turn.spans(claim, 0, claim.len());
    let (done, end) = match source {
        // SAFETY: the caller guarantees that the buffers are readable; the claimed range belongs to this turn until it
        // is dropped.
        Source::Buffers(buffers) => (unsafe { buffers.drain(skip, spans) }, Ok(false)),
        Source::File(file, position) => {
            let position = if position < 0 { position } else { position + skip as i64 };
            read_file(file, position, spans)
        }
    };
    if done < claim.len() {
        turn.cut(claim, done);
    }
    let end_of_claim = claim.from() + done as u64;
    if how & libc::MSG_MORE != 0 {
        session.slot.expect_more(claim.from()..end_of_claim);
    }
    if how & libc::MSG_OOB != 0 && skip + done == len {
        // The last byte is the urgent one.
        session.slot.urge(end_of_claim);
    }
    match end {
        Err(error) if done == 0 => Err(error),
        _ => Ok(Put { done, end: end.unwrap_or(true), interrupts }),
    }
}

/// Makes the kernel read a file to shared memory. Returns the number of bytes, and whether the file has ended.
fn read_file<'s>(
    file: c_int,
    position: i64,
    spans: impl Iterator<Item = offcore_session::Span<'s>>,
) -> (usize, Result<bool, Errno>) {
    let mut done = 0;
    for span in spans {
        let mut here = 0;
        while here < span.len() {
            let to = span.address().as_ptr().wrapping_add(here);
            let to = iovec { iov_base: to.cast(), iov_len: span.len() - here };
            let at = if position < 0 { position } else { position + done as i64 };
            // SAFETY: the span belongs to this writer until it is committed.
            match unsafe { sys::read_at(file, to, at) } {
                Ok(0) => return (done, Ok(true)),
                Ok(read) => (here, done) = (here + read, done + read),
                Err(error) => return (done, Err(error)),
            }
        }
    }
    (done, Ok(false))
}

/// Marks that received data is being moved to a pipe, until it is dropped.
struct Moving<'a>(&'a AtomicU32);

impl<'a> Moving<'a> {
    fn new(word: &'a AtomicU32) -> Self {
        word.store(1, Ordering::Relaxed);
        Self(word)
    }
}

impl Drop for Moving<'_> {
    fn drop(&mut self) {
        self.0.store(0, Ordering::Relaxed);
    }
}

/// Moves received bytes to a pipe, as many as fit, as `splice` does. With `wait`, it waits for space in the pipe.
pub(crate) fn splice_out(session: &Session, to: c_int, len: usize, wait: bool) -> Result<usize, Errno> {
    let wait = may_wait(to, libc::O_WRONLY, wait)?;
    loop {
        sys::wait_for(to, libc::POLLOUT, wait)?;
        // SAFETY: the list of buffers is empty.
        let nothing = unsafe { receive(session, Buffers::new(core::ptr::null(), 0)?, 0) }?;
        let wishes = &session.slot.wishes;
        let lock = SlotLock::new(&wishes.reading);
        if lock.is_nested() {
            return Err(libc::EAGAIN);
        }
        let _moving = Moving::new(&wishes.moving);
        let mut reader = session.reader()?;
        let Some(span) = reader.spans().next() else {
            if reader.skips_urgent() {
                reader.consume(0);
            }
            if session.is_over() || session.slot.flags() & flags::ENDED != 0 {
                return Ok(nothing);
            }
            continue;
        };
        let from = iovec { iov_base: span.address().as_ptr().cast(), iov_len: span.len().min(len) };
        // SAFETY: the span holds received bytes, which are not overwritten until they are consumed.
        let written = match unsafe { sys::write_at_once(to, from) } {
            // Another writer has filled the pipe.
            Err(libc::EAGAIN) if wait => continue,
            written => written?,
        };
        let left = reader.available().saturating_sub(written);
        reader.consume(written);
        tell_consumed(session, written);
        session.settle(&reader, left);
        return Ok(written);
    }
}

/// Returns whether `splice` waits for a pipe, which requires a blocking pipe. Fails with `EBADF` without the access
/// right, and with `EINVAL` if the descriptor is not a pipe.
fn may_wait(pipe: c_int, access: c_int, wait: bool) -> Result<bool, Errno> {
    let flags = sys::fcntl(pipe, libc::F_GETFL, 0)? as c_int;
    if ![access, libc::O_RDWR].contains(&(flags & libc::O_ACCMODE)) {
        return Err(libc::EBADF);
    }
    match sys::is_pipe(pipe) {
        true => Ok(wait && flags & libc::O_NONBLOCK == 0),
        false => Err(libc::EINVAL),
    }
}

/// Sends up to `len` bytes of a pipe's present content, as `splice` does. `more` is `SPLICE_F_MORE`.
pub(crate) fn splice_in(
    session: &Session,
    from: c_int,
    len: usize,
    wait: bool,
    more: bool,
) -> Result<usize, Errno> {
    // Waits for data in the pipe, so that its length is known.
    sys::wait_for(from, libc::POLLIN, may_wait(from, libc::O_RDONLY, wait)?)?;
    let there = sys::readable(from)?;
    send_file(session, from, -1, len.min(there), if more { libc::MSG_MORE } else { 0 })
}

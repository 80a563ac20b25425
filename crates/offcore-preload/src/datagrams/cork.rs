//! Corked datagrams: several calls write one datagram (`MSG_MORE`, `UDP_CORK`). This process stores the bytes until the
//! last call.

use core::cell::UnsafeCell;
use core::ffi::c_int;
use core::ptr;
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use offcore_session::datagram::Header;

use super::{max_length, send_whole};
use crate::datagram_options as options;
use crate::lock::SlotLock;
use crate::session::Session;
use crate::sys::{self, Errno};
use crate::vectors::{Buffers, buffer};

/// Maximum number of corked sockets.
const MOST: usize = 64;
/// Bytes of memory per corked socket.
const ROOM: usize = 1 << 16;

/// An incomplete datagram. The socket's write lock protects it.
struct CorkedDatagram {
    /// Place and generation of the session, or 0 for a free entry.
    session: AtomicU64,
    header: UnsafeCell<Option<Header>>,
    bytes: AtomicUsize,
    len: AtomicUsize,
}

struct All([CorkedDatagram; MOST]);

// SAFETY: `header` and the memory at `bytes` are written only under the write lock of the session that owns the entry.
unsafe impl Sync for All {}

static ALL: All = All([const {
    CorkedDatagram {
        session: AtomicU64::new(0),
        header: UnsafeCell::new(None),
        bytes: AtomicUsize::new(0),
        len: AtomicUsize::new(0),
    }
}; MOST]);

/// Number of corked sockets.
static COUNT: AtomicUsize = AtomicUsize::new(0);

fn key(session: &Session) -> u64 {
    let generation = session.slot.identity.generation.load(Ordering::Relaxed);
    u64::from(session.place.number()) << 32 | u64::from(generation)
}

fn find(session: &Session) -> Option<&'static CorkedDatagram> {
    if COUNT.load(Ordering::Relaxed) == 0 {
        return None;
    }
    let key = key(session);
    ALL.0.iter().find(|begun| begun.session.load(Ordering::Acquire) == key)
}

/// Returns whether a socket is corked and has data.
pub(crate) fn is_begun(session: &Session) -> bool {
    find(session).is_some()
}

/// Reserves a free entry and maps its memory.
fn add(session: &Session) -> Result<&'static CorkedDatagram, Errno> {
    // The datagram of a closed socket is dropped, as on Linux.
    let is_gone = |key: u64| {
        let place = offcore_session::Place::new((key >> 32) as u32);
        let slot = place.and_then(|place| offcore_session::Segments::slot(&crate::link::Mapped, place));
        slot.is_none_or(|slot| slot.identity.generation.load(Ordering::Relaxed) != key as u32)
    };
    let taken = ALL.0.iter().find(|begun| {
        let old = begun.session.load(Ordering::Acquire);
        let free = old == 0 || is_gone(old);
        let taken = free
            && begun.session.compare_exchange(old, key(session), Ordering::AcqRel, Ordering::Relaxed).is_ok();
        if taken && old == 0 {
            COUNT.fetch_add(1, Ordering::Relaxed);
        }
        taken
    });
    let begun = taken.ok_or(libc::ENOBUFS)?;
    if begun.bytes.load(Ordering::Relaxed) == 0 {
        match sys::map(-1, ROOM, true) {
            Ok(bytes) => begun.bytes.store(bytes as usize, Ordering::Relaxed),
            Err(error) => {
                begun.forget();
                return Err(error);
            }
        }
    }
    begun.len.store(0, Ordering::Relaxed);
    Ok(begun)
}

impl CorkedDatagram {
    fn forget(&self) {
        self.session.store(0, Ordering::Release);
        COUNT.fetch_sub(1, Ordering::Relaxed);
    }

    /// Appends the program's bytes. An error drops the datagram, as on Linux.
    ///
    /// # Safety
    /// The buffers are valid for reads, and the caller holds the write lock.
    unsafe fn append(&self, buffers: Buffers<'_>, most: usize) -> Result<usize, Errno> {
        let (at, len) = (self.len.load(Ordering::Relaxed), buffers.len());
        if len > most.min(ROOM).saturating_sub(at) {
            self.forget();
            return Err(libc::EMSGSIZE);
        }
        let to = ptr::with_exposed_provenance_mut::<u8>(self.bytes.load(Ordering::Relaxed)).wrapping_add(at);
        // SAFETY: the mapping has `ROOM` bytes, and all buffers fit behind the first `at` bytes. The caller holds the
        // write lock, which excludes other writers.
        unsafe { buffers.gather(to) };
        self.len.store(at + len, Ordering::Relaxed);
        Ok(len)
    }
}

/// Begins a datagram.
///
/// # Safety
/// The buffers are valid for reads.
pub(super) unsafe fn begin(session: &Session, header: &Header, buffers: Buffers<'_>) -> Result<usize, Errno> {
    let lock = SlotLock::new(&session.slot.wishes.writing);
    if lock.is_nested() {
        return Err(libc::EAGAIN);
    }
    let begun = add(session)?;
    // SAFETY: this call holds the write lock, and the caller guarantees that the buffers are readable.
    unsafe {
        *begun.header.get() = Some(*header);
        begun.append(buffers, max_length(header.peer))
    }
}

/// Appends to the datagram. Sends it unless more data follows.
///
/// # Safety
/// The buffers are valid for reads.
pub(super) unsafe fn append_or_send(
    session: &Session,
    buffers: Buffers<'_>,
    how: c_int,
) -> Result<usize, Errno> {
    let lock = SlotLock::new(&session.slot.wishes.writing);
    if lock.is_nested() {
        return Err(libc::EAGAIN);
    }
    let begun = find(session).ok_or(libc::EAGAIN)?;
    // SAFETY: this call holds the write lock.
    let header = unsafe { *begun.header.get() }.ok_or(libc::EINVAL)?;
    // SAFETY: the caller guarantees that the buffers are readable, and this call holds the write lock.
    let len = unsafe { begun.append(buffers, max_length(header.peer)) }?;
    drop(lock);
    if how & libc::MSG_MORE == 0 && options::bits(session) & options::bit::CORK == 0 {
        send(session, begun, header, how)?;
    }
    Ok(len)
}

/// Sends the datagram after `UDP_CORK` was cleared.
pub(crate) fn push(session: &Session) -> Result<(), Errno> {
    let Some(begun) = find(session) else { return Ok(()) };
    // SAFETY: the header was written before the entry got this session, and is not written again before the entry is
    // free.
    let header = unsafe { *begun.header.get() };
    header.map_or(Ok(()), |header| send(session, begun, header, 0).map(drop))
}

/// Sends the datagram. An error drops it.
fn send(session: &Session, begun: &CorkedDatagram, header: Header, how: c_int) -> Result<usize, Errno> {
    let bytes = ptr::with_exposed_provenance::<u8>(begun.bytes.load(Ordering::Relaxed));
    let part = buffer(bytes.cast(), begun.len.load(Ordering::Relaxed));
    // SAFETY: `part` describes the bytes that were appended to the mapping.
    let sent = unsafe { send_whole(session, header, Buffers::one(&part), how) };
    begun.forget();
    sent
}

//! Urgent data of streams, received with `MSG_OOB` (tcp(7)).

use core::ffi::c_int;

use offcore_session::slot::{flags, state, wish};

use crate::lock::SlotLock;
use crate::session::Session;
use crate::sys::Errno;
use crate::vectors::Buffers;

/// Receives the urgent byte.
///
/// # Errors
/// `EINVAL` without an urgent byte, after it was read, and with `SO_OOBINLINE`. `EAGAIN` before the byte has arrived.
///
/// # Safety
/// The buffers are valid for writes.
pub(crate) unsafe fn receive(session: &Session, buffers: Buffers<'_>, how: c_int) -> Result<usize, Errno> {
    if session.slot.state() == state::LISTENING {
        return Err(libc::ENOTCONN);
    }
    let _lock = SlotLock::new(&session.slot.wishes.reading);
    let position = session.slot.unread_urgent().filter(|_| !session.is_inline()).ok_or(libc::EINVAL)?;
    let reader = session.reader()?;
    let Some(byte) = reader.byte(position) else {
        let ends = session.is_over() || session.slot.flags() & flags::ENDED != 0;
        return if ends || session.has_option_bit(wish::NO_READ) { Ok(0) } else { Err(libc::EAGAIN) };
    };
    if how & libc::MSG_PEEK == 0 {
        session.slot.take_urgent(position);
        session.settle(&reader, reader.available());
    }
    // SAFETY: the caller guarantees that the buffers are writable.
    Ok(unsafe { buffers.put(&[byte]) })
}

//! Datagram sockets on the stack.

use core::ffi::c_int;
use core::net::{IpAddr, SocketAddr};
use core::sync::atomic::Ordering;

use offcore_session::datagram::{HEADER_LEN, Header, record_len};
use offcore_session::message::{Call, Question};
use offcore_session::slot::wish;

use crate::address::{self, End};
use crate::link;
use crate::lock::Held;
use crate::options;
use crate::session::Session;
use crate::sys::Errno;
use crate::vectors::Buffers;

/// A datagram that was received: bytes copied, its own length, and who sent it.
pub(crate) struct Received {
    pub(crate) copied: usize,
    pub(crate) len: usize,
    pub(crate) from: SocketAddr,
}

/// The peer of a connected socket.
pub(crate) fn peer(session: &Session) -> Option<SocketAddr> {
    let peer = address::of(session.slot, End::Peer);
    (peer.port() != 0).then_some(peer)
}

/// Connects the socket: it sends to one peer, and receives from nobody else. `None` undoes it.
pub(crate) fn connect(session: &Session, to: Option<SocketAddr>) -> Result<(), Errno> {
    let mut question = Question::new(Call::Connect, session.slot.identity.number.load(Ordering::Relaxed), 0);
    question.remote = to;
    question.local = Some(SocketAddr::new(address::unspecified(session.entry.v6), 0));
    match link::ask(&question, &[]) {
        Ok((_, received)) => {
            received.close();
            Ok(())
        }
        // Nothing that is sent to an address of the stack's own comes back.
        Err(libc::EOPNOTSUPP) => Err(libc::ENETUNREACH),
        Err(error) => Err(error),
    }
}

/// Receives a datagram; `None` when it has been shut down and there is none.
///
/// # Safety
/// The buffers are the program's to be written.
pub(crate) unsafe fn receive(
    session: &Session,
    buffers: Buffers<'_>,
    how: c_int,
) -> Result<Option<Received>, Errno> {
    if how & (libc::MSG_OOB | libc::MSG_ERRQUEUE) != 0 {
        return Err(libc::EAGAIN);
    }
    loop {
        // As Linux: an error comes before data.
        if let Some(error) = session.take_error() {
            return Err(error);
        }
        // SAFETY: the caller's promise.
        let received = unsafe { take(session, buffers, how) }?;
        if received.is_some() {
            return Ok(received);
        }
        if how & libc::MSG_DONTWAIT != 0 {
            return Err(libc::EAGAIN);
        }
        if !session.wait_readable()? {
            return match session.wants(wish::NO_READ) {
                true if session.is_nonblocking() => Err(libc::EAGAIN),
                true => Ok(None),
                false => Err(libc::ENOTCONN),
            };
        }
    }
}

/// Takes the oldest datagram; `None` when there is none.
///
/// # Safety
/// The buffers are the program's to be written.
unsafe fn take(session: &Session, buffers: Buffers<'_>, how: c_int) -> Result<Option<Received>, Errno> {
    let _lock = Held::new(&session.slot.wishes.reading);
    loop {
        // SAFETY: the caller's promise.
        if let Some(taken) = unsafe { take_once(session, buffers, how) }? {
            return Ok(taken.received());
        }
    }
}

/// What there was.
enum Taken {
    Nothing,
    Datagram(Received),
}

impl Taken {
    fn received(self) -> Option<Received> {
        match self {
            Self::Nothing => None,
            Self::Datagram(received) => Some(received),
        }
    }
}

/// `None`: a signal handler has read in between.
///
/// # Safety
/// The buffers are the program's to be written.
unsafe fn take_once(session: &Session, buffers: Buffers<'_>, how: c_int) -> Result<Option<Taken>, Errno> {
    let mut reader = session.reader()?;
    let mut header = [0; HEADER_LEN];
    if reader.peek(&mut header) < HEADER_LEN {
        session.settle(&reader, 0);
        return Ok(Some(Taken::Nothing));
    }
    let header = Header::from_bytes(&header).ok_or(libc::EIO)?;
    let (whole, len) = (record_len(header.len), usize::from(header.len));
    if reader.available() < whole {
        return Err(libc::EIO);
    }
    // SAFETY: the caller's promise.
    let copied = unsafe { buffers.fill(0, payload(reader.spans(), len)) };
    let left = reader.available() - whole;
    if how & libc::MSG_PEEK == 0 {
        if !reader.consume_alone(whole) {
            return Ok(None);
        }
        session.settle(&reader, left);
        session.mark();
    }
    Ok(Some(Taken::Datagram(Received { copied, len, from: header.peer })))
}

/// The spans of a record without its header, `len` bytes.
fn payload<'a>(
    spans: impl Iterator<Item = offcore_session::Span<'a>>,
    len: usize,
) -> impl Iterator<Item = offcore_session::Span<'a>> {
    let (mut skip, mut left) = (HEADER_LEN, len);
    spans.filter_map(move |span| {
        let from = skip.min(span.len());
        skip -= from;
        let here = (span.len() - from).min(left);
        left -= here;
        span.part(from, here)
    })
}

/// Whether the stack sends datagrams to an address, as far as that is known here.
fn may_be_sent_to(session: &Session, to: IpAddr) -> Result<(), Errno> {
    if matches!(to, IpAddr::V4(to) if to.is_broadcast()) && !options::may_broadcast(session) {
        return Err(libc::EACCES);
    }
    let by_kernel_only = to.is_unspecified() || to.is_loopback() || to.is_multicast();
    match by_kernel_only || matches!(to, IpAddr::V4(to) if to.is_broadcast()) {
        true => Err(libc::ENETUNREACH),
        false => Ok(()),
    }
}

/// Sends a datagram, to the peer where no address is given.
///
/// # Safety
/// The buffers are the program's to be read.
pub(crate) unsafe fn send(
    session: &Session,
    buffers: Buffers<'_>,
    how: c_int,
    to: Option<SocketAddr>,
) -> Result<usize, Errno> {
    if how & libc::MSG_ZEROCOPY != 0 || how & libc::MSG_OOB != 0 {
        return Err(libc::EOPNOTSUPP);
    }
    let peer = to.or_else(|| peer(session)).ok_or(libc::EDESTADDRREQ)?;
    if peer.port() == 0 {
        return Err(libc::EINVAL);
    }
    let most = if peer.is_ipv4() { 65_507 } else { 65_527 };
    let len = Some(buffers.len()).filter(|len| *len <= most).ok_or(libc::EMSGSIZE)?;
    may_be_sent_to(session, peer.ip())?;
    if let Some(error) = session.take_error() {
        return Err(error);
    }
    if session.wants(wish::END) {
        return Err(libc::EPIPE);
    }
    let local = address::unspecified(peer.is_ipv6());
    let header = Header { len: len as u16, peer, local };
    loop {
        // SAFETY: the caller's promise.
        let put = unsafe { put(session, &header, buffers) }?;
        if put == Put::Done {
            return Ok(len);
        }
        if put == Put::Interrupts || how & libc::MSG_DONTWAIT != 0 || session.is_nonblocking() {
            return Err(libc::EAGAIN);
        }
        session.wait_gate()?;
    }
}

/// What has become of a datagram.
#[derive(PartialEq, Eq)]
enum Put {
    Done,
    /// There is no room for it, and the gate is closed.
    Full,
    /// There is no room for it, and it may be the call that a signal handler has interrupted which has it.
    Interrupts,
}

/// Writes a datagram.
///
/// # Safety
/// The buffers are the program's to be read.
unsafe fn put(session: &Session, header: &Header, buffers: Buffers<'_>) -> Result<Put, Errno> {
    let lock = Held::new(&session.slot.wishes.writing);
    let whole = record_len(header.len);
    if !lock.is_nested() {
        session.ask_for_blocks(whole);
    }
    for closed in [false, true] {
        let turn = session.turn(&lock)?;
        if let Some(claim) = Session::claim(&turn, whole, whole) {
            let bytes = header.to_bytes();
            let head = crate::vectors::buffer(bytes.as_ptr().cast(), bytes.len());
            // SAFETY: a header of ours, and the program's buffers, as the caller promises.
            let done = unsafe {
                let done = Buffers::one(&head).drain(0, turn.spans(claim, 0, bytes.len()));
                done + buffers.drain(0, turn.spans(claim, bytes.len(), whole))
            };
            // What is left of 8 bytes is whatever was there: nobody reads it.
            let complete = done == bytes.len() + usize::from(header.len);
            if !complete {
                turn.cut(claim, 0);
            }
            drop(turn);
            session.mark();
            return Ok(if complete { Put::Done } else { Put::Full });
        }
        if turn.is_inner() {
            return Ok(Put::Interrupts);
        }
        if !closed {
            session.close_gate();
        }
    }
    session.mark();
    Ok(Put::Full)
}

/// Length of the next datagram, 0 without one.
pub(crate) fn next_len(session: &Session) -> Result<usize, Errno> {
    let _lock = Held::new(&session.slot.wishes.reading);
    let reader = session.reader()?;
    let mut header = [0; HEADER_LEN];
    let there = reader.peek(&mut header) == HEADER_LEN;
    Ok(Header::from_bytes(&header).filter(|_| there).map_or(0, |header| header.len.into()))
}

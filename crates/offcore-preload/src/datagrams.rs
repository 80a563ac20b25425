//! Datagram sockets on the stack.

mod again;
pub(crate) mod cork;
pub(crate) mod errors;

use core::ffi::c_int;
use core::net::{IpAddr, SocketAddr};
use core::sync::atomic::Ordering;

use offcore_session::app;
use offcore_session::datagram::{HEADER_LEN, Header, More, PathMtu, record_len};
use offcore_session::message::{Call, Question};
use offcore_session::slot::wish;

use crate::address::{self, End};
use crate::control::Control;
use crate::datagram_options as options;
use crate::link::{self, Mapped};
use crate::lock::SlotLock;
use crate::memberships;
use crate::session::Session;
use crate::sys::{self, Errno};
use crate::vectors::Buffers;

/// A received datagram: the number of copied bytes, its length, and its header.
pub(crate) struct ReceivedDatagram {
    pub(crate) copied: usize,
    pub(crate) len: usize,
    pub(crate) header: Header,
    /// The length of each datagram joined by `UDP_GRO`.
    pub(crate) segment: Option<u16>,
}

/// Maximum number of segments of a datagram (`UDP_MAX_SEGMENTS` of Linux).
const SENT_SEGMENTS: usize = 128;
/// Limits of a joined datagram: the number of datagrams in it, and its length.
const MOST_SEGMENTS: usize = 64;
const MOST_BYTES: usize = 65_535;
/// Time in nanoseconds within which a program's memory grows if possible, and pause in milliseconds between two
/// attempts.
const GROWTH: i128 = 100_000_000;
const RETRY: u64 = 1;

/// Returns the peer of a connected socket.
pub(crate) fn peer(session: &Session) -> Option<SocketAddr> {
    let peer = address::of(session.slot, End::Peer);
    (peer.port() != 0).then_some(peer)
}

/// Connects the socket: it sends to one peer, and receives from this peer only. `None` disconnects it.
pub(crate) fn connect(session: &Session, to: Option<SocketAddr>) -> Result<(), Errno> {
    let session =
        &if session.is_lost() || session.is_orphan() { again::move_now(session.fd)? } else { *session };
    if to.is_some_and(|to| link::is_broadcast(to.ip())) && !options::may_broadcast(session) {
        return Err(libc::EACCES);
    }
    let mut question = Question::new(Call::Connect, session.slot.identity.number.load(Ordering::Relaxed), 0);
    question.remote = to;
    question.local = Some(SocketAddr::new(address::unspecified(session.entry.v6), 0));
    match link::ask(&question, &[]) {
        Ok((_, received)) => {
            received.close();
            Ok(())
        }
        // Datagrams to the stack's own addresses are not looped back.
        Err(libc::EOPNOTSUPP) => Err(libc::ENETUNREACH),
        Err(error) => Err(error),
    }
}

/// Receives a datagram. Returns `None` if the socket was shut down and has no datagram.
///
/// # Safety
/// The buffers are valid for writes.
pub(crate) unsafe fn receive(
    session: &Session,
    buffers: Buffers<'_>,
    how: c_int,
) -> Result<Option<ReceivedDatagram>, Errno> {
    let (mut session, waits) = (*session, how & libc::MSG_DONTWAIT == 0);
    loop {
        if session.is_lost() {
            session = again::wait_for_stack(session.fd, waits)?;
        }
        let mut hides = false;
        // SAFETY: the caller guarantees that the buffers are writable.
        let received = unsafe { receive_here(&session, buffers, how, &mut hides) };
        if hides {
            session.mark();
        }
        match received {
            Err(again::GONE) => session = again::wait_for_stack(session.fd, waits)?,
            received => return received,
        }
    }
}

/// Receives a datagram on the present stack. Sets `hides` if the call hides errors while it waits.
///
/// # Safety
/// The buffers are valid for writes.
unsafe fn receive_here(
    session: &Session,
    buffers: Buffers<'_>,
    how: c_int,
    hides: &mut bool,
) -> Result<Option<ReceivedDatagram>, Errno> {
    if how & libc::MSG_OOB != 0 {
        return Err(libc::EAGAIN);
    }
    loop {
        // As on Linux, an error is reported before data.
        if let Some(error) = session.take_error() {
            return Err(error);
        }
        // SAFETY: the caller guarantees that the buffers are writable.
        let received = unsafe { take(session, buffers, how) }?;
        if received.is_some() {
            return Ok(received);
        }
        let waits = how & libc::MSG_DONTWAIT == 0;
        if (!waits || link::has_stack_ended()) && session.is_orphan() {
            return Err(again::GONE);
        }
        if !waits {
            return Err(libc::EAGAIN);
        }
        *hides |= session.hide_errors();
        let comes = session.wait_readable();
        if matches!(comes, Ok(false) | Err(libc::ECONNRESET)) && session.is_orphan() {
            return Err(again::GONE);
        }
        if !comes? {
            return match session.has_option_bit(wish::NO_READ) {
                true if session.is_nonblocking() => Err(libc::EAGAIN),
                true => Ok(None),
                false => Err(libc::ENOTCONN),
            };
        }
    }
}

/// Takes the oldest datagram, if any.
///
/// # Safety
/// The buffers are valid for writes.
unsafe fn take(
    session: &Session,
    buffers: Buffers<'_>,
    how: c_int,
) -> Result<Option<ReceivedDatagram>, Errno> {
    let _lock = SlotLock::new(&session.slot.wishes.reading);
    loop {
        // SAFETY: the caller guarantees that the buffers are writable.
        if let Some(taken) = unsafe { take_once(session, buffers, how) }? {
            return Ok(taken.received());
        }
    }
}

/// Result of [`take_once`].
enum Taken {
    Nothing,
    Datagram(ReceivedDatagram),
}

impl Taken {
    fn received(self) -> Option<ReceivedDatagram> {
        match self {
            Self::Nothing => None,
            Self::Datagram(received) => Some(received),
        }
    }
}

/// Takes a datagram. Returns `None` if a signal handler has read during the call.
///
/// # Safety
/// The buffers are valid for writes.
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
    // SAFETY: the caller guarantees that the buffers are writable.
    let copied = unsafe { buffers.fill(0, part_of_spans(reader.spans(), HEADER_LEN, len)) };
    if copied < len.min(buffers.len()) && link::has_stack_ended() {
        // The stack has ended and has freed a part of this memory.
        return Ok(Some(Taken::Nothing));
    }
    let mut received = ReceivedDatagram { copied, len, header, segment: None };
    let mut taken = whole;
    if options::bits(session) & options::bit::GRO != 0 && copied == len {
        // SAFETY: the caller guarantees that the buffers are writable.
        taken += unsafe { join_segments(&reader, whole, buffers, &mut received) };
    }
    let left = reader.available() - taken;
    if how & libc::MSG_PEEK == 0 {
        if !reader.consume_alone(taken) {
            return Ok(None);
        }
        session.settle(&reader, left);
        session.mark();
    }
    Ok(Some(Taken::Datagram(received)))
}

/// Joins the first datagram with the following ones, as GRO of Linux does: they have the same sender and length, and
/// the last one may be shorter. The following ones begin at byte `skip`. Returns their total length in the FIFO.
///
/// # Safety
/// The buffers are valid for writes.
unsafe fn join_segments(
    reader: &app::Reader<Mapped>,
    skip: usize,
    buffers: Buffers<'_>,
    first: &mut ReceivedDatagram,
) -> usize {
    let (room, each) = (buffers.len().min(MOST_BYTES), first.len);
    let mut at = skip;
    for _ in 1..MOST_SEGMENTS {
        let mut bytes = [0u8; HEADER_LEN];
        let buffer = crate::vectors::buffer(bytes.as_mut_ptr().cast(), bytes.len());
        // SAFETY: `buffer` describes the local array `bytes`.
        let there = unsafe { Buffers::one(&buffer).fill(0, part_of_spans(reader.spans(), at, HEADER_LEN)) };
        let next = Header::from_bytes(&bytes).filter(|_| there == HEADER_LEN);
        let same = |next: &Header| {
            let (ours, theirs) = (first.header.more, next.more);
            (next.peer, next.local) == (first.header.peer, first.header.local)
                && (theirs.tos, theirs.hops) == (ours.tos, ours.hops)
        };
        let Some(next) = next.filter(same) else { break };
        let (len, whole) = (usize::from(next.len), record_len(next.len));
        let fits = len > 0 && len <= each && first.copied + len <= room;
        if !fits || reader.available() < at + whole {
            break;
        }
        // SAFETY: the caller guarantees that the buffers are writable.
        let copied =
            unsafe { buffers.fill(first.copied, part_of_spans(reader.spans(), at + HEADER_LEN, len)) };
        if copied < len {
            break;
        }
        at += whole;
        first.copied += len;
        first.len += len;
        first.segment = Some(each as u16);
        if len < each {
            break;
        }
    }
    at - skip
}

/// Returns `len` bytes of the spans, starting at byte `skip`.
fn part_of_spans<'a>(
    spans: impl Iterator<Item = offcore_session::Span<'a>>,
    skip: usize,
    len: usize,
) -> impl Iterator<Item = offcore_session::Span<'a>> {
    let (mut skip, mut left) = (skip, len);
    spans.filter_map(move |span| {
        let from = skip.min(span.len());
        skip -= from;
        let here = (span.len() - from).min(left);
        left -= here;
        span.part(from, here)
    })
}

/// Checks whether datagrams to an address are permitted. The stack may know further reasons to refuse them.
fn may_be_sent_to(session: &Session, to: IpAddr) -> Result<(), Errno> {
    if link::is_broadcast(to) && !options::may_broadcast(session) {
        return Err(libc::EACCES);
    }
    if to.is_unspecified() || to.is_loopback() { Err(libc::ENETUNREACH) } else { Ok(()) }
}

/// Checks the length of a datagram. Segments and unfragmented datagrams must fit the path MTU.
fn check_len(session: &Session, more: &More, to: SocketAddr, len: usize) -> Result<(), Errno> {
    let segment = usize::from(more.segment);
    let piece = if segment > 0 { len.min(segment) } else { len };
    let mtu = session.slot.mtu().load(Ordering::Relaxed) as usize;
    let headers = if to.is_ipv6() { 48 } else { 28 };
    let must_fit = segment > 0 || matches!(more.path_mtu(), PathMtu::Do | PathMtu::Probe);
    if must_fit && mtu > 0 && headers + piece > mtu {
        errors::queue_length_error(session, to);
        return Err(libc::EMSGSIZE);
    }
    if segment > 0 && len > segment * SENT_SEGMENTS { Err(libc::EINVAL) } else { Ok(()) }
}

/// Sends a datagram. Without an address it is sent to the peer. With `MSG_MORE` or `UDP_CORK`, the next call appends to
/// it.
///
/// # Safety
/// The buffers are valid for reads.
pub(crate) unsafe fn send(
    session: &Session,
    buffers: Buffers<'_>,
    how: c_int,
    to: Option<SocketAddr>,
    control: &Control,
) -> Result<usize, Errno> {
    let lost = session.is_lost() || link::has_stack_ended() && session.is_orphan();
    let session = if lost { again::move_now(session.fd)? } else { *session };
    // SAFETY: the caller guarantees that the buffers are readable.
    match unsafe { send_here(&session, buffers, how, to, control) } {
        Err(again::GONE) => {
            let session = again::move_now(session.fd)?;
            // SAFETY: the caller guarantees that the buffers are readable.
            unsafe { send_here(&session, buffers, how, to, control) }
        }
        sent => sent,
    }
}

/// # Safety
/// The buffers are valid for reads.
unsafe fn send_here(
    session: &Session,
    buffers: Buffers<'_>,
    how: c_int,
    to: Option<SocketAddr>,
    control: &Control,
) -> Result<usize, Errno> {
    if how & libc::MSG_ZEROCOPY != 0 || how & libc::MSG_OOB != 0 {
        return Err(libc::EOPNOTSUPP);
    }
    if cork::is_begun(session) {
        // SAFETY: the caller guarantees that the buffers are readable.
        return unsafe { cork::append_or_send(session, buffers, how) };
    }
    let peer = to.or_else(|| peer(session)).ok_or(libc::EDESTADDRREQ)?;
    if peer.port() == 0 {
        return Err(libc::EINVAL);
    }
    let len = buffers.len();
    if len > max_length(peer) {
        errors::queue_length_error(session, peer);
        return Err(libc::EMSGSIZE);
    }
    may_be_sent_to(session, peer.ip())?;
    if let Some(error) = session.take_error() {
        return Err(error);
    }
    if session.has_option_bit(wish::END) {
        return Err(libc::EPIPE);
    }
    let v6 = peer.is_ipv6();
    let (source, index) = match peer.ip().is_multicast() {
        true => memberships::sending_interface(session, v6),
        false => (None, 0),
    };
    let local = control.local().or(source).unwrap_or(address::unspecified(v6));
    if local.is_ipv6() != v6 {
        return Err(libc::EINVAL);
    }
    let mut more = control.header_fields(session, peer.ip());
    if peer.ip().is_multicast() && more.index == 0 {
        more.index = index;
    }
    more.broadcast = !v6 && options::may_broadcast(session);
    let header = Header { len: len as u16, peer, local, more };
    if how & libc::MSG_MORE != 0 || options::bits(session) & options::bit::CORK != 0 {
        // SAFETY: the caller guarantees that the buffers are readable.
        return unsafe { cork::begin(session, &header, buffers) };
    }
    // SAFETY: the caller guarantees that the buffers are readable.
    unsafe { send_whole(session, header, buffers, how) }
}

/// Returns the maximum length of a datagram to an address.
fn max_length(peer: SocketAddr) -> usize {
    if peer.is_ipv4() { 65_507 } else { 65_527 }
}

/// Sends the buffers as one datagram with this header.
///
/// # Safety
/// The buffers are valid for reads.
unsafe fn send_whole(
    session: &Session,
    mut header: Header,
    buffers: Buffers<'_>,
    how: c_int,
) -> Result<usize, Errno> {
    let len = buffers.len();
    check_len(session, &header.more, header.peer, len)?;
    if len <= usize::from(header.more.segment) {
        header.more.segment = 0;
    }
    header.len = len as u16;
    let mut fails_at = None;
    loop {
        // SAFETY: the caller guarantees that the buffers are readable.
        let put = unsafe { put(session, &header, buffers) }?;
        if put == Put::Done {
            return Ok(len);
        }
        if put != Put::Interrupts && session.is_orphan() {
            return Err(again::GONE);
        }
        if put == Put::Interrupts || how & libc::MSG_DONTWAIT != 0 || session.is_nonblocking() {
            return Err(libc::EAGAIN);
        }
        if put == Put::Memory && !sys::is_sandboxed() {
            // The program's memory may be about to grow.
            let now = sys::now();
            if now >= *fails_at.get_or_insert(now + GROWTH) {
                return Err(libc::ENOBUFS);
            }
            sys::wait_for_signal(RETRY)?;
            continue;
        }
        session.wait_gate().map_err(|error| if session.is_orphan() { again::GONE } else { error })?;
    }
}

/// Result of an attempt to write a datagram.
#[derive(PartialEq, Eq)]
enum Put {
    Done,
    /// The datagram does not fit, and the gate is closed.
    Full,
    /// The stack has no memory for the datagram, and the socket has sent all previous ones.
    Memory,
    /// The datagram does not fit, and this call runs in a signal handler. The interrupted call may hold the space.
    Interrupts,
}

/// Writes a datagram.
///
/// # Safety
/// The buffers are valid for reads.
unsafe fn put(session: &Session, header: &Header, buffers: Buffers<'_>) -> Result<Put, Errno> {
    let lock = SlotLock::new(&session.slot.wishes.writing);
    let whole = record_len(header.len);
    let granted = lock.is_nested() || session.ask_for_blocks(whole);
    for closed in [false, true] {
        let turn = session.turn(&lock)?;
        if let Some(claim) = Session::claim(&turn, whole, whole) {
            let bytes = header.to_bytes();
            let head = crate::vectors::buffer(bytes.as_ptr().cast(), bytes.len());
            // SAFETY: `head` describes the local array `bytes`, and the caller guarantees that `buffers` are readable.
            let done = unsafe {
                let done = Buffers::one(&head).drain(0, turn.spans(claim, 0, bytes.len()));
                done + buffers.drain(0, turn.spans(claim, bytes.len(), whole))
            };
            // The padding to a multiple of 8 bytes is not initialized and never read.
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
    // A full socket waits until its datagrams are sent. An empty socket would have to wait for other sockets.
    let waits = granted || !session.slot.has_sent_all() || !session.slot.lacks(whole);
    Ok(if waits { Put::Full } else { Put::Memory })
}

/// Returns whether a datagram can be read.
fn has_data(session: &Session) -> bool {
    let _lock = SlotLock::new(&session.slot.wishes.reading);
    session.reader().is_ok_and(|reader| reader.available() > 0)
}

/// Returns the length of the next datagram, or 0 without one.
pub(crate) fn next_len(session: &Session) -> Result<usize, Errno> {
    if session.is_lost() {
        return Ok(0);
    }
    let _lock = SlotLock::new(&session.slot.wishes.reading);
    let reader = session.reader()?;
    let mut header = [0; HEADER_LEN];
    let there = reader.peek(&mut header) == HEADER_LEN;
    Ok(Header::from_bytes(&header).filter(|_| there).map_or(0, |header| header.len.into()))
}

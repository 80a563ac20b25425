//! One session on the stack's side: the requests of its application, and its notifications.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;

use offcore_session::Place;
use offcore_session::message::{Accepted, SessionId};
use offcore_session::slot::{Slot, flags, number as option, state, wish};
use offcore_stats::time::{Micros, Time};
use offcore_tcp::proto::{CallError, Cause, ConnId, ConnOptions, Room};
use rustix::io::Errno;

use super::acceptor::{AcceptResult, Kernel};
use super::counts::ServeCounts;
use super::stack_end::{Ending, StackEnd};
use super::stream_options::{AppliedOptions, buffers, conn_options, is_v6};
use super::{datagram_bits, pair};
use crate::host::Calls;

/// `SOCK_STREAM` and `SOCK_DGRAM`, as encoded in slots and messages.
pub(super) const STREAM: u32 = 1;
pub(super) const DATAGRAM: u32 = 2;

/// The application is woken when at least one part in this number of the maximum room is free.
const WAKE_ROOM_PART: u64 = 3;

/// The kind of a session.
#[derive(Debug)]
pub(super) enum SessionKind {
    /// Bound to an address (`None`: any address) and a port.
    Bound(Option<IpAddr>, u16),
    Listener(Listener),
    Stream(ConnId),
    Datagrams(ConnId),
    /// The stack has released the underlying object.
    Gone,
}

/// A session that accepts connections.
#[derive(Debug)]
pub(super) struct Listener {
    /// The stack's identifier of the listener.
    pub(super) id: u32,
    pub(super) address: Option<IpAddr>,
    pub(super) port: u16,
    /// Whether other listeners may share the address and port.
    pub(super) shares: bool,
    /// The cookie of the kernel's listener, or 0 if it has none. Processes that share this kernel listener may all
    /// listen.
    pub(super) cookie: u64,
    /// The kernel listener of the session, and its results that are not passed on yet.
    pub(super) kernel: Option<Kernel>,
    pub(super) come: VecDeque<AcceptResult>,
    /// A message that did not fit into the queue, with its descriptor.
    pub(super) held: Option<Passed>,
    /// The listener is in its application's queue of listeners.
    pub(super) queued: bool,
    /// The session's end reports an event when its queue has room.
    pub(super) armed: bool,
    /// When descriptors are exhausted, the listener pauses until `due`. `delay` is the length of the pause,
    /// which grows with each failure.
    pub(super) due: Time,
    pub(super) delay: Micros,
}

/// A connection on its way to the application.
#[derive(Debug)]
pub(super) struct Passed {
    pub(super) accepted: Accepted,
    pub(super) end: OwnedFd,
}

impl Passed {
    /// Returns whether the connection belongs to the kernel, not to a session.
    pub(super) fn is_of_kernel(&self) -> bool {
        self.accepted.session == SessionId::default()
    }
}

/// A session.
#[derive(Debug)]
pub(super) struct Session {
    place: Place,
    generation: u32,
    /// The kernel's socket cookie of the application's end.
    cookie: u64,
    kind: SessionKind,
    /// The port that the session was first bound to.
    port: u16,
    end: StackEnd,
    applied: AppliedOptions,
    /// The stream to the peer has ended.
    ended: bool,
    /// Flags that were stored for the application.
    flags: u32,
    /// The gate opens as soon as there is room, even if the application has not asked for room.
    opens: bool,
    query: PeerQuery,
    /// The session is in the list of sessions to be announced at the end of the turn.
    is_announced_later: bool,
    pair_read: PairRead,
}

/// A query whether the application's end is still open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PeerQuery {
    Idle,
    InProgress,
    /// In progress, and repeated afterwards.
    Repeats,
}

/// A postponed read of data that was written to a session's descriptor: see [`raw`](super::raw).
#[derive(Debug, Default)]
pub(super) struct PairRead {
    /// The session is in the queue of sessions whose pairs are read.
    queued: bool,
    /// The session ends when its data is sent, or at this time.
    ends: Option<Time>,
}

impl PairRead {
    /// Records that the session is queued. With `ends`, the session ends after its data is sent, or at that time.
    //Returns / `true` if it was not queued before.
    pub(super) fn enqueue(&mut self, ends: Option<Time>) -> bool {
        self.ends = self.ends.or(ends);
        !std::mem::replace(&mut self.queued, true)
    }

    /// Notes that the session was taken out of the queue. Returns [`ends`](Self::ends).
    pub(super) fn dequeue(&mut self) -> Option<Time> {
        self.queued = false;
        self.ends
    }

    /// The time at which the session ends at the latest, if it ends after its data is sent.
    pub(super) fn ends(&self) -> Option<Time> {
        self.ends
    }
}

impl Session {
    pub(super) fn new(
        place: Place,
        generation: u32,
        cookie: u64,
        kind: SessionKind,
        port: u16,
        end: StackEnd,
    ) -> Self {
        Self {
            place,
            generation,
            cookie,
            kind,
            port,
            end,
            applied: AppliedOptions::default(),
            ended: false,
            flags: 0,
            opens: false,
            query: PeerQuery::Idle,
            is_announced_later: false,
            pair_read: PairRead::default(),
        }
    }

    #[inline]
    pub(super) fn place(&self) -> Place {
        self.place
    }

    #[inline]
    pub(super) fn generation(&self) -> u32 {
        self.generation
    }

    pub(super) fn cookie(&self) -> u64 {
        self.cookie
    }

    /// The port that the session was first bound to.
    pub(super) fn port(&self) -> u16 {
        self.port
    }

    #[inline]
    pub(super) fn kind(&self) -> &SessionKind {
        &self.kind
    }

    /// Turns the session into another kind, and returns the previous one.
    pub(super) fn change_kind(&mut self, kind: SessionKind) -> SessionKind {
        std::mem::replace(&mut self.kind, kind)
    }

    /// The listener, if the session accepts connections.
    pub(super) fn listener_mut(&mut self) -> Option<&mut Listener> {
        match &mut self.kind {
            SessionKind::Listener(listener) => Some(listener),
            _ => None,
        }
    }

    /// The place and generation that identify the session in messages.
    pub(super) fn named(&self) -> SessionId {
        SessionId { place: self.place.number(), generation: self.generation }
    }

    /// The connection or datagram socket.
    pub(super) fn conn(&self) -> Option<ConnId> {
        match self.kind {
            SessionKind::Stream(conn) | SessionKind::Datagrams(conn) => Some(conn),
            SessionKind::Bound(..) | SessionKind::Listener(_) | SessionKind::Gone => None,
        }
    }

    /// The socket of the stack's end, while it is open.
    #[inline]
    pub(super) fn ours(&self) -> Option<BorrowedFd<'_>> {
        self.end.socket()
    }

    /// The stack's end.
    pub(super) fn end(&self) -> &StackEnd {
        &self.end
    }

    pub(super) fn end_mut(&mut self) -> &mut StackEnd {
        &mut self.end
    }

    /// Whether the kernel reports that the application's end is closed.
    pub(super) fn has_hung_up(&self) -> bool {
        self.ours().is_some_and(pair::has_hung_up)
    }

    pub(super) fn pair_read(&mut self) -> &mut PairRead {
        &mut self.pair_read
    }

    /// If a query is in progress, requests that it is repeated. Returns whether a query is in progress.
    pub(super) fn repeat_query(&mut self) -> bool {
        let in_progress = self.query != PeerQuery::Idle;
        if in_progress {
            self.query = PeerQuery::Repeats;
        }
        in_progress
    }

    /// A query has begun.
    pub(super) fn begin_query(&mut self) {
        self.query = PeerQuery::InProgress;
    }

    /// The query is answered. Returns whether it must be repeated.
    pub(super) fn end_query(&mut self) -> bool {
        std::mem::replace(&mut self.query, PeerQuery::Idle) == PeerQuery::Repeats
    }

    /// Notes that the session is announced at the end of the turn. Returns `true` if that was not noted before.
    #[inline]
    pub(super) fn announce_later(&mut self) -> bool {
        !std::mem::replace(&mut self.is_announced_later, true)
    }

    /// Makes the announcement that was noted, if there is one. Returns the ticks spent on slow wake-ups.
    #[inline]
    pub(super) fn announce_now(&mut self, slot: &Slot, counts: &mut ServeCounts) -> u64 {
        if !std::mem::take(&mut self.is_announced_later) {
            return 0;
        }
        self.alarm(slot, counts);
        self.announce(slot, counts);
        self.end.take_slow_ticks()
    }

    /// The connection was opened with these options.
    pub(super) fn set_initial_options(&mut self, kept: ConnOptions) {
        self.applied.set_initial_options(kept);
    }

    pub(super) fn is_over(&self) -> bool {
        self.flags & flags::OVER != 0
    }

    /// Handles a mark of the application: applies its current requests.
    ///
    /// # Errors
    /// [`CallError::Misuse`] if the application has stored an invalid value; the stack has reset the connection.
    pub(super) fn look(
        &mut self,
        slot: &Slot,
        calls: &mut Calls<'_>,
        counts: &mut ServeCounts,
    ) -> Result<(), CallError> {
        if let SessionKind::Listener(listener) = &self.kind {
            calls.stack.set_listener_buffers(listener.id, buffers(slot, true));
            calls.stack.set_listener_options(listener.id, conn_options(&slot.kept.numbers(), is_v6(slot)));
        }
        let Some(conn) = self.conn() else { return Ok(()) };
        let wanted = slot.wishes.options.load(Ordering::Acquire);
        if matches!(self.kind, SessionKind::Stream(_)) && !self.is_over() {
            self.applied.apply(wanted, slot, conn, calls);
        }
        if matches!(self.kind, SessionKind::Datagrams(_)) && !self.is_over() {
            datagram_bits::apply(slot, conn, calls);
        }
        if !self.is_over() {
            self.applied.apply_buffers(slot, matches!(self.kind, SessionKind::Stream(_)), conn, calls);
            misuse(calls.stack.written(calls.now, conn, calls.out))?;
        }
        misuse(calls.stack.consumed(calls.now, conn, calls.out))?;
        if wanted & wish::END != 0 && !self.ended && !self.is_over() {
            // `shutdown` fails until the connection is open; the session is then handled again.
            self.ended = calls.stack.shutdown(calls.now, conn, calls.out).is_ok();
        }
        let unread = calls.stack.unread(conn) > 0;
        self.alarm(slot, counts);
        if unread {
            self.announce(slot, counts);
        }
        self.make_room(slot, calls, counts);
        Ok(())
    }

    /// Whether the stack's end may show a hang-up although the application's end is still open. This is the case after
    /// both directions were shut down; the direction to the application by the stack or by the application itself.
    pub(super) fn may_show_early_hang_up(&self, slot: &Slot) -> bool {
        let wanted = slot.wishes.options.load(Ordering::Acquire);
        let no_more = self.end.is_write_shut() || wanted & wish::NO_READ != 0;
        self.end.is_shut_down() || no_more && wanted & wish::END != 0
    }

    /// Reports an error of a datagram socket to the application, once.
    pub(super) fn failed(&mut self, slot: &Slot, errno: u16, counts: &mut ServeCounts) {
        slot.identity.fail(errno.into());
        self.alarm(slot, counts);
    }

    /// Reports an error or an urgent byte as a `poll` event, and wakes blocking calls.
    pub(super) fn alarm(&mut self, slot: &Slot, counts: &mut ServeCounts) {
        if !self.is_urgent(slot) {
            return;
        }
        if slot.wake.alarm() {
            slot.wake.announce_always();
            self.end.put(pair::put_alarm, counts);
        } else if slot.identity.has_failed() {
            self.announce(slot, counts);
        }
    }

    /// Whether an error of a datagram socket, or an urgent byte of a stream, is still unread.
    fn is_urgent(&self, slot: &Slot) -> bool {
        match self.kind {
            SessionKind::Datagrams(_) => slot.has_errors(),
            SessionKind::Stream(_) => slot.has_urgent(),
            _ => false,
        }
    }

    /// Whether the received data is less than `SO_RCVLOWAT`.
    fn waits_for_more(&self, slot: &Slot) -> bool {
        let Some(least) = option::decode(slot.kept.number(option::RCVLOWAT)) else { return false };
        let any = slot.wishes.options.load(Ordering::Relaxed) & wish::ANY_DATA != 0;
        matches!(self.kind, SessionKind::Stream(_)) && !any && slot.unread() < least.into()
    }

    /// Announces unread data, unless it is announced already.
    pub(super) fn announce(&mut self, slot: &Slot, counts: &mut ServeCounts) {
        // An end that is shut down for writing is readable anyway.
        let any = || slot.unread() > 0 && !self.waits_for_more(slot) || slot.identity.has_failed();
        if !self.end.is_write_shut() && slot.wake.announce(any) {
            self.end.put(pair::put_token, counts);
        }
    }

    /// Announces data again after a process of the application has died. The process may have read the token without
    /// clearing the word that says so, and without another byte later data would not be announced.
    pub(super) fn announce_again(&mut self, slot: &Slot, counts: &mut ServeCounts) {
        let unread = self.conn().is_some() && slot.unread() > 0;
        let announced = slot.wake.is_announced();
        if unread || self.is_urgent(slot) || announced {
            slot.wake.announce_always();
            // The byte of the previous announcement is in the pair as well, unless the process has read it.
            slot.wishes.leftover.fetch_add(announced.into(), Ordering::AcqRel);
            let put = if self.is_urgent(slot) { pair::put_alarm } else { pair::put_token };
            self.end.put(put, counts);
        }
    }

    /// Returns the ticks spent on slow wake-ups since the last call.
    #[inline]
    pub(super) fn take_slow_ticks(&mut self) -> u64 {
        self.end.take_slow_ticks()
    }

    /// Opens the gate if the application waits for room and enough is free. Otherwise the stack reports room later.
    pub(super) fn make_room(&mut self, slot: &Slot, calls: &mut Calls<'_>, counts: &mut ServeCounts) {
        let Some(conn) = self.conn().filter(|_| self.opens || slot.wake.wants_room()) else { return };
        if !self.is_over() {
            if !self.is_open(slot) {
                return;
            }
            let enough = |calls: &Calls<'_>| {
                calls
                    .stack
                    .room(conn)
                    .is_some_and(|Room { free, of }| free > 0 && free * WAKE_ROOM_PART >= of)
            };
            if !enough(calls) {
                calls.stack.want_room(conn);
                // Memory may have become available before the request for a notification, so check again.
                if !enough(calls) {
                    return;
                }
            }
        }
        if slot.wake.open() | std::mem::take(&mut self.opens) {
            self.open_gate(slot, counts);
        }
    }

    /// Opens the gate as soon as there is room, without a request: the process that closed it may have died before it
    /// stored one. A process that waits now is not woken without room.
    pub(super) fn open_with_room(&mut self, slot: &Slot, calls: &mut Calls<'_>, counts: &mut ServeCounts) {
        self.opens = true;
        self.make_room(slot, calls, counts);
    }

    /// Whether the session can be written to, given enough room.
    pub(super) fn is_open(&self, slot: &Slot) -> bool {
        match self.kind {
            SessionKind::Stream(_) => slot.state() == state::OPEN,
            SessionKind::Datagrams(_) => true,
            _ => false,
        }
    }

    /// Opens the gate unconditionally.
    pub(super) fn open(&mut self, slot: &Slot, counts: &mut ServeCounts) {
        slot.wake.open();
        self.open_gate(slot, counts);
    }

    /// Opens the gate now, or after the data in the pair is taken.
    fn open_gate(&mut self, slot: &Slot, counts: &mut ServeCounts) {
        self.opens |= !self.end.open_gate(slot, counts);
    }

    /// A requested connection is established.
    pub(super) fn connected(&mut self, slot: &Slot, counts: &mut ServeCounts) {
        slot.set_state(state::OPEN);
        self.open(slot, counts);
    }

    /// The peer has ended its stream.
    pub(super) fn peer_ended(&mut self, slot: &Slot, counts: &mut ServeCounts) {
        // An urgent byte may arrive with the end, and the pair accepts no bytes after the shutdown.
        self.alarm(slot, counts);
        self.show(slot, flags::ENDED);
        self.end.shut();
    }

    fn show(&mut self, slot: &Slot, flag: u32) {
        self.flags |= flag;
        slot.set_flags(self.flags);
    }

    /// Reports the end of the session and its cause to the application. `hangs`: whether the stack's end may show a
    /// hang-up before the application closes its own end.
    pub(super) fn over(
        &mut self,
        slot: &Slot,
        cause: Cause,
        hangs: bool,
        counts: &mut ServeCounts,
    ) -> Ending {
        // As in Linux: a write after the peer ended its stream and reset the connection fails with `EPIPE`.
        let error = match error_of(cause) {
            error if cause == Cause::Reset && self.flags & flags::ENDED != 0 && error != 0 => {
                number(Errno::PIPE)
            }
            error => error,
        };
        slot.identity.error.store(error, Ordering::Release);
        self.show(slot, flags::OVER);
        if error != 0
            && let ending @ Ending::Reset(_) = self.end.reset(slot, counts)
        {
            return ending;
        }
        self.end.shut();
        self.open(slot, counts);
        if error != 0 && hangs {
            self.end.hang_up();
        }
        Ending::Stays
    }

    /// Splits the session into the stack's end and its kind.
    pub(super) fn into_parts(self) -> (StackEnd, SessionKind) {
        (self.end, self.kind)
    }

    /// Whether the session ends with a reset when the application closes it.
    pub(super) fn wants_reset(slot: &Slot) -> bool {
        let never_accepted = slot.wishes.told.load(Ordering::Relaxed) & wish::ACCEPTED == 0;
        never_accepted || slot.wishes.options.load(Ordering::Acquire) & wish::RESET != 0
    }
}

/// Keeps only errors that count as misuse. A connection that is gone or not open is reported by events.
fn misuse(result: Result<(), CallError>) -> Result<(), CallError> {
    match result {
        Err(CallError::Misuse) => Err(CallError::Misuse),
        _ => Ok(()),
    }
}

/// Converts the cause of the end of a connection to an `errno`.
fn error_of(cause: Cause) -> u32 {
    let error = match cause {
        Cause::Finished => return 0,
        Cause::Reset | Cause::Aborted => Errno::CONNRESET,
        Cause::Refused => Errno::CONNREFUSED,
        Cause::TimedOut => Errno::TIMEDOUT,
        Cause::Unreachable => Errno::HOSTUNREACH,
    };
    number(error)
}

/// Converts an error to its number in messages and slots.
pub(super) fn number(error: Errno) -> u32 {
    error.raw_os_error().unsigned_abs()
}

/// Stores both addresses of a session in its slot.
pub(super) fn write_addresses(slot: &Slot, local: Option<SocketAddr>, remote: Option<SocketAddr>) {
    let identity = &slot.identity;
    let is_v6 = local.or(remote).is_some_and(|address| address.is_ipv6());
    identity.family.store(if is_v6 { 6 } else { 4 }, Ordering::Relaxed);
    let port = |address: Option<SocketAddr>| address.map_or(0, |address| u32::from(address.port()));
    identity.ports.store(port(local) | port(remote) << 16, Ordering::Relaxed);
    for (words, address) in [(&identity.local, local), (&identity.remote, remote)] {
        let mut octets = [0; 16];
        match address.map(|address| address.ip()) {
            Some(IpAddr::V4(v4)) => octets[..4].copy_from_slice(&v4.octets()), // copy-ok: an address
            Some(IpAddr::V6(v6)) => octets = v6.octets(),
            None => {}
        }
        for (word, octets) in words.iter().zip(octets.chunks_exact(4)) {
            // The octets are stored in network order on every machine.
            word.store(u32::from_ne_bytes(octets.try_into().unwrap_or_default()), Ordering::Relaxed);
        }
    }
}

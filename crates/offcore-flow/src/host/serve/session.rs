//! One session on the stack's side: the requests of its application, and its notifications.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;

use offcore_session::Place;
use offcore_session::message::Accepted;
use offcore_session::slot::{Slot, flags, number as option, state, wish};
use offcore_stats::tsc;
use offcore_tcp::proto::{Buffers, CallError, Cause, ConnId, ConnOptions, Room};
use rustix::io::Errno;
use rustix::net::{Shutdown, shutdown};
use rustix::pipe::{PipeFlags, pipe_with};

use super::acceptor::{AcceptResult, Kernel};
use super::counts::ServeCounts;
use super::descriptors::DescriptorCharge;
use super::stream_options::{buffers, conn_options, is_v6, keep_alive};
use super::waking::LONG;
use super::{datagram_bits, pair, wire};
use crate::host::Calls;

/// `SOCK_STREAM` and `SOCK_DGRAM`, as encoded in slots and messages.
pub(super) const STREAM: u32 = 1;
pub(super) const DATAGRAM: u32 = 2;

/// Number of bytes sent before the byte that carries the end of the pipe. It exceeds the number of token bytes that a
/// few calls read.
const DECOYS: usize = 512;
/// The application is woken when at least one part in this number of the maximum room is free.
const WAKE_ROOM_PART: u64 = 3;

/// The kind of a session.
#[derive(Debug)]
pub(super) enum What {
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
    pub(super) held: Option<(Accepted, OwnedFd)>,
    /// The listener is in its application's queue of listeners.
    pub(super) queued: bool,
    /// The session's end reports an event when its queue has room.
    pub(super) armed: bool,
    /// When descriptors are exhausted, the listener pauses until `due`. `delay` is the length of the pause in
    /// microseconds, which grows with each failure.
    pub(super) due: u64,
    pub(super) delay: u64,
}

/// A session.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) place: Place,
    pub(super) generation: u32,
    /// The kernel's socket cookie of the application's end.
    pub(super) cookie: u64,
    pub(super) what: What,
    /// The port that the session was first bound to.
    port: u16,
    /// The stack's end; `None` after a reset.
    ours: Option<OwnedFd>,
    pub(super) charge: DescriptorCharge,
    /// After a reset, this end of a pipe hangs up when the application closes its last descriptor.
    pipe: Option<OwnedFd>,
    /// Options that are in effect, including the values of keep-alive, `TCP_USER_TIMEOUT` and `TCP_SYNCNT`.
    options: u32,
    keep: [u32; 3],
    buffers: Buffers,
    /// Connection options of the slot that are in effect.
    pub(super) kept: ConnOptions,
    timeouts: (u32, u8),
    /// The stream to the peer has ended.
    ended: bool,
    /// Flags that were stored for the application, and whether the stack's end is shut down for writing.
    flags: u32,
    shut: bool,
    /// The stack has shut down both directions.
    hung: bool,
    /// The gate opens as soon as there is room, even if the application has not asked for room.
    opens: bool,
    /// Bytes of gates that the stack has put into the pair, minus all bytes of gates that it has taken out, including
    /// the application's.
    gates: u32,
    /// A query whether the other end is still open is in progress, and whether it is repeated afterwards.
    pub(super) asked: bool,
    pub(super) again: bool,
    /// TSC ticks spent on slow wake-ups of the application since [`take_long`](Self::take_long) was last called.
    long: u64,
    /// The session is in the list of sessions to be announced at the end of the turn.
    pub(super) queued: bool,
    /// The session is in the queue of sessions whose pairs are read. With `ends`, it ends when its data is sent, or at
    /// this time.
    pub(super) raw: bool,
    pub(super) ends: Option<u64>,
}

/// The state of the stack's end after a session is over.
#[derive(Debug)]
pub(super) enum Ending {
    /// The stack's end stays open.
    Stays,
    /// The stack's end is closed. If closing it may take long, it is returned to be closed elsewhere. The caller
    /// watches [`Session::pipe`].
    Reset(Option<OwnedFd>),
}

impl Session {
    pub(super) fn new(
        place: Place,
        generation: u32,
        cookie: u64,
        (what, port): (What, u16),
        (ours, charge, gates): (OwnedFd, DescriptorCharge, u32),
    ) -> Self {
        Self {
            charge,
            port,
            gates,
            place,
            generation,
            cookie,
            what,
            ours: Some(ours),
            pipe: None,
            options: 0,
            keep: [0; 3],
            buffers: Buffers::default(),
            kept: ConnOptions::default(),
            timeouts: (0, 0),
            ended: false,
            flags: 0,
            shut: false,
            hung: false,
            opens: false,
            asked: false,
            again: false,
            long: 0,
            queued: false,
            raw: false,
            ends: None,
        }
    }

    /// The connection or datagram socket.
    pub(super) fn conn(&self) -> Option<ConnId> {
        match self.what {
            What::Stream(conn) | What::Datagrams(conn) => Some(conn),
            What::Bound(..) | What::Listener(_) | What::Gone => None,
        }
    }

    /// The stack's end, while it is open.
    pub(super) fn ours(&self) -> Option<BorrowedFd<'_>> {
        self.ours.as_ref().map(AsFd::as_fd)
    }

    /// The end of the pipe that hangs up at the last close after a reset.
    pub(super) fn pipe(&self) -> Option<BorrowedFd<'_>> {
        self.pipe.as_ref().map(AsFd::as_fd)
    }

    /// Whether the kernel reports that the application's end is closed.
    pub(super) fn has_hung_up(&self) -> bool {
        self.ours().is_some_and(pair::has_hung_up)
    }

    /// Number of bytes of gates that may be in the pair.
    pub(super) fn gates(&self, slot: &Slot) -> u32 {
        slot.wishes.gates.load(Ordering::Acquire).wrapping_add(self.gates)
    }

    /// Subtracts `taken` bytes of gates that were read from the pair.
    pub(super) fn count_gates(&mut self, taken: u32) {
        self.gates = self.gates.wrapping_sub(taken);
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
        if let What::Listener(listener) = &self.what {
            calls.stack.set_listener_buffers(listener.id, buffers(slot, true));
            calls.stack.set_listener_options(listener.id, conn_options(&slot.kept.numbers(), is_v6(slot)));
        }
        let Some(conn) = self.conn() else { return Ok(()) };
        let wanted = slot.wishes.options.load(Ordering::Acquire);
        if matches!(self.what, What::Stream(_)) && !self.is_over() {
            self.apply(wanted, slot, conn, calls);
        }
        if matches!(self.what, What::Datagrams(_)) && !self.is_over() {
            datagram_bits::apply(slot, conn, calls);
        }
        if !self.is_over() {
            let buffers = buffers(slot, matches!(self.what, What::Stream(_)));
            if buffers != self.buffers {
                self.buffers = buffers;
                calls.stack.set_buffers(conn, buffers);
            }
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

    /// Applies options that have changed.
    fn apply(&mut self, wanted: u32, slot: &Slot, conn: ConnId, calls: &mut Calls<'_>) {
        let wishes = &slot.wishes;
        let keep = [&wishes.keep_idle, &wishes.keep_interval, &wishes.keep_count]
            .map(|word| word.load(Ordering::Relaxed));
        let changed = wanted ^ self.options;
        if changed & wish::NO_DELAY != 0 {
            let on = wanted & wish::NO_DELAY != 0;
            let _ = calls.stack.set_nodelay(calls.now, conn, on, calls.out);
        }
        let keeps = wanted & wish::KEEP_ALIVE != 0;
        if changed & wish::KEEP_ALIVE != 0 || keeps && keep != self.keep {
            let wanted = keeps.then(|| keep_alive(keep));
            let _ = calls.stack.set_keepalive(calls.now, conn, wanted, calls.out);
        }
        if changed & wish::QUICK_ACK != 0 {
            calls.stack.acknowledge_now(calls.now, conn, calls.out);
        }
        let kept = conn_options(&slot.kept.numbers(), is_v6(slot));
        if kept != self.kept && calls.stack.set_options(conn, kept).is_ok() {
            self.kept = kept;
        }
        let number = |at| option::decode(slot.kept.number(at)).unwrap_or(0);
        let syn_retries = u8::try_from(number(option::SYNCNT)).unwrap_or(u8::MAX);
        let timeouts = (number(option::USER_TIMEOUT), syn_retries);
        if timeouts != self.timeouts {
            let _ = calls.stack.set_timeouts(calls.now, conn, timeouts, calls.out);
        }
        (self.options, self.keep, self.timeouts) = (wanted, keep, timeouts);
    }

    /// Whether the stack's end may show a hang-up although the application's end is still open. This is the case after
    /// both directions were shut down; the direction to the application by the stack or by the application itself.
    pub(super) fn may_show_early_hang_up(&self, slot: &Slot) -> bool {
        let wanted = slot.wishes.options.load(Ordering::Acquire);
        let no_more = self.shut || wanted & wish::NO_READ != 0;
        self.hung || no_more && wanted & wish::END != 0
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
            self.put(pair::put_alarm, counts);
        } else if slot.identity.has_failed() {
            self.announce(slot, counts);
        }
    }

    /// Whether an error of a datagram socket, or an urgent byte of a stream, is still unread.
    fn is_urgent(&self, slot: &Slot) -> bool {
        match self.what {
            What::Datagrams(_) => slot.has_errors(),
            What::Stream(_) => slot.has_urgent(),
            _ => false,
        }
    }

    /// Whether the received data is less than `SO_RCVLOWAT`.
    fn waits_for_more(&self, slot: &Slot) -> bool {
        let Some(least) = option::decode(slot.kept.number(option::RCVLOWAT)) else { return false };
        let any = slot.wishes.options.load(Ordering::Relaxed) & wish::ANY_DATA != 0;
        matches!(self.what, What::Stream(_)) && !any && slot.unread() < least.into()
    }

    /// Announces unread data, unless it is announced already.
    pub(super) fn announce(&mut self, slot: &Slot, counts: &mut ServeCounts) {
        // An end that is shut down for writing is readable anyway.
        let any = || slot.unread() > 0 && !self.waits_for_more(slot) || slot.identity.has_failed();
        if !self.shut && slot.wake.announce(any) {
            self.put(pair::put_token, counts);
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
            self.put(put, counts);
        }
    }

    /// Writes a byte to the application's end.
    fn put(&mut self, put: impl FnOnce(BorrowedFd<'_>), counts: &mut ServeCounts) {
        if let Some(ours) = self.ours().filter(|_| !self.shut) {
            let from = tsc::now();
            put(ours);
            counts.tokens += 1;
            self.woke(from);
        }
    }

    /// Records the duration of a wake-up that began at TSC value `from`, if it was slow.
    pub(super) fn woke(&mut self, from: u64) {
        let ticks = tsc::now().saturating_sub(from);
        if ticks >= LONG {
            self.long += ticks;
        }
    }

    /// Returns the ticks spent on slow wake-ups since the last call.
    pub(super) fn take_long(&mut self) -> u64 {
        std::mem::take(&mut self.long)
    }

    /// Takes the stack's end, and the pipe of a session that was reset. The session has neither afterwards.
    pub(super) fn take_ends(&mut self) -> impl Iterator<Item = OwnedFd> + use<> {
        self.ours.take().into_iter().chain(self.pipe.take())
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
        match self.what {
            What::Stream(_) => slot.state() == state::OPEN,
            What::Datagrams(_) => true,
            _ => false,
        }
    }

    /// Opens the gate unconditionally.
    pub(super) fn open(&mut self, slot: &Slot, counts: &mut ServeCounts) {
        slot.wake.open();
        self.open_gate(slot, counts);
    }

    /// Opens the gate. If the pair contains data among the bytes of the gate, the gate opens after that data is taken:
    /// see [`raw`](super::raw).
    fn open_gate(&mut self, slot: &Slot, counts: &mut ServeCounts) {
        let from = tsc::now();
        if let Some(ours) = self.ours() {
            match pair::open_gate(ours, || self.gates(slot)) {
                Some((taken, data)) => {
                    self.count_gates(taken);
                    counts.unsent += u64::from(data);
                    counts.gates += 1;
                }
                None => self.opens = true,
            }
            self.woke(from);
        }
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
        self.shut();
    }

    fn show(&mut self, slot: &Slot, flag: u32) {
        self.flags |= flag;
        slot.set_flags(self.flags);
    }

    fn shut(&mut self) {
        if let Some(ours) = self.ours.as_ref().filter(|_| !self.shut) {
            let from = tsc::now();
            let _ = shutdown(ours, Shutdown::Write);
            self.shut = true;
            self.woke(from);
        }
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
        let from = tsc::now();
        if error != 0 && self.reset(slot, counts) {
            let ours = self.ours.take();
            let left = ours.and_then(|ours| {
                pair::stop_receiving(ours.as_fd());
                pair::close_plain(ours)
            });
            self.woke(from);
            return Ending::Reset(left);
        }
        self.shut();
        self.open(slot, counts);
        if let Some(ours) = self.ours.as_ref().filter(|_| error != 0 && hangs) {
            self.hung = true;
            let from = tsc::now();
            let _ = shutdown(ours, Shutdown::Both);
            self.woke(from);
        }
        Ending::Stays
    }

    /// Prepares the pair so that the application's end shows a reset when the stack's end is closed over the unread
    /// byte. Returns `false` if that is not possible. The other end of a new pipe is queued for the application's end,
    /// so it stays open as long as the application's end does.
    fn reset(&mut self, slot: &Slot, counts: &mut ServeCounts) -> bool {
        // Nothing can be sent after a shutdown.
        let Some(ours) = self.ours.as_ref().filter(|_| !self.shut) else { return false };
        let Ok((pipe, there)) = pipe_with(PipeFlags::CLOEXEC) else { return false };
        // A process that reads tokens now reads some of these bytes, and not the byte that carries the pipe.
        slot.wake.announce_always();
        counts.tokens += 1;
        if wire::send(ours.as_fd(), &[0; DECOYS], &[]).is_err() {
            return false;
        }
        if wire::send(ours.as_fd(), &[0], &[there.as_fd()]).is_err() {
            return false;
        }
        self.pipe = Some(pipe);
        true
    }

    /// Splits the session into its slot, its port, the stack's end, and its kind.
    pub(super) fn into_parts(self) -> (Place, u16, Option<OwnedFd>, DescriptorCharge, What) {
        (self.place, self.port, self.ours, self.charge, self.what)
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

//! One session, as the stack has it: what its application wants, and what it is told.

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

use super::acceptor::{Come, Kernel};
use super::counts::ServeCounts;
use super::stream_options::{buffers, conn_options, is_v6, keep_alive};
use super::waking::LONG;
use super::{datagram_bits, pair, wire};
use crate::host::Calls;

/// `SOCK_STREAM` and `SOCK_DGRAM`, as they stand in slots and messages.
pub(super) const STREAM: u32 = 1;
pub(super) const DATAGRAM: u32 = 2;

/// Bytes before the one that comes with a pipe's end: more than are read in some calls.
const DECOYS: usize = 512;
/// What part of the room that there is at most has to be free before the application hears of it.
const ENOUGH: u64 = 3;

/// What a session is.
#[derive(Debug)]
pub(super) enum What {
    /// It has an address; none is any.
    Bound(Option<IpAddr>, u16),
    Listener(Listener),
    Stream(ConnId),
    Datagrams(ConnId),
    /// The stack has let go of what it was.
    Gone,
}

/// A session to which connections come.
#[derive(Debug)]
pub(super) struct Listener {
    /// The stack's number of it.
    pub(super) id: u32,
    pub(super) address: Option<IpAddr>,
    pub(super) port: u16,
    /// Whether others may listen there.
    pub(super) shares: bool,
    /// The cookie of the kernel's listener; 0 for none. Processes that share this listener may all listen.
    pub(super) cookie: u64,
    /// The kernel's listener that belongs to it, and what has come there and is not passed on.
    pub(super) kernel: Option<Kernel>,
    pub(super) come: VecDeque<Come>,
    /// A message that the queue had no room for, and the end that goes with it.
    pub(super) held: Option<(Accepted, OwnedFd)>,
    /// It is in its application's queue of listeners.
    pub(super) queued: bool,
    /// Its end tells when there is room.
    pub(super) armed: bool,
    /// Without descriptors it waits until `due`, and for `delay` microseconds more each time.
    pub(super) due: u64,
    pub(super) delay: u64,
}

/// A session.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) place: Place,
    pub(super) generation: u32,
    /// What the kernel calls the application's end.
    pub(super) cookie: u64,
    pub(super) what: What,
    /// The port that it was bound to at first.
    port: u16,
    /// Our end; none after a reset.
    ours: Option<OwnedFd>,
    /// Then this hangs up when the application's last descriptor is closed.
    pipe: Option<OwnedFd>,
    /// Applied options, with the numbers of keep-alive, `TCP_USER_TIMEOUT` and `TCP_SYNCNT`.
    options: u32,
    keep: [u32; 3],
    buffers: Buffers,
    /// Applied options of the slot.
    pub(super) kept: ConnOptions,
    timeouts: (u32, u8),
    /// The stream to the peer has been ended.
    ended: bool,
    /// Flags that the application has been shown, and whether its end shows that nothing more comes.
    flags: u32,
    shut: bool,
    /// We have shut both directions down.
    hung: bool,
    /// The gate is to be opened when there is room, whatever the application has said.
    opens: bool,
    /// Bytes of gates that were put into the pair by the stack, and not taken out yet; less those of the application's that
    /// were.
    gates: u32,
    /// Whether its other end is there is being asked, and is to be asked again.
    pub(super) asked: bool,
    pub(super) again: bool,
    /// Ticks of the TSC that took by which the application was woken up, as far as that was long.
    long: u64,
    /// It is among those that are announced at the end of the turn.
    pub(super) queued: bool,
    /// What is in its pair waits for room or for a lock; and it ends when that is sent, or at this time.
    pub(super) raw: bool,
    pub(super) ends: Option<u64>,
}

/// What becomes of a session that is over.
#[derive(Debug)]
pub(super) enum Ending {
    /// The application's end stays as it is.
    Stays,
    /// Our end is closed, or is to be where that may take a while; [`Session::pipe`] is to be watched.
    Reset(Option<OwnedFd>),
}

impl Session {
    pub(super) fn new(
        place: Place,
        generation: u32,
        cookie: u64,
        (what, port): (What, u16),
        (ours, gates): (OwnedFd, u32),
    ) -> Self {
        Self {
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

    /// Our end, as long as there is one.
    pub(super) fn ours(&self) -> Option<BorrowedFd<'_>> {
        self.ours.as_ref().map(AsFd::as_fd)
    }

    /// What hangs up at the last close after a reset.
    pub(super) fn pipe(&self) -> Option<BorrowedFd<'_>> {
        self.pipe.as_ref().map(AsFd::as_fd)
    }

    /// Whether the kernel shows that the application's end is closed.
    pub(super) fn has_hung_up(&self) -> bool {
        self.ours().is_some_and(pair::has_hung_up)
    }

    /// Bytes of gates that may be in the pair.
    pub(super) fn gates(&self, slot: &Slot) -> u32 {
        slot.wishes.gates.load(Ordering::Acquire).wrapping_add(self.gates)
    }

    /// So many of them were taken out.
    pub(super) fn count_gates(&mut self, taken: u32) {
        self.gates = self.gates.wrapping_sub(taken);
    }

    pub(super) fn is_over(&self) -> bool {
        self.flags & flags::OVER != 0
    }

    /// The application has marked it: what it wants is done, as far as it can be.
    ///
    /// # Errors
    /// [`CallError::Misuse`]: what the application has stored means nothing, and the stack has reset the connection.
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
            // Before it is open it is not ended; then it is looked at again.
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

    /// Options that have changed are applied.
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

    /// Whether our end shows a hang-up although the application has its own still: both directions were shut down, the one to
    /// the application by us or by itself.
    pub(super) fn may_be_there(&self, slot: &Slot) -> bool {
        let wanted = slot.wishes.options.load(Ordering::Acquire);
        let no_more = self.shut || wanted & wish::NO_READ != 0;
        self.hung || no_more && wanted & wish::END != 0
    }

    /// What a datagram socket has sent was not delivered: the application is told once.
    pub(super) fn failed(&mut self, slot: &Slot, errno: u16, counts: &mut ServeCounts) {
        slot.identity.fail(errno.into());
        self.alarm(slot, counts);
    }

    /// Shows an error or an urgent byte by `poll`, and wakes blocking calls.
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

    /// Whether there is an error of a datagram socket, or an urgent byte of a stream, that the application has not read.
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

    /// Says that there is something to read, unless that is said.
    pub(super) fn announce(&mut self, slot: &Slot, counts: &mut ServeCounts) {
        // An end that is shut shows that there is something to read.
        let any = || slot.unread() > 0 && !self.waits_for_more(slot) || slot.identity.has_failed();
        if !self.shut && slot.wake.announce(any) {
            self.put(pair::put_token, counts);
        }
    }

    /// Announces data again after a process of the application has died. The process may have taken the byte without storing so:
    /// without another byte, later data would not be announced.
    pub(super) fn announce_again(&mut self, slot: &Slot, counts: &mut ServeCounts) {
        let unread = self.conn().is_some() && slot.unread() > 0;
        let announced = slot.wake.is_announced();
        if unread || self.is_urgent(slot) || announced {
            slot.wake.announce_always();
            // The byte of the announcement before is in the pair, too, unless the process has taken it.
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

    /// The application was woken up by what began at `from`.
    pub(super) fn woke(&mut self, from: u64) {
        let ticks = tsc::now().saturating_sub(from);
        if ticks >= LONG {
            self.long += ticks;
        }
    }

    /// What took long since this was asked last, in ticks.
    pub(super) fn take_long(&mut self) -> u64 {
        std::mem::take(&mut self.long)
    }

    /// Our end, and what is there after a reset: it has none any more.
    pub(super) fn take_ends(&mut self) -> impl Iterator<Item = OwnedFd> {
        self.ours.take().into_iter().chain(self.pipe.take())
    }

    /// Opens the gate if the application waits for room and there is some; else the stack will tell.
    pub(super) fn make_room(&mut self, slot: &Slot, calls: &mut Calls<'_>, counts: &mut ServeCounts) {
        let Some(conn) = self.conn().filter(|_| self.opens || slot.wake.wants_room()) else { return };
        if !self.is_over() {
            if !self.is_open(slot) {
                return;
            }
            let enough = |calls: &Calls<'_>| {
                calls.stack.room(conn).is_some_and(|Room { free, of }| free > 0 && free * ENOUGH >= of)
            };
            if !enough(calls) {
                calls.stack.want_room(conn);
                // Memory that was short may be there now: then nobody will tell.
                if !enough(calls) {
                    return;
                }
            }
        }
        if slot.wake.open() | std::mem::take(&mut self.opens) {
            self.open_gate(slot, counts);
        }
    }

    /// Opens the gate when there is room: who has closed it may be dead, and have said nothing. Who waits now is not woken up
    /// in vain.
    pub(super) fn open_with_room(&mut self, slot: &Slot, calls: &mut Calls<'_>, counts: &mut ServeCounts) {
        self.opens = true;
        self.make_room(slot, calls, counts);
    }

    /// Whether it can be written to, as far as there is room.
    pub(super) fn is_open(&self, slot: &Slot) -> bool {
        match self.what {
            What::Stream(_) => slot.state() == state::OPEN,
            What::Datagrams(_) => true,
            _ => false,
        }
    }

    /// Opens the gate, whoever waits.
    pub(super) fn open(&mut self, slot: &Slot, counts: &mut ServeCounts) {
        slot.wake.open();
        self.open_gate(slot, counts);
    }

    /// Where data lies among its bytes the gate opens when that is taken: see [`raw`](super::raw).
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

    /// A connection that was asked for is there.
    pub(super) fn connected(&mut self, slot: &Slot, counts: &mut ServeCounts) {
        slot.set_state(state::OPEN);
        self.open(slot, counts);
    }

    /// The peer has ended its stream.
    pub(super) fn peer_ended(&mut self, slot: &Slot, counts: &mut ServeCounts) {
        // An urgent byte may come with the end, and the pair takes nothing later.
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

    /// It is over: the application is told why. `hangs`: whether our end may show a hang-up before the application closes
    /// its own.
    pub(super) fn over(
        &mut self,
        slot: &Slot,
        cause: Cause,
        hangs: bool,
        counts: &mut ServeCounts,
    ) -> Ending {
        // As Linux: who writes to a peer that has ended its stream, and is reset, has a broken pipe.
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
                pair::take_no_more(ours.as_fd());
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

    /// Has our end be closed over the byte that was not read, so that the other one shows a reset. `false`: it cannot be. The
    /// pipe's end goes to the application's queue: it is there as long as the application's end.
    fn reset(&mut self, slot: &Slot, counts: &mut ServeCounts) -> bool {
        // Nothing can be sent through what is shut.
        let Some(ours) = self.ours.as_ref().filter(|_| !self.shut) else { return false };
        let Ok((pipe, there)) = pipe_with(PipeFlags::CLOEXEC) else { return false };
        // Whoever takes tokens now takes some of these, and not the byte that holds the pipe.
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

    /// What is left of it: its slot, its port, our end, and what it was.
    pub(super) fn take_apart(self) -> (Place, u16, Option<OwnedFd>, What) {
        (self.place, self.port, self.ours, self.what)
    }

    /// Whether it ends by a reset when the application closes it.
    pub(super) fn wants_reset(slot: &Slot) -> bool {
        let never_accepted = slot.wishes.told.load(Ordering::Relaxed) & wish::ACCEPTED == 0;
        never_accepted || slot.wishes.options.load(Ordering::Acquire) & wish::RESET != 0
    }
}

/// What counts of a refused call: a connection that is gone, or not open, tells so by events.
fn misuse(result: Result<(), CallError>) -> Result<(), CallError> {
    match result {
        Err(CallError::Misuse) => Err(CallError::Misuse),
        _ => Ok(()),
    }
}

/// Why a connection is over, as an `errno`.
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

/// An error as it goes over sockets and in slots.
pub(super) fn number(error: Errno) -> u32 {
    error.raw_os_error().unsigned_abs()
}

/// Says in a slot who both ends are.
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
            // In the order of the wire, whatever the machine's is.
            word.store(u32::from_ne_bytes(octets.try_into().unwrap_or_default()), Ordering::Relaxed);
        }
    }
}

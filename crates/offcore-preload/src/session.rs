//! Sessions of this process, and the descriptors that stand for them.

mod end;

use core::ffi::c_int;
use core::sync::atomic::Ordering;

use offcore_session::slot::{Slot, number, state, wish};
use offcore_session::wake::{ALARM, TOKENS};
use offcore_session::{Place, Segments, app};

use crate::link::{self, Mapped};
use crate::lock::SlotLock;
use crate::lost;
use crate::real;
use crate::stream_options;
use crate::sys::{self, Errno};
use crate::table::{self, Entry, GENERATION, SocketKind};

/// Number of reads that take all bytes of a pair with an alarm: before the alarm, the alarm, and behind it.
const ALARM_READS: usize = 3;
/// Limits of a wait for the stack's answer: loop turns before the core is yielded, and timeouts in nanoseconds, for an
/// answer and for a byte that the stack writes at once.
const SPINS: u32 = 500;
const LATEST_ANSWER: i128 = 100_000_000;
const LATEST_BYTE: i128 = 10_000_000;

/// The owner of a call's descriptor.
pub(crate) enum Target {
    /// The kernel.
    Kernel,
    /// The kernel, but the socket may become a session.
    Undecided(Entry),
    /// The stack.
    Session(Session),
    /// A stack that is gone.
    Dead,
}

/// A descriptor and its session.
#[derive(Clone, Copy)]
pub(crate) struct Session {
    pub(crate) fd: c_int,
    pub(crate) entry: Entry,
    pub(crate) place: Place,
    pub(crate) slot: &'static Slot,
}

/// Returns the owner of `fd`.
#[inline]
pub(crate) fn find(fd: c_int) -> Target {
    match table::get(fd) {
        None => Target::Kernel,
        Some(entry) => of_entry(fd, entry),
    }
}

#[inline]
fn of_entry(fd: c_int, entry: Entry) -> Target {
    match entry.kind {
        SocketKind::OpenStream | SocketKind::OpenDatagrams => Target::Undecided(entry),
        SocketKind::Dead => Target::Dead,
        SocketKind::Lost => Session::lost(fd, entry).map_or(Target::Dead, Target::Session),
        SocketKind::Stream | SocketKind::Datagrams => {
            Session::new(fd, entry).map_or(Target::Kernel, Target::Session)
        }
    }
}

/// Returns the session of `fd`, if it is one.
#[inline]
pub(crate) fn get(fd: c_int) -> Option<Session> {
    match find(fd) {
        Target::Session(session) => Some(session),
        _ => None,
    }
}

impl Session {
    #[inline]
    fn new(fd: c_int, entry: Entry) -> Option<Self> {
        let place = entry.slot()?;
        let slot = match Mapped.slot(place) {
            Some(slot) => slot,
            None => slot_of_more(place)?,
        };
        if slot.identity.generation.load(Ordering::Relaxed) & GENERATION != entry.generation {
            // The session is over, and its descriptor was closed without a call of this library.
            table::set(fd, None);
            return None;
        }
        Some(Self { fd, entry, place, slot })
    }

    /// Returns a datagram socket whose stack is gone. Its slot has its addresses and options; its FIFOs must not be
    /// used.
    #[cold]
    fn lost(fd: c_int, entry: Entry) -> Option<Self> {
        Some(Self { fd, entry, place: Place::new(entry.place.max(1))?, slot: lost::slot(entry)? })
    }

    /// Returns whether this is a datagram socket whose stack is gone.
    pub(crate) fn is_lost(&self) -> bool {
        self.entry.kind == SocketKind::Lost
    }

    /// Records in the slot that the program's socket has the family `AF_INET6`, for processes that adopt it.
    pub(crate) fn note_family(&self) {
        if self.entry.v6 {
            self.slot.wishes.told.fetch_or(wish::V6, Ordering::AcqRel);
        }
    }

    /// Returns its entry according to the slot.
    pub(crate) fn entry_from_slot(&self) -> Entry {
        let identity = &self.slot.identity;
        let datagrams = identity.kind.load(Ordering::Relaxed) == libc::SOCK_DGRAM as u32;
        let kind = if datagrams { SocketKind::Datagrams } else { SocketKind::Stream };
        let v6 = self.slot.wishes.told.load(Ordering::Relaxed) & wish::V6 != 0;
        Entry { kind, v6, ..self.entry }
    }

    /// Marks the session, so that the stack processes it.
    pub(crate) fn mark(&self) {
        link::mark(self.slot.identity.number.load(Ordering::Relaxed));
    }

    pub(crate) fn is_datagrams(&self) -> bool {
        matches!(self.entry.kind, SocketKind::Datagrams | SocketKind::Lost)
    }

    pub(crate) fn is_open(&self) -> bool {
        self.slot.state() == state::OPEN
    }

    /// Returns whether an option bit of the application is set.
    pub(crate) fn has_option_bit(&self, bit: u32) -> bool {
        self.slot.wishes.options.load(Ordering::Relaxed) & bit != 0
    }

    /// Sets or clears option bits of the application, and notifies the stack.
    pub(crate) fn set_option_bit(&self, bit: u32, on: bool) {
        let options = &self.slot.wishes.options;
        let before = if on {
            options.fetch_or(bit, Ordering::AcqRel)
        } else {
            options.fetch_and(!bit, Ordering::AcqRel)
        };
        if before & bit != if on { bit } else { 0 } {
            self.mark();
        }
    }

    /// Takes the bytes that announced a reported error of a datagram socket, unless there is data or another error.
    pub(crate) fn settle_errors(&self) {
        let _lock = SlotLock::new(&self.slot.wishes.reading);
        if let Ok(reader) = self.reader()
            && (reader.available() == 0 || self.slot.wake.is_alarmed())
        {
            self.settle(&reader, reader.available());
        }
    }

    /// Takes the alarm before a call waits for a datagram: as on Linux, errors in the queue do not end the wait. If it
    /// returns `true`, the caller marks the session after the wait, so that the stack raises the alarm again.
    pub(crate) fn hide_errors(&self) -> bool {
        let hides = !sys::is_sandboxed() && self.slot.undelivered().load(Ordering::Acquire) > 0;
        let _lock = SlotLock::new(&self.slot.wishes.reading);
        let Some(reader) = hides.then(|| self.reader().ok()).flatten() else { return false };
        if reader.available() == 0 {
            for _ in 0..ALARM_READS {
                let _ = sys::take_bytes(self.fd, usize::MAX);
            }
            self.slot.wishes.leftover.store(0, Ordering::Relaxed);
            self.slot.wake.clear_alarm();
            self.slot.wake.taken();
            if reader.available() > 0 || self.slot.identity.has_failed() {
                self.mark();
            }
        }
        true
    }

    /// Returns whether the reason for an alarm still applies.
    fn is_urgent(&self) -> bool {
        if self.is_datagrams() { self.slot.has_errors() } else { self.slot.has_urgent() }
    }

    /// Takes bytes of the pair as [`sys::take_bytes`] does. An alarm is announced again if it still applies.
    fn take(&self, most: usize) -> Result<usize, Errno> {
        let (taken, alarm) = sys::take_bytes(self.fd, most)?;
        if alarm {
            self.slot.wake.clear_alarm();
            if self.is_urgent() {
                self.mark();
            }
        }
        Ok(taken)
    }

    /// Takes all bytes of the pair. Returns `false` if there was none.
    fn take_all(&self) -> bool {
        // Reads stop before an alarm.
        (0..ALARM_READS).filter(|_| self.take(usize::MAX).is_ok()).count() > 0
    }

    /// Waits until the pair has a byte again, for the stack's answer to a mark.
    fn wait_announced_again(&self) {
        // A sandbox may kill the process for asking for the number of bytes.
        if !sys::is_sandboxed() {
            self.wait_for_stack(LATEST_ANSWER, || sys::readable(self.fd) != Ok(0));
        }
    }

    /// Takes `due` bytes of the pair, and waits for the stack to write the last one. Returns the number of bytes taken.
    fn take_announced(&self, due: u32) -> u32 {
        let mut taken = 0;
        let mut take = || {
            taken += self.take(usize::MAX).map_or(0, |bytes| bytes as u32);
            taken >= due
        };
        let _ = take() || sys::is_sandboxed() || self.wait_for_stack(LATEST_BYTE, take);
        taken
    }

    /// Returns whether the stack announces the data just read, or `None` if the decision is late.
    fn decision(&self) -> Option<bool> {
        let mut decision = None;
        let mut decided = || {
            decision = self.slot.wake.decision();
            decision.is_some()
        };
        let _ = Self::spin(&mut decided) || self.wait_for_stack(LATEST_ANSWER, &mut decided);
        decision
    }

    /// Waits until `done` returns true, which the stack ensures within a round, or until the session is over. In a
    /// sandbox, which may kill the process for the system calls, it does not wait. Returns the last result of `done`.
    fn wait_for_stack(&self, longest: i128, mut done: impl FnMut() -> bool) -> bool {
        if sys::is_sandboxed() {
            return done();
        }
        let end = sys::now() + longest;
        while !done() {
            if self.is_over() || sys::now() >= end {
                return false;
            }
            sys::yield_now();
        }
        true
    }

    /// Calls `done` until it returns true, at most [`SPINS`] times.
    fn spin(mut done: impl FnMut() -> bool) -> bool {
        (0..SPINS).any(|_| {
            let done = done();
            if !done {
                core::hint::spin_loop();
            }
            done
        })
    }

    /// Stores an error of a datagram socket that occurred after a call had partly succeeded. The next call returns it.
    pub(crate) fn return_failure(&self, error: Errno) {
        self.slot.identity.return_failure(error as u32);
        self.mark();
    }

    /// Returns whether calls do not wait.
    pub(crate) fn is_nonblocking(&self) -> bool {
        sys::is_sandboxed()
            || sys::fcntl(self.fd, libc::F_GETFL, 0).is_ok_and(|flags| flags as c_int & libc::O_NONBLOCK != 0)
    }

    /// Returns the reading side. All of its memory that holds data is mapped.
    pub(crate) fn reader(&self) -> Result<app::Reader<Mapped>, Errno> {
        let mut reader = app::Reader::new(Mapped, self.place).ok_or(libc::EIO)?;
        self.stop_at_urgent(&mut reader);
        let there: usize = reader.spans().map(|span| span.len()).sum();
        if there < reader.available() && !link::has_stack_ended() {
            link::map_all();
        }
        Ok(reader)
    }

    /// Makes reads stop at the urgent byte, if there is one.
    pub(crate) fn stop_at_urgent(&self, reader: &mut app::Reader<Mapped>) {
        if self.slot.urgent().is_some() && !self.is_datagrams() {
            reader.stop_at_urgent(self.is_inline());
        }
    }

    /// Returns whether urgent data stays in the stream (`SO_OOBINLINE`).
    pub(crate) fn is_inline(&self) -> bool {
        let inline = stream_options::get(&self.slot.kept, libc::SOL_SOCKET, libc::SO_OOBINLINE);
        inline.is_some_and(|on| on != 0)
    }

    /// Returns whether unsent bytes are limited (`TCP_NOTSENT_LOWAT`).
    pub(crate) fn limits_unsent(&self) -> bool {
        self.slot.kept.number(number::NOTSENT_LOWAT) != 0
    }

    /// Returns the number of read bytes after which the stack is notified: at most `usual`, and at most half of a
    /// window that the program has set.
    pub(crate) fn notify_interval(&self, usual: u32) -> u32 {
        let buffer = self.slot.wishes.receive_buffer.load(Ordering::Relaxed);
        let clamp = number::decode(self.slot.kept.number(number::WINDOW_CLAMP)).unwrap_or(0);
        [buffer, clamp].into_iter().filter(|set| *set > 0).fold(usual, |least, set| least.min(set / 2))
    }

    /// Returns whether the next byte to read is the urgent one (`SIOCATMARK`).
    pub(crate) fn is_at_mark(&self) -> bool {
        app::Reader::new(Mapped, self.place).is_some_and(|reader| reader.is_at_mark())
    }

    /// Begins a turn of writing for the holder of the lock.
    pub(crate) fn turn(&self, lock: &SlotLock<'_>) -> Result<app::Turn<Mapped>, Errno> {
        app::Turn::new(Mapped, self.place, lock.is_nested()).ok_or(libc::EIO)
    }

    /// Claims space as [`app::Turn::claim`] does. All of it is mapped.
    pub(crate) fn claim(turn: &app::Turn<Mapped>, least: usize, most: usize) -> Option<app::Claim> {
        let claim = turn.claim(least, most)?;
        if !turn.is_mapped(claim) {
            link::map_all();
        }
        Some(claim)
    }

    /// Requests blocks for `len` bytes from the stack, since an idle session has few. The stack answers within a round,
    /// so a non-blocking call waits, too. Returns `false` if the stack has none.
    pub(crate) fn ask_for_blocks(&self, len: usize) -> bool {
        let Some(ask) = self.slot.want(len) else { return true };
        self.mark();
        let answered = || self.slot.is_answered(&ask);
        let answered = Self::spin(answered) || self.wait_for_stack(LATEST_ANSWER, answered);
        !answered || !self.slot.lacks(len)
    }

    /// Returns the number of written bytes that are not acknowledged.
    pub(crate) fn unacknowledged(&self) -> Result<usize, Errno> {
        let (tail, edge) = self.slot.sent();
        Ok(tail.saturating_sub(edge).min(i32::MAX as u64) as usize)
    }

    /// Updates the pair after a read that has left `left` bytes, so that later data is announced again. If data is
    /// left, at least one byte stays in the pair; otherwise, all its bytes are taken.
    pub(crate) fn settle(&self, reader: &app::Reader<Mapped>, left: usize) {
        if self.is_over() {
            // The last byte belongs to the stack. It shows the stack that the descriptor still exists.
            return;
        }
        let (wake, leftover) = (&self.slot.wake, &self.slot.wishes.leftover);
        let alarmed = wake.is_alarmed();
        let urgent = alarmed && self.is_urgent();
        // `poll` reports no data below the low-water mark.
        let has_data = left > 0 && (self.is_datagrams() || left >= self.low_water_mark());
        let shown = has_data || urgent;
        let mut all_taken = false;
        if alarmed && !urgent {
            if !self.take_all() {
                // An alarm that is still on its way is taken by a later call.
                return;
            }
            leftover.store(0, Ordering::Relaxed);
            all_taken = has_data;
        } else if shown {
            if !wake.is_announced() {
                return;
            }
            let bytes = leftover.load(Ordering::Relaxed).saturating_add(1);
            all_taken = bytes > TOKENS && !self.take_all_but_one(bytes);
            leftover.store(if bytes > TOKENS { 1 } else { bytes }, Ordering::Relaxed);
        } else if !self.take_tokens() {
            return;
        }
        wake.taken();
        if all_taken || reader.available() > left || !urgent && self.slot.identity.has_failed() {
            self.mark();
        }
        if alarmed && all_taken {
            self.wait_announced_again();
        }
    }

    /// Takes the bytes of the pair after a call has read everything. Returns whether the stack had announced it.
    fn take_tokens(&self) -> bool {
        let leftover = &self.slot.wishes.leftover;
        let (before, mut taken) = (leftover.load(Ordering::Relaxed), 0);
        loop {
            // Without a decision, the byte may still arrive.
            let Some(announced) = self.decision() else { return false };
            let due = before.saturating_add(announced.into());
            if taken < due {
                taken += self.take_announced(due - taken);
            }
            // A byte that has not arrived by now will not arrive: a process that has died may have taken it.
            leftover.store(0, Ordering::Relaxed);
            // The stack may have announced more data while older bytes were taken.
            if announced || before == 0 || self.slot.wake.decision() == Some(false) {
                return announced && taken > 0;
            }
        }
    }

    /// Takes all bytes of the pair except one, to make room for more. Each byte of the stack is an edge for
    /// edge-triggered programs, which may never read until `EAGAIN`. `about` is the approximate number of bytes.
    /// Returns `false` if the last byte may have been taken, too.
    fn take_all_but_one(&self, about: u32) -> bool {
        if sys::is_sandboxed() {
            // A filter might kill the process for asking for the exact number.
            let _ = self.take(about as usize - 1);
            return false;
        }
        let there = || sys::readable(self.fd);
        if let Ok(bytes @ 2..) = there() {
            let _ = self.take(bytes - 1);
        }
        // A signal handler may have read in between.
        there().is_ok_and(|bytes| bytes > 0)
    }

    /// Takes a byte without data, which was in transit when its data was read.
    pub(crate) fn settle_late(&self) -> Result<(), Errno> {
        let _lock = SlotLock::new(&self.slot.wishes.reading);
        let reader = self.reader()?;
        if reader.available() == 0 {
            self.take_all();
            self.slot.wishes.leftover.store(0, Ordering::Relaxed);
            self.slot.wake.taken();
            if reader.available() > 0 || self.slot.identity.has_failed() {
                self.mark();
            }
        }
        Ok(())
    }

    /// `SO_RCVLOWAT`: `poll` and blocking calls wait for this number of bytes.
    pub(crate) fn low_water_mark(&self) -> usize {
        number::decode(self.slot.kept.number(number::RCVLOWAT)).unwrap_or(1).max(1) as usize
    }

    /// Waits until a byte may be readable, also below the low-water mark. Errors are the kernel's, for example `EAGAIN`
    /// on a non-blocking descriptor. Returns `false` if the stream has ended.
    pub(crate) fn wait_readable(&self) -> Result<bool, Errno> {
        let waits = !self.is_datagrams() && self.low_water_mark() > 1;
        if waits {
            self.set_option_bit(wish::ANY_DATA, true);
        }
        let waited = self.wait_announced();
        if waits {
            self.set_option_bit(wish::ANY_DATA, false);
        }
        waited
    }

    fn wait_announced(&self) -> Result<bool, Errno> {
        let mut byte = [0u8];
        if sys::is_sandboxed() {
            // SAFETY: `byte` lives until the call returns.
            let there = unsafe { real::read(self.fd, byte.as_mut_ptr().cast(), 1) };
            let there = sys::of_libc(there)? > 0;
            if byte[0] == ALARM {
                self.slot.wake.clear_alarm();
            }
            if there {
                // Data that has arrived by now is announced again.
                self.slot.wake.taken();
                self.mark();
            }
            return Ok(there);
        }
        // libc's function is a cancellation point for threads.
        // SAFETY: `byte` lives until the call returns.
        let there = unsafe { real::recv(self.fd, byte.as_mut_ptr().cast(), 1, libc::MSG_PEEK) };
        let there = sys::of_libc(there)? > 0;
        if there && !self.slot.wake.is_announced() {
            self.settle_late()?;
        }
        Ok(there)
    }

    /// Makes `poll` report that the socket is not writable. Afterwards, the caller must check for room again, and mark
    /// the session.
    pub(crate) fn close_gate(&self) {
        for _ in 0..link::gate() {
            self.put_gate();
        }
        self.slot.wake.want_room();
    }

    /// Puts a byte into the pair, if it fits, and counts it. Bytes in excess of the count are data.
    fn put_gate(&self) -> bool {
        let gates = &self.slot.wishes.gates;
        gates.fetch_add(1, Ordering::AcqRel);
        let put = sys::send_byte(self.fd).is_ok();
        if !put {
            gates.fetch_sub(1, Ordering::AcqRel);
        }
        put
    }

    /// Waits until the closed gate is opened. A signal that arrived after `signals` were blocked ends the wait.
    pub(crate) fn wait_gate_or_signal(&self, signals: &sys::Blocked) -> Result<(), Errno> {
        let zero = libc::timeval { tv_sec: 0, tv_usec: 0 };
        let time = sys::socket_option(self.fd, libc::SOL_SOCKET, libc::SO_SNDTIMEO, zero);
        let time = time.filter(|time| time.tv_sec != 0 || time.tv_usec != 0);
        let time = time.map(|time| libc::timespec { tv_sec: time.tv_sec, tv_nsec: time.tv_usec * 1000 });
        sys::wait_for_room(self.fd, Some(signals), time)
    }

    /// Waits after `connect` until `poll` reports that the socket is writable. The stack opens the gate, which the
    /// call's last byte has closed, at once.
    pub(crate) fn wait_writable(&self) {
        // Signals must not end this wait.
        let _signals = sys::Blocked::new();
        let time = libc::timespec { tv_sec: 1, tv_nsec: 0 };
        let _ = sys::wait_for_room(self.fd, None, Some(time));
    }

    /// Waits until the gate is opened.
    pub(crate) fn wait_gate(&self) -> Result<(), Errno> {
        // The last byte blocks only if the pair is full. The stack is marked after the pair is full, so that the byte
        // gets through when the stack opens the gate.
        while self.put_gate() {}
        self.slot.wake.want_room();
        self.mark();
        let byte = [0u8];
        self.slot.wishes.gates.fetch_add(1, Ordering::AcqRel);
        // libc's function is a cancellation point for threads.
        // SAFETY: `byte` lives until the call returns.
        let waited = unsafe { real::send(self.fd, byte.as_ptr().cast(), 1, libc::MSG_NOSIGNAL) };
        let waited = sys::of_libc(waited).map(drop);
        if waited.is_err() {
            self.slot.wishes.gates.fetch_sub(1, Ordering::AcqRel);
        }
        // The byte itself closes the gate again.
        self.slot.wake.want_room();
        self.mark();
        waited
    }
}

#[cold]
fn slot_of_more(place: Place) -> Option<&'static Slot> {
    if link::map_more(place.number()) { Mapped.slot(place) } else { None }
}

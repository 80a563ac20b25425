//! Data written to a session's descriptor without the library: by functions of glibc that make system calls directly,
//! and by programs without the preload library. The data is in the pair, among the bytes of the gate, and is sent like
//! all other data.
//!
//! The library counts the bytes with which it closes the gate, which are zeros. All other bytes are such data, and so
//! are zeros beyond that count. An application that counts wrongly corrupts only its own stream. The first byte of the
//! pair is always skipped: it stays in the pair, so that a close of the stack's end leaves an unread byte.
//!
//! Bytes on a connected datagram socket are sent to the peer as one datagram, usually one datagram per write. The pair
//! is a stream, so several writes before the stack's next look become one datagram.
//!
//! The data follows everything that the library has written before. To ensure this order, the stack takes the
//! application's lock if it is free. The stack never waits for a lock.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arrayvec::ArrayVec;
use offcore_session::Memory;
use offcore_session::app::Turn;
use offcore_session::control::{Owner, Processes};
use offcore_session::datagram::{HEADER_LEN, Header, More, record_len};
use offcore_session::slot::{Slot, state, wish};
use offcore_stats::time::{Micros, Time};
use offcore_stats::tsc;
use offcore_tcp::proto::ConnId;
use rustix::io::{Errno, ioctl_fionread};
use rustix::net::{RecvFlags, recv};

use super::pending_work::PendingQueue;
use super::session::{Session, SessionKind};
use super::{Serve, pair};
use crate::host::Calls;

/// Maximum number of bytes processed at a time, and the number of bytes of a closed session up to which they are
/// processed immediately instead of in the application's turn.
const CHUNK: usize = 4096;
const FEW: u64 = 64;
/// How long data of a closed session waits for room.
const LAST: Micros = Micros::from_secs(60);

/// The destination of the bytes.
#[derive(Clone, Copy)]
enum To {
    Stream(ConnId),
    /// The peer of a datagram socket.
    Peer(ConnId, SocketAddr),
    /// The connection is not established yet.
    Later,
    /// The session has no stream or peer to which the bytes could be sent.
    Nowhere,
}

/// The result of relaying data from a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Relayed {
    /// No data is left to send.
    All,
    /// More data may be left.
    Some,
    /// No room is available, or a process holds the lock.
    Waits,
}

fn to(session: &Session, slot: &Slot) -> To {
    let ended = session.is_over() || slot.wishes.options.load(Ordering::Acquire) & wish::END != 0;
    match *session.kind() {
        SessionKind::Stream(_) if ended => To::Nowhere,
        SessionKind::Stream(conn) if slot.state() == state::OPEN => To::Stream(conn),
        SessionKind::Stream(_) => To::Later,
        SessionKind::Datagrams(conn) if !ended => peer(slot).map_or(To::Nowhere, |peer| To::Peer(conn, peer)),
        _ => To::Nowhere,
    }
}

/// The peer of a datagram socket. It is read from the application's memory: the application may send to any peer.
fn peer(slot: &Slot) -> Option<SocketAddr> {
    let identity = &slot.identity;
    let port = (identity.ports.load(Ordering::Relaxed) >> 16) as u16;
    let words = identity.remote.each_ref().map(|word| word.load(Ordering::Relaxed).to_ne_bytes());
    let ip = match identity.family.load(Ordering::Relaxed) {
        6 => IpAddr::V6(Ipv6Addr::from(*words.as_flattened().first_chunk()?)),
        _ => IpAddr::V4(Ipv4Addr::from(words[0])),
    };
    (port != 0).then_some(SocketAddr::new(ip, port))
}

/// Writes a whole datagram. Returns the number of bytes, all or 0.
fn write_datagram(turn: &Turn<Arc<Memory>>, peer: SocketAddr, data: &[u8]) -> usize {
    let local = if peer.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let len = data.len() as u16;
    let mut record = [0; HEADER_LEN + CHUNK];
    let record = &mut record[..record_len(len)];
    // copy-ok: a header
    record[..HEADER_LEN].copy_from_slice(&Header { len, peer, local, more: More::default() }.to_bytes());
    // copy-ok: bytes from the pair
    record[HEADER_LEN..][..data.len()].copy_from_slice(data);
    let Some(claim) = turn.claim(record.len(), record.len()) else { return 0 };
    turn.cut(claim, 0);
    turn.write(record);
    data.len()
}

/// Whether a living process holds a lock. The stack holds a lock only during [`Serve::relay`]. Otherwise its number in
/// the word was written by the application.
fn is_held(word: u64, processes: &Processes) -> bool {
    let holder = Owner::from_word(word as u32 >> 1).filter(|holder| *holder != Owner::STACK);
    holder.is_some_and(|holder| processes.lives(holder))
}

/// An application's lock, held by the stack.
struct Held<'a>(&'a AtomicU64);

impl<'a> Held<'a> {
    /// Takes the lock, unless a living process holds it. The caller must not hold it.
    fn new(word: &'a AtomicU64, processes: &Processes) -> Option<Self> {
        let found = word.load(Ordering::Relaxed);
        let free = found == 0 || !is_held(found, processes);
        // A waiter sees that the bit in the word is cleared and sets it again, or checks the lock after 10 ms.
        let mine = u64::from(Owner::STACK.word()) << 1 | found & 1;
        let taken = free && word.compare_exchange(found, mine, Ordering::Acquire, Ordering::Relaxed).is_ok();
        taken.then(|| Self(word))
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        // No waiter is woken: waits for this lock have a timeout, and this case is rare.
        self.0.store(0, Ordering::Release);
    }
}

/// The data bytes of a chunk, without bytes of gates. `ends[n]` is the length of the part of the chunk that contains
/// the first `n + 1` data bytes.
struct Sorted {
    data: ArrayVec<u8, CHUNK>,
    ends: ArrayVec<u16, CHUNK>,
}

impl Sorted {
    fn new(bytes: &[u8], mut gates: u32) -> Self {
        let mut sorted = Self { data: ArrayVec::new(), ends: ArrayVec::new() };
        for (byte, end) in bytes.iter().zip(1..) {
            if *byte == 0 && gates > 0 {
                gates -= 1;
            } else if sorted.data.try_push(*byte).is_err() || sorted.ends.try_push(end).is_err() {
                break;
            }
        }
        sorted
    }
}

/// Reads and discards the first `len` bytes of a pair.
fn consume(ours: BorrowedFd<'_>, mut len: usize) {
    let mut bytes = [0; CHUNK];
    while len > 0 {
        match recv(ours, &mut bytes[..len.min(CHUNK)], RecvFlags::DONTWAIT) {
            Ok((read @ 1.., _)) => len -= read.min(len),
            Err(Errno::INTR) => {}
            _ => return,
        }
    }
}

impl Serve {
    /// Queues a session whose pair may contain data. The pair is read in the application's turn.
    pub(super) fn queue_pair_read(&mut self, app: usize, number: u32) {
        self.queue_raw(app, number, None, PendingQueue::push);
    }

    /// Prepares to close a session. Returns `false` if data in its pair must be sent first; the session then ends
    /// later.
    pub(super) fn may_close(&mut self, app: usize, number: u32, calls: &mut Calls<'_>) -> bool {
        let Some(session) = self.app(app).and_then(|app| app.session_mut(number)) else { return true };
        if session.pair_read().ends().is_some() {
            return false;
        }
        let few = session.ours().is_none_or(|ours| ioctl_fionread(ours).is_ok_and(|there| there <= FEW));
        let done = few && self.relay(app, number, calls) == Relayed::All;
        if !done {
            self.queue_raw(app, number, Some(calls.now + LAST), PendingQueue::push);
        }
        done
    }

    /// Adds a session to the queue of sessions whose pairs are read.
    fn queue_raw(
        &mut self,
        app: usize,
        number: u32,
        ends: Option<Time>,
        push: impl FnOnce(&mut PendingQueue<(u32, u32)>, (u32, u32)),
    ) {
        self.wake_application(app);
        let Some(application) = self.app(app) else { return };
        let Some(session) = application.session_mut(number) else { return };
        let named = (number, session.generation());
        if session.pair_read().enqueue(ends) {
            push(application.pending_mut().pairs(), named);
        }
    }

    /// Reads the pair of a queued session.
    pub(super) fn relay_next(&mut self, app: usize, number: u32, generation: u32, calls: &mut Calls<'_>) {
        let session = self.app(app).and_then(|app| app.session_mut(number));
        let Some(session) = session.filter(|session| session.generation() == generation) else { return };
        let ends = session.pair_read().dequeue();
        // Relaying examines each byte, so check the lock first.
        let relayed = match self.is_locked(app, number) {
            true => Relayed::Waits,
            false => self.relay(app, number, calls),
        };
        match (relayed, ends) {
            (_, Some(ends)) if relayed == Relayed::All || calls.now >= ends => {
                self.close(app, number, calls);
                self.end_when_over(app, calls);
            }
            (Relayed::All, _) => {}
            (Relayed::Some, _) => self.queue_raw(app, number, ends, PendingQueue::push),
            (Relayed::Waits, _) => self.queue_raw(app, number, ends, PendingQueue::push_waiting),
        }
    }

    /// Whether a living process holds the lock for writing.
    fn is_locked(&mut self, app: usize, number: u32) -> bool {
        let Some((_, slot, processes)) = self.app(app).and_then(|app| app.all(number)) else { return false };
        is_held(slot.wishes.writing.load(Ordering::Relaxed), processes)
    }

    /// Sends some of the data in a session's pair.
    fn relay(&mut self, app: usize, number: u32, calls: &mut Calls<'_>) -> Relayed {
        let Some(application) = self.registry.app(app) else {
            return Relayed::All;
        };
        let (memory, is_left) = (Arc::clone(application.memory()), application.processes().len() == 0);
        let Some((session, slot, processes)) = application.all(number) else { return Relayed::All };
        let Some(ours) = session.ours() else { return Relayed::All };
        let mut bytes = [0; CHUNK];
        let queued = ioctl_fionread(ours).map_or(0, |there| there.min(CHUNK as u64) as usize);
        let (there, has_descriptors) = pair::look(ours, &mut bytes).unwrap_or_default();
        if has_descriptors || there < queued || is_left && pair::may_hold_descriptors(ours) {
            // The descriptors stay in the pair. If no process is left, the session's end may be held only by its own
            // queue, and would never be closed.
            if is_left {
                self.close(app, number, calls);
                self.end_when_over(app, calls);
            }
            return Relayed::All;
        }
        let bytes = bytes[..there].get(1..).unwrap_or_default();
        let sorted = Sorted::new(bytes, session.end().gates(slot));
        if sorted.data.is_empty() {
            session.make_room(slot, calls, &mut self.tally.counts);
            return Relayed::All;
        }
        let (taken, done) = match to(session, slot) {
            To::Later => return Relayed::Waits,
            To::Nowhere => {
                let from = tsc::now();
                consume(ours, bytes.len());
                session.end_mut().record_wakeup(from);
                (bytes.len(), 0)
            }
            to @ (To::Stream(conn) | To::Peer(conn, _)) => {
                let Some(lock) = Held::new(&slot.wishes.writing, processes) else { return Relayed::Waits };
                let Some(turn) = Turn::new(memory, session.place(), false) else { return Relayed::All };
                let write = || match to {
                    To::Peer(_, peer) => write_datagram(&turn, peer, &sorted.data),
                    _ => turn.write(&sorted.data),
                };
                let mut done = write();
                if done == 0 {
                    calls.stack.want_room(conn);
                    done = write();
                }
                drop((turn, lock));
                let Some(last) = done.checked_sub(1) else { return Relayed::Waits };
                // Bytes of the gate behind the last data byte stay, while the gate is closed.
                let taken = usize::from(sorted.ends[last]);
                let from = tsc::now();
                consume(ours, taken);
                session.end_mut().record_wakeup(from);
                (taken, done)
            }
        };
        let data = sorted.ends.iter().filter(|end| usize::from(**end) <= taken).count();
        session.end_mut().count_gates((taken - data) as u32);
        self.tally.counts.relayed += done as u64;
        self.tally.counts.unsent += (data - done) as u64;
        if data > done && self.tally.losses.may(calls.now) {
            tracing::warn!(
                application = app,
                session = number,
                "data written without the preload library is lost: the session is neither an open stream nor a connected datagram socket"
            );
        }
        self.process_session(app, number, calls);
        // Bytes of gates may be left, or new data may have arrived.
        Relayed::Some
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counted_zero_bytes_belong_to_gate() {
        let sorted = Sorted::new(b"\0\0ab\0c\0", 3);
        assert_eq!((&sorted.data[..], &sorted.ends[..]), (&b"abc\0"[..], &[3, 4, 6, 7][..]));
        assert!(Sorted::new(&[0; 5], 5).data.is_empty());
        assert_eq!(Sorted::new(&[0; 5], 3).data.len(), 2);
    }

    #[test]
    fn only_dead_owner_loses_lock() {
        let shared = offcore_session::shared::Shared::new().unwrap();
        let lives = Owner::new(3, 7).unwrap();
        shared.processes().set(3, 7);
        let word = AtomicU64::new(u64::from(lives.word()) << 1 | 9 << 32);
        assert!(Held::new(&word, shared.processes()).is_none());
        shared.processes().set(3, 0);
        let held = Held::new(&word, shared.processes()).unwrap();
        drop(held);
        assert_eq!(word.load(Ordering::Relaxed), 0);
        let forged = AtomicU64::new(u64::from(Owner::STACK.word()) << 1);
        assert!(Held::new(&forged, shared.processes()).is_some());
    }
}

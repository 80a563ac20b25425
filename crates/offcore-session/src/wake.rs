//! Wake-ups between an application's process and the stack when a session has an event.
//!
//! For each session, the application has one end of a pair of Unix stream sockets, and the stack has the other one.
//! Data is passed through the FIFOs. The pair exists for the kernel, so that `poll`, `select`, `epoll` and blocking
//! calls work as usual:
//!
//! | state | action | result of `poll` |
//! |---|---|---|
//! | data to be read | the stack writes one byte, the *token* | `IN`, and a new edge with each byte |
//! | a datagram socket's error, or a stream's urgent byte | the token is [`ALARM`] and sent with `MSG_OOB` | `IN PRI` |
//! | no room, connecting, listening | unread bytes at the application's end: the *gate* | no `OUT`; an edge when read |
//! | the peer has ended its stream | the stack shuts its end down for writing | `IN RDHUP` |
//! | reset, or dead stack | the stack's end closes with an unread byte that was always there | `IN OUT ERR HUP RDHUP` |
//! | the last descriptor of the application is closed | the kernel closes the end | the stack's end: `HUP` |
//!
//! **Token.** The stack commits bytes, executes a full fence, and swaps `DECIDING` into `token`. If that was 0, it
//! executes another fence and checks whether the bytes are still unread. If so it stores `SENT` and writes the byte,
//! otherwise it stores 0. When the application has read everything, it executes a full fence and loads `token`. While
//! the stack decides it waits. After `SENT` it takes the byte, stores 0, executes a full fence, and checks again for
//! bytes. If there are any it marks its session, and the stack announces again. So while bytes are unread, the byte is
//! in the pair, or the session is marked. After a read of everything the pair is empty, and a blocking read after
//! `poll` does not hang. There are two exceptions: a process that shared the session has died, or the stack is late by
//! 100 ms. Then the next read takes the byte. A program that always leaves data and waits for edges gets an edge with
//! each announcement after a read. It leaves [`TOKENS`] bytes in the pair, then all but one are taken, so that there is
//! room for the next one. An error of a datagram socket is announced and checked like data.
//!
//! **Alarm.** The stack stores an error, executes a full fence, and swaps 1 into `alarm`. If that was 0 it writes the
//! byte. The application's end has `SO_OOBINLINE`: reads stop before the byte, and the next read takes it. An
//! application that has taken it stores 0, executes a full fence, and marks its session if there is still an error. The
//! library reports `PRI` of a datagram socket as `ERR`.
//!
//! **Gate.** The application closes the gate, stores 1 into `want_out`, checks again whether there is room, and marks
//! its session in any case. The stack checks `want_out` when it has freed room, and when a session is marked. If there
//! is enough room it swaps 0 into it and opens the gate. It may miss the word when it frees room, but then the mark
//! follows.

#[cfg(all(loom, test))]
mod loom_model;

use crate::sync::{AtomicU32, Ordering, fence};

/// Maximum number of bytes in the pair after a read that has left data. The stack ensures that there is room for more.
pub const TOKENS: u32 = 2;
/// Value of a token that is an alarm. Others are 0.
pub const ALARM: u8 = 1;
/// Values of the word `token`: the stack is deciding whether to write the byte, or it has written the byte or is about
/// to.
const DECIDING: u32 = 1;
const SENT: u32 = 2;

/// The words of a session for waiting. Both sides store to them. An application can only keep its own processes asleep,
/// or wake them too often.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Wake {
    token: AtomicU32,
    want_out: AtomicU32,
    alarm: AtomicU32,
    rest: [AtomicU32; 13],
}

impl Wake {
    /// Announces bytes or an error that the stack has committed. `any` returns whether some of it is still unread.
    /// Returns whether the stack must write the byte.
    #[inline]
    pub fn announce(&self, any: impl FnOnce() -> bool) -> bool {
        fence(Ordering::SeqCst);
        if self.token.load(Ordering::Relaxed) != 0 || self.token.swap(DECIDING, Ordering::AcqRel) != 0 {
            return false;
        }
        // Either a call that has read everything sees the word, or `any` sees the new index.
        fence(Ordering::SeqCst);
        let any = any();
        self.token.store(if any { SENT } else { 0 }, Ordering::Release);
        any
    }

    /// Records that the stack writes a byte in any case.
    pub fn announce_always(&self) {
        self.token.store(SENT, Ordering::Release);
    }

    /// Returns whether a byte is in the pair, or about to be.
    #[inline]
    pub fn is_announced(&self) -> bool {
        self.token.load(Ordering::Acquire) != 0
    }

    /// Returns whether a byte is in the pair, or about to be. The application calls it when it has read everything.
    /// Returns `None` while the stack decides.
    #[inline]
    pub fn decision(&self) -> Option<bool> {
        fence(Ordering::SeqCst);
        match self.token.load(Ordering::Acquire) {
            DECIDING => None,
            token => Some(token != 0),
        }
    }

    /// Records that the application has taken the byte. Afterwards it must check again whether there is data.
    #[inline]
    pub fn taken(&self) {
        self.token.store(0, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Announces an error that the stack has stored. Returns whether the stack must write the alarm.
    pub fn alarm(&self) -> bool {
        fence(Ordering::SeqCst);
        self.alarm.swap(1, Ordering::AcqRel) == 0
    }

    /// Returns whether an alarm is in the pair, or about to be.
    #[inline]
    pub fn is_alarmed(&self) -> bool {
        self.alarm.load(Ordering::Acquire) != 0
    }

    /// Records that the application has taken the alarm. Afterwards it must check again for an error.
    pub fn clear_alarm(&self) {
        self.alarm.store(0, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Records that the application has closed the gate. Afterwards it must check again whether there is room, and mark
    /// the session.
    #[inline]
    pub fn want_room(&self) {
        // Release ordering: a stack that sees the value finds the bytes in the pair.
        self.want_out.store(1, Ordering::Release);
    }

    /// Returns, for the stack, whether the application waits for room.
    #[inline]
    pub fn wants_room(&self) -> bool {
        self.want_out.load(Ordering::Relaxed) != 0
    }

    /// Records that the stack is about to open the gate. Returns `false` if it is already open.
    #[inline]
    pub fn open(&self) -> bool {
        self.want_out.swap(0, Ordering::AcqRel) != 0
    }

    pub(crate) fn reset(&self) {
        for word in [&self.token, &self.want_out, &self.alarm].into_iter().chain(&self.rest) {
            word.store(0, Ordering::Relaxed);
        }
    }
}

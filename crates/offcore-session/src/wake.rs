//! How an application's process learns that a session has something for it, and the stack the reverse.
//!
//! An application has one end of a pair of Unix stream sockets for each session, and the stack has the other one. Data
//! goes through the FIFOs. The pair is there for the kernel, so that `poll`, `select`, `epoll` and blocking calls do what
//! they always do:
//!
//! | state | what is done | what `poll` shows |
//! |---|---|---|
//! | data to be read | the stack writes one byte, the *token* | `IN`, and a new edge with each byte |
//! | an error of a datagram socket, or an urgent byte of a stream | the token has the value [`ALARM`] and is sent with `MSG_OOB` | `IN PRI` |
//! | no room to write, connecting, listening | the application's end has unread bytes: the *gate* | no `OUT`; an edge when the stack reads them |
//! | the peer has ended its stream | the stack shuts its end down for writing | `IN RDHUP` |
//! | reset, or the stack is dead | the stack's end closes over an unread byte, which is there from the beginning | `IN OUT ERR HUP RDHUP` |
//! | the last descriptor of the application is closed | the kernel | the stack's end: `HUP` |
//!
//! **Token.** The stack commits bytes, executes a full fence, and swaps `DECIDING` into `token`. If that was 0, it executes
//! another fence and looks whether the bytes are still unread: then it stores `SENT` and writes the byte, else it stores 0.
//! The application, when it has read everything, executes a full fence and loads `token`. While the stack decides it waits;
//! after `SENT` it takes the byte, stores 0, executes a full fence, and looks once more
//! whether there are bytes. If so it marks its session, and the stack announces again. So while bytes are unread, the byte is in
//! the pair, or the session is marked. After a read of everything the pair is empty, and a blocking read after `poll` does not hang.
//! There are two exceptions: a process that shared the session has died, or the stack is late by 100 ms. Then the next read takes
//! the byte. A program that always leaves data and waits for edges gets one by each announcement after a read: it leaves
//! [`TOKENS`] bytes, and then all but one are taken, so that the next one finds room. An error of a datagram socket is announced
//! like data, and looked for as well.
//!
//! **Alarm.** The stack stores an error, executes a full fence, and swaps 1 into `alarm`; if that was 0 it writes the byte. The
//! application's end has `SO_OOBINLINE`: reads stop before the byte, and the next read takes it. An application that has taken it
//! stores 0, executes a full fence, and marks its session if there is an error still. The library shows `PRI` of a datagram
//! socket as `ERR`.
//!
//! **Gate.** The application closes the gate, stores 1 into `want_out`, looks once more whether there is room, and marks its
//! session in any case. The stack looks at `want_out` when it has freed room, and when a session is marked; if there is
//! enough room it swaps 0 into it and opens the gate. It may miss the word when it frees room: then the mark follows.

#[cfg(all(loom, test))]
mod loom_model;

use crate::sync::{AtomicU32, Ordering, fence};

/// Bytes that may be in the pair after a read that has left data. The stack sees to it that there is room for more.
pub const TOKENS: u32 = 2;
/// Value of a token that is an alarm. Others are 0.
pub const ALARM: u8 = 1;
/// Values of the word `token`: the stack looks whether it writes the byte, and it has written the byte or is about to.
const DECIDING: u32 = 1;
const SENT: u32 = 2;

/// The words of a session that say who waits. Both sides store to them; what an application stores can keep nobody but
/// its own processes asleep, or wake them up too often.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Wake {
    token: AtomicU32,
    want_out: AtomicU32,
    alarm: AtomicU32,
    rest: [AtomicU32; 13],
}

impl Wake {
    /// The stack has committed bytes or an error. `any` returns whether some of it is still unread. Returns whether the stack writes
    /// the byte.
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

    /// The stack writes a byte in any case.
    pub fn announce_always(&self) {
        self.token.store(SENT, Ordering::Release);
    }

    /// Whether a byte is in the pair, or about to be.
    #[inline]
    pub fn is_announced(&self) -> bool {
        self.token.load(Ordering::Acquire) != 0
    }

    /// Whether a byte is in the pair, or about to be. The application calls it when it has read everything. Returns `None` while
    /// the stack decides.
    #[inline]
    pub fn decision(&self) -> Option<bool> {
        fence(Ordering::SeqCst);
        match self.token.load(Ordering::Acquire) {
            DECIDING => None,
            token => Some(token != 0),
        }
    }

    /// The application has taken the byte. It is to look once more whether there is data, after this.
    #[inline]
    pub fn taken(&self) {
        self.token.store(0, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// The stack has stored an error. `true`: it is to write the alarm.
    pub fn alarm(&self) -> bool {
        fence(Ordering::SeqCst);
        self.alarm.swap(1, Ordering::AcqRel) == 0
    }

    /// Whether an alarm is in the pair, or about to be.
    #[inline]
    pub fn is_alarmed(&self) -> bool {
        self.alarm.load(Ordering::Acquire) != 0
    }

    /// The application has taken the alarm. It is to look once more for an error, after this.
    pub fn calm(&self) {
        self.alarm.store(0, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// The application has closed the gate. It is to look once more whether there is room, and to mark the session, after
    /// this.
    #[inline]
    pub fn want_room(&self) {
        // Who sees this finds the bytes in the pair.
        self.want_out.store(1, Ordering::Release);
    }

    /// Whether the application waits for room, for the stack.
    #[inline]
    pub fn wants_room(&self) -> bool {
        self.want_out.load(Ordering::Relaxed) != 0
    }

    /// The stack is going to open the gate. `false`: it is open.
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

//! Loom models of the loads and stores of the stack and an application that wait for each other, in every interleaving.
//! An atomic represents the kernel's state: the bytes in the pair. System calls are sequentially consistent, because
//! the kernel uses locks.

use loom::sync::Arc;
use loom::thread;

use super::*;
use crate::control::Control;

impl Wake {
    fn new() -> Self {
        let word = |_| AtomicU32::new(0);
        Self { token: word(0), want_out: word(0), alarm: word(0), rest: std::array::from_fn(word) }
    }
}

/// A session, and the kernel's state for it.
struct Session {
    wake: Wake,
    control: Control,
    /// Committed and consumed positions, with one writer each.
    tail: AtomicU32,
    head: AtomicU32,
    /// An error that no call has returned.
    error: AtomicU32,
    /// Number of bytes in the pair, and the gate. One byte may remain from a read that has left data.
    byte: AtomicU32,
    leftover: AtomicU32,
    gate: AtomicU32,
    /// Freed room, and used room.
    room: AtomicU32,
    event: AtomicU32,
}

impl Session {
    fn new() -> Arc<Self> {
        let word = |value| AtomicU32::new(value);
        Arc::new(Self {
            wake: Wake::new(),
            control: Control::new(),
            tail: word(0),
            head: word(0),
            error: word(0),
            byte: word(0),
            leftover: word(0),
            gate: word(0),
            room: word(0),
            event: word(0),
        })
    }

    /// The stack commits a byte and announces it.
    fn commit(&self) {
        // A preceding load would hide other threads' loads from loom, which stores one access of each atomic.
        self.tail.fetch_add(1, Ordering::Release);
        self.announce();
    }

    /// The stack stores an error and announces it.
    fn fail(&self, error: u32) {
        self.error.store(error, Ordering::Release);
        self.announce();
    }

    fn has_failed(&self) -> bool {
        self.error.load(Ordering::Relaxed) != 0
    }

    fn announce(&self) {
        if self.wake.announce(|| self.available() > 0 || self.has_failed()) {
            self.byte.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn available(&self) -> u32 {
        self.tail.load(Ordering::Acquire) - self.head.load(Ordering::Relaxed)
    }

    /// The application reads everything, and takes the byte.
    fn read(&self) {
        let there = self.available();
        self.head.store(self.head.load(Ordering::Relaxed) + there, Ordering::Release);
        self.settle();
    }

    fn settle(&self) {
        if self.available() > 0 || !self.take_tokens() {
            return;
        }
        self.wake.taken();
        if self.available() > 0 || self.has_failed() {
            self.control.mark(3);
        }
    }

    /// Like the library's function of this name, without time limits.
    fn take_tokens(&self) -> bool {
        let (before, mut taken) = (self.leftover.load(Ordering::Relaxed), 0);
        loop {
            let announced = self.decision();
            let due = before + u32::from(announced);
            while taken < due {
                taken += self.byte.swap(0, Ordering::SeqCst);
                if taken < due {
                    thread::yield_now();
                }
            }
            self.leftover.store(0, Ordering::Relaxed);
            if announced || before == 0 || self.wake.decision() == Some(false) {
                return announced && taken > 0;
            }
        }
    }

    fn decision(&self) -> bool {
        loop {
            match self.wake.decision() {
                Some(announced) => break announced,
                None => thread::yield_now(),
            }
        }
    }

    /// The stack processes marked sessions.
    fn look(&self) {
        let mut marked = false;
        self.control.take_marks(&mut 0, 1, |number| marked = number == 3);
        if !marked {
            return;
        }
        if self.available() > 0 || self.has_failed() {
            self.announce();
        }
        self.open_gate();
    }

    fn open_gate(&self) {
        if self.wake.wants_room() && self.room.load(Ordering::Acquire) > 0 && self.wake.open() {
            self.gate.store(0, Ordering::SeqCst);
        }
    }

    /// The application has no room and waits. Returns whether it has found room in the meantime.
    fn wait_for_room(&self) -> bool {
        self.gate.store(1, Ordering::SeqCst);
        self.wake.want_room();
        let found = self.room.load(Ordering::Acquire) > 0;
        self.control.mark(3);
        found
    }
}

#[test]
fn data_is_announced_or_marked() {
    loom::model(|| {
        let session = Session::new();
        let stack = Arc::clone(&session);
        let stack = thread::spawn(move || {
            stack.commit();
            stack.commit();
        });
        session.read();
        stack.join().unwrap();
        // The stack processes the marks.
        session.look();
        assert!(session.byte.load(Ordering::SeqCst) <= 1, "one byte at most");
        assert!(session.available() == 0 || session.byte.load(Ordering::SeqCst) == 1, "data without a byte");
        if session.byte.load(Ordering::SeqCst) == 0 {
            assert!(!session.wake.is_announced(), "later data would not be announced");
        }
    });
}

#[test]
fn poll_shows_no_stale_data() {
    loom::model(|| {
        let session = Session::new();
        let stack = Arc::clone(&session);
        let stack = thread::spawn(move || stack.commit());
        session.read();
        session.read();
        stack.join().unwrap();
        session.look();
        let there = session.available();
        assert_eq!(session.byte.load(Ordering::SeqCst), there, "a byte for data, and for nothing else");
    });
}

#[test]
fn leftover_byte_is_not_the_announcement() {
    loom::model(|| {
        let session = Session::new();
        // A read has left data: its byte is in the pair.
        session.byte.store(1, Ordering::SeqCst);
        session.leftover.store(1, Ordering::Relaxed);
        let stack = Arc::clone(&session);
        let stack = thread::spawn(move || stack.commit());
        session.read();
        stack.join().unwrap();
        session.look();
        let (there, byte) = (session.available(), session.byte.load(Ordering::SeqCst));
        assert!(there > 0 || byte == 0, "a byte without data");
        assert!(there == 0 || byte > 0, "data without a byte");
    });
}

#[test]
fn an_error_is_announced_or_marked() {
    loom::model(|| {
        let session = Session::new();
        let stack = Arc::clone(&session);
        let stack = thread::spawn(move || {
            stack.fail(1);
            stack.fail(2);
        });
        let told = session.error.swap(0, Ordering::AcqRel);
        session.settle();
        stack.join().unwrap();
        session.look();
        let (left, byte) = (session.has_failed(), session.byte.load(Ordering::SeqCst));
        assert!(byte <= 1, "one byte at most");
        assert!(!left || byte == 1, "an error without a byte, after {told}");
        if byte == 0 {
            assert!(!session.wake.is_announced(), "later errors would not be announced");
        }
    });
}

#[test]
fn a_gate_is_opened_when_there_is_room() {
    loom::model(|| {
        let session = Session::new();
        let stack = Arc::clone(&session);
        let stack = thread::spawn(move || {
            stack.room.store(1, Ordering::Release);
            stack.open_gate();
        });
        session.wait_for_room();
        stack.join().unwrap();
        session.look();
        assert_eq!(session.gate.load(Ordering::SeqCst), 0, "neither side would open it");
    });
}

#[test]
fn mark_is_seen_or_wakes_worker() {
    loom::model(|| {
        let session = Session::new();
        let application = Arc::clone(&session);
        let application = thread::spawn(move || {
            application.control.mark(3);
            if application.control.ring() {
                application.event.store(1, Ordering::SeqCst);
            }
        });
        let awake = session.control.arm();
        application.join().unwrap();
        assert!(awake || session.event.load(Ordering::SeqCst) == 1, "it sleeps over a mark");
    });
}

//! Listeners that outlive their stack.
//!
//! The library keeps the kernel's socket of each listener, which holds the address, the options and the backlog. After the stack's
//! death, the first `accept` on a listener replaces its descriptor by a timer. The timer becomes readable five times a second, so
//! a program that polls calls `accept` again. Each of these calls looks for a stack at the same path. A new stack gets the kernel's
//! socket, and the new listener replaces the timer.
//!
//! Processes that share a listener each make their own. A process makes its listeners before it forks, so its children share them.

use core::ffi::c_int;
use core::ptr;
use core::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use offcore_session::slot::Slot;

use crate::decide;
use crate::environment;
use crate::link::{self, Step};
use crate::polled;
use crate::report;
use crate::session::{self, Session, Target};
use crate::sys::{self, Errno};
use crate::table::{self, Entry, Kind};

/// Most listeners of an application. The stack has the same limit.
const MOST: usize = 256;
/// Milliseconds between two looks for a stack.
const LOOK: u64 = 200;

/// A listener, and the kernel's socket of it.
struct Kept {
    /// Word of the table's entry; 0 for none.
    entry: AtomicU64,
    kernel: AtomicI32,
    slot: AtomicPtr<Slot>,
}

static KEPT: [Kept; MOST] = [const {
    Kept { entry: AtomicU64::new(0), kernel: AtomicI32::new(-1), slot: AtomicPtr::new(ptr::null_mut()) }
}; MOST];
/// One more than the highest place that has ever been in use.
static USED: AtomicUsize = AtomicUsize::new(0);

fn all() -> impl Iterator<Item = &'static Kept> {
    let used = USED.load(Ordering::Acquire);
    KEPT[..used].iter().filter(|kept| kept.kernel.load(Ordering::Relaxed) >= 0)
}

fn find(entry: Entry) -> Option<&'static Kept> {
    all().find(|kept| kept.entry.load(Ordering::Relaxed) == entry.to_word())
}

/// Keeps the kernel's socket of a new listener.
pub(crate) fn keep(session: &Session, kernel: c_int) {
    // A listener may be adopted at two descriptors.
    if find(session.entry).is_some() {
        let _ = sys::close(kernel);
        return;
    }
    let place = KEPT.iter().position(|kept| {
        kept.kernel.compare_exchange(-1, kernel, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    });
    let Some(place) = place else {
        let _ = sys::close(kernel);
        return;
    };
    KEPT[place].know(session);
    USED.fetch_max(place + 1, Ordering::AcqRel);
}

impl Kept {
    /// Gives all descriptors of a listener of a dead stack another entry, and returns it.
    fn rename(&self) -> Option<Entry> {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let entry = Entry::from_word(self.entry.load(Ordering::Relaxed))?;
        if entry.kind == Kind::Dead {
            return Some(entry);
        }
        let new = Entry { kind: Kind::Dead, place: NEXT.fetch_add(1, Ordering::Relaxed), ..entry };
        self.entry.store(new.to_word(), Ordering::Release);
        for (fd, _) in table::all(table::DESCRIPTORS).filter(|(_, other)| *other == entry) {
            table::set(fd, Some(new));
        }
        Some(new)
    }

    fn know(&self, session: &Session) {
        self.slot.store(ptr::from_ref(session.slot).cast_mut(), Ordering::Relaxed);
        self.entry.store(session.entry.to_word(), Ordering::Release);
    }
}

/// Whether an entry is a listener whose kernel socket is kept. Its epoll registrations are kept, too.
pub(crate) fn is_kept(entry: Entry) -> bool {
    find(entry).is_some()
}

/// Closes the kernel's socket after the listener's last descriptor was closed.
pub(crate) fn closed(entry: Entry) {
    if let Some(kept) = find(entry)
        && !table::all(table::DESCRIPTORS).any(|(_, other)| other == entry)
    {
        kept.entry.store(0, Ordering::Relaxed);
        let _ = sys::close(kept.kernel.swap(-1, Ordering::AcqRel));
    }
}

/// Shuts the kernel's socket of a listener down.
pub(crate) fn shut_down(entry: Entry) {
    if let Some(kept) = find(entry) {
        let _ = sys::shutdown(kept.kernel.load(Ordering::Relaxed), libc::SHUT_RD);
    }
}

/// The library's own descriptors here.
pub(crate) fn own_descriptors() -> impl Iterator<Item = c_int> {
    all().map(|kept| kept.kernel.load(Ordering::Relaxed))
}

/// Moves a kept socket away from a number that the program wants. `None`: no kept socket has that number.
pub(crate) fn move_away(fd: c_int, to: impl FnOnce() -> Result<c_int, Errno>) -> Option<bool> {
    let kept = all().find(|kept| kept.kernel.load(Ordering::Relaxed) == fd)?;
    Some(to().is_ok_and(|moved| {
        kept.kernel.compare_exchange(fd, moved, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }))
}

/// Renames all listeners. Another stack may give its sessions the same names.
pub(crate) fn forget_names() {
    for kept in all() {
        let _ = kept.rename();
    }
}

/// The result of an attempt.
enum Made {
    /// The stack has it.
    There,
    /// The stack is not back yet.
    Later,
}

/// Makes a listener again after its stack died. `accept` can be called again after this returns.
///
/// # Errors
/// `EAGAIN`: the stack is not back and the descriptor is non-blocking. `EINTR`: a signal. `EMFILE`: it cannot be made again.
pub(crate) fn make_again(fd: c_int) -> Result<(), Errno> {
    loop {
        exit_on_loss();
        match make(fd) {
            Ok(Made::There) => return Ok(()),
            Ok(Made::Later) => {}
            Err(error) => return Err(error),
        }
        if sys::fcntl(fd, libc::F_GETFL, 0)? & libc::O_NONBLOCK as usize != 0 {
            return Err(libc::EAGAIN);
        }
        sys::wait_for_signal(LOOK)?;
    }
}

/// Ends the program with `--on-loss exit`.
fn exit_on_loss() {
    if environment::exits_on_loss() {
        report::lost();
        sys::exit(1);
    }
}

/// Makes the listeners of a dead stack again before a fork.
pub(crate) fn before_fork() {
    if all().next().is_none() || link::is_alive() {
        return;
    }
    exit_on_loss();
    for kept in all() {
        let entry = Entry::from_word(kept.entry.load(Ordering::Relaxed));
        let fd = entry.and_then(|entry| table::all(table::DESCRIPTORS).find(|(_, other)| *other == entry));
        if let Some((fd, _)) = fd
            && !matches!(make(fd), Ok(Made::There))
        {
            return;
        }
    }
}

/// Tries to make a listener again.
fn make(fd: c_int) -> Result<Made, Errno> {
    let _signals = sys::Blocked::new();
    let _lock = link::listeners();
    let there = link::renew();
    let entry = table::get(fd).ok_or(libc::EBADF)?;
    if there.is_ok()
        && let Target::Session(session) = session::find(fd)
        && !session.is_cut_off()
    {
        // Another thread has done it.
        return Ok(Made::There);
    }
    let Some(kept) = find(entry) else {
        report::no_listener();
        sys::nap(20);
        return Err(libc::EMFILE);
    };
    // The new stack may have given the old name to another session.
    let entry = kept.rename().unwrap_or(entry);
    let made = match there {
        Ok(()) => decide::listen_again(kept.kernel.load(Ordering::Relaxed), entry.v6),
        Err((Step::Connect | Step::Welcome, error @ (libc::EACCES | libc::EPROTO))) => give_up(error),
        Err(_) => Err(libc::ENETDOWN),
    };
    match made {
        Ok((found, end)) => {
            let session =
                replace(fd, entry, end, Entry::session(Kind::Stream, entry.v6, found)).ok_or(libc::EIO)?;
            // SAFETY: a slot of the old stack's, whose memory stays mapped.
            if let Some(old) = unsafe { kept.slot.load(Ordering::Relaxed).as_ref() } {
                decide::inherit(&session, old);
            }
            kept.know(&session);
            Ok(Made::There)
        }
        Err(error @ (libc::EADDRINUSE | libc::EADDRNOTAVAIL | libc::EACCES | libc::EOPNOTSUPP)) => {
            give_up(error)
        }
        Err(_) => {
            wait_by_timer(fd, entry);
            Ok(Made::Later)
        }
    }
}

/// Ends a process that may not listen at the new stack. Its supervisor sees the exit code. The pause limits the rate of a
/// supervisor that restarts it at once.
fn give_up(error: Errno) -> ! {
    report::not_again(error);
    sys::sleep(1000);
    sys::exit(1)
}

/// Replaces all descriptors of a listener by `end`.
fn replace(fd: c_int, old: Entry, end: c_int, new: Entry) -> Option<Session> {
    let status = sys::fcntl(fd, libc::F_GETFL, 0).unwrap_or(0) & libc::O_NONBLOCK as usize;
    let _ = sys::fcntl(end, libc::F_SETFL, status);
    for (fd, _) in table::all(table::DESCRIPTORS).filter(|(_, other)| *other == old) {
        let cloexec = sys::fcntl(fd, libc::F_GETFD, 0).unwrap_or(0) as c_int & libc::FD_CLOEXEC;
        let flags = if cloexec != 0 { libc::O_CLOEXEC } else { 0 };
        polled::carry_over(fd, true, || {
            if sys::dup3(end, fd, flags).is_ok() {
                table::set(fd, Some(new));
            }
        });
    }
    let _ = sys::close(end);
    session::get(fd)
}

/// Replaces a listener's descriptors by a timer, or reads the timer.
fn wait_by_timer(fd: c_int, entry: Entry) {
    if sys::is_timer_taken(fd) {
        return;
    }
    if let Ok(timer) = sys::timer(LOOK) {
        replace(fd, entry, timer, entry);
    }
}

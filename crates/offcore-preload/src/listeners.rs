//! Listeners that outlive their stack.
//!
//! The library keeps the kernel socket of each listener, which stores the address, the options and the backlog. After
//! the stack's death, the first `accept` on a listener replaces its descriptor by a timer. The timer becomes readable
//! five times a second, so a program that polls calls `accept` again. Each of these calls looks for a stack at the same
//! path. A new stack gets the kernel socket, and the new listener replaces the timer.
//!
//! Each process that shares a listener creates its own. A process creates its listeners before it forks, so its
//! children share them.

use core::ffi::c_int;
use core::sync::atomic::Ordering;

use crate::address;
use crate::decide::{self, NewSession};
use crate::environment;
use crate::kernel_listeners::{self, KernelListener};
use crate::link;
use crate::polled;
use crate::report;
use crate::session::{self, Session, Target};
use crate::step::Step;
use crate::sys::{self, Errno};
use crate::table::{self, Entry, SocketKind};

/// Milliseconds between two attempts to reach a stack.
pub(crate) const LOOK: u64 = 200;

/// The result of an attempt.
enum Made {
    /// The new stack has the listener.
    There,
    /// No stack serves yet.
    Later,
}

/// Creates a listener again after its stack has died. The caller repeats `accept`.
///
/// # Errors
/// `EAGAIN` if no stack serves yet and the descriptor is non-blocking, `EINTR` after a signal, and `EMFILE` if the
/// kernel socket was not kept.
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

/// Ends the program if `--on-loss exit` was given.
pub(crate) fn exit_on_loss() {
    if environment::exits_on_loss() {
        report::report_exit();
        sys::exit(1);
    }
}

/// Creates the listeners of a dead stack again before a fork.
pub(crate) fn before_fork() {
    if kernel_listeners::all().next().is_none() || link::is_alive() {
        return;
    }
    exit_on_loss();
    for kept in kernel_listeners::all() {
        let fd =
            kept.entry().and_then(|entry| table::all(table::DESCRIPTORS).find(|(_, other)| *other == entry));
        if let Some((fd, _)) = fd
            && !matches!(make(fd), Ok(Made::There))
        {
            return;
        }
    }
}

/// Tries to create a listener again.
fn make(fd: c_int) -> Result<Made, Errno> {
    let _signals = sys::Blocked::new();
    let _lock = link::listeners();
    let there = link::renew();
    let entry = table::get(fd).ok_or(libc::EBADF)?;
    if there.is_ok()
        && let Target::Session(session) = session::find(fd)
        && !session.is_cut_off()
    {
        // Another thread has created it.
        return Ok(Made::There);
    }
    let Some(kept) = kernel_listeners::find(entry) else {
        report::no_listener();
        sys::poll_sleep(20);
        return Err(libc::EMFILE);
    };
    // The new stack may use the old name for another session.
    let entry = kept.replace_entry().unwrap_or(entry);
    let made = match there {
        Ok(()) => decide::listen_again(kept.kernel.load(Ordering::Relaxed), entry.v6),
        Err((Step::Connect | Step::Welcome, error @ (libc::EACCES | libc::EPROTO))) => {
            give_up(error, port_of(kept))
        }
        Err(_) => Err(libc::ENETDOWN),
    };
    match made {
        Ok(NewSession { place, fd: end }) => {
            let session = replace(fd, entry, end, Entry::session(SocketKind::Stream, entry.v6, place))
                .ok_or(libc::EIO)?;
            if let Some(old) = kept.slot() {
                decide::copy_options(&session, old);
            }
            kept.store_entry(session.entry, session.slot);
            Ok(Made::There)
        }
        Err(error @ (libc::EADDRINUSE | libc::EADDRNOTAVAIL | libc::EACCES | libc::EOPNOTSUPP)) => {
            give_up(error, port_of(kept))
        }
        Err(_) => {
            wait_by_timer(fd, entry);
            Ok(Made::Later)
        }
    }
}

/// Returns the port of a listener's kernel socket.
fn port_of(kept: &KernelListener) -> u16 {
    address::of_kernel(kept.kernel.load(Ordering::Relaxed)).map_or(0, |local| local.port())
}

/// Ends a process that may not have its address on the new stack. Its supervisor sees the exit code. The pause limits
/// the rate of a supervisor that restarts the process at once.
pub(crate) fn give_up(error: Errno, port: u16) -> ! {
    report::report_refused_listener(error, port);
    sys::sleep(1000);
    sys::exit(1)
}

/// Replaces all descriptors of a socket by `end`.
pub(crate) fn replace(fd: c_int, old: Entry, end: c_int, new: Entry) -> Option<Session> {
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

/// Replaces a socket's descriptors by a timer, or reads the timer.
pub(crate) fn wait_by_timer(fd: c_int, entry: Entry) {
    if sys::is_timer_taken(fd) {
        return;
    }
    if let Ok(timer) = sys::timer(LOOK) {
        replace(fd, entry, timer, entry);
    }
}

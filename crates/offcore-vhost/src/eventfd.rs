//! Eventfds that somebody else has, too: they are signalled and emptied without waiting for anybody.
//!
//! A write to an eventfd whose counter is full waits, unless a flag of the open file says otherwise; everybody who has the
//! file can change the flag, at any moment, and fill the counter. Eventfds know no write that asks not to wait for itself
//! (`RWF_NOWAIT`). What never waits is the kernel's own signal, which it gives when an asynchronous read is complete
//! (`IOCB_FLAG_RESFD`, io_submit(2)): so a read of nothing is submitted, which is complete at once.

use std::io::IoSliceMut;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;

use rustix::fs::MemfdFlags;
use rustix::io::{Errno, ReadWriteFlags};

/// Completions that are collected at a time.
const EVENTS: usize = 32;
/// How often completions are collected for one signal.
const TRIES: usize = 100;

/// The process's, for threads that are given none.
static SHARED: OnceLock<Signaller> = OnceLock::new();

thread_local! {
    /// A thread's own, from its first signal on.
    static OWN: Option<Signaller> = Signaller::new().ok();
}

/// Prepares the process for [`signal`].
///
/// # Errors
/// When the system gives no asynchronous reads: others use all that there are (`fs.aio-max-nr`), or a sandbox forbids it. There is no
/// other way to signal that does not wait.
pub fn prepare() -> std::io::Result<()> {
    if SHARED.get().is_none() {
        // Who comes second loses its own.
        let _ = SHARED.set(Signaller::new().map_err(std::io::Error::from)?);
    }
    Ok(())
}

/// Adds one to the counter of an eventfd, or nothing if it is full: it holds a signal then already. Errors are the doing
/// of whoever gave the descriptor, and have no consequences. The process is [prepared](prepare).
#[cold]
pub fn signal(event: BorrowedFd<'_>) {
    OWN.with(|own| {
        if let Some(signaller) = own.as_ref().or_else(|| SHARED.get()) {
            let _ = signaller.signal(event);
        }
    });
}

/// Empties an eventfd, which is empty most of the time.
#[cold]
pub(crate) fn empty(event: &OwnedFd) {
    let mut counter = [0u8; 8];
    let mut into = [IoSliceMut::new(&mut counter)];
    // An eventfd has no position, which is said by the largest one.
    if rustix::io::preadv2(event, &mut into, u64::MAX, ReadWriteFlags::NOWAIT) == Err(Errno::OPNOTSUPP) {
        // Linux before 5.8, where it waits if somebody else empties it at the same time and has made it block.
        let _ = rustix::io::read(event, &mut counter);
    }
}

/// A thread's asynchronous reads of nothing.
#[derive(Debug)]
struct Signaller {
    /// The kernel's `aio_context_t`.
    context: libc::c_ulong,
    nothing: OwnedFd,
}

/// `struct iocb` of linux/aio_abi.h, little-endian.
#[repr(C)]
#[derive(Debug, Default)]
struct Iocb {
    data: u64,
    key: u32,
    rw_flags: u32,
    opcode: u16,
    priority: i16,
    file: u32,
    buffer: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    event: u32,
}

const _: () = assert!(size_of::<Iocb>() == 64 && cfg!(target_endian = "little"), "linux/aio_abi.h");

/// `struct io_event`: whose fields nobody looks at.
type IoEvent = [u64; 4];

/// `IOCB_CMD_PREAD`.
const READ: u16 = 0;
/// `IOCB_FLAG_RESFD`.
const HAS_EVENT: u32 = 1;

impl Signaller {
    fn new() -> Result<Self, Errno> {
        let nothing = rustix::fs::memfd_create("offcore-nothing", MemfdFlags::CLOEXEC)?;
        let mut context: libc::c_ulong = 0;
        // SAFETY: io_setup(2) writes the context to where the pointer says, and nothing else.
        returned(unsafe { libc::syscall(libc::SYS_io_setup, EVENTS as libc::c_long, &raw mut context) })?;
        Ok(Self { context, nothing })
    }

    fn signal(&self, event: BorrowedFd<'_>) -> Result<(), Errno> {
        let number = |fd: BorrowedFd<'_>| fd.as_raw_fd().cast_unsigned();
        let mut read = Iocb {
            opcode: READ,
            file: number(self.nothing.as_fd()),
            flags: HAS_EVENT,
            event: number(event),
            ..Iocb::default()
        };
        match self.submit(&mut read) {
            // The completions of the last ones have not been collected. Threads that share it may fill it again.
            Err(Errno::AGAIN) => {
                let mut again = (0..TRIES).map(|_| self.collect().and_then(|()| self.submit(&mut read)));
                again.find(|outcome| *outcome != Err(Errno::AGAIN)).unwrap_or(Err(Errno::AGAIN))
            }
            outcome => outcome,
        }
    }

    fn submit(&self, read: &mut Iocb) -> Result<(), Errno> {
        let mut list = [&raw mut *read];
        // SAFETY: the list has one block, of which the kernel keeps a copy; a read of no bytes touches no memory.
        returned(unsafe {
            libc::syscall(libc::SYS_io_submit, self.context, 1 as libc::c_long, list.as_mut_ptr())
        })
    }

    fn collect(&self) -> Result<(), Errno> {
        let mut events = [IoEvent::default(); EVENTS];
        let (none, all) = (0 as libc::c_long, EVENTS as libc::c_long);
        let no_time = std::ptr::null_mut::<libc::timespec>();
        // SAFETY: there is room for as many events as are asked for; at least none is asked for, so it does not wait.
        returned(unsafe {
            libc::syscall(libc::SYS_io_getevents, self.context, none, all, events.as_mut_ptr(), no_time)
        })
    }
}

impl Drop for Signaller {
    fn drop(&mut self) {
        // SAFETY: the context is this thread's, which makes no more use of it.
        let _ = unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}

/// What a system call that failed says.
fn returned(value: libc::c_long) -> Result<(), Errno> {
    match value {
        -1 => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};

    fn counter(event: &OwnedFd) -> u64 {
        let mut counter = [0; 8];
        rustix::io::read(event, &mut counter).unwrap();
        u64::from_ne_bytes(counter)
    }

    #[test]
    fn signals_are_counted_and_taken_back() {
        let event = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        // More than there is room for completions.
        for _ in 0..10_000 {
            signal(event.as_fd());
        }
        assert_eq!(counter(&event), 10_000);
        signal(event.as_fd());
        empty(&event);
        empty(&event);
        assert_eq!(rustix::io::read(&event, &mut [0; 8]), Err(Errno::AGAIN));
    }

    #[test]
    fn threads_share_what_the_process_has() {
        prepare().unwrap();
        prepare().unwrap();
        let signaller = SHARED.get().unwrap();
        let event = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..10_000).for_each(|_| signaller.signal(event.as_fd()).unwrap()));
            }
        });
        assert_eq!(counter(&event), 40_000);
    }

    /// On a thread of its own, so that a signal that waits is a failure and not the end of the tests.
    #[test]
    fn full_eventfd_is_not_waited_for() {
        let event = std::sync::Arc::new(eventfd(0, EventfdFlags::empty()).unwrap());
        rustix::io::write(&*event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        let (done, wait) = std::sync::mpsc::channel();
        let shared = std::sync::Arc::clone(&event);
        let signals = std::thread::spawn(move || {
            for _ in 0..1000 {
                signal(shared.as_fd());
            }
            empty(&shared);
            empty(&shared);
            done.send(()).unwrap();
        });
        wait.recv_timeout(std::time::Duration::from_secs(10)).expect("a signal waits");
        signals.join().unwrap();
    }
}

//! Signalling and clearing of eventfds that are shared with other processes. Neither ever blocks.
//!
//! A write to an eventfd blocks if the counter is full, unless the open file is non-blocking. Every process that shares
//! the file can change that flag and fill the counter at any time, and eventfds do not support `RWF_NOWAIT` for writes.
//! The kernel's own signal never blocks. The kernel sends it when an asynchronous read completes (`IOCB_FLAG_RESFD`,
//! io_submit(2)). To send a signal, this module submits a read of zero bytes, which completes at once.

use std::io::IoSliceMut;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;

use rustix::fs::MemfdFlags;
use rustix::io::{Errno, ReadWriteFlags};

/// Maximum number of completions collected per call.
const EVENTS: usize = 32;
/// Maximum number of attempts to collect completions for one signal.
const TRIES: usize = 100;

/// The signaller of the process, for threads that could not create one.
static SHARED: OnceLock<Signaller> = OnceLock::new();

thread_local! {
    /// The signaller of a thread, created at its first signal.
    static OWN: Option<Signaller> = Signaller::new().ok();
}

/// Prepares the process for [`signal`].
///
/// # Errors
/// Fails if the system provides no asynchronous I/O: other processes use up the limit (`fs.aio-max-nr`), or a sandbox
/// forbids it. No other way to signal without blocking exists.
pub fn prepare() -> std::io::Result<()> {
    if SHARED.get().is_none() {
        // If another thread was faster, the new signaller is dropped.
        let _ = SHARED.set(Signaller::new().map_err(std::io::Error::from)?);
    }
    Ok(())
}

/// Adds one to the counter of an eventfd. A full counter is left unchanged, because it already holds a signal. Errors
/// are caused by the process that passed the descriptor, and are ignored. Call [`prepare`] first.
#[cold]
pub fn signal(event: BorrowedFd<'_>) {
    OWN.with(|own| {
        if let Some(signaller) = own.as_ref().or_else(|| SHARED.get()) {
            let _ = signaller.signal(event);
        }
    });
}

/// Clears an eventfd, which is already clear in most cases.
#[cold]
pub(crate) fn empty(event: &OwnedFd) {
    let mut counter = [0u8; 8];
    let mut into = [IoSliceMut::new(&mut counter)];
    // An eventfd has no position. The offset -1 stands for the current position.
    if rustix::io::preadv2(event, &mut into, u64::MAX, ReadWriteFlags::NOWAIT) == Err(Errno::OPNOTSUPP) {
        // Linux before 5.8. This read blocks if the peer has made the file blocking and clears it at the same time.
        let _ = rustix::io::read(event, &mut counter);
    }
}

/// An asynchronous I/O context that submits reads of zero bytes.
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

/// `struct io_event`. Its fields are not used.
type IoEvent = [u64; 4];

/// `IOCB_CMD_PREAD`.
const READ: u16 = 0;
/// `IOCB_FLAG_RESFD`.
const HAS_EVENT: u32 = 1;

impl Signaller {
    fn new() -> Result<Self, Errno> {
        let nothing = rustix::fs::memfd_create("offcore-nothing", MemfdFlags::CLOEXEC)?;
        let mut context: libc::c_ulong = 0;
        // SAFETY: io_setup(2) writes only the context, to a valid pointer.
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
            // The completions of earlier signals have not been collected. Threads that share the context may fill it
            // again.
            Err(Errno::AGAIN) => {
                let mut again = (0..TRIES).map(|_| self.collect().and_then(|()| self.submit(&mut read)));
                again.find(|outcome| *outcome != Err(Errno::AGAIN)).unwrap_or(Err(Errno::AGAIN))
            }
            outcome => outcome,
        }
    }

    fn submit(&self, read: &mut Iocb) -> Result<(), Errno> {
        let mut list = [&raw mut *read];
        // SAFETY: the list has one block, which the kernel copies. A read of zero bytes accesses no memory.
        returned(unsafe {
            libc::syscall(libc::SYS_io_submit, self.context, 1 as libc::c_long, list.as_mut_ptr())
        })
    }

    fn collect(&self) -> Result<(), Errno> {
        let mut events = [IoEvent::default(); EVENTS];
        let (none, all) = (0 as libc::c_long, EVENTS as libc::c_long);
        let no_time = std::ptr::null_mut::<libc::timespec>();
        // SAFETY: the array has room for the maximum number of events. The minimum is 0, so the call does not wait.
        returned(unsafe {
            libc::syscall(libc::SYS_io_getevents, self.context, none, all, events.as_mut_ptr(), no_time)
        })
    }
}

impl Drop for Signaller {
    fn drop(&mut self) {
        // SAFETY: the context belongs to this value and is not used afterwards.
        let _ = unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}

/// Converts the result of a system call.
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
    fn eventfd_signals_are_counted_and_cleared() {
        let event = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        // More signals than the context has room for completions.
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
    fn threads_share_one_signaller() {
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

    /// Runs in a separate thread, so that a blocking call makes the test fail instead of hanging it.
    #[test]
    fn full_eventfd_does_not_block() {
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

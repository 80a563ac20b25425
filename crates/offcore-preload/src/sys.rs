//! System calls of the library's own, and `errno`.
//!
//! They do not go through libc: its functions are the ones that this library replaces, and may be replaced by others.

use core::arch::asm;
use core::ffi::c_int;
use core::ptr;
use core::sync::atomic::{AtomicBool, Ordering};

use libc::{c_long, c_void, iovec, msghdr};
use offcore_session::wake::ALARM;

/// An `errno`.
pub(crate) type Errno = c_int;

/// A system call; a negative result is a negated `errno`.
///
/// # Safety
/// What the call does with the arguments.
#[inline]
pub(crate) unsafe fn call(number: c_long, args: [usize; 6]) -> isize {
    let result: isize;
    // SAFETY: the kernel's calling convention; the rest is the caller's promise.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number as isize => result,
            in("rdi") args[0],
            in("rsi") args[1],
            in("rdx") args[2],
            in("r10") args[3],
            in("r8") args[4],
            in("r9") args[5],
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack)
        );
    }
    result
}

/// What a system call returned.
pub(crate) fn result(value: isize) -> Result<usize, Errno> {
    if value < 0 { Err(-value as Errno) } else { Ok(value as usize) }
}

/// Calls that take numbers only, or nothing that could break memory.
fn numbers(number: c_long, args: [usize; 6]) -> Result<usize, Errno> {
    // SAFETY: callers pass no addresses.
    result(unsafe { call(number, args) })
}

/// Sets `errno`.
pub(crate) fn set_errno(errno: Errno) {
    // SAFETY: the address of this thread's `errno`.
    unsafe { *libc::__errno_location() = errno }
}

/// `errno`.
pub(crate) fn errno() -> Errno {
    // SAFETY: the address of this thread's `errno`.
    unsafe { *libc::__errno_location() }
}

/// What a function of libc returned.
pub(crate) fn of_libc(value: isize) -> Result<usize, Errno> {
    if value < 0 { Err(errno()) } else { Ok(value as usize) }
}

/// What a function of libc returns: -1 and `errno` for an error.
pub(crate) fn returned(result: Result<usize, Errno>) -> isize {
    match result {
        Ok(value) => value as isize,
        Err(errno) => {
            set_errno(errno);
            -1
        }
    }
}

/// The same as an `int`.
pub(crate) fn returned_int(result: Result<usize, Errno>) -> c_int {
    returned(result) as c_int
}

pub(crate) fn close(fd: c_int) -> Result<usize, Errno> {
    numbers(libc::SYS_close, [fd as usize, 0, 0, 0, 0, 0])
}

pub(crate) fn dup3(from: c_int, to: c_int, flags: c_int) -> Result<usize, Errno> {
    numbers(libc::SYS_dup3, [from as usize, to as usize, flags as usize, 0, 0, 0])
}

/// `fcntl` with a number for an argument.
pub(crate) fn fcntl(fd: c_int, command: c_int, argument: usize) -> Result<usize, Errno> {
    numbers(libc::SYS_fcntl, [fd as usize, command as usize, argument, 0, 0, 0])
}

pub(crate) fn shutdown(fd: c_int, how: c_int) -> Result<usize, Errno> {
    numbers(libc::SYS_shutdown, [fd as usize, how as usize, 0, 0, 0, 0])
}

pub(crate) fn pid() -> u32 {
    numbers(libc::SYS_getpid, [0; 6]).unwrap_or(0) as u32
}

/// A number of this thread that no other thread of the process has, made from where its thread-local memory is. It costs no
/// system call.
#[inline]
pub(crate) fn thread() -> u32 {
    let at: u64;
    // SAFETY: the first word of a thread's memory is its own address, by the System V ABI of x86-64.
    unsafe { asm!("mov {}, fs:0", out(reg) at, options(nostack, readonly, preserves_flags)) };
    // It is aligned to 64 bytes. What two threads have in common after this lies 256 GiB apart.
    let at = at >> 6;
    (at ^ at >> 32) as u32
}

/// Sends this thread a signal.
pub(crate) fn raise(signal: c_int) {
    let thread = numbers(libc::SYS_gettid, [0; 6]).unwrap_or(0);
    let _ = numbers(libc::SYS_tgkill, [pid() as usize, thread, signal as usize, 0, 0, 0]);
}

/// This process has put itself into a sandbox that ends it for system calls that are not usual. `read` and `write` are.
static SANDBOXED: AtomicBool = AtomicBool::new(false);

/// System calls are filtered from now on.
pub(crate) fn begin_sandbox() {
    SANDBOXED.store(true, Ordering::Relaxed);
}

#[inline]
pub(crate) fn is_sandboxed() -> bool {
    SANDBOXED.load(Ordering::Relaxed)
}

/// Sends one byte of no meaning, without waiting; in a sandbox that takes a descriptor that does not wait.
pub(crate) fn send_byte(fd: c_int) -> Result<usize, Errno> {
    let byte = [0u8];
    if is_sandboxed() {
        // SAFETY: one byte that lives until the call returns.
        return result(unsafe { call(libc::SYS_write, [fd as usize, byte.as_ptr() as usize, 1, 0, 0, 0]) });
    }
    let flags = (libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) as usize;
    // SAFETY: one byte that lives until the call returns.
    result(unsafe { call(libc::SYS_sendto, [fd as usize, byte.as_ptr() as usize, 1, flags, 0, 0]) })
}

/// Takes bytes of a pair, up to `most` and 64. Returns their number, and whether an alarm is among them. `EAGAIN` without bytes.
pub(crate) fn take_bytes(fd: c_int, most: usize) -> Result<(usize, bool), Errno> {
    let mut bytes = [0u8; 64];
    let room = most.min(bytes.len());
    let (to, flags) = (bytes.as_mut_ptr() as usize, libc::MSG_DONTWAIT as usize);
    let (number, flags) = if is_sandboxed() { (libc::SYS_read, 0) } else { (libc::SYS_recvfrom, flags) };
    // SAFETY: room for so many bytes, which lives until the call returns.
    let taken = result(unsafe { call(number, [fd as usize, to, room, flags, 0, 0]) })?;
    Ok((taken, bytes[..taken].contains(&ALARM)))
}

/// Writes to an event.
pub(crate) fn wake(event: c_int) {
    let one = 1u64.to_ne_bytes();
    // SAFETY: eight bytes that live until the call returns.
    unsafe { call(libc::SYS_write, [event as usize, one.as_ptr() as usize, one.len(), 0, 0, 0]) };
}

/// # Safety
/// The header's addresses are of memory that the kernel may read.
pub(crate) unsafe fn sendmsg(fd: c_int, header: &msghdr, flags: c_int) -> Result<usize, Errno> {
    let args = [fd as usize, ptr::from_ref(header) as usize, flags as usize, 0, 0, 0];
    // SAFETY: the caller's promise.
    result(unsafe { call(libc::SYS_sendmsg, args) })
}

/// # Safety
/// The header's addresses are of memory that the kernel may write.
pub(crate) unsafe fn recvmsg(fd: c_int, header: &mut msghdr, flags: c_int) -> Result<usize, Errno> {
    let args = [fd as usize, ptr::from_mut(header) as usize, flags as usize, 0, 0, 0];
    // SAFETY: the caller's promise.
    result(unsafe { call(libc::SYS_recvmsg, args) })
}

/// Reads from a file to shared memory, from `position` on, or (-1) from where the file is.
///
/// # Safety
/// `to` is memory that the kernel may write.
pub(crate) unsafe fn read_at(fd: c_int, to: iovec, position: i64) -> Result<usize, Errno> {
    let args = [fd as usize, to.iov_base as usize, to.iov_len, position as usize, 0, 0];
    let number = if position < 0 { libc::SYS_read } else { libc::SYS_pread64 };
    // SAFETY: the caller's promise.
    result(unsafe { call(number, args) })
}

/// Writes to a writable pipe as many bytes as fit, without waiting; `EAGAIN` if none fit.
///
/// # Safety
/// `from` is memory that the kernel may read.
pub(crate) unsafe fn write_at_once(pipe: c_int, from: iovec) -> Result<usize, Errno> {
    let (fd, nowhere) = (pipe as usize, -1isize as usize);
    let args = [fd, &raw const from as usize, 1, nowhere, nowhere, libc::RWF_NOWAIT as usize];
    // SAFETY: the caller's promise.
    match result(unsafe { call(libc::SYS_pwritev2, args) }) {
        // Linux before 6.4 has this flag for files only. A writable pipe has room for a page.
        Err(libc::EOPNOTSUPP) => {
            let args = [fd, from.iov_base as usize, from.iov_len.min(libc::PIPE_BUF), 0, 0, 0];
            // SAFETY: the caller's promise.
            result(unsafe { call(libc::SYS_write, args) })
        }
        written => written,
    }
}

/// # Safety
/// `value` is of `len` bytes that the kernel may read.
pub(crate) unsafe fn setsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: usize,
) -> Result<usize, Errno> {
    // SAFETY: the caller's promise.
    result(unsafe {
        call(libc::SYS_setsockopt, [fd as usize, level as usize, name as usize, value as usize, len, 0])
    })
}

/// An option of a socket; `None` when there is no such one, or when it is not as long.
pub(crate) fn socket_option<T: Copy>(fd: c_int, level: c_int, name: c_int, zero: T) -> Option<T> {
    let (mut value, mut len) = (zero, size_of::<T>() as libc::socklen_t);
    let (value_at, len_at) = (&raw mut value as usize, &raw mut len as usize);
    // SAFETY: both live until the call returns; `T` is a plain structure of the kernel's, whose bytes it fills.
    let done = unsafe {
        call(libc::SYS_getsockopt, [fd as usize, level as usize, name as usize, value_at, len_at, 0])
    };
    (done == 0 && len as usize == size_of::<T>()).then_some(value)
}

/// An option that is an `int`; 0 when there is no such one.
pub(crate) fn int_option(fd: c_int, level: c_int, name: c_int) -> c_int {
    socket_option(fd, level, name, 0).unwrap_or(0)
}

/// Sets an option that is an `int`.
pub(crate) fn set_int_option(fd: c_int, level: c_int, name: c_int, value: c_int) -> Result<usize, Errno> {
    // SAFETY: a number that lives until the call returns.
    unsafe { setsockopt(fd, level, name, (&raw const value).cast(), size_of::<c_int>()) }
}

/// Creates a kernel socket.
pub(crate) fn socket(family: c_int, kind: c_int) -> Result<c_int, Errno> {
    numbers(libc::SYS_socket, [family as usize, kind as usize, 0, 0, 0, 0]).map(|fd| fd as c_int)
}

/// `CLOCK_MONOTONIC` in nanoseconds.
pub(crate) fn now() -> i128 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let args = [libc::CLOCK_MONOTONIC as usize, &raw mut time as usize, 0, 0, 0, 0];
    // SAFETY: a time that lives until the call returns.
    unsafe { call(libc::SYS_clock_gettime, args) };
    i128::from(time.tv_sec) * 1_000_000_000 + i128::from(time.tv_nsec)
}

/// Yields the core to other threads.
pub(crate) fn yield_now() {
    // SAFETY: it has no arguments.
    unsafe { call(libc::SYS_sched_yield, [0; 6]) };
}

/// Waits for so many milliseconds.
pub(crate) fn sleep(milliseconds: u64) {
    let time = libc::timespec {
        tv_sec: (milliseconds / 1000) as i64,
        tv_nsec: (milliseconds % 1000 * 1_000_000) as i64,
    };
    // SAFETY: a time that lives until the call returns.
    unsafe { call(libc::SYS_nanosleep, [&raw const time as usize, 0, 0, 0, 0, 0]) };
}

/// `FUTEX_WAIT`, for as long as the word is `value`, and a hundredth of a second.
pub(crate) fn futex_wait(word: *const u32, value: u32) {
    let time = libc::timespec { tv_sec: 0, tv_nsec: 10_000_000 };
    let args = [word as usize, libc::FUTEX_WAIT as usize, value as usize, &raw const time as usize, 0, 0];
    // SAFETY: the kernel checks the address; the time lives until the call returns.
    unsafe { call(libc::SYS_futex, args) };
}

/// `FUTEX_WAKE` of one.
pub(crate) fn futex_wake(word: *const u32) {
    // SAFETY: the kernel checks the address.
    unsafe { call(libc::SYS_futex, [word as usize, libc::FUTEX_WAKE as usize, 1, 0, 0, 0]) };
}

/// Maps `len` bytes: shared ones of `fd`, or private ones of nobody's where that is -1.
pub(crate) fn map(fd: c_int, len: usize, writable: bool) -> Result<*mut u8, Errno> {
    let protection = libc::PROT_READ | if writable { libc::PROT_WRITE } else { 0 };
    let flags =
        if fd < 0 { libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE } else { libc::MAP_SHARED };
    let args = [0, len, protection as usize, flags as usize, fd as usize, 0];
    // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
    result(unsafe { call(libc::SYS_mmap, args) }).map(|address| address as *mut u8)
}

/// Enlarges a mapping of the library. It may move.
pub(crate) fn remap(address: *mut u8, old: usize, new: usize) -> Result<*mut u8, Errno> {
    let args = [address as usize, old, new, libc::MREMAP_MAYMOVE as usize, 0, 0];
    // SAFETY: the caller has mapped it, and nothing refers to it meanwhile.
    result(unsafe { call(libc::SYS_mremap, args) }).map(|address| address as *mut u8)
}

/// Has the pages at `address` be zero in forked children.
pub(crate) fn wipe_on_fork(address: *mut u8, len: usize) -> Result<usize, Errno> {
    // SAFETY: it concerns children only; the caller has mapped the range for this.
    result(unsafe {
        call(libc::SYS_madvise, [address as usize, len, libc::MADV_WIPEONFORK as usize, 0, 0, 0])
    })
}

/// Length of a file in bytes.
pub(crate) fn file_len(fd: c_int) -> Option<usize> {
    stat(fd).map(|stat| stat.st_size as usize)
}

/// Device and inode of a file.
pub(crate) fn file_id(fd: c_int) -> Option<(u64, u64)> {
    stat(fd).map(|stat| (stat.st_dev, stat.st_ino))
}

fn stat(fd: c_int) -> Option<libc::stat> {
    // SAFETY: a structure of numbers.
    let mut stat: libc::stat = unsafe { core::mem::zeroed() };
    // SAFETY: it lives until the call returns.
    let done = unsafe { call(libc::SYS_fstat, [fd as usize, &raw mut stat as usize, 0, 0, 0, 0]) };
    (done == 0).then_some(stat)
}

/// Waits until a descriptor can be written to, or has ended, with signals as they were before they were blocked (without
/// `signals` as they are): `EINTR` when one comes or has come, `EAGAIN` when the time is up.
pub(crate) fn wait_for_room(
    fd: c_int,
    signals: Option<&Blocked>,
    time: Option<libc::timespec>,
) -> Result<(), Errno> {
    let mut poll = libc::pollfd { fd, events: libc::POLLOUT, revents: 0 };
    let time = time.as_ref().map_or(0, |time| ptr::from_ref(time) as usize);
    let mask = signals.map_or(0, |signals| &raw const signals.0 as usize);
    let args = [&raw mut poll as usize, 1, time, mask, size_of::<u64>(), 0];
    // SAFETY: one entry, a time and a mask that live until the call returns.
    match result(unsafe { call(libc::SYS_ppoll, args) })? {
        0 => Err(libc::EAGAIN),
        _ => Ok(()),
    }
}

/// Blocks all signals of this thread until it is dropped.
pub(crate) struct Blocked(u64);

impl Blocked {
    pub(crate) fn new() -> Self {
        let (all, mut before) = (u64::MAX, 0u64);
        let args = [libc::SIG_BLOCK as usize, &raw const all as usize, &raw mut before as usize, 8, 0, 0];
        // SAFETY: both masks live until the call returns.
        unsafe { call(libc::SYS_rt_sigprocmask, args) };
        Self(before)
    }
}

impl Blocked {
    /// Whether a signal has come meanwhile that interrupts calls (`signal(7)`): one with a handler, without `SA_RESTART`.
    pub(crate) fn is_interrupted(&self) -> bool {
        /// The kernel's `struct sigaction`.
        #[repr(C)]
        struct Action {
            handler: usize,
            flags: u64,
            restorer: usize,
            mask: u64,
        }
        let mut pending = 0u64;
        // SAFETY: a mask that lives until the call returns.
        unsafe { call(libc::SYS_rt_sigpending, [&raw mut pending as usize, 8, 0, 0, 0, 0]) };
        let mut pending = pending & !self.0;
        while pending != 0 {
            let signal = pending.trailing_zeros() as usize + 1;
            pending &= pending - 1;
            let mut action = Action { handler: 0, flags: 0, restorer: 0, mask: 0 };
            let args = [signal, 0, &raw mut action as usize, 8, 0, 0];
            // SAFETY: an action that lives until the call returns.
            unsafe { call(libc::SYS_rt_sigaction, args) };
            if ![libc::SIG_DFL, libc::SIG_IGN].contains(&action.handler)
                && action.flags & libc::SA_RESTART as u64 == 0
            {
                return true;
            }
        }
        false
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        set_mask(self.0);
    }
}

/// Sets this thread's signal mask.
pub(crate) fn set_mask(mask: u64) {
    let args = [libc::SIG_SETMASK as usize, &raw const mask as usize, 0, 8, 0, 0];
    // SAFETY: the mask lives until the call returns.
    unsafe { call(libc::SYS_rt_sigprocmask, args) };
}

/// Unblocks a signal of this thread. Returns the previous mask.
pub(crate) fn unblock(signal: c_int) -> Result<u64, Errno> {
    let (this, mut before) = (1u64 << (signal - 1), 0u64);
    let args = [libc::SIG_UNBLOCK as usize, &raw const this as usize, &raw mut before as usize, 8, 0, 0];
    // SAFETY: both masks live until the call returns.
    result(unsafe { call(libc::SYS_rt_sigprocmask, args) }).map(|_| before)
}

/// Address and length of this library's text segment.
pub(crate) fn text() -> (usize, usize) {
    /// `Elf64_Phdr`.
    #[repr(C)]
    #[derive(Clone, Copy)]
    struct Segment {
        kind: u32,
        flags: u32,
        offset: u64,
        address: u64,
        physical: u64,
        file_len: u64,
        len: u64,
        align: u64,
    }
    unsafe extern "C" {
        /// The ELF header of this library.
        #[link_name = "__ehdr_start"]
        static HEADER: libc::Elf64_Ehdr;
    }
    let header = &raw const HEADER;
    // SAFETY: the header, and the table of segments that it names, which are loaded with the rest.
    let segments = unsafe {
        let first = header.cast::<u8>().add((*header).e_phoff as usize).cast::<Segment>();
        core::slice::from_raw_parts(first, (*header).e_phnum.into())
    };
    let is_text = |segment: &&Segment| segment.kind == libc::PT_LOAD && segment.flags & libc::PF_X != 0;
    let text = segments.iter().find(is_text);
    text.map_or((0, 0), |text| (header as usize + text.address as usize, text.len as usize))
}

/// Gives a mapping of the library's own back.
pub(crate) fn unmap(address: *mut u8, len: usize) {
    // SAFETY: the caller has mapped it, and nobody uses it any more.
    unsafe { call(libc::SYS_munmap, [address as usize, len, 0, 0, 0, 0]) };
}

/// Writes up to eight parts in one call.
pub(crate) fn write_parts(fd: c_int, parts: &[&[u8]]) {
    let mut list = [iovec { iov_base: ptr::null_mut(), iov_len: 0 }; 8];
    for (to, part) in list.iter_mut().zip(parts) {
        *to = iovec { iov_base: part.as_ptr().cast_mut().cast(), iov_len: part.len() };
    }
    // SAFETY: bytes that live until the call returns.
    unsafe { call(libc::SYS_writev, [fd as usize, list.as_ptr() as usize, parts.len().min(8), 0, 0, 0]) };
}

/// Whether a descriptor is a pipe.
pub(crate) fn is_pipe(fd: c_int) -> bool {
    stat(fd).is_some_and(|stat| stat.st_mode & libc::S_IFMT == libc::S_IFIFO)
}

/// Waits until a descriptor is readable (`POLLIN`), writable (`POLLOUT`) or hung up; `EAGAIN` without `wait`.
pub(crate) fn wait_for(fd: c_int, events: i16, wait: bool) -> Result<(), Errno> {
    let mut poll = libc::pollfd { fd, events, revents: 0 };
    let time = if wait { -1isize as usize } else { 0 };
    // SAFETY: one entry that lives until the call returns.
    match result(unsafe { call(libc::SYS_poll, [&raw mut poll as usize, 1, time, 0, 0, 0]) })? {
        0 => Err(libc::EAGAIN),
        _ => Ok(()),
    }
}

/// Whether a descriptor can be written to at once, and has a reader.
pub(crate) fn has_room(fd: c_int) -> bool {
    let mut poll = libc::pollfd { fd, events: libc::POLLOUT, revents: 0 };
    // SAFETY: one entry that lives until the call returns.
    let ready = unsafe { call(libc::SYS_poll, [&raw mut poll as usize, 1, 0, 0, 0, 0]) };
    ready == 1 && poll.revents == libc::POLLOUT
}

/// Waits for some milliseconds.
pub(crate) fn nap(milliseconds: usize) {
    // SAFETY: it has no entries.
    unsafe { call(libc::SYS_poll, [0, 0, milliseconds, 0, 0, 0]) };
}

/// `FIONREAD`: how many bytes can be read.
pub(crate) fn readable(fd: c_int) -> Result<usize, Errno> {
    let mut bytes: c_int = 0;
    let args = [fd as usize, libc::FIONREAD as usize, ptr::from_mut(&mut bytes) as usize, 0, 0, 0];
    // SAFETY: a number that lives until the call returns.
    result(unsafe { call(libc::SYS_ioctl, args) })?;
    Ok(usize::try_from(bytes).unwrap_or(0))
}

/// Calls `each` with every descriptor of this process.
pub(crate) fn each_descriptor(mut each: impl FnMut(c_int)) {
    let path = c"/proc/self/fd";
    let flags = (libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC) as usize;
    let args = [libc::AT_FDCWD as usize, path.as_ptr() as usize, flags, 0, 0, 0];
    // SAFETY: a path that lives until the call returns.
    let Ok(directory) = result(unsafe { call(libc::SYS_openat, args) }) else { return };
    let mut entries = [0u8; 4096];
    loop {
        let args = [directory, entries.as_mut_ptr() as usize, entries.len(), 0, 0, 0];
        // SAFETY: room for entries, which lives until the call returns.
        let Ok(len @ 1..) = result(unsafe { call(libc::SYS_getdents64, args) }) else { break };
        let mut rest = &entries[..len];
        // An entry: inode and position of 8 bytes, its length of 2, a kind, and a name that ends with a null.
        while let Some(&[l0, l1]) = rest.get(16..18) {
            let this = usize::from(u16::from_ne_bytes([l0, l1]));
            let name = rest.get(19..this).and_then(|name| core::ffi::CStr::from_bytes_until_nul(name).ok());
            let number = name.and_then(|name| name.to_str().ok()).and_then(|name| name.parse().ok());
            if let Some(fd) = number.filter(|fd| *fd as usize != directory) {
                each(fd);
            }
            rest = rest.get(this.max(19)..).unwrap_or_default();
        }
    }
    let _ = close(directory as c_int);
}

/// Sleeps until the time is over or a signal arrives.
///
/// # Errors
/// `EINTR`: a signal with a handler has arrived.
pub(crate) fn wait_for_signal(milliseconds: u64) -> Result<(), Errno> {
    // SAFETY: it has no entries.
    result(unsafe { call(libc::SYS_poll, [0, 0, milliseconds as usize, 0, 0, 0]) }).map(drop)
}

/// A periodic, non-blocking timer.
pub(crate) fn timer(milliseconds: u64) -> Result<c_int, Errno> {
    let flags = libc::TFD_CLOEXEC | libc::TFD_NONBLOCK;
    let timer =
        numbers(libc::SYS_timerfd_create, [libc::CLOCK_MONOTONIC as usize, flags as usize, 0, 0, 0, 0])?;
    let time = libc::timespec { tv_sec: 0, tv_nsec: milliseconds as i64 * 1_000_000 };
    let times = libc::itimerspec { it_interval: time, it_value: time };
    // SAFETY: times that live until the call returns.
    let set =
        result(unsafe { call(libc::SYS_timerfd_settime, [timer, 0, &raw const times as usize, 0, 0, 0]) });
    set.map(|_| timer as c_int).inspect_err(|_| {
        let _ = close(timer as c_int);
    })
}

/// Whether a descriptor is a timer. Reads an expired one.
pub(crate) fn is_timer_taken(fd: c_int) -> bool {
    let mut times = libc::itimerspec {
        it_interval: libc::timespec { tv_sec: 0, tv_nsec: 0 },
        it_value: libc::timespec { tv_sec: 0, tv_nsec: 0 },
    };
    // SAFETY: times that live until the call returns.
    let is =
        unsafe { call(libc::SYS_timerfd_gettime, [fd as usize, &raw mut times as usize, 0, 0, 0, 0]) } == 0;
    let mut expired = 0u64;
    if is && has_input(fd) {
        // SAFETY: eight bytes that live until the call returns.
        unsafe { call(libc::SYS_read, [fd as usize, &raw mut expired as usize, size_of::<u64>(), 0, 0, 0]) };
    }
    is
}

/// Whether a descriptor can be read.
fn has_input(fd: c_int) -> bool {
    wait_for(fd, libc::POLLIN, false).is_ok()
}

/// Ends the process, all its threads included.
pub(crate) fn exit(code: c_int) -> ! {
    loop {
        let _ = numbers(libc::SYS_exit_group, [code as usize, 0, 0, 0, 0, 0]);
    }
}

/// Whether a socket's peer has closed.
pub(crate) fn has_hung_up(fd: c_int) -> bool {
    let mut poll = libc::pollfd { fd, events: 0, revents: 0 };
    // SAFETY: one entry that lives until the call returns.
    let ready = unsafe { call(libc::SYS_poll, [&raw mut poll as usize, 1, 0, 0, 0, 0]) };
    ready == 1 && poll.revents & (libc::POLLHUP | libc::POLLERR | libc::POLLNVAL) != 0
}

//! Direct system calls, and `errno`.
//!
//! System calls do not use libc's functions, because this library replaces these functions, and other libraries may
//! replace them, too.

use core::arch::asm;
use core::ffi::c_int;
use core::ptr;
use core::sync::atomic::{AtomicBool, Ordering};

use libc::{c_long, c_void, iovec, msghdr};
use offcore_session::wake::ALARM;

/// An error number.
pub(crate) type Errno = c_int;

/// Makes a system call. A negative result is a negated `errno`.
///
/// # Safety
/// The arguments are valid for the system call.
#[inline]
pub(crate) unsafe fn call(number: c_long, args: [usize; 6]) -> isize {
    let result: isize;
    // SAFETY: the kernel's calling convention; the caller guarantees addresses in `args` that suit call `number`.
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

/// Converts the result of a system call.
pub(crate) fn result(value: isize) -> Result<usize, Errno> {
    if value < 0 { Err(-value as Errno) } else { Ok(value as usize) }
}

/// Makes a system call without addresses as arguments.
fn plain_call(number: c_long, args: [usize; 6]) -> Result<usize, Errno> {
    // SAFETY: callers pass only calls whose arguments are numbers, so the kernel accesses no memory.
    result(unsafe { call(number, args) })
}

/// Sets `errno`.
pub(crate) fn set_errno(errno: Errno) {
    // SAFETY: libc returns the address of this thread's `errno`.
    unsafe { *libc::__errno_location() = errno }
}

/// Returns `errno`.
pub(crate) fn errno() -> Errno {
    // SAFETY: libc returns the address of this thread's `errno`.
    unsafe { *libc::__errno_location() }
}

/// Converts the return value of a libc function.
pub(crate) fn of_libc(value: isize) -> Result<usize, Errno> {
    if value < 0 { Err(errno()) } else { Ok(value as usize) }
}

/// Converts a result to the return value of a libc function: -1 and `errno` for an error.
pub(crate) fn returned(result: Result<usize, Errno>) -> isize {
    match result {
        Ok(value) => value as isize,
        Err(errno) => {
            set_errno(errno);
            -1
        }
    }
}

/// Does the same for an `int`.
pub(crate) fn returned_int(result: Result<usize, Errno>) -> c_int {
    returned(result) as c_int
}

pub(crate) fn close(fd: c_int) -> Result<usize, Errno> {
    plain_call(libc::SYS_close, [fd as usize, 0, 0, 0, 0, 0])
}

pub(crate) fn dup3(from: c_int, to: c_int, flags: c_int) -> Result<usize, Errno> {
    plain_call(libc::SYS_dup3, [from as usize, to as usize, flags as usize, 0, 0, 0])
}

/// Calls `fcntl` with a number as its argument.
pub(crate) fn fcntl(fd: c_int, command: c_int, argument: usize) -> Result<usize, Errno> {
    plain_call(libc::SYS_fcntl, [fd as usize, command as usize, argument, 0, 0, 0])
}

pub(crate) fn shutdown(fd: c_int, how: c_int) -> Result<usize, Errno> {
    plain_call(libc::SYS_shutdown, [fd as usize, how as usize, 0, 0, 0, 0])
}

pub(crate) fn pid() -> u32 {
    plain_call(libc::SYS_getpid, [0; 6]).unwrap_or(0) as u32
}

/// Returns a number that identifies this thread in its process, derived from the address of its thread-local memory. It
/// needs no system call.
#[inline]
pub(crate) fn thread() -> u32 {
    let at: u64;
    // SAFETY: by the System V ABI of x86-64, the first word of a thread's memory is its own address.
    unsafe { asm!("mov {}, fs:0", out(reg) at, options(nostack, readonly, preserves_flags)) };
    // The address is aligned to 64 bytes. Threads with the same result would be 256 GiB apart.
    let at = at >> 6;
    (at ^ at >> 32) as u32
}

/// Sends this thread a signal.
pub(crate) fn raise(signal: c_int) {
    let thread = plain_call(libc::SYS_gettid, [0; 6]).unwrap_or(0);
    let _ = plain_call(libc::SYS_tgkill, [pid() as usize, thread, signal as usize, 0, 0, 0]);
}

/// This process has put itself into a sandbox that kills it for unusual system calls. `read` and `write` are permitted.
static SANDBOXED: AtomicBool = AtomicBool::new(false);

/// Records that system calls are filtered from now on.
pub(crate) fn begin_sandbox() {
    SANDBOXED.store(true, Ordering::Relaxed);
}

#[inline]
pub(crate) fn is_sandboxed() -> bool {
    SANDBOXED.load(Ordering::Relaxed)
}

/// Sends one byte without waiting. In a sandbox, this requires a non-blocking descriptor.
pub(crate) fn send_byte(fd: c_int) -> Result<usize, Errno> {
    let byte = [0u8];
    if is_sandboxed() {
        // SAFETY: `byte` lives until the call returns.
        return result(unsafe { call(libc::SYS_write, [fd as usize, byte.as_ptr() as usize, 1, 0, 0, 0]) });
    }
    let flags = (libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) as usize;
    // SAFETY: `byte` lives until the call returns.
    result(unsafe { call(libc::SYS_sendto, [fd as usize, byte.as_ptr() as usize, 1, flags, 0, 0]) })
}

/// Takes up to `most` bytes of a pair, at most 64. Returns their number, and whether they include an alarm. `EAGAIN`
/// without bytes.
pub(crate) fn take_bytes(fd: c_int, most: usize) -> Result<(usize, bool), Errno> {
    let mut bytes = [0u8; 64];
    let room = most.min(bytes.len());
    let (to, flags) = (bytes.as_mut_ptr() as usize, libc::MSG_DONTWAIT as usize);
    let (number, flags) = if is_sandboxed() { (libc::SYS_read, 0) } else { (libc::SYS_recvfrom, flags) };
    // SAFETY: `bytes` has at least `room` bytes and lives until the call returns.
    let taken = result(unsafe { call(number, [fd as usize, to, room, flags, 0, 0]) })?;
    Ok((taken, bytes[..taken].contains(&ALARM)))
}

/// Writes to an event.
pub(crate) fn wake(event: c_int) {
    let one = 1u64.to_ne_bytes();
    // SAFETY: `one` lives until the call returns.
    unsafe { call(libc::SYS_write, [event as usize, one.as_ptr() as usize, one.len(), 0, 0, 0]) };
}

/// # Safety
/// The addresses in the header are valid for reads of the lengths in the header.
pub(crate) unsafe fn sendmsg(fd: c_int, header: &msghdr, flags: c_int) -> Result<usize, Errno> {
    let args = [fd as usize, ptr::from_ref(header) as usize, flags as usize, 0, 0, 0];
    // SAFETY: `header` is a reference, and the caller guarantees that its addresses are valid for reads of its lengths.
    result(unsafe { call(libc::SYS_sendmsg, args) })
}

/// # Safety
/// The addresses in the header are valid for writes of the lengths in the header.
pub(crate) unsafe fn recvmsg(fd: c_int, header: &mut msghdr, flags: c_int) -> Result<usize, Errno> {
    let args = [fd as usize, ptr::from_mut(header) as usize, flags as usize, 0, 0, 0];
    // SAFETY: `header` is a reference, and the caller guarantees that its addresses are valid for writes of its
    // lengths.
    result(unsafe { call(libc::SYS_recvmsg, args) })
}

/// Reads from a file to shared memory, at `position`. -1 is the current position of the file.
///
/// # Safety
/// `to` describes memory that is valid for writes.
pub(crate) unsafe fn read_at(fd: c_int, to: iovec, position: i64) -> Result<usize, Errno> {
    let args = [fd as usize, to.iov_base as usize, to.iov_len, position as usize, 0, 0];
    let number = if position < 0 { libc::SYS_read } else { libc::SYS_pread64 };
    // SAFETY: the caller guarantees that `to` describes writable memory.
    result(unsafe { call(number, args) })
}

/// Writes to a writable pipe as many bytes as fit, without waiting. `EAGAIN` if none fit.
///
/// # Safety
/// `from` describes memory that is valid for reads.
pub(crate) unsafe fn write_at_once(pipe: c_int, from: iovec) -> Result<usize, Errno> {
    let (fd, nowhere) = (pipe as usize, -1isize as usize);
    let args = [fd, &raw const from as usize, 1, nowhere, nowhere, libc::RWF_NOWAIT as usize];
    // SAFETY: the caller guarantees that `from` describes readable memory.
    match result(unsafe { call(libc::SYS_pwritev2, args) }) {
        // Linux before 6.4 supports this flag for files only. A writable pipe has room for a page.
        Err(libc::EOPNOTSUPP) => {
            let args = [fd, from.iov_base as usize, from.iov_len.min(libc::PIPE_BUF), 0, 0, 0];
            // SAFETY: the caller guarantees that `from` describes readable memory.
            result(unsafe { call(libc::SYS_write, args) })
        }
        written => written,
    }
}

/// # Safety
/// `value` is null, or valid for reads of `len` bytes.
pub(crate) unsafe fn setsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: usize,
) -> Result<usize, Errno> {
    // SAFETY: the caller guarantees that `value` is null or has `len` readable bytes; the kernel rejects null.
    result(unsafe {
        call(libc::SYS_setsockopt, [fd as usize, level as usize, name as usize, value as usize, len, 0])
    })
}

/// Returns an option of a socket, or `None` if it does not exist or has another length.
pub(crate) fn socket_option<T: Copy>(fd: c_int, level: c_int, name: c_int, zero: T) -> Option<T> {
    let (mut value, mut len) = (zero, size_of::<T>() as libc::socklen_t);
    let (value_at, len_at) = (&raw mut value as usize, &raw mut len as usize);
    // SAFETY: both live until the call returns; `T` is a plain structure of the kernel, which writes all its bytes.
    let done = unsafe {
        call(libc::SYS_getsockopt, [fd as usize, level as usize, name as usize, value_at, len_at, 0])
    };
    (done == 0 && len as usize == size_of::<T>()).then_some(value)
}

/// Returns an option of type `int`, or 0 if it does not exist.
pub(crate) fn int_option(fd: c_int, level: c_int, name: c_int) -> c_int {
    socket_option(fd, level, name, 0).unwrap_or(0)
}

/// Sets an option of type `int`.
pub(crate) fn set_int_option(fd: c_int, level: c_int, name: c_int, value: c_int) -> Result<usize, Errno> {
    // SAFETY: `value` lives until the call returns, and the length is its size.
    unsafe { setsockopt(fd, level, name, (&raw const value).cast(), size_of::<c_int>()) }
}

/// Creates a kernel socket.
pub(crate) fn socket(family: c_int, kind: c_int) -> Result<c_int, Errno> {
    plain_call(libc::SYS_socket, [family as usize, kind as usize, 0, 0, 0, 0]).map(|fd| fd as c_int)
}

/// Returns `CLOCK_MONOTONIC` in nanoseconds.
pub(crate) fn now() -> i128 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let args = [libc::CLOCK_MONOTONIC as usize, &raw mut time as usize, 0, 0, 0, 0];
    // SAFETY: `time` lives until the call returns.
    unsafe { call(libc::SYS_clock_gettime, args) };
    i128::from(time.tv_sec) * 1_000_000_000 + i128::from(time.tv_nsec)
}

/// Yields the core to other threads.
pub(crate) fn yield_now() {
    // SAFETY: `sched_yield` has no arguments.
    unsafe { call(libc::SYS_sched_yield, [0; 6]) };
}

/// Waits for a number of milliseconds.
pub(crate) fn sleep(milliseconds: u64) {
    let time = libc::timespec {
        tv_sec: (milliseconds / 1000) as i64,
        tv_nsec: (milliseconds % 1000 * 1_000_000) as i64,
    };
    // SAFETY: `time` lives until the call returns.
    unsafe { call(libc::SYS_nanosleep, [&raw const time as usize, 0, 0, 0, 0, 0]) };
}

/// Calls `FUTEX_WAIT`: waits for at most 10 ms while the word is `value`.
pub(crate) fn futex_wait(word: *const u32, value: u32) {
    let time = libc::timespec { tv_sec: 0, tv_nsec: 10_000_000 };
    let args = [word as usize, libc::FUTEX_WAIT as usize, value as usize, &raw const time as usize, 0, 0];
    // SAFETY: the kernel checks the address of the word, and `time` lives until the call returns.
    unsafe { call(libc::SYS_futex, args) };
}

/// Calls `FUTEX_WAKE` for one waiter.
pub(crate) fn futex_wake(word: *const u32) {
    // SAFETY: the kernel checks the address of the word.
    unsafe { call(libc::SYS_futex, [word as usize, libc::FUTEX_WAKE as usize, 1, 0, 0, 0]) };
}

/// Maps `len` bytes: shared ones of `fd`, or private anonymous ones if `fd` is -1.
pub(crate) fn map(fd: c_int, len: usize, writable: bool) -> Result<*mut u8, Errno> {
    let protection = libc::PROT_READ | if writable { libc::PROT_WRITE } else { 0 };
    let flags =
        if fd < 0 { libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE } else { libc::MAP_SHARED };
    let args = [0, len, protection as usize, flags as usize, fd as usize, 0];
    // SAFETY: a new mapping at an address that the kernel chooses does not affect existing memory.
    result(unsafe { call(libc::SYS_mmap, args) }).map(|address| address as *mut u8)
}

/// Enlarges a mapping of the library, which may move it.
pub(crate) fn remap(address: *mut u8, old: usize, new: usize) -> Result<*mut u8, Errno> {
    let args = [address as usize, old, new, libc::MREMAP_MAYMOVE as usize, 0, 0];
    // SAFETY: callers pass address and length of a mapping of the library, to which they keep no references.
    result(unsafe { call(libc::SYS_mremap, args) }).map(|address| address as *mut u8)
}

/// Makes the pages at `address` zero in forked children.
pub(crate) fn wipe_on_fork(address: *mut u8, len: usize) -> Result<usize, Errno> {
    // SAFETY: this affects children only, and callers pass address and length of a mapping of the library.
    result(unsafe {
        call(libc::SYS_madvise, [address as usize, len, libc::MADV_WIPEONFORK as usize, 0, 0, 0])
    })
}

/// Returns the length of a file in bytes.
pub(crate) fn file_len(fd: c_int) -> Option<usize> {
    stat(fd).map(|stat| stat.st_size as usize)
}

/// Returns the device and inode of a file.
pub(crate) fn file_id(fd: c_int) -> Option<(u64, u64)> {
    stat(fd).map(|stat| (stat.st_dev, stat.st_ino))
}

fn stat(fd: c_int) -> Option<libc::stat> {
    // SAFETY: the structure consists of integers, for which all zeros are valid.
    let mut stat: libc::stat = unsafe { core::mem::zeroed() };
    // SAFETY: `stat` lives until the call returns.
    let done = unsafe { call(libc::SYS_fstat, [fd as usize, &raw mut stat as usize, 0, 0, 0, 0]) };
    (done == 0).then_some(stat)
}

/// Waits until a descriptor is writable or has hung up, with the signal mask before `signals` were blocked, or with the
/// current mask. Fails with `EINTR` if a signal arrives or has arrived, `EAGAIN` after the timeout, `EPIPE` after a
/// hang-up.
pub(crate) fn wait_for_room(
    fd: c_int,
    signals: Option<&Blocked>,
    time: Option<libc::timespec>,
) -> Result<(), Errno> {
    let mut poll = libc::pollfd { fd, events: libc::POLLOUT, revents: 0 };
    let time = time.as_ref().map_or(0, |time| ptr::from_ref(time) as usize);
    let mask = signals.map_or(0, |signals| &raw const signals.0 as usize);
    let args = [&raw mut poll as usize, 1, time, mask, size_of::<u64>(), 0];
    // SAFETY: the entry, the time and the mask live until the call returns.
    match result(unsafe { call(libc::SYS_ppoll, args) })? {
        0 => Err(libc::EAGAIN),
        _ if poll.revents & (libc::POLLHUP | libc::POLLERR) != 0 => Err(libc::EPIPE),
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
    /// Returns whether a signal has arrived that interrupts calls (`signal(7)`): it has a handler without `SA_RESTART`.
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
        // SAFETY: `pending` lives until the call returns.
        unsafe { call(libc::SYS_rt_sigpending, [&raw mut pending as usize, 8, 0, 0, 0, 0]) };
        let mut pending = pending & !self.0;
        while pending != 0 {
            let signal = pending.trailing_zeros() as usize + 1;
            pending &= pending - 1;
            let mut action = Action { handler: 0, flags: 0, restorer: 0, mask: 0 };
            let args = [signal, 0, &raw mut action as usize, 8, 0, 0];
            // SAFETY: `action` lives until the call returns.
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
    // SAFETY: `mask` lives until the call returns.
    unsafe { call(libc::SYS_rt_sigprocmask, args) };
}

/// Unblocks a signal of this thread. Returns the previous mask.
pub(crate) fn unblock(signal: c_int) -> Result<u64, Errno> {
    let (this, mut before) = (1u64 << (signal - 1), 0u64);
    let args = [libc::SIG_UNBLOCK as usize, &raw const this as usize, &raw mut before as usize, 8, 0, 0];
    // SAFETY: both masks live until the call returns.
    result(unsafe { call(libc::SYS_rt_sigprocmask, args) }).map(|_| before)
}

/// Returns the address and length of this library's text segment.
pub(crate) fn text_segment() -> (usize, usize) {
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
    // SAFETY: the linker defines the header. The header and the program headers are loaded with the library.
    let segments = unsafe {
        let first = header.cast::<u8>().add((*header).e_phoff as usize).cast::<Segment>();
        core::slice::from_raw_parts(first, (*header).e_phnum.into())
    };
    let is_text = |segment: &&Segment| segment.kind == libc::PT_LOAD && segment.flags & libc::PF_X != 0;
    let text = segments.iter().find(is_text);
    text.map_or((0, 0), |text| (header as usize + text.address as usize, text.len as usize))
}

/// Unmaps a mapping of the library.
pub(crate) fn unmap(address: *mut u8, len: usize) {
    // SAFETY: callers pass address and length of a mapping of the library, which is no longer used.
    unsafe { call(libc::SYS_munmap, [address as usize, len, 0, 0, 0, 0]) };
}

/// Writes up to eight parts in one call.
pub(crate) fn write_parts(fd: c_int, parts: &[&[u8]]) {
    let mut list = [iovec { iov_base: ptr::null_mut(), iov_len: 0 }; 8];
    for (to, part) in list.iter_mut().zip(parts) {
        *to = iovec { iov_base: part.as_ptr().cast_mut().cast(), iov_len: part.len() };
    }
    // SAFETY: the list and its parts live until the call returns.
    unsafe { call(libc::SYS_writev, [fd as usize, list.as_ptr() as usize, parts.len().min(8), 0, 0, 0]) };
}

/// Returns whether a descriptor is a pipe.
pub(crate) fn is_pipe(fd: c_int) -> bool {
    stat(fd).is_some_and(|stat| stat.st_mode & libc::S_IFMT == libc::S_IFIFO)
}

/// Waits until a descriptor is readable (`POLLIN`), writable (`POLLOUT`) or hung up. `EAGAIN` without `wait`.
pub(crate) fn wait_for(fd: c_int, events: i16, wait: bool) -> Result<(), Errno> {
    let mut poll = libc::pollfd { fd, events, revents: 0 };
    let time = if wait { -1isize as usize } else { 0 };
    // SAFETY: `poll` lives until the call returns.
    match result(unsafe { call(libc::SYS_poll, [&raw mut poll as usize, 1, time, 0, 0, 0]) })? {
        0 => Err(libc::EAGAIN),
        _ => Ok(()),
    }
}

/// Returns whether a descriptor is writable at once and has a reader.
pub(crate) fn has_room(fd: c_int) -> bool {
    let mut poll = libc::pollfd { fd, events: libc::POLLOUT, revents: 0 };
    // SAFETY: `poll` lives until the call returns.
    let ready = unsafe { call(libc::SYS_poll, [&raw mut poll as usize, 1, 0, 0, 0, 0]) };
    ready == 1 && poll.revents == libc::POLLOUT
}

/// Waits for a number of milliseconds.
pub(crate) fn poll_sleep(milliseconds: usize) {
    // SAFETY: the list of entries is empty.
    unsafe { call(libc::SYS_poll, [0, 0, milliseconds, 0, 0, 0]) };
}

/// Returns the number of readable bytes (`FIONREAD`).
pub(crate) fn readable(fd: c_int) -> Result<usize, Errno> {
    let mut bytes: c_int = 0;
    let args = [fd as usize, libc::FIONREAD as usize, ptr::from_mut(&mut bytes) as usize, 0, 0, 0];
    // SAFETY: `bytes` lives until the call returns.
    result(unsafe { call(libc::SYS_ioctl, args) })?;
    Ok(usize::try_from(bytes).unwrap_or(0))
}

/// Calls `each` with every descriptor of this process.
pub(crate) fn each_descriptor(mut each: impl FnMut(c_int)) {
    let path = c"/proc/self/fd";
    let flags = (libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC) as usize;
    let args = [libc::AT_FDCWD as usize, path.as_ptr() as usize, flags, 0, 0, 0];
    // SAFETY: `path` lives until the call returns.
    let Ok(directory) = result(unsafe { call(libc::SYS_openat, args) }) else { return };
    let mut entries = [0u8; 4096];
    loop {
        let args = [directory, entries.as_mut_ptr() as usize, entries.len(), 0, 0, 0];
        // SAFETY: `entries` lives until the call returns.
        let Ok(len @ 1..) = result(unsafe { call(libc::SYS_getdents64, args) }) else { break };
        let mut rest = &entries[..len];
        // An entry has an inode and a position of 8 bytes each, its length in 2 bytes, a kind, and a name that ends
        // with a null.
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
/// `EINTR` if a signal with a handler has arrived.
pub(crate) fn wait_for_signal(milliseconds: u64) -> Result<(), Errno> {
    // SAFETY: the list of entries is empty.
    result(unsafe { call(libc::SYS_poll, [0, 0, milliseconds as usize, 0, 0, 0]) }).map(drop)
}

/// Creates a periodic, non-blocking timer.
pub(crate) fn timer(milliseconds: u64) -> Result<c_int, Errno> {
    let flags = libc::TFD_CLOEXEC | libc::TFD_NONBLOCK;
    let timer =
        plain_call(libc::SYS_timerfd_create, [libc::CLOCK_MONOTONIC as usize, flags as usize, 0, 0, 0, 0])?;
    let time = libc::timespec { tv_sec: 0, tv_nsec: milliseconds as i64 * 1_000_000 };
    let times = libc::itimerspec { it_interval: time, it_value: time };
    // SAFETY: `times` lives until the call returns.
    let set =
        result(unsafe { call(libc::SYS_timerfd_settime, [timer, 0, &raw const times as usize, 0, 0, 0]) });
    set.map(|_| timer as c_int).inspect_err(|_| {
        let _ = close(timer as c_int);
    })
}

/// Returns whether a descriptor is a timer, and reads it if it has expired.
pub(crate) fn is_timer_taken(fd: c_int) -> bool {
    let mut times = libc::itimerspec {
        it_interval: libc::timespec { tv_sec: 0, tv_nsec: 0 },
        it_value: libc::timespec { tv_sec: 0, tv_nsec: 0 },
    };
    // SAFETY: `times` lives until the call returns.
    let is =
        unsafe { call(libc::SYS_timerfd_gettime, [fd as usize, &raw mut times as usize, 0, 0, 0, 0]) } == 0;
    let mut expired = 0u64;
    if is && has_input(fd) {
        // SAFETY: `expired` lives until the call returns.
        unsafe { call(libc::SYS_read, [fd as usize, &raw mut expired as usize, size_of::<u64>(), 0, 0, 0]) };
    }
    is
}

/// Returns whether a descriptor is readable.
fn has_input(fd: c_int) -> bool {
    wait_for(fd, libc::POLLIN, false).is_ok()
}

/// Ends the process with all its threads.
pub(crate) fn exit(code: c_int) -> ! {
    loop {
        let _ = plain_call(libc::SYS_exit_group, [code as usize, 0, 0, 0, 0, 0]);
    }
}

/// Returns whether a socket's peer has closed.
pub(crate) fn has_hung_up(fd: c_int) -> bool {
    let mut poll = libc::pollfd { fd, events: 0, revents: 0 };
    // SAFETY: `poll` lives until the call returns.
    let ready = unsafe { call(libc::SYS_poll, [&raw mut poll as usize, 1, 0, 0, 0, 0]) };
    ready == 1 && poll.revents & (libc::POLLHUP | libc::POLLERR | libc::POLLNVAL) != 0
}

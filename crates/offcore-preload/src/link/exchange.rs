//! Messages between the process and the stack, with descriptors.

use core::ffi::c_int;
use core::mem::{self, MaybeUninit};
use core::ptr;
use core::sync::atomic::{AtomicBool, Ordering};

use libc::{c_void, iovec, msghdr, sockaddr_un};
use offcore_session::message::{Answer, Call, Hello, MOST_DESCRIPTORS, NONE, Question, VERSION, Welcome};

use crate::environment;
use crate::report;
use crate::step::{Failed, Step};
use crate::sys::{self, Errno};

/// Maximum length of a message.
const LONGEST: usize = 256;
/// Minimum number of the library's own descriptors, if possible: programs expect low numbers for their descriptors.
const AWAY: usize = 1000;

/// Timeouts in seconds for the welcome and for answers. A welcome takes longer if hundreds of programs start at once.
/// Signals are blocked during the wait for an answer, and a stopped stack must not delay them forever.
const WELCOMED: libc::time_t = 60;
const ANSWERED: libc::time_t = 15;

/// Milliseconds for which a process tries again: while the stack is busy, and while the access rights of its socket
/// refuse the user. The others are the shortest and longest pause between two attempts.
const BUSY: u64 = 30_000;
const REFUSED: u64 = 500;
const SHORTEST: u64 = 10;
const LONGEST_NAP: u64 = 160;

/// Repeats an attempt while the stack is busy with other programs or refuses this user for a moment.
/// After a wait for the access rights in vain, later attempts of this process fail at once until one succeeds.
fn retry_while_busy<T>(mut attempt: impl FnMut() -> Result<T, Failed>) -> Result<T, Failed> {
    static REFUSED_BEFORE: AtomicBool = AtomicBool::new(false);
    let (mut nap, mut waited) = (SHORTEST, 0);
    let mut refusals = if REFUSED_BEFORE.load(Ordering::Relaxed) { REFUSED } else { 0 };
    loop {
        let result = attempt();
        match &result {
            Err(failed) if failed.is_refused() && refusals < REFUSED => {
                sys::sleep(nap);
                refusals += nap;
                nap = (2 * nap).min(LONGEST_NAP);
                continue;
            }
            Err(failed) if failed.is_refused() => REFUSED_BEFORE.store(true, Ordering::Relaxed),
            Ok(_) => REFUSED_BEFORE.store(false, Ordering::Relaxed),
            Err(_) => {}
        }
        match result {
            Err(failed) if failed.is_busy() && waited < BUSY => {
                sys::sleep(nap);
                waited += nap;
                nap = (2 * nap).min(LONGEST_NAP);
            }
            result => return result,
        }
    }
}

/// Descriptors received with a message.
#[derive(Debug)]
pub(crate) struct Descriptors {
    descriptors: [c_int; MOST_DESCRIPTORS],
    len: usize,
}

impl Descriptors {
    pub(crate) fn as_slice(&self) -> &[c_int] {
        &self.descriptors[..self.len]
    }

    /// Closes all descriptors.
    pub(crate) fn close(&self) {
        for fd in self.as_slice() {
            let _ = sys::close(*fd);
        }
    }
}

/// The first message of the stack.
pub(super) struct ReceivedWelcome {
    pub(super) welcome: Welcome,
    pub(super) descriptors: Descriptors,
}

/// Buffer for descriptors of a message, with the alignment of a control message.
#[repr(C, align(8))]
pub(crate) struct Ancillary([u8; 24 + 4 * MOST_DESCRIPTORS]);

impl Ancillary {
    pub(crate) const fn new() -> Self {
        Self([0; 24 + 4 * MOST_DESCRIPTORS])
    }
}

/// Receives a message and its descriptors. Returns its length, or 0 at the end.
///
/// # Errors
/// Returns the system's error, or `EMFILE` if not all descriptors could be received.
pub(crate) fn receive(fd: c_int, bytes: &mut [u8], flags: c_int) -> Result<(usize, Descriptors), Errno> {
    let mut ancillary = Ancillary::new();
    let mut part = iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let mut header = message(&mut part, &mut ancillary);
    // SAFETY: the header points to `bytes` and to `ancillary`, which are exclusively borrowed until the call returns.
    let len = unsafe { sys::recvmsg(fd, &mut header, flags) }?;
    let mut received = Descriptors { descriptors: [-1; MOST_DESCRIPTORS], len: 0 };
    let each = |fd| {
        if let Some(to) = received.descriptors.get_mut(received.len) {
            *to = fd;
            received.len += 1;
        }
    };
    // SAFETY: the kernel has received a message with this header.
    unsafe { rights(&raw const header, each) };
    if header.msg_flags & libc::MSG_CTRUNC != 0 {
        received.close();
        return Err(libc::EMFILE);
    }
    Ok((len, received))
}

/// Calls `each` with every descriptor that arrived with a message.
///
/// # Safety
/// A message was received with `header`.
pub(crate) unsafe fn rights(header: *const msghdr, mut each: impl FnMut(c_int)) {
    // SAFETY: the caller has received a message with `header`, so the kernel has set `msg_control` and its length.
    let mut control = unsafe { libc::CMSG_FIRSTHDR(header) };
    while !control.is_null() {
        // SAFETY: `control` is not null, so it points to a control message that the kernel has written.
        let (this, data, head) =
            unsafe { (&*control, libc::CMSG_DATA(control).cast::<c_int>(), libc::CMSG_LEN(0) as usize) };
        if this.cmsg_level == libc::SOL_SOCKET && this.cmsg_type == libc::SCM_RIGHTS {
            for at in 0..this.cmsg_len.saturating_sub(head) / size_of::<c_int>() {
                // SAFETY: `at` is below the number of descriptors in the control message.
                each(unsafe { data.add(at).read_unaligned() });
            }
        }
        // SAFETY: `header` is valid, and `control` points to a control message of it.
        control = unsafe { libc::CMSG_NXTHDR(header, control) };
    }
}

fn message(part: &mut iovec, ancillary: &mut Ancillary) -> msghdr {
    // SAFETY: the structure consists of integers and pointers, for which zero is valid.
    let mut header: msghdr = unsafe { mem::zeroed() };
    header.msg_iov = part;
    header.msg_iovlen = 1;
    header.msg_control = ancillary.0.as_mut_ptr().cast();
    header.msg_controllen = ancillary.0.len() as _;
    header
}

/// Sends a message and descriptors. Their number must not exceed the limit of a message.
fn send(fd: c_int, bytes: &[u8], descriptors: &[c_int]) -> Result<usize, Errno> {
    let mut ancillary = Ancillary::new();
    let mut part = iovec { iov_base: bytes.as_ptr().cast_mut().cast::<c_void>(), iov_len: bytes.len() };
    let mut header = message(&mut part, &mut ancillary);
    let len = size_of_val(descriptors) as u32;
    if descriptors.is_empty() {
        (header.msg_control, header.msg_controllen) = (ptr::null_mut(), 0);
    } else {
        // SAFETY: `ancillary` has the size and alignment that the macros require.
        unsafe {
            header.msg_controllen = libc::CMSG_SPACE(len) as _;
            let control = libc::CMSG_FIRSTHDR(&raw const header);
            (*control).cmsg_level = libc::SOL_SOCKET;
            (*control).cmsg_type = libc::SCM_RIGHTS;
            (*control).cmsg_len = libc::CMSG_LEN(len) as _;
            let to = libc::CMSG_DATA(control).cast::<c_int>();
            for (at, fd) in descriptors.iter().enumerate() {
                to.add(at).write_unaligned(*fd);
            }
        }
    }
    // SAFETY: the header points to `bytes` and to `ancillary`, which live until the call returns.
    unsafe { sys::sendmsg(fd, &header, libc::MSG_NOSIGNAL) }
}

/// Sets the timeouts of a socket to the stack, in seconds.
fn set_timeouts(fd: c_int, seconds: libc::time_t) {
    let time = libc::timeval { tv_sec: seconds, tv_usec: 0 };
    for name in [libc::SO_RCVTIMEO, libc::SO_SNDTIMEO] {
        let (at, len) = ((&raw const time).cast(), size_of::<libc::timeval>());
        // SAFETY: `time` lives until the call returns, and `len` is its size. Without the option, calls just wait
        // longer.
        let _ = unsafe { sys::setsockopt(fd, libc::SOL_SOCKET, name, at, len) };
    }
}

/// Connects to the stack and sends a hello message.
pub(super) fn connect() -> Result<(c_int, ReceivedWelcome), Failed> {
    retry_while_busy(connect_once)
}

fn connect_once() -> Result<(c_int, ReceivedWelcome), Failed> {
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
    // SAFETY: `socket` takes no addresses.
    let fd = unsafe { sys::call(libc::SYS_socket, [libc::AF_UNIX as usize, kind as usize, 0, 0, 0, 0]) };
    let fd = sys::result(fd).map_err(|error| Step::Socket.failed(error))? as c_int;
    set_timeouts(fd, WELCOMED);
    let address = address();
    let args = [fd as usize, &raw const address as usize, size_of::<sockaddr_un>(), 0, 0, 0];
    // SAFETY: `address` lives until the call returns, and the length is its size.
    let connected = sys::result(unsafe { sys::call(libc::SYS_connect, args) });
    let greeted = connected.map_err(|error| Step::Connect.failed(error)).and_then(|_| exchange_hello(fd));
    greeted.map(|received| (fd, received)).inspect_err(|_| {
        let _ = sys::close(fd);
    })
}

/// Sends a hello message on a new socket to the stack, and receives the welcome.
fn exchange_hello(fd: c_int) -> Result<ReceivedWelcome, Failed> {
    let hello = Hello { version: VERSION, key: environment::key() };
    send(fd, &hello.to_bytes(), &[]).map_err(|error| Step::Message.failed(error))?;
    receive_welcome(fd)
}

fn address() -> sockaddr_un {
    // SAFETY: the structure consists of integers, for which all zeros are valid.
    let mut address: sockaddr_un = unsafe { mem::zeroed() };
    address.sun_family = libc::AF_UNIX as _;
    for (to, from) in address.sun_path.iter_mut().zip(environment::stack_path()) {
        *to = *from as _;
    }
    address
}

/// Requests a socket for a forked child over the socket that it has inherited from its parent, and sends a hello
/// message on it.
pub(super) fn fork(inherited: c_int) -> Result<(c_int, ReceivedWelcome), Failed> {
    retry_while_busy(|| fork_once(inherited))
}

fn fork_once(inherited: c_int) -> Result<(c_int, ReceivedWelcome), Failed> {
    let mut pair = [MaybeUninit::<c_int>::uninit(); 2];
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
    let args = [libc::AF_UNIX as usize, kind as usize, 0, pair.as_mut_ptr() as usize, 0, 0];
    // SAFETY: `pair` has space for two descriptors.
    let made = sys::result(unsafe { sys::call(libc::SYS_socketpair, args) });
    made.map_err(|error| Step::Socket.failed(error))?;
    // SAFETY: the successful call has written both descriptors.
    let [ours, theirs] = pair.map(|fd| unsafe { fd.assume_init() });
    set_timeouts(ours, WELCOMED);
    let sent = send(inherited, &Question::new(Call::Fork, NONE, 0).to_bytes(), &[theirs]);
    let _ = sys::close(theirs);
    super::request_check();
    let mut bytes = [0; LONGEST];
    let answer = match sent {
        Ok(_) => {
            receive(ours, &mut bytes, libc::MSG_CMSG_CLOEXEC).map_err(|error| Step::Message.failed(error))
        }
        // The parent's stack has ended.
        Err(error) => Err(Step::Connect.failed(error)),
    };
    let _ = sys::close(ours);
    let (_, descriptors) = answer?;
    let [socket] = *descriptors.as_slice() else {
        descriptors.close();
        // The stack has closed the other end because its queue of new processes is full.
        return Err(Step::Message.failed(libc::ECONNRESET));
    };
    set_timeouts(socket, WELCOMED);
    exchange_hello(socket).map(|received| (socket, received)).inspect_err(|_| {
        let _ = sys::close(socket);
    })
}

/// Waits for the stack's first message.
fn receive_welcome(fd: c_int) -> Result<ReceivedWelcome, Failed> {
    let mut bytes = [0; LONGEST];
    let received = receive(fd, &mut bytes, libc::MSG_CMSG_CLOEXEC);
    let (len, descriptors) = received.map_err(|error| Step::Message.failed(error))?;
    let welcome = Welcome::from_bytes(&bytes[..len]);
    let failed = match welcome {
        None if len == 0 => Step::Message.failed(libc::ECONNRESET),
        None => Step::Message.failed(libc::EPROTO),
        Some(welcome) if welcome.version != VERSION => {
            report::other_version(welcome.version);
            Step::Welcome.failed(libc::EPROTO)
        }
        Some(welcome) if welcome.error != 0 => Step::Welcome.failed(welcome.error as Errno),
        Some(welcome) => {
            set_timeouts(fd, ANSWERED);
            return Ok(ReceivedWelcome { welcome, descriptors });
        }
    };
    descriptors.close();
    Err(failed)
}

/// Asks the stack a question and waits for the answer. Calls `sent` after the question was sent.
pub(super) fn ask(
    socket: c_int,
    question: &Question,
    descriptors: &[c_int],
    sent: impl FnOnce(),
) -> Result<(Answer, Descriptors), Errno> {
    send(socket, &question.to_bytes(), descriptors)?;
    sent();
    let mut bytes = [0; LONGEST];
    let (len, received) = receive(socket, &mut bytes, libc::MSG_CMSG_CLOEXEC)?;
    match Answer::from_bytes(&bytes[..len]) {
        Some(answer) => Ok((answer, received)),
        None => {
            received.close();
            Err(libc::EPROTO)
        }
    }
}

/// Returns a duplicate with a high number as [`duplicate_high`] does, or with any number if that fails.
pub(super) fn duplicate_high_or_any(fd: c_int) -> Result<c_int, Errno> {
    duplicate_high(fd).or_else(|_| sys::fcntl(fd, libc::F_DUPFD_CLOEXEC, 3).map(|moved| moved as c_int))
}

/// Returns a duplicate with a high number, which programs do not expect.
pub(crate) fn duplicate_high(fd: c_int) -> Result<c_int, Errno> {
    sys::fcntl(fd, libc::F_DUPFD_CLOEXEC, AWAY).map(|moved| moved as c_int)
}

/// Replaces the library's own descriptor `old` by a duplicate of `fd`.
pub(super) fn replace(fd: c_int, old: c_int) -> Result<c_int, Errno> {
    sys::dup3(fd, old, libc::O_CLOEXEC).map(|_| old)
}

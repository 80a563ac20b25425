//! Messages to the stack and back, with descriptors.

use core::ffi::c_int;
use core::mem::{self, MaybeUninit};
use core::ptr;

use libc::{c_void, iovec, msghdr, sockaddr_un};
use offcore_session::message::{Answer, Call, Hello, MOST_DESCRIPTORS, NONE, Question, VERSION, Welcome};

use crate::environment;
use crate::report;
use crate::step::{Failed, Step};
use crate::sys::{self, Errno};

/// Room for the longest message.
const LONGEST: usize = 256;
/// The lowest preferred number of the library's own descriptors: programs expect low numbers for theirs.
const AWAY: usize = 1000;

/// Timeouts in seconds: for the welcome, which takes longer if hundreds of programs start at once, and for answers. Signals wait
/// for an answer, and a stopped stack must not delay them forever.
const WELCOMED: libc::time_t = 60;
const ANSWERED: libc::time_t = 15;

/// Milliseconds that a process waits for a busy stack, and the shortest and longest pause between two attempts.
const BUSY: u64 = 30_000;
const SHORTEST: u64 = 10;
const LONGEST_NAP: u64 = 160;

/// Repeats an attempt while the stack is busy with other programs.
fn patiently<T>(mut attempt: impl FnMut() -> Result<T, Failed>) -> Result<T, Failed> {
    let (mut nap, mut waited) = (SHORTEST, 0);
    loop {
        match attempt() {
            Err(failed) if failed.is_busy() && waited < BUSY => {
                sys::sleep(nap);
                waited += nap;
                nap = (2 * nap).min(LONGEST_NAP);
            }
            result => return result,
        }
    }
}

/// Descriptors that came with a message.
#[derive(Debug)]
pub(crate) struct Descriptors {
    descriptors: [c_int; MOST_DESCRIPTORS],
    len: usize,
}

impl Descriptors {
    pub(crate) fn as_slice(&self) -> &[c_int] {
        &self.descriptors[..self.len]
    }

    /// Closes them all.
    pub(crate) fn close(&self) {
        for fd in self.as_slice() {
            let _ = sys::close(*fd);
        }
    }
}

/// What came: the first message of the stack.
pub(super) struct Received {
    pub(super) welcome: Welcome,
    pub(super) descriptors: Descriptors,
}

/// Room for descriptors beside a message, aligned as its header has to be.
#[repr(C, align(8))]
pub(crate) struct Ancillary([u8; 24 + 4 * MOST_DESCRIPTORS]);

impl Ancillary {
    pub(crate) const fn new() -> Self {
        Self([0; 24 + 4 * MOST_DESCRIPTORS])
    }
}

/// Receives a message and its descriptors: its length, 0 at the end.
///
/// # Errors
/// The system's; `EMFILE` when not all descriptors could be received.
pub(crate) fn receive(fd: c_int, bytes: &mut [u8], flags: c_int) -> Result<(usize, Descriptors), Errno> {
    let mut ancillary = Ancillary::new();
    let mut part = iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let mut header = message(&mut part, &mut ancillary);
    // SAFETY: the header's addresses are of memory that lives until the call returns, and nobody else has.
    let len = unsafe { sys::recvmsg(fd, &mut header, flags) }?;
    let mut received = Descriptors { descriptors: [-1; MOST_DESCRIPTORS], len: 0 };
    let each = |fd| {
        if let Some(to) = received.descriptors.get_mut(received.len) {
            *to = fd;
            received.len += 1;
        }
    };
    // SAFETY: a header that the kernel has filled.
    unsafe { rights(&raw const header, each) };
    if header.msg_flags & libc::MSG_CTRUNC != 0 {
        received.close();
        return Err(libc::EMFILE);
    }
    Ok((len, received))
}

/// Calls `each` with every descriptor that has come with a message.
///
/// # Safety
/// `header` is of a message that was received.
pub(crate) unsafe fn rights(header: *const msghdr, mut each: impl FnMut(c_int)) {
    // SAFETY: the caller's promise.
    let mut control = unsafe { libc::CMSG_FIRSTHDR(header) };
    while !control.is_null() {
        // SAFETY: a control message of the kernel's.
        let (this, data, head) =
            unsafe { (&*control, libc::CMSG_DATA(control).cast::<c_int>(), libc::CMSG_LEN(0) as usize) };
        if this.cmsg_level == libc::SOL_SOCKET && this.cmsg_type == libc::SCM_RIGHTS {
            for at in 0..this.cmsg_len.saturating_sub(head) / size_of::<c_int>() {
                // SAFETY: so many descriptors are in the control message.
                each(unsafe { data.add(at).read_unaligned() });
            }
        }
        // SAFETY: as above.
        control = unsafe { libc::CMSG_NXTHDR(header, control) };
    }
}

fn message(part: &mut iovec, ancillary: &mut Ancillary) -> msghdr {
    // SAFETY: a structure of numbers and addresses, which may be null.
    let mut header: msghdr = unsafe { mem::zeroed() };
    header.msg_iov = part;
    header.msg_iovlen = 1;
    header.msg_control = ancillary.0.as_mut_ptr().cast();
    header.msg_controllen = ancillary.0.len() as _;
    header
}

/// Sends a message and descriptors, at most as many as a message has.
fn send(fd: c_int, bytes: &[u8], descriptors: &[c_int]) -> Result<usize, Errno> {
    let mut ancillary = Ancillary::new();
    let mut part = iovec { iov_base: bytes.as_ptr().cast_mut().cast::<c_void>(), iov_len: bytes.len() };
    let mut header = message(&mut part, &mut ancillary);
    let len = size_of_val(descriptors) as u32;
    if descriptors.is_empty() {
        (header.msg_control, header.msg_controllen) = (ptr::null_mut(), 0);
    } else {
        // SAFETY: the room is as long and as aligned as the macros want it.
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
    // SAFETY: the header's addresses are of memory that lives until the call returns.
    unsafe { sys::sendmsg(fd, &header, libc::MSG_NOSIGNAL) }
}

/// Sets the timeouts of a socket to the stack, in seconds.
fn limit(fd: c_int, seconds: libc::time_t) {
    let time = libc::timeval { tv_sec: seconds, tv_usec: 0 };
    for name in [libc::SO_RCVTIMEO, libc::SO_SNDTIMEO] {
        let (at, len) = ((&raw const time).cast(), size_of::<libc::timeval>());
        // SAFETY: a value that lives until the call returns. Without the option it waits longer.
        let _ = unsafe { sys::setsockopt(fd, libc::SOL_SOCKET, name, at, len) };
    }
}

/// Connects to the stack and says hello.
pub(super) fn connect() -> Result<(c_int, Received), Failed> {
    patiently(connect_once)
}

fn connect_once() -> Result<(c_int, Received), Failed> {
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
    // SAFETY: it takes no addresses.
    let fd = unsafe { sys::call(libc::SYS_socket, [libc::AF_UNIX as usize, kind as usize, 0, 0, 0, 0]) };
    let fd = sys::result(fd).map_err(|error| Step::Socket.failed(error))? as c_int;
    limit(fd, WELCOMED);
    let address = address();
    let args = [fd as usize, &raw const address as usize, size_of::<sockaddr_un>(), 0, 0, 0];
    // SAFETY: an address that lives until the call returns.
    let connected = sys::result(unsafe { sys::call(libc::SYS_connect, args) });
    let greeted = connected.map_err(|error| Step::Connect.failed(error)).and_then(|_| greet(fd));
    greeted.map(|received| (fd, received)).inspect_err(|_| {
        let _ = sys::close(fd);
    })
}

/// Sends a hello message on a new socket to the stack, and receives the welcome.
fn greet(fd: c_int) -> Result<Received, Failed> {
    let hello = Hello { version: VERSION, key: environment::key() };
    send(fd, &hello.to_bytes(), &[]).map_err(|error| Step::Message.failed(error))?;
    welcome(fd)
}

fn address() -> sockaddr_un {
    // SAFETY: a structure of numbers.
    let mut address: sockaddr_un = unsafe { mem::zeroed() };
    address.sun_family = libc::AF_UNIX as _;
    for (to, from) in address.sun_path.iter_mut().zip(environment::stack()) {
        *to = *from as _;
    }
    address
}

/// A forked child asks for a socket of its own over the one that it has from its parent, and introduces itself there.
pub(super) fn fork(inherited: c_int) -> Result<(c_int, Received), Failed> {
    patiently(|| fork_once(inherited))
}

fn fork_once(inherited: c_int) -> Result<(c_int, Received), Failed> {
    let mut pair = [MaybeUninit::<c_int>::uninit(); 2];
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
    let args = [libc::AF_UNIX as usize, kind as usize, 0, pair.as_mut_ptr() as usize, 0, 0];
    // SAFETY: room for two descriptors.
    let made = sys::result(unsafe { sys::call(libc::SYS_socketpair, args) });
    made.map_err(|error| Step::Socket.failed(error))?;
    // SAFETY: the call has filled both.
    let [ours, theirs] = pair.map(|fd| unsafe { fd.assume_init() });
    limit(ours, WELCOMED);
    let sent = send(inherited, &Question::new(Call::Fork, NONE, 0).to_bytes(), &[theirs]);
    let _ = sys::close(theirs);
    super::look();
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
        // The stack has closed the other end: its queue of new processes is full.
        return Err(Step::Message.failed(libc::ECONNRESET));
    };
    limit(socket, WELCOMED);
    greet(socket).map(|received| (socket, received)).inspect_err(|_| {
        let _ = sys::close(socket);
    })
}

/// Waits for the stack's first message.
fn welcome(fd: c_int) -> Result<Received, Failed> {
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
            limit(fd, ANSWERED);
            return Ok(Received { welcome, descriptors });
        }
    };
    descriptors.close();
    Err(failed)
}

/// Asks the stack and waits for the answer; `sent` is called in between.
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

/// A duplicate with a high number as in [`far`], or with any number.
pub(super) fn away(fd: c_int) -> Result<c_int, Errno> {
    far(fd).or_else(|_| sys::fcntl(fd, libc::F_DUPFD_CLOEXEC, 3).map(|moved| moved as c_int))
}

/// A duplicate with a high number, which programs do not expect.
pub(crate) fn far(fd: c_int) -> Result<c_int, Errno> {
    sys::fcntl(fd, libc::F_DUPFD_CLOEXEC, AWAY).map(|moved| moved as c_int)
}

/// Puts a duplicate in the place of another one of the library's own.
pub(super) fn replace(fd: c_int, old: c_int) -> Result<c_int, Errno> {
    sys::dup3(fd, old, libc::O_CLOEXEC).map(|_| old)
}

//! Sockets of the kernel's that become sessions.
//!
//! A program's socket is the kernel's until it is known where it belongs: when it is bound to an address of the stack's,
//! connects, listens, or sends its first datagram. Until then the kernel's socket keeps its options. Then the session's end
//! takes its place under all its descriptors, with the same flags, and the options go with it.

use core::ffi::c_int;
use core::net::{IpAddr, Ipv4Addr, SocketAddr};
use core::sync::atomic::{AtomicU32, Ordering};

use offcore_session::message::{Call, NONE, Question, SHARE_PORT, Session as Where};
use offcore_session::slot::{state, wish};

use crate::address;
use crate::link;
use crate::polled;
use crate::rules;
use crate::session::{self, Session};
use crate::sys::{self, Errno};
use crate::table::{self, Entry, Kind};

/// Remembers a new socket of the kernel's, if it may become a session.
pub(crate) fn opened(fd: c_int, domain: c_int, kind: c_int, protocol: c_int) {
    static NUMBER: AtomicU32 = AtomicU32::new(1);
    let is_ip = matches!(domain, libc::AF_INET | libc::AF_INET6);
    let kind = match (kind & !(libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK), protocol) {
        (libc::SOCK_STREAM, 0 | libc::IPPROTO_TCP) => Kind::OpenStream,
        (libc::SOCK_DGRAM, 0 | libc::IPPROTO_UDP) => Kind::OpenDatagrams,
        _ => return,
    };
    if is_ip && link::is_used() {
        let place = NUMBER.fetch_add(1, Ordering::Relaxed);
        table::set(fd, Some(Entry { kind, v6: domain == libc::AF_INET6, generation: 0, place }));
    }
}

/// Leaves a socket to the kernel.
pub(crate) fn leave(fd: c_int, entry: Entry) {
    for fd in descriptors(fd, entry) {
        table::set(fd, None);
        polled::forget(fd);
    }
}

/// All descriptors of a socket that is not decided: `fd`, and what it was duplicated to.
fn descriptors(fd: c_int, entry: Entry) -> impl Iterator<Item = c_int> {
    // Duplicates are rare, and nearly always have low numbers.
    let same = move |(other, found): (c_int, Entry)| (found == entry && other != fd).then_some(other);
    core::iter::once(fd).chain(table::all(1 << 12).filter_map(same))
}

/// Puts a session's end in the place of a socket that was not decided.
fn become_session(fd: c_int, entry: Entry, (found, end): (Where, c_int)) -> Result<Session, Errno> {
    let kind = if entry.kind == Kind::OpenStream { Kind::Stream } else { Kind::Datagrams };
    let new = Entry::session(kind, entry.v6, found);
    let options = Options::of(fd, end);
    for fd in descriptors(fd, entry) {
        let cloexec = sys::fcntl(fd, libc::F_GETFD, 0).unwrap_or(0) as c_int & libc::FD_CLOEXEC;
        let flags = if cloexec != 0 { libc::O_CLOEXEC } else { 0 };
        polled::carry_over(fd, || {
            if sys::dup3(end, fd, flags).is_ok() {
                table::set(fd, Some(new));
            }
        });
    }
    let _ = sys::close(end);
    let session = session::get(fd).ok_or(libc::EIO)?;
    options.give(&session);
    session.note_family();
    Ok(session)
}

/// Options of a socket of the kernel's that a session has, too.
struct Options {
    wishes: u32,
    keep: [c_int; 3],
}

impl Options {
    /// Those of `fd`; `end` gets the ones that the kernel keeps for it.
    fn of(fd: c_int, end: c_int) -> Self {
        let mut wishes = 0;
        let none = libc::linger { l_onoff: 0, l_linger: 0 };
        let linger = sys::socket_option(fd, libc::SOL_SOCKET, libc::SO_LINGER, none).unwrap_or(none);
        for (bit, on) in [
            (wish::NO_DELAY, sys::int_option(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY) != 0),
            (wish::KEEP_ALIVE, sys::int_option(fd, libc::SOL_SOCKET, libc::SO_KEEPALIVE) != 0),
            (wish::RESET, linger.l_onoff != 0 && linger.l_linger == 0),
        ] {
            wishes |= if on { bit } else { 0 };
        }
        let keep = [libc::TCP_KEEPIDLE, libc::TCP_KEEPINTVL, libc::TCP_KEEPCNT];
        let keep = keep.map(|name| sys::int_option(fd, libc::IPPROTO_TCP, name));
        for name in [libc::SO_RCVTIMEO, libc::SO_SNDTIMEO] {
            let zero = libc::timeval { tv_sec: 0, tv_usec: 0 };
            if let Some(time) = sys::socket_option(fd, libc::SOL_SOCKET, name, zero)
                && (time.tv_sec != 0 || time.tv_usec != 0)
            {
                let (at, len) = ((&raw const time).cast(), size_of::<libc::timeval>());
                // SAFETY: a time that lives until the call returns.
                let _ = unsafe { sys::setsockopt(end, libc::SOL_SOCKET, name, at, len) };
            }
        }
        Self { wishes, keep }
    }

    fn give(&self, session: &Session) {
        let wishes = &session.slot.wishes;
        let [idle, interval, count] = self.keep;
        wishes.keep_idle.store(idle as u32, Ordering::Relaxed);
        wishes.keep_interval.store(interval as u32, Ordering::Relaxed);
        wishes.keep_count.store(count as u32, Ordering::Relaxed);
        if self.wishes != 0 {
            wishes.options.fetch_or(self.wishes, Ordering::AcqRel);
            session.mark();
        }
    }
}

/// Asks for a session instead of `fd`.
fn ask_session(fd: c_int, question: &Question, descriptors: &[c_int]) -> Result<(Where, c_int), Errno> {
    // The stack makes a listener that it is given non-blocking.
    let status = sys::fcntl(fd, libc::F_GETFL, 0).unwrap_or(0) & libc::O_NONBLOCK as usize;
    let (answer, received) = link::ask(question, descriptors)?;
    match *received.as_slice() {
        [end] => {
            let _ = sys::fcntl(end, libc::F_SETFL, status);
            Ok((answer.session, end))
        }
        _ => {
            received.close();
            Err(libc::EPROTO)
        }
    }
}

/// What has become of a socket.
pub(crate) enum Decided {
    /// It is the kernel's for this call.
    Kernel,
    Session(Session),
}

/// `bind`: an address that is not the kernel's may be the stack's.
pub(crate) fn bind(fd: c_int, entry: Entry, to: SocketAddr) -> Result<Decided, Errno> {
    let ip = to.ip();
    if ip.is_unspecified() || ip.is_loopback() || ip.is_multicast() || rules::is_kernels(ip) {
        if !ip.is_unspecified() {
            leave(fd, entry);
        }
        return Ok(Decided::Kernel);
    }
    let kind = if entry.kind == Kind::OpenStream { libc::SOCK_STREAM } else { libc::SOCK_DGRAM };
    let mut question = Question::new(Call::Bind, NONE, kind as u32);
    question.local = Some(to);
    match ask_session(fd, &question, &[]) {
        Ok(found) => become_session(fd, entry, found).map(Decided::Session),
        // Then it is nobody's, which the kernel says in its own words.
        Err(libc::EADDRNOTAVAIL) => {
            leave(fd, entry);
            Ok(Decided::Kernel)
        }
        Err(error) => Err(error),
    }
}

/// `listen` at all addresses: the kernel's listener is the stack's, too. The kernel listens already.
pub(crate) fn listen(fd: c_int, entry: Entry, backlog: c_int) -> Result<Decided, Errno> {
    let local = address::of_kernel(fd).filter(|local| local.ip().is_unspecified());
    let Some(local) = local.filter(|local| rules::may_listen(entry.kind, local.port())) else {
        leave(fd, entry);
        return Ok(Decided::Kernel);
    };
    let share = sys::int_option(fd, libc::SOL_SOCKET, libc::SO_REUSEPORT) != 0;
    let value = backlog_of(backlog) | if share { SHARE_PORT } else { 0 };
    let mut question = Question::new(Call::Listen, NONE, value);
    question.local = Some(local);
    match ask_session(fd, &question, &[fd]) {
        Ok(found) => become_session(fd, entry, found).map(Decided::Session),
        // Without a stack the kernel's listener is what there is.
        Err(libc::ENETDOWN | libc::ECONNREFUSED | libc::ENOENT | libc::EACCES) => {
            leave(fd, entry);
            Ok(Decided::Kernel)
        }
        Err(error) => Err(error),
    }
}

/// A backlog as programs give it.
pub(crate) fn backlog_of(backlog: c_int) -> u32 {
    // As the kernel: a negative one is as large as can be.
    u32::try_from(backlog).unwrap_or(u32::from(u16::MAX)).min(u16::MAX.into())
}

/// `connect`, or the first datagram to somewhere.
pub(crate) fn connect(fd: c_int, entry: Entry, to: SocketAddr) -> Result<Decided, Errno> {
    if !rules::may_reach(entry.kind, to) {
        leave(fd, entry);
        return Ok(Decided::Kernel);
    }
    let bound = address::of_kernel(fd).filter(|local| local.port() != 0);
    let question = match entry.kind {
        Kind::OpenStream => {
            let mut question = Question::new(Call::Connect, NONE, 0);
            (question.local, question.remote) = (bound, Some(to));
            question
        }
        _ => {
            let mut question = Question::new(Call::Bind, NONE, libc::SOCK_DGRAM as u32);
            let any = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);
            (question.local, question.remote) = (Some(bound.unwrap_or(any)), Some(to));
            question
        }
    };
    match ask_session(fd, &question, &[]) {
        Ok(found) => become_session(fd, entry, found).map(Decided::Session),
        // The stack has no way there, or there is no stack.
        Err(libc::ENETUNREACH | libc::ENETDOWN | libc::ECONNREFUSED | libc::ENOENT | libc::EACCES) => {
            leave(fd, entry);
            Ok(Decided::Kernel)
        }
        Err(error) => Err(error),
    }
}

/// Waits for a session to be connected, unless it does not wait.
pub(crate) fn wait_connected(session: &Session) -> Result<(), Errno> {
    if session.slot.state() == state::CONNECTING && !session.is_over() {
        if session.is_nonblocking() {
            return Err(libc::EINPROGRESS);
        }
        match session.wait_gate() {
            Err(libc::EAGAIN) => return Err(libc::EINPROGRESS),
            Err(libc::EINTR) => return Err(libc::EINTR),
            _ => {}
        }
    }
    match session.take_error() {
        Some(error) => Err(error),
        None if session.slot.state() == state::CONNECTING => Err(libc::ECONNRESET),
        None => {
            session.slot.wishes.told.fetch_or(wish::OPEN_TOLD, Ordering::AcqRel);
            Ok(())
        }
    }
}

/// `connect` of a session.
pub(crate) fn connect_session(session: &Session, to: SocketAddr) -> Result<(), Errno> {
    let told = session.slot.wishes.told.load(Ordering::Relaxed);
    match session.slot.state() {
        state::BOUND => {
            let mut question =
                Question::new(Call::Connect, session.slot.identity.number.load(Ordering::Relaxed), 0);
            question.remote = Some(to);
            let (_, received) = link::ask(&question, &[])?;
            received.close();
            wait_connected(session)
        }
        state::CONNECTING if session.is_over() => Err(session.take_error().unwrap_or(libc::ECONNABORTED)),
        state::CONNECTING if session.is_nonblocking() => Err(libc::EALREADY),
        state::CONNECTING => wait_connected(session),
        state::OPEN if told & wish::OPEN_TOLD == 0 => wait_connected(session),
        _ => Err(libc::EISCONN),
    }
}

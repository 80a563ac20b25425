//! Decides which kernel sockets become sessions.
//!
//! A program's socket belongs to the kernel until its use is known: when it is bound to an address of the stack,
//! connects, listens, or sends its first datagram. Until then, the kernel socket stores its options. The end of the
//! session's pair then replaces all its descriptors, with the same flags, and the options are copied.

use core::ffi::c_int;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use core::sync::atomic::Ordering;

use offcore_session::message::{Call, NONE, ONLY_V6, Question, SHARE_ADDRESS, SHARE_PORT, SessionId};
use offcore_session::slot::{OPTIONS, Slot, state, wish};

use crate::address;
use crate::carried::{CarriedOptions, copy_times};
use crate::environment;
use crate::explain::{self, SocketDecision};
use crate::kernel_listeners;
use crate::link;
use crate::memberships::{self, Change, Group, MembershipOption};
use crate::polled;
use crate::rules;
use crate::session::{self, Session};
use crate::stream_options;
use crate::sys::{self, Errno};
use crate::table::{self, Entry, SocketKind, open};

/// The reason why a socket does not use the stack.
const NO_STACK: &str = "the stack cannot be reached";
const NO_ADDRESS: &str = "the network has assigned no address to the stack";
const RESERVED: &str = "ports below 1024 need root or the stack's user";

/// A constant of `linux/in6.h` that the crate libc lacks.
const IPV6_FREEBIND: c_int = 78;

/// Records a new kernel socket if it may become a session.
///
/// # Errors
/// `EMFILE` if the table has no room for the descriptor.
pub(crate) fn note_socket(fd: c_int, domain: c_int, kind: c_int, protocol: c_int) -> Result<(), Errno> {
    let is_ip = matches!(domain, libc::AF_INET | libc::AF_INET6);
    let kind = match (kind & !(libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK), protocol) {
        // MPTCP falls back to plain TCP, as on Linux with a peer without MPTCP.
        (libc::SOCK_STREAM, 0 | libc::IPPROTO_TCP | libc::IPPROTO_MPTCP) => SocketKind::OpenStream,
        (libc::SOCK_DGRAM, 0 | libc::IPPROTO_UDP) => SocketKind::OpenDatagrams,
        _ => return Ok(()),
    };
    if !is_ip || !link::is_used() {
        return Ok(());
    }
    let place = table::next_number();
    let known = table::set(fd, Some(Entry { kind, v6: domain == libc::AF_INET6, generation: 0, place }));
    if known || environment::falls_back() { Ok(()) } else { Err(libc::EMFILE) }
}

/// Records that the program has set an option of a socket.
pub(crate) fn note_options(fd: c_int, entry: Entry, option: (c_int, c_int)) {
    let congestion = option == (libc::IPPROTO_TCP, libc::TCP_CONGESTION);
    let bits = open::SET | if congestion { open::CONGESTION } else { 0 };
    if entry.generation & bits != bits {
        for fd in descriptors(fd, entry) {
            if let Some(found) = table::get(fd).filter(|found| found.is_same(entry)) {
                table::set(fd, Some(Entry { generation: found.generation | bits, ..found }));
            }
        }
    }
}

/// Leaves a socket to the kernel.
pub(crate) fn leave_to_kernel(fd: c_int, entry: Entry) {
    for fd in descriptors(fd, entry) {
        table::set(fd, None);
        polled::forget(fd);
    }
}

/// Returns all descriptors of a socket: `fd` and its duplicates.
fn descriptors(fd: c_int, entry: Entry) -> impl Iterator<Item = c_int> {
    let alone = entry.is_open() && entry.generation & open::SHARED == 0;
    let all = table::all(if alone { 0 } else { table::DESCRIPTORS });
    let same = move |(other, found): (c_int, Entry)| (found.is_same(entry) && other != fd).then_some(other);
    core::iter::once(fd).chain(all.filter_map(same))
}

/// Replaces an undecided socket by a session's descriptor. With `listens`, keeps its epoll registrations.
fn become_session(fd: c_int, entry: Entry, listens: bool, new_session: NewSession) -> Result<Session, Errno> {
    let kind = if entry.kind == SocketKind::OpenStream { SocketKind::Stream } else { SocketKind::Datagrams };
    let NewSession { place, fd: end } = new_session;
    let new = Entry::session(kind, entry.v6, place);
    // A stream without options gets the stack's defaults.
    let has = entry.kind == SocketKind::OpenDatagrams || entry.generation & open::SET != 0;
    let options = has.then(|| CarriedOptions::of(fd, entry, end));
    let buffers = has.then(|| stream_options::buffers(fd, entry.v6));
    if let Ok(owner @ 1..) = sys::fcntl(fd, libc::F_GETOWN, 0) {
        let _ = sys::fcntl(end, libc::F_SETOWN, owner);
    }
    for fd in descriptors(fd, entry) {
        let cloexec = sys::fcntl(fd, libc::F_GETFD, 0).unwrap_or(0) as c_int & libc::FD_CLOEXEC;
        let flags = if cloexec != 0 { libc::O_CLOEXEC } else { 0 };
        polled::carry_over(fd, listens || kind == SocketKind::Datagrams, || {
            if sys::dup3(end, fd, flags).is_ok() {
                table::set(fd, Some(new));
            }
        });
    }
    let _ = sys::close(end);
    let session = session::get(fd).ok_or(libc::EIO)?;
    session.slot.wishes.told.fetch_or(wish::ACCEPTED, Ordering::AcqRel);
    if let Some(options) = options {
        options.give(&session);
    }
    if let Some([send, receive]) = buffers {
        session.slot.wishes.send_buffer.store(send, Ordering::Relaxed);
        session.slot.wishes.receive_buffer.store(receive, Ordering::Relaxed);
        session.mark();
    }
    session.note_family();
    if session.is_datagrams() {
        memberships::join_stored_groups(entry, &session);
    }
    Ok(session)
}

/// A new session of the stack: its place, and the descriptor of its socket pair.
pub(crate) struct NewSession {
    pub(crate) place: SessionId,
    pub(crate) fd: c_int,
}

/// Requests a session that replaces `fd`. The descriptors `passed` go to the stack.
pub(crate) fn ask_session(fd: c_int, question: &Question, passed: &[c_int]) -> Result<NewSession, Errno> {
    // The stack makes a listener that is passed to it non-blocking.
    let status = sys::fcntl(fd, libc::F_GETFL, 0).unwrap_or(0) & libc::O_NONBLOCK as usize;
    let (answer, received) = link::ask(question, passed)?;
    match *received.as_slice() {
        [end] => {
            let _ = sys::fcntl(end, libc::F_SETFL, status);
            Ok(NewSession { place: answer.session, fd: end })
        }
        _ => {
            received.close();
            Err(libc::EPROTO)
        }
    }
}

/// The decision on a socket.
pub(crate) enum Decided {
    /// This call uses the kernel.
    Kernel,
    /// This call uses the kernel's loopback interface: the destination is an address of the stack that has no server
    /// there.
    Loopback(SocketAddr),
    Session(Session),
}

/// Handles `bind`: an address that the kernel does not have may be an address of the stack.
///
/// A stream stays with the kernel until it listens or connects: the kernel reserves the address for it, although the
/// address is not the kernel's, and detects conflicts. A datagram socket receives from now on.
pub(crate) fn bind(fd: c_int, entry: Entry, to: SocketAddr) -> Result<Decided, Errno> {
    let ip = to.ip();
    let any = ip.is_unspecified();
    // A datagram socket at all addresses, or at a group, moves to the stack if a rule names its port or if it joins a
    // group of the stack.
    let ours = (any || ip.is_multicast())
        && entry.kind == SocketKind::OpenDatagrams
        && (rules::may_listen(entry.kind, to.port()) || memberships::has_stored_groups(entry));
    if !ours && (any || ip.is_loopback() || ip.is_multicast() || rules::is_kernel_address(ip)?) {
        if !any {
            let why = if ip.is_loopback() || ip.is_multicast() { rules::NEVER } else { rules::KERNELS };
            explain::say("bind", entry.kind, to, SocketDecision::Kernel(why));
            leave_to_kernel(fd, entry);
        } else if entry.kind == SocketKind::OpenDatagrams && to.port() != 0 {
            explain::say(
                "bind",
                entry.kind,
                to,
                SocketDecision::Kernel("until it sends to a destination of the stack"),
            );
        }
        return Ok(Decided::Kernel);
    }
    if entry.kind == SocketKind::OpenDatagrams && !ours && !rules::may_bind(entry.kind, to.port()) {
        explain::say("bind", entry.kind, to, SocketDecision::Kernel(rules::NOT_NAMED));
        leave_to_kernel(fd, entry);
        return Ok(Decided::Kernel);
    }
    if entry.kind == SocketKind::OpenStream {
        if rules::names_port(entry.kind, to.port()).unwrap_or(true) {
            match can_bind(SocketAddr::new(ip, 0)) {
                Ok(()) => allow_any_address(fd),
                // The kernel returns the same error.
                Err(libc::EADDRNOTAVAIL) => {}
                Err(error) => return stack_error("bind", fd, entry, to, error),
            }
        }
        return Ok(Decided::Kernel);
    }
    match bind_datagrams(fd, entry, Some(to)) {
        Ok(session) => {
            explain::say("bind", entry.kind, to, SocketDecision::Stack);
            Ok(Decided::Session(session))
        }
        // Neither side has the address. The kernel returns the error.
        Err(libc::EADDRNOTAVAIL) => {
            explain::say("bind", entry.kind, to, SocketDecision::Kernel("not an address of the stack"));
            leave_to_kernel(fd, entry);
            Ok(Decided::Kernel)
        }
        Err(error) => stack_error("bind", fd, entry, to, error),
    }
}

/// Turns a datagram socket into a session with an address.
pub(crate) fn bind_datagrams(fd: c_int, entry: Entry, at: Option<SocketAddr>) -> Result<Session, Errno> {
    let mut question = Question::new(Call::Bind, NONE, kind_of_datagrams(fd, entry));
    question.local = Some(at.unwrap_or(SocketAddr::new(address::unspecified(entry.v6), 0)));
    let found = ask_session(fd, &question, &[])?;
    become_session(fd, entry, false, found)
}

/// Records a change of an undecided socket's memberships. If the kernel has no interface for a group, the stack may
/// have one. In this case the socket becomes a session at once, or joins the group when it becomes one.
///
/// # Errors
/// Returns the error of the kernel or of the stack.
///
/// # Safety
/// The option's `value` is null, or valid for reads of `len` bytes.
pub(crate) unsafe fn change_membership(
    fd: c_int,
    entry: Entry,
    option: &MembershipOption,
    changed: Result<(), Errno>,
) -> Result<(), Errno> {
    // SAFETY: the caller guarantees that `value` is null or has `len` readable bytes.
    let (Ok(group), change) = (unsafe { Group::of(option) }, option.change) else { return changed };
    if changed.is_ok() {
        memberships::note(entry, change, group);
        return Ok(());
    }
    if change == Change::Leave {
        return if memberships::leave(entry, group) { Ok(()) } else { changed };
    }
    let bound = address::of_kernel(fd);
    let port = bound.map_or(0, |bound| bound.port());
    let named = rules::names_port(entry.kind, port) != Some(false);
    if changed != Err(libc::ENODEV) || !named || !group.has_interface() {
        return changed;
    }
    if port == 0 {
        // A socket without a port receives nothing, and the program may still bind it.
        return memberships::store_group(entry, group);
    }
    let session = bind_datagrams(fd, entry, bound)?;
    explain::say("join", entry.kind, SocketAddr::new(group.address(), port), SocketDecision::Stack);
    // SAFETY: the caller guarantees that `value` is null or has `len` readable bytes.
    unsafe { memberships::set(&session, option) }
}

/// Returns the kind of session, including the options that affect address conflicts.
fn kind_of_datagrams(fd: c_int, entry: Entry) -> u32 {
    let bit = |bit, level, name| if sys::int_option(fd, level, name) != 0 { bit } else { 0 };
    let only_v6 = if entry.v6 { bit(ONLY_V6, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) } else { 0 };
    libc::SOCK_DGRAM as u32
        | bit(SHARE_ADDRESS, libc::SOL_SOCKET, libc::SO_REUSEADDR)
        | bit(SHARE_PORT, libc::SOL_SOCKET, libc::SO_REUSEPORT)
        | only_v6
}

/// Handles an error of the stack. The call fails. If the stack cannot be reached (`ENETDOWN`) or has no address
/// (`ENONET`), the call uses the kernel instead, provided that `--fallback kernel` permits it.
fn stack_error(call: &str, fd: c_int, entry: Entry, to: SocketAddr, error: Errno) -> Result<Decided, Errno> {
    let (error, why) = match error {
        libc::ENETDOWN => (error, NO_STACK),
        libc::ENONET => (libc::ENETUNREACH, NO_ADDRESS),
        _ => {
            if error == libc::EACCES && (1..1024).contains(&to.port()) && matches!(call, "bind" | "listen") {
                explain::say(call, entry.kind, to, SocketDecision::Nowhere(RESERVED));
            }
            return Err(error);
        }
    };
    if !environment::falls_back() {
        explain::say(call, entry.kind, to, SocketDecision::Nowhere(why));
        return Err(error);
    }
    explain::say(call, entry.kind, to, SocketDecision::Kernel(why));
    leave_to_kernel(fd, entry);
    Ok(Decided::Kernel)
}

/// Asks the stack to bind a session to an address, and drops that session. The stack first releases closed sessions at
/// this address.
///
/// # Errors
/// Returns the stack's error; `EADDRNOTAVAIL` if the stack does not have the address.
fn can_bind(to: SocketAddr) -> Result<(), Errno> {
    let mut question = Question::new(Call::Bind, NONE, libc::SOCK_STREAM as u32);
    question.local = Some(to);
    let (_, received) = link::ask(&question, &[])?;
    received.close();
    link::request_check();
    Ok(())
}

/// Makes the stack release an address that an undecided socket failed to bind. Returns whether the stack was asked.
pub(crate) fn release(fd: c_int, to: SocketAddr) -> bool {
    let open = table::get(fd)
        .is_some_and(|entry| matches!(entry.kind, SocketKind::OpenStream | SocketKind::OpenDatagrams));
    let asked = open && to.port() != 0 && link::is_linked();
    if asked {
        let _ = can_bind(to);
    }
    asked
}

/// Allows the kernel to bind a socket to an address that the kernel does not have.
fn allow_any_address(fd: c_int) {
    let one: c_int = 1;
    for (level, name) in [(libc::IPPROTO_IP, libc::IP_FREEBIND), (libc::IPPROTO_IPV6, IPV6_FREEBIND)] {
        // SAFETY: `one` lives until the call returns, and the length is its size.
        let _ = unsafe { sys::setsockopt(fd, level, name, (&raw const one).cast(), size_of::<c_int>()) };
    }
}

/// Handles `listen`, after the kernel's socket was made to listen. A listener at all addresses listens on the kernel
/// and on the stack. The kernel's socket reserves the port in any case.
pub(crate) fn listen(fd: c_int, entry: Entry, backlog: c_int) -> Result<Decided, Errno> {
    let Some(local) = address::of_kernel(fd) else {
        leave_to_kernel(fd, entry);
        return Ok(Decided::Kernel);
    };
    let any = local.ip().is_unspecified();
    let kept = match rules::may_listen(entry.kind, local.port()) {
        false => Some(rules::NOT_NAMED),
        true => (!any && rules::is_kernel_address(local.ip())?).then_some(rules::KERNELS),
    };
    if let Some(why) = kept {
        explain::say("listen", entry.kind, local, SocketDecision::Kernel(why));
        leave_to_kernel(fd, entry);
        return Ok(Decided::Kernel);
    }
    match ask_listener(fd, entry.v6, has_congestion_option(entry), local, backlog) {
        Ok(found) => {
            explain::say(
                "listen",
                entry.kind,
                local,
                if any { SocketDecision::Both } else { SocketDecision::Stack },
            );
            let kernel = link::duplicate_high(fd);
            let session = become_session(fd, entry, true, found)?;
            let _ = kernel.map(|kernel| kernel_listeners::keep(session.entry, session.slot, kernel));
            Ok(Decided::Session(session))
        }
        // With IP_FREEBIND, the kernel may get the address later.
        Err(libc::EADDRNOTAVAIL) => {
            explain::say("listen", entry.kind, local, SocketDecision::Kernel("not an address of the stack"));
            leave_to_kernel(fd, entry);
            Ok(Decided::Kernel)
        }
        Err(error) => stack_error("listen", fd, entry, local, error).inspect_err(|_| {
            // The kernel's socket already listens. It must stop listening, and keeps the address.
            let _ = sys::shutdown(fd, libc::SHUT_RD);
        }),
    }
}

/// Requests a listener, and passes the kernel's listening socket to the stack. `congestion`: the program has set the
/// congestion control.
fn ask_listener(
    kernel: c_int,
    v6: bool,
    congestion: bool,
    local: SocketAddr,
    backlog: c_int,
) -> Result<NewSession, Errno> {
    let share = sys::int_option(kernel, libc::SOL_SOCKET, libc::SO_REUSEPORT) != 0;
    let only_v6 = v6 && sys::int_option(kernel, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) != 0;
    let bit = |bit, on| if on { bit } else { 0 };
    let value = backlog_of(backlog) | bit(SHARE_PORT, share) | bit(ONLY_V6, only_v6);
    let mut question = Question::new(Call::Listen, NONE, value);
    question.local = Some(local);
    question.options = stream_options::of_kernel(kernel, v6, congestion).numbers();
    ask_session(kernel, &question, &[kernel])
}

/// Requests a listener from a new stack, with the address, options and backlog of the kernel's socket.
///
/// # Errors
/// Returns the stack's error.
pub(crate) fn listen_again(kernel: c_int, v6: bool) -> Result<NewSession, Errno> {
    let local = address::of_kernel(kernel).ok_or(libc::EADDRNOTAVAIL)?;
    // `struct tcp_info` begins with 8 bytes and 6 numbers. For a listener, the last one is the backlog.
    let info = sys::socket_option(kernel, libc::IPPROTO_TCP, libc::TCP_INFO, [0u32; 8]);
    let backlog = info.map_or(libc::SOMAXCONN, |info| info[7] as c_int);
    let listener = ask_listener(kernel, v6, false, local, backlog)?;
    explain::say(
        "listen",
        SocketKind::OpenStream,
        local,
        if local.ip().is_unspecified() { SocketDecision::Both } else { SocketDecision::Stack },
    );
    copy_times(kernel, listener.fd);
    Ok(listener)
}

/// Copies the options of a listener or datagram socket whose stack has ended.
pub(crate) fn copy_options(session: &Session, old: &Slot) {
    session.slot.kept.inherit(&old.kept);
    let (from, to) = (&old.wishes, &session.slot.wishes);
    for (from, to) in [
        (&from.options, &to.options),
        (&from.keep_idle, &to.keep_idle),
        (&from.keep_interval, &to.keep_interval),
        (&from.keep_count, &to.keep_count),
        (&from.told, &to.told),
        (&from.untold, &to.untold),
        (&from.send_buffer, &to.send_buffer),
        (&from.receive_buffer, &to.receive_buffer),
    ] {
        to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
    }
    session.mark();
}

/// Returns the options of a stream that differ from the defaults.
fn options_of(fd: c_int, entry: Entry) -> [u32; OPTIONS] {
    match entry.generation & open::SET {
        0 => [0; OPTIONS],
        _ => stream_options::of_kernel(fd, entry.v6, has_congestion_option(entry)).numbers(),
    }
}

/// Returns whether the program has set the congestion control of an undecided socket.
fn has_congestion_option(entry: Entry) -> bool {
    entry.generation & open::CONGESTION != 0
}

/// Converts a program's backlog.
pub(crate) fn backlog_of(backlog: c_int) -> u32 {
    // As in the kernel, a negative backlog selects the maximum.
    u32::try_from(backlog).unwrap_or(u32::from(u16::MAX)).min(u16::MAX.into())
}

/// Handles `connect`.
pub(crate) fn connect(fd: c_int, entry: Entry, to: SocketAddr) -> Result<Decided, Errno> {
    reach_destination(fd, entry, to, Call::Connect)
}

/// Handles the first datagram of a socket.
pub(crate) fn send(fd: c_int, entry: Entry, to: SocketAddr) -> Result<Decided, Errno> {
    reach_destination(fd, entry, to, Call::Bind)
}

/// Requests a session for a destination.
fn reach_destination(fd: c_int, entry: Entry, to: SocketAddr, call: Call) -> Result<Decided, Errno> {
    let name = if call == Call::Connect { "connect" } else { "send" };
    let say = |goes| explain::say(name, entry.kind, to, goes);
    if let Some(why) = rules::kernel_reason(entry.kind, to)? {
        say(SocketDecision::Kernel(why));
        leave_to_kernel(fd, entry);
        return Ok(Decided::Kernel);
    }
    // The stack reports its broadcast addresses when the process links itself. Errors of this step are reported below.
    if entry.kind == SocketKind::OpenDatagrams
        && link::ensure_linked().is_ok()
        && link::is_broadcast(to.ip())
        && sys::int_option(fd, libc::SOL_SOCKET, libc::SO_BROADCAST) == 0
    {
        return Err(libc::EACCES);
    }
    // IP_BIND_ADDRESS_NO_PORT binds an address without a port.
    let bound = address::of_kernel(fd).filter(|local| local.port() != 0 || !local.ip().is_unspecified());
    let question = match entry.kind {
        SocketKind::OpenStream => {
            let mut question = Question::new(Call::Connect, NONE, 0);
            (question.local, question.remote) = (bound, Some(to));
            question.options = options_of(fd, entry);
            question
        }
        _ => {
            let mut question = Question::new(call, NONE, kind_of_datagrams(fd, entry));
            let any = SocketAddr::new(address::unspecified(entry.v6), 0);
            (question.local, question.remote) = (Some(bound.unwrap_or(any)), Some(to));
            question
        }
    };
    match ask_session(fd, &question, &[]) {
        Ok(found) => {
            say(SocketDecision::Stack);
            become_session(fd, entry, false, found).map(Decided::Session)
        }
        Err(libc::EOPNOTSUPP) => {
            say(SocketDecision::Kernel("by loopback: an address of the stack"));
            leave_to_kernel(fd, entry);
            let here = match to.ip() {
                IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::LOCALHOST),
                IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::LOCALHOST),
            };
            Ok(Decided::Loopback(SocketAddr::new(here, to.port())))
        }
        Err(libc::ENETUNREACH) => {
            say(SocketDecision::Kernel("the stack has no route"));
            leave_to_kernel(fd, entry);
            Ok(Decided::Kernel)
        }
        Err(error) => stack_error(name, fd, entry, to, error),
    }
}

/// Returns the result of `connect` for a requested session.
pub(crate) fn connect_result(session: &Session) -> Result<(), Errno> {
    if session.is_nonblocking() { Err(libc::EINPROGRESS) } else { wait_connected(session) }
}

/// Waits until a session is connected.
fn wait_connected(session: &Session) -> Result<(), Errno> {
    if session.slot.state() == state::CONNECTING && !session.is_over() {
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
            session.wait_writable();
            Ok(())
        }
    }
}

/// Handles `connect` of a stream that is already a session.
pub(crate) fn connect_session(session: &Session, to: SocketAddr) -> Result<(), Errno> {
    let told = session.slot.wishes.told.load(Ordering::Relaxed);
    match session.slot.state() {
        state::CONNECTING if session.is_over() => {
            if let Some(error) = session.take_error() {
                return Err(error);
            }
            // The failed session becomes an undecided socket again.
            let entry = reopen(session)?;
            match connect(session.fd, entry, to)? {
                Decided::Session(session) => connect_result(&session),
                Decided::Kernel | Decided::Loopback(_) => Err(libc::ENETUNREACH),
            }
        }
        state::CONNECTING if session.is_nonblocking() => Err(libc::EALREADY),
        state::CONNECTING => wait_connected(session).map_err(|error| match error {
            libc::EINPROGRESS => libc::EALREADY,
            error => error,
        }),
        state::OPEN if told & wish::OPEN_TOLD == 0 => wait_connected(session),
        _ => Err(libc::EISCONN),
    }
}

/// Replaces a session that is over, or that the program disconnects, by a new kernel socket.
pub(crate) fn reopen(session: &Session) -> Result<Entry, Errno> {
    let family = if session.entry.v6 { libc::AF_INET6 } else { libc::AF_INET };
    let status = sys::fcntl(session.fd, libc::F_GETFL, 0)? & libc::O_NONBLOCK as usize;
    let args = [family as usize, (libc::SOCK_STREAM | libc::SOCK_CLOEXEC) as usize, 0, 0, 0, 0];
    // SAFETY: `socket` takes no addresses.
    let new = unsafe { sys::call(libc::SYS_socket, args) };
    let new = c_int::try_from(new).ok().filter(|new| *new >= 0).ok_or(libc::EMFILE)?;
    let _ = sys::fcntl(new, libc::F_SETFL, status);
    let wanted = session.slot.wishes.options.load(Ordering::Relaxed);
    for (bit, level, name) in [
        (wish::NO_DELAY, libc::IPPROTO_TCP, libc::TCP_NODELAY),
        (wish::CORK, libc::IPPROTO_TCP, libc::TCP_CORK),
        (wish::KEEP_ALIVE, libc::SOL_SOCKET, libc::SO_KEEPALIVE),
    ] {
        let on = c_int::from(wanted & bit != 0);
        // SAFETY: `on` lives until the call returns, and the length is its size.
        let _ = unsafe { sys::setsockopt(new, level, name, (&raw const on).cast(), size_of::<c_int>()) };
    }
    stream_options::set_on_kernel(session.slot, new);
    let _ = note_socket(new, family, libc::SOCK_STREAM, 0);
    let mut entry = table::get(new).ok_or(libc::EMFILE)?;
    entry.generation = open::SHARED | open::SET;
    table::set(new, None);
    for fd in descriptors(session.fd, session.entry) {
        let cloexec = sys::fcntl(fd, libc::F_GETFD, 0).unwrap_or(0) as c_int & libc::FD_CLOEXEC;
        if sys::dup3(new, fd, if cloexec != 0 { libc::O_CLOEXEC } else { 0 }).is_ok() {
            table::set(fd, Some(entry));
        }
    }
    let _ = sys::close(new);
    link::request_check();
    Ok(entry)
}

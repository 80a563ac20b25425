//! The process's link to the stack: its socket, the pages that both sides share, and the segments.
//!
//! A process links itself when it first needs the stack. A forked child has its parent's descriptors and mappings, but
//! the stack must be able to distinguish them. The page that identifies the process is therefore zero in a child, and
//! the child requests its own socket over the inherited one. This works even if the child can no longer connect, for
//! example after a change of user or root. It does not work in a sandbox, so a child with sessions is linked at once
//! ([`link_child`]).

mod exchange;

use core::ffi::{c_int, c_uint};
use core::net::IpAddr;
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use offcore_session::control::{Control, Owner, Processes};
use offcore_session::message::{Answer, Call, Question};
use offcore_session::slot::Slot;
use offcore_session::{Segments, place::SEGMENT};

use crate::environment;
use crate::kernel_listeners;
use crate::lost;
use crate::report;
use crate::step::{Failed, Step};
use crate::sys::{self, Errno};
use crate::table::{self, Entry, SocketKind};
use exchange::ReceivedWelcome;
pub(crate) use exchange::{duplicate_high, receive, rights};

/// Maximum number of segments of an application.
const MOST: usize = 64;

/// State of this process only: a page that is zero in a forked child.
#[repr(C)]
struct Own {
    /// The identity of this process in locks, or 0 while it is not linked.
    owner: AtomicU32,
    pid: AtomicU32,
    /// Held while the socket is in use.
    lock: AtomicU32,
    /// Held during access to the epoll registrations.
    registrations: AtomicU32,
    /// Held while a listener moves to another stack.
    listeners: AtomicU32,
}

static OWN: AtomicPtr<Own> = AtomicPtr::new(ptr::null_mut());
/// The socket, and the event that wakes the stack; -1 without a link.
static SOCKET: AtomicI32 = AtomicI32::new(-1);
static EVENT: AtomicI32 = AtomicI32::new(-1);
static CONTROL: AtomicPtr<Control> = AtomicPtr::new(ptr::null_mut());
static PROCESSES: AtomicPtr<Processes> = AtomicPtr::new(ptr::null_mut());
/// Process ID of the stack in this PID namespace.
static STACK: AtomicI32 = AtomicI32::new(0);
/// The application instance of this process.
static INSTANCE: AtomicU64 = AtomicU64::new(0);
static GATE: AtomicU32 = AtomicU32::new(1);
static SEGMENTS: [(AtomicPtr<u8>, AtomicUsize); MOST] =
    [const { (AtomicPtr::new(ptr::null_mut()), AtomicUsize::new(0)) }; MOST];
/// Whether `offcore exec` has named a stack.
static USED: AtomicBool = AtomicBool::new(false);

/// The reason why this process cannot be linked, or 0.
static UNUSABLE: AtomicI32 = AtomicI32::new(0);

/// The segments of this process's application.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mapped;

// SAFETY: segments are never unmapped.
unsafe impl Segments for Mapped {
    #[inline]
    fn segment(&self, number: usize) -> Option<(NonNull<u8>, usize)> {
        let (address, len) = SEGMENTS.get(number)?;
        Some((NonNull::new(address.load(Ordering::Acquire))?, len.load(Ordering::Relaxed)))
    }
}

/// Initializes the link. Called once, before the program begins.
pub(crate) fn begin() {
    static NO_PAGE: Own = Own {
        owner: AtomicU32::new(0),
        pid: AtomicU32::new(0),
        lock: AtomicU32::new(0),
        registrations: AtomicU32::new(0),
        listeners: AtomicU32::new(0),
    };
    let page = sys::map(-1, 4096, true).and_then(|page| sys::wipe_on_fork(page, 4096).map(|_| page));
    match page {
        Ok(page) => {
            OWN.store(page.cast(), Ordering::Release);
            own().inspect(|own| own.pid.store(sys::pid(), Ordering::Relaxed));
        }
        // The stack could not distinguish a child from its parent, so neither of them is linked.
        Err(error) => {
            OWN.store((&raw const NO_PAGE).cast_mut(), Ordering::Release);
            UNUSABLE.store(error, Ordering::Relaxed);
        }
    }
    USED.store(true, Ordering::Release);
}

/// Returns whether a stack is configured.
#[inline]
pub(crate) fn is_used() -> bool {
    USED.load(Ordering::Relaxed)
}

fn own() -> Option<&'static Own> {
    // SAFETY: the pointer is null, or points to a page that is never unmapped and consists of atomics, initially zero.
    unsafe { OWN.load(Ordering::Acquire).as_ref() }
}

/// Returns whether this process or its parent was linked to the stack.
pub(crate) fn is_linked() -> bool {
    SOCKET.load(Ordering::Relaxed) >= 0
}

/// Returns the identity of this process in locks. If it can no longer be linked, its locks look like locks of a dead
/// process.
#[inline]
pub(crate) fn owner() -> u32 {
    let linked = own().map_or(0, |own| own.owner.load(Ordering::Relaxed));
    if linked != 0 { linked } else { link_late() }
}

#[cold]
fn link_late() -> u32 {
    let _ = ensure_linked();
    let linked = own().map_or(0, |own| own.owner.load(Ordering::Relaxed));
    if linked != 0 { linked } else { u32::MAX >> 1 }
}

/// Returns whether the holder of a lock is alive.
pub(crate) fn is_holder_alive(owner: Owner) -> bool {
    // SAFETY: the pointer is null, or points to pages that are never unmapped and consist of atomics.
    unsafe { PROCESSES.load(Ordering::Acquire).as_ref() }.is_some_and(|processes| processes.lives(owner))
}

/// Returns whether the stack of the current sessions has ended.
#[inline]
pub(crate) fn has_stack_ended() -> bool {
    // SAFETY: the pointer is null, or points to pages that are never unmapped and consist of atomics.
    unsafe { PROCESSES.load(Ordering::Acquire).as_ref() }.is_some_and(Processes::has_stack_ended)
}

/// Returns whether an address is 255.255.255.255 or the broadcast address of a network of the stack.
pub(crate) fn is_broadcast(address: IpAddr) -> bool {
    let IpAddr::V4(address) = address else { return false };
    // SAFETY: the pointer is null, or points to pages that are never unmapped and consist of atomics.
    let page = unsafe { PROCESSES.load(Ordering::Acquire).as_ref() };
    address.is_broadcast() || page.is_some_and(|page| page.is_broadcast(address))
}

/// Returns whether this is the linked process, and not its `vfork` child, which shares its memory.
pub(crate) fn is_self() -> bool {
    // The page of a forked child that is not linked yet is zero.
    own().is_none_or(|own| [0, sys::pid()].contains(&own.pid.load(Ordering::Relaxed)))
}

/// Returns the number of bytes that close a gate.
pub(crate) fn gate() -> u32 {
    GATE.load(Ordering::Relaxed)
}

/// Returns whether a descriptor belongs to the library. The program must not close such a descriptor.
pub(crate) fn is_own(fd: c_int) -> bool {
    fd >= 0 && own_descriptors().any(|own| own == fd)
}

fn own_descriptors() -> impl Iterator<Item = c_int> {
    let linked = [SOCKET.load(Ordering::Relaxed), EVENT.load(Ordering::Relaxed)];
    linked.into_iter().filter(|fd| *fd >= 0).chain(kernel_listeners::own_descriptors())
}

/// Returns the lowest of the library's own descriptors that is at least `first`.
pub(crate) fn next_own(first: c_uint) -> Option<c_uint> {
    own_descriptors().map(|fd| fd as c_uint).filter(|fd| *fd >= first).min()
}

/// Moves a descriptor of the library away from a number that the program needs. Returns whether this succeeded.
pub(crate) fn move_away(fd: c_int) -> bool {
    let Some(own) = own() else { return false };
    let _signals = sys::Blocked::new();
    let _lock = ProcessLock::new(&own.lock);
    let to = || duplicate_high(fd);
    if let Some(moved) = kernel_listeners::move_away(fd, to) {
        return moved;
    }
    let Ok(moved) = to() else { return false };
    for this in [&SOCKET, &EVENT] {
        let _ = this.compare_exchange(fd, moved, Ordering::AcqRel, Ordering::Relaxed);
    }
    true
}

fn control() -> Option<&'static Control> {
    // SAFETY: the pointer is null, or points to pages that are never unmapped and consist of atomics.
    unsafe { CONTROL.load(Ordering::Acquire).as_ref() }
}

/// Marks a session, and wakes the stack if it sleeps.
#[inline]
pub(crate) fn mark(number: u32) {
    let Some(control) = control() else { return };
    control.mark(number);
    if control.ring() {
        sys::wake(EVENT.load(Ordering::Relaxed));
    }
}

/// Makes the stack check its sockets.
pub(crate) fn request_check() {
    let Some(control) = control() else { return };
    control.look();
    if control.ring() {
        sys::wake(EVENT.load(Ordering::Relaxed));
    }
}

/// Links this process, if it is not linked.
///
/// # Errors
/// `ENETDOWN` if the stack cannot be reached. Other errors mean that the process lacks descriptors or memory.
pub(crate) fn ensure_linked() -> Result<(), Errno> {
    let own = own().ok_or(libc::ENETDOWN)?;
    if own.owner.load(Ordering::Acquire) != 0 {
        return Ok(());
    }
    let _signals = sys::Blocked::new();
    let _lock = ProcessLock::new(&own.lock);
    if own.owner.load(Ordering::Acquire) != 0 {
        return Ok(());
    }
    link(own).map_err(|Failed { step, error }| {
        report::no_stack(step, error);
        match error {
            libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::ENOBUFS if step != Step::Welcome => error,
            _ => libc::ENETDOWN,
        }
    })
}

/// Links this process to the present stack, if it is not linked.
///
/// # Errors
/// Returns the step that failed, and its errno.
pub(crate) fn renew() -> Result<(), (Step, Errno)> {
    let own = own().ok_or((Step::Page, libc::ENOMEM))?;
    let _lock = ProcessLock::new(&own.lock);
    let socket = SOCKET.load(Ordering::Relaxed);
    if own.owner.load(Ordering::Acquire) != 0 {
        if !sys::has_hung_up(socket) {
            return Ok(());
        }
        unlink(own, socket);
    }
    link(own).map_err(|Failed { step, error }| (step, error))
}

/// Returns whether the stack to which this process or its parent is linked is alive.
pub(crate) fn is_alive() -> bool {
    let socket = SOCKET.load(Ordering::Relaxed);
    socket >= 0 && !sys::has_hung_up(socket)
}

/// Links this process, which must not be linked.
fn link(own: &Own) -> Result<(), Failed> {
    let unusable = UNUSABLE.load(Ordering::Relaxed);
    if unusable != 0 {
        return Err(Failed { step: Step::Page, error: unusable });
    }
    let inherited = SOCKET.load(Ordering::Relaxed);
    let welcome =
        if inherited >= 0 { exchange::fork(inherited) } else { Err(Step::Message.failed(libc::EBADF)) };
    // If the parent's stack is gone, another one may be available.
    let (socket, received) = welcome.or_else(|_| exchange::connect())?;
    apply_welcome(own, socket, received, inherited).map_err(|error| Step::Message.failed(error))
}

/// Links a child whose parent is linked and has sessions. Without sessions, the child may never need the stack.
pub(crate) fn link_child() {
    if is_linked()
        && table::all(table::DESCRIPTORS)
            .any(|(_, entry)| matches!(entry.kind, SocketKind::Stream | SocketKind::Datagrams))
    {
        let _ = ensure_linked();
    }
}

/// Processes the welcome message of the stack.
fn apply_welcome(own: &Own, socket: c_int, received: ReceivedWelcome, inherited: c_int) -> Result<(), Errno> {
    let ReceivedWelcome { welcome, descriptors, .. } = received;
    let [control, processes, event, segments @ ..] = descriptors.as_slice() else {
        descriptors.close();
        let _ = sys::close(socket);
        return Err(libc::EPROTO);
    };
    if inherited < 0
        && let Some(peer) = peer_of(socket)
    {
        STACK.store(peer.pid, Ordering::Relaxed);
    }
    let known = welcome.instance == INSTANCE.load(Ordering::Relaxed);
    if !known || CONTROL.load(Ordering::Relaxed).is_null() {
        // This is another application instance than before: all sessions of the old one are dead.
        forget_sessions();
        let control = sys::map(*control, size_of::<Control>(), true)?;
        let processes = sys::map(*processes, size_of::<Processes>(), false)?;
        CONTROL.store(control.cast(), Ordering::Release);
        PROCESSES.store(processes.cast(), Ordering::Release);
        map_segments(0, segments);
        let moved = exchange::duplicate_high_or_any(*event)?;
        let old = EVENT.swap(moved, Ordering::AcqRel);
        if old >= 0 {
            let _ = sys::close(old);
        }
    } else {
        map_segments(0, segments);
    }
    descriptors.close();
    GATE.store(welcome.gate.clamp(1, 64), Ordering::Relaxed);
    INSTANCE.store(welcome.instance, Ordering::Relaxed);
    environment::set_key(&welcome.key);
    let moved = match inherited {
        0.. => exchange::replace(socket, inherited)?,
        _ => exchange::duplicate_high_or_any(socket)?,
    };
    let _ = sys::close(socket);
    SOCKET.store(moved, Ordering::Release);
    own.pid.store(sys::pid(), Ordering::Relaxed);
    own.owner.store(welcome.owner, Ordering::Release);
    Ok(())
}

/// Marks the sessions of a stack that is gone. Their descriptors remain sockets whose peers are closed.
fn forget_sessions() {
    kernel_listeners::replace_entries();
    for (fd, entry) in table::all(table::DESCRIPTORS) {
        let slot =
            entry.slot().filter(|_| entry.kind == SocketKind::Datagrams).and_then(|place| Mapped.slot(place));
        match (entry.kind, slot) {
            (SocketKind::Datagrams, Some(slot)) => drop(mark_lost(fd, entry, slot)),
            (SocketKind::Stream | SocketKind::Datagrams, _) => {
                table::set(fd, Some(Entry { kind: SocketKind::Dead, ..entry }));
            }
            _ => {}
        }
    }
    for (address, _) in &SEGMENTS {
        address.store(ptr::null_mut(), Ordering::Release);
    }
}

/// Marks a datagram socket whose stack is gone. Returns its new entry.
pub(crate) fn mark_lost(fd: c_int, entry: Entry, slot: &'static Slot) -> Entry {
    lost::store_slot(fd, entry, slot, INSTANCE.load(Ordering::Relaxed))
}

/// Maps segments that are not mapped, starting at number `first`.
fn map_segments(first: usize, descriptors: &[c_int]) {
    for (fd, (address, mapped)) in descriptors.iter().zip(SEGMENTS.iter().skip(first)) {
        let len = sys::file_len(*fd).filter(|len| *len <= SEGMENT);
        if let Some(len) = len
            && address.load(Ordering::Acquire).is_null()
            && let Ok(at) = sys::map(*fd, len, true)
        {
            mapped.store(len, Ordering::Relaxed);
            address.store(at, Ordering::Release);
        }
    }
}

/// Maps segments that the stack has added, until `place` is mapped. Returns whether it is mapped.
#[cold]
pub(crate) fn map_more(place: u32) -> bool {
    let there = |number: usize| Mapped.segment(number).is_some();
    let wanted = place as usize / (SEGMENT / offcore_session::slot::SLOT);
    let mapped = (0..MOST).take_while(|number| there(*number)).count();
    if mapped <= wanted {
        more_segments(mapped);
    }
    there(wanted)
}

/// Maps segments that the stack has added beyond the first `mapped` ones.
fn more_segments(mapped: usize) {
    if let Ok((_, descriptors)) = ask(&Question::new(Call::Segments, mapped as u32, 0), &[]) {
        map_segments(mapped, descriptors.as_slice());
        descriptors.close();
    }
}

/// Maps all segments that the stack has added.
#[cold]
pub(crate) fn map_all() {
    more_segments((0..MOST).take_while(|number| Mapped.segment(*number).is_some()).count());
}

/// Asks the stack a question and passes descriptors. The caller closes or keeps the descriptors of the answer. An error
/// in the answer is returned as an error.
pub(crate) fn ask(
    question: &Question,
    descriptors: &[c_int],
) -> Result<(Answer, exchange::Descriptors), Errno> {
    let mut last = libc::ENETDOWN;
    // The second attempt finds a stack that was restarted.
    for _ in 0..2 {
        ensure_linked()?;
        let own = own().ok_or(libc::ENETDOWN)?;
        let _signals = sys::Blocked::new();
        let _lock = ProcessLock::new(&own.lock);
        let socket = SOCKET.load(Ordering::Relaxed);
        match exchange::ask(socket, question, descriptors, request_check) {
            Ok((answer, received)) if answer.error == 0 => return Ok((answer, received)),
            Ok((answer, received)) => {
                received.close();
                return Err(answer.error as Errno);
            }
            // The answer has arrived, but the process has no room for its descriptors, which were closed.
            Err(libc::EMFILE) => return Err(libc::EMFILE),
            // The user has too many descriptors in flight.
            Err(libc::ETOOMANYREFS) => return Err(libc::ENOBUFS),
            Err(error) => {
                unlink(own, socket);
                last = error;
                // A stack that does not answer would not answer the second attempt.
                if error == libc::EAGAIN {
                    break;
                }
            }
        }
    }
    report::no_stack(Step::Message, last);
    Err(libc::ENETDOWN)
}

/// Unlinks this process after the stack was lost.
fn unlink(own: &Own, socket: c_int) {
    own.owner.store(0, Ordering::Release);
    SOCKET.store(-1, Ordering::Release);
    let _ = sys::close(socket);
}

/// Returns whether the peer of a Unix socket is the stack.
pub(crate) fn is_stack_peer(fd: c_int) -> bool {
    peer_of(fd).is_some_and(|peer| peer.pid == STACK.load(Ordering::Relaxed))
}

/// Returns the credentials of the process that created the other end of a Unix socket.
fn peer_of(fd: c_int) -> Option<libc::ucred> {
    let zero = libc::ucred { pid: 0, uid: 0, gid: 0 };
    sys::socket_option(fd, libc::SOL_SOCKET, libc::SO_PEERCRED, zero)
}

/// Acquires the lock of the epoll registrations.
pub(crate) fn registrations() -> Option<ProcessLock<'static>> {
    own().map(|own| ProcessLock::new(&own.registrations))
}

/// Acquires the lock for listeners that move to a new stack.
pub(crate) fn listeners() -> Option<ProcessLock<'static>> {
    own().map(|own| ProcessLock::new(&own.listeners))
}

/// A lock between the threads of one process. It is always free in a new child.
pub(crate) struct ProcessLock<'a>(&'a AtomicU32);

impl<'a> ProcessLock<'a> {
    fn new(word: &'a AtomicU32) -> Self {
        while word.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_err() {
            sys::futex_wait(word.as_ptr(), 1);
        }
        Self(word)
    }
}

impl Drop for ProcessLock<'_> {
    fn drop(&mut self) {
        self.0.store(0, Ordering::Release);
        sys::futex_wake(self.0.as_ptr());
    }
}

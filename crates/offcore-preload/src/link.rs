//! The process's link to the stack: its socket, the pages that both sides share, and the segments.
//!
//! A process links itself when it first needs the stack. A forked child has its parent's descriptors and mappings, but must
//! not be taken for its parent: the page that says who this process is, is zeros in a child, and the child asks for a socket of
//! its own over the one that it has inherited. That works where it could not connect any more, after a change of user or root; but
//! not in a sandbox, so that it is done at once ([`forked`]) where it has sessions.

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
use crate::table::{self, Entry, Kind};
use exchange::Received;
pub(crate) use exchange::{far, receive, rights};

/// Segments of an application, at most.
const MOST: usize = 64;

/// What is this process's alone: a page that is zeros in a forked child.
#[repr(C)]
struct Own {
    /// This process in locks; 0 when it is not linked.
    owner: AtomicU32,
    pid: AtomicU32,
    /// Held while the socket is in use.
    lock: AtomicU32,
    /// Held while what epoll sets have is looked at.
    registrations: AtomicU32,
    /// Held while a listener moves to another stack.
    listeners: AtomicU32,
}

static OWN: AtomicPtr<Own> = AtomicPtr::new(ptr::null_mut());
/// The socket, and the event that wakes the stack; -1 for none.
static SOCKET: AtomicI32 = AtomicI32::new(-1);
static EVENT: AtomicI32 = AtomicI32::new(-1);
static CONTROL: AtomicPtr<Control> = AtomicPtr::new(ptr::null_mut());
static PROCESSES: AtomicPtr<Processes> = AtomicPtr::new(ptr::null_mut());
/// The stack's process, as this one sees it.
static STACK: AtomicI32 = AtomicI32::new(0);
/// Which application this process is of.
static INSTANCE: AtomicU64 = AtomicU64::new(0);
static GATE: AtomicU32 = AtomicU32::new(1);
static SEGMENTS: [(AtomicPtr<u8>, AtomicUsize); MOST] =
    [const { (AtomicPtr::new(ptr::null_mut()), AtomicUsize::new(0)) }; MOST];
/// `offcore exec` has named a stack.
static USED: AtomicBool = AtomicBool::new(false);

/// Why this process cannot be linked; 0 when it can.
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

/// Called once, before the program begins.
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
        // The stack could not distinguish a child from its parent: neither is linked.
        Err(error) => {
            OWN.store((&raw const NO_PAGE).cast_mut(), Ordering::Release);
            UNUSABLE.store(error, Ordering::Relaxed);
        }
    }
    USED.store(true, Ordering::Release);
}

/// Whether there is a stack to link to.
#[inline]
pub(crate) fn is_used() -> bool {
    USED.load(Ordering::Relaxed)
}

fn own() -> Option<&'static Own> {
    // SAFETY: null, or a page that is mapped for ever and has no bytes but atomics, zeros at first.
    unsafe { OWN.load(Ordering::Acquire).as_ref() }
}

/// Whether this process, or the one that it was forked from, has had to do with the stack.
pub(crate) fn is_linked() -> bool {
    SOCKET.load(Ordering::Relaxed) >= 0
}

/// This process as it stands in locks. Where it cannot be linked any more its locks are as those of a process that is gone.
#[inline]
pub(crate) fn owner() -> u32 {
    let linked = own().map_or(0, |own| own.owner.load(Ordering::Relaxed));
    if linked != 0 { linked } else { link_late() }
}

#[cold]
fn link_late() -> u32 {
    let _ = ensure();
    let linked = own().map_or(0, |own| own.owner.load(Ordering::Relaxed));
    if linked != 0 { linked } else { u32::MAX >> 1 }
}

/// Whether the holder of a lock lives.
pub(crate) fn lives(owner: Owner) -> bool {
    // SAFETY: null, or pages that are mapped for ever and have no bytes but atomics.
    unsafe { PROCESSES.load(Ordering::Acquire).as_ref() }.is_some_and(|processes| processes.lives(owner))
}

/// Whether an address is a broadcast address: of a network of the stack, or 255.255.255.255.
pub(crate) fn is_broadcast(address: IpAddr) -> bool {
    let IpAddr::V4(address) = address else { return false };
    // SAFETY: as above.
    let page = unsafe { PROCESSES.load(Ordering::Acquire).as_ref() };
    address.is_broadcast() || page.is_some_and(|page| page.is_broadcast(address))
}

/// Whether this is the process that was linked, and not its child by `vfork`, which shares its memory.
pub(crate) fn is_self() -> bool {
    // A forked child that is not linked yet has zeros.
    own().is_none_or(|own| [0, sys::pid()].contains(&own.pid.load(Ordering::Relaxed)))
}

/// Bytes that close a gate.
pub(crate) fn gate() -> u32 {
    GATE.load(Ordering::Relaxed)
}

/// The library's own descriptors: the program must not close them.
pub(crate) fn is_own(fd: c_int) -> bool {
    fd >= 0 && own_descriptors().any(|own| own == fd)
}

fn own_descriptors() -> impl Iterator<Item = c_int> {
    let linked = [SOCKET.load(Ordering::Relaxed), EVENT.load(Ordering::Relaxed)];
    linked.into_iter().filter(|fd| *fd >= 0).chain(kernel_listeners::own_descriptors())
}

/// The lowest of the library's own descriptors from `first` on.
pub(crate) fn next_own(first: c_uint) -> Option<c_uint> {
    own_descriptors().map(|fd| fd as c_uint).filter(|fd| *fd >= first).min()
}

/// The program wants the number of one of the library's own descriptors. Whether it has been moved.
pub(crate) fn move_away(fd: c_int) -> bool {
    let Some(own) = own() else { return false };
    let _signals = sys::Blocked::new();
    let _lock = Held::new(&own.lock);
    let to = || far(fd);
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
    // SAFETY: null, or pages that are mapped for ever and have no bytes but atomics.
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

/// Has the stack look at its sockets.
pub(crate) fn look() {
    let Some(control) = control() else { return };
    control.look();
    if control.ring() {
        sys::wake(EVENT.load(Ordering::Relaxed));
    }
}

/// Links this process, if it is not.
///
/// # Errors
/// `ENETDOWN`: the stack cannot be reached. Others: the process lacks descriptors or memory.
pub(crate) fn ensure() -> Result<(), Errno> {
    let own = own().ok_or(libc::ENETDOWN)?;
    if own.owner.load(Ordering::Acquire) != 0 {
        return Ok(());
    }
    let _signals = sys::Blocked::new();
    let _lock = Held::new(&own.lock);
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
/// The step that failed, and its errno.
pub(crate) fn renew() -> Result<(), (Step, Errno)> {
    let own = own().ok_or((Step::Page, libc::ENOMEM))?;
    let _lock = Held::new(&own.lock);
    let socket = SOCKET.load(Ordering::Relaxed);
    if own.owner.load(Ordering::Acquire) != 0 {
        if !sys::has_hung_up(socket) {
            return Ok(());
        }
        unlink(own, socket);
    }
    link(own).map_err(|Failed { step, error }| (step, error))
}

/// Whether the stack is alive that this process or its parent is linked to.
pub(crate) fn is_alive() -> bool {
    let socket = SOCKET.load(Ordering::Relaxed);
    socket >= 0 && !sys::has_hung_up(socket)
}

/// Links this process. It must not be linked.
fn link(own: &Own) -> Result<(), Failed> {
    let unusable = UNUSABLE.load(Ordering::Relaxed);
    if unusable != 0 {
        return Err(Failed { step: Step::Page, error: unusable });
    }
    let inherited = SOCKET.load(Ordering::Relaxed);
    let welcome =
        if inherited >= 0 { exchange::fork(inherited) } else { Err(Step::Message.failed(libc::EBADF)) };
    // Where the parent's stack is gone there may be another one.
    let (socket, received) = welcome.or_else(|_| exchange::connect())?;
    take(own, socket, received, inherited).map_err(|error| Step::Message.failed(error))
}

/// Links a child whose parent is linked and has given it sessions. Without sessions it may never need the stack.
pub(crate) fn forked() {
    if is_linked()
        && table::all(table::DESCRIPTORS)
            .any(|(_, entry)| matches!(entry.kind, Kind::Stream | Kind::Datagrams))
    {
        let _ = ensure();
    }
}

/// The stack has welcomed this process.
fn take(own: &Own, socket: c_int, received: Received, inherited: c_int) -> Result<(), Errno> {
    let Received { welcome, descriptors, .. } = received;
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
        // Another application than before: what this process has of the old one is dead.
        forget_sessions();
        let control = sys::map(*control, size_of::<Control>(), true)?;
        let processes = sys::map(*processes, size_of::<Processes>(), false)?;
        CONTROL.store(control.cast(), Ordering::Release);
        PROCESSES.store(processes.cast(), Ordering::Release);
        map_segments(0, segments);
        let moved = exchange::away(*event)?;
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
        _ => exchange::away(socket)?,
    };
    let _ = sys::close(socket);
    SOCKET.store(moved, Ordering::Release);
    own.pid.store(sys::pid(), Ordering::Relaxed);
    own.owner.store(welcome.owner, Ordering::Release);
    Ok(())
}

/// Sessions of a stack that is gone stay sockets whose other end is closed.
fn forget_sessions() {
    kernel_listeners::forget_names();
    for (fd, entry) in table::all(table::DESCRIPTORS) {
        let slot =
            entry.slot().filter(|_| entry.kind == Kind::Datagrams).and_then(|place| Mapped.slot(place));
        match (entry.kind, slot) {
            (Kind::Datagrams, Some(slot)) => drop(lose(fd, entry, slot)),
            (Kind::Stream | Kind::Datagrams, _) => {
                table::set(fd, Some(Entry { kind: Kind::Dead, ..entry }));
            }
            _ => {}
        }
    }
    for (address, _) in &SEGMENTS {
        address.store(ptr::null_mut(), Ordering::Release);
    }
}

/// The stack of a datagram socket is gone. Returns its new entry.
pub(crate) fn lose(fd: c_int, entry: Entry, slot: &'static Slot) -> Entry {
    lost::keep(fd, entry, slot, INSTANCE.load(Ordering::Relaxed))
}

/// Maps segments that are not mapped, from number `first` on.
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

/// Maps what the stack has added, until the place is mapped. Whether it is.
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

/// Maps what the stack has added beyond the first `mapped` segments.
fn more_segments(mapped: usize) {
    if let Ok((_, descriptors)) = ask(&Question::new(Call::Segments, mapped as u32, 0), &[]) {
        map_segments(mapped, descriptors.as_slice());
        descriptors.close();
    }
}

/// Maps what the stack has added since the last time.
#[cold]
pub(crate) fn map_all() {
    more_segments((0..MOST).take_while(|number| Mapped.segment(*number).is_some()).count());
}

/// Asks the stack, with descriptors. The caller closes or keeps those of the answer; an error of the stack's is an error.
pub(crate) fn ask(
    question: &Question,
    descriptors: &[c_int],
) -> Result<(Answer, exchange::Descriptors), Errno> {
    let mut last = libc::ENETDOWN;
    // A stack that has been started again is found by the second try.
    for _ in 0..2 {
        ensure()?;
        let own = own().ok_or(libc::ENETDOWN)?;
        let _signals = sys::Blocked::new();
        let _lock = Held::new(&own.lock);
        let socket = SOCKET.load(Ordering::Relaxed);
        match exchange::ask(socket, question, descriptors, look) {
            Ok((answer, received)) if answer.error == 0 => return Ok((answer, received)),
            Ok((answer, received)) => {
                received.close();
                return Err(answer.error as Errno);
            }
            // The answer has come, and what was to come with it is closed. It is the program that has no room for more.
            Err(libc::EMFILE) => return Err(libc::EMFILE),
            // The user has too many descriptors in flight.
            Err(libc::ETOOMANYREFS) => return Err(libc::ENOBUFS),
            Err(error) => {
                unlink(own, socket);
                last = error;
                // One that does not answer would not answer again.
                if error == libc::EAGAIN {
                    break;
                }
            }
        }
    }
    report::no_stack(Step::Message, last);
    Err(libc::ENETDOWN)
}

/// The stack is gone.
fn unlink(own: &Own, socket: c_int) {
    own.owner.store(0, Ordering::Release);
    SOCKET.store(-1, Ordering::Release);
    let _ = sys::close(socket);
}

/// Whether the other end of a Unix socket is the stack's.
pub(crate) fn is_stacks(fd: c_int) -> bool {
    peer_of(fd).is_some_and(|peer| peer.pid == STACK.load(Ordering::Relaxed))
}

/// Whose process has made the other end of a Unix socket.
fn peer_of(fd: c_int) -> Option<libc::ucred> {
    let zero = libc::ucred { pid: 0, uid: 0, gid: 0 };
    sys::socket_option(fd, libc::SOL_SOCKET, libc::SO_PEERCRED, zero)
}

/// The lock of the epoll registrations.
pub(crate) fn registrations() -> Option<Held<'static>> {
    own().map(|own| Held::new(&own.registrations))
}

/// The lock of listeners that move to a new stack.
pub(crate) fn listeners() -> Option<Held<'static>> {
    own().map(|own| Held::new(&own.listeners))
}

/// A lock of one process's threads. A child has it open, whoever of its parent's threads had it.
pub(crate) struct Held<'a>(&'a AtomicU32);

impl<'a> Held<'a> {
    fn new(word: &'a AtomicU32) -> Self {
        while word.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_err() {
            sys::futex_wait(word.as_ptr(), 1);
        }
        Self(word)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.store(0, Ordering::Release);
        sys::futex_wake(self.0.as_ptr());
    }
}

//! Multicast groups of datagram sockets: `IP_ADD_MEMBERSHIP`, `IPV6_JOIN_GROUP`, `MCAST_JOIN_GROUP` (ip(7), ipv6(7)),
//! and the interface of sent datagrams, `IP_MULTICAST_IF` and `IPV6_MULTICAST_IF`.
//!
//! The stack joins groups for a session. An undecided socket joins them on the kernel. The library stores all
//! memberships, so that a socket joins its groups again when it becomes a session, or moves to the next stack.

use core::cell::UnsafeCell;
use core::ffi::{c_int, c_void};
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use core::sync::atomic::{AtomicU32, Ordering};

use libc::{sockaddr_storage, socklen_t};
use offcore_session::message::{Call, Membership, NONE, Question};
use offcore_session::slot::Slot;

use crate::address;
use crate::datagram_options::{kept_name, read};
use crate::link;
use crate::session::Session;
use crate::sys::{self, Errno};
use crate::table::{self, Entry};

/// Constants of `linux/in.h` that the crate libc lacks.
const MCAST_JOIN_GROUP: c_int = 42;
const MCAST_LEAVE_GROUP: c_int = 45;
/// Names of stored values that are not options: the number of the socket in [`KNOWN`], and the index of
/// `IP_MULTICAST_IF`.
const NUMBER: (c_int, c_int) = (libc::IPPROTO_IP, 0xff01);
const INDEX: (c_int, c_int) = (libc::IPPROTO_IP, 0xff02);
/// Maximum number of stored memberships of all sockets. New ones replace the oldest.
const STORED: usize = 512;

/// A group, and its interface as the program names it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Group {
    group: IpAddr,
    index: u32,
    address: Ipv4Addr,
}

/// `struct group_req` of Linux.
#[repr(C)]
#[derive(Clone, Copy)]
struct GroupReq {
    interface: u32,
    group: sockaddr_storage,
}

/// The effect of an option.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    Join,
    Leave,
}

/// Options of memberships, by level and name.
pub(crate) const MEMBERSHIPS: [(c_int, c_int, Change); 8] = [
    (libc::IPPROTO_IP, libc::IP_ADD_MEMBERSHIP, Change::Join),
    (libc::IPPROTO_IP, libc::IP_DROP_MEMBERSHIP, Change::Leave),
    (libc::IPPROTO_IP, MCAST_JOIN_GROUP, Change::Join),
    (libc::IPPROTO_IP, MCAST_LEAVE_GROUP, Change::Leave),
    (libc::IPPROTO_IPV6, libc::IPV6_ADD_MEMBERSHIP, Change::Join),
    (libc::IPPROTO_IPV6, libc::IPV6_DROP_MEMBERSHIP, Change::Leave),
    (libc::IPPROTO_IPV6, MCAST_JOIN_GROUP, Change::Join),
    (libc::IPPROTO_IPV6, MCAST_LEAVE_GROUP, Change::Leave),
];

/// An option on memberships with the value that the program passes.
pub(crate) struct MembershipOption {
    level: c_int,
    name: c_int,
    pub(crate) change: Change,
    value: *const c_void,
    len: socklen_t,
}

impl MembershipOption {
    /// Returns `None` for other options. `value` is null, or refers to `len` bytes.
    pub(crate) fn of(level: c_int, name: c_int, value: *const c_void, len: socklen_t) -> Option<Self> {
        let found = MEMBERSHIPS.iter().find(|(l, n, _)| (*l, *n) == (level, name));
        found.map(|(.., change)| Self { level, name, change: *change, value, len })
    }
}

fn ip(address: libc::in_addr) -> Ipv4Addr {
    Ipv4Addr::from(address.s_addr.to_ne_bytes())
}

impl Group {
    /// Reads the value of an option.
    ///
    /// # Errors
    /// The same as on Linux.
    ///
    /// # Safety
    /// The option's `value` is null, or valid for reads of `len` bytes.
    pub(crate) unsafe fn of(option: &MembershipOption) -> Result<Self, Errno> {
        let &MembershipOption { level, name, value, len, .. } = option;
        // SAFETY: the caller guarantees that `value` is null or has `len` readable bytes. All types are structures of
        // integers.
        let read = unsafe {
            match (level, name) {
                (libc::IPPROTO_IP, libc::IP_ADD_MEMBERSHIP | libc::IP_DROP_MEMBERSHIP) => {
                    let (group, address, index) = read_interface(value, len)?;
                    Self { group: group.into(), index, address }
                }
                (_, MCAST_JOIN_GROUP | MCAST_LEAVE_GROUP) => {
                    let asked = read::<GroupReq>(value, len)?;
                    let v4 = level == libc::IPPROTO_IP;
                    let family = if v4 { libc::AF_INET } else { libc::AF_INET6 };
                    if c_int::from(asked.group.ss_family) != family {
                        return Err(if v4 { libc::EINVAL } else { libc::EADDRNOTAVAIL });
                    }
                    let at = (&raw const asked.group).cast();
                    let group = address::read(at, size_of::<sockaddr_storage>() as socklen_t)?.ip();
                    Self { group, index: asked.interface, address: Ipv4Addr::UNSPECIFIED }
                }
                _ => {
                    let asked = read::<libc::ipv6_mreq>(value, len)?;
                    let group = Ipv6Addr::from(asked.ipv6mr_multiaddr.s6_addr).into();
                    Self { group, index: asked.ipv6mr_interface, address: Ipv4Addr::UNSPECIFIED }
                }
            }
        };
        if read.group.is_multicast() { Ok(read) } else { Err(libc::EINVAL) }
    }

    /// Returns the address of the group.
    pub(crate) fn address(&self) -> IpAddr {
        self.group
    }

    /// Returns whether the stack has the interface.
    pub(crate) fn has_interface(&self) -> bool {
        self.ask(NONE, Membership::Find).is_ok()
    }

    /// Requests `what` from the stack for session `number`. Returns the index of the interface.
    fn ask(&self, number: u32, what: Membership) -> Result<u32, Errno> {
        let mut question = Question::new(Call::Group, number, what as u32);
        question.remote = Some(SocketAddr::new(self.group, 0));
        question.local = Some(SocketAddr::new(self.address.into(), 0));
        question.options[0] = self.index;
        let (answer, received) = link::ask(&question, &[])?;
        received.close();
        Ok(answer.info[0])
    }
}

/// Reads `struct ip_mreqn`, or the shorter `struct ip_mreq`: group, address and index.
///
/// # Safety
/// `value` is null, or valid for reads of `len` bytes.
unsafe fn read_interface(value: *const c_void, len: socklen_t) -> Result<(Ipv4Addr, Ipv4Addr, u32), Errno> {
    if len as usize >= size_of::<libc::ip_mreqn>() {
        // SAFETY: the caller guarantees that `value` is null or has `len` readable bytes.
        let asked = unsafe { read::<libc::ip_mreqn>(value, len) }?;
        return Ok((ip(asked.imr_multiaddr), ip(asked.imr_address), asked.imr_ifindex as u32));
    }
    // SAFETY: the caller guarantees that `value` is null or has `len` readable bytes.
    let asked = unsafe { read::<libc::ip_mreq>(value, len) }?;
    Ok((ip(asked.imr_multiaddr), ip(asked.imr_interface), 0))
}

/// Changes the memberships of a session.
///
/// # Errors
/// The same as on Linux.
///
/// # Safety
/// The option's `value` is null, or valid for reads of `len` bytes.
pub(crate) unsafe fn set(session: &Session, option: &MembershipOption) -> Result<(), Errno> {
    let change = option.change;
    if option.level == libc::IPPROTO_IPV6 && !session.entry.v6 {
        return Err(libc::ENOPROTOOPT);
    }
    // SAFETY: the caller guarantees that `value` is null or has `len` readable bytes.
    let group = unsafe { Group::of(option) }?;
    let number = session.slot.identity.number.load(Ordering::Relaxed);
    group.ask(number, if change == Change::Join { Membership::Join } else { Membership::Leave })?;
    let number = number_of(session.slot).unwrap_or_else(|| {
        let new = table::next_number();
        session.slot.kept.set(kept_name(NUMBER.0, NUMBER.1), new);
        new
    });
    with_lock(|known| known.note(number, change, group));
    Ok(())
}

/// Records a change of the memberships of an undecided socket.
pub(crate) fn note(entry: Entry, change: Change, group: Group) {
    with_lock(|known| known.note(entry.place, change, group));
}

/// Stores a group that an undecided socket joins when it becomes a session.
///
/// # Errors
/// `EADDRINUSE` if the group is already stored.
pub(crate) fn store_group(entry: Entry, group: Group) -> Result<(), Errno> {
    with_lock(|known| {
        if known.find(entry.place, |stored| stored.group == group).is_some() {
            return Err(libc::EADDRINUSE);
        }
        known.add(Stored { number: entry.place, group, later: true });
        Ok(())
    })
}

/// Returns whether an undecided socket has groups that the kernel cannot join and that it joins later.
pub(crate) fn has_stored_groups(entry: Entry) -> bool {
    with_lock(|known| known.list.iter().any(|stored| stored.number == entry.place && stored.later))
}

/// Removes a group from the groups that an undecided socket joins later. Returns `false` if it is not among them.
pub(crate) fn leave(entry: Entry, group: Group) -> bool {
    with_lock(|known| known.leave(entry.place, group, |stored| stored.later))
}

/// Joins the groups of an undecided socket that has become a session.
pub(crate) fn join_stored_groups(entry: Entry, session: &Session) {
    if with_lock(|known| known.list.iter().any(|stored| stored.number == entry.place)) {
        session.slot.kept.set(kept_name(NUMBER.0, NUMBER.1), entry.place);
        rejoin_groups(session);
    }
}

/// Joins the groups of a socket on its present stack.
pub(crate) fn rejoin_groups(session: &Session) {
    let Some(number) = number_of(session.slot) else { return };
    let all = with_lock(|known| known.list);
    for stored in all.iter().filter(|stored| stored.number == number) {
        // An interface of the kernel, or of the previous stack, may be missing.
        let _ = stored.group.ask(session.slot.identity.number.load(Ordering::Relaxed), Membership::Join);
    }
}

fn number_of(slot: &Slot) -> Option<u32> {
    slot.kept.get(kept_name(NUMBER.0, NUMBER.1))
}

/// Returns the interface that sends a session's datagrams to groups: its source address and index.
pub(crate) fn sending_interface(session: &Session, v6: bool) -> (Option<IpAddr>, u32) {
    let kept = |(level, name)| session.slot.kept.get(kept_name(level, name)).unwrap_or(0);
    if v6 {
        return (None, kept((libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_IF)));
    }
    let source = Ipv4Addr::from(kept((libc::IPPROTO_IP, libc::IP_MULTICAST_IF)).to_ne_bytes());
    ((!source.is_unspecified()).then_some(source.into()), kept(INDEX))
}

/// Sets the interface that sends datagrams to groups: `IP_MULTICAST_IF` or, with `v6`, `IPV6_MULTICAST_IF`.
///
/// # Errors
/// The same as on Linux.
///
/// # Safety
/// `value` is null, or valid for reads of `len` bytes.
pub(crate) unsafe fn set_sending_interface(
    session: &Session,
    v6: bool,
    value: *const c_void,
    len: socklen_t,
) -> Result<(), Errno> {
    if v6 && !session.entry.v6 {
        return Err(libc::ENOPROTOOPT);
    }
    // SAFETY: the caller guarantees that `value` is null or has `len` readable bytes. All types are structures of
    // integers.
    let (address, index) = unsafe {
        match v6 {
            true => (Ipv4Addr::UNSPECIFIED, read::<c_int>(value, len)? as u32),
            false if (len as usize) < size_of::<libc::ip_mreq>() => {
                (ip(read::<libc::in_addr>(value, len)?), 0)
            }
            false => read_interface(value, len).map(|(_, address, index)| (address, index))?,
        }
    };
    if !is_stack_interface(v6, address, index) {
        return Err(if v6 { libc::ENODEV } else { libc::EADDRNOTAVAIL });
    }
    let kept = &session.slot.kept;
    if v6 {
        kept.set(kept_name(libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_IF), index);
    } else {
        kept.set(kept_name(libc::IPPROTO_IP, libc::IP_MULTICAST_IF), u32::from_ne_bytes(address.octets()));
        if index > 0 || kept.get(kept_name(INDEX.0, INDEX.1)).is_some() {
            kept.set(kept_name(INDEX.0, INDEX.1), index);
        }
    }
    Ok(())
}

/// Returns whether the stack has the interface that an option of a socket names.
pub(crate) fn has_interface(level: c_int, name: c_int, value: c_int) -> bool {
    match (level, name) {
        (libc::IPPROTO_IP, libc::IP_MULTICAST_IF) => {
            is_stack_interface(false, Ipv4Addr::from(value.to_ne_bytes()), 0)
        }
        (libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_IF) => {
            is_stack_interface(true, Ipv4Addr::UNSPECIFIED, value as u32)
        }
        _ => true,
    }
}

/// Returns whether the stack has an interface. An unspecified address without an index stands for any interface.
fn is_stack_interface(v6: bool, address: Ipv4Addr, index: u32) -> bool {
    let group = if v6 { Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() };
    let none = address.is_unspecified() && index == 0;
    none || Group { group, index, address }.has_interface()
}

/// A stored membership.
#[derive(Clone, Copy)]
struct Stored {
    /// The number of the socket, or 0 for a free place.
    number: u32,
    group: Group,
    /// The kernel has not joined the group.
    later: bool,
}

/// Stored memberships.
struct Known {
    list: [Stored; STORED],
}

/// The memberships, protected by the lock of the registrations.
struct Locked(UnsafeCell<Known>);

// SAFETY: `hold` is the only access, and takes the lock of the registrations.
unsafe impl Sync for Locked {}

const NO_GROUP: Group =
    Group { group: IpAddr::V4(Ipv4Addr::UNSPECIFIED), index: 0, address: Ipv4Addr::UNSPECIFIED };
const FREE: Stored = Stored { number: 0, group: NO_GROUP, later: false };
static KNOWN: Locked = Locked(UnsafeCell::new(Known { list: [FREE; STORED] }));
/// The next place to replace if all are used.
static OLDEST: AtomicU32 = AtomicU32::new(0);

impl Known {
    /// Returns the place of a socket's group for which `is` returns true.
    fn find(&self, number: u32, is: impl Fn(&Stored) -> bool) -> Option<usize> {
        self.list.iter().position(|stored| stored.number == number && is(stored))
    }

    /// Removes a group for which `is` returns true: with this interface, or otherwise with any interface. Returns
    /// whether a group was removed.
    fn leave(&mut self, number: u32, group: Group, is: impl Fn(&Stored) -> bool) -> bool {
        let same = self.find(number, |stored| stored.group == group && is(stored));
        let any = || self.find(number, |stored| stored.group.group == group.group && is(stored));
        let at = same.or_else(any);
        at.into_iter().for_each(|at| self.list[at] = FREE);
        at.is_some()
    }

    fn note(&mut self, number: u32, change: Change, group: Group) {
        if change == Change::Leave {
            self.leave(number, group, |_| true);
        } else {
            self.add(Stored { number, group, later: false });
        }
    }

    fn add(&mut self, new: Stored) {
        let free = self.list.iter().position(|stored| stored.number == 0);
        let at = free.unwrap_or_else(|| OLDEST.fetch_add(1, Ordering::Relaxed) as usize % STORED);
        self.list[at] = new;
    }
}

/// Calls `with` under the lock.
fn with_lock<T>(with: impl FnOnce(&mut Known) -> T) -> T {
    let _signals = sys::Blocked::new();
    let _lock = link::registrations();
    // SAFETY: the lock is held. Without a lock, no socket is undecided, and nothing is stored.
    with(unsafe { &mut *KNOWN.0.get() })
}

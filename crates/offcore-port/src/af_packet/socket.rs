//! Packet sockets: packet(7), and Documentation/networking/packet_mmap.rst of the kernel.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::spec::Fanout;

/// Bytes of the virtio-net header as packet sockets have it by default: without a number of buffers.
pub(super) const VNET_HEADER: usize = 10;
/// What may wait in the kernel's own memory: packets that are longer than a slot.
const LONG_PACKETS: libc::c_int = 32 << 20;
/// What packets that were sent may hold of the kernel's memory until they are gone.
const SENT_PACKETS: libc::c_int = 16 << 20;

/// Options that libc does not know.
const PACKET_IGNORE_OUTGOING: libc::c_int = 23;
const TPACKET_V2: libc::c_int = 1;
const PACKET_FANOUT_FLAG_IGNORE_OUTGOING: libc::c_int = 0x4000;
const PACKET_FANOUT_FLAG_UNIQUEID: libc::c_int = 0x2000;
const PACKET_FANOUT_ROLLOVER: libc::c_int = 3;

/// A step that the kernel refused, and what to do about it.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) what: String,
    pub(super) source: io::Error,
    /// It may go better once the link is up: kernels before 6.14 let only sockets of a running interface join a group.
    pub(super) wants_link: bool,
}

impl Refusal {
    pub(super) fn new(what: impl Into<String>, source: io::Error) -> Self {
        Self { what: what.into(), source, wants_link: false }
    }
}

/// A packet socket that gets nothing yet, of frames with a virtio-net header in front.
pub(super) fn open() -> Result<OwnedFd, Refusal> {
    let (family, flags) = (AddressFamily::PACKET, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK);
    let socket = rustix::net::socket_with(family, SocketType::RAW, flags, None).map_err(|source| {
        let advice = match source {
            rustix::io::Errno::PERM | rustix::io::Errno::ACCESS => ": it needs root or CAP_NET_RAW",
            rustix::io::Errno::AFNOSUPPORT => ": the kernel has no packet sockets (CONFIG_PACKET)",
            _ => "",
        };
        Refusal::new(format!("opening a packet socket{advice}"), source.into())
    })?;
    set(&socket, libc::PACKET_VERSION, TPACKET_V2, "rings of version 2")?;
    set(&socket, libc::PACKET_VNET_HDR, 1, "virtio-net headers")?;
    Ok(socket)
}

/// Options of a socket that receives into a ring.
pub(super) fn set_up_rx(socket: &OwnedFd) -> Result<(), Refusal> {
    // What the interface sends is no packet that it has received.
    set(socket, PACKET_IGNORE_OUTGOING, 1, "leaving out sent packets (needs Linux 4.20)")?;
    // A packet that is longer than its slot waits beside the ring.
    set(socket, libc::PACKET_COPY_THRESH, 1, "packets longer than a slot")?;
    set(socket, libc::PACKET_AUXDATA, 1, "VLAN tags of packets longer than a slot")?;
    buffer(socket, libc::SO_RCVBUFFORCE, libc::SO_RCVBUF, LONG_PACKETS);
    Ok(())
}

/// Options of a socket that sends.
pub(super) fn set_up_tx(socket: &OwnedFd, qdisc_bypass: bool) -> Result<(), Refusal> {
    // A packet that cannot be sent does not hold up those behind it.
    set(socket, libc::PACKET_LOSS, 1, "skipping packets that cannot be sent")?;
    if qdisc_bypass {
        set(socket, libc::PACKET_QDISC_BYPASS, 1, "qdisc_bypass: take that option out")?;
    }
    buffer(socket, libc::SO_SNDBUFFORCE, libc::SO_SNDBUF, SENT_PACKETS);
    Ok(())
}

/// Asks for so much buffer space, or for as much of it as there is without a privilege.
fn buffer(socket: &OwnedFd, force: libc::c_int, ask: libc::c_int, bytes: libc::c_int) {
    if set_option(socket, libc::SOL_SOCKET, force, &bytes).is_err() {
        // The kernel gives what it is allowed to: less is no error.
        let _ = set_option(socket, libc::SOL_SOCKET, ask, &bytes);
    }
}

/// Binds the socket to interface `index`. With `receive` its packets begin to come in.
pub(super) fn bind(socket: &OwnedFd, index: u32, receive: bool) -> Result<(), Refusal> {
    // SAFETY: a sockaddr_ll is integers, for which zeros are a value.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_protocol = if receive { (libc::ETH_P_ALL as u16).to_be() } else { 0 };
    address.sll_ifindex = index.cast_signed();
    let len = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
    // SAFETY: the address is live for the call, and `len` bytes long.
    match unsafe { libc::bind(socket.as_raw_fd(), std::ptr::from_ref(&address).cast(), len) } {
        0 => Ok(()),
        _ => Err(Refusal::new("binding to the interface", io::Error::last_os_error())),
    }
}

/// Whether the interface that the socket was bound to is gone.
pub(super) fn is_orphaned(socket: &OwnedFd) -> bool {
    // SAFETY: a sockaddr_ll is integers, for which zeros are a value.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    let mut len = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
    // SAFETY: the address is live for the call and `len` bytes long, of which the kernel writes no more.
    let result =
        unsafe { libc::getsockname(socket.as_raw_fd(), std::ptr::from_mut(&mut address).cast(), &mut len) };
    result == 0 && address.sll_ifindex <= 0
}

/// Lets the interface receive packets for other stations, as long as the socket is open.
pub(super) fn promiscuous(socket: &OwnedFd, index: u32) -> Result<(), Refusal> {
    // SAFETY: a packet_mreq is integers, for which zeros are a value.
    let mut membership: libc::packet_mreq = unsafe { std::mem::zeroed() };
    membership.mr_ifindex = index.cast_signed();
    membership.mr_type = libc::PACKET_MR_PROMISC as u16;
    set(
        socket,
        libc::PACKET_ADD_MEMBERSHIP,
        membership,
        "promiscuous mode: it can be done without by promisc=off",
    )
}

/// Lets nothing through to the socket until [`let_in`] is called.
pub(super) fn keep_out(socket: &OwnedFd) -> Result<(), Refusal> {
    // BPF_RET | BPF_K: 0 bytes of any packet.
    let mut nothing = [libc::sock_filter { code: 0x06, jt: 0, jf: 0, k: 0 }];
    let program = libc::sock_fprog { len: 1, filter: nothing.as_mut_ptr() };
    set_option(socket, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &program)
        .map_err(|source| Refusal::new("keeping packets out until the queue has joined the others", source))
}

/// Lets packets through to a socket that was [kept out](keep_out) of their way.
pub(super) fn let_in(socket: &OwnedFd) -> Result<(), Refusal> {
    set_option(socket, libc::SOL_SOCKET, libc::SO_DETACH_FILTER, &0)
        .map_err(|source| Refusal::new("letting packets in", source))
}

/// Makes the first socket of a group among which received packets are spread; returns what the others join by.
pub(super) fn found_group(socket: &OwnedFd, fanout: Fanout) -> Result<libc::c_int, Refusal> {
    let mode = match fanout {
        Fanout::Hash => libc::PACKET_FANOUT_HASH as libc::c_int,
        Fanout::Lb => libc::PACKET_FANOUT_LB as libc::c_int,
        Fanout::Cpu => libc::PACKET_FANOUT_CPU as libc::c_int,
        Fanout::Rollover => PACKET_FANOUT_ROLLOVER,
        Fanout::Rnd => libc::PACKET_FANOUT_RND as libc::c_int,
        Fanout::Qm => libc::PACKET_FANOUT_QM as libc::c_int,
    } | PACKET_FANOUT_FLAG_IGNORE_OUTGOING;
    join_group(socket, (mode | PACKET_FANOUT_FLAG_UNIQUEID) << 16)?;
    let group: libc::c_int = option(socket, libc::PACKET_FANOUT)
        .map_err(|source| Refusal::new("asking for the fanout group's number", source))?;
    Ok(mode << 16 | group & 0xffff)
}

/// Joins a group.
pub(super) fn join_group(socket: &OwnedFd, group: libc::c_int) -> Result<(), Refusal> {
    set(socket, libc::PACKET_FANOUT, group, "spreading packets over several queues (fanout)")
        .map_err(|refusal| Refusal { wants_link: true, ..refusal })
}

/// Packets that did not fit the ring since the last call.
pub(super) fn take_dropped(socket: &OwnedFd) -> u64 {
    // tp_packets, tp_drops: reading sets both to 0.
    let counts: io::Result<[u32; 2]> = option(socket, libc::PACKET_STATISTICS);
    counts.map_or(0, |[_, drops]| drops.into())
}

/// Reads, and so takes away, an error that is noted on the socket, such as that the link went down: it would keep the
/// descriptor readable.
pub(super) fn take_error(socket: &OwnedFd) {
    let _ = rustix::net::sockopt::socket_error(socket);
}

/// Sets an option of packet sockets; `what` says what for.
pub(super) fn set<T>(socket: &OwnedFd, option: libc::c_int, value: T, what: &str) -> Result<(), Refusal> {
    set_option(socket, libc::SOL_PACKET, option, &value).map_err(|source| Refusal::new(what, source))
}

fn set_option<T>(socket: &OwnedFd, level: libc::c_int, option: libc::c_int, value: &T) -> io::Result<()> {
    let len = size_of::<T>() as libc::socklen_t;
    // SAFETY: the value is live for the call, and `len` bytes long.
    match unsafe {
        libc::setsockopt(socket.as_raw_fd(), level, option, std::ptr::from_ref(value).cast(), len)
    } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// An option whose value is of integers.
fn option<T: Default>(socket: &OwnedFd, option: libc::c_int) -> io::Result<T> {
    let mut value = T::default();
    let mut len = size_of::<T>() as libc::socklen_t;
    // SAFETY: the value is live for the call, and `len` bytes long; the callers' types have no invalid values.
    match unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_PACKET,
            option,
            std::ptr::from_mut(&mut value).cast(),
            &mut len,
        )
    } {
        0 => Ok(value),
        _ => Err(io::Error::last_os_error()),
    }
}

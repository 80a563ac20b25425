//! Packet sockets: packet(7) and the kernel's Documentation/networking/packet_mmap.rst.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::spec::Fanout;

/// Length of the virtio-net header that packet sockets use by default, in bytes: the header without `num_buffers`.
pub(super) const VNET_HEADER: usize = 10;
/// Kernel memory for received packets that are longer than a slot, in bytes.
const LONG_PACKETS: libc::c_int = 32 << 20;
/// Kernel memory for packets whose transmission is not complete, in bytes.
const SENT_PACKETS: libc::c_int = 16 << 20;

/// Options that the libc crate does not define.
const PACKET_IGNORE_OUTGOING: libc::c_int = 23;
const TPACKET_V2: libc::c_int = 1;
const PACKET_FANOUT_FLAG_IGNORE_OUTGOING: libc::c_int = 0x4000;
const PACKET_FANOUT_FLAG_UNIQUEID: libc::c_int = 0x2000;
const PACKET_FANOUT_ROLLOVER: libc::c_int = 3;

/// A step that the kernel refused, with advice for the user.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) what: String,
    pub(super) source: io::Error,
    /// Whether it may succeed once the link is up: before Linux 6.14 only sockets of a running interface can join a
    /// fanout group.
    pub(super) wants_link: bool,
}

impl Refusal {
    pub(super) fn new(what: impl Into<String>, source: io::Error) -> Self {
        Self { what: what.into(), source, wants_link: false }
    }
}

/// Opens a packet socket that receives nothing yet, for frames with a virtio-net header.
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

/// Sets the options of a socket that receives into a ring.
pub(super) fn set_up_rx(socket: &OwnedFd) -> Result<(), Refusal> {
    // Packets sent by the interface are not reported as received.
    set(socket, PACKET_IGNORE_OUTGOING, 1, "leaving out sent packets (needs Linux 4.20)")?;
    // Packets longer than a slot are put into the socket's queue.
    set(socket, libc::PACKET_COPY_THRESH, 1, "packets longer than a slot")?;
    set(socket, libc::PACKET_AUXDATA, 1, "VLAN tags of packets longer than a slot")?;
    buffer(socket, libc::SO_RCVBUFFORCE, libc::SO_RCVBUF, LONG_PACKETS);
    Ok(())
}

/// Sets the options of a socket that sends.
pub(super) fn set_up_tx(socket: &OwnedFd, qdisc_bypass: bool) -> Result<(), Refusal> {
    // A packet that cannot be sent does not block later packets.
    set(socket, libc::PACKET_LOSS, 1, "skipping packets that cannot be sent")?;
    if qdisc_bypass {
        set(socket, libc::PACKET_QDISC_BYPASS, 1, "qdisc_bypass: take that option out")?;
    }
    buffer(socket, libc::SO_SNDBUFFORCE, libc::SO_SNDBUF, SENT_PACKETS);
    Ok(())
}

/// Requests buffer space of `bytes`, or as much as an unprivileged process may get.
fn buffer(socket: &OwnedFd, force: libc::c_int, ask: libc::c_int, bytes: libc::c_int) {
    if set_option(socket, libc::SOL_SOCKET, force, &bytes).is_err() {
        // The kernel limits the size; a smaller buffer is acceptable.
        let _ = set_option(socket, libc::SOL_SOCKET, ask, &bytes);
    }
}

/// Binds the socket to interface `index`. With `receive`, the socket receives from then on.
pub(super) fn bind(socket: &OwnedFd, index: u32, receive: bool) -> Result<(), Refusal> {
    // SAFETY: sockaddr_ll consists of integers, for which zeros are a valid value.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_protocol = if receive { (libc::ETH_P_ALL as u16).to_be() } else { 0 };
    address.sll_ifindex = index.cast_signed();
    let len = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
    // SAFETY: the address is live for the call and `len` bytes long.
    match unsafe { libc::bind(socket.as_raw_fd(), std::ptr::from_ref(&address).cast(), len) } {
        0 => Ok(()),
        _ => Err(Refusal::new("binding to the interface", io::Error::last_os_error())),
    }
}

/// Returns whether the interface that the socket was bound to was deleted.
pub(super) fn is_device_deleted(socket: &OwnedFd) -> bool {
    // SAFETY: sockaddr_ll consists of integers, for which zeros are a valid value.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    let mut len = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
    // SAFETY: the address is live for the call and `len` bytes long; the kernel writes at most `len` bytes.
    let result =
        unsafe { libc::getsockname(socket.as_raw_fd(), std::ptr::from_mut(&mut address).cast(), &mut len) };
    result == 0 && address.sll_ifindex <= 0
}

/// Makes the interface receive packets for other stations while the socket is open.
pub(super) fn promiscuous(socket: &OwnedFd, index: u32) -> Result<(), Refusal> {
    // SAFETY: packet_mreq consists of integers, for which zeros are a valid value.
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

/// Blocks all packets for the socket until [`unblock_packets`] is called.
pub(super) fn block_packets(socket: &OwnedFd) -> Result<(), Refusal> {
    // BPF_RET | BPF_K: accepts 0 bytes of any packet.
    let mut nothing = [libc::sock_filter { code: 0x06, jt: 0, jf: 0, k: 0 }];
    let program = libc::sock_fprog { len: 1, filter: nothing.as_mut_ptr() };
    set_option(socket, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &program)
        .map_err(|source| Refusal::new("keeping packets out until the queue has joined the others", source))
}

/// Lets packets through to a socket after [`block_packets`].
pub(super) fn unblock_packets(socket: &OwnedFd) -> Result<(), Refusal> {
    set_option(socket, libc::SOL_SOCKET, libc::SO_DETACH_FILTER, &0)
        .map_err(|source| Refusal::new("letting packets in", source))
}

/// Creates a fanout group with the socket as its first member; returns the value with which other sockets join the
/// group.
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

/// Returns the number of packets dropped because the ring was full since the last call.
pub(super) fn take_dropped(socket: &OwnedFd) -> u64 {
    // tp_packets, tp_drops: reading resets both to 0.
    let counts: io::Result<[u32; 2]> = option(socket, libc::PACKET_STATISTICS);
    counts.map_or(0, |[_, drops]| drops.into())
}

/// Reads and clears a pending error of the socket, such as a link that went down. A pending error keeps the descriptor
/// readable.
pub(super) fn take_error(socket: &OwnedFd) {
    let _ = rustix::net::sockopt::socket_error(socket);
}

/// Sets an option of packet sockets; `what` describes its purpose in error messages.
pub(super) fn set<T>(socket: &OwnedFd, option: libc::c_int, value: T, what: &str) -> Result<(), Refusal> {
    set_option(socket, libc::SOL_PACKET, option, &value).map_err(|source| Refusal::new(what, source))
}

fn set_option<T>(socket: &OwnedFd, level: libc::c_int, option: libc::c_int, value: &T) -> io::Result<()> {
    let len = size_of::<T>() as libc::socklen_t;
    // SAFETY: the value is live for the call and `len` bytes long.
    match unsafe {
        libc::setsockopt(socket.as_raw_fd(), level, option, std::ptr::from_ref(value).cast(), len)
    } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Reads an option whose value consists of integers.
fn option<T: Default>(socket: &OwnedFd, option: libc::c_int) -> io::Result<T> {
    let mut value = T::default();
    let mut len = size_of::<T>() as libc::socklen_t;
    // SAFETY: the value is live for the call and `len` bytes long; the callers' types have no invalid values.
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

//! Receives and sends packets that are longer than a slot of the ring, with one system call per packet, directly
//! between the packet's buffers and the kernel. TCP and UDP packets of up to 64 KiB pass in both directions.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use arrayvec::ArrayVec;
use offcore_mem::{HEADROOM, Packet, Pool, PoolCache};
use offcore_wire::ethernet;
use rustix::io::Errno;

use super::header::{BEFORE_TAG, TAG, header_of, mark, note_tunnel, tag};
use super::socket::VNET_HEADER;
use crate::{DropReason, offload_fallback};

/// Length of the longest packet in bytes: the longest IP packet in a tagged frame.
const LONGEST: usize = u16::MAX as usize + ethernet::HEADER_LEN + TAG;
/// Maximum number of parts of a message: more than the longest packet needs with the smallest buffers, including its
/// headers.
const MAX_PARTS: usize = 64;

/// The result of [`receive`].
pub(super) enum Long {
    /// A packet and its length.
    Packet(Packet, usize),
    /// The pool has no free buffers; the packet stays in the socket's queue.
    Starved,
    /// The packet was discarded.
    Dropped(DropReason),
}

/// `struct tpacket_auxdata`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Auxiliary {
    status: u32,
    lens: [u32; 2],
    places: [u16; 2],
    vlan_tci: u16,
    vlan_tpid: u16,
}

/// Buffer for the one control message that is requested, suitably aligned.
#[derive(Default)]
#[repr(C)]
struct Control([u64; 8]);

/// Receives the oldest packet in the socket's queue.
pub(super) fn receive(socket: &OwnedFd, cache: &mut PoolCache) -> Long {
    let mut vnet = [0; VNET_HEADER];
    // The length and the offload header are read before the packet is taken.
    let peek = libc::MSG_PEEK | libc::MSG_TRUNC;
    let Ok((total, auxiliary)) = message(socket, &mut [part(&mut vnet)], peek) else {
        discard(socket);
        return Long::Dropped(DropReason::Failed);
    };
    let tag = tag(auxiliary.status, auxiliary.vlan_tci, auxiliary.vlan_tpid);
    let len = total.saturating_sub(VNET_HEADER) + if tag.is_some() { TAG } else { 0 };
    let asked = match header_of(&vnet, len, tag.is_some()) {
        _ if len > LONGEST.min(cache.pool().longest()) => Err(DropReason::TooBig),
        _ if len < ethernet::HEADER_LEN + TAG => Err(DropReason::Malformed),
        asked => asked,
    };
    let mut asked = match asked {
        Ok(asked) => asked,
        Err(reason) => {
            discard(socket);
            return Long::Dropped(reason);
        }
    };
    let pool = cache.pool();
    let Some(mut packet) = cache.take_chain(HEADROOM, len) else { return Long::Starved };
    let mut parts: ArrayVec<libc::iovec, MAX_PARTS> = ArrayVec::new();
    parts.push(part(&mut vnet));
    let mut buffers = pool.segments_mut(&mut packet);
    if let Some(tag) = tag
        && let Some(first) = buffers.next()
    {
        let (before, after) = first.split_at_mut(BEFORE_TAG);
        let (place, after) = after.split_at_mut(TAG);
        place.copy_from_slice(&tag); // copy-ok: the tag
        parts.extend([part(before), part(after)]);
    }
    parts.extend(buffers.map(part));
    match message(socket, &mut parts, libc::MSG_TRUNC) {
        Ok((read, _)) if read == total => {
            if asked.is_gso() {
                note_tunnel(&mut asked, packet.bytes(), false);
            }
            mark(&mut packet, &asked);
            Long::Packet(packet, len)
        }
        _ => {
            cache.free(packet);
            Long::Dropped(DropReason::Failed)
        }
    }
}

/// Discards the oldest packet in the socket's queue, so that the queue matches the next slot again.
fn discard(socket: &OwnedFd) {
    let _ = message(socket, &mut [part(&mut [0; VNET_HEADER])], libc::MSG_TRUNC);
}

/// Sends a packet with all its buffers, preceded by the header with its offload requests; returns its length.
pub(super) fn send(socket: &OwnedFd, pool: &Pool, packet: &Packet) -> Result<usize, Errno> {
    let header = offload_fallback::header(packet).to_bytes();
    let mut parts: ArrayVec<io::IoSlice<'_>, MAX_PARTS> = ArrayVec::new();
    parts.push(io::IoSlice::new(&header[..VNET_HEADER]));
    for buffer in pool.segments(packet) {
        parts.try_push(io::IoSlice::new(buffer)).map_err(|_| Errno::MSGSIZE)?;
    }
    // A write to a bound packet socket sends one packet.
    rustix::io::writev(socket, &parts)?;
    Ok(pool.total_len(packet))
}

fn part(bytes: &mut [u8]) -> libc::iovec {
    libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() }
}

/// Receives one message into `parts`; returns its total length and its auxiliary data. Each part must have been made by
/// [`part`] from a slice that is still exclusively borrowed.
fn message(
    socket: &OwnedFd,
    parts: &mut [libc::iovec],
    flags: libc::c_int,
) -> io::Result<(usize, Auxiliary)> {
    let mut control = Control::default();
    // SAFETY: `msghdr` consists of integers and pointers, for which zeros are a valid value.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = parts.as_mut_ptr();
    message.msg_iovlen = parts.len() as _;
    message.msg_control = std::ptr::from_mut(&mut control).cast();
    message.msg_controllen = size_of::<Control>() as _;
    let mut receive = || {
        // SAFETY: the message, its parts, their buffers and the control buffer are live and writable for the call.
        let read = unsafe { libc::recvmsg(socket.as_raw_fd(), &mut message, flags | libc::MSG_DONTWAIT) };
        usize::try_from(read).map_err(|_| io::Error::last_os_error())
    };
    let read = match receive() {
        // A pending socket error, such as a link that went down, is returned once, before any packet.
        Err(error) if error.kind() != io::ErrorKind::WouldBlock => receive(),
        result => result,
    }?;
    // SAFETY: recvmsg has filled in the control buffer and its length; the buffer is live and aligned.
    let first = unsafe { libc::CMSG_FIRSTHDR(&message).as_ref() };
    let auxiliary = first
        .filter(|first| (first.cmsg_level, first.cmsg_type) == (libc::SOL_PACKET, libc::PACKET_AUXDATA))
        // SAFETY: the kernel writes complete control messages, and this one contains a tpacket_auxdata.
        .map(|first| unsafe { libc::CMSG_DATA(first).cast::<Auxiliary>().read_unaligned() });
    Ok((read, auxiliary.unwrap_or_default()))
}

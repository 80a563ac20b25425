//! Packets that are longer than a slot of the ring, in both directions: a system call each, straight between the
//! packet's buffers and the kernel. TCP and UDP packets of up to 64 KiB pass in both directions.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use arrayvec::ArrayVec;
use offcore_mem::{HEADROOM, Packet, Pool, PoolCache};
use offcore_wire::ethernet;
use rustix::io::Errno;

use super::header::{BEFORE_TAG, TAG, header_of, mark, note_tunnel, tag};
use super::socket::VNET_HEADER;
use crate::{DropReason, offload_fallback};

/// Bytes of the longest packet: the longest IP packet in a tagged frame.
const LONGEST: usize = u16::MAX as usize + ethernet::HEADER_LEN + TAG;
/// Parts of a message, at most: more than the longest packet has in the smallest buffers, and its headers.
const MAX_PARTS: usize = 64;

/// What a call of [`receive`] gave.
pub(super) enum Long {
    /// A packet and its length.
    Packet(Packet, usize),
    /// The pool has run dry; the packet still waits.
    Starved,
    /// It is gone.
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

/// Room for the one control message that is asked for, aligned as they are.
#[derive(Default)]
#[repr(C)]
struct Control([u64; 8]);

/// Receives the oldest packet that waits at the socket.
pub(super) fn receive(socket: &OwnedFd, cache: &mut PoolCache) -> Long {
    let mut vnet = [0; VNET_HEADER];
    // How long it is, and what it asks for, before it is taken.
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

/// Takes the oldest packet that waits at the socket, and throws it away: the next slot's packet is the one behind it.
fn discard(socket: &OwnedFd) {
    let _ = message(socket, &mut [part(&mut [0; VNET_HEADER])], libc::MSG_TRUNC);
}

/// Sends a packet, all of its buffers, with the header that says what is left to be done for it; returns its length.
pub(super) fn send(socket: &OwnedFd, pool: &Pool, packet: &Packet) -> Result<usize, Errno> {
    let header = offload_fallback::header(packet).to_bytes();
    let mut parts: ArrayVec<io::IoSlice<'_>, MAX_PARTS> = ArrayVec::new();
    parts.push(io::IoSlice::new(&header[..VNET_HEADER]));
    for buffer in pool.segments(packet) {
        parts.try_push(io::IoSlice::new(buffer)).map_err(|_| Errno::MSGSIZE)?;
    }
    // On a packet socket that is bound, a write is a send of one packet.
    rustix::io::writev(socket, &parts)?;
    Ok(pool.total_len(packet))
}

fn part(bytes: &mut [u8]) -> libc::iovec {
    libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() }
}

/// Receives one message into `parts`; its whole length, and what is said beside it. The parts are of writable bytes
/// that nobody else uses: each was made by [`part`] of a slice that still is borrowed.
fn message(
    socket: &OwnedFd,
    parts: &mut [libc::iovec],
    flags: libc::c_int,
) -> io::Result<(usize, Auxiliary)> {
    let mut control = Control::default();
    // SAFETY: a msghdr is integers and addresses, for which zeros are a value.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = parts.as_mut_ptr();
    message.msg_iovlen = parts.len() as _;
    message.msg_control = std::ptr::from_mut(&mut control).cast();
    message.msg_controllen = size_of::<Control>() as _;
    let mut receive = || {
        // SAFETY: the message, its parts, what they point to and the control buffer are live and writable for the call.
        let read = unsafe { libc::recvmsg(socket.as_raw_fd(), &mut message, flags | libc::MSG_DONTWAIT) };
        usize::try_from(read).map_err(|_| io::Error::last_os_error())
    };
    let read = match receive() {
        // An error that was noted on the socket, such as that the link went down, is told once, before any packet.
        Err(error) if error.kind() != io::ErrorKind::WouldBlock => receive(),
        result => result,
    }?;
    // SAFETY: recvmsg has filled in the control buffer and how much of it; the buffer is live and aligned.
    let first = unsafe { libc::CMSG_FIRSTHDR(&message).as_ref() };
    let auxiliary = first
        .filter(|first| (first.cmsg_level, first.cmsg_type) == (libc::SOL_PACKET, libc::PACKET_AUXDATA))
        // SAFETY: the kernel's control messages are whole, and this one's data is a tpacket_auxdata.
        .map(|first| unsafe { libc::CMSG_DATA(first).cast::<Auxiliary>().read_unaligned() });
    Ok((read, auxiliary.unwrap_or_default()))
}

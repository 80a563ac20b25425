//! Messages with descriptors, on Unix sockets. Nothing here blocks: what cannot go at once is an error.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use nix::sys::socket::{ControlMessageOwned, MsgFlags, UnixCredentials};
use offcore_session::message::MOST_DESCRIPTORS;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// Descriptors that a process can send with a message, at most: `SCM_MAX_FD` of `net/scm.h`. There is room for all of them: what
/// there is none for the kernel closes at once, and whoever receives has to wait for that.
const SENT: usize = 253;

/// A message of a process's.
#[derive(Debug)]
pub(super) struct Received {
    /// Bytes of it.
    pub(super) len: usize,
    /// It had more descriptors than this process may have.
    pub(super) lost: bool,
}

/// Sends a message and descriptors, [`MOST_DESCRIPTORS`] at most.
pub(super) fn send(to: BorrowedFd<'_>, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(Errno::INVAL);
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    loop {
        match sendmsg(to, &[IoSlice::new(bytes)], &mut control, flags) {
            Err(Errno::INTR) => {}
            Ok(sent) if sent < bytes.len() => return Err(Errno::MSGSIZE),
            result => return result.map(drop),
        }
    }
}

/// Which process has sent the next message, on a socket that [passes that on](rustix::net::sockopt::set_socket_passcred). By nix:
/// rustix has no value for a process of another namespace, which has no number. There is no room for descriptors, of which the
/// message keeps its own.
pub(super) fn sender(from: BorrowedFd<'_>) -> Result<UnixCredentials, Errno> {
    let mut space = nix::cmsg_space!(UnixCredentials);
    let mut byte = [0];
    let mut part = [IoSliceMut::new(&mut byte)];
    let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC;
    let errno = |error: nix::Error| Errno::from_raw_os_error(error as i32);
    let message = nix::sys::socket::recvmsg::<()>(from.as_raw_fd(), &mut part, Some(&mut space), flags)
        .map_err(errno)?;
    let sender = message.cmsgs().map_err(errno)?.find_map(|message| match message {
        ControlMessageOwned::ScmCredentials(sender) => Some(sender),
        _ => None,
    });
    sender.ok_or(Errno::SRCH)
}

/// Receives a message; one that is longer than `bytes` is `EMSGSIZE`. One without bytes is the end. Its descriptors are added to
/// `descriptors`, also where it fails: the caller must not close them, see [`Errands`](super::errands::Errands).
pub(super) fn receive(
    from: BorrowedFd<'_>,
    bytes: &mut [u8],
    descriptors: &mut Vec<OwnedFd>,
) -> Result<Received, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(SENT))];
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    loop {
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let result = match recvmsg(from, &mut [IoSliceMut::new(bytes)], &mut control, flags) {
            Err(Errno::INTR) => continue,
            result => result?,
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                descriptors.extend(rights);
            }
        }
        if result.flags.contains(ReturnFlags::TRUNC) {
            return Err(Errno::MSGSIZE);
        }
        return Ok(Received { len: result.bytes, lost: result.flags.contains(ReturnFlags::CTRUNC) });
    }
}

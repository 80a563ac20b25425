//! Messages with descriptors on Unix sockets. No function blocks: a message that cannot be sent at once is an error.

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

/// The maximum number of descriptors in one received message: `SCM_MAX_FD` of `net/scm.h`. The receive buffer has room
/// for all of them. Otherwise the kernel would close the excess ones during the receive call, and the receiver would
/// wait for that.
const SENT: usize = 253;

/// A message of a process.
#[derive(Debug)]
pub(super) struct Received {
    /// Number of bytes received.
    pub(super) len: usize,
    /// The message had more descriptors than this process may open.
    pub(super) lost: bool,
}

/// Sends a message with up to [`MOST_DESCRIPTORS`] descriptors.
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

/// Returns the credentials of the process that sent the next message, on a socket with
/// [`SO_PASSCRED`](rustix::net::sockopt::set_socket_passcred). This uses nix, because rustix cannot represent a process
/// of another namespace, which has no number. Descriptors of the message stay in the queue.
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

/// Receives a message. A length of 0 means the end of the stream. A message that is longer than `bytes` fails with
/// `EMSGSIZE`. Received descriptors are added to `descriptors` even on failure. The caller must not close them itself:
/// see [`Errands`](super::errands::Errands).
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

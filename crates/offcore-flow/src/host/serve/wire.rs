//! Messages with descriptors, on Unix sockets. Nothing here blocks: what cannot go at once is an error.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use arrayvec::ArrayVec;
use offcore_session::message::MOST_DESCRIPTORS;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// Descriptors that a process may send with a message: none needs more than one.
const TAKEN: usize = 4;

/// A message of a process's.
#[derive(Debug)]
pub(super) struct Received {
    /// Bytes of it.
    pub(super) len: usize,
    pub(super) descriptors: ArrayVec<OwnedFd, TAKEN>,
    /// There were others: too many, or more than this process may have.
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

/// Receives a message; one that is longer than `bytes` is `EMSGSIZE`. One without bytes is the end.
pub(super) fn receive(from: BorrowedFd<'_>, bytes: &mut [u8]) -> Result<Received, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(TAKEN))];
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    loop {
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let result = match recvmsg(from, &mut [IoSliceMut::new(bytes)], &mut control, flags) {
            Err(Errno::INTR) => continue,
            result => result?,
        };
        let mut descriptors = ArrayVec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                rights.for_each(|fd| drop(descriptors.try_push(fd)));
            }
        }
        if result.flags.contains(ReturnFlags::TRUNC) {
            return Err(Errno::MSGSIZE);
        }
        let lost = result.flags.contains(ReturnFlags::CTRUNC);
        return Ok(Received { len: result.bytes, descriptors, lost });
    }
}

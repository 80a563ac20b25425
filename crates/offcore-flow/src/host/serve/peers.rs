//! Whether the other end of one of our sockets is closed, where it may as well have been shut down.
//!
//! A Unix socket shows `HUP` when its other end is closed, and also when both directions were shut down and the other end
//! is there still. The kernel's socket diagnostics tell the two apart: they name the other end as long as it is there.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::fstat;
use rustix::io::Errno;
use rustix::net::netlink::SOCK_DIAG;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, Shutdown, SocketFlags, SocketType, recv, send, shutdown,
    socket_with, socketpair,
};

/// Of `linux/sock_diag.h` and `linux/unix_diag.h`.
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLM_F_REQUEST: u16 = 1;
const UDIAG_SHOW_PEER: u32 = 4;
const UNIX_DIAG_PEER: u16 = 2;
const AF_UNIX: u32 = 1;
/// Bytes of a netlink header, of the question behind it, and of what is before the attributes of an answer.
const HEADER: usize = 16;
const QUESTION: usize = 24;
const ANSWER: usize = 16;

/// Asks the kernel.
#[derive(Debug)]
pub(super) struct Peers(Option<OwnedFd>);

impl Peers {
    /// Finds out whether this kernel tells.
    pub(super) fn new() -> Self {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, Some(SOCK_DIAG)).ok();
        let peers = Self(socket);
        if peers.try_out() == Ok(true) {
            return peers;
        }
        tracing::warn!(
            "the kernel does not tell of Unix sockets' peers (CONFIG_UNIX_DIAG): a session whose both directions were \
             shut down counts as closed"
        );
        Self(None)
    }

    /// Whether it tells a peer that is there from one that is not.
    fn try_out(&self) -> Result<bool, Errno> {
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        shutdown(&ours, Shutdown::Both)?;
        let there = self.lives(ours.as_fd());
        drop(theirs);
        Ok(there == Some(true) && self.lives(ours.as_fd()) == Some(false))
    }

    /// Whether this can be told.
    pub(super) fn are_known(&self) -> bool {
        self.0.is_some()
    }

    /// Whether the other end of a socket is there; `None`: the kernel does not say.
    pub(super) fn lives(&self, ours: BorrowedFd<'_>) -> Option<bool> {
        let socket = self.0.as_ref()?;
        let inode = fstat(ours).ok()?.st_ino as u32;
        let len = (HEADER + QUESTION) as u32;
        let kind = u32::from(SOCK_DIAG_BY_FAMILY) | u32::from(NLM_F_REQUEST) << 16;
        // Header: length, kind and flags, number, sender. Question: family, states, inode, what is wanted, any cookie.
        let words = [len, kind, 1, 0, AF_UNIX, u32::MAX, inode, UDIAG_SHOW_PEER, u32::MAX, u32::MAX];
        let mut question = [0; HEADER + QUESTION];
        for (bytes, word) in question.chunks_exact_mut(4).zip(words) {
            bytes.copy_from_slice(&word.to_ne_bytes()); // copy-ok: a few bytes of a message
        }
        send(socket, &question, SendFlags::DONTWAIT).ok()?;
        let mut bytes = [0; 512];
        let (len, _) = recv(socket, &mut bytes[..], RecvFlags::DONTWAIT).ok()?;
        peer(bytes.get(..len)?)
    }
}

/// What an answer says: the peer's inode is 0 when it is closed.
fn peer(answer: &[u8]) -> Option<bool> {
    let half = |bytes: &[u8]| bytes.first_chunk().map(|bytes| u16::from_ne_bytes(*bytes));
    if half(answer.get(4..)?)? != SOCK_DIAG_BY_FAMILY {
        return None;
    }
    let mut attributes = answer.get(HEADER + ANSWER..)?;
    while let (Some(len), Some(kind)) = (half(attributes), attributes.get(2..).and_then(half)) {
        let len = usize::from(len);
        if kind == UNIX_DIAG_PEER {
            return Some(attributes.get(4..8)?.iter().any(|byte| *byte != 0));
        }
        attributes = attributes.get(len.max(4).next_multiple_of(4)..)?;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read_to_their_end_and_no_further() {
        let answer = |kind: u16, attributes: &[u8]| {
            let mut bytes = vec![0; HEADER + ANSWER];
            bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
            bytes.extend(attributes);
            peer(&bytes)
        };
        let (other, lives, dead) =
            ([5, 0, 6, 0, 3, 0, 0, 0], [8, 0, 2, 0, 0, 1, 0, 0], [8, 0, 2, 0, 0, 0, 0, 0]);
        assert_eq!(answer(20, &[&other[..], &lives].concat()), Some(true));
        assert_eq!(answer(20, &[&dead[..], &other].concat()), Some(false));
        assert_eq!(answer(2, &lives), None, "an error");
        for cut in [&lives[..6], &other, &[0; 3], &[0, 0, 9, 9]] {
            assert_eq!(answer(20, cut), None);
        }
        assert_eq!(peer(&[0; 5]), None);
    }

    #[test]
    fn a_peer_that_was_shut_down_is_not_gone() {
        let peers = Peers::new();
        if !peers.are_known() {
            return println!("SKIP: a_peer_that_was_shut_down_is_not_gone: no CONFIG_UNIX_DIAG");
        }
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        assert_eq!(peers.lives(ours.as_fd()), Some(true));
        shutdown(&theirs, Shutdown::Both).unwrap();
        assert_eq!(peers.lives(ours.as_fd()), Some(true));
        drop(theirs);
        assert_eq!(peers.lives(ours.as_fd()), Some(false));
    }
}

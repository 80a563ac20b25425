//! A connection between a front end and a back end: whole messages over a Unix socket, with file descriptors.
//!
//! The socket never blocks. A message that arrives in pieces is assembled over several calls, so a peer that stops in
//! the middle of a message blocks no other work. If the peer then closes the connection, the error differs from a close
//! between messages.

mod directory;
mod socket;

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown,
};

use crate::message::{HEADER, Header, MAX_FDS, MessageError, Reply, Request};
use crate::passed::{Errands, PassedFd};

pub use directory::{Directory, FileId};
pub(crate) use socket::{Listener, connect, peer_user};
pub use socket::{Role, SocketAccess, SocketError, SocketFile};

/// Maximum number of file descriptors that the kernel passes at once (`SCM_MAX_FD`).
const PASSED: usize = 253;
/// How long a sender waits for a peer that does not read.
const SEND_TIMEOUT: Duration = Duration::from_secs(1);

/// The reason for the end of a connection.
#[derive(Debug, displaydoc::Display, thiserror::Error)]
pub enum ConnectionError {
    /// the peer closed the connection
    Closed,
    /// the peer closed the connection after {received} of {expected} bytes of a message's {part}
    ClosedMidMessage { part: &'static str, received: usize, expected: usize },
    /// {0}
    Message(#[from] MessageError),
    /// the peer has not read {left} bytes within {SEND_TIMEOUT:?}
    SendTimedOut { left: usize },
    /// {found} file descriptors came with one message, expected at most {MAX_FDS:?}
    TooManyFds { found: usize },
    /// {what}: {source}
    System { what: &'static str, source: Errno },
}

impl ConnectionError {
    fn system(what: &'static str) -> impl FnOnce(Errno) -> Self {
        move |source| Self::System { what, source }
    }
}

/// A message as received, not yet decoded.
#[derive(Debug)]
pub struct Received {
    pub header: Header,
    pub payload: Vec<u8>,
    /// The file descriptors that were passed with the message, close-on-exec.
    pub fds: Vec<PassedFd>,
    /// Whether file descriptors were lost in transit.
    pub fds_lost: bool,
}

impl Received {
    /// Decodes a front end's request.
    ///
    /// # Errors
    /// See [`Request::decode`]. The file descriptors are closed.
    pub fn request(self) -> Result<Request<PassedFd>, MessageError> {
        if self.fds_lost {
            return Err(MessageError::FdsLost { code: self.header.code });
        }
        Request::decode(&self.header, &self.payload, self.fds)
    }

    /// Decodes the reply to `code`.
    ///
    /// # Errors
    /// See [`Reply::decode`].
    pub fn reply(self, code: crate::message::Code) -> Result<Reply<PassedFd>, MessageError> {
        Reply::decode(code, &self.header, &self.payload, self.fds)
    }
}

/// One end of a connection.
#[derive(Debug)]
pub struct Connection {
    /// Closed by `errands` at the end, because unread descriptors may be in its queue.
    socket: PassedFd,
    errands: Errands,
    partial: Partial,
}

/// The part of a message received so far.
#[derive(Debug, Default)]
struct Partial {
    head: [u8; HEADER],
    head_len: usize,
    header: Option<Header>,
    payload: Vec<u8>,
    payload_len: usize,
    fds: Vec<PassedFd>,
    fds_lost: bool,
}

impl Connection {
    /// Uses a connected stream socket.
    ///
    /// # Errors
    /// Fails if the socket cannot be made non-blocking.
    pub fn new(socket: OwnedFd) -> Result<Self, ConnectionError> {
        Self::with_errands(socket, &Errands::default())
    }

    /// Like [`Connection::new`]. `errands` runs the operations that may have to wait for the peer.
    ///
    /// # Errors
    /// The same as for [`Connection::new`].
    pub(crate) fn with_errands(socket: OwnedFd, errands: &Errands) -> Result<Self, ConnectionError> {
        rustix::io::ioctl_fionbio(&socket, true)
            .map_err(ConnectionError::system("making a socket non-blocking"))?;
        let socket = PassedFd::new(socket, errands);
        Ok(Self { socket, errands: errands.clone(), partial: Partial::default() })
    }

    /// Sends arbitrary bytes. The file descriptors are passed with the first of them.
    ///
    /// # Errors
    /// Fails if the peer is gone or does not read.
    pub fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), ConnectionError> {
        let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(fds.len()))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(fds));
        }
        let deadline = Instant::now() + SEND_TIMEOUT;
        let mut left = bytes;
        while !left.is_empty() {
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match rustix::net::sendmsg(&self.socket, &[IoSlice::new(left)], &mut control, flags) {
                Ok(sent) => {
                    left = &left[sent..];
                    control.clear();
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    let wait = deadline.saturating_duration_since(Instant::now());
                    if wait.is_zero() {
                        return Err(ConnectionError::SendTimedOut { left: left.len() });
                    }
                    poll(&mut [PollFd::new(&self.socket, PollFlags::OUT)], Some(wait))?;
                }
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(ConnectionError::Closed),
                Err(source) => return Err(ConnectionError::System { what: "sendmsg", source }),
            }
        }
        Ok(())
    }

    /// Sends a request.
    ///
    /// # Errors
    /// The same as for [`Connection::send`].
    pub fn send_request(
        &self,
        request: Request<BorrowedFd<'_>>,
        need_reply: bool,
    ) -> Result<(), ConnectionError> {
        let (bytes, fds) = request.encode(need_reply);
        self.send(&bytes, &fds)
    }

    /// Returns the next message, or `None` if it has not arrived completely. Does not wait.
    ///
    /// # Errors
    /// Fails if the connection has ended, or if a header is invalid and the connection cannot continue.
    pub fn receive(&mut self) -> Result<Option<Received>, ConnectionError> {
        loop {
            let Some(header) = self.partial.header else {
                if !self.fill_header()? {
                    return Ok(None);
                }
                let header = Header::decode(self.partial.head)?;
                self.partial.payload = vec![0; header.size as usize];
                self.partial.header = Some(header);
                continue;
            };
            if self.partial.payload_len < self.partial.payload.len() {
                if !self.fill_payload()? {
                    return Ok(None);
                }
                continue;
            }
            let Partial { payload, fds, fds_lost, .. } = std::mem::take(&mut self.partial);
            return Ok(Some(Received { header, payload, fds, fds_lost }));
        }
    }

    /// Like [`Connection::receive`], but waits for a complete message until `deadline`.
    ///
    /// # Errors
    /// The same as for [`Connection::receive`].
    pub fn receive_until(&mut self, deadline: Instant) -> Result<Option<Received>, ConnectionError> {
        loop {
            if let Some(received) = self.receive()? {
                return Ok(Some(received));
            }
            let wait = deadline.saturating_duration_since(Instant::now());
            if wait.is_zero() {
                return Ok(None);
            }
            poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(wait))?;
        }
    }

    /// Returns whether the peer still has its end open. Does not wait, and consumes no bytes.
    pub fn is_alive(&self) -> bool {
        let mut fds = [PollFd::new(&self.socket, PollFlags::RDHUP)];
        let gone = PollFlags::HUP | PollFlags::ERR | PollFlags::RDHUP | PollFlags::NVAL;
        poll(&mut fds, Some(Duration::ZERO)).is_ok() && !fds[0].revents().intersects(gone)
    }

    /// Receives more of the header. Returns whether it is complete.
    fn fill_header(&mut self) -> Result<bool, ConnectionError> {
        let partial = &mut self.partial;
        while partial.head_len < HEADER {
            let into = &mut partial.head[partial.head_len..];
            match receive_some(&self.socket, &self.errands, into, &mut partial.fds, &mut partial.fds_lost)? {
                None => return Ok(false),
                Some(0) if partial.head_len == 0 => return Err(ConnectionError::Closed),
                Some(0) => {
                    let (received, expected) = (partial.head_len, HEADER);
                    return Err(ConnectionError::ClosedMidMessage { part: "header", received, expected });
                }
                Some(received) => partial.head_len += received,
            }
        }
        Ok(true)
    }

    /// Receives more of the payload. Returns whether it is complete.
    fn fill_payload(&mut self) -> Result<bool, ConnectionError> {
        let partial = &mut self.partial;
        while partial.payload_len < partial.payload.len() {
            let into = &mut partial.payload[partial.payload_len..];
            match receive_some(&self.socket, &self.errands, into, &mut partial.fds, &mut partial.fds_lost)? {
                None => return Ok(false),
                Some(0) => {
                    let (received, expected) = (partial.payload_len, partial.payload.len());
                    return Err(ConnectionError::ClosedMidMessage { part: "payload", received, expected });
                }
                Some(received) => partial.payload_len += received,
            }
        }
        Ok(true)
    }
}

impl Drop for Connection {
    /// Shuts the connection down at once, so the peer notices immediately. Closing the socket may take longer.
    fn drop(&mut self) {
        // An error only means that the peer has already closed the connection.
        let _ = rustix::net::shutdown(&self.socket, Shutdown::Both);
        // Nothing more can arrive. If nothing is queued, closing the socket does not wait for anything.
        if rustix::io::ioctl_fionread(&self.socket) == Ok(0) {
            self.socket.close();
        }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Receives available bytes into `into`. Returns `None` if nothing is available, and 0 at the end of the stream. Every
/// passed file descriptor is either added to `fds`, or closed and reported in `lost`.
fn receive_some(
    socket: &PassedFd,
    errands: &Errands,
    into: &mut [u8],
    fds: &mut Vec<PassedFd>,
    lost: &mut bool,
) -> Result<Option<usize>, ConnectionError> {
    // Space for the maximum number: the kernel would close excess descriptors right here, which may block.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(PASSED))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let message = loop {
        match rustix::net::recvmsg(socket, &mut [IoSliceMut::new(into)], &mut control, flags) {
            Ok(message) => break message,
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(None),
            // The peer closed the connection without reading all of our bytes.
            Err(Errno::CONNRESET) => return Ok(Some(0)),
            Err(source) => return Err(ConnectionError::System { what: "recvmsg", source }),
        }
    };
    *lost |= message.flags.contains(ReturnFlags::CTRUNC);
    for control in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = control {
            fds.extend(received.map(|fd| PassedFd::new(fd, errands)));
        }
    }
    // Each piece of a message may pass further descriptors.
    if fds.len() > MAX_FDS {
        return Err(ConnectionError::TooManyFds { found: fds.len() });
    }
    Ok(Some(message.bytes))
}

/// Waits until a descriptor in `fds` is ready, or until `timeout` has passed. `None` waits forever.
pub(crate) fn poll(fds: &mut [PollFd<'_>], timeout: Option<Duration>) -> Result<(), ConnectionError> {
    // A timeout that does not fit into a timespec is treated as infinite.
    let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
    match rustix::event::poll(fds, timeout.as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(source) => Err(ConnectionError::System { what: "poll", source }),
    }
}

#[cfg(test)]
mod tests;

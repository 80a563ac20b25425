//! The socket pair of a session, and a test whether this kernel's sockets behave as [`offcore_session::wake`] requires.

use std::io::IoSliceMut;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use offcore_session::wake::{ALARM, TOKENS};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, ioctl_fionbio, ioctl_fionread};
use rustix::net::sockopt::{
    set_socket_oobinline, set_socket_send_buffer_size, set_socket_send_buffer_size_force,
};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, ReturnFlags, SendFlags, Shutdown, SocketFlags, SocketType,
    recv, recvmsg, send, shutdown, socketpair,
};

use super::ServeError;

/// Maximum number of bytes that close the gate.
const GATE: u32 = 8;
/// Send buffer sizes that are tried: `SMALLEST`, and `STEPS` sizes that differ by `STEP` bytes.
const SMALLEST: usize = 2048;
const STEP: usize = 256;
const STEPS: usize = 128;
/// Upper bound of the kernel memory of a message in a listener's queue, in bytes, and the minimum length of a queue in
/// messages. A shorter queue would report free room too late.
const MESSAGE: usize = 2048;
const FEWEST: usize = 16;
/// Maximum number of bytes read to open a gate.
const MOST: usize = 4096;
/// More bytes than a gate has while only one call waits.
const FEW: usize = 64;

/// The properties of pairs on this kernel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pairs {
    /// The requested `SO_SNDBUF` of the application's end.
    buffer: usize,
    /// Number of bytes that close the gate.
    pub(super) gate: u32,
}

/// Both ends of a session.
#[derive(Debug)]
pub(super) struct Pair {
    /// The application's end.
    pub(super) app: OwnedFd,
    pub(super) ours: OwnedFd,
}

impl Pairs {
    /// Determines the required size of the send buffer and the number of bytes that close the gate.
    pub(super) fn calibrate() -> Result<Self, ServeError> {
        for buffer in (0..STEPS).map(|step| SMALLEST + step * STEP) {
            let tried = Self { buffer, gate: 0 };
            let trial = |source| ServeError::System { what: "trying a pair of sockets", source };
            let pair = tried.pair(false).map_err(trial)?;
            if let Some(gate) = tried.try_gate(&pair).map_err(trial)? {
                return Ok(Self { buffer, gate });
            }
        }
        Err(ServeError::Pair)
    }

    /// Returns the number of bytes that close the gate of a pair, or `None` if the pair does not behave as required or
    /// has no room for tokens.
    fn try_gate(&self, pair: &Pair) -> Result<Option<u32>, Errno> {
        // Includes the bytes that are added after the death of a process.
        if (0..2 * TOKENS).any(|_| put(pair.ours.as_fd()).is_err()) {
            return Ok(None);
        }
        for gate in 1..=GATE {
            if !shows_out(pair.app.as_fd())? {
                return Ok(None);
            }
            put(pair.app.as_fd())?;
            if !shows_out(pair.app.as_fd())? {
                open_gate(pair.ours.as_fd(), || GATE);
                let opened = shows_out(pair.app.as_fd())? && ioctl_fionread(&pair.ours)? == 1;
                return Ok(opened.then_some(gate));
            }
        }
        Ok(None)
    }

    /// Creates a pair with the unread byte over which the stack's end closes. `closed`: the gate is closed. The
    /// application's end is blocking until the application changes that.
    pub(super) fn pair(&self, closed: bool) -> Result<Pair, Errno> {
        let (app, ours) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        set_socket_send_buffer_size(&app, self.buffer)?;
        // Limits the memory of an application that never reads its tokens.
        set_socket_send_buffer_size(&ours, self.buffer)?;
        ioctl_fionbio(&ours, true)?;
        set_socket_oobinline(&app, true)?;
        for _ in 0..if closed { self.gate + 1 } else { 1 } {
            put(app.as_fd())?;
        }
        Ok(Pair { app, ours })
    }
}

/// Whether `poll` reports that a descriptor is writable.
fn shows_out(fd: BorrowedFd<'_>) -> Result<bool, Errno> {
    let mut events = [PollFd::from_borrowed_fd(fd, PollFlags::OUT)];
    poll(&mut events, Some(&Timespec::default()))?;
    Ok(events[0].revents().contains(PollFlags::OUT))
}

/// Whether the other end is closed, or both directions were shut down.
pub(super) fn has_hung_up(ours: BorrowedFd<'_>) -> bool {
    let mut events = [PollFd::from_borrowed_fd(ours, PollFlags::empty())];
    poll(&mut events, Some(&Timespec::default())).is_ok() && events[0].revents().contains(PollFlags::HUP)
}

/// Writes one byte.
fn put(to: BorrowedFd<'_>) -> Result<(), Errno> {
    send(to, &[0], SendFlags::DONTWAIT | SendFlags::NOSIGNAL).map(drop)
}

/// Writes the token. The write fails if the application's end is closed or full of tokens; that is ignored.
pub(super) fn put_token(ours: BorrowedFd<'_>) {
    let _ = put(ours);
}

/// Writes an alarm, or a token if the kernel lacks `CONFIG_AF_UNIX_OOB`.
pub(super) fn put_alarm(ours: BorrowedFd<'_>) {
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    if send(ours, &[ALARM], flags | SendFlags::OOB) == Err(Errno::OPNOTSUPP) {
        let _ = send(ours, &[ALARM], flags);
    }
}

/// Opens the gate by reading all bytes but one, up to [`MOST`]. Blocking calls may have written more bytes than
/// necessary to close it. Returns the number of bytes read, and how many of them were data. Returns `None` without
/// reading if the pair contains more bytes than `gates` returns, so that some of them are data, or if it contains
/// descriptors.
pub(super) fn open_gate(ours: BorrowedFd<'_>, gates: impl FnOnce() -> u32) -> Option<(u32, u32)> {
    let there = ioctl_fionread(ours).unwrap_or(0);
    // A program can write any number of bytes. The library writes fewer than `MOST`; excess bytes keep the program's
    // gate closed.
    let left = usize::try_from(there).unwrap_or(0).saturating_sub(1).min(MOST);
    if left == 0 {
        return Some((0, 0));
    }
    // Usually the number is small, so that only a small buffer is initialized.
    let (mut few, mut many);
    let bytes = if left < FEW {
        few = [0; FEW];
        &mut few[..]
    } else {
        many = [0; MOST + 1];
        &mut many[..]
    };
    // The application counts bytes before it writes them.
    if left > gates() as usize
        || !look(ours, &mut bytes[..=left]).is_ok_and(|found| found == (left + 1, false))
    {
        return None;
    }
    let mut taken = 0;
    while taken < left {
        match recv(ours, &mut bytes[taken..left], RecvFlags::DONTWAIT) {
            Ok((read @ 1.., _)) => taken += read,
            Err(Errno::INTR) => {}
            _ => break,
        }
    }
    // The first byte of the pair was checked before.
    let data = bytes[..taken].iter().skip(1).filter(|byte| **byte != 0).count();
    Some((taken as u32, data as u32))
}

/// Peeks at the bytes that the application has sent, up to the length of `bytes`. Returns the number of bytes, and
/// whether descriptors are among them. A peek ends at an out-of-band byte (`MSG_OOB`): if it returns fewer bytes than
/// the queue has, descriptors may be behind that byte.
pub(super) fn look(ours: BorrowedFd<'_>, bytes: &mut [u8]) -> Result<(usize, bool), Errno> {
    let parts = &mut [IoSliceMut::new(bytes)];
    let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
    let message = recvmsg(ours, parts, &mut RecvAncillaryBuffer::default(), flags)?;
    // The buffer has no room for descriptors, and the kernel reports the truncation. A peek leaves descriptors in the
    // queue.
    Ok((message.bytes, message.flags.contains(ReturnFlags::CTRUNC)))
}

/// Stops the reception of further bytes.
pub(super) fn stop_receiving(ours: BorrowedFd<'_>) {
    let _ = shutdown(ours, Shutdown::Read);
}

/// Whether descriptors may be in the queue of the stack's end. Closing it may then take a while, and the application's
/// end may be among them.
pub(super) fn may_hold_descriptors(ours: BorrowedFd<'_>) -> bool {
    let Some(there) = ioctl_fionread(ours).ok().and_then(|there| usize::try_from(there).ok()) else {
        return true;
    };
    // The first byte was written by the stack.
    there > 1 && !look(ours, &mut vec![0; there]).is_ok_and(|found| found == (there, false))
}

/// Closes the stack's end, to which no process can send any more. If its queue may contain descriptors, it is returned
/// instead: they are closed with the queue, which may take a while.
pub(super) fn close_plain(ours: OwnedFd) -> Option<OwnedFd> {
    may_hold_descriptors(ours.as_fd()).then_some(ours)
}

/// Sets the length of a listener's queue to about `messages` messages, within the limits of this process.
pub(super) fn set_backlog(ours: BorrowedFd<'_>, messages: usize) {
    // The kernel doubles the requested size.
    let size = messages.max(FEWEST) * MESSAGE / 2;
    if set_socket_send_buffer_size_force(ours, size).is_err() {
        // The kernel reduces the size to the allowed maximum. Further connections wait in the stack.
        let _ = set_socket_send_buffer_size(ours, size);
    }
}

#[cfg(test)]
mod tests {
    use super::super::wire;
    use super::*;

    #[test]
    fn kernel_sockets_behave_as_required() {
        let pairs = Pairs::calibrate().unwrap();
        assert!((1..=GATE).contains(&pairs.gate));
        let shows = |pair: &Pair| shows_out(pair.app.as_fd()).unwrap();
        let pair = pairs.pair(false).unwrap();
        assert!(shows(&pair));
        for round in 0..3 {
            // A blocking call may have written more bytes.
            for _ in 0..pairs.gate + round {
                put(pair.app.as_fd()).unwrap();
            }
            assert!(!shows(&pair));
            let _ = open_gate(pair.ours.as_fd(), || 99);
            assert!(shows(&pair));
        }
        let pair = pairs.pair(true).unwrap();
        assert!(!shows(&pair));
        let _ = open_gate(pair.ours.as_fd(), || 99);
        assert!(shows(&pair));
        let _ = open_gate(pair.ours.as_fd(), || 99);
        assert_eq!(ioctl_fionread(&pair.ours), Ok(1), "the byte over which it closes stays");
    }

    #[test]
    fn alarm_shows_pollpri_until_read() {
        let Pair { app, ours } = Pairs::calibrate().unwrap().pair(false).unwrap();
        let has_priority = || {
            let mut events = [PollFd::new(&app, PollFlags::PRI)];
            poll(&mut events, Some(&Timespec::default())).unwrap() > 0
        };
        put_token(ours.as_fd());
        put_alarm(ours.as_fd());
        put_token(ours.as_fd());
        // A read stops before the alarm.
        for (byte, priority) in [(0, true), (ALARM, false), (0, false)] {
            let mut bytes = [9];
            assert_eq!(recv(&app, &mut bytes[..], RecvFlags::DONTWAIT).map(|(read, _)| read), Ok(1));
            assert_eq!((bytes[0], has_priority()), (byte, priority));
        }
    }

    #[test]
    fn gate_opening_is_bounded() {
        let Pair { app, ours } = Pairs::calibrate().unwrap().pair(false).unwrap();
        set_socket_send_buffer_size(&app, 1 << 20).unwrap();
        let more = [0; 2 * MOST];
        assert_eq!(send(&app, &more, SendFlags::DONTWAIT), Ok(more.len()));
        let most = (MOST as u32, 0);
        assert_eq!(open_gate(ours.as_fd(), || u32::MAX), Some(most));
        assert_eq!(ioctl_fionread(&ours), Ok((more.len() + 1 - MOST) as u64));
    }

    #[test]
    fn queued_descriptors_prevent_plain_close() {
        let pairs = Pairs::calibrate().unwrap();
        let Pair { app, ours } = pairs.pair(true).unwrap();
        assert!(close_plain(ours).is_none());
        assert!(has_hung_up(app.as_fd()));
        // An out-of-band byte hides what follows it.
        for is_hidden in [false, true] {
            let Pair { app, ours } = pairs.pair(false).unwrap();
            set_socket_send_buffer_size(&app, 1 << 20).unwrap();
            assert_eq!(send(&app, &[0; MOST], SendFlags::DONTWAIT), Ok(MOST));
            if is_hidden {
                send(&app, &[0], SendFlags::OOB).unwrap();
                send(&app, &[0], SendFlags::DONTWAIT).unwrap();
            }
            assert_eq!(close_plain(ours).is_some(), is_hidden);
        }
        let Pair { app, ours } = pairs.pair(false).unwrap();
        wire::send(app.as_fd(), &[0; 100], &[app.as_fd(), app.as_fd()]).unwrap();
        assert_eq!(open_gate(ours.as_fd(), || 100), None);
        assert_eq!(look(ours.as_fd(), &mut [0; 200]), Ok((101, true)));
        drop(app);
        assert!(!has_hung_up(ours.as_fd()));
        assert!(close_plain(ours).is_some());
    }
}

//! A session's pair of sockets: what [`offcore_session::wake`] says of it, and whether this kernel does that.

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

/// Bytes that close the gate, at most.
const GATE: u32 = 8;
/// Sizes of a send buffer that are tried: this one, and so many more of so many bytes each.
const SMALLEST: usize = 2048;
const STEP: usize = 256;
const STEPS: usize = 128;
/// Bytes of kernel memory that a message in a listener's queue takes, at most; a queue that is not of a few messages at least
/// is told to have room again too late.
const MESSAGE: usize = 2048;
const FEWEST: usize = 16;
/// Bytes that are read to open a gate, at most.
const MOST: usize = 4096;
/// More than there are where only one call waits.
const FEW: usize = 64;

/// How pairs are made on this kernel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pairs {
    /// `SO_SNDBUF` of the application's end, as it is asked for.
    buffer: usize,
    /// Bytes that close the gate.
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
    /// Tries how large the send buffer has to be, and how many bytes close the gate.
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

    /// How many bytes close the gate of a pair; none where it does not do what it should, or has no room for tokens.
    fn try_gate(&self, pair: &Pair) -> Result<Option<u32>, Errno> {
        // With some that a process's end adds.
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

    /// A pair with the byte over which the stack's end closes. The application's end blocks until the application says
    /// otherwise.
    pub(super) fn pair(&self, closed: bool) -> Result<Pair, Errno> {
        let (app, ours) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        set_socket_send_buffer_size(&app, self.buffer)?;
        // An application that never takes its tokens does not cost more memory than others.
        set_socket_send_buffer_size(&ours, self.buffer)?;
        ioctl_fionbio(&ours, true)?;
        set_socket_oobinline(&app, true)?;
        for _ in 0..if closed { self.gate + 1 } else { 1 } {
            put(app.as_fd())?;
        }
        Ok(Pair { app, ours })
    }
}

/// Whether `poll` shows that a descriptor can be written to.
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

/// Writes the token. Where it fails the application's end is closed, or full of tokens.
pub(super) fn put_token(ours: BorrowedFd<'_>) {
    let _ = put(ours);
}

/// Writes an alarm, or the token where the kernel lacks `CONFIG_AF_UNIX_OOB`.
pub(super) fn put_alarm(ours: BorrowedFd<'_>) {
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    if send(ours, &[ALARM], flags | SendFlags::OOB) == Err(Errno::OPNOTSUPP) {
        let _ = send(ours, &[ALARM], flags);
    }
}

/// Opens the gate: reads all but one byte, and no more than [`MOST`]. Blocking calls may have written more than what closes it.
/// How many were read, and how many of them were none of a gate's. `None`: there are more than `gates` says, so that data is
/// among them, or descriptors are; nothing was read.
pub(super) fn open_gate(ours: BorrowedFd<'_>, gates: impl FnOnce() -> u32) -> Option<(u32, u32)> {
    let there = ioctl_fionread(ours).unwrap_or(0);
    // A program can put as much there as it likes; the library puts less, and what is more keeps the program's gate closed.
    let left = usize::try_from(there).unwrap_or(0).saturating_sub(1).min(MOST);
    if left == 0 {
        return Some((0, 0));
    }
    // There are few, mostly: then so many are cleared.
    let (mut few, mut many);
    let bytes = if left < FEW {
        few = [0; FEW];
        &mut few[..]
    } else {
        many = [0; MOST + 1];
        &mut many[..]
    };
    // They are counted before they are put there.
    if left > gates() as usize
        || look(ours, &mut bytes[..=left]).is_ok_and(|(_, has_descriptors)| has_descriptors)
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
    // The first byte of the pair was looked at before.
    let data = bytes[..taken].iter().skip(1).filter(|byte| **byte != 0).count();
    Some((taken as u32, data as u32))
}

/// Looks at what is in a pair and was sent by the application, without taking it: as much as `bytes` has room for, or less. How
/// many bytes there are, and whether descriptors are among them.
pub(super) fn look(ours: BorrowedFd<'_>, bytes: &mut [u8]) -> Result<(usize, bool), Errno> {
    let parts = &mut [IoSliceMut::new(bytes)];
    let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
    let message = recvmsg(ours, parts, &mut RecvAncillaryBuffer::default(), flags)?;
    // There is no room for descriptors, and the kernel says so; those that are only looked at stay.
    Ok((message.bytes, message.flags.contains(ReturnFlags::CTRUNC)))
}

/// From now on nothing more comes.
pub(super) fn take_no_more(ours: BorrowedFd<'_>) {
    let _ = shutdown(ours, Shutdown::Read);
}

/// Closes our end, to which nobody can send any more. One whose queue may have descriptors, which are closed with it, is given
/// back: to close those may take a while.
pub(super) fn close_plain(ours: OwnedFd) -> Option<OwnedFd> {
    let there = ioctl_fionread(&ours);
    // The first byte is ours.
    if there.is_ok_and(|there| there <= 1) {
        return None;
    }
    let mut bytes = [0; MOST];
    match look(ours.as_fd(), &mut bytes) {
        Ok((len, false)) if len < MOST => None,
        _ => Some(ours),
    }
}

/// Lets about `messages` messages lie in a listener's queue, as far as this process may.
pub(super) fn set_backlog(ours: BorrowedFd<'_>, messages: usize) {
    // The kernel doubles what it is asked for.
    let size = messages.max(FEWEST) * MESSAGE / 2;
    if set_socket_send_buffer_size_force(ours, size).is_err() {
        // Cut to what is allowed: connections beyond wait in the stack.
        let _ = set_socket_send_buffer_size(ours, size);
    }
}

#[cfg(test)]
mod tests {
    use super::super::wire;
    use super::*;

    #[test]
    fn this_kernel_keeps_the_contract() {
        let pairs = Pairs::calibrate().unwrap();
        assert!((1..=GATE).contains(&pairs.gate));
        let shows = |pair: &Pair| shows_out(pair.app.as_fd()).unwrap();
        let pair = pairs.pair(false).unwrap();
        assert!(shows(&pair));
        for round in 0..3 {
            // A blocking call may have put in more.
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
    fn an_alarm_shows_priority_until_it_is_read() {
        let Pair { app, ours } = Pairs::calibrate().unwrap().pair(false).unwrap();
        let has_priority = || {
            let mut events = [PollFd::new(&app, PollFlags::PRI)];
            poll(&mut events, Some(&Timespec::default())).unwrap() > 0
        };
        put_token(ours.as_fd());
        put_alarm(ours.as_fd());
        put_token(ours.as_fd());
        // Reads stop before it.
        for (byte, priority) in [(0, true), (ALARM, false), (0, false)] {
            let mut bytes = [9];
            assert_eq!(recv(&app, &mut bytes[..], RecvFlags::DONTWAIT).map(|(read, _)| read), Ok(1));
            assert_eq!((bytes[0], has_priority()), (byte, priority));
        }
    }

    #[test]
    fn a_gate_takes_no_longer_than_its_bytes() {
        let Pair { app, ours } = Pairs::calibrate().unwrap().pair(false).unwrap();
        set_socket_send_buffer_size(&app, 1 << 20).unwrap();
        let more = [0; 2 * MOST];
        assert_eq!(send(&app, &more, SendFlags::DONTWAIT), Ok(more.len()));
        let most = (MOST as u32, 0);
        assert_eq!(open_gate(ours.as_fd(), || u32::MAX), Some(most));
        assert_eq!(ioctl_fionread(&ours), Ok((more.len() + 1 - MOST) as u64));
    }

    #[test]
    fn an_end_with_descriptors_in_its_queue_is_given_back() {
        let pairs = Pairs::calibrate().unwrap();
        let Pair { app, ours } = pairs.pair(true).unwrap();
        assert!(close_plain(ours).is_none());
        assert!(has_hung_up(app.as_fd()));
        // As many bytes as are looked at may have some behind them.
        let Pair { app, ours } = pairs.pair(false).unwrap();
        set_socket_send_buffer_size(&app, 1 << 20).unwrap();
        assert_eq!(send(&app, &[0; MOST], SendFlags::DONTWAIT), Ok(MOST));
        assert!(close_plain(ours).is_some());
        let Pair { app, ours } = pairs.pair(false).unwrap();
        wire::send(app.as_fd(), &[0; 100], &[app.as_fd(), app.as_fd()]).unwrap();
        assert_eq!(open_gate(ours.as_fd(), || 100), None);
        assert_eq!(look(ours.as_fd(), &mut [0; 200]), Ok((101, true)));
        drop(app);
        assert!(!has_hung_up(ours.as_fd()));
        assert!(close_plain(ours).is_some());
    }
}

//! Finds out whether the other end of a session's socket pair is closed or only shut down.
//!
//! A Unix socket reports `HUP` when its other end is closed, and also when both directions were shut down while the
//! other end is still open. The kernel's socket diagnostics distinguish the two cases: they name the other end as long
//! as it is open.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::sleep;
use std::time::Duration;
use std::vec;

use rustix::fs::fstat;
use rustix::io::Errno;
use rustix::net::netlink::SOCK_DIAG;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, Shutdown, SocketFlags, SocketType, recv, send, shutdown,
    socket_with, socketpair,
};

use super::errands::{Errands, notify};
use super::key::Key;

/// Constants of `linux/netlink.h`, `linux/sock_diag.h` and `linux/unix_diag.h`.
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLM_F_REQUEST: u16 = 1;
const NLM_F_DUMP: u16 = 0x300;
const UDIAG_SHOW_PEER: u32 = 4;
const UNIX_DIAG_PEER: u16 = 2;
const AF_UNIX: u32 = 1;
/// Lengths in bytes of a netlink header, of the question after it, and of the part of an answer between the header and
/// the attributes.
const HEADER: usize = 16;
const QUESTION: usize = 24;
const ANSWER: usize = 16;
/// Buffer size for the answers about all sockets, in bytes.
const DUMPED: usize = 32 << 10;
/// Maximum number of sockets that are queried individually.
const FEW: usize = 3;
/// How long questions are collected before the kernel is asked. Programs often close a connection right after they shut
/// it down.
const COLLECTED: Duration = Duration::from_millis(2);
/// Number of attempts to create a netlink socket, and the time between them.
const TRIES: usize = 100;
const AGAIN: Duration = Duration::from_millis(10);

/// Queries the kernel outside the workers, because a query searches all Unix sockets of this network namespace. The
/// questions of a user are combined into one query, and further ones are collected until it is answered.
#[derive(Debug)]
pub(super) struct Peers {
    /// The kernel supports the queries.
    known: bool,
    /// Questions that wait for the running query of the same user.
    waiting: HashMap<u32, Vec<Asked>>,
    /// Answers, by user. The users take turns.
    ready: VecDeque<(u32, vec::IntoIter<Answer>)>,
    answers: Receiver<(u32, Vec<Answer>)>,
    to: Sender<(u32, Vec<Answer>)>,
    /// Wakes the worker when answers are available.
    helpers: Arc<OwnedFd>,
}

/// A session, and the inode number of the stack's end.
type Asked = (Key, u32);

/// A session, and whether its other end is open; `None` if the kernel does not answer.
type Answer = (Key, Option<bool>);

impl Peers {
    /// Tests whether the kernel supports the queries.
    pub(super) fn new(helpers: Arc<OwnedFd>) -> Self {
        let known = probe_unix_diag() == Ok(true);
        if !known {
            tracing::warn!(
                "the kernel lacks socket diagnostics for Unix sockets (CONFIG_UNIX_DIAG): a session with both directions \
                 shut down counts as closed"
            );
        }
        let (to, answers) = channel();
        Self { known, waiting: HashMap::new(), ready: VecDeque::new(), answers, to, helpers }
    }

    /// Whether the kernel supports the queries.
    pub(super) fn are_known(&self) -> bool {
        self.known
    }

    /// Queries for a user whether the other end of a session is open. Returns `false` if the kernel cannot answer.
    pub(super) fn ask(&mut self, user: u32, key: Key, ours: BorrowedFd<'_>, errands: &mut Errands) -> bool {
        let Some(inode) = fstat(ours).ok().filter(|_| self.known).map(|stat| stat.st_ino as u32) else {
            return false;
        };
        let asked = (key, inode);
        if let Some(waiting) = self.waiting.get_mut(&user) {
            waiting.push(asked);
        } else {
            self.waiting.insert(user, Vec::new());
            self.run(user, vec![asked], errands);
        }
        true
    }

    /// Returns the next answer and its user.
    pub(super) fn next(&mut self, errands: &mut Errands) -> Option<(u32, Answer)> {
        while let Ok((user, answers)) = self.answers.try_recv() {
            self.ready.push_back((user, answers.into_iter()));
            if let Some(asked) = self.waiting.remove(&user).filter(|asked| !asked.is_empty()) {
                self.waiting.insert(user, Vec::new());
                self.run(user, asked, errands);
            }
        }
        let (user, mut answers) = self.ready.pop_front()?;
        let answer = answers.next();
        if answers.len() > 0 {
            self.ready.push_back((user, answers));
        }
        answer.map(|answer| (user, answer))
    }

    fn run(&self, user: u32, asked: Vec<Asked>, errands: &mut Errands) {
        let (to, helpers) = (self.to.clone(), Arc::clone(&self.helpers));
        errands.run(user, move || {
            sleep(COLLECTED);
            let inodes: Vec<_> = asked.iter().map(|(_, inode)| *inode).collect();
            let answers = asked.iter().map(|(key, _)| *key).zip(all_live(&inodes)).collect();
            let _ = to.send((user, answers));
            notify(&helpers);
        });
    }
}

/// Whether the kernel distinguishes an open peer from a closed one.
fn probe_unix_diag() -> Result<bool, Errno> {
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    shutdown(&ours, Shutdown::Both)?;
    let inode = fstat(&ours)?.st_ino as u32;
    let there = all_live(&[inode]);
    drop(theirs);
    Ok((there, all_live(&[inode])) == (vec![Some(true)], vec![Some(false)]))
}

/// Whether the other ends of sockets are open.
fn all_live(inodes: &[u32]) -> Vec<Option<bool>> {
    let Some(socket) = diagnostics() else { return vec![None; inodes.len()] };
    // A query for one socket takes almost as long as a query for all of them.
    let mut found = HashMap::new();
    if inodes.len() > FEW {
        found.extend(inodes.iter().map(|inode| (*inode, None)));
        let _ = dump(&socket, &mut found);
    }
    // A dump may miss a socket while others are created and closed.
    inodes
        .iter()
        .map(|inode| found.get(inode).copied().flatten().or_else(|| lives(&socket, *inode)))
        .collect()
}

/// Opens a netlink socket. It retries while descriptors are exhausted.
fn diagnostics() -> Option<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    (0..TRIES).find_map(|tried| {
        if tried > 0 {
            sleep(AGAIN);
        }
        match socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, Some(SOCK_DIAG)) {
            Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => None,
            result => Some(result.ok()),
        }
    })?
}

/// Queries one socket, or all of them.
fn ask(socket: &OwnedFd, inode: u32, flags: u16) -> Result<(), Errno> {
    let len = (HEADER + QUESTION) as u32;
    let kind = u32::from(SOCK_DIAG_BY_FAMILY) | u32::from(NLM_F_REQUEST | flags) << 16;
    // Header: length, kind and flags, number, sender. Question: family, states, inode, requested attributes, any
    // cookie.
    let words = [len, kind, 1, 0, AF_UNIX, u32::MAX, inode, UDIAG_SHOW_PEER, u32::MAX, u32::MAX];
    let mut question = [0; HEADER + QUESTION];
    for (bytes, word) in question.chunks_exact_mut(4).zip(words) {
        bytes.copy_from_slice(&word.to_ne_bytes()); // copy-ok: a few bytes of a message
    }
    send(socket, &question, SendFlags::empty()).map(drop)
}

/// Whether the other end of a socket is open; `None` if the kernel does not answer.
fn lives(socket: &OwnedFd, inode: u32) -> Option<bool> {
    ask(socket, inode, 0).ok()?;
    let mut bytes = [0; 512];
    let (len, _) = recv(socket, &mut bytes[..], RecvFlags::empty()).ok()?;
    peer(bytes.get(..len)?)
}

/// Queries all sockets and stores the answers for those in `found`.
fn dump(socket: &OwnedFd, found: &mut HashMap<u32, Option<bool>>) -> Result<(), Errno> {
    ask(socket, 0, NLM_F_DUMP)?;
    let mut bytes = vec![0; DUMPED];
    loop {
        let (len, _) = recv(socket, &mut bytes[..], RecvFlags::empty())?;
        let mut messages = bytes.get(..len).unwrap_or_default();
        while let Some(len) = word(messages, 0).map(|len| len as usize).filter(|len| *len >= HEADER) {
            let message = messages.get(..len).unwrap_or(messages);
            if half(message, 4) != Some(SOCK_DIAG_BY_FAMILY) {
                return Ok(());
            }
            if let Some(found) = word(message, HEADER + 4).and_then(|inode| found.get_mut(&inode)) {
                *found = peer(message);
            }
            messages = messages.get(len.next_multiple_of(4)..).unwrap_or_default();
        }
        if len == 0 {
            return Ok(());
        }
    }
}

fn half(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk().map(|bytes| u16::from_ne_bytes(*bytes))
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes))
}

/// Reads an answer. The inode of a closed peer is 0.
fn peer(answer: &[u8]) -> Option<bool> {
    if half(answer, 4)? != SOCK_DIAG_BY_FAMILY {
        return None;
    }
    let mut attributes = answer.get(HEADER + ANSWER..)?;
    while let (Some(len), Some(kind)) = (half(attributes, 0), half(attributes, 2)) {
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
    use std::os::fd::AsFd;

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    #[test]
    fn truncated_diag_answers_are_rejected() {
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
    fn shut_down_peer_still_lives() {
        if probe_unix_diag() != Ok(true) {
            return println!("SKIP: shut_down_peer_still_lives: no CONFIG_UNIX_DIAG");
        }
        let pairs: Vec<_> = (0..2000)
            .map(|_| socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap())
            .collect();
        let inodes: Vec<_> = pairs.iter().map(|(ours, _)| fstat(ours).unwrap().st_ino as u32).collect();
        assert_eq!(all_live(&inodes[..1]), [Some(true)]);
        pairs.iter().for_each(|(_, theirs)| shutdown(theirs, Shutdown::Both).unwrap());
        assert_eq!(all_live(&inodes[..1]), [Some(true)]);
        assert!(all_live(&inodes).into_iter().all(|lives| lives == Some(true)));
        let half: Vec<_> = pairs
            .into_iter()
            .zip(0..)
            .map(|(pair, number)| (pair.0, (number % 2 == 0).then_some(pair.1)))
            .collect();
        let expected: Vec<_> = half.iter().map(|(_, theirs)| Some(theirs.is_some())).collect();
        assert_eq!(all_live(&inodes), expected);
        assert_eq!(all_live(&inodes[1..2]), [Some(false)]);
    }

    #[test]
    fn peer_queries_run_per_user() {
        let helpers = Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        let mut peers = Peers::new(Arc::clone(&helpers));
        if !peers.are_known() {
            return println!("SKIP: peer_queries_run_per_user: no CONFIG_UNIX_DIAG");
        }
        let mut errands = Errands::new(rustix::thread::sched_getaffinity(None).unwrap(), helpers);
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        let (go, wait) = channel::<()>();
        errands.run(1, move || wait.recv().unwrap());
        let key = |number| Key::new(super::super::key::Source::End, 0, number, 1);
        for number in 0..50 {
            assert!(peers.ask(1, key(number), ours.as_fd(), &mut errands));
        }
        assert!(peers.ask(2, key(99), ours.as_fd(), &mut errands));
        let next = |peers: &mut Peers, errands: &mut Errands| loop {
            match peers.next(errands) {
                Some(answer) => break answer,
                None => sleep(Duration::from_millis(1)),
            }
        };
        assert_eq!(next(&mut peers, &mut errands), (2, (key(99), Some(true))));
        drop(theirs);
        go.send(()).unwrap();
        assert_eq!(next(&mut peers, &mut errands), (1, (key(0), Some(false))));
        while errands.has_some(1) {
            sleep(Duration::from_millis(1));
        }
        assert_eq!(next(&mut peers, &mut errands), (1, (key(1), Some(false))));
        assert!(peers.ask(2, key(98), ours.as_fd(), &mut errands));
        while errands.has_some(2) {
            sleep(Duration::from_millis(1));
        }
        let users = [(); 3].map(|()| next(&mut peers, &mut errands).0);
        assert!(users.contains(&2), "users take turns: {users:?}");
        let rest: Vec<_> = std::iter::from_fn(|| peers.next(&mut errands)).collect();
        assert_eq!(rest.len(), 46);
    }
}

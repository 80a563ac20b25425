//! The epoll sets of a server, and the keys that identify its descriptors.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use arrayvec::ArrayVec;
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;

/// Maximum number of descriptors of the stack and of users with events taken at a time, and of events of a user.
pub(super) const AT_ONCE: usize = 64;
const OF_USER: usize = 8;

/// The maximum number of applications.
pub(super) const APPLICATIONS: usize = 1 << 12;

/// The kind of a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Source {
    /// The socket at which processes attach.
    ServeSocket,
    /// A process that has not identified itself yet.
    Guest,
    /// The socket of a process, and its pidfd.
    Channel,
    Process,
    /// The eventfd with which an application wakes the stack.
    Event,
    /// The stack's end of a session, and the pipe that remains after a reset.
    End,
    Pipe,
    /// The thread that accepts from an application's kernel listeners.
    Kernel,
    /// Results of threads outside the workers: created memory, answers about the other ends of sessions, and users that
    /// are below the limit of errands again.
    Helpers,
    /// The epoll set of a user. The generation is the index of the set.
    User,
}

const SOURCES: [Source; 10] = [
    Source::ServeSocket,
    Source::Guest,
    Source::Channel,
    Source::Process,
    Source::Event,
    Source::End,
    Source::Pipe,
    Source::Kernel,
    Source::Helpers,
    Source::User,
];

/// Identifies a descriptor. The generation distinguishes it from an earlier user of the same number, because an event
/// may belong to an object that an earlier event of the same call has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key {
    pub(super) source: Source,
    /// Index of the application, below [`APPLICATIONS`].
    pub(super) app: u16,
    /// Number of the process or session within the application.
    pub(super) number: u32,
    pub(super) generation: u32,
}

impl Key {
    pub(super) fn new(source: Source, app: usize, number: u32, generation: u32) -> Self {
        Self { source, app: app as u16, number, generation }
    }

    fn word(self) -> u64 {
        let high = (self.source as u64) << 28 | u64::from(self.app) << 16 | u64::from(self.number & 0xffff);
        high << 32 | u64::from(self.generation)
    }

    fn from_word(word: u64) -> Self {
        let high = word >> 32;
        Self {
            source: SOURCES[(high >> 28) as usize % SOURCES.len()],
            app: (high >> 16) as u16 % APPLICATIONS as u16,
            number: high as u32 & 0xffff,
            generation: word as u32,
        }
    }
}

/// Epoll sets. Each user has an edge-triggered set, so the events of a user can wait
/// while other users have work. One
/// more set contains these sets and the descriptors of the stack itself. The handler of an event must process
/// everything that is pending.
#[derive(Debug)]
pub(super) struct Watch {
    stack: OwnedFd,
    users: Vec<(u32, OwnedFd)>,
}

impl Watch {
    pub(super) fn new() -> Result<Self, Errno> {
        let stack = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        Ok(Self { stack, users: Vec::new() })
    }

    /// Is readable when there are events.
    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.stack.as_fd()
    }

    /// Adds a descriptor of the stack itself.
    pub(super) fn add_stack_descriptor(&self, fd: BorrowedFd<'_>, source: Source) -> Result<(), Errno> {
        let data = epoll::EventData::new_u64(Key::new(source, 0, 0, 0).word());
        epoll::add(&self.stack, fd, data, epoll::EventFlags::IN | epoll::EventFlags::ET)
    }

    /// Returns the set of a user, which is created on first use.
    fn of(&mut self, user: u32) -> Result<&OwnedFd, Errno> {
        let at = match self.users.iter().position(|(other, _)| *other == user) {
            Some(at) => at,
            None => {
                let (set, at) = (epoll::create(epoll::CreateFlags::CLOEXEC)?, self.users.len());
                let data = epoll::EventData::new_u64(Key::new(Source::User, 0, 0, at as u32).word());
                // Level-triggered: events beyond the user's part of a round are reported again.
                epoll::add(&self.stack, &set, data, epoll::EventFlags::IN)?;
                self.users.push((user, set));
                at
            }
        };
        Ok(&self.users[at].1)
    }

    /// Adds a descriptor of a user. It stays in the set until all its duplicates are closed. A hang-up is always
    /// reported.
    pub(super) fn add(
        &mut self,
        user: u32,
        fd: BorrowedFd<'_>,
        key: Key,
        wanted: epoll::EventFlags,
    ) -> Result<(), Errno> {
        let flags = wanted | epoll::EventFlags::ET;
        epoll::add(self.of(user)?, fd, epoll::EventData::new_u64(key.word()), flags)
    }

    /// Changes the events or the key of a descriptor. A pending event is reported again.
    pub(super) fn change(
        &mut self,
        user: u32,
        fd: BorrowedFd<'_>,
        key: Key,
        wanted: epoll::EventFlags,
    ) -> Result<(), Errno> {
        let flags = wanted | epoll::EventFlags::ET;
        epoll::modify(self.of(user)?, fd, epoll::EventData::new_u64(key.word()), flags)
    }

    /// Removes a descriptor. This is necessary if other processes may have duplicates.
    pub(super) fn remove(&mut self, user: u32, fd: BorrowedFd<'_>) {
        let _ = self.of(user).and_then(|set| epoll::delete(set, fd));
    }

    /// Takes the events of the stack's own descriptors, and the indices of users that have events. Returns whether
    /// there may be more.
    pub(super) fn take(&self, events: &mut Vec<Key>, users: &mut ArrayVec<usize, AT_ONCE>) -> bool {
        let mut space = [const { MaybeUninit::uninit() }; AT_ONCE];
        let found = take_from(&self.stack, &mut space);
        for key in found.iter().map(|event| Key::from_word(event.data.u64())) {
            match key.source {
                Source::User => users.push(key.generation as usize),
                _ => events.push(key),
            }
        }
        found.len() >= AT_ONCE
    }

    /// Takes up to [`OF_USER`] events of the user with this index. Returns the user, and whether there may be more.
    pub(super) fn take_of_user(&self, at: usize, events: &mut Vec<(Key, epoll::EventFlags)>) -> (u32, bool) {
        let mut space = [const { MaybeUninit::uninit() }; OF_USER];
        let Some((user, set)) = self.users.get(at) else { return (u32::MAX, false) };
        let found = take_from(set, &mut space);
        events.extend(found.iter().map(|event| (Key::from_word(event.data.u64()), event.flags)));
        (*user, found.len() >= OF_USER)
    }
}

/// Takes the pending events of an epoll set. If a signal interrupts the call, the next call returns them.
fn take_from<'a>(set: &OwnedFd, space: &'a mut [MaybeUninit<epoll::Event>]) -> &'a [epoll::Event] {
    epoll::wait(set, space, Some(&Timespec::default())).map_or(&[], |(events, _)| events)
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    #[test]
    fn event_key_round_trips() {
        for (at, source) in SOURCES.into_iter().enumerate() {
            assert_eq!(source as usize, at);
            for (app, number, generation) in [(0, 0, 0), (APPLICATIONS - 1, 65_535, u32::MAX), (1, 2, 3)] {
                let key = Key::new(source, app, number, generation);
                assert_eq!(Key::from_word(key.word()), key);
            }
        }
    }

    #[test]
    fn busy_user_does_not_delay_events() {
        let mut watch = Watch::new().unwrap();
        let event = || eventfd(1, EventfdFlags::NONBLOCK).unwrap();
        let many: Vec<_> = (0..10 * AT_ONCE).map(|_| event()).collect();
        for (fd, number) in many.iter().zip(0..) {
            watch.add(1, fd.as_fd(), Key::new(Source::End, 0, number, 1), epoll::EventFlags::IN).unwrap();
        }
        let other = event();
        watch.add(2, other.as_fd(), Key::new(Source::End, 1, 0, 1), epoll::EventFlags::IN).unwrap();
        let (mut own, mut users, mut events) = (Vec::new(), ArrayVec::new(), Vec::new());
        assert!(!watch.take(&mut own, &mut users));
        assert!(own.is_empty() && users.len() == 2);
        let taken: Vec<_> = users.iter().map(|at| watch.take_of_user(*at, &mut events)).collect();
        assert_eq!((events.len(), taken), (OF_USER + 1, vec![(1, true), (2, false)]));
        // Events that were not taken are reported again.
        loop {
            users.clear();
            watch.take(&mut own, &mut users);
            let Some(at) = users.first() else { break };
            watch.take_of_user(*at, &mut events);
        }
        assert_eq!(events.len(), many.len() + 1, "each edge is reported once");
    }
}

//! The epoll set of a server, and the keys that identify its descriptors.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{Timespec, epoll};
use rustix::io::Errno;

/// Maximum number of events taken at a time.
pub(super) const AT_ONCE: usize = 64;

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
    /// Memory that was created for applications.
    Memory,
    /// Answers about the other ends of sessions.
    Peers,
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
    Source::Memory,
    Source::Peers,
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

/// An edge-triggered epoll set. The handler of an event must process everything that is pending.
#[derive(Debug)]
pub(super) struct Watch {
    epoll: OwnedFd,
}

impl Watch {
    pub(super) fn new() -> Result<Self, Errno> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        Ok(Self { epoll })
    }

    /// Is readable when there are events.
    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Adds a descriptor. It stays in the set until all its duplicates are closed. A hang-up is always reported.
    pub(super) fn add(&self, fd: BorrowedFd<'_>, key: Key, wanted: epoll::EventFlags) -> Result<(), Errno> {
        let flags = wanted | epoll::EventFlags::ET;
        epoll::add(&self.epoll, fd, epoll::EventData::new_u64(key.word()), flags)
    }

    /// Changes the events or the key of a descriptor. A pending event is reported again.
    pub(super) fn change(
        &self,
        fd: BorrowedFd<'_>,
        key: Key,
        wanted: epoll::EventFlags,
    ) -> Result<(), Errno> {
        let flags = wanted | epoll::EventFlags::ET;
        epoll::modify(&self.epoll, fd, epoll::EventData::new_u64(key.word()), flags)
    }

    /// Removes a descriptor. This is necessary if other processes may have duplicates.
    pub(super) fn remove(&self, fd: BorrowedFd<'_>) {
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// Takes pending events, up to [`AT_ONCE`].
    pub(super) fn take(&self, into: &mut Vec<(Key, epoll::EventFlags)>) {
        let mut space = [const { MaybeUninit::uninit() }; AT_ONCE];
        // After an interruption by a signal, the next call returns the events.
        if let Ok((events, _)) = epoll::wait(&self.epoll, &mut space[..], Some(&Timespec::default())) {
            into.extend(events.iter().map(|event| (Key::from_word(event.data.u64()), event.flags)));
        }
    }
}

#[cfg(test)]
mod tests {
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
}

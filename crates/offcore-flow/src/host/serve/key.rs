//! What the kernel tells of: descriptors, by what they are of.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{Timespec, epoll};
use rustix::io::Errno;

/// Events that are taken at a time.
pub(super) const AT_ONCE: usize = 64;

/// The maximum number of applications.
pub(super) const APPLICATIONS: usize = 1 << 12;

/// What a descriptor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Source {
    /// Where processes attach.
    Door,
    /// A process that has not said who it is.
    Guest,
    /// A process's socket, and the process.
    Channel,
    Process,
    /// What an application wakes the stack by.
    Event,
    /// Our end of a session, and what outlives it.
    End,
    Pipe,
    /// The thread that has an application's listeners of the kernel's.
    Kernel,
    /// Memory that was made.
    Memory,
    /// Whether other ends of sessions are there.
    Peers,
}

const SOURCES: [Source; 10] = [
    Source::Door,
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

/// Names a descriptor. The generation tells what it is of from what had the number before: an event may be of something
/// that an earlier one of the same call has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key {
    pub(super) source: Source,
    /// Number of the application, below [`APPLICATIONS`].
    pub(super) app: u16,
    /// Number of the process or session in it.
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

/// A set of descriptors. Each event is told once: whoever hears of it goes on until there is no more.
#[derive(Debug)]
pub(super) struct Watch {
    epoll: OwnedFd,
}

impl Watch {
    pub(super) fn new() -> Result<Self, Errno> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        Ok(Self { epoll })
    }

    /// Readable when there are events.
    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Adds a descriptor, which is there until it is closed everywhere. That it has hung up is told without being asked for.
    pub(super) fn add(&self, fd: BorrowedFd<'_>, key: Key, wanted: epoll::EventFlags) -> Result<(), Errno> {
        let flags = wanted | epoll::EventFlags::ET;
        epoll::add(&self.epoll, fd, epoll::EventData::new_u64(key.word()), flags)
    }

    /// Changes what is wanted of it, or what it is. An event that is there is told anew.
    pub(super) fn change(
        &self,
        fd: BorrowedFd<'_>,
        key: Key,
        wanted: epoll::EventFlags,
    ) -> Result<(), Errno> {
        let flags = wanted | epoll::EventFlags::ET;
        epoll::modify(&self.epoll, fd, epoll::EventData::new_u64(key.word()), flags)
    }

    /// Takes a descriptor out that others have, too.
    pub(super) fn remove(&self, fd: BorrowedFd<'_>) {
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// Takes what there is, [`AT_ONCE`] at most.
    pub(super) fn take(&self, into: &mut Vec<(Key, epoll::EventFlags)>) {
        let mut space = [const { MaybeUninit::uninit() }; AT_ONCE];
        // It fails where a signal comes: the next call finds what there is.
        if let Ok((events, _)) = epoll::wait(&self.epoll, &mut space[..], Some(&Timespec::default())) {
            into.extend(events.iter().map(|event| (Key::from_word(event.data.u64()), event.flags)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_read_as_they_were_written() {
        for (at, source) in SOURCES.into_iter().enumerate() {
            assert_eq!(source as usize, at);
            for (app, number, generation) in [(0, 0, 0), (APPLICATIONS - 1, 65_535, u32::MAX), (1, 2, 3)] {
                let key = Key::new(source, app, number, generation);
                assert_eq!(Key::from_word(key.word()), key);
            }
        }
    }
}

//! Memory of applications. To map and to touch it takes some ten milliseconds, to unmap it some, too; the thread of its user has
//! them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use offcore_session::{Memory, Segment, Wanted};
use offcore_tcp::proto::{AppId, AppMemory};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

use super::errands::Errands;

/// What was made; none where the system has no more.
#[derive(Debug)]
pub(super) enum Made {
    /// Memory of a new application of a user's, for the guest of that generation.
    New { user: u32, guest: u32, memory: Option<AppMemory> },
    /// More for an application that is there: its number here, and the stack's.
    More { app: usize, id: AppId, segment: Option<Segment> },
}

/// Where it comes from.
#[derive(Debug)]
pub(super) struct Feed {
    made: Receiver<Made>,
    to: Sender<Made>,
    /// Tells the worker that something was made.
    told: Arc<OwnedFd>,
    /// Memory of applications that are gone, by user: the stack may still send from it.
    left: Vec<(u32, Arc<Memory>)>,
}

impl Feed {
    pub(super) fn new() -> Result<Self, Errno> {
        let (to, made) = channel();
        let told = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        Ok(Self { made, to, told, left: Vec::new() })
    }

    /// Has an event when there is something to be [taken](Self::next).
    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.told.as_fd()
    }

    /// The next thing that was made.
    pub(super) fn next(&self) -> Option<Made> {
        self.made.try_recv().ok()
    }

    /// Has memory of a new application made, of so many bytes at most.
    pub(super) fn begin(&self, user: u32, guest: u32, bytes: usize, errands: &mut Errands) {
        self.run(user, errands, move || Made::New { user, guest, memory: AppMemory::new(bytes).ok() });
    }

    /// Has more made for one that is there.
    pub(super) fn go_on(&self, user: u32, (app, id): (usize, AppId), wanted: Wanted, errands: &mut Errands) {
        self.run(user, errands, move || Made::More { app, id, segment: Segment::new(wanted).ok() });
    }

    /// The application of this memory is gone.
    pub(super) fn leave(&mut self, user: u32, memory: Arc<Memory>) {
        self.left.push((user, memory));
    }

    /// Has memory unmapped that nobody else holds any more.
    pub(super) fn unmap(&mut self, errands: &mut Errands) {
        for (user, memory) in self.left.extract_if(.., |(_, memory)| Arc::strong_count(memory) == 1) {
            errands.close(user, memory);
        }
    }

    fn run(&self, user: u32, errands: &mut Errands, make: impl FnOnce() -> Made + Send + 'static) {
        let (to, told) = (self.to.clone(), Arc::clone(&self.told));
        errands.run(user, move || {
            // Who would hear of it is gone: then it is unmapped here.
            if to.send(make()).is_ok() {
                let _ = rustix::io::write(&*told, &1u64.to_ne_bytes());
            }
        });
    }
}

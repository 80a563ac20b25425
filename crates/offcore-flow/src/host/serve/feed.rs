//! Memory of applications. The thread of its user maps it, and unmaps it: that takes up to some ten milliseconds.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use offcore_mem::mapping::available_memory;
use offcore_session::message::KEY;
use offcore_session::{Budget, Charge, Memory, Segment, Wanted};
use offcore_tcp::proto::AppMemory;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

use super::errands::Errands;

/// What was made; none where the system has no more.
#[derive(Debug)]
pub(super) enum Made {
    /// Memory of a user's new application, which has this key.
    New { user: u32, key: [u8; KEY], memory: Option<AppMemory>, share: Share },
    /// More for an application that is there: its number, its user, and what it has.
    More { app: usize, user: u32, memory: Arc<Memory>, segment: Option<Segment> },
}

/// One application's part of its user's budget, from before its memory is made until after it is unmapped.
#[derive(Debug)]
pub(super) struct Share(#[expect(dead_code, reason = "it is counted")] Arc<Charge>);

/// Memory of an application that is gone.
#[derive(Debug)]
struct Left {
    user: u32,
    memory: Arc<Memory>,
    share: Share,
}

/// Where it comes from.
#[derive(Debug)]
pub(super) struct Feed {
    made: Receiver<Made>,
    to: Sender<Made>,
    /// Tells the worker that something was made.
    told: Arc<OwnedFd>,
    /// Bytes that the applications of a user may use together.
    share: usize,
    /// The budget of each user, with a reference of each application that has memory.
    budgets: HashMap<u32, Arc<Budget>>,
    /// The stack may still send from it.
    left: Vec<Left>,
}

impl Feed {
    /// For `users` users, who share three quarters of the memory that is available now.
    pub(super) fn new(users: usize) -> Result<Self, Errno> {
        let (to, made) = channel();
        let told = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let share = available_memory().map_or(usize::MAX, |bytes| bytes / 4 * 3 / users);
        Ok(Self { made, to, told, share, budgets: HashMap::new(), left: Vec::new() })
    }

    /// Has an event when there is something to be [taken](Self::next).
    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.told.as_fd()
    }

    /// The next thing that was made.
    pub(super) fn next(&self) -> Option<Made> {
        self.made.try_recv().ok()
    }

    /// The number of a user's applications with memory, including memory that is being created or unmapped.
    pub(super) fn count(&self, user: u32) -> usize {
        self.budgets.get(&user).map_or(0, |budget| Arc::strong_count(budget) - 1)
    }

    /// Has memory of a new application made, of so many bytes at most.
    pub(super) fn begin(&mut self, user: u32, key: [u8; KEY], bytes: usize, errands: &mut Errands) {
        let budget = self.budgets.entry(user).or_insert_with(|| Arc::new(Budget::new(self.share)));
        let charge = Arc::new(Charge::new(Arc::clone(budget)));
        self.run(user, errands, move || {
            let memory = AppMemory::new(bytes, Arc::clone(&charge)).ok();
            Made::New { user, key, memory, share: Share(charge) }
        });
    }

    /// Has more made for one that is there.
    pub(super) fn go_on(
        &self,
        app: usize,
        user: u32,
        memory: Arc<Memory>,
        wanted: Wanted,
        errands: &mut Errands,
    ) {
        self.run(user, errands, move || Made::More { app, user, memory, segment: Segment::new(wanted).ok() });
    }

    /// The application of this memory is gone.
    pub(super) fn leave(&mut self, user: u32, memory: Arc<Memory>, share: Share) {
        self.left.push(Left { user, memory, share });
    }

    /// Memory of a user's application that is gone longest of those that the stack still sends from.
    pub(super) fn oldest_left(&self, user: u32) -> Option<&Arc<Memory>> {
        self.left.iter().find(|left| left.user == user).map(|left| &left.memory)
    }

    /// Has memory unmapped that nobody else holds any more.
    pub(super) fn unmap(&mut self, errands: &mut Errands) {
        for Left { user, memory, share } in
            self.left.extract_if(.., |left| Arc::strong_count(&left.memory) == 1)
        {
            // In this order.
            errands.run_unawaited(user, move || drop((memory, share)));
        }
    }

    fn run(&self, user: u32, errands: &mut Errands, make: impl FnOnce() -> Made + Send + 'static) {
        let (to, told) = (self.to.clone(), Arc::clone(&self.told));
        errands.run_unawaited(user, move || {
            // Who would hear of it is gone: then it is unmapped here.
            if to.send(make()).is_ok() {
                let _ = rustix::io::write(&*told, &1u64.to_ne_bytes());
            }
        });
    }
}

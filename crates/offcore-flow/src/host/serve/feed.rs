//! Memory of applications. A thread of the user maps and unmaps it, because that can take more than ten milliseconds.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use offcore_mem::mapping::available_memory;
use offcore_session::message::KEY;
use offcore_session::{Budget, Charge, Memory, Segment, Wanted};
use offcore_tcp::proto::AppMemory;

use super::descriptors::DescriptorCharge;
use super::errands::{Errands, notify};
use super::key::APPLICATIONS;

/// The maximum number of applications of a user. With many users the limit is lower, so that each gets its share, but
/// it is at least 1.
const APPLICATIONS_OF_USER: usize = 1024;

/// Created memory, or `None` if the system has no more.
#[derive(Debug)]
pub(super) enum Made {
    /// Memory of a new application with this key.
    New { user: u32, key: [u8; KEY], memory: Option<AppMemory>, share: Share },
    /// More memory for an existing application.
    More { app: usize, user: u32, memory: Arc<Memory>, segment: Option<Segment> },
}

impl Made {
    pub(super) fn user(&self) -> u32 {
        match self {
            Self::New { user, .. } | Self::More { user, .. } => *user,
        }
    }
}

/// The share of an application in its user's budget. It exists from before the memory is created until after it is
/// unmapped.
#[derive(Debug)]
pub(super) struct Share(#[expect(dead_code, reason = "it is counted")] Arc<Charge>);

/// The memory of an application.
#[derive(Debug)]
pub(super) struct GrantedMemory {
    memory: Arc<Memory>,
    /// `None` once the application has ended.
    share: Option<Share>,
    /// More memory is being created.
    grows: bool,
}

impl GrantedMemory {
    pub(super) fn new(memory: Arc<Memory>, share: Share) -> Self {
        Self { memory, share: Some(share), grows: false }
    }

    #[inline]
    pub(super) fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Records that the creation of more memory has ended. Returns `false` if `memory` belongs to another application,
    /// which may have ended.
    pub(super) fn end_growth(&mut self, memory: &Arc<Memory>) -> bool {
        let is_this = Arc::ptr_eq(&self.memory, memory);
        self.grows &= !is_this;
        is_this
    }
}

/// Memory of an application that has ended.
#[derive(Debug)]
struct OrphanedMemory {
    user: u32,
    memory: Arc<Memory>,
    share: Share,
    /// The charge for the descriptors of the memory.
    charge: DescriptorCharge,
}

/// Creates and unmaps memory of applications.
#[derive(Debug)]
pub(super) struct Feed {
    made: Receiver<Made>,
    to: Sender<Made>,
    /// Wakes the worker when memory was created.
    helpers: Arc<OwnedFd>,
    /// Bytes that the applications of a user may use in total, and the maximum number of these applications.
    share: usize,
    applications: usize,
    /// The budget of each user. Each application with memory holds a reference.
    budgets: HashMap<u32, Arc<Budget>>,
    /// Memory of ended applications. The stack may still send from it.
    left: Vec<OrphanedMemory>,
}

impl Feed {
    /// Creates the feed for `users` users, which share three quarters of the memory that is available now.
    pub(super) fn new(users: usize, helpers: Arc<OwnedFd>) -> Self {
        let (to, made) = channel();
        let share = available_memory().map_or(usize::MAX, |bytes| bytes / 4 * 3 / users);
        let applications = (APPLICATIONS / users).clamp(1, APPLICATIONS_OF_USER);
        Self { made, to, helpers, share, applications, budgets: HashMap::new(), left: Vec::new() }
    }

    /// Bytes that the applications of a user may use in total.
    pub(super) fn share(&self) -> usize {
        self.share
    }

    /// The maximum number of applications of a user.
    pub(super) fn applications(&self) -> usize {
        self.applications
    }

    /// Returns the next created memory.
    pub(super) fn next(&self) -> Option<Made> {
        self.made.try_recv().ok()
    }

    /// Whether a user may have one more application. Applications whose memory is being created or unmapped count.
    pub(super) fn has_room(&self, user: u32) -> bool {
        self.budgets.get(&user).map_or(0, |budget| Arc::strong_count(budget) - 1) < self.applications
    }

    /// Creates memory of up to `bytes` bytes for a new application.
    pub(super) fn begin(&mut self, user: u32, key: [u8; KEY], bytes: usize, errands: &mut Errands) {
        let budget = self.budgets.entry(user).or_insert_with(|| Arc::new(Budget::new(self.share)));
        let charge = Arc::new(Charge::new(Arc::clone(budget)));
        self.run(user, errands, move || {
            let memory = AppMemory::new(bytes, Arc::clone(&charge)).ok();
            Made::New { user, key, memory, share: Share(charge) }
        });
    }

    /// Creates more memory for an existing application, unless that is in progress.
    pub(super) fn go_on(
        &self,
        app: usize,
        user: u32,
        granted: &mut GrantedMemory,
        wanted: Wanted,
        errands: &mut Errands,
    ) {
        if std::mem::replace(&mut granted.grows, true) {
            return;
        }
        let memory = Arc::clone(&granted.memory);
        self.run(user, errands, move || Made::More { app, user, memory, segment: Segment::new(wanted).ok() });
    }

    /// Takes over the memory of an application that has ended.
    pub(super) fn leave(&mut self, user: u32, granted: &mut GrantedMemory, charge: DescriptorCharge) {
        if let Some(share) = granted.share.take() {
            let memory = Arc::clone(&granted.memory);
            self.left.push(OrphanedMemory { user, memory, share, charge });
        }
    }

    /// Returns the memory of the user's application that ended first, among those whose data the stack still sends.
    pub(super) fn oldest_orphaned(&self, user: u32) -> Option<&Arc<Memory>> {
        self.left.iter().find(|left| left.user == user).map(|left| &left.memory)
    }

    /// Unmaps memory that is no longer used elsewhere. If `frees` is set, its pages are freed, although processes may
    /// still map them.
    pub(super) fn unmap(&mut self, errands: &mut Errands, frees: bool) {
        for OrphanedMemory { user, memory, share, charge } in
            self.left.extract_if(.., |left| Arc::strong_count(&left.memory) == 1)
        {
            // The memory must be dropped before its share.
            errands.run_unawaited(user, move || {
                if frees {
                    memory.free_pages();
                }
                drop((memory, share, charge));
            });
        }
    }

    fn run(&self, user: u32, errands: &mut Errands, make: impl FnOnce() -> Made + Send + 'static) {
        let (to, helpers) = (self.to.clone(), Arc::clone(&self.helpers));
        errands.run_unawaited(user, move || {
            // If the receiver is gone, the memory is unmapped here.
            if to.send(make()).is_ok() {
                notify(&helpers);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    #[test]
    fn applications_per_user_are_capped() {
        let helpers = Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        let share = |users| Feed::new(users, Arc::clone(&helpers)).applications();
        assert_eq!([1, 4, 8, 2048, 4096, 4097].map(share), [1024, 1024, 512, 2, 1, 1]);
        let mut feed = Feed::new(1, Arc::clone(&helpers));
        let budget = feed.budgets.entry(7).or_insert_with(|| Arc::new(Budget::new(0)));
        let mut charges: Vec<_> = (0..1024).map(|_| Charge::new(Arc::clone(budget))).collect();
        assert_eq!([7, 8].map(|user| feed.has_room(user)), [false, true]);
        charges.pop();
        assert!(feed.has_room(7));
    }
}

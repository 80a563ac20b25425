//! Accounting of the descriptors that applications occupy in this process. Users share the process's limit
//! (`RLIMIT_NOFILE`) equally.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use offcore_session::place::SEGMENT;
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

/// Descriptors reserved for the stack itself, for example for ports and threads. With a low limit, a quarter of the
/// limit is reserved.
const RESERVED: u64 = 2048;
/// A user with this many files to close is at the limit of errands.
pub(super) const MAX_PENDING_CLOSES: usize = 256;
/// Maximum number of files about to be closed after a message has exceeded that limit: a message has up to 253 files,
/// as `SCM_MAX_FD` of Linux.
const RECEIVED: usize = MAX_PENDING_CLOSES + 253;
/// Maximum number of connections accepted from a kernel listener at a time.
pub(super) const ACCEPTED: usize = 16;
/// The minimum share of a user: enough for an application with some sockets.
const LEAST: usize = 64;
/// Descriptors of an application with one segment of memory, without its processes and sessions: shared memory, the
/// eventfd, and the descriptors of the acceptor thread.
const APPLICATION: usize = 7;
/// Descriptors of a process: its socket, its pidfd, and the descriptor of a postponed request.
pub(super) const PROCESS: usize = 3;
pub(super) const SESSION: usize = 1;
/// Descriptors of a kernel listener: the listener, the connections accepted from it at a time, and a connection that
/// waits for room in the listener's queue.
pub(super) const KERNEL_LISTENER: usize = ACCEPTED + 2;

/// Descriptors of an application that may use `memory` bytes.
pub(super) fn of_application(memory: usize) -> usize {
    APPLICATION + memory / SEGMENT
}

/// The descriptors in use by the applications of each user.
#[derive(Debug)]
pub(super) struct Descriptors {
    /// The share of a user.
    most: usize,
    used: HashMap<u32, Arc<AtomicUsize>>,
}

/// A charge to a user. It ends when the last clone is dropped; each is kept with a descriptor that the charge covers.
#[derive(Clone, Debug)]
pub(super) struct DescriptorCharge(#[expect(dead_code, reason = "it is counted")] Arc<Charged>);

#[derive(Debug)]
struct Charged {
    used: Arc<AtomicUsize>,
    count: usize,
}

impl Drop for Charged {
    fn drop(&mut self) {
        self.used.fetch_sub(self.count, Ordering::Relaxed);
    }
}

impl Descriptors {
    /// Divides the limit of this process among `users` users. If their shares exceed the limit, a warning is logged.
    pub(super) fn new(users: usize) -> Self {
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let (descriptors, needed) = Self::divide(limit, users);
        if let Some(needed) = needed {
            tracing::warn!(
                limit,
                users,
                "the limit of open files is too low for programs of this number of users: they can use up the \
                 descriptors of each other. Raise it to {needed} (ulimit -n, LimitNOFILE=), or admit fewer users"
            );
        }
        descriptors
    }

    /// Divides a limit. Also returns the limit that the users need, if this one is lower.
    fn divide(limit: u64, users: usize) -> (Self, Option<u64>) {
        let most = usize::try_from(limit - RESERVED.min(limit / 4)).unwrap_or(usize::MAX) / users;
        // With a low limit, pending closes have half of the share.
        let most = most - RECEIVED.min(most / 2);
        let all = ((2 * LEAST - 1) * users) as u64;
        let needed = (most < LEAST).then(|| all + RESERVED.min((all - 1) / 3));
        (Self { most: most.max(LEAST), used: HashMap::new() }, needed)
    }

    /// The share of a user.
    pub(super) fn most(&self) -> usize {
        self.most
    }

    fn of(&mut self, user: u32) -> &Arc<AtomicUsize> {
        self.used.entry(user).or_default()
    }

    /// Whether a user can have `count` descriptors more.
    pub(super) fn has_room(&mut self, user: u32, count: usize) -> bool {
        let most = self.most;
        self.of(user).load(Ordering::Relaxed) + count <= most
    }

    /// Charges a user for `count` descriptors.
    ///
    /// # Errors
    /// `EMFILE` beyond the user's share.
    pub(super) fn take(&mut self, user: u32, count: usize) -> Result<DescriptorCharge, Errno> {
        if !self.has_room(user, count) {
            return Err(Errno::MFILE);
        }
        let used = Arc::clone(self.of(user));
        used.fetch_add(count, Ordering::Relaxed);
        Ok(DescriptorCharge(Arc::new(Charged { used, count })))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_have_equal_shares() {
        let limit = RESERVED + 2 * RECEIVED as u64 + 20_000;
        let (mut descriptors, _) = Descriptors::divide(limit, 2);
        assert_eq!(descriptors.take(1, 10_001).err(), Some(Errno::MFILE));
        let mut charges: Vec<_> = [9_990, 10].map(|count| descriptors.take(1, count).unwrap()).into();
        assert_eq!(descriptors.take(1, 1).err(), Some(Errno::MFILE));
        assert!(descriptors.take(2, 10_000).is_ok(), "another user's share");
        charges.pop();
        assert!(descriptors.take(1, 10).is_ok());
        let share = |limit, users| Descriptors::divide(limit, users).0.most();
        assert_eq!(share(4000, 1), 3000 - RECEIVED, "a quarter of a low limit is reserved");
        assert_eq!((share(4000, 10), share(4000, 60)), (150, LEAST), "half of a small share");
    }

    #[test]
    fn low_limit_is_recognized() {
        for users in [1, 10, 60, 600] {
            let needed = Descriptors::divide(16, users).1.unwrap();
            assert_eq!(Descriptors::divide(needed - 1, users).1, Some(needed), "{users} users");
            let (descriptors, more) = Descriptors::divide(needed, users);
            assert_eq!((descriptors.most(), more), (LEAST, None), "{users} users");
        }
    }
}

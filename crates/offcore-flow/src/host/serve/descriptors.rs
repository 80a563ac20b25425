//! Accounting of the descriptors that applications occupy in this process. Users share the process's limit
//! (`RLIMIT_NOFILE`) equally.

use std::collections::HashMap;

use offcore_session::place::SEGMENT;
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

/// Descriptors reserved for the stack itself: ports, threads, and files that are about to be closed. With a low limit,
/// a quarter of the limit is reserved.
const RESERVED: u64 = 2048;
/// The minimum share of a user. With a lower limit the kernel refuses descriptors first.
const LEAST: usize = 64;
/// Descriptors of an application with one segment of memory, without its processes and sessions: shared memory, the
/// eventfd, and the descriptors of the acceptor thread.
const APPLICATION: usize = 7;
/// Descriptors of a process: its socket and its pidfd.
pub(super) const PROCESS: usize = 2;
/// Descriptors of a session, and of a kernel listener.
pub(super) const SESSION: usize = 1;
pub(super) const KERNEL: usize = 1;

/// Descriptors of an application that may use `memory` bytes.
pub(super) fn of_application(memory: usize) -> usize {
    APPLICATION + memory / SEGMENT
}

/// The descriptors in use by the applications of each user.
#[derive(Debug)]
pub(super) struct Descriptors {
    /// The share of a user.
    most: usize,
    used: HashMap<u32, usize>,
}

impl Descriptors {
    /// Divides the limit of this process among `users` users.
    pub(super) fn new(users: usize) -> Self {
        Self::share(getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX), users)
    }

    fn share(limit: u64, users: usize) -> Self {
        let most = usize::try_from(limit - RESERVED.min(limit / 4)).unwrap_or(usize::MAX) / users;
        Self { most: most.max(LEAST), used: HashMap::new() }
    }

    /// Whether a user can have `count` descriptors more.
    pub(super) fn has_room(&self, user: u32, count: usize) -> bool {
        self.used.get(&user).copied().unwrap_or(0) + count <= self.most
    }

    /// Charges a user for `count` descriptors.
    ///
    /// # Errors
    /// `EMFILE` beyond the user's share.
    pub(super) fn take(&mut self, user: u32, count: usize) -> Result<(), Errno> {
        if !self.has_room(user, count) {
            return Err(Errno::MFILE);
        }
        *self.used.entry(user).or_default() += count;
        Ok(())
    }

    /// Releases `count` descriptors of a user.
    pub(super) fn give(&mut self, user: u32, count: usize) {
        if let Some(used) = self.used.get_mut(&user) {
            *used = used.saturating_sub(count);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_have_equal_shares() {
        let mut descriptors = Descriptors::share(RESERVED + 20_000, 2);
        assert_eq!(descriptors.take(1, 10_001), Err(Errno::MFILE));
        assert_eq!(descriptors.take(1, 10_000), Ok(()));
        assert_eq!(descriptors.take(1, 1), Err(Errno::MFILE));
        assert_eq!(descriptors.take(2, 10_000), Ok(()), "another user's share");
        descriptors.give(1, 10);
        assert_eq!(descriptors.take(1, 10), Ok(()));
    }
}

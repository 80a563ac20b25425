//! The state of a server, divided by subject.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use offcore_session::control::Owner;
use offcore_session::message::KEY;
use offcore_stats::page::Block;
use offcore_stats::time::Time;
use offcore_tcp::proto::{AppId, ConnId};
use rustix::event::epoll::EventFlags;
use rustix::event::{EventfdFlags, eventfd};
use rustix::thread::{CpuSet, sched_getaffinity};

use super::acceptor::Acceptor;
use super::application::Application;
use super::awake::Awake;
use super::counts::{ServeCounts, WarningLimit};
use super::descriptors::DescriptorCharge;
use super::door::ServeSocket;
use super::errands::Errands;
use super::feed::Feed;
use super::key::{APPLICATIONS, AT_ONCE, Key, Source, Watch};
use super::peers::Peers;
use super::ports::Ports;
use super::turns::Turns;
use super::waking::Waking;
use super::{ServeConfig, ServeError};

/// A process that has connected but has not identified itself yet.
#[derive(Debug)]
pub(super) struct Guest {
    pub(super) generation: u32,
    /// The user of the process. A constant of `attach` stands for all users that may not attach.
    pub(super) user: u32,
    pub(super) socket: OwnedFd,
    /// The charge for the process, or `None` if the share of its user is used up. Such a process is refused after its
    /// hello.
    pub(super) charge: Option<DescriptorCharge>,
    /// When the process connected.
    pub(super) since: Time,
    /// A process of an application of this user has requested the socket for a child process, whose own user need not
    /// be allowed to attach.
    pub(super) invited: bool,
    /// The process has sent its hello, and memory for the application with this key is being created.
    pub(super) waits: Option<[u8; KEY]>,
}

/// The socket at which processes attach, and the processes that are attaching.
#[derive(Debug)]
pub(super) struct Admission {
    /// `None` once the server stops.
    pub(super) door: Option<ServeSocket>,
    /// The effective user of this process.
    pub(super) user: u32,
    pub(super) guests: VecDeque<Guest>,
    /// Guests whose messages are still unread, with their users, and whether processes wait to be accepted.
    pub(super) talking: Vec<(u32, Key)>,
    pub(super) connecting: bool,
    /// The user whose process was refused last.
    pub(super) refused: Option<u32>,
    /// Programs no longer wait for the host's addresses.
    pub(super) has_address: bool,
}

impl Admission {
    pub(super) fn open(config: &ServeConfig) -> Result<Self, ServeError> {
        Ok(Self {
            door: Some(ServeSocket::open(&config.path, &config.allow)?),
            user: rustix::process::geteuid().as_raw(),
            guests: VecDeque::new(),
            talking: Vec::new(),
            connecting: false,
            refused: None,
            has_address: false,
        })
    }

    /// The number of users that may attach.
    pub(super) fn users(&self, config: &ServeConfig) -> usize {
        config.allow.iter().copied().chain([self.user, 0]).collect::<BTreeSet<_>>().len()
    }
}

/// The applications.
#[derive(Debug, Default)]
pub(super) struct Registry {
    pub(super) apps: Vec<Option<Box<Application>>>,
    /// Applications whose marks are read in each round.
    pub(super) awake: Awake,
    /// Indices of applications by the stack's identifier.
    pub(super) by_id: HashMap<AppId, usize>,
    /// The generation assigned last to a session, process or guest.
    generation: u32,
    /// The broadcast addresses that were reported to applications.
    pub(super) broadcasts: Vec<Ipv4Addr>,
}

impl Registry {
    /// Returns a generation that has not been used for a long time; never 0.
    pub(super) fn next_generation(&mut self) -> u32 {
        // Generations of processes have 21 bits, see `Owner`.
        self.generation = self.generation % Owner::GENERATIONS + 1;
        self.generation
    }

    pub(super) fn app(&mut self, app: usize) -> Option<&mut Application> {
        self.apps.get_mut(app)?.as_deref_mut()
    }

    /// Calls `visit` for each awake application.
    pub(super) fn visit_awake(&mut self, mut visit: impl FnMut(&mut Application)) {
        let Self { apps, awake, .. } = self;
        awake.iter().filter_map(|app| apps.get_mut(app)?.as_deref_mut().map(&mut visit)).for_each(drop);
    }

    /// The index for a new application, or `None` if there are already [`APPLICATIONS`] applications.
    pub(super) fn next_index(&self) -> Option<usize> {
        unused_index(&self.apps)
    }

    /// The user of an application.
    pub(super) fn user_of(&self, app: usize) -> Option<u32> {
        self.apps.get(app)?.as_deref().map(|app| app.user())
    }
}

fn unused_index<T>(apps: &[Option<T>]) -> Option<usize> {
    let unused = apps.iter().position(Option::is_none).unwrap_or(apps.len());
    (unused < APPLICATIONS).then_some(unused)
}

/// Indices of sessions. A session is identified by the index of its application and its number.
#[derive(Debug, Default)]
pub(super) struct SessionIndex {
    /// By connection or datagram socket, and by listener.
    pub(super) by_conn: HashMap<ConnId, (usize, u32)>,
    pub(super) by_listener: HashMap<u32, (usize, u32)>,
    /// Sessions that are announced at the end of the turn.
    pub(super) announced: Vec<(usize, u32)>,
}

/// The ports of sessions.
#[derive(Debug)]
pub(super) struct PortTable {
    /// Listeners and datagram sockets.
    pub(super) used: Ports,
    /// Sessions that are only bound.
    pub(super) bound: Ports,
}

impl PortTable {
    pub(super) fn new() -> Self {
        Self { used: Ports::new(), bound: Ports::new() }
    }
}

/// Threads that accept connections of kernel listeners.
#[derive(Debug)]
pub(super) struct Acceptors {
    /// The CPUs that threads outside the workers may use.
    pub(super) cpus: CpuSet,
    /// Threads of ended applications that still run.
    pub(super) ending: Vec<Acceptor>,
    /// Applications whose threads may have results.
    pub(super) ready: Vec<usize>,
}

impl Acceptors {
    pub(super) fn new() -> Self {
        let cpus = sched_getaffinity(None).unwrap_or_else(|_| CpuSet::new());
        Self { cpus, ending: Vec::new(), ready: Vec::new() }
    }
}

/// Threads for operations that may take long, and their results.
#[derive(Debug)]
pub(super) struct Helpers {
    pub(super) errands: Errands,
    pub(super) feed: Feed,
    pub(super) peers: Peers,
}

impl Helpers {
    /// Creates the helpers for `users` users.
    pub(super) fn new(users: usize, cpus: CpuSet, watch: &Watch) -> Result<Self, ServeError> {
        let results = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .and_then(|results| {
                watch.add_stack_descriptor(results.as_fd(), Source::Helpers).map(|()| Arc::new(results))
            })
            .map_err(|source| ServeError::System { what: "an eventfd", source })?;
        Ok(Self {
            feed: Feed::new(users, Arc::clone(&results)),
            peers: Peers::new(Arc::clone(&results)),
            errands: Errands::new(cpus, results),
        })
    }
}

/// The order in which applications are served.
#[derive(Debug)]
pub(super) struct Schedule {
    pub(super) turns: Turns,
    /// Work is left for the next round.
    pub(super) behind: bool,
    /// The cost of waking applications.
    pub(super) waking: Waking,
}

impl Schedule {
    pub(super) fn new() -> Self {
        Self { turns: Turns::new(), behind: false, waking: Waking::new() }
    }
}

/// Events of the kernel.
#[derive(Debug)]
pub(super) struct Polling {
    pub(super) watch: Watch,
    /// When the kernel was last polled, and whether the next round polls it.
    pub(super) looked: Time,
    pub(super) look: bool,
    /// Buffers for events of the stack's own descriptors, and of a user's.
    pub(super) events: Vec<Key>,
    pub(super) user_events: Vec<(Key, EventFlags)>,
}

impl Polling {
    pub(super) fn new() -> Result<Self, ServeError> {
        let watch = Watch::new().map_err(|source| ServeError::System { what: "epoll", source })?;
        Ok(Self {
            watch,
            looked: Time::ZERO,
            look: true,
            events: Vec::with_capacity(AT_ONCE),
            user_events: Vec::new(),
        })
    }
}

/// Counters, and rate limits of warnings.
#[derive(Debug)]
pub(super) struct Tally {
    pub(super) counts: ServeCounts,
    pub(super) stats: Block,
    pub(super) refusals: WarningLimit,
    pub(super) misuses: WarningLimit,
    pub(super) losses: WarningLimit,
}

impl Tally {
    pub(super) fn new(stats: Block) -> Self {
        Self {
            counts: ServeCounts::default(),
            stats,
            refusals: WarningLimit::default(),
            misuses: WarningLimit::default(),
            losses: WarningLimit::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Keys of events have room for 4,096 indices. With more users, one application of each would exceed that.
    #[test]
    fn applications_of_all_users_are_limited() {
        let mut apps = vec![Some(()); 4095];
        assert_eq!(unused_index(&apps), Some(4095));
        apps.push(Some(()));
        assert_eq!(unused_index(&apps), None);
        apps[7] = None;
        assert_eq!(unused_index(&apps), Some(7));
    }
}

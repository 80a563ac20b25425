//! Serves applications in other processes: answers their calls and wakes them.
//!
//! Data passes through FIFOs in shared memory. [`offcore_session`] documents the protocol: the shared words, the
//! messages, and what `poll` reports on the application's end of a session. This module implements the stack's side:
//!
//! * `door`: the socket at which processes attach; `attach`: their identity and admission
//! * `application`: the processes and sessions of an application; `feed`: its memory; `ports`: sessions by port
//! * `calls`: requests of processes; `datagrams`: requests for datagram sockets; `addresses`: permitted addresses and
//!   ports
//! * `acceptor`: connections of kernel listeners; `errands`: other work that may block on an application
//! * `session`: the requests of a session's application and their results; `turns`: scheduling of applications;
//!   `listening`: incoming connections
//! * `awake`: applications whose marks are read in each round
//! * `waking`: the cost of waking applications; `raw`: data written to a session without the library
//! * `pair`: the socket pair of a session; `peers`: whether its other end is still open; `wire`: messages with
//!   descriptors; `key`: events of the kernel
//!
//! While no application requests anything, a busy worker makes no system call in most rounds: marks are words in shared
//! memory, and the worker polls the kernel for other events once per millisecond, or ten times as often while
//! applications are asleep.
//!
//! **Effects of an application on others** are limited to the use of its user's share of the worker's time, because the
//! work per round is bounded. Each application has separate memory. An invalid index resets its session, an invalid
//! message closes its process's socket, and data that it does not read waits in its own queues. Operations that may
//! block on an application run in threads outside the workers (`errands`, `acceptor`).

mod acceptor;
mod addresses;
mod application;
mod attach;
mod awake;
mod calls;
mod counts;
mod datagram_bits;
mod datagrams;
mod descriptors;
mod door;
mod errands;
mod feed;
mod key;
mod listening;
mod pair;
mod peers;
mod ports;
mod raw;
mod session;
mod sessions;
mod stream_options;
mod turns;
mod waking;
mod wire;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

use offcore_port::{Context, Wake};
use offcore_session::message::KEY;
use offcore_stats::page::Block;
use offcore_stats::tsc;
use offcore_tcp::proto::{AppId, CallError, ConnId, Event};
use offcore_vhost::connection::SocketError;
use rustix::event::epoll::EventFlags;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::thread::{CpuSet, sched_getaffinity};

use crate::host::{App, Calls};
use crate::worker::task::Wakes;
use acceptor::Acceptor;
use application::{Application, Queue};
use awake::Awake;
pub use counts::ServeCounts;
use counts::WarningLimit;
use descriptors::{DescriptorCharge, Descriptors};
use door::{LONGEST, ServeSocket};
use errands::Errands;
use feed::Feed;
use key::{AT_ONCE, KernelEvent, Key, Source, Watch};
use pair::Pairs;
use peers::Peers;
use ports::Ports;
use turns::Turns;
use waking::Waking;

/// Interval between polls of the kernel, in microseconds.
const LOOK: u64 = 1000;
/// The interval while applications are asleep, in microseconds: a sleeping application reports its marks through the
/// kernel only.
const LOOK_ASLEEP: u64 = 100;
/// How long programs wait for the host's addresses after its start, in microseconds. A DHCP server is asked three times
/// within this time. After it programs start without an address, and `connect` fails with `ENETUNREACH` until one is
/// assigned.
const ADDRESS_WAIT: u64 = 20_000_000;

/// The users that a server admits, the path of its socket, and limits per application.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServeConfig {
    /// The path of the socket. The lock file has the same path with `.lock` appended.
    pub path: PathBuf,
    /// Users that may attach, in addition to the stack's own user and root.
    pub allow: Vec<u32>,
    /// Maximum number of bytes of FIFO memory per application.
    pub memory: usize,
    /// Maximum number of connections, datagram sockets and listeners per application, including connections that it has
    /// not accepted yet or has left behind. A listener counts twice: for its queue and for its session.
    pub connections: usize,
}

/// Why a server cannot begin.
#[derive(Debug, displaydoc::Display, thiserror::Error)]
pub enum ServeError {
    /// another stack (process {process}) serves at {path:?}: stop it, or choose another path
    Taken { path: PathBuf, process: u32 },
    /// a process listens at {path:?}: stop it, or choose another path
    InUse { path: PathBuf },
    /// {path:?} exists and is not a socket: choose another path, or remove the file if nothing needs it
    NoSocket { path: PathBuf },
    /// {path:?} exists and is not a stack's lock file, which is empty or has a process number: remove it, or choose another path
    NoLock { path: PathBuf },
    /// {path:?}: a path of {found} bytes, expected 1 to {LONGEST:?}: choose a shorter one
    Length { path: PathBuf, found: usize },
    /// {0}
    Socket(#[from] SocketError),
    /// {what} {path:?}: {source}
    Path { what: &'static str, path: PathBuf, source: Errno },
    /// {what}: {source}
    System { what: &'static str, source: Errno },
    /// a full Unix socket pair stays writable with every send buffer of 4 to 64 KiB: on this kernel applications cannot learn
    /// when they can write
    Pair,
}

/// A process that has connected but has not identified itself yet.
#[derive(Debug)]
struct Guest {
    generation: u32,
    /// The user of the process. A constant of `attach` stands for all users that may not attach.
    user: u32,
    socket: OwnedFd,
    charge: DescriptorCharge,
    /// When the process connected, in microseconds.
    since: u64,
    /// A process of an application of this user has requested the socket for a child process, whose own user need not
    /// be allowed to attach.
    invited: bool,
    /// The process has sent its hello, and memory for the application with this key is being created.
    waits: Option<[u8; KEY]>,
}

/// Serves applications in other processes.
#[derive(Debug)]
pub struct Serve {
    config: ServeConfig,
    door: Option<ServeSocket>,
    /// The effective user of this process.
    user: u32,
    pairs: Pairs,
    peers: Peers,
    watch: Watch,
    apps: Vec<Option<Box<Application>>>,
    /// Applications whose marks are read in each round, and indices of applications by the stack's identifier.
    awake: Awake,
    by_id: HashMap<AppId, usize>,
    /// Application and session number by connection or datagram socket, and by listener.
    by_conn: HashMap<ConnId, (usize, u32)>,
    by_listener: HashMap<u32, (usize, u32)>,
    guests: VecDeque<Guest>,
    /// The generation assigned last to a session, process or guest.
    generation: u32,
    /// Sessions that are announced at the end of the turn.
    announced: Vec<(usize, u32)>,
    /// The broadcast addresses that were reported to applications.
    broadcasts: Vec<Ipv4Addr>,
    /// Listeners and datagram sockets by port, and sessions that are only bound.
    ports: Ports,
    bound: Ports,
    /// The CPUs that threads outside the workers may use.
    cpus: CpuSet,
    errands: Errands,
    feed: Feed,
    descriptors: Descriptors,
    ending: Vec<Acceptor>,
    /// Applications whose acceptor threads have more results than one round handles.
    late: Vec<usize>,
    /// Guests whose messages are still unread, and whether processes wait to be accepted.
    talking: Vec<(u32, Key)>,
    connecting: bool,
    /// The user whose process was refused last.
    refused: Option<u32>,
    /// Programs no longer wait for the host's addresses.
    has_address: bool,
    /// When the kernel was last polled, and whether the next round polls it.
    looked: u64,
    look: bool,
    /// The order in which applications are served, and whether work is left for the next round.
    turns: Turns,
    behind: bool,
    /// The cost of waking applications.
    waking: Waking,
    events: Vec<KernelEvent>,
    counts: ServeCounts,
    stats: Block,
    refusals: WarningLimit,
    misuses: WarningLimit,
    losses: WarningLimit,
}

impl Serve {
    /// Opens the socket. The counters are published in `stats`, a block created with [`ServeCounts::NAMES`].
    ///
    /// # Errors
    /// Fails if another stack serves at the path, or with the error of a system call.
    ///
    /// # Panics
    /// Panics if the block has another number of counters.
    pub fn open(config: ServeConfig, stats: Block) -> Result<Self, ServeError> {
        assert_eq!(stats.len(), ServeCounts::NAMES.len(), "the block is made with ServeCounts::NAMES");
        let user = rustix::process::geteuid().as_raw();
        let pairs = Pairs::calibrate()?;
        let watch = Watch::new().map_err(|source| ServeError::System { what: "epoll", source })?;
        let door = ServeSocket::open(&config.path, &config.allow)?;
        watch
            .add_own(door.as_fd(), Source::ServeSocket)
            .map_err(|source| ServeError::System { what: "watching the socket", source })?;
        let helpers = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .and_then(|helpers| watch.add_own(helpers.as_fd(), Source::Helpers).map(|()| Arc::new(helpers)))
            .map_err(|source| ServeError::System { what: "an eventfd", source })?;
        // All users that may attach.
        let users = config.allow.iter().copied().chain([user, 0]).collect::<BTreeSet<_>>().len();
        let cpus = sched_getaffinity(None).unwrap_or_else(|_| CpuSet::new());
        Ok(Self {
            descriptors: Descriptors::new(users),
            config,
            door: Some(door),
            user,
            pairs,
            peers: Peers::new(Arc::clone(&helpers)),
            watch,
            apps: Vec::new(),
            awake: Awake::default(),
            by_id: HashMap::new(),
            by_conn: HashMap::new(),
            by_listener: HashMap::new(),
            guests: VecDeque::new(),
            generation: 0,
            announced: Vec::new(),
            broadcasts: Vec::new(),
            ports: Ports::new(),
            bound: Ports::new(),
            cpus,
            feed: Feed::new(users, Arc::clone(&helpers)),
            errands: Errands::new(cpus, helpers),
            ending: Vec::new(),
            late: Vec::new(),
            talking: Vec::new(),
            connecting: false,
            refused: None,
            has_address: false,
            looked: 0,
            look: true,
            turns: Turns::new(),
            behind: false,
            waking: Waking::new(),
            events: Vec::with_capacity(AT_ONCE),
            counts: ServeCounts::default(),
            stats,
            refusals: WarningLimit::default(),
            misuses: WarningLimit::default(),
            losses: WarningLimit::default(),
        })
    }

    /// The current counters.
    pub fn counts(&self) -> ServeCounts {
        let apps = self.apps.iter().flatten();
        let (processes, sessions) = apps.clone().fold((0, 0), |(processes, sessions), app| {
            (processes + app.living() as u64, sessions + app.len() as u64)
        });
        let (applications, awake) = (apps.count() as u64, self.awake.len() as u64);
        ServeCounts { applications, processes, sessions, awake, ..self.counts }
    }

    /// Returns a generation that has not been used for a long time; never 0.
    fn next_generation(&mut self) -> u32 {
        // Generations of processes have 21 bits, see `Owner`.
        self.generation = self.generation % offcore_session::control::Owner::GENERATIONS + 1;
        self.generation
    }

    fn app(&mut self, app: usize) -> Option<&mut Application> {
        self.apps.get_mut(app)?.as_deref_mut()
    }

    /// Handles the events that the kernel reports.
    fn tend(&mut self, calls: &mut Calls<'_>) {
        self.waking.begin();
        self.tell_broadcasts(calls);
        let mut events = std::mem::take(&mut self.events);
        self.look = self.watch.take(&mut events);
        self.looked = calls.now;
        for app in self.awake.iter() {
            let Some(application) = self.apps.get_mut(app).and_then(Option::as_deref_mut) else { continue };
            application.make_all_due();
        }
        self.handle_peer_answers(calls);
        for (user, key) in std::mem::take(&mut self.talking) {
            let from = tsc::now();
            self.read_guest_message(key, calls);
            self.charge_time(user, from);
        }
        for KernelEvent { user, key, flags } in events.drain(..) {
            let from = tsc::now();
            self.take_event(key, flags, calls);
            if let Some(user) = user {
                self.charge_time(user, from);
            }
        }
        self.events = events;
        let Self { door, errands, .. } = self;
        if let Some(door) = door {
            door.retain_barred(|user| errands.are_full(user));
        }
        // A program cannot connect until address probing is complete, so it waits. It also waits for addresses from the
        // network, but only for a limited time.
        if self.connecting && calls.stack.is_probing() {
            self.look = true;
        } else if self.connecting && !self.awaits_address(calls) {
            self.accept_processes(calls.now);
        }
        for app in std::mem::take(&mut self.late) {
            let (user, from) = (self.user_of(app), tsc::now());
            self.take_accept_results(app, calls);
            if let Some(user) = user {
                self.charge_time(user, from);
            }
            self.look = true;
        }
        self.tend_applications(calls);
    }

    fn take_event(&mut self, key: Key, flags: EventFlags, calls: &mut Calls<'_>) {
        let app = usize::from(key.app);
        match key.source {
            Source::ServeSocket => self.connecting = true,
            Source::Guest => self.read_guest_message(key, calls),
            Source::Channel => self.queue_request(key, Queue::push),
            Source::Process => self.process_ended(app, key.number, key.generation, calls),
            Source::Event => {
                self.counts.woken += 1;
                self.wake_application(app);
            }
            Source::Kernel => self.take_accept_results(app, calls),
            // Answers about other ends, and processes of users who may have errands again, are handled in the next
            // round.
            Source::Helpers => {
                self.take_created_memory(calls);
                self.look = true;
            }
            Source::User => {}
            Source::End if !flags.contains(EventFlags::HUP) => {
                if flags.contains(EventFlags::IN) {
                    self.queue_pair_read(app, key.number);
                }
                self.queue_listener(app, key.number, Some(key.generation));
            }
            Source::End | Source::Pipe => self.hung_up(app, key.number, key.generation, calls),
        }
    }

    /// Stores the broadcast addresses for all applications when the addresses change.
    fn tell_broadcasts(&mut self, calls: &Calls<'_>) {
        if !calls.stack.broadcasts().eq(self.broadcasts.iter().copied()) {
            self.broadcasts = calls.stack.broadcasts().collect();
            for application in self.apps.iter().flatten() {
                application.shared.processes().set_broadcasts(self.broadcasts.iter().copied());
            }
        }
    }

    /// Whether programs still wait for the host's addresses.
    fn awaits_address(&mut self, calls: &Calls<'_>) -> bool {
        let iface = calls.stack.awaits_address().filter(|_| !self.has_address);
        let Some(iface) = iface else { return false };
        self.has_address = calls.now >= ADDRESS_WAIT;
        if self.has_address {
            let seconds = ADDRESS_WAIT / 1_000_000;
            tracing::warn!(
                "port{iface} has got no address from the network within {seconds} s and still tries: programs begin without it"
            );
        }
        !self.has_address
    }

    /// Does the periodic work for applications in each round.
    fn tend_applications(&mut self, calls: &mut Calls<'_>) {
        self.ask_for_memory(calls);
        self.fall_asleep(calls.now);
        let Self { apps, awake, errands, ending, feed, .. } = self;
        feed.unmap(errands);
        for app in awake.iter() {
            let application = apps.get_mut(app).and_then(Option::as_deref_mut);
            if let Some(acceptor) = application.and_then(|app| app.acceptor.as_mut()) {
                acceptor.interrupt_blocked_accept(calls.now, errands);
            }
        }
        let ended: Vec<_> = ending.extract_if(.., |acceptor| acceptor.end(calls.now, errands)).collect();
        for acceptor in ended {
            errands.close(acceptor.user, acceptor);
        }
    }

    /// Counts an invalid input of an application and logs a rate-limited warning.
    fn misuse(&mut self, what: &'static str, app: usize, now: u64) {
        self.counts.misused += 1;
        if self.misuses.may(now) {
            tracing::warn!(application = app, "{what}");
        }
    }
}

impl App for Serve {
    fn start(&mut self, _: &mut Calls<'_>) -> Result<(), CallError> {
        Ok(())
    }

    fn event(&mut self, event: Event, calls: &mut Calls<'_>) {
        match event {
            Event::Incoming { listener } => {
                if let Some(&(app, number)) = self.by_listener.get(&listener) {
                    self.queue_listener(app, number, None);
                }
            }
            Event::Readable(conn) => self.readable(conn),
            Event::Writable(conn) => self.writable(conn, calls),
            Event::Connected(conn) => self.connected(conn, calls),
            Event::EndOfStream(conn) => self.peer_ended(conn),
            Event::Closed(conn, cause) => self.over(conn, cause),
            Event::Failed(conn, errno) => self.failed(conn, errno),
            Event::AddressConflict { address, .. } => {
                tracing::warn!(%address, "another host uses this address: it stays unused");
            }
            // Programs may be waiting for the address.
            Event::Address { .. } => self.look = true,
        }
    }

    fn told(&mut self, _: &mut Calls<'_>) {
        self.announce();
    }

    fn round(&mut self, _: &mut Context<'_>, calls: &mut Calls<'_>) {
        // Sessions whose announcement was deferred to this turn.
        if !self.announced.is_empty() {
            self.announce();
        }
        self.scan_for_marks(calls.now);
        let often = if self.awake.all_are() { LOOK } else { LOOK_ASLEEP };
        if self.look || calls.now >= self.looked + often {
            self.tend(calls);
        }
        self.behind = self.work_some(calls) || !self.announced.is_empty();
    }

    fn publish(&mut self) {
        self.stats.set(self.counts().values());
    }

    fn wakes(&mut self) -> Option<&mut dyn Wakes> {
        Some(self)
    }

    fn is_busy(&self) -> bool {
        self.look || self.behind
    }

    fn stop(&mut self, calls: &mut Calls<'_>) {
        self.door = None;
        for guest in std::mem::take(&mut self.guests) {
            self.errands.close_socket(guest.user, guest.socket, Some(guest.charge));
        }
        for app in 0..self.apps.len() {
            self.end_application(app, calls);
        }
    }
}

impl Wakes for Serve {
    fn arm(&mut self) -> Wake<'_> {
        let busy = self.look || self.behind;
        // All awake applications. An application that marks a session after this wakes the worker. An event reports when
        // the user of a waiting process may have errands again.
        let awake = self.awake.iter().filter_map(|app| self.apps.get(app)?.as_deref());
        let marked = awake.fold(busy, |any, app| {
            let asks = !app.talking.is_empty() && !self.errands.are_full(app.user);
            app.shared.control().arm() | asks | any
        });
        if marked { Wake::Now } else { Wake::Event(self.watch.as_fd()) }
    }

    fn disarm(&mut self) {
        self.look = true;
        for app in self.awake.iter().filter_map(|app| self.apps.get(app)?.as_deref()) {
            app.shared.control().disarm();
        }
    }
}

//! A server of applications in other processes: their calls, and what wakes them up.
//!
//! Data goes through FIFOs in shared memory, and [`offcore_session`] says how that works: which words are shared, which
//! messages there are, and what an application's end of a session shows when. Here is the stack's side of it:
//!
//! * `door`: where processes attach, and `attach`: who they are,
//! * `application`: its processes and sessions, `feed`: its memory, `ports`: which of them have a port,
//! * `calls`: what they ask for, `datagrams`: of datagram sockets, and `addresses`: what they may have,
//! * `acceptor`: connections of the kernel's listeners, `errands`: what else may have to wait for an application,
//! * `session`: what a session's application wants, and is told, and `turns`: whose is looked at; `listening`: connections that
//!   come,
//! * `awake`: applications whose marks a round reads,
//! * `waking`: what it takes to tell it, `raw`: what is written to a session without the library,
//! * `pair`: both ends of a session, `peers`: whether the other one is there, `wire`: messages, `key`: what the kernel tells of.
//!
//! A worker that is busy makes no system call for this in a round in which nobody asks for anything: marks are words in
//! shared memory, and the kernel is asked once a millisecond what else there is; ten times as often while applications are asleep.
//!
//! **What an application can do to others** is to take its user's part of the worker's time: of what it wants a bounded number of
//! things is done in a round. Else nothing: it has memory of its own, indices that mean nothing reset its session, a message that means
//! nothing closes its process's socket, whatever it does not take waits in its own queues, and what may wait for it is left to
//! threads beside the workers (`errands`, `acceptor`).

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
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use offcore_port::{Context, Wake};
use offcore_session::message::KEY;
use offcore_stats::page::Block;
use offcore_stats::tsc;
use offcore_tcp::proto::{AppId, CallError, ConnId, Event};
use offcore_vhost::connection::SocketError;
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::thread::{CpuSet, sched_getaffinity};

use crate::host::{App, Calls};
use crate::worker::task::Wakes;
use acceptor::Acceptor;
use application::{Application, Queue};
use awake::Awake;
use counts::Seldom;
pub use counts::ServeCounts;
use descriptors::Descriptors;
use door::{Door, LONGEST};
use errands::Errands;
use feed::Feed;
use key::{AT_ONCE, Key, Source, Watch};
use pair::Pairs;
use peers::Peers;
use ports::Ports;
use turns::Turns;
use waking::Waking;

/// How often the kernel is asked what there is, in microseconds.
const LOOK: u64 = 1000;
/// The same while applications are asleep: they tell only the kernel of their marks.
const LOOK_ASLEEP: u64 = 100;
/// How long programs wait for the host's addresses, in microseconds after its start: a DHCP server is asked three times until
/// then. Later they begin, and `connect` fails with `ENETUNREACH` until there is an address.
const ADDRESS_WAIT: u64 = 20_000_000;
/// The maximum number of applications of a user. With many users the limit is lower, so that each gets its share.
const APPLICATIONS_OF_USER: usize = 1024;

/// Whom a server serves, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServeConfig {
    /// The path of the socket. Beside it is a lock, with `.lock` behind its name.
    pub path: PathBuf,
    /// Users that may attach, beside the stack's own and root.
    pub allow: Vec<u32>,
    /// Bytes of FIFOs of one application, at most.
    pub memory: usize,
    /// Connections, datagram sockets and listeners of one application, at most, with those that it has not accepted, or has left
    /// behind; a listener counts as two, by its queue and by its session.
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

/// A process that has not said who it is.
#[derive(Debug)]
struct Guest {
    generation: u32,
    /// Whose it is, or nobody's that may attach.
    user: u32,
    socket: OwnedFd,
    /// Since when it is there.
    since: u64,
    /// A process of this user's application wants to have it let in: it need not be one that may attach.
    invited: bool,
    /// It has said hello, and memory is made for the application with this key.
    waits: Option<[u8; KEY]>,
}

/// Serves applications in other processes.
#[derive(Debug)]
pub struct Serve {
    config: ServeConfig,
    door: Option<Door>,
    /// The user whose process this is.
    user: u32,
    pairs: Pairs,
    peers: Peers,
    watch: Watch,
    apps: Vec<Option<Box<Application>>>,
    /// Those whose marks are read in each round, and numbers by what the stack names applications.
    awake: Awake,
    by_id: HashMap<AppId, usize>,
    /// Sessions by connection or datagram socket, and by listener: application and number.
    by_conn: HashMap<ConnId, (usize, u32)>,
    by_listener: HashMap<u32, (usize, u32)>,
    guests: VecDeque<Guest>,
    /// The last generation of a session, process or guest.
    generation: u32,
    /// Sessions that are announced at the end of the turn.
    announced: Vec<(usize, u32)>,
    /// The broadcast addresses that applications know.
    broadcasts: Vec<Ipv4Addr>,
    /// Listeners and datagram sockets by port, and what is only bound.
    ports: Ports,
    bound: Ports,
    /// The processors that threads beside the workers may use, and those that are to end.
    cpus: CpuSet,
    errands: Errands,
    feed: Feed,
    descriptors: Descriptors,
    ending: Vec<Acceptor>,
    /// Applications whose threads have taken more than was looked at in a round.
    late: Vec<usize>,
    /// Guests with more messages, and whether processes wait to attach.
    talking: Vec<Key>,
    knocking: bool,
    /// Programs wait no longer for the host's addresses.
    has_address: bool,
    /// When the kernel was last asked, and whether it is to be asked in the next round.
    looked: u64,
    look: bool,
    /// Whose sessions are looked at next, and whether some are left that were to be.
    turns: Turns,
    behind: bool,
    /// What it takes to wake applications up, and those that are to be ended for it.
    waking: Waking,
    condemned: Vec<(usize, AppId)>,
    events: Vec<(Key, EventFlags)>,
    counts: ServeCounts,
    stats: Block,
    refusals: Seldom,
    misuses: Seldom,
    losses: Seldom,
}

impl Serve {
    /// Opens the socket. It counts in `stats`, a block made with [`ServeCounts::NAMES`].
    ///
    /// # Errors
    /// Another stack at the path, or what the kernel says.
    ///
    /// # Panics
    /// When the block has another number of counters.
    pub fn open(config: ServeConfig, stats: Block) -> Result<Self, ServeError> {
        assert_eq!(stats.len(), ServeCounts::NAMES.len(), "the block is made with ServeCounts::NAMES");
        let user = rustix::process::geteuid().as_raw();
        let pairs = Pairs::calibrate()?;
        let watch = Watch::new().map_err(|source| ServeError::System { what: "epoll", source })?;
        let door = Door::open(&config.path, &config.allow)?;
        let knock = Key::new(Source::Door, 0, 0, 0);
        watch
            .add(door.as_fd(), knock, EventFlags::IN)
            .map_err(|source| ServeError::System { what: "watching the socket", source })?;
        // Those that may attach.
        let users = config.allow.iter().copied().chain([user, 0]).collect::<BTreeSet<_>>().len();
        let feed = Feed::new(users).map_err(|source| ServeError::System { what: "an eventfd", source })?;
        watch
            .add(feed.as_fd(), Key::new(Source::Memory, 0, 0, 0), EventFlags::IN)
            .map_err(|source| ServeError::System { what: "watching an eventfd", source })?;
        let peers = Peers::new().map_err(|source| ServeError::System { what: "an eventfd", source })?;
        watch
            .add(peers.as_fd(), Key::new(Source::Peers, 0, 0, 0), EventFlags::IN)
            .map_err(|source| ServeError::System { what: "watching an eventfd", source })?;
        let cpus = sched_getaffinity(None).unwrap_or_else(|_| CpuSet::new());
        Ok(Self {
            descriptors: Descriptors::new(users),
            config,
            door: Some(door),
            user,
            pairs,
            peers,
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
            errands: Errands::new(cpus),
            feed,
            ending: Vec::new(),
            late: Vec::new(),
            talking: Vec::new(),
            knocking: false,
            has_address: false,
            looked: 0,
            look: true,
            turns: Turns::new(),
            behind: false,
            waking: Waking::new(),
            condemned: Vec::new(),
            events: Vec::with_capacity(AT_ONCE),
            counts: ServeCounts::default(),
            stats,
            refusals: Seldom::default(),
            misuses: Seldom::default(),
            losses: Seldom::default(),
        })
    }

    /// What has been counted.
    pub fn counts(&self) -> ServeCounts {
        let apps = self.apps.iter().flatten();
        let (processes, sessions) = apps.clone().fold((0, 0), |(processes, sessions), app| {
            (processes + app.living() as u64, sessions + app.len() as u64)
        });
        let (applications, awake) = (apps.count() as u64, self.awake.len() as u64);
        ServeCounts { applications, processes, sessions, awake, ..self.counts }
    }

    /// A generation that nothing has had for long; never 0.
    fn next_generation(&mut self) -> u32 {
        // Those of processes have 21 bits, see `Owner`.
        self.generation = self.generation % offcore_session::control::Owner::GENERATIONS + 1;
        self.generation
    }

    fn app(&mut self, app: usize) -> Option<&mut Application> {
        self.apps.get_mut(app)?.as_deref_mut()
    }

    /// Does what the kernel tells of.
    fn tend(&mut self, calls: &mut Calls<'_>) {
        self.waking.begin();
        self.tell_broadcasts(calls);
        let mut events = std::mem::take(&mut self.events);
        self.watch.take(&mut events);
        self.looked = calls.now;
        self.look = events.len() >= AT_ONCE;
        for app in self.awake.iter() {
            let Some(application) = self.apps.get_mut(app).and_then(Option::as_deref_mut) else { continue };
            application.come_due();
        }
        self.peers_answer(calls);
        for key in std::mem::take(&mut self.talking) {
            self.hear_guest(key, calls);
        }
        for (key, flags) in events.drain(..) {
            let (user, from) = (self.charged_for(key), tsc::now());
            self.take_event(key, flags, calls);
            if let Some(user) = user {
                self.turns.add(user, tsc::now() - from);
            }
        }
        self.events = events;
        // A program cannot connect before the addresses are probed: it waits. It waits for addresses from the network, too, but not
        // for ever.
        if self.knocking && calls.stack.is_probing() {
            self.look = true;
        } else if self.knocking && !self.awaits_address(calls) {
            self.let_in(calls.now);
        }
        for app in std::mem::take(&mut self.late) {
            self.kernels_come(app, calls);
            self.look = true;
        }
        self.tend_applications(calls);
    }

    /// The user that is charged for an event.
    fn charged_for(&self, key: Key) -> Option<u32> {
        match key.source {
            Source::Guest => {
                self.guests.iter().find(|guest| guest.generation == key.generation).map(|guest| guest.user)
            }
            Source::Door | Source::Memory | Source::Peers => None,
            _ => self.user_of(usize::from(key.app)),
        }
    }

    fn take_event(&mut self, key: Key, flags: EventFlags, calls: &mut Calls<'_>) {
        let app = usize::from(key.app);
        match key.source {
            Source::Door => self.knocking = true,
            Source::Guest => self.hear_guest(key, calls),
            Source::Channel => self.has_said(key, Queue::push),
            Source::Process => self.process_ended(app, key.number, key.generation, calls),
            Source::Event => {
                self.counts.woken += 1;
                self.rouse(app);
            }
            Source::Kernel => self.kernels_come(app, calls),
            Source::Memory => self.memory_comes(calls),
            // What has come since is taken in the next round.
            Source::Peers => self.look = true,
            Source::End if !flags.contains(EventFlags::HUP) => {
                if flags.contains(EventFlags::IN) {
                    self.bytes_come(app, key.number);
                }
                self.queue_listener(app, key.number, Some(key.generation));
            }
            Source::End | Source::Pipe => self.hung_up(app, key.number, key.generation, calls),
        }
    }

    /// Tells applications the broadcast addresses when these have changed.
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

    /// Does what applications need in each round.
    fn tend_applications(&mut self, calls: &mut Calls<'_>) {
        self.ask_for_memory(calls);
        self.fall_asleep(calls.now);
        let Self { apps, awake, errands, ending, feed, .. } = self;
        feed.unmap(errands);
        for app in awake.iter() {
            let application = apps.get_mut(app).and_then(Option::as_deref_mut);
            if let Some(acceptor) = application.and_then(|app| app.acceptor.as_mut()) {
                acceptor.hurry(calls.now, errands);
            }
        }
        let ended: Vec<_> = ending.extract_if(.., |acceptor| acceptor.end(calls.now, errands)).collect();
        for acceptor in ended {
            errands.close(acceptor.user, acceptor);
        }
    }

    /// A warning about something that means nothing.
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
            // Programs may wait for it.
            Event::Address { .. } => self.look = true,
        }
    }

    fn told(&mut self, _: &mut Calls<'_>) {
        self.announce();
    }

    fn round(&mut self, _: &mut Context<'_>, calls: &mut Calls<'_>) {
        for (app, id) in std::mem::take(&mut self.condemned) {
            if self.app(app).is_some_and(|app| app.id == id) {
                self.end_application(app, calls);
            }
        }
        // Those that had to wait for this turn.
        if !self.announced.is_empty() {
            self.announce();
        }
        self.look_for_marks(calls.now);
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
            self.errands.close_socket(guest.user, guest.socket);
        }
        for app in 0..self.apps.len() {
            self.end_application(app, calls);
        }
    }
}

impl Wakes for Serve {
    fn arm(&mut self) -> Wake<'_> {
        let busy = self.look || self.behind || !self.talking.is_empty();
        // All that are awake: who marks a session after this wakes the worker.
        let awake = self.awake.iter().filter_map(|app| self.apps.get(app)?.as_deref());
        let marked = awake.fold(busy, |any, app| app.shared.control().arm() | !app.talking.is_empty() | any);
        if marked { Wake::Now } else { Wake::Event(self.watch.as_fd()) }
    }

    fn disarm(&mut self) {
        self.look = true;
        for app in self.awake.iter().filter_map(|app| self.apps.get(app)?.as_deref()) {
            app.shared.control().disarm();
        }
    }
}

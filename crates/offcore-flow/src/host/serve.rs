//! Serves applications in other processes: answers their calls and wakes them.
//!
//! Data passes through FIFOs in shared memory. [`offcore_session`] documents the protocol: the shared words, the
//! messages, and what `poll` reports on the application's end of a session. This module implements the stack's side:
//!
//! * `owners`: the server's state, divided by subject
//! * `door`: the socket at which processes attach; `attach`: their identity and admission
//! * `application`: the parts of an application: `processes`, `session_table`, `pending_work`, `doorbell`;
//!   `feed`: its memory; `ports`: sessions by port
//! * `calls`: requests of processes; `datagrams`: requests for datagram sockets; `addresses`: permitted addresses and
//!   ports
//! * `acceptor`: connections of kernel listeners; `errands`: other work that may block on an application
//! * `session`: the requests of a session's application and their results; `turns`: scheduling of applications;
//!   `listening`: incoming connections
//! * `awake`: applications whose marks are read in each round
//! * `waking`: the cost of waking applications; `raw`: data written to a session without the library
//! * `pair`: the socket pair of a session; `stack_end`: the stack's end of it; `peers`: whether its other end is still
//!   open; `wire`: messages with descriptors; `key`: events of the kernel
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
mod doorbell;
mod errands;
mod feed;
mod key;
mod listening;
mod owners;
mod pair;
mod peers;
mod pending_work;
mod ports;
mod processes;
mod raw;
mod session;
mod session_table;
mod sessions;
mod stack_end;
mod stream_options;
#[cfg(test)]
mod tests;
mod turns;
mod waking;
mod wire;

use std::path::PathBuf;

use arrayvec::ArrayVec;
use offcore_port::{Context, Wake};
use offcore_stats::page::Block;
use offcore_stats::time::{Micros, Time};
use offcore_stats::tsc;
use offcore_tcp::proto::{CallError, Event};
use offcore_vhost::connection::SocketError;
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;

use crate::host::{App, Calls};
use crate::worker::task::Wakes;
use application::Application;
pub use counts::{ServeCounts, TCP_SERVE};
use descriptors::Descriptors;
use door::LONGEST;
use key::{Key, Source};
use owners::{Acceptors, Admission, Helpers, Polling, PortTable, Registry, Schedule, SessionIndex, Tally};
use pair::Pairs;
use pending_work::PendingQueue;

/// Interval between polls of the kernel.
const LOOK: Micros = Micros::from_millis(1);
/// The interval while applications are asleep: a sleeping application reports its marks through the
/// kernel only.
const LOOK_ASLEEP: Micros = Micros::new(100);
/// How long programs wait for the host's addresses after its start. A DHCP server is asked three times
/// within this time. After it programs start without an address, and `connect` fails with `ENETUNREACH` until one is
/// assigned.
const ADDRESS_WAIT: Micros = Micros::from_secs(20);

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
    /// {path:?} exists and is not a stack's lock file (a file of this user with mode 0600, empty or with a process number): remove it, or choose another path
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

/// Serves applications in other processes.
#[derive(Debug)]
pub struct Serve {
    config: ServeConfig,
    pairs: Pairs,
    descriptors: Descriptors,
    admission: Admission,
    registry: Registry,
    index: SessionIndex,
    ports: PortTable,
    acceptors: Acceptors,
    helpers: Helpers,
    schedule: Schedule,
    polling: Polling,
    tally: Tally,
}

impl Serve {
    /// Opens the socket. The counters are published in `stats`, a block of the family [`TCP_SERVE`].
    ///
    /// # Errors
    /// Fails if another stack serves at the path, or with the error of a system call.
    ///
    /// # Panics
    /// Panics if the block has another number of counters.
    pub fn open(config: ServeConfig, stats: Block) -> Result<Self, ServeError> {
        assert_eq!(stats.len(), TCP_SERVE.size(), "the block is of the family TCP_SERVE");
        let pairs = Pairs::calibrate()?;
        let polling = Polling::new()?;
        let admission = Admission::open(&config)?;
        if let Some(door) = &admission.door {
            let watched = polling.watch.add_stack_descriptor(door.as_fd(), Source::ServeSocket);
            watched.map_err(|source| ServeError::System { what: "watching the socket", source })?;
        }
        let (users, acceptors) = (admission.users(&config), Acceptors::new());
        let (descriptors, helpers) =
            (Descriptors::new(users), Helpers::new(users, acceptors.cpus, &polling.watch)?);
        tracing::info!(
            users,
            descriptors = descriptors.most(),
            memory_mib = helpers.feed.share() >> 20,
            applications = helpers.feed.applications(),
            "programs of these users may attach at {:?}: root, {} and {:?}; the other numbers are limits per user",
            config.path,
            admission.user,
            config.allow
        );
        Ok(Self {
            pairs,
            descriptors,
            registry: Registry::default(),
            index: SessionIndex::default(),
            ports: PortTable::new(),
            helpers,
            schedule: Schedule::new(),
            tally: Tally::new(stats),
            acceptors,
            polling,
            admission,
            config,
        })
    }

    /// The current counters.
    pub fn counts(&self) -> ServeCounts {
        let apps = self.registry.apps.iter().flatten();
        let (processes, sessions) = apps.clone().fold((0, 0), |(processes, sessions), app| {
            (processes + app.processes().len() as u64, sessions + app.sessions().len() as u64)
        });
        let (applications, awake) = (apps.count() as u64, self.registry.awake.len() as u64);
        ServeCounts { applications, processes, sessions, awake, ..self.tally.counts }
    }

    fn app(&mut self, app: usize) -> Option<&mut Application> {
        self.registry.app(app)
    }

    /// Handles the events that the kernel reports.
    fn tend(&mut self, calls: &mut Calls<'_>) {
        self.schedule.waking.begin();
        self.tell_broadcasts(calls);
        let (mut events, mut users) = (std::mem::take(&mut self.polling.events), ArrayVec::new());
        self.polling.look = self.polling.watch.take(&mut events, &mut users);
        self.polling.looked = calls.now;
        self.registry.visit_awake(|app| app.pending_mut().make_all_due());
        self.take_created_memory(calls);
        self.handle_peer_answers(calls);
        self.read_waiting_messages(calls);
        for key in events.drain(..) {
            self.take_event(key, EventFlags::IN, calls);
        }
        self.polling.events = events;
        for at in users {
            self.take_user_events(at, calls);
        }
        if let Some(door) = &mut self.admission.door {
            door.retain_barred(calls.now, |user| self.helpers.errands.are_full(user));
        }
        // A program cannot connect until address probing is complete, so it waits. It also waits for addresses from the
        // network, but only for a limited time.
        if self.admission.connecting && calls.stack.is_probing() {
            self.polling.look = true;
        } else if self.admission.connecting && !self.awaits_address(calls) {
            self.accept_processes(calls.now);
        }
        self.take_accept_results(calls);
        self.tend_applications(calls);
    }

    /// Reads the first messages of guests that had to wait because their user had too many errands. When a user's slice
    /// is used up, its remaining guests wait for the next round.
    fn read_waiting_messages(&mut self, calls: &mut Calls<'_>) {
        let mut rest = Vec::new();
        self.schedule.turns.begin_slices();
        for (user, key) in std::mem::take(&mut self.admission.talking) {
            if !self.schedule.turns.has_slice(user) {
                rest.push((user, key));
                continue;
            }
            let from = tsc::now();
            self.read_guest_message(key, calls);
            self.woke_guest(user, from);
            self.charge_time(user, from);
        }
        self.polling.look |= !rest.is_empty();
        rest.append(&mut self.admission.talking);
        self.admission.talking = rest;
    }

    /// Handles events of a user until the user's time for events is used up. The others stay in the user's set.
    fn take_user_events(&mut self, at: usize, calls: &mut Calls<'_>) {
        let mut events = std::mem::take(&mut self.polling.user_events);
        let began = tsc::now();
        loop {
            let (user, more) = self.polling.watch.take_of_user(at, &mut events);
            for (key, flags) in events.drain(..) {
                // A descriptor of an ended application may be reported late.
                if !self.belongs_to(key, user) {
                    continue;
                }
                let from = tsc::now();
                self.take_event(key, flags, calls);
                if key.source == Source::Guest {
                    self.woke_guest(user, from);
                }
                self.charge_time(user, from);
            }
            if !more {
                break;
            }
            if tsc::now() - began >= self.schedule.turns.limit(user) {
                self.polling.look = true;
                break;
            }
        }
        self.polling.user_events = events;
    }

    /// Whether the object that a key identifies belongs to a user.
    fn belongs_to(&self, key: Key, user: u32) -> bool {
        match key.source {
            Source::Guest => {
                let guests = &self.admission.guests;
                guests.iter().any(|guest| guest.generation == key.generation && guest.user == user)
            }
            _ => self.registry.user_of(key.app.into()) == Some(user),
        }
    }

    fn take_event(&mut self, key: Key, flags: EventFlags, calls: &mut Calls<'_>) {
        let app = usize::from(key.app);
        match key.source {
            Source::ServeSocket => self.admission.connecting = true,
            Source::Guest => self.read_guest_message(key, calls),
            Source::Channel => self.queue_request(key, PendingQueue::push),
            Source::Process => self.process_ended(app, key.number, key.generation, calls),
            Source::Event => {
                self.tally.counts.woken += 1;
                self.wake_application(app);
            }
            Source::Kernel => self.queue_accept_results(app),
            // The next round handles created memory, answers about other ends, and processes that had to wait because
            // their user had too many errands.
            Source::Helpers => self.polling.look = true,
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
        if !calls.stack.broadcasts().eq(self.registry.broadcasts.iter().copied()) {
            self.registry.broadcasts = calls.stack.broadcasts().collect();
            for application in self.registry.apps.iter().flatten() {
                application.shared().processes().set_broadcasts(self.registry.broadcasts.iter().copied());
            }
        }
    }

    /// Whether programs still wait for the host's addresses.
    fn awaits_address(&mut self, calls: &Calls<'_>) -> bool {
        let iface = calls.stack.awaits_address().filter(|_| !self.admission.has_address);
        let Some(iface) = iface else { return false };
        self.admission.has_address = calls.now >= Time::ZERO + ADDRESS_WAIT;
        if self.admission.has_address {
            let seconds = ADDRESS_WAIT.as_secs();
            tracing::warn!(
                "port{iface} has got no address from the network within {seconds} s and still tries: programs begin without it"
            );
        }
        !self.admission.has_address
    }

    /// Does the periodic work for applications in each round.
    fn tend_applications(&mut self, calls: &mut Calls<'_>) {
        self.ask_for_memory(calls);
        self.fall_asleep(calls.now);
        let errands = &mut self.helpers.errands;
        // Pages are kept while the stack ends: the processes are still alive and need the addresses of their datagram
        // sockets.
        self.helpers.feed.unmap(errands, self.admission.door.is_some());
        self.registry.visit_awake(|app| {
            if let Some(acceptor) = app.acceptor_mut() {
                acceptor.interrupt_blocked_accept(calls.now, errands);
            }
        });
        let ending = &mut self.acceptors.ending;
        let ended: Vec<_> = ending.extract_if(.., |acceptor| acceptor.end(calls.now, errands)).collect();
        for acceptor in ended {
            errands.close(acceptor.user, acceptor);
        }
    }

    /// Counts an invalid input of an application and logs a rate-limited warning.
    fn misuse(&mut self, what: &'static str, app: usize, now: Time) {
        self.tally.counts.misused += 1;
        if self.tally.misuses.may(now) {
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
                if let Some(&(app, number)) = self.index.by_listener.get(&listener) {
                    self.queue_listener(app, number, None);
                }
            }
            Event::Readable(conn) => self.readable(conn),
            Event::Writable(conn) => self.writable(conn, calls),
            Event::Connected(conn) => self.connected(conn, calls),
            Event::EndOfStream(conn) => self.peer_ended(conn),
            Event::Closed(conn, cause) => self.over(conn, cause),
            Event::Failed(conn, errno) => self.failed(conn, errno),
            // The host logs address conflicts.
            Event::AddressConflict { .. } => {}
            // Programs may be waiting for the address.
            Event::Address { .. } => self.polling.look = true,
        }
    }

    fn told(&mut self, _: &mut Calls<'_>) {
        self.announce();
    }

    fn round(&mut self, _: &mut Context<'_>, calls: &mut Calls<'_>) {
        // Sessions whose announcement was deferred to this turn.
        self.announce();
        self.scan_for_marks(calls.now);
        let often = if self.registry.awake.all_are() { LOOK } else { LOOK_ASLEEP };
        if self.polling.look || calls.now >= self.polling.looked + often {
            self.tend(calls);
        }
        self.schedule.behind = self.work_some(calls) || !self.index.announced.is_empty();
    }

    fn publish(&mut self) {
        self.tally.stats.set(self.counts().values());
    }

    fn wakes(&mut self) -> Option<&mut dyn Wakes> {
        Some(self)
    }

    fn is_busy(&self) -> bool {
        self.polling.look || self.schedule.behind
    }

    fn stop(&mut self, calls: &mut Calls<'_>) {
        self.admission.door = None;
        for guest in std::mem::take(&mut self.admission.guests) {
            self.helpers.errands.close_socket(guest.user, guest.socket, guest.charge);
        }
        for app in 0..self.registry.apps.len() {
            self.end_application(app, calls);
        }
    }
}

impl Wakes for Serve {
    fn arm(&mut self) -> Wake<'_> {
        let busy = self.polling.look || self.schedule.behind;
        // Arms all awake applications. An application that marks a session after this wakes the worker. An event
        // reports when the user of a waiting process is below the limit of errands again.
        let awake = self.registry.awake.iter().filter_map(|app| self.registry.apps.get(app)?.as_deref());
        let marked = awake.fold(busy, |any, app| {
            let asks = app.pending().has_message_senders() && !self.helpers.errands.are_full(app.user());
            app.control().arm() | asks | any
        });
        if marked { Wake::Now } else { Wake::Event(self.polling.watch.as_fd()) }
    }

    fn disarm(&mut self) {
        self.polling.look = true;
        for app in self.registry.awake.iter().filter_map(|app| self.registry.apps.get(app)?.as_deref()) {
            app.control().disarm();
        }
    }
}

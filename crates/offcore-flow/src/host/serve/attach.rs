//! Attaching of processes: their credentials, and the applications that they belong to.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use nix::sys::socket::sockopt::PeerCredentials;
use nix::sys::socket::{UnixCredentials, getsockopt};
use offcore_session::control::PROCESSES;
use offcore_session::message::{ASK, Answer, Hello, KEY, MOST_DESCRIPTORS, VERSION, Welcome};
use offcore_session::shared::Shared;
use offcore_stats::time::{Micros, Time};
use offcore_stats::tsc;
use offcore_tcp::proto::AppMemory;
use rustix::event::epoll::EventFlags;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::net::sockopt::{set_socket_passcred, set_socket_send_buffer_size, socket_domain, socket_type};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Pid, PidfdFlags, getpid, pidfd_open};
use rustix::rand::{GetRandomFlags, getrandom};

use super::application::{Application, Identity};
use super::doorbell::Doorbell;
use super::feed::{GrantedMemory, Made, Share};
use super::key::{APPLICATIONS, Key, Source};
use super::owners::Guest;
use super::processes::Process;
use super::session::number;
use super::{Serve, descriptors, wire};
use crate::host::Calls;

/// The maximum number of guests per user, that is of processes that have connected but not identified themselves; and
/// the time after which the oldest of them may be replaced. Beyond the limit new processes are rejected
/// and try again.
const GUESTS_OF_USER: usize = 32;
const SILENT: Micros = Micros::from_secs(1);
/// The maximum number of guests per user that wait for memory.
const WAITING: usize = 256;
/// Stands for all users that may not attach. No user has this number.
const UNKNOWN_USER: u32 = u32::MAX;
/// The maximum number of processes accepted at a time.
const AT_ONCE: usize = 16;
/// The number of a user's errands at which the user is [blocked](super::door::ServeSocket::block_user). A user at the
/// limit of errands is only asked to try again, because the limit may be reached for a moment.
const BARRED: usize = descriptors::MAX_PENDING_CLOSES / 2 * 3;
/// The number of errands of a user that cannot be barred, at which no process is accepted.
const MOST_ERRANDS: usize = 2 * descriptors::MAX_PENDING_CLOSES;
/// The requested size of the send buffer of a process's socket, in bytes. The kernel raises it to its minimum, which
/// holds a few answers. A process that does not read its answers thus keeps few descriptors in flight.
const CHANNEL_BUFFER: usize = 1;

impl Serve {
    /// Accepts waiting processes, up to [`AT_ONCE`] of them.
    pub(super) fn accept_processes(&mut self, now: Time) {
        // The event is edge-triggered: processes that stay in the queue are not reported again.
        self.admission.connecting = true;
        let (began, limit) = (tsc::now(), self.schedule.turns.common_limit());
        for at in 0..AT_ONCE {
            if at > 0 && tsc::now() - began >= limit {
                self.polling.look = true;
                return;
            }
            let Some(door) = &self.admission.door else { return };
            // Each accepted socket must be closed some time, which is an errand.
            if self.admission.refused.is_some_and(|user| self.helpers.errands.count(user) >= MOST_ERRANDS) {
                return;
            }
            let socket = match door.accept() {
                Ok(socket) => socket,
                Err(Errno::INTR | Errno::CONNABORTED) => continue,
                Err(Errno::AGAIN) => {
                    self.admission.connecting = false;
                    return;
                }
                Err(error) => {
                    return self.count_refusal(now, "a process cannot be accepted", UNKNOWN_USER, error);
                }
            };
            let from = tsc::now();
            let user = self.may_attach(&socket).map_or(UNKNOWN_USER, |who| who.uid());
            let _ = set_socket_send_buffer_size(&socket, CHANNEL_BUFFER);
            if let Err((error, socket)) = self.take_guest(user, socket, now, false) {
                self.count_refusal(now, "a process was refused and must attach again", user, error);
                self.helpers.errands.close_socket(user, socket, None);
                let door =
                    self.admission.door.as_mut().filter(|_| self.helpers.errands.count(user) >= BARRED);
                if let Some(door) = door {
                    self.admission.refused = Some(user).filter(|user| !door.block_user(*user, now));
                }
            }
            self.charge_time(user, from);
        }
    }

    /// Adds a guest. If a user has too many silent guests, the oldest one is removed when it has been silent for long
    /// enough.
    fn take_guest(
        &mut self,
        user: u32,
        socket: OwnedFd,
        since: Time,
        invited: bool,
    ) -> Result<(), (Errno, OwnedFd)> {
        if self.helpers.errands.are_full(user) || self.schedule.waking.is_barred(user) {
            return Err((Errno::AGAIN, socket));
        }
        let is_silent = |other: &Guest| other.user == user && other.waits.is_none();
        if self.admission.guests.iter().filter(|other| is_silent(other)).count() >= GUESTS_OF_USER {
            let oldest = self.admission.guests.iter().position(is_silent);
            let silent = oldest.filter(|at| since >= self.admission.guests[*at].since + SILENT);
            let Some(silent) = silent.and_then(|at| self.admission.guests.remove(at)) else {
                return Err((Errno::AGAIN, socket));
            };
            self.close_guest_socket(silent);
        }
        let generation = self.registry.next_generation();
        let key = Key::new(Source::Guest, 0, 0, generation);
        if let Err(error) = self.polling.watch.add(user, socket.as_fd(), key, EventFlags::IN) {
            return Err((error, socket));
        }
        let charge = self.descriptors.take(user, descriptors::PROCESS).ok();
        self.admission.guests.push_back(Guest {
            generation,
            user,
            socket,
            charge,
            since,
            invited,
            waits: None,
        });
        Ok(())
    }

    /// Closes the socket of a guest as an errand, because unread messages may contain descriptors.
    fn close_guest_socket(&mut self, guest: Guest) {
        self.polling.watch.remove(guest.user, guest.socket.as_fd());
        self.helpers.errands.close_socket(guest.user, guest.socket, guest.charge);
    }

    /// Closes unexpected descriptors that processes of a user have sent.
    pub(super) fn discard(&mut self, user: u32, descriptors: Vec<OwnedFd>) {
        for descriptor in descriptors {
            self.helpers.errands.close(user, descriptor);
        }
    }

    /// Counts and logs a process of a user that was refused, or a connection that had to be reset.
    pub(super) fn count_refusal(&mut self, now: Time, what: &'static str, user: u32, error: Errno) {
        self.tally.counts.refused += 1;
        if self.tally.refusals.may(now) {
            let remedy = self.remedy(user, error);
            tracing::warn!(user, %error, "{what}{remedy}");
        }
    }

    /// Returns the limit that a user has reached, and a remedy.
    fn remedy(&self, user: u32, error: Errno) -> String {
        match error {
            Errno::MFILE => format!(
                ": the share of user {user} is {} descriptors; raise the limit of open files (ulimit -Hn), or admit \
                 fewer users",
                self.descriptors.most()
            ),
            Errno::USERS if self.registry.next_index().is_none() => {
                format!(": all users together have the maximum of {APPLICATIONS} applications: end some")
            }
            Errno::USERS => {
                format!(
                    ": user {user} has the maximum of {} applications: end some",
                    self.helpers.feed.applications()
                )
            }
            Errno::NOMEM => {
                format!(
                    ": the limit for all applications of user {user} is {} MiB: end some",
                    self.helpers.feed.share() >> 20
                )
            }
            Errno::ACCESS => ": admit its user with --allow-uid".into(),
            Errno::AGAIN if self.helpers.errands.are_full(user) => {
                format!(": {} files of user {user} are still being closed", descriptors::MAX_PENDING_CLOSES)
            }
            Errno::AGAIN if self.schedule.waking.is_barred(user) => {
                format!(": wake-ups of user {user} took too long")
            }
            Errno::AGAIN => format!(": too many processes of user {user} attach at once"),
            Errno::NOBUFS => format!(": its program has the maximum of {} processes", PROCESSES - 1),
            _ => String::new(),
        }
    }

    /// Counts and logs a process that was refused, with its process and user numbers and a remedy.
    fn refuse_process(&mut self, socket: &OwnedFd, now: Time, error: Errno) {
        self.tally.counts.refused += 1;
        if self.tally.refusals.may(now) {
            let (process, user) = credentials(socket).map_or((0, UNKNOWN_USER), |who| (who.pid(), who.uid()));
            let remedy = self.remedy(user, error);
            tracing::warn!(process, user, %error, "a process could not attach{remedy}");
        }
    }

    /// Reads the first message of a guest.
    pub(super) fn read_guest_message(&mut self, key: Key, calls: &mut Calls<'_>) {
        let Some(at) = self.admission.guests.iter().position(|guest| guest.generation == key.generation)
        else {
            return;
        };
        if self.admission.guests[at].waits.is_some() {
            return;
        }
        let user = self.admission.guests[at].user;
        if self.helpers.errands.are_full(user) {
            if !self.admission.talking.contains(&(user, key)) {
                self.admission.talking.push((user, key));
            }
            return;
        }
        let guest = &self.admission.guests[at];
        let who = match guest.invited {
            true => wire::sender(guest.socket.as_fd()).and_then(|who| {
                set_socket_passcred(&guest.socket, false)?;
                Ok(who)
            }),
            false => self.may_attach(&guest.socket),
        };
        if guest.invited && matches!(who, Err(Errno::AGAIN)) {
            return;
        }
        // The message of another version may be longer.
        let (mut bytes, mut descriptors) = ([0; 256], Vec::new());
        let received = wire::receive(self.admission.guests[at].socket.as_fd(), &mut bytes, &mut descriptors);
        self.discard(self.admission.guests[at].user, descriptors);
        if matches!(received, Err(Errno::AGAIN)) {
            return;
        }
        let Some(guest) = self.admission.guests.remove(at) else { return };
        let len = received.map_or(0, |received| received.len);
        match Hello::from_bytes(&bytes[..len]) {
            Some(hello) => self.read_hello(&hello, who, guest, calls),
            None => {
                if len > 0 {
                    self.misuse(
                        "a process sent an invalid first message: its socket was closed",
                        0,
                        calls.now,
                    );
                }
                self.close_guest_socket(guest);
            }
        }
    }

    fn read_hello(
        &mut self,
        hello: &Hello,
        who: Result<UnixCredentials, Errno>,
        guest: Guest,
        calls: &mut Calls<'_>,
    ) {
        if hello.version == ASK {
            answer(guest.socket.as_fd(), who.map_or_else(number, |_| 0));
            return self.close_guest_socket(guest);
        }
        let who = who.and_then(|who| if hello.version == VERSION { Ok(who) } else { Err(Errno::PROTO) });
        let who = who.and_then(|who| if guest.charge.is_some() { Ok(who) } else { Err(Errno::MFILE) });
        let who = match who {
            Ok(who) => who,
            Err(error) => return self.refuse_guest(guest, error, calls.now),
        };
        match self.find_app(hello.key, guest.user) {
            Some(app) => self.enter(Ok(app), who, guest, calls),
            // The application that requested the socket for its child has ended.
            None if guest.invited => self.refuse_guest(guest, Errno::ACCESS, calls.now),
            None => self.begin_app(hello.key, guest, calls),
        }
    }

    /// Starts the creation of memory for a new application, unless it is in progress, and queues the guest until it is
    /// complete.
    fn begin_app(&mut self, mut key: [u8; KEY], guest: Guest, calls: &mut Calls<'_>) {
        let user = guest.user;
        let waiting =
            || self.admission.guests.iter().filter(|other| other.user == user && other.waits.is_some());
        let (all, is_begun) = (waiting().count(), waiting().any(|other| other.waits == Some(key)));
        let ours = key == [0; KEY];
        if ours && getrandom(&mut key, GetRandomFlags::NONBLOCK).ok() != Some(KEY) || all >= WAITING {
            return self.refuse_guest(guest, Errno::AGAIN, calls.now);
        }
        if ours || !is_begun {
            if self.registry.next_index().is_none() {
                return self.refuse_guest(guest, Errno::USERS, calls.now);
            }
            if !self.helpers.feed.has_room(user) {
                let error = self.abort_oldest_orphaned(user, calls);
                return self.refuse_guest(guest, error, calls.now);
            }
            if !self.descriptors.has_room(user, descriptors::of_application(self.config.memory)) {
                return self.refuse_guest(guest, Errno::MFILE, calls.now);
            }
            self.helpers.feed.begin(user, key, self.config.memory, &mut self.helpers.errands);
        }
        // No message is expected until then.
        self.polling.watch.remove(user, guest.socket.as_fd());
        self.admission.guests.push_back(Guest { waits: Some(key), ..guest });
    }

    /// Frees memory of a user that has too many applications: aborts the remaining connections of the application that
    /// ended first. Returns `EAGAIN` in that case, because there will be room soon.
    fn abort_oldest_orphaned(&mut self, user: u32, calls: &mut Calls<'_>) -> Errno {
        let Some(memory) = self.helpers.feed.oldest_orphaned(user) else { return Errno::USERS };
        calls.stack.abort_removed(calls.now, memory, calls.out);
        Errno::AGAIN
    }

    /// Handles created memory, for new and existing applications, until the time for this work is used up.
    pub(super) fn take_created_memory(&mut self, calls: &mut Calls<'_>) {
        let (began, limit) = (tsc::now(), self.schedule.turns.common_limit());
        while let Some(made) = self.helpers.feed.next() {
            let (user, from) = (made.user(), tsc::now());
            match made {
                Made::More { app, user, memory, segment } => {
                    let id =
                        self.app(app).and_then(|app| app.memory_mut().end_growth(&memory).then(|| app.id()));
                    let rest = match id {
                        Some(id) => calls.stack.add_memory(id, segment),
                        None => segment,
                    };
                    // The thread that created the memory also unmaps it, and the rest of the application's memory.
                    self.helpers.errands.close(user, (rest, memory));
                }
                Made::New { user, key, memory, share } => {
                    self.create_admitted_app(user, key, memory, share, calls)
                }
            }
            self.charge_time(user, from);
            if tsc::now() - began >= limit {
                self.polling.look = true;
                return;
            }
        }
    }

    /// Creates a new application after its memory was created.
    fn create_admitted_app(
        &mut self,
        user: u32,
        key: [u8; KEY],
        memory: Option<AppMemory>,
        share: Share,
        calls: &mut Calls<'_>,
    ) {
        let app = match memory {
            Some(memory) => self.add_app(user, key, memory, share, calls),
            None => Err(Errno::NOMEM),
        };
        let is_one = |guest: &Guest| guest.user == user && guest.waits == Some(key);
        while let Some(at) = self.admission.guests.iter().position(is_one) {
            let Some(guest) = self.admission.guests.remove(at) else { return };
            match self.may_attach(&guest.socket) {
                Ok(who) => self.enter(app, who, guest, calls),
                Err(error) => self.refuse_guest(guest, error, calls.now),
            }
        }
        // None of the guests that waited for it has entered.
        if let Ok(app) = app {
            self.end_when_over(app, calls);
        }
    }

    /// Requests memory for applications that are short of it.
    pub(super) fn ask_for_memory(&mut self, calls: &mut Calls<'_>) {
        for (id, wanted) in calls.stack.wanted_memory() {
            let Some(&app) = self.registry.by_id.get(&id) else { continue };
            let Some(application) = self.registry.app(app) else { continue };
            let (user, errands) = (application.user(), &mut self.helpers.errands);
            self.helpers.feed.go_on(app, user, application.memory_mut(), wanted, errands);
        }
    }

    /// Turns a guest into a process of an application.
    fn enter(
        &mut self,
        app: Result<usize, Errno>,
        who: UnixCredentials,
        guest: Guest,
        calls: &mut Calls<'_>,
    ) {
        match app.and_then(|app| self.admit(app, who, &guest.socket)) {
            Ok(attached) => self.greet(attached, guest, calls),
            Err(error) => self.refuse_guest(guest, error, calls.now),
        }
    }

    fn refuse_guest(&mut self, guest: Guest, error: Errno, now: Time) {
        self.refuse_process(&guest.socket, now, error);
        answer(guest.socket.as_fd(), number(error));
        self.close_guest_socket(guest);
    }

    /// Finds the application of a user by its key.
    fn find_app(&self, key: [u8; KEY], user: u32) -> Option<usize> {
        let known = |app: &Application| app.identity().key() == key && app.user() == user;
        self.registry.apps.iter().position(|app| app.as_deref().is_some_and(known))
    }

    /// Returns the credentials of the process at the other end of a socket, if its user may attach.
    fn may_attach(&self, socket: &OwnedFd) -> Result<UnixCredentials, Errno> {
        let who = credentials(socket)?;
        let user = who.uid();
        let may = user == 0 || user == self.admission.user || self.config.allow.contains(&user);
        if may { Ok(who) } else { Err(Errno::ACCESS) }
    }

    /// Creates an application from its memory.
    fn add_app(
        &mut self,
        user: u32,
        key: [u8; KEY],
        memory: AppMemory,
        share: Share,
        calls: &mut Calls<'_>,
    ) -> Result<usize, Errno> {
        let at = self.registry.next_index().ok_or(Errno::USERS)?;
        let mut instance = [0; 8];
        if getrandom(&mut instance, GetRandomFlags::NONBLOCK)? < instance.len() {
            return Err(Errno::AGAIN);
        }
        let mut shared = Shared::new().map_err(|_| Errno::NOMEM)?;
        shared.processes().set_broadcasts(self.registry.broadcasts.iter().copied());
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let charge = self.descriptors.take(user, descriptors::of_application(self.config.memory))?;
        self.polling.watch.add(user, event.as_fd(), Key::new(Source::Event, at, 0, 0), EventFlags::IN)?;
        let id = calls.stack.add_app(memory);
        calls.stack.set_user(id, user);
        calls.stack.limit_app(id, self.config.connections);
        let memory = GrantedMemory::new(Arc::clone(calls.stack.memory(id)), share);
        let identity = Identity::new(id, key, u64::from_ne_bytes(instance), user);
        if at == self.registry.apps.len() {
            self.registry.apps.push(None);
        }
        shared.lock_for_thread();
        let application = Application::new(identity, memory, shared, Doorbell::new(event), charge);
        self.registry.apps[at] = Some(Box::new(application));
        self.registry.awake.add(at);
        self.registry.by_id.insert(id, at);
        Ok(at)
    }

    /// Adds a process to an application.
    fn admit(&mut self, app: usize, who: UnixCredentials, socket: &OwnedFd) -> Result<Attached, Errno> {
        let generation = self.registry.next_generation();
        let pid = who.pid();
        let Some(application) = self.registry.app(app) else { return Err(Errno::BADF) };
        if application.pending().is_ending() {
            return Err(Errno::AGAIN);
        }
        let (user, visible) = (application.user(), Pid::from_raw(pid));
        // A process with the same number has executed another program: its previous entry no longer holds locks.
        let before = visible.and_then(|_| application.processes().find(pid));
        // If the system cannot watch processes, the process counts as ended when its socket is closed. The same applies
        // to a process outside this PID namespace, whose number is 0.
        let pidfd = match visible.map_or(Err(Errno::NOSYS), |pid| pidfd_open(pid, PidfdFlags::empty())) {
            Ok(pidfd) => Some(pidfd),
            Err(error @ (Errno::MFILE | Errno::NFILE | Errno::SRCH)) => return Err(error),
            Err(_) => None,
        };
        let process = Process {
            generation,
            pid,
            channel: None,
            charge: None,
            postponed: None,
            is_queued: false,
            pidfd,
        };
        let (number, owner) = application.add_process(process).ok_or(Errno::NOBUFS)?;
        let key = Key::new(Source::Process, app, number as u32, generation);
        let process = application.process(number as u32, generation);
        let watched = process
            .and_then(|process| process.pidfd.as_ref())
            .map_or(Ok(()), |pidfd| self.polling.watch.add(user, pidfd.as_fd(), key, EventFlags::IN));
        // The socket of a guest is already watched; a socket that came with a message is not.
        let key = Key { source: Source::Channel, ..key };
        let watched = watched.and_then(|()| {
            match self.polling.watch.change(user, socket.as_fd(), key, EventFlags::IN) {
                Err(Errno::NOENT) => self.polling.watch.add(user, socket.as_fd(), key, EventFlags::IN),
                result => result,
            }
        });
        if let Err(error) = watched {
            application.remove_process(number as u32);
            return Err(error);
        }
        Ok(Attached { app, number: number as u32, generation, owner: owner.word(), before })
    }

    /// Sends a process its welcome message.
    fn greet(&mut self, attached: Attached, guest: Guest, calls: &mut Calls<'_>) {
        let Attached { app, number, generation, owner, before } = attached;
        let gate = self.pairs.gate;
        let Some(application) = self.app(app) else { return };
        let [control, processes] = application.shared().descriptors();
        let mut descriptors = vec![control, processes, application.doorbell().event()];
        let segments = application.memory().segments().map(|(fd, _)| fd);
        descriptors.extend(segments.take(MOST_DESCRIPTORS - descriptors.len()));
        let welcome = Welcome {
            version: VERSION,
            error: 0,
            key: application.identity().key(),
            instance: application.identity().instance(),
            owner,
            pid: getpid().as_raw_nonzero().get().unsigned_abs(),
            gate,
            segments: (descriptors.len() - 3) as u32,
        };
        // If the message cannot be sent, the process has ended or will soon.
        let from = tsc::now();
        let _ = wire::send(guest.socket.as_fd(), &welcome.to_bytes(), &descriptors);
        let ticks = tsc::now().saturating_sub(from);
        if let Some(process) = application.process(number, generation) {
            (process.channel, process.charge) = (Some(guest.socket), guest.charge);
        }
        self.woke(app, ticks);
        if let Some((number, generation)) = before {
            self.process_ended(app, number, generation, calls);
        }
    }

    /// Gives a child process, which has inherited its parent's socket, a separate socket. It starts as a guest.
    pub(super) fn fork(&mut self, app: usize, answer_to: OwnedFd, calls: &mut Calls<'_>) {
        let Some(user) = self.app(app).map(|app| app.user()) else { return };
        let theirs = match is_channel(answer_to.as_fd()) {
            true => self.invite(user, calls.now),
            false => Err(Errno::PROTOTYPE),
        };
        match theirs {
            // The stack did not create this socket, so operations on it may block and run as an errand.
            Ok(theirs) => self.helpers.errands.run(user, move || {
                let answer = Answer { descriptors: 1, ..Answer::of(0) };
                let _ = wire::send(answer_to.as_fd(), &answer.to_bytes(), &[theirs.as_fd()]);
            }),
            Err(error) => {
                self.count_refusal(calls.now, "a child process could not attach", user, error);
                self.helpers.errands.close(user, answer_to);
            }
        }
    }

    /// Creates the socket pair of a guest and returns its other end. The kernel reports the sender's credentials with
    /// its first message.
    fn invite(&mut self, user: u32, now: Time) -> Result<OwnedFd, Errno> {
        let kind = SocketFlags::CLOEXEC;
        let (socket, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, kind, None)?;
        set_socket_passcred(&socket, true)?;
        set_socket_send_buffer_size(&socket, CHANNEL_BUFFER)?;
        self.take_guest(user, socket, now, true).map_err(|(error, _)| error)?;
        Ok(theirs)
    }
}

/// Returns the credentials of the process that created the other end of a socket. This uses nix, because rustix cannot
/// represent a process of another namespace, which has no number.
fn credentials(socket: &OwnedFd) -> Result<UnixCredentials, Errno> {
    getsockopt(socket, PeerCredentials).map_err(|error| Errno::from_raw_os_error(error as i32))
}

/// Whether a socket can carry messages. The check does not block.
fn is_channel(socket: BorrowedFd<'_>) -> bool {
    socket_domain(socket) == Ok(AddressFamily::UNIX) && socket_type(socket) == Ok(SocketType::SEQPACKET)
}

/// A process that was admitted.
struct Attached {
    app: usize,
    number: u32,
    generation: u32,
    owner: u32,
    /// Number and generation of the process's previous entry, if it has executed another program.
    before: Option<(u32, u32)>,
}

/// Sends an error to a process that is not admitted.
fn answer(socket: BorrowedFd<'_>, error: u32) {
    let welcome = Welcome { version: VERSION, error, ..Welcome::default() };
    let _ = wire::send(socket, &welcome.to_bytes(), &[]);
}

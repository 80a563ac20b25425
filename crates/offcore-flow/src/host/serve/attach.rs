//! Processes attach: who they are, and which application they belong to.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use nix::sys::socket::sockopt::PeerCredentials;
use nix::sys::socket::{UnixCredentials, getsockopt};
use offcore_session::message::{ASK, Answer, Hello, KEY, MOST_DESCRIPTORS, VERSION, Welcome};
use offcore_session::shared::Shared;
use offcore_tcp::proto::AppMemory;
use rustix::event::epoll::EventFlags;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::net::sockopt::{set_socket_passcred, socket_domain, socket_type};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Pid, PidfdFlags, getpid, pidfd_open};
use rustix::rand::{GetRandomFlags, getrandom};

use super::application::{Application, Process};
use super::feed::{Made, Share};
use super::key::{APPLICATIONS, Key, Source};
use super::session::number;
use super::{APPLICATIONS_OF_USER, Guest, Serve, descriptors, wire};
use crate::host::Calls;

/// Processes of a user that are there and have not said who they are, at most, and for how long one may hold up others, in
/// microseconds. Who comes then is turned away and tries again.
const GUESTS_OF_USER: usize = 32;
const SILENT: u64 = 1_000_000;
/// Those of a user that wait for memory, at most.
const WAITING: usize = 256;
/// Stands for all users that may not attach: no user has this number.
const STRANGER: u32 = u32::MAX;
/// Those that are let in at once, at most.
const AT_ONCE: usize = 16;

impl Serve {
    /// Lets in who knocks, some at a time.
    pub(super) fn let_in(&mut self, now: u64) {
        // It is not told of again who has to wait in the queue.
        self.knocking = true;
        for _ in 0..AT_ONCE {
            let Some(door) = &self.door else { return };
            // What is let in has to be closed, too, some time.
            if self.guests.back().is_some_and(|guest| self.errands.are_full(guest.user)) {
                return;
            }
            let socket = match door.accept() {
                Ok(socket) => socket,
                Err(Errno::INTR | Errno::CONNABORTED) => continue,
                Err(Errno::AGAIN) => {
                    self.knocking = false;
                    return;
                }
                Err(error) => return self.refuse(now, "a process waits to attach", error),
            };
            let generation = self.next_generation();
            let user = self.may_attach(&socket).map_or(STRANGER, |who| who.uid());
            let guest = Guest { generation, user, socket, since: now, invited: false, waits: None };
            if let Err((error, socket)) = self.take_guest(guest) {
                self.refuse(now, "a process was refused and must attach again", error);
                self.errands.close_socket(user, socket);
            }
        }
    }

    /// Somebody is there. Of a user's many silent ones who has been there for long goes first.
    fn take_guest(&mut self, guest: Guest) -> Result<(), (Errno, OwnedFd)> {
        let is_silent = |other: &Guest| other.user == guest.user && other.waits.is_none();
        if self.guests.iter().filter(|other| is_silent(other)).count() >= GUESTS_OF_USER {
            let oldest = self.guests.iter().position(is_silent);
            let goes = oldest.filter(|at| guest.since >= self.guests[*at].since + SILENT);
            let Some(goes) = goes.and_then(|at| self.guests.remove(at)) else {
                return Err((Errno::AGAIN, guest.socket));
            };
            self.turn_away(goes);
        }
        let key = Key::new(Source::Guest, 0, 0, guest.generation);
        if let Err(error) = self.watch.add(guest.socket.as_fd(), key, EventFlags::IN) {
            return Err((error, guest.socket));
        }
        self.guests.push_back(guest);
        Ok(())
    }

    /// What a guest has sent and nobody has read may have descriptors.
    fn turn_away(&mut self, guest: Guest) {
        self.watch.remove(guest.socket.as_fd());
        self.errands.close_socket(guest.user, guest.socket);
    }

    /// Closes descriptors of a user's that nobody has asked for.
    pub(super) fn discard(&mut self, user: u32, descriptors: Vec<OwnedFd>) {
        for descriptor in descriptors {
            self.errands.close(user, descriptor);
        }
    }

    /// Somebody was not let in, or had to be reset.
    pub(super) fn refuse(&mut self, now: u64, what: &'static str, error: Errno) {
        self.counts.refused += 1;
        if self.refusals.may(now) {
            tracing::warn!(%error, "{what}");
        }
    }

    /// A process was not let in: who reads of it wants to know which, and what to do.
    fn refuse_process(&mut self, socket: &OwnedFd, now: u64, error: Errno) {
        self.counts.refused += 1;
        if self.refusals.may(now) {
            let (process, user) = credentials(socket).map_or((0, STRANGER), |who| (who.pid(), who.uid()));
            let may = self.may_attach(socket).is_ok();
            let remedy = if may { "" } else { ": admit its user with --allow-uid" };
            tracing::warn!(process, user, %error, "a process could not attach{remedy}");
        }
    }

    /// A process says who it is.
    pub(super) fn hear_guest(&mut self, key: Key, calls: &mut Calls<'_>) {
        let Some(at) = self.guests.iter().position(|guest| guest.generation == key.generation) else {
            return;
        };
        if self.guests[at].waits.is_some() {
            return;
        }
        if self.errands.are_full(self.guests[at].user) {
            if !self.talking.contains(&key) {
                self.talking.push(key);
            }
            return;
        }
        let guest = &self.guests[at];
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
        // Of another version it may be longer.
        let (mut bytes, mut descriptors) = ([0; 256], Vec::new());
        let received = wire::receive(self.guests[at].socket.as_fd(), &mut bytes, &mut descriptors);
        self.discard(self.guests[at].user, descriptors);
        if matches!(received, Err(Errno::AGAIN)) {
            return;
        }
        let Some(guest) = self.guests.remove(at) else { return };
        let len = received.map_or(0, |received| received.len);
        match Hello::from_bytes(&bytes[..len]) {
            Some(hello) => self.hear_hello(&hello, who, guest, calls),
            None => {
                if len > 0 {
                    self.misuse(
                        "a process sent an invalid first message: its socket was closed",
                        0,
                        calls.now,
                    );
                }
                self.turn_away(guest);
            }
        }
    }

    fn hear_hello(
        &mut self,
        hello: &Hello,
        who: Result<UnixCredentials, Errno>,
        guest: Guest,
        calls: &mut Calls<'_>,
    ) {
        if hello.version == ASK {
            answer(guest.socket.as_fd(), who.map_or_else(number, |_| 0));
            return self.turn_away(guest);
        }
        let who = who.and_then(|who| if hello.version == VERSION { Ok(who) } else { Err(Errno::PROTO) });
        let who = match who {
            Ok(who) => who,
            Err(error) => return self.refuse_guest(guest, error, calls.now),
        };
        match self.find_app(hello.key, guest.user) {
            Some(app) => self.enter(Ok(app), who, guest, calls),
            // The one that has invited it is gone.
            None if guest.invited => self.refuse_guest(guest, Errno::ACCESS, calls.now),
            None => self.begin_app(hello.key, guest, calls),
        }
    }

    /// A process of an application whose memory is to be made, unless that is going on.
    fn begin_app(&mut self, mut key: [u8; KEY], guest: Guest, calls: &mut Calls<'_>) {
        let user = guest.user;
        let waiting = || self.guests.iter().filter(|other| other.user == user && other.waits.is_some());
        let (all, is_begun) = (waiting().count(), waiting().any(|other| other.waits == Some(key)));
        let ours = key == [0; KEY];
        if ours && getrandom(&mut key, GetRandomFlags::NONBLOCK).ok() != Some(KEY) || all >= WAITING {
            return self.refuse_guest(guest, Errno::AGAIN, calls.now);
        }
        if ours || !is_begun {
            // Root and the stack's own user may attach, too.
            let most = APPLICATIONS_OF_USER.min(APPLICATIONS / (self.config.allow.len() + 2));
            if self.feed.count(user) >= most {
                let error = self.end_oldest_left(user, calls);
                return self.refuse_guest(guest, error, calls.now);
            }
            if !self.descriptors.has_room(user, descriptors::of_application(self.config.memory)) {
                return self.refuse_guest(guest, Errno::MFILE, calls.now);
            }
            self.feed.begin(user, key, self.config.memory, &mut self.errands);
        }
        // Until then there is nothing to hear.
        self.watch.remove(guest.socket.as_fd());
        self.guests.push_back(Guest { waits: Some(key), ..guest });
    }

    /// A user has too many applications: the connections of one that is gone go at once, and there is room soon.
    fn end_oldest_left(&mut self, user: u32, calls: &mut Calls<'_>) -> Errno {
        let Some(memory) = self.feed.oldest_left(user) else { return Errno::USERS };
        calls.stack.abort_gone(calls.now, memory, calls.out);
        Errno::AGAIN
    }

    /// Memory was made, for applications that begin and for those that are there.
    pub(super) fn memory_comes(&mut self, calls: &mut Calls<'_>) {
        while let Some(made) = self.feed.next() {
            match made {
                Made::More { app, user, memory, segment } => {
                    let application = self.app(app).filter(|app| Arc::ptr_eq(&app.memory, &memory));
                    let rest = match application {
                        Some(application) => {
                            application.growing = false;
                            calls.stack.add_memory(application.id, segment)
                        }
                        None => segment,
                    };
                    // Unmapped by the thread that has made it, the rest of the application's, too.
                    self.errands.close(user, (rest, memory));
                }
                Made::New { user, key, memory, share } => self.app_comes(user, key, memory, share, calls),
            }
        }
    }

    /// Memory of a new application was made.
    fn app_comes(
        &mut self,
        user: u32,
        key: [u8; KEY],
        memory: Option<AppMemory>,
        share: Share,
        calls: &mut Calls<'_>,
    ) {
        let app = match memory {
            Some(memory) => self.add_app(user, key, (memory, share), calls),
            None => Err(Errno::NOMEM),
        };
        let is_one = |guest: &Guest| guest.user == user && guest.waits == Some(key);
        while let Some(at) = self.guests.iter().position(is_one) {
            let Some(guest) = self.guests.remove(at) else { return };
            match self.may_attach(&guest.socket) {
                Ok(who) => self.enter(app, who, guest, calls),
                Err(error) => self.refuse_guest(guest, error, calls.now),
            }
        }
        // Nobody has waited for it after all.
        if let Ok(app) = app {
            self.end_when_over(app, calls);
        }
    }

    /// Has more memory made for applications that are short of it.
    pub(super) fn ask_for_memory(&mut self, calls: &mut Calls<'_>) {
        let Self { apps, by_id, feed, errands, .. } = self;
        for (id, wanted) in calls.stack.wanted_memory() {
            let Some(&app) = by_id.get(&id) else { continue };
            let application = apps.get_mut(app).and_then(Option::as_deref_mut);
            if let Some(application) = application.filter(|app| !app.growing) {
                application.growing = true;
                feed.go_on(app, application.user, Arc::clone(&application.memory), wanted, errands);
            }
        }
    }

    /// A guest becomes a process of an application.
    fn enter(
        &mut self,
        app: Result<usize, Errno>,
        who: UnixCredentials,
        guest: Guest,
        calls: &mut Calls<'_>,
    ) {
        match app.and_then(|app| self.admit(app, who, &guest.socket)) {
            Ok(attached) => self.greet(attached, guest.socket, calls),
            Err(error) => self.refuse_guest(guest, error, calls.now),
        }
    }

    fn refuse_guest(&mut self, guest: Guest, error: Errno, now: u64) {
        self.refuse_process(&guest.socket, now, error);
        answer(guest.socket.as_fd(), number(error));
        self.turn_away(guest);
    }

    /// The application of a user that has a key.
    fn find_app(&self, key: [u8; KEY], user: u32) -> Option<usize> {
        let known = |app: &Application| app.key == key && app.user == user;
        self.apps.iter().position(|app| app.as_deref().is_some_and(known))
    }

    /// Who is at the other end of a socket, if it is a user that may attach.
    fn may_attach(&self, socket: &OwnedFd) -> Result<UnixCredentials, Errno> {
        let who = credentials(socket)?;
        let user = who.uid();
        let may = user == 0 || user == self.user || self.config.allow.contains(&user);
        if may { Ok(who) } else { Err(Errno::ACCESS) }
    }

    /// A new application, with its memory.
    fn add_app(
        &mut self,
        user: u32,
        key: [u8; KEY],
        (memory, share): (AppMemory, Share),
        calls: &mut Calls<'_>,
    ) -> Result<usize, Errno> {
        let at = self.apps.iter().position(Option::is_none).unwrap_or(self.apps.len());
        let mut instance = [0; 8];
        if getrandom(&mut instance, GetRandomFlags::NONBLOCK)? < instance.len() {
            return Err(Errno::AGAIN);
        }
        let shared = Shared::new().map_err(|_| Errno::NOMEM)?;
        shared.processes().set_broadcasts(self.broadcasts.iter().copied());
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        self.watch.add(event.as_fd(), Key::new(Source::Event, at, 0, 0), EventFlags::IN)?;
        self.descriptors.take(user, descriptors::of_application(self.config.memory))?;
        let id = calls.stack.add_app(memory);
        calls.stack.set_user(id, user);
        calls.stack.limit_app(id, self.config.connections);
        let memory = Arc::clone(calls.stack.memory(id));
        let name = (key, u64::from_ne_bytes(instance));
        if at == self.apps.len() {
            self.apps.push(None);
        }
        self.apps[at] = Some(Box::new(Application::new(id, name, user, (memory, share), shared, event)));
        self.awake.add(at);
        self.by_id.insert(id, at);
        Ok(at)
    }

    /// Adds a process to an application.
    fn admit(&mut self, app: usize, who: UnixCredentials, socket: &OwnedFd) -> Result<Attached, Errno> {
        let user = self.app(app).ok_or(Errno::BADF)?.user;
        self.descriptors.take(user, descriptors::PROCESS)?;
        let admitted = self.admit_charged(app, who, socket);
        admitted.inspect_err(|_| self.descriptors.give(user, descriptors::PROCESS))
    }

    fn admit_charged(
        &mut self,
        app: usize,
        who: UnixCredentials,
        socket: &OwnedFd,
    ) -> Result<Attached, Errno> {
        let generation = self.next_generation();
        let pid = who.pid();
        let Some(application) = self.apps.get_mut(app).and_then(Option::as_deref_mut) else {
            return Err(Errno::BADF);
        };
        let visible = Pid::from_raw(pid);
        // It has begun another program: who it was before holds no lock any more.
        let before = visible.and_then(|_| application.find_process(pid));
        // Where processes cannot be watched, it is over when its socket is closed; so is one that this namespace of processes
        // does not have, whose number is 0.
        let pidfd = match visible.map_or(Err(Errno::NOSYS), |pid| pidfd_open(pid, PidfdFlags::empty())) {
            Ok(pidfd) => Some(pidfd),
            Err(error @ (Errno::MFILE | Errno::NFILE | Errno::SRCH)) => return Err(error),
            Err(_) => None,
        };
        let process = Process { generation, pid, channel: None, asked: None, talks: false, pidfd };
        let (number, owner) = application.add_process(process).ok_or(Errno::MFILE)?;
        let key = Key::new(Source::Process, app, number as u32, generation);
        let process = application.process(number as u32, generation);
        let watched = process
            .and_then(|process| process.pidfd.as_ref())
            .map_or(Ok(()), |pidfd| self.watch.add(pidfd.as_fd(), key, EventFlags::IN));
        // A socket that was a guest's is watched; one that came with a message is not.
        let key = Key { source: Source::Channel, ..key };
        let watched = watched.and_then(|()| match self.watch.change(socket.as_fd(), key, EventFlags::IN) {
            Err(Errno::NOENT) => self.watch.add(socket.as_fd(), key, EventFlags::IN),
            result => result,
        });
        if let Err(error) = watched {
            application.remove_process(number as u32);
            return Err(error);
        }
        Ok(Attached { app, number: number as u32, generation, owner: owner.word(), before })
    }

    /// Welcomes a process, by its socket.
    fn greet(&mut self, attached: Attached, socket: OwnedFd, calls: &mut Calls<'_>) {
        let Attached { app, number, generation, owner, before } = attached;
        let gate = self.pairs.gate;
        let Some(application) = self.app(app) else { return };
        let [control, processes] = application.shared.descriptors();
        let mut descriptors = vec![control, processes, application.event.as_fd()];
        let segments = application.memory.segments().map(|(fd, _)| fd);
        descriptors.extend(segments.take(MOST_DESCRIPTORS - descriptors.len()));
        let welcome = Welcome {
            version: VERSION,
            error: 0,
            key: application.key,
            instance: application.instance,
            owner,
            pid: getpid().as_raw_nonzero().get().unsigned_abs(),
            gate,
            segments: (descriptors.len() - 3) as u32,
        };
        // Who does not hear it is gone, or soon will be.
        let _ = wire::send(socket.as_fd(), &welcome.to_bytes(), &descriptors);
        if let Some(process) = application.process(number, generation) {
            process.channel = Some(socket);
        }
        if let Some((number, generation)) = before {
            self.process_ended(app, number, generation, calls);
        }
    }

    /// A process that has its parent's socket gets one of its own, as a guest.
    pub(super) fn fork(&mut self, app: usize, answer_to: OwnedFd, calls: &mut Calls<'_>) {
        let Some(user) = self.app(app).map(|app| app.user) else { return };
        let theirs = match is_channel(answer_to.as_fd()) {
            true => self.invite(user, calls.now),
            false => Err(Errno::PROTOTYPE),
        };
        match theirs {
            // The socket is not of the stack's making: nothing is asked of it here.
            Ok(theirs) => self.errands.run(user, move || {
                let answer = Answer { descriptors: 1, ..Answer::of(0) };
                let _ = wire::send(answer_to.as_fd(), &answer.to_bytes(), &[theirs.as_fd()]);
            }),
            Err(error) => {
                self.refuse(calls.now, "a child process could not attach", error);
                self.errands.close(user, answer_to);
            }
        }
    }

    /// The other end of a guest's socket. Who it is, says the kernel with its first message.
    fn invite(&mut self, user: u32, now: u64) -> Result<OwnedFd, Errno> {
        let kind = SocketFlags::CLOEXEC;
        let (socket, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, kind, None)?;
        set_socket_passcred(&socket, true)?;
        let generation = self.next_generation();
        let guest = Guest { generation, user, socket, since: now, invited: true, waits: None };
        self.take_guest(guest).map_err(|(error, _)| error)?;
        Ok(theirs)
    }
}

/// Who has made the other end of a socket. By nix: rustix has no value for a process of another namespace, which has no number.
fn credentials(socket: &OwnedFd) -> Result<UnixCredentials, Errno> {
    getsockopt(socket, PeerCredentials).map_err(|error| Errno::from_raw_os_error(error as i32))
}

/// Whether messages can be sent there, and nothing waits.
fn is_channel(socket: BorrowedFd<'_>) -> bool {
    socket_domain(socket) == Ok(AddressFamily::UNIX) && socket_type(socket) == Ok(SocketType::SEQPACKET)
}

/// A process that was let in.
struct Attached {
    app: usize,
    number: u32,
    generation: u32,
    owner: u32,
    /// The process that it was before.
    before: Option<(u32, u32)>,
}

/// Answers somebody who is not let in.
fn answer(socket: BorrowedFd<'_>, error: u32) {
    let welcome = Welcome { version: VERSION, error, ..Welcome::default() };
    let _ = wire::send(socket, &welcome.to_bytes(), &[]);
}

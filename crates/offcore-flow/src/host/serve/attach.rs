//! Processes attach: who they are, and which application they belong to.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use nix::sys::socket::sockopt::PeerCredentials;
use nix::sys::socket::{UnixCredentials, getsockopt};
use offcore_session::message::{ASK, Hello, KEY, MOST_DESCRIPTORS, VERSION, Welcome};
use offcore_session::shared::Shared;
use offcore_tcp::proto::AppMemory;
use rustix::event::epoll::EventFlags;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::net::sockopt::{socket_domain, socket_type};
use rustix::net::{AddressFamily, SocketType};
use rustix::process::{Pid, PidfdFlags, getpid, pidfd_open};
use rustix::rand::{GetRandomFlags, getrandom};

use super::application::{Application, Process};
use super::feed::Made;
use super::key::{Key, Source};
use super::session::number;
use super::{APPLICATIONS, APPLICATIONS_OF_USER, Guest, Serve, wire};
use crate::host::Calls;

/// Processes that are there and have not said who they are, at most, and those of one user. Who has waited longest goes when
/// there are more.
const GUESTS: usize = 64;
const GUESTS_OF_USER: usize = 32;
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
                Err(error) => return self.refuse(now, "a process has to wait", error),
            };
            let generation = self.next_generation();
            let user = self.may_attach(&socket).map_or(STRANGER, |who| who.uid());
            let key = Key::new(Source::Guest, 0, 0, generation);
            if let Err(error) = self.watch.add(socket.as_fd(), key, EventFlags::IN) {
                self.refuse(now, "a process is not let in", error);
                self.errands.close_socket(user, socket);
                continue;
            }
            self.make_room_for_guest(user);
            self.guests.push_back(Guest { generation, user, socket, waits: false });
        }
    }

    fn make_room_for_guest(&mut self, user: u32) {
        let same = self.guests.iter().filter(|guest| guest.user == user).count();
        let goes = if same >= GUESTS_OF_USER {
            self.guests.iter().position(|guest| guest.user == user)
        } else {
            (self.guests.len() >= GUESTS).then_some(0)
        };
        if let Some(guest) = goes.and_then(|at| self.guests.remove(at)) {
            self.turn_away(guest);
        }
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
            let remedy = if may { "" } else { ": --allow-uid lets its user in" };
            tracing::warn!(process, user, %error, "a process is not let in{remedy}");
        }
    }

    /// A process says who it is.
    pub(super) fn hear_guest(&mut self, key: Key, calls: &mut Calls<'_>) {
        let Some(at) = self.guests.iter().position(|guest| guest.generation == key.generation) else {
            return;
        };
        if self.guests[at].waits {
            return;
        }
        if self.errands.are_full(self.guests[at].user) {
            if !self.talking.contains(&key) {
                self.talking.push(key);
            }
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
            Some(hello) => self.hear_hello(&hello, guest, calls),
            None => {
                if len > 0 {
                    self.misuse(
                        "a process begins with what is no message: its socket is closed",
                        0,
                        calls.now,
                    );
                }
                self.turn_away(guest);
            }
        }
    }

    fn hear_hello(&mut self, hello: &Hello, guest: Guest, calls: &mut Calls<'_>) {
        if hello.version == ASK {
            answer(guest.socket.as_fd(), self.may_attach(&guest.socket).map_or_else(number, |_| 0));
            return self.turn_away(guest);
        }
        let found = match hello.version {
            VERSION => self.may_attach(&guest.socket),
            _ => Err(Errno::PROTO),
        };
        match found {
            Ok(who) if hello.key == [0; KEY] => self.begin_app(who, guest, calls),
            Ok(who) => {
                let app = self.find_app(hello.key, who.uid()).ok_or(Errno::ACCESS);
                self.enter(app, who, guest, calls);
            }
            Err(error) => self.refuse_guest(guest, error, calls),
        }
    }

    /// The first process of an application, whose memory is to be made.
    fn begin_app(&mut self, who: UnixCredentials, guest: Guest, calls: &mut Calls<'_>) {
        let user = who.uid();
        let waiting = self.guests.iter().filter(|guest| guest.waits);
        let (all, same) = (waiting.clone().count(), waiting.filter(|guest| guest.user == user).count());
        let of_user = self.apps.iter().flatten().filter(|app| app.user == user).count();
        let full = self.apps.iter().flatten().count() + all >= APPLICATIONS;
        if full || of_user + same >= APPLICATIONS_OF_USER {
            return self.refuse_guest(guest, Errno::MFILE, calls);
        }
        self.feed.begin(guest.user, guest.generation, self.config.memory, &mut self.errands);
        self.guests.push_back(Guest { waits: true, ..guest });
    }

    /// Memory was made, for applications that begin and for those that are there.
    pub(super) fn memory_comes(&mut self, calls: &mut Calls<'_>) {
        while let Some(made) = self.feed.next() {
            match made {
                Made::More { app, id, segment } => {
                    if let Some(application) = self.app(app).filter(|app| app.id == id) {
                        application.growing = false;
                        calls.stack.add_memory(id, segment);
                    }
                }
                Made::New { user, guest, memory } => {
                    let at = self.guests.iter().position(|other| other.waits && other.generation == guest);
                    let Some(guest) = at.and_then(|at| self.guests.remove(at)) else {
                        self.errands.close(user, memory);
                        continue;
                    };
                    let app = memory.ok_or(Errno::NOMEM).and_then(|memory| self.add_app(user, memory, calls));
                    match self.may_attach(&guest.socket) {
                        Ok(who) => self.enter(app, who, guest, calls),
                        Err(error) => self.refuse_guest(guest, error, calls),
                    }
                }
            }
        }
    }

    /// Has more memory made for an application that is short of it.
    pub(super) fn ask_for_memory(&mut self, app: usize, calls: &mut Calls<'_>) {
        let Self { apps, feed, errands, .. } = self;
        let application = apps.get_mut(app).and_then(Option::as_deref_mut);
        if let Some(application) = application.filter(|app| !app.growing)
            && let Some(wanted) = calls.stack.wanted_memory(application.id)
        {
            application.growing = true;
            feed.go_on(application.user, (app, application.id), wanted, errands);
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
            Err(error) => self.refuse_guest(guest, error, calls),
        }
    }

    fn refuse_guest(&mut self, guest: Guest, error: Errno, calls: &mut Calls<'_>) {
        self.refuse_process(&guest.socket, calls.now, error);
        answer(guest.socket.as_fd(), number(error));
        self.turn_away(guest);
        // One that was made for it is nobody's.
        for app in 0..self.apps.len() {
            self.end_when_over(app, calls);
        }
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
    fn add_app(&mut self, user: u32, memory: AppMemory, calls: &mut Calls<'_>) -> Result<usize, Errno> {
        let at = self.apps.iter().position(Option::is_none).unwrap_or(self.apps.len());
        let mut key = [0; KEY];
        if getrandom(&mut key, GetRandomFlags::NONBLOCK)? < KEY {
            return Err(Errno::AGAIN);
        }
        let shared = Shared::new().map_err(|_| Errno::NOMEM)?;
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        self.watch.add(event.as_fd(), Key::new(Source::Event, at, 0, 0), EventFlags::IN)?;
        let id = calls.stack.add_app(memory);
        calls.stack.limit_app(id, self.config.connections);
        let memory = Arc::clone(calls.stack.memory(id));
        if at == self.apps.len() {
            self.apps.push(None);
        }
        self.apps[at] = Some(Box::new(Application::new(id, key, user, memory, shared, event)));
        Ok(at)
    }

    /// Makes somebody a process of an application.
    fn admit(&mut self, app: usize, who: UnixCredentials, socket: &OwnedFd) -> Result<Attached, Errno> {
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

    /// A process that has its parent's socket gets one of its own.
    pub(super) fn fork(&mut self, app: usize, socket: OwnedFd, calls: &mut Calls<'_>) {
        let Some(user) = self.app(app).map(|app| app.user) else { return };
        let what = "a process's child is not let in";
        if !is_channel(socket.as_fd()) {
            self.refuse(calls.now, what, Errno::PROTOTYPE);
            return self.errands.close(user, socket);
        }
        match credentials(&socket).and_then(|who| self.admit(app, who, &socket)) {
            Ok(attached) => self.greet(attached, socket, calls),
            Err(error) => {
                self.refuse(calls.now, what, error);
                answer(socket.as_fd(), number(error));
                self.watch.remove(socket.as_fd());
                self.errands.close_socket(user, socket);
            }
        }
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
    let welcome = Welcome { version: VERSION, error, key: [0; KEY], owner: 0, pid: 0, gate: 0, segments: 0 };
    let _ = wire::send(socket, &welcome.to_bytes(), &[]);
}

//! Processes attach: who they are, and which application they belong to.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use nix::sys::socket::sockopt::PeerCredentials;
use nix::sys::socket::{UnixCredentials, getsockopt};
use offcore_session::message::{ASK, Hello, KEY, MOST_DESCRIPTORS, VERSION, Welcome};
use offcore_session::shared::Shared;
use rustix::event::epoll::EventFlags;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::net::sockopt::{socket_domain, socket_type};
use rustix::net::{AddressFamily, SocketType};
use rustix::process::{Pid, PidfdFlags, getpid, pidfd_open};
use rustix::rand::{GetRandomFlags, getrandom};

use super::application::{Application, Process};
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
            self.guests.push_back(Guest { generation, user, socket });
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
        // What a new application has in memory takes a while: one in a round.
        if self.attached || self.errands.are_full(self.guests[at].user) {
            self.look |= self.attached;
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
        let found = self.find_app(&guest.socket, hello, calls);
        match found.and_then(|(app, who)| self.admit(app, who, &guest.socket)) {
            Ok(attached) => self.greet(attached, guest.socket, calls),
            Err(error) => {
                self.refuse_process(&guest.socket, calls.now, error);
                answer(guest.socket.as_fd(), number(error));
                self.turn_away(guest);
                // One that was made for it is nobody's.
                for app in 0..self.apps.len() {
                    self.end_when_over(app, calls);
                }
            }
        }
    }

    /// The application that a process belongs to, which may be a new one.
    fn find_app(
        &mut self,
        socket: &OwnedFd,
        hello: &Hello,
        calls: &mut Calls<'_>,
    ) -> Result<(usize, UnixCredentials), Errno> {
        if hello.version != VERSION {
            return Err(Errno::PROTO);
        }
        let who = self.may_attach(socket)?;
        let user = who.uid();
        if hello.key == [0; KEY] {
            return Ok((self.add_app(user, calls)?, who));
        }
        let known = |app: &Application| app.key == hello.key && app.user == user;
        let at = self.apps.iter().position(|app| app.as_deref().is_some_and(known));
        Ok((at.ok_or(Errno::ACCESS)?, who))
    }

    /// Who is at the other end of a socket, if it is a user that may attach.
    fn may_attach(&self, socket: &OwnedFd) -> Result<UnixCredentials, Errno> {
        let who = credentials(socket)?;
        let user = who.uid();
        let may = user == 0 || user == self.user || self.config.allow.contains(&user);
        if may { Ok(who) } else { Err(Errno::ACCESS) }
    }

    /// A new application.
    fn add_app(&mut self, user: u32, calls: &mut Calls<'_>) -> Result<usize, Errno> {
        let at = self.apps.iter().position(Option::is_none).unwrap_or(self.apps.len());
        let same = self.apps.iter().flatten().filter(|app| app.user == user).count();
        if at >= APPLICATIONS || same >= APPLICATIONS_OF_USER {
            return Err(Errno::MFILE);
        }
        self.attached = true;
        let mut key = [0; KEY];
        if getrandom(&mut key, GetRandomFlags::NONBLOCK)? < KEY {
            return Err(Errno::AGAIN);
        }
        let shared = Shared::new().map_err(|_| Errno::NOMEM)?;
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        self.watch.add(event.as_fd(), Key::new(Source::Event, at, 0, 0), EventFlags::IN)?;
        let id = calls.stack.add_app(self.config.memory).map_err(|_| Errno::NOMEM)?;
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

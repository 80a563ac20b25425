//! Processes attach: who they are, and which application they belong to.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use offcore_session::message::{ASK, Hello, KEY, MOST_DESCRIPTORS, VERSION, Welcome};
use offcore_session::shared::Shared;
use rustix::event::epoll::EventFlags;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::net::UCred;
use rustix::net::sockopt::socket_peercred;
use rustix::process::{PidfdFlags, getpid, pidfd_open};
use rustix::rand::{GetRandomFlags, getrandom};

use super::application::{Application, Process};
use super::key::{Key, Source};
use super::session::number;
use super::{APPLICATIONS, Guest, Serve, wire};
use crate::host::Calls;

/// Processes that are there and have not said who they are, at most. Who has waited longest goes when there are more.
const GUESTS: usize = 64;
/// Those that are let in at once, at most.
const AT_ONCE: usize = 16;

impl Serve {
    /// Lets in who knocks, some at a time.
    pub(super) fn let_in(&mut self, now: u64) {
        // It is not told of again who has to wait in the queue.
        self.knocking = true;
        for _ in 0..AT_ONCE {
            let Some(door) = &self.door else { return };
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
            let key = Key::new(Source::Guest, 0, 0, generation);
            if let Err(error) = self.watch.add(socket.as_fd(), key, EventFlags::IN) {
                self.refuse(now, "a process is not let in", error);
                continue;
            }
            if self.guests.len() >= GUESTS {
                self.guests.pop_front();
            }
            self.guests.push_back(Guest { generation, socket });
        }
    }

    /// Somebody was not let in, or had to be reset.
    pub(super) fn refuse(&mut self, now: u64, what: &'static str, error: Errno) {
        self.counts.refused += 1;
        if self.refusals.may(now) {
            tracing::warn!(%error, "{what}");
        }
    }

    /// A process says who it is.
    pub(super) fn hear_guest(&mut self, generation: u32, calls: &mut Calls<'_>) {
        let Some(at) = self.guests.iter().position(|guest| guest.generation == generation) else { return };
        // Of another version it may be longer.
        let mut bytes = [0; 256];
        let received = wire::receive(self.guests[at].socket.as_fd(), &mut bytes);
        if matches!(received, Err(Errno::AGAIN)) {
            return;
        }
        let Some(Guest { socket, .. }) = self.guests.remove(at) else { return };
        let Some(len) = received.ok().map(|received| received.len).filter(|len| *len > 0) else { return };
        let Some(hello) = Hello::from_bytes(&bytes[..len]) else {
            return self.misuse(
                "a process begins with what is no message: its socket is closed",
                0,
                calls.now,
            );
        };
        if hello.version == ASK {
            return answer(socket.as_fd(), self.may_attach(socket.as_fd()).map_or_else(number, |_| 0));
        }
        let found = self.find_app(socket.as_fd(), &hello, calls);
        let result = found.and_then(|(app, who)| self.admit(app, who, &socket));
        match result {
            Ok(attached) => self.greet(attached, socket, calls),
            Err(error) => {
                self.refuse(calls.now, "a process is not let in", error);
                answer(socket.as_fd(), number(error));
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
        socket: BorrowedFd<'_>,
        hello: &Hello,
        calls: &mut Calls<'_>,
    ) -> Result<(usize, UCred), Errno> {
        if hello.version != VERSION {
            return Err(Errno::PROTO);
        }
        let who = self.may_attach(socket)?;
        let user = who.uid.as_raw();
        if hello.key == [0; KEY] {
            return Ok((self.add_app(user, calls)?, who));
        }
        let known = |app: &Application| app.key == hello.key && app.user == user;
        let at = self.apps.iter().position(|app| app.as_deref().is_some_and(known));
        Ok((at.ok_or(Errno::ACCESS)?, who))
    }

    /// Who is at the other end of a socket, if it is a user that may attach.
    fn may_attach(&self, socket: BorrowedFd<'_>) -> Result<UCred, Errno> {
        let who = socket_peercred(socket)?;
        let user = who.uid.as_raw();
        let may = user == 0 || user == self.user || self.config.allow.contains(&user);
        if may { Ok(who) } else { Err(Errno::ACCESS) }
    }

    /// A new application.
    fn add_app(&mut self, user: u32, calls: &mut Calls<'_>) -> Result<usize, Errno> {
        let at = self.apps.iter().position(Option::is_none).unwrap_or(self.apps.len());
        if at >= APPLICATIONS {
            return Err(Errno::MFILE);
        }
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
    fn admit(&mut self, app: usize, who: UCred, socket: &OwnedFd) -> Result<Attached, Errno> {
        let generation = self.next_generation();
        let pid = who.pid.as_raw_nonzero().get();
        let Some(application) = self.apps.get_mut(app).and_then(Option::as_deref_mut) else {
            return Err(Errno::BADF);
        };
        // It has begun another program: who it was before holds no lock any more.
        let before = application.find_process(pid);
        // Where processes cannot be watched, it is over when its socket is closed.
        let pidfd = match pidfd_open(who.pid, PidfdFlags::empty()) {
            Ok(pidfd) => Some(pidfd),
            Err(error @ (Errno::MFILE | Errno::NFILE | Errno::SRCH)) => return Err(error),
            Err(_) => None,
        };
        let process = Process { generation, pid, channel: None, pidfd };
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
        let who = socket_peercred(&socket);
        match who.and_then(|who| self.admit(app, who, &socket)) {
            Ok(attached) => self.greet(attached, socket, calls),
            Err(error) => {
                self.refuse(calls.now, "a process's child is not let in", error);
                answer(socket.as_fd(), number(error));
                self.watch.remove(socket.as_fd());
            }
        }
    }
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

//! Incoming connections of the stack, and of the kernel listener that belongs to a session.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;

use offcore_session::message::{Accepted, SessionId};
use offcore_session::slot::{number as option, state};
use offcore_stats::time::Micros;
use offcore_stats::tsc;
use offcore_tcp::proto::ConnId;
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;

use super::acceptor::{AcceptResult, Acceptor, Kernel, Name};
use super::descriptors::{KERNEL_LISTENER, SESSION};
use super::key::{Key, Source};
use super::session::{Listener, Passed, Session, SessionKind};
use super::sessions::InitialState;
use super::{Serve, wire};
use crate::host::Calls;

/// Maximum number of acceptor threads per user that are still ending. Beyond it no new thread is started.
const ENDING: usize = 64;
/// Maximum number of connections of a listener that get a session in a round.
const ACCEPTED: usize = 64;
/// Maximum number of connections of a listener that have a session before the application accepts them. Others wait
/// without descriptors in the stack's queue, so that a peer cannot use up the descriptors of a user.
pub(super) const MAX_UNACCEPTED_SESSIONS: usize = 64;

/// The first and the longest pause of a listener without free descriptors.
const DELAY: Micros = Micros::from_millis(1);
const LONGEST_DELAY: Micros = Micros::from_millis(64);

/// The warning for a listener whose kernel connections cannot be accepted.
pub(super) const KERNEL_ACCEPT_WARNING: &str = "a listener does not get the kernel's connections";

impl Serve {
    fn listener(&mut self, app: usize, number: u32) -> Option<&mut Listener> {
        self.app(app)?.session_mut(number)?.listener_mut()
    }

    /// Queues a listener to pass on its connections in its application's turn. With a `generation`, only a session of
    /// this generation is queued.
    pub(super) fn queue_listener(&mut self, app: usize, number: u32, generation: Option<u32>) {
        let session = self.app(app).and_then(|app| app.session_mut(number));
        let Some(session) = session.filter(|session| generation.is_none_or(|of| of == session.generation()))
        else {
            return;
        };
        let generation = session.generation();
        let Some(listener) = session.listener_mut() else { return };
        if std::mem::replace(&mut listener.queued, true) {
            return;
        }
        self.wake_application(app);
        if let Some(application) = self.app(app) {
            application.pending_mut().listeners().push((number, generation));
        }
        self.schedule.behind = true;
    }

    /// Serves a listener in its turn.
    pub(super) fn serve_listener(&mut self, app: usize, number: u32, generation: u32, calls: &mut Calls<'_>) {
        let session = self.app(app).and_then(|app| app.session(number));
        if session.is_none_or(|session| session.generation() != generation) {
            return;
        }
        let Some(listener) = self.listener(app, number) else { return };
        listener.queued = false;
        if calls.now < listener.due {
            self.wait(app, number);
        } else {
            self.pass_waiting_connections(app, number, calls);
        }
    }

    /// Passes on waiting connections while the listener's queue has room. Other connections stay in the queue of the
    /// stack or the kernel.
    pub(super) fn pass_waiting_connections(&mut self, app: usize, number: u32, calls: &mut Calls<'_>) {
        let Some(listener) = self.listener(app, number) else { return };
        let (id, held) = (listener.id, listener.held.take());
        if held.is_some_and(|held| !self.pass(app, number, held)) {
            return;
        }
        let Some(user) = self.registry.user_of(app) else { return };
        let mut left = ACCEPTED;
        while left > 0 {
            if !self.descriptors.has_room(user, SESSION) || self.schedule.waking.is_barred(user) {
                // As in the kernel, connections stay in the queue while descriptors are exhausted. They also stay there
                // while the user is barred because its wake-ups took too long.
                return self.delay(app, number);
            }
            let Some(conn) = calls.stack.accept(id) else { break };
            left -= 1;
            match self.incoming(app, number, conn, calls) {
                Ok(passed) => {
                    if !self.pass(app, number, passed) {
                        return;
                    }
                }
                Err(error) => {
                    calls.stack.abort(calls.now, conn, calls.out);
                    self.count_refusal(
                        calls.now,
                        "a connection was reset: no session could be created",
                        user,
                        error,
                    );
                }
            }
        }
        if left == 0 {
            // No event reports the remaining connections.
            self.queue_listener(app, number, None);
        }
        if self.pass_kernels(app, number) {
            self.set_armed(app, number, false);
        }
    }

    /// Passes on accepted connections of the kernel. Returns `false` if the queue is full or more connections may
    /// follow later.
    fn pass_kernels(&mut self, app: usize, number: u32) -> bool {
        loop {
            let Some(listener) = self.listener(app, number) else { return false };
            match listener.come.pop_front() {
                None => return true,
                Some(AcceptResult::Connection(fd)) => {
                    if !self.pass(
                        app,
                        number,
                        Passed { accepted: Accepted { session: SessionId::default() }, end: fd },
                    ) {
                        return false;
                    }
                }
                // The connection stays in the kernel's queue until a later attempt.
                Some(AcceptResult::Full) => {
                    self.delay(app, number);
                    return false;
                }
                // Failures are reported before this queue.
                Some(AcceptResult::Failed(_)) => {}
                // Each passed connection is closed here by an errand.
                Some(AcceptResult::Done) if self.is_full(app) => {
                    if let Some(listener) = self.listener(app, number) {
                        listener.come.push_front(AcceptResult::Done);
                    }
                    self.delay(app, number);
                    return false;
                }
                Some(AcceptResult::Done) => {
                    let Some(application) = self.registry.apps.get(app).and_then(Option::as_deref) else {
                        return false;
                    };
                    let session = application.session(number);
                    if let Some(SessionKind::Listener(Listener { kernel: Some(kernel), .. })) =
                        session.map(Session::kind)
                        && let Some(acceptor) = application.acceptor()
                    {
                        acceptor.go_on(kernel, &mut self.helpers.errands);
                    }
                }
            }
        }
    }

    /// Adds a kernel listener to a session.
    pub(super) fn add_kernel(&mut self, app: usize, number: u32, kernel: OwnedFd) -> Result<(), Errno> {
        let acceptor = self.start_acceptor(app);
        let application = self.registry.app(app).ok_or(Errno::BADF)?;
        let user = application.user();
        let generation = application.session(number).map(Session::generation);
        let (Ok(()), Some(generation), Some(acceptor)) = (acceptor, generation, application.acceptor_mut())
        else {
            self.helpers.errands.close(user, kernel);
            return Err(acceptor.err().unwrap_or(Errno::BADF));
        };
        let charge = match self.descriptors.take(user, KERNEL_LISTENER) {
            Ok(charge) => charge,
            Err(error) => {
                self.helpers.errands.close(user, kernel);
                return Err(error);
            }
        };
        let kernel = acceptor.add(kernel, Name { number, generation }, charge, &mut self.helpers.errands)?;
        if let Some(listener) = application.session_mut(number).and_then(Session::listener_mut) {
            listener.kernel = Some(kernel);
        }
        Ok(())
    }

    /// Starts the acceptor thread of an application, if it is not running.
    pub(super) fn start_acceptor(&mut self, app: usize) -> Result<(), Errno> {
        let application = self.registry.app(app).ok_or(Errno::BADF)?;
        if application.acceptor().is_none() {
            let user = application.user();
            let same = self.acceptors.ending.iter().filter(|acceptor| acceptor.user == user).count();
            if same >= ENDING {
                return Err(Errno::AGAIN);
            }
            let acceptor = Acceptor::new(user, application.charge().clone(), self.acceptors.cpus)?;
            let key = Key::new(Source::Kernel, app, 0, 0);
            self.polling.watch.add(user, acceptor.as_fd(), key, EventFlags::IN)?;
            application.set_acceptor(acceptor);
        }
        Ok(())
    }

    /// Releases the kernel listener of a session that no longer listens.
    pub(super) fn end_kernel(&mut self, app: usize, listener: Listener) {
        self.wake_application(app);
        let Some(application) = self.registry.app(app) else { return };
        let Listener { kernel, come, held, .. } = listener;
        // Ends of sessions are closed immediately.
        let held = held.filter(Passed::is_of_kernel);
        if !come.is_empty() || held.is_some() {
            self.helpers.errands.close(application.user(), (come, held, kernel.as_ref().map(Kernel::charge)));
        }
        if let (Some(kernel), Some(acceptor)) = (kernel, application.acceptor_mut()) {
            acceptor.remove(kernel, &mut self.helpers.errands);
        }
    }

    /// Queues an application whose acceptor thread has results.
    pub(super) fn queue_accept_results(&mut self, app: usize) {
        if !self.acceptors.ready.contains(&app) {
            self.acceptors.ready.push(app);
        }
    }

    /// Takes results of acceptor threads. When a user's slice is used up, its other results wait for the next round.
    pub(super) fn take_accept_results(&mut self, calls: &mut Calls<'_>) {
        // Applications that this round does not serve are the first ones in the next round.
        let (mut rest, mut served) = (Vec::new(), Vec::new());
        self.schedule.turns.begin_slices();
        for app in std::mem::take(&mut self.acceptors.ready) {
            let Some(user) = self.registry.user_of(app) else { continue };
            let queue = if self.schedule.turns.has_slice(user) { &mut served } else { &mut rest };
            queue.push(app);
            while self.schedule.turns.has_slice(user) {
                let from = tsc::now();
                let taken = self.take_accept_result(app, calls);
                self.charge_time(user, from);
                if !taken {
                    served.pop();
                    break;
                }
            }
        }
        rest.append(&mut served);
        // No event reports the remaining results.
        self.polling.look |= !rest.is_empty();
        self.acceptors.ready = rest;
    }

    /// Takes the next result of an application's acceptor thread. Returns whether the thread had a result.
    fn take_accept_result(&mut self, app: usize, calls: &mut Calls<'_>) -> bool {
        let Some(application) = self.app(app) else { return false };
        let user = application.user();
        let come = application.acceptor().and_then(Acceptor::next);
        let Some((Name { number, generation }, come)) = come else { return false };
        if let AcceptResult::Failed(error) = come {
            self.count_refusal(calls.now, KERNEL_ACCEPT_WARNING, user, error);
            return true;
        }
        let session = application.session_mut(number).filter(|session| session.generation() == generation);
        match session.and_then(Session::listener_mut) {
            Some(listener) => {
                listener.come.push_back(come);
                if listener.held.is_none() {
                    self.queue_listener(app, number, Some(generation));
                }
            }
            // The listener has ended in the meantime.
            _ => self.helpers.errands.close(user, come),
        }
        true
    }

    /// Creates a session for an incoming connection.
    fn incoming(
        &mut self,
        app: usize,
        number: u32,
        conn: ConnId,
        calls: &mut Calls<'_>,
    ) -> Result<Passed, Errno> {
        let (place, info) = (calls.stack.slot(conn), calls.stack.info(conn));
        let begin = InitialState {
            place: place.ok_or(Errno::NOMEM)?,
            what: SessionKind::Stream(conn),
            state: state::OPEN,
            local: info.map(|info| info.local),
            remote: info.map(|info| info.remote),
        };
        let place = begin.place;
        let made = self.make(app, begin)?;
        if let Some(application) = self.app(app)
            && let Some(from) = application.session(number).and_then(|of| application.slot(of.place()))
            && let Some(to) = application.slot(place)
        {
            let (kept, slot) = (&from.kept, to);
            let (from, to) = (&from.wishes, &slot.wishes);
            for (from, to) in [
                (&from.options, &to.options),
                (&from.keep_idle, &to.keep_idle),
                (&from.keep_interval, &to.keep_interval),
                (&from.keep_count, &to.keep_count),
                (&from.send_buffer, &to.send_buffer),
                (&from.receive_buffer, &to.receive_buffer),
            ] {
                to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
            }
            slot.inherit_cork();
            slot.kept.inherit(kept);
            slot.kept.change(option::DEFER_ACCEPT, |_| 0);
        }
        // Events before this moment had no session to report to: data of the handshake, or data and the end of the
        // stream before the accept.
        self.process_session(app, made.number, calls);
        if calls.stack.has_ended(conn) {
            self.peer_ended(conn);
        }
        Ok(Passed { accepted: Accepted { session: made.named }, end: made.end })
    }

    /// Sends a connection to the application. Returns `false` if the listener's queue is full, in which case the
    /// connection waits, or if the listener is closed.
    fn pass(&mut self, app: usize, number: u32, passed: Passed) -> bool {
        let Some(application) = self.app(app) else { return false };
        let user = application.user();
        let ours = application.session(number).and_then(|session| session.ours());
        let from = tsc::now();
        let sent = ours.map_or(Err(Errno::BADF), |ours| {
            wire::send(ours, &passed.accepted.to_bytes(), &[passed.end.as_fd()])
        });
        self.woke(app, tsc::now().saturating_sub(from));
        // The queue is full (`EAGAIN`: the kernel reports room), or the user has too many descriptors in flight.
        if let Err(error @ (Errno::AGAIN | Errno::TOOMANYREFS | Errno::NOBUFS | Errno::NOMEM)) = sent {
            if let Some(listener) = self.listener(app, number) {
                listener.held = Some(passed);
            }
            match error {
                Errno::AGAIN => self.set_armed(app, number, true),
                _ => self.delay(app, number),
            }
            return false;
        }
        if let Some(listener) = self.listener(app, number) {
            listener.delay = Micros::new(0);
        }
        if passed.is_of_kernel() {
            self.helpers.errands.close(user, passed);
        }
        // After another error the listener is closed, and its hang-up follows. The session of the connection ends with
        // its own end.
        sent.is_ok()
    }

    /// Whether the user of an application is at the limit of errands.
    fn is_full(&self, app: usize) -> bool {
        self.registry.user_of(app).is_some_and(|user| self.helpers.errands.are_full(user))
    }

    /// Pauses a listener that lacks descriptors. Each pause is twice as long as the previous one.
    fn delay(&mut self, app: usize, number: u32) {
        let now = self.polling.looked;
        if let Some(listener) = self.listener(app, number) {
            listener.delay = (2 * listener.delay).clamp(DELAY, LONGEST_DELAY);
            listener.due = now + listener.delay;
        }
        self.wait(app, number);
    }

    /// Queues a listener for a later round.
    fn wait(&mut self, app: usize, number: u32) {
        let Some(application) = self.app(app) else { return };
        let Some(session) = application.session_mut(number) else { return };
        let generation = session.generation();
        let Some(listener) = session.listener_mut() else { return };
        if !std::mem::replace(&mut listener.queued, true) {
            application.pending_mut().listeners().push_waiting((number, generation));
        }
    }

    /// Selects whether the listener's end reports an event when its queue has room again.
    fn set_armed(&mut self, app: usize, number: u32, on: bool) {
        let Some(application) = self.registry.app(app) else { return };
        let user = application.user();
        let Some(session) = application.session_mut(number) else { return };
        let key = Key::new(Source::End, app, number, session.generation());
        let Some(listener) = session.listener_mut() else { return };
        if std::mem::replace(&mut listener.armed, on) != on
            && let Some(ours) = session.ours()
        {
            let wanted = if on { EventFlags::IN | EventFlags::OUT } else { EventFlags::IN };
            let _ = self.polling.watch.change(user, ours, key, wanted);
        }
    }
}

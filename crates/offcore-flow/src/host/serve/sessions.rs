//! Creation and end of sessions, and events of their connections.

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;

use arrayvec::ArrayVec;
use offcore_session::Place;
use offcore_session::message::SessionId;
use offcore_session::slot::state;
use offcore_stats::time::Time;
use offcore_stats::tsc;
use offcore_tcp::proto::{Cause, ConnId};
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::sockopt::socket_cookie;
use rustix::net::{Shutdown, shutdown};

use super::key::{Key, Source};
use super::session::{DATAGRAM, STREAM, Session, SessionKind, write_addresses};
use super::stack_end::{Ending, StackEnd};
use super::{Serve, descriptors, pair};
use crate::host::Calls;

/// Maximum number of sessions checked when a process requests their port.
const ENDED: usize = 64;
/// Maximum number of answers about the other ends of sessions handled in a round.
const ANSWERS: usize = 64;

/// The initial state of a session.
pub(super) struct InitialState {
    pub(super) place: Place,
    pub(super) what: SessionKind,
    pub(super) state: u32,
    pub(super) local: Option<SocketAddr>,
    pub(super) remote: Option<SocketAddr>,
}

/// A created session and the application's end.
pub(super) struct Made {
    pub(super) number: u32,
    pub(super) named: SessionId,
    pub(super) end: OwnedFd,
}

impl Serve {
    /// Creates a session of an application.
    ///
    /// # Errors
    /// Fails with `EMFILE` if the application has the maximum number of sessions, or with the error of a system call.
    /// On failure the caller still owns the connection and its slot.
    pub(super) fn make(&mut self, app: usize, begin: InitialState) -> Result<Made, Errno> {
        let user = self.registry.user_of(app).ok_or(Errno::BADF)?;
        let charge = self.descriptors.take(user, descriptors::SESSION)?;
        let InitialState { place, what, state, local, remote } = begin;
        let generation = self.registry.next_generation();
        let application = self.registry.apps.get(app).and_then(Option::as_deref).ok_or(Errno::BADF)?;
        // Sessions whose connections are gone count until they are closed.
        let few = application.sessions().len() < self.config.connections;
        let number = application.sessions().next_number().filter(|_| few).ok_or(Errno::MFILE)?;
        let slot = application.slot(place).ok_or(Errno::NOMEM)?;
        let datagrams = matches!(what, SessionKind::Datagrams(_));
        let closed = state != state::OPEN && !datagrams;
        let gates = if closed { self.pairs.gate } else { 0 };
        let pair = self.pairs.pair(closed)?;
        let cookie = socket_cookie(&pair.app)?;
        let key = Key::new(Source::End, app, number, generation);
        self.polling.watch.add(user, pair.ours.as_fd(), key, EventFlags::IN)?;
        let identity = &slot.identity;
        identity.number.store(number, Ordering::Relaxed);
        identity.generation.store(generation, Ordering::Relaxed);
        identity.kind.store(if datagrams { DATAGRAM } else { STREAM }, Ordering::Relaxed);
        write_addresses(slot, local, remote);
        // The end of the slot's previous session may have stored an error later than its release.
        identity.error.store(0, Ordering::Relaxed);
        slot.set_flags(0);
        slot.set_state(state);
        let at = (app, number);
        let _ = match &what {
            SessionKind::Stream(conn) | SessionKind::Datagrams(conn) => self.index.by_conn.insert(*conn, at),
            SessionKind::Listener(listener) => self.index.by_listener.insert(listener.id, at),
            SessionKind::Bound(..) | SessionKind::Gone => None,
        };
        let port = match &what {
            SessionKind::Bound(_, port) => *port,
            SessionKind::Listener(listener) => listener.port,
            SessionKind::Datagrams(_) => local.map_or(0, |local| local.port()),
            SessionKind::Stream(_) | SessionKind::Gone => 0,
        };
        let ports =
            if matches!(what, SessionKind::Bound(..)) { &mut self.ports.bound } else { &mut self.ports.used };
        ports.add(port, app, number);
        let end = StackEnd::new(pair.ours, charge, gates);
        let session = Session::new(place, generation, cookie, what, port, end);
        let application = self.app(app).ok_or(Errno::BADF)?;
        application.sessions_mut().add(Box::new(session));
        Ok(Made { number, named: SessionId { place: place.number(), generation }, end: pair.app })
    }

    /// Handles a session that the application has marked.
    pub(super) fn process_session(&mut self, app: usize, number: u32, calls: &mut Calls<'_>) {
        let Some(application) = self.registry.app(app) else { return };
        let Some((session, slot)) = application.both(number) else { return };
        if session.look(slot, calls, &mut self.tally.counts).is_err() {
            self.reset(app, number, calls.now);
        }
        self.settle(app, number);
    }

    /// Ends a session after its application has stored an invalid value. The stack has already released the connection.
    fn reset(&mut self, app: usize, number: u32, now: Time) {
        self.misuse("a session was reset: its application stored an invalid index", app, now);
        let Some(application) = self.registry.app(app) else { return };
        let user = application.user();
        let Some((session, slot)) = application.both(number) else { return };
        if let Some(conn) = session.conn() {
            self.index.by_conn.remove(&conn);
        }
        let ending =
            session.over(slot, Cause::Aborted, self.helpers.peers.are_known(), &mut self.tally.counts);
        session.change_kind(SessionKind::Gone);
        let key = Key::new(Source::Pipe, app, number, session.generation());
        if let (Ending::Reset(left), Some(pipe)) = (ending, session.end().pipe()) {
            let _ = self.polling.watch.add(user, pipe, key, EventFlags::empty());
            left.into_iter().for_each(|left| self.helpers.errands.close(user, left));
        }
    }

    /// Queues an announcement of data. It is made once, at the end of the turn.
    pub(super) fn readable(&mut self, conn: ConnId) {
        let Some(&(app, number)) = self.index.by_conn.get(&conn) else { return };
        let application = self.registry.app(app);
        let Some(session) = application.and_then(|app| app.session_mut(number)) else { return };
        if session.announce_later() {
            self.index.announced.push((app, number));
        }
    }

    pub(super) fn writable(&mut self, conn: ConnId, calls: &mut Calls<'_>) {
        let Some(&(app, number)) = self.index.by_conn.get(&conn) else { return };
        let application = self.registry.app(app);
        if let Some((session, slot)) = application.and_then(|app| app.both(number)) {
            session.make_room(slot, calls, &mut self.tally.counts);
        }
        self.settle(app, number);
    }

    pub(super) fn connected(&mut self, conn: ConnId, calls: &mut Calls<'_>) {
        let Some(&(app, number)) = self.index.by_conn.get(&conn) else { return };
        let application = self.registry.app(app);
        let Some((session, slot)) = application.and_then(|app| app.both(number)) else { return };
        if let Some(info) = calls.stack.info(conn) {
            write_addresses(slot, Some(info.local), Some(info.remote));
        }
        session.connected(slot, &mut self.tally.counts);
        self.process_session(app, number, calls);
    }

    pub(super) fn peer_ended(&mut self, conn: ConnId) {
        let Some(&(app, number)) = self.index.by_conn.get(&conn) else { return };
        let application = self.registry.app(app);
        if let Some((session, slot)) = application.and_then(|app| app.both(number)) {
            session.peer_ended(slot, &mut self.tally.counts);
        }
        self.settle(app, number);
    }

    /// Ends a connection, or a datagram socket after invalid data. The memory of a connection stays allocated until the
    /// application closes the session.
    pub(super) fn over(&mut self, conn: ConnId, cause: Cause) {
        let Some(&(app, number)) = self.index.by_conn.get(&conn) else { return };
        let Some(application) = self.registry.app(app) else { return };
        let user = application.user();
        let Some((session, slot)) = application.both(number) else { return };
        let ending = session.over(slot, cause, self.helpers.peers.are_known(), &mut self.tally.counts);
        if matches!(session.kind(), SessionKind::Datagrams(_)) {
            // The stack has already released the socket and its slot.
            self.index.by_conn.remove(&conn);
            session.change_kind(SessionKind::Gone);
        }
        let key = Key::new(Source::Pipe, app, number, session.generation());
        if let (Ending::Reset(left), Some(pipe)) = (ending, session.end().pipe()) {
            let _ = self.polling.watch.add(user, pipe, key, EventFlags::empty());
            left.into_iter().for_each(|left| self.helpers.errands.close(user, left));
        }
        self.settle(app, number);
    }

    /// Handles a hang-up: the application has closed its last descriptor of the session, or both directions were shut
    /// down.
    pub(super) fn hung_up(&mut self, app: usize, number: u32, generation: u32, calls: &mut Calls<'_>) {
        let Some(application) = self.registry.app(app) else { return };
        let user = application.user();
        let Some((session, slot)) = application.both(number) else { return };
        // The application may close its end after the query is answered.
        if session.generation() != generation || session.repeat_query() {
            return;
        }
        let key = Key::new(Source::End, app, number, generation);
        let ours = session.ours().filter(|_| session.may_show_early_hang_up(slot));
        match ours.is_some_and(|ours| self.helpers.peers.ask(user, key, ours, &mut self.helpers.errands)) {
            true => session.begin_query(),
            false => self.has_closed(app, number, calls),
        }
    }

    /// Handles the answers to queries whether the other ends of sessions are still open.
    pub(super) fn handle_peer_answers(&mut self, calls: &mut Calls<'_>) {
        let (began, limit) = (tsc::now(), self.schedule.turns.common_limit());
        for at in 0..ANSWERS {
            if at > 0 && tsc::now() - began >= limit {
                break;
            }
            let Some((user, (key, lives))) = self.helpers.peers.next(&mut self.helpers.errands) else {
                return;
            };
            let from = tsc::now();
            if self.registry.user_of(key.app.into()) == Some(user) {
                self.handle_peer_answer(key, lives, calls);
            }
            self.charge_time(user, from);
        }
        self.polling.look = true;
    }

    fn handle_peer_answer(&mut self, key: Key, lives: Option<bool>, calls: &mut Calls<'_>) {
        let (app, number) = (usize::from(key.app), key.number);
        let session = self.app(app).and_then(|app| app.session_mut(number));
        let Some(session) = session.filter(|session| session.generation() == key.generation) else { return };
        let again = session.end_query();
        if lives != Some(true) {
            return self.has_closed(app, number, calls);
        }
        // The other end is open, and its close will be reported.
        self.process_session(app, number, calls);
        self.stop_listening(app, number, calls);
        if again {
            self.hung_up(app, number, key.generation, calls);
        }
    }

    /// Closes a session after the application has closed its last descriptor, unless data in its pair must be sent
    /// first.
    fn has_closed(&mut self, app: usize, number: u32, calls: &mut Calls<'_>) {
        if self.may_close(app, number, calls) {
            self.close(app, number, calls);
            self.end_when_over(app, calls);
        }
    }

    /// Ends sessions at a port whose last descriptor is closed. The kernel may report that only after the program has
    /// requested the port again.
    pub(super) fn end_closed_at(&mut self, port: u16, calls: &mut Calls<'_>) {
        let named = |(app, number): (usize, u32)| {
            let session = self.registry.apps.get(app)?.as_deref()?.session(number)?;
            Some((app, number, session))
        };
        // Sessions that are only bound do not conflict.
        let all = self.ports.used.at(port).take(ENDED).filter_map(named);
        let closed: ArrayVec<_, ENDED> = all
            .filter(|(_, _, session)| session.has_hung_up())
            .map(|(app, number, session)| (app, number, session.generation()))
            .collect();
        for (app, number, generation) in closed {
            self.hung_up(app, number, generation, calls);
        }
    }

    /// Turns a listener that was shut down into a session that is only bound.
    pub(super) fn stop_listening(&mut self, app: usize, number: u32, calls: &mut Calls<'_>) {
        let application = self.registry.app(app);
        let Some((session, slot)) = application.and_then(|app| app.both(number)) else { return };
        let SessionKind::Listener(listener) = session.kind() else { return };
        self.index.by_listener.remove(&listener.id);
        self.ports.used.remove(listener.port, app, number);
        self.ports.bound.add(listener.port, app, number);
        calls.stack.unlisten(calls.now, listener.id, calls.out);
        let bound = SessionKind::Bound(listener.address, listener.port);
        slot.set_state(state::BOUND);
        if let SessionKind::Listener(listener) = session.change_kind(bound) {
            self.end_kernel(app, listener);
        }
    }

    /// Ends a session in the way that its application has requested.
    pub(super) fn close(&mut self, app: usize, number: u32, calls: &mut Calls<'_>) {
        // Data written just before the close is sent as well.
        self.process_session(app, number, calls);
        let Some(application) = self.registry.app(app) else { return };
        let Some(session) = application.sessions_mut().remove(number) else { return };
        let (place, port) = (session.place(), session.port());
        let resets = application.slot(place).is_some_and(Session::wants_reset);
        let (id, user) = (application.id(), application.user());
        let (end, what) = session.into_parts();
        if let Some(left) = end.close() {
            self.helpers.errands.close(user, left);
        }
        self.ports.used.remove(port, app, number);
        self.ports.bound.remove(port, app, number);
        match what {
            SessionKind::Stream(conn) => {
                self.index.by_conn.remove(&conn);
                if resets {
                    calls.stack.abort(calls.now, conn, calls.out);
                } else {
                    calls.close(conn);
                }
            }
            SessionKind::Datagrams(conn) => {
                self.index.by_conn.remove(&conn);
                calls.close(conn);
            }
            SessionKind::Listener(listener) => {
                self.index.by_listener.remove(&listener.id);
                calls.stack.unlisten(calls.now, listener.id, calls.out);
                self.end_kernel(app, listener);
                calls.stack.give_slot(id, place);
            }
            SessionKind::Bound(..) => calls.stack.give_slot(id, place),
            SessionKind::Gone => {}
        }
    }

    /// Handles the end of a process.
    pub(super) fn process_ended(&mut self, app: usize, number: u32, generation: u32, calls: &mut Calls<'_>) {
        let Some(application) = self.app(app) else { return };
        if application.process(number, generation).is_none() {
            return;
        }
        let user = application.user();
        self.wake_application(app);
        let Some(application) = self.app(app) else { return };
        // The process may have died in the middle of a call.
        application.request_full_scan();
        if let Some(process) = application.remove_process(number) {
            if let Some(channel) = &process.channel {
                self.polling.watch.remove(user, channel.as_fd());
            }
            self.helpers.errands.run(user, move || {
                shut_down(process.channel.iter());
                drop(process);
            });
        }
        self.polling.look = true;
        self.end_when_over(app, calls);
    }

    /// Closes the socket of a process.
    pub(super) fn close_socket(&mut self, app: usize, channel: Option<OwnedFd>) {
        if let (Some(channel), Some(user)) = (channel, self.app(app).map(|app| app.user())) {
            self.polling.watch.remove(user, channel.as_fd());
            self.helpers.errands.close_socket(user, channel, None);
        }
    }

    /// Handles a session after a process of its application has ended. The process may have stored an index without
    /// marking the session. It may also have taken a token, or closed a gate, for which other processes now wait.
    pub(super) fn process_after_exit(&mut self, app: usize, number: u32, calls: &mut Calls<'_>) {
        self.process_session(app, number, calls);
        self.queue_pair_read(app, number);
        let application = self.registry.app(app);
        let Some((session, slot)) = application.and_then(|app| app.both(number)) else { return };
        session.announce_again(slot, &mut self.tally.counts);
        if session.is_open(slot) {
            session.open_with_room(slot, calls, &mut self.tally.counts);
        }
        self.settle(app, number);
    }

    /// Ends an application without processes and sessions.
    pub(super) fn end_when_over(&mut self, app: usize, calls: &mut Calls<'_>) {
        if self.app(app).is_some_and(|app| app.is_over()) {
            self.end_application(app, calls);
        }
    }

    /// Closes the next session of an application that ends, or ends the application after its last session.
    pub(super) fn continue_ending(&mut self, app: usize, number: Option<u32>, calls: &mut Calls<'_>) {
        match number {
            Some(number) => self.close_immediately(app, number, calls),
            None => self.end_application(app, calls),
        }
    }

    /// Closes a session of an application whose processes may still be running.
    fn close_immediately(&mut self, app: usize, number: u32, calls: &mut Calls<'_>) {
        let session = self.app(app).and_then(|app| app.session(number));
        session.and_then(Session::ours).inspect(|ours| pair::stop_receiving(*ours));
        self.close(app, number, calls);
    }

    /// Ends an application and all its sessions.
    pub(super) fn end_application(&mut self, app: usize, calls: &mut Calls<'_>) {
        let Some(application) = self.app(app) else { return };
        application.announce_end();
        let numbers = application.sessions().numbers();
        for number in numbers {
            self.close_immediately(app, number, calls);
        }
        let Some(mut application) = self.registry.apps.get_mut(app).and_then(Option::take) else { return };
        let user = application.user();
        self.registry.awake.remove(app);
        self.registry.by_id.remove(&application.id());
        self.polling.watch.remove(user, application.doorbell().event());
        for descriptor in application.processes().descriptors() {
            self.polling.watch.remove(user, descriptor.as_fd());
        }
        if let Some(mut acceptor) = application.take_acceptor() {
            self.polling.watch.remove(user, acceptor.as_fd());
            match acceptor.end(calls.now, &mut self.helpers.errands) {
                true => self.helpers.errands.close(user, acceptor),
                false => self.acceptors.ending.push(acceptor),
            }
        }
        calls.stack.remove_app(application.id());
        let charge = application.charge().clone();
        self.helpers.feed.leave(user, application.memory_mut(), charge);
        self.helpers.errands.run(user, move || shut_down(application.processes().channels()));
    }
}

/// Shuts down sockets of processes. This wakes all waiters at their other ends, which may be many.
fn shut_down<'a>(channels: impl Iterator<Item = &'a OwnedFd>) {
    for channel in channels {
        let _ = shutdown(channel, Shutdown::Both);
    }
}

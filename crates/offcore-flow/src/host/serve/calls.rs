//! Requests of processes and their answers. No request blocks: operations that take time report their result through
//! the session's end.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use offcore_session::message::{
    Answer, Call, INFO, MOST_DESCRIPTORS, NONE, ONLY_V6, Question, SHARE_ADDRESS, SHARE_PORT, SessionId,
};
use offcore_session::slot::{OPTIONS, state};
use offcore_stats::time::{Micros, Time};
use offcore_stats::tsc;
use offcore_tcp::proto::{Algorithm, CallError, ConnId, ConnOptions, Info};
use rustix::io::Errno;
use rustix::net::sockopt::socket_cookie;

use super::key::Key;
use super::listening::{KERNEL_ACCEPT_WARNING, MAX_UNACCEPTED_SESSIONS};
use super::pending_work::PendingQueue;
use super::processes::ReceivedRequest;
use super::session::{
    DATAGRAM, Listener, STREAM, Session, SessionKind, number as error_number, write_addresses,
};
use super::sessions::InitialState;
use super::stream_options::{conn_options, name_congestion};
use super::wire::Received;
use super::{Serve, wire};
use crate::host::Calls;

/// How long a request for a port waits for pending closes of the same user.
const CLOSE_TIMEOUT: Micros = Micros::from_millis(100);

/// States of a session without a connection, as Linux numbers them in `TCP_INFO`.
const CLOSE: u32 = 7;
const LISTEN: u32 = 10;

/// An answer and the descriptor sent with it.
pub(super) struct Reply {
    answer: Answer,
    end: Option<OwnedFd>,
}

impl Reply {
    pub(super) fn of(named: SessionId, end: Option<OwnedFd>) -> Self {
        let descriptors = end.is_some().into();
        Self { answer: Answer { session: named, descriptors, ..Answer::of(0) }, end }
    }

    /// Creates an answer with the words `info`.
    pub(super) fn with(info: [u32; INFO]) -> Self {
        Self { answer: Answer { info, ..Answer::of(0) }, end: None }
    }
}

impl Serve {
    /// Reads and answers the next request of a process.
    pub(super) fn hear(&mut self, key: Key, calls: &mut Calls<'_>) {
        let app = usize::from(key.app);
        let Some(user) = self.app(app).map(|app| app.user()) else { return };
        let Some(asked) = self.next_question(key, calls) else { return };
        let ReceivedRequest { question, mut descriptor, lost, since } = asked;
        if question.call == Call::Fork {
            match descriptor {
                Some(socket) => self.fork(app, socket, calls),
                // The process that waits at the other end sees that the socket is closed.
                None if lost => {}
                None => return self.close_channel(key, true, calls),
            }
            return self.queue_request(key, PendingQueue::push);
        }
        // Only for a new request: a session that is only shut down would be queried repeatedly.
        if since == calls.now {
            self.end_closed(&question, calls);
        }
        // A kernel socket that occupies the port is usually closed by the end of this wait.
        let binds = matches!(question.call, Call::Bind | Call::Listen);
        if binds && self.helpers.errands.has_some(user) && calls.now < since + CLOSE_TIMEOUT {
            if let Some(process) = self.app(app).and_then(|app| app.process(key.number, key.generation)) {
                process.postponed = Some(Box::new(ReceivedRequest { question, descriptor, lost, since }));
            }
            self.polling.look = true;
            return self.queue_request(key, PendingQueue::push_waiting);
        }
        let begins = matches!(question.call, Call::Bind | Call::Connect | Call::Listen);
        let reply = match lost {
            true => Err(Errno::MFILE),
            _ if begins && self.schedule.waking.is_barred(user) => Err(Errno::ACCESS),
            false => self.answer(app, &question, &mut descriptor, calls),
        };
        let done = self.reply(key, &question, reply);
        self.discard(user, descriptor.into_iter().collect());
        if !done {
            return self.close_channel(key, false, calls);
        }
        self.queue_request(key, PendingQueue::push);
    }

    /// Returns the next request of a process: a postponed one, or a new message.
    fn next_question(&mut self, key: Key, calls: &mut Calls<'_>) -> Option<ReceivedRequest> {
        let application = self.app(key.app.into())?;
        let user = application.user();
        let process = application.process(key.number, key.generation)?;
        process.is_queued = false;
        if self.helpers.errands.are_full(user) {
            self.queue_request(key, PendingQueue::push_waiting);
            return None;
        }
        let process = self.app(key.app.into())?.process(key.number, key.generation)?;
        if let Some(asked) = process.postponed.take() {
            return Some(*asked);
        }
        let channel = process.channel.as_ref()?.as_fd();
        let (mut bytes, mut descriptors) = ([0; Question::LEN + 1], Vec::new());
        let from = tsc::now();
        let received = wire::receive(channel, &mut bytes, &mut descriptors);
        // The sender's socket has room again, which wakes all waiters on it.
        self.woke(key.app.into(), tsc::now().saturating_sub(from));
        let descriptor = (!descriptors.is_empty()).then(|| descriptors.remove(0));
        self.discard(user, descriptors);
        let question = match &received {
            Err(Errno::AGAIN) => return None,
            Ok(received) if received.len == Question::LEN => Question::from_bytes(&bytes),
            _ => None,
        };
        let since = calls.now;
        if let (Some(question), Ok(Received { lost, .. })) = (question, &received) {
            return Some(ReceivedRequest { question, descriptor, lost: *lost, since });
        }
        self.discard(user, descriptor.into_iter().collect());
        let misused = matches!(received, Ok(Received { len: 1.., .. }) | Err(Errno::MSGSIZE));
        self.close_channel(key, misused, calls);
        None
    }

    /// Queues a process that has sent a message or may have more. Its request is handled in its application's turn.
    pub(super) fn queue_request(&mut self, key: Key, push: impl FnOnce(&mut PendingQueue<Key>, Key)) {
        self.wake_application(key.app.into());
        let Some(application) = self.app(key.app.into()) else { return };
        let Some(process) = application.process(key.number, key.generation) else { return };
        if !std::mem::replace(&mut process.is_queued, true) {
            push(application.pending_mut().message_senders(), key);
        }
    }

    fn channel(&mut self, key: Key) -> Option<BorrowedFd<'_>> {
        let process = self.app(key.app.into())?.process(key.number, key.generation)?;
        process.channel.as_ref().map(AsFd::as_fd)
    }

    /// Closes the socket of a process that has closed its own end or sent an invalid message.
    fn close_channel(&mut self, key: Key, misused: bool, calls: &mut Calls<'_>) {
        let app = usize::from(key.app);
        if misused {
            self.misuse("a process sent an invalid message: its socket was closed", app, calls.now);
        }
        let Some(process) = self.app(app).and_then(|app| app.process(key.number, key.generation)) else {
            return;
        };
        let (channel, lives) = (process.channel.take(), process.pidfd.is_some());
        self.close_socket(app, channel);
        if !lives {
            self.process_ended(app, key.number, key.generation, calls);
        }
    }

    /// Sends an answer. Returns `false` if the process does not receive it.
    fn reply(&mut self, key: Key, question: &Question, reply: Result<Reply, Errno>) -> bool {
        let Some(application) = self.app(key.app.into()) else { return false };
        let memory = Arc::clone(application.memory());
        let Some(channel) = self.channel(key) else { return false };
        let Reply { mut answer, end } = match reply {
            Ok(reply) => reply,
            Err(error) => Reply { answer: Answer::of(error_number(error)), end: None },
        };
        let descriptors: Vec<_> = match question.call {
            Call::Segments => {
                let segments = memory.segments().skip(question.number as usize);
                segments.take(MOST_DESCRIPTORS).map(|(fd, _)| fd).collect()
            }
            _ => end.iter().map(AsFd::as_fd).collect(),
        };
        answer.descriptors = descriptors.len() as u32;
        let from = tsc::now();
        let sent = match wire::send(channel, &answer.to_bytes(), &descriptors) {
            // Descriptors in flight are counted per user. Other processes of the user do not receive theirs, so this
            // process is not to blame.
            Err(Errno::TOOMANYREFS) => {
                let answer = Answer::of(error_number(Errno::NOBUFS));
                wire::send(channel, &answer.to_bytes(), &[]).is_ok()
            }
            sent => sent.is_ok(),
        };
        self.woke(key.app.into(), tsc::now().saturating_sub(from));
        sent
    }

    /// Ends closed sessions at the port that is requested.
    fn end_closed(&mut self, question: &Question, calls: &mut Calls<'_>) {
        let bound = question.local.map_or(0, |local| local.port());
        if bound != 0 && matches!(question.call, Call::Bind | Call::Connect | Call::Listen) {
            self.end_closed_at(bound, calls);
        }
    }

    fn answer(
        &mut self,
        app: usize,
        question: &Question,
        descriptor: &mut Option<OwnedFd>,
        calls: &mut Calls<'_>,
    ) -> Result<Reply, Errno> {
        if let (NONE, Some(to)) = (question.number, question.remote)
            && calls.stack.awaits_route(to.ip())
        {
            // The library does not leave the destination to the kernel, as it does without a route.
            return Err(Errno::NONET);
        }
        match question.call {
            Call::Segments | Call::Fork => Ok(Reply::of(SessionId::default(), None)),
            Call::Bind => self.bind(app, question, calls),
            Call::Connect => self.connect(app, question, calls),
            Call::Listen => self.listen(app, question, descriptor, calls),
            Call::Adopt => self.adopt(app, descriptor.as_ref().ok_or(Errno::BADF)?),
            Call::Info => self.info(app, question.number, calls),
            Call::Undelivered => self.undelivered(app, question, calls),
            Call::Group => self.group(app, question, calls),
        }
    }

    /// Creates a session that is bound to an address.
    fn bind(&mut self, app: usize, question: &Question, calls: &mut Calls<'_>) -> Result<Reply, Errno> {
        let local = question.local.ok_or(Errno::INVAL)?;
        let id = self.app(app).ok_or(Errno::BADF)?.id();
        let address = Some(local.ip()).filter(|address| !address.is_unspecified());
        let begin = match kind(question) {
            STREAM => {
                if address.is_some_and(|address| !calls.stack.has_address(address)) {
                    return Err(Errno::ADDRNOTAVAIL);
                }
                let port = self.stream_port(app, address, local.port(), None)?;
                self.may_bind(app, port)?;
                let place = calls.stack.take_slot(id).ok_or(Errno::NOBUFS)?;
                let local = SocketAddr::new(local.ip(), port);
                let what = SessionKind::Bound(address, port);
                InitialState { place, what, state: state::BOUND, local: Some(local), remote: None }
            }
            DATAGRAM => {
                if let Some(to) = question.remote {
                    calls.stack.source_to(to.ip()).map_err(errno)?;
                }
                self.may_bind(app, local.port())?;
                self.datagrams(app, question, None, calls)?
            }
            _ => return Err(Errno::PROTOTYPE),
        };
        self.made(app, begin, calls)
    }

    /// Creates a session and returns the answer that names it. On failure the connection or listener and the slot are
    /// released.
    pub(super) fn made(
        &mut self,
        app: usize,
        begin: InitialState,
        calls: &mut Calls<'_>,
    ) -> Result<Reply, Errno> {
        let place = begin.place;
        let conn = match &begin.what {
            SessionKind::Stream(conn) | SessionKind::Datagrams(conn) => Some(*conn),
            _ => None,
        };
        let listener = match &begin.what {
            SessionKind::Listener(listener) => Some(listener.id),
            _ => None,
        };
        let id = self.app(app).ok_or(Errno::BADF)?.id();
        match self.make(app, begin) {
            Ok(made) => Ok(Reply::of(made.named, Some(made.end))),
            Err(error) => {
                if let Some(listener) = listener {
                    calls.stack.unlisten(calls.now, listener, calls.out);
                }
                match conn {
                    Some(conn) => calls.close(conn),
                    None => calls.stack.give_slot(id, place),
                }
                Err(error)
            }
        }
    }

    /// Opens a connection for a bound or a new session, or sets the peer of a datagram socket.
    fn connect(&mut self, app: usize, question: &Question, calls: &mut Calls<'_>) -> Result<Reply, Errno> {
        let application = self.app(app).ok_or(Errno::BADF)?;
        let id = application.id();
        let connected = application.session(question.number).map(Session::kind);
        if let Some(SessionKind::Datagrams(conn)) = connected.filter(|_| question.number != NONE) {
            let conn = *conn;
            return self.connect_datagrams(app, conn, question, calls);
        }
        let to = question.remote.ok_or(Errno::INVAL)?;
        if question.number == NONE {
            // A local server that does not run on the stack is reached through the kernel's loopback.
            let is_here = match kind(question) {
                DATAGRAM => calls.stack.reaches_socket(to),
                _ => calls.stack.reaches_listener(to),
            };
            if calls.stack.has_address(to.ip()) && !is_here {
                return Err(Errno::OPNOTSUPP);
            }
            let from = question.local.map_or(0, |local| local.port());
            if from != 0 || kind(question) == DATAGRAM {
                self.may_bind(app, from)?;
            }
            if kind(question) == DATAGRAM {
                let begin = self.datagrams(app, question, Some(to), calls)?;
                return self.made(app, begin, calls);
            }
            let kept = conn_options(&question.options, to.ip().to_canonical().is_ipv6());
            let (now, from) = (calls.now, question.local);
            let conn = calls.stack.connect_with(now, id, kept, from, to, calls.out).map_err(errno)?;
            let Some(place) = calls.stack.slot(conn) else { return Err(Errno::NOBUFS) };
            let local = calls.stack.info(conn).map(|info| info.local);
            let what = SessionKind::Stream(conn);
            let begin = InitialState { place, what, state: state::CONNECTING, local, remote: Some(to) };
            let reply = self.made(app, begin, calls)?;
            self.keep_options(conn, &question.options, kept, calls.stack.algorithm());
            return Ok(reply);
        }
        let (session, slot) = application.both(question.number).ok_or(Errno::BADF)?;
        let named = session.named();
        match *session.kind() {
            SessionKind::Bound(address, port) => {
                let from = SocketAddr::new(address.unwrap_or(unspecified(to)), port);
                let conn = calls.stack.connect(calls.now, id, Some(from), to, calls.out).map_err(errno)?;
                if !calls.stack.set_slot(conn, session.place()) {
                    calls.close(conn);
                    return Err(Errno::NOBUFS);
                }
                let local = calls.stack.info(conn).map_or(from, |info| info.local);
                write_addresses(slot, Some(local), Some(to));
                slot.set_state(state::CONNECTING);
                session.change_kind(SessionKind::Stream(conn));
                self.index.by_conn.insert(conn, (app, question.number));
                self.ports.bound.remove(port, app, question.number);
            }
            SessionKind::Stream(_) | SessionKind::Datagrams(_) | SessionKind::Gone => {
                return Err(Errno::ISCONN);
            }
            SessionKind::Listener(_) => return Err(Errno::INVAL),
        }
        Ok(Reply::of(named, None))
    }

    /// Turns a bound session into a listener, or creates a listening session.
    fn listen(
        &mut self,
        app: usize,
        question: &Question,
        kernel: &mut Option<OwnedFd>,
        calls: &mut Calls<'_>,
    ) -> Result<Reply, Errno> {
        let shares = question.value & SHARE_PORT != 0;
        let cookie = kernel.as_ref().and_then(|kernel| socket_cookie(kernel).ok()).unwrap_or(0);
        let backlog = (question.value & !(SHARE_PORT | ONLY_V6)).clamp(1, u16::MAX.into()) as usize;
        let application = self.app(app).ok_or(Errno::BADF)?;
        let id = application.id();
        let bound = match application.session(question.number).map(Session::kind) {
            _ if question.number == NONE => None,
            Some(SessionKind::Bound(address, port)) => Some((*address, *port)),
            // The call could only change the backlog.
            Some(SessionKind::Listener(_)) => return self.named(app, question.number),
            Some(_) => return Err(Errno::INVAL),
            None => return Err(Errno::BADF),
        };
        let (address, port) = match (bound, question.local) {
            (Some((address, port)), _) => {
                // Another listener may have taken the port since this session was bound.
                self.end_closed_at(port, calls);
                (address, self.stream_port(app, address, port, Some((shares, cookie)))?)
            }
            (None, Some(local)) => {
                let address = bound_to(local.ip(), question.value);
                self.may_bind(app, local.port())?;
                (address, self.stream_port(app, address, local.port(), Some((shares, cookie)))?)
            }
            (None, None) => return Err(Errno::INVAL),
        };
        let listener =
            calls.stack.listen(id, address, port, backlog, shares || cookie != 0).map_err(errno)?;
        let what = SessionKind::Listener(Listener {
            id: listener,
            address,
            port,
            shares,
            cookie,
            kernel: None,
            come: VecDeque::new(),
            held: None,
            queued: false,
            armed: false,
            due: Time::ZERO,
            delay: Micros::new(0),
        });
        let (number, reply) = match bound {
            Some(_) => self.become_listener(app, question.number, what)?,
            None => {
                let Some(place) = calls.stack.take_slot(id) else {
                    calls.stack.unlisten(calls.now, listener, calls.out);
                    return Err(Errno::NOBUFS);
                };
                let any = question.local.map_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED), |local| local.ip());
                let local = Some(SocketAddr::new(any, port));
                let begin = InitialState { place, what, state: state::LISTENING, local, remote: None };
                let reply = self.made(app, begin, calls)?;
                let slot = self.app(app).and_then(|app| app.slot(place));
                slot.into_iter().for_each(|slot| slot.kept.set_numbers(&question.options));
                let number = self.index.by_listener.get(&listener).map_or(NONE, |(_, number)| *number);
                (number, reply)
            }
        };
        if let Some((_, slot)) = self.app(app).and_then(|app| app.both(number)) {
            name_congestion(slot, calls.stack.algorithm());
        }
        self.process_session(app, number, calls);
        self.begin_to_listen(app, number, backlog, kernel.take(), calls)?;
        Ok(reply)
    }

    /// Stores the initial options of a connection in its slot.
    fn keep_options(&mut self, conn: ConnId, options: &[u32; OPTIONS], kept: ConnOptions, usual: Algorithm) {
        let Some((app, number)) = self.index.by_conn.get(&conn).copied() else { return };
        if let Some((session, slot)) = self.app(app).and_then(|app| app.both(number)) {
            slot.kept.set_numbers(options);
            name_congestion(slot, usual);
            session.set_initial_options(kept);
        }
    }

    fn become_listener(&mut self, app: usize, number: u32, what: SessionKind) -> Result<(u32, Reply), Errno> {
        let application = self.registry.app(app).ok_or(Errno::BADF)?;
        let (session, slot) = application.both(number).ok_or(Errno::BADF)?;
        if let SessionKind::Listener(listener) = &what {
            self.index.by_listener.insert(listener.id, (app, number));
            self.ports.bound.remove(listener.port, app, number);
            self.ports.used.add(listener.port, app, number);
        }
        session.change_kind(what);
        slot.set_state(state::LISTENING);
        Ok((number, Reply::of(session.named(), None)))
    }

    /// Sets the length of the queue, and adds the kernel's listener to the acceptor. If that fails, the session is
    /// bound but does not listen.
    fn begin_to_listen(
        &mut self,
        app: usize,
        number: u32,
        backlog: usize,
        kernel: Option<OwnedFd>,
        calls: &mut Calls<'_>,
    ) -> Result<(), Errno> {
        let session = self.app(app).and_then(|app| app.session(number)).ok_or(Errno::BADF)?;
        if let Some(ours) = session.ours() {
            super::pair::set_backlog(ours, backlog.min(MAX_UNACCEPTED_SESSIONS));
        }
        if let Some(kernel) = kernel
            && let Err(error) = self.add_kernel(app, number, kernel)
        {
            let user = self.registry.user_of(app).unwrap_or_default();
            self.count_refusal(calls.now, KERNEL_ACCEPT_WARNING, user, error);
            self.stop_listening(app, number, calls);
            return Err(error);
        }
        self.pass_waiting_connections(app, number, calls);
        Ok(())
    }

    /// Returns an answer that names a session.
    pub(super) fn named(&mut self, app: usize, number: u32) -> Result<Reply, Errno> {
        let session = self.app(app).and_then(|app| app.session(number)).ok_or(Errno::BADF)?;
        Ok(Reply::of(session.named(), None))
    }

    /// Finds the session to which an end belongs.
    fn adopt(&mut self, app: usize, end: &OwnedFd) -> Result<Reply, Errno> {
        let cookie = socket_cookie(end)?;
        let application = self.app(app).ok_or(Errno::BADF)?;
        let number = application.sessions().find(cookie).ok_or(Errno::BADF)?;
        let kernel = match application.session(number).map(Session::kind) {
            Some(SessionKind::Listener(Listener { kernel: Some(kernel), .. })) => Some(kernel.try_clone()?),
            _ => None,
        };
        let reply = self.named(app, number)?;
        Ok(Reply { end: kernel, ..reply })
    }

    fn info(&mut self, app: usize, number: u32, calls: &mut Calls<'_>) -> Result<Reply, Errno> {
        let application = self.app(app).ok_or(Errno::BADF)?;
        let session = application.session(number).ok_or(Errno::BADF)?;
        let mut words = [0; INFO];
        words[0] = match session.kind() {
            SessionKind::Listener(_) => LISTEN,
            _ => CLOSE,
        };
        if let Some(info) = session.conn().and_then(|conn| calls.stack.info(conn)) {
            words = info_words(&info);
        }
        Ok(Reply::with(words))
    }
}

/// The kind of session that [`Call::Bind`] or [`Call::Connect`] requests.
fn kind(question: &Question) -> u32 {
    question.value & !(SHARE_PORT | ONLY_V6 | SHARE_ADDRESS)
}

/// The requested address of a socket; `None` is the wildcard of both families.
pub(super) fn bound_to(local: IpAddr, value: u32) -> Option<IpAddr> {
    let both = local == Ipv6Addr::UNSPECIFIED && value & ONLY_V6 == 0;
    (!both).then_some(local.to_canonical())
}

/// The unspecified address of the same family.
fn unspecified(like: SocketAddr) -> IpAddr {
    if like.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() }
}

/// The words that describe a connection: see [`INFO`].
fn info_words(info: &Info) -> [u32; INFO] {
    let state = match info.state {
        "ESTABLISHED" => 1,
        "SYN-SENT" => 2,
        "SYN-RECEIVED" => 3,
        "FIN-WAIT-1" => 4,
        "FIN-WAIT-2" => 5,
        "CLOSE-WAIT" => 8,
        "LAST-ACK" => 9,
        "CLOSING" => 11,
        _ => CLOSE,
    };
    let mss = u64::from(info.mss).max(1);
    let word = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
    let known = [
        state,
        word(info.recovery.rto.get()),
        word(mss),
        word(info.peer_mss.into()),
        word(info.outstanding.div_ceil(mss)),
        word(info.srtt.get()),
        word(info.recovery.rttvar.get()),
        word(info.cwnd / mss),
        word(info.recovery.ssthresh / mss),
        [info.stats.fast, info.stats.timeout, info.stats.probes].into_iter().fold(0, u32::saturating_add),
    ];
    let mut words = [0; INFO];
    words.iter_mut().zip(known).for_each(|(to, word)| *to = word);
    words
}

/// Converts a [`CallError`] to an `errno`.
pub(super) fn errno(error: CallError) -> Errno {
    match error {
        CallError::NoRoute => Errno::NETUNREACH,
        CallError::Tentative | CallError::NotOurs | CallError::NoPort | CallError::Elsewhere => {
            Errno::ADDRNOTAVAIL
        }
        CallError::InUse => Errno::ADDRINUSE,
        CallError::TooMany => Errno::NOBUFS,
        CallError::Gone | CallError::NoApp | CallError::NotOpen | CallError::Misuse => Errno::BADF,
    }
}

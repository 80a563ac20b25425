//! The calls of applications.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};

use offcore_stats::time::Time;

use super::addr::{AppId, ConnId, FlowKey};
use super::arenas::App;
use super::call_error::CallError;
use super::config::Buffers;
use super::flows::{Entry, key_of};
use super::handshake::SYN_RETRIES;
use super::keepalive::KeepAlive;
use super::listeners::Listener;
use super::options::ConnOptions;
use super::packet::{Cause, Out};
use super::receive::Receiver;
use super::send::Sender;
use super::stack::Stack;
use super::steering::{Owner, Share};
use super::tcb::{State, SynTimer, Tcb};

/// Maximum number of half-open connections of a listener, and of connections that wait in its queue (`somaxconn` of
/// Linux). The call that removes a listener resets all of them.
const BACKLOG: usize = 4096;

impl Stack {
    /// Opens a listener for connections to `port`, at one address of this host or at all addresses (0.0.0.0: all IPv4
    /// addresses, `::`: all IPv6 addresses). The maximum of `backlog` is 4,096. Returns the listener's number. For port
    /// 0 the stack selects an unused port, which [`listener_info`](Self::listener_info) reports. The connections belong
    /// to `app` and use its memory.
    ///
    /// Listeners of one application, or of one [user](Self::set_user), may have the same address and port if all of
    /// them set `reuse_port`. Connections are spread over them by a keyed hash of both endpoints.
    ///
    /// # Errors
    /// [`CallError::NotOurs`], [`CallError::InUse`], [`CallError::NoPort`], [`CallError::NoApp`],
    /// [`CallError::TooMany`].
    pub fn listen(
        &mut self,
        app: AppId,
        address: Option<IpAddr>,
        port: u16,
        backlog: usize,
        reuse_port: bool,
    ) -> Result<u32, CallError> {
        if !self.arenas.is_open(app) {
            return Err(CallError::NoApp);
        }
        if !address.is_none_or(|address| address.is_unspecified() || self.net.has(address)) {
            return Err(CallError::NotOurs);
        }
        if !self.arenas.may_enter(app) {
            return Err(CallError::TooMany);
        }
        let backlog = backlog.clamp(1, BACKLOG);
        let port = match port {
            0 => {
                let from = self.fragment_ident();
                let in_use = |port| self.listeners.has_port(port);
                self.ports.any(from, in_use).ok_or(CallError::NoPort)?
            }
            port => port,
        };
        let accept = VecDeque::new();
        let (half_open, user) = (0, self.arenas.user(app));
        let (buffers, options) = (Buffers::default(), ConnOptions::default());
        let listener =
            Listener { app, user, address, port, reuse_port, backlog, half_open, accept, buffers, options };
        let number = self.listeners.insert(listener).ok_or(CallError::InUse)?;
        self.arenas.enter(app);
        Ok(number)
    }

    /// Removes a listener. Connections that were not accepted are reset.
    pub fn unlisten(&mut self, now: Time, listener: u32, out: &mut Out) {
        let Some(gone) = self.listeners.remove(listener) else { return };
        // The next listener may get the same number.
        self.drop_halves(listener, gone.half_open);
        for id in gone.accept {
            self.abort(now, id, out);
        }
        self.arenas.leave(gone.app);
    }

    /// Returns the next connection of a listener, if there is one.
    pub fn accept(&mut self, listener: u32) -> Option<ConnId> {
        loop {
            let id = self.listeners.get_mut(listener)?.accept.pop_front()?;
            let Some(conn) = self.conns.get_mut(id) else { continue };
            conn.listener = None;
            if conn.tcb.state != State::Closed {
                return Some(id);
            }
            self.free_when_done(id);
        }
    }

    /// Returns which worker owns the received packet of `len` bytes that begins with `head`, if several workers form
    /// this host.
    #[inline]
    pub fn owner(&self, head: &[u8], len: usize) -> Owner {
        self.steering.owner(head, len)
    }

    /// Returns the worker that this stack belongs to.
    pub fn share(&self) -> Share {
        self.steering.share
    }

    /// Opens a connection, which belongs to `app` and uses its memory. The result is reported by
    /// [`Event::Connected`](super::packet::Event::Connected) or [`Closed`](super::packet::Event::Closed). The local
    /// endpoint is `from`. For an unspecified address or port 0 the stack selects one; the port makes the answers
    /// arrive at this worker.
    ///
    /// # Errors
    /// [`CallError::NoRoute`], [`NoPort`](CallError::NoPort), [`TooMany`](CallError::TooMany),
    /// [`NoApp`](CallError::NoApp), and over IPv6 [`Tentative`](CallError::Tentative) in an interface's first second.
    /// For `from`: [`NotOurs`](CallError::NotOurs), [`InUse`](CallError::InUse) if a connection between the same
    /// endpoints exists, and [`Elsewhere`](CallError::Elsewhere) if another worker must open the connection.
    pub fn connect(
        &mut self,
        now: Time,
        app: AppId,
        from: Option<SocketAddr>,
        to: SocketAddr,
        out: &mut Out,
    ) -> Result<ConnId, CallError> {
        self.connect_with(now, app, ConnOptions::default(), from, to, out)
    }

    /// As [`connect`](Self::connect), with options for the connection.
    ///
    /// # Errors
    /// See [`connect`](Self::connect).
    pub fn connect_with(
        &mut self,
        now: Time,
        app: AppId,
        options: ConnOptions,
        from: Option<SocketAddr>,
        to: SocketAddr,
        out: &mut Out,
    ) -> Result<ConnId, CallError> {
        if !self.arenas.is_open(app) {
            return Err(CallError::NoApp);
        }
        let Some(mut way) = self.net.way(to.ip()) else {
            let may_have_one = self.net.may_have_route(to.ip());
            return Err(if may_have_one { CallError::Tentative } else { CallError::NoRoute });
        };
        if let Some(from) = from.filter(|from| !from.ip().is_unspecified()) {
            if !self.net.has(from.ip()) {
                return Err(CallError::NotOurs);
            }
            if !self.net.owns(from.ip()) {
                return Err(CallError::Tentative);
            }
            way.source = from.ip();
        }
        let port = from.map_or(0, |from| from.port());
        let flow = FlowKey::new(SocketAddr::new(way.source, port), to).ok_or(CallError::NoRoute)?;
        let key = self.free_flow(now, flow)?;
        let mut iss = self.origins.isn(&key, now);
        // A previous connection with these endpoints is in TIME-WAIT, for long enough to be replaced.
        let waiting = self.flows.find(&key, |entry| self.key_of(entry));
        if let Some(Entry::TimeWait(index)) = waiting {
            iss = self.time_wait.reuse(index, now).map_or(iss, |previous| previous.isn(iss));
        }
        let mut tcb = Tcb::new(
            key,
            way,
            Receiver::new(0, 0, 0),
            Sender::new(iss, 536, self.config.algorithm, false, false),
        );
        tcb.headers.set_options(options);
        tcb.asking = Some(SynTimer { due: now, tries: 0, retries: SYN_RETRIES, since: now });
        let id = self.add(app, tcb, None, waiting).ok_or(CallError::TooMany)?;
        if let Some(Entry::TimeWait(index)) = waiting {
            self.time_wait.remove(index);
        }
        self.counts.opened += 1;
        self.send_own_syn(now, id, out);
        Ok(id)
    }

    /// Returns an unused flow to a peer: the given one, or one with another port if it has none.
    fn free_flow(&mut self, now: Time, flow: FlowKey) -> Result<FlowKey, CallError> {
        let Self { ports, flows, conns, halves, time_wait, steering, .. } = self;
        let taken = |key: &FlowKey| match flows.find(key, |entry| key_of(conns, halves, time_wait, entry)) {
            Some(Entry::TimeWait(index)) => time_wait.reuse(index, now).is_none(),
            other => other.is_some(),
        };
        if flow.local_port() != 0 {
            return match steering.is_ours(&flow) {
                false => Err(CallError::Elsewhere),
                true if taken(&flow) => Err(CallError::InUse),
                true => Ok(flow),
            };
        }
        let by = |port| flow.with_ports(port, flow.remote_port());
        // A connection from the host's own server port to that port would meet itself.
        let is_itself = |key: FlowKey| key.local() == key.remote();
        let port = ports
            .select(&flow, |port| !steering.is_ours(&by(port)) || taken(&by(port)) || is_itself(by(port)));
        port.map(by).ok_or(CallError::NoPort)
    }

    /// Records that the application has written.
    ///
    /// # Errors
    /// [`CallError::Gone`], [`CallError::NotOpen`]; [`CallError::Misuse`] if the application's index is invalid. The
    /// connection is then reset.
    pub fn written(&mut self, now: Time, conn: ConnId, out: &mut Out) -> Result<(), CallError> {
        let Some(this) = self.conns.get_mut(conn) else { return self.datagrams_moved(now, conn, out) };
        if !this.tcb.may_send() {
            return Err(CallError::NotOpen);
        }
        if this.written(&mut self.arenas[this.app], &self.config).is_err() {
            self.abort(now, conn, out);
            return Err(CallError::Misuse);
        }
        self.conns.touch(conn);
        self.settle(now, out);
        Ok(())
    }

    /// Announces copies to `len` unpublished bytes of the send FIFO from `position` on. Their memory stays allocated
    /// until [`filled`](Self::filled), even if the connection ends.
    ///
    /// # Errors
    /// [`CallError::Gone`]; [`CallError::NotOpen`] if the connection accepts no data; [`CallError::Misuse`] for bytes
    /// that are not granted.
    pub fn filling(&mut self, conn: ConnId, position: u64, len: usize) -> Result<(), CallError> {
        let this = self.conns.get_mut(conn).ok_or(CallError::Gone)?;
        if !this.tcb.may_send() {
            return Err(CallError::NotOpen);
        }
        let end = position.checked_add(len as u64).ok_or(CallError::Misuse)?;
        if position < this.tx.edge() || end > this.tx.end() {
            return Err(CallError::Misuse);
        }
        this.planned += 1;
        this.tx.hold(position, len);
        Ok(())
    }

    /// Ends copies announced by [`filling`](Self::filling).
    pub fn filled(&mut self, conn: ConnId, position: u64, len: usize) {
        let Some(this) = self.conns.get_mut(conn) else { return };
        this.planned -= 1;
        this.tx.unhold(&mut self.arenas[this.app], position, len);
        self.free_when_done(conn);
    }

    /// Records that the application has read.
    ///
    /// # Errors
    /// [`CallError::Gone`]; [`CallError::Misuse`] if the application's index is invalid. The connection is then reset.
    pub fn consumed(&mut self, now: Time, conn: ConnId, out: &mut Out) -> Result<(), CallError> {
        let Some(this) = self.conns.get_mut(conn) else { return self.datagrams_moved(now, conn, out) };
        let App { arena, shortage, .. } = self.arenas.app(this.app);
        match this.rx.consumed(arena) {
            Ok(position) => {
                let tcb = &mut this.tcb;
                tcb.receiver.consumed(position);
                let rtt = tcb.sender.recovery.srtt();
                let (buffers, config) = (this.buffers, &self.config);
                tcb.receiver.adapt(now, rtt, || buffers.window(config, || config.buffer_limit(arena)));
                this.fund(arena, shortage.turn());
                if this.lacks_window() {
                    shortage.wait(conn, &mut this.waits);
                }
                this.tcb.receiver.update_window();
            }
            Err(_) => {
                self.abort(now, conn, out);
                return Err(CallError::Misuse);
            }
        }
        self.conns.touch(conn);
        self.settle(now, out);
        Ok(())
    }

    /// Records that the application waits for room to write. [`Event::Writable`](super::packet::Event::Writable)
    /// reports room.
    pub fn want_room(&mut self, conn: ConnId) {
        match self.conns.get_mut(conn) {
            Some(this) => {
                this.wants_room = true;
                let (app, end) = (self.arenas.app(this.app), this.tx.end());
                this.grant_asked(&mut app.arena, &self.config);
                // Possibly no acknowledgement is expected that would check again.
                if this.is_short() || this.tx.end() > end {
                    app.shortage.wait(conn, &mut this.waits);
                }
            }
            None => self.datagrams_want_room(conn),
        }
    }

    /// Sets TCP_NODELAY: small segments are sent immediately, without Nagle's algorithm (RFC 9293, 3.7.4).
    ///
    /// # Errors
    /// [`CallError::Gone`].
    pub fn set_nodelay(&mut self, now: Time, conn: ConnId, on: bool, out: &mut Out) -> Result<(), CallError> {
        let this = self.conns.get_mut(conn).ok_or(CallError::Gone)?;
        this.tcb.sender.nagle.no_delay = on;
        self.conns.touch(conn);
        self.settle(now, out);
        Ok(())
    }

    /// Sets `TCP_USER_TIMEOUT` (RFC 5482) in milliseconds, and `TCP_SYNCNT`. 0 selects the default: about 15 minutes,
    /// and six retransmissions of a SYN.
    ///
    /// # Errors
    /// [`CallError::Gone`].
    pub fn set_timeouts(
        &mut self,
        now: Time,
        conn: ConnId,
        user_timeout: u32,
        syn_retries: u8,
        out: &mut Out,
    ) -> Result<(), CallError> {
        let tcb = &mut self.conns.get_mut(conn).ok_or(CallError::Gone)?.tcb;
        tcb.liveness.set_user_timeout(user_timeout);
        if let Some(asking) = &mut tcb.asking {
            asking.retries = if syn_retries == 0 { SYN_RETRIES } else { syn_retries };
            // The timer of the last SYN may have been set without a limit.
            asking.due = asking.due.min(asking.since.saturating_add(tcb.liveness.user_timeout())).max(now);
        }
        self.conns.touch(conn);
        self.settle(now, out);
        Ok(())
    }

    /// Sets or disables keep-alive probes of a silent peer (RFC 9293, 3.8.4). They are disabled by default.
    ///
    /// # Errors
    /// [`CallError::Gone`].
    pub fn set_keepalive(
        &mut self,
        now: Time,
        conn: ConnId,
        wanted: Option<KeepAlive>,
        out: &mut Out,
    ) -> Result<(), CallError> {
        let this = self.conns.get_mut(conn).ok_or(CallError::Gone)?;
        this.tcb.liveness.keep_alive(now, wanted);
        self.conns.touch(conn);
        self.settle(now, out);
        Ok(())
    }

    /// Ends the application's stream. All data that is already written is sent first, then the FIN.
    ///
    /// # Errors
    /// [`CallError::Gone`], [`CallError::NotOpen`].
    pub fn shutdown(&mut self, now: Time, conn: ConnId, out: &mut Out) -> Result<(), CallError> {
        let this = self.conns.get_mut(conn).ok_or(CallError::Gone)?;
        this.tcb.state = match this.tcb.state {
            State::Established | State::SynReceived => State::FinWait1,
            State::CloseWait => State::LastAck,
            _ => return Err(CallError::NotOpen),
        };
        this.tcb.sender.close();
        self.conns.touch(conn);
        self.settle(now, out);
        Ok(())
    }

    /// Closes a connection as Linux does. If there is unread data, the peer gets a reset that indicates its loss (RFC
    /// 9293, 3.6.1).
    pub fn close(&mut self, now: Time, conn: ConnId, out: &mut Out) {
        let Some(this) = self.conns.get_mut(conn) else { return self.close_datagrams(now, conn) };
        let tcb = &mut this.tcb;
        if tcb.state == State::SynSent || tcb.receiver.unread() > 0 {
            return self.abort(now, conn, out);
        }
        tcb.close_timer.orphan();
        this.promise(0, &mut self.arenas[this.app]);
        let tcb = &mut this.tcb;
        tcb.close_timer.limit(now, tcb.sender.unacknowledged());
        if tcb.state == State::FinWait2 {
            tcb.close_timer.await_fin(now, tcb.headers.options());
            self.conns.touch(conn);
            self.settle(now, out);
        } else {
            tcb.close_timer.extend(now);
            // If both streams have ended already, this sets the timer.
            self.conns.touch(conn);
            if self.shutdown(now, conn, out).is_err() {
                self.settle(now, out);
                self.free_when_done(conn);
            }
        }
    }

    /// Closes a connection with a reset, within a second. The reset follows the written data for which the peer's
    /// window has room. A stack that sends each write immediately (such as Linux) also delivers this data before the
    /// reset.
    pub fn abort(&mut self, now: Time, conn: ConnId, out: &mut Out) {
        let Some(this) = self.conns.get_mut(conn) else { return };
        this.tcb.close_timer.orphan();
        if this.tcb.is_synchronized() && this.tcb.sender.may_send() {
            this.tcb.close_timer.reset_after_data(now);
            self.conns.touch(conn);
            return self.settle(now, out);
        }
        self.net.abort(now, &mut this.tcb, out);
        self.over(conn, Cause::Aborted, out);
        self.free_when_done(conn);
    }
}

//! What applications ask for.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};

use super::addr::{ConnId, FlowKey};
use super::flows::{Entry, key_of};
use super::handshake::Listener;
use super::keepalive::{KeepAlive, Keeping};
use super::packet::{Cause, Out};
use super::receive::Receiver;
use super::send::Sender;
use super::stack::Stack;
use super::steering::{Owner, Share};
use super::tcb::{Asking, FIN_TIMEOUT, ORPHAN_RATE, State, Tcb};

/// Why a call was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, displaydoc::Display, thiserror::Error)]
pub enum CallError {
    /// no route to the address
    NoRoute,
    /// whether our own address is somebody else's, too, is not known yet
    Tentative,
    /// the address is not one of this stack's
    NotOurs,
    /// the address and port are in use
    InUse,
    /// every port that could be chosen is in use
    NoPort,
    /// there are as many connections as may be
    TooMany,
    /// the connection is gone
    Gone,
    /// the connection's stream has been ended, or is not open yet
    NotOpen,
    /// an index of the application's end means nothing
    Misuse,
}

impl Stack {
    /// Takes connections to `port`, at one address of ours or at all; the listener's number.
    ///
    /// # Errors
    /// [`CallError::NotOurs`], [`CallError::InUse`].
    pub fn listen(&mut self, address: Option<IpAddr>, port: u16, backlog: usize) -> Result<u32, CallError> {
        if !address.as_ref().is_none_or(|address| self.net.has(*address)) {
            return Err(CallError::NotOurs);
        }
        let backlog = backlog.clamp(1, u16::MAX.into());
        let listener = Listener { address, port, backlog, half_open: 0, accept: VecDeque::new() };
        self.listeners.insert(listener).ok_or(CallError::InUse)
    }

    /// Takes no more connections; those that were not accepted are reset.
    pub fn unlisten(&mut self, now: u64, listener: u32, out: &mut Out) {
        let Some(gone) = self.listeners.remove(listener) else { return };
        // The next listener may have its number.
        self.drop_halves(listener);
        for id in gone.accept {
            self.abort(now, id, out);
        }
    }

    /// The next connection of a listener, when there is one.
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

    /// Whose a received packet of `len` bytes is that begins with `head`, of all workers whose stacks are this host.
    #[inline]
    pub fn owner(&self, head: &[u8], len: usize) -> Owner {
        self.steering.owner(head, len)
    }

    /// Which of the workers this stack's is.
    pub fn share(&self) -> Share {
        self.steering.share
    }

    /// Asks for a connection, by a port whose answers are this worker's. [`Event::Connected`](super::packet::Event::Connected) or
    /// [`Closed`](super::packet::Event::Closed) says what has become of it.
    ///
    /// # Errors
    /// [`CallError::NoRoute`], [`NoPort`](CallError::NoPort), [`TooMany`](CallError::TooMany);
    /// [`Tentative`](CallError::Tentative) in an interface's first second, over IPv6.
    pub fn connect(&mut self, now: u64, to: SocketAddr, out: &mut Out) -> Result<ConnId, CallError> {
        let Some(way) = self.net.way(to.ip()) else {
            let may_have_one = self.net.may_have_way(to.ip());
            return Err(if may_have_one { CallError::Tentative } else { CallError::NoRoute });
        };
        let to = FlowKey::new(SocketAddr::new(way.source, 0), to).ok_or(CallError::NoRoute)?;
        let Self { ports, flows, conns, halves, time_wait, steering, .. } = self;
        let taken = |port| {
            let key = to.with_ports(port, to.remote_port());
            if !steering.is_ours(&key) {
                return true;
            }
            match flows.find(&key, |entry| key_of(conns, halves, time_wait, entry)) {
                Some(Entry::TimeWait(index)) => time_wait.reuse(index, now).is_none(),
                other => other.is_some(),
            }
        };
        let port = ports.select(&to, taken).ok_or(CallError::NoPort)?;
        let key = to.with_ports(port, to.remote_port());
        let mut iss = self.origins.isn(&key, now);
        // Whoever has the port still is in TIME-WAIT, and long enough.
        let waiting = self.flows.find(&key, |entry| self.key_of(entry));
        if let Some(Entry::TimeWait(index)) = waiting {
            iss = self.time_wait.reuse(index, now).map_or(iss, |previous| previous.isn(iss));
        }
        let mut tcb = Tcb::new(
            key,
            way,
            Receiver::new(0, 0, 0),
            Sender::new(iss, 536, self.wishes.algorithm, false, false),
        );
        tcb.asking = Some(Asking { due: now, tries: 0, since: now });
        let id = self.add(tcb, None, waiting).ok_or(CallError::TooMany)?;
        if let Some(Entry::TimeWait(index)) = waiting {
            self.time_wait.remove(index);
        }
        self.counts.opened += 1;
        self.ask_again(now, id, out);
        Ok(id)
    }

    /// The application has written.
    ///
    /// # Errors
    /// [`CallError::Gone`], [`CallError::NotOpen`]; [`CallError::Misuse`] when its index means nothing: the connection is
    /// reset.
    pub fn written(&mut self, now: u64, conn: ConnId, out: &mut Out) -> Result<(), CallError> {
        let Some(this) = self.conns.get_mut(conn) else { return self.datagrams_moved(conn, out) };
        if !this.tcb.may_send() {
            return Err(CallError::NotOpen);
        }
        if this.written(&mut self.arena, &self.config).is_err() {
            self.abort(now, conn, out);
            return Err(CallError::Misuse);
        }
        self.touch(conn);
        self.settle(now, out);
        Ok(())
    }

    /// The application has copies made to `len` bytes of its send FIFO from `position` on, which it does not show yet: their
    /// memory stays until [`filled`](Self::filled), whatever becomes of the connection.
    ///
    /// # Errors
    /// [`CallError::Gone`]; [`CallError::NotOpen`] when nothing can be written; [`CallError::Misuse`] for bytes that are
    /// not granted.
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

    /// These copies are over.
    pub fn filled(&mut self, conn: ConnId, position: u64, len: usize) {
        let Some(this) = self.conns.get_mut(conn) else { return };
        this.planned -= 1;
        this.tx.unhold(&mut self.arena, position, len);
        self.free_when_done(conn);
    }

    /// The application has read.
    ///
    /// # Errors
    /// [`CallError::Gone`]; [`CallError::Misuse`] when its index means nothing: the connection is reset.
    pub fn consumed(&mut self, now: u64, conn: ConnId, out: &mut Out) -> Result<(), CallError> {
        let Some(this) = self.conns.get_mut(conn) else { return self.datagrams_moved(conn, out) };
        match this.rx.consumed(&mut self.arena) {
            Ok(position) => {
                let tcb = &mut this.tcb;
                tcb.receiver.consumed(position);
                let rtt = tcb.sender.recovery.srtt();
                tcb.receiver.adapt(now, rtt, || self.config.buffer_limit(&self.arena));
            }
            Err(_) => {
                self.abort(now, conn, out);
                return Err(CallError::Misuse);
            }
        }
        self.touch(conn);
        self.settle(now, out);
        Ok(())
    }

    /// The application waits for room to write; [`Event::Writable`](super::packet::Event::Writable) says when there is.
    pub fn want_room(&mut self, conn: ConnId) {
        match self.conns.get_mut(conn) {
            Some(this) => {
                this.wants_room = true;
                // No acknowledgement may be to come that would look again.
                if this.is_short() {
                    this.grant(&mut self.arena, &self.config);
                    self.shortage.wait(conn, this);
                }
            }
            None => self.datagrams_want_room(conn),
        }
    }

    /// Whether small segments go out at once, as TCP_NODELAY says: without Nagle's algorithm (RFC 9293, 3.7.4).
    ///
    /// # Errors
    /// [`CallError::Gone`].
    pub fn set_nodelay(&mut self, now: u64, conn: ConnId, on: bool, out: &mut Out) -> Result<(), CallError> {
        let this = self.conns.get_mut(conn).ok_or(CallError::Gone)?;
        this.tcb.sender.no_delay = on;
        self.touch(conn);
        self.settle(now, out);
        Ok(())
    }

    /// Whether a silent peer is asked if it is still there (RFC 9293, 3.8.4): by default none is.
    ///
    /// # Errors
    /// [`CallError::Gone`].
    pub fn set_keepalive(
        &mut self,
        now: u64,
        conn: ConnId,
        wanted: Option<KeepAlive>,
        out: &mut Out,
    ) -> Result<(), CallError> {
        let this = self.conns.get_mut(conn).ok_or(CallError::Gone)?;
        this.tcb.keeping = wanted.map(|wanted| Box::new(Keeping::new(now, wanted)));
        self.touch(conn);
        self.settle(now, out);
        Ok(())
    }

    /// The application writes no more; what it has written is sent, and then that the stream has ended.
    ///
    /// # Errors
    /// [`CallError::Gone`], [`CallError::NotOpen`].
    pub fn shutdown(&mut self, now: u64, conn: ConnId, out: &mut Out) -> Result<(), CallError> {
        let this = self.conns.get_mut(conn).ok_or(CallError::Gone)?;
        this.tcb.state = match this.tcb.state {
            State::Established | State::SynReceived => State::FinWait1,
            State::CloseWait => State::LastAck,
            _ => return Err(CallError::NotOpen),
        };
        this.tcb.sender.close();
        self.touch(conn);
        self.settle(now, out);
        Ok(())
    }

    /// The application lets go of a connection: it ends as Linux ends one. When there is data that was not read, the peer
    /// learns that it was lost (RFC 9293, 3.6.1).
    pub fn close(&mut self, now: u64, conn: ConnId, out: &mut Out) {
        let Some(this) = self.conns.get_mut(conn) else { return self.close_datagrams(conn) };
        let tcb = &mut this.tcb;
        if tcb.state == State::SynSent || tcb.receiver.unread() > 0 {
            return self.abort(now, conn, out);
        }
        tcb.orphan = true;
        tcb.ends_by = now + FIN_TIMEOUT + tcb.sender.unacknowledged() * 1_000_000 / ORPHAN_RATE;
        if tcb.state == State::FinWait2 {
            tcb.give_up = Some(now + FIN_TIMEOUT);
            self.touch(conn);
            self.settle(now, out);
        } else {
            tcb.go_on_ending(now);
            // Whose stream has ended already is looked at for its deadline, too.
            self.touch(conn);
            if self.shutdown(now, conn, out).is_err() {
                self.settle(now, out);
                self.free_when_done(conn);
            }
        }
    }

    /// The application lets go of a connection, which is reset.
    pub fn abort(&mut self, now: u64, conn: ConnId, out: &mut Out) {
        let Some(this) = self.conns.get_mut(conn) else { return };
        this.tcb.orphan = true;
        self.net.abort(now, &mut this.tcb, out);
        self.over(conn, Cause::Aborted, out);
        self.free_when_done(conn);
    }
}

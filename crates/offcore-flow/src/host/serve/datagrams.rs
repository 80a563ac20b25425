//! Requests for datagram sockets: creation, peers, errors and multicast groups.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use offcore_session::message::{INFO, Membership as Change, Question, SHARE_ADDRESS, SHARE_PORT};
use offcore_session::slot::{Slot, state};
use offcore_tcp::proto::{CallError, ConnId, Membership, Reuse};
use rustix::io::Errno;

use super::Serve;
use super::calls::{Reply, bound_to, errno};
use super::counts::ServeCounts;
use super::session::{Session, SessionKind, write_addresses};
use super::sessions::InitialState;
use crate::host::Calls;

impl Serve {
    /// Creates a datagram socket of an application. It is bound to the question's local address and connected to
    /// `peer`, if any.
    pub(super) fn datagrams(
        &self,
        app: usize,
        question: &Question,
        peer: Option<SocketAddr>,
        calls: &mut Calls<'_>,
    ) -> Result<InitialState, Errno> {
        let local = question.local.ok_or(Errno::INVAL)?;
        let address = bound_to(local.ip(), question.value);
        let port = match local.port() {
            0 => self.datagram_port(address, calls)?,
            port => port,
        };
        let application = self.registry.apps.get(app).and_then(Option::as_deref).ok_or(Errno::BADF)?;
        let has = |bit| question.value & bit != 0;
        let reuse = Reuse { address: has(SHARE_ADDRESS), port: has(SHARE_PORT), user: application.user() };
        let opened = calls.stack.open_reused_datagrams(application.id(), address, port, reuse);
        let conn = opened.map_err(errno)?;
        let source = match peer {
            Some(_) => calls.stack.connect_datagrams(calls.now, conn, peer).map_err(errno),
            None => Ok(None),
        };
        let place = calls.stack.slot(conn).ok_or(Errno::NOBUFS);
        let (source, place) = match (source, place) {
            (Ok(source), Ok(place)) => (source, place),
            (Err(error), _) | (_, Err(error)) => {
                calls.close(conn);
                return Err(error);
            }
        };
        let port = calls.stack.datagram_address(conn).map_or(0, |(_, port)| port);
        let local = SocketAddr::new(source.unwrap_or(local.ip()), port);
        let what = SessionKind::Datagrams(conn);
        Ok(InitialState { place, what, state: state::BOUND, local: Some(local), remote: peer })
    }

    /// Sets or removes the peer of a datagram socket.
    pub(super) fn connect_datagrams(
        &mut self,
        app: usize,
        conn: ConnId,
        question: &Question,
        calls: &mut Calls<'_>,
    ) -> Result<Reply, Errno> {
        let peer = question.remote;
        let source = calls.stack.connect_datagrams(calls.now, conn, peer).map_err(errno)?;
        let port = calls.stack.datagram_address(conn).map_or(0, |(_, port)| port);
        let any = question.local.map(|local| local.ip()).filter(IpAddr::is_unspecified);
        let local = source.or(any).unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
        let (_, slot) = self.app(app).and_then(|app| app.both(question.number)).ok_or(Errno::BADF)?;
        write_addresses(slot, Some(SocketAddr::new(local, port)), peer);
        self.named(app, question.number)
    }

    /// Returns the oldest error of a datagram socket, or adds a new one.
    pub(super) fn undelivered(
        &mut self,
        app: usize,
        question: &Question,
        calls: &mut Calls<'_>,
    ) -> Result<Reply, Errno> {
        let (session, slot) = self.app(app).and_then(|app| app.both(question.number)).ok_or(Errno::BADF)?;
        let conn = session.conn().ok_or(Errno::BADF)?;
        if let Some(to) = question.remote.filter(|_| question.value > 0) {
            calls.stack.datagram_too_long_to_send(conn, to, question.value);
            self.with_datagrams(conn, |session, slot, counts| session.alarm(slot, counts));
            return self.named(app, question.number);
        }
        let (error, next) = calls.stack.take_undelivered(conn).ok_or(Errno::AGAIN)?;
        // As in Linux, the next error is returned by a later call.
        slot.identity.fail(next.unwrap_or(0));
        Ok(Reply::with(error.to_words()))
    }

    /// Joins or leaves a multicast group.
    pub(super) fn group(
        &mut self,
        app: usize,
        question: &Question,
        calls: &mut Calls<'_>,
    ) -> Result<Reply, Errno> {
        let group = question.remote.ok_or(Errno::INVAL)?.ip();
        let address = question.local.map(|local| local.ip());
        let membership = Membership { group, index: question.options[0], address };
        let mut info = [0; INFO];
        info[0] = calls.stack.index_of(&membership).ok_or(Errno::NODEV)?;
        if question.value != Change::Find as u32 {
            let application = self.app(app).ok_or(Errno::BADF)?;
            let Some(SessionKind::Datagrams(conn)) = application.session(question.number).map(Session::kind)
            else {
                return Err(Errno::BADF);
            };
            let joins = question.value == Change::Join as u32;
            let done = match joins {
                true => calls.stack.join_group(calls.now, *conn, &membership),
                false => calls.stack.leave_group(calls.now, *conn, &membership),
            };
            done.map_err(|error| match error {
                CallError::NotOurs if joins => Errno::INVAL,
                error => errno(error),
            })?;
        }
        Ok(Reply::with(info))
    }

    /// Reports that a sent datagram was not delivered.
    pub(super) fn failed(&mut self, conn: ConnId, errno: u16) {
        self.with_datagrams(conn, |session, slot, counts| session.failed(slot, errno, counts));
    }

    /// Calls `with` with the session of a datagram socket, if it has one.
    fn with_datagrams(&mut self, conn: ConnId, with: impl FnOnce(&mut Session, &Slot, &mut ServeCounts)) {
        let Some(&(app, number)) = self.index.by_conn.get(&conn) else { return };
        let application = self.registry.app(app);
        if let Some((session, slot)) = application.and_then(|app| app.both(number)) {
            with(session, slot, &mut self.tally.counts);
        }
    }
}

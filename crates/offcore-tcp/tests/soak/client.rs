//! The host that opens connections.

use std::collections::HashMap;

use offcore_stats::SplitMix;
use offcore_stats::time::{Micros, Time};
use offcore_tcp::proto::{AppId, Cause, ConnId, Event};

use crate::end::End;
use crate::server::PORT;
use crate::session::{Request, Session};

#[derive(Debug)]
struct Open {
    session: Session,
    request: Request,
    connected: bool,
    /// Time at which the client aborts the connection.
    abort_at: Time,
}

/// Opens connections, up to a maximum number at a time.
#[derive(Debug)]
pub(crate) struct Client {
    open: HashMap<ConnId, Open>,
    /// The open connections in a deterministic order.
    order: Vec<ConnId>,
    /// Number of connections that are still to open.
    pub(crate) left: usize,
    /// Number of ended connections: all, those with complete streams, and those aborted by the client.
    pub(crate) ended: u64,
    pub(crate) whole: u64,
    pub(crate) aborted: u64,
    chance: SplitMix,
}

impl Client {
    pub(crate) fn new(seed: u64) -> Self {
        let (open, order, chance) = (HashMap::new(), Vec::new(), SplitMix::new(seed ^ 0xc11e));
        Self { open, order, left: 0, ended: 0, whole: 0, aborted: 0, chance }
    }

    pub(crate) fn is_done(&self) -> bool {
        self.left == 0 && self.open.is_empty()
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.open.is_empty()
    }

    /// Opens another connection and serves one.
    pub(crate) fn round(&mut self, now: Time, end: &mut End, most: usize) {
        if self.left > 0 && self.open.len() < most && self.chance.below(4) == 0 {
            self.connect(now, end);
        }
        if self.order.is_empty() {
            return;
        }
        let conn = self.order[self.chance.below(self.order.len() as u64) as usize];
        if let Some(open) = self.open.get_mut(&conn) {
            open.session.read(now, conn, end);
        }
        self.look(now, conn, end);
    }

    fn connect(&mut self, now: Time, end: &mut End) {
        let to = if self.chance.below(2) == 0 { "10.0.0.2" } else { "2001:db8::2" };
        let (stack, out) = end.path.call();
        let Ok(conn) =
            stack.connect(now, AppId::OWN, None, (to.parse::<std::net::IpAddr>().unwrap(), PORT).into(), out)
        else {
            return;
        };
        self.left -= 1;
        let mut len = || {
            let most = 1 << (8 + self.chance.below(11));
            1 + self.chance.below(most) as u32
        };
        let (there, back) = (len(), len());
        let (by_client, by_server) = (self.chance.below(6) == 0, self.chance.below(6) == 0);
        let request = Request {
            key: self.chance.next(),
            there,
            back,
            abort_at: if by_server { self.chance.below(u64::from(there) + 1) as u32 } else { u32::MAX },
            is_cut: by_client || by_server,
        };
        let mut session = Session::open(now, end, conn);
        session.slow = self.chance.below(8) == 0;
        session.write(&request.to_bytes(), request.key, there.into());
        session.expect(!request.key);
        let abort_at =
            if by_client { now + Micros::from_millis(3).random(&mut self.chance) } else { Time::NEVER };
        self.order.push(conn);
        self.open.insert(conn, Open { session, request, connected: false, abort_at });
    }

    pub(crate) fn event(&mut self, now: Time, event: Event, end: &mut End) {
        let (Event::Connected(conn)
        | Event::Readable(conn)
        | Event::Writable(conn)
        | Event::EndOfStream(conn)
        | Event::Closed(conn, _)) = event
        else {
            return;
        };
        let Some(open) = self.open.get_mut(&conn) else { return };
        match event {
            Event::Connected(_) => open.connected = true,
            Event::Readable(_) if !open.session.slow => open.session.read(now, conn, end),
            Event::EndOfStream(_) => open.session.ended = true,
            Event::Closed(_, cause) => open.session.closed = Some(cause),
            _ => {}
        }
        self.look(now, conn, end);
    }

    /// Serves a connection, and ends it if that is due.
    fn look(&mut self, now: Time, conn: ConnId, end: &mut End) {
        let Some(open) = self.open.get_mut(&conn) else { return };
        if now >= open.abort_at {
            return self.abort(now, conn, end);
        }
        let Open { session, request, .. } = open;
        if open.connected && session.closed.is_none() {
            session.pump(now, conn, end);
        }
        let over = session.is_over();
        if !over && session.closed.is_none() {
            return;
        }
        if session.closed.is_some() {
            session.read(now, conn, end);
        }
        if over {
            assert!(request.is_cut || session.read == request.back.into(), "{request:?} {session:?}");
            self.whole += u64::from(session.read == u64::from(request.back));
        } else {
            let closed = session.closed;
            let finished = closed == Some(Cause::Finished) && session.read == request.back.into();
            let cut = request.is_cut && closed == Some(Cause::Reset);
            assert!(finished || cut, "{request:?} {session:?}");
        }
        let (stack, out) = end.path.call();
        stack.close(now, conn, out);
        self.forget(conn);
    }

    /// Ends a connection prematurely.
    fn abort(&mut self, now: Time, conn: ConnId, end: &mut End) {
        self.aborted += 1;
        let (stack, out) = end.path.call();
        // Closing with unread bytes resets the connection, too.
        if self.chance.below(2) == 0 {
            stack.abort(now, conn, out);
        } else {
            stack.close(now, conn, out);
        }
        self.forget(conn);
    }

    fn forget(&mut self, conn: ConnId) {
        self.ended += 1;
        self.open.remove(&conn);
        self.order.retain(|other| *other != conn);
    }
}

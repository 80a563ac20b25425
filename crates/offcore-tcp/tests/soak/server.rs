//! The host that accepts connections.

use std::collections::HashMap;

use offcore_stats::time::Time;
use offcore_tcp::proto::{AppId, Cause, ConnId, Event};

use crate::end::End;
use crate::session::{Request, Session};

pub(crate) const PORT: u16 = 7;
const BACKLOG: usize = 64;

#[derive(Debug)]
struct Open {
    session: Session,
    request: Option<Request>,
}

/// Accepts connections, reads requests, and sends the requested data.
#[derive(Debug)]
pub(crate) struct Server {
    listener: u32,
    open: HashMap<ConnId, Open>,
    order: Vec<ConnId>,
    turn: usize,
    /// Number of ended connections, and of those aborted by the server.
    pub(crate) ended: u64,
    pub(crate) aborted: u64,
}

impl Server {
    pub(crate) fn open(end: &mut End) -> Self {
        let listener = end.path.stack.listen(AppId::OWN, None, PORT, BACKLOG, false).unwrap();
        Self { listener, open: HashMap::new(), order: Vec::new(), turn: 0, ended: 0, aborted: 0 }
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.open.is_empty()
    }

    pub(crate) fn close(&mut self, now: Time, end: &mut End) {
        let (stack, out) = end.path.call();
        stack.unlisten(now, self.listener, out);
    }

    /// Serves one connection.
    pub(crate) fn round(&mut self, now: Time, end: &mut End) {
        self.turn += 1;
        if let Some(conn) = self.order.get(self.turn % self.order.len().max(1)).copied() {
            self.look(now, conn, true, end);
        }
    }

    pub(crate) fn event(&mut self, now: Time, event: Event, end: &mut End) {
        match event {
            Event::Incoming { listener } => {
                while let Some(conn) = end.path.stack.accept(listener) {
                    let session = Session::open(now, end, conn);
                    self.open.insert(conn, Open { session, request: None });
                    self.order.push(conn);
                    self.look(now, conn, true, end);
                }
            }
            Event::Readable(conn) | Event::Writable(conn) => self.look(now, conn, false, end),
            Event::EndOfStream(conn) => {
                if let Some(open) = self.open.get_mut(&conn) {
                    open.session.ended = true;
                }
                self.look(now, conn, true, end);
            }
            Event::Closed(conn, cause) => {
                if let Some(open) = self.open.get_mut(&conn) {
                    open.session.closed = Some(cause);
                }
                self.look(now, conn, true, end);
            }
            Event::Connected(_)
            | Event::Failed(..)
            | Event::AddressConflict { .. }
            | Event::Address { .. } => {}
        }
    }

    /// Serves a connection, and ends it if that is due. A slow connection is read only in its turn.
    fn look(&mut self, now: Time, conn: ConnId, turn: bool, end: &mut End) {
        let Some(Open { session, request }) = self.open.get_mut(&conn) else { return };
        if request.is_none() {
            *request = session.take_request();
            let Some(Request { key, back, .. }) = *request else {
                if session.ended || session.closed.is_some() {
                    self.close_and_forget(now, conn, end);
                }
                return;
            };
            session.expect(key);
            session.slow = key % 8 == 0;
            session.write(&[], !key, back.into());
        }
        let Some(request) = *request else { return };
        if turn || !session.slow {
            session.read(now, conn, end);
        }
        if session.read >= request.abort_at.into() {
            self.aborted += 1;
            let (stack, out) = end.path.call();
            stack.abort(now, conn, out);
            return self.forget(conn);
        }
        if session.closed.is_none() {
            session.pump(now, conn, end);
        }
        if session.is_over() {
            assert!(request.is_cut || session.read == request.there.into(), "{request:?} {session:?}");
        } else if let Some(cause) = session.closed {
            session.read(now, conn, end);
            let finished = cause == Cause::Finished && session.read == request.there.into();
            assert!(finished || request.is_cut && cause == Cause::Reset, "{request:?} {session:?}");
        } else {
            return;
        }
        self.close_and_forget(now, conn, end);
    }

    fn close_and_forget(&mut self, now: Time, conn: ConnId, end: &mut End) {
        let (stack, out) = end.path.call();
        stack.close(now, conn, out);
        self.forget(conn);
    }

    fn forget(&mut self, conn: ConnId) {
        self.ended += 1;
        self.open.remove(&conn);
        self.order.retain(|other| *other != conn);
    }
}

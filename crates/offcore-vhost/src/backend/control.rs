//! The control thread: waits for front ends and serves them one by one.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use offcore_stats::pace::Pace;
use rustix::event::{PollFd, PollFlags};

use super::session::FrontEndSession;
use super::{BackendConfig, ControlError, DeviceEvents, VhostDevice};
use crate::connection::{Connection, ConnectionError, Listener, Received, connect, poll};
use crate::message::Reply;
use crate::passed::Errands;

/// Interval between attempts to connect or accept.
const RETRY: Duration = Duration::from_millis(200);
/// How often a connected device is checked for events without a message.
const LOOK: Duration = Duration::from_millis(100);
/// Minimum interval between messages, and size of a burst of messages, which is enough to set up 128 queue pairs twice.
/// A front end that sends more has to wait. Otherwise it could use up the worker's core and make the worker check its
/// rings repeatedly.
const MESSAGE: Duration = Duration::from_micros(100);
const MESSAGES: u32 = 4096;
/// The same for connections.
const CONNECTION: Duration = Duration::from_millis(10);
const CONNECTIONS: u32 = 64;
/// Number of log lines that front ends of a port may cause in a burst, and the interval between further lines. Other
/// lines are omitted, to keep front ends from filling the log.
const LINES: u32 = 32;
const LINE: Duration = Duration::from_secs(10);

/// State of the control thread.
pub(super) struct Control {
    config: BackendConfig,
    device: VhostDevice,
    /// The listening socket of a server; `None` for a client.
    listener: Option<Listener>,
    stop: Arc<OwnedFd>,
    events: Box<dyn DeviceEvents>,
    /// Rate limits are kept across connections, because a front end can reconnect.
    messages: Pace,
    connections: Pace,
    lines: Pace,
    /// Operations that may have to wait for a front end.
    errands: Errands,
    /// Whether the last log line was omitted.
    silent: bool,
}

impl Control {
    pub(super) fn new(
        config: BackendConfig,
        device: VhostDevice,
        listener: Option<Listener>,
        stop: Arc<OwnedFd>,
        events: Box<dyn DeviceEvents>,
    ) -> Self {
        Self {
            config,
            device,
            listener,
            stop,
            events,
            messages: Pace::new(MESSAGE, MESSAGES),
            connections: Pace::new(CONNECTION, CONNECTIONS),
            lines: Pace::new(LINE, LINES),
            errands: Errands::default(),
            silent: false,
        }
    }

    /// Runs until the stop eventfd is signalled.
    pub(super) fn run(mut self) {
        let path = self.config.path.display().to_string();
        tracing::info!(path, role = %self.config.role, "vhost back end waits for a front end");
        while let Some(socket) = self.next_front_end() {
            // A line that is not logged does not count.
            if tracing::enabled!(tracing::Level::INFO) && self.has_line() {
                tracing::info!(path, "front end connected");
            }
            {
                let mut status = self.device.state();
                status.connected = true;
                status.connects += 1;
            }
            let mut session = FrontEndSession::new(self.device.clone(), &self.config);
            session.show();
            match self.serve(&mut session, socket) {
                Ok(()) => {}
                Err(ControlError::Connection(ConnectionError::Closed)) => {
                    if tracing::enabled!(tracing::Level::INFO) && self.has_line() {
                        tracing::info!(path, "front end disconnected");
                    }
                }
                Err(error) => self.record(error),
            }
            if let Err(error) = session.tear_down() {
                self.record(error);
            }
            session.announce(&mut *self.events);
            FrontEndSession::new(self.device.clone(), &self.config).show();
            self.device.state().connected = false;
        }
    }

    /// Waits for a front end. Returns `None` if the thread has to stop.
    fn next_front_end(&mut self) -> Option<OwnedFd> {
        let mut failed = false;
        // Checks for a stop first, to avoid accepting a front end that would be disconnected at once. A client whose
        // connection has just ended gives the front end a short time.
        let again = self.listener.is_none() && self.device.state().connects > 0;
        let pause = if again { RETRY } else { self.connections.pause(Instant::now()) };
        let mut waiting = self.wait(None, Some(pause));
        loop {
            match waiting {
                Ok(Wake { stop: false, .. }) => {}
                Ok(Wake { stop: true, .. }) => return None,
                Err(error) => {
                    tracing::error!(%error, "the vhost control thread cannot wait and ends");
                    return None;
                }
            }
            if self.errands.is_full() {
                waiting = self.wait(None, Some(RETRY));
                continue;
            }
            let next = match &self.listener {
                Some(listener) => listener.accept(),
                None => connect(&self.config.path).map(Some),
            };
            let kept = self.device.drop_retired().then_some(LOOK);
            waiting = match next {
                Ok(Some(socket)) => return Some(socket),
                Ok(None) => self.wait(self.listener.as_ref().map(AsFd::as_fd), kept),
                Err(error) => {
                    // Logged only for the first failure in a row, because a client may try for hours.
                    if !std::mem::replace(&mut failed, true) {
                        tracing::info!(%error, "no front end yet; trying again every {RETRY:?}");
                    }
                    self.wait(None, Some(RETRY))
                }
            };
        }
    }

    /// Serves a front end until it disconnects, an error ends the connection, or the thread has to stop.
    fn serve(&mut self, session: &mut FrontEndSession, socket: OwnedFd) -> Result<(), ControlError> {
        let mut connection = Connection::with_errands(socket, &self.errands)?;
        let mut looked = Instant::now();
        loop {
            let wake = self.wait(Some(connection.as_fd()), Some(LOOK))?;
            if wake.stop {
                return Ok(());
            }
            if self.errands.is_full() {
                return Err(ControlError::Errands { left: self.errands.left() });
            }
            if wake.ready
                && let Some(received) = connection.receive()?
            {
                self.message(session, &connection, received)?;
                let pause = self.messages.pause(Instant::now());
                if !pause.is_zero() && self.wait(None, Some(pause))?.stop {
                    return Ok(());
                }
            }
            if looked.elapsed() >= LOOK {
                looked = Instant::now();
                for found in session.look()? {
                    self.record(found);
                    session.show();
                }
            }
        }
    }

    /// Handles one message and answers it.
    fn message(
        &mut self,
        session: &mut FrontEndSession,
        connection: &Connection,
        received: Received,
    ) -> Result<(), ControlError> {
        let header = received.header;
        tracing::trace!(request = %header.code, "message");
        let mut result =
            received.request().map_err(ControlError::from).and_then(|request| session.handle(request));
        session.show();
        self.device.drop_retired();
        let acknowledge = header.need_reply && session.acknowledges();
        let reply = match &mut result {
            Ok(reply @ Some(_)) => reply.take(),
            Ok(None) if acknowledge => Some(Reply::Value(0)),
            Err(_) if acknowledge && !header.code.is_answered() => Some(Reply::Value(1)),
            _ => None,
        };
        {
            let mut status = self.device.state();
            status.messages += 1;
            status.refused += u64::from(result.is_err());
        }
        // The error is recorded before the front end gets the reply, and takes precedence over a failure to send.
        let (refused, end) = match result {
            Ok(_) => (None, None),
            Err(error) if error.ends_connection() || header.code.is_answered() => (None, Some(error)),
            Err(error) => (Some(error), None),
        };
        if let Some(error) = refused {
            self.record(error);
        }
        let sent = match reply {
            Some(reply) => {
                let (bytes, fd) = reply.encode(header.code);
                let fds: Vec<_> = fd.iter().map(AsFd::as_fd).collect();
                connection.send(&bytes, &fds)
            }
            None => Ok(()),
        };
        session.announce(&mut *self.events);
        match end {
            Some(error) => Err(error),
            None => Ok(sent?),
        }
    }

    /// Logs an error and publishes it in the status.
    fn record(&mut self, error: ControlError) {
        if self.has_line() {
            tracing::warn!(path = %self.config.path.display(), "{error}");
        }
        let mut status = self.device.state();
        (status.last_error, status.last_error_in) = (Some(Arc::new(error)), status.connects);
    }

    /// Whether another log line about front ends is allowed.
    fn has_line(&mut self) -> bool {
        let allowed = self.lines.allows(Instant::now());
        let before = std::mem::replace(&mut self.silent, !allowed);
        if !allowed && !before {
            let path = self.config.path.display();
            tracing::warn!(%path, "more than {LINES} lines about front ends; from now on one every {LINE:?}");
        }
        allowed
    }

    /// Waits until `other` is readable or a stop is requested.
    fn wait(
        &self,
        other: Option<BorrowedFd<'_>>,
        timeout: Option<Duration>,
    ) -> Result<Wake, ConnectionError> {
        let mut fds = vec![PollFd::from_borrowed_fd(self.stop.as_fd(), PollFlags::IN)];
        fds.extend(other.map(|other| PollFd::from_borrowed_fd(other, PollFlags::IN)));
        poll(&mut fds, timeout)?;
        let is_ready = |fd: Option<&PollFd<'_>>| fd.is_some_and(|fd| !fd.revents().is_empty());
        Ok(Wake { stop: is_ready(fds.first()), ready: is_ready(fds.get(1)) })
    }
}

/// The reason for the end of a wait. Both fields are false after a timeout.
#[derive(Clone, Copy, Debug)]
struct Wake {
    stop: bool,
    ready: bool,
}

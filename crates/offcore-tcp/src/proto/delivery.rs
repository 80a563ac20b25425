//! Delivery of received data to the application: the copies to the receive FIFO, and the end of the stream.

use super::packet::Cause;

/// The state of the delivery. The application is notified of the end after it has been notified of all data.
#[derive(Debug, Default)]
pub(crate) struct Delivery {
    /// Position up to which the application may see data.
    committed: u64,
    /// Copies to the receive FIFO that have not been reported.
    placing: u32,
    /// The application has been told that the stream has ended.
    told_end: bool,
    /// Why the connection has ended, if the application has not been notified.
    untold: Option<Cause>,
}

impl Delivery {
    /// Returns whether copies are in flight.
    #[inline]
    pub(crate) fn is_placing(&self) -> bool {
        self.placing > 0
    }

    /// Records the start of a copy.
    #[inline]
    pub(crate) fn place(&mut self) {
        self.placing += 1;
    }

    /// Records the end of `copies` copies. Returns whether the application sees more data, which is complete up to
    /// `commit_to`.
    #[inline]
    pub(crate) fn placed(&mut self, copies: u32, commit_to: u64) -> bool {
        self.placing -= copies;
        let more = commit_to > self.committed;
        if more {
            self.committed = commit_to;
        }
        more
    }

    /// Returns whether the application must be told now that the stream ends at `end`.
    #[inline]
    pub(crate) fn tells_end(&mut self, end: Option<u64>) -> bool {
        let tells = self.placing == 0 && !self.told_end && end == Some(self.committed);
        if tells {
            self.told_end = true;
        }
        tells
    }

    /// Returns whether the application has been told that the stream has ended.
    pub(crate) fn has_told_end(&self) -> bool {
        self.told_end
    }

    /// Records the end of the connection.
    pub(crate) fn over(&mut self, cause: Cause) {
        self.untold = Some(cause);
    }

    /// Returns the cause of the end if the application must be notified now.
    pub(crate) fn take_cause(&mut self) -> Option<Cause> {
        self.untold.take_if(|_| self.placing == 0)
    }
}

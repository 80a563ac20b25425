//! The work that waits for an application, by kind. The kinds take turns.

use std::collections::VecDeque;

use offcore_session::control::Control;

use super::key::Key;

/// Number of marks taken from an application at a time. The last word may add up to 63.
const MARKS: usize = 256;

/// A unit of work for an application.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    /// A session is marked.
    Marked(u32),
    /// A session is handled although it is not marked. The number may be unused.
    Scanned(u32),
    /// A process may have sent a message.
    Message(Key),
    /// The pair of a session of this generation may contain data.
    PairData(u32, u32),
    /// A listener of this generation may have connections to pass on.
    Listener(u32, u32),
    /// The application is ending: the session with this number, which may be unused, is closed. `None` ends the
    /// application itself.
    End(Option<u32>),
}

/// The work that waits for an application.
#[derive(Debug, Default)]
pub(super) struct PendingWork {
    marks: Marks,
    scan: FullScan,
    /// Processes that may have sent messages.
    questions: PendingQueue<Key>,
    /// Sessions, by number and generation, whose pairs may contain data.
    pairs: PendingQueue<(u32, u32)>,
    /// Listeners, by number and generation, that may have connections to pass on.
    listeners: PendingQueue<(u32, u32)>,
    /// All sessions are being closed, and the application ends after the last one.
    ends: bool,
    /// The application is queued for a slice.
    queued: bool,
    /// The kind of work that was served last.
    kind: usize,
}

impl PendingWork {
    /// Checks for marks. They are taken in the application's turn.
    #[inline]
    pub(super) fn scan_for_marks(&mut self, control: &Control) {
        self.marks.may_exist = control.has_marks();
    }

    /// The queue of processes that may have sent messages.
    pub(super) fn message_senders(&mut self) -> &mut PendingQueue<Key> {
        &mut self.questions
    }

    /// Whether a process may have sent a message.
    pub(super) fn has_message_senders(&self) -> bool {
        !self.questions.is_empty()
    }

    /// The queue of sessions whose pairs may contain data.
    pub(super) fn pairs(&mut self) -> &mut PendingQueue<(u32, u32)> {
        &mut self.pairs
    }

    /// The queue of listeners that may have connections to pass on.
    pub(super) fn listeners(&mut self) -> &mut PendingQueue<(u32, u32)> {
        &mut self.listeners
    }

    /// Whether work is due now.
    #[inline]
    pub(super) fn is_due(&self) -> bool {
        self.marks.are_due()
            || self.ends
            || self.scan.left > 0
            || self.questions.due > 0
            || self.pairs.due > 0
            || self.listeners.due > 0
    }

    /// Makes all waiting work due in the next round.
    pub(super) fn make_all_due(&mut self) {
        self.questions.make_all_due();
        self.pairs.make_all_due();
        self.listeners.make_all_due();
    }

    /// Whether there is work, now or later.
    pub(super) fn has_work(&self) -> bool {
        let waits = !self.questions.is_empty() || !self.pairs.is_empty() || !self.listeners.is_empty();
        self.is_due() || waits
    }

    /// If work is due, notes that the application is queued for a slice. Returns `true` if it was not queued before.
    pub(super) fn enqueue_if_due(&mut self) -> bool {
        self.is_due() && !std::mem::replace(&mut self.queued, true)
    }

    /// Notes that the application is no longer queued for a slice. Returns whether it was queued.
    pub(super) fn dequeue(&mut self) -> bool {
        std::mem::take(&mut self.queued)
    }

    /// Returns the next unit of work of an application with `sessions` session numbers. The kinds of work alternate, so
    /// that no kind waits until another is done.
    pub(super) fn next(&mut self, control: &Control, sessions: u32) -> Option<Work> {
        const KINDS: usize = 5;
        if self.ends {
            return Some(Work::End(self.scan.next(sessions)));
        }
        (0..KINDS).find_map(|_| {
            self.kind = (self.kind + 1) % KINDS;
            match self.kind {
                0 => self.marks.next(control).map(Work::Marked),
                1 => self.scan.next(sessions).map(Work::Scanned),
                2 => self.questions.pop().map(Work::Message),
                3 => self.listeners.pop().map(|(number, generation)| Work::Listener(number, generation)),
                _ => self.pairs.pop().map(|(number, generation)| Work::PairData(number, generation)),
            }
        })
    }

    /// Requests that all sessions are handled.
    pub(super) fn request_full_scan(&mut self, sessions: u32) {
        // A scan that ends the application is not repeated.
        if !self.ends {
            self.scan.left = sessions;
        }
    }

    /// From now on, [`next`](Self::next) returns only steps that end the application.
    pub(super) fn start_ending(&mut self, sessions: u32) {
        self.request_full_scan(sessions);
        self.ends = true;
    }

    /// Whether all sessions are being closed.
    pub(super) fn is_ending(&self) -> bool {
        self.ends
    }
}

/// The sessions that the application has marked.
#[derive(Debug, Default)]
struct Marks {
    /// The application's page may contain marks.
    may_exist: bool,
    taken: Vec<u32>,
    /// The position at which the next marks are taken.
    position: usize,
}

impl Marks {
    #[inline]
    fn are_due(&self) -> bool {
        self.may_exist || !self.taken.is_empty()
    }

    /// Returns the next marked session.
    #[inline]
    fn next(&mut self, control: &Control) -> Option<u32> {
        if self.taken.is_empty() && std::mem::take(&mut self.may_exist) {
            let Self { position, taken, .. } = self;
            control.take_marks(position, MARKS, |number| taken.push(number));
        }
        self.taken.pop()
    }
}

/// A requested scan of all sessions, marked or not.
#[derive(Debug, Default)]
struct FullScan {
    next: u32,
    /// Number of sessions left.
    left: u32,
}

impl FullScan {
    /// Returns the next of `sessions` session numbers, which may be unused, or `None` after the last one.
    fn next(&mut self, sessions: u32) -> Option<u32> {
        self.left = self.left.checked_sub(1)?;
        let number = if self.next < sessions { self.next } else { 0 };
        self.next = number + 1;
        Some(number)
    }
}

/// A queue in two parts: the front part is due now, and the rest waits for a later round.
#[derive(Debug)]
pub(super) struct PendingQueue<T> {
    all: VecDeque<T>,
    /// Number of items that are due.
    due: usize,
}

impl<T> Default for PendingQueue<T> {
    fn default() -> Self {
        Self { all: VecDeque::new(), due: 0 }
    }
}

impl<T> PendingQueue<T> {
    /// Adds an item that is due now.
    pub(super) fn push(&mut self, item: T) {
        self.all.insert(self.due, item);
        self.due += 1;
    }

    /// Adds an item that waits until all items become due.
    pub(super) fn push_waiting(&mut self, item: T) {
        self.all.push_back(item);
    }

    /// Makes all items due.
    fn make_all_due(&mut self) {
        self.due = self.all.len();
    }

    fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    fn pop(&mut self) -> Option<T> {
        self.due = self.due.checked_sub(1)?;
        self.all.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use offcore_session::shared::Shared;

    use super::*;

    #[test]
    fn kinds_of_work_alternate() {
        let shared = Shared::new().unwrap();
        let mut backlog = PendingWork::default();
        for number in 0..2 {
            shared.control().mark(number);
            backlog.pairs().push((number, 1));
            backlog.listeners().push_waiting((number, 1));
        }
        backlog.request_full_scan(2);
        let next = |backlog: &mut PendingWork| backlog.next(shared.control(), 2);
        assert_eq!(next(&mut backlog), Some(Work::Scanned(0)), "marks are not read before a scan");
        backlog.scan_for_marks(shared.control());
        let due: Vec<_> = std::iter::from_fn(|| next(&mut backlog)).collect();
        let expected =
            [Work::PairData(0, 1), Work::Marked(1), Work::Scanned(1), Work::PairData(1, 1), Work::Marked(0)];
        assert_eq!(due, expected);
        assert!(!backlog.is_due() && backlog.has_work());
        backlog.make_all_due();
        assert_eq!(next(&mut backlog), Some(Work::Listener(0, 1)));
        backlog.start_ending(2);
        backlog.request_full_scan(2);
        let end = [(); 3].map(|()| next(&mut backlog));
        assert_eq!(end, [Some(0), Some(1), None].map(|number| Some(Work::End(number))));
    }

    #[test]
    fn application_is_queued_once() {
        let mut backlog = PendingWork::default();
        assert!(!backlog.enqueue_if_due() && !backlog.dequeue(), "no work");
        backlog.pairs().push((0, 1));
        assert!(backlog.enqueue_if_due() && !backlog.enqueue_if_due());
        assert!(backlog.dequeue() && !backlog.dequeue() && backlog.enqueue_if_due());
    }
}

//! The sessions of an application by number.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use offcore_session::control::SESSIONS;

use super::session::Session;
use super::stack_end::ClosingDescriptor;

/// The sessions of an application. A new session gets the lowest free number.
#[derive(Debug, Default)]
pub(super) struct SessionTable {
    entries: Vec<Option<Box<Session>>>,
    /// Free numbers below `entries.len()`.
    free: BinaryHeap<Reverse<u32>>,
    /// Session numbers by the kernel's socket cookie of the application's end.
    by_cookie: HashMap<u64, u32>,
}

impl SessionTable {
    /// Number of sessions.
    pub(super) fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// Upper bound (exclusive) of the session numbers.
    pub(super) fn number_bound(&self) -> u32 {
        self.entries.len() as u32
    }

    /// The number for the next session: the lowest free one. `None` if the application has the maximum number of
    /// sessions.
    pub(super) fn next_number(&self) -> Option<u32> {
        match self.free.peek() {
            Some(Reverse(number)) => Some(*number),
            None if self.entries.len() < SESSIONS => Some(self.number_bound()),
            None => None,
        }
    }

    /// Adds a session with the [next number](Self::next_number).
    pub(super) fn add(&mut self, session: Box<Session>) -> Option<u32> {
        let number = self.next_number()?;
        self.by_cookie.insert(session.cookie(), number);
        if self.free.pop().is_some() {
            self.entries[number as usize] = Some(session);
        } else {
            self.entries.push(Some(session));
        }
        Some(number)
    }

    #[inline]
    pub(super) fn get(&self, number: u32) -> Option<&Session> {
        self.entries.get(number as usize)?.as_deref()
    }

    #[inline]
    pub(super) fn get_mut(&mut self, number: u32) -> Option<&mut Session> {
        self.entries.get_mut(number as usize)?.as_deref_mut()
    }

    /// The session whose application's end has the kernel's socket `cookie`.
    pub(super) fn find(&self, cookie: u64) -> Option<u32> {
        self.by_cookie.get(&cookie).copied()
    }

    pub(super) fn remove(&mut self, number: u32) -> Option<Box<Session>> {
        let session = self.entries.get_mut(number as usize)?.take()?;
        self.free.push(Reverse(number));
        self.by_cookie.remove(&session.cookie());
        Some(session)
    }

    /// The numbers of all sessions.
    pub(super) fn numbers(&self) -> Vec<u32> {
        let entries = self.entries.iter().zip(0..);
        entries.filter(|(session, _)| session.is_some()).map(|(_, number)| number).collect()
    }

    /// Takes the stack's ends of all sessions.
    pub(super) fn take_descriptors(&mut self) -> Vec<ClosingDescriptor> {
        self.entries.iter_mut().flatten().flat_map(|session| session.end_mut().take_descriptors()).collect()
    }
}

//! What the stack knows of a flow: the connection, one that is half open, or one that has ended.

use super::addr::FlowKey;
use super::conns::Conns;
use super::handshake::Half;
use super::timewait::TimeWait;

/// What a name in the table of connections means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Entry {
    Conn(u32),
    Half(u32),
    TimeWait(u32),
}

impl Entry {
    /// Connections have numbers below this.
    pub(super) const HALF: u32 = 1 << 30;
    const TIME_WAIT: u32 = 1 << 31;

    pub(super) fn value(self) -> u32 {
        match self {
            Self::Conn(index) => index,
            Self::Half(index) => index | Self::HALF,
            Self::TimeWait(index) => index | Self::TIME_WAIT,
        }
    }

    pub(super) fn of(value: u32) -> Self {
        if value & Self::TIME_WAIT != 0 {
            Self::TimeWait(value & !Self::TIME_WAIT)
        } else if value & Self::HALF != 0 {
            Self::Half(value & !Self::HALF)
        } else {
            Self::Conn(value)
        }
    }
}

/// The flow of an entry: with parts of the stack, so that another part may change meanwhile.
#[inline]
pub(super) fn key_of(
    conns: &Conns,
    halves: &[Option<Half>],
    time_wait: &TimeWait,
    entry: Entry,
) -> Option<FlowKey> {
    match entry {
        Entry::Conn(index) => conns.peek(index).map(|conn| conn.tcb.key),
        Entry::Half(index) => halves[index as usize].as_ref().map(|half| half.both.key),
        Entry::TimeWait(index) => time_wait.get(index).map(|entry| entry.key),
    }
}

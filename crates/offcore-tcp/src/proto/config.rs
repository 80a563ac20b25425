//! What a stack is told when it is made.

use std::ops::RangeInclusive;

use offcore_session::Arena;
use offcore_session::layout::{CAPACITY, LARGE};

use super::ports::EPHEMERAL;
use super::recovery::Algorithm;
use super::steering::Share;

/// What a stack may use, and what it wants.
#[derive(Debug, Clone)]
pub struct Config {
    /// Nobody else may know it: it keeps peers from guessing sequence numbers and from choosing hash collisions.
    pub secret: [u8; 16],
    pub share: Share,
    pub connections: u32,
    pub neighbours: usize,
    /// Bytes of FIFOs, of all connections of the stack's own process together.
    pub memory: usize,
    /// Bytes that an application may leave unread of each connection, at first.
    pub receive_window: u32,
    /// Bytes that an application may write ahead of each connection, at first.
    pub send_buffer: u32,
    /// What either grows to where a connection needs it.
    pub largest_buffer: u32,
    /// Bytes of payload in a segment, at most, whatever the way would take. Below `u16::MAX` each segment is a copy of its own,
    /// even where a port would cut longer ones.
    pub largest_segment: u16,
    pub algorithm: Algorithm,
    pub ecn: bool,
    /// Ports that connections of ours begin at.
    pub ports: RangeInclusive<u16>,
}

/// Sizes of buffers in bytes of payload. 0: the application has set none, and the buffer grows as needed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Buffers {
    /// Limit of the bytes that are written and not acknowledged.
    pub send: u32,
    /// Limit of the bytes that are received and not read: the window.
    pub receive: u32,
    /// Limit of the window, whatever the buffer (`TCP_WINDOW_CLAMP`).
    pub clamp: u32,
    /// Limit of the bytes that are written and not sent (`TCP_NOTSENT_LOWAT`).
    pub unsent: u32,
}

/// Bytes that one write may add beyond [`Buffers::unsent`]: a write of up to 4096 bytes is never split.
pub(super) const ONE_WRITE: u64 = 4096;

impl Buffers {
    /// The send buffer, if it is set.
    pub(super) fn send(self, config: &Config) -> Option<u64> {
        (self.send > 0).then(|| self.send.min(config.largest_buffer).into())
    }

    /// The receive window. `usual` computes it if the application has set no receive buffer.
    pub(super) fn window(self, config: &Config, usual: impl FnOnce() -> u32) -> u32 {
        let window = if self.receive > 0 { self.receive.min(config.largest_buffer) } else { usual() };
        if self.clamp > 0 { window.min(self.clamp) } else { window }
    }

    /// The position up to which the application may write when bytes up to `sent` are sent, if that is limited.
    pub(super) fn write_limit(self, sent: u64) -> Option<u64> {
        (self.unsent > 0).then(|| sent.saturating_add(u64::from(self.unsent) + ONE_WRITE))
    }
}

/// Free bytes of a send buffer, 0 if they split a write of up to 4096 bytes, and its size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    pub free: u64,
    pub of: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            secret: [0; 16],
            share: Share::default(),
            connections: 1 << 20,
            neighbours: 1 << 14,
            memory: 256 << 20,
            receive_window: 256 << 10,
            send_buffer: 256 << 10,
            largest_buffer: (CAPACITY - LARGE) as u32,
            largest_segment: u16::MAX,
            algorithm: Algorithm::default(),
            ecn: true,
            ports: EPHEMERAL,
        }
    }
}

impl Config {
    /// Bytes that a buffer may grow to now: no connection is promised more than a quarter of what is free.
    pub(super) fn buffer_limit(&self, arena: &Arena) -> u32 {
        let free = arena.free().large * LARGE / 4;
        self.largest_buffer.min(u32::try_from(free).unwrap_or(u32::MAX))
    }
}

//! The configuration of a stack.

use std::ops::RangeInclusive;

use offcore_session::Arena;
use offcore_session::layout::{CAPACITY, LARGE};

use super::ports::EPHEMERAL;
use super::recovery::Algorithm;
use super::steering::Share;

/// The resources and parameters of a stack.
#[derive(Debug, Clone)]
pub struct Config {
    /// Must be kept secret: it prevents peers from guessing sequence numbers and from causing hash collisions.
    pub secret: [u8; 16],
    pub share: Share,
    /// Maximum number of connections, datagram sockets and listeners. Users that have any get equal shares. The stack's
    /// own process counts as a user.
    pub connections: u32,
    pub neighbours: usize,
    /// Total FIFO memory in bytes of all connections of the stack's own process.
    pub memory: usize,
    /// Initial number of bytes per connection that an application may leave unread.
    pub receive_window: u32,
    /// Initial number of bytes per connection that an application may write ahead.
    pub send_buffer: u32,
    /// Maximum size to which either buffer grows if a connection needs it.
    pub largest_buffer: u32,
    /// Maximum payload of a segment in bytes, independent of the route. Below `u16::MAX` each segment is copied
    /// separately, even if the port supports segmentation offload.
    pub largest_segment: u16,
    pub algorithm: Algorithm,
    pub ecn: bool,
    /// Local ports for outgoing connections.
    pub ports: RangeInclusive<u16>,
}

/// Buffer sizes in bytes of payload. 0: the application has set none, and the buffer grows as needed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Buffers {
    /// Limit of written and unacknowledged bytes.
    pub send: u32,
    /// Limit of received and unread bytes: the window.
    pub receive: u32,
    /// Limit of the window, independent of the buffer (`TCP_WINDOW_CLAMP`).
    pub clamp: u32,
    /// Limit of written and unsent bytes (`TCP_NOTSENT_LOWAT`).
    pub unsent: u32,
}

/// Bytes that one write may add beyond [`Buffers::unsent`]: a write of up to 4096 bytes is never split.
pub(super) const ONE_WRITE: u64 = 4096;

impl Buffers {
    /// Returns the send buffer, if it is set.
    pub(super) fn send(self, config: &Config) -> Option<u64> {
        (self.send > 0).then(|| self.send.min(config.largest_buffer).into())
    }

    /// Returns the receive window. `usual` computes it if the application has set no receive buffer.
    pub(super) fn window(self, config: &Config, usual: impl FnOnce() -> u32) -> u32 {
        let window = if self.receive > 0 { self.receive.min(config.largest_buffer) } else { usual() };
        if self.clamp > 0 { window.min(self.clamp) } else { window }
    }

    /// Returns the position up to which the application may write when bytes up to `sent` are sent, if that is limited.
    pub(super) fn write_limit(self, sent: u64) -> Option<u64> {
        (self.unsent > 0).then(|| sent.saturating_add(u64::from(self.unsent) + ONE_WRITE))
    }
}

/// Free bytes of a send buffer, or 0 if they would split a write of up to 4096 bytes, and its size.
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
    /// Returns the current limit of a buffer's size: no connection is promised more than a quarter of the free memory.
    pub(super) fn buffer_limit(&self, arena: &Arena) -> u32 {
        let free = arena.free().large * LARGE / 4;
        self.largest_buffer.min(u32::try_from(free).unwrap_or(u32::MAX))
    }
}

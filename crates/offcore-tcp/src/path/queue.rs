//! The send queue of an interface's port, with a count of its buffers.

use std::collections::VecDeque;
use std::ops::RangeBounds;

use offcore_mem::{Packet, Pool};

use super::buffers;

/// Packets to be sent on one interface, in order.
#[derive(Debug)]
pub struct SendQueue {
    packets: VecDeque<Packet>,
    pool: &'static Pool,
    /// The number of buffers in addition to each packet's first buffer.
    more: usize,
}

impl SendQueue {
    /// Creates an empty queue for packets of `pool`.
    pub(super) fn new(pool: &'static Pool) -> Self {
        Self { packets: VecDeque::new(), pool, more: 0 }
    }

    /// Returns the number of packets.
    #[inline]
    pub fn len(&self) -> usize {
        self.packets.len()
    }

    /// Returns whether the queue is empty.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.packets.is_empty()
    }

    /// Returns the number of buffers.
    #[inline]
    pub fn buffers(&self) -> usize {
        self.packets.len() + self.more
    }

    /// Appends a packet.
    #[inline]
    pub fn push_back(&mut self, packet: Packet) {
        self.more += buffers(&packet, self.pool) - 1;
        self.packets.push_back(packet);
    }

    /// Returns a packet to the front of the queue.
    #[inline]
    pub fn push_front(&mut self, packet: Packet) {
        self.more += buffers(&packet, self.pool) - 1;
        self.packets.push_front(packet);
    }

    /// Removes packets.
    ///
    /// # Panics
    /// Panics if the range exceeds the queue.
    pub fn drain(&mut self, range: impl RangeBounds<usize> + Clone) -> impl Iterator<Item = Packet> {
        if self.more > 0 {
            let taken = self.packets.range(range.clone());
            self.more -= taken.map(|packet| buffers(packet, self.pool) - 1).sum::<usize>();
        }
        self.packets.drain(range)
    }
}

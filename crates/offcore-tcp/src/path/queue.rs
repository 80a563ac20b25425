//! Packets that wait for an interface's port, and how many buffers they hold.

use std::collections::VecDeque;
use std::ops::RangeBounds;

use offcore_mem::{Packet, Pool};

use super::buffers;

/// Packets to be sent by one interface, in order.
#[derive(Debug)]
pub struct SendQueue {
    packets: VecDeque<Packet>,
    pool: &'static Pool,
    /// Buffers beside each packet's first one.
    more: usize,
}

impl SendQueue {
    /// An empty one of `pool`'s packets.
    pub(super) fn new(pool: &'static Pool) -> Self {
        Self { packets: VecDeque::new(), pool, more: 0 }
    }

    /// How many packets wait.
    #[inline]
    pub fn len(&self) -> usize {
        self.packets.len()
    }

    /// Whether none does.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.packets.is_empty()
    }

    /// How many buffers they hold.
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

    /// Gives back a packet that was taken from the front.
    #[inline]
    pub fn push_front(&mut self, packet: Packet) {
        self.more += buffers(&packet, self.pool) - 1;
        self.packets.push_front(packet);
    }

    /// Takes packets out.
    ///
    /// # Panics
    /// When there are not as many.
    pub fn drain(&mut self, range: impl RangeBounds<usize> + Clone) -> impl Iterator<Item = Packet> {
        if self.more > 0 {
            let taken = self.packets.range(range.clone());
            self.more -= taken.map(|packet| buffers(packet, self.pool) - 1).sum::<usize>();
        }
        self.packets.drain(range)
    }
}

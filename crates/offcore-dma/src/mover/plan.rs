//! The plan of a list: the distribution of its copies between core and channel, and the available room.

use super::choice::ALL;
use super::queue::MoverQueue;
use super::{ChannelId, Mode};
use crate::channel::CopyOp;

/// The plan for the next copies of a queue.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub(super) channel: Option<ChannelId>,
    /// Number of packets that fit the reorder ring.
    pub packets: usize,
    /// Number of copies that fit the list: the channel's room, if the channel makes all copies.
    pub copies: usize,
    /// Whether the queue is in mode `auto`.
    pub(super) auto: bool,
    /// Minimum length of copies that go to the channel. The fields below are only used if it is not [`ALL`].
    pub(super) from: u32,
    /// The channel's room for copies.
    pub(super) room: u32,
    /// Number of copies entered so far for the channel.
    pub(super) by_engine: u32,
    /// Number of copies entered so far for the core.
    pub(super) by_core: u32,
    /// Number of copies for the core that were meant for the channel.
    pub(super) overflow: u32,
    /// Whether the core copies although the queue has channels.
    pub(super) engine_unavailable: bool,
}

impl Plan {
    #[inline(always)]
    pub(super) fn core(packets: usize) -> Self {
        Self {
            channel: None,
            packets,
            copies: usize::MAX,
            auto: false,
            from: ALL,
            room: 0,
            by_engine: 0,
            by_core: 0,
            overflow: 0,
            engine_unavailable: false,
        }
    }

    /// Returns a plan in which the channel, with this room, makes the copies of at least `from` bytes.
    pub(super) fn channel(channel: ChannelId, packets: usize, from: u32, room: usize) -> Self {
        let copies = if from == ALL { room } else { usize::MAX };
        let room = u32::try_from(room).unwrap_or(u32::MAX);
        Self { channel: Some(channel), copies, from, room, ..Self::core(packets) }
    }

    /// Returns a plan in which the core makes the next copies, whatever the queue's binding is. It is for a packet with
    /// more copies than any channel has room for.
    #[cold]
    pub(crate) fn core_fallback(queue: &MoverQueue) -> Self {
        let (engine_unavailable, auto) = (queue.mode != Mode::Cpu, queue.mode == Mode::Auto);
        Self { engine_unavailable, auto, ..Self::core(queue.ring.room()) }
    }

    /// Whether the core makes every copy. Then no packet has outstanding copies after the list is submitted.
    #[inline(always)]
    pub fn by_core(&self) -> bool {
        self.channel.is_none()
    }

    /// Whether some copies go to the channel and others to the core.
    #[inline(always)]
    pub(crate) fn is_mixed(&self) -> bool {
        self.from != ALL
    }

    /// For a mixed plan, returns the number of outstanding copies with which the packet of `copies` is entered in the
    /// reorder ring: all of them, or 0 if the core makes them. Call it once per packet.
    #[inline(always)]
    pub(crate) fn outstanding(&mut self, copies: &[CopyOp]) -> u16 {
        let n = copies.len() as u32;
        let len = if n == 1 { copies[0].len } else { mean_len(copies) };
        let wanted = len >= self.from;
        if wanted && self.by_engine + n <= self.room {
            self.by_engine += n;
            return n as u16;
        }
        self.overflow += if wanted { n } else { 0 };
        self.by_core += n;
        0
    }
}

/// Returns the average length of a packet's copies in bytes.
#[cold]
fn mean_len(copies: &[CopyOp]) -> u32 {
    let total: u64 = copies.iter().map(|copy| u64::from(copy.len)).sum();
    u32::try_from(total / copies.len().max(1) as u64).unwrap_or(u32::MAX)
}

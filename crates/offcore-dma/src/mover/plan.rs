//! The plan of a list: who makes which of its copies, and how many there is room for.

use super::choice::ALL;
use super::queue::Queue;
use super::{ChannelId, Mode};
use crate::channel::CopyOp;

/// Who makes the next copies of a queue, and how many there is room for.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub(super) channel: Option<ChannelId>,
    /// Packets that fit the reorder ring.
    pub packets: usize,
    /// Copies that fit the list: what the channel has room for, when it makes them all.
    pub copies: usize,
    /// The queue's mode.
    pub(super) auto: bool,
    /// Copies of at least so many bytes go to the channel. Unless that is all, the fields below are used.
    pub(super) from: u32,
    /// Copies that the channel still has room for.
    pub(super) room: u32,
    /// Copies entered so far for the channel.
    pub(super) by_engine: u32,
    /// Copies entered so far for the core.
    pub(super) by_core: u32,
    /// Copies of those that were meant for the channel.
    pub(super) overflow: u32,
    /// The core copies although the queue has channels.
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

    /// The channel, which has this much room, makes the copies of at least `from` bytes.
    pub(super) fn channel(channel: ChannelId, packets: usize, from: u32, room: usize) -> Self {
        let copies = if from == ALL { room } else { usize::MAX };
        let room = u32::try_from(room).unwrap_or(u32::MAX);
        Self { channel: Some(channel), copies, from, room, ..Self::core(packets) }
    }

    /// The core makes the queue's next copies, whoever is bound to it: for a packet that has more copies than there is
    /// room for in any channel.
    #[cold]
    pub(crate) fn by_core_instead(queue: &Queue) -> Self {
        let (engine_unavailable, auto) = (queue.mode != Mode::Cpu, queue.mode == Mode::Auto);
        Self { engine_unavailable, auto, ..Self::core(queue.ring.room()) }
    }

    /// Whether the core makes every copy: then no packet has outstanding copies once the list is submitted.
    #[inline(always)]
    pub fn by_core(&self) -> bool {
        self.channel.is_none()
    }

    /// Whether some copies go to the channel and others to the core.
    #[inline(always)]
    pub(crate) fn is_mixed(&self) -> bool {
        self.from != ALL
    }

    /// Of a mixed plan: how many outstanding copies the packet that `copies` make is entered with in the reorder ring, all
    /// of them, or none when the core will make them. Ask once for each packet.
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

/// Bytes of a packet's copies, on average.
#[cold]
fn mean_len(copies: &[CopyOp]) -> u32 {
    let total: u64 = copies.iter().map(|copy| u64::from(copy.len)).sum();
    u32::try_from(total / copies.len().max(1) as u64).unwrap_or(u32::MAX)
}

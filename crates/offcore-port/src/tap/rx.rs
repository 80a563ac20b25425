//! Receiving from a TAP interface.
//!
//! The length of the next packet is unknown, so it is read into the buffer of an ordinary packet, followed by a
//! permanent set of spare buffers that together have room for the longest packet. Spare buffers that a long packet has
//! taken are replaced before the next read.
//!
//! The kernel examines each of these buffers, whether it needs them or not, which makes reading an ordinary packet take
//! a quarter longer. If no long packet has arrived lately, one scratch buffer therefore replaces all spare buffers, and
//! the first long packet is copied out of it.

use std::io::IoSliceMut;
use std::mem;
use std::os::fd::AsFd;

use arrayvec::ArrayVec;
use offcore_mem::{Burst, HEADROOM, Packet, Pool, PoolCache};
use offcore_stats::Stage;
use offcore_wire::ethernet;
use offcore_wire::virtio_net::{HEADER_LEN, NetHeader};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use super::Queue;
use crate::{Context, DropReason, RxCounters, RxQueue, Wake, room};

/// Offset at which a packet is read: its header ends where the packet's data begins.
const HEADER_AT: usize = HEADROOM - HEADER_LEN;
/// Maximum number of spare buffers: sufficient for packets of 64 KiB with the smallest chunks.
const MAX_SPARES: usize = 40;

/// Returns the number of spare buffers that packets of up to `longest` bytes need.
pub(super) fn spares(pool: &Pool, longest: usize) -> usize {
    // One byte more, to distinguish a packet that just fits from a truncated one.
    let beyond = (longest + 1).saturating_sub(pool.data_room());
    beyond.div_ceil(pool.chunk_size()).min(MAX_SPARES)
}

/// Number of consecutive ordinary packets after which no long packet is expected.
const ORDINARY_RUN: u32 = 64;

/// The receiving half of a queue.
#[derive(Debug)]
pub(super) struct TapRx {
    queue: Queue,
    counters: RxCounters,
    pool: &'static Pool,
    /// Spare buffers, each covering its whole chunk.
    spares: ArrayVec<Packet, MAX_SPARES>,
    /// The required number of spare buffers.
    wanted: usize,
    /// A scratch buffer as long as all spare buffers together.
    scratch: Box<[u8]>,
    /// Number of packets since the last long one.
    ordinary: u32,
}

impl TapRx {
    /// Receives packets of up to `longest` bytes into chunks of `pool`.
    pub(super) fn new(queue: Queue, counters: RxCounters, pool: &'static Pool, longest: usize) -> Self {
        let wanted = spares(pool, longest);
        let scratch = vec![0; wanted * pool.chunk_size()].into();
        Self { queue, counters, pool, spares: ArrayVec::new(), wanted, scratch, ordinary: ORDINARY_RUN }
    }

    /// Refills the spare buffers; returns whether all are available.
    #[inline]
    fn stock(&mut self, cache: &mut PoolCache) -> bool {
        while self.spares.len() < self.wanted {
            let Some(spare) = cache.take_sized(0, self.pool.chunk_size()) else { return false };
            self.spares.push(spare);
        }
        true
    }

    /// Reads one packet into `first` and the spare buffers; returns `None` if no packet waits. A rejected packet uses
    /// no buffers.
    #[inline]
    fn receive(&mut self, first: &mut Packet) -> Option<Result<usize, DropReason>> {
        let pool = self.pool;
        first.set_range(pool, HEADER_AT, HEADER_LEN + pool.data_room());
        let room = first.len() + self.spares.len() * pool.chunk_size();
        let by_scratch = self.ordinary >= ORDINARY_RUN;
        let read = if self.spares.is_empty() {
            rustix::io::read(&self.queue.file, first.bytes_mut())
        } else if by_scratch {
            let mut parts = [first.bytes_mut(), &mut *self.scratch].map(IoSliceMut::new);
            rustix::io::readv(&self.queue.file, &mut parts)
        } else {
            let spares = self.spares.iter_mut().map(Packet::bytes_mut);
            let mut parts: ArrayVec<IoSliceMut<'_>, { MAX_SPARES + 1 }> =
                std::iter::once(first.bytes_mut()).chain(spares).map(IoSliceMut::new).collect();
            rustix::io::readv(&self.queue.file, &mut parts)
        };
        let read = match read {
            Ok(read) => read,
            Err(Errno::AGAIN) => return None,
            Err(error) => {
                self.queue.note(error);
                return None;
            }
        };
        // The kernel truncates packets that do not fit without reporting it. The buffers have at least one byte more
        // than the longest packet, so a packet that fills them was truncated: the MTU has been raised since the port
        // was opened.
        if read >= room {
            return Some(Err(DropReason::TooBig));
        }
        let header = first.bytes().first_chunk::<HEADER_LEN>().map(NetHeader::from_bytes).unwrap_or_default();
        let len = read.saturating_sub(HEADER_LEN);
        if len < ethernet::HEADER_LEN || header.check(len).is_err() {
            return Some(Err(DropReason::Malformed));
        }
        first.set_range(pool, HEADROOM, len.min(pool.data_room()));
        self.ordinary = self.ordinary.saturating_add(1);
        if len > first.len() {
            self.ordinary = 0;
            if by_scratch {
                self.unpack(len - first.len());
            }
        }
        if header.leaves_work() {
            // copy-ok: the virtio-net header
            first.headroom_mut(HEADER_LEN).copy_from_slice(&header.essence().to_bytes());
            first.set_offload(true);
        }
        Some(Ok(len))
    }

    /// Copies the first `len` bytes of the scratch buffer to the spare buffers.
    #[cold]
    fn unpack(&mut self, len: usize) {
        let parts = self.scratch[..len].chunks(self.pool.chunk_size());
        for (spare, part) in self.spares.iter_mut().zip(parts) {
            // copy-ok: one packet, the first long one in a while
            spare.bytes_mut()[..part.len()].copy_from_slice(part);
        }
    }

    /// Returns the packet of `len` bytes that begins in `first` and continues in spare buffers.
    #[cold]
    fn join(&mut self, mut first: Packet, len: usize) -> Packet {
        let mut beyond = len - first.len();
        let used = beyond.div_ceil(self.pool.chunk_size());
        for spare in &mut self.spares[..used] {
            spare.truncate(beyond);
            beyond -= spare.len();
        }
        let mut rest: Option<Packet> = None;
        for spare in self.spares.drain(..used).rev() {
            rest = Some(match rest {
                Some(rest) => self.pool.link(spare, rest),
                None => spare,
            });
        }
        if let Some(rest) = rest {
            first = self.pool.link(first, rest);
        }
        first
    }

    /// Returns whether a packet waits although no buffer is available to read it.
    #[cold]
    fn is_waiting(&self) -> bool {
        let mut file = [PollFd::new(&self.queue.file, PollFlags::IN)];
        rustix::event::poll(&mut file, Some(&Timespec::default())).is_ok()
            && file[0].revents().contains(PollFlags::IN)
    }
}

impl RxQueue for TapRx {
    fn rx(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        let wanted = room(ctx, burst);
        self.queue.follow();
        let (mut packets, mut bytes) = (0, 0);
        while packets < wanted {
            let first = if self.stock(ctx.cache) { ctx.cache.take() } else { None };
            let Some(mut first) = first else {
                self.counters.starved(self.is_waiting().into());
                break;
            };
            match self.receive(&mut first) {
                Some(Ok(len)) => {
                    let packet = if len > first.len() { self.join(first, len) } else { first };
                    (packets, bytes) = (packets + 1, bytes + len as u64);
                    burst.push(packet);
                    continue;
                }
                Some(Err(reason)) => self.counters.drop(reason, 1),
                None => {
                    ctx.cache.free(first);
                    break;
                }
            }
            ctx.cache.free(first);
        }
        if packets > 0 {
            self.counters.add(packets as u64, bytes);
            ctx.clock.lap(Stage::Rx);
        }
    }

    fn counters(&self) -> &RxCounters {
        &self.counters
    }

    /// The descriptor is readable while a packet waits, so no event needs to be requested and no second check is
    /// needed.
    fn arm(&mut self) -> Wake<'_> {
        // The file of a deleted interface is always readable, to report the error.
        if self.queue.is_lost() {
            return Wake::Never;
        }
        Wake::Event(self.queue.file.as_fd())
    }

    /// No packets are in flight. The spare buffers are returned to the pool.
    fn drain(&mut self, ctx: &mut Context<'_>, _burst: &mut Burst) -> usize {
        ctx.cache.free_all(self.spares.drain(..));
        0
    }
}

impl Drop for TapRx {
    fn drop(&mut self) {
        let spares = mem::take(&mut self.spares);
        if !spares.is_empty() {
            self.pool.cache().free_all(spares);
        }
    }
}

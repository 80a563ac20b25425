//! Receiving from a TAP interface.
//!
//! How long the next packet is cannot be known, so it is read into the buffer of an ordinary packet and, behind that,
//! into a standing set of spare buffers that together have room for the longest. Those that a long packet took are
//! replaced before the next read.
//!
//! The kernel looks at each of those buffers, whether it needs it or not, which makes the read of an ordinary packet a
//! quarter slower. So when long packets have not been seen lately, one scratch buffer stands for all the spares, and the
//! first long packet is copied from there.

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

/// Where a packet is read to: its header in front of where packets begin.
const HEADER_AT: usize = HEADROOM - HEADER_LEN;
/// Spare buffers, at most: enough for packets of 64 KiB in the smallest chunks.
const MAX_SPARES: usize = 40;

/// Spare buffers that packets of up to `longest` bytes need.
pub(super) fn spares(pool: &Pool, longest: usize) -> usize {
    // One byte more, to tell a packet that just fits from one that was cut.
    let beyond = (longest + 1).saturating_sub(pool.data_room());
    beyond.div_ceil(pool.chunk_size()).min(MAX_SPARES)
}

/// Ordinary packets in a row after which no long one is expected.
const ORDINARY_RUN: u32 = 64;

/// The receiving half of a queue.
#[derive(Debug)]
pub(super) struct TapRx {
    queue: Queue,
    counters: RxCounters,
    pool: &'static Pool,
    /// Spare buffers, each the whole of its chunk.
    spares: ArrayVec<Packet, MAX_SPARES>,
    /// How many there shall be.
    wanted: usize,
    /// As long as all of them together.
    scratch: Box<[u8]>,
    /// Packets since the last long one.
    ordinary: u32,
}

impl TapRx {
    /// Receives packets of up to `longest` bytes into chunks of `pool`.
    pub(super) fn new(queue: Queue, counters: RxCounters, pool: &'static Pool, longest: usize) -> Self {
        let wanted = spares(pool, longest);
        let scratch = vec![0; wanted * pool.chunk_size()].into();
        Self { queue, counters, pool, spares: ArrayVec::new(), wanted, scratch, ordinary: ORDINARY_RUN }
    }

    /// Sees to it that all spare buffers are there; whether they are.
    #[inline]
    fn stock(&mut self, cache: &mut PoolCache) -> bool {
        while self.spares.len() < self.wanted {
            let Some(spare) = cache.take_sized(0, self.pool.chunk_size()) else { return false };
            self.spares.push(spare);
        }
        true
    }

    /// Reads one packet into `first` and the spare buffers; `None` when none is waiting. A packet that is refused has
    /// used nothing.
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
        // The kernel cuts what does not fit and does not say so. There is room to spare, so a packet that fills all
        // of it was cut: the MTU has been raised since.
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

    /// Moves the first `len` bytes of the scratch buffer to the spare ones.
    #[cold]
    fn unpack(&mut self, len: usize) {
        let parts = self.scratch[..len].chunks(self.pool.chunk_size());
        for (spare, part) in self.spares.iter_mut().zip(parts) {
            // copy-ok: one packet, the first long one in a while
            spare.bytes_mut()[..part.len()].copy_from_slice(part);
        }
    }

    /// The packet of `len` bytes that begins in `first` and goes on in spare buffers.
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

    /// Whether a packet is waiting, for when there is no buffer to read it to.
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

    /// Readable as long as a packet waits: nothing has to be asked for, nor looked at again.
    fn arm(&mut self) -> Wake<'_> {
        // The file of a deleted interface is always ready, to say so.
        if self.queue.is_lost() {
            return Wake::Never;
        }
        Wake::Event(self.queue.file.as_fd())
    }

    /// Nothing is on its way; the spare buffers go back.
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

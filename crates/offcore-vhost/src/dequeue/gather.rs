//! Walking the chains of a transmitting guest, and allocating packet buffers for their content.

use arrayvec::ArrayVec;
use offcore_dma::channel::Token;
use offcore_dma::copy_queue::List;
use offcore_dma::{Batch, CopyOp};
use offcore_mem::{Burst, HEADROOM, Packet, PoolCache};
use offcore_ring::RingError;
use offcore_ring::device::{Buffer, Chain, DeviceQueue, Direction, Double, Single, Wanted};

use super::{Dequeued, MAX_FRAME, SHORTEST};
use crate::cell::VringConfig;
use crate::features::NET_HEADER;
use crate::pieces::{self, MAX_PIECES, Piece, pieces_of};
use crate::room::{Allowance, LONGEST_SINGLE};
use crate::vring::{Chains, InFlight, Out};

/// Result of gathering a list of copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Gathered {
    /// All chains that could be submitted were submitted. There may have been none.
    Some,
    /// Nothing was submitted: the first chain has more copies than fit.
    NoRoom,
}

/// Gathers the copies of one batch. Packets that are complete when the batch is submitted go to the burst.
pub(super) struct DequeueGather<'a, 'b, const IMMEDIATE: bool> {
    pub(super) config: &'a VringConfig,
    pub(super) batch: &'a mut Batch<'b, InFlight, IMMEDIATE>,
    pub(super) cache: &'a mut PoolCache,
    pub(super) burst: &'a mut Burst,
    pub(super) chains: &'a mut Chains,
    pub(super) dequeued: &'a mut Dequeued,
    pub(super) allowance: Allowance,
}

/// The reason why a chain does not become a packet.
enum Unfit {
    /// Longer than any packet.
    TooBig(Chain),
    /// Shorter than the headers.
    TooShort(Chain),
    /// No packet buffer is free: try again later.
    Starved,
    /// The list has no room for its copies: the next list begins with this chain.
    ListFull,
    /// The driver violated the virtio specification.
    Broken(RingError),
}

/// A kind of chain that is processed in runs.
trait Found {
    /// Maximum number of copies for one chain.
    const COPIES: usize;

    /// The buffer ID of the chain.
    fn id(&self) -> u16;

    /// The first buffer.
    fn first(&self) -> Buffer;

    /// The second buffer; its length is 0 if the chain has only one.
    fn second(&self) -> Buffer;

    /// The length of the chain in bytes. It does not exceed the requested maximum.
    #[inline(always)]
    fn len(&self) -> u32 {
        self.first().len.wrapping_add(self.second().len)
    }

    /// Calls `push` with the copies to `dst`.
    #[inline(always)]
    fn copies(&self, dst: *mut u8, token: Token, mut push: impl FnMut(CopyOp)) {
        let (first, second) = (self.first(), self.second());
        push(CopyOp { src: first.addr.as_ptr(), dst, len: first.len, token });
        if second.len > 0 {
            let dst = dst.wrapping_add(first.len as usize);
            push(CopyOp { src: second.addr.as_ptr(), dst, len: second.len, token });
        }
    }
}

impl Found for Single {
    const COPIES: usize = 1;

    #[inline(always)]
    fn id(&self) -> u16 {
        self.id()
    }

    #[inline(always)]
    fn first(&self) -> Buffer {
        Buffer { addr: self.addr(), len: self.len() }
    }

    #[inline(always)]
    fn second(&self) -> Buffer {
        Buffer { addr: self.addr(), len: 0 }
    }
}

impl Found for Double {
    const COPIES: usize = 2;

    #[inline(always)]
    fn id(&self) -> u16 {
        self.id
    }

    #[inline(always)]
    fn first(&self) -> Buffer {
        self.first
    }

    #[inline(always)]
    fn second(&self) -> Buffer {
        self.second
    }
}

impl<const IMMEDIATE: bool> DequeueGather<'_, '_, IMMEDIATE> {
    /// Gathers the copies of at most `wanted` packets. Returns the number of chains and the result.
    #[inline(always)]
    pub(super) fn burst<Q: DeviceQueue>(
        mut self,
        queue: &mut Q,
        wanted: usize,
    ) -> (usize, Result<Gathered, RingError>) {
        let known = match queue.look(wanted) {
            Ok(0) => return (0, Ok(Gathered::Some)),
            Ok(known) => known as u16,
            Err(error) => return (0, Err(error)),
        };
        queue.prefetch_used(known.into());
        let memory = &self.config.memory;
        let wanted = Wanted {
            direction: Direction::Readable,
            least: SHORTEST as u32,
            most: (self.cache.pool().data_room() as u32).min(LONGEST_SINGLE),
        };
        let (mut taken, mut ahead) = (0, 0);
        let result = loop {
            // Chains of one buffer that fits into one packet buffer: the most frequent case.
            let most = self.most::<Single>(known - ahead);
            let run = self.run(queue.singles(ahead, most, memory, wanted));
            if IMMEDIATE {
                queue.push_used_singles(ahead, run, Direction::Readable);
            }
            (ahead, taken) = (ahead + run, taken + usize::from(run));
            if ahead >= known {
                break Ok(Gathered::Some);
            }
            // Chains of two buffers, headers and payload: nearly all other chains.
            let most = self.most::<Double>(known - ahead);
            let run = self.run(queue.doubles(ahead, most, memory, wanted));
            if IMMEDIATE {
                queue.push_used_singles(ahead, run, Direction::Readable);
            }
            (ahead, taken) = (ahead + run, taken + usize::from(run));
            if ahead >= known {
                break Ok(Gathered::Some);
            }
            if run > 0 {
                continue;
            }
            match self.other(queue, ahead) {
                Ok(entries) => (ahead, taken) = (ahead + entries, taken + 1),
                Err(Unfit::Broken(error)) => break Err(error),
                Err(Unfit::ListFull) if taken == 0 => break Ok(Gathered::NoRoom),
                Err(_) => break Ok(Gathered::Some),
            }
            if ahead >= known || self.allowance.is_exhausted() {
                break Ok(Gathered::Some);
            }
        };
        queue.consume(ahead);
        (taken, result)
    }

    /// Returns how many of `left` chains of this kind fit into the batch.
    #[inline(always)]
    fn most<F: Found>(&self, left: u16) -> u16 {
        usize::from(left).min(self.batch.room() / F::COPIES) as u16
    }

    /// Takes packet buffers for a run of chains and gathers their copies. Returns the number of chains.
    #[inline(always)]
    fn run<F: Found>(&mut self, run: &[F]) -> u16 {
        if IMMEDIATE {
            return take_now(run, self.batch.list(), self.burst, self.cache) as u16;
        }
        let mut taken = 0;
        for from in run {
            let len = from.len() as usize - NET_HEADER;
            let Some(packet) = self.cache.take_sized(HEADROOM + NET_HEADER, len) else { break };
            let token = self.batch.token();
            from.copies(start_of(&packet), token, |copy| self.batch.list().push(copy));
            self.enter(Some(packet), Chain::one(from.id()));
            taken += 1;
        }
        taken
    }

    /// Enters the packet whose copies were added last, or no packet, and the chain of its data.
    #[inline(always)]
    fn enter(&mut self, packet: Option<Packet>, chain: Chain) {
        self.chains.push(Out { chain, written: 0 });
        self.batch.enter(InFlight { packet, chains: 1 });
    }

    /// Gathers the copies of the chain at `ahead`, which may have any form. Returns the number of its entries.
    #[cold]
    fn other<Q: DeviceQueue>(&mut self, queue: &mut Q, ahead: u16) -> Result<u16, Unfit> {
        let (packet, chain) = match self.chain(queue, ahead) {
            Ok((packet, chain)) => (Some(packet), chain),
            Err(Unfit::TooBig(chain)) => {
                self.dequeued.too_big += 1;
                (None, chain)
            }
            Err(Unfit::TooShort(chain)) => {
                self.dequeued.malformed += 1;
                (None, chain)
            }
            Err(unfit) => {
                self.dequeued.starved |= matches!(unfit, Unfit::Starved);
                return Err(unfit);
            }
        };
        if IMMEDIATE {
            queue.push_used(chain, 0);
            self.burst.extend(packet);
        } else {
            // A chain without a packet is entered as well, to keep the order.
            self.enter(packet, chain);
        }
        Ok(chain.entries)
    }

    /// Gathers the copies of the chain at `ahead` into new packet buffers: the header goes into the headroom, followed
    /// by the payload. On an error, nothing is gathered.
    fn chain<Q: DeviceQueue>(&mut self, queue: &mut Q, ahead: u16) -> Result<(Packet, Chain), Unfit> {
        let mut from: ArrayVec<Piece, MAX_PIECES> = ArrayVec::new();
        let mut total = 0usize;
        let memory = &self.config.memory;
        let mut most = MAX_PIECES;
        let walked = queue.walk(ahead, memory, Direction::Readable, &mut most, |Buffer { addr, len }| {
            from.push(Piece { addr: addr.as_ptr(), len });
            total += len as usize;
        });
        let chain = walked.map_err(Unfit::Broken)?;
        self.allowance.spend(MAX_PIECES - most, total);
        if total < SHORTEST {
            return Err(Unfit::TooShort(chain));
        }
        let frame = total - NET_HEADER;
        let pool = self.cache.pool();
        if frame > MAX_FRAME || frame.div_ceil(pool.data_room()) > MAX_PIECES {
            return Err(Unfit::TooBig(chain));
        }
        let packet = self.cache.take_chain(HEADROOM + NET_HEADER, frame).ok_or(Unfit::Starved)?;
        let to = pieces_of(pool, &packet);
        if from.len() + to.len() - 1 > self.batch.room() {
            self.cache.free(packet);
            return Err(Unfit::ListFull);
        }
        let token = self.batch.token();
        pieces::copies(&from, &to, token, |copy| self.batch.list().push(copy));
        Ok((packet, chain))
    }
}

/// Takes packet buffers for a run of chains and gathers their copies. Returns the number of chains. This is a separate
/// function so that its loop has all registers available.
#[inline(never)]
fn take_now<F: Found>(run: &[F], list: &mut List, burst: &mut Burst, cache: &mut PoolCache) -> usize {
    let most = run.len().min(list.remaining_capacity() / F::COPIES).min(burst.remaining_capacity());
    let (copies, packets) = (list.len(), burst.len());
    // SAFETY: the pointer is within the array of the vector, or at its end.
    let first = unsafe { list.as_mut_ptr().add(copies) };
    // SAFETY: the pointer is within the array of the vector, or at its end.
    let (mut copy, mut place) = (first, unsafe { burst.as_mut_ptr().add(packets) });
    // The chains are at least as long as the header.
    let len = |from: &F| (from.len() as usize).wrapping_sub(NET_HEADER);
    let taken = cache.take_each(HEADROOM + NET_HEADER, &run[..most], len, |from, packet| {
        from.copies(start_of(&packet), 0, |made| {
            // SAFETY: this is called at most `most * COPIES` times, and the list has room for that many copies.
            unsafe {
                copy.write(made);
                copy = copy.add(1);
            }
        });
        // SAFETY: `burst` has room for `most` packets, and this is called once per packet.
        unsafe {
            place.write(packet);
            place = place.add(1);
        }
    });
    // SAFETY: these elements were just initialized, and `copy` was derived from `first`.
    unsafe {
        list.set_len(copies + copy.offset_from_unsigned(first));
        burst.set_len(packets + taken);
    }
    taken
}

/// The address of a packet's virtio-net header.
#[inline(always)]
pub(super) fn start_of(packet: &Packet) -> *mut u8 {
    packet.data().as_ptr().wrapping_sub(NET_HEADER)
}

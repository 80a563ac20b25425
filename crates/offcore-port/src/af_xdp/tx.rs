//! Sending: packets are put into the TX ring, and their buffers come back through the completion ring.
//!
//! In copy mode, the system call itself sends: it takes packets off the TX ring, as many as its budget and the socket's
//! send buffer allow, and stops at the first packet that the interface rejects. The call is therefore repeated as long
//! as it makes progress. Packets that are left are sent in the next round.

use std::sync::Arc;
use std::time::{Duration, Instant};

use offcore_mem::{Burst, Packet, Pool, PoolCache};
use offcore_stats::Stage;
use offcore_wire::ethernet;
use rustix::io::Errno;

use super::lent::Lent;
use super::rings::{CONTINUED, Consumer, Descriptor, Producer};
use super::socket::Socket;
use super::{Line, MAX_BUFFERS};
use crate::base::cell::End;
use crate::{Accepts, Context, DropReason, TxCounters, TxQueue};

/// A stopping queue waits this long for the next buffer to come back. Closing the socket then returns the rest.
const TIMEOUT: Duration = Duration::from_secs(1);

/// A number of packets and of their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sum {
    packets: u64,
    bytes: u64,
}

impl std::ops::AddAssign for Sum {
    fn add_assign(&mut self, other: Self) {
        self.packets += other.packets;
        self.bytes += other.bytes;
    }
}

/// The sending half of a socket. The rings are unmapped before the reference to the socket is dropped.
#[derive(Debug)]
pub(super) struct TxHalf {
    tx: Producer<Descriptor>,
    completion: Consumer<u64>,
    lent: Lent,
    /// Index of the first descriptor that the kernel may not have taken yet.
    sent: u32,
    pool: &'static Pool,
    socket: Arc<Socket>,
}

impl TxHalf {
    pub(super) fn new(
        pool: &'static Pool,
        socket: Arc<Socket>,
        tx: Producer<Descriptor>,
        completion: Consumer<u64>,
    ) -> Self {
        let sent = tx.head();
        Self { tx, completion, lent: Lent::new(pool), sent, pool, socket }
    }

    /// Frees the buffers of sent packets; returns their number.
    #[inline]
    fn reap(&mut self, cache: &mut PoolCache) -> usize {
        if self.lent.count() == 0 {
            return 0;
        }
        let done = self.completion.available(usize::MAX);
        for _ in 0..done {
            let place = self.completion.pop();
            if let Some(packet) = self.lent.reclaim(place, 0) {
                cache.free(packet);
            }
        }
        if done > 0 {
            self.completion.release();
        }
        done
    }

    /// Writes a packet of one buffer to the ring, which must have room for it.
    #[inline(always)]
    fn push(&mut self, packet: Packet, options: u32) {
        #[allow(clippy::cast_possible_truncation, reason = "a packet buffer has at most 32 KiB")]
        let len = packet.len() as u32;
        let addr = self.lent.lend(packet);
        self.tx.push(Descriptor { addr, len, options });
    }

    /// Writes a packet of several buffers to the ring.
    #[cold]
    fn push_chain(&mut self, mut packet: Packet) {
        while let Some(rest) = self.pool.split(&mut packet) {
            self.push(packet, CONTINUED);
            packet = rest;
        }
        self.push(packet, 0);
    }

    /// Makes the kernel send the packets in the ring, if it asks for a wakeup; returns the packets that it dropped.
    #[inline]
    fn kick(&mut self) -> Sum {
        let mut refused = Sum::default();
        if !self.tx.needs_wakeup() {
            return refused;
        }
        if self.socket.is_zero_copy() {
            // The driver sends asynchronously.
            let _ = self.socket.send();
            return refused;
        }
        loop {
            match self.socket.send() {
                // All packets were sent, unless the completion ring is full, which not every kernel reports as an
                // error.
                Ok(()) => {
                    self.advance();
                    break;
                }
                // The call's budget is used up, or the send buffer is full.
                Err(Errno::AGAIN) => {
                    if !self.advance() {
                        break;
                    }
                }
                // The interface dropped one packet.
                Err(Errno::BUSY) => refused += self.refused(),
                // The interface is down or gone, which the control thread will detect.
                Err(_) => break,
            }
            if self.sent == self.tx.head() {
                break;
            }
        }
        refused
    }

    /// Updates how many packets the kernel has taken; returns whether there was progress.
    fn advance(&mut self) -> bool {
        let taken = self.tx.head().wrapping_sub(self.tx.waiting() as u32);
        // `sent` may be ahead of the kernel's index, but never behind it.
        let further = taken.wrapping_sub(self.sent).cast_signed() > 0;
        if further {
            self.sent = taken;
        }
        further
    }

    /// Determines the packet that the kernel took and the interface dropped. If the same call sent packets before it,
    /// it is the last packet taken. If not, the kernel does not report yet that it took the packet.
    #[cold]
    fn refused(&mut self) -> Sum {
        let (before, mut bytes) = (self.sent, 0);
        if self.advance() {
            let mut index = self.sent;
            while index != before {
                index = index.wrapping_sub(1);
                let descriptor = self.tx.written(index);
                if bytes > 0 && descriptor.options & CONTINUED == 0 {
                    break;
                }
                bytes += u64::from(descriptor.len);
            }
        } else {
            while self.sent != self.tx.head() {
                let descriptor = self.tx.written(self.sent);
                self.sent = self.sent.wrapping_add(1);
                bytes += u64::from(descriptor.len);
                if descriptor.options & CONTINUED == 0 {
                    break;
                }
            }
        }
        Sum { packets: 1, bytes }
    }

    /// Returns whether the ring contains packets that the kernel has not taken.
    #[inline]
    fn has_unsent(&mut self) -> bool {
        match self.socket.is_zero_copy() {
            true => self.lent.count() > 0 && self.tx.waiting() > 0,
            false => self.sent != self.tx.head(),
        }
    }
}

impl Drop for TxHalf {
    fn drop(&mut self) {
        self.socket.leave(self.lent.take());
    }
}

/// Sends to one queue of an interface.
#[derive(Debug)]
pub(super) struct XdpTx {
    end: End<TxHalf>,
    line: Arc<Line>,
    counters: TxCounters,
    /// Packets that were counted as sent and then dropped. They are subtracted from the next packets counted.
    overcounted: Sum,
    /// The time since which no buffer has come back to a stopping queue.
    stuck_since: Option<Instant>,
}

impl XdpTx {
    pub(super) fn new(end: End<TxHalf>, line: Arc<Line>, counters: TxCounters) -> Self {
        Self { end, line, counters, overcounted: Sum::default(), stuck_since: None }
    }

    /// Frees sent packets, and sends packets that are left in the ring; returns the number of freed buffers.
    #[inline]
    fn reap_and_kick(&mut self, cache: &mut PoolCache) -> usize {
        let Some(half) = self.end.latest() else { return 0 };
        let reaped = half.reap(cache);
        if half.has_unsent() && self.line.longest() > 0 {
            let refused = half.kick();
            if refused.packets > 0 {
                self.count(Sum::default(), refused);
            }
        }
        reaped
    }

    /// Counts packets that were given to the kernel, and packets among these and earlier ones that the interface
    /// dropped.
    #[inline]
    fn count(&mut self, sent: Sum, refused: Sum) {
        if refused.packets > 0 {
            self.counters.drop(DropReason::Failed, refused.packets);
            self.overcounted += refused;
        }
        let off = Sum {
            packets: self.overcounted.packets.min(sent.packets),
            bytes: self.overcounted.bytes.min(sent.bytes),
        };
        self.overcounted = Sum {
            packets: self.overcounted.packets - off.packets,
            bytes: self.overcounted.bytes - off.bytes,
        };
        self.counters.add(sent.packets - off.packets, sent.bytes - off.bytes);
    }
}

/// Moves packets from the front of `burst` to the ring of `half`, as many as it has room for. Packets that cannot be
/// sent are freed and counted.
#[inline]
fn push_all(
    half: &mut TxHalf,
    burst: &mut Burst,
    longest: usize,
    cache: &mut PoolCache,
    counters: &TxCounters,
) -> Sum {
    if !Packet::all_plain(burst) {
        return push_special(half, burst, longest, cache, counters);
    }
    let mut sum = Sum::default();
    let takeable = half.tx.free(burst.len()).min(burst.len());
    for mut packet in burst.drain(..takeable) {
        if !(ethernet::MIN_LEN..=longest).contains(&packet.len())
            && let Err(reason) = fit(&mut packet, longest, cache)
        {
            counters.drop(reason, 1);
            cache.free(packet);
            continue;
        }
        sum += Sum { packets: 1, bytes: packet.len() as u64 };
        half.push(packet, 0);
    }
    sum
}

#[cold]
fn push_special(
    half: &mut TxHalf,
    burst: &mut Burst,
    longest: usize,
    cache: &mut PoolCache,
    counters: &TxCounters,
) -> Sum {
    let (mut sum, pool) = (Sum::default(), half.pool);
    let mut free = half.tx.free(burst.len() * MAX_BUFFERS);
    for mut packet in std::mem::take(burst) {
        let buffers = pool.segment_count(&packet);
        // Packets behind a waiting packet must wait, too.
        if !burst.is_empty() || buffers > free {
            burst.push(packet);
            continue;
        }
        let fits = if buffers > MAX_BUFFERS { Err(DropReason::TooBig) } else { Ok(()) };
        if let Err(reason) = fits.and_then(|()| fit(&mut packet, longest, cache)) {
            counters.drop(reason, 1);
            cache.free(packet);
            continue;
        }
        free -= buffers;
        sum += Sum { packets: 1, bytes: pool.total_len(&packet) as u64 };
        half.push_chain(packet);
    }
    sum
}

/// Pads a packet that is too short, because a driver may not pad packets from the ring.
#[cold]
fn fit(packet: &mut Packet, longest: usize, cache: &mut PoolCache) -> Result<(), DropReason> {
    let len = cache.pool().total_len(packet);
    match len {
        ..ethernet::HEADER_LEN => Err(DropReason::Malformed),
        _ if len > longest => Err(DropReason::TooBig),
        _ if cache.pad(packet, ethernet::MIN_LEN.min(longest)) => Ok(()),
        _ => Err(DropReason::Failed),
    }
}

impl TxQueue for XdpTx {
    fn tx(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        if burst.is_empty() {
            return;
        }
        let longest = self.line.longest();
        let half = match self.end.latest() {
            Some(half) if longest > 0 => half,
            _ => {
                self.counters.drop_all(DropReason::Down, burst, ctx.cache);
                return;
            }
        };
        half.reap(ctx.cache);
        let sent = push_all(half, burst, longest, ctx.cache, &self.counters);
        half.tx.publish();
        let refused = half.kick();
        self.count(sent, refused);
        ctx.clock.lap(Stage::Tx);
    }

    fn accepts(&self) -> Accepts {
        Accepts { segments: self.line.takes_segments(), ..Accepts::default() }
    }

    fn poll(&mut self, ctx: &mut Context<'_>) {
        self.reap_and_kick(ctx.cache);
    }

    fn counters(&self) -> &TxCounters {
        &self.counters
    }

    fn stop(&mut self, ctx: &mut Context<'_>) -> bool {
        if self.reap_and_kick(ctx.cache) > 0 {
            self.stuck_since = None;
        }
        // An interface without a link does not return its packets.
        let left = match self.end.latest() {
            Some(half) if self.line.longest() > 0 => half.lent.count(),
            _ => 0,
        };
        if left == 0 {
            return true;
        }
        self.stuck_since.get_or_insert_with(Instant::now).elapsed() >= TIMEOUT
    }
}

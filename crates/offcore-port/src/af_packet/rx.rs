//! Receiving from a packet socket's ring.
//!
//! The kernel copies each packet into a slot. The queue copies the packets of a burst out of their slots together, and
//! prefetches the lines of later slots. It inserts the VLAN tag again that the kernel strips. Incomplete checksums and
//! unsegmented packets are left as they are, and the packet is marked.

use std::os::fd::AsFd;

use arrayvec::ArrayVec;
use offcore_dma::CopyOp;
use offcore_dma::cpu::Copier;
use offcore_mem::{BURST, Burst, HEADROOM, Packet, PoolCache};
use offcore_stats::Stage;
use offcore_wire::ethernet;
use offcore_wire::gso::MAX_HEADERS;

use super::header::{BEFORE_TAG, TAG, header_of, mark, note_tunnel, tag};
use super::long::{self, Long};
use super::ring::{self, Header, Ring};
use super::socket::{self};
use crate::base::cell::End;
use crate::{Context, DropReason, RxCounters, RxQueue, Wake, room};

/// Maximum number of copies made together.
const COPIES: usize = 2 * BURST;
/// Maximum number of copies for one packet: the longest slot and the smallest buffers.
const COPIES_OF_ONE: usize = 12;
/// Number of cache lines that hold a slot's header and its packet's headers.
const HEADER_LINES: usize = 2;

/// The receiving half of a queue.
#[derive(Debug)]
pub(super) struct AfPacketRx {
    end: End<Ring>,
    counters: RxCounters,
    copier: Copier,
    armed: bool,
}

impl AfPacketRx {
    pub(super) fn new(end: End<Ring>, counters: RxCounters) -> Self {
        Self { end, counters, copier: Copier::default(), armed: false }
    }

    /// Counts packets that were dropped because the ring was full.
    #[cold]
    fn count_lost(&self) {
        if let Some(ring) = &self.end.ring {
            self.counters.drop(DropReason::Full, socket::take_dropped(&ring.socket));
        }
    }
}

/// Why a slot yielded no packet.
enum Nothing {
    /// The pool is empty; the slot is kept for later.
    Starved,
    /// The packet is dropped.
    Dropped(DropReason),
}

/// List of copies to make.
type Copies = ArrayVec<CopyOp, COPIES>;

/// Takes a packet for the frame in slot `ahead` and adds the copies that fill it to `copies`. Returns the packet and
/// its length.
#[inline(always)]
fn receive(
    ring: &Ring,
    ahead: usize,
    header: &Header,
    cache: &mut PoolCache,
    copies: &mut Copies,
) -> Result<(Packet, usize), Nothing> {
    if header.there < header.len {
        return receive_long(ring, header, cache);
    }
    let Some((vnet, frame)) = ring.frame(ahead, header) else {
        return Err(Nothing::Dropped(DropReason::Malformed));
    };
    if frame.len() < ethernet::HEADER_LEN {
        return Err(Nothing::Dropped(DropReason::Malformed));
    }
    let tag = tag(header.status, header.vlan_tci, header.vlan_tpid);
    let len = frame.len() + if tag.is_some() { TAG } else { 0 };
    let mut asked = header_of(vnet, len, tag.is_some()).map_err(Nothing::Dropped)?;
    if asked.is_gso() {
        note_tunnel(&mut asked, &frame[..frame.len().min(MAX_HEADERS)], tag.is_some());
    }
    let mut packet = cache.take_chain(HEADROOM, len).ok_or(Nothing::Starved)?;
    let mut rest = frame;
    if let Some(tag) = tag {
        let (before, after) = frame.split_at(BEFORE_TAG);
        packet.bytes_mut()[..BEFORE_TAG].copy_from_slice(before); // copy-ok: addresses, in front of the tag
        packet.bytes_mut()[BEFORE_TAG..][..TAG].copy_from_slice(&tag); // copy-ok: the tag
        rest = after;
    }
    let mut filled = len - rest.len();
    cache.pool().for_each_segment(&packet, |to, room| {
        let (now, later) = rest.split_at(room - filled);
        // The bytes filled already are fewer than the first buffer holds.
        let dst = to.as_ptr().wrapping_add(std::mem::take(&mut filled));
        copies.push(CopyOp { src: now.as_ptr(), dst, len: now.len() as u32, token: 0 });
        rest = later;
    });
    mark(&mut packet, &asked);
    Ok((packet, len))
}

/// Receives a packet that did not fit into its slot from the socket's queue. It is lost if that queue had no room for
/// it.
#[cold]
fn receive_long(ring: &Ring, header: &Header, cache: &mut PoolCache) -> Result<(Packet, usize), Nothing> {
    if header.status & ring::COPY == 0 {
        return Err(Nothing::Dropped(DropReason::Full));
    }
    match long::receive(&ring.socket, cache) {
        Long::Packet(packet, len) => Ok((packet, len)),
        Long::Starved => Err(Nothing::Starved),
        Long::Dropped(reason) => Err(Nothing::Dropped(reason)),
    }
}

impl RxQueue for AfPacketRx {
    fn rx(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        let wanted = room(ctx, burst);
        let Some(ring) = self.end.ring.as_mut().filter(|ring| ring.status(0) & ring::USER != 0) else {
            // The ring is empty, so replacing a stale ring loses only its drop count, which is read first.
            if self.end.is_stale() {
                self.count_lost();
                self.end.follow();
            }
            return;
        };
        let mut copies = Copies::new();
        let (mut slots, mut packets, mut bytes, mut status) = (0, 0, 0, 0);
        while packets < wanted && slots < ring.slots() && copies.remaining_capacity() >= COPIES_OF_ONE {
            ring.prefetch(slots, HEADER_LINES);
            let Some(header) = ring.received(slots) else { break };
            status |= header.status;
            match receive(ring, slots, &header, ctx.cache, &mut copies) {
                Ok((packet, len)) => {
                    (packets, bytes) = (packets + 1, bytes + len as u64);
                    burst.push(packet);
                }
                Err(Nothing::Dropped(reason)) => self.counters.drop(reason, 1),
                Err(Nothing::Starved) => {
                    self.counters.starved(1);
                    break;
                }
            }
            slots += 1;
        }
        // SAFETY: each copy reads a slot that belongs to the queue until its status is set below, and writes a buffer
        // of a packet in the burst. Both lengths were checked above.
        unsafe { self.copier.copy_burst(&copies) };
        for slot in 0..slots {
            ring.set_status(slot, ring::IDLE);
        }
        ring.advance(slots);
        if status & ring::LOSING != 0 {
            self.counters.drop(DropReason::Full, socket::take_dropped(&ring.socket));
        }
        self.counters.add(packets as u64, bytes);
        ctx.clock.lap(Stage::Rx);
    }

    fn counters(&self) -> &RxCounters {
        &self.counters
    }

    /// The descriptor is readable while a packet waits, so no event needs to be requested.
    fn arm(&mut self) -> Wake<'_> {
        self.armed = true;
        if self.end.is_stale() {
            return Wake::Now;
        }
        match &self.end.ring {
            None => Wake::Never,
            Some(ring) if ring.status(0) & ring::USER != 0 => Wake::Now,
            Some(ring) => Wake::Event(ring.socket.as_fd()),
        }
    }

    fn disarm(&mut self) {
        if std::mem::take(&mut self.armed)
            && let Some(ring) = &self.end.ring
        {
            // A link that goes down also makes the descriptor readable, until the error is read.
            socket::take_error(&ring.socket);
        }
    }

    /// No packets are in flight. Packets lost since the last received packet are counted.
    fn drain(&mut self, _ctx: &mut Context<'_>, _burst: &mut Burst) -> usize {
        self.count_lost();
        0
    }
}

#[cfg(test)]
mod tests;

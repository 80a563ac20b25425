//! Packets in parts: those that come are put together, buffer by buffer, and those that are too long for a link are cut.
//!
//! Only a datagram of more than a packet, or a long echo, comes so; the core copies what it cuts.

use std::collections::VecDeque;

use offcore_mem::{HEADROOM, Packet, PoolCache, Segments};

use super::buffers;
use crate::proto::HEAD;
use crate::proto::fragment::{Cut, Part, Whole};

/// Packets that are put together at a time, at most, and parts of one.
const PACKETS: usize = 64;
const PARTS: usize = 128;
/// What part of the pool parts may hold: one buffer in this many.
const SHARE: usize = 8;
/// What part of either one sender has, so that he costs others nothing.
const SENDER_SHARE: usize = 2;
/// How long parts are waited for, in microseconds: 60 s at most (RFC 8200, 4.5); this is Linux's time of IPv4.
const LONGEST_WAIT: u64 = 30_000_000;

/// A packet of which there are parts.
#[derive(Debug)]
struct Unfinished {
    whole: Whole,
    since: u64,
    /// By where they belong.
    parts: Vec<(Part, Packet)>,
    /// Bytes of its payload, once the last part is there.
    len: Option<usize>,
    buffers: usize,
}

/// What a part is to the packet.
enum Fit {
    /// It belongs at this place among the parts.
    At(usize),
    /// It is there already.
    Known,
    /// The packet is spoiled: parts overlap (RFC 5722), or say different things of its end.
    Not,
}

impl Unfinished {
    fn new(now: u64, whole: Whole) -> Self {
        Self { whole, since: now, parts: Vec::new(), len: None, buffers: 0 }
    }

    fn fit(&self, part: &Part) -> Fit {
        let at = self.parts.partition_point(|(other, _)| other.range.start < part.range.start);
        if let Some((other, _)) = self.parts.get(at)
            && (&other.range, other.more) == (&part.range, part.more)
        {
            return Fit::Known;
        }
        let before = at.checked_sub(1).is_some_and(|at| self.parts[at].0.range.end > part.range.start);
        let behind = self.parts.get(at).is_some_and(|(other, _)| other.range.start < part.range.end);
        let beyond = match self.len {
            Some(len) => !part.more || part.range.end > len,
            None => !part.more && at < self.parts.len(),
        };
        if before || behind || beyond || self.parts.len() >= PARTS { Fit::Not } else { Fit::At(at) }
    }

    fn is_whole(&self) -> bool {
        self.len.is_some_and(|len| self.parts.iter().map(|(part, _)| part.range.len()).sum::<usize>() == len)
    }

    /// One packet of all parts; `None`, and they are freed, when it is one that nobody takes.
    fn join(mut self, cache: &mut PoolCache) -> Option<Packet> {
        let pool = cache.pool();
        let len = self.len.unwrap_or(0);
        let mut buffers: Vec<Packet> = Vec::with_capacity(self.buffers);
        for (index, (part, mut packet)) in self.parts.drain(..).enumerate() {
            let mut rest = pool.split(&mut packet);
            if index > 0 {
                // Headers are in the first buffer.
                packet.pull(part.at.min(packet.len()));
            } else {
                let cut = part.make_whole(packet.bytes_mut(), len);
                packet.pull(cut.unwrap_or(packet.len()));
            }
            buffers.push(packet);
            while let Some(mut buffer) = rest {
                rest = pool.split(&mut buffer);
                buffers.push(buffer);
            }
        }
        // The stack looks at headers in one piece.
        if buffers.first().is_none_or(|first| first.len() < HEAD) {
            cache.free_all(buffers);
            return None;
        }
        let last_to_first = buffers.into_iter().rev();
        last_to_first.fold(None, |rest, buffer| {
            Some(match rest {
                Some(rest) => pool.link(buffer, rest),
                None => buffer,
            })
        })
    }
}

/// Parts of packets, until all of a packet are there.
#[derive(Debug)]
pub(super) struct Fragments {
    /// The oldest first.
    unfinished: VecDeque<Unfinished>,
    buffers: usize,
    /// Buffers that they may be, at most.
    most: usize,
    /// Parts that were not put together.
    pub(super) dropped: u64,
}

impl Fragments {
    /// Of a worker that has so many of the pool's buffers.
    pub(super) fn new(pool: usize) -> Self {
        Self { unfinished: VecDeque::new(), buffers: 0, most: pool.div_ceil(SHARE), dropped: 0 }
    }

    /// Takes a part. The whole packet, when it was the last that was missing.
    pub(super) fn add(&mut self, now: u64, mut packet: Packet, cache: &mut PoolCache) -> Option<Packet> {
        let pool = cache.pool();
        let head = packet.bytes();
        // Who leaves a checksum open does not fragment.
        let part = Part::of(head, pool.total_len(&packet)).filter(|_| !packet.has_offload());
        let Some(part) = part else {
            self.drop_part(packet, cache);
            return None;
        };
        // Bytes behind the IP packet are padding.
        cache.truncate(&mut packet, part.at + part.range.len());
        let held = buffers(&packet, pool);
        self.make_room(&part.of, held, cache);
        let known = self.unfinished.iter().position(|unfinished| unfinished.whole == part.of);
        let at = known.unwrap_or_else(|| {
            self.unfinished.push_back(Unfinished::new(now, part.of));
            self.unfinished.len() - 1
        });
        let unfinished = &mut self.unfinished[at];
        match unfinished.fit(&part) {
            Fit::At(place) => {
                if !part.more {
                    unfinished.len = Some(part.range.end);
                }
                unfinished.parts.insert(place, (part, packet));
                unfinished.buffers += held;
                self.buffers += held;
            }
            Fit::Known => {
                cache.free(packet);
                return None;
            }
            Fit::Not => {
                self.drop_part(packet, cache);
                self.discard(at, cache);
                return None;
            }
        }
        if !self.unfinished[at].is_whole() {
            return None;
        }
        let unfinished = self.unfinished.remove(at)?;
        self.buffers -= unfinished.buffers;
        let parts = unfinished.parts.len() as u64;
        let whole = unfinished.join(cache);
        if whole.is_none() {
            self.dropped += parts;
        }
        whole
    }

    /// Gives up the oldest packets until there is room for a part in so many buffers: those of its own sender when he has
    /// his share.
    fn make_room(&mut self, whole: &Whole, buffers: usize, cache: &mut PoolCache) {
        let most = self.most;
        loop {
            let new = usize::from(!self.unfinished.iter().any(|unfinished| unfinished.whole == *whole));
            let own = || self.unfinished.iter().filter(|unfinished| unfinished.whole.src == whole.src);
            let (packets, held) = (own().count(), own().map(|unfinished| unfinished.buffers).sum::<usize>());
            let victim = if packets + new > PACKETS / SENDER_SHARE || held + buffers > most / SENDER_SHARE {
                self.unfinished.iter().position(|unfinished| unfinished.whole.src == whole.src)
            } else if self.unfinished.len() + new > PACKETS || self.buffers + buffers > most {
                (!self.unfinished.is_empty()).then_some(0)
            } else {
                None
            };
            let Some(victim) = victim else { return };
            self.discard(victim, cache);
        }
    }

    /// Gives up what has waited for too long.
    pub(super) fn expire(&mut self, now: u64, cache: &mut PoolCache) {
        while self.unfinished.front().is_some_and(|oldest| now.saturating_sub(oldest.since) > LONGEST_WAIT) {
            self.discard(0, cache);
        }
    }

    fn drop_part(&mut self, packet: Packet, cache: &mut PoolCache) {
        self.dropped += 1;
        cache.free(packet);
    }

    fn discard(&mut self, at: usize, cache: &mut PoolCache) {
        if let Some(unfinished) = self.unfinished.remove(at) {
            self.buffers -= unfinished.buffers;
            self.dropped += unfinished.parts.len() as u64;
            cache.free_all(unfinished.parts.into_iter().map(|(_, packet)| packet));
        }
    }
}

/// Calls `each` with the parts that `packet` is cut into for a link that takes IP packets of `mtu` bytes; `ident` names it over
/// IPv6. `false` when it cannot be cut, or there are no buffers for all.
pub(super) fn cut(
    packet: &Packet,
    mtu: usize,
    ident: u32,
    cache: &mut PoolCache,
    mut each: impl FnMut(&mut PoolCache, Packet),
) -> bool {
    let pool = cache.pool();
    let Some(mut cut) = Cut::new(packet.bytes(), mtu, ident) else { return false };
    let total = pool.total_len(packet) - cut.skip;
    let mut payload = Bytes { segments: pool.segments(packet), here: &[] };
    payload.skip(cut.skip);
    for range in cut.ranges(total) {
        let headers = cut.headers(&range, range.end < total);
        let Some(mut part) = cache.take_chain(HEADROOM, headers.len() + range.len()) else { return false };
        let mut skip = headers.len();
        part.bytes_mut()[..skip].copy_from_slice(headers);
        for segment in pool.segments_mut(&mut part) {
            payload.read(&mut segment[skip..]);
            skip = 0;
        }
        each(cache, part);
    }
    true
}

/// The bytes of a packet, one behind the other.
struct Bytes<'a> {
    segments: Segments<'a>,
    here: &'a [u8],
}

impl Bytes<'_> {
    fn read(&mut self, mut to: &mut [u8]) {
        while !to.is_empty() && self.find() {
            let n = to.len().min(self.here.len());
            let (now, rest) = to.split_at_mut(n);
            // copy-ok: a packet too long for the link; the core cuts it
            now.copy_from_slice(&self.here[..n]);
            self.here = &self.here[n..];
            to = rest;
        }
    }

    fn skip(&mut self, mut len: usize) {
        while len > 0 && self.find() {
            let n = len.min(self.here.len());
            self.here = &self.here[n..];
            len -= n;
        }
    }

    /// Whether there are bytes left.
    fn find(&mut self) -> bool {
        while self.here.is_empty() {
            match self.segments.next() {
                Some(next) => self.here = next,
                None => return false,
            }
        }
        true
    }
}

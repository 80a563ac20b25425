//! IP fragmentation and reassembly. Reassembly links the buffers of fragments; packets that exceed the MTU of a link
//! are fragmented.
//!
//! Only datagrams longer than a packet and long echo messages are fragmented. The core makes the copies for
//! fragmentation.

use std::collections::VecDeque;

use offcore_mem::{HEADROOM, Packet, PoolCache, Segments};
use offcore_stats::time::{Micros, Time};

use super::buffers;
use crate::proto::HEAD;
use crate::proto::fragment::{Cut, Part, ReassemblyKey};

/// Maximum number of packets in reassembly, and of fragments per packet.
const PACKETS: usize = 64;
const PARTS: usize = 128;
/// All fragments may hold one pool buffer in this many.
const SHARE: usize = 8;
/// One sender gets this fraction of both limits, so that it does not displace the fragments of others.
const SENDER_SHARE: usize = 2;
/// Reassembly timeout. The limit is 60 s (RFC 8200, 4.5); this is Linux's value for IPv4.
const LONGEST_WAIT: Micros = Micros::from_secs(30);

/// A packet in reassembly.
#[derive(Debug)]
struct Unfinished {
    whole: ReassemblyKey,
    since: Time,
    /// Sorted by offset.
    parts: Vec<(Part, Packet)>,
    /// Length of the payload in bytes. Known when the last fragment has arrived.
    len: Option<usize>,
    buffers: usize,
}

/// How a fragment fits into a packet.
enum Fit {
    /// Its index among the fragments.
    At(usize),
    /// A duplicate.
    Known,
    /// The packet is invalid: fragments overlap (RFC 5722), or disagree about its end.
    Not,
}

impl Unfinished {
    fn new(now: Time, whole: ReassemblyKey) -> Self {
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

    /// Links all fragments to one packet. If the stack cannot parse it, its buffers are freed and `None` is returned.
    fn join(mut self, cache: &mut PoolCache) -> Option<Packet> {
        let pool = cache.pool();
        let len = self.len.unwrap_or(0);
        let mut buffers: Vec<Packet> = Vec::with_capacity(self.buffers);
        for (index, (part, mut packet)) in self.parts.drain(..).enumerate() {
            let mut rest = pool.split(&mut packet);
            if index > 0 {
                // Only the first buffer keeps its headers.
                packet.pull(part.at.min(packet.len()));
            } else {
                let cut = part.rebuild_headers(packet.bytes_mut(), len);
                packet.pull(cut.unwrap_or(packet.len()));
            }
            buffers.push(packet);
            while let Some(mut buffer) = rest {
                rest = pool.split(&mut buffer);
                buffers.push(buffer);
            }
        }
        // The stack needs the headers in one buffer.
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

/// Packets in reassembly.
#[derive(Debug)]
pub(super) struct Fragments {
    /// Oldest first.
    unfinished: VecDeque<Unfinished>,
    buffers: usize,
    /// Maximum number of buffers.
    most: usize,
    /// Fragments that were not reassembled.
    pub(super) dropped: u64,
}

impl Fragments {
    /// Creates the reassembly state of a worker whose share of the pool is `pool` buffers.
    pub(super) fn new(pool: usize) -> Self {
        Self { unfinished: VecDeque::new(), buffers: 0, most: pool.div_ceil(SHARE), dropped: 0 }
    }

    /// Adds a fragment. Returns the whole packet if the fragment completes it.
    pub(super) fn add(&mut self, now: Time, mut packet: Packet, cache: &mut PoolCache) -> Option<Packet> {
        let pool = cache.pool();
        let head = packet.bytes();
        // A sender that offloads the checksum does not fragment.
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

    /// Discards the oldest packets until there is room for a fragment of `buffers` buffers. If the sender exceeds its
    /// share, only its own packets are discarded.
    fn make_room(&mut self, whole: &ReassemblyKey, buffers: usize, cache: &mut PoolCache) {
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

    /// Discards packets whose reassembly timeout has expired.
    pub(super) fn expire(&mut self, now: Time, cache: &mut PoolCache) {
        while self.unfinished.front().is_some_and(|oldest| now.saturating_since(oldest.since) > LONGEST_WAIT)
        {
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

/// Fragments `packet` for a link with an MTU of `mtu` bytes and calls `each` with each fragment. `ident` is the IPv6
/// identification. Returns `false` if the packet cannot be fragmented or the pool has too few buffers.
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

/// Reads the bytes of a packet across its buffers.
struct Bytes<'a> {
    segments: Segments<'a>,
    here: &'a [u8],
}

impl Bytes<'_> {
    fn read(&mut self, mut to: &mut [u8]) {
        while !to.is_empty() && self.find() {
            let n = to.len().min(self.here.len());
            let (now, rest) = to.split_at_mut(n);
            // copy-ok: a packet that exceeds the link's MTU; the core fragments it
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

    /// Returns whether bytes are left.
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

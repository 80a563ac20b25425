//! The work on packets on a CPU, the reference for devices' results and speed.
//!
//! It uses the fastest implementations available: CRC-32C by the crate `crc32c` (the CPU's instruction, three streams
//! at once), the Internet checksum by offcore-wire, patterns by automata of the crate `aho-corasick` over several
//! packets at once ([`matcher`]).

pub mod matcher;

use std::iter::once;
use std::time::Duration;

use offcore_mem::{Packet, Pool};
use offcore_stats::tsc;
use offcore_wire::Sum;

use crate::layout::Kind;
use crate::patterns::Patterns;
use matcher::{Matcher, MatcherError};

/// Bytes of destination and source MAC address.
const ADDRESSES: usize = 12;

/// Why the work is not possible.
#[derive(Debug, thiserror::Error)]
pub enum CpuWorkError {
    /// [`Kind::Match`] without patterns.
    #[error("work 'match' without patterns: expected a set of at least one; give a pattern file")]
    NoPatterns,
    /// The automaton could not be built.
    #[error(transparent)]
    Matcher(#[from] MatcherError),
}

/// The work on every packet, on the core that calls [`run`](Self::run).
#[derive(Debug)]
pub struct CpuWork {
    work: Work,
    swap: bool,
    /// Bytes before the payload.
    skip: usize,
    /// Minimum TSC ticks per packet, or 0.
    forced: u64,
}

#[derive(Debug)]
enum Work {
    Nothing,
    Crc32c,
    Checksum,
    Match(Box<Matcher>),
}

impl CpuWork {
    /// Creates work as described by [`WorkView`](crate::layout::WorkView): `skip` bytes precede the payload, and each
    /// packet takes at least `forced_ns` nanoseconds. Only [`Kind::Match`] uses patterns.
    ///
    /// # Errors
    /// [`Kind::Match`] without patterns, or with too many for an automaton.
    pub fn new(
        kind: Kind,
        swap: bool,
        skip: u32,
        forced_ns: u32,
        patterns: Option<&Patterns>,
    ) -> Result<Self, CpuWorkError> {
        let work = match kind {
            Kind::Nothing => Work::Nothing,
            Kind::Crc32c => Work::Crc32c,
            Kind::Checksum => Work::Checksum,
            Kind::Match => Work::Match(Box::new(Matcher::new(patterns.ok_or(CpuWorkError::NoPatterns)?)?)),
        };
        let forced = tsc::ticks(Duration::from_nanos(u64::from(forced_ns)));
        Ok(Self { work, swap, skip: skip as usize, forced })
    }

    /// Processes `packets`, whose buffers are in `pool`, and writes their results to `results`. Returns the number of
    /// non-zero results.
    ///
    /// Swaps the MAC addresses of packets of at least 12 bytes, if enabled, then processes the payload, which may be in
    /// several buffers. The result of an empty packet is 0. Forced times add up, because a core processes packets in
    /// sequence.
    ///
    /// # Panics
    /// If there are fewer results than packets, or a packet of several buffers is from another pool.
    pub fn run(&self, pool: &Pool, packets: &mut [Packet], results: &mut [u32]) -> u32 {
        let results = &mut results[..packets.len()];
        match &self.work {
            Work::Nothing => self.each(&Nothing, pool, packets, results),
            Work::Crc32c => self.each(&Crc32c, pool, packets, results),
            Work::Checksum => self.each(&Checksum, pool, packets, results),
            Work::Match(matcher) if self.forced == 0 => self.match_together(matcher, pool, packets, results),
            Work::Match(matcher) => self.each(&**matcher, pool, packets, results),
        }
        results.iter().filter(|result| **result != 0).count() as u32
    }

    /// Swaps the MAC addresses of a packet, if enabled, and nothing else.
    #[inline]
    pub fn swap(&self, pool: &Pool, packet: &mut Packet) {
        if self.swap {
            swap_addresses(pool, packet);
        }
    }

    /// Returns the size of the work's tables in bytes.
    pub fn memory(&self) -> usize {
        match &self.work {
            Work::Match(matcher) => matcher.memory(),
            _ => 0,
        }
    }

    /// Processes packets in sequence, each with its forced time.
    fn each<W: PayloadWork>(&self, work: &W, pool: &Pool, packets: &mut [Packet], results: &mut [u32]) {
        for (packet, result) in packets.iter_mut().zip(results) {
            let start = if self.forced == 0 { 0 } else { tsc::now() };
            if self.swap {
                swap_addresses(pool, packet);
            }
            *result = self.one(work, pool, packet);
            // No pause instruction: it may take longer than the time left.
            while self.forced != 0 && tsc::now().wrapping_sub(start) < self.forced {}
        }
    }

    #[inline(always)]
    fn one<W: PayloadWork>(&self, work: &W, pool: &Pool, packet: &Packet) -> u32 {
        if packet.is_segmented() {
            return self.process_segmented(work, pool, packet);
        }
        if packet.len() == 0 { 0 } else { work.result(once(self.payload(packet))) }
    }

    #[cold]
    fn process_segmented<W: PayloadWork>(&self, work: &W, pool: &Pool, packet: &Packet) -> u32 {
        if pool.total_len(packet) == 0 {
            return 0;
        }
        let mut skip = self.skip;
        work.result(pool.segments(packet).map(|part| {
            let header = skip.min(part.len());
            skip -= header;
            &part[header..]
        }))
    }

    /// Returns the payload in the packet's first buffer.
    #[inline(always)]
    fn payload<'a>(&self, packet: &'a Packet) -> &'a [u8] {
        packet.bytes().get(self.skip..).unwrap_or_default()
    }

    /// Processes packets together: the walk through one packet hides the table latency of another.
    fn match_together(&self, matcher: &Matcher, pool: &Pool, packets: &mut [Packet], results: &mut [u32]) {
        if self.swap {
            packets.iter_mut().for_each(|packet| swap_addresses(pool, packet));
        }
        let plain = packets.iter().zip(results).filter_map(|(packet, result)| {
            if packet.is_segmented() {
                *result = self.process_segmented(matcher, pool, packet);
                return None;
            }
            Some((self.payload(packet), result))
        });
        matcher.results(plain);
    }
}

/// Work on a payload.
trait PayloadWork {
    /// Returns the result for a payload in `parts` of any length.
    fn result<'a>(&self, parts: impl Iterator<Item = &'a [u8]>) -> u32;
}

struct Nothing;

impl PayloadWork for Nothing {
    #[inline(always)]
    fn result<'a>(&self, _parts: impl Iterator<Item = &'a [u8]>) -> u32 {
        0
    }
}

struct Crc32c;

impl PayloadWork for Crc32c {
    #[inline(always)]
    fn result<'a>(&self, parts: impl Iterator<Item = &'a [u8]>) -> u32 {
        parts.fold(0, crc32c::crc32c_append)
    }
}

struct Checksum;

impl PayloadWork for Checksum {
    #[inline(always)]
    fn result<'a>(&self, parts: impl Iterator<Item = &'a [u8]>) -> u32 {
        u32::from(Sum::of_parts(parts).checksum())
    }
}

impl PayloadWork for Matcher {
    #[inline(always)]
    fn result<'a>(&self, parts: impl Iterator<Item = &'a [u8]>) -> u32 {
        Matcher::result(self, parts)
    }
}

/// Swaps the destination and source address of a packet that has both. (offcore-wire's frame view also requires an
/// EtherType, but devices do not.)
#[inline(always)]
fn swap_addresses(pool: &Pool, packet: &mut Packet) {
    if let Some(addresses) = packet.bytes_mut().first_chunk_mut::<ADDRESSES>() {
        let (destination, source) = addresses.split_at_mut(ADDRESSES / 2);
        destination.swap_with_slice(source);
    } else if packet.is_segmented() {
        swap_in_parts(pool, packet);
    }
}

/// Swaps addresses that are in several buffers.
#[cold]
fn swap_in_parts(pool: &Pool, packet: &mut Packet) {
    if pool.total_len(packet) < ADDRESSES {
        return;
    }
    let mut addresses = [0; ADDRESSES];
    addresses.iter_mut().zip(pool.segments(packet).flatten()).for_each(|(to, from)| *to = *from);
    addresses.rotate_left(ADDRESSES / 2);
    pool.segments_mut(packet).flatten().zip(addresses).for_each(|(to, from)| *to = from);
}

#[cfg(test)]
mod tests;

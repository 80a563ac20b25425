//! The packets of `offcore bench gpu`: their content, and the checks of returned packets.
//!
//! ```text
//! byte 0      12    14        16      18      26        34       42 ...
//!      | MACs | IPv4: 45 00 | length | ...   | number  | stamp  | payload: of the chunk's own
//! ```
//! Frames look like UDP over IPv4. The generator patches both MAC addresses, the length and the number of the packet
//! (instead of the IP addresses), and in the first packet of a burst the time (instead of the UDP header). All other
//! bytes are filled in once. The addresses are derived from the number, so that a swap is detected even if a buffer is
//! used repeatedly.

use anyhow::{Result, bail, ensure};
use offcore_gpu::cpu::CpuWork;
use offcore_gpu::patterns::Patterns;
use offcore_mem::{Packet, Pool};
use offcore_stats::SplitMix;

/// Bytes before the payload.
pub(super) const SKIP: usize = 42;
/// Length of the longest packet in bytes, without FCS.
pub(super) const LONGEST: usize = 1514;
/// One packet in this many contains a pattern if its payload is long enough: less than 1 in 100.
pub(super) const MATCHING: usize = 128;
/// One packet in this many is checked completely in a timed window.
pub(super) const SAMPLED: u64 = 64;

const LENGTH_AT: usize = 16;
const NUMBER_AT: usize = 26;
const STAMP_AT: usize = 34;
/// Minimum offset of a pattern.
const PATTERN_AT: usize = SKIP + 64;
/// Mask of the number in an address: five bytes.
const ADDRESS: u64 = (1 << 40) - 1;

/// Initial content of packets.
#[derive(Debug)]
pub(super) struct Content {
    patterns: Patterns,
}

impl Content {
    /// Creates content of random bytes, with `patterns` in some payloads.
    pub(super) fn new(patterns: Patterns) -> Self {
        Self { patterns }
    }

    /// Returns the patterns.
    pub(super) fn patterns(&self) -> &Patterns {
        &self.patterns
    }

    /// Writes the first `bytes.len()` bytes of the packet in chunk `chunk`.
    pub(super) fn fill(&self, chunk: u32, bytes: &mut [u8]) {
        for (word, at) in bytes.chunks_mut(8).zip(0..) {
            word.copy_from_slice(&random(u64::from(chunk) << 32 | at).to_le_bytes()[..word.len()]);
        }
        let header = [0x08, 0x00, 0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 17, 0, 0];
        bytes[12..NUMBER_AT].copy_from_slice(&header);
        let chunk = chunk as usize;
        if chunk.is_multiple_of(MATCHING) {
            let which = chunk / MATCHING;
            let pattern = self.patterns.iter().nth(which % self.patterns.len()).unwrap_or_default();
            let at = PATTERN_AT + which % 512;
            // A pattern may extend beyond the end of a short packet. It is truncated there.
            bytes.iter_mut().skip(at).zip(pattern).for_each(|(to, from)| *to = *from);
        }
    }

    /// Returns whether the initial content is unchanged.
    fn is_there(&self, chunk: u32, bytes: &[u8], scratch: &mut Vec<u8>) -> bool {
        scratch.resize(bytes.len(), 0);
        self.fill(chunk, scratch);
        let same = |from: usize, to: usize| bytes[from..to] == scratch[from..to];
        same(12, LENGTH_AT) && same(LENGTH_AT + 2, NUMBER_AT) && same(SKIP, bytes.len())
    }
}

/// Returns a pseudo-random number that is determined by `seed`.
fn random(seed: u64) -> u64 {
    SplitMix::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15)).next()
}

/// Returns both addresses of packet `number`, as sent or swapped.
#[inline(always)]
fn addresses(number: u64, swapped: bool) -> (u64, u32) {
    let destination = 0x02 | (number & ADDRESS) << 8;
    let source = 0x06 | (!number & ADDRESS) << 8;
    let (first, second) = if swapped { (source, destination) } else { (destination, source) };
    (first | second << 48, (second >> 16) as u32)
}

/// Turns a packet with its initial content into packet `number`.
#[inline(always)]
pub(super) fn patch(packet: &mut Packet, number: u64) {
    let bytes = packet.bytes_mut();
    let length = ((bytes.len() - 14) as u16).to_be_bytes();
    let (first, second) = addresses(number, false);
    bytes[..8].copy_from_slice(&first.to_le_bytes());
    bytes[8..12].copy_from_slice(&second.to_le_bytes());
    bytes[LENGTH_AT..LENGTH_AT + 2].copy_from_slice(&length);
    bytes[NUMBER_AT..STAMP_AT].copy_from_slice(&number.to_le_bytes());
}

/// Stores the time in the first packet of a burst.
#[inline(always)]
pub(super) fn stamp(packet: &mut Packet, tsc: u64) {
    packet.bytes_mut()[STAMP_AT..SKIP].copy_from_slice(&tsc.to_le_bytes());
}

/// Returns the stored time.
#[inline(always)]
pub(super) fn stamped(packet: &Packet) -> u64 {
    packet.bytes()[STAMP_AT..SKIP].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

/// Changes the first bytes of a packet's payload, so that its result differs from the results of all previous packets.
pub(super) fn mark(packet: &mut Packet, number: u64) {
    packet.bytes_mut()[SKIP..SKIP + 8].copy_from_slice(&(!number).to_le_bytes());
}

/// Expected values of returned packets.
#[derive(Clone, Copy, Debug)]
pub(super) struct Check<'a> {
    pub content: &'a Content,
    /// Length of every packet in bytes.
    pub len: usize,
    /// Whether the MAC addresses are swapped.
    pub swapped: bool,
    /// Result of the packet in each chunk. If empty, all results are 0.
    pub results: &'a [u32],
}

impl Check<'_> {
    /// Checks length, number, addresses and result of a packet that should be packet `number`.
    #[inline(always)]
    pub(super) fn head(&self, packet: &Packet, number: u64, result: Option<u32>) -> Result<()> {
        let bytes = packet.bytes();
        let expected = self.results.get(packet.chunk() as usize).copied().unwrap_or_default();
        let right = bytes.len() == self.len
            && bytes[NUMBER_AT..STAMP_AT] == number.to_le_bytes()
            && bytes[LENGTH_AT..LENGTH_AT + 2] == ((self.len - 14) as u16).to_be_bytes()
            && result.is_none_or(|result| result == expected)
            && {
                let (first, second) = addresses(number, self.swapped);
                bytes[..8] == first.to_le_bytes() && bytes[8..12] == second.to_le_bytes()
            };
        if right { Ok(()) } else { self.describe_mismatch(packet, number, result, expected) }
    }

    #[cold]
    fn describe_mismatch(
        &self,
        packet: &Packet,
        number: u64,
        result: Option<u32>,
        expected: u32,
    ) -> Result<()> {
        let bytes = packet.bytes();
        ensure!(bytes.len() == self.len, "packet {number} has {} bytes, expected {}", bytes.len(), self.len);
        let found = bytes[NUMBER_AT..STAMP_AT].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        ensure!(found == number, "packet {found} came back where packet {number} was expected");
        if let Some(result) = result {
            ensure!(result == expected, "packet {number} has the result {result:#x}, expected {expected:#x}");
        }
        let (swapped, kept) = if self.swapped { ("swapped", "kept") } else { ("kept", "swapped") };
        bail!(
            "packet {number} has its length or its addresses wrong: expected {swapped}, found {kept} or others"
        )
    }

    /// Checks all other bytes.
    pub(super) fn content(&self, packet: &Packet, number: u64, scratch: &mut Vec<u8>) -> Result<()> {
        let there = self.content.is_there(packet.chunk(), packet.bytes(), scratch);
        ensure!(there, "packet {number} has come back with other bytes than it was sent with");
        Ok(())
    }

    /// Performs all checks on a [marked](mark) packet, including its result, and then removes the mark.
    pub(super) fn marked(
        &self,
        pool: &Pool,
        work: Option<&CpuWork>,
        packet: &mut Packet,
        number: u64,
        result: u32,
        scratch: &mut Vec<u8>,
    ) -> Result<()> {
        self.head(packet, number, None)?;
        let mut expected = [0];
        if let Some(work) = work {
            work.run(pool, std::slice::from_mut(packet), &mut expected);
        }
        ensure!(
            result == expected[0],
            "packet {number} has the result {result:#x}, expected {:#x}",
            expected[0]
        );
        let place = SKIP..SKIP + 8;
        ensure!(
            packet.bytes()[place.clone()] == (!number).to_le_bytes(),
            "packet {number} has come back with other bytes than it was sent with"
        );
        scratch.resize(self.len, 0);
        self.content.fill(packet.chunk(), scratch);
        packet.bytes_mut()[place.clone()].copy_from_slice(&scratch[place]);
        self.content(packet, number, scratch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use offcore_gpu::layout::Kind;
    use offcore_mem::{HEADROOM, Hugepages};

    fn content() -> Content {
        Content::new(Patterns::random(1, 500, 8..=32).unwrap())
    }

    /// Checks a packet of `len` bytes after `change` was applied. It has number 7 and result 9.
    fn checked(len: usize, swapped: bool, change: impl FnOnce(&mut [u8])) -> Result<()> {
        let (pool, content) = (Pool::new(64, 2048, Hugepages::None).unwrap(), content());
        let mut packet = pool.cache().take_sized(HEADROOM, len).unwrap();
        content.fill(packet.chunk(), packet.bytes_mut());
        patch(&mut packet, 7);
        stamp(&mut packet, 1234);
        assert_eq!(stamped(&packet), 1234);
        if swapped {
            packet.bytes_mut()[..12].rotate_left(6);
        }
        change(packet.bytes_mut());
        let results = [9; 64];
        let check = Check { content: &content, len, swapped, results: &results };
        check.head(&packet, 7, Some(9))?;
        check.content(&packet, 7, &mut Vec::new())
    }

    #[test]
    fn every_byte_that_changes_is_noticed() {
        for len in [60, 61, 600, 1514] {
            for swapped in [false, true] {
                checked(len, swapped, |_| ()).unwrap();
                for at in (0..len).filter(|at| !(STAMP_AT..SKIP).contains(at)) {
                    let error = checked(len, swapped, |bytes| bytes[at] ^= 0x10).unwrap_err().to_string();
                    assert!(error.contains("packet "), "{error}");
                }
            }
        }
        assert!(checked(100, true, |bytes| bytes[..12].rotate_left(6)).is_err(), "swapped twice");
    }

    #[test]
    fn wrong_result_or_length_is_noticed() {
        let (pool, content) = (Pool::new(64, 2048, Hugepages::None).unwrap(), content());
        let mut packet = pool.cache().take_sized(HEADROOM, 100).unwrap();
        content.fill(packet.chunk(), packet.bytes_mut());
        patch(&mut packet, 7);
        let check = |len, results| Check { content: &content, len, swapped: false, results };
        let found = |len, result| check(len, &[]).head(&packet, 7, Some(result)).map_err(|e| e.to_string());
        assert_eq!(found(100, 0), Ok(()));
        assert!(found(101, 0).unwrap_err().contains("has 100 bytes, expected 101"));
        assert!(found(100, 5).unwrap_err().contains("the result 0x5, expected 0x0"));
        assert!(
            check(100, &[]).head(&packet, 8, None).unwrap_err().to_string().contains("packet 7 came back")
        );
        // The expected result is computed on the CPU for a marked packet. The check then restores the packet.
        let work = CpuWork::new(Kind::Crc32c, false, SKIP as u32, 0, None).unwrap();
        mark(&mut packet, 7);
        let mut result = [0];
        work.run(pool, std::slice::from_mut(&mut packet), &mut result);
        let mut scratch = Vec::new();
        let mut marked =
            |result| check(100, &[]).marked(pool, Some(&work), &mut packet, 7, result, &mut scratch);
        assert!(marked(result[0] ^ 1).unwrap_err().to_string().contains("the result"));
        marked(result[0]).unwrap();
        check(100, &[]).content(&packet, 7, &mut scratch).unwrap();
    }

    #[test]
    fn patterns_are_rare() {
        let (pool, content) = (Pool::new(4096, 2048, Hugepages::None).unwrap(), content());
        let work = CpuWork::new(Kind::Match, false, SKIP as u32, 0, Some(content.patterns())).unwrap();
        let mut cache = pool.cache();
        let mut packets: Vec<_> = std::iter::from_fn(|| cache.take_sized(HEADROOM, 1066)).collect();
        packets.iter_mut().for_each(|packet| content.fill(packet.chunk(), packet.bytes_mut()));
        let mut results = vec![0; packets.len()];
        let hits = work.run(pool, &mut packets, &mut results) as usize;
        assert_eq!(hits, packets.len() / MATCHING);
        assert!(hits * 100 <= packets.len());
    }
}

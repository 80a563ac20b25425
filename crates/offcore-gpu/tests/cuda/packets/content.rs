//! Packets by number, and the expected results, for these tests and the unit tests of pipelines.

use offcore_mem::{HEADROOM, Packet, Pool, PoolCache};
use offcore_wire::Sum;

use super::Kind;

pub(super) const SKIP: usize = 14;
/// A pattern that occurs in some packets: its bytes differ by 13, as the packets' bytes do.
pub(super) const PATTERN: [u8; 3] = [200, 213, 226];

/// Returns the bytes of packet `number`: lengths from 60 on, some in several buffers.
pub(super) fn content(number: usize) -> Vec<u8> {
    let len = if number % 37 == 36 { 5000 } else { 60 + number * 7 % 1400 };
    (0..len).map(|at| (number.wrapping_mul(2_654_435_761) >> 9).wrapping_add(at * 13) as u8).collect()
}

/// Returns the packet. If it is in one buffer and long enough, its first `split_at` bytes are in a separate buffer.
pub(super) fn packet(pool: &Pool, cache: &mut PoolCache, number: usize, split_at: Option<usize>) -> Packet {
    let bytes = content(number);
    let mut packet = cache.take_chain(HEADROOM, bytes.len()).unwrap();
    pool.segments_mut(&mut packet).flatten().zip(&bytes).for_each(|(to, from)| *to = *from);
    let Some(at) = split_at.filter(|at| !packet.is_segmented() && packet.len() > *at) else {
        return packet;
    };
    let mut header = cache.take_sized(HEADROOM, at).unwrap();
    header.bytes_mut().copy_from_slice(&packet.bytes()[..at]);
    // Poison, because the device must not read these bytes.
    packet.bytes_mut()[..at].fill(0xee);
    packet.pull(at);
    pool.link(header, packet)
}

/// Returns the packet and its result after the work, which skips `skip` bytes.
pub(super) fn expected(number: usize, kind: Kind, skip: usize) -> (Vec<u8>, u32) {
    let mut bytes = content(number);
    bytes[..12].rotate_left(6);
    let payload = bytes.get(skip..).unwrap_or_default();
    let result = match kind {
        Kind::Nothing => 0,
        Kind::Crc32c => crc32c::crc32c(payload),
        Kind::Checksum => u32::from(Sum::of(payload).checksum()),
        Kind::Match => u32::from(payload.windows(3).any(|window| window == PATTERN)),
    };
    (bytes, result)
}

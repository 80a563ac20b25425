//! Copies packets that are not a single plain buffer.

use arrayvec::ArrayVec;
use offcore_dma::Batch;
use offcore_mem::{HEADROOM, Packet, PoolCache};
use offcore_wire::virtio_net::HEADER_LEN;

use super::InFlight;

/// Maximum number of buffers per packet.
pub(super) const MAX_SEGMENTS: usize = 64;

/// Why a packet has not been copied yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoCopy {
    /// The pool has fewer free buffers than the packet needs.
    Starved,
    /// The batch has no room for all copies of the packet.
    ListFull,
}

/// Takes a packet with as many buffers of the same lengths as `source`, at most [`MAX_SEGMENTS`], and adds its copies
/// to `batch`. Returns the new packet and the number of bytes to copy. On error, no copies are gathered and no buffers
/// are taken. The offload header in front of the first buffer's data, if any, is copied with that buffer.
#[cold]
pub(super) fn copy<const IMMEDIATE: bool>(
    source: &Packet,
    cache: &mut PoolCache,
    batch: &mut Batch<'_, InFlight, IMMEDIATE>,
) -> Result<(Packet, usize), NoCopy> {
    let pool = cache.pool();
    let mut from: ArrayVec<(*const u8, usize), MAX_SEGMENTS> = ArrayVec::new();
    pool.for_each_segment(source, |data, len| from.push((data.as_ptr().cast_const(), len)));
    if from.len() > batch.room() {
        return Err(NoCopy::ListFull);
    }
    let header = if source.has_offload() { HEADER_LEN } else { 0 };
    let mut total = header;
    // From the last to the first buffer, because packets of several buffers are linked in that order.
    let mut copy: Option<Packet> = None;
    for (index, &(src, len)) in from.iter().enumerate().rev() {
        let headroom = match index {
            0 => source.headroom(),
            _ => HEADROOM.min(pool.chunk_size() - len),
        };
        let Some(buffer) = cache.take_sized(headroom, len) else {
            batch.cancel();
            cache.free_all(copy);
            return Err(NoCopy::Starved);
        };
        let dst = buffer.data().as_ptr();
        let lead = if index == 0 { header } else { 0 };
        let (src, dst) = (src.wrapping_sub(lead), dst.wrapping_sub(lead));
        batch.copy(src, dst, (len + lead) as u32);
        total += len;
        copy = Some(match copy {
            Some(rest) => pool.link(buffer, rest),
            None => buffer,
        });
    }
    let mut copy = copy.ok_or(NoCopy::Starved)?;
    copy.set_offload(source.has_offload());
    Ok((copy, total))
}

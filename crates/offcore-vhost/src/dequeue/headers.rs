//! Checks of the virtio-net headers of packets that guests transmit. Each header is checked once, on a private copy.

use offcore_dma::CopyOp;
use offcore_mem::{Burst, Packet, PoolCache};
use offcore_wire::virtio_net::{self, NetHeader, Offloads};

use super::Dequeued;
use super::backlog::{Backlog, SMALL_BURST_BYTES};
use crate::features::NET_HEADER;

/// Bits of the first two bytes of a virtio-net header (`flags` and `gso_type`) that request an offload.
const ASKS: u16 = u16::from_le_bytes([virtio_net::VIRTIO_NET_HDR_F_NEEDS_CSUM, u8::MAX]);

/// The bits of `gso_type` in these two bytes.
const GSO: u16 = u16::from_le_bytes([0, u8::MAX]);

/// Like [`check_headers`], for a burst in which each packet was written by a single copy of `copies`.
///
/// # Safety
/// Each copy must have at least two bytes, and its destination must be mapped memory that is not written concurrently.
#[inline(always)]
pub(super) unsafe fn check_copies(
    copies: &[CopyOp],
    burst: &mut Burst,
    first: usize,
    offloads: Offloads,
    cache: &mut PoolCache,
    dequeued: &mut Dequeued,
    backlog: &mut Backlog,
) {
    let (mut asked, mut bytes) = (0, 0);
    for copy in copies {
        // SAFETY: the destination is mapped and has at least two bytes, as the caller guarantees.
        asked |= unsafe { copy.dst.cast::<u16>().read_unaligned() };
        bytes += u64::from(copy.len);
    }
    dequeued.packets += copies.len();
    dequeued.bytes += bytes - (NET_HEADER * copies.len()) as u64;
    if asked & ASKS != 0 {
        check_offloads(burst, first, offloads, cache, dequeued);
        // In most cases, packets only request checksums and are short.
        if asked & GSO != 0 || dequeued.bytes > SMALL_BURST_BYTES {
            backlog.defer_excess(burst, first, cache.pool(), dequeued);
        }
    }
}

/// Counts the packets from `first` on, and checks those whose virtio-net header requests an offload.
#[inline(always)]
pub(super) fn check_headers(
    burst: &mut Burst,
    first: usize,
    offloads: Offloads,
    cache: &mut PoolCache,
    dequeued: &mut Dequeued,
    backlog: &mut Backlog,
) {
    let (mut asked, mut bytes) = (0, 0);
    for packet in &burst[first..] {
        let header = packet.headroom_bytes(NET_HEADER);
        // `flags` and `gso_type` as one number.
        asked |= u16::from_le_bytes([header[0], header[1]]);
        bytes += packet.len() as u64;
    }
    dequeued.packets += burst.len() - first;
    dequeued.bytes += bytes;
    if asked & ASKS != 0 || !Packet::all_plain(&burst[first..]) {
        check_offloads(burst, first, offloads, cache, dequeued);
        // In most cases, packets only request checksums and are short.
        if asked & GSO != 0 || dequeued.bytes > SMALL_BURST_BYTES {
            backlog.defer_excess(burst, first, cache.pool(), dequeued);
        }
    }
}

/// Marks the packets that request an offload, and drops those whose request is invalid or was not negotiated.
#[cold]
fn check_offloads(
    burst: &mut Burst,
    first: usize,
    offloads: Offloads,
    cache: &mut PoolCache,
    dequeued: &mut Dequeued,
) {
    let mut index = first;
    while index < burst.len() {
        let (packet, pool) = (&mut burst[index], cache.pool());
        let total = pool.total_len(packet);
        dequeued.bytes += (total - packet.len()) as u64;
        let bytes = packet.headroom_mut(NET_HEADER);
        let header = bytes.first_chunk().map(NetHeader::from_bytes).unwrap_or_default();
        match asked_for(header, total, offloads) {
            Ok(None) => {}
            Ok(Some(header)) => {
                // copy-ok: the validated header, without the other bytes that the guest wrote there
                bytes.copy_from_slice(&header.to_bytes());
                packet.set_offload(true);
            }
            Err(Malformed) => {
                let packet = burst.remove(index);
                dequeued.packets -= 1;
                dequeued.bytes -= total as u64;
                dequeued.malformed += 1;
                cache.free(packet);
                continue;
            }
        }
        index += 1;
    }
}

/// A header requests an offload that is invalid or was not negotiated.
#[derive(Debug)]
pub(crate) struct Malformed;

/// Returns the offloads that a guest's header requests for a frame of `total` bytes, or `None` if it requests none.
#[inline]
pub(crate) fn asked_for(
    header: NetHeader,
    total: usize,
    offloads: Offloads,
) -> Result<Option<NetHeader>, Malformed> {
    let flags = header.flags & virtio_net::VIRTIO_NET_HDR_F_NEEDS_CSUM;
    let header = NetHeader { flags, num_buffers: 0, ..header };
    // Each segment has its own checksum, so segmentation requires NEEDS_CSUM (virtio 1.2, section 5.1.6.2.1).
    let open = header.needs_checksum() || !header.is_gso();
    if header.check(total).is_err() || !offloads.allows(&header) || !open {
        return Err(Malformed);
    }
    Ok((header.needs_checksum() || header.is_gso()).then_some(header))
}

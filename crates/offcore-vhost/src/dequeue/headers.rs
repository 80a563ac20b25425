//! The virtio-net headers of packets that guests transmit: what they ask for, checked once, on private copies.

use offcore_dma::CopyOp;
use offcore_mem::{Burst, Packet, PoolCache};
use offcore_wire::virtio_net::{self, NetHeader, Offloads};

use super::Dequeued;
use super::backlog::{Backlog, LITTLE};
use crate::features::NET_HEADER;

/// Bits of the first two bytes of a virtio-net header that asks for something: `flags` and `gso_type`.
const ASKS: u16 = u16::from_le_bytes([virtio_net::VIRTIO_NET_HDR_F_NEEDS_CSUM, u8::MAX]);

/// Those of the second.
const GSO: u16 = u16::from_le_bytes([0, u8::MAX]);

/// Does what [`check_headers`] does, of packets that are each made by one of `copies`.
///
/// # Safety
/// Each of the copies is of two bytes at least, into memory that is there and that nobody writes.
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
        // SAFETY: as the caller promises.
        asked |= unsafe { copy.dst.cast::<u16>().read_unaligned() };
        bytes += u64::from(copy.len);
    }
    dequeued.packets += copies.len();
    dequeued.bytes += bytes - (NET_HEADER * copies.len()) as u64;
    if asked & ASKS != 0 {
        check_offloads(burst, first, offloads, cache, dequeued);
        // Nearly always it is the checksums of short packets.
        if asked & GSO != 0 || dequeued.bytes > LITTLE {
            backlog.keep_back(burst, first, cache.pool(), dequeued);
        }
    }
}

/// Counts the packets from `first` on, and looks at those whose virtio-net header asks for something.
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
        // `flags` and `gso_type`, in one.
        asked |= u16::from_le_bytes([header[0], header[1]]);
        bytes += packet.len() as u64;
    }
    dequeued.packets += burst.len() - first;
    dequeued.bytes += bytes;
    if asked & ASKS != 0 || !Packet::all_plain(&burst[first..]) {
        check_offloads(burst, first, offloads, cache, dequeued);
        // Nearly always it is the checksums of short packets.
        if asked & GSO != 0 || dequeued.bytes > LITTLE {
            backlog.keep_back(burst, first, cache.pool(), dequeued);
        }
    }
}

/// Marks the packets that ask for something, and drops those that ask for what makes no sense or was not negotiated.
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
                // copy-ok: the header as it was understood, without what else the guest wrote there
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

/// A header asks for what makes no sense or was not negotiated.
#[derive(Debug)]
pub(crate) struct Malformed;

/// What a header that a guest wrote asks for, if anything, in front of a frame of `total` bytes.
#[inline]
pub(crate) fn asked_for(
    header: NetHeader,
    total: usize,
    offloads: Offloads,
) -> Result<Option<NetHeader>, Malformed> {
    let flags = header.flags & virtio_net::VIRTIO_NET_HDR_F_NEEDS_CSUM;
    let header = NetHeader { flags, num_buffers: 0, ..header };
    // Segments have checksums of their own, so they are left open, too (virtio 1.2, section 5.1.6.2.1).
    let open = header.needs_checksum() || !header.is_gso();
    if header.check(total).is_err() || !offloads.allows(&header) || !open {
        return Err(Malformed);
    }
    Ok((header.needs_checksum() || header.is_gso()).then_some(header))
}

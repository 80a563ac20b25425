//! Assembles a received packet that arrives in several buffers.

use std::mem;

use arrayvec::ArrayVec;
use offcore_mem::{HEADROOM, Packet, PoolCache};
use offcore_wire::ethernet;
use offcore_wire::virtio_net::{HEADER_LEN, NetHeader};

use super::{MAX_FRAME, MAX_SEGMENTS};
use crate::DropReason;

/// A packet in several buffers, whose first buffers have arrived.
#[derive(Debug)]
pub(super) struct Merging {
    pub(super) header: NetHeader,
    /// Number of buffers that have not arrived yet.
    pub(super) left: u16,
    parts: ArrayVec<Packet, MAX_SEGMENTS>,
    /// Number of bytes in `parts`, without the header.
    total: usize,
    /// Why the packet is rejected, if it is. The rest of its buffers are only counted.
    refused: Option<DropReason>,
}

impl Merging {
    /// Starts with the first buffer, whose header contains the number of buffers.
    pub(super) fn new(header: NetHeader, first: Packet, cache: &mut PoolCache) -> Box<Self> {
        let mut merging = Box::new(Self {
            header,
            left: header.num_buffers - 1,
            total: first.len(),
            parts: ArrayVec::new(),
            refused: None,
        });
        // Forwarding reads and writes the Ethernet header in the first buffer.
        let short = first.len() < ethernet::HEADER_LEN;
        merging.parts.push(first);
        if short {
            merging.refuse(DropReason::Malformed, cache);
        } else if usize::from(header.num_buffers) > MAX_SEGMENTS {
            merging.refuse(DropReason::TooBig, cache);
        }
        merging
    }

    /// Adds the next buffer, into which the back end claims to have written `len` bytes.
    pub(super) fn add(&mut self, mut part: Packet, len: u32, cache: &mut PoolCache) {
        self.left -= 1;
        let (pool, len) = (cache.pool(), len as usize);
        if self.refused.is_some() {
            cache.free(part);
        } else if len == 0 || len > pool.data_room() + HEADER_LEN {
            cache.free(part);
            self.refuse(DropReason::Malformed, cache);
        } else if self.total + len > MAX_FRAME {
            cache.free(part);
            self.refuse(DropReason::TooBig, cache);
        } else {
            // Only the first buffer has a header.
            part.set_range(pool, HEADROOM - HEADER_LEN, len);
            self.parts.push(part);
            self.total += len;
        }
    }

    fn refuse(&mut self, reason: DropReason, cache: &mut PoolCache) {
        self.refused = Some(reason);
        self.free(cache);
    }

    /// Returns the packet. All its buffers must have arrived.
    pub(super) fn finish(mut self, cache: &mut PoolCache) -> Result<Packet, DropReason> {
        if let Some(reason) = self.refused {
            return Err(reason);
        }
        let pool = cache.pool();
        let parts = mem::take(&mut self.parts).into_iter().rev();
        parts.reduce(|rest, front| pool.link(front, rest)).ok_or(DropReason::Malformed)
    }

    /// Frees the buffers that have arrived.
    pub(super) fn free(&mut self, cache: &mut PoolCache) {
        cache.free_all(self.parts.drain(..));
    }
}

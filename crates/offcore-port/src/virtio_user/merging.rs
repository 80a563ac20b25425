//! A packet that comes in several buffers, of which some have come.

use std::mem;

use arrayvec::ArrayVec;
use offcore_mem::{HEADROOM, Packet, PoolCache};
use offcore_wire::ethernet;
use offcore_wire::virtio_net::{HEADER_LEN, NetHeader};

use super::{MAX_FRAME, MAX_SEGMENTS};
use crate::DropReason;

/// A packet in several buffers, some of which have come.
#[derive(Debug)]
pub(super) struct Merging {
    pub(super) header: NetHeader,
    /// Buffers still to come.
    pub(super) left: u16,
    parts: ArrayVec<Packet, MAX_SEGMENTS>,
    /// Bytes in them, without the header.
    total: usize,
    /// Why it cannot be received, when it cannot: its buffers are only counted down.
    refused: Option<DropReason>,
}

impl Merging {
    /// Begins with the buffer that has the header, which says how many there are.
    pub(super) fn new(header: NetHeader, first: Packet, cache: &mut PoolCache) -> Box<Self> {
        let mut merging = Box::new(Self {
            header,
            left: header.num_buffers - 1,
            total: first.len(),
            parts: ArrayVec::new(),
            refused: None,
        });
        // Who forwards packets looks for Ethernet addresses in the first buffer.
        let short = first.len() < ethernet::HEADER_LEN;
        merging.parts.push(first);
        if short {
            merging.refuse(DropReason::Malformed, cache);
        } else if usize::from(header.num_buffers) > MAX_SEGMENTS {
            merging.refuse(DropReason::TooBig, cache);
        }
        merging
    }

    /// Adds the next buffer, into which the back end says that it wrote `len` bytes.
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
            // Only the first one has a header.
            part.set_range(pool, HEADROOM - HEADER_LEN, len);
            self.parts.push(part);
            self.total += len;
        }
    }

    fn refuse(&mut self, reason: DropReason, cache: &mut PoolCache) {
        self.refused = Some(reason);
        self.free(cache);
    }

    /// The packet, of which all buffers have come.
    pub(super) fn finish(mut self, cache: &mut PoolCache) -> Result<Packet, DropReason> {
        if let Some(reason) = self.refused {
            return Err(reason);
        }
        let pool = cache.pool();
        let parts = mem::take(&mut self.parts).into_iter().rev();
        parts.reduce(|rest, front| pool.link(front, rest)).ok_or(DropReason::Malformed)
    }

    /// Frees the buffers that have come.
    pub(super) fn free(&mut self, cache: &mut PoolCache) {
        cache.free_all(self.parts.drain(..));
    }
}

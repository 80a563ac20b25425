//! Packets from the host to itself: the loopback interface, and copies of sent multicast and broadcast datagrams.

use std::mem;

use offcore_dma::Context;
use offcore_mem::{BURST, Burst, PoolCache};
use offcore_stats::time::Time;
use offcore_wire::virtio_net::Offloads;

use super::Path;

/// Maximum number of bytes that one turn receives, so that one stream does not delay others.
const TURN: usize = 256 << 10;

impl Path {
    /// Adds the [loopback interface](crate::proto::Stack::add_loopback). All interfaces of ports must exist already.
    pub fn add_loopback(&mut self) {
        let iface = self.stack.add_loopback();
        self.links.loopback = Some(iface);
        self.set_link(
            iface,
            Offloads { checksum: true, tso4: true, tso6: true, ..Offloads::default() },
            true,
        );
    }

    /// Receives packets that the host has sent to itself: up to a burst, or `TURN` bytes. Returns the number of
    /// packets, and at least 1 if packets are left.
    pub fn receive_looped(&mut self, ctx: &mut Context<'_>, now: Time) -> usize {
        let Some(iface) = self.links.loopback else { return 0 };
        let (is_open, pool) = (self.is_open(), self.pool);
        let queue = &mut self.links.get(iface).queue;
        if queue.is_empty() || !is_open {
            return usize::from(!queue.is_empty());
        }
        let (mut burst, mut bytes) = (Burst::new(), 0);
        while bytes < TURN
            && burst.len() < BURST
            && let Some(packet) = queue.drain(..queue.len().min(1)).next()
        {
            bytes += pool.total_len(&packet);
            burst.push(packet);
        }
        let count = burst.len();
        self.receive(ctx, now, iface, &mut burst);
        count
    }

    /// Frees the packets that the host has sent to itself and not yet received.
    pub fn drop_loopback(&mut self, cache: &mut PoolCache) {
        if let Some(iface) = self.links.loopback {
            cache.free_all(self.links.get(iface).queue.drain(..));
        }
    }

    /// Delivers copies of sent datagrams to sockets of this host.
    pub(super) fn take_own_copies(&mut self, ctx: &mut Context<'_>) {
        if !self.links.own_copies.is_empty() {
            let copies = mem::take(&mut self.links.own_copies);
            self.take_copies(copies, ctx);
            self.submit_places(ctx);
        }
    }
}

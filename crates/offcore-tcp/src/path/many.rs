//! Datagrams for several sockets. The core makes a copy of the packet for each socket.

use std::mem;

use offcore_dma::Context;
use offcore_mem::{HEADROOM, Packet, PoolCache};

use super::{Path, Placing, buffers};

impl Path {
    /// Queues the copies of datagrams for several sockets. Each packet belongs to an entry of
    /// [`Out::to_many`](crate::proto::Out::to_many), in order.
    #[cold]
    pub(super) fn take_copies(&mut self, packets: Vec<Packet>, ctx: &mut Context<'_>) {
        let Self { stack, out, pool, rx, .. } = self;
        let (mut all, mut sockets) = (mem::take(&mut out.to_many), mem::take(&mut out.receivers));
        let mut receivers = sockets.drain(..);
        for (packet, many) in packets.into_iter().zip(all.drain(..)) {
            let mut packet = Some(packet);
            for (left, socket) in (0..many.count).rev().zip(&mut receivers) {
                let copy = match left {
                    0 => packet.take(),
                    _ => packet.as_ref().and_then(|packet| copy_of(packet, ctx.cache)),
                };
                match (stack.copy_to(socket, &many, copy.is_some(), out), copy) {
                    (Some(place), Some(packet)) => {
                        let held = buffers(&packet, pool);
                        rx.push(Placing { packet, place }, held);
                    }
                    (_, unused) => ctx.cache.free_all(unused),
                }
            }
        }
        drop(receivers);
        (out.to_many, out.receivers) = (all, sockets);
    }
}

/// Returns a copy of a packet, or `None` if the pool has no buffers.
pub(super) fn copy_of(packet: &Packet, cache: &mut PoolCache) -> Option<Packet> {
    let pool = cache.pool();
    let mut copy = cache.take_chain(HEADROOM, pool.total_len(packet))?;
    let mut parts = pool.segments_mut(&mut copy);
    let mut room: &mut [u8] = &mut [];
    for mut from in pool.segments(packet) {
        while !from.is_empty() {
            if room.is_empty() {
                room = parts.next()?;
            }
            let len = from.len().min(room.len());
            let (to, later) = mem::take(&mut room).split_at_mut(len);
            // copy-ok: a datagram for an additional socket
            to.copy_from_slice(&from[..len]);
            (room, from) = (later, &from[len..]);
        }
    }
    Some(copy)
}

//! Sending through a packet socket's ring: the packets of a burst are copied into slots, and one system call makes the
//! kernel send them all.
//!
//! The virtio-net header in front of each packet sets the header length to the packet's length. The kernel then copies
//! the packet out of its slot instead of referring to the slot's pages: for packets of ordinary length that takes a
//! quarter less time, and the slot is free again when the call returns.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use arrayvec::ArrayVec;
use offcore_dma::CopyOp;
use offcore_dma::cpu::Copier;
use offcore_mem::{BURST, Burst, Packet, Pool};
use offcore_stats::Stage;
use offcore_wire::ethernet;
use offcore_wire::virtio_net::Offloads;
use rustix::io::Errno;
use rustix::net::SendFlags;

use super::ring::{self, Ring};
use super::socket::VNET_HEADER;
use super::{State, long};
use crate::base::cell::End;
use crate::{Accepts, Context, DropReason, TxCounters, TxQueue, offload_fallback};

/// Number of rounds that a stopping queue waits for the kernel to send requested packets.
const LAST_ROUNDS: u32 = 1000;

/// The sockets that one queue sends through.
#[derive(Debug)]
pub(super) struct Sender {
    pub(super) ring: Ring,
    /// The socket for packets that are longer than a slot.
    pub(super) beside: OwnedFd,
}

/// The sending half of a queue.
#[derive(Debug)]
pub(super) struct AfPacketTx {
    end: End<Sender>,
    state: Arc<State>,
    pool: &'static Pool,
    offloads: Offloads,
    counters: TxCounters,
    copier: Copier,
    /// Number of requested slots before the next slot that the kernel has not sent.
    requested: usize,
    requested_bytes: u64,
    last_rounds: u32,
}

impl AfPacketTx {
    pub(super) fn new(
        end: End<Sender>,
        state: Arc<State>,
        pool: &'static Pool,
        offloads: Offloads,
        counters: TxCounters,
    ) -> Self {
        let copier = Copier::default();
        Self {
            end,
            state,
            pool,
            offloads,
            counters,
            copier,
            requested: 0,
            requested_bytes: 0,
            last_rounds: 0,
        }
    }

    /// Copies packets from `packets` into slots, up to the first packet that finds no idle slot, is longer than
    /// `longest`, or is shorter than an Ethernet header; returns the number of copied packets.
    #[inline]
    fn fill(&mut self, packets: &[Packet], longest: usize) -> usize {
        let Some(Sender { ring, .. }) = &mut self.end.ring else { return 0 };
        let mut copies: ArrayVec<CopyOp, BURST> = ArrayVec::new();
        for packet in packets {
            let at = copies.len();
            ring.prefetch(at, 1);
            let fits = (ethernet::HEADER_LEN..=longest).contains(&packet.len());
            if packet.is_segmented() || !fits || ring.status(at) != ring::IDLE {
                break;
            }
            let dst = ring.prepare(at, &vnet(packet), packet.len()).as_ptr();
            copies.push(CopyOp { src: packet.data().as_ptr(), dst, len: packet.len() as u32, token: 0 });
        }
        // SAFETY: each copy reads a packet and writes an idle slot that has room for it; both belong to this queue.
        unsafe { self.copier.copy_burst(&copies) };
        for slot in 0..copies.len() {
            ring.set_status(slot, ring::SEND_REQUEST);
        }
        ring.advance(copies.len());
        self.requested += copies.len();
        self.requested_bytes += copies.iter().map(|copy| u64::from(copy.len)).sum::<u64>();
        copies.len()
    }

    /// Makes the kernel send the packets in the ring, and counts them. Packets that it did not send stay for the next
    /// call, unless the link is down.
    #[inline]
    fn kick(&mut self) {
        if self.requested == 0 {
            return;
        }
        let Some(Sender { ring, .. }) = &mut self.end.ring else { return };
        let result = rustix::net::send(&ring.socket, &[], SendFlags::DONTWAIT);
        let unsent = unsent(ring, self.requested);
        let bytes = if unsent == 0 { 0 } else { bytes_of(ring, unsent) };
        self.counters.add((self.requested - unsent) as u64, self.requested_bytes - bytes);
        (self.requested, self.requested_bytes) = (unsent, bytes);
        match result {
            _ if unsent == 0 => {}
            Ok(_) | Err(Errno::AGAIN | Errno::NOBUFS | Errno::INTR) => {}
            Err(error) => self.revoke(reason(error)),
        }
    }

    /// Takes back the requested packets that the kernel has not sent, and counts them as dropped.
    #[cold]
    fn revoke(&mut self, reason: DropReason) {
        let requested = std::mem::take(&mut self.requested);
        self.requested_bytes = 0;
        let Some(Sender { ring, .. }) = &mut self.end.ring else { return };
        ring.step_back(requested);
        for slot in 0..requested {
            ring.set_status(slot, ring::IDLE);
        }
        self.counters.drop(reason, requested as u64);
    }

    /// Sends a packet at which `fill` stopped through the other socket, after all packets in the ring. Returns `None`
    /// if `fill` did not stop because of the packet's length, or if the kernel has no room now. A packet shorter than
    /// an Ethernet header is dropped here, because the kernel would skip it silently.
    #[cold]
    fn send_long(&mut self, packet: &Packet, longest: usize) -> Option<()> {
        let Sender { beside, .. } = self.end.ring.as_ref()?;
        if self.pool.total_len(packet) < ethernet::HEADER_LEN {
            self.counters.drop(DropReason::Malformed, 1);
            return Some(());
        }
        if !packet.is_segmented() && packet.len() <= longest {
            return None;
        }
        match long::send(beside, self.pool, packet) {
            Ok(len) => self.counters.add(1, len as u64),
            Err(Errno::AGAIN | Errno::NOBUFS | Errno::INTR) => return None,
            Err(error) => self.counters.drop(reason(error), 1),
        }
        Some(())
    }

    fn drop_all(&mut self, reason: DropReason, ctx: &mut Context<'_>, burst: &mut Burst) {
        self.counters.drop_all(reason, burst, ctx.cache);
        ctx.clock.lap(Stage::Tx);
    }
}

/// Returns the virtio-net header of a packet in the ring: its offload requests, with the whole packet as header length.
#[inline(always)]
fn vnet(packet: &Packet) -> [u8; VNET_HEADER] {
    let mut header = if packet.has_offload() { offload_fallback::header(packet) } else { Default::default() };
    header.hdr_len = packet.len() as u16;
    *header.to_bytes().first_chunk().expect("the header has as many bytes, and two more")
}

/// Returns how many of the last `requested` slots the kernel has not sent. It sends in order.
#[inline]
fn unsent(ring: &Ring, requested: usize) -> usize {
    let back = |n: usize| ring.slots() - n;
    (1..=requested).take_while(|&n| ring.status(back(n)) == ring::SEND_REQUEST).count()
}

/// Returns the total length of the frames in the last `slots` slots.
#[cold]
fn bytes_of(ring: &Ring, slots: usize) -> u64 {
    (1..=slots).map(|n| ring.prepared(ring.slots() - n) as u64).sum()
}

/// Returns the drop reason of packets that are not sent because of `error`.
fn reason(error: Errno) -> DropReason {
    match error {
        Errno::NETDOWN | Errno::NXIO | Errno::NODEV | Errno::IO => DropReason::Down,
        Errno::MSGSIZE => DropReason::TooBig,
        _ => DropReason::Failed,
    }
}

impl TxQueue for AfPacketTx {
    fn tx(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        if burst.is_empty() {
            return;
        }
        if self.end.is_stale() {
            self.revoke(DropReason::Down);
            self.end.follow();
        }
        if !self.state.is_up.load(Ordering::Relaxed) || self.end.ring.is_none() {
            return self.drop_all(DropReason::Down, ctx, burst);
        }
        // The kernel checks the length of packets sent through the other socket, but not of packets in the ring.
        let mtu = self.state.mtu.load(Ordering::Relaxed) + ethernet::HEADER_LEN;
        let longest = self.end.ring.as_ref().map_or(0, |sender| sender.ring.tx_room().min(mtu));
        let mut taken = 0;
        while taken < burst.len() {
            taken += self.fill(&burst[taken..], longest);
            self.kick();
            if taken == burst.len() || self.requested > 0 {
                break;
            }
            if self.send_long(&burst[taken], longest).is_none() {
                break;
            }
            taken += 1;
        }
        ctx.cache.free_front(burst, taken);
        ctx.clock.lap(Stage::Tx);
    }

    fn accepts(&self) -> Accepts {
        Accepts { offloads: self.offloads, segments: true }
    }

    /// Requests sending again for packets that the kernel has not sent.
    fn poll(&mut self, _ctx: &mut Context<'_>) {
        self.kick();
    }

    fn counters(&self) -> &TxCounters {
        &self.counters
    }

    fn stop(&mut self, _ctx: &mut Context<'_>) -> bool {
        self.kick();
        self.last_rounds += 1;
        if self.requested > 0 && self.last_rounds >= LAST_ROUNDS {
            self.revoke(DropReason::Full);
        }
        self.requested == 0
    }
}

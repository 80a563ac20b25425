//! Sending through a packet socket's ring: a burst's packets are copied into slots, and one system call has the kernel
//! send them all.
//!
//! The virtio-net header in front of each says that all of it is headers. The kernel then copies the packet out of its
//! slot, rather than have the network stack refer to the slot's pages: for packets of ordinary lengths that is a
//! quarter cheaper, and a slot is free again as soon as the call returns.

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

/// Rounds that a queue which is stopped gives the kernel to take what it has been asked to send.
const LAST_ROUNDS: u32 = 1000;

/// What one queue sends through.
#[derive(Debug)]
pub(super) struct Sender {
    pub(super) ring: Ring,
    /// For packets that no slot has room for.
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
    /// Slots before the next one that the kernel has been asked to send and has not.
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

    /// Copies packets from `packets` into slots, up to the first that has no slot, is longer than `longest`, or no
    /// frame at all; returns how many.
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
        // SAFETY: each copy is from a packet that is ours to a slot that is, and has room for it.
        unsafe { self.copier.copy_burst(&copies) };
        for slot in 0..copies.len() {
            ring.set_status(slot, ring::SEND_REQUEST);
        }
        ring.advance(copies.len());
        self.requested += copies.len();
        self.requested_bytes += copies.iter().map(|copy| u64::from(copy.len)).sum::<u64>();
        copies.len()
    }

    /// Has the kernel send what is in the ring, and counts it. What it did not take stays for the next time, unless the
    /// link is down.
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

    /// Takes back what the kernel has not sent, and counts it as dropped.
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

    /// Sends a packet that `fill` stopped at beside the ring, behind all that are in it; `None` when it was not for its
    /// length that it stopped, or the kernel has no room now. The kernel would skip one that is no frame, and not say so.
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

/// The virtio-net header of a packet in the ring: what it asks for, and that all of it is headers.
#[inline(always)]
fn vnet(packet: &Packet) -> [u8; VNET_HEADER] {
    let mut header = if packet.has_offload() { offload_fallback::header(packet) } else { Default::default() };
    header.hdr_len = packet.len() as u16;
    *header.to_bytes().first_chunk().expect("the header has as many bytes, and two more")
}

/// How many of the last `requested` slots the kernel has not sent: it sends in order.
#[inline]
fn unsent(ring: &Ring, requested: usize) -> usize {
    let back = |n: usize| ring.slots() - n;
    (1..=requested).take_while(|&n| ring.status(back(n)) == ring::SEND_REQUEST).count()
}

/// Bytes of the frames in the last `slots` slots.
#[cold]
fn bytes_of(ring: &Ring, slots: usize) -> u64 {
    (1..=slots).map(|n| ring.prepared(ring.slots() - n) as u64).sum()
}

/// Why packets that are not sent for `error` are dropped.
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
        // The kernel does not look whether packets in the ring are longer than the interface takes; beside it, it does.
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

    /// Asks again for what the kernel has not sent.
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

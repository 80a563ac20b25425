//! Walking the chains of two guests, and matching each packet with the chains that receive it.

use std::ptr::NonNull;

use arrayvec::ArrayVec;
use offcore_dma::Batch;
use offcore_mem::BURST;
use offcore_ring::device::{Buffer, Chain, DeviceQueue, Direction, Wanted};
use offcore_ring::{RingError, prefetch};
use offcore_wire::virtio_net::{self, HEADER_LEN, NetHeader, Offloads};

use super::Forwarded;
use super::head::{self, Head};
use crate::cell::VringConfig;
use crate::dequeue::MAX_FRAME;
use crate::dequeue::headers::asked_for;
use crate::features::NET_HEADER;
use crate::pieces::{self, MAX_PIECES, Piece};
use crate::room::{Allowance, LONGEST_SINGLE, Room, Unfit};
use crate::vring::{Chains, Out};

/// Maximum length of a run after a run that was cut short, in packets.
const SHORT_REACH: u16 = 4;

/// Reason for the end of a batch.
pub(super) enum End {
    /// All available packets were taken, or as many as requested.
    Done,
    /// The list or the channel has no room for the copies of the next packet.
    NoRoom,
    /// The next packet must use the ordinary path.
    Ordinary,
    /// The sender violated the virtio specification.
    Sender(RingError),
    /// The receiver violated the virtio specification.
    Receiver(RingError),
}

/// Gathers the copies of one batch.
pub(super) struct PairGather<'a, 'b, const IMMEDIATE: bool> {
    pub(super) batch: &'a mut Batch<'b, Head, IMMEDIATE>,
    pub(super) chains: &'a mut Chains,
    pub(super) sender: &'a VringConfig,
    pub(super) receiver: &'a VringConfig,
    /// Offloads that the sender may request.
    pub(super) asks: Offloads,
    pub(super) accepts: Offloads,
    /// Whether a packet may use several chains of the receiver.
    pub(super) mergeable: bool,
    /// Known capacity of the receiver's next chains.
    pub(super) room: &'a mut Room,
    pub(super) allowance: Allowance,
    pub(super) forwarded: &'a mut Forwarded,
}

/// A packet in one buffer that fits into one buffer.
#[derive(Clone, Copy)]
struct Job {
    from: Buffer,
    to: NonNull<u8>,
    /// The sender's chain, followed by the receiver's.
    name: u16,
    receiving: u16,
}

/// Decision on a packet after its head was checked.
enum Verdict {
    Send,
    Drop,
    Ordinary,
}

impl<const IMMEDIATE: bool> PairGather<'_, '_, IMMEDIATE> {
    /// Takes at most `wanted` packets. Returns the number of packets entered and why the batch ended.
    #[inline(always)]
    pub(super) fn burst<F: DeviceQueue, T: DeviceQueue>(
        &mut self,
        tx: &mut F,
        rx: &mut T,
        wanted: usize,
        rewrite: &mut impl FnMut(&mut [u8]),
    ) -> (usize, End) {
        let known = match tx.look(wanted) {
            Ok(0) => return (0, End::Done),
            Ok(known) => known as u16,
            Err(error) => return (0, End::Sender(error)),
        };
        let ready = match rx.look(known.into()) {
            // The sender does not wait for a receiver without buffers.
            Ok(0) => return (0, End::Ordinary),
            Ok(ready) => ready as u16,
            Err(error) => return (0, End::Receiver(error)),
        };
        tx.prefetch_used(known.into());
        rx.prefetch_used(ready.into());
        let (mut sent, mut received, mut taken) = (0, 0, 0);
        let mut reach = u16::MAX;
        let end = loop {
            if sent >= known || taken >= wanted {
                break End::Done;
            }
            let most = (known - sent).min((wanted - taken) as u16).min(reach);
            let jobs = self.jobs(tx, rx, sent, received, most);
            let (mut entered, mut verdict) = (0, Verdict::Send);
            for job in &jobs {
                verdict = self.enter(job, rewrite, taken + entered);
                if !matches!(verdict, Verdict::Send) {
                    break;
                }
                entered += 1;
            }
            if IMMEDIATE {
                tx.push_used_singles(sent, entered as u16, Direction::Readable);
                rx.push_used_singles(received, entered as u16, Direction::Writable);
            }
            (sent, received, taken) = (sent + entered as u16, received + entered as u16, taken + entered);
            if entered > 0 {
                self.room.forget();
            }
            // Entries of a run that was cut short are looked at again. The next run is therefore shorter, so that the
            // cost stays linear even if two guests arrange their chains on purpose.
            let full = entered == usize::from(most);
            reach = if full { reach.saturating_mul(2) } else { SHORT_REACH };
            match verdict {
                Verdict::Send if full => continue,
                Verdict::Send => {}
                Verdict::Drop => {
                    // The chain is returned. The receiver's chain is used for the next packet.
                    self.forwarded.malformed += 1;
                    self.drop(tx, taken, Chain::one(jobs[entered].name));
                    (sent, taken) = (sent + 1, taken + 1);
                    continue;
                }
                Verdict::Ordinary => break End::Ordinary,
            }
            if taken > 0 && received >= ready {
                match rx.has(received) {
                    Ok(true) => {}
                    // The packets taken are submitted first. The next call finds no chains at once.
                    Ok(false) => break End::Done,
                    Err(error) => break End::Receiver(error),
                }
            }
            match self.several(tx, rx, sent, received, taken, rewrite) {
                Ok((tx_entries, rx_entries)) => {
                    (sent, received, taken) = (sent + tx_entries, received + rx_entries, taken + 1);
                    if rx_entries > 0 {
                        self.room.forget();
                    }
                    if self.allowance.is_exhausted() {
                        break End::Done;
                    }
                }
                Err(end) => break end,
            }
        };
        tx.consume(sent);
        rx.consume(received);
        (taken, end)
    }

    /// Returns at most `most` packets in one buffer that fit into one buffer, starting at `sent` and `received`.
    /// Prefetches the first cache line of each buffer.
    #[inline(always)]
    fn jobs<F: DeviceQueue, T: DeviceQueue>(
        &self,
        tx: &mut F,
        rx: &mut T,
        sent: u16,
        received: u16,
        most: u16,
    ) -> ArrayVec<Job, BURST> {
        let mut jobs: ArrayVec<Job, BURST> = ArrayVec::new();
        let most = usize::from(most).min(self.batch.room()).min(BURST) as u16;
        let (least, longest) = (head::LEAST as u32, LONGEST_SINGLE);
        let wanted = Wanted { direction: Direction::Readable, least, most: longest };
        for from in &*tx.singles(sent, most, &self.sender.memory, wanted) {
            prefetch::read(from.addr().as_ptr());
            let buffer = Buffer { addr: from.addr(), len: from.len() };
            jobs.push(Job { from: buffer, to: from.addr(), name: from.id(), receiving: 0 });
        }
        let wanted = Wanted { direction: Direction::Writable, least, most: u32::MAX };
        let singles = rx.singles(received, jobs.len() as u16, &self.receiver.memory, wanted);
        let mut matched = 0;
        for (job, to) in jobs.iter_mut().zip(singles) {
            if job.from.len > to.len() {
                break;
            }
            prefetch::write(to.addr().as_ptr());
            (job.to, job.receiving) = (to.addr(), to.id());
            to.set_written(job.from.len);
            matched += 1;
        }
        jobs.truncate(matched);
        jobs
    }

    /// Enters packet number `taken` of the batch, unless it must be dropped or use the ordinary path.
    #[inline(always)]
    fn enter(&mut self, job: &Job, rewrite: &mut impl FnMut(&mut [u8]), taken: usize) -> Verdict {
        let total = job.from.len as usize;
        let len = total.min(head::LEN);
        // SAFETY: the buffers of sender and receiver have at least `total` bytes, in memory that both rings hold.
        unsafe { self.batch.holder(taken).read(job.from.addr, job.to, len) };
        let verdict = self.look_at(taken, len, total, 1, rewrite);
        if !matches!(verdict, Verdict::Send) {
            return verdict;
        }
        if total > len {
            let (src, dst) = (job.from.addr.as_ptr(), job.to.as_ptr());
            self.batch.copy(src.wrapping_add(len), dst.wrapping_add(len), (total - len) as u32);
        }
        if IMMEDIATE {
            self.forwarded.packets += 1;
            self.forwarded.bytes += (total - NET_HEADER) as u64;
        } else {
            let (from, to) = (Chain::one(job.name), Chain::one(job.receiving));
            self.batch.holder(taken).enter(from, 1, to, total - NET_HEADER);
            self.batch.enter_filled();
        }
        Verdict::Send
    }

    /// Returns the sender's chain of packet number `taken` of the batch without delivering the packet.
    #[cold]
    fn drop<F: DeviceQueue>(&mut self, tx: &mut F, taken: usize, chain: Chain) {
        let head = self.batch.holder(taken);
        head.forget();
        if IMMEDIATE {
            tx.push_used(chain, 0);
        } else {
            head.enter(chain, 0, Chain::default(), 0);
            self.batch.enter_filled();
        }
    }

    /// Like [`Self::drop`], for a packet of `total` bytes that is too long for its receiver. Returns the number of
    /// entries used in both rings.
    fn drop_too_big<F: DeviceQueue>(
        &mut self,
        tx: &mut F,
        taken: usize,
        chain: Chain,
        total: usize,
    ) -> (u16, u16) {
        self.forwarded.too_big += 1;
        self.forwarded.too_big_bytes += (total - NET_HEADER) as u64;
        self.drop(tx, taken, chain);
        (chain.entries, 0)
    }

    /// Checks and rewrites the head of packet number `taken`. The head has `len` bytes, the packet has `total` bytes,
    /// and it goes into `chains` chains.
    #[inline(always)]
    fn look_at(
        &mut self,
        taken: usize,
        len: usize,
        total: usize,
        chains: u16,
        rewrite: &mut impl FnMut(&mut [u8]),
    ) -> Verdict {
        let (header, frame) = self.batch.holder(taken).bytes()[..len].split_at_mut(NET_HEADER);
        let plain = header[0] & virtio_net::VIRTIO_NET_HDR_F_NEEDS_CSUM == 0
            && header[1] == virtio_net::VIRTIO_NET_HDR_GSO_NONE;
        let mut written = [0; HEADER_LEN];
        if !plain {
            let found = header.first_chunk::<HEADER_LEN>().map(NetHeader::from_bytes).unwrap_or_default();
            let Ok(asked) = asked_for(found, total - NET_HEADER, self.asks) else { return Verdict::Drop };
            let asked = asked.unwrap_or_default();
            if !self.accepts.allows(&asked) {
                return Verdict::Ordinary;
            }
            written = asked.to_bytes();
        }
        [written[HEADER_LEN - 2], written[HEADER_LEN - 1]] = chains.to_le_bytes();
        // copy-ok: the header that the core writes
        header.copy_from_slice(&written);
        rewrite(frame);
        Verdict::Send
    }

    /// Handles a packet in several buffers, or a packet that needs zero or several receive buffers. Returns the number
    /// of entries used in both rings.
    #[cold]
    fn several<F: DeviceQueue, T: DeviceQueue>(
        &mut self,
        tx: &mut F,
        rx: &mut T,
        sent: u16,
        received: u16,
        taken: usize,
        rewrite: &mut impl FnMut(&mut [u8]),
    ) -> Result<(u16, u16), End> {
        let mut from: ArrayVec<Piece, MAX_PIECES> = ArrayVec::new();
        let mut total = 0usize;
        let mut most = MAX_PIECES;
        let walked = tx.walk(sent, &self.sender.memory, Direction::Readable, &mut most, |buffer| {
            from.push(Piece { addr: buffer.addr.as_ptr(), len: buffer.len });
            total += buffer.len as usize;
        });
        let chain = walked.map_err(End::Sender)?;
        self.allowance.spend(MAX_PIECES - most, total);
        if !(head::LEAST..=MAX_FRAME + NET_HEADER).contains(&total) {
            let short = total < head::LEAST;
            self.forwarded.malformed += usize::from(short);
            self.forwarded.too_long += usize::from(!short);
            self.drop(tx, taken, chain);
            return Ok((chain.entries, 0));
        }
        let mut to: ArrayVec<Piece, MAX_PIECES> = ArrayVec::new();
        let mut out: ArrayVec<Out, MAX_PIECES> = ArrayVec::new();
        let Some(entries) = self.chains_for(rx, received, total as u32, &mut to, &mut out)? else {
            return Ok(self.drop_too_big(tx, taken, chain, total));
        };
        if from.len() + to.len() > self.batch.room() {
            return Err(End::NoRoom);
        }
        // SAFETY: the pieces are ranges of both guests' memory, which their rings hold.
        let len = unsafe { self.batch.holder(taken).read_pieces(&mut from, &mut to) };
        if len < head::LEAST {
            return Err(End::Ordinary);
        }
        match self.look_at(taken, len, total, out.len() as u16, rewrite) {
            Verdict::Send => {}
            Verdict::Drop => {
                self.forwarded.malformed += 1;
                self.drop(tx, taken, chain);
                return Ok((chain.entries, 0));
            }
            Verdict::Ordinary => return Err(End::Ordinary),
        }
        let token = self.batch.token();
        pieces::copies(&from, &to, token, |copy| self.batch.list().push(copy));
        let frame = total - NET_HEADER;
        if IMMEDIATE {
            tx.push_used(chain, 0);
            out.iter().for_each(|out| rx.push_used(out.chain, out.written));
            self.forwarded.packets += 1;
            self.forwarded.bytes += frame as u64;
        } else {
            let (chains, to) = match out[..] {
                [Out { chain, .. }] => (1, chain),
                _ => {
                    out.iter().for_each(|&out| self.chains.push(out));
                    (out.len() as u16, Chain::default())
                }
            };
            self.batch.holder(taken).enter(chain, chains, to, frame);
            self.batch.enter_filled();
        }
        Ok((chain.entries, entries))
    }

    /// Walks the receiver's chains from `received` on until they hold a packet of `total` bytes. Returns the number of
    /// entries, or `None` if the chains are too short.
    fn chains_for<T: DeviceQueue>(
        &mut self,
        rx: &mut T,
        received: u16,
        total: u32,
        to: &mut ArrayVec<Piece, MAX_PIECES>,
        out: &mut ArrayVec<Out, MAX_PIECES>,
    ) -> Result<Option<u16>, End> {
        match self.room.refuses(total) {
            Some(Unfit::Never) => return Ok(None),
            Some(Unfit::Before(entry)) if !rx.has(received + entry).map_err(End::Receiver)? => {
                return Err(End::Ordinary);
            }
            _ => {}
        }
        let (mut left, mut ahead) = (total, received);
        // The limit applies to all chains of the packet together, as on the ordinary path.
        let mut most = MAX_PIECES;
        while left > 0 {
            if (!self.mergeable && !out.is_empty()) || to.is_full() || most == 0 {
                self.room.note(total - left, Unfit::Never);
                return Ok(None);
            }
            if !rx.has(ahead).map_err(End::Receiver)? {
                self.room.note(total - left, Unfit::Before(ahead - received));
                return Err(End::Ordinary);
            }
            let before = left;
            let walked = rx.walk(ahead, &self.receiver.memory, Direction::Writable, &mut most, |buffer| {
                let len = buffer.len.min(left);
                if len > 0 && !to.is_full() {
                    to.push(Piece { addr: buffer.addr.as_ptr(), len });
                    left -= len;
                }
            });
            let receiving = match walked {
                Err(RingError::TooManyBuffers { .. }) if !out.is_empty() => {
                    self.room.note(total - before, Unfit::Never);
                    return Ok(None);
                }
                walked => walked.map_err(End::Receiver)?,
            };
            out.push(Out { chain: receiving, written: before - left });
            ahead += receiving.entries;
        }
        self.allowance.spend(MAX_PIECES - most, 0);
        Ok(Some(ahead - received))
    }
}

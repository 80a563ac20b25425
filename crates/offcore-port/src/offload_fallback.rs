//! The software offload fallback: converts packets that the receiver does not accept into packets that it accepts.
//!
//! A guest or the kernel may send packets with partial checksums, unsegmented TCP and UDP packets of up to 64 KiB, also
//! inside a tunnel, and packets of several buffers. They pass unchanged to a port that accepts them. For any other
//! port, the CPU core completes checksums, segments packets, and copies several buffers into one.

use offcore_mem::{Burst, HEADROOM, Packet, Pool, PoolCache, Segments};
use offcore_stats::Stage;
use offcore_wire::checksum::{self, Sum};
use offcore_wire::gso::{GsoError, MAX_HEADERS, Segmenter};
use offcore_wire::virtio_net::{HEADER_LEN, NetHeader, Offloads};

use crate::{Context, DropReason, TxQueue};

/// Maximum number of segments of a packet: twice as many as 64 KiB need with TCP's default segment size of 536 bytes
/// (RFC 9293, 3.7.1). Segments of a few bytes are allowed, but a packet that needs more segments is dropped. Without a
/// limit, one burst could occupy the core for tens of milliseconds. The limit applies to each packet, not to the burst,
/// because a burst may contain packets of several senders.
const SEGMENTS: usize = 256;

/// Which packets a TX queue accepts that are not [plain](Packet::is_plain). By default, none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Accepts {
    /// The offloads that a packet's header may request.
    pub offloads: Offloads,
    /// Whether a packet may have several buffers.
    pub segments: bool,
}

impl Accepts {
    /// Returns whether the packet is accepted unchanged.
    #[inline]
    pub fn takes(&self, packet: &Packet) -> bool {
        packet.is_plain()
            || (self.segments || !packet.is_segmented())
                && (!packet.has_offload() || self.offloads.allows(&header(packet)))
    }
}

/// A receiver of packets: a TX queue, or the host stack.
pub trait Taker {
    /// See [`TxQueue::accepts`].
    fn accepts(&self) -> Accepts;

    /// See [`TxQueue::tx`].
    fn take(&mut self, ctx: &mut Context<'_>, burst: &mut Burst);

    /// Counts dropped packets.
    fn count_drop(&self, reason: DropReason, packets: u64);
}

impl<T: TxQueue + ?Sized> Taker for T {
    fn accepts(&self) -> Accepts {
        TxQueue::accepts(self)
    }

    fn take(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        self.tx(ctx, burst);
    }

    fn count_drop(&self, reason: DropReason, packets: u64) {
        self.counters().drop(reason, packets);
    }
}

/// Converts the packets in `burst` into packets that `to` accepts, in order. If a burst has no room for all of them,
/// the first ones are sent to `to`. A packet that cannot be converted, or needs more than 256 segments, is dropped and
/// counted.
pub fn fall_back<T: Taker + ?Sized>(to: &mut T, ctx: &mut Context<'_>, burst: &mut Burst) {
    let accepts = to.accepts();
    if burst.iter().all(|packet| accepts.takes(packet)) {
        return;
    }
    fall_back_slowly(accepts, to, ctx, burst);
}

#[cold]
fn fall_back_slowly<T: Taker + ?Sized>(
    accepts: Accepts,
    to: &mut T,
    ctx: &mut Context<'_>,
    burst: &mut Burst,
) {
    let packets = std::mem::take(burst);
    let mut out = Out { to, burst };
    for packet in packets {
        match fallback_for(accepts, packet, ctx.cache) {
            Fallback::Packet(packet) => out.push(packet, ctx),
            Fallback::Segment(packet) => {
                if let Err((reason, packets)) = segment(accepts, &packet, ctx, &mut out) {
                    out.to.count_drop(reason, packets);
                }
                ctx.cache.free(packet);
            }
            Fallback::Drop(packet, reason) => {
                out.to.count_drop(reason, 1);
                ctx.cache.free(packet);
            }
        }
    }
    ctx.clock.lap(Stage::Copy);
}

/// Returns the header in front of a packet with an offload request, and the default header for any other packet.
#[inline]
pub(crate) fn header(packet: &Packet) -> NetHeader {
    if !packet.has_offload() {
        return NetHeader::default();
    }
    packet.headroom_bytes(HEADER_LEN).first_chunk().map(NetHeader::from_bytes).unwrap_or_default()
}

/// The action for a packet.
enum Fallback {
    /// The packet can be sent.
    Packet(Packet),
    /// The packet needs to be segmented.
    Segment(Packet),
    /// The packet cannot be sent.
    Drop(Packet, DropReason),
}

fn fallback_for(accepts: Accepts, mut packet: Packet, cache: &mut PoolCache) -> Fallback {
    if accepts.takes(&packet) {
        return Fallback::Packet(packet);
    }
    let pool = cache.pool();
    let header = header(&packet);
    let fits = pool.total_len(&packet) <= pool.data_room();
    let joined = packet.is_segmented() && !accepts.segments;
    let allowed = accepts.offloads.allows(&header);
    if header.is_gso() && (!allowed || joined && !fits) {
        return Fallback::Segment(packet);
    }
    if joined && !fits {
        return Fallback::Drop(packet, DropReason::TooBig);
    }
    if !allowed {
        let parts = pool.segments_mut(&mut packet);
        if checksum::complete_parts(parts, header.csum_start, header.csum_offset).is_err() {
            return Fallback::Drop(packet, DropReason::Malformed);
        }
        packet.set_offload(false);
    }
    if !joined {
        return Fallback::Packet(packet);
    }
    match join(&packet, cache) {
        Some(one) => {
            cache.free(packet);
            Fallback::Packet(one)
        }
        None => Fallback::Drop(packet, DropReason::NoBuffer),
    }
}

/// Copies a packet of several buffers into one buffer, which must be large enough; `None` if the pool is empty.
fn join(packet: &Packet, cache: &mut PoolCache) -> Option<Packet> {
    let pool = cache.pool();
    let mut one = cache.take_sized(HEADROOM, pool.total_len(packet))?;
    Reader::new(pool.segments(packet)).read(one.bytes_mut());
    if packet.has_offload() {
        // copy-ok: the virtio-net header
        one.headroom_mut(HEADER_LEN).copy_from_slice(packet.headroom_bytes(HEADER_LEN));
        one.set_offload(true);
    }
    Some(one)
}

/// Sends the segments of `packet`. If some cannot be sent, returns the reason and their number.
fn segment<T: Taker + ?Sized>(
    accepts: Accepts,
    packet: &Packet,
    ctx: &mut Context<'_>,
    out: &mut Out<'_, T>,
) -> Result<(), (DropReason, u64)> {
    let pool = ctx.cache.pool();
    let total = pool.total_len(packet);
    let mut front = [0; MAX_HEADERS];
    let front = &mut front[..total.min(MAX_HEADERS)];
    Reader::new(pool.segments(packet)).read(front);
    let mut segmenter = Segmenter::new(&header(packet), front, total).map_err(|e| (reason(e), 1))?;
    // Segments may be jumbo frames.
    let is_long = segmenter.longest() > pool.data_room() && !accepts.segments;
    if is_long || segmenter.segments().count() > SEGMENTS {
        return Err((DropReason::TooBig, 1));
    }
    let header_len = segmenter.header_len();
    let mut payload = Reader::new(pool.segments(packet));
    payload.read(&mut front[..header_len]);
    let mut segments = segmenter.segments();
    while let Some(segment) = segments.next() {
        let Some(mut one) = ctx.cache.take_chain(HEADROOM, header_len + segment.payload.len()) else {
            return Err((DropReason::NoBuffer, 1 + segments.count() as u64));
        };
        let sum = payload.fill(pool, &mut one, header_len);
        let headers = &mut one.bytes_mut()[..header_len];
        headers.copy_from_slice(segmenter.headers(&segment, sum)); // copy-ok: headers
        out.push(one, ctx);
    }
    Ok(())
}

fn reason(error: GsoError) -> DropReason {
    match error {
        GsoError::TooLong { .. } => DropReason::TooBig,
        _ => DropReason::Malformed,
    }
}

/// The output: a burst that is passed to the receiver when it is full.
struct Out<'a, T: Taker + ?Sized> {
    to: &'a mut T,
    burst: &'a mut Burst,
}

impl<T: Taker + ?Sized> Out<'_, T> {
    fn push(&mut self, packet: Packet, ctx: &mut Context<'_>) {
        if self.burst.is_full() {
            self.to.take(ctx, self.burst);
            self.to.count_drop(DropReason::Full, self.burst.len() as u64);
            ctx.cache.free_all(self.burst.drain(..));
        }
        self.burst.push(packet);
    }
}

/// Reads a packet's bytes from its buffers, one after another.
struct Reader<'a> {
    segments: Segments<'a>,
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn new(segments: Segments<'a>) -> Self {
        Self { segments, rest: &[] }
    }

    /// Fills the packet's buffers with the next bytes, starting at byte `from` of the first buffer; returns their sum.
    fn fill(&mut self, pool: &Pool, packet: &mut Packet, from: usize) -> Sum {
        let mut skip = from;
        for part in pool.segments_mut(packet) {
            self.read(&mut part[std::mem::take(&mut skip)..]);
        }
        let mut skip = from;
        Sum::of_parts(pool.segments(packet).map(|part| &part[std::mem::take(&mut skip)..]))
    }

    /// Fills `to` with the next bytes, while there are any.
    fn read(&mut self, mut to: &mut [u8]) {
        while !to.is_empty() {
            while self.rest.is_empty() {
                let Some(next) = self.segments.next() else { return };
                self.rest = next;
            }
            let len = to.len().min(self.rest.len());
            let (from, rest) = self.rest.split_at(len);
            let (now, later) = to.split_at_mut(len);
            // copy-ok: the receiver does not accept the packet unchanged; the core reads it for the checksum anyway
            now.copy_from_slice(from);
            (self.rest, to) = (rest, later);
        }
    }
}

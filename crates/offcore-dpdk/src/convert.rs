//! Conversion between mbufs and packet handles.
//!
//! Drivers exchange bursts of mbufs; the data path uses [`Packet`]s. Both refer to the same buffers, so only the
//! metadata is converted: offset and length of the data, and the buffers that follow. The driver's checksum flags are
//! ignored; code that needs checksums verifies them itself. For plain packets, which are the common case, one cache
//! line of the mbuf is accessed per direction, and the word that drivers reset for each packet is written as a whole.

use arrayvec::ArrayVec;
use offcore_mem::{BURST, Burst, Packet, Pool};

use crate::ffi::{self, Mbuf, Rearm};
use crate::mempool::MbufPool;

/// The mbufs of a burst.
pub(crate) type Mbufs = [*mut Mbuf; BURST];
/// An initial value for [`Mbufs`].
pub(crate) const NO_MBUFS: Mbufs = [std::ptr::null_mut(); BURST];

/// Minimum length of a packet: an Ethernet header.
const SHORTEST: u16 = 14;
/// Maximum number of buffers of a packet. Packets with more buffers are dropped.
const MAX_SEGMENTS: usize = 64;
/// Prefetch distance in mbufs.
const AHEAD: usize = 4;
/// `RTE_MBUF_PORT_INVALID`: the mbuf was not received by a DPDK port.
const NO_PORT: u16 = u16::MAX;

/// The result of converting a burst of mbufs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Received {
    pub(crate) bytes: u64,
    /// Mbufs that are not valid packets: shorter than an Ethernet header, with too many buffers, or of another pool.
    pub(crate) malformed: u64,
}

#[inline(always)]
fn prefetch(mbuf: *const Mbuf) {
    // SAFETY: a prefetch of any address is allowed.
    unsafe { std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(mbuf.cast()) };
}

/// Appends a packet to `burst` for each of `mbufs`, which a driver has just returned.
///
/// # Safety
/// The mbufs must come from a driver's receive call and be distinct. An mbuf of this pool must be the only owner of its
/// chunk.
///
/// # Panics
/// If `burst` has no room for them.
#[inline(always)]
pub(crate) unsafe fn receive(pool: &MbufPool, mbufs: &[*mut Mbuf], burst: &mut Burst) -> Received {
    let base = pool.base();
    let (before, mut made, mut bytes) = (burst.len(), 0, 0);
    assert!(mbufs.len() <= burst.remaining_capacity(), "the burst has no room for what was received");
    for &mbuf in mbufs {
        // SAFETY: the driver has returned these mbufs, so they may be read. The fields are read one by one, as the
        // driver has written them: a load that spans several recent stores would stall.
        let (address, offset, segments, len) = unsafe {
            ((*mbuf).buf_addr, (*mbuf).rearm.fields.data_off, (*mbuf).rearm.fields.nb_segs, (*mbuf).data_len)
        };
        let place = address.addr().wrapping_sub(base).wrapping_add(offset.into());
        let plain = segments == 1 && len >= SHORTEST;
        // SAFETY: the buffer was lent to the driver, which returns it once, and only one handle is made of it.
        let packet = match plain.then(|| unsafe { pool.pool().reclaim(place as u64, len.into()) }).flatten() {
            Some(packet) => {
                bytes += u64::from(len);
                packet
            }
            // SAFETY: the caller guarantees the conditions of `receive`.
            None => match unsafe { receive_special(pool, mbuf) } {
                Some((packet, len)) => {
                    bytes += len;
                    packet
                }
                None => continue,
            },
        };
        // SAFETY: the burst has room for as many packets as there are mbufs.
        unsafe { burst.as_mut_ptr().add(before + made).write(packet) };
        made += 1;
    }
    // SAFETY: `made` packets have just been written behind the existing ones.
    unsafe { burst.set_len(before + made) };
    Received { bytes, malformed: (mbufs.len() - made) as u64 }
}

/// Returns a packet of several buffers and its length. If the mbuf is not a valid packet, frees it and returns `None`.
///
/// # Safety
/// As for [`receive`].
#[cold]
unsafe fn receive_special(pool: &MbufPool, mbuf: *mut Mbuf) -> Option<(Packet, u64)> {
    let mut chain: ArrayVec<*mut Mbuf, MAX_SEGMENTS> = ArrayVec::new();
    let (first, mut next, mut total) = (mbuf, mbuf, 0);
    let mut ours = true;
    while !next.is_null() {
        // SAFETY: the driver has returned the complete chain.
        let (len, following) = unsafe { ((*next).data_len, (*next).next) };
        total += u64::from(len);
        ours &= pool.place(next).is_some() && chain.try_push(next).is_ok();
        next = following;
    }
    if !ours || total < u64::from(SHORTEST) {
        // SAFETY: the driver has returned the chain, and it is not used elsewhere.
        unsafe { ffi::off_mbuf_free(mbuf) };
        return None;
    }
    let mut packet: Option<Packet> = None;
    for mbuf in chain.into_iter().rev() {
        // SAFETY: as above. A free mbuf has no successor and one segment.
        let len = unsafe {
            (*mbuf).next = std::ptr::null_mut();
            (*mbuf).rearm.fields.nb_segs = 1;
            (*mbuf).data_len
        };
        // Buffers after the first must not be empty.
        if len == 0 && !std::ptr::eq(mbuf, first) {
            // SAFETY: as above; the mbuf was removed from the chain.
            unsafe { ffi::off_mbuf_free(mbuf) };
            continue;
        }
        // SAFETY: each buffer was lent to the driver and is returned once; its place was checked above.
        let front =
            pool.place(mbuf).and_then(|place| unsafe { pool.pool().reclaim(place, usize::from(len)) })?;
        packet = Some(match packet {
            Some(rest) => pool.pool().link(front, rest),
            None => front,
        });
    }
    packet.map(|packet| (packet, total))
}

/// Fills `mbufs` with the mbufs of `packets`, which remain valid; returns the packets' total length.
///
/// # Panics
/// If a packet belongs to another pool, or there are more packets than `mbufs` has entries.
#[inline(always)]
pub(crate) fn transmit(pool: &MbufPool, packets: &[Packet], mbufs: &mut Mbufs) -> u64 {
    let mut bytes = 0;
    // If not the receiving driver, then a device or another core has written these cache lines last.
    for packet in packets.iter().take(AHEAD) {
        prefetch(pool.mbuf(packet.chunk()));
    }
    let places = &mut mbufs[..packets.len()];
    for (at, (packet, place)) in packets.iter().zip(places).enumerate() {
        if let Some(ahead) = packets.get(at + AHEAD) {
            prefetch(pool.mbuf(ahead.chunk()));
        }
        assert!(pool.pool().owns(packet), "packet {} is of another pool", packet.chunk());
        let mbuf = pool.mbuf(packet.chunk());
        *place = mbuf;
        if packet.is_segmented() {
            bytes += transmit_special(pool.pool(), pool, packet);
            continue;
        }
        let len = packet.len() as u32;
        // SAFETY: the mbuf belongs to the packet's chunk, and the owner of the chunk owns the mbuf.
        unsafe { say(mbuf, packet.headroom(), len, len, 1) };
        bytes += u64::from(len);
    }
    bytes
}

/// Writes the metadata that a driver needs into the mbuf.
///
/// # Safety
/// The caller must own the mbuf.
#[inline(always)]
unsafe fn say(mbuf: *mut Mbuf, offset: usize, len: u32, total: u32, segments: u16) {
    // From the lowest bits up: offset, reference count (one), number of segments, port.
    let word = offset as u64 | 1 << 16 | u64::from(segments) << 32 | u64::from(NO_PORT) << 48;
    // SAFETY: the caller owns the mbuf.
    unsafe {
        (*mbuf).rearm = Rearm { word };
        (*mbuf).ol_flags = 0;
        (*mbuf).pkt_len = total;
        (*mbuf).data_len = len as u16;
    }
}

/// Links the mbufs of the packet's buffers to a chain; returns the packet's total length.
#[cold]
fn transmit_special(ours: &Pool, pool: &MbufPool, packet: &Packet) -> u64 {
    let (total, count) = (ours.total_len(packet) as u32, ours.segment_count(packet) as u16);
    let first = pool.mbuf(packet.chunk());
    // SAFETY: the packet owns all of its buffers and thus their mbufs.
    unsafe { say(first, packet.headroom(), packet.len() as u32, total, count) };
    let (mut before, mut is_first) = (first, true);
    ours.for_each_segment(packet, |data, len| {
        if std::mem::take(&mut is_first) {
            return;
        }
        debug_assert!(len > 0, "a buffer after the first is empty");
        let place = data.as_ptr().addr() - ours.memory().0.as_ptr().addr();
        let (chunk, offset) = (place / ours.chunk_size(), place % ours.chunk_size());
        let mbuf = pool.mbuf(chunk as u32);
        // SAFETY: as above.
        unsafe {
            say(mbuf, offset, len as u32, len as u32, 1);
            (*before).next = mbuf;
        }
        before = mbuf;
    });
    u64::from(total)
}

/// Takes apart the chains of `mbufs` that a driver did not accept. The caller keeps their packets.
#[cold]
pub(crate) fn untransmit(mbufs: &[*mut Mbuf]) {
    for &mbuf in mbufs {
        let mut next = mbuf;
        while !next.is_null() {
            // SAFETY: `transmit` made the chain from mbufs whose chunks the caller's packets own.
            next = unsafe {
                (*next).rearm.fields.nb_segs = 1;
                std::mem::replace(&mut (*next).next, std::ptr::null_mut())
            };
        }
    }
}

impl MbufPool {
    /// Returns the offset of the mbuf's data in the pool's memory; `None` if the mbuf does not belong to the pool.
    fn place(&self, mbuf: *const Mbuf) -> Option<u64> {
        // SAFETY: a driver has returned the mbuf.
        let (address, offset) = unsafe { ((*mbuf).buf_addr.addr(), (*mbuf).rearm.fields.data_off) };
        let place = address.checked_sub(self.base())?;
        let chunk = place / self.pool().chunk_size();
        let known = chunk < self.pool().chunks() && std::ptr::eq(self.mbuf(chunk as u32), mbuf);
        known.then(|| place as u64 + u64::from(offset))
    }
}

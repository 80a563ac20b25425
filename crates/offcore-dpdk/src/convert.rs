//! Mbufs and packet handles, made into each other.
//!
//! A driver gives and takes mbufs in bursts; the data path has [`Packet`]s. Both are about the same buffers, so only what
//! is said of them is carried over: where the data is, how long, and which buffers follow. What a driver said of
//! checksums is not: whoever needs to know looks himself. Plain packets, nearly all, take one cache line of an mbuf each
//! way, and the word that drivers set anew for each packet is written as one.

use arrayvec::ArrayVec;
use offcore_mem::{BURST, Burst, Packet, Pool};

use crate::ffi::{self, Mbuf, Rearm};
use crate::mempool::MbufPool;

/// Mbufs of a burst.
pub(crate) type Mbufs = [*mut Mbuf; BURST];
/// Places for them.
pub(crate) const NO_MBUFS: Mbufs = [std::ptr::null_mut(); BURST];

/// Shorter than an Ethernet header is no packet.
const SHORTEST: u16 = 14;
/// Buffers of a packet, at most; more are dropped.
const MAX_SEGMENTS: usize = 64;
/// Mbufs that are fetched ahead.
const AHEAD: usize = 4;
/// `RTE_MBUF_PORT_INVALID`: it came from none of DPDK's ports.
const NO_PORT: u16 = u16::MAX;

/// What was made of a burst's mbufs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Received {
    pub(crate) bytes: u64,
    /// Mbufs that are no packet: shorter than an Ethernet header, of too many buffers, or of another pool.
    pub(crate) malformed: u64,
}

#[inline(always)]
fn prefetch(mbuf: *const Mbuf) {
    // SAFETY: a prefetch of any address is allowed.
    unsafe { std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(mbuf.cast()) };
}

/// Appends a packet to `burst` for each of `mbufs`, which a driver has just handed over.
///
/// # Safety
/// The mbufs are from a driver's receive call, none twice, and those of this pool are the only use of their chunks.
///
/// # Panics
/// When `burst` has no room for them.
#[inline(always)]
pub(crate) unsafe fn receive(pool: &MbufPool, mbufs: &[*mut Mbuf], burst: &mut Burst) -> Received {
    let base = pool.base();
    let (before, mut made, mut bytes) = (burst.len(), 0, 0);
    assert!(mbufs.len() <= burst.remaining_capacity(), "the burst has no room for what was received");
    for &mbuf in mbufs {
        // SAFETY: mbufs that a driver has handed over are ours to read. Its fields are read one by one: the driver has
        // written them so, and a load waits long for several stores that it covers.
        let (address, offset, segments, len) = unsafe {
            ((*mbuf).buf_addr, (*mbuf).rearm.fields.data_off, (*mbuf).rearm.fields.nb_segs, (*mbuf).data_len)
        };
        let place = address.addr().wrapping_sub(base).wrapping_add(offset.into());
        let plain = segments == 1 && len >= SHORTEST;
        // SAFETY: the buffer was lent to the driver, which hands it over once; and once only is a handle made of it.
        let packet = match plain.then(|| unsafe { pool.pool().reclaim(place as u64, len.into()) }).flatten() {
            Some(packet) => {
                bytes += u64::from(len);
                packet
            }
            // SAFETY: as for this function.
            None => match unsafe { receive_special(pool, mbuf) } {
                Some((packet, len)) => {
                    bytes += len;
                    packet
                }
                None => continue,
            },
        };
        // SAFETY: there is room for as many packets as there are mbufs.
        unsafe { burst.as_mut_ptr().add(before + made).write(packet) };
        made += 1;
    }
    // SAFETY: so many have just been written behind those that were there.
    unsafe { burst.set_len(before + made) };
    Received { bytes, malformed: (mbufs.len() - made) as u64 }
}

/// A packet of several buffers and its length; `None` when it is none, and then its mbufs are freed.
///
/// # Safety
/// As for [`receive`].
#[cold]
unsafe fn receive_special(pool: &MbufPool, mbuf: *mut Mbuf) -> Option<(Packet, u64)> {
    let mut chain: ArrayVec<*mut Mbuf, MAX_SEGMENTS> = ArrayVec::new();
    let (first, mut next, mut total) = (mbuf, mbuf, 0);
    let mut ours = true;
    while !next.is_null() {
        // SAFETY: the chain is the driver's, which hands it over whole.
        let (len, following) = unsafe { ((*next).data_len, (*next).next) };
        total += u64::from(len);
        ours &= pool.place(next).is_some() && chain.try_push(next).is_ok();
        next = following;
    }
    if !ours || total < u64::from(SHORTEST) {
        // SAFETY: handed over, and used by nobody.
        unsafe { ffi::off_mbuf_free(mbuf) };
        return None;
    }
    let mut packet: Option<Packet> = None;
    for mbuf in chain.into_iter().rev() {
        // SAFETY: as above. A free mbuf has no successor and is alone.
        let len = unsafe {
            (*mbuf).next = std::ptr::null_mut();
            (*mbuf).rearm.fields.nb_segs = 1;
            (*mbuf).data_len
        };
        // Buffers after the first are not empty.
        if len == 0 && !std::ptr::eq(mbuf, first) {
            // SAFETY: as above, and out of the chain.
            unsafe { ffi::off_mbuf_free(mbuf) };
            continue;
        }
        // SAFETY: each buffer was lent to the driver and is handed over once; its place was looked at above.
        let front =
            pool.place(mbuf).and_then(|place| unsafe { pool.pool().reclaim(place, usize::from(len)) })?;
        packet = Some(match packet {
            Some(rest) => pool.pool().link(front, rest),
            None => front,
        });
    }
    packet.map(|packet| (packet, total))
}

/// Fills `mbufs` with the mbufs of `packets`, which stay where they are; returns their bytes.
///
/// # Panics
/// When a packet is of another pool, or there are more packets than `mbufs` has places.
#[inline(always)]
pub(crate) fn transmit(pool: &MbufPool, packets: &[Packet], mbufs: &mut Mbufs) -> u64 {
    let mut bytes = 0;
    // Their lines were last written by a device, or by another core, if not by the driver that received them.
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
        // SAFETY: the mbuf is about the packet's chunk, and whoever owns the chunk owns it.
        unsafe { say(mbuf, packet.headroom(), len, len, 1) };
        bytes += u64::from(len);
    }
    bytes
}

/// Says in the mbuf what a driver has to know.
///
/// # Safety
/// The caller owns the mbuf.
#[inline(always)]
unsafe fn say(mbuf: *mut Mbuf, offset: usize, len: u32, total: u32, segments: u16) {
    // Offset, references (one), segments, port, from the lowest bits up.
    let word = offset as u64 | 1 << 16 | u64::from(segments) << 32 | u64::from(NO_PORT) << 48;
    // SAFETY: as the caller promises.
    unsafe {
        (*mbuf).rearm = Rearm { word };
        (*mbuf).ol_flags = 0;
        (*mbuf).pkt_len = total;
        (*mbuf).data_len = len as u16;
    }
}

/// A chain of the mbufs of the packet's buffers; returns their bytes.
#[cold]
fn transmit_special(ours: &Pool, pool: &MbufPool, packet: &Packet) -> u64 {
    let (total, count) = (ours.total_len(packet) as u32, ours.segment_count(packet) as u16);
    let first = pool.mbuf(packet.chunk());
    // SAFETY: the packet owns all of its buffers, and so their mbufs.
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

/// Takes the chains of `mbufs` apart, which a driver did not take: their packets stay ours.
#[cold]
pub(crate) fn untransmit(mbufs: &[*mut Mbuf]) {
    for &mbuf in mbufs {
        let mut next = mbuf;
        while !next.is_null() {
            // SAFETY: `transmit` made the chain of mbufs whose chunks the caller's packets own.
            next = unsafe {
                (*next).rearm.fields.nb_segs = 1;
                std::mem::replace(&mut (*next).next, std::ptr::null_mut())
            };
        }
    }
}

impl MbufPool {
    /// Where the mbuf's data begins in the pool's memory; `None` when it is none of the pool's mbufs.
    fn place(&self, mbuf: *const Mbuf) -> Option<u64> {
        // SAFETY: the mbuf is one that a driver handed over.
        let (address, offset) = unsafe { ((*mbuf).buf_addr.addr(), (*mbuf).rearm.fields.data_off) };
        let place = address.checked_sub(self.base())?;
        let chunk = place / self.pool().chunk_size();
        let known = chunk < self.pool().chunks() && std::ptr::eq(self.mbuf(chunk as u32), mbuf);
        known.then(|| place as u64 + u64::from(offset))
    }
}

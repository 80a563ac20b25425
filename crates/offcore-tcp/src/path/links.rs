//! Send queues of the interfaces, and datagrams that wait for address resolution of their next hop.

use std::collections::VecDeque;
use std::net::IpAddr;

use offcore_mem::{BURST, HEADROOM, Packet, Pool, PoolCache};
use offcore_stats::counters;
use offcore_stats::time::{Micros, Time};
use offcore_wire::ethernet;

use super::queue::SendQueue;
use super::{buffers, fragments};
use crate::proto::{Control, Out, SealedDatagram, Stack, destination};

/// Limits of the datagrams that wait for address resolution: all, per destination, and the share of the pool (one
/// buffer in `WAITING_SHARE`).
const WAITING: usize = 128;
const WAITING_EACH: usize = 16;
const WAITING_SHARE: usize = 16;
/// The maximum waiting time equals the duration of address resolution. The second value is the interval between checks.
const LONGEST_WAIT: Micros = Micros::from_secs(3);
const LOOK_AGAIN: Micros = Micros::from_millis(100);
/// High-water mark of an interface's queue in packets. Above the mark, connections neither send nor acknowledge, and
/// other packets without payload are held back. Above twice the mark, datagrams and echo replies are dropped.
const MARK: usize = 512;
const QUEUE: usize = 2 * MARK;
/// Limit of held-back packets.
const HELD_BACK: usize = 1 << 14;
/// All queues together may hold one pool buffer in this many. A single queue may hold as many buffers as all queues
/// leave free. A hung port thus takes half of the limit, and every other port still gets buffers, regardless of the
/// number of hung ports.
const QUEUES_SHARE: usize = 2;

/// The properties of an interface's port, and its send queue.
#[derive(Debug)]
pub(super) struct Link {
    /// Whether the port completes checksums.
    pub(super) checksums: bool,
    /// Maximum payload in bytes of a packet that the port segments. 0 if the port does not segment.
    pub(super) longest: usize,
    pub(super) queue: SendQueue,
    /// Packets without payload that wait for room in the queue or the pool.
    held_back: VecDeque<Control>,
}

impl Link {
    fn new(pool: &'static Pool) -> Self {
        Self { checksums: false, longest: 0, queue: SendQueue::new(pool), held_back: VecDeque::new() }
    }
}

/// A datagram whose next hop is being resolved.
#[derive(Debug)]
struct Waiting {
    iface: u8,
    packet: Packet,
    to: Option<IpAddr>,
    mtu: u16,
    since: Time,
}

/// The links of all interfaces.
#[derive(Debug)]
pub(super) struct Links {
    links: Vec<Link>,
    /// The index of the loopback interface.
    pub(super) loopback: Option<u8>,
    pool: &'static Pool,
    /// Oldest first.
    waiting: VecDeque<Waiting>,
    /// The count of neighbour answers at the last check, and the time of that check.
    looked: (u32, Time),
    pub(super) stats: PathStats,
    /// Copies of datagrams that sockets of this host also receive. Empty between turns.
    pub(super) own_copies: Vec<Packet>,
    /// This worker's share of the pool in buffers.
    part: usize,
}

impl Links {
    /// Creates the links of a worker whose share of the pool is `part` buffers.
    pub(super) fn new(pool: &'static Pool, part: usize) -> Self {
        let (looked, stats) = ((0, Time::ZERO), PathStats::default());
        let (waiting, own_copies) = (VecDeque::new(), Vec::new());
        Self { links: Vec::new(), loopback: None, pool, waiting, looked, stats, own_copies, part }
    }

    /// Returns the number of buffers in the shortest port queue, which reduces the budget of new packets. A longer
    /// queue would throttle all ports because of one.
    pub(super) fn fewest_queued(&self) -> usize {
        let links = self.links.iter().enumerate();
        let ports = links.filter(|(iface, _)| self.loopback.map(usize::from) != Some(*iface));
        ports.map(|(_, link)| link.queue.buffers()).min().unwrap_or(0)
    }

    /// Returns whether a queue of `buffers` buffers exceeds the number that all queues leave free.
    fn is_too_long(&self, buffers: usize) -> bool {
        let queued: usize = self.links.iter().map(|link| link.queue.buffers()).sum();
        buffers > (self.part / QUEUES_SHARE).saturating_sub(queued)
    }

    /// Returns the maximum payload of all links in bytes.
    pub(super) fn longest(&self) -> usize {
        self.links.iter().map(|link| link.longest).max().unwrap_or(0)
    }

    /// Returns whether datagrams wait for address resolution.
    #[inline]
    pub(super) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    #[inline]
    pub(super) fn get(&mut self, iface: u8) -> &mut Link {
        let index = usize::from(iface);
        if index >= self.links.len() {
            let pool = self.pool;
            self.links.resize_with(index + 1, || Link::new(pool));
        }
        &mut self.links[index]
    }

    /// Returns whether an interface's port must take packets before it gets more.
    #[inline]
    pub(super) fn is_full(&self, iface: usize) -> bool {
        let Some(Link { queue, held_back, .. }) = self.links.get(iface) else { return false };
        let held = queue.buffers();
        // Packets planned in the same turn are added to these.
        !held_back.is_empty() || queue.len() >= MARK || held > BURST && self.is_too_long(3 * held)
    }

    /// Returns the number of interfaces.
    pub(super) fn len(&self) -> usize {
        self.links.len()
    }

    /// Queues a packet until the port takes it, or drops it if the queue is full.
    #[inline]
    pub(super) fn enqueue(&mut self, cache: &mut PoolCache, iface: u8, packet: Packet) {
        let pool = self.pool;
        let queue = &self.get(iface).queue;
        let held = queue.buffers() + buffers(&packet, pool);
        if queue.len() >= QUEUE || held > BURST && self.is_too_long(held) {
            self.stats.starved += 1;
            cache.free(packet);
        } else {
            self.get(iface).queue.push_back(packet);
        }
    }

    /// Queues a packet without payload, or holds it back while the port is full. A dropped packet would cost the peer a
    /// timeout.
    #[inline]
    pub(super) fn enqueue_control(&mut self, cache: &mut PoolCache, control: Control) {
        let iface = control.iface;
        let packet = if self.is_full(iface.into()) { None } else { filled(cache, &control) };
        let link = self.get(iface);
        match packet {
            Some(packet) => link.queue.push_back(packet),
            None if link.held_back.len() < HELD_BACK => link.held_back.push_back(control),
            None => self.stats.starved += 1,
        }
    }

    /// Queues held-back packets, up to the mark.
    #[inline]
    pub(super) fn go_on(&mut self, cache: &mut PoolCache) {
        for Link { queue, held_back, .. } in &mut self.links {
            while queue.len() < MARK
                && let Some(control) = held_back.front()
                && let Some(packet) = filled(cache, control)
            {
                held_back.pop_front();
                queue.push_back(packet);
            }
        }
    }

    /// Sends a datagram when its next hop is resolved.
    pub(super) fn send_datagram(
        &mut self,
        now: Time,
        stack: &mut Stack,
        packet: Packet,
        &SealedDatagram { iface, known, mtu, .. }: &SealedDatagram,
        cache: &mut PoolCache,
    ) {
        if known {
            return self.send_whole(stack, iface, mtu, packet, cache);
        }
        let pool = cache.pool();
        let most = self.part.div_ceil(WAITING_SHARE);
        let held = |waiting: &VecDeque<Waiting>| -> usize {
            waiting.iter().map(|waiting| buffers(&waiting.packet, pool)).sum::<usize>()
                + buffers(&packet, pool)
        };
        let to = destination(packet.bytes());
        // A destination that does not answer leaves room for others (RFC 4861, 7.2.2).
        let of_it = self.waiting.iter().enumerate().filter(|(_, waiting)| waiting.to == to).map(|(at, _)| at);
        if of_it.clone().count() >= WAITING_EACH
            && let Some(oldest) = of_it.min().and_then(|at| self.waiting.remove(at))
        {
            self.stats.starved += 1;
            cache.free(oldest.packet);
        }
        while (self.waiting.len() >= WAITING || held(&self.waiting) > most)
            && let Some(oldest) = self.waiting.pop_front()
        {
            self.stats.starved += 1;
            cache.free(oldest.packet);
        }
        self.waiting.push_back(Waiting { iface, packet, to, mtu, since: now });
    }

    /// Checks whether next hops are resolved: after each neighbour answer, and periodically.
    #[cold]
    pub(super) fn check_next_hops(
        &mut self,
        now: Time,
        stack: &mut Stack,
        out: &mut Out,
        cache: &mut PoolCache,
    ) {
        let answered = stack.answered();
        if self.looked.0 == answered && now < self.looked.1 + LOOK_AGAIN {
            return;
        }
        self.looked = (answered, now);
        for _ in 0..self.waiting.len() {
            let Some(Waiting { iface, mut packet, to, mtu, since }) = self.waiting.pop_front() else {
                return;
            };
            let station = to.and_then(|to| stack.station(now, to, out));
            match station {
                Some(station) => {
                    packet.bytes_mut()[..station.0.len()].copy_from_slice(&station.0);
                    self.send_whole(stack, iface, mtu, packet, cache);
                }
                None if now.saturating_since(since) > LONGEST_WAIT => {
                    self.stats.starved += 1;
                    cache.free(packet);
                }
                None => self.waiting.push_back(Waiting { iface, packet, to, mtu, since }),
            }
        }
    }

    /// Sends a packet. A packet longer than `mtu` bytes is fragmented.
    #[inline(never)]
    pub(super) fn send_whole(
        &mut self,
        stack: &mut Stack,
        iface: u8,
        mtu: u16,
        packet: Packet,
        cache: &mut PoolCache,
    ) {
        let mtu = usize::from(mtu);
        // The loopback interface carries datagrams of any length.
        if Some(iface) == self.loopback || cache.pool().total_len(&packet) <= mtu + ethernet::HEADER_LEN {
            return self.enqueue(cache, iface, packet);
        }
        let ident = stack.fragment_ident();
        if !fragments::cut(&packet, mtu, ident, cache, |cache, part| self.enqueue(cache, iface, part)) {
            self.stats.starved += 1;
        }
        cache.free(packet);
    }
}

/// Creates a packet from a control message. Returns `None` if the pool has no buffer.
#[inline]
fn filled(cache: &mut PoolCache, control: &Control) -> Option<Packet> {
    let bytes = control.bytes();
    let mut packet = cache.take_sized(HEADROOM, bytes.len())?;
    packet.bytes_mut().copy_from_slice(bytes);
    Some(packet)
}

counters! {
    /// Counters of the path.
    pub struct PathStats {
        /// Packets that were not created, not sent, or not handed to another worker because buffers or room in a queue
        /// were missing.
        starved: Packets,
        /// Fragments that were not reassembled because they overlapped, were too many, or were incomplete when their
        /// time expired.
        fragments_dropped: Packets,
    }
}

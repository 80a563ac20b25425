//! The generating half: numbered probes of one length, sent at a given rate.

use std::net::Ipv4Addr;

use offcore_mem::packet::BURST;
use offcore_mem::{Burst, HEADROOM, Packet, Pool};
use offcore_stats::{Stage, tsc};
use offcore_wire::ethernet::MacAddr;
use offcore_wire::probe::{self, ProbeHeader};
use offcore_wire::template::{FrameLenError, UdpEndpoint, UdpFlow, UdpTemplate};

use super::sink::FILL_BITS;
use crate::spec::{FCS, GenSpec};
use crate::{Context, RxCounters, RxQueue, Wake, hand_over, room};

/// Number of different packet contents. It is prime, so that packet buffers reused in bursts rarely get the content
/// that they already hold: the checks then detect a missing copy.
const CONTENTS: u32 = 13;

/// One RX queue of a generator.
#[derive(Debug)]
pub(super) struct Source {
    /// Frames that lack only a destination and a number, back to back.
    frames: Box<[u8]>,
    frame_len: usize,
    /// Offset of the next frame.
    frame: usize,
    template: UdpTemplate,
    flows: u32,
    /// The next packet's flow.
    flow: u32,
    /// The packet's number within its flow. The flows take turns.
    number: u64,
    /// Number of packets still to generate.
    left: u64,
    /// Packets that were returned by `rx` and taken back, because the other side had no room.
    waiting: Burst,
    pace: Option<Pace>,
    counters: RxCounters,
}

impl Source {
    /// Creates queue `index` of a port described by `spec`.
    pub(super) fn new(
        spec: &GenSpec,
        index: u16,
        stream: u32,
        mac: MacAddr,
        counters: RxCounters,
    ) -> Result<Self, FrameLenError> {
        const DISCARD: u16 = 9;
        let frame_len = spec.size - FCS;
        let end = |mac, ip| UdpEndpoint { mac, ip, port: DISCARD };
        let flow = UdpFlow {
            src: end(mac, Ipv4Addr::new(198, 18, 0, 1)),
            dst: end(MacAddr::LOCAL, Ipv4Addr::from_bits(destination(0))),
        };
        let template = UdpTemplate::new(&flow, frame_len)?;
        let mut frames = vec![0; frame_len * CONTENTS as usize];
        for (content, frame) in (0..CONTENTS).zip(frames.chunks_exact_mut(frame_len)) {
            let header = ProbeHeader { fill: stream << FILL_BITS | content, sequence: 0 };
            let long_enough = template.write(frame).is_ok() && probe::write(frame, header).is_ok();
            assert!(long_enough, "a GenSpec's size leaves room for a probe");
        }
        let (queues, index) = (u64::from(spec.queues), u64::from(index));
        let share = |total: u64| total / queues + u64::from(index < total % queues);
        Ok(Self {
            frames: frames.into(),
            frame_len,
            frame: 0,
            template,
            flows: spec.flows,
            flow: 0,
            number: 0,
            left: spec.count.map_or(u64::MAX, share),
            waiting: Burst::new(),
            pace: spec.rate.map(|rate| Pace::new(share(rate), tsc::hz())),
            counters,
        })
    }

    /// Writes the next frame into `packet`, which has the same length.
    #[inline]
    fn make(&mut self, packet: &mut Packet, pool: &Pool) {
        let content = &self.frames[self.frame..self.frame + self.frame_len];
        if packet.is_segmented() {
            fill(content, packet, pool);
        } else {
            // copy-ok: a generator writes packets; these bytes are not forwarded
            packet.bytes_mut().copy_from_slice(content);
        }
        // All bytes that differ from packet to packet are in the first buffer.
        let frame = packet.bytes_mut();
        if self.flows > 1 {
            self.template.set_dst_ip(Ipv4Addr::from_bits(destination(self.flow)));
            // copy-ok: as above, 42 bytes of headers
            let _ = self.template.write(frame);
        }
        let _ = probe::patch_sequence(frame, self.number);
        self.next();
    }

    #[inline]
    fn next(&mut self) {
        self.frame += self.frame_len;
        if self.frame == self.frames.len() {
            self.frame = 0;
        }
        self.flow += 1;
        if self.flow == self.flows {
            self.flow = 0;
            self.number += 1;
        }
    }
}

impl RxQueue for Source {
    fn rx(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        if !self.waiting.is_empty() {
            return hand_over(&mut self.waiting, burst);
        }
        let mut wanted = self.left.min(room(ctx, burst) as u64);
        if let Some(pace) = &mut self.pace {
            wanted = wanted.min(pace.allowed(tsc::now()));
        }
        let pool = ctx.cache.pool();
        let mut made = 0;
        while made < wanted {
            let Some(mut packet) = ctx.cache.take_chain(HEADROOM, self.frame_len) else {
                self.counters.starved(1);
                break;
            };
            self.make(&mut packet, pool);
            burst.push(packet);
            made += 1;
        }
        if made == 0 {
            return;
        }
        self.left -= made;
        if let Some(pace) = &mut self.pace {
            pace.spend(made);
        }
        self.counters.add(made, made * self.frame_len as u64);
        ctx.clock.lap(Stage::Rx);
    }

    fn counters(&self) -> &RxCounters {
        &self.counters
    }

    fn drain(&mut self, _ctx: &mut Context<'_>, burst: &mut Burst) -> usize {
        hand_over(&mut self.waiting, burst);
        self.waiting.len()
    }

    fn take_back(&mut self, burst: &mut Burst) {
        hand_over(burst, &mut self.waiting);
    }

    fn waits(&self) -> bool {
        true
    }

    /// The rate is kept if pauses are no longer than the time that [`Pace`] makes up for.
    fn arm(&mut self) -> Wake<'_> {
        match self.pace {
            _ if self.left == 0 && self.waiting.is_empty() => Wake::Never,
            Some(_) if self.waiting.is_empty() => Wake::Poll,
            _ => Wake::Now,
        }
    }
}

/// Fills a packet's buffers with `content`.
#[cold]
fn fill(content: &[u8], packet: &mut Packet, pool: &Pool) {
    let mut rest = content;
    for part in pool.segments_mut(packet) {
        let (now, later) = rest.split_at(part.len());
        // copy-ok: as for packets of one buffer
        part.copy_from_slice(now);
        rest = later;
    }
}

/// Returns the destination of flow `flow`: 198.19.0.0 + flow, in the benchmarking network of RFC 2544.
fn destination(flow: u32) -> u32 {
    Ipv4Addr::new(198, 19, 0, 0).to_bits() + flow
}

/// A token bucket that decides when packets may be sent.
#[derive(Debug)]
struct Pace {
    rate: u64,
    /// The price of a packet: the number of ticks per second. Each tick adds `rate`.
    price: u64,
    balance: u64,
    /// The maximum balance: at most 10 ms or one burst of packets is made up for.
    limit: u64,
    last: Option<u64>,
}

impl Pace {
    fn new(rate: u64, hz: u64) -> Self {
        // The first packet is sent at once, unless this queue's share of the rate is 0.
        let balance = if rate == 0 { 0 } else { hz };
        Self { rate, price: hz, balance, limit: hz * (rate / 100).max(BURST as u64), last: None }
    }

    /// Returns the number of packets that may be sent at `now`.
    #[inline]
    fn allowed(&mut self, now: u64) -> u64 {
        let elapsed = now.saturating_sub(self.last.unwrap_or(now));
        self.last = Some(now);
        self.balance = self.balance.saturating_add(elapsed.saturating_mul(self.rate)).min(self.limit);
        self.balance / self.price
    }

    #[inline]
    fn spend(&mut self, packets: u64) {
        self.balance -= packets * self.price;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_is_kept() {
        const HZ: u64 = 2_000_000_000;
        for (rate, step) in [(1_000, 777), (1_000_000, 12_345), (33_333_333, 999), (3, 1_000_000)] {
            let mut pace = Pace::new(rate, HZ);
            let (mut sent, mut asked) = (0, 0);
            for now in (0..=HZ).step_by(step) {
                let allowed = pace.allowed(now).min(BURST as u64);
                pace.spend(allowed);
                (sent, asked) = (sent + allowed, now);
            }
            let due = 1 + asked * rate / HZ;
            assert_eq!(sent, due, "at {rate}/s");
        }
    }

    #[test]
    fn backlog_after_pause_is_bounded() {
        let mut pace = Pace::new(1_000_000, 1_000_000_000);
        assert_eq!(pace.allowed(0), 1);
        assert_eq!(pace.allowed(60_000_000_000), 10_000);
        let mut slow = Pace::new(10, 1_000_000_000);
        assert_eq!((slow.allowed(0), slow.allowed(u64::MAX)), (1, 64));
        let mut none = Pace::new(0, 1_000_000_000);
        assert_eq!((none.allowed(0), none.allowed(u64::MAX)), (0, 0));
    }
}

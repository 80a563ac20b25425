//! The generating half: probes of one length, numbered, at a rate.

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

/// Packets that differ in content. A prime, so that packet buffers that come round in bursts do not always come round
/// to the content that they have already: a copy that was left out is noticed.
const CONTENTS: u32 = 13;

/// One RX queue of a generator.
#[derive(Debug)]
pub(super) struct Source {
    /// Frames that need only a destination and a number, back to back.
    frames: Box<[u8]>,
    frame_len: usize,
    /// The next frame, as an offset.
    frame: usize,
    template: UdpTemplate,
    flows: u32,
    /// The next packet's flow.
    flow: u32,
    /// Its number in the flow: the flows take turns.
    number: u64,
    /// Packets still to be made.
    left: u64,
    /// Made, and taken back because the other side had no room.
    waiting: Burst,
    pace: Option<Pace>,
    counters: RxCounters,
}

impl Source {
    /// Queue `index` of a port described by `spec`.
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

    /// Makes the next packet of `packet`, which is as long.
    #[inline]
    fn make(&mut self, packet: &mut Packet, pool: &Pool) {
        let content = &self.frames[self.frame..self.frame + self.frame_len];
        if packet.is_segmented() {
            fill(content, packet, pool);
        } else {
            // copy-ok: writing packets is what a generator does; nobody forwards these bytes
            packet.bytes_mut().copy_from_slice(content);
        }
        // All that differs from packet to packet is in the first buffer.
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

    /// A rate is kept as long as no pause is longer than what is made up for.
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

/// The destination of flow `flow`: 198.19.0.0 + flow, in RFC 2544's test network.
fn destination(flow: u32) -> u32 {
    Ipv4Addr::new(198, 19, 0, 0).to_bits() + flow
}

/// When packets may be sent: an account that time pays into.
#[derive(Debug)]
struct Pace {
    rate: u64,
    /// What a packet costs: a second's ticks. A tick pays in `rate`.
    price: u64,
    balance: u64,
    /// What was not sent for more than 10 ms (or a burst) is never sent.
    limit: u64,
    last: Option<u64>,
}

impl Pace {
    fn new(rate: u64, hz: u64) -> Self {
        // The first packet goes at once, unless this queue's share is none at all.
        let balance = if rate == 0 { 0 } else { hz };
        Self { rate, price: hz, balance, limit: hz * (rate / 100).max(BURST as u64), last: None }
    }

    /// Packets that may be sent at `now`.
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
    fn a_pause_is_not_made_up_for_without_end() {
        let mut pace = Pace::new(1_000_000, 1_000_000_000);
        assert_eq!(pace.allowed(0), 1);
        assert_eq!(pace.allowed(60_000_000_000), 10_000);
        let mut slow = Pace::new(10, 1_000_000_000);
        assert_eq!((slow.allowed(0), slow.allowed(u64::MAX)), (1, 64));
        let mut none = Pace::new(0, 1_000_000_000);
        assert_eq!((none.allowed(0), none.allowed(u64::MAX)), (0, 0));
    }
}

//! Forwarding modes with the same meaning as in testpmd.

use std::str::FromStr;

use offcore_mem::{Burst, HEADROOM, PoolCache};
use offcore_port::Context;
use offcore_port::vhost::{Next, OneCopy};
use offcore_wire::ethernet::{EthernetFrameMut, MacAddr};
use offcore_wire::template::UdpTemplate;
use offcore_wire::{UdpFlow, ethernet};

/// Treatment of received packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Forward {
    /// Packets are sent unchanged.
    Io,
    /// The source becomes the TX port's address, the destination becomes the address of its peer.
    Mac,
    /// Source and destination are swapped.
    Macswap,
    /// Packets are dropped.
    Rxonly,
    /// Nothing is received. UDP packets of one flow are sent.
    Txonly {
        /// Bytes of a packet, including the FCS.
        frame: usize,
    },
    /// Received packets are dropped. UDP packets of many flows are sent.
    Flowgen {
        /// Bytes of a packet, including the FCS.
        frame: usize,
    },
}

/// The port to which a packet received on port `n` is sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Topology {
    /// 0 ↔ 1, 2 ↔ 3, …; with an odd number of ports, the last port sends to itself.
    #[default]
    Paired,
    /// 0 → 1 → 2 → … → 0.
    Chained,
    /// Each port sends to itself.
    Loop,
}

impl Topology {
    /// Returns the port to which packets from `port` are sent. There are `ports` ports.
    pub fn peer(self, port: usize, ports: usize) -> usize {
        match self {
            Self::Paired if port ^ 1 < ports => port ^ 1,
            Self::Chained => (port + 1) % ports,
            Self::Paired | Self::Loop => port,
        }
    }
}

impl FromStr for Topology {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "paired" => Ok(Self::Paired),
            "chained" => Ok(Self::Chained),
            "loop" => Ok(Self::Loop),
            _ => Err(format!("port topology '{text}': expected paired, chained or loop")),
        }
    }
}

/// The addresses that mode `mac` writes.
#[derive(Clone, Copy, Debug)]
pub struct Addresses {
    /// Address of the sending port.
    pub source: MacAddr,
    /// Address of its peer.
    pub destination: MacAddr,
}

/// How forwarded packets are rewritten. Packets are Ethernet frames: ports never deliver less than a header.
#[derive(Clone, Copy, Debug)]
pub enum Rewrite {
    /// Packets are unchanged.
    None,
    /// Source and destination are replaced by these addresses.
    Mac(Addresses),
    /// Source and destination are swapped.
    Swap,
}

impl Rewrite {
    /// Returns how a mode rewrites packets. Mode `mac` writes `addresses`.
    pub fn of(mode: Forward, addresses: Addresses) -> Self {
        match mode {
            Forward::Mac => Self::Mac(addresses),
            Forward::Macswap => Self::Swap,
            Forward::Io | Forward::Rxonly | Forward::Txonly { .. } | Forward::Flowgen { .. } => Self::None,
        }
    }

    /// Rewrites the headers of a burst.
    #[inline]
    pub fn burst(&self, burst: &mut Burst) {
        match self {
            Self::None => {}
            Self::Mac(addresses) => each_frame(burst, |frame| set_addresses(addresses, frame)),
            Self::Swap => each_frame(burst, swap_addresses),
        }
    }

    /// Prepares rewritten packets to be rewritten again.
    pub(crate) fn undo(&self, burst: &mut Burst) {
        if matches!(self, Self::Swap) {
            self.burst(burst);
        }
    }

    /// Forwards packets from guest to guest in one copy and rewrites their heads: see [`OneCopy::forward`].
    #[inline]
    pub(crate) fn heads(&self, ctx: &mut Context<'_>, guests: &mut OneCopy) -> (usize, Next) {
        // Each kind of rewriting has its own loop, so the kind is not checked for every packet.
        match self {
            Self::None => guests.forward(ctx, |_| ()),
            Self::Mac(addresses) => guests.forward(ctx, |frame| set_addresses(addresses, frame)),
            Self::Swap => guests.forward(ctx, swap_addresses),
        }
    }
}

#[inline(always)]
fn each_frame(burst: &mut Burst, mut f: impl FnMut(&mut [u8])) {
    for packet in burst {
        f(packet.bytes_mut());
    }
}

/// Applies mode `mac` to a frame or its beginning.
#[inline(always)]
fn set_addresses(addresses: &Addresses, frame: &mut [u8]) {
    if let Ok(mut frame) = EthernetFrameMut::new_checked(frame) {
        frame.set_src(addresses.source);
        frame.set_dst(addresses.destination);
    }
}

/// Applies mode `macswap` to a frame or its beginning.
#[inline(always)]
fn swap_addresses(frame: &mut [u8]) {
    if let Ok(mut frame) = EthernetFrameMut::new_checked(frame) {
        frame.swap_addresses();
    }
}

/// Number of flows that `flowgen` cycles through (testpmd's default).
const FLOWS: u16 = 1024;

/// Makes the packets of `txonly` and `flowgen`.
#[derive(Debug)]
pub struct Source {
    template: UdpTemplate,
    flows: u16,
    next_flow: u16,
    destinations: Box<[std::net::Ipv4Addr]>,
}

impl Source {
    /// Returns the source of a mode that generates packets, otherwise `None`. A packet takes as many buffers as it
    /// needs.
    ///
    /// # Errors
    /// If no UDP packet has that length.
    pub fn of(mode: Forward, addresses: &Addresses) -> Result<Option<Self>, String> {
        let (frame, flows) = match mode {
            Forward::Txonly { frame } => (frame, 1),
            Forward::Flowgen { frame } => (frame, FLOWS),
            Forward::Io | Forward::Mac | Forward::Macswap | Forward::Rxonly => return Ok(None),
        };
        let flow = UdpFlow::txonly(addresses.source, addresses.destination);
        let template = UdpTemplate::new(&flow, frame.saturating_sub(ethernet::FCS_LEN))
            .map_err(|error| format!("{frame}: {error}"))?;
        let destinations = (0..flows).map(|f| UdpFlow::flowgen(f).dst.ip).collect();
        Ok(Some(Self { template, flows, next_flow: 0, destinations }))
    }

    /// Fills the burst up to `count` packets, while the pool has buffers. The payload is the previous content of the
    /// buffer, as in testpmd.
    #[inline]
    pub fn fill(&mut self, cache: &mut PoolCache, burst: &mut Burst, count: usize) {
        for _ in burst.len()..count {
            let Some(mut packet) = cache.take_chain(HEADROOM, self.template.frame_len()) else { return };
            if self.flows > 1 {
                self.template.set_dst_ip(self.destinations[usize::from(self.next_flow)]);
                self.next_flow = (self.next_flow + 1) % self.flows;
            }
            if self.template.write(packet.bytes_mut()).is_err() {
                // The first buffer has room for more than the headers, and a frame is never shorter than these.
                cache.free(packet);
                return;
            }
            burst.push(packet);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn topologies() {
        let peers = |t: Topology, n| (0..n).map(|p| t.peer(p, n)).collect::<Vec<_>>();
        assert_eq!(peers(Topology::Paired, 4), [1, 0, 3, 2]);
        assert_eq!(peers(Topology::Paired, 3), [1, 0, 2]);
        assert_eq!(peers(Topology::Chained, 3), [1, 2, 0]);
        assert_eq!(peers(Topology::Loop, 2), [0, 1]);
    }

    #[test]
    fn names() {
        assert_eq!("chained".parse(), Ok(Topology::Chained));
        assert!("ring".parse::<Topology>().is_err());
    }

    fn one_packet() -> (PoolCache, Burst) {
        let pool = offcore_mem::Pool::new(64, 2048, offcore_mem::Hugepages::None).unwrap();
        let mut cache = pool.cache();
        let mut burst = Burst::new();
        let addresses = Addresses { source: MacAddr([2; 6]), destination: MacAddr([4; 6]) };
        let source = Source::of(Forward::Txonly { frame: 64 }, &addresses).unwrap();
        source.unwrap().fill(&mut cache, &mut burst, 1);
        (cache, burst)
    }

    #[test]
    fn long_packets_take_several_buffers() {
        let pool = offcore_mem::Pool::new(256, 2048, offcore_mem::Hugepages::None).unwrap();
        let mut cache = pool.cache();
        let addresses = Addresses { source: MacAddr([2; 6]), destination: MacAddr([4; 6]) };
        for mode in [Forward::Txonly { frame: 9018 }, Forward::Flowgen { frame: 9018 }] {
            let mut burst = Burst::new();
            Source::of(mode, &addresses).unwrap().unwrap().fill(&mut cache, &mut burst, 4);
            assert_eq!(burst.len(), 4);
            for packet in &burst {
                assert_eq!((pool.total_len(packet), pool.segment_count(packet)), (9014, 6));
                assert_eq!(packet.bytes()[16..18], 9000u16.to_be_bytes());
            }
            Rewrite::Swap.burst(&mut burst);
            assert_eq!(
                burst[0].bytes()[6..12],
                UdpFlow::txonly(addresses.source, addresses.destination).dst.mac.0
            );
            cache.free_all(burst);
        }
    }

    #[test]
    fn mac_and_macswap_match_testpmd() {
        let (_cache, mut burst) = one_packet();
        assert_eq!(burst[0].len(), 60);
        assert_eq!(burst[0].bytes()[..12], [4, 4, 4, 4, 4, 4, 2, 2, 2, 2, 2, 2]);
        let addresses = Addresses { source: MacAddr([6; 6]), destination: MacAddr([8; 6]) };
        Rewrite::Swap.burst(&mut burst);
        assert_eq!(burst[0].bytes()[..12], [2, 2, 2, 2, 2, 2, 4, 4, 4, 4, 4, 4]);
        Rewrite::of(Forward::Io, addresses).burst(&mut burst);
        assert_eq!(burst[0].bytes()[..6], [2; 6]);
        Rewrite::of(Forward::Mac, addresses).burst(&mut burst);
        assert_eq!(burst[0].bytes()[..12], [8, 8, 8, 8, 8, 8, 6, 6, 6, 6, 6, 6]);
    }
}

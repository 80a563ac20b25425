//! A learning switch between any ports: forwarding mode `l2` (IEEE 802.1Q, without a spanning tree).
//!
//! * [`fdb`]: which station is behind which port, shared by all workers,
//! * [`vlan`]: which port is in which VLAN, [`tag`]: the tag in a packet,
//! * [`stations`]: which addresses are a port's in any case,
//! * [`limit`]: how much a port may have flooded.
//!
//! Each worker has one [`Bridge`], with queues of its own of every port. A round of it takes a burst from each RX queue,
//! decides for the whole burst where its packets go (a set of ports for each, 64 bits), and collects them for each TX
//! queue, which is sent to once at the end of the round. Of a packet for several ports the last one gets the packet
//! itself, the others get copies.

pub mod fdb;
pub mod limit;
pub mod stations;
pub mod tag;
pub mod vlan;

use std::sync::Arc;
use std::time::Duration;

use arrayvec::ArrayVec;
use offcore_mem::{BURST, Burst, Packet};
use offcore_port::duplicate::Duplicator;
use offcore_port::offload_fallback::fall_back;
use offcore_port::{Context, DropReason, RxQueue, TxQueue};
use offcore_stats::page::Block;
use offcore_stats::{Stage, named, tsc};
use offcore_wire::MacAddr;

use crate::worker::task::{Task, WakeSource, work};
use crate::worker::turns::Turns;
use fdb::{Fdb, Learned, MAX_PORTS, Station};
use limit::FloodLimit;
use stations::{StationRule, Stations};
use tag::TagError;
use vlan::{VlanRule, Vlans};

/// What a bridge is told.
#[derive(Clone, Debug)]
pub struct BridgeConfig {
    /// After how long without a packet a station is forgotten. Zero: none is ever learned, as in Linux's bridge, and
    /// everything is flooded.
    pub ageing: Duration,
    /// Addresses that can be known at the same time.
    pub addresses: usize,
    /// Packets a second that one port may have flooded.
    pub flood_limit: Option<u64>,
    /// VLANs of ports; what is not said of any port: every VLAN, and tags stay.
    pub vlans: Vec<VlanRule>,
    /// Addresses that are a port's in any case, and ports that are locked.
    pub stations: Vec<StationRule>,
}

impl BridgeConfig {
    /// IEEE 802.1Q's ageing time.
    pub const AGEING: Duration = Duration::from_secs(300);
    /// Addresses that there is room for, when nothing is said.
    pub const ADDRESSES: usize = 16384;
}

impl Default for BridgeConfig {
    fn default() -> Self {
        Self {
            ageing: Self::AGEING,
            addresses: Self::ADDRESSES,
            flood_limit: None,
            vlans: Vec::new(),
            stations: Vec::new(),
        }
    }
}

named! {
    /// What one worker counts for one port, about packets that came from there.
    pub enum Count {
        /// Stations learned.
        Learned = "learned",
        /// Stations moved to the port.
        Moved = "moved",
        /// Stations for which the database had no room.
        NotLearned = "not_learned",
        Flooded = "flooded",
        /// Packets not flooded because of the limit.
        FloodLimited = "flood_limited",
        /// Packets that have no other port to go to: their station is behind the port itself, their VLAN has no other port,
        /// the port does not take their tag, or their address is one that bridges keep to themselves.
        Filtered = "filtered",
        /// Packets from an address that is another port's, or that a locked port lacks.
        Refused = "refused",
    }
}

/// What the bridges of all workers share.
#[derive(Debug)]
pub struct Shared {
    pub fdb: Fdb,
    vlans: Vlans,
    stations: Stations,
    learns: bool,
    limits: Option<Vec<FloodLimit>>,
}

impl Shared {
    /// For `ports` ports, 2 to [`MAX_PORTS`], of which `config` names no others, by a clock of `hz` ticks a second.
    pub fn new(config: &BridgeConfig, ports: usize, hz: u64) -> Self {
        let limits = |pps| (0..ports).map(|_| FloodLimit::new(pps, hz)).collect();
        Self {
            fdb: Fdb::new(config.addresses, ports),
            vlans: Vlans::new(ports, &config.vlans),
            stations: Stations::new(&config.stations),
            learns: !config.ageing.is_zero(),
            limits: config.flood_limit.map(limits),
        }
    }
}

/// One RX queue of a worker's bridge.
#[derive(Debug)]
pub struct Input {
    pub rx: Box<dyn RxQueue>,
    pub port: usize,
    /// Which of the worker's TX queues of each port its packets go to: this one, counted round.
    pub turn: usize,
}

/// One TX queue of a worker's bridge, and the packets for it.
#[derive(Debug)]
struct Output {
    tx: Box<dyn TxQueue>,
    burst: Burst,
}

/// One worker's part of the switch.
#[derive(Debug)]
pub struct Bridge {
    shared: Arc<Shared>,
    inputs: Vec<Input>,
    /// Each port's TX queues.
    outputs: Vec<Vec<Output>>,
    /// Each port's counters, of [`Count::NAMES`].
    counters: Vec<Block>,
    duplicator: Duplicator,
    /// Application work per packet, in TSC ticks.
    work: u64,
}

/// What is known of the packets of a burst: where they go, a bit for each port, and their VLAN and tag.
struct Decisions {
    targets: [u64; BURST],
    vlans: [(u16, Option<u16>); BURST],
    /// All targets together.
    union: u64,
    /// Packets to be flooded, a bit for each.
    floods: u64,
    malformed: u64,
}

impl Task for Bridge {
    fn round(&mut self, ctx: &mut Context<'_>) -> usize {
        let packets = (0..self.inputs.len()).map(|input| self.receive(input, ctx)).sum();
        for output in self.outputs.iter_mut().flatten() {
            output.send(ctx);
        }
        packets
    }

    /// A port's turn is that of its RX queues. What they bring is sent on in it, so that it is that port's time, and no other one has to
    /// wait: a port that much is sent to does not do more than others.
    fn round_in_turns(&mut self, ctx: &mut Context<'_>, turns: &mut Turns) -> usize {
        let mut packets = 0;
        for input in 0..self.inputs.len() {
            let port = self.inputs[input].port;
            packets += turns.turn(Some(port), ctx, |turns, ctx| {
                let received = self.receive(input, ctx);
                self.send_in_turn(port, ctx, turns);
                received
            });
        }
        packets
    }

    fn shares(&self) -> bool {
        true
    }

    fn drain(&mut self, ctx: &mut Context<'_>) -> usize {
        let mut left = 0;
        for index in 0..self.inputs.len() {
            let mut burst = Burst::new();
            left += self.inputs[index].rx.drain(ctx, &mut burst) + burst.len();
            self.forward(index, ctx, burst);
        }
        for output in self.outputs.iter_mut().flatten() {
            output.send(ctx);
            left += usize::from(!output.tx.stop(ctx));
        }
        left
    }

    fn wake_sources<'a>(&'a mut self, each: &mut dyn FnMut(WakeSource<'a>)) {
        self.inputs.iter_mut().for_each(|input| each(WakeSource::Queue(&mut *input.rx)));
    }
}

impl Bridge {
    /// One with these RX queues, and of each port these TX queues (at least one) and a block of counters made with
    /// [`Count::NAMES`]; `work` is TSC ticks of application work per packet.
    ///
    /// # Panics
    /// When the numbers of ports differ, or a port has no TX queue.
    pub fn new(
        shared: Arc<Shared>,
        inputs: Vec<Input>,
        outputs: Vec<Vec<Box<dyn TxQueue>>>,
        counters: Vec<Block>,
        work: u64,
    ) -> Self {
        assert_eq!(outputs.len(), counters.len(), "each port has TX queues and counters");
        assert!(outputs.iter().all(|queues| !queues.is_empty()), "each port has a TX queue");
        let output = |tx| Output { tx, burst: Burst::new() };
        let outputs = outputs.into_iter().map(|queues| queues.into_iter().map(output).collect()).collect();
        Self { shared, inputs, outputs, counters, duplicator: Duplicator::default(), work }
    }

    /// Takes a burst from an RX queue and decides where its packets go; how many they are.
    #[inline(always)]
    fn receive(&mut self, input: usize, ctx: &mut Context<'_>) -> usize {
        let mut burst = Burst::new();
        self.inputs[input].rx.rx(ctx, &mut burst);
        let packets = burst.len();
        if packets == 0 {
            // What a poll that found nothing took belongs to no stage of a packet's way.
            ctx.clock.lap(Stage::Idle);
            return 0;
        }
        work(self.work, packets, ctx);
        self.forward(input, ctx, burst);
        packets
    }

    /// Sends what there is, in the turn of `port`, whose own queues follow their other side. A port that rests gets nothing.
    fn send_in_turn(&mut self, port: usize, ctx: &mut Context<'_>, turns: &mut Turns) {
        for (to, outputs) in self.outputs.iter_mut().enumerate() {
            for output in outputs.iter_mut().filter(|output| to == port || !output.burst.is_empty()) {
                if !turns.visit(to, output.burst.len(), || output.send(ctx)) {
                    output.tx.counters().drop_all(DropReason::Full, &mut output.burst, ctx.cache);
                }
            }
        }
    }

    /// Puts the packets of one burst into those of the ports that they go to.
    fn forward(&mut self, input: usize, ctx: &mut Context<'_>, burst: Burst) {
        let Input { port, turn, .. } = self.inputs[input];
        let mut decisions = self.decide(port, &burst);
        if decisions.floods != 0 {
            self.limit(port, &mut decisions, tsc::now());
        }
        if decisions.malformed > 0 {
            self.inputs[input].rx.counters().drop(DropReason::Malformed, decisions.malformed);
        }
        ctx.clock.lap(Stage::Header);
        let mut packets: ArrayVec<Option<Packet>, BURST> = burst.into_iter().map(Some).collect();
        let mut ports = decisions.union;
        while ports != 0 {
            let port = ports.trailing_zeros() as usize;
            ports &= ports - 1;
            self.collect(port, turn, &decisions, &mut packets, ctx);
        }
        ctx.cache.free_all(packets.into_iter().flatten());
    }

    /// Decides where packets go that came from `port`, and learns who sent them.
    #[inline]
    fn decide(&self, port: usize, burst: &[Packet]) -> Decisions {
        let mut decisions =
            Decisions { targets: [0; BURST], vlans: [(0, None); BURST], union: 0, floods: 0, malformed: 0 };
        let now = self.shared.fdb.now();
        for (index, packet) in burst.iter().enumerate() {
            match self.decide_one(port, packet, now) {
                Ok(Decision { targets, flood, vlan, tag }) => {
                    decisions.targets[index] = targets;
                    decisions.vlans[index] = (vlan, tag);
                    decisions.union |= targets;
                    decisions.floods |= u64::from(flood) << index;
                }
                Err(Malformed) => decisions.malformed += 1,
            }
        }
        decisions
    }

    #[inline]
    fn decide_one(&self, port: usize, packet: &Packet, now: u64) -> Result<Decision, Malformed> {
        let Shared { fdb, vlans, stations, learns, .. } = &*self.shared;
        let tag = tag::vlan_of(packet).map_err(|_| Malformed)?;
        let frame = packet.bytes();
        let (Some(&[a, b, c, d, e, f]), Some(&source)) = (frame.first_chunk(), frame[6..].first_chunk())
        else {
            return Err(Malformed);
        };
        let (destination, source) = (MacAddr([a, b, c, d, e, f]), MacAddr(source));
        if !source.is_unicast() {
            return Err(Malformed);
        }
        let nowhere = Decision { targets: 0, flood: false, vlan: 0, tag };
        // Pause frames, spanning tree, LLDP and the like are from a bridge to its neighbour (802.1Q, table 8-1).
        let reserved = [a, b, c, d, e] == [0x01, 0x80, 0xc2, 0, 0] && f < 0x10;
        let Some(vlan) = vlans.of(port, tag).filter(|_| !reserved) else {
            self.count(port, Count::Filtered);
            return Ok(nowhere);
        };
        let (mut known, mut learns) = (None, *learns);
        if stations.any() {
            let owner = stations.find(source);
            if !stations.admit(port, owner) {
                self.count(port, Count::Refused);
                return Ok(nowhere);
            }
            known = stations.find(destination);
            learns &= owner.is_none();
        }
        if learns {
            match fdb.learn(Station::new(vlan, source), port, now) {
                Learned::Known => {}
                Learned::New => self.count(port, Count::Learned),
                Learned::Moved => self.count(port, Count::Moved),
                Learned::Full => self.count(port, Count::NotLearned),
            }
        }
        if known.is_none() && self.shared.learns && !destination.is_multicast() {
            known = fdb.find(Station::new(vlan, destination), now);
        }
        let others = vlans.members(vlan) & !(1 << port);
        let (targets, flood) = match known {
            Some(to) if to == port => (0, false),
            // What the database says counts among the VLAN's ports only.
            Some(to) if others & 1 << to != 0 => (1 << to, false),
            _ => (others, true),
        };
        if targets == 0 {
            self.count(port, Count::Filtered);
            return Ok(nowhere);
        }
        Ok(Decision { targets, flood, vlan, tag })
    }

    /// Counts the packets that are to be flooded, and takes those out that are more than `port` may.
    fn limit(&self, port: usize, decisions: &mut Decisions, now: u64) {
        let wanted = u64::from(decisions.floods.count_ones());
        let allowed = match &self.shared.limits {
            None => wanted,
            Some(limits) => limits[port].take(now, wanted),
        };
        self.counters[port].counter(Count::Flooded as usize).add(allowed);
        if allowed == wanted {
            return;
        }
        self.counters[port].counter(Count::FloodLimited as usize).add(wanted - allowed);
        let mut floods = decisions.floods;
        for _ in 0..allowed {
            floods &= floods - 1;
        }
        while floods != 0 {
            decisions.targets[floods.trailing_zeros() as usize] = 0;
            floods &= floods - 1;
        }
        decisions.union = decisions.targets.iter().fold(0, |union, targets| union | targets);
    }

    /// Gives `port` its packets of the burst: those themselves that no port after it gets, of the others copies.
    fn collect(
        &mut self,
        port: usize,
        turn: usize,
        decisions: &Decisions,
        packets: &mut [Option<Packet>],
        ctx: &mut Context<'_>,
    ) {
        let queues = self.outputs[port].len();
        let output = &mut self.outputs[port][if turn < queues { turn } else { turn % queues }];
        let is_for = |targets: u64| targets & 1 << port != 0;
        // Whether a port that comes later gets it, too.
        let is_copied = |targets: u64| is_for(targets) && targets >> port > 1;
        let mut copies = Burst::new();
        if decisions.targets.iter().any(|&targets| is_copied(targets)) {
            let wanted = decisions.targets.iter().zip(&*packets).filter(|(targets, _)| is_copied(**targets));
            let wanted = wanted.filter_map(|(_, packet)| packet.as_ref());
            let missing = self.duplicator.duplicate(wanted, ctx.cache, &mut copies);
            output.tx.counters().drop(DropReason::NoBuffer, missing as u64);
            ctx.clock.lap(Stage::Copy);
        }
        let mut copies = copies.into_iter();
        for (index, packet) in packets.iter_mut().enumerate() {
            let targets = decisions.targets[index];
            if !is_for(targets) {
                continue;
            }
            let packet = if is_copied(targets) { copies.next() } else { packet.take() };
            let Some(mut packet) = packet else { continue };
            if self.shared.vlans.retags() {
                let (vlan, tag) = decisions.vlans[index];
                if let Err(error) = tag::retag(&mut packet, self.shared.vlans.retag(port, vlan, tag)) {
                    output.tx.counters().drop(reason(error), 1);
                    ctx.cache.free(packet);
                    continue;
                }
            }
            output.push(packet, ctx);
        }
    }

    #[inline]
    fn count(&self, port: usize, what: Count) {
        self.counters[port].counter(what as usize).add(1);
    }
}

/// What is decided of a packet.
struct Decision {
    targets: u64,
    flood: bool,
    vlan: u16,
    tag: Option<u16>,
}

/// The packet ends before its header, or nobody can have sent it.
struct Malformed;

#[cold]
fn reason(error: TagError) -> DropReason {
    match error {
        TagError::Malformed | TagError::Inner => DropReason::Malformed,
        TagError::NoRoom => DropReason::Failed,
    }
}

impl Output {
    #[inline]
    fn push(&mut self, packet: Packet, ctx: &mut Context<'_>) {
        if self.burst.is_full() {
            self.send(ctx);
        }
        self.burst.push(packet);
    }

    /// Sends what there is, and lets the queue follow its other side in any case.
    #[inline]
    fn send(&mut self, ctx: &mut Context<'_>) {
        if !Packet::all_plain(&self.burst) {
            fall_back(&mut *self.tx, ctx, &mut self.burst);
        }
        if self.burst.is_empty() {
            return self.tx.poll(ctx);
        }
        self.tx.tx(ctx, &mut self.burst);
        if !self.burst.is_empty() {
            self.tx.counters().drop_all(DropReason::Full, &mut self.burst, ctx.cache);
        }
    }
}

const _: () = assert!(MAX_PORTS == u64::BITS as usize, "a set of ports is a word of 64 bits");

#[cfg(test)]
mod tests;

//! A learning switch between any ports: forwarding mode `l2` (IEEE 802.1Q, without a spanning tree).
//!
//! * [`fdb`]: the forwarding database, shared by all workers,
//! * [`vlan`]: VLAN membership of ports, [`tag`]: 802.1Q tags in packets,
//! * [`stations`]: static addresses and locked ports,
//! * [`limit`]: flood limits (storm control).
//!
//! Each worker has one [`Bridge`] with its own RX and TX queues of every port. In each round, the bridge takes a burst
//! from each RX queue, decides for each packet to which ports it goes (a set of ports, 64 bits), and collects the
//! packets per TX queue. It sends to each TX queue once, at the end of the round. If a packet goes to several ports,
//! the last port gets the packet itself; the other ports get copies.

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
use offcore_stats::{Family, Stage, counters, tsc};
use offcore_wire::MacAddr;

use crate::worker::task::{Task, WakeSource, work};
use crate::worker::turns::Turns;
use fdb::{Fdb, Learned, MAX_PORTS, Station};
use limit::FloodLimit;
use stations::{StationRule, Stations};
use tag::TagError;
use vlan::{VlanRule, Vlans};

/// Configuration of a bridge.
#[derive(Clone, Debug)]
pub struct BridgeConfig {
    /// A station is forgotten after this time without a packet from it. Zero disables learning, as in the Linux bridge:
    /// all packets are flooded.
    pub ageing: Duration,
    /// Maximum number of known addresses.
    pub addresses: usize,
    /// Packets per second that one port may have flooded.
    pub flood_limit: Option<u64>,
    /// VLAN rules of ports. A port without a rule is in every VLAN, and its packets keep their tags.
    pub vlans: Vec<VlanRule>,
    /// Static addresses of ports, and locked ports.
    pub stations: Vec<StationRule>,
}

impl BridgeConfig {
    /// The default ageing time of IEEE 802.1Q.
    pub const AGEING: Duration = Duration::from_secs(300);
    /// The default limit for known addresses.
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

counters! {
    /// Counters of one worker for the packets received on one port.
    pub struct PortCounts, enum Count {
        /// Stations learned.
        Learned = learned: Events,
        /// Stations moved to the port.
        Moved = moved: Events,
        /// Packets whose source was not learned because the database had no room.
        NotLearned = not_learned: Packets,
        /// Packets sent to all other ports.
        Flooded = flooded: Packets,
        /// Packets not flooded because of the limit.
        FloodLimited = flood_limited: Packets,
        /// Packets without another port to go to: their station is behind the port itself, their VLAN has no other
        /// port, the port does not accept their tag, or their destination is an address reserved for bridges.
        Filtered = filtered: Packets,
        /// Packets whose source address belongs to another port, or is missing on a locked port.
        Refused = refused: Packets,
    }
}

counters! {
    /// Counters of the database of addresses.
    pub(crate) struct DatabaseCounts {
        /// Addresses in the database.
        addresses: Events gauge,
    }
}

counters! {
    /// Counters of the database for one port.
    pub(crate) struct AgedCounts {
        /// Stations behind the port that were forgotten.
        aged: Events,
    }
}

/// The counters of one worker for one port.
pub static BRIDGE_PORT: Family = Family::new(
    "bridge_port",
    "Packets that a worker of the learning switch received from a port.",
    &[&PortCounts::COUNTERS],
);
/// The counters of the database of addresses.
pub(crate) static BRIDGE: Family =
    Family::new("bridge", "The database of the learning switch.", &[&DatabaseCounts::COUNTERS]);
/// The counters of the database for one port.
pub(crate) static BRIDGE_AGED: Family =
    Family::new("bridge_aged", "Stations behind a port of the learning switch.", &[&AgedCounts::COUNTERS]);

/// State that the bridges of all workers share.
#[derive(Debug)]
pub struct Shared {
    pub fdb: Fdb,
    vlans: Vlans,
    stations: Stations,
    learns: bool,
    limits: Option<Vec<FloodLimit>>,
}

impl Shared {
    /// Creates the state for `ports` ports, 2 to [`MAX_PORTS`]. `config` names only these ports. The clock has `hz`
    /// ticks per second.
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
    /// The packets go to the worker's TX queue with this index, modulo the number of its TX queues of a port.
    pub turn: usize,
}

/// One TX queue of a worker's bridge, and the packets collected for it.
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
    /// Each port's counters, of the family [`BRIDGE_PORT`].
    counters: Vec<Block>,
    duplicator: Duplicator,
    /// Application work per packet, in TSC ticks.
    work: u64,
}

/// Decisions for the packets of a burst: target ports (a bit for each port), VLAN and tag.
struct Decisions {
    targets: [u64; BURST],
    vlans: [(u16, Option<u16>); BURST],
    /// Union of all targets.
    union: u64,
    /// Packets to flood, a bit for each.
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

    /// A port's turn covers its RX queues. The packets received in a turn are also sent in it, so the receiving port is
    /// charged for the time. A port to which many packets are sent is not charged for them.
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
    /// Creates a bridge with these RX queues. Each port has TX queues (at least one) and a block of counters made with
    /// [`Count::NAMES`]. `work` is the application work per packet in TSC ticks.
    ///
    /// # Panics
    /// If the numbers of ports differ, or a port has no TX queue.
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

    /// Takes a burst from an RX queue and forwards its packets. Returns their number.
    #[inline(always)]
    fn receive(&mut self, input: usize, ctx: &mut Context<'_>) -> usize {
        let mut burst = Burst::new();
        self.inputs[input].rx.rx(ctx, &mut burst);
        let packets = burst.len();
        if packets == 0 {
            // The time of an empty poll does not belong to any stage of a packet's path.
            ctx.clock.lap(Stage::Idle);
            return 0;
        }
        work(self.work, packets, ctx);
        self.forward(input, ctx, burst);
        packets
    }

    /// Sends the collected packets in the turn of `port`. The queues of `port` itself are polled even without packets,
    /// so that they follow their other side. Packets for a throttled port are dropped.
    fn send_in_turn(&mut self, port: usize, ctx: &mut Context<'_>, turns: &mut Turns) {
        for (to, outputs) in self.outputs.iter_mut().enumerate() {
            for output in outputs.iter_mut().filter(|output| to == port || !output.burst.is_empty()) {
                if !turns.visit(to, output.burst.len(), || output.send(ctx)) {
                    output.tx.counters().drop_all(DropReason::Full, &mut output.burst, ctx.cache);
                }
            }
        }
    }

    /// Moves the packets of one burst to the bursts of their target ports.
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

    /// Decides where the packets received on `port` go, and learns their source addresses.
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
        // Pause frames, spanning tree, LLDP and similar frames are never forwarded (802.1Q, table 8-1).
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
            // A database entry only counts if its port is in the VLAN.
            Some(to) if others & 1 << to != 0 => (1 << to, false),
            _ => (others, true),
        };
        if targets == 0 {
            self.count(port, Count::Filtered);
            return Ok(nowhere);
        }
        Ok(Decision { targets, flood, vlan, tag })
    }

    /// Counts the packets to flood, and drops those beyond the limit of `port`.
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

    /// Gives `port` its packets of the burst: the packets themselves if no later port gets them, otherwise copies.
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
        // Whether a later port gets the packet, too.
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

/// The decision for one packet.
struct Decision {
    targets: u64,
    flood: bool,
    vlan: u16,
    tag: Option<u16>,
}

/// The packet ends before its header, or its source address is invalid.
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

    /// Sends the collected packets. Without packets, only polls the queue so that it follows its other side.
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

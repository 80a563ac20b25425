//! Ports send arbitrary frames to a bridge with different VLAN rules. A frame only leaves ports in its VLAN, once per
//! port, and never the port that it came from. Its tag matches the port, and otherwise it is unchanged. Every packet
//! buffer is returned.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use offcore_dma::Mover;
use offcore_flow::bridge::fdb::Clock;
use offcore_flow::bridge::vlan::PortVlans;
use offcore_flow::bridge::{BRIDGE_PORT, Bridge, BridgeConfig, Input, Shared};
use offcore_flow::worker::task::Task;
use offcore_mem::{Burst, HEADROOM, Hugepages, Packet, Pool, PoolCache};
use offcore_port::{Accepts, Context, RxCounters, RxQueue, TxCounters, TxQueue};
use offcore_stats::StageClock;
use offcore_stats::page::Block;
use offcore_wire::virtio_net::{NetHeader, Offloads, VIRTIO_NET_HDR_F_NEEDS_CSUM};

use crate::script::Script;

const CHUNKS: usize = 512;
const PORTS: usize = 4;
const MAX_STEPS: usize = 60;
/// Bytes at the end of each frame that identify it.
const MARK: usize = 4;

/// VLAN rules of the ports. Ports after the last rule are in every VLAN.
const RULES: [&[&str]; 6] = [
    &[],
    &["0=access:10", "1=access:20", "2=trunk:10,20", "3=trunk:20,native=10"],
    &["0=access:10", "1=access:10"],
    &["0=trunk:1-100", "1=trunk:5,native=1", "2=access:5", "3=access:1"],
    &["0=trunk:native=7", "1=access:7", "2=trunk:7"],
    &["3=trunk:1-4094,native=10"],
];
const STATIONS: [&[&str]; 3] =
    [&[], &["0=02:00:00:00:00:01,locked"], &["1=02:00:00:00:00:02,02:00:00:00:00:03", "2=locked"]];

/// State that outlives a script, because pools and private counters live as long as the process.
struct Kept {
    pool: &'static Pool,
    clock: StageClock,
    received: RxCounters,
    sent: TxCounters,
    counts: Block,
}

thread_local! {
    static KEPT: RefCell<Option<Kept>> = const { RefCell::new(None) };
}

/// Result of a script.
#[derive(Clone, Copy, Debug, Default)]
#[allow(dead_code, reason = "a fuzz target looks at none of it")]
pub(crate) struct Outcome {
    /// Frames sent by at least one port.
    pub(crate) sent: usize,
    /// Sent frames whose tag was added, removed or changed.
    pub(crate) retagged: usize,
    /// Frames that no port sent.
    pub(crate) kept: usize,
}

type Frames = Arc<Mutex<VecDeque<(NetHeader, Vec<u8>)>>>;

/// An RX queue with frames from the script.
#[derive(Debug)]
struct Feed(Frames, RxCounters);

impl RxQueue for Feed {
    fn rx(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        let mut frames = self.0.lock().unwrap();
        while let Some((header, frame)) = frames.pop_front() {
            let mut packet = ctx.cache.take_chain(HEADROOM, frame.len()).unwrap();
            let bytes = ctx.cache.pool().segments_mut(&mut packet).flatten();
            bytes.zip(&frame).for_each(|(to, from)| *to = *from);
            if header.leaves_work() {
                packet.headroom_mut(12).copy_from_slice(&header.to_bytes());
                packet.set_offload(true);
            }
            burst.push(packet);
        }
    }

    fn counters(&self) -> &RxCounters {
        &self.1
    }
}

/// A TX queue that keeps sent frames.
#[derive(Debug)]
struct Catch(Frames, Accepts, TxCounters);

impl TxQueue for Catch {
    fn tx(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        for packet in burst.drain(..) {
            assert!(self.1.takes(&packet));
            let header = match packet.has_offload() {
                true => NetHeader::from_bytes(packet.headroom_bytes(12).first_chunk().unwrap()),
                false => NetHeader::default(),
            };
            let frame = ctx.cache.pool().segments(&packet).flatten().copied().collect();
            self.0.lock().unwrap().push_back((header, frame));
            ctx.cache.free(packet);
        }
    }

    fn accepts(&self) -> Accepts {
        self.1
    }

    fn counters(&self) -> &TxCounters {
        &self.2
    }
}

/// Plays a script.
///
/// # Panics
/// If a frame leaves the wrong port, or is changed in a wrong way.
pub(crate) fn play(script: &[u8]) -> Outcome {
    let kept = KEPT.take().unwrap_or_else(|| Kept {
        pool: Pool::new(CHUNKS, 2048, Hugepages::None).unwrap(),
        clock: StageClock::private(),
        received: RxCounters::private(),
        sent: TxCounters::private(),
        counts: Block::private(&BRIDGE_PORT),
    });
    let mut script = Script(script);
    let mut rig = Rig::new(&mut script, kept);
    let mut outcome = Outcome::default();
    for number in 0..MAX_STEPS {
        if script.0.is_empty() {
            break;
        }
        if script.u8() < 8 {
            rig.ageing.turn(&rig.shared.fdb, Duration::from_secs(number as u64 * u64::from(script.u8())));
        }
        rig.pass(number, &mut script, &mut outcome);
    }
    let Rig { mut cache, kept, .. } = rig;
    let all: Vec<Packet> = std::iter::from_fn(|| cache.take()).collect();
    assert_eq!(all.len(), CHUNKS, "packet buffers are missing");
    cache.free_all(all);
    KEPT.set(Some(kept));
    outcome
}

struct Rig {
    config: BridgeConfig,
    shared: Arc<Shared>,
    ageing: Clock,
    bridge: Bridge,
    cache: PoolCache,
    mover: Mover,
    kept: Kept,
    inputs: [Frames; PORTS],
    outputs: [Frames; PORTS],
}

impl Rig {
    fn new(script: &mut Script<'_>, kept: Kept) -> Self {
        let parsed = |rules: &[&str]| rules.iter().map(|rule| rule.parse().unwrap()).collect();
        let config = BridgeConfig {
            vlans: parsed(RULES[script.below(RULES.len())]),
            stations: STATIONS[script.below(STATIONS.len())]
                .iter()
                .map(|rule| rule.parse().unwrap())
                .collect(),
            addresses: [4, 64, 16384][script.below(3)],
            ageing: Duration::from_secs([300, 300, 0][script.below(3)]),
            ..BridgeConfig::default()
        };
        let shared = Arc::new(Shared::new(&config, PORTS, 1 << 55));
        let (inputs, outputs): ([Frames; PORTS], [Frames; PORTS]) = Default::default();
        let feeds = inputs.iter().enumerate().map(|(port, frames)| {
            let rx = Box::new(Feed(Arc::clone(frames), kept.received.clone()));
            Input { rx, port, turn: 0 }
        });
        let (segments, offloads) = (script.u8(), script.u8());
        let catches = outputs.iter().enumerate().map(|(port, frames)| {
            // For the other ports, the switch completes checksums.
            let offloads = if offloads >> port & 1 != 0 { Offloads::ALL } else { Offloads::default() };
            let accepts = Accepts { offloads, segments: segments >> port & 1 != 0 };
            vec![Box::new(Catch(Arc::clone(frames), accepts, kept.sent.clone())) as Box<dyn TxQueue>]
        });
        let counters = vec![kept.counts.clone(); PORTS];
        let bridge = Bridge::new(Arc::clone(&shared), feeds.collect(), catches.collect(), counters, 0);
        let ageing = Clock::new(config.ageing.max(Duration::from_secs(1)));
        let (cache, mover) = (kept.pool.cache(), Mover::new());
        Self { config, shared, ageing, bridge, cache, mover, kept, inputs, outputs }
    }

    /// Sends one to four frames from one port in one round.
    fn pass(&mut self, number: usize, script: &mut Script<'_>, outcome: &mut Outcome) {
        let port = script.below(PORTS);
        let sent: Vec<(NetHeader, Vec<u8>)> =
            (0..1 + script.below(4)).map(|n| frame(number * 4 + n, script)).collect();
        self.inputs[port].lock().unwrap().extend(sent.iter().cloned());
        let Self { bridge, cache, mover, kept, .. } = self;
        bridge.round(&mut Context { mover, cache, clock: &mut kept.clock, burst: 32 });
        let mut came_out = vec![0; sent.len()];
        for (to, frames) in self.outputs.iter().enumerate() {
            let mut before = None;
            for (header, frame) in frames.lock().unwrap().drain(..) {
                let mark = &frame[frame.len() - MARK..];
                let which =
                    sent.iter().position(|(_, sent)| sent.ends_with(mark)).expect("a frame of this round");
                assert!(before < Some(which), "each frame once, in order");
                before = Some(which);
                assert_ne!(to, port, "not back to where it came from");
                outcome.retagged += usize::from(self.judge(port, to, &sent[which], &(header, frame)));
                came_out[which] += 1;
            }
        }
        outcome.sent += came_out.iter().filter(|&&copies| copies > 0).count();
        outcome.kept += came_out.iter().filter(|&&copies| copies == 0).count();
    }

    /// Checks that a frame from port `from` may leave port `to` in this form. Returns whether its tag has changed.
    fn judge(&self, from: usize, to: usize, sent: &(NetHeader, Vec<u8>), got: &(NetHeader, Vec<u8>)) -> bool {
        let (tag, rest) = take_tag(&sent.1);
        let (new_tag, new_rest) = take_tag(&got.1);
        let source = &sent.1[6..12];
        assert!(source[0] & 1 == 0 && source != [0; 6], "no station has that address");
        assert!(
            sent.1[..5] != [1, 0x80, 0xc2, 0, 0] || sent.1[5] >= 0x10,
            "an address that bridges keep to themselves"
        );
        for rule in &self.config.stations {
            let theirs = rule.addresses.iter().any(|address| address.0 == source);
            assert!(!theirs || rule.port == from, "the address is port {}'s", rule.port);
            assert!(theirs || !rule.locked || rule.port != from, "port {from} is locked");
        }
        let vlan = self.vlan_of(from, tag).unwrap_or_else(|| panic!("port {from} does not take {tag:?}"));
        assert!(self.is_in(to, vlan), "port {to} is not in VLAN {vlan}");
        assert!(sent.0.leaves_work() || !got.0.leaves_work());
        let moved = got.1.len() as i32 - sent.1.len() as i32;
        let completed = sent.0.leaves_work() && !got.0.leaves_work();
        let mut expected = rest;
        if completed {
            let without_tag = if tag.is_some() { 4 } else { 0 };
            let start = usize::from(sent.0.csum_start) - without_tag;
            let place = start + usize::from(sent.0.csum_offset);
            assert!(start >= 14, "a checksum in the header, which says where a frame may go");
            // copy-ok: a checksum, which other tests verify
            expected[place..place + 2].copy_from_slice(&new_rest[place..place + 2]);
        }
        assert_eq!(new_rest, expected, "only the tag changes, and a checksum");
        if vlan == 0 {
            assert_eq!(tag, new_tag);
            return false;
        }
        // The receiver must see the frame in the same VLAN.
        assert_eq!(self.vlan_of(to, new_tag), Some(vlan), "to port {to}: {tag:?} became {new_tag:?}");
        if got.0.leaves_work() {
            assert_eq!(i32::from(got.0.csum_start) - i32::from(sent.0.csum_start), moved);
        }
        new_tag != tag
    }

    /// Returns the VLAN of frames with this tag at a port, or `None` if the port does not accept them. This is a
    /// second, simple implementation.
    fn vlan_of(&self, port: usize, tag: Option<u16>) -> Option<u16> {
        let tagged = tag.map(|tag| tag & 0xfff).filter(|&id| id != 0);
        let rule = self.config.vlans.iter().find(|rule| rule.port == port);
        match (rule.map(|rule| &rule.vlans), tagged) {
            (Some(PortVlans::Access(id)), None) => Some(*id),
            (Some(PortVlans::Access(_)), Some(_)) => None,
            (Some(PortVlans::Trunk { native, .. }), None) => *native,
            (Some(PortVlans::Trunk { .. }) | None, Some(id)) => self.is_in(port, id).then_some(id),
            (None, None) => Some(0),
        }
    }

    fn is_in(&self, port: usize, vlan: u16) -> bool {
        let Some(rule) = self.config.vlans.iter().find(|rule| rule.port == port) else { return vlan < 4095 };
        match &rule.vlans {
            PortVlans::Access(id) => *id == vlan,
            PortVlans::Trunk { tagged, native } => {
                *native == Some(vlan) || tagged.iter().any(|&(first, last)| (first..=last).contains(&vlan))
            }
        }
    }
}

/// Returns the tag of a frame, and the frame without it.
fn take_tag(frame: &[u8]) -> (Option<u16>, Vec<u8>) {
    match frame[12..14] == [0x81, 0] {
        true => (Some(u16::from_be_bytes([frame[14], frame[15]])), [&frame[..12], &frame[16..]].concat()),
        false => (None, frame.to_vec()),
    }
}

/// Creates a frame. Most frames are realistic.
fn frame(number: usize, script: &mut Script<'_>) -> (NetHeader, Vec<u8>) {
    let mut frame = Vec::new();
    for which in 0..2 {
        let n = script.u8();
        frame.extend(match n {
            0..16 if which == 0 => [1, 0x80, 0xc2, 0, 0, n],
            16..32 if which == 0 => [0xff; 6],
            16..18 => [0; 6],
            32..36 => script.bytes(),
            n => [2, 0, 0, 0, 0, n % 8],
        });
    }
    for _ in 0..[0, 0, 0, 1, 1, 1, 2, 3][script.below(8)] {
        let kind = if script.u8() < 230 { [0x81, 0] } else { [0x88, 0xa8] };
        let vlan = [0, 1, 5, 7, 10, 20, 4095, script.u16() & 0xfff][script.below(8)];
        frame.extend(kind);
        frame.extend((vlan | u16::from(script.u8() & 0xf0) << 8).to_be_bytes());
    }
    frame.extend(if script.u8() < 230 { [8, 0] } else { script.bytes() });
    let front = frame.len();
    let len = if script.u8() < 16 { script.below(6000) } else { script.below(100) };
    frame.resize(front + len, 0x5a);
    frame.extend((number as u32).to_be_bytes());
    let mut header = NetHeader::default();
    if len > 40 && script.u8() < 64 {
        header.flags = VIRTIO_NET_HDR_F_NEEDS_CSUM;
        header.csum_start = script.below(front + 20) as u16;
        header.csum_offset = 6;
    }
    let header = if header.check(frame.len()).is_ok() { header } else { NetHeader::default() };
    (header, frame)
}

use std::collections::{HashMap, VecDeque};
use std::sync::Mutex;

use offcore_dma::Mover;
use offcore_mem::{HEADROOM, Hugepages, Pool, PoolCache};
use offcore_port::{Accepts, RxCounters, TxCounters};
use offcore_stats::StageClock;
use offcore_wire::virtio_net::{self, NetHeader, Offloads, VIRTIO_NET_HDR_F_NEEDS_CSUM};
use proptest::prelude::*;

use super::fdb::Clock;
use super::*;

/// The ports to which a dropped packet is sent.
const NOWHERE: [usize; 0] = [];

/// Number of packet buffers.
const POOL: usize = 512;

type Frames = Arc<Mutex<VecDeque<Vec<u8>>>>;

/// An RX queue with frames from a test.
#[derive(Debug)]
struct Feed(Frames, RxCounters);

impl RxQueue for Feed {
    fn rx(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        let mut frames = self.0.lock().unwrap();
        let wanted = ctx.burst.min(frames.len());
        for frame in frames.drain(..wanted) {
            let mut packet = ctx.cache.take_chain(HEADROOM, frame.len()).unwrap();
            let bytes = ctx.cache.pool().segments_mut(&mut packet).flatten();
            bytes.zip(&frame).for_each(|(to, from)| *to = *from);
            burst.push(packet);
        }
    }

    fn counters(&self) -> &RxCounters {
        &self.1
    }
}

/// A TX queue that keeps sent frames while it has room. Sending takes `page_in`, which stands for a page fault.
#[derive(Debug)]
struct Catch {
    frames: Frames,
    room: usize,
    accepts: Accepts,
    counters: TxCounters,
    page_in: Arc<Mutex<Duration>>,
}

impl TxQueue for Catch {
    fn tx(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        std::thread::sleep(std::mem::take(&mut *self.page_in.lock().unwrap()));
        let mut frames = self.frames.lock().unwrap();
        let taken = burst.len().min(self.room - frames.len());
        for packet in burst.drain(..taken) {
            assert!(self.accepts.takes(&packet));
            frames.push_back(ctx.cache.pool().segments(&packet).flatten().copied().collect());
            ctx.cache.free(packet);
        }
    }

    fn accepts(&self) -> Accepts {
        self.accepts
    }

    fn counters(&self) -> &TxCounters {
        &self.counters
    }
}

/// A bridge of one worker over ports with one queue each.
struct Setup {
    shared: Arc<Shared>,
    bridge: Bridge,
    cache: PoolCache,
    mover: Mover,
    clock: StageClock,
    input: Vec<(Frames, RxCounters)>,
    output: Vec<(Frames, TxCounters)>,
    counters: Vec<Block>,
    page_ins: Vec<Arc<Mutex<Duration>>>,
    /// The turns of ports, if they are measured.
    turns: Option<Turns>,
}

impl Setup {
    fn new(ports: usize, config: &BridgeConfig) -> Self {
        // At this clock rate, time does not advance: a limit allows no further packets.
        Self::with(ports, Arc::new(Shared::new(config, ports, 1 << 55)), usize::MAX)
    }

    fn with(ports: usize, shared: Arc<Shared>, room: usize) -> Self {
        let input: Vec<_> = (0..ports).map(|_| (Frames::default(), RxCounters::private())).collect();
        let output: Vec<_> = (0..ports).map(|_| (Frames::default(), TxCounters::private())).collect();
        let counters: Vec<Block> = (0..ports).map(|_| Block::private(&BRIDGE_PORT)).collect();
        let page_ins: Vec<_> = (0..ports).map(|_| Arc::default()).collect();
        let inputs = input.iter().enumerate().map(|(port, (frames, counters))| {
            let rx = Box::new(Feed(Arc::clone(frames), counters.clone()));
            Input { rx, port, turn: 0 }
        });
        let outputs = output.iter().enumerate().map(|(port, (frames, counters))| {
            // Every other port accepts all offloads and segmented packets.
            let accepts = Accepts { offloads: Offloads::ALL, segments: true };
            let accepts = if port % 2 == 0 { accepts } else { Accepts::default() };
            let (frames, counters) = (Arc::clone(frames), counters.clone());
            let page_in = Arc::clone(&page_ins[port]);
            vec![Box::new(Catch { frames, room, accepts, counters, page_in }) as Box<dyn TxQueue>]
        });
        let inputs = inputs.collect();
        let bridge = Bridge::new(Arc::clone(&shared), inputs, outputs.collect(), counters.clone(), 0);
        let pool = Pool::new(POOL, 2048, Hugepages::None).unwrap();
        let (mover, cache, clock) = (Mover::new(), pool.cache(), StageClock::private());
        Self { shared, bridge, cache, mover, clock, input, output, counters, page_ins, turns: None }
    }

    fn round(&mut self) {
        let Self { bridge, cache, mover, clock, turns, .. } = self;
        let mut ctx = Context { mover, cache, clock, burst: 32 };
        match turns {
            None => bridge.round(&mut ctx),
            Some(turns) => {
                turns.begin();
                turns.round(|turns| bridge.round_in_turns(&mut ctx, turns))
            }
        };
    }

    /// Receives the frame at `port` and makes a round. Returns the ports to which the frame was sent.
    fn pass(&mut self, port: usize, frame: &[u8]) -> Vec<usize> {
        self.input[port].0.lock().unwrap().push_back(frame.to_vec());
        self.round();
        let sent = self.output.iter().map(|(frames, _)| frames.lock().unwrap().drain(..).count());
        sent.enumerate().filter(|(_, count)| *count > 0).map(|(port, _)| port).collect()
    }

    fn sent(&self, port: usize) -> Vec<Vec<u8>> {
        self.output[port].0.lock().unwrap().drain(..).collect()
    }

    fn count(&self, port: usize, name: &str) -> u64 {
        let index = Count::find(name).unwrap() as usize;
        self.counters[port].counter(index).value()
    }

    /// Checks that the bridge holds no packet buffers.
    fn assert_all_free(&mut self) {
        let all: Vec<Packet> = std::iter::from_fn(|| self.cache.take()).collect();
        assert_eq!(all.len(), POOL, "packet buffers were lost");
        self.cache.free_all(all);
    }
}

fn mac(n: u8) -> [u8; 6] {
    match n {
        0 => [0xff; 6],
        1 => [0x01, 0, 0x5e, 0, 0, 1],
        n => [2, 0, 0, 0, 0, n],
    }
}

/// Returns a frame, with this tag control information in its tag.
fn frame(to: [u8; 6], from: [u8; 6], tag: Option<u16>, payload: &[u8]) -> Vec<u8> {
    let tag = tag.map(|tag| [0x81, 0, (tag >> 8) as u8, tag as u8]);
    [&to[..], &from, tag.as_ref().map_or(&[], |tag| &tag[..]), &[8, 0], payload].concat()
}

fn rules(rules: &[&str]) -> BridgeConfig {
    let vlans = rules.iter().map(|rule| rule.parse().unwrap()).collect();
    BridgeConfig { vlans, ..BridgeConfig::default() }
}

#[test]
fn known_unicast_is_not_flooded() {
    let mut setup = Setup::new(4, &BridgeConfig::default());
    assert_eq!(setup.pass(0, &frame(mac(9), mac(8), None, b"question")), [1, 2, 3]);
    assert_eq!(setup.pass(2, &frame(mac(8), mac(9), None, b"answer")), [0]);
    assert_eq!(setup.pass(0, &frame(mac(9), mac(8), None, b"thanks")), [2]);
    assert_eq!(setup.pass(0, &frame(mac(0), mac(8), None, b"all")), [1, 2, 3]);
    // The station has moved and announces itself.
    assert_eq!(setup.pass(3, &frame(mac(0), mac(9), None, b"here")), [0, 1, 2]);
    assert_eq!(setup.pass(0, &frame(mac(9), mac(8), None, b"thanks")), [3]);
    // The destination is behind the receiving port.
    assert_eq!(setup.pass(3, &frame(mac(9), mac(7), None, b"neighbour")), NOWHERE);
    let counts = |port| ["learned", "moved", "flooded", "filtered"].map(|name| setup.count(port, name));
    assert_eq!([0, 2, 3].map(counts), [[1, 0, 2, 0], [1, 0, 0, 0], [1, 1, 1, 1]]);
    setup.assert_all_free();
}

#[test]
fn unforwardable_frames_are_counted() {
    let mut setup = Setup::new(3, &BridgeConfig::default());
    for last in 0..16 {
        assert_eq!(setup.pass(0, &frame([1, 0x80, 0xc2, 0, 0, last], mac(8), None, b"")), NOWHERE);
    }
    assert_eq!(setup.count(0, "filtered"), 16);
    assert_eq!(setup.pass(0, &frame([1, 0x80, 0xc2, 0, 0, 16], mac(8), None, b"")), [1, 2]);
    // Invalid sources (a group address, zero), a truncated tag, a truncated frame, an empty frame.
    let tagged = frame(mac(9), mac(8), Some(5), b"");
    for bad in [
        &frame(mac(9), mac(1), None, b"")[..],
        &frame(mac(9), [0; 6], None, b""),
        &tagged[..15],
        &tagged[..3],
        &[],
    ] {
        assert_eq!(setup.pass(1, bad), NOWHERE, "{bad:?}");
    }
    assert_eq!(setup.input[1].1.dropped(DropReason::Malformed), 5);
    assert_eq!(setup.pass(0, &frame(mac(0), mac(8), Some(4095), b"")), NOWHERE, "a reserved VLAN");
    setup.assert_all_free();
}

#[test]
fn zero_ageing_time_floods_everything() {
    let mut setup = Setup::new(3, &BridgeConfig { ageing: Duration::ZERO, ..BridgeConfig::default() });
    for _ in 0..3 {
        assert_eq!(setup.pass(0, &frame(mac(9), mac(8), None, b"")), [1, 2]);
        assert_eq!(setup.pass(1, &frame(mac(8), mac(9), None, b"")), [0, 2]);
    }
    assert_eq!((setup.count(0, "learned"), setup.shared.fdb.addresses()), (0, 0));
}

/// Returns a bridge of three ports with these station rules.
fn pinned(rules: &[&str], ageing: Duration) -> Setup {
    let stations = rules.iter().map(|rule| rule.parse().unwrap()).collect();
    Setup::new(3, &BridgeConfig { stations, ageing, ..BridgeConfig::default() })
}

#[test]
fn pinned_address_cannot_be_claimed() {
    // With and without learning.
    for ageing in [BridgeConfig::AGEING, Duration::ZERO] {
        let mut setup = pinned(&["0=02:00:00:00:00:08"], ageing);
        for tag in [None, Some(5)] {
            assert_eq!(setup.pass(1, &frame(mac(8), mac(9), tag, b"before it has sent")), [0]);
            assert_eq!(setup.pass(2, &frame(mac(0), mac(8), tag, b"thief")), NOWHERE);
            assert_eq!(setup.pass(1, &frame(mac(8), mac(9), tag, b"still")), [0]);
            assert_eq!(setup.pass(0, &frame(mac(0), mac(8), tag, b"itself")), [1, 2]);
        }
        assert_eq!(
            (setup.count(2, "refused"), setup.count(2, "learned"), setup.count(2, "moved")),
            (2, 0, 0)
        );
        assert_eq!((setup.count(0, "refused"), setup.count(0, "learned")), (0, 0));
        // The port may have other stations, too.
        assert_eq!(setup.pass(0, &frame(mac(0), mac(7), None, b"neighbour")), [1, 2]);
        setup.assert_all_free();
    }
}

#[test]
fn locked_port_sends_only_pinned_addresses() {
    let mut setup =
        pinned(&["1=02:00:00:00:00:08,02:00:00:00:00:09,locked", "2=locked"], BridgeConfig::AGEING);
    for own in [8, 9] {
        assert_eq!(setup.pass(1, &frame(mac(0), mac(own), None, b"own")), [0, 2]);
    }
    assert_eq!(setup.pass(1, &frame(mac(0), mac(7), None, b"other")), NOWHERE);
    assert_eq!(setup.pass(2, &frame(mac(0), mac(7), None, b"any")), NOWHERE);
    assert_eq!(setup.pass(0, &frame(mac(0), mac(7), None, b"learned here")), [1, 2]);
    assert_eq!(setup.pass(1, &frame(mac(7), mac(8), None, b"to it")), [0]);
    let counts = |port| ["learned", "moved", "refused"].map(|name| setup.count(port, name));
    assert_eq!([0, 1, 2].map(counts), [[1, 0, 0], [0, 0, 1], [0, 0, 1]]);
    assert_eq!(setup.shared.fdb.addresses(), 1);
    setup.assert_all_free();
}

#[test]
fn full_fdb_floods() {
    let mut setup = Setup::new(2, &BridgeConfig { addresses: 4, ..BridgeConfig::default() });
    for n in 2..100 {
        assert_eq!(setup.pass(0, &frame(mac(200), mac(n), None, b"")), [1]);
    }
    assert_eq!((setup.count(0, "learned"), setup.count(0, "not_learned")), (3, 95));
    for n in 0..100 {
        setup.pass(n % 2, &frame(mac(0), mac(2), None, b""));
    }
    assert_eq!((setup.count(0, "moved"), setup.count(1, "moved")), (49, 50));
    setup.assert_all_free();
}

#[test]
fn flood_limit_applies_per_port() {
    let config = BridgeConfig { flood_limit: Some(1000), ..BridgeConfig::default() };
    let mut setup = Setup::new(3, &config);
    for n in 0..250 {
        let port = usize::from(n >= 200);
        let copies = setup.pass(port, &frame(mac(0), mac(8 + port as u8), None, b""));
        assert_eq!(copies.is_empty(), (100..200).contains(&n), "packet {n}");
    }
    // Packets to known stations are still forwarded.
    assert_eq!(setup.pass(0, &frame(mac(9), mac(8), None, b"")), [1]);
    let counts = |port| ["flooded", "flood_limited"].map(|name| setup.count(port, name));
    assert_eq!([counts(0), counts(1)], [[100, 100], [50, 0]]);
    // The first packets of a burst are flooded.
    for n in 0..60u8 {
        setup.input[1].0.lock().unwrap().push_back(frame(mac(0), mac(9), None, &[n]));
    }
    for _ in 0..2 {
        setup.round();
    }
    let sent = setup.sent(2);
    assert_eq!(sent.iter().map(|frame| frame[14]).collect::<Vec<_>>(), (0..50).collect::<Vec<_>>());
    setup.assert_all_free();
}

#[test]
fn vlans_do_not_mix() {
    let mut setup =
        Setup::new(5, &rules(&["0=access:10", "1=access:20", "2=trunk:10,20", "3=trunk:20,native=10"]));
    // From the access port of VLAN 10: tagged to the trunk, untagged to the trunk with native VLAN 10, and tagged to
    // port 4, which is in all VLANs.
    assert_eq!(setup.pass(0, &frame(mac(0), mac(8), None, b"")), [2, 3, 4]);
    setup.input[0].0.lock().unwrap().push_back(frame(mac(0), mac(8), None, b"x"));
    setup.round();
    let (plain, tagged) = (frame(mac(0), mac(8), None, b"x"), frame(mac(0), mac(8), Some(10), b"x"));
    assert_eq!(
        [2, 3, 4].map(|port| setup.sent(port)),
        [vec![tagged.clone()], vec![plain.clone()], vec![tagged]]
    );
    // From a trunk, with priority 5, which is kept as long as the packet has a tag.
    setup.input[2].0.lock().unwrap().push_back(frame(mac(0), mac(8), Some(5 << 13 | 20), b"x"));
    setup.round();
    let tagged = frame(mac(0), mac(8), Some(5 << 13 | 20), b"x");
    let expected = [vec![], vec![plain], vec![], vec![tagged.clone()], vec![tagged]];
    assert_eq!([0, 1, 2, 3, 4].map(|port| setup.sent(port)), expected);
    // Ports do not accept a tag on an access port, no tag on a trunk without a native VLAN, or a VLAN that the trunk
    // lacks.
    for (port, tag) in [(0, Some(10)), (2, None), (2, Some(30)), (3, Some(30))] {
        assert_eq!(setup.pass(port, &frame(mac(0), mac(8), tag, b"")), NOWHERE, "{tag:?} at port {port}");
    }
    // An inner tag behind a priority tag would become the outer tag where the priority tag is removed. The packet would
    // then be in a VLAN that its sender is not in.
    let mut double = frame(mac(0), mac(8), Some(0), b"x");
    double.splice(16..16, [0x81, 0, 0, 20]);
    assert_eq!(setup.pass(0, &double), [2, 4], "not the trunk whose native VLAN it is");
    // The same address in two VLANs is two stations.
    assert_eq!(setup.pass(1, &frame(mac(0), mac(7), None, b"")), [2, 3, 4]);
    assert_eq!(setup.pass(0, &frame(mac(7), mac(8), None, b"")), [2, 3, 4], "7 is not known in VLAN 10");
    setup.assert_all_free();
}

#[test]
fn partial_checksum_packets_are_flooded() {
    let mut setup = Setup::new(4, &BridgeConfig::default());
    let payload: Vec<u8> = (0..1500u32).map(|n| (n % 249) as u8).collect();
    let (short, long) =
        (frame(mac(0), mac(8), None, &payload), frame(mac(0), mac(8), None, &payload.repeat(5)));
    let header = NetHeader {
        flags: VIRTIO_NET_HDR_F_NEEDS_CSUM,
        csum_start: 14,
        csum_offset: 2,
        ..NetHeader::default()
    };
    /// An RX queue whose packets request a checksum.
    #[derive(Debug)]
    struct Open(Feed, NetHeader);
    impl RxQueue for Open {
        fn rx(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
            self.0.rx(ctx, burst);
            for packet in burst {
                packet.headroom_mut(virtio_net::HEADER_LEN).copy_from_slice(&self.1.to_bytes());
                packet.set_offload(true);
            }
        }
        fn counters(&self) -> &RxCounters {
            self.0.counters()
        }
    }
    let (frames, counters) = &setup.input[0];
    setup.bridge.inputs[0].rx = Box::new(Open(Feed(Arc::clone(frames), counters.clone()), header));
    setup.input[0].0.lock().unwrap().extend([short.clone(), long.clone(), short.clone()]);
    setup.round();
    // Port 2 accepts them unchanged. Ports 1 and 3 accept neither segmented packets nor packets without a checksum.
    assert_eq!(setup.sent(2), [short.clone(), long, short.clone()]);
    for port in [1, 3] {
        let sent = setup.sent(port);
        assert_eq!(sent.len(), 2, "port {port}");
        assert_eq!(setup.output[port].1.dropped(DropReason::TooBig), 1);
        assert_ne!(sent[0], short, "the checksum was completed");
        assert_eq!((&sent[0][..16], &sent[0][18..]), (&short[..16], &short[18..]));
    }
    setup.assert_all_free();
}

#[test]
fn full_port_drops_only_its_copies() {
    let shared = Arc::new(Shared::new(&BridgeConfig::default(), 3, 1 << 55));
    let mut setup = Setup::with(3, shared, 20);
    for n in 0..60 {
        setup.input[0].0.lock().unwrap().push_back(frame(mac(0), mac(8), None, &[n]));
    }
    for _ in 0..2 {
        setup.round();
    }
    for port in [1, 2] {
        assert_eq!((setup.sent(port).len(), setup.output[port].1.dropped(DropReason::Full)), (20, 40));
    }
    setup.assert_all_free();
}

#[test]
fn exhausted_pool_drops_only_copies() {
    let mut setup = Setup::new(3, &BridgeConfig::default());
    let held: Vec<Packet> = (0..POOL - 15).map(|_| setup.cache.take().unwrap()).collect();
    for n in 0..10 {
        setup.input[0].0.lock().unwrap().push_back(frame(mac(0), mac(8), None, &[n]));
    }
    setup.round();
    assert_eq!((setup.sent(1).len(), setup.output[1].1.dropped(DropReason::NoBuffer)), (5, 5));
    assert_eq!(setup.sent(2).len(), 10);
    setup.cache.free_all(held);
    setup.assert_all_free();
}

/// The VLANs of a port in the model.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Open,
    Access(u16),
    /// VLANs 10 and 20, and the native VLAN.
    Trunk(Option<u16>),
}

impl Kind {
    fn rule(self, port: usize) -> Option<VlanRule> {
        let text = match self {
            Self::Open => return None,
            Self::Access(vlan) => format!("{port}=access:{vlan}"),
            Self::Trunk(None) => format!("{port}=trunk:10,20"),
            Self::Trunk(Some(native)) => format!("{port}=trunk:10,20,native={native}"),
        };
        Some(text.parse().unwrap())
    }

    fn vlan(self, tag: Option<u16>) -> Option<u16> {
        match (self, tag.unwrap_or(0)) {
            (Self::Open, vlan) => Some(vlan),
            (Self::Access(vlan), 0) => Some(vlan),
            (Self::Access(_), _) => None,
            (Self::Trunk(native), 0) => native,
            (Self::Trunk(native), vlan) => (vlan == 10 || vlan == 20 || native == Some(vlan)).then_some(vlan),
        }
    }

    /// The tag with which a packet of `vlan` leaves. The outer `None` means that the port is not in the VLAN.
    fn tag(self, vlan: u16, tag: Option<u16>) -> Option<Option<u16>> {
        match self {
            Self::Open if vlan == 0 => Some(tag),
            Self::Open => Some(Some(vlan)),
            Self::Access(own) => (own == vlan).then_some(None),
            Self::Trunk(native) if native == Some(vlan) => Some(None),
            Self::Trunk(_) => (vlan == 10 || vlan == 20).then_some(Some(vlan)),
        }
    }
}

fn kinds() -> impl Strategy<Value = Kind> {
    prop_oneof![
        Just(Kind::Open),
        Just(Kind::Access(10)),
        Just(Kind::Access(20)),
        Just(Kind::Trunk(None)),
        Just(Kind::Trunk(Some(10))),
        Just(Kind::Trunk(Some(30))),
    ]
}

/// A packet: its port, destination, source, and the VLAN of its tag.
type Step = (usize, u8, u8, Option<u16>);

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let tag =
        prop_oneof![Just(None), Just(None), Just(Some(0)), Just(Some(10)), Just(Some(20)), Just(Some(30))];
    proptest::collection::vec((0..6usize, 0..8u8, 2..8u8, tag), 1..40)
}

#[test]
fn slow_memory_throttles_its_port() {
    // A busy machine may be too slow for the first times, so the test is repeated with longer ones.
    for slept in (1..=6).map(|power| Duration::from_millis(50 << power)) {
        let mut setup = Setup::new(3, &BridgeConfig::default());
        setup.turns = Some(Turns::private());
        *setup.page_ins[2].lock().unwrap() = slept;
        let flood = frame(mac(0), mac(5), None, b"");
        assert_eq!(setup.pass(0, &flood), [1, 2]);
        let since = std::time::Instant::now();
        let (from_0, from_2, from_1) = (setup.pass(0, &flood), setup.pass(2, &flood), setup.pass(1, &flood));
        if since.elapsed() < slept {
            assert_eq!((&from_0[..], &from_2[..], &from_1[..]), (&[1][..], &[][..], &[0][..]));
            assert_eq!(setup.output[2].1.dropped(DropReason::Full), 2);
            // The port's own packet is received in a later turn.
            while !setup.input[2].0.lock().unwrap().is_empty() {
                setup.round();
            }
            assert!(since.elapsed() >= slept / 2);
            assert_eq!((setup.sent(0).len(), setup.sent(1).len()), (1, 1));
            return;
        }
    }
    panic!("the machine is too slow to say");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    /// Compares the bridge with a map: packets at random ports, with pauses in which stations are forgotten.
    #[test]
    fn bridge_matches_map_model(
        kinds in proptest::collection::vec(kinds(), 6),
        rounds in proptest::collection::vec((steps(), 0..10u64), 1..12),
        in_turns: bool
    ) {
        let vlans = kinds.iter().enumerate().filter_map(|(port, kind)| kind.rule(port)).collect();
        let config = BridgeConfig { vlans, ageing: Duration::from_secs(32), ..BridgeConfig::default() };
        let mut setup = Setup::new(6, &config);
        let mut clock = Clock::new(config.ageing);
        let mut model: HashMap<(u16, u8), (usize, u64)> = HashMap::new();
        let (mut seconds, mut serial) = (0, 0u32);
        for (mut steps, pause) in rounds {
            seconds += pause.saturating_sub(6) * 12;
            clock.turn(&setup.shared.fdb, Duration::from_secs(seconds));
            model.retain(|_, (_, seen)| seconds - *seen <= 32);
            // The bridge polls one port after another and keeps the order of each port's packets.
            steps.sort_by_key(|step| step.0);
            let mut expected: Vec<Vec<Vec<u8>>> = vec![Vec::new(); 6];
            for (port, to, from, tag) in steps {
                serial += 1;
                let payload = serial.to_be_bytes();
                setup.input[port].0.lock().unwrap().push_back(frame(mac(to), mac(from), tag, &payload));
                let Some(vlan) = kinds[port].vlan(tag) else { continue };
                model.insert((vlan, from), (port, seconds));
                let known = model.get(&(vlan, to)).map(|(port, _)| *port).filter(|_| to > 1);
                for (other, kind) in kinds.iter().enumerate() {
                    let is_for = other != port && known.is_none_or(|known| known == other);
                    if let Some(tag) = kind.tag(vlan, tag).filter(|_| is_for) {
                        expected[other].push(frame(mac(to), mac(from), tag, &payload));
                    }
                }
            }
            while setup.input.iter().any(|(frames, _)| !frames.lock().unwrap().is_empty()) {
                // With new turns, no port has to wait.
                setup.turns = in_turns.then(Turns::private);
                setup.round();
            }
            for (port, expected) in expected.iter().enumerate() {
                let mut sent = setup.sent(port);
                if sent != *expected {
                    // If one port has more than a burst, packets of the other ports come in between.
                    sent.sort();
                    let mut expected = expected.clone();
                    expected.sort();
                    prop_assert_eq!(sent, expected, "port {}", port);
                }
            }
        }
        setup.assert_all_free();
    }
}

//! Packets with offload requests (checksums, segmentation, several buffers) on a queue that accepts some of them. The
//! output must equal the input, segmented and checksummed by a second, simple implementation, or the packet is dropped.

use std::cell::RefCell;

use offcore_dma::Mover;
use offcore_mem::{BURST, Burst, HEADROOM, Hugepages, Packet, Pool};
use offcore_port::offload_fallback::fall_back;
use offcore_port::{Accepts, Context, TxCounters, TxQueue};
use offcore_stats::StageClock;
use offcore_wire::gso::{MAX_HEADERS, is_tunnelled};
use offcore_wire::virtio_net::{GSO_TUNNEL, NetHeader, Offloads};

use crate::script::Script;

/// Enough buffers for a burst of the longest packets and for their segments.
const CHUNKS: usize = 4096;
/// Maximum number of packets of a script.
const PACKETS: usize = 4;
/// Length of the longest frame: 64 KiB with its Ethernet header and two tags.
const LONGEST: usize = 65535 + 14 + 8;
/// Maximum number of segments of a packet.
const SEGMENTS: usize = 256;

thread_local! {
    /// Pools and a private clock's counters live as long as the process, so they are reused.
    static KEPT: RefCell<Option<(&'static Pool, StageClock, TxCounters)>> = const { RefCell::new(None) };
}

/// The outcome of a script.
#[derive(Clone, Copy, Debug, Default)]
#[allow(dead_code, reason = "a fuzz target looks at none of it")]
pub(crate) struct Outcome {
    /// Packets that were sent unchanged.
    pub(crate) whole: usize,
    /// Packets whose checksum was completed.
    pub(crate) summed: usize,
    /// Packets that were segmented.
    pub(crate) cut: usize,
    /// Segmented packets in tunnels.
    pub(crate) tunnelled: usize,
    pub(crate) dropped: usize,
}

/// A sent packet: header and bytes.
type Frame = (NetHeader, Vec<u8>);

#[derive(Debug)]
struct Sink {
    accepts: Accepts,
    sent: Vec<Frame>,
    counters: TxCounters,
}

impl TxQueue for Sink {
    fn tx(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        let pool = ctx.cache.pool();
        for packet in burst.drain(..) {
            assert!(self.accepts.takes(&packet), "{packet:?}");
            let header = match packet.has_offload() {
                true => NetHeader::from_bytes(packet.headroom_bytes(12).first_chunk().unwrap()),
                false => NetHeader::default(),
            };
            self.sent.push((header, pool.segments(&packet).flatten().copied().collect()));
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

/// Runs a script and adds its results to `outcome`.
///
/// # Panics
/// If the output is wrong.
pub(crate) fn play(script: &[u8], outcome: &mut Outcome) {
    let (pool, mut clock, counters) = KEPT.take().unwrap_or_else(|| {
        let pool = Pool::new(CHUNKS, 2048, Hugepages::None).unwrap();
        (pool, StageClock::private(), TxCounters::private())
    });
    let mut script = Script(script);
    let accepts = accepts(script.u8());
    let (mut cache, mut mover) = (pool.cache(), Mover::new());
    let frames: Vec<(Frame, u16)> = (0..1 + script.below(PACKETS)).map(|_| frame(&mut script)).collect();
    let mut send = |frames: &[(Frame, u16)]| {
        let mut sink = Sink { accepts, sent: Vec::new(), counters: counters.clone() };
        let before = counters.dropped_total();
        let mut ctx = Context { mover: &mut mover, cache: &mut cache, clock: &mut clock, burst: BURST };
        let mut burst = Burst::new();
        burst.extend(frames.iter().map(|(frame, cuts)| packet(frame, *cuts, &mut ctx)));
        fall_back(&mut sink, &mut ctx, &mut burst);
        sink.tx(&mut ctx, &mut burst);
        (sink.sent, counters.dropped_total() - before)
    };
    let (mut all, mut dropped) = (Vec::new(), 0);
    for frame in &frames {
        let (sent, drops) = send(std::slice::from_ref(frame));
        judge(&frame.0, accepts, &sent, drops, outcome);
        all.extend(sent);
        dropped += drops;
    }
    assert_eq!(send(&frames), (all, dropped), "together they become what each becomes alone");
    let chunks: Vec<Packet> = std::iter::from_fn(|| cache.take()).collect();
    assert_eq!(chunks.len(), CHUNKS, "packet buffers are missing");
    cache.free_all(chunks);
    KEPT.set(Some((pool, clock, counters)));
}

fn accepts(bits: u8) -> Accepts {
    let bit = |n: u8| bits >> n & 1 != 0;
    Accepts {
        offloads: Offloads { checksum: bit(0), tso4: bit(1), tso6: bit(2), ecn: bit(3), uso: bit(5) },
        segments: bit(4),
    }
}

/// Generates a frame, usually TCP, with its header, and the positions at which its buffers end. A port checks the
/// header when it receives a packet, so an invalid header is replaced by one without requests.
fn frame(script: &mut Script<'_>) -> (Frame, u16) {
    let (kind, len) = (script.u8(), usize::from(script.u16()));
    let mut bytes: Vec<u8> = vec![2, 0, 0, 0, 0, 9, 2, 0, 0, 0, 0, 8];
    for _ in 0..[0, 0, 0, 1, 2, 3, 0, 0][usize::from(kind >> 5)] {
        bytes.extend([0x81, 0, 0, script.u8()]);
    }
    let v6 = kind & 1 != 0;
    // The tunnel type, and whether the inner packet is UDP.
    let carrier = script.u8();
    let (udp, tunnel) = (carrier & 1 != 0, Tunnel::of(carrier));
    let protocol = if udp { 17 } else { 6 };
    let options = if udp { 0 } else { script.below(12) * 4 };
    tunnel.begin(&mut bytes, v6, carrier);
    if v6 {
        bytes.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 0, if kind & 2 != 0 { 0 } else { protocol }, 64]);
        bytes.extend([1; 32]);
        if kind & 2 != 0 {
            // A hop-by-hop header.
            let words = script.below(4);
            bytes.extend([protocol, words as u8]);
            bytes.resize(bytes.len() + 6 + words * 8, 0);
        }
    } else {
        let words = if kind & 2 != 0 { script.below(11) } else { 0 };
        bytes.extend([8, 0, 0x45 + words as u8, 0, 0, 0, script.u8(), script.u8(), 0, 0, 64, protocol, 0, 0]);
        bytes.extend([10, 7, 0, 1, 10, 7, 0, 2]);
        bytes.resize(bytes.len() + words * 4, 1);
    }
    tunnel.strip(&mut bytes);
    let tcp_at = bytes.len();
    if udp {
        bytes.extend([0, 80, 0, 90, 0, 0, script.u8(), script.u8()]);
    } else {
        bytes.extend([0, 80, 0, 90, 255, 255, script.u8(), script.u8(), 0, 0, 0, 1]);
        bytes.extend([((20 + options) << 2) as u8, script.u8(), 1, 0, 0, 0, 0, 0]);
        bytes.resize(bytes.len() + options, 1);
    }
    let hdr_len = bytes.len();
    let header = NetHeader {
        flags: u8::from(kind & 4 == 0),
        gso_type: match (kind & 8 != 0, udp) {
            (true, _) => 0,
            (false, true) => 5,
            (false, false) => [1, 4][usize::from(v6)] | if kind & 16 != 0 { 0x80 } else { 0 },
        },
        hdr_len: hdr_len as u16,
        gso_size: if script.u8() < 128 { script.u16() } else { 8 + u16::from(script.u8()) * 16 },
        csum_start: tcp_at as u16,
        csum_offset: if udp { 6 } else { 16 },
        num_buffers: 0,
    };
    let payload = if script.u8() < 64 { len } else { len % 4000 };
    bytes.extend((0..payload).map(|i| (i * 37 + i / 251) as u8));
    let cuts = script.u16();
    let mut header = header.to_bytes();
    // Arbitrary bytes at arbitrary positions of the header or the frame.
    for _ in 0..[0, 0, 0, 0, 1, 2, 4, 8][script.below(8)] {
        let (at, value) = (script.below(hdr_len + 12), script.u8());
        *if at < 12 { &mut header[at] } else { &mut bytes[at - 12] } = value;
    }
    if script.u8() < 16 {
        bytes.truncate(script.below(hdr_len + 4).max(14));
    }
    bytes.truncate(LONGEST);
    let header = NetHeader::from_bytes(&header);
    let mut header = if header.check(bytes.len()).is_ok() { header.essence() } else { NetHeader::default() };
    // An af_packet port sets the bit.
    if header.is_gso() && is_tunnelled(&header, &bytes[..bytes.len().min(MAX_HEADERS)]) {
        header.gso_type |= GSO_TUNNEL;
    }
    ((header, bytes), cuts)
}

/// A tunnel type.
#[derive(Clone, Copy, PartialEq)]
enum Tunnel {
    None,
    Vxlan,
    Geneve,
    Gre,
    IpInIp,
}

impl Tunnel {
    fn of(carrier: u8) -> Self {
        match carrier >> 4 {
            0..8 => Self::None,
            8 | 9 => Self::Vxlan,
            10 | 11 => Self::Geneve,
            12 | 13 => Self::Gre,
            _ => Self::IpInIp,
        }
    }

    /// Appends the outer headers, and the inner Ethernet header if the tunnel carries frames.
    fn begin(self, bytes: &mut Vec<u8>, v6: bool, carrier: u8) {
        let protocol = match self {
            Self::None => return,
            Self::Vxlan | Self::Geneve => 17,
            Self::Gre => 47,
            Self::IpInIp => [4, 41][usize::from(v6)],
        };
        let sum = carrier & 2;
        if carrier & 4 != 0 {
            bytes.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 0, protocol, 64]);
            bytes.extend([5; 32]);
        } else {
            bytes.extend([8, 0, 0x45, 0, 0, 0, 1, 2, 0, 0, 64, protocol, 0, 0, 10, 9, 0, 1, 10, 9, 0, 2]);
        }
        match self {
            Self::Vxlan => bytes.extend([9, 9, 0x12, 0xb5, 0, 0, sum, 0, 8, 0, 0, 0, 0, 0, 7, 0]),
            Self::Geneve => {
                bytes.extend([9, 9, 0x17, 0xc1, 0, 0, sum, 0, 2, 0, 0x65, 0x58, 0, 0, 7, 0]);
                bytes.extend([1; 8]);
            }
            Self::Gre if sum > 0 => bytes.extend([0x80, 0, 0x65, 0x58, 0, 0, 0, 0]),
            Self::Gre => bytes.extend([0, 0, 0x65, 0x58]),
            Self::IpInIp | Self::None => {}
        }
        bytes.extend([4; 12]);
    }

    /// Removes the inner Ethernet header if the tunnel carries IP packets.
    fn strip(self, bytes: &mut Vec<u8>) {
        if self == Self::IpInIp {
            let ethernet = bytes.windows(12).rposition(|window| window == [4; 12]).unwrap();
            bytes.drain(ethernet..ethernet + 14);
        }
    }
}

/// Creates a packet of these bytes. Its first buffers are short, according to `cuts`, or all its buffers are full.
fn packet(frame: &Frame, cuts: u16, ctx: &mut Context<'_>) -> Packet {
    let (header, bytes) = frame;
    let (pool, mut rest, mut parts) = (ctx.cache.pool(), &bytes[..], Vec::new());
    while !rest.is_empty() {
        let wanted = match parts.len() {
            0 if cuts & 0xff != 0 => 14.max(usize::from(cuts & 0xff)),
            1 if cuts >> 8 != 0 => usize::from(cuts >> 8),
            _ => pool.data_room(),
        };
        let (part, later) = rest.split_at(rest.len().min(wanted));
        rest = later;
        let mut packet = ctx.cache.take().expect("the pool has room");
        packet.set_range(pool, HEADROOM, part.len());
        packet.bytes_mut().copy_from_slice(part);
        parts.push(packet);
    }
    let mut packet = parts.into_iter().rev().reduce(|rest, front| pool.link(front, rest)).unwrap();
    if header.leaves_work() {
        packet.headroom_mut(12).copy_from_slice(&header.to_bytes());
        packet.set_offload(true);
    }
    packet
}

/// Checks that `sent` is the correct result for `frame`.
fn judge(frame: &Frame, accepts: Accepts, sent: &[Frame], dropped: u64, outcome: &mut Outcome) {
    let (header, bytes) = frame;
    assert!(sent.len() <= SEGMENTS, "{} packets of one", sent.len());
    assert!(dropped == 0 || sent.is_empty(), "the pool has room, so a packet goes as a whole or not at all");
    let [first, ..] = sent else {
        assert_eq!(dropped, 1, "what is not sent is counted: {header:?}");
        outcome.dropped += 1;
        return;
    };
    if first == frame && sent.len() == 1 {
        assert!(accepts.offloads.allows(header));
        outcome.whole += 1;
    } else if header.gso_type & GSO_TUNNEL != 0 {
        tunnelled_segments(frame, sent);
        outcome.tunnelled += 1;
    } else if header.is_gso() {
        segments(frame, sent);
        outcome.cut += 1;
    } else {
        let at = usize::from(header.csum_start) + usize::from(header.csum_offset);
        let mut expected = bytes.clone();
        let sum = !sum(&bytes[header.csum_start.into()..], 0);
        let sum = if sum == 0 { 0xffff } else { sum };
        expected[at..at + 2].copy_from_slice(&sum.to_be_bytes());
        assert_eq!(sent, [(NetHeader::default(), expected)], "{header:?}");
        outcome.summed += 1;
    }
}

/// Checks that `sent` is a tunnelled packet, segmented into parts of the payload with the same headers, and that the
/// outer packet and the inner checksum are correct.
fn tunnelled_segments(frame: &Frame, sent: &[Frame]) {
    let (header, bytes) = frame;
    let transport = usize::from(header.csum_start);
    let is_udp = header.gso_type & 7 == 5;
    let end = transport + if is_udp { 8 } else { usize::from(bytes[transport + 12] >> 4) * 4 };
    let (payload, size) = (&bytes[end..], usize::from(header.gso_size));
    assert_eq!(sent.len(), payload.len().div_ceil(size).max(1));
    let mut ip = 14;
    while bytes[ip - 2..ip] == [0x81, 0] || bytes[ip - 2..ip] == [0x88, 0xa8] {
        ip += 4;
    }
    for (index, (rest, segment)) in sent.iter().enumerate() {
        let from = index * size;
        assert_eq!(*rest, NetHeader::default());
        assert_eq!(segment[end..], payload[from..payload.len().min(from + size)], "segment {index}");
        assert_eq!(segment[..ip], bytes[..ip]);
        let word = |at: usize| usize::from(u16::from_be_bytes([segment[at], segment[at + 1]]));
        if bytes[ip] >> 4 == 6 {
            assert_eq!(word(ip + 4), segment.len() - ip - 40);
        } else {
            assert_eq!(word(ip + 2), segment.len() - ip);
            assert_eq!(sum(&segment[ip..ip + usize::from(segment[ip] & 15) * 4], 0), 0xffff);
        }
        // Without options or extension headers the inner addresses end where the transport header begins.
        let protocol = if is_udp { 17 } else { 6 };
        let start = protocol + (segment.len() - transport) as u32;
        let is_right = [8, 32].iter().any(|len| sum(&segment[transport - len..], start) == 0xffff);
        assert!(is_right || is_unusual(bytes, transport), "checksum of segment {index}");
    }
}

/// Whether the inner IP header has options or extension headers.
fn is_unusual(bytes: &[u8], transport: usize) -> bool {
    let v4 = bytes[transport - 20] == 0x45 && matches!(bytes[transport - 11], 6 | 17);
    let v6 = bytes[transport - 40] >> 4 == 6 && matches!(bytes[transport - 34], 6 | 17);
    v4 == v6
}

/// Checks that `sent` is the TCP or UDP packet, segmented by the `gso_size` of its header.
fn segments(frame: &Frame, sent: &[Frame]) {
    let (header, bytes) = frame;
    let mut ip = 12;
    while bytes[ip..ip + 2] == [0x81, 0] || bytes[ip..ip + 2] == [0x88, 0xa8] {
        ip += 4;
    }
    ip += 2;
    let v6 = bytes[ip] >> 4 == 6;
    let mut tcp = ip + if v6 { 40 } else { usize::from(bytes[ip] & 15) * 4 };
    let mut next = bytes[ip + if v6 { 6 } else { 9 }];
    while v6 && !matches!(next, 6 | 17) {
        (next, tcp) = (bytes[tcp], tcp + 8 + usize::from(bytes[tcp + 1]) * 8);
    }
    let is_udp = next == 17;
    let end = tcp + if is_udp { 8 } else { usize::from(bytes[tcp + 12] >> 4) * 4 };
    let (payload, size) = (&bytes[end..], usize::from(header.gso_size));
    assert_eq!(sent.len(), payload.len().div_ceil(size).max(1));
    let word = |frame: &[u8], at: usize| u16::from_be_bytes([frame[at], frame[at + 1]]);
    let seq = |frame: &[u8]| u32::from_be_bytes(std::array::from_fn(|i| frame[tcp + 4 + i]));
    for (index, (rest, segment)) in sent.iter().enumerate() {
        let from = index * size;
        assert_eq!(*rest, NetHeader::default());
        assert_eq!(segment[end..], payload[from..payload.len().min(from + size)], "segment {index}");
        assert_eq!(segment[..ip], bytes[..ip]);
        assert!(is_udp || seq(segment) == seq(bytes).wrapping_add(from as u32));
        let (len, addresses) =
            if v6 { (segment.len() - ip - 40, 8..40) } else { (segment.len() - ip, 12..20) };
        assert_eq!(usize::from(word(segment, ip + if v6 { 4 } else { 2 })), len, "IP's length");
        if !v6 {
            assert_eq!(sum(&segment[ip..tcp], 0), 0xffff, "IP's checksum");
            assert_eq!(word(segment, ip + 4), word(bytes, ip + 4).wrapping_add(index as u16));
        }
        let pseudo = sum(&segment[ip + addresses.start..ip + addresses.end], next.into());
        let found = sum(&segment[tcp..], u32::from(pseudo) + (segment.len() - tcp) as u32);
        let has_none = is_udp && !header.needs_checksum() && word(segment, tcp + 6) == 0;
        assert!(found == 0xffff || has_none, "checksum of segment {index}");
        if is_udp {
            assert_eq!(usize::from(word(segment, tcp + 4)), segment.len() - tcp);
            continue;
        }
        let mut flags = bytes[tcp + 13];
        if index + 1 < sent.len() {
            flags &= !0x09;
        }
        if index > 0 {
            flags &= !0x80;
        }
        assert_eq!(segment[tcp + 13], flags);
    }
}

/// Computes the ones' complement sum of RFC 1071 in the simplest way.
fn sum(bytes: &[u8], start: u32) -> u16 {
    let pairs = bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0)));
    let mut sum = pairs.fold(start, |sum, pair| sum + pair);
    while sum > 0xffff {
        sum = (sum >> 16) + (sum & 0xffff);
    }
    sum as u16
}

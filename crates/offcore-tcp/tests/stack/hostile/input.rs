//! Frames with arbitrary content for a TCP listener and a datagram socket. They cover headers and options of all
//! protocols that the stack parses.

use arbitrary::{Arbitrary, Unstructured};
use offcore_stats::time::{Micros, Time};
use offcore_tcp::proto::{AppId, Config, HEAD};
use offcore_wire::{
    EtherType, EthernetFrame, IpProtocol, Ipv4Packet, Ipv6Packet, MacAddr, Sum, TcpSegment, ethernet, ipv4,
    ipv6,
};

use crate::host::{Host, mac};

const SECOND: Micros = Micros::from_secs(1);
const MTU: u16 = 1500;
/// Maximum number of frames of a script.
const FRAMES: usize = 200;
/// Source and destination addresses of packets: the host's, the peer's, groups and others.
const V4: [[u8; 4]; 8] = [
    [10, 0, 0, 1],
    [10, 0, 0, 2],
    [10, 0, 0, 255],
    [255; 4],
    [224, 0, 0, 1],
    [127, 0, 0, 1],
    [0; 4],
    [192, 0, 2, 1],
];
const V6: [[u8; 16]; 8] = [
    [0x20, 1, 0x0d, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1],
    [0x20, 1, 0x0d, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2],
    [0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, 0, 0, 1],
    [0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1],
    [0; 16],
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 2],
    [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2],
    [0x20, 1, 0x0d, 0xb9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9],
];
const PROTOCOLS: [u8; 8] = [6, 1, 58, 17, 44, 0, 60, 43];

/// A frame, and the fields that are corrected in it.
#[derive(Arbitrary, Debug, Clone, Copy)]
struct Frame<'a> {
    what: What,
    station: u8,
    to: u8,
    /// The lengths are corrected if `fits` is below 200, and the checksums if `sums` is.
    fits: u8,
    sums: u8,
    wait: u8,
    body: &'a [u8],
}

#[derive(Arbitrary, Debug, Clone, Copy)]
enum What {
    Raw,
    Arp,
    /// An IPv4 header. Header words beyond the fifth come from the body.
    V4 {
        protocol: u8,
        from: u8,
        options: u8,
        fragment: u16,
    },
    V6 {
        protocol: u8,
        from: u8,
        hops: u8,
    },
    /// A segment to the listening port.
    Syn {
        v6: bool,
        from: u8,
        flags: u8,
    },
}

/// Numbers of received frames by result.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) taken: u64,
    pub(crate) answered: u64,
    pub(crate) dropped: u64,
}

impl Outcome {
    pub(crate) fn and(self, other: Self) -> Self {
        Self {
            taken: self.taken + other.taken,
            answered: self.answered + other.answered,
            dropped: self.dropped + other.dropped,
        }
    }
}

/// Passes the frames of a script to a host. Checks that its own frames are well formed, and that no state is left in
/// the end.
pub(crate) fn play(bytes: &[u8]) -> Outcome {
    let mut script = Unstructured::new(bytes);
    let config = Config { connections: 16, neighbours: 16, memory: 1 << 20, ..Config::default() };
    let mut host = Host::new(1, MTU, config);
    let before = host.stack.memory_used();
    host.listen(7, 4);
    let socket = host.stack.open_datagrams(AppId::OWN, None, 7).unwrap();
    let mut now = Time::from_secs(2);
    let mut outcome = Outcome::default();
    host.poll(now);
    for _ in 0..FRAMES {
        let Ok(frame) = Frame::arbitrary(&mut script) else { break };
        if script.is_empty() {
            break;
        }
        now += Micros::new(1 << (frame.wait % 22));
        host.poll(now);
        host.frames.clear();
        let drops = |host: &Host| host.stack.drops().iter().map(|(_, count)| count).sum::<u64>();
        let dropped = drops(&host);
        host.receive(now, &mut [frame.bytes()]);
        let dropped = drops(&host) - dropped;
        outcome.dropped += dropped;
        outcome.taken += 1 - dropped;
        host.poll(now);
        outcome.answered += u64::from(!host.frames.is_empty());
        host.frames.iter().for_each(|frame| check(frame));
    }
    for _ in 0..200 {
        now += SECOND;
        host.poll(now);
    }
    host.frames.iter().for_each(|frame| check(frame));
    for conn in std::mem::take(&mut host.accepted) {
        host.release(now, conn);
    }
    host.release(now, socket);
    for _ in 0..2000 {
        now += 2 * SECOND;
        host.poll(now);
    }
    assert_eq!((host.stack.connections(), host.stack.flows()), (0, 0));
    assert_eq!(host.stack.memory_used(), before);
    outcome
}

impl Frame<'_> {
    fn bytes(&self) -> Vec<u8> {
        let mut frame = vec![0; ethernet::HEADER_LEN];
        let station = match self.station {
            0..160 => mac(1),
            160..200 => MacAddr::BROADCAST,
            _ => MacAddr([0x33, 0x33, 0xff, 0, 0, 1]),
        };
        let ethertype = match self.what {
            What::Raw => return self.body.to_vec(),
            What::Arp => EtherType::ARP,
            What::V6 { .. } | What::Syn { v6: true, .. } => EtherType::IPV6,
            What::V4 { .. } | What::Syn { .. } => EtherType::IPV4,
        };
        ethernet::write_header(frame.first_chunk_mut().unwrap(), station, mac(2), ethertype);
        match self.what {
            What::Raw => {}
            What::Arp => frame.extend_from_slice(&[0, 1, 8, 0, 6, 4, 0]),
            What::V4 { protocol, from, options, fragment } => {
                let protocol = pick(&PROTOCOLS, protocol, 1);
                let options = options.saturating_sub(240);
                let fragment = if fragment < 0xf000 { 0x4000 } else { fragment };
                let head = [0x45 + options, 0, 0, 28, 0, 1, (fragment >> 8) as u8, fragment as u8, 64];
                frame.extend_from_slice(&head);
                frame.extend_from_slice(&[protocol, 0, 0]);
                frame.extend_from_slice(&pick(&V4, from, 1));
                frame.extend_from_slice(&pick(&V4, self.to, 0));
            }
            What::V6 { protocol, from, hops } => {
                let protocol = pick(&PROTOCOLS, protocol, 2);
                let hops = if hops < 128 { 255 } else { hops };
                frame.extend_from_slice(&[0x60, 0, 0, 0, 0, 8, protocol, hops]);
                frame.extend_from_slice(&pick(&V6, from, 1));
                frame.extend_from_slice(&pick(&V6, self.to, 0));
            }
            What::Syn { v6, from, flags } => {
                if v6 {
                    frame.extend_from_slice(&[0x60, 0, 0, 0, 0, 20, 6, 64]);
                    frame.extend_from_slice(&V6[1]);
                    frame.extend_from_slice(&V6[0]);
                } else {
                    frame.extend_from_slice(&[0x45, 0, 0, 40, 0, 1, 0x40, 0, 64, 6, 0, 0]);
                    frame.extend_from_slice(&V4[1]);
                    frame.extend_from_slice(&V4[0]);
                }
                let flags = if flags < 128 { 2 } else { flags };
                let words = (5 + self.body.len() / 4).min(15) as u8;
                frame.extend_from_slice(&[156, from, 0, 7, 0, 0, 0, 1, 0, 0, 0, 1]);
                frame.extend_from_slice(&[words << 4, flags, 255, 255, 0, 0, 0, 0]);
            }
        }
        frame.extend_from_slice(self.body);
        if self.fits < 200 {
            fit(&mut frame);
        }
        if self.sums < 200 {
            sum_up(&mut frame);
        }
        frame
    }
}

/// Returns the usual value for small numbers, and any value of the table otherwise.
fn pick<T: Copy>(table: &[T; 8], number: u8, usual: usize) -> T {
    if number < 128 { table[usual] } else { table[usize::from(number % 8)] }
}

/// Corrects the length in the IP header.
fn fit(frame: &mut [u8]) {
    let len = frame.len() - ethernet::HEADER_LEN;
    let (at, len) = match frame[12..14] {
        [8, 0] => (16, len),
        [0x86, 0xdd] => (18, len - ipv6::HEADER_LEN),
        _ => return,
    };
    frame[at..at + 2].copy_from_slice(&(len as u16).to_be_bytes());
}

/// Returns the protocol, the beginning, the end and the pseudo header sum of the transport header in an IP packet.
fn transport(frame: &[u8]) -> Option<(IpProtocol, usize, usize, Sum)> {
    let link = EthernetFrame::new_checked(frame).ok()?;
    if link.ethertype() == EtherType::IPV4 {
        let ip = Ipv4Packet::new_checked(link.payload()).ok()?;
        let at = ethernet::HEADER_LEN + ip.header_len();
        let len = ip.payload().len();
        Some((ip.protocol(), at, at + len, Sum::pseudo_v4(ip.src(), ip.dst(), ip.protocol(), len as u16)))
    } else if link.ethertype() == EtherType::IPV6 {
        let ip = Ipv6Packet::new_checked(link.payload()).ok()?;
        let transport = ip.transport().ok()?;
        let len = transport.payload.len();
        let at = ethernet::HEADER_LEN + ipv6::HEADER_LEN + ip.payload().len() - len;
        let pseudo = Sum::pseudo_v6(ip.src(), ip.dst(), transport.protocol, len as u32);
        Some((transport.protocol, at, at + len, pseudo))
    } else {
        None
    }
}

/// Corrects the checksums of protocols that have one.
fn sum_up(frame: &mut [u8]) {
    if frame[12..14] == [8, 0] {
        let end = ethernet::HEADER_LEN + usize::from(frame[14] & 15) * 4;
        if frame.len() >= end && end >= ethernet::HEADER_LEN + ipv4::HEADER_LEN {
            frame[24..26].fill(0);
            let sum = Sum::of(&frame[ethernet::HEADER_LEN..end]).checksum();
            frame[24..26].copy_from_slice(&sum.to_be_bytes());
        }
    }
    let Some((protocol, at, end, pseudo)) = transport(frame) else { return };
    let (field, pseudo) = match protocol {
        IpProtocol::TCP => (at + 16, pseudo),
        IpProtocol::UDP => (at + 6, pseudo),
        IpProtocol::ICMP => (at + 2, Sum::ZERO),
        IpProtocol::ICMPV6 => (at + 2, pseudo),
        _ => return,
    };
    if end >= field + 2 {
        frame[field..field + 2].fill(0);
        let sum = (pseudo + Sum::of(&frame[at..end])).checksum();
        frame[field..field + 2].copy_from_slice(&sum.to_be_bytes());
    }
}

/// Checks that a frame of the host is valid.
fn check(frame: &[u8]) {
    assert!(frame.len() <= ethernet::HEADER_LEN + usize::from(MTU).max(HEAD), "{} bytes", frame.len());
    let link = EthernetFrame::new_checked(frame).unwrap();
    assert_eq!(link.src(), mac(1));
    if link.ethertype() == EtherType::ARP {
        return;
    }
    if link.ethertype() == EtherType::IPV4 {
        assert!(Ipv4Packet::new_checked(link.payload()).unwrap().verify_checksum());
    }
    let (protocol, at, end, pseudo) = transport(frame).expect("a packet of IP");
    let pseudo = if protocol == IpProtocol::ICMP { Sum::ZERO } else { pseudo };
    assert!((pseudo + Sum::of(&frame[at..end])).is_valid(), "a wrong checksum");
    if protocol == IpProtocol::TCP {
        TcpSegment::new_checked(&frame[at..end]).unwrap();
    }
}

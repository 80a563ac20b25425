//! Numbered frames through `offcore gpu` between veth pairs, checked byte by byte at the output.
//!
//! ```text
//! there: w0 ── p0 :here, offcore: p1 ── w1 :there
//! ```

use std::time::{Duration, Instant};

use peers::{Netns, Offcore, Wire};

use crate::switch::quiet;

/// Length of the Ethernet, IPv4 and UDP headers in bytes.
pub(super) const HEADERS: usize = 42;
/// Number of frame lengths: 60 to 1514 bytes without FCS.
const LENGTHS: u32 = 1455;
/// Length of the MAC addresses, and offset of the EtherType.
const ADDRESSES: usize = 12;
const TIMEOUT: Duration = Duration::from_secs(10);
/// Start of the payload; stream and number follow.
const MAGIC: &[u8] = b"OFGP";

/// Two namespaces with veth pairs between them: `p0`, `p1`, ... in the namespace of `offcore`, and `w0`, `w1`, ... in
/// the other.
pub(super) struct Network {
    pub(super) here: Netns,
    there: Netns,
    /// The lcores of the program under test.
    pub(super) lcores: String,
    pairs: usize,
}

impl Network {
    /// Creates `pairs` pairs with `queues` queues each, for a program on these lcores.
    pub(super) fn new(lcores: impl ToString, pairs: usize, queues: usize) -> Self {
        let netns = || Netns::new().unwrap();
        let network = Self { here: netns(), there: netns(), lcores: lcores.to_string(), pairs };
        let Self { here, there, .. } = &network;
        for netns in [here, there] {
            quiet(netns);
        }
        let queues = queues.to_string();
        let several = ["numtxqueues", queues.as_str(), "numrxqueues", queues.as_str()];
        for pair in 0..pairs {
            let [port, wire] = ["p", "w"].map(|end| format!("{end}{pair}"));
            let make = [&["link", "add", &port][..], &several, &["type", "veth", "peer", "name", &wire]];
            let make = [&make.concat()[..], &["netns", there.name()], &several].concat();
            here.ip(&make).unwrap();
            there.ip(&["link", "set", &wire, "up"]).unwrap();
            here.ip(&["link", "set", &port, "up"]).unwrap();
        }
        network
    }

    /// Opens the far ends of the pairs.
    pub(super) fn wires(&self) -> Vec<Wire> {
        (0..self.pairs).map(|pair| Wire::open(&self.there, &format!("w{pair}")).unwrap()).collect()
    }
}

/// Returns a pseudo-random number from a seed.
pub(super) fn mix(number: u64) -> u64 {
    let mixed = number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}

/// Returns reproducible pseudo-random bytes.
pub(super) fn noise(seed: u64) -> impl Iterator<Item = u8> {
    (0..).flat_map(move |word: u64| mix(seed ^ word << 40).to_le_bytes())
}

/// Computes the Internet checksum as defined in RFC 1071.
pub(super) fn checksum(bytes: &[u8]) -> u16 {
    let word = |pair: &[u8]| u64::from(pair[0]) << 8 | u64::from(pair.get(1).copied().unwrap_or(0));
    let mut sum: u64 = bytes.chunks(2).map(word).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// Builds a frame with Ethernet, IPv4 and UDP headers in front of a payload.
pub(super) fn udp_frame(addresses: u64, source_port: u16, tos: u8, payload: &[u8]) -> Vec<u8> {
    let mut frame = Vec::with_capacity(HEADERS + payload.len());
    let address = mix(addresses).to_be_bytes();
    frame.extend([&[0x02][..], &address[..5], &[0x06], &address[3..]].concat());
    frame.extend([8, 0]);
    let [ip_len, udp_len] = [28, 8].map(|header| (header + payload.len() as u16).to_be_bytes());
    let mut ip = [0x45, tos, ip_len[0], ip_len[1], 0, 0, 0x40, 0, 64, 17, 0, 0, 198, 18, 0, 1, 198, 18, 0, 2];
    let sum = checksum(&ip).to_be_bytes();
    ip[10..12].copy_from_slice(&sum);
    frame.extend(ip);
    frame.extend([&source_port.to_be_bytes()[..], &[0, 9], &udp_len, &[0, 0], payload].concat());
    frame
}

/// Swaps a frame's addresses.
pub(super) fn swapped(mut frame: Vec<u8>) -> Vec<u8> {
    frame[..ADDRESSES].rotate_left(ADDRESSES / 2);
    frame
}

/// A stream of frames from one wire to another.
pub(super) struct Stream {
    number: u16,
    from: usize,
    to: usize,
    /// Number of flows. The frames of each flow keep their order.
    flows: u32,
    /// Whether the MAC addresses are swapped.
    swaps: bool,
    pub(super) sent: u32,
    pub(super) received: u32,
    /// The next expected frame of each flow.
    next: Vec<u32>,
}

impl Stream {
    /// Creates a stream of one flow with swapped addresses.
    pub(super) fn new(number: u16, from: usize, to: usize) -> Self {
        Self { number, from, to, flows: 1, swaps: true, sent: 0, received: 0, next: vec![0] }
    }

    pub(super) fn of_flows(self, flows: u32) -> Self {
        Self { flows, next: (0..flows).collect(), ..self }
    }

    pub(super) fn that_swaps(self, swaps: bool) -> Self {
        Self { swaps, ..self }
    }

    /// Returns the frame with this number. Each 1455 consecutive frames have every length. Without several flows, one
    /// frame in five is not IP.
    fn frame(&self, number: u32) -> Vec<u8> {
        let len = HEADERS + 18 + (number % LENGTHS * 677 % LENGTHS) as usize;
        let seed = u64::from(self.number) << 32 | u64::from(number);
        let said = [MAGIC, &self.number.to_le_bytes(), &number.to_le_bytes()].concat();
        let payload: Vec<u8> = said.into_iter().chain(noise(!seed)).take(len - HEADERS).collect();
        let mut frame = udp_frame(seed, 1000 + (number % self.flows) as u16, 0, &payload);
        if self.flows == 1 && number % 5 == 3 {
            frame[ADDRESSES..ADDRESSES + 2].copy_from_slice(&[0x88, 0xb5]);
        }
        frame
    }

    /// Sends up to this many frames, with at most `window` in flight.
    pub(super) fn send(&mut self, wires: &[Wire], packets: u32, window: u32) {
        for _ in 0..packets.min(window - (self.sent - self.received)) {
            wires[self.from].send(&self.frame(self.sent)).unwrap();
            self.sent += 1;
        }
    }

    /// Checks a frame of this stream.
    fn take(&mut self, wire: usize, number: u32, frame: &[u8]) {
        assert_eq!(wire, self.to, "frame {number} of stream {} came out elsewhere", self.number);
        let next = &mut self.next[(number % self.flows) as usize];
        assert_eq!(number, *next, "stream {}: not the frame that was to come", self.number);
        *next += self.flows;
        let sent = self.frame(number);
        let expected = if self.swaps { swapped(sent) } else { sent };
        let differs = expected.iter().zip(frame).position(|(expected, found)| expected != found);
        assert_eq!(
            (frame.len(), differs),
            (expected.len(), None),
            "stream {}, frame {number}: length and first byte that differs; found {:02x?}, expected {:02x?}",
            self.number,
            &frame[..frame.len().min(64)],
            &expected[..expected.len().min(64)],
        );
        self.received += 1;
    }
}

/// Receives and checks every frame that has arrived. Returns their number.
pub(super) fn receive(wires: &mut [Wire], streams: &mut [Stream]) -> u32 {
    let mut received = 0;
    for (index, wire) in wires.iter_mut().enumerate() {
        while let Some(frame) = wire.receive().unwrap() {
            let (stream, number) = said(frame).unwrap_or_else(|| panic!("wire {index}: {frame:02x?} came"));
            let stream = streams.iter_mut().find(|candidate| candidate.number == stream).unwrap();
            stream.take(index, number, frame);
            received += 1;
        }
    }
    received
}

/// Returns the stream and number of a frame.
fn said(frame: &[u8]) -> Option<(u16, u32)> {
    let (stream, rest) = frame.get(HEADERS..)?.strip_prefix(MAGIC)?.split_first_chunk()?;
    Some((u16::from_le_bytes(*stream), u32::from_le_bytes(*rest.first_chunk()?)))
}

/// Sends frames of each stream, with at most `window` of each in flight, and receives all of them. The last ones must
/// arrive without further frames.
pub(super) fn exchange(
    wires: &mut [Wire],
    streams: &mut [Stream],
    packets: u32,
    window: u32,
    offcore: &Offcore,
) {
    let mut moved = Instant::now();
    let all: Vec<u32> = streams.iter().map(|stream| stream.sent + packets).collect();
    while streams.iter().zip(&all).any(|(stream, all)| stream.received < *all) {
        for (stream, all) in streams.iter_mut().zip(&all) {
            // A few at a time, to keep the kernel's queues between interfaces short.
            stream.send(wires, (all - stream.sent).min(16), window);
        }
        if receive(wires, streams) > 0 {
            moved = Instant::now();
        } else {
            let counts = || streams.iter().map(|s| (s.sent, s.received)).collect::<Vec<_>>();
            let tail = || offcore.tail();
            assert!(moved.elapsed() < TIMEOUT, "sent and received for 10 s: {:?}\n{}", counts(), tail());
            let room = streams
                .iter()
                .zip(&all)
                .any(|(stream, all)| stream.sent < *all && stream.sent - stream.received < window);
            Wire::wait(wires, if room { 0 } else { 20 }).unwrap();
        }
    }
}

//! A stack with one interface. Tests pass frames to it and read the frames that it sends, with their times.

use std::net::IpAddr;

use offcore_stats::time::{Micros, Time};
use offcore_tcp::proto::{
    Config, ConnId, HEAD, IfaceConfig, Out, Prefix, Route, RxChecksum, RxSeg, Stack, Verdict,
};
use offcore_wire::{
    Arp, ArpOperation, EtherType, IpProtocol, Ipv4Header, Ipv6Header, MacAddr, NeighborSolicit, Sum, arp,
    ethernet, ipv6,
};

pub(crate) const OWN_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 1]);
pub(crate) const PEER_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 2]);

/// The host under test.
pub(crate) struct Station {
    pub(crate) stack: Stack,
    pub(crate) out: Out,
    pub(crate) now: Time,
    /// Sent frames with their times.
    pub(crate) sent: Vec<(Time, Vec<u8>)>,
}

pub(crate) fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

pub(crate) fn prefix(text: &str) -> Prefix {
    let (address, len) = text.split_once('/').unwrap();
    Prefix { address: address.parse().unwrap(), len: len.parse().unwrap() }
}

impl Station {
    pub(crate) fn new(addresses: &[&str], routes: &[Route]) -> Self {
        let stack = Stack::new(Config { secret: [7; 16], memory: 4 << 20, ..Config::default() }).unwrap();
        let mut station = Self { stack, out: Out::default(), now: Time::from_micros(1), sent: Vec::new() };
        let addresses = addresses.iter().map(|text| prefix(text)).collect();
        let config = IfaceConfig { mac: OWN_MAC, mtu: 1500, addresses, routes: routes.to_vec() };
        station.stack.add_iface(Time::from_micros(1), &config, &mut station.out);
        station.take_out();
        station
    }

    /// Advances the time to `now`.
    pub(crate) fn run_to(&mut self, now: Time) {
        loop {
            self.stack.timers(self.now, &mut self.out);
            self.take_out();
            match self.stack.deadline(self.now).map(|due| due.max(self.now + Micros::new(1))) {
                Some(due) if due <= now => self.now = due,
                _ => break,
            }
        }
        self.now = now;
    }

    /// Closes a socket.
    pub(crate) fn close(&mut self, socket: ConnId) {
        self.stack.close(self.now, socket, &mut self.out);
        self.take_out();
    }

    pub(crate) fn receive(&mut self, frame: &[u8]) -> Verdict {
        self.receive_by(0, frame)
    }

    pub(crate) fn receive_by(&mut self, iface: u8, frame: &[u8]) -> Verdict {
        let mut frame = frame.to_vec();
        let len = frame.len();
        let end = offcore_tcp::proto::sum_end(&frame[..len.min(HEAD)], len);
        let checksum = RxChecksum::Unknown { rest: frame.get(HEAD..end).map_or(Sum::ZERO, Sum::of) };
        let packet = RxSeg { head: &mut frame, len: len as u32, checksum };
        self.stack.rx(self.now, iface, &mut [packet], &mut self.out);
        let verdict = self.out.verdicts.pop().unwrap();
        if verdict == Verdict::Reply {
            self.sent.push((self.now, frame));
        }
        self.take_out();
        verdict
    }

    pub(crate) fn take_out(&mut self) {
        let controls = self.out.controls.drain(..);
        self.sent.extend(controls.map(|control| (self.now, control.bytes().to_vec())));
        self.sent.extend(self.out.messages.drain(..).map(|message| (self.now, message.bytes)));
    }

    /// Takes the frames that were sent since the last call.
    pub(crate) fn frames(&mut self) -> Vec<Vec<u8>> {
        self.sent.drain(..).map(|(_, frame)| frame).collect()
    }

    /// Answers all sent ARP requests and returns the requested addresses.
    pub(crate) fn answer_arp(&mut self) -> Vec<IpAddr> {
        let questions: Vec<Arp> = self.sent.iter().filter_map(|(_, frame)| arp_in(frame)).collect();
        self.sent.retain(|(_, frame)| arp_in(frame).is_none());
        let asked = questions.iter().filter(|question| question.operation == ArpOperation::Request);
        let asked: Vec<Arp> =
            asked.filter(|question| question.sender_ip != question.target_ip).copied().collect();
        for question in &asked {
            let answer = Arp {
                operation: ArpOperation::Reply,
                sender_mac: PEER_MAC,
                sender_ip: question.target_ip,
                target_mac: OWN_MAC,
                target_ip: question.sender_ip,
            };
            self.receive(&arp_frame(OWN_MAC, &answer));
        }
        asked.iter().map(|question| question.target_ip.into()).collect()
    }
}

/// Returns a frame with an IP packet from the peer's station to the host.
pub(crate) fn packet(src: &str, dst: &str, protocol: u8, hops: u8, payload: &[u8]) -> Vec<u8> {
    let protocol = IpProtocol(protocol);
    let to = match address(dst) {
        IpAddr::V6(dst) if dst.is_multicast() => ipv6::multicast_mac(dst),
        IpAddr::V4(dst) if dst.is_broadcast() => MacAddr([0xff; 6]),
        _ => OWN_MAC,
    };
    let (ethertype, header) = match (address(src), address(dst)) {
        (IpAddr::V6(src), IpAddr::V6(dst)) => {
            let header = Ipv6Header {
                src,
                dst,
                next_header: protocol,
                traffic_class: 0,
                flow_label: 0,
                hop_limit: hops,
                payload_len: payload.len() as u16,
            };
            let mut bytes = [0; 40];
            header.write(&mut bytes);
            (EtherType::IPV6, bytes.to_vec())
        }
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            let header = Ipv4Header {
                src,
                dst,
                protocol,
                dscp_ecn: 0,
                ident: 0x1234,
                dont_fragment: true,
                ttl: hops,
                total_len: 20 + payload.len() as u16,
            };
            let mut bytes = [0; 20];
            header.write(&mut bytes);
            (EtherType::IPV4, bytes.to_vec())
        }
        _ => panic!("{src} and {dst} are of two families"),
    };
    let mut link = [0; ethernet::HEADER_LEN];
    ethernet::write_header(&mut link, to, PEER_MAC, ethertype);
    [&link[..], &header, payload].concat()
}

/// Adds the peer's station with these addresses to the neighbour cache.
pub(crate) fn introduce(station: &mut Station, peers: &[&str]) {
    for peer in peers {
        let own = if peer.contains(':') { "2001:db8::2" } else { "10.0.0.2" };
        match (address(peer), address(own)) {
            (IpAddr::V4(peer), IpAddr::V4(own)) => {
                let question = Arp {
                    operation: ArpOperation::Request,
                    sender_mac: PEER_MAC,
                    sender_ip: peer,
                    target_mac: MacAddr([0; 6]),
                    target_ip: own,
                };
                station.receive(&arp_frame(MacAddr([0xff; 6]), &question));
            }
            (IpAddr::V6(src), IpAddr::V6(target)) => {
                let question = NeighborSolicit { target, source_link: Some(PEER_MAC) };
                let dst = ipv6::solicited_node(target);
                let mut message = [0; 32];
                let len = question.write(&mut message, src, dst);
                let [src, dst] = [src, dst].map(|address| address.to_string());
                station.receive(&packet(&src, &dst, 58, 255, &message[..len]));
            }
            _ => {}
        }
    }
    station.sent.clear();
}

pub(crate) fn arp_in(frame: &[u8]) -> Option<Arp> {
    let is_arp = frame.get(12..14)? == EtherType::ARP.0.to_be_bytes();
    is_arp.then(|| Arp::parse(&frame[ethernet::HEADER_LEN..]).ok())?
}

pub(crate) fn arp_frame(to: MacAddr, message: &Arp) -> Vec<u8> {
    let mut frame = vec![0; ethernet::HEADER_LEN + arp::LEN];
    ethernet::write_header(frame.first_chunk_mut().unwrap(), to, message.sender_mac, EtherType::ARP);
    message.write(frame[ethernet::HEADER_LEN..].first_chunk_mut().unwrap());
    frame
}

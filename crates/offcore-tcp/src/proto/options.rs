//! Options of a connection, or of a listener for its connections, as sockets have them.

use std::net::IpAddr;

use super::output;
use super::recovery::Algorithm;

/// How long FIN-WAIT-2 may last at most (as Linux).
const FIN_TIMEOUT_MAX: u64 = 120_000_000;

/// Options of a connection. The default is the stack's configuration.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ConnOptions {
    /// Differentiated services of its packets (`IP_TOS`, `IPV6_TCLASS`). The two bits of ECN are the stack's.
    pub traffic_class: u8,
    /// Hops that its packets may make (`IP_TTL`, `IPV6_UNICAST_HOPS`).
    pub hops: Option<u8>,
    /// Bytes of payload of a segment at most, and what the SYN says of it (`TCP_MAXSEG`). It counts before the handshake.
    pub segment: Option<u16>,
    pub algorithm: Option<Algorithm>,
    /// Microseconds of FIN-WAIT-2 after the application has let go (`TCP_LINGER2`).
    pub fin_timeout: Option<u64>,
    /// Of a listener: answers to a SYN before a connection without data is told of (`TCP_DEFER_ACCEPT`).
    pub defer: u8,
}

impl ConnOptions {
    /// The traffic class without the bits of ECN.
    pub(super) fn services(&self) -> u8 {
        self.traffic_class & !3
    }

    /// The MTU, reduced to what `segment` allows.
    pub(super) fn mtu(&self, mtu: u16, to: IpAddr) -> u16 {
        let headers = u16::MAX - output::payload_of(u16::MAX, to, false);
        self.segment.map_or(mtu, |segment| mtu.min(segment.saturating_add(headers)))
    }

    pub(super) fn fin_timeout(&self, usual: u64) -> u64 {
        self.fin_timeout.map_or(usual, |timeout| timeout.min(FIN_TIMEOUT_MAX))
    }
}

//! Socket options of a connection, or of a listener for its connections.

use std::net::IpAddr;

use offcore_stats::time::Micros;

use super::output;
use super::recovery::Algorithm;

/// Maximum duration of FIN-WAIT-2 (as on Linux).
const FIN_TIMEOUT_MAX: Micros = Micros::from_secs(120);

/// Options of a connection. The default is the stack's configuration.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ConnOptions {
    /// Traffic class of its packets (`IP_TOS`, `IPV6_TCLASS`). The stack sets the two ECN bits.
    pub traffic_class: u8,
    /// TTL or hop limit of its packets (`IP_TTL`, `IPV6_UNICAST_HOPS`).
    pub hops: Option<u8>,
    /// Limit of a segment's payload, and of the MSS option of the SYN (`TCP_MAXSEG`). It has no effect after the
    /// handshake.
    pub segment: Option<u16>,
    pub algorithm: Option<Algorithm>,
    /// Limit of the payload bytes sent per second (`SO_MAX_PACING_RATE`).
    pub pacing_rate: Option<u64>,
    /// Duration of FIN-WAIT-2 after the application has closed the connection (`TCP_LINGER2`).
    pub fin_timeout: Option<Micros>,
    /// For a listener: number of SYN-ACKs before a connection without data is reported (`TCP_DEFER_ACCEPT`).
    pub defer: u8,
}

impl ConnOptions {
    /// Returns the traffic class without the ECN bits.
    pub(super) fn services(&self) -> u8 {
        self.traffic_class & !3
    }

    /// Returns the MTU, reduced to the limit of `segment`.
    pub(super) fn mtu(&self, mtu: u16, to: IpAddr) -> u16 {
        let headers = u16::MAX - output::payload_of(u16::MAX, to, false);
        self.segment.map_or(mtu, |segment| mtu.min(segment.saturating_add(headers)))
    }

    pub(super) fn fin_timeout(&self, usual: Micros) -> Micros {
        self.fin_timeout.map_or(usual, |timeout| timeout.min(FIN_TIMEOUT_MAX))
    }
}

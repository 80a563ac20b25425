//! Unpredictable initial values: sequence numbers (RFC 6528), timestamps (RFC 7323, 5.4), and identifications of
//! fragmented packets (RFC 7739).

use std::net::Ipv4Addr;

use offcore_stats::time::Time;

use super::addr::FlowKey;
use super::siphash::{FlowMac, Purpose};

/// Microseconds per step of the clock `M` (RFC 9293, 3.4.1).
const STEP_US: u64 = 4;
/// Bits of a flow label.
const FLOW_LABEL: u32 = 0x000f_ffff;

/// Generates unpredictable initial values.
#[derive(Clone, Debug)]
pub(super) struct Origins {
    isn: FlowMac,
    timestamp: FlowMac,
    fragment: FlowMac,
    flow_label: FlowMac,
}

impl Origins {
    /// Creates a generator with this secret.
    pub(super) fn new(secret: &[u8; 16]) -> Self {
        let new = |purpose| FlowMac::new(secret, purpose);
        Self {
            isn: new(Purpose::Isn),
            timestamp: new(Purpose::Timestamp),
            fragment: new(Purpose::Fragment),
            flow_label: new(Purpose::FlowLabel),
        }
    }

    /// Returns the initial sequence number of a connection opened at `now`: ISN = M + F(flow, secret) (RFC 6528, 3).
    ///
    /// It grows between two incarnations of a connection, by one every 4 µs. An incarnation that sent faster than 250
    /// KB/s may have exceeded it: see [`super::timewait::Action::Reopen`].
    #[inline]
    pub(super) fn isn(&self, flow: &FlowKey, now: Time) -> u32 {
        ((now.as_micros() / STEP_US) as u32).wrapping_add(self.isn.mac(flow, 0) as u32)
    }

    /// Returns the identification of the fragmented packet with this number.
    pub(super) fn ident(&self, number: u64) -> u32 {
        let nobody = FlowKey::v4(Ipv4Addr::UNSPECIFIED, 0, Ipv4Addr::UNSPECIFIED, 0);
        self.fragment.mac(&nobody, number.into()) as u32
    }

    /// Returns the flow label of an IPv6 flow, never 0: routers use it to spread flows over equal paths (RFC 6437, 3).
    /// Returns 0 for IPv4.
    #[inline]
    pub(super) fn flow_label(&self, flow: &FlowKey) -> u32 {
        if flow.is_v4() { 0 } else { (self.flow_label.mac(flow, 0) as u32 & FLOW_LABEL).max(1) }
    }

    /// Returns the offset that is added to the timestamp clock towards a host.
    ///
    /// It does not depend on the ports: the timestamps of successive connections between two hosts continue to grow, as
    /// reopening a connection in TIME-WAIT requires (RFC 6191).
    #[inline]
    pub(super) fn timestamp_offset(&self, flow: &FlowKey) -> u32 {
        self.timestamp.mac(&flow.with_ports(0, 0), 0) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flow(host: u8, port: u16) -> FlowKey {
        FlowKey::v4(Ipv4Addr::new(10, 0, 0, 1), 80, Ipv4Addr::new(10, 0, 0, host), port)
    }

    #[test]
    fn isn_depends_on_four_tuple() {
        let origins = Origins::new(&[3; 16]);
        let base = origins.isn(&flow(2, 4000), Time::ZERO);
        assert_eq!(origins.isn(&flow(2, 4000), Time::from_micros(4_000_003)).wrapping_sub(base), 1_000_000);
        assert_ne!(origins.isn(&flow(2, 4001), Time::ZERO), base);
        assert_ne!(Origins::new(&[4; 16]).isn(&flow(2, 4000), Time::ZERO), base);
        // The clock wraps every 4.77 hours, and so does the number.
        assert_eq!(origins.isn(&flow(2, 4000), Time::from_micros(4 << 32)), base);
    }

    #[test]
    fn ipv6_flow_has_label() {
        let origins = Origins::new(&[3; 16]);
        let flow = |port| {
            FlowKey::new(
                "[fd00::1]:80".parse().unwrap(),
                std::net::SocketAddr::new([0xfd00, 0, 0, 0, 0, 0, 0, 2].into(), port),
            )
            .unwrap()
        };
        let label = |port| origins.flow_label(&flow(port));
        assert_eq!(label(1), label(1));
        assert_ne!(label(1), label(2));
        assert!((1..1000).all(|port| (1..1 << 20).contains(&label(port))));
        assert_eq!(origins.flow_label(&self::flow(2, 1)), 0);
    }

    #[test]
    fn timestamp_offset_is_per_host() {
        let origins = Origins::new(&[3; 16]);
        assert_eq!(origins.timestamp_offset(&flow(2, 1)), origins.timestamp_offset(&flow(2, 2)));
        assert_ne!(origins.timestamp_offset(&flow(2, 1)), origins.timestamp_offset(&flow(3, 1)));
    }
}

//! Columns of `offcore bench tcp`.

use serde::Serialize;

use crate::report::sample::{Bounds, SumRatio};

/// Traffic of the connections and its cost, compared with the kernel's TCP.
#[derive(Clone, Debug, Default, Serialize)]
pub struct TcpColumns {
    /// Bytes per write of an application.
    pub chunk: Option<usize>,
    /// Number of connections that take turns.
    pub connections: Option<usize>,
    /// Case idle: number of additional idle connections.
    pub idle_connections: Option<usize>,
    #[serde(flatten)]
    pub beside: BesideRatio,
    /// Over paths: rate, round-trip time, loss and reordering.
    pub path: Option<String>,
    /// Over veth: whether ports and kernel use segmentation and checksum offloads.
    pub offloads: Option<bool>,
    #[serde(flatten)]
    pub per_kib: CostPerKib,
    #[serde(flatten)]
    pub per_request: CostPerRequest,
    #[serde(flatten)]
    pub payload: Payload,
}

/// Speed beside idle connections or a neighbour, relative to the speed without them.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct BesideRatio {
    /// Ratio of sums of what alternated.
    pub beside_over_alone: Option<f64>,
    /// Median of the ratios of paired blocks.
    pub beside_over_alone_median: Option<f64>,
    /// Lower bound of the ratio of sums by bootstrap, and not above the ratio of either half of the blocks.
    pub beside_over_alone_lower: Option<f64>,
}

impl BesideRatio {
    pub(crate) fn new(ratio: Option<SumRatio>, bounds: Option<Bounds>) -> Self {
        Self {
            beside_over_alone: ratio.map(|ratio| ratio.sums),
            beside_over_alone_median: ratio.map(|ratio| ratio.median),
            beside_over_alone_lower: bounds.map(|bounds| bounds.lower),
        }
    }
}

/// Over veth: busy time of cores in nanoseconds per 1024 bytes. A `peer` field is the same with the kernel as the peer.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct CostPerKib {
    /// The host's core.
    pub ns_per_kib: Option<f64>,
    pub peer_ns_per_kib: Option<f64>,
    /// The core of the other end.
    pub far_ns_per_kib: Option<f64>,
    pub peer_far_ns_per_kib: Option<f64>,
    /// Both cores. This is the decisive figure, because a kernel processes received packets on the transmitting core.
    pub both_ns_per_kib: Option<f64>,
    pub peer_both_ns_per_kib: Option<f64>,
}

/// HTTP: CPU time in microseconds per request. A `peer` field is the same with the kernel's stack.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct CostPerRequest {
    /// The server's processes.
    pub server_us_per_request: Option<f64>,
    pub peer_server_us_per_request: Option<f64>,
    /// Server and client together.
    pub both_us_per_request: Option<f64>,
    pub peer_both_us_per_request: Option<f64>,
}

/// Payload, and the other end that sends or receives it.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Payload {
    /// Over veth: busy share of the other end's core; HTTP: the share that wrk uses. The `peer` field is the same with
    /// the kernel as the peer.
    pub far_busy: Option<f64>,
    pub peer_far_busy: Option<f64>,
    /// Gbit/s of payload, for the measured core alone; over veth, end to end.
    pub payload_gbps: Option<f64>,
    /// Mean payload of a segment in bytes. `frame` is the length of a full segment.
    pub payload_per_packet: Option<f64>,
    /// Windows that were discarded and repeated because segments were retransmitted or dropped in them.
    pub windows_again: Option<u64>,
}

//! Columns that compare with a peer or with a capacity.

use serde::Serialize;

use crate::report::sample::{Spread, paired_ratio};

/// Load of the measured core: an attack, or packets at a share of its capacity.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Load {
    /// Neighbour: the attack of the malicious guest, the longest turn of any guest in microseconds, and the honest
    /// guest's share of the core while it had packets.
    pub attack: Option<&'static str>,
    pub longest_turn_us: Option<f64>,
    pub core_share: Option<f64>,
    /// Neighbour of TCP: the rate from 5 s after the end of the attack, relative to the rate before it.
    pub after_over_alone: Option<f64>,
    /// Neighbour of TCP: the smallest number of attackers during the attack. The unit depends on the attack:
    /// connections, new connections, claims or MB per second, programs or listeners.
    pub attackers: Option<u64>,
    /// Latency: the send rate as a share of `capacity_mpps`.
    pub load: Option<f64>,
    /// Million packets per second that a closed loop reaches in the same arrangement; neighbour: the rate without an
    /// attack.
    pub capacity_mpps: Option<f64>,
    /// Latency: limit in microseconds above which mode `auto` has to decline an engine.
    pub max_latency_us: Option<f64>,
    /// Latency: the share of copies that mode `auto` submitted to the engine.
    pub engine_share: Option<f64>,
}

/// Comparison with a peer.
#[derive(Clone, Debug, Default, Serialize)]
pub struct PeerRatio {
    /// Page size of the guests' memory, their virtqueues and our packet buffers: `4K`, `2M` or `1G`.
    pub pages: Option<&'static str>,
    pub peer: Option<String>,
    /// The peer's median, in the row's unit.
    pub peer_median: Option<f64>,
    /// Our speed relative to the peer's; above 1 is faster. Core cost: ratio of the sums of all blocks; end to end:
    /// median of the ratios of paired windows.
    pub peer_ratio: Option<f64>,
    /// Core cost: median of the ratios of paired blocks.
    pub peer_ratio_median: Option<f64>,
    pub peer_ratio_lower: Option<f64>,
    /// All variants that alternated in the cell, including this one, each as mode and engine.
    pub variants: Option<String>,
}

impl PeerRatio {
    /// Compares the rates of paired windows.
    pub(crate) fn of_windows(peer: &str, ours: &[f64], theirs: &[f64]) -> Self {
        let pairs: Vec<_> = ours.iter().copied().zip(theirs.iter().copied()).collect();
        let ratio = paired_ratio(&pairs);
        Self {
            peer: Some(peer.into()),
            peer_median: Some(Spread::of(theirs).median),
            peer_ratio: ratio.map(|ratio| ratio.median),
            peer_ratio_lower: ratio.map(|ratio| ratio.lower),
            ..Self::default()
        }
    }
}

/// Both ends of an end-to-end measurement.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Ends {
    /// TSC ticks per packet of the rounds that moved packets, as counted by the back end itself.
    pub busy_cycles_per_packet: Option<f64>,
    /// The same as counted by the peer (testpmd's record-core-cycles).
    pub peer_cycles_per_packet: Option<f64>,
    /// Whether the front end was busy for more than 90 % of the time and therefore was the bottleneck. TCP over veth:
    /// the same for the core of the other end.
    pub fe_bound: Option<bool>,
    /// Forwarding mode of both sides: `mac`, or `l2`, a learning switch.
    pub forward: Option<&'static str>,
    #[serde(flatten)]
    pub about_peer: AboutPeer,
}

/// Description of the peer.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct AboutPeer {
    /// The peer's software: `DPDK 22.11.11`.
    pub peer_version: Option<String>,
    /// Compilation target of the peer's DPDK: `corei7, SSE4.2`, `native, AVX2`.
    pub peer_target: Option<String>,
    /// The virtio features negotiated with it, by name; for guest to guest, the sender's features.
    pub peer_features: Option<String>,
    /// Page size of its packet buffers in bytes.
    pub peer_page_bytes: Option<u64>,
}

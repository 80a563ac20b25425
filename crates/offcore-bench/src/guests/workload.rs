//! Workload of a vhost measurement: route, virtqueues, cache temperature and frame length.

use offcore_stats::named;
use std::fmt;

use offcore_vhost::features::{
    VIRTIO_F_EVENT_IDX, VIRTIO_F_INDIRECT_DESC, VIRTIO_F_RING_PACKED, VIRTIO_NET_F_CSUM,
    VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6, VIRTIO_NET_F_HOST_TSO4,
    VIRTIO_NET_F_HOST_TSO6, VIRTIO_NET_F_MRG_RXBUF,
};

use crate::method::temperature::Temperature;

named! {
    /// Virtqueue format.
    #[derive(Default)]
    pub enum Ring {
        /// A descriptor table, an available ring and a used ring (virtio 1.2, 2.7).
        #[default]
        Split = "split",
        /// One ring of descriptors that both sides write (virtio 1.2, 2.8).
        Packed = "packed",
    }
}

impl Ring {
    /// Returns the device's initial position in a new virtqueue, encoded as in vhost-user's vring state. A packed
    /// virtqueue starts with set wrap counters.
    pub const fn base(self) -> u32 {
        match self {
            Self::Split => 0,
            Self::Packed => 0x8000_8000,
        }
    }

    /// Returns the feature bits that a front end requests for this format.
    pub const fn features(self) -> u64 {
        match self {
            Self::Split => 0,
            Self::Packed => VIRTIO_F_RING_PACKED,
        }
    }
}

named! {
    /// Destination of a guest's packets.
    #[derive(Default)]
    pub enum Route {
        /// Back to the guest that sent them, as in Table 8 of the vhost guide.
        #[default]
        Loop = "loop",
        /// To another guest with separate memory.
        GuestToGuest = "guest-to-guest",
    }
}

impl Route {
    /// Returns the number of guests and of sockets.
    pub const fn guests(self) -> usize {
        match self {
            Self::Loop => 1,
            Self::GuestToGuest => 2,
        }
    }
}

named! {
    /// Virtqueue usage of a guest.
    #[derive(Default)]
    pub enum GuestKind {
        /// One descriptor per packet and no offloads, like DPDK's virtio driver except for its IN_ORDER.
        #[default]
        Simple = "simple",
        /// Like Linux: event index, checksum offload, and packets of more than 128 bytes sent in two pieces, headers
        /// and payload, through an indirect table.
        Linux = "linux",
    }
}

impl GuestKind {
    /// Returns the feature bits that it requests, without the bits of the ring format.
    pub const fn features(self) -> u64 {
        let simple = VIRTIO_NET_F_MRG_RXBUF | VIRTIO_F_INDIRECT_DESC;
        match self {
            Self::Simple => simple,
            Self::Linux => {
                let tso = VIRTIO_NET_F_HOST_TSO4
                    | VIRTIO_NET_F_HOST_TSO6
                    | VIRTIO_NET_F_GUEST_TSO4
                    | VIRTIO_NET_F_GUEST_TSO6;
                simple | VIRTIO_F_EVENT_IDX | VIRTIO_NET_F_CSUM | VIRTIO_NET_F_GUEST_CSUM | tso
            }
        }
    }
}

/// Frame lengths of the simple Internet mix, including the FCS: seven times 64 bytes, four times 594 bytes and once
/// 1518 bytes.
pub const IMIX: [usize; 12] = [64, 64, 594, 64, 64, 594, 64, 64, 594, 64, 594, 1518];
/// Mean frame length of [`IMIX`].
pub const IMIX_MEAN: usize = 362;

/// The workload of a variant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workload {
    pub route: Route,
    pub ring: Ring,
    pub temperature: Temperature,
    /// Frame length in bytes, including the FCS; the mean for a mix.
    pub frame: usize,
    /// Whether the lengths are taken from [`IMIX`], in turn.
    pub imix: bool,
    pub guest: GuestKind,
    /// Whether our back end copies a payload only once from guest to guest where possible.
    pub one_copy: bool,
}

impl Workload {
    /// Returns the frame lengths, which are used in turn.
    pub fn frames(&self) -> Vec<usize> {
        if self.imix { IMIX.to_vec() } else { vec![self.frame] }
    }

    /// Returns the case's name in JSON.
    pub const fn case(&self) -> &'static str {
        if self.imix { "imix" } else { self.route.name() }
    }

    /// Returns the feature bits that the guests request.
    pub const fn features(&self) -> u64 {
        self.guest.features() | self.ring.features()
    }

    /// Returns the loop of Table 8 with split virtqueues.
    pub const fn table8(temperature: Temperature, frame: usize) -> Self {
        let (route, ring, guest) = (Route::Loop, Ring::Split, GuestKind::Simple);
        Self { route, ring, temperature, frame, imix: false, guest, one_copy: true }
    }
}

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ring, temperature, frame, guest, .. } = self;
        write!(f, "{}, {ring}, {guest} guest, {temperature}, {frame} B", self.case())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn imix_mean_and_table_8_are_correct() {
        let mean = IMIX.iter().sum::<usize>() as f64 / IMIX.len() as f64;
        assert_eq!(mean.round(), IMIX_MEAN as f64);
        assert_eq!(
            Workload::table8(Temperature::Hot, 64).to_string(),
            "loop, split, simple guest, hot, 64 B"
        );
    }
}

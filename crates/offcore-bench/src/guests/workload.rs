//! What a variant of a vhost measurement moves: from whom to whom, over which virtqueues, how warm, how long.

use offcore_stats::named;
use std::fmt;

use offcore_vhost::features::{
    VIRTIO_F_EVENT_IDX, VIRTIO_F_INDIRECT_DESC, VIRTIO_F_RING_PACKED, VIRTIO_NET_F_CSUM,
    VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6, VIRTIO_NET_F_HOST_TSO4,
    VIRTIO_NET_F_HOST_TSO6, VIRTIO_NET_F_MRG_RXBUF,
};

use crate::method::temperature::Temperature;

named! {
    /// The format of virtqueues.
    #[derive(Default)]
    pub enum Ring {
        /// A descriptor table, an available and a used ring (virtio 1.2, 2.7).
        #[default]
        Split = "split",
        /// One ring of descriptors that both sides write (virtio 1.2, 2.8).
        Packed = "packed",
    }
}

impl Ring {
    /// Where the device begins with a fresh virtqueue, as in vhost-user's vring state: a packed one has its wrap counters
    /// set.
    pub const fn base(self) -> u32 {
        match self {
            Self::Split => 0,
            Self::Packed => 0x8000_8000,
        }
    }

    /// The feature bits that a front end asks for to get this format.
    pub const fn features(self) -> u64 {
        match self {
            Self::Split => 0,
            Self::Packed => VIRTIO_F_RING_PACKED,
        }
    }
}

named! {
    /// Where the packets of a guest go.
    #[derive(Default)]
    pub enum Route {
        /// Back to the guest that sent them, as in Table 8 of the vhost guide.
        #[default]
        Loop = "loop",
        /// To another guest with memory of its own.
        GuestToGuest = "guest-to-guest",
    }
}

impl Route {
    /// Guests, and sockets, that it takes.
    pub const fn guests(self) -> usize {
        match self {
            Self::Loop => 1,
            Self::GuestToGuest => 2,
        }
    }
}

named! {
    /// How a guest uses its virtqueues.
    #[derive(Default)]
    pub enum GuestKind {
        /// One descriptor a packet, nothing left to the device, as DPDK's virtio driver does, but for its IN_ORDER.
        #[default]
        Simple = "simple",
        /// As Linux does: event index, checksums left to the device, and packets of more than 128 bytes sent in two pieces,
        /// headers and payload, by an indirect table.
        Linux = "linux",
    }
}

impl GuestKind {
    /// The feature bits that it asks for, those of the ring's format left out.
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

/// Frame lengths of the simple Internet mix, FCS included: seven short ones, four of 594 bytes and a long one.
pub const IMIX: [usize; 12] = [64, 64, 594, 64, 64, 594, 64, 64, 594, 64, 594, 1518];
/// Their mean.
pub const IMIX_MEAN: usize = 362;

/// What a variant moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workload {
    pub route: Route,
    pub ring: Ring,
    pub temperature: Temperature,
    /// Frame length in bytes, FCS included; the mean of a mix.
    pub frame: usize,
    /// Whether the lengths are those of [`IMIX`], in turn.
    pub imix: bool,
    pub guest: GuestKind,
    /// Whether ours copies a payload from guest to guest once, where it can.
    pub one_copy: bool,
}

impl Workload {
    /// The frame lengths, in the order in which they come round.
    pub fn frames(&self) -> Vec<usize> {
        if self.imix { IMIX.to_vec() } else { vec![self.frame] }
    }

    /// The case's name in JSON.
    pub const fn case(&self) -> &'static str {
        if self.imix { "imix" } else { self.route.name() }
    }

    /// The feature bits that the guests ask for.
    pub const fn features(&self) -> u64 {
        self.guest.features() | self.ring.features()
    }

    /// The loop of Table 8 over split virtqueues.
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
    fn mix_and_table_8_are_what_they_say() {
        let mean = IMIX.iter().sum::<usize>() as f64 / IMIX.len() as f64;
        assert_eq!(mean.round(), IMIX_MEAN as f64);
        assert_eq!(
            Workload::table8(Temperature::Hot, 64).to_string(),
            "loop, split, simple guest, hot, 64 B"
        );
    }
}

//! Feature bits (virtio 1.2, sections 5.1.3 and 6; vhost-user protocol).

use offcore_wire::virtio_net::Offloads;

/// The device completes partial checksums (VIRTIO_NET_F_CSUM).
pub const VIRTIO_NET_F_CSUM: u64 = 1 << 0;
/// The driver accepts packets with partial checksums (VIRTIO_NET_F_GUEST_CSUM).
pub const VIRTIO_NET_F_GUEST_CSUM: u64 = 1 << 1;
/// The device's configuration contains an MTU (VIRTIO_NET_F_MTU). The front end provides it and sends it to the back
/// end by NET_SET_MTU.
pub const VIRTIO_NET_F_MTU: u64 = 1 << 3;
/// The driver accepts large IPv4 TCP packets (VIRTIO_NET_F_GUEST_TSO4).
pub const VIRTIO_NET_F_GUEST_TSO4: u64 = 1 << 7;
/// The driver accepts large IPv6 TCP packets (VIRTIO_NET_F_GUEST_TSO6).
pub const VIRTIO_NET_F_GUEST_TSO6: u64 = 1 << 8;
/// The driver accepts large TCP packets with congestion notification (VIRTIO_NET_F_GUEST_ECN).
pub const VIRTIO_NET_F_GUEST_ECN: u64 = 1 << 9;
/// The device segments large IPv4 TCP packets (VIRTIO_NET_F_HOST_TSO4).
pub const VIRTIO_NET_F_HOST_TSO4: u64 = 1 << 11;
/// The device segments large IPv6 TCP packets (VIRTIO_NET_F_HOST_TSO6).
pub const VIRTIO_NET_F_HOST_TSO6: u64 = 1 << 12;
/// The device segments large TCP packets with congestion notification (VIRTIO_NET_F_HOST_ECN).
pub const VIRTIO_NET_F_HOST_ECN: u64 = 1 << 13;
/// A packet may take several RX chains (VIRTIO_NET_F_MRG_RXBUF).
pub const VIRTIO_NET_F_MRG_RXBUF: u64 = 1 << 15;
/// The device's configuration contains the link state (VIRTIO_NET_F_STATUS). The front end provides it.
pub const VIRTIO_NET_F_STATUS: u64 = 1 << 16;
/// Control virtqueue (VIRTIO_NET_F_CTRL_VQ). A front end with several queue pairs handles it by itself.
pub const VIRTIO_NET_F_CTRL_VQ: u64 = 1 << 17;
/// The driver announces its address on request after a migration (VIRTIO_NET_F_GUEST_ANNOUNCE). The front end sends the
/// request.
pub const VIRTIO_NET_F_GUEST_ANNOUNCE: u64 = 1 << 21;
/// Several queue pairs (VIRTIO_NET_F_MQ).
pub const VIRTIO_NET_F_MQ: u64 = 1 << 22;
/// Dirty pages are logged (VHOST_F_LOG_ALL).
pub const VHOST_F_LOG_ALL: u64 = 1 << 26;
/// Descriptors may point to tables of descriptors (VIRTIO_F_INDIRECT_DESC).
pub const VIRTIO_F_INDIRECT_DESC: u64 = 1 << 28;
/// Notifications are requested by ring position (VIRTIO_F_EVENT_IDX).
pub const VIRTIO_F_EVENT_IDX: u64 = 1 << 29;
/// The vhost-user protocol features can be negotiated (VHOST_USER_F_PROTOCOL_FEATURES).
pub const VHOST_USER_F_PROTOCOL_FEATURES: u64 = 1 << 30;
/// A modern device (VIRTIO_F_VERSION_1).
pub const VIRTIO_F_VERSION_1: u64 = 1 << 32;
/// Rings have the packed layout (VIRTIO_F_RING_PACKED).
pub const VIRTIO_F_RING_PACKED: u64 = 1 << 34;
/// Chains are used in the order in which they were made available (VIRTIO_F_IN_ORDER).
pub const VIRTIO_F_IN_ORDER: u64 = 1 << 35;

/// The driver accepts large UDP packets over IPv4 (VIRTIO_NET_F_GUEST_USO4; virtio 1.3, section 5.1.3).
pub const VIRTIO_NET_F_GUEST_USO4: u64 = 1 << 54;
/// The driver accepts large UDP packets over IPv6 (VIRTIO_NET_F_GUEST_USO6).
pub const VIRTIO_NET_F_GUEST_USO6: u64 = 1 << 55;
/// The device segments large UDP packets (VIRTIO_NET_F_HOST_USO).
pub const VIRTIO_NET_F_HOST_USO: u64 = 1 << 56;

/// Virtio features that the back end offers.
pub const OFFERED: u64 = VIRTIO_NET_F_CSUM
    | VIRTIO_NET_F_GUEST_CSUM
    | VIRTIO_NET_F_GUEST_TSO4
    | VIRTIO_NET_F_GUEST_TSO6
    | VIRTIO_NET_F_GUEST_ECN
    | VIRTIO_NET_F_HOST_TSO4
    | VIRTIO_NET_F_HOST_TSO6
    | VIRTIO_NET_F_HOST_ECN
    | VIRTIO_NET_F_MRG_RXBUF
    | VIRTIO_NET_F_MTU
    | VIRTIO_NET_F_STATUS
    | VIRTIO_NET_F_MQ
    | VIRTIO_NET_F_CTRL_VQ
    | VIRTIO_NET_F_GUEST_ANNOUNCE
    | VHOST_F_LOG_ALL
    | VIRTIO_F_INDIRECT_DESC
    | VIRTIO_F_EVENT_IDX
    | VHOST_USER_F_PROTOCOL_FEATURES
    | VIRTIO_F_VERSION_1
    | VIRTIO_F_RING_PACKED
    | VIRTIO_F_IN_ORDER
    | VIRTIO_NET_F_GUEST_USO4
    | VIRTIO_NET_F_GUEST_USO6
    | VIRTIO_NET_F_HOST_USO;

/// Device status: the driver has found the device (ACKNOWLEDGE; virtio 1.2, section 2.1).
pub const STATUS_ACKNOWLEDGE: u8 = 1;
/// Device status: the driver supports the device (DRIVER).
pub const STATUS_DRIVER: u8 = 2;
/// Device status: the driver is ready (DRIVER_OK).
pub const STATUS_DRIVER_OK: u8 = 4;
/// Device status: driver and device agree on the features (FEATURES_OK).
pub const STATUS_FEATURES_OK: u8 = 8;

/// Length of the virtio-net header of a modern device, `num_buffers` included.
pub const NET_HEADER: usize = offcore_wire::virtio_net::HEADER_LEN;

/// Protocol feature: several queues (VHOST_USER_PROTOCOL_F_MQ).
pub const VHOST_USER_PROTOCOL_F_MQ: u64 = 1 << 0;
/// Protocol feature: the dirty log is shared memory (VHOST_USER_PROTOCOL_F_LOG_SHMFD).
pub const VHOST_USER_PROTOCOL_F_LOG_SHMFD: u64 = 1 << 1;
/// Protocol feature: every request can be acknowledged (VHOST_USER_PROTOCOL_F_REPLY_ACK).
pub const VHOST_USER_PROTOCOL_F_REPLY_ACK: u64 = 1 << 3;
/// Protocol feature: the front end sends the MTU (VHOST_USER_PROTOCOL_F_NET_MTU).
pub const VHOST_USER_PROTOCOL_F_NET_MTU: u64 = 1 << 4;
/// Protocol feature: a socket for requests by the back end (VHOST_USER_PROTOCOL_F_BACKEND_REQ).
pub const VHOST_USER_PROTOCOL_F_BACKEND_REQ: u64 = 1 << 5;
/// Protocol feature: the record of descriptors in flight survives the back end (VHOST_USER_PROTOCOL_F_INFLIGHT_SHMFD).
pub const VHOST_USER_PROTOCOL_F_INFLIGHT_SHMFD: u64 = 1 << 12;
/// Protocol feature: the device can be reset (VHOST_USER_PROTOCOL_F_RESET_DEVICE).
pub const VHOST_USER_PROTOCOL_F_RESET_DEVICE: u64 = 1 << 13;
/// Protocol feature: memory regions are added and removed one by one (VHOST_USER_PROTOCOL_F_CONFIGURE_MEM_SLOTS).
pub const VHOST_USER_PROTOCOL_F_CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
/// Protocol feature: the virtio device status is exchanged (VHOST_USER_PROTOCOL_F_STATUS).
pub const VHOST_USER_PROTOCOL_F_STATUS: u64 = 1 << 16;

/// The protocol features that the back end offers.
pub const PROTOCOL_OFFERED: u64 = VHOST_USER_PROTOCOL_F_MQ
    | VHOST_USER_PROTOCOL_F_LOG_SHMFD
    | VHOST_USER_PROTOCOL_F_REPLY_ACK
    | VHOST_USER_PROTOCOL_F_NET_MTU
    | VHOST_USER_PROTOCOL_F_BACKEND_REQ
    | VHOST_USER_PROTOCOL_F_INFLIGHT_SHMFD
    | VHOST_USER_PROTOCOL_F_RESET_DEVICE
    | VHOST_USER_PROTOCOL_F_CONFIGURE_MEM_SLOTS
    | VHOST_USER_PROTOCOL_F_STATUS;

/// Features that depend on others (virtio 1.2, section 5.1.3.1). Each entry is a feature and a set; the feature needs
/// at least one member of the set. MQ also needs CTRL_VQ, but the front end handles that queue, and DPDK's front end
/// does not pass the feature on.
const NEEDS: [(u64, u64); 9] = [
    (VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_CSUM),
    (VIRTIO_NET_F_GUEST_TSO6, VIRTIO_NET_F_GUEST_CSUM),
    (VIRTIO_NET_F_GUEST_ECN, VIRTIO_NET_F_GUEST_TSO4 | VIRTIO_NET_F_GUEST_TSO6),
    (VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_CSUM),
    (VIRTIO_NET_F_HOST_TSO6, VIRTIO_NET_F_CSUM),
    (VIRTIO_NET_F_HOST_ECN, VIRTIO_NET_F_HOST_TSO4 | VIRTIO_NET_F_HOST_TSO6),
    (VIRTIO_NET_F_GUEST_USO4, VIRTIO_NET_F_GUEST_CSUM),
    (VIRTIO_NET_F_GUEST_USO6, VIRTIO_NET_F_GUEST_CSUM),
    (VIRTIO_NET_F_HOST_USO, VIRTIO_NET_F_CSUM),
];

/// Removes the features whose dependencies were not chosen.
///
/// A driver must not choose a feature without its dependencies. However, QEMU with `csum=off` offers its guest
/// segmentation without checksums and passes on the guest's choice. Such a guest does not use segmentation, so its
/// features are accepted.
#[must_use]
pub const fn effective(chosen: u64) -> u64 {
    let (mut left, mut i) = (chosen, 0);
    // Dependencies are listed before the features that need them, so one pass is sufficient.
    while i < NEEDS.len() {
        let (feature, needed) = NEEDS[i];
        if left & needed == 0 {
            left &= !feature;
        }
        i += 1;
    }
    left
}

/// Offloads that a guest may request in packets that it transmits.
#[must_use]
pub const fn transmitted(chosen: u64) -> Offloads {
    let chosen = effective(chosen);
    Offloads {
        checksum: chosen & VIRTIO_NET_F_CSUM != 0,
        tso4: chosen & VIRTIO_NET_F_HOST_TSO4 != 0,
        tso6: chosen & VIRTIO_NET_F_HOST_TSO6 != 0,
        ecn: chosen & VIRTIO_NET_F_HOST_ECN != 0,
        uso: chosen & VIRTIO_NET_F_HOST_USO != 0,
    }
}

/// Offloads that packets to a guest may request. A virtio-net header does not contain the IP version of a UDP packet,
/// so UDP segmentation needs a guest that accepts both.
#[must_use]
pub const fn received(chosen: u64) -> Offloads {
    const USO: u64 = VIRTIO_NET_F_GUEST_USO4 | VIRTIO_NET_F_GUEST_USO6;
    let chosen = effective(chosen);
    Offloads {
        checksum: chosen & VIRTIO_NET_F_GUEST_CSUM != 0,
        tso4: chosen & VIRTIO_NET_F_GUEST_TSO4 != 0,
        tso6: chosen & VIRTIO_NET_F_GUEST_TSO6 != 0,
        ecn: chosen & VIRTIO_NET_F_GUEST_ECN != 0,
        uso: chosen & USO == USO,
    }
}

/// Whether the rings have the packed layout.
#[must_use]
pub const fn is_packed(features: u64) -> bool {
    features & VIRTIO_F_RING_PACKED != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn feature_without_dependency_is_cleared() {
        let all = !0;
        assert_eq!(effective(all), all);
        assert_eq!(
            effective(all & !VIRTIO_NET_F_CSUM),
            all & !(VIRTIO_NET_F_CSUM
                | VIRTIO_NET_F_HOST_TSO4
                | VIRTIO_NET_F_HOST_TSO6
                | VIRTIO_NET_F_HOST_ECN
                | VIRTIO_NET_F_HOST_USO)
        );
        let tso = VIRTIO_NET_F_GUEST_TSO4 | VIRTIO_NET_F_GUEST_TSO6 | VIRTIO_NET_F_GUEST_ECN;
        let guest = tso | VIRTIO_NET_F_GUEST_USO4 | VIRTIO_NET_F_GUEST_USO6;
        assert_eq!(effective(all & !VIRTIO_NET_F_GUEST_CSUM), all & !(VIRTIO_NET_F_GUEST_CSUM | guest));
        assert_eq!(
            effective(all & !VIRTIO_NET_F_HOST_TSO4),
            all & !VIRTIO_NET_F_HOST_TSO4,
            "one version of IP is enough for ECN"
        );
        let without = all & !(VIRTIO_NET_F_GUEST_TSO4 | VIRTIO_NET_F_GUEST_TSO6);
        assert_eq!(effective(without), without & !VIRTIO_NET_F_GUEST_ECN);
    }

    #[test]
    fn uso_needs_both_versions() {
        let (four, six) = (VIRTIO_NET_F_GUEST_USO4, VIRTIO_NET_F_GUEST_USO6);
        for (guest, uso) in [(0, false), (four, false), (six, false), (four | six, true)] {
            assert_eq!(received(VIRTIO_NET_F_GUEST_CSUM | guest).uso, uso, "{guest:#x}");
            assert!(!received(guest).uso, "without checksums");
        }
        assert!(transmitted(VIRTIO_NET_F_CSUM | VIRTIO_NET_F_HOST_USO).uso);
        assert!(!transmitted(VIRTIO_NET_F_HOST_USO | four | six).uso);
    }
}

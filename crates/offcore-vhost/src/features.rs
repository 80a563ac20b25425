//! Feature bits (virtio 1.2, sections 5.1.3 and 6; vhost-user protocol).

/// The device completes partial checksums (VIRTIO_NET_F_CSUM).
pub const NET_CSUM: u64 = 1 << 0;
/// A packet may take several RX chains (VIRTIO_NET_F_MRG_RXBUF).
pub const NET_MRG_RXBUF: u64 = 1 << 15;
/// Several queue pairs (VIRTIO_NET_F_MQ).
pub const NET_MQ: u64 = 1 << 22;
/// Control virtqueue (VIRTIO_NET_F_CTRL_VQ), which a front end with several queue pairs serves itself.
pub const NET_CTRL_VQ: u64 = 1 << 17;
/// Dirty pages are logged (VHOST_F_LOG_ALL).
pub const VHOST_LOG_ALL: u64 = 1 << 26;
/// Descriptors may point to tables of descriptors (VIRTIO_F_INDIRECT_DESC).
pub const RING_INDIRECT_DESC: u64 = 1 << 28;
/// Notifications are asked for by ring position (VIRTIO_F_EVENT_IDX).
pub const RING_EVENT_IDX: u64 = 1 << 29;
/// The vhost-user protocol features can be negotiated (VHOST_USER_F_PROTOCOL_FEATURES).
pub const VHOST_USER_PROTOCOL_FEATURES: u64 = 1 << 30;
/// Packed virtqueues (VIRTIO_F_RING_PACKED).
pub const RING_PACKED: u64 = 1 << 34;
/// The device returns chains in the order in which they were made available (VIRTIO_F_IN_ORDER).
pub const RING_IN_ORDER: u64 = 1 << 35;
/// A modern device (VIRTIO_F_VERSION_1).
pub const VERSION_1: u64 = 1 << 32;

/// What the back end offers.
pub const OFFERED: u64 = NET_MRG_RXBUF
    | NET_MQ
    | NET_CTRL_VQ
    | RING_INDIRECT_DESC
    | RING_EVENT_IDX
    | VHOST_USER_PROTOCOL_FEATURES
    | VERSION_1;

/// Length of the virtio-net header of a modern device, `num_buffers` included.
pub const NET_HEADER: usize = offcore_wire::virtio_net::HEADER_LEN;

/// Protocol feature: several queues (VHOST_USER_PROTOCOL_F_MQ).
pub const PROTOCOL_MQ: u64 = 1 << 0;
/// Protocol feature: every request can be acknowledged (VHOST_USER_PROTOCOL_F_REPLY_ACK).
pub const PROTOCOL_REPLY_ACK: u64 = 1 << 3;

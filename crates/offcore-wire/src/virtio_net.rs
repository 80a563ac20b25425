//! The header in front of each packet of a virtio-net device: `struct virtio_net_hdr` (virtio 1.2, 5.1.6) in the format
//! of a modern device (VIRTIO_F_VERSION_1), with 12 little-endian bytes.
//!
//! It is a value: parsed from bytes that were copied from guest memory, checked, used, and written as bytes. If it were
//! read in place, the guest could change a field between its check and its use.

use crate::{
    checksum::ChecksumRangeError,
    ethernet,
    field::{bytes, put},
};

/// Length of the header in bytes.
pub const HEADER_LEN: usize = 12;

/// `flags`: compute the checksum at `csum_start` and `csum_offset`.
pub const VIRTIO_NET_HDR_F_NEEDS_CSUM: u8 = 1;
/// `flags`: the checksum has been verified.
pub const VIRTIO_NET_HDR_F_DATA_VALID: u8 = 2;

/// `gso_type`: an ordinary packet.
pub const VIRTIO_NET_HDR_GSO_NONE: u8 = 0;
/// `gso_type`: TCP over IPv4 to segment.
pub const VIRTIO_NET_HDR_GSO_TCPV4: u8 = 1;
/// `gso_type`: UDP over IPv4 to fragment (UFO).
pub const VIRTIO_NET_HDR_GSO_UDP: u8 = 3;
/// `gso_type`: TCP over IPv6 to segment.
pub const VIRTIO_NET_HDR_GSO_TCPV6: u8 = 4;
/// `gso_type`: UDP to segment (USO).
pub const VIRTIO_NET_HDR_GSO_UDP_L4: u8 = 5;
/// Bit of `gso_type`, with TCP only: the packet has ECN set.
pub const VIRTIO_NET_HDR_GSO_ECN: u8 = 0x80;
/// Private bit of `gso_type`: the packet belongs to a tunnel ([`gso::is_tunnelled`](crate::gso::is_tunnelled)). It is
/// only used for packets in a pool: a received header with this bit is refused, and it is never sent.
pub const GSO_TUNNEL: u8 = 0x10;

mod field {
    pub(super) const FLAGS: usize = 0;
    pub(super) const GSO_TYPE: usize = 1;
    pub(super) const HDR_LEN: usize = 2;
    pub(super) const GSO_SIZE: usize = 4;
    pub(super) const CSUM_START: usize = 6;
    pub(super) const CSUM_OFFSET: usize = 8;
    pub(super) const NUM_BUFFERS: usize = 10;
}

/// The header's fields, in host byte order. The default is an ordinary packet without offload requests and without a
/// buffer count.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NetHeader {
    /// Bits `F_*`.
    pub flags: u8,
    /// A `GSO_*` value, optionally with [`VIRTIO_NET_HDR_GSO_ECN`].
    pub gso_type: u8,
    /// Length of the Ethernet, IP and transport headers in bytes: a hint for packets to segment.
    pub hdr_len: u16,
    /// Payload bytes per segment of a packet to segment.
    pub gso_size: u16,
    /// Start of the checksummed data, in bytes from the start of the frame.
    pub csum_start: u16,
    /// Offset of the checksum field, in bytes from `csum_start`.
    pub csum_offset: u16,
    /// Number of descriptor chains that the packet occupies, in the direction to the driver. A driver sends 0.
    pub num_buffers: u16,
}

impl NetHeader {
    /// Parses a header.
    #[inline]
    pub fn from_bytes(header: &[u8; HEADER_LEN]) -> Self {
        let le16 = |at| u16::from_le_bytes(bytes(header, at));
        Self {
            flags: header[field::FLAGS],
            gso_type: header[field::GSO_TYPE],
            hdr_len: le16(field::HDR_LEN),
            gso_size: le16(field::GSO_SIZE),
            csum_start: le16(field::CSUM_START),
            csum_offset: le16(field::CSUM_OFFSET),
            num_buffers: le16(field::NUM_BUFFERS),
        }
    }

    /// Returns the header in its format on the ring.
    #[inline]
    pub fn to_bytes(&self) -> [u8; HEADER_LEN] {
        let mut header = [0; HEADER_LEN];
        header[field::FLAGS] = self.flags;
        header[field::GSO_TYPE] = self.gso_type;
        put(&mut header, field::HDR_LEN, self.hdr_len.to_le_bytes());
        put(&mut header, field::GSO_SIZE, self.gso_size.to_le_bytes());
        put(&mut header, field::CSUM_START, self.csum_start.to_le_bytes());
        put(&mut header, field::CSUM_OFFSET, self.csum_offset.to_le_bytes());
        put(&mut header, field::NUM_BUFFERS, self.num_buffers.to_le_bytes());
        header
    }

    /// Returns whether the receiver of the header must complete the checksum ([`crate::checksum::complete`]).
    #[inline]
    pub fn needs_checksum(&self) -> bool {
        self.flags & VIRTIO_NET_HDR_F_NEEDS_CSUM != 0
    }

    /// Returns whether the packet must be segmented.
    #[inline]
    pub fn is_gso(&self) -> bool {
        self.gso_type != VIRTIO_NET_HDR_GSO_NONE
    }

    /// Returns whether the receiver of the header has work to do: a checksum to complete, or a packet to segment.
    #[inline]
    pub fn leaves_work(&self) -> bool {
        self.needs_checksum() || self.is_gso()
    }

    /// Returns the header reduced to its requests: unused fields, other flags and the number of buffers are 0. A
    /// checked header is passed on in this form.
    #[inline]
    #[must_use]
    pub fn essence(&self) -> Self {
        let mut essence = Self::default();
        if self.needs_checksum() {
            essence.flags = VIRTIO_NET_HDR_F_NEEDS_CSUM;
            (essence.csum_start, essence.csum_offset) = (self.csum_start, self.csum_offset);
        }
        if self.is_gso() {
            (essence.gso_type, essence.gso_size, essence.hdr_len) =
                (self.gso_type, self.gso_size, self.hdr_len);
        }
        essence
    }

    /// Refuses values that are impossible for a packet of `frame_len` bytes (without this header). Unknown `flags` are
    /// ignored, as 5.1.6.2.2 requires, and so are fields that are not used according to the flags and the type.
    ///
    /// # Errors
    /// [`NetHeaderError`]: the packet must be dropped and counted.
    #[inline]
    pub fn check(&self, frame_len: usize) -> Result<(), NetHeaderError> {
        if self.needs_checksum() {
            ChecksumRangeError::check(self.csum_start, self.csum_offset, frame_len)
                .map_err(NetHeaderError::Checksum)?;
            // A checksum written into the Ethernet header could change the addresses or the VLAN for which the packet
            // was admitted.
            if usize::from(self.csum_start) < ethernet::HEADER_LEN {
                return Err(NetHeaderError::ChecksumStart { csum_start: self.csum_start });
            }
        }
        if self.is_gso() {
            return self.check_gso(frame_len);
        }
        Ok(())
    }

    fn check_gso(&self, frame_len: usize) -> Result<(), NetHeaderError> {
        let gso_type = self.gso_type;
        match gso_type {
            VIRTIO_NET_HDR_GSO_UDP | VIRTIO_NET_HDR_GSO_UDP_L4 => {}
            _ if matches!(
                gso_type & !VIRTIO_NET_HDR_GSO_ECN,
                VIRTIO_NET_HDR_GSO_TCPV4 | VIRTIO_NET_HDR_GSO_TCPV6
            ) => {}
            _ => return Err(NetHeaderError::GsoType { gso_type }),
        }
        if self.gso_size == 0 {
            return Err(NetHeaderError::GsoSize { gso_type });
        }
        if usize::from(self.hdr_len) > frame_len {
            return Err(NetHeaderError::HeaderLength { hdr_len: self.hdr_len, frame_len });
        }
        Ok(())
    }
}

/// The offload requests that a receiver of packets supports. By default, it supports none and expects ordinary packets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Offloads {
    /// Partial checksums ([`VIRTIO_NET_HDR_F_NEEDS_CSUM`]): `VIRTIO_NET_F_CSUM` or `VIRTIO_NET_F_GUEST_CSUM`, by
    /// direction.
    pub checksum: bool,
    /// Segmentation of TCP over IPv4: `VIRTIO_NET_F_HOST_TSO4` or `VIRTIO_NET_F_GUEST_TSO4`.
    pub tso4: bool,
    /// Segmentation of TCP over IPv6: `VIRTIO_NET_F_HOST_TSO6` or `VIRTIO_NET_F_GUEST_TSO6`.
    pub tso6: bool,
    /// Segmentation of TCP with ECN ([`VIRTIO_NET_HDR_GSO_ECN`]): `VIRTIO_NET_F_HOST_ECN` or `VIRTIO_NET_F_GUEST_ECN`.
    pub ecn: bool,
    /// Segmentation of UDP over IPv4 and IPv6: `VIRTIO_NET_F_HOST_USO`, or `VIRTIO_NET_F_GUEST_USO4` and `_USO6`.
    pub uso: bool,
}

impl Offloads {
    /// All offloads.
    pub const ALL: Self = Self { checksum: true, tso4: true, tso6: true, ecn: true, uso: true };

    /// Returns whether these offloads include all requests of a header. They never include UDP fragmentation (UFO), nor
    /// segmentation of a tunnel packet.
    #[inline]
    pub const fn allows(&self, header: &NetHeader) -> bool {
        let segmentation = match header.gso_type & !VIRTIO_NET_HDR_GSO_ECN {
            VIRTIO_NET_HDR_GSO_NONE => header.gso_type == VIRTIO_NET_HDR_GSO_NONE,
            VIRTIO_NET_HDR_GSO_TCPV4 => self.tso4,
            VIRTIO_NET_HDR_GSO_TCPV6 => self.tso6,
            VIRTIO_NET_HDR_GSO_UDP_L4 => self.uso && header.gso_type == VIRTIO_NET_HDR_GSO_UDP_L4,
            _ => false,
        };
        let ecn = header.gso_type & VIRTIO_NET_HDR_GSO_ECN == 0 || self.ecn;
        let checksum = header.flags & VIRTIO_NET_HDR_F_NEEDS_CSUM == 0 || self.checksum;
        segmentation && ecn && checksum
    }
}

/// Why a virtio-net header cannot belong to its packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, displaydoc::Display, thiserror::Error)]
pub enum NetHeaderError {
    /// virtio-net header: {0}
    Checksum(ChecksumRangeError),
    /// virtio-net header: checksum asked for at csum_start {csum_start}, inside of the Ethernet header, which is 14 bytes
    ChecksumStart { csum_start: u16 },
    /// virtio-net header: gso_type {gso_type:#04x} with gso_size 0
    GsoSize { gso_type: u8 },
    /// virtio-net header: unknown gso_type {gso_type:#04x}, expected 0, 1, 3, 4 or 5, or 0x81 or 0x84 with ECN
    GsoType { gso_type: u8 },
    /// virtio-net header: hdr_len {hdr_len} is beyond the packet's {frame_len} bytes
    HeaderLength { hdr_len: u16, frame_len: usize },
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn header_layout_matches_virtio_spec() {
        let header = NetHeader {
            flags: VIRTIO_NET_HDR_F_NEEDS_CSUM,
            gso_type: VIRTIO_NET_HDR_GSO_TCPV4,
            hdr_len: 0x0203,
            gso_size: 0x0405,
            csum_start: 0x0607,
            csum_offset: 0x0809,
            num_buffers: 0x0a0b,
        };
        assert_eq!(header.to_bytes(), [1, 1, 3, 2, 5, 4, 7, 6, 9, 8, 0x0b, 0x0a]);
        assert_eq!(NetHeader::default().to_bytes(), [0; HEADER_LEN]);
    }

    #[test]
    fn valid_headers_pass_check() {
        assert_eq!(NetHeader::default().check(0), Ok(()));
        let tcp = NetHeader {
            flags: VIRTIO_NET_HDR_F_NEEDS_CSUM,
            csum_start: 34,
            csum_offset: 16,
            ..Default::default()
        };
        assert_eq!(tcp.check(52), Ok(()));
        let gso_type = VIRTIO_NET_HDR_GSO_TCPV4 | VIRTIO_NET_HDR_GSO_ECN;
        assert_eq!(NetHeader { gso_type, gso_size: 1448, hdr_len: 66, ..tcp }.check(9000), Ok(()));
        // Unused fields and unknown flags may have any value.
        let unused = NetHeader { flags: 0xfa, csum_start: u16::MAX, hdr_len: u16::MAX, ..Default::default() };
        assert_eq!(unused.check(60), Ok(()));
    }

    #[test]
    fn invalid_headers_are_rejected() {
        let csum = |csum_start, csum_offset| NetHeader {
            flags: VIRTIO_NET_HDR_F_NEEDS_CSUM,
            csum_start,
            csum_offset,
            ..Default::default()
        };
        assert_eq!(
            csum(34, 16).check(51).unwrap_err().to_string(),
            "virtio-net header: checksum asked for at csum_start 34 + csum_offset 16, outside a frame of 51 bytes"
        );
        assert!(csum(u16::MAX, u16::MAX).check(65_535).is_err());
        assert!(csum(0, 0).check(1).is_err());
        assert_eq!(csum(13, 1).check(64), Err(NetHeaderError::ChecksumStart { csum_start: 13 }));
        assert_eq!(csum(14, 0).check(64), Ok(()));

        let gso = NetHeader {
            gso_type: VIRTIO_NET_HDR_GSO_TCPV4,
            gso_size: 1448,
            hdr_len: 66,
            ..Default::default()
        };
        let without_size = NetHeader { gso_size: 0, ..gso };
        assert_eq!(
            without_size.check(9000),
            Err(NetHeaderError::GsoSize { gso_type: VIRTIO_NET_HDR_GSO_TCPV4 })
        );
        let long_header = NetHeader { hdr_len: 9001, ..gso };
        assert_eq!(
            long_header.check(9000),
            Err(NetHeaderError::HeaderLength { hdr_len: 9001, frame_len: 9000 })
        );
    }

    #[test]
    fn offloads_allow_negotiated_types() {
        let none = Offloads::default();
        let ordinary = NetHeader { flags: VIRTIO_NET_HDR_F_DATA_VALID, ..Default::default() };
        let open = NetHeader { flags: VIRTIO_NET_HDR_F_NEEDS_CSUM, ..Default::default() };
        let gso = |gso_type| NetHeader { gso_type, gso_size: 1448, ..open };
        assert!(none.allows(&ordinary) && !none.allows(&open) && Offloads::ALL.allows(&open));
        let checksum = Offloads { checksum: true, ..none };
        assert!(checksum.allows(&open) && !checksum.allows(&gso(VIRTIO_NET_HDR_GSO_TCPV4)));
        let tso4 = Offloads { tso4: true, ..checksum };
        assert!(tso4.allows(&gso(VIRTIO_NET_HDR_GSO_TCPV4)) && !tso4.allows(&gso(VIRTIO_NET_HDR_GSO_TCPV6)));
        assert!(!tso4.allows(&gso(VIRTIO_NET_HDR_GSO_TCPV4 | VIRTIO_NET_HDR_GSO_ECN)));
        assert!(
            Offloads { ecn: true, ..tso4 }.allows(&gso(VIRTIO_NET_HDR_GSO_TCPV4 | VIRTIO_NET_HDR_GSO_ECN))
        );
        assert!(!Offloads { checksum: false, ..tso4 }.allows(&gso(VIRTIO_NET_HDR_GSO_TCPV4)));
        let tso6 = Offloads { tso6: true, ..checksum };
        assert!(tso6.allows(&gso(VIRTIO_NET_HDR_GSO_TCPV6)) && !tso6.allows(&gso(VIRTIO_NET_HDR_GSO_TCPV4)));
        let uso = Offloads { uso: true, ..checksum };
        assert!(uso.allows(&gso(VIRTIO_NET_HDR_GSO_UDP_L4)) && !uso.allows(&gso(VIRTIO_NET_HDR_GSO_TCPV4)));
        assert!(!Offloads { uso: false, ..Offloads::ALL }.allows(&gso(VIRTIO_NET_HDR_GSO_UDP_L4)));
        let tunnelled = [VIRTIO_NET_HDR_GSO_TCPV4, VIRTIO_NET_HDR_GSO_TCPV6, VIRTIO_NET_HDR_GSO_UDP_L4]
            .map(|gso_type| gso_type | GSO_TUNNEL);
        let ecn = [VIRTIO_NET_HDR_GSO_ECN, VIRTIO_NET_HDR_GSO_UDP_L4 | VIRTIO_NET_HDR_GSO_ECN];
        for gso_type in [VIRTIO_NET_HDR_GSO_UDP, 2].into_iter().chain(ecn).chain(tunnelled) {
            assert!(!Offloads::ALL.allows(&gso(gso_type)));
        }
    }

    #[test]
    fn every_unknown_gso_type_is_refused() {
        let known = [0, 1, 3, 4, 5, 0x81, 0x84];
        for gso_type in 0..=u8::MAX {
            let header = NetHeader { gso_type, gso_size: 1, ..Default::default() };
            let expected = match known.contains(&gso_type) {
                true => Ok(()),
                false => Err(NetHeaderError::GsoType { gso_type }),
            };
            assert_eq!(header.check(60), expected);
        }
    }

    #[test]
    fn essence_keeps_only_requested_fields() {
        let all = NetHeader {
            flags: 0xff,
            gso_type: VIRTIO_NET_HDR_GSO_TCPV4,
            hdr_len: 54,
            gso_size: 1448,
            csum_start: 34,
            csum_offset: 16,
            num_buffers: 7,
        };
        assert_eq!(all.essence(), NetHeader { flags: VIRTIO_NET_HDR_F_NEEDS_CSUM, num_buffers: 0, ..all });
        let open = NetHeader { gso_type: VIRTIO_NET_HDR_GSO_NONE, ..all };
        let essence = NetHeader { flags: 1, csum_start: 34, csum_offset: 16, ..Default::default() };
        assert_eq!(open.essence(), essence);
        let nothing = NetHeader { flags: !VIRTIO_NET_HDR_F_NEEDS_CSUM, ..open };
        assert!(all.leaves_work() && open.leaves_work() && !nothing.leaves_work());
        assert_eq!(nothing.essence(), NetHeader::default());
        let gso = NetHeader { flags: 0, ..all };
        assert!(gso.leaves_work());
        assert_eq!(gso.essence(), NetHeader { csum_start: 0, csum_offset: 0, num_buffers: 0, ..gso });
    }

    proptest! {
        #[test]
        fn bytes_round_trip(bytes: [u8; HEADER_LEN]) {
            prop_assert_eq!(NetHeader::from_bytes(&bytes).to_bytes(), bytes);
        }

        /// If `check` accepts a header, `complete` succeeds, whatever a guest has written.
        #[test]
        fn checked_header_completes_checksum(bytes: [u8; HEADER_LEN], low in any::<bool>(), len in 0..200usize) {
            let mut header = NetHeader::from_bytes(&bytes);
            header.flags |= VIRTIO_NET_HDR_F_NEEDS_CSUM;
            if low {
                header.csum_start %= 256;
                header.csum_offset %= 32;
            }
            let completed =
                crate::checksum::complete(&mut vec![0; len], header.csum_start, header.csum_offset);
            if header.check(len).is_ok() {
                prop_assert_eq!(completed, Ok(()));
            }
        }
    }
}

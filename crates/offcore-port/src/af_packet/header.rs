//! The kernel's metadata about a packet: the stripped VLAN tag, and a virtio-net header.

use offcore_mem::Packet;
use offcore_wire::gso;
use offcore_wire::virtio_net::{GSO_TUNNEL, HEADER_LEN, NetHeader};

use super::ring;
use super::socket::VNET_HEADER;
use crate::DropReason;

/// Length of a VLAN tag in bytes.
pub(super) const TAG: usize = 4;
/// Number of bytes of a frame in front of its VLAN tag.
pub(super) const BEFORE_TAG: usize = 12;

/// Returns the VLAN tag that the kernel stripped from a packet, in wire format.
pub(super) fn tag(status: u32, tci: u16, tpid: u16) -> Option<[u8; TAG]> {
    if status & ring::VLAN_VALID == 0 {
        return None;
    }
    let tpid = if status & ring::VLAN_TPID_VALID != 0 { tpid } else { libc::ETH_P_8021Q as u16 };
    let ([a, b], [c, d]) = (tpid.to_be_bytes(), tci.to_be_bytes());
    Some([a, b, c, d])
}

/// Returns the header `vnet` of a frame of `len` bytes. `tagged`: the VLAN tag was inserted again.
pub(super) fn header_of(vnet: &[u8; VNET_HEADER], len: usize, tagged: bool) -> Result<NetHeader, DropReason> {
    let mut bytes = [0; HEADER_LEN];
    bytes[..VNET_HEADER].copy_from_slice(vnet); // copy-ok: the virtio-net header
    let mut header = NetHeader::from_bytes(&bytes);
    if !header.leaves_work() {
        return Ok(NetHeader::default());
    }
    header = header.essence();
    if tagged {
        // The kernel's offsets do not include the tag.
        header.csum_start =
            if header.needs_checksum() { header.csum_start.saturating_add(TAG as u16) } else { 0 };
        header.hdr_len = if header.is_gso() { header.hdr_len.saturating_add(TAG as u16) } else { 0 };
    }
    header.check(len).map_err(|_| DropReason::Malformed)?;
    Ok(header)
}

/// Sets the tunnel bit, which the kernel does not report. The frame begins with `front`. `tagged`: the offsets of the
/// header include a tag that `front` lacks.
#[cold]
pub(super) fn note_tunnel(header: &mut NetHeader, front: &[u8], tagged: bool) {
    let tag = if tagged { TAG as u16 } else { 0 };
    let untagged = NetHeader { csum_start: header.csum_start.saturating_sub(tag), ..*header };
    if gso::is_tunnelled(&untagged, front) {
        header.gso_type |= GSO_TUNNEL;
    }
}

/// Marks the packet if the header requests an offload.
pub(super) fn mark(packet: &mut Packet, header: &NetHeader) {
    if header.leaves_work() {
        // copy-ok: the virtio-net header
        packet.headroom_mut(HEADER_LEN).copy_from_slice(&header.to_bytes());
        packet.set_offload(true);
    }
}

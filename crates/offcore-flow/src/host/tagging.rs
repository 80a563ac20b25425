//! VLAN tags of a host (802.1Q): added to sent packets, and removed from received ones before they reach the stack.

use offcore_mem::{Burst, Packet, PoolCache};

use crate::bridge::tag::{retag, vlan_of};
use crate::bridge::vlan::Retag;

/// Removes the tags of `vlan`, and drops other packets. Returns the number of dropped packets.
pub(super) fn untag(vlan: u16, burst: &mut Burst, cache: &mut PoolCache) -> u64 {
    keep(burst, cache, |packet| vlan_of(packet) == Ok(Some(vlan)) && retag(packet, Retag::Pop).is_ok())
}

/// Tags packets that have no tag. A packet that the port did not accept before already has its tag. Returns the number
/// of packets without headroom, which are dropped.
pub(super) fn tag(vlan: u16, burst: &mut Burst, cache: &mut PoolCache) -> u64 {
    keep(burst, cache, |packet| match vlan_of(packet) {
        Ok(None) => retag(packet, Retag::Push(vlan)).is_ok(),
        found => found == Ok(Some(vlan)),
    })
}

fn keep(burst: &mut Burst, cache: &mut PoolCache, mut wanted: impl FnMut(&mut Packet) -> bool) -> u64 {
    let mut dropped = 0;
    let mut kept = Burst::new();
    for mut packet in burst.drain(..) {
        if wanted(&mut packet) {
            kept.push(packet);
        } else {
            dropped += 1;
            cache.free(packet);
        }
    }
    *burst = kept;
    dropped
}

#[cfg(test)]
mod tests {
    use offcore_mem::{HEADROOM, Hugepages, Pool};

    use super::*;

    const PLAIN: &[u8] = b"ddddddssssss\x08\x00payload";
    const TAGGED: &[u8] = b"ddddddssssss\x81\x00\x00\x0a\x08\x00payload";
    const OTHER: &[u8] = b"ddddddssssss\x81\x00\x00\x0b\x08\x00payload";
    const PRIORITY: &[u8] = b"ddddddssssss\x81\x00\xa0\x0a\x08\x00payload";

    fn burst(cache: &mut PoolCache, frames: &[&[u8]]) -> Burst {
        let packets = frames.iter().map(|frame| {
            let mut packet = cache.take_sized(HEADROOM, frame.len()).unwrap();
            packet.bytes_mut().copy_from_slice(frame);
            packet
        });
        packets.collect()
    }

    #[test]
    fn other_vlans_are_dropped() {
        let mut cache = Pool::new(64, 2048, Hugepages::None).unwrap().cache();
        let mut packets = burst(&mut cache, &[TAGGED, OTHER, PLAIN, PRIORITY, b"short"]);
        assert_eq!(untag(10, &mut packets, &mut cache), 3);
        assert_eq!(packets.iter().map(Packet::bytes).collect::<Vec<_>>(), [PLAIN; 2]);
        cache.free_all(packets);
    }

    #[test]
    fn packet_has_one_tag() {
        let mut cache = Pool::new(64, 2048, Hugepages::None).unwrap().cache();
        let mut packets = burst(&mut cache, &[PLAIN, PLAIN]);
        for _ in 0..2 {
            assert_eq!(tag(10, &mut packets, &mut cache), 0);
            assert_eq!(packets.iter().map(Packet::bytes).collect::<Vec<_>>(), [TAGGED; 2]);
        }
        cache.free_all(packets);
    }
}

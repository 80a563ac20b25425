//! Ethernet addresses for ports without a hardware address.

use std::sync::atomic::{AtomicU32, Ordering};

use offcore_wire::ethernet::MacAddr;

/// Returns a locally administered unicast address for the port written as `text`. It is the same in every run that has
/// the same ports in the same order. Two ports written alike have different addresses.
pub fn derived(text: &str) -> MacAddr {
    static PORTS: AtomicU32 = AtomicU32::new(0);
    let nth = PORTS.fetch_add(1, Ordering::Relaxed);
    let [a, b, c, d] = crc32c::crc32c_append(nth, text.as_bytes()).to_be_bytes();
    MacAddr([0x02, 0x0f, a, b, c, d])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_ports_have_different_macs() {
        let (a, b) = (derived("gen:size=64"), derived("gen:size=64"));
        assert!(a.is_unicast() && a.is_local());
        assert_ne!(a, b);
    }
}

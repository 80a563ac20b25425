//! The reorder ring: keeps the order of a queue whose copies complete in any order.
//!
//! One entry per packet: how many of its copies are outstanding. The counters stand close together, apart from
//! everything that is only needed when a packet is published. Packets are retired from the oldest, and only up to the
//! first that is not done.

/// A reorder ring of a power of two of entries.
#[derive(Debug)]
pub struct ReorderRing {
    outstanding: Box<[u16]>,
    mask: u32,
    /// Position of the oldest packet.
    oldest: u32,
    /// Position of the next packet.
    next: u32,
    /// Every packet before this position is done.
    done: u32,
    ordered: bool,
}

impl ReorderRing {
    /// A ring of at least `size` entries.
    ///
    /// # Panics
    /// When `size` is 0 or above 32768.
    pub fn new(size: usize) -> Self {
        let mut ring =
            Self { outstanding: Box::default(), mask: 0, oldest: 0, next: 0, done: 0, ordered: true };
        ring.resize(size);
        ring
    }

    /// Makes it a ring of at least `size` entries. It must be empty.
    ///
    /// # Panics
    /// When `size` is 0 or above 32768, or packets are in flight.
    pub fn resize(&mut self, size: usize) {
        assert!((1..=32768).contains(&size), "a reorder ring has 1 to 32768 entries, not {size}");
        assert_eq!(self.in_flight(), 0, "packets are in flight in the reorder ring");
        let size = size.next_power_of_two();
        self.outstanding = vec![0; size].into();
        self.mask = size as u32 - 1;
    }

    /// Free entries.
    #[inline(always)]
    pub fn room(&self) -> usize {
        self.outstanding.len() - self.in_flight()
    }

    /// Packets that are not yet retired.
    #[inline(always)]
    pub fn in_flight(&self) -> usize {
        self.next.wrapping_sub(self.oldest) as usize
    }

    /// Position of the oldest packet: it changes whenever one is retired.
    #[inline(always)]
    pub fn oldest(&self) -> u32 {
        self.oldest
    }

    /// The slot of the oldest packet; slots of later packets follow it, modulo the number of entries.
    #[inline(always)]
    pub fn oldest_slot(&self) -> usize {
        (self.oldest & self.mask) as usize
    }

    /// The slot that the next packet will have.
    #[inline(always)]
    pub fn next_slot(&self) -> usize {
        (self.next & self.mask) as usize
    }

    /// Number of entries minus one: slots are positions masked with it.
    #[inline(always)]
    pub fn mask(&self) -> usize {
        self.mask as usize
    }

    /// Adds a packet of `copies` outstanding copies; returns its slot. There must be room.
    #[inline(always)]
    pub fn push(&mut self, copies: u16) -> usize {
        debug_assert!(self.room() > 0, "no room in the reorder ring");
        let slot = self.next_slot();
        self.outstanding[slot] = copies;
        self.next = self.next.wrapping_add(1);
        slot
    }

    /// Notes that one copy of the packet in `slot` has completed.
    #[inline(always)]
    pub fn complete(&mut self, slot: usize) {
        let entry = &mut self.outstanding[slot & self.mask as usize];
        debug_assert!(*entry > 0 || !self.ordered, "a copy of slot {slot} completed twice");
        *entry = entry.wrapping_sub(1);
    }

    /// How many packets, from the oldest, are done. Each entry is looked at once.
    #[inline(always)]
    pub fn ready(&mut self) -> usize {
        if !self.ordered {
            self.done = self.next;
        }
        while self.done != self.next && self.outstanding[(self.done & self.mask) as usize] == 0 {
            self.done = self.done.wrapping_add(1);
        }
        self.done.wrapping_sub(self.oldest) as usize
    }

    /// Retires the oldest `packets`, which [`ReorderRing::ready`] has counted.
    #[inline(always)]
    pub fn retire(&mut self, packets: usize) {
        debug_assert!(packets <= self.done.wrapping_sub(self.oldest) as usize);
        self.oldest = self.oldest.wrapping_add(packets as u32);
    }

    /// Test switch: every packet counts as done at once. Shows that the tests notice a ring that does not work.
    #[cfg(feature = "test-switches")]
    pub fn switch_off(&mut self) {
        self.ordered = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_second_packet_is_late() {
        // Figure 7 of the vhost guide: four channels, the second packet late.
        let mut ring = ReorderRing::new(4);
        let slots: Vec<usize> = (0..4).map(|_| ring.push(1)).collect();
        for i in [0, 2, 3] {
            ring.complete(slots[i]);
        }
        assert_eq!(ring.ready(), 1);
        ring.retire(1);
        assert_eq!(ring.ready(), 0);
        ring.complete(slots[1]);
        assert_eq!(ring.ready(), 3);
    }

    proptest! {
        /// Against a plain list of counters.
        #[test]
        fn retires_in_order(ops in proptest::collection::vec((0u8..3, 0u16..4, any::<prop::sample::Index>()), 1..500)) {
            let mut ring = ReorderRing::new(8);
            let mut model: std::collections::VecDeque<(usize, u16)> = Default::default();
            for (op, copies, pick) in ops {
                match op {
                    0 if ring.room() > 0 => model.push_back((ring.push(copies), copies)),
                    1 => {
                        let open: Vec<usize> = (0..model.len()).filter(|&i| model[i].1 > 0).collect();
                        if !open.is_empty() {
                            let i = open[pick.index(open.len())];
                            ring.complete(model[i].0);
                            model[i].1 -= 1;
                        }
                    }
                    _ => {
                        let ready = model.iter().take_while(|p| p.1 == 0).count();
                        prop_assert_eq!(ring.ready(), ready);
                        let retire = ready.min(copies.into());
                        for _ in 0..retire {
                            let (slot, _) = model.pop_front().unwrap();
                            prop_assert_eq!(slot, ring.oldest_slot());
                            ring.retire(1);
                        }
                    }
                }
                prop_assert_eq!(ring.in_flight(), model.len());
            }
        }
    }
}

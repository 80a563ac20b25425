//! The reorder ring, which keeps the order of a queue whose copies complete in any order.
//!
//! It has one entry per packet: the number of outstanding copies. The counters are contiguous, separate from data that
//! is only needed when a packet is published. Packets are retired from the oldest on, up to the first incomplete one.

/// Number of entries that are checked at once.
const MANY: usize = 8;

/// A reorder ring; its number of entries is a power of two.
#[derive(Debug)]
pub struct ReorderRing {
    outstanding: Box<[u16]>,
    mask: u32,
    oldest: u32,
    next: u32,
    /// Every packet before this position is done.
    done: u32,
    /// Number of usable entries from the oldest on: all, or the entries before the next entry of a passed-over packet.
    limit: u32,
    /// Positions of passed-over packets, the oldest first.
    passed: Vec<u32>,
    ordered: bool,
}

impl ReorderRing {
    /// Creates a ring of `size` or more entries.
    ///
    /// # Panics
    /// If `size` is 0 or above 32768.
    pub fn new(size: usize) -> Self {
        let mut ring = Self {
            outstanding: Box::default(),
            mask: 0,
            oldest: 0,
            next: 0,
            done: 0,
            limit: 0,
            passed: Vec::new(),
            ordered: true,
        };
        ring.resize(size);
        ring
    }

    /// Resizes the ring to `size` or more entries. It must be empty.
    ///
    /// # Panics
    /// If `size` is 0 or above 32768, or packets are in flight.
    pub fn resize(&mut self, size: usize) {
        assert!((1..=32768).contains(&size), "a reorder ring has 1 to 32768 entries, not {size}");
        assert_eq!(self.in_flight(), 0, "packets are in flight in the reorder ring");
        let size = size.next_power_of_two();
        self.outstanding = vec![0; size].into();
        self.mask = size as u32 - 1;
        self.limit = size as u32;
    }

    /// Returns the number of free entries.
    #[inline(always)]
    pub fn room(&self) -> usize {
        self.limit.wrapping_sub(self.next.wrapping_sub(self.oldest)) as usize
    }

    /// Returns the number of packets not yet retired, without passed-over ones; 1 or more while passed-over packets
    /// exist.
    #[inline(always)]
    pub fn in_flight(&self) -> usize {
        self.next.wrapping_sub(self.oldest) as usize
    }

    /// Returns the position of the oldest packet. It changes whenever a packet is retired.
    #[inline(always)]
    pub fn oldest(&self) -> u32 {
        self.oldest
    }

    /// Returns the slot of the oldest packet. Slots of later packets follow it, modulo the number of entries.
    #[inline(always)]
    pub fn oldest_slot(&self) -> usize {
        (self.oldest & self.mask) as usize
    }

    /// Returns the slot of the next packet.
    #[inline(always)]
    pub fn next_slot(&self) -> usize {
        (self.next & self.mask) as usize
    }

    /// Returns the number of entries minus one. A slot is a position masked with it.
    #[inline(always)]
    pub fn mask(&self) -> usize {
        self.mask as usize
    }

    /// Adds a packet with `copies` outstanding copies. Returns its slot. The ring must have room.
    #[inline(always)]
    pub fn push(&mut self, copies: u16) -> usize {
        debug_assert!(self.room() > 0, "no room in the reorder ring");
        let slot = self.next_slot();
        self.outstanding[slot] = copies;
        self.next = self.next.wrapping_add(1);
        slot
    }

    /// Records that a copy of the packet in `slot` has completed.
    #[inline(always)]
    pub fn complete(&mut self, slot: usize) {
        let entry = &mut self.outstanding[slot & self.mask as usize];
        debug_assert!(*entry > 0 || !self.ordered, "a copy of slot {slot} completed twice");
        *entry = entry.wrapping_sub(1);
    }

    /// Records the completions at the start of `tokens` whose packets are consecutive (one or more). Returns their
    /// number. All these tokens belong to this ring's queue, and their low 16 bits are slots.
    ///
    /// Copies usually complete in the order of submission. In that case many counters are decremented at a time.
    #[inline(always)]
    pub fn complete_run(&mut self, tokens: &[u32]) -> usize {
        let Some(&first) = tokens.first() else { return 0 };
        let start = first as usize & 0xffff & self.mask as usize;
        let entries = &mut self.outstanding[start..];
        let n = run_length(tokens, first).min(entries.len());
        let entries = &mut entries[..n];
        debug_assert!(!self.ordered || entries.iter().all(|&n| n > 0), "a copy completed twice");
        for entry in entries {
            *entry = entry.wrapping_sub(1);
        }
        n
    }

    /// Whether the packet in `slot` has no outstanding copy.
    #[inline(always)]
    pub fn is_done(&self, slot: usize) -> bool {
        self.outstanding[slot & self.mask as usize] == 0
    }

    /// Returns the number of packets, from the oldest on, that are done. Each entry is checked only once.
    #[inline(always)]
    pub fn ready(&mut self) -> usize {
        if !self.ordered {
            self.done = self.next;
        }
        // Check several entries at a time while all of them are done.
        while self.next.wrapping_sub(self.done) >= MANY as u32
            && let at = (self.done & self.mask) as usize
            && let Some(entries) = self.outstanding.get(at..at + MANY)
            && entries.iter().fold(0, |any, &entry| any | entry) == 0
        {
            self.done = self.done.wrapping_add(MANY as u32);
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

    /// Returns the position of the next packet.
    pub fn end(&self) -> u32 {
        self.next
    }

    /// Returns the positions of passed-over packets that have not been [forgotten](Self::keep_passed), the oldest
    /// first.
    pub(crate) fn passed(&self) -> &[u32] {
        &self.passed
    }

    /// Returns the slots of all packets from the oldest on that were not passed over, and of some passed-over ones.
    pub(crate) fn slots(&self) -> impl Iterator<Item = usize> + use<> {
        let Self { oldest, next, mask, .. } = *self;
        (0..next.wrapping_sub(oldest)).map(move |index| (oldest.wrapping_add(index) & mask) as usize)
    }

    /// Forgets passed-over packets for which `keep` returns false. `keep` gets the slot and whether the packet is done.
    pub(crate) fn keep_passed(&mut self, mut keep: impl FnMut(usize, bool) -> bool) {
        let Self { outstanding, passed, mask, .. } = self;
        passed.retain(|&position| {
            let slot = (position & *mask) as usize;
            keep(slot, outstanding[slot] == 0)
        });
    }

    /// Retires the oldest packets up to the first for which `kept` returns true, by slot. If more than half of the
    /// entries are in use, kept packets are passed over until a quarter is in use. They keep their slots, which later
    /// packets skip.
    pub(crate) fn pass_over(&mut self, kept: impl Fn(usize) -> bool) {
        let entries = self.outstanding.len();
        let crowded = self.in_flight() > entries / 2 || self.room() == 0;
        while self.in_flight() > usize::from(!self.passed.is_empty()) {
            let slot = self.oldest_slot();
            if kept(slot) && !self.was_passed(slot) {
                if !crowded || self.in_flight() <= (entries / 4).max(1) {
                    break;
                }
                self.passed.push(self.oldest);
            }
            self.oldest = self.oldest.wrapping_add(1);
        }
        if self.done.wrapping_sub(self.oldest) > entries as u32 {
            self.done = self.oldest;
        }
        self.update_limit();
    }

    fn was_passed(&self, slot: usize) -> bool {
        self.passed.iter().any(|&position| (position & self.mask) as usize == slot)
    }

    /// Sets the limit of usable entries before the next slot of a passed-over packet.
    fn update_limit(&mut self) {
        let entries = self.outstanding.len();
        while !self.passed.is_empty() && self.in_flight() < entries && self.was_passed(self.next_slot()) {
            self.next = self.next.wrapping_add(1);
        }
        let ahead =
            self.passed.iter().map(|&position| (position.wrapping_sub(self.next) & self.mask) as usize);
        let free = entries - self.in_flight();
        self.limit = (self.in_flight() + ahead.min().unwrap_or(free).min(free)) as u32;
    }

    /// Test switch: every packet counts as done at once. It shows that the tests detect a broken ring.
    #[cfg(feature = "testing")]
    pub fn switch_off(&mut self) {
        self.ordered = false;
    }
}

/// Returns the number of tokens, from the first on, that are consecutive.
#[inline(always)]
fn run_length(tokens: &[u32], first: u32) -> usize {
    let (chunks, _) = tokens.as_chunks::<MANY>();
    let mut n = 0;
    for chunk in chunks {
        let expected = first.wrapping_add(n as u32);
        let wrong = (0..).zip(chunk).fold(0, |wrong, (i, &token)| wrong | (token ^ expected.wrapping_add(i)));
        if wrong != 0 {
            break;
        }
        n += MANY;
    }
    let rest = tokens[n..].iter().zip(n as u32..);
    n + rest.take_while(|&(&token, i)| token == first.wrapping_add(i)).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Compares with single completions, at every position in the ring.
        #[test]
        fn runs_are_counted_down_like_single_copies(start in 0usize..64, n in 1usize..64, cut in 0usize..64) {
            let mut rings = [ReorderRing::new(64), ReorderRing::new(64)];
            for ring in &mut rings {
                (0..start).for_each(|_| _ = ring.push(0));
                ring.ready();
                ring.retire(start);
            }
            let mut tokens: Vec<u32> = (0..n).map(|_| 7 << 16 | rings[0].push(1) as u32).collect();
            (0..n).for_each(|_| _ = rings[1].push(1));
            // One token comes too early.
            tokens.rotate_left(cut % n);
            tokens.iter().for_each(|&token| rings[1].complete(token as usize & 0xffff));
            let mut left = &tokens[..];
            while !left.is_empty() {
                let done = rings[0].complete_run(left);
                prop_assert!(done > 0);
                left = &left[done..];
            }
            prop_assert_eq!(&rings[0].outstanding, &rings[1].outstanding);
            prop_assert_eq!((rings[0].ready(), rings[1].ready()), (n, n));
        }

        /// Compares with a plain list of counters.
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

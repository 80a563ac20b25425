//! The cost for a core of a copy by an engine: submit and reap, with the parts of a data path that they need (plan,
//! reorder ring, region reference). The benchmark times the two halves.

use std::sync::Arc;

use offcore_mem::{GuestMemory, GuestRegion, Hugepages, Mapping, RegionCache};
use offcore_stats::{StageClock, tsc};

use crate::channel::Channel;
use crate::mover::{Binding, Mode, Mover};
use crate::{Begun, CopyQueue};

/// Number of copies in a burst.
pub const BURST: usize = 32;
/// Distance between two buffers in bytes.
const STRIDE: u64 = 2048;

/// Bursts of copies within one region, through one channel.
#[derive(Debug)]
pub struct SubmitReap {
    mover: Mover,
    queue: CopyQueue<()>,
    memory: Arc<GuestMemory>,
    clock: StageClock,
    len: u32,
}

/// The buffers of a [`SubmitReap`], for checks. Any thread may use them while no copy is in flight.
#[derive(Clone, Debug)]
pub struct Contents {
    memory: Arc<GuestMemory>,
    len: usize,
}

impl Contents {
    /// Writes the sources of burst `number`. Every burst and every copy has different bytes.
    pub fn write(&self, number: u64) {
        for copy in 0..BURST {
            self.mapping().write_at(copy * STRIDE as usize, &self.expected(number, copy));
        }
    }

    /// Returns the number of copies of burst `number` that have arrived completely.
    pub fn arrived(&self, number: u64) -> usize {
        let mut found = vec![0; self.len];
        let arrived = (0..BURST).filter(|&copy| {
            self.mapping().read_at((BURST + copy) * STRIDE as usize, &mut found);
            found == self.expected(number, copy)
        });
        arrived.count()
    }

    fn mapping(&self) -> &Mapping {
        self.memory.regions()[0].mapping()
    }

    fn expected(&self, number: u64, copy: usize) -> Vec<u8> {
        let first = (number.wrapping_mul(BURST as u64) + copy as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let words = (0..self.len.div_ceil(8) as u64).flat_map(|word| first.wrapping_add(word).to_ne_bytes());
        words.take(self.len).collect()
    }
}

impl SubmitReap {
    /// Creates copies of `len` bytes (at most 2048) through `channel`.
    ///
    /// # Panics
    /// If `len` is longer, or 256 KiB of memory are not available.
    pub fn new(channel: Box<dyn Channel>, len: u32) -> Self {
        assert!(u64::from(len) <= STRIDE, "copies of {len} bytes: at most {STRIDE}");
        let bytes = 2 * BURST * STRIDE as usize;
        let (mapping, _fd) =
            Mapping::memfd("submit-reap", bytes, Hugepages::Auto).expect("256 KiB of memory");
        let region = GuestRegion::new(0, 0, bytes as u64, mapping, 0).expect("the region is the mapping");
        let memory = Arc::new(GuestMemory::new(vec![region]).expect("one region overlaps nothing"));
        let mut mover = Mover::new();
        let channel = mover.add_channel(channel);
        let mut queue = CopyQueue::open(&mut mover, BURST);
        let binding = Binding::new(Mode::Offload, vec![channel]);
        queue.bind(&mut mover, &binding).expect("the channel was just added");
        Self { mover, queue, memory, clock: StageClock::private(), len }
    }

    /// Returns the buffers.
    pub fn contents(&self) -> Contents {
        Contents { memory: Arc::clone(&self.memory), len: self.len as usize }
    }

    /// Submits a burst. Returns the ticks it took. The channel must have room for the burst.
    pub fn submit(&mut self) -> u64 {
        let start = tsc::now();
        let Self { mover, queue, memory, clock, len } = self;
        let mut cache = RegionCache::empty();
        let mut plan = queue.plan(mover);
        if let Begun::Queued(mut batch) = queue.begin(mover, &mut plan) {
            assert!(batch.room() >= BURST, "the channel has no room for a burst");
            let mut list = batch.singles();
            for i in 0..BURST as u64 {
                let src = memory.translate(i * STRIDE, *len, &mut cache);
                let dst = memory.translate((BURST as u64 + i) * STRIDE, *len, &mut cache);
                if let (Some(src), Some(dst)) = (src, dst) {
                    // SAFETY: the batch has room for all copies of the burst.
                    unsafe { list.enter(src.as_ptr(), dst.as_ptr(), *len) };
                }
            }
            list.finish();
            // SAFETY: sources and destinations are disjoint halves of a region that `memory` keeps. It outlives the
            // mover: fields are dropped in order, and a mover completes its channels' copies when it is dropped.
            unsafe { batch.submit(clock) };
        }
        tsc::now() - start
    }

    /// Reaps completed copies. Returns the ticks it took and the number of copies.
    pub fn reap(&mut self) -> (u64, usize) {
        let start = tsc::now();
        self.mover.poll(&mut self.clock);
        let ready = self.queue.ready(&mut self.mover);
        let packets = ready.len();
        ready.retire(packets);
        (tsc::now() - start, packets)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::channel::CopyDevice;
    use crate::core::CoreDevice;

    #[test]
    fn a_byte_that_does_not_arrive_is_noticed() {
        let (device, mut stepper) = CoreDevice::stepped();
        let mut subject = SubmitReap::new(device.open_channel(64).unwrap(), 100);
        let contents = subject.contents();
        for number in 0..2 {
            contents.write(number);
            assert_eq!(contents.arrived(number), 0, "the last burst's bytes are not this one's");
            subject.submit();
            while stepper.step() > 0 {}
            assert_eq!(subject.reap().1, BURST);
            assert_eq!(contents.arrived(number), BURST);
        }
        let at = (BURST + 5) * STRIDE as usize + 99;
        let mut byte = [0];
        contents.mapping().read_at(at, &mut byte);
        contents.mapping().write_at(at, &[byte[0] ^ 1]);
        assert_eq!(contents.arrived(1), BURST - 1);
    }
}

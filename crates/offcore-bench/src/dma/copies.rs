//! Buffers of a measurement, lists of copies between them, and checks of every byte.

use anyhow::{Context, Result, bail, ensure};
use offcore_dma::channel::Completions;
use offcore_dma::cpu::Routine;
use offcore_dma::{Channel, CopyOp};
use offcore_mem::{Hugepages, Mapping};
use offcore_stats::SplitMix;

use crate::method::temperature::Temperature;

/// Maximum total size of all sources, and of all destinations, in bytes, for data that is not cold.
pub const WARM: usize = 16 << 20;
/// The same for cold data.
const COLD: usize = 128 << 20;
/// Number of buffers of remote data, unless they are too large.
const REMOTE: usize = 256;
/// Maximum number of consecutive polls without a completion.
const TIMEOUT: usize = 1 << 20;

/// Sources and destinations of one worker. Each round makes `depth` copies of `size` bytes.
#[derive(Debug)]
pub struct Copies {
    memory: Mapping,
    size: usize,
    depth: usize,
    /// The source of a slot is at `slot * stride`, its destination `half` bytes after it.
    stride: usize,
    half: usize,
    order: Vec<u32>,
    next: usize,
    round: u64,
    cold: bool,
    list: Vec<CopyOp>,
    completions: Box<Completions>,
    scratch: Vec<u8>,
}

impl Copies {
    /// Creates buffers for `depth` concurrent copies of `size` bytes.
    ///
    /// # Errors
    /// If memory is not available.
    pub fn new(size: usize, depth: usize, temperature: Temperature, hugepages: Hugepages) -> Result<Self> {
        let stride = size.next_multiple_of(64);
        let slots = match temperature {
            Temperature::Hot => depth,
            Temperature::Remote => REMOTE.min(WARM / stride).max(depth),
            Temperature::Cold => (COLD / stride).max(depth),
        };
        let half = slots * stride;
        let (memory, _fd) = Mapping::memfd("bench-dma", 2 * half, hugepages).context("memory for copies")?;
        let cold = temperature == Temperature::Cold;
        let mut order: Vec<u32> = (0..slots as u32).collect();
        if cold {
            SplitMix::new(0x5eed).shuffle(&mut order);
        }
        let mut copies = Self {
            memory,
            size,
            depth,
            stride,
            half,
            order,
            next: 0,
            round: 0,
            cold,
            list: Vec::with_capacity(depth),
            completions: Box::default(),
            scratch: vec![0; size],
        };
        if cold {
            // Cold data is written only once: sources written for a round would not be cold in it.
            for slot in 0..slots {
                copies.write(slot);
            }
        }
        Ok(copies)
    }

    /// Returns the number of copies per round.
    pub fn depth(&self) -> usize {
        self.depth
    }

    fn slot(&self, index: usize) -> usize {
        self.order[(self.next + index) % self.order.len()] as usize
    }

    /// Returns the content of a slot's source. It differs in every round, except for cold data.
    fn pattern(&self, slot: usize) -> u64 {
        let round = if self.cold { 0 } else { self.round };
        (slot as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ round.wrapping_mul(0xbf58_476d_1ce4_e5b9)
    }

    fn write(&mut self, slot: usize) {
        let mut word = self.pattern(slot);
        for bytes in self.scratch.chunks_mut(8) {
            word = word.wrapping_add(0x0123_4567_89ab_cdef);
            bytes.copy_from_slice(&word.to_le_bytes()[..bytes.len()]);
        }
        self.memory.write_at(slot * self.stride, &self.scratch);
    }

    /// Writes the sources of the next round. Afterwards they are in the caches of the calling core.
    pub fn prepare(&mut self) {
        self.round += 1;
        if !self.cold {
            for index in 0..self.depth {
                self.write(self.slot(index));
            }
        }
    }

    /// Describes the copies of the round. Their tokens count from 0.
    pub fn describe(&mut self) {
        let base = self.memory.base().as_ptr();
        self.list.clear();
        for index in 0..self.depth {
            let at = self.slot(index) * self.stride;
            self.list.push(CopyOp {
                src: base.wrapping_add(at),
                dst: base.wrapping_add(self.half + at),
                len: self.size as u32,
                token: index as u32,
            });
        }
    }

    /// Submits the round's copies to the channel, `batch` at a time. This part is timed.
    ///
    /// # Errors
    /// If the channel has no room for them.
    #[inline]
    pub fn submit(&self, channel: &mut dyn Channel, batch: usize) -> Result<()> {
        for from in (0..self.list.len()).step_by(batch) {
            self.submit_part(channel, from, batch)?;
        }
        Ok(())
    }

    /// Submits at most `batch` copies from `from` on.
    ///
    /// # Errors
    /// If the channel has no room for them.
    #[inline]
    pub fn submit_part(&self, channel: &mut dyn Channel, from: usize, batch: usize) -> Result<()> {
        let burst = &self.list[from..(from + batch).min(self.list.len())];
        // SAFETY: sources and destinations are disjoint parts of `memory`, which is kept until every copy is reported
        // (`reap`). The owner of the channel drops it, which ends the copies in flight, before these copies.
        let accepted = unsafe { channel.copy(burst) };
        channel.submit();
        if accepted != burst.len() {
            bail!("the channel took {accepted} of {} copies", burst.len());
        }
        Ok(())
    }

    /// Makes the first `batch` copies from `from` on with `routine`. This part is timed.
    #[inline]
    pub fn run(&self, routine: Routine, from: usize, batch: usize) {
        // SAFETY: sources and destinations are disjoint parts of `memory`, which no other code accesses in the
        // meantime.
        unsafe { routine.run(&self.list[from..(from + batch).min(self.list.len())]) };
    }

    /// Reaps the completions of the round's copies. This part is timed.
    ///
    /// # Errors
    /// If a copy failed or is not reported.
    #[inline]
    pub fn reap(&mut self, channel: &mut dyn Channel) -> Result<()> {
        let (mut reported, mut idle) = (0, 0);
        while reported < self.depth {
            self.completions.clear();
            channel.poll(&mut self.completions);
            let n = self.completions.tokens.len();
            if let Some(failed) = self.completions.failed.first() {
                bail!("a copy failed: {}", failed.failure);
            }
            (reported, idle) = (reported + n, if n > 0 { 0 } else { idle + 1 });
            ensure!(idle < TIMEOUT, "{reported} of {} copies were reported", self.depth);
        }
        Ok(())
    }

    /// Compares every byte of the round's destinations. Returns the number of copies.
    ///
    /// # Errors
    /// If a byte differs from its source.
    pub fn verify(&mut self) -> Result<u64> {
        for index in 0..self.depth {
            let slot = self.slot(index);
            let at = self.half + slot * self.stride;
            let mut word = self.pattern(slot);
            self.memory.read_at(at, &mut self.scratch);
            for (place, bytes) in self.scratch.chunks(8).enumerate() {
                word = word.wrapping_add(0x0123_4567_89ab_cdef);
                ensure!(
                    *bytes == word.to_le_bytes()[..bytes.len()],
                    "copy {index}: byte {} differs",
                    place * 8
                );
            }
            if self.cold {
                // Otherwise the next copy could not be distinguished from this one.
                self.scratch.fill(0);
                self.memory.write_at(at, &self.scratch);
            }
        }
        self.next = (self.next + self.depth) % self.order.len();
        Ok(self.depth as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use offcore_dma::CopyDevice;
    use offcore_dma::cpu::CpuDevice;

    #[test]
    fn missing_copy_is_found() {
        for temperature in Temperature::ALL {
            let mut channel = CpuDevice.open_channel(64).unwrap();
            let mut copies = Copies::new(100, 8, temperature, Hugepages::None).unwrap();
            for _ in 0..3 {
                copies.prepare();
                copies.describe();
                copies.submit(channel.as_mut(), 3).unwrap();
                copies.reap(channel.as_mut()).unwrap();
                assert_eq!(copies.verify().unwrap(), 8);
            }
            copies.prepare();
            copies.describe();
            copies.run(Routine::Plain(offcore_dma::cpu::Width::Sse2), 0, 7);
            assert!(copies.verify().unwrap_err().to_string().contains("copy 7"), "{temperature}");
        }
    }

    /// Correct bytes from an earlier round must not count as copied. Cold data is used three times.
    #[test]
    fn stale_bytes_are_no_copy() {
        let mut channel = CpuDevice.open_channel(64).unwrap();
        let (size, depth) = (1 << 20, 64);
        let passes = 2 * (COLD / size).div_ceil(depth);
        let mut copies = Copies::new(size, depth, Temperature::Cold, Hugepages::None).unwrap();
        for _ in 0..passes {
            copies.prepare();
            copies.describe();
            copies.submit(channel.as_mut(), depth).unwrap();
            copies.reap(channel.as_mut()).unwrap();
            copies.verify().unwrap();
        }
        copies.prepare();
        copies.describe();
        let error = copies.verify().unwrap_err().to_string();
        assert!(error.contains("copy 0: byte 0 differs"), "{error}");
    }

    #[test]
    fn one_wrong_byte_is_found() {
        for temperature in Temperature::ALL {
            let mut channel = CpuDevice.open_channel(64).unwrap();
            let mut copies = Copies::new(100, 8, temperature, Hugepages::None).unwrap();
            copies.prepare();
            copies.describe();
            copies.submit(channel.as_mut(), 8).unwrap();
            copies.reap(channel.as_mut()).unwrap();
            let (at, mut byte) = (copies.half + copies.slot(3) * copies.stride + 99, [0]);
            copies.memory.read_at(at, &mut byte);
            copies.memory.write_at(at, &[byte[0] ^ 0x80]);
            let error = copies.verify().unwrap_err().to_string();
            assert!(error.contains("copy 3: byte 96 differs"), "{temperature}: {error}");
        }
    }
}

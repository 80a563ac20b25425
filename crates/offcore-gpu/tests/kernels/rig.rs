//! A pool, a burst ring and a trie for the kernels, and the expected results from third-party crates.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use aho_corasick::AhoCorasick;
use offcore_gpu::kernel;
use offcore_gpu::layout::{
    Kind, MAX_BURST, PacketDescriptor, PipelineView, PoolView, QUIT, RingView, WorkView,
};
use offcore_gpu::patterns::Patterns;
use offcore_gpu::trie::Trie;
use offcore_wire::Sum;

/// Memory shared by kernels and tests, accessed only through raw pointers while a kernel runs. It is line-aligned, like
/// a page.
#[derive(Debug)]
pub(crate) struct Memory {
    base: *mut u8,
    len: usize,
}

#[derive(Clone)]
#[repr(C, align(64))]
struct Line([u8; 64]);

impl Memory {
    pub(crate) fn new(len: usize) -> Self {
        let lines = vec![Line([0; 64]); len.div_ceil(64)].into_boxed_slice();
        Self { base: Box::into_raw(lines).cast(), len }
    }

    pub(crate) fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset <= self.len);
        self.base.wrapping_add(offset)
    }

    fn write<T: Copy>(&self, offset: usize, value: T) {
        assert!(offset + size_of::<T>() <= self.len);
        // SAFETY: inside the memory, as just asserted.
        unsafe { self.at(offset).cast::<T>().write_unaligned(value) };
    }

    fn read<T: Copy>(&self, offset: usize) -> T {
        assert!(offset + size_of::<T>() <= self.len);
        // SAFETY: inside the memory, as just asserted; `T` is a number or made of numbers.
        unsafe { self.at(offset).cast::<T>().read_unaligned() }
    }

    fn lap(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4) && offset + 4 <= self.len);
        // SAFETY: the offset is inside the memory and aligned, and laps are only accessed as atomics.
        unsafe { AtomicU32::from_ptr(self.at(offset).cast()) }
    }

    /// Returns the whole memory. No kernel may be using it.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the memory is valid, and tests only read a pool while no burst is processed.
        unsafe { std::slice::from_raw_parts(self.base, self.len) }
    }

    pub(crate) fn fill(&self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.len);
        // SAFETY: the lengths match, and a caller's slice does not overlap this memory.
        unsafe { self.base.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the memory was allocated as a box of this number of lines.
        unsafe {
            drop(Box::from_raw(std::ptr::slice_from_raw_parts_mut(
                self.base.cast::<Line>(),
                self.len.div_ceil(64),
            )));
        }
    }
}

/// Reproducible pseudo-random numbers.
#[derive(Debug)]
pub(crate) struct Numbers(pub(crate) u64);

impl Numbers {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let x = self.0 ^ (self.0 >> 33);
        x.wrapping_mul(0xff51_afd7_ed55_8ccd) >> 16
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }
}

/// Returns patterns that contain and overlap each other and repeat, with letters that also occur in packets.
pub(crate) fn patterns() -> Vec<Vec<u8>> {
    let mut numbers = Numbers(7);
    let mut patterns: Vec<Vec<u8>> =
        (0..150).map(|_| (0..4 + numbers.below(9)).map(|_| letter(&mut numbers)).collect()).collect();
    for of in 0..40 {
        let longer: Vec<u8> = patterns[of].clone();
        patterns.push(longer[1..].to_vec());
        patterns.push([&longer[..], b"a"].concat());
        patterns.push(longer);
    }
    patterns.push(vec![0xff]);
    patterns.reverse();
    patterns
}

fn letter(numbers: &mut Numbers) -> u8 {
    b'a' + numbers.below(6) as u8
}

/// A pipeline and its memory.
#[derive(Debug)]
pub(crate) struct Rig {
    pub(crate) pool: Memory,
    pub(crate) chunk_shift: u32,
    /// Staging memory, and its offset from a line boundary.
    staging: Option<(Memory, usize)>,
    ring: Memory,
    answers: usize,
    slot_stride: usize,
    answer_stride: usize,
    slots: usize,
    pub(crate) work: WorkView,
    _trie: Trie,
    pub(crate) automaton: AhoCorasick,
}

// SAFETY: the memory is bytes, and the trie is only read. The tests follow the ring's protocol, which prevents
// concurrent access to the same bytes.
unsafe impl Sync for Rig {}

pub(crate) fn threads(number: u32) -> NonZeroU32 {
    NonZeroU32::new(number).expect("threads")
}

/// Serves a whole burst by one block. Returns whether there was one.
///
/// # Safety
/// As for [`kernel::share`].
pub(crate) unsafe fn burst(view: &PipelineView, threads: NonZeroU32, slot: u32, lap: u32) -> bool {
    // SAFETY: the memory of `view` is valid and exclusive, as the caller guarantees.
    unsafe { kernel::share(view, threads, slot, lap, 0, 1, &AtomicU64::new(0)) }
}

impl Rig {
    /// Creates a rig with chunks of 2048 bytes and `slots` bursts of at most `burst` packets.
    pub(crate) fn new(chunks: usize, slots: usize, burst: usize, kind: Kind) -> Self {
        Self::with_chunks(11, chunks, slots, burst, kind)
    }

    pub(crate) fn with_chunks(
        chunk_shift: u32,
        chunks: usize,
        slots: usize,
        burst: usize,
        kind: Kind,
    ) -> Self {
        let patterns = patterns();
        let trie = Trie::new(&Patterns::from_list(&patterns).expect("patterns"));
        let slot_stride = (8 + burst * 8).next_multiple_of(64);
        let answer_stride = (8 + burst * 4).next_multiple_of(64);
        let work = WorkView { kind, swap: 1, skip: 14, forced_ns: 0, trie: trie.view() };
        let pool = Memory::new(chunks << chunk_shift);
        let mut numbers = Numbers(chunks as u64);
        let content: Vec<u8> = (0..chunks << chunk_shift)
            .map(|_| {
                if numbers.below(600) == 0 { 0xff } else { letter(&mut numbers) + 2 * numbers.below(9) as u8 }
            })
            .collect();
        pool.fill(&content);
        Self {
            pool,
            chunk_shift,
            staging: None,
            ring: Memory::new(slots * (slot_stride + answer_stride)),
            answers: slots * slot_stride,
            slot_stride,
            answer_stride,
            slots,
            work,
            _trie: trie,
            automaton: AhoCorasick::new(&patterns).expect("patterns"),
        }
    }

    /// Processes packets from now on in staging memory that starts `aside` bytes, at most 64, after a line boundary, or
    /// in place with `None`.
    pub(crate) fn stage(&mut self, aside: Option<usize>) {
        self.staging = aside.map(|aside| (Memory::new(self.pool.len + 64), aside));
        self.poison();
    }

    /// Makes a byte that was not staged detectable.
    pub(crate) fn poison(&self) {
        if let Some((staging, _)) = &self.staging {
            staging.fill(&vec![POISON; staging.len]);
        }
    }

    /// Checks that staging memory, poisoned before, equals the pool at `packets` and is poison elsewhere. In the
    /// 16-byte words at the ends of a packet either is allowed. Packets do not share chunks.
    pub(crate) fn check_staging(&self, packets: &[PacketDescriptor], case: &str) {
        let Some((staging, aside)) = &self.staging else { return };
        let (pool, found, chunk_len) = (self.pool.bytes(), staging.bytes(), 1 << self.chunk_shift);
        let word = if aside.is_multiple_of(16) && chunk_len >= 16 { 16 } else { 1 };
        let mut expected = vec![POISON; found.len()];
        for packet in packets {
            let (begin, len) = (usize::from(packet.offset), usize::from(packet.len));
            let (chunk, end) = (packet.chunk as usize * chunk_len, begin + len);
            if len == 0 || end > chunk_len || chunk >= pool.len() {
                continue;
            }
            let words = aside + chunk + begin - begin % word..aside + chunk + end.next_multiple_of(word);
            expected[words.clone()].copy_from_slice(&found[words]);
            expected[aside + chunk..][begin..end].copy_from_slice(&pool[chunk..][begin..end]);
        }
        self.compare(found, &expected, *aside, &format!("{case}, staging memory"));
    }

    pub(crate) fn view(&self) -> PipelineView {
        PipelineView {
            pool: PoolView {
                base: self.pool.at(0),
                staging: self
                    .staging
                    .as_ref()
                    .map_or(std::ptr::null_mut(), |(staging, aside)| staging.at(*aside)),
                chunk_shift: self.chunk_shift,
                chunks: (self.pool.len >> self.chunk_shift) as u32,
            },
            ring: RingView {
                slots: self.ring.at(0),
                answers: self.ring.at(self.answers),
                slot_stride: self.slot_stride as u32,
                answer_stride: self.answer_stride as u32,
                count: self.slots as u32,
                reserved: 0,
            },
            work: self.work,
        }
    }

    /// Returns the slot and lap of a turn.
    pub(crate) fn place(&self, turn: u64) -> (u32, u32) {
        ((turn % self.slots as u64) as u32, (turn / self.slots as u64) as u32 + 1)
    }

    pub(crate) fn post(&self, turn: u64, packets: &[PacketDescriptor]) {
        self.post_count(turn, packets, packets.len() as u32);
    }

    /// Posts a burst with `count` in its head.
    pub(crate) fn post_count(&self, turn: u64, packets: &[PacketDescriptor], count: u32) {
        let (slot, lap) = self.place(turn);
        let at = slot as usize * self.slot_stride;
        for (i, packet) in packets.iter().enumerate() {
            self.ring.write(at + 8 + i * 8, *packet);
        }
        self.ring.write(at + 4, count);
        self.ring.lap(at).store(lap, Ordering::Release);
    }

    pub(crate) fn quit(&self, turn: u64) {
        self.post_count(turn, &[], QUIT);
    }

    /// Clears a slot's packets concurrently, like l2fwd-nv's sender.
    pub(crate) fn clear(&self, turn: u64) {
        let at = self.place(turn).0 as usize * self.slot_stride;
        for word in 1..self.slot_stride / 8 {
            self.ring.write(at + word * 8, 0u64);
        }
    }

    fn answer_at(&self, turn: u64) -> usize {
        self.answers + self.place(turn).0 as usize * self.answer_stride
    }

    pub(crate) fn is_answered(&self, turn: u64) -> bool {
        self.ring.lap(self.answer_at(turn)).load(Ordering::Acquire) == self.place(turn).1
    }

    /// Waits for an answer. Returns false after 10 seconds.
    pub(crate) fn wait(&self, turn: u64) -> bool {
        let since = Instant::now();
        while !self.is_answered(turn) {
            if since.elapsed() > Duration::from_secs(10) {
                return false;
            }
            std::thread::yield_now();
        }
        true
    }

    /// Returns the number of non-zero results, and the results of `packets` packets.
    pub(crate) fn answer(&self, turn: u64, packets: usize) -> (u32, Vec<u32>) {
        let at = self.answer_at(turn);
        (self.ring.read(at + 4), (0..packets).map(|i| self.ring.read(at + 8 + i * 4)).collect())
    }

    /// Allows a turn to be served once more.
    pub(crate) fn clear_answer(&self, turn: u64) {
        self.ring.lap(self.answer_at(turn)).store(0, Ordering::Relaxed);
    }

    /// Makes a missing result detectable.
    pub(crate) fn poison_results(&self, turn: u64) {
        let at = self.answer_at(turn);
        for word in 1..self.answer_stride / 4 {
            self.ring.write(at + word * 4, 0x5011_ed00u32 + word as u32);
        }
    }

    /// Returns `count` packets in distinct, shuffled chunks, with zero, odd, small and large lengths.
    pub(crate) fn packets(&self, count: usize, seed: u64) -> Vec<PacketDescriptor> {
        const LENGTHS: [usize; 22] =
            [0, 1, 2, 11, 12, 13, 14, 15, 16, 17, 45, 46, 47, 60, 64, 79, 128, 333, 512, 777, 1024, 1518];
        let mut numbers = Numbers(seed);
        let chunks = self.pool.len >> self.chunk_shift;
        assert!(count <= chunks);
        let mut order: Vec<u32> = (0..chunks as u32).collect();
        for i in (1..chunks).rev() {
            order.swap(i, numbers.below(i + 1));
        }
        (0..count)
            .map(|i| {
                let len = LENGTHS[(i + seed as usize) % LENGTHS.len()];
                let offset = numbers.below((1 << self.chunk_shift) - len + 1);
                PacketDescriptor { chunk: order[i], offset: offset as u16, len: len as u16 }
            })
            .collect()
    }

    /// Returns the expected pool and results, from third-party crates.
    pub(crate) fn expect(&self, pool: &mut [u8], packets: &[PacketDescriptor]) -> Vec<u32> {
        packets.iter().map(|packet| self.expect_one(pool, packet)).collect()
    }

    /// Returns the pool after a single burst, and its results.
    pub(crate) fn after(&self, packets: &[PacketDescriptor]) -> (Vec<u8>, Vec<u32>) {
        let mut pool = self.pool.bytes().to_vec();
        let results = self.expect(&mut pool, packets);
        (pool, results)
    }

    fn expect_one(&self, pool: &mut [u8], packet: &PacketDescriptor) -> u32 {
        let (chunk_len, begin, len) =
            (1 << self.chunk_shift, usize::from(packet.offset), usize::from(packet.len));
        let Some(chunk) = pool.chunks_mut(chunk_len).nth(packet.chunk as usize) else { return 0 };
        let Some(bytes) = chunk.get_mut(begin..begin + len).filter(|bytes| !bytes.is_empty()) else {
            return 0;
        };
        if self.work.swap != 0 && len >= 12 {
            bytes[..12].rotate_left(6);
        }
        let payload = bytes.get(self.work.skip as usize..).unwrap_or_default();
        match self.work.kind {
            Kind::Nothing => 0,
            Kind::Crc32c => crc32c::crc32c(payload),
            Kind::Checksum => u32::from(Sum::of(payload).checksum()),
            Kind::Match => self
                .automaton
                .find_overlapping_iter(payload)
                .map(|found| found.pattern().as_u32() + 1)
                .min()
                .unwrap_or(0),
        }
    }

    /// Checks the answer of a turn's burst.
    pub(crate) fn check(&self, turn: u64, packets: usize, expected: &[u32], case: &str) {
        assert!(self.is_answered(turn), "{case}: no answer");
        let (hits, results) = self.answer(turn, packets);
        if let Some(i) = (0..packets).find(|&i| results[i] != expected[i]) {
            panic!("{case}: packet {i}: result {:#x}, expected {:#x}", results[i], expected[i]);
        }
        assert_eq!(hits as usize, expected.iter().filter(|result| **result != 0).count(), "{case}: hits");
    }

    /// Checks every byte of the pool.
    pub(crate) fn check_pool(&self, expected: &[u8], case: &str) {
        self.compare(self.pool.bytes(), expected, 0, case);
    }

    /// Compares memory whose first chunk begins at offset `aside`.
    fn compare(&self, found: &[u8], expected: &[u8], aside: usize, case: &str) {
        if found == expected {
            return;
        }
        let i =
            found.iter().zip(expected).position(|(found, expected)| found != expected).expect("they differ");
        let (chunk, at) = (
            i.wrapping_sub(aside) >> self.chunk_shift,
            i.wrapping_sub(aside) & ((1 << self.chunk_shift) - 1),
        );
        panic!("{case}: byte {at} of chunk {chunk}: {:#x}, expected {:#x}", found[i], expected[i]);
    }
}

/// Poison of unwritten staging memory.
const POISON: u8 = 0xa5;

/// No staging memory; aligned like a device's; unaligned, which copies byte by byte.
pub(crate) const STAGINGS: [Option<usize>; 3] = [None, Some(0), Some(3)];
pub(crate) const KINDS: [Kind; 4] = [Kind::Nothing, Kind::Crc32c, Kind::Checksum, Kind::Match];
pub(crate) const COUNTS: [usize; 12] = [0, 1, 2, 7, 31, 32, 33, 256, 257, 1000, 1024, MAX_BURST];

//! The copy loops that use the caches, for each vector width.

use core::arch::x86_64::{
    __m128i, __m256i, __m512i, _mm_loadu_si128, _mm_storeu_si128, _mm256_loadu_si256, _mm256_storeu_si256,
    _mm512_loadu_si512, _mm512_storeu_si512,
};

use offcore_ring::prefetch;

use crate::channel::CopyOp;

/// Distance in operations between the copy in progress and the prefetch of a source into the second-level cache, which
/// holds four packets without evictions.
pub(super) const SOURCE_AHEAD: usize = 4;
/// The same for the destination. Lines prefetched for writing are placed in the first-level cache, and the buffers of a
/// pool start in only a few of its sets. If prefetched much earlier, they would be evicted before they are written.
const DESTINATION_AHEAD: usize = 1;
/// Number of bytes to prefetch per operation. Beyond that, the hardware has recognised the stream.
const FETCHED: usize = 2048;
/// Copies of this length or more use the C library's copy, which is faster because it bypasses the caches.
const LONG: usize = 256 * 1024;

macro_rules! loops {
    ($plain:ident, $ahead:ident, $register:ty, $feature:literal) => {
        /// # Safety
        /// As for [`super::copy_burst`], and the CPU has the feature.
        #[target_feature(enable = $feature)]
        pub(super) unsafe fn $plain(ops: &[CopyOp]) {
            for op in ops {
                // SAFETY: the caller keeps source and destination of each copy valid for its length during the call;
                // the feature is enabled here.
                unsafe { copy::<$register>(op.src, op.dst, op.len as usize) };
            }
        }

        /// # Safety
        /// As for [`super::copy_burst`], and the CPU has the feature.
        #[target_feature(enable = $feature)]
        pub(super) unsafe fn $ahead(ops: &[CopyOp]) {
            for op in ops.iter().take(SOURCE_AHEAD) {
                fetch_source(op);
            }
            for op in ops.iter().take(DESTINATION_AHEAD) {
                fetch_destination(op);
            }
            for (i, op) in ops.iter().enumerate() {
                if let Some(later) = ops.get(i + DESTINATION_AHEAD) {
                    fetch_destination(later);
                }
                if let Some(later) = ops.get(i + SOURCE_AHEAD) {
                    fetch_source(later);
                }
                // SAFETY: the caller keeps source and destination of each copy valid for its length during the call;
                // the feature is enabled here.
                unsafe { copy::<$register>(op.src, op.dst, op.len as usize) };
            }
        }
    };
}

loops!(sse2, sse2_ahead, __m128i, "sse2");
loops!(avx2, avx2_ahead, __m256i, "avx2");
loops!(avx512, avx512_ahead, __m512i, "avx512f");

#[inline(always)]
pub(super) fn fetch_source(op: &CopyOp) {
    for_each_line(op.src, op.len, prefetch::read_l2);
}

#[inline(always)]
fn fetch_destination(op: &CopyOp) {
    for_each_line(op.dst, op.len, prefetch::write);
}

/// Calls `fetch` with an address in each line of the first [`FETCHED`] bytes.
#[inline(always)]
fn for_each_line(first: *const u8, len: u32, fetch: fn(*const u8)) {
    // Start at the beginning of the first line, so that the last line is included for any alignment.
    let end = first.addr().wrapping_add((len as usize).min(FETCHED));
    let mut line = first.wrapping_sub(first.addr() % prefetch::LINE);
    // Two lines per iteration halve the number of comparisons.
    while line.addr() + prefetch::LINE < end {
        fetch(line);
        fetch(line.wrapping_add(prefetch::LINE));
        line = line.wrapping_add(2 * prefetch::LINE);
    }
    if line.addr() < end {
        fetch(line);
    }
}

/// A vector register. Its functions are inlined into functions that have the feature enabled.
pub(super) trait Vector: Copy {
    const BYTES: usize = size_of::<Self>();
    unsafe fn load(from: *const u8) -> Self;
    unsafe fn store(self, to: *mut u8);
}

macro_rules! vector {
    ($register:ty, $load:ident, $store:ident) => {
        impl Vector for $register {
            #[inline(always)]
            unsafe fn load(from: *const u8) -> Self {
                // SAFETY: the bytes are readable, as the caller guarantees; the load accepts any alignment.
                unsafe { $load(from.cast()) }
            }
            #[inline(always)]
            unsafe fn store(self, to: *mut u8) {
                // SAFETY: the bytes are writable, as the caller guarantees; the store accepts any alignment.
                unsafe { $store(to.cast(), self) }
            }
        }
    };
}

vector!(__m128i, _mm_loadu_si128, _mm_storeu_si128);
vector!(__m256i, _mm256_loadu_si256, _mm256_storeu_si256);
vector!(__m512i, _mm512_loadu_si512, _mm512_storeu_si512);

macro_rules! scalar {
    ($int:ty) => {
        impl Vector for $int {
            #[inline(always)]
            unsafe fn load(from: *const u8) -> Self {
                // SAFETY: the bytes are readable, as the caller guarantees.
                unsafe { from.cast::<Self>().read_unaligned() }
            }
            #[inline(always)]
            unsafe fn store(self, to: *mut u8) {
                // SAFETY: the bytes are writable, as the caller guarantees.
                unsafe { to.cast::<Self>().write_unaligned(self) }
            }
        }
    };
}

scalar!(u64);
scalar!(u32);
scalar!(u16);

/// Copies `len` bytes; the ranges must not overlap. Packet sizes are copied with vectors. The last vector overlaps the
/// previous one, so no length needs a loop over bytes.
///
/// # Safety
/// `len` bytes are readable at `src` and writable at `dst`, and the CPU has `V`.
#[inline(always)]
pub(super) unsafe fn copy<V: Vector>(src: *const u8, dst: *mut u8, len: usize) {
    if len < V::BYTES {
        // SAFETY: `src` has `len` readable and `dst` has `len` writable bytes, as the caller guarantees.
        return unsafe { copy_short(src, dst, len) };
    }
    if len <= 4 * V::BYTES {
        // SAFETY: `src` has `len` readable and `dst` has `len` writable bytes, as the caller guarantees; the CPU has
        // `V`.
        return unsafe { copy_few::<V>(src, dst, len) };
    }
    if len >= LONG {
        // SAFETY: `src` has `len` readable and `dst` has `len` writable bytes that do not overlap, as the caller
        // guarantees.
        return unsafe { std::ptr::copy_nonoverlapping(src, dst, len) };
    }
    let last = len - V::BYTES;
    let mut at = 0;
    // At least one byte is left for the last vector, which would otherwise store its line a second time.
    while at + 4 * V::BYTES < len {
        // SAFETY: the four vectors end before `len`.
        unsafe {
            let (a, b) = (V::load(src.add(at)), V::load(src.add(at + V::BYTES)));
            let (c, d) = (V::load(src.add(at + 2 * V::BYTES)), V::load(src.add(at + 3 * V::BYTES)));
            a.store(dst.add(at));
            b.store(dst.add(at + V::BYTES));
            c.store(dst.add(at + 2 * V::BYTES));
            d.store(dst.add(at + 3 * V::BYTES));
        }
        at += 4 * V::BYTES;
    }
    while at < last {
        // SAFETY: `at` is less than `len - V::BYTES`.
        unsafe { V::load(src.add(at)).store(dst.add(at)) };
        at += V::BYTES;
    }
    // SAFETY: this vector ends at `len`.
    unsafe { V::load(src.add(last)).store(dst.add(last)) };
}

/// Copies one to four vectors without a loop.
///
/// # Safety
/// As for [`copy`], and `len` is one to four vectors.
#[inline(always)]
unsafe fn copy_few<V: Vector>(src: *const u8, dst: *mut u8, len: usize) {
    let last = len - V::BYTES;
    // SAFETY: each vector is within the `len` bytes: if these are more than two vectors, two from either end also fit.
    unsafe {
        if len <= 2 * V::BYTES {
            return ends::<V>(src, dst, len);
        }
        let (a, b) = (V::load(src), V::load(src.add(V::BYTES)));
        let (c, d) = (V::load(src.add(last - V::BYTES)), V::load(src.add(last)));
        a.store(dst);
        b.store(dst.add(V::BYTES));
        c.store(dst.add(last - V::BYTES));
        d.store(dst.add(last));
    }
}

/// Copies fewer than 64 bytes.
///
/// # Safety
/// As for [`copy`].
#[inline(always)]
unsafe fn copy_short(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: the pieces of each arm cover at most `len` bytes: two pieces of half to all of it, from either end.
    unsafe {
        match len {
            32.. => {
                ends::<__m128i>(src, dst, 32);
                ends::<__m128i>(src.add(len - 32), dst.add(len - 32), 32);
            }
            16.. => ends::<__m128i>(src, dst, len),
            8.. => ends::<u64>(src, dst, len),
            4.. => ends::<u32>(src, dst, len),
            2.. => ends::<u16>(src, dst, len),
            1 => *dst = *src,
            0 => {}
        }
    }
}

/// Copies `len` bytes with two registers, one at either end.
///
/// # Safety
/// As for [`copy`], and `len` is one to two registers.
#[inline(always)]
unsafe fn ends<V: Vector>(src: *const u8, dst: *mut u8, len: usize) {
    debug_assert!((V::BYTES..=2 * V::BYTES).contains(&len));
    let last = len - V::BYTES;
    // SAFETY: both registers are within the `len` bytes.
    unsafe {
        let (head, tail) = (V::load(src), V::load(src.add(last)));
        head.store(dst);
        tail.store(dst.add(last));
    }
}

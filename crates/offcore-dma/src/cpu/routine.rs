//! The copy routines by name, and their availability on this CPU.

use core::arch::x86_64::{__cpuid, __cpuid_count};
use std::fmt;
use std::sync::OnceLock;

use super::choice::RoutineKind;
use super::{kernel, stream};
use crate::channel::CopyOp;

/// The width of the registers that a routine uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Width {
    /// 16 bytes, on every x86-64 CPU.
    Sse2,
    /// 32 bytes.
    Avx2,
    /// 64 bytes, a cache line.
    Avx512,
}

/// A way of copying the packets of a burst.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Routine {
    /// Makes the copies one after the other without prefetching. It is the fastest if all lines are in the core's own
    /// caches.
    Plain(Width),
    /// Prefetches the lines of later copies, the source's for reading and the destination's for writing, while it makes
    /// earlier ones.
    Ahead(Width),
    /// Prefetches the source's lines, and writes the destination's whole lines with non-temporal stores. No destination
    /// line is fetched from another core or from memory first, but the next reader must read it from memory.
    NonTemporal(Width),
    /// The same with direct stores: MOVDIR64B moves a line from memory to memory in a single instruction.
    Direct,
}

/// A copy loop.
pub(super) type CopyLoop = unsafe fn(&[CopyOp]);

impl Routine {
    /// All routines.
    pub const ALL: [Self; 10] = [
        Self::Plain(Width::Sse2),
        Self::Plain(Width::Avx2),
        Self::Plain(Width::Avx512),
        Self::Ahead(Width::Sse2),
        Self::Ahead(Width::Avx2),
        Self::Ahead(Width::Avx512),
        Self::NonTemporal(Width::Sse2),
        Self::NonTemporal(Width::Avx2),
        Self::NonTemporal(Width::Avx512),
        Self::Direct,
    ];

    /// Returns the name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plain(Width::Sse2) => "plain-sse2",
            Self::Plain(Width::Avx2) => "plain-avx2",
            Self::Plain(Width::Avx512) => "plain-avx512",
            Self::Ahead(Width::Sse2) => "ahead-sse2",
            Self::Ahead(Width::Avx2) => "ahead-avx2",
            Self::Ahead(Width::Avx512) => "ahead-avx512",
            Self::NonTemporal(Width::Sse2) => "non-temporal-sse2",
            Self::NonTemporal(Width::Avx2) => "non-temporal-avx2",
            Self::NonTemporal(Width::Avx512) => "non-temporal-avx512",
            Self::Direct => "direct",
        }
    }

    /// Whether this CPU and the operating system support the routine's instructions.
    pub fn is_available(self) -> bool {
        match self {
            Self::Plain(width) | Self::Ahead(width) | Self::NonTemporal(width) => width.is_available(),
            Self::Direct => has_movdir64b(),
        }
    }

    /// Makes every copy of the list, in order. When it returns, the copies' stores are ordered before the caller's
    /// later stores, like ordinary stores.
    ///
    /// # Panics
    /// If the routine [is not available](Self::is_available).
    ///
    /// # Safety
    /// As for [`super::copy_burst`].
    pub unsafe fn run(self, ops: &[CopyOp]) {
        assert!(self.is_available(), "this CPU has not the instructions of the copy routine {self}");
        // SAFETY: the caller keeps source and destination of each copy valid for its length during the call; the CPU
        // has the instructions.
        unsafe { (self.burst())(ops) }
    }

    /// Returns the routine of this kind that a [`super::Copier`] uses on this CPU.
    pub(super) fn of(kind: RoutineKind) -> Self {
        match kind {
            RoutineKind::Plain => Self::Plain(Cpu::this().width),
            RoutineKind::Ahead => Self::Ahead(Cpu::this().width),
            RoutineKind::NonTemporal => Self::NonTemporal(Cpu::this().width),
            RoutineKind::Direct => Self::Direct,
        }
    }

    /// Returns the loop itself. Call it only if the routine is available.
    pub(super) const fn burst(self) -> CopyLoop {
        match self {
            Self::Plain(Width::Sse2) => kernel::sse2,
            Self::Plain(Width::Avx2) => kernel::avx2,
            Self::Plain(Width::Avx512) => kernel::avx512,
            Self::Ahead(Width::Sse2) => kernel::sse2_ahead,
            Self::Ahead(Width::Avx2) => kernel::avx2_ahead,
            Self::Ahead(Width::Avx512) => kernel::avx512_ahead,
            Self::NonTemporal(Width::Sse2) => stream::sse2,
            Self::NonTemporal(Width::Avx2) => stream::avx2,
            Self::NonTemporal(Width::Avx512) => stream::avx512,
            Self::Direct => stream::direct,
        }
    }
}

impl fmt::Display for Routine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Width {
    fn is_available(self) -> bool {
        match self {
            Self::Sse2 => true,
            Self::Avx2 => is_x86_feature_detected!("avx2"),
            Self::Avx512 => is_x86_feature_detected!("avx512f"),
        }
    }

    /// Returns the widest vectors with which this CPU copies well.
    fn best() -> Self {
        if Self::Avx512.is_available() && !halves_wide_stores() {
            Self::Avx512
        } else if Self::Avx2.is_available() {
            Self::Avx2
        } else {
            Self::Sse2
        }
    }
}

/// Properties of this CPU for the choice of routines, determined once per process.
#[derive(Debug)]
pub(super) struct Cpu {
    width: Width,
    /// The `ahead` loop with that width.
    pub(super) ahead: CopyLoop,
    pub(super) has_direct: bool,
}

impl Cpu {
    #[inline(always)]
    pub(super) fn this() -> &'static Self {
        static THIS: OnceLock<Cpu> = OnceLock::new();
        THIS.get_or_init(|| {
            let width = Width::best();
            Self { width, ahead: Routine::Ahead(width).burst(), has_direct: has_movdir64b() }
        })
    }
}

/// Whether the CPU splits every 64-byte store into two. AMD CPUs up to Zen 4 do; they copy packets with 32-byte vectors
/// up to twice as fast.
fn halves_wide_stores() -> bool {
    const ZEN_5: u32 = 0x1a;
    let (vendor, version) = (__cpuid(0), __cpuid(1));
    let family = (version.eax >> 8 & 0xf) + (version.eax >> 20 & 0xff);
    vendor.ebx == u32::from_le_bytes(*b"Auth") && family < ZEN_5
}

/// CPUID leaf 7, ECX bit 28 (Intel SDM, volume 2A). The standard library cannot detect this feature.
fn has_movdir64b() -> bool {
    const LEAF: u32 = 7;
    __cpuid(0).eax >= LEAF && __cpuid_count(LEAF, 0).ecx & 1 << 28 != 0
}

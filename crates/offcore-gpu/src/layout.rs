//! Memory layout shared by CPU and device: the Rust side of `kernels/layout.h`, which documents it.

use crate::patterns::MAX_PATTERNS;

/// Maximum packets per burst.
pub const MAX_BURST: usize = 4096;
/// Replaces the number of packets: no more bursts follow.
pub const QUIT: u32 = u32::MAX;
/// Packets in the cache line of a slot's head.
pub const PACKETS_IN_HEAD_LINE: usize = 7;

/// A packet: `len` bytes at `offset` in chunk `chunk` of the pool. With `len` 0 the device skips it and its result is
/// 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct PacketDescriptor {
    pub chunk: u32,
    pub offset: u16,
    pub len: u16,
}

/// The head of a slot; its packets follow. `lap` is written last and read first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct SlotHead {
    /// Lap of the burst in the slot, from 1 on.
    pub lap: u32,
    /// Number of packets, at most [`MAX_BURST`], or [`QUIT`].
    pub count: u32,
}

/// The head of an answer; a 32-bit result per packet follows. `lap` is written last and read first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct AnswerHead {
    /// Lap of the answered burst.
    pub lap: u32,
    /// Packets whose result is not 0.
    pub hits: u32,
}

/// The packet pool as a device sees it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct PoolView {
    /// Device address of the first chunk.
    pub base: *mut u8,
    /// Device address of a staging area of the same size, to which packets are copied for processing. If it is null,
    /// packets are processed in place.
    pub staging: *mut u8,
    /// A chunk has 1 << `chunk_shift` bytes.
    pub chunk_shift: u32,
    pub chunks: u32,
}

/// A burst ring as a device sees it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RingView {
    /// Device address of the first slot.
    pub slots: *const u8,
    /// Device address of the first answer.
    pub answers: *mut u8,
    /// Bytes from one slot to the next, a multiple of 64.
    pub slot_stride: u32,
    /// Bytes from one answer to the next, a multiple of 64.
    pub answer_stride: u32,
    /// Number of slots and of answers; a power of two.
    pub count: u32,
    /// Must be 0.
    pub reserved: u32,
}

/// The work on a packet, which determines its result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u32)]
pub enum Kind {
    /// None; the result is 0.
    #[default]
    Nothing = 0,
    /// CRC-32C of the payload (RFC 3720, appendix B.4).
    Crc32c = 1,
    /// The Internet checksum of the payload (RFC 1071), as it stands in a header.
    Checksum = 2,
    /// Number of the lowest pattern that occurs in the payload, plus one; 0: none does.
    Match = 3,
}

/// Words of [`TrieView::pairs`].
pub const PAIRS: usize = 2048;
/// In a next state of [`TrieView`]: a pattern ends there.
pub const ENDS: u32 = 1 << 31;

/// The failure link of a state: its longest proper suffix that is also a state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Link {
    /// The suffix; 0 if it has fewer than two bytes.
    pub state: u32,
    /// Bytes of the suffix; 1 if `state` is 0.
    pub len: u16,
    /// Number of the lowest pattern that ends at the linking state; 0 without one.
    pub lowest: u16,
}

/// Patterns as an Aho-Corasick automaton, as a device sees it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct TrieView {
    /// The hash table of edges: key (state << 8 | byte) | next << 32, where next is the state, and [`ENDS`] if a
    /// pattern ends there; 0 is an empty entry.
    pub edges: *const u64,
    /// By state. States of fewer than two bytes use only `lowest`.
    pub links: *const Link,
    /// 256 entries: next after this first byte, or 0.
    pub first: *const u32,
    /// [`PAIRS`] words: bit a << 8 | b is set if a walk that starts with the bytes a, b finds anything.
    pub pairs: *const u32,
    /// Entries of the hash table minus one; their number is a power of two.
    pub mask: u32,
    /// Number of states, at most 1 << 24.
    pub states: u32,
    pub longest: u32,
    /// Must be 0.
    pub reserved: u32,
}

impl TrieView {
    /// No patterns.
    pub const EMPTY: Self = Self {
        edges: std::ptr::null(),
        links: std::ptr::null(),
        first: std::ptr::null(),
        pairs: std::ptr::null(),
        mask: 0,
        states: 0,
        longest: 0,
        reserved: 0,
    };
}

/// The work on every packet.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct WorkView {
    pub kind: Kind,
    /// 1: swap the MAC addresses.
    pub swap: u32,
    /// Bytes before the payload.
    pub skip: u32,
    /// Minimum nanoseconds per packet; 0: none.
    pub forced_ns: u32,
    /// The patterns of [`Kind::Match`].
    pub trie: TrieView,
}

/// A kernel's parameters.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct PipelineView {
    pub pool: PoolView,
    pub ring: RingView,
    pub work: WorkView,
}

const _: () = {
    assert!(size_of::<PacketDescriptor>() == 8 && size_of::<SlotHead>() == 8 && size_of::<AnswerHead>() == 8);
    assert!(size_of::<SlotHead>() + PACKETS_IN_HEAD_LINE * size_of::<PacketDescriptor>() == 64);
    assert!(size_of::<PoolView>() == 24 && size_of::<RingView>() == 32 && size_of::<TrieView>() == 48);
    assert!(size_of::<Link>() == 8 && MAX_PATTERNS <= 1 << u16::BITS);
    assert!(size_of::<WorkView>() == 64 && size_of::<PipelineView>() == 120);
};

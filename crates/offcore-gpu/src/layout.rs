//! What the CPU and a device share, byte by byte: the Rust side of `kernels/layout.h`, which says what it means.

/// Packets of a burst, at most.
pub const MAX_BURST: usize = 4096;
/// In place of a number of packets: no more bursts will come.
pub const QUIT: u32 = u32::MAX;
/// Packets in the same line as the head of their slot.
pub const PACKETS_IN_HEAD_LINE: usize = 7;

/// One packet: `len` bytes from `offset` on in chunk `chunk` of the pool. `len` 0: not for the device, its result is 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct PacketDescriptor {
    /// Index of the packet's chunk.
    pub chunk: u32,
    /// Where it begins in its chunk, in bytes.
    pub offset: u16,
    /// Bytes of it.
    pub len: u16,
}

/// The head of a slot; its packets are behind it. `lap` is written last and read first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct SlotHead {
    /// The lap of the burst in the slot, from 1 on.
    pub lap: u32,
    /// Its packets, at most [`MAX_BURST`], or [`QUIT`].
    pub count: u32,
}

/// The head of an answer; a result of 32 bits for each packet is behind it. `lap` is written last and read first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct AnswerHead {
    /// The lap of the burst that has been answered.
    pub lap: u32,
    /// Packets whose result is not 0.
    pub hits: u32,
}

/// The packet pool as a device sees it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct PoolView {
    /// Address of the first chunk, at the device.
    pub base: *mut u8,
    /// Address, at the device, of as much memory of its own, where packets are worked on; null: they are worked on where
    /// they are.
    pub staging: *mut u8,
    /// A chunk has 1 << `chunk_shift` bytes.
    pub chunk_shift: u32,
    /// Chunks.
    pub chunks: u32,
}

/// A burst ring as a device sees it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RingView {
    /// Address of the first slot, at the device.
    pub slots: *const u8,
    /// Address of the first answer, at the device.
    pub answers: *mut u8,
    /// Bytes from one slot to the next, a multiple of 64.
    pub slot_stride: u32,
    /// Bytes from one answer to the next, a multiple of 64.
    pub answer_stride: u32,
    /// Slots, and answers; a power of two.
    pub count: u32,
    /// 0.
    pub reserved: u32,
}

/// What is done with each packet: its result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u32)]
pub enum Kind {
    /// Nothing; 0.
    #[default]
    Nothing = 0,
    /// CRC-32C of the payload (RFC 3720, appendix B.4).
    Crc32c = 1,
    /// The Internet checksum of the payload (RFC 1071), as it stands in a header.
    Checksum = 2,
    /// Number of the lowest pattern that occurs in the payload, plus one; 0: none does.
    Match = 3,
}

/// Patterns as a trie without failure links, as a device sees it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct TrieView {
    /// The hash table of edges: key (state << 8 | byte) | next state << 32; 0 is an empty entry.
    pub edges: *const u64,
    /// By state: 1 + number of the lowest pattern that ends there, or 0.
    pub lowest: *const u32,
    /// 256 entries: the state after this first byte, or 0.
    pub first: *const u32,
    /// Entries of the hash table less one; their number is a power of two.
    pub mask: u32,
    /// States, at most 1 << 24.
    pub states: u32,
    /// Bytes of the longest pattern.
    pub longest: u32,
    /// 0.
    pub reserved: u32,
}

impl TrieView {
    /// No patterns.
    pub const EMPTY: Self = Self {
        edges: std::ptr::null(),
        lowest: std::ptr::null(),
        first: std::ptr::null(),
        mask: 0,
        states: 0,
        longest: 0,
        reserved: 0,
    };
}

/// What is done with every packet.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct WorkView {
    /// What its result is.
    pub kind: Kind,
    /// 1: its MAC addresses change places.
    pub swap: u32,
    /// Bytes of a packet before its payload.
    pub skip: u32,
    /// Nanoseconds that each packet takes at least; 0: as long as it does.
    pub forced_ns: u32,
    /// The patterns of [`Kind::Match`].
    pub trie: TrieView,
}

/// All that a kernel is told.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct PipelineView {
    /// Where packets are.
    pub pool: PoolView,
    /// Where bursts come from.
    pub ring: RingView,
    /// What is done with them.
    pub work: WorkView,
}

const _: () = {
    assert!(size_of::<PacketDescriptor>() == 8 && size_of::<SlotHead>() == 8 && size_of::<AnswerHead>() == 8);
    assert!(size_of::<SlotHead>() + PACKETS_IN_HEAD_LINE * size_of::<PacketDescriptor>() == 64);
    assert!(size_of::<PoolView>() == 24 && size_of::<RingView>() == 32 && size_of::<TrieView>() == 40);
    assert!(size_of::<WorkView>() == 56 && size_of::<PipelineView>() == 112);
};

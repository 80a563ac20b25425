// Memory layout shared by CPU and device: the packet pool, a pipeline's burst ring, and the work. src/layout.rs defines
// the same for Rust; both sides assert sizes and offsets.
//
// A burst ring is two arrays. The CPU writes slots and the device reads them; the device writes answers and the CPU
// reads them. Each side polls memory that the other writes once per burst. The burst of turn t (0, 1, 2, ...) uses slot
// and answer t % slots, and its lap is t / slots + 1, never 0. A slot holds a burst when its lap is the expected one;
// an answer is complete when its lap is that of the burst. Neither is ever cleared, so a burst costs one write in each
// direction.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// Maximum packets per burst.
#define OG_MAX_BURST 4096u
// In place of a packet count: no more bursts follow, and the kernel that waits for this slot ends.
#define OG_QUIT 0xffffffffu

// A packet: `len` bytes at `offset` in chunk `chunk` of the pool. With `len` 0 the device skips it and its result is 0.
struct og_packet {
	u32 chunk;
	u16 offset;
	u16 len;
};

// The head of a slot: 8 bytes; the first seven packets follow in the same 64-byte line. `lap` is written last (release)
// and read first (acquire).
struct og_slot {
	u32 lap;
	u32 count; // packets, at most OG_MAX_BURST, or OG_QUIT
};

// The head of an answer; a 32-bit result per packet follows. `lap` is written last (release, system scope) and read
// first (acquire).
struct og_answer {
	u32 lap;
	u32 hits; // packets whose result is not 0
};

// The packet pool: contiguous chunks of 1 << chunk_shift bytes. `staging`, unless null, is device memory of the same
// size: packets are copied to the same offset there and processed there, and changes are written back.
struct og_pool {
	u8 *base;
	u8 *staging;
	u32 chunk_shift;
	u32 chunks;
};

// A burst ring. `slot_stride` and `answer_stride` are multiples of 64.
struct og_ring {
	const u8 *slots;
	u8 *answers;
	u32 slot_stride;
	u32 answer_stride;
	u32 count; // slots, and answers; a power of two
	u32 reserved;
};

// The work, which determines a packet's result.
enum og_kind {
	OG_NOTHING = 0,  // result 0
	OG_CRC32C = 1,   // of the payload, RFC 3720 B.4: initial value and final exclusive or are all ones
	OG_CHECKSUM = 2, // the Internet checksum of the payload, RFC 1071, as it stands in a header (complemented)
	OG_MATCH = 3,    // number of the lowest pattern that occurs in the payload, plus one; 0: none does
};

// Words of og_trie's `pairs`: a bit for every two bytes.
#define OG_PAIRS 2048u
// In an edge's or a first byte's next state: a pattern ends there.
#define OG_ENDS 0x80000000u

// The failure link of a state: its longest proper suffix that is also a state. A suffix of fewer than two bytes counts as
// none: `state` is then 0 and `len` 1, and a new walk starts at the last byte.
struct og_link {
	u32 state;
	u16 len;    // bytes of the suffix
	u16 lowest; // number of the lowest pattern that ends at the linking state; valid if OG_ENDS is set for it
};

// The patterns of OG_MATCH as an Aho-Corasick automaton. A state is a prefix of a pattern; state 0 is the root, the empty
// prefix. A pattern ends at a state if it is a suffix of that prefix. Edges are in a hash table of `mask` + 1
// entries (a power of two) with linear probing from og_hash(state << 8 | byte) & mask. An entry is key | next << 32, where
// next is the state, and OG_ENDS if a pattern ends there. An entry of 0 is empty: no edge leads to the root.
struct og_trie {
	const u64 *edges;
	const struct og_link *links; // by state; states of fewer than two bytes use only `lowest`
	const u32 *first;   // 256 entries: next after this first byte, or 0
	const u32 *pairs;   // bit a << 8 | b, from each word's lowest on: whether a walk that starts with a, b finds anything
	u32 mask;
	u32 states;         // at most 1 << 24
	u32 longest;        // bytes of the longest pattern
	u32 reserved;
};

static inline
#ifdef __CUDACC__
__host__ __device__
#endif
u32 og_hash(u32 key)
{
	// The finalizer of MurmurHash3.
	key ^= key >> 16;
	key *= 0x85ebca6bu;
	key ^= key >> 13;
	key *= 0xc2b2ae35u;
	return key ^ key >> 16;
}

struct og_work {
	u32 kind;      // og_kind
	u32 swap;      // not 0: swap the MAC addresses of packets of at least 12 bytes
	u32 skip;      // bytes before the payload; a shorter packet has an empty payload
	u32 forced_ns; // not 0: minimum time per packet; the threads of a block wait at the same time
	struct og_trie trie; // of OG_MATCH
};

// A kernel's parameters, passed by value.
struct og_pipeline {
	struct og_pool pool;
	struct og_ring ring;
	struct og_work work;
};

static_assert(sizeof(og_packet) == 8 && sizeof(og_slot) == 8 && sizeof(og_answer) == 8, "heads and packets");
static_assert(sizeof(og_pool) == 24 && sizeof(og_ring) == 32 && sizeof(og_trie) == 48, "pool, ring and trie");
static_assert(sizeof(og_link) == 8, "links");
static_assert(sizeof(og_work) == 64 && sizeof(og_pipeline) == 120, "work and pipeline");

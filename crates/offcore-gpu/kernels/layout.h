// What the CPU and a device share, byte by byte: the packet pool, a pipeline's burst ring, and the work to be done.
// src/layout.rs has the same for Rust; both sides assert sizes and offsets.
//
// A burst ring is two arrays. Slots are written by the CPU and read by the device; answers are written by the device and
// read by the CPU: each side polls memory that the other one writes once a burst. A burst of turn t (0, 1, 2, ...) is in
// slot and answer t % slots. Its lap is t / slots + 1, never 0: a slot whose lap is the one that is waited for holds a
// burst, an answer whose lap is the burst's is complete. Nobody clears either, so a burst takes one write each way.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// Packets of a burst, at most.
#define OG_MAX_BURST 4096u
// In place of a number of packets: no more bursts will come, whoever waits for this slot ends.
#define OG_QUIT 0xffffffffu

// One packet: `len` bytes from `offset` on in chunk `chunk` of the pool. `len` 0: not for the device, its result is 0.
struct og_packet {
	u32 chunk;
	u16 offset;
	u16 len;
};

// The head of a slot: 8 bytes, with the first seven packets behind it in the same 64-byte line. `lap` is written last
// (release) and read first (acquire).
struct og_slot {
	u32 lap;
	u32 count; // packets, at most OG_MAX_BURST, or OG_QUIT
};

// The head of an answer; a result of 32 bits for each packet is behind it. `lap` is written last (release, to the whole
// system) and read first (acquire).
struct og_answer {
	u32 lap;
	u32 hits; // packets whose result is not 0
};

// The packet pool: chunks of 1 << chunk_shift bytes one after the other. `staging`, where it is not null, is as much memory
// of the device's own: packets are copied there, to the same place, and worked on there. What is changed goes back.
struct og_pool {
	u8 *base;
	u8 *staging;
	u32 chunk_shift;
	u32 chunks;
};

// A burst ring. Slots are `slot_stride` bytes apart, answers `answer_stride`, both multiples of 64.
struct og_ring {
	const u8 *slots;
	u8 *answers;
	u32 slot_stride;
	u32 answer_stride;
	u32 count; // slots, and answers; a power of two
	u32 reserved;
};

// What is done with each packet. Exactly one of these is a packet's result.
enum og_kind {
	OG_NOTHING = 0,  // result 0
	OG_CRC32C = 1,   // of the payload, RFC 3720 B.4: initial value and final exclusive or are all ones
	OG_CHECKSUM = 2, // the Internet checksum of the payload, RFC 1071, as it stands in a header (complemented)
	OG_MATCH = 3,    // number of the lowest pattern that occurs in the payload, plus one; 0: none does
};

// The patterns of OG_MATCH as a trie without failure links: a walk begins at every byte, and ends where no edge leads on.
// State 0 is the root. Edges are in a hash table of `mask` + 1 entries (a power of two) with linear probing: the entry of
// (state, byte) is looked for from og_hash(state << 8 | byte) & mask on, until its key or an empty entry is met. An entry
// is key | next state << 32, and 0 is an empty one, which is no edge's, since no edge leads to the root.
struct og_trie {
	const u64 *edges;
	const u32 *lowest;  // by state: 1 + number of the lowest pattern that ends there, or 0
	const u32 *first;   // 256 entries: the state after this first byte, or 0
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
	u32 swap;      // not 0: destination and source MAC address of packets of at least 12 bytes change places
	u32 skip;      // bytes of a packet before its payload; shorter packets have an empty one
	u32 forced_ns; // not 0: time that each packet takes at least, all packets of a block of lanes at once
	struct og_trie trie; // of OG_MATCH
};

// All that a kernel is told: passed by value.
struct og_pipeline {
	struct og_pool pool;
	struct og_ring ring;
	struct og_work work;
};

static_assert(sizeof(og_packet) == 8 && sizeof(og_slot) == 8 && sizeof(og_answer) == 8, "heads and packets");
static_assert(sizeof(og_pool) == 24 && sizeof(og_ring) == 32 && sizeof(og_trie) == 40, "pool, ring and trie");
static_assert(sizeof(og_work) == 56 && sizeof(og_pipeline) == 112, "work and pipeline");

// Work on one packet. A payload is cut into parts, one per thread, whose partial results are combined in any order, so
// that a small burst keeps as many threads busy as a large one. Pool, slots and tables are read by plain loads: with
// `const __restrict__` the compiler could use the non-coherent cache.
#pragma once
#include "group.h"

namespace og {

// Whether a packet lies within its chunk, and the chunk within the pool.
OG_FN bool inside(const og_pool &pool, const og_packet &packet)
{
	return packet.chunk < pool.chunks && (u64)packet.offset + packet.len <= 1ull << pool.chunk_shift;
}

// Offset of a packet in the pool and in staging memory.
OG_FN u64 place_of(const og_pool &pool, const og_packet &packet)
{
	return ((u64)packet.chunk << pool.chunk_shift) + packet.offset;
}

// Offset of word `index` of those that the packet has bytes in, or OG_NOWHERE after the last. `size` is a power of two
// and at most a chunk. The words lie within the packet's chunk, since a chunk begins and ends at a word boundary.
OG_FN u64 word_of(const og_pool &pool, const og_packet &packet, u32 size, u32 index)
{
	u32 at = (packet.offset & ~(size - 1)) + index * size;
	if (packet.len == 0 || at >= (u32)packet.offset + packet.len)
		return OG_NOWHERE;
	return ((u64)packet.chunk << pool.chunk_shift) + at;
}

// Swaps destination and source address: rotates the first twelve bytes by six.
OG_FN void swap_addresses(u8 *bytes)
{
#ifdef __CUDACC__
	// Three words if aligned: each store to host memory may be a separate write on the bus.
	if (((u64)bytes & 3) == 0) {
		u32 *words = (u32 *)bytes;
		u32 a = words[0], b = words[1], c = words[2];
		words[0] = b >> 16 | c << 16;
		words[1] = c >> 16 | a << 16;
		words[2] = a >> 16 | b << 16;
		return;
	}
#endif
	u8 destination[6];
	for (u32 i = 0; i < 6; i++)
		destination[i] = bytes[i];
	for (u32 i = 0; i < 6; i++)
		bytes[i] = bytes[6 + i];
	for (u32 i = 0; i < 6; i++)
		bytes[6 + i] = destination[i];
}

// Copies the first twelve bytes back from staging memory.
OG_FN void write_back(const u8 *from, u8 *to)
{
#ifdef __CUDACC__
	if ((((u64)from | (u64)to) & 3) == 0) {
		const u32 *words = (const u32 *)from;
		u32 a = words[0], b = words[1], c = words[2];
		((u32 *)to)[0] = a;
		((u32 *)to)[1] = b;
		((u32 *)to)[2] = c;
		return;
	}
#endif
	for (u32 i = 0; i < 12; i++)
		to[i] = from[i];
}

// CRC-32C, reflected: bit 31 is the coefficient of x^0.

#define OG_CRC32C_POLYNOMIAL 0x82f63b78u
// Minimum length of a part: moving its remainder into place costs about as much.
#define OG_CRC32C_PART 32u

// The CRC of each 4-bit value, then x^(8 * 2^i) modulo the polynomial for i from 0 to 15: multiplying by it appends 2^i
// zero bytes.
#define OG_CRC32C_PASS 16u
#define OG_CRC32C_TABLE 32u
alignas(16) OG_TABLE u32 crc32c_table[OG_CRC32C_TABLE] = {
	0x00000000, 0x105ec76f, 0x20bd8ede, 0x30e349b1, 0x417b1dbc, 0x5125dad3, 0x61c69362, 0x7198540d,
	0x82f63b78, 0x92a8fc17, 0xa24bb5a6, 0xb21572c9, 0xc38d26c4, 0xd3d3e1ab, 0xe330a81a, 0xf36e6f75,

	0x00800000, 0x00008000, 0x82f63b78, 0x6ea2d55c, 0x18b8ea18, 0x510ac59a, 0xb82be955, 0xb8fdb1e7,
	0x88e56f72, 0x74c360a4, 0xe4172b16, 0x0d65762a, 0x35d73a62, 0x28461564, 0xbf455269, 0xe2ea32dc,
};

OG_FN u32 crc32c_bytes(const u32 *table, u32 state, const u8 *bytes, u32 len)
{
	for (u32 i = 0; i < len; i++) {
		state ^= bytes[i];
		state = state >> 4 ^ table[state & 15];
		state = state >> 4 ^ table[state & 15];
	}
	return state;
}

// Polynomial multiplication modulo the CRC polynomial.
OG_FN u32 crc32c_product(u32 a, u32 b)
{
	u32 product = 0;
	for (u32 i = 0; i < 32; i++) {
		product ^= b & (0u - (a >> 31));
		a <<= 1;
		b = b >> 1 ^ (OG_CRC32C_POLYNOMIAL & (0u - (b & 1)));
	}
	return product;
}

// The CRC state after `zeroes` (at most 65535) zero bytes.
OG_FN u32 crc32c_after(const u32 *table, u32 state, u32 zeroes)
{
	for (u32 i = 0; zeroes; i++, zeroes >>= 1)
		if (zeroes & 1)
			state = crc32c_product(state, table[OG_CRC32C_PASS + i]);
	return state;
}

// A part's contribution: the exclusive or of all parts is the CRC state of the whole, since CRC is linear. Parts are
// consecutive pieces; the first one starts from the initial value. `table` is crc32c_table or a copy.
OG_FN u32 crc32c_part(const u32 *table, const u8 *bytes, u32 len, u32 part, u32 parts)
{
	u32 piece = (len + parts - 1) / parts;
	if (piece < OG_CRC32C_PART)
		piece = OG_CRC32C_PART;
	u32 begin = part * piece;
	if (begin >= len)
		return part ? 0 : ~0u;
	u32 end = begin + piece < len ? begin + piece : len;
	return crc32c_after(table, crc32c_bytes(table, part ? 0 : ~0u, bytes + begin, end - begin), len - end);
}

// The sum of every `parts`th 16-bit word in network order; a trailing odd byte is padded with zero. A packet has at
// most 32768 words, so the sum of all parts fits in 32 bits.
OG_FN u32 checksum_part(const u8 *bytes, u32 len, u32 part, u32 parts)
{
	u32 sum = 0;
	for (u32 i = 2 * part; i < len; i += 2 * parts)
		sum += (u32)bytes[i] << 8 | (i + 1 < len ? bytes[i + 1] : 0u);
	return sum;
}

// RFC 1071: folds the carries and complements.
OG_FN u32 checksum_of(u32 sum)
{
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return ~sum & 0xffff;
}

// Not a pattern number.
#define OG_NO_PATTERN 0xffffffffu

// The next state, with OG_ENDS if a pattern ends there, or 0 if there is no edge. `Trie` is og_trie, or the type of a test.
template <class Trie> OG_FN u32 next_state(const Trie &trie, u32 state, u8 byte)
{
	u32 key = state << 8 | byte;
	for (u32 i = og_hash(key) & trie.mask;; i = (i + 1) & trie.mask) {
		u64 edge = trie.edges[i];
		if (edge == 0)
			return 0;
		if ((u32)edge == key)
			return (u32)(edge >> 32);
	}
}

// The first byte in `at`..`end` where a walk must start, or `end`. A walk always starts at the payload's last byte, since no
// pair begins there. `pairs` are the trie's or a copy.
OG_FN u32 next_begin(const u32 *pairs, const u8 *bytes, u32 len, u32 at, u32 end)
{
	u32 pair = at < end ? bytes[at] : 0;
	for (; at < end && at + 1 < len; at++) {
		pair = (pair << 8 | bytes[at + 1]) & 0xffff;
		if (pairs[pair >> 5] >> (pair & 31) & 1)
			break;
	}
	return at;
}

// The lowest pattern that starts in a part; parts are consecutive pieces. The state of a walk is the bytes from `begin` to
// `at`. An edge moves `at` forward, a missing edge moves `begin` forward, and neither moves back: for any packet, a thread
// looks up at most two edges per byte. A walk leaves its part only while `begin` is in the part, by less than the longest
// pattern.
template <class Trie>
OG_FN u32 match_part(const Trie &trie, const u32 *pairs, const u8 *bytes, u32 len, u32 part, u32 parts)
{
	u32 lowest = OG_NO_PATTERN;
	const u32 piece = (len + parts - 1) / parts;
	u32 begin = part * piece;
	const u32 end = begin + piece < len ? begin + piece : len;
	if (trie.states == 0)
		return lowest;
	// The search for the start of a walk is a loop of its own: the threads of a warp then walk at the same time.
	while (lowest != 0 && (begin = next_begin(pairs, bytes, len, begin, end)) < end) {
		u32 at = begin + 1, state = trie.first[bytes[begin]];
		do {
			if (state & OG_ENDS) {
				state &= ~OG_ENDS;
				const u32 ends = trie.links[state].lowest;
				lowest = ends < lowest ? ends : lowest;
			}
			// All patterns that end in the payload have been found.
			if (at >= len)
				return lowest;
			if (const u32 next = next_state(trie, state, bytes[at])) {
				state = next;
				at++;
			} else if (at - begin <= 2) {
				// The link of a state of one or two bytes is the root: nearly all walks end here.
				state = 0;
				begin++;
			} else {
				const og_link link = trie.links[state];
				state = link.state;
				begin = at - link.len;
			}
		} while (state != 0 && begin < end);
	}
	return lowest;
}

// The neutral element of the partial results.
OG_FN u32 partial_of_nothing(u32 kind)
{
	return kind == OG_MATCH ? OG_NO_PATTERN : 0;
}

OG_FN u32 result_of(u32 kind, u32 partial)
{
	switch (kind) {
	case OG_CRC32C:
		return ~partial;
	case OG_CHECKSUM:
		return checksum_of(partial);
	case OG_MATCH:
		return partial + 1;
	default:
		return 0;
	}
}

} // namespace og

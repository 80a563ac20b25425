// What is done with one packet. Work on a payload is cut into parts, one a lane, whose partial results are put together
// in any order: so a small burst keeps as many lanes busy as a large one. What is in the pool, in slots and in tables
// is read by plain loads: `const __restrict__` would let the compiler read them through a cache that is not coherent.
#pragma once
#include "group.h"

namespace og {

// Whether a packet is inside its chunk, and its chunk inside the pool.
OG_FN bool inside(const og_pool &pool, const og_packet &packet)
{
	return packet.chunk < pool.chunks && (u64)packet.offset + packet.len <= 1ull << pool.chunk_shift;
}

// Where a packet begins in the pool, and in staging memory.
OG_FN u64 place_of(const og_pool &pool, const og_packet &packet)
{
	return ((u64)packet.chunk << pool.chunk_shift) + packet.offset;
}

// Where word `index` of the words of `size` bytes, a power of two and no more than a chunk, is that a packet has bytes
// in; OG_NOWHERE behind the last one. They are in the packet's chunk, since that begins and ends with a word.
OG_FN u64 word_of(const og_pool &pool, const og_packet &packet, u32 size, u32 index)
{
	u32 at = (packet.offset & ~(size - 1)) + index * size;
	if (packet.len == 0 || at >= (u32)packet.offset + packet.len)
		return OG_NOWHERE;
	return ((u64)packet.chunk << pool.chunk_shift) + at;
}

// Destination and source address change places: the first twelve bytes turn by six.
OG_FN void swap_addresses(u8 *bytes)
{
#ifdef __CUDACC__
	// Three words where they are aligned: every store to the CPU's memory may be a write of its own on the bus.
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

// The first twelve bytes go from where they were changed to where the packet is.
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

// CRC-32C, bits reflected: bit 31 of a register is the coefficient of x^0.

#define OG_CRC32C_POLYNOMIAL 0x82f63b78u
// A part is at least so many bytes long: moving its register to its place costs as much.
#define OG_CRC32C_PART 32u

// Four bits of the register, run through.
OG_TABLE u32 crc32c_nibble[16] = {
	0x00000000, 0x105ec76f, 0x20bd8ede, 0x30e349b1, 0x417b1dbc, 0x5125dad3, 0x61c69362, 0x7198540d,
	0x82f63b78, 0x92a8fc17, 0xa24bb5a6, 0xb21572c9, 0xc38d26c4, 0xd3d3e1ab, 0xe330a81a, 0xf36e6f75,
};

// x^(8 * 2^i) modulo the polynomial: what a register is multiplied with to pass 2^i bytes of zeroes.
OG_TABLE u32 crc32c_pass[16] = {
	0x00800000, 0x00008000, 0x82f63b78, 0x6ea2d55c, 0x18b8ea18, 0x510ac59a, 0xb82be955, 0xb8fdb1e7,
	0x88e56f72, 0x74c360a4, 0xe4172b16, 0x0d65762a, 0x35d73a62, 0x28461564, 0xbf455269, 0xe2ea32dc,
};

OG_FN u32 crc32c_bytes(u32 state, const u8 *bytes, u32 len)
{
	for (u32 i = 0; i < len; i++) {
		state ^= bytes[i];
		state = state >> 4 ^ crc32c_nibble[state & 15];
		state = state >> 4 ^ crc32c_nibble[state & 15];
	}
	return state;
}

// The product of two polynomials, modulo the polynomial.
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

// The register after `zeroes` more bytes of zeroes, at most 65535.
OG_FN u32 crc32c_after(u32 state, u32 zeroes)
{
	for (u32 i = 0; zeroes; i++, zeroes >>= 1)
		if (zeroes & 1)
			state = crc32c_product(state, crc32c_pass[i]);
	return state;
}

// A part's share of the register of the whole: the exclusive or of all is the register behind the last byte, since the
// register is linear in its start and in every byte. Parts are pieces one after the other; the first has the initial
// value.
OG_FN u32 crc32c_part(const u8 *bytes, u32 len, u32 part, u32 parts)
{
	u32 piece = (len + parts - 1) / parts;
	if (piece < OG_CRC32C_PART)
		piece = OG_CRC32C_PART;
	u32 begin = part * piece;
	if (begin >= len)
		return part ? 0 : ~0u;
	u32 end = begin + piece < len ? begin + piece : len;
	return crc32c_after(crc32c_bytes(part ? 0 : ~0u, bytes + begin, end - begin), len - end);
}

// The sum of every `parts`th word of 16 bits, in network order, an odd byte at the end with a zero behind it. A packet
// has at most 32768 of them, so that the sum of all parts is less than 2^32.
OG_FN u32 checksum_part(const u8 *bytes, u32 len, u32 part, u32 parts)
{
	u32 sum = 0;
	for (u32 i = 2 * part; i < len; i += 2 * parts)
		sum += (u32)bytes[i] << 8 | (i + 1 < len ? bytes[i + 1] : 0u);
	return sum;
}

// RFC 1071: carries come in again at the other end, then the complement.
OG_FN u32 checksum_of(u32 sum)
{
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return ~sum & 0xffff;
}

// No pattern's number.
#define OG_NO_PATTERN 0xffffffffu

// Where an edge leads, 0 where there is none.
OG_FN u32 next_state(const og_trie &trie, u32 state, u8 byte)
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

// The lowest pattern that begins at one of every `parts`th byte.
OG_FN u32 match_part(const og_trie &trie, const u8 *bytes, u32 len, u32 part, u32 parts)
{
	u32 lowest = OG_NO_PATTERN;
	if (trie.states == 0)
		return lowest;
	for (u32 begin = part; begin < len && lowest != 0; begin += parts) {
		u32 state = trie.first[bytes[begin]];
		for (u32 at = begin + 1; state != 0; at++) {
			// Where none ends this is 0 - 1, which is no pattern's.
			u32 ends = trie.lowest[state] - 1;
			if (ends < lowest)
				lowest = ends;
			if (at >= len)
				break;
			state = next_state(trie, state, bytes[at]);
		}
	}
	return lowest;
}

// What a partial result is before the first part, and after the last.
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

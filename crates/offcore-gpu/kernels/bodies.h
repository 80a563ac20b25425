// Kernel bodies, for any type of group (group.h): one burst by one or several groups, bursts until told to quit, and
// one burst of a graph that is launched before its bursts arrive.
//
// The bodies validate what they read: a packet count that the slot has no room for is answered as an empty burst, and a
// packet outside its chunk is skipped with result 0.
#pragma once
#include "group.h"
#include "packet.h"

// Packets per group when several groups share a burst.
#define OG_SHARE 256u

namespace og {

// Addresses of a burst's slot and answer.
struct Burst {
	const og_slot *slot;
	const og_packet *packets;
	og_answer *answer;
	u32 *results;
};

OG_FN Burst burst_in(const og_ring &ring, u32 slot)
{
	u32 index = slot & (ring.count - 1);
	const u8 *from = ring.slots + (u64)index * ring.slot_stride;
	u8 *to = ring.answers + (u64)index * ring.answer_stride;
	return Burst{(const og_slot *)from, (const og_packet *)(from + sizeof(og_slot)), (og_answer *)to,
	             (u32 *)(to + sizeof(og_answer))};
}

// Slot and lap of a turn.
struct Place {
	u32 slot;
	u32 lap;
};

OG_FN Place place_of(const og_ring &ring, u64 turn)
{
	// Same as src/ring.rs: laps wrap at 2^32 and skip 0.
	return Place{(u32)turn & (ring.count - 1), (u32)(turn / ring.count % 0xffffffffu) + 1};
}

// The number of descriptors that a slot has room for.
OG_FN u32 packets_in_slot(const og_ring &ring)
{
	return (ring.slot_stride - (u32)sizeof(og_slot)) / (u32)sizeof(og_packet);
}

// The number of packets for a head's `count`: 0 if slot or answer has no room for as many.
OG_FN u32 packets_of(const og_ring &ring, u32 count)
{
	u32 answered = (ring.answer_stride - (u32)sizeof(og_answer)) / (u32)sizeof(u32);
	return count <= OG_MAX_BURST && count <= packets_in_slot(ring) && count <= answered ? count : 0;
}

// log2 of the parts that a packet is cut into, at least `least`: otherwise idle threads take a part of a packet.
template <class Group> OG_FN u32 parts_shift(const Group &g, u32 packets, u32 least)
{
	u32 shift = least;
	while (shift < 10 && (u64)packets << (shift + 1) <= g.threads())
		shift++;
	return shift;
}

// Copies a tile's packets to staging memory. 1 << shift adjacent threads share a packet and copy adjacent words.
template <class Word, class Group> OG_FN void copy_tile(Group &g, const og_pool &pool, u32 count, u32 shift)
{
	g.template copy<Word>(count << shift, pool.base, pool.staging, [&](u32 i, u32 round) {
		const u32 part = i & ((1u << shift) - 1);
		return word_of(pool, g.scratch.packets[i >> shift], sizeof(Word), (round << shift) + part);
	});
}

// Copies a tile's packets to staging memory, and swaps their addresses both there and in the pool. The descriptors are
// in scratch memory, each written by the thread that `each` assigns.
template <class Group> OG_FN void stage(Group &g, const og_pipeline &p, u32 count)
{
	const og_pool &pool = p.pool;
	u32 long_ones = 0;
	g.each(count, [&](u32 i) {
		const og_packet packet = g.scratch.packets[i];
		long_ones |= packet.offset % sizeof(Wide) + packet.len > sizeof(Wide) << Group::SHORT_SHARED_BY;
	});
	u32 least = Group::SHORT_SHARED_BY;
	if (g.any(long_ones))
		least = Group::SHARED_BY;
	const u32 shift = parts_shift(g, count, least);
	if ((((u64)pool.base | (u64)pool.staging | 1ull << pool.chunk_shift) & (sizeof(Wide) - 1)) == 0)
		copy_tile<Wide>(g, pool, count, shift);
	else
		copy_tile<u8>(g, pool, count, shift);
	// Other threads read a packet's descriptor and copied its addresses; the next tile overwrites the descriptor.
	g.sync();
	if (p.work.swap) {
		g.each(count, [&](u32 i) {
			const og_packet packet = g.scratch.packets[i];
			if (packet.len < 12)
				return;
			u8 *bytes = pool.staging + place_of(pool, packet);
			swap_addresses(bytes);
			write_back(bytes, pool.base + place_of(pool, packet));
		});
	}
}

// Copies the table of the work to scratch memory, if the group does that; seen behind the next barrier. Once a kernel: a
// table is read until its end. Tables are aligned, and as long as some `Wide`s.
template <class Group> OG_FN void fetch_table(Group &g, const og_work &work)
{
	if (!Group::COPIES_TABLES)
		return;
	u32 words = 0;
	const u32 *from = nullptr;
	if (work.kind == OG_CRC32C)
		from = crc32c_table, words = OG_CRC32C_TABLE;
	else if (work.kind == OG_MATCH && work.trie.states)
		from = work.trie.pairs, words = OG_PAIRS;
	g.each(words * (u32)sizeof(u32) / (u32)sizeof(Wide), [&](u32 i) {
		((Wide *)g.scratch.table)[i] = ((const Wide *)from)[i];
	});
}

// Works on packets from..to of a burst: swap, results, then the rest of the forced time. The first `loaded` descriptors
// are in scratch memory already. Returns how many results of this thread are not 0.
template <class Group>
OG_FN u32 work_on(Group &g, const og_pipeline &p, const Burst &burst, u32 from, u32 to, u32 loaded)
{
	const u32 kind = p.work.kind, skip = p.work.skip;
	const u64 begun = p.work.forced_ns ? g.now() : 0;
	Scratch &scratch = g.scratch;
	const bool staged = p.pool.staging != nullptr;
	const bool swap_here = p.work.swap && !staged;
	u8 *const memory = staged ? p.pool.staging : p.pool.base;
	u32 hits = 0;

	for (u32 tile = from; tile < to; tile += OG_TILE, loaded = 0) {
		const u32 count = to - tile < OG_TILE ? to - tile : OG_TILE;

		g.each(count, [&](u32 i) {
			og_packet packet = i < loaded ? scratch.packets[i] : g.load(burst.packets + tile + i);
			if (!inside(p.pool, packet))
				packet.len = 0;
			if (swap_here && packet.len >= 12)
				swap_addresses(memory + place_of(p.pool, packet));
			scratch.packets[i] = packet;
			scratch.partial[i] = partial_of_nothing(kind);
		});

		if (staged)
			stage(g, p, count);
		if (kind != OG_NOTHING) {
			g.sync();
			const u32 shift = parts_shift(g, count, Group::SHARED_BY), parts = 1u << shift;
			g.each(count << shift, [&](u32 i) {
				const og_packet packet = scratch.packets[i >> shift];
				if (packet.len == 0)
					return;
				u32 &partial = scratch.partial[i >> shift];
				const u32 part = i & (parts - 1);
				const u32 len = packet.len > skip ? packet.len - skip : 0;
				const u8 *payload = memory + place_of(p.pool, packet) + (packet.len - len);
				switch (kind) {
				case OG_CRC32C:
					g.exclusive_or(partial, crc32c_part(g.near(crc32c_table), payload, len, part, parts));
					break;
				case OG_CHECKSUM:
					g.add(partial, checksum_part(payload, len, part, parts));
					break;
				case OG_MATCH: {
					u32 lowest = match_part(p.work.trie, g.near(p.work.trie.pairs), payload, len, part, parts);
					if (lowest != OG_NO_PATTERN)
						g.minimum(partial, lowest);
					break;
				}
				default:
					break;
				}
			});
			g.sync();
		}

		// No sync: the same thread handles packet i above, here and in the next tile.
		g.each(count, [&](u32 i) {
			u32 result = scratch.packets[i].len ? result_of(kind, scratch.partial[i]) : 0;
			burst.results[tile + i] = result;
			hits += result != 0;
		});
	}

	if (p.work.forced_ns) {
		// Threads wait in parallel, the packets of one thread in sequence.
		u64 rounds = ((u64)(to - from) + g.threads() - 1) / g.threads();
		g.wait_until(begun + rounds * p.work.forced_ns);
	}
	return hits;
}

// Completes a burst; called by thread 0, after a barrier behind all threads' writes, which its release then covers.
template <class Group> OG_FN void answer(Group &g, const Burst &burst, u32 lap, u32 hits)
{
	burst.answer->hits = hits;
	g.release(&burst.answer->lap, lap);
}

template <class Group> OG_FN void serve(Group &g, const og_pipeline &p, const Burst &burst, u32 lap, u32 count)
{
	u32 hits = g.sum(work_on(g, p, burst, 0, packets_of(p.ring, count), 0));
	if (g.first())
		answer(g, burst, lap, hits);
}

// The count of a slot that must hold a burst already, at every thread; OG_QUIT if it does not. Reads the descriptors
// of the first `packets` packets from `from` on into scratch memory at the same time, which saves the time of a read.
template <class Group> OG_FN u32 count_of(Group &g, const Burst &burst, u32 lap, u32 from, u32 packets)
{
	Head head = {};
	if (g.first())
		head = g.peek(burst.slot);
	g.each(packets, [&](u32 i) { g.scratch.packets[i] = g.load(burst.packets + from + i); });
	return g.broadcast(head.lap == lap ? head.count : OG_QUIT);
}

// Waits until the slot's lap is `lap`; returns its count at every thread.
template <class Group> OG_FN u32 wait_for(Group &g, const Burst &burst, u32 lap)
{
	u32 count = 0;
	if (g.first()) {
		Head head = g.poll(burst.slot);
		for (u32 tries = 0; head.lap != lap; tries += tries != ~0u) {
			g.relax(tries);
			head = g.poll(burst.slot);
		}
		count = head.count;
	}
	return g.broadcast(count);
}

// Serves the share of group `block` of `blocks` in one burst, which must be there already. The last group to finish
// answers. There need be at most one group per OG_SHARE packets; a group without packets still takes part in deciding
// which is last, and so do all groups of an empty burst. `tally` is a word common to the groups of the burst, 0 before
// and after: groups that have finished in its upper half, non-zero results in its lower one. Returns false and does
// nothing if there is no burst.
template <class Group>
OG_FN bool share(Group &g, const og_pipeline &p, u32 slot, u32 lap, u32 block, u32 blocks, u64 *tally)
{
	Burst burst = burst_in(p.ring, slot);
	const u64 first = (u64)block * OG_SHARE;
	const u32 room = packets_in_slot(p.ring), begin = first < room ? (u32)first : room;
	const u32 loaded = room - begin < OG_SHARE ? room - begin : OG_SHARE;
	const u32 count = count_of(g, burst, lap, begin, loaded);
	if (count == OG_QUIT)
		return false;
	const u32 packets = packets_of(p.ring, count);
	if (first < packets)
		fetch_table(g, p.work);
	u32 hits = 0;
	for (u64 from = first; from < packets; from += (u64)blocks * OG_SHARE) {
		u64 to = from + OG_SHARE;
		hits += work_on(g, p, burst, (u32)from, to < packets ? (u32)to : packets, from == first ? loaded : 0);
	}
	hits = g.sum(hits);
	if (!g.first())
		return true;
	if (blocks > 1) {
		const u64 before = g.tally(tally, 1ull << 32 | hits);
		if ((u32)(before >> 32) + 1 < blocks)
			return true;
		*tally = 0;
		hits += (u32)before;
	}
	answer(g, burst, lap, hits);
	return true;
}

// Serves every `step`th burst from turn `from_turn` + `first` on, until OG_QUIT. Groups 0 to step - 1 serve all turns.
template <class Group>
OG_FN void persistent(Group &g, const og_pipeline &p, u32 first, u32 step, u64 from_turn)
{
	fetch_table(g, p.work);
	for (u64 turn = from_turn + first;; turn += step) {
		const Place place = place_of(p.ring, turn);
		Burst burst = burst_in(p.ring, place.slot);
		u32 count = wait_for(g, burst, place.lap);
		if (count == OG_QUIT)
			return;
		serve(g, p, burst, place.lap, count);
	}
}

// Waits for one burst and serves it. Returns false on OG_QUIT.
template <class Group> OG_FN bool graph_node(Group &g, const og_pipeline &p, u32 slot, u32 lap)
{
	// The burst may be still to come.
	fetch_table(g, p.work);
	Burst burst = burst_in(p.ring, slot);
	u32 count = wait_for(g, burst, lap);
	if (count == OG_QUIT)
		return false;
	serve(g, p, burst, lap, count);
	return true;
}

// How many nanoseconds `count` reads of `word`, which is 0, take one after the other.
template <class Group> OG_FN u64 reads(const Group &g, const u64 *word, u32 count)
{
	const u64 begun = g.now();
	// The next address depends on what was read.
	for (u32 i = 0; i < count; i++)
		word += g.peek((const og_slot *)word).lap;
	return g.now() - begun;
}

} // namespace og

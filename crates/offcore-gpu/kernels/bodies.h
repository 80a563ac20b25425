// What a kernel does with bursts, for any group of lanes (group.h): one burst by one group, one burst by several,
// bursts for as long as they come, and one burst of a graph that is launched before its bursts are there.
//
// A body believes little of what it reads: a number of packets that a slot has no room for is answered as an empty
// burst, and a packet that is not inside its chunk is left alone and has the result 0.
#pragma once
#include "group.h"
#include "packet.h"

// Packets of one group, where several work on a burst.
#define OG_SHARE 256u

namespace og {

// A burst's memory.
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

// Where the burst of a turn is, and its lap.
struct Place {
	u32 slot;
	u32 lap;
};

OG_FN Place place_of(const og_ring &ring, u64 turn)
{
	// As src/ring.rs counts: laps go round at 2^32 and leave 0 out.
	return Place{(u32)turn & (ring.count - 1), (u32)(turn / ring.count % 0xffffffffu) + 1};
}

// The packets that are there when a head says `count`: more than slot and answer have room for are none.
OG_FN u32 packets_of(const og_ring &ring, u32 count)
{
	u32 described = (ring.slot_stride - (u32)sizeof(og_slot)) / (u32)sizeof(og_packet);
	u32 answered = (ring.answer_stride - (u32)sizeof(og_answer)) / (u32)sizeof(u32);
	return count <= OG_MAX_BURST && count <= described && count <= answered ? count : 0;
}

// How many parts a packet is cut into, as a power of two from `least` on: lanes that would have no packet take a part
// of another's.
template <class Group> OG_FN u32 parts_shift(const Group &g, u32 packets, u32 least)
{
	u32 shift = least;
	while (shift < 10 && (u64)packets << (shift + 1) <= g.lanes())
		shift++;
	return shift;
}

// The words of the tile's packets go to staging memory: 1 << shift lanes of neighbouring numbers, which copy
// neighbouring words, share a packet.
template <class Word, class Group> OG_FN void copy_tile(Group &g, const og_pool &pool, u32 count, u32 shift)
{
	g.template copy<Word>(count << shift, pool.base, pool.staging, [&](u32 i, u32 round) {
		const u32 part = i & ((1u << shift) - 1);
		return word_of(pool, g.scratch.packets[i >> shift], sizeof(Word), (round << shift) + part);
	});
}

// Packets of a tile, whose descriptors are in scratch memory, each put there by the lane that `each` gives its number:
// they are copied to staging memory, and their addresses swapped there and where they came from.
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
	// Other lanes have copied a packet's addresses, by its descriptor, which the next tile overwrites.
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

// Packets from..to of a burst: swap, then results, then what is left of the forced time. Returns how many results of
// this lane are not 0.
template <class Group> OG_FN u32 work_on(Group &g, const og_pipeline &p, const Burst &burst, u32 from, u32 to)
{
	const u32 kind = p.work.kind, skip = p.work.skip;
	const u64 begun = p.work.forced_ns ? g.now() : 0;
	Scratch &scratch = g.scratch;
	const bool staged = p.pool.staging != nullptr;
	const bool swap_here = p.work.swap && !staged;
	u8 *const memory = staged ? p.pool.staging : p.pool.base;
	u32 hits = 0;

	for (u32 tile = from; tile < to; tile += OG_TILE) {
		const u32 count = to - tile < OG_TILE ? to - tile : OG_TILE;

		g.each(count, [&](u32 i) {
			og_packet packet = g.load(burst.packets + tile + i);
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
					g.exclusive_or(partial, crc32c_part(payload, len, part, parts));
					break;
				case OG_CHECKSUM:
					g.add(partial, checksum_part(payload, len, part, parts));
					break;
				case OG_MATCH: {
					u32 lowest = match_part(p.work.trie, payload, len, part, parts);
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

		// The same lane as above has a packet here and in the next tile: no sync.
		g.each(count, [&](u32 i) {
			u32 result = scratch.packets[i].len ? result_of(kind, scratch.partial[i]) : 0;
			burst.results[tile + i] = result;
			hits += result != 0;
		});
	}

	if (p.work.forced_ns) {
		// Lanes wait at the same time, packets of one lane one after the other.
		u64 rounds = ((u64)(to - from) + g.lanes() - 1) / g.lanes();
		g.wait_until(begun + rounds * p.work.forced_ns);
	}
	return hits;
}

// By all lanes, when a burst is done.
template <class Group> OG_FN void answer(Group &g, const Burst &burst, u32 lap, u32 hits)
{
	u32 all = g.sum(hits);
	g.fence();
	g.sync();
	if (g.first()) {
		burst.answer->hits = all;
		g.release(&burst.answer->lap, lap);
	}
}

template <class Group> OG_FN void serve(Group &g, const og_pipeline &p, const Burst &burst, u32 lap, u32 count)
{
	answer(g, burst, lap, work_on(g, p, burst, 0, packets_of(p.ring, count)));
}

// What a slot says that must hold a burst by now, at every lane: OG_QUIT when it does not.
template <class Group> OG_FN u32 count_of(Group &g, const Burst &burst, u32 lap)
{
	u32 count = OG_QUIT;
	if (g.first()) {
		Head head = g.poll(burst.slot);
		if (head.lap == lap)
			count = head.count;
	}
	return g.broadcast(count);
}

// What a slot says as soon as its lap is `lap`, at every lane.
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

// One burst, which is there already. False, and nothing is done, when it is not or is no burst.
template <class Group> OG_FN bool burst(Group &g, const og_pipeline &p, u32 slot, u32 lap)
{
	Burst burst = burst_in(p.ring, slot);
	u32 count = count_of(g, burst, lap);
	if (count == OG_QUIT)
		return false;
	serve(g, p, burst, lap, count);
	return true;
}

// The share of group `block` of `blocks` in one burst, which is there already; the last of them that is done answers.
// There need be no more than one for every OG_SHARE packets; one that gets none has a say in who is last all the same, and
// all of them answer a burst without packets. `tally` is two words that the groups of a burst have in
// common, 0 before and behind it. False, and nothing is done, when there is no burst.
template <class Group>
OG_FN bool share(Group &g, const og_pipeline &p, u32 slot, u32 lap, u32 block, u32 blocks, u32 *tally)
{
	Burst burst = burst_in(p.ring, slot);
	u32 count = count_of(g, burst, lap);
	if (count == OG_QUIT)
		return false;
	const u32 packets = packets_of(p.ring, count);
	u32 hits = 0;
	for (u64 from = (u64)block * OG_SHARE; from < packets; from += (u64)blocks * OG_SHARE) {
		u64 to = from + OG_SHARE;
		hits += work_on(g, p, burst, (u32)from, to < packets ? (u32)to : packets);
	}
	u32 all = g.sum(hits);
	g.fence();
	g.sync();
	if (g.first()) {
		g.tally(tally + 1, all);
		if (g.tally(tally, 1) + 1 == blocks) {
			g.take(tally);
			burst.answer->hits = g.take(tally + 1);
			g.fence();
			g.release(&burst.answer->lap, lap);
		}
	}
	return true;
}

// Every `step`th burst from turn `from_turn` + `first` on, until one is OG_QUIT. Groups 0 to step - 1 serve all turns.
template <class Group>
OG_FN void persistent(Group &g, const og_pipeline &p, u32 first, u32 step, u64 from_turn)
{
	for (u64 turn = from_turn + first;; turn += step) {
		const Place place = place_of(p.ring, turn);
		Burst burst = burst_in(p.ring, place.slot);
		u32 count = wait_for(g, burst, place.lap);
		if (count == OG_QUIT)
			return;
		serve(g, p, burst, place.lap, count);
	}
}

// One burst, as soon as it is there. False when it is OG_QUIT.
template <class Group> OG_FN bool graph_node(Group &g, const og_pipeline &p, u32 slot, u32 lap)
{
	Burst burst = burst_in(p.ring, slot);
	u32 count = wait_for(g, burst, lap);
	if (count == OG_QUIT)
		return false;
	serve(g, p, burst, lap, count);
	return true;
}

} // namespace og

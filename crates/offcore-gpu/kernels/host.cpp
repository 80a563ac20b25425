// The kernels on threads of the host, called by src/kernel.rs. One thread does the work of a block of threads. A result
// of 1 means that there was a burst.
#include "bodies.h"

namespace {

// Edges that count their reads.
struct Counted {
	const u64 *edges;
	u64 *reads;

	u64 operator[](u32 at) const
	{
		++*reads;
		return edges[at];
	}
};

struct CountedTrie : og_trie {
	Counted edges;
};

} // namespace

extern "C" {

// For tests: returns the lowest pattern that starts in a part of a payload. Adds the number of edges read to `reads`.
u32 og_host_match_part(const og_trie *trie, const u8 *bytes, u32 len, u32 part, u32 parts, u64 *reads)
{
	const CountedTrie counted = {*trie, {trie->edges, reads}};
	return og::match_part(counted, trie->pairs, bytes, len, part, parts);
}

u32 og_host_share(const og_pipeline *pipeline, u32 threads, u32 slot, u32 lap, u32 block, u32 blocks, u64 *tally)
{
	og::Scratch scratch;
	og::Thread thread(scratch, threads);
	return og::share(thread, *pipeline, slot, lap, block, blocks, tally);
}

void og_host_persistent(const og_pipeline *pipeline, u32 threads, u32 first, u32 step, u64 from_turn)
{
	og::Scratch scratch;
	og::Thread thread(scratch, threads);
	og::persistent(thread, *pipeline, first, step, from_turn);
}

u32 og_host_graph_node(const og_pipeline *pipeline, u32 threads, u32 slot, u32 lap)
{
	og::Scratch scratch;
	og::Thread thread(scratch, threads);
	return og::graph_node(thread, *pipeline, slot, lap);
}

} // extern "C"

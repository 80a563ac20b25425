// The same bodies on threads of the host: src/kernel.rs calls them. A thread does the work of all lanes of one group.
// Where a body says whether there was a burst, 1 is yes.
#include "bodies.h"

extern "C" {

u32 og_host_burst(const og_pipeline *pipeline, u32 lanes, u32 slot, u32 lap)
{
	og::Scratch scratch;
	og::Thread thread(scratch, lanes);
	return og::burst(thread, *pipeline, slot, lap);
}

u32 og_host_share(const og_pipeline *pipeline, u32 lanes, u32 slot, u32 lap, u32 block, u32 blocks, u32 *tally)
{
	og::Scratch scratch;
	og::Thread thread(scratch, lanes);
	return og::share(thread, *pipeline, slot, lap, block, blocks, tally);
}

void og_host_persistent(const og_pipeline *pipeline, u32 lanes, u32 first, u32 step, u64 from_turn)
{
	og::Scratch scratch;
	og::Thread thread(scratch, lanes);
	og::persistent(thread, *pipeline, first, step, from_turn);
}

u32 og_host_graph_node(const og_pipeline *pipeline, u32 lanes, u32 slot, u32 lap)
{
	og::Scratch scratch;
	og::Thread thread(scratch, lanes);
	return og::graph_node(thread, *pipeline, slot, lap);
}

} // extern "C"

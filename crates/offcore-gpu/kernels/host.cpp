// The kernels on threads of the host; src/kernel.rs calls them. One thread does the work of a block of threads. A
// result of 1 means that there was a burst.
#include "bodies.h"

extern "C" {

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

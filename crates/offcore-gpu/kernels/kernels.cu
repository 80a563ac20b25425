// The kernels: bodies.h on blocks of threads. Parameters are passed by value or are device addresses. Blocks are
// one-dimensional, with 32 to OG_MAX_THREADS threads (at most OG_SHARE for og_burst). Grids are one-dimensional except
// for og_burst.
#include "bodies.h"

// Serves one burst per row of the grid, from `turn` on, and no more than there are slots. The blocks of a row share a
// burst: one block for every OG_SHARE packets of the longest burst. `tally` is device memory, a word per slot, initially
// 0. Four blocks fit on a multiprocessor (group.h).
extern "C" __global__ void __launch_bounds__(OG_SHARE, 4)
og_burst(const __grid_constant__ og_pipeline pipeline, u64 turn, u64 *tally)
{
	__shared__ og::Scratch scratch;
	og::Block block{scratch};
	const og::Place place = og::place_of(pipeline.ring, turn + blockIdx.y);
	og::share(block, pipeline, place.slot, place.lap, blockIdx.x, gridDim.x, tally + place.slot);
}

// Serves bursts until OG_QUIT. Block i serves turns from_turn + first + i, and every `step`th turn after that.
extern "C" __global__ void __launch_bounds__(OG_MAX_THREADS)
og_persistent(const __grid_constant__ og_pipeline pipeline, u32 first, u32 step, u64 from_turn)
{
	__shared__ og::Scratch scratch;
	og::Block block{scratch};
	og::persistent(block, pipeline, first + blockIdx.x, step, from_turn);
}

// A graph node: block i serves the next burst of slot first + i. A graph is relaunched with the parameters it was
// created with, so `laps`, a word of device memory per slot, holds the lap of the slot's last burst, initially 0.
extern "C" __global__ void __launch_bounds__(OG_MAX_THREADS)
og_graph_node(const __grid_constant__ og_pipeline pipeline, u32 first, u32 *laps)
{
	__shared__ og::Scratch scratch;
	og::Block block{scratch};
	const u32 slot = first + blockIdx.x;
	// Laps wrap around and skip 0.
	u32 last = laps[slot];
	u32 lap = last + 1 + (last == 0xffffffffu);
	if (og::graph_node(block, pipeline, slot, lap) && block.first())
		laps[slot] = lap;
}

// What `count` reads of `word`, 0 in pinned host memory, take: nanoseconds to `ns`. With a count of 0 it does next to nothing,
// which is for timing launches.
extern "C" __global__ void __launch_bounds__(32)
og_reads(const u64 *word, u32 count, u64 *ns)
{
	__shared__ og::Scratch scratch;
	const og::Block block{scratch};
	if (block.first())
		*ns = og::reads(block, word, count);
}

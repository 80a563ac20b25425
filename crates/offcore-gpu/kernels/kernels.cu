// The kernels: bodies.h on blocks of threads. Every parameter is passed by value or is an address at the device. Blocks
// are of 32 to OG_MAX_LANES threads, those of og_burst of OG_SHARE at most, and have one dimension. So have grids, but for
// og_burst's.
#include "bodies.h"

// As many bursts as the grid has rows, of `turn` and the turns behind it, no more than there are slots. The blocks of a row
// work on one of them: there is one for every OG_SHARE packets of the longest. `tally` is two words at the device for each
// slot, 0 to begin with.
extern "C" __global__ void __launch_bounds__(OG_SHARE)
og_burst(const __grid_constant__ og_pipeline pipeline, u64 turn, u32 *tally)
{
	__shared__ og::Scratch scratch;
	og::Block block{scratch};
	const og::Place place = og::place_of(pipeline.ring, turn + blockIdx.y);
	og::share(block, pipeline, place.slot, place.lap, blockIdx.x, gridDim.x, tally + 2 * place.slot);
}

// Bursts until OG_QUIT: block i of the grid serves turns from_turn + first + i, and every `step`th from there on.
extern "C" __global__ void __launch_bounds__(OG_MAX_LANES)
og_persistent(const __grid_constant__ og_pipeline pipeline, u32 first, u32 step, u64 from_turn)
{
	__shared__ og::Scratch scratch;
	og::Block block{scratch};
	og::persistent(block, pipeline, first + blockIdx.x, step, from_turn);
}

// A node of a graph, for the next burst of one slot, by one block. A graph is launched again and again with the
// parameters it was made with: `laps` is a word at the device for each slot, the lap of its last burst, 0 to begin
// with.
extern "C" __global__ void __launch_bounds__(OG_MAX_LANES)
og_graph_node(const __grid_constant__ og_pipeline pipeline, u32 slot, u32 *laps)
{
	__shared__ og::Scratch scratch;
	og::Block block{scratch};
	// 0 is left out when laps go round.
	u32 last = laps[slot];
	u32 lap = last + 1 + (last == 0xffffffffu);
	if (og::graph_node(block, pipeline, slot, lap) && block.first())
		laps[slot] = lap;
}

// Runs a launch: the kernels' bodies (kernels/bodies.h), with one thread per block.
#include <cstring>

#include "bodies.h"
#include "fake.h"

namespace fake {

namespace {

// Thrown on a thread to end its kernel: the device is lost.
struct Killed {};

// A block of threads: one thread does its work. It ends at a wait when its context is lost, and injects the requested
// faults.
struct Block : og::Thread {
	Context &context;
	// Whether this block counts bursts, as one block of each burst does.
	bool counts;
	// As on a GPU.
	static constexpr bool COPIES_TABLES = true;

	Block(og::Scratch &scratch, u32 threads, Context &context, bool counts)
		: og::Thread(scratch, threads), context(context), counts(counts)
	{
	}

	const u32 *near(const u32 *) const { return scratch.table; }

	void relax(u32 tries) const
	{
		if (context.error)
			throw Killed();
		og::Thread::relax(tries);
	}

	// The first step of all bodies for a burst.
	u32 broadcast(u32 count) const
	{
		if (counts && count != OG_QUIT)
			begin();
		return count;
	}

	// The last step.
	void release(u32 *at, u32 lap) const
	{
		State &all = state();
		{
			Lock lock(all.mutex);
			const Settings &settings = all.settings;
			if (settings.lost_before_answer >= 0 && all.bursts > settings.lost_before_answer)
				fail(context, (int)settings.lost_error);
		}
		if (context.error)
			throw Killed();
		og::Thread::release(at, lap);
	}

private:
	void begin() const
	{
		State &all = state();
		Lock lock(all.mutex);
		const Settings &settings = all.settings;
		const long long before = all.bursts++;
		if (settings.lost_after >= 0 && before >= settings.lost_after)
			fail(context, (int)settings.lost_error);
		const long long hung = before - settings.hang_after;
		if (settings.hang_after >= 0 && hung >= 0 && (settings.hang_count < 0 || hung < settings.hang_count)) {
			all.calls["hung"]++;
			all.changed.wait(lock, [&] { return context.error != 0; });
		}
		if (context.error)
			throw Killed();
	}
};

// A kernel's parameters, and the device memory that it uses.
struct Arguments {
	const Lock &lock;
	Context &context;
	const Launch &launch;
	bool sound = true;

	template <class T> T value(size_t i) const
	{
		T value;
		memcpy(&value, launch.parameters[i].data(), sizeof(T));
		return value;
	}

	// Returns the host address of device memory. It is irrelevant for an empty range.
	u8 *host(const char *what, const void *address, u64 len)
	{
		if (len == 0)
			return nullptr;
		u8 *found = translate(lock, context, (u64)(uintptr_t)address, len);
		if (!found) {
			report("%s: %s: %llu bytes at %p are not in one piece of the device's memory",
			       launch.function->name.c_str(), what, len, address);
			sound = false;
		}
		return found;
	}

	og_pipeline pipeline()
	{
		og_pipeline p = value<og_pipeline>(0);
		const u64 chunks = (u64)p.pool.chunks << p.pool.chunk_shift;
		p.pool.base = host("the pool", p.pool.base, chunks);
		if (p.pool.staging) {
			state().calls["staging"]++;
			p.pool.staging = host("the staging memory", p.pool.staging, chunks);
		}
		p.ring.slots = host("the slots", p.ring.slots, (u64)p.ring.count * p.ring.slot_stride);
		p.ring.answers = host("the answers", p.ring.answers, (u64)p.ring.count * p.ring.answer_stride);
		if (p.work.kind == OG_MATCH && p.work.trie.states) {
			og_trie &trie = p.work.trie;
			trie.edges = (const u64 *)host("the edges", trie.edges, ((u64)trie.mask + 1) * sizeof(u64));
			trie.links = (const og_link *)host("the links", trie.links, (u64)trie.states * sizeof(og_link));
			trie.first = (const u32 *)host("the first states", trie.first, 256 * sizeof(u32));
			trie.pairs = (const u32 *)host("the pairs", trie.pairs, OG_PAIRS * sizeof(u32));
		}
		return p;
	}
};

typedef std::function<void(Block &, u32, u32)> Body;

// Returns the body of a kernel for a block by column and row, or an empty one if an address is not the device's.
Body body_of(Context &context, const Launch &launch)
{
	Lock lock(state().mutex);
	Arguments arguments{lock, context, launch};
	const std::string &name = launch.function->name;
	Body body;
	if (name == "og_reads") {
		const u64 *word = (u64 *)arguments.host("a word", arguments.value<u64 *>(0), 8);
		u64 *ns = (u64 *)arguments.host("the nanoseconds", arguments.value<u64 *>(2), 8);
		const u32 count = arguments.value<u32>(1);
		body = [=](Block &block, u32, u32) { *ns = og::reads(block, word, count); };
		return arguments.sound ? body : Body();
	}
	const og_pipeline p = arguments.pipeline();
	const u32 blocks = launch.grid;
	if (name == "og_burst") {
		const u64 turn = arguments.value<u64>(1);
		u64 *tally = (u64 *)arguments.host("the tallies", arguments.value<u64 *>(2), (u64)p.ring.count * 8);
		if (launch.rows > p.ring.count) {
			report("og_burst: %u bursts of a ring of %u slots", launch.rows, p.ring.count);
			arguments.sound = false;
		}
		body = [=](Block &block, u32 number, u32 row) {
			const og::Place place = og::place_of(p.ring, turn + row);
			og::share(block, p, place.slot, place.lap, number, blocks, tally + place.slot);
		};
	} else if (name == "og_persistent") {
		const u32 first = arguments.value<u32>(1), step = arguments.value<u32>(2);
		const u64 from_turn = arguments.value<u64>(3);
		body = [=](Block &block, u32 number, u32) { og::persistent(block, p, first + number, step, from_turn); };
	} else {
		const u32 first = arguments.value<u32>(1);
		u32 *laps = (u32 *)arguments.host("the laps", arguments.value<u32 *>(2), (u64)p.ring.count * 4);
		body = [=](Block &block, u32 number, u32) {
			const u32 slot = first + number;
			const u32 last = laps[slot], lap = last + 1 + (last == 0xffffffffu);
			if (og::graph_node(block, p, slot, lap))
				laps[slot] = lap;
		};
	}
	return arguments.sound ? body : Body();
}

} // namespace

std::vector<size_t> parameters_of(const std::string &kernel)
{
	if (kernel == "og_burst")
		return {sizeof(og_pipeline), 8, 8};
	if (kernel == "og_persistent")
		return {sizeof(og_pipeline), 4, 4, 8};
	if (kernel == "og_graph_node")
		return {sizeof(og_pipeline), 4, 8};
	if (kernel == "og_reads")
		return {8, 4, 8};
	return {};
}

void run(Context &context, const Launch &launch)
{
	if (context.error)
		return;
	const Body body = body_of(context, launch);
	if (!body) {
		Lock lock(state().mutex);
		fail(context, ILLEGAL_ADDRESS);
		return;
	}
	const bool all_count = launch.function->name != "og_burst"; // other blocks have their own bursts
	auto block = [&](u32 number, u32 row) {
		og::Scratch scratch;
		// A value that tables do not contain.
		memset(&scratch, 0xa5, sizeof(scratch));
		Block threads(scratch, launch.block, context, all_count || number == 0);
		try {
			body(threads, number, row);
		} catch (const Killed &) {
		}
	};
	std::vector<std::thread> others;
	for (u32 row = 0; row < launch.rows; row++)
		for (u32 number = row == 0; number < launch.grid; number++)
			others.emplace_back(block, number, row);
	block(0, 0);
	for (std::thread &other : others)
		other.join();
}

} // namespace fake

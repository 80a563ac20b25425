// Launches of kernels, and graphs of them.
#include <chrono>
#include <cstring>

#include "fake.h"

namespace fake {

int make_launch(const Lock &, Launch &launch, Function *function, const unsigned grid[3], const unsigned block[3],
                void **parameters)
{
	if (!state().functions.count(function))
		return INVALID_HANDLE;
	if (!grid[0] || !grid[1] || grid[1] > 65535 || grid[2] != 1 || !block[0] || block[1] != 1 || block[2] != 1 || block[0] > 1024 ||
	    !parameters)
		return INVALID_VALUE;
	if (block[0] > function->max_threads) {
		report("%s: blocks of %u threads, at most %u", function->name.c_str(), block[0], function->max_threads);
		return LAUNCH_OUT_OF_RESOURCES;
	}
	if (block[0] < 32) {
		// kernels.cu: blocks have at least 32 threads.
		report("%s: blocks of %u threads, at least 32", function->name.c_str(), block[0]);
		return INVALID_VALUE;
	}
	if (grid[1] != 1 && function->name != "og_burst") {
		report("%s: a grid of %u rows, and it knows of one", function->name.c_str(), grid[1]);
		return INVALID_VALUE;
	}
	launch = Launch{function, grid[0], grid[1], block[0], {}};
	for (size_t i = 0; i < function->parameters.size(); i++) {
		const u8 *from = (const u8 *)parameters[i];
		if (!from)
			return INVALID_VALUE;
		launch.parameters.emplace_back(from, from + function->parameters[i]);
	}
	return SUCCESS;
}

// Delays a launch by the configured time.
static int take_time(Lock &lock, Context &context)
{
	const long long us = state().settings.launch_us;
	if (us == 0)
		return SUCCESS;
	lock.unlock();
	std::this_thread::sleep_for(std::chrono::microseconds(us));
	lock.lock();
	return error_of(lock, context);
}

} // namespace fake

using namespace fake;

API int cuLaunchKernel(Function *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                       unsigned block_y, unsigned block_z, unsigned shared, Stream *stream, void **parameters,
                       void **extra)
{
	ENTER_IN_CONTEXT();
	if (int error = take_time(lock, *context))
		return error;
	// On the null stream a kernel that polls would deadlock with the caller.
	if (shared || extra || !stream)
		return INVALID_VALUE;
	if (!all.streams.count(stream))
		return INVALID_HANDLE;
	Launch launch;
	const unsigned grid[] = {grid_x, grid_y, grid_z}, block[] = {block_x, block_y, block_z};
	if (int refused = make_launch(lock, launch, function, grid, block, parameters))
		return refused;
	if (function->context != context || stream->context != context)
		return INVALID_HANDLE;
	queue(lock, *context, stream, [=] { run(*context, launch); });
	return SUCCESS;
}

API int cuGraphCreate(Graph **graph, unsigned flags)
{
	ENTER();
	if (flags)
		return INVALID_VALUE;
	*graph = new Graph;
	all.graphs.insert(*graph);
	return SUCCESS;
}

API int cuGraphDestroy(Graph *graph)
{
	ENTER();
	return all.graphs.erase(graph) ? SUCCESS : INVALID_HANDLE;
}

// CUDA_KERNEL_NODE_PARAMS_v2.
struct KernelNodeParams {
	Function *function;
	unsigned grid[3], block[3];
	unsigned shared;
	void **parameters, **extra;
	void *kernel, *context;
};

// Nodes depend on earlier nodes, so the order of creation is a valid order of execution.
API int cuGraphAddKernelNode_v2(Node **node, Graph *graph, Node *const *dependencies, size_t count,
                                const KernelNodeParams *what)
{
	State &all = state();
	Lock lock(all.mutex);
	if (all.settings.driver < 12000)
		abort_with("cuGraphAddKernelNode_v2: a driver for CUDA %lld has no such function", all.settings.driver / 1000);
	if (int refused = enter(lock, "cuGraphAddKernelNode_v2"))
		return refused;
	if (!all.graphs.count(graph))
		return INVALID_HANDLE;
	if (!what || what->shared || what->extra || what->kernel || (count && !dependencies))
		return INVALID_VALUE;
	for (size_t i = 0; i < count; i++) {
		bool known = false;
		for (const Node *other : graph->nodes)
			known |= other == dependencies[i];
		if (!known)
			return INVALID_VALUE;
	}
	// Independent nodes run concurrently, and would both access the ring.
	if (count != (graph->nodes.empty() ? 0u : 1u) || (count && dependencies[0] != graph->nodes.back())) {
		report("cuGraphAddKernelNode: nodes that are not one after the other");
		return INVALID_VALUE;
	}
	Node *made = new Node;
	if (int refused = make_launch(lock, made->launch, what->function, what->grid, what->block, what->parameters))
		return refused;
	graph->nodes.push_back(made);
	*node = made;
	return SUCCESS;
}

API int cuGraphInstantiateWithFlags(Exec **exec, Graph *graph, unsigned long long)
{
	ENTER_IN_CONTEXT();
	if (!all.graphs.count(graph))
		return INVALID_HANDLE;
	Exec *made = new Exec{context, {}};
	for (const Node *node : graph->nodes)
		made->launches.push_back(node->launch);
	all.execs.insert(made);
	*exec = made;
	return SUCCESS;
}

API int cuGraphUpload(Exec *exec, Stream *stream)
{
	ENTER_IN_CONTEXT();
	return all.execs.count(exec) && all.streams.count(stream) ? SUCCESS : INVALID_HANDLE;
}

API int cuGraphLaunch(Exec *exec, Stream *stream)
{
	ENTER_IN_CONTEXT();
	if (int error = take_time(lock, *context))
		return error;
	if (!all.execs.count(exec) || !all.streams.count(stream) || exec->context != context || stream->context != context)
		return INVALID_HANDLE;
	for (const Launch &launch : exec->launches)
		if (!all.functions.count(launch.function))
			return INVALID_HANDLE;
	queue(lock, *context, stream, [=] {
		for (const Launch &launch : exec->launches)
			run(*context, launch);
	});
	return SUCCESS;
}

API int cuGraphExecDestroy(Exec *exec)
{
	ENTER();
	return all.execs.erase(exec) ? SUCCESS : INVALID_HANDLE;
}

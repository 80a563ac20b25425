// A stand-in for the CUDA driver's library, for tests on machines without a GPU: what offcore-gpu calls of the driver's
// interface, from its public documentation, with threads for streams and the kernels' own source for kernels.
//
// It is stricter than a driver where a driver would let a mistake pass or would wait for ever:
//   * an address at the device is not the host's: it is shifted by more than any host address has, so that a host
//     pointer that a kernel is given, and a device's that the host uses, are found at once,
//   * every handle and every range of memory is looked up,
//   * a call that a driver answers only when its kernels have ended (cuMemFree, cuMemHostRegister, ...) ends the process
//     with a message when they do not,
//   * memory from cuMemAlloc is never zero to begin with.
// What is alive is counted (offcore_fake_live), and faults can be asked for (offcore_fake_set, OFFCORE_FAKE_*).
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdarg>
#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "layout.h"

#define API extern "C" __attribute__((visibility("default")))

namespace fake {

// CUresult, as documented.
enum Result : int {
	SUCCESS = 0,
	INVALID_VALUE = 1,
	OUT_OF_MEMORY = 2,
	NOT_INITIALIZED = 3,
	NO_DEVICE = 100,
	INVALID_DEVICE = 101,
	INVALID_IMAGE = 200,
	INVALID_CONTEXT = 201,
	NO_BINARY_FOR_GPU = 209,
	INVALID_PTX = 218,
	UNSUPPORTED_PTX_VERSION = 222,
	INVALID_HANDLE = 400,
	NOT_FOUND = 500,
	NOT_READY = 600,
	ILLEGAL_ADDRESS = 700,
	LAUNCH_OUT_OF_RESOURCES = 701,
	HOST_MEMORY_ALREADY_REGISTERED = 712,
	HOST_MEMORY_NOT_REGISTERED = 713,
	LAUNCH_FAILED = 719,
	NOT_SUPPORTED = 801,
};

// The primary context of a device.
struct Context {
	int device = 0;
	// How often it has been retained.
	unsigned retained = 0;
	// What every call returns from now on, kernels of this context end and what is queued is dropped; 0: nothing is wrong.
	std::atomic<int> error{0};
	// What its streams have been given and have not finished, and what they are at.
	unsigned unfinished = 0;
	unsigned running = 0;
};

struct Stream {
	Context *context;
	// Whether it waits for the null stream, and that for it.
	bool blocking;
	std::deque<std::function<void()>> queue;
	unsigned unfinished = 0;
	bool ending = false;
};

struct Event {
	Context *context;
	unsigned long long recorded = 0;
	unsigned long long reached = 0;
};

// A kernel of a module: which of ours, and what the PTX says of it.
struct Function {
	Context *context;
	std::string name;
	unsigned max_threads = 0;
	std::vector<size_t> parameters;
};

struct Module {
	Context *context;
	std::map<std::string, Function *> functions;
};

// A kernel with its parameters, as they were when it was launched.
struct Launch {
	Function *function;
	// Columns and rows of blocks, threads of a block.
	unsigned grid, rows, block;
	std::vector<std::vector<u8>> parameters;
};

struct Node {
	Launch launch;
};

struct Graph {
	std::vector<Node *> nodes;
};

struct Exec {
	Context *context;
	std::vector<Launch> launches;
};

// Memory that a device reaches.
struct Range {
	u8 *host;
	size_t len;
	Context *context;
	// Whether the other devices' contexts reach it, too.
	bool portable;
	// What the device's own memory is a mapping of.
	int file;
};

// What goes wrong, and what the machine is.
struct Settings {
	long long devices = 1;
	long long driver = 13000;
	long long capability = 90;
	// Bytes of a device, and bytes that can be registered.
	long long memory = 1LL << 36;
	long long registrable = 1LL << 40;
	// 1: a kernel may use the host's addresses of registered memory.
	long long host_pointers = 0;
	// 1: the CPU can map memory of the device.
	long long dma_buf = 0;
	// 1: network cards reach its memory, and the CPU has to wait for what they write; 2: it does not have to.
	long long gpudirect = 0;
	// 1: modules are refused as invalid PTX.
	long long refuse_ptx = 0;
	// So many bursts are begun, then the device is lost or its kernels hang; -1: it never happens.
	long long lost_after = -1;
	long long hang_after = -1;
	// How many of them hang; -1: all.
	long long hang_count = -1;
	// The same, with the burst worked on but for its answer.
	long long lost_before_answer = -1;
	// What calls return when the device is lost.
	long long lost_error = LAUNCH_FAILED;
	// Microseconds that a kernel's launch takes its caller.
	long long launch_us = 0;
	// Seconds that a call waits for kernels before it ends the process.
	long long patience = 10;
	std::string name = "Offcore stand-in 1";
};

struct State {
	std::mutex mutex;
	// Something has been finished, or has gone wrong.
	std::condition_variable changed;
	bool initialized = false;
	Settings settings;
	// Entry points that fail, and how often each has been called.
	std::map<std::string, int> failing;
	std::map<std::string, unsigned long long> calls;
	// Bursts that kernels have begun with.
	long long bursts = 0;
	std::vector<Context *> contexts;
	std::set<Module *> modules;
	std::set<Function *> functions;
	std::set<Stream *> streams;
	std::set<Event *> events;
	std::set<Graph *> graphs;
	std::set<Exec *> execs;
	// By address at the host.
	std::map<u8 *, Range> allocations;
	std::map<u8 *, Range> registrations;
};

typedef std::unique_lock<std::mutex> Lock;

// Handles are never reused, and the state is there until the process ends, since threads may be at it.
State &state();

// What a call of `name` begins with: what it returns at once, or SUCCESS. With a context: the calling thread's current one,
// which has to be sound. Who is told that it is not is told so when its kernels have been stopped, as by a driver.
int enter(const Lock &, const char *name);
int enter(Lock &, const char *name, Context *&context);
// The same for what gives something back, which is done although the context is not sound: `error` is returned then.
int enter_to_free(Lock &, const char *name, Context *&context, int &error);
// The context's error, when its kernels have been stopped; SUCCESS: it is sound.
int error_of(Lock &, Context &);

// Waits until the device has nothing to do, for a call that a driver answers only then.
void wait_until_idle(Lock &, Context &, const char *call);

// The same for one stream.
void wait_for(Lock &, const Stream &, const char *call);

// Queues work on a stream; null is the null stream, on which it is done before this returns.
void queue(Lock &, Context &, Stream *, std::function<void()>);

// Where memory of the device is at the host; null when the context does not reach all of it.
u8 *translate(const Lock &, const Context &, u64 address, u64 len);

// Takes a kernel's parameters, by the function's list.
int make_launch(const Lock &, Launch &, Function *, const unsigned grid[3], const unsigned block[3], void **parameters);
// Runs it on this thread, and on one more for each block but the first.
void run(Context &, const Launch &);
// The sizes of the parameters that run() reads; empty when there is no such kernel.
std::vector<size_t> parameters_of(const std::string &kernel);

// The context can no longer be used.
void fail(Context &, int error);
// Says what is wrong on the standard error stream.
void report(const char *format, ...) __attribute__((format(printf, 1, 2)));
// The same, and ends the process.
[[noreturn]] void abort_with(const char *format, ...) __attribute__((format(printf, 1, 2)));

} // namespace fake

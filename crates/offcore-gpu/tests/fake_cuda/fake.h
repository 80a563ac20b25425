// A fake of the CUDA driver's library, for tests on machines without a GPU. It has the part of the driver API that
// offcore-gpu uses, according to its public documentation. Streams are threads, and kernels run from their own source.
//
// It is stricter than a driver if a driver would miss an error or block forever:
// * device addresses differ from host addresses by an offset larger than any host address, so that confusing them is
//   detected immediately,
// * every handle and memory range is validated,
// * a call that would block until kernels have ended (cuMemFree, cuMemHostRegister, ...) ends the process with a
//   message if they do not,
// * memory from cuMemAlloc is never zero initially.
// Live objects are counted (offcore_fake_live), and faults can be injected (offcore_fake_set, OFFCORE_FAKE_*).
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
	// Retain count.
	unsigned retained = 0;
	// The sticky error of every call, after which kernels end and queued work is dropped; 0: none.
	std::atomic<int> error{0};
	// Unfinished work of its streams, including running work.
	unsigned unfinished = 0;
	unsigned running = 0;
};

struct Stream {
	Context *context;
	// Whether it synchronises with the null stream.
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

// A kernel of a module: which kernel it is, and its attributes from the PTX.
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

// A kernel with its parameters at launch.
struct Launch {
	Function *function;
	// Columns and rows of blocks; threads per block.
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

// Memory that a device can access.
struct Range {
	u8 *host;
	size_t len;
	Context *context;
	// Whether other devices' contexts can access it.
	bool portable;
	// The file behind device memory.
	int file;
};

// Injected faults, and the properties of the machine.
struct Settings {
	long long devices = 1;
	long long driver = 13030;
	long long capability = 90;
	// Bytes of device memory, and bytes that can be registered.
	long long memory = 1LL << 36;
	long long registrable = 1LL << 40;
	// 1: kernels may use host addresses of registered memory.
	long long host_pointers = 0;
	// 1: the CPU can map device memory.
	long long dma_buf = 0;
	// 1: it has a display, and kernels have a time limit.
	long long display = 0;
	// 1: network cards can access device memory, and their writes need a flush; 2: they need none.
	long long gpudirect = 0;
	// 1: modules are refused as invalid PTX.
	long long refuse_ptx = 0;
	// The device is lost, or its kernels hang, after starting this many bursts; -1: never.
	long long lost_after = -1;
	long long hang_after = -1;
	// How many kernels hang; -1: all.
	long long hang_count = -1;
	// The device is lost after processing this many bursts, but before answering the last of them.
	long long lost_before_answer = -1;
	// The error of a lost device.
	long long lost_error = LAUNCH_FAILED;
	// Duration of a launch call in microseconds.
	long long launch_us = 0;
	// Seconds that a call waits for kernels before it ends the process.
	long long timeout = 10;
	std::string name = "Offcore stand-in 1";
};

struct State {
	std::mutex mutex;
	// Notified when something has finished or failed.
	std::condition_variable changed;
	bool initialized = false;
	Settings settings;
	// Entry points that fail, and their call counts.
	std::map<std::string, int> failing;
	std::map<std::string, unsigned long long> calls;
	// Number of bursts that kernels have started.
	long long bursts = 0;
	std::vector<Context *> contexts;
	std::set<Module *> modules;
	std::set<Function *> functions;
	std::set<Stream *> streams;
	std::set<Event *> events;
	std::set<Graph *> graphs;
	std::set<Exec *> execs;
	// By host address.
	std::map<u8 *, Range> allocations;
	std::map<u8 *, Range> registrations;
};

typedef std::unique_lock<std::mutex> Lock;

// Handles are never reused, and the state is never freed, because threads may use it.
State &state();

// The entry check of call `name`: an injected result, or SUCCESS. With a context: the thread's current one, which must
// be valid. Like a driver, it reports a lost context only after its kernels have stopped.
int enter(const Lock &, const char *name);
int enter(Lock &, const char *name, Context *&context);
// Like `enter`, for calls that release something. They also succeed on a lost context, and return `error` then.
int enter_to_free(Lock &, const char *name, Context *&context, int &error);
// The beginning of entry points: the state as `all`, its `lock`, and the entry check under the function's name. Calls
// that need a context also get the thread's `context`, and calls that release something get the `error` to return.
#define ENTER() BEGIN(enter(lock, __func__))
#define ENTER_IN_CONTEXT() \
	Context *context; \
	BEGIN(enter(lock, __func__, context))
#define ENTER_TO_FREE() \
	Context *context; \
	int error; \
	BEGIN(enter_to_free(lock, __func__, context, error))
#define BEGIN(check) \
	[[maybe_unused]] State &all = state(); \
	Lock lock(all.mutex); \
	if (int refused = check) \
	return refused

// The context's error, after its kernels have stopped, or SUCCESS.
int error_of(Lock &, Context &);

// Waits until a context or a stream has no `unfinished` work, for calls that block until then.
void wait_for(Lock &, const unsigned &unfinished, const char *call);

// Queues work on a stream; on null, the null stream, it completes before the call returns.
void queue(Lock &, Context &, Stream *, std::function<void()>);

// The host address of device memory; null if the context cannot access all of it.
u8 *translate(const Lock &, const Context &, u64 address, u64 len);

// Copies a kernel's parameters by the function's list.
int make_launch(const Lock &, Launch &, Function *, const unsigned grid[3], const unsigned block[3], void **parameters);
// Runs it on this thread and on one more per further block.
void run(Context &, const Launch &);
// Returns the sizes of run()'s parameters, or an empty list if the kernel does not exist.
std::vector<size_t> parameters_of(const std::string &kernel);

// Marks the context as lost.
void fail(Context &, int error);
// Reports an error on stderr.
void report(const char *format, ...) __attribute__((format(printf, 1, 2)));
// Reports an error and ends the process.
[[noreturn]] void abort_with(const char *format, ...) __attribute__((format(printf, 1, 2)));

} // namespace fake

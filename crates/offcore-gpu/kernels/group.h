// A group: the threads that work on one burst together. bodies.h is written once, for any type of group:
//
//   threads()          number of threads
//   first()            whether this thread is thread 0
//   each(n, f)         f(0) .. f(n - 1), each called by one thread; thread i % threads() always calls f(i)
//   sync()             barrier: writes before it are visible to all threads after it
//   broadcast(x)       thread 0's x, at every thread
//   any(x)             whether x is not 0 at any thread; also a barrier
//   sum(x)             the sum of every thread's x, at thread 0
//   copy<Word>(n, from, to, place)   copies n series of words, each by one thread, distributed as by `each`: word r of
//                      series i is place(i, r) bytes from both bases; a series ends where place returns OG_NOWHERE
//   add, minimum, exclusive_or   atomic update of a partial result in scratch memory
//   tally(p, x)        atomic fetch-and-add on a word shared with other groups of the device, with acquire and release
//                      semantics
//   load(packet)       reads a descriptor once
//   peek(head)         reads a slot's head once, as a whole
//   poll(head)         the same with acquire semantics
//   release(p, x)      writes x with release semantics to memory that the CPU reads. Releases are cumulative (PTX ISA,
//                      "Causality order"): after a barrier, a reader that sees x sees the writes of the whole group
//   now(), wait_until(t)   a clock in nanoseconds; spins until it reaches t
//   relax(tries)       backs off between two polls
//   scratch            memory private to the group
//   near(table)        where a lookup table of the work is read: itself, or its copy in scratch memory
//
// All threads call sync, broadcast, any, sum and wait_until at the same place. On a GPU a group is a block of threads. On
// the host a group is one thread of the operating system that does the work of the block's threads in turn; between two
// barriers no thread may depend on another's work.
#pragma once
#include "layout.h"

// Packets whose descriptors and partial results fit in the scratch memory at a time, at least OG_SHARE.
#define OG_TILE 512u
// Maximum threads per block on a GPU.
#define OG_MAX_THREADS 1024u
// Not an offset.
#define OG_NOWHERE 0xffffffffffffffffull

#ifdef __CUDACC__
#define OG_FN __device__ __forceinline__
// A lookup table. Threads read different entries at once, which constant memory would serialise, so it is in global
// memory. It is not const: the compiler could otherwise read it through the non-coherent cache, and a check of the PTX
// allows no such load at all.
#define OG_TABLE __device__
#else
#define OG_FN inline
#define OG_TABLE static const
#include <sched.h>
#include <time.h>
#endif

namespace og {

struct Scratch {
	og_packet packets[OG_TILE];
	u32 partial[OG_TILE];
	alignas(16) u32 table[OG_PAIRS];
	u32 word;
	u32 sum;
};

// Four blocks fit on a multiprocessor of any GPU: Turing's has 64 KiB for them.
static_assert(4 * sizeof(Scratch) <= 64 * 1024, "scratch memory of four blocks");

// A snapshot of a slot's head.
struct Head {
	u32 lap;
	u32 count;
};

OG_FN Head head_of(u64 word)
{
	return Head{(u32)word, (u32)(word >> 32)};
}

OG_FN og_packet packet_of(u64 word)
{
	return og_packet{(u32)word, (u16)(word >> 32), (u16)(word >> 48)};
}

#ifdef __CUDACC__

// The unit of a copy by one thread.
typedef uint4 Wide;

struct Block {
	Scratch &scratch;

	// log2 of the threads that share a packet when there are more packets than threads, so that the threads of a warp
	// read adjacent bytes.
	static constexpr u32 SHARED_BY = 5;
	// The same for packets that are copied and fit in 1 << SHORT_SHARED_BY words: more packets at a time.
	static constexpr u32 SHORT_SHARED_BY = 3;
	// Whether lookup tables are copied to scratch memory, which is nearer than any cache and keeps what it has: a read with
	// acquire semantics empties the L1.
	static constexpr bool COPIES_TABLES = true;
	// Loads in flight per thread during a copy, to hide the latency of host memory.
	static constexpr u32 AHEAD = 4;

	OG_FN const u32 *near(const u32 *) const { return scratch.table; }
	OG_FN u32 threads() const { return blockDim.x; }
	OG_FN bool first() const { return threadIdx.x == 0; }
	OG_FN void sync() const { __syncthreads(); }

	template <class F> OG_FN void each(u32 count, F f) const
	{
		for (u32 i = threadIdx.x; i < count; i += blockDim.x)
			f(i);
	}

	// AHEAD series at a time: all loads before any store, an order that the compiler could not prove safe. Narrow words
	// are only used for badly aligned memory, which no device has, so one series at a time is enough there.
	template <class Word, class F> OG_FN void copy(u32 count, const u8 *from, u8 *to, F place) const
	{
		constexpr u32 ahead = sizeof(Word) == sizeof(Wide) ? AHEAD : 1;
		for (u32 i = threadIdx.x; i < count; i += ahead * blockDim.x) {
			for (u32 round = 0, more = 1; more; round++) {
				u64 at[ahead];
				Word words[ahead];
				more = 0;
#pragma unroll
				for (u32 k = 0; k < ahead; k++) {
					u32 series = i + k * blockDim.x;
					at[k] = series < count ? place(series, round) : OG_NOWHERE;
					if (at[k] != OG_NOWHERE) {
						words[k] = *(const Word *)(from + at[k]);
						more = 1;
					}
				}
#pragma unroll
				for (u32 k = 0; k < ahead; k++)
					if (at[k] != OG_NOWHERE)
						*(Word *)(to + at[k]) = words[k];
			}
		}
	}

	OG_FN u32 any(u32 value) const { return __syncthreads_or(value != 0) != 0; }

	OG_FN u32 broadcast(u32 value)
	{
		if (first())
			scratch.word = value;
		__syncthreads();
		u32 all = scratch.word;
		__syncthreads();
		return all;
	}

	OG_FN u32 sum(u32 value)
	{
		if (first())
			scratch.sum = 0;
		__syncthreads();
		if (value)
			atomicAdd(&scratch.sum, value);
		__syncthreads();
		return scratch.sum;
	}

	OG_FN void add(u32 &partial, u32 value) const { atomicAdd(&partial, value); }
	OG_FN void minimum(u32 &partial, u32 value) const { atomicMin(&partial, value); }
	OG_FN void exclusive_or(u32 &partial, u32 value) const { atomicXor(&partial, value); }

	OG_FN u64 tally(u64 *word, u64 value) const
	{
		u64 before;
		asm volatile("atom.add.acq_rel.gpu.global.u64 %0, [%1], %2;"
		             : "=l"(before)
		             : "l"(word), "l"(value)
		             : "memory");
		return before;
	}

	OG_FN og_packet load(const og_packet *packet) const
	{
		return packet_of(*(const volatile u64 *)packet);
	}

	OG_FN Head peek(const og_slot *slot) const { return head_of(*(const volatile u64 *)slot); }

	// With host memory it costs 5 % more than a read without acquire semantics, and a fence ten times as much (H100).
	OG_FN Head poll(const og_slot *slot) const
	{
		u64 word;
		asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(word) : "l"(slot) : "memory");
		return head_of(word);
	}

	OG_FN void release(u32 *at, u32 value) const
	{
		asm volatile("st.release.sys.global.u32 [%0], %1;" : : "l"(at), "r"(value) : "memory");
	}

	OG_FN u64 now() const
	{
		u64 ns;
		asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
		return ns;
	}

	OG_FN void wait_until(u64 deadline) const
	{
		while ((long long)(now() - deadline) < 0) {
		}
	}

	// No backoff: a read of host memory takes a microsecond anyway.
	OG_FN void relax(u32) const {}
};

#else

// 16 bytes, aligned to 16, that may alias any type.
struct __attribute__((may_alias, aligned(16))) Wide {
	u64 halves[2];
};

struct Thread {
	Scratch &scratch;
	const u32 count;

	// A single thread cannot share a packet, except on behalf of block threads that would be idle.
	static constexpr u32 SHARED_BY = 0;
	static constexpr u32 SHORT_SHARED_BY = 0;
	static constexpr bool COPIES_TABLES = false;

	Thread(Scratch &memory, u32 threads) : scratch(memory), count(threads ? threads : 1) {}

	const u32 *near(const u32 *table) const { return table; }
	u32 threads() const { return count; }
	bool first() const { return true; }
	void sync() const {}

	template <class F> void each(u32 n, F f) const
	{
		for (u32 thread = 0; thread < count && thread < n; thread++)
			for (u64 i = thread; i < n; i += count)
				f((u32)i);
	}

	template <class Word, class F> void copy(u32 n, const u8 *from, u8 *to, F place) const
	{
		each(n, [&](u32 i) {
			u64 at;
			for (u32 round = 0; (at = place(i, round)) != OG_NOWHERE; round++)
				*(Word *)(to + at) = *(const Word *)(from + at);
		});
	}

	u32 any(u32 value) const { return value != 0; }
	u32 broadcast(u32 value) const { return value; }
	u32 sum(u32 value) const { return value; }
	void add(u32 &partial, u32 value) const { partial += value; }
	void minimum(u32 &partial, u32 value) const { partial = value < partial ? value : partial; }
	void exclusive_or(u32 &partial, u32 value) const { partial ^= value; }
	u64 tally(u64 *word, u64 value) const { return __atomic_fetch_add(word, value, __ATOMIC_ACQ_REL); }

	og_packet load(const og_packet *packet) const
	{
		return packet_of(__atomic_load_n((const Word *)packet, __ATOMIC_RELAXED));
	}

	Head peek(const og_slot *slot) const
	{
		return head_of(__atomic_load_n((const Word *)slot, __ATOMIC_RELAXED));
	}

	Head poll(const og_slot *slot) const
	{
		return head_of(__atomic_load_n((const Word *)slot, __ATOMIC_ACQUIRE));
	}

	void release(u32 *at, u32 value) const { __atomic_store_n(at, value, __ATOMIC_RELEASE); }

	u64 now() const
	{
		timespec time;
		clock_gettime(CLOCK_MONOTONIC, &time);
		return (u64)time.tv_sec * 1000000000u + (u64)time.tv_nsec;
	}

	// Sleeps for most of a long wait; the kernel's wake-up is not accurate to the microsecond.
	void wait_until(u64 deadline) const
	{
		for (;;) {
			long long left = (long long)(deadline - now());
			if (left <= 0)
				return;
			if (left > 200000)
				sleep((u64)left - 100000);
			else
				pause();
		}
	}

	// Spins, then yields, then sleeps.
	void relax(u32 tries) const
	{
		if (tries < 256)
			pause();
		else if (tries < 1024)
			sched_yield();
		else
			sleep(20000);
	}

private:
	// 8 bytes, aligned to 8, that may alias any type.
	typedef u64 __attribute__((may_alias)) Word;

	static void pause()
	{
#if defined(__x86_64__)
		__builtin_ia32_pause();
#elif defined(__aarch64__)
		__asm__ volatile("yield");
#endif
	}

	static void sleep(u64 ns)
	{
		timespec time = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
		nanosleep(&time, nullptr);
	}
};

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "slots, answers and tables are little-endian");

#endif

} // namespace og

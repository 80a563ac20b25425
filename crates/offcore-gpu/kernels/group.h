// A group: the lanes that work on one burst together. What works on packets (bodies.h) is written once, for any group:
//
//   lanes()            how many there are
//   first()            whether this lane is the one that speaks for all
//   each(n, f)         f(0) .. f(n - 1), each by one lane, whatever n is: number i is always lane i % lanes()'s
//   sync()             what any lane did before is seen by all of them behind it; no lane goes on before all are here
//   broadcast(x)       the first lane's x, at every lane
//   any(x)             whether any lane's x is not 0, at every lane; it is a sync, too
//   sum(x)             the sum of every lane's x, at the first lane
//   copy<Word>(n, from, to, place)   words from memory to memory, n series of them, each by one lane as numbers of
//                      `each` are: word r of series i is place(i, r) bytes from both, and a series ends where that is
//                      OG_NOWHERE
//   add, minimum, exclusive_or   on a partial result of the scratch memory, that other lanes change too
//   tally(p, x)        adds x to a counter that other groups change too and returns what it was; orders all around it
//   take(p)            what such a counter is; it is 0 then
//   load(packet)       a descriptor, read once
//   poll(head)         a slot's head, read once and as a whole: what was written before its lap is seen from then on
//   fence()            what this lane has written is seen by the whole system before what is written behind the fence
//   release(p, x)      writes x to where the CPU reads it; with fences by all lanes and a sync before, who sees x
//                      sees all that they wrote
//   now(), wait_until(t)   nanoseconds of a clock; comes back when it has reached t
//   relax(tries)       what a lane does between two looks at memory
//   scratch            memory of the group alone
//
// sync, broadcast, any, sum and wait_until are called by all lanes at the same place. On a GPU a group is a block of
// threads. On the host it is one thread, which does the work of one lane after the other: between two syncs no lane may
// need another's work.
#pragma once
#include "layout.h"

// Packets whose descriptors and partial results a group has in its scratch memory at once.
#define OG_TILE 1024u
// Lanes of a block of a GPU, at most.
#define OG_MAX_LANES 1024u
// No place in a memory.
#define OG_NOWHERE 0xffffffffffffffffull

#ifdef __CUDACC__
#define OG_FN __device__ __forceinline__
// A table that lanes read at different places at once: global memory, since constant memory serves one place at a time.
// Not const, so that no load at all is by way of the cache that is not coherent, and a look at the PTX shows it.
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
	u32 word;
	u32 sum;
};

// A slot's head as it was at one time.
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

// As much as one lane copies at a time.
typedef uint4 Wide;

struct Block {
	Scratch &scratch;

	// Lanes that share a packet, as a power of two, when there are more packets than lanes: the lanes of a warp read
	// bytes that are beside each other.
	static constexpr u32 SHARED_BY = 5;
	// Those that share one which is copied and whose bytes are in 1 << SHORT_SHARED_BY words: more packets at once.
	static constexpr u32 SHORT_SHARED_BY = 3;
	// Words of a lane that are on their way at the same time when it copies: the memory they come from is far away.
	static constexpr u32 AHEAD = 4;

	OG_FN u32 lanes() const { return blockDim.x; }
	OG_FN bool first() const { return threadIdx.x == 0; }
	OG_FN void sync() const { __syncthreads(); }

	template <class F> OG_FN void each(u32 count, F f) const
	{
		for (u32 i = threadIdx.x; i < count; i += blockDim.x)
			f(i);
	}

	// AHEAD series at a time: all are read before any is written, which the compiler could not know to be allowed.
	// Words that are not wide are copied where memory is badly aligned, as no device's is: one series at a time.
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

	OG_FN u32 tally(u32 *counter, u32 value) const
	{
		__threadfence();
		u32 before = atomicAdd(counter, value);
		__threadfence();
		return before;
	}

	OG_FN u32 take(u32 *counter) const { return atomicExch(counter, 0u); }

	OG_FN og_packet load(const og_packet *packet) const
	{
		return packet_of(*(const volatile u64 *)packet);
	}

	OG_FN Head poll(const og_slot *slot) const
	{
		u64 word;
		asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(word) : "l"(slot) : "memory");
		return head_of(word);
	}

	OG_FN void fence() const { __threadfence_system(); }

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

	// A look at the CPU's memory takes a microsecond as it is.
	OG_FN void relax(u32) const {}
};

#else

// Sixteen bytes aligned to sixteen, whatever they are made of.
struct __attribute__((may_alias, aligned(16))) Wide {
	u64 halves[2];
};

struct Thread {
	Scratch &scratch;
	const u32 count;

	// One thread has nobody to share a packet with; it does so for lanes that would be idle, as a block does.
	static constexpr u32 SHARED_BY = 0;
	static constexpr u32 SHORT_SHARED_BY = 0;

	Thread(Scratch &memory, u32 lanes) : scratch(memory), count(lanes ? lanes : 1) {}

	u32 lanes() const { return count; }
	bool first() const { return true; }
	void sync() const {}

	template <class F> void each(u32 n, F f) const
	{
		for (u32 lane = 0; lane < count && lane < n; lane++)
			for (u64 i = lane; i < n; i += count)
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
	u32 tally(u32 *counter, u32 value) const { return __atomic_fetch_add(counter, value, __ATOMIC_ACQ_REL); }
	u32 take(u32 *counter) const { return __atomic_exchange_n(counter, 0u, __ATOMIC_ACQ_REL); }

	og_packet load(const og_packet *packet) const
	{
		return packet_of(__atomic_load_n((const Word *)packet, __ATOMIC_RELAXED));
	}

	Head poll(const og_slot *slot) const
	{
		return head_of(__atomic_load_n((const Word *)slot, __ATOMIC_ACQUIRE));
	}

	void fence() const { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
	void release(u32 *at, u32 value) const { __atomic_store_n(at, value, __ATOMIC_RELEASE); }

	u64 now() const
	{
		timespec time;
		clock_gettime(CLOCK_MONOTONIC, &time);
		return (u64)time.tv_sec * 1000000000u + (u64)time.tv_nsec;
	}

	// Sleeps for the most of a long wait, since the kernel wakes nobody to the microsecond.
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

	// A burst comes soon or not at all soon: spins, then lets others run, then sleeps in between.
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
	// Both are eight bytes aligned to eight, whatever they are made of.
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

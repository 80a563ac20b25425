// Memory: the device's, and registered host memory.
#include <cstring>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fake.h"

namespace fake {

// A device address on device n is the host address plus (n + 1) << SHIFT: above every host address, so that confusing
// them fails immediately.
static const unsigned SHIFT = 48;

static u64 address_at(const Context &context, const u8 *host)
{
	return (u64)(uintptr_t)host + ((u64)(context.device + 1) << SHIFT);
}

// The range that contains all of these bytes.
static const Range *within(const std::map<u8 *, Range> &ranges, u8 *host, u64 len)
{
	auto after = ranges.upper_bound(host);
	if (after == ranges.begin())
		return nullptr;
	const Range &range = std::prev(after)->second;
	u64 at = (u64)(host - range.host);
	return at <= range.len && len <= range.len - at ? &range : nullptr;
}

static bool overlaps(const std::map<u8 *, Range> &ranges, u8 *host, size_t len)
{
	auto next = ranges.lower_bound(host);
	if (next != ranges.end() && next->first < host + len)
		return true;
	return next != ranges.begin() && host < std::prev(next)->first + std::prev(next)->second.len;
}

u8 *translate(const Lock &, const Context &context, u64 address, u64 len)
{
	const State &all = state();
	const u64 number = address >> SHIFT;
	u8 *host = (u8 *)(uintptr_t)(address & (((u64)1 << SHIFT) - 1));
	const Range *registered = within(all.registrations, host, len);
	if (registered && !registered->portable && registered->context != &context)
		registered = nullptr;
	if (number == 0)
		return registered && all.settings.host_pointers ? host : nullptr;
	if (number != (u64)context.device + 1)
		return nullptr;
	const Range *allocated = within(all.allocations, host, len);
	return registered || (allocated && allocated->context == &context) ? host : nullptr;
}

// The host address of a call's memory.
static u8 *argument(const Lock &lock, const Context &context, const char *call, u64 address, u64 len)
{
	u8 *host = translate(lock, context, address, len);
	if (!host)
		report("%s: %llu bytes at %#llx are not in one piece of the device's memory", call, len, address);
	return host;
}

// Fills memory with a value, immediately or on a stream.
template <class T> static int set(const char *name, u64 address, T value, size_t count, Stream *stream)
{
	Lock lock(state().mutex);
	Context *context;
	if (int refused = enter(lock, name, context))
		return refused;
	T *to = (T *)argument(lock, *context, name, address, count * sizeof(T));
	if (!to || address % sizeof(T))
		return INVALID_VALUE;
	if (stream && !state().streams.count(stream))
		return INVALID_HANDLE;
	queue(lock, *context, stream, [=] {
		for (size_t i = 0; i < count; i++)
			to[i] = value;
	});
	return SUCCESS;
}

} // namespace fake

using namespace fake;

API int cuMemAlloc_v2(u64 *address, size_t len)
{
	ENTER_IN_CONTEXT();
	if (!len)
		return INVALID_VALUE;
	size_t used = 0;
	for (const auto &[_, range] : all.allocations)
		used += range.context == context ? range.len : 0;
	if (used + len > (size_t)all.settings.memory)
		return OUT_OF_MEMORY;
	// A file, which can be mapped again: see cuMemGetHandleForAddressRange.
	const int file = memfd_create("fake CUDA memory", MFD_CLOEXEC);
	if (file < 0)
		return OUT_OF_MEMORY;
	void *host = MAP_FAILED;
	if (ftruncate(file, (off_t)len) == 0)
		host = mmap(nullptr, len, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	if (host == MAP_FAILED) {
		close(file);
		return OUT_OF_MEMORY;
	}
	memset(host, 0xa5, len);
	all.allocations[(u8 *)host] = Range{(u8 *)host, len, context, false, file};
	*address = address_at(*context, (u8 *)host);
	return SUCCESS;
}

API int cuMemFree_v2(u64 address)
{
	ENTER_TO_FREE();
	u8 *host = translate(lock, *context, address, 1);
	if (!host || !all.allocations.count(host)) {
		report("cuMemFree: %#llx is not where an allocation of this context begins", address);
		return INVALID_VALUE;
	}
	wait_for(lock, context->unfinished, "cuMemFree");
	munmap(host, all.allocations[host].len);
	close(all.allocations[host].file);
	all.allocations.erase(host);
	return error;
}

API int cuMemGetInfo_v2(size_t *free, size_t *total)
{
	ENTER_IN_CONTEXT();
	*free = *total = (size_t)all.settings.memory;
	for (const auto &[_, range] : all.allocations)
		*free -= range.context == context ? range.len : 0;
	return SUCCESS;
}

API int cuMemHostRegister_v2(void *host, size_t len, unsigned flags)
{
	ENTER_IN_CONTEXT();
	// PORTABLE, DEVICEMAP, IOMEMORY, READ_ONLY.
	if (!host || !len || flags & ~15u)
		return INVALID_VALUE;
	if (overlaps(all.registrations, (u8 *)host, len))
		return HOST_MEMORY_ALREADY_REGISTERED;
	size_t used = 0;
	for (const auto &[_, range] : all.registrations)
		used += range.len;
	if (used + len > (size_t)all.settings.registrable)
		return OUT_OF_MEMORY;
	wait_for(lock, context->unfinished, "cuMemHostRegister");
	all.registrations[(u8 *)host] = Range{(u8 *)host, len, context, (flags & 1) != 0, -1};
	return SUCCESS;
}

API int cuMemHostUnregister(void *host)
{
	ENTER_TO_FREE();
	auto found = all.registrations.find((u8 *)host);
	if (found == all.registrations.end())
		return HOST_MEMORY_NOT_REGISTERED;
	wait_for(lock, context->unfinished, "cuMemHostUnregister");
	const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
	unsigned char resident;
	if (mincore((void *)((uintptr_t)host / page * page), 1, &resident) != 0)
		abort_with("cuMemHostUnregister: the memory at %p was unmapped while it was registered", host);
	all.registrations.erase((u8 *)host);
	return error;
}

API int cuMemHostGetDevicePointer_v2(u64 *address, void *host, unsigned flags)
{
	ENTER_IN_CONTEXT();
	const Range *range = within(all.registrations, (u8 *)host, 1);
	if (!range || flags)
		return INVALID_VALUE;
	if (!range->portable && range->context != context) {
		report("cuMemHostGetDevicePointer: %p was registered for another device", host);
		return INVALID_VALUE;
	}
	*address = all.settings.host_pointers ? (u64)(uintptr_t)host : address_at(*context, (u8 *)host);
	return SUCCESS;
}

API int cuMemcpyHtoD_v2(u64 to, const void *from, size_t len)
{
	ENTER_IN_CONTEXT();
	u8 *host = argument(lock, *context, "cuMemcpyHtoD", to, len);
	if (!host)
		return INVALID_VALUE;
	queue(lock, *context, nullptr, [=] { memcpy(host, from, len); });
	return SUCCESS;
}

API int cuMemsetD8_v2(u64 to, unsigned char value, size_t count)
{
	return set("cuMemsetD8_v2", to, value, count, nullptr);
}

API int cuMemsetD32_v2(u64 to, unsigned value, size_t count)
{
	return set("cuMemsetD32_v2", to, value, count, nullptr);
}

API int cuMemsetD8Async(u64 to, unsigned char value, size_t count, Stream *stream)
{
	return set("cuMemsetD8Async", to, value, count, stream);
}

API int cuMemsetD16Async(u64 to, unsigned short value, size_t count, Stream *stream)
{
	return set("cuMemsetD16Async", to, value, count, stream);
}

API int cuMemsetD32Async(u64 to, unsigned value, size_t count, Stream *stream)
{
	return set("cuMemsetD32Async", to, value, count, stream);
}

API int cuPointerSetAttribute(const void *value, int attribute, u64 address)
{
	ENTER_IN_CONTEXT();
	// Only SYNC_MEMOPS can be set.
	if (!value || attribute != 6 || !argument(lock, *context, "cuPointerSetAttribute", address, 1))
		return INVALID_VALUE;
	return SUCCESS;
}

API int cuFlushGPUDirectRDMAWrites(int target, int scope)
{
	ENTER_IN_CONTEXT();
	// The current context's device; visible to itself or to all.
	return target != 0 || (scope != 100 && scope != 200) ? INVALID_VALUE : SUCCESS;
}

// Returns a descriptor for mapping device memory: whole pages of one allocation, here all of it.
API int cuMemGetHandleForAddressRange(void *handle, u64 address, size_t len, int type, unsigned long long)
{
	ENTER_IN_CONTEXT();
	if (!all.settings.dma_buf)
		return NOT_SUPPORTED;
	const size_t page = (size_t)sysconf(_SC_PAGESIZE);
	u8 *host = argument(lock, *context, "cuMemGetHandleForAddressRange", address, len);
	auto found = all.allocations.find(host);
	// 1: DMA_BUF_FD.
	if (type != 1 || !len || address % page || len % page || found == all.allocations.end())
		return INVALID_VALUE;
	const int file = fcntl(found->second.file, F_DUPFD_CLOEXEC, 0);
	if (file < 0)
		return OUT_OF_MEMORY;
	memcpy(handle, &file, sizeof(file));
	return SUCCESS;
}

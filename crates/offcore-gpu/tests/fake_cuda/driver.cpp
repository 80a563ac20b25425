// The driver, its devices and their contexts.
#include <cstdio>
#include <cstring>

#include "fake.h"

namespace fake {

// The calling thread's current context.
static thread_local Context *current = nullptr;

int enter(const Lock &, const char *name)
{
	State &all = state();
	all.calls[name]++;
	auto failing = all.failing.find(name);
	if (failing != all.failing.end() && failing->second)
		return failing->second;
	return all.initialized ? SUCCESS : NOT_INITIALIZED;
}

int error_of(Lock &lock, Context &context)
{
	if (context.error)
		state().changed.wait(lock, [&] { return !context.running; });
	return context.error;
}

int enter_to_free(Lock &lock, const char *name, Context *&context, int &error)
{
	if (int refused = enter(lock, name))
		return refused;
	if (!current || !current->retained) {
		report("%s: no context is current to this thread", name);
		return INVALID_CONTEXT;
	}
	context = current;
	error = error_of(lock, *current);
	return SUCCESS;
}

int enter(Lock &lock, const char *name, Context *&context)
{
	int error = 0;
	if (int refused = enter_to_free(lock, name, context, error))
		return refused;
	return error;
}

void fail(Context &context, int error)
{
	int none = 0;
	context.error.compare_exchange_strong(none, error);
	state().changed.notify_all();
}

static bool is_device(int device)
{
	return device >= 0 && device < state().settings.devices;
}

static Context *context_of(int device)
{
	std::vector<Context *> &contexts = state().contexts;
	while (contexts.size() <= (size_t)device) {
		contexts.push_back(new Context);
		contexts.back()->device = (int)contexts.size() - 1;
	}
	return contexts[(size_t)device];
}

// CU_DEVICE_ATTRIBUTE_*.
static int attribute(int which, int device)
{
	const Settings &settings = state().settings;
	switch (which) {
	case 1: // MAX_THREADS_PER_BLOCK
		return 1024;
	case 8: // MAX_SHARED_MEMORY_PER_BLOCK
		return 49152;
	case 10: // WARP_SIZE
		return 32;
	case 16: // MULTIPROCESSOR_COUNT
		return 132;
	case 33: // PCI_BUS_ID
		return device + 1;
	case 75: // COMPUTE_CAPABILITY_MAJOR
		return (int)settings.capability / 10;
	case 76: // COMPUTE_CAPABILITY_MINOR
		return (int)settings.capability % 10;
	case 91: // CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
		return settings.host_pointers != 0;
	case 116: // GPU_DIRECT_RDMA_SUPPORTED
	case 117: // GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS: by the host
		return settings.gpudirect != 0;
	case 118: // GPU_DIRECT_RDMA_WRITES_ORDERING: for the device itself
		return settings.gpudirect == 2 ? 100 : 0;
	case 124: // DMA_BUF_SUPPORTED
		return settings.dma_buf != 0;
	case 17: // KERNEL_EXEC_TIMEOUT
		return settings.display != 0;
	case 19: // CAN_MAP_HOST_MEMORY
	case 31: // CONCURRENT_KERNELS
	case 41: // UNIFIED_ADDRESSING
	case 78: // STREAM_PRIORITIES_SUPPORTED
	case 99: // HOST_REGISTER_SUPPORTED
		return 1;
	default:
		return 0;
	}
}

} // namespace fake

using namespace fake;

API int cuInit(unsigned flags)
{
	State &all = state();
	Lock lock(all.mutex);
	int refused = enter(lock, "cuInit");
	if (refused && refused != NOT_INITIALIZED)
		return refused;
	if (flags)
		return INVALID_VALUE;
	if (all.settings.devices == 0)
		return NO_DEVICE;
	all.initialized = true;
	return SUCCESS;
}

API int cuDriverGetVersion(int *version)
{
	Lock lock(state().mutex);
	int refused = enter(lock, "cuDriverGetVersion");
	if (refused && refused != NOT_INITIALIZED)
		return refused;
	*version = (int)state().settings.driver;
	return SUCCESS;
}

API int cuDeviceGetCount(int *count)
{
	ENTER();
	*count = (int)all.settings.devices;
	return SUCCESS;
}

API int cuDeviceGet(int *device, int ordinal)
{
	ENTER();
	if (!is_device(ordinal))
		return INVALID_DEVICE;
	*device = ordinal;
	return SUCCESS;
}

API int cuDeviceGetName(char *name, int len, int device)
{
	ENTER();
	if (!is_device(device) || len < 1)
		return INVALID_VALUE;
	snprintf(name, (size_t)len, "%s", all.settings.name.c_str());
	return SUCCESS;
}

API int cuDeviceGetAttribute(int *value, int which, int device)
{
	ENTER();
	if (!is_device(device))
		return INVALID_DEVICE;
	if (which < 1 || which > 160)
		return INVALID_VALUE;
	*value = attribute(which, device);
	return SUCCESS;
}

API int cuDeviceTotalMem_v2(size_t *bytes, int device)
{
	ENTER();
	if (!is_device(device))
		return INVALID_DEVICE;
	*bytes = (size_t)all.settings.memory;
	return SUCCESS;
}

API int cuDeviceGetPCIBusId(char *id, int len, int device)
{
	ENTER();
	if (!is_device(device) || len < 13)
		return INVALID_VALUE;
	snprintf(id, (size_t)len, "0000:%02X:00.0", (unsigned)device + 1);
	return SUCCESS;
}

API int cuDevicePrimaryCtxRetain(Context **context, int device)
{
	ENTER();
	if (!is_device(device))
		return INVALID_DEVICE;
	*context = context_of(device);
	if (int error = (*context)->error)
		return error;
	(*context)->retained++;
	return SUCCESS;
}

API int cuDevicePrimaryCtxRelease_v2(int device)
{
	ENTER();
	if (!is_device(device))
		return INVALID_DEVICE;
	Context &context = *context_of(device);
	if (!context.retained)
		return INVALID_CONTEXT;
	if (--context.retained == 0) {
		// The kernels end with the context; the next context works.
		if (context.unfinished)
			fail(context, LAUNCH_FAILED);
		wait_for(lock, context.unfinished, "cuDevicePrimaryCtxRelease");
		context.error = 0;
	}
	return SUCCESS;
}

API int cuCtxSetCurrent(Context *context)
{
	ENTER();
	bool known = !context;
	for (const Context *one : all.contexts)
		known |= one == context && one->retained;
	if (!known)
		return INVALID_CONTEXT;
	current = context;
	return SUCCESS;
}

API int cuProfilerStart(void)
{
	ENTER_IN_CONTEXT();
	return SUCCESS;
}

API int cuProfilerStop(void)
{
	ENTER_IN_CONTEXT();
	return SUCCESS;
}

namespace {

struct Text {
	int error;
	const char *name, *words;
};

const Text TEXTS[] = {
	{SUCCESS, "CUDA_SUCCESS", "no error"},
	{INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
	{OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
	{NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
	{NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
	{INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
	{INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
	{INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
	{NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
	{INVALID_PTX, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"},
	{UNSUPPORTED_PTX_VERSION, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
	 "the provided PTX was compiled with an unsupported toolchain"},
	{INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
	{NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
	{NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
	{ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
	{LAUNCH_OUT_OF_RESOURCES, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
	{HOST_MEMORY_ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
	 "part or all of the requested memory range is already mapped"},
	{HOST_MEMORY_NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
	 "pointer does not correspond to a registered memory region"},
	{LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
	{NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
};

const Text *text_of(int error)
{
	for (const Text &text : TEXTS)
		if (text.error == error)
			return &text;
	return nullptr;
}

} // namespace

API int cuGetErrorName(int error, const char **name)
{
	const Text *text = text_of(error);
	*name = text ? text->name : nullptr;
	return text ? SUCCESS : INVALID_VALUE;
}

API int cuGetErrorString(int error, const char **words)
{
	const Text *text = text_of(error);
	*words = text ? text->words : nullptr;
	return text ? SUCCESS : INVALID_VALUE;
}

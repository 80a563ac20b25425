// Modules and functions. Only the head of the PTX and the kernels' parameters and bounds are parsed.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "fake.h"

namespace fake {

// Size of a parameter: ".param .align 8 .b8 NAME[112]", ".param .u32 NAME".
static size_t parameter_size(const std::string &line)
{
	size_t bracket = line.find('[');
	if (line.find(".b8 ") != std::string::npos && bracket != std::string::npos)
		return (size_t)atol(line.c_str() + bracket + 1);
	for (const char *type : {".u64", ".b64", ".s64"})
		if (line.find(type) != std::string::npos)
			return 8;
	for (const char *type : {".u32", ".b32", ".s32"})
		if (line.find(type) != std::string::npos)
			return 4;
	return 0;
}

// The kernels of a PTX text, without a context.
static std::map<std::string, Function *> kernels_of(const std::string &ptx)
{
	std::map<std::string, Function *> found;
	Function *open = nullptr;
	bool in_list = false;
	for (size_t at = 0; at < ptx.size();) {
		size_t end = ptx.find('\n', at);
		end = end == std::string::npos ? ptx.size() : end;
		std::string line = ptx.substr(at, end - at);
		at = end + 1;
		size_t entry = line.find(".entry ");
		if (entry != std::string::npos) {
			open = new Function;
			open->name = line.substr(entry + 7, line.find('(') - entry - 7);
			found[open->name] = open;
			in_list = true;
		} else if (open && in_list && line.find(".param") != std::string::npos) {
			open->parameters.push_back(parameter_size(line));
		} else if (open && line.rfind(".maxntid", 0) == 0) {
			open->max_threads = (unsigned)atol(line.c_str() + 8);
		}
		in_list &= line.rfind(')', 0) == std::string::npos;
	}
	return found;
}

// The number of a directive such as ".version 8.0" or ".target sm_75": ten times major plus minor.
static int number_behind(const std::string &ptx, const char *directive, const char *format)
{
	size_t at = ptx.find(directive);
	int major = 0, minor = 0;
	if (at == std::string::npos || sscanf(ptx.c_str() + at + strlen(directive), format, &major, &minor) < 1)
		return -1;
	return strchr(format, '.') ? major * 10 + minor : major;
}

// The newest PTX of a driver: 8.0 with CUDA 12.0, 9.0 with CUDA 13.0.
static int newest_ptx(long long driver)
{
	return (int)((driver / 1000 - 4) * 10 + driver % 1000 / 10);
}

static int check_ptx(const std::string &ptx)
{
	const Settings &settings = state().settings;
	const int version = number_behind(ptx, ".version", " %d.%d"), target = number_behind(ptx, ".target", " sm_%d");
	if (version < 0 || target < 0)
		return INVALID_IMAGE;
	if (version > newest_ptx(settings.driver))
		return UNSUPPORTED_PTX_VERSION;
	if (target > settings.capability)
		return NO_BINARY_FOR_GPU;
	return settings.refuse_ptx ? INVALID_PTX : SUCCESS;
}

// Writes a message to the buffer in the options ERROR_LOG_BUFFER and ERROR_LOG_BUFFER_SIZE_BYTES.
static void log_to(unsigned count, const int *options, void **values, const char *message)
{
	char *buffer = nullptr;
	size_t len = 0;
	for (unsigned i = 0; i < count; i++) {
		if (options[i] == 5)
			buffer = (char *)values[i];
		if (options[i] == 6)
			len = (unsigned)(uintptr_t)values[i];
	}
	if (buffer && len)
		snprintf(buffer, len, "%s", message);
}

} // namespace fake

using namespace fake;

API int cuModuleLoadDataEx(Module **module, const void *image, unsigned count, const int *options, void **values)
{
	ENTER_IN_CONTEXT();
	if (!image)
		return INVALID_VALUE;
	const std::string ptx = (const char *)image;
	if (int refused = check_ptx(ptx)) {
		log_to(count, options, values, "ptxas fatal: refused by the stand-in");
		return refused;
	}
	Module *made = new Module{context, kernels_of(ptx)};
	for (const auto &[name, function] : made->functions) {
		const std::vector<size_t> expected = parameters_of(name);
		if (!expected.empty() && function->parameters != expected) {
			report("kernel %s: its PTX has other parameters than its source", name.c_str());
			return INVALID_IMAGE;
		}
		function->context = context;
	}
	all.modules.insert(made);
	*module = made;
	return SUCCESS;
}

API int cuModuleUnload(Module *module)
{
	ENTER_TO_FREE();
	if (!all.modules.count(module))
		return INVALID_HANDLE;
	wait_for(lock, module->context->unfinished, "cuModuleUnload");
	for (const auto &[_, function] : module->functions)
		all.functions.erase(function);
	all.modules.erase(module);
	return error;
}

API int cuModuleGetFunction(Function **function, Module *module, const char *name)
{
	ENTER_IN_CONTEXT();
	if (!all.modules.count(module))
		return INVALID_HANDLE;
	auto found = module->functions.find(name);
	if (found == module->functions.end() || parameters_of(name).empty())
		return NOT_FOUND;
	all.functions.insert(found->second);
	*function = found->second;
	return SUCCESS;
}

API int cuFuncGetAttribute(int *value, int which, Function *function)
{
	ENTER_IN_CONTEXT();
	if (!all.functions.count(function))
		return INVALID_HANDLE;
	switch (which) {
	case 0: // MAX_THREADS_PER_BLOCK
		*value = (int)function->max_threads;
		return SUCCESS;
	case 4: // NUM_REGS
		*value = 40;
		return SUCCESS;
	default:
		*value = 0;
		return which >= 0 && which < 16 ? SUCCESS : INVALID_VALUE;
	}
}

API int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, Function *function, int threads, size_t)
{
	ENTER_IN_CONTEXT();
	if (!all.functions.count(function))
		return INVALID_HANDLE;
	if (threads < 1)
		return INVALID_VALUE;
	*blocks = 2048 / threads;
	return SUCCESS;
}

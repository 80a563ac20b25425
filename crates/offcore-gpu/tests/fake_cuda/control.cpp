// The control interface of tests: faults, live objects, call counts.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <unistd.h>

#include "fake.h"

namespace fake {

static void say(const char *format, va_list arguments)
{
	fputs("fake CUDA: ", stderr);
	vfprintf(stderr, format, arguments);
	fputc('\n', stderr);
}

void report(const char *format, ...)
{
	va_list arguments;
	va_start(arguments, format);
	say(format, arguments);
	va_end(arguments);
}

void abort_with(const char *format, ...)
{
	va_list arguments;
	va_start(arguments, format);
	say(format, arguments);
	va_end(arguments);
	abort();
}

// Returns the setting with a name, or null if it does not exist.
static long long *number(Settings &settings, const std::string &name)
{
	const std::pair<const char *, long long *> numbers[] = {
		{"devices", &settings.devices},
		{"driver", &settings.driver},
		{"capability", &settings.capability},
		{"memory", &settings.memory},
		{"registrable", &settings.registrable},
		{"host_pointers", &settings.host_pointers},
		{"dma_buf", &settings.dma_buf},
		{"display", &settings.display},
		{"gpudirect", &settings.gpudirect},
		{"refuse_ptx", &settings.refuse_ptx},
		{"lost_after", &settings.lost_after},
		{"hang_after", &settings.hang_after},
		{"hang_count", &settings.hang_count},
		{"lost_before_answer", &settings.lost_before_answer},
		{"lost_error", &settings.lost_error},
		{"launch_us", &settings.launch_us},
		{"timeout", &settings.timeout},
	};
	for (const auto &[known, at] : numbers)
		if (name == known)
			return at;
	return nullptr;
}

// Examples: OFFCORE_FAKE_DRIVER=11040, OFFCORE_FAKE_NAME=..., OFFCORE_FAKE_cuMemAlloc_v2=2.
static void settings_from_environment(State &state)
{
	static const char prefix[] = "OFFCORE_FAKE_";
	for (char **entry = environ; entry && *entry; entry++) {
		const char *value = strchr(*entry, '=');
		if (strncmp(*entry, prefix, sizeof(prefix) - 1) != 0 || !value)
			continue;
		std::string name(*entry + sizeof(prefix) - 1, (size_t)(value - *entry) - (sizeof(prefix) - 1));
		value++;
		// The library's path, which cargo passes to tests.
		if (name == "CUDA")
			continue;
		if (name == "NAME") {
			state.settings.name = value;
			continue;
		}
		if (name.rfind("cu", 0) == 0) {
			state.failing[name] = atoi(value);
			continue;
		}
		for (char &letter : name)
			if (letter >= 'A' && letter <= 'Z')
				letter = (char)(letter - 'A' + 'a');
		if (long long *at = number(state.settings, name))
			*at = atoll(value);
		else
			report("%s: there is no such setting", *entry);
	}
}

State &state()
{
	static State *state = [] {
		State *made = new State;
		settings_from_environment(*made);
		return made;
	}();
	return *state;
}

void wait_for(Lock &lock, const unsigned &unfinished, const char *call)
{
	State &all = state();
	auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(all.settings.timeout);
	while (unfinished)
		if (all.changed.wait_until(lock, deadline) == std::cv_status::timeout && unfinished)
			abort_with("%s waits for kernels that do not end: a driver would wait for ever", call);
}

} // namespace fake

using namespace fake;

// Sets a field of Settings, or the result of an entry point from now on (0: normal). "reset" ends kernels and restores
// the initial state except for live objects. Returns whether the name exists.
API int offcore_fake_set(const char *name, long long value)
{
	State &all = state();
	Lock lock(all.mutex);
	if (strcmp(name, "reset") == 0) {
		all.settings = Settings();
		all.failing.clear();
		all.calls.clear();
		all.bursts = 0;
		for (Context *context : all.contexts) {
			if (context->unfinished)
				context->error = LAUNCH_FAILED;
			wait_for(lock, context->unfinished, "offcore_fake_set");
			context->error = 0;
		}
		return 1;
	}
	if (strncmp(name, "cu", 2) == 0) {
		all.failing[name] = (int)value;
		return 1;
	}
	if (long long *at = number(all.settings, name)) {
		*at = value;
		all.bursts = 0;
		return 1;
	}
	return 0;
}

// Sets the devices' name.
API void offcore_fake_name(const char *name)
{
	Lock lock(state().mutex);
	state().settings.name = name;
}

// Returns the number of calls of an entry point.
API unsigned long long offcore_fake_calls(const char *name)
{
	Lock lock(state().mutex);
	return state().calls[name];
}

// Returns live objects as text: "nothing", or "1 contexts, 2 streams". Valid until the thread's next call.
API const char *offcore_fake_live(void)
{
	static thread_local std::string text;
	State &all = state();
	Lock lock(all.mutex);
	size_t contexts = 0;
	for (const Context *context : all.contexts)
		contexts += context->retained;
	const std::pair<size_t, const char *> counts[] = {
		{contexts, "contexts"}, {all.modules.size(), "modules"}, {all.streams.size(), "streams"},
		{all.events.size(), "events"}, {all.graphs.size(), "graphs"}, {all.execs.size(), "execs"},
		{all.allocations.size(), "allocations"}, {all.registrations.size(), "registrations"},
	};
	text.clear();
	for (const auto &[count, what] : counts)
		if (count)
			text += (text.empty() ? "" : ", ") + std::to_string(count) + " " + what;
	if (text.empty())
		text = "nothing";
	return text.c_str();
}

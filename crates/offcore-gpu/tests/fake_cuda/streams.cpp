// Streams, each a thread with a queue, and events.
#include "fake.h"

namespace fake {

static void serve(Stream *stream)
{
	State &all = state();
	Lock lock(all.mutex);
	for (;;) {
		all.changed.wait(lock, [&] { return !stream->queue.empty() || stream->ending; });
		if (stream->queue.empty())
			return;
		std::function<void()> work = std::move(stream->queue.front());
		stream->queue.pop_front();
		if (!stream->context->error) {
			stream->context->running++;
			lock.unlock();
			work();
			work = nullptr;
			lock.lock();
			stream->context->running--;
		}
		stream->unfinished--;
		stream->context->unfinished--;
		all.changed.notify_all();
	}
}

void queue(Lock &lock, Context &context, Stream *stream, std::function<void()> work)
{
	State &all = state();
	if (!stream) {
		for (const Stream *other : std::set<Stream *>(all.streams))
			if (other->context == &context && other->blocking)
				wait_for(lock, other->unfinished, "a call on the null stream");
		work();
		return;
	}
	stream->queue.push_back(std::move(work));
	stream->unfinished++;
	context.unfinished++;
	all.changed.notify_all();
}

} // namespace fake

using namespace fake;

API int cuStreamCreateWithPriority(Stream **stream, unsigned flags, int)
{
	ENTER_IN_CONTEXT();
	if (flags > 1)
		return INVALID_VALUE;
	*stream = new Stream;
	(*stream)->context = context;
	(*stream)->blocking = !flags;
	all.streams.insert(*stream);
	std::thread(serve, *stream).detach();
	return SUCCESS;
}

// Queued work still completes.
API int cuStreamDestroy_v2(Stream *stream)
{
	ENTER_TO_FREE();
	if (!all.streams.erase(stream))
		return INVALID_HANDLE;
	stream->ending = true;
	all.changed.notify_all();
	return error;
}

API int cuStreamQuery(Stream *stream)
{
	ENTER_IN_CONTEXT();
	if (!all.streams.count(stream))
		return INVALID_HANDLE;
	return stream->unfinished ? NOT_READY : SUCCESS;
}

API int cuStreamSynchronize(Stream *stream)
{
	ENTER_IN_CONTEXT();
	if (!all.streams.count(stream))
		return INVALID_HANDLE;
	wait_for(lock, stream->unfinished, "cuStreamSynchronize");
	return error_of(lock, *context);
}

API int cuEventCreate(Event **event, unsigned flags)
{
	ENTER_IN_CONTEXT();
	// BLOCKING_SYNC, DISABLE_TIMING.
	if (flags & ~3u)
		return INVALID_VALUE;
	*event = new Event{context};
	all.events.insert(*event);
	return SUCCESS;
}

API int cuEventDestroy_v2(Event *event)
{
	ENTER_TO_FREE();
	return all.events.erase(event) ? error : (int)INVALID_HANDLE;
}

API int cuEventRecord(Event *event, Stream *stream)
{
	ENTER_IN_CONTEXT();
	if (!all.events.count(event) || (stream && !all.streams.count(stream)))
		return INVALID_HANDLE;
	if (event->context != context || (stream && stream->context != context))
		return INVALID_HANDLE;
	const unsigned long long number = ++event->recorded;
	if (!stream) {
		queue(lock, *context, nullptr, [=] { event->reached = number; });
		return SUCCESS;
	}
	queue(lock, *context, stream, [=] {
		Lock lock(state().mutex);
		event->reached = number;
	});
	return SUCCESS;
}

API int cuEventQuery(Event *event)
{
	ENTER_IN_CONTEXT();
	if (!all.events.count(event))
		return INVALID_HANDLE;
	return event->reached < event->recorded ? NOT_READY : SUCCESS;
}

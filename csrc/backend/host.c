/* A device made of threads.
 *
 * Its streams (host_stream.h) run their queues beside each other; an event is the latest moment that was recorded for
 * it. One mutex, that of the streams, guards everything here.
 */
#include "host.h"

#include <stdlib.h>
#include <string.h>

#include "../base/os.h"
#include "host_memory.h"
#include "host_stream.h"

struct viking_event {
    bool timed;
    viking_host_moment *latest; /* NULL: never recorded */
};

typedef struct host {
    viking_backend base;
    viking_host_streams streams;
    viking_host_memory memory;
    uint64_t calls;
    uint64_t fail_in; /* 0: no fault is due */
    viking_status fail_code;
} host;

/* ---- entering a call ---- */

/* Every call through the table begins with this; returns with the mutex held. */
static host *enter(viking_backend *self)
{
    host *device = (host *)self;
    viking_mutex_lock(device->streams.mutex);
    device->calls++;
    return device;
}

/* For the calls that return a status. On failure the mutex is free again. */
static viking_status enter_fallible(viking_backend *self, const char *call, host **out)
{
    host *device = enter(self);
    *out = device;
    if (device->fail_in == 0 || --device->fail_in > 0)
        return VIKING_OK;
    viking_status code = device->fail_code;
    unsigned long long number = device->calls;
    viking_mutex_unlock(device->streams.mutex);
    return viking_status_fail(code, "host backend: %s, call %llu, fails because a test asked for it", call, number);
}

/* ---- streams ---- */

static viking_status host_stream_open(viking_backend *self, viking_stream *out)
{
    host *device;
    viking_status status = enter_fallible(self, "stream_open", &device);
    if (status != VIKING_OK)
        return status;
    viking_mutex_unlock(device->streams.mutex);
    status = viking_host_stream_start(&device->streams, out);
    if (status == VIKING_OK)
        self->streams++;
    return status;
}

static void host_stream_close(viking_backend *self, viking_stream stream)
{
    host *device = enter(self);
    if (stream == VIKING_STREAM_CALLER) {
        viking_mutex_unlock(device->streams.mutex);
        return;
    }
    viking_host_stream_end(&device->streams, stream);
    self->streams--;
}

/* A record of its own that nobody else knows, and a wait for it. */
static viking_status host_stream_drain(viking_backend *self, viking_stream stream)
{
    host *device;
    viking_status status = enter_fallible(self, "stream_drain", &device);
    if (status != VIKING_OK)
        return status;
    if (stream != VIKING_STREAM_CALLER) {
        viking_host_moment *end = NULL;
        status = viking_host_record(&device->streams, stream, false, "stream_drain", &end);
        if (status == VIKING_OK) {
            viking_host_moment_await(&device->streams, end);
            viking_host_moment_drop(end);
        }
    }
    viking_mutex_unlock(device->streams.mutex);
    return status;
}

/* ---- events ---- */

static viking_status host_event_open(viking_backend *self, bool timed, viking_event **out)
{
    host *device;
    viking_status status = enter_fallible(self, "event_open", &device);
    if (status != VIKING_OK)
        return status;
    viking_mutex_unlock(device->streams.mutex);
    viking_event *event = calloc(1, sizeof *event);
    if (!event)
        return viking_host_no_memory("event_open");
    event->timed = timed;
    self->events++;
    *out = event;
    return VIKING_OK;
}

static void host_event_close(viking_backend *self, viking_event *event)
{
    host *device = enter(self);
    if (event) {
        viking_host_moment_drop(event->latest);
        self->events--;
    }
    viking_mutex_unlock(device->streams.mutex);
    free(event);
}

static viking_status host_event_record(viking_backend *self, viking_event *event, viking_stream stream)
{
    host *device;
    viking_status status = enter_fallible(self, "event_record", &device);
    if (status != VIKING_OK)
        return status;
    viking_host_moment *fresh = NULL;
    status = viking_host_record(&device->streams, stream, event->timed, "event_record", &fresh);
    if (status == VIKING_OK) {
        viking_host_moment_drop(event->latest);
        event->latest = fresh;
    }
    viking_mutex_unlock(device->streams.mutex);
    return status;
}

static viking_status host_event_reached(viking_backend *self, viking_event *event, bool *out)
{
    host *device;
    viking_status status = enter_fallible(self, "event_reached", &device);
    if (status != VIKING_OK)
        return status;
    *out = !event->latest || event->latest->reached;
    viking_mutex_unlock(device->streams.mutex);
    return VIKING_OK;
}

/* With the mutex held, which is let go of while waiting. */
static void await_latest(host *device, const viking_event *event)
{
    viking_host_moment *latest = event->latest;
    if (latest) {
        latest->references++;
        viking_host_moment_await(&device->streams, latest);
        viking_host_moment_drop(latest);
    }
}

static viking_status host_event_drain(viking_backend *self, viking_event *event)
{
    host *device;
    viking_status status = enter_fallible(self, "event_drain", &device);
    if (status != VIKING_OK)
        return status;
    await_latest(device, event);
    viking_mutex_unlock(device->streams.mutex);
    return VIKING_OK;
}

static viking_status host_event_elapsed(viking_backend *self, viking_event *from, viking_event *to, uint64_t *out_ns)
{
    host *device;
    viking_status status = enter_fallible(self, "event_elapsed", &device);
    if (status != VIKING_OK)
        return status;
    if (!from->timed || !to->timed) {
        status = viking_status_fail(VIKING_ERROR_INVALID, "host backend: event_elapsed needs two timed events");
    } else if (!from->latest || !to->latest || !from->latest->reached || !to->latest->reached) {
        status = viking_status_fail(VIKING_ERROR_STATE, "host backend: event_elapsed needs two events that were "
                                                        "recorded and reached");
    } else {
        uint64_t begin = from->latest->reached_ns;
        uint64_t end = to->latest->reached_ns;
        *out_ns = end > begin ? end - begin : 0;
    }
    viking_mutex_unlock(device->streams.mutex);
    return status;
}

static viking_status host_stream_wait(viking_backend *self, viking_stream stream, viking_event *event)
{
    host *device;
    viking_status status = enter_fallible(self, "stream_wait", &device);
    if (status != VIKING_OK)
        return status;
    if (stream == VIKING_STREAM_CALLER) {
        await_latest(device, event);
    } else if (event->latest) {
        viking_host_item *it = calloc(1, sizeof *it);
        if (it) {
            it->kind = VIKING_HOST_WAIT;
            it->moment = event->latest;
            it->moment->references++;
            viking_host_queue(stream, it);
        } else {
            status = viking_host_no_memory("stream_wait");
        }
    }
    viking_mutex_unlock(device->streams.mutex);
    return status;
}

/* ---- copies and launches ---- */

static viking_status host_copy(viking_backend *self, viking_copy_direction direction, void *destination,
                               const void *source, size_t bytes, viking_stream stream)
{
    host *device;
    viking_status status = enter_fallible(self, "copy", &device);
    if (status != VIKING_OK)
        return status;
    if (stream == VIKING_STREAM_CALLER) {
        viking_mutex_unlock(device->streams.mutex);
        viking_host_copy_now(&device->streams, direction, destination, source, bytes, viking_os_clock_ns());
        return VIKING_OK;
    }
    viking_host_item *it = calloc(1, sizeof *it);
    if (it) {
        it->kind = VIKING_HOST_COPY;
        it->queued_ns = device->streams.bytes_per_second ? viking_os_clock_ns() : 0;
        it->direction = direction;
        it->destination = destination;
        it->source = source;
        it->bytes = bytes;
        viking_host_queue(stream, it);
    } else {
        status = viking_host_no_memory("copy");
    }
    viking_mutex_unlock(device->streams.mutex);
    return status;
}

/* With the mutex held, which is free at the end. */
static viking_status call_on(host *device, viking_stream stream, void (*function)(void *), void *argument,
                             const char *call)
{
    viking_status status = VIKING_OK;
    viking_host_item *it = stream == VIKING_STREAM_CALLER ? NULL : calloc(1, sizeof *it);
    if (it) {
        it->kind = VIKING_HOST_CALL;
        it->body = function;
        it->argument = argument;
        viking_host_queue(stream, it);
    } else if (stream != VIKING_STREAM_CALLER) {
        status = viking_host_no_memory(call);
    }
    viking_mutex_unlock(device->streams.mutex);
    if (stream == VIKING_STREAM_CALLER)
        function(argument);
    return status;
}

static viking_status host_host_call(viking_backend *self, viking_stream stream, void (*function)(void *),
                                    void *argument)
{
    host *device;
    viking_status status = enter_fallible(self, "host_call", &device);
    return status == VIKING_OK ? call_on(device, stream, function, argument, "host_call") : status;
}

viking_status viking_host_launch(viking_backend *self, viking_stream stream, void (*body)(void *), void *argument)
{
    host *device = (host *)self;
    viking_mutex_lock(device->streams.mutex);
    return call_on(device, stream, body, argument, "viking_host_launch");
}

/* ---- memory ---- */

static viking_status host_memory(viking_backend *self, size_t *free_bytes, size_t *total_bytes)
{
    host *device;
    viking_status status = enter_fallible(self, "memory", &device);
    if (status != VIKING_OK)
        return status;
    *total_bytes = (size_t)device->memory.total_bytes;
    *free_bytes = (size_t)(device->memory.total_bytes - device->memory.allocated_bytes);
    viking_mutex_unlock(device->streams.mutex);
    return VIKING_OK;
}

static viking_status host_allocate(viking_backend *self, size_t bytes, void **out)
{
    host *device;
    viking_status status = enter_fallible(self, "allocate", &device);
    if (status != VIKING_OK)
        return status;
    status = viking_host_memory_allocate(&device->memory, bytes, out);
    viking_mutex_unlock(device->streams.mutex);
    return status;
}

static void host_release(viking_backend *self, void *address)
{
    host *device = enter(self);
    viking_host_memory_release(&device->memory, address);
    viking_mutex_unlock(device->streams.mutex);
}

static viking_status host_pin(viking_backend *self, void *address, size_t bytes)
{
    host *device;
    viking_status status = enter_fallible(self, "pin", &device);
    if (status != VIKING_OK)
        return status;
    status = viking_host_memory_pin(&device->memory, address, bytes);
    self->pins += status == VIKING_OK;
    viking_mutex_unlock(device->streams.mutex);
    return status;
}

static viking_status host_unpin(viking_backend *self, void *address)
{
    host *device;
    viking_status status = enter_fallible(self, "unpin", &device);
    if (status != VIKING_OK)
        return status;
    status = viking_host_memory_unpin(&device->memory, address);
    self->pins -= status == VIKING_OK;
    viking_mutex_unlock(device->streams.mutex);
    return status;
}

/* ---- the device ---- */

static void host_close(viking_backend *self)
{
    host *device = (host *)self;
    viking_host_streams_close(&device->streams);
    viking_host_memory_free(&device->memory);
    free(device);
}

static const viking_backend_operations operations = {
    .name = "host",
    .caller_blocks = true,
    .close = host_close,
    .memory = host_memory,
    .allocate = host_allocate,
    .release = host_release,
    .pin = host_pin,
    .unpin = host_unpin,
    .stream_open = host_stream_open,
    .stream_close = host_stream_close,
    .stream_drain = host_stream_drain,
    .event_open = host_event_open,
    .event_close = host_event_close,
    .event_record = host_event_record,
    .event_reached = host_event_reached,
    .event_drain = host_event_drain,
    .event_elapsed = host_event_elapsed,
    .stream_wait = host_stream_wait,
    .copy = host_copy,
    .host_call = host_host_call,
};

viking_status viking_host_open(const viking_host_options *options, viking_backend **out)
{
    static const viking_host_options none = {0};
    options = options ? options : &none;
    host *device = calloc(1, sizeof *device);
    if (!device)
        return viking_host_no_memory("viking_host_open");
    device->base.operations = &operations;
    device->streams.bytes_per_second = options->bytes_per_second;
    device->streams.delay_ns = options->delay_ns;
    device->streams.seed = options->seed;
    uint64_t machine_bytes = viking_os_memory_bytes();
    device->memory.pin_limit_bytes = options->pin_limit_bytes;
    device->memory.total_bytes = options->memory_bytes ? options->memory_bytes
                                 : machine_bytes       ? machine_bytes
                                                       : SIZE_MAX;
    viking_status status = viking_host_streams_open(&device->streams);
    if (status != VIKING_OK) {
        free(device);
        return status;
    }
    *out = &device->base;
    return VIKING_OK;
}

uint64_t viking_host_calls(const viking_backend *self)
{
    const host *device = (const host *)self;
    viking_mutex_lock(device->streams.mutex);
    uint64_t calls = device->calls;
    viking_mutex_unlock(device->streams.mutex);
    return calls;
}

void viking_host_fail_at(viking_backend *self, uint64_t n, viking_status code)
{
    host *device = (host *)self;
    viking_mutex_lock(device->streams.mutex);
    device->fail_in = n;
    device->fail_code = code;
    viking_mutex_unlock(device->streams.mutex);
}

uint64_t viking_host_pinned_bytes(const viking_backend *self)
{
    const host *device = (const host *)self;
    viking_mutex_lock(device->streams.mutex);
    uint64_t bytes = device->memory.pinned_bytes;
    viking_mutex_unlock(device->streams.mutex);
    return bytes;
}

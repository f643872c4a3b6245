/* A CUDA runtime without CUDA: the functions that Viking calls, under their own names, over the host backend.
 *
 * Device memory is host memory, so a CPU tensor can stand for a device tensor. The default stream is the calling
 * thread: work on it is done when the call returns, as it is for tensors on the CPU. What it takes seriously is what
 * Viking could get wrong: which device is current in which thread, which device a stream or an event belongs to, what
 * is registered, the last error that stays until somebody asks, and everything that is created and never destroyed.
 */
#include "fake_cudart.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cuda_runtime.h"
#include "backend/host.h"

#define EXPORT __attribute__((visibility("default")))
#define LARGEST_DEVICE_COUNT 16

#define DECLARE(name, result, parameters) EXPORT result cuda##name parameters;
VIKING_CUDA_FUNCTIONS(DECLARE)
#ifndef FAKE_CUDART_OLD
VIKING_CUDA_OPTIONAL_FUNCTIONS(DECLARE)
#endif
/* What Viking does not call and tests do. */
EXPORT viking_cuda_result cudaPeekAtLastError(void);

enum symbol {
#define NUMBER(name, result, parameters) SYMBOL_##name,
    VIKING_CUDA_FUNCTIONS(NUMBER) VIKING_CUDA_OPTIONAL_FUNCTIONS(NUMBER) SYMBOL_COUNT
};

static const char *const symbol_names[] = {
#define NAME(name, result, parameters) "cuda" #name,
    VIKING_CUDA_FUNCTIONS(NAME) VIKING_CUDA_OPTIONAL_FUNCTIONS(NAME)};

struct CUstream_st {
    struct CUstream_st *next;
    int device;
    unsigned flags;
    viking_stream stream;
};

struct CUevent_st {
    struct CUevent_st *next;
    int device;
    unsigned flags;
    bool recorded;
    viking_event *event;
};

typedef struct range {
    struct range *next;
    char *address;
    size_t bytes;
    int device;
} range;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* guards `fake`; never held while something may wait */

static struct {
    bool ready;
    int device_count;
    viking_host_options options;
    uint64_t register_limit;
    int register_error;
    viking_backend *devices[LARGEST_DEVICE_COUNT]; /* opened when first used */
    struct CUstream_st *streams;
    struct CUstream_st *destroyed_streams; /* their work goes on, as on a device; ended by a reset */
    struct CUevent_st *events;
    range *registrations;
    range *allocations;
    uint64_t registered_bytes;
    uint64_t copied_bytes[2];
    uint64_t calls[SYMBOL_COUNT];
    uint64_t fail_in[SYMBOL_COUNT];
    int fail_error[SYMBOL_COUNT];
    uint64_t fail_any_in;
    int fail_any_error;
} fake;

static _Thread_local int current_device;
static _Thread_local int last_error;

/* ---- settings ---- */

static uint64_t setting(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    return text && *text ? strtoull(text, NULL, 0) : otherwise;
}

static int symbol_index(const char *symbol)
{
    for (int i = 0; i < SYMBOL_COUNT; i++)
        if (strcmp(symbol_names[i], symbol) == 0)
            return i;
    return -1;
}

static bool plan_failure(const char *symbol, uint64_t n, int error)
{
    int index = symbol_index(symbol);
    if (strcmp(symbol, "*") == 0) {
        fake.fail_any_in = n;
        fake.fail_any_error = error;
    } else if (index >= 0) {
        fake.fail_in[index] = n;
        fake.fail_error[index] = error;
    } else {
        return false;
    }
    return true;
}

static void set_device_count(uint64_t count)
{
    fake.device_count = count < LARGEST_DEVICE_COUNT ? (int)count : LARGEST_DEVICE_COUNT;
}

/* With the mutex held. */
static void make_ready(void)
{
    if (fake.ready)
        return;
    memset(&fake, 0, sizeof fake);
    fake.ready = true;
    set_device_count(setting("FAKE_CUDART_DEVICES", 1));
    fake.options.memory_bytes = setting("FAKE_CUDART_MEMORY", (uint64_t)64 << 30);
    fake.options.bytes_per_second = setting("FAKE_CUDART_BYTES_PER_SECOND", 0);
    fake.options.delay_ns = setting("FAKE_CUDART_DELAY_NS", 0);
    fake.options.seed = setting("FAKE_CUDART_SEED", 0);
    fake.register_limit = setting("FAKE_CUDART_REGISTER_LIMIT", 0);
    fake.register_error = (int)setting("FAKE_CUDART_REGISTER_ERROR", VIKING_CUDA_MEMORY_ALLOCATION);
    const char *fail = getenv("FAKE_CUDART_FAIL");
    char symbol[64];
    unsigned long long n;
    int error;
    if (fail && sscanf(fail, "%63[^:]:%llu:%d", symbol, &n, &error) == 3 && !plan_failure(symbol, n, error))
        fprintf(stderr, "FAKE_CUDART_FAIL: there is no function '%s'\n", symbol);
}

static void lock(void)
{
    pthread_mutex_lock(&mutex);
    make_ready();
}

static void unlock(void)
{
    pthread_mutex_unlock(&mutex);
}

/* ---- errors ---- */

static viking_cuda_result done(viking_cuda_result error)
{
    if (error != VIKING_CUDA_SUCCESS)
        last_error = error;
    return error;
}

/* Leave the mutex, then report. */
static viking_cuda_result leave(viking_cuda_result error)
{
    unlock();
    return done(error);
}

/* Count the call; with the mutex held on success. The functions that only report errors cannot fail. */
static bool enter(int symbol, viking_cuda_result *error)
{
    lock();
    fake.calls[symbol]++;
    bool mine = fake.fail_in[symbol] && --fake.fail_in[symbol] == 0;
    bool any = fake.fail_any_in && --fake.fail_any_in == 0;
    *error = mine ? fake.fail_error[symbol] : any ? fake.fail_any_error : VIKING_CUDA_SUCCESS;
    if (*error == VIKING_CUDA_SUCCESS)
        return true;
    leave(*error);
    return false;
}

#define ENTER(name)                                                                                                    \
    viking_cuda_result error;                                                                                          \
    if (!enter(SYMBOL_##name, &error))                                                                                 \
    return error

static void count_call(int symbol)
{
    lock();
    fake.calls[symbol]++;
    unlock();
}

/* The host backend fails only where this file lets it: without memory. */
static viking_cuda_result translate(viking_status status)
{
    switch (status) {
    case VIKING_OK:
        return VIKING_CUDA_SUCCESS;
    case VIKING_ERROR_NO_HOST_MEMORY:
    case VIKING_ERROR_NO_DEVICE_MEMORY:
        return VIKING_CUDA_MEMORY_ALLOCATION;
    default:
        return VIKING_CUDA_INVALID_VALUE;
    }
}

/* ---- lookups, with the mutex held ---- */

static viking_backend *device(int index)
{
    if (index >= fake.device_count)
        return NULL;
    if (!fake.devices[index]) {
        viking_host_options options = fake.options;
        options.seed += (uint64_t)index;
        viking_host_open(&options, &fake.devices[index]);
    }
    return fake.devices[index];
}

static struct CUstream_st **find_stream(viking_cuda_stream stream)
{
    for (struct CUstream_st **link = &fake.streams; *link; link = &(*link)->next)
        if (*link == stream)
            return link;
    return NULL;
}

static struct CUevent_st **find_event(viking_cuda_event event)
{
    for (struct CUevent_st **link = &fake.events; *link; link = &(*link)->next)
        if (*link == event)
            return link;
    return NULL;
}

static range **find_range(range **list, const void *address)
{
    for (range **link = list; *link; link = &(*link)->next)
        if ((*link)->address == address)
            return link;
    return NULL;
}

static viking_cuda_result add_range(range **list, void *address, size_t bytes)
{
    range *made = malloc(sizeof *made);
    if (!made)
        return VIKING_CUDA_MEMORY_ALLOCATION;
    *made = (range){.next = *list, .address = address, .bytes = bytes, .device = current_device};
    *list = made;
    return VIKING_CUDA_SUCCESS;
}

static void drop_range(range **link)
{
    range *gone = *link;
    *link = gone->next;
    free(gone);
}

/* The device that a stream runs on and its handle there; the default stream is that of the current device. */
static bool resolve_stream(viking_cuda_stream stream, int *index, viking_stream *out)
{
    *index = current_device;
    *out = VIKING_STREAM_CALLER;
    if (!stream)
        return device(current_device) != NULL;
    if (!find_stream(stream))
        return false;
    *index = stream->device;
    *out = stream->stream;
    return true;
}

/* ---- versions, errors, devices ---- */

viking_cuda_result cudaRuntimeGetVersion(int *version)
{
    ENTER(RuntimeGetVersion);
    *version = 13000;
    return leave(VIKING_CUDA_SUCCESS);
}

viking_cuda_result cudaDriverGetVersion(int *version)
{
    ENTER(DriverGetVersion);
    *version = 13010;
    return leave(VIKING_CUDA_SUCCESS);
}

const char *cudaGetErrorName(viking_cuda_result error)
{
    static const struct {
        viking_cuda_result error;
        const char *name;
    } names[] = {{VIKING_CUDA_SUCCESS, "cudaSuccess"},
                 {VIKING_CUDA_INVALID_VALUE, "cudaErrorInvalidValue"},
                 {VIKING_CUDA_MEMORY_ALLOCATION, "cudaErrorMemoryAllocation"},
                 {VIKING_CUDA_INSUFFICIENT_DRIVER, "cudaErrorInsufficientDriver"},
                 {VIKING_CUDA_NO_DEVICE, "cudaErrorNoDevice"},
                 {VIKING_CUDA_INVALID_DEVICE, "cudaErrorInvalidDevice"},
                 {VIKING_CUDA_OPERATING_SYSTEM, "cudaErrorOperatingSystem"},
                 {VIKING_CUDA_INVALID_RESOURCE_HANDLE, "cudaErrorInvalidResourceHandle"},
                 {VIKING_CUDA_NOT_READY, "cudaErrorNotReady"},
                 {VIKING_CUDA_HOST_MEMORY_ALREADY_REGISTERED, "cudaErrorHostMemoryAlreadyRegistered"},
                 {VIKING_CUDA_HOST_MEMORY_NOT_REGISTERED, "cudaErrorHostMemoryNotRegistered"},
                 {VIKING_CUDA_NOT_PERMITTED, "cudaErrorNotPermitted"},
                 {VIKING_CUDA_NOT_SUPPORTED, "cudaErrorNotSupported"}};
    count_call(SYMBOL_GetErrorName);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].error == error)
            return names[i].name;
    return "unrecognized error code";
}

viking_cuda_result cudaGetLastError(void)
{
    count_call(SYMBOL_GetLastError);
    viking_cuda_result error = last_error;
    last_error = VIKING_CUDA_SUCCESS;
    return error;
}

viking_cuda_result cudaPeekAtLastError(void)
{
    return last_error;
}

viking_cuda_result cudaGetDeviceCount(int *count)
{
    ENTER(GetDeviceCount);
    if (fake.device_count == 0)
        return leave(VIKING_CUDA_NO_DEVICE);
    *count = fake.device_count;
    return leave(VIKING_CUDA_SUCCESS);
}

viking_cuda_result cudaGetDevice(int *index)
{
    ENTER(GetDevice);
    *index = current_device;
    return leave(VIKING_CUDA_SUCCESS);
}

viking_cuda_result cudaSetDevice(int index)
{
    ENTER(SetDevice);
    if (index < 0 || index >= fake.device_count)
        return leave(VIKING_CUDA_INVALID_DEVICE);
    current_device = index;
    return leave(VIKING_CUDA_SUCCESS);
}

/* ---- memory ---- */

viking_cuda_result cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
    ENTER(MemGetInfo);
    viking_backend *self = device(current_device);
    if (!self)
        return leave(VIKING_CUDA_NO_DEVICE);
    return leave(translate(self->operations->memory(self, free_bytes, total_bytes)));
}

viking_cuda_result cudaMalloc(void **out, size_t bytes)
{
    ENTER(Malloc);
    viking_backend *self = device(current_device);
    if (!self)
        return leave(VIKING_CUDA_NO_DEVICE);
    *out = NULL;
    if (bytes == 0)
        return leave(VIKING_CUDA_SUCCESS);
    error = translate(self->operations->allocate(self, bytes, out));
    if (error == VIKING_CUDA_SUCCESS) {
        error = add_range(&fake.allocations, *out, bytes);
        if (error != VIKING_CUDA_SUCCESS)
            self->operations->release(self, *out);
    }
    return leave(error);
}

viking_cuda_result cudaFree(void *address)
{
    ENTER(Free);
    if (!address)
        return leave(VIKING_CUDA_SUCCESS);
    range **link = find_range(&fake.allocations, address);
    if (!link)
        return leave(VIKING_CUDA_INVALID_VALUE);
    viking_backend *self = device((*link)->device);
    self->operations->release(self, address);
    drop_range(link);
    return leave(VIKING_CUDA_SUCCESS);
}

static bool touches(const range *registration, const char *begin, size_t bytes)
{
    return begin < registration->address + registration->bytes && registration->address < begin + bytes;
}

viking_cuda_result cudaHostRegister(void *address, size_t bytes, unsigned flags)
{
    ENTER(HostRegister);
    if (!address || bytes == 0 || flags > 15)
        return leave(VIKING_CUDA_INVALID_VALUE);
    for (const range *other = fake.registrations; other; other = other->next)
        if (touches(other, address, bytes))
            return leave(VIKING_CUDA_HOST_MEMORY_ALREADY_REGISTERED);
    if (fake.register_limit && fake.registered_bytes + bytes > fake.register_limit)
        return leave(fake.register_error);
    error = add_range(&fake.registrations, address, bytes);
    if (error == VIKING_CUDA_SUCCESS)
        fake.registered_bytes += bytes;
    return leave(error);
}

viking_cuda_result cudaHostUnregister(void *address)
{
    ENTER(HostUnregister);
    range **link = find_range(&fake.registrations, address);
    if (!link)
        return leave(VIKING_CUDA_HOST_MEMORY_NOT_REGISTERED);
    fake.registered_bytes -= (*link)->bytes;
    drop_range(link);
    return leave(VIKING_CUDA_SUCCESS);
}

/* A copy may leave registered memory alone or stay inside one registration; a real runtime refuses anything else. */
static bool one_registration(const char *begin, size_t bytes, bool *pinned)
{
    *pinned = false;
    for (const range *other = fake.registrations; other; other = other->next)
        if (touches(other, begin, bytes)) {
            *pinned = true;
            return begin >= other->address && begin + bytes <= other->address + other->bytes;
        }
    return true;
}

viking_cuda_result cudaMemcpyAsync(void *destination, const void *source, size_t bytes, viking_cuda_copy_kind kind,
                                   viking_cuda_stream stream)
{
    ENTER(MemcpyAsync);
    bool to_device = kind == VIKING_CUDA_HOST_TO_DEVICE, pinned;
    if ((!to_device && kind != VIKING_CUDA_DEVICE_TO_HOST) || !destination || !source ||
        !one_registration(to_device ? source : destination, bytes, &pinned))
        return leave(VIKING_CUDA_INVALID_VALUE);
    int index;
    viking_stream target;
    if (!resolve_stream(stream, &index, &target))
        return leave(VIKING_CUDA_INVALID_RESOURCE_HANDLE);
    viking_backend *self = fake.devices[index];
    fake.copied_bytes[to_device ? 0 : 1] += bytes;
    unlock();
    error = translate(self->operations->copy(self, to_device ? VIKING_COPY_TO_DEVICE : VIKING_COPY_TO_HOST, destination,
                                             source, bytes, target));
    /* A real runtime returns from a copy to pageable memory when it is done, and not before. */
    if (error == VIKING_CUDA_SUCCESS && !to_device && !pinned)
        error = translate(self->operations->stream_drain(self, target));
    return done(error);
}

/* ---- streams ---- */

viking_cuda_result cudaStreamCreateWithFlags(viking_cuda_stream *out, unsigned flags)
{
    ENTER(StreamCreateWithFlags);
    viking_backend *self = device(current_device);
    struct CUstream_st *made = self ? calloc(1, sizeof *made) : NULL;
    if (!made)
        return leave(self ? VIKING_CUDA_MEMORY_ALLOCATION : VIKING_CUDA_NO_DEVICE);
    error = translate(self->operations->stream_open(self, &made->stream));
    if (error != VIKING_CUDA_SUCCESS) {
        free(made);
        return leave(error);
    }
    made->device = current_device;
    made->flags = flags;
    made->next = fake.streams;
    fake.streams = made;
    *out = made;
    return leave(VIKING_CUDA_SUCCESS);
}

viking_cuda_result cudaStreamDestroy(viking_cuda_stream stream)
{
    ENTER(StreamDestroy);
    struct CUstream_st **link = find_stream(stream);
    if (!link)
        return leave(VIKING_CUDA_INVALID_RESOURCE_HANDLE);
    *link = stream->next;
    stream->next = fake.destroyed_streams;
    fake.destroyed_streams = stream;
    return leave(VIKING_CUDA_SUCCESS);
}

viking_cuda_result cudaStreamSynchronize(viking_cuda_stream stream)
{
    ENTER(StreamSynchronize);
    int index;
    viking_stream target;
    if (!resolve_stream(stream, &index, &target))
        return leave(VIKING_CUDA_INVALID_RESOURCE_HANDLE);
    viking_backend *self = fake.devices[index];
    unlock();
    return done(translate(self->operations->stream_drain(self, target)));
}

viking_cuda_result cudaStreamWaitEvent(viking_cuda_stream stream, viking_cuda_event event, unsigned flags)
{
    ENTER(StreamWaitEvent);
    int index;
    viking_stream target;
    if (!resolve_stream(stream, &index, &target) || !find_event(event))
        return leave(VIKING_CUDA_INVALID_RESOURCE_HANDLE);
    if (flags > 1)
        return leave(VIKING_CUDA_INVALID_VALUE);
    viking_backend *self = fake.devices[index];
    viking_backend *other = fake.devices[event->device];
    unlock();
    if (self == other)
        return done(translate(self->operations->stream_wait(self, target, event->event)));
    /* Two host backends know nothing of each other; waiting here is a correct, if slow, wait there. */
    return done(translate(other->operations->event_drain(other, event->event)));
}

/* With the mutex held, which is free at the end. */
static viking_cuda_result launch(viking_cuda_stream stream, void (*body)(void *), void *argument)
{
    int index;
    viking_stream target;
    if (!resolve_stream(stream, &index, &target))
        return leave(VIKING_CUDA_INVALID_RESOURCE_HANDLE);
    viking_backend *self = fake.devices[index];
    unlock();
    return done(translate(viking_host_launch(self, target, body, argument)));
}

#ifndef FAKE_CUDART_OLD
viking_cuda_result cudaLaunchHostFunc(viking_cuda_stream stream, viking_cuda_host_function *body, void *argument)
{
    ENTER(LaunchHostFunc);
    return launch(stream, body, argument);
}
#endif

EXPORT int fake_cudart_launch(void *stream, void (*body)(void *), void *argument)
{
    lock();
    return launch(stream, body, argument);
}

/* ---- events ---- */

viking_cuda_result cudaEventCreateWithFlags(viking_cuda_event *out, unsigned flags)
{
    ENTER(EventCreateWithFlags);
    viking_backend *self = device(current_device);
    struct CUevent_st *made = self ? calloc(1, sizeof *made) : NULL;
    if (!made)
        return leave(self ? VIKING_CUDA_MEMORY_ALLOCATION : VIKING_CUDA_NO_DEVICE);
    bool timed = !(flags & VIKING_CUDA_EVENT_DISABLE_TIMING);
    error = translate(self->operations->event_open(self, timed, &made->event));
    if (error != VIKING_CUDA_SUCCESS) {
        free(made);
        return leave(error);
    }
    made->device = current_device;
    made->flags = flags;
    made->next = fake.events;
    fake.events = made;
    *out = made;
    return leave(VIKING_CUDA_SUCCESS);
}

viking_cuda_result cudaEventDestroy(viking_cuda_event event)
{
    ENTER(EventDestroy);
    struct CUevent_st **link = find_event(event);
    if (!link)
        return leave(VIKING_CUDA_INVALID_RESOURCE_HANDLE);
    *link = event->next;
    viking_backend *self = fake.devices[event->device];
    self->operations->event_close(self, event->event);
    free(event);
    return leave(VIKING_CUDA_SUCCESS);
}

viking_cuda_result cudaEventRecord(viking_cuda_event event, viking_cuda_stream stream)
{
    ENTER(EventRecord);
    int index;
    viking_stream target;
    if (!resolve_stream(stream, &index, &target) || !find_event(event) || event->device != index)
        return leave(VIKING_CUDA_INVALID_RESOURCE_HANDLE);
    viking_backend *self = fake.devices[index];
    event->recorded = true;
    return leave(translate(self->operations->event_record(self, event->event, target)));
}

viking_cuda_result cudaEventQuery(viking_cuda_event event)
{
    ENTER(EventQuery);
    if (!find_event(event))
        return leave(VIKING_CUDA_INVALID_RESOURCE_HANDLE);
    viking_backend *self = fake.devices[event->device];
    bool reached = false;
    error = translate(self->operations->event_reached(self, event->event, &reached));
    return leave(error == VIKING_CUDA_SUCCESS && !reached ? VIKING_CUDA_NOT_READY : error);
}

viking_cuda_result cudaEventSynchronize(viking_cuda_event event)
{
    ENTER(EventSynchronize);
    if (!find_event(event))
        return leave(VIKING_CUDA_INVALID_RESOURCE_HANDLE);
    viking_backend *self = fake.devices[event->device];
    unlock();
    return done(translate(self->operations->event_drain(self, event->event)));
}

viking_cuda_result cudaEventElapsedTime(float *milliseconds, viking_cuda_event from, viking_cuda_event to)
{
    ENTER(EventElapsedTime);
    if (!find_event(from) || !find_event(to) || from->device != to->device || !from->recorded || !to->recorded ||
        ((from->flags | to->flags) & VIKING_CUDA_EVENT_DISABLE_TIMING))
        return leave(VIKING_CUDA_INVALID_RESOURCE_HANDLE);
    viking_backend *self = fake.devices[from->device];
    uint64_t ns = 0;
    if (self->operations->event_elapsed(self, from->event, to->event, &ns) != VIKING_OK)
        return leave(VIKING_CUDA_NOT_READY);
    *milliseconds = (float)((double)ns / 1e6);
    return leave(VIKING_CUDA_SUCCESS);
}

/* ---- what tests ask ---- */

static void free_streams(struct CUstream_st *list)
{
    while (list) {
        struct CUstream_st *next = list->next;
        free(list);
        list = next;
    }
}

EXPORT void fake_cudart_reset(void)
{
    lock();
    while (fake.events) {
        struct CUevent_st *gone = fake.events;
        fake.events = gone->next;
        viking_backend *self = fake.devices[gone->device];
        self->operations->event_close(self, gone->event);
        free(gone);
    }
    free_streams(fake.streams);
    free_streams(fake.destroyed_streams);
    while (fake.registrations)
        drop_range(&fake.registrations);
    while (fake.allocations)
        drop_range(&fake.allocations);
    for (int i = 0; i < LARGEST_DEVICE_COUNT; i++)
        if (fake.devices[i])
            fake.devices[i]->operations->close(fake.devices[i]); /* its streams and memory, too */
    fake.ready = false;
    make_ready();
    unlock();
    current_device = 0;
    last_error = VIKING_CUDA_SUCCESS;
}

EXPORT void fake_cudart_devices(int count, uint64_t memory_bytes)
{
    lock();
    set_device_count(count > 0 ? (uint64_t)count : 0);
    fake.options.memory_bytes = memory_bytes;
    unlock();
}

EXPORT void fake_cudart_register_limit(uint64_t bytes, int error)
{
    lock();
    fake.register_limit = bytes;
    fake.register_error = error;
    unlock();
}

EXPORT int fake_cudart_fail(const char *symbol, uint64_t n, int error)
{
    lock();
    bool known = plan_failure(symbol, n, error);
    unlock();
    return known;
}

EXPORT uint64_t fake_cudart_calls(const char *symbol)
{
    lock();
    uint64_t calls = 0;
    for (int i = 0; i < SYMBOL_COUNT; i++)
        if (strcmp(symbol, "*") == 0 || strcmp(symbol, symbol_names[i]) == 0)
            calls += fake.calls[i];
    unlock();
    return calls;
}

static uint64_t count_streams(bool blocking_only)
{
    uint64_t count = 0;
    for (const struct CUstream_st *stream = fake.streams; stream; stream = stream->next)
        count += !blocking_only || !(stream->flags & VIKING_CUDA_STREAM_NON_BLOCKING);
    return count;
}

static uint64_t count_events(bool timed_only)
{
    uint64_t count = 0;
    for (const struct CUevent_st *event = fake.events; event; event = event->next)
        count += !timed_only || !(event->flags & VIKING_CUDA_EVENT_DISABLE_TIMING);
    return count;
}

static uint64_t count_ranges(const range *list)
{
    uint64_t count = 0;
    for (; list; list = list->next)
        count++;
    return count;
}

EXPORT uint64_t fake_cudart_count(const char *what)
{
    lock();
    const struct {
        const char *what;
        uint64_t count;
    } counts[] = {{"streams", count_streams(false)},
                  {"blocking streams", count_streams(true)},
                  {"events", count_events(false)},
                  {"timed events", count_events(true)},
                  {"registrations", count_ranges(fake.registrations)},
                  {"registered bytes", fake.registered_bytes},
                  {"allocations", count_ranges(fake.allocations)},
                  {"to device", fake.copied_bytes[0]},
                  {"to host", fake.copied_bytes[1]}};
    unlock();
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        if (strcmp(counts[i].what, what) == 0)
            return counts[i].count;
    return UINT64_MAX;
}

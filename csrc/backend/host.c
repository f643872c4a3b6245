/* A device made of threads.
 *
 * One mutex guards everything but the bytes themselves. A stream is a worker thread with a queue; nothing is held
 * while an item runs. Recording an event makes a fresh *moment*, a flag that the record sets when the stream gets
 * there; a wait takes hold of the moment that is the event's latest when the wait is queued. So recording again
 * cannot touch an earlier wait, records on different streams may be reached in any order, and an event may be
 * closed while its records and waits are still queued. A moment exists before anything can wait for it, hence waits
 * cannot form a circle.
 *
 * Paced copies keep two clocks. The clock of the wall is late by what the scheduler adds to each sleep; the stream's
 * own clock says when its work would have ended on a device that keeps its pace, and the next copy starts from there.
 * Many small copies thus take as long together as one large one. The link of each direction is shared by all streams.
 */
#include "host.h"

#include <stdlib.h>
#include <string.h>

#include "../base/os.h"
#include "host_memory.h"

/* A sleep returns late by about this much, so the end of a wait is spun. */
#define SPIN_NS 70000u

/* How far a stream's own clock may stay behind the wall's: a machine that cannot keep the pace does not collect a
 * debt that it would pay back by copying too fast later. */
#define LARGEST_LAG_NS 2000000u

typedef struct moment {
    unsigned references;
    unsigned waiting; /* threads: nobody is woken in vain */
    bool reached;
    uint64_t reached_ns; /* only if timed */
} moment;

struct viking_event {
    bool timed;
    moment *latest; /* NULL: never recorded */
};

typedef enum item_kind { ITEM_COPY, ITEM_RECORD, ITEM_WAIT, ITEM_LAUNCH } item_kind;

typedef struct item {
    struct item *next;
    item_kind kind;
    bool timed; /* record */
    moment *moment; /* record, wait: one reference */
    uint64_t queued_ns; /* copy, only if paced */
    viking_copy_direction direction;
    void *destination;
    const void *source;
    size_t bytes;
    void (*body)(void *);
    void *argument;
} item;

typedef struct host host;

struct viking_stream_tag {
    host *device;
    struct viking_stream_tag *next;
    viking_thread *thread;
    viking_condition *work; /* something was queued, or the stream closes */
    item *head;
    item **tail;
    bool idle; /* the worker waits for `work` */
    bool closing;
    /* The worker's own. */
    uint64_t random;
    uint64_t clock_ns; /* when the work so far would have ended at the exact pace */
};

struct host {
    viking_backend base;
    viking_host_options options;
    viking_mutex *mutex;
    viking_condition *progress; /* a moment that a thread waits for is reached */
    struct viking_stream_tag *streams;
    uint64_t stream_count; /* ever opened */
    viking_host_memory memory;
    uint64_t link_free_ns[2]; /* per direction, when the copies so far would have left the link */
    uint64_t calls;
    uint64_t fail_in; /* 0: no fault is due */
    viking_status fail_code;
};

static uint64_t later(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/* ---- entering a call ---- */

/* Every call through the table begins with this; returns with the mutex held. */
static host *enter(viking_backend *self)
{
    host *device = (host *)self;
    viking_mutex_lock(device->mutex);
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
    viking_mutex_unlock(device->mutex);
    return viking_status_fail(code, "host backend: %s, call %llu, fails because a test asked for it", call, number);
}

static viking_status no_memory(const char *call)
{
    return viking_status_fail(VIKING_ERROR_NO_HOST_MEMORY, "host backend: no memory for the bookkeeping of %s", call);
}

/* ---- moments; with the mutex held ---- */

static void moment_drop(moment *self)
{
    if (self && --self->references == 0)
        free(self);
}

static void moment_reach(host *device, moment *self, bool timed)
{
    self->reached_ns = timed ? viking_os_clock_ns() : 0;
    self->reached = true;
    if (self->waiting)
        viking_condition_broadcast(device->progress);
}

/* Lets go of the mutex while it waits; the caller has a reference. */
static void moment_await(host *device, moment *self)
{
    self->waiting++;
    while (!self->reached)
        viking_condition_wait(device->progress, device->mutex);
    self->waiting--;
}

/* ---- time ---- */

static void pause_until(uint64_t deadline_ns)
{
    uint64_t now = viking_os_clock_ns();
    if (deadline_ns > now + SPIN_NS)
        viking_os_sleep_ns(deadline_ns - now - SPIN_NS);
    while (viking_os_clock_ns() < deadline_ns) {
    }
}

/* splitmix64 */
static uint64_t draw(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static uint64_t transfer_ns(const host *device, size_t bytes)
{
    return (uint64_t)((double)bytes * 1e9 / (double)device->options.bytes_per_second);
}

/* Copy at the pace of the link, from `ready_ns` on; returns when the copy would have ended on an exact device. The
 * first half of the bytes lands when the copy begins and the second when it ends, so that whoever uses the
 * destination without waiting finds it torn, and whoever reuses it too early loses bytes. */
static uint64_t copy_paced(host *device, viking_copy_direction direction, void *destination, const void *source,
                           size_t bytes, uint64_t ready_ns)
{
    viking_mutex_lock(device->mutex);
    uint64_t *link = &device->link_free_ns[direction == VIKING_COPY_TO_DEVICE ? 0 : 1];
    uint64_t begin = later(ready_ns, *link);
    uint64_t end = begin + transfer_ns(device, bytes);
    *link = end;
    viking_mutex_unlock(device->mutex);

    uint64_t now = viking_os_clock_ns();
    if (begin > now) {
        pause_until(begin);
        now = viking_os_clock_ns();
    }
    size_t half = bytes / 2;
    memcpy(destination, source, half);
    uint64_t half_ns = viking_os_clock_ns() - now;
    pause_until(end > half_ns ? end - half_ns : 0);
    memcpy((char *)destination + half, (const char *)source + half, bytes - half);
    pause_until(end);

    now = viking_os_clock_ns();
    if (now > end + LARGEST_LAG_NS) {
        end = now - LARGEST_LAG_NS;
        viking_mutex_lock(device->mutex);
        *link = later(*link, end);
        viking_mutex_unlock(device->mutex);
    }
    return end;
}

/* ---- streams ---- */

static void run(struct viking_stream_tag *stream, item *it)
{
    host *device = stream->device;
    if (device->options.delay_ns) {
        pause_until(viking_os_clock_ns() + draw(&stream->random) % device->options.delay_ns);
        stream->clock_ns = viking_os_clock_ns();
    }
    switch (it->kind) {
    case ITEM_COPY:
        if (device->options.bytes_per_second) {
            stream->clock_ns = copy_paced(device, it->direction, it->destination, it->source, it->bytes,
                                          later(stream->clock_ns, it->queued_ns));
        } else {
            memcpy(it->destination, it->source, it->bytes);
        }
        break;
    case ITEM_RECORD:
        viking_mutex_lock(device->mutex);
        moment_reach(device, it->moment, it->timed);
        viking_mutex_unlock(device->mutex);
        break;
    case ITEM_WAIT:
        viking_mutex_lock(device->mutex);
        if (!it->moment->reached) {
            moment_await(device, it->moment);
            stream->clock_ns = viking_os_clock_ns();
        }
        viking_mutex_unlock(device->mutex);
        break;
    case ITEM_LAUNCH:
        it->body(it->argument);
        stream->clock_ns = viking_os_clock_ns();
        break;
    }
}

static void work(void *argument)
{
    struct viking_stream_tag *stream = argument;
    host *device = stream->device;
    viking_mutex_lock(device->mutex);
    for (;;) {
        stream->idle = true;
        while (!stream->head && !stream->closing)
            viking_condition_wait(stream->work, device->mutex);
        stream->idle = false;
        item *it = stream->head;
        if (!it)
            break;
        stream->head = it->next;
        if (!stream->head)
            stream->tail = &stream->head;
        viking_mutex_unlock(device->mutex);
        run(stream, it);
        viking_mutex_lock(device->mutex);
        moment_drop(it->moment);
        free(it);
    }
    viking_mutex_unlock(device->mutex);
}

/* With the mutex held. Takes `it`, and its reference to a moment. */
static void queue(struct viking_stream_tag *stream, item *it)
{
    *stream->tail = it;
    stream->tail = &it->next;
    if (stream->idle)
        viking_condition_broadcast(stream->work);
}

/* With the mutex held. Make a moment and queue its record (on VIKING_STREAM_CALLER it is reached at once); the caller
 * owns one reference. */
static viking_status queue_record(host *device, viking_stream stream, bool timed, const char *call, moment **out)
{
    moment *fresh = calloc(1, sizeof *fresh);
    item *it = calloc(1, sizeof *it);
    if (!fresh || !it) {
        free(fresh);
        free(it);
        return no_memory(call);
    }
    fresh->references = 1;
    if (stream == VIKING_STREAM_CALLER) {
        free(it);
        moment_reach(device, fresh, timed);
    } else {
        it->kind = ITEM_RECORD;
        it->timed = timed;
        it->moment = fresh;
        fresh->references++;
        queue(stream, it);
    }
    *out = fresh;
    return VIKING_OK;
}

static viking_status host_stream_open(viking_backend *self, viking_stream *out)
{
    host *device;
    viking_status status = enter_fallible(self, "stream_open", &device);
    if (status != VIKING_OK)
        return status;
    uint64_t number = ++device->stream_count;
    viking_mutex_unlock(device->mutex);

    struct viking_stream_tag *stream = calloc(1, sizeof *stream);
    if (!stream)
        return no_memory("stream_open");
    stream->device = device;
    stream->tail = &stream->head;
    stream->random = device->options.seed * 0xd1342543de82ef95u + number;
    status = viking_condition_open(&stream->work);
    if (status != VIKING_OK)
        goto fail;
    status = viking_thread_start(work, stream, &stream->thread);
    if (status != VIKING_OK)
        goto fail;
    viking_mutex_lock(device->mutex);
    stream->next = device->streams;
    device->streams = stream;
    viking_mutex_unlock(device->mutex);
    self->streams++;
    *out = stream;
    return VIKING_OK;

fail:
    viking_condition_close(stream->work);
    free(stream);
    return status;
}

/* With the mutex held, and free again at the end. */
static void stream_end(host *device, struct viking_stream_tag *stream)
{
    struct viking_stream_tag **link = &device->streams;
    while (*link != stream)
        link = &(*link)->next;
    *link = stream->next;
    stream->closing = true;
    viking_condition_broadcast(stream->work);
    viking_mutex_unlock(device->mutex);
    viking_thread_join(stream->thread);
    viking_condition_close(stream->work);
    free(stream);
}

static void host_stream_close(viking_backend *self, viking_stream stream)
{
    host *device = enter(self);
    if (stream == VIKING_STREAM_CALLER) {
        viking_mutex_unlock(device->mutex);
        return;
    }
    stream_end(device, stream);
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
        moment *end = NULL;
        status = queue_record(device, stream, false, "stream_drain", &end);
        if (status == VIKING_OK) {
            moment_await(device, end);
            moment_drop(end);
        }
    }
    viking_mutex_unlock(device->mutex);
    return status;
}

/* ---- events ---- */

static viking_status host_event_open(viking_backend *self, bool timed, viking_event **out)
{
    host *device;
    viking_status status = enter_fallible(self, "event_open", &device);
    if (status != VIKING_OK)
        return status;
    viking_mutex_unlock(device->mutex);
    viking_event *event = calloc(1, sizeof *event);
    if (!event)
        return no_memory("event_open");
    event->timed = timed;
    self->events++;
    *out = event;
    return VIKING_OK;
}

static void host_event_close(viking_backend *self, viking_event *event)
{
    host *device = enter(self);
    if (event) {
        moment_drop(event->latest);
        self->events--;
    }
    viking_mutex_unlock(device->mutex);
    free(event);
}

static viking_status host_event_record(viking_backend *self, viking_event *event, viking_stream stream)
{
    host *device;
    viking_status status = enter_fallible(self, "event_record", &device);
    if (status != VIKING_OK)
        return status;
    moment *fresh = NULL;
    status = queue_record(device, stream, event->timed, "event_record", &fresh);
    if (status == VIKING_OK) {
        moment_drop(event->latest);
        event->latest = fresh;
    }
    viking_mutex_unlock(device->mutex);
    return status;
}

static viking_status host_event_reached(viking_backend *self, viking_event *event, bool *out)
{
    host *device;
    viking_status status = enter_fallible(self, "event_reached", &device);
    if (status != VIKING_OK)
        return status;
    *out = !event->latest || event->latest->reached;
    viking_mutex_unlock(device->mutex);
    return VIKING_OK;
}

/* With the mutex held, which is let go of while waiting. */
static void await_latest(host *device, const viking_event *event)
{
    moment *latest = event->latest;
    if (latest) {
        latest->references++;
        moment_await(device, latest);
        moment_drop(latest);
    }
}

static viking_status host_event_drain(viking_backend *self, viking_event *event)
{
    host *device;
    viking_status status = enter_fallible(self, "event_drain", &device);
    if (status != VIKING_OK)
        return status;
    await_latest(device, event);
    viking_mutex_unlock(device->mutex);
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
    viking_mutex_unlock(device->mutex);
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
        item *it = calloc(1, sizeof *it);
        if (it) {
            it->kind = ITEM_WAIT;
            it->moment = event->latest;
            it->moment->references++;
            queue(stream, it);
        } else {
            status = no_memory("stream_wait");
        }
    }
    viking_mutex_unlock(device->mutex);
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
    bool paced = device->options.bytes_per_second != 0;
    if (stream == VIKING_STREAM_CALLER) {
        viking_mutex_unlock(device->mutex);
        if (paced)
            copy_paced(device, direction, destination, source, bytes, viking_os_clock_ns());
        else
            memcpy(destination, source, bytes);
        return VIKING_OK;
    }
    item *it = calloc(1, sizeof *it);
    if (it) {
        it->kind = ITEM_COPY;
        it->queued_ns = paced ? viking_os_clock_ns() : 0;
        it->direction = direction;
        it->destination = destination;
        it->source = source;
        it->bytes = bytes;
        queue(stream, it);
    } else {
        status = no_memory("copy");
    }
    viking_mutex_unlock(device->mutex);
    return status;
}

viking_status viking_host_launch(viking_backend *self, viking_stream stream, void (*body)(void *), void *argument)
{
    if (stream == VIKING_STREAM_CALLER) {
        body(argument);
        return VIKING_OK;
    }
    item *it = calloc(1, sizeof *it);
    if (!it)
        return no_memory("viking_host_launch");
    it->kind = ITEM_LAUNCH;
    it->body = body;
    it->argument = argument;
    host *device = (host *)self;
    viking_mutex_lock(device->mutex);
    queue(stream, it);
    viking_mutex_unlock(device->mutex);
    return VIKING_OK;
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
    viking_mutex_unlock(device->mutex);
    return VIKING_OK;
}

static viking_status host_allocate(viking_backend *self, size_t bytes, void **out)
{
    host *device;
    viking_status status = enter_fallible(self, "allocate", &device);
    if (status != VIKING_OK)
        return status;
    status = viking_host_memory_allocate(&device->memory, bytes, out);
    viking_mutex_unlock(device->mutex);
    return status;
}

static void host_release(viking_backend *self, void *address)
{
    host *device = enter(self);
    viking_host_memory_release(&device->memory, address);
    viking_mutex_unlock(device->mutex);
}

static viking_status host_pin(viking_backend *self, void *address, size_t bytes)
{
    host *device;
    viking_status status = enter_fallible(self, "pin", &device);
    if (status != VIKING_OK)
        return status;
    status = viking_host_memory_pin(&device->memory, address, bytes);
    self->pins += status == VIKING_OK;
    viking_mutex_unlock(device->mutex);
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
    viking_mutex_unlock(device->mutex);
    return status;
}

/* ---- the device ---- */

static void host_close(viking_backend *self)
{
    host *device = enter(self);
    while (device->streams) {
        stream_end(device, device->streams);
        viking_mutex_lock(device->mutex);
    }
    viking_mutex_unlock(device->mutex);
    viking_host_memory_free(&device->memory);
    viking_condition_close(device->progress);
    viking_mutex_close(device->mutex);
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
};

viking_status viking_host_open(const viking_host_options *options, viking_backend **out)
{
    host *device = calloc(1, sizeof *device);
    if (!device)
        return no_memory("viking_host_open");
    device->base.operations = &operations;
    if (options)
        device->options = *options;
    uint64_t machine_bytes = viking_os_memory_bytes();
    device->memory.pin_limit_bytes = device->options.pin_limit_bytes;
    device->memory.total_bytes = device->options.memory_bytes ? device->options.memory_bytes
                                 : machine_bytes              ? machine_bytes
                                                              : SIZE_MAX;
    viking_status status = viking_mutex_open(&device->mutex);
    if (status == VIKING_OK)
        status = viking_condition_open(&device->progress);
    if (status != VIKING_OK) {
        viking_mutex_close(device->mutex);
        free(device);
        return status;
    }
    *out = &device->base;
    return VIKING_OK;
}

uint64_t viking_host_calls(const viking_backend *self)
{
    const host *device = (const host *)self;
    viking_mutex_lock(device->mutex);
    uint64_t calls = device->calls;
    viking_mutex_unlock(device->mutex);
    return calls;
}

void viking_host_fail_at(viking_backend *self, uint64_t n, viking_status code)
{
    host *device = (host *)self;
    viking_mutex_lock(device->mutex);
    device->fail_in = n;
    device->fail_code = code;
    viking_mutex_unlock(device->mutex);
}

uint64_t viking_host_pinned_bytes(const viking_backend *self)
{
    const host *device = (const host *)self;
    viking_mutex_lock(device->mutex);
    uint64_t bytes = device->memory.pinned_bytes;
    viking_mutex_unlock(device->mutex);
    return bytes;
}

/* A backend in front of another one that writes down what the engine asks for: how many calls of each kind, which
 * copies in which order, and whether a stream is still given work after it was closed (a device would crash, or not). */
#ifndef VIKING_TESTS_RECORDER_H
#define VIKING_TESTS_RECORDER_H

#include "check.h"

#include <stdatomic.h>
#include <string.h>

#include "backend/host.h"
#include "base/os.h"

#define RECORDER_COPIES 65536u
#define RECORDER_CLOSED 256u

typedef struct recorded_copy {
    const void *destination;
    const void *source;
    size_t bytes;
} recorded_copy;

typedef struct recorder {
    viking_backend base;
    viking_backend_operations operations;
    viking_backend *inner;
    viking_mutex *mutex;
    recorded_copy *log; /* of the first RECORDER_COPIES */
    unsigned copies;
    unsigned records;
    unsigned waits;
    unsigned others;
    viking_stream closed[RECORDER_CLOSED];
    unsigned closed_count;
    unsigned dead_streams; /* calls on a stream that was closed before */
} recorder;

static inline recorder *recorder_of(viking_backend *self, unsigned recorder_kind)
{
    recorder *r = (recorder *)self;
    viking_mutex_lock(r->mutex);
    *(recorder_kind == 0   ? &r->copies
      : recorder_kind == 1 ? &r->records
      : recorder_kind == 2 ? &r->waits
                           : &r->others) += 1;
    viking_mutex_unlock(r->mutex);
    return r;
}

/* True where the call must not reach the stream; it then succeeds, having done nothing. */
static inline bool recorder_dead(recorder *r, viking_stream stream)
{
    bool dead = false;
    viking_mutex_lock(r->mutex);
    for (unsigned i = 0; i < r->closed_count; i++)
        dead = dead || r->closed[i] == stream;
    r->dead_streams += dead;
    viking_mutex_unlock(r->mutex);
    return dead;
}

static inline void recorder_close(viking_backend *self)
{
    recorder *r = (recorder *)self;
    r->inner->operations->close(r->inner);
    viking_mutex_close(r->mutex);
    free(r->log);
    free(r);
}

static inline viking_status recorder_memory(viking_backend *self, size_t *free_bytes, size_t *total_bytes)
{
    recorder *r = recorder_of(self, 3);
    return r->inner->operations->memory(r->inner, free_bytes, total_bytes);
}

static inline viking_status recorder_allocate(viking_backend *self, size_t bytes, void **out)
{
    recorder *r = recorder_of(self, 3);
    return r->inner->operations->allocate(r->inner, bytes, out);
}

static inline void recorder_release(viking_backend *self, void *address)
{
    recorder *r = recorder_of(self, 3);
    r->inner->operations->release(r->inner, address);
}

static inline viking_status recorder_pin(viking_backend *self, void *address, size_t bytes)
{
    recorder *r = recorder_of(self, 3);
    return r->inner->operations->pin(r->inner, address, bytes);
}

static inline viking_status recorder_unpin(viking_backend *self, void *address)
{
    recorder *r = recorder_of(self, 3);
    return r->inner->operations->unpin(r->inner, address);
}

static inline viking_status recorder_stream_open(viking_backend *self, viking_stream *out)
{
    recorder *r = recorder_of(self, 3);
    viking_status status = r->inner->operations->stream_open(r->inner, out);
    viking_mutex_lock(r->mutex);
    for (unsigned i = 0; status == VIKING_OK && i < r->closed_count; i++)
        if (r->closed[i] == *out) /* the handle lives again */
            r->closed[i--] = r->closed[--r->closed_count];
    viking_mutex_unlock(r->mutex);
    return status;
}

static inline void recorder_stream_close(viking_backend *self, viking_stream stream)
{
    recorder *r = recorder_of(self, 3);
    r->inner->operations->stream_close(r->inner, stream);
    viking_mutex_lock(r->mutex);
    CHECK(r->closed_count < RECORDER_CLOSED);
    r->closed[r->closed_count++] = stream;
    viking_mutex_unlock(r->mutex);
}

static inline viking_status recorder_stream_drain(viking_backend *self, viking_stream stream)
{
    recorder *r = recorder_of(self, 3);
    return recorder_dead(r, stream) ? VIKING_OK : r->inner->operations->stream_drain(r->inner, stream);
}

static inline viking_status recorder_event_open(viking_backend *self, bool timed, viking_event **out)
{
    recorder *r = recorder_of(self, 3);
    return r->inner->operations->event_open(r->inner, timed, out);
}

static inline void recorder_event_close(viking_backend *self, viking_event *event)
{
    recorder *r = recorder_of(self, 3);
    r->inner->operations->event_close(r->inner, event);
}

static inline viking_status recorder_event_record(viking_backend *self, viking_event *event, viking_stream stream)
{
    recorder *r = recorder_of(self, 1);
    return recorder_dead(r, stream) ? VIKING_OK : r->inner->operations->event_record(r->inner, event, stream);
}

static inline viking_status recorder_event_reached(viking_backend *self, viking_event *event, bool *out)
{
    recorder *r = recorder_of(self, 3);
    return r->inner->operations->event_reached(r->inner, event, out);
}

static inline viking_status recorder_event_drain(viking_backend *self, viking_event *event)
{
    recorder *r = recorder_of(self, 3);
    return r->inner->operations->event_drain(r->inner, event);
}

static inline viking_status recorder_event_elapsed(viking_backend *self, viking_event *from, viking_event *to,
                                                   uint64_t *out_ns)
{
    recorder *r = recorder_of(self, 3);
    return r->inner->operations->event_elapsed(r->inner, from, to, out_ns);
}

static inline viking_status recorder_stream_wait(viking_backend *self, viking_stream stream, viking_event *event)
{
    recorder *r = recorder_of(self, 2);
    return recorder_dead(r, stream) ? VIKING_OK : r->inner->operations->stream_wait(r->inner, stream, event);
}

static inline viking_status recorder_copy(viking_backend *self, viking_copy_direction direction, void *destination,
                                          const void *source, size_t bytes, viking_stream stream)
{
    recorder *r = recorder_of(self, 0);
    CHECK(direction == VIKING_COPY_TO_DEVICE);
    viking_mutex_lock(r->mutex);
    if (r->copies <= RECORDER_COPIES)
        r->log[r->copies - 1] = (recorded_copy){destination, source, bytes};
    viking_mutex_unlock(r->mutex);
    return r->inner->operations->copy(r->inner, direction, destination, source, bytes, stream);
}

static inline viking_status recorder_host_call(viking_backend *self, viking_stream stream, void (*function)(void *),
                                               void *argument)
{
    recorder *r = recorder_of(self, 3);
    return r->inner->operations->host_call(r->inner, stream, function, argument);
}

/* Takes over `inner`. */
static inline recorder *recorder_open(viking_backend *inner)
{
    recorder *r = calloc(1, sizeof *r);
    CHECK(r != NULL);
    CHECK_OK(viking_mutex_open(&r->mutex));
    r->log = calloc(RECORDER_COPIES, sizeof *r->log);
    CHECK(r->log != NULL);
    r->inner = inner;
    r->operations = (viking_backend_operations){.name = inner->operations->name,
                                                .caller_blocks = inner->operations->caller_blocks,
                                                .close = recorder_close,
                                                .memory = recorder_memory,
                                                .allocate = recorder_allocate,
                                                .release = recorder_release,
                                                .pin = recorder_pin,
                                                .unpin = recorder_unpin,
                                                .stream_open = recorder_stream_open,
                                                .stream_close = recorder_stream_close,
                                                .stream_drain = recorder_stream_drain,
                                                .event_open = recorder_event_open,
                                                .event_close = recorder_event_close,
                                                .event_record = recorder_event_record,
                                                .event_reached = recorder_event_reached,
                                                .event_drain = recorder_event_drain,
                                                .event_elapsed = recorder_event_elapsed,
                                                .stream_wait = recorder_stream_wait,
                                                .copy = recorder_copy,
                                                .host_call = recorder_host_call};
    r->base.operations = &r->operations;
    return r;
}

#endif

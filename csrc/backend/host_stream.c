/* The worker threads of the host backend's streams, and their clocks.
 *
 * Paced copies keep two clocks. The clock of the wall is late by what the scheduler adds to each sleep; the stream's
 * own clock says when its work would have ended on a device that keeps its pace, and the next copy starts from there.
 * Many small copies thus take as long together as one large one. The link of each direction is shared by all streams.
 */
#include "host_stream.h"

#include <stdlib.h>
#include <string.h>

#include "../base/pause.h"

/* How far a stream's own clock may stay behind the wall's: a machine that cannot keep the pace does not collect a
 * debt that it would pay back by copying too fast later. */
#define LARGEST_LAG_NS 2000000u

struct viking_stream_tag {
    viking_host_streams *streams;
    struct viking_stream_tag *next;
    viking_thread *thread;
    viking_condition *work; /* something was queued, or the stream closes */
    viking_host_item *head;
    viking_host_item **tail;
    bool idle; /* the worker waits for `work` */
    bool closing;
    /* The worker's own. */
    uint64_t random;
    uint64_t clock_ns; /* when the work so far would have ended at the exact pace */
};

static uint64_t later(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

viking_status viking_host_no_memory(const char *call)
{
    return viking_status_fail(VIKING_ERROR_NO_HOST_MEMORY, "host backend: no memory for the bookkeeping of %s", call);
}

/* ---- moments; with the mutex held ---- */

void viking_host_moment_drop(viking_host_moment *self)
{
    if (self && --self->references == 0)
        free(self);
}

static void moment_reach(viking_host_streams *streams, viking_host_moment *self, bool timed)
{
    self->reached_ns = timed ? viking_os_clock_ns() : 0;
    self->reached = true;
    if (self->waiting)
        viking_condition_broadcast(streams->progress);
}

void viking_host_moment_await(viking_host_streams *streams, viking_host_moment *self)
{
    self->waiting++;
    while (!self->reached)
        viking_condition_wait(streams->progress, streams->mutex);
    self->waiting--;
}

/* ---- time ---- */

/* splitmix64 */
static uint64_t draw(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static uint64_t transfer_ns(const viking_host_streams *streams, size_t bytes)
{
    return (uint64_t)((double)bytes * 1e9 / (double)streams->bytes_per_second);
}

/* With a pace, the first half of the bytes lands when the copy begins and the second when it ends, so that whoever uses
 * the destination without waiting finds it torn, and whoever reuses it too early loses bytes. */
uint64_t viking_host_copy_now(viking_host_streams *streams, viking_copy_direction direction, void *destination,
                              const void *source, size_t bytes, uint64_t ready_ns)
{
    if (streams->bytes_per_second == 0) {
        memcpy(destination, source, bytes);
        return ready_ns;
    }
    viking_mutex_lock(streams->mutex);
    uint64_t *link = &streams->link_free_ns[direction == VIKING_COPY_TO_DEVICE ? 0 : 1];
    uint64_t begin = later(ready_ns, *link);
    uint64_t end = begin + transfer_ns(streams, bytes);
    *link = end;
    viking_mutex_unlock(streams->mutex);

    uint64_t now = viking_os_clock_ns();
    if (begin > now) {
        viking_pause_until(begin);
        now = viking_os_clock_ns();
    }
    size_t half = bytes / 2;
    memcpy(destination, source, half);
    uint64_t half_ns = viking_os_clock_ns() - now;
    viking_pause_until(end > half_ns ? end - half_ns : 0);
    memcpy((char *)destination + half, (const char *)source + half, bytes - half);
    viking_pause_until(end);

    now = viking_os_clock_ns();
    if (now > end + LARGEST_LAG_NS) {
        end = now - LARGEST_LAG_NS;
        viking_mutex_lock(streams->mutex);
        *link = later(*link, end);
        viking_mutex_unlock(streams->mutex);
    }
    return end;
}

/* ---- streams ---- */

static void run(struct viking_stream_tag *stream, viking_host_item *it)
{
    viking_host_streams *streams = stream->streams;
    if (streams->delay_ns) {
        viking_pause_until(viking_os_clock_ns() + draw(&stream->random) % streams->delay_ns);
        stream->clock_ns = viking_os_clock_ns();
    }
    switch (it->kind) {
    case VIKING_HOST_COPY:
        stream->clock_ns = viking_host_copy_now(streams, it->direction, it->destination, it->source, it->bytes,
                                                later(stream->clock_ns, it->queued_ns));
        break;
    case VIKING_HOST_RECORD:
        viking_mutex_lock(streams->mutex);
        moment_reach(streams, it->moment, it->timed);
        viking_mutex_unlock(streams->mutex);
        break;
    case VIKING_HOST_WAIT:
        viking_mutex_lock(streams->mutex);
        if (!it->moment->reached) {
            viking_host_moment_await(streams, it->moment);
            stream->clock_ns = viking_os_clock_ns();
        }
        viking_mutex_unlock(streams->mutex);
        break;
    case VIKING_HOST_CALL:
        it->body(it->argument);
        stream->clock_ns = viking_os_clock_ns();
        break;
    }
}

static void work(void *argument)
{
    struct viking_stream_tag *stream = argument;
    viking_host_streams *streams = stream->streams;
    viking_mutex_lock(streams->mutex);
    for (;;) {
        stream->idle = true;
        while (!stream->head && !stream->closing)
            viking_condition_wait(stream->work, streams->mutex);
        stream->idle = false;
        viking_host_item *it = stream->head;
        if (!it)
            break;
        stream->head = it->next;
        if (!stream->head)
            stream->tail = &stream->head;
        viking_mutex_unlock(streams->mutex);
        run(stream, it);
        viking_mutex_lock(streams->mutex);
        viking_host_moment_drop(it->moment);
        free(it);
    }
    viking_mutex_unlock(streams->mutex);
}

void viking_host_queue(viking_stream stream, viking_host_item *it)
{
    *stream->tail = it;
    stream->tail = &it->next;
    if (stream->idle)
        viking_condition_broadcast(stream->work);
}

viking_status viking_host_record(viking_host_streams *streams, viking_stream stream, bool timed, const char *call,
                                 viking_host_moment **out)
{
    viking_host_moment *fresh = calloc(1, sizeof *fresh);
    viking_host_item *it = calloc(1, sizeof *it);
    if (!fresh || !it) {
        free(fresh);
        free(it);
        return viking_host_no_memory(call);
    }
    fresh->references = 1;
    if (stream == VIKING_STREAM_CALLER) {
        free(it);
        moment_reach(streams, fresh, timed);
    } else {
        it->kind = VIKING_HOST_RECORD;
        it->timed = timed;
        it->moment = fresh;
        fresh->references++;
        viking_host_queue(stream, it);
    }
    *out = fresh;
    return VIKING_OK;
}

viking_status viking_host_stream_start(viking_host_streams *streams, viking_stream *out)
{
    struct viking_stream_tag *stream = calloc(1, sizeof *stream);
    if (!stream)
        return viking_host_no_memory("stream_open");
    stream->streams = streams;
    stream->tail = &stream->head;
    viking_mutex_lock(streams->mutex);
    stream->random = streams->seed * 0xd1342543de82ef95u + ++streams->count;
    viking_mutex_unlock(streams->mutex);
    viking_status status = viking_condition_open(&stream->work);
    if (status != VIKING_OK)
        goto fail;
    status = viking_thread_start(work, stream, &stream->thread);
    if (status != VIKING_OK)
        goto fail;
    viking_mutex_lock(streams->mutex);
    stream->next = streams->first;
    streams->first = stream;
    viking_mutex_unlock(streams->mutex);
    *out = stream;
    return VIKING_OK;

fail:
    viking_condition_close(stream->work);
    free(stream);
    return status;
}

void viking_host_stream_end(viking_host_streams *streams, viking_stream stream)
{
    struct viking_stream_tag **link = &streams->first;
    while (*link != stream)
        link = &(*link)->next;
    *link = stream->next;
    stream->closing = true;
    viking_condition_broadcast(stream->work);
    viking_mutex_unlock(streams->mutex);
    viking_thread_join(stream->thread);
    viking_condition_close(stream->work);
    free(stream);
}

viking_status viking_host_streams_open(viking_host_streams *streams)
{
    viking_status status = viking_mutex_open(&streams->mutex);
    if (status == VIKING_OK)
        status = viking_condition_open(&streams->progress);
    if (status != VIKING_OK)
        viking_mutex_close(streams->mutex);
    return status;
}

void viking_host_streams_close(viking_host_streams *streams)
{
    viking_mutex_lock(streams->mutex);
    while (streams->first) {
        viking_host_stream_end(streams, streams->first);
        viking_mutex_lock(streams->mutex);
    }
    viking_mutex_unlock(streams->mutex);
    viking_condition_close(streams->progress);
    viking_mutex_close(streams->mutex);
}

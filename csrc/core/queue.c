#include "queue.h"

#include <string.h>

#include "dropped.h"

viking_status viking_queue_open(viking_queue *queue, viking_backend *backend)
{
    memset(queue, 0, sizeof *queue);
    viking_staging_open(&queue->staging, backend);
    viking_status status = backend->operations->stream_open(backend, &queue->stream);
    if (status == VIKING_OK)
        queue->backend = backend;
    return status;
}

void viking_queue_close(viking_queue *queue)
{
    if (queue->backend == NULL)
        return;
    const viking_backend_operations *ops = queue->backend->operations;
    for (uint32_t i = 0; i < queue->reader_count; i++)
        ops->event_close(queue->backend, queue->readers[i].fence);
    ops->stream_close(queue->backend, queue->stream);
    viking_staging_close(&queue->staging);
    memset(queue, 0, sizeof *queue);
}

viking_status viking_fence_open(viking_fence *fence, viking_backend *backend)
{
    memset(fence, 0, sizeof *fence);
    return backend->operations->event_open(backend, false, &fence->ready);
}

void viking_fence_close(viking_fence *fence, viking_backend *backend)
{
    backend->operations->event_close(backend, fence->ready);
    memset(fence, 0, sizeof *fence);
}

static viking_status record(viking_queue *queue, viking_reader *reader)
{
    viking_status status = queue->backend->operations->event_record(queue->backend, reader->fence, reader->stream);
    if (status == VIKING_OK)
        reader->fence_release = queue->releases;
    return status;
}

/* Make the copy queue wait for a reader's releases up to number `release`. */
static viking_status wait_for(viking_queue *queue, viking_reader *reader, uint64_t release)
{
    if (reader->queued_release >= release)
        return VIKING_OK;
    if (reader->fence_release < release) {
        viking_status status = record(queue, reader);
        if (status != VIKING_OK)
            return status;
    }
    if (!viking_dropped(VIKING_FENCE_FREE)) {
        viking_status status = queue->backend->operations->stream_wait(queue->backend, queue->stream, reader->fence);
        if (status != VIKING_OK)
            return status;
    }
    reader->queued_release = reader->fence_release;
    return VIKING_OK;
}

/* With a second reader, a fence that is recorded late would have to go onto a stream that its owner may have
 * destroyed since. So from then on every release records its own. */
static viking_status record_late_fences(viking_queue *queue)
{
    for (uint32_t i = 0; i < queue->reader_count; i++) {
        viking_reader *reader = &queue->readers[i];
        if (reader->fence_release < reader->last_release && !viking_dropped(VIKING_FENCE_LATE)) {
            viking_status status = record(queue, reader);
            if (status != VIKING_OK)
                return status;
        }
    }
    return VIKING_OK;
}

/* The place of the reader that has been idle longest. Once the copy queue has waited for all it did, bits that still
 * name its place only make later copies wait for the new reader as well. */
static viking_status recycle(viking_queue *queue, uint32_t *out)
{
    uint32_t idle = 0;
    for (uint32_t i = 1; i < queue->reader_count; i++)
        if (queue->readers[i].last_release < queue->readers[idle].last_release)
            idle = i;
    viking_status status = wait_for(queue, &queue->readers[idle], queue->readers[idle].last_release);
    *out = idle;
    return status;
}

viking_status viking_queue_reader(viking_queue *queue, viking_stream stream, uintptr_t thread, uint32_t *out)
{
    if (!queue->backend->operations->caller_blocks || stream != VIKING_STREAM_CALLER)
        thread = 0;
    for (uint32_t i = 0; i < queue->reader_count; i++) {
        if (queue->readers[i].stream == stream && queue->readers[i].thread == thread) {
            *out = i;
            return VIKING_OK;
        }
    }
    uint32_t index = queue->reader_count;
    viking_event *fence = NULL;
    viking_status status = queue->reader_count == 1 ? record_late_fences(queue) : VIKING_OK;
    if (status != VIKING_OK)
        return status;
    if (queue->reader_count < VIKING_READER_LIMIT) {
        status = queue->backend->operations->event_open(queue->backend, false, &fence);
        if (status != VIKING_OK)
            return status;
        queue->reader_count++;
    } else {
        status = recycle(queue, &index);
        if (status != VIKING_OK)
            return status;
        fence = queue->readers[index].fence;
    }
    queue->readers[index] = (viking_reader){.stream = stream,
                                            .thread = thread,
                                            .fence = fence,
                                            .fence_release = queue->releases,
                                            .queued_release = queue->releases};
    *out = index;
    return VIKING_OK;
}

viking_status viking_queue_await(viking_queue *queue, uint32_t reader, const viking_fence *fence, bool *out_blocking)
{
    viking_reader *self = &queue->readers[reader];
    *out_blocking = false;
    if (self->awaited_copy >= fence->copy)
        return VIKING_OK;
    if (viking_dropped(VIKING_FENCE_READY)) {
        self->awaited_copy = fence->copy;
        return VIKING_OK;
    }
    if (queue->backend->operations->caller_blocks && self->stream == VIKING_STREAM_CALLER) {
        *out_blocking = true;
    } else {
        viking_status status = queue->backend->operations->stream_wait(queue->backend, self->stream, fence->ready);
        if (status != VIKING_OK)
            return status;
    }
    self->awaited_copy = fence->copy;
    return VIKING_OK;
}

viking_status viking_queue_block(viking_queue *queue, viking_event *ready)
{
    return queue->backend->operations->stream_wait(queue->backend, VIKING_STREAM_CALLER, ready);
}

void viking_queue_distrust(viking_queue *queue, uint32_t reader)
{
    queue->readers[reader].awaited_copy = 0;
}

viking_status viking_queue_release(viking_queue *queue, uint32_t reader, viking_fence *fence)
{
    viking_reader *self = &queue->readers[reader];
    self->last_release = fence->last_release = ++queue->releases;
    fence->readers |= UINT64_C(1) << reader;
    return queue->reader_count > 1 ? record(queue, self) : VIKING_OK;
}

viking_status viking_queue_after(viking_queue *queue, viking_fence *fence)
{
    for (uint64_t left = fence->readers; left != 0; left &= left - 1) {
        uint32_t index = 0;
        while (((left >> index) & 1) == 0)
            index++;
        viking_reader *reader = &queue->readers[index];
        /* The latest release of the span may be another reader's: this one's own are all there is to wait for. */
        uint64_t release = fence->last_release < reader->last_release ? fence->last_release : reader->last_release;
        viking_status status = wait_for(queue, reader, release);
        if (status != VIKING_OK)
            return status;
    }
    fence->readers = 0;
    return VIKING_OK;
}

viking_status viking_queue_after_all(viking_queue *queue)
{
    for (uint32_t i = 0; i < queue->reader_count; i++) {
        viking_status status = wait_for(queue, &queue->readers[i], queue->readers[i].last_release);
        if (status != VIKING_OK)
            return status;
    }
    return VIKING_OK;
}

viking_status viking_queue_after_stream(viking_queue *queue, viking_stream stream)
{
    const viking_backend_operations *ops = queue->backend->operations;
    viking_event *event = NULL;
    viking_status status = ops->event_open(queue->backend, false, &event);
    if (status != VIKING_OK)
        return status;
    status = ops->event_record(queue->backend, event, stream);
    if (status == VIKING_OK && !viking_dropped(VIKING_FENCE_ALLOCATION))
        status = ops->stream_wait(queue->backend, queue->stream, event);
    ops->event_close(queue->backend, event);
    return status;
}

bool viking_queue_copies_block(const viking_queue *queue, const viking_home *home)
{
    return home->pinned_by == NULL && queue->staging.window == NULL;
}

/* Straight from the home: one copy, or one for each piece that it is made of. */
static viking_status copy_pieces(viking_queue *queue, unsigned char *destination, const viking_home *home, size_t bytes)
{
    const viking_backend_operations *ops = queue->backend->operations;
    viking_status status = VIKING_OK;
    for (uint32_t i = 0; i < home->piece_count && status == VIKING_OK; i++) {
        const viking_piece *piece = &home->pieces[i];
        size_t count = piece->offset >= bytes ? 0 : bytes - piece->offset;
        count = count < piece->bytes ? count : piece->bytes;
        if (count > 0)
            status = ops->copy(queue->backend, VIKING_COPY_TO_DEVICE, destination + piece->offset, piece->address,
                               count, queue->stream);
    }
    return status;
}

viking_status viking_queue_copy(viking_queue *queue, viking_fence *fence, void *destination, const viking_home *home,
                                size_t bytes)
{
    const viking_backend_operations *ops = queue->backend->operations;
    bool paced = queue->pace.bytes_per_second != 0;
    viking_status status = paced ? viking_pace_begin(&queue->pace, queue->backend, queue->stream) : VIKING_OK;
    if (status == VIKING_OK)
        status = home->pinned_by == NULL && queue->staging.window != NULL
                     ? viking_staging_copy(&queue->staging, queue->stream, destination, home, bytes)
                     : copy_pieces(queue, destination, home, bytes);
    if (status == VIKING_OK && paced)
        status = viking_pace_end(&queue->pace, queue->backend, queue->stream, bytes);
    if (status == VIKING_OK)
        status = ops->event_record(queue->backend, fence->ready, queue->stream);
    if (status == VIKING_OK)
        fence->copy = ++queue->copies;
    return status;
}

viking_status viking_queue_drain_copies(viking_queue *queue)
{
    /* Both: a copy that could not be queued to its end may have left a host copy that no device copy waits for. */
    viking_status staged = viking_staging_drain(&queue->staging);
    viking_status status = queue->backend->operations->stream_drain(queue->backend, queue->stream);
    return staged != VIKING_OK ? staged : status;
}

viking_status viking_queue_drain(viking_queue *queue)
{
    viking_status status = viking_queue_after_all(queue);
    return status != VIKING_OK ? status : viking_queue_drain_copies(queue);
}

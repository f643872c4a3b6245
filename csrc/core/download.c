#include "download.h"

#include <string.h>

#include "dropped.h"

viking_status viking_downloads_open(viking_downloads *downloads, viking_backend *backend)
{
    memset(downloads, 0, sizeof *downloads);
    downloads->backend = backend;
    return viking_mutex_open(&downloads->lock);
}

static void close_stream(viking_downloads *downloads)
{
    const viking_backend_operations *ops = downloads->backend->operations;
    if (downloads->stream != NULL)
        ops->stream_close(downloads->backend, downloads->stream);
    downloads->stream = NULL;
    ops->event_close(downloads->backend, downloads->computed);
    downloads->computed = NULL;
    for (uint32_t i = 0; i < VIKING_DOWNLOAD_EVENTS; i++) {
        ops->event_close(downloads->backend, downloads->arrived[i]);
        downloads->arrived[i] = NULL;
    }
    downloads->is_open = false;
}

void viking_downloads_close(viking_downloads *downloads)
{
    if (downloads->lock == NULL)
        return;
    close_stream(downloads);
    viking_mutex_close(downloads->lock);
    memset(downloads, 0, sizeof *downloads);
}

/* A model without trained weights pays for none of it. */
static viking_status open_stream(viking_downloads *downloads)
{
    if (downloads->is_open)
        return VIKING_OK;
    const viking_backend_operations *ops = downloads->backend->operations;
    viking_status status = ops->stream_open(downloads->backend, &downloads->stream);
    if (status == VIKING_OK)
        status = ops->event_open(downloads->backend, false, &downloads->computed);
    for (uint32_t i = 0; i < VIKING_DOWNLOAD_EVENTS && status == VIKING_OK; i++)
        status = ops->event_open(downloads->backend, false, &downloads->arrived[i]);
    if (status == VIKING_OK)
        downloads->is_open = true;
    else
        close_stream(downloads);
    return status;
}

static viking_status copy(viking_downloads *downloads, void *destination, const void *source, size_t bytes,
                          viking_stream stream)
{
    const viking_backend_operations *ops = downloads->backend->operations;
    viking_event *arrived = downloads->arrived[(downloads->queued + 1) % VIKING_DOWNLOAD_EVENTS];
    viking_status status = ops->event_record(downloads->backend, downloads->computed, stream);
    if (status == VIKING_OK && !viking_dropped(VIKING_FENCE_COMPUTED))
        status = ops->stream_wait(downloads->backend, downloads->stream, downloads->computed);
    if (status == VIKING_OK)
        status = ops->copy(downloads->backend, VIKING_COPY_TO_HOST, destination, source, bytes, downloads->stream);
    if (status != VIKING_OK)
        return status;
    status = ops->event_record(downloads->backend, arrived, downloads->stream);
    if (status != VIKING_OK) /* a copy without a ticket: nobody could wait for it later */
        ops->stream_drain(downloads->backend, downloads->stream);
    return status;
}

viking_status viking_downloads_queue(viking_downloads *downloads, void *destination, const void *source, size_t bytes,
                                     viking_stream stream, uint64_t *out_ticket)
{
    viking_mutex_lock(downloads->lock);
    viking_status status = open_stream(downloads);
    if (status == VIKING_OK)
        status = copy(downloads, destination, source, bytes, stream);
    if (status == VIKING_OK)
        *out_ticket = ++downloads->queued;
    viking_mutex_unlock(downloads->lock);
    return status;
}

/* The event to wait for; NULL where there is nothing to wait for. Events live until close. */
static viking_event *event_of(viking_downloads *downloads, uint64_t ticket)
{
    viking_mutex_lock(downloads->lock);
    if (ticket > downloads->queued)
        ticket = downloads->queued;
    viking_event *event = ticket == 0 ? NULL : downloads->arrived[ticket % VIKING_DOWNLOAD_EVENTS];
    viking_mutex_unlock(downloads->lock);
    return event;
}

viking_status viking_downloads_await(viking_downloads *downloads, uint64_t ticket)
{
    viking_event *arrived = event_of(downloads, ticket);
    if (arrived == NULL || viking_dropped(VIKING_FENCE_ARRIVED))
        return VIKING_OK;
    return downloads->backend->operations->event_drain(downloads->backend, arrived);
}

viking_status viking_downloads_release(viking_downloads *downloads, uint64_t ticket, viking_stream stream)
{
    viking_event *arrived = event_of(downloads, ticket);
    if (arrived == NULL || viking_dropped(VIKING_FENCE_REUSE))
        return VIKING_OK;
    return downloads->backend->operations->stream_wait(downloads->backend, stream, arrived);
}

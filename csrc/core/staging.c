#include "staging.h"

#include <stdlib.h>
#include <string.h>

#include "../base/parallel.h"
#include "dropped.h"
#include "map.h"

/* A few threads saturate a link; more would take processors from the training that goes on meanwhile. */
enum { GATHER_THREADS = 4 };

void viking_staging_open(viking_staging *staging, viking_backend *backend)
{
    memset(staging, 0, sizeof *staging);
    staging->backend = backend;
}

static void close_events(viking_staging *staging)
{
    const viking_backend_operations *ops = staging->backend->operations;
    for (uint32_t i = 0; i < VIKING_STAGING_SLOTS; i++) {
        ops->event_close(staging->backend, staging->slots[i].filled);
        ops->event_close(staging->backend, staging->slots[i].free);
        staging->slots[i] = (viking_slot){NULL, NULL};
    }
}

void viking_staging_close(viking_staging *staging)
{
    if (staging->backend == NULL)
        return;
    if (staging->stream != NULL)
        staging->backend->operations->stream_close(staging->backend, staging->stream);
    viking_staging_close_window(staging);
    memset(staging, 0, sizeof *staging);
}

/* ---- the window ---- */

static void nothing(void *argument)
{
    (void)argument;
}

/* An engine whose weights are all pinned needs none. */
static viking_status open_stream(viking_staging *staging)
{
    viking_stream stream = staging->stream;
    if (stream != NULL)
        return VIKING_OK;
    viking_status status = staging->backend->operations->stream_open(staging->backend, &stream);
    if (status == VIKING_OK)
        staging->stream = stream;
    return status;
}

viking_status viking_staging_open_window(viking_staging *staging, size_t bytes)
{
    const viking_backend_operations *ops = staging->backend->operations;
    size_t slot_bytes = bytes / VIKING_STAGING_SLOTS / VIKING_ALIGNMENT * VIKING_ALIGNMENT;
    slot_bytes = slot_bytes == 0 ? VIKING_ALIGNMENT : slot_bytes;
    size_t slots = bytes / slot_bytes;
    if (slots == 0)
        return viking_status_fail(VIKING_ERROR_INVALID, "a window needs at least %u bytes, not %zu", VIKING_ALIGNMENT,
                                  bytes);
    if (staging->window != NULL)
        return viking_status_fail(VIKING_ERROR_STATE, "there is a window of %zu bytes already", staging->window->bytes);
    slots = slots > VIKING_STAGING_SLOTS ? VIKING_STAGING_SLOTS : slots;
    viking_home *window = NULL;
    viking_status status = open_stream(staging);
    if (status == VIKING_OK) /* not every runtime calls back */
        status = ops->host_call(staging->backend, staging->stream, nothing, NULL);
    if (status == VIKING_OK)
        status = viking_home_open(slots * slot_bytes, &window);
    if (status == VIKING_OK)
        status = viking_home_pin(window, staging->backend);
    for (uint32_t i = 0; i < slots && status == VIKING_OK; i++) {
        status = ops->event_open(staging->backend, false, &staging->slots[i].filled);
        if (status == VIKING_OK)
            status = ops->event_open(staging->backend, false, &staging->slots[i].free);
    }
    if (status != VIKING_OK)
        goto fail;
    staging->window = window;
    staging->slot_bytes = slot_bytes;
    staging->slot_count = (uint32_t)slots;
    staging->next = 0;
    return VIKING_OK;
fail:
    close_events(staging);
    viking_home_close(window);
    return status;
}

viking_status viking_staging_close_window(viking_staging *staging)
{
    if (staging->window == NULL)
        return VIKING_OK;
    viking_status status = viking_home_unpin(staging->window);
    viking_home_close(staging->window);
    staging->window = NULL;
    close_events(staging);
    return status;
}

/* ---- copies ---- */

/* One host copy into a slot: runs on a thread of the backend's and frees itself. */
typedef struct gathering {
    unsigned char *slot;
    size_t offset, bytes; /* of the weight */
    const viking_home *home;
} gathering;

static void gather(void *argument)
{
    gathering *self = argument;
    viking_home_read(self->home, self->offset, self->slot, self->bytes, GATHER_THREADS);
    free(self);
}

static viking_status fill(viking_staging *staging, const viking_slot *slot, unsigned char *bytes,
                          const viking_home *home, size_t offset, size_t count)
{
    const viking_backend_operations *ops = staging->backend->operations;
    viking_status status = VIKING_OK;
    if (!viking_dropped(VIKING_FENCE_SLOT_FREE))
        status = ops->stream_wait(staging->backend, staging->stream, slot->free);
    if (status != VIKING_OK)
        return status;
    gathering *call = malloc(sizeof *call);
    if (call == NULL)
        return viking_status_fail(VIKING_ERROR_NO_HOST_MEMORY, "no host memory to queue a copy");
    *call = (gathering){.slot = bytes, .offset = offset, .bytes = count, .home = home};
    status = ops->host_call(staging->backend, staging->stream, gather, call);
    if (status != VIKING_OK) {
        free(call);
        return status;
    }
    return ops->event_record(staging->backend, slot->filled, staging->stream);
}

static viking_status empty(viking_staging *staging, const viking_slot *slot, viking_stream copies, void *destination,
                           const unsigned char *bytes, size_t count)
{
    const viking_backend_operations *ops = staging->backend->operations;
    viking_status status = VIKING_OK;
    if (!viking_dropped(VIKING_FENCE_SLOT_FILLED))
        status = ops->stream_wait(staging->backend, copies, slot->filled);
    if (status == VIKING_OK)
        status = ops->copy(staging->backend, VIKING_COPY_TO_DEVICE, destination, bytes, count, copies);
    if (status != VIKING_OK)
        return status;
    status = ops->event_record(staging->backend, slot->free, copies);
    if (status != VIKING_OK) /* nobody could wait for this copy: it must be over before the slot is used again */
        ops->stream_drain(staging->backend, copies);
    return status;
}

viking_status viking_staging_copy(viking_staging *staging, viking_stream copies, void *destination,
                                  const viking_home *home, size_t bytes)
{
    viking_status status = VIKING_OK;
    for (size_t offset = 0; offset < bytes && status == VIKING_OK; offset += staging->slot_bytes) {
        size_t left = bytes - offset, count = left < staging->slot_bytes ? left : staging->slot_bytes;
        const viking_slot *slot = &staging->slots[staging->next];
        unsigned char *place = (unsigned char *)staging->window->address + staging->next * staging->slot_bytes;
        status = fill(staging, slot, place, home, offset, count);
        if (status == VIKING_OK)
            status = empty(staging, slot, copies, (unsigned char *)destination + offset, place, count);
        staging->next = (staging->next + 1) % staging->slot_count;
    }
    return status;
}

viking_status viking_staging_drain(const viking_staging *staging)
{
    viking_stream stream = staging->stream;
    return stream == NULL ? VIKING_OK : staging->backend->operations->stream_drain(staging->backend, stream);
}

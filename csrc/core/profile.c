#include "profile.h"

#include <stdlib.h>
#include <string.h>

void viking_profile_init(viking_profile *profile, viking_backend *backend)
{
    memset(profile, 0, sizeof *profile);
    profile->backend = backend;
}

void viking_profile_free(viking_profile *profile)
{
    if (profile->backend == NULL)
        return;
    const viking_backend_operations *ops = profile->backend->operations;
    for (uint32_t i = 0; i < profile->capacity; i++) {
        ops->event_close(profile->backend, profile->entries[i].begin);
        ops->event_close(profile->backend, profile->entries[i].end);
    }
    ops->event_close(profile->backend, profile->origin);
    free(profile->entries);
    memset(profile, 0, sizeof *profile);
}

viking_status viking_profile_start(viking_profile *profile, viking_stream stream)
{
    const viking_backend_operations *ops = profile->backend->operations;
    profile->running = false;
    if (profile->origin == NULL) {
        viking_status status = ops->event_open(profile->backend, true, &profile->origin);
        if (status != VIKING_OK)
            return status;
    }
    viking_status status = ops->event_record(profile->backend, profile->origin, stream);
    profile->count = 0;
    profile->running = status == VIKING_OK;
    return status;
}

void viking_profile_stop(viking_profile *profile)
{
    profile->running = false;
}

static viking_status grow(viking_profile *profile)
{
    uint32_t capacity = profile->capacity == 0 ? 256 : 2 * profile->capacity;
    viking_profile_entry *entries = realloc(profile->entries, capacity * sizeof *entries);
    if (entries == NULL)
        return viking_status_fail(VIKING_ERROR_NO_HOST_MEMORY, "no host memory for a profile of %u events", capacity);
    memset(entries + profile->capacity, 0, (capacity - profile->capacity) * sizeof *entries);
    profile->entries = entries;
    profile->capacity = capacity;
    return VIKING_OK;
}

viking_status viking_profile_begin(viking_profile *profile, viking_profile_kind kind, uint32_t weight,
                                   viking_stream stream, uint32_t *out_index)
{
    const viking_backend_operations *ops = profile->backend->operations;
    *out_index = UINT32_MAX;
    if (!profile->running)
        return VIKING_OK;
    viking_status status = profile->count == profile->capacity ? grow(profile) : VIKING_OK;
    if (status != VIKING_OK)
        return status;
    viking_profile_entry *entry = &profile->entries[profile->count];
    if (entry->begin == NULL)
        status = ops->event_open(profile->backend, true, &entry->begin);
    if (status == VIKING_OK && entry->end == NULL)
        status = ops->event_open(profile->backend, true, &entry->end);
    if (status == VIKING_OK)
        status = ops->event_record(profile->backend, entry->begin, stream);
    if (status != VIKING_OK)
        return status;
    entry->weight = weight;
    entry->kind = (uint32_t)kind;
    entry->ended = false;
    *out_index = profile->count++;
    return VIKING_OK;
}

viking_status viking_profile_end(viking_profile *profile, uint32_t index, viking_stream stream)
{
    if (index >= profile->count)
        return VIKING_OK;
    viking_profile_entry *entry = &profile->entries[index];
    viking_status status = profile->backend->operations->event_record(profile->backend, entry->end, stream);
    entry->ended = status == VIKING_OK;
    return status;
}

static viking_status read_entry(const viking_profile *profile, const viking_profile_entry *entry,
                                viking_profile_span *span, bool *out_ready)
{
    const viking_backend_operations *ops = profile->backend->operations;
    viking_status status = ops->event_reached(profile->backend, entry->end, out_ready);
    if (status != VIKING_OK || !*out_ready || span == NULL)
        return status;
    span->weight = entry->weight;
    span->kind = entry->kind;
    status = ops->event_elapsed(profile->backend, profile->origin, entry->begin, &span->begin_ns);
    if (status == VIKING_OK)
        status = ops->event_elapsed(profile->backend, profile->origin, entry->end, &span->end_ns);
    return status;
}

viking_status viking_profile_read(const viking_profile *profile, viking_profile_span *spans, bool *out_ready)
{
    *out_ready = !profile->running && profile->origin != NULL;
    /* The origin's stream may be behind the copies that were queued after it. */
    if (*out_ready) {
        viking_status status =
            profile->backend->operations->event_reached(profile->backend, profile->origin, out_ready);
        if (status != VIKING_OK)
            return status;
    }
    for (uint32_t i = 0; *out_ready && i < profile->count; i++) {
        if (!profile->entries[i].ended) { /* its use failed between the two records */
            *out_ready = false;
            return VIKING_OK;
        }
        viking_status status = read_entry(profile, &profile->entries[i], spans == NULL ? NULL : &spans[i], out_ready);
        if (status != VIKING_OK)
            return status;
    }
    return VIKING_OK;
}

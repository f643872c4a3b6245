#include "slab.h"

#include <stdlib.h>
#include <string.h>

void viking_slab_init(viking_slab *slab)
{
    memset(slab, 0, sizeof *slab);
}

void viking_slab_free(viking_slab *slab)
{
    viking_map_free(slab->map);
    free(slab->present);
    free(slab->leases);
    memset(slab, 0, sizeof *slab);
}

viking_status viking_slab_adopt(viking_slab *slab, viking_map *map, bool keep)
{
    bool *present = calloc(map->count + 1u, sizeof *present);
    if (present == NULL)
        return viking_status_fail(VIKING_ERROR_NO_HOST_MEMORY, "no host memory for a slab of %u weights", map->count);
    for (uint32_t w = 0; keep && slab->map != NULL && w < map->count && w < slab->map->count; w++)
        present[w] =
            slab->present[w] && slab->map->offsets[w] == map->offsets[w] && slab->map->bytes[w] == map->bytes[w];
    viking_map_free(slab->map);
    free(slab->present);
    slab->map = map;
    slab->present = present;
    return VIKING_OK;
}

static bool ranges_intersect(uint64_t a, uint64_t a_bytes, uint64_t b, uint64_t b_bytes)
{
    return a < b + b_bytes && b < a + a_bytes;
}

bool viking_slab_intersects(const viking_slab *slab, uint32_t weight, uint64_t offset, uint64_t bytes)
{
    return ranges_intersect(slab->map->offsets[weight], slab->map->bytes[weight], offset, bytes);
}

bool viking_slab_blocked(const viking_slab *slab, uint32_t weight)
{
    for (uint32_t i = 0; i < slab->lease_count; i++) {
        const viking_lease *lease = &slab->leases[i];
        if (viking_slab_intersects(slab, weight, lease->offset, lease->bytes))
            return true;
    }
    return false;
}

void viking_slab_forget(viking_slab *slab, uint32_t weight)
{
    if (slab->map == NULL || weight >= slab->map->count)
        return;
    slab->present[weight] = false;
    for (uint32_t i = 0; i < slab->lease_count; i++)
        if (slab->leases[i].weight == weight)
            slab->leases[i].stale = true;
}

viking_lease *viking_slab_displaced(viking_slab *slab, uint32_t weight)
{
    for (uint32_t i = 0; i < slab->lease_count; i++)
        if (slab->leases[i].weight == weight && slab->leases[i].displaced && !slab->leases[i].stale)
            return &slab->leases[i];
    return NULL;
}

/* The first use in progress that touches the range; NULL if it is free. */
static const viking_lease *obstacle(const viking_slab *slab, uint64_t offset, uint64_t bytes)
{
    for (uint32_t i = 0; i < slab->lease_count; i++)
        if (ranges_intersect(slab->leases[i].offset, slab->leases[i].bytes, offset, bytes))
            return &slab->leases[i];
    return NULL;
}

viking_status viking_slab_gap(const viking_slab *slab, uint64_t bytes, uintptr_t thread, uint64_t *out_offset)
{
    uint64_t offset = 0;
    while (offset + bytes <= slab->map->ring_bytes) {
        const viking_lease *lease = obstacle(slab, offset, bytes);
        if (lease == NULL) {
            *out_offset = offset;
            return VIKING_OK;
        }
        offset = lease->offset + lease->bytes;
    }
    uint64_t in_use = 0;
    bool others = false;
    for (uint32_t i = 0; i < slab->lease_count; i++) {
        in_use += slab->leases[i].bytes;
        others = others || slab->leases[i].thread != thread;
    }
    if (others)
        return VIKING_BUSY;
    return viking_status_fail(VIKING_ERROR_BUDGET,
                              "%llu bytes of weights are in use at the same moment and leave no room for %llu more: "
                              "raise the weights budget by %llu bytes",
                              (unsigned long long)in_use, (unsigned long long)bytes,
                              (unsigned long long)(in_use + 2 * bytes));
}

viking_status viking_slab_wait(viking_slab *slab, uintptr_t thread)
{
    bool others = false;
    bool running = false;
    for (uint32_t i = 0; i < slab->lease_count; i++) {
        others = others || slab->leases[i].thread != thread;
        running = running || (slab->leases[i].thread != thread && !slab->leases[i].waiting);
    }
    if (others && !running)
        return viking_status_fail(VIKING_ERROR_BUDGET, "several threads hold weights and wait for one another's room: "
                                                       "raise the weights budget or run fewer threads at once");
    for (uint32_t i = 0; running && i < slab->lease_count; i++)
        slab->leases[i].waiting = slab->leases[i].waiting || slab->leases[i].thread == thread;
    return running ? VIKING_BUSY : VIKING_OK;
}

void viking_slab_wake(viking_slab *slab)
{
    slab->ended++;
    for (uint32_t i = 0; i < slab->lease_count; i++)
        slab->leases[i].waiting = false;
}

viking_status viking_slab_reserve(viking_slab *slab)
{
    if (slab->lease_count < slab->lease_capacity)
        return VIKING_OK;
    uint32_t capacity = slab->lease_capacity == 0 ? 16 : 2 * slab->lease_capacity;
    viking_lease *leases = realloc(slab->leases, capacity * sizeof *leases);
    if (leases == NULL)
        return viking_status_fail(VIKING_ERROR_NO_HOST_MEMORY, "no host memory for %u uses in progress", capacity);
    slab->leases = leases;
    slab->lease_capacity = capacity;
    return VIKING_OK;
}

viking_lease *viking_slab_acquire(viking_slab *slab, uint32_t weight, uint64_t offset, uintptr_t thread)
{
    viking_lease *lease = &slab->leases[slab->lease_count++];
    *lease = (viking_lease){.ticket = ++slab->last_ticket,
                            .offset = offset,
                            .bytes = slab->map->bytes[weight],
                            .thread = thread,
                            .weight = weight,
                            .displaced = offset != slab->map->offsets[weight]};
    return lease;
}

viking_status viking_slab_release(viking_slab *slab, uint64_t ticket, viking_lease *out)
{
    for (uint32_t i = slab->lease_count; i-- > 0;) {
        if (slab->leases[i].ticket == ticket) {
            *out = slab->leases[i];
            slab->leases[i] = slab->leases[--slab->lease_count];
            return VIKING_OK;
        }
    }
    return viking_status_fail(VIKING_ERROR_STATE, "use %llu is not in progress: it was released before",
                              (unsigned long long)ticket);
}

/* What the engine says about itself. */
#include <stdlib.h>
#include <string.h>

#include "engine_private.h"

static viking_residency residency_of(const viking_engine *engine, uint32_t weight)
{
    const viking_map *map = engine->slab.map;
    if (map == NULL || weight >= map->count || engine->slab.base == NULL)
        return VIKING_DEMAND;
    if (map->resident[weight])
        return VIKING_RESIDENT;
    return engine->paths.count == 0 ? VIKING_DEMAND : VIKING_STREAMED;
}

viking_status viking_engine_weight_stats(viking_engine *engine, uint32_t weight, viking_weight_stats *out)
{
    viking_status status = viking_engine_enter_weight(engine, weight);
    if (status != VIKING_OK)
        return status;
    const viking_weight *self = &engine->weights[weight];
    *out = (viking_weight_stats){.bytes = self->bytes,
                                 .uses = self->uses,
                                 .fetches = self->fetches,
                                 .locked_bytes = viking_home_locked_bytes(self->home),
                                 .residency = residency_of(engine, weight)};
    const viking_slab *slab = &engine->slab;
    if (slab->base != NULL && weight < slab->map->count && slab->present[weight])
        out->device_address = slab->base + slab->map->offsets[weight];
    viking_engine_leave(engine);
    return status;
}

/* Time that streams waited for copies in the last pass whose profile is complete; 0 before the first. */
static viking_status stall_of(viking_engine *engine, uint64_t *out_ns)
{
    const viking_profile *profile = &engine->profile;
    uint64_t stall_ns = 0;
    bool ready = false;
    *out_ns = engine->stall_ns;
    if (!engine->profiled || profile->count == 0)
        return VIKING_OK;
    viking_profile_span *spans = malloc(profile->count * sizeof *spans);
    if (spans == NULL)
        return viking_status_fail(VIKING_ERROR_NO_HOST_MEMORY, "no host memory for a profile of %u spans",
                                  profile->count);
    viking_status status = viking_profile_read(profile, spans, &ready);
    for (uint32_t i = 0; status == VIKING_OK && ready && i < profile->count; i++)
        if (spans[i].kind == VIKING_PROFILE_USE)
            stall_ns += spans[i].end_ns - spans[i].begin_ns;
    free(spans);
    if (status == VIKING_OK && ready)
        *out_ns = engine->stall_ns = stall_ns;
    return status;
}

/* Bytes that any executor must fetch for the last complete pass in training, however it plans, if that is one sweep or,
 * where weights are used again, two: a sweep that follows another one finds at most a slab full of what it needs, and
 * the first one none of the trained weights, which the host has stepped since. 0 where that pass is none of the known
 * paths' any more. */
static uint64_t floor_of(const viking_engine *engine, const viking_map *map)
{
    const viking_trace *trace = NULL;
    for (uint32_t i = 0; i < engine->paths.count; i++)
        if (engine->paths.paths[i].last_pass == engine->trained_pass)
            trace = &engine->paths.paths[i].trace;
    if (map == NULL || trace == NULL)
        return 0;
    uint64_t once = 0, again = 0, trained = 0, slab = map->slab_bytes;
    for (uint32_t w = 0; w < map->count; w++) {
        uint32_t uses = 0;
        for (uint32_t i = 0; i < trace->count && uses < 2; i++)
            uses += trace->uses[i].weight == w;
        once += uses > 0 ? map->bytes[w] : 0;
        again += uses > 1 ? map->bytes[w] : 0;
        trained += uses > 0 && engine->weights[w].training != VIKING_FROZEN ? map->bytes[w] : 0;
    }
    uint64_t first = once > slab ? once - slab : 0;
    return (first > trained ? first : trained) + (again > slab ? again - slab : 0);
}

viking_status viking_engine_stats_of(viking_engine *engine, viking_engine_stats *out)
{
    viking_status status = viking_engine_enter(engine);
    if (status != VIKING_OK)
        return status;
    const viking_map *map = engine->slab.base == NULL ? NULL : engine->slab.map;
    *out = (viking_engine_stats){.budget_bytes = engine->budget_bytes,
                                 .slab_bytes = map == NULL ? 0 : map->slab_bytes,
                                 .ring_bytes = map == NULL ? 0 : map->ring_bytes,
                                 .passes = engine->passes,
                                 .steps = engine->steps,
                                 .layouts = engine->layouts,
                                 .demand_fetches = engine->demand_fetches,
                                 .fetched_bytes = engine->fetched_bytes,
                                 .written_bytes = engine->written_bytes,
                                 .floor_bytes = floor_of(engine, map),
                                 .total_fetched_bytes = engine->total_fetched,
                                 .paths = engine->paths.count,
                                 .readers = engine->queue.reader_count,
                                 .uses = engine->slab.lease_count,
                                 .waiting = engine->waiting,
                                 .streams = atomic_load(&engine->backend->streams),
                                 .events = atomic_load(&engine->backend->events),
                                 .pins = atomic_load(&engine->backend->pins)};
    for (uint32_t i = 0; i < engine->pinned_count; i++)
        out->pinned_bytes += viking_home_locked_bytes(engine->pinned[i]);
    for (uint32_t w = 0; w < engine->count; w++) {
        const viking_weight *self = &engine->weights[w];
        if (self->home == NULL)
            continue;
        out->weights++;
        bool resident = map != NULL && viking_engine_is_resident(engine, w);
        out->pinned_bytes += viking_home_locked_bytes(self->home);
        *(resident ? &out->resident_bytes : &out->streamed_bytes) += self->bytes;
        if (!resident && self->home->pinned_by == NULL)
            out->staged_bytes += self->bytes;
    }
    const viking_home *window = engine->queue.staging.window;
    out->window_bytes = window == NULL ? 0 : viking_home_locked_bytes(window);
    out->pinned_bytes += out->window_bytes;
    status = stall_of(engine, &out->stall_ns);
    viking_engine_leave(engine);
    return status;
}

viking_status viking_engine_profile_next(viking_engine *engine)
{
    viking_status status = viking_engine_enter(engine);
    if (status != VIKING_OK)
        return status;
    engine->profile_asked = true;
    viking_engine_leave(engine);
    return VIKING_OK;
}

viking_status viking_engine_profile_read(viking_engine *engine, viking_profile_span **out_spans, uint32_t *out_count)
{
    bool ready = false;
    *out_spans = NULL;
    *out_count = 0;
    viking_status status = viking_engine_enter(engine);
    if (status != VIKING_OK)
        return status;
    uint32_t count = engine->profile.count;
    viking_profile_span *spans = malloc((count + 1u) * sizeof *spans);
    if (spans == NULL)
        status = viking_status_fail(VIKING_ERROR_NO_HOST_MEMORY, "no host memory for a profile of %u spans", count);
    else if (engine->profiled)
        status = viking_profile_read(&engine->profile, spans, &ready);
    viking_engine_leave(engine);
    if (status != VIKING_OK || !ready) {
        free(spans);
        return status;
    }
    *out_spans = spans;
    *out_count = count;
    return VIKING_OK;
}

viking_status viking_engine_last_trace(viking_engine *engine, viking_trace *out)
{
    viking_trace_init(out);
    viking_status status = viking_engine_enter(engine);
    if (status != VIKING_OK)
        return status;
    if (engine->paths.previous != VIKING_NO_PATH)
        status = viking_trace_copy(out, &engine->paths.paths[engine->paths.previous].trace);
    viking_engine_leave(engine);
    return status;
}

viking_status viking_engine_planned_fetches(viking_engine *engine, uint32_t **out_counts, uint32_t *out_count)
{
    viking_status status = viking_engine_enter(engine);
    if (status != VIKING_OK)
        return status;
    viking_plan *plan = NULL;
    viking_trace path;
    viking_trace_init(&path);
    uint32_t *counts = calloc(engine->count + 1u, sizeof *counts);
    if (counts == NULL) {
        status = viking_status_fail(VIKING_ERROR_NO_HOST_MEMORY, "no host memory for the fetches of %u weights",
                                    engine->count);
        goto done;
    }
    status = viking_engine_path_to_lay_out(engine, &path);
    if (status == VIKING_OK && engine->slab.map != NULL)
        status = viking_plan_build(engine->slab.map, &path, &plan);
    if (status == VIKING_ERROR_NO_HOST_MEMORY)
        goto done;
    status = VIKING_OK;
    for (uint32_t i = 0; plan != NULL && i < plan->count; i++)
        counts[plan->fetches[i].weight]++;
    *out_counts = counts;
    *out_count = engine->count;
    counts = NULL;
done:
    free(counts);
    viking_plan_free(plan);
    viking_trace_free(&path);
    viking_engine_leave(engine);
    return status;
}

/* The look-ahead: the copies that a step needs, queued as early as space allows.
 *
 * It walks the predicted sequence of uses ahead of the real one, without a limit but one period. For each use it asks:
 * will the weight be there? If not, its copy is queued as soon as no use, in progress or foreseen before it, needs the
 * bytes that it overwrites; until then the look-ahead waits there, and each release lets it try again. With fixed
 * addresses this yields exactly the fetch list of plan.h on a path that repeats, and the right one from any other
 * contents: what an unforeseen use, an edit or another model's pass has left behind needs no repair.
 */
#include "engine_private.h"

bool viking_engine_has_place(const viking_engine *engine, uint32_t weight)
{
    const viking_map *map = engine->slab.map;
    return weight < map->count && engine->weights[weight].home != NULL &&
           map->bytes[weight] == engine->weights[weight].bytes;
}

bool viking_engine_is_resident(const viking_engine *engine, uint32_t weight)
{
    const viking_map *map = engine->slab.map;
    return map != NULL && weight < map->count && map->resident[weight];
}

bool viking_engine_may_block(const viking_engine *engine)
{
    return atomic_load_explicit(&engine->may_block, memory_order_relaxed) ||
           atomic_load_explicit(&engine->long_calls, memory_order_relaxed) > 0;
}

void viking_engine_announce(viking_engine *engine, int calls)
{
    atomic_fetch_add_explicit(&engine->long_calls, calls, memory_order_relaxed);
}

void viking_engine_update_may_block(viking_engine *engine)
{
    bool may = engine->backend->operations->caller_blocks;
    for (uint32_t w = 0; w < engine->count && !may; w++) {
        const viking_weight *self = &engine->weights[w];
        bool settled = viking_engine_is_resident(engine, w) && engine->slab.present[w];
        may = self->home != NULL && viking_queue_copies_block(&engine->queue, self->home) && !settled;
    }
    atomic_store_explicit(&engine->may_block, may, memory_order_relaxed);
}

/* ---- copies ---- */

static viking_status after_neighbours(viking_engine *engine, uint32_t weight)
{
    const viking_map *map = engine->slab.map;
    for (uint32_t i = map->neighbour_begin[weight]; i < map->neighbour_begin[weight + 1]; i++) {
        viking_status status = viking_queue_after(&engine->queue, &engine->weights[map->neighbours[i]].fence);
        if (status != VIKING_OK)
            return status;
    }
    return viking_queue_after(&engine->queue, &engine->weights[weight].fence);
}

static viking_status after_range(viking_engine *engine, uint64_t offset, uint64_t bytes)
{
    for (uint32_t w = 0; w < engine->slab.map->count; w++) {
        if (!viking_slab_intersects(&engine->slab, w, offset, bytes))
            continue;
        viking_status status = viking_queue_after(&engine->queue, &engine->weights[w].fence);
        if (status != VIKING_OK)
            return status;
    }
    return VIKING_OK;
}

/* `weight` is overwritten. True if the look-ahead had counted on it. */
static bool evict(viking_engine *engine, uint32_t weight)
{
    bool counted_on = engine->slab.present[weight] && engine->weights[weight].foreseen > engine->position;
    engine->slab.present[weight] = false;
    return counted_on;
}

viking_status viking_engine_fetch(viking_engine *engine, uint32_t weight, uint64_t offset, bool *out_upset)
{
    viking_weight *self = &engine->weights[weight];
    const viking_map *map = engine->slab.map;
    bool displaced = offset != map->offsets[weight];
    viking_status status = displaced ? after_range(engine, offset, self->bytes) : after_neighbours(engine, weight);
    if (status != VIKING_OK)
        return status;
    *out_upset = false;
    if (displaced) {
        for (uint32_t w = 0; w < map->count; w++)
            if (viking_slab_intersects(&engine->slab, w, offset, self->bytes))
                *out_upset |= evict(engine, w);
    } else {
        for (uint32_t i = map->neighbour_begin[weight]; i < map->neighbour_begin[weight + 1]; i++)
            *out_upset |= evict(engine, map->neighbours[i]);
    }
    uint32_t span = UINT32_MAX;
    status = viking_profile_begin(&engine->profile, VIKING_PROFILE_COPY, weight, engine->queue.stream, &span);
    if (status == VIKING_OK)
        status = viking_queue_copy(&engine->queue, &self->fence, engine->slab.base + offset, self->home, self->bytes);
    if (status == VIKING_OK)
        status = viking_profile_end(&engine->profile, span, engine->queue.stream);
    if (status != VIKING_OK)
        return status;
    engine->slab.present[weight] = !displaced;
    self->fetches++;
    engine->pass_fetched += self->bytes;
    engine->total_fetched += self->bytes;
    if (map->resident[weight])
        viking_engine_update_may_block(engine);
    return VIKING_OK;
}

/* ---- the look-ahead ---- */

void viking_engine_look_again(viking_engine *engine)
{
    for (uint32_t w = 0; w < engine->count; w++)
        if (engine->weights[w].foreseen > engine->position)
            engine->weights[w].foreseen = 0;
    engine->ahead = engine->paths.expected;
    engine->ahead_position = engine->position;
}

/* Bytes that a fetch of the weight would overwrite are needed by a use in progress or by one foreseen earlier. */
static bool gate_is_shut(const viking_engine *engine, uint32_t weight)
{
    const viking_map *map = engine->slab.map;
    for (uint32_t i = map->neighbour_begin[weight]; i < map->neighbour_begin[weight + 1]; i++)
        if (engine->weights[map->neighbours[i]].foreseen > engine->position)
            return true;
    return viking_slab_blocked(&engine->slab, weight);
}

static uint64_t horizon(const viking_engine *engine)
{
    uint32_t path = engine->paths.expected.path;
    return path == VIKING_NO_PATH ? 0 : engine->paths.paths[path].trace.count;
}

viking_status viking_engine_look_ahead(viking_engine *engine)
{
    if (engine->slab.base == NULL)
        return VIKING_OK;
    uint64_t limit = engine->position + horizon(engine);
    while (engine->ahead_position < limit) {
        viking_cursor next = engine->ahead;
        const viking_use *use = viking_paths_next(&engine->paths, &next);
        if (use == NULL || !viking_engine_has_place(engine, use->weight))
            return VIKING_OK;
        if (viking_engine_is_too_early(engine, use->weight, engine->ahead_position))
            return VIKING_OK;
        if (!engine->slab.present[use->weight]) {
            if (gate_is_shut(engine, use->weight))
                return VIKING_OK;
            bool upset = false;
            viking_status status =
                viking_engine_fetch(engine, use->weight, engine->slab.map->offsets[use->weight], &upset);
            if (status != VIKING_OK)
                return status;
        }
        engine->weights[use->weight].foreseen = engine->ahead_position + 1;
        engine->ahead = next;
        engine->ahead_position++;
    }
    return VIKING_OK;
}

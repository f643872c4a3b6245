/* An engine's life, its weights, and where a budget puts them. */
#include <stdlib.h>
#include <string.h>

#include "engine_private.h"

/* What layouts assume of the link. Only the ratio to the compute times matters, and these are unknown: a layout is
 * chosen to be good for steps bound by the link, by compute, and by both alike, so that the same model under the same
 * budget gets the same layout every time. */
static const viking_link assumed_link = {.bytes_per_second = UINT64_C(50000000000), .latency_ns = 8000};
static const double assumed_scales[] = {0.35, 0.5, 1.0, 2.0};

viking_status viking_engine_enter(viking_engine *engine)
{
    if (viking_os_forked())
        return viking_status_fail(VIKING_ERROR_STATE,
                                  "this process was forked from one that streams weights: the weights are not in the "
                                  "child; do the model's work in the parent, or start workers with spawn");
    viking_mutex_lock(engine->lock);
    return VIKING_OK;
}

void viking_engine_leave(viking_engine *engine)
{
    viking_mutex_unlock(engine->lock);
}

void viking_engine_wait(viking_engine *engine)
{
    engine->waiting++;
    viking_condition_wait(engine->released, engine->lock);
    engine->waiting--;
}

viking_status viking_engine_serves(const viking_engine *engine)
{
    return engine->retired ? viking_status_fail(VIKING_ERROR_STATE, "this engine is closed: its models were detached")
                           : VIKING_OK;
}

viking_status viking_engine_known(const viking_engine *engine, uint32_t weight)
{
    if (weight >= engine->count || engine->weights[weight].home == NULL)
        return viking_status_fail(VIKING_ERROR_STATE, "weight %u is not managed by this engine", weight);
    return VIKING_OK;
}

viking_status viking_engine_enter_weight(viking_engine *engine, uint32_t weight)
{
    viking_status status = viking_engine_enter(engine);
    if (status != VIKING_OK)
        return status;
    status = viking_engine_known(engine, weight);
    if (status != VIKING_OK)
        viking_engine_leave(engine);
    return status;
}

viking_status viking_engine_open(viking_backend *backend, viking_engine **out)
{
    viking_status status = VIKING_OK;
    viking_engine *engine = calloc(1, sizeof *engine);
    if (engine == NULL) {
        status = viking_status_fail(VIKING_ERROR_NO_HOST_MEMORY, "no host memory for an engine");
        goto fail;
    }
    engine->backend = backend;
    viking_slab_init(&engine->slab);
    viking_paths_init(&engine->paths);
    viking_profile_init(&engine->profile, backend);
    engine->ahead.path = VIKING_NO_PATH;
    engine->trained_pass = VIKING_NO_PASS;
    atomic_init(&engine->may_block, backend->operations->caller_blocks);
    atomic_init(&engine->long_calls, 0);
    viking_os_forked(); /* from here on a fork is noticed */
    status = viking_mutex_open(&engine->lock);
    if (status == VIKING_OK)
        status = viking_condition_open(&engine->released);
    if (status == VIKING_OK)
        status = viking_downloads_open(&engine->downloads, backend);
    if (status == VIKING_OK)
        status = viking_queue_open(&engine->queue, backend);
    if (status != VIKING_OK)
        goto fail;
    *out = engine;
    return VIKING_OK;
fail:
    if (engine != NULL) {
        viking_downloads_close(&engine->downloads);
        viking_condition_close(engine->released);
        viking_mutex_close(engine->lock);
        free(engine);
    }
    backend->operations->close(backend);
    return status;
}

void viking_engine_retire(viking_engine *engine)
{
    if (viking_engine_enter(engine) != VIKING_OK)
        return;
    engine->retired = true;
    viking_condition_broadcast(engine->released);
    viking_engine_leave(engine);
}

void viking_engine_close(viking_engine *engine)
{
    if (engine == NULL || viking_os_forked()) /* a child has neither the threads nor the device */
        return;
    viking_queue_drain(&engine->queue);
    viking_downloads_close(&engine->downloads);
    for (uint32_t i = 0; i < engine->pinned_count; i++)
        viking_home_unpin(engine->pinned[i]);
    free(engine->pinned);
    viking_profile_free(&engine->profile);
    for (uint32_t w = 0; w < engine->count; w++) {
        if (engine->weights[w].home == NULL)
            continue;
        viking_home_unpin(engine->weights[w].home);
        viking_fence_close(&engine->weights[w].fence, engine->backend);
    }
    viking_queue_close(&engine->queue);
    viking_slab_free(&engine->slab);
    viking_paths_free(&engine->paths);
    viking_map_free(engine->next_map);
    free(engine->weights);
    viking_condition_close(engine->released);
    viking_mutex_close(engine->lock);
    engine->backend->operations->close(engine->backend);
    free(engine);
}

/* ---- weights ---- */

static viking_status vacant_number(viking_engine *engine, uint32_t *out)
{
    for (uint32_t w = 0; w < engine->count; w++) {
        if (engine->weights[w].home == NULL) {
            *out = w;
            return VIKING_OK;
        }
    }
    if (engine->count == engine->capacity) {
        uint32_t capacity = engine->capacity == 0 ? 64 : 2 * engine->capacity;
        viking_weight *weights = realloc(engine->weights, capacity * sizeof *weights);
        if (weights == NULL)
            return viking_status_fail(VIKING_ERROR_NO_HOST_MEMORY, "no host memory for %u weights", capacity);
        engine->weights = weights;
        engine->capacity = capacity;
    }
    *out = engine->count;
    engine->weights[engine->count++] = (viking_weight){.bytes = VIKING_ALIGNMENT};
    return VIKING_OK;
}

viking_status viking_engine_add(viking_engine *engine, viking_home *home, uint64_t bytes, uint32_t *out_weight)
{
    if (bytes == 0 || bytes > home->bytes)
        return viking_status_fail(VIKING_ERROR_INVALID, "a weight of %llu bytes does not fit in a home of %zu bytes",
                                  (unsigned long long)bytes, home->bytes);
    viking_status status = viking_engine_enter(engine);
    if (status != VIKING_OK)
        return status;
    uint32_t w = 0;
    viking_fence fence;
    status = viking_fence_open(&fence, engine->backend);
    if (status != VIKING_OK)
        goto done;
    status = vacant_number(engine, &w);
    if (status != VIKING_OK) {
        viking_fence_close(&fence, engine->backend);
        goto done;
    }
    uint64_t rounded = (bytes + VIKING_ALIGNMENT - 1) / VIKING_ALIGNMENT * VIKING_ALIGNMENT;
    engine->weights[w] = (viking_weight){.home = home, .bytes = rounded, .fence = fence};
    *out_weight = w;
done:
    viking_engine_leave(engine);
    return status;
}

viking_status viking_engine_remove(viking_engine *engine, uint32_t weight)
{
    viking_status status = viking_engine_enter_weight(engine, weight);
    if (status != VIKING_OK)
        return status;
    for (uint32_t i = 0; status == VIKING_OK && i < engine->slab.lease_count; i++)
        if (engine->slab.leases[i].weight == weight)
            status = viking_status_fail(VIKING_ERROR_STATE, "weight %u is in use and cannot be removed", weight);
    if (status == VIKING_OK)
        status = viking_queue_drain_copies(&engine->queue);
    if (status == VIKING_OK)
        status = viking_home_unpin(engine->weights[weight].home);
    /* Its span may still be read by work in flight; the fence that knows it is about to go. */
    if (status == VIKING_OK)
        status = viking_queue_after(&engine->queue, &engine->weights[weight].fence);
    if (status != VIKING_OK)
        goto done;
    viking_weight *self = &engine->weights[weight];
    viking_fence_close(&self->fence, engine->backend);
    *self = (viking_weight){.bytes = VIKING_ALIGNMENT};
    while (engine->count > 0 && engine->weights[engine->count - 1].home == NULL)
        engine->count--;
    if (engine->slab.map != NULL && weight < engine->slab.map->count)
        engine->slab.present[weight] = false;
    viking_paths_clear(&engine->paths);
    viking_engine_look_again(engine);
    viking_engine_update_may_block(engine);
done:
    viking_engine_leave(engine);
    return status;
}

viking_status viking_engine_invalidate(viking_engine *engine, uint32_t weight)
{
    viking_status status = viking_engine_enter_weight(engine, weight);
    if (status != VIKING_OK)
        return status;
    viking_slab_forget(&engine->slab, weight);
    viking_engine_update_may_block(engine);
    viking_engine_leave(engine);
    return status;
}

viking_status viking_engine_drain_copies(viking_engine *engine)
{
    viking_status status = viking_engine_enter(engine);
    if (status != VIKING_OK)
        return status;
    viking_engine_leave(engine); /* the others need not wait as well: the stream stays what it is until close */
    return viking_queue_drain_copies(&engine->queue);
}

/* ---- layout ---- */

/* *out_stepped, behind the sizes in the same memory: who is trained. */
static viking_status weight_sizes(const viking_engine *engine, uint64_t **out, bool **out_stepped)
{
    uint64_t *bytes = malloc((engine->count + 1u) * (sizeof *bytes + sizeof **out_stepped));
    if (bytes == NULL)
        return viking_status_fail(VIKING_ERROR_NO_HOST_MEMORY, "no host memory for a layout of %u weights",
                                  engine->count);
    bool *stepped = (bool *)(bytes + engine->count + 1u);
    for (uint32_t w = 0; w < engine->count; w++) {
        bytes[w] = engine->weights[w].bytes;
        stepped[w] = engine->weights[w].training != VIKING_FROZEN;
    }
    *out = bytes;
    *out_stepped = stepped;
    return VIKING_OK;
}

/* Numbers that are vacant take no part in it, so that a model gets the same layout whatever else was attached before. */
viking_status viking_engine_path_to_lay_out(const viking_engine *engine, viking_trace *out)
{
    const viking_trace *path = viking_engine_main_path(engine);
    if (path != NULL)
        return viking_trace_copy(out, path);
    viking_status status = VIKING_OK;
    for (uint32_t i = 0; i < 2 * engine->count && status == VIKING_OK; i++) {
        uint32_t w = i < engine->count ? i : 2 * engine->count - 1 - i;
        uint32_t index = 0;
        if (engine->weights[w].home == NULL)
            continue;
        status = viking_trace_acquire(out, w, VIKING_USE_READ, &index);
        if (status == VIKING_OK)
            viking_trace_release(out, index);
    }
    return status;
}

viking_status viking_engine_layout(viking_engine *engine, uint64_t budget_bytes, uint64_t *out_slab_bytes)
{
    viking_status status = viking_engine_enter(engine);
    if (status != VIKING_OK)
        return status;
    uint64_t *bytes = NULL;
    bool *stepped = NULL;
    viking_map *map = NULL;
    viking_trace path;
    viking_trace_init(&path);
    status = viking_engine_path_to_lay_out(engine, &path);
    if (status == VIKING_OK)
        status = weight_sizes(engine, &bytes, &stepped);
    if (status != VIKING_OK)
        goto done;
    viking_map_request request = {.trace = &path,
                                  .bytes = bytes,
                                  .stepped = stepped,
                                  .count = engine->count,
                                  .budget_bytes = budget_bytes,
                                  .link = assumed_link,
                                  .compute_scales = assumed_scales,
                                  .compute_scale_count = sizeof assumed_scales / sizeof *assumed_scales};
    status = viking_map_build(&request, &map);
    if (status != VIKING_OK)
        goto done;
    viking_map_free(engine->next_map);
    engine->next_map = map;
    engine->next_budget = budget_bytes;
    *out_slab_bytes = map->slab_bytes;
done:
    viking_trace_free(&path);
    free(bytes);
    viking_engine_leave(engine);
    return status;
}

viking_status viking_engine_budget_range(viking_engine *engine, uint64_t *out_smallest, uint64_t *out_largest)
{
    viking_status status = viking_engine_enter(engine);
    if (status != VIKING_OK)
        return status;
    uint64_t *bytes = NULL;
    bool *stepped = NULL;
    viking_trace path;
    viking_trace_init(&path);
    status = viking_engine_path_to_lay_out(engine, &path);
    if (status == VIKING_OK)
        status = weight_sizes(engine, &bytes, &stepped);
    if (status == VIKING_OK)
        status = viking_map_smallest_budget(&path, bytes, engine->count, out_smallest);
    if (status == VIKING_OK)
        *out_largest = viking_map_largest_budget(bytes, engine->count);
    viking_trace_free(&path);
    free(bytes);
    viking_engine_leave(engine);
    return status;
}

/* Other threads end their uses soon; one of the caller's own would never end. */
static viking_status await_uses(viking_engine *engine, const char *what)
{
    uintptr_t thread = viking_thread_identity();
    while (engine->slab.lease_count > 0) {
        viking_status status = viking_engine_serves(engine);
        if (status != VIKING_OK)
            return status;
        for (uint32_t i = 0; i < engine->slab.lease_count; i++)
            if (engine->slab.leases[i].thread == thread)
                return viking_status_fail(VIKING_ERROR_STATE, "%u weights are in use: %s", engine->slab.lease_count,
                                          what);
        viking_engine_wait(engine);
    }
    return VIKING_OK;
}

viking_status viking_engine_use_layout(viking_engine *engine, void *base, viking_stream stream)
{
    viking_status status = viking_engine_enter(engine);
    if (status != VIKING_OK)
        return status;
    status = await_uses(engine, "their addresses cannot change now");
    if (status == VIKING_OK && (engine->next_map == NULL || (uintptr_t)base % VIKING_ALIGNMENT != 0))
        status = viking_status_fail(VIKING_ERROR_INVALID,
                                    "a layout needs to be found first, and a slab that starts at a "
                                    "multiple of %u bytes",
                                    VIKING_ALIGNMENT);
    /* Weights may move over bytes that work in flight still reads. */
    if (status == VIKING_OK)
        status = viking_queue_after_all(&engine->queue);
    if (status == VIKING_OK)
        status = viking_queue_after_stream(&engine->queue, stream);
    if (status == VIKING_OK)
        status = viking_slab_adopt(&engine->slab, engine->next_map, base == engine->slab.base);
    if (status != VIKING_OK)
        goto done;
    const viking_trace *path = viking_engine_main_path(engine);
    engine->layout_path_uses = path == NULL ? 0 : path->count;
    engine->next_map = NULL;
    engine->slab.base = base;
    engine->budget_bytes = engine->next_budget;
    engine->layouts++;
    engine->trained_pass = VIKING_NO_PASS;
    viking_engine_look_again(engine);
    viking_engine_update_may_block(engine);
    viking_condition_broadcast(engine->released);
done:
    viking_engine_leave(engine);
    return status;
}

viking_status viking_engine_drop_slab(viking_engine *engine)
{
    viking_status status = viking_engine_enter(engine);
    if (status != VIKING_OK)
        return status;
    status = await_uses(engine, "the slab cannot go now");
    if (status != VIKING_OK)
        goto done;
    if (engine->slab.base == NULL) {
        viking_map_free(engine->next_map);
        engine->next_map = NULL;
        viking_condition_broadcast(engine->released);
    }
    engine->slab.base = NULL;
    for (uint32_t w = 0; engine->slab.map != NULL && w < engine->slab.map->count; w++)
        engine->slab.present[w] = false;
    viking_engine_look_again(engine);
    status = viking_queue_drain(&engine->queue);
done:
    viking_engine_leave(engine);
    return status;
}

/* ---- pinning ---- */

viking_status viking_engine_pin(viking_engine *engine, uint32_t weight)
{
    viking_status status = viking_engine_enter_weight(engine, weight);
    if (status != VIKING_OK)
        return status;
    viking_home *home = engine->weights[weight].home;
    if (!viking_engine_is_resident(engine, weight) || engine->weights[weight].training != VIKING_FROZEN) {
        status = viking_home_pin(home, engine->backend);
    } else if (home->pinned_by != NULL) {
        status = viking_queue_drain_copies(&engine->queue);
        if (status == VIKING_OK)
            status = viking_home_unpin(home);
    }
    viking_engine_update_may_block(engine);
    viking_engine_leave(engine);
    return status;
}

viking_status viking_engine_unpin(viking_engine *engine, uint32_t weight)
{
    viking_status status = viking_engine_enter_weight(engine, weight);
    if (status != VIKING_OK)
        return status;
    status = viking_queue_drain_copies(&engine->queue);
    if (status == VIKING_OK)
        status = viking_home_unpin(engine->weights[weight].home);
    viking_engine_update_may_block(engine);
    viking_engine_leave(engine);
    return status;
}

viking_status viking_engine_use_window(viking_engine *engine, uint64_t bytes)
{
    viking_status status = viking_engine_enter(engine);
    if (status != VIKING_OK)
        return status;
    status = viking_queue_drain_copies(&engine->queue);
    if (status == VIKING_OK)
        status = viking_staging_close_window(&engine->queue.staging);
    if (status == VIKING_OK && bytes > 0)
        status = viking_staging_open_window(&engine->queue.staging, bytes);
    viking_engine_update_may_block(engine);
    viking_engine_leave(engine);
    return status;
}

viking_status viking_engine_pace(viking_engine *engine, uint64_t bytes_per_second)
{
    viking_status status = viking_engine_enter(engine);
    if (status != VIKING_OK)
        return status;
    status = viking_pace_set(&engine->queue.pace, engine->backend, engine->queue.stream, bytes_per_second);
    viking_engine_leave(engine);
    return status;
}

viking_status viking_engine_rehome(viking_engine *engine, uint32_t weight, viking_home *home)
{
    viking_status status = viking_engine_enter_weight(engine, weight);
    if (status != VIKING_OK)
        return status;
    if (home->bytes != engine->weights[weight].home->bytes)
        status = viking_status_fail(VIKING_ERROR_INVALID, "a home of %zu bytes cannot take the place of one of %zu",
                                    home->bytes, engine->weights[weight].home->bytes);
    if (status == VIKING_OK)
        status = viking_queue_drain_copies(&engine->queue);
    if (status == VIKING_OK)
        status = viking_home_unpin(engine->weights[weight].home);
    if (status == VIKING_OK)
        engine->weights[weight].home = home;
    viking_engine_update_may_block(engine);
    viking_engine_leave(engine);
    return status;
}

/* A step: passes and uses.
 *
 * Whatever the look-ahead foresees, a use itself only trusts `present`, which follows the copies that were really queued.
 */
#include "engine.h"

#include <stdio.h>

#include "engine_private.h"

enum { PROFILE_INTERVAL = 32, PROFILE_FIRST = 3 };

/* ---- passes ---- */

/* The pass that viking_paths has just closed. */
static void end_pass(viking_engine *engine)
{
    engine->passes++;
    if (engine->training) {
        engine->steps++;
        engine->fetched_bytes = engine->pass_fetched;
        engine->written_bytes = atomic_load(&engine->pass_written);
        engine->trained_pass = engine->paths.paths[engine->paths.previous].last_pass;
    }
    engine->pass_fetched = 0;
    atomic_store(&engine->pass_written, 0);
    if (engine->profile.running) {
        viking_profile_stop(&engine->profile);
        engine->profiled = true;
    }
}

const viking_trace *viking_engine_main_path(const viking_engine *engine)
{
    const viking_trace *longest = NULL;
    for (uint32_t i = 0; i < engine->paths.count; i++) {
        const viking_trace *trace = &engine->paths.paths[i].trace;
        if (longest == NULL || trace->count > longest->count)
            longest = trace;
    }
    return longest;
}

/* A path clearly longer than the one that the layout was made for is worth a layout of its own: the first one, and a
 * training step after sampling. Not each new path, so that a model whose order changes all the time does not move its
 * weights all the time. */
static bool outgrown(const viking_engine *engine, const viking_trace *trace)
{
    const viking_map *map = engine->slab.map;
    return map != NULL && map->ring_bytes > 0 && 4 * (uint64_t)trace->count > 5 * (uint64_t)engine->layout_path_uses;
}

viking_status viking_engine_pass_begin(viking_engine *engine, uint64_t key, bool training, viking_stream stream,
                                       bool *out_stale)
{
    *out_stale = false;
    viking_status status = viking_engine_enter(engine);
    if (status != VIKING_OK)
        return status;
    bool steady = false;
    bool had_uses = engine->paths.uses > 0;
    uint32_t learned = VIKING_NO_PATH;
    status = viking_paths_begin(&engine->paths, key, &steady, &learned);
    if (status != VIKING_OK)
        goto done;
    if (had_uses)
        end_pass(engine);
    if (learned != VIKING_NO_PATH)
        *out_stale = outgrown(engine, &engine->paths.paths[learned].trace);
    if (!steady)
        viking_engine_look_again(engine);
    viking_engine_forget_all_trained(engine);
    engine->training = training;
    bool due = engine->passes % PROFILE_INTERVAL == PROFILE_FIRST;
    if ((due || engine->profile_asked) && had_uses) {
        status = viking_profile_start(&engine->profile, stream);
        engine->profile_asked = false;
        engine->profiled = false;
    }
    if (status == VIKING_OK)
        status = viking_engine_look_ahead(engine);
done:
    viking_engine_leave(engine);
    return status;
}

/* ---- uses ---- */

/* Bring the weight, which is not at its address, for a use that begins now: to its address if no use in progress is
 * in the way, else wherever there is room. */
static viking_status fetch_on_demand(viking_engine *engine, uint32_t weight, uint64_t *out_offset)
{
    viking_slab *slab = &engine->slab;
    *out_offset = slab->map->offsets[weight];
    const viking_lease *displaced = viking_slab_displaced(slab, weight);
    if (displaced != NULL) { /* a use of it in progress has it already */
        *out_offset = displaced->offset;
        return VIKING_OK;
    }
    if (viking_slab_blocked(slab, weight)) {
        viking_status status =
            viking_slab_gap(slab, engine->weights[weight].bytes, viking_thread_identity(), out_offset);
        if (status != VIKING_OK)
            return status;
    }
    bool upset = false;
    viking_status status = viking_engine_fetch(engine, weight, *out_offset, &upset);
    if (status != VIKING_OK)
        return status;
    engine->demand_fetches++;
    if (upset)
        viking_engine_look_again(engine);
    return VIKING_OK;
}

/* Another thread has taken the slab away and is about to bring the next one. */
static bool between_slabs(const viking_engine *engine)
{
    return engine->slab.base == NULL && engine->next_map != NULL && engine->slab.map != NULL;
}

static viking_status usable(const viking_engine *engine, uint32_t weight)
{
    viking_status status = viking_engine_serves(engine);
    if (status == VIKING_OK)
        status = viking_engine_known(engine, weight);
    if (status != VIKING_OK)
        return status;
    if (between_slabs(engine))
        return VIKING_BUSY;
    if (engine->slab.base == NULL || !viking_engine_has_place(engine, weight))
        return viking_status_fail(VIKING_ERROR_STATE,
                                  "weight %u has no place on the device yet: its engine is without "
                                  "a layout, or was given the weight after its last one",
                                  weight);
    return VIKING_OK;
}

/* What acquire leaves to do outside the lock. */
typedef struct use_in_progress {
    uint32_t reader;
    uint32_t span;
    viking_event *ready; /* of the weight: the table of weights may move while the caller waits */
    bool block; /* the caller has to wait for the copy itself */
} use_in_progress;

/* The use takes its place in the sequence. A pass that began again without a root entry ends the one before. What other
 * threads hold meanwhile is chance, on which no layout shall depend: their uses end here, as far as the path knows. */
static viking_status write_down(viking_engine *engine, uint32_t weight, uintptr_t thread, uint32_t *out_index)
{
    bool expected = false;
    uint64_t pass = engine->paths.pass;
    for (uint32_t i = 0; i < engine->slab.lease_count; i++) {
        const viking_lease *lease = &engine->slab.leases[i];
        if (lease->thread != thread)
            viking_paths_release(&engine->paths, lease->pass, lease->use);
    }
    viking_status status = viking_paths_use(&engine->paths, weight, VIKING_USE_READ, out_index, &expected);
    if (status != VIKING_OK)
        return status;
    bool began = engine->paths.pass != pass; /* and another path may have taken the place of the one looked at */
    if (began)
        end_pass(engine);
    engine->position++;
    engine->weights[weight].uses++;
    if (!expected || began || engine->ahead_position < engine->position)
        viking_engine_look_again(engine);
    return VIKING_OK;
}

static viking_status begin_use(viking_engine *engine, uint32_t weight, viking_stream stream, viking_acquired *out,
                               use_in_progress *out_use)
{
    uintptr_t thread = viking_thread_identity();
    uint32_t index = 0;
    uint64_t offset = engine->slab.map->offsets[weight];
    viking_status status = viking_queue_reader(&engine->queue, stream, thread, &out_use->reader);
    if (status == VIKING_OK)
        status = viking_slab_reserve(&engine->slab);
    /* Before the use is written down, so that a BUSY attempt leaves no trace. */
    if (status == VIKING_OK && !engine->slab.present[weight])
        status = fetch_on_demand(engine, weight, &offset);
    if (status == VIKING_OK)
        status = write_down(engine, weight, thread, &index);
    if (status == VIKING_OK)
        status = viking_profile_begin(&engine->profile, VIKING_PROFILE_USE, weight, stream, &out_use->span);
    if (status == VIKING_OK)
        status = viking_queue_await(&engine->queue, out_use->reader, &engine->weights[weight].fence, &out_use->block);
    if (status == VIKING_OK && !out_use->block)
        status = viking_profile_end(&engine->profile, out_use->span, stream);
    if (status != VIKING_OK)
        return status;
    viking_lease *lease = viking_slab_acquire(&engine->slab, weight, offset, thread);
    lease->pass = engine->paths.pass;
    lease->use = index;
    out_use->ready = engine->weights[weight].fence.ready;
    *out = (viking_acquired){.ticket = lease->ticket, .address = engine->slab.base + offset, .layout = engine->layouts};
    return VIKING_OK;
}

/* The copy is waited for by the calling thread. The use is in progress, so no later copy of its weight can be queued
 * meanwhile and the event stays what it is. */
static viking_status block(viking_engine *engine, const use_in_progress *use, viking_stream stream)
{
    viking_status status = viking_queue_block(&engine->queue, use->ready);
    if (use->span != UINT32_MAX || status != VIKING_OK) {
        viking_status entered = viking_engine_enter(engine);
        if (entered != VIKING_OK)
            return entered;
        if (status == VIKING_OK)
            status = viking_profile_end(&engine->profile, use->span, stream);
        else
            viking_queue_distrust(&engine->queue, use->reader);
        viking_engine_leave(engine);
    }
    return status;
}

viking_status viking_engine_acquire(viking_engine *engine, uint32_t weight, viking_stream stream, viking_acquired *out)
{
    use_in_progress use = {.span = UINT32_MAX};
    viking_status status = viking_engine_enter(engine);
    if (status != VIKING_OK)
        return status;
    status = usable(engine, weight);
    if (status == VIKING_OK)
        status = begin_use(engine, weight, stream, out, &use);
    viking_engine_leave(engine);
    if (status != VIKING_OK || !use.block)
        return status;
    status = block(engine, &use, stream);
    if (status != VIKING_OK) {
        char why[512];
        snprintf(why, sizeof why, "%s", viking_status_detail());
        viking_engine_release(engine, out->ticket, stream);
        viking_status_fail(status, "%s", why); /* the release may have failed for a reason of its own */
    }
    return status;
}

/* The reader that a use is released on. One that cannot be made is waited for here and now instead. */
static viking_status release_on(viking_engine *engine, viking_stream stream, viking_fence *fence)
{
    uint32_t reader = 0;
    viking_status status = viking_queue_reader(&engine->queue, stream, viking_thread_identity(), &reader);
    if (status == VIKING_OK)
        return viking_queue_release(&engine->queue, reader, fence);
    engine->backend->operations->stream_drain(engine->backend, stream);
    return status;
}

/* A displaced use leaves its place for good. Rather than remember who was there, the copies wait for it now; where
 * that fails, the caller does, for no later copy would know of it. */
static viking_status leave_place(viking_engine *engine, viking_stream stream, viking_fence *fence)
{
    viking_status status = viking_queue_after(&engine->queue, fence);
    if (status != VIKING_OK)
        engine->backend->operations->stream_drain(engine->backend, stream);
    return status;
}

viking_status viking_engine_release(viking_engine *engine, uint64_t ticket, viking_stream stream)
{
    viking_lease lease;
    viking_status status = viking_engine_enter(engine);
    if (status != VIKING_OK)
        return status;
    status = viking_slab_release(&engine->slab, ticket, &lease);
    if (status != VIKING_OK)
        goto done;
    viking_paths_release(&engine->paths, lease.pass, lease.use);
    viking_slab_wake(&engine->slab);
    viking_condition_broadcast(engine->released);
    status = release_on(engine, stream, &engine->weights[lease.weight].fence);
    if (engine->weights[lease.weight].step_expected)
        viking_slab_forget(&engine->slab, lease.weight);
    if (lease.displaced) {
        viking_status left = leave_place(engine, stream, &engine->weights[lease.weight].fence);
        status = status == VIKING_OK ? left : status;
    }
    if (status == VIKING_OK)
        status = viking_engine_look_ahead(engine);
done:
    viking_engine_leave(engine);
    return status;
}

viking_status viking_engine_wait_release(viking_engine *engine)
{
    viking_status status = viking_engine_enter(engine);
    if (status != VIKING_OK)
        return status;
    status = viking_slab_wait(&engine->slab, viking_thread_identity());
    uint64_t ended = engine->slab.ended;
    while (status == VIKING_BUSY && engine->slab.ended == ended && !engine->retired)
        viking_engine_wait(engine);
    while (between_slabs(engine) && !engine->retired)
        viking_engine_wait(engine);
    if (status == VIKING_BUSY)
        status = VIKING_OK;
    viking_engine_leave(engine);
    return status;
}

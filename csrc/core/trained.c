/* Weights that the host steps between passes, and the gradients that it needs for that.
 *
 * An optimizer, a moving average or a script may write such a weight in ways that nothing counts, so its bytes on the
 * device are never trusted across a step: whoever enters a root begins a pass, and then all of them are forgotten; and
 * the look-ahead fetches them for the pass under way alone. Where no root is entered (a block called by itself), a
 * gradient that was made is the sign that a step is due, and from then on every use fetches; of a Linear that is managed
 * without a model, every use does from the start.
 */
#include <stdlib.h>

#include "engine_private.h"

void viking_engine_forget_all_trained(viking_engine *engine)
{
    bool any = false;
    for (uint32_t w = 0; w < engine->count; w++) {
        if (engine->weights[w].training == VIKING_FROZEN)
            continue;
        any = true;
        engine->weights[w].step_expected = engine->weights[w].training == VIKING_STEPPED_ANYTIME;
        viking_slab_forget(&engine->slab, w);
    }
    if (any)
        viking_engine_update_may_block(engine);
}

bool viking_engine_is_too_early(const viking_engine *engine, uint32_t weight, uint64_t position)
{
    const viking_weight *self = &engine->weights[weight];
    const viking_cursor *expected = &engine->paths.expected;
    if (self->training == VIKING_FROZEN)
        return false;
    uint64_t left = engine->paths.paths[expected->path].trace.count - expected->index;
    return self->step_expected || position >= engine->position + left;
}

viking_status viking_engine_forget_trained(viking_engine *engine)
{
    viking_status status = viking_engine_enter(engine);
    if (status != VIKING_OK)
        return status;
    viking_engine_forget_all_trained(engine);
    viking_engine_leave(engine);
    return status;
}

viking_status viking_engine_set_trained(viking_engine *engine, uint32_t weight, viking_training training)
{
    viking_status status = viking_engine_enter_weight(engine, weight);
    if (status != VIKING_OK)
        return status;
    if (engine->weights[weight].training != training) {
        engine->weights[weight].training = training;
        engine->weights[weight].step_expected = training == VIKING_STEPPED_ANYTIME;
        viking_slab_forget(&engine->slab, weight);
        viking_engine_update_may_block(engine);
    }
    viking_engine_leave(engine);
    return status;
}

viking_status viking_engine_expect_step(viking_engine *engine, uint32_t weight)
{
    viking_status status = viking_engine_enter_weight(engine, weight);
    if (status != VIKING_OK)
        return status;
    if (engine->weights[weight].training != VIKING_FROZEN) {
        engine->weights[weight].step_expected = true;
        viking_slab_forget(&engine->slab, weight);
        viking_engine_update_may_block(engine);
    }
    viking_engine_leave(engine);
    return status;
}

/* ---- gradients ---- */

static viking_status refuse_in_child(void)
{
    return viking_status_fail(VIKING_ERROR_STATE, "this process was forked from one that streams weights: their "
                                                  "gradients do not arrive in the child");
}

viking_status viking_engine_download(viking_engine *engine, void *destination, const void *source, uint64_t bytes,
                                     viking_stream stream, uint64_t *out_ticket)
{
    if (viking_os_forked())
        return refuse_in_child();
    viking_status status =
        viking_downloads_queue(&engine->downloads, destination, source, (size_t)bytes, stream, out_ticket);
    if (status == VIKING_OK)
        atomic_fetch_add(&engine->pass_written, bytes);
    return status;
}

viking_status viking_engine_download_await(viking_engine *engine, uint64_t ticket)
{
    return viking_os_forked() ? refuse_in_child() : viking_downloads_await(&engine->downloads, ticket);
}

viking_status viking_engine_download_release(viking_engine *engine, uint64_t ticket, viking_stream stream)
{
    return viking_os_forked() ? refuse_in_child() : viking_downloads_release(&engine->downloads, ticket, stream);
}

static viking_status room_for_a_home(viking_engine *engine)
{
    if (engine->pinned_count < engine->pinned_capacity)
        return VIKING_OK;
    uint32_t capacity = engine->pinned_capacity == 0 ? 64 : 2 * engine->pinned_capacity;
    viking_home **pinned = realloc(engine->pinned, capacity * sizeof *pinned);
    if (pinned == NULL)
        return viking_status_fail(VIKING_ERROR_NO_HOST_MEMORY, "no host memory for %u pinned homes", capacity);
    engine->pinned = pinned;
    engine->pinned_capacity = capacity;
    return VIKING_OK;
}

viking_status viking_engine_pin_home(viking_engine *engine, viking_home *home)
{
    viking_status status = viking_engine_enter(engine);
    if (status != VIKING_OK)
        return status;
    bool before = home->pinned_by != NULL;
    status = room_for_a_home(engine);
    if (status == VIKING_OK)
        status = viking_home_pin(home, engine->backend);
    if (status == VIKING_OK && !before)
        engine->pinned[engine->pinned_count++] = home;
    viking_engine_leave(engine);
    return status;
}

viking_status viking_engine_unpin_home(viking_engine *engine, viking_home *home)
{
    viking_status status = viking_engine_enter(engine);
    if (status != VIKING_OK)
        return status;
    for (uint32_t i = 0; i < engine->pinned_count; i++)
        if (engine->pinned[i] == home)
            engine->pinned[i--] = engine->pinned[--engine->pinned_count];
    status = viking_home_unpin(home);
    viking_engine_leave(engine);
    return status;
}

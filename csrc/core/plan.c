/* The fetch list by history alone.
 *
 * Why that is right: a use of w leaves w's bytes at w's address, and only a fetch of a neighbour (a weight whose span
 * intersects w's) can change them, and in a plan a neighbour is fetched only for a use of it; so w is there at use i
 * if no neighbour was used since w's previous use. Conversely, if a neighbour v was used since, it was there then,
 * and two intersecting spans cannot hold both, so w is not; no state has to be followed. And since nothing depends on
 * more than the previous use of w, the list of the second period is that of every later one.
 *
 * So the trace is walked twice, and the second walk is written down.
 */
#include "plan.h"

#include <stdlib.h>

/* Of each weight, its latest uses so far; ticks and indices run on through the periods, from 1 so that 0 is never. */
typedef struct history {
    uint64_t begin; /* tick of the latest acquire */
    uint64_t end; /* tick of the latest release */
    int64_t released; /* the use of that release, as an index into the period being written down */
} history;

static viking_status plan_use(const viking_map *map, const viking_trace *trace, uint32_t i, uint32_t period,
                              history *past, viking_plan *plan)
{
    const viking_use *use = &trace->uses[i];
    uint64_t base = 1 + (uint64_t)period * trace->ticks;
    uint32_t w = use->weight;
    bool gone = map->stepped != NULL && map->stepped[w] && past[w].begin < base; /* not used in this period yet */
    uint64_t opened = gone ? base : 0;
    int64_t after = gone ? -1 : VIKING_PLAN_NO_GATE;

    for (uint32_t k = map->neighbour_begin[w]; k < map->neighbour_begin[w + 1]; k++) {
        const history *other = &past[map->neighbours[k]];
        if (other->end > base + use->begin) {
            return viking_status_fail(VIKING_ERROR_STATE,
                                      "weights %u and %u are in use at once (use %u) but share bytes in this map", w,
                                      map->neighbours[k], i);
        }
        gone = gone || other->begin > past[w].begin;
        if (other->end > opened) {
            opened = other->end;
            after = other->released;
        }
    }
    if (gone && period == 1) {
        plan->fetches[plan->count++] = (viking_fetch){.weight = w, .need = i, .after = after};
        plan->fetched_bytes += map->bytes[w];
    }
    past[w].begin = base + use->begin;
    if (base + use->end > past[w].end) {
        past[w].end = base + use->end;
        past[w].released = (int64_t)i + ((int64_t)period - 1) * trace->count;
    }
    return VIKING_OK;
}

static viking_status check_trace(const viking_map *map, const viking_trace *trace)
{
    for (uint32_t i = 0; i < trace->count; i++) {
        const viking_use *use = &trace->uses[i];
        if (use->weight >= map->count || use->end <= use->begin || use->end >= trace->ticks ||
            (i > 0 && use->begin <= use[-1].begin)) {
            return viking_status_fail(
                VIKING_ERROR_INVALID,
                "use %u of weight %u, [%u, %u], is open, out of order or of no weight of this map", i, use->weight,
                use->begin, use->end);
        }
        if (use->kind != VIKING_USE_READ) {
            return viking_status_fail(VIKING_ERROR_UNSUPPORTED,
                                      "use %u changes weight %u; a plan holds reads only, no write-backs", i,
                                      use->weight);
        }
    }
    return VIKING_OK;
}

viking_status viking_plan_build(const viking_map *map, const viking_trace *trace, viking_plan **out)
{
    viking_status status = check_trace(map, trace);
    viking_plan *plan = NULL;
    history *past = NULL;

    *out = NULL;
    if (status != VIKING_OK)
        return status;
    plan = calloc(1, sizeof *plan);
    past = calloc((size_t)map->count + 1, sizeof *past);
    if (plan != NULL)
        plan->fetches = malloc(((size_t)trace->count + 1) * sizeof *plan->fetches);
    if (plan == NULL || past == NULL || plan->fetches == NULL) {
        status = viking_status_fail(VIKING_ERROR_NO_HOST_MEMORY, "no memory to plan %u uses", trace->count);
        goto fail;
    }
    for (uint32_t period = 0; period < 2; period++) {
        for (uint32_t i = 0; i < trace->count; i++) {
            status = plan_use(map, trace, i, period, past, plan);
            if (status != VIKING_OK)
                goto fail;
        }
    }
    free(past);
    *out = plan;
    return VIKING_OK;
fail:
    free(past);
    viking_plan_free(plan);
    return status;
}

void viking_plan_free(viking_plan *plan)
{
    if (plan == NULL)
        return;
    free(plan->fetches);
    free(plan);
}

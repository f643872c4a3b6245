/* Choosing a map: which share of the budget residents take, and with it how large the ring is.
 *
 * A larger share needs fewer pinned bytes and serves other paths (sampling) better, but a ring that is too small
 * cannot run ahead of compute. And within one share, a slightly different ring loses more or less at its end, where
 * a weight that does not fit is moved to the front, and at the turn-arounds, where one that is half overwritten is
 * lost. Neither has a formula worth its exceptions, but both can be computed: placing and planning take a tenth of a
 * millisecond. So the search tries a grid of shares, and of each few neighbours in it simulates the two that fetch
 * least; then it does so once more, finer, around the best.
 */
#include "map.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "placement.h"
#include "plan.h"
#include "simulate.h"

#define MAX_SCALES 8u
/* The grid. A longer trace gets a coarser one, so that a plan takes about as long: its weights are smaller parts of the
 * budget, and a share's neighbours differ less. */
#define COARSE 24u /* groups of shares in the first round */
#define FEWEST 8u
#define COARSE_USES 2400u /* up to so many uses */
#define REFINED 4u /* groups in the second round */
#define GROUP 8u /* shares in a group */
#define GROUP_USES 600u
#define KEPT 2u /* of them simulated */
#define TOLERANCE 1.01

typedef struct candidate {
    bool *resident;
    uint64_t resident_bytes;
    uint64_t fetched_bytes;
    uint64_t period_ns[MAX_SCALES];
} candidate;

typedef struct search {
    const viking_map_request *request;
    const viking_trace *trace; /* what is planned for: the request's, or one made up */
    viking_placement placement;
    double scales[MAX_SCALES];
    uint32_t scale_count;
    uint32_t groups, group_size;
    candidate candidates[(COARSE + REFINED) * KEPT];
    uint32_t count;
} search;

/* Where nothing or no time is known, planning goes by a trace that is: see viking_map_request. */
static viking_status make_up_trace(const viking_map_request *request, viking_trace *out)
{
    const viking_trace *given = request->trace;
    viking_status status;
    uint64_t known = 0;

    if (given->count == 0) {
        for (uint64_t i = 0; i < 2 * (uint64_t)request->count; i++) {
            uint32_t w = i < request->count ? (uint32_t)i : (uint32_t)(2 * (uint64_t)request->count - 1 - i), index;
            status = viking_trace_acquire(out, w, VIKING_USE_READ, &index);
            if (status != VIKING_OK)
                return status;
            viking_trace_release(out, index);
        }
    } else {
        status = viking_trace_copy(out, given);
        if (status != VIKING_OK)
            return status;
    }
    for (uint32_t i = 0; i < out->count; i++)
        known += out->uses[i].compute_ns;
    for (uint32_t i = 0; i < out->count && known == 0; i++) {
        uint32_t w = out->uses[i].weight;
        if (w < request->count) { /* placement refuses the others by name */
            out->uses[i].compute_ns =
                (uint64_t)((double)request->bytes[w] / (double)request->link.bytes_per_second * 1e9);
        }
    }
    return VIKING_OK;
}

/* The smallest placement there is: everything in the ring, the ring as small as it may be, or a little larger
 * where that saves making a weight resident. */
static viking_status smallest_map(const viking_placement *placement, viking_map **out)
{
    static const uint32_t ring_scales[] = {4, 5, 6, 8, 12, 16, 24};
    bool *resident = malloc(((size_t)placement->count + 1) * sizeof *resident);
    viking_map *best = NULL, *map = NULL;
    viking_status status = VIKING_OK;

    *out = NULL;
    if (resident == NULL)
        return viking_status_fail(VIKING_ERROR_NO_HOST_MEMORY, "no memory to place %u weights", placement->count);
    for (size_t i = 0; i < sizeof ring_scales / sizeof ring_scales[0]; i++) {
        memset(resident, 0, placement->count * sizeof *resident);
        status = viking_placement_smallest(placement, resident, ring_scales[i], &map);
        if (status != VIKING_OK)
            break;
        if (best == NULL || map->slab_bytes < best->slab_bytes) {
            viking_map_free(best);
            best = map;
        } else {
            viking_map_free(map);
        }
        if (placement->rival_begin[placement->count] == 0)
            break; /* nothing is used at once with anything: the first is the smallest */
    }
    free(resident);
    if (status != VIKING_OK) {
        viking_map_free(best);
        return status;
    }
    *out = best;
    return VIKING_OK;
}

viking_status viking_map_smallest_budget(const viking_trace *trace, const uint64_t *bytes, uint32_t count,
                                         uint64_t *out_bytes)
{
    viking_placement placement;
    viking_map *map = NULL;
    viking_status status = viking_placement_open(trace, bytes, NULL, count, &placement);

    if (status != VIKING_OK)
        return status;
    status = smallest_map(&placement, &map);
    if (status == VIKING_OK)
        *out_bytes = map->slab_bytes;
    viking_map_free(map);
    viking_placement_close(&placement);
    return status;
}

uint64_t viking_map_largest_budget(const uint64_t *bytes, uint32_t count)
{
    uint64_t total = 0;
    for (uint32_t w = 0; w < count; w++)
        total += bytes[w];
    return total;
}

static void forget(candidate *one)
{
    free(one->resident);
    one->resident = NULL;
}

/* The candidate of one share; without residents where it does not fit. */
static viking_status try_share(const search *self, uint64_t share, candidate *out)
{
    viking_map *map = NULL;
    viking_plan *plan = NULL;
    viking_status status;

    memset(out, 0, sizeof *out);
    out->resident = malloc(((size_t)self->placement.count + 1) * sizeof *out->resident);
    if (out->resident == NULL)
        return viking_status_fail(VIKING_ERROR_NO_HOST_MEMORY, "no memory to place %u weights", self->placement.count);
    viking_placement_spread(&self->placement, share, out->resident);
    status = viking_placement_map(&self->placement, out->resident, self->request->budget_bytes, &map);
    if (status == VIKING_OK && map != NULL)
        status = viking_plan_build(map, self->trace, &plan);
    if (plan != NULL) {
        out->resident_bytes = map->resident_bytes;
        out->fetched_bytes = plan->fetched_bytes;
    } else {
        forget(out);
    }
    viking_plan_free(plan);
    viking_map_free(map);
    return status;
}

static viking_status predict(search *self, candidate *of)
{
    viking_map *map = NULL;
    viking_plan *plan = NULL;
    viking_status status = viking_placement_map(&self->placement, of->resident, self->request->budget_bytes, &map);
    if (status == VIKING_OK)
        status = viking_plan_build(map, self->trace, &plan);
    for (uint32_t k = 0; status == VIKING_OK && k < self->scale_count; k++) {
        viking_simulation simulation;
        status = viking_simulate(map, plan, self->trace, &self->request->link, self->scales[k], &simulation);
        if (status == VIKING_OK) {
            of->period_ns[k] = simulation.period_ns;
            viking_simulation_free(&simulation);
        }
    }
    viking_plan_free(plan);
    viking_map_free(map);
    return status;
}

static bool fetches_less(const candidate *a, const candidate *b)
{
    return a->fetched_bytes != b->fetched_bytes ? a->fetched_bytes < b->fetched_bytes
                                                : a->resident_bytes > b->resident_bytes;
}

/* Keep `one` if it is new and among the best KEPT of the group, which is ordered; forget it otherwise. */
static void keep(candidate *group, uint32_t *count, candidate one)
{
    for (uint32_t i = 0; i < *count; i++) {
        if (group[i].fetched_bytes == one.fetched_bytes && group[i].resident_bytes == one.resident_bytes) {
            forget(&one); /* a share so near that it gave the same residents */
            return;
        }
    }
    if (*count == KEPT) {
        candidate *last = &group[KEPT - 1];
        candidate worse = fetches_less(&one, last) ? *last : one;
        *last = fetches_less(&one, last) ? one : *last;
        forget(&worse);
    } else {
        group[(*count)++] = one;
    }
    for (uint32_t i = *count - 1; i > 0 && fetches_less(&group[i], &group[i - 1]); i--) {
        candidate swapped = group[i];
        group[i] = group[i - 1];
        group[i - 1] = swapped;
    }
}

/* Of the shares in [from, to), in `groups` groups, predict those KEPT of each group that fetch least. */
static viking_status try_shares(search *self, uint64_t from, uint64_t to, uint32_t groups)
{
    uint64_t step = (to - from) / groups / self->group_size;
    for (uint32_t g = 0; g < groups; g++) {
        candidate *group = &self->candidates[self->count];
        uint32_t count = 0;
        viking_status status = VIKING_OK;

        for (uint32_t k = 0; k < self->group_size && status == VIKING_OK; k++) {
            candidate one;
            status = try_share(self, from + ((uint64_t)g * self->group_size + k) * step, &one);
            if (one.resident != NULL)
                keep(group, &count, one);
        }
        self->count += count;
        for (uint32_t k = 0; k < count && status == VIKING_OK; k++)
            status = predict(self, &group[k]);
        if (status != VIKING_OK)
            return status;
    }
    return VIKING_OK;
}

/* The largest share of residents that costs at most 1 % of time, at every scale, and of bytes; where no share does, of
 * those that lose least. */
static candidate *choose(search *self)
{
    candidate *chosen = NULL;
    uint64_t least = UINT64_MAX, best[MAX_SCALES];

    for (uint32_t k = 0; k < self->scale_count; k++)
        best[k] = UINT64_MAX;
    for (uint32_t i = 0; i < self->count; i++) {
        const candidate *one = &self->candidates[i];
        least = one->fetched_bytes < least ? one->fetched_bytes : least;
        for (uint32_t k = 0; k < self->scale_count; k++)
            best[k] = one->period_ns[k] < best[k] ? one->period_ns[k] : best[k];
    }
    for (double loss = TOLERANCE - 1.0; chosen == NULL && self->count > 0; loss *= 2.0) {
        for (uint32_t i = 0; i < self->count; i++) {
            candidate *one = &self->candidates[i];
            bool good = (double)one->fetched_bytes <= (double)least * (1.0 + loss) + loss;
            for (uint32_t k = 0; k < self->scale_count; k++)
                good = good && (double)one->period_ns[k] <= (double)best[k] * (1.0 + loss) + loss;
            if (good && (chosen == NULL || one->resident_bytes > chosen->resident_bytes))
                chosen = one;
        }
    }
    return chosen;
}

static uint32_t grid_size(uint32_t most, uint32_t fewest, uint32_t up_to_uses, uint32_t uses)
{
    uint32_t size = uses <= up_to_uses ? most : (uint32_t)((uint64_t)most * up_to_uses / uses);
    return size < fewest ? fewest : size;
}

static viking_status run_search(search *self, candidate **out)
{
    uint64_t budget = self->request->budget_bytes, step;
    viking_status status;

    self->groups = grid_size(COARSE, FEWEST, COARSE_USES, self->trace->count);
    self->group_size = grid_size(GROUP, 1, GROUP_USES, self->trace->count);
    step = budget / self->groups;
    status = try_shares(self, 0, budget, self->groups);

    *out = choose(self);
    if (status == VIKING_OK && *out != NULL) {
        uint64_t centre = (*out)->resident_bytes;
        status = try_shares(self, centre > step ? centre - step : 0, budget - centre > step ? centre + step : budget,
                            REFINED);
        *out = choose(self);
    }
    return status;
}

/* *out is NULL where no candidate fits. */
static viking_status build(search *self, viking_map **out)
{
    uint64_t budget = self->request->budget_bytes;
    candidate *chosen = NULL;
    viking_status status;

    if (budget >= self->placement.total_bytes) {
        candidate *all = &self->candidates[self->count];
        all->resident = malloc(((size_t)self->placement.count + 1) * sizeof *all->resident);
        if (all->resident == NULL) {
            return viking_status_fail(VIKING_ERROR_NO_HOST_MEMORY, "no memory to place %u weights",
                                      self->placement.count);
        }
        self->count++;
        memset(all->resident, true, self->placement.count * sizeof *all->resident);
        chosen = all;
    } else {
        status = run_search(self, &chosen);
        if (status != VIKING_OK)
            return status;
    }
    return chosen == NULL ? VIKING_OK : viking_placement_map(&self->placement, chosen->resident, budget, out);
}

static viking_status check_request(const viking_map_request *request)
{
    if (request->link.bytes_per_second == 0)
        return viking_status_fail(VIKING_ERROR_INVALID, "a link of 0 bytes per second");
    if (request->compute_scales != NULL &&
        (request->compute_scale_count == 0 || request->compute_scale_count > MAX_SCALES)) {
        return viking_status_fail(VIKING_ERROR_INVALID, "%u compute scales are given; 1 to %u are accepted",
                                  request->compute_scale_count, MAX_SCALES);
    }
    return VIKING_OK;
}

viking_status viking_map_build(const viking_map_request *request, viking_map **out)
{
    search self = {.request = request, .scales = {1.0}, .scale_count = 1};
    viking_trace trace;
    viking_map *smallest = NULL;
    viking_status status = check_request(request);

    *out = NULL;
    if (status != VIKING_OK)
        return status;
    if (request->compute_scales != NULL) {
        self.scale_count = request->compute_scale_count;
        memcpy(self.scales, request->compute_scales, self.scale_count * sizeof *self.scales);
    }
    viking_trace_init(&trace);
    self.trace = &trace;
    status = make_up_trace(request, &trace);
    if (status != VIKING_OK)
        goto done;
    status = viking_placement_open(&trace, request->bytes, request->stepped, request->count, &self.placement);
    if (status != VIKING_OK)
        goto done;
    status = smallest_map(&self.placement, &smallest);
    assert(status != VIKING_OK || smallest != NULL); /* a ring without a budget always fits */
    if (status == VIKING_OK && smallest->slab_bytes > request->budget_bytes) {
        status = viking_status_fail(
            VIKING_ERROR_BUDGET, "the weights do not fit in %llu bytes; the smallest budget that works is %llu bytes",
            (unsigned long long)request->budget_bytes, (unsigned long long)smallest->slab_bytes);
    }
    if (status == VIKING_OK)
        status = build(&self, out);
    if (status == VIKING_OK && *out == NULL) {
        *out = smallest; /* nothing else fits */
        smallest = NULL;
    }
done:
    for (uint32_t i = 0; i < self.count; i++)
        free(self.candidates[i].resident);
    viking_map_free(smallest);
    viking_placement_close(&self.placement);
    viking_trace_free(&trace);
    return status;
}

/* A plan is judged by playing it. The slab is cut into cells at every edge of every span, and each cell remembers
 * which weight's bytes it holds and which fetch brought them. Time is the trace's ticks, repeated for a few periods:
 *
 *  - a fetch writes its cells at the earliest moment at which it can start, because that is when it does harm: as
 *    soon as its gate is released and every fetch before it in the list has started;
 *  - its bytes count as arrived at the latest moment that the engine guarantees, because relying on less is luck: at
 *    the use that needs it, or a use that needs a later fetch of the same queue.
 *
 * The first period only warms up: what a steady state would have kept from the period before is filled in as it is
 * used. From then on every use must find its own bytes. Nothing here knows how plans are made, or looks at the
 * map's neighbours; it must stay that way, or it would repeat the planner's mistakes.
 */
#include "check.h"

#include <stdlib.h>
#include <string.h>

#define PERIODS 4u
#define NOBODY UINT32_MAX

typedef struct cell {
    uint32_t owner; /* the weight whose bytes are here, or NOBODY */
    uint64_t arrival; /* the bytes are here for certain once so many fetches have arrived */
} cell;

typedef struct game {
    const viking_map *map;
    const viking_plan *plan;
    const viking_trace *trace;
    cell *cells;
    uint32_t *first_cell, *past_cell; /* [weights] */
    uint32_t *releases; /* [uses] the uses by their end */
    bool *released; /* [periods][uses] */
    uint32_t *held; /* [uses] uses that have begun and not ended */
    uint32_t held_count;
    uint32_t period;
    uint64_t started, arrived; /* fetches, counted through the periods */
} game;

static bool intersect(const viking_map *map, uint32_t a, uint32_t b)
{
    return map->offsets[a] < map->offsets[b] + map->bytes[b] && map->offsets[b] < map->offsets[a] + map->bytes[a];
}

/* ---- rules that need no playing ---- */

static viking_status check_map(const viking_map *map)
{
    for (uint32_t w = 0; w < map->count; w++) {
        uint64_t bytes = map->bytes[w], offset = map->offsets[w];
        if (bytes == 0 || bytes % VIKING_ALIGNMENT != 0 || offset % VIKING_ALIGNMENT != 0) {
            return viking_status_fail(VIKING_ERROR_INVALID, "weight %u, %llu bytes at %llu, is misaligned", w,
                                      (unsigned long long)bytes, (unsigned long long)offset);
        }
        if (bytes > map->slab_bytes || offset > map->slab_bytes - bytes) {
            return viking_status_fail(VIKING_ERROR_INVALID, "weight %u, %llu bytes at %llu, leaves the slab of %llu", w,
                                      (unsigned long long)bytes, (unsigned long long)offset,
                                      (unsigned long long)map->slab_bytes);
        }
    }
    for (uint32_t w = 0; w < map->count; w++) {
        for (uint32_t v = 0; map->resident[w] && v < map->count; v++)
            if (v != w && intersect(map, w, v))
                return viking_status_fail(VIKING_ERROR_INVALID, "weight %u shares bytes with resident %u", v, w);
    }
    return VIKING_OK;
}

static viking_status check_lists(const viking_map *map, const viking_plan *plan, const viking_trace *trace)
{
    uint64_t total = 0;
    for (uint32_t i = 0; i < trace->count; i++) {
        const viking_use *use = &trace->uses[i];
        if (use->weight >= map->count || use->end <= use->begin || use->end >= trace->ticks ||
            (i > 0 && use->begin <= trace->uses[i - 1].begin)) {
            return viking_status_fail(VIKING_ERROR_INVALID, "use %u of weight %u is out of order or of no weight", i,
                                      use->weight);
        }
    }
    for (uint32_t k = 0; k < plan->count; k++) {
        const viking_fetch *fetch = &plan->fetches[k];
        if (fetch->need >= trace->count || fetch->weight != trace->uses[fetch->need].weight) {
            return viking_status_fail(VIKING_ERROR_INVALID, "fetch %u of weight %u is not what use %u needs", k,
                                      fetch->weight, fetch->need);
        }
        if (k > 0 && fetch->need < plan->fetches[k - 1].need) {
            return viking_status_fail(VIKING_ERROR_INVALID,
                                      "fetch %u of weight %u, for use %u, comes after that for %u", k, fetch->weight,
                                      fetch->need, plan->fetches[k - 1].need);
        }
        if (fetch->after != VIKING_PLAN_NO_GATE &&
            (fetch->after < -(int64_t)trace->count || fetch->after >= (int64_t)trace->count)) {
            return viking_status_fail(VIKING_ERROR_INVALID, "fetch %u of weight %u waits for use %lld, of no period", k,
                                      fetch->weight, (long long)fetch->after);
        }
        total += map->bytes[fetch->weight];
    }
    if (total != plan->fetched_bytes) {
        return viking_status_fail(VIKING_ERROR_INVALID, "the fetches are %llu bytes together, the plan says %llu",
                                  (unsigned long long)total, (unsigned long long)plan->fetched_bytes);
    }
    return VIKING_OK;
}

/* ---- the game ---- */

static bool gate_is_open(const game *self, uint64_t fetch_number)
{
    const viking_fetch *fetch = &self->plan->fetches[fetch_number % self->plan->count];
    int64_t period = (int64_t)(fetch_number / self->plan->count);
    int64_t use;

    if (fetch->after == VIKING_PLAN_NO_GATE)
        return true;
    use = period * (int64_t)self->trace->count + fetch->after;
    return use < 0 || self->released[use];
}

/* Start every fetch that can start by now. */
static viking_status start_fetches(game *self)
{
    while (self->plan->count > 0 && self->started < (uint64_t)PERIODS * self->plan->count &&
           gate_is_open(self, self->started)) {
        uint32_t k = (uint32_t)(self->started % self->plan->count), w = self->plan->fetches[k].weight;
        for (uint32_t h = 0; h < self->held_count; h++) {
            uint32_t v = self->trace->uses[self->held[h]].weight;
            if (intersect(self->map, v, w)) {
                return viking_status_fail(VIKING_ERROR_INVALID,
                                          "fetch %u of weight %u may start while use %u still holds weight %u there", k,
                                          w, self->held[h], v);
            }
        }
        self->started++;
        for (uint32_t c = self->first_cell[w]; c < self->past_cell[w]; c++)
            self->cells[c] = (cell){w, self->started};
    }
    return VIKING_OK;
}

static viking_status find_bytes(game *self, uint32_t i)
{
    uint32_t w = self->trace->uses[i].weight;
    for (uint32_t c = self->first_cell[w]; c < self->past_cell[w]; c++) {
        cell *at = &self->cells[c];
        if (at->owner == w && at->arrival <= self->arrived)
            continue;
        if (self->period > 0) {
            return viking_status_fail(VIKING_ERROR_INVALID, "use %u of weight %u finds %s %u at byte %llu on", i, w,
                                      at->owner == w ? "a fetch that nothing has waited for, of weight"
                                                     : "the bytes of another weight,",
                                      at->owner, (unsigned long long)self->map->offsets[w]);
        }
        *at = (cell){w, 0};
    }
    return VIKING_OK;
}

static viking_status acquire(game *self, uint32_t i)
{
    const viking_plan *plan = self->plan;
    uint32_t w = self->trace->uses[i].weight;

    for (uint32_t h = 0; h < self->held_count; h++) {
        uint32_t v = self->trace->uses[self->held[h]].weight;
        if (v != w && intersect(self->map, v, w)) {
            return viking_status_fail(VIKING_ERROR_INVALID,
                                      "use %u of weight %u begins while use %u holds weight %u there", i, w,
                                      self->held[h], v);
        }
    }
    while (plan->count > 0 && self->arrived / plan->count == self->period &&
           plan->fetches[self->arrived % plan->count].need == i) {
        if (self->arrived >= self->started) {
            return viking_status_fail(VIKING_ERROR_INVALID,
                                      "use %u of weight %u waits for a fetch whose gate opens later", i, w);
        }
        self->arrived++;
    }
    self->held[self->held_count++] = i;
    return find_bytes(self, i);
}

static viking_status release(game *self, uint32_t i)
{
    for (uint32_t h = 0; h < self->held_count; h++) {
        if (self->held[h] == i) {
            self->held[h] = self->held[--self->held_count];
            break;
        }
    }
    self->released[(size_t)self->period * self->trace->count + i] = true;
    return start_fetches(self);
}

static viking_status play(game *self)
{
    const viking_use *uses = self->trace->uses;
    uint32_t count = self->trace->count;
    viking_status status = start_fetches(self);

    for (self->period = 0; status == VIKING_OK && self->period < PERIODS; self->period++) {
        uint32_t begun = 0, ended = 0;
        while (status == VIKING_OK && ended < count)
            if (begun < count && uses[begun].begin < uses[self->releases[ended]].end)
                status = acquire(self, begun++);
            else
                status = release(self, self->releases[ended++]);
    }
    return status;
}

/* ---- setting up ---- */

static int compare_numbers(const void *left, const void *right)
{
    uint64_t a = *(const uint64_t *)left, b = *(const uint64_t *)right;
    return a < b ? -1 : a > b;
}

static uint32_t find_edge(const uint64_t *edges, uint32_t count, uint64_t edge)
{
    uint32_t low = 0, high = count;
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        if (edges[middle] <= edge)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static bool cut_cells(game *self)
{
    const viking_map *map = self->map;
    uint32_t total = 2 * map->count, count = 0;
    uint64_t *edges = malloc(((size_t)total + 1) * sizeof *edges);

    self->cells = malloc(((size_t)total + 1) * sizeof *self->cells);
    if (edges == NULL || self->cells == NULL) {
        free(edges);
        return false;
    }
    for (uint32_t w = 0; w < map->count; w++) {
        edges[2 * (size_t)w] = map->offsets[w];
        edges[2 * (size_t)w + 1] = map->offsets[w] + map->bytes[w];
    }
    qsort(edges, total, sizeof *edges, compare_numbers);
    for (uint32_t k = 0; k < total; k++)
        if (k == 0 || edges[k] != edges[k - 1])
            edges[count++] = edges[k];
    for (uint32_t c = 0; c < count; c++)
        self->cells[c] = (cell){NOBODY, 0};
    for (uint32_t w = 0; w < map->count; w++) {
        self->first_cell[w] = find_edge(edges, count, map->offsets[w]);
        self->past_cell[w] = find_edge(edges, count, map->offsets[w] + map->bytes[w]);
        for (uint32_t c = self->first_cell[w]; map->resident[w] && c < self->past_cell[w]; c++)
            self->cells[c] = (cell){w, 0};
    }
    free(edges);
    return true;
}

static bool sort_releases(game *self)
{
    uint32_t count = self->trace->count;
    uint64_t *keys = malloc(((size_t)count + 1) * sizeof *keys);
    if (keys == NULL)
        return false;
    for (uint32_t i = 0; i < count; i++)
        keys[i] = (uint64_t)self->trace->uses[i].end << 32 | i;
    qsort(keys, count, sizeof *keys, compare_numbers);
    for (uint32_t i = 0; i < count; i++)
        self->releases[i] = (uint32_t)keys[i];
    free(keys);
    return true;
}

/* False without memory. */
static bool set_up(game *self)
{
    size_t weights = (size_t)self->map->count + 1, uses = (size_t)self->trace->count + 1;

    self->first_cell = malloc(weights * sizeof *self->first_cell);
    self->past_cell = malloc(weights * sizeof *self->past_cell);
    self->releases = malloc(uses * sizeof *self->releases);
    self->held = malloc(uses * sizeof *self->held);
    self->released = calloc(PERIODS * uses, sizeof *self->released);
    return self->first_cell != NULL && self->past_cell != NULL && self->releases != NULL && self->held != NULL &&
           self->released != NULL && cut_cells(self) && sort_releases(self);
}

viking_status viking_check(const viking_map *map, const viking_plan *plan, const viking_trace *trace)
{
    game self = {.map = map, .plan = plan, .trace = trace};
    viking_status status = check_map(map);

    if (status == VIKING_OK)
        status = check_lists(map, plan, trace);
    if (status != VIKING_OK || map->count == 0)
        return status;
    status = set_up(&self) ? play(&self) : viking_status_fail(VIKING_ERROR_NO_HOST_MEMORY, "no memory to check a plan");
    free(self.cells);
    free(self.first_cell);
    free(self.past_cell);
    free(self.releases);
    free(self.released);
    free(self.held);
    return status;
}

/* Both queues are FIFO and a fetch's gate always lies before the use that needs it, so no event queue is necessary:
 * walking the uses in order, each fetch's start is the later of "the link is free" and "its gate has opened", and
 * both are known by the time its use comes up. One walk costs O(uses + fetches); periods are played until one
 * repeats the last exactly, in length and in how far the link is ahead.
 */
#include "simulate.h"

#include <stdlib.h>
#include <string.h>

/* A system of two queues settles within a few periods; one that alternates for ever is cut off here. */
#define MAX_PERIODS 24u

typedef struct player {
    const viking_map *map;
    const viking_plan *plan;
    const viking_trace *trace;
    const viking_link *link;
    uint32_t *last_before_end; /* [uses] the latest use that has begun when this one is released */
    uint64_t *durations; /* [uses] ns */
    uint64_t *travels; /* [fetches] ns */
    uint64_t *done; /* [2][uses] when the compute of this and the last period's uses ends */
    viking_span_of_time *computes;
    viking_span_of_time *copies; /* [fetches] absolute times of this period's list */
    uint64_t now, link_free;
    uint64_t stall;
} player;

/* When the gate of `fetch` opens: at the end of all compute that begins before its use's release. */
static uint64_t gate_time(const player *self, const viking_fetch *fetch, uint32_t period)
{
    uint32_t count = self->trace->count, lane = period & 1u;
    int64_t after = fetch->after;

    if (after == VIKING_PLAN_NO_GATE || (after < 0 && period == 0))
        return 0;
    if (after < 0) {
        after += count;
        lane ^= 1u;
    }
    return self->done[(size_t)lane * count + self->last_before_end[after]];
}

static void play_period(player *self, uint32_t period)
{
    uint32_t count = self->trace->count, next = 0;
    uint64_t *done = self->done + (size_t)(period & 1u) * count;

    self->stall = 0;
    for (uint32_t i = 0; i < count; i++) {
        for (; next < self->plan->count && self->plan->fetches[next].need == i; next++) {
            const viking_fetch *fetch = &self->plan->fetches[next];
            uint64_t open = gate_time(self, fetch, period);
            uint64_t begin = open > self->link_free ? open : self->link_free;
            self->link_free = begin + self->travels[next];
            self->copies[next] = (viking_span_of_time){begin, self->link_free, fetch->weight, next};
            if (self->link_free > self->now) {
                self->stall += self->link_free - self->now;
                self->now = self->link_free;
            }
        }
        self->computes[i] =
            (viking_span_of_time){self->now, self->now + self->durations[i], self->trace->uses[i].weight, i};
        self->now += self->durations[i];
        done[i] = self->now;
    }
}

static int earlier_first(const void *left, const void *right)
{
    const viking_span_of_time *a = left, *b = right;
    if (a->begin_ns != b->begin_ns)
        return a->begin_ns < b->begin_ns ? -1 : 1;
    return a->end_ns < b->end_ns ? -1 : a->end_ns > b->end_ns;
}

/* Move the copies of one period into the window [0, period): what starts before it belongs, a period later, to the
 * window's end, and what lies across an edge shows at both. */
static void fold_copies(const player *self, uint64_t window, uint64_t period, viking_simulation *out)
{
    for (uint32_t k = 0; k < self->plan->count; k++) {
        viking_span_of_time copy = self->copies[k];
        uint64_t length = copy.end_ns - copy.begin_ns;
        uint64_t begin = copy.begin_ns, rest;
        out->link_ns += length;
        if (period == 0)
            continue;
        begin = begin >= window ? (begin - window) % period : (period - (window - begin) % period) % period;
        rest = length > period ? period : length;
        copy.begin_ns = begin;
        copy.end_ns = begin + rest > period ? period : begin + rest;
        out->copies[out->copy_count++] = copy;
        if (begin + rest > period) {
            copy.begin_ns = 0;
            copy.end_ns = begin + rest - period;
            out->copies[out->copy_count++] = copy;
        }
    }
    if (out->copy_count > 0)
        qsort(out->copies, out->copy_count, sizeof *out->copies, earlier_first);
}

static void find_release_moments(player *self)
{
    /* The uses are sorted by begin, so the ends are looked up in the array of begins. */
    const viking_use *uses = self->trace->uses;
    uint32_t count = self->trace->count;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t low = i, high = count; /* uses[low] has begun by then, uses[high] has not */
        while (high - low > 1) {
            uint32_t middle = low + (high - low) / 2;
            if (uses[middle].begin < uses[i].end)
                low = middle;
            else
                high = middle;
        }
        self->last_before_end[i] = low;
    }
}

static viking_status player_open(player *self, double compute_scale, viking_simulation *out)
{
    size_t uses = (size_t)self->trace->count + 1, fetches = (size_t)self->plan->count + 1;

    self->last_before_end = malloc(uses * sizeof *self->last_before_end);
    self->durations = calloc(uses, sizeof *self->durations);
    self->travels = calloc(fetches, sizeof *self->travels);
    self->done = calloc(2 * uses, sizeof *self->done);
    self->copies = malloc(fetches * sizeof *self->copies);
    out->computes = malloc(uses * sizeof *out->computes);
    out->copies = malloc(2 * fetches * sizeof *out->copies); /* what lies across an edge counts twice */
    self->computes = out->computes;
    if (self->last_before_end == NULL || self->durations == NULL || self->travels == NULL || self->done == NULL ||
        self->copies == NULL || out->computes == NULL || out->copies == NULL)
        return viking_status_fail(VIKING_ERROR_NO_HOST_MEMORY, "no memory to simulate %u uses", self->trace->count);
    for (uint32_t i = 0; i < self->trace->count; i++) {
        self->durations[i] = (uint64_t)((double)self->trace->uses[i].compute_ns * compute_scale + 0.5);
        out->compute_ns += self->durations[i];
    }
    for (uint32_t k = 0; k < self->plan->count; k++) {
        double seconds = (double)self->map->bytes[self->plan->fetches[k].weight] / (double)self->link->bytes_per_second;
        self->travels[k] = self->link->latency_ns + (uint64_t)(seconds * 1e9 + 0.5);
    }
    find_release_moments(self);
    return VIKING_OK;
}

static void player_close(player *self)
{
    free(self->copies);
    free(self->done);
    free(self->travels);
    free(self->durations);
    free(self->last_before_end);
}

static viking_status check_input(const viking_map *map, const viking_plan *plan, const viking_trace *trace,
                                 const viking_link *link, double compute_scale)
{
    if (link->bytes_per_second == 0 || !(compute_scale >= 0.0 && compute_scale <= 1e9)) {
        return viking_status_fail(VIKING_ERROR_INVALID, "a link of %llu bytes/s, compute times scaled by %g",
                                  (unsigned long long)link->bytes_per_second, compute_scale);
    }
    for (uint32_t k = 0; k < plan->count; k++) {
        const viking_fetch *fetch = &plan->fetches[k];
        if (fetch->need >= trace->count || fetch->weight >= map->count ||
            (k > 0 && fetch->need < plan->fetches[k - 1].need) ||
            (fetch->after != VIKING_PLAN_NO_GATE &&
             (fetch->after < -(int64_t)trace->count || fetch->after >= (int64_t)fetch->need))) {
            return viking_status_fail(VIKING_ERROR_INVALID,
                                      "fetch %u is not of this trace, or waits for what follows it", k);
        }
    }
    return VIKING_OK;
}

viking_status viking_simulate(const viking_map *map, const viking_plan *plan, const viking_trace *trace,
                              const viking_link *link, double compute_scale, viking_simulation *out)
{
    player self = {.map = map, .plan = plan, .trace = trace, .link = link};
    uint64_t window = 0, length = 0, lag = 0;
    viking_status status;

    memset(out, 0, sizeof *out);
    status = check_input(map, plan, trace, link, compute_scale);
    if (status != VIKING_OK)
        return status;
    status = player_open(&self, compute_scale, out);
    if (status != VIKING_OK)
        goto fail;
    for (uint32_t period = 0; period < MAX_PERIODS; period++) {
        uint64_t last_length = length, last_lag = lag;
        window = self.now;
        play_period(&self, period);
        length = self.now - window;
        lag = self.now - self.link_free; /* the last fetch is waited for, so the link is never behind */
        if (period > 0 && length == last_length && lag == last_lag)
            break;
    }
    out->period_ns = length;
    out->stall_ns = self.stall;
    for (uint32_t i = 0; i < trace->count; i++) {
        out->computes[i].begin_ns -= window;
        out->computes[i].end_ns -= window;
    }
    fold_copies(&self, window, length, out);
    player_close(&self);
    return VIKING_OK;
fail:
    player_close(&self);
    viking_simulation_free(out);
    return status;
}

void viking_simulation_free(viking_simulation *simulation)
{
    free(simulation->computes);
    free(simulation->copies);
    memset(simulation, 0, sizeof *simulation);
}

uint64_t viking_simulate_floor_ns(const viking_trace *trace, const uint64_t *bytes, uint32_t count, uint64_t budget,
                                  const viking_link *link, const uint32_t *turns, uint32_t turn_count)
{
    uint64_t total = 0, floor_ns = 0;
    double travel = 0.0;

    for (uint32_t w = 0; w < count; w++)
        total += bytes[w];
    if (total > budget)
        travel = (double)(total - budget) / (double)link->bytes_per_second * 1e9;
    for (uint32_t k = 0; k < turn_count; k++) {
        uint32_t end = k + 1 < turn_count ? turns[k + 1] : trace->count;
        uint64_t compute = 0;
        for (uint32_t i = turns[k]; i < end && i < trace->count; i++)
            compute += trace->uses[i].compute_ns;
        floor_ns += (double)compute > travel ? compute : (uint64_t)travel;
    }
    return floor_ns;
}

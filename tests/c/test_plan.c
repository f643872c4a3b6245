/* The fetch list: the closed form by history equals following the state of the slab. */
#include "core/plan.h"

#include <string.h>

#include "random_trace.h"

/* ---- following the state ---- */

/* What is on the device, use by use: a weight that is absent is fetched and throws out what it touches. Gates are those
 * of the weights thrown out, carried on along the queue: a fetch never starts before the one ahead of it. */
typedef struct tracker {
    bool present[RANDOM_WEIGHTS];
    uint64_t released[RANDOM_WEIGHTS]; /* tick of the latest release, counted through the periods from 1 */
    uint64_t queue; /* when the latest fetch could start */
} tracker;

static bool touch(const viking_map *map, uint32_t a, uint32_t b)
{
    return a != b && map->offsets[a] < map->offsets[b] + map->bytes[b] &&
           map->offsets[b] < map->offsets[a] + map->bytes[a];
}

/* One period; fetches found are written to `needs` and `starts`. */
static uint32_t follow(tracker *self, const viking_map *map, const viking_trace *trace, uint32_t period,
                       uint32_t *needs, uint64_t *starts)
{
    uint64_t base = 1 + (uint64_t)period * trace->ticks;
    uint32_t count = 0;
    for (uint32_t i = 0; i < trace->count; i++) {
        uint32_t w = trace->uses[i].weight;
        if (!self->present[w]) {
            for (uint32_t v = 0; v < map->count; v++) {
                if (self->present[v] && touch(map, v, w)) {
                    self->present[v] = false;
                    self->queue = self->released[v] > self->queue ? self->released[v] : self->queue;
                }
            }
            self->present[w] = true;
            needs[count] = i;
            starts[count++] = self->queue;
        }
        if (base + trace->uses[i].end > self->released[w])
            self->released[w] = base + trace->uses[i].end;
    }
    return count;
}

static uint64_t gate_tick(const viking_trace *trace, const viking_fetch *fetch, uint32_t period)
{
    int64_t use = (int64_t)period * trace->count + fetch->after;
    CHECK(fetch->after != VIKING_PLAN_NO_GATE && use >= 0);
    return 1 + (uint64_t)use / trace->count * trace->ticks + trace->uses[use % trace->count].end;
}

static void compare(const viking_map *map, const viking_trace *trace)
{
    static uint32_t needs[256];
    static uint64_t starts[256];
    tracker state;
    viking_plan *plan = NULL;
    uint64_t queue = 0, bytes = 0;

    memset(&state, 0, sizeof state);
    for (uint32_t w = 0; w < map->count; w++)
        state.present[w] = map->resident[w];
    CHECK_OK(viking_plan_build(map, trace, &plan));
    follow(&state, map, trace, 0, needs, starts);
    follow(&state, map, trace, 1, needs, starts);
    for (uint32_t k = 0; k < plan->count; k++) { /* the queue before the period that is compared */
        uint64_t tick = gate_tick(trace, &plan->fetches[k], 1);
        queue = tick > queue ? tick : queue;
    }
    CHECK(queue == state.queue);
    CHECK(follow(&state, map, trace, 2, needs, starts) == plan->count);
    for (uint32_t k = 0; k < plan->count; k++) {
        uint64_t tick = gate_tick(trace, &plan->fetches[k], 2);
        queue = tick > queue ? tick : queue;
        CHECK(plan->fetches[k].need == needs[k]);
        CHECK(plan->fetches[k].weight == trace->uses[needs[k]].weight);
        CHECK(queue == starts[k]);
        bytes += map->bytes[plan->fetches[k].weight];
    }
    CHECK(bytes == plan->fetched_bytes);
    viking_plan_free(plan);
}

static void history_alone_gives_what_following_the_state_gives(void)
{
    uint32_t compared = 0;
    for (uint64_t seed = 1; seed <= 2000; seed++) {
        random_case one;
        viking_map *map = NULL;
        random_case_make(seed, &one);
        viking_map_request request = {.trace = &one.trace,
                                      .bytes = one.bytes,
                                      .count = one.count,
                                      .budget_bytes =
                                          viking_map_largest_budget(one.bytes, one.count) * (30 + seed % 60) / 100,
                                      .link = {.bytes_per_second = 1000000000, .latency_ns = 0}};
        if (viking_map_build(&request, &map) == VIKING_OK) {
            compare(map, &one.trace);
            compared++;
        }
        viking_map_free(map);
        viking_trace_free(&one.trace);
    }
    CHECK(compared > 1000);
}

/* ---- one plan by hand ---- */

/* The drawing in map.h: A to F, a ring of three, forwards and backwards. */
static void the_drawing_is_true(void)
{
    uint64_t bytes[6] = {256, 256, 256, 256, 256, 256}, offsets[6] = {0, 256, 512, 0, 256, 512};
    bool resident[6] = {false};
    uint32_t begin[7] = {0, 1, 2, 3, 4, 5, 6}, neighbours[6] = {3, 4, 5, 0, 1, 2};
    viking_map map = {.count = 6,
                      .slab_bytes = 768,
                      .ring_bytes = 768,
                      .bytes = bytes,
                      .offsets = offsets,
                      .resident = resident,
                      .neighbour_begin = begin,
                      .neighbours = neighbours};
    static const viking_fetch expected[] = {
        {3, 3, 0}, {4, 4, 1},  {5, 5, 2}, /* D, E, F replace A, B, C */
        {2, 9, 6}, {1, 10, 7}, {0, 11, 8} /* C, B, A replace F, E, D, which were used again first */
    };
    viking_trace trace;
    viking_plan *plan = NULL;
    viking_trace_init(&trace);
    sweep_weights(&trace, 6, 1);
    CHECK_OK(viking_plan_build(&map, &trace, &plan));
    CHECK(plan->count == 6 && plan->fetched_bytes == 6 * 256);
    for (uint32_t k = 0; k < 6; k++) {
        CHECK(plan->fetches[k].weight == expected[k].weight && plan->fetches[k].need == expected[k].need &&
              plan->fetches[k].after == expected[k].after);
    }
    viking_plan_free(plan);
    viking_trace_free(&trace);
}

static viking_status plan_two(viking_trace *trace)
{
    uint64_t bytes[2] = {256, 256}, offsets[2] = {0, 0};
    bool resident[2] = {false};
    uint32_t begin[3] = {0, 1, 2}, neighbours[2] = {1, 0};
    viking_map map = {.count = 2,
                      .slab_bytes = 256,
                      .ring_bytes = 256,
                      .bytes = bytes,
                      .offsets = offsets,
                      .resident = resident,
                      .neighbour_begin = begin,
                      .neighbours = neighbours};
    viking_plan *plan = NULL;
    viking_status status = viking_plan_build(&map, trace, &plan);
    CHECK((plan != NULL) == (status == VIKING_OK));
    viking_plan_free(plan);
    viking_trace_free(trace);
    return status;
}

static void the_gate_is_the_latest_release_not_the_latest_acquire(void)
{
    /* 1 and 2 touch 0 but not each other; 1 is held from before 2 is acquired till after 2 is released. */
    uint64_t bytes[3] = {512, 256, 256}, offsets[3] = {0, 0, 256};
    bool resident[3] = {false};
    uint32_t begin[4] = {0, 2, 3, 4}, neighbours[4] = {1, 2, 0, 0}, outer, inner;
    viking_map map = {.count = 3,
                      .slab_bytes = 512,
                      .ring_bytes = 512,
                      .bytes = bytes,
                      .offsets = offsets,
                      .resident = resident,
                      .neighbour_begin = begin,
                      .neighbours = neighbours};
    viking_trace trace;
    viking_plan *plan = NULL;
    viking_trace_init(&trace);
    CHECK_OK(viking_trace_acquire(&trace, 1, VIKING_USE_READ, &outer));
    CHECK_OK(viking_trace_acquire(&trace, 2, VIKING_USE_READ, &inner));
    viking_trace_release(&trace, inner);
    viking_trace_release(&trace, outer);
    use_weight(&trace, 0, 0);
    CHECK_OK(viking_plan_build(&map, &trace, &plan));
    CHECK(plan->count == 3);
    CHECK(plan->fetches[2].weight == 0 && plan->fetches[2].after == (int64_t)outer);
    CHECK(plan->fetches[0].weight == 1 && plan->fetches[0].after == -1);
    viking_plan_free(plan);
    viking_trace_free(&trace);
}

static void a_path_that_holds_what_collides_gets_no_plan(void)
{
    viking_trace trace;
    uint32_t a, b;
    viking_trace_init(&trace);
    CHECK_OK(viking_trace_acquire(&trace, 0, VIKING_USE_READ, &a));
    CHECK_OK(viking_trace_acquire(&trace, 1, VIKING_USE_READ, &b));
    viking_trace_release(&trace, a);
    viking_trace_release(&trace, b);
    CHECK(plan_two(&trace) == VIKING_ERROR_STATE);
}

static void what_cannot_be_planned_is_refused(void)
{
    viking_trace trace;
    uint32_t index;
    viking_trace_init(&trace);
    use_weight(&trace, 2, 0);
    CHECK(plan_two(&trace) == VIKING_ERROR_INVALID); /* no such weight */
    CHECK_OK(viking_trace_acquire(&trace, 0, VIKING_USE_READ, &index));
    CHECK(plan_two(&trace) == VIKING_ERROR_INVALID); /* still open */
    use_weight(&trace, 0, 0);
    trace.uses[0].kind = VIKING_USE_WRITE;
    CHECK(plan_two(&trace) == VIKING_ERROR_UNSUPPORTED);
    CHECK(plan_two(&trace) == VIKING_OK); /* empty */
    use_weight(&trace, 0, 0);
    use_weight(&trace, 1, 0);
    CHECK(plan_two(&trace) == VIKING_OK);
    viking_plan_free(NULL);
}

int main(void)
{
    RUN(the_drawing_is_true);
    RUN(the_gate_is_the_latest_release_not_the_latest_acquire);
    RUN(a_path_that_holds_what_collides_gets_no_plan);
    RUN(what_cannot_be_planned_is_refused);
    RUN(history_alone_gives_what_following_the_state_gives);
    return 0;
}

/* The placement: what fits, what overlaps, what is resident, and which budgets work. */
#include "core/map.h"

#include <string.h>

#include "core/check.h"
#include "core/simulate.h"
#include "random_trace.h"

#define MAX_WEIGHTS 64u

typedef struct model {
    viking_trace trace;
    uint64_t bytes[MAX_WEIGHTS];
    uint32_t count;
    uint64_t total;
} model;

/* A checkpointed step over `count` weights whose sizes repeat 3, 1, 2 units of 64 KiB; each unit travels 65536 ns at
 * 1 GB/s, and computes `compute` of it in all of the step. */
static void model_open(model *self, uint32_t count, double compute)
{
    static const uint64_t units[] = {3, 1, 2};
    memset(self, 0, sizeof *self);
    viking_trace_init(&self->trace);
    self->count = count;
    for (uint32_t w = 0; w < count; w++) {
        self->bytes[w] = units[w % 3] * 65536;
        self->total += self->bytes[w];
    }
    sweep_weights(&self->trace, count, 0);
    for (uint32_t i = 0; i < self->trace.count; i++)
        self->trace.uses[i].compute_ns = (uint64_t)(compute * (double)self->bytes[self->trace.uses[i].weight] / 2);
}

static viking_map_request request_of(const model *self, uint64_t budget)
{
    return (viking_map_request){.trace = &self->trace,
                                .bytes = self->bytes,
                                .count = self->count,
                                .budget_bytes = budget,
                                .link = {.bytes_per_second = 1000000000, .latency_ns = 100}};
}

static viking_map *map_of(const model *self, uint64_t budget)
{
    viking_map_request request = request_of(self, budget);
    viking_map *map = NULL;
    CHECK_OK(viking_map_build(&request, &map));
    CHECK(map->count == self->count && map->slab_bytes <= budget);
    return map;
}

/* A plan of the model's own trace over the map, sound by the checker. */
static viking_plan *plan_of(const model *self, const viking_map *map)
{
    viking_plan *plan = NULL;
    CHECK_OK(viking_plan_build(map, &self->trace, &plan));
    CHECK_OK(viking_check(map, plan, &self->trace));
    return plan;
}

static void all_is_resident_where_all_fits(void)
{
    model m;
    model_open(&m, 12, 1.0);
    CHECK(viking_map_largest_budget(m.bytes, m.count) == m.total);
    viking_map *map = map_of(&m, m.total);
    viking_plan *plan = plan_of(&m, map);
    CHECK(map->ring_bytes == 0 && map->slab_bytes == m.total && map->resident_bytes == m.total && plan->count == 0);
    viking_plan_free(plan);
    viking_map_free(map);
    map = map_of(&m, 100 * m.total); /* no more than it needs */
    CHECK(map->slab_bytes == m.total);
    viking_map_free(map);
    viking_trace_free(&m.trace);
}

static void the_smallest_ring_is_the_two_largest_weights(void)
{
    model m;
    uint64_t smallest = 0;
    model_open(&m, 12, 1.0);
    CHECK_OK(viking_map_smallest_budget(&m.trace, m.bytes, m.count, &smallest));
    CHECK(smallest == 2 * 3 * 65536);
    viking_map *map = map_of(&m, smallest);
    viking_plan *plan = plan_of(&m, map);
    CHECK(map->ring_bytes == smallest && map->resident_bytes == 0);
    viking_plan_free(plan);
    viking_map_free(map);
    viking_map_request request = request_of(&m, smallest - 1);
    CHECK(viking_map_build(&request, &map) == VIKING_ERROR_BUDGET && map == NULL);
    CHECK(strstr(viking_status_detail(), "is 393216 bytes") != NULL);
    request = request_of(&m, 0);
    CHECK(viking_map_build(&request, &map) == VIKING_ERROR_BUDGET);
    viking_trace_free(&m.trace);
}

static void one_weight_needs_only_itself(void)
{
    model m;
    uint64_t smallest = 0;
    model_open(&m, 1, 1.0);
    CHECK_OK(viking_map_smallest_budget(&m.trace, m.bytes, m.count, &smallest));
    CHECK(smallest == m.total);
    viking_map_free(map_of(&m, smallest));
    viking_trace_free(&m.trace);
}

static void no_weights_need_nothing(void)
{
    model m;
    model_open(&m, 0, 1.0);
    viking_map *map = map_of(&m, 0);
    CHECK(map->slab_bytes == 0 && map->count == 0);
    viking_map_free(map);
    viking_trace_free(&m.trace);
}

static void neighbours_are_exactly_those_that_share_bytes(void)
{
    for (uint64_t part = 2; part < 10; part++) {
        model m;
        model_open(&m, 30, 1.0);
        viking_map *map = map_of(&m, m.total * part / 10);
        for (uint32_t w = 0; w < m.count; w++) {
            uint32_t k = map->neighbour_begin[w];
            for (uint32_t v = 0; v < m.count; v++) {
                bool touch = v != w && map->offsets[v] < map->offsets[w] + map->bytes[w] &&
                             map->offsets[w] < map->offsets[v] + map->bytes[v];
                CHECK(!(touch && map->resident[w]));
                if (touch) {
                    CHECK(k < map->neighbour_begin[w + 1] && map->neighbours[k] == v);
                    k++;
                }
            }
            CHECK(k == map->neighbour_begin[w + 1]);
        }
        viking_map_free(map);
        viking_trace_free(&m.trace);
    }
}

static void the_same_request_gives_the_same_map(void)
{
    for (uint64_t seed = 1; seed <= 100; seed++) {
        random_case one;
        viking_map *a = NULL, *b = NULL;
        random_case_make(seed, &one);
        viking_map_request request = {.trace = &one.trace,
                                      .bytes = one.bytes,
                                      .count = one.count,
                                      .budget_bytes = viking_map_largest_budget(one.bytes, one.count) * 3 / 4,
                                      .link = {.bytes_per_second = 1000000000, .latency_ns = 0}};
        CHECK(viking_map_build(&request, &a) == viking_map_build(&request, &b));
        CHECK((a == NULL) == (b == NULL));
        if (a != NULL) {
            CHECK(a->ring_bytes == b->ring_bytes && a->slab_bytes == b->slab_bytes);
            CHECK(memcmp(a->offsets, b->offsets, a->count * sizeof *a->offsets) == 0);
            CHECK(memcmp(a->resident, b->resident, a->count * sizeof *a->resident) == 0);
        }
        viking_map_free(a);
        viking_map_free(b);
        viking_trace_free(&one.trace);
    }
}

/* What a step fetches and takes beside what it must, over budgets and over links slower and faster than compute. */
static void a_step_takes_little_more_than_it_must(void)
{
    static const double computes[] = {0.5, 1.0, 2.0};
    for (size_t c = 0; c < 3; c++) {
        for (uint64_t part = 2; part <= 8; part++) {
            model m;
            uint32_t turns[] = {0, 60};
            viking_link link = {1000000000, 100};
            viking_simulation simulation;
            model_open(&m, 60, computes[c]);
            uint64_t budget = m.total * part / 10;
            viking_map *map = map_of(&m, budget);
            viking_plan *plan = plan_of(&m, map);
            uint64_t must = viking_simulate_floor_ns(&m.trace, m.bytes, m.count, budget, &link, turns, 2);
            CHECK_OK(viking_simulate(map, plan, &m.trace, &link, 1.0, &simulation));
            CHECK((double)plan->fetched_bytes <= 1.03 * 2.0 * (double)(m.total - budget));
            CHECK((double)simulation.period_ns <= 1.08 * (double)must);
            viking_simulation_free(&simulation);
            viking_plan_free(plan);
            viking_map_free(map);
            viking_trace_free(&m.trace);
        }
    }
}

static void residents_are_spread_over_the_order(void)
{
    model m;
    model_open(&m, 60, 4.0); /* compute hides everything, so residents take what they can */
    uint64_t quarters[4] = {0}, sum = 0;
    viking_map *map = map_of(&m, m.total * 7 / 10);
    for (uint32_t w = 0; w < m.count; w++)
        quarters[w / 15] += map->resident[w] ? m.bytes[w] : 0;
    for (int q = 0; q < 4; q++) {
        sum += quarters[q];
        CHECK(quarters[q] * 10 > map->resident_bytes * 2 && quarters[q] * 10 < map->resident_bytes * 3);
    }
    CHECK(sum == map->resident_bytes && sum > m.total / 2);
    viking_map_free(map);
    viking_trace_free(&m.trace);
}

static void a_container_never_lies_on_what_it_holds(void)
{
    /* Four blocks; weight 5b is held while 5b + 1 .. 5b + 4 are used, and comes before them. */
    model m;
    uint64_t smallest = 0;
    memset(&m, 0, sizeof m);
    viking_trace_init(&m.trace);
    m.count = 20;
    for (uint32_t w = 0; w < m.count; w++) {
        m.bytes[w] = w % 5 == 0 ? 512 : 1024 + 256 * (w % 3);
        m.total += m.bytes[w];
    }
    for (uint32_t b = 0; b < 4; b++) {
        uint32_t outer;
        CHECK_OK(viking_trace_acquire(&m.trace, 5 * b, VIKING_USE_READ, &outer));
        for (uint32_t w = 5 * b + 1; w < 5 * b + 5; w++)
            use_weight(&m.trace, w, 100);
        viking_trace_release(&m.trace, outer);
    }
    CHECK_OK(viking_map_smallest_budget(&m.trace, m.bytes, m.count, &smallest));
    CHECK(smallest < m.total / 2);
    for (uint64_t budget = smallest; budget < m.total; budget += 256) {
        viking_map *map = map_of(&m, budget);
        viking_plan_free(plan_of(&m, map));
        viking_map_free(map);
    }
    viking_trace_free(&m.trace);
}

static void what_is_held_all_the_time_becomes_resident(void)
{
    model m;
    uint64_t smallest = 0;
    uint32_t outer;
    model_open(&m, 12, 1.0);
    viking_trace_clear(&m.trace);
    CHECK_OK(viking_trace_acquire(&m.trace, 0, VIKING_USE_READ, &outer));
    for (uint32_t w = 1; w < m.count; w++)
        use_weight(&m.trace, w, 1000);
    viking_trace_release(&m.trace, outer);
    CHECK_OK(viking_map_smallest_budget(&m.trace, m.bytes, m.count, &smallest));
    viking_map *map = map_of(&m, smallest);
    viking_plan *plan = plan_of(&m, map);
    for (uint32_t k = 0; k < plan->count; k++)
        CHECK(plan->fetches[k].weight != 0);
    viking_plan_free(plan);
    viking_map_free(map);
    viking_trace_free(&m.trace);
}

static void two_held_at_once_do_not_fit_where_one_does(void)
{
    model m;
    uint64_t smallest = 0;
    uint32_t a, b, c;
    model_open(&m, 3, 1.0);
    viking_trace_clear(&m.trace);
    CHECK_OK(viking_trace_acquire(&m.trace, 0, VIKING_USE_READ, &a));
    CHECK_OK(viking_trace_acquire(&m.trace, 1, VIKING_USE_READ, &b));
    CHECK_OK(viking_trace_acquire(&m.trace, 2, VIKING_USE_READ, &c));
    viking_trace_release(&m.trace, a);
    viking_trace_release(&m.trace, b);
    viking_trace_release(&m.trace, c);
    CHECK_OK(viking_map_smallest_budget(&m.trace, m.bytes, m.count, &smallest));
    CHECK(smallest == m.total);
    viking_trace_free(&m.trace);
}

static void weights_without_a_use_come_last_in_the_order_of_their_numbers(void)
{
    model m;
    model_open(&m, 30, 1.0);
    uint64_t budget = m.total / 3;
    viking_trace_clear(&m.trace);
    sweep_weights(&m.trace, 20, 1000);
    viking_map *map = map_of(&m, budget);
    viking_plan *plan = plan_of(&m, map);
    for (uint32_t w = 20; w < 30; w++) {
        CHECK(!map->resident[w]);
        if (w > 20)
            CHECK(map->offsets[w] == map->offsets[w - 1] + map->bytes[w - 1] || map->offsets[w] == 0);
    }
    viking_plan_free(plan);
    viking_map_free(map);
    viking_trace_free(&m.trace);
}

static void without_a_trace_the_order_is_that_of_the_numbers(void)
{
    model m;
    model_open(&m, 30, 1.0);
    viking_trace numbers = m.trace;
    viking_trace_init(&m.trace);
    viking_map *map = map_of(&m, m.total / 2);
    viking_plan *plan = NULL;
    CHECK_OK(viking_plan_build(map, &numbers, &plan));
    CHECK_OK(viking_check(map, plan, &numbers));
    CHECK((double)plan->fetched_bytes <= 1.1 * (double)m.total);
    CHECK(map->resident_bytes > 0);
    viking_plan_free(plan);
    viking_map_free(map);
    viking_trace_free(&numbers);
}

static void every_given_scale_of_compute_must_be_content(void)
{
    /* At a tenth of the compute only the link counts, at ten times it hardly does. */
    static const double all[] = {0.1, 1.0, 10.0};
    model m;
    model_open(&m, 60, 1.0);
    viking_map_request request = request_of(&m, m.total / 3);
    request.compute_scales = all;
    request.compute_scale_count = 3;
    viking_map *map = NULL;
    CHECK_OK(viking_map_build(&request, &map));
    viking_plan *plan = plan_of(&m, map);
    for (int k = 0; k < 3; k++) {
        viking_simulation of_all, of_one;
        viking_map *own = NULL;
        request.compute_scales = &all[k];
        request.compute_scale_count = 1;
        CHECK_OK(viking_map_build(&request, &own));
        viking_plan *own_plan = plan_of(&m, own);
        CHECK_OK(viking_simulate(map, plan, &m.trace, &request.link, all[k], &of_all));
        CHECK_OK(viking_simulate(own, own_plan, &m.trace, &request.link, all[k], &of_one));
        CHECK((double)of_all.period_ns <= 1.03 * (double)of_one.period_ns);
        viking_simulation_free(&of_all);
        viking_simulation_free(&of_one);
        viking_plan_free(own_plan);
        viking_map_free(own);
    }
    viking_plan_free(plan);
    viking_map_free(map);
    viking_trace_free(&m.trace);
}

/* Those that the host steps travel once a period wherever they live, and after the uses of the period before. */
static void what_is_stepped_leaves_the_residence_to_the_rest(void)
{
    bool stepped[MAX_WEIGHTS];
    uint64_t stepped_bytes = 0;
    model m;
    model_open(&m, 60, 0.5);
    for (uint32_t w = 0; w < m.count; w++) {
        stepped[w] = w % 3 != 0; /* half of all bytes */
        stepped_bytes += stepped[w] ? m.bytes[w] : 0;
    }
    for (uint64_t quarter = 1; quarter <= 3; quarter++) {
        uint64_t resident_stepped = 0, missing = m.total - m.total * quarter / 4;
        viking_map_request request = request_of(&m, m.total * quarter / 4);
        request.stepped = stepped;
        viking_map *map = NULL;
        CHECK_OK(viking_map_build(&request, &map));
        viking_plan *plan = plan_of(&m, map);
        uint64_t least = (missing > stepped_bytes ? missing : stepped_bytes) + missing;
        CHECK(plan->fetched_bytes >= least && (double)plan->fetched_bytes <= 1.06 * (double)least);
        for (uint32_t w = 0; w < m.count; w++)
            resident_stepped += map->resident[w] && stepped[w] ? m.bytes[w] : 0;
        CHECK(resident_stepped <= m.total / 40 || map->resident_bytes - resident_stepped >= m.total - stepped_bytes);
        for (uint32_t w = 0; w < m.count; w++) {
            uint32_t first = UINT32_MAX;
            for (uint32_t i = 0; i < plan->count; i++)
                if (plan->fetches[i].weight == w && first == UINT32_MAX)
                    first = i;
            CHECK(!stepped[w] ||
                  (first != UINT32_MAX && plan->fetches[first].need == w && plan->fetches[first].after >= -1));
        }
        viking_plan_free(plan);
        viking_map_free(map);
    }
    viking_trace_free(&m.trace);
}

static void refuses(model *m, const char *sentence)
{
    viking_map *map = NULL;
    uint64_t smallest;
    viking_map_request request = request_of(m, m->total);
    CHECK(viking_map_build(&request, &map) == VIKING_ERROR_INVALID && map == NULL);
    CHECK(strstr(viking_status_detail(), sentence) != NULL);
    CHECK(viking_map_smallest_budget(&m->trace, m->bytes, m->count, &smallest) == VIKING_ERROR_INVALID);
    viking_trace_free(&m->trace);
    model_open(m, 4, 1.0);
}

static void what_makes_no_sense_is_refused(void)
{
    model m;
    viking_map *map = NULL;
    static const double none[] = {1.0};
    model_open(&m, 4, 1.0);
    m.bytes[2] = 0;
    refuses(&m, "weight 2 has 0 bytes");
    m.bytes[3] = 300;
    refuses(&m, "weight 3 has 300 bytes");
    m.bytes[1] = (uint64_t)INT64_MAX - 255;
    refuses(&m, "more than 2^63 bytes");
    m.trace.uses[5].weight = 4;
    refuses(&m, "use 5 is of weight 4, but there are 4");
    m.trace.uses[5].end = UINT32_MAX;
    refuses(&m, "use 5 of weight 2");
    m.trace.uses[5].begin = 0;
    refuses(&m, "use 5 of weight 2");
    viking_map_request request = request_of(&m, m.total);
    request.link.bytes_per_second = 0;
    CHECK(viking_map_build(&request, &map) == VIKING_ERROR_INVALID);
    request = request_of(&m, m.total);
    request.compute_scales = none;
    CHECK(viking_map_build(&request, &map) == VIKING_ERROR_INVALID);
    viking_map_free(NULL);
    viking_trace_free(&m.trace);
}

int main(void)
{
    RUN(all_is_resident_where_all_fits);
    RUN(the_smallest_ring_is_the_two_largest_weights);
    RUN(one_weight_needs_only_itself);
    RUN(no_weights_need_nothing);
    RUN(neighbours_are_exactly_those_that_share_bytes);
    RUN(the_same_request_gives_the_same_map);
    RUN(a_step_takes_little_more_than_it_must);
    RUN(residents_are_spread_over_the_order);
    RUN(a_container_never_lies_on_what_it_holds);
    RUN(what_is_held_all_the_time_becomes_resident);
    RUN(two_held_at_once_do_not_fit_where_one_does);
    RUN(what_is_stepped_leaves_the_residence_to_the_rest);
    RUN(weights_without_a_use_come_last_in_the_order_of_their_numbers);
    RUN(without_a_trace_the_order_is_that_of_the_numbers);
    RUN(every_given_scale_of_compute_must_be_content);
    RUN(what_makes_no_sense_is_refused);
    return 0;
}

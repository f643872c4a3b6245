/* Map, plan, checker and simulator over random traces: whatever fits is right, and what does not fit says what does.
 *
 * VIKING_RANDOM_TRACES sets how many (10000; fewer under sanitizers that slow everything down).
 */
#include <string.h>

#include "core/check.h"
#include "core/simulate.h"
#include "random_trace.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define DEFAULT_TRACES 1500u
#else
#define DEFAULT_TRACES 10000u
#endif

static uint32_t built, refused, planned_fetches;

static viking_map_request request_for(const random_case *one, uint64_t budget)
{
    return (viking_map_request){.trace = &one->trace,
                                .bytes = one->bytes,
                                .count = one->count,
                                .budget_bytes = budget,
                                .link = {.bytes_per_second = 1000000000, .latency_ns = 100}};
}

static void judge(const random_case *one, const viking_map *map, uint64_t budget)
{
    viking_plan *plan = NULL;
    viking_simulation simulation;
    viking_link link = {1000000000, 100};

    CHECK(map->slab_bytes <= budget);
    CHECK(map->slab_bytes == map->ring_bytes + map->resident_bytes);
    CHECK_OK(viking_plan_build(map, &one->trace, &plan));
    CHECK_OK(viking_check(map, plan, &one->trace));
    CHECK_OK(viking_simulate(map, plan, &one->trace, &link, 1.0, &simulation));
    CHECK(simulation.period_ns >= simulation.compute_ns);
    CHECK(simulation.period_ns == simulation.compute_ns + simulation.stall_ns);
    planned_fetches += plan->count;
    viking_simulation_free(&simulation);
    viking_plan_free(plan);
}

static void try_case(uint64_t seed)
{
    random_case one;
    uint64_t state = seed + 12345, smallest = 0, largest, budget;
    viking_map *map = NULL;
    viking_map_request request;
    viking_status status;

    random_case_make(seed, &one);
    largest = viking_map_largest_budget(one.bytes, one.count);
    random_below(&state, 2);
    budget = largest * random_below(&state, 1100) / 1000;
    request = request_for(&one, budget);
    CHECK_OK(viking_map_smallest_budget(&one.trace, one.bytes, one.count, &smallest));
    status = viking_map_build(&request, &map);
    if (status == VIKING_OK) {
        built++;
        CHECK(budget >= smallest);
        judge(&one, map, budget);
    } else {
        char named[64];
        refused++;
        CHECK(status == VIKING_ERROR_BUDGET && map == NULL);
        CHECK(budget < smallest && smallest <= largest);
        snprintf(named, sizeof named, "is %llu bytes", (unsigned long long)smallest);
        CHECK(strstr(viking_status_detail(), named) != NULL);
        request = request_for(&one, smallest);
        CHECK_OK(viking_map_build(&request, &map));
        judge(&one, map, smallest);
    }
    viking_map_free(map);
    viking_trace_free(&one.trace);
}

static void whatever_fits_is_right_and_what_does_not_says_what_does(void)
{
    const char *text = getenv("VIKING_RANDOM_TRACES");
    uint32_t number = text != NULL ? (uint32_t)strtoul(text, NULL, 10) : DEFAULT_TRACES;

    for (uint32_t seed = 1; seed <= number; seed++)
        try_case(seed);
    printf("   %u traces: %u fit, %u were told the smallest budget, %u fetches planned\n", number, built, refused,
           planned_fetches);
    /* Both outcomes must have been common, or the sentence above means nothing. */
    CHECK(number < 1000 || (built > number / 4 && refused > number / 50 && planned_fetches > number));
}

int main(void)
{
    RUN(whatever_fits_is_right_and_what_does_not_says_what_does);
    return 0;
}

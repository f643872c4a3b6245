/* What a plan will cost: one compute queue, one FIFO copy queue, played until the period is steady. */
#ifndef VIKING_CORE_SIMULATE_H
#define VIKING_CORE_SIMULATE_H

#include "plan.h"

typedef struct viking_span_of_time {
    uint64_t begin_ns; /* from the start of the period */
    uint64_t end_ns;
    uint32_t weight;
    uint32_t index; /* of the use, or of the fetch in the plan */
} viking_span_of_time;

typedef struct viking_simulation {
    uint64_t period_ns; /* steady state */
    uint64_t compute_ns; /* sum of the uses' compute times */
    uint64_t stall_ns; /* compute waited for a copy */
    uint64_t link_ns; /* the link was busy */
    viking_span_of_time *computes; /* [trace->count] of the last period */
    /* [copy_count] what travels within one period, by begin; a copy that goes on into the next period shows as two. */
    viking_span_of_time *copies;
    uint32_t copy_count;
} viking_simulation;

/* compute_scale, 0 to 1e9, multiplies the uses' compute times. INVALID for a fetch that waits for what follows it. */
viking_status viking_simulate(const viking_map *map, const viking_plan *plan, const viking_trace *trace,
                              const viking_link *link, double compute_scale, viking_simulation *out);
void viking_simulation_free(viking_simulation *simulation);

/* The floors, for a trace of sweeps: `turns` are the indices at which a new sweep starts, the first is 0. Each sweep
 * that follows another touches every byte N and starts with at most `budget` of them on the device:
 * sum over sweeps of max(compute, (N - budget) / bandwidth), and 2 (N - budget) bytes for two sweeps. */
uint64_t viking_simulate_floor_ns(const viking_trace *trace, const uint64_t *bytes, uint32_t count, uint64_t budget,
                                  const viking_link *link, const uint32_t *turns, uint32_t turn_count);

#endif

/* Traces that no model would make: several threads, nested and crossing uses, repeats, any sizes, weights without a
 * use. What the planner survives here it survives anywhere. */
#ifndef VIKING_TESTS_RANDOM_TRACE_H
#define VIKING_TESTS_RANDOM_TRACE_H

#include <stdint.h>

#include "check.h"
#include "core/map.h"

#define RANDOM_WEIGHTS 24u
#define RANDOM_THREADS 3u
#define RANDOM_HELD 4u

typedef struct random_case {
    viking_trace trace;
    uint32_t count;
    uint64_t bytes[RANDOM_WEIGHTS];
} random_case;

static inline uint32_t random_below(uint64_t *state, uint32_t limit)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return (uint32_t)((*state * UINT64_C(0x2545F4914F6CDD1D)) >> 33) % limit;
}

/* The next weight of a thread: mostly its neighbour in the direction it walks, sometimes any. */
static inline uint32_t random_weight(uint64_t *state, uint32_t count, uint32_t *at, int *direction)
{
    if (random_below(state, 12) == 0)
        *direction = -*direction;
    if (random_below(state, 8) == 0)
        *at = random_below(state, count);
    else if (random_below(state, 6) != 0)
        *at = (uint32_t)((int)*at + *direction + (int)count) % count;
    return *at;
}

static inline void random_case_make(uint64_t seed, random_case *out)
{
    uint64_t state = seed * UINT64_C(0x9E3779B97F4A7C15) + 1;
    uint32_t threads, nesting, used, uses, largest;
    uint32_t held[RANDOM_THREADS][RANDOM_HELD], depth[RANDOM_THREADS] = {0}, at[RANDOM_THREADS];
    int direction[RANDOM_THREADS];

    random_below(&state, 2);
    viking_trace_init(&out->trace);
    out->count = 1 + random_below(&state, RANDOM_WEIGHTS);
    used = random_below(&state, 4) == 0 ? 1 + random_below(&state, out->count) : out->count;
    threads = random_below(&state, 2) == 0 ? 1 : 1 + random_below(&state, RANDOM_THREADS);
    nesting = 1 + random_below(&state, RANDOM_HELD);
    largest = random_below(&state, 3) == 0 ? 1000 : 1 + random_below(&state, 8);
    uses = random_below(&state, 120);
    for (uint32_t w = 0; w < out->count; w++)
        out->bytes[w] = VIKING_ALIGNMENT * (uint64_t)(1 + random_below(&state, largest));
    for (uint32_t t = 0; t < threads; t++) {
        at[t] = random_below(&state, used);
        direction[t] = 1;
    }
    while (out->trace.count < uses) {
        uint32_t t = random_below(&state, threads), index;
        if (depth[t] > 0 && (depth[t] == nesting || random_below(&state, 2) == 0)) {
            uint32_t which = random_below(&state, 5) == 0 ? random_below(&state, depth[t]) : depth[t] - 1;
            viking_trace_release(&out->trace, held[t][which]);
            held[t][which] = held[t][--depth[t]];
            continue;
        }
        CHECK_OK(viking_trace_acquire(&out->trace, random_weight(&state, used, &at[t], &direction[t]), VIKING_USE_READ,
                                      &index));
        out->trace.uses[index].compute_ns = random_below(&state, 4) == 0 ? 0 : random_below(&state, 3000);
        held[t][depth[t]++] = index;
    }
    for (uint32_t t = 0; t < threads; t++)
        while (depth[t] > 0)
            viking_trace_release(&out->trace, held[t][--depth[t]]);
}

/* A use that begins and ends at once, as a linear's. */
static inline void use_weight(viking_trace *trace, uint32_t weight, uint64_t compute_ns)
{
    uint32_t index;
    CHECK_OK(viking_trace_acquire(trace, weight, VIKING_USE_READ, &index));
    trace->uses[index].compute_ns = compute_ns;
    viking_trace_release(trace, index);
}

/* Forwards over all weights and back, the step of a checkpointed model in miniature. */
static inline void sweep_weights(viking_trace *trace, uint32_t count, uint64_t compute_ns)
{
    for (uint32_t w = 0; w < count; w++)
        use_weight(trace, w, compute_ns);
    for (uint32_t w = count; w-- > 0;)
        use_weight(trace, w, 3 * compute_ns);
}

#endif

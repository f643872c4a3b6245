/* What travels when: the fetch list of one path over a map. A pure function of its inputs.
 *
 * With fixed addresses (map.h) the contents of the slab at any moment follow from the order of uses alone: a weight
 * is there unless a weight that overlaps it was used since. Hence the fetch list:
 *
 *     use i of weight w needs a fetch  iff  some overlapping weight was used after w's previous use
 *     the fetch may start              when the latest such use has been released
 *
 * A weight that is stepped between the periods needs one for its first use in each, after all uses of the one before.
 *
 * Fetches are queued in order of need on one FIFO stream, as soon as their gate opens and without a limit on how
 * far ahead. Waiting for the uses of the weights that overlap is enough: what they had overwritten in their turn was
 * gated by an earlier fetch of the same queue.
 */
#ifndef VIKING_CORE_PLAN_H
#define VIKING_CORE_PLAN_H

#include "map.h"

/* A fetch of the steady state: the trace repeats, and a negative `after` lies in the period before. */
#define VIKING_PLAN_NO_GATE INT64_MIN
typedef struct viking_fetch {
    uint32_t weight;
    uint32_t need; /* index of the use that needs it */
    int64_t after; /* index of the use whose release opens the gate, >= -count; VIKING_PLAN_NO_GATE: none */
} viking_fetch;

typedef struct viking_plan {
    viking_fetch *fetches; /* by need */
    uint32_t count;
    uint64_t fetched_bytes; /* per period */
} viking_plan;

/* The fetch list of one path over a map. STATE where the path holds two weights at once that share bytes in this map:
 * the map was built for another path, and this one needs a map of its own or goes without a plan. UNSUPPORTED for
 * uses that write. */
viking_status viking_plan_build(const viking_map *map, const viking_trace *trace, viking_plan **out);
void viking_plan_free(viking_plan *plan); /* NULL is allowed */

#endif

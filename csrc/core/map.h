/* Where each weight lives on the device. Pure functions of their inputs.
 *
 * The placement is a zigzag ring. Some weights are resident: they have their bytes for ever. Every other weight
 * has one fixed address, its running byte offset in forward order modulo the size of the ring. A training step
 * walks the order forwards and then backwards, so one set of addresses serves both sweeps, and what is still there
 * at the turn-around is simply used again:
 *
 *     forward    A B C D E F          ring of 3:  A D   B E   C F    (weights that share an address)
 *     backward             F E D C B A            F, E and D are still there; C waits for F's release
 *
 * A weight never straddles the end of the ring, so a little is lost there; what is lost depends on the ring's size,
 * and the search over shares of residents picks sizes that lose almost nothing.
 */
#ifndef VIKING_CORE_MAP_H
#define VIKING_CORE_MAP_H

#include "trace.h"

/* Every tensor of a weight, every weight in the slab, and the slab itself start at a multiple of this. */
#define VIKING_ALIGNMENT 256u
#define VIKING_NOWHERE UINT64_MAX

/* The addresses: one map for all the paths that a model takes through its weights. */
typedef struct viking_map {
    uint32_t count; /* weights */
    uint64_t slab_bytes; /* <= the budget */
    uint64_t ring_bytes; /* the ring is [0, ring_bytes), the residents are behind it */
    uint64_t resident_bytes; /* sum over residents */
    uint64_t *bytes; /* [count] size of each weight, a multiple of VIKING_ALIGNMENT */
    uint64_t *offsets; /* [count] */
    bool *resident; /* [count] */
    bool *stepped; /* [count] as requested; NULL: none */
    /* Weights whose spans intersect weight w's, w itself excluded:
     * neighbours[neighbour_begin[w]] .. neighbours[neighbour_begin[w + 1] - 1]. */
    uint32_t *neighbour_begin; /* [count + 1] */
    uint32_t *neighbours;
} viking_map;

typedef struct viking_link {
    uint64_t bytes_per_second; /* host to device, > 0 */
    uint64_t latency_ns; /* per copy */
} viking_link;

typedef struct viking_map_request {
    /* One period of the most important path, every use closed; may not name every weight. An empty trace is read as
     * one sweep over all weights in the order of their numbers and one back. */
    const viking_trace *trace;
    const uint64_t *bytes; /* [count], each > 0 and a multiple of VIKING_ALIGNMENT */
    /* [count] Weights that the host changes between passes, so that each pass fetches them once, residents too; NULL:
     * none. */
    const bool *stepped;
    uint32_t count;
    uint64_t budget_bytes;
    viking_link link;
    /* The share of residents is the largest within 1 % of the best predicted time, and must be so with the trace's
     * compute times multiplied by each of these (NULL: 1.0 alone). Where all of the trace's times are unknown, each
     * use is taken to compute for as long as its weight travels. */
    const double *compute_scales;
    uint32_t compute_scale_count;
} viking_map_request;

/* BUDGET, naming the smallest budget that works, where no placement fits. Weights that must be on the device at the
 * same moment never overlap. The ring holds at least its two largest weights, so that one use in progress cannot
 * block a fetch on demand. Weights that the trace does not name are placed behind those that it does, in the order
 * of their numbers. Deterministic. */
viking_status viking_map_build(const viking_map_request *request, viking_map **out);
void viking_map_free(viking_map *map); /* NULL is allowed */

/* The smallest budget for which viking_map_build succeeds on this trace. */
viking_status viking_map_smallest_budget(const viking_trace *trace, const uint64_t *bytes, uint32_t count,
                                         uint64_t *out_bytes);

/* Everything resident, nothing fetched: the budget that needs no streaming. */
uint64_t viking_map_largest_budget(const uint64_t *bytes, uint32_t count);

#endif

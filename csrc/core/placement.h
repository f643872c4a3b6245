/* The ring placement for a given set of residents: the step that map.c's search repeats. */
#ifndef VIKING_CORE_PLACEMENT_H
#define VIKING_CORE_PLACEMENT_H

#include "map.h"

/* What placing needs to know of a trace, worked out once. */
typedef struct viking_placement {
    uint32_t count;
    uint32_t named; /* how many of `order` the trace names */
    const uint64_t *bytes; /* [count] the caller's */
    const bool *stepped; /* [count] the caller's, or NULL; see viking_map_request */
    uint64_t total_bytes;
    uint32_t *order; /* [count] weights by first use, then those without a use by number */
    uint32_t *by_size; /* [named] the named ones, largest first, ties by first use */
    uint64_t *lifetime; /* [count] ticks in use */
    /* rivals[rival_begin[w]] .. rivals[rival_begin[w + 1] - 1]: weights in use at a moment at which w is. */
    uint32_t *rival_begin; /* [count + 1] */
    uint32_t *rivals;
} viking_placement;

/* INVALID for a use of a weight beyond `count`, an open use, or a size that is 0 or not aligned. */
viking_status viking_placement_open(const viking_trace *trace, const uint64_t *bytes, const bool *stepped,
                                    uint32_t count, viking_placement *out);
void viking_placement_close(viking_placement *placement);

/* Choose residents of together at most `share_bytes`, spread evenly by bytes over the forward order: of the weights that
 * are not stepped, and of the others if there is room for more. */
void viking_placement_spread(const viking_placement *placement, uint64_t share_bytes, bool *resident);

/* Place everything in at most `budget_bytes`. `resident` says which weights are; those that fit nowhere in the ring
 * beside what they are used with are added to it. *out is NULL where it does not fit. */
viking_status viking_placement_map(const viking_placement *placement, bool *resident, uint64_t budget_bytes,
                                   viking_map **out);

/* The same with the smallest ring of `ring_scale` quarters of the two largest weights, for the smallest budget. */
viking_status viking_placement_smallest(const viking_placement *placement, bool *resident, uint32_t ring_scale,
                                        viking_map **out);

#endif

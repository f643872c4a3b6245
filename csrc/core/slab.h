/* What is in the slab, as of the last queued copy, and which of it is in use.
 *
 * Bookkeeping only: no copies, no fences. Two weights whose spans intersect are never both present. A use whose own
 * span is blocked by another use in progress is *displaced*: it gets any free part of the ring for as long as it
 * lasts, so that nothing ever waits for an address.
 */
#ifndef VIKING_CORE_SLAB_H
#define VIKING_CORE_SLAB_H

#include "plan.h"

/* A use in progress. */
typedef struct viking_lease {
    uint64_t ticket; /* names it; never 0 */
    uint64_t pass; /* in which it began */
    uint64_t offset; /* of its bytes in the slab */
    uint64_t bytes;
    uintptr_t thread;
    uint32_t weight;
    uint32_t use; /* index in the pass */
    bool displaced;
    bool waiting; /* its thread waits for the others to end a use */
    bool stale; /* holds the bytes of before an edit */
} viking_lease;

typedef struct viking_slab {
    unsigned char *base; /* NULL: no slab */
    viking_map *map; /* owned; NULL: no layout yet */
    bool *present; /* [map->count] the weight is at its own address */
    viking_lease *leases;
    uint32_t lease_count;
    uint32_t lease_capacity;
    uint64_t last_ticket;
    uint64_t ended; /* uses, so far */
} viking_slab;

void viking_slab_init(viking_slab *slab);
void viking_slab_free(viking_slab *slab);

/* Take over a map. What is present at an unchanged address stays so if `keep`. */
viking_status viking_slab_adopt(viking_slab *slab, viking_map *map, bool keep);

/* A use in progress stands in the way of a copy to the weight's own span: another weight's, or one of its own that
 * still reads the bytes of before an edit. */
bool viking_slab_blocked(const viking_slab *slab, uint32_t weight);

/* The weight's host bytes have changed: what the slab holds of it serves no further use. */
void viking_slab_forget(viking_slab *slab, uint32_t weight);

/* A use of the weight, as it is now, is in progress at another address than its own: its lease, else NULL. */
viking_lease *viking_slab_displaced(viking_slab *slab, uint32_t weight);

/* A range of the ring that no use in progress touches. BUSY if uses of other threads stand in the way of it, BUDGET
 * if only this thread's do. */
viking_status viking_slab_gap(const viking_slab *slab, uint64_t bytes, uintptr_t thread, uint64_t *out_offset);

/* The thread has to wait for a use of another thread; what it holds meanwhile is no use that could end. OK: there is
 * nothing to wait for, BUSY: wait. BUDGET: all others wait as well, for one another. */
viking_status viking_slab_wait(viking_slab *slab, uintptr_t thread);

/* A use has ended: nobody waits any more. */
void viking_slab_wake(viking_slab *slab);

bool viking_slab_intersects(const viking_slab *slab, uint32_t weight, uint64_t offset, uint64_t bytes);

/* Reserve room so that the next viking_slab_acquire cannot fail. */
viking_status viking_slab_reserve(viking_slab *slab);
viking_lease *viking_slab_acquire(viking_slab *slab, uint32_t weight, uint64_t offset, uintptr_t thread);

/* STATE if no such use is in progress. */
viking_status viking_slab_release(viking_slab *slab, uint64_t ticket, viking_lease *out);

#endif

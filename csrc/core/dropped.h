/* The fences by number, and the mutation test: a build with -DVIKING_DROP_FENCE=n leaves fence n out, and a test must
 * notice. */
#ifndef VIKING_CORE_DROPPED_H
#define VIKING_CORE_DROPPED_H

enum {
    VIKING_FENCE_READY = 1,
    VIKING_FENCE_FREE = 2,
    VIKING_FENCE_LATE = 3,
    VIKING_FENCE_ALLOCATION = 4,
    VIKING_FENCE_COMPUTED = 5,
    VIKING_FENCE_REUSE = 6,
    VIKING_FENCE_ARRIVED = 7,
    VIKING_FENCE_SLOT_FREE = 8,
    VIKING_FENCE_SLOT_FILLED = 9
};

#ifdef VIKING_DROP_FENCE
#define viking_dropped(fence) ((fence) == VIKING_DROP_FENCE)
#else
#define viking_dropped(fence) 0
#endif

#endif

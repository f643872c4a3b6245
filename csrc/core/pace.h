/* A link that is slower than this machine's: what a step would take with another card, for measurements.
 *
 * Two calls on the copy stream stand around each copy. The first notes when the copy begins, the second waits until the
 * slower link would be done with it; the event that says *ready* is recorded behind it:
 *
 *     copy stream   [begins] copy ....wait | [begins] copy ....wait | ...
 *     slower link   |=====================||=====================||
 *
 * What such a call adds is given back by the next one, so that many small copies take as long as a large one. The calls
 * of all streams run on one thread of the CUDA runtime: copies that are staged wait for one another here, too, so this is
 * for homes that are pinned. Copies to the host are not paced.
 *
 * Not thread safe: the engine's lock covers it.
 */
#ifndef VIKING_CORE_PACE_H
#define VIKING_CORE_PACE_H

#include "../backend/backend.h"

typedef struct viking_pace {
    uint64_t bytes_per_second; /* 0: as fast as the link is */
    /* The copy stream's own, by viking_os_clock_ns. */
    uint64_t begin_ns; /* of the latest copy */
    uint64_t free_ns; /* when the slower link is done with what has begun so far */
} viking_pace;

/* From the next copy on. UNSUPPORTED where the runtime cannot call back. */
viking_status viking_pace_set(viking_pace *pace, viking_backend *backend, viking_stream copies,
                              uint64_t bytes_per_second);

/* Before and after a copy of `bytes` is queued. The pace stays where it is until the stream is drained. */
viking_status viking_pace_begin(viking_pace *pace, viking_backend *backend, viking_stream copies);
viking_status viking_pace_end(viking_pace *pace, viking_backend *backend, viking_stream copies, size_t bytes);

/* When a copy that began at `begin_ns` and takes `duration_ns` is done, on a link that is free from `free_ns` on. */
uint64_t viking_pace_done(uint64_t free_ns, uint64_t begin_ns, uint64_t duration_ns);

#endif

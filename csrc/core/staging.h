/* Copies from memory that the device does not read at full speed, through a small pinned window of the engine's own.
 *
 * A second FIFO stream, the *staging stream*, brings a weight's bytes into the window, one slot at a time; the copy
 * stream takes them from there. Two fences, both events, let a slot be used again and again:
 *
 *     filled   the copy stream waits for the host's copy into the slot;
 *     free     the next host copy into the slot waits for the device's copy out of it.
 *
 * So nobody waits on the host, and all copies stay in the order of the copy stream.
 *
 * Not thread safe: the engine's lock covers it.
 */
#ifndef VIKING_CORE_STAGING_H
#define VIKING_CORE_STAGING_H

#include "home.h"

#define VIKING_STAGING_SLOTS 8u

typedef struct viking_slot {
    viking_event *filled; /* recorded on the staging stream */
    viking_event *free; /* recorded on the copy stream */
} viking_slot;

typedef struct viking_staging {
    viking_backend *backend;
    _Atomic(viking_stream) stream; /* opened with the first window; a drain reads it without the lock */
    viking_home *window; /* pinned; NULL: none, and the staging stream has no work */
    viking_slot slots[VIKING_STAGING_SLOTS];
    uint32_t slot_count;
    uint32_t next; /* the slot that was used longest ago */
    size_t slot_bytes;
} viking_staging;

void viking_staging_open(viking_staging *staging, viking_backend *backend);
void viking_staging_close(viking_staging *staging); /* its copies must be done */

/* Pin a window of about `bytes` (at least 256). The error of the backend where it refuses: nothing has changed then. */
viking_status viking_staging_open_window(viking_staging *staging, size_t bytes);
/* No copy may be in flight. Without a window it does nothing. */
viking_status viking_staging_close_window(viking_staging *staging);

/* Queue the copy of a weight's first `bytes` on `copies`. Its home stays as it is until the drain below, and until that
 * stream is drained. After a failure some of the bytes may still be copied. */
viking_status viking_staging_copy(viking_staging *staging, viking_stream copies, void *destination,
                                  const viking_home *home, size_t bytes);

/* Wait, on the host, until no home is read any more. From any thread. */
viking_status viking_staging_drain(const viking_staging *staging);

#endif

/* A weight's permanent place in host memory.
 *
 * Each home is a mapping of its own, so that it can be pinned, unpinned and given back alone: what is resident on
 * the device needs no pinned copy, and a tensor that outlives the engine keeps its own home alive and no other. A
 * forked child does not inherit it (see viking_os_inherit).
 *
 * Or it is made of borrowed pieces of memory that is there already (a file's mapping) and stays its owner's: that is never
 * pinned, and costs nothing.
 */
#ifndef VIKING_CORE_HOME_H
#define VIKING_CORE_HOME_H

#include "../backend/backend.h"

typedef struct viking_piece {
    size_t offset; /* in the home */
    const void *address;
    size_t bytes;
} viking_piece;

typedef struct viking_home {
    void *address; /* page aligned; NULL: borrowed */
    size_t bytes; /* what was asked for; the mapping is whole pages */
    viking_backend *pinned_by; /* NULL: pageable */
    viking_piece *pieces; /* where its bytes are, by offset; what lies between pieces is not copied */
    uint32_t piece_count;
    viking_piece own; /* the only piece of a home that is not borrowed */
} viking_home;

/* bytes > 0. Untouched memory: its pages come with the first write. */
viking_status viking_home_open(size_t bytes, viking_home **out);

/* A home of `bytes` over pieces, which must outlive it. INVALID unless they are in order and do not overlap. */
viking_status viking_home_over(const viking_piece *pieces, uint32_t count, size_t bytes, viking_home **out);

/* Unpins. No copy of it may be in flight. NULL is allowed. In a forked child, which has not inherited the mapping, it
 * only forgets. */
void viking_home_close(viking_home *home);

/* Copy into it over several threads: also the first touch. offset + bytes <= home->bytes. UNSUPPORTED if borrowed. */
viking_status viking_home_fill(viking_home *home, size_t offset, const void *source, size_t bytes);

/* Copy `bytes` from `offset` on out of it, over at most `threads` threads. What lies between pieces, or behind its end, is
 * left as it is in `out`. */
void viking_home_read(const viking_home *home, size_t offset, void *out, size_t bytes, unsigned threads);

/* Where a byte of a piece is in the home; SIZE_MAX if it is in none. */
size_t viking_home_offset_of(const viking_home *home, const void *address);

/* Pinning what is pinned, and unpinning what is not, does nothing. The backend must outlive the pin.
 * UNSUPPORTED for a borrowed home. */
viking_status viking_home_pin(viking_home *home, viking_backend *backend);
viking_status viking_home_unpin(viking_home *home);

/* Bytes that pinning locks: whole pages. */
size_t viking_home_locked_bytes(const viking_home *home);

/* The engine is done with it: children of later forks inherit it like any memory. */
viking_status viking_home_retire(viking_home *home);

#endif

/* Where the time of one pass went, measured with events on the streams themselves.
 *
 * While a profile runs, every use records when its stream began to wait for its bytes and when it had them, and every
 * copy when it began and ended. Nothing waits for these events; they are read once all are reached. Entries and
 * events are kept for the next profile.
 */
#ifndef VIKING_CORE_PROFILE_H
#define VIKING_CORE_PROFILE_H

#include "../backend/backend.h"

typedef enum viking_profile_kind { VIKING_PROFILE_USE, VIKING_PROFILE_COPY } viking_profile_kind;

typedef struct viking_profile_span {
    uint64_t begin_ns; /* from the start of the profile. A use: its stream starts to wait */
    uint64_t end_ns; /* a use: its bytes are there, computing starts */
    uint32_t weight;
    uint32_t kind;
} viking_profile_span;

typedef struct viking_profile_entry {
    viking_event *begin;
    viking_event *end;
    uint32_t weight;
    uint32_t kind;
    bool ended;
} viking_profile_entry;

typedef struct viking_profile {
    viking_backend *backend;
    viking_event *origin;
    viking_profile_entry *entries;
    uint32_t count;
    uint32_t capacity;
    bool running;
} viking_profile;

void viking_profile_init(viking_profile *profile, viking_backend *backend);
void viking_profile_free(viking_profile *profile);

/* Forget the last one and start; the origin is what `stream` has done by now. */
viking_status viking_profile_start(viking_profile *profile, viking_stream stream);
void viking_profile_stop(viking_profile *profile);

/* Does nothing unless running. *out_index goes to viking_profile_end; UINT32_MAX: nothing to end. */
viking_status viking_profile_begin(viking_profile *profile, viking_profile_kind kind, uint32_t weight,
                                   viking_stream stream, uint32_t *out_index);
viking_status viking_profile_end(viking_profile *profile, uint32_t index, viking_stream stream);

/* All spans of a profile that was stopped, in the order they were queued, into spans[count] (NULL: only *out_ready).
 * *out_ready is false while events are still to be reached. */
viking_status viking_profile_read(const viking_profile *profile, viking_profile_span *spans, bool *out_ready);

#endif

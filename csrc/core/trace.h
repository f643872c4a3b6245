/* What a pass over the model used, in order.
 *
 * A use is the interval [begin, end] in which a weight must be on the device. Ticks count acquires and releases
 * of the pass together, so intervals may nest and overlap (a container holds its own parameter while its children
 * run, two threads run at once). Uses are stored in the order of their begin ticks. A trace is one period of
 * something that repeats: what follows its last use is its first use.
 */
#ifndef VIKING_CORE_TRACE_H
#define VIKING_CORE_TRACE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../base/status.h"

typedef enum viking_use_kind {
    VIKING_USE_READ, /* the weight is read */
    VIKING_USE_WRITE, /* the weight changes on the device and travels back */
    VIKING_USE_PRODUCE /* the bytes are made on the device and travel back (a gradient) */
} viking_use_kind;

typedef struct viking_use {
    uint32_t weight;
    uint32_t begin; /* tick of the acquire */
    uint32_t end; /* tick of the release; UINT32_MAX while the use is open */
    uint32_t kind; /* viking_use_kind */
    uint64_t compute_ns; /* device time from this acquire to the next one, copies not counted; 0: unknown */
} viking_use;

typedef struct viking_trace {
    viking_use *uses;
    uint32_t count;
    uint32_t capacity;
    uint32_t ticks; /* the next tick */
} viking_trace;

void viking_trace_init(viking_trace *trace);
void viking_trace_free(viking_trace *trace); /* back to the state after init */
void viking_trace_clear(viking_trace *trace); /* keeps the memory */
viking_status viking_trace_copy(viking_trace *destination, const viking_trace *source);

/* Append a use that begins now; *out_index is its place in `uses`. */
viking_status viking_trace_acquire(viking_trace *trace, uint32_t weight, viking_use_kind kind, uint32_t *out_index);
void viking_trace_release(viking_trace *trace, uint32_t index);

/* Same weights and kinds in the same order. (Ticks may differ: threads interleave differently.) */
bool viking_trace_equal(const viking_trace *a, const viking_trace *b);
bool viking_trace_has_prefix(const viking_trace *trace, const viking_trace *prefix);

/* The shortest p such that the trace is at least two repetitions of its first p uses (the last one may be cut
 * short); 0 if there is none. O(count). */
viking_status viking_trace_period(const viking_trace *trace, uint32_t *out);

#endif

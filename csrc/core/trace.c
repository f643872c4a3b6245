/* The trace is an append-only array: acquire appends, release fills in one field. Growing by doubling keeps both
 * free of allocation once a step has been seen, because clear() keeps the memory.
 *
 * The period of a trace is found with the prefix function of Knuth, Morris and Pratt: the longest border of the
 * sequence of (weight, kind) pairs leaves the shortest period, in linear time and with one scratch array.
 */
#include "trace.h"

#include <stdlib.h>
#include <string.h>

void viking_trace_init(viking_trace *trace)
{
    memset(trace, 0, sizeof *trace);
}

void viking_trace_free(viking_trace *trace)
{
    free(trace->uses);
    viking_trace_init(trace);
}

void viking_trace_clear(viking_trace *trace)
{
    trace->count = 0;
    trace->ticks = 0;
}

static viking_status reserve(viking_trace *trace, uint32_t capacity)
{
    viking_use *uses = realloc(trace->uses, (size_t)capacity * sizeof *uses);
    if (uses == NULL)
        return viking_status_fail(VIKING_ERROR_NO_HOST_MEMORY, "no memory for a trace of %u uses", capacity);
    trace->uses = uses;
    trace->capacity = capacity;
    return VIKING_OK;
}

viking_status viking_trace_copy(viking_trace *destination, const viking_trace *source)
{
    if (destination->capacity < source->count) {
        viking_status status = reserve(destination, source->count);
        if (status != VIKING_OK)
            return status;
    }
    if (source->count > 0)
        memcpy(destination->uses, source->uses, source->count * sizeof *source->uses);
    destination->count = source->count;
    destination->ticks = source->ticks;
    return VIKING_OK;
}

viking_status viking_trace_acquire(viking_trace *trace, uint32_t weight, viking_use_kind kind, uint32_t *out_index)
{
    /* Every use takes two ticks at most, and UINT32_MAX means "open": half the range keeps ticks unambiguous. */
    if (trace->count >= UINT32_MAX / 2 - 1)
        return viking_status_fail(VIKING_ERROR_STATE, "a trace holds at most %u uses", UINT32_MAX / 2 - 1);
    if (trace->count == trace->capacity) {
        viking_status status = reserve(trace, trace->capacity == 0 ? 64 : trace->capacity * 2);
        if (status != VIKING_OK)
            return status;
    }
    trace->uses[trace->count] = (viking_use){
        .weight = weight, .begin = trace->ticks++, .end = UINT32_MAX, .kind = (uint32_t)kind, .compute_ns = 0};
    *out_index = trace->count++;
    return VIKING_OK;
}

void viking_trace_release(viking_trace *trace, uint32_t index)
{
    /* A second release, or one from before a clear, names nothing that is open. */
    if (index < trace->count && trace->uses[index].end == UINT32_MAX)
        trace->uses[index].end = trace->ticks++;
}

static bool same_use(const viking_use *a, const viking_use *b)
{
    return a->weight == b->weight && a->kind == b->kind;
}

bool viking_trace_has_prefix(const viking_trace *trace, const viking_trace *prefix)
{
    if (prefix->count > trace->count)
        return false;
    for (uint32_t i = 0; i < prefix->count; i++)
        if (!same_use(&trace->uses[i], &prefix->uses[i]))
            return false;
    return true;
}

bool viking_trace_equal(const viking_trace *a, const viking_trace *b)
{
    return a->count == b->count && viking_trace_has_prefix(a, b);
}

viking_status viking_trace_period(const viking_trace *trace, uint32_t *out)
{
    const viking_use *uses = trace->uses;
    uint32_t *border; /* border[i]: the longest proper prefix of the first i + 1 uses that is also their suffix */

    *out = 0;
    if (trace->count < 2)
        return VIKING_OK;
    border = malloc((size_t)trace->count * sizeof *border);
    if (border == NULL) {
        return viking_status_fail(VIKING_ERROR_NO_HOST_MEMORY, "no memory to search a trace of %u uses for its period",
                                  trace->count);
    }
    border[0] = 0;
    for (uint32_t i = 1, length = 0; i < trace->count; i++) {
        while (length > 0 && !same_use(&uses[i], &uses[length]))
            length = border[length - 1];
        if (same_use(&uses[i], &uses[length]))
            length++;
        border[i] = length;
    }
    uint32_t period = trace->count - border[trace->count - 1];
    free(border);
    if (period <= trace->count / 2)
        *out = period;
    return VIKING_OK;
}

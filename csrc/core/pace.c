#include "pace.h"

#include <stdlib.h>

#include "../base/os.h"
#include "../base/pause.h"

/* Between the moment at which a wait ends and that at which the next copy is seen to begin. */
#define SLACK_NS 100000u

typedef struct toll {
    viking_pace *pace;
    uint64_t duration_ns;
} toll;

static void note_begin(void *argument)
{
    viking_pace *pace = argument;
    pace->begin_ns = viking_os_clock_ns();
}

/* Frees itself. */
static void hold_back(void *argument)
{
    toll *self = argument;
    viking_pace *pace = self->pace;
    pace->free_ns = viking_pace_done(pace->free_ns, pace->begin_ns, self->duration_ns);
    free(self);
    viking_pause_until(pace->free_ns);
}

uint64_t viking_pace_done(uint64_t free_ns, uint64_t begin_ns, uint64_t duration_ns)
{
    uint64_t earliest = begin_ns > SLACK_NS ? begin_ns - SLACK_NS : 0;
    return (free_ns > earliest ? free_ns : begin_ns) + duration_ns;
}

viking_status viking_pace_set(viking_pace *pace, viking_backend *backend, viking_stream copies,
                              uint64_t bytes_per_second)
{
    viking_status status = bytes_per_second == 0 ? VIKING_OK : viking_pace_begin(pace, backend, copies);
    if (status == VIKING_OK)
        pace->bytes_per_second = bytes_per_second;
    return status;
}

viking_status viking_pace_begin(viking_pace *pace, viking_backend *backend, viking_stream copies)
{
    return backend->operations->host_call(backend, copies, note_begin, pace);
}

viking_status viking_pace_end(viking_pace *pace, viking_backend *backend, viking_stream copies, size_t bytes)
{
    toll *call = malloc(sizeof *call);
    if (call == NULL)
        return viking_status_fail(VIKING_ERROR_NO_HOST_MEMORY, "no host memory to pace a copy");
    *call = (toll){pace, (uint64_t)((double)bytes * 1e9 / (double)pace->bytes_per_second)};
    viking_status status = backend->operations->host_call(backend, copies, hold_back, call);
    if (status != VIKING_OK)
        free(call);
    return status;
}

/* What a use costs the host: ns per acquire and release, over the host backend with one asynchronous stream. Prints
 * JSON. The device here is made of threads on the same processors, so its own work disturbs the figures of streamed
 * weights: `engine` is the time outside the backend's calls, the engine's own. */
#include "tagged.h"

enum { WEIGHTS = 160, PASSES = 60 };

typedef struct counted_time {
    viking_backend base;
    viking_backend_operations operations;
    viking_backend *inner;
    uint64_t ns;
    uint64_t calls;
} counted_time;

static viking_status timed_record(viking_backend *self, viking_event *event, viking_stream stream)
{
    counted_time *t = (counted_time *)self;
    uint64_t begin = viking_os_clock_ns();
    viking_status status = t->inner->operations->event_record(t->inner, event, stream);
    t->ns += viking_os_clock_ns() - begin;
    t->calls++;
    return status;
}

static viking_status timed_wait(viking_backend *self, viking_stream stream, viking_event *event)
{
    counted_time *t = (counted_time *)self;
    uint64_t begin = viking_os_clock_ns();
    viking_status status = t->inner->operations->stream_wait(t->inner, stream, event);
    t->ns += viking_os_clock_ns() - begin;
    t->calls++;
    return status;
}

static viking_status timed_copy(viking_backend *self, viking_copy_direction direction, void *destination,
                                const void *source, size_t bytes, viking_stream stream)
{
    counted_time *t = (counted_time *)self;
    uint64_t begin = viking_os_clock_ns();
    viking_status status = t->inner->operations->copy(t->inner, direction, destination, source, bytes, stream);
    t->ns += viking_os_clock_ns() - begin;
    t->calls++;
    return status;
}

static viking_status untimed_stream_open(viking_backend *self, viking_stream *out)
{
    counted_time *t = (counted_time *)self;
    return t->inner->operations->stream_open(t->inner, out);
}

static void untimed_stream_close(viking_backend *self, viking_stream stream)
{
    counted_time *t = (counted_time *)self;
    t->inner->operations->stream_close(t->inner, stream);
}

static viking_status untimed_stream_drain(viking_backend *self, viking_stream stream)
{
    counted_time *t = (counted_time *)self;
    return t->inner->operations->stream_drain(t->inner, stream);
}

static viking_status untimed_event_open(viking_backend *self, bool timed, viking_event **out)
{
    counted_time *t = (counted_time *)self;
    return t->inner->operations->event_open(t->inner, timed, out);
}

static void untimed_event_close(viking_backend *self, viking_event *event)
{
    counted_time *t = (counted_time *)self;
    t->inner->operations->event_close(t->inner, event);
}

static void do_not_close(viking_backend *self)
{
    (void)self;
}

static int by_value(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* 160 weights in blocks of 8: F, then per block R and B, 3.5 uses a weight; the last quarter is used forward only. */
static void make_step(viking_trace *trace)
{
    for (uint32_t w = 0; w < WEIGHTS; w++)
        use_weight(trace, w, 1000);
    for (uint32_t end = WEIGHTS; end > 0; end -= 8) {
        for (uint32_t w = end - 8; w < end; w++)
            use_weight(trace, w, 1000);
        for (uint32_t w = end; w-- > end - 8;)
            if (w % 2 == 0)
                use_weight(trace, w, 1000);
    }
    for (uint32_t w = 0; w < WEIGHTS; w++)
        use_weight(trace, w, 1000);
}

static void measure(const char *name, uint32_t share_percent, const char *end)
{
    static uint64_t ns[PASSES], engine_ns[PASSES];
    counted_time device = {.inner = NULL};
    viking_engine *engine = NULL;
    viking_home *homes[WEIGHTS];
    viking_stream stream = VIKING_STREAM_CALLER;
    viking_trace trace;
    uint64_t slab_bytes = 0, smallest = 0, largest = 0, calls = 0;
    uint32_t number;
    CHECK_OK(viking_host_open(NULL, &device.inner));
    device.operations = *device.inner->operations;
    device.operations.event_record = timed_record;
    device.operations.stream_wait = timed_wait;
    device.operations.copy = timed_copy;
    device.operations.stream_open = untimed_stream_open;
    device.operations.stream_close = untimed_stream_close;
    device.operations.stream_drain = untimed_stream_drain;
    device.operations.event_open = untimed_event_open;
    device.operations.event_close = untimed_event_close;
    device.operations.close = do_not_close;
    device.base.operations = &device.operations;
    CHECK_OK(viking_engine_open(&device.base, &engine));
    for (uint32_t w = 0; w < WEIGHTS; w++) {
        CHECK_OK(viking_home_open(4096, &homes[w]));
        CHECK_OK(viking_engine_add(engine, homes[w], 4096, &number));
    }
    CHECK_OK(device.inner->operations->stream_open(device.inner, &stream));
    viking_trace_init(&trace);
    make_step(&trace);
    CHECK_OK(viking_engine_budget_range(engine, &smallest, &largest));
    CHECK_OK(viking_engine_layout(engine, smallest + (largest - smallest) * share_percent / 100, &slab_bytes));
    void *slab = aligned_alloc(VIKING_ALIGNMENT, slab_bytes);
    CHECK(slab != NULL);
    CHECK_OK(viking_engine_use_layout(engine, slab, stream));
    for (uint32_t pass = 0; pass < PASSES + 4; pass++) {
        bool stale;
        uint64_t before_calls = device.calls, before_ns = device.ns, begin = viking_os_clock_ns();
        CHECK_OK(viking_engine_pass_begin(engine, 1, true, stream, &stale));
        for (uint32_t i = 0; i < trace.count; i++) {
            viking_acquired use;
            CHECK_OK(viking_engine_acquire(engine, trace.uses[i].weight, stream, &use));
            CHECK_OK(viking_engine_release(engine, use.ticket, stream));
        }
        uint64_t all = viking_os_clock_ns() - begin;
        if (pass >= 4) {
            ns[pass - 4] = all / trace.count;
            engine_ns[pass - 4] = (all - (device.ns - before_ns)) / trace.count;
            calls = device.calls - before_calls;
        }
        CHECK_OK(device.inner->operations->stream_drain(device.inner, stream));
    }
    qsort(ns, PASSES, sizeof *ns, by_value);
    qsort(engine_ns, PASSES, sizeof *engine_ns, by_value);
    printf("  \"%s\": {\"weights\": %u, \"uses\": %u, \"ns_per_use\": %llu, \"engine_ns_per_use\": %llu, "
           "\"device_calls_per_use\": %.2f}%s\n",
           name, WEIGHTS, trace.count, (unsigned long long)ns[PASSES / 2], (unsigned long long)engine_ns[PASSES / 2],
           (double)calls / trace.count, end);
    viking_engine_close(engine); /* a reader's stream outlives the engine */
    device.inner->operations->stream_close(device.inner, stream);
    device.inner->operations->close(device.inner);
    for (uint32_t w = 0; w < WEIGHTS; w++)
        viking_home_close(homes[w]);
    viking_trace_free(&trace);
    free(slab);
}

int main(void)
{
    printf("{\n");
    measure("resident", 100, ",");
    measure("half", 50, ",");
    measure("streamed", 0, "");
    printf("}\n");
    return 0;
}

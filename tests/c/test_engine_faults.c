/* Any call of the device may fail, once. The engine reports it, and the next pass finds all its bytes. */
#include "tagged.h"

enum { KEY = 31, COUNT = 6 };

static const uint64_t sizes[COUNT] = {1024, 256, 2048, 512, 1024, 256};

typedef struct fault_run {
    tagged *world;
    uint64_t n;
    uint32_t seen; /* failures reported */
} fault_run;

static bool failed(fault_run *run, viking_status status)
{
    CHECK(status == VIKING_OK || status == VIKING_ERROR_DEVICE);
    run->seen += status != VIKING_OK;
    CHECK(run->seen <= 1);
    return status != VIKING_OK;
}

/* Half of the faults hit the test's own calls: the second attempt is without. */
static void drain(fault_run *run)
{
    tagged *t = run->world;
    for (uint32_t s = 0; s < t->stream_count; s++)
        if (failed(run, t->backend->operations.stream_drain(&t->backend->base, t->streams[s])))
            CHECK_OK(t->backend->operations.stream_drain(&t->backend->base, t->streams[s]));
}

static void layout(fault_run *run, uint32_t eighths)
{
    uint64_t budget = tagged_budget(run->world, eighths);
    if (failed(run, tagged_layout(run->world, budget, run->world->streams[0])))
        CHECK_OK(tagged_layout(run->world, budget, run->world->streams[0]));
}

static void pass(fault_run *run, const viking_trace *trace)
{
    if (failed(run, tagged_pass(run->world, KEY, trace)))
        CHECK_OK(tagged_pass(run->world, KEY, trace));
}

/* A use on the caller's own stream, which waits for its copy itself. */
static void caller_uses(fault_run *run, uint32_t w)
{
    tagged *t = run->world;
    viking_acquired use;
    if (failed(run, tagged_acquire(t, w, VIKING_STREAM_CALLER, &use)))
        CHECK_OK(tagged_acquire(t, w, VIKING_STREAM_CALLER, &use));
    tagged_compute(t, w, &use, VIKING_STREAM_CALLER);
    failed(run, viking_engine_release(t->engine, use.ticket, VIKING_STREAM_CALLER));
}

static void edit(fault_run *run, uint32_t w)
{
    tagged *t = run->world;
    if (failed(run, viking_engine_drain_copies(t->engine)))
        CHECK_OK(viking_engine_drain_copies(t->engine));
    t->versions[w]++;
    tagged_fill(t, w);
    CHECK_OK(viking_engine_invalidate(t->engine, t->numbers[w]));
}

static void replace(fault_run *run, uint32_t w)
{
    tagged *t = run->world;
    if (failed(run, viking_engine_remove(t->engine, t->numbers[w]))) {
        viking_status again = viking_engine_remove(t->engine, t->numbers[w]);
        CHECK(again == VIKING_OK || again == VIKING_ERROR_STATE); /* it was only the unpinning that failed */
    }
    if (failed(run, viking_engine_add(t->engine, t->homes[w], t->bytes[w], &t->numbers[w])))
        CHECK_OK(viking_engine_add(t->engine, t->homes[w], t->bytes[w], &t->numbers[w]));
}

/* What cannot be pinned is streamed all the same: every third weight goes through the window, if there is one. */
static void pin_most(fault_run *run)
{
    failed(run, viking_engine_use_window(run->world->engine, 512));
    for (uint32_t w = 0; w < COUNT; w++)
        if (w % 3 != 2)
            failed(run, viking_engine_pin(run->world->engine, run->world->numbers[w]));
}

static void another_window(fault_run *run)
{
    failed(run, viking_engine_use_window(run->world->engine, 1024));
}

static void drop_slab(fault_run *run)
{
    if (failed(run, viking_engine_drop_slab(run->world->engine)))
        CHECK_OK(viking_engine_drop_slab(run->world->engine));
    ALIGNED_FREE(run->world->slab);
    run->world->slab = NULL;
}

static void look_at_stats(fault_run *run)
{
    viking_engine_stats stats;
    viking_profile_span *spans = NULL;
    uint32_t count = 0;
    failed(run, viking_engine_stats_of(run->world->engine, &stats));
    failed(run, viking_engine_profile_read(run->world->engine, &spans, &count));
    free(spans);
}

/* Several passes of simple and nested uses, edits, another budget, a new weight, another slab. */
static void live(fault_run *run)
{
    viking_trace sweep, nested;
    uint32_t index[3];
    viking_trace_init(&sweep);
    viking_trace_init(&nested);
    sweep_weights(&sweep, COUNT, 1000);
    for (uint32_t w = 0; w < 3; w++)
        CHECK_OK(viking_trace_acquire(&nested, w == 2 ? 5 : w, VIKING_USE_READ, &index[w]));
    for (uint32_t w = 0; w < 3; w++)
        viking_trace_release(&nested, index[w]);
    layout(run, 0);
    pin_most(run);
    pass(run, &sweep);
    CHECK_OK(viking_engine_profile_next(run->world->engine));
    pass(run, &sweep);
    pass(run, &nested);
    drain(run);
    look_at_stats(run);
    edit(run, 1);
    pass(run, &sweep);
    caller_uses(run, 2);
    caller_uses(run, 5);
    layout(run, 4);
    pass(run, &sweep);
    another_window(run);
    replace(run, 3);
    layout(run, 2);
    pass(run, &nested);
    drop_slab(run);
    layout(run, 1);
    pass(run, &sweep);
    pass(run, &sweep);
    viking_trace_free(&sweep);
    viking_trace_free(&nested);
}

static viking_status attach(fault_run *run)
{
    tagged *t = run->world;
    viking_status status = viking_engine_open(&t->backend->base, &t->engine);
    if (failed(run, status))
        return status;
    for (uint32_t w = 0; w < COUNT; w++)
        if (failed(run, viking_engine_add(t->engine, t->homes[w], t->bytes[w], &t->numbers[w])))
            CHECK_OK(viking_engine_add(t->engine, t->homes[w], t->bytes[w], &t->numbers[w]));
    return VIKING_OK;
}

/* With the fault at the n-th call; false where the run made fewer. */
static bool run_with_fault(uint64_t n)
{
    viking_host_options options = {.delay_ns = n % 3 == 0 ? 0 : 6000, .seed = n};
    viking_backend *inner = NULL;
    fault_run run = {.n = n};
    CHECK_OK(viking_host_open(&options, &inner));
    tagged *t = run.world = tagged_prepare(inner, tagged_launch_on_host, COUNT, sizes);
    t->stream_count = 2;
    for (uint32_t s = 0; s < 2; s++)
        CHECK_OK(t->backend->operations.stream_open(&t->backend->base, &t->streams[s]));
    viking_host_fail_at(inner, n, VIKING_ERROR_DEVICE);
    if (attach(&run) == VIKING_OK) {
        live(&run);
        drain(&run);
        CHECK(atomic_load(&t->wrong) == 0 && t->backend->dead_streams == 0);
        viking_engine_close(t->engine); /* the streams of the test go with the backend */
    }
    tagged_free(t);
    return run.seen > 0;
}

/* Faults while the engine closes are reported to nobody, so the last runs are those that end without one. */
static void any_call_may_fail_once(void)
{
    uint64_t n = 1;
    uint32_t unseen = 0;
    for (; unseen < 40; n++)
        unseen = run_with_fault(n) ? 0 : unseen + 1;
    printf("      %llu calls\n", (unsigned long long)n - unseen - 1);
    CHECK(n > 300);
}

static void sleep_2_ms(void *unused)
{
    (void)unused;
    viking_os_sleep_ns(2000000);
}

/* A displaced use ends, slow kernels still read its place, and the call that would fence them fails. */
static void a_displaced_use_is_fenced_whatever_fails(void)
{
    static const uint64_t bytes[] = {256, 2048, 2048, 256, 2048, 2048};
    for (uint64_t n = 0; n < 6; n++) {
        tagged *t = tagged_open(NULL, 6, bytes, 1);
        CHECK_OK(tagged_layout(t, tagged_smallest(t), t->streams[0]));
        const viking_map *map = t->engine->slab.map;
        uint32_t neighbour = map->neighbours[map->neighbour_begin[3]];
        viking_acquired first, displaced, use;
        CHECK_OK(tagged_acquire(t, neighbour, VIKING_STREAM_CALLER, &first));
        CHECK_OK(tagged_acquire(t, 3, t->streams[0], &displaced));
        CHECK(displaced.address != (unsigned char *)t->slab + map->offsets[3]);
        t->launch(t->backend->inner, t->streams[0], sleep_2_ms, NULL);
        tagged_compute(t, 3, &displaced, t->streams[0]);
        viking_host_fail_at(t->backend->inner, n, VIKING_ERROR_DEVICE);
        viking_engine_release(t->engine, displaced.ticket, t->streams[0]);
        viking_host_fail_at(t->backend->inner, 0, VIKING_OK);
        CHECK_OK(viking_engine_release(t->engine, first.ticket, VIKING_STREAM_CALLER));
        for (uint32_t w = 0; w < 6; w++) { /* all of the ring is overwritten */
            CHECK_OK(tagged_acquire(t, w, t->streams[0], &use));
            CHECK_OK(viking_engine_release(t->engine, use.ticket, t->streams[0]));
        }
        tagged_close(t);
    }
}

/* A use ends on a stream that cannot become a reader: the caller waits for it itself. */
static void a_release_without_a_reader_is_waited_for(void)
{
    static const uint64_t bytes[] = {1024, 1024, 1024, 1024};
    for (uint64_t n = 0; n < 4; n++) {
        tagged *t = tagged_open(NULL, 4, bytes, 2);
        viking_acquired use;
        viking_event *event = NULL;
        CHECK_OK(tagged_layout(t, tagged_smallest(t), t->streams[0]));
        CHECK_OK(tagged_acquire(t, 0, t->streams[0], &use));
        CHECK_OK(t->backend->operations.event_open(&t->backend->base, false, &event));
        CHECK_OK(t->backend->operations.event_record(&t->backend->base, event, t->streams[0]));
        CHECK_OK(t->backend->operations.stream_wait(&t->backend->base, t->streams[1], event));
        t->launch(t->backend->inner, t->streams[1], sleep_2_ms, NULL);
        tagged_compute(t, 0, &use, t->streams[1]);
        viking_host_fail_at(t->backend->inner, n, VIKING_ERROR_DEVICE);
        viking_engine_release(t->engine, use.ticket, t->streams[1]);
        viking_host_fail_at(t->backend->inner, 0, VIKING_OK);
        for (uint32_t w = 1; w < 4; w++) {
            CHECK_OK(tagged_acquire(t, w, t->streams[0], &use));
            CHECK_OK(viking_engine_release(t->engine, use.ticket, t->streams[0]));
        }
        t->backend->operations.event_close(&t->backend->base, event);
        tagged_close(t);
    }
}

int main(void)
{
    RUN(a_release_without_a_reader_is_waited_for);
    RUN(a_displaced_use_is_fenced_whatever_fails);
    RUN(any_call_may_fail_once);
    return 0;
}

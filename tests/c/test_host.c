/* The host backend: backend.h's promises, and what host.h adds for tests: pace, delays, faults, counts, limits. */
#include "backend_contract.h"

#include "backend/host.h"

static void launch(viking_backend *backend, viking_stream stream, void (*body)(void *), void *argument)
{
    CHECK_OK(viking_host_launch(backend, stream, body, argument));
}

static contract open_host(const viking_host_options *options)
{
    contract c = {.launch = launch, .launches_overlap = true};
    CHECK_OK(viking_host_open(options, &c.backend));
    c.call = c.backend->operations;
    return c;
}

static void it_keeps_the_backends_promises(void)
{
    contract c = open_host(NULL);
    CHECK(strcmp(c.call->name, "host") == 0 && c.call->caller_blocks);
    run_backend_contract(&c);
    c.call->close(c.backend);
}

static void it_keeps_them_paced_and_delayed(void)
{
    contract c = open_host(&(viking_host_options){.bytes_per_second = 500000000, .delay_ns = 50000, .seed = 3});
    run_backend_contract(&c);
    c.call->close(c.backend);
}

/* ---- delays ---- */

static void fences_hold_under_any_delays(void)
{
    for (uint64_t seed = 0; seed < 40; seed++) {
        contract c = open_host(&(viking_host_options){.delay_ns = 60000, .seed = seed});
        CHECK(stream_through_a_ring(&c, KEEP_ALL) == 0);
        c.call->close(c.backend);
    }
}

#ifndef __SANITIZE_THREAD__ /* what is wrong here on purpose is a data race */
static int wrong_uses(dropped_fence drop)
{
    int wrong = 0;
    for (uint64_t seed = 0; seed < 10; seed++) {
        contract c = open_host(&(viking_host_options){.delay_ns = 60000, .seed = seed});
        wrong += stream_through_a_ring(&c, drop);
        c.call->close(c.backend);
    }
    return wrong;
}

static void delays_expose_a_missing_ready_fence(void)
{
    CHECK(wrong_uses(DROP_READY) > 0);
}

static void delays_expose_a_missing_free_fence(void)
{
    CHECK(wrong_uses(DROP_FREE) > 0);
}

static void a_paced_copy_is_torn_until_it_ends(void)
{
    enum { BYTES = 1 << 20 };
    contract c = open_host(&(viking_host_options){.bytes_per_second = (uint64_t)BYTES * 2}); /* 500 ms */
    viking_stream stream = contract_stream(&c);
    volatile char *there = calloc(1, BYTES);
    char *source = malloc(BYTES);
    CHECK(there && source);
    memset(source, 1, BYTES);
    CHECK_OK(c.call->copy(c.backend, VIKING_COPY_TO_DEVICE, (char *)there, source, BYTES, stream));
    while (there[0] == 0)
        viking_os_sleep_ns(MILLISECOND / 10);
    CHECK(there[BYTES - 1] == 0);
    CHECK_OK(c.call->stream_drain(c.backend, stream));
    CHECK(there[BYTES - 1] == 1);
    c.call->stream_close(c.backend, stream);
    c.call->close(c.backend);
    free((char *)there);
    free(source);
}
#endif

/* ---- pace ---- */

/* How long `count` copies of `bytes` take, spread over `streams` streams, at 1 GB/s. */
static uint64_t copying_ns(int count, size_t bytes, int streams)
{
    contract c = open_host(&(viking_host_options){.bytes_per_second = 1000000000});
    viking_stream stream[2];
    char *source = calloc(1, bytes), *there = malloc(2 * bytes);
    CHECK(source && there);
    for (int s = 0; s < streams; s++)
        stream[s] = contract_stream(&c);
    uint64_t begin = viking_os_clock_ns();
    for (int i = 0; i < count; i++)
        CHECK_OK(c.call->copy(c.backend, VIKING_COPY_TO_DEVICE, there + (size_t)(i % streams) * bytes, source, bytes,
                              stream[i % streams]));
    for (int s = 0; s < streams; s++)
        CHECK_OK(c.call->stream_drain(c.backend, stream[s]));
    uint64_t ns = viking_os_clock_ns() - begin;
    for (int s = 0; s < streams; s++)
        c.call->stream_close(c.backend, stream[s]);
    c.call->close(c.backend);
    free(source);
    free(there);
    return ns;
}

static void small_copies_keep_the_pace_as_large_ones_do(void)
{
    /* Never faster. That it is not much slower depends on the machine; `printf` tells. */
    uint64_t small_ns = copying_ns(2000, 10000, 1), large_ns = copying_ns(1, 20000000, 1);
    printf("      20 MB at 1 GB/s: %.2f ms in 2000 copies, %.2f ms in one\n", (double)small_ns / 1e6,
           (double)large_ns / 1e6);
    CHECK(small_ns >= 20 * MILLISECOND && large_ns >= 20 * MILLISECOND);
}

static void streams_share_the_link(void)
{
    CHECK(copying_ns(20, 1000000, 2) >= 20 * MILLISECOND);
}

/* ---- counts, faults ---- */

static void calls_are_counted(void)
{
    contract c = open_host(NULL);
    CHECK(viking_host_calls(c.backend) == 0);
    viking_stream stream = contract_stream(&c);
    viking_event *event = contract_event(&c, false);
    CHECK_OK(c.call->event_record(c.backend, event, stream));
    CHECK(viking_host_calls(c.backend) == 3);
    c.call->event_close(c.backend, event);
    c.call->stream_close(c.backend, stream);
    CHECK(viking_host_calls(c.backend) == 5);
    viking_host_fail_at(c.backend, 1, VIKING_ERROR_DEVICE);
    CHECK(c.call->unpin(c.backend, NULL) == VIKING_ERROR_DEVICE);
    CHECK(viking_host_calls(c.backend) == 6);
    c.call->close(c.backend);
}

static void a_fault_comes_once_and_in_turn(void)
{
    contract c = open_host(NULL);
    viking_event *event = contract_event(&c, false);
    bool reached = false;
    viking_host_fail_at(c.backend, 2, VIKING_ERROR_NO_DEVICE_MEMORY);
    CHECK_OK(c.call->event_drain(c.backend, event));
    c.call->event_close(c.backend, NULL); /* returns no status: not counted among those that may fail */
    CHECK(c.call->event_reached(c.backend, event, &reached) == VIKING_ERROR_NO_DEVICE_MEMORY);
    CHECK(strstr(viking_status_detail(), "event_reached") != NULL);
    CHECK_OK(c.call->event_reached(c.backend, event, &reached));
    viking_host_fail_at(c.backend, 1, VIKING_ERROR_DEVICE);
    viking_host_fail_at(c.backend, 0, VIKING_OK);
    CHECK_OK(c.call->event_drain(c.backend, event));
    c.call->event_close(c.backend, event);
    c.call->close(c.backend);
}

static void after_a_fault_anywhere_the_backend_still_works(void)
{
    size_t page_bytes = viking_os_page_bytes();
    void *page = NULL;
    int faults = 0;
    CHECK_OK(viking_os_map(page_bytes, &page));
    for (bool failed = true; failed;) {
        contract c = open_host(NULL);
        viking_host_fail_at(c.backend, (uint64_t)faults + 1, VIKING_ERROR_DEVICE);
        viking_status status = use_everything(&c, page);
        failed = status != VIKING_OK;
        CHECK(!failed || status == VIKING_ERROR_DEVICE);
        faults += failed;
        viking_host_fail_at(c.backend, 0, VIKING_OK);
        if (failed && viking_host_pinned_bytes(c.backend) > 0)
            CHECK_OK(c.call->unpin(c.backend, page)); /* it was the unpin that failed */
        CHECK_OK(use_everything(&c, page));
        CHECK(viking_host_pinned_bytes(c.backend) == 0);
        c.call->close(c.backend);
    }
    CHECK(faults == 16);
    viking_os_unmap(page, page_bytes);
}

/* ---- limits, and what is left open ---- */

static void pinning_stops_at_its_limit(void)
{
    size_t page = viking_os_page_bytes();
    contract c = open_host(&(viking_host_options){.pin_limit_bytes = 4 * page});
    char *memory = NULL;
    CHECK_OK(viking_os_map(8 * page, (void **)&memory));
    CHECK_OK(c.call->pin(c.backend, memory, 3 * page));
    CHECK(c.call->pin(c.backend, memory + 4 * page, 2 * page) == VIKING_ERROR_NO_HOST_MEMORY);
    CHECK(viking_host_pinned_bytes(c.backend) == 3 * page);
    CHECK_OK(c.call->pin(c.backend, memory + 4 * page, page));
    CHECK(c.call->pin(c.backend, memory + 6 * page, page) == VIKING_ERROR_NO_HOST_MEMORY);
    CHECK_OK(c.call->unpin(c.backend, memory));
    CHECK_OK(c.call->pin(c.backend, memory, 2 * page));
    CHECK(viking_host_pinned_bytes(c.backend) == 3 * page);
    c.call->close(c.backend);
    viking_os_unmap(memory, 8 * page);
}

static void device_memory_ends_where_the_options_say(void)
{
    contract c = open_host(&(viking_host_options){.memory_bytes = 1 << 20});
    void *a = NULL, *b = NULL;
    size_t free_bytes, total_bytes;
    CHECK_OK(c.call->allocate(c.backend, 600 << 10, &a));
    CHECK(c.call->allocate(c.backend, 600 << 10, &b) == VIKING_ERROR_NO_DEVICE_MEMORY);
    CHECK_OK(c.call->memory(c.backend, &free_bytes, &total_bytes));
    CHECK(total_bytes == 1 << 20 && free_bytes == 424 << 10);
    c.call->release(c.backend, a);
    c.call->release(c.backend, NULL);
    CHECK_OK(c.call->allocate(c.backend, 1 << 20, &b));
    c.call->release(c.backend, b);
    c.call->close(c.backend);
}

static void closing_ends_what_is_still_there(void)
{
    contract c = open_host(NULL);
    atomic_bool done = false;
    void *there = NULL;
    viking_stream stream = contract_stream(&c);
    CHECK_OK(c.call->allocate(c.backend, 100, &there));
    launch(c.backend, stream, sleep_20_ms, NULL);
    launch(c.backend, stream, set_flag, &done);
    c.call->close(c.backend);
    CHECK(atomic_load(&done));
}

static void a_launch_on_the_callers_stream_runs_at_once(void)
{
    contract c = open_host(NULL);
    atomic_bool done = false;
    launch(c.backend, VIKING_STREAM_CALLER, set_flag, &done);
    CHECK(atomic_load(&done));
    c.call->stream_close(c.backend, VIKING_STREAM_CALLER);
    c.call->close(c.backend);
}

int main(void)
{
    RUN(it_keeps_the_backends_promises);
    RUN(it_keeps_them_paced_and_delayed);
    RUN(fences_hold_under_any_delays);
#ifndef __SANITIZE_THREAD__
    RUN(delays_expose_a_missing_ready_fence);
    RUN(delays_expose_a_missing_free_fence);
    RUN(a_paced_copy_is_torn_until_it_ends);
#endif
    RUN(small_copies_keep_the_pace_as_large_ones_do);
    RUN(streams_share_the_link);
    RUN(calls_are_counted);
    RUN(a_fault_comes_once_and_in_turn);
    RUN(after_a_fault_anywhere_the_backend_still_works);
    RUN(pinning_stops_at_its_limit);
    RUN(device_memory_ends_where_the_options_say);
    RUN(closing_ends_what_is_still_there);
    RUN(a_launch_on_the_callers_stream_runs_at_once);
    return 0;
}

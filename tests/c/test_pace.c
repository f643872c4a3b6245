/* Copies over a link that is slower than the machine's: when they are done, and that nothing else changes. */
#include <string.h>

#include "backend/host.h"
#include "base/os.h"
#include "check.h"
#include "core/queue.h"

enum { BYTES = 4096, COPIES = 8, RATE = 2048000 }; /* 2 ms each */

static const uint64_t MS = 1000000;

typedef struct bench {
    viking_backend *backend;
    viking_queue queue;
    viking_fence fence;
    viking_home *home;
    unsigned char source[BYTES], span[BYTES];
} bench;

static void bench_open(bench *b)
{
    memset(b, 0, sizeof *b);
    memset(b->source, 7, BYTES);
    CHECK_OK(viking_host_open(NULL, &b->backend));
    CHECK_OK(viking_queue_open(&b->queue, b->backend));
    CHECK_OK(viking_fence_open(&b->fence, b->backend));
    CHECK_OK(viking_home_over(&(viking_piece){0, b->source, BYTES}, 1, BYTES, &b->home));
}

static void bench_close(bench *b)
{
    CHECK_OK(viking_queue_drain(&b->queue));
    viking_fence_close(&b->fence, b->backend);
    viking_queue_close(&b->queue);
    viking_home_close(b->home);
    b->backend->operations->close(b->backend);
}

static viking_status copy(bench *b)
{
    return viking_queue_copy(&b->queue, &b->fence, b->span, b->home, BYTES);
}

static viking_status set(bench *b, uint64_t rate)
{
    return viking_pace_set(&b->queue.pace, b->backend, b->queue.stream, rate);
}

static void a_copy_takes_its_time_from_when_it_begins_or_the_link_is_free(void)
{
    CHECK(viking_pace_done(0, 50 * MS, 4 * MS) == 54 * MS); /* the first */
    CHECK(viking_pace_done(40 * MS, 50 * MS, 4 * MS) == 54 * MS); /* the link was idle: that time is lost */
    CHECK(viking_pace_done(60 * MS, 50 * MS, 4 * MS) == 64 * MS);
    /* Seen to begin a little late: it had waited for the one before, and their times do not add up to more. */
    CHECK(viking_pace_done(50 * MS - 60000, 50 * MS, 4 * MS) == 54 * MS - 60000);
}

static void nothing_is_ready_before_a_slower_link_had_brought_it(void)
{
    bench b;
    bench_open(&b);
    CHECK_OK(set(&b, RATE));
    uint64_t begin = viking_os_clock_ns();
    for (int i = 0; i < COPIES; i++)
        CHECK_OK(copy(&b));
    CHECK_OK(b.backend->operations->event_drain(b.backend, b.fence.ready));
    CHECK(viking_os_clock_ns() - begin >= COPIES * 2 * MS - COPIES * MS / 10);
    CHECK(memcmp(b.span, b.source, BYTES) == 0);
    CHECK_OK(set(&b, 0));
    CHECK_OK(copy(&b));
    CHECK_OK(viking_queue_drain(&b.queue));
    bench_close(&b);
}

static void without_a_pace_a_copy_is_one_call_and_its_fence(void)
{
    bench b;
    bench_open(&b);
    uint64_t before = viking_host_calls(b.backend);
    CHECK_OK(copy(&b));
    CHECK(viking_host_calls(b.backend) - before == 2);
    CHECK_OK(set(&b, RATE));
    CHECK_OK(set(&b, 0));
    before = viking_host_calls(b.backend);
    CHECK_OK(copy(&b));
    CHECK(viking_host_calls(b.backend) - before == 2);
    bench_close(&b);
}

static void after_a_fault_in_any_call_of_a_paced_copy_the_next_one_is_right(void)
{
    for (uint64_t n = 1; n <= 4; n++) { /* begin, copy, wait, record */
        bench b;
        bench_open(&b);
        CHECK_OK(set(&b, RATE));
        viking_host_fail_at(b.backend, n, VIKING_ERROR_DEVICE);
        CHECK(copy(&b) == VIKING_ERROR_DEVICE);
        CHECK(b.fence.copy == 0);
        CHECK_OK(copy(&b));
        CHECK_OK(viking_queue_drain(&b.queue));
        CHECK(b.fence.copy == 1 && memcmp(b.span, b.source, BYTES) == 0);
        bench_close(&b);
    }
}

int main(void)
{
    RUN(a_copy_takes_its_time_from_when_it_begins_or_the_link_is_free);
    RUN(nothing_is_ready_before_a_slower_link_had_brought_it);
    RUN(without_a_pace_a_copy_is_one_call_and_its_fence);
    RUN(after_a_fault_in_any_call_of_a_paced_copy_the_next_one_is_right);
    return 0;
}

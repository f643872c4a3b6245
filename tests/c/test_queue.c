/* The copy queue's fences: who waits for whom, and how few waits that takes. */
#include "recorder.h"

#include "core/queue.h"

enum { BYTES = 4096, SLOTS = 4 };

typedef struct bench {
    recorder *backend;
    viking_queue queue;
    viking_fence fences[SLOTS];
    viking_stream streams[2];
    unsigned char *source;
    unsigned char *span;
    viking_home *homes[2]; /* over the halves of source */
} bench;

static bench *bench_open(uint64_t delay_ns)
{
    viking_host_options options = {.delay_ns = delay_ns, .seed = 5};
    viking_backend *inner = NULL;
    bench *b = calloc(1, sizeof *b);
    CHECK(b != NULL);
    CHECK_OK(viking_host_open(&options, &inner));
    b->backend = recorder_open(inner);
    CHECK_OK(viking_queue_open(&b->queue, &b->backend->base));
    for (int i = 0; i < SLOTS; i++)
        CHECK_OK(viking_fence_open(&b->fences[i], &b->backend->base));
    for (int i = 0; i < 2; i++)
        CHECK_OK(b->backend->operations.stream_open(&b->backend->base, &b->streams[i]));
    b->source = calloc(2, BYTES);
    b->span = calloc(SLOTS, BYTES);
    CHECK(b->source != NULL && b->span != NULL);
    memset(b->source + BYTES, 1, BYTES);
    for (int i = 0; i < 2; i++)
        CHECK_OK(viking_home_over(&(viking_piece){0, b->source + i * BYTES, BYTES}, 1, BYTES, &b->homes[i]));
    return b;
}

static void bench_close(bench *b)
{
    CHECK_OK(viking_queue_drain(&b->queue));
    for (int i = 0; i < SLOTS; i++)
        viking_fence_close(&b->fences[i], &b->backend->base);
    viking_queue_close(&b->queue);
    for (int i = 0; i < 2; i++)
        b->backend->operations.stream_close(&b->backend->base, b->streams[i]);
    CHECK(b->backend->dead_streams == 0);
    b->backend->base.operations->close(&b->backend->base);
    for (int i = 0; i < 2; i++)
        viking_home_close(b->homes[i]);
    free(b->source);
    free(b->span);
    free(b);
}

static uint32_t reader(bench *b, int stream)
{
    uint32_t index = UINT32_MAX;
    CHECK_OK(viking_queue_reader(&b->queue, b->streams[stream], 0, &index));
    return index;
}

static void copy(bench *b, int slot, int value)
{
    CHECK_OK(viking_queue_copy(&b->queue, &b->fences[slot], b->span + slot * BYTES, b->homes[value], BYTES));
}

static void await(bench *b, int slot, uint32_t who)
{
    bool blocking = true;
    CHECK_OK(viking_queue_await(&b->queue, who, &b->fences[slot], &blocking));
    CHECK(!blocking);
}

static unsigned waits(bench *b, void (*body)(bench *, uint32_t), uint32_t who)
{
    unsigned before = b->backend->waits;
    body(b, who);
    return b->backend->waits - before;
}

/* ---- ready ---- */

static void await_first(bench *b, uint32_t who)
{
    await(b, 0, who);
}

static void await_second(bench *b, uint32_t who)
{
    await(b, 1, who);
}

static void a_reader_waits_for_a_copy_once(void)
{
    bench *b = bench_open(0);
    uint32_t first = reader(b, 0), second = reader(b, 1);
    CHECK(first != second && reader(b, 0) == first);
    CHECK(waits(b, await_first, first) == 0); /* never copied */
    copy(b, 0, 1);
    copy(b, 1, 1);
    CHECK(waits(b, await_second, first) == 1);
    CHECK(waits(b, await_second, first) == 0);
    CHECK(waits(b, await_first, first) == 0); /* an earlier copy of the same queue */
    CHECK(waits(b, await_first, second) == 1);
    CHECK(waits(b, await_second, second) == 1);
    viking_queue_distrust(&b->queue, first);
    CHECK(waits(b, await_first, first) == 1);
    bench_close(b);
}

static void the_callers_own_stream_is_blocked_by_the_caller(void)
{
    bench *b = bench_open(200000);
    uint32_t index = 0;
    bool blocking = false;
    CHECK_OK(viking_queue_reader(&b->queue, VIKING_STREAM_CALLER, 77, &index));
    copy(b, 2, 1);
    CHECK_OK(viking_queue_await(&b->queue, index, &b->fences[2], &blocking));
    CHECK(blocking);
    CHECK_OK(viking_queue_block(&b->queue, b->fences[2].ready));
    CHECK(b->span[2 * BYTES] == 1 && b->span[3 * BYTES - 1] == 1);
    CHECK_OK(viking_queue_await(&b->queue, index, &b->fences[2], &blocking));
    CHECK(!blocking);
    bench_close(b);
}

static void threads_are_readers_of_their_own_on_the_callers_stream_only(void)
{
    bench *b = bench_open(0);
    uint32_t a, c;
    CHECK_OK(viking_queue_reader(&b->queue, VIKING_STREAM_CALLER, 1, &a));
    CHECK_OK(viking_queue_reader(&b->queue, VIKING_STREAM_CALLER, 2, &c));
    CHECK(a != c);
    CHECK_OK(viking_queue_reader(&b->queue, b->streams[0], 1, &a));
    CHECK_OK(viking_queue_reader(&b->queue, b->streams[0], 2, &c));
    CHECK(a == c && b->queue.reader_count == 3);
    bench_close(b);
}

/* ---- free ---- */

static void after_first(bench *b, uint32_t unused)
{
    (void)unused;
    CHECK_OK(viking_queue_after(&b->queue, &b->fences[0]));
}

static void after_second(bench *b, uint32_t unused)
{
    (void)unused;
    CHECK_OK(viking_queue_after(&b->queue, &b->fences[1]));
}

static void one_event_serves_all_releases_up_to_it(void)
{
    bench *b = bench_open(0);
    uint32_t who = reader(b, 0);
    unsigned records = b->backend->records;
    CHECK_OK(viking_queue_release(&b->queue, who, &b->fences[0]));
    CHECK_OK(viking_queue_release(&b->queue, who, &b->fences[1]));
    CHECK(b->backend->records == records); /* a single reader's fence is recorded when it is needed */
    CHECK(waits(b, after_second, 0) == 1 && b->backend->records == records + 1);
    CHECK(waits(b, after_first, 0) == 0 && waits(b, after_second, 0) == 0);
    CHECK_OK(viking_queue_release(&b->queue, who, &b->fences[0]));
    CHECK(waits(b, after_first, 0) == 1);
    bench_close(b);
}

static void every_reader_of_a_span_is_waited_for(void)
{
    bench *b = bench_open(0);
    uint32_t first = reader(b, 0), second = reader(b, 1);
    CHECK_OK(viking_queue_release(&b->queue, first, &b->fences[0]));
    CHECK_OK(viking_queue_release(&b->queue, second, &b->fences[0]));
    CHECK_OK(viking_queue_release(&b->queue, second, &b->fences[1]));
    CHECK(waits(b, after_second, 0) == 1);
    CHECK(waits(b, after_first, 0) == 1); /* the second reader's are all waited for */
    bench_close(b);
}

typedef struct slow_read {
    volatile unsigned char *span;
    unsigned char seen;
} slow_read;

static void read_slowly(void *opaque)
{
    slow_read *self = opaque;
    viking_os_sleep_ns(2000000);
    self->seen = *self->span;
}

static void a_copy_comes_after_the_readers_of_its_span(void)
{
    bench *b = bench_open(0);
    slow_read reads[2];
    copy(b, 0, 0);
    for (int i = 0; i < 2; i++) {
        uint32_t who = reader(b, i);
        await(b, 0, who);
        reads[i] = (slow_read){b->span, 99};
        CHECK_OK(viking_host_launch(b->backend->inner, b->streams[i], read_slowly, &reads[i]));
        CHECK_OK(viking_queue_release(&b->queue, who, &b->fences[0]));
    }
    CHECK_OK(viking_queue_after(&b->queue, &b->fences[0]));
    copy(b, 0, 1);
    CHECK_OK(viking_queue_drain(&b->queue));
    CHECK(reads[0].seen == 0 && reads[1].seen == 0 && b->span[0] == 1);
    bench_close(b);
}

static void after_all_and_after_a_stream_wait_for_what_is_queued(void)
{
    for (int way = 0; way < 2; way++) {
        bench *b = bench_open(0);
        slow_read read = {b->span, 99};
        uint32_t who = reader(b, 0);
        copy(b, 0, 0);
        await(b, 0, who);
        CHECK_OK(viking_host_launch(b->backend->inner, b->streams[0], read_slowly, &read));
        CHECK_OK(viking_queue_release(&b->queue, who, &b->fences[0]));
        if (way == 0)
            CHECK_OK(viking_queue_after_all(&b->queue));
        else
            CHECK_OK(viking_queue_after_stream(&b->queue, b->streams[0]));
        copy(b, 0, 1);
        CHECK_OK(viking_queue_drain_copies(&b->queue));
        CHECK(read.seen == 0 && b->span[0] == 1);
        bench_close(b);
    }
}

static void draining_waits_for_readers_too(void)
{
    bench *b = bench_open(0);
    slow_read read = {b->span, 99};
    uint32_t who = reader(b, 0);
    CHECK_OK(viking_host_launch(b->backend->inner, b->streams[0], read_slowly, &read));
    CHECK_OK(viking_queue_release(&b->queue, who, &b->fences[3]));
    CHECK_OK(viking_queue_drain(&b->queue));
    CHECK(read.seen == 0);
    bench_close(b);
}

/* With a second reader, a fence is recorded at the release, and its stream may go. */
static void a_readers_stream_may_go_after_its_release(void)
{
    bench *b = bench_open(0);
    uint32_t first = reader(b, 0), second = reader(b, 1);
    viking_stream gone = b->streams[0];
    CHECK_OK(viking_queue_release(&b->queue, first, &b->fences[0]));
    CHECK_OK(viking_queue_release(&b->queue, second, &b->fences[1]));
    b->backend->operations.stream_close(&b->backend->base, gone);
    CHECK_OK(viking_queue_after(&b->queue, &b->fences[0]));
    CHECK_OK(viking_queue_after_all(&b->queue));
    CHECK(b->backend->dead_streams == 0);
    CHECK_OK(b->backend->operations.stream_open(&b->backend->base, &b->streams[0]));
    bench_close(b);
}

/* ---- faults, and too many readers ---- */

static void a_wait_that_failed_is_made_again(void)
{
    for (uint64_t n = 1; n <= 2; n++) {
        bench *b = bench_open(0);
        slow_read read = {b->span, 99};
        uint32_t who = reader(b, 0);
        copy(b, 0, 0);
        CHECK_OK(viking_queue_drain_copies(&b->queue));
        CHECK_OK(viking_host_launch(b->backend->inner, b->streams[0], read_slowly, &read));
        CHECK_OK(viking_queue_release(&b->queue, who, &b->fences[0]));
        viking_host_fail_at(b->backend->inner, n, VIKING_ERROR_DEVICE); /* its record, its wait */
        CHECK(viking_queue_after(&b->queue, &b->fences[0]) == VIKING_ERROR_DEVICE);
        CHECK_OK(viking_queue_after(&b->queue, &b->fences[0]));
        copy(b, 0, 1);
        CHECK_OK(viking_queue_drain_copies(&b->queue));
        CHECK(read.seen == 0);
        bench_close(b);
    }
}

static void a_copy_that_failed_does_not_count(void)
{
    for (uint64_t n = 1; n <= 2; n++) {
        bench *b = bench_open(0);
        viking_host_fail_at(b->backend->inner, n, VIKING_ERROR_DEVICE); /* the copy, its record */
        CHECK(viking_queue_copy(&b->queue, &b->fences[0], b->span, b->homes[0], BYTES) == VIKING_ERROR_DEVICE);
        CHECK(b->fences[0].copy == 0 && b->queue.copies == 0);
        copy(b, 0, 1);
        CHECK(b->fences[0].copy == 1);
        bench_close(b);
    }
}

/* The longest idle reader's place is taken over; the queue has waited for all that it did. */
static void a_recycled_reader_is_waited_for(void)
{
    bench *b = bench_open(0);
    slow_read read = {b->span, 99};
    viking_stream others[VIKING_READER_LIMIT];
    uint32_t who = reader(b, 0), index = 0;
    for (uint32_t i = 0; i < VIKING_READER_LIMIT; i++)
        CHECK_OK(b->backend->operations.stream_open(&b->backend->base, &others[i]));
    copy(b, 0, 0);
    await(b, 0, who);
    for (int i = 0; i < 10; i++)
        CHECK_OK(viking_host_launch(b->backend->inner, b->streams[0], read_slowly, &read));
    CHECK_OK(viking_queue_release(&b->queue, who, &b->fences[0]));
    for (uint32_t i = 0; i < VIKING_READER_LIMIT; i++) {
        CHECK_OK(viking_queue_reader(&b->queue, others[i], 0, &index));
        CHECK_OK(viking_queue_release(&b->queue, index, &b->fences[1]));
    }
    CHECK(index == who && b->queue.reader_count == VIKING_READER_LIMIT);
    CHECK_OK(viking_queue_after(&b->queue, &b->fences[0]));
    copy(b, 0, 1);
    CHECK_OK(viking_queue_drain_copies(&b->queue));
    CHECK(read.seen == 0);
    for (uint32_t i = 0; i < VIKING_READER_LIMIT; i++)
        b->backend->operations.stream_close(&b->backend->base, others[i]);
    bench_close(b);
}

int main(void)
{
    RUN(a_reader_waits_for_a_copy_once);
    RUN(the_callers_own_stream_is_blocked_by_the_caller);
    RUN(threads_are_readers_of_their_own_on_the_callers_stream_only);
    RUN(one_event_serves_all_releases_up_to_it);
    RUN(every_reader_of_a_span_is_waited_for);
    RUN(a_copy_comes_after_the_readers_of_its_span);
    RUN(after_all_and_after_a_stream_wait_for_what_is_queued);
    RUN(draining_waits_for_readers_too);
    RUN(a_readers_stream_may_go_after_its_release);
    RUN(a_wait_that_failed_is_made_again);
    RUN(a_copy_that_failed_does_not_count);
    RUN(a_recycled_reader_is_waited_for);
    return 0;
}

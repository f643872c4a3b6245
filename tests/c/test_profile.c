/* Profiles: what the streams say of a pass, read once they have said it, and events that are used again. */
#include "recorder.h"

#include "core/profile.h"

typedef struct bench {
    recorder *backend;
    viking_profile profile;
    viking_stream stream;
} bench;

static bench bench_open(void)
{
    viking_backend *inner = NULL;
    bench b;
    CHECK_OK(viking_host_open(NULL, &inner));
    b.backend = recorder_open(inner);
    viking_profile_init(&b.profile, &b.backend->base);
    CHECK_OK(b.backend->operations.stream_open(&b.backend->base, &b.stream));
    return b;
}

static void bench_close(bench *b)
{
    viking_profile_free(&b->profile);
    b->backend->operations.stream_close(&b->backend->base, b->stream);
    b->backend->base.operations->close(&b->backend->base);
}

static void sleep_5_ms(void *unused)
{
    (void)unused;
    viking_os_sleep_ns(5000000);
}

static uint32_t begin(bench *b, viking_profile_kind kind, uint32_t weight)
{
    uint32_t index = 0;
    CHECK_OK(viking_profile_begin(&b->profile, kind, weight, b->stream, &index));
    return index;
}

static void end(bench *b, uint32_t index)
{
    CHECK_OK(viking_profile_end(&b->profile, index, b->stream));
}

static bool read_spans(bench *b, viking_profile_span *spans)
{
    bool ready = false;
    CHECK_OK(viking_profile_read(&b->profile, spans, &ready));
    return ready;
}

static void nothing_is_measured_unless_it_runs(void)
{
    bench b = bench_open();
    unsigned records = b.backend->records;
    CHECK(begin(&b, VIKING_PROFILE_USE, 1) == UINT32_MAX);
    end(&b, UINT32_MAX);
    CHECK(b.backend->records == records && !read_spans(&b, NULL));
    bench_close(&b);
}

static void spans_follow_the_stream(void)
{
    bench b = bench_open();
    viking_profile_span spans[2];
    CHECK_OK(viking_profile_start(&b.profile, b.stream));
    uint32_t use = begin(&b, VIKING_PROFILE_USE, 4);
    CHECK_OK(viking_host_launch(b.backend->inner, b.stream, sleep_5_ms, NULL));
    end(&b, use);
    end(&b, begin(&b, VIKING_PROFILE_COPY, 9));
    CHECK(!read_spans(&b, spans)); /* it still runs */
    viking_profile_stop(&b.profile);
    CHECK_OK(b.backend->operations.stream_drain(&b.backend->base, b.stream));
    CHECK(b.profile.count == 2 && read_spans(&b, spans));
    CHECK(spans[0].weight == 4 && spans[0].kind == VIKING_PROFILE_USE);
    CHECK(spans[1].weight == 9 && spans[1].kind == VIKING_PROFILE_COPY);
    CHECK(spans[0].end_ns - spans[0].begin_ns >= 5000000);
    CHECK(spans[0].begin_ns <= spans[0].end_ns && spans[0].end_ns <= spans[1].begin_ns);
    bench_close(&b);
}

static void a_profile_is_not_ready_before_its_stream_is(void)
{
    bench b = bench_open();
    viking_profile_span span;
    CHECK_OK(viking_profile_start(&b.profile, b.stream));
    uint32_t use = begin(&b, VIKING_PROFILE_USE, 0);
    CHECK_OK(viking_host_launch(b.backend->inner, b.stream, sleep_5_ms, NULL));
    end(&b, use);
    viking_profile_stop(&b.profile);
    CHECK(!read_spans(&b, &span) && !read_spans(&b, NULL));
    CHECK_OK(b.backend->operations.stream_drain(&b.backend->base, b.stream));
    CHECK(read_spans(&b, NULL));
    bench_close(&b);
}

/* Copies run ahead of the stream on which the profile starts. */
static void a_profile_is_not_ready_before_its_origin_is(void)
{
    bench b = bench_open();
    viking_profile_span span;
    viking_stream copies = VIKING_STREAM_CALLER;
    uint32_t index = 0;
    CHECK_OK(viking_host_launch(b.backend->inner, b.stream, sleep_5_ms, NULL));
    CHECK_OK(viking_profile_start(&b.profile, b.stream));
    CHECK_OK(viking_profile_begin(&b.profile, VIKING_PROFILE_COPY, 0, copies, &index));
    CHECK_OK(viking_profile_end(&b.profile, index, copies));
    viking_profile_stop(&b.profile);
    CHECK(!read_spans(&b, &span));
    CHECK_OK(b.backend->operations.stream_drain(&b.backend->base, b.stream));
    CHECK(read_spans(&b, &span));
    bench_close(&b);
}

static void a_use_that_never_got_its_bytes_spoils_the_profile(void)
{
    bench b = bench_open();
    viking_profile_span spans[2];
    CHECK_OK(viking_profile_start(&b.profile, b.stream));
    begin(&b, VIKING_PROFILE_USE, 0);
    end(&b, begin(&b, VIKING_PROFILE_USE, 1));
    viking_profile_stop(&b.profile);
    CHECK_OK(b.backend->operations.stream_drain(&b.backend->base, b.stream));
    CHECK(!read_spans(&b, spans));
    bench_close(&b);
}

static void events_are_made_once(void)
{
    enum { SPANS = 700 };
    bench b = bench_open();
    viking_profile_span *spans = calloc(SPANS, sizeof *spans);
    unsigned made = 0;
    CHECK(spans != NULL);
    for (int round = 0; round < 3; round++) {
        unsigned others = b.backend->others;
        CHECK_OK(viking_profile_start(&b.profile, b.stream));
        for (uint32_t i = 0; i < SPANS; i++)
            end(&b, begin(&b, VIKING_PROFILE_USE, i));
        viking_profile_stop(&b.profile);
        CHECK(b.backend->others - others == (round == 0 ? 2 * SPANS + 1 : 0));
        made += b.backend->others - others;
        CHECK_OK(b.backend->operations.stream_drain(&b.backend->base, b.stream));
        CHECK(b.profile.count == SPANS && read_spans(&b, spans));
        for (uint32_t i = 0; i < SPANS; i++)
            CHECK(spans[i].weight == i && spans[i].begin_ns <= spans[i].end_ns);
    }
    CHECK(made == 2 * SPANS + 1);
    free(spans);
    bench_close(&b);
}

static void any_call_may_fail(void)
{
    uint64_t n = 1;
    for (bool hit = true; hit; n++) {
        bench b = bench_open();
        viking_profile_span span;
        uint32_t index = UINT32_MAX;
        bool ready = false;
        viking_host_fail_at(b.backend->inner, n, VIKING_ERROR_DEVICE);
        viking_status status = viking_profile_start(&b.profile, b.stream);
        if (status == VIKING_OK)
            status = viking_profile_begin(&b.profile, VIKING_PROFILE_USE, 0, b.stream, &index);
        if (status == VIKING_OK)
            status = viking_profile_end(&b.profile, index, b.stream);
        viking_profile_stop(&b.profile);
        if (status == VIKING_OK)
            status = b.backend->operations.stream_drain(&b.backend->base, b.stream);
        if (status == VIKING_OK)
            status = viking_profile_read(&b.profile, &span, &ready);
        hit = status != VIKING_OK;
        CHECK(!hit || status == VIKING_ERROR_DEVICE);
        viking_host_fail_at(b.backend->inner, 0, VIKING_OK);
        bench_close(&b);
    }
    CHECK(n == 13);
}

int main(void)
{
    RUN(nothing_is_measured_unless_it_runs);
    RUN(spans_follow_the_stream);
    RUN(a_profile_is_not_ready_before_its_stream_is);
    RUN(a_profile_is_not_ready_before_its_origin_is);
    RUN(a_use_that_never_got_its_bytes_spoils_the_profile);
    RUN(events_are_made_once);
    RUN(any_call_may_fail);
    return 0;
}

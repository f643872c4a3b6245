/* Weights in pageable and borrowed memory travel through the window, in slots, and every use finds its bytes. */
#include "tagged.h"

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
enum { SEEDS = 40 };
#else
enum { SEEDS = 200 };
#endif

/* Put the home of w over pieces of a copy of it, cut at any byte and laid out in memory in another order. */
static unsigned char *borrow(tagged *t, uint32_t w, uint64_t *random)
{
    size_t bytes = (size_t)t->bytes[w], cut = 1 + random_below(random, (uint32_t)bytes - 1);
    unsigned char *memory = malloc(bytes);
    CHECK(memory != NULL);
    viking_home_read(t->homes[w], 0, memory + (bytes - cut), cut, 1);
    viking_home_read(t->homes[w], cut, memory, bytes - cut, 1);
    viking_piece pieces[2] = {{0, memory + (bytes - cut), cut}, {cut, memory, bytes - cut}};
    viking_home_close(t->homes[w]);
    CHECK_OK(viking_home_over(pieces, 2, bytes, &t->homes[w]));
    return memory;
}

static tagged *open_staged(const viking_host_options *options, uint32_t count, const uint64_t *bytes, uint32_t streams)
{
    viking_backend *inner = NULL;
    CHECK_OK(viking_host_open(options, &inner));
    tagged *t = tagged_prepare(inner, tagged_launch_on_host, count, bytes);
    t->stream_count = streams;
    for (uint32_t s = 0; s < streams; s++)
        CHECK_OK(t->backend->operations.stream_open(&t->backend->base, &t->streams[s]));
    return t;
}

/* A third of the weights each pinned, pageable and borrowed; another window in mid-run, now and then none. */
static void stream_model(uint64_t seed)
{
    uint64_t random = seed * UINT64_C(0x9E3779B97F4A7C15) + 3, bytes[TAGGED_WEIGHTS];
    unsigned char *borrowed[TAGGED_WEIGHTS] = {NULL};
    viking_host_options options = {.delay_ns = seed % 3 == 0 ? 0 : 4000u << seed % 4,
                                   .seed = seed,
                                   .bytes_per_second = seed % 5 == 4 ? 200000000u : 0};
    uint32_t count = 3 + random_below(&random, 10);
    viking_trace trace;
    viking_trace_init(&trace);
    random_sizes(bytes, count, 1 + random_below(&random, 12), &random);
    tagged *t = open_staged(&options, count, bytes, 1 + (uint32_t)seed % 3);
    t->random = random;
    for (uint32_t w = 0; w < count; w++)
        if (random_below(&random, 3) == 0)
            borrowed[w] = borrow(t, w, &random);
    CHECK_OK(tagged_attach(t));
    CHECK_OK(tagged_layout(t, tagged_budget(t, random_below(&random, 9)), t->streams[0]));
    for (uint32_t w = 0; w < count; w++)
        if (!borrowed[w] && random_below(&random, 2) == 0)
            CHECK_OK(viking_engine_pin(t->engine, t->numbers[w]));
    checkpointed_step(&trace, count, 3);
    for (uint32_t pass = 0; pass < 5; pass++) {
        if (pass % 2 == 0) /* 1 to 8 slots of one alignment, or none */
            CHECK_OK(viking_engine_use_window(t->engine, (uint64_t)VIKING_ALIGNMENT * (random_below(&random, 9))));
        if (pass == 3)
            CHECK_OK(tagged_layout(t, tagged_budget(t, random_below(&random, 9)), t->streams[0]));
        CHECK_OK(tagged_pass(t, 0, &trace));
    }
    tagged_close(t);
    for (uint32_t w = 0; w < count; w++)
        free(borrowed[w]);
    viking_trace_free(&trace);
}

static void every_use_finds_its_bytes_through_the_window(void)
{
    for (uint64_t seed = 0; seed < SEEDS; seed++)
        stream_model(seed);
}

static void sleep_2_ms(void *unused)
{
    (void)unused;
    viking_os_sleep_ns(2000000);
}

static const uint64_t six[] = {2048, 2048, 2048, 2048, 2048, 2048};

static tagged *open_six(uint64_t window_bytes)
{
    tagged *t = open_staged(NULL, 6, six, 1);
    CHECK_OK(tagged_attach(t));
    CHECK_OK(tagged_layout(t, tagged_smallest(t), t->streams[0]));
    CHECK_OK(viking_engine_use_window(t->engine, window_bytes));
    return t;
}

static void use(tagged *t, uint32_t w)
{
    viking_acquired acquired;
    CHECK_OK(tagged_acquire(t, w, t->streams[0], &acquired));
    tagged_compute(t, w, &acquired, t->streams[0]);
    CHECK_OK(viking_engine_release(t->engine, acquired.ticket, t->streams[0]));
}

/* The device is late: what it has not taken out of a slot yet must not be overwritten. */
static void a_slot_is_filled_after_the_device_has_emptied_it(void)
{
    tagged *t = open_six(2 * VIKING_ALIGNMENT);
    for (uint32_t i = 0; i < 12; i++) {
        t->launch(t->backend->inner, t->engine->queue.stream, sleep_2_ms, NULL);
        use(t, i % 6);
    }
    tagged_close(t);
}

/* The host is late: what it has not put into a slot yet must not be copied. */
static void a_slot_is_emptied_after_the_host_has_filled_it(void)
{
    tagged *t = open_six(2 * VIKING_ALIGNMENT);
    for (uint32_t i = 0; i < 12; i++) {
        t->launch(t->backend->inner, t->engine->queue.staging.stream, sleep_2_ms, NULL);
        use(t, i % 6);
    }
    tagged_close(t);
}

static void an_edit_waits_for_the_host_copies_that_read_the_home(void)
{
    tagged *t = open_six(2048);
    for (uint32_t i = 0; i < 12; i++) {
        uint32_t w = i % 6;
        t->launch(t->backend->inner, t->engine->queue.staging.stream, sleep_2_ms, NULL);
        use(t, w);
        CHECK_OK(viking_engine_drain_copies(t->engine));
        t->versions[w]++;
        tagged_fill(t, w);
        CHECK_OK(viking_engine_invalidate(t->engine, t->numbers[w]));
    }
    tagged_close(t);
}

/* The host copy is queued, and what would take its bytes to the device fails: it still reads the home. */
static void a_drain_waits_for_host_copies_that_no_device_copy_follows(void)
{
    tagged *t = open_six(2048);
    const viking_staging *staging = &t->engine->queue.staging;
    for (uint64_t n = 1; n < 16; n++) {
        viking_acquired acquired;
        uint32_t w = 1 + (uint32_t)n % 5, slot = staging->next;
        t->launch(t->backend->inner, staging->stream, sleep_2_ms, NULL);
        viking_host_fail_at(t->backend->inner, n, VIKING_ERROR_DEVICE);
        viking_status status = tagged_acquire(t, w, t->streams[0], &acquired);
        viking_host_fail_at(t->backend->inner, 0, VIKING_OK);
        if (status == VIKING_OK)
            CHECK_OK(viking_engine_release(t->engine, acquired.ticket, t->streams[0]));
        CHECK_OK(viking_engine_drain_copies(t->engine));
        uint32_t place = 0, word = tag_word(w, t->versions[w], 0);
        memcpy(&place, (char *)staging->window->address + slot * staging->slot_bytes, sizeof place);
        t->versions[w]++;
        tagged_fill(t, w); /* a host copy that comes now finds the next version */
        CHECK_OK(viking_engine_invalidate(t->engine, t->numbers[w]));
        CHECK_OK(t->backend->operations.stream_drain(&t->backend->base, staging->stream));
        uint32_t after = 0;
        memcpy(&after, (char *)staging->window->address + slot * staging->slot_bytes, sizeof after);
        CHECK(after == place && (status != VIKING_OK || place == word));
    }
    for (uint32_t w = 0; w < 6; w++)
        use(t, w);
    tagged_close(t);
}

static void a_window_may_come_go_and_be_refused(void)
{
    viking_host_options options = {.pin_limit_bytes = 2 * viking_os_page_bytes()};
    tagged *t = open_staged(&options, 6, six, 1);
    CHECK_OK(tagged_attach(t));
    CHECK_OK(tagged_layout(t, tagged_smallest(t), t->streams[0]));
    CHECK(viking_engine_use_window(t->engine, 3 * viking_os_page_bytes()) == VIKING_ERROR_NO_HOST_MEMORY);
    CHECK(viking_engine_use_window(t->engine, VIKING_ALIGNMENT - 1) == VIKING_ERROR_INVALID);
    CHECK(tagged_stats(t).window_bytes == 0 && viking_host_pinned_bytes(t->backend->inner) == 0);
    use(t, 0);
    CHECK_OK(viking_engine_use_window(t->engine, viking_os_page_bytes()));
    CHECK_OK(viking_engine_pin(t->engine, t->numbers[1]));
    CHECK(tagged_stats(t).window_bytes == viking_os_page_bytes());
    CHECK(tagged_stats(t).pinned_bytes == viking_host_pinned_bytes(t->backend->inner));
    CHECK(tagged_stats(t).staged_bytes == 5 * 2048);
    for (uint32_t w = 0; w < 6; w++)
        use(t, w);
    CHECK_OK(viking_engine_use_window(t->engine, 0));
    CHECK(viking_host_pinned_bytes(t->backend->inner) == viking_os_page_bytes());
    use(t, 2);
    tagged_close(t);
}

static void a_weight_moves_to_another_home(void)
{
    tagged *t = open_six(2048);
    viking_home *former[6], *small = NULL;
    CHECK_OK(viking_home_open(100, &small));
    CHECK(viking_engine_rehome(t->engine, t->numbers[0], small) == VIKING_ERROR_INVALID);
    for (uint32_t w = 0; w < 6; w++) {
        former[w] = t->homes[w];
        t->launch(t->backend->inner, t->engine->queue.staging.stream, sleep_2_ms, NULL);
        use(t, w);
        CHECK_OK(viking_home_open(t->bytes[w], &t->homes[w]));
        tagged_fill(t, w);
        CHECK_OK(viking_engine_rehome(t->engine, t->numbers[w], t->homes[w]));
        memset(former[w]->address, 0xff, t->bytes[w]);
        viking_home_close(former[w]);
        use(t, w);
    }
    viking_home_close(small);
    tagged_close(t);
}

int main(void)
{
    RUN(a_slot_is_filled_after_the_device_has_emptied_it);
    RUN(a_slot_is_emptied_after_the_host_has_filled_it);
    RUN(every_use_finds_its_bytes_through_the_window);
    RUN(an_edit_waits_for_the_host_copies_that_read_the_home);
    RUN(a_drain_waits_for_host_copies_that_no_device_copy_follows);
    RUN(a_window_may_come_go_and_be_refused);
    RUN(a_weight_moves_to_another_home);
    return 0;
}

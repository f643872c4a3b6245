/* Every use finds its bytes, whatever the delays on either side, the budget, and the order of uses. */
#include "tagged.h"

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
enum { SEEDS = 40 };
#else
enum { SEEDS = 200 };
#endif

static viking_host_options delays(uint64_t seed)
{
    return (viking_host_options){.delay_ns = seed % 3 == 0 ? 0 : 4000u << seed % 4,
                                 .seed = seed,
                                 .bytes_per_second = seed % 5 == 4 ? 200000000u : 0};
}

/* A model of random size under a random budget; then passes over what `make` says, with relayouts in between. */
static void stream_model(uint64_t seed, uint32_t streams,
                         void (*make)(viking_trace *trace, uint32_t count, uint64_t *random))
{
    uint64_t random = seed * UINT64_C(0x9E3779B97F4A7C15) + 7, bytes[TAGGED_WEIGHTS];
    viking_host_options options = delays(seed);
    random_below(&random, 2);
    uint32_t count = 3 + random_below(&random, 12);
    random_sizes(bytes, count, 1 + random_below(&random, 12), &random);
    tagged *t = tagged_open(&options, count, bytes, streams);
    t->random = random;
    CHECK_OK(tagged_layout(t, tagged_budget(t, random_below(&random, 9)), tagged_stream(t)));
    for (uint32_t pass = 0; pass < 4; pass++) {
        viking_trace trace;
        uint64_t same = seed + 99;
        viking_trace_init(&trace);
        make(&trace, count, seed % 2 ? &same : &random);
        if (pass == 2 && seed % 3 != 1)
            CHECK_OK(tagged_layout(t, tagged_budget(t, random_below(&random, 9)), tagged_stream(t)));
        CHECK_OK(tagged_pass(t, seed % 4 == 0 ? pass % 2 : 0, &trace));
        viking_trace_free(&trace);
    }
    tagged_close(t);
}

static void step_of_blocks(viking_trace *trace, uint32_t count, uint64_t *random)
{
    (void)random;
    checkpointed_step(trace, count, 3);
}

static void plain_step(viking_trace *trace, uint32_t count, uint64_t *random)
{
    (void)random;
    sweep_weights(trace, count, 1000);
}

static void sampling(viking_trace *trace, uint32_t count, uint64_t *random)
{
    (void)random;
    forward_only(trace, count);
}

static void any_order(viking_trace *trace, uint32_t count, uint64_t *random)
{
    random_order(trace, count, 2 * count, random);
}

/* Each weight twice, now and then left out, now and then an earlier one in between. */
static void repeated_and_skipped(viking_trace *trace, uint32_t count, uint64_t *random)
{
    for (uint32_t w = 0; w < count; w++) {
        if (random_below(random, 5) == 0)
            continue;
        use_weight(trace, w, 1000);
        use_weight(trace, w, 1000);
        if (random_below(random, 5) == 0)
            use_weight(trace, random_below(random, count), 1000);
    }
    use_weight(trace, 0, 1000);
}

static void each_seed(uint32_t streams, void (*make)(viking_trace *trace, uint32_t count, uint64_t *random))
{
    for (uint64_t seed = 0; seed < SEEDS; seed++)
        stream_model(seed, streams, make);
}

static void a_checkpointed_step_finds_its_bytes(void)
{
    each_seed(1, step_of_blocks);
}

static void a_plain_step_finds_its_bytes(void)
{
    each_seed(1, plain_step);
}

static void sampling_finds_its_bytes(void)
{
    each_seed(1, sampling);
}

static void any_order_finds_its_bytes(void)
{
    each_seed(1, any_order);
}

static void repeated_and_skipped_layers_find_their_bytes(void)
{
    each_seed(1, repeated_and_skipped);
}

static void several_streams_find_their_bytes(void)
{
    each_seed(3, step_of_blocks);
    each_seed(4, any_order);
}

static void the_callers_own_stream_finds_its_bytes(void)
{
    each_seed(0, step_of_blocks);
    each_seed(0, any_order);
}

/* ---- nested uses ---- */

/* Traces of random_trace.h: nested and crossing uses, any sizes. Played by one thread, some of them have no room. */
static void nested_uses_find_their_bytes(void)
{
    unsigned runs = 0, refused = 0;
    for (uint64_t seed = 0; seed < 2 * SEEDS; seed++) {
        viking_host_options options = delays(seed);
        random_case it;
        random_case_make(seed, &it);
        for (uint32_t w = 0; w < it.count; w++)
            it.bytes[w] = VIKING_ALIGNMENT * (1 + it.bytes[w] / VIKING_ALIGNMENT % 16);
        tagged *t = tagged_open(&options, it.count, it.bytes, 1 + (uint32_t)seed % 3);
        t->random += seed;
        for (uint32_t round = 0; round < 2; round++) { /* the second layout knows the path */
            CHECK_OK(tagged_layout(t, tagged_budget(t, random_below(&t->random, 9)), t->streams[0]));
            for (uint32_t pass = 0; pass < 3; pass++)
                CHECK_OK(tagged_pass(t, 5, &it.trace));
        }
        tagged_drain(t);
        runs += atomic_load(&t->runs);
        refused += atomic_load(&t->refused);
        tagged_close(t);
        viking_trace_free(&it.trace);
    }
    printf("      %u uses, %u refused for want of room\n", runs, refused);
    CHECK(runs > 20 * refused);
}

/* ---- what the fences are for ---- */

typedef struct tenant {
    unsigned char *memory;
    size_t bytes;
} tenant;

static void write_late(void *opaque)
{
    tenant *self = opaque;
    viking_os_sleep_ns(3000000);
    memset(self->memory, 0xEE, self->bytes);
}

/* The allocator gave us memory that the stream's earlier work still writes to. */
static void the_slab_is_filled_after_its_last_tenant(void)
{
    static const uint64_t bytes[] = {1024, 2048, 512, 4096};
    tagged *t = tagged_open(NULL, 4, bytes, 2);
    viking_trace trace;
    tenant before = {.bytes = tagged_total(t)};
    viking_trace_init(&trace);
    sweep_weights(&trace, 4, 1000);
    t->slab = ALIGNED_ALLOC(VIKING_ALIGNMENT, before.bytes);
    CHECK(t->slab != NULL);
    before.memory = t->slab;
    t->launch(t->backend->inner, t->streams[0], write_late, &before);
    CHECK_OK(tagged_layout(t, before.bytes, t->streams[0]));
    t->stream_count = 1; /* only one of the two is used from here on: the copies must wait, not the readers */
    viking_stream other = t->streams[1];
    t->streams[1] = t->streams[0];
    t->streams[0] = other;
    CHECK_OK(tagged_pass(t, 1, &trace));
    t->stream_count = 2;
    tagged_drain(t); /* the tenant is gone */
    t->stream_count = 1;
    CHECK_OK(tagged_pass(t, 1, &trace));
    t->stream_count = 2;
    tagged_close(t);
    viking_trace_free(&trace);
}

static void sleep_2_ms(void *unused)
{
    (void)unused;
    viking_os_sleep_ns(2000000);
}

/* A stream that has done its part may be destroyed before the copies that overwrite what it read are queued. */
static void a_stream_may_go_once_another_is_used(void)
{
    static const uint64_t bytes[] = {1024, 1024, 1024, 1024, 1024, 1024};
    tagged *t = tagged_open(NULL, 6, bytes, 2);
    viking_trace forward, rest;
    viking_trace_init(&forward);
    viking_trace_init(&rest);
    use_weight(&forward, 0, 1000);
    use_weight(&forward, 1, 1000);
    for (uint32_t w = 2; w < 6; w++)
        use_weight(&rest, w, 1000);
    CHECK_OK(tagged_layout(t, tagged_smallest(t), t->streams[0]));
    t->stream_count = 1;
    CHECK_OK(tagged_pass(t, 1, &forward));
    viking_stream first = t->streams[0];
    t->streams[0] = t->streams[1];
    viking_acquired use;
    CHECK_OK(tagged_acquire(t, 1, t->streams[0], &use)); /* from here on there are two readers */
    CHECK_OK(viking_engine_release(t->engine, use.ticket, t->streams[0]));
    t->backend->operations.stream_close(&t->backend->base, first);
    CHECK_OK(tagged_walk(t, &rest));
    CHECK_OK(tagged_pass(t, 1, &forward));
    tagged_close(t);
    viking_trace_free(&forward);
    viking_trace_free(&rest);
}

/* Slow kernels everywhere: a copy that does not wait for them overwrites what they are about to read. */
static void copies_wait_for_slow_kernels(void)
{
    static const uint64_t bytes[] = {2048, 2048, 2048, 2048, 2048, 2048};
    tagged *t = tagged_open(NULL, 6, bytes, 2);
    CHECK_OK(tagged_layout(t, tagged_smallest(t), t->streams[0]));
    for (uint32_t i = 0; i < 48; i++) {
        viking_stream stream = tagged_stream(t);
        viking_acquired use;
        if (i % 6 == 0)
            t->launch(t->backend->inner, stream, sleep_2_ms, NULL);
        CHECK_OK(tagged_acquire(t, i % 6, stream, &use));
        tagged_compute(t, i % 6, &use, stream);
        CHECK_OK(viking_engine_release(t->engine, use.ticket, stream));
    }
    tagged_close(t);
}

int main(void)
{
    RUN(the_slab_is_filled_after_its_last_tenant);
    RUN(a_stream_may_go_once_another_is_used);
    RUN(copies_wait_for_slow_kernels);
    RUN(a_checkpointed_step_finds_its_bytes);
    RUN(a_plain_step_finds_its_bytes);
    RUN(sampling_finds_its_bytes);
    RUN(any_order_finds_its_bytes);
    RUN(repeated_and_skipped_layers_find_their_bytes);
    RUN(several_streams_find_their_bytes);
    RUN(the_callers_own_stream_finds_its_bytes);
    RUN(nested_uses_find_their_bytes);
    return 0;
}

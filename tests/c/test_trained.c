/* Weights that the host steps between passes, and gradients on their way to it. */
#include "tagged.h"

#include "core/download.h"

enum { WORDS = 4096, BYTES = WORDS * 4, GRADIENTS = 3 * VIKING_DOWNLOAD_EVENTS };

/* ---- gradients ---- */

typedef struct world {
    viking_backend *backend;
    viking_downloads downloads;
    viking_stream stream;
    uint32_t *source;
    uint32_t *host[GRADIENTS];
    uint64_t tickets[GRADIENTS];
} world;

typedef struct kernel {
    uint32_t *memory;
    uint32_t value;
    uint64_t delay_ns;
} kernel;

static void write_words(void *opaque)
{
    kernel *self = opaque;
    viking_os_sleep_ns(self->delay_ns); /* a slow kernel */
    for (uint32_t i = 0; i < WORDS; i++)
        self->memory[i] = self->value + i;
    free(self);
}

static void launch(world *w, uint32_t value, uint64_t delay_ns)
{
    kernel *work = malloc(sizeof *work);
    CHECK(work != NULL);
    *work = (kernel){.memory = w->source, .value = value, .delay_ns = delay_ns};
    CHECK_OK(viking_host_launch(w->backend, w->stream, write_words, work));
}

static bool holds(const uint32_t *memory, uint32_t value)
{
    uint32_t i = 0;
    while (i < WORDS && memory[i] == value + i)
        i++;
    if (i < WORDS)
        fprintf(stderr, "word %u is wrong: %u instead of %u\n", i, memory[i], value + i);
    return i == WORDS;
}

static world *open_world(uint64_t bytes_per_second)
{
    viking_host_options options = {.bytes_per_second = bytes_per_second};
    world *w = calloc(1, sizeof *w);
    CHECK(w != NULL);
    CHECK_OK(viking_host_open(&options, &w->backend));
    CHECK_OK(viking_downloads_open(&w->downloads, w->backend));
    CHECK_OK(w->backend->operations->stream_open(w->backend, &w->stream));
    w->source = calloc(WORDS, sizeof *w->source);
    CHECK(w->source != NULL);
    for (uint32_t i = 0; i < GRADIENTS; i++) {
        w->host[i] = calloc(WORDS, sizeof **w->host);
        CHECK(w->host[i] != NULL);
    }
    return w;
}

static void close_world(world *w)
{
    w->backend->operations->stream_close(w->backend, w->stream);
    viking_downloads_close(&w->downloads);
    w->backend->operations->close(w->backend);
    for (uint32_t i = 0; i < GRADIENTS; i++)
        free(w->host[i]);
    free(w->source);
    free(w);
}

static void download(world *w, uint32_t i)
{
    CHECK_OK(viking_downloads_queue(&w->downloads, w->host[i], w->source, BYTES, w->stream, &w->tickets[i]));
}

static void a_gradient_is_copied_once_it_is_computed(void)
{
    world *w = open_world(0);
    for (uint32_t i = 0; i < 8; i++) {
        launch(w, 100 * i, 2000000);
        download(w, i);
        CHECK_OK(viking_downloads_await(&w->downloads, w->tickets[i]));
        CHECK(holds(w->host[i], 100 * i));
    }
    close_world(w);
}

/* One buffer for all gradients: the next kernel overwrites it once the copy has read it. */
static void its_device_memory_is_used_again_once_it_was_copied(void)
{
    world *w = open_world(20000000);
    for (uint32_t i = 0; i < 8; i++) {
        launch(w, 100 * i, 0);
        download(w, i);
        CHECK_OK(viking_downloads_release(&w->downloads, w->tickets[i], w->stream));
    }
    launch(w, 7, 0);
    CHECK_OK(viking_downloads_await(&w->downloads, UINT64_MAX));
    for (uint32_t i = 0; i < 8; i++)
        CHECK(holds(w->host[i], 100 * i));
    close_world(w);
}

/* The ring of events is smaller than what is on its way; older tickets are waited for all the same, in any order. */
static void any_number_may_be_on_their_way(void)
{
    world *w = open_world(200000000);
    for (uint32_t i = 0; i < GRADIENTS; i++) {
        launch(w, 100 * i, 0);
        download(w, i);
        CHECK_OK(viking_downloads_release(&w->downloads, w->tickets[i], w->stream));
    }
    for (uint32_t i = GRADIENTS; i-- > 0;) {
        uint32_t one = (i * 7) % GRADIENTS;
        CHECK_OK(viking_downloads_await(&w->downloads, w->tickets[one]));
        CHECK(holds(w->host[one], 100 * one));
    }
    close_world(w);
}

/* Two event calls, one wait, one copy; nothing is made but by the first. */
static void a_gradient_costs_four_calls(void)
{
    world *w = open_world(0);
    download(w, 0);
    uint64_t before = viking_host_calls(w->backend);
    for (uint32_t i = 1; i < GRADIENTS; i++)
        download(w, i);
    CHECK(viking_host_calls(w->backend) - before == 4 * (GRADIENTS - 1));
    close_world(w);
}

static void after_a_failed_call_nothing_more_arrives(void)
{
    for (uint32_t first = 0; first < 2; first++) {
        for (uint64_t n = 1; n <= (first == 0 ? 2 + VIKING_DOWNLOAD_EVENTS + 4 : 4); n++) {
            world *w = open_world(20000000);
            if (first > 0) {
                download(w, GRADIENTS - 1);
                CHECK_OK(viking_downloads_release(&w->downloads, w->tickets[GRADIENTS - 1], w->stream));
            }
            launch(w, 5, 0);
            viking_host_fail_at(w->backend, n, VIKING_ERROR_DEVICE);
            CHECK(viking_downloads_queue(&w->downloads, w->host[0], w->source, BYTES, w->stream, &w->tickets[0]) ==
                  VIKING_ERROR_DEVICE);
            viking_host_fail_at(w->backend, 0, VIKING_OK);
            memset(w->host[0], 0, BYTES); /* a copy that is still in flight would write here */
            launch(w, 9, 0);
            download(w, 1);
            CHECK_OK(viking_downloads_await(&w->downloads, w->tickets[1]));
            CHECK(holds(w->host[1], 9));
            CHECK(w->host[0][0] == 0 && w->host[0][WORDS - 1] == 0);
            close_world(w);
        }
    }
}

/* ---- steps ---- */

static void step(tagged *t, uint32_t w)
{
    t->versions[w]++;
    tagged_fill(t, w);
}

static uint64_t fetches(const tagged *t, uint32_t w)
{
    viking_weight_stats stats;
    CHECK_OK(viking_engine_weight_stats(t->engine, t->numbers[w], &stats));
    return stats.fetches;
}

/* Every other weight is stepped between passes, and nobody tells; each pass computes with what the step has left. */
static void a_step_between_passes_is_seen(void)
{
    for (uint64_t seed = 0; seed < 60; seed++) {
        uint64_t bytes[12], random = seed + 5;
        viking_host_options options = {
            .delay_ns = seed % 2 ? 8000 : 0, .seed = seed, .bytes_per_second = seed % 3 ? 0 : 200000000};
        random_sizes(bytes, 12, 8, &random);
        tagged *t = tagged_open(&options, 12, bytes, 1 + (uint32_t)seed % 2);
        for (uint32_t w = 0; w < 12; w += 2)
            CHECK_OK(viking_engine_set_trained(t->engine, t->numbers[w], VIKING_STEPPED_BETWEEN));
        CHECK_OK(tagged_layout(t, tagged_budget(t, (uint32_t)seed % 9), t->streams[0]));
        viking_trace trace;
        viking_trace_init(&trace);
        checkpointed_step(&trace, 12, 3);
        for (uint32_t pass = 0; pass < 6; pass++) {
            uint64_t before = fetches(t, 0);
            CHECK_OK(tagged_pass(t, 1, &trace));
            CHECK(fetches(t, 0) - before <= 3 && fetches(t, 0) > before);
            tagged_drain(t);
            for (uint32_t w = 0; w < 12; w += 2) /* a copy that reads ahead of its time is a race with this */
                step(t, w);
        }
        viking_trace_free(&trace);
        tagged_close(t);
    }
}

/* The look-ahead crosses the end of the pass for frozen weights alone. */
static void nothing_trained_is_fetched_ahead_of_its_pass(void)
{
    static const uint64_t bytes[] = {1024, 1024, 1024, 1024};
    tagged *t = tagged_open(NULL, 4, bytes, 1);
    viking_trace trace;
    viking_trace_init(&trace);
    forward_only(&trace, 4);
    CHECK_OK(viking_engine_set_trained(t->engine, t->numbers[1], VIKING_STEPPED_BETWEEN));
    CHECK_OK(tagged_layout(t, 2048, t->streams[0]));
    for (uint32_t pass = 0; pass < 4; pass++)
        CHECK_OK(tagged_pass(t, 1, &trace));
    CHECK(fetches(t, 0) == 5); /* of the next pass */
    CHECK(fetches(t, 1) == 4);
    viking_trace_free(&trace);
    tagged_close(t);
}

static void use(tagged *t, uint32_t w)
{
    viking_acquired acquired;
    CHECK_OK(tagged_acquire(t, w, t->streams[0], &acquired));
    tagged_compute(t, w, &acquired, t->streams[0]);
    CHECK_OK(viking_engine_release(t->engine, acquired.ticket, t->streams[0]));
    tagged_drain(t);
}

/* Without a root: by what is known of the weight from the start, or by its gradient. */
static void a_step_at_any_moment_is_seen(void)
{
    static const uint64_t bytes[] = {1024, 2048, 1024};
    tagged *t = tagged_open(NULL, 3, bytes, 1);
    CHECK_OK(viking_engine_set_trained(t->engine, t->numbers[0], VIKING_STEPPED_ANYTIME));
    CHECK_OK(viking_engine_set_trained(t->engine, t->numbers[1], VIKING_STEPPED_BETWEEN));
    CHECK_OK(tagged_layout(t, tagged_total(t), t->streams[0]));
    use(t, 1);
    CHECK_OK(viking_engine_expect_step(t->engine, t->numbers[1]));
    for (uint32_t i = 0; i < 40; i++) {
        for (uint32_t w = 0; w < 3; w++) {
            use(t, w);
            if (w < 2)
                step(t, w);
        }
    }
    CHECK(fetches(t, 0) == 40 && fetches(t, 1) == 41 && fetches(t, 2) == 1);
    bool stale = false;
    CHECK_OK(viking_engine_pass_begin(t->engine, 1, true, t->streams[0], &stale));
    for (uint32_t i = 0; i < 3; i++)
        use(t, 1);
    CHECK(fetches(t, 1) == 42);
    CHECK_OK(viking_engine_set_trained(t->engine, t->numbers[0], VIKING_FROZEN));
    for (uint32_t i = 0; i < 3; i++)
        use(t, 0);
    CHECK(fetches(t, 0) == 41);
    tagged_close(t);
}

static void a_resident_that_is_trained_is_pinned(void)
{
    static const uint64_t bytes[] = {1024, 1024};
    tagged *t = tagged_open(NULL, 2, bytes, 1);
    CHECK_OK(viking_engine_set_trained(t->engine, t->numbers[1], VIKING_STEPPED_BETWEEN));
    CHECK_OK(tagged_layout(t, tagged_total(t), t->streams[0]));
    for (uint32_t w = 0; w < 2; w++)
        CHECK_OK(viking_engine_pin(t->engine, t->numbers[w]));
    CHECK(t->homes[0]->pinned_by == NULL && t->homes[1]->pinned_by != NULL);
    CHECK_OK(viking_engine_set_trained(t->engine, t->numbers[1], VIKING_FROZEN));
    CHECK_OK(viking_engine_pin(t->engine, t->numbers[1]));
    CHECK(t->homes[1]->pinned_by == NULL);
    tagged_close(t);
}

int main(void)
{
    RUN(a_gradient_is_copied_once_it_is_computed);
    RUN(its_device_memory_is_used_again_once_it_was_copied);
    RUN(any_number_may_be_on_their_way);
    RUN(a_gradient_costs_four_calls);
    RUN(after_a_failed_call_nothing_more_arrives);
    RUN(a_step_between_passes_is_seen);
    RUN(nothing_trained_is_fetched_ahead_of_its_pass);
    RUN(a_step_at_any_moment_is_seen);
    RUN(a_resident_that_is_trained_is_pinned);
    return 0;
}

/* Tagged weights: every weight's home is filled with words that name it, its version and their place, and the stand-in
 * for a kernel checks, when it runs, that the span it was given holds exactly these words. Whatever goes wrong between
 * the engine's fences shows as a wrong word, by name. */
#ifndef VIKING_TESTS_TAGGED_H
#define VIKING_TESTS_TAGGED_H

#include "recorder.h"

#include "core/engine.h"
#include "core/engine_private.h"
#include "random_trace.h"

#define TAGGED_WEIGHTS 64u
#define TAGGED_STREAMS 4u

typedef void tagged_launch(viking_backend *inner, viking_stream stream, void (*body)(void *), void *argument);

typedef struct tagged {
    recorder *backend;
    tagged_launch *launch;
    viking_engine *engine;
    uint32_t count;
    uint64_t bytes[TAGGED_WEIGHTS];
    viking_home *homes[TAGGED_WEIGHTS];
    uint32_t numbers[TAGGED_WEIGHTS]; /* the engine's */
    uint32_t versions[TAGGED_WEIGHTS];
    void *slab;
    viking_stream streams[TAGGED_STREAMS];
    uint32_t stream_count; /* 0: VIKING_STREAM_CALLER */
    uint64_t random;
    atomic_uint wrong;
    atomic_uint runs;
    atomic_uint refused; /* uses that got BUDGET */
} tagged;

static inline uint32_t tag_word(uint32_t weight, uint32_t version, uint64_t place)
{
    return (weight + 1) * 0x01000193u + version * 0x9E3779B1u + (uint32_t)place * 0x85EBCA77u;
}

static inline void tagged_fill(tagged *t, uint32_t w)
{
    uint64_t words = t->bytes[w] / sizeof(uint32_t);
    uint32_t *source = malloc(t->bytes[w]);
    CHECK(source != NULL);
    for (uint64_t i = 0; i < words; i++)
        source[i] = tag_word(w, t->versions[w], i);
    CHECK_OK(viking_home_fill(t->homes[w], 0, source, t->bytes[w]));
    free(source);
}

/* ---- kernels ---- */

typedef struct tagged_kernel {
    tagged *world;
    const uint32_t *span;
    uint32_t weight;
    uint32_t version;
} tagged_kernel;

static inline void tagged_run(void *opaque)
{
    tagged_kernel *kernel = opaque;
    uint64_t words = kernel->world->bytes[kernel->weight] / sizeof(uint32_t);
    uint64_t bad = 0, first = 0;
    for (int look = 0; look < 2; look++) { /* twice: what is overwritten while it is read shows as well */
        for (uint64_t i = 0; i < words; i++) {
            if (((const volatile uint32_t *)kernel->span)[i] != tag_word(kernel->weight, kernel->version, i)) {
                first = bad == 0 ? i : first;
                bad++;
            }
        }
    }
    if (bad > 0 && atomic_fetch_add(&kernel->world->wrong, 1) == 0)
        fprintf(stderr, "weight %u, version %u: word %llu of %llu is wrong, %llu wrong in two looks\n", kernel->weight,
                kernel->version, (unsigned long long)first, (unsigned long long)words, (unsigned long long)bad);
    atomic_fetch_add(&kernel->world->runs, 1);
    free(kernel);
}

static inline void tagged_launch_on_host(viking_backend *inner, viking_stream stream, void (*body)(void *),
                                         void *argument)
{
    CHECK_OK(viking_host_launch(inner, stream, body, argument));
}

/* What a module's forward does between acquire and release. */
static inline void tagged_compute(tagged *t, uint32_t w, const viking_acquired *use, viking_stream stream)
{
    tagged_kernel *kernel = malloc(sizeof *kernel);
    CHECK(kernel != NULL);
    *kernel = (tagged_kernel){.world = t, .span = use->address, .weight = w, .version = t->versions[w]};
    t->launch(t->backend->inner, stream, tagged_run, kernel);
}

/* ---- opening and closing ---- */

/* Homes and tags; no engine yet. Takes over `inner`. */
static inline tagged *tagged_prepare(viking_backend *inner, tagged_launch *launch, uint32_t count,
                                     const uint64_t *bytes)
{
    tagged *t = calloc(1, sizeof *t);
    CHECK(t != NULL && count <= TAGGED_WEIGHTS);
    t->backend = recorder_open(inner);
    t->launch = launch;
    t->count = count;
    t->random = 88172645463325252u;
    for (uint32_t w = 0; w < count; w++) {
        t->bytes[w] = bytes[w];
        CHECK_OK(viking_home_open(bytes[w], &t->homes[w]));
        tagged_fill(t, w);
    }
    return t;
}

static inline viking_status tagged_attach(tagged *t)
{
    viking_status status = viking_engine_open(&t->backend->base, &t->engine);
    for (uint32_t w = 0; w < t->count && status == VIKING_OK; w++)
        status = viking_engine_add(t->engine, t->homes[w], t->bytes[w], &t->numbers[w]);
    return status;
}

/* Engine and weights over the host backend; `streams` async reader streams, 0: the caller's. */
static inline tagged *tagged_open(const viking_host_options *options, uint32_t count, const uint64_t *bytes,
                                  uint32_t streams)
{
    viking_backend *inner = NULL;
    CHECK_OK(viking_host_open(options, &inner));
    tagged *t = tagged_prepare(inner, tagged_launch_on_host, count, bytes);
    CHECK_OK(tagged_attach(t));
    t->stream_count = streams;
    for (uint32_t s = 0; s < streams; s++)
        CHECK_OK(t->backend->operations.stream_open(&t->backend->base, &t->streams[s]));
    return t;
}

static inline uint64_t tagged_total(const tagged *t)
{
    uint64_t total = 0;
    for (uint32_t w = 0; w < t->count; w++)
        total += t->bytes[w];
    return total;
}

/* Adopt a layout for `budget` bytes; the slab holds all weights, so that it serves any budget. */
static inline viking_status tagged_layout(tagged *t, uint64_t budget, viking_stream stream)
{
    uint64_t bytes = 0;
    viking_status status = viking_engine_layout(t->engine, budget, &bytes);
    if (status != VIKING_OK)
        return status;
    CHECK(bytes <= budget);
    if (t->slab == NULL) {
        t->slab = ALIGNED_ALLOC(VIKING_ALIGNMENT, tagged_total(t) + (TAGGED_WEIGHTS + 8u) * VIKING_ALIGNMENT);
        CHECK(t->slab != NULL);
    }
    return viking_engine_use_layout(t->engine, t->slab, stream);
}

static inline uint64_t tagged_smallest(const tagged *t)
{
    uint64_t smallest = 0, largest = 0;
    CHECK_OK(viking_engine_budget_range(t->engine, &smallest, &largest));
    CHECK(smallest <= largest);
    return smallest;
}

/* `eighths` of the way from the smallest budget to all. */
static inline uint64_t tagged_budget(const tagged *t, uint32_t eighths)
{
    uint64_t smallest = 0, largest = 0;
    CHECK_OK(viking_engine_budget_range(t->engine, &smallest, &largest));
    return smallest + (largest - smallest) * eighths / 8;
}

static inline void tagged_drain(tagged *t)
{
    for (uint32_t s = 0; s < t->stream_count; s++)
        CHECK_OK(t->backend->operations.stream_drain(&t->backend->base, t->streams[s]));
}

/* Everything that ran saw the right bytes. */
static inline void tagged_check(tagged *t)
{
    tagged_drain(t);
    CHECK(atomic_load(&t->wrong) == 0);
    CHECK(t->backend->dead_streams == 0);
}

static inline void tagged_free(tagged *t)
{
    for (uint32_t w = 0; w < t->count; w++)
        viking_home_close(t->homes[w]);
    ALIGNED_FREE(t->slab);
    free(t);
}

static inline void tagged_close(tagged *t)
{
    tagged_check(t);
    for (uint32_t s = 0; s < t->stream_count; s++)
        t->backend->operations.stream_close(&t->backend->base, t->streams[s]);
    viking_engine_close(t->engine);
    tagged_free(t);
}

/* ---- passes ---- */

static inline viking_stream tagged_stream(tagged *t)
{
    return t->stream_count == 0 ? VIKING_STREAM_CALLER : t->streams[random_below(&t->random, t->stream_count)];
}

static inline viking_status tagged_acquire(tagged *t, uint32_t w, viking_stream stream, viking_acquired *out)
{
    viking_status status;
    while ((status = viking_engine_acquire(t->engine, t->numbers[w], stream, out)) == VIKING_BUSY) {
        status = viking_engine_wait_release(t->engine);
        if (status != VIKING_OK)
            break;
    }
    return status;
}

/* Walk a trace, begins and ends in the order of their ticks. A use without room (BUDGET) is counted and left out. Any
 * other failure ends the walk as an exception does: what is in use is released. */
static inline viking_status tagged_walk(tagged *t, const viking_trace *trace)
{
    typedef struct holding {
        viking_acquired use;
        viking_stream stream;
    } holding;
    holding *held = calloc(trace->count + 1u, sizeof *held);
    viking_status status = VIKING_OK;
    CHECK(held != NULL);
    for (uint32_t tick = 0; tick < trace->ticks; tick++) {
        for (uint32_t i = 0; i < trace->count; i++) {
            const viking_use *use = &trace->uses[i];
            if (use->begin == tick && status == VIKING_OK) {
                held[i].stream = tagged_stream(t);
                status = tagged_acquire(t, use->weight, held[i].stream, &held[i].use);
                if (status == VIKING_OK)
                    tagged_compute(t, use->weight, &held[i].use, held[i].stream);
                else
                    held[i].use.ticket = 0;
                if (status == VIKING_ERROR_BUDGET) {
                    atomic_fetch_add(&t->refused, 1);
                    status = VIKING_OK;
                }
            } else if (use->end == tick && held[i].use.ticket != 0) {
                viking_status released = viking_engine_release(t->engine, held[i].use.ticket, held[i].stream);
                status = status == VIKING_OK ? released : status;
            }
        }
    }
    free(held);
    return status;
}

static inline viking_status tagged_pass(tagged *t, uint64_t key, const viking_trace *trace)
{
    bool stale = false;
    viking_status status = viking_engine_pass_begin(t->engine, key, true, tagged_stream(t), &stale);
    return status == VIKING_OK ? tagged_walk(t, trace) : status;
}

static inline viking_engine_stats tagged_stats(const tagged *t)
{
    viking_engine_stats stats;
    CHECK_OK(viking_engine_stats_of(t->engine, &stats));
    return stats;
}

/* ---- traces ---- */

/* Blocks of `size` weights, checkpointed: forward over all, then each block from the last again and back. */
static inline void checkpointed_step(viking_trace *trace, uint32_t count, uint32_t size)
{
    for (uint32_t w = 0; w < count; w++)
        use_weight(trace, w, 1000);
    for (uint32_t end = count; end > 0;) {
        uint32_t begin = (end - 1) / size * size;
        for (uint32_t w = begin; w < end; w++)
            use_weight(trace, w, 1000);
        for (uint32_t w = end; w-- > begin;)
            use_weight(trace, w, 2000);
        end = begin;
    }
}

static inline void forward_only(viking_trace *trace, uint32_t count)
{
    for (uint32_t w = 0; w < count; w++)
        use_weight(trace, w, 1000);
}

static inline void random_order(viking_trace *trace, uint32_t count, uint32_t uses, uint64_t *random)
{
    for (uint32_t i = 0; i < uses; i++)
        use_weight(trace, random_below(random, count), 1000);
}

static inline void random_sizes(uint64_t *bytes, uint32_t count, uint32_t largest, uint64_t *random)
{
    for (uint32_t w = 0; w < count; w++)
        bytes[w] = VIKING_ALIGNMENT * (uint64_t)(1 + random_below(random, largest));
}

#endif

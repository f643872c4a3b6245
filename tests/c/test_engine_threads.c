/* Several threads on one engine, and many streams: right bytes for all, nobody waits for ever. */
#include "tagged.h"

enum { KEY = 21, COUNT = 10 };

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
enum { SEEDS = 12 };
#else
enum { SEEDS = 40 };
#endif

typedef struct worker {
    tagged *world;
    uint64_t random;
    viking_stream stream; /* VIKING_STREAM_CALLER: computes by itself */
    uint32_t uses;
    uint32_t nesting;
    bool begins_passes;
} worker;

static tagged *open_model(uint64_t seed, uint32_t eighths, uint32_t streams)
{
    viking_host_options options = {.delay_ns = seed % 3 == 0 ? 0 : 20000, .seed = seed};
    uint64_t bytes[COUNT], random = seed + 17;
    random_sizes(bytes, COUNT, 8, &random);
    tagged *t = tagged_open(&options, COUNT, bytes, streams);
    CHECK_OK(tagged_layout(t, tagged_budget(t, eighths), tagged_stream(t)));
    return t;
}

static void worker_begin(worker *self, uint32_t *out_weight, viking_acquired *out, uint32_t *held)
{
    uint32_t w = random_below(&self->random, COUNT);
    viking_status status = tagged_acquire(self->world, w, self->stream, out);
    if (status == VIKING_ERROR_BUDGET) {
        atomic_fetch_add(&self->world->refused, 1);
        return;
    }
    CHECK_OK(status);
    tagged_compute(self->world, w, out, self->stream);
    *out_weight = w;
    (*held)++;
}

static void worker_run(void *opaque)
{
    worker *self = opaque;
    viking_acquired held[8];
    uint32_t weights[8], count = 0;
    for (uint32_t i = 0; i < self->uses; i++) {
        if (self->begins_passes && i % 20 == 0) {
            bool stale;
            CHECK_OK(viking_engine_pass_begin(self->world->engine, KEY, true, self->stream, &stale));
        }
        if (count < self->nesting)
            worker_begin(self, &weights[count], &held[count], &count);
        while (count > 0 && (count == self->nesting || random_below(&self->random, 2) == 0)) {
            count--;
            if (self->stream == VIKING_STREAM_CALLER) /* as long as it computes, the bytes are there */
                tagged_compute(self->world, weights[count], &held[count], self->stream);
            CHECK_OK(viking_engine_release(self->world->engine, held[count].ticket, self->stream));
        }
    }
    while (count > 0)
        CHECK_OK(viking_engine_release(self->world->engine, held[--count].ticket, self->stream));
}

static unsigned run_workers(tagged *t, worker *workers, uint32_t count)
{
    viking_thread *threads[4];
    for (uint32_t i = 0; i < count; i++)
        CHECK_OK(viking_thread_start(worker_run, &workers[i], &threads[i]));
    for (uint32_t i = 0; i < count; i++)
        viking_thread_join(threads[i]);
    tagged_check(t);
    return atomic_load(&t->refused);
}

static void two_threads_with_streams_of_their_own(void)
{
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        tagged *t = open_model(seed, (uint32_t)seed % 9, 2);
        worker workers[2];
        for (uint32_t i = 0; i < 2; i++)
            workers[i] = (worker){t, seed * 7 + i + 1, t->streams[i], 60, 1, i == 0};
        CHECK(run_workers(t, workers, 2) == 0);
        tagged_close(t);
    }
}

static void two_threads_on_the_callers_stream(void)
{
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        tagged *t = open_model(seed, (uint32_t)seed % 9, 0);
        worker workers[2];
        for (uint32_t i = 0; i < 2; i++)
            workers[i] = (worker){t, seed * 5 + i + 1, VIKING_STREAM_CALLER, 60, 1, true};
        CHECK(run_workers(t, workers, 2) == 0);
        tagged_close(t);
    }
}

/* Threads that hold several weights in a slab for two: some are refused, none waits for ever. */
static void nested_uses_of_three_threads_never_deadlock(void)
{
    unsigned refused = 0;
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        tagged *t = open_model(seed, (uint32_t)seed % 4, 2);
        worker workers[3];
        for (uint32_t i = 0; i < 3; i++)
            workers[i] = (worker){t, seed * 3 + i + 1, i == 2 ? VIKING_STREAM_CALLER : t->streams[i], 60, 3, i == 0};
        refused += run_workers(t, workers, 3);
        tagged_close(t);
    }
    printf("      %u uses refused for want of room\n", refused);
    CHECK(refused > 0);
}

/* The budget changes, and the slab with it, while two threads run: their uses wait for the next slab. */
static void replace_slabs(void *opaque)
{
    worker *self = opaque;
    for (uint32_t i = 0; i < self->uses; i++) {
        uint64_t bytes = 0;
        viking_status status = VIKING_ERROR_BUDGET; /* also when a path was learned since, which raises the smallest */
        for (uint32_t asked = 0; status == VIKING_ERROR_BUDGET && asked < 10; asked++)
            status = viking_engine_layout(self->world->engine, tagged_budget(self->world, i % 9), &bytes);
        CHECK_OK(status);
        if (i % 2) {
            CHECK_OK(viking_engine_drop_slab(self->world->engine));
            memset(self->world->slab, 0x55, bytes);
            viking_os_sleep_ns(200000);
        }
        CHECK_OK(viking_engine_use_layout(self->world->engine, self->world->slab, VIKING_STREAM_CALLER));
        viking_os_sleep_ns(300000);
    }
}

static void the_slab_is_replaced_under_running_threads(void)
{
    for (uint64_t seed = 0; seed < SEEDS / 2; seed++) {
        tagged *t = open_model(seed, 4, 2);
        worker workers[3];
        viking_thread *threads[3];
        for (uint32_t i = 0; i < 3; i++) {
            workers[i] = (worker){t, seed * 7 + i + 1, t->streams[i % 2], i == 2 ? 8 : 100, 1, i == 0};
            CHECK_OK(viking_thread_start(i == 2 ? replace_slabs : worker_run, &workers[i], &threads[i]));
        }
        for (uint32_t i = 0; i < 3; i++)
            viking_thread_join(threads[i]);
        tagged_check(t);
        CHECK(atomic_load(&t->refused) == 0 && tagged_stats(t).layouts == 9);
        tagged_close(t);
    }
}

/* ---- one waits for another ---- */

typedef struct handshake {
    tagged *world;
    uint32_t weight;
    atomic_bool holds;
    atomic_bool may_release;
    atomic_bool waits;
    viking_status status;
} handshake;

static void wait_for(atomic_bool *flag)
{
    while (!atomic_load(flag))
        viking_os_sleep_ns(100000);
}

static void hold_until_told(void *opaque)
{
    handshake *self = opaque;
    viking_acquired use;
    CHECK_OK(viking_engine_acquire(self->world->engine, self->weight, VIKING_STREAM_CALLER, &use));
    tagged_compute(self->world, self->weight, &use, VIKING_STREAM_CALLER);
    atomic_store(&self->holds, true);
    wait_for(&self->may_release);
    CHECK_OK(viking_engine_release(self->world->engine, use.ticket, VIKING_STREAM_CALLER));
}

static tagged *open_for_two(void)
{
    static const uint64_t bytes[COUNT] = {1024, 1024, 1024, 1024, 1024, 1024, 1024, 1024, 1024, 1024};
    tagged *t = tagged_open(NULL, COUNT, bytes, 0);
    CHECK_OK(tagged_layout(t, tagged_smallest(t), VIKING_STREAM_CALLER));
    CHECK(t->engine->slab.map->ring_bytes == 2048);
    return t;
}

/* Told of BUSY, a thread may come to wait only after the other's use has ended. */
static void a_release_between_busy_and_the_wait_is_not_missed(void)
{
    tagged *t = open_for_two();
    handshake other = {.world = t, .weight = 0};
    viking_thread *thread = NULL;
    viking_acquired first, second;
    CHECK_OK(viking_thread_start(hold_until_told, &other, &thread));
    wait_for(&other.holds);
    CHECK_OK(viking_engine_acquire(t->engine, 1, VIKING_STREAM_CALLER, &first));
    CHECK(viking_engine_acquire(t->engine, 2, VIKING_STREAM_CALLER, &second) == VIKING_BUSY);
    atomic_store(&other.may_release, true);
    viking_thread_join(thread);
    CHECK_OK(viking_engine_wait_release(t->engine)); /* its own use is all there is */
    CHECK_OK(viking_engine_acquire(t->engine, 2, VIKING_STREAM_CALLER, &second));
    CHECK_OK(viking_engine_release(t->engine, second.ticket, VIKING_STREAM_CALLER));
    CHECK_OK(viking_engine_release(t->engine, first.ticket, VIKING_STREAM_CALLER));
    CHECK_OK(viking_engine_wait_release(t->engine));
    tagged_close(t);
}

static void release_later(void *opaque)
{
    handshake *self = opaque;
    viking_os_sleep_ns(5000000);
    atomic_store(&self->may_release, true);
}

static void a_busy_thread_waits_for_a_release_by_another(void)
{
    tagged *t = open_for_two();
    handshake other = {.world = t, .weight = 0};
    viking_thread *thread = NULL, *timer = NULL;
    viking_acquired first, second;
    CHECK_OK(viking_thread_start(hold_until_told, &other, &thread));
    wait_for(&other.holds);
    CHECK_OK(viking_engine_acquire(t->engine, 1, VIKING_STREAM_CALLER, &first));
    CHECK(viking_engine_acquire(t->engine, 2, VIKING_STREAM_CALLER, &second) == VIKING_BUSY);
    uint64_t uses = t->engine->weights[2].uses;
    CHECK_OK(viking_thread_start(release_later, &other, &timer));
    CHECK_OK(tagged_acquire(t, 2, VIKING_STREAM_CALLER, &second));
    CHECK(atomic_load(&other.may_release));
    CHECK(t->engine->weights[2].uses == uses + 1); /* the busy attempts left no trace */
    for (uint32_t i = 0; i < t->engine->slab.lease_count; i++)
        CHECK(!t->engine->slab.leases[i].waiting);
    tagged_compute(t, 2, &second, VIKING_STREAM_CALLER);
    CHECK_OK(viking_engine_release(t->engine, second.ticket, VIKING_STREAM_CALLER));
    CHECK_OK(viking_engine_release(t->engine, first.ticket, VIKING_STREAM_CALLER));
    viking_thread_join(thread);
    viking_thread_join(timer);
    tagged_close(t);
}

static void hold_and_want_another(void *opaque)
{
    handshake *self = opaque;
    viking_acquired first, second;
    CHECK_OK(viking_engine_acquire(self->world->engine, self->weight, VIKING_STREAM_CALLER, &first));
    atomic_store(&self->holds, true);
    wait_for(&self->may_release);
    self->status = tagged_acquire(self->world, self->weight + 2, VIKING_STREAM_CALLER, &second);
    if (self->status == VIKING_OK)
        CHECK_OK(viking_engine_release(self->world->engine, second.ticket, VIKING_STREAM_CALLER));
    else
        CHECK(strstr(viking_status_detail(), "wait for one another") != NULL ||
              strstr(viking_status_detail(), "raise the weights budget") != NULL);
    CHECK_OK(viking_engine_release(self->world->engine, first.ticket, VIKING_STREAM_CALLER));
}

/* Each holds half of the ring and wants the other half: one is refused, and then the other goes on. */
static void threads_that_wait_for_one_another_are_told(void)
{
    for (int round = 0; round < 20; round++) {
        tagged *t = open_for_two();
        handshake both[2] = {{.world = t, .weight = 0}, {.world = t, .weight = 1}};
        viking_thread *threads[2];
        for (int i = 0; i < 2; i++) {
            CHECK_OK(viking_thread_start(hold_and_want_another, &both[i], &threads[i]));
            wait_for(&both[i].holds);
        }
        for (int i = 0; i < 2; i++)
            atomic_store(&both[i].may_release, true);
        for (int i = 0; i < 2; i++)
            viking_thread_join(threads[i]);
        CHECK(both[0].status == VIKING_ERROR_BUDGET || both[1].status == VIKING_ERROR_BUDGET);
        CHECK(both[0].status == VIKING_OK || both[1].status == VIKING_OK);
        tagged_close(t);
    }
}

/* By chance two threads use two weights at once: the next layout needs no more than the one before. */
static void what_threads_hold_at_once_is_no_matter_of_the_layout(void)
{
    tagged *t = open_for_two();
    uint64_t smallest = tagged_smallest(t);
    bool stale;
    for (int round = 0; round < 2; round++) {
        handshake others[2] = {{.world = t, .weight = 0}, {.world = t, .weight = 1}};
        viking_thread *threads[2];
        CHECK_OK(viking_engine_pass_begin(t->engine, KEY, true, VIKING_STREAM_CALLER, &stale));
        for (int i = 0; i < 2; i++) {
            CHECK_OK(viking_thread_start(hold_until_told, &others[i], &threads[i]));
            wait_for(&others[i].holds);
        }
        for (int i = 0; i < 2; i++) {
            atomic_store(&others[i].may_release, true);
            viking_thread_join(threads[i]);
        }
        for (uint32_t w = 2; w < COUNT; w++) {
            viking_acquired use;
            CHECK_OK(viking_engine_acquire(t->engine, w, VIKING_STREAM_CALLER, &use));
            CHECK_OK(viking_engine_release(t->engine, use.ticket, VIKING_STREAM_CALLER));
        }
    }
    const viking_trace *path = viking_engine_main_path(t->engine);
    CHECK(path != NULL && path->count == COUNT);
    for (uint32_t i = 0; i + 1 < path->count; i++)
        CHECK(path->uses[i].end < path->uses[i + 1].begin);
    CHECK(tagged_smallest(t) == smallest);
    tagged_close(t);
}

/* ---- the table of weights moves ---- */

static void add_many(void *opaque)
{
    handshake *self = opaque;
    wait_for(&self->waits);
    for (uint32_t i = 0; i < 200; i++) {
        uint32_t number;
        CHECK_OK(viking_engine_add(self->world->engine, self->world->homes[0], 256, &number));
        viking_os_sleep_ns(20000);
    }
}

/* A caller waits for its copy while another thread attaches a second model. */
static void weights_are_added_while_a_caller_waits_for_its_copy(void)
{
    enum { LARGE = 1 << 20 };
    static const uint64_t bytes[] = {LARGE, LARGE, LARGE, LARGE};
    viking_host_options options = {.bytes_per_second = (uint64_t)LARGE * 500};
    tagged *t = tagged_open(&options, 4, bytes, 0);
    CHECK_OK(tagged_layout(t, tagged_smallest(t), VIKING_STREAM_CALLER));
    handshake other = {.world = t};
    viking_thread *thread = NULL;
    CHECK_OK(viking_thread_start(add_many, &other, &thread));
    atomic_store(&other.waits, true);
    for (uint32_t i = 0; i < 6; i++) {
        viking_acquired use;
        CHECK_OK(tagged_acquire(t, i % 4, VIKING_STREAM_CALLER, &use));
        tagged_compute(t, i % 4, &use, VIKING_STREAM_CALLER);
        CHECK_OK(viking_engine_release(t->engine, use.ticket, VIKING_STREAM_CALLER));
    }
    viking_thread_join(thread);
    tagged_close(t);
}

/* ---- many streams ---- */

/* More streams than there are places for readers: the longest idle one makes room, and copies still wait for it. */
static void more_streams_than_readers(void)
{
    enum { STREAMS = 100 };
    static const uint64_t bytes[] = {1024, 2048, 512, 1024, 2048, 1024, 256, 512};
    for (uint64_t seed = 0; seed < 4; seed++) {
        viking_host_options options = {.delay_ns = 20000, .seed = seed};
        tagged *t = tagged_open(&options, 8, bytes, 1);
        viking_stream streams[STREAMS];
        uint64_t random = seed + 1;
        CHECK_OK(tagged_layout(t, tagged_budget(t, (uint32_t)seed), t->streams[0]));
        for (uint32_t s = 0; s < STREAMS; s++)
            CHECK_OK(t->backend->operations.stream_open(&t->backend->base, &streams[s]));
        for (uint32_t i = 0; i < 500; i++) {
            viking_stream stream = streams[seed % 2 ? random_below(&random, STREAMS) : i % STREAMS];
            uint32_t w = random_below(&random, 8);
            viking_acquired use;
            CHECK_OK(tagged_acquire(t, w, stream, &use));
            tagged_compute(t, w, &use, stream);
            CHECK_OK(viking_engine_release(t->engine, use.ticket, stream));
        }
        CHECK(tagged_stats(t).readers == VIKING_READER_LIMIT);
        for (uint32_t s = 0; s < STREAMS; s++)
            t->backend->operations.stream_close(&t->backend->base, streams[s]);
        tagged_close(t);
    }
}

/* A use may begin on one stream and end on another, if the work went there. */
static void a_use_may_move_to_another_stream(void)
{
    static const uint64_t bytes[] = {1024, 1024, 1024, 1024};
    tagged *t = tagged_open(NULL, 4, bytes, 2);
    viking_event *event = NULL;
    CHECK_OK(tagged_layout(t, tagged_smallest(t), t->streams[0]));
    CHECK_OK(t->backend->operations.event_open(&t->backend->base, false, &event));
    for (uint32_t i = 0; i < 40; i++) {
        viking_acquired use;
        CHECK_OK(tagged_acquire(t, i % 4, t->streams[0], &use));
        CHECK_OK(t->backend->operations.event_record(&t->backend->base, event, t->streams[0]));
        CHECK_OK(t->backend->operations.stream_wait(&t->backend->base, t->streams[1], event));
        tagged_compute(t, i % 4, &use, t->streams[1]);
        CHECK_OK(viking_engine_release(t->engine, use.ticket, t->streams[1]));
    }
    t->backend->operations.event_close(&t->backend->base, event);
    tagged_close(t);
}

int main(void)
{
    RUN(a_release_between_busy_and_the_wait_is_not_missed);
    RUN(a_busy_thread_waits_for_a_release_by_another);
    RUN(threads_that_wait_for_one_another_are_told);
    RUN(what_threads_hold_at_once_is_no_matter_of_the_layout);
    RUN(weights_are_added_while_a_caller_waits_for_its_copy);
    RUN(two_threads_with_streams_of_their_own);
    RUN(two_threads_on_the_callers_stream);
    RUN(nested_uses_of_three_threads_never_deadlock);
    RUN(the_slab_is_replaced_under_running_threads);
    RUN(more_streams_than_readers);
    RUN(a_use_may_move_to_another_stream);
    return 0;
}

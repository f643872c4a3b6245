/* What changes under a running model: bytes, weights, budgets, the slab itself; and what must be refused. */
#include "tagged.h"

#include <sys/wait.h>
#include <unistd.h>

enum { KEY = 3, COUNT = 8 };

static void edit(tagged *t, uint32_t w)
{
    CHECK_OK(viking_engine_drain_copies(t->engine));
    t->versions[w]++;
    tagged_fill(t, w);
    CHECK_OK(viking_engine_invalidate(t->engine, t->numbers[w]));
}

static tagged *open_delayed(uint64_t seed, uint32_t eighths, uint32_t streams)
{
    viking_host_options options = {.delay_ns = 30000, .seed = seed};
    uint64_t bytes[COUNT], random = seed + 1000;
    random_sizes(bytes, COUNT, 8, &random);
    tagged *t = tagged_open(&options, COUNT, bytes, streams);
    t->random += seed;
    CHECK_OK(tagged_layout(t, tagged_budget(t, eighths), tagged_stream(t)));
    return t;
}

static void begin_use(tagged *t, uint32_t w, viking_acquired *out)
{
    CHECK_OK(tagged_acquire(t, w, t->streams[0], out));
    tagged_compute(t, w, out, t->streams[0]);
}

static void end_use(tagged *t, const viking_acquired *use)
{
    CHECK_OK(viking_engine_release(t->engine, use->ticket, t->streams[0]));
}

static void walk(tagged *t)
{
    viking_trace trace;
    viking_trace_init(&trace);
    sweep_weights(&trace, t->count, 1000);
    CHECK_OK(tagged_pass(t, KEY, &trace));
    viking_trace_free(&trace);
}

/* ---- edits ---- */

static void an_edit_is_seen_by_the_next_use(void)
{
    for (uint64_t seed = 0; seed < 30; seed++) {
        tagged *t = open_delayed(seed, (uint32_t)seed % 9, (uint32_t)(1 + seed % 2));
        for (uint32_t i = 0; i < 6; i++) {
            walk(t);
            for (uint32_t k = 0; k < 3; k++)
                edit(t, random_below(&t->random, COUNT));
        }
        walk(t);
        tagged_close(t);
    }
}

/* Kernels of the first use read the old bytes however late they run; each use begun after an edit has the new ones. */
static void uses_in_progress_keep_the_bytes_they_began_with(void)
{
    for (uint64_t seed = 0; seed < 40; seed++) {
        viking_host_options options = {.delay_ns = 30000, .seed = seed};
        static const uint64_t bytes[COUNT] = {256, 2048, 2048, 256, 2048, 2048, 2048, 1024};
        tagged *t = tagged_open(&options, COUNT, bytes, 1);
        viking_acquired uses[4];
        CHECK_OK(tagged_layout(t, tagged_budget(t, 1), t->streams[0]));
        walk(t);
        for (uint32_t i = 0; i < 4; i++) {
            begin_use(t, 0, &uses[i]);
            edit(t, 0);
        }
        for (uint32_t i = 0; i < 4; i++)
            end_use(t, &uses[(i + seed) % 4]);
        walk(t);
        tagged_close(t);
    }
}

/* A neighbour in the slab holds the weight's address, so it lives elsewhere: an edit is seen there as well. */
static void an_edit_reaches_a_displaced_weight(void)
{
    static const uint64_t bytes[] = {256, 2048, 2048, 256, 2048, 2048};
    tagged *t = tagged_open(NULL, 6, bytes, 1);
    CHECK_OK(tagged_layout(t, tagged_smallest(t), t->streams[0]));
    const viking_map *map = t->engine->slab.map;
    uint32_t w = 3;
    CHECK(map->neighbour_begin[w] < map->neighbour_begin[w + 1] && !map->resident[w]);
    viking_acquired neighbour, first, second;
    begin_use(t, map->neighbours[map->neighbour_begin[w]], &neighbour);
    begin_use(t, w, &first);
    CHECK(first.address != (unsigned char *)t->slab + map->offsets[w]);
    edit(t, w);
    begin_use(t, w, &second);
    CHECK(second.address != first.address);
    end_use(t, &first);
    end_use(t, &second);
    end_use(t, &neighbour);
    tagged_close(t);
}

/* ---- weights come and go ---- */

static void a_weight_in_use_is_not_removed(void)
{
    tagged *t = open_delayed(1, 3, 1);
    viking_acquired use;
    begin_use(t, 2, &use);
    CHECK(viking_engine_remove(t->engine, t->numbers[2]) == VIKING_ERROR_STATE);
    end_use(t, &use);
    CHECK_OK(viking_engine_remove(t->engine, t->numbers[2]));
    CHECK(viking_engine_acquire(t->engine, t->numbers[2], t->streams[0], &use) == VIKING_ERROR_STATE);
    CHECK(viking_engine_remove(t->engine, t->numbers[2]) == VIKING_ERROR_STATE);
    CHECK(viking_engine_invalidate(t->engine, 12345) == VIKING_ERROR_STATE);
    CHECK_OK(viking_engine_add(t->engine, t->homes[2], t->bytes[2], &t->numbers[2]));
    CHECK_OK(tagged_layout(t, tagged_budget(t, 3), t->streams[0]));
    walk(t);
    tagged_close(t);
}

/* The number of a removed weight is given again; its place in the layout in force is not the new weight's. */
static void a_new_weight_has_no_place_before_the_next_layout(void)
{
    static const uint64_t bytes[] = {256, 1024, 1024, 1024};
    tagged *t = tagged_open(NULL, 4, bytes, 1);
    viking_home *larger = NULL;
    viking_acquired use;
    uint32_t number = 0;
    uint64_t slab = 0;
    CHECK_OK(tagged_layout(t, tagged_budget(t, 8), t->streams[0]));
    CHECK_OK(viking_engine_remove(t->engine, t->numbers[0]));
    CHECK_OK(viking_engine_layout(t->engine, tagged_budget(t, 8), &slab)); /* not for the new one either */
    CHECK_OK(viking_home_open(8192, &larger));
    CHECK_OK(viking_engine_add(t->engine, larger, 8192, &number));
    CHECK(number == t->numbers[0]);
    CHECK(viking_engine_acquire(t->engine, number, t->streams[0], &use) == VIKING_ERROR_STATE);
    CHECK_OK(viking_engine_use_layout(t->engine, t->slab, t->streams[0]));
    CHECK(viking_engine_acquire(t->engine, number, t->streams[0], &use) == VIKING_ERROR_STATE);
    CHECK_OK(viking_engine_remove(t->engine, number));
    viking_home_close(larger);
    CHECK_OK(viking_engine_add(t->engine, t->homes[0], t->bytes[0], &t->numbers[0]));
    CHECK_OK(tagged_layout(t, tagged_budget(t, 2), t->streams[0]));
    walk(t);
    walk(t);
    tagged_close(t);
}

/* Slow kernels of the removed weight still read its span while others are fetched over it. */
static void weights_come_and_go_in_mid_run(void)
{
    for (uint64_t seed = 0; seed < 30; seed++) {
        tagged *t = open_delayed(seed, (uint32_t)seed % 5, (uint32_t)(1 + seed % 2));
        for (uint32_t round = 0; round < 6; round++) {
            uint32_t w = random_below(&t->random, COUNT);
            viking_acquired use;
            walk(t);
            begin_use(t, w, &use);
            end_use(t, &use);
            CHECK_OK(viking_engine_remove(t->engine, t->numbers[w]));
            for (uint32_t k = 0; k < COUNT; k++) { /* a pass without it */
                if (k == w)
                    continue;
                begin_use(t, k, &use);
                end_use(t, &use);
            }
            CHECK_OK(viking_engine_add(t->engine, t->homes[w], t->bytes[w], &t->numbers[w]));
            CHECK_OK(tagged_layout(t, tagged_budget(t, random_below(&t->random, 9)), tagged_stream(t)));
        }
        walk(t);
        tagged_close(t);
    }
}

static void sleep_3_ms(void *unused)
{
    (void)unused;
    viking_os_sleep_ns(3000000);
}

static void a_removed_weight_is_read_to_the_end(void)
{
    static const uint64_t bytes[] = {1024, 1024, 1024, 1024};
    tagged *t = tagged_open(NULL, 4, bytes, 1);
    viking_acquired use;
    CHECK_OK(tagged_layout(t, tagged_smallest(t), t->streams[0]));
    t->launch(t->backend->inner, t->streams[0], sleep_3_ms, NULL);
    begin_use(t, 0, &use);
    end_use(t, &use);
    CHECK_OK(viking_engine_remove(t->engine, t->numbers[0]));
    for (uint32_t w = 1; w < 4; w++) {
        begin_use(t, w, &use);
        end_use(t, &use);
    }
    tagged_close(t);
}

/* ---- layouts ---- */

static void a_budget_may_change_in_mid_run(void)
{
    for (uint64_t seed = 0; seed < 40; seed++) {
        tagged *t = open_delayed(seed, (uint32_t)seed % 9, (uint32_t)(1 + seed % 3));
        void *old[5];
        for (uint32_t i = 0; i < 5; i++) {
            walk(t);
            old[i] = NULL;
            if (seed % 2) { /* elsewhere: the old slab is read until its readers are done */
                old[i] = t->slab;
                t->slab = NULL;
            }
            CHECK_OK(tagged_layout(t, tagged_budget(t, random_below(&t->random, 9)), tagged_stream(t)));
        }
        walk(t);
        CHECK(tagged_stats(t).layouts == 6);
        tagged_drain(t);
        CHECK_OK(viking_engine_drain_copies(t->engine));
        for (uint32_t i = 0; i < 5; i++)
            ALIGNED_FREE(old[i]);
        tagged_close(t);
    }
}

/* The weights move while slow kernels read them at their old addresses. */
static void a_layout_waits_for_slow_readers(void)
{
    static const uint64_t bytes[] = {1024, 2048, 512, 1024, 1536};
    for (uint32_t eighths = 0; eighths < 9; eighths++) {
        tagged *t = tagged_open(NULL, 5, bytes, 2);
        CHECK_OK(tagged_layout(t, tagged_budget(t, eighths), t->streams[1]));
        t->launch(t->backend->inner, t->streams[0], sleep_3_ms, NULL);
        for (uint32_t w = 0; w < 5; w++) {
            viking_acquired use;
            begin_use(t, w, &use);
            end_use(t, &use);
        }
        CHECK_OK(tagged_layout(t, tagged_budget(t, 8 - eighths), t->streams[1]));
        for (uint32_t w = 0; w < 5; w++) {
            viking_acquired use;
            CHECK_OK(tagged_acquire(t, 4 - w, t->streams[1], &use));
            tagged_compute(t, 4 - w, &use, t->streams[1]);
            CHECK_OK(viking_engine_release(t->engine, use.ticket, t->streams[1]));
        }
        tagged_close(t);
    }
}

static void what_stays_in_place_is_not_copied_again(void)
{
    tagged *t = open_delayed(9, 8, 1);
    walk(t);
    uint64_t fetched = tagged_stats(t).total_fetched_bytes;
    CHECK_OK(tagged_layout(t, tagged_budget(t, 8), t->streams[0]));
    walk(t);
    CHECK(tagged_stats(t).total_fetched_bytes == fetched);
    tagged_close(t);
}

static void a_dropped_slab_is_not_touched(void)
{
    for (uint64_t seed = 0; seed < 20; seed++) {
        tagged *t = open_delayed(seed, (uint32_t)seed % 9, 2);
        viking_acquired use;
        uint64_t slab = 0;
        bool stale = false;
        walk(t);
        CHECK_OK(viking_engine_layout(t->engine, tagged_budget(t, 4), &slab)); /* found, not in force */
        begin_use(t, 1, &use);
        CHECK(viking_engine_drop_slab(t->engine) == VIKING_ERROR_STATE);
        end_use(t, &use);
        CHECK_OK(viking_engine_drop_slab(t->engine));
        memset(t->slab, 0xAA, slab);
        unsigned runs = atomic_load(&t->runs);
        CHECK(viking_engine_acquire(t->engine, 0, t->streams[0], &use) == VIKING_BUSY);
        CHECK_OK(viking_engine_pass_begin(t->engine, KEY, true, t->streams[0], &stale));
        CHECK_OK(viking_engine_drop_slab(t->engine)); /* that layout is given up */
        CHECK(viking_engine_acquire(t->engine, 0, t->streams[0], &use) == VIKING_ERROR_STATE);
        CHECK(tagged_stats(t).slab_bytes == 0 && atomic_load(&t->runs) == runs);
        ALIGNED_FREE(t->slab);
        t->slab = NULL;
        CHECK_OK(tagged_layout(t, tagged_budget(t, (uint32_t)seed % 9), tagged_stream(t)));
        walk(t);
        tagged_close(t);
    }
}

/* ---- refused ---- */

static void what_comes_at_the_wrong_moment_is_refused(void)
{
    static const uint64_t bytes[] = {1024, 1024, 1024};
    tagged *t = tagged_open(NULL, 3, bytes, 1);
    viking_acquired use;
    uint64_t slab = 0;
    uint32_t number = 0;
    bool stale = true;
    CHECK(viking_engine_acquire(t->engine, t->numbers[0], t->streams[0], &use) == VIKING_ERROR_STATE);
    CHECK(strstr(viking_status_detail(), "no place on the device") != NULL);
    CHECK_OK(viking_engine_pass_begin(t->engine, KEY, true, t->streams[0], &stale));
    CHECK(!stale);
    CHECK(viking_engine_use_layout(t->engine, &slab, t->streams[0]) == VIKING_ERROR_INVALID);
    CHECK(viking_engine_layout(t->engine, 256, &slab) == VIKING_ERROR_BUDGET);
    CHECK(strstr(viking_status_detail(), "smallest budget that works") != NULL);
    CHECK(viking_engine_add(t->engine, t->homes[0], 0, &number) == VIKING_ERROR_INVALID);
    CHECK(viking_engine_add(t->engine, t->homes[0], 1025, &number) == VIKING_ERROR_INVALID);
    CHECK_OK(tagged_layout(t, tagged_smallest(t), t->streams[0]));
    CHECK_OK(viking_engine_layout(t->engine, tagged_smallest(t), &slab));
    CHECK(viking_engine_use_layout(t->engine, (char *)t->slab + 128, t->streams[0]) == VIKING_ERROR_INVALID);
    begin_use(t, 0, &use);
    CHECK(viking_engine_use_layout(t->engine, t->slab, t->streams[0]) == VIKING_ERROR_STATE);
    end_use(t, &use);
    CHECK(viking_engine_release(t->engine, use.ticket, t->streams[0]) == VIKING_ERROR_STATE);
    CHECK(viking_engine_release(t->engine, 0, t->streams[0]) == VIKING_ERROR_STATE);
    walk(t);
    tagged_close(t);
}

static void one_threads_nested_uses_run_out_of_budget(void)
{
    static const uint64_t bytes[] = {1024, 1024, 1024, 1024};
    tagged *t = tagged_open(NULL, 4, bytes, 1);
    viking_acquired uses[4];
    uint32_t held = 0;
    viking_status status = VIKING_OK;
    CHECK_OK(tagged_layout(t, tagged_smallest(t), t->streams[0]));
    for (; held < 4 && status == VIKING_OK; held += status == VIKING_OK)
        if ((status = viking_engine_acquire(t->engine, held, t->streams[0], &uses[held])) == VIKING_OK)
            tagged_compute(t, held, &uses[held], t->streams[0]);
    CHECK(status == VIKING_ERROR_BUDGET && held >= 2);
    CHECK(strstr(viking_status_detail(), "raise the weights budget by") != NULL);
    while (held > 0)
        end_use(t, &uses[--held]);
    walk(t);
    tagged_close(t);
}

static void a_forked_child_is_told(void)
{
    tagged *t = open_delayed(2, 3, 1);
    walk(t);
    tagged_drain(t);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        viking_acquired use;
        bool stale, fine = true;
        fine = fine && viking_engine_acquire(t->engine, 0, t->streams[0], &use) == VIKING_ERROR_STATE;
        fine = fine && strstr(viking_status_detail(), "forked") != NULL;
        fine = fine && viking_engine_pass_begin(t->engine, 1, true, t->streams[0], &stale) == VIKING_ERROR_STATE;
        fine = fine && viking_engine_release(t->engine, 1, t->streams[0]) == VIKING_ERROR_STATE;
        fine = fine && viking_engine_invalidate(t->engine, 0) == VIKING_ERROR_STATE;
        fine = fine && viking_engine_drop_slab(t->engine) == VIKING_ERROR_STATE;
        fine = fine && viking_engine_wait_release(t->engine) == VIKING_ERROR_STATE;
        viking_engine_close(t->engine);
        _exit(fine ? 0 : 1);
    }
    int code = -1;
    CHECK(waitpid(child, &code, 0) == child && WIFEXITED(code) && WEXITSTATUS(code) == 0);
    walk(t);
    tagged_close(t);
}

/* ---- pinning ---- */

static void streamed_homes_are_pinned_and_resident_ones_are_not(void)
{
    tagged *t = open_delayed(4, 4, 1);
    uint64_t expected = 0;
    walk(t);
    CHECK(viking_engine_may_block(t->engine));
    for (uint32_t w = 0; w < COUNT; w++) {
        viking_weight_stats stats;
        CHECK_OK(viking_engine_pin(t->engine, t->numbers[w]));
        CHECK_OK(viking_engine_weight_stats(t->engine, t->numbers[w], &stats));
        CHECK((stats.locked_bytes > 0) == (stats.residency != VIKING_RESIDENT));
        expected += stats.locked_bytes;
    }
    CHECK(expected > 0 && viking_host_pinned_bytes(t->backend->inner) == expected);
    CHECK(tagged_stats(t).pinned_bytes == expected && tagged_stats(t).staged_bytes == 0);
    CHECK_OK(tagged_layout(t, tagged_budget(t, 8), t->streams[0]));
    walk(t);
    for (uint32_t w = 0; w < COUNT; w++)
        CHECK_OK(viking_engine_pin(t->engine, t->numbers[w]));
    CHECK(viking_host_pinned_bytes(t->backend->inner) == 0);
    CHECK_OK(tagged_layout(t, tagged_budget(t, 0), t->streams[0]));
    CHECK_OK(viking_engine_pin(t->engine, t->numbers[0]));
    CHECK_OK(viking_engine_unpin(t->engine, t->numbers[0]));
    CHECK(viking_host_pinned_bytes(t->backend->inner) == 0);
    walk(t);
    tagged_close(t);
}

int main(void)
{
    RUN(an_edit_is_seen_by_the_next_use);
    RUN(uses_in_progress_keep_the_bytes_they_began_with);
    RUN(an_edit_reaches_a_displaced_weight);
    RUN(a_weight_in_use_is_not_removed);
    RUN(a_new_weight_has_no_place_before_the_next_layout);
    RUN(weights_come_and_go_in_mid_run);
    RUN(a_removed_weight_is_read_to_the_end);
    RUN(a_budget_may_change_in_mid_run);
    RUN(a_layout_waits_for_slow_readers);
    RUN(what_stays_in_place_is_not_copied_again);
    RUN(a_dropped_slab_is_not_touched);
    RUN(what_comes_at_the_wrong_moment_is_refused);
    RUN(one_threads_nested_uses_run_out_of_budget);
    RUN(a_forked_child_is_told);
    RUN(streamed_homes_are_pinned_and_resident_ones_are_not);
    return 0;
}

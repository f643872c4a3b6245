/* In the steady state the engine does what the plan says, and what happens when a pass leaves its path costs copies,
 * never bytes: the engine heals within one pass. */
#include "tagged.h"

enum { KEY = 11, OTHER_KEY = 12 };

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
enum { SEEDS = 60, RHYTHMS = 10, DIVERGENCES = 40 };
#else
enum { SEEDS = 300, RHYTHMS = 40, DIVERGENCES = 60 };
#endif

static void pass(tagged *t, uint64_t key, const viking_trace *trace)
{
    CHECK_OK(tagged_pass(t, key, trace));
}

static void passes(tagged *t, uint64_t key, const viking_trace *trace, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        pass(t, key, trace);
}

/* How many uses have waited for their copy from its start. */
static uint64_t demand_of(tagged *t, uint64_t key, const viking_trace *trace)
{
    uint64_t before = tagged_stats(t).demand_fetches;
    pass(t, key, trace);
    return tagged_stats(t).demand_fetches - before;
}

static tagged *open_model(uint32_t count, uint32_t eighths, uint32_t streams)
{
    uint64_t bytes[TAGGED_WEIGHTS], random = 4711 + count;
    random_sizes(bytes, count, 6, &random);
    tagged *t = tagged_open(NULL, count, bytes, streams);
    CHECK_OK(tagged_layout(t, tagged_budget(t, eighths), tagged_stream(t)));
    return t;
}

/* ---- the plan ---- */

static bool is_copy_of(const tagged *t, const recorded_copy *copy, const viking_fetch *planned)
{
    const viking_map *map = t->engine->slab.map;
    const unsigned char *there = (const unsigned char *)t->slab + map->offsets[planned->weight];
    return copy->destination == there && copy->source == t->homes[planned->weight]->address &&
           copy->bytes == map->bytes[planned->weight];
}

/* The copies of `rounds` periods are the plan's fetches in its order, from any of them on. */
static bool follows(const tagged *t, const viking_plan *plan, const recorded_copy *copies, uint32_t count)
{
    for (uint32_t start = 0; start < plan->count; start++) {
        uint32_t same = 0;
        while (same < count && is_copy_of(t, &copies[same], &plan->fetches[(start + same) % plan->count]))
            same++;
        if (same == count)
            return true;
    }
    return count == 0;
}

static void check_steady(tagged *t, const viking_trace *trace)
{
    recorder *b = t->backend;
    viking_plan *plan = NULL;
    enum { ROUNDS = 3 };
    passes(t, KEY, trace, 2);
    CHECK_OK(viking_plan_build(t->engine->slab.map, trace, &plan));
    for (uint32_t round = 0; round < ROUNDS; round++) {
        viking_engine_stats before = tagged_stats(t);
        unsigned copies = b->copies, records = b->records, waits = b->waits, others = b->others, streamed = 0;
        pass(t, KEY, trace);
        copies = b->copies - copies, records = b->records - records, waits = b->waits - waits,
        others = b->others - others;
        viking_engine_stats after = tagged_stats(t);
        for (uint32_t i = 0; i < trace->count; i++)
            streamed += !t->engine->slab.map->resident[trace->uses[i].weight];
        CHECK(copies == plan->count);
        CHECK(after.total_fetched_bytes - before.total_fetched_bytes == plan->fetched_bytes);
        CHECK(after.demand_fetches == before.demand_fetches);
        if (t->engine->profile.running || t->engine->queue.reader_count > 1)
            continue;
        CHECK(copies <= streamed && records <= 2 * streamed && waits <= 2 * streamed && others == 0);
    }
    uint32_t first = b->copies - ROUNDS * plan->count;
    CHECK(b->copies <= RECORDER_COPIES && follows(t, plan, &b->log[first], ROUNDS * plan->count));
    viking_plan_free(plan);
}

static void a_steady_step_is_its_plan(void)
{
    for (uint32_t size = 1; size <= 4; size++) {
        for (uint32_t eighths = 0; eighths <= 8; eighths++) {
            for (uint32_t streams = 0; streams <= 2; streams++) {
                tagged *t = open_model(12 + size, eighths, streams);
                viking_trace trace;
                viking_trace_init(&trace);
                checkpointed_step(&trace, t->count, size);
                passes(t, KEY, &trace, 1);
                if (eighths % 2) /* a layout that knows the path */
                    CHECK_OK(tagged_layout(t, tagged_budget(t, eighths), tagged_stream(t)));
                check_steady(t, &trace);
                tagged_close(t);
                viking_trace_free(&trace);
            }
        }
    }
}

static uint64_t fetches_of(const tagged *t, uint32_t weight)
{
    viking_weight_stats stats;
    CHECK_OK(viking_engine_weight_stats(t->engine, weight, &stats));
    return stats.fetches;
}

static void each_weight_is_fetched_as_often_as_was_planned(void)
{
    for (uint32_t eighths = 0; eighths <= 8; eighths++) {
        tagged *t = open_model(14, eighths, 1);
        uint64_t before[TAGGED_WEIGHTS];
        uint32_t *planned = NULL, count = 0;
        viking_trace trace;
        viking_trace_init(&trace);
        checkpointed_step(&trace, t->count, 2);
        passes(t, KEY, &trace, 2);
        CHECK_OK(tagged_layout(t, tagged_budget(t, eighths), tagged_stream(t)));
        passes(t, KEY, &trace, 2);
        CHECK_OK(viking_engine_planned_fetches(t->engine, &planned, &count));
        CHECK(count == t->count);
        for (uint32_t w = 0; w < count; w++)
            before[w] = fetches_of(t, w);
        passes(t, KEY, &trace, 3);
        for (uint32_t w = 0; w < count; w++)
            CHECK(fetches_of(t, w) - before[w] == 3 * (uint64_t)planned[w]);
        free(planned);
        tagged_close(t);
        viking_trace_free(&trace);
    }
}

static void one_pass_is_enough_to_learn(void)
{
    for (uint32_t eighths = 0; eighths <= 8; eighths++) {
        tagged *t = open_model(15, eighths, 1);
        viking_trace step, forward;
        viking_trace_init(&step);
        viking_trace_init(&forward);
        sweep_weights(&step, 15, 1000);
        forward_only(&forward, 15);
        CHECK(demand_of(t, KEY, &step) > 0);
        for (uint32_t i = 0; i < 40; i++)
            CHECK(demand_of(t, KEY, &step) == 0);
        CHECK(tagged_stats(t).stall_ns < UINT64_C(10000000000));
        CHECK(demand_of(t, OTHER_KEY, &forward) <= 15);
        for (uint32_t i = 0; i < 3; i++)
            CHECK(demand_of(t, OTHER_KEY, &forward) == 0);
        CHECK(tagged_stats(t).paths == 2);
        tagged_close(t);
        viking_trace_free(&step);
        viking_trace_free(&forward);
    }
}

static void a_resident_model_asks_nothing_of_the_device(void)
{
    tagged *t = open_model(9, 8, 1);
    viking_trace trace;
    viking_trace_init(&trace);
    sweep_weights(&trace, 9, 1000);
    passes(t, KEY, &trace, 2);
    recorder *b = t->backend;
    unsigned calls = b->copies + b->records + b->waits + b->others;
    pass(t, KEY, &trace);
    CHECK(b->copies + b->records + b->waits + b->others == calls);
    tagged_close(t);
    viking_trace_free(&trace);
}

/* A path that the layout was not made for: nested uses included, as long as the map can hold it. */
static void random_paths_follow_their_plans(void)
{
    uint32_t followed = 0;
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        random_case it;
        random_case_make(seed, &it);
        for (uint32_t w = 0; w < it.count; w++)
            it.bytes[w] = VIKING_ALIGNMENT * (1 + it.bytes[w] / VIKING_ALIGNMENT % 8);
        tagged *t = tagged_open(NULL, it.count, it.bytes, 1);
        CHECK_OK(tagged_layout(t, tagged_budget(t, 0), tagged_stream(t)));
        pass(t, KEY, &it.trace);
        pass(t, KEY, &it.trace);
        uint64_t budget = tagged_budget(t, (uint32_t)seed % 9);
        CHECK_OK(tagged_layout(t, budget, tagged_stream(t)));
        if (it.trace.count > 0 && atomic_load(&t->refused) == 0) {
            pass(t, KEY, &it.trace);
            CHECK(atomic_load(&t->refused) == 0); /* a layout of one's own has room for all */
            check_steady(t, &it.trace);
            followed++;
        }
        tagged_close(t);
        viking_trace_free(&it.trace);
    }
    printf("      %u random paths\n", followed);
    CHECK(followed > SEEDS / 4);
}

/* ---- leaving the path ---- */

static void skip(viking_trace *out, const viking_trace *from, uint32_t begin, uint32_t end)
{
    for (uint32_t i = 0; i < from->count; i++)
        if (i < begin || i >= end)
            use_weight(out, from->uses[i].weight, 1000);
}

static void insert(viking_trace *out, const viking_trace *from, uint32_t at, uint32_t weight)
{
    for (uint32_t i = 0; i < from->count; i++) {
        if (i == at)
            use_weight(out, weight, 1000);
        use_weight(out, from->uses[i].weight, 1000);
    }
}

static void any_divergence_heals_within_one_pass(void)
{
    for (uint32_t eighths = 0; eighths < 8; eighths++) {
        tagged *t = open_model(12, eighths, 1);
        viking_trace known;
        uint64_t random = 77 + eighths;
        viking_trace_init(&known);
        checkpointed_step(&known, 12, 3);
        passes(t, KEY, &known, 3);
        for (uint32_t i = 0; i < DIVERGENCES; i++) {
            viking_trace other;
            uint32_t at = random_below(&random, known.count);
            viking_trace_init(&other);
            if (i % 3 == 0)
                skip(&other, &known, at, at + 1 + random_below(&random, 4));
            else if (i % 3 == 1)
                insert(&other, &known, at, random_below(&random, 12));
            else
                random_order(&other, 12, 20, &random);
            pass(t, KEY, &other);
            pass(t, KEY, &known);
            /* What followed the known path the last time is expected to follow it again, once. */
            CHECK(demand_of(t, KEY, &known) <= 3);
            CHECK(demand_of(t, KEY, &known) == 0);
            viking_trace_free(&other);
        }
        CHECK(tagged_stats(t).paths == VIKING_PATH_LIMIT);
        tagged_close(t);
        viking_trace_free(&known);
    }
}

/* The layer after a skipped one is expected again two uses later; most of the pass is foreseen. */
static void a_skipped_layer_costs_a_few_uses(void)
{
    tagged *t = open_model(24, 0, 1);
    viking_trace known, skipped;
    viking_trace_init(&known);
    viking_trace_init(&skipped);
    sweep_weights(&known, 24, 1000);
    skip(&skipped, &known, 10, 11);
    passes(t, KEY, &known, 3);
    CHECK(demand_of(t, KEY, &skipped) <= 4);
    CHECK(demand_of(t, KEY, &known) <= 4);
    CHECK(demand_of(t, KEY, &known) <= 4); /* the skip was expected to come again */
    CHECK(demand_of(t, KEY, &known) == 0);
    tagged_close(t);
    viking_trace_free(&known);
    viking_trace_free(&skipped);
}

/* Steps and samples in a fixed rhythm: after one round of it nothing is a surprise. */
static void alternating_roots_are_foreseen(void)
{
    for (uint32_t eighths = 0; eighths < 8; eighths++) {
        tagged *t = open_model(20, eighths, 1);
        viking_trace step, forward, short_one;
        viking_trace_init(&step);
        viking_trace_init(&forward);
        viking_trace_init(&short_one);
        checkpointed_step(&step, 20, 4);
        forward_only(&forward, 20);
        use_weight(&short_one, 3, 1000);
        use_weight(&short_one, 17, 1000);
        for (uint32_t round = 0; round < 6; round++) {
            uint64_t demand = demand_of(t, 1, &step) + demand_of(t, 2, &forward) + demand_of(t, 3, &short_one);
            CHECK(round < 2 || demand == 0);
        }
        passes(t, 1, &step, 3);
        CHECK(demand_of(t, 1, &step) == 0);
        tagged_close(t);
        viking_trace_free(&step);
        viking_trace_free(&forward);
        viking_trace_free(&short_one);
    }
}

/* A change of rhythm between known paths costs what differs, for a pass or two. */
static void a_new_rhythm_of_known_paths_heals(void)
{
    for (uint32_t seed = 0; seed < RHYTHMS; seed++) {
        tagged *t = open_model(16, seed % 8, 1);
        viking_trace traces[4];
        uint64_t random = seed * 31 + 5;
        for (uint32_t k = 0; k < 4; k++) {
            viking_trace_init(&traces[k]);
            random_order(&traces[k], 16, 3 + 20 * (k % 2) + k, &random);
            passes(t, k, &traces[k], 2);
        }
        for (uint32_t i = 0; i < 30; i++) {
            uint32_t k = random_below(&random, 4);
            pass(t, k, &traces[k]);
        }
        for (uint32_t rhythm = 0; rhythm < 4; rhythm++) {
            uint32_t a = random_below(&random, 4), b = random_below(&random, 4);
            for (uint32_t round = 0; round < 5; round++) {
                uint64_t demand = demand_of(t, a, &traces[a]) + (a == b ? 0 : demand_of(t, b, &traces[b]));
                CHECK(round < 3 || demand == 0);
            }
        }
        tagged_close(t);
        for (uint32_t k = 0; k < 4; k++)
            viking_trace_free(&traces[k]);
    }
}

static void more_paths_than_are_kept_do_no_harm(void)
{
    tagged *t = open_model(10, 2, 1);
    uint64_t random = 3;
    viking_trace known;
    viking_trace_init(&known);
    sweep_weights(&known, 10, 1000);
    passes(t, KEY, &known, 3);
    for (uint32_t i = 0; i < 100; i++) {
        viking_trace other;
        viking_trace_init(&other);
        random_order(&other, 10, 5 + i % 20, &random);
        pass(t, i % 40, &other);
        viking_trace_free(&other);
    }
    CHECK(tagged_stats(t).paths == VIKING_PATH_LIMIT);
    passes(t, KEY, &known, 2);
    CHECK(demand_of(t, KEY, &known) == 0);
    tagged_close(t);
    viking_trace_free(&known);
}

/* A script that calls no root module: the period is found by itself. */
static void a_model_without_root_entries_is_learned(void)
{
    tagged *t = open_model(16, 1, 1);
    viking_trace trace;
    viking_trace_init(&trace);
    checkpointed_step(&trace, 16, 4);
    while (tagged_stats(t).passes == 0) {
        CHECK_OK(tagged_walk(t, &trace));
        CHECK(t->engine->weights[0].uses < 5000);
    }
    CHECK_OK(tagged_walk(t, &trace));
    uint64_t demand = tagged_stats(t).demand_fetches, ended = tagged_stats(t).passes;
    for (uint32_t i = 0; i < 5; i++)
        CHECK_OK(tagged_walk(t, &trace));
    CHECK(tagged_stats(t).demand_fetches == demand && tagged_stats(t).passes == ended + 5);
    uint64_t slab = 0;
    CHECK_OK(viking_engine_layout(t->engine, tagged_budget(t, 3), &slab));
    tagged_close(t);
    viking_trace_free(&trace);
}

/* Uses that are open when their pass ends are in the learned path: a layout must still be found for it. */
static void a_use_across_passes_does_not_stop_a_layout(void)
{
    tagged *t = open_model(8, 2, 1);
    viking_trace trace;
    viking_acquired use;
    viking_trace_init(&trace);
    sweep_weights(&trace, 8, 1000);
    pass(t, KEY, &trace);
    CHECK_OK(tagged_acquire(t, 3, t->streams[0], &use));
    pass(t, KEY, &trace);
    CHECK_OK(viking_engine_release(t->engine, use.ticket, t->streams[0]));
    pass(t, KEY, &trace);
    CHECK_OK(tagged_layout(t, tagged_budget(t, 4), t->streams[0]));
    pass(t, KEY, &trace);
    tagged_close(t);
    viking_trace_free(&trace);
}

/* Containers hold their own weight while their children run; then the model leaves its path in the middle of them. */
static void leaving_a_path_of_nested_uses_does_not_stop_a_layout(void)
{
    enum { DEPTH = 6 };
    tagged *t = open_model(16, 8, 1);
    viking_trace nested, other;
    uint32_t index[DEPTH];
    viking_trace_init(&nested);
    viking_trace_init(&other);
    for (int which = 0; which < 2; which++) {
        viking_trace *trace = which == 0 ? &nested : &other;
        for (uint32_t w = 0; w < DEPTH - (uint32_t)which; w++)
            CHECK_OK(viking_trace_acquire(trace, w, VIKING_USE_READ, &index[w]));
        for (uint32_t w = DEPTH - (uint32_t)which; w-- > 0;)
            viking_trace_release(trace, index[w]);
    }
    use_weight(&other, 10, 1000);
    use_weight(&other, 11, 1000);
    passes(t, KEY, &nested, 2);
    passes(t, KEY, &other, 2);
    viking_trace learned;
    CHECK_OK(viking_engine_last_trace(t->engine, &learned));
    CHECK(learned.count == other.count);
    for (uint32_t i = 0; i < other.count; i++)
        CHECK(learned.uses[i].begin == other.uses[i].begin && learned.uses[i].end == other.uses[i].end);
    CHECK_OK(tagged_layout(t, tagged_budget(t, 4), t->streams[0]));
    passes(t, KEY, &other, 2);
    tagged_close(t);
    viking_trace_free(&nested);
    viking_trace_free(&other);
    viking_trace_free(&learned);
}

int main(void)
{
    RUN(a_steady_step_is_its_plan);
    RUN(each_weight_is_fetched_as_often_as_was_planned);
    RUN(one_pass_is_enough_to_learn);
    RUN(a_resident_model_asks_nothing_of_the_device);
    RUN(random_paths_follow_their_plans);
    RUN(any_divergence_heals_within_one_pass);
    RUN(a_skipped_layer_costs_a_few_uses);
    RUN(alternating_roots_are_foreseen);
    RUN(a_new_rhythm_of_known_paths_heals);
    RUN(more_paths_than_are_kept_do_no_harm);
    RUN(a_model_without_root_entries_is_learned);
    RUN(a_use_across_passes_does_not_stop_a_layout);
    RUN(leaving_a_path_of_nested_uses_does_not_stop_a_layout);
    return 0;
}

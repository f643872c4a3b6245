/* The checker: sound plans pass, and every mutation that breaks a rule is found and named.
 *
 * Whether a mutation breaks a rule is decided here by a second, slower judge that shares no idea with the checker: it
 * writes every byte group of the slab at every tick, once with fetches as early and once as late as they may run.
 */
#include "core/check.h"

#include <string.h>

#include "random_trace.h"

/* ---- the second judge ---- */

#define JUDGE_PERIODS 4
#define JUDGE_UNITS 65536u

typedef struct judge {
    const viking_map *map;
    const viking_plan *plan;
    const viking_trace *trace;
    uint16_t slab[JUDGE_UNITS]; /* per 256 bytes: 1 + the weight whose bytes these are */
    int64_t starts[JUDGE_PERIODS * 256];
    uint32_t beginning[512]; /* [ticks] the use that begins at a tick, UINT32_MAX: none */
    bool broken;
} judge;

static bool unit_touches(const judge *self, uint32_t a, uint32_t b)
{
    const viking_map *m = self->map;
    return !(m->offsets[a] + m->bytes[a] <= m->offsets[b] || m->offsets[b] + m->bytes[b] <= m->offsets[a]);
}

static void write_units(judge *self, uint32_t w)
{
    uint64_t first = self->map->offsets[w] / VIKING_ALIGNMENT, number = self->map->bytes[w] / VIKING_ALIGNMENT;
    for (uint64_t k = first; k < first + number; k++)
        self->slab[k] = (uint16_t)(w + 1);
}

static bool holds(const judge *self, uint32_t w)
{
    uint64_t first = self->map->offsets[w] / VIKING_ALIGNMENT, number = self->map->bytes[w] / VIKING_ALIGNMENT;
    for (uint64_t k = first; k < first + number; k++)
        if (self->slab[k] != w + 1)
            return false;
    return true;
}

/* The ticks, counted through the periods, at which each fetch may start; -1 from the beginning. */
static void find_starts(judge *self)
{
    int64_t latest = -1;
    for (int64_t k = 0; k < (int64_t)self->plan->count * JUDGE_PERIODS; k++) {
        const viking_fetch *fetch = &self->plan->fetches[k % self->plan->count];
        int64_t use = k / self->plan->count * self->trace->count + fetch->after;
        if (fetch->after != VIKING_PLAN_NO_GATE && use >= 0) {
            int64_t tick =
                use / self->trace->count * self->trace->ticks + self->trace->uses[use % self->trace->count].end;
            latest = tick > latest ? tick : latest;
        }
        self->starts[k] = latest;
    }
}

static void use_begins(judge *self, uint32_t i, int period)
{
    uint32_t w = self->trace->uses[i].weight;
    if (!holds(self, w)) {
        self->broken = self->broken || period > 0;
        write_units(self, w);
    }
    for (uint32_t k = 0; k < self->trace->count; k++) {
        const viking_use *other = &self->trace->uses[k];
        if (other->weight != w && other->begin < self->trace->uses[i].begin &&
            other->end > self->trace->uses[i].begin && unit_touches(self, w, other->weight))
            self->broken = true;
    }
}

/* A fetch at this tick must hit nobody who is at work. */
static void fetch_runs(judge *self, int64_t n, int64_t tick)
{
    uint32_t w = self->plan->fetches[n % self->plan->count].weight;
    int64_t local = tick % self->trace->ticks;
    for (uint32_t k = 0; tick >= 0 && k < self->trace->count; k++) {
        const viking_use *use = &self->trace->uses[k];
        if (use->begin <= local && local < use->end && unit_touches(self, w, use->weight))
            self->broken = true;
    }
    write_units(self, w);
}

static void play_judge(judge *self, bool early)
{
    int64_t total = (int64_t)self->plan->count * JUDGE_PERIODS, next = 0;
    memset(self->slab, 0, sizeof self->slab);
    for (uint32_t w = 0; w < self->map->count; w++)
        if (self->map->resident[w])
            write_units(self, w);
    for (int64_t tick = -1; tick < (int64_t)self->trace->ticks * JUDGE_PERIODS; tick++) {
        int64_t period = tick < 0 ? 0 : tick / self->trace->ticks;
        for (; early && next < total && self->starts[next] <= tick; next++)
            fetch_runs(self, next, self->starts[next]);
        if (tick >= 0 && self->beginning[tick % self->trace->ticks] != UINT32_MAX) {
            uint32_t i = self->beginning[tick % self->trace->ticks];
            /* What this use needs must have been able to run by now. */
            for (; next < total && next / self->plan->count == period &&
                   self->plan->fetches[next % self->plan->count].need == i;
                 next++) {
                self->broken = self->broken || self->starts[next] > tick;
                write_units(self, self->plan->fetches[next % self->plan->count].weight);
            }
            use_begins(self, i, (int)period);
        }
    }
}

static bool breaks_a_rule(const viking_map *map, const viking_plan *plan, const viking_trace *trace)
{
    static judge self;
    for (uint32_t k = 1; k < plan->count; k++)
        if (plan->fetches[k].need < plan->fetches[k - 1].need)
            return true;
    self = (judge){.map = map, .plan = plan, .trace = trace};
    find_starts(&self);
    memset(self.beginning, 0xff, sizeof self.beginning);
    for (uint32_t i = 0; i < trace->count; i++)
        self.beginning[trace->uses[i].begin] = i;
    play_judge(&self, true);
    if (!self.broken)
        play_judge(&self, false);
    return self.broken;
}

/* ---- plans to mutate ---- */

typedef struct fixture {
    random_case one;
    viking_map *map;
    viking_plan *plan;
} fixture;

/* The planned case of this seed; false where the budget did not do or nothing is fetched. */
static bool fixture_open(uint64_t seed, fixture *out)
{
    memset(out, 0, sizeof *out);
    random_case_make(seed, &out->one);
    viking_map_request request = {.trace = &out->one.trace,
                                  .bytes = out->one.bytes,
                                  .count = out->one.count,
                                  .budget_bytes = viking_map_largest_budget(out->one.bytes, out->one.count) *
                                                  (40 + seed % 50) / 100,
                                  .link = {.bytes_per_second = 1000000000, .latency_ns = 0}};
    if (viking_map_build(&request, &out->map) != VIKING_OK)
        return false;
    CHECK_OK(viking_plan_build(out->map, &out->one.trace, &out->plan));
    return out->plan->count > 1 && out->map->slab_bytes / VIKING_ALIGNMENT <= JUDGE_UNITS;
}

static void fixture_close(fixture *self)
{
    viking_plan_free(self->plan);
    viking_map_free(self->map);
    viking_trace_free(&self->one.trace);
}

/* Both judges must agree; returns whether the mutation was a mistake. */
static bool both_say(fixture *self)
{
    bool broken = breaks_a_rule(self->map, self->plan, &self->one.trace);
    viking_status found = viking_check(self->map, self->plan, &self->one.trace);
    CHECK(found == (broken ? VIKING_ERROR_INVALID : VIKING_OK));
    return broken;
}

static void each_mutation(void (*mutate)(fixture *, uint64_t *), const char *what)
{
    uint32_t plans = 0, mistakes = 0;
    for (uint64_t seed = 1; plans < 80 && seed < 3000; seed++) {
        fixture self;
        uint64_t state = seed + 99;
        if (fixture_open(seed, &self)) {
            plans++;
            CHECK(!both_say(&self));
            for (int k = 0; k < 3; k++) {
                uint32_t count = self.plan->count;
                uint64_t fetched = self.plan->fetched_bytes;
                viking_fetch *saved = malloc(count * sizeof *saved);
                uint64_t *offsets = malloc(self.map->count * sizeof *offsets);
                CHECK(saved != NULL && offsets != NULL);
                memcpy(saved, self.plan->fetches, count * sizeof *saved);
                memcpy(offsets, self.map->offsets, self.map->count * sizeof *offsets);
                mutate(&self, &state);
                mistakes += both_say(&self);
                memcpy(self.plan->fetches, saved, count * sizeof *saved);
                memcpy(self.map->offsets, offsets, self.map->count * sizeof *offsets);
                self.plan->count = count;
                self.plan->fetched_bytes = fetched;
                free(saved);
                free(offsets);
            }
        }
        fixture_close(&self);
    }
    printf("      %s: %u of %u mutations break a rule, each is found\n", what, mistakes, 3 * plans);
    CHECK(plans == 80 && mistakes > 60);
}

static viking_fetch *any_fetch(fixture *self, uint64_t *state)
{
    return &self->plan->fetches[random_below(state, self->plan->count)];
}

static void open_a_gate_earlier(fixture *self, uint64_t *state)
{
    viking_fetch *fetch = any_fetch(self, state);
    int64_t by = 1 + random_below(state, 1 + self->one.trace.count / 2);
    fetch->after = fetch->after - by < -(int64_t)self->one.trace.count ? VIKING_PLAN_NO_GATE : fetch->after - by;
}

static void open_a_gate_later(fixture *self, uint64_t *state)
{
    viking_fetch *fetch = any_fetch(self, state);
    int64_t last = (int64_t)self->one.trace.count - 1;
    fetch->after += 1 + random_below(state, 1 + self->one.trace.count / 2);
    fetch->after = fetch->after > last ? last : fetch->after;
}

static void drop_a_fetch(fixture *self, uint64_t *state)
{
    viking_fetch *fetch = any_fetch(self, state);
    uint32_t at = (uint32_t)(fetch - self->plan->fetches);
    self->plan->fetched_bytes -= self->map->bytes[fetch->weight];
    memmove(fetch, fetch + 1, (self->plan->count - at - 1) * sizeof *fetch);
    self->plan->count--;
}

static void swap_two_fetches(fixture *self, uint64_t *state)
{
    viking_fetch *a = any_fetch(self, state), *b = any_fetch(self, state), c = *a;
    *a = *b;
    *b = c;
}

static void swap_two_gates(fixture *self, uint64_t *state)
{
    viking_fetch *a = any_fetch(self, state), *b = any_fetch(self, state);
    int64_t after = a->after;
    a->after = b->after;
    b->after = after;
}

static void move_a_ring_weight(fixture *self, uint64_t *state)
{
    uint32_t w = any_fetch(self, state)->weight;
    uint64_t room = (self->map->ring_bytes - self->map->bytes[w]) / VIKING_ALIGNMENT;
    self->map->offsets[w] = VIKING_ALIGNMENT * (uint64_t)random_below(state, (uint32_t)room + 1);
}

static void every_mutation_that_breaks_a_rule_is_found(void)
{
    each_mutation(open_a_gate_earlier, "a gate that opens earlier");
    each_mutation(open_a_gate_later, "a gate that opens later");
    each_mutation(drop_a_fetch, "a dropped fetch");
    each_mutation(swap_two_fetches, "two fetches in the other order");
    each_mutation(swap_two_gates, "two gates exchanged");
    each_mutation(move_a_ring_weight, "a moved weight");
}

/* ---- one plan by hand, and what is said about it ---- */

typedef struct by_hand {
    viking_trace trace;
    viking_map map;
    viking_plan plan;
    uint64_t bytes[3], offsets[3];
    bool resident[3];
    viking_fetch fetches[4];
} by_hand;

/* Weights 0 and 1 share bytes, 2 is resident. Uses: 0 2 1; fetches: 0 after the last 1, 1 after the 0. */
static void by_hand_open(by_hand *self)
{
    memset(self, 0, sizeof *self);
    viking_trace_init(&self->trace);
    use_weight(&self->trace, 0, 1);
    use_weight(&self->trace, 2, 1);
    use_weight(&self->trace, 1, 1);
    for (int w = 0; w < 3; w++)
        self->bytes[w] = 512;
    self->offsets[1] = 256;
    self->offsets[2] = 768;
    self->resident[2] = true;
    self->fetches[0] = (viking_fetch){0, 0, -1};
    self->fetches[1] = (viking_fetch){1, 2, 0};
    self->map = (viking_map){.count = 3,
                             .slab_bytes = 1280,
                             .ring_bytes = 768,
                             .resident_bytes = 512,
                             .bytes = self->bytes,
                             .offsets = self->offsets,
                             .resident = self->resident};
    self->plan = (viking_plan){.fetches = self->fetches, .count = 2, .fetched_bytes = 1024};
}

static void says(by_hand *self, const char *sentence)
{
    CHECK(viking_check(&self->map, &self->plan, &self->trace) == VIKING_ERROR_INVALID);
    if (strstr(viking_status_detail(), sentence) == NULL) {
        fprintf(stderr, "said: %s\nexpected: %s\n", viking_status_detail(), sentence);
        abort();
    }
    viking_trace_free(&self->trace);
    by_hand_open(self);
}

static void what_is_wrong_is_said_with_use_and_weight(void)
{
    by_hand self;
    by_hand_open(&self);
    CHECK_OK(viking_check(&self.map, &self.plan, &self.trace));
    self.fetches[1].after = VIKING_PLAN_NO_GATE; /* it follows fetch 0 at once, before use 0 begins */
    says(&self, "use 0 of weight 0 finds the bytes of another weight, 1");
    self.trace.uses[1].end = 2; /* weight 0 is held round the use of the resident, whose release is the gate */
    self.trace.uses[0].end = 3;
    self.trace.uses[1].begin = 1;
    self.fetches[1].after = 1;
    says(&self, "fetch 1 of weight 1 may start while use 0 still holds weight 0");
    self.fetches[1].after = 2;
    says(&self, "use 2 of weight 1 waits for a fetch whose gate opens later");
    self.plan.count = 1;
    self.plan.fetched_bytes = 512;
    says(&self, "use 2 of weight 1 finds the bytes of another weight, 0");
    self.offsets[1] = 128;
    says(&self, "weight 1, 512 bytes at 128, is misaligned");
    self.offsets[2] = 1024;
    says(&self, "weight 2, 512 bytes at 1024, leaves the slab of 1280");
    self.offsets[1] = 512;
    says(&self, "weight 1 shares bytes with resident 2");
    self.fetches[1].weight = 2;
    says(&self, "fetch 1 of weight 2 is not what use 2 needs");
    self.plan.fetched_bytes = 1;
    says(&self, "the plan says 1");
    self.fetches[0].after = -4;
    says(&self, "fetch 0 of weight 0 waits for use -4");
    self.trace.uses[0].end = 5; /* weight 0 is still held when 1 begins */
    self.trace.ticks = 6;
    says(&self, "use 2 of weight 1 begins while use 0 holds weight 0");
    self.trace.uses[1].weight = 3;
    says(&self, "use 1 of weight 3");
    viking_trace_free(&self.trace);
}

static void bytes_that_nothing_waited_for_do_not_count(void)
{
    by_hand self;
    by_hand_open(&self);
    /* Use 1 becomes one of weight 1: its bytes may be there by then, but the fetch is waited for by use 2 only. */
    self.trace.uses[1].weight = 1;
    says(&self, "use 1 of weight 1 finds a fetch that nothing has waited for");
    viking_trace_free(&self.trace);
}

static void nothing_at_all_is_sound(void)
{
    viking_map map = {0};
    viking_plan plan = {0};
    viking_trace trace;
    viking_trace_init(&trace);
    CHECK_OK(viking_check(&map, &plan, &trace));
}

int main(void)
{
    RUN(what_is_wrong_is_said_with_use_and_weight);
    RUN(bytes_that_nothing_waited_for_do_not_count);
    RUN(nothing_at_all_is_sound);
    RUN(every_mutation_that_breaks_a_rule_is_found);
    return 0;
}

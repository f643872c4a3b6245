/* The simulator, against schedules worked out by hand. Weights of 1000 * 256 bytes travel 1000 ns at 256 GB/s. */
#include "core/simulate.h"

#include <string.h>

#include "random_trace.h"

#define SIZE 256000u

typedef struct by_hand {
    viking_trace trace;
    viking_map map;
    viking_plan plan;
    viking_link link;
    uint64_t bytes[4], offsets[4];
    bool resident[4];
    viking_fetch fetches[8];
} by_hand;

static void by_hand_open(by_hand *self, uint32_t weights)
{
    memset(self, 0, sizeof *self);
    viking_trace_init(&self->trace);
    for (uint32_t w = 0; w < weights; w++)
        self->bytes[w] = SIZE;
    self->map = (viking_map){.count = weights,
                             .slab_bytes = 4 * SIZE,
                             .ring_bytes = 4 * SIZE,
                             .bytes = self->bytes,
                             .offsets = self->offsets,
                             .resident = self->resident};
    self->plan.fetches = self->fetches;
    self->link = (viking_link){.bytes_per_second = 256000000000, .latency_ns = 0};
}

static void add_fetch(by_hand *self, uint32_t weight, uint32_t need, int64_t after)
{
    self->fetches[self->plan.count++] = (viking_fetch){weight, need, after};
    self->plan.fetched_bytes += SIZE;
}

static viking_simulation run(by_hand *self, double scale)
{
    viking_simulation out;
    CHECK_OK(viking_simulate(&self->map, &self->plan, &self->trace, &self->link, scale, &out));
    return out;
}

static bool spans(const viking_span_of_time *span, uint64_t begin, uint64_t end)
{
    return span->begin_ns == begin && span->end_ns == end;
}

static void without_fetches_a_step_is_its_compute(void)
{
    by_hand self;
    by_hand_open(&self, 2);
    use_weight(&self.trace, 0, 300);
    use_weight(&self.trace, 1, 500);
    viking_simulation out = run(&self, 1.0);
    CHECK(out.period_ns == 800 && out.compute_ns == 800 && out.stall_ns == 0 && out.link_ns == 0);
    CHECK(out.copy_count == 0 && spans(&out.computes[0], 0, 300) && spans(&out.computes[1], 300, 800));
    CHECK(out.computes[1].weight == 1 && out.computes[1].index == 1);
    viking_simulation_free(&out);
    out = run(&self, 2.5);
    CHECK(out.period_ns == 2000 && out.compute_ns == 2000);
    viking_simulation_free(&out);
    viking_trace_free(&self.trace);
}

static void one_address_for_two_weights_alternates_copy_and_compute(void)
{
    /* Each fetch waits for the other weight's release, each use for its fetch: 1000 + 300 + 1000 + 500. */
    by_hand self;
    by_hand_open(&self, 2);
    use_weight(&self.trace, 0, 300);
    use_weight(&self.trace, 1, 500);
    add_fetch(&self, 0, 0, -1);
    add_fetch(&self, 1, 1, 0);
    viking_simulation out = run(&self, 1.0);
    CHECK(out.period_ns == 2800 && out.stall_ns == 2000 && out.link_ns == 2000);
    CHECK(out.copy_count == 2 && spans(&out.copies[0], 0, 1000) && spans(&out.copies[1], 1300, 2300));
    CHECK(spans(&out.computes[0], 1000, 1300) && spans(&out.computes[1], 2300, 2800));
    viking_simulation_free(&out);
    viking_trace_free(&self.trace);
}

static void copies_and_computes_that_do_not_meet_run_beside_each_other(void)
{
    /* 2 is fetched from the period's start on, 0-1000, beside use 0; 3 once use 1 is over, at 1600. */
    by_hand self;
    by_hand_open(&self, 4);
    use_weight(&self.trace, 0, 400);
    use_weight(&self.trace, 2, 600);
    use_weight(&self.trace, 1, 400);
    use_weight(&self.trace, 3, 300);
    add_fetch(&self, 2, 1, -1);
    add_fetch(&self, 3, 3, 1);
    viking_simulation out = run(&self, 1.0);
    CHECK(spans(&out.computes[0], 0, 400) && spans(&out.computes[1], 1000, 1600));
    CHECK(spans(&out.computes[2], 1600, 2000) && spans(&out.computes[3], 2600, 2900));
    CHECK(out.copy_count == 2 && spans(&out.copies[0], 0, 1000) && spans(&out.copies[1], 1600, 2600));
    CHECK(out.period_ns == 2900 && out.stall_ns == 600 + 600);
    viking_simulation_free(&out);
    viking_trace_free(&self.trace);
}

static void a_copy_across_the_edge_shows_at_both_ends(void)
{
    /* The fetch for use 0 may start when use 0 of the period before is over, 100 ns in; the link needs 1000 ns, the
     * other use 700: the copy runs 100-1100 of a period of 1100 (100 + 700 + 300 of waiting). */
    by_hand self;
    by_hand_open(&self, 2);
    use_weight(&self.trace, 0, 100);
    use_weight(&self.trace, 1, 700);
    add_fetch(&self, 0, 0, -2);
    viking_simulation out = run(&self, 1.0);
    CHECK(out.period_ns == 1100 && out.stall_ns == 300 && out.link_ns == 1000);
    /* The period starts with the wait: 300 ns of the copy, then use 0, use 1, and the copy's first 700 ns. */
    CHECK(spans(&out.computes[0], 300, 400) && spans(&out.computes[1], 400, 1100));
    CHECK(out.copy_count == 2 && spans(&out.copies[0], 0, 300) && spans(&out.copies[1], 400, 1100));
    CHECK(out.copies[0].weight == 0 && out.copies[1].weight == 0);
    viking_simulation_free(&out);
    viking_trace_free(&self.trace);
}

static void the_queue_is_first_in_first_out(void)
{
    /* The second fetch could start at once, but the first waits for use 1. */
    by_hand self;
    by_hand_open(&self, 4);
    for (uint32_t w = 0; w < 4; w++)
        use_weight(&self.trace, w, 100);
    add_fetch(&self, 2, 2, 1);
    add_fetch(&self, 3, 3, VIKING_PLAN_NO_GATE);
    viking_simulation out = run(&self, 1.0);
    CHECK(spans(&out.copies[0], 200, 1200) && spans(&out.copies[1], 1200, 2200));
    CHECK(out.period_ns == 2300 && out.stall_ns == 1000 + 900);
    viking_simulation_free(&out);
    viking_trace_free(&self.trace);
}

static void a_gate_opens_with_the_compute_that_the_hold_covers(void)
{
    /* Weight 0 is held while 1 runs; the fetch after its release waits for both. */
    by_hand self;
    uint32_t outer;
    by_hand_open(&self, 3);
    CHECK_OK(viking_trace_acquire(&self.trace, 0, VIKING_USE_READ, &outer));
    self.trace.uses[outer].compute_ns = 100;
    use_weight(&self.trace, 1, 200);
    viking_trace_release(&self.trace, outer);
    use_weight(&self.trace, 2, 50);
    add_fetch(&self, 2, 2, 0);
    viking_simulation out = run(&self, 1.0);
    CHECK(spans(&out.copies[0], 300, 1300) && out.period_ns == 1350);
    viking_simulation_free(&out);
    viking_trace_free(&self.trace);
}

static void latency_counts_per_copy(void)
{
    by_hand self;
    by_hand_open(&self, 2);
    use_weight(&self.trace, 0, 300);
    use_weight(&self.trace, 1, 500);
    add_fetch(&self, 0, 0, -1);
    add_fetch(&self, 1, 1, 0);
    self.link.latency_ns = 10;
    viking_simulation out = run(&self, 1.0);
    CHECK(out.period_ns == 2820 && out.link_ns == 2020);
    viking_simulation_free(&out);
    viking_trace_free(&self.trace);
}

static void the_floor_is_summed_over_sweeps(void)
{
    by_hand self;
    static const uint32_t turns[] = {0, 2};
    by_hand_open(&self, 2);
    sweep_weights(&self.trace, 2, 400); /* 800 ns forwards, 2400 back */
    CHECK(viking_simulate_floor_ns(&self.trace, self.bytes, 2, 2 * SIZE, &self.link, turns, 2) == 800 + 2400);
    CHECK(viking_simulate_floor_ns(&self.trace, self.bytes, 2, SIZE, &self.link, turns, 2) == 1000 + 2400);
    CHECK(viking_simulate_floor_ns(&self.trace, self.bytes, 2, 0, &self.link, turns, 2) == 2000 + 2400);
    CHECK(viking_simulate_floor_ns(&self.trace, self.bytes, 2, SIZE, &self.link, turns, 1) == 3200);
    CHECK(viking_simulate_floor_ns(&self.trace, self.bytes, 2, SIZE, &self.link, turns, 0) == 0);
    viking_trace_free(&self.trace);
}

static void what_makes_no_sense_is_refused(void)
{
    by_hand self;
    viking_simulation out;
    by_hand_open(&self, 2);
    use_weight(&self.trace, 0, 1);
    use_weight(&self.trace, 1, 1);
    add_fetch(&self, 1, 1, 1); /* waits for what it serves */
    CHECK(viking_simulate(&self.map, &self.plan, &self.trace, &self.link, 1.0, &out) == VIKING_ERROR_INVALID);
    self.fetches[0].after = -3;
    CHECK(viking_simulate(&self.map, &self.plan, &self.trace, &self.link, 1.0, &out) == VIKING_ERROR_INVALID);
    self.fetches[0].after = 0;
    self.link.bytes_per_second = 0;
    CHECK(viking_simulate(&self.map, &self.plan, &self.trace, &self.link, 1.0, &out) == VIKING_ERROR_INVALID);
    self.link.bytes_per_second = 1;
    CHECK(viking_simulate(&self.map, &self.plan, &self.trace, &self.link, -1.0, &out) == VIKING_ERROR_INVALID);
    viking_trace_clear(&self.trace);
    self.plan.count = 0;
    CHECK_OK(viking_simulate(&self.map, &self.plan, &self.trace, &self.link, 1.0, &out));
    CHECK(out.period_ns == 0 && out.copy_count == 0);
    viking_simulation_free(&out);
    viking_trace_free(&self.trace);
}

int main(void)
{
    RUN(without_fetches_a_step_is_its_compute);
    RUN(one_address_for_two_weights_alternates_copy_and_compute);
    RUN(copies_and_computes_that_do_not_meet_run_beside_each_other);
    RUN(a_copy_across_the_edge_shows_at_both_ends);
    RUN(the_queue_is_first_in_first_out);
    RUN(a_gate_opens_with_the_compute_that_the_hold_covers);
    RUN(latency_counts_per_copy);
    RUN(the_floor_is_summed_over_sweeps);
    RUN(what_makes_no_sense_is_refused);
    return 0;
}

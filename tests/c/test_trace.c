/* The trace: ticks, growth, comparison, and the shortest period. */
#include "core/trace.h"

#include <string.h>

#include "random_trace.h"

static void fill(viking_trace *trace, const char *weights)
{
    for (const char *at = weights; *at != 0; at++)
        use_weight(trace, (uint32_t)(*at - 'a'), 0);
}

static uint32_t period_of(const char *weights)
{
    viking_trace trace;
    uint32_t period = 99;
    viking_trace_init(&trace);
    fill(&trace, weights);
    CHECK_OK(viking_trace_period(&trace, &period));
    viking_trace_free(&trace);
    return period;
}

static void ticks_count_acquires_and_releases_together(void)
{
    viking_trace trace;
    uint32_t outer, inner;
    viking_trace_init(&trace);
    CHECK_OK(viking_trace_acquire(&trace, 7, VIKING_USE_READ, &outer));
    CHECK_OK(viking_trace_acquire(&trace, 9, VIKING_USE_WRITE, &inner));
    CHECK(trace.uses[outer].end == UINT32_MAX && trace.uses[inner].end == UINT32_MAX);
    viking_trace_release(&trace, inner);
    viking_trace_release(&trace, outer);
    CHECK(outer == 0 && inner == 1 && trace.count == 2 && trace.ticks == 4);
    CHECK(trace.uses[0].weight == 7 && trace.uses[0].begin == 0 && trace.uses[0].end == 3);
    CHECK(trace.uses[1].weight == 9 && trace.uses[1].begin == 1 && trace.uses[1].end == 2);
    CHECK(trace.uses[1].kind == VIKING_USE_WRITE);
    viking_trace_free(&trace);
}

static void a_second_release_changes_nothing(void)
{
    viking_trace trace;
    uint32_t index;
    viking_trace_init(&trace);
    CHECK_OK(viking_trace_acquire(&trace, 0, VIKING_USE_READ, &index));
    viking_trace_release(&trace, index);
    viking_trace_release(&trace, index);
    viking_trace_release(&trace, 17);
    CHECK(trace.ticks == 2 && trace.uses[0].end == 1);
    viking_trace_free(&trace);
}

static void a_cleared_trace_keeps_its_memory(void)
{
    viking_trace trace;
    const viking_use *before;
    viking_trace_init(&trace);
    for (uint32_t i = 0; i < 1000; i++)
        use_weight(&trace, i, i);
    CHECK(trace.count == 1000 && trace.uses[999].weight == 999 && trace.uses[999].begin == 1998);
    before = trace.uses;
    viking_trace_clear(&trace);
    CHECK(trace.count == 0 && trace.ticks == 0 && trace.uses == before);
    use_weight(&trace, 5, 0);
    CHECK(trace.uses == before && trace.uses[0].begin == 0);
    viking_trace_free(&trace);
    CHECK(trace.uses == NULL && trace.capacity == 0);
}

static void a_copy_stands_alone(void)
{
    viking_trace a, b;
    viking_trace_init(&a);
    viking_trace_init(&b);
    CHECK_OK(viking_trace_copy(&b, &a));
    CHECK(b.count == 0 && viking_trace_equal(&a, &b));
    fill(&a, "abc");
    CHECK_OK(viking_trace_copy(&b, &a));
    a.uses[1].weight = 25;
    CHECK(b.count == 3 && b.ticks == 6 && b.uses[1].weight == 1 && !viking_trace_equal(&a, &b));
    viking_trace_free(&a);
    viking_trace_free(&b);
}

static void traces_are_compared_by_weight_and_kind(void)
{
    viking_trace a, b;
    viking_trace_init(&a);
    viking_trace_init(&b);
    fill(&a, "abcd");
    fill(&b, "ab");
    CHECK(viking_trace_has_prefix(&a, &b) && !viking_trace_has_prefix(&b, &a) && !viking_trace_equal(&a, &b));
    fill(&b, "cd");
    b.uses[2].begin += 100; /* other ticks */
    CHECK(viking_trace_equal(&a, &b));
    b.uses[2].kind = VIKING_USE_WRITE;
    CHECK(!viking_trace_equal(&a, &b) && !viking_trace_has_prefix(&a, &b));
    viking_trace_free(&a);
    viking_trace_free(&b);
}

static void the_shortest_repetition_is_the_period(void)
{
    CHECK(period_of("") == 0);
    CHECK(period_of("a") == 0);
    CHECK(period_of("aa") == 1);
    CHECK(period_of("ab") == 0);
    CHECK(period_of("abab") == 2);
    CHECK(period_of("ababa") == 2);
    CHECK(period_of("aba") == 0);
    CHECK(period_of("abcbaabcba") == 5);
    CHECK(period_of("abcbaabcb") == 0); /* the second is not whole yet */
    CHECK(period_of("aabaab") == 3);
    CHECK(period_of("aabaabx") == 0);
    CHECK(period_of("abcabcabcab") == 3);
}

static void the_period_is_what_trying_all_of_them_finds(void)
{
    for (uint64_t seed = 1; seed <= 3000; seed++) {
        uint64_t state = seed * 77;
        uint32_t count = random_below(&state, 14), letters = 1 + random_below(&state, 2), found, expected = 0;
        viking_trace trace;
        viking_trace_init(&trace);
        for (uint32_t i = 0; i < count; i++)
            use_weight(&trace, random_below(&state, letters + 1), 0);
        for (uint32_t p = count / 2; p >= 1; p--) {
            uint32_t i = p;
            while (i < count && trace.uses[i].weight == trace.uses[i - p].weight)
                i++;
            expected = i == count ? p : expected;
        }
        CHECK_OK(viking_trace_period(&trace, &found));
        CHECK(found == expected);
        viking_trace_free(&trace);
    }
}

int main(void)
{
    RUN(ticks_count_acquires_and_releases_together);
    RUN(a_second_release_changes_nothing);
    RUN(a_cleared_trace_keeps_its_memory);
    RUN(a_copy_stands_alone);
    RUN(traces_are_compared_by_weight_and_kind);
    RUN(the_shortest_repetition_is_the_period);
    RUN(the_period_is_what_trying_all_of_them_finds);
    return 0;
}

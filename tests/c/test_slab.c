/* The slab's books: what is present, what is in use, where there is room. */
#include "check.h"

#include <string.h>

#include "core/slab.h"

enum { KIB = 1024, ME = 7, OTHER = 8 };

/* A hand-made map: weights at given places, the ring first. */
static viking_map *make_map(uint32_t count, const uint64_t *offsets, const uint64_t *bytes, uint64_t ring_bytes)
{
    static const viking_link link = {.bytes_per_second = 1000000000};
    static const uint64_t some[8] = {KIB, KIB, KIB, KIB, KIB, KIB, KIB, KIB};
    viking_trace empty;
    viking_map *map = NULL;
    viking_trace_init(&empty);
    viking_map_request request = {
        .trace = &empty, .bytes = some, .count = count, .budget_bytes = 8 * KIB, .link = link};
    CHECK_OK(viking_map_build(&request, &map));
    memcpy(map->offsets, offsets, count * sizeof *offsets);
    memcpy(map->bytes, bytes, count * sizeof *bytes);
    map->ring_bytes = ring_bytes;
    return map;
}

/* Weights 0 and 1 share bytes; 2 is behind them; the ring has 4 KiB, 1 KiB of it free; 3 is a resident. */
static viking_slab make_slab(void)
{
    static const uint64_t offsets[] = {0, KIB, 3 * KIB, 4 * KIB};
    static const uint64_t bytes[] = {2 * KIB, 2 * KIB, KIB, KIB};
    viking_slab slab;
    viking_slab_init(&slab);
    CHECK_OK(viking_slab_adopt(&slab, make_map(4, offsets, bytes, 4 * KIB), false));
    return slab;
}

static uint64_t use(viking_slab *slab, uint32_t weight, uint64_t offset, uintptr_t thread)
{
    CHECK_OK(viking_slab_reserve(slab));
    return viking_slab_acquire(slab, weight, offset, thread)->ticket;
}

static void nothing_is_present_at_first(void)
{
    viking_slab slab = make_slab();
    for (uint32_t w = 0; w < 4; w++)
        CHECK(!slab.present[w] && !viking_slab_blocked(&slab, w) && viking_slab_displaced(&slab, w) == NULL);
    viking_slab_free(&slab);
}

static void spans_that_touch_do_not_intersect(void)
{
    viking_slab slab = make_slab();
    CHECK(viking_slab_intersects(&slab, 0, 2 * KIB - 1, 1) && !viking_slab_intersects(&slab, 0, 2 * KIB, KIB));
    CHECK(viking_slab_intersects(&slab, 1, 0, KIB + 1) && !viking_slab_intersects(&slab, 1, 0, KIB));
    viking_slab_free(&slab);
}

static void a_use_blocks_what_shares_its_bytes(void)
{
    viking_slab slab = make_slab();
    viking_lease ended;
    uint64_t ticket = use(&slab, 0, 0, ME);
    CHECK(viking_slab_blocked(&slab, 0) && viking_slab_blocked(&slab, 1) && !viking_slab_blocked(&slab, 2));
    CHECK_OK(viking_slab_release(&slab, ticket, &ended));
    CHECK(ended.weight == 0 && ended.bytes == 2 * KIB && !ended.displaced && ended.thread == ME);
    CHECK(!viking_slab_blocked(&slab, 1));
    CHECK(viking_slab_release(&slab, ticket, &ended) == VIKING_ERROR_STATE);
    CHECK(strstr(viking_status_detail(), "released before") != NULL);
    viking_slab_free(&slab);
}

static void many_uses_end_in_any_order(void)
{
    enum { USES = 100 };
    viking_slab slab = make_slab();
    uint64_t tickets[USES];
    for (uint32_t i = 0; i < USES; i++)
        tickets[i] = use(&slab, i % 4, slab.map->offsets[i % 4], ME);
    for (uint32_t i = 0; i < USES; i++) {
        viking_lease ended;
        uint32_t k = i * 37 % USES;
        CHECK_OK(viking_slab_release(&slab, tickets[k], &ended));
        CHECK(ended.ticket == tickets[k] && ended.weight == k % 4);
    }
    CHECK(slab.lease_count == 0);
    viking_slab_free(&slab);
}

static void a_gap_is_the_first_free_part_of_the_ring(void)
{
    viking_slab slab = make_slab();
    uint64_t offset = 99;
    CHECK_OK(viking_slab_gap(&slab, KIB, ME, &offset));
    CHECK(offset == 0);
    use(&slab, 3, 4 * KIB, ME); /* a resident is in nobody's way */
    use(&slab, 0, 0, ME);
    CHECK_OK(viking_slab_gap(&slab, KIB, ME, &offset));
    CHECK(offset == 2 * KIB);
    CHECK_OK(viking_slab_gap(&slab, 2 * KIB, ME, &offset));
    CHECK(offset == 2 * KIB);
    CHECK(viking_slab_gap(&slab, 3 * KIB, ME, &offset) == VIKING_ERROR_BUDGET);
    CHECK(strstr(viking_status_detail(), "raise the weights budget") != NULL);
    use(&slab, 2, 3 * KIB, OTHER);
    CHECK(viking_slab_gap(&slab, 2 * KIB, ME, &offset) == VIKING_BUSY);
    CHECK_OK(viking_slab_gap(&slab, KIB, ME, &offset));
    CHECK(offset == 2 * KIB);
    viking_slab_free(&slab);
}

static void a_displaced_use_is_found_until_an_edit(void)
{
    viking_slab slab = make_slab();
    use(&slab, 1, KIB, ME);
    uint64_t ticket = use(&slab, 0, 3 * KIB, ME);
    CHECK(viking_slab_displaced(&slab, 0) != NULL && viking_slab_displaced(&slab, 0)->ticket == ticket);
    CHECK(viking_slab_displaced(&slab, 1) == NULL);
    slab.present[0] = slab.present[1] = true;
    viking_slab_forget(&slab, 0);
    CHECK(viking_slab_displaced(&slab, 0) == NULL && !slab.present[0] && slab.present[1]);
    viking_slab_forget(&slab, 12345);
    viking_slab_free(&slab);
}

static void what_keeps_its_place_is_kept(void)
{
    static const uint64_t offsets[] = {0, 2 * KIB, 3 * KIB, 4 * KIB, 5 * KIB};
    static const uint64_t bytes[] = {2 * KIB, 2 * KIB, 512, KIB, KIB};
    viking_slab slab = make_slab();
    for (uint32_t w = 0; w < 4; w++)
        slab.present[w] = w != 3;
    CHECK_OK(viking_slab_adopt(&slab, make_map(5, offsets, bytes, 4 * KIB), true));
    CHECK(slab.present[0] && !slab.present[1] && !slab.present[2] && !slab.present[3] && !slab.present[4]);
    CHECK_OK(viking_slab_adopt(&slab, make_map(5, offsets, bytes, 4 * KIB), false));
    CHECK(!slab.present[0]);
    viking_slab_free(&slab);
}

static void threads_wait_only_for_threads_that_run(void)
{
    viking_slab slab = make_slab();
    viking_lease ended;
    CHECK_OK(viking_slab_wait(&slab, ME));
    use(&slab, 0, 0, ME);
    CHECK_OK(viking_slab_wait(&slab, ME)); /* its own use is all there is */
    uint64_t ticket = use(&slab, 2, 3 * KIB, OTHER);
    CHECK(viking_slab_wait(&slab, ME) == VIKING_BUSY);
    CHECK(viking_slab_wait(&slab, OTHER) == VIKING_ERROR_BUDGET); /* for ME, who waits for OTHER */
    CHECK(strstr(viking_status_detail(), "wait for one another") != NULL);
    CHECK(viking_slab_wait(&slab, 9) == VIKING_BUSY); /* OTHER was refused, and runs */
    CHECK_OK(viking_slab_release(&slab, ticket, &ended));
    viking_slab_wake(&slab);
    CHECK(viking_slab_wait(&slab, OTHER) == VIKING_BUSY);
    viking_slab_free(&slab);
}

int main(void)
{
    RUN(nothing_is_present_at_first);
    RUN(spans_that_touch_do_not_intersect);
    RUN(a_use_blocks_what_shares_its_bytes);
    RUN(many_uses_end_in_any_order);
    RUN(a_gap_is_the_first_free_part_of_the_ring);
    RUN(a_displaced_use_is_found_until_an_edit);
    RUN(what_keeps_its_place_is_kept);
    RUN(threads_wait_only_for_threads_that_run);
    return 0;
}

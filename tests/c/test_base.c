/* The ground floor, as far as every system must behave alike: sentences per thread, mappings, threads, parallel ranges.
 * What only one system promises is in test_posix.c and test_windows.c. */
#include "check.h"

#include <stdatomic.h>
#include <string.h>

#include "base/gate.h"
#include "base/os.h"
#include "base/parallel.h"

/* ---- status ---- */

static void the_sentence_is_empty_before_the_first_failure(void)
{
    CHECK(strcmp(viking_status_detail(), "") == 0);
}

static void a_failure_returns_its_code_and_leaves_its_sentence(void)
{
    CHECK(viking_status_fail(VIKING_ERROR_BUDGET, "needs %d bytes of %s", 7, "memory") == VIKING_ERROR_BUDGET);
    CHECK(strcmp(viking_status_detail(), "needs 7 bytes of memory") == 0);
}

static void a_sentence_may_quote_the_one_before(void)
{
    viking_status_fail(VIKING_ERROR_SYSTEM, "inner");
    viking_status_fail(VIKING_ERROR_DEVICE, "outer (%s)", viking_status_detail());
    CHECK(strcmp(viking_status_detail(), "outer (inner)") == 0);
}

static void a_long_sentence_is_cut_at_511_bytes(void)
{
    char text[600];
    memset(text, 'x', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    viking_status_fail(VIKING_ERROR_INVALID, "%s", text);
    CHECK(strlen(viking_status_detail()) == 511);
    CHECK(strncmp(viking_status_detail(), text, 511) == 0);
}

static void fail_in_thread(void *argument)
{
    CHECK(strcmp(viking_status_detail(), "") == 0);
    viking_status_fail(VIKING_ERROR_SYSTEM, "%s", (const char *)argument);
    CHECK(strcmp(viking_status_detail(), argument) == 0);
}

static void each_thread_has_its_own_sentence(void)
{
    viking_status_fail(VIKING_ERROR_INVALID, "mine");
    char first[] = "first", second[] = "second";
    viking_thread *a = NULL, *b = NULL;
    CHECK_OK(viking_thread_start(fail_in_thread, first, &a));
    CHECK_OK(viking_thread_start(fail_in_thread, second, &b));
    viking_thread_join(a);
    viking_thread_join(b);
    CHECK(strcmp(viking_status_detail(), "mine") == 0);
}

static void every_code_has_a_name_of_its_own(void)
{
    for (int code = VIKING_BUSY; code >= VIKING_ERROR_SYSTEM; code--) {
        const char *name = viking_status_name((viking_status)code);
        CHECK(strncmp(name, "VIKING_", 7) == 0 && strcmp(name, "VIKING_ERROR_UNKNOWN") != 0);
        for (int other = VIKING_BUSY; other > code; other--)
            CHECK(strcmp(name, viking_status_name((viking_status)other)) != 0);
    }
    CHECK(strcmp(viking_status_name((viking_status)-99), "VIKING_ERROR_UNKNOWN") == 0);
}

/* ---- memory ---- */

static void a_mapping_is_zeroed_and_page_aligned(void)
{
    const size_t sizes[] = {1, 4096, 5000, ((size_t)8 << 20) + 3};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        void *address = NULL;
        CHECK_OK(viking_os_map(sizes[i], &address));
        CHECK((uintptr_t)address % viking_os_page_bytes() == 0);
        const unsigned char *bytes = address;
        for (size_t at = 0; at < sizes[i]; at++)
            CHECK(bytes[at] == 0);
        memset(address, 0xa5, sizes[i]);
        viking_os_unmap(address, sizes[i]);
    }
}

static void an_impossible_mapping_says_how_much_was_asked(void)
{
    void *address = &address;
    CHECK(viking_os_map(SIZE_MAX / 4, &address) == VIKING_ERROR_NO_HOST_MEMORY);
    CHECK(address == NULL);
    CHECK(strstr(viking_status_detail(), "4611686018427387903 bytes"));
    CHECK(viking_os_map(0, &address) == VIKING_ERROR_INVALID);
}

/* ---- processors, time, threads ---- */

static void the_clock_counts_a_sleep(void)
{
    uint64_t before = viking_os_clock_ns();
    viking_os_sleep_ns(20 * 1000 * 1000);
    CHECK(viking_os_clock_ns() - before >= 20 * 1000 * 1000);
}

typedef struct mailbox {
    viking_mutex *mutex;
    viking_condition *condition;
    int turn;
    uintptr_t identity;
} mailbox;

static void answer(void *opaque)
{
    mailbox *box = opaque;
    viking_mutex_lock(box->mutex);
    box->identity = viking_thread_identity();
    for (int round = 0; round < 100; round++) {
        while (box->turn % 2 == 0)
            viking_condition_wait(box->condition, box->mutex);
        box->turn++;
        viking_condition_broadcast(box->condition);
    }
    viking_mutex_unlock(box->mutex);
}

static void threads_take_turns_through_a_condition(void)
{
    mailbox box = {0};
    CHECK_OK(viking_mutex_open(&box.mutex));
    CHECK_OK(viking_condition_open(&box.condition));
    viking_thread *thread = NULL;
    CHECK_OK(viking_thread_start(answer, &box, &thread));
    viking_mutex_lock(box.mutex);
    for (int round = 0; round < 100; round++) {
        box.turn++;
        viking_condition_broadcast(box.condition);
        while (box.turn % 2 == 1)
            viking_condition_wait(box.condition, box.mutex);
    }
    viking_mutex_unlock(box.mutex);
    viking_thread_join(thread);
    CHECK(box.turn == 200);
    CHECK(box.identity != viking_thread_identity());
    CHECK(viking_thread_identity() == viking_thread_identity());
    viking_condition_close(box.condition);
    viking_mutex_close(box.mutex);
    viking_condition_close(NULL);
    viking_mutex_close(NULL);
}

/* ---- parallel ---- */

enum { MOST_CELLS = 100003 };

typedef struct coverage {
    atomic_uchar visits[MOST_CELLS];
    size_t count;
    size_t grain;
    atomic_uint calls;
} coverage;

static void visit(void *opaque, size_t begin, size_t end)
{
    coverage *seen = opaque;
    CHECK(begin < end && end <= seen->count);
    CHECK(begin % seen->grain == 0);
    CHECK(end == seen->count || end % seen->grain == 0);
    atomic_fetch_add(&seen->calls, 1);
    for (size_t at = begin; at < end; at++)
        atomic_fetch_add(&seen->visits[at], 1);
}

static void ranges_cover_everything_exactly_once(void)
{
    const size_t counts[] = {0, 1, 2, 3, 7, 63, 64, 65, 127, 1000, 4096, 65537, MOST_CELLS};
    const size_t grains[] = {1, 2, 3, 16, 64, 1000, 4096, 200000};
    const unsigned threads[] = {0, 1, 2, 3, 7, 64, 1000};
    coverage *seen = calloc(1, sizeof *seen);
    CHECK(seen);
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++)
        for (size_t g = 0; g < sizeof grains / sizeof *grains; g++)
            for (size_t t = 0; t < sizeof threads / sizeof *threads; t++) {
                memset(seen->visits, 0, sizeof seen->visits);
                seen->count = counts[c];
                seen->grain = grains[g];
                atomic_store(&seen->calls, 0);
                viking_parallel_for(counts[c], grains[g], threads[t], visit, seen);
                for (size_t at = 0; at < MOST_CELLS; at++)
                    CHECK(atomic_load(&seen->visits[at]) == (at < counts[c]));
                if (threads[t] != 0)
                    CHECK(atomic_load(&seen->calls) <= threads[t]);
                if (counts[c] >= 4 * grains[g] && threads[t] == 3)
                    CHECK(atomic_load(&seen->calls) == 3);
            }
    free(seen);
}

static void parallel_copies_are_equal_and_stay_inside(void)
{
    const size_t sizes[] = {0, 1, 4095, ((size_t)1 << 20) + 1, ((size_t)5 << 20) + 17};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (unsigned threads = 0; threads <= 5; threads++) {
            unsigned char *source = malloc(sizes[i] + 1), *destination = malloc(sizes[i] + 2);
            CHECK(source && destination);
            for (size_t at = 0; at < sizes[i]; at++)
                source[at] = (unsigned char)(at * 2654435761u >> 13);
            destination[0] = destination[sizes[i] + 1] = 0xee;
            viking_parallel_copy(destination + 1, source, sizes[i], threads);
            CHECK(sizes[i] == 0 || memcmp(destination + 1, source, sizes[i]) == 0);
            CHECK(destination[0] == 0xee && destination[sizes[i] + 1] == 0xee);
            free(source);
            free(destination);
        }
}

/* ---- the gate ---- */

typedef struct {
    viking_gate gate;
    atomic_int entered;
    atomic_int refused;
    int *behind; /* freed once the gate is shut and everybody has left */
} house;

static void visit_until_shut(void *opaque)
{
    house *house_ = opaque;
    while (viking_gate_enter(&house_->gate)) {
        CHECK(*house_->behind == 7);
        atomic_fetch_add(&house_->entered, 1);
        viking_gate_leave(&house_->gate);
    }
    atomic_fetch_add(&house_->refused, 1);
}

static void who_shuts_a_gate_may_free_what_is_behind_it(void)
{
    for (int round = 0; round < 50; round++) {
        house house_ = {.behind = malloc(sizeof *house_.behind)};
        viking_thread *visitors[3];
        CHECK(house_.behind != NULL);
        *house_.behind = 7;
        CHECK_OK(viking_gate_open(&house_.gate));
        for (int i = 0; i < 3; i++)
            CHECK_OK(viking_thread_start(visit_until_shut, &house_, &visitors[i]));
        while (atomic_load(&house_.entered) < 20)
            viking_os_sleep_ns(1000);
        CHECK(viking_gate_shut(&house_.gate));
        CHECK(!viking_gate_shut(&house_.gate));
        viking_gate_await(&house_.gate);
        *house_.behind = 0;
        free(house_.behind);
        for (int i = 0; i < 3; i++)
            viking_thread_join(visitors[i]);
        CHECK(atomic_load(&house_.refused) == 3);
        viking_gate_close(&house_.gate);
    }
}

typedef struct {
    viking_gate gate;
    atomic_bool inside;
    atomic_bool leaving;
} room;

static void stay_until_it_is_shut(void *opaque)
{
    room *room_ = opaque;
    CHECK(viking_gate_enter(&room_->gate));
    atomic_store(&room_->inside, true);
    while (!atomic_load(&room_->gate.shut))
        viking_os_sleep_ns(1000);
    viking_os_sleep_ns(2000000);
    atomic_store(&room_->leaving, true);
    viking_gate_leave(&room_->gate);
}

static void shutting_a_gate_waits_for_who_is_inside(void)
{
    room room_ = {0};
    viking_thread *guest = NULL;
    CHECK_OK(viking_gate_open(&room_.gate));
    CHECK_OK(viking_thread_start(stay_until_it_is_shut, &room_, &guest));
    while (!atomic_load(&room_.inside))
        viking_os_sleep_ns(1000);
    CHECK(viking_gate_shut(&room_.gate));
    viking_gate_await(&room_.gate);
    CHECK(atomic_load(&room_.leaving));
    CHECK(!viking_gate_enter(&room_.gate));
    viking_thread_join(guest);
    viking_gate_close(&room_.gate);
}

int main(void)
{
    RUN(the_sentence_is_empty_before_the_first_failure);
    RUN(a_failure_returns_its_code_and_leaves_its_sentence);
    RUN(a_sentence_may_quote_the_one_before);
    RUN(a_long_sentence_is_cut_at_511_bytes);
    RUN(each_thread_has_its_own_sentence);
    RUN(every_code_has_a_name_of_its_own);
    RUN(a_mapping_is_zeroed_and_page_aligned);
    RUN(an_impossible_mapping_says_how_much_was_asked);
    RUN(the_clock_counts_a_sleep);
    RUN(threads_take_turns_through_a_condition);
    RUN(ranges_cover_everything_exactly_once);
    RUN(parallel_copies_are_equal_and_stay_inside);
    RUN(who_shuts_a_gate_may_free_what_is_behind_it);
    RUN(shutting_a_gate_waits_for_who_is_inside);
    return 0;
}

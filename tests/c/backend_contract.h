/* What backend.h promises, as tests that every backend passes: host, CUDA over the fake runtime, CUDA over a real one.
 * Device memory is looked at only through copies, and a stream is held up only through `launch`. */
#ifndef VIKING_TESTS_BACKEND_CONTRACT_H
#define VIKING_TESTS_BACKEND_CONTRACT_H

#include "check.h"

#include <stdatomic.h>
#include <string.h>

#include "backend/backend.h"
#include "base/os.h"

typedef struct contract {
    viking_backend *backend;
    const viking_backend_operations *call;
    /* Queue a function on a stream, as a kernel would be. */
    void (*launch)(viking_backend *backend, viking_stream stream, void (*body)(void *), void *argument);
    /* A real runtime may run what is launched on different streams on one thread, one after the other. */
    bool launches_overlap;
} contract;

#define MILLISECOND 1000000u
#define SLOTS 3
#define ROUNDS 24
#define SLOT_BYTES 4096

static inline viking_stream contract_stream(const contract *c)
{
    viking_stream stream = VIKING_STREAM_CALLER;
    CHECK_OK(c->call->stream_open(c->backend, &stream));
    CHECK(stream != VIKING_STREAM_CALLER);
    return stream;
}

static inline viking_event *contract_event(const contract *c, bool timed)
{
    viking_event *event = NULL;
    CHECK_OK(c->call->event_open(c->backend, timed, &event));
    CHECK(event != NULL);
    return event;
}

static inline bool contract_reached(const contract *c, viking_event *event)
{
    bool reached = false;
    CHECK_OK(c->call->event_reached(c->backend, event, &reached));
    return reached;
}

/* ---- work that stands in for kernels ---- */

static inline void wait_for_flag(void *flag)
{
    while (!atomic_load((atomic_bool *)flag))
        viking_os_sleep_ns(MILLISECOND / 10);
}

static inline void set_flag(void *flag)
{
    atomic_store((atomic_bool *)flag, true);
}

static inline void sleep_20_ms(void *unused)
{
    (void)unused;
    viking_os_sleep_ns(20 * MILLISECOND);
}

/* Notes whether one flag was up when the stream got here, and that it did. */
typedef struct look {
    atomic_bool *at;
    atomic_bool saw;
    atomic_bool done;
} look;

static inline void look_at(void *opaque)
{
    look *self = opaque;
    atomic_store(&self->saw, atomic_load(self->at));
    atomic_store(&self->done, true);
}

/* ---- streams ---- */

static inline void bytes_travel_both_ways(const contract *c)
{
    static const size_t sizes[] = {1, 255, 4096, ((size_t)1 << 20) + 3};
    viking_stream stream = contract_stream(c);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        size_t bytes = sizes[i];
        unsigned char *source = malloc(bytes), *back = calloc(1, bytes + 1);
        void *there = NULL;
        CHECK(source && back);
        for (size_t k = 0; k < bytes; k++)
            source[k] = (unsigned char)(k * 7 + i);
        CHECK_OK(c->call->allocate(c->backend, bytes, &there));
        CHECK((uintptr_t)there % 256 == 0);
        CHECK_OK(c->call->copy(c->backend, VIKING_COPY_TO_DEVICE, there, source, bytes, stream));
        CHECK_OK(c->call->copy(c->backend, VIKING_COPY_TO_HOST, back, there, bytes, stream));
        CHECK_OK(c->call->stream_drain(c->backend, stream));
        CHECK(memcmp(source, back, bytes) == 0 && back[bytes] == 0);
        c->call->release(c->backend, there);
        free(source);
        free(back);
    }
    c->call->stream_close(c->backend, stream);
}

static inline void a_stream_runs_in_order(const contract *c)
{
    enum { COUNT = 200 };
    int source[COUNT], back[COUNT];
    void *there = NULL;
    viking_stream stream = contract_stream(c);
    CHECK_OK(c->call->allocate(c->backend, sizeof(int), &there));
    for (int i = 0; i < COUNT; i++) {
        source[i] = i;
        CHECK_OK(c->call->copy(c->backend, VIKING_COPY_TO_DEVICE, there, &source[i], sizeof(int), stream));
        CHECK_OK(c->call->copy(c->backend, VIKING_COPY_TO_HOST, &back[i], there, sizeof(int), stream));
    }
    CHECK_OK(c->call->stream_drain(c->backend, stream));
    for (int i = 0; i < COUNT; i++)
        CHECK(back[i] == i);
    c->call->release(c->backend, there);
    c->call->stream_close(c->backend, stream);
}

static inline void draining_and_closing_wait_for_the_work(const contract *c)
{
    atomic_bool drained = false, closed = false;
    viking_stream stream = contract_stream(c);
    c->launch(c->backend, stream, sleep_20_ms, NULL);
    c->launch(c->backend, stream, set_flag, &drained);
    CHECK_OK(c->call->stream_drain(c->backend, stream));
    CHECK(atomic_load(&drained));
    CHECK_OK(c->call->stream_drain(c->backend, stream));
    c->launch(c->backend, stream, sleep_20_ms, NULL);
    c->launch(c->backend, stream, set_flag, &closed);
    c->call->stream_close(c->backend, stream);
    CHECK(atomic_load(&closed));
}

static inline void streams_run_beside_each_other(const contract *c)
{
    atomic_bool gate = false;
    viking_stream a = contract_stream(c), b = contract_stream(c);
    c->launch(c->backend, a, wait_for_flag, &gate);
    c->launch(c->backend, b, set_flag, &gate); /* in one queue with the line above this would wait for ever */
    CHECK_OK(c->call->stream_drain(c->backend, a));
    c->call->stream_close(c->backend, a);
    c->call->stream_close(c->backend, b);
}

/* ---- events ---- */

static inline void an_event_never_recorded_stops_nobody(const contract *c)
{
    viking_event *event = contract_event(c, false);
    viking_stream stream = contract_stream(c);
    CHECK(contract_reached(c, event));
    CHECK_OK(c->call->event_drain(c->backend, event));
    CHECK_OK(c->call->stream_wait(c->backend, stream, event));
    CHECK_OK(c->call->stream_wait(c->backend, VIKING_STREAM_CALLER, event));
    CHECK_OK(c->call->stream_drain(c->backend, stream));
    c->call->stream_close(c->backend, stream);
    c->call->event_close(c->backend, event);
    c->call->event_close(c->backend, NULL);
}

static inline void an_event_is_reached_when_its_stream_gets_there(const contract *c)
{
    atomic_bool gate = false;
    viking_event *event = contract_event(c, false);
    viking_stream stream = contract_stream(c);
    c->launch(c->backend, stream, wait_for_flag, &gate);
    CHECK_OK(c->call->event_record(c->backend, event, stream));
    CHECK(!contract_reached(c, event));
    atomic_store(&gate, true);
    CHECK_OK(c->call->event_drain(c->backend, event));
    CHECK(contract_reached(c, event));
    c->call->event_close(c->backend, event);
    c->call->stream_close(c->backend, stream);
}

static inline void recording_again_leaves_earlier_waits_alone(const contract *c)
{
    atomic_bool gate = false;
    look first = {.at = &gate}, second = {.at = &gate};
    viking_event *event = contract_event(c, false);
    viking_stream a = contract_stream(c), b = contract_stream(c);
    CHECK_OK(c->call->event_record(c->backend, event, a));
    CHECK_OK(c->call->stream_wait(c->backend, b, event)); /* the first record */
    c->launch(c->backend, a, wait_for_flag, &gate);
    CHECK_OK(c->call->event_record(c->backend, event, a));
    c->launch(c->backend, b, look_at, &first);
    CHECK_OK(c->call->stream_drain(c->backend, b)); /* or this never returned: the gate is still shut */
    CHECK(atomic_load(&first.done) && !atomic_load(&first.saw));
    CHECK(!contract_reached(c, event));

    CHECK_OK(c->call->stream_wait(c->backend, b, event)); /* the second record */
    c->launch(c->backend, b, look_at, &second);
    viking_os_sleep_ns(5 * MILLISECOND);
    CHECK(!atomic_load(&second.done));
    atomic_store(&gate, true);
    CHECK_OK(c->call->stream_drain(c->backend, b));
    CHECK(atomic_load(&second.saw));
    c->call->stream_close(c->backend, a);
    c->call->stream_close(c->backend, b);
    c->call->event_close(c->backend, event);
}

static inline void a_later_record_elsewhere_does_not_satisfy_an_earlier_wait(const contract *c)
{
    atomic_bool gate = false;
    look there = {.at = &gate};
    viking_event *event = contract_event(c, false);
    viking_stream slow = contract_stream(c), quick = contract_stream(c), waiter = contract_stream(c);
    c->launch(c->backend, slow, wait_for_flag, &gate);
    CHECK_OK(c->call->event_record(c->backend, event, slow));
    CHECK_OK(c->call->stream_wait(c->backend, waiter, event));
    c->launch(c->backend, waiter, look_at, &there);
    CHECK_OK(c->call->event_record(c->backend, event, quick));
    CHECK_OK(c->call->stream_drain(c->backend, quick));
    CHECK(contract_reached(c, event)); /* the latest record is */
    viking_os_sleep_ns(5 * MILLISECOND);
    CHECK(!atomic_load(&there.done));
    atomic_store(&gate, true);
    CHECK_OK(c->call->stream_drain(c->backend, waiter));
    CHECK(atomic_load(&there.saw));
    c->call->stream_close(c->backend, slow);
    c->call->stream_close(c->backend, quick);
    c->call->stream_close(c->backend, waiter);
    c->call->event_close(c->backend, event);
}

static inline void an_event_may_be_closed_while_it_is_waited_for(const contract *c)
{
    atomic_bool gate = false;
    look there = {.at = &gate};
    viking_event *event = contract_event(c, false);
    viking_stream a = contract_stream(c), b = contract_stream(c);
    c->launch(c->backend, a, wait_for_flag, &gate);
    CHECK_OK(c->call->event_record(c->backend, event, a));
    CHECK_OK(c->call->stream_wait(c->backend, b, event));
    c->launch(c->backend, b, look_at, &there);
    c->call->event_close(c->backend, event);
    atomic_store(&gate, true);
    CHECK_OK(c->call->stream_drain(c->backend, b));
    CHECK(atomic_load(&there.saw));
    c->call->stream_close(c->backend, a);
    c->call->stream_close(c->backend, b);
}

static inline void open_the_gate_later(void *gate)
{
    viking_os_sleep_ns(10 * MILLISECOND);
    set_flag(gate);
}

static inline void the_callers_stream_keeps_order_too(const contract *c)
{
    atomic_bool gate = false;
    int source = 7, back = 0;
    void *there = NULL;
    viking_thread *opener = NULL;
    viking_event *event = contract_event(c, false);
    viking_stream stream = contract_stream(c);
    CHECK_OK(c->call->allocate(c->backend, sizeof source, &there));
    CHECK_OK(c->call->copy(c->backend, VIKING_COPY_TO_DEVICE, there, &source, sizeof source, VIKING_STREAM_CALLER));
    CHECK_OK(c->call->event_record(c->backend, event, VIKING_STREAM_CALLER));
    CHECK_OK(c->call->event_drain(c->backend, event));

    CHECK_OK(viking_thread_start(open_the_gate_later, &gate, &opener));
    c->launch(c->backend, stream, wait_for_flag, &gate);
    /* To memory that is not pinned this may wait for the gate, so somebody else must open it. */
    CHECK_OK(c->call->copy(c->backend, VIKING_COPY_TO_HOST, &back, there, sizeof back, stream));
    CHECK_OK(c->call->event_record(c->backend, event, stream));
    CHECK_OK(c->call->stream_wait(c->backend, VIKING_STREAM_CALLER, event)); /* may block: caller_blocks */
    CHECK_OK(c->call->stream_drain(c->backend, VIKING_STREAM_CALLER));
    CHECK(atomic_load(&gate) && back == 7);
    viking_thread_join(opener);
    c->call->release(c->backend, there);
    c->call->event_close(c->backend, event);
    c->call->stream_close(c->backend, stream);
}

static inline void timed_events_measure_the_work_between_them(const contract *c)
{
    atomic_bool gate = false;
    uint64_t ns = 0;
    viking_event *from = contract_event(c, true), *to = contract_event(c, true), *plain = contract_event(c, false);
    viking_stream stream = contract_stream(c);
    CHECK_OK(c->call->event_record(c->backend, from, stream));
    c->launch(c->backend, stream, sleep_20_ms, NULL);
    CHECK_OK(c->call->event_record(c->backend, to, stream));
    CHECK_OK(c->call->event_record(c->backend, plain, stream));
    CHECK_OK(c->call->event_drain(c->backend, plain));
    CHECK_OK(c->call->event_elapsed(c->backend, from, to, &ns));
    CHECK(ns >= 19 * MILLISECOND && ns < 60000ull * MILLISECOND);
    CHECK(c->call->event_elapsed(c->backend, from, plain, &ns) == VIKING_ERROR_INVALID);
    c->launch(c->backend, stream, wait_for_flag, &gate);
    CHECK_OK(c->call->event_record(c->backend, to, stream));
    CHECK(c->call->event_elapsed(c->backend, from, to, &ns) == VIKING_ERROR_STATE);
    atomic_store(&gate, true);
    c->call->stream_close(c->backend, stream);
    c->call->event_close(c->backend, from);
    c->call->event_close(c->backend, to);
    c->call->event_close(c->backend, plain);
}

/* ---- a small engine: tagged weights through a ring ---- */

typedef enum dropped_fence { KEEP_ALL, DROP_READY, DROP_FREE } dropped_fence;

/* Copy ROUNDS weights through SLOTS addresses on one stream and read each back on another. Returns how many were read
 * torn, stale or foreign: 0 with both fences. */
static inline int stream_through_a_ring(const contract *c, dropped_fence drop)
{
    const size_t host_bytes = 2 * (size_t)ROUNDS * SLOT_BYTES;
    unsigned char *source = NULL, *ring = NULL;
    viking_event *ready[SLOTS], *vacant[SLOTS];
    viking_stream copies = contract_stream(c), compute = contract_stream(c);
    CHECK_OK(c->call->allocate(c->backend, (size_t)SLOTS * SLOT_BYTES, (void **)&ring));
    CHECK_OK(viking_os_map(host_bytes, (void **)&source));
    CHECK_OK(c->call->pin(c->backend, source, host_bytes)); /* or copies back would not run beside anything */
    unsigned char *back = source + host_bytes / 2;
    for (int s = 0; s < SLOTS; s++) {
        ready[s] = contract_event(c, false);
        vacant[s] = contract_event(c, false);
    }
    for (int i = 0; i < ROUNDS; i++) {
        int s = i % SLOTS;
        unsigned char *slot = ring + (size_t)s * SLOT_BYTES, *weight = source + (size_t)i * SLOT_BYTES;
        memset(weight, i + 1, SLOT_BYTES);
        if (drop != DROP_FREE)
            CHECK_OK(c->call->stream_wait(c->backend, copies, vacant[s]));
        CHECK_OK(c->call->copy(c->backend, VIKING_COPY_TO_DEVICE, slot, weight, SLOT_BYTES, copies));
        CHECK_OK(c->call->event_record(c->backend, ready[s], copies));
        if (drop != DROP_READY)
            CHECK_OK(c->call->stream_wait(c->backend, compute, ready[s]));
        CHECK_OK(
            c->call->copy(c->backend, VIKING_COPY_TO_HOST, back + (size_t)i * SLOT_BYTES, slot, SLOT_BYTES, compute));
        CHECK_OK(c->call->event_record(c->backend, vacant[s], compute));
    }
    CHECK_OK(c->call->stream_drain(c->backend, compute));
    CHECK_OK(c->call->stream_drain(c->backend, copies));
    int wrong = 0;
    for (int i = 0; i < ROUNDS; i++)
        wrong += memcmp(source + (size_t)i * SLOT_BYTES, back + (size_t)i * SLOT_BYTES, SLOT_BYTES) != 0;
    for (int s = 0; s < SLOTS; s++) {
        c->call->event_close(c->backend, ready[s]);
        c->call->event_close(c->backend, vacant[s]);
    }
    c->call->stream_close(c->backend, copies);
    c->call->stream_close(c->backend, compute);
    c->call->release(c->backend, ring);
    CHECK_OK(c->call->unpin(c->backend, source));
    viking_os_unmap(source, host_bytes);
    return wrong;
}

static inline void fences_keep_weights_whole(const contract *c)
{
    for (int i = 0; i < 10; i++)
        CHECK(stream_through_a_ring(c, KEEP_ALL) == 0);
}

/* ---- several threads ---- */

static inline void one_of_several_threads(void *opaque)
{
    const contract *c = opaque;
    viking_stream stream = contract_stream(c);
    viking_event *event = contract_event(c, false);
    int numbers[2] = {0, 0};
    void *there = NULL;
    CHECK_OK(c->call->allocate(c->backend, sizeof(int), &there));
    for (int i = 1; i <= 100; i++) {
        numbers[0] = i;
        CHECK_OK(c->call->copy(c->backend, VIKING_COPY_TO_DEVICE, there, &numbers[0], sizeof(int), stream));
        CHECK_OK(c->call->copy(c->backend, VIKING_COPY_TO_HOST, &numbers[1], there, sizeof(int), stream));
        CHECK_OK(c->call->event_record(c->backend, event, stream));
        CHECK_OK(c->call->event_drain(c->backend, event));
        CHECK(numbers[1] == i);
    }
    c->call->release(c->backend, there);
    c->call->event_close(c->backend, event);
    c->call->stream_close(c->backend, stream);
}

static inline void several_threads_use_one_backend(const contract *c)
{
    viking_thread *threads[4];
    contract shared = *c;
    for (int i = 0; i < 4; i++)
        CHECK_OK(viking_thread_start(one_of_several_threads, &shared, &threads[i]));
    for (int i = 0; i < 4; i++)
        viking_thread_join(threads[i]);
}

/* ---- memory ---- */

static inline void device_memory_is_finite(const contract *c)
{
    size_t free_bytes = 0, total_bytes = 0, free_later = 0;
    void *there = NULL;
    CHECK_OK(c->call->memory(c->backend, &free_bytes, &total_bytes));
    CHECK(0 < free_bytes && free_bytes <= total_bytes);
    CHECK_OK(c->call->allocate(c->backend, (size_t)8 << 20, &there));
    CHECK_OK(c->call->memory(c->backend, &free_later, &total_bytes));
    CHECK(free_later < free_bytes);
    c->call->release(c->backend, there);
    CHECK(c->call->allocate(c->backend, total_bytes + ((size_t)1 << 30), &there) == VIKING_ERROR_NO_DEVICE_MEMORY);
    CHECK(strstr(viking_status_detail(), "bytes") != NULL);
    CHECK(c->call->allocate(c->backend, 0, &there) == VIKING_ERROR_INVALID);
    CHECK_OK(c->call->memory(c->backend, &free_later, &total_bytes)); /* the failure left nothing behind */
}

static inline void pinning_keeps_its_rules(const contract *c)
{
    size_t page = viking_os_page_bytes(), bytes = 16 * page;
    char *memory = NULL;
    CHECK_OK(viking_os_map(bytes, (void **)&memory));
    CHECK(c->call->pin(c->backend, memory + 1, page) == VIKING_ERROR_INVALID);
    CHECK(c->call->pin(c->backend, memory, 0) == VIKING_ERROR_INVALID);
    CHECK_OK(c->call->pin(c->backend, memory, bytes));
    CHECK(c->call->pin(c->backend, memory + page, page) == VIKING_ERROR_STATE);
    CHECK_OK(c->call->unpin(c->backend, memory));
    CHECK(c->call->unpin(c->backend, memory) == VIKING_ERROR_INVALID);
    CHECK_OK(c->call->pin(c->backend, memory + page, page)); /* what the refusals left */
    CHECK_OK(c->call->unpin(c->backend, memory + page));
    viking_os_unmap(memory, bytes);
}

/* ---- for tests of faults ---- */

/* Every call that may fail, once, undone in reverse order. */
static inline viking_status use_everything(const contract *c, void *page)
{
    size_t free_bytes, total_bytes, page_bytes = viking_os_page_bytes();
    uint64_t ns;
    bool reached;
    void *there = NULL;
    viking_stream stream = VIKING_STREAM_CALLER;
    viking_event *from = NULL, *to = NULL;
    bool pinned = false;
    viking_status status = VIKING_OK;
#define TRY(expression)                                                                                                \
    do {                                                                                                               \
        if ((status = (expression)) != VIKING_OK)                                                                      \
            goto done;                                                                                                 \
    } while (0)
    TRY(c->call->memory(c->backend, &free_bytes, &total_bytes));
    TRY(c->call->allocate(c->backend, page_bytes, &there));
    TRY(c->call->pin(c->backend, page, page_bytes));
    pinned = true;
    TRY(c->call->stream_open(c->backend, &stream));
    TRY(c->call->event_open(c->backend, true, &from));
    TRY(c->call->event_open(c->backend, true, &to));
    TRY(c->call->event_record(c->backend, from, stream));
    TRY(c->call->copy(c->backend, VIKING_COPY_TO_DEVICE, there, page, page_bytes, stream));
    TRY(c->call->stream_wait(c->backend, stream, from));
    TRY(c->call->event_record(c->backend, to, stream));
    TRY(c->call->stream_wait(c->backend, VIKING_STREAM_CALLER, to));
    TRY(c->call->event_drain(c->backend, to));
    TRY(c->call->event_reached(c->backend, to, &reached));
    CHECK(reached);
    TRY(c->call->event_elapsed(c->backend, from, to, &ns));
    TRY(c->call->stream_drain(c->backend, stream));
    pinned = false;
    TRY(c->call->unpin(c->backend, page));
#undef TRY
done:
    c->call->event_close(c->backend, to);
    c->call->event_close(c->backend, from);
    c->call->stream_close(c->backend, stream);
    if (pinned)
        CHECK_OK(c->call->unpin(c->backend, page));
    c->call->release(c->backend, there);
    return status;
}

#define RUN_CONTRACT(test, c)                                                                                          \
    do {                                                                                                               \
        printf("   %s: %s\n", (c)->call->name, #test);                                                                 \
        fflush(stdout);                                                                                                \
        test(c);                                                                                                       \
    } while (0)

static inline void run_backend_contract(const contract *c)
{
    RUN_CONTRACT(bytes_travel_both_ways, c);
    RUN_CONTRACT(a_stream_runs_in_order, c);
    RUN_CONTRACT(draining_and_closing_wait_for_the_work, c);
    RUN_CONTRACT(an_event_never_recorded_stops_nobody, c);
    RUN_CONTRACT(an_event_is_reached_when_its_stream_gets_there, c);
    RUN_CONTRACT(the_callers_stream_keeps_order_too, c);
    RUN_CONTRACT(timed_events_measure_the_work_between_them, c);
    RUN_CONTRACT(fences_keep_weights_whole, c);
    RUN_CONTRACT(several_threads_use_one_backend, c);
    RUN_CONTRACT(device_memory_is_finite, c);
    RUN_CONTRACT(pinning_keeps_its_rules, c);
    if (c->launches_overlap) {
        RUN_CONTRACT(streams_run_beside_each_other, c);
        RUN_CONTRACT(recording_again_leaves_earlier_waits_alone, c);
        RUN_CONTRACT(a_later_record_elsewhere_does_not_satisfy_an_earlier_wait, c);
        RUN_CONTRACT(an_event_may_be_closed_while_it_is_waited_for, c);
    }
}

#endif

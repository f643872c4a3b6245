/* The engine over the CUDA backend and the fake runtime: right bytes under delays, exactly the planned calls, nothing
 * left behind, and nothing broken by a fault in any runtime call. */
#include "tagged.h"

#include <dlfcn.h>

#include "../fake_cudart/fake_cudart.h"
#include "backend/cuda.h"

enum { KEY = 41, COUNT = 8 };

static const uint64_t sizes[COUNT] = {1024, 2048, 512, 1024, 256, 4096, 512, 1024};
static char fake_path[512];

static struct {
    void (*reset)(void);
    int (*fail)(const char *symbol, uint64_t n, int error);
    uint64_t (*calls)(const char *symbol);
    uint64_t (*count)(const char *what);
    void (*register_limit)(uint64_t bytes, int error);
    int (*last_error)(void);
    int (*launch)(void *stream, void (*body)(void *), void *argument);
} fake;

static void find(void *library, const char *symbol, void *field)
{
    void *address = dlsym(library, symbol);
    CHECK(address != NULL);
    memcpy(field, &address, sizeof address);
}

static void load_fake(uint64_t delay_ns)
{
    char text[32];
    snprintf(text, sizeof text, "%llu", (unsigned long long)delay_ns);
    CHECK(setenv("FAKE_CUDART_DELAY_NS", text, 1) == 0);
    void *library = dlopen(fake_path, RTLD_NOW | RTLD_LOCAL);
    CHECK(library != NULL);
    find(library, "fake_cudart_reset", &fake.reset);
    find(library, "fake_cudart_fail", &fake.fail);
    find(library, "fake_cudart_calls", &fake.calls);
    find(library, "fake_cudart_count", &fake.count);
    find(library, "fake_cudart_register_limit", &fake.register_limit);
    find(library, "cudaPeekAtLastError", &fake.last_error);
    find(library, "fake_cudart_launch", &fake.launch);
    fake.reset();
}

static void launch_on_fake(viking_backend *inner, viking_stream stream, void (*body)(void *), void *argument)
{
    (void)inner;
    CHECK(fake.launch(stream, body, argument) == 0);
}

static tagged *open_on_fake(uint64_t delay_ns)
{
    viking_backend *inner = NULL;
    load_fake(delay_ns);
    CHECK_OK(viking_cuda_open(0, fake_path, &inner));
    tagged *t = tagged_prepare(inner, launch_on_fake, COUNT, sizes);
    t->stream_count = 2;
    for (uint32_t s = 0; s < 2; s++)
        CHECK_OK(inner->operations->stream_open(inner, &t->streams[s]));
    return t;
}

static bool nothing_is_left(void)
{
    return fake.count("events") == 0 && fake.count("allocations") == 0 && fake.count("registrations") == 0;
}

static void every_use_finds_its_bytes(void)
{
    for (uint32_t eighths = 0; eighths < 9; eighths++) {
        tagged *t = open_on_fake(20000);
        viking_trace trace;
        viking_trace_init(&trace);
        checkpointed_step(&trace, COUNT, 3);
        CHECK_OK(tagged_attach(t));
        CHECK_OK(tagged_layout(t, tagged_budget(t, eighths), t->streams[0]));
        for (uint32_t w = 0; w < COUNT; w++)
            CHECK_OK(viking_engine_pin(t->engine, t->numbers[w]));
        for (uint32_t pass = 0; pass < 4; pass++) {
            if (pass == 2) /* another budget in mid-run */
                CHECK_OK(tagged_layout(t, tagged_budget(t, 8 - eighths), t->streams[1]));
            CHECK_OK(tagged_pass(t, KEY, &trace));
        }
        tagged_close(t);
        CHECK(nothing_is_left());
        viking_trace_free(&trace);
    }
}

/* One copy, two records and two waits for a streamed use at most, and no other call of the runtime. */
static void a_steady_step_makes_the_planned_calls(void)
{
    tagged *t = open_on_fake(0);
    viking_trace trace;
    viking_plan *plan = NULL;
    viking_trace_init(&trace);
    sweep_weights(&trace, COUNT, 1000);
    CHECK_OK(tagged_attach(t));
    t->stream_count = 1;
    CHECK_OK(tagged_layout(t, tagged_budget(t, 3), t->streams[0]));
    for (uint32_t w = 0; w < COUNT; w++)
        CHECK_OK(viking_engine_pin(t->engine, t->numbers[w]));
    for (uint32_t pass = 0; pass < 6; pass++)
        CHECK_OK(tagged_pass(t, KEY, &trace));
    CHECK_OK(viking_plan_build(t->engine->slab.map, &trace, &plan));
    uint64_t to_device = fake.count("to device"), to_host = fake.count("to host");
    uint64_t copies = fake.calls("cudaMemcpyAsync"), syncs = fake.calls("cudaStreamSynchronize");
    CHECK_OK(tagged_pass(t, KEY, &trace));
    CHECK(fake.calls("cudaMemcpyAsync") - copies == plan->count && plan->count > 0);
    CHECK(fake.calls("cudaStreamSynchronize") == syncs && fake.count("to host") == to_host);
    tagged_drain(t);
    CHECK_OK(viking_engine_drain_copies(t->engine));
    CHECK(fake.count("to device") - to_device == plan->fetched_bytes);
    viking_plan_free(plan);
    t->stream_count = 2;
    tagged_close(t);
    CHECK(nothing_is_left());
    viking_trace_free(&trace);
}

static void after_a_fault_in_any_runtime_call_the_next_pass_is_right(void)
{
    viking_trace trace;
    viking_trace_init(&trace);
    checkpointed_step(&trace, COUNT, 4);
    uint32_t faults = 0, quiet = 0;
    for (uint64_t n = 1; quiet < 3; n += 1 + n / 40) {
        tagged *t = open_on_fake(0);
        CHECK_OK(tagged_attach(t));
        fake.fail("*", n, 700);
        viking_status status = tagged_layout(t, tagged_budget(t, (uint32_t)n % 4), t->streams[0]);
        if (status == VIKING_OK && n % 2 == 0)
            status = viking_engine_use_window(t->engine, 1024);
        for (uint32_t pass = 0; pass < 4 && status == VIKING_OK; pass++)
            status = tagged_pass(t, KEY, &trace);
        quiet = status == VIKING_OK ? quiet + 1 : 0;
        faults += status != VIKING_OK;
        CHECK(status == VIKING_OK || status == VIKING_ERROR_DEVICE);
        fake.fail("*", 0, 0);
        CHECK_OK(tagged_layout(t, tagged_budget(t, 2), t->streams[0]));
        CHECK_OK(tagged_pass(t, KEY, &trace));
        CHECK_OK(tagged_pass(t, KEY, &trace));
        tagged_close(t);
        /* An event whose destruction was the call that failed stays. */
        CHECK(fake.count("events") <= 1 && fake.count("registrations") == 0 && fake.count("allocations") == 0);
    }
    printf("      %u faults\n", faults);
    CHECK(faults > 30);
    viking_trace_free(&trace);
}

/* The runtime refuses to register more: each weight is pinned or staged, and nothing waits or is left behind. */
static void what_the_runtime_does_not_register_is_staged(void)
{
    static const int errors[] = {1, 2, 304, 800, 801};
    size_t page = viking_os_page_bytes();
    for (uint32_t e = 0; e < sizeof errors / sizeof *errors; e++) {
        for (uint64_t pages = 1; pages < 6; pages += 2) {
            tagged *t = open_on_fake(10000);
            viking_trace trace;
            uint32_t refused = 0;
            viking_trace_init(&trace);
            checkpointed_step(&trace, COUNT, 3);
            CHECK_OK(tagged_attach(t));
            CHECK_OK(tagged_layout(t, tagged_smallest(t), t->streams[0]));
            fake.register_limit(pages * page, errors[e]);
            CHECK_OK(viking_engine_use_window(t->engine, 1024));
            for (uint32_t w = 0; w < COUNT; w++) {
                viking_status status = viking_engine_pin(t->engine, t->numbers[w]);
                CHECK(status == VIKING_OK ||
                      status == (errors[e] == 2 ? VIKING_ERROR_NO_HOST_MEMORY : VIKING_ERROR_UNSUPPORTED));
                CHECK(fake.last_error() == 0);
                refused += status != VIKING_OK;
            }
            CHECK(refused > 0 && !viking_engine_may_block(t->engine));
            CHECK(tagged_stats(t).pinned_bytes == fake.count("registered bytes"));
            CHECK(tagged_stats(t).staged_bytes > 0);
            for (uint32_t pass = 0; pass < 3; pass++)
                CHECK_OK(tagged_pass(t, KEY, &trace));
            uint64_t syncs = fake.calls("cudaStreamSynchronize"), calls = fake.calls("cudaLaunchHostFunc");
            CHECK_OK(tagged_pass(t, KEY, &trace));
            CHECK(fake.calls("cudaStreamSynchronize") == syncs && fake.calls("cudaLaunchHostFunc") > calls);
            tagged_close(t);
            CHECK(nothing_is_left());
            viking_trace_free(&trace);
        }
    }
}

static void a_runtime_without_host_calls_copies_from_pageable_memory(void)
{
    char newer[sizeof fake_path];
    viking_trace trace;
    viking_trace_init(&trace);
    checkpointed_step(&trace, COUNT, 3);
    memcpy(newer, fake_path, sizeof newer);
    memcpy(strrchr(fake_path, '/'), "/libold_cudart.so", sizeof "/libold_cudart.so");
    tagged *t = open_on_fake(10000);
    CHECK_OK(tagged_attach(t));
    CHECK_OK(tagged_layout(t, tagged_smallest(t), t->streams[0]));
    CHECK(viking_engine_use_window(t->engine, 1024) == VIKING_ERROR_UNSUPPORTED);
    CHECK(strstr(viking_status_detail(), "cudaLaunchHostFunc") != NULL);
    CHECK(viking_engine_pace(t->engine, 1000000) == VIKING_ERROR_UNSUPPORTED);
    CHECK(viking_engine_may_block(t->engine) && tagged_stats(t).pinned_bytes == 0);
    for (uint32_t pass = 0; pass < 3; pass++)
        CHECK_OK(tagged_pass(t, KEY, &trace));
    tagged_close(t);
    CHECK(nothing_is_left());
    memcpy(fake_path, newer, sizeof newer);
    viking_trace_free(&trace);
}

int main(int count, char **arguments)
{
    const char *slash = count > 0 ? strrchr(arguments[0], '/') : NULL;
    snprintf(fake_path, sizeof fake_path, "%.*s/libfake_cudart.so", slash ? (int)(slash - arguments[0]) : 1,
             slash ? arguments[0] : ".");
    RUN(every_use_finds_its_bytes);
    RUN(a_steady_step_makes_the_planned_calls);
    RUN(what_the_runtime_does_not_register_is_staged);
    RUN(a_runtime_without_host_calls_copies_from_pageable_memory);
    RUN(after_a_fault_in_any_runtime_call_the_next_pass_is_right);
    return 0;
}

/* The CUDA backend, over the fake runtime; and over a real one where the machine has a device. */
#include "backend_contract.h"

#include <dlfcn.h>

#include "../fake_cudart/fake_cudart.h"
#include "backend/cuda.h"
#include "backend/cuda_table.h"

#define ANY_ERROR 999

static char fake_path[512];

static struct {
    void (*reset)(void);
    void (*devices)(int count, uint64_t memory_bytes);
    void (*register_limit)(uint64_t bytes, int error);
    int (*fail)(const char *symbol, uint64_t n, int error);
    uint64_t (*calls)(const char *symbol);
    uint64_t (*count)(const char *what);
    int (*peek)(void);
    int (*get_device)(int *device);
    int (*set_device)(int device);
} fake;

static int (*launch_host_function)(void *stream, void (*body)(void *), void *argument);

static void find(void *library, const char *symbol, void *field)
{
    void *address = dlsym(library, symbol);
    CHECK(address != NULL);
    memcpy(field, &address, sizeof address);
}

static void load_fake(void)
{
    void *library = dlopen(fake_path, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        fprintf(stderr, "%s\n", dlerror());
    CHECK(library != NULL);
    find(library, "fake_cudart_reset", &fake.reset);
    find(library, "fake_cudart_devices", &fake.devices);
    find(library, "fake_cudart_register_limit", &fake.register_limit);
    find(library, "fake_cudart_fail", &fake.fail);
    find(library, "fake_cudart_calls", &fake.calls);
    find(library, "fake_cudart_count", &fake.count);
    find(library, "cudaPeekAtLastError", &fake.peek);
    find(library, "cudaGetDevice", &fake.get_device);
    find(library, "cudaSetDevice", &fake.set_device);
    find(library, "fake_cudart_launch", &launch_host_function);
}

static void launch(viking_backend *backend, viking_stream stream, void (*body)(void *), void *argument)
{
    (void)backend;
    CHECK(launch_host_function(stream, body, argument) == 0);
}

/* A fresh fake with `devices` devices and the backend of the last of them. */
static contract open_fake(int devices)
{
    contract c = {.launch = launch, .launches_overlap = true};
    fake.reset();
    fake.devices(devices, (uint64_t)1 << 30);
    CHECK_OK(viking_cuda_open(devices - 1, fake_path, &c.backend));
    c.call = c.backend->operations;
    return c;
}

static bool detail_says(const char *text)
{
    return strstr(viking_status_detail(), text) != NULL;
}

static bool nothing_is_left(void)
{
    return fake.count("streams") == 0 && fake.count("events") == 0 && fake.count("allocations") == 0 &&
           fake.count("registrations") == 0;
}

static int current(void)
{
    int device = -1;
    CHECK(fake.get_device(&device) == 0);
    return device;
}

static void it_keeps_the_backends_promises(void)
{
    contract c = open_fake(1);
    CHECK(strcmp(c.call->name, "cuda") == 0 && !c.call->caller_blocks);
    run_backend_contract(&c);
    c.call->close(c.backend);
    CHECK(nothing_is_left());
    CHECK(fake.peek() == 0);
}

/* ---- finding the runtime ---- */

static void a_missing_library_is_named(void)
{
    viking_cuda_table table;
    const char *const none[] = {"libno-such-runtime.so.1", "libnor-this.so.2", NULL};
    viking_backend *backend = NULL;
    CHECK(viking_cuda_open(0, "libno-such-runtime.so.1", &backend) == VIKING_ERROR_UNSUPPORTED);
    CHECK(detail_says("libno-such-runtime.so.1"));
    CHECK(viking_cuda_table_open(NULL, none, &table) == VIKING_ERROR_UNSUPPORTED);
    CHECK(detail_says("libno-such-runtime.so.1, libnor-this.so.2") && detail_says("install"));
}

static void a_library_that_is_no_runtime_is_named(void)
{
    viking_cuda_table table;
    CHECK(viking_cuda_table_open("libm.so.6", viking_cuda_table_names, &table) == VIKING_ERROR_UNSUPPORTED);
    CHECK(detail_says("libm.so.6") && detail_says("cuda"));
}

static void copy_file(const char *from, const char *to)
{
    FILE *in = fopen(from, "rb"), *out = fopen(to, "wb");
    CHECK(in && out);
    char buffer[65536];
    for (size_t n; (n = fread(buffer, 1, sizeof buffer, in)) > 0;)
        CHECK(fwrite(buffer, 1, n, out) == n);
    fclose(in);
    CHECK(fclose(out) == 0);
}

static void what_is_loaded_comes_before_what_is_newer(void)
{
    char other[600];
    viking_cuda_table table;
    snprintf(other, sizeof other, "%s.other.so", fake_path);
    copy_file(fake_path, other);
    const char *const both[] = {other, fake_path, NULL};
    const char *const only_other[] = {"libno-such-runtime.so.1", other, NULL};
    CHECK_OK(viking_cuda_table_open(NULL, both, &table));
    CHECK(strcmp(table.library, fake_path) == 0);
    CHECK_OK(viking_cuda_table_open(NULL, only_other, &table));
    CHECK(strcmp(table.library, other) == 0);
    CHECK_OK(viking_cuda_table_open(NULL, both, &table)); /* loaded both: the newer one */
    CHECK(strcmp(table.library, other) == 0);
    remove(other);
}

static void versions_and_the_library_are_known(void)
{
    contract c = open_fake(1);
    viking_cuda_versions versions;
    CHECK_OK(viking_cuda_versions_of(c.backend, &versions));
    CHECK(versions.runtime == 13000 && versions.driver == 13010 && strcmp(versions.library, fake_path) == 0);
    fake.fail("cudaRuntimeGetVersion", 1, ANY_ERROR);
    CHECK(viking_cuda_versions_of(c.backend, &versions) == VIKING_ERROR_DEVICE && detail_says("cudaRuntimeGetVersion"));
    fake.fail("cudaDriverGetVersion", 1, ANY_ERROR);
    CHECK(viking_cuda_versions_of(c.backend, &versions) == VIKING_ERROR_DEVICE && detail_says("cudaDriverGetVersion"));
    CHECK(fake.peek() == 0);
    c.call->close(c.backend);
}

static void a_runtime_is_known_without_a_device(void)
{
    viking_cuda_versions versions;
    fake.reset();
    fake.devices(0, 0);
    CHECK_OK(viking_cuda_find(fake_path, &versions));
    CHECK(versions.runtime == 13000 && strcmp(versions.library, fake_path) == 0);
    CHECK(viking_cuda_find("/no/such/libcudart.so", &versions) == VIKING_ERROR_UNSUPPORTED);
    CHECK(detail_says("/no/such/libcudart.so"));
    fake.reset();
}

/* ---- opening a device ---- */

static void devices_are_counted(void)
{
    int count = 0;
    fake.reset();
    fake.devices(3, 1 << 20);
    CHECK_OK(viking_cuda_device_count(fake_path, &count));
    CHECK(count == 3);
    CHECK(viking_cuda_device_count("libno-such-runtime.so.1", &count) == VIKING_ERROR_UNSUPPORTED);
}

static void without_a_driver_or_device_the_reason_is_told(void)
{
    static const struct {
        int error;
        const char *number, *name, *advice;
    } cases[] = {{35, "returned 35", "cudaErrorInsufficientDriver", "install or upgrade"},
                 {100, "returned 100", "cudaErrorNoDevice", "CUDA_VISIBLE_DEVICES"},
                 {ANY_ERROR, "returned 999", "unrecognized", "nvidia-smi"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        viking_backend *backend = NULL;
        int count = 0;
        fake.reset();
        fake.fail("cudaGetDeviceCount", 1, cases[i].error);
        CHECK(viking_cuda_open(0, fake_path, &backend) == VIKING_ERROR_UNSUPPORTED && !backend);
        CHECK(detail_says("cudaGetDeviceCount") && detail_says(cases[i].number));
        CHECK(detail_says(cases[i].name) && detail_says(cases[i].advice));
        CHECK(fake.peek() == 0);
        fake.fail("cudaGetDeviceCount", 1, cases[i].error);
        CHECK(viking_cuda_device_count(fake_path, &count) == VIKING_ERROR_UNSUPPORTED);
    }
    viking_backend *backend = NULL;
    fake.devices(0, 0);
    CHECK(viking_cuda_open(0, fake_path, &backend) == VIKING_ERROR_UNSUPPORTED && detail_says("cudaErrorNoDevice"));
}

static void a_device_that_is_not_there_is_refused(void)
{
    viking_backend *backend = NULL;
    fake.reset();
    fake.devices(2, 1 << 20);
    CHECK(viking_cuda_open(2, fake_path, &backend) == VIKING_ERROR_UNSUPPORTED &&
          detail_says("no CUDA device 2: 2 are"));
    CHECK(viking_cuda_open(-1, fake_path, &backend) == VIKING_ERROR_UNSUPPORTED);
    CHECK(!backend);
}

/* ---- what each call is made of ---- */

static void streams_do_not_block_and_events_are_timed_only_on_request(void)
{
    contract c = open_fake(1);
    viking_stream stream = contract_stream(&c);
    viking_event *plain = contract_event(&c, false);
    CHECK(fake.count("streams") == 1 && fake.count("blocking streams") == 0);
    CHECK(fake.count("events") == 1 && fake.count("timed events") == 0);
    viking_event *timed = contract_event(&c, true);
    CHECK(fake.count("timed events") == 1);
    c.call->event_close(c.backend, timed);
    c.call->event_close(c.backend, plain);
    c.call->stream_close(c.backend, stream);
    CHECK(nothing_is_left());
    c.call->close(c.backend);
}

static void the_hot_path_is_one_runtime_call_each(void)
{
    contract c = open_fake(2);
    int source = 1, there = 0;
    bool reached;
    viking_stream stream = contract_stream(&c);
    viking_event *event = contract_event(&c, false);
    uint64_t before = fake.calls("*");
    CHECK_OK(c.call->stream_wait(c.backend, stream, event));
    CHECK_OK(c.call->copy(c.backend, VIKING_COPY_TO_DEVICE, &there, &source, sizeof source, stream));
    CHECK_OK(c.call->event_record(c.backend, event, stream));
    CHECK_OK(c.call->event_drain(c.backend, event));
    CHECK_OK(c.call->event_reached(c.backend, event, &reached));
    CHECK(fake.calls("*") - before == 5);
    CHECK(fake.count("to device") == sizeof source && fake.count("to host") == 0);
    CHECK_OK(c.call->copy(c.backend, VIKING_COPY_TO_HOST, &source, &there, sizeof there, stream));
    CHECK(fake.count("to device") == sizeof source && fake.count("to host") == sizeof there);
    c.call->event_close(c.backend, event);
    c.call->stream_close(c.backend, stream);
    c.call->close(c.backend);
}

/* ---- failures ---- */

/* Everything a call may need, opened before the fault is set. */
typedef struct bench {
    contract c;
    viking_stream stream;
    viking_event *from, *to;
    void *there;
    char *pages; /* the first is pinned */
    int number;
} bench;

static bench open_bench(void)
{
    bench b = {.c = open_fake(2)}; /* device 1, while device 0 is current */
    b.stream = contract_stream(&b.c);
    b.from = contract_event(&b.c, true);
    b.to = contract_event(&b.c, true);
    CHECK_OK(b.c.call->event_record(b.c.backend, b.from, b.stream));
    CHECK_OK(b.c.call->event_record(b.c.backend, b.to, b.stream));
    CHECK_OK(b.c.call->event_drain(b.c.backend, b.to));
    CHECK_OK(b.c.call->allocate(b.c.backend, 4096, &b.there));
    CHECK_OK(viking_os_map(2 * viking_os_page_bytes(), (void **)&b.pages));
    CHECK_OK(b.c.call->pin(b.c.backend, b.pages, viking_os_page_bytes()));
    return b;
}

static void close_bench(bench *b)
{
    CHECK_OK(b->c.call->unpin(b->c.backend, b->pages));
    viking_os_unmap(b->pages, 2 * viking_os_page_bytes());
    b->c.call->release(b->c.backend, b->there);
    b->c.call->event_close(b->c.backend, b->from);
    b->c.call->event_close(b->c.backend, b->to);
    b->c.call->stream_close(b->c.backend, b->stream);
    b->c.call->close(b->c.backend);
    CHECK(nothing_is_left());
}

static viking_status do_memory(bench *b)
{
    size_t free_bytes, total_bytes;
    return b->c.call->memory(b->c.backend, &free_bytes, &total_bytes);
}

static viking_status do_allocate(bench *b)
{
    void *there = NULL;
    return b->c.call->allocate(b->c.backend, 123456, &there);
}

static viking_status do_pin(bench *b)
{
    size_t page = viking_os_page_bytes();
    return b->c.call->pin(b->c.backend, b->pages + page, page);
}

static viking_status do_unpin(bench *b)
{
    return b->c.call->unpin(b->c.backend, b->pages);
}

static viking_status do_stream_open(bench *b)
{
    viking_stream stream;
    return b->c.call->stream_open(b->c.backend, &stream);
}

static viking_status do_stream_drain(bench *b)
{
    return b->c.call->stream_drain(b->c.backend, b->stream);
}

static viking_status do_drain_caller(bench *b)
{
    return b->c.call->stream_drain(b->c.backend, VIKING_STREAM_CALLER);
}

static viking_status do_event_open(bench *b)
{
    viking_event *event;
    return b->c.call->event_open(b->c.backend, false, &event);
}

static viking_status do_timed_event_open(bench *b)
{
    viking_event *event;
    return b->c.call->event_open(b->c.backend, true, &event);
}

static viking_status do_record(bench *b)
{
    return b->c.call->event_record(b->c.backend, b->to, b->stream);
}

static viking_status do_record_caller(bench *b)
{
    return b->c.call->event_record(b->c.backend, b->to, VIKING_STREAM_CALLER);
}

static viking_status do_reached(bench *b)
{
    bool reached;
    return b->c.call->event_reached(b->c.backend, b->to, &reached);
}

static viking_status do_event_drain(bench *b)
{
    return b->c.call->event_drain(b->c.backend, b->to);
}

static viking_status do_elapsed(bench *b)
{
    uint64_t ns;
    return b->c.call->event_elapsed(b->c.backend, b->from, b->to, &ns);
}

static viking_status do_wait(bench *b)
{
    return b->c.call->stream_wait(b->c.backend, b->stream, b->to);
}

static viking_status do_wait_caller(bench *b)
{
    return b->c.call->stream_wait(b->c.backend, VIKING_STREAM_CALLER, b->to);
}

static viking_status do_copy(bench *b)
{
    return b->c.call->copy(b->c.backend, VIKING_COPY_TO_DEVICE, b->there, &b->number, sizeof b->number, b->stream);
}

static viking_status do_copy_back(bench *b)
{
    return b->c.call->copy(b->c.backend, VIKING_COPY_TO_HOST, &b->number, b->there, sizeof b->number,
                           VIKING_STREAM_CALLER);
}

/* One call of the table, the function it makes, and what its sentence must name besides. `guarded`: it makes its
 * device current and puts the caller's back. */
static const struct {
    viking_status (*call)(bench *b);
    const char *symbol, *names;
    bool guarded;
} calls[] = {{do_memory, "cudaMemGetInfo", "device 1", true},
             {do_allocate, "cudaMalloc", "123456 bytes", true},
             {do_pin, "cudaHostRegister", "bytes) on device 1", true},
             {do_unpin, "cudaHostUnregister", "device 1", true},
             {do_stream_open, "cudaStreamCreateWithFlags", "non-blocking", true},
             {do_stream_drain, "cudaStreamSynchronize", "device 1", false},
             {do_drain_caller, "cudaStreamSynchronize", "device 1", true},
             {do_event_open, "cudaEventCreateWithFlags", "not timed", true},
             {do_timed_event_open, "cudaEventCreateWithFlags", "(timed", true},
             {do_record, "cudaEventRecord", "device 1", false},
             {do_record_caller, "cudaEventRecord", "device 1", true},
             {do_reached, "cudaEventQuery", "device 1", false},
             {do_event_drain, "cudaEventSynchronize", "device 1", false},
             {do_elapsed, "cudaEventElapsedTime", "device 1", false},
             {do_wait, "cudaStreamWaitEvent", "device 1", false},
             {do_wait_caller, "cudaStreamWaitEvent", "device 1", true},
             {do_copy, "cudaMemcpyAsync", "4 bytes, host to device", false},
             {do_copy_back, "cudaMemcpyAsync", "4 bytes, device to host", true}};

#define CALL_COUNT (sizeof calls / sizeof *calls)

static void a_failed_call_is_told_and_forgotten(void)
{
    for (size_t i = 0; i < CALL_COUNT; i++) {
        bench b = open_bench();
        CHECK(fake.fail(calls[i].symbol, 1, ANY_ERROR));
        CHECK(calls[i].call(&b) == VIKING_ERROR_DEVICE);
        CHECK(detail_says(calls[i].symbol) && detail_says("returned 999 (unrecognized error code)"));
        CHECK(detail_says(calls[i].names));
        CHECK(fake.peek() == 0);
        CHECK(current() == 0);
        close_bench(&b);
    }
}

static void the_current_device_is_left_as_found(void)
{
    for (size_t i = 0; i < CALL_COUNT; i++) {
        bench b = open_bench();
        uint64_t before = fake.calls("cudaSetDevice");
        viking_status status = calls[i].call(&b);
        CHECK(status == VIKING_OK && current() == 0);
        CHECK(fake.calls("cudaSetDevice") - before == (calls[i].guarded ? 2 : 0));
        fake.reset();
        viking_os_unmap(b.pages, 2 * viking_os_page_bytes());
        b.c.call->close(b.c.backend);
    }
}

static void a_device_that_cannot_be_made_current_is_told(void)
{
    for (size_t i = 0; i < CALL_COUNT; i++) {
        static const char *const symbols[] = {"cudaGetDevice", "cudaSetDevice"};
        for (int k = 0; calls[i].guarded && k < 2; k++) {
            bench b = open_bench();
            fake.fail(symbols[k], 1, ANY_ERROR);
            CHECK(calls[i].call(&b) == VIKING_ERROR_DEVICE);
            CHECK(detail_says(symbols[k]));
            CHECK(fake.peek() == 0 && current() == 0);
            close_bench(&b);
        }
    }
}

static void a_device_that_cannot_be_put_back_leaves_no_error_behind(void)
{
    bench b = open_bench();
    fake.fail("cudaSetDevice", 2, ANY_ERROR);
    CHECK_OK(do_memory(&b));
    CHECK(fake.peek() == 0);
    CHECK(fake.set_device(0) == 0);
    close_bench(&b);
}

static void closing_forgets_its_errors(void)
{
    static const char *const symbols[] = {"cudaFree", "cudaEventDestroy", "cudaStreamSynchronize", "cudaStreamDestroy"};
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
        bench b = open_bench();
        CHECK(fake.fail(symbols[i], 1, ANY_ERROR));
        CHECK_OK(do_unpin(&b));
        b.c.call->release(b.c.backend, b.there);
        b.c.call->event_close(b.c.backend, b.from);
        b.c.call->event_close(b.c.backend, b.to);
        b.c.call->stream_close(b.c.backend, b.stream);
        CHECK(fake.peek() == 0 && current() == 0);
        viking_os_unmap(b.pages, 2 * viking_os_page_bytes());
        b.c.call->close(b.c.backend);
    }
}

static void closing_waits_for_a_device_that_cannot_be_made_current(void)
{
    bench b = open_bench();
    fake.fail("cudaGetDevice", 1, ANY_ERROR);
    b.c.call->stream_close(b.c.backend, b.stream);
    fake.fail("cudaGetDevice", 1, ANY_ERROR);
    b.c.call->event_close(b.c.backend, b.to);
    fake.fail("cudaGetDevice", 1, ANY_ERROR);
    b.c.call->release(b.c.backend, b.there);
    CHECK(fake.peek() == 0);
    close_bench(&b); /* all three are still there */
}

static void refusals_to_pin_say_whether_to_go_on(void)
{
    static const struct {
        int error;
        viking_status status;
    } cases[] = {{2, VIKING_ERROR_NO_HOST_MEMORY}, {1, VIKING_ERROR_UNSUPPORTED},   {801, VIKING_ERROR_UNSUPPORTED},
                 {800, VIKING_ERROR_UNSUPPORTED},  {304, VIKING_ERROR_UNSUPPORTED}, {712, VIKING_ERROR_STATE},
                 {ANY_ERROR, VIKING_ERROR_DEVICE}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        bench b = open_bench();
        fake.register_limit(viking_os_page_bytes(), cases[i].error); /* which the first page has used up */
        CHECK(do_pin(&b) == cases[i].status);
        CHECK(detail_says("cudaHostRegister") && fake.peek() == 0);
        CHECK(fake.count("registrations") == 1);
        close_bench(&b);
    }
}

static void memory_that_is_gone_is_told_as_such(void)
{
    bench b = open_bench();
    fake.fail("cudaMalloc", 1, 2);
    CHECK(do_allocate(&b) == VIKING_ERROR_NO_DEVICE_MEMORY);
    CHECK(detail_says("123456 bytes") && detail_says("cudaErrorMemoryAllocation") && detail_says("budget"));
    close_bench(&b);
}

static void an_event_not_reached_leaves_no_error_behind(void)
{
    bench b = open_bench();
    atomic_bool gate = false;
    launch(b.c.backend, b.stream, wait_for_flag, &gate);
    CHECK_OK(do_record(&b));
    CHECK(!contract_reached(&b.c, b.to));
    CHECK(fake.peek() == 0);
    atomic_store(&gate, true);
    close_bench(&b);
}

static void copies_do_not_cross_registrations(void)
{
    bench b = open_bench();
    size_t page = viking_os_page_bytes();
    void *there = NULL;
    CHECK_OK(do_pin(&b));
    CHECK_OK(b.c.call->allocate(b.c.backend, 2 * page, &there));
    CHECK(b.c.call->copy(b.c.backend, VIKING_COPY_TO_DEVICE, there, b.pages, 2 * page, b.stream) ==
          VIKING_ERROR_DEVICE);
    CHECK(detail_says("cudaErrorInvalidValue"));
    CHECK_OK(b.c.call->copy(b.c.backend, VIKING_COPY_TO_DEVICE, there, b.pages, page, b.stream));
    CHECK_OK(do_stream_drain(&b));
    CHECK_OK(b.c.call->unpin(b.c.backend, b.pages + page));
    b.c.call->release(b.c.backend, there);
    close_bench(&b);
}

/* Calls that do not close anything, so that a caller who undoes what it did leaves nothing behind. */
static void after_a_fault_in_any_runtime_call_nothing_is_left(void)
{
    static const char *const symbols[] = {
        "cudaMemGetInfo",           "cudaMalloc",      "cudaHostRegister",    "cudaStreamCreateWithFlags",
        "cudaEventCreateWithFlags", "cudaEventRecord", "cudaMemcpyAsync",     "cudaStreamWaitEvent",
        "cudaEventSynchronize",     "cudaEventQuery",  "cudaEventElapsedTime"};
    void *page = NULL;
    int faults = 0;
    CHECK_OK(viking_os_map(viking_os_page_bytes(), &page));
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
        viking_status status = VIKING_ERROR_DEVICE;
        for (uint64_t n = 1; status != VIKING_OK; n++) {
            contract c = open_fake(2);
            fake.fail(symbols[i], n, ANY_ERROR);
            status = use_everything(&c, page);
            CHECK(status == VIKING_OK || status == VIKING_ERROR_DEVICE);
            CHECK(nothing_is_left() && fake.peek() == 0 && current() == 0);
            faults += status != VIKING_OK;
            fake.fail(symbols[i], 0, 0);
            CHECK_OK(use_everything(&c, page));
            c.call->close(c.backend);
        }
    }
    CHECK(faults == 14); /* two events are opened, recorded and waited for */
    viking_os_unmap(page, viking_os_page_bytes());
}

/* ---- a device, where there is one ---- */

static void it_works_on_the_device_of_this_machine(void)
{
    int count = 0;
    viking_status status = viking_cuda_device_count(NULL, &count);
    CHECK(status == VIKING_OK || status == VIKING_ERROR_UNSUPPORTED);
    if (status != VIKING_OK) {
        printf("      not here: %s\n", viking_status_detail());
        return;
    }
    contract c = {.launch = launch, .launches_overlap = false};
    viking_cuda_versions versions;
    CHECK_OK(viking_cuda_open(0, NULL, &c.backend));
    c.call = c.backend->operations;
    CHECK_OK(viking_cuda_versions_of(c.backend, &versions));
    printf("      runtime %d, driver %d, %s\n", versions.runtime, versions.driver, versions.library);
    void *library = dlopen(versions.library, RTLD_NOW | RTLD_LOCAL);
    CHECK(library != NULL);
    find(library, "fake_cudart_launch", &launch_host_function);
    run_backend_contract(&c);
    c.call->close(c.backend);
}

int main(int count, char **arguments)
{
    const char *slash = count > 0 ? strrchr(arguments[0], '/') : NULL;
    snprintf(fake_path, sizeof fake_path, "%.*s/libfake_cudart.so", slash ? (int)(slash - arguments[0]) : 1,
             slash ? arguments[0] : ".");
    load_fake();
    RUN(it_keeps_the_backends_promises);
    RUN(a_missing_library_is_named);
    RUN(a_library_that_is_no_runtime_is_named);
    RUN(what_is_loaded_comes_before_what_is_newer);
    RUN(versions_and_the_library_are_known);
    RUN(a_runtime_is_known_without_a_device);
    RUN(devices_are_counted);
    RUN(without_a_driver_or_device_the_reason_is_told);
    RUN(a_device_that_is_not_there_is_refused);
    RUN(streams_do_not_block_and_events_are_timed_only_on_request);
    RUN(the_hot_path_is_one_runtime_call_each);
    RUN(a_failed_call_is_told_and_forgotten);
    RUN(the_current_device_is_left_as_found);
    RUN(a_device_that_cannot_be_made_current_is_told);
    RUN(a_device_that_cannot_be_put_back_leaves_no_error_behind);
    RUN(closing_forgets_its_errors);
    RUN(closing_waits_for_a_device_that_cannot_be_made_current);
    RUN(after_a_fault_in_any_runtime_call_nothing_is_left);
    RUN(refusals_to_pin_say_whether_to_go_on);
    RUN(memory_that_is_gone_is_told_as_such);
    RUN(an_event_not_reached_leaves_no_error_behind);
    RUN(copies_do_not_cross_registrations);
    fake.reset();
    RUN(it_works_on_the_device_of_this_machine);
    return 0;
}

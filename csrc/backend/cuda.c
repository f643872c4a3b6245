/* The CUDA backend: the table's functions are thin over the runtime's, and never create or allocate on the hot path.
 *
 * The current device belongs to the caller. Streams and events that exist know their device, so recording, waiting
 * and copying on them leaves the current device alone; what creates, frees, registers, or names the default stream
 * (which is that of the current device) runs between enter() and leave().
 *
 * The runtime keeps the last error of each thread until somebody asks. A failure that is handled here must not
 * surface in another library's next check, so whoever reports one clears it.
 */
#include "cuda.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../base/os.h"
#include "cuda_table.h"

typedef struct cuda {
    viking_backend base;
    int index;
    viking_cuda_table table;
} cuda;

static const cuda *cuda_of(viking_backend *self)
{
    return (const cuda *)self;
}

static viking_cuda_stream stream_of(viking_stream stream)
{
    return (viking_cuda_stream)(void *)stream;
}

static viking_cuda_event event_of(viking_event *event)
{
    return (viking_cuda_event)(void *)event;
}

/* ---- failures ---- */

static const char IN_GENERAL[] = "if an earlier operation on this device failed, its error is reported late and is "
                                 "the one to look at (CUDA_LAUNCH_BLOCKING=1 shows where); else check the driver's log";

/* What a call that returned `error` came to: OK, or `code` with its sentence, and the thread's last error cleared. */
static viking_status outcome(const cuda *device, viking_status code, viking_cuda_result error, const char *advice,
                             const char *call, ...) VIKING_PRINTF(5, 6);

static viking_status outcome(const cuda *device, viking_status code, viking_cuda_result error, const char *advice,
                             const char *call, ...)
{
    if (error == VIKING_CUDA_SUCCESS)
        return VIKING_OK;
    char text[160];
    va_list arguments;
    va_start(arguments, call);
    vsnprintf(text, sizeof text, call, arguments);
    va_end(arguments);
    const char *name = device->table.call.GetErrorName(error);
    (void)device->table.call.GetLastError();
    return viking_status_fail(code, "%s on device %d returned %d (%s): %s", text, device->index, error,
                              name ? name : "unknown", advice);
}

/* For calls that have no way to report: the error must not wait for somebody else either. */
static void forget(const cuda *device, viking_cuda_result error)
{
    if (error != VIKING_CUDA_SUCCESS)
        (void)device->table.call.GetLastError();
}

/* ---- the current device ---- */

static viking_status enter(const cuda *device, int *previous)
{
    viking_cuda_result error = device->table.call.GetDevice(previous);
    if (error != VIKING_CUDA_SUCCESS)
        return outcome(device, VIKING_ERROR_DEVICE, error, IN_GENERAL, "cudaGetDevice()");
    if (*previous == device->index)
        return VIKING_OK;
    error = device->table.call.SetDevice(device->index);
    return outcome(device, VIKING_ERROR_DEVICE, error, IN_GENERAL, "cudaSetDevice(%d)", device->index);
}

/* A device that was current a moment ago refuses only when its context is lost, and then it refuses everything: the
 * result of the call in between says more than this one. */
static void leave(const cuda *device, int previous)
{
    if (previous != device->index)
        forget(device, device->table.call.SetDevice(previous));
}

/* ---- memory ---- */

static viking_status cuda_memory(viking_backend *self, size_t *free_bytes, size_t *total_bytes)
{
    const cuda *device = cuda_of(self);
    int previous;
    viking_status status = enter(device, &previous);
    if (status != VIKING_OK)
        return status;
    viking_cuda_result error = device->table.call.MemGetInfo(free_bytes, total_bytes);
    leave(device, previous);
    return outcome(device, VIKING_ERROR_DEVICE, error, IN_GENERAL, "cudaMemGetInfo()");
}

static viking_status cuda_allocate(viking_backend *self, size_t bytes, void **out)
{
    const cuda *device = cuda_of(self);
    if (bytes == 0)
        return viking_status_fail(VIKING_ERROR_INVALID, "cannot allocate 0 bytes on device %d", device->index);
    int previous;
    viking_status status = enter(device, &previous);
    if (status != VIKING_OK)
        return status;
    viking_cuda_result error = device->table.call.Malloc(out, bytes);
    leave(device, previous);
    if (error == VIKING_CUDA_MEMORY_ALLOCATION) {
        return outcome(device, VIKING_ERROR_NO_DEVICE_MEMORY, error,
                       "the device has too little free memory: lower the budget, or close what else uses the device",
                       "cudaMalloc(%zu bytes)", bytes);
    }
    return outcome(device, VIKING_ERROR_DEVICE, error, IN_GENERAL, "cudaMalloc(%zu bytes)", bytes);
}

static void cuda_release(viking_backend *self, void *address)
{
    const cuda *device = cuda_of(self);
    int previous;
    if (enter(device, &previous) == VIKING_OK) {
        forget(device, device->table.call.Free(address));
        leave(device, previous);
    }
}

/* What a refusal to register means: whether the caller may go on with pageable memory, and what the user can do. */
static viking_status explain_register(viking_cuda_result error, const char **advice)
{
    switch (error) {
    case VIKING_CUDA_MEMORY_ALLOCATION:
        *advice = "the system allows no more pinned memory (WSL and Windows allow part of the RAM): free host memory, "
                  "raise the limit of the container or virtual machine, or pin less";
        return VIKING_ERROR_NO_HOST_MEMORY;
    case VIKING_CUDA_INVALID_VALUE:
    case VIKING_CUDA_OPERATING_SYSTEM:
    case VIKING_CUDA_NOT_PERMITTED:
    case VIKING_CUDA_NOT_SUPPORTED:
        *advice = "this platform does not pin such memory: copies from it still work, only slower";
        return VIKING_ERROR_UNSUPPORTED;
    case VIKING_CUDA_HOST_MEMORY_ALREADY_REGISTERED:
        /* Not a matter of speed: if the range was unmapped and mapped again while registered, the device reads the
         * pages of before. So it must not pass for memory that is merely slow. */
        *advice = "other code registered a part of this range and did not unregister it, so the device may see its "
                  "old contents: unregister memory before freeing it";
        return VIKING_ERROR_STATE;
    default:
        *advice = IN_GENERAL;
        return VIKING_ERROR_DEVICE;
    }
}

static viking_status cuda_pin(viking_backend *self, void *address, size_t bytes)
{
    const cuda *device = cuda_of(self);
    if (bytes == 0 || (uintptr_t)address % viking_os_page_bytes() != 0) {
        return viking_status_fail(VIKING_ERROR_INVALID,
                                  "cannot pin %zu bytes at %p: the range must begin on a page of %zu bytes and must "
                                  "not be empty",
                                  bytes, address, viking_os_page_bytes());
    }
    int previous;
    viking_status status = enter(device, &previous);
    if (status != VIKING_OK)
        return status;
    viking_cuda_result error = device->table.call.HostRegister(address, bytes, VIKING_CUDA_HOST_REGISTER_DEFAULT);
    leave(device, previous);
    if (error != VIKING_CUDA_SUCCESS) {
        const char *advice;
        status = explain_register(error, &advice);
        return outcome(device, status, error, advice, "cudaHostRegister(%p, %zu bytes)", address, bytes);
    }
    self->pins++;
    return VIKING_OK;
}

static viking_status cuda_unpin(viking_backend *self, void *address)
{
    const cuda *device = cuda_of(self);
    int previous;
    viking_status status = enter(device, &previous);
    if (status != VIKING_OK)
        return status;
    viking_cuda_result error = device->table.call.HostUnregister(address);
    leave(device, previous);
    if (error == VIKING_CUDA_HOST_MEMORY_NOT_REGISTERED || error == VIKING_CUDA_INVALID_VALUE) {
        return outcome(device, VIKING_ERROR_INVALID, error, "no range that begins there is pinned",
                       "cudaHostUnregister(%p)", address);
    }
    self->pins -= error == VIKING_CUDA_SUCCESS;
    return outcome(device, VIKING_ERROR_DEVICE, error, IN_GENERAL, "cudaHostUnregister(%p)", address);
}

/* ---- streams ---- */

static viking_status cuda_stream_open(viking_backend *self, viking_stream *out)
{
    const cuda *device = cuda_of(self);
    int previous;
    viking_status status = enter(device, &previous);
    if (status != VIKING_OK)
        return status;
    /* Non-blocking: a copy must not wait for whatever somebody launches on the default stream. */
    viking_cuda_stream stream = NULL;
    viking_cuda_result error = device->table.call.StreamCreateWithFlags(&stream, VIKING_CUDA_STREAM_NON_BLOCKING);
    leave(device, previous);
    if (error != VIKING_CUDA_SUCCESS)
        return outcome(device, VIKING_ERROR_DEVICE, error, IN_GENERAL, "cudaStreamCreateWithFlags(non-blocking)");
    self->streams++;
    *out = (viking_stream)(void *)stream;
    return VIKING_OK;
}

static void cuda_stream_close(viking_backend *self, viking_stream stream)
{
    const cuda *device = cuda_of(self);
    int previous;
    if (stream == VIKING_STREAM_CALLER || enter(device, &previous) != VIKING_OK)
        return;
    /* Destroying alone would return at once and let the work go on. */
    forget(device, device->table.call.StreamSynchronize(stream_of(stream)));
    forget(device, device->table.call.StreamDestroy(stream_of(stream)));
    self->streams--;
    leave(device, previous);
}

/* The default stream is that of the current device; any other knows its own. */
static viking_status enter_stream(const cuda *device, viking_stream stream, int *previous)
{
    *previous = device->index;
    return stream == VIKING_STREAM_CALLER ? enter(device, previous) : VIKING_OK;
}

static viking_status cuda_stream_drain(viking_backend *self, viking_stream stream)
{
    const cuda *device = cuda_of(self);
    int previous;
    viking_status status = enter_stream(device, stream, &previous);
    if (status != VIKING_OK)
        return status;
    viking_cuda_result error = device->table.call.StreamSynchronize(stream_of(stream));
    leave(device, previous);
    return outcome(device, VIKING_ERROR_DEVICE, error, IN_GENERAL, "cudaStreamSynchronize(%p)", (void *)stream);
}

static viking_status cuda_stream_wait(viking_backend *self, viking_stream stream, viking_event *event)
{
    const cuda *device = cuda_of(self);
    int previous;
    viking_status status = enter_stream(device, stream, &previous);
    if (status != VIKING_OK)
        return status;
    viking_cuda_result error = device->table.call.StreamWaitEvent(stream_of(stream), event_of(event), 0);
    leave(device, previous);
    return outcome(device, VIKING_ERROR_DEVICE, error, IN_GENERAL, "cudaStreamWaitEvent(%p, %p)", (void *)stream,
                   (void *)event);
}

static viking_status cuda_copy(viking_backend *self, viking_copy_direction direction, void *destination,
                               const void *source, size_t bytes, viking_stream stream)
{
    const cuda *device = cuda_of(self);
    int previous;
    viking_status status = enter_stream(device, stream, &previous);
    if (status != VIKING_OK)
        return status;
    bool to_device = direction == VIKING_COPY_TO_DEVICE;
    viking_cuda_copy_kind kind = to_device ? VIKING_CUDA_HOST_TO_DEVICE : VIKING_CUDA_DEVICE_TO_HOST;
    viking_cuda_result error = device->table.call.MemcpyAsync(destination, source, bytes, kind, stream_of(stream));
    leave(device, previous);
    return outcome(device, VIKING_ERROR_DEVICE, error, IN_GENERAL, "cudaMemcpyAsync(%p, %p, %zu bytes, %s, stream %p)",
                   destination, source, bytes, to_device ? "host to device" : "device to host", (void *)stream);
}

static viking_status cuda_host_call(viking_backend *self, viking_stream stream, void (*function)(void *),
                                    void *argument)
{
    const cuda *device = cuda_of(self);
    if (!device->table.call.LaunchHostFunc)
        return viking_status_fail(VIKING_ERROR_UNSUPPORTED,
                                  "'%s' has no function cudaLaunchHostFunc: install a newer CUDA runtime",
                                  device->table.library);
    int previous;
    viking_status status = enter_stream(device, stream, &previous);
    if (status != VIKING_OK)
        return status;
    viking_cuda_result error = device->table.call.LaunchHostFunc(stream_of(stream), function, argument);
    leave(device, previous);
    return outcome(device, VIKING_ERROR_DEVICE, error, IN_GENERAL, "cudaLaunchHostFunc(stream %p)", (void *)stream);
}

/* ---- events ---- */

static viking_status cuda_event_open(viking_backend *self, bool timed, viking_event **out)
{
    const cuda *device = cuda_of(self);
    int previous;
    viking_status status = enter(device, &previous);
    if (status != VIKING_OK)
        return status;
    viking_cuda_event event = NULL;
    unsigned flags = timed ? VIKING_CUDA_EVENT_DEFAULT : VIKING_CUDA_EVENT_DISABLE_TIMING;
    viking_cuda_result error = device->table.call.EventCreateWithFlags(&event, flags);
    leave(device, previous);
    if (error != VIKING_CUDA_SUCCESS) {
        return outcome(device, VIKING_ERROR_DEVICE, error, IN_GENERAL, "cudaEventCreateWithFlags(%s)",
                       timed ? "timed" : "not timed");
    }
    self->events++;
    *out = (viking_event *)(void *)event;
    return VIKING_OK;
}

static void cuda_event_close(viking_backend *self, viking_event *event)
{
    const cuda *device = cuda_of(self);
    int previous;
    if (event && enter(device, &previous) == VIKING_OK) {
        forget(device, device->table.call.EventDestroy(event_of(event)));
        self->events--;
        leave(device, previous);
    }
}

static viking_status cuda_event_record(viking_backend *self, viking_event *event, viking_stream stream)
{
    const cuda *device = cuda_of(self);
    int previous;
    viking_status status = enter_stream(device, stream, &previous);
    if (status != VIKING_OK)
        return status;
    viking_cuda_result error = device->table.call.EventRecord(event_of(event), stream_of(stream));
    leave(device, previous);
    return outcome(device, VIKING_ERROR_DEVICE, error, IN_GENERAL, "cudaEventRecord(%p, stream %p)", (void *)event,
                   (void *)stream);
}

static viking_status cuda_event_reached(viking_backend *self, viking_event *event, bool *out)
{
    const cuda *device = cuda_of(self);
    viking_cuda_result error = device->table.call.EventQuery(event_of(event));
    if (error != VIKING_CUDA_SUCCESS && error != VIKING_CUDA_NOT_READY)
        return outcome(device, VIKING_ERROR_DEVICE, error, IN_GENERAL, "cudaEventQuery(%p)", (void *)event);
    forget(device, error); /* "not ready" is kept as a last error too */
    *out = error == VIKING_CUDA_SUCCESS;
    return VIKING_OK;
}

static viking_status cuda_event_drain(viking_backend *self, viking_event *event)
{
    const cuda *device = cuda_of(self);
    viking_cuda_result error = device->table.call.EventSynchronize(event_of(event));
    return outcome(device, VIKING_ERROR_DEVICE, error, IN_GENERAL, "cudaEventSynchronize(%p)", (void *)event);
}

static viking_status cuda_event_elapsed(viking_backend *self, viking_event *from, viking_event *to, uint64_t *out_ns)
{
    const cuda *device = cuda_of(self);
    float milliseconds = 0;
    viking_cuda_result error = device->table.call.EventElapsedTime(&milliseconds, event_of(from), event_of(to));
    switch (error) {
    case VIKING_CUDA_SUCCESS:
        *out_ns = milliseconds > 0 ? (uint64_t)((double)milliseconds * 1e6) : 0;
        return VIKING_OK;
    case VIKING_CUDA_NOT_READY:
        return outcome(device, VIKING_ERROR_STATE, error, "both events must be reached", "cudaEventElapsedTime(%p, %p)",
                       (void *)from, (void *)to);
    case VIKING_CUDA_INVALID_RESOURCE_HANDLE:
        return outcome(device, VIKING_ERROR_INVALID, error, "both events must be opened as timed, and recorded",
                       "cudaEventElapsedTime(%p, %p)", (void *)from, (void *)to);
    default:
        return outcome(device, VIKING_ERROR_DEVICE, error, IN_GENERAL, "cudaEventElapsedTime(%p, %p)", (void *)from,
                       (void *)to);
    }
}

/* ---- the device ---- */

static void cuda_close(viking_backend *self)
{
    free(self);
}

static const viking_backend_operations operations = {
    .name = "cuda",
    .caller_blocks = false,
    .close = cuda_close,
    .memory = cuda_memory,
    .allocate = cuda_allocate,
    .release = cuda_release,
    .pin = cuda_pin,
    .unpin = cuda_unpin,
    .stream_open = cuda_stream_open,
    .stream_close = cuda_stream_close,
    .stream_drain = cuda_stream_drain,
    .event_open = cuda_event_open,
    .event_close = cuda_event_close,
    .event_record = cuda_event_record,
    .event_reached = cuda_event_reached,
    .event_drain = cuda_event_drain,
    .event_elapsed = cuda_event_elapsed,
    .stream_wait = cuda_stream_wait,
    .copy = cuda_copy,
    .host_call = cuda_host_call,
};

static viking_status count_devices(const viking_cuda_table *table, int *out)
{
    /* Left unwritten on failure. */
    int count = 0;
    viking_cuda_result error = table->call.GetDeviceCount(&count);
    if (error == VIKING_CUDA_SUCCESS) {
        *out = count;
        return VIKING_OK;
    }
    const char *name = table->call.GetErrorName(error);
    (void)table->call.GetLastError();
    const char *advice = "check the NVIDIA driver with nvidia-smi";
    if (error == VIKING_CUDA_INSUFFICIENT_DRIVER) {
        advice = "there is no NVIDIA driver, or one that is too old for this runtime; install or upgrade it "
                 "(nvidia-smi shows its version), or use device 'cpu'";
    } else if (error == VIKING_CUDA_NO_DEVICE) {
        advice = "no NVIDIA GPU is visible; check nvidia-smi and CUDA_VISIBLE_DEVICES, or use device 'cpu'";
    }
    return viking_status_fail(VIKING_ERROR_UNSUPPORTED, "cudaGetDeviceCount returned %d (%s) in '%s': %s", error,
                              name ? name : "unknown", table->library, advice);
}

viking_status viking_cuda_device_count(const char *runtime_path, int *out)
{
    viking_cuda_table table;
    viking_status status = viking_cuda_table_open(runtime_path, viking_cuda_table_names, &table);
    return status == VIKING_OK ? count_devices(&table, out) : status;
}

viking_status viking_cuda_open(int index, const char *runtime_path, viking_backend **out)
{
    cuda *device = calloc(1, sizeof *device);
    if (!device)
        return viking_status_fail(VIKING_ERROR_NO_HOST_MEMORY, "no memory left to open CUDA device %d", index);
    device->base.operations = &operations;
    device->index = index;
    int count = 0;
    viking_status status = viking_cuda_table_open(runtime_path, viking_cuda_table_names, &device->table);
    if (status == VIKING_OK)
        status = count_devices(&device->table, &count);
    if (status == VIKING_OK && (index < 0 || index >= count)) {
        status = viking_status_fail(VIKING_ERROR_UNSUPPORTED,
                                    "there is no CUDA device %d: %d are visible, numbered from 0 (CUDA_VISIBLE_DEVICES "
                                    "hides some)",
                                    index, count);
    }
    if (status != VIKING_OK) {
        free(device);
        return status;
    }
    *out = &device->base;
    return VIKING_OK;
}

viking_status viking_cuda_versions_of(viking_backend *self, viking_cuda_versions *out)
{
    const cuda *device = cuda_of(self);
    viking_cuda_result error = device->table.call.RuntimeGetVersion(&out->runtime);
    if (error != VIKING_CUDA_SUCCESS)
        return outcome(device, VIKING_ERROR_DEVICE, error, IN_GENERAL, "cudaRuntimeGetVersion()");
    error = device->table.call.DriverGetVersion(&out->driver);
    if (error != VIKING_CUDA_SUCCESS)
        return outcome(device, VIKING_ERROR_DEVICE, error, IN_GENERAL, "cudaDriverGetVersion()");
    memcpy(out->library, device->table.library, sizeof out->library);
    return VIKING_OK;
}

viking_status viking_cuda_find(const char *runtime_path, viking_cuda_versions *out)
{
    cuda nobody = {.base = {.operations = &operations}, .index = 0};
    viking_status status = viking_cuda_table_open(runtime_path, viking_cuda_table_names, &nobody.table);
    return status == VIKING_OK ? viking_cuda_versions_of(&nobody.base, out) : status;
}

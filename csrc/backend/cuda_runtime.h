/* The part of the CUDA runtime that Viking uses, in its own words.
 *
 * NVIDIA's headers are not needed to build Viking, and a wheel of the runtime alone would not even compile them (it
 * lacks crt/). Everything here has had the same name, value and signature in 11, 12 and 13. The names differ from
 * NVIDIA's, so that tests/c/assert_cuda.c can include both and prove them equal.
 */
#ifndef VIKING_BACKEND_CUDA_RUNTIME_H
#define VIKING_BACKEND_CUDA_RUNTIME_H

#include <stddef.h>

typedef int viking_cuda_result; /* an enum there; no value is negative */
typedef int viking_cuda_copy_kind;
typedef struct CUstream_st *viking_cuda_stream;
typedef struct CUevent_st *viking_cuda_event;
#ifdef _WIN32
typedef void(__stdcall viking_cuda_host_function)(void *argument);
#else
typedef void viking_cuda_host_function(void *argument);
#endif

enum {
    VIKING_CUDA_SUCCESS = 0,
    VIKING_CUDA_INVALID_VALUE = 1,
    VIKING_CUDA_MEMORY_ALLOCATION = 2,
    VIKING_CUDA_INSUFFICIENT_DRIVER = 35,
    VIKING_CUDA_NO_DEVICE = 100,
    VIKING_CUDA_INVALID_DEVICE = 101,
    VIKING_CUDA_OPERATING_SYSTEM = 304,
    VIKING_CUDA_INVALID_RESOURCE_HANDLE = 400,
    VIKING_CUDA_NOT_READY = 600,
    VIKING_CUDA_HOST_MEMORY_ALREADY_REGISTERED = 712,
    VIKING_CUDA_HOST_MEMORY_NOT_REGISTERED = 713,
    VIKING_CUDA_NOT_PERMITTED = 800,
    VIKING_CUDA_NOT_SUPPORTED = 801
};

enum { VIKING_CUDA_HOST_TO_DEVICE = 1, VIKING_CUDA_DEVICE_TO_HOST = 2 };

enum { VIKING_CUDA_STREAM_NON_BLOCKING = 1 };
enum { VIKING_CUDA_EVENT_DEFAULT = 0, VIKING_CUDA_EVENT_DISABLE_TIMING = 2 };
enum { VIKING_CUDA_HOST_REGISTER_DEFAULT = 0 };

/* X(name without "cuda", type of the result, parameters) */
#define VIKING_CUDA_FUNCTIONS(X)                                                                                       \
    X(RuntimeGetVersion, viking_cuda_result, (int *version))                                                           \
    X(DriverGetVersion, viking_cuda_result, (int *version))                                                            \
    X(GetErrorName, const char *, (viking_cuda_result error))                                                          \
    X(GetLastError, viking_cuda_result, (void))                                                                        \
    X(GetDeviceCount, viking_cuda_result, (int *count))                                                                \
    X(GetDevice, viking_cuda_result, (int *device))                                                                    \
    X(SetDevice, viking_cuda_result, (int device))                                                                     \
    X(MemGetInfo, viking_cuda_result, (size_t * free_bytes, size_t * total_bytes))                                     \
    X(Malloc, viking_cuda_result, (void **out, size_t bytes))                                                          \
    X(Free, viking_cuda_result, (void *address))                                                                       \
    X(HostRegister, viking_cuda_result, (void *address, size_t bytes, unsigned flags))                                 \
    X(HostUnregister, viking_cuda_result, (void *address))                                                             \
    X(StreamCreateWithFlags, viking_cuda_result, (viking_cuda_stream * out, unsigned flags))                           \
    X(StreamDestroy, viking_cuda_result, (viking_cuda_stream stream))                                                  \
    X(StreamSynchronize, viking_cuda_result, (viking_cuda_stream stream))                                              \
    X(StreamWaitEvent, viking_cuda_result, (viking_cuda_stream stream, viking_cuda_event event, unsigned flags))       \
    X(EventCreateWithFlags, viking_cuda_result, (viking_cuda_event * out, unsigned flags))                             \
    X(EventDestroy, viking_cuda_result, (viking_cuda_event event))                                                     \
    X(EventRecord, viking_cuda_result, (viking_cuda_event event, viking_cuda_stream stream))                           \
    X(EventQuery, viking_cuda_result, (viking_cuda_event event))                                                       \
    X(EventSynchronize, viking_cuda_result, (viking_cuda_event event))                                                 \
    X(EventElapsedTime, viking_cuda_result, (float *milliseconds, viking_cuda_event from, viking_cuda_event to))       \
    X(MemcpyAsync, viking_cuda_result,                                                                                 \
      (void *destination, const void *source, size_t bytes, viking_cuda_copy_kind kind, viking_cuda_stream stream))

/* Those that Viking can do without; NULL where the runtime has none. */
#define VIKING_CUDA_OPTIONAL_FUNCTIONS(X)                                                                              \
    X(LaunchHostFunc, viking_cuda_result,                                                                              \
      (viking_cuda_stream stream, viking_cuda_host_function * function, void *argument))

typedef struct viking_cuda_functions {
#define VIKING_CUDA_FIELD(name, result, parameters) result(*name) parameters;
    VIKING_CUDA_FUNCTIONS(VIKING_CUDA_FIELD)
    VIKING_CUDA_OPTIONAL_FUNCTIONS(VIKING_CUDA_FIELD)
#undef VIKING_CUDA_FIELD
} viking_cuda_functions;

#endif

/* Compile-only: csrc/backend/cuda_runtime.h says of the CUDA runtime what NVIDIA's own header says.
 *
 *     cc -std=c11 -fsyntax-only -Icsrc -I"$TOOLKIT/include" tests/c/assert_cuda.c
 */
#include <cuda_runtime_api.h>

#include "backend/cuda_runtime.h"

#define SAME_VALUE(ours, theirs) _Static_assert((long long)(ours) == (long long)(theirs), #ours " is " #theirs)

SAME_VALUE(VIKING_CUDA_SUCCESS, cudaSuccess);
SAME_VALUE(VIKING_CUDA_INVALID_VALUE, cudaErrorInvalidValue);
SAME_VALUE(VIKING_CUDA_MEMORY_ALLOCATION, cudaErrorMemoryAllocation);
SAME_VALUE(VIKING_CUDA_INSUFFICIENT_DRIVER, cudaErrorInsufficientDriver);
SAME_VALUE(VIKING_CUDA_NO_DEVICE, cudaErrorNoDevice);
SAME_VALUE(VIKING_CUDA_INVALID_DEVICE, cudaErrorInvalidDevice);
SAME_VALUE(VIKING_CUDA_OPERATING_SYSTEM, cudaErrorOperatingSystem);
SAME_VALUE(VIKING_CUDA_INVALID_RESOURCE_HANDLE, cudaErrorInvalidResourceHandle);
SAME_VALUE(VIKING_CUDA_NOT_READY, cudaErrorNotReady);
SAME_VALUE(VIKING_CUDA_HOST_MEMORY_ALREADY_REGISTERED, cudaErrorHostMemoryAlreadyRegistered);
SAME_VALUE(VIKING_CUDA_HOST_MEMORY_NOT_REGISTERED, cudaErrorHostMemoryNotRegistered);
SAME_VALUE(VIKING_CUDA_NOT_PERMITTED, cudaErrorNotPermitted);
SAME_VALUE(VIKING_CUDA_NOT_SUPPORTED, cudaErrorNotSupported);

SAME_VALUE(VIKING_CUDA_HOST_TO_DEVICE, cudaMemcpyHostToDevice);
SAME_VALUE(VIKING_CUDA_DEVICE_TO_HOST, cudaMemcpyDeviceToHost);
SAME_VALUE(VIKING_CUDA_STREAM_NON_BLOCKING, cudaStreamNonBlocking);
SAME_VALUE(VIKING_CUDA_EVENT_DEFAULT, cudaEventDefault);
SAME_VALUE(VIKING_CUDA_EVENT_DISABLE_TIMING, cudaEventDisableTiming);
SAME_VALUE(VIKING_CUDA_HOST_REGISTER_DEFAULT, cudaHostRegisterDefault);

/* Our integers travel as their enums do: same size, and no enumerator is negative, so sign does not matter. */
_Static_assert(sizeof(viking_cuda_result) == sizeof(cudaError_t), "a result has the size of theirs");
_Static_assert(sizeof(viking_cuda_copy_kind) == sizeof(enum cudaMemcpyKind), "a copy's kind has the size of theirs");
_Static_assert(_Generic((viking_cuda_stream)0, cudaStream_t : 1, default : 0), "a stream is theirs");
_Static_assert(_Generic((viking_cuda_event)0, cudaEvent_t : 1, default : 0), "an event is theirs");

/* The list of functions once more, with their enums in the places of our integers. */
#define viking_cuda_result cudaError_t
#define viking_cuda_copy_kind enum cudaMemcpyKind
#define SAME_SIGNATURE(name, result, parameters)                                                                       \
    _Static_assert(_Generic(&cuda##name, result(*) parameters : 1, default : 0), "cuda" #name " has our signature");
VIKING_CUDA_FUNCTIONS(SAME_SIGNATURE)
VIKING_CUDA_OPTIONAL_FUNCTIONS(SAME_SIGNATURE)

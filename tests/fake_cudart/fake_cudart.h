/* What tests may ask of the fake CUDA runtime, besides the runtime's own functions.
 *
 * Plain C types only, so that Python reaches all of it with ctypes. The environment sets what a fresh or reset
 * library starts with:
 *
 *     FAKE_CUDART_DEVICES             how many devices there are (1)
 *     FAKE_CUDART_MEMORY              bytes of each (64 GiB)
 *     FAKE_CUDART_BYTES_PER_SECOND    pace of copies (0: as fast as memcpy)
 *     FAKE_CUDART_DELAY_NS            random delay below this before each item of a stream (0)
 *     FAKE_CUDART_SEED                of those delays (0)
 *     FAKE_CUDART_REGISTER_LIMIT      registering more host memory than this fails (0: no limit) ...
 *     FAKE_CUDART_REGISTER_ERROR      ... with this error (2)
 *     FAKE_CUDART_FAIL                "cudaMalloc:3:2": the third cudaMalloc fails with error 2, once
 */
#ifndef VIKING_TESTS_FAKE_CUDART_H
#define VIKING_TESTS_FAKE_CUDART_H

#include <stdint.h>

/* Back to the environment's settings, all counters 0, every stream, event, registration and allocation gone. Nothing
 * may be in use. */
void fake_cudart_reset(void);

/* Only while no device has been used since the last reset. */
void fake_cudart_devices(int count, uint64_t memory_bytes);

void fake_cudart_register_limit(uint64_t bytes, int error);

/* The n-th call of `symbol` from now fails with `error`, once, and does nothing; n = 0 clears. `symbol` "*": of any
 * function that returns an error. Returns 0 if there is no such function. */
int fake_cudart_fail(const char *symbol, uint64_t n, int error);

/* A stand-in for a kernel: as cudaLaunchHostFunc, but neither counted nor made to fail. */
int fake_cudart_launch(void *stream, void (*body)(void *), void *argument);

/* Calls so far; "*": of all functions together. */
uint64_t fake_cudart_calls(const char *symbol);

/* What exists at present: "streams", "blocking streams", "events", "timed events", "registrations", "registered
 * bytes", "allocations"; or bytes copied so far: "to device", "to host". UINT64_MAX for anything else. */
uint64_t fake_cudart_count(const char *what);

#endif

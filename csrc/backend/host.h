/* The host backend: a device made of threads, for tests and for machines without a GPU.
 *
 * "Device memory" is ordinary memory, a stream is a worker thread that runs its queue in order, an event is a
 * counter. Delays and faults can be programmed, so that tests reach interleavings and failures that a GPU shows
 * once a month.
 */
#ifndef VIKING_BACKEND_HOST_H
#define VIKING_BACKEND_HOST_H

#include "backend.h"

typedef struct viking_host_options {
    uint64_t bytes_per_second; /* pace of copies; 0: as fast as memcpy */
    uint64_t delay_ns; /* a random delay below this before each item of a stream's queue; 0: none */
    uint64_t seed; /* of those delays */
    uint64_t memory_bytes; /* what `memory` and `allocate` believe in; 0: the machine's */
    uint64_t pin_limit_bytes; /* pinning more than this fails with NO_HOST_MEMORY; 0: no limit */
} viking_host_options;

/* options NULL: all zero. */
viking_status viking_host_open(const viking_host_options *options, viking_backend **out);

/* Calls through the table that have been made so far, `close` and failing ones included. */
uint64_t viking_host_calls(const viking_backend *self);

/* The n-th call from now (1: the next) of the calls that return a status fails with `code`, once. n = 0 clears. */
void viking_host_fail_at(viking_backend *self, uint64_t n, viking_status code);

/* Queue a function on a stream: the tests' stand-in for a kernel. On VIKING_STREAM_CALLER it runs at once. */
viking_status viking_host_launch(viking_backend *self, viking_stream stream, void (*body)(void *), void *argument);

/* Bytes pinned at present. */
uint64_t viking_host_pinned_bytes(const viking_backend *self);

#endif

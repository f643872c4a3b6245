/* What the engine needs of a device: one table of functions, two implementations.
 *
 * cuda.c reaches the CUDA runtime that it finds at run time; host.c runs the same schedule on worker threads, so
 * that every test of the engine runs without a GPU. The engine cannot tell them apart.
 *
 * Streams run their work in order and beside each other. An event records a moment of a stream: recording again
 * moves it, and a wait refers to the record that was the latest when the wait was queued, so an event may be
 * recorded again while earlier waits on it are still pending. A wait on an event that was never recorded passes.
 *
 * Calls queue and return; those that may wait say so. All of them may be called from any thread; what one stream
 * is given from several threads at once has no defined order. The caller's current device is left as found.
 */
#ifndef VIKING_BACKEND_BACKEND_H
#define VIKING_BACKEND_BACKEND_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../base/status.h"

typedef struct viking_backend viking_backend;
typedef struct viking_event viking_event;

/* A stream is an opaque handle. The caller's own streams (torch's current stream) are passed as they are: a
 * cudaStream_t. VIKING_STREAM_CALLER is CUDA's default stream; on the host backend it is the calling thread:
 * recording there takes effect at once, waiting there blocks. */
typedef struct viking_stream_tag *viking_stream;
#define VIKING_STREAM_CALLER ((viking_stream)0)

typedef enum viking_copy_direction { VIKING_COPY_TO_DEVICE, VIKING_COPY_TO_HOST } viking_copy_direction;

typedef struct viking_backend_operations {
    const char *name; /* "cuda", "host" */

    /* True if waiting on VIKING_STREAM_CALLER may block the calling thread, so that whoever holds a lock that
     * others need (Python's GIL) lets go of it first. */
    bool caller_blocks;

    void (*close)(viking_backend *self); /* no stream or event of it may be in use */

    viking_status (*memory)(viking_backend *self, size_t *free_bytes, size_t *total_bytes);

    /* Device memory for callers that bring none of their own (the C tests). */
    viking_status (*allocate)(viking_backend *self, size_t bytes, void **out);
    void (*release)(viking_backend *self, void *address);

    /* Make a page-aligned host range readable by the device at full speed. UNSUPPORTED, NO_HOST_MEMORY: this range
     * stays as it was and copies from it still work, only slower. STATE: a part of it is pinned already, by us or by
     * other code; if it was unmapped and mapped again since, copies read its old pages, so it must not be used.
     * May take long (0.1 s/GB). */
    viking_status (*pin)(viking_backend *self, void *address, size_t bytes);
    viking_status (*unpin)(viking_backend *self, void *address);

    viking_status (*stream_open)(viking_backend *self, viking_stream *out);
    void (*stream_close)(viking_backend *self, viking_stream stream); /* waits for its work */
    viking_status (*stream_drain)(viking_backend *self, viking_stream stream); /* waits for its work */

    viking_status (*event_open)(viking_backend *self, bool timed, viking_event **out);
    void (*event_close)(viking_backend *self, viking_event *event); /* NULL is allowed */
    viking_status (*event_record)(viking_backend *self, viking_event *event, viking_stream stream);
    viking_status (*event_reached)(viking_backend *self, viking_event *event, bool *out);
    viking_status (*event_drain)(viking_backend *self, viking_event *event); /* waits until reached */
    /* Between two reached events that were opened with `timed`. */
    viking_status (*event_elapsed)(viking_backend *self, viking_event *from, viking_event *to, uint64_t *out_ns);

    /* What is queued on `stream` after this call starts once `event` is reached. */
    viking_status (*stream_wait)(viking_backend *self, viking_stream stream, viking_event *event);

    /* Queue a copy. Both ranges stay valid until it is done. From host memory that is not pinned the call itself
     * may wait. */
    viking_status (*copy)(viking_backend *self, viking_copy_direction direction, void *destination, const void *source,
                          size_t bytes, viking_stream stream);

    /* Call function(argument) on a thread of the backend's once the stream gets there; what is queued behind it waits
     * until it returns. It must call nothing of the backend and take no lock that is held while work is queued.
     * UNSUPPORTED where the runtime is too old for it. */
    viking_status (*host_call)(viking_backend *self, viking_stream stream, void (*function)(void *), void *argument);
} viking_backend_operations;

/* First member of every implementation's own struct; it counts what is open at present. */
struct viking_backend {
    const viking_backend_operations *operations;
    atomic_uint streams;
    atomic_uint events;
    atomic_uint pins;
};

#endif

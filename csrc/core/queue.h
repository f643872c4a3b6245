/* The copy queue and its fences: who waits for whom.
 *
 * All copies run on one FIFO stream of the engine's own (those from pageable memory on a second one first, see
 * staging.h). Compute runs on the caller's streams, the *readers*. Two kinds of fence keep them apart, and both are
 * events that the streams wait for, never the host:
 *
 *     ready   a reader waits for the copy that brought a span's bytes before it computes with them;
 *     free    the copy queue waits for the readers of a span before it overwrites it.
 *
 * Both sides are FIFO, so a reader that has waited for copy n needs no wait for any copy up to n, and a queue that
 * has waited for a reader's release n needs no wait for any earlier release there. Two counters per reader replace
 * most events.
 *
 * Not thread safe: the engine's lock covers it.
 */
#ifndef VIKING_CORE_QUEUE_H
#define VIKING_CORE_QUEUE_H

#include "pace.h"
#include "staging.h"

#define VIKING_READER_LIMIT 64u

typedef struct viking_reader {
    viking_stream stream;
    uintptr_t thread; /* tells callers apart where VIKING_STREAM_CALLER is the calling thread; else 0 */
    viking_event *fence; /* recorded on its stream */
    uint64_t awaited_copy; /* this reader has waited for all copies up to this one */
    uint64_t last_release; /* the latest release on it */
    uint64_t fence_release; /* `fence` covers all releases on it up to this one */
    uint64_t queued_release; /* the copy queue has waited for all its releases up to this one */
} viking_reader;

/* One per weight: what the copy queue and the readers must know of its span. */
typedef struct viking_fence {
    viking_event *ready; /* recorded after the copy that brought the bytes */
    uint64_t copy; /* number of that copy; 0: never copied */
    uint64_t last_release; /* number of the latest release of the span */
    uint64_t readers; /* bit r: reader r has released it since the copy queue last waited for it */
} viking_fence;

typedef struct viking_queue {
    viking_backend *backend;
    viking_stream stream;
    viking_staging staging;
    viking_pace pace;
    viking_reader readers[VIKING_READER_LIMIT];
    uint32_t reader_count;
    uint64_t copies; /* queued so far */
    uint64_t releases; /* so far */
} viking_queue;

viking_status viking_queue_open(viking_queue *queue, viking_backend *backend);
void viking_queue_close(viking_queue *queue); /* waits for its copies */

viking_status viking_fence_open(viking_fence *fence, viking_backend *backend);
void viking_fence_close(viking_fence *fence, viking_backend *backend);

/* The reader of a stream, made at its first use. `thread` is the calling thread's identity. */
viking_status viking_queue_reader(viking_queue *queue, viking_stream stream, uintptr_t thread, uint32_t *out);

/* The reader's next work on the span comes after the copy that brought its bytes. *out_blocking is set where the wait
 * must be made by the caller itself, with viking_queue_block, once no lock is held. */
viking_status viking_queue_await(viking_queue *queue, uint32_t reader, const viking_fence *fence, bool *out_blocking);
viking_status viking_queue_block(viking_queue *queue, viking_event *ready);
/* That wait failed: the reader has waited for nothing. */
void viking_queue_distrust(viking_queue *queue, uint32_t reader);

/* The reader has queued its last work of this use of the span. */
viking_status viking_queue_release(viking_queue *queue, uint32_t reader, viking_fence *fence);

/* Copies queued from now on run after every use of the span that was released. */
viking_status viking_queue_after(viking_queue *queue, viking_fence *fence);

/* The same for everything queued on every reader, and on `stream`, until now. */
viking_status viking_queue_after_all(viking_queue *queue);
viking_status viking_queue_after_stream(viking_queue *queue, viking_stream stream);

/* Queue the copy of a weight's first `bytes`. The caller has called viking_queue_after for all that it overwrites. From a
 * pageable home it is staged where there is a window; without one the call may wait. */
viking_status viking_queue_copy(viking_queue *queue, viking_fence *fence, void *destination, const viking_home *home,
                                size_t bytes);
/* Copies of this home may make the call wait. */
bool viking_queue_copies_block(const viking_queue *queue, const viking_home *home);

/* Wait, on the host, for all copies, or for these and all readers. */
viking_status viking_queue_drain_copies(viking_queue *queue);
viking_status viking_queue_drain(viking_queue *queue);

#endif

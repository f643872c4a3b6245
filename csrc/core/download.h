/* What travels back: gradients, from device memory to the host.
 *
 * One FIFO stream of its own, so that a gradient waits for no weight and the link carries both ways at once. Three
 * fences:
 *
 *     computed   the copy waits for what the caller's stream was given before it was queued;
 *     reuse      what overwrites the source waits for the copy, on the stream that does it;
 *     arrived    who reads the destination on the host waits for the copy.
 *
 * Events are a fixed ring. A ticket whose event has been recorded again since is waited for by that later record: the
 * stream is FIFO, so it comes after it. Safe to call from several threads; the caller lets go of Python's GIL, for a
 * copy to pageable memory may wait for the device.
 */
#ifndef VIKING_CORE_DOWNLOAD_H
#define VIKING_CORE_DOWNLOAD_H

#include "../backend/backend.h"
#include "../base/os.h"

#define VIKING_DOWNLOAD_EVENTS 32u

typedef struct viking_downloads {
    viking_backend *backend;
    viking_mutex *lock;
    viking_stream stream; /* opened with the events by the first download */
    viking_event *computed;
    viking_event *arrived[VIKING_DOWNLOAD_EVENTS]; /* of ticket n at n modulo the ring's size */
    bool is_open;
    uint64_t queued; /* the latest ticket; 0: none */
} viking_downloads;

viking_status viking_downloads_open(viking_downloads *downloads, viking_backend *backend);
void viking_downloads_close(viking_downloads *downloads); /* waits for its copies */

/* Queue a copy of what `stream` computes into `source` by the work that it has now. *out_ticket names it. After an
 * error no copy is in flight that was not before. */
viking_status viking_downloads_queue(viking_downloads *downloads, void *destination, const void *source, size_t bytes,
                                     viking_stream stream, uint64_t *out_ticket);

/* Wait, on the host, until it has arrived; UINT64_MAX: all that was queued. */
viking_status viking_downloads_await(viking_downloads *downloads, uint64_t ticket);

/* Work queued on `stream` from now on may overwrite its source. */
viking_status viking_downloads_release(viking_downloads *downloads, uint64_t ticket, viking_stream stream);

#endif

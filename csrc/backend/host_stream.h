/* The streams of the host backend: worker threads that run their queues in order.
 *
 * One mutex guards everything but the bytes themselves; nothing is held while an item runs. Recording an event makes a
 * fresh *moment*, a flag that the record sets when the stream gets there; a wait takes hold of the moment that is the
 * event's latest when the wait is queued. So recording again cannot touch an earlier wait, records on different streams
 * may be reached in any order, and an event may be closed while its records and waits are still queued. A moment exists
 * before anything can wait for it, hence waits cannot form a circle.
 */
#ifndef VIKING_BACKEND_HOST_STREAM_H
#define VIKING_BACKEND_HOST_STREAM_H

#include "../base/os.h"
#include "host.h"

typedef struct viking_host_moment {
    unsigned references;
    unsigned waiting; /* threads: nobody is woken in vain */
    bool reached;
    uint64_t reached_ns; /* only if timed */
} viking_host_moment;

typedef enum viking_host_kind {
    VIKING_HOST_COPY,
    VIKING_HOST_RECORD,
    VIKING_HOST_WAIT,
    VIKING_HOST_CALL
} viking_host_kind;

typedef struct viking_host_item {
    struct viking_host_item *next;
    viking_host_kind kind;
    bool timed; /* record */
    viking_host_moment *moment; /* record, wait: one reference */
    uint64_t queued_ns; /* copy, only if paced */
    viking_copy_direction direction;
    void *destination;
    const void *source;
    size_t bytes;
    void (*body)(void *);
    void *argument;
} viking_host_item;

/* What all streams of a device share. */
typedef struct viking_host_streams {
    viking_mutex *mutex;
    viking_condition *progress; /* a moment that a thread waits for is reached */
    uint64_t bytes_per_second, delay_ns, seed; /* as in viking_host_options */
    struct viking_stream_tag *first;
    uint64_t count; /* ever opened */
    uint64_t link_free_ns[2]; /* per direction, when the copies so far would have left the link */
} viking_host_streams;

/* The options must be set; opens mutex and condition. On failure nothing is left. */
viking_status viking_host_streams_open(viking_host_streams *streams);
/* Ends all streams, once their work is done. */
void viking_host_streams_close(viking_host_streams *streams);

/* Takes and releases the mutex. */
viking_status viking_host_stream_start(viking_host_streams *streams, viking_stream *out);

/* The rest is called with the mutex held; what waits lets go of it meanwhile. */

/* Waits for its work. The mutex is free at the end. */
void viking_host_stream_end(viking_host_streams *streams, viking_stream stream);

/* Takes `item`, and its reference to a moment. */
void viking_host_queue(viking_stream stream, viking_host_item *item);

/* Make a moment and queue its record (on VIKING_STREAM_CALLER it is reached at once); the caller owns one reference. */
viking_status viking_host_record(viking_host_streams *streams, viking_stream stream, bool timed, const char *call,
                                 viking_host_moment **out);
void viking_host_moment_drop(viking_host_moment *moment); /* NULL is allowed */
void viking_host_moment_await(viking_host_streams *streams, viking_host_moment *moment);

/* Without the mutex: a copy at the pace of the link, if there is one, from `ready_ns` on; when it would have ended. */
uint64_t viking_host_copy_now(viking_host_streams *streams, viking_copy_direction direction, void *destination,
                              const void *source, size_t bytes, uint64_t ready_ns);

viking_status viking_host_no_memory(const char *call);

#endif

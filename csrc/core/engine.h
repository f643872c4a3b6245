/* The engine of one device: learns the order of uses, keeps the weights that are needed next on the device, and
 * says at each use where its bytes are.
 *
 *     pass_begin   a root module is entered
 *     acquire      a weight is used: its bytes are at slab + lease.offset for the work that `stream` is given
 *                  between this call and
 *     release      with the stream on which that work was queued
 *
 * acquire never decides anything on the known path: the copy was queued long before, and what is left is one event
 * wait for a streamed weight and nothing for a resident one. A use that was not foreseen is fetched on demand.
 *
 * Threads: every function may be called from any thread; one lock covers the engine (see csrc/README.md for the
 * order of locks). On a backend with caller_blocks, acquire may wait for a copy; elsewhere only a copy from pageable
 * memory without a window makes it wait (viking_engine_may_block). A stream on which uses were released must live until
 * a use on another stream has begun, or until the engine is closed: its fence may be recorded as late as that. After a
 * fork, the child gets STATE from all of them.
 */
#ifndef VIKING_CORE_ENGINE_H
#define VIKING_CORE_ENGINE_H

#include "home.h"
#include "plan.h"
#include "profile.h"

typedef struct viking_engine viking_engine;

/* Takes over the backend, also on failure. */
viking_status viking_engine_open(viking_backend *backend, viking_engine **out);
/* From here on uses are refused with STATE, and so is who waits for a use to end or for a slab: a thread that closes the
 * engine can wait for the calls of all others. */
void viking_engine_retire(viking_engine *engine);
/* No other call may be under way. Waits for its copies and for all work on the device that was given to it to read; closes the backend. Homes must
 * outlive it unless their weights were removed. NULL is allowed. */
void viking_engine_close(viking_engine *engine);

/* ---- weights ---- */

/* A weight of `bytes` in `home`, which must outlive its removal. It can be used after the next layout. */
viking_status viking_engine_add(viking_engine *engine, viking_home *home, uint64_t bytes, uint32_t *out_weight);
/* Waits for copies that still read its home, and unpins it. STATE while a use of it is in progress. */
viking_status viking_engine_remove(viking_engine *engine, uint32_t weight);

/* The host bytes have changed: the next use fetches them again. Copies in flight may still read the home. */
viking_status viking_engine_invalidate(viking_engine *engine, uint32_t weight);
/* Wait until no copy that was queued before reads any home. */
viking_status viking_engine_drain_copies(viking_engine *engine);

/* ---- trained weights, see trained.c ---- */

/* When the host may write to a weight in ways that nothing counts: never; between passes, so that what the device holds
 * serves no later pass; or at any moment, for want of passes, so that each use fetches. */
typedef enum viking_training { VIKING_FROZEN, VIKING_STEPPED_BETWEEN, VIKING_STEPPED_ANYTIME } viking_training;

viking_status viking_engine_set_trained(viking_engine *engine, uint32_t weight, viking_training training);
/* What the device holds of trained weights serves no further use; each pass begins with this. */
viking_status viking_engine_forget_trained(viking_engine *engine);
/* Its gradient was made: the host may step it at any moment from now on, until the next pass begins. */
viking_status viking_engine_expect_step(viking_engine *engine, uint32_t weight);

/* A gradient travels to the host; see download.h for tickets. Both ranges stay valid until it has arrived. */
viking_status viking_engine_download(viking_engine *engine, void *destination, const void *source, uint64_t bytes,
                                     viking_stream stream, uint64_t *out_ticket);
viking_status viking_engine_download_await(viking_engine *engine, uint64_t ticket);
viking_status viking_engine_download_release(viking_engine *engine, uint64_t ticket, viking_stream stream);

/* Pin and unpin a home of the caller's own, a gradient's. It is unpinned before the engine is closed. */
viking_status viking_engine_pin_home(viking_engine *engine, viking_home *home);
viking_status viking_engine_unpin_home(viking_engine *engine, viking_home *home);

/* ---- layout ---- */

/* Find addresses for all weights under a budget; nothing changes yet. *out_slab_bytes: the slab that it needs. */
viking_status viking_engine_layout(viking_engine *engine, uint64_t budget_bytes, uint64_t *out_slab_bytes);
/* The smallest and the largest budget that make a difference. */
viking_status viking_engine_budget_range(viking_engine *engine, uint64_t *out_smallest, uint64_t *out_largest);
/* Put the layout found last into force over device memory at `base` (VIKING_ALIGNMENT aligned), which work queued on
 * `stream` may still be using. With the base of before, what kept its address keeps its bytes. Waits for
 * the uses of other threads to end; STATE while the caller has one itself. */
viking_status viking_engine_use_layout(viking_engine *engine, void *base, viking_stream stream);
/* Nothing touches the slab any more once this returns: copies, readers and the uses of other threads are waited for.
 * STATE while the caller has a use itself. If a layout was found, other threads' uses wait for the next use_layout;
 * calling this again gives that layout up. */
viking_status viking_engine_drop_slab(viking_engine *engine);

/* Pin the home of a weight that is streamed or trained, unpin that of another resident one; the error of the backend where it refuses, the
 * weight is then streamed from pageable memory. */
viking_status viking_engine_pin(viking_engine *engine, uint32_t weight);
/* Unpin, whatever the weight is. */
viking_status viking_engine_unpin(viking_engine *engine, uint32_t weight);

/* Copies from pageable homes go through a pinned window of about `bytes` from now on, so that they make nobody wait; 0:
 * straight from the home. Replaces the window of before. The error of the backend where it refuses; there is no window
 * then. */
viking_status viking_engine_use_window(viking_engine *engine, uint64_t bytes);

/* Each copy to the device takes at least as long as over a link of this pace, from the next one on; 0: as fast as it
 * goes. UNSUPPORTED where the runtime cannot call back. For measurements, see pace.h. */
viking_status viking_engine_pace(viking_engine *engine, uint64_t bytes_per_second);

/* Another home of the same size, which holds the same bytes, for a weight; the one before is unpinned, and nothing reads
 * it any more. */
viking_status viking_engine_rehome(viking_engine *engine, uint32_t weight, viking_home *home);

/* ---- a step ---- */

/* `key` names the root module and the grad mode. *out_stale: a path became known that is clearly longer than
 * the one the layout was made for, so that a new layout would serve better. */
viking_status viking_engine_pass_begin(viking_engine *engine, uint64_t key, bool training, viking_stream stream,
                                       bool *out_stale);

typedef struct viking_acquired {
    uint64_t ticket; /* for release */
    void *address; /* of the bytes on the device */
    uint64_t layout; /* changes when addresses may have: what is cached per address is void then */
} viking_acquired;

/* BUSY: the uses of other threads leave no room, or one of them replaces the slab just now; try again after
 * viking_engine_wait_release. */
viking_status viking_engine_acquire(viking_engine *engine, uint32_t weight, viking_stream stream, viking_acquired *out);
viking_status viking_engine_release(viking_engine *engine, uint64_t ticket, viking_stream stream);
/* Wait until some use of another thread ends, or the slab is there; returns at once where neither is due. BUDGET: all
 * of these threads wait, too, so nothing would ever end. */
viking_status viking_engine_wait_release(viking_engine *engine);

/* acquire, release and pass_begin may block at present. Read without the lock: a hint that errs on the safe side. */
bool viking_engine_may_block(const viking_engine *engine);
/* A call that may hold the lock for long (weights, layout, slab, pinning) begins (1) or is over (-1). Whoever lets go of
 * something for such a call, as Python does of the GIL, announces it before: others then let go of it as well. */
void viking_engine_announce(viking_engine *engine, int calls);

/* ---- what happened ---- */

typedef enum viking_residency { VIKING_RESIDENT, VIKING_STREAMED, VIKING_DEMAND } viking_residency;

typedef struct viking_weight_stats {
    uint64_t bytes;
    uint64_t uses;
    uint64_t fetches;
    uint64_t locked_bytes;
    void *device_address; /* NULL when its bytes are not on the device */
    viking_residency residency; /* DEMAND: no layout, or no path known yet */
} viking_weight_stats;

typedef struct viking_engine_stats {
    uint64_t budget_bytes;
    uint64_t slab_bytes;
    uint64_t ring_bytes;
    uint64_t resident_bytes;
    uint64_t streamed_bytes;
    uint64_t pinned_bytes; /* locked pages, the window's among them */
    uint64_t window_bytes;
    uint64_t staged_bytes; /* streamed from pageable memory */
    uint64_t passes; /* complete ones */
    uint64_t steps; /* complete ones in training */
    uint64_t layouts; /* put into force */
    uint64_t demand_fetches; /* copies that a use had to wait for from their start */
    uint64_t fetched_bytes; /* of the last complete pass in training */
    uint64_t written_bytes; /* likewise */
    uint64_t floor_bytes; /* what its trace, read as sweeps, must fetch at least with this slab */
    uint64_t total_fetched_bytes;
    uint64_t stall_ns; /* of the last pass whose profile is complete; 0 before the first */
    uint32_t paths;
    uint32_t readers;
    /* At present: */
    uint32_t weights;
    uint32_t uses; /* in progress */
    uint32_t waiting; /* threads, for a use to end or for a slab */
    uint32_t streams;
    uint32_t events;
    uint32_t pins; /* host ranges that are pinned */
} viking_engine_stats;

viking_status viking_engine_weight_stats(viking_engine *engine, uint32_t weight, viking_weight_stats *out);
viking_status viking_engine_stats_of(viking_engine *engine, viking_engine_stats *out);

/* Profile the next pass (each 32nd one is profiled unasked, for stall_ns). */
viking_status viking_engine_profile_next(viking_engine *engine);
/* The last complete profile: *out_count spans, allocated with malloc, the caller frees. 0 where there is none yet. */
viking_status viking_engine_profile_read(viking_engine *engine, viking_profile_span **out_spans, uint32_t *out_count);

/* How often each weight is fetched in a pass over the path that the layout in force was made for: *out_counts has an
 * entry for each number below *out_count, 0 for what is resident or vacant, and throughout where a path that
 * was learned since, or a weight that was added since, has no plan under it. The caller frees it. */
viking_status viking_engine_planned_fetches(viking_engine *engine, uint32_t **out_counts, uint32_t *out_count);

/* The path of the last complete pass, for plans on paper. The caller frees it with viking_trace_free. */
viking_status viking_engine_last_trace(viking_engine *engine, viking_trace *out);

#endif

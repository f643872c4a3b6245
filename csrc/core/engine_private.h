/* The engine's own struct, shared by engine.c (a step), lookahead.c (its copies), engine_weights.c
 * (life, weights, layout) and stats.c. */
#ifndef VIKING_CORE_ENGINE_PRIVATE_H
#define VIKING_CORE_ENGINE_PRIVATE_H

#include <stdatomic.h>

#include "../base/os.h"
#include "download.h"
#include "engine.h"
#include "path.h"
#include "queue.h"
#include "slab.h"

#define VIKING_NO_PASS UINT64_MAX

typedef struct viking_weight {
    viking_home *home; /* NULL: a vacant number */
    uint64_t bytes;
    viking_fence fence;
    /* The latest use that the look-ahead has counted on, as a position in the sequence of all uses, plus one. What it
     * counts on must not be overwritten before that use is over. */
    uint64_t foreseen;
    uint64_t uses;
    uint64_t fetches;
    viking_training training;
    bool step_expected; /* at any moment: not fetched ahead, and forgotten after each use */
} viking_weight;

struct viking_engine {
    viking_backend *backend;
    viking_mutex *lock;
    viking_condition *released; /* some use has ended */

    viking_weight *weights;
    uint32_t count;
    uint32_t capacity;

    viking_queue queue;
    viking_downloads downloads; /* has a lock of its own */
    viking_slab slab;
    viking_paths paths;
    viking_profile profile;

    viking_map *next_map; /* found by viking_engine_layout, not in force yet */
    uint64_t next_budget;
    uint64_t budget_bytes;
    uint32_t layout_path_uses; /* length of the path that the layout was made for; 0: none was known */

    uint64_t position; /* of the next use in the sequence of all uses */
    viking_cursor ahead; /* what the look-ahead examines next ... */
    uint64_t ahead_position; /* ... and its position; never before `position` between calls */

    /* Per pass, and copies of the last complete one. */
    bool training;
    bool profiled;
    bool profile_asked;
    uint64_t pass_fetched;
    uint64_t fetched_bytes;
    _Atomic uint64_t pass_written; /* counted without the lock */
    uint64_t written_bytes;
    uint64_t trained_pass; /* number of the last complete pass in training; VIKING_NO_PASS: none under this layout */

    uint64_t passes;
    uint64_t steps;
    uint64_t layouts;
    uint64_t demand_fetches;
    uint64_t total_fetched;
    uint64_t stall_ns; /* of the last complete profile */
    viking_home **pinned; /* homes that are no weight's, pinned for gradients */
    uint32_t pinned_count;
    uint32_t pinned_capacity;

    bool retired; /* it is about to be closed */
    uint32_t waiting; /* threads in viking_engine_wait */
    atomic_bool may_block;
    atomic_int long_calls; /* under way, see viking_engine_announce */
};

/* All public functions start with it: STATE in a forked child, else the lock is held. */
viking_status viking_engine_enter(viking_engine *engine);
void viking_engine_leave(viking_engine *engine);

/* Wait until `released` is signalled. The lock is held, and let go of meanwhile. */
void viking_engine_wait(viking_engine *engine);

/* STATE once the engine is retired. The lock is held. */
viking_status viking_engine_serves(const viking_engine *engine);

/* The same for one weight: STATE as well, and the lock is not held, where it is none. */
viking_status viking_engine_enter_weight(viking_engine *engine, uint32_t weight);

/* STATE unless it is a weight. The lock is held. */
viking_status viking_engine_known(const viking_engine *engine, uint32_t weight);

/* What a layout is made for: the path that was learned, else a sweep over all weights and one back. The lock is held. */
viking_status viking_engine_path_to_lay_out(const viking_engine *engine, viking_trace *out);

/* ---- lookahead.c; the lock is held ---- */

/* The layout in force was made for this weight, or for an earlier one of the same number and size, whose place fits. */
bool viking_engine_has_place(const viking_engine *engine, uint32_t weight);
bool viking_engine_is_resident(const viking_engine *engine, uint32_t weight);

/* may_block follows from what is pageable and may still be fetched. */
void viking_engine_update_may_block(viking_engine *engine);

/* Queue the copy of a weight to its own address, or to another one (a displaced use). Nothing in progress is in the
 * way. *out_upset: the look-ahead counted on something that is gone now. */
viking_status viking_engine_fetch(viking_engine *engine, uint32_t weight, uint64_t offset, bool *out_upset);

/* Start anew from the next expected use. */
void viking_engine_look_again(viking_engine *engine);
/* Queue all copies whose gates are open. */
viking_status viking_engine_look_ahead(viking_engine *engine);

/* ---- trained.c; the lock is held ---- */

/* A pass begins: what the device holds of trained weights is from before the host stepped them. */
void viking_engine_forget_all_trained(viking_engine *engine);
/* The use at this position of the sequence of all uses must not be fetched for yet. */
bool viking_engine_is_too_early(const viking_engine *engine, uint32_t weight, uint64_t position);

/* The path that layouts are made for; NULL before one is known. */
const viking_trace *viking_engine_main_path(const viking_engine *engine);

#endif

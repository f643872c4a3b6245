/* The paths that a model takes through its weights, and the guess at what it will use next.
 *
 * A pass is what happens from one entry of a root module to the next: a forward, and the backward that follows it. Its
 * path is the trace of its uses. A model has few of them (a training step, a sampling forward, a text encoder's
 * forward), so they are kept, keyed by who entered (root module and grad mode), each with the path that followed it the
 * last time: that chain is the prediction, across passes too.
 *
 * A prediction that fails costs time and nothing else. Where the model leaves its path, we look for another known path
 * that began the same way; else we listen until two uses in a row, or the very use we expected, tell us where on the
 * path it is (a skipped layer, a repeated one); what really happened becomes a path of its own when the pass ends.
 */
#ifndef VIKING_CORE_PATH_H
#define VIKING_CORE_PATH_H

#include "trace.h"

#define VIKING_PATH_LIMIT 32u
#define VIKING_NO_PATH UINT32_MAX

typedef struct viking_path {
    uint64_t key;
    viking_trace trace;
    uint32_t next; /* the path that followed it the last time, or VIKING_NO_PATH */
    uint32_t hits; /* passes that took it */
    uint64_t last_pass; /* the latest of them */
} viking_path;

/* A place in the predicted future. */
typedef struct viking_cursor {
    uint32_t path; /* VIKING_NO_PATH: nothing is predicted */
    uint32_t index;
} viking_cursor;

typedef struct viking_paths {
    viking_path paths[VIKING_PATH_LIMIT];
    uint32_t count;

    uint64_t pass; /* number of the pass under way; 0 before the first */
    uint64_t key; /* of it */
    uint32_t previous; /* path of the pass before */
    uint32_t uses; /* of this pass so far */

    viking_cursor expected; /* the next use */
    bool clean; /* this pass has followed expected.path from its start */
    viking_trace seen; /* what this pass used */
    viking_cursor resume; /* lost: where on which path to look for the next use */
} viking_paths;

void viking_paths_init(viking_paths *paths);
void viking_paths_free(viking_paths *paths);

/* Forget all paths (the weights' numbers changed); the pass under way is learned from here on. */
void viking_paths_clear(viking_paths *paths);

/* A root was entered: end the pass, learn its path, predict the next one. *out_steady: the pass ended exactly where it
 * was expected to and what was predicted to follow it is what follows, so a prediction made before still holds.
 * *out_learned: a path that was not known before, or VIKING_NO_PATH. */
viking_status viking_paths_begin(viking_paths *paths, uint64_t key, bool *out_steady, uint32_t *out_learned);

/* A use begins. *out_index: its place in the pass. *out_expected: it was the predicted one. */
viking_status viking_paths_use(viking_paths *paths, uint32_t weight, viking_use_kind kind, uint32_t *out_index,
                               bool *out_expected);

/* The use number `index` of pass number `pass` ends. */
void viking_paths_release(viking_paths *paths, uint64_t pass, uint32_t index);

/* The use at a cursor, moving it on to the next one; NULL at the end of what is predicted. */
const viking_use *viking_paths_next(const viking_paths *paths, viking_cursor *cursor);

#endif

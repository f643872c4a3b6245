#include "path.h"

#include <string.h>

void viking_paths_init(viking_paths *paths)
{
    memset(paths, 0, sizeof *paths);
    viking_trace_init(&paths->seen);
    paths->previous = VIKING_NO_PATH;
    paths->expected.path = VIKING_NO_PATH;
    paths->resume.path = VIKING_NO_PATH;
}

void viking_paths_free(viking_paths *paths)
{
    for (uint32_t i = 0; i < paths->count; i++)
        viking_trace_free(&paths->paths[i].trace);
    viking_trace_free(&paths->seen);
    viking_paths_init(paths);
}

void viking_paths_clear(viking_paths *paths)
{
    uint64_t pass = paths->pass;
    uint64_t key = paths->key;
    viking_paths_free(paths);
    paths->pass = pass;
    paths->key = key;
}

const viking_use *viking_paths_next(const viking_paths *paths, viking_cursor *cursor)
{
    if (cursor->path == VIKING_NO_PATH)
        return NULL;
    if (cursor->index == paths->paths[cursor->path].trace.count) {
        cursor->path = paths->paths[cursor->path].next;
        cursor->index = 0;
        if (cursor->path == VIKING_NO_PATH)
            return NULL;
    }
    return &paths->paths[cursor->path].trace.uses[cursor->index++];
}

/* Room for one more path: the least recently taken one goes if all places are taken. */
static uint32_t vacant(viking_paths *paths)
{
    if (paths->count < VIKING_PATH_LIMIT)
        return paths->count;
    uint32_t oldest = VIKING_NO_PATH;
    for (uint32_t i = 0; i < paths->count; i++)
        if (i != paths->previous &&
            (oldest == VIKING_NO_PATH || paths->paths[i].last_pass < paths->paths[oldest].last_pass))
            oldest = i;
    for (uint32_t i = 0; i < paths->count; i++)
        if (paths->paths[i].next == oldest)
            paths->paths[i].next = VIKING_NO_PATH;
    return oldest;
}

/* Find the seen trace among the paths of this key, or add it. */
static viking_status learn(viking_paths *paths, uint32_t *out_path, bool *out_new)
{
    for (uint32_t i = 0; i < paths->count; i++) {
        if (paths->paths[i].key == paths->key && viking_trace_equal(&paths->paths[i].trace, &paths->seen)) {
            *out_path = i;
            *out_new = false;
            return VIKING_OK;
        }
    }
    uint32_t place = vacant(paths);
    viking_path *path = &paths->paths[place];
    if (place == paths->count)
        viking_trace_init(&path->trace);
    viking_status status = viking_trace_copy(&path->trace, &paths->seen);
    if (status != VIKING_OK)
        return status;
    /* A use that goes on beyond its pass lasts until the end of the period, as far as a plan is concerned. */
    for (uint32_t i = 0; i < path->trace.count; i++)
        viking_trace_release(&path->trace, i);
    path->key = paths->key;
    path->next = VIKING_NO_PATH;
    path->hits = 0;
    if (place == paths->count)
        paths->count++;
    *out_path = place;
    *out_new = true;
    return VIKING_OK;
}

/* The path of this key that was taken most often, the latest among equals. */
static uint32_t favourite(const viking_paths *paths, uint64_t key)
{
    uint32_t best = VIKING_NO_PATH;
    for (uint32_t i = 0; i < paths->count; i++) {
        const viking_path *path = &paths->paths[i];
        if (path->key != key)
            continue;
        const viking_path *rival = best == VIKING_NO_PATH ? NULL : &paths->paths[best];
        if (rival == NULL || path->hits > rival->hits ||
            (path->hits == rival->hits && path->last_pass > rival->last_pass))
            best = i;
    }
    return best;
}

viking_status viking_paths_begin(viking_paths *paths, uint64_t key, bool *out_steady, uint32_t *out_learned)
{
    viking_status status = VIKING_OK;
    uint32_t predicted = VIKING_NO_PATH;
    *out_steady = false;
    *out_learned = VIKING_NO_PATH;
    if (paths->uses > 0) {
        uint32_t current = paths->expected.path;
        bool complete = paths->clean && paths->expected.index == paths->paths[current].trace.count;
        bool added = false;
        if (complete) {
            predicted = paths->paths[current].next;
        } else {
            status = learn(paths, &current, &added);
            if (status != VIKING_OK)
                return status;
        }
        paths->paths[current].hits++;
        paths->paths[current].last_pass = paths->pass;
        if (paths->previous != VIKING_NO_PATH)
            paths->paths[paths->previous].next = current;
        paths->previous = current;
        if (added)
            *out_learned = current;
    }
    uint32_t next = paths->previous == VIKING_NO_PATH ? VIKING_NO_PATH : paths->paths[paths->previous].next;
    if (next == VIKING_NO_PATH || paths->paths[next].key != key)
        next = favourite(paths, key);
    *out_steady = predicted != VIKING_NO_PATH && predicted == next;
    paths->pass++;
    paths->key = key;
    paths->uses = 0;
    paths->expected = (viking_cursor){.path = next, .index = 0};
    paths->resume = paths->expected;
    paths->clean = next != VIKING_NO_PATH;
    viking_trace_clear(&paths->seen);
    return VIKING_OK;
}

/* Another path of this key that began like this pass and goes on with `weight`. */
static uint32_t branch(const viking_paths *paths, uint32_t weight)
{
    for (uint32_t i = 0; i < paths->count; i++) {
        const viking_trace *trace = &paths->paths[i].trace;
        if (paths->paths[i].key == paths->key && trace->count > paths->seen.count &&
            trace->uses[paths->seen.count].weight == weight && viking_trace_has_prefix(trace, &paths->seen))
            return i;
    }
    return VIKING_NO_PATH;
}

/* Where a lost pass is on the path it left, judged by its latest use and the one that begins now. */
static bool found_again(const viking_paths *paths, uint32_t weight, viking_cursor *out)
{
    if (paths->resume.path == VIKING_NO_PATH)
        return false;
    const viking_trace *trace = &paths->paths[paths->resume.path].trace;
    uint32_t from = paths->resume.index;
    *out = paths->resume;
    if (from < trace->count && trace->uses[from].weight == weight) {
        out->index = from + 1; /* what came in between was an insertion */
        return true;
    }
    if (paths->seen.count == 0)
        return false;
    uint32_t latest = paths->seen.uses[paths->seen.count - 1].weight;
    for (uint32_t i = from; i + 1 < trace->count; i++) {
        if (trace->uses[i].weight == latest && trace->uses[i + 1].weight == weight) {
            out->index = i + 2;
            return true;
        }
    }
    return false;
}

/* A use that was not predicted. */
static void lose(viking_paths *paths, uint32_t weight)
{
    paths->clean = false;
    if (paths->expected.path != VIKING_NO_PATH)
        paths->resume = paths->expected;
    uint32_t other = branch(paths, weight);
    if (other != VIKING_NO_PATH)
        paths->expected = (viking_cursor){.path = other, .index = paths->seen.count + 1};
    else if (!found_again(paths, weight, &paths->expected))
        paths->expected.path = VIKING_NO_PATH;
}

/* The pass under way has used what its path begins with. */
static viking_status assume_begun(viking_paths *paths, uint32_t uses)
{
    const viking_trace *trace = &paths->paths[paths->previous].trace;
    viking_status status = viking_trace_copy(&paths->seen, trace);
    if (status != VIKING_OK)
        return status;
    paths->seen.count = uses;
    paths->seen.ticks = trace->uses[uses].begin;
    for (uint32_t i = 0; i < uses; i++)
        if (paths->seen.uses[i].end >= paths->seen.ticks)
            paths->seen.uses[i].end = UINT32_MAX;
    paths->uses = uses;
    paths->expected = (viking_cursor){.path = paths->previous, .index = uses};
    paths->clean = true;
    return VIKING_OK;
}

/* Without root entries (a model called by its forward, a script of its own) a pass never ends; the shortest period of
 * what was seen is the pass then. Looked for each time the trace has doubled. */
static viking_status split_endless(viking_paths *paths)
{
    uint32_t period = 0;
    uint32_t count = paths->seen.count;
    viking_status status = viking_trace_period(&paths->seen, &period);
    if (status != VIKING_OK || period == 0)
        return status;
    paths->seen.count = period;
    bool steady = false;
    uint32_t learned = VIKING_NO_PATH;
    status = viking_paths_begin(paths, paths->key, &steady, &learned);
    if (status != VIKING_OK)
        return status;
    paths->paths[paths->previous].next = paths->previous;
    return assume_begun(paths, count % period);
}

/* The pass has come to the end of its path and the next use is the first one of what is predicted to follow: a new
 * pass has begun without a root entry. */
static bool begins_again(const viking_paths *paths, uint32_t weight)
{
    if (!paths->clean || paths->expected.index != paths->paths[paths->expected.path].trace.count)
        return false;
    uint32_t next = paths->paths[paths->expected.path].next;
    return next != VIKING_NO_PATH && paths->paths[next].key == paths->key && paths->paths[next].trace.count > 0 &&
           paths->paths[next].trace.uses[0].weight == weight;
}

enum { ENDLESS = 4096 };

viking_status viking_paths_use(viking_paths *paths, uint32_t weight, viking_use_kind kind, uint32_t *out_index,
                               bool *out_expected)
{
    viking_status status = VIKING_OK;
    if (begins_again(paths, weight)) {
        bool steady = false;
        uint32_t learned = VIKING_NO_PATH;
        status = viking_paths_begin(paths, paths->key, &steady, &learned);
        if (status != VIKING_OK)
            return status;
    }
    viking_cursor next = paths->expected;
    bool at_end = next.path != VIKING_NO_PATH && next.index == paths->paths[next.path].trace.count;
    const viking_use *use = at_end ? NULL : viking_paths_next(paths, &next);
    *out_expected = use != NULL && use->weight == weight && use->kind == (uint32_t)kind;
    if (*out_expected)
        paths->expected = next;
    else
        lose(paths, weight);
    status = viking_trace_acquire(&paths->seen, weight, kind, out_index);
    if (status != VIKING_OK)
        return status;
    paths->uses++;
    if (!paths->clean && paths->seen.count >= ENDLESS && (paths->seen.count & (paths->seen.count - 1)) == 0)
        status = split_endless(paths);
    return status;
}

void viking_paths_release(viking_paths *paths, uint64_t pass, uint32_t index)
{
    if (pass == paths->pass)
        viking_trace_release(&paths->seen, index);
}

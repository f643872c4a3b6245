/* Placing is one pass over the forward order with a cursor that runs round the ring. What makes it more than a sum
 * modulo the ring's size are uses that overlap: a container may hold its own weight while its children run, and two
 * threads may run at once. Weights that are in use at the same moment are rivals; a weight that would land on a
 * rival is moved behind it, and where that finds no room all the way round, the one of them that is held longest
 * becomes resident, which is what its long use amounts to.
 */
#include "placement.h"

#include <stdlib.h>
#include <string.h>

static viking_status no_memory(uint32_t count)
{
    return viking_status_fail(VIKING_ERROR_NO_HOST_MEMORY, "no memory to place %u weights", count);
}

static viking_status check_input(const viking_trace *trace, const uint64_t *bytes, uint32_t count)
{
    uint64_t total = 0;
    for (uint32_t w = 0; w < count; w++) {
        if (bytes[w] == 0 || bytes[w] % VIKING_ALIGNMENT != 0) {
            return viking_status_fail(VIKING_ERROR_INVALID, "weight %u has %llu bytes, not a multiple of %u above 0", w,
                                      (unsigned long long)bytes[w], VIKING_ALIGNMENT);
        }
        if (bytes[w] > INT64_MAX - total)
            return viking_status_fail(VIKING_ERROR_INVALID, "the weights have more than 2^63 bytes together");
        total += bytes[w];
    }
    for (uint32_t i = 0; i < trace->count; i++) {
        const viking_use *use = &trace->uses[i];
        if (use->weight >= count) {
            return viking_status_fail(VIKING_ERROR_INVALID, "use %u is of weight %u, but there are %u", i, use->weight,
                                      count);
        }
        if (use->end <= use->begin || use->end >= trace->ticks || (i > 0 && use->begin <= use[-1].begin)) {
            return viking_status_fail(VIKING_ERROR_INVALID,
                                      "use %u of weight %u, [%u, %u], is open, empty, out of order or beyond the "
                                      "trace's %u ticks",
                                      i, use->weight, use->begin, use->end, trace->ticks);
        }
    }
    return VIKING_OK;
}

typedef struct ranked {
    uint64_t bytes;
    uint32_t rank; /* in forward order */
    uint32_t weight;
} ranked;

static int larger_first(const void *left, const void *right)
{
    const ranked *a = left, *b = right;
    if (a->bytes != b->bytes)
        return a->bytes < b->bytes ? 1 : -1;
    return a->rank < b->rank ? -1 : 1;
}

static viking_status find_order(viking_placement *self, const viking_trace *trace)
{
    ranked *ranking = malloc(((size_t)self->count + 1) * sizeof *ranking);
    if (ranking == NULL)
        return no_memory(self->count);
    for (uint32_t i = 0; i < trace->count; i++) {
        const viking_use *use = &trace->uses[i];
        if (self->lifetime[use->weight] == 0) {
            ranking[self->named] = (ranked){self->bytes[use->weight], self->named, use->weight};
            self->order[self->named++] = use->weight;
        }
        self->lifetime[use->weight] += use->end - use->begin;
    }
    for (uint32_t w = 0, at = self->named; w < self->count; w++) {
        self->total_bytes += self->bytes[w];
        if (self->lifetime[w] == 0)
            self->order[at++] = w;
    }
    qsort(ranking, self->named, sizeof *ranking, larger_first);
    for (uint32_t i = 0; i < self->named; i++)
        self->by_size[i] = ranking[i].weight;
    free(ranking);
    return VIKING_OK;
}

/* A growing list of weight pairs, packed (first << 32 | second), each in both orders. */
typedef struct pair_list {
    uint64_t *pairs;
    size_t count, capacity;
} pair_list;

static bool pair_push(pair_list *list, uint32_t a, uint32_t b)
{
    if (list->count + 2 > list->capacity) {
        size_t capacity = list->capacity == 0 ? 256 : list->capacity * 2;
        uint64_t *pairs = realloc(list->pairs, capacity * sizeof *pairs);
        if (pairs == NULL)
            return false;
        list->pairs = pairs;
        list->capacity = capacity;
    }
    list->pairs[list->count++] = (uint64_t)a << 32 | b;
    list->pairs[list->count++] = (uint64_t)b << 32 | a;
    return true;
}

/* Turn the list into begin[count + 1] and members, each group sorted and without repeats. Two counting passes: the
 * first groups, the second walks the groups in order and so fills each of its own in order. */
static bool pair_group(const pair_list *list, uint32_t count, uint32_t *begin, uint32_t **out_members)
{
    uint32_t *grouped = malloc((list->count + 1) * sizeof *grouped);
    uint32_t *members = malloc((list->count + 1) * sizeof *members);
    uint32_t *fill = calloc((size_t)count + 1, sizeof *fill);
    uint32_t kept = 0;
    bool good = grouped != NULL && members != NULL && fill != NULL;

    if (good) {
        memset(begin, 0, ((size_t)count + 1) * sizeof *begin);
        for (size_t i = 0; i < list->count; i++)
            begin[(list->pairs[i] >> 32) + 1]++;
        for (uint32_t w = 0; w < count; w++) {
            begin[w + 1] += begin[w];
            fill[w] = begin[w];
        }
        for (size_t i = 0; i < list->count; i++)
            grouped[fill[list->pairs[i] >> 32]++] = (uint32_t)list->pairs[i];
        memcpy(fill, begin, ((size_t)count + 1) * sizeof *fill);
        /* The relation is symmetric, so that walking group w tells every member that w is one of its own. */
        for (uint32_t w = 0; w < count; w++)
            for (uint32_t k = begin[w]; k < begin[w + 1]; k++)
                members[fill[grouped[k]]++] = w;
        for (uint32_t w = 0; w < count; w++) {
            uint32_t from = begin[w], to = begin[w + 1];
            begin[w] = kept;
            for (uint32_t k = from; k < to; k++)
                if (k == from || members[k] != members[k - 1])
                    members[kept++] = members[k];
        }
        begin[count] = kept;
    }
    free(fill);
    free(grouped);
    if (!good) {
        free(members);
        return false;
    }
    *out_members = members;
    return true;
}

static viking_status find_rivals(viking_placement *self, const viking_trace *trace)
{
    uint32_t *live = malloc(((size_t)trace->count + 1) * sizeof *live), live_count = 0;
    pair_list list = {NULL, 0, 0};
    bool good = live != NULL;

    for (uint32_t i = 0; good && i < trace->count; i++) {
        uint32_t kept = 0;
        for (uint32_t k = 0; good && k < live_count; k++) {
            const viking_use *other = &trace->uses[live[k]];
            if (other->end > trace->uses[i].begin) {
                live[kept++] = live[k];
                if (other->weight != trace->uses[i].weight)
                    good = pair_push(&list, other->weight, trace->uses[i].weight);
            }
        }
        live_count = kept;
        live[live_count++] = i;
    }
    good = good && pair_group(&list, self->count, self->rival_begin, &self->rivals);
    free(list.pairs);
    free(live);
    return good ? VIKING_OK : no_memory(self->count);
}

viking_status viking_placement_open(const viking_trace *trace, const uint64_t *bytes, const bool *stepped,
                                    uint32_t count, viking_placement *out)
{
    size_t room = (size_t)count + 1;
    viking_status status;

    memset(out, 0, sizeof *out);
    status = check_input(trace, bytes, count);
    if (status != VIKING_OK)
        return status;
    out->count = count;
    out->bytes = bytes;
    out->stepped = stepped;
    out->order = malloc(room * sizeof *out->order);
    out->by_size = malloc(room * sizeof *out->by_size);
    out->lifetime = calloc(room, sizeof *out->lifetime);
    out->rival_begin = malloc(room * sizeof *out->rival_begin);
    if (out->order == NULL || out->by_size == NULL || out->lifetime == NULL || out->rival_begin == NULL) {
        status = no_memory(count);
        goto fail;
    }
    status = find_order(out, trace);
    if (status != VIKING_OK)
        goto fail;
    status = find_rivals(out, trace);
    if (status != VIKING_OK)
        goto fail;
    return VIKING_OK;
fail:
    viking_placement_close(out);
    return status;
}

void viking_placement_close(viking_placement *placement)
{
    free(placement->rivals);
    free(placement->rival_begin);
    free(placement->lifetime);
    free(placement->by_size);
    free(placement->order);
    memset(placement, 0, sizeof *placement);
}

static bool is_stepped(const viking_placement *placement, uint32_t weight)
{
    return placement->stepped != NULL && placement->stepped[weight];
}

/* Error diffusion over those that are `stepped` or over the others: each weight adds its share to a debt, and becomes
 * resident when the debt is half its size. What is left over goes to the largest weights that still fit. Returns how
 * many bytes became resident. */
static uint64_t spread_over(const viking_placement *placement, bool stepped, uint64_t share_bytes, bool *resident)
{
    uint64_t used = 0, total = 0;
    double debt = 0.0, share;

    for (uint32_t i = 0; i < placement->named; i++)
        if (is_stepped(placement, placement->order[i]) == stepped)
            total += placement->bytes[placement->order[i]];
    share = total == 0 ? 0.0 : (double)share_bytes / (double)total;
    for (uint32_t i = 0; i < placement->named; i++) {
        uint32_t w = placement->order[i];
        uint64_t bytes = placement->bytes[w];
        if (is_stepped(placement, w) != stepped)
            continue;
        debt += (double)bytes * share;
        if (share > 0.0 && debt >= (double)bytes / 2 && bytes <= share_bytes - used) {
            resident[w] = true;
            used += bytes;
            debt -= (double)bytes;
        }
    }
    for (uint32_t i = 0; i < placement->named; i++) {
        uint32_t w = placement->by_size[i];
        if (!resident[w] && is_stepped(placement, w) == stepped && placement->bytes[w] <= share_bytes - used) {
            resident[w] = true;
            used += placement->bytes[w];
        }
    }
    return used;
}

/* A weight that is stepped travels once a pass wherever it lives: the others gain more by staying. */
void viking_placement_spread(const viking_placement *placement, uint64_t share_bytes, bool *resident)
{
    memset(resident, 0, placement->count * sizeof *resident);
    share_bytes -= spread_over(placement, false, share_bytes, resident);
    spread_over(placement, true, share_bytes, resident);
}

/* Where weight w goes when the cursor stands at `at`: the first position from there on, round the ring once, that
 * touches no rival placed so far. */
static uint64_t find_position(const viking_placement *self, const uint64_t *offsets, uint32_t w, uint64_t at,
                              uint64_t ring)
{
    uint64_t bytes = self->bytes[w];
    bool wrapped = false;

    for (;;) {
        uint64_t moved = at;
        if (at + bytes > ring) {
            if (wrapped || bytes > ring)
                return VIKING_NOWHERE;
            wrapped = true;
            at = 0;
            continue;
        }
        for (uint32_t k = self->rival_begin[w]; k < self->rival_begin[w + 1]; k++) {
            uint64_t other = offsets[self->rivals[k]];
            uint64_t other_end = other + self->bytes[self->rivals[k]];
            if (other != VIKING_NOWHERE && other < at + bytes && at < other_end && other_end > moved)
                moved = other_end;
        }
        if (moved == at)
            return at;
        at = moved;
    }
}

/* Offsets of the ring's weights; false, with the weight that fits nowhere, where there is one. */
static bool place_ring(const viking_placement *self, const bool *resident, uint64_t ring, uint64_t *offsets,
                       uint32_t *out_stuck)
{
    uint64_t cursor = 0;

    for (uint32_t w = 0; w < self->count; w++)
        offsets[w] = VIKING_NOWHERE;
    for (uint32_t i = 0; i < self->count; i++) {
        uint32_t w = self->order[i];
        if (resident[w])
            continue;
        uint64_t position = find_position(self, offsets, w, cursor, ring);
        if (position == VIKING_NOWHERE) {
            *out_stuck = w;
            return false;
        }
        offsets[w] = position;
        cursor = position + self->bytes[w];
    }
    return true;
}

/* Of a weight that fits nowhere and its rivals in the ring, the one that is held longest. */
static uint32_t longest_held(const viking_placement *self, const bool *resident, uint32_t stuck)
{
    uint32_t best = stuck;
    for (uint32_t k = self->rival_begin[stuck]; k < self->rival_begin[stuck + 1]; k++) {
        uint32_t v = self->rivals[k];
        if (!resident[v] &&
            (self->lifetime[v] > self->lifetime[best] || (self->lifetime[v] == self->lifetime[best] && v < best)))
            best = v;
    }
    return best;
}

typedef struct sums {
    uint64_t resident;
    uint64_t streamed;
    uint64_t two_largest; /* of those streamed */
} sums;

static sums add_up(const viking_placement *self, const bool *resident)
{
    sums sum = {0, 0, 0};
    uint64_t first = 0, second = 0;
    for (uint32_t w = 0; w < self->count; w++) {
        uint64_t bytes = self->bytes[w];
        if (resident[w]) {
            sum.resident += bytes;
            continue;
        }
        sum.streamed += bytes;
        if (bytes > first) {
            second = first;
            first = bytes;
        } else if (bytes > second) {
            second = bytes;
        }
    }
    sum.two_largest = first + second;
    return sum;
}

typedef struct by_offset {
    uint64_t begin, end;
    uint32_t weight;
} by_offset;

static int lower_first(const void *left, const void *right)
{
    const by_offset *a = left, *b = right;
    if (a->begin != b->begin)
        return a->begin < b->begin ? -1 : 1;
    return a->weight < b->weight ? -1 : 1;
}

static viking_status find_neighbours(viking_map *map)
{
    by_offset *sorted = malloc(((size_t)map->count + 1) * sizeof *sorted);
    pair_list list = {NULL, 0, 0};
    bool good = sorted != NULL;
    uint32_t in_ring = 0;

    for (uint32_t w = 0; good && w < map->count; w++)
        if (!map->resident[w])
            sorted[in_ring++] = (by_offset){map->offsets[w], map->offsets[w] + map->bytes[w], w};
    if (good)
        qsort(sorted, in_ring, sizeof *sorted, lower_first);
    for (uint32_t i = 0; good && i < in_ring; i++)
        for (uint32_t k = i + 1; good && k < in_ring && sorted[k].begin < sorted[i].end; k++)
            good = pair_push(&list, sorted[i].weight, sorted[k].weight);
    good = good && pair_group(&list, map->count, map->neighbour_begin, &map->neighbours);
    free(list.pairs);
    free(sorted);
    return good ? VIKING_OK : no_memory(map->count);
}

void viking_map_free(viking_map *map)
{
    if (map == NULL)
        return;
    free(map->neighbours);
    free(map->neighbour_begin);
    free(map->resident);
    free(map->stepped);
    free(map->offsets);
    free(map->bytes);
    free(map);
}

static viking_map *map_allocate(uint32_t count)
{
    viking_map *map = calloc(1, sizeof *map);
    if (map == NULL)
        return NULL;
    map->count = count;
    map->bytes = malloc(((size_t)count + 1) * sizeof *map->bytes);
    map->offsets = malloc(((size_t)count + 1) * sizeof *map->offsets);
    map->resident = calloc((size_t)count + 1, sizeof *map->resident);
    map->stepped = calloc((size_t)count + 1, sizeof *map->stepped);
    map->neighbour_begin = calloc((size_t)count + 1, sizeof *map->neighbour_begin);
    if (map->bytes == NULL || map->offsets == NULL || map->resident == NULL || map->stepped == NULL ||
        map->neighbour_begin == NULL) {
        viking_map_free(map);
        return NULL;
    }
    return map;
}

/* Fill in what follows from the residents and the ring's offsets: the residents' own, and who overlaps whom. */
static viking_status map_finish(const viking_placement *self, const bool *resident, uint64_t ring, viking_map *map)
{
    uint64_t at = ring;
    map->ring_bytes = ring;
    for (uint32_t i = 0; i < self->count; i++) {
        uint32_t w = self->order[i];
        map->bytes[w] = self->bytes[w];
        map->resident[w] = resident[w];
        map->stepped[w] = is_stepped(self, w);
        if (resident[w]) {
            map->offsets[w] = at;
            at += self->bytes[w];
        }
    }
    map->resident_bytes = at - ring;
    map->slab_bytes = at;
    return find_neighbours(map);
}

/* Both public placements: the ring is what `budget_bytes` leaves, or, with `ring_scale` > 0, that many quarters of
 * the two largest weights, whatever it takes. */
static viking_status place(const viking_placement *self, bool *resident, uint64_t budget_bytes, uint32_t ring_scale,
                           viking_map **out)
{
    viking_status status;
    viking_map *map = map_allocate(self->count);
    uint64_t ring;

    *out = NULL;
    if (map == NULL)
        return no_memory(self->count);
    for (;;) {
        uint32_t stuck;
        sums sum = add_up(self, resident);
        uint64_t smallest = sum.two_largest;
        if (ring_scale == 0) {
            if (sum.resident > budget_bytes || budget_bytes - sum.resident < smallest) {
                viking_map_free(map);
                return VIKING_OK;
            }
            ring = budget_bytes - sum.resident;
        } else {
            ring = smallest / 4 * ring_scale;
        }
        ring -= ring % VIKING_ALIGNMENT;
        if (ring >= sum.streamed)
            ring = sum.streamed;
        if (place_ring(self, resident, ring, map->offsets, &stuck))
            break;
        resident[longest_held(self, resident, stuck)] = true;
    }
    status = map_finish(self, resident, ring, map);
    if (status != VIKING_OK) {
        viking_map_free(map);
        return status;
    }
    *out = map;
    return VIKING_OK;
}

viking_status viking_placement_map(const viking_placement *placement, bool *resident, uint64_t budget_bytes,
                                   viking_map **out)
{
    return place(placement, resident, budget_bytes, 0, out);
}

viking_status viking_placement_smallest(const viking_placement *placement, bool *resident, uint32_t ring_scale,
                                        viking_map **out)
{
    return place(placement, resident, 0, ring_scale, out);
}

// Which parameters a rank has in its arrays of master weights and moments, and where. Checkpoints speak of parameters
// by their number in the flat order (tensors.h); ranks keep them in arrays of their own:
//
//     unsharded   all n of them, {0, n, 0}; of these it saves a share, {first, count, first}: 1/R of them on R ranks
//     sharded     its slices (shards.h), one behind the other with padding between them: it keeps and saves the same
//
// so what one number of ranks has saved, any other can take.
#ifndef STATE_RANGES_H
#define STATE_RANGES_H

#include <stddef.h>

#include "check.h"
#include "shards.h"

// Parameters [first, first + count) of the flat order lie at [at, at + count) of this rank's arrays of master weights
// and moments.
typedef struct {
    size_t first, count, at;
} StateRange;

typedef struct {
    StateRange* range; // (num) in the order of `at`; none is empty, none overlaps another
    int num;
    size_t count; // parameters of all
} StateRanges;

// The arrays, in device memory.
typedef struct {
    float* master; // weights
    float* m;      // first moment
    float* v;      // second moment
} StateArrays;

static inline void state_ranges_free(StateRanges* ranges) {
    free(ranges->range);
    memset(ranges, 0, sizeof(*ranges));
}

// Add a range behind the others; an empty one is left out.
static inline void state_ranges_add(StateRanges* ranges, size_t first, size_t count, size_t at) {
    if (count == 0) { return; }
    int num = ranges->num;
    check(num == 0 || at >= ranges->range[num - 1].at + ranges->range[num - 1].count,
          "state ranges: one at %zu behind one that ends at %zu", at,
          ranges->range[num - 1].at + ranges->range[num - 1].count);
    if ((num & (num - 1)) == 0) { // full: room for 1, 2, 4, ...
        StateRange* grown = (StateRange*)realloc(ranges->range, (size_t)(num > 0 ? 2 * num : 1) * sizeof(StateRange));
        check(grown != NULL, "out of host memory for %d ranges of parameters", num);
        ranges->range = grown;
    }
    StateRange added = {first, count, at};
    ranges->range[ranges->num++] = added;
    ranges->count += count;
}

// All n parameters, in the flat order.
static inline StateRanges state_ranges_flat(size_t n) {
    StateRanges ranges = {NULL, 0, 0};
    state_ranges_add(&ranges, 0, n, 0);
    return ranges;
}

// The rank's share of n parameters that all ranks have in the flat order: as many as any other's, or one more.
static inline StateRanges state_ranges_share(size_t n, int rank, int num_ranks) {
    size_t r = (size_t)rank, ranks = (size_t)num_ranks, more = n % ranks;
    size_t first = n / ranks * r + (r < more ? r : more);
    StateRanges ranges_of_rank = {NULL, 0, 0};
    state_ranges_add(&ranges_of_rank, first, n / ranks + (r < more), first);
    return ranges_of_rank;
}

// The rank's slices in its shard, those that are not empty: bucket after bucket, in each the pieces as they lie there.
static inline StateRanges state_ranges_of_shard(const Shards* shards, int rank) {
    StateRanges ranges = {NULL, 0, 0};
    for (int b = 0; b < shards->num_buckets; b++) {
        const Bucket* bucket = &shards->bucket[b];
        for (int p = 0; p < bucket->num_pieces; p++) {
            const Piece* piece = &bucket->piece[p];
            SliceRange slice = piece_owned(piece, rank);
            state_ranges_add(&ranges, piece->offset + slice.begin, slice.end - slice.begin,
                             bucket->shard_at + piece->at);
        }
    }
    return ranges;
}

static inline StateRanges state_ranges_copy(const StateRanges* ranges) {
    StateRanges copy = {NULL, 0, 0};
    for (int i = 0; i < ranges->num; i++) {
        state_ranges_add(&copy, ranges->range[i].first, ranges->range[i].count, ranges->range[i].at);
    }
    return copy;
}

// Elements of the arrays from the first to the last of the ranges, padding between them included.
static inline size_t state_ranges_span(const StateRanges* ranges) {
    if (ranges->num == 0) { return 0; }
    const StateRange* last = &ranges->range[ranges->num - 1];
    return last->at + last->count - ranges->range[0].at;
}

// What of a range lies at [at, end) of the arrays; count 0: nothing.
static inline StateRange state_range_at(StateRange range, size_t at, size_t end) {
    size_t low = range.at > at ? range.at : at, high = range.at + range.count < end ? range.at + range.count : end;
    StateRange part = {0, 0, low};
    if (low < high) {
        part.first = range.first + (low - range.at);
        part.count = high - low;
    }
    return part;
}

// Parameters of the ranges that lie at [at, end) of the arrays.
static inline size_t state_ranges_count_at(const StateRanges* ranges, size_t at, size_t end) {
    size_t count = 0;
    for (int i = 0; i < ranges->num; i++) {
        count += state_range_at(ranges->range[i], at, end).count;
    }
    return count;
}

// For qsort: StateRange by their first parameter.
static inline int state_range_compare(const void* a, const void* b) {
    size_t x = ((const StateRange*)a)->first, y = ((const StateRange*)b)->first;
    return (x > y) - (x < y);
}

#endif

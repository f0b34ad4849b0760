// Rows of a batch grouped by token (counting sort), so that the embedding gradient can be summed in a fixed order
// without atomics: the host side of TokenIndex in floor.h.
#ifndef TOKEN_INDEX_H
#define TOKEN_INDEX_H

#include "check.h"

// Counters of token_index_build, one per id; made once.
typedef struct {
    int* start; // (V + 1)
    int V;
} TokenCounter;

static inline TokenCounter token_counter_create(int V) {
    TokenCounter counter = {(int*)malloc_or_die(((size_t)V + 1) * sizeof(int)), V};
    return counter;
}

static inline void token_counter_free(TokenCounter* counter) { free(counter->start); }

// Group the n tokens (each in [0, V), checked by the loader). Writes rows (n): row numbers ordered by token, ascending
// inside a token; bucket_token (up to n): distinct tokens, ascending; bucket_start (up to n + 1). Returns the number of
// buckets. O(n + V).
static inline int token_index_build(TokenCounter* counter, int* rows, int* bucket_token, int* bucket_start,
                                    const int* tokens, int n) {
    int* start = counter->start;
    memset(start, 0, ((size_t)counter->V + 1) * sizeof(int));
    for (int i = 0; i < n; i++) {
        start[tokens[i] + 1]++;
    }
    int num_buckets = 0;
    for (int v = 0; v < counter->V; v++) {
        if (start[v + 1] > 0) {
            bucket_token[num_buckets] = v;
            bucket_start[num_buckets++] = start[v];
        }
        start[v + 1] += start[v];
    }
    bucket_start[num_buckets] = n;
    for (int i = 0; i < n; i++) {
        rows[start[tokens[i]]++] = i;
    }
    return num_buckets;
}

#endif

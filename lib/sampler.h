// Drawing the next token from logits: temperature, then top-k, then the inverse of the cumulative distribution.
#ifndef SAMPLER_H
#define SAMPLER_H

#include <math.h>

#include "check.h"

// Logit of the k-th largest of V values (1 <= k <= V), by quickselect on a copy. O(V).
static inline float sampler_kth_largest(const float* logits, int V, int k) {
    float* x = (float*)malloc_or_die((size_t)V * sizeof(float));
    memcpy(x, logits, (size_t)V * sizeof(float));
    int low = 0, high = V - 1, wanted = k - 1; // place in descending order
    while (low < high) {
        float pivot = x[low + (high - low) / 2];
        int i = low, j = high;
        while (i <= j) {
            while (x[i] > pivot) {
                i++;
            }
            while (x[j] < pivot) {
                j--;
            }
            if (i <= j) {
                float swapped = x[i];
                x[i++] = x[j];
                x[j--] = swapped;
            }
        }
        if (wanted <= j) {
            high = j;
        } else if (wanted >= i) {
            low = i;
        } else {
            break; // between the halves: equal to the pivot
        }
    }
    float value = x[wanted];
    free(x);
    return value;
}

// A token in [0, V) drawn from softmax(logits / temperature) over the top_k largest logits (ties with the k-th are
// kept; 0 = all). temperature 0: the first largest logit. coin: uniform in [0, 1). NaN logits never win.
static inline int sample_token(const float* logits, int V, float temperature, int top_k, float coin) {
    check(V > 0, "sample_token: V = %d, want at least 1", V);
    int best = 0;
    for (int i = 1; i < V; i++) {
        if (logits[i] > logits[best] || logits[best] != logits[best]) { best = i; }
    }
    if (temperature == 0.0f || !isfinite(logits[best])) { return best; }
    float least = top_k > 0 && top_k < V ? sampler_kth_largest(logits, V, top_k) : -INFINITY;
    double sum = 0.0;
    for (int i = 0; i < V; i++) {
        if (logits[i] >= least) { sum += exp(((double)logits[i] - logits[best]) / temperature); }
    }
    double target = (double)coin * sum, cumulative = 0.0;
    for (int i = 0; i < V; i++) {
        if (logits[i] >= least) {
            cumulative += exp(((double)logits[i] - logits[best]) / temperature);
            if (cumulative > target) { return i; }
        }
    }
    return best; // rounding left the coin past the last token
}

#endif

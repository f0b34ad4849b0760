// sampler.h: the k-th largest against sorting, greedy, top-k support, and frequencies against the distribution.
#include "../../lib/rng.h"
#include "../../lib/sampler.h"
#include "unit.h"

static int descending(const void* a, const void* b) {
    float x = *(const float*)a, y = *(const float*)b;
    return x < y ? 1 : x > y ? -1 : 0;
}

static void test_kth_largest(void) {
    for (int trial = 0; trial < 200; trial++) {
        float x[61], sorted[61];
        int V = 1 + trial % 61;
        for (int i = 0; i < V; i++) { // every third trial has many ties
            float u = rng_uniform(7, (uint64_t)trial, (uint64_t)i);
            x[i] = sorted[i] = trial % 3 == 0 ? floorf(4.0f * u) : u;
        }
        qsort(sorted, (size_t)V, sizeof(float), descending);
        for (int k = 1; k <= V; k++) {
            float got = sampler_kth_largest(x, V, k);
            expect(got == sorted[k - 1], "V = %d, k = %d: %g, want %g", V, k, got, sorted[k - 1]);
        }
    }
}

static void test_greedy_and_nan(void) {
    float x[5] = {NAN, -3.0f, 2.0f, 2.0f, NAN};
    expect(sample_token(x, 5, 0.0f, 0, 0.9f) == 2, "greedy takes the first largest, got %d",
           sample_token(x, 5, 0.0f, 0, 0.9f));
    float one[1] = {4.0f};
    expect(sample_token(one, 1, 1.0f, 5, 0.5f) == 0, "a vocabulary of one");
}

static void test_frequencies(void) {
    float x[6] = {0.5f, -1.0f, 2.0f, 0.0f, 1.0f, -4.0f};
    int counts[6] = {0}, n = 200000, top = 3;
    for (int i = 0; i < n; i++) {
        counts[sample_token(x, 6, 0.8f, top, rng_uniform(3, 1, (uint64_t)i))]++;
    }
    double sum = exp(0.5 / 0.8) + exp(2.0 / 0.8) + exp(1.0 / 0.8);
    for (int i = 0; i < 6; i++) {
        double p = i == 0 || i == 2 || i == 4 ? exp(x[i] / 0.8) / sum : 0.0;
        double sigma = sqrt(p * (1 - p) / n); // of the observed frequency
        expect(fabs((double)counts[i] / n - p) <= 5.0 * sigma, "token %d: %d of %d, want share %.4f", i, counts[i], n, p);
    }
}

static void test_coin_ends(void) {
    float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    expect(sample_token(x, 4, 1.0f, 0, 0.0f) == 0, "coin 0 is the first token");
    expect(sample_token(x, 4, 1.0f, 0, 0x1.fffffep-1f) == 3, "the largest coin is the last token");
}

int main(void) {
    unit_run(test_kth_largest);
    unit_run(test_greedy_and_nan);
    unit_run(test_frequencies);
    unit_run(test_coin_ends);
    return unit_report();
}

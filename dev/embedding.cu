// Token and position embedding, forward and backward, at the sizes of d12, d48 and gpt3:c4096, with tokens drawn like
// words (Zipf), with a byte-sized vocabulary, and with one token only (the worst case of a sum by token).
//
//     bench-embedding
#include "../lib/embedding.cuh"
#include "../lib/token_index.h"

#include "bench.cuh"

enum { SEED_WTE = 1, SEED_WPE, SEED_DOUT, SEED_DWTE, SEED_DWPE, SEED_TOKENS };

typedef struct {
    bf16 *out, *wte, *wpe, *dout;
    float *dwte, *dwpe;
    int* tokens;
    TokenIndex index;
    int B, T, C;
} Args;

static void run_forward(Device* dev, const void* args_) {
    const Args* a = (const Args*)args_;
    embedding_forward(dev, a->out, a->tokens, a->wte, a->wpe, a->B, a->T, a->C);
}

static void run_backward(Device* dev, const void* args_) {
    const Args* a = (const Args*)args_;
    embedding_backward(dev, a->dwte, a->dwpe, a->dout, a->index, a->B, a->T, a->C);
}

static void* upload(Bench* b, const void* from, size_t bytes) {
    void* p = device_malloc(b->dev, bytes);
    device_copy_in(b->dev, p, from, bytes);
    device_sync(b->dev);
    return p;
}

// Rank r of V with probability about 1 / r: V^u for u uniform in [0, 1).
static int zipf_token(size_t i, int V) {
    double u = 0.5 + 0.5 * erf(bench_value(SEED_TOKENS, i) / sqrt(2.0));
    int token = (int)pow((double)V, u) - 1;
    return token < 0 ? 0 : token >= V ? V - 1 : token;
}

static void check_forward(Bench* b, const Args* a, const int* tokens) {
    float* got = (float*)malloc_or_die((size_t)a->C * sizeof(float));
    for (int s = 0; s < BENCH_SAMPLED_ROWS; s++) {
        int row = bench_sampled_row(s, a->B * a->T);
        bf16_to_host(b->dev, got, a->out + (size_t)row * a->C, (size_t)a->C);
        for (int c = 0; c < a->C; c++) {
            float want = bf16_round(bench_bf16_value(SEED_WTE, (size_t)tokens[row] * a->C + c) +
                                    bench_bf16_value(SEED_WPE, (size_t)(row % a->T) * a->C + c));
            bench_expect_near(b, "embedding_forward", (size_t)row * a->C + c, got[c], want, 0.0, 0.0);
        }
    }
    free(got);
}

// Rows of dwte (of the first, the last and other tokens of the batch, and of one that does not occur) and of dwpe.
static void check_backward(Bench* b, const Args* a, const int* tokens, int V) {
    int BT = a->B * a->T, C = a->C;
    float* got = (float*)malloc_or_die((size_t)C * sizeof(float));
    for (int s = 0; s < 2 * BENCH_SAMPLED_ROWS; s++) {
        int is_wpe = s >= BENCH_SAMPLED_ROWS;
        int at = is_wpe                        ? bench_sampled_row(s - BENCH_SAMPLED_ROWS, a->T)
                 : s == BENCH_SAMPLED_ROWS - 1 ? V - 1
                                               : tokens[bench_sampled_row(s, BT)];
        device_copy_out(b->dev, got, (is_wpe ? a->dwpe : a->dwte) + (size_t)at * C, (size_t)C * sizeof(float));
        for (int c = 0; c < C; c += 37) {
            double sum = bench_value(is_wpe ? SEED_DWPE : SEED_DWTE, (size_t)at * C + c), magnitude = 0.0;
            for (int row = 0; row < BT; row++) {
                if ((is_wpe ? row % a->T : tokens[row]) == at) {
                    double x = bench_bf16_value(SEED_DOUT, (size_t)row * C + c);
                    sum += x;
                    magnitude += fabs(x);
                }
            }
            bench_expect_near(b, is_wpe ? "embedding_backward dwpe" : "embedding_backward dwte", (size_t)at * C + c,
                              got[c], sum, 0x1p-21, 0x1p-21 * magnitude);
        }
    }
    free(got);
}

static void bench_one(Bench* b, const char* name, int B, int T, int C, int V, int kind) {
    int BT = B * T;
    int* tokens = (int*)malloc_or_die((size_t)BT * sizeof(int));
    for (int i = 0; i < BT; i++) {
        tokens[i] = kind == 0 ? zipf_token((size_t)i, V - 1) : 7;
    }
    int* rows = (int*)malloc_or_die((3 * (size_t)BT + 1) * sizeof(int));
    int *bucket_token = rows + BT, *bucket_start = rows + 2 * BT;
    TokenCounter counter = token_counter_create(V);
    int num_buckets = token_index_build(&counter, rows, bucket_token, bucket_start, tokens, BT);
    token_counter_free(&counter);
    Args a;
    size_t n = (size_t)BT * C;
    a.out = (bf16*)bench_poisoned(b, n * sizeof(bf16));
    a.wte = bench_bf16(b, (size_t)V * C, SEED_WTE);
    a.wpe = bench_bf16(b, (size_t)T * C, SEED_WPE);
    a.dout = bench_bf16(b, n, SEED_DOUT);
    a.dwte = bench_float(b, (size_t)V * C, SEED_DWTE);
    a.dwpe = bench_float(b, (size_t)T * C, SEED_DWPE);
    a.tokens = (int*)upload(b, tokens, (size_t)BT * sizeof(int));
    a.index.rows = (int*)upload(b, rows, (size_t)BT * sizeof(int));
    a.index.bucket_token = (int*)upload(b, bucket_token, (size_t)num_buckets * sizeof(int));
    a.index.bucket_start = (int*)upload(b, bucket_start, ((size_t)num_buckets + 1) * sizeof(int));
    a.index.num_buckets = num_buckets;
    a.B = B, a.T = T, a.C = C;
    run_forward(b->dev, &a);
    run_backward(b->dev, &a);
    check_forward(b, &a, tokens);
    check_backward(b, &a, tokens, V);
    char size[64];
    snprintf(size, sizeof(size), "%s %dx%dx%d", name, B, T, C);
    double touched = (double)num_buckets * C;
    if (kind == 0) { bench_report(b, "embedding_forward", size, run_forward, &a, 2.0 * (double)n + 2.0 * touched); }
    double bytes = 2.0 * (double)n + 8.0 * touched + 8.0 * T * C; // dout once, although both tables read it
    bench_report(b, "embedding_backward", size, run_backward, &a, bytes);
    void* pointers[] = {a.out,
                        a.wte,
                        a.wpe,
                        a.dout,
                        a.dwte,
                        a.dwpe,
                        a.tokens,
                        a.index.rows,
                        a.index.bucket_token,
                        a.index.bucket_start};
    for (size_t i = 0; i < sizeof(pointers) / sizeof(pointers[0]); i++) {
        device_release(b->dev, pointers[i]);
    }
    free(tokens);
    free(rows);
}

int main(void) {
    Bench b = bench_create(4096);
    bench_one(&b, "d12", 64, 1024, 768, 50304, 0);
    bench_one(&b, "d48", 16, 1024, 1600, 50304, 0);
    bench_one(&b, "c4096", 4, 2048, 4096, 50304, 0);
    bench_one(&b, "bytes", 64, 1024, 768, 384, 0);
    bench_one(&b, "one token", 64, 1024, 768, 384, 1);
    bench_one(&b, "odd", 3, 331, 104, 1000, 0);
    return bench_finish(&b);
}

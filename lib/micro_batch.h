// -b auto: which micro-batch. A step's tokens (-d) are part of the training recipe; how many sequences go through the
// GPU at a time is not, it only decides speed, memory and the order of sums. From the model, the chip and the free
// memory:
//
//     candidates   every B for which B * T * ranks divides the tokens of a step
//     seconds      of a step: FLOPs over peak plus bytes over bandwidth of all ops, divided by what training reaches
//                  of that, and for every op of every micro-step the time in which it does not fill the chip. What does
//                  not shrink with B (weights read, weight gradients read and written, launches) makes small B slow
//     choice       of those that fit, the smallest B that is within 1% of the fastest: no memory for nothing, and no
//                  other choice because something else takes a little memory
//
// The same command on the same machine chooses the same B, because nothing is timed (the chip must not be a measured
// one). The caller plans the memory (MicroBatch.bytes).
#ifndef MICRO_BATCH_H
#define MICRO_BATCH_H

#include "check.h"

#include "config.h"
#include "roofline.h"

enum { MAX_MICRO_BATCHES = 512 }; // more than a number of sequences that somebody trains on has divisors below 65,536

typedef struct {
    int B;           // sequences per rank and micro-step
    int micro_steps; // per optimizer step
    double seconds;  // predicted, of an optimizer step
    size_t bytes;    // planned; the caller's
} MicroBatch;

// Training reaches this share where micro-batches are large, and an op loses this many seconds at its start and end,
// whatever its size (dev/README.md has the times that these two stand for).
#define MICRO_BATCH_EFFICIENCY 0.7
#define MICRO_BATCH_OP_SECONDS 4e-6
#define MICRO_BATCH_TOLERANCE 0.01

// Predicted seconds of one optimizer step with micro-batches of B sequences; M of them.
static inline double micro_batch_seconds(const Chip* chip, const GptConfig* gpt, const TrainConfig* train, int B,
                                         int M) {
    TrainConfig with = *train;
    with.batch_size = B;
    with.grad_accum_steps = M;
    Roofline r = roofline_step(chip, gpt, &with);
    double seconds = r.bytes / chip->bytes_per_s;
    for (int i = 0; i < r.num_ops; i++) {
        seconds += r.ops[i].flops_fp8 / chip->fp8_flops + r.ops[i].flops_bf16 / chip->bf16_flops;
    }
    double ops = 24.0 * gpt->num_layers + 12.0; // per micro-step: 9 forward and 15 backward in a block
    return seconds / MICRO_BATCH_EFFICIENCY + M * ops * MICRO_BATCH_OP_SECONDS;
}

// The candidates, B ascending, with their seconds; bytes are 0. At most MAX_MICRO_BATCHES of them, the smallest ones.
// Returns how many. train->total_batch_tokens is a multiple of T * num_ranks (config_finish).
static inline int micro_batch_candidates(MicroBatch* out, const Chip* chip, const GptConfig* gpt,
                                         const TrainConfig* train) {
    int64_t T = train->seq_len, sequences = train->total_batch_tokens / (T * train->num_ranks);
    int n = 0;
    for (int64_t B = 1; B <= sequences && B <= CONFIG_MAX_BATCH && B * T <= CONFIG_MAX_MICRO_TOKENS; B++) {
        int can = sequences % B == 0 && sequences / B <= INT_MAX &&
                  (train->precision != PRECISION_FP8 || B * T % 16 == 0);
        if (!can || n == MAX_MICRO_BATCHES) { continue; }
        MicroBatch* m = &out[n++];
        m->B = (int)B;
        m->micro_steps = (int)(sequences / B);
        m->seconds = micro_batch_seconds(chip, gpt, train, m->B, m->micro_steps);
        m->bytes = 0;
    }
    return n;
}

// Index of the choice among n candidates with their bytes, or -1 when none fits into free_bytes.
static inline int micro_batch_choose(const MicroBatch* candidates, int n, size_t free_bytes) {
    double fastest = INFINITY;
    for (int i = 0; i < n; i++) {
        if (candidates[i].bytes <= free_bytes) { fastest = fmin(fastest, candidates[i].seconds); }
    }
    for (int i = 0; i < n; i++) {
        if (candidates[i].bytes <= free_bytes && candidates[i].seconds <= fastest * (1.0 + MICRO_BATCH_TOLERANCE)) {
            return i;
        }
    }
    return -1;
}

// One line: the choice and why. chosen -1: none fits, the smallest is tried.
static inline void micro_batch_print(FILE* out, const MicroBatch* candidates, int n, int chosen, size_t free_bytes) {
    const double GiB = 1.0 / (1 << 30);
    if (chosen < 0) {
        fprintf(out, "-b auto: nothing fits into %.2f GiB; trying the smallest, -b %d with %.2f GiB\n",
                (double)free_bytes * GiB, candidates[0].B, (double)candidates[0].bytes * GiB);
        return;
    }
    const MicroBatch* c = &candidates[chosen];
    int largest = chosen;
    for (int i = 0; i < n; i++) {
        if (candidates[i].bytes <= free_bytes && i > largest) { largest = i; }
    }
    fprintf(out, "-b auto: -b %d, %d micro-steps, %.2f of %.2f GiB; ", c->B, c->micro_steps, (double)c->bytes * GiB,
            (double)free_bytes * GiB);
    if (largest == chosen) {
        fprintf(out, "the largest that %s", chosen + 1 < n ? "fits" : "-d allows");
    } else {
        fprintf(out, "-b %d would fit, too, and should be only %.1f%% faster", candidates[largest].B,
                100.0 * (c->seconds / candidates[largest].seconds - 1.0));
    }
    fprintf(out, ". The same bits again: -b %d\n", c->B);
}

// All candidates, for --dry-run.
static inline void micro_batch_print_all(FILE* out, const MicroBatch* candidates, int n, size_t free_bytes) {
    double fastest = INFINITY;
    for (int i = 0; i < n; i++) {
        fastest = fmin(fastest, candidates[i].seconds);
    }
    fprintf(out, "    -b  micro-steps        GiB   time per step\n");
    for (int i = 0; i < n; i++) {
        const MicroBatch* c = &candidates[i];
        fprintf(out, "%6d %12d %10.2f %14.3fx%s\n", c->B, c->micro_steps, (double)c->bytes / (1 << 30),
                c->seconds / fastest, c->bytes <= free_bytes ? "" : "   does not fit");
    }
}

#endif

// Softmax cross-entropy with its gradient (in place, or in FP8 twice), and the loss alone, on the vocabularies of GPT-2
// and of bytes.
//
//     bench-classifier
#include "../lib/classifier.cuh"

#include "bench.cuh"

enum { SEED_LOGITS = 1 };
#define DLOSS 0x1p-16f

typedef struct {
    bf16* logits;
    float* losses;
    int* targets;
    int with_gradient, rows, V, Vp;
    E5m2Tensor dlogits;
} Args;

static void run(Device* dev, const void* args_) {
    const Args* a = (const Args*)args_;
    classifier(dev, a->dlogits, a->losses, a->logits, a->targets, DLOSS, a->with_gradient, a->rows, a->V, a->Vp);
}

// A row in FP64: loss and, in `want` (Vp), gradient.
static double want_row(double* want, const Args* a, int row, int target) {
    double largest = -INFINITY, sum = 0.0;
    for (int c = 0; c < a->V; c++) {
        want[c] = bench_bf16_value(SEED_LOGITS, (size_t)row * a->Vp + c);
        largest = fmax(largest, want[c]);
    }
    for (int c = 0; c < a->V; c++) {
        sum += exp(want[c] - largest);
    }
    double loss = log(sum) + largest - want[target];
    for (int c = 0; c < a->Vp; c++) {
        want[c] = c < a->V ? (exp(want[c] - largest) / sum - (c == target)) * DLOSS : 0.0;
    }
    return loss;
}

static void bench_one(Bench* b, const char* size, int rows, int V, int Vp, int with_gradient, int fp8) {
    size_t n = (size_t)rows * Vp;
    int* targets = (int*)malloc_or_die((size_t)rows * sizeof(int));
    for (int row = 0; row < rows; row++) {
        targets[row] = row == 0 ? V - 1 : row == rows - 1 ? 0 : (int)((size_t)row * 2654435761u % (size_t)V);
    }
    Args a = {bench_bf16(b, n, SEED_LOGITS),
              (float*)bench_poisoned(b, (size_t)rows * sizeof(float)),
              (int*)device_malloc(b->dev, (size_t)rows * sizeof(int)),
              with_gradient,
              rows,
              V,
              Vp,
              {}};
    BenchForms forms = bench_forms_create(b, rows, Vp, 1, 0, fp8);
    a.dlogits.wide = a.logits;
    if (fp8) { // dloss becomes 2^15, as in the program
        ScaleSlot slot;
        scale_slot_init(&slot, E5M2_MAX, SLOT_STATIC);
        slot.scale = forms.scale = 0x1p15f / DLOSS;
        device_copy_in(b->dev, forms.slot, &slot, sizeof(slot));
        device_sync(b->dev);
        a.dlogits = bench_e5m2(forms);
    }
    device_copy_in(b->dev, a.targets, targets, (size_t)rows * sizeof(int));
    run(b->dev, &a);
    double* want = (double*)malloc_or_die((size_t)Vp * sizeof(double));
    float* got = (float*)malloc_or_die((size_t)Vp * sizeof(float));
    for (int s = 0; s < BENCH_SAMPLED_ROWS; s++) {
        int row = bench_sampled_row(s, rows);
        double want_loss = want_row(want, &a, row, targets[row]);
        float loss;
        device_copy_out(b->dev, &loss, a.losses + row, sizeof(loss));
        bench_expect_near(b, "classifier loss", row, loss, want_loss, 0x1p-20, 0x1p-19);
        if (fp8) { bench_check_row(b, "classifier, FP8", &forms, row, want, DLOSS); }
        bf16_to_host(b->dev, got, a.logits + (size_t)row * Vp, (size_t)Vp);
        for (int c = 0; !fp8 && c < Vp; c++) {
            double wanted = with_gradient ? want[c] : bench_bf16_value(SEED_LOGITS, (size_t)row * Vp + c);
            bench_expect_near(b, with_gradient ? "classifier dlogits" : "classifier logits", (size_t)row * Vp + c,
                              got[c], wanted, with_gradient ? 0x1p-8 + 0x1p-18 : 0.0, 0.0);
        }
    }
    bench_check_forms(b, "classifier, FP8", &forms);
    // timed on its own output: the work does not depend on the values
    bench_report(b, fp8 ? "classifier, FP8 twice" : with_gradient ? "classifier" : "classifier, loss only", size, run,
                 &a, (with_gradient ? 4.0 : 2.0) * (double)n);
    bench_forms_free(b, forms);
    device_release(b->dev, a.logits);
    device_release(b->dev, a.losses);
    device_release(b->dev, a.targets);
    free(targets);
    free(want);
    free(got);
}

int main(void) {
    Bench b = bench_create(1024);
    for (int with_gradient = 1; with_gradient >= 0; with_gradient--) {
        bench_one(&b, "GPT-2 8192 x 50304", 8192, 50257, 50304, with_gradient, 0);
        bench_one(&b, "bytes 65536 x 384", 65536, 257, 384, with_gradient, 0);
        bench_one(&b, "odd 1237 x 32008", 1237, 32001, 32008, with_gradient, 0);
        bench_one(&b, "uncached 512 x 131072", 512, 131071, 131072, with_gradient, 0);
    }
    bench_one(&b, "GPT-2 16384 x 50304", 16384, 50257, 50304, 1, 1);
    bench_one(&b, "bytes 16384 x 384", 16384, 257, 384, 1, 1);
    bench_one(&b, "odd 1232 x 32016", 1232, 32001, 32016, 1, 1);
    return bench_finish(&b);
}

// BF16 or FP32 -> FP8 in both layouts: quantize_forward (attention output), quantize_backward (its gradient, with the
// qkv bias gradient) and quantize_weight, at the sizes of d12, d48 and gpt3:c4096.
//
//     bench-quantize
#include "../lib/quantize.cuh"

#include "bench.cuh"

enum { SEED_X = 1, SEED_DBIAS = 2 };

typedef struct {
    BenchForms forms;
    bf16* x;
    float* master;
    float* dbias;
    int rows, cols;
} Args;

static void run_forward(Device* dev, const void* args_) {
    const Args* args = (const Args*)args_;
    E4m3Tensor y = bench_e4m3(args->forms);
    y.wide = args->x;
    quantize_forward(dev, y, args->rows, args->cols);
}

static void run_backward(Device* dev, const void* args_) {
    const Args* args = (const Args*)args_;
    E5m2Tensor y = bench_e5m2(args->forms);
    y.wide = args->x;
    quantize_backward(dev, y, args->dbias, args->rows, args->cols);
}

static void run_weight(Device* dev, const void* args_) {
    const Args* args = (const Args*)args_;
    quantize_weight(dev, bench_e4m3(args->forms), args->master, args->rows, args->cols);
}

// Sampled rows, both layouts everywhere, some columns of dbias; then the time.
static void bench_one(Bench* b, const char* op, const char* size, BenchRun run, int rows, int cols, double bytes) {
    int is_backward = run == run_backward, is_weight = run == run_weight;
    size_t n = (size_t)rows * cols;
    Args args = {bench_forms_create(b, rows, cols, is_backward, 0, 1), NULL, NULL, NULL, rows, cols};
    if (is_weight) {
        args.master = bench_float(b, n, SEED_X);
    } else {
        args.x = bench_bf16(b, n, SEED_X);
    }
    if (is_backward) { args.dbias = bench_float(b, (size_t)cols, SEED_DBIAS); }
    run(b->dev, &args);
    double* want = (double*)malloc_or_die((size_t)cols * sizeof(double));
    double largest = 0.0;
    for (int s = 0; s < BENCH_SAMPLED_ROWS; s++) {
        int row = bench_sampled_row(s, rows);
        for (int c = 0; c < cols; c++) {
            size_t i = (size_t)row * cols + c;
            want[c] = is_weight ? bench_value(SEED_X, i) : bench_bf16_value(SEED_X, i);
            largest = fmax(largest, fabs(want[c]));
        }
        bench_check_row(b, op, &args.forms, row, want, 0.0);
    }
    bench_check_forms(b, op, &args.forms);
    if (!is_weight) { bench_check_amax(b, op, &args.forms, largest, 3.5); }
    for (int s = 0; is_backward && s < BENCH_SAMPLED_ROWS; s++) {
        int c = bench_sampled_row(s, cols);
        double sum = bench_value(SEED_DBIAS, c), magnitude = 0.0;
        for (int row = 0; row < rows; row++) {
            double x = bench_bf16_value(SEED_X, (size_t)row * cols + c);
            sum += x;
            magnitude += fabs(x);
        }
        float got;
        device_copy_out(b->dev, &got, args.dbias + c, sizeof(got));
        bench_expect_near(b, "quantize_backward dbias", c, got, sum, 0x1p-22, 0x1p-22 * magnitude);
    }
    bench_report(b, op, size, run, &args, bytes * (double)n);
    free(want);
    bench_forms_free(b, args.forms);
    void* pointers[] = {args.x, args.master, args.dbias};
    for (int i = 0; i < 3; i++) {
        if (pointers[i] != NULL) { device_release(b->dev, pointers[i]); }
    }
}

int main(void) {
    Bench b = bench_create(4 * 4096);
    for (int i = 0; i < BENCH_NUM_SIZES; i++) {
        int rows = bench_sizes[i].rows, C = bench_sizes[i].C;
        char size[64];
        snprintf(size, sizeof(size), "%s %d x %d", bench_sizes[i].name, rows, C);
        bench_one(&b, "quantize_forward", size, run_forward, rows, C, 4.0);
        snprintf(size, sizeof(size), "%s %d x %d", bench_sizes[i].name, rows, 3 * C);
        bench_one(&b, "quantize_backward", size, run_backward, rows, 3 * C, 4.0);
        snprintf(size, sizeof(size), "%s %d x %d", bench_sizes[i].name, 4 * C, C);
        bench_one(&b, "quantize_weight", size, run_weight, 4 * C, C, 6.0);
    }
    return bench_finish(&b);
}

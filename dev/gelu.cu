// GELU with the fc bias, forward and backward (with the bias gradient), FP8 in both layouts and BF16, at the sizes of
// d12, d48 and gpt3:c4096.
//
//     bench-gelu
#include "../lib/gelu.cuh"

#include "bench.cuh"

enum { SEED_X = 1, SEED_BIAS = 2, SEED_DY = 3, SEED_DBIAS = 4 };

typedef struct {
    BenchForms forms;
    bf16 *x, *dy, *bias;
    float* dbias;
    int rows, C;
} Args;

static void run_forward(Device* dev, const void* args_) {
    const Args* args = (const Args*)args_;
    gelu_forward(dev, bench_e4m3(args->forms), args->x, args->bias, args->rows, args->C);
}

static void run_backward(Device* dev, const void* args_) {
    const Args* args = (const Args*)args_;
    gelu_backward(dev, bench_e5m2(args->forms), args->dbias, args->dy, args->x, args->bias, args->rows, args->C);
}

static double gelu_of(double u) {
    return 0.5 * u * (1.0 + tanh(sqrt(2.0 / M_PI) * (u + 0.044715 * u * u * u)));
}

static double gelu_slope_of(double u) {
    double t = tanh(sqrt(2.0 / M_PI) * (u + 0.044715 * u * u * u));
    return 0.5 * (1.0 + t) + 0.5 * u * (1.0 - t * t) * sqrt(2.0 / M_PI) * (1.0 + 3.0 * 0.044715 * u * u);
}

static double want_of(int is_backward, size_t i, int c) {
    double u = (double)(bench_bf16_value(SEED_X, i) + bench_bf16_value(SEED_BIAS, c));
    return is_backward ? bench_bf16_value(SEED_DY, i) * gelu_slope_of(u) : gelu_of(u);
}

static void bench_one(Bench* b, const char* op, const char* size, BenchRun run, int rows, int C, int fp8) {
    int is_backward = run == run_backward;
    size_t n = (size_t)rows * C;
    Args args = {bench_forms_create(b, rows, C, is_backward, !fp8, fp8),
                 bench_bf16(b, n, SEED_X),
                 NULL,
                 bench_bf16(b, (size_t)C, SEED_BIAS),
                 NULL,
                 rows,
                 C};
    if (is_backward) {
        args.dy = bench_bf16(b, n, SEED_DY);
        args.dbias = bench_float(b, (size_t)C, SEED_DBIAS);
    }
    run(b->dev, &args);
    double* want = (double*)malloc_or_die((size_t)C * sizeof(double));
    double largest = 0.0;
    for (int s = 0; s < BENCH_SAMPLED_ROWS; s++) {
        int row = bench_sampled_row(s, rows);
        for (int c = 0; c < C; c++) {
            want[c] = want_of(is_backward, (size_t)row * C + c, c);
            largest = fmax(largest, fabs(want[c]));
        }
        bench_check_row(b, op, &args.forms, row, want, 4.0);
    }
    bench_check_forms(b, op, &args.forms);
    if (fp8) { bench_check_amax(b, op, &args.forms, largest, 8.0); }
    for (int s = 0; is_backward && s < BENCH_SAMPLED_ROWS; s++) {
        int c = bench_sampled_row(s, C);
        double sum = bench_value(SEED_DBIAS, c), magnitude = 0.0;
        for (int row = 0; row < rows; row++) {
            double x = want_of(1, (size_t)row * C + c, c);
            sum += x;
            magnitude += fabs(x);
        }
        float got;
        device_copy_out(b->dev, &got, args.dbias + c, sizeof(got));
        bench_expect_near(b, "gelu_backward dbias", c, got, sum, 0x1p-19, 0x1p-21 * magnitude);
    }
    bench_report(b, op, size, run, &args, (is_backward ? 6.0 : 4.0) * (double)n);
    free(want);
    bench_forms_free(b, args.forms);
    device_release(b->dev, args.x);
    device_release(b->dev, args.bias);
    if (is_backward) {
        device_release(b->dev, args.dy);
        device_release(b->dev, args.dbias);
    }
}

int main(void) {
    Bench b = bench_create(4 * 4096);
    for (int i = 0; i < BENCH_NUM_SIZES; i++) {
        int rows = bench_sizes[i].rows, C = 4 * bench_sizes[i].C;
        char size[64];
        snprintf(size, sizeof(size), "%s %d x %d", bench_sizes[i].name, rows, C);
        bench_one(&b, "gelu_forward fp8", size, run_forward, rows, C, 1);
        bench_one(&b, "gelu_backward fp8", size, run_backward, rows, C, 1);
        bench_one(&b, "gelu_forward bf16", size, run_forward, rows, C, 0);
        bench_one(&b, "gelu_backward bf16", size, run_backward, rows, C, 0);
    }
    return bench_finish(&b);
}

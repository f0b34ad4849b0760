// Residual add + LayerNorm, forward and backward, FP8 in both layouts and BF16, at the sizes of d12, d48 and
// gpt3:c4096.
//
//     bench-layernorm
#include "../lib/layernorm.cuh"

#include "bench.cuh"

enum { SEED_IN = 1, SEED_BRANCH, SEED_BRANCH_BIAS, SEED_WEIGHT, SEED_BIAS, SEED_DY, SEED_DRESIDUAL, SEED_SUMS };

typedef struct {
    BenchForms y, dx;
    bf16 *in, *branch, *sum, *branch_bias, *weight, *bias, *dy, *dresidual;
    LayerNormStats stats;
    float* sums[3]; // dweight, dbias, dbranch_bias
    int rows, C;
} Args;

static void run_forward(Device* dev, const void* args_) {
    const Args* a = (const Args*)args_;
    ResidualAdd add = {a->sum, a->in, a->branch, a->branch_bias};
    layernorm_forward(dev, bench_e4m3(a->y), a->stats, add, a->weight, a->bias, a->rows, a->C);
}

static void run_backward(Device* dev, const void* args_) {
    const Args* a = (const Args*)args_;
    LayerNormBackward backward = {bench_e5m2(a->dx), a->sums[0], a->sums[1], a->sums[2], a->dy, a->dresidual, a->sum,
                                  a->stats,          a->weight,  a->rows,    a->C};
    layernorm_backward(dev, backward);
}

// x of the LayerNorm, one element, as stored
static double x_of(size_t i, int c) {
    float branch = bench_bf16_value(SEED_BRANCH, i) + bench_bf16_value(SEED_BRANCH_BIAS, c);
    return bf16_round(bench_bf16_value(SEED_IN, i) + branch);
}

// One row in FP64: y, dx and the statistics.
static void want_row(double* y, double* dx, double* mean_out, double* rstd_out, int row, int C) {
    double mean = 0.0, variance = 0.0, mean_g = 0.0, mean_gn = 0.0;
    for (int c = 0; c < C; c++) {
        mean += x_of((size_t)row * C + c, c) / C;
    }
    for (int c = 0; c < C; c++) {
        variance += pow(x_of((size_t)row * C + c, c) - mean, 2.0) / C;
    }
    double rstd = 1.0 / sqrt(variance + 1e-5);
    for (int c = 0; c < C; c++) {
        size_t i = (size_t)row * C + c;
        double n = (x_of(i, c) - mean) * rstd, w = bench_bf16_value(SEED_WEIGHT, c);
        y[c] = n * w + bench_bf16_value(SEED_BIAS, c);
        mean_g += w * bench_bf16_value(SEED_DY, i) / C;
        mean_gn += w * bench_bf16_value(SEED_DY, i) * n / C;
    }
    for (int c = 0; c < C; c++) {
        size_t i = (size_t)row * C + c;
        double n = (x_of(i, c) - mean) * rstd, w = bench_bf16_value(SEED_WEIGHT, c);
        dx[c] = bench_bf16_value(SEED_DRESIDUAL, i) + rstd * (w * bench_bf16_value(SEED_DY, i) - mean_g - n * mean_gn);
    }
    *mean_out = mean;
    *rstd_out = rstd;
}

static void check_columns(Bench* b, const Args* a) {
    size_t rows = (size_t)a->rows, C = (size_t)a->C;
    float* mean = (float*)malloc_or_die(2 * rows * sizeof(float));
    float* rstd = mean + rows;
    uint16_t* dx = (uint16_t*)malloc_or_die(rows * sizeof(uint16_t));
    device_copy_out(b->dev, mean, a->stats.mean, rows * sizeof(float));
    device_copy_out(b->dev, rstd, a->stats.rstd, rows * sizeof(float));
    const char* names[3] = {"layernorm_backward dweight", "layernorm_backward dbias",
                            "layernorm_backward dbranch_bias"};
    for (int s = 0; s < BENCH_SAMPLED_ROWS; s++) {
        int c = bench_sampled_row(s, a->C);
        double sum[3], magnitude[3] = {0.0, 0.0, 0.0};
        bench_copy_strided(b, dx, a->dx.wide + c, sizeof(uint16_t), C * sizeof(bf16), rows);
        for (int k = 0; k < 3; k++) {
            sum[k] = bench_value(SEED_SUMS + k, c);
        }
        for (size_t row = 0; row < rows; row++) {
            size_t i = row * C + c;
            double dy = bench_bf16_value(SEED_DY, i), n = (x_of(i, c) - mean[row]) * rstd[row];
            double terms[3] = {dy * n, dy, bits_float((uint32_t)dx[row] << 16)};
            for (int k = 0; k < 3; k++) {
                sum[k] += terms[k];
                magnitude[k] += fabs(terms[k]);
            }
        }
        for (int k = 0; k < 3; k++) {
            float got;
            device_copy_out(b->dev, &got, a->sums[k] + c, sizeof(got));
            bench_expect_near(b, names[k], c, got, sum[k], 0x1p-20, 0x1p-20 * magnitude[k]);
        }
    }
    free(mean);
    free(dx);
}

static void bench_one(Bench* b, const char* size, int rows, int C, int fp8) {
    size_t n = (size_t)rows * C;
    Args a;
    a.y = bench_forms_create(b, rows, C, 0, !fp8, fp8);
    a.dx = bench_forms_create(b, rows, C, 1, 1, fp8);
    a.in = bench_bf16(b, n, SEED_IN);
    a.branch = bench_bf16(b, n, SEED_BRANCH);
    a.sum = (bf16*)bench_poisoned(b, n * sizeof(bf16));
    a.branch_bias = bench_bf16(b, (size_t)C, SEED_BRANCH_BIAS);
    a.weight = bench_bf16(b, (size_t)C, SEED_WEIGHT);
    a.bias = bench_bf16(b, (size_t)C, SEED_BIAS);
    a.dy = bench_bf16(b, n, SEED_DY);
    a.dresidual = bench_bf16(b, n, SEED_DRESIDUAL);
    a.stats.mean = (float*)bench_poisoned(b, (size_t)rows * sizeof(float));
    a.stats.rstd = (float*)bench_poisoned(b, (size_t)rows * sizeof(float));
    for (int k = 0; k < 3; k++) {
        a.sums[k] = bench_float(b, (size_t)C, SEED_SUMS + k);
    }
    a.rows = rows;
    a.C = C;
    const char* forward = fp8 ? "layernorm_forward fp8" : "layernorm_forward bf16";
    const char* backward = fp8 ? "layernorm_backward fp8" : "layernorm_backward bf16";
    run_forward(b->dev, &a);
    run_backward(b->dev, &a);
    double* y = (double*)malloc_or_die(2 * (size_t)C * sizeof(double));
    double *dx = y + C, mean, rstd, largest_y = 0.0, largest_dx = 0.0;
    float* sum = (float*)malloc_or_die((size_t)C * sizeof(float));
    for (int s = 0; s < BENCH_SAMPLED_ROWS; s++) {
        int row = bench_sampled_row(s, rows);
        float got;
        want_row(y, dx, &mean, &rstd, row, C);
        bench_check_row(b, forward, &a.y, row, y, 16.0);
        bench_check_row(b, backward, &a.dx, row, dx, 16.0);
        bf16_to_host(b->dev, sum, a.sum + (size_t)row * C, (size_t)C);
        for (int c = 0; c < C; c++) { // additions only: exact
            bench_expect_near(b, "layernorm_forward sum", (size_t)row * C + c, sum[c], x_of((size_t)row * C + c, c),
                              0.0, 0.0);
            largest_y = fmax(largest_y, fabs(y[c]));
            largest_dx = fmax(largest_dx, fabs(dx[c]));
        }
        device_copy_out(b->dev, &got, a.stats.mean + row, sizeof(got));
        bench_expect_near(b, "layernorm_forward mean", row, got, mean, 0x1p-20, 0x1p-20);
        device_copy_out(b->dev, &got, a.stats.rstd + row, sizeof(got));
        bench_expect_near(b, "layernorm_forward rstd", row, got, rstd, 0x1p-20, 0.0);
    }
    bench_check_forms(b, forward, &a.y);
    bench_check_forms(b, backward, &a.dx);
    if (fp8) {
        bench_check_amax(b, forward, &a.y, largest_y, 32.0);
        bench_check_amax(b, backward, &a.dx, largest_dx, 64.0);
    }
    check_columns(b, &a);
    bench_report(b, forward, size, run_forward, &a, 8.0 * (double)n);
    bench_report(b, backward, size, run_backward, &a, (fp8 ? 10.0 : 8.0) * (double)n);
    free(y);
    free(sum);
    bench_forms_free(b, a.y);
    bench_forms_free(b, a.dx);
    void* pointers[] = {a.in,        a.branch,     a.sum,        a.branch_bias, a.weight,  a.bias,   a.dy,
                        a.dresidual, a.stats.mean, a.stats.rstd, a.sums[0],     a.sums[1], a.sums[2]};
    for (size_t i = 0; i < sizeof(pointers) / sizeof(pointers[0]); i++) {
        device_release(b->dev, pointers[i]);
    }
}

int main(void) {
    Bench b = bench_create(8192);
    for (int fp8 = 1; fp8 >= 0; fp8--) {
        for (int i = 0; i < BENCH_NUM_SIZES; i++) {
            char size[64];
            snprintf(size, sizeof(size), "%s %d x %d", bench_sizes[i].name, bench_sizes[i].rows, bench_sizes[i].C);
            bench_one(&b, size, bench_sizes[i].rows, bench_sizes[i].C, fp8);
        }
    }
    bench_one(&b, "narrow 4096 x 64", 4096, 64, 1);
    bench_one(&b, "any rows 1237 x 776", 1237, 776, 0);
    bench_one(&b, "wide 1024 x 8192", 1024, 8192, 1);
    return bench_finish(&b);
}

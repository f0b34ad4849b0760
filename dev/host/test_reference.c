// The CPU floor of ops against FP64 models of themselves: lib/reference.h, lib/device_cpu.h.
//
// Every model below is written from the formula, in double, with plain loops; backward models are themselves held
// against central differences of the forward models. Inputs are BF16 values, so that both sides read the same numbers.
//   FP32 mode   want(relative to the tensor's largest value) within a few times 2^-24 times the length of the sums
//   BF16 mode   one rounding: half an ulp (2^-8 of the value) on top of the FP32 error
//   FP8         the very byte of the codec, up to the FP32 error of what went into it
// Outputs are poisoned with NaN bytes first; shapes are odd and prime where the op takes them.
#define CPU_FLOOR
#include "../../lib/reference.h"

#include "unit.h"

// ---------------------------------------------------------------------------------------------------------------------
// tools

static const ScaleRecipe test_recipe = {16, AMAX_MAX, 0, 1.0f};

static uint32_t test_random_state = 1;

static double random_uniform(void) { // [-1, 1)
    test_random_state = test_random_state * 1664525u + 1013904223u;
    return (double)(test_random_state >> 8) / 8388608.0 - 1.0;
}

// n BF16 values, roughly normal, times `spread`
static float* random_values(size_t n, double spread) {
    float* values = (float*)malloc_or_die(n * sizeof(float));
    for (size_t i = 0; i < n; i++) {
        double sum = random_uniform() + random_uniform() + random_uniform();
        values[i] = bf16_round((float)(sum * spread));
    }
    return values;
}

static void* poisoned(size_t bytes) { return memset(malloc_or_die(bytes), 0xFF, bytes); }
static float* poisoned_floats(size_t n) { return (float*)poisoned(n * sizeof(float)); }
static double* doubles(size_t n) { return (double*)calloc_or_die(n, sizeof(double)); }

static double* to_doubles(const float* from, size_t n) {
    double* to = doubles(n);
    for (size_t i = 0; i < n; i++) {
        to[i] = from[i];
    }
    return to;
}

static float* copy_of(const float* from, size_t n) {
    return (float*)memcpy(malloc_or_die(n * sizeof(float)), from, n * sizeof(float));
}

static Device* open_device(int fp32, int num_threads) {
    DeviceOptions options = {0, num_threads, fp32, ATTENTION_AUTO};
    Device* dev = device_create(options);
    size_t bytes = reduction_workspace_bytes(dev, 1024);
    device_set_workspace(dev, device_malloc(dev, bytes), bytes);
    return dev;
}

static void close_device(Device* dev) {
    device_release(dev, dev->workspace);
    device_free(dev);
}

static ScaleSlot new_slot(float scale, Fp8Format format) {
    ScaleSlot slot;
    scale_slot_init(&slot, format == FORMAT_E4M3 ? E4M3_MAX : E5M2_MAX, SLOT_DELAYED);
    slot.scale = scale;
    return slot;
}

static double largest_of(const double* x, size_t n) {
    double largest = 0.0;
    for (size_t i = 0; i < n; i++) {
        largest = fmax(largest, fabs(x[i]));
    }
    return largest;
}

// |got - want| <= tolerance * max |want| + half_ulp * |want| for every element; names the worst.
static void expect_near(const char* what, const float* got, const double* want, size_t n, double tolerance,
                        double half_ulp) {
    double largest = largest_of(want, n), worst = -1.0;
    size_t at = 0;
    for (size_t i = 0; i < n; i++) {
        double excess = fabs((double)got[i] - want[i]) - tolerance * largest - half_ulp * fabs(want[i]);
        if (!(excess <= worst)) { // a NaN is worse than anything
            worst = excess;
            at = i;
            if (isnan(excess)) { break; }
        }
    }
    expect(worst <= 0.0, "%s[%zu of %zu]: %.9g, want %.9g (largest %.3g, tolerance %.1e, half ulp %.1e)", what, at, n,
           (double)got[at], want[at], largest, tolerance, half_ulp);
}

#define HALF_ULP_BF16 (1.001 / 256.0) // 8 significant bits

static uint8_t encode(float x, Fp8Format format) {
    return format == FORMAT_E4M3 ? e4m3_from_float(x) : e5m2_from_float(x);
}

static float decode(uint8_t code, Fp8Format format) {
    return format == FORMAT_E4M3 ? float_from_e4m3(code) : float_from_e5m2(code);
}

// Every byte is the codec's of want * scale, where want may be off by tolerance * max |want|.
static void expect_codes(const char* what, const uint8_t* got, const double* want, size_t n, float scale,
                         double tolerance, Fp8Format format) {
    double slack = tolerance * largest_of(want, n);
    for (size_t i = 0; i < n; i++) {
        float low = decode(encode((float)((want[i] - slack) * scale), format), format);
        float high = decode(encode((float)((want[i] + slack) * scale), format), format);
        float value = decode(got[i], format);
        expect(low <= value && value <= high, "%s[%zu]: code 0x%02X = %g, want %g..%g", what, i, got[i], (double)value,
               (double)low, (double)high);
    }
}

static void expect_transposed(const char* what, const uint8_t* transposed, const uint8_t* data, int rows, int cols) {
    for (int r = 0; r < rows; r++) {
        for (int c = 0; c < cols; c++) {
            expect(transposed[(size_t)c * rows + r] == data[(size_t)r * cols + c],
                   "%s: (%d, %d) is 0x%02X, want 0x%02X", what, r, c, transposed[(size_t)c * rows + r],
                   data[(size_t)r * cols + c]);
        }
    }
}

static void expect_same_bits(const char* what, const void* a, const void* b, size_t bytes) {
    const uint8_t *x = (const uint8_t*)a, *y = (const uint8_t*)b;
    size_t i = 0;
    while (i < bytes && x[i] == y[i]) {
        i++;
    }
    expect(i == bytes, "%s: byte %zu of %zu differs: 0x%02X and 0x%02X", what, i, bytes, i < bytes ? x[i] : 0,
           i < bytes ? y[i] : 0);
}

// ---------------------------------------------------------------------------------------------------------------------
// elementary functions

static double gelu_model(double u) { return 0.5 * u * (1.0 + tanh(sqrt(2.0 / M_PI) * (u + 0.044715 * u * u * u))); }

static double gelu_slope_model(double u) {
    double c = sqrt(2.0 / M_PI), tanh_z = tanh(c * (u + 0.044715 * u * u * u));
    return 0.5 * (1.0 + tanh_z) + 0.5 * u * (1.0 - tanh_z * tanh_z) * c * (1.0 + 3.0 * 0.044715 * u * u);
}

static void test_elementary(void) {
    for (double x = -87.0; x <= 88.0; x += 0.00137) {
        float argument = (float)x;
        double want = exp((double)argument), error = fabs((double)exp_f32(argument) - want) / want;
        expect(error < 1.5e-7, "exp(%g): relative error %.2e", x, error);
    }
    expect(exp_f32(0.0f) == 1.0f, "exp(0) = %.9g", (double)exp_f32(0.0f));
    expect(exp_f32(-INFINITY) < 2e-38f && exp_f32(-INFINITY) > 0.0f, "exp(-Inf) = %g", (double)exp_f32(-INFINITY));
    expect(exp_f32(INFINITY) > 1e38f, "exp(Inf) = %g", (double)exp_f32(INFINITY));
    expect(isnan(exp_f32(NAN)) && isnan(exp_f32(bits_float(0x7FC00001u))), "exp(NaN) is not NaN");
    for (double u = -12.0; u <= 12.0; u += 0.000731) {
        float gelu, slope, argument = (float)u;
        gelu_and_slope(argument, &gelu, &slope);
        double error = fabs(gelu - gelu_model(argument)), slope_error = fabs(slope - gelu_slope_model(argument));
        // e^-2z turns the rounding of its argument, 2^-24 of 2z, into that relative error
        double tolerance = 1.5e-7 * (3.0 + 2.0 * 0.8 * (fabs(u) + 0.045 * fabs(u * u * u)));
        expect(error <= tolerance * fabs(gelu_model(argument)) + 1e-15, "gelu(%g): %.9g, error %.2e", u, (double)gelu,
               error);
        expect(slope_error < 1e-6, "gelu'(%g): %.9g, error %.2e", u, (double)slope, slope_error);
        double h = 1e-5, difference = (gelu_model(argument + h) - gelu_model(argument - h)) / (2 * h);
        expect(fabs(difference - gelu_slope_model(argument)) < 1e-8, "the model's gelu'(%g) is wrong", u);
    }
    float gelu, slope;
    gelu_and_slope(1e30f, &gelu, &slope);
    expect(gelu == 1e30f && slope == 1.0f, "gelu(1e30) = %g, slope %g", (double)gelu, (double)slope);
    gelu_and_slope(-1e30f, &gelu, &slope);
    expect(fabsf(gelu) < 1e-6f && fabsf(slope) < 1e-6f, "gelu(-1e30) = %g, slope %g", (double)gelu, (double)slope);
    gelu_and_slope(NAN, &gelu, &slope);
    expect(isnan(gelu) && isnan(slope), "gelu(NaN) = %g, slope %g", (double)gelu, (double)slope);
}

// ---------------------------------------------------------------------------------------------------------------------
// embedding

static void embedding_case(int fp32, int B, int T, int C, int V) {
    Device* dev = open_device(fp32, 2);
    int BT = B * T;
    size_t n = (size_t)BT * C;
    float *wte = random_values((size_t)V * C, 0.1), *wpe = random_values((size_t)T * C, 0.1);
    float *dout = random_values(n, 1.0), *out = poisoned_floats(n);
    int* tokens = (int*)malloc_or_die((size_t)BT * sizeof(int));
    for (int i = 0; i < BT; i++) {
        tokens[i] = i % 3 == 0 ? 1 : (i * 7) % V; // token 1 is frequent
    }
    embedding_forward(dev, out, tokens, wte, wpe, B, T, C);
    double *want = doubles(n), *dwte_want = doubles((size_t)V * C), *dwpe_want = doubles((size_t)T * C);
    float *dwte = random_values((size_t)V * C, 1.0), *dwpe = random_values((size_t)T * C, 1.0);
    for (int i = 0; i < V * C; i++) {
        dwte_want[i] = dwte[i];
    }
    for (int i = 0; i < T * C; i++) {
        dwpe_want[i] = dwpe[i];
    }
    for (int i = 0; i < BT; i++) {
        for (int c = 0; c < C; c++) {
            want[i * C + c] = (double)wte[tokens[i] * C + c] + wpe[i % T * C + c];
            dwte_want[tokens[i] * C + c] += dout[i * C + c];
            dwpe_want[i % T * C + c] += dout[i * C + c];
        }
    }
    expect_near("embedding out", out, want, n, 1e-7, fp32 ? 0 : HALF_ULP_BF16);
    int* rows = (int*)malloc_or_die((size_t)BT * sizeof(int));
    int* bucket_token = (int*)malloc_or_die((size_t)V * sizeof(int));
    int* bucket_start = (int*)malloc_or_die(((size_t)V + 1) * sizeof(int));
    TokenIndex index = {rows, bucket_token, bucket_start, 0};
    int filled = 0;
    for (int token = 0; token < V; token++) {
        int start = filled;
        for (int i = 0; i < BT; i++) {
            if (tokens[i] == token) { rows[filled++] = i; }
        }
        if (filled > start) {
            bucket_token[index.num_buckets] = token;
            bucket_start[index.num_buckets++] = start;
        }
    }
    bucket_start[index.num_buckets] = filled;
    embedding_backward(dev, dwte, dwpe, dout, index, B, T, C);
    expect_near("dwte", dwte, dwte_want, (size_t)V * C, 1e-6, 0);
    expect_near("dwpe", dwpe, dwpe_want, (size_t)T * C, 1e-6, 0);
    free(wte), free(wpe), free(dout), free(out), free(tokens), free(want), free(dwte_want), free(dwpe_want);
    free(dwte), free(dwpe), free(rows), free(bucket_token), free(bucket_start);
    close_device(dev);
}

static void test_embedding(void) {
    embedding_case(0, 3, 67, 19, 11);
    embedding_case(1, 5, 31, 64, 23);
    embedding_case(0, 11, 53, 320, 7);
}

// ---------------------------------------------------------------------------------------------------------------------
// layernorm

static void layernorm_model(double* y, const double* x, const double* weight, const double* bias, int rows, int C) {
    for (int r = 0; r < rows; r++) {
        const double* row = x + (size_t)r * C;
        double mean = 0, variance = 0;
        for (int c = 0; c < C; c++) {
            mean += row[c] / C;
        }
        for (int c = 0; c < C; c++) {
            variance += (row[c] - mean) * (row[c] - mean) / C;
        }
        for (int c = 0; c < C; c++) {
            y[(size_t)r * C + c] = (row[c] - mean) / sqrt(variance + 1e-5) * weight[c] + bias[c];
        }
    }
}

// Gradient of sum(dy * layernorm(x)) by the chain rule, element by element of the Jacobian's definition
static void layernorm_backward_model(double* dx, double* dweight, double* dbias, const double* dy, const double* x,
                                     const double* weight, int rows, int C) {
    for (int r = 0; r < rows; r++) {
        const double *row = x + (size_t)r * C, *dy_row = dy + (size_t)r * C;
        double mean = 0, variance = 0, dvariance = 0, dmean = 0;
        for (int c = 0; c < C; c++) {
            mean += row[c] / C;
        }
        for (int c = 0; c < C; c++) {
            variance += (row[c] - mean) * (row[c] - mean) / C;
        }
        double rstd = 1.0 / sqrt(variance + 1e-5);
        for (int c = 0; c < C; c++) {
            double dn = dy_row[c] * weight[c];
            dvariance += dn * (row[c] - mean) * -0.5 * rstd * rstd * rstd;
            dmean -= dn * rstd;
            dweight[c] += dy_row[c] * (row[c] - mean) * rstd;
            dbias[c] += dy_row[c];
        }
        for (int c = 0; c < C; c++) {
            dx[(size_t)r * C + c] += dy_row[c] * weight[c] * rstd + dvariance * 2.0 * (row[c] - mean) / C + dmean / C;
        }
    }
}

static void test_layernorm_model(void) {
    enum { ROWS = 3, C = 7 };
    double x[ROWS * C], dy[ROWS * C], y[ROWS * C], weight[C], bias[C], dx[ROWS * C] = {0}, dweight[C] = {0},
                                                                                 dbias[C] = {0};
    double* inputs[3] = {x, weight, bias};
    double* gradients[3] = {dx, dweight, dbias};
    int sizes[3] = {ROWS * C, C, C};
    for (int i = 0; i < ROWS * C; i++) {
        x[i] = random_uniform(), dy[i] = random_uniform();
    }
    for (int c = 0; c < C; c++) {
        weight[c] = random_uniform(), bias[c] = random_uniform();
    }
    layernorm_backward_model(dx, dweight, dbias, dy, x, weight, ROWS, C);
    for (int which = 0; which < 3; which++) {
        for (int i = 0; i < sizes[which]; i++) {
            double value = inputs[which][i], h = 1e-5, loss[2] = {0, 0};
            for (int side = 0; side < 2; side++) {
                inputs[which][i] = value + (side ? h : -h);
                layernorm_model(y, x, weight, bias, ROWS, C);
                for (int k = 0; k < ROWS * C; k++) {
                    loss[side] += y[k] * dy[k];
                }
            }
            inputs[which][i] = value;
            double difference = (loss[1] - loss[0]) / (2 * h);
            expect(fabs(difference - gradients[which][i]) < 1e-7, "input %d[%d]: %g, difference %g", which, i,
                   gradients[which][i], difference);
        }
    }
}

static void layernorm_case(int fp32, int rows, int C, int with_branch, int with_fp8) {
    Device* dev = open_device(fp32, 2);
    size_t n = (size_t)rows * C;
    float *in = random_values(n, 1.0), *branch = random_values(n, 1.0), *branch_bias = random_values((size_t)C, 1.0);
    float *weight = random_values((size_t)C, 1.0), *bias = random_values((size_t)C, 1.0), *sum = poisoned_floats(n);
    float *wide = poisoned_floats(n), *mean = poisoned_floats((size_t)rows), *rstd = poisoned_floats((size_t)rows);
    uint8_t *data = (uint8_t*)poisoned(n), *transposed = (uint8_t*)poisoned(n);
    in[0] += 3.0f, in[1] += 100.0f; // a row with a mean and an outlier
    ScaleSlot slot = new_slot(37.5f, FORMAT_E4M3);
    E4m3Tensor y = {wide, with_fp8 ? data : NULL, with_fp8 ? transposed : NULL, with_fp8 ? &slot : NULL, test_recipe, 0,
                    1};
    ResidualAdd add = {with_branch ? sum : NULL, in, with_branch ? branch : NULL, branch_bias};
    LayerNormStats stats = {mean, rstd};
    layernorm_forward(dev, y, stats, add, weight, bias, rows, C);
    const float* x = with_branch ? sum : in;
    for (size_t i = 0; with_branch && i < n; i++) {
        float exact = in[i] + (branch[i] + branch_bias[i % C]);
        expect(sum[i] == (fp32 ? exact : bf16_round(exact)), "sum[%zu] = %.9g", i, (double)sum[i]);
    }
    double *want = doubles(n), *x64 = to_doubles(x, n), *w64 = to_doubles(weight, (size_t)C),
           *b64 = to_doubles(bias, (size_t)C);
    layernorm_model(want, x64, w64, b64, rows, C);
    expect_near("layernorm y", wide, want, n, 1e-6, fp32 ? 0 : HALF_ULP_BF16);
    if (with_fp8) {
        expect_codes("layernorm y FP8", data, want, n, slot.scale, 1e-6, FORMAT_E4M3);
        expect_transposed("layernorm y^T", transposed, data, rows, C);
        expect(fabs(slot.amax - largest_of(want, n)) <= 1e-6 * slot.amax, "amax %g, want %g", (double)slot.amax,
               largest_of(want, n));
        expect(slot.scale == 37.5f && slot.descale == 1.0f / 37.5f, "scale %g, descale %g", (double)slot.scale,
               (double)slot.descale);
    }
    // backward; dresidual is dx.wide, as in the program, or dy is (nothing else arrives)
    for (int alias = 0; alias < 2; alias++) {
        float *dy = random_values(n, 1.0), *dresidual = random_values(n, 1.0);
        float *dweight = random_values((size_t)C, 1.0), *dbias = random_values((size_t)C, 1.0);
        float* dbranch_bias = random_values((size_t)C, 1.0);
        double *dx_want = doubles(n), *dweight_want = to_doubles(dweight, (size_t)C), *dy64 = to_doubles(dy, n);
        double *dbias_want = to_doubles(dbias, (size_t)C), *dbranch_want = to_doubles(dbranch_bias, (size_t)C);
        for (size_t i = 0; alias == 0 && i < n; i++) {
            dx_want[i] = dresidual[i];
        }
        layernorm_backward_model(dx_want, dweight_want, dbias_want, dy64, x64, w64, rows, C);
        ScaleSlot dslot = new_slot(1000.0f, FORMAT_E5M2);
        memset(data, 0xFF, n), memset(transposed, 0xFF, n);
        LayerNormBackward args = {{alias ? dy : dresidual, with_fp8 ? data : NULL, with_fp8 ? transposed : NULL,
                                   with_fp8 ? &dslot : NULL, test_recipe, 0, 1},
                                  dweight,
                                  dbias,
                                  dbranch_bias,
                                  dy,
                                  alias ? NULL : dresidual,
                                  x,
                                  stats,
                                  weight,
                                  rows,
                                  C};
        layernorm_backward(dev, args);
        float* dx = args.dx.wide;
        for (size_t i = 0; i < n; i++) {
            dbranch_want[i % C] += dx[i]; // as stored
        }
        expect_near("layernorm dx", dx, dx_want, n, 2e-6, fp32 ? 0 : HALF_ULP_BF16);
        expect_near("layernorm dweight", dweight, dweight_want, (size_t)C, 2e-6, 0);
        expect_near("layernorm dbias", dbias, dbias_want, (size_t)C, 2e-6, 0);
        expect_near("layernorm dbranch_bias", dbranch_bias, dbranch_want, (size_t)C, 2e-6, 0);
        if (with_fp8) {
            expect_codes("layernorm dx FP8", data, dx_want, n, dslot.scale, 2e-6, FORMAT_E5M2);
            expect_transposed("layernorm dx^T", transposed, data, rows, C);
        }
        free(dy), free(dresidual), free(dweight), free(dbias), free(dbranch_bias), free(dx_want), free(dweight_want);
        free(dy64), free(dbias_want), free(dbranch_want);
    }
    free(in), free(branch), free(branch_bias), free(weight), free(bias), free(sum), free(wide), free(mean), free(rstd);
    free(data), free(transposed), free(want), free(x64), free(w64), free(b64);
    close_device(dev);
}

static void test_layernorm(void) {
    layernorm_case(1, 37, 131, 0, 0);
    layernorm_case(1, 2111, 16, 1, 0); // several rows of chunks of rows
    layernorm_case(0, 67, 113, 1, 1);
    layernorm_case(0, 1, 48, 0, 1);
    layernorm_case(0, 96, 257, 1, 1);
}

// ---------------------------------------------------------------------------------------------------------------------
// linear layers

static float* decoded(const uint8_t* codes, size_t n, float descale, Fp8Format format) {
    float* values = (float*)malloc_or_die(n * sizeof(float));
    for (size_t i = 0; i < n; i++) {
        values[i] = decode(codes[i], format) * descale;
    }
    return values;
}

static uint8_t* random_codes(size_t n, Fp8Format format) {
    uint8_t* codes = (uint8_t*)malloc_or_die(n);
    for (size_t i = 0; i < n; i++) {
        codes[i] = encode((float)(random_uniform() * (format == FORMAT_E4M3 ? 448.0 : 57344.0)), format);
    }
    return codes;
}

static uint8_t* transposed_of(const uint8_t* data, int rows, int cols) {
    uint8_t* transposed = (uint8_t*)malloc_or_die((size_t)rows * cols);
    for (int r = 0; r < rows; r++) {
        for (int c = 0; c < cols; c++) {
            transposed[(size_t)c * rows + r] = data[(size_t)r * cols + c];
        }
    }
    return transposed;
}

// want (M, N) += sum over k of a[m * am + k * ak] * b[n * bn + k * bk]
static void product_model(double* want, const float* a, size_t am, size_t ak, const float* b, size_t bn, size_t bk,
                          int M, int N, int K) {
    for (int m = 0; m < M; m++) {
        for (int n = 0; n < N; n++) {
            double sum = 0;
            for (int k = 0; k < K; k++) {
                sum += (double)a[m * am + k * ak] * b[n * bn + k * bk];
            }
            want[(size_t)m * N + n] += sum;
        }
    }
}

static void matmul_case(int fp32, int fp8, int rows, int C, int OC) {
    Device* dev = open_device(fp32, 2);
    size_t nx = (size_t)rows * C, nw = (size_t)OC * C, ny = (size_t)rows * OC;
    ScaleSlot x_slot = new_slot(1, FORMAT_E4M3), w_slot = new_slot(1, FORMAT_E4M3), dy_slot = new_slot(1, FORMAT_E5M2);
    x_slot.descale = 0.013f, w_slot.descale = 0.0007f, dy_slot.descale = 3e-6f;
    E4m3Tensor x = {NULL, NULL, NULL, NULL, test_recipe, 0, 0}, w = x;
    E5m2Tensor dy = {NULL, NULL, NULL, NULL, test_recipe, 0, 0};
    float *x_values, *w_values, *dy_values, *bias = random_values((size_t)OC, 1.0);
    if (fp8) {
        x.data = random_codes(nx, FORMAT_E4M3), x.transposed = transposed_of(x.data, rows, C), x.slot = &x_slot;
        w.data = random_codes(nw, FORMAT_E4M3), w.transposed = transposed_of(w.data, OC, C), w.slot = &w_slot;
        dy.data = random_codes(ny, FORMAT_E5M2), dy.transposed = transposed_of(dy.data, rows, OC), dy.slot = &dy_slot;
        x_values = decoded(x.data, nx, x_slot.descale, FORMAT_E4M3);
        w_values = decoded(w.data, nw, w_slot.descale, FORMAT_E4M3);
        dy_values = decoded(dy.data, ny, dy_slot.descale, FORMAT_E5M2);
    } else {
        x.wide = x_values = random_values(nx, 1.0);
        w.wide = w_values = random_values(nw, 1.0);
        dy.wide = dy_values = random_values(ny, 1.0);
    }
    double half_ulp = fp32 ? 0 : HALF_ULP_BF16;
    for (int with_bias = 0; with_bias < 2; with_bias++) {
        double* want = doubles(ny);
        for (size_t i = 0; with_bias && i < ny; i++) {
            want[i] = bias[i % OC];
        }
        product_model(want, x_values, (size_t)C, 1, w_values, (size_t)C, 1, rows, OC, C);
        float* y = poisoned_floats(ny);
        matmul_forward(dev, y, x, w, with_bias ? bias : NULL, rows, C, OC);
        expect_near("matmul y", y, want, ny, 2e-6, half_ulp);
        free(want), free(y);
    }
    double* dx_want = doubles(nx);
    product_model(dx_want, dy_values, (size_t)OC, 1, w_values, 1, (size_t)C, rows, C, OC);
    float* dx = poisoned_floats(nx);
    matmul_dgrad(dev, dx, dy, w, rows, C, OC);
    expect_near("matmul dx", dx, dx_want, nx, 2e-6, half_ulp);
    float* dw = random_values(nw, 1.0);
    double* dw_want = to_doubles(dw, nw);
    product_model(dw_want, dy_values, 1, (size_t)OC, x_values, 1, (size_t)C, OC, C, rows);
    matmul_wgrad(dev, dw, dy, x, 1, rows, C, OC);
    expect_near("matmul dw", dw, dw_want, nw, 2e-6, 0);
    float* dw_alone = poisoned_floats(nw);
    matmul_wgrad(dev, dw_alone, dy, x, 0, rows, C, OC);
    memset(dw, 0, nw * sizeof(float));
    matmul_wgrad(dev, dw, dy, x, 1, rows, C, OC);
    for (size_t i = 0; i < nw; i++) { // as values: added to zero, -0 becomes 0
        expect(dw_alone[i] == dw[i], "dw[%zu] = %.9g, added to zero %.9g", i, (double)dw_alone[i], (double)dw[i]);
    }
    free(dw_alone);
    free(x.data), free(x.transposed), free(w.data), free(w.transposed), free(dy.data), free(dy.transposed);
    free(x_values), free(w_values), free(dy_values), free(bias), free(dx_want), free(dx), free(dw), free(dw_want);
    close_device(dev);
}

static void test_matmul(void) {
    matmul_case(1, 0, 37, 48, 80);
    matmul_case(0, 0, 1, 16, 16);
    matmul_case(0, 0, 101, 272, 16);
    matmul_case(1, 0, 307, 16, 1040); // more than one BLOCK_N, BLOCK_K and task
    matmul_case(0, 0, 19, 2064, 16); // more than one PANEL_K in each of the three
    matmul_case(1, 0, 17, 16, 2064);
    matmul_case(1, 0, 2081, 16, 16);
    matmul_case(0, 1, 48, 80, 112);
    matmul_case(0, 1, 304, 288, 48);
}

static void call_matmul_odd(void* arg) {
    Device* dev = (Device*)arg;
    E4m3Tensor x = {NULL, NULL, NULL, NULL, test_recipe, 0, 0};
    matmul_forward(dev, NULL, x, x, NULL, 16, 17, 32);
}

static void call_matmul_formless(void* arg) {
    Device* dev = (Device*)arg;
    E4m3Tensor x = {NULL, NULL, NULL, NULL, test_recipe, 0, 0};
    matmul_forward(dev, NULL, x, x, NULL, 16, 16, 32);
}

// ---------------------------------------------------------------------------------------------------------------------
// attention

// out (T, HS) and lse (T) of one head; q, k, v (T, HS)
static void attention_model(double* out, double* lse, const double* q, const double* k, const double* v, int T,
                            int HS) {
    double* p = doubles((size_t)T);
    for (int t = 0; t < T; t++) {
        double sum = 0;
        for (int j = 0; j <= t; j++) {
            p[j] = 0;
            for (int s = 0; s < HS; s++) {
                p[j] += q[t * HS + s] * k[j * HS + s] / sqrt(HS);
            }
            sum += exp(p[j]);
        }
        lse[t] = log(sum);
        for (int s = 0; s < HS; s++) {
            out[t * HS + s] = 0;
            for (int j = 0; j <= t; j++) {
                out[t * HS + s] += exp(p[j] - lse[t]) * v[j * HS + s];
            }
        }
    }
    free(p);
}

// Gradients of sum(dout * out), through the explicit softmax Jacobian
static void attention_backward_model(double* dq, double* dk, double* dv, const double* dout, const double* q,
                                     const double* k, const double* v, int T, int HS) {
    double *p = doubles((size_t)T), *dp = doubles((size_t)T);
    for (int t = 0; t < T; t++) {
        double sum = 0, inner = 0;
        for (int j = 0; j <= t; j++) {
            p[j] = dp[j] = 0;
            for (int s = 0; s < HS; s++) {
                p[j] += q[t * HS + s] * k[j * HS + s] / sqrt(HS);
                dp[j] += dout[t * HS + s] * v[j * HS + s];
            }
            p[j] = exp(p[j]);
            sum += p[j];
        }
        for (int j = 0; j <= t; j++) {
            p[j] /= sum;
            inner += p[j] * dp[j];
        }
        for (int j = 0; j <= t; j++) {
            double dscore = p[j] * (dp[j] - inner) / sqrt(HS);
            for (int s = 0; s < HS; s++) {
                dq[t * HS + s] += dscore * k[j * HS + s];
                dk[j * HS + s] += dscore * q[t * HS + s];
                dv[j * HS + s] += p[j] * dout[t * HS + s];
            }
        }
    }
    free(p), free(dp);
}

static void test_attention_model(void) {
    enum { T = 5, HS = 3, N = T * HS };
    double q[N], k[N], v[N], dout[N], out[N], lse[T], dq[N] = {0}, dk[N] = {0}, dv[N] = {0};
    double* inputs[3] = {q, k, v};
    double* gradients[3] = {dq, dk, dv};
    for (int i = 0; i < N; i++) {
        q[i] = random_uniform(), k[i] = random_uniform(), v[i] = random_uniform(), dout[i] = random_uniform();
    }
    attention_backward_model(dq, dk, dv, dout, q, k, v, T, HS);
    for (int which = 0; which < 3; which++) {
        for (int i = 0; i < N; i++) {
            double value = inputs[which][i], h = 1e-5, loss[2] = {0, 0};
            for (int side = 0; side < 2; side++) {
                inputs[which][i] = value + (side ? h : -h);
                attention_model(out, lse, q, k, v, T, HS);
                for (int e = 0; e < N; e++) {
                    loss[side] += out[e] * dout[e];
                }
            }
            inputs[which][i] = value;
            double difference = (loss[1] - loss[0]) / (2 * h);
            expect(fabs(difference - gradients[which][i]) < 1e-8, "input %d[%d]: %g, difference %g", which, i,
                   gradients[which][i], difference);
        }
    }
}

static void attention_case(int fp32, int B, int T, int NH, int HS, double spread) {
    Device* dev = open_device(fp32, 2);
    int C = NH * HS;
    size_t n = (size_t)B * T * C, head_n = (size_t)T * HS;
    float *qkv = random_values(3 * n, spread), *dout = random_values(n, 1.0), *out = poisoned_floats(n);
    float *lse = poisoned_floats((size_t)B * NH * T), *dqkv = poisoned_floats(3 * n);
    E4m3Tensor wide = {out, NULL, NULL, NULL, test_recipe, 0, 0};
    attention_forward(dev, wide, lse, qkv, B, T, NH, HS);
    E5m2Tensor wide_gradient = {dqkv, NULL, NULL, NULL, test_recipe, 0, 0};
    attention_backward(dev, wide_gradient, NULL, dout, out, lse, qkv, B, T, NH, HS);
    double *want = doubles(n), *lse_want = doubles((size_t)B * NH * T), *dqkv_want = doubles(3 * n);
    double* heads = doubles(8 * head_n); // q, k, v, dout, out, dq, dk, dv
    for (int b = 0; b < B; b++) {
        for (int h = 0; h < NH; h++) {
            double* part[8];
            for (int i = 0; i < 8; i++) {
                part[i] = heads + i * head_n;
            }
            memset(heads, 0, 8 * head_n * sizeof(double));
            for (int t = 0; t < T; t++) {
                for (int s = 0; s < HS; s++) {
                    size_t at = (size_t)(b * T + t) * 3 * C + h * HS + s;
                    for (int i = 0; i < 3; i++) {
                        part[i][t * HS + s] = qkv[at + (size_t)i * C];
                    }
                    part[3][t * HS + s] = dout[(size_t)(b * T + t) * C + h * HS + s];
                }
            }
            attention_model(part[4], lse_want + (size_t)(b * NH + h) * T, part[0], part[1], part[2], T, HS);
            attention_backward_model(part[5], part[6], part[7], part[3], part[0], part[1], part[2], T, HS);
            for (int t = 0; t < T; t++) {
                for (int s = 0; s < HS; s++) {
                    size_t at = (size_t)(b * T + t) * 3 * C + h * HS + s;
                    for (int i = 0; i < 3; i++) {
                        dqkv_want[at + (size_t)i * C] = part[5 + i][t * HS + s];
                    }
                    want[(size_t)(b * T + t) * C + h * HS + s] = part[4][t * HS + s];
                }
            }
        }
    }
    expect_near("attention out", out, want, n, 2e-6, fp32 ? 0 : HALF_ULP_BF16);
    expect_near("attention lse", lse, lse_want, (size_t)B * NH * T, 1e-6, 0);
    // D = sum dout * out is taken from the rounded out: 2^-8 per term at most, random signs, so less than 2^-8 of
    // |dqkv|
    expect_near("attention dqkv", dqkv, dqkv_want, 3 * n, fp32 ? 4e-6 : 1.0 / 256, fp32 ? 0 : HALF_ULP_BF16);
    free(qkv), free(dout), free(out), free(lse), free(dqkv), free(want), free(lse_want), free(dqkv_want), free(heads);
    close_device(dev);
}

static void test_attention(void) {
    attention_case(1, 2, 1, 1, 16, 1.0);
    attention_case(1, 2, 67, 3, 16, 1.0);
    attention_case(1, 1, 307, 1, 48, 2.0); // more than one BLOCK_K of keys, peaked softmax
    attention_case(0, 1, 96, 2, 32, 1.0);
    attention_case(0, 1, 53, 1, 128, 1.0);
}

static void call_attention_wide(void* arg) {
    E4m3Tensor none = {NULL, NULL, NULL, NULL, test_recipe, 0, 0};
    attention_forward((Device*)arg, none, NULL, NULL, 1, 4, 1, 144);
}

// ---------------------------------------------------------------------------------------------------------------------
// gelu and quantize

static void gelu_case(int fp32, int rows, int C) {
    Device* dev = open_device(fp32, 2);
    size_t n = (size_t)rows * C;
    float *x = random_values(n, 2.0), *bias = random_values((size_t)C, 1.0), *dy = random_values(n, 1.0);
    float *wide = poisoned_floats(n), *dbias = random_values((size_t)C, 1.0);
    uint8_t *data = (uint8_t*)poisoned(n), *transposed = (uint8_t*)poisoned(n);
    double *want = doubles(n), *dx_want = doubles(n), *dbias_want = to_doubles(dbias, (size_t)C);
    for (size_t i = 0; i < n; i++) {
        want[i] = gelu_model((double)x[i] + bias[i % C]);
        dx_want[i] = dy[i] * gelu_slope_model((double)x[i] + bias[i % C]);
        dbias_want[i % C] += dx_want[i];
    }
    ScaleSlot slot = new_slot(21.3f, FORMAT_E4M3), dslot = new_slot(700.0f, FORMAT_E5M2);
    E4m3Tensor y = {wide, data, transposed, &slot, test_recipe, 0, 1};
    gelu_forward(dev, y, x, bias, rows, C);
    expect_near("gelu y", wide, want, n, 3e-7, fp32 ? 0 : HALF_ULP_BF16);
    expect_codes("gelu y FP8", data, want, n, slot.scale, 3e-7, FORMAT_E4M3);
    expect_transposed("gelu y^T", transposed, data, rows, C);
    memset(data, 0xFF, n), memset(transposed, 0xFF, n);
    E5m2Tensor dx = {dy, data, transposed, &dslot, test_recipe, 0, 1}; // in place
    gelu_backward(dev, dx, dbias, dy, x, bias, rows, C);
    expect_near("gelu dx", dy, dx_want, n, 5e-7, fp32 ? 0 : HALF_ULP_BF16);
    expect_near("gelu dbias", dbias, dbias_want, (size_t)C, 2e-6, 0);
    expect_codes("gelu dx FP8", data, dx_want, n, dslot.scale, 5e-7, FORMAT_E5M2);
    expect_transposed("gelu dx^T", transposed, data, rows, C);
    free(x), free(bias), free(dy), free(wide), free(dbias), free(data), free(transposed);
    free(want), free(dx_want), free(dbias_want);
    close_device(dev);
}

static void test_gelu(void) {
    gelu_case(1, 41, 67);
    gelu_case(0, 33, 128);
    gelu_case(0, 2053, 17);
}

static void quantize_case(int rows, int cols, int with_data, int with_transposed) {
    Device* dev = open_device(0, 2);
    size_t n = (size_t)rows * cols;
    float *x = random_values(n, 3.0), *before = copy_of(x, n), *dbias = random_values((size_t)cols, 1.0);
    double *x64 = to_doubles(x, n), *dbias_want = to_doubles(dbias, (size_t)cols);
    uint8_t *data = (uint8_t*)poisoned(n), *transposed = (uint8_t*)poisoned(n), *want = (uint8_t*)malloc_or_die(n);
    ScaleSlot slot = new_slot(19.0f, FORMAT_E4M3), dslot = new_slot(3333.0f, FORMAT_E5M2);
    E4m3Tensor y = {x, with_data ? data : NULL, with_transposed ? transposed : NULL, &slot, test_recipe, 0, 1};
    quantize_forward(dev, y, rows, cols);
    for (size_t i = 0; i < n; i++) {
        want[i] = e4m3_from_float(x[i] * 19.0f);
        dbias_want[i % cols] += x[i];
    }
    if (with_data) { expect_same_bits("quantize_forward", data, want, n); }
    if (with_transposed) { expect_transposed("quantize_forward^T", transposed, want, rows, cols); }
    if (!with_data) { expect(data[0] == 0xFF && data[n - 1] == 0xFF, "a form nobody wanted was written"); }
    expect(slot.amax == (with_data || with_transposed ? (float)largest_of(x64, n) : 0.0f), "amax %g",
           (double)slot.amax);
    E5m2Tensor dy = {x, with_data ? data : NULL, with_transposed ? transposed : NULL, &dslot, test_recipe, 0, 1};
    quantize_backward(dev, dy, dbias, rows, cols);
    for (size_t i = 0; i < n; i++) {
        want[i] = e5m2_from_float(x[i] * 3333.0f);
    }
    if (with_data) { expect_same_bits("quantize_backward", data, want, n); }
    if (with_transposed) { expect_transposed("quantize_backward^T", transposed, want, rows, cols); }
    expect_near("quantize dbias", dbias, dbias_want, (size_t)cols, 1e-6, 0);
    expect_same_bits("quantize's input", x, before, n * sizeof(float));
    // weights: FP32 values, nothing measured, nothing recorded
    float* master = (float*)malloc_or_die(n * sizeof(float));
    for (size_t i = 0; i < n; i++) {
        master[i] = (float)random_uniform();
        want[i] = e4m3_from_float(master[i] * 400.0f);
    }
    ScaleSlot w_slot = new_slot(400.0f, FORMAT_E4M3);
    w_slot.policy = SLOT_WEIGHT;
    E4m3Tensor w = {NULL, data, transposed, &w_slot, test_recipe, 1, 1};
    quantize_weight(dev, w, master, rows, cols);
    expect_same_bits("quantize_weight", data, want, n);
    expect_transposed("quantize_weight^T", transposed, want, rows, cols);
    expect(w_slot.scale == 400.0f && w_slot.descale == 1.0f / 400.0f && w_slot.amax == 0.0f && w_slot.jit_amax == 0.0f,
           "weight slot: scale %g descale %g amax %g", (double)w_slot.scale, (double)w_slot.descale,
           (double)w_slot.amax);
    free(x), free(before), free(dbias), free(x64), free(dbias_want), free(data), free(transposed), free(want),
        free(master);
    close_device(dev);
}

static void test_quantize(void) {
    quantize_case(61, 37, 1, 1);
    quantize_case(128, 96, 1, 0);
    quantize_case(39, 64, 0, 1);
    quantize_case(5, 3, 0, 0);
    quantize_case(2100, 11, 1, 1);
}

// ---------------------------------------------------------------------------------------------------------------------
// what every FP8 producer has in common: measure_first, record, NaN

// Everything a producer reads and may write, so that each can be run by one signature.
typedef struct {
    int rows, cols;
    float *x, *branch, *dy, *bias, *weight;    // in
    float *sum, *mean, *rstd, *sums[3], *wide; // out, or += (sums)
    uint8_t *data, *transposed;
    ScaleSlot slot;
    int measure_first, record;
} ProducerCase;

static E4m3Tensor case_e4m3(ProducerCase* c) {
    E4m3Tensor y = {c->wide, c->data, c->transposed, &c->slot, test_recipe, c->measure_first, c->record};
    return y;
}

static E5m2Tensor case_e5m2(ProducerCase* c) {
    E5m2Tensor y = {c->wide, c->data, c->transposed, &c->slot, test_recipe, c->measure_first, c->record};
    return y;
}

static void run_layernorm_forward(Device* dev, ProducerCase* c) {
    ResidualAdd add = {c->sum, c->x, c->branch, c->bias};
    LayerNormStats stats = {c->mean, c->rstd};
    layernorm_forward(dev, case_e4m3(c), stats, add, c->weight, c->bias, c->rows, c->cols);
}

static void run_layernorm_backward(Device* dev, ProducerCase* c) {
    for (int r = 0; r < c->rows; r++) {
        c->mean[r] = 0.125f, c->rstd[r] = 1.5f;
    }
    LayerNormStats stats = {c->mean, c->rstd};
    LayerNormBackward args = {case_e5m2(c), c->sums[0], c->sums[1], c->sums[2], c->dy,  c->branch,
                              c->x,         stats,      c->weight,  c->rows,    c->cols};
    layernorm_backward(dev, args);
}

static void run_gelu_forward(Device* dev, ProducerCase* c) {
    gelu_forward(dev, case_e4m3(c), c->x, c->bias, c->rows, c->cols);
}

static void run_gelu_backward(Device* dev, ProducerCase* c) {
    gelu_backward(dev, case_e5m2(c), c->sums[0], c->dy, c->x, c->bias, c->rows, c->cols);
}

static void run_quantize_forward(Device* dev, ProducerCase* c) {
    E4m3Tensor y = case_e4m3(c);
    y.wide = c->x;
    quantize_forward(dev, y, c->rows, c->cols);
}

static void run_quantize_backward(Device* dev, ProducerCase* c) {
    E5m2Tensor dy = case_e5m2(c);
    dy.wide = c->x;
    quantize_backward(dev, dy, c->sums[0], c->rows, c->cols);
}

typedef struct {
    const char* name;
    void (*run)(Device*, ProducerCase*);
    Fp8Format format;
} ProducerTest;

static const ProducerTest producer_tests[] = {
    {"layernorm_forward", run_layernorm_forward, FORMAT_E4M3},
    {"layernorm_backward", run_layernorm_backward, FORMAT_E5M2},
    {"gelu_forward", run_gelu_forward, FORMAT_E4M3},
    {"gelu_backward", run_gelu_backward, FORMAT_E5M2},
    {"quantize_forward", run_quantize_forward, FORMAT_E4M3},
    {"quantize_backward", run_quantize_backward, FORMAT_E5M2},
};
enum { NUM_PRODUCERS = 6 };

// The same inputs whenever it is called with the same shape; outputs poisoned.
static ProducerCase new_case(int rows, int cols, Fp8Format format) {
    test_random_state = 77;
    size_t n = (size_t)rows * cols, C = (size_t)cols;
    ProducerCase c;
    memset(&c, 0, sizeof(c));
    c.rows = rows, c.cols = cols;
    c.x = random_values(n, 1.0), c.branch = random_values(n, 1.0), c.dy = random_values(n, 1.0);
    c.bias = random_values(C, 1.0), c.weight = random_values(C, 1.0);
    c.sum = poisoned_floats(n), c.wide = poisoned_floats(n);
    c.mean = poisoned_floats((size_t)rows), c.rstd = poisoned_floats((size_t)rows);
    for (int i = 0; i < 3; i++) {
        c.sums[i] = (float*)calloc_or_die(C, sizeof(float));
    }
    c.data = (uint8_t*)poisoned(n), c.transposed = (uint8_t*)poisoned(n);
    c.slot = new_slot(1.0f, format);
    return c;
}

static void free_case(ProducerCase* c) {
    free(c->x), free(c->branch), free(c->dy), free(c->bias), free(c->weight), free(c->sum), free(c->wide),
        free(c->mean);
    free(c->rstd), free(c->sums[0]), free(c->sums[1]), free(c->sums[2]), free(c->data), free(c->transposed);
}

static void expect_same_outputs(const char* name, const ProducerCase* a, const ProducerCase* b) {
    size_t n = (size_t)a->rows * a->cols;
    expect_same_bits(name, a->data, b->data, n);
    expect_same_bits(name, a->transposed, b->transposed, n);
    expect_same_bits(name, a->wide, b->wide, n * sizeof(float));
    expect_same_bits(name, a->sum, b->sum, n * sizeof(float));
    expect_same_bits(name, a->mean, b->mean, (size_t)a->rows * sizeof(float));
    expect_same_bits(name, a->rstd, b->rstd, (size_t)a->rows * sizeof(float));
    for (int i = 0; i < 3; i++) {
        expect_same_bits(name, a->sums[i], b->sums[i], (size_t)a->cols * sizeof(float));
    }
    expect_same_bits(name, &a->slot, &b->slot, sizeof(ScaleSlot));
}

static void test_producers_measure(void) {
    Device* dev = open_device(0, 2);
    for (int i = 0; i < NUM_PRODUCERS; i++) {
        const ProducerTest* test = &producer_tests[i];
        // what the op itself sees, recorded without measuring
        ProducerCase plain = new_case(70, 51, test->format);
        plain.record = 1;
        test->run(dev, &plain);
        float amax = plain.slot.amax;
        expect(amax > 0.5f && is_finite_bits(amax) && plain.slot.jit_amax == 0.0f, "%s: amax %g", test->name,
               (double)amax);
        // a warming slot: its scale comes from this tensor; the rest is as if that scale had always been there
        ProducerCase warming = new_case(70, 51, test->format);
        warming.measure_first = 1, warming.slot.scale = 123.0f, warming.slot.jit_amax = 1e30f;
        test->run(dev, &warming);
        ProducerCase given = new_case(70, 51, test->format);
        given.slot.scale = warming.slot.fp8_max / amax;
        test->run(dev, &given);
        expect(warming.slot.jit_amax == amax && warming.slot.amax == 0.0f && warming.slot.warmup == AMAX_WARMUP,
               "%s: jit_amax %g, want %g; amax %g, want 0 (not recording)", test->name, (double)warming.slot.jit_amax,
               (double)amax, (double)warming.slot.amax);
        expect(warming.slot.scale == given.slot.scale && warming.slot.descale == 1.0f / given.slot.scale,
               "%s: scale %g, want %g", test->name, (double)warming.slot.scale, (double)given.slot.scale);
        given.slot.jit_amax = amax;
        expect_same_outputs(test->name, &warming, &given);
        // a slot that has warmed up keeps its scale although others are being measured
        ProducerCase settled = new_case(70, 51, test->format);
        settled.measure_first = settled.record = 1, settled.slot.warmup = 0, settled.slot.amax = 2e4f;
        test->run(dev, &settled);
        expect(settled.slot.scale == 1.0f && settled.slot.amax == 2e4f, "%s: scale %g, amax %g, want 1 and 20000",
               test->name, (double)settled.slot.scale, (double)settled.slot.amax);
        expect_same_bits(test->name, settled.data, plain.data, 70 * 51);
        // NaN reaches amax and the byte, and does not set a scale
        ProducerCase broken = new_case(70, 51, test->format);
        broken.measure_first = broken.record = 1;
        broken.x[35 * 51 + 7] = NAN;
        test->run(dev, &broken);
        expect(isnan(broken.slot.amax) && isnan(broken.slot.jit_amax), "%s: amax %g after a NaN", test->name,
               (double)broken.slot.amax);
        expect(broken.slot.scale == 1.0f, "%s: scale %g from a NaN", test->name, (double)broken.slot.scale);
        expect((broken.data[35 * 51 + 7] & 0x7F) == 0x7F, "%s: byte 0x%02X for a NaN", test->name,
               broken.data[35 * 51 + 7]);
        free_case(&plain), free_case(&warming), free_case(&given), free_case(&settled), free_case(&broken);
    }
    close_device(dev);
}

// Shapes from here on are large enough that cpu_threads_for gives them all threads.
static void test_producers_threads(void) {
    Device *one = open_device(0, 1), *three = open_device(0, 3);
    for (int i = 0; i < NUM_PRODUCERS; i++) {
        ProducerCase a = new_case(829, 67, producer_tests[i].format), b = new_case(829, 67, producer_tests[i].format);
        a.measure_first = a.record = b.measure_first = b.record = 1;
        producer_tests[i].run(one, &a);
        producer_tests[i].run(three, &b);
        expect_same_outputs(producer_tests[i].name, &a, &b);
        free_case(&a), free_case(&b);
    }
    close_device(one), close_device(three);
}

static void test_other_ops_threads(void) {
    enum { ROWS = 150, C = 272, OC = 208, T = 75, B = 2, NH = 17, HS = 16, NORM_N = ROWS * 3 * C * 3 };
    float *y[2], *dx[2], *dw[2], *out[2], *lse[2], *dqkv[2], *losses[2], *logits[2], *dwte[2], *dwpe[2];
    StepState state[2];
    test_random_state = 5;
    E4m3Tensor x = {random_values(ROWS * C, 1.0), NULL, NULL, NULL, test_recipe, 0, 0};
    E4m3Tensor w = {random_values(OC * C, 1.0), NULL, NULL, NULL, test_recipe, 0, 0};
    E5m2Tensor dy = {random_values(ROWS * OC, 1.0), NULL, NULL, NULL, test_recipe, 0, 0};
    float *qkv = random_values(ROWS * 3 * C, 1.0), *dw_start = random_values(OC * C, 1.0);
    float *logits_start = random_values(ROWS * OC, 3.0), *grads = random_values(NORM_N, 1.0);
    float* dresidual = random_values(3 * ROWS * C, 1.0); // (3 ROWS, C)
    int targets[ROWS], rows[3 * ROWS], bucket_token[10], bucket_start[11];
    for (int i = 0; i < ROWS; i++) {
        targets[i] = i % 41;
    }
    for (int i = 0; i < 3 * ROWS; i++) { // tokens 0..9, 45 rows each
        rows[i] = i / 45 + i % 45 * 10;
    }
    for (int i = 0; i <= 10; i++) {
        bucket_start[i] = 45 * i;
        bucket_token[i < 10 ? i : 0] = i < 10 ? i : 0;
    }
    TokenIndex index = {rows, bucket_token, bucket_start, 10};
    for (int i = 0; i < 2; i++) {
        Device* dev = open_device(0, i == 0 ? 1 : 3);
        y[i] = poisoned_floats(ROWS * OC), dx[i] = poisoned_floats(ROWS * C), dw[i] = copy_of(dw_start, OC * C);
        out[i] = poisoned_floats(ROWS * C), lse[i] = poisoned_floats(B * NH * T),
        dqkv[i] = poisoned_floats(ROWS * 3 * C);
        losses[i] = poisoned_floats(ROWS), logits[i] = copy_of(logits_start, ROWS * OC);
        memset(&state[i], 0, sizeof(StepState));
        matmul_forward(dev, y[i], x, w, NULL, ROWS, C, OC);
        matmul_dgrad(dev, dx[i], dy, w, ROWS, C, OC);
        matmul_wgrad(dev, dw[i], dy, x, 1, ROWS, C, OC);
        E4m3Tensor attention = {out[i], NULL, NULL, NULL, test_recipe, 0, 0};
        attention_forward(dev, attention, lse[i], qkv, B, T, NH, HS);
        E5m2Tensor attention_gradient = {dqkv[i], NULL, NULL, NULL, test_recipe, 0, 0};
        attention_backward(dev, attention_gradient, NULL, x.wide, out[i], lse[i], qkv, B, T, NH, HS);
        E5m2Tensor dlogits = {logits[i], NULL, NULL, NULL, test_recipe, 0, 0};
        classifier(dev, dlogits, losses[i], logits[i], targets, 0.01f, 1, ROWS, 41, OC);
        loss_add(dev, &state[i], losses[i], 1.0f / ROWS, ROWS);
        global_norm(dev, &state[i], grads, NORM_N);
        dwte[i] = (float*)calloc_or_die(10 * C, sizeof(float)), dwpe[i] = (float*)calloc_or_die(T * C, sizeof(float));
        embedding_backward(dev, dwte[i], dwpe[i], dresidual, index, 3 * ROWS / T, T, C);
        close_device(dev);
    }
    expect_same_bits("matmul_forward", y[0], y[1], ROWS * OC * sizeof(float));
    expect_same_bits("matmul_dgrad", dx[0], dx[1], ROWS * C * sizeof(float));
    expect_same_bits("matmul_wgrad", dw[0], dw[1], OC * C * sizeof(float));
    expect_same_bits("attention_forward", out[0], out[1], ROWS * C * sizeof(float));
    expect_same_bits("attention lse", lse[0], lse[1], B * NH * T * sizeof(float));
    expect_same_bits("attention_backward", dqkv[0], dqkv[1], ROWS * 3 * C * sizeof(float));
    expect_same_bits("classifier", logits[0], logits[1], ROWS * OC * sizeof(float));
    expect_same_bits("losses", losses[0], losses[1], ROWS * sizeof(float));
    expect_same_bits("global_norm", &state[0], &state[1], sizeof(StepState));
    expect_same_bits("dwte", dwte[0], dwte[1], 10 * C * sizeof(float));
    expect_same_bits("dwpe", dwpe[0], dwpe[1], T * C * sizeof(float));
    for (int i = 0; i < 2; i++) {
        free(dwte[i]), free(dwpe[i]);
        free(y[i]), free(dx[i]), free(dw[i]), free(out[i]), free(lse[i]), free(dqkv[i]), free(losses[i]),
            free(logits[i]);
    }
    free(x.wide), free(w.wide), free(dy.wide), free(qkv), free(dw_start), free(logits_start);
    free(grads), free(dresidual);
}

// ---------------------------------------------------------------------------------------------------------------------
// classifier and the end of a step

static double classifier_loss_model(const double* logits, int target, int V) {
    double largest = -1e300, sum = 0;
    for (int v = 0; v < V; v++) {
        largest = fmax(largest, logits[v]);
    }
    for (int v = 0; v < V; v++) {
        sum += exp(logits[v] - largest);
    }
    return log(sum) + largest - logits[target];
}

static void classifier_case(int fp32, int rows, int V, int Vp) {
    Device* dev = open_device(fp32, 2);
    size_t n = (size_t)rows * Vp;
    float *logits = random_values(n, 4.0), *losses = poisoned_floats((size_t)rows), *before = copy_of(logits, n);
    int* targets = (int*)malloc_or_die((size_t)rows * sizeof(int));
    double *loss_want = doubles((size_t)rows), *want = doubles(n), *logits64 = to_doubles(logits, n);
    const double dloss = 1.0 / 64, h = 1e-4;
    for (int r = 0; r < rows; r++) {
        double* row = logits64 + (size_t)r * Vp;
        targets[r] = (r * 31) % V;
        loss_want[r] = classifier_loss_model(row, targets[r], V);
        for (int v = 0; v < V; v++) { // central differences
            double value = row[v];
            row[v] = value + h;
            double above = classifier_loss_model(row, targets[r], V);
            row[v] = value - h;
            want[(size_t)r * Vp + v] = (above - classifier_loss_model(row, targets[r], V)) / (2 * h) * dloss;
            row[v] = value;
        }
    }
    E5m2Tensor dlogits = {logits, NULL, NULL, NULL, test_recipe, 0, 0};
    classifier(dev, dlogits, losses, logits, targets, (float)dloss, 0, rows, V, Vp);
    expect_near("losses", losses, loss_want, (size_t)rows, 1e-6, 0);
    expect_same_bits("logits without gradient", logits, before, n * sizeof(float));
    memset(losses, 0xFF, (size_t)rows * sizeof(float));
    for (int r = 0; r < rows; r++) {
        for (int v = V; v < Vp; v++) {
            logits[(size_t)r * Vp + v] = NAN; // padding is never read
        }
    }
    classifier(dev, dlogits, losses, logits, targets, (float)dloss, 1, rows, V, Vp);
    expect_near("losses", losses, loss_want, (size_t)rows, 1e-6, 0);
    expect_near("dlogits", logits, want, n, 1e-6, fp32 ? 0 : HALF_ULP_BF16);
    free(logits), free(losses), free(before), free(targets), free(loss_want), free(want), free(logits64);
    close_device(dev);
}

static void test_classifier(void) {
    classifier_case(1, 7, 131, 256);
    classifier_case(0, 3, 256, 256);
    classifier_case(0, 2, 1, 128);
    Device* dev = open_device(0, 1);
    enum { V = 50257, VP = 50304 }; // long sums: all logits equal, so the loss is log V
    float* logits = (float*)calloc_or_die(VP, sizeof(float));
    int target = 50000;
    float loss;
    E5m2Tensor dlogits = {logits, NULL, NULL, NULL, test_recipe, 0, 0};
    classifier(dev, dlogits, &loss, logits, &target, 1.0f, 1, 1, V, VP);
    expect(fabs(loss - log(V)) < 1e-5, "loss of equal logits %.9g, want %.9g", (double)loss, log(V));
    expect(logits[target] == -1.0f && logits[VP - 1] == 0.0f && fabs(logits[0] * V - 1.0) < 1.0 / 256,
           "gradients %g %g %g", (double)logits[target], (double)logits[VP - 1], (double)logits[0]);
    free(logits);
    close_device(dev);
}

static void test_step_state(void) {
    Device* dev = open_device(0, 2);
    enum { N = 300001 };
    float* values = random_values(N, 1.0);
    double sum = 0, squares = 0;
    for (int i = 0; i < N; i++) {
        sum += values[i];
        squares += (double)values[i] * values[i];
    }
    StepState state = {2.0f, -1.0f, 7, 0, 0};
    loss_add(dev, &state, values, 0.25f, N);
    expect(fabs(state.loss - (2.0 + 0.25 * sum)) < 1e-5 * (2 + fabs(sum)), "loss %.9g, want %.9g", (double)state.loss,
           2.0 + 0.25 * sum);
    global_norm(dev, &state, values, N);
    expect(fabs(state.grad_norm - sqrt(squares)) < 1e-6 * sqrt(squares) && state.skip == 0,
           "norm %.9g, want %.9g, skip %d", (double)state.grad_norm, sqrt(squares), state.skip);
    global_norm(dev, &state, values, 3); // fewer elements than chunks
    double three = (double)values[0] * values[0] + (double)values[1] * values[1] + (double)values[2] * values[2];
    expect(fabs(state.grad_norm - sqrt(three)) < 1e-6, "norm of 3 values %g", (double)state.grad_norm);
    float odd[3] = {INFINITY, NAN, 1e38f};
    int skips[3] = {1, 1, 0};
    for (int i = 0; i < 3; i++) {
        float kept = values[N - 1];
        values[N - 1] = odd[i];
        global_norm(dev, &state, values, N);
        expect(state.skip == skips[i], "skip %d for a gradient of %g", state.skip, (double)odd[i]);
        values[N - 1] = kept;
    }
    state.loss = NAN;
    global_norm(dev, &state, values, N);
    expect(state.skip == 1, "skip %d for a loss of NaN", state.skip);
    free(values);
    close_device(dev);
}

static void adamw_case(int fp32, float grad_clip, float grad_norm) {
    Device* dev = open_device(fp32, 2);
    enum { LAYERS = 3, N = 20012, ALL = LAYERS * N, STRIDE = 2 };
    float *master = (float*)malloc_or_die(ALL * sizeof(float)), *grad = random_values(ALL, 1.0);
    float *m = (float*)calloc_or_die(ALL, sizeof(float)), *v = (float*)calloc_or_die(ALL, sizeof(float));
    float* param = poisoned_floats(ALL);
    ScaleSlot slots[LAYERS * STRIDE];
    for (int i = 0; i < LAYERS * STRIDE; i++) {
        scale_slot_init(&slots[i], E4M3_MAX, SLOT_WEIGHT);
    }
    for (int i = 0; i < ALL; i++) {
        master[i] = (float)(random_uniform() * (1 + i / N));
    }
    ParamState p = {master, m, v, grad, param, slots, STRIDE, LAYERS, N, 0};
    AdamW nearest = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0, 0, 0};
    params_from_master(dev, p, nearest);
    for (int i = 0; i < ALL; i++) {
        expect(param[i] == (fp32 ? master[i] : bf16_round(master[i])), "param[%d] = %g", i, (double)param[i]);
    }
    double *w64 = to_doubles(master, ALL), *m64 = doubles(ALL), *v64 = doubles(ALL);
    StepState state = {1.0f, grad_norm, 0, 0, 0};
    double factor = grad_clip > 0 && grad_norm > grad_clip ? (double)grad_clip / grad_norm : 1.0;
    for (int t = 1; t <= 3; t++) {
        AdamW adamw = {1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, grad_clip, t, 0, 0};
        for (int i = 0; i < LAYERS * STRIDE; i++) {
            slots[i].amax = 0.0f;
        }
        adamw_update(dev, p, adamw, &state);
        for (int i = 0; i < ALL; i++) {
            double g = grad[i] * factor, b1 = adamw.beta1, b2 = adamw.beta2;
            m64[i] = b1 * m64[i] + (1 - b1) * g;
            v64[i] = b2 * v64[i] + (1 - b2) * g * g;
            double update = m64[i] / (1 - pow(b1, t)) / (sqrt(v64[i] / (1 - pow(b2, t))) + adamw.eps);
            w64[i] -= adamw.lr * (update + adamw.weight_decay * w64[i]);
            grad[i] = bf16_round(-0.5f * grad[i]);
        }
    }
    expect_near("master", master, w64, ALL, 1e-6, 0);
    expect_near("m", m, m64, ALL, 1e-6, 0);
    expect_near("v", v, v64, ALL, 1e-6, 0);
    for (int i = 0; i < ALL; i++) {
        expect(param[i] == (fp32 ? master[i] : bf16_round(master[i])), "param[%d] = %g", i, (double)param[i]);
    }
    for (int layer = 0; layer < LAYERS; layer++) {
        float want = amax_of(master + layer * N, N);
        expect(slots[layer * STRIDE].amax == want && slots[layer * STRIDE + 1].amax == 0.0f,
               "slot of layer %d: %g, want %g", layer, (double)slots[layer * STRIDE].amax, (double)want);
    }
    // a skipped step changes nothing
    float* before = copy_of(master, ALL);
    AdamW adamw = {1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, grad_clip, 4, 0, 0};
    state.skip = 1;
    slots[0].amax = 0.0f;
    adamw_update(dev, p, adamw, &state);
    expect_same_bits("master after a skipped step", master, before, ALL * sizeof(float));
    expect(slots[0].amax == 0.0f, "a skipped step raised a slot to %g", (double)slots[0].amax);
    free(master), free(grad), free(m), free(v), free(param), free(w64), free(m64), free(v64), free(before);
    close_device(dev);
}

// Stochastic rounding: always a neighbour of the master, the mean is the master itself, other updates and other places
// draw other numbers, the same update draws the same.
static void test_stochastic_rounding(void) {
    Device* dev = open_device(0, 2);
    enum { N = 40000 };
    float *master = (float*)malloc_or_die(N * sizeof(float)), *zeros = (float*)calloc_or_die(4 * N, sizeof(float));
    float *param = poisoned_floats(N), *again = poisoned_floats(N), *later = poisoned_floats(N);
    for (int i = 0; i < N; i++) {
        master[i] = (float)(0.5 + 0.49 * random_uniform()); // positive and inside two binades
    }
    StepState state = {1.0f, 1.0f, 0, 0, 0};
    AdamW adamw = {0.0f, 0.9f, 0.95f, 1e-8f, 0.0f, 0.0f, 7, 1, 42};
    ParamState p = {master, zeros, zeros + N, zeros + 2 * N, param, NULL, 0, 1, N, 8};
    adamw_update(dev, p, adamw, &state);
    p.param = again;
    adamw_update(dev, p, adamw, &state);
    expect_same_bits("the same update", param, again, N * sizeof(float));
    p.param = later;
    adamw.t = 8;
    adamw_update(dev, p, adamw, &state);
    double sum = 0.0, variance = 0.0;
    int differ = 0, shifted = 0;
    for (int i = 0; i < N; i++) {
        float low = bits_float(float_bits(master[i]) & 0xFFFF0000u), high = bits_float(float_bits(low) + 0x10000u);
        expect(param[i] == master[i] || param[i] == low || param[i] == high, "param[%d] = %.9g of %.9g", i,
               (double)param[i], (double)master[i]);
        double ulp = (double)high - low, up = (master[i] - low) / ulp; // probability of rounding up
        sum += (param[i] - (double)master[i]) / ulp;
        variance += up * (1.0 - up);
        differ += param[i] != later[i];
        shifted += (param[i] == high) != (up > 0.5);
    }
    expect(fabs(sum) < 5.0 * sqrt(variance), "bias of %g ulps over %d elements, deviation %g", sum, N, sqrt(variance));
    expect(differ > N / 5 && shifted > N / 8, "%d of %d differ between updates, %d are not the nearest", differ, N, shifted);
    free(master), free(zeros), free(param), free(again), free(later);
    close_device(dev);
}

static void test_adamw(void) {
    adamw_case(0, 1.0f, 4.0f);
    adamw_case(1, 0.0f, 4.0f);
    adamw_case(0, 1.0f, 0.5f);
}

static void test_slots(void) {
    Device* dev = open_device(0, 1);
    ScaleSlot slots[5];
    for (int i = 0; i < 5; i++) {
        slots[i] = new_slot(1.0f, FORMAT_E4M3);
    }
    slots[0].amax = 3.5f, slots[1].amax = NAN, slots[2].amax = INFINITY, slots[3].amax = 0.0f, slots[4].amax = 7.0f;
    slots[0].warmup = 1, slots[4].policy = SLOT_WEIGHT;
    float amaxes[5];
    scale_slots_gather(dev, amaxes, slots, 5);
    expect(amaxes[0] == 3.5f && amaxes[1] == INFINITY && amaxes[2] == INFINITY && amaxes[3] == 0.0f &&
               amaxes[4] == 7.0f,
           "amaxes %g %g %g %g %g", (double)amaxes[0], (double)amaxes[1], (double)amaxes[2], (double)amaxes[3],
           (double)amaxes[4]);
    StepState state = {0, 0, 0, 99, 0};
    scale_slots_step(dev, slots, amaxes, 5, test_recipe, &state);
    expect(slots[0].scale == 128.0f && slots[1].scale == 1.0f && slots[4].scale == 64.0f, "scales %g %g %g",
           (double)slots[0].scale, (double)slots[1].scale, (double)slots[4].scale);
    expect(state.slots_warming == 3, "%d slots warming, want 3", state.slots_warming);
    close_device(dev);
}

// ---------------------------------------------------------------------------------------------------------------------
// device

static void call_small_workspace(void* arg) { // open_device's is for 1024 columns
    float x[4] = {0};
    E5m2Tensor dx = {x, NULL, NULL, NULL, test_recipe, 0, 0};
    gelu_backward((Device*)arg, dx, x, x, x, x, 2, 4096);
}

static void call_without_slot(void* arg) {
    float x[4] = {0};
    uint8_t data[4];
    E4m3Tensor y = {NULL, data, NULL, NULL, test_recipe, 0, 0};
    gelu_forward((Device*)arg, y, x, x, 2, 2);
}

static void call_huge_malloc(void* arg) { device_malloc((Device*)arg, (size_t)1 << 60); }

static void call_cudnn(void* arg) {
    (void)arg;
    DeviceOptions options = {0, 1, 0, ATTENTION_CUDNN};
    device_create(options);
}

static void test_device(void) {
    Device* dev = open_device(0, 1);
    expect(strlen(device_name(dev)) > 0 && strcmp(device_attention_name(dev), "builtin") == 0, "names '%s' and '%s'",
           device_name(dev), device_attention_name(dev));
    size_t free_bytes = 0, total_bytes = 0;
    device_memory(dev, &free_bytes, &total_bytes);
    expect(free_bytes > 0 && free_bytes <= total_bytes, "memory: %zu free of %zu", free_bytes, total_bytes);
    char* p = (char*)device_malloc(dev, 1001);
    char host[1001], back[1001];
    expect((uintptr_t)p % 256 == 0, "memory at %p is not aligned", (void*)p);
    memset(host, 42, sizeof(host));
    device_copy_in(dev, p, host, 1001);
    device_zero(dev, p, 500);
    device_copy_out(dev, back, p, 1001);
    expect(back[0] == 0 && back[499] == 0 && back[500] == 42 && back[1000] == 42, "copies do not come back");
    device_release(dev, p);
    float values[3] = {1.00390625f, -3.14159f, 1e30f}, stored[3], out[3];
    bf16_from_host(dev, stored, values, 3);
    bf16_to_host(dev, out, stored, 3);
    for (int i = 0; i < 3; i++) {
        expect(out[i] == bf16_round(values[i]), "bf16 of %g is %g", (double)values[i], (double)out[i]);
    }
    expect_dies(call_matmul_odd, dev, "(rows, C, OC) = (16, 17, 32)");
    expect_dies(call_matmul_formless, dev, "lacks its BF16 form");
    expect_dies(call_attention_wide, dev, "(1, 4, 1, 144)");
    expect_dies(call_small_workspace, dev, "reduction_workspace_bytes");
    expect_dies(call_without_slot, dev, "without a scale slot");
    expect_dies(call_huge_malloc, dev, "out of memory: wanted 1099511627776 MiB");
    expect_dies(call_cudnn, NULL, "cudnn needs a GPU");
    close_device(dev);
}

int main(void) {
    unit_run(test_device); // first: it forks, and OpenMP's threads do not survive a fork
    unit_run(test_elementary);
    unit_run(test_embedding);
    unit_run(test_layernorm_model);
    unit_run(test_layernorm);
    unit_run(test_matmul);
    unit_run(test_attention_model);
    unit_run(test_attention);
    unit_run(test_gelu);
    unit_run(test_quantize);
    unit_run(test_producers_measure);
    unit_run(test_producers_threads);
    unit_run(test_other_ops_threads);
    unit_run(test_classifier);
    unit_run(test_step_state);
    unit_run(test_adamw);
    unit_run(test_stochastic_rounding);
    unit_run(test_slots);
    return unit_report();
}

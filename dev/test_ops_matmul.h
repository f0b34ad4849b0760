// Tests of the matrix products: the FP64 product of the exact operands is the judge of both floors.
#ifndef TEST_OPS_MATMUL_H
#define TEST_OPS_MATMUL_H

#include "test_ops_tools.h"

namespace ops {

// Errors, relative to the root mean square of the outputs:
//   BF16 output    2^-9 (rms of one rounding)
//   BF16 operands  tensor cores add 16 products at a time in FP32 and truncate: 4 + K/16 times up to 2^-23
//   FP8 operands   Hopper keeps some 13 bits behind the leading one of the sum of 32 products and what was there.
//                  One step truncates 33 numbers: at random, 2^-12 together, and on average towards zero by 2^-14.
//                  Fast accumulation does so for all of K, in K/32 steps. Otherwise the sum is promoted to FP32 every
//                  128 products at least: four steps, and what the pieces lose is the same share of each.
// One wrong element hides in a Frobenius norm, so each element has its own bound: its rounding plus 6 times that.

typedef enum { MATMUL_FORWARD, MATMUL_DGRAD, MATMUL_WGRAD } MatmulPass;

static double matmul_drift(MatmulPass pass, int fp8, int K) {
    double fp32 = (4.0 + K / 16.0) * 0x1p-23;
    if (!fp8) { return fp32; }
    double steps = pass == MATMUL_FORWARD ? fmax(1.0, K / 32.0) : 4.0;
    return fp32 + sqrt(steps) * 0x1p-12 + steps * 0x1p-14;
}

// c (M, N) = a (M, K) . b (N, K)^T, FP64
static void product_f64(double* c, const double* a, const double* b, size_t M, size_t N, size_t K) {
    long long rows = (long long)M;
#ifdef _OPENMP
#pragma omp parallel for schedule(static)
#endif
    for (long long i = 0; i < rows; i++) {
        for (size_t j = 0; j < N; j++) {
            double sum = 0.0;
            for (size_t k = 0; k < K; k++) {
                sum += a[(size_t)i * K + k] * b[j * K + k];
            }
            c[(size_t)i * N + j] = sum;
        }
    }
}

// An operand (lines, K): BF16 values, or FP8 codes under a slot. `exact` holds what the codes or values mean.
typedef struct {
    float* values;
    uint8_t *codes, *transposed; // (lines, K), (K, lines)
    ScaleSlot* slot;
    double* exact;            // (lines, K)
    double* exact_transposed; // (K, lines)
} MatmulOperand;

static MatmulOperand matmul_operand(Arena* arena, size_t lines, size_t K, int fp8, int e5m2, double deviation,
                                    uint64_t stream) {
    MatmulOperand o = {};
    o.values = random_bf16(arena, lines * K, 0, deviation, stream);
    o.exact = arena_doubles(arena, lines * K);
    o.exact_transposed = arena_doubles(arena, lines * K);
    if (fp8) {
        o.slot = (ScaleSlot*)arena_bytes(arena, sizeof(ScaleSlot));
        scale_slot_init(o.slot, e5m2 ? E5M2_MAX : E4M3_MAX, SLOT_DELAYED);
        ScaleRecipe recipe = {16, AMAX_MAX, 0, 1.0f};
        o.slot->scale = scale_from_amax((float)largest_of(o.values, lines * K), 1.0f, o.slot->fp8_max, recipe);
        o.slot->descale = 1.0f / o.slot->scale;
        o.slot->scale = 77.0f; // of the next bytes: a product must not look at it
        o.codes = arena_codes(arena, lines * K);
        o.transposed = arena_codes(arena, lines * K);
        for (size_t i = 0; i < lines * K; i++) {
            float scaled = o.values[i] / o.slot->descale;
            o.codes[i] = e5m2 ? e5m2_from_float(scaled) : e4m3_from_float(scaled);
        }
        transpose_codes(o.transposed, o.codes, lines, K);
    }
    for (size_t i = 0; i < lines * K; i++) {
        o.exact[i] = !fp8   ? (double)o.values[i]
                     : e5m2 ? (double)float_from_e5m2(o.codes[i]) * (double)o.slot->descale
                            : (double)float_from_e4m3(o.codes[i]) * (double)o.slot->descale;
        o.exact_transposed[i % K * lines + i / K] = o.exact[i];
    }
    return o;
}

// Both FP8 forms are handed over: x.transposed chooses FP8 in wgrad, w.data in forward and dgrad.
static void add_operand(OpCall* call, const MatmulOperand* o, size_t n, int fp8, const char* wide, const char* data,
                        const char* transposed, const char* slot) {
    if (fp8) {
        arg_add(call, data, ARG_CODES, ARG_IN, o->codes, n);
        arg_add(call, transposed, ARG_CODES, ARG_IN, o->transposed, n);
        arg_add(call, slot, ARG_SLOTS, ARG_IN, o->slot, 1);
    } else {
        arg_add(call, wide, ARG_BF16, ARG_IN, o->values, n);
    }
}

// Judge one floor's output (n elements) by the FP64 product.
static void judge_product(const char* what, const char* floor, const float* got, const double* truth, size_t n,
                          double drift, int is_bf16) {
    double norm = 0.0;
    for (size_t i = 0; i < n; i++) {
        norm += truth[i] * truth[i];
    }
    double rms = sqrt(norm / (double)n), distance = relative_distance_f64(got, truth, n);
    double threshold = drift + (is_bf16 ? 0x1p-9 : 0.0);
    expect(distance <= threshold, "%s: the %s is %.3g off (relative, Frobenius), want %.3g", what, floor, distance,
           threshold);
    for (size_t i = 0; i < n; i++) {
        double allowed =
            6.0 * drift * rms + (is_bf16 ? 0.5 * bf16_ulp(truth[i]) * (1.0 + 0x1p-7) : 0x1p-23 * fabs(truth[i]));
        expect(fabs((double)got[i] - truth[i]) <= allowed, "%s: the %s has element %zu = %.9g, want %.9g +- %.2g", what,
               floor, i, (double)got[i], truth[i], allowed);
    }
}

static void matmul_case(MatmulPass pass, int fp8, int rows, int C, int OC) {
    Arena arena = {};
    size_t M = (size_t)rows;
    MatmulOperand x = matmul_operand(&arena, M, (size_t)C, fp8, 0, 1.0, 1);
    MatmulOperand w = matmul_operand(&arena, (size_t)OC, (size_t)C, fp8, 0, 0.05, 2);
    MatmulOperand dy = matmul_operand(&arena, M, (size_t)OC, fp8, 1, 1e-3, 3);
    size_t n = pass == MATMUL_FORWARD ? M * OC : pass == MATMUL_DGRAD ? M * C : (size_t)OC * C;
    double* truth = arena_doubles(&arena, n);
    // forward without and with a bias, dgrad, wgrad into poisoned memory and on top of what is there
    for (int variant = 0; variant < (pass == MATMUL_DGRAD ? 1 : 2); variant++) {
        int with_bias = pass == MATMUL_FORWARD && variant, accumulate = pass == MATMUL_WGRAD && variant;
        OpCall call = op_call(pass == MATMUL_FORWARD ? OP_MATMUL_FORWARD
                              : pass == MATMUL_DGRAD ? OP_MATMUL_DGRAD
                                                     : OP_MATMUL_WGRAD);
        call.rows = rows, call.C = C, call.OC = OC, call.accumulate = accumulate;
        const char* output = pass == MATMUL_FORWARD ? "y" : pass == MATMUL_DGRAD ? "dx" : "dw";
        int K = pass == MATMUL_FORWARD ? C : pass == MATMUL_DGRAD ? OC : rows;
        float* start = random_floats(&arena, n, 0, 1e-3, 4);
        if (accumulate) {
            arg_add(&call, output, ARG_F32, ARG_INOUT, start, n);
        } else if (pass == MATMUL_WGRAD) {
            arg_add(&call, output, ARG_F32, ARG_OUT, arena_floats(&arena, n), n);
        } else {
            arg_add(&call, output, ARG_BF16, ARG_OUT, arena_floats(&arena, n), n);
        }
        if (pass != MATMUL_DGRAD) { add_operand(&call, &x, M * C, fp8, "x_wide", "x_data", "x_transposed", "x_slot"); }
        if (pass != MATMUL_FORWARD) {
            add_operand(&call, &dy, M * OC, fp8, "dy_wide", "dy_data", "dy_transposed", "dy_slot");
        }
        if (pass != MATMUL_WGRAD) {
            add_operand(&call, &w, (size_t)OC * C, fp8, "w_wide", "w_data", "w_transposed", "w_slot");
        }
        float* bias = random_bf16(&arena, (size_t)OC, 0, 1, 5);
        if (with_bias) { arg_add(&call, "bias", ARG_BF16, ARG_IN, bias, (size_t)OC); }
        if (pass == MATMUL_FORWARD) { product_f64(truth, x.exact, w.exact, M, (size_t)OC, (size_t)C); }
        if (pass == MATMUL_DGRAD) { product_f64(truth, dy.exact, w.exact_transposed, M, (size_t)C, (size_t)OC); }
        if (pass == MATMUL_WGRAD) {
            product_f64(truth, dy.exact_transposed, x.exact_transposed, (size_t)OC, (size_t)C, M);
        }
        for (size_t i = 0; i < n; i++) {
            truth[i] += accumulate ? (double)start[i] : with_bias ? (double)bias[i % (size_t)OC] : 0.0;
        }
        char what[128];
        const char* names[] = {"forward", "dgrad", "wgrad"};
        snprintf(what, sizeof(what), "%s %s, rows %d, C %d, OC %d, bias %d, accumulate %d", fp8 ? "fp8" : "bf16",
                 names[pass], rows, C, OC, with_bias, accumulate);
        Rule rules[] = {rule_ignore(output)};
        OpOutcome outcome = run_case(&arena, what, &call, rules, 1);
        double drift = matmul_drift(pass, fp8, K), cpu_drift = matmul_drift(pass, 0, K);
        judge_product(what, "CPU floor", arg_floats(&outcome.reference, output), truth, n, cpu_drift,
                      pass != MATMUL_WGRAD);
        judge_product(what, op_floors.subject->name, arg_floats(&outcome.subject, output), truth, n,
                      op_floors.exact ? cpu_drift : drift, pass != MATMUL_WGRAD);
    }
    arena_free(&arena);
}

static void matmul_cases(MatmulPass pass) {
    if (op_test_skipped()) { return; }
    // rows, C, OC, thorough only. FP8 wants multiples of 16 in all three, BF16 in C and OC
    int fp8_shapes[][4] = {{16, 16, 16, 0},     {48, 64, 176, 0},    {64, 384, 96, 0},
                           {112, 96, 288, 0},   {128, 768, 2304, 1}, {256, 3072, 768, 1},
                           {64, 1600, 4800, 1}, {512, 4096, 512, 1}, {16, 16384, 64, 1}};
    int bf16_shapes[][4] = {{1, 64, 192, 0},     {17, 48, 64, 0},     {131, 128, 384, 0},
                            {64, 16, 16, 0},     {97, 768, 2304, 1},  {127, 3072, 768, 1},
                            {61, 1600, 1600, 1}, {33, 768, 50304, 1}, {509, 4096, 512, 1}};
    for (int i = 0; i < 9; i++) {
        int *a = fp8_shapes[i], *b = bf16_shapes[i];
        if (!a[3] || op_floors.thorough) { matmul_case(pass, 1, a[0], a[1], a[2]); }
        if (!b[3] || op_floors.thorough) { matmul_case(pass, 0, b[0], b[1], b[2]); }
    }
}

static void ops_matmul_forward(void) {
    matmul_cases(MATMUL_FORWARD);
}
static void ops_matmul_dgrad(void) {
    matmul_cases(MATMUL_DGRAD);
}
static void ops_matmul_wgrad(void) {
    matmul_cases(MATMUL_WGRAD);
}

} // namespace ops

#endif

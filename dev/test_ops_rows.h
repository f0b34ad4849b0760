// Tests of the ops that go row by row or element by element: embedding, LayerNorm, gelu, quantize, classifier.
#ifndef TEST_OPS_ROWS_H
#define TEST_OPS_ROWS_H

#include "test_ops_tools.h"

#include "../lib/token_index.h"

namespace ops {

// ---------------------------------------------------------------------------------------------------------------------
// embedding

static void ops_embedding_forward(void) {
    if (op_test_skipped()) { return; }
    int shapes[][4] = {{1, 1, 16, 7}, {3, 17, 48, 300}, {2, 64, 768, 1000}, {1, 100, 1600, 50257}, {4, 1024, 64, 300}};
    for (int i = 0; i < 5; i++) { // B, T, C, V
        Arena arena = {};
        int B = shapes[i][0], T = shapes[i][1], C = shapes[i][2], V = shapes[i][3];
        if (!op_floors.thorough && (size_t)V * C > 10000000) { continue; }
        size_t rows = (size_t)B * T;
        OpCall call = op_call(OP_EMBEDDING_FORWARD);
        call.B = B, call.T = T, call.C = C;
        arg_add(&call, "out", ARG_BF16, ARG_OUT, arena_floats(&arena, rows * C), rows * C);
        arg_add(&call, "tokens", ARG_I32, ARG_IN, random_ints(&arena, rows, V, 1), rows);
        arg_add(&call, "wte", ARG_BF16, ARG_IN, random_bf16(&arena, (size_t)V * C, 0, 1, 2), (size_t)V * C);
        arg_add(&call, "wpe", ARG_BF16, ARG_IN, random_bf16(&arena, (size_t)T * C, 0, 1, 3), (size_t)T * C);
        char what[96];
        snprintf(what, sizeof(what), "B %d, T %d, C %d, V %d", B, T, C, V);
        Rule rules[] = {rule_exact("out")}; // one FP32 addition, one rounding
        run_case(&arena, what, &call, rules, 1);
        arena_free(&arena);
    }
}

static void ops_embedding_backward(void) {
    if (op_test_skipped()) { return; }
    int shapes[][4] = {{1, 1, 16, 7}, {3, 17, 48, 5}, {2, 64, 768, 300}, {1, 100, 1600, 1}, {4, 1024, 64, 300}};
    for (int i = 0; i < 5; i++) {
        Arena arena = {};
        int B = shapes[i][0], T = shapes[i][1], C = shapes[i][2], V = shapes[i][3];
        size_t rows = (size_t)B * T, wte_n = (size_t)V * C, wpe_n = (size_t)(T + 3) * C; // maxT is longer than T
        int* tokens = random_ints(&arena, rows, V, 1);
        int* index_rows = (int*)arena_bytes(&arena, rows * 4);
        int* bucket_token = (int*)arena_bytes(&arena, rows * 4);
        int* bucket_start = (int*)arena_bytes(&arena, (rows + 1) * 4);
        TokenCounter counter = token_counter_create(V);
        OpCall call = op_call(OP_EMBEDDING_BACKWARD);
        call.B = B, call.T = T, call.C = C;
        call.num_buckets = token_index_build(&counter, index_rows, bucket_token, bucket_start, tokens, (int)rows);
        token_counter_free(&counter);
        float *dwte = random_floats(&arena, wte_n, 0, 1, 2), *dwpe = random_floats(&arena, wpe_n, 0, 1, 3);
        float* dout = random_bf16(&arena, rows * C, 0, 1, 4);
        arg_add(&call, "dwte", ARG_F32, ARG_INOUT, dwte, wte_n);
        arg_add(&call, "dwpe", ARG_F32, ARG_INOUT, dwpe, wpe_n);
        arg_add(&call, "dout", ARG_BF16, ARG_IN, dout, rows * C);
        arg_add(&call, "index_rows", ARG_I32, ARG_IN, index_rows, rows);
        arg_add(&call, "bucket_token", ARG_I32, ARG_IN, bucket_token, (size_t)call.num_buckets);
        arg_add(&call, "bucket_start", ARG_I32, ARG_IN, bucket_start, (size_t)call.num_buckets + 1);
        // FP64 truth: initial value + every row's contribution
        double *truth = arena_doubles(&arena, wte_n + wpe_n), *magnitude = arena_doubles(&arena, wte_n + wpe_n);
        for (size_t k = 0; k < wte_n + wpe_n; k++) {
            truth[k] = (double)(k < wte_n ? dwte[k] : dwpe[k - wte_n]);
            magnitude[k] = fabs(truth[k]);
        }
        for (size_t k = 0; k < rows * C; k++) {
            size_t row = k / (size_t)C, c = k % (size_t)C;
            size_t at[2] = {(size_t)tokens[row] * C + c, wte_n + row % (size_t)T * C + c};
            for (int j = 0; j < 2; j++) {
                truth[at[j]] += (double)dout[k];
                magnitude[at[j]] += fabs((double)dout[k]);
            }
        }
        char what[96];
        snprintf(what, sizeof(what), "B %d, T %d, C %d, V %d", B, T, C, V);
        Rule rules[] = {rule_sum("dwte", (double)rows, magnitude), rule_sum("dwpe", B, magnitude + wte_n)};
        OpOutcome outcome = run_case(&arena, what, &call, rules, 2);
        for (size_t k = 0; k < wte_n + wpe_n; k++) {
            float got =
                k < wte_n ? arg_floats(&outcome.subject, "dwte")[k] : arg_floats(&outcome.subject, "dwpe")[k - wte_n];
            expect(fabs((double)got - truth[k]) <= sum_factor((double)rows) * magnitude[k],
                   "%s: element %zu is %.9g, want %.9g", what, k, (double)got, truth[k]);
        }
        arena_free(&arena);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// layernorm

typedef struct {
    int rows, C;
    double mean; // of the inputs: far from zero, a variance from a difference of squares would fall apart
} LayerNormShape;

// On an H200: tiles of 32 rows, of 64 at 8432 and of 128 at 16880, the last tile not full; above 4096 columns clusters
// of 2 and 4 blocks, the last one with fewer columns or not; more tiles than blocks that run at once.
static const LayerNormShape layernorm_shapes[] = {
    {16, 16, 0},   {48, 48, 0.5}, {64, 64, 16},   {208, 768, 0}, {32, 1600, 3},  {32, 2048, 0},  {48, 2064, 0.5},
    {16, 4112, 0}, {16, 8208, 0}, {16, 12288, 3}, {8432, 16, 0}, {112, 4096, 0}, {1008, 768, 0}, {43024, 16, 0},
    {16880, 32, 1}};
enum { NUM_LAYERNORM_SHAPES = 15 };
// BF16 only: columns that are no multiple of 16
static const LayerNormShape layernorm_wide_shapes[] = {
    {1, 8, 0}, {43003, 8, 0}, {37, 776, 0}, {45, 2056, 3}, {13, 8200, 0}};
enum { NUM_LAYERNORM_WIDE_SHAPES = 5 };

// With a branch: sum is written and normalised. Without (branch NULL): `in` is normalised.
static void layernorm_forward_case(LayerNormShape s, int rows, int with_branch, int with_fp8) {
    Arena arena = {};
    int C = s.C;
    size_t n = (size_t)rows * C;
    OpCall call = op_call(OP_LAYERNORM_FORWARD);
    call.rows = rows, call.C = C;
    arg_add(&call, "mean", ARG_F32, ARG_OUT, arena_floats(&arena, (size_t)rows), (size_t)rows);
    arg_add(&call, "rstd", ARG_F32, ARG_OUT, arena_floats(&arena, (size_t)rows), (size_t)rows);
    arg_add(&call, "in", ARG_BF16, ARG_IN, random_bf16(&arena, n, s.mean, 1, 1), n);
    if (with_branch) {
        arg_add(&call, "sum", ARG_BF16, ARG_OUT, arena_floats(&arena, n), n);
        arg_add(&call, "branch", ARG_BF16, ARG_IN, random_bf16(&arena, n, 0, 1, 2), n);
        arg_add(&call, "branch_bias", ARG_BF16, ARG_IN, random_bf16(&arena, (size_t)C, 0, 0.5, 3), (size_t)C);
    }
    arg_add(&call, "weight", ARG_BF16, ARG_IN, random_bf16(&arena, (size_t)C, 1, 0.5, 4), (size_t)C);
    arg_add(&call, "bias", ARG_BF16, ARG_IN, random_bf16(&arena, (size_t)C, 0, 0.5, 5), (size_t)C);
    add_forms(&arena, &call, (size_t)rows, (size_t)C);
    char what[128];
    snprintf(what, sizeof(what), "rows %d, C %d, mean %g, branch %d", rows, C, s.mean, with_branch);
    // mean: a sum of C terms of size |mean| + 1. rstd: C squares; around the mean, as it must be
    Rule mean = {"mean", RULE_F32, sum_factor(C) * (s.mean + 2.0), 0, 0, 0, NULL};
    // y: off by the mean's error, too, which is relative to the mean and not to the deviation
    double noise = 16.0 + 0.25 * s.mean * sqrt((double)C);
    Rule rules[] = {rule_exact("sum"),
                    mean,
                    rule_relative("rstd", 2.0 * sum_factor(C)),
                    rule_bf16("wide", noise),
                    rule_codes("data"),
                    rule_codes("transposed"),
                    rule_slot("slot")};
    if (with_fp8) {
        run_forms(&arena, what, call, E4M3_MAX, 300.0f, 1, (size_t)rows, (size_t)C, rules, 7);
    } else {
        OpCall wide = call_without(&call, "data");
        wide = call_without(&wide, "transposed");
        run_case(&arena, what, &wide, rules, 7);
    }
    arena_free(&arena);
}

static void ops_layernorm_forward(void) {
    if (op_test_skipped()) { return; }
    for (int i = 0; i < NUM_LAYERNORM_SHAPES; i++) {
        LayerNormShape s = layernorm_shapes[i];
        if (!op_floors.thorough && (size_t)s.rows * s.C > 200000) { continue; }
        for (int with_branch = 0; with_branch < 2; with_branch++) {
            layernorm_forward_case(s, s.rows, with_branch, 1);
            layernorm_forward_case(s, s.rows - 11, with_branch, 0); // BF16: any number of rows
        }
    }
    for (int i = 0; i < NUM_LAYERNORM_WIDE_SHAPES; i++) {
        for (int with_branch = 0; with_branch < 2; with_branch++) {
            layernorm_forward_case(layernorm_wide_shapes[i], layernorm_wide_shapes[i].rows, with_branch, 0);
        }
    }
}

static void layernorm_backward_case(LayerNormShape s, int rows, int with_residual, int with_fp8) {
    Arena arena = {};
    int C = s.C;
    size_t n = (size_t)rows * C, cols = (size_t)C;
    float* x = random_bf16(&arena, n, s.mean, 1, 1);
    float* dy = random_bf16(&arena, n, 0, 0.01, 2);
    float* weight = random_bf16(&arena, cols, 1, 0.5, 3);
    float *mean = arena_floats(&arena, (size_t)rows), *rstd = arena_floats(&arena, (size_t)rows);
    float *dweight = random_floats(&arena, cols, 0, 0.1, 4), *dbias = random_floats(&arena, cols, 0, 0.1, 5);
    float* dbranch_bias = random_floats(&arena, cols, 0, 0.1, 6);
    float* dresidual = random_bf16(&arena, n, 0, 0.01, 7);
    float* normalised_dy = arena_floats(&arena, n); // terms of dweight
    for (int r = 0; r < rows; r++) {
        double sum = 0.0, squares = 0.0;
        for (int c = 0; c < C; c++) {
            sum += (double)x[(size_t)r * C + c];
        }
        for (int c = 0; c < C; c++) {
            squares += pow((double)x[(size_t)r * C + c] - sum / C, 2.0);
        }
        mean[r] = (float)(sum / C);
        rstd[r] = (float)(1.0 / sqrt(squares / C + 1e-5));
        for (int c = 0; c < C; c++) {
            size_t k = (size_t)r * C + c;
            normalised_dy[k] = dy[k] * (x[k] - mean[r]) * rstd[r];
        }
    }
    OpCall call = op_call(OP_LAYERNORM_BACKWARD);
    call.rows = rows, call.C = C;
    arg_add(&call, "dweight", ARG_F32, ARG_INOUT, dweight, cols);
    arg_add(&call, "dbias", ARG_F32, ARG_INOUT, dbias, cols);
    arg_add(&call, "dbranch_bias", ARG_F32, ARG_INOUT, dbranch_bias, cols);
    arg_add(&call, "dy", ARG_BF16, ARG_IN, dy, n);
    arg_add(&call, "x", ARG_BF16, ARG_IN, x, n);
    arg_add(&call, "mean", ARG_F32, ARG_IN, mean, (size_t)rows);
    arg_add(&call, "rstd", ARG_F32, ARG_IN, rstd, (size_t)rows);
    arg_add(&call, "weight", ARG_BF16, ARG_IN, weight, cols);
    add_forms(&arena, &call, (size_t)rows, cols);
    if (with_residual == 1) { arg_add(&call, "dresidual", ARG_BF16, ARG_IN, dresidual, n); }
    if (with_residual == 2) { // in place: the gradient arrives in the very memory that dx is written to
        Arg* wide = arg_find(&call, "wide");
        wide->role = ARG_INOUT;
        wide->host = dresidual;
        arg_add(&call, "dresidual", ARG_BF16, ARG_IN, dresidual, n);
        arg_find(&call, "dresidual")->alias = "wide";
    }
    char what[128];
    snprintf(what, sizeof(what), "rows %d, C %d, mean %g, residual %d", rows, C, s.mean, with_residual);
    double noise = 0.01 * (16.0 + 0.25 * s.mean * sqrt((double)C));
    Rule rules[] = {rule_sum("dweight", rows, column_magnitudes(&arena, dweight, normalised_dy, (size_t)rows, cols)),
                    rule_sum("dbias", rows, column_magnitudes(&arena, dbias, dy, (size_t)rows, cols)),
                    rule_ignore("dbranch_bias"),
                    rule_bf16("wide", noise),
                    rule_codes("data"),
                    rule_codes("transposed"),
                    rule_slot("slot")};
    OpOutcome outcome;
    if (with_fp8) {
        outcome = run_forms(&arena, what, call, E5M2_MAX, 1e6f, 0, (size_t)rows, cols, rules, 7);
    } else {
        OpCall wide = call_without(&call, "data");
        wide = call_without(&wide, "transposed");
        if (with_residual == 0) { wide = call_without(&wide, "dbranch_bias"); }
        outcome = run_case(&arena, what, &wide, rules, 7);
    }
    // the bias gradient below sums dx as stored: judged by the floor's own dx
    const OpCall* calls[2] = {&outcome.reference, &outcome.subject};
    for (int i = 0; i < 2 && arg_find(calls[i], "dbranch_bias") != NULL; i++) {
        expect_column_sums(what, "dbranch_bias", arg_floats(calls[i], "dbranch_bias"), dbranch_bias,
                           arg_floats(calls[i], "wide"), (size_t)rows, cols);
    }
    arena_free(&arena);
}

static void ops_layernorm_backward(void) {
    if (op_test_skipped()) { return; }
    for (int i = 0; i < NUM_LAYERNORM_SHAPES; i++) {
        LayerNormShape s = layernorm_shapes[i];
        if (!op_floors.thorough && (size_t)s.rows * s.C > 200000) { continue; }
        for (int with_residual = 0; with_residual < 3; with_residual++) {
            layernorm_backward_case(s, s.rows, with_residual, 1);
            layernorm_backward_case(s, s.rows - 11, with_residual, 0);
        }
    }
    for (int i = 0; i < NUM_LAYERNORM_WIDE_SHAPES; i++) {
        for (int with_residual = 0; with_residual < 3; with_residual++) {
            layernorm_backward_case(layernorm_wide_shapes[i], layernorm_wide_shapes[i].rows, with_residual, 0);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// gelu

static const int gelu_shapes[][2] = {{16, 16}, {48, 64}, {64, 192}, {112, 3072}, {208, 6400}, {1008, 3072}};
enum { NUM_GELU_SHAPES = 6 };

// Arguments where an implementation in FP32 could break: far out, zero, and where tanh saturates.
static float* gelu_argument(Arena* arena, size_t n) {
    float* x = random_bf16(arena, n, 0, 2, 1);
    const float specials[] = {0.0f, -0.0f, 20.0f, -20.0f, 1e4f, -1e4f, 5.0f, -5.0f, 1e-20f, -1e-20f};
    for (size_t i = 0; i < 10 && 7 * i < n; i++) {
        x[7 * i] = bf16_round(specials[i]);
    }
    return x;
}

static void ops_gelu_forward(void) {
    if (op_test_skipped()) { return; }
    for (int i = 0; i < NUM_GELU_SHAPES; i++) {
        for (int odd = 0; odd < 2; odd++) {
            int rows = gelu_shapes[i][0] - 11 * odd, C = gelu_shapes[i][1];
            if (!op_floors.thorough && (size_t)rows * C > 400000) { continue; }
            Arena arena = {};
            size_t n = (size_t)rows * C;
            OpCall call = op_call(OP_GELU_FORWARD);
            call.rows = rows, call.C = C;
            arg_add(&call, "x", ARG_BF16, ARG_IN, gelu_argument(&arena, n), n);
            arg_add(&call, "bias", ARG_BF16, ARG_IN, random_bf16(&arena, (size_t)C, 0, 0.5, 2), (size_t)C);
            add_forms(&arena, &call, (size_t)rows, (size_t)C);
            char what[96];
            snprintf(what, sizeof(what), "rows %d, C %d", rows, C);
            Rule rules[] = {rule_bf16("wide", 8.0), rule_codes("data"), rule_codes("transposed"), rule_slot("slot")};
            if (odd) {
                OpCall wide = call_without(&call, "data");
                wide = call_without(&wide, "transposed");
                run_case(&arena, what, &wide, rules, 4);
            } else {
                run_forms(&arena, what, call, E4M3_MAX, 100.0f, 1, (size_t)rows, (size_t)C, rules, 4);
            }
            arena_free(&arena);
        }
    }
}

static void gelu_backward_case(int rows, int C, int with_fp8, int in_place) {
    Arena arena = {};
    size_t n = (size_t)rows * C, cols = (size_t)C;
    float* dy = random_bf16(&arena, n, 0, 0.01, 3);
    float* dbias = random_floats(&arena, cols, 0, 0.1, 4);
    OpCall call = op_call(OP_GELU_BACKWARD);
    call.rows = rows, call.C = C;
    arg_add(&call, "x", ARG_BF16, ARG_IN, gelu_argument(&arena, n), n);
    arg_add(&call, "bias", ARG_BF16, ARG_IN, random_bf16(&arena, cols, 0, 0.5, 2), cols);
    arg_add(&call, "dbias", ARG_F32, ARG_INOUT, dbias, cols);
    add_forms(&arena, &call, (size_t)rows, cols);
    arg_add(&call, "dy", ARG_BF16, ARG_IN, dy, n);
    if (in_place) {
        arg_find(&call, "wide")->role = ARG_INOUT;
        arg_find(&call, "wide")->host = dy;
        arg_find(&call, "dy")->alias = "wide";
    }
    char what[96];
    snprintf(what, sizeof(what), "rows %d, C %d, in place %d", rows, C, in_place);
    // |gelu'| <= 1.13, so the terms of dbias are at most 1.13 |dy|
    double* magnitude = column_magnitudes(&arena, dbias, dy, (size_t)rows, cols);
    Rule rules[] = {rule_bf16("wide", 0.05), rule_codes("data"), rule_codes("transposed"), rule_slot("slot"),
                    rule_sum("dbias", rows, magnitude)};
    if (with_fp8) {
        run_forms(&arena, what, call, E5M2_MAX, 1e6f, !in_place, (size_t)rows, cols, rules, 5);
    } else {
        OpCall wide = call_without(&call, "data");
        wide = call_without(&wide, "transposed");
        run_case(&arena, what, &wide, rules, 5);
    }
    arena_free(&arena);
}

static void ops_gelu_backward(void) {
    if (op_test_skipped()) { return; }
    for (int i = 0; i < NUM_GELU_SHAPES; i++) {
        int rows = gelu_shapes[i][0], C = gelu_shapes[i][1];
        if (!op_floors.thorough && (size_t)rows * C > 400000) { continue; }
        gelu_backward_case(rows, C, 1, 0);
        gelu_backward_case(rows, C, 1, 1);
        gelu_backward_case(rows - 11, C, 0, 0);
        gelu_backward_case(rows - 11, C, 0, 1);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// quantize: pure rounding, so the codec itself is the judge, bit for bit

static const int quantize_shapes[][2] = {{16, 16}, {48, 80}, {112, 192}, {64, 4096}, {1008, 1600}};
enum { NUM_QUANTIZE_SHAPES = 5 };

// Inputs with every kind of value that matters to the codec; `damage` 1: an infinity, 2: a NaN.
static float* quantize_argument(Arena* arena, size_t n, double deviation, int damage) {
    float* x = random_bf16(arena, n, 0, deviation, 1);
    for (size_t i = 0; i < n; i += 5) {
        x[i] = bf16_round(ldexpf(x[i], -(int)(i % 37))); // down into the subnormals and to zero
    }
    x[n / 2] = -0.0f;
    if (damage == 1) { x[n / 3] = -INFINITY; }
    if (damage == 2) { x[n / 3] = NAN; }
    return x;
}

// The codes and the slot that the contract demands, computed from the definition.
static void judge_quantized(const char* what, const OpCall* before, const OpCall* after, const float* x, size_t n,
                            int e5m2) {
    ScaleSlot want = *arg_slot(before, "slot");
    float amax = 0.0f;
    for (size_t i = 0; i < n; i++) {
        amax = amax_raised(amax, x[i]);
    }
    if (before->measure_first) {
        want.jit_amax = amax;
        scale_slot_set_from_measured(&want, before->recipe);
    }
    if (before->record) { want.amax = amax_raised(want.amax, amax); }
    const ScaleSlot* got = arg_slot(after, "slot");
    expect(same_float(got->scale, want.scale), "%s: scale %a, want %a", what, (double)got->scale, (double)want.scale);
    expect(same_float(got->amax, want.amax), "%s: amax %a, want %a", what, (double)got->amax, (double)want.amax);
    const uint8_t* codes = arg_codes(after, "data");
    for (size_t i = 0; i < n; i++) {
        float scaled = x[i] * want.scale;
        uint8_t code = e5m2 ? e5m2_from_float(scaled) : e4m3_from_float(scaled);
        expect(codes[i] == code, "%s: code %zu of %g is %02x, want %02x", what, i, (double)x[i], codes[i], code);
    }
}

static void quantize_cases(int e5m2) {
    if (op_test_skipped()) { return; }
    for (int i = 0; i < NUM_QUANTIZE_SHAPES; i++) {
        for (int damage = 0; damage < 3; damage++) {
            int rows = quantize_shapes[i][0], cols = quantize_shapes[i][1];
            if (!op_floors.thorough && (size_t)rows * cols > 100000) { continue; }
            for (int slot_case = 0; slot_case < NUM_SLOT_CASES; slot_case++) {
                Arena arena = {};
                size_t n = (size_t)rows * cols, width = (size_t)cols;
                float* x = quantize_argument(&arena, n, e5m2 ? 1e-3 : 3.0, damage);
                float* dbias = random_floats(&arena, width, 0, 0.1, 2);
                OpCall call = op_call(e5m2 ? OP_QUANTIZE_BACKWARD : OP_QUANTIZE_FORWARD);
                call.rows = rows, call.cols = cols;
                arg_add(&call, "wide", ARG_BF16, ARG_IN, x, n);
                arg_add(&call, "data", ARG_CODES, ARG_OUT, arena_codes(&arena, n), n);
                arg_add(&call, "transposed", ARG_CODES, ARG_OUT, arena_codes(&arena, n), n);
                if (e5m2) { arg_add(&call, "dbias", ARG_F32, ARG_INOUT, dbias, width); }
                ScaleSlot* slot = slot_for(&arena, &call, (SlotCase)slot_case, e5m2 ? E5M2_MAX : E4M3_MAX, 1000.0f);
                arg_add(&call, "slot", ARG_SLOTS, ARG_INOUT, slot, 1);
                char what[128];
                snprintf(what, sizeof(what), "rows %d, cols %d, slot case %d, damage %d", rows, cols, slot_case,
                         damage);
                Rule slot_rule = {"slot", RULE_SLOT, 0, 0x1p-23, 0, 0, NULL};
                Rule rules[] = {rule_exact("data"), rule_exact("transposed"), slot_rule, rule_ignore("dbias")};
                OpOutcome outcome = run_case(&arena, what, &call, rules, 4);
                const OpCall* calls[2] = {&outcome.reference, &outcome.subject};
                for (int k = 0; k < 2; k++) {
                    check_fp8_output(what, &call, calls[k], (size_t)rows, width);
                    judge_quantized(what, &call, calls[k], x, n, e5m2);
                    if (e5m2 && damage == 0) {
                        expect_column_sums(what, "dbias", arg_floats(calls[k], "dbias"), dbias, x, (size_t)rows, width);
                    }
                }
                // one form only, and none (then only the bias gradient is made)
                for (int forms = 0; forms < 3; forms++) {
                    OpCall part = call;
                    if (!(forms & 1)) { part = call_without(&part, "data"); }
                    if (!(forms & 2)) { part = call_without(&part, "transposed"); }
                    if (forms == 0) { part = call_without(&part, "slot"); }
                    OpOutcome some = run_case(&arena, what, &part, rules, 4);
                    const char* name = forms == 1 ? "data" : "transposed";
                    if (forms > 0) {
                        compare_exact(what, arg_find(&some.subject, name), arg_find(&outcome.subject, name));
                    }
                }
                arena_free(&arena);
            }
        }
    }
}

static void ops_quantize_forward(void) {
    quantize_cases(0);
}
static void ops_quantize_backward(void) {
    quantize_cases(1);
}

static void ops_quantize_backward_bf16_rows(void) { // a BF16 linear: any number of rows, only the bias gradient
    if (op_test_skipped()) { return; }
    int shapes[][2] = {{1, 48}, {17, 192}, {101, 2304}, {997, 64}};
    for (int i = 0; i < 4; i++) {
        Arena arena = {};
        size_t rows = (size_t)shapes[i][0], cols = (size_t)shapes[i][1];
        float *x = random_bf16(&arena, rows * cols, 0, 1, 1), *dbias = random_floats(&arena, cols, 0, 1, 2);
        OpCall call = op_call(OP_QUANTIZE_BACKWARD);
        call.rows = (int)rows, call.cols = (int)cols;
        arg_add(&call, "wide", ARG_BF16, ARG_IN, x, rows * cols);
        arg_add(&call, "dbias", ARG_F32, ARG_INOUT, dbias, cols);
        Rule rules[] = {rule_ignore("dbias")};
        OpOutcome outcome = run_case(&arena, "dbias alone", &call, rules, 1);
        expect_column_sums("CPU", "dbias", arg_floats(&outcome.reference, "dbias"), dbias, x, rows, cols);
        expect_column_sums("subject", "dbias", arg_floats(&outcome.subject, "dbias"), dbias, x, rows, cols);
        arena_free(&arena);
    }
}

static void ops_quantize_weight(void) {
    if (op_test_skipped()) { return; }
    int shapes[][2] = {{16, 16}, {48, 80}, {288, 96}, {2304, 768}, {1600, 6400}};
    for (int i = 0; i < 5; i++) {
        int OC = shapes[i][0], C = shapes[i][1];
        if (!op_floors.thorough && OC * C > 100000) { continue; }
        Arena arena = {};
        size_t n = (size_t)OC * C;
        float* master = random_floats(&arena, n, 0, 0.02, 1);
        ScaleSlot* slot = (ScaleSlot*)arena_bytes(&arena, sizeof(ScaleSlot));
        scale_slot_init(slot, E4M3_MAX, SLOT_WEIGHT);
        slot->scale = 5000.0f; // saturates some
        slot->amax = 0.25f;    // of the next update: not touched
        OpCall call = op_call(OP_QUANTIZE_WEIGHT);
        call.OC = OC, call.C = C;
        arg_add(&call, "master", ARG_F32, ARG_IN, master, n);
        arg_add(&call, "data", ARG_CODES, ARG_OUT, arena_codes(&arena, n), n);
        arg_add(&call, "transposed", ARG_CODES, ARG_OUT, arena_codes(&arena, n), n);
        arg_add(&call, "slot", ARG_SLOTS, ARG_INOUT, slot, 1);
        char what[96];
        snprintf(what, sizeof(what), "OC %d, C %d", OC, C);
        Rule slot_rule = {"slot", RULE_SLOT, 0, 0x1p-23, 0, 0, NULL};
        Rule rules[] = {rule_exact("data"), rule_exact("transposed"), slot_rule};
        OpOutcome outcome = run_case(&arena, what, &call, rules, 3);
        const OpCall* calls[2] = {&outcome.reference, &outcome.subject};
        for (int k = 0; k < 2; k++) {
            check_fp8_output(what, &call, calls[k], (size_t)OC, (size_t)C);
            expect(arg_slot(calls[k], "slot")->amax == 0.25f, "%s: amax moved to %g", what,
                   (double)arg_slot(calls[k], "slot")->amax);
            for (size_t j = 0; j < n; j++) {
                uint8_t want = e4m3_from_float(master[j] * 5000.0f);
                expect(arg_codes(calls[k], "data")[j] == want, "%s: code %zu is %02x, want %02x", what, j,
                       arg_codes(calls[k], "data")[j], want);
            }
        }
        arena_free(&arena);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// classifier

// Softmax of a row of logits z, of which the first V count, in FP64.
typedef struct {
    double top, sum; // largest logit, sum of exp(z - top)
} RowSoftmax;

static RowSoftmax softmax_of_row(const float* z, int V) {
    RowSoftmax row = {-INFINITY, 0.0};
    for (int v = 0; v < V; v++) {
        row.top = fmax(row.top, (double)z[v]);
    }
    for (int v = 0; v < V; v++) {
        row.sum += exp((double)z[v] - row.top);
    }
    return row;
}

// log of the sum of exp(z)
static double softmax_lse(RowSoftmax row) {
    return row.top + log(row.sum);
}

// d loss / d z[v]: probability less onehot; 0 in the padding
static double softmax_gradient(RowSoftmax row, const float* z, int v, int target, int V) {
    return v < V ? exp((double)z[v] - row.top) / row.sum - (v == target) : 0.0;
}

static void classifier_case(int rows, int V, int Vp, int with_gradient, double deviation) {
    Arena arena = {};
    size_t n = (size_t)rows * Vp;
    float dloss = 1.0f / 1024.0f;
    float* logits = random_bf16(&arena, n, 0, deviation, 1); // the padding columns hold numbers, too: never looked at
    for (int v = 0; v < V; v += 3) {                         // an offset that exp would not survive
        logits[v] = bf16_round(logits[v] + 300.0f);
    }
    int* targets = random_ints(&arena, (size_t)rows, V, 2);
    OpCall call = op_call(OP_CLASSIFIER);
    call.rows = rows, call.V = V, call.Vp = Vp, call.factor = dloss, call.with_gradient = with_gradient;
    arg_add(&call, "logits", ARG_BF16, ARG_INOUT, logits, n);
    arg_add(&call, "losses", ARG_F32, ARG_OUT, arena_floats(&arena, (size_t)rows), (size_t)rows);
    arg_add(&call, "targets", ARG_I32, ARG_IN, targets, (size_t)rows);
    arg_add(&call, "wide", ARG_BF16, ARG_IN, logits, n);
    arg_find(&call, "wide")->alias = "logits";
    char what[128];
    snprintf(what, sizeof(what), "rows %d, V %d, Vp %d, gradient %d, deviation %g", rows, V, Vp, with_gradient,
             deviation);
    // FP32 noise of the gradient is relative to its terms p and 1, times dloss; of a loss, to the logits
    double largest = largest_of(logits, n);
    Rule losses = {"losses", RULE_F32, FP32_CHAIN * (largest + 16.0), 0, 0, 0, NULL};
    Rule gradient = {"logits", RULE_BF16, FP32_CHAIN * (double)dloss, 0, FLIP_SHARE, 0, NULL};
    Rule rules[] = {with_gradient ? gradient : rule_exact("logits"), losses};
    OpOutcome outcome = run_case(&arena, what, &call, rules, 2);
    const OpCall* calls[2] = {&outcome.reference, &outcome.subject};
    for (int k = 0; k < 2; k++) {
        const float* got = arg_floats(calls[k], "logits");
        for (int r = 0; r < rows; r++) {
            const float* z = logits + (size_t)r * Vp;
            RowSoftmax row = softmax_of_row(z, V);
            double loss = softmax_lse(row) - (double)z[targets[r]];
            double loss_got = (double)arg_floats(calls[k], "losses")[r];
            expect(fabs(loss_got - loss) <= losses.absolute, "%s: loss %d = %.9g, want %.9g", what, r, loss_got, loss);
            for (int v = 0; v < Vp; v++) {
                double want = with_gradient ? softmax_gradient(row, z, v, targets[r], V) * (double)dloss : (double)z[v];
                double allowed = with_gradient && v < V ? bf16_ulp(want) + FP32_CHAIN * (double)dloss : 0.0;
                double value = (double)got[(size_t)r * Vp + v];
                expect(fabs(value - want) <= allowed, "%s: logits[%d, %d] became %.9g, want %.9g", what, r, v, value,
                       want);
            }
        }
    }
    arena_free(&arena);
}

// The gradient in FP8 against FP64: every code that of the exact value or its neighbour, and few of the latter. The
// scale is the program's: dloss becomes 2^15. `deviation` 3 gives probabilities from below 2^-32 (which become 0) to 1.
// A floor may find p from the log-sum-exp s, by way of 4 roundings of numbers up to s / ln 2: a relative error of p of
// up to 2^-24 * 4 / ln 2 * s; and 2 ulp of exp2 in p and in the sum, one rounding each of sum, quotient and product
// make 2^-24 * 11. Both are far below a step of E5M2 unless p - 1 cancels: there they are allowed as they are.
static void classifier_fp8_case(int rows, int V, int Vp, double deviation) {
    Arena arena = {};
    size_t n = (size_t)rows * Vp;
    float dloss = 1.0f / 1536.0f;
    float* logits = random_bf16(&arena, n, 0, deviation, 1);
    for (int v = 0; v < V; v += 3) {
        logits[v] = bf16_round(logits[v] + 300.0f);
    }
    int* targets = random_ints(&arena, (size_t)rows, V, 2);
    ScaleSlot* slot = (ScaleSlot*)arena_bytes(&arena, sizeof(ScaleSlot));
    scale_slot_init(slot, E5M2_MAX, SLOT_STATIC);
    slot->scale = 0x1p15f / dloss;
    slot->descale = 12345.0f; // of bytes that are no more
    slot->amax = 0.25f;
    OpCall call = op_call(OP_CLASSIFIER);
    call.rows = rows, call.V = V, call.Vp = Vp, call.factor = dloss, call.with_gradient = 1;
    arg_add(&call, "logits", ARG_BF16, ARG_INOUT, logits, n);
    arg_add(&call, "losses", ARG_F32, ARG_OUT, arena_floats(&arena, (size_t)rows), (size_t)rows);
    arg_add(&call, "targets", ARG_I32, ARG_IN, targets, (size_t)rows);
    arg_add(&call, "data", ARG_CODES, ARG_OUT, arena_codes(&arena, n), n);
    arg_add(&call, "transposed", ARG_CODES, ARG_OUT, arena_codes(&arena, n), n);
    arg_add(&call, "slot", ARG_SLOTS, ARG_INOUT, slot, 1);
    char what[128];
    snprintf(what, sizeof(what), "FP8, rows %d, V %d, Vp %d, deviation %g", rows, V, Vp, deviation);
    Rule losses = {"losses", RULE_F32, FP32_CHAIN * (largest_of(logits, n) + 16.0), 0, 0, 0, NULL};
    // both floors are judged below
    Rule rules[] = {rule_exact("logits"), losses, rule_ignore("data"), rule_ignore("transposed"), rule_slot("slot")};
    OpOutcome outcome = run_case(&arena, what, &call, rules, 5);
    const OpCall* calls[2] = {&outcome.reference, &outcome.subject};
    for (int k = 0; k < 2; k++) {
        check_fp8_output(what, &call, calls[k], (size_t)rows, (size_t)Vp);
        expect(arg_slot(calls[k], "slot")->amax == 0.25f, "%s: the amax of a static slot moved", what);
        const uint8_t* codes = arg_codes(calls[k], "data");
        size_t flips = 0;
        for (int r = 0; r < rows; r++) {
            const float* z = logits + (size_t)r * Vp;
            RowSoftmax row = softmax_of_row(z, V);
            for (int v = 0; v < Vp; v++) {
                double want = softmax_gradient(row, z, v, targets[r], V) * 0x1p15;
                int code = codes[(size_t)r * Vp + v], exact = e5m2_from_float((float)want);
                int distance = abs((code & 127) - (exact & 127));
                int same_sign = ((code ^ exact) & 128) == 0 || (code & 127) + (exact & 127) <= 1;
                double off = fabs((double)float_from_e5m2((uint8_t)code) - want);
                double chain = 0x1p15 * 0x1p-24 * (11.0 + 4.0 * 1.4427 * fabs(softmax_lse(row)));
                if (v == targets[r] && off <= chain) { continue; }
                expect(v < V ? distance <= 1 && same_sign : code == 0, "%s: code (%d, %d) is %02x, want %02x", what, r,
                       v, code, exact);
                flips += distance != 0;
            }
        }
        expect((double)flips <= 4.0 + FLIP_SHARE * (double)n, "%s: %zu of %zu codes are off by one", what, flips, n);
    }
    OpCall part = call_without(&call, "transposed");
    OpOutcome row_major = run_case(&arena, what, &part, rules, 5);
    compare_exact(what, arg_find(&row_major.subject, "data"), arg_find(&outcome.subject, "data"));
    arena_free(&arena);
}

static void ops_classifier_fp8(void) {
    if (op_test_skipped()) { return; }
    int shapes[][3] = {{16, 1, 128},    {64, 128, 128}, {80, 257, 384},    {208, 300, 304},    {16, 5, 16},
                       {32, 100, 272},  {256, 17, 32},  {272, 17, 48},     {48, 8191, 8192},   {592, 4099, 4112},
                       {16, 55001, 55008}, {144, 50257, 50304}};
    for (int i = 0; i < (op_floors.thorough ? 12 : 9); i++) {
        classifier_fp8_case(shapes[i][0], shapes[i][1], shapes[i][2], 3.0);
    }
    classifier_fp8_case(16, 300, 384, 100.0); // certain
    classifier_fp8_case(2064, 257, 384, 1.0); // many bands, more rows than blocks
}

static void ops_classifier(void) {
    if (op_test_skipped()) { return; }
    // an H200 keeps 57600 columns of a row in shared memory; 4500 and 600 rows are more than blocks that run at once
    int shapes[][3] = {{1, 1, 128},        {7, 128, 128},     {17, 257, 384},      {64, 300, 384},    {3, 1, 8},
                       {9, 1001, 1016},    {2, 57590, 57600}, {2, 57601, 57608},   {4500, 99, 104},   {33, 8191, 8192},
                       {5, 50257, 50304},  {129, 50257, 50304}, {600, 4100, 4104}, {2, 115713, 115720}};
    for (int i = 0; i < (op_floors.thorough ? 14 : 11); i++) {
        for (int with_gradient = 0; with_gradient < 2; with_gradient++) {
            classifier_case(shapes[i][0], shapes[i][1], shapes[i][2], with_gradient, 3.0);
        }
    }
    classifier_case(16, 300, 384, 1, 100.0); // certain: p is 0 or 1 to the last bit
}

} // namespace ops

#endif

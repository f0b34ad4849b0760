// Tests of attention, both passes, judged in FP64; its FP8 forms by what quantize makes of its BF16.
//
// The kernel may hold P (and dS) in BF16 between its two products, and stores its result in BF16: two roundings of rms
// 2^-9, in the backward pass on top of each other in dS and again in the product. lse is FP32: HS products of size
// |q||k| / sqrt(HS) and an exponential.
#ifndef TEST_OPS_ATTENTION_H
#define TEST_OPS_ATTENTION_H

#include "test_ops_tools.h"
#include "test_ops_rows.h" // judge_quantized

namespace ops {

static void attention_truth(double* out, double* lse, const float* qkv, int B, int T, int NH, int HS) {
    size_t C = (size_t)NH * HS, stride = 3 * C;
    double factor = 1.0 / sqrt((double)HS);
#ifdef _OPENMP
#pragma omp parallel for schedule(dynamic)
#endif
    for (int bh = 0; bh < B * NH; bh++) {
        double* p = (double*)malloc_or_die((size_t)T * sizeof(double));
        const float* base = qkv + (size_t)(bh / NH) * T * stride + (size_t)(bh % NH) * HS;
        for (int t = 0; t < T; t++) {
            const float* q = base + (size_t)t * stride;
            double largest = -INFINITY, sum = 0.0;
            for (int s = 0; s <= t; s++) {
                double dot = 0.0;
                for (int i = 0; i < HS; i++) {
                    dot += (double)q[i] * (double)base[(size_t)s * stride + C + i];
                }
                p[s] = dot * factor;
                largest = fmax(largest, p[s]);
            }
            for (int s = 0; s <= t; s++) {
                sum += p[s] = exp(p[s] - largest);
            }
            lse[(size_t)bh * T + t] = largest + log(sum);
            for (int i = 0; i < HS; i++) {
                double o = 0.0;
                for (int s = 0; s <= t; s++) {
                    o += p[s] / sum * (double)base[(size_t)s * stride + 2 * C + i];
                }
                out[((size_t)(bh / NH) * T + t) * C + (size_t)(bh % NH) * HS + i] = o;
            }
        }
        free(p);
    }
}

// From the very out and lse that the op is given.
static void attention_backward_truth(double* dqkv, const float* dout, const float* out, const float* lse,
                                     const float* qkv, int B, int T, int NH, int HS) {
    size_t C = (size_t)NH * HS, stride = 3 * C;
    double factor = 1.0 / sqrt((double)HS);
#ifdef _OPENMP
#pragma omp parallel for schedule(dynamic)
#endif
    for (int bh = 0; bh < B * NH; bh++) {
        size_t first = (size_t)(bh / NH) * T, head = (size_t)(bh % NH) * HS;
        const float* base = qkv + first * stride + head;
        double* d = dqkv + first * stride + head;
        for (int t = 0; t < T; t++) {
            const float *o = out + (first + t) * C + head, *g = dout + (first + t) * C + head;
            double D = 0.0;
            for (int i = 0; i < HS; i++) {
                D += (double)o[i] * (double)g[i];
            }
            for (int s = 0; s <= t; s++) {
                const float *q = base + (size_t)t * stride, *k = base + (size_t)s * stride + C, *v = k + C;
                double dot = 0.0, dp = 0.0;
                for (int i = 0; i < HS; i++) {
                    dot += (double)q[i] * (double)k[i];
                    dp += (double)g[i] * (double)v[i];
                }
                double p = exp(dot * factor - (double)lse[(size_t)bh * T + t]), ds = p * (dp - D) * factor;
                for (int i = 0; i < HS; i++) {
                    d[(size_t)t * stride + i] += ds * (double)k[i];
                    d[(size_t)s * stride + C + i] += ds * (double)q[i];
                    d[(size_t)s * stride + 2 * C + i] += p * (double)g[i];
                }
            }
        }
    }
}

// Distance of one of Q, K, V's third of (BT, 3C) from the truth.
static double third_distance(const float* got, const double* truth, size_t rows, size_t C, int third) {
    double difference = 0.0, norm = 0.0;
    for (size_t i = 0; i < rows * 3 * C; i++) {
        if ((int)(i / C % 3) != third) { continue; }
        difference += ((double)got[i] - truth[i]) * ((double)got[i] - truth[i]);
        norm += truth[i] * truth[i];
    }
    return norm > 0.0 ? sqrt(difference / norm) : sqrt(difference);
}

// out in BF16 and lse, from qkv (B T, 3 C)
static OpCall attention_forward_call(Arena* arena, float* qkv, int B, int T, int NH, int HS) {
    size_t rows = (size_t)B * T, C = (size_t)NH * HS, stats = rows * NH;
    OpCall call = op_call(OP_ATTENTION_FORWARD);
    call.B = B, call.T = T, call.NH = NH, call.HS = HS;
    arg_add(&call, "wide", ARG_BF16, ARG_OUT, arena_floats(arena, rows * C), rows * C);
    arg_add(&call, "lse", ARG_F32, ARG_OUT, arena_floats(arena, stats), stats);
    arg_add(&call, "qkv", ARG_BF16, ARG_IN, qkv, rows * 3 * C);
    return call;
}

// attention_backward to the BF16 form of dqkv, argument "wide".
static OpCall attention_backward_call(Arena* arena, float* dout, float* out, float* lse, float* qkv, int B, int T,
                                      int NH, int HS) {
    size_t rows = (size_t)B * T, C = (size_t)NH * HS;
    OpCall call = op_call(OP_ATTENTION_BACKWARD);
    call.B = B, call.T = T, call.NH = NH, call.HS = HS;
    arg_add(&call, "wide", ARG_BF16, ARG_OUT, arena_floats(arena, rows * 3 * C), rows * 3 * C);
    arg_add(&call, "dout", ARG_BF16, ARG_IN, dout, rows * C);
    arg_add(&call, "out", ARG_BF16, ARG_IN, out, rows * C);
    arg_add(&call, "lse", ARG_F32, ARG_IN, lse, (size_t)B * NH * T);
    arg_add(&call, "qkv", ARG_BF16, ARG_IN, qkv, rows * 3 * C);
    return call;
}

static void attention_case(int B, int T, int NH, int HS, double deviation) {
    Arena arena = {};
    size_t rows = (size_t)B * T, C = (size_t)NH * HS, stats = rows * NH;
    float* qkv = random_bf16(&arena, rows * 3 * C, 0, deviation, 1);
    double *out_truth = arena_doubles(&arena, rows * C), *lse_truth = arena_doubles(&arena, stats);
    attention_truth(out_truth, lse_truth, qkv, B, T, NH, HS);
    char what[128];
    snprintf(what, sizeof(what), "B %d, T %d, NH %d, HS %d, deviation %g", B, T, NH, HS, deviation);
    OpCall forward = attention_forward_call(&arena, qkv, B, T, NH, HS);
    Rule forward_rules[] = {rule_ignore("wide"), rule_ignore("lse")};
    OpOutcome f = run_case(&arena, what, &forward, forward_rules, 2);

    float *out = arena_floats(&arena, rows * C), *lse = arena_floats(&arena, stats);
    for (size_t i = 0; i < rows * C; i++) {
        out[i] = bf16_round((float)out_truth[i]);
    }
    for (size_t i = 0; i < stats; i++) {
        lse[i] = (float)lse_truth[i];
    }
    float* dout = random_bf16(&arena, rows * C, 0, 1e-3, 2);
    double* dqkv_truth = arena_doubles(&arena, rows * 3 * C);
    attention_backward_truth(dqkv_truth, dout, out, lse, qkv, B, T, NH, HS);
    OpCall backward = attention_backward_call(&arena, dout, out, lse, qkv, B, T, NH, HS);
    Rule backward_rules[] = {rule_ignore("wide")};
    OpOutcome b = run_case(&arena, what, &backward, backward_rules, 1);

    // the largest score: how many FP32 ulps a score can be off
    double score = 0.0;
    for (size_t i = 0; i < stats; i++) {
        score = fmax(score, fabs(lse_truth[i]));
    }
    const OpCall *fs[2] = {&f.reference, &f.subject}, *bs[2] = {&b.reference, &b.subject};
    for (int i = 0; i < 2; i++) {
        const char* floor = i == 0 ? "CPU floor" : op_floors.subject->name;
        double distance = relative_distance_f64(arg_floats(fs[i], "wide"), out_truth, rows * C);
        expect(distance <= 0x1p-8, "%s: out of the %s is %.3g off, want %.3g", what, floor, distance, 0x1p-8);
        for (size_t k = 0; k < stats; k++) {
            double got = (double)arg_floats(fs[i], "lse")[k],
                   allowed = 0x1p-20 * (score + deviation * deviation * 16.0 + 4.0);
            expect(fabs(got - lse_truth[k]) <= allowed, "%s: lse[%zu] of the %s = %.9g, want %.9g +- %.2g", what, k,
                   floor, got, lse_truth[k], allowed);
        }
        // T = 1: P is 1 and dS = dP - D is what is left of equal numbers, so dq and dk say nothing but "small"
        double v_size = 0.0;
        for (size_t k = 0; k < rows * 3 * C; k++) {
            v_size = fmax(v_size, fabs(dqkv_truth[k]));
        }
        for (int third = 0; third < 3; third++) {
            const char* names[] = {"dq", "dk", "dv"};
            const float* got = arg_floats(bs[i], "wide");
            if (T == 1 && third < 2) {
                expect(largest_of(got, rows * 3 * C) <= 2.0 * v_size, "%s: %s of the %s is large", what, names[third],
                       floor);
                continue;
            }
            double d = third_distance(got, dqkv_truth, rows, C, third), allowed = third == 2 ? 0x1p-8 : 0x1p-7;
            expect(d <= allowed, "%s: %s of the %s is %.3g off, want %.3g", what, names[third], floor, d, allowed);
        }
    }
    arena_free(&arena);
}

// The subject's forward pass, then `times` its backward pass from the very out and lse that it left. With --attention
// auto these may be two libraries: they must mean the same lse. The bits repeat, whichever block is first each time.
static void attention_chain(int B, int T, int NH, int HS, int times) {
    Arena arena = {};
    size_t rows = (size_t)B * T, C = (size_t)NH * HS;
    char what[128];
    snprintf(what, sizeof(what), "forward and %d x backward, B %d, T %d, NH %d, HS %d", times, B, T, NH, HS);
    float *qkv = random_bf16(&arena, rows * 3 * C, 0, 1.0, 3), *dout = random_bf16(&arena, rows * C, 0, 1e-3, 4);
    OpCall forward = attention_forward_call(&arena, qkv, B, T, NH, HS);
    op_floors.subject->op(op_floors.subject_device, &forward);
    expect(forward.broken[0] == 0, "%s: the %s %s", what, op_floors.subject->name, forward.broken);
    expect_no_poison(what, &forward);

    float *out = arg_floats(&forward, "wide"), *lse = arg_floats(&forward, "lse");
    OpCall call = attention_backward_call(&arena, dout, out, lse, qkv, B, T, NH, HS);
    OpCall first = op_call_copy(&arena, &call), again = op_call_copy(&arena, &call);
    for (int i = 0; i < times; i++) {
        OpCall* backward = i == 0 ? &first : &again;
        op_floors.subject->op(op_floors.subject_device, backward);
        expect(backward->broken[0] == 0, "%s: the %s %s", what, op_floors.subject->name, backward->broken);
        expect_no_poison(what, backward);
        if (i > 0) { expect_same_bits(what, &again, &first); }
    }
    double* truth = arena_doubles(&arena, rows * 3 * C);
    attention_backward_truth(truth, dout, out, lse, qkv, B, T, NH, HS);
    for (int third = 0; third < 3; third++) {
        const char* names[] = {"dq", "dk", "dv"};
        double d = third_distance(arg_floats(&first, "wide"), truth, rows, C, third),
               allowed = third == 2 ? 0x1p-8 : 0x1p-7;
        expect(d <= allowed, "%s: %s is %.3g off, want %.3g", what, names[third], d, allowed);
    }
    arena_free(&arena);
}

// Keys that grow along the sequence: the largest score of a row grows with every block of keys, by what exponentials
// around an old maximum can still hold (growth 30: some 2^20 per 64 keys) or cannot (1000: 2^600). Forward only: P is
// one key nearly, and its gradient a difference of equal numbers.
static void attention_growth_case(int T, int HS, double growth) {
    Arena arena = {};
    int B = 2, NH = 2;
    size_t rows = (size_t)B * T, C = (size_t)NH * HS, stats = rows * NH;
    float* qkv = random_bf16(&arena, rows * 3 * C, 0, 1.0, 6);
    for (size_t i = 0; i < rows * 3 * C; i++) {
        if (i / C % 3 == 1) { qkv[i] = bf16_round((float)(qkv[i] * growth * (double)(i / (3 * C) % (size_t)T) / T)); }
    }
    double *out_truth = arena_doubles(&arena, rows * C), *lse_truth = arena_doubles(&arena, stats), score = 0.0;
    attention_truth(out_truth, lse_truth, qkv, B, T, NH, HS);
    for (size_t i = 0; i < stats; i++) {
        score = fmax(score, fabs(lse_truth[i]));
    }
    char what[96];
    snprintf(what, sizeof(what), "T %d, HS %d, growth %g", T, HS, growth);
    OpCall call = attention_forward_call(&arena, qkv, B, T, NH, HS);
    Rule rules[] = {rule_ignore("wide"), rule_ignore("lse")};
    OpOutcome outcome = run_case(&arena, what, &call, rules, 2);
    const OpCall* calls[2] = {&outcome.reference, &outcome.subject};
    for (int i = 0; i < 2; i++) {
        double distance = relative_distance_f64(arg_floats(calls[i], "wide"), out_truth, rows * C);
        expect(distance <= 0x1p-8, "%s: out is %.3g off, want %.3g", what, distance, 0x1p-8);
        for (size_t k = 0; k < stats; k++) {
            double got = (double)arg_floats(calls[i], "lse")[k], allowed = 0x1p-20 * (score + 20.0);
            expect(fabs(got - lse_truth[k]) <= allowed, "%s: lse[%zu] = %.9g, want %.9g +- %.2g", what, k, got,
                   lse_truth[k], allowed);
        }
    }
    arena_free(&arena);
}

static void ops_attention(void) {
    if (op_test_skipped()) { return; }
    int lengths[] = {1, 17, 64, 100, 129}, head_sizes[] = {16, 48, 64, 80, 128};
    for (int i = 0; i < 5; i++) {
        for (int k = 0; k < 5; k++) {
            attention_case(2, lengths[i], 3, head_sizes[k], 1.0);
        }
    }
    attention_case(1, 100, 1, 64, 4.0); // sharp: most of a row on one or two keys
    // head sizes 64 and 128, whose backward pass has kernels of its own: B, T, NH at both sides of the edges of their
    // blocks of 64 and 128. 800 heads of 3 tokens: a GPU's blocks do several items each, so every barrier goes through
    // all its phases, and the heads' sums of dq through all their places
    int shapes[][3] = {{1, 1, 1},   {1, 63, 1},  {3, 65, 2},  {1, 127, 5}, {2, 128, 1},
                       {4, 200, 3}, {1, 257, 4}, {2, 384, 1}, {40, 3, 20}, {8, 130, 12}};
    for (int i = 0; i < 10; i++) {
        attention_case(shapes[i][0], shapes[i][1], shapes[i][2], 64, 1.0);
        attention_case(shapes[i][0], shapes[i][1], shapes[i][2], 128, 1.0);
    }
    attention_case(2, 300, 1, 64, 4.0);
    attention_case(2, 300, 1, 128, 4.0);
    for (int i = 0; i < 4; i++) {
        attention_growth_case(300, i / 2 ? 128 : 64, i % 2 ? 1000.0 : 30.0);
    }
    attention_chain(3, 200, 2, 64, 4);
    attention_chain(3, 200, 2, 128, 4);
    if (op_floors.thorough) {
        attention_case(2, 1024, 2, 64, 1.0);
        attention_case(1, 1024, 1, 128, 1.0);
        attention_case(1, 1000, 25, 64, 1.0);
        attention_case(16, 256, 12, 64, 1.0);
        attention_case(24, 129, 16, 64, 1.0); // 768 items of one or two steps
        attention_chain(2, 1000, 12, 64, 20); // 192 items of up to 8 steps
        attention_chain(2, 1000, 12, 128, 20);
    }
}

// Attention's own FP8 forms are what quantize_forward makes of its BF16 output, to the bit: with a scale that is
// trusted (then a kernel may write them on its way) or measured, wherever tiles of 64 and 128 tokens end, at all head
// sizes.
static void attention_fp8_case(int B, int T, int NH, int HS) {
    Arena arena = {};
    size_t rows = (size_t)B * T, C = (size_t)NH * HS, n = rows * C, stats = rows * NH;
    OpCall base = op_call(OP_ATTENTION_FORWARD);
    base.B = B, base.T = T, base.NH = NH, base.HS = HS;
    add_forms(&arena, &base, rows, C);
    arg_add(&base, "lse", ARG_F32, ARG_OUT, arena_floats(&arena, stats), stats);
    arg_add(&base, "qkv", ARG_BF16, ARG_IN, random_bf16(&arena, n * 3, 0, 1.0, 5), n * 3);
    Rule rules[] = {rule_ignore("wide"), rule_ignore("data"), rule_ignore("transposed"), rule_ignore("lse"),
                    rule_ignore("slot")};
    for (int slot_case = 0; slot_case <= NUM_SLOT_CASES; slot_case++) { // the last: trusted, recorded, not measured
        OpCall call = base;
        int training = slot_case == NUM_SLOT_CASES;
        ScaleSlot* slot =
            slot_for(&arena, &call, training ? SLOT_TRUSTED_MEASURED : (SlotCase)slot_case, E4M3_MAX, 300.0f);
        if (training) { call.measure_first = 0; }
        arg_add(&call, "slot", ARG_SLOTS, ARG_INOUT, slot, 1);
        char what[128];
        snprintf(what, sizeof(what), "B %d, T %d, NH %d, HS %d, slot case %d", B, T, NH, HS, slot_case);
        OpOutcome outcome = run_case(&arena, what, &call, rules, 5);
        const OpCall* calls[2] = {&outcome.reference, &outcome.subject};
        for (int k = 0; k < 2; k++) {
            check_fp8_output(what, &call, calls[k], rows, C);
            judge_quantized(what, &call, calls[k], arg_floats(calls[k], "wide"), n, 0);
        }
        for (int forms = 0; forms < 3; forms++) { // none, data only, transposed only
            OpCall part = call;
            if (!(forms & 1)) { part = call_without(&part, "data"); }
            if (!(forms & 2)) { part = call_without(&part, "transposed"); }
            if (forms == 0) { part = call_without(&part, "slot"); }
            OpOutcome some = run_case(&arena, what, &part, rules, 5);
            const char* names[] = {"wide", "lse", "data", "transposed"};
            for (int i = 0; i < 4; i++) {
                Arg* got = arg_find(&some.subject, names[i]);
                if (got != NULL) { compare_exact(what, got, arg_find(&outcome.subject, names[i])); }
            }
        }
    }
    arena_free(&arena);
}

static void ops_attention_fp8(void) {
    if (op_test_skipped()) { return; }
    int shapes[][4] = {{1, 16, 1, 64},  {2, 64, 3, 64},  {3, 208, 2, 64},  {2, 272, 2, 128}, {1, 144, 1, 128},
                       {16, 17, 2, 64}, {4, 100, 1, 128}, {2, 48, 2, 80}}; // B, T, NH, HS
    for (int i = 0; i < 8; i++) {
        attention_fp8_case(shapes[i][0], shapes[i][1], shapes[i][2], shapes[i][3]);
    }
    if (op_floors.thorough) {
        attention_fp8_case(3, 1040, 25, 64); // more tiles than places on the multiprocessors: several items per block
        attention_fp8_case(2, 1024, 24, 128);
    }
}

// One floor's dqkv in FP8 and its bias gradient: from the BF16 form that the floor itself leaves, codes follow bit for
// bit and column sums within their rounding. `call` has the inputs and dbias.
static void attention_backward_fp8_judge(Arena* arena, const char* floor_name, const Floor* floor, void* device,
                                         const OpCall* call, size_t rows, size_t cols) {
    size_t n = rows * cols;
    const float* start = arg_floats(call, "dbias");
    OpCall wide = *call;
    arg_add(&wide, "wide", ARG_BF16, ARG_OUT, arena_floats(arena, n), n);
    wide = op_call_copy(arena, &wide);
    floor->op(device, &wide);
    expect(wide.broken[0] == 0, "%s: BF16: %s", floor_name, wide.broken);
    expect_no_poison(floor_name, &wide);
    const float* x = arg_floats(&wide, "wide");
    expect_column_sums(floor_name, "dbias", arg_floats(&wide, "dbias"), start, x, rows, cols);
    for (int slot_case = 0; slot_case < NUM_SLOT_CASES; slot_case++) {
        for (int forms = 3; forms >= 1; forms--) {
            OpCall base = *call;
            arg_add(&base, "slot", ARG_SLOTS, ARG_INOUT,
                    slot_for(arena, &base, (SlotCase)slot_case, E5M2_MAX, 20000.0f), 1);
            arg_add(&base, "wide", ARG_BF16, ARG_INOUT, arena_floats(arena, n), n); // scratch: it may stay as it is
            if (forms & 1) { arg_add(&base, "data", ARG_CODES, ARG_OUT, arena_codes(arena, n), n); }
            if (forms & 2) { arg_add(&base, "transposed", ARG_CODES, ARG_OUT, arena_codes(arena, n), n); }
            OpCall got = op_call_copy(arena, &base), again = op_call_copy(arena, &base);
            floor->op(device, &got);
            floor->op(device, &again);
            char what[192];
            snprintf(what, sizeof(what), "%s, B %d, T %d, NH %d, HS %d, slot case %d, forms %d", floor_name, call->B,
                     call->T, call->NH, call->HS, slot_case, forms);
            expect(got.broken[0] == 0, "%s: %s", what, got.broken);
            expect_no_poison(what, &got);
            expect_same_bits(what, &again, &got);
            check_fp8_output(what, &base, &got, rows, cols);
            if (forms & 1) {
                judge_quantized(what, &base, &got, x, n, 1);
            } else { // the same codes, the other way round
                OpCall turned = got;
                uint8_t* codes = arena_codes(arena, n);
                transpose_codes(codes, arg_codes(&got, "transposed"), cols, rows);
                arg_add(&turned, "data", ARG_CODES, ARG_OUT, codes, n);
                judge_quantized(what, &base, &turned, x, n, 1);
            }
            expect_column_sums(what, "dbias", arg_floats(&got, "dbias"), start, x, rows, cols);
        }
    }
}

static void attention_backward_fp8_case(int B, int T, int NH, int HS) {
    Arena arena = {};
    size_t rows = (size_t)B * T, C = (size_t)NH * HS, stats = rows * NH;
    float *qkv = random_bf16(&arena, rows * 3 * C, 0, 1.0, 5), *dout = random_bf16(&arena, rows * C, 0, 1e-3, 6);
    double *out_truth = arena_doubles(&arena, rows * C), *lse_truth = arena_doubles(&arena, stats);
    attention_truth(out_truth, lse_truth, qkv, B, T, NH, HS);
    float *out = arena_floats(&arena, rows * C), *lse = arena_floats(&arena, stats);
    for (size_t i = 0; i < rows * C; i++) {
        out[i] = bf16_round((float)out_truth[i]);
    }
    for (size_t i = 0; i < stats; i++) {
        lse[i] = (float)lse_truth[i];
    }
    OpCall call = op_call(OP_ATTENTION_BACKWARD);
    call.B = B, call.T = T, call.NH = NH, call.HS = HS;
    arg_add(&call, "dbias", ARG_F32, ARG_INOUT, random_floats(&arena, 3 * C, 0, 1e-3, 7), 3 * C);
    arg_add(&call, "dout", ARG_BF16, ARG_IN, dout, rows * C);
    arg_add(&call, "out", ARG_BF16, ARG_IN, out, rows * C);
    arg_add(&call, "lse", ARG_F32, ARG_IN, lse, stats);
    arg_add(&call, "qkv", ARG_BF16, ARG_IN, qkv, rows * 3 * C);
    attention_backward_fp8_judge(&arena, "CPU floor", op_floors.reference, op_floors.reference_device, &call, rows,
                                 3 * C);
    attention_backward_fp8_judge(&arena, op_floors.subject->name, op_floors.subject, op_floors.subject_device, &call,
                                 rows, 3 * C);
    arena_free(&arena);
}

static void ops_attention_backward_fp8(void) {
    if (op_test_skipped()) { return; }
    // B, T, NH, HS: whole blocks of 64 and 128 rows and not; T that is no multiple of 16 while B T is; a head size
    // without kernels of its own; many items of one step
    int shapes[][4] = {{1, 16, 1, 64},  {1, 64, 3, 64},  {2, 144, 2, 64}, {3, 128, 1, 64},  {1, 208, 2, 128},
                       {2, 128, 1, 128}, {2, 72, 2, 64}, {2, 32, 1, 48},  {40, 16, 20, 64}, {1, 400, 2, 64}};
    for (int i = 0; i < 10; i++) {
        attention_backward_fp8_case(shapes[i][0], shapes[i][1], shapes[i][2], shapes[i][3]);
    }
    if (op_floors.thorough) {
        attention_backward_fp8_case(2, 1024, 2, 64);
        attention_backward_fp8_case(1, 1040, 2, 128);
    }
}

// The other attention of the GPU floor, where it is compiled in and found.
static void ops_attention_cudnn(void) {
    if (op_test_skipped()) { return; }
    void* builtin = op_floors.subject_device;
    op_floors.subject_device = op_floors.subject->device_open(0, 0); // ATTENTION_AUTO
    const char* name = op_floors.subject->attention_name(op_floors.subject_device);
    if (strncmp(name, "cudnn", 5) != 0) {
        unit_skip("the attention found is the built-in one");
    } else {
        int shapes[][4] = {{2, 64, 3, 64}, {1, 100, 2, 64}, {2, 128, 2, 128}, {2, 1024, 2, 64}}; // B, T, NH, HS
        for (int i = 0; i < 4; i++) {
            attention_case(shapes[i][0], shapes[i][1], shapes[i][2], shapes[i][3], 1.0);
        }
        attention_chain(3, 200, 2, 64, 4);
        attention_chain(2, 1024, 2, 64, 4);
        attention_chain(2, 300, 2, 128, 2);
        // AUTO leaves some passes to the built-in kernels: cuDNN's by name
        op_floors.subject->device_close(op_floors.subject_device);
        op_floors.subject_device = op_floors.subject->device_open(0, 2); // ATTENTION_CUDNN
        for (int i = 0; i < 4; i++) {
            attention_case(shapes[i][0], shapes[i][1], shapes[i][2], shapes[i][3], 1.0);
        }
        attention_chain(3, 200, 2, 64, 4);
        attention_backward_fp8_case(2, 128, 2, 64); // BF16, and quantize_backward after it
    }
    op_floors.subject->device_close(op_floors.subject_device);
    op_floors.subject_device = builtin;
}

} // namespace ops

#endif
